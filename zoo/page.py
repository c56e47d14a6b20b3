"""docs/zoo.md: totals, what falls short and why, and a row per model."""

from __future__ import annotations

import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from statistics import median

import dmcp
from zoo import peer
from zoo.contract import MIN_EFFECT, TOLERANCE, TRAINED_PARAMS, Result, Shortfall
from zoo.models import ENTRIES, Entry

FAMILIES = {
    "tv": "torchvision classification",
    "seg": "torchvision segmentation",
    "detbody": "detector bodies",
    "timm": "timm",
}
_PLACE = re.compile(r" \([^()]* at [^()]*\)| of [\w.]+(?= depends)")  # where in the model a reason applies

LIBRARIES = ("torch", "torchvision", "timm")
Row = tuple[Entry, Result]


def write(results: Mapping[str, Result], peers: Mapping[str, str] | None, command: str) -> str:
    """The page as Markdown; `peers` is None where Torch-Pruning's column was not asked for or cannot be had."""
    rows = [(entry, results[entry.name]) for entry in ENTRIES if entry.name in results]
    parts = [_head(rows, command), _totals(rows), _not_correct(rows), _below(rows), _unknown(rows)]
    parts += [_peer_totals(peers)] if peers is not None else [_no_peer()]
    return "\n\n".join([*parts, _models(rows, peers or {})]) + "\n"


def _head(rows: Sequence[Row], command: str) -> str:
    versions = {"torch-dmcp": dmcp.__version__} | {name: import_module(name).__version__ for name in LIBRARIES}
    versions["Python"] = platform.python_version()
    about = ", ".join([f"{len(rows)} of {len(ENTRIES)} models", *(f"{name} {text}" for name, text in versions.items())])
    return f"""# The zoo

Written by `{command}`, not by hand. {about}, CPU ({platform.machine()}), one thread per model.

Each model gets random parameters and BatchNorm statistics (no zeros, no tiny scales), and every prunable space is cut
to a random width, from half of it to all but one channel; all in float64. *Correct* means that

* the cut network equals the original with hard gates within {TOLERANCE:g} of the difference between two images
  (*error*, of the worst output), and the gates move every output by at least {MIN_EFFECT:g} of that unit (*effect*);
* `graph.macs` and `graph.params` equal torch's flop counter / 2 and the real parameters, at full width and cut;
* `graph.memory` at these widths is what a trace of the cut network counts;
* `graph.traffic` is the sum of the bytes of all tensors that the ops of the network really take and give;
* the cut network runs in train mode (tried up to {TRAINED_PARAMS // 10**6}M parameters).

*Wrong* means cut without complaint, but unequal; *vacuous* that the gates hardly move the output; *failed* that an
error or the time limit ended it. *s* are the seconds of `dmcp.trace`: both recordings, analysis and replay."""


