"""All settings of a run as one tree, the options of the command line made from it, and the paper's recipes.

Imports no torch, so that help, completion and typing mistakes are answered at once.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dmcp import settings
from dmcp.budgets import choose_middle
from dmcp.errors import DmcpError, FileError, TrainingError
from dmcp.settings import AUTO, Bound, Corrupt, Engine, Init, Retrain, RuntimeKind, SearchConfig, TrainConfig, setting

GIVEN = "given"  # the teacher that is the network of --weights


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """All settings of a run: settings.json is this tree, the options of the command line are its fields."""

    command: str = "prune"
    recipe: str = setting("", "Settings by name, like imagenet_mobilenet_v2_211m; other options change them.")
    model: str = setting("", "resnet18, timm:NAME, cifar:NAME, digits:resnet, package.module:factory.")
    model_args: tuple[str, ...] = setting((), "Argument of its builder, like width_mult=1.5; repeatable.")
    weights: str = setting("", "File to start from, .safetensors or .pth; a last layer for other classes starts fresh.")
    data: str = setting("", "digits, cifar10, cifar100, a folder of shards, or one with train/ and val/.")
    input: str = setting("", "Shape of one sample, like 3x224x224; default: the data's or the model's.")
    ignore: tuple[str, ...] = setting((), "Module or space that is not pruned; repeatable.")
    inexact: bool = setting(False, "Prune through LayerNorm and GroupNorm too, where gates only approximate.")
    holdout: float = setting(0.0, "Share of the training images that only the alphas see.", -1e300)
    search_images: int = setting(0, "Images in each pass of the search, instead of all.", 0)
    batch: int = setting(128, "Images in a batch, over all processes; learning rates are scaled with it.")
    train_batch: int = setting(0, "Images in a batch of the retraining; default: as in the search.")
    workers: int | None = setting(None, "Threads that read image files; default: as many as there are cores.", 1, 1024)
    corrupt: Corrupt = setting(Corrupt.STOP, "Image files that cannot be read: stop, or skip them and say which.")
    device: str = setting("", "cpu or cuda; default: a GPU if there is one.")
    seed: int = setting(0, "Of everything random.", 0, settings.MAX_SEED)
    latency: str = setting("", "For budgets of latency: file of dmcp latency; default: measured before the search.")
    latency_batch: int = setting(1, "Samples in a pass that is timed.", 1)
    latency_device: str = setting("", "Where it is timed: cpu or cuda; default: --device, or the CPU for onnx.")
    latency_runtime: RuntimeKind = setting(RuntimeKind.TORCH, "In what it is timed.")
    retrain: Retrain = setting(Retrain.SCRATCH, "How the pruned network gets its weights.")
    method: str = setting("dmcp", "How widths are chosen: dmcp searches; l1, l2, uniform, ... (see compare) only cut.")
    budgets: tuple[str, ...] = ()  # several: one search, at search.budget, and a network for each
    baselines: bool = setting(False, "Also train the unpruned network and uniform widths.")
    widths: str = setting("", "File of widths, of a run or of dmcp sample; default: unpruned.")
    teacher: str = setting("", "Whom to learn from: given (--weights), unpruned (trained first), a file, none, auto.")
    teacher_model: str = setting("", "Network of the teacher's weights, named like --model, if it is another one.")
    teacher_model_args: tuple[str, ...] = setting((), "Argument of the builder of --teacher-model; repeatable.")
    search: SearchConfig | None = None
    train: TrainConfig = TrainConfig()
    engine: Engine = Engine()
    save_steps: int = setting(1000, "Steps between two checkpoints.", 1)
    save_minutes: float = setting(5.0, "Minutes between two checkpoints, if that is sooner.", 0)
    track: tuple[str, ...] = setting((), "Also send the curves to tensorboard or wandb; repeatable.")

    def __post_init__(self) -> None:
        settings.check(self, DmcpError)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


_PARTS: dict[str, Any] = {"": RunConfig, "train": TrainConfig, "search": SearchConfig, "engine": Engine}


def read_config(run: Path) -> tuple[dict[str, Any], RunConfig]:
    """All that the settings of a run say, and its tree; FileError where they are not of this version."""
    from dmcp.runs.files import SETTINGS, is_run, read_json  # imports torch
    from dmcp.runtime.io import from_plain, quote

    if not is_run(run):
        raise FileError(f"{run}: there is no such run: dmcp runs FOLDER lists those in a folder.")
    stored = read_json(run / SETTINGS)
    try:
        return stored, from_plain(RunConfig, {it.name: stored[it.name] for it in fields(RunConfig)})
    except (KeyError, TypeError, ValueError, OverflowError, DmcpError) as error:
        raise FileError(f"{run}: its settings are not of this version ({quote(error)}): start anew.") from None


def needs_typing(config: RunConfig) -> dict[str, str]:
    """The settings that run other code than a library's, or use the network, as they are typed, by option."""
    from dmcp.models import is_harmless  # imports torch

    needs = {}
    if not is_harmless(config.model, config.model_args):
        needs["model"] = config.model
    if config.teacher_model and not is_harmless(config.teacher_model, config.teacher_model_args):
        needs["teacher_model"] = config.teacher_model
    if ":" in config.method:
        needs["method"] = config.method
    if "wandb" in ",".join(config.track).lower():
        needs["track"] = ",".join(config.track)
    return needs


