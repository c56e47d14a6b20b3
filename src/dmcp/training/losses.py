"""Losses, metrics and distillation."""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional as F

from dmcp.arguments import checked
from dmcp.errors import DataError, DmcpError, TrainingError
from dmcp.runtime.batches import labels_of, size_of, widest
from dmcp.runtime.distributed import World, current, gather, sum_values
from dmcp.tracing.modules import tensors_in

Loss = Callable[[Any, Any], Tensor]  # (output, batch) -> scalar
MeanMetric = Callable[[Any, Any], Any]  # (output, batch) -> (sum over the samples, their count), or the mean


@runtime_checkable
class WholeMetric(Protocol):
    """A metric of a whole data set that is no mean over its samples, such as those of torchmetrics."""

    def reset(self) -> Any: ...  # forget all batches

    def update(self, output: Any, batch: Any) -> Any: ...  # see one batch

    def compute(self) -> Any: ...  # one number about all batches since the last reset


Metric = MeanMetric | WholeMetric
Pairs = Iterable[tuple[Any, Any]]  # outputs and their batches
_METHODS = ("reset", "update", "compute")
_IGNORED = -100  # labels that cross-entropy leaves out


class DistillationWarning(UserWarning):
    """Outputs are taken for class scores, though the loss is the user's own and they may be something else."""


class MetricWarning(UserWarning):
    """A metric that is no number."""


def warn(text: str, category: type[Warning]) -> None:
    """A warning at the user's line that leads here."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "dmcp":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def warn_of_distillation(loss: Loss | None, who: str, remedy: str) -> None:
    """Warn, once for all ranks, that outputs are taken for class scores though the loss is the user's own."""
    if loss is not None and current().first:
        warn(f"{who} outputs as class scores along dim 1: if they are something else, {remedy}.", DistillationWarning)


# losses


def classification_loss(label_smoothing: float = 0.0) -> Loss:
    """Cross-entropy of the classes along dim 1, `label_smoothing` of the target spread over all of them."""

    def loss(output: Any, batch: Any) -> Tensor:
        scores, labels = _classes(output, batch)
        return F.cross_entropy(scores.float(), labels, label_smoothing=label_smoothing)

    return loss


def distillation_loss(output: Any, target: Sequence[Tensor], temperature: float = 1.0) -> Tensor:
    """KL divergence of the classes along dim 1 from the target's, summed over the tensors of the output.

    The temperature divides the scores of both; its square keeps gradients as large.
    """
    own = tensors_in(output)
    if [tensor.shape for tensor in own] != [tensor.shape for tensor in target] or any(
        tensor.ndim < 2 or tensor.shape[1] < 2 or not tensor.is_floating_point() for tensor in own
    ):
        shapes = " and ".join(str([tuple(tensor.shape) for tensor in part]) for part in (own, target))
        needs = f"Distillation needs the same classes along dim 1 of all outputs, not {shapes}"
        raise TrainingError(f"{needs}: set distill=False in the SearchConfig, and leave the teacher out.")
    parts = []
    for mine, wanted in zip(own, target, strict=True):
        goal = F.log_softmax(wanted.float() / temperature, dim=1)
        parts.append((goal.exp() * (goal - F.log_softmax(mine.float() / temperature, dim=1))).sum(dim=1).mean())
    return temperature**2 * torch.stack(parts).sum()


def loss_of(loss: Loss, output: Any, batch: Any) -> Tensor:
    """What a loss gives, if it can be trained on."""
    with _noted("loss(output, batch), such as lambda output, batch: cross_entropy(output, batch[1])"):
        value = loss(output, batch)
    usable = isinstance(value, Tensor) and not value.ndim and not value.is_complex()
    if not usable or (torch.is_grad_enabled() and not value.requires_grad):
        raise TrainingError(
            f"A loss must return one real number with a gradient, not {getattr(value, 'shape', value)!r:.50}: "
            "return a mean over the samples, and leave out .item(), .detach() and argmax."
        )
    return value


# labels


def check_fit(labels: Tensor, shape: Sequence[int]) -> None:
    """Refuse labels that are neither class numbers nor shares of classes for scores of this shape."""
    numbers, shares = (shape[0], *shape[2:]), tuple(shape)
    if labels.is_complex() or labels.shape != (shares if labels.is_floating_point() else numbers):
        raise DataError(
            f"The labels are {tuple(labels.shape)} of {labels.dtype}, the network gives {shares}: labels must be class "
            f"numbers, integers of shape {numbers}, or shares, floats of shape {shares}; else give loss= and metric=."
        )


def check_range(labels: Tensor, classes: int) -> None:
    """Refuse labels of classes that the network has no output for."""
    if labels.is_floating_point() or not labels.numel():
        return  # shares of classes
    lowest, highest = torch.stack(labels.masked_fill(labels == _IGNORED, 0).aminmax()).tolist()  # waits once
    if lowest < 0 or highest >= classes:
        wrong = f"A label is {lowest if lowest < 0 else highest}, but the network has {classes} outputs"
        raise DataError(f"{wrong}: number the classes from 0, or build the network for more of them.")


