"""Train and evaluate one network."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from dmcp.arguments import checked
from dmcp.defaults import resolve_training
from dmcp.errors import DataError, TrainingError
from dmcp.runs.records import StepRecord
from dmcp.runtime.batches import (
    Loader,
    check_parts,
    device_of,
    input_of,
    length_of,
    on_device,
    peek,
    size_of,
    widest,
)
from dmcp.runtime.checkpoint import DONE, Checkpointer, ResumableIterator, State, seeded, untouched
from dmcp.runtime.distributed import World, current, gather, mean_gradients, mean_values, share_tensors, sum_values
from dmcp.runtime.engine import ResolvedEngine, resolve, suits_kernels
from dmcp.runtime.progress import Update, each, overdue, phase, show_nothing, shown
from dmcp.settings import Distill, Engine, Optimizer, TrainConfig
from dmcp.tracing.modules import call_model, kept_modes, without_autocast
from dmcp.training import losses
from dmcp.training.calibration import Forward
from dmcp.training.distillation import (
    Distillation,
    distillation_by_loss,
    distillation_loss,
    read_distillation,
    warn_of_distillation,
)
from dmcp.training.losses import Accuracy, Loss, Metric, check_metric, classification_loss, loss_of
from dmcp.training.optimizer import (
    MakeOptimizer,
    learning_rate,
    make_optimizer,
    parameter_groups,
    rate_shares,
    set_lr,
    sgd,
)

TRAIN = "train"  # the stage of a training that is no part of a larger run
_STEPS_BETWEEN_READS = 100  # at most, since each read of the losses waits for the GPU
_LARGE = 2_000_000  # parameters from which a network counts as one for large images


@checked
@dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned: the loss, the metric of the test, what makes the optimizer, and fresh weights."""

    # (output, batch) -> scalar; default: cross-entropy of the labels
    loss: Loss | None = None
    # (output, batch) -> (sum, count), or an object with reset, update and compute; default: accuracy, or the loss
    metric: Metric | None = None
    # parameter groups -> optimizer, whose learning rates follow the schedule; default: SGD
    optimizer: MakeOptimizer | None = None
    # for prune: a newly built model, if `reinitialize` has no rule for some tensor
    fresh: nn.Module | None = None
    # how outputs are distilled: "classes", "l1" or "l2" for all of them, a list or dict with one for each, or
    # (student_output, teacher_output) -> scalar; default: what the loss shows
    distill: Distillation | str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "distill", read_distillation(self.distill))

    @property
    def distillation(self) -> Distillation | None:
        """How outputs are distilled; None where this is not known, since the loss is the user's own."""
        if self.distill is None and self.loss is None:
            return Distill.CLASSES
        return self.distill


def with_distillation(task: Task, model: nn.Module, loader: Iterable[Any]) -> Task:
    """The task with what its own loss shows about distillation on the first batch, unless the task itself says it.

    Ranks have batches of their own, which may show different things: what rank 0 sees holds for all.
    """
    if task.loss is None or task.distill is not None:
        return task
    device = device_of(model)
    with untouched(loader, device):
        first = peek(loader)
    distill = None
    if first:
        distill = distillation_by_loss(task.loss, model, on_device(first[0], device))
    return replace(task, distill=gather(distill, current())[0])


def with_optimizer(task: Task, optimizer: Optimizer) -> Task:
    """The task with the optimizer of the settings, unless it has one of its own. SGD is made where it is used."""
    if task.optimizer is None and optimizer is Optimizer.ADAMW:
        return replace(task, optimizer=torch.optim.AdamW)
    return task


@dataclass(frozen=True)
class Event:
    """What a run reports while it goes on: each step, the result of the search, each row of the table."""

    stage: str  # "latency", "search", "test", or the network that is trained
    steps: int  # steps of this stage in all; for latency: networks
    record: Any  # StepRecord, SearchRecord, SearchResult, Row or Latency


