"""Networks by name, and those for small images against costs worked out by hand."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import dmcp
from dmcp.errors import DmcpError
from dmcp.models import build, names, rebuild, sample_shape


def resnet_macs(blocks: int, width: int, channels: int, size: int) -> int:
    """By hand: 3x3 convolutions, 1x1 projections at the two strides, one linear layer."""
    macs = channels * width * 9 * size**2
    for stage, (inputs, outputs) in enumerate(((width, width), (width, 2 * width), (2 * width, 4 * width))):
        area = (size >> stage) ** 2
        macs += (inputs * outputs + (2 * blocks - 1) * outputs**2) * 9 * area
        macs += inputs * outputs * area if stage else 0
    return macs + 4 * width * 10


NETS = {
    "cifar:resnet20": resnet_macs(3, 16, 3, 32),
    "cifar:resnet32": resnet_macs(5, 16, 3, 32),
    "cifar:resnet56": resnet_macs(9, 16, 3, 32),
    "cifar:resnet110": resnet_macs(18, 16, 3, 32),
    "digits:resnet": resnet_macs(1, 16, 1, 8),
    "cifar:mobilenet_v2": 87_976_448,
}


@pytest.mark.parametrize("name", NETS)
def test_costs_and_outputs(name: str) -> None:
    for classes in (10, 7):
        with torch.device("meta"):
            model = build(name, num_classes=classes).eval()
            image = torch.zeros(1, *sample_shape(model))
            with FlopCounterMode(display=False) as counter:
                assert model(image).shape == (1, classes)
        assert (counter.get_total_flops() == 2 * NETS[name]) is (classes == 10)
    assert name in names()


def test_other_libraries_and_own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_net", raising=False)  # of another test
    (tmp_path / "own_net.py").write_text("from torch import nn\n\nclass Outer:\n    net = nn.Flatten\n    number = 3\n")
    assert isinstance(build("own_net:Outer.net"), nn.Flatten)
    assert build("resnet18", num_classes=3).fc.out_features == 3 and sample_shape(build("resnet18")) == (3, 224, 224)
    pytest.importorskip("timm")
    assert sample_shape(build("timm:test_resnet")) == (3, 160, 160) and "timm:resnet18" in names(timm=True)


@pytest.mark.parametrize("library", ["torchvision", "timm"])
def test_names_read_from_the_source_are_those_that_the_library_lists(library: str) -> None:
    package = pytest.importorskip(library)
    prefix = "timm:" if library == "timm" else ""
    listed = {name for name in names(timm=library == "timm") if not name.startswith(("cifar:", "digits:"))}
    assert listed == {prefix + name for name in package.models.list_models()}


def test_libraries_are_not_looked_for_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither timm, nor what it imports where that is installed, nor by a name in the settings of a run."""
    here, installed = tmp_path / "here", tmp_path / "installed"
    for folder in (here, installed):
        folder.mkdir()
    (here / "wandb.py").write_text("raise SystemExit('a file of the current folder')")
    (here / "my_net.py").write_text("from dmcp.models import build\nnet = lambda: build('digits:resnet')\n")
    (installed / "timm.py").write_text(
        "import contextlib\nwith contextlib.suppress(ImportError):\n    import wandb\n"
        "from dmcp.models import build\nis_model = bool\ncreate_model = lambda name, **more: build('digits:resnet')\n"
    )
    for module in ("timm", "wandb", "my_net"):
        monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "path", [str(installed), *sys.path])
    monkeypatch.chdir(here)
    importlib.invalidate_caches()
    assert isinstance(build("my_net:net"), nn.Module)  # its folder is searched, since its name was typed
    assert isinstance(build("timm:resnet18"), nn.Module) and "wandb" not in sys.modules


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("cifar:resnet21", "resnet20"),
        ("own_net:Clasifier", "Classifier"),
        ("own_net:broken", "ZeroDivisionError"),
        ("own_net:Nothing", "not an nn.Module"),
        ("own_net:number", "int"),
        ("a.b:c", "imported"),
    ],
)
def test_names_that_are_refused(name: str, hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    lines = "number = 7\nbroken = lambda: 1 / 0\nclass Nothing: pass\nclass Classifier: pass\n"
    (tmp_path / "own_net.py").write_text(lines)
    monkeypatch.delitem(sys.modules, "own_net", raising=False)
    with pytest.raises(dmcp.DmcpError) as error:
        rebuild(name, (), classes=10)
    assert hint in str(error.value)


def test_libraries_that_are_missing_name_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("timm", "ultralytics"):
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed
    with pytest.raises(DmcpError, match=r"\[timm\]"):
        build("timm:resnet18")
    monkeypatch.delitem(sys.modules, "dmcp.ultralytics", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"\[ultralytics\]"):
        importlib.import_module("dmcp.ultralytics")
