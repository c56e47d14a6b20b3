"""A run is a folder: what is in it, and what is read back from it."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from test_pruning import SEARCH, TRAIN, Noise, traced

import dmcp
from dmcp.checkpoint import Checkpoint, save_checkpoint
from dmcp.errors import DmcpError, FileError, WidthsError
from dmcp.markov import CHAIN, INDEPENDENT, Process
from dmcp.pruning import PruneResult
from dmcp.runs import free_folder, load_search, open_run, read_json, save_search
from dmcp.training import Event

FILES = {"log.jsonl", "search.json", "search.safetensors", "widths.json", "model.safetensors", "report.md"}


@functools.cache
def pruned() -> tuple[PruneResult, list[Event]]:
    model, graph = traced()
    events: list[Event] = []
    result = dmcp.prune(
        model,
        Noise(),
        Noise(1),
        graph=graph,
        search=SEARCH,
        train=TRAIN,
        baselines=True,
        runtime=dmcp.Runtime(on_event=events.append),
    )
    return result, events


@pytest.mark.usefixtures("figures")
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
    assert {line["stage"] for line in lines} == {"search", "unpruned", "uniform", "dmcp", "test"}
    report = (run.folder / "report.md").read_text()
    for row in result.rows:
        shares = [
            f"{100 * part:.1f} %" for part in (row.macs / result.graph.macs(), row.params / result.graph.params())
        ]
        counts = f"| {row.macs:,} | {shares[0]} | {row.params:,} | {shares[1]} |"
        assert f"| {row.name} {counts} {100 * row.accuracy:.2f} % |" in report
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


@pytest.mark.parametrize("process", [CHAIN, INDEPENDENT], ids=["chain", "independent"])
def test_a_search_is_read_with_what_its_alphas_mean(tmp_path: Path, process: Process) -> None:
    found = replace(pruned()[0].search, process=process)
    save_search(found, tmp_path)
    assert load_search(tmp_path, found.graph).process is process


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
    with pytest.raises(FileError, match=r"search\.safetensors: not a safetensors file"):
        load_search(tmp_path, found.graph)
    (tmp_path / "search.json").write_text("{")
    with pytest.raises(FileError, match="not JSON"):
        load_search(tmp_path, found.graph)
    (tmp_path / "search.json").write_text("[]")
    with pytest.raises(FileError, match="holds a list"):
        read_json(tmp_path / "search.json")


def test_only_whole_lines_of_the_log_are_read(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.log({"stage": "search", "step": 0})
    with (tmp_path / "log.jsonl").open("a") as file:
        file.write('{"stage": "sea')  # killed here
    assert run.records("search") == [{"step": 0}]
    assert run.lines() == 1
    (tmp_path / "log.jsonl").write_text('{"step": 3}\n')
    with pytest.raises(FileError, match="line 1: not a record of a run"):
        run.records("search")


@pytest.mark.parametrize("facts", [{}, {"lines": "2", "done": False}, {"lines": 2, "done": 0}], ids=str)
def test_checkpoints_that_are_not_of_a_run_are_refused(facts: dict[str, Any], tmp_path: Path) -> None:
    run = open_run(tmp_path)
    save_checkpoint(run.checkpointer({}).stage("search").folder, Checkpoint(1, {}, facts))
    with pytest.raises(FileError, match="not the checkpoints of a run"):
        run.rewind()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"budget": None}, "Budget is not a table"),
        ({"budget": {"limits": [{"kind": "watts", "target": 3}], "text": ""}}, "A limit is one of"),
        ({"tolerance": 1.5}, "a tolerance of 1.5"),
        ({"align": True}, "align: True"),
        ({"more": 1}, "more"),
        ({"spaces": ["a"]}, "another architecture"),
    ],
    ids=str,
)
def test_an_edited_search_is_refused(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    found = pruned()[0].search
    save_search(found, tmp_path)
    path = tmp_path / "search.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(DmcpError, match=sentence):
        load_search(tmp_path, found.graph)


@pytest.mark.parametrize("kind", ["float sizes", "no floor", "too wide", "NaN", "no alphas"])
def test_chains_that_cannot_be_are_refused(kind: str, tmp_path: Path) -> None:
    found = pruned()[0].search
    save_search(found, tmp_path)
    tensors = {"alphas": found.alphas.clone(), "sizes": found.sizes.clone()}
    if kind == "float sizes":
        tensors["sizes"] = tensors["sizes"].double()
    elif kind == "NaN":
        tensors["alphas"][0, 0] = float("nan")
    elif kind == "no alphas":
        del tensors["alphas"]
    else:
        tensors["sizes"][0, 0] = 0 if kind == "no floor" else 2**62
    safetensors.torch.save_file(tensors, tmp_path / "search.safetensors")
    with pytest.raises(FileError, match="of this network's chains"):
        load_search(tmp_path, found.graph)
