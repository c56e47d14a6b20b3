"""Folders of image files, one folder per class, decoded and augmented by worker processes."""

from __future__ import annotations

import os
import shlex
import signal
import stat
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import torch
from PIL.Image import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from dmcp.batches import check_size, generator, mix, share_of
from dmcp.errors import DataError
from dmcp.ranks import ALONE, Ranks

_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, which pre-trained networks expect
_KEPT = 0.875  # share of each side of a test image that the crop keeps
_LOOKED_AT = 9  # images whose size is looked at
_PARTS = ("train", "val")
_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # which torchvision reads
_TRIES = 100  # unreadable images in a row that are skipped: more are not bad luck


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
    """The files of `train/` or `val/`, as torchvision lists them."""
    import torchvision  # late: see cifar_nets.mobilenet_v2

    folder = path / part
    if not folder.is_dir():
        here = path if path.name in _PARTS else path.resolve()
        if here.name in _PARTS and here.is_dir():
            above = path.parent if path.name in _PARTS else path / ".."
            raise DataError(f"{path} is one part of the data only: give the folder that it lies in, {str(above)!r}.")
        raise DataError(f"{path} needs {part}/ with one folder of images per class (or train-*.npz, test-*.npz).")
    try:
        found = torchvision.datasets.ImageFolder(str(folder), allow_empty=True)
    except (FileNotFoundError, OSError) as error:
        raise DataError(f"{folder}: {str(error).splitlines()[0]}") from error
    labels, names = torch.tensor(found.targets, dtype=torch.int64), tuple(found.classes)
    return FolderSet(tuple(file for file, _ in found.samples), labels, len(names), sides, names, str(path))


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
        "resize": list(_before_crop(dataset.size)),
        "interpolation": "bilinear",
        "crop": list(dataset.size),
        "range": [0.0, 1.0],
        "mean": list(_MEAN),
        "std": list(_STD),
        "classes": list(dataset.names),
    }


