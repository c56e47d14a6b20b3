"""bench: the times are those of the steps, the right epochs count, and tables and files say what was measured."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from click.testing import Result
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

from dmcp.bench import Measured, drawing, measure, measure_epochs, measure_pruned, measure_sampling, stopwatch
from dmcp.commands import bench as bench_commands
from dmcp.engine import Engine
from dmcp.errors import DmcpError, TrainingError
from dmcp.running import recipes
from dmcp.sampling import uniform
from dmcp.tracing.trace import trace

CPU = torch.device("cpu")
SHAPE = (3, 6, 6)
app = typer.Typer()
app.command()(bench_commands.bench)


class Clock:
    """Time that passes only where a test says so."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(stopwatch, "time", CLOCK)
    return CLOCK


class Tiny(nn.Module):
    """Two convolutions; a pass takes a second of the clock."""

    def __init__(self, width: int = 6, num_classes: int = 4) -> None:
        super().__init__()
        self.sample_shape = SHAPE
        self.conv1 = nn.Conv2d(3, width, 3)
        self.bn = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, 2 * width, 3)
        self.fc = nn.Linear(2 * width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        CLOCK.now += 1
        x = F.relu(self.conv2(F.relu(self.bn(self.conv1(x)))))
        return self.fc(x.mean(dim=(2, 3)))


class Slow:
    """Three batches, each of which takes a second, or in some epochs a thousand."""

    def __init__(self, slow: tuple[int, ...] = ()) -> None:
        self.slow, self.epoch = slow, 0
        self.batch = (torch.randn(4, *SHAPE), torch.randint(4, (4,)))

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        for _ in range(3):
            CLOCK.now += 1000 if self.epoch in self.slow else 1
            yield self.batch


def some(**changes: Any) -> Measured:
    """A measurement that nobody made."""
    made = Measured(
        model="m",
        model_args=("width=3",),
        batch=8,
        shape=SHAPE,
        device="NVIDIA X",
        torch="2",
        groups=10,
        macs=2_000_000,
        params=500,
        trace_s=0.5,
        plain_ms=10.0,
        stage1_ms=35.0,
        stage2_ms=8.0,
        search_ms=42.0,
        plain_gib=2.0,
        search_gib=3.0,
        first_s=60.0,
        engine={"precision": "bfloat16"},
    )
    return replace(made, **changes)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def rows_of(output: str, title: str) -> list[list[str]]:
    """The rows of the table below a title."""
    lines = output.split(title)[1].split("\n\n")[0].splitlines()
    return [line.split() for line in lines[3:]]


# measuring


def test_steps_take_as_long_as_their_passes(clock: Clock) -> None:
    parts: dict[str, float] = {}
    found = measure("tiny", Tiny(), 4, SHAPE, 4, CPU, Engine(), 3, 2, parts.__setitem__, ("width=6",))
    # stage 1: the largest, the smallest and two random sub-networks
    times = {"plain_ms": 1000, "stage1_ms": 4000, "stage2_ms": 1000, "search_ms": 5000}
    assert {name: getattr(found, name) for name in times} == times
    assert {name: parts[name] for name in times} == times and parts["trace_s"] == found.trace_s > 0
    assert (found.first_s, found.ratio) == (6, 5)
    # by hand: 16 places of the first convolution, 4 of the second
    assert found.macs == 16 * 6 * 27 + 4 * 12 * 54 + 12 * 4
    assert found.params == sum(parameter.numel() for parameter in Tiny().parameters())
    assert (found.model, found.model_args, found.batch, found.shape) == ("tiny", ("width=6",), 4, SHAPE)
    assert (found.device, found.torch, found.groups) == ("cpu", torch.__version__, 3)
    assert (found.plain_gib, found.search_gib, found.refused) == (None, None, "")
    assert found.engine["graphs"] == "False" and found.engine["precision"] == "float32"


def test_pruned_networks_are_measured_as_they_are_and_padded(clock: Clock) -> None:
    parts: dict[str, float] = {}
    found = measure_pruned("tiny", Tiny(), 4, SHAPE, 4, CPU, Engine(), "50%", 2, parts.__setitem__)
    graph = trace(Tiny(), torch.zeros(2, *SHAPE))
    assert found.macs == graph.macs(uniform(graph, "50%")) <= graph.macs() / 2
    times = {"whole_ms": 1000, "pruned_ms": 1000, "padded_ms": 1000}
    assert {name: getattr(found, name) for name in times} == parts == times
    assert found.engine["precision"] == "float32" and (found.budget, found.batch) == ("50%", 4)
    round_one = measure_pruned("tiny", Tiny(), 4, SHAPE, 4, CPU, Engine(), "100%", 2)
    assert round_one.padded_ms is None


def test_what_cannot_be_measured_is_refused() -> None:
    for batch, groups, rounds in ((0, 10, 1), (4, 1, 1), (4, 10, 0)):
        with pytest.raises(DmcpError, match="at least 1 and 2 groups"):
            measure("tiny", Tiny(), batch, SHAPE, 4, CPU, Engine(), groups, rounds)
    graph = trace(Tiny(), torch.zeros(2, *SHAPE))
    with pytest.raises(DmcpError, match="at least one structure"):
        measure_sampling(graph, 0)
    with pytest.raises(DmcpError, match="at least 2"):
        measure_epochs("tiny", Tiny(), graph, Slow(), 4, Engine(), epochs=1)


def test_first_epochs_do_not_count_and_the_model_stays(clock: Clock) -> None:
    model = Tiny()
    before = copy.deepcopy(model.state_dict())
    loader = Slow((0, 3))  # the first one of training and of the warm-up, and of the rest of the search
    graph = trace(model, torch.zeros(2, *SHAPE))
    found = measure_epochs("tiny", model, graph, loader, 4, Engine(), 3, 3, "slow", ("a=1",))
    assert (found.train_s, found.warmup_s, found.search_s) == (3 * 2, 3 * 5, 3 * 6)  # a batch, and the passes with it
    assert (found.steps, found.batch, found.data, found.model_args) == (3, 4, "slow", ("a=1",))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_sampling_draws_all_structures_on_one_core(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = trace(Tiny(), torch.zeros(2, *SHAPE))
    seen: list[tuple[int, int]] = []
    real = drawing.spent_shares

    def counted(budget: Any, graph: Any, widths: Tensor) -> Tensor:
        seen.append((len(widths), torch.get_num_threads()))
        shares = real(budget, graph, widths)
        assert 0.5 < shares.mean() < 1.5  # drawn around the budget, not at an end
        return shares

    monkeypatch.setattr(drawing, "spent_shares", counted)
    torch.set_num_threads(2)
    try:
        start = time.perf_counter()
        found = measure_sampling(graph, 100_000, 3, "tiny")
        wall = time.perf_counter() - start
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert sum(count for count, _ in seen[1:]) == 100_000  # the first call is not counted
    assert {threads for _, threads in seen} == {1}
    assert 0 < found.seconds < wall
    assert (found.structures, found.spaces, found.model) == (100_000, 2, "tiny")


# the command


def test_tables_and_file_of_two_networks_at_two_batches(tmp_path: Path) -> None:
    file = tmp_path / "new" / "bench.json"
    asked = ["--model", "test_bench:Tiny", "--also", "test_bench:Tiny width=12 num_classes=7", "--batch", "2"]
    result = run(*asked, "--device", "cpu", "--batch", "8", "--rounds", "1", "--sampling", "500", "--json", str(file))
    assert result.exit_code == 0, result.exception
    data = json.loads(file.read_text())
    steps = data["steps"]
    wide = ["width=12", "num_classes=7"]
    assert [(it["model_args"], it["batch"]) for it in steps] == [([], 2), ([], 8), (wide, 2), (wide, 8)]
    assert steps[2]["macs"] == 16 * 12 * 27 + 4 * 24 * 108 + 24 * 7
    assert data["machine"]["torch"] == torch.__version__ and data["machine"]["device"] == "cpu"
    assert [it["structures"] for it in data["sampling"]] == [500, 500] and data["epochs"] == []
    growth = rows_of(result.stdout, "Growth: ")
    assert growth[0][-6:] == [*["1.00"] * 5, "-"]
    work = 8 * steps[3]["macs"] / (2 * steps[0]["macs"])
    shares = [work, *(steps[3][name] / steps[0][name] for name in ("plain_ms", "stage1_ms", "stage2_ms", "search_ms"))]
    assert growth[3] == ["test_bench:Tiny", *wide, "8", *(f"{share:.2f}" for share in shares), "-"]
    assert "test_bench:Tiny width=12 num_classes=7, batch 8: search_ms" in result.stderr
    assert "search_ms" not in result.stdout and len(rows_of(result.stdout, "Structures drawn")) == 2


def test_epochs_on_data_are_measured_for_the_network_of_the_data(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for part in ("train", "test"):
        images = draw.integers(256, size=(20, 7, 7, 3), dtype=np.uint8)
        np.savez(tmp_path / f"{part}-0.npz", images=images, labels=np.arange(20) % 5)
    asked = ["--model", "test_bench:Tiny", "--data", str(tmp_path), "--batch", "8", "--epochs", "2", "--rounds", "1"]
    result = run(*asked, "--sampling", "0", "--quiet", "--budget", "50%", "--out", str(tmp_path / "bench.json"))
    assert result.exit_code == 0, result.exception
    assert result.stderr == ""
    data = json.loads((tmp_path / "bench.json").read_text())
    (epoch,) = data["epochs"]
    assert (epoch["steps"], epoch["data"]) == (2, str(tmp_path))
    (step,) = data["steps"]
    assert step["shape"] == [3, 7, 7] and step["params"] == sum(p.numel() for p in Tiny(num_classes=5).parameters())
    (cut,) = data["pruned"]
    (row,) = rows_of(result.stdout, "One training step")
    assert row[:3] == ["test_bench:Tiny", "8", "50%"] and float(row[5]) == pytest.approx(cut["pruned_ms"], 0.01)
    (row,) = rows_of(result.stdout, "One epoch")
    assert row[:4] == ["test_bench:Tiny", "8", str(tmp_path), "2"]
    assert float(row[4]) == pytest.approx(epoch["train_s"], 0.01) and data["sampling"] == []


def test_a_budget_that_cannot_be_met_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_commands, "measure", lambda *arguments: pytest.fail("it is measured"))
    result = run("--model", "test_bench:Tiny", "--batch", "2", "--budget", "half", "--quiet")
    assert isinstance(result.exception, DmcpError) and "half" in str(result.exception)


def test_numbers_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made = iter([some(), some(batch=16, search_gib=6.0, plain_ms=25.0, refused="it asks the GPU for a number")])
    monkeypatch.setattr(bench_commands, "measure", lambda *arguments: next(made))
    result = run("--model", "test_bench:Tiny", "--batch", "8", "--batch", "16", "--sampling", "0", "--quiet")
    assert result.exit_code == 0, result.exception
    times, sizes, growth = (rows_of(result.stdout, title) for title in ("One step", "Memory", "Growth"))
    assert times[0] == ["m", "width=3", "8", "10.0", "35.0", "8.00", "42.0", "3.50", "0.80", "4.20"]
    assert sizes[1] == ["m", "width=3", "16", "2.00", "0.000500", "2.00", "6.00", "3.00", "0.500", "60.0"]
    assert growth[1] == ["m", "width=3", "16", "2.00", "2.50", "1.00", "1.00", "1.00", "2.00"]
    assert "Note: m width=3, batch 16: not replayed as a CUDA graph: it asks the GPU for a number" in result.stdout
    assert "One epoch" not in result.stdout and "Structures" not in result.stdout


def test_what_was_measured_is_kept_when_memory_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def measured(name: str, net: nn.Module, batch: int, *others: Any) -> Measured:
        if batch > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried much.\nmore lines")
        return some(batch=batch)

    monkeypatch.setattr(bench_commands, "measure", measured)
    result = run("--model", "test_bench:Tiny", "--batch", "8", "--batch", "16", "--json", str(tmp_path / "a.json"))
    assert isinstance(result.exception, DmcpError)
    assert str(result.exception).endswith("batch 16: too large for the memory: CUDA out of memory. Tried much.")
    assert [it["batch"] for it in json.loads((tmp_path / "a.json").read_text())["steps"]] == [8]


def test_recipes_can_read_a_measurement() -> None:
    plain = json.loads(json.dumps(some(batch=256, model="resnet18", model_args=()).to_json()))
    assert (plain["stage1_ratio"], plain["stage2_ratio"], plain["search_ratio"]) == (3.5, 0.8, 4.2)
    rates = [phase.rate for phase in recipes.phases(recipes.find("imagenet_resnet18_1040m"), plain)]
    assert rates == pytest.approx([1000 * 256 / ms for ms in (35.0, 42.0, 10.0)])
    assert (plain["model"], plain["model_args"]) == ("resnet18", [])


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ([], "--model is missing"),
        (["--model", "resnet81"], "There is no 'resnet81'"),
        (["--model", "test_bench:Tiny", "--also", "resnet81"], "There is no 'resnet81'"),  # before anything is measured
        (["--model", "test_bench:Tiny", "--also", "test_bench:Tiny width"], "not of the form name=value"),
        (["--model", "test_bench:Tiny", "--input", "3x1x1"], "cannot take a sample"),
        (["--model", "test_bench:Tiny", "--device", "tpu"], "--device"),
        (["--model", "test_bench:Tiny", "--groups", "1"], "2 groups"),
        (["--model", "digits:resnet", "--data", "digits", "--batch", "5000"], "larger than the data"),
    ],
)
def test_mistakes_are_refused_in_a_sentence(asked: list[str], says: str) -> None:
    result = run(*asked)
    assert isinstance(result.exception, DmcpError)
    assert says in str(result.exception) and result.stdout == ""


@pytest.mark.parametrize("wrong", [("batch", "0"), ("rounds", "0"), ("epochs", "1"), ("classes", "1")])
def test_counts_out_of_range_are_refused(wrong: tuple[str, str]) -> None:
    result = run("--model", "test_bench:Tiny", f"--{wrong[0]}", wrong[1])
    assert result.exit_code == 2 and f"--{wrong[0]}" in result.stderr


def test_only_classifiers_are_measured() -> None:
    result = run("--model", "torch.nn:Identity")
    assert isinstance(result.exception, DmcpError) and "classifier" in str(result.exception)
    assert not isinstance(result.exception, TrainingError)
