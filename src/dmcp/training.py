"""Train and evaluate one network."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from dmcp.batches import Loader, check_parts, check_yields, device_of, input_of, length_of, on_device, size_of, widest
from dmcp.calibration import GATED, Forward
from dmcp.checkpoint import DONE, Checkpointer, ResumableIterator, State, seeded
from dmcp.errors import TrainingError
from dmcp.losses import (
    Accuracy,
    Loss,
    Metric,
    check_metric,
    classification_loss,
    distillation_loss,
    loss_of,
    mean,
    measure,
    whole_of,
)
from dmcp.modules import call_model, check_function, check_kind, check_kinds, check_module, kept_modes, tensors_in
from dmcp.progress import Update, each, overdue, phase, shown
from dmcp.runtime.distributed import (
    SINGLE_PROCESS,
    World,
    current,
    mean_gradients,
    mean_values,
    share_tensors,
    sum_values,
)
from dmcp.runtime.engine import (
    MakeOptimizer,
    ResolvedEngine,
    autocast,
    check_graphs,
    make_optimizer,
    rate_shares,
    set_lr,
    sgd,
    suits_kernels,
)
from dmcp.settings import Engine, Precision, TrainConfig

TRAIN = "train"  # the stage of a training by itself
_WINDOW = 100  # steps between two reads of the losses, at most: each read waits for the GPU
_LARGE = 2_000_000  # parameters from which a network is taken for one of large images
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned: the loss, the metric of the test, what makes the optimizer, and fresh weights."""

    loss: Loss | None = None  # (output, batch) -> scalar; cross-entropy of the labels
    metric: Metric | None = None  # (output, batch) -> (sum, count), or reset, update and compute; accuracy
    optimizer: MakeOptimizer | None = None  # parameter groups -> optimizer; SGD. Schedules set its learning rate
    fresh: nn.Module | None = None  # for prune: a newly built model, if `reinitialize` has no rule for some tensor

    def __post_init__(self) -> None:
        check_function("loss", self.loss)
        if self.metric is not None:
            whole_of(self.metric)  # refuses what is no metric


