"""The search: weights and alphas in turn (section 3.2)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from dmcp.arguments import checked
from dmcp.budgets import Budget
from dmcp.errors import TrainingError, WidthsError
from dmcp.markov import CERTAIN, group_sizes, merged, process_of
from dmcp.runtime.batches import Loader, device_of, length_of, size_of
from dmcp.runtime.checkpoint import DONE, ResumableIterator, State, seeded
from dmcp.runtime.distributed import current, share_tensors, sum_values
from dmcp.runtime.engine import ResolvedEngine, resolve
from dmcp.runtime.io import from_plain
from dmcp.runtime.progress import phase, shown
from dmcp.searching.budget import check_reachable, constant_alpha, front_alphas, parse_budget
from dmcp.searching.records import SearchRecord, SearchResult, Step, extremes, missed_budget
from dmcp.searching.steps import Setup, Steps, arch_gradient, as_loss
from dmcp.searching.subnets import Chains, chains, sort_channels
from dmcp.searching.supernet import Supernet
from dmcp.settings import Engine, Init, Precision, Sampling, SearchConfig
from dmcp.tracing.modules import modules_of, without_autocast
from dmcp.training.loop import Log, Runtime, Task, check_trainable, resume
from dmcp.training.losses import classification_loss, warn, warn_of_distillation
from dmcp.training.optimizer import cosine

SEARCH = "search"  # the stage of its events
LARGE = 100_000_000  # MACs of one sample from which a network is a large one


class SearchWarning(UserWarning):
    """A search whose expected cost ended far from its budget."""


@checked
@shown
@without_autocast
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
    if arch_loader is not None and not config.task_loss:
        raise TrainingError("With task_loss=False the alphas see no data: leave arch_loader out.")
    world, device, checkpointer = current(), device_of(net), runtime.checkpointer
    steps = config.epochs * -(-length_of(loader) // config.accumulate)
    resolved = runtime.resolve(net.model, task, steps, large=net.graph.macs() >= LARGE)
    with seeded(config.seed, device, world), resolved.running(net.model), uncounted(net.model):
        share_tensors([*net.model.parameters(), *net.model.buffers()], world)
        data = ResumableIterator(loader, resolved, world, config.accumulate)
        arch_data = data if arch_loader is None else ResumableIterator(arch_loader, resolved, world, config.accumulate)
        searcher = Searcher(net, config, data.per_epoch, task=task, engine=resolved)
        state = _state(searcher, [data] if arch_data is data else [data, arch_data])
        begin, facts, earlier = resume(checkpointer, state, world, searcher.warmup)
        searcher.scale = facts.get("scale", 0.0)
        emit = partial(runtime.emit, SEARCH, searcher.total)
        log = Log(net, config.log_every, lambda waiting: [step.read(world) for step in waiting], emit)
        log.begin([from_plain(SearchRecord, record) for record in earlier])
        with phase(runtime.name or SEARCH, searcher.total, begin) as log.show:
            for step in range(begin, searcher.total):
                searcher.at, batches = step, data.next()
                log.add(searcher.run(batches, None if arch_data is data else arch_data.next))
                if checkpointer and (step + 1 == searcher.total or checkpointer.due(step + 1, world)):
                    log.flush()
                    done = {"scale": searcher.scale, DONE: step + 1 == searcher.total}
                    checkpointer.save(step + 1, state, done, world)
            log.flush()
    found = replace(searcher.result(), log=tuple(log.records))
    runtime.emit(SEARCH, searcher.total, found)
    if world.first and (text := missed_budget(found)):
        warn(text, SearchWarning)
    return found


class Searcher:
    """A search that your own loop drives; `search` is such a loop.

    Either `step(batch)` does all of one step, or `weight_loss(batch)` and, after the warm-up, `arch_loss(batch)` give
    what your own optimizers of `net.weights()` and `net.alphas()` minimize. `result()` has the alphas at any time.
    """

    @checked
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
        if steps_per_epoch < 1:
            raise TrainingError(
                f"steps_per_epoch must be at least 1, not {steps_per_epoch}: has the loader no batches?"
            )
        trains = config.warmup_epochs or config.train_weights
        if trains or not torch.is_grad_enabled():
            check_trainable(net.model)
        if trains and config.distill:
            who, remedy = "The sub-networks learn from the full network's", "set distill=False in the SearchConfig"
            warn_of_distillation(task.loss, who, remedy)
        self.budget, self.chain = reach(net, config)
        self.per_epoch = steps_per_epoch
        self.total, self.warmup = steps_per_epoch * config.epochs, steps_per_epoch * config.warmup_epochs
        self.at = -1  # number of the current step
        self.scale = 0.0  # of the learning rates of the weights, by the size of the first batch
        self.growth = config.sharpen ** (1 / (self.total - self.warmup))
        self.generator = torch.Generator(device_of(net)).manual_seed(config.seed)  # the same on every rank
        _start(net, self.chain, self.budget, config)
        plain = Engine(precision=Precision.FLOAT32, compile=False, graphs=False, kernels=False)
        engine = engine or resolve(plain, device_of(net))
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
        return self.run([batch], None if arch_batch is None else lambda: [arch_batch]).read(self.world)

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
            why = "weight_loss(batch) begins a step" if self.at < 0 else f"Step {self.at} is in the warm-up"
            raise TrainingError(f"{why}: call arch_loss after it, and only if searcher.moves_alphas.")
        alpha = self.net.alpha
        before, alpha.grad = alpha.grad, None
        seen = arch_gradient(self.setup, [batch])
        gradient, alpha.grad = alpha.grad, before
        loss = self.config.budget_weight * seen.budget_loss
        return as_loss(loss if seen.task_loss is None else loss + seen.task_loss, [alpha], [gradient])

    def result(self) -> SearchResult:
        """The distribution of widths so far."""
        alphas, chain, config = self.net.alpha.detach().cpu().clone(), self.chain, self.config
        found = SearchResult(alphas, chain.sizes.cpu(), self.net.graph, self.budget, config.tolerance, config.align)
        return replace(found, process=chain.process)

    def state_dict(self) -> dict[str, Any]:
        """All that a search needs to go on, except for the data."""
        tensors = _state(self, []).collect(self.world)
        return {"tensors": tensors, "at": self.at, "scale": self.scale}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a searcher with the same settings was."""
        _state(self, []).restore(state["tensors"], [], self.world)
        self.at, self.scale = state["at"], state["scale"]

    def run(self, batches: list[Any], arch_batches: Callable[[], list[Any]] | None = None) -> Step:
        """The current step: stage 1 where the weights move, and stage 2 after the warm-up."""
        config, samples = self.config, sum(map(size_of, batches))
        lr, alpha_lr, losses, seen = None, None, None, None
        if not self.moves_alphas or config.train_weights:
            self.scale = self.scale or int(sum_values(torch.tensor([samples]), self.world)) / config.reference_batch
            lr = self.scale * cosine(self.at, self.total, config.lr, config.min_lr)
            losses = self.steps.train_weights(batches, self._sampling(), self.generator, lr)
        if self.moves_alphas:
            at, total = self.at - self.warmup, self.total - self.warmup
            alpha_lr = cosine(at, total, config.alpha_lr, config.alpha_min_lr)
            seen = self.steps.move_alphas(arch_batches() if arch_batches else batches, alpha_lr, self.growth)
        record = SearchRecord(self.at, self.at // self.per_epoch, lr=lr, alpha_lr=alpha_lr)
        return Step(record, samples, losses, seen)

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
        narrow = steps.narrow.skeleton.named_buffers() if steps.narrow else ()
        small = {f"narrow.{name}": tensor for name, tensor in narrow}
        return {f"model.{name}": tensor for name, tensor in net.model.named_buffers()} | small

    return State(shared, own, [steps.weights, steps.alphas], [searcher.generator], data, net.alpha.device)


# before the first step


def reach(net: Supernet, config: SearchConfig) -> tuple[Budget, Chains]:
    """The budget and the chains of a supernet that can reach it; an error if they do not fit together."""
    wanted = [list(group_sizes(it.size, config.groups, it.step(config.align))) for it in net.graph.spaces]
    if [[size for size in row if size] for row in net.sizes.tolist()] != wanted:
        wanted_net = f"Supernet(model, graph, groups={config.groups}, align={config.align})"
        raise WidthsError(f"The supernet has other groups than the settings: make it with {wanted_net}.")
    found = chains(net, process_of(config.independent), config.min_channels, config.max_channels, config.align)
    budget = parse_budget(config.budget, net.graph)
    check_reachable(budget, net.graph, *extremes(net.graph, found.sizes))
    if not found.sizes[:, 1:].any():
        raise WidthsError("There is nothing to search: no space has a second group; use more groups or other bounds.")
    return budget, found


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


@contextlib.contextmanager
def uncounted(model: nn.Module) -> Iterator[None]:
    """Switch off num_batches_tracked: with a momentum nothing reads it, and each update costs a kernel."""
    norms = [it for it in modules_of(model) if isinstance(it, _NormBase) and it.momentum is not None]
    counts = [norm.num_batches_tracked for norm in norms]
    for norm in norms:
        norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, count in zip(norms, counts, strict=True):
            norm.num_batches_tracked = count
