"""Exported files are the network, or they are not there. Those of ONNX need the packages of the extra `export`."""

from __future__ import annotations

import collections
import copy
import functools
import importlib.util
import json
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from typed import command

import dmcp
from dmcp import exporting, runs
from dmcp import exporting as exporting_module
from dmcp.data.datasets import load, preprocessing
from dmcp.data.loaders import make_loader
from dmcp.models import build
from dmcp.modules import tensors_in

PAGE = Path(__file__).parent.parent / "docs" / "export.md"
PRUNE = "prune --model digits:resnet --data digits --device cpu --batch 708 --search-epochs 2 --epochs 1 --quiet"
HOW = {"mean": [0.5], "std": [2.0], "classes": ["cat", "Käse"]}
EXAMPLE = torch.zeros(1, 1, 8, 8)
Capture = pytest.CaptureFixture[str]
Run = Callable[[Tensor], Tensor]


@functools.cache
def digits() -> tuple[nn.Module, nn.Module]:
    """A network for digits, and half of it, with running statistics that are not 0 and 1."""
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = build("digits:resnet")
        for _ in range(3):
            model(torch.randn(16, 1, 8, 8))
    graph = dmcp.trace(model, torch.zeros(2, 1, 8, 8))
    return model, dmcp.cut(model, graph, dmcp.uniform(graph, "50%"))


def open_onnx(path: Path) -> tuple[Run, str]:
    """An independent reader: the network as a function, and the note in its metadata."""
    session = pytest.importorskip("onnxruntime").InferenceSession(path)
    name = session.get_inputs()[0].name
    note = session.get_modelmeta().custom_metadata_map["input.json"]
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0]), note


def open_pt2(path: Path) -> tuple[Run, str]:
    extra = {"input.json": ""}
    return torch.export.load(path, extra_files=extra).module(), extra["input.json"]


def need(suffix: str) -> None:
    for name in ("onnx", "onnxscript", "onnxruntime") if suffix == ".onnx" else ():
        pytest.importorskip(name)


@pytest.mark.parametrize(("suffix", "reader"), [(".onnx", open_onnx), (".pt2", open_pt2)])
def test_the_file_is_the_network(suffix: str, reader: Callable[[Path], tuple[Run, str]], tmp_path: Path) -> None:
    need(suffix)
    model, small = digits()
    small.train()
    made = dmcp.export(small, EXAMPLE, tmp_path / f"small{suffix}", preprocessing=HOW)
    assert small.training and all(parameter.requires_grad for parameter in small.parameters())  # as it was
    assert [path.name for path in tmp_path.iterdir()] == [made.path.name]
    run, note = reader(made.path)
    assert json.loads(note) == HOW
    small.eval()
    for batch in (1, 2, 7, 64):  # none of them but 1 is a size that was tried before
        x = torch.randn(batch, 1, 8, 8)
        torch.testing.assert_close(run(x), small(x), rtol=1e-4, atol=1e-5)
    whole = dmcp.export(model, EXAMPLE, tmp_path / f"whole{suffix}")
    assert made.size_bytes == made.path.stat().st_size < 0.7 * whole.size_bytes
    assert made.params == sum(parameter.numel() for parameter in small.parameters())
    assert made.difference < 1e-5 and len(made.batches) == 2
    assert str(Path(dmcp.__file__).parent).encode() not in made.path.read_bytes()  # no paths of this machine
    assert len(exporting.milliseconds([made.path, whole.path], EXAMPLE)) == 2


