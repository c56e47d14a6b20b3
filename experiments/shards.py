"""An image folder (train/<class>/, val/<class>/) as .npz shards, which train faster: python shards.py FOLDER OUT."""

import sys
from multiprocessing import Pool
from pathlib import Path

import numpy as np
from PIL import Image


def read(path: Path) -> np.ndarray:
    """One image, (H, W, 3) uint8."""
    return np.asarray(Image.open(path).convert("RGB"))


def main(folder: Path, out: Path) -> None:
    """Write train-0.npz and test-0.npz; all images must have one size."""
    out.mkdir(parents=True, exist_ok=True)
    with Pool() as pool:
        for part, name in (("train", "train"), ("val", "test")):
            classes = sorted(path.name for path in (folder / part).iterdir())
            files = [path for label in classes for path in sorted((folder / part / label).iterdir())]
            labels = np.array([classes.index(path.parent.name) for path in files])
            np.savez(out / f"{name}-0.npz", images=np.stack(pool.map(read, files, chunksize=256)), labels=labels)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
