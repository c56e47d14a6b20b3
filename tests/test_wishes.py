"""docs/wishes.md: every command line in it is one that the program takes, and bounds mean what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from test_cli import DRY, Capture, run
from test_exporting import needs_onnx
from torch import nn

import dmcp
from dmcp.models import build

PAGE = (Path(__file__).parents[1] / "docs" / "wishes.md").read_text()
LINES = re.findall(r"^\|[^|]*\| `(--[^`]*)` \|", PAGE, re.MULTILINE)


def test_the_page_has_lines_to_try() -> None:
    assert len(LINES) >= 12 and {"--min-channels 8", "--ignore layer1", "--align 8"} <= {*LINES}


@pytest.mark.slow
@pytest.mark.parametrize("line", [pytest.param(it, marks=needs_onnx) if "onnx" in it else it for it in LINES])
def test_a_line_is_taken(line: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    save_file(build("digits:resnet").state_dict(), tmp_path / "full" / "model.safetensors")
    code, out, err = run(capsys, "prune", *DRY, "--json", *line.split())
    assert code == 0 and json.loads(out)["reachable"], err


def test_a_frozen_head_still_reads_fewer_channels_unless_what_is_before_it_stays() -> None:
    net = nn.Sequential()
    net.body, net.neck, net.head = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Conv2d(16, 4, 3)
    x = torch.zeros(2, 3, 12, 12)
    for ignore, reads in ((["head"], 8), (["head", "neck"], 16)):
        graph = dmcp.trace(net, x, ignore=ignore)
        small = dmcp.cut(net, graph, graph.widths({space.name: 8 for space in graph.spaces}))
        assert (small.head.in_channels, small.head.out_channels) == (reads, 4)
        assert small.body.out_channels == 8
