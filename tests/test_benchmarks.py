"""The benchmark script: with forward passes as the clock, every figure is the number of passes that it should be."""

import json
import runpy
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import Tensor, nn

MAIN = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "bench.py"))["main"]


class Tiny(nn.Sequential):
    passes = 0

    def __init__(self, width: int = 6, num_classes: int = 10) -> None:
        head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))
        super().__init__(nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 8, 3), *head)

    def forward(self, x: Tensor) -> Tensor:
        Tiny.passes += 1
        return super().forward(x)


def test_a_second_a_pass(tmp_path: Path) -> None:
    MAIN.__globals__["time"] = SimpleNamespace(perf_counter=lambda: Tiny.passes + 1e-9 * time.perf_counter())
    own = ["--model", "test_benchmarks:Tiny", "test_benchmarks:Tiny width=5", "--data", "digits", "--batch", "700"]
    how = ["--device", "cpu", "--groups", "3", "--rounds", "1", "--epochs", "2", "--budget", "50%", "--sampling", "9"]
    MAIN([*own, *how, "--json", str(tmp_path / "new.json")])
    found = json.loads((tmp_path / "new.json").read_text())
    step, small, epoch, sample = (found[kind][0] for kind in ("steps", "pruned", "epochs", "sampling"))
    times = {"plain_ms": 1000, "stage1_ms": 4000, "stage2_ms": 1000, "search_ms": 5000, "first_s": 6, "search_ratio": 5}
    assert {name: step[name] for name in times} == pytest.approx(times)  # stage 1: largest, smallest, two random ones
    assert [small[name] for name in ("whole_ms", "pruned_ms")] == pytest.approx([1000] * 2)
    assert [epoch[name] for name in ("steps", "train_s", "warmup_s", "search_s")] == pytest.approx([2, 2, 8, 10])
    waits = [epoch[name] for name in ("loader_s", "train_waits_ms", "search_waits_ms")]
    assert waits == pytest.approx([0] * 3, abs=1e-3) and epoch["held"].endswith("nothing")
    assert (sample["spaces"], sample["structures"], step["batch"]) == (2, 9, 700)
    assert found["steps"][1]["macs"] == 36 * 5 * 9 + 16 * 8 * 45 + 80 >= 2 * found["pruned"][1]["macs"]
