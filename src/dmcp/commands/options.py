"""Options that several commands share, as typer reads them, and the plan that they stand for."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dmcp import cifar_nets, nets
from dmcp.data import NAMES as DATA
from dmcp.engine import Engine, Precision
from dmcp.errors import DmcpError, FileError, TrainingError
from dmcp.reports.trackers import read_kinds
from dmcp.retraining import Retrain, default_recipe
from dmcp.running.jobs import GIVEN, Corrupt, Job
from dmcp.running.plans import Plan, plan_from_json
from dmcp.running.recipes import Recipe
from dmcp.running.recipes import find as find_recipe
from dmcp.running.recipes import names as recipe_names
from dmcp.runs import SETTINGS, read_json
from dmcp.searching.bounds import BOUNDS, Bound
from dmcp.searching.searches import SearchConfig
from dmcp.training import TrainConfig

_CHANNELS = re.compile("0*[1-9][0-9]{0,8}")  # no layer has more
_MOST_SEED = 2**62  # and room for those that follow it
# options that are no settings of a run: they may be given with --resume
_ANYTIME = ("ctx", "resume", "out", "workers", "seeds", "dry_run", "quiet", "as_json", "debug")
_RENEWED = ("corrupt",)  # settings of a run that may be others from here on


def _complete_model(incomplete: str) -> list[str]:
    with contextlib.suppress(DmcpError):  # no timm, no names of it
        return _starting(incomplete, nets.names(timm=incomplete.startswith("timm:")))
    return []


def _check_seed(seed: int) -> int:
    if abs(seed) > _MOST_SEED:
        raise DmcpError(f"--seed: {seed} is too large; choose one up to {_MOST_SEED}.")
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
LatencyDevice = Annotated[str, typer.Option(help="Where it is timed: cpu or cuda; default: --device.")]
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


# from options to settings


def make_plan(ctx: typer.Context, command: str, options: Mapping[str, Any]) -> Plan:
    """What was asked for: by options, by a recipe that options may change, or by the run that goes on."""
    typed = {name for name in options if str(ctx.get_parameter_source(name)).endswith("COMMANDLINE")}
    given = typed.difference(_ANYTIME)
    read_kinds(options["track"] or ())  # a wrong name is refused before anything is written
    if options["resume"]:
        return _resumed(command, options, given)
    recipe = find_recipe(options["recipe"]) if options.get("recipe") else None
    if recipe and "model" not in given:
        options = dict(options) | {"model": recipe.job.model, "model_args": list(recipe.job.model_args)}
    for name in ("model", "data"):
        if not options[name]:
            raise DmcpError(f"--{name} is missing: dmcp {command} --help says what it can be.")
    if "retrain" in options:
        options = dict(options) | {"retrain": _retrain(options, recipe)}
        _check_teacher(command, options)
    job = _job(options, given, recipe)
    engine = Engine(**{name: options[name] for name in Engine.__dataclass_fields__ if name in options})
    with _about("Search"):
        search = _search_config(options, given, recipe) if command != "train" else None
    with _about("Training"):
        train = _recipe(options, given, recipe) if command != "search" else None
    return Plan(
        command=command,
        job=job,
        engine=engine,
        search=search,
        train=train,
        retrain=options.get("retrain") or _retrain(options, recipe),
        controls=options.get("controls", False),
        widths=options.get("widths", ""),
        every_steps=options["save_steps"],
        every_minutes=options["save_minutes"],
        options={name: value for name, value in options.items() if name not in _ANYTIME},
    )


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


def _job(options: Mapping[str, Any], given: set[str], recipe: Recipe | None) -> Job:
    known = {name: value for name, value in options.items() if name in Job.__dataclass_fields__ and value is not None}
    known |= {name: tuple(options[name] or ()) for name in ("model_args", "frozen")}
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


def _recipe(options: Mapping[str, Any], given: set[str], recipe: Recipe | None) -> TrainConfig:
    usual = recipe.train if recipe else default_recipe(options["retrain"])
    epochs = usual.epochs if options["epochs"] is None else options["epochs"]
    lr = usual.lr if options["lr"] is None else options["lr"]
    asked = {name: options[name] for name in ("weight_decay", "label_smoothing") if recipe is None or name in given}
    asked |= {name: options[name] for name in ("teacher_share", "teacher_temperature") if options[name] is not None}
    first = lr * usual.warmup_lr / usual.lr
    return replace(usual, epochs=epochs, **asked, seed=options["seed"], lr=lr, warmup_lr=first)


def _retrain(options: Mapping[str, Any], recipe: Recipe | None) -> Retrain:
    """What was asked for; a network that has its weights already is not to lose them, unless a recipe says so."""
    if options.get("retrain"):
        return Retrain(options["retrain"])
    if recipe:
        return recipe.retrain
    if options.get("weights") and "retrain" in options:
        return Retrain.INHERIT
    return Retrain.TEACHER if options.get("teacher") else Retrain.SCRATCH


def _check_teacher(command: str, options: Mapping[str, Any]) -> None:
    """Refuse options about a teacher where nobody would learn from one."""
    kind, named = options["retrain"], options["teacher"]
    if named and kind not in (Retrain.TEACHER, Retrain.INHERIT):
        raise DmcpError(
            f"--teacher: --retrain {kind} has no use for it: take --retrain teacher for weights that are drawn anew, "
            "or inherit for those of the search."
        )
    if named == GIVEN and not options["weights"]:
        raise DmcpError(
            "--teacher given: that is the network of --weights, and there is none: add --weights FILE, or name a file "
            "of the teacher's weights."
        )
    if options["teacher_model"] and named in ("", GIVEN):
        raise DmcpError("--teacher-model: it must be trained already: add --teacher FILE, the file of its weights.")
    typed = [
        f"--{name.replace('_', '-')}" for name in ("teacher_share", "teacher_temperature") if options[name] is not None
    ]
    if named or not typed:
        return
    if kind is not Retrain.TEACHER:
        raise DmcpError(
            f"{typed[0]}: a network with --retrain {kind} learns from no teacher: add --retrain teacher, which trains "
            "one, or name one with --teacher."
        )
    if command == "train" and not options["widths"]:
        raise DmcpError(
            f"{typed[0]}: the unpruned network is its own teacher: add --widths, or name one with --teacher."
        )


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
        own = colon and library != "timm" and library not in cifar_nets.NETS
        top = library.partition(".")[0]
        return f"module {top}", (f"{top}.py", top) if own and top else ()
    if kind == "data" and name in DATA:
        return "folder 'data'", () if name == "digits" else ("data",)
    if kind == "teacher" and name == GIVEN:
        return "", ()
    return f"{'data' if kind == 'data' else 'file'} {name!r}", (name,) if name and not Path(name).is_absolute() else ()


def _is_here(kind: str, files: tuple[str, ...]) -> bool:
    if not kind.endswith("model"):
        return any(Path(name).exists() for name in files)
    with contextlib.suppress(ValueError):  # of a module that is half imported
        return importlib.util.find_spec(files[-1]) is not None
    return True
