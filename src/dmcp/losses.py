"""Losses, metrics and distillation."""

from __future__ import annotations

import contextlib
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from dmcp.batches import labels_of, size_of, widest
from dmcp.errors import DataError, DmcpError, TrainingError
from dmcp.modules import tensors_in
from dmcp.runtime.distributed import World, gather, sum_values

Loss = Callable[[Any, Any], Tensor]  # (output, batch) -> scalar
MeanMetric = Callable[[Any, Any], tuple[Tensor, Any]]  # (output, batch) -> (sum over the samples, their count)


class WholeMetric(Protocol):
    """A metric of a whole data set that is no mean over its samples, such as those of torchmetrics."""

    def reset(self) -> Any:
        """Forget all batches."""

    def update(self, output: Any, batch: Any) -> Any:
        """See one batch."""

    def compute(self) -> Any:
        """One number about all batches since the last reset."""


Metric = MeanMetric | WholeMetric
_METHODS = ("reset", "update", "compute")
_IGNORED = -100  # labels that cross-entropy leaves out
_NEAR = 1e-6  # how far, as a share, numbers of ranks may differ that have summed in another order


class DistillationWarning(UserWarning):
    """Outputs are taken for class scores, though the loss is the user's own and they may be something else."""


class MetricWarning(UserWarning):
    """A metric that is no number, or labels that the network has no output for."""


def warn(text: str, category: type[Warning]) -> None:
    """A warning at the user's line that leads here."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == "dmcp":
        frame, level = frame.f_back, level + 1
    warnings.warn(text, category, stacklevel=level)


def warn_of_distillation(who: str, remedy: str) -> None:
    """Warn that outputs are taken for class scores."""
    warn(f"{who} outputs as class scores along dim 1: if they are something else, {remedy}.", DistillationWarning)


# losses


def classification_loss(label_smoothing: float = 0.0) -> Loss:
    """Cross-entropy of the classes along dim 1, `label_smoothing` of the target spread over all of them."""

    def loss(output: Any, batch: Any) -> Tensor:
        scores, labels = _classes(output, batch)
        try:
            return F.cross_entropy(scores.float(), labels, label_smoothing=label_smoothing)
        except IndexError:  # on the CPU
            check_range(labels, scores.shape[1])
            raise

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
        raise TrainingError(
            f"Distillation needs the same classes along dim 1 of all outputs, not {shapes}: set distill=False in the "
            'SearchConfig, and take retrain="scratch" or "finetune" without a teacher.'
        )
    parts = []
    for mine, wanted in zip(own, target, strict=True):
        goal = F.log_softmax(wanted.float() / temperature, dim=1)
        parts.append((goal.exp() * (goal - F.log_softmax(mine.float() / temperature, dim=1))).sum(dim=1).mean())
    return temperature**2 * torch.stack(parts).sum()


def loss_of(loss: Loss, output: Any, batch: Any) -> Tensor:
    """What a loss gives, if it can be trained on."""
    with _noted("loss(output, batch), such as lambda output, batch: cross_entropy(output, batch[1])"):
        value = loss(output, batch)
    if not isinstance(value, Tensor) or value.ndim or (torch.is_grad_enabled() and not value.requires_grad):
        what = f"{_kind(value)}" + (" without one" if isinstance(value, Tensor) and not value.ndim else "")
        raise TrainingError(
            f"A loss must return a tensor of one number with a gradient, not {what}: return a mean over the samples, "
            "and leave out .item(), .detach() and argmax."
        )
    return value


# labels


def check_fit(labels: Tensor, shape: Sequence[int]) -> None:
    """Refuse labels that are neither class numbers nor shares of classes for scores of this shape."""
    numbers, shares = (shape[0], *shape[2:]), tuple(shape)
    if labels.is_complex() or labels.shape != (shares if labels.is_floating_point() else numbers):
        raise DataError(
            f"The labels are {tuple(labels.shape)} of {labels.dtype}, the network gives {shares}: labels must be class "
            f"numbers, integers of shape {numbers} (try labels.squeeze(1), .long() or .argmax(1)), or shares of "
            f"classes, floats of shape {shares}; for anything else give your own loss and metric."
        )


def check_range(labels: Tensor, classes: int) -> None:
    """Refuse labels of classes that the network has no output for."""
    if labels.is_floating_point() or not labels.numel():
        return  # shares of classes
    lowest, highest = (int(it) for it in labels.masked_fill(labels == _IGNORED, 0).aminmax())
    if lowest < 0 or highest >= classes:
        raise DataError(
            f"A label is {lowest if lowest < 0 else highest}, but the network has {classes} outputs, for labels from 0 "
            f"to {classes - 1}: number the classes from 0, or build the network for more of them."
        )


def _classes(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Scores with classes along dim 1, and the labels: class numbers, or shares in the shape of the scores."""
    scores = scores_of(output)
    if scores is None or scores.ndim < 2:
        raise TrainingError(
            f"The network gives {_kind(output)}, not one tensor of classes along dim 1, nor .logits or ['out']: give "
            "your own loss and metric."
        )
    labels = labels_of(batch)
    check_fit(labels, scores.shape)
    return scores, labels if labels.is_floating_point() else labels.long()


