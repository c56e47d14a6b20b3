"""Batches of a data set: arrays on the device, image files from memory or as threads read them."""

from __future__ import annotations

import copy
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

from dmcp.data import images
from dmcp.data.datasets import ArraySet, Augmentation, DataSet, FolderSet
from dmcp.data.images import Array, Store
from dmcp.errors import DataError
from dmcp.runtime.batches import FewBatches, core_count, generator, mix, on_device, share_of
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
        order = torch.randperm(count, generator=draw) if self.train else fixed_order(count)
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
    """The loader for a data set; `train` shuffles, augments, and drops an incomplete last batch.

    Without `train` the images come in a random order, too, but in one that is always the same: data sets are often
    sorted by class, and BatchNorms that use the statistics of a batch would normalize each class by itself.
    """
    if batch_size < 1 or (train and not world.size <= batch_size <= len(dataset)):
        raise DataError(f"A batch of {batch_size} does not fit: give 1 to {len(dataset)}, and one image for each rank.")
    if isinstance(dataset, ArraySet):
        return ArrayLoader(dataset, batch_size, train, seed, torch.device(device), world)
    place, skip = torch.zeros(0, device=device).device, Corrupt(corrupt) is Corrupt.SKIP
    return FolderLoader(dataset, batch_size, train, seed, place, world, workers or core_count(), skip)


def with_batch_size(loader: Any, batch_size: int) -> Any:
    """A copy of a loader, of the same images in the same order, with batches of another size."""
    inner: Any = loader.loader if isinstance(loader, FewBatches) else loader
    other = copy.copy(inner)
    other.batch_size = batch_size
    return other


def fixed_order(count: int) -> Tensor:
    """The order of the images in every pass of a loader that is not for training."""
    return torch.randperm(count, generator=generator(0))