class TwoHeads(nn.Module):
    """Several inputs by name, several outputs, and a forward that writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Embedding(7, 4)

    def forward(self, image: Tensor, kind: Tensor) -> dict[str, Any]:
        x = self.conv(image.sub_(1)).mean(dim=(2, 3)) + self.head(kind)
        return {"z": x, "a": [100 * x.sum(dim=1), None], "best": x.argmax(dim=1)}


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
@pytest.mark.parametrize("named", [True, False])
def test_networks_with_several_inputs_and_outputs(suffix: str, named: bool, tmp_path: Path) -> None:
    need(suffix)
    image, kind = torch.zeros(1, 3, 8, 8), torch.tensor([6])
    example: Any = {"image": image, "kind": kind} if named else (image, kind)
    made = dmcp.export(TwoHeads(), example, tmp_path / f"two{suffix}")
    assert made.path.exists() and made.difference < 1e-5


class Returns(nn.Module):
    """Two convolutions of an image, in whatever a function makes of them; `mean` is also an op of its own inside."""

    def __init__(self, make: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.one, self.two, self.make = nn.Conv2d(1, 2, 3), nn.Conv2d(1, 3, 3), make

    def forward(self, image: Tensor) -> Any:
        y = self.one(image)
        return self.make(y - y.mean(), self.two(image), image)


Pair = collections.namedtuple("Pair", ["left", "right"])
WAYS: list[tuple[Callable[..., Any], list[str], str]] = [
    (lambda a, b, x: a, ["output"], "image"),
    (lambda a, b, x: (a, b), ["output_0", "output_1"], "image"),
    (lambda a, b, x: [a, None, {"b": b}], ["output_0", "output_2.b"], "image"),
    (lambda a, b, x: {"seg": a, "heat": b}, ["seg", "heat"], "image"),
    (lambda a, b, x: {"heads": [a, {"far": b}], 7: a}, ["heads.0", "heads.1.far", "7"], "image"),
    (lambda a, b, x: Pair(a, b), ["left", "right"], "image"),
    (lambda a, b, x: {"mean": b, "sub": 2 * a, "one.weight": b}, ["mean", "sub", "one.weight"], "image"),  # are inside
    (lambda a, b, x: {"a.b": a, "a": {"b": b}}, ["a.b", "a.b_2"], "image"),
    (lambda a, b, x: {"image": x, "a": a}, ["image", "a"], "image_2"),
]


@pytest.mark.parametrize(("make", "outputs", "given"), WAYS)
def test_outputs_are_named_as_the_network_names_them(
    make: Callable[..., Any], outputs: list[str], given: str, tmp_path: Path
) -> None:
    need(".onnx")
    net, x = Returns(make).eval(), torch.randn(3, 1, 8, 8)
    dmcp.export(net, EXAMPLE, tmp_path / "net.onnx")
    session = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "net.onnx")
    assert [it.name for it in session.get_outputs()] == outputs
    assert [it.name for it in session.get_inputs()] == [given]
    for name, wanted in zip(outputs, tensors_in(net(x)), strict=True):
        (found,) = session.run([name], {given: x.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), wanted, rtol=1e-4, atol=1e-5)


def test_inputs_have_the_names_of_the_arguments(tmp_path: Path) -> None:
    need(".onnx")
    dmcp.export(TwoHeads(), {"image": torch.zeros(1, 3, 8, 8), "kind": torch.tensor([6])}, tmp_path / "two.onnx")
    session = pytest.importorskip("onnxruntime").InferenceSession(tmp_path / "two.onnx")
    assert [it.name for it in session.get_inputs()] == ["image", "kind"]
    assert [it.name for it in session.get_outputs()] == ["z", "a.0", "best"]


def test_a_pt2_gives_what_the_network_gives(tmp_path: Path) -> None:
    net, x = Returns(WAYS[3][0]).eval(), torch.randn(3, 1, 8, 8)
    dmcp.export(net, EXAMPLE, tmp_path / "net.pt2")
    found = torch.export.load(tmp_path / "net.pt2").module()(x)
    assert found.keys() == {"seg", "heat"}
    torch.testing.assert_close(found, net(x))


@pytest.mark.parametrize("suffix", [".onnx", ".pt2"])
def test_a_file_that_is_not_the_network_is_not_left_behind(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the weights of one channel change on the way. With a tolerance that allows it, the file takes its place."""
    need(suffix)
    record = exporting.record

    def spoilt(net: nn.Module, example: Any) -> Any:
        other = copy.deepcopy(net)
        other[0].weight.data[1] += 0.1
        return record(other, example)

    monkeypatch.setattr(exporting, "record", spoilt)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
    path = tmp_path / f"net{suffix}"
    path.write_text("what was there")
    with pytest.raises(dmcp.FileError, match=r"not written: in .* differ by .*, more than the tolerance of 1e-04"):
        dmcp.export(net, EXAMPLE, path)
    assert [it.read_text() for it in tmp_path.iterdir()] == ["what was there"]
    dmcp.export(net, EXAMPLE, path, tolerance=0.9)
    assert path.read_bytes() != b"what was there"


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    """torch's own writer of files ends the whole process there (std::terminate), which nothing can catch."""
    (tmp_path / "net.pt2").write_bytes(b"before")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # as on a disk with so much space left
    try:
        with pytest.raises(dmcp.FileError, match=r"net\.pt2: cannot be written: File too large"):
            dmcp.export(digits()[1], EXAMPLE, tmp_path / "net.pt2")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [(it.name, it.read_bytes()) for it in tmp_path.iterdir()] == [("net.pt2", b"before")]


