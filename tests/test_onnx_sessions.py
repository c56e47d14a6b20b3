"""Latency in onnxruntime: what is timed there is the network. Most of it needs the packages of the extra `export`."""

from __future__ import annotations

import collections
import importlib.util
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_cli import Capture, run
from test_latency import Device, searched, table, traced
from torch import Tensor, nn

import dmcp
from dmcp import exporting
from dmcp.errors import FileError
from dmcp.latency import measure
from dmcp.latency import measure as measure_module
from dmcp.latency.measure import (
    choose,
    clock_of,
    describe,
    device_name,
    measure_latency,
    open_all,
    pass_times,
    turn_times,
)
from dmcp.latency.table import Latency
from dmcp.models import build

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
needs_onnx = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in PACKAGES), reason="NOT TESTED: pip install torch-dmcp[export]"
)
DIGITS = torch.zeros(1, 1, 8, 8)
IN_ONNX = {"runtime": "onnx", "onnxruntime": "1.99.0", "place": "cpu"}


def digits(width: int = 16) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        return build("digits:resnet", width=width).eval()


def lacking(patch: pytest.MonkeyPatch, *missing: str) -> None:
    find = importlib.util.find_spec
    patch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in missing else find(name, *more))


# without the packages


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "cuda"}, "on the CPU in float32 only, not on cuda in float32"),
        ({"dtype": "bfloat16"}, "on the CPU in float32 only, not on cpu in bfloat16"),
        ({"measure": Device()}, "leave one of the two out"),
        ({"runtime": "tensorrt"}, "must be torch or onnx, not 'tensorrt'"),
    ],
)
def test_what_onnxruntime_does_not_measure_is_refused_first(
    options: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure_module, "trace", lambda *_: pytest.fail("it began"))
    with pytest.raises(dmcp.DmcpError, match=words):
        measure_latency(traced()[0], torch.zeros(2, 3, 16, 16), **{"runtime": "onnx"} | options)


@pytest.mark.parametrize(
    ("missing", "words"),
    [(PACKAGES, "onnx, onnxscript, onnxruntime are not installed"), (PACKAGES[2:], "onnxruntime is not installed")],
)
def test_missing_packages_are_named_at_once(
    missing: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    there = {name: object() for name in PACKAGES if name not in missing}
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *more: there.get(name) if name in PACKAGES else find(name, *more),
    )
    monkeypatch.setattr(measure_module, "trace", lambda *_: pytest.fail("it began"))
    with pytest.raises(dmcp.DmcpError, match=rf'^{words}: pip install "torch-dmcp\[export\]", or measure in torch\.$'):
        measure_latency(traced()[0], torch.zeros(2, 3, 16, 16), runtime="onnx")


def test_a_table_says_its_runtime(tmp_path: Path) -> None:
    found = replace(table(), **IN_ONNX, device="a CPU")
    assert found.how == "in onnxruntime 1.99.0 on a CPU (batch 1, 1 thread, float32)".replace(
        "1 thread,", f"{found.threads} thread{'s' * (found.threads != 1)},"
    )
    assert found.how in found.summary and "onnxruntime" not in table().summary
    found.save(tmp_path / "table.json")
    assert Latency.load(tmp_path / "table.json") == found
    whole = json.loads(json.dumps(table().to_json()))
    assert Latency.from_json(whole) == table() and table().runtime == "torch"
    for wrong in ({"runtime": "abacus"}, {"runtime": 3}, {"onnxruntime": 1.2}):
        with pytest.raises(FileError, match="not a table of latency"):
            Latency.from_json(whole | wrong)


def test_where_onnxruntime_is_not_a_table_of_it_is_a_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    here = replace(table(), **IN_ONNX, device=device_name("cpu"))
    lacking(monkeypatch, "onnxruntime")
    assert clock_of(here, DIGITS) is None
    assert clock_of(replace(here, runtime="torch"), DIGITS) is not None
    _, _, outcome = choose(searched("latency:60%"), traced()[0], clock_of(here, None))
    assert outcome.measured_ms is None


def test_calls_take_turns_and_the_first_ones_do_not_count() -> None:
    order: list[str] = []
    times = turn_times([lambda: order.append("a"), lambda: order.append("b")], rounds=3)
    assert len(times) == 2 and min(times) > 0
    assert "".join(order) == 4 * (4 * "a" + 4 * "b")


