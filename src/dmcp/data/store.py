"""Decoded images that are kept, in memory and in a file, until the folder of the data set changes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
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

from dmcp.data.folders import FolderSet
from dmcp.data.images import Array, Broken, Size, before_crop, cover, inspect_files, read_pixels, resize
from dmcp.errors import DataError, warn
from dmcp.runtime.io import CONTAINER_LIMITS, write_files
from dmcp.runtime.progress import phase

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "dmcp")
SHARE = 0.25  # of the memory of host and device that the images of train/ or val/ may take
_DECODING = b"turned by EXIF"  # how files become pixels: caches of another way are made again
_LOOKED_AT = 100  # images whose sizes tell how much memory all will take
_STORES: weakref.WeakValueDictionary[tuple[Path, str], Store] = weakref.WeakValueDictionary()


class Store:
    """Decoded images of train/ or val/."""

    def __init__(self, flat: Tensor, sizes: Tensor, reasons: dict[str, str]) -> None:
        self.flat = flat  # uint8: one image after the other, each (height, width, 3)
        self.sizes = sizes.numpy()  # (N, 2); 0 where an image cannot be read
        self.reasons = reasons  # why it cannot be read, by the index of the image
        lengths = 3 * self.sizes.prod(1)
        self.starts = np.cumsum(lengths) - lengths
        self._flat_on_gpu: Tensor | None = None

    def image(self, index: int) -> Array:
        """Return an image as (height, width, 3); DataError for a file that could not be read."""
        if str(index) in self.reasons:
            raise DataError(self.reasons[str(index)])
        size = self.sizes[index]
        start = self.starts[index]
        return self.flat[start : start + 3 * size.prod()].numpy().reshape(*size, 3)

    def on_gpu(self, device: torch.device) -> Tensor | None:
        """Return the bytes of all images on a GPU if they fit into half of its free memory; else None."""
        if self._flat_on_gpu is None and device.type == "cuda":
            free_bytes, _ = torch.cuda.mem_get_info(device)
            if 2 * len(self.flat) < free_bytes:
                self._flat_on_gpu = self.flat.to(device)
        return self._flat_on_gpu


def open_store(dataset: FolderSet, train: bool, device: torch.device, workers: int) -> Store | None:
    """Open the images of the whole part (train/ or val/) of a folder; None if they take too much of the memory.

    They are decoded once, by one of the processes that ask for them, and kept in a file until the folder changes.
    Training images that cover more than twice the crop are scaled down to that, test images to what they are cropped
    from.
    """
    paths = dataset.whole or dataset.paths
    height, width = dataset.size
    least = (2 * height, 2 * width) if train else before_crop(dataset.size)
    if dataset.whole and not train:
        return None  # some training images that are tested: decoding all of them would not pay

    # Whether they fit.
    expected_bytes = _expected_bytes(paths, least)
    allowed_bytes = int(SHARE * _memory(device))
    if not 0 < expected_bytes <= allowed_bytes:
        return None

    # The file is named after folder, part and size; the digest shows whether it holds the images of today.
    part = dataset.part
    name = hashlib.sha256(os.fsencode(f"{os.path.abspath(dataset.root)} {part} {least}")).hexdigest()[:16]
    file = CACHE / f"{name}.images"
    digest = _digest_of_files(paths, dataset.root)

    store = _STORES.get((file, digest)) or _read(file, digest, paths)
    if store is None:
        most_bytes = min(allowed_bytes, int(2 * expected_bytes) + 2**20)
        store = _build(file, digest, paths, least, most_bytes, workers, part)
    if store is None:
        return None
    return _STORES.setdefault((file, digest), store)


def _expected_bytes(paths: Sequence[str], least: Size) -> float:
    """Estimate the memory that all images take from the sizes of some."""
    every = -(-len(paths) // _LOOKED_AT)
    image_bytes = [0]
    sizes = [size for size in inspect_files(paths[::every], whole=False) if not isinstance(size, Broken)]
    if sizes:
        image_bytes = [3 * int(np.prod(_kept_size(size, least))) for size in sizes]
    return float(np.mean(image_bytes) * len(paths))


def _memory(device: torch.device) -> int:
    """Return the bytes of memory of the host, its container or the device, whichever has the least."""
    sizes = [2**33]
    if hasattr(os, "sysconf"):
        sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for limit in CONTAINER_LIMITS:
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(Path(limit).read_text()))
    if device.type == "cuda":
        _, device_bytes = torch.cuda.mem_get_info(device)
        sizes.append(device_bytes)
    return min(sizes)


def _digest_of_files(paths: Sequence[str], root: str) -> str:
    """Hash the names, sizes and times of image files, and how they are decoded."""
    digest = hashlib.sha256(_DECODING)
    for path in paths:
        state = None
        if os.path.exists(path):
            status = os.stat(path)
            state = (status.st_size, status.st_mtime_ns)
        digest.update(os.fsencode(f"{path[len(root) :]}\0{state}\0"))  # a name need not be UTF-8
    return digest.hexdigest()


def _build(
    file: Path, digest: str, paths: Sequence[str], least: Size, most_bytes: int, workers: int, part: str
) -> Store | None:
    """Decode all images and write them to the file, unless another process does so meanwhile."""
    store = None
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{file}.lock"):
            store = _read(file, digest, paths)  # another process may have written it while this one waited
            if store is None:
                store = _decode_all(paths, least, most_bytes, workers, part)
                if store is not None:
                    _write(file, digest, store)
                    store = _read(file, digest, paths) or store  # mapped, so that processes share the memory
    except (OSError, NotImplementedError, SafetensorError) as error:  # some file systems have no locks
        if store is None:
            store = _decode_all(paths, least, most_bytes, workers, part)
        if store is not None:
            consequence = "they stay in memory and are decoded again next time"
            warn(f"{CACHE}: the decoded images cannot be kept there ({error}): {consequence}.")
    return store


def _decode_all(paths: Sequence[str], least: Size, most_bytes: int, workers: int, part: str) -> Store | None:
    """Decode all images, in order; None if they take more bytes than allowed."""
    PIL.Image.init()  # otherwise threads that meet a rare format at the same time do not all know it
    flat = np.empty(most_bytes, np.uint8)  # the rest, which is never written, takes no memory
    sizes = torch.zeros(len(paths), 2, dtype=torch.int64)
    reasons: dict[str, str] = {}
    end = 0
    with ThreadPool(workers) as pool, phase(f"decode {part}", len(paths)) as update:
        images = pool.imap(partial(_image_or_reason, least=least), paths, chunksize=8)
        for index, image in enumerate(images):
            if isinstance(image, str):
                reasons[str(index)] = image
            elif end + image.size > most_bytes:
                return None
            else:
                flat[end : end + image.size] = image.reshape(-1)
                end += image.size
                sizes[index] = torch.tensor(image.shape[:2])
            update(index + 1)
    return Store(torch.from_numpy(flat[:end]), sizes, reasons)


def _image_or_reason(path: str, least: Size) -> Array | str:
    """Return an image, scaled down if it is larger than needed, or the reason why it cannot be read."""
    try:
        image = read_pixels(path)
    except DataError as error:
        return str(error)
    size = _kept_size(image.shape[:2], least)
    if size == image.shape[:2]:
        return image
    return resize(image, size)


def _kept_size(size: Size, least: Size) -> Size:
    """Return the height and width in which an image is kept."""
    is_larger = size[0] > least[0] and size[1] > least[1]
    if is_larger:
        return cover(size, least)
    return size


def _write(file: Path, digest: str, store: Store) -> None:
    """Write a safetensors file by hand, since that library would first copy all bytes in memory."""
    sizes = store.sizes.tobytes()
    flat = store.flat.numpy().data
    end = len(sizes) + len(flat)
    header: dict[str, Any] = {
        "__metadata__": {"digest": digest, "reasons": json.dumps(store.reasons)},
        "sizes": {"dtype": "I64", "shape": store.sizes.shape, "data_offsets": [0, len(sizes)]},
        "flat": {"dtype": "U8", "shape": [len(flat)], "data_offsets": [len(sizes), end]},
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    write_files(file.parent, {file.name: (len(text).to_bytes(8, "little"), text, sizes, flat)})


def _read(file: Path, digest: str, paths: Sequence[str]) -> Store | None:
    """Map a file into memory; None if it is damaged, of other images, or if a broken image can be read by now."""
    with contextlib.suppress(OSError, SafetensorError), safe_open(file, "pt") as parts:
        metadata = parts.metadata() or {}
        if metadata.get("digest") != digest:
            return None
        reasons = json.loads(metadata["reasons"])
        for index in reasons:
            if not isinstance(_image_or_reason(paths[int(index)], (1, 1)), str):
                return None
        return Store(parts.get_tensor("flat"), parts.get_tensor("sizes"), reasons)
    return None
