"""What `tools/sitting.py` keeps of the cells of a sitting."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

from tools.sitting import MOST_BYTES, UNFINISHED, begin, keep


def put(path: Path, *lines: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def test_done_cells_are_kept_without_weights_and_steps_and_chosen_ones_with_their_choice(tmp_path: Path) -> None:
    base, steps = tmp_path / "base", [{"stage": "dmcp", "step": 1}, {"stage": "test", "accuracy": 0.5}]
    for cell in ("done", "chosen", "begun"):
        put(base / "ex" / cell / "settings.json", {})
        put(base / "ex" / cell / "log.jsonl", *steps)
        (base / "ex" / cell / "model.safetensors").write_bytes(b"0" * (MOST_BYTES + 1))
        (base / "ex" / cell / "lock.json").write_text("{}")
    for file in ("widths.json", "cost.json"):
        put(base / "ex" / "done" / file, {"a": 1})
    for stage in ("search", "choice"):
        put(base / "ex" / "chosen" / "checkpoints" / stage / "step-1.safetensors", stage)
    put(base / "ex" / "begun" / "checkpoints" / "search" / "step-1.safetensors", "search")
    put(base / "ex" / "plans" / "begun.json", {"cell": {}})
    keep(base, tmp_path / "kept.tgz")
    with tarfile.open(tmp_path / "kept.tgz") as kept:
        names = {name.removeprefix("ex/") for name in kept.getnames()}
        kept.extractall(tmp_path / "there", filter="data")
    chosen = {f"chosen/{name}" for name in ("settings.json", "log.jsonl", "checkpoints/choice/step-1.safetensors")}
    done = {f"done/{name}" for name in ("settings.json", "log.jsonl", "widths.json", "cost.json")}
    assert names == chosen | done | {"plans/begun.json"}
    logs = [(tmp_path / "there" / "ex" / cell / "log.jsonl").read_text().count("\n") for cell in ("done", "chosen")]
    assert logs == [1, 2]  # where a stopped cell goes on, its log must be whole


def test_weights_that_a_cell_still_needs_are_kept(tmp_path: Path) -> None:
    """A cell that is done is not run again, so one that learns from it would find no network."""
    base = tmp_path / "base"
    for cell in ("teacher", "start", "other", "taught", "ended"):
        put(base / "full" / cell / "settings.json", {})
        put(base / "full" / cell / "log.jsonl", {"stage": "dmcp", "step": 1})
        (base / "full" / cell / "model.safetensors").write_bytes(b"0")
        needs = {"taught": {"uses": "start", "teacher": "teacher"}, "ended": {"uses": "other"}}.get(cell, {})
        put(base / "full" / "plans" / f"{cell}.json", {"cell": needs})
        if cell != "taught":
            for file in ("widths.json", "cost.json"):
                put(base / "full" / cell / file, {})
    put(base / "full" / "plans" / "unpruned.json", {"cell": None})
    keep(base, tmp_path / "kept.tgz")
    with tarfile.open(tmp_path / "kept.tgz") as kept:
        assert {name for name in kept.getnames() if name.endswith(".safetensors")} == {
            f"full/{cell}/model.safetensors" for cell in ("teacher", "start")
        }
        log = kept.extractfile("full/start/log.jsonl")
        assert log and log.read()  # a draw reads the steps of its search


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
