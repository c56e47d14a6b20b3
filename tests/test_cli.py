"""The command line: what people see, also when they mistype."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import dmcp
from dmcp import cli
from dmcp.nets import build

LONG = "a_name_that_does_not_fit_on_a_line_of_eighty_columns_and_must_still_be_found_by_grep"
Capture = pytest.CaptureFixture[str]


def run(capsys: Capture, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command, as if piped."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dmcp", *arguments])
        patch.setattr(sys, "path", list(sys.path))
        patch.setenv("COLUMNS", "80")
        with pytest.raises(SystemExit) as stop:
            cli.main()
    printed = capsys.readouterr()
    return int(stop.value.code or 0), printed.out, printed.err


def test_version_and_python_m() -> None:
    printed = subprocess.run([sys.executable, "-m", "dmcp", "--version"], capture_output=True, text=True, check=True)
    assert printed.stdout == f"torch-dmcp {dmcp.__version__}\n"


def test_help_names_everything(capsys: Capture) -> None:
    assert "inspect" in run(capsys, "--help")[1]
    code, out, _ = run(capsys, "inspect", "--help")
    assert code == 0
    for option in ("MODEL", "--input", "--model-args", "--frozen", "--inexact", "--json"):
        assert option in out


def test_inspect_resnet50_shows_totals_and_tied_layers(capsys: Capture) -> None:
    code, out, err = run(capsys, "inspect", "resnet50")
    assert (code, err) == (0, "")
    assert "4.09 G MACs" in out
    assert "25.56 M params" in out
    for layer in ("layer1.0.conv3", "layer1.0.downsample.0", "layer1.1.conv3", "layer1.2.conv3"):  # one residual stream
        assert layer in out
    assert "\x1b" not in out  # no colours in a pipe
    assert "…" not in out  # no name cut short


def test_inspect_takes_model_arguments(capsys: Capture) -> None:
    code, out, _ = run(capsys, "inspect", "mobilenet_v2", "--model-args", "width_mult=1.5")
    assert code == 0
    assert "0.67 G MACs" in out


def test_inspect_prints_plain_data(capsys: Capture) -> None:
    whole = json.loads(run(capsys, "inspect", "resnet18", "--input", "3x64x64", "--json")[1])
    assert whole["input_shape"] == [3, 64, 64]
    assert whole["params"] == 11_689_512
    with FlopCounterMode(display=False) as counter:
        build("resnet18")(torch.zeros(1, 3, 64, 64))
    assert whole["macs"] == counter.get_total_flops() // 2
    less = json.loads(run(capsys, "inspect", "resnet18", "--input", "3x64x64", "--json", "--frozen", "layer1")[1])
    assert len(less["spaces"]) < len(whole["spaces"])


def test_inspect_shows_a_segmentation_net_and_timm(capsys: Capture) -> None:
    assert run(capsys, "inspect", "lraspp_mobilenet_v3_large", "--input", "3x64x64")[0] == 0
    pytest.importorskip("timm")
    code, out, _ = run(capsys, "inspect", "timm:test_resnet")
    assert code == 0
    assert "timm:test_resnet, one sample of 3x160x160" in out  # the size that timm has for it


def test_inspect_builds_a_network_of_the_current_folder(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mynet.py").write_text(
        "from torch import nn\n"
        "def build(width=8, act=True, name=''):\n"
        "    assert (width, act, name) == (12, False, 'x')\n"
        "    net = nn.Sequential(nn.Conv2d(1, width, 3), nn.Conv2d(width, 2, 3))\n"
        f"    net.add_module({LONG!r}, nn.Conv2d(2, 3, 3))\n"
        "    return net\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    options = ("--input", "1x8x8", "--model-args", "width=12", "--model-args", "act=false", "--model-args", "name=x")
    code, out, err = run(capsys, "inspect", "mynet:build", *options)
    assert (code, err) == (0, "")
    assert "12" in out
    assert LONG in out  # not broken, since nobody reads a pipe at 80 columns
    assert "it is an output of the model" in out
    assert "did you mean build?" in run(capsys, "inspect", "mynet:biuld")[2]
    assert "not a function or class" in run(capsys, "inspect", "mynet:number")[2]
    assert "its builder failed: AssertionError" in run(capsys, "inspect", "mynet:build")[2]


MISTAKES = {
    ("resnet81",): "There is no 'resnet81' in torchvision; did you mean resnet18",
    ("timm:resnet81",): "There is no 'resnet81' in timm; did you mean",
    ("zzzzzzzz",): "no name near it. Other ways: timm:NAME, package.module:factory.",
    ("nowhere.at_all:build",): "nowhere.at_all cannot be imported: ModuleNotFoundError",
    ("resnet18", "--model-args", "width=3"): "resnet18: its builder failed: TypeError",
    ("resnet18", "--model-args", "wide"): "'wide' is not of the form name=value",
    ("resnet18", "--input", "3,224,224"): "write it like 3x224x224",
    ("resnet18", "--input", "0x224x224"): "write it like 3x224x224",
    ("resnet18", "--input", "4x32x32"): "",
    ("resnet18", "--input", "3x64x64", "--frozen", "layer9"): "layer9",
}


@pytest.mark.parametrize("arguments", MISTAKES, ids=" ".join)
def test_a_mistake_is_a_sentence_and_exit_code_2(arguments: tuple[str, ...], capsys: Capture) -> None:
    code, out, err = run(capsys, "inspect", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("dmcp: ")
    assert MISTAKES[arguments] in err
    assert "Traceback" not in err


def test_build_downloads_nothing_and_says_what_is_not_a_network() -> None:
    build("deeplabv3_mobilenet_v3_large", num_classes=3)
    build("googlenet", init_weights=False)
    with pytest.raises(dmcp.DmcpError, match="gave a dict, not an"):
        build("builtins:dict")
