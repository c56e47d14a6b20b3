"""The files of a cell: what it keeps in its folder, when it is done, and what it reads from the folders of others."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor, nn

from dmcp.errors import FileError
from dmcp.files import parse_tensors, read_bytes
from dmcp.keeping import DONE, State
from dmcp.methods.problem import Choice
from dmcp.running.plans import Cell
from dmcp.running.sessions import Session
from dmcp.runs import CHECKPOINTS, PREPARED, Run, read_json
from dmcp.saving import WEIGHTS, WIDTHS, load
from dmcp.spaces import Widths
from dmcp.tracing.graph import Kept

# what choosing took; the widths and channels that were chosen; weights that came with them
COST, CHOICE, CHOSEN = "cost.json", "choice.json", "choice.safetensors"
# seconds at work in all; seconds of what COST will be about, where it was stopped in it
TIME, SPENT = "time.json", "spent.json"
CODE = "code.json"  # which code of a method that is somebody's own has chosen, or prepared
_CHOSEN = "choice"  # the stage that ends with a choice
_MOST = 2**34  # bytes of a prepared network


def is_done(folder: Path) -> bool:
    """Whether nothing is left to do in the folder of a cell."""
    if (folder / CHECKPOINTS).exists() or not (folder / COST).exists():
        return False
    return any((folder / name).exists() for name in (WIDTHS, PREPARED))


def code_that_made(folder: Path) -> str:
    """Which code of a method that is somebody's own has made what is in the folder of a cell; empty if nothing has.

    Checkpoints are such a thing, too: a cell that was stopped goes on from them. What failed before is made anew.
    """
    made = any((folder / name).exists() for name in (COST, CHECKPOINTS)) and (folder / CODE).exists()
    return str(read_json(folder / CODE).get("code", "")) if made else ""


def keep_choice(here: Session, choice: Choice, seconds: float) -> None:
    """Write what was chosen and what it took, and then that it is written."""
    if choice.model is not None:
        write_tensors(here.run, CHOSEN, choice.model.state_dict())
    kept = {name: it if isinstance(it, int) else torch.as_tensor(it).tolist() for name, it in choice.kept.items()}
    widths = choice.widths.to_json()
    here.run.write(CHOICE, {"widths": widths, "kept": kept, "has_model": choice.model is not None})
    write_cost(here.run, seconds, choice.sample_passes)
    nothing = State({}, dict, [], [], [], here.plan.job.place)
    here.keep(_CHOSEN).save(1, nothing, {DONE: True}, here.ranks)  # from here on it is done, and the log stays


def read_choice(here: Session) -> Choice | None:
    """What this cell has chosen before; None if it was not all written."""
    if here.keep(_CHOSEN).load(here.ranks) is None:
        return None
    stored = read_json(here.run.folder / CHOICE)
    kept: dict[str, Kept] = dict(stored["kept"])
    model: nn.Module | None = None
    if stored["has_model"]:
        model = copy.deepcopy(here.opened.model)
        model.load_state_dict(read_tensors(here.run.folder / CHOSEN))
    return Choice(widths=here.opened.graph.widths(Widths.from_json(stored["widths"])), kept=kept, model=model)


def write_cost(run: Run, seconds: float, passes: int) -> None:
    """Write what choosing took, or all the work of a cell that does not choose."""
    run.write(COST, {"seconds": seconds, "sample_passes": passes})


def write_tensors(run: Run, name: str, state: Mapping[str, Tensor]) -> None:
    """Write tensors from any device."""
    plain = {key: tensor.detach().cpu().contiguous().clone() for key, tensor in state.items()}
    run.write_bytes(name, safetensors.torch.save(plain))


def read_tensors(path: Path) -> dict[str, Tensor]:
    """What `write_tensors` has written, read with care."""
    return parse_tensors(read_bytes(path, _MOST), path)


# what other cells have left


def used_folder(here: Session, cell: Cell) -> Path:
    """The folder of the cell that this one starts from."""
    return here.run.folder.parent / cell.uses


def load_network(here: Session, name: str) -> nn.Module:
    """The network of another cell, which this one starts from."""
    folder = here.run.folder.parent / name
    check_there(folder / WEIGHTS)
    return load(folder, here.opened.fresh)


def check_there(path: Path) -> None:
    """FileError where a file of another cell is missing, which this one starts from."""
    if not path.exists():
        again = "start the dmcp compare that this cell is of again."
        raise FileError(f"{path}: the network that this cell starts from is not there: {again}")
