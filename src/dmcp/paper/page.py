"""One Markdown page about all experiments in a folder of results: how each was made, on what, and what it found."""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from urllib.parse import quote

from dmcp.budget import MEMORY, known_limits, limits_latency
from dmcp.comparison.gathering import Line
from dmcp.errors import BudgetError, FileError
from dmcp.files import MOST_JSON, read_bytes
from dmcp.paper.claims import tell_claims
from dmcp.paper.evidence import Evidence, read_evidence
from dmcp.paper.experiments import EXPERIMENTS
from dmcp.paper.own_experiments import BORDER, EVEN, HELD_OUT, LONG, RATES
from dmcp.paper.rival_findings import tell_rival
from dmcp.plain_data import from_plain
from dmcp.runs import read_json
from dmcp.tables import between, counted
from dmcp.tracing.graph import ChannelGraph
from dmcp.training import TrainConfig

LEAST, MOST = 0.98, 1.0  # of its target, that the MACs of a row must be
CLAIMS, NOTES = "What holds of the paper's claims", "What we make of it"  # sections
_NOTES = "notes.md"  # in the folder of results; written by hand
_NAMED = 6  # cells that are named if they are missing; the others are counted
_BUDGET = re.compile(r"-([^-]*\d[^-]*)-seed-?\d+$")  # in the name of a cell: dmcp-50%-seed0


# what is read


@dataclass(frozen=True, kw_only=True)
class _PastCell:
    """A cell that is done."""

    label: str  # its row in the table
    name: str  # one cell may be in several rows
    macs: int = 0  # 0: no network came out of it
    seconds: float | None = None  # at work; None: not kept
    device: str = ""


@dataclass(frozen=True, kw_only=True)
class _Finding:
    """What the data of an experiment say."""

    stem: str  # of its files
    experiment: str
    about: str
    model: str
    data: str
    batch: int
    seeds: tuple[int, ...]
    train: TrainConfig
    macs: int  # of the unpruned network
    missing: tuple[str, ...]  # cells that are not done
    cells: tuple[_PastCell, ...]
    lines: tuple[Line, ...] = ()  # of main
    model_args: tuple[str, ...] = ()
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of methods, by name
    command: tuple[str, ...] = ()  # empty: not kept
    search_epochs: int | None = None  # None: not kept
    holdout: float | None = None  # the same
    evidence: Evidence | None = None  # of its cells
    recorded: tuple[str, ...] = ()  # cells that were not in the folders, but in the data of other commands

    @property
    def network(self) -> str:
        return " ".join((self.model, *self.model_args))

    @property
    def title(self) -> str:
        return f"{self.experiment}: {self.network}"

    @property
    def held_out(self) -> bool:
        """Whether its accuracies are not of the test images."""
        return self.experiment in HELD_OUT

    @property
    def once(self) -> list[_PastCell]:
        """The cells, each only once."""
        return [*{cell.name: cell for cell in self.cells}.values()]


def _read(path: Path) -> _Finding | None:
    """The data of an experiment; None for other files."""
    data = read_json(path)
    if str(data.get("experiment")) not in EXPERIMENTS:
        return None
    try:
        lines = [_known(Line, row) for row in data["rows"] if "budget" in row]
        cells = [_known(_PastCell, cell) for cell in data["cells"]]
        found = from_plain(_Finding, _known(_Finding, data | {"stem": path.stem, "lines": lines, "cells": cells}))
        return replace(found, evidence=read_evidence(data, found.network))
    except (KeyError, TypeError, ValueError) as error:
        raise FileError(f"{path}: not as dmcp paper writes it ({error}): remove it, or make it again.") from None


def _known(kind: Any, data: Mapping[str, Any]) -> dict[str, Any]:
    """Those values that a dataclass has a field for."""
    return {it.name: data[it.name] for it in fields(kind) if it.name in data}


# the page


