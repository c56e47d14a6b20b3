"""All settings, as frozen dataclasses: names, defaults, help and ranges. Imports no torch, so that --help is quick."""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any

from dmcp.budgets import Budget, read_budget
from dmcp.errors import BudgetError, DmcpError, TrainingError

UNPRUNED = "unpruned"  # a row of the table, and the teacher that is trained first
AUTO = "auto"  # the teacher is the model itself if it is trained, else the unpruned network
MAX_SEED = 2**62  # seeds derived from it must fit into 64 bits, too
_MAX_INT: float = 2**63 - 1  # torch holds no larger ones
_MAX_FLOAT = 1e30  # products with it must fit into float32, too
Bound = int | Mapping[str, int]  # channels: of every space, or of modules or spaces by name; "" is the whole network


# values to choose from


class Sampling(StrEnum):
    """How the random sub-networks of a weight step are sampled."""

    MARKOV = "markov"  # from the alphas: the paper's variant of the sandwich rule
    UNIFORM = "uniform"  # every number of groups is equally likely, independently in each space
    MIXED = "mixed"  # every second one from the alphas, the others uniform
    SANDWICH = "sandwich"  # one ratio for all spaces: the original sandwich rule


class Init(StrEnum):
    """Where the alphas start."""

    FRONT = "front"  # first groups certain, last ones unlikely; the border between them is where the budget is met
    TARGET = "target"  # one constant for which the expected cost is the budget
    ZERO = "zero"  # every transition has probability one half: far below any budget
    RANDOM = "random"  # standard normal
    GIVEN = "given"  # the values that the supernet has


class Precision(StrEnum):
    """The dtype of the forward pass; weights and losses are always float32."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Retrain(StrEnum):
    """How the pruned network gets its weights."""

    SCRATCH = "scratch"  # initialized again, then trained: the paper's way
    FINETUNE = "finetune"  # the weights of the search, calibrated and fine-tuned
    SLIMMABLE = "slimmable"  # initialized again, trained inside the unpruned network, which teaches it: DMCP*
    NONE = "none"  # the weights of the search, calibrated and not trained


class Optimizer(StrEnum):
    """What moves the weights."""

    SGD = "sgd"  # with momentum: its rates suit BatchNorms and class scores
    ADAMW = "adamw"  # its steps do not depend on the scale of weights and losses


class Distill(StrEnum):
    """How far an output is from that of a teacher."""

    CLASSES = "classes"  # KL divergence of the classes along dim 1, for samples or pixels
    L1 = "l1"  # mean absolute difference
    L2 = "l2"  # mean squared difference


class RuntimeKind(StrEnum):
    """What runs the networks whose latency is measured."""

    TORCH = "torch"
    ONNX = "onnx"  # exported, in onnxruntime on the CPU in float32


class LatencyMode(StrEnum):
    """How torch runs a network whose latency is measured."""

    EAGER = "eager"  # kernel by kernel, from Python
    CAPTURED = "captured"  # the eager kernels in a CUDA graph: no Python, no gaps between launches
    COMPILED = "compiled"  # by torch.compile; on a GPU in a CUDA graph, too


class FloatType(StrEnum):
    """Dtypes in which latency is measured."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT64 = "float64"


class Corrupt(StrEnum):
    """What happens when an image file cannot be decoded."""

    STOP = "stop"
    SKIP = "skip"  # another image takes its place


# one field, and everything that is made from it

