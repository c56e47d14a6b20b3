"""What `dmcp data` finds in folders and arrays, and what is refused, skipped or warned of before the first step."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_datasets import write_photos, write_shards
from typed import command

from dmcp.data.check import check_data, no_images
from dmcp.data.datasets import DataSets, FolderSet, load, preprocessing

Capture = pytest.CaptureFixture[str]
NETWORK = ("--model", "my_small_net:build", "--data", "photos", "--batch", "4", "--device", "cpu", "--workers", "0")
SMALL = (*NETWORK, "--input", "3x32x32")
TRAIN = ("train", *SMALL, "--epochs", "1", "--quiet", "--json")
NET = """
from torch import nn

def build(num_classes=2):
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), head)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_small_net.py").write_text(NET)
    return tmp_path


def opened(name: str = "photos") -> DataSets:
    return load(name, strict=False)


def truncate(path: Path) -> None:
    """Its first bytes say what it is, its last ones are gone."""
    path.write_bytes(path.read_bytes()[:-1000])


def run(capsys: Capture, *words: str) -> tuple[int, str, str]:
    code = command(*words)
    out, err = capsys.readouterr()
    return code, out, err


def test_sound_files(here: Path) -> None:
    write_photos(here / "photos", (40, 40), count=3)
    for number in range(2):
        Image.new("L", (8 + number, 60)).save(here / "photos" / "train" / "cat" / f"more-{number}.png")
    Image.new("P", (100, 90)).save(here / "photos" / "val" / "dog" / "more.gif.png")
    facts = check_data(opened(), workers=2)
    assert (facts.train, facts.test, facts.classes) == (8, 7, 2) and facts.enlarged == 15
    assert (facts.train_from, facts.test_from) == ("photos/train", "photos/val")
    assert (facts.smallest_class, facts.largest_class) == (("dog", 3), ("cat", 5))
    assert facts.sizes == ((60, 8), (40, 40), (90, 100)) and facts.modes == {"RGB": 12, "L": 2, "P": 1}
    assert not facts.broken and not facts.in_both and not facts.wrong_classes and facts.is_well


@pytest.mark.parametrize("workers", [0, 3])
def test_every_file_is_decoded_and_compared(workers: int, here: Path) -> None:
    photos = write_photos(here / "photos", (40, 40))
    truncate(photos / "train" / "cat" / "1.png")
    (photos / "train" / "dog" / "3.png").write_bytes(b"")
    (photos / "val" / "cat" / "0.png").write_text("no image")
    (photos / "val" / "cat" / "1.png").write_bytes(b"")  # alike, but no image
    (photos / "val" / "dog" / "2.png").unlink()
    (photos / "val" / "dog" / "2.png").symlink_to("nowhere.png")
    (photos / "val" / "cat" / "3.png").write_bytes((photos / "train" / "dog" / "1.png").read_bytes())
    (photos / "train" / "cat" / "3.png").write_bytes((photos / "train" / "cat" / "0.png").read_bytes())  # train alone
    seen: list[tuple[int, int]] = []
    facts = check_data(opened(), workers, lambda done, count: seen.append((done, count)))
    names = ["train/cat/1", "train/dog/3", "val/cat/0", "val/cat/1", "val/dog/2"]
    assert [it.file for it in facts.broken] == [f"photos/{name}.png" for name in names]
    assert [it.refused for it in facts.broken] == [False, False, False, False, True]
    assert seen == [(number, 16) for number in range(1, 17)]
    assert facts.in_both == (("photos/val/cat/3.png", "photos/train/dog/1.png"),)
    assert sum(facts.modes.values()) == 11 and not facts.is_well
    part = load("photos").test
    assert isinstance(part, FolderSet)
    assert [it.file for it in no_images(part)] == [f"photos/{name}.png" for name in names[2:]]  # from first bytes


def test_wrong_classes_are_reported_all_at_once(here: Path, capsys: Capture) -> None:
    photos = write_photos(here / "photos", count=1, classes=("ant", "bee", "cat"))
    for name in ("train/ant", "train/bee", "val/cat"):
        (photos / name / "0.png").unlink()
    (photos / "val" / "fox").mkdir()
    facts = check_data(opened())
    assert facts.empty_classes == ("photos/train/ant", "photos/train/bee", "photos/val/cat", "photos/val/fox")
    assert facts.lone_classes == ("photos/val/fox",) and facts.smallest_class == ("ant", 0) and not facts.is_well
    code, out, _ = run(capsys, "data", "photos", "--quiet")
    assert code == 2 and all(name in out for name in facts.empty_classes)


def test_arrays(here: Path, capsys: Capture) -> None:
    facts = check_data(opened("digits"))
    assert (facts.train, facts.test, facts.classes) == (1415, 382, 10) and facts.enlarged is None
    assert facts.sizes == ((8, 8),) * 3 and facts.modes == {"1 channel": 1797} and facts.is_well
    write_shards(here / "shards", train0={"labels": np.array([0, 0, 3, 3, 3, 0])}, train1=None)
    with np.load(here / "shards" / "train-0.npz") as train:
        np.savez(here / "shards" / "test-0.npz", images=train["images"][[4]], labels=np.array([3]))
    facts = check_data(opened("shards"))
    assert facts.in_both == (("test image 0", "training image 4"),) and facts.modes == {"3 channels": 7}
    assert facts.test_from == "shards/test-*.npz" and facts.empty_classes == ("1", "2") and facts.is_well
    shutil.copytree(here / "shards", here / "data" / "cifar10")
    assert run(capsys, "data", "cifar10")[0] == run(capsys, "data", "digits")[0] == 0


