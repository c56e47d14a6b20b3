"""Exported files are the network, or they are not there. Those of ONNX need the packages of the extra `export`."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Capture, command, needs_onnx
from nets import Toy
from torch import Tensor, nn

import dmcp
from dmcp.data.datasets import load, preprocessing
from dmcp.data.loaders import make_loader
from dmcp.exporting import export as exporting
from dmcp.models import build
from dmcp.runs.reading import read_run

pytestmark = pytest.mark.usefixtures("quick_commands")

PRUNE = "prune --model digits:resnet --data digits --device cpu --batch 708 --search-epochs 2 --epochs 1 --quiet --out"
HOW = {"mean": [0.5], "std": [2.0], "classes": ["cat", "Käse"]}
EXAMPLE = torch.zeros(1, 1, 8, 8)
both_formats = pytest.mark.parametrize("suffix", [pytest.param(".onnx", marks=needs_onnx), ".pt2"])


@functools.cache
def digits() -> nn.Module:
    """Half of a network for digits, with running statistics that are not 0 and 1."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = build("digits:resnet")
        for _ in range(3):
            model(torch.randn(16, 1, 8, 8))
    graph = dmcp.trace(model, torch.zeros(2, 1, 8, 8))
    return dmcp.cut(model, graph, dmcp.uniform(graph, "50%"))


def reader(path: Path) -> tuple[Callable[[Tensor], Tensor], str]:
    """An independent reader: the network as a function, and the note in its metadata."""
    if path.suffix == ".pt2":
        extra = {"input.json": ""}
        return torch.export.load(path, extra_files=extra).module(), extra["input.json"]
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    name = session.get_inputs()[0].name
    note = session.get_modelmeta().custom_metadata_map["input.json"]
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0]), note


@both_formats
def test_the_file_is_the_network(suffix: str, tmp_path: Path) -> None:
    small = digits()
    small.train()
    made = dmcp.export(small, EXAMPLE, tmp_path / f"small{suffix}", preprocessing=HOW)
    assert small.training and all(parameter.requires_grad for parameter in small.parameters())  # as it was
    assert [path.name for path in tmp_path.iterdir()] == [made.path.name]
    run, note = reader(made.path)
    assert json.loads(note) == HOW
    small.eval()
    for batch in (1, 2, 7, 64):
        x = torch.randn(batch, 1, 8, 8)
        torch.testing.assert_close(run(x), small(x), rtol=1e-4, atol=1e-5)
    assert made.size_bytes == made.path.stat().st_size and made.difference < 1e-5
    assert str(Path(dmcp.__file__).parent).encode() not in made.path.read_bytes()  # no paths of this machine


class TwoHeads(nn.Module):
    """Several inputs by name, several outputs, and a forward that writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Embedding(7, 4)

    def forward(self, image: Tensor, kind: Tensor) -> dict[str, Any]:
        x = self.conv(image.sub_(1)).mean(dim=(2, 3)) + self.head(kind)
        return {"z": x, "a": [100 * x.sum(dim=1), None], "mean": x.argmax(dim=1)}


@both_formats
def test_networks_with_several_inputs_and_outputs(suffix: str, tmp_path: Path) -> None:
    """Outputs are named as the network names them, also where an op inside has the name (mean)."""
    image, kind, path = torch.zeros(1, 3, 8, 8), torch.tensor([6]), tmp_path / f"two{suffix}"
    for example in ((image, kind), {"image": image, "kind": kind}):
        assert dmcp.export(TwoHeads(), example, path).difference < 1e-5
    if suffix == ".onnx":
        session = pytest.importorskip("onnxruntime").InferenceSession(path)
        assert [it.name for it in session.get_inputs()] == ["image", "kind"]
        assert [it.name for it in session.get_outputs()] == ["z", "a.0", "mean"]
        dmcp.export(nn.Conv2d(3, 4, 3), image, path)
        session = pytest.importorskip("onnxruntime").InferenceSession(path)
        assert [it.name for it in session.get_outputs()] == ["output"]


@both_formats
def test_a_file_that_differs_is_not_left_behind(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the weights of one channel change on the way. With a tolerance that allows it, the file is kept."""
    record = exporting.record

    def spoilt(net: nn.Module, example: Any) -> Any:
        assert [*tmp_path.iterdir()] == [path]  # a kill would leave nothing else
        other = copy.deepcopy(net)
        other[0].weight.data[1] += 0.1
        return record(other, example)

    monkeypatch.setattr(exporting, "record", spoilt)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    path = tmp_path / f"net{suffix}"
    path.write_text("what was there")
    with pytest.raises(dmcp.FileError):
        dmcp.export(net, EXAMPLE, path)
    assert [it.read_text() for it in tmp_path.iterdir()] == ["what was there"]
    dmcp.export(net, EXAMPLE, path, tolerance=0.9)
    assert path.read_bytes() != b"what was there"