def test_the_command_refuses_what_is_not_measured(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["latency", "--model", "digits:resnet", "--runtime", "onnx"]
    for more, words in (
        (["--dtype", "float16"], "on the CPU in float32 only"),
        (["--runtime", "abacus"], "'abacus' is not one of 'torch', 'onnx'"),
    ):
        code, _, err = run(capsys, *options, *more)
        assert code == 2 and words in err, err
    lacking(monkeypatch, *PACKAGES)
    code, _, err = run(capsys, *options)
    assert code == 2 and "are not installed" in err and "or measure in torch" in err


PRUNE = ["prune", "--model", "digits:resnet", "--data", "digits", "--batch", "708", "--device", "cpu", "--quiet"]
SHORT = ["--search-epochs", "2", "--epochs", "1"]
ASKED = ["--budget", "latency:90%", "--latency-runtime", "onnx"]


def test_prune_refuses_a_runtime_that_does_not_fit(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = build("digits:resnet")
    found = measure_latency(model, torch.zeros(2, 1, 8, 8), measure=Device(shape=(1, 8, 8)), networks=12)
    found.save(tmp_path / "table.json")
    lacking(monkeypatch, *PACKAGES)
    for options, words in (
        (ASKED, r'are not installed: pip install "torch-dmcp\[export\]"'),
        ([*ASKED, "--latency-device", "cuda"], "on the CPU in float32 only, not on cuda"),
        ([*ASKED, "--latency", "table.json"], "--latency-runtime: the table is of torch, not onnx"),
        (["--budget", "50%", "--latency-runtime", "onnx"], "are for budgets of latency"),
    ):
        code, out, err = run(capsys, *PRUNE, *SHORT, *options)
        assert (code, out) == (2, "") and re.search(words, err), err
    assert [it.name for it in tmp_path.iterdir()] == ["table.json"]


# with them


@needs_onnx
@pytest.mark.parametrize("write", ["_write_quickly", pytest.param("_write", marks=pytest.mark.slow)])
def test_both_exporters_give_the_network(write: str, tmp_path: Path) -> None:
    """And onnxruntime makes the same layers of both."""
    onnxruntime, onnx = (pytest.importorskip(name) for name in ("onnxruntime", "onnx"))
    net, x = digits(), torch.randn(3, 1, 8, 8)
    (tmp_path / "new").mkdir()
    path = tmp_path / "new" / "net.onnx"
    getattr(measure, write)(net, x, path)
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "fused.onnx")
    session = onnxruntime.InferenceSession(path, options)
    (given,) = session.get_inputs()
    torch.testing.assert_close(
        torch.from_numpy(session.run(None, {given.name: x.numpy()})[0]), net(x), atol=1e-5, rtol=1e-4
    )
    kinds = collections.Counter(node.op_type for node in onnx.load(tmp_path / "fused.onnx").graph.node)
    assert kinds["Conv"] == sum(isinstance(it, nn.Conv2d) for it in net.modules())
    assert not kinds["BatchNormalization"] and not kinds["Relu"] and sum(kinds.values()) <= kinds["Conv"] + 4


class Nested(nn.Module):
    """Two inputs of one shape in a dict, numbers beside them, and a dict of outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(1, 4, 3)

    def forward(self, pair: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
        one, other = self.first(pair["b"]), self.second(pair["a"])
        return {"sum": one + scale * other, "least": one.amin(1)}


@needs_onnx
def test_calls_give_outputs_whatever_a_network_takes() -> None:
    net = Nested().eval()
    example = {"pair": {"b": torch.randn(2, 1, 8, 8), "a": torch.randn(2, 1, 8, 8)}, "scale": 3.0}
    (call,) = open_all(iter([net]), example, 1)
    found = {tuple(it.shape): torch.from_numpy(it) for it in call()}  # type: ignore[attr-defined]
    for wanted in net(**example).values():
        torch.testing.assert_close(found[tuple(wanted.shape)], wanted, atol=1e-5, rtol=1e-4)
    assert not net.training


@needs_onnx
def test_sessions_have_the_threads_that_are_asked_for_and_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    sessions: list[Any] = []
    real = exporting.open_session
    monkeypatch.setattr(measure, "open_session", lambda *given: sessions.append(real(*given)) or sessions[-1])
    open_all(iter([digits(), digits(4)]), DIGITS, 2)
    for session in sessions:
        options = session.get_session_options()
        assert options.intra_op_num_threads == 2 and session.get_providers() == ["CPUExecutionProvider"]
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert len(sessions) == 2


@needs_onnx
@pytest.mark.slow
def test_the_newer_exporter_takes_over_where_the_older_one_fails_or_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    net, written = digits(4), list[str]()
    slow, quick = measure._write, measure._write_quickly

    def fail(*_: Any) -> None:
        raise TypeError("export() got an unexpected keyword argument 'dynamo'")

    def wrong(net: nn.Module, example: Any, path: Path) -> None:
        quick(digits(8), example, path)  # another network with outputs of the same shapes

    def count(*given: Any) -> None:
        written.append("slow")
        slow(*given)

    monkeypatch.setattr(measure, "_write", count)
    for number, broken in enumerate((fail, wrong), 1):
        monkeypatch.setattr(measure, "_write_quickly", broken)
        (call,) = open_all(iter([net]), DIGITS, 1)
        assert len(written) == number
        torch.testing.assert_close(torch.from_numpy(call()[0]), net(DIGITS), atol=1e-5, rtol=1e-4)  # type: ignore[index]


class Choosy(nn.Module):
    """Looks at values, which no exporter can."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        return x if float(x.sum()) > 0 else -x


class Random(Choosy):
    """Never the same, also in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) + torch.rand_like(x[:, :, 4:, 4:])


@needs_onnx
def test_networks_that_cannot_be_exported_are_a_sentence() -> None:
    with pytest.raises(dmcp.DmcpError, match=r"torch\.export cannot take this network"):
        open_all(iter([Choosy().eval()]), DIGITS, 1)


@needs_onnx
@pytest.mark.slow
def test_a_session_that_is_another_network_is_refused() -> None:
    with pytest.raises(dmcp.DmcpError, match="not the same network: its outputs differ by"):
        open_all(iter([Random().eval()]), DIGITS, 1)


@needs_onnx
def test_wide_networks_take_longer_and_torch_is_left_alone() -> None:
    threads = torch.get_num_threads()
    wide, narrow = turn_times(open_all(iter([digits(64), digits(4)]), DIGITS, 1), rounds=5)
    assert wide > 2 * narrow > 0 and torch.get_num_threads() == threads
    (eager,) = pass_times([digits(4)], DIGITS, rounds=5)
    assert narrow < eager  # no Python between its layers


@needs_onnx
@pytest.mark.slow
def test_this_machine_is_measured_in_onnxruntime() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    model = digits()
    found = measure_latency(model, DIGITS, networks=12, batch=3, runtime="onnx")
    assert (found.runtime, found.onnxruntime, found.batch) == ("onnx", onnxruntime.__version__, 3)
    assert found.how.startswith(f"in onnxruntime {onnxruntime.__version__} on {device_name('cpu')} (batch 3")
    clock = clock_of(found, DIGITS)
    assert clock is not None and clock.in_onnx
    assert f"Measured in {found.seconds:.0f} s." in describe(found)  # exports included
    (again,) = clock.times(iter([digits()]))
    assert 0.2 < again / found.unpruned_ms < 5  # a busy machine
    (eager,) = pass_times([digits()], DIGITS.expand(3, -1, -1, -1), rounds=5)
    assert again < eager


@needs_onnx
@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::dmcp.latency.measure.LatencyWarning"
)  # how good times are is not the question here
def test_a_run_is_timed_in_onnxruntime(capsys: Capture, tmp_path: Path) -> None:
    code, out, err = run(
        capsys, *PRUNE, *SHORT, *ASKED, "--model-args", "width=32", "--align", "8", "--out", str(tmp_path), "--json"
    )
    assert code == 0 and "in onnxruntime" in err, err
    told = json.loads(out)["latency"]
    assert told["measured_ms"] > 0 and "in onnxruntime" in told["how"]
    assert Latency.load(tmp_path / "latency.json").runtime == "onnx"
    assert json.loads((tmp_path / "settings.json").read_text())["job"]["latency_runtime"] == "onnx"
