"""The findings of an experiment: a table, figures and plain data, made from the folders of its cells.

Of cells whose folders are gone, they may be made from data that were written before: see records.
"""

from __future__ import annotations

import functools
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from dmcp import figures
from dmcp.comparison.cell_files import is_done
from dmcp.comparison.cell_runs import PLANS, changes
from dmcp.comparison.comparing import UNIFORM, cell_name, plan_cell
from dmcp.comparison.gathering import Line, gather
from dmcp.comparison.table_text import against_uniform, markdown, to_json
from dmcp.methods import METHODS, PEERS
from dmcp.paper.alpha_findings import show_distribution, show_recover
from dmcp.paper.arms import Study
from dmcp.paper.experiments import EXPERIMENTS, about, study_of
from dmcp.paper.figures import curves, dots, title, width_differences
from dmcp.paper.outcomes import PERCENT, Outcome, Recorded, Shown, by_label, outcomes, plain_row
from dmcp.paper.own_experiments import BORDER, BORDER_LONG, EVEN, EXPLAIN, FULL, HALFWAY, LENGTH, RATES, RECIPE, TAUGHT
from dmcp.paper.tasks import cells_of, command, epochs_of
from dmcp.pruning import UNPRUNED
from dmcp.running.plans import Cell
from dmcp.runs import Run, read_json
from dmcp.tables import between, points, pooled, spread, table
from dmcp.training import TrainConfig

_HELD = " of held-out images"  # that are not the test's


def show(it: Study, name: str, folder: Path, recorded: Recorded | None = None) -> Shown | None:
    """An experiment as far as its cells are done or recorded; None if none is."""
    own = study_of(it, name)
    found = outcomes(own, EXPERIMENTS[name](own), folder, recorded)
    return _SHOWN.get(name, _show_arms)(own, name, found, folder) if found else None


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """What all numbers of an experiment have in common; its fields are keys of the data that `write` writes."""

    search_epochs: int
    holdout: float  # share of the training images
    model: str
    model_args: tuple[str, ...]
    data: str  # the last part of its path
    batch: int
    train: TrainConfig  # with the seed 0, whatever that of a cell is
    settings: Mapping[str, Mapping[str, Any]]  # of methods


def protocol(it: Study, name: str) -> dict[str, Any]:
    """The protocol of an experiment as plain data: only such files replace each other."""
    common = study_of(it, name).common
    known = Protocol(
        search_epochs=study_of(it, name).search.epochs,
        holdout=common.holdout,
        model=common.job.model,
        model_args=common.job.model_args,
        data=Path(common.job.data).name,
        batch=common.job.batch,
        train=replace(common.train, seed=0),
        settings={method: dict(values) for method, values in common.settings.items()},
    )
    return dict(json.loads(json.dumps(asdict(known))))


def written_protocol(data: Mapping[str, Any]) -> dict[str, Any]:
    """The protocol in data that were written before, whatever came later as it was then."""
    found = {field.name: data.get(field.name) for field in fields(Protocol)}
    if isinstance(found["train"], dict):
        found["train"] = json.loads(json.dumps(asdict(TrainConfig()))) | found["train"]
    return found


def difference(part: str, before: Any, now: Any) -> str:
    """The first difference of a part of two protocols in words; empty: none."""
    before = written_protocol({part: before}).get(part)
    if before == now:
        return ""
    field = next(iter(changes(part, before, now)), part)
    if field != part:
        before, now = (it.get(field.removeprefix(f"{part}.")) for it in (before, now))
    return f"{field} ({before}, not {now})"


