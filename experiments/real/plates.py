"""Prune LPRNet, a reader of licence plates that somebody else trained, and measure what it costs: plates read right.

    git clone https://github.com/sirius-ai/LPRNet_Pytorch      # network, weights and 1,000 plates (Apache-2.0)
    python -m experiments.real.plates LPRNet_Pytorch --budget 70% --budget 50% --epochs 40

The plates are split into five parts. Each part is the test set once, and the network is fine-tuned on the other four.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp
from experiments.real.rows import RESULTS, is_recorded, write_rows

CHARACTERS = "京沪津渝冀晋蒙辽吉黑苏浙皖闽赣鲁豫鄂湘粤桂琼川贵云藏陕甘青宁新0123456789ABCDEFGHJKLMNPQRSTUVWXYZIO-"
BLANK = len(CHARACTERS) - 1
FOLDS = 5
SHIFT = 2  # pixels
Batch = tuple[Tensor, Tensor, Tensor]  # images, characters by plate, and how many there are


def read_plates(folder: Path) -> Batch:
    """All plates as one batch, prepared as in the training of the network; the name of a file is its label."""
    images, labels, lengths = [], [], []
    for path in sorted(folder.glob("*.jpg")):
        label = [CHARACTERS.index(character) for character in path.stem.split("-")[0].split("_")[0]]
        picture = Image.open(path).convert("RGB").resize((94, 24), Image.Resampling.BILINEAR)
        colors = np.asarray(picture, dtype=np.float32)[..., ::-1]  # the network was trained on BGR
        images.append(torch.from_numpy((colors - 127.5) / 128).permute(2, 0, 1))
        labels.append(torch.tensor(label + [BLANK] * (8 - len(label))))
        lengths.append(torch.tensor(len(label)))
    return torch.stack(images), torch.stack(labels), torch.stack(lengths)


def batches(plates: Batch, size: int) -> list[Batch]:
    """These plates in batches."""
    images, labels, lengths = (part.split(size) for part in plates)
    return list(zip(images, labels, lengths, strict=True))


class Augmented:
    """Batches of shuffled plates, shifted and made brighter or darker at random: functions of seed and epoch."""

    def __init__(self, plates: Batch, size: int, seed: int) -> None:
        self.images = F.pad(plates[0], (SHIFT, SHIFT, SHIFT, SHIFT), mode="replicate")
        self.plates, self.size, self.seed, self.epoch = plates, size, seed, 0

    def __len__(self) -> int:
        return len(self.images) // self.size

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Batch]:
        height, width = self.plates[0].shape[2:]
        random = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
        order = torch.randperm(len(self.images), generator=random).to(self.images.device)
        for rows in order.split(self.size)[: len(self)]:
            top, left = torch.randint(2 * SHIFT + 1, (2,), generator=random).tolist()
            contrast, brightness = (2 * torch.rand(2, generator=random) - 1).tolist()
            images = self.images[rows, :, top : top + height, left : left + width]
            yield images * (1 + 0.2 * contrast) + 0.2 * brightness, self.plates[1][rows], self.plates[2][rows]


def ctc(output: Tensor, batch: Batch) -> Tensor:
    """CTC loss of the scores. (N, characters, T)"""
    scores = output.float().log_softmax(dim=1).permute(2, 0, 1)
    steps = torch.full_like(batch[2], len(scores))
    return F.ctc_loss(scores, batch[1], steps, batch[2], blank=BLANK, zero_infinity=True)


def right_plates(output: Tensor, batch: Batch) -> tuple[int, int]:
    """Plates of which every character is right, and their number."""
    right = 0
    for best, label, length in zip(output.argmax(dim=1).tolist(), batch[1].tolist(), batch[2].tolist(), strict=True):
        changes = [best[0]] + [new for old, new in itertools.pairwise(best) if new != old]
        right += [character for character in changes if character != BLANK] == label[:length]
    return right, len(batch[0])


def without_unused_norms(net: nn.Module) -> nn.Module:
    """The network with its BatchNorms as convolutions: it was trained in eval mode, so they only scale and shift."""
    for index, layer in enumerate(net.backbone):
        if isinstance(layer, nn.BatchNorm2d):
            scale = nn.Conv2d(layer.num_features, layer.num_features, 1, groups=layer.num_features)
            spread = (layer.running_var + layer.eps).sqrt()
            scale.weight.data = (layer.weight / spread).detach().view(-1, 1, 1, 1)
            scale.bias.data = (layer.bias - layer.weight * layer.running_mean / spread).detach()
            net.backbone[index] = scale
    return net


def load_network(folder: Path) -> nn.Module:
    """The network with its weights."""
    source: Any = importlib.util.spec_from_file_location("lprnet", folder / "model/LPRNet.py")
    module: ModuleType = importlib.util.module_from_spec(source)
    sys.modules["lprnet"] = module
    source.loader.exec_module(module)
    net = module.build_lprnet(lpr_max_len=8, phase="test", class_num=len(CHARACTERS), dropout_rate=0)
    net.load_state_dict(torch.load(folder / "weights/Final_LPRNet_model.pth", map_location="cpu", weights_only=True))
    return without_unused_norms(net)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="a clone of LPRNet_Pytorch")
    parser.add_argument("--budget", action="append", required=True)
    parser.add_argument("--method", default="dmcp")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--folds", type=int, nargs="+", default=range(FOLDS), help="which of the five parts are tested")
    parser.add_argument("--plates", type=int, default=1000)
    parser.add_argument("--no-teacher", action="store_true", help="learn from the labels alone")
    parser.add_argument("--lr", type=float, help="of AdamW; default: what prune chooses")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()

    torch.set_flush_denormal(True)  # three times as fast on a CPU: this network makes tiny numbers
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plates = read_plates(options.folder / "data/test")
    order = torch.randperm(len(plates[0]), generator=torch.Generator().manual_seed(0))[: options.plates]
    for fold in options.folds:
        facts = {"network": "LPRNet", "test": "plates", "method": options.method, "seed": fold}
        facts |= {"epochs": options.epochs, "taught": not options.no_teacher}
        facts |= {} if options.lr is None else {"lr": options.lr}
        budgets = [budget for budget in options.budget if not is_recorded(options.results, budget=budget, **facts)]
        if not budgets:
            continue
        is_test = torch.arange(len(order)) % FOLDS == fold
        train_plates = tuple(part[order[~is_test]].to(device) for part in plates)
        test_plates = tuple(part[order[is_test]].to(device) for part in plates)
        optimizer = None if options.lr is None else "adamw"
        train = dmcp.TrainConfig(epochs=options.epochs, optimizer=optimizer, lr=options.lr, seed=fold)
        result = dmcp.prune(
            load_network(options.folder).to(device),
            Augmented(train_plates, 32, fold),
            batches(test_plates, 100),
            budgets,
            method=options.method,
            search=dmcp.SearchConfig(budget="50%", seed=fold),
            train=train,
            teacher=None if options.no_teacher else "auto",
            baselines=["original", "uniform"] if options.method == "dmcp" else ["original"],
            task=dmcp.Task(loss=ctc, metric=right_plates),
        )
        write_rows(options.results, result, budget=budgets[0], **facts)


if __name__ == "__main__":
    main()
