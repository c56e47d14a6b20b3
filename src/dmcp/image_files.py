"""One image file: opened, decoded, and made what a network gets."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import PIL.Image
import torch
from PIL.Image import Image
from torch import Tensor

from dmcp.errors import DataError

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, which pre-trained networks expect
_KEPT = 0.875  # share of each side of a test image that the crop keeps


class CorruptError(DataError):
    """A file that can be opened, but not decoded."""


def open_image(path: str) -> Image:
    """A file as PIL opens it, its pixels not read yet."""
    check_file(path)
    return PIL.Image.open(path)


def check_file(path: str) -> None:
    """ValueError for what is named like an image but is no file, also behind a link: a pipe would be waited for."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise ValueError("it is no file, but a pipe, a device or a socket")


def as_rgb(image: Image) -> Image:
    """Any image with three channels of 8 bits; of 16 bits the upper 8 are kept, as PIL does in colour.

    With 16 bits of grey PIL itself would take 255 of 65535 for white, and so nearly all pixels.
    """
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PPM", "PNG")):
        image = PIL.Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("I", "F"):
        raise ValueError(
            "its pixels are 32-bit numbers, and which one is white is not known: save it with 8 or 16 bits"
        )
    return image.convert("RGB")


def decode(path: str, root: str) -> Image:
    """An image file in colour; root: the folder of the data, which an error names."""
    try:
        with open_image(path) as image:
            return as_rgb(image)
    except Exception as error:  # PIL raises many kinds for a broken file
        if refused(error):
            raise DataError(f"{path} cannot be opened ({error}): check the disk, its rights and the memory.") from error
        raise CorruptError(
            f"{path} cannot be read as an image ({error}): repair or remove it, or skip such files with --corrupt skip "
            f"(in Python corrupt='skip').{finds_all(root)}"
        ) from error


def refused(error: Exception) -> bool:
    """Whether it was the system that did not hand out a file, which says nothing about the image."""
    return isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno is not None)


def finds_all(root: str) -> str:
    """A sentence about how to find all broken files of a folder."""
    return f" dmcp data {shlex.quote(root)} finds all broken files at once." if root else ""


def transform(size: tuple[int, int], train: bool) -> Callable[[Any], Tensor]:
    """What is done to an image; size: height and width that the model gets."""
    from torchvision.transforms import v2  # late: see cifar_nets.mobilenet_v2

    aspect = size[1] / size[0]
    ratio = (3 / 4 * aspect, 4 / 3 * aspect)  # of what is cut out, so that squares and others are bent alike
    crop = (
        [v2.RandomResizedCrop(size, ratio=ratio, antialias=True), v2.RandomHorizontalFlip()]
        if train
        else [partial(_cover, size=before_crop(size)), v2.CenterCrop(size)]
    )
    last = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD), v2.ToPureTensor()]
    return v2.Compose([*crop, *last])  # type: ignore[no-any-return]


def before_crop(size: tuple[int, int]) -> tuple[int, int]:
    """Height and width that a test image covers before it is cropped."""
    return round(size[0] / _KEPT), round(size[1] / _KEPT)


def _cover(image: Image, size: tuple[int, int]) -> Image:
    """Scale an image, bent in no direction, so that it just covers a height and a width."""
    height, width = size
    if width * image.height >= height * image.width:  # its width is what must be met
        height = int(width * image.height / image.width)
    else:
        width = int(height * image.width / image.height)
    from torchvision.transforms import v2

    return v2.functional.resize(image, [height, width], antialias=True)  # type: ignore[no-any-return]