def scores_of(output: Any) -> Tensor | None:
    """The class scores: the output itself, its `logits` (transformers), or its "out" (torchvision's segmentation)."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "out"):
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    return None


# metrics


@dataclass(frozen=True)
class LowerIsBetter:
    """A metric of which little is good, such as an error; tables and methods know."""

    metric: Metric

    def __post_init__(self) -> None:
        whole_of(self.metric)

    def __call__(self, output: Any, batch: Any) -> tuple[Tensor, int]:
        assert callable(self.metric)
        return self.metric(output, batch)


def growing(metric: Metric) -> Metric:
    """The metric as something that grows with quality: an error gets a minus."""
    if not isinstance(metric, LowerIsBetter):
        return metric
    if (whole := whole_of(metric)) is not None:
        return _Negative(whole)

    def negative(output: Any, batch: Any) -> tuple[Tensor, int]:
        total, count = metric(output, batch)
        return -total, count

    return negative


class _Negative:
    """A metric of a whole data set with a minus."""

    def __init__(self, metric: WholeMetric) -> None:
        self.reset, self.update, self.positive = metric.reset, metric.update, metric.compute

    def compute(self) -> float:
        return -plain_number(self.positive())


def top1(output: Any, batch: Any) -> tuple[Tensor, int]:
    """Correct answers and how many there are, of samples or of pixels; scores that are NaN are no answer."""
    scores, labels = _classes(output, batch)
    if labels.device.type == "cpu":  # elsewhere all would wait for it
        _warn_of_range(labels, scores.shape[1])
    return _right(scores, labels)


def _right(scores: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    found = scores.argmax(dim=1)
    if labels.is_floating_point():  # several classes may have the largest share
        right = labels.gather(1, found.unsqueeze(1)).squeeze(1) == labels.amax(dim=1)
    else:
        right = found == labels
    return (right & ~scores.isnan().any(dim=1)).sum(), right.numel()


class Accuracy:
    """`top1` of one test, without the labels that the loss ignores; it keeps which labels there were."""

    def __init__(self) -> None:
        self.answers = 0  # ignored ones among them
        self.classes = 0
        self.ends: list[Tensor] = []  # lowest and highest label of each batch, on the device: nothing waits for it

    def __call__(self, output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        scores, labels = _classes(output, batch)
        right, count = _right(scores, labels)
        self.answers += count
        self.classes = scores.shape[1]
        ignored = labels == _IGNORED
        if count and not labels.is_floating_point():
            self.ends.append(torch.stack(labels.masked_fill(ignored, 0).aminmax()))
        return right, count - ignored.sum()

    def warn(self) -> None:
        """Warn of labels that the network has no output for; an error would lose hours of work."""
        if self.ends:
            _warn_of_range(torch.stack(self.ends), self.classes)


def _warn_of_range(labels: Tensor, classes: int) -> None:
    try:
        check_range(labels, classes)
    except DataError as error:
        warn(f"{error} Here it counts as a wrong answer.", MetricWarning)


def whole_of(metric: Any) -> WholeMetric | None:
    """The object, if the metric is one of a whole data set; None for a function. What is neither is refused."""
    while isinstance(metric, LowerIsBetter):
        metric = metric.metric
    there = [name for name in _METHODS if callable(getattr(metric, name, None))]
    if len(there) == len(_METHODS) and not isinstance(metric, type):
        found: WholeMetric = metric
        return found
    if callable(metric) and there in ([], ["reset"]):
        return None
    missing = f" without {' and '.join(name for name in _METHODS if name not in there)}()" if there else ""
    what = f"the class {metric.__name__}" if isinstance(metric, type) else f"a {type(metric).__name__}{missing}"
    raise TrainingError(
        "metric must be a function (output, batch) -> (sum, count), or an object with reset(), update(output, batch) "
        f"and compute(), not {what}."
    )


def check_metric(metric: Metric | None, world: World) -> None:
    """Refuse an object that would see a part of the samples only."""
    whole = None if metric is None else whole_of(metric)
    if whole is not None and world.size > 1 and getattr(whole, "all_ranks", False) is not True:
        raise TrainingError(
            f"Each of {world.size} ranks sees a part of the samples only: let compute() of the metric gather from all "
            "ranks, as torchmetrics does, and say so by all_ranks = True in its class; or give a metric that is a "
            "function and returns (sum, count)."
        )


def plain_number(value: Any) -> float:
    """What compute() of a metric gave, if it is one number."""
    match value:
        case Tensor() if value.numel() == 1 and not value.is_complex():
            return float(value)
        case Real():
            return float(value)
    raise TrainingError(f"compute() of a metric must return a number or a tensor of one number, not {_kind(value)}.")


def measure(metric: WholeMetric, pairs: Iterable[tuple[Any, Any]], world: World) -> float:
    """The metric of all these outputs and batches, the same number on every rank."""
    metric.reset()
    seen = 0
    for output, batch in pairs:
        seen += size_of(batch)
        with _noted("update(output, batch) of a metric"):
            metric.update(output, batch)
    _refuse_none(sum_values(torch.tensor([seen]), world).item())
    first, *others = gather(plain_number(metric.compute()), world)
    if not all(
        math.isclose(first, it, rel_tol=_NEAR, abs_tol=_NEAR**2) or (math.isnan(first) and math.isnan(it))
        for it in others
    ):
        raise TrainingError("compute() of the metric gave other numbers on other ranks: it must gather from all.")
    return float(first)


def mean(metric: MeanMetric, pairs: Iterable[tuple[Any, Any]], device: torch.device, world: World) -> float:
    """The mean of the metric over the samples of all these outputs and batches, and of all ranks."""
    sums, count = [torch.zeros((), dtype=widest(device), device=device)], 0
    for output, batch in pairs:
        with _noted("metric(output, batch)"):
            found = metric(output, batch)
        match found:
            case Tensor(ndim=0) as value, Real() | Tensor(ndim=0) as samples:
                sums.append(value.to(widest(device)))
                count += samples  # type: ignore[assignment]
            case _:
                what = f"({', '.join(map(_kind, found))})" if isinstance(found, tuple | list) else _kind(found)
                raise TrainingError(
                    "A metric must return its sum over the samples, a tensor of one number, and how many samples there "
                    f"are, not {what}."
                )
    total = torch.stack([torch.stack(sums).sum(), sums[0].new_tensor(float(count))])
    summed, seen = sum_values(total, world).tolist()
    _refuse_none(seen)
    return float(summed / seen)


def _refuse_none(samples: float) -> None:
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
        error.add_note(f"dmcp calls {call}, with the whole batch: see docs/api.md.")
        raise


def _kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
