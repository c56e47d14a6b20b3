"""What `tools/sitting.py` keeps of the cells of a sitting."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest
from tools import sitting
from tools.sitting import MOST_BYTES, PART, UNFINISHED, begin, keep


def put(path: Path, *lines: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def kept_files(base: Path, there: Path) -> list[list[str]]:
    """Names in each archive; all of them are unpacked."""
    names = []
    for part in keep(base, there.with_name("kept")):
        with tarfile.open(part) as kept:
            names.append(kept.getnames())
            kept.extractall(there, filter="data")
    return names


def large(path: Path, size: int = MOST_BYTES + 1) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"0" * size)


def test_done_cells_are_kept_without_weights_and_steps_and_others_with_their_newest_checkpoints(tmp_path: Path) -> None:
    base, there = tmp_path / "base", tmp_path / "there"
    for cell in ("done", "begun", "new"):
        put(base / "ex" / cell / "settings.json", {})
        put(base / "ex" / cell / "log.jsonl", {"stage": "dmcp", "step": 1}, {"stage": "test", "accuracy": 0.5})
        (base / "ex" / cell / "lock.json").write_text("{}")
    large(base / "ex" / "done" / "model.safetensors")
    for file in ("widths.json", "cost.json"):
        put(base / "ex" / "done" / file, {"a": 1})
    put(base / "ex" / "begun" / "checkpoints" / "choice" / "step-000001-ab.safetensors", "choice")
    for step in (90, 100):
        large(base / "ex" / "begun" / "checkpoints" / "dmcp" / f"step-{step:06}-ab.safetensors")
    put(base / "ex" / "plans" / "begun.json", {"cell": {}})
    small, weights = kept_files(base, there)
    begun = {
        f"begun/{name}" for name in ("settings.json", "log.jsonl", "checkpoints/choice/step-000001-ab.safetensors")
    }
    done = {f"done/{name}" for name in ("settings.json", "log.jsonl", "widths.json", "cost.json")}
    assert {name.removeprefix("ex/") for name in small} == begun | done | {"plans/begun.json"}
    assert weights == ["ex/begun/checkpoints/dmcp/step-000100-ab.safetensors"]
    logs = [(there / "ex" / cell / "log.jsonl").read_text().count("\n") for cell in ("done", "begun")]
    assert logs == [1, 2]  # where a stopped cell goes on, its log must be whole


def test_weights_that_a_cell_still_needs_are_kept(tmp_path: Path) -> None:
    """A cell that is done is not run again, so one that learns from it would find no network."""
    base, there = tmp_path / "base", tmp_path / "there"
    for cell in ("teacher", "start", "searched", "other", "taught", "drawn", "ended"):
        put(base / "full" / cell / "settings.json", {})
        put(base / "full" / cell / "log.jsonl", {"stage": "dmcp", "step": 1})
        large(base / "full" / cell / "model.safetensors")
        needs = {
            "taught": {"method": "copy", "uses": "start", "teacher": "teacher"},
            "drawn": {"method": "dmcp-direct", "uses": "searched"},
            "ended": {"method": "dmcp-direct", "uses": "other"},
        }
        put(base / "full" / "plans" / f"{cell}.json", {"cell": needs.get(cell, {})})
        if cell not in ("taught", "drawn"):
            for file in ("widths.json", "cost.json"):
                put(base / "full" / cell / file, {})
    put(base / "full" / "plans" / "unpruned.json", {"cell": None})
    _, weights = kept_files(base, there)
    assert weights == [f"full/{cell}/model.safetensors" for cell in ("searched", "teacher")]
    assert (there / "full" / "searched" / "log.jsonl").read_text()  # a draw reads the steps of its search
    assert not (there / "full" / "teacher" / "log.jsonl").read_text()


def test_a_checkpoint_that_is_replaced_meanwhile_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = tmp_path / "base" / "full" / "begun"
    put(cell / "settings.json", {})
    old = cell / "checkpoints" / "dmcp" / "step-000090-ab.safetensors"
    large(old)

    def newest_of_before(stage: Path) -> Path:
        old.unlink()  # by the cell itself, which has saved a newer one
        return old

    monkeypatch.setattr(sitting, "_newest", newest_of_before)
    assert kept_files(tmp_path / "base", tmp_path / "there")[0] == ["full/begun/settings.json"]


def test_an_archive_is_small_enough_to_come_back(tmp_path: Path) -> None:
    base = tmp_path / "base"
    for number in range(4):
        cell = base / "full" / f"c{number}"
        put(cell / "settings.json", {})
        large(cell / "checkpoints" / "dmcp" / "step-000100-ab.safetensors", PART // 2)
    assert [len(names) for names in kept_files(base, tmp_path / "there")] == [4, 2, 2]


def test_a_sitting_begins_with_what_is_recorded_and_with_cells_that_are_not_finished(tmp_path: Path) -> None:
    there, base = tmp_path / "results", tmp_path / "base"
    put(tmp_path / "settings.json", {"a": 1})
    put(there / "main.json", {})
    begin(there, base)
    assert [path.name for path in base.iterdir()] == ["results"] and (base / "results" / "main.json").exists()
    with tarfile.open(there / UNFINISHED, "w:xz") as kept:
        kept.add(tmp_path / "settings.json", "ex/cell/settings.json")
    begin(there, tmp_path / "other")
    assert json.loads((tmp_path / "other" / "ex" / "cell" / "settings.json").read_text()) == {"a": 1}
