"""Train and evaluate one network."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from dmcp.arguments import checked
from dmcp.errors import TrainingError
from dmcp.runtime.batches import Loader, check_parts, device_of, input_of, length_of, on_device, size_of, widest
from dmcp.runtime.checkpoint import DONE, Checkpointer, ResumableIterator, State, seeded
from dmcp.runtime.distributed import World, current, mean_gradients, mean_values, share_tensors, sum_values
from dmcp.runtime.engine import MakeOptimizer, ResolvedEngine, make_optimizer, rate_shares, set_lr, sgd, suits_kernels
from dmcp.runtime.progress import Update, each, overdue, phase, shown
from dmcp.settings import Engine, TrainConfig
from dmcp.tracing.modules import call_model, kept_modes, modules_of, tensors_in, without_autocast
from dmcp.training import losses
from dmcp.training.calibration import Forward
from dmcp.training.losses import Loss, Metric, check_metric, classification_loss, distillation_loss, loss_of, top1

TRAIN = "train"  # the stage of a training by itself
_WINDOW = 100  # steps between two reads of the losses, at most: each read waits for the GPU
_LARGE = 2_000_000  # parameters from which a network is taken for one of large images
_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@checked
@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned: the loss, the metric of the test, what makes the optimizer, and fresh weights."""

    loss: Loss | None = None  # (output, batch) -> scalar; cross-entropy of the labels
    metric: Metric | None = None  # (output, batch) -> (sum, count), or reset, update and compute; accuracy, or the loss
    optimizer: MakeOptimizer | None = None  # parameter groups -> optimizer; SGD. Schedules set its learning rate
    fresh: nn.Module | None = None  # for prune: a newly built model, if `reinitialize` has no rule for some tensor


@dataclass(frozen=True)
class Event:
    """What a run reports while it goes on: each step, the result of the search, each row of the table."""

    stage: str  # "latency", "search", "test", or the network that is trained
    steps: int  # of this stage, in all; of latency: networks
    record: Any  # StepRecord, SearchRecord, SearchResult, Row or Latency


