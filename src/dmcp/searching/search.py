"""The search: weights and alphas in turn (section 3.2)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from dmcp.arguments import checked
from dmcp.budgets import Budget
from dmcp.defaults import resolve_search
from dmcp.errors import DmcpWarning, TrainingError, WidthsError, warn
from dmcp.markov import CERTAIN, group_sizes, merged
from dmcp.runs.records import SearchRecord
from dmcp.runtime.batches import Loader, device_of, length_of, size_of
from dmcp.runtime.checkpoint import DONE, ResumableIterator, State, seeded
from dmcp.runtime.distributed import current, share_tensors, sum_values
from dmcp.runtime.engine import ResolvedEngine, resolve
from dmcp.runtime.io import from_plain
from dmcp.runtime.progress import phase, shown
from dmcp.searching.bounds import extreme_widths
from dmcp.searching.budget import check_reachable, constant_alpha, front_alphas, parse_budget
from dmcp.searching.records import SearchResult, UnreadStep, missed_budget
from dmcp.searching.steps import StepContext, Steps, arch_gradient, as_loss, mean_size
from dmcp.searching.subnets import Chains, make_chains, sort_by_importance
from dmcp.searching.supernet import Supernet
from dmcp.settings import (
    Distill,
    Engine,
    Init,
    Optimizer,
    Precision,
    ResolvedSearchConfig,
    Sampling,
    SearchConfig,
)
from dmcp.tracing.modules import modules_of, without_autocast
from dmcp.training.distillation import is_of_classes, warn_of_distillation
from dmcp.training.loop import Log, Runtime, Task, check_trainable, resume, with_distillation, with_optimizer
from dmcp.training.losses import classification_loss
from dmcp.training.optimizer import cosine

SEARCH = "search"  # the stage of its events
LARGE = 100_000_000  # MACs of one sample from which a network is a large one


class SearchWarning(DmcpWarning):
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
    task: Task | None = None,
    runtime: Runtime | None = None,
) -> SearchResult:
    """Train the supernet's weights and alphas in turn, in place; the alphas are the distribution of widths.

    With `arch_loader`, the alphas are trained on its batches instead. The same supernet, data, settings and device give
    bit-identical results; the random state of torch is left unchanged.

    Settings that you leave out are those for a network that is not trained, mostly the paper's: unlike `prune`, a
    search has no test images to see whether the model is trained. For a trained model, set at least warmup=0, sort=True
    and a small lr, or let `prune` choose.
    """
    task = task or Task()
    runtime = runtime or Runtime()
    if config.distill is not False:
        task = with_distillation(task, net.model, loader)
    config = _resolve(config, task)
    task = with_optimizer(task, config.optimizer)
    if arch_loader is not None and not config.task_loss:
        raise TrainingError("With task_loss=False the alphas see no data: leave arch_loader out.")
    world = current()
    step_count = config.epochs * -(-length_of(loader) // config.accumulate)
    engine = runtime.resolve(net.model, task, step_count, large=net.graph.macs() >= LARGE)
    with seeded(config.seed, device_of(net), world), engine.running(net.model), uncounted(net.model):
        share_tensors([*net.model.parameters(), *net.model.buffers()], world)
        data = ResumableIterator(loader, engine, world, config.accumulate)
        iterators = [data]
        next_arch_batches = None  # the alphas see the batches of the weights
        if arch_loader is not None:
            arch_data = ResumableIterator(arch_loader, engine, world, config.accumulate)
            iterators.append(arch_data)
            next_arch_batches = arch_data.next
        searcher = Searcher(net, config, data.per_epoch, task=task, engine=engine, batches=loader)

        # A run that was interrupted goes on at its last checkpoint.
        checkpointer = runtime.checkpointer
        state = _state(searcher, iterators)
        begin, progress, earlier_records = resume(checkpointer, state, world, searcher.warmup)
        searcher.scale = progress.get("scale", 0.0)

        # Losses stay on the device, and are read in bundles.
        emit = partial(runtime.emit, SEARCH, searcher.total)
        log = Log(net, config.log_every, lambda steps: [step.read(world) for step in steps], emit)
        log.begin([from_plain(SearchRecord, record) for record in earlier_records])

        with phase(runtime.name or SEARCH, searcher.total, begin) as show:
            log.show = show
            for step in range(begin, searcher.total):
                searcher.at = step
                batches = data.next()
                log.add(searcher.run(batches, next_arch_batches), batches)
                is_last = step + 1 == searcher.total
                if checkpointer and (is_last or checkpointer.due(step + 1, world)):
                    log.flush()
                    checkpointer.save(step + 1, state, {"scale": searcher.scale, DONE: is_last}, world)
            log.flush()

    result = replace(searcher.result(), log=tuple(log.records))
    runtime.emit(SEARCH, searcher.total, result)
    warning = missed_budget(result)
    if warning and world.first:
        warn(warning, SearchWarning)
    return result


def _resolve(config: SearchConfig, task: Task) -> ResolvedSearchConfig:
    """The settings with nothing left to choose: by default only class scores are distilled (REPORT.md, "denoiser")."""
    if config.distill is None:
        config = replace(config, distill=is_of_classes(task.distillation))
    return resolve_search(config)


class Searcher:
    """The steps of a search for your own training loop; `search` is such a loop.

    Either call `step(batch)` for a whole step; or minimize `weight_loss(batch)` and, after the warm-up,
    `arch_loss(batch)` with your own optimizers of `net.weights()` and `net.alphas()`. `result()` returns the alphas at
    any time.

    Your own optimizers have their own learning rates, momentum and weight decay: those of the settings, such as lr and
    alpha_lr, are for `step`. Settings that you leave out are those of `search`.
    """

    @checked
    def __init__(
        self,
        net: Supernet,
        config: SearchConfig,
        steps_per_epoch: int,
        *,
        task: Task | None = None,
        engine: ResolvedEngine | None = None,  # default: as plain PyTorch runs it
        batches: Iterable[Any] | None = None,  # to sort channels by; default: by the norms of their filters
    ) -> None:
        if steps_per_epoch < 1:
            raise TrainingError(f"steps_per_epoch must be at least 1, not {steps_per_epoch}: is the loader empty?")
        task = task or Task()
        config = _resolve(config, task)
        task = with_optimizer(task, config.optimizer)
        trains_weights = config.warmup_epochs > 0 or config.train_weights
        if trains_weights or not torch.is_grad_enabled():
            check_trainable(net.model)
        if trains_weights and config.distill and task.distillation is None:
            warn_of_distillation(
                "The sub-networks learn from the full network's", "set distill=False in the SearchConfig"
            )
        self.net = net
        self.config = config
        self.world = current()
        self.budget, self.chains = prepare_chains(net, config)
        self.steps_per_epoch = steps_per_epoch
        self.total = steps_per_epoch * config.epochs
        self.warmup = steps_per_epoch * config.warmup_epochs
        self.at = -1  # number of the current step
        self.scale = 0.0  # of the learning rates of the weights, by the size of the first batch
        self.growth = config.sharpen ** (1 / (self.total - self.warmup))  # of the alphas, in each step
        self.growth_is_due = False  # in your own loop: the alphas have moved, and have not grown yet
        self.generator = torch.Generator(device_of(net)).manual_seed(config.seed)  # the same on every rank
        _start(net, self.chains, self.budget, config, batches)

        if engine is None:
            float32 = Engine(precision=Precision.FLOAT32, compile=False, graphs=False, kernels=False)
            engine = resolve(float32, device_of(net))
        loss_sizes = None
        if task.loss is not None:
            loss_sizes = torch.zeros(2, dtype=net.alpha.dtype, device=net.alpha.device)
        self.context = StepContext(
            net=net,
            chains=self.chains,
            budget=self.budget,
            config=config,
            loss=task.loss or classification_loss(config.label_smoothing),
            distill=task.distillation or Distill.CLASSES,
            precision=engine.precision,
            world=self.world,
            loss_sizes=loss_sizes,
        )
        self.steps = Steps(self.context, engine, task.optimizer)

    @property
    def moves_alphas(self) -> bool:
        """True once the warm-up is over."""
        return self.at >= self.warmup

    def step(self, batch: Any, arch_batch: Any = None) -> SearchRecord:
        """Train the weights and, after the warm-up, move the alphas, as the settings say."""
        self._begin()
        if arch_batch is None:
            unread = self.run([batch])
        else:
            unread = self.run([batch], lambda: [arch_batch])
        return unread.read(self.world)

    def weight_loss(self, batch: Any) -> Tensor:
        """Begin a step: the summed losses of the largest, the smallest and some sampled sub-networks."""
        self._begin()
        self._sharpen()
        weights = [weight for weight in self.net.weights() if weight.requires_grad]
        losses, gradients = self.steps.weight_gradients(batch, self._sampling(), self.generator, weights)
        return as_loss(losses.sum(), weights, gradients)

    def arch_loss(self, batch: Any) -> Tensor:
        """Of the same step: the loss of the soft network and of the budget, with a gradient of the alphas alone.

        Your own loss counts relative to its mean size in the steps so far, so that its unit does not matter.
        """
        if not self.moves_alphas:
            why = f"Step {self.at} is in the warm-up"
            if self.at < 0:
                why = "weight_loss(batch) begins a step"
            raise TrainingError(f"{why}: call arch_loss after it, and only if searcher.moves_alphas.")

        # Your optimizer may have put a gradient there, which must not be counted twice.
        alpha = self.net.alpha
        gradient_before = alpha.grad
        alpha.grad = None
        record = arch_gradient(self.context, [batch])
        gradient = alpha.grad
        alpha.grad = gradient_before

        self.growth_is_due = self.growth > 1
        loss = self.config.budget_weight * record.budget_loss
        if record.task_loss is not None:
            task_loss = record.task_loss
            if self.context.loss_sizes is not None:
                task_loss = task_loss / mean_size(self.context.loss_sizes)
            loss = loss + task_loss
        return as_loss(loss, [alpha], [gradient])

    def result(self) -> SearchResult:
        """The distribution of widths so far."""
        self._sharpen()
        return SearchResult(
            alphas=self.net.alpha.detach().cpu().clone(),
            sizes=self.chains.sizes.cpu(),
            graph=self.net.graph,
            budget=self.budget,
            tolerance=self.config.tolerance,
            align=self.config.align,
        )

    def state_dict(self) -> dict[str, Any]:
        """All that a search needs to go on, except for the data."""
        tensors = _state(self, []).collect(self.world)
        return {"tensors": tensors, "at": self.at, "scale": self.scale, "growth_is_due": self.growth_is_due}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a searcher with the same settings was."""
        _state(self, []).restore(state["tensors"], [], self.world)
        self.at = state["at"]
        self.scale = state["scale"]
        self.growth_is_due = state["growth_is_due"]

    def run(self, batches: list[Any], next_arch_batches: Callable[[], list[Any]] | None = None) -> UnreadStep:
        """The current step: stage 1 where the weights move, and stage 2 after the warm-up."""
        config = self.config
        samples = sum(map(size_of, batches))
        record = SearchRecord(self.at, self.at // self.steps_per_epoch)

        weight_losses = None
        if not self.moves_alphas or config.train_weights:
            if not self.scale:
                self.scale = self._scale_of_rates(samples)
            lr = self.scale * cosine(self.at, self.total, config.lr, config.min_lr)
            weight_losses = self.steps.train_weights(batches, self._sampling(), self.generator, lr)
            record = replace(record, lr=lr)

        arch_record = None
        if self.moves_alphas:
            alpha_lr = cosine(self.at - self.warmup, self.total - self.warmup, config.alpha_lr, config.alpha_min_lr)
            if next_arch_batches is not None:
                batches = next_arch_batches()
            arch_record = self.steps.move_alphas(batches, alpha_lr, self.growth)
            record = replace(record, alpha_lr=alpha_lr)
        return UnreadStep(record, samples, weight_losses, arch_record)

    def _scale_of_rates(self, samples: int) -> float:
        """The factor of the learning rates of the weights: those of sgd grow with the batch of all ranks."""
        if self.config.optimizer is not Optimizer.SGD:
            return 1.0
        global_batch = int(sum_values(torch.tensor([samples]), self.world))
        return global_batch / self.config.reference_batch

    def _sharpen(self) -> None:
        """Let the alphas grow after a step of your own loop, once your optimizer has moved them."""
        if self.growth_is_due:
            with torch.no_grad():
                self.net.alpha.mul_(self.growth)
        self.growth_is_due = False

    def _begin(self) -> None:
        if self.at + 1 == self.total:
            raise TrainingError(
                f"All {self.total} steps ({self.config.epochs} epochs of {self.steps_per_epoch}) are done. "
                "Call result() to get the widths."
            )
        self.at += 1
        self.net.train()

    def _sampling(self) -> Sampling:
        if self.moves_alphas:
            return self.config.sampling
        return self.config.warmup_sampling


# checkpoints


def _state(searcher: Searcher, data: list[ResumableIterator]) -> State:
    """All that a checkpoint of a search holds."""
    net = searcher.net
    steps = searcher.steps
    shared: dict[str, Tensor] = {f"model.{name}": parameter for name, parameter in net.model.named_parameters()}
    shared["alpha"] = net.alpha
    if searcher.context.loss_sizes is not None:
        shared["loss_sizes"] = searcher.context.loss_sizes

    def buffers() -> dict[str, Tensor]:
        """Running statistics, which each rank has of its own."""
        tensors = {f"model.{name}": buffer for name, buffer in net.model.named_buffers()}
        if steps.narrow is not None:
            tensors |= {f"narrow.{name}": buffer for name, buffer in steps.narrow.skeleton.named_buffers()}
        return tensors

    optimizers = [steps.weight_optimizer, steps.alpha_optimizer]
    return State(shared, buffers, optimizers, [searcher.generator], data, net.alpha.device)


# before the first step


def prepare_chains(net: Supernet, config: ResolvedSearchConfig) -> tuple[Budget, Chains]:
    """The budget, and the chains of the supernet that can reach it; an error if they do not fit together."""
    groups = [list(group_sizes(space.size, config.groups, space.step(config.align))) for space in net.graph.spaces]
    groups_of_net = [[size for size in row if size] for row in net.sizes.tolist()]
    if groups_of_net != groups:
        raise WidthsError(
            "The supernet has other groups than the settings. Make it with "
            f"Supernet(model, graph, groups={config.groups}, align={config.align})."
        )
    chains = make_chains(net, config.min_channels, config.max_channels, config.align)
    budget = parse_budget(config.budget, net.graph)
    check_reachable(budget, net.graph, *extreme_widths(net.graph, chains.sizes), config.align)
    if not chains.sizes[:, 1:].any():
        raise WidthsError(
            "There is nothing to search: every space has only one group. Use more groups or wider bounds."
        )
    return budget, chains


@torch.no_grad()
def _start(
    net: Supernet, chains: Chains, budget: Budget, config: ResolvedSearchConfig, batches: Iterable[Any] | None
) -> None:
    """Sort the channels and set the alphas."""
    net.train()
    if config.sort:
        sort_by_importance(net, batches)
    certain = merged(net.sizes, chains.sizes)
    match config.init:
        case Init.FRONT:
            net.alpha.copy_(front_alphas(budget, net.graph, chains.sizes, certain))
        case Init.TARGET:
            net.alpha.fill_(constant_alpha(budget, net.graph, chains.sizes, certain))
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
    norms = [module for module in modules_of(model) if isinstance(module, _NormBase) and module.momentum is not None]
    counts = [norm.num_batches_tracked for norm in norms]
    for norm in norms:
        norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, count in zip(norms, counts, strict=True):
            norm.num_batches_tracked = count
