"""Batches of a data set: arrays on the device, image files from memory or as threads read them."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dmcp.batches import generator, mix, share_of, usual_workers
from dmcp.data.datasets import ArraySet, Augmentation, DataSet, FolderSet
from dmcp.data.images import (
    DRAWS,
    Boxes,
    Pixels,
    Store,
    crop_here,
    crop_there,
    decode_there,
    decodes,
    middle_boxes,
    open_store,
    random_boxes,
    random_numbers,
    read_jpeg,
    read_pixels,
    scale,
)
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
    workers: int | None = None,  # threads that read files; None: as many as there are cores
    corrupt: str = "stop",  # files that cannot be decoded: "stop", or "skip", which replaces them
) -> ArrayLoader | FolderLoader:
    """The loader for a data set; `train` shuffles, augments, and drops an incomplete last batch."""
    if batch_size < 1 or (train and not world.size <= batch_size <= len(dataset)):
        raise DataError(f"A batch of {batch_size} does not fit: give 1 to {len(dataset)}, and one image for each rank.")
    if isinstance(dataset, ArraySet):
        return ArrayLoader(dataset, batch_size, train, seed, torch.device(device), world)
    place, skip = torch.zeros(0, device=device).device, Corrupt(corrupt) is Corrupt.SKIP
    return FolderLoader(dataset, batch_size, train, seed, place, world, workers or usual_workers(), skip)


_TRIES = 100  # unreadable images in a row that are skipped: more are not bad luck
_AHEAD = 3  # batches that are made while others are used
_CHUNK = 16  # images that a thread reads in a row


@dataclass(eq=False)
class FolderLoader:
    """Batches of image files, from memory if they fit; their random numbers are a function of (seed, epoch, index).

    A file that cannot be read stops the pass, or, with corrupt="skip", the next one in the order of the epoch takes its
    place, and its path is in `skipped`.
    """

    dataset: FolderSet
    batch_size: int
    train: bool
    seed: int
    device: torch.device
    world: World
    workers: int
    skip: bool
    skipped: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.labels = self.dataset.labels.numpy()
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """The order and the augmentation of the next pass are a function of (seed, epoch)."""
        self.key, count = mix(self.seed, epoch), len(self.dataset)
        order = torch.randperm(count, generator=generator(self.seed, epoch)) if self.train else torch.arange(count)
        self.order = order.numpy()

    def __len__(self) -> int:
        count = len(self.dataset)
        return count // self.batch_size if self.train else -(-count // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.starting_at(0)

    def starting_at(self, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of this epoch from number `skip` on; the files of those before are not read."""
        shares = [share_of(it, self.batch_size, len(self.dataset), self.world) for it in range(skip, len(self))]
        places = [np.arange(share.start, share.stop) for share in shares]
        make = _Pass(self)
        return map(make.from_memory, places) if make.there is not None else make.ahead(places)

    @functools.cached_property
    def store(self) -> Store | None:
        """The decoded images, if they fit into memory; one that cannot be read stops the pass before it begins."""
        found = open_store(self.dataset, self.train, self.device, self.workers)
        broken = [] if found is None or self.skip else self.rows[found.sizes[self.rows, 0] == 0]
        if found is not None and len(broken):
            raise DataError(found.reasons[str(broken[0])])
        return found

    @functools.cached_property
    def rows(self) -> Any:
        """Where the images of this data set are in the store: (N,)."""
        places = {path: place for place, path in enumerate(self.dataset.whole)}
        return np.array([places[path] for path in self.dataset.paths]) if places else np.arange(len(self.dataset))