@checked
@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How it is run: engine, checkpoints, and who hears of each step."""

    engine: Engine | None = None  # what is best for the device
    checkpointer: Checkpointer | None = None  # saves the state now and then, and resumes from it
    on_event: Callable[[Event], None] | None = None
    progress: bool | None = None  # show it on stderr; None: in a terminal or notebook
    name: str = ""  # of the stage

    def emit(self, stage: str, steps: int, record: Any) -> None:
        """Report a record to whoever listens."""
        if self.on_event:
            self.on_event(Event(self.name or stage, steps, record))

    def stage(self, name: str) -> Runtime:
        """The same for one stage of a run: checkpoints in a folder of its own, events under its name."""
        return replace(self, name=name, checkpointer=self.checkpointer and self.checkpointer.stage(name))

    def resolve(self, model: nn.Module, task: Task, steps: int, large: bool) -> ResolvedEngine:
        """The engine for so many steps of a model."""
        if task.optimizer is not None and self.engine is not None and self.engine.graphs:  # they replay its first rate
            raise TrainingError("Steps with an optimizer of your own cannot be CUDA graphs: leave graphs out.")
        return (self.engine or Engine()).resolve(
            device_of(model),
            steps=steps,
            large=large,
            plain=task.loss is None and task.optimizer is None and current().size == 1,
            suited=suits_kernels(model),
        )


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
    norms = {id(p) for part in modules_of(model) if isinstance(part, _NORMS) for p in part.parameters(recurse=False)}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    plain = [parameter for parameter in trained if parameter.ndim < 2 or id(parameter) in norms]
    kept = {id(parameter) for parameter in plain}
    decayed = [parameter for parameter in trained if id(parameter) not in kept]
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]


def check_trainable(model: nn.Module) -> None:
    """Refuse a network without parameters that can be trained, and a place where nothing can be."""
    if not torch.is_grad_enabled():
        raise TrainingError("Gradients are switched off here (torch.no_grad, torch.inference_mode): call it outside.")
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

    @property
    def text(self) -> str:
        """Its loss, for people who watch."""
        return f"loss {self.loss:.3f}"

    @property
    def losses(self) -> dict[str, tuple[float, ...]]:
        """What must be finite."""
        return {"": (self.loss,)}


@checked
@shown
@without_autocast
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
    check_trainable(model)
    _check_apart(model, teacher)
    if not length_of(loader):
        raise TrainingError("There is nothing to train on: the loader has no batches.")
    world, device, checkpointer = current(), device_of(model), runtime.checkpointer
    if teacher is not None and not runtime.name:  # prune warns before the search
        losses.warn_of_distillation(task.loss, "The network learns from the teacher's", "leave the teacher out")
    large = sum(parameter.numel() for parameter in model.parameters()) >= _LARGE
    resolved = runtime.resolve(model, task, config.epochs * length_of(loader), large)
    guides = nn.ModuleList([] if teacher is None else [teacher])
    with kept_modes(model), kept_modes(guides), seeded(config.seed, device, world), resolved.running(model):
        model.train()
        guides.eval()
        share_tensors([*model.parameters(), *model.buffers()], world)
        usual = partial(sgd, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, device=device)
        optimizer = make_optimizer(task.optimizer or usual, parameter_groups(model, config.weight_decay))
        shares = rate_shares(optimizer)
        loss = task.loss or classification_loss(config.label_smoothing)
        run_step = resolved.repeated(make_step(model, optimizer, loss, teacher, config, resolved))
        data = ResumableIterator(loader, resolved, world)
        steps = config.epochs * data.per_epoch
        own = lambda: dict(model.named_buffers())  # noqa: E731
        state = State(dict(model.named_parameters()), own, [optimizer], [], [data], device)
        begin, _, earlier = resume(checkpointer, state, world)
        log = Log(model, _WINDOW, partial(_read, world=world), lambda record: runtime.emit(TRAIN, steps, record))
        log.begin([StepRecord(**record) for record in earlier])
        with phase(runtime.name or TRAIN, steps, begin) as log.show:
            for step in range(begin, steps):
                (batch,) = data.next()
                rate = learning_rate(step, steps, data.samples([batch], world), config)
                set_lr(optimizer, rate, shares)
                facts = {"epoch": step // data.per_epoch, "step": step, "steps": steps, "lr": rate}
                log.add((run_step(batch), size_of(batch), facts))
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
        mean_gradients(model.parameters(), size_of(batch), current())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    return step


def _read(waiting: list[tuple[Tensor, int, dict[str, Any]]], world: World) -> list[StepRecord]:
    """Losses and what is known of their steps as records, means over all ranks; waits for the device."""
    seen = torch.stack([loss.to(widest(loss.device)) for loss, _, _ in waiting])
    samples = seen.new_tensor([samples for _, samples, _ in waiting])
    values = mean_values(seen, samples, world).tolist()
    return [StepRecord(loss=value, **facts) for (_, _, facts), value in zip(waiting, values, strict=True)]


class Log:
    """Records whose numbers wait on the device; where one is not finite, the last good state comes back."""

    def __init__(
        self, net: nn.Module, every: int, read: Callable[[list[Any]], list[Any]], on_record: Callable[[Any], None]
    ) -> None:
        self.net, self.every, self.read, self.on_record = net, every, read, on_record
        self.device, self.waiting = device_of(net), list[Any]()
        self.show: Update = lambda done, text="": None

    def begin(self, earlier: list[Any]) -> None:
        """Go on after these records, from the state that the network now has."""
        self.records, self.since = earlier, time.monotonic()
        self.good = [tensor.detach().clone() for tensor in self._tensors()]

    def add(self, step: Any) -> None:
        """Remember what a step saw; read it once in a while."""
        self.waiting.append(step)
        if len(self.waiting) == self.every or overdue(self.since, self.device):
            self.flush()

    def flush(self) -> None:
        """Read what waits: the only place of the loop that waits for the device."""
        if not self.waiting:
            return
        read, self.waiting = self.read(self.waiting), []
        for record in read:
            for where, found in record.losses.items():
                for loss in found:
                    if not math.isfinite(loss):
                        self._stop(f"the loss is {loss}{where}", record, read[0])
        if not torch.stack([weight.detach().isfinite().all() for weight in self.net.parameters()]).all():
            self._stop("a weight is no longer finite", read[-1], read[0])
        self.begin([*self.records, *read])
        for record in read:
            self.on_record(record)
        self.show(read[-1].step + 1, read[-1].text)

    def _tensors(self) -> list[Tensor]:
        """Looked up each time: a forward may put another tensor in the place of a buffer."""
        return [*self.net.parameters(), *self.net.buffers()]

    @torch.no_grad()
    def _stop(self, what: str, record: Any, first: Any) -> NoReturn:
        for tensor, good in zip(self._tensors(), self.good, strict=True):
            tensor.copy_(good)
        raise TrainingError(
            f"Training stopped at step {record.step} (epoch {record.epoch}): {what}. The network is back where it was "
            f"before step {first.step}; a smaller lr often helps."
        )


def resume(
    checkpointer: Checkpointer | None, state: State, world: World, delay: int = 0
) -> tuple[int, Mapping[str, Any], list[dict[str, Any]]]:
    """The step to begin with, the facts and the records before it, from a checkpoint if there is one.

    delay: steps after which a second iterator has begun.
    """
    saved = checkpointer.load(world) if checkpointer else None
    if saved is None or checkpointer is None:
        return 0, {}, []
    state.restore(saved.tensors, [saved.step, max(0, saved.step - delay)][: len(state.iterators)], world)
    earlier = checkpointer.earlier(checkpointer.name)
    return saved.step, saved.facts, [record for record in earlier if record["step"] < saved.step]


def _check_apart(model: nn.Module, teacher: nn.Module | None) -> None:
    """Refuse a teacher that the training would change."""
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if teacher is not None and any(id(parameter) in trained for parameter in teacher.parameters()):
        raise TrainingError("The teacher has parameters in common with the network: give copy.deepcopy(teacher).")


# the test


@checked
def evaluate(
    model: nn.Module, loader: Iterable[Any], metric: Metric | None = None, forward: Forward | None = None
) -> float:
    """Mean of the metric over all samples, by default the share of correct answers, 0 to 1; modes are kept.

    A metric that is an object with reset, update and compute gives the number itself. `forward` runs the network where
    that is not simply model(input), as in `recalibrate`.
    """
    return evaluate_counted(model, loader, metric, forward)[0]


def evaluate_counted(
    model: nn.Module, loader: Iterable[Any], metric: Metric | None = None, forward: Forward | None = None
) -> tuple[float, int]:
    """`evaluate`, and the number of samples; 0 if there are several answers per sample."""
    world, device = current(), device_of(model)
    run = forward or (lambda x: call_model(model, x))
    whole, seen = check_metric(metric, world), 0
    if whole is not None:
        check_parts(loader, world)

    def pairs() -> Iterator[tuple[Any, Any]]:
        nonlocal seen
        for batch in (on_device(batch, device) for batch in each("test", loader)):
            if size := size_of(batch):  # of a small last batch some ranks have no part
                seen += size
                yield run(input_of(batch)), batch

    with kept_modes(model), torch.no_grad():
        model.eval()
        if whole is not None:
            value, answers = losses.measure(whole, pairs(), world), 0.0
        else:
            assert metric is None or callable(metric)
            value, answers = losses.mean(metric or top1, pairs(), device, world)
    samples = int(sum_values(torch.tensor(seen), world))
    return value, samples if metric is not None or samples == answers else 0
