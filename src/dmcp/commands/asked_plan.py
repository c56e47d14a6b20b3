"""The plan that typed options stand for, by themselves, with a recipe, or with the run that goes on; its folder."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from dmcp.commands.earlier_runs import check_names, read_plan
from dmcp.commands.options import read_bound
from dmcp.engine import Engine
from dmcp.errors import DmcpError, TrainingError
from dmcp.reports.trackers import read_kinds
from dmcp.retraining import Retrain, default_recipe
from dmcp.running.jobs import GIVEN, Job, argument
from dmcp.running.plans import Plan
from dmcp.running.recipes import Recipe
from dmcp.running.recipes import find as find_recipe
from dmcp.runs import free_folder, slug
from dmcp.searching.bounds import BOUNDS
from dmcp.searching.searches import SearchConfig
from dmcp.training import TrainConfig

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


def _job(options: Mapping[str, Any], given: set[str], recipe: Recipe | None) -> Job:
    known = {name: value for name, value in options.items() if name in Job.__dataclass_fields__ and value is not None}
    known |= {name: tuple(options.get(name) or ()) for name in ("model_args", "teacher_model_args", "frozen")}
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
    _check_teacher_model(named, options["teacher_model"], options["teacher_model_args"] or ())
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


def _check_teacher_model(teacher: str, name: str, arguments: Sequence[str]) -> None:
    """Refuse a network for a teacher that has no weights, and arguments that are for none or no arguments."""
    if name and teacher in ("", GIVEN):
        raise DmcpError("--teacher-model: it must be trained already: add --teacher FILE, the file of its weights.")
    if arguments and not name:
        raise DmcpError(
            "--teacher-model-args: they are for the builder of another network: name it with --teacher-model."
        )
    for text in arguments:
        argument(text, "--teacher-model-args")
