"""Defaults: settings that were left open, chosen for the network and its data; and the paper's. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dmcp.budgets import Budget
from dmcp.errors import BudgetError
from dmcp.settings import (
    Init,
    Optimizer,
    ResolvedSearchConfig,
    ResolvedTrainConfig,
    Retrain,
    Sampling,
    SearchConfig,
    TrainConfig,
)

# what is unset is chosen for the network and its data: docs/cookbook.md has the same table

_SEARCH: dict[str, Any] = {  # of a network that is not trained
    "epochs": 40,
    "warmup": 0.5,
    "sort": False,
    "sampling": Sampling.MARKOV,
    "distill": True,
    "init": Init.TARGET,
    "budget_weight": 0.1,
    "lr": 0.2,
    "optimizer": Optimizer.SGD,
    "weight_decay": 1e-4,
    "sharpen": 1.0,
}
_TRAINED_SEARCH: dict[str, Any] = {  # what differs for a trained network: experiments/REPORT.md, "judge"
    "epochs": 1,
    "warmup": 0.0,
    "sort": True,
    "sampling": Sampling.MIXED,
    "init": Init.FRONT,
    "budget_weight": 1.0,
    "lr": 0.04,
    "sharpen": 2.0,
}
_TRAIN: dict[str, Any] = {"epochs": 100, "optimizer": Optimizer.SGD, "lr": 0.8, "weight_decay": 1e-4}
_ADAMW_RATE = 1e-3  # for batches of any size: REPORT.md, "optimizers"
_WHY_ADAMW = "no rate of sgd suits all networks without BatchNorms and all losses"
_FINETUNE_EPOCHS = 20  # of a trained network
_KEEPING = (Retrain.FINETUNE, Retrain.NONE)  # these keep the weights of the search
_SEARCH_IMAGES = 50_000  # that are enough for the search of a trained network
_SEARCH_STEPS = (150, 500)  # fewest and most steps of such a search
_TRAIN_IMAGES = 13_000_000  # that are enough for the fine-tuning of a trained network
_MIN_STEPS = 300  # of a search or a training of other networks: tiny data sets get more epochs
_BATCH = 128
_LONG = 10_000  # steps of a fine-tuning at the full learning rate: REPORT.md, "optimizers"
_LEAST_RATE = 0.2  # share of the learning rate that the shortest fine-tunings have
_MIN_PER_EPOCH = 8  # steps that an epoch has at least
_FEW_IMAGES = 200_000  # up to which the next two hold instead of ImageNet's: REPORT.md, "judge"
_FEW_SEARCH: dict[str, Any] = {"lr": 0.4, "weight_decay": 5e-4}  # of a network that is not trained
_FEW_TRAIN: dict[str, Any] = {"lr": 1.6, "weight_decay": 5e-4}
_HEAVY = 2 * 10**9  # MACs of one sample from which batches are smaller, for the memory
_HEAVY_BATCH = 64


def resolve_search(config: SearchConfig, values: Mapping[str, Any] = _SEARCH) -> ResolvedSearchConfig:
    """The settings with these values where they are unset; by default those for a network that is not trained."""
    if config.budget is None:
        raise BudgetError('A search needs a budget: SearchConfig(budget="50%").')
    filled = _filled(config, values)
    if filled["optimizer"] is Optimizer.ADAMW and config.lr is None:
        filled["lr"] = _ADAMW_RATE
    if config.min_lr is None:
        filled["min_lr"] = filled["lr"] / 10
    return ResolvedSearchConfig(**filled)


def resolve_training(config: TrainConfig, values: Mapping[str, Any] = _TRAIN) -> ResolvedTrainConfig:
    """The settings with these values where they are unset; by default the paper's."""
    filled = _filled(config, values)
    if filled["optimizer"] is Optimizer.ADAMW and config.lr is None:
        filled["lr"] = _ADAMW_RATE
    if config.warmup_lr is None:
        filled["warmup_lr"] = filled["lr"] / 4
    return ResolvedTrainConfig(**filled)


