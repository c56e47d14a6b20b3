"""How much faster half the MACs are: searched widths, uniform ones by default, and uniform in multiples of 1.

python benchmarks/speedup.py                      # onnxruntime on one thread of the CPU, batch 1
python benchmarks/speedup.py --device cuda        # torch.compile in bfloat16, batch 256
python benchmarks/speedup.py --model checkpoints/*  # run folders: their networks and widths
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dmcp
from dmcp.exporting.export import open_file
from dmcp.exporting.timing import time_in_turns
from dmcp.models import rebuild, sample_shape

SEARCHED = Path(__file__).parent / "searched.json"  # widths at 50% of the MACs: REPORT.md, judge
BATCH = {"cpu": 1, "cuda": 256}  # by default


def in_onnxruntime(net: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    """Return a pass of the network in onnxruntime, on one thread."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        torch.onnx.export(net, (x,), path, dynamo=False)
        return partial(open_file(path, threads=1).run, x)


def on_gpu(net: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    """Return a pass of the compiled network in bfloat16, channels last."""
    x = x.to("cuda", torch.bfloat16).to(memory_format=torch.channels_last)
    net = net.to("cuda", torch.bfloat16).to(memory_format=torch.channels_last)
    return torch.no_grad()(partial(torch.compile(net), x))


def read_network(name: str) -> tuple[nn.Module, Sequence[int] | Mapping[str, int]]:
    """Build a network by its name or that of a run folder, with the widths that were searched for it."""
    run = Path(name)
    if not run.is_dir():
        return rebuild(name, (), None), json.loads(SEARCHED.read_text())[name]
    settings = json.loads((run / "settings.json").read_text())
    model = rebuild(settings["model"], settings.get("model_args", ()), settings.get("classes"))
    return model, json.loads((run / "widths.json").read_text())["widths"]


def measure(name: str, device: str, batch: int) -> str:
    """Time a network unpruned and cut in three ways, and return the row of the table."""
    model, searched_widths = read_network(name)
    model.eval()
    x = torch.randn(batch, *sample_shape(model))
    graph = dmcp.trace(model, x[:1])
    searched = graph.widths(searched_widths)
    uniform = dmcp.uniform(graph, "50%")
    unaligned = dmcp.uniform(graph, "50%", align=1)

    in_runtime = in_onnxruntime if device == "cpu" else on_gpu
    calls = []
    for widths in (graph.full, searched, uniform, unaligned):
        small = dmcp.cut(model, graph, widths).eval()
        calls.append(in_runtime(small, x))
    unpruned_ms, *cut_ms = time_in_turns(calls, torch.device(device))

    speedups = [f"{unpruned_ms / ms:.2f} ×" for ms in cut_ms]
    macs_ratio = graph.macs() / graph.macs(searched)
    return f"| {name} | {unpruned_ms:.3g} | {' | '.join(speedups)} | {macs_ratio:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", nargs="+", default=["resnet18", "resnet50", "mobilenet_v2"], help="names or run folders"
    )
    parser.add_argument("--batch", type=int, help="images in a batch; default: 1, on a GPU 256")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    options = parser.parse_args()
    print("| network | unpruned, ms | searched | uniform | uniform, multiples of 1 | MACs, before / after |")
    print("|---|---|---|---|---|---|")
    for name in options.model:
        print(measure(name, options.device, options.batch or BATCH[options.device]), flush=True)


if __name__ == "__main__":
    main()
