"""DMCP against uniform and random widths on CIFAR-10: one job per process, so that several share a GPU.

    python examples/cifar10.py search --seed 0 --out runs/cifar/s0        # 30 epochs of search, then expected sampling
    python examples/cifar10.py train --widths runs/cifar/s0/widths.json --seed 1 --out runs/cifar/s0-t1
    python examples/cifar10.py train --control uniform --seed 1 --out runs/cifar/uniform-1
    python examples/cifar10.py table runs/cifar

`search` writes widths.json, `train` trains them from scratch and writes result.json with the accuracy of the last
epoch, `table` prints mean and deviation per kind.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from dmcp import budget, models, sampling, training
from dmcp.cutting import cut, reinitialize
from dmcp.data import datasets, loaders
from dmcp.searching import config as config_module
from dmcp.searching import search as searching
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.trace import trace
from dmcp.widths import Widths


def options() -> argparse.Namespace:
    """What a person types."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=["search", "train", "table"])
    parser.add_argument("folder", nargs="?", type=Path, help="of results, for `table`")
    parser.add_argument("--out", type=Path, default=Path("runs/cifar"))
    parser.add_argument("--model", default="cifar:resnet20")
    parser.add_argument("--data", default="data/cifar10")
    parser.add_argument("--budget", default="50%")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--search-epochs", type=int, default=30)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--widths", type=Path, help="of a search; without it a control is trained")
    parser.add_argument("--control", choices=["full", "uniform", "random"], default="full")
    parser.add_argument("--images", type=int, help="use only the first so many, for a rehearsal")
    return parser.parse_args()


def prepare(args: argparse.Namespace) -> tuple[torch.nn.Module, ChannelGraph, datasets.DataSets, str]:
    """Model, graph and data on the best device there is."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    sets = datasets.load(args.data)
    if args.images:
        first = torch.arange(args.images)
        sets = datasets.DataSets(sets.train.subset(first), sets.test.subset(first), sets.classes, sets.shape)
    model = models.build(args.model, num_classes=sets.classes).to(device)
    return model, trace(model, torch.zeros(1, *sets.shape, device=device)), sets, device


def run_search(args: argparse.Namespace) -> None:
    """Search, sample by expectation, write the widths and the log."""
    model, graph, sets, device = prepare(args)
    loader = loaders.make_loader(sets.train, args.batch, train=True, seed=args.seed, device=device, channels_last=True)
    net = Supernet(model, graph)
    config = config_module.SearchConfig(
        budget=args.budget,
        epochs=args.search_epochs,
        reference_batch=args.batch,
        seed=args.seed,
    )
    start = time.time()
    result = searching.search(net, loader, config)
    widths = sampling.expected(result)
    last = result.log[-1]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "widths.json").write_text(json.dumps(widths.to_json()))
    wish = [round(float(width), 2) for width in sampling.expected_widths(result)]
    report = {
        "seconds": time.time() - start,
        "ratio_before_repair": last.ratios,
        "macs": graph.macs(widths),
        "share": graph.macs(widths) / graph.macs(),
        "expected_widths": wish,
        "widths": dict(widths),
    }
    (args.out / "search.json").write_text(json.dumps(report))
    print(json.dumps(report), flush=True)


def seeded(seed: int) -> torch.Generator:
    """Random numbers that depend on the seed only."""
    return torch.Generator().manual_seed(seed)


def run_train(args: argparse.Namespace) -> None:
    """Train widths from scratch, evaluate once at the end."""
    model, graph, sets, device = prepare(args)
    limit = budget.parse(args.budget, graph)
    kind = "dmcp" if args.widths else args.control
    widths = {
        "dmcp": lambda: Widths.from_json(json.loads(args.widths.read_text())),
        "full": lambda: graph.full,
        "uniform": lambda: sampling.uniform(graph, limit),
        "random": lambda: sampling.random_widths(graph, limit, seeded(args.seed), tolerance=0.95),
    }[kind]()
    small = cut(model, graph, widths)
    reinitialize(small, generator=seeded(args.seed))
    loader = loaders.make_loader(sets.train, args.batch, train=True, seed=args.seed, device=device, channels_last=True)
    config = training.TrainConfig(
        epochs=args.epochs,
        lr=0.4,
        warmup_lr=0.1,
        reference_batch=None,
        weight_decay=5e-4,
        seed=args.seed,
    )
    start = time.time()
    training.train(small, loader, config)
    seconds = time.time() - start
    test = loaders.make_loader(sets.test, 1000 if not args.images else args.images, train=False, device=device)
    accuracy = training.evaluate(small, test)
    report = {
        "kind": kind,
        "widths_from": str(args.widths) if args.widths else None,
        "seed": args.seed,
        "accuracy": accuracy,
        "macs": graph.macs(widths),
        "params": graph.params(widths),
        "share": graph.macs(widths) / graph.macs(),
        "seconds": seconds,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "result.json").write_text(json.dumps(report))
    print(json.dumps(report), flush=True)


def table(folder: Path) -> None:
    """Mean and deviation of the last epoch's accuracy, per kind."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("**/result.json"))]
    for kind in ("full", "uniform", "random", "dmcp"):
        found = [100 * result["accuracy"] for result in results if result["kind"] == kind]
        shares = [result["share"] for result in results if result["kind"] == kind]
        if found:
            spread = statistics.stdev(found) if len(found) > 1 else float("nan")
            cost = f"macs {min(shares):.1%} to {max(shares):.1%}"
            print(f"{kind:<8} {statistics.mean(found):.2f} ± {spread:.2f} ({len(found)} runs), {cost}")


def main() -> None:
    """One job."""
    args = options()
    if args.job == "table":
        table(args.folder or args.out)
    else:
        (run_search if args.job == "search" else run_train)(args)


if __name__ == "__main__":
    main()
