"""What must never change: the structure that is traced, and the files that `save` wrote."""

from __future__ import annotations

import json

import pytest
import torch
from tools import golden

import dmcp

STRUCTURE = json.loads(golden.STRUCTURE.read_text())
SAVED = golden.STRUCTURE.parent / "saved"  # written by the commit 68f4eea; never write it anew


@pytest.mark.parametrize("name", STRUCTURE)
def test_structure(name: str) -> None:
    """Spaces, what is unprunable, bindings, places of gates and costs are those of tests/fixtures/structure.json."""
    assert not list(golden.differences(STRUCTURE[name], golden.structure(golden.traced(name)[1])))


def test_saved_files_load() -> None:
    """Into the unpruned model, freshly built, with the output that the network had when it was saved."""
    small = dmcp.load(SAVED, golden.build("digits:resnet", seed=1)).eval()
    expected = json.loads((SAVED / "output.json").read_text())
    assert json.loads((SAVED / "widths.json").read_text())["widths"] == expected["widths"]
    output = small(torch.arange(128.0).view(2, 1, 8, 8) / 64 - 1)
    torch.testing.assert_close(output, torch.tensor(expected["output"]), rtol=0, atol=1e-5)


def test_differences_are_named() -> None:
    """The golden check is no better than its comparison."""
    one = {"a": [1, {"b": "x"}], "c": 1, "nan": float("nan")}
    assert not list(golden.differences(one, json.loads(json.dumps(one))))
    other = {"a": [1, {"b": "y"}], "d": 1, "nan": 0.0}
    places = [line.partition(":")[0] for line in golden.differences(one, other)]
    assert places == ["/a/1/b", "/c", "/nan", "/d"]
    assert list(golden.differences([1], [1, 2])) and list(golden.differences({"a": None}, {"a": {}}))
