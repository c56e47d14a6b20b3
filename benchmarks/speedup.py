"""How much faster half the MACs are: searched widths, uniform ones by default, and uniform in multiples of 1.

python benchmarks/speedup.py                      # onnxruntime on one thread of the CPU, batch 1
python benchmarks/speedup.py --device cuda        # torch.compile in bfloat16, batch 256
python benchmarks/speedup.py --model checkpoints/*  # run folders: their networks and widths
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dmcp
from dmcp.exporting.export import open_file
from dmcp.exporting.timing import time_in_turns
from dmcp.models import rebuild, sample_shape

SEARCHED = Path(__file__).parent / "searched.json"  # widths at 50 % of the MACs: REPORT.md, judge


def in_onnxruntime(net: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    """The network as a session on one thread."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        torch.onnx.export(net, (x,), path, dynamo=False)
        return partial(open_file(path, threads=1).run, x)


def on_gpu(net: nn.Module, x: torch.Tensor) -> Callable[[], Any]:
    """The compiled network in bfloat16, channels last."""
    x = x.to("cuda", torch.bfloat16).to(memory_format=torch.channels_last)
    net = net.to("cuda", torch.bfloat16).to(memory_format=torch.channels_last)
    return torch.no_grad()(partial(torch.compile(net), x))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", default=["resnet18", "resnet50", "mobilenet_v2"])
    parser.add_argument("--batch", type=int)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    given = parser.parse_args()
    cpu = given.device == "cpu"
    make = in_onnxruntime if cpu else on_gpu
    searched = json.loads(SEARCHED.read_text())
    print("| network | unpruned, ms | searched | uniform | uniform, multiples of 1 | MACs, before / after |")
    print("|---|---|---|---|---|---|")
    for name in given.model:
        run = Path(name)
        settings = json.loads((run / "settings.json").read_text()) if run.is_dir() else {}
        model = rebuild(settings.get("model", name), settings.get("model_args", ()), settings.get("classes")).eval()
        x = torch.randn(given.batch or (1 if cpu else 256), *sample_shape(model))
        graph = dmcp.trace(model, x[:1])
        kept = json.loads((run / "widths.json").read_text())["widths"] if settings else searched[name]
        uniform = (dmcp.uniform(graph, "50%", align=align) for align in (None, 1))
        chosen = [graph.full, graph.widths(kept), *uniform]
        nets = [make(dmcp.cut(model, graph, widths).eval(), x) for widths in chosen]
        whole, *small = time_in_turns(nets, torch.device(given.device))
        fewer = graph.macs() / graph.macs(chosen[1])
        print(
            f"| {name} | {whole:.3g} | {' | '.join(f'{whole / it:.2f} ×' for it in small)} | {fewer:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
