"""Folders of image files, one folder per class, decoded and augmented by worker processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from dmcp.batches import check_size, generator, mix
from dmcp.errors import DataError

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, which pre-trained networks expect


@dataclass(frozen=True, eq=False)
class FolderSet:
    """Image files and their labels."""

    paths: tuple[str, ...]
    labels: Tensor  # (N,) int64
    classes: int
    size: int  # pixels of the square that the model gets

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image as the model gets it: channels, height, width."""
        return 3, self.size, self.size

    def subset(self, indices: Tensor) -> FolderSet:
        """The files at these places."""
        return replace(self, paths=tuple(self.paths[i] for i in indices.tolist()), labels=self.labels[indices])


def open_folder(path: Path, size: int) -> tuple[FolderSet, FolderSet]:
    """Training and test files of a directory with `train/` and `val/`, checked."""
    if type(size) is not int or size < 1:
        raise DataError(f"The image size must be an int of at least 1, not {size!r}.")
    found = []
    for part in ("train", "val"):
        if not (path / part).is_dir():
            raise DataError(f"{path} needs {part}/ with one folder of images per class (or train-*.npz, test-*.npz).")
        try:
            found.append(torchvision.datasets.ImageFolder(str(path / part)))
        except (FileNotFoundError, OSError) as error:
            raise DataError(f"{path / part}: {str(error).splitlines()[0]}") from error
    train, test = found
    if train.classes != test.classes:
        odd = sorted(set(train.classes) ^ set(test.classes))
        raise DataError(f"{path}: train/ and val/ must have the same classes; these are in one only: {', '.join(odd)}.")
    if len(train.classes) < 2:
        raise DataError(f"{path}: there is one class, {train.classes[0]}; at least two are needed.")
    sets = [
        FolderSet(tuple(file for file, _ in part.samples), torch.tensor(part.targets), len(train.classes), size)
        for part in found
    ]
    return sets[0], sets[1]


class FolderLoader:
    """Batches of image files; `train` crops and flips at random, shuffles, and drops an incomplete last batch."""

    def __init__(
        self,
        dataset: FolderSet,
        batch_size: int,
        train: bool,
        seed: int = 0,
        device: torch.device | str = "cpu",
        channels_last: bool = False,
        workers: int | None = None,  # processes that decode; None: as many as there are cores, at most 8
    ) -> None:
        check_size(batch_size, len(dataset), train)
        self.batch_size = batch_size
        self.device = torch.device(device)
        self.channels_last = channels_last
        self.keys = _Keys(len(dataset), batch_size, train, seed)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = min(8, cores) if workers is None else workers
        self.files: DataLoader[tuple[Tensor, int]] = DataLoader(
            _Files(dataset, train, seed),
            batch_sampler=self.keys,
            num_workers=workers,
            persistent_workers=workers > 0,
            generator=torch.Generator(),  # else each pass draws from the global one
            pin_memory=self.device.type == "cuda",
        )

    def set_epoch(self, epoch: int) -> None:
        """The order and the augmentation of the next pass are a function of (seed, epoch)."""
        self.keys.epoch = epoch

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        for images, labels in self.files:
            moved = images.to(self.device, non_blocking=True, memory_format=layout)
            yield moved, labels.to(self.device, non_blocking=True)


class _Keys:
    """Batches of (epoch, index): the workers live on through all epochs and learn the epoch with each file."""

    def __init__(self, count: int, batch_size: int, train: bool, seed: int) -> None:
        self.count, self.batch_size, self.train, self.seed = count, batch_size, train, seed
        self.epoch = 0

    def __len__(self) -> int:
        return self.count // self.batch_size if self.train else -(-self.count // self.batch_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        every = torch.randperm(self.count, generator=generator(self.seed, self.epoch)) if self.train else None
        order = range(self.count) if every is None else every.tolist()
        for number in range(len(self)):
            yield [(self.epoch, i) for i in order[number * self.batch_size : (number + 1) * self.batch_size]]


class _Files(Dataset[tuple[Tensor, int]]):
    """One file, decoded and transformed; its random numbers are a function of (seed, epoch, index)."""

    def __init__(self, dataset: FolderSet, train: bool, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self.labels = dataset.labels.tolist()
        self.transform = _transform(dataset.size, train)

    def __getitem__(self, key: Any) -> tuple[Tensor, int]:
        epoch, index = key
        path = self.dataset.paths[index]
        try:
            image = torchvision.datasets.folder.pil_loader(path)
        except Exception as error:  # PIL raises many kinds for a broken file
            raise DataError(f"{path} cannot be read as an image: {error}") from error
        with torch.random.fork_rng(devices=[]):  # torchvision draws from the global generator
            torch.manual_seed(mix(self.seed, epoch, index))
            return self.transform(image), self.labels[index]


def _transform(size: int, train: bool) -> Callable[[Any], Tensor]:
    crop = (
        [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
        if train
        else [v2.Resize(round(size / 0.875), antialias=True), v2.CenterCrop(size)]
    )
    last = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(_MEAN, _STD), v2.ToPureTensor()]
    return v2.Compose([*crop, *last])  # type: ignore[no-any-return]