def check_typed(run: Path, config: RunConfig, typed: Mapping[str, Any]) -> None:
    """Refuse settings of a run that run code or use the network, unless each option of `typed` repeats them.

    Whoever made the run has written its settings; a person trusts only what this person types.
    """
    from dmcp.runtime.io import quote  # imports torch

    needs = needs_typing(config)
    for option in needs.keys() & typed.keys():
        value = typed[option]
        if (value if isinstance(value, str) else ",".join(value)) != needs[option]:
            arguments = getattr(config, f"{option}_args", ())
            setting = quote(" ".join((needs[option], *arguments)))
            raise FileError(
                f"{run}: its settings run code or use the network ({setting}): "
                f"if you trust them, add {option_word(option)} {quote(needs[option])}."
            )


# recipes

_MOBILE = {"model": "mobilenet_v2", "model_args": ("width_mult=1.5", "dropout=0")}
_PAPER = (  # table 6: network, MACs, how it is trained; its top-1 accuracy in %
    (_MOBILE, "300M", Retrain.SCRATCH),  # 73.5
    (_MOBILE, "211M", Retrain.SCRATCH),  # 72.2
    (_MOBILE, "97M", Retrain.SCRATCH),  # 67.0
    (_MOBILE, "87M", Retrain.SCRATCH),  # 66.1
    (_MOBILE, "59M", Retrain.SCRATCH),  # 62.7
    (_MOBILE, "43M", Retrain.SCRATCH),  # 59.1
    (_MOBILE, "300M", Retrain.SLIMMABLE),  # 74.6
    (_MOBILE, "211M", Retrain.SLIMMABLE),  # 73.5
    ({"model": "resnet18"}, "1.04G", Retrain.SCRATCH),  # 69.2
    ({"model": "resnet50"}, "2.8G", Retrain.SCRATCH),  # 76.7
    ({"model": "resnet50"}, "2.2G", Retrain.SCRATCH),  # 76.2
    ({"model": "resnet50"}, "1.1G", Retrain.SCRATCH),  # 74.4
    ({"model": "resnet50"}, "278M", Retrain.SCRATCH),  # 66.4
)


def _recipe(net: Mapping[str, Any], macs: str, retrain: Retrain) -> RunConfig:
    """One row by section 4.1, the decay by the authors' code; the defaults of all else are the paper's."""
    mobile, count = net is _MOBILE, round(float(macs[:-1]) * {"M": 1, "G": 1000}[macs[-1]])
    decay = 4e-5 if mobile else 1e-4
    return RunConfig(
        recipe=f"imagenet_{net['model']}_{count}m" + "_slimmable" * (retrain is Retrain.SLIMMABLE),
        batch=1024,
        train_batch=2048,
        retrain=retrain,
        search=SearchConfig(budget=macs, groups=15 if mobile else 10, align=1, weight_decay=decay, init=Init.ZERO),
        train=TrainConfig(epochs=250 if mobile else 100, weight_decay=decay),
        **net,
    )


RECIPES = {it.recipe: it for it in (_recipe(*row) for row in _PAPER)} | {
    "paper": RunConfig(
        recipe="paper",
        search=SearchConfig(budget="50%", **settings.PAPER["search"]),
        train=TrainConfig(**settings.PAPER["train"]),
    )
}


def find_recipe(name: str) -> RunConfig:
    """The settings of this name; DmcpError with the nearest one if there are none."""
    if name not in RECIPES:
        near = difflib.get_close_matches(name, RECIPES, n=1, cutoff=0.0)[0]
        raise DmcpError(f"There is no recipe {name!r}: did you mean {near}?")
    return RECIPES[name]


# from options to settings


