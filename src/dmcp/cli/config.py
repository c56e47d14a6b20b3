"""From the options that were typed to the settings of a run. Imports no torch, so that mistakes are told at once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from dmcp import defaults
from dmcp.budgets import budget_of_kind, choose_middle, limits_latency
from dmcp.errors import BudgetError, DmcpError, FileError, TrainingError
from dmcp.fields import COMMANDS, RUNS, Bound, Setting, describe, setting
from dmcp.models import is_harmless
from dmcp.runs.config import RunConfig, find_recipe
from dmcp.runs.files import SETTINGS, is_run, read_json
from dmcp.runtime.io import from_plain, quote
from dmcp.settings import AUTO, UNPRUNED, Retrain, SearchConfig, check_within

GIVEN = "given"  # the teacher that is the network of --weights


# what was typed


@dataclass(frozen=True, kw_only=True)
class Request:
    """A command line: the settings that were typed, and how the command is to be run."""

    command: str = setting(option=None)
    typed: Mapping[str, Any] = setting(option=None)  # settings by the names of their options
    out: str = setting("", "Folder of the run. Default: a new one in runs/.")
    resume: str = setting("", "Folder of an interrupted run to resume, with its original settings.", commands=RUNS)
    seeds: int = setting(
        1, "Number of seeds, starting at --seed, to run in parallel; their mean is printed.", 1, commands=("prune",)
    )
    dry_run: bool = setting(
        False,
        "Show reachable budgets, chosen settings, time and memory of a run, without training or writing anything.",
        commands=("prune", "compare"),
    )
    no_train: bool = setting(
        False,
        "Skip the final training: only calibrate BatchNorms and test.",
        group="Training",
        commands=("prune",),
    )
    quiet: bool = setting(False, "Print only the result, no progress.")
    as_json: bool = setting(False, "Print JSON instead of text.", option="json")
    more: Mapping[str, Any] = setting({}, option=None)  # options of dmcp compare, by the names of `ComparisonOptions`


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """Options of dmcp compare that are no settings of a run; they replace those of the same name."""

    budget: tuple[str, ...] = setting(
        (),
        "Limit on the cost of each pruned network: 50% of the MACs, 211M (MACs), params:2M, memory:256kB or "
        "traffic:50%. Repeat the option to compare at several budgets.",
        shown="50%",
    )
    methods: str = setting("all", "Methods, separated by commas: names or package.module:NAME, or all.")
    set: tuple[str, ...] = setting((), "Setting of one method, like dmcp.epochs=40; repeatable.")
    seeds: int = setting(3, "Number of seeds, starting at --seed.", 1)
    epochs: int = setting(60, "Number of epochs of the final training.", 1)
    finetune_epochs: int | None = setting(None, "Number of fine-tuning epochs. Default: two thirds of --epochs.", 0)
    scratch: bool = setting(True, "Also train each method's widths from scratch, with the same recipe.")
    unpruned: bool = setting(True, "Also train the unpruned network.")
    holdout: float = setting(0.1, "Fraction of the training images held out for choosing widths.")
    gather: str = setting("", "Rebuild the table of this folder without running anything.")
    at_once: int | None = setting(None, "Number of parallel runs. Default: 8 on a GPU, else the number of cores.", 1)


# which option sets which fields


@dataclass(frozen=True)
class Option:
    """An option of the command line, and the fields that it sets."""

    name: str
    setting: Setting  # of the first of its fields, which says type, help and default
    group: str
    commands: frozenset[str]
    fields: tuple[tuple[str, str], ...]  # (section of RunConfig, field); the section "" is RunConfig itself


def options_of(
    kind: Any, section: str = "", group: str = "Run", commands: Iterable[str] = COMMANDS
) -> dict[str, Option]:
    """The options that a settings class makes from its fields; fields with the same option are set together."""
    options: dict[str, Option] = {}
    for each in describe(kind):
        its_group = each.group or group
        its_commands = frozenset(each.commands or commands)
        if is_dataclass(each.type):
            made = options_of(each.type, each.name, its_group, its_commands)
        elif each.option is None:
            made = {}
        else:
            name = each.option or each.name
            made = {name: Option(name, each, its_group, its_commands, ((section, each.name),))}
        for name, option in made.items():
            earlier = options.get(name, option)
            both = dict.fromkeys((*earlier.fields, *option.fields))
            options[name] = replace(earlier, commands=earlier.commands | option.commands, fields=tuple(both))
    return options


SETTINGS_OPTIONS = options_of(RunConfig)


def option_word(name: str) -> str:
    """search_lr as it is typed: --search-lr."""
    return f"--{name.replace('_', '-')}"


def with_options(config: RunConfig, typed: Mapping[str, Any]) -> RunConfig:
    """The settings with these options set; each option sets all its fields."""
    changes: dict[str, dict[str, Any]] = {"": {}}
    for name, value in typed.items():
        option = SETTINGS_OPTIONS[name]
        if name == "budget":
            several = isinstance(value, list) and len(value) > 1
            changes[""]["budgets"] = tuple(value) if several else ()
        for section, field_name in option.fields:
            changes.setdefault(section, {})[field_name] = _read_value(option, value)

    config = replace(config, **changes.pop(""))
    for section, values in changes.items():
        earlier = getattr(config, section)
        if earlier is None:
            continue
        try:
            config = replace(config, **{section: replace(earlier, **values)})
        except TrainingError as error:  # which of two is meant, such as the epochs of search and training
            raise TrainingError(f"{section}: {error}") from None
    return config


def _read_value(option: Option, value: Any) -> Any:
    """Convert what was typed to the type of the field."""
    if option.setting.type == Bound:
        return read_bound(option.name, value)
    if option.name == "budget" and isinstance(value, list):
        return choose_middle(value)
    if option.name == "teacher" and value == "none":
        return ""
    if isinstance(value, list):
        return tuple(value)
    return value


def read_bound(option: str, texts: Iterable[str]) -> Bound:
    """Read bounds such as 8 and layer1=12 in the form that the settings of a search have."""
    numbers: dict[str, int] = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        if not number.isdecimal():
            word = option_word(option)
            raise DmcpError(f"{word} {text}: write {word} 8, or {word} layer1=8 for a module or space.")
        numbers[name] = int(number)
    if numbers.keys() == {""}:
        return numbers[""]
    return numbers


# the settings of a run


def make_config(request: Request) -> RunConfig:
    """Make the settings of a run from options, from a recipe that options change, or from the run that is resumed."""
    typed = dict(request.typed)
    if "within" in typed and "budget" in typed:
        typed["budget"] = [budget_of_kind(", ".join(typed["budget"]))]
    if request.resume:
        return _resumed(replace(request, typed=typed))
    if request.command == "compare":
        _check_compared(request.more["budget"] or ())
    if request.no_train:
        typed["retrain"] = Retrain.NONE
    config = with_options(_defaults(request.command, typed), typed)
    for name in ("model", "data"):
        if not getattr(config, name):
            raise DmcpError(f"--{name} is missing: see dmcp {request.command} --help.")
    if config.within is not None and not config.weights:
        raise DmcpError("--within compares with a trained network: give its --weights, which dmcp train writes.")
    if config.within is not None:
        check_within(config.retrain, config.teacher)
    if config.teacher == GIVEN and not config.weights:
        raise DmcpError("--teacher given means the network of --weights, but --weights is missing.")
    if config.teacher_model and config.teacher in ("", AUTO, GIVEN, UNPRUNED):
        raise DmcpError("--teacher-model needs a weights file: name it with --teacher.")
    return config


def _check_compared(budgets: Iterable[str]) -> None:
    """Refuse budgets of milliseconds: the runs of a comparison share the machine, and would disturb each other's."""
    for budget in budgets:
        if limits_latency(budget):
            raise BudgetError(
                f"dmcp compare cannot measure the latency that --budget {budget} limits, since its runs share the "
                f"machine. Type dmcp prune --budget {budget} --baselines for uniform widths at the same measured "
                "latency, and add --method l2 (or another method) for that one."
            )


