"""Train the cut network: from scratch, fine-tuned or slimmable, with or without a teacher."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from dmcp.batches import Loader, device_of, generator
from dmcp.calibration import recalibrate
from dmcp.checkpoint import untouched
from dmcp.cutting import cut, padded, reinitialize
from dmcp.errors import TrainingError
from dmcp.losses import Metric, classification_loss, distillation_loss, warn, whole_of
from dmcp.modules import narrow, tensors_in, unwrap
from dmcp.results import DMCP, ORIGINAL, TEACHER, UNPRUNED, Row, divergence, make_row, score, standard_error
from dmcp.runtime.distributed import current, share_tensors
from dmcp.runtime.engine import MakeOptimizer, pads
from dmcp.settings import Engine, Retrain, TrainConfig
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph
from dmcp.training import Runtime, StepRecord, Task, evaluate, train
from dmcp.widths import Widths, fingerprint

AS_IT_WAS, TRAINED_FIRST = "the network as given", "the unpruned network, which was trained first"  # who teach
_GUESSED = 0.1  # of the way from guessing to all right, up to which nothing was learned


class DivergenceWarning(UserWarning):
    """A training whose loss ended higher than it began."""


class LabelsWarning(UserWarning):
    """A trained network that knows nothing of the labels."""


class TeacherWarning(UserWarning):
    """A teacher that seems to know less than those who learn from it."""


@dataclass(frozen=True)
class Retraining:
    """How networks get their weights, and whom they learn from besides the labels."""

    config: TrainConfig
    kind: Retrain = Retrain.SCRATCH
    teacher: nn.Module | str | None = None  # a trained network, or "unpruned": the unpruned one, which is trained first
    strict: bool = True  # refuse settings of distillation without a teacher

    def __post_init__(self) -> None:
        teacher = self.teacher
        if teacher is not None and self.kind is Retrain.NONE:
            raise TrainingError('retrain="none" trains nothing, so there is nothing to learn: leave teacher out.')
        if teacher is not None and self.kind is Retrain.SLIMMABLE:
            raise TrainingError('retrain="slimmable" has its own teacher, the unpruned network: leave teacher out.')
        if not (teacher is None or teacher == UNPRUNED or isinstance(teacher, nn.Module)):
            raise TrainingError(f'teacher must be a trained torch.nn.Module or "{UNPRUNED}", not {teacher!r}.')
        if isinstance(teacher, torch.jit.ScriptModule):
            raise TrainingError("teacher is a TorchScript module, which cannot be copied: give its Python module.")
        for name in ("kd_weight", "kd_temperature") if teacher is None and self.strict else ():
            if (value := getattr(self.config, name)) != getattr(TrainConfig, name):
                raise TrainingError(f'{name}={value} needs a teacher: give one, or teacher="{UNPRUNED}".')


def train_all(
    weights: nn.Module,
    graph: ChannelGraph,
    wanted: dict[str, Widths],
    loader: Loader,
    how: Retraining,
    *,
    cuts: Mapping[str, nn.Module] | None = None,
    task: Task = Task(),
    runtime: Runtime = Runtime(),
) -> dict[str, nn.Module]:
    """Networks with these widths, cut out of one with the given weights and all trained in the same way.

    cuts: those of them that were cut already, of other channels than the first ones; they are trained in place.
    """
    nets: dict[str, nn.Module] = {}
    teacher, warned = how.teacher, list[str]()
    if teacher == UNPRUNED:
        wanted = {UNPRUNED: graph.full} | wanted
    for name, widths in wanted.items():
        own = runtime.stage(name)
        with _naming(name if len(wanted) > 1 else ""):
            if how.kind is Retrain.SLIMMABLE and widths != graph.full:
                nets[name], steps = _train_slimmable(Supernet(weights, graph), widths, loader, how.config, task, own)
            else:
                small = nets[name] = cuts[name] if cuts and name in cuts else cut(weights, graph, widths)
                if how.kind is Retrain.NONE:
                    calibrated(small, loader)
                    continue
                if how.kind is Retrain.FINETUNE:
                    recalibrate(small, loader)
                else:
                    reinitialize(small, generator=generator(how.config.seed))
                guide = teacher if isinstance(teacher, nn.Module) else None
                with padding(small, weights, graph, widths, runtime.engine, task.optimizer) as net:
                    steps = train(net, loader, how.config, task=task, runtime=own, teacher=guide)
                if teacher == UNPRUNED:
                    teacher = small
        warned.append(divergence(name, [step.loss for step in steps]))
    for text in filter(None, warned):
        warn(text, DivergenceWarning)
    return nets


def calibrated(small: nn.Module, loader: Loader) -> nn.Module:
    """The same network with BatchNorms that fit its weights; the loader is as it was."""
    with untouched(loader, device_of(small)):
        recalibrate(small, loader)
    return small


@contextlib.contextmanager
def padding(
    small: nn.Module,
    unpruned: nn.Module,
    graph: ChannelGraph,
    widths: Widths,
    engine: Engine | None,
    optimizer: MakeOptimizer | None = None,
) -> Iterator[nn.Module]:
    """The network to train in place of one that was cut, if the engine pads; afterwards that has its weights.

    Not with an optimizer of the user's own: some mix the entries of a tensor, so that its shape counts.
    """
    wanted = optimizer is None and pads(engine or Engine(), device_of(small))
    twin = padded(small, unpruned, graph, widths) if wanted else None
    yield twin.wide if twin else small
    if twin:
        twin.give_back()


def _train_slimmable(
    net: Supernet, widths: Widths, loader: Loader, config: TrainConfig, task: Task, runtime: Runtime
) -> tuple[nn.Module, list[StepRecord]]:
    """Slimmable training: in each step the largest network learns the task, and the pruned one learns from it."""
    reinitialize(net.model, generator=generator(config.seed))
    loss = task.loss or classification_loss(config.label_smoothing)

    def both(outputs: Any, batch: Any) -> Tensor:
        largest, pruned = outputs
        return loss(largest, batch) + distillation_loss(pruned, [tensor.detach() for tensor in tensors_in(largest)])

    engine = runtime.engine or Engine()
    if task.loss is None and task.optimizer is None and engine.graphs is None and current().size == 1:
        engine = replace(engine, graphs=True)  # this loss never asks the device for a number
    own, runtime = replace(task, loss=both), replace(runtime, engine=engine)
    steps = train(_Pair(net, widths), loader, config, task=own, runtime=runtime)
    small = cut(net.model, net.graph, widths)
    recalibrate(small, loader)  # the running statistics are a mixture of both networks'
    return small, steps


class _Pair(nn.Module):
    """The largest sub-network and one other, run on the same input: both their gradients go into one step."""

    def __init__(self, net: Supernet, widths: Widths) -> None:
        super().__init__()
        self.net = net
        net.alpha.requires_grad_(False)
        self.gates = [net.hard(net.graph.full), net.hard(widths)]

    def forward(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [self.net(kwargs or args, gates) for gates in self.gates]


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """A training that cannot go on says of which network it was, if there are several."""
    try:
        yield
    except TrainingError as error:
        if not name:
            raise
        raise TrainingError(f"The network {name!r}: {error}") from error


# teachers


def origin(
    kind: Retrain,
    teacher: str,
    share: float,
    temperature: float,
    name: str = DMCP,
    earlier: str = "the weights of the search",
) -> str:
    """Where the weights of a network come from, for readers of its table; no teacher: an empty text."""
    if kind == Retrain.NONE:
        return f"{name}: {earlier}, calibrated and not trained"
    inside = " inside the unpruned network" if kind == Retrain.SLIMMABLE else ""
    begun = f"on from {earlier}" if kind == Retrain.FINETUNE else f"from fresh weights{inside}"
    shares = f"{100 * share:g}% of its loss from {teacher} (temperature {temperature:g}), the rest from the labels"
    return f"{name}: trained {begun}" + (f", {shares}" if teacher else "")


def who_teaches(teacher: nn.Module | str | None, model: nn.Module, worth: Row | None = None) -> str:
    """In words; `worth`: how good a teacher is, which is said if it is no row of the table."""
    if not isinstance(teacher, nn.Module):
        return TRAINED_FIRST if teacher else ""
    if is_model(teacher, model):
        return AS_IT_WAS
    if worth is None or fingerprint(unwrap(teacher)) == fingerprint(unwrap(model)):
        return "the teacher"
    return f"a teacher that is no row here ({'metric' if worth.own_metric else 'accuracy'} {score(worth)})"


def is_model(teacher: nn.Module | str | None, model: nn.Module) -> bool:
    """Whether the teacher is the network that is pruned."""
    return isinstance(teacher, nn.Module) and unwrap(teacher) is unwrap(model)


def is_trained(model: nn.Module, classes: int, val_loader: Loader, metric: Metric | None) -> bool:
    """True if a model does better than guessing or, by a metric of the user's own, has norms that saw data.

    Warns of a model whose norms saw data and that guesses: its labels may not be those of the data.
    """
    counts = (it.num_batches_tracked for it in unwrap(model).modules() if isinstance(it, _NormBase))
    saw_data = any(bool(count) for count in counts if count is not None)
    if metric is not None:
        return saw_data
    with untouched(val_loader, device_of(model)):
        accuracy = evaluate(narrow(unwrap(model), {}, {}), val_loader)
    if accuracy > _guessing(classes):
        return True
    if saw_data and current().first:
        right = f"right on {100 * accuracy:.2f}% of the test data, where guessing gives {100 / max(classes, 1):.3g}%"
        ask = "are its classes in the order of the labels, and its inputs prepared as in its training?"
        warn(f"The network was trained before, but is {right}: {ask} It counts as not trained.", LabelsWarning)
    return False


def _guessing(classes: int) -> float:
    """The accuracy up to which a network has learned nothing."""
    chance = 1 / max(classes, 1)
    return chance + _GUESSED * (1 - chance)


def copied(teacher: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a teacher on the device, on all ranks that of rank 0."""
    net = narrow(unwrap(teacher), {}, {}).to(device)
    share_tensors([*net.parameters(), *net.buffers()], current())
    return net


