"""Batches of a data set: of arrays on the device, of image files from memory or as threads read them."""

from __future__ import annotations

import copy
import functools
import itertools
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
from dmcp.data.datasets import ArraySet, Augmentation, DataSet
from dmcp.data.folders import FolderSet
from dmcp.data.images import Array
from dmcp.data.store import Store, open_store
from dmcp.errors import DataError
from dmcp.runtime.batches import FewBatches, core_count, generator, mix, on_device, share_of
from dmcp.runtime.distributed import SINGLE_PROCESS, World
from dmcp.settings import Corrupt


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
    """Make the loader for a data set; `train` shuffles, augments, and drops an incomplete last batch.

    Without `train` the images come in a random order, too, but it is always the same one: data sets are often sorted
    by class, and BatchNorms that use the statistics of a batch would normalize each class by itself.
    """
    if batch_size < 1 or (train and not world.size <= batch_size <= len(dataset)):
        raise DataError(
            f"A batch size of {batch_size} is not possible. "
            f"Choose 1 to {len(dataset)}, the number of images, and at least one image for each rank."
        )
    if isinstance(dataset, ArraySet):
        return ArrayLoader(dataset, batch_size, train, seed, torch.device(device), world)
    return FolderLoader(
        dataset,
        batch_size,
        train,
        seed,
        device=torch.zeros(0, device=device).device,  # "cuda" becomes "cuda:0"
        world=world,
        workers=workers or core_count(),
        skip=Corrupt(corrupt) is Corrupt.SKIP,
    )


def with_batch_size(loader: Any, batch_size: int) -> Any:
    """Copy a loader, with the same images in the same order, but batches of another size."""
    if isinstance(loader, FewBatches):
        loader = loader.loader
    resized = copy.copy(loader)
    resized.batch_size = batch_size
    return resized


def fixed_order(count: int) -> Tensor:
    """Return the order of the images in every pass of a loader that is not for training."""
    return torch.randperm(count, generator=generator(0))


# arrays


class ArrayLoader:
    """Batches of a data set that lies on the device and is augmented there, a whole batch in a few operations."""

    def __init__(
        self, dataset: ArraySet, batch_size: int, train: bool, seed: int, device: torch.device, world: World
    ) -> None:
        self.batch_size = batch_size
        self.train = train
        self.seed = seed
        self.device = device
        self.world = world
        self.augmentation = Augmentation()
        if train:
            self.augmentation = dataset.augmentation
        self.shape = dataset.shape

        # A border to move into, mirrored or black: (N, H + 2 shift, W + 2 shift, C) uint8.
        shift = self.augmentation.shift
        border = ((0, 0), (shift, shift), (shift, shift), (0, 0))
        mode: Any = "constant"
        if self.augmentation.reflect:
            mode = "reflect"
        self.images = torch.from_numpy(np.pad(dataset.images.numpy(), border, mode)).to(device)
        self.labels = dataset.labels.to(device)
        self.mean = torch.tensor(dataset.mean, device=device)[:, None, None]
        self.std = torch.tensor(dataset.std, device=device)[:, None, None]

        # The rows and columns of the crop for each move. Columns come twice: the second time from right to left.
        moves = torch.arange(2 * shift + 1)[:, None]
        _, height, width = self.shape
        columns = moves + torch.arange(width)
        self.rows = (moves + torch.arange(height)).to(device)
        self.columns = torch.cat([columns, columns.flip(1)]).to(device)
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Draw the order of the images and how each one is augmented: a function of (seed, epoch)."""
        count = len(self.labels)
        moves = 2 * self.augmentation.shift + 1
        flip_chance = 0.0
        if self.augmentation.flip:
            flip_chance = 0.5

        random = generator(self.seed, epoch)  # on the CPU, so that a GPU sees the same images
        order = torch.randperm(count, generator=random) if self.train else fixed_order(count)
        row_moves, column_moves = torch.randint(moves, (2, count), generator=random)
        flips = torch.rand(count, generator=random) < flip_chance
        columns = column_moves + moves * flips

        # In the order of the epoch: index, row and column of each crop. (3, N)
        drawn = torch.stack([order, row_moves[order], columns[order]])
        if self.device.type == "cuda":
            drawn = drawn.pin_memory()  # a GPU reads it while the host goes on
        self.drawn = drawn.to(self.device, non_blocking=True)

    def __len__(self) -> int:
        full_batches, rest = divmod(len(self.labels), self.batch_size)
        has_last_part = bool(rest) and not self.train
        return full_batches + has_last_part

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.starting_at(0)

    def starting_at(self, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of this epoch from number `skip` on."""
        return (self.batch(number) for number in range(skip, len(self)))

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        """Make this rank's part of a batch of this epoch: images (B, C, H, W) and labels (B,).

        Few operations, since each one is a launch on a GPU, and there are many small batches.
        """
        share = share_of(number, self.batch_size, len(self.labels), self.world)
        index, row, column = self.drawn[:, share]
        rows = self.rows[row][:, :, None]  # (B, H, 1)
        columns = self.columns[column][:, None, :]  # (B, 1, W)
        pixels = self.images[index[:, None, None], rows, columns]  # (B, H, W, C)
        images = torch.empty((len(index), *self.shape), device=self.device)
        torch.sub(pixels.permute(0, 3, 1, 2), self.mean, out=images)
        return images.div_(self.std), self.labels[index]


