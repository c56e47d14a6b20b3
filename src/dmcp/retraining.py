"""Train the cut network: from scratch, fine-tuned, slimmable, with or without a teacher."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dmcp import training
from dmcp.batches import Loader, device_of, generator
from dmcp.calibration import recalibrate
from dmcp.checkpoint import Checkpointer
from dmcp.cutting import cut, padded, reinitialize
from dmcp.errors import TrainingError
from dmcp.losses import Loss, Metric, classification_loss, distillation_loss
from dmcp.modules import narrow, tensors_in, unwrap
from dmcp.results import (
    DMCP,
    ORIGINAL,
    TEACHER,
    UNPRUNED,
    Event,
    Report,
    Row,
    divergence,
    poor_teacher,
    score,
    silent,
    test_copy,
)
from dmcp.runtime.distributed import current, share_tensors
from dmcp.runtime.engine import MakeOptimizer, pads
from dmcp.settings import Distillation, Engine, Retrain, TrainConfig
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph
from dmcp.training import StepRecord
from dmcp.widths import Widths, fingerprint

AS_IT_WAS, TRAINED_FIRST = "the network as given", "the unpruned network, which was trained first"  # who teach


def origin(
    kind: Retrain,
    teacher: str,
    share: float,
    temperature: float,
    name: str = DMCP,
    earlier: str = "the weights of the search",
) -> str:
    """Where the weights of a network come from, for readers of its table; no teacher: an empty text."""
    inside = " inside the unpruned network" if kind == Retrain.SLIMMABLE else ""
    begun = f"on from {earlier}" if kind == Retrain.FINETUNE else f"from fresh weights{inside}"
    shares = f"{100 * share:g}% of its loss from {teacher} (temperature {temperature:g}), the rest from the labels"
    return f"{name}: trained {begun}" + (f", {shares}" if teacher else "")


MakeCheckpointer = Callable[[str], Checkpointer]  # stage -> what saves its state


def default_recipe(kind: Retrain) -> TrainConfig:
    """The paper's schedule; a short one with small steps for weights that are already good."""
    if kind == Retrain.FINETUNE:
        return TrainConfig(epochs=20, lr=0.08, warmup_lr=0.08, warmup_epochs=0)
    return TrainConfig()


def train_all(
    weights: nn.Module,
    graph: ChannelGraph,
    wanted: dict[str, Widths],
    loader: Loader,
    config: TrainConfig,
    kind: Retrain,
    loss: Loss | None = None,
    on_event: Report | None = None,
    engine: Engine | None = None,
    keep: MakeCheckpointer | None = None,
    on_trouble: Callable[[str], None] | None = None,
    optimizer: MakeOptimizer | None = None,
    teacher: nn.Module | None = None,
) -> dict[str, nn.Module]:
    """Networks with these widths, cut out of one with the given weights and all trained by the same recipe.

    teacher: whom all of them learn from as well, with Retrain.TEACHER or INHERIT. Without one, Retrain.TEACHER trains
        the unpruned network first, and the others learn from that.
    on_trouble: gets a sentence about each training whose loss ended higher than it began.
    """
    nets: dict[str, nn.Module] = {}
    if kind is Retrain.TEACHER and teacher is None:
        wanted = {UNPRUNED: graph.full} | wanted
    for name, widths in wanted.items():
        way = (_steps_of(name, on_event), engine, keep and keep(name))
        with _naming(name if len(wanted) > 1 else ""):
            if kind is Retrain.SLIMMABLE and widths != graph.full:
                nets[name], steps = _train_inside(weights, graph, widths, loader, config, loss, *way, optimizer)
            else:
                small = nets[name] = cut(weights, graph, widths)
                if kind is Retrain.FINETUNE:
                    recalibrate(small, loader)
                else:
                    reinitialize(small, generator=generator(config.seed))
                recipe = replace(config, distillation=Distillation.NONE if teacher is None else Distillation.TEACHER)
                with padding(small, weights, graph, widths, engine, optimizer) as net:
                    steps = training.train(net, loader, recipe, loss, teacher, *way, optimizer=optimizer)
                if kind is Retrain.TEACHER and teacher is None:
                    teacher = small
        if on_trouble and (trouble := divergence(name, [step.loss for step in steps])):
            on_trouble(trouble)
    return nets


@contextlib.contextmanager
def padding(
    small: nn.Module,
    whole: nn.Module,
    graph: ChannelGraph,
    widths: Widths,
    engine: Engine | None,
    optimizer: MakeOptimizer | None = None,
) -> Iterator[nn.Module]:
    """The network to train in place of one that was cut, if the engine wants that; afterwards that has its weights.

    Not with an optimizer of one's own: some mix the entries of a tensor, so that its shape counts.
    """
    wanted = optimizer is None and pads(engine or Engine(), device_of(small))
    twin = padded(small, whole, graph, widths) if wanted else None
    yield twin.wide if twin else small
    if twin:
        twin.give_back()


