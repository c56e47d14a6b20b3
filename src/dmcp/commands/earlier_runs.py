"""Runs that are there already: their plans, and whether the names in these mean anything here."""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path
from typing import Any

from dmcp import cifar_nets
from dmcp.data import NAMES as DATA
from dmcp.errors import FileError
from dmcp.running.jobs import GIVEN, Job
from dmcp.running.plans import Plan, plan_from_json
from dmcp.runs import SETTINGS, read_json


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
