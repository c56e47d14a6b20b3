"""Halve the MACs of a small residual network on handwritten digits, and measure how much faster it is.

Run it with `make demo`. It runs three commands: prune, export (which times the file beside that of the unpruned
network) and report. You can add options of prune; they override those below.
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
    """Print a command, then run it."""
    print("\n$ dmcp", *words, flush=True)
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise


if __name__ == "__main__":
    torch.set_num_threads(1)  # more threads would slow so small a network down
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=free_folder("demo"))
    arguments, prune_options = parser.parse_known_args()
    run = arguments.out
    page = run / "report.html"
    dmcp(*PRUNE.split(), *prune_options, "--out", str(run))
    dmcp("export", str(run), "--quiet")
    dmcp("report", str(run), "--out", str(page))
    print(f"\n{summary(read_run(run))} (in onnxruntime, on one thread of this CPU). Open {page}")