def _filled(config: SearchConfig | TrainConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """All fields of the settings; those that are unset have these values."""
    filled = dict(vars(config))
    for name, value in values.items():
        if filled[name] is None:
            filled[name] = value
    return filled


def has_choices_left(search: SearchConfig, train: TrainConfig) -> bool:
    """Whether any of these settings is to be chosen for the network and its data."""
    left = [getattr(search, name) is None for name in _SEARCH] + [getattr(train, name) is None for name in _TRAIN]
    return any(left)


@dataclass(frozen=True, kw_only=True)
class ResolvedSettings:
    """Settings for a network and its data, with nothing left to choose."""

    search: ResolvedSearchConfig
    train: ResolvedTrainConfig
    search_images: int  # in each epoch of the search; 0: all
    reasons: Mapping[str, str]  # value and reason of each setting that was unset, by option


def resolve(
    search: SearchConfig,
    train: TrainConfig,
    retrain: Retrain,
    *,
    trained: bool,
    images: int,
    batch: int,
    train_batch: int | None = None,
    distills: bool = True,
    suits_sgd: bool = True,
) -> ResolvedSettings:
    """Choose every setting that is unset, for so many training images in batches of this size.

    trained: whether the network is, on such data.
    train_batch: size of the batches of the final training, if it has others.
    distills: the outputs are class scores, so that sub-networks learn from those of the largest one.
    suits_sgd: the network has BatchNorms and its outputs are class scores, as those of the paper.
    """
    keeps_trained_weights = trained and retrain in _KEEPING
    search_values = _SEARCH | {"distill": distills}
    train_values = dict(_TRAIN)
    if trained:
        search_values |= _TRAINED_SEARCH
    if keeps_trained_weights:
        train_values["epochs"] = _FINETUNE_EPOCHS

    # Decay and the largest learning rates follow the number of images.
    why_rates = "the paper's"
    if images <= _FEW_IMAGES:
        why_rates = f"twice the paper's, which suits {images:,} images"
        train_values |= _FEW_TRAIN
        if not trained:
            search_values |= _FEW_SEARCH
    # Without norms, or with another loss, the right rate of SGD can be anything; that of AdamW is not.
    why_optimizer = "class scores of a network with BatchNorms"
    if train.lr is not None:
        why_optimizer = "learning rates that are set are those of sgd"
    elif not suits_sgd:
        train_values["optimizer"] = Optimizer.ADAMW
        why_optimizer = _WHY_ADAMW
    if search.lr is None and not suits_sgd:
        search_values["optimizer"] = Optimizer.ADAMW

    # The epochs follow the number of images, too; the search of a trained network may need less than one.
    search_images = 0
    if trained:
        enough_images = _images_of_a_trained_search(batch)
        search_values["epochs"] = max(1, round(enough_images / images))
        why_search_epochs = f"{enough_images:,} images are enough for a trained network"
        if search.epochs is None and images >= 2 * enough_images:
            search_images = enough_images
        why_search_rate = "small steps keep what the trained network knows"
        why_warmup = "no warm-up: the network is trained; its channels are sorted by importance instead"
    else:
        search_values["epochs"], why_search_epochs = _epochs(search_values["epochs"], images, batch)
        why_search_rate = why_rates
        why_warmup = "the weights are trained before the alphas move"
    most_images = _TRAIN_IMAGES if keeps_trained_weights else 0
    train_values["epochs"], why_train_epochs = _epochs(train_values["epochs"], images, batch, most_images)

    # A short fine-tuning has no time to repair what large steps break.
    why_train_rate = why_rates
    if keeps_trained_weights:
        epochs = train.epochs or train_values["epochs"]
        steps = epochs * -(-images // max(1, train_batch or batch))
        train_values["lr"] *= _share_of_rate(steps)
        if steps < _LONG:
            why_train_rate = f"{steps:,} steps from trained weights must be smaller than those of a long training"

    resolved_search = resolve_search(search, search_values)
    resolved_train = resolve_training(train, train_values)

    # Why, for each option that was left out.
    reasons: dict[str, str] = {}
    if search.epochs is None:
        passes = f"1 pass over {search_images:,} images" if search_images else resolved_search.epochs
        reasons["search_epochs"] = f"{passes}: {why_search_epochs}"
    if search.lr is None and resolved_search.optimizer is Optimizer.ADAMW:
        reasons["search_lr"] = f"{resolved_search.lr:g} of adamw: {_WHY_ADAMW}"
    elif search.lr is None:
        at_batch = f"{resolved_search.lr:g} at a batch of {resolved_search.reference_batch}"
        reasons["search_lr"] = f"{at_batch}: {why_search_rate}"
    if search.warmup is None:
        reasons["warmup"] = f"{resolved_search.warmup}: {why_warmup}"
    if train.epochs is None:
        reasons["epochs"] = f"{resolved_train.epochs}: {why_train_epochs}"
    if train.optimizer is None:
        reasons["optimizer"] = f"{resolved_train.optimizer}: {why_optimizer}"
    if train.lr is None and resolved_train.optimizer is Optimizer.ADAMW:
        reasons["lr"] = f"{resolved_train.lr:g}: the usual rate of adamw"
    elif train.lr is None:
        at_batch = f"{resolved_train.lr:g} at a batch of {resolved_train.reference_batch}"
        reasons["lr"] = f"{at_batch}: {why_train_rate}"
    if train.weight_decay is None:
        reasons["weight_decay"] = f"{resolved_train.weight_decay}: default for {images:,} images"
    return ResolvedSettings(search=resolved_search, train=resolved_train, search_images=search_images, reasons=reasons)


def _images_of_a_trained_search(batch: int) -> int:
    """Images that are enough for the search of a trained network, in whole batches of this size."""
    fewest, most = _SEARCH_STEPS
    steps = _SEARCH_IMAGES // max(1, batch)  # a batch of 0 is refused later
    return batch * max(fewest, min(most, steps))


def _share_of_rate(steps: int) -> float:
    """The share of the learning rate that suits a fine-tuning of so many steps: it grows with their square root."""
    share = round(math.sqrt(steps / _LONG), 2)
    return min(1.0, max(_LEAST_RATE, share))


def _epochs(usual: int, images: int, batch: int, most_images: int = 0) -> tuple[int, str]:
    """Epochs, and why; most_images: how many are enough in all, 0 where that is not known."""
    steps = max(1, images // max(1, batch))  # a batch of 0 is refused later
    if most_images and usual * images > most_images:
        epochs = max(1, most_images // images)
        return epochs, f"{most_images:,} images are enough to fine-tune a trained network"
    if usual * steps < _MIN_STEPS:
        epochs = math.ceil(_MIN_STEPS / steps)
        return epochs, f"an epoch has {steps} steps, and at least {_MIN_STEPS} steps are needed in all"
    return usual, f"default for {images:,} images"


def default_batch(images: int, macs: int) -> tuple[int, str]:
    """Images in a batch of this data set and network, MACs being those of one sample; and why."""
    batch, reason = _BATCH, "default"
    if macs >= _HEAVY:
        batch, reason = _HEAVY_BATCH, "large networks need more memory"
    while batch > 1 and images // batch < _MIN_PER_EPOCH:
        batch //= 2
        reason = f"small enough for {images // batch} steps in an epoch of {images:,} images"
    return batch, reason


# the paper's

PAPER: dict[str, dict[str, Any]] = {  # what the paper names and the defaults have otherwise
    "search": {
        "align": 1,
        "init": "random",
        "warmup_sampling": "markov",
        "distill": False,
        "label_smoothing": 0.0,
        "alpha_lr": 0.2,
        "alpha_min_lr": 0.02,
    },
    "train": {"label_smoothing": 0.0},
}


def paper(budget: int | float | str | Budget = "50%") -> dict[str, Any]:
    """The paper's own settings, as arguments of `prune`; groups and epochs are those for ResNet."""
    return {
        "search": resolve_search(SearchConfig(budget=budget, **PAPER["search"])),
        "train": resolve_training(TrainConfig(**PAPER["train"])),
        "retrain": Retrain.SCRATCH,
        "teacher": None,
    }