# what cannot be exported


def nan() -> nn.Module:
    net = nn.Conv2d(1, 2, 3)
    net.weight.data[0] = float("nan")
    return net


@pytest.mark.parametrize(
    ("net", "name", "error", "reason"),
    [
        (Toy(lambda self, x: x.reshape(2, -1)), "net.pt2", dmcp.TraceError, "cannot take"),
        (Toy(lambda self, x: self.meta(x), meta=nn.Conv2d(1, 2, 3)), "net.pt2", dmcp.TraceError, "of meta"),
        pytest.param(
            Toy(lambda m, x: x.matrix_exp()), "net.onnx", dmcp.TraceError, "No .*matrix_exp", marks=needs_onnx
        ),
        (nan(), "net.pt2", dmcp.FileError, "not written"),
        (nn.Conv2d(1, 2, 3), "net.pt", dmcp.FileError, "must end in"),
        (nn.Conv2d(1, 2, 3), "none/net.pt2", dmcp.FileError, "none"),
    ],
)
def test_what_cannot_be_exported(
    net: nn.Module, name: str, error: type[Exception], reason: str, tmp_path: Path, capfd: Capture
) -> None:
    with pytest.raises(error, match=reason) as caught:
        dmcp.export(net, EXAMPLE, tmp_path / name)
    assert len(str(caught.value)) < 600 and capfd.readouterr() == ("", "") and list(tmp_path.iterdir()) == []


def test_missing_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "onnxruntime" else object())
    with pytest.raises(dmcp.DmcpError, match="onnxruntime"):
        dmcp.export(nn.Conv2d(1, 2, 3), EXAMPLE, tmp_path / "net.onnx")
    assert dmcp.export(nn.Conv2d(1, 2, 3), EXAMPLE, tmp_path / "net.pt2").path.exists()


# int8


def batches(dtype: torch.dtype = torch.float32, scale: float = 1.0) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    drawn = [(scale * torch.randn(32, 1, 8, 8, generator=random)).to(dtype) for _ in range(4)]
    return [(x, torch.zeros(32, dtype=torch.int64)) for x in drawn]


