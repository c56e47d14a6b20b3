"""Train the cut network: from scratch, fine-tuned or slimmable, with or without a teacher."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from dmcp.cutting import cut, reinitialize
from dmcp.errors import TrainingError
from dmcp.results import ORIGINAL, TEACHER, UNPRUNED, divergence
from dmcp.runtime.batches import Loader, device_of, generator, length_of, size_of
from dmcp.runtime.checkpoint import seeded, untouched
from dmcp.runtime.distributed import current, gather, share_tensors
from dmcp.runtime.progress import phase
from dmcp.searching.supernet import Supernet
from dmcp.settings import Engine, Retrain, TrainConfig
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.modules import kept_modes, modules_of, narrow, tensors_in, unwrap
from dmcp.tracing.widths import Widths, fingerprint
from dmcp.training.calibration import recalibrate
from dmcp.training.loop import Runtime, StepRecord, Task, evaluate, train
from dmcp.training.losses import LowerIsBetter, Metric, classification_loss, distillation_loss, warn

AS_IT_WAS, TRAINED_FIRST = "the network as given", "the unpruned network, which was trained first"  # who teach
_FEW_STEPS = 100  # below which the running statistics of BatchNorms lag behind the weights: REPORT.md, "short"
_SHUFFLED, _SHUFFLED_BATCHES = 9, 4  # copies with shuffled weights, and batches on which they are tested
_CLEARLY = 0.25  # of the best score of a shuffled copy: a trained network is better by more than that ...
_SPREADS = 3  # ... or by more than so many times what the scores of shuffled copies differ by
_LOG = logging.getLogger("dmcp")
_GUESSED = 0.1  # of the way from guessing to all right, up to which nothing was learned


class DivergenceWarning(UserWarning):
    """A training whose loss ended higher than it began."""


class LabelsWarning(UserWarning):
    """A trained network that knows nothing of the labels."""


class UnusedNormsWarning(UserWarning):
    """A trained network whose BatchNorms were never in train mode."""


class TeacherWarning(UserWarning):
    """A teacher that guesses."""


@dataclass(frozen=True)
class Retraining:
    """How networks get their weights, and whom they learn from besides the labels."""

    config: TrainConfig
    kind: Retrain = Retrain.SCRATCH
    teacher: nn.Module | str | None = None  # a trained network, or "unpruned": the unpruned one, which is trained first

    def __post_init__(self) -> None:
        if self.teacher is not None and self.kind in (Retrain.NONE, Retrain.SLIMMABLE):
            raise TrainingError(f'retrain="{self.kind}" has no use for a teacher: leave it out.')
        if not (self.teacher is None or self.teacher == UNPRUNED or isinstance(self.teacher, nn.Module)):
            raise TrainingError(f'teacher must be a trained torch.nn.Module or "{UNPRUNED}", not {self.teacher!r}.')

    @property
    def anew(self) -> bool:
        """True if networks get fresh weights."""
        return self.kind in (Retrain.SCRATCH, Retrain.SLIMMABLE)


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
    teacher = how.teacher
    if teacher == UNPRUNED:
        wanted = {UNPRUNED: graph.full} | wanted
    for name, widths in wanted.items():
        own = runtime.stage(name)
        if how.kind is Retrain.SLIMMABLE and widths != graph.full:
            nets[name], steps = _train_slimmable(Supernet(weights, graph), widths, loader, how.config, task, own)
        else:
            small = nets[name] = cuts[name] if cuts and name in cuts else cut(weights, graph, widths)
            if how.kind is Retrain.NONE:
                calibrated(small, loader)
                continue
            if how.anew:
                reinitialize(small, generator=generator(how.config.seed))
            else:
                recalibrate(small, loader)
            guide = teacher if isinstance(teacher, nn.Module) else None
            steps = train(small, loader, how.config, task=task, runtime=own, teacher=guide)
            catch_up(small, loader, how.config)
            if teacher == UNPRUNED:
                teacher = small
        if text := divergence(name, [step.loss for step in steps]):
            warn(text, DivergenceWarning)
    return nets


def calibrated(small: nn.Module, loader: Loader) -> nn.Module:
    """The same network with BatchNorms that fit its weights; the loader is as it was."""
    with untouched(loader, device_of(small)):
        recalibrate(small, loader)
    return small


def catch_up(small: nn.Module, loader: Loader, config: TrainConfig) -> None:
    """After a training of few steps, calibrate BatchNorms, whose running statistics lag behind the weights.

    Not in a network that keeps one of them in eval mode: its weights were trained with the statistics as they are.
    """
    if config.epochs * min(gather(length_of(loader), current())) < _FEW_STEPS:
        with kept_modes(small), seeded(config.seed, device_of(small), current()):
            small.train()
            if all(norm.training for norm in modules_of(small) if isinstance(norm, _NormBase)):
                calibrated(small, loader)


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


# teachers


def origin(how: Retraining, teacher: str, name: str, earlier: str) -> str:
    """Where the weights of a network come from, for readers of its table; no teacher: an empty text."""
    if how.kind is Retrain.NONE:
        return f"{name}: {earlier}, calibrated and not trained"
    inside = " inside the unpruned network" if how.kind is Retrain.SLIMMABLE else ""
    begun = f"from fresh weights{inside}" if how.anew else f"on from {earlier}"
    share, temperature = 100 * how.config.kd_weight, how.config.kd_temperature
    shares = f"{share:g}% of its loss from {teacher} (temperature {temperature:g}), the rest from the labels"
    return f"{name}: trained {begun}" + (f", {shares}" if teacher else "")


def who_teaches(teacher: nn.Module | str | None, model: nn.Module) -> str:
    """In words."""
    if not isinstance(teacher, nn.Module):
        return TRAINED_FIRST if teacher else ""
    return AS_IT_WAS if is_model(teacher, model) else "the teacher"


def is_model(teacher: nn.Module | str | None, model: nn.Module) -> bool:
    """Whether the teacher is the network that is pruned."""
    return isinstance(teacher, nn.Module) and unwrap(teacher) is unwrap(model)


def is_trained(model: nn.Module, classes: int, val_loader: Loader, metric: Metric | None) -> bool:
    """True if a model does better than guessing or, by a metric of the user's own, than with its weights shuffled.

    Warns of a model whose norms saw data and that guesses, since its labels may not be those of the data, and of a
    trained model whose norms saw none.
    """
    norms = [norm for norm in modules_of(unwrap(model)) if isinstance(norm, _NormBase)]
    if metric is not None:
        trained = _beats_shuffled(model, val_loader, metric)
    else:
        guessing = _guessing(model, classes, val_loader)
        trained = not guessing
        saw_data = any(bool(norm.num_batches_tracked) for norm in norms if norm.num_batches_tracked is not None)
        if guessing and saw_data and current().first:
            ask = "are its classes in the order of the labels, and its inputs prepared as in its training?"
            warn(f"The network was trained before, but is {guessing}: {ask} It counts as not trained.", LabelsWarning)
    if trained and any(map(_is_unused, norms)) and current().first:
        warn(
            "The network is trained, but some of its BatchNorms have the statistics that they were made with (mean 0, "
            "variance 1): it was trained in eval mode. Pruning calibrates BatchNorms and trains in train mode, which "
            "loses what the network knew until it is trained again. Replace them by layers that scale and shift.",
            UnusedNormsWarning,
        )
    return trained


def _is_unused(norm: _NormBase) -> bool:
    """Whether a norm has the statistics that it was made with."""
    if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked:
        return False
    return not norm.running_mean.any() and bool(norm.running_var.eq(1).all())


def _beats_shuffled(model: nn.Module, loader: Loader, metric: Metric) -> bool:
    """Whether a model scores clearly better than copies of it in which the entries of each parameter are shuffled.

    Shuffling changes nothing that an initialization has: among such copies a network that was never trained is one like
    all others, whatever it was initialized by and whatever the metric is. A trained one loses what it learned.
    """
    device, dice = device_of(model), generator(0)
    better = -1.0 if isinstance(metric, LowerIsBetter) else 1.0
    with untouched(loader, device), phase("are the weights trained?", _SHUFFLED + 1) as update:
        batches = list(itertools.islice((batch for batch in loader if size_of(batch)), _SHUFFLED_BATCHES))
        network = narrow(unwrap(model), {}, {})
        score = better * evaluate(network, batches, metric)
        scores: list[float] = []
        for number in range(1, _SHUFFLED + 1):
            _shuffle_entries(network, dice)
            shuffled = better * evaluate(network, batches, metric)
            scores += [shuffled] if math.isfinite(shuffled) else []
            update(number)
        best = max(scores, default=-math.inf)
        spread = best - min(scores, default=best)
        trained = score > best and (score - best > _CLEARLY * abs(best) or score - best > _SPREADS * spread)
        text = f"{better * score:.4g}, at best {better * best:.4g} with shuffled weights"
        verdict = f"the network counts as {'trained' if trained else 'not trained'}: {text}"
        update(_SHUFFLED + 1, verdict)
    if current().first:
        _LOG.info("By its metric %s.", verdict)
    return trained


@torch.no_grad()
def _shuffle_entries(model: nn.Module, dice: torch.Generator) -> None:
    """Bring the entries of every parameter, in place, into a random order."""
    for parameter in model.parameters():
        order = torch.randperm(parameter.numel(), generator=dice).to(parameter.device)
        parameter.copy_(parameter.flatten()[order].reshape(parameter.shape))


def _guessing(model: nn.Module, classes: int, loader: Loader) -> str:
    """Test a copy of a model: a text about an accuracy with which nothing was learned; empty for a better one."""
    with untouched(loader, device_of(model)):
        accuracy = evaluate(narrow(unwrap(model), {}, {}), loader)
    chance = 1 / max(classes, 1)
    better = accuracy > chance + _GUESSED * (1 - chance)
    return "" if better else f"right on {accuracy:.2%} of the test data, where guessing gives {100 * chance:.3g}%"


def copied(teacher: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a teacher on the device, on all ranks that of rank 0."""
    net = narrow(unwrap(teacher), {}, {}).to(device)
    share_tensors([*net.parameters(), *net.buffers()], current())
    return net


def trained_before(model: nn.Module, original: bool, teacher: nn.Module | None = None) -> dict[str, nn.Module]:
    """Rows that are not trained here: the original model, and a teacher of its own that costs as much."""
    found = {ORIGINAL: unwrap(model)} if original else {}
    if teacher is not None and fingerprint(teacher) == fingerprint(unwrap(model)):
        found[TEACHER] = teacher
    return found


def weigh_teacher(guide: nn.Module, classes: int, val_loader: Loader) -> None:
    """Warn of a teacher that guesses."""
    if (text := _guessing(guide, classes, val_loader)) and current().first:
        warn(f"The teacher is {text}: was it trained, and are its classes in the same order?", TeacherWarning)
