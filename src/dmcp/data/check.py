"""What a data set holds, and which of its image files are broken."""

from __future__ import annotations

import hashlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import PIL.Image

from dmcp.cli.job import sized
from dmcp.data.datasets import (
    NAMES,
    ArraySet,
    DataSets,
    FolderSet,
    as_rgb,
    check_file,
    empty_classes,
    load,
    open_image,
    refused,
)

_THREADS = 8  # that read first bytes where a disk is waited for; elsewhere they would only wait for each other
_TRIED, _WAITED = 100, 0.001  # files that are tried, and the seconds of each from which on it is such a disk
_BUNDLE = 32  # files that a thread takes at a time: one alone would take less time than its turn
_AT_ONCE = 256  # bundles that wait for a thread, since each costs memory
_T = TypeVar("_T")


class Broken(NamedTuple):
    """A file that cannot be read as an image."""

    file: str
    reason: str
    refused: bool = False  # by the system, which says nothing about the image: --corrupt skip does not pass over it


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """What was found in data."""

    classes: int
    smallest_class: tuple[str, int]  # name, and how many training images it has
    largest_class: tuple[str, int]
    train: int  # images, broken ones too
    test: int
    train_from: str  # where they are, in words
    test_from: str
    sizes: tuple[tuple[int, int], ...]  # height and width: the smallest, the median, the largest, by area; or none
    modes: dict[str, int]  # how pixels are stored, as PIL calls it, and how many images have it, most first
    is_files: bool  # whether the images are files
    enlarged: int | None = None  # images that are smaller than what was asked for; None: nothing was
    broken: tuple[Broken, ...] = ()
    in_both: tuple[tuple[str, str], ...] = ()  # test image, and a training image with the same bytes
    empty_classes: tuple[str, ...] = ()
    lone_classes: tuple[str, ...] = ()  # which are in one of train/ and val/ only

    @property
    def wrong_classes(self) -> bool:
        """Whether other commands would refuse the classes; those of arrays may be empty."""
        return self.is_files and (bool(self.empty_classes or self.lone_classes) or self.classes < 2)

    @property
    def is_well(self) -> bool:
        """Whether other commands can read all of it."""
        return not self.broken and not self.wrong_classes


def check_data(
    name: str | Path,
    root: str | Path = "data",
    input: str = "",
    workers: int | None = None,
    tell: Callable[[int, int], None] | None = None,
) -> DataFacts:
    """Look at all images of data, as `load` finds them; every file is decoded.

    input: the size that networks would get, like 3x224x224, to count what must be enlarged.
    workers: threads that decode; as many as there are cores, at most 8, unless given.
    tell: is called after each file, with how many are done and how many there are.
    """
    data = load(name, root, strict=False)
    data = sized(data, str(name), input) if input else data
    train, test = data.train, data.test
    if isinstance(train, FolderSet) and isinstance(test, FolderSet):
        return _check_files(train, test, bool(input), workers, tell)
    assert isinstance(train, ArraySet) and isinstance(test, ArraySet)
    return _check_arrays(data, train, test, *_sources(str(name), Path(root)))


def no_images(dataset: FolderSet) -> list[Broken]:
    """Files whose first bytes are not those of an image, such as empty ones; what is cut off later is not found."""
    first, rest = dataset.paths[:_TRIED], dataset.paths[_TRIED:]
    start = time.perf_counter()
    found = [*_in_threads(_read_head, first, 1)]
    slow = time.perf_counter() - start > _WAITED * len(first)
    found += _in_threads(_read_head, rest, _THREADS if slow else 1)
    return [one for one in found if one]


# files


class _Looked(NamedTuple):
    """One file."""

    size: tuple[int, int]
    mode: str
    digest: bytes
    failure: Broken | None = None


def _check_files(
    train: FolderSet, test: FolderSet, compare: bool, workers: int | None, tell: Callable[[int, int], None] | None
) -> DataFacts:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    paths, looked = train.paths + test.paths, list[_Looked]()
    for one in _in_threads(_look, paths, min(8, cores) if workers is None else workers):
        looked.append(one)
        if tell:
            tell(len(looked), len(paths))
    sound = [one for one in looked if not one.failure]
    places = [Path(part.root) / name for part, name in ((train, "train"), (test, "val"))]
    empty = [
        str(place / name) for part, place in zip((train, test), places, strict=True) for name in empty_classes(part)
    ]
    lone = [
        str(place / name)
        for part, other, place in ((train, test, places[0]), (test, train, places[1]))
        for name in part.names
        if name not in other.names
    ]
    smallest, largest = _extremes(train.labels.tolist(), train.names)
    sizes = Counter(one.size for one in sound)
    smaller = sum(count for size, count in sizes.items() if size[0] < train.size[0] or size[1] < train.size[1])
    digests = [(path, one.digest) for path, one in zip(paths, looked, strict=True) if not one.failure]
    known = sum(not one.failure for one in looked[: len(train)])
    return DataFacts(
        classes=len(train.names),
        smallest_class=smallest,
        largest_class=largest,
        train=len(train),
        test=len(test),
        train_from=str(places[0]),
        test_from=str(places[1]),
        sizes=_three(sizes),
        modes=dict(Counter(one.mode for one in sound).most_common()),
        is_files=True,
        enlarged=smaller if compare else None,
        broken=tuple(one.failure for one in looked if one.failure),
        in_both=_in_both(digests[:known], digests[known:]),
        empty_classes=tuple(empty),
        lone_classes=tuple(lone),
    )