class FolderLoader:
    """Batches of image files; `train` crops and flips at random, shuffles, and drops an incomplete last batch.

    An image that cannot be decoded stops the pass (corrupt="stop"), or the next one in the order of the epoch that can
    takes its place ("skip"), and its path is in `skipped`. A file that the system does not hand out always stops.
    """

    def __init__(
        self,
        dataset: FolderSet,
        batch_size: int,
        train: bool,
        seed: int = 0,
        device: torch.device | str = "cpu",
        channels_last: bool = False,
        workers: int | None = None,  # processes that decode; None: as many as there are cores, at most 8
        ranks: Ranks = ALONE,  # who share each batch
        corrupt: str = "stop",
    ) -> None:
        check_size(batch_size, len(dataset), train, ranks)
        if corrupt not in ("stop", "skip"):
            raise DataError(f"corrupt must be stop or skip, not {corrupt!r}.")
        self.dataset = dataset
        self.batch_size = batch_size
        self.device = torch.device(device)
        self.channels_last = channels_last
        self.skipped: set[str] = set()
        self.passes = 0  # begun so far
        self.keys = _Keys(len(dataset), batch_size, train, seed, ranks)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = min(8, cores) if workers is None else workers
        self.files: DataLoader[_Batch] = DataLoader(
            _Files(dataset, train, seed, corrupt == "skip"),
            sampler=self.keys,
            batch_size=None,  # a key stands for a whole batch
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
        return self.starting_at(0)

    def starting_at(self, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches of this epoch from number `skip` on; the files of those before are not read."""
        layout = torch.channels_last if self.channels_last else torch.contiguous_format
        self.passes += 1
        own = self.passes
        batches: Iterator[_Batch] | None = None
        for number in range(skip, len(self)):
            if own != self.passes:  # the workers serve the last one only
                raise DataError("Another pass over this loader began before this one ended: make a second loader.")
            batches, batch = self._read(batches, number)
            self.skipped.update(batch.unreadable)
            if batch.failure:
                raise DataError(batch.failure)
            moved = batch.images.to(self.device, non_blocking=True, memory_format=layout)
            yield moved, batch.labels.to(self.device, non_blocking=True)

    def _read(
        self, batches: Iterator[_Batch] | None, number: int, again: bool = False
    ) -> tuple[Iterator[_Batch], _Batch]:
        """A batch, and where the next one comes from."""
        try:
            batches = self._start(number) if batches is None else batches
            return batches, next(batches)
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker (pid"):
                raise
            if again or not _were_stopped(batches):
                raise DataError(self._explain_death(number)) from error
        self.files._iterator = None  # with new workers: the step that waits for this batch is finished and saved first
        return self._read(None, number, again=True)

    def _start(self, skip: int) -> Iterator[_Batch]:
        self.keys.skip = skip
        batches = iter(self.files)
        # torch reports a dead worker from a signal handler too, that is anywhere in the program, such as in the midst
        # of writing a file; without this it does so only where its batch is waited for, after some seconds
        if getattr(batches, "_worker_pids_set", False):
            torch._C._remove_worker_pids(id(batches))
            batches._worker_pids_set = False  # type: ignore[attr-defined]
        return batches

    def _explain_death(self, number: int) -> str:
        epoch, start, stop = self.keys.key(number)
        order = _draw_order(self.keys.count, self.keys.train, self.keys.seed, epoch)
        ends = [self.dataset.paths[int(order[place])] for place in (start, stop - 1) if start < stop]
        workers = self.files.num_workers
        return (
            f"One of {workers} workers has died while {' to '.join(ends) or 'no file'} was awaited, most likely for "
            f"lack of memory or shared memory (/dev/shm): try workers={workers // 2} or a smaller batch."
        )


def _were_stopped(batches: Iterator[_Batch] | None) -> bool:
    """Whether the workers that are gone were asked to go, by a signal that was meant for the whole command.

    SIGTERM may be sent to all processes, as by Slurm, and Ctrl-C is; torch makes the latter a quiet end.
    """
    codes = {worker.exitcode for worker in getattr(batches, "_workers", ())} - {None}
    return bool(codes) and codes <= {0, -signal.SIGTERM, -signal.SIGINT}


class _Batch(NamedTuple):
    """What a worker hands over; not as an exception, since torch would make a page of its one sentence."""

    images: Tensor  # (B, 3, height, width)
    labels: Tensor  # (B,)
    unreadable: list[str]  # paths of the images that were replaced
    failure: str  # why there is no batch


class _Keys(Sampler[tuple[int, int, int]]):
    """Batches as (epoch, first, end) in the order of the epoch: workers live on and learn the epoch with each batch."""

    def __init__(self, count: int, batch_size: int, train: bool, seed: int, ranks: Ranks) -> None:
        self.count, self.batch_size, self.train, self.seed, self.ranks = count, batch_size, train, seed, ranks
        self.epoch = 0
        self.skip = 0  # batches left out at the start

    def __len__(self) -> int:
        return self.count // self.batch_size if self.train else -(-self.count // self.batch_size)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        return iter([self.key(number) for number in range(self.skip, len(self))])

    def key(self, number: int) -> tuple[int, int, int]:
        """What this rank reads of one batch of this epoch."""
        share = share_of(number, self.batch_size, self.count, self.ranks)
        return self.epoch, share.start, share.stop


class _Files(Dataset[_Batch]):
    """Batches of files, decoded and transformed; their random numbers are a function of (seed, epoch, index)."""

    def __init__(self, dataset: FolderSet, train: bool, seed: int, skip: bool) -> None:
        self.dataset, self.train, self.seed, self.skip = dataset, train, seed, skip
        self.labels = dataset.labels.tolist()
        self.transform = _transform(dataset.size, train)
        self.epoch = -1  # of the order, which is drawn once
        self.order = torch.empty(0, dtype=torch.int64)

    def __getitem__(self, key: tuple[int, int, int]) -> _Batch:
        epoch, start, stop = key
        if epoch != self.epoch:
            self.epoch, self.order = epoch, _draw_order(len(self.dataset), self.train, self.seed, epoch)
        unreadable: list[str] = []
        # a rank may have no share of the last batch
        images, labels = torch.empty(0, *self.dataset.shape), torch.empty(0, dtype=torch.int64)
        try:
            if samples := [self._sample(place, unreadable) for place in range(start, stop)]:
                images, labels = default_collate(samples)
        except DataError as error:
            return _Batch(images, labels, unreadable, str(error))
        return _Batch(images, labels, unreadable, "")

    def _sample(self, place: int, unreadable: list[str]) -> tuple[Tensor, int]:
        """The image at a place in the order of the epoch, or, if wanted, the next one there that can be read."""
        tries = min(len(self.order), _TRIES)
        for step in range(tries):
            index = int(self.order[(place + step) % len(self.order)])
            path = self.dataset.paths[index]
            try:
                image = _decode(path, self.dataset.root)
            except _CorruptError:
                if not self.skip:
                    raise
                unreadable.append(path)
                continue
            with torch.random.fork_rng(devices=[]):  # torchvision draws from the global generator
                # seeded for the place, since the image that replaces another has a place of its own too
                torch.manual_seed(mix(self.seed, self.epoch, int(self.order[place])))
                return self.transform(image), self.labels[index]
        raise DataError(
            f"{tries} images in a row cannot be read, the last is {path}: repair or remove them."
            f"{finds_all(self.dataset.root)}"
        )


class _CorruptError(DataError):
    """A file that can be opened, but not decoded."""


def open_image(path: str) -> Image:
    """A file as PIL opens it, its pixels not read yet."""
    check_file(path)
    return PIL.Image.open(path)


def check_file(path: str) -> None:
    """ValueError for what is named like an image but is no file, also behind a link: a pipe would be waited for."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("it is no file, but a pipe, a device or a socket")


def as_rgb(image: Image) -> Image:
    """Any image with three channels of 8 bits; of 16 bits the upper 8 are kept, as PIL does in colour.

    With 16 bits of grey PIL itself would take 255 of 65535 for white, and so nearly all pixels.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PPM", "PNG")):
        image = PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(
            "its pixels are 32-bit numbers, and which one is white is not known: save it with 8 or 16 bits"
        )
    return image.convert("RGB")


def _decode(path: str, root: str) -> Image:
    try:
        with open_image(path) as image:
            return as_rgb(image)
    except Exception as error:  # PIL raises many kinds for a broken file
        if refused(error):
            raise DataError(f"{path} cannot be opened ({error}): check the disk, its rights and the memory.") from error
        raise _CorruptError(
            f"{path} cannot be read as an image ({error}): repair or remove it, or skip such files with --corrupt skip "
            f"(in Python corrupt='skip').{finds_all(root)}"
        ) from error


def refused(error: Exception) -> bool:
    """Whether it was the system that did not hand out a file, which says nothing about the image."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None)


def finds_all(root: str) -> str:
    """A sentence about how to find all broken files of a folder."""
    return f" dmcp data {shlex.quote(root)} finds all broken files at once." if root else ""


def _draw_order(count: int, train: bool, seed: int, epoch: int) -> Tensor:
    """Which file comes when."""
    return torch.randperm(count, generator=generator(seed, epoch)) if train else torch.arange(count)


def _transform(size: tuple[int, int], train: bool) -> Callable[[Any], Tensor]:
    """What is done to an image; size: height and width that the model gets."""
    from torchvision.transforms import v2  # late: see cifar_nets.mobilenet_v2

    aspect = size[1] / size[0]
    ratio = (3 / 4 * aspect, 4 / 3 * aspect)  # of what is cut out, so that squares and others are bent alike
    crop = (
        [v2.RandomResizedCrop(size, ratio=ratio, antialias=True), v2.RandomHorizontalFlip()]
        if train
        else [partial(_cover, size=_before_crop(size)), v2.CenterCrop(size)]
    )
    last = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(_MEAN, _STD), v2.ToPureTensor()]
    return v2.Compose([*crop, *last])  # type: ignore[no-any-return]


def _before_crop(size: tuple[int, int]) -> tuple[int, int]:
    """Height and width that a test image covers before it is cropped."""
    return round(size[0] / _KEPT), round(size[1] / _KEPT)


def _cover(image: Image, size: tuple[int, int]) -> Image:
    """Scale an image, bent in no direction, so that it just covers a height and a width."""
    height, width = size
    if width * image.height >= height * image.width:  # its width is what must be met
        height = int(width * image.height / image.width)
    else:
        width = int(height * image.width / image.height)
    from torchvision.transforms import v2

    return v2.functional.resize(image, [height, width], antialias=True)  # type: ignore[no-any-return]
