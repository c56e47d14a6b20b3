"""experiments/real/segmentation.py: its metric, its crops, and a tiny run where ESPNet and CamVid are at hand."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from experiments.real import segmentation

pytestmark = pytest.mark.usefixtures("quick_commands")

ROOT = Path(__file__).parents[1]


def test_mean_iou_is_that_of_all_pixels() -> None:
    """Counted class by class with sets of pixels; void pixels are left out."""
    random = torch.Generator().manual_seed(0)
    labels = torch.randint(12, (4, 6, 8), generator=random)
    outputs = torch.rand(4, 12, 6, 8, generator=random)
    metric = segmentation.MeanIoU()
    metric.reset()
    for part in (slice(0, 3), slice(3, 4)):
        metric.update(outputs[part], (torch.empty(0), labels[part]))

    predicted = outputs[:, :11].argmax(dim=1).flatten().tolist()
    true = labels.flatten().tolist()
    shares = []
    for number in range(11):
        pairs = [(a == number, b == number) for a, b in zip(predicted, true, strict=True) if b != 11]
        shares.append(sum(a and b for a, b in pairs) / sum(a or b for a, b in pairs))
    assert metric.compute() == pytest.approx(sum(shares) / 11)


def test_crops_move_labels_with_their_images() -> None:
    """The image shows its labels, so that they agree wherever they are cut."""
    labels = torch.arange(11).repeat_interleave(6).expand(8, 48, 66).to(torch.uint8)
    images = (20 * labels)[:, None].expand(8, 3, 48, 66)
    crops = segmentation.Crops((images, labels), batch=4, seed=1)
    first = list(crops)
    assert len(first) == len(crops) == 2
    for x, y in first:
        assert x.shape == (4, 3, 48, 66) and y.shape == (4, 48, 66)
        assert (x[:, 0] - 20 * y).abs().mean() < 5  # enlarged images are blurred between classes
    crops.set_epoch(1)
    assert not torch.equal(next(iter(crops))[0], first[0][0])
    crops.set_epoch(0)
    assert torch.equal(next(iter(crops))[0], first[0][0])


NETWORK = """
import torch
from torch import nn

class ESPNet(nn.Module):
    def __init__(self, classes, p, q):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.last = nn.ConvTranspose2d(16, classes, 2, 2)
        self.modules = [self.first, self.second, self.last]

    def forward(self, x):
        for layer in self.modules:
            x = layer(x)
        return x

if __name__ == "__main__":
    torch.manual_seed(0)
    torch.save(ESPNet(12, 2, 8).state_dict(), "pretrained/decoder/espnet_p_2_q_8_camvid.pth")
"""


def test_the_rows(tmp_path: Path) -> None:
    """With a small network in the place of ESPNet, which also has a list under the name `modules`."""
    for folder in (
        "train",
        "pretrained/decoder",
        "CamVid/train",
        "CamVid/trainannot",
        "CamVid/test",
        "CamVid/testannot",
    ):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "train/Model.py").write_text(NETWORK)
    subprocess.run([sys.executable, "train/Model.py"], check=True, cwd=tmp_path)
    random = np.random.default_rng(0)
    for split, number in itertools.product(("train", "test"), range(4)):
        labels = random.integers(0, 12, (16, 24), np.uint8)
        Image.fromarray(labels).save(tmp_path / f"CamVid/{split}annot/{number}.png")
        Image.fromarray(np.stack(3 * [20 * labels], axis=2)).save(tmp_path / f"CamVid/{split}/{number}.png")
    options = ["--budget", "50%", "--search", "1", "--epochs", "1", "--batch", "2", "--teacher"]
    options += ["--results", str(tmp_path / "rows.jsonl")]
    command = [sys.executable, "-m", "experiments.real.segmentation", str(tmp_path), str(tmp_path / "CamVid"), *options]
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["row"] for row in rows] == [
        "original",
        "uniform",
        "dmcp",
    ]  # an untrained one is not tested after the cut
    assert rows[0]["macs_share"] == 1 and all(row["macs_share"] <= 0.5 for row in rows[1:])
    assert all(0 <= row["score"] <= 1 for row in rows) and rows[-1]["widths"]
