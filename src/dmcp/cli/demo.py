"""The command `dmcp demo`: three other commands, one after the other, on data that are in the package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dmcp.exporting.export import ONNX, missing_packages
from dmcp.report.html import summary
from dmcp.runs.reading import read_run
from dmcp.runs.writing import free_folder

_PRUNE = (
    "prune --model digits:resnet --model-args width=48 --data digits --budget 50% --align 16 --baselines --device cpu "
    "--batch 64 --search-epochs 8 --epochs 12"
)


def demo(out: Path | None, prune_options: Sequence[str], run_command: Callable[[], object]) -> None:
    """Run `dmcp demo`: prune, export (which times the file beside that of the unpruned network) and report.

    run_command: runs the command in sys.argv. prune_options: override those above.
    """
    torch.set_num_threads(1)  # more threads would slow so small a network down
    run = out or free_folder("demo")
    page = run / "report.html"
    file = run / f"model{ONNX}"
    if missing_packages():
        file = run / "model.pt2"

    prune = _PRUNE.split()
    if any(option.split("=")[0] == "--budget" for option in prune_options):
        first = prune.index("--budget")
        del prune[first : first + 2]  # a repeated option would ask for a second network
    commands = [
        [*prune, *prune_options, "--out", str(run)],
        ["export", str(run), "--out", str(file), "--quiet"],
        ["report", str(run), "--out", str(page)],
    ]
    for words in commands:
        print("\n$ dmcp", *words, flush=True)
        sys.argv[1:] = words
        run_command()

    finished = read_run(run)
    if finished.exported:
        print(f"\n{summary(finished)} (in {finished.exported.runtime}, on one thread of this CPU). Open {page}")
