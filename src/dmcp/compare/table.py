"""The table of a folder of runs: Markdown, JSON, CSV, LaTeX and a figure."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dmcp.compare.methods import METHODS, PEERS, title
from dmcp.compare.runner import COMMANDS, RESULT, SAME, Inputs, PlannedRun, Result, is_done, is_one_ratio, plain
from dmcp.errors import FileError, TrainingError
from dmcp.report import figures
from dmcp.results import UNIFORM, UNPRUNED, milliseconds
from dmcp.runs import Run, read_json
from dmcp.runtime.io import from_plain
from dmcp.storage import WEIGHTS, load
from dmcp.units import between, counted, latex, points, spread, table

TABLE, PAGE, FIGURE, NETWORKS, LATEX = "compare.json", "compare.md", "compare.svg", "compare.csv", "compare.tex"
PASSES = 10  # through a network, the fastest of which is its time


def write_table(
    folder: Path, asked: Sequence[PlannedRun] = (), inputs: Inputs | None = None, measure: bool = False
) -> dict[str, Any] | None:
    """Write the table of all runs in a folder that are done; what is in its JSON, or None if there are none.

    asked: take the runs of their protocol only, and give a row to each. inputs: measure the speed of new networks, or
    of all of them; without it the folder alone is needed.
    """
    results = _read(folder, asked)
    if not results:
        return None
    speeds = _speeds(results, folder, inputs, measure)
    networks = _networks(results, asked, speeds["ms"])
    lines, run, log = _lines(networks), next(iter(results.values())).run, folder / COMMANDS
    settings = plain(run.protocol) | {
        "set": {title(it.run.method): dict(it.run.settings) for it in results.values() if it.run.settings},
        "seeds": sorted({it.run.seed for it in results.values()}),
        "devices": sorted({it.device for it in results.values()}),
    }
    data: dict[str, Any] = {
        "model": run.protocol.model,
        "data": run.protocol.data,
        "commands": log.read_text(errors="replace").splitlines() if log.exists() else [],
        "settings": settings,
        "speeds": speeds,
        "lines": lines,
    }
    files, about, text = Run(folder), _describe(settings), io.StringIO()
    writer = csv.DictWriter(text, [*networks[0]], lineterminator="\n")
    writer.writeheader()
    writer.writerows(networks)
    both = [cells for cells in (_cells(lines, speeds["batch"]), _differences(lines)) if cells]
    files.write(TABLE, data)
    files.write(PAGE, "\n".join([f"{about}\n", *map(table, both)]))
    files.write(LATEX, "\n".join([f"% {about}", r"% Needs \usepackage{booktabs}.", *map(latex, both)]))
    files.write(NETWORKS, text.getvalue())
    _draw(lines, about, folder / FIGURE)
    return data


# what there is


def _read(folder: Path, asked: Sequence[PlannedRun]) -> dict[str, Result]:
    """Results of one protocol, by the names of their runs, in the order of the table."""
    found: dict[str, Result] = {}
    for path in sorted(folder.glob(f"*/{RESULT}")):
        with suppress(FileError, TypeError, ValueError, TrainingError):  # damaged, or of another version
            result = from_plain(Result, read_json(path))
            if is_done(path.parent) and result.run.name == path.parent.name:
                found[result.run.name] = result
    kinds = {name: _kind(it.run) for name, it in found.items()}
    found = {name: it for name, it in found.items() if not asked or kinds[name] == _kind(asked[0])}
    first: dict[str, tuple[str, Any]] = {}  # of each row
    for name, it in found.items():
        one, row = next(iter(found)), (it.run.method, it.run.settings)
        keys = [key for key in kinds[name] if kinds[name][key] != kinds[one][key]]
        other, settings = first.setdefault(it.run.row, (name, row))
        if keys or settings != row:
            what = f"{one if keys else other} and {name} differ in {', '.join(keys or ['settings'])}"
            raise FileError(f"{folder}: {what}: move one of them elsewhere.")
    return found


def _kind(it: PlannedRun) -> dict[str, Any]:
    """What all runs of a table have in common."""
    facts = plain(it)
    return dict(facts["protocol"]) | {"facts": facts["facts"]}


def _networks(
    results: Mapping[str, Result], asked: Sequence[PlannedRun], ms: Mapping[str, float]
) -> list[dict[str, Any]]:
    """One entry for each network of the table, seed by seed."""
    found: list[dict[str, Any]] = []
    every = [it.run for it in results.values()] + [*asked]
    rows = {(it.method, it.budget) for it in every if it.budget or it.method == UNPRUNED}
    for method, budget in sorted(rows, key=lambda row: (*_place(row[1]), *_rank(row[0]))):
        own = _by_seed(results, method, budget)
        copied = is_one_ratio(method) and any(it.scratch for it in every if it.budget)
        trained = _by_seed(results, UNIFORM, budget) if copied else own  # by the same recipe it is the same network
        both = [(it, net) for it in trained.values() for net in it.networks if net.training == SAME]
        both += [(it, net) for it in own.values() for net in it.networks if net.training != SAME]
        for it, net in both:
            cost = _cost(results, own.get(it.run.seed) if own else it) if method != UNPRUNED else (0.0, 0.0)
            row: dict[str, Any] = {"method": title(method), "budget": budget, "training": net.training}
            row |= {"seed": it.run.seed, "accuracy": net.accuracy}
            row |= {"same_as": UNIFORM if copied and net.training == SAME else "", "macs": net.macs}
            row |= {"macs_share": net.macs / it.full_macs, "params": net.params}
            row |= {"search_seconds": cost[0], "sample_passes": cost[1], "ms": ms.get(it.run.name)}
            found.append(row)
    return found


def _by_seed(results: Mapping[str, Result], method: str, budget: str) -> dict[int, Result]:
    own = [it for it in results.values() if (it.run.method, it.run.budget) == (method, budget) and it.networks]
    return {it.run.seed: it for it in sorted(own, key=lambda it: it.run.seed)}


def _cost(results: Mapping[str, Result], it: Result | None) -> tuple[float | None, float | None]:
    """Seconds and sample-passes until the widths were known, with the runs before; None: not known."""
    if it is None:
        return None, None
    seconds, passes = _cost(results, results.get(it.run.uses)) if it.run.uses else (0.0, 0.0)
    if seconds is None or passes is None or it.seconds is None:
        return None, None
    return seconds + it.seconds, passes + it.sample_passes


def _place(budget: str) -> tuple[float, str]:
    """The unpruned network, shares of the MACs from the largest on, then all others."""
    share = budget.removesuffix("%").replace(".", "", 1)
    return (-float(budget[:-1]), "") if share.isdigit() and budget.endswith("%") else (1.0 if budget else -1e9, budget)


def _rank(method: str) -> tuple[int, str]:
    """Ours as they are listed, then those of others."""
    known = [*METHODS, *PEERS]
    return (known.index(method), "") if method in known else (len(known), title(method))


def _lines(networks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows of the table: the networks of all seeds together."""
    keys = ("method", "budget", "training", "same_as")
    lines = []
    for key in dict.fromkeys(tuple(it[name] for name in keys) for it in networks):
        own = [it for it in networks if tuple(it[name] for name in keys) == key]
        accuracies = [it["accuracy"] for it in own]
        line = dict(zip(keys, key, strict=True)) | {"own": own[0]["training"] != SAME, "way": own[0]["training"]}
        line |= {"seeds": [it["seed"] for it in own], "accuracies": accuracies, "mean": statistics.fmean(accuracies)}
        line["deviation"] = statistics.stdev(accuracies) if len(own) > 1 else None
        for name in ("macs", "params", "macs_share"):
            line[name] = [min(it[name] for it in own), max(it[name] for it in own)]
        for name in ("search_seconds", "sample_passes"):
            known = [it[name] for it in own if it[name] is not None]
            line[name] = statistics.fmean(known) if known else None
        lines.append(line | {"ms": own[0]["ms"]})
    return lines


