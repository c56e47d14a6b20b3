"""docs/errors.md is executed: every mistake in its table gets just the sentence that stands there."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typed import command

from dmcp import runs
from dmcp.models import build
from dmcp.tracing.trace import trace
from dmcp.training import Event

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"
PRUNE = "prune --model digits:resnet --data digits --device cpu --batch 708 --search-epochs 2 --epochs 1 --quiet"
MOVED = ('"data": "digits"', '"data": "my-shards"')  # in the settings of a run
NET = """
from torch import nn
from typed import command

number = 3

def build(width=4):
    return nn.Sequential(nn.Conv2d(1, width, 3), nn.Conv2d(width, 2, 3))

def pixels():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 10, 3))

def fixed(num_classes=2):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 14 * 14, num_classes))

def linear():
    return nn.Linear(8, 2)

def table():
    return {}

def failing():
    raise LookupError("the cupboard is bare")
"""


def rows() -> list[tuple[str, str, str]]:
    """Mistake, command and sentence of each row of the table."""
    cells = (re.split(r"(?<!\\)\|", line)[1:-1] for line in PAGE.read_text().splitlines() if line.startswith("| "))
    plain = [[cell.strip().strip("`").replace(r"\|", "|") for cell in row] for row in cells]
    return [(mistake, command, sentence) for mistake, command, sentence in plain if mistake != "mistake"]


ROWS = rows()


# what the commands find in the folder, as the page says


def write_photos(folder: Path, *classes: str, parts: tuple[str, ...] = ("train", "val")) -> Path:
    for part in parts:
        for name in classes:
            (folder / part / name).mkdir(parents=True)
            for number in range(2):
                Image.new("RGB", (16, 16), (number, 0, 0)).save(folder / part / name / f"{number}.png")
    return folder


def write_shards(folder: Path, images: np.ndarray, labels: np.ndarray, *parts: str) -> None:
    folder.mkdir()
    for part in parts:
        np.savez(folder / f"{part}-0.npz", images=images, labels=labels)


def write_data(here: Path) -> None:
    (here / "empty").mkdir()
    (here / "note.txt").write_text("not what you look for")
    write_photos(here / "photos", "cat", "dog")
    write_photos(here / "one-class", "cat")
    write_photos(here / "no-val", "cat", "dog", parts=("train",))
    write_photos(here / "other-classes", "cat", "dog", parts=("train",))
    write_photos(here / "other-classes", "cat", "cow", parts=("val",))
    write_photos(here / "no-images", "cat", "dog")
    for path in (here / "no-images").rglob("*.png"):
        path.unlink()
    for path in write_photos(here / "broken-photos", "cat", "dog").rglob("*.png"):
        path.write_bytes(path.read_bytes()[:40])
    for path in write_photos(here / "cut-photos", "cat", "dog").rglob("*.png"):
        path.write_bytes(path.read_bytes()[:-28])
    (here / "broken-shards").mkdir()
    (here / "broken-shards" / "train-0.npz").write_bytes(b"PK no more")
    images, labels = np.zeros((4, 8, 8, 1), np.uint8), np.arange(4) % 2
    write_shards(here / "float-shards", images.astype(np.float32), labels, "train", "test")
    write_shards(here / "no-test", images, labels, "train")
    write_shards(here / "one-label", images, 0 * labels, "train", "test")


def write_files(here: Path) -> None:
    (here / "mytable_net.py").write_text(NET)
    (here / "broken.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00garbage!")
    torch.save(build("digits:resnet"), here / "pickle.pth")
    torch.save(build("digits:resnet", num_classes=3).state_dict(), here / "three-classes.pth")
    torch.save(build("digits:resnet", width=24).state_dict(), here / "wide.pth")
    torch.save(nn.Linear(2, 2).state_dict(), here / "other-weights.pth")
    torch.save([1, 2], here / "list.pth")
    (here / "list.json").write_text("[1, 2]")
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 2, 3))
    (here / "other-widths.json").write_text(json.dumps(trace(net, torch.zeros(2, 1, 8, 8)).full.to_json()))


def log_and_die(run: runs.Run, event: Event, log: Callable[[runs.Run, Event], None] = runs.Run.on_event) -> None:
    log(run, event)
    raise KeyboardInterrupt


def write_runs(here: Path) -> None:
    """A finished run, one that was killed in its search, and copies with damage."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "draw_all", lambda *_, **__: [])  # figures take longer than such a run
        assert command(*PRUNE.split(), "--out", "run") == 0
        patch.setattr(runs.Run, "on_event", log_and_die)
        assert command(*PRUNE.split(), "--out", "half") == 130
    for name in ("damaged", "edited", "foreign", "moved"):
        shutil.copytree("run", name)
    weights = here / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    (here / "damaged" / "search.safetensors").write_bytes(b"")
    widths = json.loads((here / "run" / "widths.json").read_text())
    first = next(iter(widths["widths"]))
    (here / "edited" / "widths.json").write_text(json.dumps(widths | {"widths": widths["widths"] | {first: 999}}))
    (here / "foreign" / "settings.json").write_text("{}")
    (here / "moved" / "settings.json").write_text((here / "run" / "settings.json").read_text().replace(*MOVED))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which the commands are typed."""
    folder, before = tmp_path_factory.mktemp("errors"), Path.cwd()
    os.chdir(folder)
    write_data(folder)
    write_files(folder)
    write_runs(folder)
    yield folder
    os.chdir(before)


def contents(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path): path.stat().st_mtime_ns for path in files}


@pytest.mark.parametrize(("mistake", "typed", "sentence"), ROWS, ids=[row[0] for row in ROWS])
def test_the_sentence_is_what_the_page_says(
    mistake: str,
    typed: str,
    sentence: str,
    here: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = shlex.split(typed)
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    assert words.pop(0) == "dmcp"
    if "timm:" in typed:
        pytest.importorskip("timm")
    before = contents(here)
    capfd.readouterr()
    code = command(*words)
    out, err = capfd.readouterr()
    assert (code, out) == (2, "")
    pattern = ".+".join(map(re.escape, f"dmcp: {sentence}\n".split("…")))
    assert re.fullmatch(pattern, err), err
    assert contents(here) == before  # refused before anything is written


def test_the_page_has_many_different_mistakes() -> None:
    assert len(ROWS) >= 40
    assert len({typed for _, typed, _ in ROWS}) == len(ROWS)
    commands = {re.search(r"dmcp (\w*)", typed)[1] for _, typed, _ in ROWS}  # type: ignore[index]
    every = {"data", "inspect", "prune", "search", "sample", "train", "evaluate", "runs", "report"}
    assert every <= commands
