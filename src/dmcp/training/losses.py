"""Losses and metrics."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmcp.arguments import checked
from dmcp.errors import DataError, DmcpError, DmcpWarning, TrainingError, warn
from dmcp.runtime.batches import labels_of, size_of, widest
from dmcp.runtime.distributed import World, current, gather, sum_values

Loss = Callable[[Any, Any], Tensor]  # (output, batch) -> scalar
MeanMetric = Callable[[Any, Any], Any]  # (output, batch) -> (sum over the samples, their count), or the mean


@runtime_checkable
class WholeMetric(Protocol):
    """A metric of a whole data set that is no mean over its samples, such as those of torchmetrics."""

    def reset(self) -> Any: ...  # forget all batches

    def update(self, output: Any, batch: Any) -> Any: ...  # see one batch

    def compute(self) -> Any: ...  # one number about all batches since the last reset


Metric = MeanMetric | WholeMetric
Outputs = Iterable[tuple[Any, Any]]  # outputs with their batches
_METHODS = ("reset", "update", "compute")
_IGNORED_LABEL = -100  # cross-entropy leaves it out
_ROUNDING = 0.02  # how far the sum of rounded class probabilities may be from 1


class MetricWarning(DmcpWarning):
    """A metric that is not a number, or an accuracy of scores that are not numbers."""


class LossWarning(DmcpWarning):
    """A loss that has parameters of its own, which are not trained."""


# losses


def warn_of_parameters(loss: Loss | None) -> None:
    """Warn, once for all ranks, of a loss with parameters that need a gradient: only those of the network learn."""
    if not isinstance(loss, nn.Module) or not current().first:
        return
    for name, parameter in loss.named_parameters():
        if parameter.requires_grad:
            warn(
                f"The loss has trainable parameters, such as {name}, that stay as they are, because only the network "
                "is trained: make them part of the network, or call loss.requires_grad_(False) if you mean this.",
                LossWarning,
            )
            return


def classification_loss(label_smoothing: float = 0.0) -> Loss:
    """Cross-entropy of the classes along dim 1; `label_smoothing` of the target is spread over all of them."""

    def loss(output: Any, batch: Any) -> Tensor:
        scores, labels = _scores_and_labels(output, batch)
        try:
            return F.cross_entropy(scores.float(), labels, label_smoothing=label_smoothing)
        except IndexError:  # of torch on a CPU
            check_range(labels, scores.shape[1])
            raise

    return loss


def loss_of(loss: Loss, output: Any, batch: Any) -> Tensor:
    """Call the loss; TrainingError unless it returns a number that can be trained on."""
    with noting_call("loss(output, batch), such as lambda output, batch: cross_entropy(output, batch[1])"):
        value = loss(output, batch)
    return check_scalar(value, "A loss")


def check_scalar(value: Any, source: str) -> Tensor:
    """What a function of the user returned; TrainingError unless it is a number that can be trained on."""
    is_number = isinstance(value, Tensor) and not value.ndim and not value.is_complex()
    if not is_number or (torch.is_grad_enabled() and not value.requires_grad):
        raise TrainingError(
            f"{source} must return one real number with a gradient, not {getattr(value, 'shape', value)!r:.50}: "
            "return a mean over the samples, and leave out .item(), .detach() and argmax."
        )
    return value  # type: ignore[no-any-return]


# labels


def check_label_shape(labels: Tensor, shape: Sequence[int]) -> None:
    """Refuse labels that are neither class numbers nor shares of classes for scores of this shape."""
    shape_of_shares = tuple(shape)
    shape_of_numbers = (shape[0], *shape[2:])
    expected = shape_of_numbers
    if labels.is_floating_point():
        expected = shape_of_shares
    if labels.is_complex() or labels.shape != expected:
        raise DataError(
            f"The labels are {tuple(labels.shape)} of {labels.dtype}, but the network's scores are {shape_of_shares}: "
            f"labels must be class numbers (integers of shape {shape_of_numbers}) or class probabilities (floats of "
            f"shape {shape_of_shares}). For anything else, give loss= and metric=."
        )


def check_probabilities(labels: Tensor) -> None:
    """Refuse floats that are no class probabilities along dim 1, which a cross-entropy would take for them."""
    if not labels.is_floating_point() or not labels.numel():
        return
    classes = labels.shape[1]
    numbers = labels.float()
    sums = numbers.sum(dim=1)
    lowest, highest, lowest_sum, highest_sum = torch.stack([*numbers.aminmax(), *sums.aminmax()]).tolist()
    add_up = lowest_sum >= 1 - _ROUNDING and highest_sum <= 1 + _ROUNDING  # not of NaN
    if classes < 2 or lowest < 0 or not add_up:
        raise DataError(
            f"The labels are floats from {lowest:.3g} to {highest:.3g} that add up to {lowest_sum:.3g} to "
            f"{highest_sum:.3g} along dim 1 (size {classes}), so they are no class probabilities, and the default loss "
            "cannot be used. Regression and several labels per sample need a loss of your own: "
            "task=dmcp.Task(loss=lambda output, batch: F.mse_loss(output, batch[1]))."
        )


def check_range(labels: Tensor, classes: int) -> None:
    """Refuse labels of classes that the network has no output for."""
    if labels.is_floating_point() or not labels.numel():  # shares of classes, or none at all
        return
    counted = labels.masked_fill(labels == _IGNORED_LABEL, 0)
    lowest, highest = torch.stack(counted.aminmax()).tolist()  # waits for the device once
    if lowest < 0 or highest >= classes:
        wrong = highest
        if lowest < 0:
            wrong = lowest
        raise DataError(
            f"A label is {wrong}, but the network has {classes} outputs: number the classes from 0, or build the "
            "network for more of them."
        )


def _scores_and_labels(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """Scores with classes along dim 1, and the labels: class numbers, or shares in the shape of the scores."""
    scores = scores_of(output)
    if scores is None or scores.ndim < 2:
        raise TrainingError(
            "The network's output is not a tensor with classes along dim 1: give your own loss and metric."
        )
    labels = labels_of(batch)
    check_label_shape(labels, scores.shape)
    if not labels.is_floating_point():
        labels = labels.long()
    return scores, labels


def scores_of(output: Any) -> Tensor | None:
    """The class scores: the output, its `logits` (transformers) or "out" (torchvision), or a tuple's only matrix."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "out"):
        if isinstance(output, Mapping):
            value = output.get(name)
        else:
            value = getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    if not isinstance(output, tuple | list):
        return None
    matrices = [part for part in output if isinstance(part, Tensor) and part.ndim > 1]
    if len(matrices) != 1:  # features and scores look alike
        return None
    return matrices[0]