def make_page(place: Path, page: Path) -> str:
    """The page about all experiments of a folder, in their usual order; `page` is where its links start from."""
    every = [found for path in sorted(place.glob("*.json")) if (found := _read(path))]
    if not every:
        raise FileError(f"{place}: there are no experiments here: dmcp paper NAME --results {place} writes them.")
    order = [*EXPERIMENTS]
    every.sort(key=lambda it: (order.index(it.experiment), it.stem))
    alike = Counter(it.title for it in every)
    titles = [it.title if alike[it.title] == 1 else f"{it.title} ({it.stem})" for it in every]
    figures = _figures(place, [it.stem for it in every])
    links = {stem: [_link(path, page) for path in paths] for stem, paths in figures.items()}
    notes = read_bytes(place / _NOTES, MOST_JSON).decode().strip() if (place / _NOTES).exists() else ""
    users = _users(every)
    parts = [_head(every, _link(place, page)), *([f"## {NOTES}\n\n{notes}\n"] if notes else [])]
    parts += [_claims(every, titles), _contents(every, titles)]
    for it, title in zip(every, titles, strict=True):
        own = [cell for cell in it.once if users[_protocol(it), cell.name] == [it.stem]]
        parts.append(_section(it, title, place, links[it.stem], own, _rivals(every, it)))
    return "\n".join(parts)


def _users(every: Sequence[_Finding]) -> dict[tuple[str, str], list[str]]:
    """Who has a cell; where some have run it, those that took it from their data do not count."""
    found: dict[tuple[str, str], list[tuple[bool, str]]] = {}
    for it in every:
        for cell in it.once:
            found.setdefault((_protocol(it), cell.name), []).append((cell.name not in it.recorded, it.stem))
    return {cell: [stem for ran, stem in users if ran] or [stem for _, stem in users] for cell, users in found.items()}


def _link(path: Path, page: Path) -> str:
    return quote(Path(os.path.relpath(path, page.parent)).as_posix())


def _figures(place: Path, stems: Sequence[str]) -> dict[str, list[Path]]:
    """The figures of each experiment: main-cifar-resnet56.svg is not one of main's if the longer name has data."""
    found: dict[str, list[Path]] = {stem: [] for stem in stems}
    for path in sorted(place.glob("*.svg"), key=lambda path: path.stem):
        owners = [stem for stem in stems if f"{path.stem}-".startswith(f"{stem}-")]
        if owners:
            found[max(owners, key=len)].append(path)
    return found


def _head(every: Sequence[_Finding], place: str) -> str:
    """What is the same in many sections: recipe, protocol, how to read the rest."""
    users: dict[str, list[str]] = {}
    cells: dict[tuple[str, str], _PastCell] = {}
    for it in every:
        users.setdefault(_protocol(it), []).append(it.experiment)
        cells |= {(_protocol(it), cell.name): cell for cell in it.once}
    several = len({_protocol(it) for it in every if it.experiment not in LONG}) > 1
    *first, last = (f"`{it}`" for it in LONG)
    apart = (
        f" Each of these protocols, but that of {', '.join(first)} and {last}, needs an `--out` of its own."
        if several
        else ""
    )
    return "\n".join(
        [
            "# The paper's experiments\n",
            f"`dmcp paper --page` makes this page from the files in [{place}]({place}) alone: do not edit it.\n",
            "Values over several seeds are mean ± standard deviation (number of seeds). Experiments on one network",
            "share cells: its own are those that no other with the same protocol has run. One that others start",
            "from is counted where it is in a table itself.\n",
            f"Time at work, each cell counted once: {_time([*cells.values()])}\n",
            *(f"- {protocol} In {', '.join(dict.fromkeys(names))}." for protocol, names in users.items()),
            f"\nCommands name data by the last part of their path.{apart}\n",
        ]
    )


def _protocol(it: _Finding) -> str:
    """The recipe in a sentence or two."""
    train, own = it.train, {name: dict(values) for name, values in it.settings.items() if name != "dmcp"}
    own |= {"dmcp": {key: value for key, value in it.settings.get("dmcp", {}).items() if key != "epochs"}}
    more = [f"{name}.{key}={value}" for name, values in own.items() for key, value in values.items()]
    others = f" Other settings: {', '.join(more)}." if more else ""
    base = f" at a batch of {train.reference_batch:,}" if train.reference_batch else ""
    search = "not kept" if it.search_epochs is None else f"{it.search_epochs} epochs"
    held = "a share that was not kept" if it.holdout is None else f"{it.holdout:.0%}"
    return (
        f"**{it.network}** on {it.data}. Final training, the same for all rows but those that say otherwise: epochs "
        f"{train.epochs}, batch {it.batch:,}, highest learning rate {train.lr:g}{base}, weight decay "
        f"{train.weight_decay:g}, label smoothing {train.label_smoothing:g}. Search of DMCP: {search}. Held out "
        f"until the final training: {held} of the training images.{others}"
    )


