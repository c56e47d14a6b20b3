"""All settings, as frozen dataclasses: names, defaults, help and ranges. Imports no torch, so that --help is quick."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from typing import Any

from dmcp.budgets import Budget, read_budget
from dmcp.errors import BudgetError, DmcpError, TrainingError

UNPRUNED = "unpruned"  # a row of the table, and the teacher that is trained first
AUTO = "auto"  # the teacher that suits: the model itself if it is trained, else the unpruned network
MAX_SEED = 2**62  # what others add to it must fit into 64 bits, too
_MAX_FLOAT = 1e30  # what others multiply it with must fit into float32, too
Bound = int | Mapping[str, int]  # channels: of every space, or of modules or spaces by name; "" is the whole network


class Sampling(StrEnum):
    """How the random sub-networks of a weight step are sampled."""

    MARKOV = "markov"  # from the alphas: the paper's variant of the sandwich rule
    UNIFORM = "uniform"  # every number of groups alike, each space by itself
    MIXED = "mixed"  # every second one from the alphas, the others uniform
    SANDWICH = "sandwich"  # one ratio for all spaces: the original sandwich rule


class Init(StrEnum):
    """Where the alphas start."""

    FRONT = "front"  # first groups sure, last ones unlikely, the border between them where the budget is met
    TARGET = "target"  # one constant for which the expected cost is the budget
    ZERO = "zero"  # every transition at one half: far below any budget
    RANDOM = "random"  # standard normal
    GIVEN = "given"  # those that the supernet has


class Precision(StrEnum):
    """The dtype of the forward pass; weights and losses are always float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Retrain(StrEnum):
    """How the pruned network gets its weights."""

    SCRATCH = "scratch"  # initialized anew, then trained: the paper's way
    FINETUNE = "finetune"  # those of the search, calibrated and fine-tuned
    SLIMMABLE = "slimmable"  # initialized anew, trained inside the unpruned network, which teaches it: DMCP*
    NONE = "none"  # those of the search, calibrated and not trained


class RuntimeKind(StrEnum):
    """What runs the networks whose latency is measured."""

    TORCH = "torch"
    ONNX = "onnx"  # exported, in onnxruntime on the CPU in float32


