"""Data sets by name or path: digits, CIFAR, shards and folders of image files."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dmcp.data.folders import PARTS, SPLIT, FolderSet, list_part, other_files, split_files, wrong_classes
from dmcp.data.images import SCALES, Broken, Size, before_crop, inspect_files
from dmcp.data.tables import read_table
from dmcp.errors import DataError, FileError
from dmcp.runtime.batches import core_count, generator
from dmcp.runtime.io import check_inflated, plain_file_size, quote, zip_sizes
from dmcp.units import counted

BUILT_IN = ("digits", "cifar10", "cifar100")
_DIGITS_TEST = 382  # images of the last three writers
_MAX_CLASSES = 2**24
_Arrays = tuple[np.ndarray, np.ndarray]  # images (N, H, W, C) uint8, labels (N,) int64


@dataclass(frozen=True)
class Augmentation:
    """What is done to a training image, drawn anew in every epoch."""

    shift: int = 0  # pixels by which the image may move, in both directions
    flip: bool = False  # left and right may be swapped
    reflect: bool = False  # what moves in is the mirrored border, not black


@dataclass(frozen=True, eq=False)
class ArraySet:
    """Images and labels that fit into memory."""

    images: Tensor  # (N, H, W, C) uint8
    labels: Tensor  # (N,) int64
    classes: int
    mean: tuple[float, ...]  # per channel, of the training images
    std: tuple[float, ...]
    augmentation: Augmentation = Augmentation()

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one image as the model gets it: channels, height, width."""
        height, width, channels = self.images.shape[1:]
        return channels, height, width

    def subset(self, indices: Tensor) -> ArraySet:
        """Take the images at these indices."""
        return replace(self, images=self.images[indices], labels=self.labels[indices])


DataSet = ArraySet | FolderSet


@dataclass(frozen=True, eq=False)
class DataSets:
    """What a model is trained on, and what it is tested on at the very end."""

    train: DataSet
    test: DataSet
    classes: int
    shape: tuple[int, ...]  # of one image: channels, height, width
    sources: tuple[str, str] = ("", "")  # where training and test images come from, in words
    note: str = ""  # a sentence about a split that was made here


# opening a data set


def load(
    name: str | Path,
    root: str | Path = "data",
    size: int | tuple[int, int] = 224,
    download: bool = False,
    strict: bool = True,
) -> DataSets:
    """Open a data set: `digits`, `cifar10`, `cifar100`, a folder, or a table of image files.

    A folder holds `train-*.npz` and `test-*.npz` with `images` (N, H, W, C) uint8 and `labels` (N,), or `train/` and
    `val/` with one folder of image files per class, or only folders of classes, which are split with a fixed seed. A
    table is a .csv file with columns `image`, `label` and perhaps `split` (train or val).

    Image files are cropped to `size`: the side of a square, or height and width. The CIFAR sets are shards in the
    folder of their name in `root`, or what torchvision keeps in `root` and fetches with `download`. With strict=False,
    classes of image files may be empty, or in only one of `train/` and `val/`.
    """
    if str(name) == "digits":
        return _digits()

    if str(name) in BUILT_IN:
        folder = Path(root) / name
        if list(folder.glob("train-*.npz")):
            return _shards(folder)
        return _cifar(str(name), Path(root), download)

    path = Path(name)
    sides = size if isinstance(size, tuple) else (size, size)
    if path.suffix.lower() == ".csv" and path.exists():
        return _table(path, sides)
    if not path.exists():
        neighbors = [str(neighbor) for neighbor in path.parent.glob("*") if neighbor.is_dir()]
        near = difflib.get_close_matches(str(name).lower(), [*BUILT_IN, *neighbors], n=1)
        hint = ""
        if near:
            hint = f" Did you mean {near[0]}?"
        raise DataError(
            f"{str(name)!r} is not a folder, a .csv file or a built-in data set ({', '.join(BUILT_IN)}).{hint}"
        )
    if list(path.glob("*.npz")):
        return _shards(path)
    return _folder(path, sides, strict)


def _folder(path: Path, size: Size, strict: bool) -> DataSets:
    """A folder with `train/` and `val/`, or with classes alone, which are split.

    If strict, both parts must have the same classes, none of them empty.
    """
    is_split = any((path / part).is_dir() for part in PARTS)
    note = ""
    if is_split:
        train, test = (list_part(path, part, size) for part in PARTS)
    else:
        files = list_part(path, "", size)
        train, test = split_files(files)
        note = f"{path} has no train/ and val/: its {counted(len(files), 'image')} are {SPLIT}."
    if strict:
        folders = wrong_classes(train, test)
        if folders:
            needs = "images in train/ and val/"
            if not is_split:
                needs = "at least two images, one for training and one for the test"
            raise DataError(f"{path}: each class needs {needs}. Too few are in {', '.join(folders[:3])}.")
        if train.classes < 2:
            raise DataError(f"{path}: at least two classes are needed.")
    sources = (str(path / PARTS[0]), str(path / PARTS[1]))
    if not is_split:
        sources = (str(path), f"{path}, {SPLIT}")
    return DataSets(train, test, train.classes, train.shape, sources, note)