def check_taught(kind: Retrain, config: TrainConfig, teacher: object) -> None:
    """Refuse a teacher that nobody would learn from, and settings that need one where there is none."""
    if teacher is not None and kind not in (Retrain.TEACHER, Retrain.FINETUNE):
        raise TrainingError(
            f'retrain="{kind}" has no use for a teacher: take "teacher" for weights that are drawn anew, or "inherit" '
            "for those of the search."
        )
    if teacher is not None and not isinstance(teacher, nn.Module):
        name = f"a {type(teacher).__name__}"
        if isinstance(teacher, type):
            name = f"the class {teacher.__name__}: build it and load its weights"
        raise TrainingError(f"teacher must be a trained torch.nn.Module, not {name}.")
    if isinstance(teacher, torch.jit.ScriptModule):
        raise TrainingError("teacher is a TorchScript module, of which no copy is made: give the Python module of it.")
    if teacher is None and kind is not Retrain.TEACHER and config.distillation is Distillation.TEACHER:
        raise TrainingError(
            f'The TrainConfig has distillation="teacher", but with retrain="{kind}" there is none: take '
            'retrain="teacher", which trains one, or name one by teacher=... with "inherit".'
        )
    for name in ("kd_weight", "kd_temperature") if teacher is None and kind is not Retrain.TEACHER else ():
        if (value := getattr(config, name)) != getattr(TrainConfig, name):
            raise TrainingError(
                f'{name}={value}: a network with retrain="{kind}" learns from no teacher: take retrain="teacher", '
                'which trains one, or name one by teacher=... with "inherit".'
            )


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """A training that cannot go on says of which network it was, where there are several."""
    try:
        yield
    except TrainingError as error:
        if not name:
            raise
        raise TrainingError(f"The network {name!r}: {error}") from error


def _train_inside(
    weights: nn.Module,
    graph: ChannelGraph,
    widths: Widths,
    loader: Loader,
    config: TrainConfig,
    loss: Loss | None,
    on_step: Callable[[StepRecord], None],
    engine: Engine | None,
    checkpointer: Checkpointer | None,
    optimizer: MakeOptimizer | None,
) -> tuple[nn.Module, list[StepRecord]]:
    """Slimmable training: in each step the largest network learns the task and the pruned one imitates it."""
    whole = copy.deepcopy(weights)
    reinitialize(whole, generator=generator(config.seed))
    pair = _Pair(Supernet(whole, graph), widths)
    task = loss or classification_loss(config.label_smoothing)

    def both(outputs: Any, batch: Any) -> Tensor:
        largest, pruned = outputs
        return task(largest, batch) + distillation_loss(pruned, [tensor.detach() for tensor in tensors_in(largest)])

    engine = engine or Engine()
    if loss is None and optimizer is None and engine.graphs is None and current().size == 1:
        engine = replace(engine, graphs=True)  # this loss never asks the device for a number
    steps = training.train(pair, loader, config, both, None, on_step, engine, checkpointer, optimizer=optimizer)
    small = cut(pair.net.model, graph, widths)
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
        x = kwargs or args
        return [self.net(x, gates) for gates in self.gates]


def _steps_of(name: str, on_event: Report | None) -> Callable[[StepRecord], None]:
    report = on_event or silent
    return lambda record: report(Event(name, record.steps, record))


class TeacherWarning(UserWarning):
    """A teacher that seems to know less than those who learn from it."""


def who_teaches(kind: Retrain, teacher: nn.Module | None, model: nn.Module, worth: Row | None = None) -> str:
    """In words; `worth`: how good a teacher is, which is said where it is no row of the table."""
    if teacher is None:
        return TRAINED_FIRST if kind is Retrain.TEACHER else ""
    if is_model(teacher, model):
        return AS_IT_WAS
    if worth is None or fingerprint(unwrap(teacher)) == fingerprint(unwrap(model)):
        return "the teacher"
    return f"a teacher that is no row here ({'metric' if worth.own_metric else 'accuracy'} {score(worth)})"


def weigh_teacher(
    guide: nn.Module, given: nn.Module | None, classes: int, val_loader: Loader, metric: Metric | None = None
) -> Row:
    """Test a teacher before anybody learns from it, and warn of one that has little to teach.

    given: the network that goes on from its own weights, to be compared with; None where it does not, or teaches.
    """
    worth = test_copy(TEACHER, guide, val_loader, metric)
    other = None if given is None else test_copy(ORIGINAL, given, val_loader, metric)
    if current().first and (told := poor_teacher(worth, other, classes)):
        warnings.warn(told, TeacherWarning, stacklevel=3)
    return worth


def copied(teacher: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a teacher where the others are, on all ranks that of rank 0."""
    net = narrow(unwrap(teacher), {}, {}).to(device)
    share_tensors([*net.parameters(), *net.buffers()], current())
    return net


def trained_before(
    model: nn.Module, kind: Retrain, test_given: bool, guide: nn.Module | None = None, teacher: nn.Module | None = None
) -> dict[str, nn.Module]:
    """Networks of the table that nobody has trained here: the model, and a teacher whose costs are the model's.

    guide: what teaches, a copy of the given `teacher`, which may be the model itself.
    """
    itself = is_model(teacher, model)
    found = {ORIGINAL: unwrap(model)} if test_given and (kind is Retrain.FINETUNE or itself) else {}
    if guide is not None and not itself and fingerprint(guide) == fingerprint(unwrap(model)):
        found[TEACHER] = guide
    return found


def is_model(teacher: nn.Module | None, model: nn.Module) -> bool:
    """Whether the teacher is the network that is pruned."""
    return teacher is not None and unwrap(teacher) is unwrap(model)
