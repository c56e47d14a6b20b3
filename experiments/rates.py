"""Which optimizer, at which rate, for fine-tuning: networks of other people, cut to half their MACs, on held-out data.

    python -m experiments.rates --sources FOLDER                       # all rows that are not there yet
    python -m experiments.rates --sources FOLDER --networks lprnet --lengths 100
    python -m experiments.rates --table                                # what is recorded

FOLDER has the repositories that foreign.py names. A row is one training: the loss, and for classifiers the accuracy, on
data that neither trained nor is the test set of any other experiment. Each row is printed and recorded as it comes.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dmcp

sys.path.insert(0, str(Path(__file__).parent))
from foreign import NETWORKS, Batch, Foreign

RESULTS = Path(__file__).parent / "results" / "rates.jsonl"
WITHOUT_NORMS = ("lprnet", "imdn-rtc", "rfdn", "carn-m")
USUAL = (*WITHOUT_NORMS, "dncnn", "resnet20", "resnet56")
RATES = {"sgd": (3.2, 1.6, 0.8, 0.4, 0.2, 0.1, 0.025), "adamw": (3e-3, 1e-3, 3e-4, 1e-4)}
EPOCHS = 20
QUIET = dmcp.Runtime(progress=False)


def on(device: str, batches: list[Batch]) -> list[Batch]:
    return [(x.to(device), y.to(device)) for x, y in batches]


class Batches:
    """Batches that are drawn once: each epoch has its own."""

    def __init__(self, batches: list[Batch], epochs: int) -> None:
        self.batches, self.steps, self.epoch = batches, len(batches) // epochs, 0

    def __len__(self) -> int:
        return self.steps

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        return iter(self.batches[self.epoch * self.steps : (self.epoch + 1) * self.steps])


@torch.no_grad()
def measure(foreign: Foreign, network: nn.Module, batches: list[Batch]) -> dict[str, float]:
    """The mean loss over batches, and the accuracy in % where outputs are scores of classes."""
    network.eval()
    outputs = [network(x) for x, _ in batches]
    losses = [float(foreign.loss(output, batch)) for output, batch in zip(outputs, batches, strict=True)]
    found = {"loss": sum(losses) / len(losses)}
    if outputs[0].ndim == 2:
        right = [(output.argmax(1) == y).float().mean().item() for output, (_, y) in zip(outputs, batches, strict=True)]
        found["accuracy"] = 100 * sum(right) / len(right)
    return found


def cut_in_half(foreign: Foreign, train: list[Batch]) -> nn.Module:
    """The network with uniform widths at half its MACs, and the channels that matter most."""
    graph = dmcp.trace(foreign.model, train[0][0][:2])
    scores = dmcp.importance(foreign.model, graph, [(x[:2], y[:2]) for x, y in train[:32]])
    small = dmcp.cut(foreign.model, graph, dmcp.uniform(graph, "50%"), by=scores)
    if foreign.recalibrates:
        dmcp.recalibrate(small, train)
    return small


def tune(foreign: Foreign, small: nn.Module, train: list[Batch], optimizer: str, rate: float) -> nn.Module:
    """A copy of the network, trained as `prune` would."""
    network = copy.deepcopy(small)
    is_classifier = foreign.unit == "%"
    loss: Any = None if foreign.model.__class__.__name__ == "ResNet" else foreign.loss
    task = dmcp.Task(loss=loss)
    config = dmcp.TrainConfig(epochs=EPOCHS, lr=rate, weight_decay=5e-4)
    if optimizer == "adamw":
        task = dmcp.Task(loss=loss, optimizer=torch.optim.AdamW)
        config = dmcp.TrainConfig(epochs=EPOCHS, lr=rate, weight_decay=5e-4, reference_batch=None)
    teacher = foreign.model if is_classifier else None
    dmcp.train(network, Batches(train, EPOCHS), config, task=task, teacher=teacher, runtime=QUIET)
    return network


def run(name: str, foreign: Foreign, lengths: list[int], batch: int, device: str, known: set[str], out: Path) -> None:
    """All rows of one network that are not known."""
    assert foreign.split is not None
    foreign.model.eval().to(device)
    draw, draw_held_out = foreign.split
    size = batch or foreign.batch
    held_out = on(device, draw_held_out(16, 64 if size > 4 else 8, 7))

    def record(row: dict[str, Any]) -> None:
        line = json.dumps(row)
        print(line, flush=True)
        with out.open("a") as file:
            file.write(line + "\n")

    for steps in lengths:
        jobs = [(optimizer, rate) for optimizer, rates in RATES.items() for rate in rates]
        keys = {job: f"{name}/{steps}/{size}/{job[0]}/{job[1]:g}" for job in jobs}
        if known.issuperset(keys.values()):
            continue
        train = on(device, draw(steps, size, 0))
        small = cut_in_half(foreign, train)
        first = {"uncut": measure(foreign, foreign.model, held_out), "cut": measure(foreign, small, held_out)}
        for (optimizer, rate), key in keys.items():
            if key in known:
                continue
            begin = time.time()
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    found = measure(foreign, tune(foreign, small, train, optimizer, rate), held_out)
            except dmcp.TrainingError as error:
                found = {"error": str(error).split(":")[0]}
            seconds = round(time.time() - begin, 1)
            record(
                {"key": key, "network": name, "steps": steps, "batch": size, "optimizer": optimizer, "rate": rate}
                | first
                | {"tuned": found, "seconds": seconds, "device": device}
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sources", type=Path)
    parser.add_argument("--networks", nargs="+", default=list(USUAL), choices=list(NETWORKS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[100, 400], help="steps of a training")
    parser.add_argument("--batch", type=int, default=0, help="default: that of foreign.py")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()

    rows = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    if options.table:
        print(table(rows))
        return
    torch.set_flush_denormal(True)  # three times as fast where a network makes tiny numbers, as LPRNet does
    device = "cuda" if torch.cuda.is_available() else "cpu"
    known = {row["key"] for row in rows}
    for name in options.networks:
        run(name, NETWORKS[name](options.sources), options.lengths, options.batch, device, known, options.results)


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each network and length: the held-out loss (or the accuracy) by optimizer and rate."""
    jobs = [(optimizer, rate) for optimizer, rates in RATES.items() for rate in rates]
    lines = ["| network, steps | uncut | cut | " + " | ".join(f"{o} {r:g}" for o, r in jobs) + " |"]
    lines.append("|---" * (len(jobs) + 3) + "|")
    groups: dict[tuple[Any, ...], dict[Any, Any]] = {}
    for row in rows:
        cells = groups.setdefault((row["network"], row["steps"], row["batch"]), {})
        cells["uncut"], cells["cut"] = row["uncut"], row["cut"]
        cells[row["optimizer"], row["rate"]] = row["tuned"]
    for (network, steps, _), cells in groups.items():
        shown = [show(cells.get(key, {})) for key in ("uncut", "cut", *jobs)]
        lines.append(f"| {network}, {steps} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def show(found: dict[str, Any]) -> str:
    if "error" in found:
        return "diverged"
    if "accuracy" in found:
        return f"{found['accuracy']:.1f} %"
    return f"{found['loss']:.3g}" if found else ""


if __name__ == "__main__":
    main()
