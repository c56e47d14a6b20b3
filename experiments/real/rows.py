"""What pruning cost a network of other people, as lines of JSON that docs/results.md is made from."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import dmcp

RESULTS = Path(__file__).parents[1] / "results" / "real.jsonl"


def is_recorded(file: Path, **facts: Any) -> bool:
    """Whether there are rows with these facts, so that a script that was stopped goes on with what is missing."""
    if not file.exists():
        return False
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return any(facts.items() <= line.items() for line in lines)


def write_rows(
    file: Path,
    result: dmcp.PruneResult,
    scores: dict[str, Any] | None = None,
    *,
    save: Path | None = None,
    **facts: Any,
) -> None:
    """Print and record one row for each network of a result.

    scores: more scores, by budget; those of the unpruned network have the name "original".
    save: a folder that the pruned networks are saved in.
    """
    scores = scores or {}
    command = shlex.join(["python", "-m", sys.modules["__main__"].__spec__.name, *sys.argv[1:]])
    by_budget = result.by_budget or {str(facts.get("budget", "")): result}
    for budget, pruned in by_budget.items():
        if save is not None:
            name = "-".join(str(facts[key]) for key in ("network", "method", "epochs", "seed"))
            dmcp.save(pruned.model, pruned.widths, save / f"{name}-{budget.rstrip('%')}")
        for row in pruned.rows:
            line = facts | {
                "budget": budget,
                "row": row.name,
                "macs": row.macs,
                "params": row.params,
                "macs_share": row.macs / result.graph.macs(),
                "score": row.accuracy,
                "train_loss": row.train_loss,
            }
            if row.name == "original":
                line |= scores.get("original", {})
            if row.name == facts["method"]:
                line |= scores.get(budget, {}) | {"widths": dict(pruned.widths)}
            write_line(file, line | {"command": command})


def write_line(file: Path, line: dict[str, Any]) -> None:
    """Print and record one row."""
    text = json.dumps(line)
    print(text, flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a") as lines:
        lines.write(text + "\n")
