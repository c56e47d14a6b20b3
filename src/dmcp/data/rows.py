"""Data sets of rows, as Hugging Face's library has them: each row is a dict with an image and a label.

That library is not imported: whatever has `features`, a length and such rows is taken.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import Subset

from dmcp.data.folders import FolderSet
from dmcp.data.images import Array, Size, as_upright_rgb
from dmcp.data.loaders import FolderLoader
from dmcp.errors import DataError
from dmcp.runtime.batches import core_count
from dmcp.runtime.distributed import current
from dmcp.runtime.io import quote

_IMAGE_NAMES = ("image", "img")  # of columns whose type does not say what they are
_LABEL_NAMES = ("label", "labels")
_SAMPLED = 99  # rows whose images tell their size


def has_rows(data: Any) -> bool:
    """Whether a data set has features and rows, as those of Hugging Face have."""
    return (
        isinstance(getattr(data, "features", None), Mapping)
        and hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
    )


@dataclass(frozen=True, eq=False)
class RowSet(FolderSet):
    """Rows with images, which have numbers in place of paths."""

    rows: Any = None
    column: str = ""  # that has the images

    def subset(self, indices: Tensor) -> RowSet:
        """Take the rows at these indices."""
        chosen = super().subset(indices)
        assert isinstance(chosen, RowSet)
        return replace(chosen, rows=Subset(self.rows, indices.tolist()))

    def read(self, index: int) -> Array:
        """Read an image as (height, width, 3) uint8; DataError if it is none."""
        try:
            image = self.rows[index][self.column]
            if not isinstance(image, Image):
                raise TypeError(f"it is a {type(image).__name__}, not a PIL image")
            return np.array(as_upright_rgb(image))
        except Exception as error:  # a library that reads rows raises many kinds
            raise DataError(f"The image of {self.paths[index]} cannot be read: {quote(error)}.") from error

    def some_sizes(self) -> list[Size]:
        """Heights and widths of some images."""
        every = -(-len(self) // _SAMPLED)
        sizes = [self.read(index).shape for index in range(0, len(self), every)]
        return [(height, width) for height, width, _ in sizes]


def open_rows(data: Any, name: str) -> RowSet:
    """Find the columns with images and labels; name: of the argument that the data were passed as."""
    if not len(data):
        raise DataError(f"The data set passed as {name} has no rows.")
    image = _find_column(data.features, "Image", _IMAGE_NAMES, name)
    label = _find_column(data.features, "ClassLabel", _LABEL_NAMES, name)
    labels = data[label] if hasattr(data, "column_names") else [data[index][label] for index in range(len(data))]
    labels = list(labels)
    if not all(isinstance(number, int) and number >= 0 for number in labels):
        raise DataError(f"The column {label!r} of {name} must hold a class number, counted from 0, in every row.")
    classes = getattr(data.features[label], "num_classes", None) or max(labels) + 1
    paths = tuple(f"row {index}" for index in range(len(data)))
    numbers = torch.tensor(labels, dtype=torch.int64)
    return RowSet(paths, numbers, classes, size=(0, 0), part=name, rows=data, column=image)


def _find_column(features: Mapping[str, Any], kind: str, names: tuple[str, ...], argument: str) -> str:
    """The only column of this type, or else one with a usual name."""
    of_kind = [name for name, feature in features.items() if type(feature).__name__ == kind]
    with_usual_name = [name for name in names if name in features]
    candidates = of_kind or with_usual_name
    if len(of_kind) > 1:
        candidates = [name for name in with_usual_name if name in of_kind]
    if not candidates:
        raise DataError(
            f"The data set passed as {argument} needs one column with images ({', '.join(_IMAGE_NAMES)}) and one with "
            f"labels ({', '.join(_LABEL_NAMES)}). It has {', '.join(features)}: rename or remove columns."
        )
    return candidates[0]


class RowLoader(FolderLoader):
    """Batches of rows, made as those of image files are."""

    dataset: RowSet

    @functools.cached_property
    def store(self) -> None:
        """Rows are read anew in each epoch."""
        return None

    def _read(self, index: int) -> Array:
        return self.dataset.read(index)

    def _read_file(self, index: int) -> Tensor:
        return self._read_planes(index)


def make_row_loader(rows: RowSet, batch_size: int, train: bool, seed: int, device: torch.device) -> RowLoader:
    """Make the loader for rows; `train` shuffles, augments, and drops an incomplete last batch."""
    return RowLoader(
        rows,
        min(batch_size, len(rows)),
        train,
        seed,
        device=torch.zeros(0, device=device).device,  # "cuda" becomes "cuda:0"
        world=current(),
        workers=core_count(),
        skip=False,
    )
