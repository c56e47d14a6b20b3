"""The table of a comparison as people and programs read it: who is how good, against uniform, and at what cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dmcp.comparison.comparing import UNIFORM
from dmcp.comparison.gathering import PASSES, Line
from dmcp.tables import between, points, spread, table


def markdown(lines: Sequence[Line], batch: int = 0) -> str:
    """The table for people who read text."""
    return table(cells_of(lines, batch))


def cells_of(lines: Sequence[Line], batch: int = 0) -> list[list[str]]:
    """The table: mean ± standard deviation (seeds); search cost until the widths are known; times if there are any."""
    rows = [["method", "budget", "accuracy in %, same recipe", "its own training", "MACs", "params"]]
    timed = any(line.ms is not None for line in lines)
    rows[0] += ["search, s", "sample-passes, M", *([f"ms per {batch}, fastest of {PASSES}"] if timed else [])]
    for line in lines:
        if line.own and _other(line, lines, own=False):
            continue
        own = _other(line, lines, own=True)
        cells = [line.method, line.budget or "100%", "" if line.own else _same_recipe(line, lines)]
        cells += [", ".join(filter(None, (spread(own.accuracies), own.way))) if own else ""]
        cells += [between(*(f"{share:.1%}" for share in line.macs_share)), between(*(f"{n:,}" for n in line.params))]
        cells += ["" if line.search_seconds is None else f"{line.search_seconds:,.0f}", _millions(line.sample_passes)]
        rows.append(cells + (["" if line.ms is None else f"{line.ms:.2f}"] if timed else []))
    return rows


def against_uniform(lines: Sequence[Line]) -> str:
    """The table of differences for people who read text; nothing where there are none."""
    rows = differences_of(lines)
    return table(rows) if rows else ""


def differences_of(lines: Sequence[Line]) -> list[list[str]]:
    """By how many points methods are better than uniform with the same seed; nothing where there is no uniform."""
    rows = [["method", "budget", "points above uniform, same recipe", "its own training"]]
    for line in lines:
        base = next((it for it in lines if (it.method, it.budget, it.own) == (UNIFORM, line.budget, False)), None)
        if base is None or line is base or (line.own and _other(line, lines, own=False)):
            continue
        own = _other(line, lines, own=True)
        same = f"= {line.same_as}" if line.same_as else "" if line.own else points(differences(line, base))
        rows.append([line.method, line.budget, same, points(differences(own, base)) if own else ""])
    return rows if len(rows) > 1 else []


def differences(line: Line, base: Line) -> list[float]:
    """How much better each network is than the other line's of the same seed."""
    known = dict(zip(base.seeds, base.accuracies, strict=True))
    return [value - known[seed] for seed, value in zip(line.seeds, line.accuracies, strict=True) if seed in known]


def networks_of(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The table network by network, for other programs; the time of a pass is that of the line's first seed."""
    return [
        {
            "method": line.method,
            "budget": line.budget,
            "training": line.way if line.own else "same recipe",
            "seed": it.seed,
            "accuracy": it.accuracy,
            "same_as": line.same_as,
            "macs": it.macs,
            "params": it.params,
            "search_seconds": it.search_seconds,
            "sample_passes": it.sample_passes,
            "ms": line.ms if it.seed == line.seeds[0] else None,
        }
        for line in lines
        for it in line.networks
    ]


def to_json(lines: Sequence[Line]) -> list[dict[str, Any]]:
    """The table as plain data."""
    return [asdict(line) for line in lines]


def _other(line: Line, lines: Sequence[Line], own: bool) -> Line | None:
    """The line of the same method and budget that was trained this way."""
    return next((it for it in lines if (it.method, it.budget, it.own) == (line.method, line.budget, own)), None)


def _same_recipe(line: Line, lines: Sequence[Line]) -> str:
    """Figures that stand in another line are not shown twice."""
    there = any((it.method, it.budget, it.own) == (line.same_as, line.budget, False) for it in lines)
    return f"= {line.same_as}" if there else spread(line.accuracies)


def _millions(count: float) -> str:
    """Samples in millions; few of them with three digits."""
    return f"{count / 1e6:,.1f}" if count >= 1e6 else f"{count / 1e6:.3g}"