@dataclass(frozen=True, kw_only=True)
class Request:
    """A command line: the settings that were typed, and what else is wanted."""

    command: str
    typed: Mapping[str, Any]  # option -> value
    out: str = setting("", "Folder of the run; default: a new one in runs/.")
    resume: str = setting("", "Go on with this run, which was interrupted, as it was begun.")
    seeds: int = setting(1, "So many runs side by side, with seeds from --seed on, and their mean.")
    dry_run: bool = setting(False, "Train nothing: spaces, reachable range, chosen settings, time and memory.")
    no_train: bool = setting(False, "Stop at the cut networks with calibrated BatchNorms, and test them.")
    quiet: bool = setting(False, "No progress, only the result.")
    as_json: bool = setting(False, "Print plain data instead of text.")
    more: Mapping[str, Any] = field(default_factory=dict)  # options of compare that are no settings


def make_config(request: Request) -> RunConfig:
    """What was asked for: by options, by a recipe that options change, or by the run that goes on."""
    if request.resume:
        return _resumed(request)
    typed = {**request.typed, "retrain": Retrain.NONE} if request.no_train else request.typed
    config = _apply(_defaults(request.command, typed), typed)
    for name in ("model", "data"):
        if not getattr(config, name):
            raise DmcpError(f"--{name} is missing: dmcp {request.command} --help says what it can be.")
    if config.teacher == GIVEN and not config.weights:
        raise DmcpError("--teacher given is the network of --weights, which are missing: give them.")
    if config.teacher_model and config.teacher in ("", AUTO, GIVEN, settings.UNPRUNED):
        raise DmcpError("--teacher-model needs a file of its weights: name it with --teacher.")
    return config