def _defaults(command: str, typed: Mapping[str, Any]) -> RunConfig:
    """The settings before options are set; network and data are not known yet, see `settle`."""
    if typed.get("recipe"):
        return _of_recipe(command, typed)
    retrain = Retrain.FINETUNE
    if command == "search":
        retrain = Retrain.NONE
    if command == "train" and not typed.get("weights"):
        retrain = Retrain.SCRATCH
    if typed.get("retrain"):
        retrain = Retrain(typed["retrain"])
    learns = command == "prune" and retrain in (Retrain.FINETUNE, Retrain.SCRATCH)
    return RunConfig(
        command=command,
        retrain=retrain,
        teacher=AUTO if learns else "",
        search=None if command == "train" else SearchConfig(budget="50%"),
    )


def _of_recipe(command: str, typed: Mapping[str, Any]) -> RunConfig:
    """The settings of a recipe."""
    config = replace(find_recipe(typed["recipe"]), command=command)
    if "model" in typed:
        config = replace(config, model_args=())
    if command == "search":
        config = replace(config, retrain=Retrain.NONE)
    return config


def settle(
    config: RunConfig, typed: Mapping[str, Any], images: int, macs: int, trained: bool, normed: bool = True
) -> tuple[RunConfig, dict[str, str]]:
    """Choose the settings that nobody typed for the network and its data; and say why, by option.

    Those that a recipe leaves out are not chosen: a recipe is the same for all networks and data. But a trained network
    needs no warm-up, and its channels are sorted by their importance.
    normed: whether the network has BatchNorms.
    """
    if config.recipe:
        search = config.search
        if search is not None and trained and "warmup" not in typed:
            search = replace(search, warmup=0.0)
        if search is not None and trained and "sort" not in typed:
            search = replace(search, sort=True)
        if search is not None:
            search = defaults.resolve_search(search)
        return replace(config, search=search, train=defaults.resolve_training(config.train)), {}

    batch, why_batch = defaults.default_batch(images, macs)
    batch = typed.get("batch", batch)
    chosen = defaults.resolve(
        config.search or SearchConfig(budget="50%"),
        config.train,
        config.retrain,
        trained=trained,
        images=images,
        batch=batch,
        train_batch=typed.get("train_batch"),
        suits_sgd=normed,
    )
    searches = config.search is not None and config.method == "dmcp"
    reasons = {}
    for name, reason in {"batch": f"{batch}: {why_batch}", **chosen.reasons}.items():
        sections = {section for section, _ in SETTINGS_OPTIONS[name].fields}
        used = name == "batch" or (searches and "search" in sections)
        used |= config.retrain is not Retrain.NONE and "train" in sections
        if used and name not in typed:
            reasons[name] = reason

    config = replace(config, batch=batch, train=chosen.train)
    if config.search is not None:
        config = replace(config, search=chosen.search)
    if searches and "search_images" not in typed:
        config = replace(config, search_images=chosen.search_images)
    return config, reasons


