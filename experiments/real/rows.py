"""What pruning cost a network of other people, as lines of JSON."""

from __future__ import annotations

import json
from typing import Any

import dmcp


def write_rows(result: dmcp.PruneResult, **facts: Any) -> None:
    """Print one line for each network of a result, with its share of the unpruned network's MACs and parameters."""
    widths = {budget: dict(each.widths) for budget, each in (result.by_budget or {"": result}).items()}
    for row in result.rows:
        line = {
            "name": row.name,
            "macs": row.macs / result.graph.macs(),
            "params": row.params / result.graph.params(),
            "score": row.accuracy,
            "train_loss": row.train_loss,
        }
        print(json.dumps(facts | line), flush=True)
    print(json.dumps(facts | {"name": "widths", "widths": widths}), flush=True)