def write(
    it: Study, name: str, shown: Shown, folder: Path, place: Path, stem: str, recorded: Recorded | None = None
) -> list[Path]:
    """Write STEM.json, STEM.md and STEM.svg; the same cells give the same bytes."""
    again, same, it = command(it, name), protocol(it, name), study_of(it, name)
    arms = EXPERIMENTS[name](it)
    found, wanted = outcomes(it, arms, folder, recorded), {cell for _, _, cell in cells_of(it, arms)}
    done = {outcome.name for outcome in found}
    taken = sorted(cell for cell in done if not is_done(folder / cell))  # from the data of experiments
    data = {
        "command": again,
        "experiment": name,
        "about": about(name),
        **same,
        "seeds": list(it.common.seeds),
        "macs": it.graph.macs(),
        "missing": sorted(wanted - done),
        **({"recorded": taken} if taken else {}),
        "rows": list(shown.rows),
        "cells": [outcome.to_json() for outcome in found],
    }
    place.mkdir(parents=True, exist_ok=True)
    Run(place).write(f"{stem}.json", _dump(data))
    Run(place).write(f"{stem}.md", shown.text)
    drawn = [figures.save(figure, place / f"{stem}{end}.svg") for end, figure in shown.figures.items()]
    return [place / f"{stem}.json", place / f"{stem}.md", *drawn]


def _dump(data: Any) -> str:
    """JSON with a line for each list of plain values: curves are long."""
    text = json.dumps(data, indent=1)
    return re.sub(r"\[\n\s+([^\[\]{}]*?)\n\s*\]", lambda found: f"[{' '.join(found[1].split())}]", text) + "\n"


# accuracy of arms


def _accuracies(found: Sequence[Outcome]) -> list[float]:
    return [outcome.accuracy for outcome in found if outcome.accuracy is not None]


def _show_arms(
    it: Study, name: str, found: Sequence[Outcome], folder: Path, lengths: bool = False, of: str = ", same recipe"
) -> Shown:
    """A row for each label: accuracy over the seeds, how much above another row, and what the networks cost.

    lengths: also how long each was searched and trained, where that is not the same for all. of: words after accuracy.
    """
    groups = by_label(it, name, found)
    seen = {label: {one.seed: one.accuracy for one in own if one.accuracy is not None} for label, own in groups.items()}
    above, rows = dict[str, dict[str, Any]](), list[dict[str, Any]]()
    cells = [["", f"{PERCENT}{of}", "MACs of 1.0x unpruned", "params"]]
    cells[0] += ["epochs of search + training"] if lengths else []
    for label, group in groups.items():
        values, arm = _accuracies(group), group[0].arm
        macs, params = (sorted(getattr(one, kind) for one in group) for kind in ("macs", "params"))
        shares = [one / it.graph.macs() for one in macs]
        cells.append([label, spread(values), _span(shares, ".1%"), _span(params, ",")])
        rows.append(plain_row(label, values, macs_share=[shares[0], shares[-1]], params=[params[0], params[-1]]))
        if arm.against:
            above[label] = rows[-1]["above"] = _above(seen[label], arm.against, seen.get(arm.against, {}))
        if lengths:
            rows[-1]["epochs"] = epochs_of(it, arm)
            cells[-1].append(_lengths(rows[-1]["epochs"]))
    words = f"accuracy{_HELD}" if of == _HELD else "test accuracy"
    told = title(it, name, epochs=(epochs_of(it, one.arm)["training"] for one in found))
    drawn = dots({label: _accuracies(group) for label, group in groups.items()}, told, words)
    return Shown(table(_with_points(cells, above)), rows, {"": drawn})


def _lengths(epochs: Mapping[str, int]) -> str:
    """60 + 240 = 300, and what others took."""
    own = [epochs[stage] for stage in ("search", "training") if stage in epochs]
    whole = f" = {sum(own)}" if len(own) > 1 else ""
    others = {"start": "the network that it starts from", "teacher": "its teacher"}
    more = "".join(f", and {epochs[stage]} of {words}" for stage, words in others.items() if stage in epochs)
    return f"{' + '.join(map(str, own))}{whole}{more}"


