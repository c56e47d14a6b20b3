"""The search: weights and alphas in turn (section 3.2)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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
from dmcp.preflight import check_input
from dmcp.runtime.distributed import World, current, share_tensors
from dmcp.runtime.engine import check_graphs, is_depthwise, is_narrow
from dmcp.searching.config import Log, SearchResult, Step, as_record, extremes
from dmcp.searching.steps import Setup, Steps
from dmcp.searching.subnets import Chains, chains, sort_channels
from dmcp.settings import Engine, Init, SearchConfig
from dmcp.supernet import Supernet
from dmcp.training import Runtime, Task, check_trainable, cosine

SEARCH = "search"  # the stage of its events
LARGE = 100_000_000  # MACs of one sample from which a network is a large one


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
    budget, chain = _prepare(net, config, arch_loader)
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
        generator = torch.Generator(device).manual_seed(config.seed)  # the same on every rank
        share_tensors([*net.model.parameters(), *net.model.buffers()], world)
        data = ResumableIterator(loader, resolved, world, config.accumulate)
        arch_data = data if arch_loader is None else ResumableIterator(arch_loader, resolved, world, config.accumulate)
        total, warmup = data.per_epoch * config.epochs, data.per_epoch * config.warmup_epochs
        _start(net, chain, budget, config)
        loss = task.loss or classification_loss(config.label_smoothing)
        steps = Steps(Setup(net, chain, budget, config, loss, resolved.precision, world), resolved, task.optimizer)
        state = _state(net, steps, generator, [data] if arch_data is data else [data, arch_data])
        log = Log(net, config.log_every, lambda record: runtime.emit(SEARCH, total, record), world)
        growth = config.sharpen ** (1 / (total - warmup))
        begin, scale = _resume(runtime.checkpointer, state, log, warmup, world)
        for step in range(begin, total):
            losses, moved, lr, alpha_lr, batches = None, None, 0.0, 0.0, data.next()
            if step == begin:
                _check_first(net, batches)
            if step < warmup or config.train_weights:  # stage 1
                scale = scale or data.samples(batches, world) / config.reference_batch
                lr = scale * cosine(step, total, config.lr, config.min_lr)
                sampling = config.warmup_sampling if step < warmup else config.sampling
                losses = steps.train_weights(batches, sampling, generator, lr)
            if step >= warmup:  # stage 2
                alpha_lr = cosine(step - warmup, total - warmup, config.alpha_lr, config.alpha_min_lr)
                moved = steps.move_alphas(batches if arch_data is data else arch_data.next(), alpha_lr, growth)
            log.add(Step(step, step // data.per_epoch, sum(map(size_of, batches)), lr, losses, alpha_lr, moved))
            checkpointer = runtime.checkpointer
            if checkpointer and (step + 1 == total or checkpointer.due(step + 1, world)):
                log.flush()
                checkpointer.save(step + 1, state, {"scale": scale, DONE: step + 1 == total}, world)
        log.flush()
    found = SearchResult(
        alphas=net.alpha.detach().cpu().clone(),
        sizes=chain.sizes.cpu(),
        graph=net.graph,
        budget=budget,
        tolerance=config.tolerance,
        align=config.align,
        log=tuple(log.records),
        process=chain.process,
    )
    runtime.emit(SEARCH, total, found)
    return found


# checkpoints


def _state(net: Supernet, steps: Steps, generator: torch.Generator, data: list[ResumableIterator]) -> State:
    """All that a checkpoint of a search holds."""
    shared = {f"model.{name}": tensor for name, tensor in net.model.named_parameters()} | {"alpha": net.alpha}
    narrow = dict(steps.narrow.skeleton.named_buffers()) if steps.narrow else {}

    def own() -> dict[str, Tensor]:
        small = {f"narrow.{name}": tensor for name, tensor in narrow.items()}
        return {f"model.{name}": tensor for name, tensor in net.model.named_buffers()} | small

    optimizers = [steps.weights, steps.alphas]
    return State(shared, own, optimizers, [generator], data, net.alpha.device)


def _resume(checkpointer: Checkpointer | None, state: State, log: Log, warmup: int, world: World) -> tuple[int, float]:
    """The first step and the scale of the learning rate, from a checkpoint if there is one."""
    saved = checkpointer.load(world) if checkpointer else None
    if saved is None or checkpointer is None:
        return 0, 0.0
    state.restore(saved.tensors, [saved.step, max(0, saved.step - warmup)][: len(state.iterators)], world)
    log.begin([as_record(record) for record in checkpointer.earlier(checkpointer.name) if record["step"] < saved.step])
    return saved.step, saved.facts["scale"]


# before the first step


def _prepare(net: Supernet, config: SearchConfig, arch_loader: Loader | None) -> tuple[Budget, Chains]:
    """The budget and the chains; an error if they, the supernet and the settings do not fit together."""
    if arch_loader is not None and not config.task_loss:
        raise TrainingError("With task_loss=False the alphas see no data: leave arch_loader out.")
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
            start = front_alphas(budget, net.graph, chains.sizes, chains.process, certain, config.alpha_slope)
            net.alpha.copy_(start)
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
    check_input(net.model, input_of(batches[0]))
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
