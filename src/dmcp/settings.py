"""All settings, as frozen dataclasses: names, defaults, help and ranges. Imports no torch, so that --help is quick."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from dmcp.budgets import Budget, read_budget
from dmcp.errors import BudgetError, TrainingError
from dmcp.fields import AUTOMATIC, RUNS, SEARCHES, TRAININGS, Bound, check, setting

UNPRUNED = "unpruned"  # a row of the table, and the teacher that is trained first
AUTO = "auto"  # the teacher is the model itself if it is trained, else the unpruned network
MAX_SEED = 2**62  # seeds derived from it must fit into 64 bits, too
_GROUPED = (*SEARCHES, "compare")
_COMPARED = (*TRAININGS, "compare")


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

    budget: int | float | str | Budget | None = setting(
        None,
        "Limit on the cost of the pruned network: 50% of the MACs, 211M (MACs), params:2M, memory:256kB, "
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
        if self.budget is not None:
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

    budget: int | float | str | Budget
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
    warmup_epochs: float | None = setting(
        None,
        "Number of epochs in which the learning rate rises to lr. Default: one, but at most a tenth of all epochs.",
        0,
        option=None,
    )
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
    warmup_epochs: float
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


# settings that contradict each other


def check_within(retrain: Retrain, teacher: object) -> None:
    """Refuse trainings from fresh weights, which a short one does not predict, and a teacher that is untrained."""
    if retrain not in (Retrain.FINETUNE, Retrain.NONE):
        raise TrainingError(
            f'within compares networks after short trainings from their own weights: retrain must be "finetune" or '
            f'"none", not "{retrain}".'
        )
    if teacher == UNPRUNED:
        raise TrainingError('within needs a trained model, which is then the teacher: leave out teacher="unpruned".')
