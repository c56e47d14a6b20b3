"""All settings of a command as a tree of dataclasses, and the paper's recipes."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import functools
import hashlib
import importlib.util
import math
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dmcp import models
from dmcp.checkpoint import digest
from dmcp.cli.job import GIVEN, Corrupt, Job, Opened, argument, data_identity
from dmcp.data.datasets import NAMES as DATA
from dmcp.errors import DmcpError, FileError, TrainingError
from dmcp.report.trackers import read_kinds
from dmcp.retraining import default_recipe
from dmcp.runs import SETTINGS, free_folder, read_json, slug
from dmcp.runtime.distributed import SINGLE_PROCESS
from dmcp.runtime.io import from_plain, quote
from dmcp.searching.config import BOUNDS
from dmcp.settings import (
    MAX_SEED,
    UNPRUNED,
    Bound,
    Engine,
    Precision,
    Retrain,
    RuntimeKind,
    SearchConfig,
    TrainConfig,
)

FACTS = ("fingerprint", "macs", "data", "teacher")  # of those of a run, what must stay as it is


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of a comparison: what `dmcp cell` does besides what the rest of its plan says."""

    method: str  # see methods; "" for the unpruned network
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the method, where they are not its defaults
    prepares: bool = False  # whether it only trains a network that other cells start from
    uses: str = ""  # name of the cell whose network it starts from, in the same folder
    holdout: float = 0.1  # share of the training images that methods choose by
    scratch: bool = True  # whether the chosen network is trained from scratch
    fine_tune_epochs: int = 0  # epochs of the method's own way of training, where it fine-tunes; 0: not that way


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All settings of one command."""

    command: str  # prune, search or train
    job: Job
    engine: Engine
    search: SearchConfig | None = None
    train: TrainConfig | None = None
    retrain: Retrain = Retrain.SCRATCH
    baselines: bool = False
    widths: str = ""  # file of widths that are trained
    cell: Cell | None = None  # of dmcp compare
    every_steps: int = 1000  # steps between two checkpoints
    every_minutes: float = 5.0  # minutes between two, if that is sooner
    options: Mapping[str, Any] = field(default_factory=dict)  # as they were typed

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self) | {"options": dict(self.options)}


def plan_from_json(data: Mapping[str, Any], path: object) -> Plan:
    """The plan of a run; FileError where it is not one of this version."""
    try:
        return from_plain(Plan, {it.name: data[it.name] for it in fields(Plan)})
    except (KeyError, TypeError, ValueError, OverflowError, TrainingError) as error:
        raise FileError(
            f"{path}: not the settings of a run of this version ({quote(error)}): another version of dmcp began it, "
            "or somebody has changed it: go on with that version, or start anew in another folder (--out)."
        ) from None


@functools.cache
def code_digest() -> str:
    """Twelve letters that change with our code: which version made a result, also where none is installed."""
    here = Path(__file__).parents[1]
    parts = [path.relative_to(here).as_posix().encode() + path.read_bytes() for path in sorted(here.rglob("*.py"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def facts_of(opened: Opened) -> dict[str, Any]:
    """What a run is about, besides its settings: data, the unpruned network, versions."""
    graph = opened.graph
    unpruned = {"macs": graph.macs(), "params": graph.params(), "widths": dict(graph.full)}
    versions = {"torch": torch.__version__, "python": platform.python_version(), "code": code_digest()}
    teacher = {} if opened.teacher is None else {"teacher": digest(opened.teacher.state_dict(), SINGLE_PROCESS)}
    known = {"classes": opened.data.classes, "shape": list(opened.data.shape), "data": data_identity(opened.data)}
    return (
        known
        | teacher
        | {
            "unpruned": unpruned,
            "macs": graph.macs(),
            "fingerprint": graph.fingerprint,
            "versions": versions,
        }
    )


IMAGES = 1_281_167  # training images of ImageNet


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of one experiment but the data; `dataclasses.replace` makes another one of it."""

    name: str
    job: Job  # its batch is the search's, over all GPUs
    search: SearchConfig
    train: TrainConfig
    retrain: Retrain
    train_batch: int  # images in one step of the retraining, over all GPUs
    paper_top1: float  # accuracy in percent, as the paper prints it
    paper_macs: str  # as the paper prints them; it calls them FLOPs