# how fast


def _speeds(results: Mapping[str, Result], folder: Path, inputs: Inputs | None, again: bool) -> dict[str, Any]:
    """Milliseconds of a batch through the network of each row's first seed, on one device, by names of runs."""
    before: dict[str, Any] = {"device": "", "batch": 0, "ms": {}}
    with suppress(FileError):
        stored = read_json(folder / TABLE).get("speeds") if (folder / TABLE).exists() else None
        if isinstance(stored, dict) and stored.keys() == before.keys() and isinstance(stored["ms"], dict):
            before = stored
    if inputs is None:
        return before
    device, (example, *_) = inputs.device, next(iter(inputs.test))
    here = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    known = {"device": here, "batch": len(example)}
    same = not again and all(before[key] == value for key, value in known.items())
    ms: dict[str, float] = dict(before["ms"]) if same else {}
    rows: dict[str, str] = {}
    for name, it in sorted(results.items(), key=lambda pair: pair[1].run.seed):
        if it.networks and (folder / name / WEIGHTS).exists():
            rows.setdefault(it.run.row, name)
    if left := [name for name in rows.values() if name not in ms]:
        nets = [load(folder / name, inputs.model).to(device) for name in left]
        ms |= zip(left, milliseconds(nets, example.to(device), PASSES), strict=True)
    return known | {"ms": ms}


