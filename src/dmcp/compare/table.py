"""The table of a comparison: a row for each method at each budget, all seeds together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from dmcp.budgets import MACS, read_budget
from dmcp.compare.methods import METHODS, title
from dmcp.compare.runner import RESULT, SAME, Result, check_alike, is_done, plain
from dmcp.errors import FileError
from dmcp.exporting.export import blaming
from dmcp.results import UNIFORM, UNPRUNED, Row
from dmcp.runs.files import read_json
from dmcp.runs.writing import Run
from dmcp.runtime.io import MOST_JSON, from_plain, read_bytes
from dmcp.units import between, counted, spread, table

TABLE, PAGE, COMMANDS = "compare.json", "compare.md", "commands.jsonl"  # the last: what was typed


def write_table(folder: Path) -> dict[str, Any]:
    """Write the table of all runs in a folder that are done; what is in its JSON. FileError if there are none."""
    done = [path for path in sorted(folder.glob(f"*/{RESULT}")) if is_done(path.parent)]
    results = {it.run.name: it for it in map(_read, done)}
    if not results:
        raise FileError(f"{folder}: no runs of a comparison are done here: give the folder that dmcp compare filled.")
    check_alike([it.run for it in results.values()], folder)
    protocol, log = next(iter(results.values())).run.protocol, folder / COMMANDS
    settings = plain(protocol) | {
        "set": {title(it.run.method): dict(it.run.settings) for it in results.values() if it.run.settings},
        "seeds": sorted({it.run.seed for it in results.values()}),
        "devices": sorted({it.device for it in results.values()}),
    }
    lines = _lines(results, folder)
    data: dict[str, Any] = {"model": protocol.config.model, "data": protocol.config.data}
    data |= {
        "commands": read_bytes(log, MOST_JSON).decode().splitlines() if log.exists() else [],
        "settings": settings,
        "lines": lines,
    }
    Run(folder).write(TABLE, data)
    Run(folder).write(PAGE, f"{_describe(settings)}\n\n{table(_cells(lines))}")
    return data


def _read(path: Path) -> Result:
    with blaming(f"{path}: not the result of a run of this version"):
        return from_plain(Result, read_json(path))


def _lines(results: Mapping[str, Result], folder: Path) -> list[dict[str, Any]]:
    """The rows: networks of all seeds together."""
    groups: dict[tuple[str, str, str], list[tuple[Result, Row]]] = {}
    for it in sorted(results.values(), key=_order):
        for net in it.networks:
            groups.setdefault((it.run.method, it.run.budget, net.name), []).append((it, net))
    lines = []
    for (method, budget, training), own in groups.items():
        runs, nets = [it for it, _ in own], [net for _, net in own]
        accuracies, costs = [net.accuracy for net in nets], [_cost(it, results, folder) for it in runs]
        ends: dict[str, list[float]] = {"macs": [it.macs for it in nets], "params": [it.params for it in nets]}
        ends |= {"macs_share": [net.macs / it.full_macs for it, net in own]}
        line: dict[str, Any] = {"method": title(method), "budget": budget, "training": training}
        alike = [(one := results.get(replace(it.run, method=UNIFORM).name)) and one.widths == it.widths for it in runs]
        line["same_as"] = UNIFORM if method != UNIFORM and all(alike) else ""  # who trains these widths, too
        line |= {"own": training != SAME, "way": training, "seeds": [it.run.seed for it in runs]}
        line |= {"accuracies": accuracies, "mean": fmean(accuracies), "ms": nets[0].ms}
        line |= {"deviation": stdev(accuracies) if len(own) > 1 else None, "widths": [dict(it.widths) for it in runs]}
        line |= {name: [min(values), max(values)] for name, values in ends.items()}
        line["search_seconds"], line["sample_passes"] = map(fmean, zip(*costs, strict=True))
        lines.append(line)
    return lines


def _order(it: Result) -> tuple[Any, ...]:
    """The unpruned network, shares of the MACs from the largest on, other budgets; our methods come first."""
    method, budget, known = it.run.method, it.run.budget, [*METHODS]
    share = _macs_share(budget) if budget else float("inf")
    return -share, budget, known.index(method) if method in known else len(known), title(method), it.run.seed


def _macs_share(budget: str) -> float:
    """The share of MACs that is the whole budget; -1 for any other budget."""
    targets = read_budget(budget).targets
    is_macs_share = len(targets) == 1 and targets[0].kind == MACS and targets[0].is_share
    return float(targets[0].amount) if is_macs_share else -1.0


def _cost(it: Result, results: Mapping[str, Result], folder: Path) -> tuple[float, int]:
    """Seconds and sample-passes until the widths were known, with the run before."""
    if it.run.method == UNPRUNED:
        return 0.0, 0
    if it.run.uses and it.run.uses not in results:
        raise FileError(f"{folder}: {it.run.uses}, which {it.run.name} started from, is not there.")
    both = [it, *([results[it.run.uses]] if it.run.uses else [])]
    return sum(one.seconds for one in both), sum(one.sample_passes for one in both)


def _describe(settings: Mapping[str, Any]) -> str:
    """Network, data, recipe and seeds in a line."""
    config, recipe = settings["config"], settings["config"]["train"]
    return (
        f"{' '.join([config['model'], *config['model_args']])} on {Path(config['data']).name}: "
        f"{counted(recipe['epochs'], 'epoch')}, batch {config['batch']}, learning rate {recipe['lr']:g}, decay "
        f"{recipe['weight_decay']:g}, fine-tuning {counted(settings['finetune_epochs'], 'epoch')}, "
        f"seeds {', '.join(map(str, settings['seeds']))}."
    )


def _cells(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Mean ± standard deviation (seeds), also of differences to uniform with the same seed; what the search cost."""
    rows = [["method", "budget", f"accuracy in %, {SAME}", f"points above {UNIFORM}", "its own training, %"]]
    rows[0] += ["MACs", "params", "search, s", "sample-passes, M"]
    found: dict[tuple[str, str], dict[bool, Any]] = {}  # by method and budget: the same recipe, its own training
    for line in lines:
        found.setdefault((line["method"], line["budget"]), {})[line["own"]] = line
    for (method, budget), both in found.items():
        line, base = next(iter(both.values())), found.get((UNIFORM, budget), {}).get(False)
        same = None if line["same_as"] else both.get(False)
        known = dict(zip(base["seeds"], base["accuracies"], strict=True)) if base else {}
        pairs = zip(same["seeds"], same["accuracies"], strict=True) if same and same is not base else ()
        passes = line["sample_passes"] / 1e6
        rows.append([method, budget or "100%"])
        rows[-1] += [
            spread(same["accuracies"]) if same else f"= {line['same_as']}" if line["same_as"] else "",
            spread([accuracy - known[seed] for seed, accuracy in pairs if seed in known], sign="+z"),
            f"{spread(both[True]['accuracies'])}, {both[True]['way']}" if True in both else "",
            between(*(f"{share:.1%}" for share in line["macs_share"])),
            between(*(f"{number:,}" for number in line["params"])),
            f"{line['search_seconds']:,.0f}",
            f"{passes:,.1f}" if passes >= 1 else f"{passes:.3g}",
        ]
    return rows