def _totals(rows: Sequence[Row]) -> str:
    groups = [[row for row in rows if row[0].family == family] for family in FAMILIES]
    names = [*FAMILIES.values(), "**all**"]
    lines = [
        "| | models | correct | wrong | vacuous | failed | ≥ 99% prunable | ≥ 90% | ≥ 50% | median s | max s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, group in zip(names, [*groups, rows], strict=True):
        status = Counter(result.status for _, result in group)
        counts = [status[kind] for kind in ("correct", "wrong", "vacuous", "failed")]
        shares = [sum(100 * result.share >= least for _, result in group) for least in (99, 90, 50)]
        seconds = [result.seconds for _, result in group if result.seconds is not None]
        times = [f"{median(seconds):.1f}", f"{max(seconds):.1f}"] if seconds else ["-", "-"]
        lines.append("| " + " | ".join(map(str, [name, len(group), *counts, *shares, *times])) + " |")
    cpu = [result.cpu_seconds for _, result in rows if result.cpu_seconds is not None]
    note = f"\n\nProcessor seconds of the same: median {median(cpu):.1f}, at most {max(cpu):.1f}." if cpu else ""
    return "## Totals\n\n" + "\n".join(lines) + note


def _not_correct(rows: Iterable[Row]) -> str:
    lines = [
        f"* {entry.name}: {result.status}: {_line(result.detail)}"
        for entry, result in rows
        if result.status != "correct"
    ]
    return "## Not correct\n\n" + ("\n".join(lines) or "None.")


def _below(rows: Sequence[Row]) -> str:
    """Models with less to prune than the tracing study found, by the reason."""
    parts = ["## Prunable share more than a point below the tracing study's"]
    for kind in Shortfall:
        lines = [
            f"* {entry.name}: {_percent(result.share)} instead of {entry.share}%, {result.spaces} spaces instead of"
            f" {entry.spaces}; with `exact=False` {_percent(result.loose_share)}{_spaces(result.loose_spaces)}."
            f" Unprunable: {_reasons(result)}"
            for entry, result in rows
            if result.shortfall(entry) is kind
        ]
        parts.append(f"**{kind.value}**: {len(lines) or 'no'} models.")
        parts += ["\n".join(lines)] if lines else []
    return "\n\n".join(parts)


def _unknown(rows: Sequence[Row]) -> str:
    models: dict[str, list[str]] = {}
    for entry, result in rows:
        for op in result.unknown:
            models.setdefault(op, []).append(entry.name)
    lines = [f"* `{op}`: {', '.join(names)}" for op, names in sorted(models.items())]
    return "## Ops without a rule\n\n" + ("\n".join(lines) or "None.")


def _no_peer() -> str:
    why = "not asked for" if peer.installed() else "not installed"
    return (
        f"Torch-Pruning's column is left out: it was {why} (`pip install torch-pruning`, then `python -m zoo --peer`)."
    )


def _peer_totals(peers: Mapping[str, str]) -> str:
    counts = Counter(outcome.partition(":")[0] for outcome in peers.values())
    lines = [f"* {outcome}: {count}" for outcome, count in counts.most_common()]
    about = f"{(peer.__doc__ or '').strip().partition(chr(10))[2].strip()} {peer.LIMIT_SECONDS} s limit per model."
    return f"## Torch-Pruning {version('torch-pruning')} on the same models\n\n{about}\n\n" + "\n".join(lines)


def _models(rows: Iterable[Row], peers: Mapping[str, str]) -> str:
    cells = [_cells(entry, result) for entry, result in rows]
    if peers:
        cells = [row | {"Torch-Pruning": peers.get(row["model"], "-").partition(":")[0]} for row in cells]
    lines = [list(cells[0]), ["---"] * len(cells[0]), *(list(row.values()) for row in cells)] if cells else []
    return "## Models\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cells(entry: Entry, result: Result) -> dict[str, str]:
    """One row of the last table; in brackets what the tracing study found."""
    return {
        "model": entry.name,
        "px": str(entry.px),
        "params M": f"{entry.params / 1e6:.1f}",
        "spaces (study)": f"{result.spaces} ({entry.spaces})",
        "prunable % (study)": f"{100 * result.share:.1f} ({entry.share})",
        "MACs left %": f"{100 * result.macs[1] / result.macs[0]:.0f}" if result.macs[0] else "-",
        "error": _number(result.error, ".0e"),
        "effect": _number(result.effect, ".2f"),
        "bindings": str(len(result.bindings)),
        "train mode": result.train.partition(":")[0] or "-",
        "s": _number(result.seconds, ".1f"),
        "verdict": result.status,
    }


def _reasons(result: Result, most: int = 5) -> str:
    """The most frequent reasons why dims are unprunable, wherever in the model they are."""
    kinds: Counter[str] = Counter()
    for reason, count in result.unprunable.items():
        kinds[_PLACE.sub("", reason)] += count
    return "; ".join(f"{_line(kind)} ×{count}" for kind, count in kinds.most_common(most))


def _line(text: str) -> str:
    return " ".join(text.replace("|", "/").split())[:400]


def _percent(share: float | None) -> str:
    return "not measured" if share is None else f"{100 * share:.1f}%"


def _number(value: float | None, style: str) -> str:
    return "-" if value is None else format(value, style)


def _spaces(count: int) -> str:
    """Nothing where none were counted."""
    return f", {count} spaces" if count else ""