SEARCHES = ("prune", "search")  # commands with a search
TRAININGS = ("prune", "train")  # commands with a final training
RUNS = ("prune", "search", "train")  # commands that make one run
COMMANDS = (*RUNS, "compare")
_GROUPED = (*SEARCHES, "compare")
_COMPARED = (*TRAININGS, "compare")
AUTOMATIC = "automatic"  # the default of what is chosen for network and data


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of a settings dataclass, as checks, files and the command line see it."""

    name: str
    type: Any  # without None
    optional: bool  # whether None is allowed
    default: Any  # MISSING if it must be given
    help: str = ""
    low: float = -math.inf  # low <= value <= high
    high: float = math.inf
    above: float = -math.inf  # above < value < below
    below: float = math.inf
    option: str | None = ""  # its name on the command line: "" is the field's own, None makes no option
    group: str = ""  # its heading in the help; "" is that of the settings it belongs to
    commands: tuple[str, ...] = ()  # commands with this option; () are those of the settings it belongs to
    shown: str = ""  # its default in words, where the value does not say it
    fixed: bool = True  # False: may change when a run is resumed, since it does not change the result


def setting(default: Any = MISSING, help: str = "", low: float = -math.inf, high: float = math.inf, **more: Any) -> Any:
    """A field of a settings dataclass; `more` are other fields of `Setting`.

    Such a field is all that a new setting needs: its option, help, range check, line in settings.json and key in
    recipes are made from it.
    """
    metadata = {"help": help, "low": low, "high": high, **more}
    if default == {}:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@functools.cache
def describe(kind: type) -> tuple[Setting, ...]:
    """All fields of a settings dataclass. This is the only place that looks at its annotations."""
    annotations = typing.get_type_hints(kind)
    described = []
    for each in fields(kind):
        parts = typing.get_args(annotations[each.name])
        optional = types.NoneType in parts
        value_type = annotations[each.name]
        if optional:
            value_type = typing.Union[tuple(part for part in parts if part is not types.NoneType)]  # noqa: UP007
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        metadata = _metadata(kind, each.name)
        described.append(Setting(name=each.name, type=value_type, optional=optional, default=default, **metadata))
    return tuple(described)


def _metadata(kind: type, name: str) -> Mapping[str, Any]:
    """What `setting` says of a field. A subclass that only narrows the type of a field does not repeat it."""
    for base in kind.__mro__:
        if is_dataclass(base) and name in base.__dataclass_fields__ and base.__dataclass_fields__[name].metadata:
            return base.__dataclass_fields__[name].metadata
    return {}


def check(settings: Any, error: type[DmcpError] = TrainingError) -> None:
    """Refuse values of the wrong type or range; strings become members of their Enum."""
    kind: Any = type(settings)
    for described in describe(kind):
        value = getattr(settings, described.name)
        if value is None and described.optional:
            continue
        expected = _expected(described, value)
        if expected:
            raise error(f"{described.name} must be {expected}, not {value!r}.")
        if _is_enum(described.type):
            object.__setattr__(settings, described.name, described.type(value))


def _is_enum(value_type: Any) -> bool:
    return isinstance(value_type, type) and issubclass(value_type, StrEnum)


def _expected(described: Setting, value: Any) -> str:
    """What the value should have been; empty if it is as it should be. Types that are not listed are not checked."""
    if _is_enum(described.type):
        is_member = isinstance(value, str) and value in list(described.type)
        return "" if is_member else f"one of {', '.join(described.type)}"
    if described.type is bool:
        return "" if isinstance(value, bool) else "True or False"
    if described.type == Bound:
        numbers = list(value.values()) if isinstance(value, Mapping) else [value]
        are_counts = all(type(number) is int and number >= 1 for number in numbers)
        return "" if are_counts else "an int of at least 1, or such ints by name"
    if described.type in (int, float):
        return _expected_number(described, value)
    return ""


def _expected_number(described: Setting, value: Any) -> str:
    """Which numbers a setting takes; empty if the value is one of them."""
    if described.type is int:
        expected, largest = "an int", _MAX_INT
        is_number = isinstance(value, int) and not isinstance(value, bool)
    else:
        expected, largest = "a number", _MAX_FLOAT
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_allowed = is_number and described.low <= value <= min(described.high, largest)
    if is_allowed and described.above < value < described.below:
        return ""
    if described.above > -math.inf:
        expected += f" above {described.above}"
    elif described.low > -math.inf:
        expected += f" of at least {described.low}"
    if described.below < math.inf:
        expected += f" and below {described.below}"
    elif described.high < math.inf:
        expected += f" and at most {described.high}"
    elif is_number and value > largest:
        expected += f" and at most {largest}"
    return expected


# the settings of each part

_DECAY = "Weight decay; not applied to norms and biases."
_SMOOTHING = "Label smoothing of the cross-entropy loss."
_ALIGN = (
    "Round widths to multiples of this number. Default: 16 in wide layers, less in narrow ones; "
    "with a latency table, multiples that suit its device."
)


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """Settings of a search; learning rates of sgd are for a batch of 1024, as in the paper.

    Settings that are None are unset: `prune` and the command line choose them for the network and its data, `search` on
    its own takes those for a network that is not trained. These, and the other defaults, are the paper's, except for
    align, warmup_sampling, distill, init, label_smoothing, alpha_lr and alpha_min_lr; the paper names none for the
    momenta and weight_decay, and 15 groups for MobileNetV2. The paper map of the docs has a table.
    """

    budget: int | float | str | Budget = setting(
        help="Limit on the cost of the pruned network: 50% of the MACs, 211M (MACs), params:2M, memory:256kB, "
        "traffic:50% (of the bytes read and written), 8ms or latency:50%. Join limits that must all hold with commas: "
        "50%,params:2M. Repeat the option to get one network for each budget from a single search.",
        group="Budget",
        shown="50%",
    )
    tolerance: float = setting(
        0.95,
        "Share of the budget below which the expected cost is pushed up (gamma of eq. 13).",
        above=0,
        below=1,
        option=None,
    )
    groups: int = setting(10, "Number of channel groups in each space.", 1, group="Budget", commands=_GROUPED)
    align: int | None = setting(None, _ALIGN, 1, group="Budget", commands=_GROUPED)
    min_channels: Bound = setting(
        {},
        "Minimum number of channels: 8 for every space, or layer1=16 for one; repeatable.",
        group="Budget",
        commands=_GROUPED,
    )
    max_channels: Bound = setting(
        {},
        "Maximum number of channels: 48 for every space, or layer3=48 for one; repeatable.",
        group="Budget",
        commands=_GROUPED,
    )
    epochs: int | None = setting(
        None, "Number of search epochs, including the warm-up.", 1, option="search_epochs", shown=AUTOMATIC
    )
    warmup: float | None = setting(
        None,
        "Fraction of the search epochs that train only the weights; 0 for a trained model.",
        0,
        below=1,
        shown=AUTOMATIC,
    )
    sort: bool | None = setting(
        None, "Sort channels by their importance first. Default: for a trained model.", option=None
    )
    subnets: int = setting(
        2, "Random sub-networks in each weight step, besides the largest and the smallest one.", 0, option=None
    )
    sampling: Sampling | None = setting(
        None,
        "How sub-networks are sampled after the warm-up. Default: mixed for a trained model, else markov.",
        option=None,
    )
    warmup_sampling: Sampling = setting(Sampling.UNIFORM, "How sub-networks are sampled in the warm-up.", option=None)
    distill: bool | None = setting(
        None,
        "Whether sub-networks learn from the outputs of the largest one instead of the labels. "
        "Default: yes for class scores; with a loss of your own, only if it shows that they are.",
        option=None,
    )
    init: Init | None = setting(
        None, "Initialization of the alphas. Default: front for a trained model, else target.", option=None
    )
    task_loss: bool = setting(
        True, "Whether the alphas learn from the task loss, too, and not only from the budget loss.", option=None
    )
    budget_weight: float | None = setting(
        None,
        "Weight of the budget loss (lambda of eq. 15). Default: 1.0 for a trained model, else 0.1.",
        0,
        option=None,
    )
    train_weights: bool = setting(True, "Whether the weights are trained after the warm-up, too.", option=None)
    lr: float | None = setting(
        None,
        "Initial learning rate of the search, for a batch of 1024.",
        0,
        option="search_lr",
        shown=AUTOMATIC,
    )
    min_lr: float | None = setting(
        None, "Final learning rate of the cosine schedule. Default: a tenth of lr.", 0, option=None
    )
    optimizer: Optimizer | None = setting(
        None,
        "Optimizer of the weights: sgd or adamw. Default: sgd if lr is set, or for class scores of a network with "
        "BatchNorms; else adamw.",
        option=None,
    )
    reference_batch: int = setting(
        1024, "Batch size for lr and min_lr of sgd, which are scaled linearly for other sizes.", 1, option=None
    )
    momentum: float = setting(0.9, "Nesterov momentum of sgd.", 0, below=1, option=None)
    weight_decay: float | None = setting(None, _DECAY, 0, group="Training", shown=AUTOMATIC)
    label_smoothing: float = setting(0.1, _SMOOTHING, 0, below=1, group="Training")
    alpha_lr: float = setting(
        0.5, "Learning rate of the alphas after the warm-up; it is not scaled with the batch.", 0, option=None
    )
    alpha_min_lr: float = setting(0.1, "Final learning rate of the alphas in their cosine schedule.", 0, option=None)
    sharpen: float | None = setting(
        None,
        "Factor by which all alphas grow during the search. Default: 2.0 for a trained model, else 1.0.",
        1,
        option=None,
    )
    alpha_momentum: float = setting(
        0.9, "Nesterov momentum of the alphas; they have no weight decay.", 0, below=1, option=None
    )
    accumulate: int = setting(1, "Number of batches whose gradients are accumulated per step.", 1, option=None)
    log_every: int = setting(
        50, "Steps between two reads of the records, which also detect non-finite losses.", 1, option=None
    )
    seed: int = setting(0, "Random seed for initialization and sampling in the search.", 0, MAX_SEED)

    def __post_init__(self) -> None:
        check(self)
        read_budget(self.budget)  # refuses what cannot be read; `parse_budget` makes limits of it for a network
        if self.epochs is None or self.warmup is None:
            return
        if round(self.epochs * self.warmup) == self.epochs:
            raise TrainingError(
                f"warmup={self.warmup:g} leaves none of the {self.epochs} epochs to the alphas: lower it."
            )


@dataclass(frozen=True, kw_only=True)
class ResolvedSearchConfig(SearchConfig):
    """Settings of a search with nothing left to choose."""

    epochs: int
    warmup: float
    sort: bool
    sampling: Sampling
    distill: bool
    init: Init
    budget_weight: float
    lr: float
    min_lr: float
    optimizer: Optimizer
    weight_decay: float
    sharpen: float

    @property
    def warmup_epochs(self) -> int:
        """Epochs that train weights only."""
        return round(self.epochs * self.warmup)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a network is trained.

    Settings that are None are unset: `prune` and the command line choose them for the network and its data, `train` on
    its own takes the paper's recipe for a pruned ResNet. The other defaults are the paper's, too, except for
    label_smoothing; the paper names no momentum and no weight_decay.
    """

    epochs: int | None = setting(None, "Number of training epochs.", 1, shown=AUTOMATIC)
    optimizer: Optimizer | None = setting(
        None,
        "Optimizer of the final training: sgd or adamw. Default: sgd if lr is set, or for class scores of a network "
        "with BatchNorms; else adamw.",
        shown=AUTOMATIC,
    )
    lr: float | None = setting(
        None,
        "Peak learning rate. That of sgd is for a batch of 2048 and scaled linearly for other sizes.",
        above=0,
        commands=_COMPARED,
        shown=AUTOMATIC,
    )
    reference_batch: int | None = setting(
        2048,
        "Batch size for all learning rates of sgd, which are scaled linearly for other sizes. None: never scaled.",
        1,
        option=None,
    )
    warmup_epochs: float = setting(1.0, "Number of epochs in which the learning rate rises to lr.", 0, option=None)
    warmup_lr: float | None = setting(
        None, "Learning rate of the first step, scaled as lr is. Default: a quarter of lr.", 0, option=None
    )
    min_lr: float = setting(0.0, "Final learning rate of the cosine schedule, scaled as lr is.", 0, option=None)
    momentum: float = setting(0.9, "Momentum of SGD.", 0, below=1, option=None)
    nesterov: bool = setting(True, "Use Nesterov momentum.", option=None)
    weight_decay: float | None = setting(None, _DECAY, 0, commands=_COMPARED, shown=AUTOMATIC)
    label_smoothing: float = setting(0.1, _SMOOTHING, 0, below=1, commands=_COMPARED)
    kd_weight: float = setting(0.9, "Weight of the teacher's outputs in the loss; the labels get the rest.", 0, 1)
    kd_temperature: float = setting(
        4.0, "Distillation temperature; it divides the class scores of teacher and student.", 0.01, 100
    )
    seed: int = setting(0, "Random seed for dropout and similar layers; the loader has its own.", 0, MAX_SEED)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class ResolvedTrainConfig(TrainConfig):
    """How a network is trained, with nothing left to choose."""

    epochs: int
    optimizer: Optimizer
    lr: float
    warmup_lr: float
    weight_decay: float