def _look(path: str) -> _Looked:
    """Decode a file just as a loader does, and hash its bytes."""
    try:
        check_file(path)
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").digest()
            file.seek(0)
            with PIL.Image.open(file) as image:
                size, mode = (image.height, image.width), image.mode
                as_rgb(image)
    except Exception as error:  # PIL raises many kinds for a broken file
        return _Looked((0, 0), "", b"", _broken(path, error))
    return _Looked(size, mode, digest)


def _read_head(path: str) -> Broken | None:
    """Why a file cannot be an image; None if it may be one."""
    try:
        with open_image(path):
            return None
    except Exception as error:  # PIL raises many kinds for a broken file
        return _broken(path, error)


def _broken(path: str, error: Exception) -> Broken:
    if refused(error):
        return Broken(path, getattr(error, "strerror", None) or "out of memory", refused=True)
    if isinstance(error, PIL.UnidentifiedImageError):  # its own words name an object of Python
        return Broken(path, "it is no image that PIL knows" if os.path.getsize(path) else "the file is empty")
    return Broken(path, " ".join(str(error).split()) or type(error).__name__)


def _in_threads(work: Callable[[str], _T], paths: Sequence[str], workers: int) -> Iterator[_T]:
    """What the work gives for each path, in their order; most of it is done where Python lets others run."""
    PIL.Image.init()  # else threads that meet a rare kind of file at the same time do not all know it
    if workers < 2:
        yield from map(work, paths)
        return
    bundles = [paths[start : start + _BUNDLE] for start in range(0, len(paths), _BUNDLE)]
    with ThreadPoolExecutor(workers) as pool:
        for start in range(0, len(bundles), _AT_ONCE):
            for done in pool.map(lambda bundle: [work(path) for path in bundle], bundles[start : start + _AT_ONCE]):
                yield from done


# arrays


def _check_arrays(data: DataSets, train: ArraySet, test: ArraySet, train_from: str, test_from: str) -> DataFacts:
    channels, height, width = data.shape
    names = tuple(map(str, range(data.classes)))
    count, labels = len(train) + len(test), train.labels.tolist()
    smallest, largest = _extremes(labels, names)
    digests = [
        [(f"{word} image {place}", hashlib.sha256(image).digest()) for place, image in enumerate(part.images.numpy())]
        for word, part in (("training", train), ("test", test))
    ]
    return DataFacts(
        classes=data.classes,
        smallest_class=smallest,
        largest_class=largest,
        train=len(train),
        test=len(test),
        train_from=train_from,
        test_from=test_from,
        sizes=((height, width),) * 3,
        modes={f"{channels} channel{'s' if channels > 1 else ''}": count},
        is_files=False,
        in_both=_in_both(*digests),
        empty_classes=tuple(name for number, name in enumerate(names) if number not in {*labels}),
    )


def _sources(name: str, root: Path) -> tuple[str, str]:
    """Where training and test images of arrays are."""
    if name == "digits":
        return "the package's, of all writers but three", "the package's, of the last three writers"
    folder = root / name if name in NAMES else Path(name)
    if name in NAMES and not list(folder.glob("train-*.npz")):
        return f"{root}, as torchvision keeps them", f"{root}, as torchvision keeps them"
    return str(folder / "train-*.npz"), str(folder / "test-*.npz")


# both


def _extremes(labels: Iterable[int], names: Sequence[str]) -> tuple[tuple[str, int], tuple[str, int]]:
    """The class with the fewest images and that with the most, with how many; of equals the first and the last."""
    counts = Counter(labels)
    ordered = sorted(range(len(names)), key=lambda number: counts[number])
    smallest, largest = ordered[0], ordered[-1]
    return (names[smallest], counts[smallest]), (names[largest], counts[largest])


def _three(sizes: Counter[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The smallest, the median and the largest, by area."""
    ordered = sorted(sizes.elements(), key=lambda size: (size[0] * size[1], size))
    return (ordered[0], ordered[(len(ordered) - 1) // 2], ordered[-1]) if ordered else ()


def _in_both(train: Iterable[tuple[str, bytes]], test: Iterable[tuple[str, bytes]]) -> tuple[tuple[str, str], ...]:
    """Test images with the first training image of the same bytes."""
    first: dict[bytes, str] = {}
    for name, digest in train:
        first.setdefault(digest, name)
    return tuple((name, first[digest]) for name, digest in test if digest in first)