def test_what_the_check_finds_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Conv2d(1, 2, 3)
    for found in (float("nan"), float("inf"), 1.1e-4):
        monkeypatch.setattr(exporting, "largest_gap", lambda *_, found=found: found)
        with pytest.raises(dmcp.FileError, match="not the same network"):
            dmcp.export(net, EXAMPLE, tmp_path / "net.pt2")
    monkeypatch.setitem(exporting._OPEN, exporting.Format.EXPORTED, lambda _: 1 / 0)
    with pytest.raises(dmcp.FileError, match="cannot be run: ZeroDivisionError"):
        dmcp.export(net, EXAMPLE, tmp_path / "net.pt2")
    assert list(tmp_path.iterdir()) == []


def test_outputs_are_measured_each_by_its_own_size() -> None:
    """A small output that is wrong is not hidden by a large one that is right."""
    x = (torch.tensor([[1000.0, 0.0]]), torch.tensor([[0.001]]))

    class Pair(nn.Module):
        def forward(self, *both: Tensor) -> tuple[Tensor, ...]:
            return both

    def difference(*outputs: Tensor) -> float:
        return exporting.largest_gap(Pair(), lambda _: list(outputs), [x])

    assert difference(*x) == 0
    assert difference(x[0], 1.5 * x[1]) == pytest.approx(0.5)
    assert difference(x[0] + 1, x[1]) == pytest.approx(1e-3)
    assert difference(x[0]) == difference(x[0][0], x[1]) == float("inf")


