"""Data sets: disjoint parts, images prepared as stated, and every mistake in files, folders and shards."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from folders import write_photos, write_shards
from PIL import Image, ImageOps
from torchvision.datasets import CIFAR10, cifar
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from dmcp.cli.job import with_shape
from dmcp.data import datasets
from dmcp.data.datasets import ArraySet, Augmentation, DataSets, check_data, load, preprocessing, split, unseen_classes
from dmcp.data.images import (
    ENDINGS,
    crop_batch,
    crop_image,
    inspect_files,
    mean_and_std,
    random_boxes,
    random_numbers,
    read_jpeg,
    read_pixels,
)
from dmcp.data.loaders import fixed_order, make_loader
from dmcp.errors import DataError


def contents(part: ArraySet) -> set[bytes]:
    return {image.numpy().tobytes() for image in part.images}


def as_loaded(sets: DataSets) -> torch.Tensor:
    """The test images as a loader gives them, but in the order of the data set."""
    images = torch.cat([images for images, _ in make_loader(sets.test, 5, train=False)])
    return images[fixed_order(len(images)).argsort()]


# arrays


def test_digits_are_what_they_say() -> None:
    sets = load("digits")
    assert (len(sets.train), len(sets.test), sets.classes, sets.shape) == (1415, 382, 10, (1, 8, 8))
    images = torch.cat([sets.train.images, sets.test.images])
    assert images.dtype == torch.uint8 and (int(images.min()), int(images.max())) == (0, 16)
    labels = torch.cat([sets.train.labels, sets.test.labels])
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # what UCI says of its file
    assert sets.test.labels.bincount().min() >= 35 and not contents(sets.train) & contents(sets.test)
    with np.load(Path(datasets.__file__).with_name("digits.npz")) as file:
        assert "CC BY 4.0" in str(file["source"]) and "Alpaydin" in str(file["source"])


def test_held_out_parts_are_disjoint_and_balanced() -> None:
    train = load("digits").train
    rest, held = split(train, 0.1, seed=3)
    assert contents(rest) | contents(held) == contents(train) and not contents(rest) & contents(held)
    assert torch.equal(held.labels.bincount().double(), (0.1 * train.labels.bincount()).round().double())
    assert contents(split(train, 0.1, seed=3)[1]) == contents(held) != contents(split(train, 0.1, seed=4)[1])
    for empty in (0.0, 1.0, 1e-9):
        with pytest.raises(DataError):
            split(train, empty)


def test_shards(tmp_path: Path) -> None:
    sets = load(write_shards(tmp_path / "cifar10"))
    assert (len(sets.train), len(sets.test), sets.classes, sets.shape) == (10, 5, 4, (3, 12, 12))
    assert sets.train.labels.tolist() == [0, 1, 2, 3, 0, 1, 0, 1, 2, 3]
    raw = np.concatenate([np.load(tmp_path / f"cifar10/train-{i}.npz")["images"] for i in (0, 1)]).astype(float)
    np.testing.assert_allclose(sets.train.mean, raw.mean((0, 1, 2)))
    np.testing.assert_allclose(sets.train.std, raw.std((0, 1, 2)))
    assert sets.train.augmentation == Augmentation(shift=4, flip=True, reflect=True)
    assert len(load("cifar10", root=tmp_path).train) == 10  # the name finds them too


def pixels(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.uint8)


ONE_LABEL = {name: {"labels": np.zeros(n, int)} for name, n in (("train0", 6), ("train1", 4), ("test0", 5))}


@pytest.mark.parametrize(
    "changes",
    [
        {"test0": None},
        {"train1": {"labels": None}},
        {"train1": {"labels": np.array([{}] * 4)}},  # a pickle, never opened
        {"train1": {"labels": np.array([0, 1, 2, 2**40])}},
        {"train1": {"images": pixels(4, 8, 8, 3)}},
        {"test0": {"labels": np.arange(5)}},
        {"train0": {"labels": np.arange(6) - 1}},
        {"test0": {"images": pixels(0, 12, 12, 3), "labels": np.arange(0)}},
        ONE_LABEL,
    ],
    ids=str,
)
def test_bad_shards(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(DataError, match=str(tmp_path)):
        load(write_shards(tmp_path / "shards", **changes))


def write_cifar(url: str, root: str, **_: Any) -> None:
    """What torchvision would fetch, with four images in each file."""
    folder = Path(root) / CIFAR10.base_folder
    folder.mkdir(parents=True)
    for name, _md5 in (*CIFAR10.train_list, *CIFAR10.test_list):
        data = np.arange(4 * 3072).reshape(4, 3072).astype(np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": data, "labels": [0, 1, 2, 3]}))
    (folder / CIFAR10.meta["filename"]).write_bytes(pickle.dumps({CIFAR10.meta["key"]: list("abcd")}))


def test_cifar_is_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as error:
        load("cifar10")
    monkeypatch.setattr(cifar, "check_integrity", lambda path, md5=None: Path(path).is_file())
    monkeypatch.setattr(cifar, "download_and_extract_archive", lambda *_, **__: 1 / 0)
    with pytest.raises(DataError):
        load("cifar10", download=True)
    monkeypatch.setattr(cifar, "download_and_extract_archive", write_cifar)
    exec(str(error.value).partition("download it once with Python: ")[2], {})
    assert len(load("cifar10").train) == 20


def test_test_classes_that_training_never_has_are_told(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "shards", train0={"labels": np.array([0, 1, 3, 0, 1, 3])}, train1=None)
    sets = load(folder)
    assert unseen_classes(sets.train, sets.test) == ["2"] == check_data(sets)["unseen_classes"]
    assert unseen_classes(sets.test, sets.train) == []


# image files


def test_image_folder(tmp_path: Path) -> None:
    root = write_photos(tmp_path / ".hidden" / "pets", classes=("cat", "dog", "eel"))
    for part in ("train", "val"):  # what is hidden is skipped
        (root / part / ".ipynb_checkpoints").mkdir()
        (root / part / "cat" / ".ipynb_checkpoints").mkdir()
        for place in ("._0.png", ".ipynb_checkpoints/0.png", "../.ipynb_checkpoints/0.png"):
            (root / part / "cat" / place).write_bytes((root / part / "cat" / "0.png").read_bytes())
    for strict in (True, False):
        sets = load(root, size=16, strict=strict)
        assert (len(sets.train), len(sets.test), sets.classes, sets.shape) == (12, 12, 3, (3, 16, 16))
        assert sets.train.names == ("cat", "dog", "eel")
        assert torch.equal(sets.train.labels, torch.arange(3).repeat_interleave(4))
    rest, held = split(sets.train, 0.25)
    assert (len(rest), len(held)) == (9, 3) and not set(rest.paths) & set(held.paths)
    assert IMG_EXTENSIONS == ENDINGS


def test_names_and_folders_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_photos(tmp_path / "in" / "shapes", (8, 8))
    monkeypatch.chdir(tmp_path)
    for typed, hint in (("in/shpes", "in/shapes"), ("Digts", "digits"), ("in", "two classes")):
        with pytest.raises(DataError, match=hint):
            load(typed)
    for name, classes in (("hidden", (".cat", ".dog")), ("empty", ("cat", "dog")), ("one", ("cat",))):
        write_photos(tmp_path / name, classes=classes, count=int(name != "empty"))
        with pytest.raises(DataError, match="class"):
            load(tmp_path / name)


def prepared(image: Any, how: dict[str, Any]) -> torch.Tensor:
    """What `preprocessing` says, written anew with PIL and NumPy."""
    if how["resize"]:
        scale = max(wanted / own for wanted, own in zip(how["resize"], (image.height, image.width), strict=True))
        tall = how["resize"][0] / image.height == scale
        free = int(how["resize"][0] * image.width / image.height), int(how["resize"][1] * image.height / image.width)
        size = (free[0], how["resize"][0]) if tall else (how["resize"][1], free[1])
        image = image.convert(how["channels"]).resize(size, Image.Resampling.BILINEAR)
        top, left = (round((own - crop) / 2.0) for crop, own in zip(how["crop"], (size[1], size[0]), strict=True))
        image = image.crop((left, top, left + how["crop"][1], top + how["crop"][0]))
    pixels = torch.from_numpy(np.atleast_3d(np.array(image))).permute(2, 0, 1).float() * (how["range"][1] / 255)
    mean, std = (torch.tensor(how[key])[:, None, None] for key in ("mean", "std"))
    return (pixels - mean) / std


@pytest.mark.parametrize("size", [17, 224, (9, 31), (1, 2)])
def test_images_are_prepared_as_stated(size: Any, tmp_path: Path) -> None:
    files = load(write_photos(tmp_path / "a", (20, 24), (33, 11), (18, 18), (64, 48), (7, 61), count=5), size=size)
    grey = with_shape(files, "", (1, *files.shape[1:]))
    for part, off in ((grey, 0.04), (files, 1e-5)):  # PIL rounds its levels
        how = json.loads(json.dumps(preprocessing(part)))
        found = torch.stack([prepared(Image.open(path), how) for path in part.test.paths])
        torch.testing.assert_close(found, as_loaded(part), rtol=0, atol=off)
    assert found.shape[1:] == files.shape == tuple(how["shape"]) and how["classes"] == ["cat", "dog"]
    for arrays in (load(write_shards(tmp_path / "b")), load("digits")):
        how = json.loads(json.dumps(preprocessing(arrays)))
        found = torch.stack([prepared(image.numpy(), how) for image in arrays.test.images])
        torch.testing.assert_close(found, as_loaded(arrays), rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [(16, 16), (64, 48), (224, 224)])
def test_training_images_are_what_torchvision_makes_of_them(size: tuple[int, int]) -> None:
    """On the same boxes to the bit, in the way of a GPU but for rounding; and boxes of the same law."""
    sizes = np.array([(20, 24), (33, 11), (18, 18), (256, 300), (341, 256), (7, 61), (1, 1)])
    pictures = [np.random.randint(0, 256, (*own, 3), dtype=np.uint8) for own in sizes]
    boxes = random_boxes(sizes, size, random_numbers(3, np.arange(7)))
    wanted = []
    for image, (_, _, low, high, flip) in zip(pictures, boxes.transpose(0, 2, 1), strict=True):
        box = [int(it) for it in (*low, *(high - low))]
        crop = v2.functional.resized_crop(Image.fromarray(image), *box, list(size), antialias=True)
        wanted.append(np.asarray(crop)[:, :: -1 if flip[1] else 1])
    found = map(partial(crop_image, crop=size), pictures, boxes)
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True)) and 0 < boxes[:, 1, 4].sum() < 7
    starts = np.cumsum([0, *(it.size for it in pictures)])[:-1]
    for planar in (False, True):
        flat = torch.from_numpy(np.concatenate([(it.transpose(2, 0, 1) if planar else it).ravel() for it in pictures]))
        images, labels = crop_batch(flat, starts, sizes, boxes, np.arange(7), size, planar)
        mean, std = mean_and_std("cpu")
        levels = (images * std + mean).permute(0, 2, 3, 1) - torch.from_numpy(np.stack(wanted))
        assert levels.abs().max() < 1.01 and levels.abs().mean() < 0.4 and labels.tolist() == [*range(7)]

    usual = v2.RandomResizedCrop(size, ratio=(3 / 4 * size[1] / size[0], 4 / 3 * size[1] / size[0]))
    for own in ((100, 140), (40, 200)):  # also where most tries do not fit
        drawn = [usual.make_params([torch.zeros(1, *own)]) for _ in range(4000)]
        known = np.array([[it[key] for key in ("top", "left", "height", "width")] for it in drawn])
        boxes = random_boxes(np.tile(own, (4000, 1)), size, random_numbers(5, np.arange(4000)))
        _, _, low, high, _ = boxes.transpose(2, 0, 1)
        quantiles = [np.quantile(it, (0.1, 0.3, 0.5, 0.7, 0.9), axis=0) for it in (known, np.hstack([low, high - low]))]
        np.testing.assert_allclose(*quantiles, atol=0.03 * max(own))


def test_jpegs_have_the_pixels_that_pil_sees(tmp_path: Path) -> None:
    """Also those in grey, CMYK and RGB, and with bytes behind their end, which torchvision is not asked for."""
    noise = Image.fromarray(np.random.randint(0, 256, (40, 30, 3), dtype=np.uint8))
    for kind in ("RGB", "L", "CMYK", "progressive", "keep_rgb"):
        image = noise.convert(kind) if kind.isupper() else noise
        image.save(tmp_path / f"{kind}.jpg", **({} if kind.isupper() else {kind: True}))
    (tmp_path / "longer.jpg").write_bytes((tmp_path / "RGB.jpg").read_bytes() + b"more")
    for file in tmp_path.iterdir():
        assert (read_jpeg(str(file)) is not None) == (file.stem in ("RGB", "L", "progressive"))
        np.testing.assert_array_equal(read_pixels(str(file)), np.asarray(Image.open(file).convert("RGB")))


@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "tif"])
def test_images_are_turned_as_cameras_mean_them(kind: str, tmp_path: Path) -> None:
    """By PIL's own function; their sizes are told without decoding them."""
    noise = Image.fromarray(np.random.randint(0, 256, (40, 30, 3), dtype=np.uint8))
    for orientation in range(1, 9):
        tags = Image.Exif()
        tags[0x0112] = orientation
        path = tmp_path / f"{orientation}.{kind}"
        noise.save(path, exif=tags)
        with Image.open(path) as image:
            upright = np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
        np.testing.assert_array_equal(read_pixels(str(path)), upright)
        (size,) = inspect_files([str(path)], whole=False)
        assert size == upright.shape[:2]
        assert (read_jpeg(str(path)) is not None) == (kind == "jpg" and orientation == 1)  # else no GPU decodes it


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")  # which PIL says as it opens the file
def test_damaged_tags_are_no_reason_to_lose_an_image(tmp_path: Path) -> None:
    noise = Image.fromarray(np.random.randint(0, 256, (40, 30, 3), dtype=np.uint8))
    noise.save(tmp_path / "odd.jpg", exif=b"Exif\0\0MM\0*\0\0\0\xff\xff\xff")
    with Image.open(tmp_path / "odd.jpg") as image:
        np.testing.assert_array_equal(read_pixels(str(tmp_path / "odd.jpg")), np.asarray(image))


