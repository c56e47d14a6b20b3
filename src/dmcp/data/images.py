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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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

from dmcp.data.datasets import MEAN, STD, Broken, FolderSet, _look_at, before_crop, decode
from dmcp.errors import DataError
from dmcp.progress import phase
from dmcp.runtime.io import write_files

Array = np.ndarray[Any, np.dtype[Any]]

# decoding: JPEGs by torchvision, which keeps Python's lock a third as long as PIL and gives the same pixels


def read_jpeg(path: str) -> Tensor | None:
    """The bytes of a whole JPEG file, grey or YCbCr of 8 bits; None for anything else, of which PIL knows more."""
    try:
        with open(path, "rb", buffering=0, opener=_open_now) as file:
            facts = os.fstat(file.fileno())
            data = bytearray(facts.st_size if stat.S_ISREG(facts.st_mode) else 0)
            whole = file.readinto(data) == len(data) > 0
    except OSError:
        return None
    return torch.frombuffer(data, dtype=torch.uint8) if whole and _plain_jpeg(data) else None


def _open_now(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # a pipe would wait for its other end


def _plain_jpeg(data: bytearray) -> bool:
    if not data.startswith(b"\xff\xd8") or not data.endswith(b"\xff\xd9"):
        return False
    at = 2
    while at + 19 < len(data) and data[at] == 0xFF:
        kind, length = struct.unpack_from(">BH", data, at + 1)
        if kind in (0xC0, 0xC1, 0xC2):  # baseline, extended, progressive
            bits, height, width, channels, first = struct.unpack_from(">BHHBB", data, at + 4)
            small = 0 < height * width <= (PIL.Image.MAX_IMAGE_PIXELS or 0)
            return bits == 8 and channels in (1, 3) and first != ord("R") and small
        if kind == 0xEE and data[at + 15] != 1:  # Adobe's note that it is not YCbCr
            return False
        at += 2 + length
    return False


_RGB = 3  # torchvision.io.ImageReadMode.RGB


def read_pixels(path: str) -> Array:
    """An image file as (height, width, 3) uint8; DataError if it is none."""
    if (data := read_jpeg(path)) is not None and (jpeg := _decoder("decode_jpeg")) is not None:
        with contextlib.suppress(RuntimeError):  # PIL says what is wrong, if it is
            return jpeg(data, _RGB).permute(1, 2, 0).contiguous().numpy()  # type: ignore[no-any-return]
    return np.array(decode(path))  # a copy that torch may write to


@functools.cache
def _decoder(name: str) -> Callable[..., Any] | None:
    """The operator of torchvision, without the Python around it; None where this torchvision has none."""
    import torchvision.io  # noqa: F401 - late: it takes seconds

    return getattr(torch.ops.image, name, None)


def decode_there(files: Sequence[Tensor], device: torch.device) -> list[Tensor | None]:
    """JPEG files as (3, height, width) on a GPU; None for one that the GPU cannot decode."""
    jpegs = _decoder("decode_jpegs_cuda")
    assert jpegs is not None
    try:
        return list(jpegs(list(files), _RGB, device)) if files else []
    except RuntimeError:  # it does not say which
        half = len(files) // 2
        return [*decode_there(files[:half], device), *decode_there(files[half:], device)] if half else [None]


@functools.cache
def decodes(device: torch.device) -> bool:
    """True for a GPU whose decoder makes of a JPEG what the CPU's makes of it, but for rounding."""
    if device.type != "cuda" or _decoder("decode_jpegs_cuda") is None:
        return False
    file, ramp = io.BytesIO(), np.mgrid[:64, :64, :3].sum(0).astype(np.uint8)
    PIL.Image.fromarray(ramp).save(file, "JPEG", quality=95)
    found = decode_there([torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)], device)[0]
    return found is not None and bool((found.cpu().permute(1, 2, 0) - torch.from_numpy(ramp).int()).abs().max() < 16)


# where to crop


def random_numbers(key: int, indices: Array, count: int) -> Array:
    """Numbers in [0, 1) that are a function of key, index and place: (N,) -> (N, count), by SplitMix64."""
    places = indices.astype(np.uint64)[:, None] * np.uint64(count) + np.arange(1, count + 1, dtype=np.uint64)
    bits: Array = np.uint64(key) + places * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: Array = np.divide((bits ^ (bits >> np.uint64(31))) >> np.uint64(11), 2.0**53)
    return found


@dataclass(frozen=True, eq=False)
class Boxes:
    """What is kept of each image: output pixel i lies at start + (i + 0.5) * step, seen from `low` to `high` only."""

    axes: Array  # (N, 2, 4): of height and width the start, step, low, high
    flips: Array  # (N,) bool