@checked
@dataclass(frozen=True, kw_only=True)
class Runtime:
    """How a run is carried out: the engine, its checkpoints, and who is told of each step."""

    engine: Engine | None = None  # default: what is best for the device
    checkpointer: Checkpointer | None = None  # saves the state now and then, and resumes from it
    on_event: Callable[[Event], None] | None = None
    progress: bool | None = None  # show progress on stderr; None: outside of terminals and notebooks only every 30 s
    name: str = ""  # name of the stage

    def emit(self, stage: str, steps: int, record: Any) -> None:
        """Report a record to `on_event`."""
        if self.on_event:
            self.on_event(Event(self.name or stage, steps, record))

    def stage(self, name: str) -> Runtime:
        """The runtime of one stage: its checkpoints are in a folder of its own, its events have its name."""
        checkpointer = self.checkpointer and self.checkpointer.stage(name)
        return replace(self, name=name, checkpointer=checkpointer)

    def resolve(self, model: nn.Module, task: Task, steps: int, large: bool) -> ResolvedEngine:
        """The engine for so many steps of a model."""
        engine = self.engine or Engine()
        if task.optimizer is not None and engine.graphs:  # a graph would replay the first learning rate for ever
            raise TrainingError("Only steps with sgd can be CUDA graphs: do not turn graphs on.")
        has_functions = task.loss is not None or task.distill is not None or task.optimizer is not None
        return resolve(
            engine,
            device_of(model),
            steps=steps,
            large=large,
            capturable=not has_functions and current().size == 1,
            few_channels=suits_kernels(model),
        )


def check_trainable(model: nn.Module) -> None:
    """Raise TrainingError for a network without values or trainable parameters, or where gradients are switched off."""
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise TrainingError(f"{name} of the model has no shape yet: call the model once, on the input of a batch.")
        if tensor.is_meta:
            raise TrainingError(
                f"{name} of the model is on the meta device, where tensors have no values: build the model on the CPU."
            )
    if not torch.is_grad_enabled():
        raise TrainingError(
            "Gradients are switched off here (torch.no_grad or torch.inference_mode): call this function outside of it."
        )
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise TrainingError("No parameter of the model has requires_grad: call model.requires_grad_(True).")


# the loop


@checked
@shown
@without_autocast
def train(
    model: nn.Module,
    loader: Loader,
    config: TrainConfig,
    *,
    task: Task | None = None,
    runtime: Runtime | None = None,
    teacher: nn.Module | None = None,
    after_epoch: Callable[[int], None] | None = None,
) -> list[StepRecord]:
    """Train the model in place, and restore its mode (train or eval) afterwards.

    If a loss or weight is not finite, training stops with a TrainingError that says where, and the model is restored to
    its state when the losses were last read. The learning rate of each step follows from the config; ratios between
    the groups of an optimizer are kept. `teacher` is a trained network to learn from besides the labels. `after_epoch`
    is called with the number of each epoch at its end, and may change weights in place. Settings that you leave out
    are the paper's.
    """
    config = resolve_training(config)
    task = task or Task()
    runtime = runtime or Runtime()
    task = with_optimizer(task, config.optimizer)
    check_trainable(model)
    _check_teacher_is_separate(model, teacher)
    if not length_of(loader):
        raise DataError("There is nothing to train on: the loader has no batches.")
    if teacher is not None and not runtime.name:  # prune has done this before the search
        task = with_distillation(task, model, loader)
        if task.distillation is None:
            warn_of_distillation("The network learns from the teacher's", "leave the teacher out")

    world = current()
    device = device_of(model)
    checkpointer = runtime.checkpointer
    large = sum(parameter.numel() for parameter in model.parameters()) >= _LARGE
    engine = runtime.resolve(model, task, steps=config.epochs * length_of(loader), large=large)

    with _train_mode(model, teacher), seeded(config.seed, device, world), engine.running(model):
        share_tensors([*model.parameters(), *model.buffers()], world)

        # One step, perhaps as a CUDA graph.
        our_sgd = partial(sgd, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, device=device)
        optimizer = make_optimizer(task.optimizer or our_sgd, parameter_groups(model, config.weight_decay))
        shares = rate_shares(optimizer)
        loss = task.loss or classification_loss(config.label_smoothing)
        distill = task.distillation or Distill.CLASSES
        run_step = engine.repeated(make_step(model, optimizer, loss, teacher, config, engine, distill))

        # All that changes from step to step, brought to where an earlier process was.
        batches = ResumableIterator(loader, engine, world)
        steps = config.epochs * batches.per_epoch
        state = State(
            shared=dict(model.named_parameters()),
            buffers=lambda: dict(model.named_buffers()),
            optimizers=[optimizer],
            generators=[],
            iterators=[batches],
            device=device,
        )
        first_step, _, earlier_records = resume(checkpointer, state, world)

        with phase(runtime.name or TRAIN, steps, first_step) as show:
            emit = partial(runtime.emit, TRAIN, steps)
            log = Log(model, _STEPS_BETWEEN_READS, partial(_read_losses, world=world), emit, show)
            log.begin([StepRecord(**record) for record in earlier_records])

            for step in range(first_step, steps):
                (batch,) = batches.next()
                epoch = step // batches.per_epoch
                lr = learning_rate(step, steps, batches.samples([batch], world), config)
                set_lr(optimizer, lr, shares)
                step_loss = run_step(batch)
                log.add(_PendingStep(epoch, step, steps, lr, step_loss, samples=size_of(batch)), [batch])

                if batches.step % batches.per_epoch == 0:
                    log.flush()
                    if after_epoch:
                        after_epoch(epoch)
                        log.begin(log.records)  # from the weights that it may have changed

                finished = step + 1 == steps
                if checkpointer and (finished or checkpointer.due(step + 1, world)):
                    log.flush()
                    checkpointer.save(step + 1, state, {DONE: finished}, world)

        share_tensors(list(model.buffers()), world)  # each rank has seen other samples
    optimizer.zero_grad(set_to_none=True)
    return log.records


