"""A data set of coloured shapes for detectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {"disc": (220, 40, 40), "square": (40, 200, 40), "bar": (50, 80, 230)}


def write(folder: Path, images: int = 64, size: int = 64) -> Path:
    """Images of one to three shapes on a noisy ground, labels in YOLO's format; the path of the .yaml file."""
    random = np.random.default_rng(0)
    for part, count in (("train", images), ("val", images // 2)):
        for kind in ("images", "labels"):
            (folder / kind / part).mkdir(parents=True)
        for number in range(count):
            image = Image.fromarray(random.integers(90, 160, (size, size, 3), np.uint8))
            draw, lines = ImageDraw.Draw(image), []
            for _ in range(random.integers(1, 4)):
                kind = int(random.integers(3))
                wide = int(random.integers(size // 5, size // 2))
                high = wide if kind < 2 else wide // 2
                left, top = int(random.integers(0, size - wide)), int(random.integers(0, size - high))
                shape = draw.ellipse if kind == 0 else draw.rectangle
                shape((left, top, left + wide - 1, top + high - 1), fill=list(COLOURS.values())[kind])
                box = ((left + wide / 2) / size, (top + high / 2) / size, wide / size, high / size)
                lines.append(" ".join(map(str, (kind, *box))))
            image.save(folder / "images" / part / f"{number}.png")
            (folder / "labels" / part / f"{number}.txt").write_text("\n".join(lines))
    names = "".join(f"  {number}: {name}\n" for number, name in enumerate(COLOURS))
    (folder / "shapes.yaml").write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames:\n{names}")
    return folder / "shapes.yaml"