def imagenet_mobilenet_v2_300m() -> Recipe:
    """MobileNetV2 1.5x down to 300M."""
    return _mobilenet_v2("imagenet_mobilenet_v2_300m", "300M", 73.5)


def imagenet_mobilenet_v2_211m() -> Recipe:
    """MobileNetV2 1.5x down to 211M."""
    return _mobilenet_v2("imagenet_mobilenet_v2_211m", "211M", 72.2)


def imagenet_mobilenet_v2_97m() -> Recipe:
    """MobileNetV2 1.5x down to 97M."""
    return _mobilenet_v2("imagenet_mobilenet_v2_97m", "97M", 67.0)


def imagenet_mobilenet_v2_87m() -> Recipe:
    """MobileNetV2 1.5x down to 87M."""
    return _mobilenet_v2("imagenet_mobilenet_v2_87m", "87M", 66.1)


def imagenet_mobilenet_v2_59m() -> Recipe:
    """MobileNetV2 1.5x down to 59M."""
    return _mobilenet_v2("imagenet_mobilenet_v2_59m", "59M", 62.7)


def imagenet_mobilenet_v2_43m() -> Recipe:
    """MobileNetV2 1.5x down to 43M."""
    return _mobilenet_v2("imagenet_mobilenet_v2_43m", "43M", 59.1)


def imagenet_mobilenet_v2_300m_slimmable() -> Recipe:
    """MobileNetV2 1.5x down to 300M, trained inside the unpruned network: the paper's DMCP*."""
    return _mobilenet_v2("imagenet_mobilenet_v2_300m_slimmable", "300M", 74.6, Retrain.SLIMMABLE)


def imagenet_mobilenet_v2_211m_slimmable() -> Recipe:
    """MobileNetV2 1.5x down to 211M, trained inside the unpruned network: the paper's DMCP*."""
    return _mobilenet_v2("imagenet_mobilenet_v2_211m_slimmable", "211M", 73.5, Retrain.SLIMMABLE)


def imagenet_resnet18_1040m() -> Recipe:
    """ResNet-18 down to 1.04G."""
    return _resnet("imagenet_resnet18_1040m", "resnet18", "1.04G", 69.2)


def imagenet_resnet50_2800m() -> Recipe:
    """ResNet-50 down to 2.8G."""
    return _resnet("imagenet_resnet50_2800m", "resnet50", "2.8G", 76.7)


def imagenet_resnet50_2200m() -> Recipe:
    """ResNet-50 down to 2.2G."""
    return _resnet("imagenet_resnet50_2200m", "resnet50", "2.2G", 76.2)


def imagenet_resnet50_1100m() -> Recipe:
    """ResNet-50 down to 1.1G."""
    return _resnet("imagenet_resnet50_1100m", "resnet50", "1.1G", 74.4)


def imagenet_resnet50_278m() -> Recipe:
    """ResNet-50 down to 278M."""
    return _resnet("imagenet_resnet50_278m", "resnet50", "278M", 66.4)


_RECIPES: tuple[Callable[[], Recipe], ...] = (  # in the order of table 6
    imagenet_mobilenet_v2_300m,
    imagenet_mobilenet_v2_211m,
    imagenet_mobilenet_v2_97m,
    imagenet_mobilenet_v2_87m,
    imagenet_mobilenet_v2_59m,
    imagenet_mobilenet_v2_43m,
    imagenet_mobilenet_v2_300m_slimmable,
    imagenet_mobilenet_v2_211m_slimmable,
    imagenet_resnet18_1040m,
    imagenet_resnet50_2800m,
    imagenet_resnet50_2200m,
    imagenet_resnet50_1100m,
    imagenet_resnet50_278m,
)


def names() -> list[str]:
    """Names of all recipes, in the order of the paper's table."""
    return [make().name for make in _RECIPES]


def find(name: str) -> Recipe:
    """The recipe of this name; DmcpError with the nearest one if there is none."""
    known = {recipe.name: recipe for recipe in (make() for make in _RECIPES)}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise DmcpError(f"There is no recipe {name!r}: the nearest is {near}; docs/imagenet.md lists all of them.")
    return known[name]


# what the recipes share


