"""Defaults: settings that were left open, chosen for the network and its data; and the paper's. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dmcp.budgets import Budget
from dmcp.errors import BudgetError
from dmcp.fields import describe
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
_KEEPS_WEIGHTS = (Retrain.FINETUNE, Retrain.NONE)  # these keep the weights of the search
_SEARCH_IMAGES = 50_000  # that are enough for the search of a trained network
_SEARCH_STEPS = (150, 500)  # fewest and most steps of such a search
_TRAIN_IMAGES = 13_000_000  # that are enough for the fine-tuning of a trained network
_MIN_STEPS = 300  # of a search or a training of other networks: tiny data sets get more epochs
_BATCH = 128
_FULL_RATE_STEPS = 10_000  # steps of a fine-tuning at the full learning rate: REPORT.md, "optimizers"
_WARMUP = 0.1  # share of the epochs in which a short training's learning rate rises: REPORT.md, "refit"
_LEAST_SHARE = 0.2  # share of the learning rate that the shortest fine-tunings have
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
    if config.warmup_epochs is None:
        filled["warmup_epochs"] = min(1.0, filled["epochs"] * _WARMUP)
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
    circumstances = _Circumstances(
        trained=trained,
        keeps_trained_weights=trained and retrain in _KEEPS_WEIGHTS,
        images=images,
        batch=batch,
        train_batch=train_batch or batch,
        suits_sgd=suits_sgd,
    )
    search_images = 0
    if search.epochs is None:
        search_images = _choose_search_images(circumstances)

    # Each value is chosen together with its reason.
    search_choices = {
        "epochs": _choose_search_epochs(search_images, circumstances),
        "lr": _choose_search_rate(search, circumstances),
        "warmup": _choose_warmup(circumstances),
    }
    train_choices = {
        "epochs": _choose_epochs(circumstances),
        "optimizer": _choose_optimizer(train, circumstances),
        "lr": _choose_rate(train, circumstances),
        "weight_decay": _choose_weight_decay(circumstances),
    }

    # The other settings of the search have no option of their own, and so no reason that would be shown.
    search_values = _SEARCH | {"distill": distills}
    if trained:
        search_values |= _TRAINED_SEARCH
    elif circumstances.has_few_images:
        search_values |= _FEW_SEARCH
    search_values["optimizer"] = _choose_search_optimizer(search, circumstances)

    return ResolvedSettings(
        search=resolve_search(search, search_values | _values_of(search_choices)),
        train=resolve_training(train, _values_of(train_choices)),
        search_images=search_images,
        reasons=_reasons_of(search_choices, search) | _reasons_of(train_choices, train),
    )


@dataclass(frozen=True, kw_only=True)
class _Circumstances:
    """What the choices depend on: the network, its data, and how the pruned network gets its weights."""

    trained: bool
    keeps_trained_weights: bool  # the final training, if there is one, fine-tunes a trained network
    images: int
    batch: int
    train_batch: int
    suits_sgd: bool

    @property
    def has_few_images(self) -> bool:
        return self.images <= _FEW_IMAGES

    @property
    def why_rates(self) -> str:
        """Where the rates of a new network, and of a long fine-tuning, come from."""
        if self.has_few_images:
            return f"twice the paper's, which suits {self.images:,} images"
        return "the paper's"


@dataclass(frozen=True)
class _Choice:
    """A value for a setting that is unset, and the text that says which one and why."""

    value: Any
    reason: str


def _values_of(choices: Mapping[str, _Choice]) -> dict[str, Any]:
    """The values by the names of the fields."""
    return {name: choice.value for name, choice in choices.items()}


def _reasons_of(choices: Mapping[str, _Choice], config: SearchConfig | TrainConfig) -> dict[str, str]:
    """The reasons of the settings that are unset, by option."""
    kind: Any = type(config)
    options = {setting.name: setting.option or setting.name for setting in describe(kind)}
    return {options[name]: choice.reason for name, choice in choices.items() if getattr(config, name) is None}


# the search


def _choose_search_images(circumstances: _Circumstances) -> int:
    """Images in each epoch of the search; 0: all. A trained network may need less than one epoch."""
    if not circumstances.trained:
        return 0
    enough_images = _images_of_a_trained_search(circumstances.batch)
    if circumstances.images < 2 * enough_images:
        return 0
    return enough_images


def _choose_search_epochs(search_images: int, circumstances: _Circumstances) -> _Choice:
    """The epochs follow the number of images."""
    if not circumstances.trained:
        return _adjust_epochs(_SEARCH["epochs"], circumstances)
    enough_images = _images_of_a_trained_search(circumstances.batch)
    epochs = max(1, round(enough_images / circumstances.images))
    length = str(epochs)
    if search_images:
        length = f"1 pass over {search_images:,} images"
    return _Choice(epochs, f"{length}: {enough_images:,} images are enough for a trained network")


def _images_of_a_trained_search(batch: int) -> int:
    """Images that are enough for the search of a trained network, in whole batches of this size."""
    fewest, most = _SEARCH_STEPS
    steps = _SEARCH_IMAGES // max(1, batch)  # a batch of 0 is refused later
    return batch * max(fewest, min(most, steps))


def _choose_search_optimizer(search: SearchConfig, circumstances: _Circumstances) -> Optimizer:
    """SGD, or AdamW where no rate of SGD is known; a rate that is set is one of SGD."""
    if search.lr is None and not circumstances.suits_sgd:
        return Optimizer.ADAMW
    return Optimizer.SGD


def _choose_search_rate(search: SearchConfig, circumstances: _Circumstances) -> _Choice:
    """The rate suits the optimizer; with SGD, it follows whether the network is trained, and the number of images."""
    optimizer = search.optimizer or _choose_search_optimizer(search, circumstances)
    if optimizer is Optimizer.ADAMW and search.optimizer is None:
        return _Choice(_ADAMW_RATE, f"{_ADAMW_RATE:g} of adamw: {_WHY_ADAMW}")
    if optimizer is Optimizer.ADAMW:
        return _Choice(_ADAMW_RATE, f"{_ADAMW_RATE:g}: the usual rate of adamw")
    if circumstances.trained:
        rate = _TRAINED_SEARCH["lr"]
        why = "small steps keep what the trained network knows"
    elif circumstances.has_few_images:
        rate = _FEW_SEARCH["lr"]
        why = circumstances.why_rates
    else:
        rate = _SEARCH["lr"]
        why = circumstances.why_rates
    return _Choice(rate, f"{rate:g} at a batch of {search.reference_batch}: {why}")


def _choose_warmup(circumstances: _Circumstances) -> _Choice:
    """A network that is trained needs none."""
    if circumstances.trained:
        share = _TRAINED_SEARCH["warmup"]
        why = "no warm-up: the network is trained; its channels are sorted by importance instead"
    else:
        share = _SEARCH["warmup"]
        why = "the weights are trained before the alphas move"
    return _Choice(share, f"{share}: {why}")


# the final training


def _choose_epochs(circumstances: _Circumstances) -> _Choice:
    """The epochs follow the number of images, and are fewer for weights that are trained already."""
    images = circumstances.images
    if not circumstances.keeps_trained_weights:
        return _adjust_epochs(_TRAIN["epochs"], circumstances)
    if _FINETUNE_EPOCHS * images > _TRAIN_IMAGES:
        epochs = max(1, _TRAIN_IMAGES // images)
        return _Choice(epochs, f"{epochs}: {_TRAIN_IMAGES:,} images are enough to fine-tune a trained network")
    return _adjust_epochs(_FINETUNE_EPOCHS, circumstances)


def _choose_optimizer(train: TrainConfig, circumstances: _Circumstances) -> _Choice:
    """SGD, or AdamW where no rate of SGD is known: without norms, and with other losses."""
    optimizer = Optimizer.SGD
    why = "class scores of a network with BatchNorms"
    if train.lr is not None:
        why = "learning rates that are set are those of sgd"
    elif not circumstances.suits_sgd:
        optimizer = Optimizer.ADAMW
        why = _WHY_ADAMW
    return _Choice(optimizer, f"{optimizer}: {why}")


def _choose_rate(train: TrainConfig, circumstances: _Circumstances) -> _Choice:
    """The rate suits the optimizer; with SGD, it follows the number of images, and the steps of a fine-tuning."""
    optimizer = train.optimizer or _choose_optimizer(train, circumstances).value
    if optimizer is Optimizer.ADAMW:
        return _Choice(_ADAMW_RATE, f"{_ADAMW_RATE:g}: the usual rate of adamw")
    rate = _FEW_TRAIN["lr"] if circumstances.has_few_images else _TRAIN["lr"]
    why = circumstances.why_rates
    if circumstances.keeps_trained_weights:
        # A short fine-tuning has no time to repair what large steps break.
        epochs = train.epochs or _choose_epochs(circumstances).value
        steps = epochs * -(-circumstances.images // max(1, circumstances.train_batch))
        rate *= _share_of_rate(steps)
        if steps < _FULL_RATE_STEPS:
            why = f"{steps:,} steps from trained weights must be smaller than those of a long training"
    return _Choice(rate, f"{rate:g} at a batch of {train.reference_batch}: {why}")


def _share_of_rate(steps: int) -> float:
    """The share of the learning rate that suits a fine-tuning of so many steps: it grows with their square root."""
    share = round(math.sqrt(steps / _FULL_RATE_STEPS), 2)
    return min(1.0, max(_LEAST_SHARE, share))


def _choose_weight_decay(circumstances: _Circumstances) -> _Choice:
    """It follows the number of images."""
    decay = _FEW_TRAIN["weight_decay"] if circumstances.has_few_images else _TRAIN["weight_decay"]
    return _Choice(decay, f"{decay}: default for {circumstances.images:,} images")


# both


def _adjust_epochs(epochs: int, circumstances: _Circumstances) -> _Choice:
    """So many epochs, or more if the data set is tiny."""
    images = circumstances.images
    steps = max(1, images // max(1, circumstances.batch))  # a batch of 0 is refused later
    why = f"default for {images:,} images"
    if epochs * steps < _MIN_STEPS:
        epochs = math.ceil(_MIN_STEPS / steps)
        why = f"an epoch has {steps} steps, and at least {_MIN_STEPS} steps are needed in all"
    return _Choice(epochs, f"{epochs}: {why}")


def default_batch(images: int, macs: int) -> tuple[int, str]:
    """Images in a batch of this data set and network, MACs being those of one sample; and why."""
    batch = _BATCH
    reason = "default"
    if macs >= _HEAVY:
        batch = _HEAVY_BATCH
        reason = "large networks need more memory"
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
