"""Is a network trained? Settings and teachers depend on it."""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from dmcp.errors import DmcpWarning, warn
from dmcp.runtime.batches import Loader, device_of, generator, labels_of, size_of
from dmcp.runtime.checkpoint import untouched
from dmcp.runtime.distributed import current, sum_values
from dmcp.runtime.progress import phase
from dmcp.tracing.modules import modules_of, narrow, unwrap
from dmcp.training.loop import evaluate, evaluate_counted
from dmcp.training.losses import LowerIsBetter, Metric, top1

_LOG = logging.getLogger("dmcp")
_LITTLE = 0.1  # of the way from guessing to all answers correct: up to here, nothing was learned
_LUCK = 0.001  # probability from which on right answers may be luck
_SHUFFLED_COPIES = 9  # copies with shuffled weights
_SHUFFLED_BATCHES = 4  # that these copies are tested on
_CLEARLY = 0.25  # a trained network is better than the best shuffled copy by more than this part of its score ...
_SPREADS = 3  # ... or by more than this many times the difference between the best and the worst copy


class LabelsWarning(DmcpWarning):
    """A network that was trained before, but whose answers do not fit the labels."""


class UnusedNormsWarning(DmcpWarning):
    """A trained network whose BatchNorms were never in train mode."""


def is_trained(model: nn.Module, classes: int, val_loader: Loader, metric: Metric | None) -> bool:
    """Whether a model answers better than an untrained network could by luck.

    A classifier is trained if the probability that guessing the most common label gives as many right answers is below
    0.1%, and so is that of the best copy with shuffled weights, unless its BatchNorms have seen data. With a metric of
    the user's own, a model is trained if it scores clearly better than all such copies.

    Warns if the model guesses although its BatchNorms have seen data, since the labels may be in another order, and if
    it is trained although its BatchNorms have seen none.
    """
    norms = [norm for norm in modules_of(unwrap(model)) if isinstance(norm, _NormBase)]
    if metric is not None:
        trained = _beats_shuffled(model, val_loader, metric)
    else:
        guess = describe_guessing(model, classes, val_loader)
        has_seen_data = any(_has_seen_data(norm) for norm in norms)
        trained = not guess and (has_seen_data or _beats_luck(model, classes, val_loader))
        if guess and has_seen_data and current().first:
            question = "are its classes in the order of the labels, and its inputs prepared as in its training?"
            warn(
                f"The network seems to be trained, but is {guess}: {question} It is treated as untrained.",
                LabelsWarning,
            )
    if trained and any(_is_unused(norm) for norm in norms) and current().first:
        warn(
            "The network is trained, but some of its BatchNorms still have their initial statistics (mean 0, variance "
            "1): it was trained in eval mode. Pruning calibrates BatchNorms and trains in train mode, so the network "
            "loses accuracy until it is trained again. Replace them with layers that only scale and shift.",
            UnusedNormsWarning,
        )
    return trained


def describe_guessing(model: nn.Module, classes: int, loader: Loader) -> str:
    """Test a copy of a classifier; a text if guessing may give as many right answers, and an empty one otherwise."""
    answers = _test_answers(model, classes, loader)
    if answers.exceed(answers.guessed):
        return ""
    return f"right on {answers.accuracy:.2%} of the test data, where guessing gives {100 * answers.guessed:.3g}%"


def _beats_luck(model: nn.Module, classes: int, loader: Loader) -> bool:
    """Whether a classifier is right more often than the best of its copies with shuffled weights could be by luck."""
    with untouched(loader, device_of(model)):
        batches = _first_batches(loader)
        answers = _test_answers(model, classes, batches)
        best = max(_shuffled_scores(model, batches, top1), default=0.0)
    return answers.exceed(max(best, answers.guessed))


@dataclass(frozen=True)
class _Answers:
    """The answers of a classifier on test data."""

    accuracy: float
    samples: int
    guessed: float  # accuracy of guesses: of one that is drawn at random, or is always the most common label

    def exceed(self, share: float) -> bool:
        """Whether guesses that are right with this probability would hardly be right as often."""
        if self.accuracy <= share + _LITTLE * (1 - share):
            return False
        return probability_of(round(self.accuracy * self.samples), self.samples, share) < _LUCK


