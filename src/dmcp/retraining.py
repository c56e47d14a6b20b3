"""Train the cut network: from scratch, fine-tuned or slimmable, with or without a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from dmcp.cutting import cut, reinitialize
from dmcp.errors import DmcpWarning, TrainingError, warn
from dmcp.results import divergence, last_epoch_loss
from dmcp.runs.records import ORIGINAL, TEACHER, UNPRUNED, StepRecord
from dmcp.runtime.batches import Loader, device_of, generator, length_of
from dmcp.runtime.checkpoint import seeded, untouched
from dmcp.runtime.distributed import current, gather, share_tensors
from dmcp.searching.supernet import Supernet
from dmcp.settings import Distill, Engine, Optimizer, ResolvedTrainConfig, Retrain
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.modules import kept_modes, modules_of, narrow, unwrap
from dmcp.tracing.widths import Widths, fingerprint
from dmcp.training.calibration import recalibrate
from dmcp.training.distillation import Distillation, detached, distillation_loss, is_of_classes
from dmcp.training.loop import Runtime, Task, train
from dmcp.training.losses import classification_loss
from dmcp.training.trained import describe_guessing

# Teachers, in words.
AS_IT_WAS = "the network as given"
TRAINED_FIRST = "the unpruned network, which was trained first"
_FEW_STEPS = 100  # below this the running statistics of BatchNorms lag behind the weights: REPORT.md, "short"


class DivergenceWarning(DmcpWarning):
    """A training whose loss ended higher than it began."""


class TeacherWarning(DmcpWarning):
    """A teacher that guesses."""


@dataclass(frozen=True, kw_only=True)
class Retraining:
    """How networks get their weights, and which teacher they learn from besides the labels."""

    config: ResolvedTrainConfig
    kind: Retrain = Retrain.SCRATCH
    teacher: nn.Module | str | None = None  # a trained network, or "unpruned": the unpruned one, which is trained first

    def __post_init__(self) -> None:
        check_teacher_use(self.kind, self.teacher)

    @property
    def teacher_network(self) -> nn.Module | None:
        """The teacher, if it is a network that is there already."""
        if isinstance(self.teacher, nn.Module):
            return self.teacher
        return None

    @property
    def anew(self) -> bool:
        """Whether networks start from fresh weights."""
        return self.kind in (Retrain.SCRATCH, Retrain.SLIMMABLE)


def check_teacher_use(kind: Retrain, teacher: nn.Module | str | None) -> None:
    """Refuse what cannot be a teacher, and a teacher that this kind of retraining has no use for."""
    if teacher is None:
        return
    if kind in (Retrain.NONE, Retrain.SLIMMABLE):
        raise TrainingError(f'retrain="{kind}" has no use for a teacher: leave it out.')
    if teacher != UNPRUNED and not isinstance(teacher, nn.Module):
        raise TrainingError(f'teacher must be a trained torch.nn.Module or "{UNPRUNED}", not {teacher!r}.')


# training


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedNetworks:
    """Networks that were trained in the same way, by the names of their rows."""

    networks: dict[str, nn.Module] = field(default_factory=dict)
    losses: dict[str, float | None] = field(default_factory=dict)  # means over the last epoch; None if unknown

    def __or__(self, others: TrainedNetworks) -> TrainedNetworks:
        return TrainedNetworks(
            networks={**self.networks, **others.networks},
            losses={**self.losses, **others.losses},
        )


def train_all(
    source: nn.Module,
    graph: ChannelGraph,
    widths: Mapping[str, Widths],
    loader: Loader,
    retraining: Retraining,
    *,
    cuts: Mapping[str, nn.Module] | None = None,
    task: Task = Task(),
    runtime: Runtime = Runtime(),
) -> TrainedNetworks:
    """Train networks of these widths, all in the same way.

    The networks are cut out of `source`, except for those in `cuts`: these are cut already, of other channels than the
    first ones, and are trained in place.
    """
    cuts = cuts or {}
    networks: dict[str, nn.Module] = {}
    losses: dict[str, float | None] = {}
    teacher = retraining.teacher
    if teacher == UNPRUNED:
        widths = {UNPRUNED: graph.full, **widths}  # first, since the others learn from it
    for name, chosen in widths.items():
        stage = runtime.stage(name)
        if retraining.kind is Retrain.SLIMMABLE and chosen != graph.full:
            net = Supernet(source, graph)
            networks[name], steps = _train_slimmable(net, chosen, loader, retraining.config, task, stage)
        else:
            network = cuts[name] if name in cuts else cut(source, graph, chosen)
            networks[name] = network
            if retraining.kind is Retrain.NONE:
                calibrated(network, loader)
                continue
            if retraining.anew:
                reinitialize(network, generator=generator(retraining.config.seed))
            else:
                recalibrate(network, loader)
            guide = None
            if isinstance(teacher, nn.Module):
                guide = teacher
            steps = train(network, loader, retraining.config, task=task, runtime=stage, teacher=guide)
            catch_up(network, loader, retraining.config)
            if teacher == UNPRUNED:
                teacher = network
        losses[name] = last_epoch_loss(steps)
        problem = divergence(name, [step.loss for step in steps])
        if problem:
            warn(problem, DivergenceWarning)
    return TrainedNetworks(networks=networks, losses=losses)


def calibrated(network: nn.Module, loader: Loader) -> nn.Module:
    """The same network with BatchNorms that fit its weights; the loader is left as it was."""
    with untouched(loader, device_of(network)):
        recalibrate(network, loader)
    return network


def catch_up(network: nn.Module, loader: Loader, config: ResolvedTrainConfig) -> None:
    """Calibrate BatchNorms after a training of few steps, since their running statistics lag behind the weights.

    A network that keeps one of them in eval mode is left alone: its weights were trained with the statistics it has.
    """
    steps = config.epochs * min(gather(length_of(loader), current()))
    if steps >= _FEW_STEPS:
        return
    with kept_modes(network), seeded(config.seed, device_of(network), current()):
        network.train()
        norms = [norm for norm in modules_of(network) if isinstance(norm, _NormBase)]
        if all(norm.training for norm in norms):
            calibrated(network, loader)


def _train_slimmable(
    net: Supernet, widths: Widths, loader: Loader, config: ResolvedTrainConfig, task: Task, runtime: Runtime
) -> tuple[nn.Module, list[StepRecord]]:
    """Slimmable training: in each step the largest network learns the task, and the pruned one learns from it."""
    reinitialize(net.model, generator=generator(config.seed))
    task_loss = task.loss or classification_loss(config.label_smoothing)
    distill = task.distillation or Distill.CLASSES

    def loss(outputs: Any, batch: Any) -> Tensor:
        largest, pruned = outputs
        return task_loss(largest, batch) + distillation_loss(pruned, detached(largest), kind=distill)

    engine = runtime.engine or Engine()
    # the training sees a loss of its own, but one that never asks the device for a number
    if (
        task.loss is None
        and task.distill is None
        and task.optimizer is None
        and config.optimizer is Optimizer.SGD
        and engine.graphs is None
        and current().size == 1
    ):
        engine = replace(engine, graphs=True)
    pair = _Pair(net, widths)
    steps = train(pair, loader, config, task=replace(task, loss=loss), runtime=replace(runtime, engine=engine))
    small = cut(net.model, net.graph, widths)
    recalibrate(small, loader)  # the running statistics are a mixture of both networks'
    return small, steps


class _Pair(nn.Module):
    """The largest sub-network and one other, run on the same input: one step has the gradients of both."""

    def __init__(self, net: Supernet, widths: Widths) -> None:
        super().__init__()
        self.net = net
        net.alpha.requires_grad_(False)
        self.gates = [net.hard(net.graph.full), net.hard(widths)]

    def forward(self, *args: Any, **kwargs: Any) -> list[Any]:
        return [self.net(kwargs or args, gates) for gates in self.gates]


def describe_origin(
    retraining: Retraining, teacher: str, name: str, start: str, distill: Distillation = Distill.CLASSES
) -> str:
    """A sentence about where the weights of a network come from; `teacher` is empty if there is none."""
    if retraining.kind is Retrain.NONE:
        return f"{name}: {start}, calibrated and not trained"
    if retraining.kind is Retrain.SLIMMABLE:
        text = f"{name}: trained from fresh weights inside the unpruned network"
    elif retraining.anew:
        text = f"{name}: trained from fresh weights"
    else:
        text = f"{name}: fine-tuned from {start}"
    if not teacher:
        return text
    share = 100 * retraining.config.kd_weight
    distillation = f"{share:g}% distillation from {teacher}"
    if is_of_classes(distill):
        distillation += f" (temperature {retraining.config.kd_temperature:g})"
    return f"{text}; loss: {distillation}, {100 - share:g}% labels"


# teachers


def is_model(teacher: nn.Module | str | None, model: nn.Module) -> bool:
    """Whether the teacher is the network that is pruned."""
    return isinstance(teacher, nn.Module) and unwrap(teacher) is unwrap(model)


def describe_teacher(teacher: nn.Module | str | None, model: nn.Module) -> str:
    """The teacher in words; empty if there is none."""
    if teacher is None:
        return ""
    if not isinstance(teacher, nn.Module):
        return TRAINED_FIRST
    if is_model(teacher, model):
        return AS_IT_WAS
    return "the teacher"


def copy_of_teacher(teacher: nn.Module, device: torch.device) -> nn.Module:
    """A copy on the device, on all ranks that of rank 0."""
    network = narrow(unwrap(teacher), {}, {}).to(device)
    share_tensors([*network.parameters(), *network.buffers()], current())
    return network


def warn_of_poor_teacher(teacher: nn.Module, classes: int, val_loader: Loader) -> None:
    """Warn if a teacher guesses."""
    guess = describe_guessing(teacher, classes, val_loader)
    if guess and current().first:
        warn(f"The teacher is {guess}: was it trained, and are its classes in the same order?", TeacherWarning)


def given_networks(model: nn.Module, original: bool, teacher: nn.Module | None = None) -> dict[str, nn.Module]:
    """Rows of networks that were given: the original model, and a teacher with the same architecture, so the same cost.

    original: whether the model is a row.
    """
    networks: dict[str, nn.Module] = {}
    if original:
        networks[ORIGINAL] = unwrap(model)
    if teacher is not None and fingerprint(teacher) == fingerprint(unwrap(model)):
        networks[TEACHER] = teacher
    return networks
