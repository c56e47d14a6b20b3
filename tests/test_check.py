"""What `dmcp data` finds in folders and arrays, and what is refused, skipped or warned of before the first step."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from commands import Capture, command, run
from folders import write_photos, write_shards
from PIL import Image

from dmcp.cli.forecast import loader_pace
from dmcp.cli.job import open_job
from dmcp.data.datasets import DataSets, check_data, load, preprocessing
from dmcp.data.folders import FolderSet, no_images
from dmcp.errors import DmcpError
from dmcp.runs.config import RunConfig

pytestmark = pytest.mark.usefixtures("quick_commands")

NETWORK = ("--model", "my_small_net:build", "--data", "photos", "--batch", "4", "--device", "cpu")
SMALL = (*NETWORK, "--input", "3x32x32")
TRAIN = ("train", *SMALL, "--epochs", "1", "--quiet", "--json")
NET = """
from torch import nn

def build(num_classes=2, kernel=3):
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))
    return nn.Sequential(nn.Conv2d(3, 8, kernel, stride=kernel // 3), nn.BatchNorm2d(8), nn.ReLU(), head)
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


def test_every_file_is_decoded(here: Path) -> None:
    photos = write_photos(here / "photos", (40, 40))
    Image.new("L", (8, 60)).save(photos / "train" / "cat" / "more.png")
    truncate(photos / "train" / "cat" / "1.png")
    (photos / "train" / "dog" / "3.png").write_bytes(b"")
    (photos / "val" / "cat" / "0.png").write_text("no image")
    (photos / "val" / "dog" / "2.png").unlink()
    (photos / "val" / "dog" / "2.png").symlink_to("nowhere.png")
    seen: list[int] = []
    facts = check_data(opened(), seen.append)
    names = ["train/cat/1", "train/dog/3", "val/cat/0", "val/dog/2"]
    assert [it["file"] for it in facts["broken"]] == [f"photos/{name}.png" for name in names]
    assert seen == [*range(1, 18)] and facts["enlarged"] == 13 and not facts["well"]
    assert facts["sizes"] == {"smallest": [60, 8], "median": [40, 40], "largest": [40, 40]}
    part = load("photos").test
    assert isinstance(part, FolderSet)
    assert [it.file for it in no_images(part)] == [f"photos/{name}.png" for name in names[2:]]  # from first bytes


def test_wrong_classes_are_reported_all_at_once(here: Path, capsys: Capture) -> None:
    photos = write_photos(here / "photos", count=1, classes=("ant", "bee", "cat"))
    for name in ("train/ant", "train/bee", "val/cat"):
        (photos / name / "0.png").unlink()
    (photos / "val" / "fox").mkdir()
    facts = check_data(opened())
    lacking = "train/ant train/bee train/fox val/cat val/fox"
    assert facts["wrong_classes"] == [f"photos/{it}" for it in lacking.split()]
    assert facts["classes"] == 3 and not facts["well"]
    code, out, _ = run(capsys, "data", "photos", "--quiet")
    assert code == 2 and all(name in out for name in facts["wrong_classes"])


def test_arrays(here: Path, capsys: Capture) -> None:
    facts = check_data(opened("digits"))
    assert [facts[part]["images"] for part in ("train", "test")] == [1415, 382] and facts["classes"] == 10
    assert facts["sizes"]["median"] == [8, 8] and facts["enlarged"] is None and facts["well"]
    write_shards(here / "data" / "cifar10")
    assert run(capsys, "data", "cifar10")[0] == run(capsys, "data", "digits")[0] == 0


def test_the_command_reports_everything(here: Path, capsys: Capture) -> None:
    photos = write_photos(here / "photos", (40, 40))
    code, out, err = run(capsys, "data", "photos")
    assert (code, err) == (0, "")
    assert all(words in out for words in ("2 classes", "8 training images: photos/train", "40x40", "read: none"))
    for number in range(4):
        truncate(photos / "train" / "cat" / f"{number}.png")
    code, out, err = run(capsys, "data", "photos", "--quiet")
    assert code == 2 and "4 of 16 image files" in err and "--corrupt skip" in err
    assert "photos/train/cat/2.png: " in out
    (photos / "train" / "cat" / "moving.GIF").touch()
    code, out, _ = run(capsys, "data", "photos", "--quiet", "--json")
    facts = json.loads(out)
    assert facts["left_out"] == ["photos/train/cat/moving.GIF"]
    assert code == 2 and len(facts["broken"]) == 4 and facts["well"] is False
    assert facts["train"] == {"images": 8, "from": "photos/train"}


def test_images_in_both_sets_are_found(here: Path, capsys: Capture) -> None:
    """The same bytes in train/ and val/, under another name and in another class; the same row of two arrays."""
    photos = write_photos(here / "photos", (40, 40))
    for number, path in enumerate(sorted(photos.rglob("*.png"))):
        Image.new("RGB", (40, 40), (number, 0, 0)).save(path)
    assert check_data(opened())["in_both"] == []
    shutil.copy(photos / "train" / "cat" / "2.png", photos / "val" / "dog" / "copy.png")
    pair = {"train": "photos/train/cat/2.png", "test": "photos/val/dog/copy.png"}
    assert check_data(opened())["in_both"] == [pair]
    code, out, err = run(capsys, "data", "photos", "--quiet")
    assert code == 0 and pair["train"] in out and pair["test"] in out and err.count("\n") == 1
    images, labels = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 1), np.uint8), np.arange(6) % 2
    np.savez(here / "train-0.npz", images=images[:4], labels=labels[:4])
    np.savez(here / "test-0.npz", images=images[[4, 1]], labels=labels[[4, 0]])
    assert check_data(opened("."))["in_both"] == [{"train": "image 1", "test": "image 1"}]


