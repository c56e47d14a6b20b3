"""Is a network trained? Settings and teachers depend on it."""

from __future__ import annotations

import itertools
import logging
import math

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from dmcp.runtime.batches import Loader, device_of, generator, size_of
from dmcp.runtime.checkpoint import untouched
from dmcp.runtime.distributed import current
from dmcp.runtime.progress import phase
from dmcp.tracing.modules import modules_of, narrow, unwrap
from dmcp.training.loop import evaluate
from dmcp.training.losses import LowerIsBetter, Metric, warn

_LOG = logging.getLogger("dmcp")
_LITTLE = 0.1  # of the way from guessing to all answers correct: up to here, nothing was learned
_SHUFFLED_COPIES = 9  # copies with shuffled weights
_SHUFFLED_BATCHES = 4  # that these copies are tested on
_CLEARLY = 0.25  # a trained network is better than the best shuffled copy by more than this part of its score ...
_SPREADS = 3  # ... or by more than this many times the difference between the best and the worst copy


class LabelsWarning(UserWarning):
    """A network that was trained before, but whose answers do not fit the labels."""


class UnusedNormsWarning(UserWarning):
    """A trained network whose BatchNorms were never in train mode."""


def is_trained(model: nn.Module, classes: int, val_loader: Loader, metric: Metric | None) -> bool:
    """Whether a model is better than guessing or, with a metric of the user's own, better than with shuffled weights.

    Warns if the model guesses although its BatchNorms have seen data, since the labels may be in another order, and if
    it is trained although its BatchNorms have seen none.
    """
    norms = [norm for norm in modules_of(unwrap(model)) if isinstance(norm, _NormBase)]
    if metric is not None:
        trained = _beats_shuffled(model, val_loader, metric)
    else:
        guess = describe_guessing(model, classes, val_loader)
        trained = not guess
        if guess and any(_has_seen_data(norm) for norm in norms) and current().first:
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
    """Test a copy of a classifier; a text if it is hardly better than guessing, and an empty one otherwise."""
    with untouched(loader, device_of(model)):
        accuracy = evaluate(narrow(unwrap(model), {}, {}), loader)
    chance = 1 / max(classes, 1)
    if accuracy > chance + _LITTLE * (1 - chance):
        return ""
    return f"right on {accuracy:.2%} of the test data, where guessing gives {100 * chance:.3g}%"


def _has_seen_data(norm: _NormBase) -> bool:
    return norm.num_batches_tracked is not None and bool(norm.num_batches_tracked)


def _is_unused(norm: _NormBase) -> bool:
    """Whether a norm still has its initial statistics."""
    if norm.running_mean is None or norm.running_var is None or norm.num_batches_tracked:
        return False
    return not norm.running_mean.any() and bool(norm.running_var.eq(1).all())


def _beats_shuffled(model: nn.Module, loader: Loader, metric: Metric) -> bool:
    """Whether a model scores clearly better than copies of it in which the entries of each parameter are shuffled.

    Shuffling keeps everything that an initialization determines: whatever the initialization and the metric are, an
    untrained network is one among such copies. A trained network loses what it has learned.
    """
    device = device_of(model)
    random = generator(0)
    sign = -1.0 if isinstance(metric, LowerIsBetter) else 1.0  # times this, a larger score is a better one
    with untouched(loader, device), phase("are the weights trained?", _SHUFFLED_COPIES + 1) as update:
        batches = list(itertools.islice((batch for batch in loader if size_of(batch)), _SHUFFLED_BATCHES))
        network = narrow(unwrap(model), {}, {})
        score = sign * evaluate(network, batches, metric)

        shuffled_scores: list[float] = []
        for number in range(1, _SHUFFLED_COPIES + 1):
            _shuffle_entries(network, random)
            shuffled_score = sign * evaluate(network, batches, metric)
            if math.isfinite(shuffled_score):
                shuffled_scores.append(shuffled_score)
            update(number)

        best = max(shuffled_scores, default=-math.inf)
        spread = best - min(shuffled_scores, default=best)
        lead = score - best
        trained = score > best and (lead > _CLEARLY * abs(best) or lead > _SPREADS * spread)
        scores = f"{sign * score:.4g}, at best {sign * best:.4g} with shuffled weights"
        verdict = "trained"
        if not trained:
            verdict = "not trained"
        verdict = f"the network counts as {verdict}: {scores}"
        update(_SHUFFLED_COPIES + 1, verdict)
    if current().first:
        _LOG.info("By its metric %s.", verdict)
    return trained


@torch.no_grad()
def _shuffle_entries(model: nn.Module, random: torch.Generator) -> None:
    """Shuffle the entries of every parameter, in place."""
    for parameter in model.parameters():
        order = torch.randperm(parameter.numel(), generator=random).to(parameter.device)
        parameter.copy_(parameter.flatten()[order].reshape(parameter.shape))