@dataclass(frozen=True, kw_only=True)
class Engine:
    """How networks are run; None leaves the choice to dmcp, which follows the device."""

    precision: Precision | None = setting(
        None, "Dtype of the forward pass. Default: bfloat16 on GPUs that support it, else float32."
    )
    channels_last: bool | None = setting(None, "Use the channels-last memory format. Default: on GPUs.", commands=RUNS)
    compile: bool | None = setting(
        None, "Use torch.compile. Default: on GPUs, in runs long enough to pay for the compilation."
    )
    graphs: bool | None = setting(None, "Use CUDA graphs. Default: on one GPU, with the default losses and optimizer.")
    kernels: bool | None = setting(
        None, "Use dmcp's own kernels for layers with few channels. Default: in bfloat16, on one GPU."
    )
    tf32: bool = setting(True, "Allow TF32: float32 products on a GPU round their inputs to 10 bits.", commands=RUNS)
    deterministic: bool = setting(False, "Make runs on a GPU bit-identical, too (slower).")
    sync_batchnorm: bool = setting(False, "Synchronize BatchNorm statistics across all ranks, on GPUs.", commands=RUNS)

    def __post_init__(self) -> None:
        check(self)


@dataclass(frozen=True, kw_only=True)
class LatencyConfig:
    """How many networks are measured for a latency table, and how."""

    batch: int = setting(1, "Batch size of a forward pass.", 1)
    device: str = setting("", "Device to measure on. Default: the device of the model; the CPU for onnxruntime.")
    dtype: FloatType = setting(FloatType.FLOAT32, "Dtype of weights and inputs.")
    runtime: RuntimeKind = setting(
        RuntimeKind.TORCH, "Runtime used to measure latency: torch, or onnxruntime on the CPU."
    )
    mode: LatencyMode | None = setting(
        None,
        "How torch runs the networks, as they will be deployed: eager, captured (a CUDA graph) or compiled. "
        "Default: captured on a GPU, eager elsewhere.",
    )
    channels_last: bool | None = setting(None, "Use the channels-last memory format. Default: on GPUs.")
    networks: int = setting(40, "Number of networks to measure.", 12, 10_000)
    align: int | None = setting(None, _ALIGN, 1)
    min_channels: Bound = setting({}, "Minimum number of channels, as in SearchConfig.")
    max_channels: Bound = setting({}, "Maximum number of channels, as in SearchConfig.")
    seed: int = setting(0, "Random seed for the widths that are measured.", 0, MAX_SEED)

    def __post_init__(self) -> None:
        check(self, BudgetError)


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

    # So do the epochs; the search of a trained network may need less than one.
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
