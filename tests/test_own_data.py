"""Data of other people: folders of classes alone, tables of files, and rows as Hugging Face has them."""

from __future__ import annotations

import csv
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from commands import run
from folders import write_photos
from PIL import Image
from torch import nn

import dmcp
from dmcp.data.datasets import check_data, load
from dmcp.data.folders import FolderSet
from dmcp.errors import DataError
from dmcp.request import loaders_of_rows

Capture = pytest.CaptureFixture[str]


def class_folders(root: Path, count: int = 10) -> Path:
    """Only folders of classes: cat/0.png, ..."""
    return write_photos(root, (16, 16), count=count, parts=("",))


def names_of(files: Any) -> set[str]:
    assert isinstance(files, FolderSet)
    return {os.path.relpath(path, files.root) for path in files.paths}


# folders of classes alone


def test_a_folder_of_classes_is_split_with_a_fixed_seed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load(class_folders(tmp_path / "first"), size=16)
    assert (len(first.train), len(first.test), first.classes) == (16, 4, 2) and "seed" in first.note
    assert sorted(first.test.labels.tolist()) == [0, 0, 1, 1]  # a fifth of each class
    assert not names_of(first.train) & names_of(first.test)
    assert names_of(first.train) | names_of(first.test) == {
        f"{name}/{n}.png" for name in ("cat", "dog") for n in range(10)
    }

    # Elsewhere, in a file system that lists files in another order, it is the same.
    class_folders(tmp_path / "second")
    scan = os.scandir

    def shuffled(path: Any) -> Any:
        entries = list(scan(path))
        random.shuffle(entries)
        listing = iter(entries)

        class Listing:
            def __enter__(self) -> Iterator[Any]:
                return listing

            def __exit__(self, *_: object) -> None: ...

            def __iter__(self) -> Iterator[Any]:
                return listing

            __next__ = listing.__next__

            def close(self) -> None: ...

        return Listing()

    monkeypatch.setattr(os, "scandir", shuffled)
    second = load(tmp_path / "second", size=16)
    assert (names_of(second.train), names_of(second.test)) == (names_of(first.train), names_of(first.test))


def test_classes_with_one_image_are_refused_and_told(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "photos", count=3)
    (root / "eel").mkdir()
    (root / "cat" / "0.png").rename(root / "eel" / "0.png")
    with pytest.raises(DataError, match="two images") as error:
        load(root, size=16)
    assert "photos/eel" in str(error.value)
    facts = check_data(load(root, size=16, strict=False))
    assert facts["wrong_classes"] == [str(root / "eel")] and not facts["well"]


