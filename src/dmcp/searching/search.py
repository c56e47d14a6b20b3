"""The search: weights and alphas in turn (section 3.2)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from dmcp.batches import Loader, device_of, input_of, length_of, size_of
from dmcp.budget import Budget, check_reachable, constant_alpha, front_alphas, parse
from dmcp.checkpoint import (
    DONE,
    Checkpointer,
    ResumableIterator,
    State,
    random_state,
    seeded,
    set_random_state,
)
from dmcp.errors import TrainingError, WidthsError
from dmcp.losses import classification_loss, warn_of_distillation
from dmcp.markov import CERTAIN, group_sizes, merged, process_of
from dmcp.modules import check_kind
from dmcp.preflight import check_forward
from dmcp.progress import phase, shown
from dmcp.runtime.distributed import World, current, share_tensors, sum_values
from dmcp.runtime.engine import ResolvedEngine, check_graphs, is_depthwise, is_narrow
from dmcp.searching.config import Log, SearchRecord, SearchResult, Step, as_record, extremes
from dmcp.searching.steps import ArchRecord, Setup, Steps, arch_gradient, as_loss
from dmcp.searching.subnets import Chains, chains, sort_channels
from dmcp.settings import Engine, Init, Precision, Sampling, SearchConfig
from dmcp.supernet import Supernet
from dmcp.training import Runtime, Task, check_trainable, cosine

SEARCH = "search"  # the stage of its events
LARGE = 100_000_000  # MACs of one sample from which a network is a large one


@shown
def search(
    net: Supernet,
    loader: Loader,
    config: SearchConfig,
    *,
    arch_loader: Loader | None = None,
    task: Task = Task(),
    runtime: Runtime = Runtime(),
) -> SearchResult:
    """Train the supernet's weights and alphas in turn, in place; the alphas are the distribution of widths.

    `arch_loader` gives the alphas batches of their own. The same supernet, data, settings and device end in the same
    bits; the random state of torch is left as it was.
    """
    if not isinstance(net, Supernet):
        raise TrainingError(f"A search needs a dmcp.Supernet(model, graph), not a {type(net).__name__}.")
    check_kind("config", config, SearchConfig, TrainingError)
    check_graphs(runtime.engine, task.optimizer)
    if arch_loader is not None and not config.task_loss:
        raise TrainingError("With task_loss=False the alphas see no data: leave arch_loader out.")
    _prepare(net, config)
    world, device = current(), device_of(net)
    if task.loss is not None and config.distill and (config.warmup_epochs or config.train_weights) and world.first:
        warn_of_distillation("The sub-networks learn from the full network's", "set distill=False in the SearchConfig")
    resolved = (runtime.engine or Engine()).resolve(
        device,
        steps=config.epochs * -(-length_of(loader) // config.accumulate),
        large=net.graph.macs() >= LARGE,
        plain=task.loss is None and task.optimizer is None and world.size == 1,
        narrow=is_narrow(net.model),
        depthwise=is_depthwise(net.model),
    )
    with seeded(config.seed, device, world), resolved.running(net.model), uncounted(net.model):
        share_tensors([*net.model.parameters(), *net.model.buffers()], world)
        data = ResumableIterator(loader, resolved, world, config.accumulate)
        arch_data = data if arch_loader is None else ResumableIterator(arch_loader, resolved, world, config.accumulate)
        searcher = Searcher(net, config, data.per_epoch, task=task, engine=resolved)
        state = _state(searcher, [data] if arch_data is data else [data, arch_data])
        log = Log(net, config.log_every, lambda record: runtime.emit(SEARCH, searcher.total, record), world)
        begin, searcher.scale = _resume(runtime.checkpointer, state, log, searcher.warmup, world)
        with phase(runtime.name or SEARCH, searcher.total, begin) as log.show:
            for step in range(begin, searcher.total):
                searcher.at, batches = step, data.next()
                if step == begin:
                    _check_first(net, batches)
                trained = searcher.train_weights(batches)
                moved = None
                if searcher.moves_alphas:
                    moved = searcher.move_alphas(batches if arch_data is data else arch_data.next())
                log.add(searcher.record(batches, trained, moved))
                checkpointer = runtime.checkpointer
                if checkpointer and (step + 1 == searcher.total or checkpointer.due(step + 1, world)):
                    log.flush()
                    facts = {"scale": searcher.scale, DONE: step + 1 == searcher.total}
                    checkpointer.save(step + 1, state, facts, world)
            log.flush()
    found = replace(searcher.result(), log=tuple(log.records))
    runtime.emit(SEARCH, searcher.total, found)
    return found


class Searcher:
    """A search that your own loop drives; `search` is such a loop.

    Either `step(batch)` does all of one step, or `weight_loss(batch)` and, after the warm-up, `arch_loss(batch)` give
    what your own optimizers of `net.weights()` and `net.alphas()` minimize. `result()` has the alphas at any time.
    """

    def __init__(
        self,
        net: Supernet,
        config: SearchConfig,
        steps_per_epoch: int,
        *,
        task: Task = Task(),
        engine: ResolvedEngine | None = None,  # default: as plain PyTorch runs it
    ) -> None:
        self.net, self.config, self.world = net, config, current()
        self.budget, self.chain = _prepare(net, config)
        self.per_epoch = steps_per_epoch
        self.total, self.warmup = steps_per_epoch * config.epochs, steps_per_epoch * config.warmup_epochs
        self.at = -1  # number of the current step
        self.scale = 0.0  # of the learning rates of the weights, by the size of the first batch
        self.growth = config.sharpen ** (1 / (self.total - self.warmup))
        self.generator = torch.Generator(device_of(net)).manual_seed(config.seed)  # the same on every rank
        _start(net, self.chain, self.budget, config)
        plain = Engine(precision=Precision.FLOAT32, compile=False, graphs=False, kernels=False)
        engine = engine or plain.resolve(device_of(net))
        loss = task.loss or classification_loss(config.label_smoothing)
        self.setup = Setup(net, self.chain, self.budget, config, loss, engine.precision, self.world)
        self.steps = Steps(self.setup, engine, task.optimizer)

    @property
    def moves_alphas(self) -> bool:
        """True once the warm-up is over."""
        return self.at >= self.warmup

    def step(self, batch: Any, arch_batch: Any = None) -> SearchRecord:
        """Train the weights and, after the warm-up, move the alphas, as the settings say."""
        self._begin()
        trained = self.train_weights([batch])
        moved = self.move_alphas([batch if arch_batch is None else arch_batch]) if self.moves_alphas else None
        return self.record([batch], trained, moved).read(self.world)

    def weight_loss(self, batch: Any) -> Tensor:
        """Begin a step: the summed losses of the largest, the smallest and some sampled sub-networks."""
        self._begin()
        if self.growth > 1 and self.at > self.warmup:  # your optimizer has moved the alphas since
            with torch.no_grad():
                self.net.alpha.mul_(self.growth)
        weights = [weight for weight in self.net.weights() if weight.requires_grad]
        losses, gradients = self.steps.weight_gradients(batch, self._sampling(), self.generator, weights)
        return as_loss(losses.sum(), weights, gradients)

    def arch_loss(self, batch: Any) -> Tensor:
        """Of the same step: the loss of the soft network and of the budget, with a gradient of the alphas alone."""
        if not self.moves_alphas:
            raise TrainingError(f"Step {self.at} is in the warm-up: call arch_loss only if searcher.moves_alphas.")
        loss, gradient = arch_gradient(self.setup, batch)
        return as_loss(loss, [self.net.alpha], [gradient])

    def result(self) -> SearchResult:
        """The distribution of widths so far."""
        return SearchResult(
            alphas=self.net.alpha.detach().cpu().clone(),
            sizes=self.chain.sizes.cpu(),
            graph=self.net.graph,
            budget=self.budget,
            tolerance=self.config.tolerance,
            align=self.config.align,
            process=self.chain.process,
        )

    def state_dict(self) -> dict[str, Any]:
        """All that a search needs to go on, except for the data."""
        return {
            "net": self.net.state_dict(),
            "narrow": self.steps.narrow_buffers(),
            "optimizers": [it.state_dict() for it in (self.steps.weights, self.steps.alphas)],
            "generator": self.generator.get_state(),
            "at": self.at,
            "scale": self.scale,
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a searcher with the same settings was."""
        self.net.load_state_dict(state["net"])
        for name, buffer in self.steps.narrow_buffers().items():
            buffer.copy_(state["narrow"][name])
        for optimizer, own in zip((self.steps.weights, self.steps.alphas), state["optimizers"], strict=True):
            optimizer.load_state_dict(own)
        self.generator.set_state(state["generator"])
        self.at, self.scale = state["at"], state["scale"]

    def train_weights(self, batches: list[Any]) -> tuple[float, Tensor] | None:
        """Stage 1 of the current step; its learning rate and losses, or None where the weights stay."""
        config = self.config
        if self.moves_alphas and not config.train_weights:
            return None
        self.scale = (
            self.scale
            or int(sum_values(torch.tensor([sum(map(size_of, batches))]), self.world)) / config.reference_batch
        )
        lr = self.scale * cosine(self.at, self.total, config.lr, config.min_lr)
        return lr, self.steps.train_weights(batches, self._sampling(), self.generator, lr)

    def move_alphas(self, batches: list[Any]) -> tuple[float, ArchRecord]:
        """Stage 2 of the current step; its learning rate and what it saw."""
        at, total = self.at - self.warmup, self.total - self.warmup
        lr = cosine(at, total, self.config.alpha_lr, self.config.alpha_min_lr)
        return lr, self.steps.move_alphas(batches, lr, self.growth)

    def record(
        self, batches: list[Any], trained: tuple[float, Tensor] | None, moved: tuple[float, ArchRecord] | None
    ) -> Step:
        """What the current step saw, still on the device."""
        (lr, losses), (alpha_lr, seen) = trained or (0.0, None), moved or (0.0, None)
        samples = sum(map(size_of, batches))
        return Step(self.at, self.at // self.per_epoch, samples, lr, losses, alpha_lr, seen)

    def _begin(self) -> None:
        if self.at + 1 == self.total:
            epochs = f"{self.config.epochs} epochs of {self.per_epoch}"
            raise TrainingError(f"All {self.total} steps are done, {epochs}: take result().")
        self.at += 1
        self.net.train()

    def _sampling(self) -> Sampling:
        return self.config.sampling if self.moves_alphas else self.config.warmup_sampling


# checkpoints


def _state(searcher: Searcher, data: list[ResumableIterator]) -> State:
    """All that a checkpoint of a search holds."""
    net, steps = searcher.net, searcher.steps
    shared = {f"model.{name}": tensor for name, tensor in net.model.named_parameters()} | {"alpha": net.alpha}

    def own() -> dict[str, Tensor]:
        small = {f"narrow.{name}": tensor for name, tensor in steps.narrow_buffers().items()}
        return {f"model.{name}": tensor for name, tensor in net.model.named_buffers()} | small

    return State(shared, own, [steps.weights, steps.alphas], [searcher.generator], data, net.alpha.device)


def _resume(checkpointer: Checkpointer | None, state: State, log: Log, warmup: int, world: World) -> tuple[int, float]:
    """The first step and the scale of the learning rate, from a checkpoint if there is one."""
    saved = checkpointer.load(world) if checkpointer else None
    if saved is None or checkpointer is None:
        return 0, 0.0
    state.restore(saved.tensors, [saved.step, max(0, saved.step - warmup)][: len(state.iterators)], world)
    log.begin([as_record(record) for record in checkpointer.earlier(checkpointer.name) if record["step"] < saved.step])
    return saved.step, saved.facts["scale"]


# before the first step


def _prepare(net: Supernet, config: SearchConfig) -> tuple[Budget, Chains]:
    """The budget and the chains; an error if they, the supernet and the settings do not fit together."""
    if config.warmup_epochs or config.train_weights:
        check_trainable(net.model)
    wanted = [list(group_sizes(it.size, config.groups, it.step(config.align))) for it in net.graph.spaces]
    if [[size for size in row if size] for row in net.sizes.tolist()] != wanted:
        raise WidthsError(
            "The supernet has other groups than the settings: make it with "
            f"Supernet(model, graph, groups={config.groups}, align={config.align})."
        )
    return reach(net, config)


def reach(net: Supernet, config: SearchConfig) -> tuple[Budget, Chains]:
    """The budget and the chains that can reach it; BudgetError if they cannot."""
    found = chains(net, process_of(config.independent), config.min_channels, config.max_channels, config.align)
    budget = parse(config.budget, net.graph)
    check_reachable(budget, net.graph, *extremes(net.graph, found.sizes))
    check_choice(found)
    return budget, found


def check_choice(chains: Chains) -> None:
    """Refuse chains that leave no choice."""
    if not chains.sizes[:, 1:].any():
        raise WidthsError(
            "There is nothing to search: no space has a second group. Use more groups, a smaller align, or other "
            "min_channels and max_channels."
        )


@torch.no_grad()
def _start(net: Supernet, chains: Chains, budget: Budget, config: SearchConfig) -> None:
    """Sort the channels and set the alphas."""
    net.train()
    if config.sort:
        sort_channels(net)
    certain = merged(net.sizes, chains.sizes)
    match config.init:
        case Init.FRONT:
            net.alpha.copy_(front_alphas(budget, net.graph, chains.sizes, chains.process, certain))
        case Init.TARGET:
            net.alpha.fill_(constant_alpha(budget, net.graph, chains.sizes, chains.process, certain))
        case Init.ZERO:
            net.alpha.zero_()
        case Init.RANDOM:  # made on the CPU: the same on every device
            net.alpha.copy_(torch.randn(net.alpha.shape, generator=torch.Generator().manual_seed(config.seed)))
        case Init.GIVEN:
            pass
    net.alpha.masked_fill_(certain, CERTAIN)  # where they stay, without a gradient


def _check_first(net: Supernet, batches: list[Any]) -> None:
    """Refuse a forward that writes into its input; random numbers and statistics stay as they are."""
    state = random_state(device_of(net))
    check_forward(net.model, input_of(batches[0]))
    set_random_state(state, device_of(net))


@contextlib.contextmanager
def uncounted(model: nn.Module) -> Iterator[None]:
    """Switch off num_batches_tracked: with a momentum nothing reads it, and each update costs a kernel."""
    norms = [it for it in model.modules() if isinstance(it, _NormBase) and it.momentum is not None]
    counts = [norm.num_batches_tracked for norm in norms]
    for norm in norms:
        norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, count in zip(norms, counts, strict=True):
            norm.num_batches_tracked = count