# before the first step


def test_broken_files_are_replaced_and_counted(here: Path, capsys: Capture) -> None:
    """Also those of a run that was stopped by one, and goes on with --corrupt skip."""
    photos = write_photos(here / "photos", (40, 40))
    for name in ("train/cat/1", "train/dog/2", "val/dog/3"):
        truncate(photos / f"{name}.png")
    code, out, _ = run(capsys, *TRAIN, "--corrupt", "skip", "--out", "one")
    assert code == 0 and json.loads(out)["replaced"] == {"train": 2, "test": 1}
    assert re.search(r"2 training .* 1 test image", (here / "one" / "report.md").read_text())
    listed = json.loads((here / "one" / "replaced.json").read_text())
    assert listed["test"] == ["photos/val/dog/3.png"] and len(listed["train"]) == 2
    code, out, err = run(capsys, "evaluate", "one", *NETWORK[:2], "--corrupt", "skip", "--device", "cpu", "--json")
    assert code == 0 and json.loads(out)["replaced"] == {"train": 0, "test": 1}, err
    for name in ("train/cat/1", "train/dog/2"):
        shutil.copy(photos / "train" / "cat" / "0.png", photos / f"{name}.png")
    code, _, err = run(capsys, *TRAIN, "--out", "two")
    assert code == 2 and "dmcp train --resume two" in err
    code, out, err = run(capsys, "train", "--resume", "two", *NETWORK[:2], "--corrupt", "skip", "--quiet", "--json")
    assert code == 0 and json.loads(out)["replaced"] == {"train": 0, "test": 1}, err


def test_a_slow_loader_is_reported(here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    write_photos(here / "photos", (40, 40))
    monkeypatch.setattr("dmcp.cli.forecast.loader_pace", lambda *those: (100.0, loader_pace(*those)[1]))
    code, out, err = run(capsys, "prune", *NETWORK, "--dry-run", "--json", "--epochs", "1", "--workers", "1")
    assert code == 0 and "search" in err and json.loads(out)["seconds"] > 100
    assert "--workers" in err or "more cores" in err  # the latter where one core is all there is


def test_an_own_network_gets_images_of_one_size_as_they_are(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmcp.cli.show.measure_latency", measured := Mock(side_effect=DmcpError))
    for sizes, kernel, shape in (
        (((40, 32),), 3, "3x40x32"),
        (((40, 32), (40, 32), (32, 40)), 3, "3x40x32"),  # most of them
        (((40, 32), (32, 40)), 3, "3x32x32"),
        (((600, 600), (20, 24), (300, 900)), 3, "3x224x224"),
        (((20, 600),), 3, "3x224x224"),
        (((32, 40),), 35, "3x224x224"),  # the network cannot take them
    ):
        data, args = str(write_photos(here / str(sizes), *sizes, count=len(sizes))), (f"kernel={kernel}",)
        job = open_job(RunConfig(model="my_small_net:build", model_args=args, data=data, device="cpu", batch=2))
        assert job.config.input == shape and job.reasons["input"].startswith(f"{shape}: ")
        is_mixed = len(set(sizes)) > 1
        assert any(shape in note for note in job.notes) == (is_mixed and shape != "3x224x224")
    assert command("latency", "--model", "my_small_net:build", "--model-args", *args, "--data", data) == 2
    assert measured.call_args.args[2].input_shape == job.data.shape  # a table is for the same input


def test_what_is_odd_about_the_data_is_said_once(here: Path, capsys: Capture) -> None:
    """Images of several sizes, and images that are enlarged."""
    data = write_photos(here / "photos", (64, 48), (64, 47), (64, 48), count=7)
    (data / "train" / "cat" / "0.png").unlink()
    words = (*NETWORK, "--epochs", "1", "--quiet", "--batch", "10", "--model-args", "num_classes=5")
    code, _, err = run(capsys, "train", *words, "--out", "run")
    assert code == 0 and err.count("3x64x48") == 1, err
    how = json.loads((here / "run" / "input.json").read_text())
    assert how == preprocessing(load(data.name, size=(64, 48)))
    write_photos(here / "small", (20, 16))
    job = open_job(RunConfig(model="cifar:resnet20", data="small", device="cpu", batch=2))
    assert any("--input 3x20x16" in note for note in job.notes)


def test_names_of_files_and_classes_need_not_be_utf8(here: Path, capsys: Capture) -> None:
    photos = write_photos(here / "odd-photos", (16, 16))
    for path in [*photos.rglob("*.png"), *photos.glob("*/*")]:
        path.rename(path.with_name(os.fsdecode(b"\xff" + os.fsencode(path.name))))
    assert run(capsys, "data", "odd-photos")[::2] == (0, "")
    words = ("--input", "3x16x16", "--epochs", "1", "--batch", "2", "--quiet", "--device", "cpu")
    code, _, err = run(capsys, "train", "--model", "cifar:resnet20", "--data", "odd-photos", *words, "--out", "run")
    assert code == 0, err
    assert run(capsys, "report", "run")[0] == 0