def make_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Loss,
    teacher: nn.Module | None,
    config: TrainConfig,
    engine: ResolvedEngine,
    distill: Distillation = Distill.CLASSES,
) -> Callable[[Any], Tensor]:
    """The function that does one training step: batch -> loss.

    With a teacher the loss is (1 - kd_weight) times that of the task and kd_weight times that of distillation.
    """
    run_model = engine.compiled(lambda x: call_model(model, x))
    run_teacher = engine.compiled(lambda x: call_model(teacher, x)) if teacher is not None else None

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        x = input_of(batch)
        with engine.autocast():
            output = run_model(x)
            value = loss_of(loss, output, batch)
            if run_teacher is not None:
                with torch.no_grad():
                    target = run_teacher(x)
                distilled = distillation_loss(output, target, config.kd_temperature, distill)
                value = (1 - config.kd_weight) * value + config.kd_weight * distilled
        torch.autograd.backward(value)
        mean_gradients(model.parameters(), size_of(batch), current())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.detach()

    return step


@contextlib.contextmanager
def _train_mode(model: nn.Module, teacher: nn.Module | None) -> Iterator[None]:
    """While entered, the model is in train mode and the teacher in eval mode."""
    with kept_modes(model), contextlib.ExitStack() as stack:
        if teacher is not None:
            stack.enter_context(kept_modes(teacher))
        model.train()
        if teacher is not None:
            teacher.eval()
        yield


def _check_teacher_is_separate(model: nn.Module, teacher: nn.Module | None) -> None:
    """Raise TrainingError for a teacher that the training would change."""
    if teacher is None:
        return
    trained = {parameter for parameter in model.parameters() if parameter.requires_grad}
    if not trained.isdisjoint(teacher.parameters()):
        raise TrainingError("The teacher shares parameters with the network: use copy.deepcopy(teacher) instead.")


# what the steps report


@dataclass(frozen=True)
class _PendingStep:
    """A step whose loss is still on the device."""

    epoch: int
    step: int
    steps: int
    lr: float
    loss: Tensor
    samples: int  # of this rank


def _read_losses(pending: list[_PendingStep], world: World) -> list[StepRecord]:
    """The records of some steps; their losses are means over all ranks. Waits for the device."""
    values = torch.stack([step.loss.to(widest(step.loss.device)) for step in pending])
    samples = values.new_tensor([step.samples for step in pending])
    means = mean_values(values, samples, world).tolist()
    records = []
    for step, loss in zip(pending, means, strict=True):
        records.append(StepRecord(step.epoch, step.step, step.steps, step.lr, loss))
    return records