class FloatType(StrEnum):
    """Dtypes in which latency is measured."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT64 = "float64"


class Corrupt(StrEnum):
    """What happens at an image file that cannot be decoded."""

    STOP = "stop"
    SKIP = "skip"  # another image takes its place


def setting(default: Any, help: str, low: float = -math.inf, high: float = math.inf, below: float = math.inf) -> Any:
    """A field with its help and its range: low <= value <= high, value < below."""
    return field(default=default, metadata={"help": help, "low": low, "high": high, "below": below})


def check(settings: Any, error: type[DmcpError] = TrainingError) -> None:
    """Refuse values of the wrong type or range; strings become members of their Enum."""
    for it in fields(settings):
        value, kind = getattr(settings, it.name), str(it.type)
        if value is None and kind.endswith("| None"):
            continue
        kind = kind.removesuffix(" | None")
        if isinstance(enum := globals().get(kind), type) and issubclass(enum, StrEnum):
            if not isinstance(value, str) or value not in list(enum):
                raise error(f"{it.name} must be one of {', '.join(enum)}, not {value!r}.")
            object.__setattr__(settings, it.name, enum(value))
        elif kind == "bool" and not isinstance(value, bool):
            raise error(f"{it.name} must be True or False, not {value!r}.")
        elif kind == "Bound":
            numbers = list(value.values()) if isinstance(value, Mapping) else [value]
            if any(type(number) is not int or number < 1 for number in numbers):
                raise error(f"{it.name} must be an int of at least 1, or such ints by name, not {value!r}.")
        elif kind in ("int", "float"):
            types = int if kind == "int" else int | float
            low, high, below = (it.metadata.get(key, 0) for key in ("low", "high", "below"))
            high = high if kind == "int" else min(high, _MAX_FLOAT)
            if isinstance(value, bool) or not isinstance(value, types) or not (low <= value <= high and value < below):
                upper = f" and below {below}" if below < math.inf else f" and at most {high}" if high < math.inf else ""
                what = "an int" if kind == "int" else "a number"
                raise error(f"{it.name} must be {what} of at least {low}{upper}, not {value!r}.")


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """Settings of a search, for a batch of 1024 as in the paper.

    The defaults of tolerance, groups (for ResNet; 15 for MobileNetV2), epochs, warmup, sampling, budget_weight, lr and
    min_lr are the paper's. Those of align, warmup_sampling, distill, init, label_smoothing, alpha_lr and alpha_min_lr
    are not, and it names none for the momenta and weight_decay: the paper map of the docs has a table.
    """

    budget: int | float | str | Budget = field(
        metadata={"help": "50%, 211M, 1.1G, params:2M, memory:256kB, 8ms, latency:50%, or several: 50%,params:2M."}
    )
    tolerance: float = setting(
        0.95, "Share of the budget below which the expected cost is pushed up (gamma of eq. 13).", 1e-9, below=1
    )
    groups: int = setting(10, "Groups that each space is divided into.", 1)
    align: int | None = setting(
        None, "Widths are multiples of this, or full; default: of 16 in wide layers, of less in narrow ones.", 1
    )
    min_channels: Bound = field(
        default_factory=dict, metadata={"help": "Least channels of every space, like 8, or of one, like layer1=16."}
    )
    max_channels: Bound = field(default_factory=dict, metadata={"help": "Most channels, given in the same way."})
    epochs: int = setting(40, "Passes over the data in the search, the warm-up among them.", 1)
    warmup: float = setting(0.5, "Share of these epochs that train weights only; 0 for a trained model.", 0, below=1)
    sort: bool = setting(False, "Order channels by the norm of their weights first, for a trained model.")
    subnets: int = setting(2, "Random sub-networks in each weight step, besides the largest and the smallest.", 0)
    sampling: Sampling = setting(Sampling.MARKOV, "How these are sampled after the warm-up.")
    warmup_sampling: Sampling = setting(Sampling.UNIFORM, "How these are sampled in the warm-up.")
    distill: bool = setting(True, "Sub-networks learn from the largest one instead of the labels.")
    init: Init = setting(Init.TARGET, "Where the alphas start.")
    independent: bool = setting(False, "Keep each group by itself (Bernoulli), not along the chain: an ablation.")
    task_loss: bool = setting(True, "The task loss moves the alphas, not the budget alone.")
    budget_weight: float = setting(0.1, "Weight of the budget loss (lambda of eq. 15).", 0)
    train_weights: bool = setting(True, "The weights still move after the warm-up.")
    lr: float = setting(0.2, "First learning rate of the search, at a batch of reference_batch.", 0)
    min_lr: float = setting(0.02, "The same at the end of its cosine.", 0)
    reference_batch: int = setting(1024, "Other batches scale lr and min_lr linearly.", 1)
    momentum: float = setting(0.9, "Nesterov momentum of the weights.", 0, below=1)
    weight_decay: float = setting(1e-4, "Of the weights; none on norms and biases.", 0)
    label_smoothing: float = setting(0.1, "Of the default loss.", 0, below=1)
    alpha_lr: float = setting(0.5, "Learning rate of the alphas after the warm-up; not scaled.", 0)
    alpha_min_lr: float = setting(0.1, "The same at the end of its cosine.", 0)
    sharpen: float = setting(1.0, "Factor by which all alphas grow in the course of the search.", 1)
    alpha_momentum: float = setting(0.9, "Nesterov momentum of the alphas; they have no weight decay.", 0, below=1)
    accumulate: int = setting(1, "Batches whose gradients make one step.", 1)
    log_every: int = setting(50, "Steps after which records are read, and a loss that is not finite is noticed.", 1)
    seed: int = setting(0, "Of everything random in the search.", 0, MAX_SEED)

    def __post_init__(self) -> None:
        check(self)
        read_budget(self.budget)  # refuses what cannot be read; `parse_budget` makes limits of it for a network
        if self.warmup_epochs == self.epochs:
            raise TrainingError(f"warmup={self.warmup:g} leaves the alphas none of {self.epochs} epochs: lower it.")

    @property
    def warmup_epochs(self) -> int:
        """Epochs that train weights only."""
        return round(self.epochs * self.warmup)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a network is trained; the defaults are the paper's recipe for a pruned ResNet, but for label_smoothing.

    It names no momentum and no weight_decay.
    """

    epochs: int = setting(100, "Passes over the training data.", 1)
    lr: float = setting(0.8, "Highest learning rate, at a batch of reference_batch.", 1e-300)
    reference_batch: int | None = setting(2048, "Other batches scale all learning rates linearly; None: never.", 1)
    warmup_epochs: float = setting(1.0, "Epochs in which the learning rate grows to lr.", 0)
    warmup_lr: float = setting(0.2, "Learning rate of the first step, scaled as well.", 0)
    min_lr: float = setting(0.0, "Where the cosine ends, scaled as well.", 0)
    momentum: float = setting(0.9, "Of SGD.", 0, below=1)
    nesterov: bool = setting(True, "Nesterov momentum.")
    weight_decay: float = setting(1e-4, "On weights; none on norms and biases.", 0)
    label_smoothing: float = setting(0.1, "Of the default loss.", 0, below=1)
    kd_weight: float = setting(0.9, "Weight of the teacher's outputs in the loss; the labels have the rest.", 0, 1)
    kd_temperature: float = setting(4.0, "Logits of both are divided by it.", 0.01, 100)
    seed: int = setting(0, "Of dropout and the like; a loader has its own.", 0, MAX_SEED)

    def __post_init__(self) -> None:
        check(self)


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
    search = SearchConfig(budget=budget, **PAPER["search"])
    return {"search": search, "train": TrainConfig(**PAPER["train"]), "retrain": Retrain.SCRATCH, "teacher": None}