def _contents(every: Sequence[_Finding], titles: Sequence[str]) -> str:
    """Links to the sections of the experiments."""
    lines = [f"- {_to(title)}: {it.about}" for it, title in zip(every, titles, strict=True)]
    return "\n".join(["## Contents\n", *lines, ""])


def _to(title: str) -> str:
    """A link to a section, by the name that Markdown gives to its heading."""
    slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
    return f"[{title}](#{slug})"


def _claims(every: Sequence[_Finding], titles: Sequence[str]) -> str:
    """The paper's claims; networks are called as in the titles, which tell those apart that are alike."""
    networks = [title.removeprefix(f"{it.experiment}: ") for it, title in zip(every, titles, strict=True)]
    known = [(it.evidence, name) for it, name in zip(every, networks, strict=True) if not it.held_out]
    return f"## {CLAIMS}\n\n{tell_claims([replace(it, network=name) for it, name in known if it])}"


def _rivals(every: Sequence[_Finding], it: _Finding) -> list[str]:
    """What follows the table of an experiment that has another way to choose widths beside DMCP's."""
    alike = [other.evidence for other in every if other.evidence and other.held_out == it.held_out]
    return [told] if it.evidence and (told := tell_rival(alike, it.evidence)) else []


def _section(
    it: _Finding, title: str, place: Path, links: Sequence[str], own: Sequence[_PastCell], more: Sequence[str]
) -> str:
    """How an experiment was made, and what it found; own: cells that no other shares; more: after the table."""
    again = f"```sh\n{shlex.join(it.command)}\n```" if it.command else "The command was not kept: make it again."
    path = place / f"{it.stem}.md"
    table = read_bytes(path, MOST_JSON).decode().strip() if path.exists() else f"The table is missing: {path.name}."
    facts = [
        f"- Machines: {_machines(it.once)}.",
        f"- Time at work: {_time(it.once, own)}",
        f"- Seeds: {', '.join(map(str, it.seeds))}.",
        f"- {_progress(it)}",
        *_taken(it),
        *_peers(it),
        *_warnings(it),
    ]
    images = [f"![{title}: {Path(link).stem}]({link})\n" for link in links]
    checks = [f"{line}\n" for line in _check_macs(it)]
    return "\n".join(
        [f"## {title}\n", f"{it.about}\n", f"{again}\n", *facts, "", f"{table}\n", *more, *checks, *images]
    )


def _machines(cells: Iterable[_PastCell]) -> str:
    counts = Counter(cell.device or "not kept" for cell in cells)
    return ", ".join(f"{name} ({_cells(count)})" for name, count in sorted(counts.items())) or "none yet"


def _time(cells: Sequence[_PastCell], own: Sequence[_PastCell] | None = None) -> str:
    """The sum, how much of it is of cells that others do not share, and what it leaves out."""
    known = [cell.seconds for cell in cells if cell.seconds is not None]
    lost = f" The time of {_cells(len(cells) - len(known))} was not kept." if len(known) < len(cells) else ""
    alone = "" if own is None else f", of which {_duration(sum(cell.seconds or 0.0 for cell in own))} its own"
    told = f"the sum over {_cells(len(known))}; cells run side by side, so a clock showed another time."
    return f"{_duration(sum(known))}{alone}, {told}{lost}"


def _duration(seconds: float) -> str:
    size, unit = next(((size, unit) for size, unit in ((3600, "h"), (60, "min")) if seconds >= 2 * size), (1, "s"))
    return f"{seconds / size:,.1f} {unit}"


def _cells(count: int) -> str:
    return counted(count, "cell")