def test_of_16_bits_the_upper_8_are_read_and_32_are_refused(tmp_path: Path) -> None:
    """PIL alone makes all that is above 255 of 65535 white."""
    root = write_photos(tmp_path / "a", count=1)
    files = sorted(root.rglob("*.png"))
    greys = [np.array(Image.open(path))[:, :, 0] for path in files]
    loaded = []
    for deep in (False, True):
        for path, grey in zip(files, greys, strict=True):
            Image.fromarray(grey.astype(np.uint16) * 256 + 77 if deep else grey).save(path)
        loaded.append(as_loaded(load(root, size=16)))
    assert torch.equal(*loaded) and loaded[0].std() > 0.1
    for kind in (np.int32, np.float32):
        Image.fromarray(np.full((20, 24), 3000, kind)).save(root / "val" / "cat" / "x.tif")
        with pytest.raises(DataError, match=r"x\.tif"):
            as_loaded(load(root, size=16))


def test_what_is_no_image_is_never_opened(tmp_path: Path) -> None:
    """A PostScript file, which starts a program whatever its name is, and a pipe, which never ends."""
    (tmp_path / "eps.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    os.mkfifo(tmp_path / "pipe.png")
    for name in ("eps.png", "pipe.png"):
        with pytest.raises(DataError):
            read_pixels(str(tmp_path / name))


def test_shards_that_inflate_to_gigabytes_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small files whose directories promise 5 GB each, and honest ones that the memory cannot hold."""
    folder = write_shards(tmp_path / "bomb")
    path = folder / "train-0.npz"
    with zipfile.ZipFile(path) as file:
        (images,) = (part for part in file.infolist() if part.filename == "images.npy")
    at = path.read_bytes().index(b"PK\1\2") + 24  # the size of the first member in the directory
    data = bytearray(path.read_bytes())
    assert int.from_bytes(data[at : at + 4], "little") == images.file_size
    data[at : at + 4] = (2**32 - 2**20).to_bytes(4, "little")
    path.write_bytes(data)
    monkeypatch.setattr(datasets.np, "load", Mock(side_effect=AssertionError("it was read")))
    monkeypatch.setattr("dmcp.runtime.io.free_memory", lambda: 2**50)
    with pytest.raises(DataError):
        load(folder)
    monkeypatch.setattr("dmcp.runtime.io.free_memory", lambda: 4000)
    with pytest.raises(DataError):
        load(write_shards(tmp_path / "large"))


def test_a_shard_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "pipe", train1=None)
    os.mkfifo(folder / "train-1.npz")
    with pytest.raises(DataError, match="not a plain file"):
        load(folder)