def settle(
    config: RunConfig, typed: Mapping[str, Any], images: int, macs: int, trained: bool
) -> tuple[RunConfig, dict[str, str]]:
    """The settings that nobody typed, for so many training images and this network; and the reasons, by option."""
    if config.recipe:
        return config, {}
    batch, reason = settings.default_batch(images, macs)
    batch = typed.get("batch", batch)
    steps = typed.get("epochs", 0) * -(-images // max(1, typed.get("train_batch") or batch))
    usual = settings.defaults("50%", config.retrain, trained=trained, images=images, batch=batch, steps=steps)
    searches, trains = config.search and config.method == "dmcp", config.retrain is not Retrain.NONE
    known = {*typed, *(() if searches else _SEARCHED), *(() if trains else ("epochs", "lr", "weight_decay"))}
    why = {"batch": (batch, reason), **usual.why}
    texts = {name: f"{value}: {reason}" for name, (value, reason) in why.items() if name not in known}
    few = usual.search_images if searches and "search_epochs" not in typed else 0
    search = config.search and usual.search
    return _apply(replace(config, batch=batch, search_images=few, search=search, train=usual.train), typed), texts


def _defaults(command: str, typed: Mapping[str, Any]) -> RunConfig:
    """Settings that nobody typed; a trained network needs no warm-up, but its channels in order, and is fine-tuned."""
    trained = bool(typed.get("weights"))
    if typed.get("recipe"):
        config = replace(find_recipe(typed["recipe"]), command=command)
        if "model" in typed:
            config = replace(config, model_args=())
        if trained and config.search:
            config = replace(config, search=replace(config.search, warmup=0.0, sort=True))
        return replace(config, retrain=Retrain.NONE) if command == "search" else config
    usual = {"search": Retrain.NONE, "train": Retrain.FINETUNE if trained else Retrain.SCRATCH}
    retrain = Retrain(typed.get("retrain") or usual.get(command, Retrain.FINETUNE))
    return RunConfig(
        command=command,
        retrain=retrain,
        teacher=AUTO if command == "prune" and retrain in (Retrain.FINETUNE, Retrain.SCRATCH) else "",
        search=settings.default_search("50%", trained) if command != "train" else None,
        train=settings.default_training(retrain, trained),
    )


def _apply(config: RunConfig, typed: Mapping[str, Any]) -> RunConfig:
    """The settings with these options set."""
    changes: dict[str, dict[str, Any]] = {}
    for name, value in typed.items():
        if name in ("min_channels", "max_channels"):
            value = read_bound(name, value)
        elif name == "teacher" and value == "none":
            value = ""
        elif name == "budget" and isinstance(value, list):
            changes.setdefault("", {})["budgets"] = tuple(value) if len(value) > 1 else ()
            value = choose_middle(value)
        for part, place in _places(name):
            changes.setdefault(part, {})[place] = tuple(value) if isinstance(value, list) else value
    if "search_lr" in typed:
        changes["search"]["min_lr"] = typed["search_lr"] / 10
    if "lr" in typed:
        changes["train"]["warmup_lr"] = typed["lr"] * config.train.warmup_lr / config.train.lr
    config = replace(config, **changes.pop("", {}))
    for part, values in changes.items():
        if (node := getattr(config, part)) is not None:
            try:
                config = replace(config, **{part: replace(node, **values)})
            except TrainingError as error:  # names the one of two that is meant, such as the epochs
                raise TrainingError(f"{part}: {error}") from None
    return config


def _places(name: str) -> tuple[tuple[str, str], ...]:
    """Where an option is in the tree: (part, field); the part is empty for a field of RunConfig."""
    if name in ("search_epochs", "search_lr"):
        return (("search", name.removeprefix("search_")),)
    if name in ("weight_decay", "label_smoothing"):
        return (("search", name), ("train", name))
    if name == "seed":
        return (("", name), ("search", name), ("train", name))
    found = [(part, name) for part, kind in _PARTS.items() if name in kind.__dataclass_fields__]
    return tuple(found[:1]) or (("request", name),)


_RENEWABLE = ("workers", "corrupt")  # how files are read may change while a run goes on


def _resumed(request: Request) -> RunConfig:
    """The settings of an old run, which options must not contradict."""
    folder = Path(request.resume)
    _, config = read_config(folder)
    nothing_typed = dict.fromkeys(("model", "teacher_model", "method", "track"), "")
    check_typed(folder, config, nothing_typed | dict(request.typed))
    if config.command != request.command:
        raise DmcpError(f"{folder} is a run of dmcp {config.command}: go on with that command.")
    renewed = {name: value for name, value in request.typed.items() if name in _RENEWABLE}
    others = request.typed.keys() - renewed.keys()
    if changed := [name for name in sorted(others) if _apply(config, {name: request.typed[name]}) != config]:
        words = ", ".join(map(option_word, changed))
        raise DmcpError(f"{folder} goes on with the settings it began with: leave {words} out.")
    return _apply(config, renewed)


def read_bound(option: str, texts: Iterable[str]) -> Bound:
    """8 and layer1=12 as the settings of a search have them."""
    word, numbers = option.replace("_", "-"), dict[str, int]()
    for text in texts:
        name, _, number = text.rpartition("=")
        if not number.isdecimal():
            raise DmcpError(f"--{word} {text}: write --{word} 8, or --{word} layer1=8 for a module or space.")
        numbers[name] = int(number)
    return numbers[""] if numbers.keys() == {""} else numbers


# the options, made from the tree


def complete_model(incomplete: str) -> list[str]:
    """Names of networks; the libraries that have them are imported for it."""
    from dmcp import models

    with contextlib.suppress(DmcpError):  # no timm, no names of it
        return [it for it in models.names(timm=incomplete.startswith("timm:")) if it.startswith(incomplete)]
    return []


_ENGINE = tuple(Engine.__dataclass_fields__)
_GROUPS = {
    "Model and data": ("model", "model_args", "weights", "data", "input", "ignore", "recipe", "seed"),
    "Budget": ("budget", "min_channels", "max_channels", "align", "groups"),
    "Latency": ("latency", "latency_batch", "latency_device", "latency_runtime"),
    "Search": ("method", "search_epochs", "search_images", "warmup", "search_lr", "holdout"),
    "Training": (
        *("retrain", "no_train", "widths", "epochs", "lr", "weight_decay", "label_smoothing", "baselines", "teacher"),
        *("teacher_model", "teacher_model_args", "kd_weight", "kd_temperature"),
    ),
    "Batches and device": ("batch", "train_batch", "workers", "corrupt", "device", *_ENGINE),
    "Run": ("out", "resume", "seeds", "save_steps", "save_minutes", "track", "dry_run", "quiet", "as_json"),
}
_SEARCH_ONLY = {*_GROUPS["Latency"], *_GROUPS["Search"], "recipe"}
_SEARCHED = ("search_epochs", "search_lr", "warmup")  # chosen settings that only our search needs
_WITHOUT = {
    "prune": {"widths"},
    "search": {*_GROUPS["Training"], "method", "train_batch", "seeds", "dry_run"} - {"weight_decay", "label_smoothing"},
    "train": {*_SEARCH_ONLY, *_GROUPS["Budget"], "no_train", "baselines", "train_batch", "seeds", "dry_run"},
    "compare": {
        *(*_SEARCH_ONLY, *_GROUPS["Training"], "weights", "train_batch", "workers", "corrupt", "channels_last", "tf32"),
        *("sync_batchnorm", "resume", "save_steps", "save_minutes", "track"),
    }
    - {"lr", "weight_decay", "label_smoothing"},
}
_CHOSEN = ("epochs", "lr", "search_epochs", "search_images", "search_lr", "warmup", "batch", "weight_decay")
_DEFAULTS = dict.fromkeys(_CHOSEN, "what suits network and data: see prune --dry-run, or settings.json of the run") | {
    "retrain": "finetune; of train without --weights: scratch",
    "teacher": "auto of prune, else none",
    "budget": "50%",
}
_TYPES: Mapping[str, Any] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "tuple[str, ...]": list[str],
    "Bound": list[str],
    "int | float | str | Budget": list[str],
}
_COMPARE: dict[str, tuple[Any, Any, str]] = {  # options of compare that are no settings: type, default, help
    "budget": (list[str] | None, None, "50%, 211M, params:2M; repeatable. Default: 50%."),
    "methods": (str, "all", "all, names of methods, package.module:NAME, with commas."),
    "set": (list[str] | None, None, "Setting of a method, like dmcp.epochs=40; repeatable."),
    "seeds": (int, 3, "Seeds of everything, from --seed on. Default: 3."),
    "epochs": (int, 60, "Passes over the data in the final training. Default: 60."),
    "finetune_epochs": (int | None, None, "Epochs of fine-tuning. Default: two thirds of --epochs."),
    "scratch": (bool | None, None, "Train what each method chose from scratch, by the same recipe. Default: yes."),
    "unpruned": (bool | None, None, "Also train the unpruned network. Default: yes."),
    "holdout": (float, 0.1, "Share of the training images that methods choose by. Default: 0.1."),
    "gather": (str, "", "Run nothing: make the table of this folder again."),
    "at_once": (int | None, None, "Runs side by side. Default: 8 on a GPU, else the cores."),
}


