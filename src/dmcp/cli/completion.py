"""What a shell offers when Tab is pressed. Imports no torch, so that it answers at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from dmcp import models
from dmcp.runs.config import RECIPES
from dmcp.runs.files import is_run

_RUNS = "runs/"  # where new runs are


def complete_model(incomplete: str) -> list[str]:
    """Names of networks; those of timm once `timm:` is typed, since there are more than a thousand."""
    names = models.names(timm=incomplete.startswith("timm:"))
    return [name for name in names if name.startswith(incomplete)]


def complete_run(incomplete: str) -> list[str]:
    """Runs in the folder that is typed, or in runs/."""
    typed_folder, slash, start = incomplete.rpartition("/")
    if not slash and _RUNS.startswith(incomplete):
        typed_folder, slash, start = _RUNS.removesuffix("/"), "/", ""
    folder = Path(typed_folder + slash).expanduser()
    runs = []
    with contextlib.suppress(OSError, RuntimeError):  # there is no such folder, or no such user
        runs = [path.name for path in folder.iterdir() if path.name.startswith(start) and is_run(path)]
    return [f"{typed_folder}{slash}{name}" for name in sorted(runs)]


def complete_recipe(incomplete: str) -> list[str]:
    """Names of recipes."""
    return [name for name in RECIPES if name.startswith(incomplete)]


COMPLETIONS: dict[str, Callable[[str], list[str]]] = {  # by option
    "model": complete_model,
    "teacher_model": complete_model,
    "recipe": complete_recipe,
    "resume": complete_run,
}