class Log:
    """The records of a loop, whose numbers are read from the device in bundles.

    If a number is not finite, the network gets back the state that it had at the last good read.
    """

    def __init__(
        self,
        net: nn.Module,
        every: int,
        read: Callable[[list[Any]], list[Any]],
        on_record: Callable[[Any], None],
        show: Update = show_nothing,
    ) -> None:
        self.net = net
        self.device = device_of(net)
        self.every = every  # steps between two reads
        self.read = read  # pending steps -> records
        self.on_record = on_record
        self.show = show
        self.pending: list[Any] = []
        self.input_sums: list[list[Tensor]] = []  # of each pending step, on the device: NaN or infinite if an input is

    def begin(self, records: list[Any]) -> None:
        """Go on after these records, from the state that the network has now."""
        self.records = records
        self.last_read = time.monotonic()
        self.good_state = [tensor.detach().clone() for tensor in self._tensors()]

    def add(self, step: Any, batches: Sequence[Any]) -> None:
        """Keep a step on these batches; read the kept ones every so many steps, or when it is time."""
        self.pending.append(step)
        self.input_sums.append(_input_sums(batches))
        if len(self.pending) == self.every or overdue(self.last_read, self.device):
            self.flush()

    def flush(self) -> None:
        """Read the kept steps: the only place of the loop that waits for the device."""
        if not self.pending:
            return
        records = self.read(self.pending)
        for record in records:
            for source, numbers in record.losses.items():
                for loss in numbers:
                    if not math.isfinite(loss):
                        self._stop(f"the loss is {loss}{source}", record, records)
        if not torch.stack([weight.detach().isfinite().all() for weight in self.net.parameters()]).all():
            self._stop("a weight is no longer finite", records[-1], records)

        self.pending = []
        self.input_sums = []
        self.begin([*self.records, *records])
        for record in records:
            self.on_record(record)
        self.show(records[-1].step + 1, records[-1].text)

    def _tensors(self) -> list[Tensor]:
        """Parameters and buffers. They are looked up each time, since a forward pass may replace a buffer."""
        return [*self.net.parameters(), *self.net.buffers()]

    @torch.no_grad()
    def _stop(self, reason: str, record: Any, records: list[Any]) -> NoReturn:
        for tensor, good in zip(self._tensors(), self.good_state, strict=True):
            tensor.copy_(good)
        text = (
            f"Training stopped at step {record.step} (epoch {record.epoch}): {reason}. The network is as it was before "
            f"step {records[0].step}."
        )
        for input_sum in itertools.chain(*self.input_sums[: 1 + records.index(record)]):
            if not input_sum.isfinite():
                raise DataError(f"{text} The input of a batch has NaN or infinite values: check the data.")
        raise TrainingError(f"{text} A smaller lr often helps; else check the loss and the labels.")


def _input_sums(batches: Sequence[Any]) -> list[Tensor]:
    """The sum of each tensor of the inputs: the quickest way to learn whether all of its numbers are finite."""
    sums = []
    for batch in batches:
        for leaf in tree_leaves(input_of(batch)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                sums.append(leaf.sum(dtype=torch.float32))
    return sums


def resume(
    checkpointer: Checkpointer | None, state: State, world: World, delay: int = 0
) -> tuple[int, Mapping[str, Any], list[dict[str, Any]]]:
    """Bring the state to the last checkpoint, if there is one: the step to begin with, its facts, the earlier records.

    delay: the number of steps after which the second iterator of the state begins.
    """
    saved = None
    if checkpointer:
        saved = checkpointer.load(world)
    if saved is None or checkpointer is None:
        return 0, {}, []
    steps = [saved.step, max(0, saved.step - delay)]
    state.restore(saved.tensors, steps[: len(state.iterators)], world)
    logged = checkpointer.earlier(checkpointer.name)  # a killed process may have logged steps after its checkpoint
    records = [record for record in logged if record["step"] < saved.step]
    return saved.step, saved.facts, records


# the test


@checked
def evaluate(
    model: nn.Module, loader: Iterable[Any], metric: Metric | None = None, forward: Forward | None = None
) -> float:
    """Return the mean of the metric over all samples, by default the accuracy (0 to 1). The model's mode is kept.

    A metric that is an object with reset, update and compute returns the number itself. Pass `forward` if running the
    network is more than model(input), as in `recalibrate`.
    """
    return evaluate_counted(model, loader, metric, forward)[0]


def evaluate_counted(
    model: nn.Module, loader: Iterable[Any], metric: Metric | None = None, forward: Forward | None = None
) -> tuple[float, int]:
    """The same as `evaluate`, with the number of samples; 0 if there are several answers per sample."""
    world = current()
    device = device_of(model)
    whole_metric = check_metric(metric, world)
    if whole_metric is not None:
        check_parts(loader, world)

    outputs = _Outputs(forward or partial(call_model, model), loader, device)
    accuracy = Accuracy(device)
    answers = 0.0
    with kept_modes(model), torch.no_grad():
        model.eval()
        if whole_metric is not None:
            value = losses.measure(whole_metric, outputs, world)
        else:
            assert metric is None or callable(metric)
            value, answers = losses.mean(metric or accuracy, outputs, device, world)
    if metric is None:
        accuracy.warn_of_unknown(answers, world)

    samples = int(sum_values(torch.tensor(outputs.samples), world))
    if metric is None and samples != answers:
        samples = 0
    return value, samples


class _Outputs:
    """The outputs of a network for the batches of a loader, each with its batch; counts the samples."""

    def __init__(self, run: Forward, loader: Iterable[Any], device: torch.device) -> None:
        self.run = run
        self.loader = loader
        self.device = device
        self.samples = 0

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for loaded in each("test", self.loader):
            batch = on_device(loaded, self.device)
            size = size_of(batch)
            if size == 0:  # some ranks have no part of a small last batch
                continue
            self.samples += size
            yield self.run(input_of(batch)), batch