def _test_answers(model: nn.Module, classes: int, loader: Loader) -> _Answers:
    """Test a copy of a classifier, and count the labels."""
    counts = torch.zeros(max(classes, 1), dtype=torch.int64)

    def count_right(output: Any, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        labels = labels_of(batch)
        if labels.is_floating_point():
            labels = labels.argmax(dim=1)
        labels = labels.long()  # they may be bool, or uint8
        counts.add_(torch.bincount(labels[labels >= 0].cpu(), minlength=len(counts))[: len(counts)])
        return top1(output, batch)

    with untouched(loader, device_of(model)):
        accuracy, samples = evaluate_counted(narrow(unwrap(model), {}, {}), loader, count_right)
    counts = sum_values(counts, current())
    most_common = float(counts.max() / counts.sum().clamp(min=1))
    return _Answers(accuracy, samples, max(most_common, 1 / len(counts)))


def probability_of(right: int, samples: int, share: float) -> float:
    """Probability of at least so many right answers, if each one is right with the probability `share` (binomial)."""
    if right <= 0 or share >= 1:
        return 1.0
    counts = torch.arange(right, samples + 1, dtype=torch.float64)
    total = torch.tensor(samples + 1, dtype=torch.float64)
    ways = torch.lgamma(total) - torch.lgamma(counts + 1) - torch.lgamma(total - counts)
    logarithms = ways + counts * math.log(share) + (samples - counts) * math.log1p(-share)
    return float(logarithms.logsumexp(dim=0).exp())


def _has_seen_data(norm: _NormBase) -> bool:
    return norm.num_batches_tracked is not None and bool(norm.num_batches_tracked)


def _is_unused(norm: _NormBase) -> bool:
    """Whether a norm still has its initial statistics."""
    if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked:
        return False
    return not norm.running_mean.any() and bool(norm.running_var.eq(1).all())


def _beats_shuffled(model: nn.Module, loader: Loader, metric: Metric) -> bool:
    """Whether a model scores clearly better than its copies with shuffled weights."""
    sign = -1.0 if isinstance(metric, LowerIsBetter) else 1.0  # times this, a larger score is a better one
    with untouched(loader, device_of(model)):
        batches = _first_batches(loader)
        score = sign * evaluate(narrow(unwrap(model), {}, {}), batches, metric)
        shuffled_scores = [sign * shuffled for shuffled in _shuffled_scores(model, batches, metric)]

    best = max(shuffled_scores, default=-math.inf)
    spread = best - min(shuffled_scores, default=best)
    lead = score - best
    trained = score > best and (lead > _CLEARLY * abs(best) or lead > _SPREADS * spread)
    if current().first:
        verdict = "trained"
        if not trained:
            verdict = "not trained"
        scores = f"{sign * score:.4g}, at best {sign * best:.4g} with shuffled weights"
        _LOG.info("Judged by its metric, the network is %s: %s.", verdict, scores)
    return trained


def _first_batches(loader: Loader) -> list[Any]:
    """The batches that copies with shuffled weights are tested on."""
    return list(itertools.islice((batch for batch in loader if size_of(batch)), _SHUFFLED_BATCHES))


def _shuffled_scores(model: nn.Module, batches: list[Any], metric: Metric) -> list[float]:
    """The finite scores of copies of a model in which the entries of each parameter are shuffled.

    Shuffling keeps everything that an initialization determines: whatever the initialization and the metric are, an
    untrained network is one among such copies. A trained network loses what it has learned.
    """
    random = generator(0)
    network = narrow(unwrap(model), {}, {})
    scores: list[float] = []
    with phase("are the weights trained?", _SHUFFLED_COPIES) as update:
        for number in range(1, _SHUFFLED_COPIES + 1):
            _shuffle_entries(network, random)
            score = evaluate(network, batches, metric)
            if math.isfinite(score):
                scores.append(score)
            update(number)
    return scores


@torch.no_grad()
def _shuffle_entries(model: nn.Module, random: torch.Generator) -> None:
    """Shuffle the entries of every parameter, in place."""
    for parameter in model.parameters():
        order = torch.randperm(parameter.numel(), generator=random).to(parameter.device)
        parameter.copy_(parameter.flatten()[order].reshape(parameter.shape))
