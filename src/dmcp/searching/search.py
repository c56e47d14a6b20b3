"""The search: weights and alphas in turn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from dmcp.batches import Loader, device_of, input_of, length_of, size_of
from dmcp.budget import Budget, check_reachable, constant_alpha, parse
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
from dmcp.losses import Loss, classification_loss, warn_of_distillation
from dmcp.markov import CERTAIN, group_sizes, merged, process_of
from dmcp.modules import check_functions, check_kind, check_kinds
from dmcp.preflight import check_input
from dmcp.runtime.distributed import SINGLE_PROCESS, World, current, share_tensors
from dmcp.runtime.engine import (
    MakeOptimizer,
    ResolvedEngine,
    check_graphs,
    is_depthwise,
    is_narrow,
    make_optimizer,
    rate_shares,
    set_lr,
    sgd,
)
from dmcp.searching.config import SearchRecord, SearchResult, extremes
from dmcp.searching.steps import ArchRecord, Log, Passes, Sliced, Step, Subnet, WeightRecord, arch_step, weight_step
from dmcp.searching.subnets import Chains, Stem, chains, find_stem, sample_gates, sort_channels
from dmcp.settings import Engine, Init, Sampling, SearchConfig
from dmcp.supernet import Narrow, Supernet, run_folded
from dmcp.training import check_trainable, cosine, parameter_groups

LARGE = 100_000_000  # macs of one sample from which a network is a large one


def search(
    net: Supernet,
    loader: Loader,
    config: SearchConfig,
    loss: Loss | None = None,
    arch_loader: Loader | None = None,
    on_record: Callable[[SearchRecord], None] | None = None,
    engine: Engine | None = None,
    checkpointer: Checkpointer | None = None,
    optimizer: MakeOptimizer | None = None,
) -> SearchResult:
    """Train the supernet's weights and alphas, in place; the alphas then say which widths keep the budget best.

    `arch_loader` gives the alphas batches of their own; `on_record` sees each record once it has left the device.
    The same supernet, data, settings and device end in the same bits; the random state of torch is left as it was. With
    a `keeper` the search saves its state now and then, and begins where the keeper's last checkpoint is. `optimizer`
    makes one for the weights of their parameter groups, in the place of SGD; the config has its learning rate,
    and the ratios between its groups are kept.
    """
    if not isinstance(net, Supernet):
        raise TrainingError(f"A search needs a dmcp.Supernet(model, graph), not a {type(net).__name__}.")
    check_kind("config", config, SearchConfig, TrainingError)
    check_kinds({"engine": (engine, Engine), "checkpointer": (checkpointer, Checkpointer)})
    check_functions({"loss": loss, "on_record": on_record})
    check_graphs(engine, optimizer)
    budget, path = _prepare(net, config, arch_loader)
    world, device = current(), device_of(net)
    trains = config.warmup_epochs or config.train_weights
    if loss is not None and config.distill and trains and world.first:
        who, remedy = "The sub-networks imitate the whole network's", "set distill=False in the SearchConfig"
        warn_of_distillation(who, remedy)
    steps = config.epochs * -(-length_of(loader) // config.accumulate)
    resolved = (engine or Engine()).resolve(
        device,
        steps=steps,
        large=net.graph.macs() >= LARGE,
        plain=loss is None and optimizer is None and world.size == 1,
        narrow=is_narrow(net.model),
        depthwise=is_depthwise(net.model),
    )
    with seeded(config.seed, device, world), resolved.running(net.model), uncounted(net.model):
        generator = torch.Generator(device).manual_seed(config.seed)  # the same on every rank
        share_tensors([*net.model.parameters(), *net.model.buffers()], world)
        feed = ResumableIterator(loader, resolved, world, config.accumulate)
        held_out = feed if arch_loader is None else ResumableIterator(arch_loader, resolved, world, config.accumulate)
        total, first = feed.per_epoch * config.epochs, feed.per_epoch * config.warmup_epochs
        _start(net, path, budget, config)
        stages = Steps(net, path, config, budget, loss, resolved, world, optimizer)
        state = _state(net, stages, generator, [feed] if held_out is feed else [feed, held_out])
        log = Log(net, config.log_every, on_record, world)
        begin, scale = _resume(checkpointer, state, log, first, world)
        for step in range(begin, total):
            trained, moved, lr, alpha_lr, batches = None, None, 0.0, 0.0, feed.next()
            if step == begin:
                _check_first(net, batches)
            if step < first or config.train_weights:
                scale = scale or feed.samples(batches, world) / config.reference_batch
                lr = scale * cosine(step, total, config.lr, config.min_lr)
                sampling = config.warmup_sampling if step < first else config.sampling
                trained = stages.train_weights(batches, sampling, generator, lr)
            if step >= first:
                alpha_lr = cosine(step - first, total - first, config.alpha_lr, config.alpha_min_lr)
                moved = stages.move_alphas(batches if held_out is feed else held_out.next(), alpha_lr)
            samples = sum(map(size_of, batches))
            log.add(Step(step, step // feed.per_epoch, samples, lr, trained, alpha_lr, moved))
            _keep(checkpointer, step + 1, total, state, log, scale, world)
        log.flush()
    alpha, sizes = net.alpha.detach().cpu().clone(), path.sizes.cpu()
    return SearchResult(
        alpha,
        sizes,
        net.graph,
        budget,
        config.tolerance,
        config.align,
        tuple(log.records),
        process_of(config.independent),
    )


# leaving and entering


def _state(net: Supernet, stages: Steps, generator: torch.Generator, feeds: list[ResumableIterator]) -> State:
    shared = {f"model.{name}": tensor for name, tensor in net.model.named_parameters()} | {"alpha": net.alpha}
    narrow = dict(stages.narrow.skeleton.named_buffers()) if stages.narrow else {}

    def own() -> dict[str, Tensor]:
        small = {f"narrow.{name}": tensor for name, tensor in narrow.items()}
        return {f"model.{name}": tensor for name, tensor in net.model.named_buffers()} | small

    optimizers = [stages.weights, stages.alphas]
    return State(shared, own, optimizers, [generator], feeds, net.alpha.device)


def _resume(checkpointer: Checkpointer | None, state: State, log: Log, first: int, world: World) -> tuple[int, float]:
    """The step to begin with and the scale of the learning rate, brought back from a checkpoint if there is one."""
    saved = checkpointer.load(world) if checkpointer else None
    if saved is None or checkpointer is None:
        return 0, 0.0
    state.restore(saved.tensors, [saved.step, max(0, saved.step - first)][: len(state.iterators)], world)
    log.begin([record for record in checkpointer.earlier(checkpointer.name) if record["step"] < saved.step])
    return saved.step, saved.facts["scale"]


def _keep(
    checkpointer: Checkpointer | None, step: int, total: int, state: State, log: Log, scale: float, world: World
) -> None:
    """Save the state after so many steps, if it is time to; all records are out before."""
    done = step == total
    if checkpointer is not None and (done or checkpointer.due(step, world)):
        log.flush()
        checkpointer.save(step, state, {"scale": scale, DONE: done}, world)


class Steps:
    """The two stages with everything that stays the same from step to step: networks, optimizers, settings."""

    def __init__(
        self,
        net: Supernet,
        path: Chains,
        config: SearchConfig,
        budget: Budget,
        loss: Loss | None,
        resolved: ResolvedEngine,
        world: World = SINGLE_PROCESS,
        optimizer: MakeOptimizer | None = None,
    ) -> None:
        self.net, self.path, self.config = net, path, config
        loss = classification_loss(config.label_smoothing) if loss is None else loss
        device = resolved.device
        groups = parameter_groups(net.model, config.weight_decay)
        usual = partial(sgd, lr=config.lr, momentum=config.momentum, nesterov=config.momentum > 0, device=device)
        self.weights = make_optimizer(optimizer or usual, groups)
        self.shares = rate_shares(self.weights)
        self.alphas = sgd(net.alphas(), config.alpha_lr, config.alpha_momentum, config.alpha_momentum > 0, device)
        whole = resolved.compiled(lambda x, folded: run_folded(net.model, x, folded))
        soft, plain = (Passes(resolved.compiled(net.fold), whole) for _ in range(2))
        stem = find_stem(net) if net.graph.exact else None
        split = Passes(plain.fold, resolved.compiled(stem.tail), resolved.compiled(stem.head)) if stem else plain
        floor = net.hard(path.sizes[:, 0])
        smallest: Subnet = floor
        self.narrow: Narrow | None = None
        if net.graph.exact and not any(recording.caches for recording in net.graph.recordings):
            align = 8 if device.type == "cuda" else 1  # what tensor cores want
            self.narrow = _narrow(net, path, align, stem)
            run, channels = resolved.compiled(self.narrow), self.narrow.channels
            smallest = run if channels is None else Sliced(run, channels)
        self.largest = net.hard(path.sizes.sum(dim=1))
        unbounded = bool(self.largest.all())

        def stage1(batches: list[Any], gates: Tensor) -> Tensor:
            usual = stem is None or all(stem.fits(input_of(batch)) for batch in batches)
            passes = split if usual else plain
            largest: Subnet = self.largest
            if unbounded:  # nothing is gated
                largest = lambda x, h: passes.run(x, *(() if h is None else (h,)), net.unfolded())  # noqa: E731
            subnets = [largest, smallest if usual else floor, *gates.unbind()]
            rules = (loss, config.distill, resolved.precision)
            return weight_step(net, batches, self.weights, subnets, *rules, passes, world).losses

        def stage2(batches: list[Any]) -> tuple[Tensor | None, Tensor, Tensor]:
            task, pull = loss if config.task_loss else None, (budget, config.budget_weight, config.tolerance)
            moved = arch_step(net, batches, self.alphas, path, task, *pull, resolved.precision, soft, world)
            return moved.task_loss, moved.budget_loss, moved.ratios

        self.stage1, self.stage2 = resolved.repeated(stage1), resolved.repeated(stage2)

    def train_weights(
        self, batches: list[Any], sampling: Sampling, generator: torch.Generator, lr: float
    ) -> WeightRecord:
        """Stage 1 with newly drawn sub-networks."""
        gates = sample_gates(self.net, self.path, sampling, self.config.subnets, generator)
        set_lr(self.weights, lr, self.shares)
        return WeightRecord(self.stage1(batches, torch.stack(gates) if gates else self.largest[None][:0]))

    def move_alphas(self, batches: list[Any], lr: float) -> ArchRecord:
        """Stage 2."""
        set_lr(self.alphas, lr)
        return ArchRecord(*self.stage2(batches))


# before the first step


def _prepare(net: Supernet, config: SearchConfig, arch_loader: Loader | None) -> tuple[Budget, Chains]:
    """The budget and the chains, once it is sure that they, the supernet and the settings fit together."""
    if arch_loader is not None and not config.task_loss:
        raise TrainingError("With task_loss=False the alphas see no data: leave arch_loader out.")
    if config.warmup_epochs or config.train_weights:
        check_trainable(net.model)
    wanted = [list(group_sizes(it.size, config.groups, it.step(config.align))) for it in net.graph.spaces]
    if [[size for size in row if size] for row in net.sizes.tolist()] != wanted:
        raise WidthsError(
            f"The supernet was made with other groups than the settings say: set them as it has them, or make it with "
            f"Supernet(model, graph, groups={config.groups}, align={config.align})."
        )
    return reach(net, config)


def reach(net: Supernet, config: SearchConfig) -> tuple[Budget, Chains]:
    """The budget and the chains that can reach it; an error with what they reach if they cannot."""
    path = chains(net, process_of(config.independent), config.min_channels, config.max_channels, config.align)
    budget = parse(config.budget, net.graph)
    check_reachable(budget, net.graph, *extremes(net.graph, path.sizes))
    check_choice(path)
    return budget, path


def check_choice(path: Chains) -> None:
    """Refuse chains that leave no choice."""
    if not path.sizes[:, 1:].any():
        raise WidthsError(
            "There is nothing to search: no space has a second group; use more groups, a smaller align, or other "
            "smallest and largest widths."
        )


def _narrow(net: Supernet, path: Chains, align: int, stem: Stem | None) -> Narrow:
    """The smallest sub-network as a narrow one."""
    border = (stem.paths, stem.value) if stem else ()
    return Narrow(net, extremes(net.graph, path.sizes)[0], align, *border)


@torch.no_grad()
def _start(net: Supernet, path: Chains, budget: Budget, config: SearchConfig) -> None:
    """Bring the supernet to where the search starts."""
    net.train()
    if config.sort:
        sort_channels(net)
    certain = merged(net.sizes, path.sizes)
    match config.init:
        case Init.TARGET:
            start = constant_alpha(budget, net.graph, path.sizes, process=path.process, certain=certain)
            net.alpha.fill_(start)
        case Init.ZERO:
            net.alpha.zero_()
        case Init.RANDOM:  # drawn on the CPU: the same on every device
            net.alpha.copy_(torch.randn(net.alpha.shape, generator=torch.Generator().manual_seed(config.seed)))
        case Init.GIVEN:
            pass
    net.alpha.masked_fill_(certain, CERTAIN)  # where they stay: a step without a slope does not move


def _check_first(net: Supernet, batches: list[Any]) -> None:
    """Refuse a forward that writes into its input; no random number and no statistic is another one afterwards."""
    state = random_state(device_of(net))
    check_input(net.model, input_of(batches[0]))
    set_random_state(state, device_of(net))


@contextlib.contextmanager
def uncounted(model: nn.Module) -> Iterator[None]:
    """BatchNorms count no batches meanwhile: with a momentum nothing reads the count, and each one is a kernel."""
    norms = [it for it in model.modules() if isinstance(it, _NormBase) and it.momentum is not None]
    counts = [norm.num_batches_tracked for norm in norms]
    for norm in norms:
        norm.num_batches_tracked = None
    try:
        yield
    finally:
        for norm, count in zip(norms, counts, strict=True):
            norm.num_batches_tracked = count