_TRIES = 100  # unreadable images in a row that are skipped: more are not bad luck
_AHEAD = 3  # batches that are made while others are used
CHUNK = 16  # images that a thread reads in a row
_MAKERS = 2  # threads that have a GPU make batches
_Batch = tuple[Tensor, Tensor]  # images (B, 3, height, width), labels (B,)


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
        order = torch.randperm(count, generator=generator(self.seed, epoch)) if self.train else fixed_order(count)
        self.order = order.numpy()

    def __len__(self) -> int:
        count = len(self.dataset)
        return count // self.batch_size if self.train else -(-count // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.starting_at(0)

    def starting_at(self, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of this epoch from number `skip` on; the files of those before are not read."""
        store, one = self.store, copy.copy(self)  # a copy stays in this epoch
        shares = [share_of(it, self.batch_size, len(self.dataset), self.world) for it in range(skip, len(self))]
        batches = [np.arange(share.start, share.stop) for share in shares]  # places in the order of the epoch
        there = store is not None and store.moved(self.device)
        found = map(partial(one._from_memory, store), batches) if there else one._ahead(batches)
        return found if self.dataset.channels == 3 else ((images.grey(x), labels) for x, labels in found)

    @functools.cached_property
    def store(self) -> Store | None:
        """The decoded images, if they fit into memory; one that cannot be read stops the pass before it begins."""
        found: Any = images.open_store(self.dataset, self.train, self.device, self.workers)
        for row in self.rows[found.sizes[self.rows, 0] == 0] if found else ():
            if not self.skip:
                found.image(row)  # raises
        return found  # type: ignore[no-any-return]

    @functools.cached_property
    def rows(self) -> Array:
        """Where the images of this data set are in the store: (N,)."""
        places = {path: place for place, path in enumerate(self.dataset.whole)}
        return np.array([places[path] for path in self.dataset.paths]) if places else np.arange(len(self.dataset))

    def _from_memory(self, store: Any, places: Array) -> _Batch:
        """A batch of images that lie on the GPU."""
        indices = self.order[places]
        for bad in np.flatnonzero(store.sizes[self.rows[indices], 0] == 0):
            indices[bad], _ = self._find(places[bad], self._read)
        rows = self.rows[indices]
        sizes, labels = store.sizes[rows], self.labels[indices]
        boxes = self._boxes(places, sizes)
        return images.crop_there(store.there, store.starts[rows], sizes, boxes, labels, self.dataset.size)

    def _ahead(self, batches: Sequence[Array]) -> Iterator[_Batch]:
        """Batches whose images threads read, some of them ahead; a GPU makes them beside the step."""
        gpu, numbers = self.device.type == "cuda", iter(range(_MAKERS))
        files = gpu and self.store is None and images.decodes(self.device)
        load = partial(self._load, self._file if files else self._planes) if gpu else self._crop
        own_stream = lambda: torch.cuda.set_stream(_stream(self.device, next(numbers)))  # noqa: E731
        readers, makers = ThreadPoolExecutor(self.workers), ThreadPoolExecutor(_MAKERS, initializer=own_stream)
        waiting: deque[Callable[[], _Batch]] = deque()
        try:
            for number in range(len(batches)):
                for places in batches[number + len(waiting) : number + _AHEAD]:
                    chunks = [places[it : it + CHUNK] for it in range(0, len(places), CHUNK)]
                    read: list[Any] = [readers.submit(load, chunk) for chunk in chunks]
                    waiting.append(
                        makers.submit(self._on_gpu, places, read).result if gpu else partial(self._here, read)
                    )
                batch = waiting.popleft()()
                for tensor in batch if gpu else ():
                    tensor.record_stream(torch.cuda.current_stream(self.device))
                yield on_device(batch, self.device)
        finally:
            for pool in (readers, makers):
                pool.shutdown(wait=False, cancel_futures=True)

    def _boxes(self, places: Array, sizes: Array) -> Array:
        if not self.train:
            return images.middle_boxes(sizes, self.dataset.size)
        # by the place, since the image that replaces another has a place of its own too
        return images.random_boxes(sizes, self.dataset.size, images.random_numbers(self.key, self.order[places]))

    def _find(self, place: int, read: Callable[[int], Any]) -> tuple[int, Any]:
        """The image at a place in the order of the epoch, or, if wanted, the next one there that can be read."""
        tries = min(len(self.order), _TRIES)
        for step in range(tries):
            index = int(self.order[(place + step) % len(self.order)])
            try:
                return index, read(index)
            except DataError:
                if not self.skip:
                    raise
                self.skipped.add(self.dataset.paths[index])
        last = self.dataset.paths[index]
        raise DataError(f"{tries} images in a row cannot be read, the last is {last}: repair or remove them.")

    def _read(self, index: int) -> Any:
        """An image as (height, width, 3)."""
        return self.store.image(self.rows[index]) if self.store else images.read_pixels(self.dataset.paths[index])

    def _load(self, read: Callable[[int], Any], places: Array) -> list[tuple[int, Any]]:
        return [self._find(place, read) for place in places.tolist()]

    def _crop(self, places: Array) -> tuple[Array, Array]:
        """Some images of a batch, cropped, and their labels."""
        indices, found = zip(*self._load(self._read, places), strict=True)
        boxes = self._boxes(places, np.array([image.shape[:2] for image in found]))
        crops = [images.crop_here(*it, self.dataset.size) for it in zip(found, boxes, strict=True)]
        return np.stack(crops), self.labels[list(indices)]

    def _here(self, read: Sequence[Future[tuple[Array, Array]]]) -> _Batch:
        """A batch of what `_crop` returned, in the thread that asked for it, whose torch may use all cores."""
        none = np.empty((0, *self.dataset.size, 3), np.uint8), self.labels[:0]  # a rank may have no share
        crops, labels = (np.concatenate(parts) for parts in zip(none, *(it.result() for it in read), strict=True))
        floats, (mean, std) = torch.from_numpy(crops).permute(0, 3, 1, 2).contiguous().float(), images.scale("cpu")
        return floats.sub_(mean).div_(std), torch.from_numpy(labels)

    def _planes(self, index: int) -> Tensor:
        """An image as (3, height, width)."""
        return torch.from_numpy(self._read(index)).permute(2, 0, 1).contiguous()

    def _file(self, index: int) -> Tensor:
        """A JPEG file for the GPU to decode; an image, if it is something else."""
        data = images.read_jpeg(self.dataset.paths[index])
        return self._planes(index) if data is None else data

    def _on_gpu(self, places: Array, read: Sequence[Future[list[tuple[int, Any]]]]) -> _Batch:
        """A batch of what `_load` returned, in a thread and a stream of its own."""
        found = [pair for it in read for pair in it.result()]
        files = [number for number, (_, item) in enumerate(found) if item.ndim == 1]
        for number, image in zip(files, images.decode_there([found[it][1] for it in files], self.device), strict=True):
            found[number] = self._find(places[number], self._planes) if image is None else (found[number][0], image)
        sizes = np.array([image.shape[1:] for _, image in found]).reshape(-1, 2)
        lengths, labels = 3 * sizes.prod(1), self.labels[[index for index, _ in found]]
        rows = [image.flatten() for _, image in found] or [torch.empty(0, dtype=torch.uint8)]  # a rank may have none
        # in one step each: every operation waits for the threads that read
        flat = torch.cat([row.to(self.device) for row in rows] if files else rows).to(self.device)
        starts, boxes = np.cumsum(lengths) - lengths, self._boxes(places, sizes)
        batch = images.crop_there(flat, starts, sizes, boxes, labels, self.dataset.size, planar=True)
        torch.cuda.current_stream(self.device).synchronize()  # the step need not wait, and memory may be used again
        return batch


@functools.cache
def _stream(device: torch.device, number: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # few: each has memory of its own
