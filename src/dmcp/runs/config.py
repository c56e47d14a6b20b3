"""All settings of a run as one tree, and the paper's recipes. Imports no torch, so that --help is quick."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dmcp.defaults import PAPER
from dmcp.errors import DmcpError
from dmcp.fields import AUTOMATIC, COMMANDS, RUNS, SEARCHES, TRAININGS, check, setting
from dmcp.settings import (
    MAX_SEED,
    Corrupt,
    Engine,
    FloatType,
    Init,
    LatencyMode,
    Retrain,
    RuntimeKind,
    SearchConfig,
    TrainConfig,
)

_MODEL_AND_DATA = "Model and data"
_LATENCY = "Latency"
_SEARCH = "Search"
_TRAINING = "Training"
_BATCHES = "Batches and device"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run: settings.json is this tree, the options of the command line are its fields."""

    command: str = setting("prune", option=None)
    recipe: str = setting(
        "",
        "Recipe to start from, like imagenet_mobilenet_v2_211m; other options override it.",
        group=_MODEL_AND_DATA,
        commands=SEARCHES,
    )
    model: str = setting(
        "",
        "Network: a torchvision name like resnet18, timm:NAME, cifar:NAME, digits:resnet, or package.module:factory.",
        group=_MODEL_AND_DATA,
    )
    model_args: tuple[str, ...] = setting(
        (), "Argument for the model's builder, like width_mult=1.5; repeatable.", group=_MODEL_AND_DATA
    )
    weights: str = setting(
        "",
        "Weights file to start from, .safetensors or .pth. A last layer with a different number of classes is not "
        "loaded.",
        group=_MODEL_AND_DATA,
        commands=RUNS,
    )
    data: str = setting(
        "",
        "Data set: digits, cifar10, cifar100, a folder of classes (alone or in train/ and val/), a .csv file with "
        "columns image and label, or a folder of .npz shards.",
        group=_MODEL_AND_DATA,
    )
    input: str = setting(
        "", "Shape of one sample, like 3x224x224. Default: that of the data or the model.", group=_MODEL_AND_DATA
    )
    ignore: tuple[str, ...] = setting((), "Module or space to leave unpruned; repeatable.", group=_MODEL_AND_DATA)
    inexact: bool = setting(
        False,
        "Also prune through LayerNorm and GroupNorm, where gates only approximate the cut network.",
        option=None,
    )
    seed: int = setting(
        0, "Random seed for data order, initialization and sampling.", 0, MAX_SEED, group=_MODEL_AND_DATA
    )

    latency: str = setting(
        "",
        "Latency table for latency budgets, made by dmcp latency. Default: measured before the search.",
        group=_LATENCY,
        commands=SEARCHES,
    )
    latency_batch: int = setting(1, "Batch size used to measure latency.", 1, group=_LATENCY, commands=SEARCHES)
    latency_device: str = setting(
        "",
        "Device used to measure latency: cpu or cuda. Default: that of --device; the CPU for onnx.",
        group=_LATENCY,
        commands=SEARCHES,
    )
    latency_runtime: RuntimeKind = setting(
        RuntimeKind.TORCH, "Runtime used to measure latency.", group=_LATENCY, commands=SEARCHES
    )
    latency_mode: LatencyMode | None = setting(
        None,
        "How torch runs the networks that are timed, as you will deploy them: eager, captured (a CUDA graph) or "
        "compiled. Default: captured on a GPU, eager elsewhere.",
        group=_LATENCY,
        commands=SEARCHES,
    )
    latency_dtype: FloatType = setting(
        FloatType.FLOAT32, "Dtype of weights and inputs when latency is measured.", group=_LATENCY, commands=SEARCHES
    )
    latency_channels_last: bool | None = setting(
        None,
        "Measure latency in the channels-last memory format. Default: on GPUs.",
        group=_LATENCY,
        commands=SEARCHES,
    )

    within: float | None = setting(
        None,
        "Points of accuracy that may be lost against --weights, instead of a budget: chooses the smallest network that "
        "loses no more, or with --budget latency the fastest one. Half of the test images decide, and the rows of the "
        "table are of the other half.",
        0,
        group="Budget",
        commands=("prune",),
    )
    method: str = setting(
        "dmcp",
        "Pruning method: dmcp searches for widths; sensitivity, l2 and others (see dmcp compare) use no search, and "
        "sensitivity refits the weights that are left.",
        group=_SEARCH,
        commands=("prune",),
    )
    budgets: tuple[str, ...] = setting((), option=None)  # several: one search, at search.budget, a network for each
    search: SearchConfig | None = setting(None, group=_SEARCH, commands=SEARCHES)
    search_images: int = setting(
        0, "Number of images in each search epoch, if not all.", 0, group=_SEARCH, commands=SEARCHES, shown=AUTOMATIC
    )
    holdout: float = setting(
        0.0, "Fraction of the training images held out to train the alphas.", group=_SEARCH, commands=SEARCHES
    )

    retrain: Retrain = setting(
        Retrain.SCRATCH,
        "How the pruned network gets its weights: fine-tuned from the search, trained from scratch, trained inside "
        "the unpruned network (slimmable), or only calibrated (none).",
        group=_TRAINING,
        commands=TRAININGS,
        shown="finetune; scratch for dmcp train without --weights",
    )
    train: TrainConfig = setting(TrainConfig(), group=_TRAINING, commands=TRAININGS)
    widths: str = setting(
        "",
        "Widths file, from a run or from dmcp sample; of --weights, the most important channels are kept. Default: the "
        "unpruned network is trained.",
        group=_TRAINING,
        commands=("train",),
    )
    baselines: bool = setting(
        False,
        "Also train the unpruned network and a network with uniform widths, as baselines.",
        group=_TRAINING,
        commands=("prune",),
    )
    teacher: str = setting(
        "",
        'Teacher for distillation: "given" (the network of --weights), "unpruned" (trained first), a weights file, '
        '"none", or "auto": "given" if that network is trained, else "unpruned".',
        group=_TRAINING,
        commands=TRAININGS,
        shown="auto for dmcp prune, else none",
    )
    teacher_model: str = setting(
        "",
        "Network of the teacher's weights file, named as for --model. Default: that of --model.",
        group=_TRAINING,
        commands=TRAININGS,
    )
    teacher_model_args: tuple[str, ...] = setting(
        (), "Argument for the builder of --teacher-model; repeatable.", group=_TRAINING, commands=TRAININGS
    )

    batch: int = setting(
        128,
        "Total batch size of all processes; learning rates scale with it.",
        group=_BATCHES,
        shown=AUTOMATIC,
    )
    train_batch: int = setting(
        0, "Batch size of the final training. Default: that of --batch.", group=_BATCHES, commands=("prune",)
    )
    workers: int | None = setting(
        None,
        "Number of threads that read image files. Default: the number of cores.",
        1,
        1024,
        group=_BATCHES,
        commands=RUNS,
        fixed=False,
    )
    corrupt: Corrupt = setting(
        Corrupt.STOP,
        "Action for unreadable image files: stop, or skip and list them.",
        group=_BATCHES,
        commands=RUNS,
        fixed=False,
    )
    device: str = setting("", "Device: cpu or cuda. Default: a GPU if there is one.", group=_BATCHES)
    engine: Engine = setting(Engine(), group=_BATCHES, commands=COMMANDS)

    save_steps: int = setting(1000, "Steps between checkpoints.", 1, commands=RUNS)
    save_minutes: float = setting(
        5.0, "Minutes between checkpoints, unless --save-steps comes first.", 0, commands=RUNS
    )
    track: tuple[str, ...] = setting(
        (), "Also log the curves to tensorboard or wandb; repeatable.", commands=RUNS, fixed=False
    )

    def __post_init__(self) -> None:
        check(self, DmcpError)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