def _mobilenet_v2(name: str, macs: str, top1: float, retrain: Retrain = Retrain.SCRATCH) -> Recipe:
    """Section 4.1: from 1.5x, in 15 groups of 0.1x each; 250 epochs of retraining."""
    job = _job("mobilenet_v2", "width_mult=1.5")
    return _recipe(name, job, macs, top1, retrain, groups=15, epochs=250, weight_decay=4e-5)


def _resnet(name: str, model: str, macs: str, top1: float) -> Recipe:
    """Section 4.1: from 1.0x, in 10 groups of 0.1x each; 100 epochs of retraining."""
    return _recipe(name, _job(model), macs, top1, Retrain.SCRATCH, groups=10, epochs=100, weight_decay=1e-4)


def _job(model: str, *model_args: str) -> Job:
    return Job(model=model, model_args=model_args, input="3x224x224", batch=1024)


def _recipe(
    name: str, job: Job, macs: str, top1: float, retrain: Retrain, *, groups: int, epochs: int, weight_decay: float
) -> Recipe:
    """Section 4.1 for all networks; weight decay is the authors' code's, label smoothing its one for MobileNetV2."""
    search = SearchConfig(
        budget=macs,
        tolerance=0.95,
        groups=groups,
        epochs=40,
        warmup=0.5,
        budget_weight=0.1,
        lr=0.2,
        min_lr=0.02,
        reference_batch=1024,
        weight_decay=weight_decay,
        label_smoothing=0.1,
    )
    train = TrainConfig(
        epochs=epochs,
        lr=0.8,
        warmup_lr=0.2,
        warmup_epochs=1,
        min_lr=0.0,
        reference_batch=2048,
        weight_decay=weight_decay,
        label_smoothing=0.1,
    )
    return Recipe(
        name=name,
        job=job,
        search=search,
        train=train,
        retrain=retrain,
        train_batch=2048,
        paper_top1=top1,
        paper_macs=macs,
    )


# how long they take


@dataclass(frozen=True)
class Phase:
    """A part of a recipe in which all steps cost the same."""

    name: str
    epochs: int
    rate: float  # images a second on one GPU


def phases(recipe: Recipe, step_ms: Mapping[str, float]) -> list[Phase]:
    """Warm-up, search and retraining at the step times that were measured on one GPU.

    step_ms: `batch`, the images in a step, and milliseconds: `plain_ms` of a training step of the unpruned network,
    `stage1_ms` of a weight step of the search, `search_ms` of a weight step and an alpha step.
    """
    retrain_ms = step_ms["plain_ms"]  # an upper bound: the pruned network's own step is shorter
    if recipe.retrain is Retrain.SLIMMABLE:  # two gated networks in a step; a weight step has two and the random ones
        retrain_ms = step_ms["stage1_ms"] * 2 / (2 + recipe.search.subnets)
    warm = recipe.search.warmup_epochs
    parts = (
        ("warm-up", warm, step_ms["stage1_ms"]),
        ("search", recipe.search.epochs - warm, step_ms["search_ms"]),
        ("retraining", recipe.train.epochs, retrain_ms),
    )
    return [Phase(name, epochs, 1000 * step_ms["batch"] / ms) for name, epochs, ms in parts]


def hours(
    recipe: Recipe, step_ms: Mapping[str, float], gpus: int, images: int = IMAGES, loader: float = math.inf
) -> float:
    """Hours of the whole recipe if the GPUs scale perfectly and the loader gives so many images a second."""
    return sum(_hours_of(phase, gpus, images, loader) for phase in phases(recipe, step_ms))


def loader_rate(recipe: Recipe, step_ms: Mapping[str, float], gpus: int) -> float:
    """Images a second that the loader must give so that the GPUs never wait for it."""
    return gpus * max(phase.rate for phase in phases(recipe, step_ms))