# defaults for what is there: docs/cookbook.md has the same table

_TRAINED_SEARCH: dict[str, Any] = {  # experiments/REPORT.md, "judge"
    "epochs": 1,
    "warmup": 0.0,
    "sort": True,
    "lr": 0.04,
    "min_lr": 0.004,
    "init": Init.FRONT,
    "sharpen": 2.0,
    "sampling": Sampling.MIXED,
    "budget_weight": 1.0,
}
_KEEPING = (Retrain.FINETUNE, Retrain.NONE)  # the weights that are there
_SEARCH_IMAGES, _SEARCH_STEPS = 50_000, (150, 500)  # that a trained network sees in its search, in so many steps
_TRAIN_IMAGES = 13_000_000  # that it sees at most in its fine-tuning
_MIN_STEPS = 300  # of a search or a training of other networks: tiny data sets get more passes
_BATCH, _MIN_PER_EPOCH = 128, 8  # images in a batch, and the steps that an epoch has at least
_FEW_IMAGES = 200_000  # up to which the next two hold instead of ImageNet's: REPORT.md, "judge"
_FEW_SEARCH: dict[str, Any] = {"lr": 0.4, "min_lr": 0.04, "weight_decay": 5e-4}  # of a network that is not trained
_FEW_TRAIN: dict[str, Any] = {"lr": 1.6, "warmup_lr": 0.4, "weight_decay": 5e-4}
_HEAVY, _HEAVY_BATCH = 2 * 10**9, 64  # MACs of one sample from which batches are smaller, for the memory


@dataclass(frozen=True)
class Defaults:
    """Settings for a network and its data, and why: a name, a value and a sentence each."""

    search: SearchConfig
    train: TrainConfig
    search_images: int  # in each pass of the search; 0: all
    why: Mapping[str, tuple[object, str]]