# image files

_TRIES = 100  # unreadable images in a row that are skipped: more are not bad luck
_AHEAD = 3  # batches that are begun before the first of them is used
CHUNK = 16  # images that a thread reads in a row
_MAKERS = 2  # threads that make batches on a GPU
_Batch = tuple[Tensor, Tensor]  # images (B, 3, height, width), labels (B,)
_Crops = tuple[Array, Array]  # images (n, height, width, 3), labels (n,)


@dataclass(eq=False)
class FolderLoader:
    """Batches of image files, from memory if they fit; their random numbers are a function of (seed, epoch, index).

    A file that cannot be read stops the pass. If `skip` is set, the next file in the order of the epoch takes its
    place, and its path is in `skipped`.

    A *position* is a place in the order of the epoch, an *index* the number of an image in the data set.
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
        """Draw the order of the images; it and the augmentation of the pass are a function of (seed, epoch)."""
        count = len(self.dataset)
        order = torch.randperm(count, generator=generator(self.seed, epoch)) if self.train else fixed_order(count)
        self.order = order.numpy()
        self.key = mix(self.seed, epoch)

    def __len__(self) -> int:
        count = len(self.dataset)
        if self.train:
            return count // self.batch_size
        return -(-count // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return self.starting_at(0)

    def starting_at(self, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches of this epoch from number `skip` on; the files of those before are not read."""
        store = self.store
        flat = None
        if store is not None:
            flat = store.on_gpu(self.device)

        positions: list[Array] = []  # of each batch
        for number in range(skip, len(self)):
            share = share_of(number, self.batch_size, len(self.dataset), self.world)
            positions.append(np.arange(share.start, share.stop))

        epoch = copy.copy(self)  # this loader may enter another epoch while its batches are used
        batches: Iterator[_Batch]
        if store is not None and flat is not None:
            batches = map(partial(epoch._crop_in_gpu_memory, store, flat), positions)
        elif self.device.type == "cuda":
            batches = epoch._stream_to_gpu(positions)
        else:
            batches = epoch._stream(positions)

        if self.dataset.channels == 3:
            return batches
        return ((images.to_grey(rgb), labels) for rgb, labels in batches)

    # where the images are

    @functools.cached_property
    def store(self) -> Store | None:
        """The decoded images, if they fit into memory; one that cannot be read stops the pass before it begins."""
        store = open_store(self.dataset, self.train, self.device, self.workers)
        if store is None:
            return None
        unreadable = self.rows[store.sizes[self.rows, 0] == 0]
        if len(unreadable) and not self.skip:
            store.image(unreadable[0])  # raises
        return store

    @functools.cached_property
    def rows(self) -> Array:
        """Where the images of this data set are in the store: (N,)."""
        if not self.dataset.whole:
            return np.arange(len(self.dataset))
        row_of = {path: row for row, path in enumerate(self.dataset.whole)}
        return np.array([row_of[path] for path in self.dataset.paths])

    def _read(self, index: int) -> Array:
        """Read an image as (height, width, 3)."""
        if self.store is not None:
            return self.store.image(self.rows[index])
        return images.read_pixels(self.dataset.paths[index])

    def _read_planes(self, index: int) -> Tensor:
        """Read an image as (3, height, width)."""
        return torch.from_numpy(self._read(index)).permute(2, 0, 1).contiguous()

    def _read_file(self, index: int) -> Tensor:
        """Read a JPEG file for the GPU to decode, (bytes,); anything else as (3, height, width)."""
        data = images.read_jpeg(self.dataset.paths[index])
        if data is not None:
            return data
        return self._read_planes(index)

    def _read_or_replace(self, read: Callable[[int], Any], position: int) -> tuple[int, Any]:
        """Read the image at a position or, if files are skipped, the next one that can be read; with its index."""
        tries = min(len(self.order), _TRIES)
        for step in range(tries):
            index = int(self.order[(position + step) % len(self.order)])
            try:
                return index, read(index)
            except DataError:
                if not self.skip:
                    raise
                self.skipped.add(self.dataset.paths[index])
        last = self.dataset.paths[index]
        raise DataError(
            f"{tries} images in a row cannot be read; the last one is {last}. "
            "Repair or remove them, and start a new run (a run cannot be resumed with changed data)."
        )

    def _boxes(self, positions: Array, sizes: Array) -> Array:
        """Where to crop the images at these positions."""
        if not self.train:
            return images.middle_boxes(sizes, self.dataset.size)
        # Numbers are drawn for the position: the image that replaces a broken one has numbers for its own position.
        numbers = images.random_numbers(self.key, self.order[positions])
        return images.random_boxes(sizes, self.dataset.size, numbers)

    # from the memory of a GPU

    def _crop_in_gpu_memory(self, store: Store, flat: Tensor, positions: Array) -> _Batch:
        """Make a batch of images whose bytes lie on the GPU."""
        indices = self.order[positions]
        for number in np.flatnonzero(store.sizes[self.rows[indices], 0] == 0):
            indices[number], _ = self._read_or_replace(self._read, positions[number])
        rows = self.rows[indices]
        sizes = store.sizes[rows]
        boxes = self._boxes(positions, sizes)
        return images.crop_batch(flat, store.starts[rows], sizes, boxes, self.labels[indices], self.dataset.size)

    # on the CPU: threads read and crop

    def _stream(self, positions: Sequence[Array]) -> Iterator[_Batch]:
        """Yield batches; threads read and crop the images of the next ones meanwhile."""
        readers = ThreadPoolExecutor(self.workers)

        def begin(batch_positions: Array) -> Callable[[], _Batch]:
            chunks = [readers.submit(self._read_and_crop, chunk) for chunk in _chunks(batch_positions)]
            return partial(self._join, chunks)

        try:
            for finish in _ahead(begin, positions):
                yield on_device(finish(), self.device)
        finally:
            readers.shutdown(wait=False, cancel_futures=True)

    def _read_and_crop(self, positions: Array) -> _Crops:
        """Read and crop some images of a batch, in a thread."""
        indices: list[int] = []
        pixels: list[Array] = []
        for position in positions.tolist():
            index, image = self._read_or_replace(self._read, position)
            indices.append(index)
            pixels.append(image)
        boxes = self._boxes(positions, np.array([image.shape[:2] for image in pixels]))
        crops = [images.crop_image(image, box, self.dataset.size) for image, box in zip(pixels, boxes, strict=True)]
        return np.stack(crops), self.labels[indices]

    def _join(self, chunks: Sequence[Future[_Crops]]) -> _Batch:
        """Make a batch of the chunks, in the thread that asked for it, where torch may use all cores."""
        crops = [np.empty((0, *self.dataset.size, 3), np.uint8)]  # the share of a rank may be empty
        labels = [self.labels[:0]]
        for chunk in chunks:
            chunk_crops, chunk_labels = chunk.result()
            crops.append(chunk_crops)
            labels.append(chunk_labels)
        pixels = torch.from_numpy(np.concatenate(crops)).permute(0, 3, 1, 2).contiguous().float()
        mean, std = images.mean_and_std("cpu")
        return pixels.sub_(mean).div_(std), torch.from_numpy(np.concatenate(labels))

    # to a GPU: threads read, the GPU crops, and decodes if it can

    def _stream_to_gpu(self, positions: Sequence[Array]) -> Iterator[_Batch]:
        """Yield batches; threads read the images of the next ones, and a GPU makes them beside the step."""
        gpu_decodes = self.store is None and images.can_decode(self.device)
        read = self._read_file if gpu_decodes else self._read_planes
        numbers = iter(range(_MAKERS))

        def use_own_stream() -> None:
            torch.cuda.set_stream(_stream_of(self.device, next(numbers)))

        readers = ThreadPoolExecutor(self.workers)
        makers = ThreadPoolExecutor(_MAKERS, initializer=use_own_stream)

        def begin(batch_positions: Array) -> Callable[[], _Batch]:
            chunks = [readers.submit(self._read_all, read, chunk) for chunk in _chunks(batch_positions)]
            return makers.submit(self._make_on_gpu, batch_positions, chunks).result

        try:
            for finish in _ahead(begin, positions):
                batch = finish()
                for tensor in batch:  # its memory is kept until the stream of the step is done with it
                    tensor.record_stream(torch.cuda.current_stream(self.device))
                yield batch
        finally:
            for pool in (readers, makers):
                pool.shutdown(wait=False, cancel_futures=True)

    def _read_all(self, read: Callable[[int], Tensor], positions: Array) -> list[tuple[int, Tensor]]:
        """Read some images of a batch, in a thread; each one comes with its index."""
        return [self._read_or_replace(read, position) for position in positions.tolist()]

    def _make_on_gpu(self, positions: Array, chunks: Sequence[Future[list[tuple[int, Tensor]]]]) -> _Batch:
        """Make a batch of what `_read_all` returned, in a thread and a stream of its own."""
        indices: list[int] = []
        pixels: list[Tensor] = []  # (3, height, width), or the bytes of a JPEG file
        for chunk in chunks:
            for index, image in chunk.result():
                indices.append(index)
                pixels.append(image)

        # JPEG files are decoded on the GPU. One that it cannot decode is left to the CPU, or replaced.
        jpegs = [number for number, image in enumerate(pixels) if image.ndim == 1]
        decoded = images.decode_on_gpu([pixels[number] for number in jpegs], self.device)
        for number, planes in zip(jpegs, decoded, strict=True):
            if planes is not None:
                pixels[number] = planes
            else:
                indices[number], pixels[number] = self._read_or_replace(self._read_planes, positions[number])

        # All bytes in one row on the GPU. Each operation waits for the threads that read: one copy where possible.
        rows = [image.flatten() for image in pixels]
        if not rows:  # the share of a rank may be empty
            rows = [torch.empty(0, dtype=torch.uint8)]
        if jpegs:
            rows = [row.to(self.device) for row in rows]
        flat = torch.cat(rows).to(self.device)

        sizes = np.array([image.shape[1:] for image in pixels]).reshape(-1, 2)
        lengths = 3 * sizes.prod(1)
        starts = np.cumsum(lengths) - lengths
        boxes = self._boxes(positions, sizes)
        labels = self.labels[indices]
        batch = images.crop_batch(flat, starts, sizes, boxes, labels, self.dataset.size, planar=True)
        torch.cuda.current_stream(self.device).synchronize()  # the step need not wait, and memory may be used again
        return batch


def _chunks(positions: Array) -> list[Array]:
    """Divide the positions of a batch into what a thread reads in a row."""
    return [positions[start : start + CHUNK] for start in range(0, len(positions), CHUNK)]


def _ahead(
    begin: Callable[[Array], Callable[[], _Batch]], positions: Sequence[Array]
) -> Iterator[Callable[[], _Batch]]:
    """Begin each batch a few batches before it is needed, and yield what waits for it."""
    upcoming = iter(positions)
    begun = deque(begin(batch_positions) for batch_positions in itertools.islice(upcoming, _AHEAD))
    while begun:
        yield begun.popleft()
        begun.extend(begin(batch_positions) for batch_positions in itertools.islice(upcoming, 1))


@functools.cache
def _stream_of(device: torch.device, number: int) -> torch.cuda.Stream:
    """A stream for each thread that makes batches. They are few and reused, since each has memory of its own."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
