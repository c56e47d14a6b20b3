"""Several seeds of one command side by side on one machine, and what their results have in common."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from dmcp.errors import DmcpError, FileError
from dmcp.files import plain
from dmcp.latency import Outcome
from dmcp.locks import Lock
from dmcp.reports.listing import PastRun, is_run, read_run
from dmcp.running.children import COMMAND, Command, Ended, kept_signals, run_side_by_side
from dmcp.runs import Run, read_json
from dmcp.tables import between, spread, table

SEEDS, SUMMARY, SUMMARY_TABLE = "seeds.json", "summary.json", "summary.md"


def run_seeds(
    argv: Sequence[str], seeds: Sequence[int], folder: Path, device: torch.device, quiet: bool = False
) -> list[Path]:
    """Run a dmcp command once per seed into FOLDER/seed-K, side by side, and write a summary; their run folders.

    argv: the command and its options, without --seed, --out and --quiet. Started again with the same ones, it leaves
    finished seeds as they are and goes on with others. What they print is kept: FOLDER/seed-K.out, FOLDER/seed-K.err.
    """
    if not seeds or len({*seeds}) < len(seeds):
        raise DmcpError(f"Give at least one seed, and each only once, not {list(seeds)}.")
    _make(folder)
    runs = {seed: folder / f"seed-{seed}" for seed in seeds}
    with kept_signals() as signals, Lock(folder):
        _claim(folder, argv)
        commands = [_command(argv, seed, run) for seed, run in runs.items() if not _is_done(run)]
        ended = run_side_by_side(commands, folder, device, signals, at_once=len(seeds), quiet=quiet, noun="seeds")
        if not signals:
            _check(ended, runs)
            summary = summarise(list(runs.values()))
            Run(folder).write(SUMMARY, asdict(summary))
            Run(folder).write(SUMMARY_TABLE, markdown(summary))
    return list(runs.values())


def words_of_each(argv: Sequence[str]) -> list[str]:
    """The words of a command line that each seed gets, too; what is for all of them together goes with its value."""
    words = iter(argv)
    return [word for word in words if not _drops(word, words)]


def _drops(word: str, rest: Iterator[str]) -> bool:
    """Whether a word of the command line is for all seeds together, not for one; its value goes with it."""
    name, equals, _ = word.partition("=")
    if name in ("--quiet", "--json", "--debug"):
        return True
    if name not in ("--seeds", "--seed", "--out"):
        return False
    if not equals:
        next(rest, None)
    return True


# the folder


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(f"{folder}: no runs can be kept here: {error.strerror or error}.") from error


def _claim(folder: Path, argv: Sequence[str]) -> None:
    """Note the command; runs of another one must not be taken for seeds of this one."""
    refuse_others(folder, argv)
    Run(folder).write(SEEDS, {"argv": list(argv)})


def refuse_others(folder: Path, argv: Sequence[str]) -> None:
    """Refuse a folder that has runs of another command."""
    stored = read_json(folder / SEEDS).get("argv") if (folder / SEEDS).is_file() else None
    taken = is_run(folder) or any(path.is_dir() and any(path.iterdir()) for path in folder.glob("seed-*"))
    if taken and stored != list(argv):
        known = isinstance(stored, list) and bool(stored)
        what = plain(f"`dmcp {shlex.join(map(str, stored or ()))}`") if known else "something else"
        raise FileError(f"{folder} already holds runs of {what}: give another folder, or just that command.")


def _is_done(run: Path) -> bool:
    return is_run(run) and read_run(run).done


def _command(argv: Sequence[str], seed: int, run: Path) -> Command:
    """What starts a seed; what goes on with it, if it has been started before."""
    resume = (argv[0], "--resume", str(run))
    words = resume if is_run(run) else (*argv, "--seed", str(seed), "--out", str(run))
    return Command(run.name, (*COMMAND, *words), title=f"seed {seed}")


def _check(ended: Sequence[Ended], runs: Mapping[int, Path]) -> None:
    """Stop if a child has failed, once all have ended."""
    seeds = {run.name: seed for seed, run in runs.items()}
    failed = [end for end in ended if end.code or not _is_done(runs[seeds[end.command.name]])]
    if failed:
        listed = "; ".join(end.describe() for end in sorted(failed, key=lambda end: seeds[end.command.name]))
        raise DmcpError(f"{len(failed)} of {len(runs)} seeds failed, the same command starts only them again: {listed}")


# the summary


@dataclass(frozen=True, kw_only=True)
class Spread:
    """One network in the final tables of several runs; accuracies and shares from 0 to 1."""

    name: str
    accuracies: tuple[float, ...]  # in the order of the runs that tested it
    mean: float
    deviation: float | None  # standard deviation of the accuracy (ddof = 1); None for one run
    macs: tuple[int, int]  # the least and the most
    macs_share: tuple[float, float] | None  # of the unpruned network; None if a run does not know it
    params: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What several runs of one command have found."""

    runs: tuple[str, ...]
    networks: tuple[Spread, ...]
    latency: tuple[Outcome, ...] = ()  # of each run, where the budget has a limit of it


def summarise(folders: Sequence[Path]) -> Summary:
    """What the runs in these folders have found, network by network."""
    runs = [read_run(folder) for folder in folders]
    names = dict.fromkeys(row.name for run in runs for row in run.rows)
    return Summary(
        runs=tuple(run.name for run in runs),
        networks=tuple(_spread(name, runs) for name in names),
        latency=tuple(run.latency for run in runs if run.latency),
    )


def _spread(name: str, runs: Sequence[PastRun]) -> Spread:
    tested = [(row, run.unpruned("macs")) for run in runs if (row := run.row(name))]
    accuracies, macs, params = zip(*((row.accuracy, row.macs, row.params) for row, _ in tested), strict=True)
    shares = [row.macs / full for row, full in tested if full]
    return Spread(
        name=name,
        accuracies=accuracies,
        mean=statistics.fmean(accuracies),
        deviation=statistics.stdev(accuracies) if len(accuracies) > 1 else None,
        macs=(min(macs), max(macs)),
        macs_share=(min(shares), max(shares)) if len(shares) == len(tested) else None,
        params=(min(params), max(params)),
    )


def markdown(summary: Summary) -> str:
    """The summary as a table that also a terminal shows well: mean accuracy ± standard deviation (runs)."""
    rows = [["network", "MACs", "params", "accuracy in %"]]
    for it in summary.networks:
        share = "" if it.macs_share is None else f" ({between(*(f'{share:.1%}' for share in it.macs_share))})"
        macs, params = (between(f"{least:,}", f"{most:,}") for least, most in (it.macs, it.params))
        rows.append([it.name, f"{macs}{share}", params, spread(it.accuracies)])
    told = (f"- {run}: {it.text}\n" for run, it in zip(summary.runs, summary.latency, strict=False))
    return table(rows) + (f"\n{''.join(told)}" if summary.latency else "")