def defaults(
    budget: int | float | str | Budget,
    retrain: Retrain,
    *,
    trained: bool,
    images: int,
    batch: int,
    steps: int = 0,  # of the training, if its epochs are given
    own_loss: bool = False,  # then outputs may be no class scores, and nothing is distilled
) -> Defaults:
    """Settings for so many training images in batches of this size; `trained`: the network is, on such data."""
    search, train = default_search(budget, trained), default_training(retrain, trained)
    rates = "the paper's"
    if images <= _FEW_IMAGES:
        rates = f"twice the paper's, which suits {images:,} images"
        train, search = replace(train, **_FEW_TRAIN), search if trained else replace(search, **_FEW_SEARCH)
    gentle = trained and retrain in _KEEPING
    if gentle and 0 < steps < _MIN_STEPS:  # REPORT.md, "short"
        rates = f"the paper's, since fewer than {_MIN_STEPS} steps from trained weights must be small"
        train = replace(train, lr=TrainConfig.lr, warmup_lr=TrainConfig.warmup_lr)
    known = "the network is trained: small steps keep what it knows"
    fewest, most = _SEARCH_STEPS
    enough = batch * max(fewest, min(most, _SEARCH_IMAGES // max(1, batch)))
    few = enough if trained and images >= 2 * enough else 0
    if trained:
        passes, why_passes = max(1, round(enough / images)), f"about {enough:,} images do for a trained network"
    else:
        passes, why_passes = _passes(search.epochs, images, batch)
    epochs, why_epochs = _passes(train.epochs, images, batch, _TRAIN_IMAGES if gentle else 0)
    no_warmup = "a trained network needs no warm-up, but its channels in order of their norms"
    why: dict[str, tuple[object, str]] = {
        "search_epochs": (f"1 pass over {few:,} images" if few else passes, why_passes),
        "search_lr": (f"{search.lr:g} at a batch of {search.reference_batch}", known if trained else rates),
        "warmup": (search.warmup, no_warmup if trained else "the weights are trained before the alphas move"),
        "epochs": (epochs, why_epochs),
        "lr": (f"{train.lr:g} at a batch of {train.reference_batch}", rates),
        "weight_decay": (train.weight_decay, f"usual for {images:,} images"),
    }
    return Defaults(replace(search, epochs=passes, distill=not own_loss), replace(train, epochs=epochs), few, why)


def _passes(usual: int, images: int, batch: int, most: int = 0) -> tuple[int, str]:
    """Epochs, and why; most: images that are enough in all, 0 where that is not known."""
    steps = max(1, images // max(1, batch))  # a batch of 0 is refused later
    if most and usual * images > most:
        return max(1, most // images), f"of {images:,} images so many are enough for a trained network"
    if usual * steps < _MIN_STEPS:
        return -(-_MIN_STEPS // steps), f"an epoch has {steps} steps, and fewer than {_MIN_STEPS} in all are too few"
    return usual, f"usual for {images:,} images"


def default_batch(images: int, macs: int) -> tuple[int, str]:
    """Images in a batch of this data set and network, MACs being those of one sample; and why."""
    usual, reason = (_HEAVY_BATCH, "large networks need much memory") if macs >= _HEAVY else (_BATCH, "usual")
    batch = usual
    while batch > 1 and images // batch < _MIN_PER_EPOCH:
        batch //= 2
    return batch, reason if batch == usual else f"so that {images:,} images make {images // batch} steps in an epoch"


def default_search(budget: int | float | str | Budget, trained: bool) -> SearchConfig:
    """The usual settings of a search, whatever the data."""
    return SearchConfig(budget=budget, **_TRAINED_SEARCH if trained else {})


def default_training(retrain: Retrain, trained: bool) -> TrainConfig:
    """The usual settings of a training, whatever the data."""
    return TrainConfig(epochs=20) if trained and retrain in _KEEPING else TrainConfig()


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How networks are run; None means: what is best for the device (`dmcp.runtime.engine.resolve`)."""

    precision: Precision | None = setting(None, "bfloat16 on GPUs that compute in it, float32 elsewhere.")
    channels_last: bool | None = setting(None, "Channels-last memory format: on GPUs.")
    compile: bool | None = setting(None, "torch.compile: on GPUs, in runs that are long enough to pay for it.")
    graphs: bool | None = setting(None, "CUDA graphs: on one GPU, with the default losses and optimizer.")
    kernels: bool | None = setting(None, "Own kernels for layers of few channels: in bfloat16, on one GPU.")
    tf32: bool = setting(True, "float32 products on a GPU may round their factors to 10 bits.")
    deterministic: bool = setting(False, "The same bits in every run, also on a GPU; slower.")
    sync_batchnorm: bool = setting(False, "BatchNorms use the statistics of all ranks, on GPUs.")

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class LatencyConfig:
    """Which networks are measured for a latency table, and how."""

    batch: int = setting(1, "Samples in a forward pass.", 1)
    device: str = setting("", "Where it is timed; default: the device of the model, the CPU in onnxruntime.")
    dtype: FloatType = setting(FloatType.FLOAT32, "Of weights and inputs.")
    runtime: RuntimeKind = setting(RuntimeKind.TORCH, "What runs the networks: torch, or onnxruntime on the CPU.")
    networks: int = setting(40, "Networks that are measured.", 12, 10_000)
    align: int | None = setting(
        None, "Widths are multiples of this, or full; default: of 16 in wide layers, of less in narrow ones.", 1
    )
    min_channels: Bound = field(default_factory=dict, metadata={"help": "Narrowest widths, as in SearchConfig."})
    max_channels: Bound = field(default_factory=dict, metadata={"help": "Widest widths, given in the same way."})
    seed: int = setting(0, "Of the widths that are measured.", 0, MAX_SEED)

    def __post_init__(self) -> None:
        check(self, BudgetError)