def test_a_run_says_and_records_its_split_and_is_tested_again_with_it(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    class_folders(tmp_path / "photos")
    words = ("--model", "cifar:resnet20", "--data", "photos", "--input", "3x16x16", "--device", "cpu", "--batch", "4")
    code, out, err = run(capsys, "train", *words, "--epochs", "1", "--json", "--out", "run")
    assert code == 0 and err.count("seed 0") == 1
    assert "seed 0" in json.loads((tmp_path / "run" / "settings.json").read_text())["sources"][1]
    (row,) = json.loads(out)["networks"]
    assert row["samples"] == 4
    code, out, _ = run(capsys, "evaluate", "run", "--device", "cpu", "--json")
    assert code == 0 and json.loads(out)["recorded_accuracy"] == json.loads(out)["networks"][0]["accuracy"]


# tables


def write_table(root: Path, rows: list[list[str]], head: tuple[str, ...] = ("image", "label")) -> Path:
    with (root / "files.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([head, *rows])
    return root / "files.csv"


def listed(root: Path) -> list[list[str]]:
    return [[str(path.relative_to(root)), path.parent.name] for path in sorted(root.rglob("*.png"))]


def test_a_table_of_files_and_labels_is_read(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "in, a folder")
    sets = load(write_table(root, listed(root)), size=16)
    known = load(root, size=16)
    assert (names_of(sets.train), names_of(sets.test)) == (names_of(known.train), names_of(known.test))
    assert isinstance(sets.train, FolderSet) and sets.train.names == ("cat", "dog") and "seed" in sets.note

    rows = [[*row, "val" if row[0].endswith(("1.png", "2.png")) else "Train"] for row in listed(root)]
    random.shuffle(rows)
    sets = load(write_table(root, rows, ("File", "Class", "Split")), size=16)
    assert names_of(sets.test) == {f"{name}/{n}.png" for name in ("cat", "dog") for n in (1, 2)}
    assert len(sets.train) == 16 and not sets.note
    assert isinstance(sets.test, FolderSet)
    for path, label in zip(sets.test.paths, sets.test.labels.tolist(), strict=True):
        assert Path(path).parent.name == sets.test.names[label]

    numbers = [[row[0], "10" if row[1] == "cat" else "9"] for row in listed(root)]
    assert load(write_table(root, numbers), size=16).train.names == ("9", "10")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("row", "fact"),
    [
        (["cat/0.png", ""], "label"),
        (["", "cat"], "image"),
        (["cat/0.png"], "label"),
        (["cat/0.png", "cat", "more"], "cells"),
        (["cat/nowhere.png", "cat"], "nowhere.png"),
        (["cat", "cat"], "name of an image"),
        (["files.csv", "cat"], "name of an image"),
        (["pipe.png", "cat"], "plain file"),
        (["/dev/zero.png", "cat"], "/dev/zero.png"),
    ],
    ids=str,
)
def test_bad_rows_are_refused_with_their_line(row: list[str], fact: str, tmp_path: Path) -> None:
    root = class_folders(tmp_path / "photos")
    os.mkfifo(root / "pipe.png")
    rows = [row for row in listed(root) if "pipe" not in row[0]]
    with pytest.raises(DataError, match=r"files\.csv, line 4") as error:
        load(write_table(root, [*rows[:2], row, *rows[2:]]), size=16)
    assert fact in str(error.value) and "\n" not in str(error.value)


def test_tables_that_are_none(tmp_path: Path) -> None:
    root = class_folders(tmp_path / "photos")
    rows = listed(root)
    for head, bad in (
        (("a", "b"), rows),  # columns without names that are known
        (("image", "label"), []),
        (("image", "label"), [[row[0], "cat"] for row in rows]),  # one class
        (("image", "label", "split"), [[*row, "train"] for row in rows]),
        (("image", "label", "split"), [[*row, word] for row, word in zip(rows, 10 * ["val", "test"], strict=True)]),
    ):
        with pytest.raises(DataError, match=r"files\.csv"):
            load(write_table(root, bad, head), size=16)
    with pytest.raises(DataError, match=r"files\.csv, line 2: .*; line 3: .*; and 1 more line\."):
        load(write_table(root, [[f"cat/none-{number}.png", "cat"] for number in range(6)]), size=16)
    (root / "files.csv").write_text("image;label\ncat/0.png;cat\n")
    with pytest.raises(DataError, match="separated by commas"):
        load(root / "files.csv", size=16)
    (root / "files.csv").write_bytes(b"image,label\n\xff\xfe,\x00\n")
    with pytest.raises(DataError, match=r"files\.csv"):
        load(root / "files.csv", size=16)


# rows


class ImageFeature:
    """Named as the type of Hugging Face's library is."""


ImageFeature.__name__ = "Image"


class ClassLabel:
    def __init__(self, num_classes: int) -> None:
        self.num_classes = num_classes


class Rows:
    """What `dmcp.prune` needs of a data set of Hugging Face: features, a length and rows."""

    def __init__(self, count: int, **features: Any) -> None:
        self.features = features or {"picture": ImageFeature(), "id": None, "kind": ClassLabel(3)}
        self.names = list(self.features)
        noise = np.random.default_rng(count)
        pixels = noise.integers(0, 256, (count, 20, 12, 3), dtype=np.uint8)
        self.images = [Image.fromarray(image) for image in pixels]
        self.labels = [index % 3 for index in range(count)]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        cells = [self.images[index], index, self.labels[index]]
        return dict(zip(self.names, cells, strict=True))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (self[index] for index in range(len(self)))


def small_net() -> nn.Module:
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def test_rows_become_the_batches_that_their_images_as_files_become(tmp_path: Path) -> None:
    rows = Rows(12)
    for part in ("train", "val"):
        for index, image in enumerate(rows.images):
            path = tmp_path / part / str(rows.labels[index]) / f"{index:02}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(path)
    _, loader = loaders_of_rows(small_net(), rows, rows, seed=0)
    files = load(tmp_path, size=(20, 12)).test
    expected = list(dmcp.data.loaders.make_loader(files, 1, train=False))
    found = [pair for images, labels in loader for pair in zip(images, labels, strict=True)]
    key = lambda pair: (int(pair[1]), float(pair[0].sum()))  # noqa: E731
    pairs = [(images[0], labels[0]) for images, labels in expected]
    for mine, theirs in zip(sorted(found, key=key), sorted(pairs, key=key), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_rows_are_pruned_as_loaders_are() -> None:
    search = dmcp.SearchConfig(budget="50%", epochs=2, groups=4)
    result = dmcp.prune(small_net(), Rows(24), Rows(9), search=search, train=dmcp.TrainConfig(epochs=1), teacher=None)
    assert result.rows[-1].samples == 9
    assert result.graph.macs(result.widths) <= result.graph.macs() // 2
    assert result.graph.input_shape[-2:] == (20, 12)  # the size that most images have


def test_a_part_of_rows_is_held_out_for_within(monkeypatch: pytest.MonkeyPatch) -> None:
    """The network answers with the class that is painted on the image: a part with other labels would be noticed."""
    monkeypatch.setattr("dmcp.defaults._SEARCH_STEPS", (2, 2))
    rows = Rows(60)
    colors = ("red", "lime", "blue")
    rows.images = [Image.new("RGB", (12, 20), colors[label]) for label in rows.labels]
    loaders, test = loaders_of_rows(small_net(), rows, rows, seed=0, holds_out=True)
    assert isinstance(loaders, dmcp.Loaders) and loaders.held_out is not None
    counts = []
    for loader in (loaders.search, loaders.held_out, test):
        batches = list(loader)
        for images, labels in batches:
            assert torch.equal(images.mean(dim=(2, 3)).argmax(dim=1), labels)
        counts.append(sum(len(labels) for _, labels in batches))
    assert counts == [60, 30, 30]

    net = small_net()
    dmcp.train(net, loaders.search, dmcp.TrainConfig(epochs=30, lr=2.0))
    result = dmcp.prune(net, rows, rows, within=100, retrain="none", teacher=None)
    assert result.within and result.within.samples == 30 and result.rows[-1].samples == 30


def test_rows_that_are_not_understood_are_refused() -> None:
    good = Rows(6)
    unlabelled = Rows(6)
    unlabelled.labels = [-1] * 6
    text = Rows(6)
    text.images = ["a cat"] * 6  # type: ignore[list-item]
    odd = Rows(6, a=None, b=None, c=None)
    for loader, val_loader, fact in (
        (odd, good, "a, b, c"),
        (good, unlabelled, "val_loader"),
        (text, good, "row 0"),
        (good, [(torch.zeros(2, 3, 20, 12), torch.zeros(2).long())], "both"),
    ):
        with pytest.raises(DataError, match=fact):
            dmcp.prune(small_net(), loader, val_loader)
