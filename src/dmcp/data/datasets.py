"""Data sets by name or path: digits, CIFAR, shards, image folders; what they hold, and which files are broken."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import os
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import torch
from PIL.Image import Image
from torch import Tensor

from dmcp.errors import DataError, FileError
from dmcp.runtime.batches import core_count, generator
from dmcp.runtime.io import check_inflated, plain_file_size, quote, zip_sizes

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, which pre-trained networks expect
SCALES = {3: (MEAN, STD), 1: ((0.458971,), (0.225609,))}  # by channels; of grey: PIL's shares of the colours
_KEPT = 0.875  # share of each side of a test image that the crop keeps
_MAX_RATIO = 200  # of the sides of an image file

# image files


def as_rgb(image: Image) -> Image:
    """Any image as RGB; of 16 bits the upper 8 are kept: of grey levels PIL would take 255 of 65535 for white."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PPM", "PNG")):
        image = PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError("its pixels are 32-bit numbers, of which white is not known: save it with 8 or 16 bits")
    return image.convert("RGB")


def _open(path: str) -> Image:
    if os.path.exists(path) and not os.path.isfile(path):  # a pipe or device, which may never end
        raise OSError("it is no file")
    image = PIL.Image.open(path, formats=_FORMATS)
    if max(image.size) > _MAX_RATIO * min(image.size):
        image.close()
        raise ValueError(f"one side is more than {_MAX_RATIO} times the other: it would be enlarged to gigabytes")
    return image


def decode(path: str) -> Image:
    """An image file as RGB."""
    try:
        with _open(path) as image:
            return as_rgb(image)
    except Exception as error:  # PIL raises many kinds for a broken file
        raise DataError(f"{path} cannot be read as an image ({quote(error)}): repair it, or --corrupt skip.") from error


def before_crop(size: tuple[int, int]) -> tuple[int, int]:
    """Height and width that a test image covers before it is cropped."""
    return round(size[0] / _KEPT), round(size[1] / _KEPT)


_PARTS = ("train", "val")
_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")  # whatever a file's name says; EPS would run programs
_ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # which torchvision reads


@dataclass(frozen=True, eq=False)
class FolderSet:
    """Image files and their labels."""

    paths: tuple[str, ...]
    labels: Tensor  # (N,) int64
    classes: int
    size: tuple[int, int]  # height and width that the model gets
    names: tuple[str, ...] = ()  # of the classes, in the order of their numbers
    root: str = ""  # folder that `train/` and `val/` are in
    whole: tuple[str, ...] = ()  # all paths there of which these are some; empty: these
    channels: int = 3  # or 1: grey

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image as the model gets it: channels, height, width."""
        return self.channels, *self.size

    def subset(self, indices: Tensor) -> FolderSet:
        """The files at these places."""
        paths, whole = tuple(self.paths[i] for i in indices.tolist()), self.whole or self.paths
        return replace(self, paths=paths, labels=self.labels[indices], whole=whole)


def _folder(path: Path, size: int | tuple[int, int], strict: bool) -> DataSets:
    """A directory with `train/` and `val/`; if strict, both must have the same classes, none of them empty."""
    sides = size if isinstance(size, tuple) else (size, size)
    train, test = (_list_part(path, part, sides) for part in _PARTS)
    if strict and (odd := wrong_classes(train, test)):
        raise DataError(f"{path}: classes need images in train/ and val/; there are none in {', '.join(odd[:3])}.")
    if strict and train.classes < 2:
        raise DataError(f"{path}: at least two classes are needed.")
    return DataSets(train, test, train.classes, train.shape, (str(path / _PARTS[0]), str(path / _PARTS[1])))


def wrong_classes(train: FolderSet, test: FolderSet) -> list[str]:
    """Folders of classes in train/ and val/ that hold no images, or are not there."""
    found = []
    for part, own in ((_PARTS[0], train), (_PARTS[1], test)):
        full = {own.names[number] for number in {*own.labels.tolist()}}
        found += [os.path.join(own.root, part, name) for name in sorted({*train.names, *test.names} - full)]
    return found


def _list_part(path: Path, part: str, sides: tuple[int, int]) -> FolderSet:
    """The files of `train/` or `val/`, in the order of torchvision's, but without what is hidden."""
    folder = path / part
    try:
        names = tuple(sorted(it.name for it in os.scandir(folder) if it.is_dir() and not it.name.startswith(".")))
        if not names:
            raise FileNotFoundError(f"no class folders in {folder}")
        roots = [(number, root) for number, name in enumerate(names) for root in sorted(_walk(folder / name))]
    except OSError as error:
        needs = "needs train/ and val/ with one folder of images per class, or train-*.npz and test-*.npz"
        raise DataError(f"{path} {needs} ({str(error).splitlines()[0]}).") from error
    found = [(os.path.join(root, file), number) for number, (root, files) in roots for file in sorted(files)]
    labels = torch.tensor([number for _, number in found], dtype=torch.int64)
    return FolderSet(tuple(file for file, _ in found), labels, len(names), sides, names, str(path))