# recipes

_MOBILE = {"model": "mobilenet_v2", "model_args": ("width_mult=1.5", "dropout=0")}
_RESNET18 = {"model": "resnet18"}
_RESNET50 = {"model": "resnet50"}
_PAPER = (  # table 6: network, MACs, how it is trained; its top-1 accuracy in %
    (_MOBILE, "300M", Retrain.SCRATCH),  # 73.5
    (_MOBILE, "211M", Retrain.SCRATCH),  # 72.2
    (_MOBILE, "97M", Retrain.SCRATCH),  # 67.0
    (_MOBILE, "87M", Retrain.SCRATCH),  # 66.1
    (_MOBILE, "59M", Retrain.SCRATCH),  # 62.7
    (_MOBILE, "43M", Retrain.SCRATCH),  # 59.1
    (_MOBILE, "300M", Retrain.SLIMMABLE),  # 74.6
    (_MOBILE, "211M", Retrain.SLIMMABLE),  # 73.5
    (_RESNET18, "1.04G", Retrain.SCRATCH),  # 69.2
    (_RESNET50, "2.8G", Retrain.SCRATCH),  # 76.7
    (_RESNET50, "2.2G", Retrain.SCRATCH),  # 76.2
    (_RESNET50, "1.1G", Retrain.SCRATCH),  # 74.4
    (_RESNET50, "278M", Retrain.SCRATCH),  # 66.4
)


def _recipe(network: Mapping[str, Any], macs: str, retrain: Retrain) -> RunConfig:
    """One row by section 4.1, the decay by the authors' code; all else is as for a network that is not trained."""
    millions = round(float(macs[:-1]) * {"M": 1, "G": 1000}[macs[-1]])
    name = f"imagenet_{network['model']}_{millions}m"
    if retrain is Retrain.SLIMMABLE:
        name += "_slimmable"
    groups = 10
    epochs = 100
    decay = 1e-4
    if network is _MOBILE:
        groups = 15
        epochs = 250
        decay = 4e-5
    return RunConfig(
        recipe=name,
        batch=1024,
        train_batch=2048,
        retrain=retrain,
        search=SearchConfig(budget=macs, groups=groups, align=1, weight_decay=decay, init=Init.ZERO),
        train=TrainConfig(epochs=epochs, weight_decay=decay),
        **network,
    )


RECIPES = {recipe.recipe: recipe for recipe in (_recipe(*row) for row in _PAPER)}
RECIPES["paper"] = RunConfig(
    recipe="paper",
    search=SearchConfig(budget="50%", **PAPER["search"]),
    train=TrainConfig(**PAPER["train"]),
)


def find_recipe(name: str) -> RunConfig:
    """The settings of this name; DmcpError with the nearest one if there are none."""
    if name not in RECIPES:
        nearest = difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.0)[0]
        raise DmcpError(f"No recipe is named {name!r}. Did you mean {nearest!r}?")
    return RECIPES[name]