def _above(values: Mapping[int, float], of: str, reference: Mapping[int, float]) -> dict[str, Any]:
    """By how much accuracies are above those of another row with the same seed, where there are both."""
    seeds = [seed for seed in values if seed in reference]
    return {"of": of, "seeds": seeds, "values": [values[seed] - reference[seed] for seed in seeds]}


def _with_points(cells: Sequence[Sequence[str]], above: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """A table with a column of differences after the accuracies; they name their reference if there are several."""
    if not above:
        return [[*row] for row in cells]
    references = {pair["of"] for pair in above.values()}
    told = {label: points(pair["values"]) for label, pair in above.items()}
    if len(references) > 1:
        told = {label: f"{above[label]['of']}: {text}" if text else "" for label, text in told.items()}
    head = f"points above {references.pop()}" if len(references) == 1 else "points above"
    column = [head, *(told.get(label, "") for label, *_ in cells[1:])]
    return [[label, accuracy, text, *rest] for (label, accuracy, *rest), text in zip(cells, column, strict=True)]


def _span(values: Sequence[float], form: str) -> str:
    return between(format(values[0], form), format(values[-1], form))


def _show_sampling(it: Study, name: str, found: Sequence[Outcome], folder: Path) -> Shown:
    """Expected sampling against the best, the worst and the mean of the draws of each search."""
    expected, draws = dict[int, float](), dict[int, list[float]]()
    for one in found:
        if one.accuracy is not None and one.arm.method == "dmcp":
            expected[one.seed] = one.accuracy
        elif one.accuracy is not None:
            draws.setdefault(one.seed, []).append(one.accuracy)
    picks: dict[str, Callable[[list[float]], float]] = {"highest": max, "mean": statistics.fmean, "lowest": min}
    values = {"expected sampling": expected}
    values |= {
        f"direct sampling, {word}": {seed: pick(own) for seed, own in draws.items()} for word, pick in picks.items()
    }
    above = {label: _above(own, "expected sampling", expected) for label, own in values.items() if own is not expected}
    more = {label: {"above": pair} for label, pair in above.items()}
    rows = [plain_row(label, [*own.values()], **more.get(label, {})) for label, own in values.items() if own]
    inside = {
        f"deviation of the draws of seed {seed}": statistics.stdev(own) for seed, own in draws.items() if len(own) > 1
    }
    rows += [{"label": label, "deviation": value} for label, value in inside.items()]
    cells = [["", PERCENT], *([label, spread([*own.values()])] for label, own in values.items())]
    if inside:
        rows.append({"label": "deviation inside a search", "deviation": pooled([*draws.values()])})
        cells.append([rows[-1]["label"], f"{100 * rows[-1]['deviation']:.2f}"])
    groups = {"expected sampling": [*expected.values()]}
    groups |= {f"direct sampling, search of seed {seed}": own for seed, own in draws.items()}
    return Shown(table(_with_points(cells, above)), rows, {"": dots(groups, title(it, name))})


def _show_scale(it: Study, name: str, found: Sequence[Outcome], folder: Path) -> Shown:
    """The table, and by how much the widths differ, space by space."""
    shown = _show_arms(it, name, found, folder)
    by_arm = {wide: {one.seed: one for one in found if bool(one.arm.model_args) is wide} for wide in (False, True)}
    pairs = [(by_arm[False][seed].widths, by_arm[True][seed].widths) for seed in by_arm[False].keys() & by_arm[True]]
    if not pairs or any(narrow.keys() != wide.keys() for narrow, wide in pairs):
        return shown
    gaps = {space: [wide[space] - narrow[space] for narrow, wide in pairs] for space in pairs[0][0]}
    rows = [*shown.rows, {"label": "widths of 1.5x less those of 1.0x", "differences": gaps}]
    drawn = {"": width_differences(gaps, title(it, name)), "-accuracy": shown.figures[""]}
    return replace(shown, rows=rows, figures=drawn)


# the main table


def _show_main(it: Study, name: str, found: Sequence[Outcome], folder: Path) -> Shown:
    """The table of a comparison, with what `dmcp compare` has put into the same folder under the same protocol."""
    budgets = sorted(it.common.budgets, key=lambda text: -float(text.rstrip("%")) if text.endswith("%") else 0.0)
    known = [method for method in (*METHODS, *PEERS) if method not in (*it.common.methods, "dmcp-direct")]
    peers = [method for method in known if _has_peer(it, method, folder)]
    whole = replace(it.common, methods=(*it.common.methods, *peers), budgets=tuple(budgets))
    lines = gather(whole, folder)
    done = {(line.method, line.budget) for line in lines if line.own or not line.same_as}
    lines = [line for line in lines if (line.method, line.budget) in done]  # one ratio, but channels not chosen here
    ours = [line for line in lines if line.method in (UNPRUNED, *it.common.methods)]
    apart = [line for line in lines if line not in ours and not (line.own and _scratch(line, lines))]
    seeds = len(it.common.seeds)
    others = curves((line for line in apart if not line.same_as), seeds)
    drawn = figures.accuracy_over_macs(curves(ours, seeds), others, title(it, name))
    plain = [{key: row[key] for key in row if key != "networks"} for row in to_json(lines)]  # which are the cells
    rows = [row | _above_uniform(line, lines) for row, line in zip(plain, lines, strict=True)]
    return Shown("\n".join([markdown(lines), against_uniform(lines)]), rows, {"": drawn})


def _scratch(line: Line, lines: Sequence[Line]) -> bool:
    """Whether the method also has networks of its own widths by the same recipe, which are drawn in place of these."""
    return any((it.method, it.budget, it.own, it.same_as) == (line.method, line.budget, False, "") for it in lines)


def _above_uniform(line: Line, lines: Sequence[Line]) -> dict[str, Any]:
    """What `against_uniform` shows of a line, as plain data; nothing of uniform itself and where there is none."""
    base = next((it for it in lines if (it.method, it.own, it.budget) == (UNIFORM, False, line.budget)), line)
    if line is base or line.same_as:
        return {}
    own, reference = (dict(zip(it.seeds, it.accuracies, strict=True)) for it in (line, base))
    return {"above": _above(own, f"{UNIFORM} at {line.budget}", reference)}


def _has_peer(it: Study, method: str, folder: Path) -> bool:
    """Whether cells of a method are done, all of them with our data, network and final training."""
    same = []
    for seed in it.common.seeds:
        for budget in it.common.budgets:
            name = cell_name(method, seed, budget)
            if is_done(folder / name):
                plan = json.loads(json.dumps(plan_cell(it.common, seed, Cell(method=method), budget).to_json()))
                stored = read_json(folder / PLANS / f"{name}.json")
                same.append(all(stored.get(part) == plan[part] for part in ("job", "train")))
    return bool(same) and all(same)


_SHOWN: dict[str, Callable[[Study, str, Sequence[Outcome], Path], Shown]] = {  # those that are not plain tables of arms
    "main": _show_main,
    "sampling": _show_sampling,
    "scale": _show_scale,
    "recover": show_recover,
    "distribution": show_distribution,
    FULL: functools.partial(_show_arms, lengths=True, of=""),
    RECIPE: functools.partial(_show_arms, of=_HELD),
    EXPLAIN: functools.partial(_show_arms, lengths=True, of=""),
    LENGTH: functools.partial(_show_arms, lengths=True, of=""),
    RATES: functools.partial(_show_arms, of=_HELD),
    TAUGHT: functools.partial(_show_arms, lengths=True, of=""),
    EVEN: functools.partial(_show_arms, of=_HELD),
    HALFWAY: functools.partial(_show_arms, lengths=True, of=""),
    BORDER: functools.partial(_show_arms, of=_HELD),
    BORDER_LONG: functools.partial(_show_arms, lengths=True, of=""),
}
