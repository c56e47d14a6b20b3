"""Halve the MACs of a small residual network on handwritten digits: search, cut, retrain, compare.

Run it with `make demo`. It is `dmcp prune` with the options below; more of them can be added, the last one counts.
"""

from __future__ import annotations

import sys

import torch

from dmcp.cli.main import main

OPTIONS = (
    "prune --model digits:resnet --data digits --budget 50% --baselines --device cpu "
    "--batch 64 --search-epochs 30 --epochs 60"
)

if __name__ == "__main__":
    torch.set_num_threads(1)  # a net so small is slower on more threads
    sys.argv[1:] = [*OPTIONS.split(), *sys.argv[1:]]
    print("dmcp", *sys.argv[1:], flush=True)
    main()
