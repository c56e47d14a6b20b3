"""Image files as pixels: decoded once and kept where they fit, cropped and resized a batch at a time."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import stat
import struct
import warnings
import weakref
from collections.abc import Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import torch
from filelock import FileLock
from safetensors import SafetensorError, safe_open
from torch import Tensor

from dmcp.data.datasets import MEAN, SCALES, STD, Broken, FolderSet, _look_at, before_crop, decode
from dmcp.errors import DataError
from dmcp.runtime.io import CONTAINER_LIMITS, write_files
from dmcp.runtime.progress import phase

Array = np.ndarray[Any, np.dtype[Any]]
Size = tuple[int, int]  # height and width

# decoding: JPEGs by torchvision, which keeps Python's lock for less time than PIL and gives the same pixels

_RGB = 3  # torchvision.io.ImageReadMode.RGB
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # a pipe would wait for its other end
_UNKNOWN = (RuntimeError, AttributeError)  # of a file, or of the operator in this torchvision


def read_pixels(path: str) -> Array:
    """An image file as (height, width, 3) uint8; DataError if it is none."""
    import torchvision.io  # noqa: F401 - late: it takes seconds; it has the operators

    if (data := read_jpeg(path)) is not None:
        with contextlib.suppress(*_UNKNOWN):  # PIL says what is wrong, if it is
            found: Array = torch.ops.image.decode_jpeg(data, _RGB).permute(1, 2, 0).numpy()
            return found
    return np.array(decode(path))  # a copy that torch may write to


def read_jpeg(path: str) -> Tensor | None:
    """The bytes of a whole JPEG file, grey or YCbCr of 8 bits; None for anything else, of which PIL knows more."""
    try:  # by few calls: threads that read many files wait for each other at each
        file = os.open(path, _FLAGS)
    except OSError:
        return None
    try:
        facts = os.fstat(file)
        data = os.read(file, facts.st_size) if stat.S_ISREG(facts.st_mode) else b""
    except OSError:
        return None
    finally:
        os.close(file)
    if len(data) != facts.st_size or not data.startswith(b"\xff\xd8") or not data.endswith(b"\xff\xd9"):
        return None
    at = 2
    while at + 19 < len(data) and data[at] == 0xFF:
        kind, length = struct.unpack_from(">BH", data, at + 1)
        if kind in (0xC0, 0xC1, 0xC2):  # baseline, extended, progressive
            bits, height, width, channels, first = struct.unpack_from(">BHHBB", data, at + 4)
            fits = 0 < height * width <= (PIL.Image.MAX_IMAGE_PIXELS or 0) and 0.01 < height / width < 100
            fits = fits and bits == 8 and channels in (1, 3) and first != ord("R")
            return torch.frombuffer(bytearray(data), dtype=torch.uint8) if fits else None
        if kind == 0xEE and data[at + 15] != 1:  # Adobe's note that it is not YCbCr
            return None
        at += 2 + length
    return None


def decode_there(files: Sequence[Tensor], device: torch.device) -> list[Tensor | None]:
    """JPEG files as (3, height, width) on a GPU; None for one that it cannot decode."""
    try:
        return list(torch.ops.image.decode_jpegs_cuda(list(files), _RGB, device)) if files else []
    except _UNKNOWN:  # it does not say which
        half = len(files) // 2
        return [*decode_there(files[:half], device), *decode_there(files[half:], device)] if half else [None]


@functools.cache
def decodes(device: torch.device) -> bool:
    """True for a GPU that decodes JPEGs."""
    import torchvision.io  # noqa: F401

    PIL.Image.new("RGB", (16, 16)).save(file := io.BytesIO(), "JPEG")
    data = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    return device.type == "cuda" and decode_there([data], device)[0] is not None


# where to crop: for N images (N, 2, 5), of height and width (start, step, low, high, flip): output pixel i is seen
# around start + (i + 0.5) * step, between low and high; mirrored if flip

_TRIES = 10
DRAWS = 2 * _TRIES + 3  # random numbers of an image


def random_numbers(key: int, indices: Array, count: int = DRAWS) -> Array:
    """Numbers in [0, 1) that are a function of key, index and place: (N,) -> (N, count), by SplitMix64."""
    places = indices.astype(np.uint64)[:, None] * np.uint64(count) + np.arange(1, count + 1, dtype=np.uint64)
    bits: Any = np.uint64(key) + places * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray((bits ^ (bits >> np.uint64(31))) >> np.uint64(11), np.float64) / 2**53


def random_boxes(sizes: Array, size: Size, numbers: Array) -> Array:
    """The law of torchvision's RandomResizedCrop and flip: sizes (N, 2) and numbers (N, DRAWS) -> boxes.

    Ratios are relative to the crop's, so that it is stretched as much as a square would be.
    """
    height, width = (side[:, None] for side in sizes.T.astype(float))
    low, high = (ratio * size[1] / size[0] for ratio in (3 / 4, 4 / 3))
    area = height * width * (0.08 + 0.92 * numbers[:, :_TRIES])
    ratio, usual = low * (high / low) ** numbers[:, _TRIES:-3], np.clip(width / height, low, high)
    # the last is taken where no other one fits: the middle
    tall = np.hstack([np.rint(np.sqrt(area / ratio)), np.clip(np.rint(width / usual), 1, height)])
    wide = np.hstack([np.rint(np.sqrt(area * ratio)), np.clip(np.rint(height * usual), 1, width)])
    first = ((tall > 0) & (tall <= height) & (wide > 0) & (wide <= width)).argmax(1)[:, None]
    own = np.hstack([np.take_along_axis(sides, first, 1) for sides in (tall, wide)])  # (N, 2)
    room = sizes - own
    start = np.where(first == _TRIES, room // 2, np.floor(numbers[:, -3:-1] * (room + 1)))
    flips = (numbers[:, -1:] < 0.5) * [0, 1]
    return np.stack([start, own / size, start, start + own, flips], axis=2)


def middle_boxes(sizes: Array, size: Size) -> Array:
    """The middle of images that are scaled, with their aspect ratio, to just cover `before_crop`."""
    covered = np.array([_cover(own, before_crop(size)) for own in sizes.tolist()]).reshape(-1, 2)
    step, none = sizes / covered, np.zeros(sizes.shape)
    return np.stack([np.rint((covered - size) / 2) * step, step, none, sizes, none], axis=2)


def _cover(size: Sequence[int], least: Size) -> Size:
    """Height and width at which an image just covers these."""
    (height, width), (tall, wide) = size, least
    return (wide * height // width, wide) if wide * height >= tall * width else (tall, tall * width // height)


# cropping and resizing with PIL's triangle filter, which is torchvision's antialiased bilinear one


def crop_here(image: Array, box: Array, size: Size) -> Array:
    """One image by PIL, on one core: (height, width, 3) and (2, 5) -> (*size, 3)."""
    start, step, low, high, flip = box.T
    (top, left), (bottom, right) = low.astype(int), high.astype(int)
    (y, x), covered = np.rint((start - low) / step).astype(int), np.rint((high - low) / step).astype(int)
    found = _resize(image[top:bottom, left:right], covered.tolist())[y : y + size[0], x : x + size[1]]
    return found[:, ::-1] if flip[1] else found


def _resize(image: Array, size: Sequence[int]) -> Array:
    return np.asarray(PIL.Image.fromarray(image).resize((size[1], size[0]), PIL.Image.Resampling.BILINEAR))


_AT_ONCE = 2**25  # bytes of images that are cropped at once; their indices take eight times as much


def crop_there(
    flat: Tensor, starts: Array, sizes: Array, boxes: Array, labels: Array, size: Size, planar: bool = False
) -> tuple[Tensor, Tensor]:
    """Images of these sizes that start here in a row of bytes -> images (N, 3, *size), normalized, and labels (N,).

    They lie there as (height, width, 3), planar ones as (3, height, width). Two batched matrix products; in half
    precision on a GPU, which is finer than PIL's steps of uint8.
    """
    device, dtype, count = flat.device, torch.float16 if flat.is_cuda else torch.float32, len(labels)
    start, step, low, high, flip = boxes.transpose(2, 1, 0)  # (2, N) each
    pixel, plane = (1, sizes.prod(1)) if planar else (3, np.ones(count))
    begin, down = starts + pixel * (low[0] * sizes[:, 1] + low[1]), pixel * sizes[:, 1]
    table = torch.from_numpy(np.stack([*(start - low), *step, *(high - low), *flip, begin, down, plane, labels]))
    table = (table.pin_memory() if flat.is_cuda else table).to(device, non_blocking=True)  # float64: exact
    images, (mean, std) = torch.empty((count, 3, *size), device=device), scale(device)
    rows, columns = (-(-int(side.max(initial=1)) // 8) * 8 for side in high - low)  # eights suit tensor cores
    y, x, channel = (torch.arange(it, device=device) for it in (rows, columns, 3))
    at_once = max(1, _AT_ONCE // (3 * rows * columns))
    for first in range(0, count, at_once):
        some = table[:, first : first + at_once]
        bottom, right, _, _, begin_, down_, plane_, _ = some[4:].long()[:, :, None]
        inside = (begin_ + down_ * torch.minimum(y, bottom - 1))[:, :, None, None] + (plane_ * channel)[
            :, None, :, None
        ]
        pixels = flat[inside + pixel * torch.minimum(x, right - 1)[:, None, None]].to(dtype)  # (n, rows, 3, columns)
        narrow = torch.bmm(pixels.flatten(1, 2), _weights(some[1:8:2], size[1], columns).to(dtype).mT)
        found = torch.bmm(_weights(some[:8:2], size[0], rows).to(dtype), narrow.view(-1, rows, 3 * size[1]))
        torch.sub(found.view(-1, size[0], 3, size[1]).transpose(1, 2), mean, out=images[first : first + at_once])
    return images.div_(std), table[-1].long()


def _weights(axis: Tensor, size: int, pixels: int) -> Tensor:
    """How much of each pixel is in each output: (start, step, extent, flip) of n images -> (n, size, pixels)."""
    start, step, extent, flip = axis.float()[:, :, None, None]
    place = torch.arange(size, device=axis.device)[:, None] + 0.5
    centre = start + step * torch.where(flip > 0, size - place, place)
    pixel = torch.arange(pixels, device=axis.device) + 0.5
    weights: Tensor = (1 - (pixel - centre).abs() / step.clamp(min=1)).clamp(min=0) * (pixel < extent)
    return weights / weights.sum(2, keepdim=True)


@functools.cache
def scale(device: torch.device | str) -> Any:
    """Mean and standard deviation of 0..255."""
    return tuple((255 * torch.tensor(it)[:, None, None]).to(device) for it in (MEAN, STD))


def grey(images: Tensor) -> Tensor:
    """Normalized images (N, 3, height, width) in grey: (N, 1, height, width)."""
    parts = zip((0.299, 0.587, 0.114), STD, images.unbind(1), strict=True)
    red, green, blue = (share * std / SCALES[1][1][0] * plane for share, std, plane in parts)
    return (red + green + blue)[:, None]


# decoded images that are kept

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "dmcp")
SHARE = 0.25  # of the memory of host and device that the images of train/ or val/ may take
_STORES: weakref.WeakValueDictionary[tuple[Path, str], Store] = weakref.WeakValueDictionary()


class Store:
    """Decoded images of train/ or val/."""

    def __init__(self, flat: Tensor, sizes: Tensor, reasons: dict[str, str]) -> None:
        self.flat = flat  # uint8: one image after the other, each (height, width, 3)
        self.sizes = sizes.numpy()  # (N, 2); 0 where an image cannot be read
        self.reasons = reasons  # why, by place
        self.starts = np.cumsum(3 * self.sizes.prod(1)) - 3 * self.sizes.prod(1)
        self.there: Tensor | None = None  # flat on the GPU

    def image(self, place: int) -> Array:
        """(height, width, 3); DataError for a file that could not be read."""
        if str(place) in self.reasons:
            raise DataError(self.reasons[str(place)])
        size, start = self.sizes[place], self.starts[place]
        return self.flat[start : start + 3 * size.prod()].numpy().reshape(*size, 3)

    def moved(self, device: torch.device) -> bool:
        """True if the bytes lie on this GPU, as they do if they fit into half of its free memory."""
        if self.there is None and device.type == "cuda" and 2 * len(self.flat) < torch.cuda.mem_get_info(device)[0]:
            self.there = self.flat.to(device)
        return self.there is not None


def open_store(dataset: FolderSet, train: bool, device: torch.device, workers: int) -> Store | None:
    """The images of the part of the folder that a data set is of; None if they take more than a share of the memory.

    They are decoded once, by one of the processes that want them, and kept in a file until the folder changes. Those
    for training that cover more than twice the crop are scaled down to that; test images to what they are cropped from.
    """
    paths, most = dataset.whole or dataset.paths, int(SHARE * _memory(device))
    least = (2 * dataset.size[0], 2 * dataset.size[1]) if train else before_crop(dataset.size)
    looked = [it for it in _look_at(paths[:: -(-len(paths) // 100)], whole=False) if not isinstance(it, Broken)]
    bytes_ = [3 * int(np.prod(_cover(it, least) if min(np.subtract(it, least)) > 0 else it)) for it in looked]
    guess, once = np.mean(bytes_ or [0]) * len(paths), dataset.whole and not train
    if once or not guess or guess > most:  # once: some training images that are tested, not worth a store of them all
        return None
    part = os.path.relpath(paths[0], dataset.root).split(os.sep)[0]
    name = hashlib.sha256(os.fsencode(f"{os.path.abspath(dataset.root)} {part} {least}")).hexdigest()[:16]
    digest = hashlib.sha256()
    for path in paths:
        found = os.stat(path) if os.path.exists(path) else None
        facts = f"{path[len(dataset.root) :]}\0{found and (found.st_size, found.st_mtime_ns)}\0"
        digest.update(os.fsencode(facts))  # a name need not be UTF-8
    key = CACHE / f"{name}.images", digest.hexdigest()
    if store := _STORES.get(key) or _read(*key, paths):
        return _STORES.setdefault(key, store)
    build = partial(_decode, paths, least, min(most, int(2 * guess) + 2**20), workers, part)
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{key[0]}.lock"):
            store = _read(*key, paths)  # of another process, meanwhile
            if store is None and (store := build()):
                _write(*key, store)
                store = _read(*key, paths) or store
    except (OSError, NotImplementedError, SafetensorError) as error:  # some file systems have no locks
        if store := store or build():
            lost = "they stay in memory, and are decoded again next time"
            warnings.warn(f"{CACHE}: the decoded images cannot be kept there ({error}): {lost}.", stacklevel=2)
    return _STORES.setdefault(key, store) if store else None


def _memory(device: torch.device) -> int:
    """Bytes that the host has, or its container, or the device, if that is less."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**33]
    for limit in CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path(limit).read_text()))
    return min(found + ([torch.cuda.mem_get_info(device)[1]] if device.type == "cuda" else []))


