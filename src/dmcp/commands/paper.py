"""The command that does the paper's experiments: cells that are not done are run, then table, figure and data made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dmcp.commands import options as o
from dmcp.commands.compare import check_job, recipe
from dmcp.commands.printing import print_json
from dmcp.comparison.cell_files import TIME, is_done
from dmcp.comparison.cell_runs import check_begun, check_facts, check_failed, run_tasks, state_of
from dmcp.comparison.comparing import Comparison, Task
from dmcp.engine import Engine
from dmcp.errors import DmcpError, FileError
from dmcp.methods.dmcp import DmcpConfig
from dmcp.paper.arms import BUDGETS, Study
from dmcp.paper.experiments import ALL, NAMES, WIDER, check_experiment
from dmcp.paper.findings import difference, protocol, show, write
from dmcp.paper.outcomes import Recorded
from dmcp.paper.own_experiments import ENDS, EXPLAIN
from dmcp.paper.page import make_page
from dmcp.paper.records import check_recordable, is_recordable, lent, lost_from, read_copied, read_recorded, unrecorded
from dmcp.paper.tasks import needed_by, study_tasks
from dmcp.running.jobs import Job, open_job
from dmcp.running.sessions import say, tell_ignored, tell_notices
from dmcp.runs import Run, read_json
from dmcp.searching.searches import SearchConfig
from dmcp.tables import counted, table

_MODEL = "cifar:resnet20"
_USUAL = DmcpConfig().epochs  # of a search; cells with as many are those of dmcp compare
_RATE = SearchConfig.alpha_lr  # of its alphas; the same
Names = Annotated[list[str] | None, typer.Argument(metavar="NAME...", help=f"Some of {NAMES}.")]
Budgets = Annotated[list[str] | None, typer.Option("--budget", help=f"Of main; repeatable. Default: {BUDGETS}.")]
SeedCount = Annotated[int, typer.Option(min=1, help="Seeds of everything, from --seed on.")]
TrainEpochs = Annotated[int, typer.Option(min=1, help="Passes over the data in the final training.")]
FirstEpochs = Annotated[int, typer.Option(min=2, help="Passes over the data in a search.")]
AlphaLr = Annotated[float, typer.Option(help="First learning rate of the alphas in a search; the last is a fifth.")]
TrainLr = Annotated[float, typer.Option(help="Highest learning rate of the final training at a batch of 2048.")]
Wider = Annotated[
    list[str] | None,
    typer.Option(help=f"Argument for 1.5 times the width, in {' and '.join(WIDER)}. Default: width=24."),
]
Out = Annotated[str, typer.Option(help="Folder of the cells, which experiments share.")]
Results = Annotated[str, typer.Option(help="Folder of tables, figures and data.")]
Page = Annotated[Path | None, typer.Option(help="Then gather all of --results in this Markdown page.")]
AtOnce = Annotated[int | None, typer.Option(min=1, help="Cells that run side by side; default: 8 on a GPU, the cores.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Run nothing: list the cells, and what is done.")]
Reuse = Annotated[
    bool,
    typer.Option("--recorded", help="Cells that the data in --results have, and --out has not, are not run again."),
]
Gather = Annotated[bool, typer.Option("--gather", help="Run nothing: tables and figures of the cells that are done.")]


def paper(
    names: Names = None,
    data: o.Data = "",
    model: o.Model = _MODEL,
    seeds: SeedCount = 3,
    seed: o.Seed = 0,
    budget: Budgets = None,
    epochs: TrainEpochs = 60,
    search_epochs: FirstEpochs = _USUAL,
    alpha_lr: AlphaLr = _RATE,
    batch: o.Batch = 512,
    lr: TrainLr = 1.6,
    weight_decay: o.WeightDecay = 5e-4,
    label_smoothing: o.LabelSmoothing = 0.1,
    model_args: o.ModelArgs = None,
    wider: Wider = None,
    out: Out = "runs/paper",
    results: Results = "results",
    page: Page = None,
    at_once: AtOnce = None,
    device: o.Device = "",
    precision: o.Numbers = None,
    compile: o.Compile = None,
    graphs: o.Graphs = None,
    kernels: o.Kernels = None,
    pad: o.Pad = None,
    deterministic: o.Deterministic = False,
    dry_run: DryRun = False,
    gather: Gather = False,
    recorded: Reuse = False,
    quiet: o.Quiet = False,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Do the paper's experiments again: run the cells that are not done, then write table, figure and data.

    Experiments share cells, such as the usual search at half of the MACs, if they share --out; so do cells of `dmcp
    compare` with the same settings. The same command started again goes on where it was; where --out is gone,
    --recorded goes on from the data in --results. Without a NAME, --page only gathers what is there.

    \b
    Examples:
      dmcp paper main --data cifar10
      dmcp paper warmup sandwich scheme --data cifar10 --dry-run
      dmcp paper main --data cifar10 --gather
      dmcp paper explain --data cifar10 --recorded
      dmcp paper --page docs/results.md
      dmcp paper all --model digits:resnet --data digits --epochs 1 --search-epochs 2 --batch 64 --seeds 1
    """
    if not o.is_first():
        return
    if page and page.is_dir():
        raise FileError(f"--page: {page} is a folder: name the file in it, like {page / 'results.md'}.")
    if not names:
        _gather(Path(results), page, dry_run, as_json)
        return
    if not data:
        raise DmcpError("--data is missing: dmcp paper --help says what it can be.")
    wanted = [*dict.fromkeys(one for name in names for one in (ALL if name == "all" else [name]))]
    for name in wanted:
        check_experiment(name)
    if recorded:
        check_recordable(wanted)
    it = Comparison(
        job=Job(model=model, model_args=tuple(model_args or ()), data=data, batch=batch, device=device),
        engine=Engine(
            precision=precision, compile=compile, graphs=graphs, kernels=kernels, pad=pad, deterministic=deterministic
        ),
        train=recipe(epochs, lr, weight_decay, label_smoothing),
        budgets=tuple(budget or BUDGETS),
        methods=("uniform", "random", "dmcp"),
        seeds=tuple(range(seed, seed + seeds)),
        settings=_search_settings(search_epochs, alpha_lr),
        fine_tune_epochs=epochs // 3,  # none of ours does; as in the comparison whose cells these may be
    )
    folder = Path(out)
    study = _open(it, tuple(wider or ["width=24"]), wanted, folder, tells=not gather)
    tasks = study_tasks(study, wanted)
    check_replaced(study, wanted, Path(results))
    known = {name: read_recorded(study, name, Path(results)) for name in wanted} if recorded else {}
    copied = read_copied(study, [*known], Path(results))
    if recorded:
        tasks = unrecorded(study, wanted, known, folder, copied)
    given = lent(study, tasks, copied)
    taken = sorted({*given, *(cell for own in known.values() for cell in own)} - {task.name for task in tasks})
    if dry_run:
        _list(tasks, needed_by(study, wanted), folder, as_json, taken if recorded else None, results)
        return
    if gather:
        check_begun(tasks, folder)
        if not any(is_done(folder / task.name) for task in tasks) and not any(known.values()):
            more = f", and none is recorded in {results}" if recorded else ""
            raise FileError(f"{folder}: no cells of {', '.join(wanted)} with these settings are done here{more}.")
    else:
        tell_ignored(it.engine, it.job.place)
        if taken and not quiet:
            say(f"{counted(len(taken), 'cell')} taken from the data in {results}, not run again.")
    failed = [] if gather else run_tasks(tasks, folder, it.job.place, at_once, quiet, given)
    fuller = _show(study, wanted, folder, Path(results), page, as_json, known)
    check_failed(failed)
    if fuller:
        way = ", or --recorded to keep its cells" if not recorded and all(map(is_recordable, fuller)) else ""
        raise FileError(f"{'; '.join(fuller.values())}: left as it is. Give another --results{way}.")


