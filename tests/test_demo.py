"""`dmcp demo`, in a smaller setting: what it prints is what its run has."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
from commands import Capture, needs_onnx, run, table_cells

SHORT = ("--model-args", "width=16", "--align", "4", "--batch", "256", "--search-epochs", "2", "--epochs", "1")


@pytest.mark.parametrize(
    ("file", "runtime"), [pytest.param("model.onnx", "onnxruntime", marks=needs_onnx), ("model.pt2", "torch")]
)
def test_demo(file: str, runtime: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wheel alone brings no ONNX: then the file is one that torch runs."""
    threads = torch.get_num_threads()
    find_spec = importlib.util.find_spec
    if runtime == "torch":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "onnx" in name else find_spec(name))
    try:
        budget = ("--budget", "30%")
        code, printed, _ = run(
            capsys, "demo", *SHORT, *budget, "--out", str(tmp_path / "run")
        )  # the last option counts
    finally:
        torch.set_num_threads(threads)
    assert code == 0 and printed.startswith("\n$ dmcp prune --model digits:resnet ")

    rows = {cells[0]: cells for cells in table_cells(printed)}
    full, ours = (int(rows[name][1].replace(",", "")) for name in ("unpruned", "dmcp"))
    assert 0.9 * 0.3 <= ours / full <= 0.3

    exported = json.loads((tmp_path / "run" / "export.json").read_text())[file]
    ms = exported["ms"]
    last = printed.splitlines()[-1]
    page = (tmp_path / "run" / "report.html").read_text()
    assert exported["runtime"].startswith(runtime) and exported["runtime"] in last
    assert f"{ms['unpruned'] / ms['float32']:.2f}× as fast" in last and last.endswith("report.html")
    assert f"{ms['float32']:.3g} ms a sample in {runtime}" in page
    assert "dmcp prune --model digits:resnet" in page  # the command that made the run, not the demo
