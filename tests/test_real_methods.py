"""experiments/real/methods.py: the two methods that only the rows of docs/results.md have."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dmcp
from dmcp.data.datasets import load
from dmcp.data.loaders import make_loader
from dmcp.models import build
from experiments.real import methods
from experiments.real.rows import write_rows

pytestmark = pytest.mark.usefixtures("quick_commands")

SEARCH = dmcp.SearchConfig(budget="50%", epochs=1, seed=0)
TRAIN = dmcp.TrainConfig(epochs=1, lr=1e-30, warmup_lr=1e-30, seed=0)  # the weights stay as they are


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    torch.manual_seed(0)
    model = build("digits:resnet", width=8)
    dmcp.train(model, make_loader(load("digits").train, 64, train=True), dmcp.TrainConfig(epochs=1))
    return model


def prune(model: nn.Module, method: str, **settings: Any) -> dmcp.PruneResult:
    digits = load("digits")
    train, test = make_loader(digits.train, 236, train=True), make_loader(digits.test, 100, train=False)
    settings = {"search": SEARCH, "train": TRAIN, "teacher": None} | settings
    return methods.prune(copy.deepcopy(model), train, test, ["50%"], method=method, **settings)


def filters(model: nn.Module) -> set[tuple[float, ...]]:
    """Those of the first layer, which reads all colors in every network."""
    return {tuple(row.flatten().tolist()) for row in model.conv1.weight.detach()}


def test_searched_widths_get_the_weights_of_the_original(trained: nn.Module) -> None:
    searched = prune(trained, "dmcp")
    result = prune(trained, methods.ORIGINAL_WEIGHTS)
    assert result.widths == searched.widths
    assert [row.name for row in result.rows] == ["original", "right after the cut", "dmcp-original-weights"]
    assert filters(result.model) < filters(trained)
    assert not filters(searched.model) & filters(trained)  # the search has trained its weights


def test_widths_that_are_known_are_not_searched_again(
    trained: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = dmcp.trace(trained, torch.zeros(2, *load("digits").train.shape))
    widths = dmcp.uniform(graph, "50%")
    file = tmp_path / "rows.jsonl"
    facts = {"network": "digits", "seed": 0, "budget": "50%"}
    rows = [facts | {"method": "dmcp", "row": "dmcp", "widths": dict(widths)}]
    rows += [facts | {"method": "l2", "row": "l2", "widths": {}}]
    file.write_text("\n".join(map(json.dumps, rows)))
    known = methods.recorded_widths(["50%", "30%"], [file], network="digits", seed=0)
    assert known == {"50%": dict(widths)}
    assert methods.recorded_widths(["50%"], [file], network="digits", seed=1) == {}
    monkeypatch.setattr("dmcp.pruning.search_widths", None)
    assert prune(trained, methods.ORIGINAL_WEIGHTS, searched=known).widths == widths
    with pytest.raises(TypeError):
        prune(trained, methods.ORIGINAL_WEIGHTS)


def test_torch_pruning_has_a_row_and_the_same_budget(
    trained: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch_pruning")
    result = prune(trained, methods.TORCH_PRUNING)
    assert [row.name for row in result.rows] == ["original", "right after the cut", "torch-pruning"]
    assert 0.475 < result.graph.macs(result.widths) / result.graph.macs() <= 0.5
    assert filters(result.model) < filters(trained)

    monkeypatch.setitem(sys.modules, "__main__", methods)  # whose name is recorded
    facts = {"network": "digits", "method": methods.TORCH_PRUNING, "epochs": 1, "seed": 0, "budget": "50%"}
    write_rows(tmp_path / "rows.jsonl", result, save=tmp_path / "networks", **facts)
    small = dmcp.load(tmp_path / "networks" / "digits-torch-pruning-1-0-50", trained)
    assert filters(small) == filters(result.model)


def test_a_missing_package_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="Torch-Pruning is not installed"):
        prune(nn.Identity(), methods.TORCH_PRUNING)
    methods.check_installed("l2")