def _search_settings(epochs: int, alpha_lr: float) -> dict[str, dict[str, Any]]:
    """Settings of DMCP; what is as usual is left out, since cells are told apart by their settings."""
    own: dict[str, Any] = {} if epochs == _USUAL else {"epochs": epochs}
    own |= {} if alpha_lr == _RATE else {"more": {"alpha_lr": alpha_lr, "alpha_min_lr": alpha_lr / 5}}
    return {"dmcp": own} if own else {}


def _open(it: Comparison, wider: tuple[str, ...], names: Sequence[str], folder: Path, tells: bool) -> Study:
    """The study, with what its cells would refuse refused now; tells: whether what may not be known is said."""
    opened = wide = open_job(replace(it.job, device="cpu"))
    check_job(it, opened)
    check_facts(it.job, folder, opened)
    if EXPLAIN in names:
        check_job(replace(it, budgets=ENDS), opened)
    if {*WIDER} & {*names}:
        wide = open_job(replace(it.job, device="cpu", model_args=(*it.job.model_args, *wider)))
        if wide.graph.macs() <= opened.graph.macs():
            raise DmcpError(f"--wider: with {', '.join(wider)} the network is not wider than without.")
    if tells:
        tell_notices(opened, wide)
    return Study(common=it, graph=opened.graph, wider=wider)