# metrics


@checked
@dataclass(frozen=True)
class LowerIsBetter:
    """Marks a metric as lower-is-better."""

    metric: Metric
    is_loss: bool = False  # the metric is the loss of the training, for want of another one

    def __call__(self, output: Any, batch: Any) -> Any:
        assert callable(self.metric)
        return self.metric(output, batch)


def score_by(loss: Loss, output: Any, batch: Any) -> LowerIsBetter | None:
    """None where accuracy can be the metric: class numbers and several classes. Otherwise the loss is the metric."""
    try:
        scores, labels = _scores_and_labels(output, batch)
    except DmcpError:
        return LowerIsBetter(loss, is_loss=True)
    if scores.shape[1] > 1 and not labels.is_floating_point():
        return None
    return LowerIsBetter(loss, is_loss=True)


def top1(output: Any, batch: Any) -> tuple[Tensor, Tensor]:
    """The number of correct answers and of all answers, for samples or pixels, without those that the loss ignores.

    Scores that are NaN count as a wrong answer.
    """
    scores, labels = _scores_and_labels(output, batch)
    check_range(labels, scores.shape[1])
    answers = scores.argmax(dim=1)
    if labels.is_floating_point():
        share_of_answer = labels.gather(1, answers.unsqueeze(1)).squeeze(1)
        right = share_of_answer == labels.amax(dim=1)  # several classes may have the largest share
        ignored = torch.zeros_like(right)
    else:
        right = answers == labels
        ignored = labels == _IGNORED_LABEL
    is_nan = scores.isnan().any(dim=1)
    return (right & ~is_nan).sum(), right.numel() - ignored.sum()


