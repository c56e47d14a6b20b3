"""MACs and traffic that are left with uniform widths at half of either, and MACs for each byte.

python benchmarks/traffic.py
"""

from __future__ import annotations

import torch
from torchvision.models import get_model

import dmcp
from dmcp.units import show_bytes, table

NETWORKS = ("resnet18", "resnet50", "mobilenet_v2")
BUDGETS = ("50%", "traffic:50%")


def main() -> None:
    """Print a row for each network and budget; nothing is trained or timed."""
    rows = [["network", "budget", "MACs left", "traffic left", "traffic", "MACs per byte"]]
    for name in NETWORKS:
        model = get_model(name, weights=None)
        graph = dmcp.trace(model, torch.zeros(1, 3, 224, 224))
        for budget in ("unpruned", *BUDGETS):
            widths = graph.full if budget == "unpruned" else dmcp.uniform(graph, budget)
            macs = graph.macs(widths)
            traffic = graph.traffic(widths)
            left = [f"{macs / graph.macs():.1%}", f"{traffic / graph.traffic():.1%}"]
            rows.append([name, budget, *left, show_bytes(traffic), f"{macs / traffic:.1f}"])
    print(table(rows))


if __name__ == "__main__":
    main()