def trained_before(
    model: nn.Module, original: bool, guide: nn.Module | None = None, teacher: nn.Module | str | None = None
) -> dict[str, nn.Module]:
    """Rows that are not trained here: the original model, and the guide, a copy of the teacher, if it costs as much."""
    found = {ORIGINAL: unwrap(model)} if original else {}
    if guide is not None and not is_model(teacher, model) and fingerprint(guide) == fingerprint(unwrap(model)):
        found[TEACHER] = guide
    return found


def weigh_teacher(
    guide: nn.Module, rival: nn.Module | None, classes: int, val_loader: Loader, metric: Metric | None = None
) -> Row:
    """Test a teacher, and warn of one that guesses or is worse than its rival, the network that it is to improve."""
    row = _test_copy(TEACHER, guide, val_loader, metric)
    other = None if rival is None else _test_copy(ORIGINAL, rival, val_loader, metric)
    if current().first and (text := poor_teacher(row, other, classes)):
        warn(text, TeacherWarning)
    return row


def poor_teacher(teacher: Row, original: Row | None, classes: int) -> str:
    """A sentence about a teacher that guesses, or that is worse than the network as given; empty otherwise."""
    if not teacher.own_metric and teacher.accuracy <= _guessing(classes):
        chance = 100 / max(classes, 1)
        right = f"The teacher is right on {score(teacher)} of the test data, where guessing gives {chance:.3g}%"
        return f"{right}: was it trained, and are its classes in the same order?"
    gain = 0.0 if original is None else teacher.accuracy - original.accuracy
    if original is None or not (gain > 0 if teacher.lower_is_better else gain < 0):
        return ""
    if not teacher.own_metric and teacher.samples:  # else nobody knows what chance alone may do
        gap = math.hypot(*(standard_error(row.accuracy, row.samples) for row in (teacher, original)))
        if -gain <= 2 * gap:
            return ""
    both = f"{score(teacher)}, the network as given {score(original)}"
    return f"The teacher has {both}: learning from it may harm more than it helps."


def _test_copy(name: str, net: nn.Module, loader: Loader, metric: Metric | None) -> Row:
    """Test a copy of a network before anything is done, and leave no trace."""
    with untouched(loader, device_of(net)):
        row = make_row(name, narrow(unwrap(net), {}, {}), loader, metric)
    if metric is not None and (whole := whole_of(metric)) is not None:
        whole.reset()
    return row