def _table(path: Path, size: Size) -> DataSets:
    """The image files that a table lists; without a column `split` they are split here."""
    parts = read_table(path, size)
    if len(parts) == 1:
        train, test = split_files(parts[0])
        note = f"{path} has no column split: its {counted(len(parts[0]), 'image')} are {SPLIT}."
        return DataSets(train, test, train.classes, train.shape, (str(path), f"{path}, {SPLIT}"), note)
    train, test = parts
    return DataSets(train, test, train.classes, train.shape, (str(path), str(path)))


def _digits() -> DataSets:
    """Optical Recognition of Handwritten Digits (E. Alpaydin, C. Kaynak), from the UCI repository, CC BY 4.0."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        images = file["images"][..., None]
        labels = file["labels"].astype(np.int64)
    first_test = len(labels) - _DIGITS_TEST
    train = (images[:first_test], labels[:first_test])
    test = (images[first_test:], labels[first_test:])
    sources = ("the package, written by all but three writers", "the package, written by the last three writers")
    return _from_arrays(train, test, Augmentation(shift=1), sources)


def _cifar(name: str, root: Path, download: bool) -> DataSets:
    """CIFAR as torchvision keeps it."""
    import torchvision

    dataset_class = {"cifar10": torchvision.datasets.CIFAR10, "cifar100": torchvision.datasets.CIFAR100}[name]
    try:
        parts = [dataset_class(str(root), train=train, download=download) for train in (True, False)]
    except Exception as error:
        fetch = f"from dmcp.data.datasets import load; load({name!r}, root={str(root)!r}, download=True)"
        where = f"{name} is not in {root}, neither as shards nor as torchvision keeps it ({error})"
        raise DataError(f"{where}: put it there, or download it once with Python: {fetch}") from error
    train, test = ((part.data, np.asarray(part.targets)) for part in parts)
    source = f"{root}, as torchvision keeps them"
    return _from_arrays(train, test, Augmentation(shift=4, flip=True, reflect=True), (source, source))


def _shards(folder: Path) -> DataSets:
    """Shards of arrays in a folder."""
    train = _read_shards(folder, "train")
    test = _read_shards(folder, "test")
    sources = (str(folder / "train-*.npz"), str(folder / "test-*.npz"))
    return _from_arrays(train, test, Augmentation(shift=4, flip=True, reflect=True), sources)


def _read_shards(folder: Path, part: str) -> _Arrays:
    """Read all shards of one part, in the order of their numbers."""
    paths = sorted(folder.glob(f"{part}-*.npz"), key=lambda path: (len(path.name), path.name))
    if not paths:
        raise DataError(f"{folder} has no {part}-*.npz.")
    _check_sizes(paths, folder / f"{part}-*.npz")

    all_images: list[np.ndarray] = []
    all_labels: list[np.ndarray] = []
    for path in paths:
        try:
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                images = file["images"]
                labels = file["labels"]
        except Exception as error:  # zipfile and numpy raise many kinds for a broken file
            raise DataError(f"{path} cannot be read as a shard with images and labels: {quote(error)}") from error
        all_images.append(images)
        are_images = images.dtype == np.uint8 and images.ndim == 4 and images.shape[1:] == all_images[0].shape[1:]
        are_labels = labels.shape == images.shape[:1] and labels.dtype.kind in "iu"
        if not are_images or not are_labels:
            raise DataError(f"{path}: images must be (N, H, W, C) uint8, all of one shape, and labels (N,) integers.")
        all_labels.append(labels.astype(np.int64))
    return np.concatenate(all_images), np.concatenate(all_labels)


def _check_sizes(paths: Sequence[Path], name: Path) -> None:
    """Refuse shards that do not fit into the free memory, or that a few bytes inflate to. Only sizes are read."""
    total_stored = 0
    total_inflated = 0
    try:
        for path in paths:
            stored, inflated = zip_sizes(path, ("images.npy", "labels.npy"))
            if not zipfile.is_zipfile(path):
                raise ValueError("it is not an npz file")
            check_inflated(path, stored, inflated)
            total_stored += stored
            total_inflated += inflated
        check_inflated(name, total_stored, total_inflated)
    except FileError as error:
        raise DataError(str(error)) from error
    except Exception as error:  # zipfile raises many kinds for a broken file
        raise DataError(f"{path} cannot be read as a shard with images and labels: {quote(error)}") from error


def _from_arrays(train: _Arrays, test: _Arrays, augmentation: Augmentation, sources: tuple[str, str]) -> DataSets:
    """Check two parts, and normalize both by the training images."""
    train_images, train_labels = train
    shape = train_images.shape[1:]
    last_class = train_labels.max(initial=0)
    for source, (images, labels) in zip(sources, (train, test), strict=True):
        if not images.size or images.shape[1:] != shape:
            raise DataError(f"{source}: there are no images, or they are not {shape} like the training images.")
        if labels.min() < 0 or labels.max() > last_class or not 0 < last_class < _MAX_CLASSES:
            raise DataError(f"{source}: labels must number two or more classes from 0, in the same way in both parts.")

    # Mean and deviation come from histograms: exact, and without a copy in floats.
    values = np.arange(256)
    means: list[float] = []
    deviations: list[float] = []
    for channel in range(shape[-1]):
        counts = np.bincount(train_images[..., channel].ravel(), minlength=256)
        mean = (counts * values).sum() / counts.sum()
        variance = (counts * (values - mean) ** 2).sum() / counts.sum()
        means.append(float(mean))
        deviations.append(float(variance**0.5) or 1.0)  # a channel of one value stays what it is

    classes = int(last_class) + 1
    train_set, test_set = (
        ArraySet(
            torch.from_numpy(images), torch.from_numpy(labels), classes, tuple(means), tuple(deviations), augmentation
        )
        for images, labels in (train, test)
    )
    return DataSets(train_set, test_set, classes, train_set.shape, sources)


# facts about a data set


def preprocessing(data: DataSets) -> dict[str, Any]:
    """Describe in plain data what is done to a test image before the network gets it, for whoever uses the network.

    An image is scaled, with its aspect ratio, to just cover `resize` (height, width), and its middle `crop` is kept;
    None: its size stays. Then 0..255 becomes `range`, `mean` is subtracted, and the rest is divided by `std`, channel
    by channel. `shape` is (channels, height, width); `classes` are the names of the outputs, if they have names.
    """
    test = data.test
    if isinstance(test, FolderSet):
        mean, std = SCALES[test.channels]
        return {
            "shape": list(data.shape),
            "channels": {3: "RGB", 1: "L"}[data.shape[0]],
            "resize": list(before_crop(test.size)),
            "interpolation": "bilinear",
            "crop": list(test.size),
            "range": [0.0, 1.0],
            "mean": list(mean),
            "std": list(std),
            "classes": list(test.names),
        }
    return {
        "shape": list(data.shape),
        "channels": "as stored",
        "resize": None,
        "interpolation": None,
        "crop": None,
        "range": [0.0, 255.0],
        "mean": list(test.mean),
        "std": list(test.std),
        "classes": [],
    }


def check_data(data: DataSets, on_file: Callable[[int], None] = lambda count: None) -> dict[str, Any]:
    """Describe in plain data what is in a data set that was opened with strict=False; every image file is decoded.

    on_file: called with the number of files that have been decoded.
    """
    train = data.train
    test = data.test
    sizes: list[tuple[int, ...]] = [data.shape[1:]]
    enlarged = None  # images that are smaller than the input of the model
    broken: list[Broken] = []
    empty_classes: list[str] = []
    left_out: list[str] = []
    if isinstance(train, FolderSet) and isinstance(test, FolderSet):
        sizes = []
        for count, size in enumerate(inspect_files(train.paths + test.paths, whole=True), 1):
            if isinstance(size, Broken):
                broken.append(size)
            else:
                sizes.append(size)
            on_file(count)
        sizes.sort(key=lambda size: (size[0] * size[1], size))  # by area
        enlarged = sum(height < train.size[0] or width < train.size[1] for height, width in sizes)
        empty_classes = sorted(set(wrong_classes(train, test)))
        left_out = other_files(train, test)

    typical_sizes = {}
    if sizes:
        middle = (len(sizes) - 1) // 2
        typical_sizes = {"smallest": list(sizes[0]), "median": list(sizes[middle]), "largest": list(sizes[-1])}
    return {
        "well": not broken and not empty_classes and data.classes > 1,
        "classes": data.classes,
        "train": {"images": len(train), "from": data.sources[0]},
        "test": {"images": len(test), "from": data.sources[1]},
        "sizes": typical_sizes,  # height and width
        "enlarged": enlarged,
        "broken": [file._asdict() for file in broken],
        "wrong_classes": empty_classes,
        "left_out": left_out,
        "unseen_classes": unseen_classes(train, test),
        "in_both": [{"train": first, "test": second} for first, second in images_in_both(train, test)],
    }


def unseen_classes(train: DataSet, test: DataSet) -> list[str]:
    """Return the classes of test images that no training image has, by name or number."""
    unseen = sorted(set(test.labels.tolist()) - set(train.labels.tolist()))
    if isinstance(test, FolderSet) and test.names:
        return [test.names[label] for label in unseen]
    return [str(label) for label in unseen]


def images_in_both(train: DataSet, test: DataSet) -> list[tuple[str, str]]:
    """Test images that are training images, too, byte by byte: where each is in both sets.

    Scores on such images say nothing. Image files must be the same files; a copy that was saved again is not found.
    """
    if isinstance(train, ArraySet) and isinstance(test, ArraySet):
        numbers = {_hash(image.numpy().tobytes()): number for number, image in enumerate(train.images)}
        pairs = []
        for number, image in enumerate(test.images):
            digest = _hash(image.numpy().tobytes())
            if digest in numbers:
                pairs.append((f"image {numbers[digest]}", f"image {number}"))
        return pairs
    assert isinstance(train, FolderSet) and isinstance(test, FolderSet)
    # Only files of the same size can be the same: most need not be read.
    train_sizes = [_plain_size(path) for path in train.paths]
    test_sizes = [_plain_size(path) for path in test.paths]
    common = (set(train_sizes) & set(test_sizes)) - {0}
    paths: dict[str, str] = {}
    for path, size in zip(train.paths, train_sizes, strict=True):
        if size in common:
            paths.setdefault(_hash(Path(path).read_bytes()), path)
    pairs = []
    for path, size in zip(test.paths, test_sizes, strict=True):
        digest = ""
        if size in common:
            digest = _hash(Path(path).read_bytes())
        if digest in paths:
            pairs.append((paths[digest], path))
    return pairs


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


_DIGESTED = 2**27  # bytes of image files that are read for a digest


def digest_of(dataset: DataSet) -> str:
    """Hash a data set by names, sizes and contents alone, which shows whether images were replaced.

    Arrays are hashed whole. Of image files all names (inside the folder) and sizes are hashed, and the bytes of as
    many files, evenly spread, as make 128 MiB: all of a small folder, about one in a thousand of ImageNet. Neither
    times nor the location of the folder change it.
    """
    digest = hashlib.sha256()
    if isinstance(dataset, ArraySet):
        digest.update(np.ascontiguousarray(dataset.images.numpy()).data)
        digest.update(np.ascontiguousarray(dataset.labels.numpy()).data)
        return digest.hexdigest()[:16]

    with ThreadPool(core_count()) as pool:
        sizes = pool.map(_plain_size, dataset.paths, chunksize=256)
    for path, size in zip(dataset.paths, sizes, strict=True):
        name = path.removeprefix(dataset.root)
        digest.update(os.fsencode(f"{name}\0{size}\0"))

    step = max(1, -(-sum(sizes) // _DIGESTED))
    for path, size in zip(dataset.paths[::step], sizes[::step], strict=True):
        if size:
            with contextlib.suppress(OSError):  # a file that may not be read is reported where it is needed
                digest.update(Path(path).read_bytes())
    return digest.hexdigest()[:16]


def _plain_size(path: str) -> int:
    """Return the bytes of an image file; 0 for what is not a regular file."""
    try:
        return plain_file_size(path)
    except FileError:
        return 0


def split(dataset: DataSet, share: float, seed: int = 0) -> tuple[Any, Any]:
    """Hold out a share of each class, drawn at random: (the rest, the held-out part), without a common image."""
    if not 0 < share < 1:
        raise DataError(f"The held-out share must lie between 0 and 1, not {share}.")
    order = torch.randperm(len(dataset), generator=generator(seed))
    is_held_out = torch.zeros(len(dataset), dtype=torch.bool)
    for label in sorted(set(dataset.labels.tolist())):
        of_label = order[dataset.labels[order] == label]
        is_held_out[of_label[: round(share * len(of_label))]] = True
    if not is_held_out.any() or is_held_out.all():
        raise DataError(f"A share of {share} of {len(dataset)} images leaves one part empty.")
    rest = (~is_held_out).nonzero().flatten()
    held_out = is_held_out.nonzero().flatten()
    return dataset.subset(rest), dataset.subset(held_out)
