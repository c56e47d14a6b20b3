"""Image files as pixels: read by PIL, torchvision or the GPU, then cropped, resized and normalized."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import stat
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from typing import Any, NamedTuple

import numpy as np
import PIL.Image
import torch
from PIL.Image import Image
from torch import Tensor

from dmcp.errors import DataError
from dmcp.runtime.batches import core_count
from dmcp.runtime.io import quote

Array = np.ndarray[Any, np.dtype[Any]]
Size = tuple[int, int]  # height and width

ENDINGS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")  # those that torchvision reads
# PIL tries these formats, whatever the name of the file says. EPS is left out: PIL would run a program to read it.
_FORMATS = ("JPEG", "PNG", "PPM", "BMP", "TIFF", "WEBP", "GIF")
_MAX_RATIO = 200  # between the sides of an image

# how images are turned that were taken with a turned or mirrored camera, by the value of EXIF's tag
_ORIENTATION = 0x0112
LARGEST = 256  # side of images whose size is the default input of the user's networks; larger ones are photographs
_TURNS = {
    2: PIL.Image.Transpose.FLIP_LEFT_RIGHT,
    3: PIL.Image.Transpose.ROTATE_180,
    4: PIL.Image.Transpose.FLIP_TOP_BOTTOM,
    5: PIL.Image.Transpose.TRANSPOSE,
    6: PIL.Image.Transpose.ROTATE_270,
    7: PIL.Image.Transpose.TRANSVERSE,
    8: PIL.Image.Transpose.ROTATE_90,
}
_SIDEWAYS = (5, 6, 7, 8)  # these swap height and width


def typical_size(sizes: Sequence[Size]) -> tuple[Size, str]:
    """The size that most images have, or else their median height and width; and why, in words."""
    size, count = Counter(sizes).most_common(1)[0]
    if count == len(sizes):
        return size, "the size of the images"
    if 2 * count > len(sizes):
        return size, f"the size of {count / len(sizes):.0%} of the images"
    height, width = (sorted(side)[(len(sizes) - 1) // 2] for side in zip(*sizes, strict=True))
    return (height, width), "the median height and width of the images"


# reading with PIL


def decode(path: str) -> Image:
    """Read an image file as RGB, turned as its EXIF says."""
    try:
        with _open(path) as image:
            return as_upright_rgb(image)
    except Exception as error:  # PIL raises many kinds for a broken file
        raise DataError(
            f"{path} cannot be read as an image ({quote(error)}). Use --corrupt skip, "
            "or repair the file and start a new run (a run cannot be resumed with changed data)."
        ) from error


def _open(path: str) -> Image:
    if os.path.exists(path) and not os.path.isfile(path):
        raise OSError("it is not a regular file")  # reading a pipe or a device may never end
    image = PIL.Image.open(path, formats=_FORMATS)
    if max(image.size) > _MAX_RATIO * min(image.size):
        image.close()
        raise ValueError(f"one side is more than {_MAX_RATIO} times the other: resizing it would take gigabytes")
    return image


def _orientation(image: Image) -> int:
    """Return how EXIF or XMP says that an image is to be turned; 1 is upright, and so is what cannot be understood."""
    if image.format == "TIFF":
        return 1  # PIL turns it
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # PIL would decode all pixels to look behind them
    with contextlib.suppress(Exception):  # PIL raises many kinds for damaged tags, which are no reason to lose an image
        return int(image.getexif().get(_ORIENTATION, 1))
    return 1


def as_upright_rgb(image: Image) -> Image:
    """Convert an image to RGB, turned as its EXIF says."""
    rgb = as_rgb(image)
    orientation = _orientation(image)
    if orientation in _TURNS:
        rgb = rgb.transpose(_TURNS[orientation])
    return rgb


def as_rgb(image: Image) -> Image:
    """Convert an image to RGB. Of 16 bits per pixel the upper 8 are kept, where PIL would clip grey levels at 255."""
    has_16_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PPM", "PNG"))
    if has_16_bits:
        image = PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError("its pixels are 32-bit numbers of unknown range: save it with 8 or 16 bits")
    return image.convert("RGB")


class Broken(NamedTuple):
    """A file that cannot be read as an image."""

    file: str
    reason: str


def inspect_files(paths: Sequence[str], whole: bool) -> Iterator[Size | Broken]:
    """Yield the size of each image, in order; `whole` decodes all pixels, else only the first bytes are read."""
    PIL.Image.init()  # otherwise threads that meet a rare format at the same time do not all know it
    with ThreadPool(core_count()) as pool:  # PIL releases Python's lock for most of the work
        yield from pool.imap(partial(_inspect, whole=whole), paths, chunksize=16)


def _inspect(path: str, whole: bool) -> Size | Broken:
    try:
        with _open(path) as image:
            if whole:
                as_rgb(image)
            if _orientation(image) in _SIDEWAYS:
                return image.width, image.height
            return image.height, image.width
    except Exception as error:  # PIL raises many kinds for a broken file
        return Broken(path, quote(error) or type(error).__name__)


# decoding JPEGs: torchvision holds Python's lock for less time than PIL, and gives the same pixels

_RGB = 3  # torchvision.io.ImageReadMode.RGB
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # a pipe would block the open
_UNDECODABLE = (RuntimeError, AttributeError)  # the file is refused, or this torchvision lacks the operator
_JPEG_BEGIN = b"\xff\xd8"
_JPEG_END = b"\xff\xd9"
_FRAME_MARKERS = (0xC0, 0xC1, 0xC2)  # baseline, extended and progressive
_SCAN_MARKER = 0xDA  # the pixels begin
_TAGS_MARKER = 0xE1  # EXIF or XMP
_ADOBE_MARKER = 0xEE


def read_pixels(path: str) -> Array:
    """Read an image file as (height, width, 3) uint8; DataError if it is not an image."""
    import torchvision.io  # noqa: F401 - it registers the operators; imported late because that takes seconds

    data = read_jpeg(path)
    if data is not None:
        with contextlib.suppress(*_UNDECODABLE):  # PIL then says what is wrong with the file, if anything is
            pixels: Array = torch.ops.image.decode_jpeg(data, _RGB).permute(1, 2, 0).numpy()
            return pixels
    return np.array(decode(path))  # a copy that torch may write to


def read_jpeg(path: str) -> Tensor | None:
    """Read the bytes of a complete, upright JPEG file that is grey or YCbCr with 8 bits; None for any other file.

    Only of such files torchvision is known to give the pixels that PIL gives.
    """
    data = _read_regular_file(path)
    if data is None or not data.startswith(_JPEG_BEGIN) or not data.endswith(_JPEG_END):
        return None

    is_plain = False
    has_tags = False
    position = 2  # of the next segment
    while position + 19 < len(data) and data[position] == 0xFF:
        marker, length = struct.unpack_from(">BH", data, position + 1)
        if marker == _SCAN_MARKER:
            if not is_plain or (has_tags and not _is_upright(data)):
                return None
            return torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if marker in _FRAME_MARKERS:
            is_plain = _is_plain_frame(*struct.unpack_from(">BHHBB", data, position + 4))
        if marker == _TAGS_MARKER:
            has_tags = True
        if marker == _ADOBE_MARKER and data[position + 15] != 1:  # its colors are not YCbCr
            return None
        position += 2 + length
    return None


def _is_upright(data: bytes) -> bool:
    """Return True if the tags of a JPEG file do not say that it is to be turned."""
    with contextlib.suppress(Exception), PIL.Image.open(io.BytesIO(data), formats=["JPEG"]) as image:
        return _orientation(image) not in _TURNS
    return False


def _read_regular_file(path: str) -> bytes | None:
    """Read a whole file in few system calls, since threads that read many files wait for each other at each."""
    try:
        file = os.open(path, _OPEN_FLAGS)
    except OSError:
        return None
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            return None
        data = os.read(file, status.st_size)
    except OSError:
        return None
    finally:
        os.close(file)
    if len(data) != status.st_size:
        return None
    return data


def _is_plain_frame(bits: int, height: int, width: int, channels: int, first_channel: int) -> bool:
    """Return True if the header of a JPEG frame describes 8 bits in grey or YCbCr, and sides that PIL accepts."""
    if not 0 < height * width <= (PIL.Image.MAX_IMAGE_PIXELS or 0):
        return False
    has_plain_channels = channels in (1, 3) and first_channel != ord("R")
    return bits == 8 and has_plain_channels and 0.01 < height / width < 100


def decode_on_gpu(files: Sequence[Tensor], device: torch.device) -> list[Tensor | None]:
    """Decode JPEG files into (3, height, width) on a GPU; None for each one that it cannot decode."""
    if not files:
        return []
    try:
        return list(torch.ops.image.decode_jpegs_cuda(list(files), _RGB, device))
    except _UNDECODABLE:
        if len(files) == 1:
            return [None]
    # The error does not say which file is to blame: each half is tried alone.
    half = len(files) // 2
    return [*decode_on_gpu(files[:half], device), *decode_on_gpu(files[half:], device)]


@functools.cache
def can_decode(device: torch.device) -> bool:
    """Return True for a GPU that decodes JPEGs, which a small one shows."""
    import torchvision.io  # noqa: F401 - see read_pixels

    if device.type != "cuda":
        return False
    file = io.BytesIO()
    PIL.Image.new("RGB", (16, 16)).save(file, "JPEG")
    data = torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)
    return decode_on_gpu([data], device)[0] is not None


# Boxes say where to crop. For N images they are (N, 2, 5): of height and width (start, step, low, high, flip). Output
# pixel i is seen around start + (i + 0.5) * step, between low and high, and mirrored if flip is 1.

_TRIES = 10  # random rectangles that are drawn for an image
DRAWS = 2 * _TRIES + 3  # random numbers per image: area and ratio of each rectangle; its top, its left, the flip
_KEPT = 0.875  # share of each side of a test image that the crop keeps


def random_numbers(key: int, indices: Array, count: int = DRAWS) -> Array:
    """Draw numbers in [0, 1) as a function of key, index and position by SplitMix64: (N,) -> (N, count)."""
    positions = indices.astype(np.uint64)[:, None] * np.uint64(count) + np.arange(1, count + 1, dtype=np.uint64)
    bits: Any = np.uint64(key) + positions * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray((bits ^ (bits >> np.uint64(31))) >> np.uint64(11), np.float64) / 2**53


def random_boxes(sizes: Array, crop: Size, numbers: Array) -> Array:
    """Boxes by the law of torchvision's RandomResizedCrop and flip, from sizes (N, 2) and numbers (N, DRAWS).

    Aspect ratios are relative to that of the crop, so that its content is stretched as much as in a square one.
    """
    heights = sizes[:, :1].astype(float)
    widths = sizes[:, 1:].astype(float)
    lowest = 3 / 4 * crop[1] / crop[0]
    highest = 4 / 3 * crop[1] / crop[0]

    # Ten rectangles of random area and ratio, and the largest one in the middle, which is taken if none of them fits.
    areas = heights * widths * (0.08 + 0.92 * numbers[:, :_TRIES])
    ratios = lowest * (highest / lowest) ** numbers[:, _TRIES:-3]
    image_ratios = np.clip(widths / heights, lowest, highest)
    box_heights = np.hstack([np.rint(np.sqrt(areas / ratios)), np.clip(np.rint(widths / image_ratios), 1, heights)])
    box_widths = np.hstack([np.rint(np.sqrt(areas * ratios)), np.clip(np.rint(heights * image_ratios), 1, widths)])

    # The first one that fits, at a random position.
    fits = (box_heights > 0) & (box_heights <= heights) & (box_widths > 0) & (box_widths <= widths)
    first = fits.argmax(1)[:, None]
    boxes = np.hstack([np.take_along_axis(sides, first, 1) for sides in (box_heights, box_widths)])  # (N, 2)
    room = sizes - boxes
    start = np.where(first == _TRIES, room // 2, np.floor(numbers[:, -3:-1] * (room + 1)))
    flips = (numbers[:, -1:] < 0.5) * [0, 1]  # only from left to right
    return np.stack([start, boxes / crop, start, start + boxes, flips], axis=2)


def middle_boxes(sizes: Array, crop: Size) -> Array:
    """Boxes for the middle of images that are scaled, with their aspect ratio, to just cover `before_crop`."""
    target = before_crop(crop)
    scaled = np.array([cover(size, target) for size in sizes.tolist()]).reshape(-1, 2)
    step = sizes / scaled
    start = np.rint((scaled - crop) / 2) * step
    zeros = np.zeros(sizes.shape)
    return np.stack([start, step, zeros, sizes, zeros], axis=2)


def before_crop(crop: Size) -> Size:
    """Return the height and width that a test image covers before it is cropped."""
    return round(crop[0] / _KEPT), round(crop[1] / _KEPT)


def cover(size: Sequence[int], target: Size) -> Size:
    """Return the height and width at which an image, with its aspect ratio, just covers the target."""
    height, width = size
    target_height, target_width = target
    if target_width * height >= target_height * width:
        return target_width * height // width, target_width
    return target_height, target_height * width // height


# cropping and resizing with PIL's triangle filter, which is also torchvision's antialiased bilinear one

_BYTES_AT_ONCE = 2**25  # of images that are cropped at once; their indices take eight times as much


def crop_image(image: Array, box: Array, crop: Size) -> Array:
    """Crop and resize one image with PIL, on one core: (height, width, 3) and (2, 5) -> (*crop, 3)."""
    start, step, low, high, flip = box.T
    top, left = low.astype(int)
    bottom, right = high.astype(int)
    scaled = resize(image[top:bottom, left:right], np.rint((high - low) / step).astype(int).tolist())
    y, x = np.rint((start - low) / step).astype(int)
    pixels = scaled[y : y + crop[0], x : x + crop[1]]
    if flip[1]:
        return pixels[:, ::-1]
    return pixels


def resize(image: Array, size: Sequence[int]) -> Array:
    """Resize an image to a height and width."""
    height, width = size
    return np.asarray(PIL.Image.fromarray(image).resize((width, height), PIL.Image.Resampling.BILINEAR))


def crop_batch(
    flat: Tensor, starts: Array, sizes: Array, boxes: Array, labels: Array, crop: Size, planar: bool = False
) -> tuple[Tensor, Tensor]:
    """Crop, resize and normalize images (N, 3, *crop) on the device of their bytes; their labels (N,) go with them.

    flat: the bytes of all images. Each begins at its number in `starts`, as (height, width, 3), or (3, height, width)
        if they are planar.

    Resizing is two batched matrix products. They are in half precision on a GPU, which is finer than PIL's uint8.
    """
    device = flat.device
    dtype = torch.float16 if flat.is_cuda else torch.float32
    count = len(labels)

    # Where each image, its rows and its color planes begin, counted from the corner of its box.
    start, step, low, high, flip = boxes.transpose(2, 1, 0)  # (2, N) each
    extent = high - low
    pixel_stride = 1 if planar else 3
    row_strides = pixel_stride * sizes[:, 1]
    plane_strides = sizes.prod(1) if planar else np.ones(count)
    corners = starts + pixel_stride * (low[0] * sizes[:, 1] + low[1])

    # One copy to the device, since each one costs a launch. In float64, which holds these integers exactly.
    vertical, horizontal = ([(start - low)[axis], step[axis], extent[axis], flip[axis]] for axis in (0, 1))
    table = torch.from_numpy(np.stack([*vertical, *horizontal, corners, row_strides, plane_strides, labels]))
    if flat.is_cuda:
        table = table.pin_memory()
    table = table.to(device, non_blocking=True)  # (12, N)

    # All boxes are padded to the largest one, in multiples of eight, which suit tensor cores.
    rows, columns = (-(-int(extent[axis].max(initial=1)) // 8) * 8 for axis in (0, 1))
    y = torch.arange(rows, device=device)
    x = torch.arange(columns, device=device)
    channel = torch.arange(3, device=device)[:, None]

    mean, std = mean_and_std(device)
    images = torch.empty((count, 3, *crop), device=device)
    at_once = max(1, _BYTES_AT_ONCE // (3 * rows * columns))
    for first in range(0, count, at_once):
        some_images = slice(first, first + at_once)
        part = table[:, some_images]
        whole = part.long()[:, :, None]  # (12, n, 1)
        height = whole[2]
        width = whole[6]
        corner = whole[8]
        row_stride = whole[9]
        plane_stride = whole[10]

        # The byte of each pixel: (n, rows, 3, columns). What is behind the box repeats its last row or column.
        row_offset = (corner + row_stride * torch.minimum(y, height - 1))[:, :, None, None]
        plane_offset = (plane_stride[:, :, None] * channel)[:, None]
        column_offset = (pixel_stride * torch.minimum(x, width - 1))[:, None, None]
        pixels = flat[row_offset + plane_offset + column_offset].to(dtype)

        row_weights = _resize_weights(part[:4], crop[0], rows).to(dtype)
        column_weights = _resize_weights(part[4:8], crop[1], columns).to(dtype)
        narrow = torch.bmm(pixels.flatten(1, 2), column_weights.mT)
        resized = torch.bmm(row_weights, narrow.view(-1, rows, 3 * crop[1]))
        planes = resized.view(-1, crop[0], 3, crop[1]).transpose(1, 2)
        torch.sub(planes, mean, out=images[some_images])
    return images.div_(std), table[-1].long()


def _resize_weights(axis: Tensor, size: int, pixels: int) -> Tensor:
    """Weight of each pixel in each output, from (start, step, extent, flip) of n images: (4, n) -> (n, size, pixels)"""
    start, step, extent, flip = axis.float()[:, :, None, None]
    output = torch.arange(size, device=axis.device)[:, None] + 0.5
    center = start + step * torch.where(flip > 0, size - output, output)
    pixel = torch.arange(pixels, device=axis.device) + 0.5
    weights: Tensor = (1 - (pixel - center).abs() / step.clamp(min=1)).clamp(min=0) * (pixel < extent)
    return weights / weights.sum(2, keepdim=True)


# normalization

MEAN = (0.485, 0.456, 0.406)  # of ImageNet, which pre-trained networks expect
STD = (0.229, 0.224, 0.225)
LUMA = (0.299, 0.587, 0.114)  # shares of red, green and blue, as PIL has them
SCALES = {3: (MEAN, STD), 1: ((0.458971,), (0.225609,))}  # mean and deviation by number of channels


@functools.cache
def mean_and_std(device: torch.device | str) -> Any:
    """Return the mean and the standard deviation of pixels from 0 to 255, (3, 1, 1) each."""
    return tuple((255 * torch.tensor(value)[:, None, None]).to(device) for value in (MEAN, STD))


def to_grey(images: Tensor) -> Tensor:
    """Turn normalized images (N, 3, height, width) into grey ones, normalized as such: (N, 1, height, width)."""
    grey_std = SCALES[1][1][0]
    planes = zip(LUMA, STD, images.unbind(1), strict=True)
    red, green, blue = (share * std / grey_std * plane for share, std, plane in planes)
    return (red + green + blue)[:, None]
