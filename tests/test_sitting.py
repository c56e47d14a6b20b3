"""What `tools/sitting.py` keeps of the cells of a sitting."""

from __future__ import annotations

import json
import subprocess
import tarfile
import time
from pathlib import Path

import pytest
from tools import sitting
from tools.sitting import MOST_BYTES, PART, SHARDS, call, keep, ready


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


def test_calls_carry_all_files_and_none_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    large(tmp_path / "tracked.bin", 300)
    (tmp_path / ".gitignore").write_text("data\nruns\n")
    for name in SHARDS[:-1]:
        large(tmp_path / "data" / "cifar10" / name, 600)
    with pytest.raises(SystemExit, match=r"not here: .*test-0.npz"):
        ready(tmp_path)
    large(tmp_path / "data" / "cifar10" / SHARDS[-1], 300)
    for number in range(2):
        large(tmp_path / "runs" / f"begun-{number}.tgz", 200)
    monkeypatch.setattr(sitting, "MOST_SENT", 1100)
    names = [[file.name for file in files] for files in ready(tmp_path)]
    assert names == [["train-0.npz"], ["train-1.npz"], ["train-2.npz"], ["test-0.npz", "begun-0.tgz", "begun-1.tgz"]]
    monkeypatch.setattr(sitting, "MOST_SENT", 900)
    with pytest.raises(SystemExit, match="too large"):
        ready(tmp_path)


def test_a_call_begins_once_when_all_is_there_and_waits_for_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Thirty minutes of a GPU were once slept away: the first of the calls had failed, and all others waited."""
    root, home, out = tmp_path / "root", tmp_path / "home", tmp_path / "out"
    for folder in (root / "src", root / "results", root / "runs", home, out):
        folder.mkdir(parents=True)
    (root / "tools").mkdir()
    (root / "tools" / "sitting.py").write_text(
        "import sys\nfrom pathlib import Path\nbase = Path(sys.argv[-1])\n"
        "with (base / 'begun.txt').open('a') as file:\n    print(*sys.argv[1:3], file=file)\n(base / 'ended').touch()\n"
    )
    put(tmp_path / "cell" / "a.json", 1)
    with tarfile.open(root / "runs" / "begun-0.tgz", "w:gz") as kept:
        kept.add(tmp_path / "cell", "full")
    began = time.monotonic()
    for name in SHARDS[1:]:
        large(root / "data" / "cifar10" / name, 10)
    assert not call("rest", 60, out, root, home)
    assert capsys.readouterr().out == f"not yet here: {SHARDS[0]}\n"
    for path in (root / "data" / "cifar10").iterdir():
        path.unlink()
    large(root / "data" / "cifar10" / SHARDS[0], 10)
    assert call("rest", 60, out, root, home)
    put(home / "s" / "full" / "a.json", "done since")  # the archive may still lie there at the next call
    assert call("rest", 60, out, root, home)
    assert time.monotonic() - began < 50
    assert (home / "s" / "begun.txt").read_text() == "go rest\n"
    assert json.loads((home / "s" / "full" / "a.json").read_text()) == "done since"
    with tarfile.open(out / "kept-0.tgz") as kept:
        assert "begun.txt" in kept.getnames()
