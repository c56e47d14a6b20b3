"""experiments/real/detection.py on a tiny data set in the form of BCCD."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageDraw

pytest.importorskip("ultralytics")
from experiments.real import detection

ROOT = Path(__file__).parents[2]
SPLITS = {"train": 16, "val": 4, "test": 4}
BOX = """<object><name>{}</name><bndbox>
    <xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax>
</bndbox></object>"""
SMALL = ["--epochs", "1", "--search", "1", "--finetune", "1", "--imgsz", "64"]
HERE = ["--device", "cpu", "--workers", "0", "--out", "out"]


@pytest.fixture
def cells(tmp_path: Path) -> Path:
    """Images of one red and one white cell, and a box without area."""
    for folder in ("ImageSets/Main", "JPEGImages", "Annotations"):
        (tmp_path / "BCCD" / folder).mkdir(parents=True)
    for split, count in SPLITS.items():
        names = [f"{split}{number}" for number in range(count)]
        (tmp_path / f"BCCD/ImageSets/Main/{split}.txt").write_text("\n".join(names))
        for name in names:
            image = Image.new("RGB", (64, 48), "gray")
            ImageDraw.Draw(image).ellipse((8, 12, 24, 36), fill="red")
            image.save(tmp_path / f"BCCD/JPEGImages/{name}.jpg")
            boxes = [BOX.format("RBC", 8, 12, 24, 36), BOX.format("WBC", 0, 0, 64, 48), BOX.format("RBC", 5, 5, 5, 5)]
            size = "<size><width>64</width><height>48</height></size>"
            (tmp_path / f"BCCD/Annotations/{name}.xml").write_text(f"<annotation>{size}{''.join(boxes)}</annotation>")
    return tmp_path


def test_labels_are_shares_of_the_image(cells: Path) -> None:
    file = detection.convert(cells / "BCCD", cells / "converted")
    assert [len(list((cells / f"converted/images/{split}").iterdir())) for split in SPLITS] == [16, 4, 4]
    lines = (file.parent / "labels/test/test3.txt").read_text().split("\n")
    numbers = [[float(word) for word in line.split()] for line in lines]
    assert numbers == [[0, 0.25, 0.5, 0.25, 0.5], [1, 0.5, 0.5, 1, 1]]


def rows(folder: Path, network: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "experiments.real.detection", str(folder), network, *SMALL, *HERE]
    command += ["--results", str(folder / "rows.jsonl")]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    return [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]


def test_the_rows_of_each_network(cells: Path) -> None:
    found = {network: rows(cells, network) for network in ("original", "narrow", "l2")}
    assert [row["row"] for row in found["original"]] == ["original"]
    assert all(row["macs_share"] == 1 and row["epochs"] == 1 for row in found["original"])
    assert all(0.45 < row["macs_share"] <= 0.5 and row["epochs"] == 2 for row in found["narrow"])
    pruned = found["l2"]
    assert [row["row"] for row in pruned] == ["right after the cut", "l2", "l2"]
    assert [row["taught"] for row in pruned] == [False, True, False]
    assert all(0.475 < row["macs_share"] <= 0.5 for row in pruned)
    assert all(row["widths"] for row in pruned[1:])
    every_row = list(itertools.chain(*found.values()))
    for row in every_row:
        assert all(0 <= row[name] <= 1 for name in ("score", "map50", "val", "val_map50"))
        assert row["train_loss"] is None or row["train_loss"] > 0
    recorded = [json.loads(line) for line in (cells / "rows.jsonl").read_text().splitlines()]
    assert recorded == every_row