_TRIES = 10
DRAWS = 2 * _TRIES + 3


def random_boxes(sizes: Array, size: tuple[int, int], numbers: Array) -> Boxes:
    """As torchvision's RandomResizedCrop and flip: sizes (N, 2) and numbers (N, DRAWS) -> boxes.

    The ratio is that of the crop, so that it is stretched as much as a square would be.
    """
    height, width = (side[:, None] for side in sizes.T.astype(float))
    low, high = (ratio * size[1] / size[0] for ratio in (3 / 4, 4 / 3))
    area = height * width * (0.08 + 0.92 * numbers[:, :_TRIES])
    ratio = np.exp(np.log(low) + np.log(high / low) * numbers[:, _TRIES : 2 * _TRIES])
    ratio = np.hstack([ratio, np.clip(width / height, low, high)])  # if none of the others fits: the middle
    tall = np.rint(np.sqrt(np.hstack([area, height * width]) / ratio))
    wide = np.rint(np.sqrt(np.hstack([area, height * width]) * ratio))
    tall[:, -1:] = np.clip(np.rint(width / ratio[:, -1:]), 1, height)
    wide[:, -1:] = np.clip(np.rint(height * ratio[:, -1:]), 1, width)
    first = ((tall > 0) & (tall <= height) & (wide > 0) & (wide <= width)).argmax(1)[:, None]
    own = np.hstack([np.take_along_axis(sides, first, 1) for sides in (tall, wide)])  # (N, 2)
    room = sizes - own
    start = np.where(first == _TRIES, room // 2, np.floor(numbers[:, -3:-1] * (room + 1)))
    return Boxes(np.stack([start, own / size, start, start + own], axis=2), numbers[:, -1] < 0.5)


def middle_boxes(sizes: Array, size: tuple[int, int]) -> Boxes:
    """The middle of images that are scaled, with their aspect ratio, to just cover `before_crop`."""
    (height, width), (tall, wide) = sizes.T, before_crop(size)
    meets_width = wide * height >= tall * width
    high = np.where(meets_width, wide * height // width, tall)
    covered = np.stack([high, np.where(meets_width, wide, tall * width // height)], axis=1)
    step = sizes / covered
    start = np.rint((covered - size) / 2) * step
    return Boxes(np.stack([start, step, np.zeros_like(step), sizes], axis=2), np.zeros(len(sizes), bool))


# cropping and resizing: the triangle filter of PIL, that is torchvision's antialiased bilinear one


def crop_here(image: Array, axes: Array, flip: bool, size: tuple[int, int]) -> Array:
    """One image (height, width, 3) by PIL: (2, 4) -> (*size, 3)."""
    (start, step, low, high) = axes.T
    (top, left), (bottom, right) = low.astype(int).tolist(), high.astype(int).tolist()
    covered = np.rint((high - low) / step).astype(int).tolist()
    (y, x), (rows, columns) = np.rint((start - low) / step).astype(int).tolist(), size
    whole = PIL.Image.fromarray(image[top:bottom, left:right])
    found = np.asarray(whole.resize((covered[1], covered[0]), PIL.Image.Resampling.BILINEAR))
    found = found[y : y + rows, x : x + columns]
    return found[:, ::-1] if flip else found


@dataclass(frozen=True, eq=False)
class Pixels:
    """Images of a batch on a device: bytes in a row, and where they are."""

    flat: Tensor  # uint8
    starts: Array  # (N,) of the images in it
    sizes: Array  # (N, 2)
    planar: Array  # (N,) bool: (3, height, width), not (height, width, 3)


_AT_ONCE = 2**26  # bytes of images that are cropped at once; their indices take eight times as much


def crop_there(pixels: Pixels, boxes: Boxes, labels: Array, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """A batch on the device of its pixels: images (N, 3, *size), normalized, and labels (N,)."""
    device, (height, width), none = pixels.flat.device, pixels.sizes.T, np.zeros(len(labels))
    down, right = np.where(pixels.planar, width, 3 * width), np.where(pixels.planar, 1, 3)  # bytes to the next pixel
    start, step, low, high = boxes.axes.transpose(2, 1, 0)  # (2, N) each
    begin, plane = pixels.starts + down * low[0] + right * low[1], np.where(pixels.planar, height * width, 1)
    axes = [(start[it] - low[it], step[it], (high - low)[it], flips) for it, flips in enumerate((none, boxes.flips))]
    table = torch.from_numpy(np.stack([begin, down, right, plane, labels, *axes[0], *axes[1]]))  # float64 is exact
    table = (table.pin_memory() if device.type == "cuda" else table).to(device, non_blocking=True)
    images, (mean, std) = torch.empty((len(labels), 3, *size), device=device), scale(device)
    rows, columns = (-(-int(side.max(initial=1)) // 8) * 8 for side in high - low)  # eights suit tensor cores
    count = max(1, _AT_ONCE // (3 * rows * columns))
    for first in range(0, len(labels), count):
        found = _crop(pixels.flat, table[:, first : first + count], (rows, columns), size)
        torch.sub(found, mean, out=images[first : first + count])
    return images.div_(std), table[4].long()


@functools.cache
def scale(device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of 0..255."""
    mean, std = (torch.tensor(it, device=device)[:, None, None] * 255 for it in (MEAN, STD))
    return mean, std


def _crop(flat: Tensor, table: Tensor, canvas: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Two batched matrix products: (n, 3, *size), in half precision on a GPU, which is finer than PIL's uint8."""
    device, dtype, (rows, columns) = flat.device, torch.float16 if flat.is_cuda else torch.float32, canvas
    begin, down, right, plane = table[:4].long()[..., None, None, None]
    y = torch.minimum(torch.arange(rows, device=device), table[7].long()[:, None] - 1)[:, :, None, None]
    x = torch.minimum(torch.arange(columns, device=device), table[11].long()[:, None] - 1)[:, None, None]
    places = begin + down * y + plane * torch.arange(3, device=device)[:, None] + right * x
    pixels = flat[places].to(dtype).flatten(1, 2)  # (n, rows * 3, columns)
    narrow = torch.bmm(pixels, _weights(table[9:], size[1], columns).to(dtype).mT).view(len(pixels), rows, -1)
    found = torch.bmm(_weights(table[5:9], size[0], rows).to(dtype), narrow)
    return found.view(-1, size[0], 3, size[1]).transpose(1, 2)


def _weights(axis: Tensor, size: int, pixels: int) -> Tensor:
    """How much of each pixel is in each output: (start, step, extent, flip) of n images -> (n, size, pixels)."""
    start, step, extent, flip = axis.float()[:, :, None, None]
    place = torch.arange(size, device=axis.device)[:, None] + 0.5
    centre = start + step * torch.where(flip > 0, size - place, place)
    pixel = torch.arange(pixels, device=axis.device) + 0.5
    weights: Tensor = (1 - (pixel - centre).abs() / step.clamp(min=1)).clamp(min=0) * (pixel < extent)
    return weights.div_(weights.sum(2, keepdim=True))


# decoded images that are kept

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "dmcp")
SHARE = 0.25  # of the memory of host and device that the images of train/ or val/ may take


@dataclass(frozen=True, eq=False)
class Store:
    """Decoded images of train/ or val/, those that are much larger than needed scaled down."""

    flat: Tensor  # uint8: one image after the other, each (height, width, 3)
    sizes: Array  # (N, 2); 0 where an image cannot be read
    reasons: dict[str, str]  # why, by place
    starts: Array = field(init=False)

    def __post_init__(self) -> None:
        ends = np.cumsum(3 * self.sizes.prod(1))
        object.__setattr__(self, "starts", np.concatenate([[0], ends[:-1]]))

    def image(self, place: int) -> Array:
        """(height, width, 3); DataError for a file that could not be read."""
        if not self.sizes[place, 0]:
            raise DataError(self.reasons[str(place)])
        size, start = self.sizes[place].tolist(), int(self.starts[place])
        return self.flat[start : start + 3 * size[0] * size[1]].numpy().reshape(*size, 3)

    def on(self, device: torch.device) -> Tensor | None:
        """The bytes on a GPU, if half of its free memory is enough for them."""
        there = _THERE.get((self, device))
        if there is None and device.type == "cuda" and 2 * len(self.flat) <= torch.cuda.mem_get_info(device)[0]:
            there = _THERE[self, device] = self.flat.to(device)
        return there


_THERE: weakref.WeakValueDictionary[tuple[Store, torch.device], Tensor] = weakref.WeakValueDictionary()
_STORES: weakref.WeakValueDictionary[tuple[Path, str], Store] = weakref.WeakValueDictionary()


def open_store(dataset: FolderSet, train: bool, device: torch.device, workers: int) -> Store | None:
    """The images of the part of the folder that a data set is of; None if they take more than a share of the memory.

    They are decoded once, by one of the processes that want them, and kept in a file until the folder changes. Those
    for training that cover more than twice the crop are scaled down to that; test images to what they are cropped from.
    """
    paths, most = dataset.whole or dataset.paths, int(SHARE * _memory(device))
    cover = (2 * dataset.size[0], 2 * dataset.size[1]) if train else before_crop(dataset.size)
    looked = [it for it in _look_at(paths[:: -(-len(paths) // 100)], whole=False) if not isinstance(it, Broken)]
    once = dataset.whole and not train  # some training images that are tested: not worth a store of them all
    if once or not looked or np.mean([3 * np.prod(_shrunk(size, cover)) for size in looked]) * len(paths) > most:
        return None
    part = os.path.relpath(paths[0], dataset.root).split(os.sep)[0]
    name = hashlib.sha256(f"{os.path.abspath(dataset.root)} {part} {cover}".encode()).hexdigest()[:16]
    file = CACHE / f"{name}.images"
    key = file, _digest(paths, len(dataset.root))
    store = _STORES.get(key) or _read(*key)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.nullcontext() if store else FileLock(f"{file}.lock"):
            store = store or _read(*key)  # of another process, meanwhile
            if store is None and (store := _decode(paths, cover, most, workers, part)):
                _write(*key, store)
                store = _read(*key) or store
    except (OSError, NotImplementedError) as error:  # some file systems have no locks
        if store := store or _decode(paths, cover, most, workers, part):
            lost = "they stay in memory, and are decoded again next time"
            warnings.warn(f"{file.parent}: the decoded images cannot be kept there ({error}): {lost}.", stacklevel=2)
    if store:
        _STORES[key] = store
    return store


def _memory(device: torch.device) -> int:
    """Bytes that the host has, or its container, or the device, if that is less."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**33]
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            found.append(int(Path(limit).read_text()))
    return min(found + ([torch.cuda.mem_get_info(device)[1]] if device.type == "cuda" else []))


def _digest(paths: Sequence[str], start: int) -> str:
    """Of the names, sizes and times of files."""
    found = hashlib.sha256()
    for path in paths:
        with contextlib.suppress(OSError):
            facts = os.stat(path)
            found.update(f"{path[start:]}\0{facts.st_size} {facts.st_mtime_ns}\0".encode())
    return found.hexdigest()


def _decode(paths: Sequence[str], cover: tuple[int, int], most: int, workers: int, part: str) -> Store | None:
    """All images, in their order; None if they are more bytes than that."""
    PIL.Image.init()  # else threads that meet a rare file format at the same time do not all know it
    flat, sizes, reasons, end = np.empty(most, np.uint8), np.zeros((len(paths), 2), np.int64), dict[str, str](), 0
    with ThreadPool(workers) as pool, phase(f"decode {part}", len(paths)) as update:
        for place, found in enumerate(pool.imap(partial(_kept, cover=cover), paths, chunksize=8)):
            if isinstance(found, str):
                reasons[str(place)] = found
            elif end + found.size > most:
                return None
            else:
                flat[end : end + found.size] = found.reshape(-1)
                sizes[place], end = found.shape[:2], end + found.size
            update(place + 1)
    return Store(torch.from_numpy(flat[:end]), sizes, reasons)  # what is not used of flat takes no memory


def _kept(path: str, cover: tuple[int, int]) -> Array | str:
    """What is kept of an image, or why it cannot be read."""
    try:
        image = read_pixels(path)
    except DataError as error:
        return str(error)
    size = _shrunk(image.shape[:2], cover)
    if size == image.shape[:2]:
        return image
    return np.asarray(PIL.Image.fromarray(image).resize((size[1], size[0]), PIL.Image.Resampling.BILINEAR))


def _shrunk(size: Sequence[int], cover: tuple[int, int]) -> tuple[int, ...]:
    """Height and width at which an image just covers these, if it is larger."""
    (height, width), (tall, wide) = size, cover
    if height <= tall or width <= wide:
        return height, width
    return (wide * height // width, wide) if wide * height >= tall * width else (tall, tall * width // height)


def _write(file: Path, digest: str, store: Store) -> None:
    """A safetensors file, without a second copy of the bytes in memory."""
    parts = {"sizes": store.sizes.view(np.uint8).reshape(-1), "flat": store.flat.numpy()}
    header: dict[str, Any] = {"__metadata__": {"digest": digest, "reasons": json.dumps(store.reasons)}}
    end = 0
    for name, data in parts.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    write_files(file.parent, {file.name: (struct.pack("<Q", len(text)), text, *(it.data for it in parts.values()))})


def _read(file: Path, digest: str) -> Store | None:
    """What `_write` wrote, mapped into memory; None if it is not whole, or of other images."""
    try:
        with safe_open(file, "pt") as parts:
            facts = parts.metadata() or {}
            if facts.get("digest") == digest:
                sizes = parts.get_tensor("sizes").view(torch.int64).reshape(-1, 2).numpy()
                return Store(parts.get_tensor("flat"), sizes, json.loads(facts["reasons"]))
    except (OSError, SafetensorError):
        pass
    return None