def check_replaced(it: Study, names: Sequence[str], place: Path) -> None:
    """Refuse to write over the results of another protocol, or of seeds and budgets that are not asked for."""
    for name in names:
        path = place / f"{_stem(it, name)}.json"
        if not path.exists():
            continue
        stored, mine = read_json(path), protocol(it, name)
        _check_table(stored, path)
        for part in (part for part in mine if part in stored):  # what is not there was not kept
            if changed := difference(part, stored[part], mine[part]):
                raise FileError(f"{path} was made with another {changed}: give another --results.")
        gone = [seed for seed in stored.get("seeds", ()) if seed not in it.common.seeds]
        if gone:
            raise FileError(f"{path} has seed {gone[0]}, which this command has not: give another --results.")
        if lost := _lost_budgets(it, stored):
            more = " ".join(f"--budget {budget}" for budget in lost)
            raise FileError(
                f"{path} has rows at {', '.join(lost)}, which this command has not and would lose: add {more}, or give "
                "another --results."
            )


def _check_table(stored: Mapping[str, Any], path: Path) -> None:
    """Refuse to write over what is not as `write` writes it."""
    seeds, rows = stored.get("seeds", []), stored.get("rows", [])
    plain = isinstance(seeds, list) and isinstance(rows, list)
    if not plain or not all(isinstance(row, dict) and isinstance(row.get("budget", ""), str) for row in rows):
        raise FileError(f"{path}: not as dmcp paper writes it (seeds or rows): remove it, or give another --results.")


def _lost_budgets(it: Study, stored: Mapping[str, Any]) -> list[str]:
    """Budgets of the rows that are there, without those of this command; only the rows of main have some."""
    there = dict.fromkeys(row.get("budget") for row in stored.get("rows", ()))
    return [budget for budget in there if budget and budget not in it.common.budgets]


def _stem(it: Study, name: str) -> str:
    """How the files of an experiment are called; those of other networks by their names."""
    model = it.common.job.model
    return name if model == _MODEL else f"{name}-{model.replace(':', '-').replace('/', '-')}"


@dataclass(frozen=True)
class Progress:
    """How far a cell is."""

    name: str
    state: str  # done, begun, missing, or begun with other settings
    seconds: float | None  # that it took, or that it may take; None: nothing like it is done


def progress(tasks: Sequence[Task], folder: Path) -> list[Progress]:
    """How far the cells are; those that are not done may take as long as others of their kind did."""
    took: dict[str, list[float]] = {}
    for task in tasks:
        if is_done(folder / task.name) and (folder / task.name / TIME).exists():
            took.setdefault(_kind(task), []).append(float(read_json(folder / task.name / TIME)["seconds"]))
    found: list[Progress] = []
    for task in tasks:
        state, alike = state_of(task, folder), took.get(_kind(task))
        seconds = sum(alike) / len(alike) if alike else None
        if state == "done":
            path = folder / task.name / TIME
            seconds = float(read_json(path)["seconds"]) if path.exists() else None
        found.append(Progress(task.name, state, seconds))
    return found


