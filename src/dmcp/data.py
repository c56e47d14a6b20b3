"""Data sets by the name or path that a person types, and loaders whose batches depend on (seed, epoch, index) only.

`digits` comes with the package (digits.npz): Optical Recognition of Handwritten Digits, E. Alpaydin and C. Kaynak, UCI
Machine Learning Repository, licence CC BY 4.0; the 1,797 images of its test file, 8x8 pixels of 0..16, in file order,
which is writer by writer. The last three writers are the test set here, so nobody's hand is in both sets.
"""

from __future__ import annotations

import difflib
import math
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dmcp.batches import check_size, generator, share_of
from dmcp.errors import DataError
from dmcp.folder_loader import FolderLoader
from dmcp.folders import FolderSet, as_tested, list_folder, open_folder
from dmcp.ranks import ALONE, Ranks

NAMES = ("digits", "cifar10", "cifar100")
_DIGITS_TEST = 382  # images of the last three writers
_MOST_CLASSES = 2**24
_MOST_CHANNELS = 2**12  # of an image; each has its own mean
_MOST_RATIO, _MOST_DENSE = 64, 2**30  # an array of more bytes than this must not be packed more tightly
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


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


def load(
    name: str | Path,
    root: str | Path = "data",
    size: int | tuple[int, int] = 224,
    download: bool = False,
    strict: bool = True,
) -> DataSets:
    """Open a data set: `digits`, `cifar10`, `cifar100`, or a folder.

    A folder holds `train-*.npz` and `test-*.npz` with `images` (N, H, W, C) uint8 and `labels` (N,), or `train/` and
    `val/` with one folder of image files per class, which are cropped to `size`: one side of a square, or height and
    width. The CIFAR sets are looked for as shards in the folder of their name in `root`, then as torchvision keeps
    them in `root`; `download` lets torchvision fetch them. docs/data.md says what is done to the images.
    strict=False, to look at broken data: classes of image files may be empty, or in `train/` or `val/` only.
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
    train, test = open_folder(path, size) if strict else list_folder(path, size)
    return DataSets(train, test, train.classes, train.shape)


def guess(path: Path, names: Sequence[str], is_one: Callable[[Path], bool], cutoff: float = 0.6) -> str:
    """Which of these names, or of what is beside the path and is one, may have been meant: a question, or nothing."""
    try:
        beside = [other for other in path.parent.iterdir() if is_one(other)]
    except OSError:
        beside = []
    known = {name.lower(): name for name in names} | {other.stem.lower(): str(other) for other in beside}
    near = difflib.get_close_matches(path.stem.lower(), known, n=1, cutoff=cutoff)
    return f" Did you mean {known[near[0]]}?" if near else ""


def swapped(train: int, test: int, files: bool) -> str:
    """A question about data with more test images than training images; empty if there are fewer."""
    parts = "train/ and val/" if files else "train-*.npz and test-*.npz"
    told = f"There are more test images ({test:,}) than training images ({train:,}): are {parts} swapped?"
    return told if test > train else ""


def preprocessing(data: DataSets) -> dict[str, Any]:
    """What is done to a test image before the network gets it, in plain data: whoever uses the network must do it too.

    An image is scaled, bent in no direction, to just cover `resize` (height, width), and the middle `crop` of it is
    kept; None: its size stays. Then 0..255 becomes `range`, `mean` is subtracted, and what is left is divided by `std`,
    channel by channel. `shape` is (channels, height, width); `classes` are the names of the outputs, where there are.
    """
    how: dict[str, Any] = {"shape": list(data.shape)}
    if isinstance(data.test, FolderSet):
        return how | as_tested(data.test)
    sizes = {"channels": "as stored", "resize": None, "interpolation": None, "crop": None, "range": [0.0, 255.0]}
    return how | sizes | {"mean": list(data.test.mean), "std": list(data.test.std), "classes": []}


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


def make_loader(
    dataset: DataSet,
    batch_size: int,
    train: bool,
    seed: int = 0,
    device: torch.device | str = "cpu",
    channels_last: bool = False,
    workers: int | None = None,
    ranks: Ranks = ALONE,
    corrupt: str = "stop",
) -> ArrayLoader | FolderLoader:
    """The loader for this kind of data set; `train` shuffles, augments, and drops an incomplete last batch.

    Each rank gets its part of every batch of `batch_size`, one after the other, so that all see what one alone would.
    Image files that cannot be decoded stop the pass (corrupt="stop"), or are replaced ("skip") and in `loader.skipped`.
    """
    if isinstance(dataset, FolderSet):
        return FolderLoader(dataset, batch_size, train, seed, device, channels_last, workers, ranks, corrupt)
    return ArrayLoader(dataset, batch_size, train, seed, device, channels_last, ranks)


class ArrayLoader:
    """Batches of a data set that lies on the device, augmented there, a whole batch in a few operations."""

    def __init__(
        self,
        dataset: ArraySet,
        batch_size: int,
        train: bool,
        seed: int = 0,
        device: torch.device | str = "cpu",
        channels_last: bool = False,
        ranks: Ranks = ALONE,  # who share each batch
    ) -> None:
        check_size(batch_size, len(dataset), train, ranks)
        self.batch_size = batch_size
        self.train = train
        self.seed = seed
        self.device = torch.device(device)
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        self.ranks = ranks
        self.augmentation = dataset.augmentation if train else Augmentation()
        self.shape = dataset.shape
        self.images = _pad(dataset.images, self.augmentation).to(self.device)  # (N, H + 2 shift, W + 2 shift, C) uint8
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
        self.epoch = epoch
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
        index, down, right = self.drawn[:, share_of(number, self.batch_size, len(self.labels), self.ranks)]
        rows, columns = self.rows[down], self.columns[right]  # (B, H), (B, W)
        pixels = self.images[index[:, None, None], rows[:, :, None], columns[:, None, :]]  # (B, H, W, C)
        images = torch.empty((len(index), *self.shape), device=self.device, memory_format=self.layout)
        torch.sub(pixels.permute(0, 3, 1, 2), self.mean, out=images)
        return images.div_(self.std), self.labels[index]


def _digits() -> DataSets:
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        images, labels = file["images"][..., None], file["labels"]
    edge = len(labels) - _DIGITS_TEST
    return _arrays(
        (images[:edge], labels[:edge]), (images[edge:], labels[edge:]), Augmentation(shift=1), "the package's digits"
    )


def _cifar(name: str, root: Path, download: bool) -> DataSets:
    import torchvision  # late: see cifar_nets.mobilenet_v2

    kind = {"cifar10": torchvision.datasets.CIFAR10, "cifar100": torchvision.datasets.CIFAR100}[name]
    try:
        parts = [kind(str(root), train=train, download=download) for train in (True, False)]
    except Exception as error:
        reason = f"({type(error).__name__}: {error})"
        if download:
            raise DataError(f"{name} cannot be fetched into {root} {reason}: put it there by hand.") from error
        where = "" if root == Path("data") else f", root={str(root)!r}"
        fetch = f"from dmcp.data import load; load({name!r}{where}, download=True)"
        raise DataError(
            f"{name} is not in {root}: neither {root / name}/train-*.npz nor what torchvision keeps there {reason}. "
            f"Put it there, or let Python fetch it once: {fetch}"
        ) from error
    train, test = ((part.data, np.asarray(part.targets)) for part in parts)
    return _arrays(train, test, Augmentation(shift=4, flip=True, reflect=True), name)


def _shards(folder: Path) -> DataSets:
    train, test = (_read_shards(folder, part) for part in ("train", "test"))
    return _arrays(train, test, Augmentation(shift=4, flip=True, reflect=True), str(folder))


def _read_shards(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    """All shards of one part, in the order of their numbers."""
    paths = sorted(folder.glob(f"{part}-*.npz"), key=lambda path: (len(path.name), path.name))
    if not paths:
        raise DataError(f"{folder} has no {part}-*.npz.")
    images: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for path in paths:
        try:
            if not path.is_file():
                raise ValueError("it is not a file")  # a pipe would be waited for
            with zipfile.ZipFile(path) as file:
                for name, arrays in (("images.npy", images), ("labels.npy", labels)):
                    arrays.append(_read_member(file, name, path.stat().st_size))
        except Exception as error:  # zipfile and numpy raise many kinds for a broken file
            reason = str(error)[:200].encode("unicode_escape").decode()  # it quotes the file
            raise DataError(f"{path} cannot be read as a shard with images and labels: {reason}") from error
        if images[-1].dtype != np.uint8 or images[-1].ndim != 4 or labels[-1].shape != images[-1].shape[:1]:
            raise DataError(
                f"{path}: images must be (N, H, W, C) uint8 and labels (N,), not {images[-1].shape} "
                f"{images[-1].dtype} and {labels[-1].shape}."
            )
        if images[-1].shape[3] > _MOST_CHANNELS:
            raise DataError(f"{path}: images of {images[-1].shape[3]} channels: the last of (N, H, W, C) is too many.")
        if labels[-1].dtype.kind not in "iu":
            raise DataError(f"{path}: labels must be integers, not {labels[-1].dtype}.")
        if labels[-1].max(initial=0) > _MOST_CLASSES:
            raise DataError(f"{path}: labels go up to {labels[-1].max()}; number the classes from 0.")
        if images[-1].shape[1:] != images[0].shape[1:]:
            raise DataError(f"{path}: images of {images[-1].shape[1:]}, but {paths[0].name} has {images[0].shape[1:]}.")
        labels[-1] = labels[-1].astype(np.int64)
    return np.concatenate(images), np.concatenate(labels)


def _read_member(file: zipfile.ZipFile, name: str, most: int) -> np.ndarray:
    """One array of a shard of `most` bytes; what its headers claim is checked before memory is taken for it."""
    info = file.getinfo(name)
    dense = max(_MOST_RATIO * info.compress_size, _MOST_DENSE)
    limits = {zipfile.ZIP_STORED: info.compress_size, zipfile.ZIP_DEFLATED: dense}  # numpy knows these two
    if info.compress_size > most or info.file_size > limits.get(info.compress_type, 0):
        raise ValueError(f"{name} claims {info.file_size} bytes, packed into {info.compress_size}")
    with file.open(info) as member:
        version = np.lib.format.read_magic(member)
        if version not in _HEADERS:
            raise ValueError(f"{name} has a header of version {version}")
        shape, _, dtype = _HEADERS[version](member)
        if dtype.hasobject or member.tell() + math.prod(shape) * dtype.itemsize != info.file_size:
            raise ValueError(f"{name} claims {shape} {dtype}, but holds {info.file_size} bytes")
    with file.open(info) as member:
        return np.lib.format.read_array(member, allow_pickle=False)


def _arrays(
    train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray], augmentation: Augmentation, name: str
) -> DataSets:
    """Check two parts, and normalise both by the training images."""
    for part, (images, labels) in (("training", train), ("test", test)):
        if not images.size:
            raise DataError(f"{name}: there are no {part} images.")
        if images.shape[1:] != train[0].shape[1:]:
            raise DataError(f"{name}: test images are {images.shape[1:]}, training images {train[0].shape[1:]}.")
        if labels.min() < 0 or labels.max() > train[1].max():
            raise DataError(
                f"{name}: {part} labels go from {labels.min()} to {labels.max()}, but the training labels are "
                f"0 to {train[1].max()}."
            )
    if len(np.unique(train[1])) < 2:
        raise DataError(f"{name}: all training images have one label; at least two classes are needed.")
    classes = int(train[1].max()) + 1
    mean, std = _statistics(train[0])
    sets = [
        ArraySet(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)), classes, mean, std, augmentation)
        for images, labels in (train, test)
    ]
    return DataSets(sets[0], sets[1], classes, sets[0].shape)


def _statistics(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel, from histograms: exact, without a float copy. (N, H, W, C) uint8"""
    means, deviations = [], []
    values = np.arange(256)
    for channel in range(images.shape[-1]):
        counts = np.bincount(images[..., channel].ravel(), minlength=256)
        mean = (counts * values).sum() / counts.sum()
        variance = (counts * (values - mean) ** 2).sum() / counts.sum()
        means.append(float(mean))
        deviations.append(float(variance**0.5) or 1.0)  # a channel of one value stays what it is
    return tuple(means), tuple(deviations)


def _pad(images: Tensor, augmentation: Augmentation) -> Tensor:
    """Room to move: black, or the mirrored border. (N, H, W, C) -> (N, H + 2 shift, W + 2 shift, C)"""
    shift = augmentation.shift
    if not augmentation.reflect:
        return nn.functional.pad(images, (0, 0, shift, shift, shift, shift))
    for dim in (1, 2):
        last = images.shape[dim] - 1
        if shift > last:
            raise DataError(f"Images of {last + 1} pixels are too small to be moved by {shift}.")
        places = torch.arange(-shift, last + shift + 1).abs()
        images = images.index_select(dim, torch.where(places > last, 2 * last - places, places))
    return images
