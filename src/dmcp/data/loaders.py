"""Batches of a data set: arrays on the device, image files read by workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from dmcp.batches import generator, mix, share_of, usual_workers
from dmcp.data.datasets import ArraySet, Augmentation, DataSet, FolderSet, decode, transform
from dmcp.errors import DataError
from dmcp.runtime.distributed import SINGLE_PROCESS, World
from dmcp.settings import Corrupt


class ArrayLoader:
    """Batches of a data set that lies on the device, augmented there, a whole batch in a few operations."""

    def __init__(
        self, dataset: ArraySet, batch_size: int, train: bool, seed: int, device: torch.device, world: World
    ) -> None:
        self.batch_size, self.train, self.seed, self.device, self.world = batch_size, train, seed, device, world
        self.augmentation = dataset.augmentation if train else Augmentation()
        self.shape = dataset.shape
        # room to move, the mirrored border or black: (N, H + 2 shift, W + 2 shift, C) uint8
        room = (self.augmentation.shift,) * 2
        mode: Any = "reflect" if self.augmentation.reflect else "constant"
        self.images = torch.from_numpy(np.pad(dataset.images.numpy(), ((0, 0), room, room, (0, 0)), mode)).to(device)
        self.labels = dataset.labels.to(self.device)
        self.mean = torch.tensor(dataset.mean, device=self.device)[:, None, None]
        self.std = torch.tensor(dataset.std, device=self.device)[:, None, None]
        # the rows of each crop, and its columns: first those of all crops, then the same from right to left
        moves = torch.arange(2 * self.augmentation.shift + 1)[:, None]
        rows, columns = (moves + torch.arange(extent) for extent in self.shape[1:])
        self.rows, self.columns = rows.to(self.device), torch.cat([columns, columns.flip(1)]).to(self.device)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of the images and how each one is augmented: a function of (seed, epoch)."""
        count, moves = len(self.labels), 2 * self.augmentation.shift + 1
        draw = generator(self.seed, epoch)  # on the CPU, so that a GPU sees the same images
        order = torch.randperm(count, generator=draw) if self.train else torch.arange(count)
        down, right = torch.randint(moves, (2, count), generator=draw)
        flips = torch.rand(count, generator=draw) < (0.5 if self.augmentation.flip else 0.0)
        drawn = torch.stack([order, down[order], (right + moves * flips)[order]])
        # one copy, and from memory that the device can read while we go on
        drawn = drawn.pin_memory() if self.device.type == "cuda" else drawn
        self.drawn = drawn.to(self.device, non_blocking=True)  # (3, N) in the order of the epoch: image, row, column

    def __len__(self) -> int:
        whole, rest = divmod(len(self.labels), self.batch_size)
        return whole + bool(rest and not self.train)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.starting_at(0)

    def starting_at(self, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of this epoch from number `skip` on."""
        return (self.batch(number) for number in range(skip, len(self)))

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) and labels (B,) of one step of this epoch, as far as they are this rank's."""
        # every operation is a launch on a GPU, and there are many small batches
        index, down, right = self.drawn[:, share_of(number, self.batch_size, len(self.labels), self.world)]
        rows, columns = self.rows[down], self.columns[right]  # (B, H), (B, W)
        pixels = self.images[index[:, None, None], rows[:, :, None], columns[:, None, :]]  # (B, H, W, C)
        images = torch.empty((len(index), *self.shape), device=self.device)
        torch.sub(pixels.permute(0, 3, 1, 2), self.mean, out=images)
        return images.div_(self.std), self.labels[index]


def make_loader(
    dataset: DataSet,
    batch_size: int,
    train: bool,
    seed: int = 0,
    device: torch.device | str = "cpu",
    *,
    world: World = SINGLE_PROCESS,  # each rank gets its part of every batch: all see what one process would
    workers: int | None = None,  # processes that decode files; None: as many as there are cores, at most 8
    corrupt: str = "stop",  # files that cannot be decoded: "stop", or "skip", which replaces them
) -> ArrayLoader | FolderLoader:
    """The loader for a data set; `train` shuffles, augments, and drops an incomplete last batch."""
    if batch_size < 1 or (train and not world.size <= batch_size <= len(dataset)):
        raise DataError(f"A batch of {batch_size} does not fit: give 1 to {len(dataset)}, and one image for each rank.")
    if isinstance(dataset, ArraySet):
        return ArrayLoader(dataset, batch_size, train, seed, torch.device(device), world)
    files = _Files(dataset, train, seed, skip=Corrupt(corrupt) is Corrupt.SKIP)
    workers = usual_workers() if workers is None else workers
    return FolderLoader(files, batch_size, torch.device(device), world, workers)


_TRIES = 100  # unreadable images in a row that are skipped: more are not bad luck


class FolderLoader:
    """Batches of image files.

    A file that cannot be read stops the pass, or, with corrupt="skip", the next one in the order of the epoch takes its
    place, and its path is in `skipped`.
    """

    def __init__(self, files: _Files, batch_size: int, device: torch.device, world: World, workers: int) -> None:
        self.dataset, self.train, self.batch_size = files.dataset, files.train, batch_size
        self.device, self.world = device, world
        self.skipped: set[str] = set()
        self.epoch, self.passes = 0, 0  # the next one, and those begun so far
        self.keys: list[tuple[int, int, int]] = []  # of the batches of a pass: workers live on and learn the epoch so
        self.files: DataLoader[_Batch] = DataLoader(
            files,
            sampler=self.keys,
            batch_size=None,  # a key stands for a whole batch
            num_workers=workers,
            persistent_workers=workers > 0,
            generator=torch.Generator(),  # else each pass draws from the global one
            pin_memory=self.device.type == "cuda",
        )

    def set_epoch(self, epoch: int) -> None:
        """The order and the augmentation of the next pass are a function of (seed, epoch)."""
        self.epoch = epoch

    def __len__(self) -> int:
        count = len(self.dataset)
        return count // self.batch_size if self.train else -(-count // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.starting_at(0)

    def starting_at(self, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of this epoch from number `skip` on; the files of those before are not read."""
        self.passes += 1
        own, batches = self.passes, self._start(skip)
        for number in range(skip, len(self)):
            if own != self.passes:  # the workers serve the last one only
                raise DataError("Another pass over this loader began before this one ended: make a second loader.")
            try:
                images, labels, unreadable, failure = next(batches)
            except RuntimeError as error:
                if not str(error).startswith("DataLoader worker (pid"):
                    raise
                # Slurm sends SIGTERM to all processes, and a terminal Ctrl-C: the step is finished and saved first
                self.files._iterator = None
                batches = self._start(number)
                images, labels, unreadable, failure = next(batches)
            self.skipped.update(unreadable)
            if failure:
                raise DataError(failure)
            yield images.to(self.device, non_blocking=True), labels.to(self.device, non_blocking=True)

    def _start(self, skip: int) -> Iterator[_Batch]:
        """The batches from number `skip` on, as workers read them."""
        shares = [share_of(it, self.batch_size, len(self.dataset), self.world) for it in range(skip, len(self))]
        self.keys[:] = [(self.epoch, share.start, share.stop) for share in shares]
        batches = iter(self.files)
        # torch reports a dead worker from a signal handler too, that is anywhere in the program, such as in the midst
        # of writing a file; without this it does so only where its batch is waited for, after some seconds
        if getattr(batches, "_worker_pids_set", False):
            torch._C._remove_worker_pids(id(batches))
            batches._worker_pids_set = False  # type: ignore[attr-defined]
        return batches


# images (B, 3, height, width), labels (B,), paths of images that were replaced, and why there is no batch: not as an
# exception, since torch would make a page of its one sentence
_Batch = tuple[Tensor, Tensor, list[str], str]


class _Files(Dataset[_Batch]):
    """Batches of files, decoded and transformed; their random numbers are a function of (seed, epoch, index)."""

    def __init__(self, dataset: FolderSet, train: bool, seed: int, skip: bool) -> None:
        self.dataset, self.train, self.seed, self.skip = dataset, train, seed, skip
        self.labels = dataset.labels.tolist()
        self.transform = transform(dataset.size, train)
        self.epoch = -1  # of the order, which is drawn once
        self.order = torch.empty(0, dtype=torch.int64)

    def __getitem__(self, key: tuple[int, int, int]) -> _Batch:
        epoch, start, stop = key
        if epoch != self.epoch:
            count, draw = len(self.dataset), generator(self.seed, epoch)
            order = torch.randperm(count, generator=draw) if self.train else torch.arange(count)
            self.epoch, self.order = epoch, order
        unreadable: list[str] = []
        failure = ""
        # a rank may have no share of the last batch
        images, labels = torch.empty(0, *self.dataset.shape), torch.empty(0, dtype=torch.int64)
        try:
            if samples := [self._sample(place, unreadable) for place in range(start, stop)]:
                images, labels = default_collate(samples)
        except DataError as error:
            failure = str(error)
        return images, labels, unreadable, failure

    def _sample(self, place: int, unreadable: list[str]) -> tuple[Tensor, int]:
        """The image at a place in the order of the epoch, or, if wanted, the next one there that can be read."""
        tries = min(len(self.order), _TRIES)
        for step in range(tries):
            index = int(self.order[(place + step) % len(self.order)])
            path = self.dataset.paths[index]
            try:
                image = decode(path)
            except DataError:
                if not self.skip:
                    raise
                unreadable.append(path)
                continue
            with torch.random.fork_rng(devices=[]):  # torchvision draws from the global generator
                # seeded for the place, since the image that replaces another has a place of its own too
                torch.manual_seed(mix(self.seed, self.epoch, int(self.order[place])))
                return self.transform(image), self.labels[index]
        raise DataError(f"{tries} images in a row cannot be read, the last is {path}: repair or remove them.")
