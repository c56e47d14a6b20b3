"""What a data set holds, and which of its image files are broken."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import PIL.Image

from dmcp.batches import usual_workers
from dmcp.data.datasets import ArraySet, DataSet, DataSets, FolderSet, as_rgb, check_file, empty_classes, is_refused
from dmcp.runtime.io import quote

_THREADS = 8  # at most
_PENDING = 8192  # files that wait for a thread


class Broken(NamedTuple):
    """A file that cannot be read as an image."""

    file: str
    reason: str
    refused: bool = False  # by the system, not by PIL: corrupt="skip" does not skip it


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What was found in a data set."""

    classes: int
    smallest_class: tuple[str, int]  # name and training images
    largest_class: tuple[str, int]
    train: int  # images, broken ones included
    test: int
    train_from: str  # where they are, in words
    test_from: str
    sizes: tuple[tuple[int, int], ...]  # height and width: smallest, median and largest by area; none if all are broken
    modes: dict[str, int]  # PIL's name for how pixels are stored, or channels of arrays -> images, most first
    is_files: bool
    enlarged: int | None = None  # images smaller than what the network gets; None for arrays
    broken: tuple[Broken, ...] = ()
    in_both: tuple[tuple[str, str], ...] = ()  # test image, and a training image with the same bytes
    empty_classes: tuple[str, ...] = ()
    lone_classes: tuple[str, ...] = ()  # that are in one of train/ and val/ only

    @property
    def wrong_classes(self) -> bool:
        """True if other commands would refuse the classes; those of arrays may be empty."""
        return self.is_files and (bool(self.empty_classes or self.lone_classes) or self.classes < 2)

    @property
    def is_well(self) -> bool:
        """True if other commands can read everything."""
        return not self.broken and not self.wrong_classes


def check_data(
    data: DataSets, workers: int | None = None, on_file: Callable[[int, int], None] = lambda done, count: None
) -> DataFacts:
    """Look at all images of a data set, opened with strict=False; every file is decoded.

    workers: threads that decode; by default as many as there are cores, at most 8.
    on_file: called after each file with (files done, all files).
    """
    train, test = data.train, data.test
    names = train.names if isinstance(train, FolderSet) else tuple(map(str, range(data.classes)))
    counts = Counter(train.labels.tolist())
    ordered = sorted(range(len(names)), key=lambda number: counts[number])
    smallest, largest = ((names[number], counts[number]) for number in (ordered[0], ordered[-1]))
    looked = [*_look_at_all(train, test, workers, on_file)]
    sound = [one for one in looked if one.failure is None]
    sizes = sorted((one.size for one in sound), key=lambda size: (size[0] * size[1], size))
    first: dict[bytes, str] = {}
    for one in looked[: len(train)]:
        first.setdefault(one.digest, one.name)
    tested = [one for one in looked[len(train) :] if one.failure is None]
    more: dict[str, Any] = {"empty_classes": tuple(name for number, name in enumerate(names) if not counts[number])}
    if isinstance(train, FolderSet) and isinstance(test, FolderSet):
        parts = [(os.path.join(train.root, "train"), train, test), (os.path.join(train.root, "val"), test, train)]
        more = {
            "enlarged": sum(height < train.size[0] or width < train.size[1] for height, width in sizes),
            "empty_classes": tuple(os.path.join(at, name) for at, own, _ in parts for name in empty_classes(own)),
            "lone_classes": tuple(
                os.path.join(at, name) for at, own, other in parts for name in own.names if name not in other.names
            ),
        }
    return DataFacts(
        classes=len(names),
        smallest_class=smallest,
        largest_class=largest,
        train=len(train),
        test=len(test),
        train_from=data.sources[0],
        test_from=data.sources[1],
        sizes=(sizes[0], sizes[(len(sizes) - 1) // 2], sizes[-1]) if sizes else (),
        modes=dict(Counter(one.mode for one in sound).most_common()),
        is_files=isinstance(train, FolderSet),
        broken=tuple(one.failure for one in looked if one.failure),
        in_both=tuple((one.name, first[one.digest]) for one in tested if one.digest in first),
        **more,
    )


def no_images(dataset: FolderSet) -> list[Broken]:
    """Files whose first bytes are not those of an image, such as empty ones; what is cut off later is not found."""
    looked = _in_threads(partial(_look, whole=False), dataset.paths, _THREADS)
    return [one.failure for one in looked if one.failure]


class _Looked(NamedTuple):
    """One image."""

    name: str
    size: tuple[int, int] = (0, 0)
    mode: str = ""
    digest: bytes = b""
    failure: Broken | None = None


def _look_at_all(
    train: DataSet, test: DataSet, workers: int | None, on_file: Callable[[int, int], None]
) -> Iterator[_Looked]:
    for word, part in (("training", train), ("test", test)):
        if isinstance(part, ArraySet):
            channels, height, width = part.shape
            mode = f"{channels} channel{'s' * (channels > 1)}"
            for place, image in enumerate(part.images.numpy()):
                yield _Looked(f"{word} image {place}", (height, width), mode, hashlib.sha256(image).digest())
    if isinstance(train, FolderSet) and isinstance(test, FolderSet):
        paths = train.paths + test.paths
        for done, one in enumerate(_in_threads(_look, paths, usual_workers() if workers is None else workers), 1):
            on_file(done, len(paths))
            yield one


def _look(path: str, whole: bool = True) -> _Looked:
    """Hash a file and decode it just as a loader does, or (not whole) look at its first bytes alone."""
    try:
        check_file(path)
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest() if whole else b""
            file.seek(0)
            with PIL.Image.open(file) as image:
                size, mode = (image.height, image.width), image.mode
                if whole:
                    as_rgb(image)
    except Exception as error:  # PIL raises many kinds for a broken file
        return _Looked(path, failure=_broken(path, error))
    return _Looked(path, size, mode, digest)


def _broken(path: str, error: Exception) -> Broken:
    if is_refused(error):
        return Broken(path, getattr(error, "strerror", None) or "out of memory", refused=True)
    if isinstance(error, PIL.UnidentifiedImageError):  # its own message names an object of Python
        return Broken(path, "it is no image that PIL knows" if os.path.getsize(path) else "the file is empty")
    return Broken(path, " ".join(quote(error).split()) or type(error).__name__)


def _in_threads(work: Callable[[str], _Looked], paths: Sequence[str], workers: int) -> Iterator[_Looked]:
    """The results for all paths, in order; most of the work is done while Python's lock is released."""
    PIL.Image.init()  # else threads that meet a rare file format at the same time do not all know it
    with ThreadPoolExecutor(max(1, workers)) as pool:
        for start in range(0, len(paths), _PENDING):
            yield from pool.map(work, paths[start : start + _PENDING])