def hours_table(
    benches: Sequence[Mapping[str, Any]], gpus: int, loader: float = math.inf, only: Sequence[str] = ("",)
) -> str:
    """The hours of recipes as a Markdown table, by the step times of benchmarks/bench.py; `only`: words in names."""
    lines = [
        "| recipe | warm-up, h | search, h | retraining, h | in all, h | loader must give, images/s |",
        "|---|---|---|---|---|---|",
    ]
    for name in names():
        if not any(word in name for word in only):
            continue
        recipe = find(name)
        times = _times_of(recipe, benches)
        cells = [f"{_hours_of(phase, gpus, IMAGES, loader):.1f}" for phase in phases(recipe, times)]
        cells += [f"{hours(recipe, times, gpus, IMAGES, loader):.1f}", f"{loader_rate(recipe, times, gpus):,.0f}"]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _hours_of(phase: Phase, gpus: int, images: int, loader: float) -> float:
    if gpus < 1 or not loader > 0:
        raise DmcpError(f"Give at least one GPU and a loader of more than 0 images/s, not {gpus} and {loader}.")
    return phase.epochs * images / min(gpus * phase.rate, loader) / 3600


def _times_of(recipe: Recipe, benches: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What was measured last of the recipe's own network; another width of it does not count."""
    name = " ".join([recipe.job.model, *recipe.job.model_args])
    found = [bench for bench in benches if " ".join([str(bench.get("model")), *bench.get("model_args", ())]) == name]
    if not found:
        raise DmcpError(f"No step times of {name}: measure them with benchmarks/bench.py, and give the file here too.")
    times: dict[str, float] = {}
    for key in ("batch", "plain_ms", "stage1_ms", "search_ms"):
        value = found[-1].get(key)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise DmcpError(f"The step times of {name} must have a {key} above 0, not {value!r}: measure them again.")
        times[key] = float(value)
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    """python -m dmcp.cli.config hours BENCH.json: print the table of hours."""
    parser = argparse.ArgumentParser(prog="python -m dmcp.cli.config", description="How long the recipes take.")
    parser.add_argument("command", choices=["hours"])
    parser.add_argument("bench", nargs="+", type=Path, help="files that benchmarks/bench.py wrote, one per network")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--loader", type=float, default=math.inf, help="images a second that your loader gives")
    parser.add_argument("--only", nargs="*", default=[""], help="only recipes with one of these words in their names")
    given = parser.parse_args(arguments)
    try:
        benches = [step for data in map(read_json, given.bench) for step in data.get("steps", [data])]
        print(hours_table(benches, given.gpus, given.loader, given.only))
    except DmcpError as error:
        print(f"dmcp: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()

_CHANNELS = re.compile("0*[1-9][0-9]{0,8}")  # no layer has more


def _complete_model(incomplete: str) -> list[str]:
    with contextlib.suppress(DmcpError):  # no timm, no names of it
        return _starting(incomplete, models.names(timm=incomplete.startswith("timm:")))
    return []


def _check_seed(seed: int) -> int:
    if abs(seed) > MAX_SEED:
        raise DmcpError(f"--seed: {seed} is too large; choose one up to {MAX_SEED}.")
    return seed


def _complete_recipe(incomplete: str) -> list[str]:
    return _starting(incomplete, names())


def _starting(start: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(start)]


Model = Annotated[
    str,
    typer.Option(
        help="resnet18, timm:NAME, cifar:NAME, digits:resnet, package.module:factory.", autocompletion=_complete_model
    ),
]
ModelName = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="resnet18 (torchvision), timm:NAME, or package.module:factory.",
        autocompletion=_complete_model,
    ),
]
ModelArgs = Annotated[list[str] | None, typer.Option(help="Argument of its builder, like width_mult=1.5; repeatable.")]
Ignore = Annotated[list[str] | None, typer.Option(help="Module or space whose channels stay whole; repeatable.")]
Data = Annotated[str, typer.Option(help="digits, cifar10, cifar100, a folder of shards, or one with train/ and val/.")]
Budget = Annotated[str, typer.Option(help="50%, 211M, 1.1G, params:2M, 8ms, latency:50%, or several: 50%,params:2M.")]
LatencyTable = Annotated[
    str, typer.Option(help="For budgets of latency: file of dmcp latency; default: measured before the search.")
]
LatencyBatch = Annotated[int, typer.Option(min=1, help="Samples in a pass that is timed.")]
LatencyDevice = Annotated[
    str, typer.Option(help="Where it is timed: cpu or cuda; default: --device, or the CPU for onnx.")
]
LatencyRuntime = Annotated[
    RuntimeKind, typer.Option(help="In what it is timed: torch, or onnx: exported, in onnxruntime on the CPU.")
]
Out = Annotated[str, typer.Option(help="Folder of the run; default: a new one in runs/.")]
Epochs = Annotated[
    int | None, typer.Option(help="Passes over the data in retraining; default: 100, or 20 if inherited.")
]
SearchEpochs = Annotated[int, typer.Option(help="Passes over the data in the search.")]
Warmup = Annotated[float | None, typer.Option(help="Share of them for weights only; default 0.5, or 0 with --weights.")]
Batch = Annotated[int, typer.Option(help="Images in a batch, over all processes; learning rates are scaled with it.")]
Lr = Annotated[
    float | None,
    typer.Option(help="Highest rate of retraining at a batch of 2048; default: 0.8, or 0.08 if inherited."),
]
SearchLr = Annotated[float, typer.Option(help="First learning rate of the search at a batch of 1024.")]
WeightDecay = Annotated[float, typer.Option(help="Weight decay of search and retraining.")]
LabelSmoothing = Annotated[
    float, typer.Option(help="Share of a label that is spread over all classes, in search and retraining.")
]
Groups = Annotated[int, typer.Option(help="Groups that each space is divided into.")]
Align = Annotated[
    int, typer.Option(help="Widths are multiples of this, or a space's whole size; smaller spaces stay whole.")
]
MinChannels = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]N",
        help="Least channels of every space (8), or of a module or space (layer1=12); smaller ones stay whole; "
        "repeatable.",
    ),
]
MaxChannels = Annotated[
    list[str] | None, typer.Option(metavar="[NAME=]N", help="Most channels, said in the same way; repeatable.")
]
Seed = Annotated[int, typer.Option(callback=_check_seed, help="Of everything random.")]
RetrainKind = Annotated[
    Retrain | None,
    typer.Option(help="How the pruned network gets its weights; default: finetune with --weights, else scratch."),
]
Teacher = Annotated[
    str,
    typer.Option(
        help="Trained network to learn from besides the labels: given (that of --weights), a file of its weights, or "
        "unpruned: the unpruned network, trained first."
    ),
]
TeacherModel = Annotated[
    str,
    typer.Option(
        help="Network of the teacher's weights, named like --model, if it is another one: --teacher-model "
        "cifar:resnet56 --teacher FILE."
    ),
]
TeacherModelArgs = Annotated[
    list[str] | None, typer.Option(help="Argument of the builder of --teacher-model, like width_mult=1.5; repeatable.")
]
KdWeight = Annotated[
    float | None, typer.Option(help="Share of the loss that is the teacher's, not the labels'; default: 0.5.")
]
KdTemperature = Annotated[
    float | None,
    typer.Option(help="Scores of both are divided by it: the larger, the more wrong classes count; default: 1."),
]
Baselines = Annotated[bool, typer.Option("--baselines", help="Also train the unpruned network and uniform widths.")]
Weights = Annotated[
    str,
    typer.Option(
        help="File to start from: .safetensors, or .pth with weights only; a last layer for other classes starts fresh."
    ),
]
Input = Annotated[
    str,
    typer.Option(
        help="Shape of one sample, like 3x224x224 (channels, height, width); default: the data's or the model's."
    ),
]
Holdout = Annotated[float, typer.Option(help="Share of the training images that only the alphas see.")]
Device = Annotated[str, typer.Option(help="cpu or cuda; default: a GPU if there is one.")]
Numbers = Annotated[Precision | None, typer.Option(help="Of the forward passes; default: bfloat16 on a GPU.")]
Compile = Annotated[bool | None, typer.Option(help="Compile the networks; default: on a GPU, if it pays.")]
Graphs = Annotated[bool | None, typer.Option(help="Replay steps as CUDA graphs; default: on one GPU.")]
Kernels = Annotated[
    bool | None,
    typer.Option(help="Own kernels for few channels and depthwise layers; default: for these, on one GPU."),
]
Pad = Annotated[
    bool | None,
    typer.Option(help="Train pruned networks in ones of the next multiples of 8 channels; default: on a GPU."),
]
ChannelsLast = Annotated[bool | None, typer.Option(help="Store images pixel by pixel; default: on a GPU.")]
Tf32 = Annotated[bool, typer.Option(help="Let a GPU round the factors of float32 products.")]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="The same bits in every run, also on a GPU.")]
SyncBatchnorm = Annotated[
    bool, typer.Option("--sync-batchnorm", help="On several GPUs: BatchNorm statistics of all of them together.")
]
TrainBatch = Annotated[int, typer.Option(help="Images in a batch of the retraining; default: as in the search.")]
Track = Annotated[
    list[str] | None, typer.Option(help="Also send the curves to tensorboard, wandb or mlflow; repeatable.")
]
Resume = Annotated[str, typer.Option(metavar="RUN", help="Go on with a run that was interrupted, as it was begun.")]
RecipeName = Annotated[
    str,
    typer.Option(
        "--recipe", help="Settings by name, like imagenet_mobilenet_v2_211m.", autocompletion=_complete_recipe
    ),
]
Seeds = Annotated[
    int, typer.Option(min=1, help="So many runs side by side, with seeds from --seed on, and their mean.")
]
SaveSteps = Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")]
SaveMinutes = Annotated[float, typer.Option(min=0, help="Minutes between two checkpoints, if that is sooner.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Train nothing: spaces, reachable range, time and memory.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only the result.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]
Workers = Annotated[
    int | None, typer.Option(min=0, max=1024, help="Processes that read image files; default: the cores, up to 8.")
]
OnCorrupt = Annotated[Corrupt, typer.Option(help="Image files that cannot be read: stop, or skip them and say which.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print plain data instead of text.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show where in the code a mistake was found.")]


def is_first() -> bool:
    """Whether this process does what a launcher's processes need not do all: one of them looks, counts and prints."""
    return not is_launched() or os.environ.get("RANK", "0") == "0"


def is_launched() -> bool:
    """Whether torchrun or accelerate launch has started this process as one of several."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


def read_bound(word: str, texts: Iterable[str]) -> Bound:
    """8 and layer1=12 as the settings of a search have them."""
    numbers: dict[str, int] = {}
    for text in texts:
        name, sign, number = text.rpartition("=")
        if not _CHANNELS.fullmatch(number) or (sign and not name):
            raise DmcpError(
                f"--{word} {text}: that is no number of channels: write --{word} 8, or --{word} layer1=8 for a module "
                "or space."
            )
        if name in numbers:
            whose = f"for {name} " if name else ""
            raise DmcpError(f"--{word} is given {whose}as {numbers[name]} and as {number}: give one.")
        numbers[name] = int(number)
    return numbers[""] if numbers.keys() == {""} else numbers


def read_plan(run: Path) -> tuple[dict[str, Any], Plan]:
    """What a run was about: all that its settings say, and its plan."""
    if not (run / SETTINGS).exists():
        raise FileError(
            f"{run / SETTINGS}: cannot be read: give the folder of a run, which dmcp prune, search or train has made."
        )
    settings = read_json(run / SETTINGS)
    return settings, plan_from_json(settings, run / SETTINGS)


def check_names(run: Path, job: Job, *needed: str) -> None:
    """Refuse a run whose network, data or weights have names that mean nothing in this folder; say where they do."""
    for kind in needed:
        what, files = _looked_for(kind, getattr(job, kind))
        if not files or _is_here(kind, files):
            continue
        there = [folder for folder in run.resolve().parents if any((folder / name).exists() for name in files)]
        way = f". There is one in {there[0]}: type the command there." if there else ": type the command in that one."
        raise FileError(
            f"{run}: there is no {what} here: the names of a run are as seen from the folder that it was started in"
            f"{way}"
        )


def _looked_for(kind: str, name: str) -> tuple[str, tuple[str, ...]]:
    """What a name of a run means, in words, and the files or folders that may be it; none if it is no such name."""
    library, colon, _ = name.partition(":")
    if kind.endswith("model"):
        own = colon and library != "timm" and library not in models.NETS
        top = library.partition(".")[0]
        return f"module {top}", (f"{top}.py", top) if own and top else ()
    if kind == "data" and name in DATA:
        return "folder 'data'", () if name == "digits" else ("data",)
    if kind == "teacher" and name in (GIVEN, UNPRUNED):
        return "", ()
    return f"{'data' if kind == 'data' else 'file'} {name!r}", (name,) if name and not Path(name).is_absolute() else ()


def _is_here(kind: str, files: tuple[str, ...]) -> bool:
    if not kind.endswith("model"):
        return any(Path(name).exists() for name in files)
    with contextlib.suppress(ValueError):  # of a module that is half imported
        return importlib.util.find_spec(files[-1]) is not None
    return True


# options that are no settings of a run: they may be given with --resume
_ANYTIME = ("ctx", "resume", "out", "workers", "seeds", "dry_run", "quiet", "as_json", "debug")
_RENEWED = ("corrupt",)  # settings of a run that may be others from here on


def make_plan(ctx: typer.Context, command: str, options: Mapping[str, Any]) -> Plan:
    """What was asked for: by options, by a recipe that options may change, or by the run that goes on."""
    typed = {name for name in options if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE")}
    given = typed.difference(_ANYTIME)
    read_kinds(options["track"] or ())  # a wrong name is refused before anything is written
    if options["resume"]:
        return _resumed(command, options, given)
    recipe = find(options["recipe"]) if options.get("recipe") else None
    if recipe and "model" not in given:
        options = dict(options) | {"model": recipe.job.model, "model_args": list(recipe.job.model_args)}
    for name in ("model", "data"):
        if not options[name]:
            raise DmcpError(f"--{name} is missing: dmcp {command} --help says what it can be.")
    if "retrain" in options:
        options = dict(options) | {"retrain": _retrain(options, recipe)}
        _check_teacher(command, options)
    job = _asked_job(options, given, recipe)
    engine = Engine(**{name: options[name] for name in Engine.__dataclass_fields__ if name in options})
    with _about("Search"):
        search = _search_config(options, given, recipe) if command != "train" else None
    with _about("Training"):
        train = _asked_recipe(options, given, recipe) if command != "search" else None
    return Plan(
        command=command,
        job=job,
        engine=engine,
        search=search,
        train=train,
        retrain=options.get("retrain") or _retrain(options, recipe),
        baselines=options.get("baselines", False),
        widths=options.get("widths", ""),
        every_steps=options["save_steps"],
        every_minutes=options["save_minutes"],
        options={name: value for name, value in options.items() if name not in _ANYTIME},
    )


def run_folder(plan: Plan, out: str, resume: str) -> Path:
    """The folder of a run: of the one that goes on, as asked for, or a new one with a name that says what it is."""
    return Path(resume or out or free_folder(slug(f"{plan.job.model} {Path(plan.job.data).name} {plan.command}")))


@contextlib.contextmanager
def _about(part: str) -> Iterator[None]:
    """Say which of the two settings of one name is meant, such as the epochs."""
    try:
        yield
    except TrainingError as error:
        raise TrainingError(f"{part}: {error}") from None


def _resumed(command: str, options: Mapping[str, Any], given: set[str]) -> Plan:
    """The plan of an old run, which options must not contradict."""
    folder = Path(options["resume"])
    _, plan = read_plan(folder)
    if plan.command != command:
        raise DmcpError(
            f"{folder} is a run of dmcp {plan.command}: go on with dmcp {plan.command} --resume "
            f"{shlex.quote(str(folder))}"
        )
    changed = [
        f"--{name.replace('_', '-')} was {_typed(plan.options.get(name))}, is {_typed(options[name])}"
        for name in sorted(given.difference(_RENEWED))
        if plan.options.get(name) != options[name]
    ]
    if changed:
        raise DmcpError(f"{folder} goes on with the settings it began with, leave these out: {'; '.join(changed)}.")
    check_names(folder, plan.job, "model", "data", "weights", "teacher", "teacher_model")
    if options["workers"] is not None:  # how files are read changes no result
        plan = replace(plan, job=replace(plan.job, workers=options["workers"]))
    if "corrupt" in given:
        plan = replace(plan, job=replace(plan.job, corrupt=options["corrupt"]))
    return plan


def _typed(value: Any) -> str:
    """A value in quotes or digits, as a person would type it."""
    return repr(str(value) if isinstance(value, str) else value)  # str: of an Enum the word alone


def _asked_job(options: Mapping[str, Any], given: set[str], recipe: Recipe | None) -> Job:
    known = {name: value for name, value in options.items() if name in Job.__dataclass_fields__ and value is not None}
    known |= {name: tuple(options.get(name) or ()) for name in ("model_args", "teacher_model_args", "ignore")}
    if recipe is not None:
        own = {"batch": recipe.job.batch, "train_batch": recipe.train_batch}
        known |= {name: value for name, value in own.items() if name not in given}
    return Job(**known)


def _search_config(options: Mapping[str, Any], given: set[str], recipe: Recipe | None) -> SearchConfig:
    """A network that has its weights already needs no warm-up, but its channels in order."""
    ready = bool(options["weights"])
    warmup = options["warmup"] if options["warmup"] is not None else 0.0 if ready else 0.5
    lr = options["search_lr"]
    wanted = {name: options[name] for name in ("budget", "groups", "align", "weight_decay", "label_smoothing", "seed")}
    wanted |= {name: read_bound(name, options[name] or ()) for name in BOUNDS}
    wanted |= {"epochs": options["search_epochs"], "warmup": warmup, "sort": ready, "lr": lr, "min_lr": lr / 10}
    if recipe is None:
        return SearchConfig(**wanted)
    names = {"search_epochs": ("epochs",), "search_lr": ("lr", "min_lr"), "weights": ("warmup", "sort")}
    changed = {field for name in given for field in names.get(name, (name,))} | {"seed"}
    return replace(recipe.search, **{name: value for name, value in wanted.items() if name in changed})


def _asked_recipe(options: Mapping[str, Any], given: set[str], recipe: Recipe | None) -> TrainConfig:
    usual = recipe.train if recipe else default_recipe(options["retrain"])
    epochs = usual.epochs if options["epochs"] is None else options["epochs"]
    lr = usual.lr if options["lr"] is None else options["lr"]
    asked = {name: options[name] for name in ("weight_decay", "label_smoothing") if recipe is None or name in given}
    asked |= {name: options[name] for name in ("kd_weight", "kd_temperature") if options[name] is not None}
    first = lr * usual.warmup_lr / usual.lr
    return replace(usual, epochs=epochs, **asked, seed=options["seed"], lr=lr, warmup_lr=first)


def _retrain(options: Mapping[str, Any], recipe: Recipe | None) -> Retrain:
    """What was asked for; a network that has its weights already is not to lose them, unless a recipe says so."""
    if options.get("retrain"):
        return Retrain(options["retrain"])
    if recipe:
        return recipe.retrain
    if options.get("weights") and "retrain" in options:
        return Retrain.FINETUNE
    return Retrain.SCRATCH


def _check_teacher(command: str, options: Mapping[str, Any]) -> None:
    """Refuse options about a teacher where nobody would learn from one."""
    kind, named = options["retrain"], options["teacher"]
    if named and kind is Retrain.SLIMMABLE:
        raise DmcpError(f"--teacher: --retrain {kind} has its own teacher, the unpruned network: leave it out.")
    if named == UNPRUNED and command == "train" and not options["widths"]:
        raise DmcpError("--teacher unpruned: that is the network that is trained: add --widths.")
    if named == GIVEN and not options["weights"]:
        raise DmcpError(
            "--teacher given: that is the network of --weights, and there is none: add --weights FILE, or name a file "
            "of the teacher's weights."
        )
    _check_teacher_model(named, options["teacher_model"], options["teacher_model_args"] or ())
    typed = [f"--{name.replace('_', '-')}" for name in ("kd_weight", "kd_temperature") if options[name] is not None]
    if typed and not named:
        raise DmcpError(f"{typed[0]} needs a teacher: add --teacher FILE, or --teacher unpruned, which trains one.")


def _check_teacher_model(teacher: str, name: str, arguments: Sequence[str]) -> None:
    """Refuse a network for a teacher that has no weights, and arguments that are for none or no arguments."""
    if name and teacher in ("", GIVEN, UNPRUNED):
        raise DmcpError("--teacher-model: it must be trained already: add --teacher FILE, the file of its weights.")
    if arguments and not name:
        raise DmcpError(
            "--teacher-model-args: they are for the builder of another network: name it with --teacher-model."
        )
    for text in arguments:
        argument(text, "--teacher-model-args")