class _Pass:
    """One pass over a loader: its order and random numbers stay, whatever is done to the loader meanwhile."""

    def __init__(self, loader: FolderLoader) -> None:
        self.loader, self.order, self.key = loader, loader.order, loader.key
        self.size, self.device, self.store = loader.dataset.size, loader.device, loader.store
        self.there = None if self.store is None else self.store.on(self.device)  # all of them, on the GPU
        self.jpegs = self.store is None and decodes(self.device)  # files go to the GPU as they are

    def from_memory(self, places: Any) -> tuple[Tensor, Tensor]:
        """A batch of images that lie on the GPU; places: in the order of the epoch."""
        assert self.store is not None and self.there is not None
        indices = self.order[places]
        rows = self.loader.rows[indices]
        for bad in np.flatnonzero(self.store.sizes[rows, 0] == 0):
            indices[bad] = self._find(places[bad], self._read)[0]
            rows[bad] = self.loader.rows[indices[bad]]
        sizes = self.store.sizes[rows]
        pixels = Pixels(self.there, self.store.starts[rows], sizes, np.zeros(len(rows), bool))
        return crop_there(pixels, self._boxes(places, sizes), self.loader.labels[indices], self.size)

    def ahead(self, batches: Sequence[Any]) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches whose images threads read, some of them ahead."""
        cuda = self.device.type == "cuda"
        readers, makers = ThreadPoolExecutor(self.loader.workers), ThreadPoolExecutor(2, initializer=self._own_stream)
        waiting: deque[Callable[[], tuple[Tensor, Tensor]]] = deque()
        try:
            for number in range(len(batches)):
                for places in batches[number + len(waiting) : number + _AHEAD]:
                    chunks = [places[it : it + _CHUNK] for it in range(0, len(places), _CHUNK)]
                    read: list[Future[Any]] = [
                        readers.submit(self._load if cuda else self._crop, chunk) for chunk in chunks
                    ]
                    make = makers.submit(self._on_gpu, places, read).result if cuda else partial(self._here, read)
                    waiting.append(make)
                images, labels = waiting.popleft()()
                if cuda:
                    images.record_stream(torch.cuda.current_stream(self.device))
                    labels.record_stream(torch.cuda.current_stream(self.device))
                yield images.to(self.device), labels.to(self.device)
        finally:
            for pool in (readers, makers):
                pool.shutdown(wait=False, cancel_futures=True)

    def _own_stream(self) -> None:
        """Of a thread that makes batches, so that the GPU does so beside the step."""
        torch.cuda.set_stream(torch.cuda.Stream(self.device))  # type: ignore[no-untyped-call]

    def _boxes(self, places: Any, sizes: Any) -> Boxes:
        if not self.loader.train:
            return middle_boxes(sizes, self.size)
        # by the place, since the image that replaces another has a place of its own too
        return random_boxes(sizes, self.size, random_numbers(self.key, self.order[places], DRAWS))

    def _find(self, place: int, read: Callable[[int], Any]) -> tuple[int, Any]:
        """The image at a place in the order of the epoch, or, if wanted, the next one there that can be read."""
        tries = min(len(self.order), _TRIES)
        for step in range(tries):
            index = int(self.order[(place + step) % len(self.order)])
            try:
                return index, read(index)
            except DataError:
                if not self.loader.skip:
                    raise
                self.loader.skipped.add(self.loader.dataset.paths[index])
        last = self.loader.dataset.paths[index]
        raise DataError(f"{tries} images in a row cannot be read, the last is {last}: repair or remove them.")

    def _read(self, index: int) -> Any:
        """An image as (height, width, 3)."""
        if self.store is not None:
            return self.store.image(self.loader.rows[index])
        return read_pixels(self.loader.dataset.paths[index])

    # on the host

    def _crop(self, places: Any) -> tuple[Any, list[int]]:
        """Some images of a batch, cropped, and their places in the data set."""
        indices, images = zip(*(self._find(place, self._read) for place in places.tolist()), strict=True)
        boxes = self._boxes(places, np.array([image.shape[:2] for image in images]))
        crops = [crop_here(*it, self.size) for it in zip(images, boxes.axes, boxes.flips, strict=True)]
        return np.stack(crops), list(indices)

    def _here(self, read: Sequence[Future[tuple[Any, list[int]]]]) -> tuple[Tensor, Tensor]:
        """A batch of what `_crop` returned, in the thread that asked for it, whose torch may use all cores."""
        found = [it.result() for it in read]
        indices = [index for _, some in found for index in some]
        pixels = np.concatenate([np.empty((0, *self.size, 3), np.uint8), *(crops for crops, _ in found)])
        images, (mean, std) = torch.empty(len(pixels), 3, *self.size), scale(torch.device("cpu"))
        torch.sub(torch.from_numpy(pixels).permute(0, 3, 1, 2), mean, out=images)
        return images.div_(std), torch.from_numpy(self.loader.labels[indices])

    # on the GPU

    def _load(self, places: Any) -> list[tuple[int, Any]]:
        """Some images of a batch, or, where the GPU decodes, JPEG files; each with its place in the data set."""

        def read(index: int) -> Any:
            data = read_jpeg(self.loader.dataset.paths[index]) if self.jpegs else None
            return self._read(index) if data is None else data

        return [self._find(place, read) for place in places.tolist()]

    def _on_gpu(self, places: Any, read: Sequence[Future[list[tuple[int, Any]]]]) -> tuple[Tensor, Tensor]:
        """A batch of what `_load` returned."""
        found = [pair for it in read for pair in it.result()]
        files = [number for number, (_, item) in enumerate(found) if isinstance(item, Tensor)]
        for number, image in zip(files, decode_there([found[it][1] for it in files], self.device), strict=True):
            found[number] = found[number][0], image
            if image is None:
                found[number] = self._find(int(places[number]), self._read)
        items = [item for _, item in found]
        planar = np.array([isinstance(item, Tensor) for item in items], bool)
        shapes = [item.shape[1:] if flat else item.shape[:2] for item, flat in zip(items, planar, strict=True)]
        sizes = np.array(shapes, np.int64).reshape(-1, 2)
        starts, sorted_ = np.zeros(len(items), np.int64), np.argsort(planar, kind="stable")
        starts[sorted_[1:]] = np.cumsum(3 * sizes[sorted_].prod(1))[:-1]
        here = [torch.from_numpy(item).flatten() for item in items if not isinstance(item, Tensor)]
        pinned = torch.empty(sum(map(len, here)), dtype=torch.uint8, pin_memory=True)
        there = torch.cat(here, out=pinned) if here else pinned
        flats = [item.flatten() for item in items if isinstance(item, Tensor)]
        pixels = Pixels(torch.cat([there.to(self.device, non_blocking=True), *flats]), starts, sizes, planar)
        labels = self.loader.labels[[index for index, _ in found]]
        batch = crop_there(pixels, self._boxes(places, sizes), labels, self.size)
        torch.cuda.current_stream(self.device).synchronize()
        return batch
