"""Batches of a data set with images of another size, enlarged or shrunk on the device that they lie on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from dmcp.data import datasets
from dmcp.data.loaders import make_loader


class Enlarged:
    """The batches of a loader, with images of `side` pixels; everything else is the loader's own."""

    def __init__(self, loader: Any, side: int) -> None:
        self.loader = loader
        self.side = side
        self.shrinks = side < loader.shape[-1]

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.starting_at(0)

    @property
    def seed(self) -> int:
        """Of the order and the augmentation of the images."""
        return int(self.loader.seed)

    @seed.setter
    def seed(self, seed: int) -> None:
        self.loader.seed = seed

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of the images and how each one is augmented."""
        self.loader.set_epoch(epoch)

    def starting_at(self, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of this epoch from number `skip` on."""
        for images, labels in self.loader.starting_at(skip):
            if self.shrinks:
                yield F.adaptive_avg_pool2d(images, self.side), labels  # every pixel counts
            else:
                yield F.interpolate(images, size=(self.side, self.side), mode="bilinear"), labels


def open_images(name: str, root: str = "data", held_out: float = 0.0) -> tuple[datasets.DataSet, datasets.DataSet, int]:
    """Training images, those that networks are judged on, and the number of classes.

    held_out: share of the training images to judge on; 0 takes the test images.
    """
    data = datasets.load(name, root=root)
    train, judged = data.train, data.test
    if held_out:
        train, judged = datasets.split(data.train, held_out, 0)
    return train, judged, data.classes


def open_loader(images: Any, batch: int, train: bool, seed: int, device: Any, side: int = 0) -> Any:
    """Batches of images; side: the pixels that they are scaled to, if it is not their own."""
    loader = make_loader(images, min(batch, len(images)), train, seed, device)
    if side in (0, images.shape[-1]):
        return loader
    return Enlarged(loader, side)