# as text


def _describe(settings: Mapping[str, Any]) -> str:
    """Network, data, recipe and seeds in a line."""
    recipe, bounds = settings["train"], ""
    for word, name in (("at least", "min_channels"), ("at most", "max_channels")):
        bound = settings[name] if isinstance(settings[name], dict) else {"": settings[name]}
        bounds += "".join(f"{word} {n} channels{f' in {place}' if place else ''}; " for place, n in bound.items())
    rate = f" at a batch of {recipe['reference_batch']}" if recipe["reference_batch"] else ""
    return (
        f"{' '.join([settings['model'], *settings['model_args']])} on {Path(settings['data']).name}: "
        f"{counted(recipe['epochs'], 'epoch')}, batch {settings['batch']}, learning rate {recipe['lr']:g}{rate}, "
        f"weight decay {recipe['weight_decay']:g}; {settings['holdout']:.0%} of the training images held out; "
        f"fine-tuning {counted(settings['finetune_epochs'], 'epoch')}; {bounds}"
        f"seeds {', '.join(map(str, settings['seeds']))}."
    )


def _pairs(lines: Sequence[Mapping[str, Any]]) -> list[tuple[Any, Any]]:
    """The lines of each method and budget: trained by the same recipe, and its own way."""
    found: dict[tuple[str, str], list[Any]] = {}
    for line in lines:
        found.setdefault((line["method"], line["budget"]), [None, None])[line["own"]] = line
    return [(same, own) for same, own in found.values()]


def _cells(lines: Sequence[Mapping[str, Any]], batch: int) -> list[list[str]]:
    """The table: mean ± standard deviation (seeds); search cost until the widths are known; times if there are any."""
    timed = any(line["ms"] is not None for line in lines)
    shown = {line["budget"] for line in lines if line["method"] == UNIFORM}
    rows = [["method", "budget", "accuracy in %, same recipe", "its own training", "MACs", "params"]]
    rows[0] += ["search, s", "sample-passes, M", *([f"ms per {batch}, fastest of {PASSES}"] if timed else [])]
    for same, own in _pairs(lines):
        line = same or own
        passes = (line["sample_passes"] or 0) / 1e6
        cells = [line["method"], line["budget"] or "100%", spread(same["accuracies"]) if same else ""]
        if same and same["same_as"] and line["budget"] in shown:
            cells[2] = f"= {UNIFORM}"
        cells += [
            f"{spread(own['accuracies'])}, {own['way']}" if own else "",
            between(*(f"{share:.1%}" for share in line["macs_share"])),
            between(*(f"{number:,}" for number in line["params"])),
            "" if line["search_seconds"] is None else f"{line['search_seconds']:,.0f}",
            f"{passes:,.1f}" if passes >= 1 else f"{passes:.3g}",
        ]
        rows.append(cells + (["" if line["ms"] is None else f"{line['ms']:.2f}"] if timed else []))
    return rows


def _differences(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """By how many points methods are better than uniform with the same seed; empty where there is no uniform."""
    rows = [["method", "budget", f"points above {UNIFORM}, {SAME}", "its own training"]]
    bases = {it["budget"]: it for it in lines if it["method"] == UNIFORM and not it["own"]}
    for same, own in _pairs(lines):
        line = same or own
        base = bases.get(line["budget"])
        if base is None or line is base:
            continue
        known = dict(zip(base["seeds"], base["accuracies"], strict=True))
        values = [dict(zip(it["seeds"], it["accuracies"], strict=True)) if it else {} for it in (same, own)]
        above = [points([own[seed] - known[seed] for seed in own if seed in known]) for own in values]
        if same and same["same_as"]:
            above[0] = f"= {UNIFORM}"
        rows.append([line["method"], line["budget"], *above])
    return rows if len(rows) > 1 else []


def _draw(lines: Sequence[Mapping[str, Any]], about: str, path: Path) -> None:
    panels: dict[str, dict[str, tuple[figures.Spread, figures.Spread]]] = {}
    for same, own in _pairs(lines):
        line = same or own
        if line["budget"]:  # the unpruned network would make all others look alike
            both = (same and same["accuracies"], own and own["accuracies"])
            panels.setdefault(line["budget"], {})[line["method"]] = both
    if panels:
        figures.save(figures.accuracy_by_method(panels, about.partition(", batch")[0]), path)