def _progress(it: _Finding) -> str:
    """Which cells are missing."""
    whole = len(it.once) + len(it.missing)
    if not it.missing:
        return f"Nothing is missing: {len(it.once):,} of {_cells(whole)} done."
    return f"**Missing: {len(it.missing):,} of {_cells(whole)} not done:** {_named(it.missing)}."


def _named(cells: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in cells[:_NAMED]) + (", ..." if cells[_NAMED:] else "")


def _taken(it: _Finding) -> list[str]:
    """Cells that were run before, by other commands than that of the section."""
    told = f"- Taken from the data of earlier runs (`--recorded`): {_cells(len(it.recorded))}: {_named(it.recorded)}."
    return [told] if it.recorded else []


def _peers(it: _Finding) -> list[str]:
    """Rows that `dmcp compare` has put in, whose cells are not among those of the experiment."""
    ours = {cell.label.partition(" at ")[0] for cell in it.cells}
    others = dict.fromkeys(line.method for line in it.lines if line.method not in ours)
    told = "their cells were made by `dmcp compare`, and neither command nor time above have them."
    return [f"- Rows of {', '.join(others)}: {told}"] if others else []


def _warnings(it: _Finding) -> list[str]:
    """What a reader of the table could take for something else."""
    few = dict.fromkeys(line.method for line in it.lines if len(line.accuracies) < len(it.seeds))
    told = [f"- Rows with fewer than {counted(len(it.seeds), 'seed')}: {', '.join(few)}."] if few else []
    if it.experiment == "main":
        told.append("- Cells ran in different sittings and side by side: rows cannot be compared by *search, s*.")
    if it.held_out:
        told.append("- Trained without the held-out images and tested by them alone: no test image was used here.")
    if it.experiment in (RATES, EVEN, BORDER):
        told.append("- The searches had all training images, the held-out ones among them: only the trainings had not.")
    if it.experiment == "distribution":
        told.append("- Rows of other starts are of the cells of `dmcp paper extra`, run before in the same `--out`.")
    if it.experiment == "sampling":
        told.append("- The highest and the lowest of the direct samples are picked by test accuracy.")
    return told


# what the rows cost


def _check_macs(it: _Finding) -> list[str]:
    """Which rows cost less or more of their target than they must; which ones have none."""
    shares: dict[str, list[float]] = {}
    unknown: dict[str, None] = {}
    for label, budget, macs in _spent(it):
        target = _target(budget, it.macs)
        if target is None:
            unknown[label] = None
        else:
            shares.setdefault(label, []).append(macs / target)
    if not shares and not unknown:
        return []
    span = f"{LEAST:.2f} to {MOST:.2f} of their target"
    wrong = {label: own for label, own in shares.items() if not LEAST <= min(own) <= max(own) <= MOST}
    listed = ", ".join(f"{label} ({between(f'{min(own):.3f}', f'{max(own):.3f}')})" for label, own in wrong.items())
    told = [f"Rows whose MACs are outside {span}: {listed}."] if wrong else []
    told += [f"The MACs of all rows with a target ({len(shares)}) are {span}."] if shares and not wrong else []
    return told + ([f"Without a target for MACs alone: {', '.join(unknown)}."] if unknown else [])


def _spent(it: _Finding) -> list[tuple[str, str, int]]:
    """Row, budget and MACs of all networks that have a budget; cells have it in their names."""
    if it.experiment == "distribution":  # its rows are structures that were drawn, not the networks of its cells
        return []
    if it.lines:
        named = [(f"{line.method} at {line.budget}", line) for line in it.lines if line.budget]
        return [(label, line.budget, macs) for label, line in named for macs in line.macs]
    found = [(cell, _BUDGET.search(cell.name)) for cell in it.cells if cell.macs]
    return [(cell.label, match[1], cell.macs) for cell, match in found if match]


def _target(text: str, full: int) -> int | None:
    """The MACs that a budget asks for, read as a search reads it; None if it is not about MACs alone."""
    unpruned = cast(ChannelGraph, SimpleNamespace(macs=lambda: full))  # all that is asked of it
    try:
        named = any(kind in text.lower() for kind in ("params", MEMORY))
        return None if named or limits_latency(text) else known_limits(text, unpruned)[0].target
    except BudgetError:
        return None
