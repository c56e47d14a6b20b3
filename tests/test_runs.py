"""A run is a folder: what is in it, and what is read back from it."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from test_pruning import SEARCH, TRAIN, Noise, traced

import dmcp
from dmcp.errors import FileError, WidthsError
from dmcp.pruning import Event, PruneResult
from dmcp.runs import free_folder, load_search, open_run, read_json, save_search

FILES = {"log.jsonl", "search.json", "search.safetensors", "widths.json", "model.safetensors", "report.md"}


@functools.cache
def pruned() -> tuple[PruneResult, list[Event]]:
    model, graph = traced()
    events: list[Event] = []
    result = dmcp.prune(
        model, Noise(), Noise(1), graph=graph, search=SEARCH, train=TRAIN, controls=True, on_event=events.append
    )
    return result, events


def test_a_run_is_a_folder_that_can_be_read_back(tmp_path: Path) -> None:
    result, events = pruned()
    run = open_run(tmp_path / "deep" / "run")
    for event in events:
        run.on_event(event)
    run.finish(result)
    names = {path.name for path in run.folder.iterdir()}
    assert names >= FILES
    assert len([name for name in names if name.endswith(".svg")]) >= 4
    assert not [name for name in names if name.startswith(".")]  # nothing half written is left

    lines = [json.loads(line) for line in (run.folder / "log.jsonl").read_text().splitlines()]
    assert len(lines) == len(events) - 1  # the search's result has its own files
    assert {line["stage"] for line in lines} == {"search", "unpruned", "uniform widths", "ours", "test"}
    report = (run.folder / "report.md").read_text()
    for row in result.rows:
        assert f"| {row.name} | {row.macs:,} | {row.params:,} | {100 * row.accuracy:.2f} % |" in report
    for name in names:
        assert not name.endswith(".svg") or f"({name})" in report

    small = dmcp.load(run.folder, traced()[0])
    x = torch.randn(2, *result.graph.input_shape)
    assert torch.equal(small.eval()(x), result.model.eval()(x))
    found = load_search(run.folder, result.graph)
    assert torch.equal(found.alphas, result.search.alphas)
    assert found.log == result.search.log
    assert dmcp.expected(found) == result.widths
    assert found.budget == result.search.budget


def test_a_folder_with_files_is_refused_and_a_free_name_is_found(tmp_path: Path) -> None:
    assert open_run(tmp_path).folder == tmp_path  # empty
    (tmp_path / "mine.txt").write_text("dear")
    with pytest.raises(FileError, match="already holds files"):
        open_run(tmp_path)
    with pytest.raises(FileError, match="no run can be kept here"):
        open_run(tmp_path / "mine.txt")
    assert free_folder("new", tmp_path).name == "new"
    (tmp_path / "new").mkdir()
    (tmp_path / "new-2").mkdir()
    assert free_folder("new", tmp_path).name == "new-3"


def test_a_search_of_another_network_or_a_broken_file_is_refused(tmp_path: Path) -> None:
    found = pruned()[0].search
    with pytest.raises(FileError, match=r"search\.json: cannot be read"):
        load_search(tmp_path, found.graph)
    save_search(found, tmp_path)
    other = dmcp.trace(torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.Conv2d(4, 2, 1)), torch.zeros(2, 3, 4, 4))
    with pytest.raises(WidthsError, match="another architecture"):
        load_search(tmp_path, other)
    (tmp_path / "search.safetensors").write_bytes(b"no")
    with pytest.raises(FileError, match=r"search\.safetensors: cannot be read"):
        load_search(tmp_path, found.graph)
    (tmp_path / "search.json").write_text("{")
    with pytest.raises(FileError, match="not JSON"):
        load_search(tmp_path, found.graph)
    (tmp_path / "search.json").write_text("[]")
    with pytest.raises(FileError, match="holds a list"):
        read_json(tmp_path / "search.json")