def option_word(name: str) -> str:
    return "--json" if name == "as_json" else f"--{name.replace('_', '-')}"


def _option(name: str, group: str, others: Mapping[str, tuple[Any, Any, str]]) -> inspect.Parameter:
    """An option of a command: a setting of the tree, None unless it is typed, a field of Request, or another."""
    words: dict[str, Any] = {"rich_help_panel": group, "show_default": False}
    words["min"] = {"seeds": 1, "at_once": 1, "finetune_epochs": 0}.get(name)
    if name in others:
        kind, default, words["help"] = others[name]
        usual = default
    else:
        part, place = _places(name)[0]
        it = (_PARTS | {"request": Request})[part].__dataclass_fields__[place]
        written, usual = str(it.type).removesuffix(" | None"), it.default
        default = usual if part == "request" else None
        kind = (_TYPES.get(written) or getattr(settings, written)) | None
        shown = isinstance(usual, str | int | float) and usual not in ("", 0)  # False is 0
        told = _DEFAULTS.get(name) or (str(usual) if shown else "")
        words["help"] = it.metadata["help"] + (f" Default: {told}." if told else "")
        if written == "Bound":
            words["metavar"] = "[NAME=]N"
        if name in ("model", "teacher_model"):
            words["autocompletion"] = complete_model
        if name == "recipe":
            words["autocompletion"] = lambda incomplete: [it for it in RECIPES if it.startswith(incomplete)]
    both = kind == bool | None and usual is not False  # --name and --no-name
    hint: Any = Annotated[kind, typer.Option(*(() if both else (option_word(name),)), **words)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)


def takes_settings(run: Callable[[Request], None]) -> Callable[..., None]:
    """A command that takes all the options of its name, and gets them as a Request."""
    command = run.__name__
    own = _COMPARE if command == "compare" else {}

    def typed(**values: Any) -> None:
        others = {name: values.pop(name) for name in [*values] if name in Request.__dataclass_fields__}
        more = {name: values.pop(name) for name in own if name in values}
        wanted = {name: value for name, value in values.items() if value not in (None, [])}
        run(Request(command=command, typed=wanted, more=more, **others))

    listed = {name: group for group, names in _GROUPS.items() for name in names if name not in _WITHOUT[command]}
    groups = listed | dict.fromkeys(own, "Comparison")
    parameters = [_option(name, group, own) for name, group in groups.items()]
    typed.__name__, typed.__doc__ = command, run.__doc__
    typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    typed.__annotations__ = {it.name: it.annotation for it in parameters}
    return typed