def test_pipes_and_devices_are_never_opened(here: Path, capsys: Capture) -> None:
    photos = write_photos(here / "photos", (40, 40))
    os.mkfifo(photos / "train" / "cat" / "0.fifo.png")  # the first, whose size is read
    (photos / "val" / "cat" / "link.png").symlink_to(photos / "train" / "cat" / "0.fifo.png")
    (photos / "val" / "dog" / "endless.png").symlink_to("/dev/zero")
    (photos / "val" / "dog" / "well.png").symlink_to(photos / "val" / "dog" / "1.png")  # what it leads to is a file
    signal.alarm(60)  # ends the process, instead of waiting for ever
    code, out, _ = run(capsys, "data", "photos", "--json", "--quiet")
    broken = [f"photos/{name}.png" for name in ("train/cat/0.fifo", "val/cat/link", "val/dog/endless")]
    assert code == 2 and [it["file"] for it in json.loads(out)["broken"]] == broken
    assert run(capsys, *TRAIN)[0] == 2
    code, out, err = run(capsys, *TRAIN, "--corrupt", "skip")
    signal.alarm(0)
    assert code == 0 and json.loads(out)["replaced"]["test"], err


def test_the_command_reports_everything(here: Path, capsys: Capture) -> None:
    photos = write_photos(here / "photos", (40, 40))
    code, out, err = run(capsys, "data", "photos")
    assert (code, err) == (0, "")
    assert all(words in out for words in ("2 classes", "8 training images: photos/train", "40x40", "read: none"))
    for number in range(4):
        truncate(photos / "train" / "cat" / f"{number}.png")
    (photos / "train" / "dog" / "0.png").unlink()
    (photos / "val" / "dog" / "0.png").write_bytes((photos / "train" / "dog" / "2.png").read_bytes())
    code, out, err = run(capsys, "data", "photos", "--quiet")
    assert code == 2 and "4 of 15 image files" in err and "--corrupt skip" in err
    assert "photos/train/cat/2.png: " in out
    assert "photos/val/dog/0.png is photos/train/dog/2.png" in out and "swapped?" in out
    code, out, _ = run(capsys, "data", "photos", "--quiet", "--json")
    facts = json.loads(out)
    assert code == 2 and len(facts["broken"]) == 4 and facts["well"] is False
    assert facts["in_both"] == [["photos/val/dog/0.png", "photos/train/dog/2.png"]]
    assert (facts["train"], facts["train_from"], facts["sizes"]) == (7, "photos/train", 3 * [[40, 40]])


# before the first step


def test_broken_files_are_replaced_and_counted(here: Path, capsys: Capture) -> None:
    """Also those of a run that was stopped by one, and goes on with --corrupt skip."""
    photos = write_photos(here / "photos", (40, 40))
    for name in ("train/cat/1", "train/dog/2", "val/dog/3"):
        truncate(photos / f"{name}.png")
    code, out, _ = run(capsys, *TRAIN, "--corrupt", "skip", "--out", "one")
    assert code == 0 and json.loads(out)["replaced"] == {"train": 2, "test": 1}
    assert "2 training and 1 test image could not be read" in (here / "one" / "report.md").read_text()
    listed = json.loads((here / "one" / "replaced.json").read_text())
    assert listed["test"] == ["photos/val/dog/3.png"] and len(listed["train"]) == 2
    code, out, err = run(capsys, "evaluate", "one", "--corrupt", "skip", "--workers", "0", "--device", "cpu", "--json")
    assert code == 0 and json.loads(out)["replaced"] == {"train": 0, "test": 1}, err
    for name in ("train/cat/1", "train/dog/2"):
        shutil.copy(photos / "train" / "cat" / "0.png", photos / f"{name}.png")
    code, _, err = run(capsys, *TRAIN, "--out", "two")
    assert code == 2 and "dmcp train --resume two" in err
    code, out, err = run(capsys, "train", "--resume", "two", "--corrupt", "skip", "--quiet", "--json")
    assert code == 0 and json.loads(out)["replaced"] == {"train": 0, "test": 1}, err
    (photos / "val" / "dog" / "more.png").symlink_to(here / "gone.png")  # which nothing skips
    code, out, err = run(capsys, *TRAIN, "--corrupt", "skip")
    assert (code, out) == (2, "") and "more.png" in err


def test_what_is_odd_about_the_data_is_said_once(here: Path, capsys: Capture) -> None:
    """Enlarged images, more test images than training images."""
    data = write_photos(here / "photos", (64, 48), count=7)
    (data / "train" / "cat" / "0.png").unlink()
    words = (*NETWORK, "--epochs", "1", "--quiet", "--batch", "10", "--model-args", "num_classes=5")
    code, _, err = run(capsys, "train", *words, "--out", "run")
    assert code == 0, err
    for notice in ("--input 3x64x48", "swapped?"):
        assert err.count(notice) == 1, err
    assert json.loads((here / "run" / "input.json").read_text()) == preprocessing(load(data.name))
    (data / "train" / "cat" / "6.png").unlink()
    code, _, err = run(capsys, "train", *NETWORK, "--epochs", "1", "--quiet", "--input", "3x64x48", "--out", "other")
    assert code == 0 and err.count("\n") == 1 and "swapped?" in err
