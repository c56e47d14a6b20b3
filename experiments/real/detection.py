"""Train YOLO11n on BCCD (blood cells, 364 images), prune it, and measure what it costs: mAP on the test images.

    git clone https://github.com/Shenggan/BCCD_Dataset      # images and boxes (MIT)
    pip install ultralytics                                 # network and trainer (AGPL)
    python -m experiments.real.detection BCCD_Dataset original
    python -m experiments.real.detection BCCD_Dataset dmcp  # or sensitivity, l2, ...: prunes that original

"narrow" and "longer" are trained from scratch for as long as training and fine-tuning take together. The first has
the largest width multiple inside the budget, the second all channels. Every network is that of its last epoch.
"""

from __future__ import annotations

import argparse
import copy
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch
from ultralytics import YOLO
from ultralytics.utils import ROOT, YAML

import dmcp
from dmcp.ultralytics import Predictions, prune, train
from experiments.real.rows import RESULTS, write_line

NAMES = ["RBC", "WBC", "Platelets"]
SCRATCH = ("original", "longer", "narrow")  # networks that are trained, and not pruned


def convert(source: Path, target: Path) -> Path:
    """Write images and boxes as Ultralytics reads them, in the split of the data set; the path of the .yaml file."""
    for split in ("train", "val", "test"):
        (target / "images" / split).mkdir(parents=True, exist_ok=True)
        (target / "labels" / split).mkdir(parents=True, exist_ok=True)
        for name in (source / f"ImageSets/Main/{split}.txt").read_text().split():
            shutil.copy(source / f"JPEGImages/{name}.jpg", target / f"images/{split}")
            lines = boxes(ElementTree.parse(source / f"Annotations/{name}.xml").getroot())
            (target / f"labels/{split}/{name}.txt").write_text("\n".join(lines))
    splits = "train: images/train\nval: images/val\ntest: images/test\n"
    file = target / "bccd.yaml"
    file.write_text(f"path: {target.resolve()}\n{splits}names: {NAMES}\n")
    return file


def boxes(annotation: ElementTree.Element) -> list[str]:
    """Class, center and size of each cell, as shares of the image. Two boxes of the data set have no area."""
    width, height = (int(annotation.findtext(f"size/{side}", "")) for side in ("width", "height"))
    lines = []
    for cell in annotation.iter("object"):
        edges = {edge: int(cell.findtext(f"bndbox/{edge}", "")) for edge in ("xmin", "ymin", "xmax", "ymax")}
        x, y = (edges["xmin"] + edges["xmax"]) / 2 / width, (edges["ymin"] + edges["ymax"]) / 2 / height
        w, h = (edges["xmax"] - edges["xmin"]) / width, (edges["ymax"] - edges["ymin"]) / height
        if w > 0 and h > 0:
            lines.append(f"{NAMES.index(cell.findtext('name', ''))} {x} {y} {w} {h}")
    return lines


def build(folder: Path, width: float = 0.25) -> Any:
    """A YOLO11n with fresh weights; its own width multiple is 0.25."""
    config = YAML.load(ROOT / "cfg/models/11/yolo11.yaml")
    config["scales"]["n"][1] = width
    folder = folder / f"width-{width}"
    YAML.save(folder / "yolo11.yaml", config | {"nc": len(NAMES)})
    return YOLO(folder / "yolo11n.yaml")


def trace(yolo: Any) -> dmcp.ChannelGraph:
    """What can be pruned, for MACs and parameters."""
    model = copy.deepcopy(yolo.model).float().cpu()
    return dmcp.trace(Predictions(model), torch.zeros(2, 3, 64, 64))


def build_narrow(folder: Path, macs: float) -> Any:
    """The YOLO11n of the largest width multiple with at most so many MACs."""
    for width in range(31, 0, -1):
        yolo = build(folder, width / 128)
        if trace(yolo).macs() <= macs:
            return yolo
    raise dmcp.BudgetError(f"A YOLO11n with {macs:,} MACs is too narrow: give a larger --budget.")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="a clone of BCCD_Dataset")
    parser.add_argument("network", help="original, longer, narrow, or a method of prune")
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--epochs", type=int, default=150, help="of the training from scratch")
    parser.add_argument("--search", type=int, default=30, help="epochs of the search")
    parser.add_argument("--finetune", type=int, default=60, help="epochs after the cut")
    parser.add_argument("--imgsz", type=int, default=416)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="0")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--fraction", type=float, default=1.0, help="share of the training images")
    parser.add_argument("--out", type=Path, default=Path("build/detection"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()

    command = shlex.join(["python", "-m", "experiments.real.detection", *sys.argv[1:]])
    run = options.out / f"{options.network}-{options.seed}"
    data = convert(options.folder / "BCCD", run / "data")
    settings: dict[str, Any] = {"data": str(data), "batch": 16, "nbs": 16, "amp": False, "plots": False}
    settings |= {key: getattr(options, key) for key in ("imgsz", "seed", "device", "workers", "fraction")}
    settings |= {"cache": "ram", "project": str(run.resolve()), "val": False, "save": False, "deterministic": False}
    full = trace(build(run))

    def write_row(yolo: Any, row: str, **facts: Any) -> None:
        graph = trace(yolo)
        test, val = (yolo.val(**settings | {"split": split}).box for split in ("test", "val"))
        line = {"network": "YOLO11n", "test": "BCCD", "method": options.network, "seed": options.seed, **facts}
        line |= {"budget": f"{options.budget:.0%}", "imgsz": options.imgsz, "row": row}
        line |= {"macs": graph.macs(), "params": graph.params(), "macs_share": graph.macs() / full.macs()}
        if row == options.network and row not in SCRATCH:
            line["widths"] = dict(yolo.widths)
        line |= {"score": test.map, "map50": test.map50, "val": val.map, "val_map50": val.map50}
        write_line(options.results, line | {"command": command})

    def train_loss(yolo: Any) -> float:
        """Of the last epoch, without that of the teacher."""
        parts = yolo.trainer.tloss
        return float(sum(value for key, value in parts.items() if key != "dis_loss"))

    file = options.out / f"original-{options.seed}.pt"
    if options.network in SCRATCH:
        epochs = options.epochs
        if options.network != "original":
            epochs += options.finetune
        yolo = build(run)
        if options.network == "narrow":
            yolo = build_narrow(run, options.budget * full.macs())
        yolo.train(epochs=epochs, **settings)
        write_row(yolo, options.network, epochs=epochs, train_loss=train_loss(yolo), taught=False)
        if options.network == "original":
            yolo.save(file)
        return

    original = YOLO(file)
    small = prune(original, options.budget, method=options.network, epochs=options.search, **settings)
    write_row(small, "right after the cut", epochs=0, train_loss=None, taught=False)
    for teacher in (original, None):
        student = copy.deepcopy(small)
        train(student, distill_model=teacher, epochs=options.finetune, **settings)
        taught = teacher is not None
        write_row(student, options.network, epochs=options.finetune, train_loss=train_loss(student), taught=taught)


if __name__ == "__main__":
    main()