class Accuracy:
    """The metric `top1`, which also counts the answers whose scores are NaN."""

    def __init__(self, device: torch.device) -> None:
        self.unknown = torch.zeros((), dtype=torch.int64, device=device)

    def __call__(self, output: Any, batch: Any) -> tuple[Tensor, Tensor]:
        right_and_all = top1(output, batch)
        scores = scores_of(output)
        assert scores is not None  # top1 has read them
        self.unknown += scores.isnan().any(dim=1).sum().to(self.unknown.device)
        return right_and_all

    def warn_of_unknown(self, answers: float, world: World) -> None:
        """Warn, once for all ranks, of answers whose scores are NaN; `answers` is the number of all of them."""
        unknown = int(sum_values(self.unknown, world))
        if unknown and world.first:
            warn(
                f"{unknown:,} of {answers:,.0f} answers have NaN scores and count as wrong: look for NaN in the test "
                "data, and in the weights of the network.",
                MetricWarning,
            )


def whole_of(metric: Any) -> WholeMetric | None:
    """The object behind a metric of a whole data set; None for a function. TrainingError for anything else."""
    while isinstance(metric, LowerIsBetter):
        metric = metric.metric
    is_whole = all(hasattr(metric, name) for name in _METHODS)
    if isinstance(metric, type) or not (callable(metric) or is_whole):
        raise TrainingError(
            "metric must be a function (output, batch) -> (sum, count), or an object with reset(), "
            f"update(output, batch) and compute(), not {metric!r}."
        )
    return metric if is_whole else None


def check_metric(metric: Metric | None, world: World) -> WholeMetric | None:
    """The same, for a metric that sees all samples: TrainingError where each rank would see a part of them."""
    whole = None
    if metric is not None:
        whole = whole_of(metric)
    if whole is not None and world.size > 1 and getattr(whole, "all_ranks", False) is not True:
        raise TrainingError(
            f"Each of {world.size} ranks sees only a part of the samples: make compute() of the metric gather from all "
            "ranks, as torchmetrics does, and set all_ranks = True on its class."
        )
    return whole


def measure(metric: WholeMetric, outputs: Outputs, world: World) -> float:
    """The metric of all these outputs; with several ranks its compute() gathers from all of them."""
    metric.reset()
    samples = 0
    for output, batch in outputs:
        samples += size_of(batch)
        with noting_call("update(output, batch) of a metric"):
            metric.update(output, batch)
    _require_samples(sum_values(torch.tensor(samples), world))
    with noting_call("compute() of a metric and makes it a float"):
        value = float(metric.compute())
    for value_there in gather(value, world):
        if not math.isnan(value_there) and not math.isclose(value, value_there, rel_tol=1e-6):
            raise TrainingError("compute() of the metric differs between ranks: it must gather from all of them.")
    return value


def mean(metric: MeanMetric, outputs: Outputs, device: torch.device, world: World) -> tuple[float, float]:
    """The mean of the metric over all answers of these outputs and of all ranks, and the number of answers."""
    total = torch.zeros(2, dtype=widest(device), device=device)
    for output, batch in outputs:
        with noting_call("metric(output, batch) -> (sum, count), or the loss where no metric= is given"):
            result = metric(output, batch)
        try:
            value, count = sum_and_count(result, batch)
            total += torch.stack([torch.as_tensor(number, device=device).to(total) for number in (value, count)])
        except (TypeError, ValueError, RuntimeError) as error:
            raise TrainingError(f"A metric must return numbers, (sum, count) or a mean, not {result!r:.50}.") from error
    summed, answers = sum_values(total, world).tolist()
    _require_samples(answers)
    return summed / answers, answers


def sum_and_count(result: Any, batch: Any) -> Any:
    """What a metric returned for a batch, as (sum, count); a single number is the mean over its samples."""
    is_pair = isinstance(result, tuple | list) or getattr(result, "shape", ()) == (2,)
    if is_pair:
        return result
    return result * size_of(batch), size_of(batch)


def _require_samples(samples: float | Tensor) -> None:
    if not samples:
        raise DataError("There is nothing to evaluate on: the loader gave no samples.")


@contextlib.contextmanager
def noting_call(call: str) -> Iterator[None]:
    """Add the call's arguments to exceptions raised by user functions."""
    try:
        yield
    except DmcpError:
        raise
    except Exception as error:
        error.add_note(f"dmcp calls {call}, with the whole batch.")
        raise