@needs_onnx
def test_an_int8_file_is_nearly_the_network_and_small(tmp_path: Path) -> None:
    small = digits()
    whole = dmcp.export(small, EXAMPLE, tmp_path / "small.onnx", preprocessing=HOW)
    before = whole.path.read_bytes()
    made = dmcp.quantize(whole.path, batches(), tmp_path / "int8.onnx", samples=80)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["int8.onnx", "small.onnx"]
    assert made.size_bytes == made.path.stat().st_size < 0.45 * whole.size_bytes
    run, note = reader(made.path)
    assert json.loads(note) == HOW
    x = batches()[3][0]  # which no range comes from
    with torch.no_grad():
        wanted = small.eval()(x)
    assert 1e-4 < made.difference < 0.1 and (run(x) - wanted).norm() < 0.15 * wanted.norm()
    tiny = dmcp.quantize(whole.path, batches(scale=0.01), tmp_path / "tiny.onnx")  # other ranges: outputs are cut off
    assert (run(x) - wanted).norm() < 0.2 * (reader(tiny.path)[0](x) - wanted).norm()
    (tmp_path / "broken.onnx").write_bytes(b"no network")
    for source, path, given, error in (
        ("small.pt2", "new.onnx", batches(), dmcp.FileError),
        ("broken.onnx", "new.onnx", batches(), dmcp.FileError),
        ("small.onnx", "small.onnx", batches(), dmcp.FileError),
        ("small.onnx", "new.onnx", batches(torch.uint8), dmcp.FileError),
        ("small.onnx", "new.onnx", batches(scale=float("nan")), dmcp.DataError),
        ("small.onnx", "new.onnx", [], dmcp.DataError),
    ):
        with pytest.raises(error):
            dmcp.quantize(tmp_path / source, given, tmp_path / path)
    assert whole.path.read_bytes() == before and not (tmp_path / "new.onnx").exists()


# the command


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("export") / "run"
    assert command(*PRUNE.split(), str(folder)) == 0
    return folder


def test_the_command_needs_no_data_and_reports_what_was_gained(
    run: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmcp.cli.job.load", lambda *_: 1 / 0)
    out = tmp_path / "net.pt2"
    capsys.readouterr()
    assert command("export", str(run), "--out", str(out), "--json", "--quiet") == 0
    printed = capsys.readouterr()
    facts = json.loads(printed.out)
    assert printed.err == "" and facts["file"] == str(out)
    assert facts["preprocessing"] == preprocessing(load("digits")) == json.loads(reader(out)[1])
    assert facts["macs_share"] <= 0.5 and facts["params"] < 77_754 and facts["difference"] <= 1e-4
    small, full = (facts["files"][name] for name in ("exported", "unpruned"))
    assert min(small["ms"], full["ms"]) > 0 and out.stat().st_size == small["bytes"] < full["bytes"]
    assert command("export", str(run), "--out", str(out)) == 0  # what is there is replaced
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert rows[1:] == ["bytes", "ms"]


@needs_onnx
def test_the_command_tests_an_int8_file(run: Path, capsys: Capture) -> None:
    capsys.readouterr()
    assert command("export", str(run), "--int8", "--json", "--quiet") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["file"] == str(run / "model.int8.onnx")
    int8, exact, full = (facts["files"][name] for name in ("int8", "float32", "unpruned"))
    times = read_run(run).exported  # what the page shows
    assert times is not None and (times.unpruned_ms, times.pruned_ms) == (full["ms"], exact["ms"])
    assert int8["bytes"] < 0.5 * exact["bytes"] < full["bytes"]
    network, _ = reader(run / "model.int8.onnx")
    right = [(network(x).argmax(1) == y).float() for x, y in make_loader(load("digits").test, 50, train=False)]
    assert int8["accuracy"] == pytest.approx(float(torch.cat(right).mean()))
    assert abs(int8["accuracy"] - exact["accuracy"]) < 0.1


class Curve(nn.Module):
    """Made for images in [0, 1], which it brightens: on other numbers the curve, applied again and again, overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = nn.Conv2d(3, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        strength = torch.tanh(self.strength(x))
        for _ in range(12):
            x = x + strength * (x.square() - x)
        return x


@pytest.mark.parametrize("example", [torch.rand(1, 3, 8, 8), torch.zeros(1, 3, 8, 8)])
def test_a_network_is_compared_on_inputs_in_the_range_of_the_example(tmp_path: Path, example: Tensor) -> None:
    model = Curve()
    nn.init.constant_(model.strength.weight, 3.0)
    assert not model(torch.randn(4, 3, 8, 8)).isfinite().all()
    assert dmcp.export(model, example, tmp_path / "curve.pt2").difference < 1e-4
    drawn = exporting.random_like(example, 4)
    assert drawn.shape[0] == 4 and drawn.min() >= 0 and drawn.max() <= 1 and drawn.std() > 0
