"""Halve the MACs of a small residual network on handwritten digits, and see that it is really faster.

Run it with `make demo`. It is three commands: prune, export (in which the file is timed beside that of the unpruned
network) and report. More options of prune can be added, the last one counts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from dmcp.cli.main import main
from dmcp.report.html import summary
from dmcp.runs.reading import read_run
from dmcp.runs.writing import free_folder

PRUNE = (
    "prune --model digits:resnet --model-args width=48 --data digits --budget 50% --align 16 --baselines --device cpu "
    "--batch 64 --search-epochs 8 --epochs 12"
)


def dmcp(*words: str) -> None:
    """A command, shown before it runs."""
    print("\n$ dmcp", *words, flush=True)
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    torch.set_num_threads(1)  # a net so small is slower on more threads
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=free_folder("demo"))
    given, more = parser.parse_known_args()
    page = given.out / "report.html"
    dmcp(*PRUNE.split(), *more, "--out", str(given.out))
    dmcp("export", str(given.out), "--quiet")
    dmcp("report", str(given.out), "--out", str(page))
    print(f"\n{summary(read_run(given.out))} (in onnxruntime, on one thread of this CPU). Open {page}")
