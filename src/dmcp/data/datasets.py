"""Data sets by name or path: digits, CIFAR, shards, image folders."""

from __future__ import annotations

import difflib
import os
import shlex
import stat
import statistics
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from PIL.Image import Image
from torch import Tensor

from dmcp.batches import generator
from dmcp.errors import DataError
from dmcp.runtime.io import quote

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, which pre-trained networks expect
_KEPT = 0.875  # share of each side of a test image that the crop keeps


class CorruptError(DataError):
    """A file that can be opened, but not decoded."""


def check_file(path: str) -> None:
    """Refuse a pipe or a device, also behind a link: PIL would wait for it."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("it is no file, but a pipe, a device or a socket")


def as_rgb(image: Image) -> Image:
    """Any image as RGB; of 16 bits the upper 8 are kept: of grey levels PIL would take 255 of 65535 for white."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PPM", "PNG")):
        image = PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError("its pixels are 32-bit numbers, of which white is not known: save it with 8 or 16 bits")
    return image.convert("RGB")


def decode(path: str, root: str) -> Image:
    """An image file as RGB; errors name `root`, the folder of the data."""
    try:
        check_file(path)
        with PIL.Image.open(path) as image:
            return as_rgb(image)
    except Exception as error:  # PIL raises many kinds for a broken file
        if is_refused(error):
            raise DataError(f"{path} cannot be opened ({error}): check the disk, its rights and the memory.") from error
        raise CorruptError(
            f"{path} cannot be read as an image ({error}): repair or remove it, or skip such files: --corrupt skip, in "
            f"Python corrupt='skip'.{finds_all(root)}"
        ) from error


def is_refused(error: Exception) -> bool:
    """True if the system could not read the file, which says nothing about the image."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None)


def finds_all(root: str) -> str:
    """How to find all broken files of a folder."""
    return f" dmcp data {shlex.quote(root)} finds all broken files at once." if root else ""


def transform(size: tuple[int, int], train: bool) -> Callable[[Any], Tensor]:
    """What is done to an image; size: height and width that the model gets."""
    from torchvision.transforms import v2  # late: it takes seconds to import

    aspect = size[1] / size[0]
    crop = [partial(_cover, size=before_crop(size)), v2.CenterCrop(size)]
    if train:
        ratio = (3 / 4 * aspect, 4 / 3 * aspect)  # of the crop, so that it is stretched as much as a square would be
        crop = [v2.RandomResizedCrop(size, ratio=ratio, antialias=True), v2.RandomHorizontalFlip()]
    last = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD), v2.ToPureTensor()]
    return v2.Compose([*crop, *last])  # type: ignore[no-any-return]


def before_crop(size: tuple[int, int]) -> tuple[int, int]:
    """Height and width that a test image covers before it is cropped."""
    return round(size[0] / _KEPT), round(size[1] / _KEPT)


def _cover(image: Image, size: tuple[int, int]) -> Image:
    """Scale an image, with its aspect ratio, to just cover a height and a width."""
    from torchvision.transforms import v2

    height, width = size
    if width * image.height >= height * image.width:  # its width is what must be met
        height = int(width * image.height / image.width)
    else:
        width = int(height * image.width / image.height)
    return v2.functional.resize(image, [height, width], antialias=True)  # type: ignore[no-any-return]


_LOOKED_AT = 9  # images whose size `usual_size` reads
_PARTS = ("train", "val")
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

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image as the model gets it: channels, height, width."""
        return 3, *self.size

    def subset(self, indices: Tensor) -> FolderSet:
        """The files at these places."""
        return replace(self, paths=tuple(self.paths[i] for i in indices.tolist()), labels=self.labels[indices])


def _folder(path: Path, size: int | tuple[int, int], strict: bool) -> DataSets:
    """A directory with `train/` and `val/`; if strict, both must have the same classes, none of them empty."""
    sides = size if isinstance(size, tuple) else (size, size)
    if len(sides) != 2 or any(type(side) is not int or side < 1 for side in sides):
        raise DataError(f"The image size must be an int of at least 1, or (height, width), not {size!r}.")
    train, test = (_list_part(path, part, sides) for part in _PARTS)
    for part, own, other in ((_PARTS[0], train, test), (_PARTS[1], test, train)) if strict else ():
        odd = {
            f"there are no image files ({', '.join(_ENDINGS[:3])}, ...) in": empty_classes(own),
            f"there are classes only in {part}/:": sorted(set(own.names) - set(other.names)),
            "there is one class, but at least two are needed:": own.names if len(own.names) < 2 else (),
        }
        for text, names in odd.items():
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                raise DataError(f"{path / part}: {text} {', '.join(names[:3])}{more}.")
    return DataSets(train, test, train.classes, train.shape, (str(path / _PARTS[0]), str(path / _PARTS[1])))


