"""Options that several commands share, as typer reads them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from dmcp import nets
from dmcp.batches import MOST_SEED
from dmcp.engine import Precision
from dmcp.errors import DmcpError
from dmcp.latency import RuntimeKind
from dmcp.retraining import Retrain
from dmcp.running.jobs import Corrupt
from dmcp.running.recipes import names as recipe_names
from dmcp.searching.bounds import Bound

_CHANNELS = re.compile("0*[1-9][0-9]{0,8}")  # no layer has more


def _complete_model(incomplete: str) -> list[str]:
    with contextlib.suppress(DmcpError):  # no timm, no names of it
        return _starting(incomplete, nets.names(timm=incomplete.startswith("timm:")))
    return []


def _check_seed(seed: int) -> int:
    if abs(seed) > MOST_SEED:
        raise DmcpError(f"--seed: {seed} is too large; choose one up to {MOST_SEED}.")
    return seed


def _complete_recipe(incomplete: str) -> list[str]:
    return _starting(incomplete, recipe_names())


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
Frozen = Annotated[list[str] | None, typer.Option(help="Module or space whose channels stay whole; repeatable.")]
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
Smallest = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[NAME=]N",
        help="Least channels of every space (8), or of a module or space (layer1=12); smaller ones stay whole; "
        "repeatable.",
    ),
]
Largest = Annotated[
    list[str] | None, typer.Option(metavar="[NAME=]N", help="Most channels, said in the same way; repeatable.")
]
Seed = Annotated[int, typer.Option(callback=_check_seed, help="Of everything random.")]
RetrainKind = Annotated[
    Retrain | None,
    typer.Option(
        help="How the pruned network gets its weights; default: inherit with --weights, teacher with --teacher, else "
        "scratch."
    ),
]
Teacher = Annotated[
    str,
    typer.Option(
        help="Trained network to learn from: given (that of --weights), or a file of its weights; default with "
        "--retrain teacher: the unpruned network, trained first."
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
TeacherShare = Annotated[
    float | None, typer.Option(help="Share of the loss that is the teacher's, not the labels'; default: 0.5.")
]
TeacherTemperature = Annotated[
    float | None,
    typer.Option(help="Scores of both are divided by it: the larger, the more wrong classes count; default: 1."),
]
Controls = Annotated[bool, typer.Option("--controls", help="Also train the unpruned network and uniform widths.")]
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
