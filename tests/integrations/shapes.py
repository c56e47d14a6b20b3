"""A data set of coloured shapes for detectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

COLOURS = {"disc": (220, 40, 40), "square": (40, 200, 40), "bar": (50, 80, 230)}


def write(folder: Path, images: int = 64, size: int = 64, task: str = "detect") -> Path:
    """Images of one to three shapes on a noisy ground, labels in YOLO's format; the path of the .yaml file.

    The corners of a box are its outline for the task "segment", and four points for "pose".
    """
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
                x, y = (left / size, (left + wide) / size), (top / size, (top + high) / size)
                corners = (x[0], y[0], x[1], y[0], x[1], y[1], x[0], y[1])
                values = {"detect": box, "segment": corners, "pose": box + corners}[task]
                lines.append(" ".join(map(str, (kind, *values))))
            image.save(folder / "images" / part / f"{number}.png")
            (folder / "labels" / part / f"{number}.txt").write_text("\n".join(lines))
    names = "".join(f"  {number}: {name}\n" for number, name in enumerate(COLOURS))
    points = "kpt_shape: [4, 2]\n" if task == "pose" else ""
    text = f"path: {folder}\ntrain: images/train\nval: images/val\n{points}names:\n{names}"
    (folder / "shapes.yaml").write_text(text)
    return folder / "shapes.yaml"