def _kind(task: Task) -> str:
    """What cells that take about as long have in common."""
    cell, train = task.plan.cell, task.plan.train
    assert cell is not None and train is not None
    more = cell.settings.get("epochs"), dict(cell.settings.get("more", {})).get("train_weights", True)
    alike = (cell.method, cell.prepares, cell.own, bool(cell.teacher), train.epochs, task.plan.job.model_args)
    return repr((*alike, *more))


def _list(
    tasks: Sequence[Task],
    needed: Mapping[str, Sequence[str]],
    folder: Path,
    as_json: bool,
    taken: Sequence[str] | None,
    place: str,
) -> None:
    """The cells, who needs them, how far they are, and how long they take; what would be refused is refused.

    taken: cells that are recorded in `place`, and not listed; None: they were not asked for.
    """
    cells = progress(tasks, folder)
    left = [cell for cell in cells if cell.state != "done"]
    known = [cell.seconds for cell in left if cell.seconds is not None]
    if as_json:
        rows = [vars(cell) | {"needed_by": needed[cell.name]} for cell in cells]
        more = {} if taken is None else {"recorded": taken}
        print_json({"folder": str(folder), "cells": rows, "seconds_left": sum(known), **more})
    else:
        shown = [
            (
                cell.name,
                cell.state,
                "" if cell.seconds is None else f"{cell.seconds:,.0f}",
                ", ".join(needed[cell.name]),
            )
            for cell in cells
        ]
        print(table([("cell", "state", "seconds", "needed by"), *shown]))
        print(f"{len(cells) - len(left)} of {len(cells)} cells are done in {folder}.")
        if taken is not None:
            print(f"Recorded in {place}, and so not listed: {len(taken)}.")
        print("".join(f"{sentence}\n" for sentence in _forecast(len(left), known)), end="")
    check_begun(tasks, folder)


def _forecast(left: int, known: Sequence[float]) -> list[str]:
    """How long the cells that are left take."""
    unknown, sentences = left - len(known), []
    if known:
        sentences.append(
            f"{len(known)} of those left should take {sum(known):,.0f} s one after the other, as like ones did."
        )
    if unknown:
        sentences.append(f"How long {unknown} of those left take is not known: none like them is done.")
    return sentences


def _gather(place: Path, page: Path | None, dry_run: bool, as_json: bool) -> None:
    """The page alone."""
    if not page or dry_run:
        raise DmcpError(f"Name an experiment: some of {NAMES}; or only give --page a file.")
    _write_page(place, page)
    if as_json:
        print_json({"files": [str(page)]})
    else:
        print(page)


def _write_page(place: Path, page: Path) -> None:
    text = make_page(place, page)
    page.parent.mkdir(parents=True, exist_ok=True)
    Run(page.parent).write(page.name, text)


def _show(
    study: Study,
    names: Sequence[str],
    folder: Path,
    place: Path,
    page: Path | None,
    as_json: bool,
    known: Mapping[str, Recorded],
) -> dict[str, str]:
    """Tables on stdout; tables, figures and data into the folder of results.

    What is there and has more cells is not replaced: words for each such experiment.
    """
    files, fuller = list[str](), dict[str, str]()
    for name in names:
        if shown := show(study, name, folder, known.get(name)):
            stem = _stem(study, name)
            if lost := lost_from(place / f"{stem}.json", study, name, shown, folder, known.get(name)):
                more = f" and {len(lost) - 1} more" if lost[1:] else ""
                fuller[name] = f"{place / stem}.json has {lost[0]}{more}, which {folder} has not"
            else:
                files += map(str, write(study, name, shown, folder, place, stem, known.get(name)))
            if not as_json:
                print(f"{name}\n\n{shown.text}")
    if page and files:  # where all cells have failed there may be nothing to gather
        _write_page(place, page)
        files.append(str(page))
    if as_json:
        print_json({"folder": str(folder), "files": files})
    else:
        print("".join(f"{file}\n" for file in files), end="")
    return fuller