def empty_classes(dataset: FolderSet) -> list[str]:
    """Names of the classes that have no files."""
    filled = set(dataset.labels.tolist())
    return [name for number, name in enumerate(dataset.names) if number not in filled]


def _list_part(path: Path, part: str, sides: tuple[int, int]) -> FolderSet:
    """The files of `train/` or `val/`, as torchvision lists them, but without what is hidden."""
    from torchvision.datasets import folder as listing

    folder = path / part
    if not folder.is_dir():
        if path.resolve().name in _PARTS:
            above = str(path / "..")
            raise DataError(f"{path} is one part of the data only: give the folder that it lies in, {above!r}.")
        raise DataError(f"{path} needs {part}/ with one folder of images per class (or train-*.npz, test-*.npz).")
    try:
        names = tuple(name for name in listing.find_classes(folder)[0] if not name.startswith("."))
        if not names:
            raise FileNotFoundError(f"Couldn't find any class folder in {folder}.")
        numbers = {name: number for number, name in enumerate(names)}
        found = listing.make_dataset(folder, numbers, _ENDINGS, allow_empty=True)
    except OSError as error:
        raise DataError(f"{folder}: {str(error).splitlines()[0]}") from error
    start = len(str(folder))  # what is hidden below the folder counts, like ._1.png of macOS or .ipynb_checkpoints/
    found = [(file, number) for file, number in found if f"{os.sep}." not in file[start:]]
    labels = torch.tensor([number for _, number in found], dtype=torch.int64)
    return FolderSet(tuple(file for file, _ in found), labels, len(names), sides, names, str(path))