# the settings of a run that is there already


def read_config(run: Path) -> tuple[dict[str, Any], RunConfig]:
    """All that the settings of a run say, and its tree; FileError where they are not of this version."""
    if not is_run(run):
        raise FileError(f"{run} is not a run. dmcp runs FOLDER lists the runs in a folder.")
    stored = read_json(run / SETTINGS)
    try:
        tree = {each.name: stored[each.name] for each in fields(RunConfig)}
        return stored, from_plain(RunConfig, tree)
    except (KeyError, TypeError, ValueError, OverflowError, DmcpError) as error:
        raise FileError(
            f"{run}: its settings are not of this version of dmcp ({quote(error)}): start a new run."
        ) from None


def _resumed(request: Request) -> RunConfig:
    """The settings of an old run, which options must not contradict."""
    folder = Path(request.resume)
    _, config = read_config(folder)
    nothing_typed = dict.fromkeys(("model", "teacher_model", "method", "track"), "")
    check_typed(folder, config, nothing_typed | dict(request.typed))
    if config.command != request.command:
        raise DmcpError(f"{folder} is a run of dmcp {config.command}: resume it with that command.")
    changed = []
    for name, value in sorted(request.typed.items()):
        if not SETTINGS_OPTIONS[name].setting.fixed:
            config = with_options(config, {name: value})
        elif with_options(config, {name: value}) != config:
            changed.append(option_word(name))
    if changed:
        raise DmcpError(f"{folder} resumes with its original settings: leave out {', '.join(changed)}.")
    return config


def needs_typing(config: RunConfig) -> dict[str, str]:
    """The settings that run other code than a library's, or use the network, as they are typed, by option."""
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
    needs = needs_typing(config)
    for option in needs.keys() & typed.keys():
        value = typed[option]
        if isinstance(value, str):
            text = value
        else:
            text = ",".join(value)
        if text != needs[option]:
            arguments = getattr(config, f"{option}_args", ())
            words = quote(" ".join((needs[option], *arguments)))
            raise FileError(
                f"{run}: its settings run code or use the network ({words}): "
                f"if you trust them, add {option_word(option)} {quote(needs[option])}."
            )