def _classes(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Scores with classes along dim 1, and the labels: class numbers, or shares in the shape of the scores."""
    scores = scores_of(output)
    if scores is None or scores.ndim < 2:
        raise TrainingError("The network gives no tensor of classes along dim 1: give your own loss and metric.")
    labels = labels_of(batch)
    check_fit(labels, scores.shape)
    return scores, labels if labels.is_floating_point() else labels.long()


def scores_of(output: Any) -> Tensor | None:
    """The class scores: the output, its `logits` (transformers) or "out" (torchvision), or a tuple's only matrix."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "out"):
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    several = output if isinstance(output, tuple | list) else ()
    matrices = [it for it in several if isinstance(it, Tensor) and it.ndim > 1]
    return matrices[0] if len(matrices) == 1 else None  # features and scores look alike


# metrics


@checked
@dataclass(frozen=True)
class LowerIsBetter:
    """A metric of which little is good, such as an error; tables and methods know."""

    metric: Metric
    is_loss: bool = False  # the loss of the training, as there is no other metric

    def __call__(self, output: Any, batch: Any) -> Any:
        assert callable(self.metric)
        return self.metric(output, batch)


def score_by(loss: Loss, output: Any, batch: Any) -> LowerIsBetter | None:
    """The loss as the metric, unless the labels are class numbers and the output has several classes: accuracy."""
    with contextlib.suppress(DmcpError):
        scores, labels = _classes(output, batch)
        if scores.shape[1] > 1 and not labels.is_floating_point():
            return None
    return LowerIsBetter(loss, is_loss=True)


def top1(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Correct answers and how many there are, of samples or of pixels, without those that the loss ignores.

    Scores that are NaN are no answer.
    """
    scores, labels = _classes(output, batch)
    check_range(labels, scores.shape[1])
    found = scores.argmax(dim=1)
    if labels.is_floating_point():  # several classes may have the largest share
        right = labels.gather(1, found.unsqueeze(1)).squeeze(1) == labels.amax(dim=1)
        ignored = torch.zeros_like(right)
    else:
        right, ignored = found == labels, labels == _IGNORED
    return (right & ~scores.isnan().any(dim=1)).sum(), right.numel() - ignored.sum()


def whole_of(metric: Any) -> WholeMetric | None:
    """The object, if the metric is one of a whole data set; None for a function. What is neither is refused."""
    while isinstance(metric, LowerIsBetter):
        metric = metric.metric
    if isinstance(metric, type) or (not callable(metric) and not all(hasattr(metric, it) for it in _METHODS)):
        other = "an object with reset(), update(output, batch) and compute()"
        raise TrainingError(f"metric must be a function (output, batch) -> (sum, count), or {other}, not {metric!r}.")
    return metric if all(hasattr(metric, it) for it in _METHODS) else None


def check_metric(metric: Metric | None, world: World) -> WholeMetric | None:
    """The object, if the metric is one of a whole data set; refused if it would see a part of the samples only."""
    whole = None if metric is None else whole_of(metric)
    if whole is not None and world.size > 1 and getattr(whole, "all_ranks", False) is not True:
        raise TrainingError(
            f"Each of {world.size} ranks sees a part of the samples only: let compute() of the metric gather from all "
            "ranks, as torchmetrics does, and say so by all_ranks = True in its class."
        )
    return whole


def measure(metric: WholeMetric, pairs: Pairs, world: World) -> float:
    """The metric of all these outputs and batches; with several ranks its compute() gathers from all."""
    metric.reset()
    seen = 0
    for output, batch in pairs:
        seen += size_of(batch)
        with _noted("update(output, batch) of a metric"):
            metric.update(output, batch)
    _refuse_none(sum_values(torch.tensor(seen), world))
    with _noted("compute() of a metric and makes it a float"):
        value = float(metric.compute())
    if not all(math.isclose(value, it, rel_tol=1e-6) for it in gather(value, world) if not math.isnan(it)):
        raise TrainingError("compute() of the metric gave other numbers on other ranks: it must gather from all.")
    return value


def mean(metric: MeanMetric, pairs: Pairs, device: torch.device, world: World) -> tuple[float, float]:
    """The mean of the metric over the answers of all these outputs and batches, and of all ranks; their number."""
    total = torch.zeros(2, dtype=widest(device), device=device)
    for output, batch in pairs:
        with _noted("metric(output, batch) -> (sum, count), or the loss where no metric= is given"):
            found = metric(output, batch)
        try:
            value, count = sum_and_count(found, batch)
            total += torch.stack([torch.as_tensor(it, device=device).to(total) for it in (value, count)])
        except (TypeError, ValueError, RuntimeError) as error:
            raise TrainingError(f"A metric must return (sum, count) or a mean, numbers, not {found!r:.50}.") from error
    summed, answers = sum_values(total, world).tolist()
    _refuse_none(answers)
    return summed / answers, answers


def sum_and_count(found: Any, batch: Any) -> Any:
    """What a metric gave of a batch, as a pair: a number is the mean of its samples."""
    pair = isinstance(found, tuple | list) or getattr(found, "shape", ()) == (2,)
    return found if pair else (found * size_of(batch), size_of(batch))


def _refuse_none(samples: float | Tensor) -> None:
    if not samples:
        raise TrainingError("There is nothing to evaluate on: the loader gave no samples.")


@contextlib.contextmanager
def _noted(call: str) -> Iterator[None]:
    """What a function of the user raises says how it was called."""
    try:
        yield
    except DmcpError:
        raise
    except Exception as error:
        error.add_note(f"dmcp calls {call}, with the whole batch.")
        raise