def _walk(top: Path) -> Iterator[tuple[str, list[str]]]:
    """Folders and the images in them, without hidden ones, like ._1.png of macOS; links are followed."""
    for root, folders, files in os.walk(top, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for link in (it for it in (os.path.join(root, name) for name in folders) if os.path.islink(it)):
            real, above = os.path.realpath(link), (Path(root), *Path(root).parents)
            if any(Path(os.path.realpath(it)).is_relative_to(real) for it in above):
                raise DataError(f"{link} is a link to a folder that it is in: remove it.")
        yield root, [it for it in files if it.lower().endswith(_ENDINGS) and not it.startswith(".")]


def some_sizes(dataset: FolderSet) -> list[tuple[int, int]]:
    """Heights and widths of a few files, in order, of those that can be read."""
    looked = _look_at(dataset.paths[:: -(-len(dataset) // 9)], whole=False)
    return sorted(it for it in looked if not isinstance(it, Broken))  # a broken file is reported where it is needed


# what is in a data set


class Broken(NamedTuple):
    """A file that cannot be read as an image."""

    file: str
    reason: str


def check_data(data: DataSets, on_file: Callable[[int], None] = lambda done: None) -> dict[str, Any]:
    """What is in a data set, opened with strict=False, in plain data; every file is decoded. on_file: counts them."""
    train, test = data.train, data.test
    sizes: list[tuple[int, ...]] = [data.shape[1:]]
    files: dict[str, Any] = {"enlarged": None, "broken": [], "wrong_classes": []}  # enlarged: smaller than the input
    if isinstance(train, FolderSet) and isinstance(test, FolderSet):
        looked = []
        for done, one in enumerate(_look_at(train.paths + test.paths, whole=True), 1):
            looked.append(one)
            on_file(done)
        sizes = sorted((it for it in looked if not isinstance(it, Broken)), key=lambda it: (it[0] * it[1], it))
        files["enlarged"] = sum(height < train.size[0] or width < train.size[1] for height, width in sizes)
        files["broken"] = [it._asdict() for it in looked if isinstance(it, Broken)]
        files["wrong_classes"] = wrong_classes(train, test)
    places = {"smallest": 0, "median": (len(sizes) - 1) // 2, "largest": -1} if sizes else {}  # by area
    return {
        "well": not files["broken"] and not files["wrong_classes"] and data.classes > 1,
        "classes": data.classes,
        "train": {"images": len(train), "from": data.sources[0]},
        "test": {"images": len(test), "from": data.sources[1]},
        "sizes": {word: list(sizes[place]) for word, place in places.items()},  # height and width
        **files,
    }


def no_images(dataset: FolderSet) -> list[Broken]:
    """Files whose first bytes are not those of an image, such as empty ones; what is cut off later is not found."""
    return [it for it in _look_at(dataset.paths, whole=False) if isinstance(it, Broken)]


def _look_at(paths: Sequence[str], whole: bool) -> Iterator[tuple[int, int] | Broken]:
    """Look at all paths, in order; most of the work is done while Python's lock is released."""
    PIL.Image.init()  # else threads that meet a rare file format at the same time do not all know it
    with ThreadPool(core_count()) as pool:
        yield from pool.imap(partial(_look, whole=whole), paths, chunksize=16)


def _look(path: str, whole: bool) -> tuple[int, int] | Broken:
    """Height and width of an image, decoded just as a loader does, or (not whole) by its first bytes alone."""
    try:
        with _open(path) as image:
            if whole:
                as_rgb(image)
            return image.height, image.width
    except Exception as error:  # PIL raises many kinds for a broken file
        return Broken(path, quote(error) or type(error).__name__)


# data sets by name


NAMES = ("digits", "cifar10", "cifar100")
_DIGITS_TEST = 382  # images of the last three writers
_MAX_CLASSES = 2**24


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
        """Of one image as the model gets it: channels, height, width."""
        height, width, channels = self.images.shape[1:]
        return channels, height, width

    def subset(self, indices: Tensor) -> ArraySet:
        """The images at these places."""
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


def load(
    name: str | Path,
    root: str | Path = "data",
    size: int | tuple[int, int] = 224,
    download: bool = False,
    strict: bool = True,
) -> DataSets:
    """Open a data set: `digits`, `cifar10`, `cifar100`, or a folder.

    A folder holds `train-*.npz` and `test-*.npz` with `images` (N, H, W, C) uint8 and `labels` (N,), or `train/` and
    `val/` with one folder of image files per class, which are cropped to `size`: a square's side, or height and width.
    The CIFAR sets are shards in the folder of their name in `root`, or what torchvision keeps in `root`, and fetches
    with `download`. strict=False: classes of image files may be empty, or in `train/` or `val/` only.
    """
    path = Path(name)
    if str(name) == "digits":
        return _digits()
    if str(name) in NAMES:
        shards = Path(root) / path
        return _shards(shards) if list(shards.glob("train-*.npz")) else _cifar(str(name), Path(root), download)
    if not path.exists():
        known = [*NAMES, *(str(it) for it in path.parent.glob("*") if it.is_dir())]
        near = "".join(f" Did you mean {it}?" for it in difflib.get_close_matches(str(name).lower(), known, n=1))
        raise DataError(f"There is no data {str(name)!r}: it is no folder, and none of {', '.join(NAMES)}.{near}")
    if list(path.glob("*.npz")):
        return _shards(path)
    return _folder(path, size, strict)


def preprocessing(data: DataSets) -> dict[str, Any]:
    """What is done to a test image before the network gets it, in plain data, for whoever uses the network.

    An image is scaled, with its aspect ratio, to just cover `resize` (height, width), and its middle `crop` is kept;
    None: its size stays. Then 0..255 becomes `range`, `mean` is subtracted, and the rest is divided by `std`, channel
    by channel. `shape` is (channels, height, width); `classes` are the names of the outputs, if they have names.
    """
    test = data.test
    files = test if isinstance(test, FolderSet) else None
    mean, std = SCALES[test.channels] if isinstance(test, FolderSet) else (test.mean, test.std)
    return {
        "shape": list(data.shape),
        "channels": {3: "RGB", 1: "L"}[data.shape[0]] if files is not None else "as stored",
        "resize": list(before_crop(files.size)) if files is not None else None,
        "interpolation": "bilinear" if files is not None else None,
        "crop": list(files.size) if files is not None else None,
        "range": [0.0, 1.0 if files is not None else 255.0],
        "mean": list(mean),
        "std": list(std),
        "classes": list(files.names) if files is not None else [],
    }


_DIGESTED = 2**27  # bytes of image files that are read for a digest


def digest_of(dataset: DataSet) -> str:
    """A hash that shows whether images were replaced: a function of names, sizes and contents alone.

    Arrays are hashed whole. Of image files it has all names (inside the folder) and sizes, and the bytes of as many,
    evenly spread, as make 128 MiB: all of a small folder, about one in a thousand of ImageNet. Neither times nor where
    the folder is change it.
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
        with contextlib.suppress(OSError):  # one that may not be read is reported where it is needed
            if size:
                digest.update(Path(path).read_bytes())
    return digest.hexdigest()[:16]


def _plain_size(path: str) -> int:
    """Bytes of an image file; 0 for what is not a plain file."""
    try:
        return plain_file_size(path)
    except FileError:
        return 0


def split(dataset: DataSet, share: float, seed: int = 0) -> tuple[Any, Any]:
    """Hold out a share of each class, drawn at random: (the rest, the held-out part), without a common image."""
    if not 0 < share < 1:
        raise DataError(f"The held-out share must lie between 0 and 1, not {share}.")
    order = torch.randperm(len(dataset), generator=generator(seed))
    held = torch.zeros(len(dataset), dtype=torch.bool)
    for label in sorted(set(dataset.labels.tolist())):
        own = order[dataset.labels[order] == label]
        held[own[: round(share * len(own))]] = True
    if not held.any() or held.all():
        raise DataError(f"A share of {share} of {len(dataset)} images leaves one part empty.")
    return dataset.subset((~held).nonzero().flatten()), dataset.subset(held.nonzero().flatten())


def _digits() -> DataSets:
    """Optical Recognition of Handwritten Digits (E. Alpaydin, C. Kaynak), from the UCI repository, CC BY 4.0."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        images, labels = file["images"][..., None], file["labels"].astype(np.int64)
    edge = len(labels) - _DIGITS_TEST
    sources = ("the package's, of all writers but three", "the package's, of the last three writers")
    return _arrays((images[:edge], labels[:edge]), (images[edge:], labels[edge:]), Augmentation(shift=1), sources)


def _cifar(name: str, root: Path, download: bool) -> DataSets:
    import torchvision

    kind = {"cifar10": torchvision.datasets.CIFAR10, "cifar100": torchvision.datasets.CIFAR100}[name]
    try:
        parts = [kind(str(root), train=train, download=download) for train in (True, False)]
    except Exception as error:
        fetch = f"from dmcp.data.datasets import load; load({name!r}, root={str(root)!r}, download=True)"
        where = f"{name} is not in {root} as shards or as torchvision keeps it ({error})"
        raise DataError(f"{where}: put it there, or let Python fetch it once: {fetch}") from error
    train, test = ((part.data, np.asarray(part.targets)) for part in parts)
    sources = (f"{root}, as torchvision keeps them",) * 2
    return _arrays(train, test, Augmentation(shift=4, flip=True, reflect=True), sources)


def _shards(folder: Path) -> DataSets:
    train, test = (_read_shards(folder, part) for part in ("train", "test"))
    sources = (str(folder / "train-*.npz"), str(folder / "test-*.npz"))
    return _arrays(train, test, Augmentation(shift=4, flip=True, reflect=True), sources)


def _read_shards(folder: Path, part: str) -> _Arrays:
    """All shards of one part, in the order of their numbers."""
    paths = sorted(folder.glob(f"{part}-*.npz"), key=lambda path: (len(path.name), path.name))
    if not paths:
        raise DataError(f"{folder} has no {part}-*.npz.")
    _check_sizes(paths, folder / f"{part}-*.npz")
    shards: list[_Arrays] = []
    for path in paths:
        try:
            with path.open("rb") as raw, np.load(raw, allow_pickle=False) as file:
                images, labels = file["images"], file["labels"]
        except Exception as error:  # zipfile and numpy raise many kinds for a broken file
            raise DataError(f"{path} cannot be read as a shard with images and labels: {quote(error)}") from error
        shapes = {images.shape[1:], *(others.shape[1:] for others, _ in shards)}
        fits = images.dtype == np.uint8 and images.ndim == 4 and len(shapes) == 1
        if not fits or labels.shape != images.shape[:1] or labels.dtype.kind not in "iu":
            raise DataError(f"{path}: images must be (N, H, W, C) uint8, all of one shape, and labels (N,) integers.")
        shards.append((images, labels.astype(np.int64)))
    every, numbers = zip(*shards, strict=True)
    return np.concatenate(every), np.concatenate(numbers)


def _check_sizes(paths: Sequence[Path], name: Path) -> None:
    """Refuse shards that do not fit into the free memory, or that a few bytes inflate to; nothing is read but sizes."""
    stored_in_all, inflated_in_all = 0, 0
    try:
        for path in paths:
            stored, inflated = zip_sizes(path, ("images.npy", "labels.npy"))
            if not zipfile.is_zipfile(path):
                raise ValueError("it is not an npz file")
            check_inflated(path, stored, inflated)
            stored_in_all, inflated_in_all = stored_in_all + stored, inflated_in_all + inflated
        check_inflated(name, stored_in_all, inflated_in_all)
    except FileError as error:
        raise DataError(str(error)) from error
    except Exception as error:  # zipfile raises many kinds for a broken file
        raise DataError(f"{path} cannot be read as a shard with images and labels: {quote(error)}") from error


_Arrays = tuple[np.ndarray, np.ndarray]  # images (N, H, W, C) uint8, labels (N,) int64


def _arrays(train: _Arrays, test: _Arrays, augmentation: Augmentation, sources: tuple[str, str]) -> DataSets:
    """Check two parts, and normalize both by the training images."""
    shape, most = train[0].shape[1:], train[1].max(initial=0)
    for name, (images, labels) in zip(sources, (train, test), strict=True):
        if not images.size or images.shape[1:] != shape:
            raise DataError(f"{name}: there are no images, or not of the {shape} of the training images.")
        if labels.min() < 0 or labels.max() > most or not 0 < most < _MAX_CLASSES:
            raise DataError(f"{name}: number two or more classes from 0, the same in both parts.")
    values, means, deviations = np.arange(256), [], []
    for channel in range(shape[-1]):  # from histograms: exact, without a float copy
        counts = np.bincount(train[0][..., channel].ravel(), minlength=256)
        mean = (counts * values).sum() / counts.sum()
        variance = (counts * (values - mean) ** 2).sum() / counts.sum()
        means.append(float(mean))
        deviations.append(float(variance**0.5) or 1.0)  # a channel of one value stays what it is
    classes, scale = int(most) + 1, (tuple(means), tuple(deviations))
    first, second = (
        ArraySet(torch.from_numpy(images), torch.from_numpy(labels), classes, *scale, augmentation)
        for images, labels in (train, test)
    )
    return DataSets(first, second, classes, first.shape, sources)