@dataclass(frozen=True)
class Event:
    """What a run reports while it goes on: each step, the result of the search, each row of the table."""

    stage: str  # "latency", "search", "test", or the network that is trained
    steps: int  # of this stage, in all; of latency: networks
    record: Any  # StepRecord, SearchRecord, SearchResult, Row or Latency


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How it is run: engine, checkpoints, and who hears of each step."""

    engine: Engine | None = None  # what is best for the device
    checkpointer: Checkpointer | None = None  # saves the state now and then, and resumes from it
    on_event: Callable[[Event], None] | None = None
    progress: bool | None = None  # show it on stderr; None: in a terminal or notebook
    name: str = ""  # of the stage

    def __post_init__(self) -> None:
        check_kinds({"engine": (self.engine, Engine), "checkpointer": (self.checkpointer, Checkpointer)})
        check_kinds({"progress": (self.progress, bool)})
        check_function("on_event", self.on_event)

    def emit(self, stage: str, steps: int, record: Any) -> None:
        """Report a record to whoever listens."""
        if self.on_event:
            self.on_event(Event(self.name or stage, steps, record))

    def stage(self, name: str) -> Runtime:
        """The same for one stage of a run: checkpoints in a folder of its own, events under its name."""
        return replace(self, name=name, checkpointer=self.checkpointer and self.checkpointer.stage(name))


# learning rates and what is trained


def cosine(step: int, total: int, start: float, end: float, warmup: float = 0, warmup_start: float = 0.0) -> float:
    """Learning rate of a step: a line from `warmup_start` to `start` over `warmup` steps, then a cosine to `end`."""
    if step < warmup:
        return warmup_start + (start - warmup_start) * step / warmup
    share = (step - warmup) / max(total - warmup, 1)
    return end + (start - end) * 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


def learning_rate(step: int, steps: int, batch_size: int, config: TrainConfig) -> float:
    """Learning rate of a step of this training: warm-up, cosine, and the scale of the batch."""
    scale = batch_size / config.reference_batch if config.reference_batch else 1.0
    warmup = config.warmup_epochs * steps / config.epochs
    return scale * cosine(step, steps, config.lr, config.min_lr, warmup, config.warmup_lr)


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Trained parameters for an optimizer, each once: weights decay; norms, biases and other vectors do not."""
    norms = {id(p) for part in model.modules() if isinstance(part, _NORMS) for p in part.parameters(recurse=False)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    plain = [parameter for parameter in trained if parameter.ndim < 2 or id(parameter) in norms]
    kept = {id(parameter) for parameter in plain}
    decayed = [parameter for parameter in trained if id(parameter) not in kept]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def check_trainable(model: nn.Module) -> None:
    """Refuse a network without parameters that can be trained."""
    check_module(model)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise TrainingError("The model is on the meta device, without values: call model.to_empty and load weights.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TrainingError("No parameter of the model has requires_grad: call model.requires_grad_(True).")


# the loop


@dataclass(frozen=True)
class StepRecord:
    """What one training step saw."""

    epoch: int  # from 0
    step: int  # from 0, over all epochs
    steps: int  # in all
    lr: float
    loss: float


@shown
def train(
    model: nn.Module,
    loader: Loader,
    config: TrainConfig,
    *,
    task: Task = Task(),
    runtime: Runtime = Runtime(),
    teacher: nn.Module | None = None,
    after_epoch: Callable[[int], None] | None = None,
) -> list[StepRecord]:
    """Train the model in place; afterwards it is in the mode that it was in.

    A loss or weight that is not finite stops the training with a TrainingError that says where, and leaves the model as
    it was when the losses were last read. The learning rate of each step is that of the config; ratios between the
    groups of an optimizer are kept. `teacher` is a trained network to learn from besides the labels. `after_epoch` gets
    the number of each epoch at its end, and may change weights in place.
    """
    check_kind("config", config, TrainConfig, TrainingError)
    check_function("after_epoch", after_epoch)
    check_trainable(model)
    _check_apart(model, teacher)
    check_graphs(runtime.engine, task.optimizer)
    if not length_of(loader):
        raise TrainingError("There is nothing to train on: the loader has no batches.")
    world, device, checkpointer = current(), device_of(model), runtime.checkpointer
    resolved = (runtime.engine or Engine()).resolve(
        device,
        steps=config.epochs * length_of(loader),
        large=sum(parameter.numel() for parameter in model.parameters()) >= _LARGE,
        plain=task.loss is None and task.optimizer is None and world.size == 1,
        suited=suits_kernels(model),
    )
    with kept_modes(model), _evaluating(teacher), seeded(config.seed, device, world), resolved.running(model):
        model.train()
        share_tensors([*model.parameters(), *model.buffers()], world)
        usual = partial(sgd, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, device=device)
        optimizer = make_optimizer(task.optimizer or usual, parameter_groups(model, config.weight_decay))
        shares = rate_shares(optimizer)
        loss = task.loss or classification_loss(config.label_smoothing)
        run_step = resolved.repeated(make_step(model, optimizer, loss, teacher, config, resolved, world))
        data = ResumableIterator(loader, resolved, world)
        steps = config.epochs * data.per_epoch
        log = Log(model, runtime, world)
        own = lambda: dict(model.named_buffers())  # noqa: E731
        state = State(dict(model.named_parameters()), own, [optimizer], [], [data], device)
        begin = _resume(checkpointer, state, log, world)
        with phase(runtime.name or TRAIN, steps, begin) as log.show:
            for step in range(begin, steps):
                (batch,) = data.next()
                rate = learning_rate(step, steps, data.samples([batch], world), config)
                set_lr(optimizer, rate, shares)
                log.add(run_step(batch), size_of(batch), epoch=step // data.per_epoch, step=step, steps=steps, lr=rate)
                if data.step % data.per_epoch == 0:
                    log.flush()
                    if after_epoch:
                        after_epoch(step // data.per_epoch)
                        log.begin(log.records)
                if checkpointer and (step + 1 == steps or checkpointer.due(step + 1, world)):
                    log.flush()
                    checkpointer.save(step + 1, state, {DONE: step + 1 == steps}, world)
        share_tensors(list(model.buffers()), world)
    optimizer.zero_grad(set_to_none=True)
    return log.records


def make_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    teacher: nn.Module | None,
    config: TrainConfig,
    resolved: ResolvedEngine,
    world: World = SINGLE_PROCESS,
) -> Callable[[Any], Tensor]:
    """What one training step does: batch -> loss; with a teacher, (1 - kd_weight) of it is the task's."""
    forward = resolved.compiled(lambda x: call_model(model, x))
    guide = resolved.compiled(lambda x: call_model(teacher, x)) if teacher is not None else None

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with resolved.autocast():
            output = forward(input_of(batch))
            value = loss_of(loss, output, batch)
            if guide is not None:
                with torch.no_grad():
                    target = tensors_in(guide(input_of(batch)))
                distilled = distillation_loss(output, target, config.kd_temperature)
                value = (1 - config.kd_weight) * value + config.kd_weight * distilled
        torch.autograd.backward(value)
        mean_gradients(model.parameters(), size_of(batch), world)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    return step


class Log:
    """Losses that wait on the device, and the last state in which everything was finite."""

    def __init__(self, model: nn.Module, runtime: Runtime, world: World) -> None:
        self.model, self.runtime, self.world = model, runtime, world
        self.show: Update = lambda done, text="": None
        self.waiting: list[tuple[Tensor, int, dict[str, Any]]] = []
        self.begin([])

    def begin(self, earlier: list[StepRecord]) -> None:
        """Go on after these records, from the state that the model now has."""
        self.records, self.read = earlier, time.monotonic()
        self._keep()

    def add(self, loss: Tensor, samples: int, **facts: Any) -> None:
        """Remember a step; read the losses once in a while."""
        self.waiting.append((loss, samples, facts))
        if len(self.waiting) == _WINDOW or overdue(self.read, loss.device):
            self.flush()

    def flush(self) -> None:
        """Read the waiting losses: the only place of the loop that waits for the device."""
        if not self.waiting:
            return
        finite = torch.stack([weight.detach().isfinite().all() for weight in self.model.parameters()]).all()
        wide = widest(self.waiting[0][0].device)
        losses = torch.stack([loss.to(wide) for loss, _, _ in self.waiting])
        samples = losses.new_tensor([samples for _, samples, _ in self.waiting])
        *values, good = torch.cat([mean_values(losses, samples, self.world), finite.to(losses).reshape(1)]).tolist()
        for (_, _, facts), value in zip(self.waiting, values, strict=True):
            if not math.isfinite(value):
                self._stop(f"the loss is {value}", facts)
        if not good:
            self._stop("a weight is no longer finite", self.waiting[-1][2])
        for (_, _, facts), value in zip(self.waiting, values, strict=True):
            self.records.append(StepRecord(loss=value, **facts))
            self.runtime.emit(TRAIN, facts["steps"], self.records[-1])
        self.waiting.clear()
        self.show(self.records[-1].step + 1, f"loss {value:.3f}")
        self.begin(self.records)

    def _keep(self) -> None:
        self.good = [tensor.detach().clone() for tensor in self._tensors()]

    def _tensors(self) -> list[Tensor]:
        """Looked up each time: a forward may put another tensor in the place of a buffer."""
        return [*self.model.parameters(), *self.model.buffers()]

    @torch.no_grad()
    def _stop(self, what: str, facts: dict[str, Any]) -> None:
        for tensor, good in zip(self._tensors(), self.good, strict=True):
            tensor.copy_(good)
        raise TrainingError(
            f"Training stopped at step {facts['step']} (epoch {facts['epoch']}, lr {facts['lr']:.4g}): {what}. The "
            f"model is back where it was before step {self.waiting[0][2]['step']}; a smaller lr often helps."
        )


def _resume(checkpointer: Checkpointer | None, state: State, log: Log, world: World) -> int:
    """The step to begin with, from a checkpoint if there is one."""
    saved = checkpointer.load(world) if checkpointer else None
    if saved is None or checkpointer is None:
        return 0
    state.restore(saved.tensors, [saved.step], world)
    earlier = checkpointer.earlier(checkpointer.name)
    log.begin([StepRecord(**record) for record in earlier if record["step"] < saved.step])
    return saved.step


def _check_apart(model: nn.Module, teacher: nn.Module | None) -> None:
    """Refuse a teacher that the training would change."""
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if teacher is not None and any(id(parameter) in trained for parameter in teacher.parameters()):
        raise TrainingError("The teacher has parameters in common with the network: give copy.deepcopy(teacher).")


@contextlib.contextmanager
def _evaluating(teacher: nn.Module | None) -> Any:
    """The teacher in eval mode, and afterwards as before."""
    with kept_modes(teacher) if teacher is not None else contextlib.nullcontext():
        if teacher is not None:
            teacher.eval()
        yield


# the test


def evaluate(
    model: nn.Module,
    loader: Iterable[Any],
    metric: Metric | None = None,
    forward: Forward | None = None,
    precision: Precision = Precision.FLOAT32,
) -> float:
    """Mean of the metric over all samples, by default the share of correct answers, 0 to 1; modes are kept.

    A metric that is an object with reset, update and compute gives the number itself. `forward` runs the network where
    that is not simply model(input), as in `recalibrate`.
    """
    return evaluate_counted(model, loader, metric, forward, precision)[0]


def evaluate_counted(
    model: nn.Module,
    loader: Iterable[Any],
    metric: Metric | None = None,
    forward: Forward | None = None,
    precision: Precision = Precision.FLOAT32,
) -> tuple[float, int]:
    """`evaluate`, and the number of samples; 0 if there are several answers per sample."""
    check_module(model)
    check_yields(loader)
    check_function("forward", forward, GATED)
    Engine(precision=precision)  # refuses others
    metric, own = Accuracy() if metric is None else metric, metric is not None
    world, device = current(), device_of(model)
    check_metric(metric, world)
    run = forward or (lambda x: call_model(model, x))
    whole, seen = whole_of(metric), 0
    if whole is not None:
        check_parts(loader, world)

    def pairs() -> Any:
        nonlocal seen
        for batch in (on_device(batch, device) for batch in each("test", loader)):
            if size := size_of(batch):  # of a small last batch some ranks have no part
                seen += size
                yield run(input_of(batch)), batch

    with kept_modes(model), torch.no_grad(), autocast(device, precision):
        model.eval()
        if whole is not None:
            value = measure(whole, pairs(), world)
        else:
            assert callable(metric)
            value = mean(metric, pairs(), device, world)
    answers = metric.answers if isinstance(metric, Accuracy) else 0
    if isinstance(metric, Accuracy):
        metric.warn()
    samples, given = sum_values(torch.tensor([seen, answers]), world).tolist()
    return value, samples if own or samples == given else 0