def _kept(path: str, least: Size) -> Array | str:
    """An image, scaled down if it is larger; or why it cannot be read."""
    try:
        image = read_pixels(path)
    except DataError as error:
        return str(error)
    larger = image.shape[0] > least[0] and image.shape[1] > least[1]
    return _resize(image, _cover(image.shape[:2], least)) if larger else image


def _decode(paths: Sequence[str], least: Size, most: int, workers: int, part: str) -> Store | None:
    """All images, in their order; None if they are more bytes than that."""
    PIL.Image.init()  # else threads that meet a rare file format at the same time do not all know it
    flat, sizes, reasons, end = np.empty(most, np.uint8), torch.zeros(len(paths), 2).long(), dict[str, str](), 0
    with ThreadPool(workers) as pool, phase(f"decode {part}", len(paths)) as update:
        for place, found in enumerate(pool.imap(partial(_kept, least=least), paths, chunksize=8)):
            if isinstance(found, str):
                reasons[str(place)] = found
            elif end + found.size > most:
                return None
            else:
                flat[end : end + found.size] = found.reshape(-1)
                sizes[place], end = torch.tensor(found.shape[:2]), end + found.size
            update(place + 1)
    return Store(torch.from_numpy(flat[:end]), sizes, reasons)  # what is not used of flat takes no memory


