"""Folders of image files, one folder per class."""

from __future__ import annotations

import os
import statistics
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dmcp.errors import DataError
from dmcp.image_files import MEAN, STD, before_crop, open_image

_LOOKED_AT = 9  # images whose size is looked at
_PARTS = ("train", "val")
_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # which torchvision reads


@dataclass(frozen=True, eq=False)
class FolderSet:
    """Image files and their labels."""

    paths: tuple[str, ...]
    labels: Tensor  # (N,) int64
    classes: int
    size: tuple[int, int]  # height and width that the model gets
    names: tuple[str, ...] = ()  # of the classes, in the order of their numbers
    root: str = ""  # folder that `train/` and `val/` are in

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image as the model gets it: channels, height, width."""
        return 3, *self.size

    def subset(self, indices: Tensor) -> FolderSet:
        """The files at these places."""
        return replace(self, paths=tuple(self.paths[i] for i in indices.tolist()), labels=self.labels[indices])


def open_folder(path: Path, size: int | tuple[int, int]) -> tuple[FolderSet, FolderSet]:
    """Training and test files of a directory with `train/` and `val/`, checked."""
    train, test = list_folder(path, size)
    for part, found in zip(_PARTS, (train, test), strict=True):
        if empty := empty_classes(found):
            more = f" and {len(empty) - 3} more" if len(empty) > 3 else ""
            raise DataError(
                f"There are no image files ({', '.join(_ENDINGS[:3])}, ...) in "
                f"{', '.join(str(path / part / name) for name in empty[:3])}{more}: put some there, or remove the "
                "class from train/ and val/."
            )
    if train.names != test.names:
        lone = [sorted(set(one.names) - set(other.names)) for one, other in ((train, test), (test, train))]
        odd = (f"only in {part}/: {', '.join(names)}" for part, names in zip(_PARTS, lone, strict=True) if names)
        raise DataError(f"{path}: train/ and val/ must have the same classes; {'; '.join(odd)}.")
    if len(train.names) < 2:
        raise DataError(f"{path}: there is one class, {train.names[0]}; at least two are needed.")
    return train, test


def list_folder(path: Path, size: int | tuple[int, int]) -> tuple[FolderSet, FolderSet]:
    """The same as it is: classes may be empty, or in one of the two only."""
    sides = size if isinstance(size, tuple) else (size, size)
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise DataError(f"The image size must be an int of at least 1, or (height, width), not {size!r}.")
    train, test = (_list_part(path, part, sides) for part in _PARTS)
    return train, test


def empty_classes(dataset: FolderSet) -> list[str]:
    """Names of the classes that have no files."""
    filled = set(dataset.labels.tolist())
    return [name for number, name in enumerate(dataset.names) if number not in filled]


def _list_part(path: Path, part: str, sides: tuple[int, int]) -> FolderSet:
    """The files of `train/` or `val/`, as torchvision lists them, but without what is hidden."""
    from torchvision.datasets import folder as listing  # late: see cifar_nets.mobilenet_v2

    folder = path / part
    if not folder.is_dir():
        here = path if path.name in _PARTS else path.resolve()
        if here.name in _PARTS and here.is_dir():
            above = path.parent if path.name in _PARTS else path / ".."
            raise DataError(f"{path} is one part of the data only: give the folder that it lies in, {str(above)!r}.")
        raise DataError(f"{path} needs {part}/ with one folder of images per class (or train-*.npz, test-*.npz).")
    try:
        names = tuple(name for name in listing.find_classes(folder)[0] if not name.startswith("."))
        if not names:
            raise FileNotFoundError(f"Couldn't find any class folder in {folder}.")
        numbers = {name: number for number, name in enumerate(names)}
        found = listing.make_dataset(folder, numbers, _ENDINGS, allow_empty=True)
    except OSError as error:
        raise DataError(f"{folder}: {str(error).splitlines()[0]}") from error
    start = len(str(folder))  # what is hidden below the folder counts, like ._1.png of macOS or .ipynb_checkpoints/
    found = [(file, number) for file, number in found if f"{os.sep}." not in file[start:]]
    labels = torch.tensor([number for _, number in found], dtype=torch.int64)
    return FolderSet(tuple(file for file, _ in found), labels, len(names), sides, names, str(path))


def usual_size(dataset: FolderSet) -> tuple[int, int] | None:
    """Height and width that a few of the files have, the medians of them; None where none can be read."""
    sizes = []
    for path in dataset.paths[:: -(-len(dataset) // _LOOKED_AT)]:
        try:
            with open_image(path) as image:  # its first bytes only
                sizes.append((image.height, image.width))
        except Exception:  # what is broken is told where it is needed
            continue
    heights, widths = zip(*sizes, strict=True) if sizes else ((), ())
    return (statistics.median_low(heights), statistics.median_low(widths)) if sizes else None


def as_tested(dataset: FolderSet) -> dict[str, Any]:
    """What is done to a test image, in plain data."""
    return {
        "channels": "RGB",
        "resize": list(before_crop(dataset.size)),
        "interpolation": "bilinear",
        "crop": list(dataset.size),
        "range": [0.0, 1.0],
        "mean": list(MEAN),
        "std": list(STD),
        "classes": list(dataset.names),
    }