def usual_size(dataset: FolderSet) -> tuple[int, int] | None:
    """Median height and width of a few files; None if none of them can be read."""
    sizes = []
    for path in dataset.paths[:: -(-len(dataset) // _LOOKED_AT)]:
        try:
            check_file(path)
            with PIL.Image.open(path) as image:  # its first bytes only
                sizes.append((image.height, image.width))
        except Exception:  # a broken file is reported where it is needed
            continue
    if not sizes:
        return None
    return statistics.median_low(height for height, _ in sizes), statistics.median_low(width for _, width in sizes)


NAMES = ("digits", "cifar10", "cifar100")
_DIGITS_TEST = 382  # images of the last three writers
_MAX_CLASSES, _MAX_CHANNELS = 2**24, 2**12
_MAX_RATIO, _MAX_DENSE = 64, 2**30  # a shard of more bytes than this must not be compressed more tightly


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
        meant = guess(path, NAMES, Path.is_dir)
        raise DataError(f"There is no data {str(name)!r}: it is no folder, and none of {', '.join(NAMES)}.{meant}")
    if list(path.glob("*.npz")):
        return _shards(path)
    return _folder(path, size, strict)


def guess(path: Path, names: Sequence[str], is_one: Callable[[Path], bool], cutoff: float = 0.6) -> str:
    """A question with the nearest of these names and of the path's neighbours; empty if none is near."""
    try:
        beside = [other for other in path.parent.iterdir() if is_one(other)]
    except OSError:
        beside = []
    known = {name.lower(): name for name in names} | {other.stem.lower(): str(other) for other in beside}
    near = difflib.get_close_matches(path.stem.lower(), known, n=1, cutoff=cutoff)
    return f" Did you mean {known[near[0]]}?" if near else ""


def swapped(train: int, test: int, files: bool) -> str:
    """A question, if there are more test images than training images; else empty."""
    if test <= train:
        return ""
    parts = "train/ and val/" if files else "train-*.npz and test-*.npz"
    return f"There are more test images ({test:,}) than training images ({train:,}): are {parts} swapped?"


def preprocessing(data: DataSets) -> dict[str, Any]:
    """What is done to a test image before the network gets it, in plain data, for whoever uses the network.

    An image is scaled, with its aspect ratio, to just cover `resize` (height, width), and its middle `crop` is kept;
    None: its size stays. Then 0..255 becomes `range`, `mean` is subtracted, and the rest is divided by `std`, channel
    by channel. `shape` is (channels, height, width); `classes` are the names of the outputs, if they have names.
    """
    test = data.test
    files = isinstance(test, FolderSet)
    return {
        "shape": list(data.shape),
        "channels": "RGB" if files else "as stored",
        "resize": list(before_crop(test.size)) if isinstance(test, FolderSet) else None,
        "interpolation": "bilinear" if files else None,
        "crop": list(test.size) if isinstance(test, FolderSet) else None,
        "range": [0.0, 1.0 if files else 255.0],
        "mean": list(MEAN if isinstance(test, FolderSet) else test.mean),
        "std": list(STD if isinstance(test, FolderSet) else test.std),
        "classes": list(test.names) if isinstance(test, FolderSet) else [],
    }


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
        reason = f"({type(error).__name__}: {error})"
        if download:
            raise DataError(f"{name} cannot be fetched into {root} {reason}: put it there by hand.") from error
        where = "" if root == Path("data") else f", root={str(root)!r}"
        fetch = f"from dmcp.data.datasets import load; load({name!r}{where}, download=True)"
        raise DataError(
            f"{name} is not in {root}: neither {root / name}/train-*.npz nor what torchvision keeps there {reason}. "
            f"Put it there, or let Python fetch it once: {fetch}"
        ) from error
    train, test = ((part.data, np.asarray(part.targets)) for part in parts)
    sources = (f"{root}, as torchvision keeps them",) * 2
    return _arrays(train, test, Augmentation(shift=4, flip=True, reflect=True), sources)


def _shards(folder: Path) -> DataSets:
    train, test = (_read_shards(folder, part) for part in ("train", "test"))
    sources = (str(folder / "train-*.npz"), str(folder / "test-*.npz"))
    return _arrays(train, test, Augmentation(shift=4, flip=True, reflect=True), sources)


def _read_shards(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """All shards of one part, in the order of their numbers."""
    paths = sorted(folder.glob(f"{part}-*.npz"), key=lambda path: (len(path.name), path.name))
    if not paths:
        raise DataError(f"{folder} has no {part}-*.npz.")
    images: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for path in paths:
        try:
            check_file(str(path))
            with zipfile.ZipFile(path) as file:  # not np.load, which also takes what is no shard
                claimed = sum(info.file_size for info in file.infolist())
                if claimed > max(_MAX_RATIO * path.stat().st_size, _MAX_DENSE):
                    raise ValueError(f"it claims {claimed} bytes, packed into {path.stat().st_size}")
                for name, arrays in (("images.npy", images), ("labels.npy", labels)):
                    with file.open(name) as member:
                        arrays.append(np.lib.format.read_array(member, allow_pickle=False))
        except Exception as error:  # zipfile and numpy raise many kinds for a broken file
            raise DataError(f"{path} cannot be read as a shard with images and labels: {quote(error)}") from error
        image, label = images[-1], labels[-1]
        fits = image.dtype == np.uint8 and image.ndim == 4 and image.shape[3] <= _MAX_CHANNELS
        if not fits or label.shape != image.shape[:1] or label.dtype.kind not in "iu":
            raise DataError(
                f"{path}: images must be (N, H, W, C) uint8 and labels (N,) integers, not {image.shape} {image.dtype} "
                f"and {label.shape} {label.dtype}."
            )
        if label.max(initial=0) > _MAX_CLASSES:
            raise DataError(f"{path}: labels go up to {label.max()}; number the classes from 0.")
        labels[-1] = label.astype(np.int64)
        if image.shape[1:] != images[0].shape[1:]:
            raise DataError(f"{path}: images of {image.shape[1:]}, but {paths[0].name} has {images[0].shape[1:]}.")
    return np.concatenate(images), np.concatenate(labels)


_Arrays = tuple[np.ndarray, np.ndarray]  # images (N, H, W, C) uint8, labels (N,) int64


def _arrays(train: _Arrays, test: _Arrays, augmentation: Augmentation, sources: tuple[str, str]) -> DataSets:
    """Check two parts, and normalize both by the training images."""
    for name, (images, labels) in zip(sources, (train, test), strict=True):
        if not images.size:
            raise DataError(f"{name}: there are no images.")
        if images.shape[1:] != train[0].shape[1:]:
            raise DataError(f"{name}: images are {images.shape[1:]}, but those of training {train[0].shape[1:]}.")
        if labels.min() < 0 or labels.max() > train[1].max():
            found = f"from {labels.min()} to {labels.max()}"
            raise DataError(f"{name}: labels go {found}, but those of training from 0 to {train[1].max()}.")
    if len(np.unique(train[1])) < 2:
        raise DataError(f"{sources[0]}: all images have one label; at least two classes are needed.")
    classes, values, means, deviations = int(train[1].max()) + 1, np.arange(256), [], []
    for channel in range(train[0].shape[-1]):  # from histograms: exact, without a float copy
        counts = np.bincount(train[0][..., channel].ravel(), minlength=256)
        mean = (counts * values).sum() / counts.sum()
        variance = (counts * (values - mean) ** 2).sum() / counts.sum()
        means.append(float(mean))
        deviations.append(float(variance**0.5) or 1.0)  # a channel of one value stays what it is
    arrays = [
        ArraySet(
            torch.from_numpy(images), torch.from_numpy(labels), classes, tuple(means), tuple(deviations), augmentation
        )
        for images, labels in (train, test)
    ]
    return DataSets(arrays[0], arrays[1], classes, arrays[0].shape, sources)
