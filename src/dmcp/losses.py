"""What is learned and what is counted: losses, metrics, and imitation of another network's output."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dmcp.batches import labels_of
from dmcp.errors import TrainingError
from dmcp.recording import tensors_in

Loss = Callable[[Any, Any], Tensor]  # (output, batch) -> scalar
Metric = Callable[[Any, Any], tuple[Tensor, int]]  # (output, batch) -> (sum over the samples, their count)


@dataclass(frozen=True)
class LowerIsBetter:
    """A metric of which little is good, such as an error; it gives the same numbers, and tables and methods know."""

    metric: Metric

    def __post_init__(self) -> None:
        if not callable(self.metric):
            raise TrainingError(
                f"LowerIsBetter takes a metric, a function of output and batch, not {self.metric!r}: "
                "metric=LowerIsBetter(my_metric)."
            )

    def __call__(self, output: Any, batch: Any) -> tuple[Tensor, int]:
        return self.metric(output, batch)


def growing(metric: Metric) -> Metric:
    """The metric as something that grows with quality, for those who look for the best: an error with a minus."""
    if not isinstance(metric, LowerIsBetter):
        return metric

    def negative(output: Any, batch: Any) -> tuple[Tensor, int]:
        total, count = metric(output, batch)
        return -total, count

    return negative


class ImitationWarning(UserWarning):
    """Outputs are imitated as class scores, though the loss is the user's own and they may be something else."""


class MetricWarning(UserWarning):
    """A metric that is no number, so that nothing can be compared by it."""


def warn_of_imitation(who: str, remedy: str, stacklevel: int) -> None:
    """Say once what is done to outputs that nobody has called class scores; the frame is counted from the caller."""
    told = f"{who} outputs as class scores along dim 1: if they are something else, {remedy}."
    warnings.warn(told, ImitationWarning, stacklevel=stacklevel + 1)


def classification_loss(label_smoothing: float = 0.0) -> Loss:
    """Cross-entropy of the classes along dim 1, `label_smoothing` of the target spread over all of them."""

    def loss(output: Any, batch: Any) -> Tensor:
        return F.cross_entropy(_logits(output).float(), labels_of(batch), label_smoothing=label_smoothing)

    return loss


def top1(output: Any, batch: Any) -> tuple[Tensor, int]:
    """Correct answers and how many there are, of samples or of pixels."""
    labels = labels_of(batch)
    return (_logits(output).argmax(dim=1) == labels).sum(), labels.numel()


def imitation(output: Any, target: Sequence[Tensor]) -> Tensor:
    """How far the classes along dim 1 are from the target's: KL divergence, summed over the tensors of the output."""
    own = tensors_in(output)
    if [tensor.shape for tensor in own] != [tensor.shape for tensor in target] or any(
        tensor.ndim < 2 or tensor.shape[1] < 2 or not tensor.is_floating_point() for tensor in own
    ):
        shapes = " and ".join(str([tuple(tensor.shape) for tensor in part]) for part in (own, target))
        raise TrainingError(
            f"Imitation needs the same classes along dim 1 of all outputs, not {shapes}: turn it off, in a search with "
            'distil=False in the SearchConfig, in a retraining with retrain="scratch" or "inherit".'
        )
    parts = []
    for mine, wanted in zip(own, target, strict=True):
        goal = F.log_softmax(wanted.float(), dim=1)
        parts.append((goal.exp() * (goal - F.log_softmax(mine.float(), dim=1))).sum(dim=1).mean())
    return torch.stack(parts).sum()


# what people's own ones give


def one_number(value: Any) -> Tensor:
    """What a loss gave, if it can be trained on."""
    if not isinstance(value, Tensor):
        raise TrainingError(
            f"A loss must return a tensor of one number, whose gradient is needed, not a {type(value).__name__}: "
            "leave out .item() and the like."
        )
    if value.ndim:
        raise TrainingError(
            f"A loss must be one number, not a tensor of shape {tuple(value.shape)}: return its mean over the samples."
        )
    if torch.is_grad_enabled() and not value.requires_grad:
        raise TrainingError(
            "A loss must have a gradient, and this one has none: leave out .detach(), torch.no_grad and argmax on "
            "the way from the network's output to it."
        )
    return value


def sum_and_count(found: Any) -> tuple[Tensor, Any]:
    """What a metric gave, if it is a sum and a count."""
    match found:
        case Tensor(ndim=0) as total, Real() | Tensor(ndim=0) as count:
            return total, count
        case tuple() | list():
            what = f"({', '.join(map(_kind, found))})"
        case _:
            what = _kind(found)
    raise TrainingError(
        "A metric must return two things, its sum over the samples as a tensor of one number and how many samples "
        f"there are, not {what}: a mean does not say how many it is of."
    )


def _kind(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def _logits(output: Any) -> Tensor:
    if not isinstance(output, Tensor):
        raise TrainingError(
            f"The network gives a {type(output).__name__}, not one tensor of classes: give your own loss and metric."
        )
    return output