def _write(file: Path, digest: str, store: Store) -> None:
    """A safetensors file; that library would copy all bytes in memory first."""
    sizes, flat = store.sizes.tobytes(), store.flat.numpy().data
    ends = np.cumsum([0, len(sizes), len(flat)]).tolist()
    header: dict[str, Any] = {"__metadata__": {"digest": digest, "reasons": json.dumps(store.reasons)}}
    header["sizes"] = {"dtype": "I64", "shape": store.sizes.shape, "data_offsets": ends[:2]}
    header["flat"] = {"dtype": "U8", "shape": [len(flat)], "data_offsets": ends[1:]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    write_files(file.parent, {file.name: (len(text).to_bytes(8, "little"), text, sizes, flat)})


def _read(file: Path, digest: str, paths: Sequence[str]) -> Store | None:
    """What a file holds, mapped into memory; None if it is not whole, of other images, or some can be read by now."""
    with contextlib.suppress(OSError, SafetensorError), safe_open(file, "pt") as parts:
        if (facts := parts.metadata() or {}).get("digest") == digest:
            reasons = json.loads(facts["reasons"])
            if all(isinstance(_kept(paths[int(place)], (1, 1)), str) for place in reasons):
                return Store(parts.get_tensor("flat"), parts.get_tensor("sizes"), reasons)
    return None