@pytest.mark.slow
def test_branches_of_the_training_are_merged_after_the_cut(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    model, x = timm.create_model("repvgg_a0", num_classes=10), torch.randn(4, 3, 32, 32)
    model(x)  # running statistics that are not 0 and 1
    graph = dmcp.trace(model, x)
    small = dmcp.cut(model, graph, dmcp.uniform(graph, "30%")).eval()
    merged = timm.utils.reparameterize_model(small)
    made = dmcp.export(merged, x[:1], tmp_path / "merged.pt2")
    wanted = small(x).detach()
    assert (torch.export.load(made.path).module()(x) - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert made.params < sum(parameter.numel() for parameter in small.parameters())


# what cannot be exported


class Fixed(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).reshape(2, -1)


class Branch(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


@pytest.mark.parametrize(("net", "example", "said"), [
    (Fixed(1, 2, 3), EXAMPLE, "torch.export cannot take this network: .*batch.*See docs/export.md"),
    (Branch(1, 2, 3), EXAMPLE, "torch.export cannot take this network: .*See docs/export.md"),
    (nn.Conv2d(1, 2, 3), torch.tensor(1.0), "dim 0 of each must be the batch"),
    (nn.Conv2d(1, 2, 3), "image", "must hold tensors"),
    (nn.Conv2d(3, 2, 3), EXAMPLE, "torch.export cannot take this network: "),
])  # fmt: skip
def test_networks_that_cannot_be_exported(
    net: nn.Module, example: Any, said: str, tmp_path: Path, capfd: Capture
) -> None:
    with pytest.raises(dmcp.TraceError, match=said) as caught:
        dmcp.export(net, example, tmp_path / "net.pt2")
    assert len(str(caught.value)) < 600 and capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


class Counting(nn.Conv2d):
    def forward(self, x: Tensor) -> Any:
        return {"map": super().forward(x), "none": None, "scale": 0.5}


def test_an_output_that_is_no_tensor_is_named(tmp_path: Path) -> None:
    program, dims = exporting.record(Counting(1, 2, 3), EXAMPLE)
    with pytest.raises(dmcp.TraceError, match=r"gives 0.5 besides tensors, and ONNX has no place for it"):
        exporting.write_onnx(program, dims, tmp_path / "net.onnx")


def test_colours_of_a_terminal_are_left_out_of_sentences() -> None:
    assert exporting.reason(ValueError("a \x1b[96mb\x1b[0m c")) == "ValueError: a b c."


def test_weights_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    net = nn.Conv2d(1, 2, 3)
    net.weight.data[0] = float("nan")
    with pytest.raises(dmcp.TrainingError, match="weight holds numbers that are NaN"):
        dmcp.export(net, EXAMPLE, tmp_path / "net.pt2")


@pytest.mark.parametrize(("missing", "said"), [
    (("onnx", "onnxscript", "onnxruntime"), "onnx, onnxscript, onnxruntime are not installed"),
    (("onnxruntime",), "onnxruntime is not installed"),
])  # fmt: skip
def test_missing_packages(missing: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in missing else object())
    with pytest.raises(dmcp.DmcpError, match=rf'{said}: pip install "torch-dmcp\[export\]", or name a file with \.pt2'):
        dmcp.export(nn.Conv2d(1, 2, 3), EXAMPLE, tmp_path / "net.onnx")
    assert dmcp.export(nn.Conv2d(1, 2, 3), EXAMPLE, tmp_path / "net.pt2").path.exists()


# the command


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run."""
    folder = tmp_path_factory.mktemp("export") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "draw_all", lambda *_, **__: [])  # figures take longer than such a run
        assert command(*PRUNE.split(), "--out", str(folder)) == 0
    return folder


def test_the_command_needs_no_data_and_tells_what_was_gained(
    run: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmcp.cli.job.load", lambda *_: 1 / 0)
    out = tmp_path / "net.pt2"
    capsys.readouterr()
    assert command("export", str(run), "--out", str(out), "--json", "--quiet") == 0
    printed = capsys.readouterr()
    facts = json.loads(printed.out)
    assert printed.err == "" and facts["file"] == str(out) and facts["size_bytes"] == out.stat().st_size
    assert facts["preprocessing"] == preprocessing(load("digits")) == json.loads(open_pt2(out)[1])
    assert facts["macs_share"] <= 0.5 and facts["params"] < 77_754 and facts["difference"] <= 1e-4
    assert facts["ms"] > 0 and facts["unpruned_ms"] > 0
    assert facts["size_bytes"] < facts["unpruned_size_bytes"]  # of files alike, not of bare weights
    dmcp.export(build("digits:resnet"), EXAMPLE, tmp_path / "whole.pt2")
    assert facts["unpruned_size_bytes"] == pytest.approx((tmp_path / "whole.pt2").stat().st_size, rel=0.01)
    monkeypatch.setattr("dmcp.results._SLOW", 0.0)
    assert command("export", str(run), "--out", str(out)) == 0  # what is there is replaced
    printed = capsys.readouterr()
    assert [line.split("|")[1].strip() for line in printed.out.splitlines() if re.match(r"\| \w", line)] == [
        "bytes",
        "params",
        "MACs",
        "ms",
    ]
    assert (
        printed.out.startswith(f"{out}\nthe same network in torch ") and "in it, as input.json: shape," in printed.out
    )
    (row,) = (line for line in printed.out.splitlines() if line.startswith("| bytes"))
    assert float(row.split("|")[-2].strip(" %")) < 100
    assert len(printed.err.splitlines()) == 3
    assert "\nNot faster here: most widths are no multiples of 8" in printed.err
    monkeypatch.setattr("dmcp.cli.show.write", only_once(exporting_module.export))
    assert command("export", str(run), "--out", str(out)) == 0  # the unpruned network may be too large for a file
    (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("| bytes"))
    assert [cell.strip() for cell in row.split("|")[3:5]] == ["", ""]


def only_once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which fails when it is called again."""
    calls = iter([function])

    def call(*args: Any, **kwargs: Any) -> Any:
        for first in calls:
            return first(*args, **kwargs)
        raise dmcp.FileError("too large")

    return call


def test_a_run_from_another_folder_says_where_its_names_are_looked_for(
    run: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run of a network of one's own: from elsewhere there is no such module."""
    started, other = tmp_path / "started", tmp_path / "other"
    (started / "runs" / "mine").mkdir(parents=True)
    other.mkdir()
    for path in run.iterdir():
        (started / "runs" / "mine" / path.name).write_bytes(path.read_bytes())
    settings = json.loads((run / "settings.json").read_text())
    settings["job"] |= {"model": "exported_net:build", "data": "shards"}
    (started / "runs" / "mine" / "settings.json").write_text(json.dumps(settings))
    monkeypatch.chdir(other)
    words = ["export", str(started / "runs" / "mine"), "--out", str(tmp_path / "net.pt2")]
    assert command(*words) == 2
    told = capsys.readouterr().err
    assert "there is no module exported_net here" in told and "type the command in that one" in told
    (started / "exported_net.py").write_text("from dmcp.models import NETS\n\nbuild = NETS['digits']['resnet']\n")
    assert command(*words) == 2
    assert f"There is one in {started}: type the command there." in capsys.readouterr().err
    monkeypatch.chdir(started)
    assert command(*words) == 0  # its data is not needed


def test_a_damaged_run_is_told(run: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "run").mkdir()
    for path in run.iterdir():
        (tmp_path / "run" / path.name).write_bytes(path.read_bytes())
    settings = json.loads((run / "settings.json").read_text())
    for change in ({"shape": None}, {"shape": [1, "8", 8]}, {"classes": None}):
        (tmp_path / "run" / "settings.json").write_text(json.dumps(settings | change))
        assert command("export", str(tmp_path / "run"), "--out", str(tmp_path / "net.pt2")) == 2
        assert "its settings do not say the classes" in capsys.readouterr().err


def test_commands_in_sentences_can_be_typed(run: Path, tmp_path: Path, capsys: Capture) -> None:
    folder = tmp_path / "my run"
    shutil.copytree(run, folder)
    for typed, said in (
        (["prune", "--resume"], f"dmcp report '{folder}' shows it"),
        (["train", "--resume"], f"go on with dmcp prune --resume '{folder}'"),
    ):
        assert command(*typed, str(folder)) == 2
        assert said in capsys.readouterr().err


def test_the_code_of_the_page_runs(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """The last block, which knows nothing of us, gives what the network gives for images as our loader makes them."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 2 and not re.search("dmcp|torch", blocks[1])
    monkeypatch.chdir(run.parent)
    # in a process of its own, which has imported nothing yet
    printed = subprocess.run([sys.executable, "-c", blocks[0]], capture_output=True, text=True, check=True).stdout
    assert Path("digits.pt2").exists() and str(Path("digits.pt2").stat().st_size) in printed.split()
    need(".onnx")
    assert command("export", "run", "--quiet") == 0
    test = load("digits").test
    given = {"images": np.ascontiguousarray(test.images.numpy())}
    exec(compile(blocks[1], PAGE.name, "exec"), given)
    x = torch.cat([images for images, _ in make_loader(test, 64, train=False)])
    scores = dmcp.load("run", build("digits:resnet")).eval()(x)
    torch.testing.assert_close(torch.from_numpy(given["scores"]), scores, rtol=1e-4, atol=1e-4)


# 8 bits


def batches() -> list[tuple[Tensor, Tensor]]:
    drawn = torch.Generator().manual_seed(0)
    return [(torch.randn(32, 1, 8, 8, generator=drawn), torch.zeros(32, dtype=torch.int64)) for _ in range(4)]


def nans() -> list[Tensor]:
    x = torch.randn(8, 1, 8, 8)
    x[5, 0, 0, 0] = float("nan")
    return [x]


def doubles() -> list[Tensor]:
    return [torch.randn(8, 1, 8, 8, dtype=torch.float64)]


def bytes_() -> list[Tensor]:
    return [torch.zeros(8, 1, 8, 8, dtype=torch.uint8)]


def test_a_file_of_8_bits_is_nearly_the_network_and_small(tmp_path: Path) -> None:
    need(".onnx")
    _, small = digits()
    whole = dmcp.export(small, EXAMPLE, tmp_path / "small.onnx", preprocessing=HOW)
    before = whole.path.read_bytes()
    made = dmcp.quantize(whole.path, batches(), tmp_path / "int8.onnx", samples=80)
    assert made.samples == 80 and whole.path.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["int8.onnx", "small.onnx"]
    assert made.size_bytes == made.path.stat().st_size < 0.45 * whole.size_bytes
    run, note = open_onnx(made.path)
    assert json.loads(note) == HOW
    small.eval()
    x = batches()[3][0]  # which no range was found with
    with torch.no_grad():
        off = (run(x) - small(x)).square().mean().sqrt() / small(x).square().mean().sqrt()
    assert 1e-4 < made.difference < 0.1 and off < 0.15
    again = dmcp.quantize(whole.path, iter(batches()), tmp_path / "again.onnx", samples=80)
    assert again.path.read_bytes() == made.path.read_bytes()


def test_ranges_are_those_of_the_samples(tmp_path: Path) -> None:
    """Inputs a hundred times as large as those that the ranges were found with are cut off."""
    need(".onnx")
    _, small = digits()
    whole = dmcp.export(small, EXAMPLE, tmp_path / "small.onnx")
    tiny = [(x / 100, y) for x, y in batches()]
    run, narrow = (
        dmcp.quantize(whole.path, some, tmp_path / f"{name}.onnx").path
        for name, some in (("usual", batches()), ("tiny", tiny))
    )
    runtimes = [exporting.open_onnx(path) for path in (whole.path, run, narrow)]
    wanted, near, cut = (runtime.run(batches()[0][0])[0] for runtime in runtimes)
    assert (near - wanted).norm() < 0.2 * (cut - wanted).norm()


@pytest.mark.parametrize(
    ("source", "path", "loader", "samples", "told"),
    [
        ("small.pt2", "int8.onnx", batches, 8, "only .onnx files"),
        ("small.onnx", "int8.pt2", batches, 8, "only .onnx files"),
        ("none.onnx", "int8.onnx", batches, 8, "there is no such file"),
        ("broken.onnx", "int8.onnx", batches, 8, "cannot open it"),
        ("small.onnx", "int8.onnx", batches, 0, "at least one sample"),
        ("small.onnx", "int8.onnx", list, 8, "gives no batch"),
        ("small.onnx", "int8.onnx", lambda: [torch.zeros(2, 3, 8, 8)], 8, "cannot have 8 bits"),
        ("small.onnx", "none/int8.onnx", batches, 8, "there is no folder"),
        ("small.onnx", "small.onnx", batches, 8, "is made of this file: name another one to write"),
        ("small.onnx", "../link/small.onnx", batches, 8, "is made of this file: name another one to write"),
        ("small.onnx", "int8.onnx", nans, 8, "The input of a batch holds NaN or infinite numbers"),
        ("small.onnx", "int8.onnx", doubles, 8, "holds float64, the file takes float32: convert it with x.to(torch.fl"),
        ("small.onnx", "int8.onnx", bytes_, 8, "The input of a batch holds uint8, the file takes float32"),
    ],
)
def test_8_bits_are_refused_in_a_sentence(
    source: str, path: str, loader: Callable[[], Any], samples: int, told: str, tmp_path: Path
) -> None:
    need(".onnx")
    dmcp.export(digits()[1], EXAMPLE, tmp_path / "small.onnx")
    (tmp_path / "broken.onnx").write_bytes(b"no network")
    (link := tmp_path.parent / "link").unlink(missing_ok=True)
    link.symlink_to(tmp_path)
    before = (tmp_path / "small.onnx").read_bytes()
    with pytest.raises(dmcp.DmcpError, match=re.escape(told)):
        dmcp.quantize(tmp_path / source, loader(), tmp_path / path, samples=samples)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["broken.onnx", "small.onnx"]
    assert (tmp_path / "small.onnx").read_bytes() == before


def test_the_command_tests_a_file_of_8_bits(tmp_path: Path, capsys: Capture) -> None:
    need(".onnx")
    run = tmp_path / "run"
    assert command(*PRUNE.split(), "--out", str(run)) == 0
    capsys.readouterr()
    assert command("export", str(run), "--int8", "--json", "--quiet") == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["file"] == str(run / "model.int8.onnx") and facts["samples"] == 512
    assert facts["size_bytes"] < 0.5 * facts["float32_size_bytes"] < facts["unpruned_size_bytes"]
    reader, _ = open_onnx(run / "model.int8.onnx")
    right = [(reader(x).argmax(1) == y).float() for x, y in make_loader(load("digits").test, 50, train=False)]
    assert facts["accuracy"] == pytest.approx(float(torch.cat(right).mean()))
    assert abs(facts["accuracy"] - facts["float32_accuracy"]) < 0.1
    assert command("export", str(run), "--int8", "--out", str(tmp_path / "a.pt2")) == 2
    assert "only .onnx files" in capsys.readouterr().err
    assert command("export", str(run), "--int8") == 0
    assert "512 training images" in (shown := capsys.readouterr().out) and "float32" in shown
