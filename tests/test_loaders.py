"""Batches are a function of (seed, epoch, index), for any threads, ranks and start; files that fail; the cache."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from folders import write_photos
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from dmcp.data import images
from dmcp.data import store as storing
from dmcp.data.datasets import ArraySet, Augmentation, load
from dmcp.data.folders import FolderSet
from dmcp.data.loaders import FolderLoader, make_loader
from dmcp.data.store import Store
from dmcp.errors import DataError
from dmcp.runtime.batches import batches_from, generator
from dmcp.runtime.distributed import World


def numbered(count: int = 40, flip: bool = True, reflect: bool = True, channels: int = 3) -> ArraySet:
    """Random images of 9x9 whose label is their place."""
    images = torch.randint(0, 256, (count, 9, 9, channels), dtype=torch.uint8)
    augmentation = Augmentation(shift=2, flip=flip, reflect=reflect)
    mean, std = (125.3, 122.9, 113.8)[:channels], (62.9, 62.0, 66.7)[:channels]
    return ArraySet(images, torch.arange(count), count, mean, std, augmentation)


def photos(root: Path, count: int = 4) -> FolderSet:
    part = load(write_photos(root / "pets", count=count, classes=("cat", "dog", "eel")), size=8).train
    assert isinstance(part, FolderSet)
    return part


@pytest.fixture(params=["memory", "gpu", "stream"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Decoded images in memory, such on the device (here the CPU, in the way of a GPU), and files read in each pass."""
    if request.param == "gpu":
        monkeypatch.setattr(Store, "on_gpu", lambda store, _: store.flat)
    if request.param == "stream":
        monkeypatch.setattr("dmcp.data.store.SHARE", 0.0)
    return str(request.param)


def same(first: Any, second: Any) -> bool:
    pairs = list(zip(first, second, strict=True))
    return all(torch.equal(a, b) and torch.equal(x, y) for (a, x), (b, y) in pairs)


def plain_batch(part: ArraySet, size: int, train: bool, epoch: int, number: int) -> tuple[Tensor, Tensor]:
    """Image by image: the random numbers of (seed 3, epoch), a padded copy, a crop, a mirror, a division."""
    shift, flip, reflect = (part.augmentation.shift, part.augmentation.flip, part.augmentation.reflect)
    draw = generator(3, epoch)
    order = torch.randperm(len(part), generator=draw if train else generator(0))
    corners = torch.randint(2 * shift + 1, (2, len(part)), generator=draw).tolist()
    flips = (torch.rand(len(part), generator=draw) < 0.5).tolist()
    images = []
    for index in order[number * size : (number + 1) * size].tolist():
        image = part.images[index].numpy()
        if train:
            padded = np.pad(image, ((shift,) * 2, (shift,) * 2, (0, 0)), mode="reflect" if reflect else "constant")
            top, left = corners[0][index], corners[1][index]
            image = padded[top : top + image.shape[0], left : left + image.shape[1]]
            image = image[:, ::-1] if flip and flips[index] else image
        floats = (torch.from_numpy(image.copy()).float() - torch.tensor(part.mean)) / torch.tensor(part.std)
        images.append(floats.permute(2, 0, 1))
    return torch.stack(images), part.labels[order[number * size : (number + 1) * size]]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(("flip", "reflect", "channels"), [(True, True, 3), (False, False, 1)])
def test_batches_of_arrays_are_bit_for_bit_what_the_draws_say(
    flip: bool, reflect: bool, channels: int, train: bool
) -> None:
    part = numbered(23, flip, reflect, channels)
    before = torch.get_rng_state()
    loader = make_loader(part, 8, train, seed=3)
    assert len(loader) == (2 if train else 3)
    for epoch, start in ((0, 0), (1, 0), (2, 1), (2, 4)):  # also from the middle of an epoch
        made = list(batches_from(loader, epoch, min(start, len(loader))))
        assert same(made, [plain_batch(part, 8, train, epoch, number) for number in range(start, len(loader))])
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.usefixtures("kind")
@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(("size", "count"), [(10, 3), (5, 5)])
def test_ranks_share_the_batches_of_one_process(
    files: bool, size: int, count: int, train: bool, tmp_path: Path
) -> None:
    part = photos(tmp_path) if files else numbered(41)  # the last test batch of arrays is one image
    alone = make_loader(part, size, train, seed=1)
    shares = [make_loader(part, size, train, seed=1, world=World(rank, count)) for rank in range(count)]
    assert {len(loader) for loader in shares} == {len(alone)}
    passes = [list(batches_from(loader, 2)) for loader in shares]
    joined = [tuple(torch.cat(parts) for parts in zip(*batches, strict=True)) for batches in zip(*passes, strict=True)]
    assert same(joined, batches_from(alone, 2))
    for parts in zip(*passes, strict=True):
        sizes = [len(labels) for _, labels in parts]
        assert max(sizes) - min(sizes) <= 1
        assert all(images.shape[1:] == part.shape and labels.dtype == torch.int64 for images, labels in parts)


@pytest.mark.parametrize("files", [False, True])
def test_batches_that_are_not_for_training_have_a_mix_of_classes(files: bool, tmp_path: Path) -> None:
    """Data sets are sorted by class, and a BatchNorm may use the statistics of such a batch."""
    if files:
        part: Any = photos(tmp_path, count=20)
    else:
        part = replace(numbered(60), labels=torch.arange(60) // 20)
    assert torch.equal(part.labels, part.labels.sort().values)
    first = list(make_loader(part, 15, train=False))
    for _, labels in first:
        assert labels.bincount(minlength=3).min() >= 2
    for other in (make_loader(part, 15, train=False, seed=7), make_loader(part, 15, train=False)):
        assert same(first, batches_from(other, 3))  # one order for all seeds and epochs
    assert torch.equal(torch.cat([labels for _, labels in first]).sort().values, part.labels)


# image files


def test_batches_of_files_are_a_function_of_seed_epoch_and_index(kind: str, tmp_path: Path) -> None:
    part, before = photos(tmp_path), torch.get_rng_state()

    def crops(size: int, epoch: int, workers: int = 2) -> list[Tensor]:
        loader = make_loader(part, size, train=True, seed=1, workers=workers)
        return [image for batch, _ in batches_from(loader, epoch) for image in batch]

    first = crops(4, 2)
    assert first[0].shape == (3, 8, 8) and first[0].dtype == torch.float32
    for others in (crops(6, 2), crops(4, 2, workers=1)):
        assert all(torch.equal(a, b) for a, b in zip(first, others, strict=True))
    assert not any(torch.equal(a, b) for a, b in itertools.product(first, crops(4, 3)))
    assert torch.equal(before, torch.get_rng_state())
    test = list(make_loader(part, 5, train=False))
    fixed = torch.randperm(12, generator=generator(0))
    assert torch.equal(torch.cat([labels for _, labels in test]), part.labels[fixed])
    stored = make_loader(part.subset(torch.tensor([7, 2])), 2, train=True, seed=1)  # of the same store
    assert (stored.store is None) == (kind == "stream")
    if stored.store is not None:
        assert stored.rows.tolist() == [7, 2] and stored.store.sizes.tolist() == [[16, 19]] * 12  # twice the crop


@pytest.mark.parametrize("decodes", [True, False])
def test_what_is_streamed_to_a_gpu_is_what_the_cpu_makes(
    decodes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the CPU, in the way of a GPU: threads with streams of their own, and a decoder that refuses some files."""
    monkeypatch.setattr("dmcp.data.store.SHARE", 0.0)
    streams: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Stream", Mock())
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    monkeypatch.setattr(torch.cuda, "current_stream", Mock())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(images, "can_decode", lambda device: decodes)

    def decode(files: list[Tensor], device: torch.device) -> list[Tensor | None]:
        return [None if len(file) % 3 == 0 else torch.ops.image.decode_jpeg(file, 3) for file in files]

    monkeypatch.setattr(images, "decode_on_gpu", decode)
    part = photos(tmp_path, count=10)
    for path in part.paths[::2]:
        Image.open(path).save(path, "JPEG")
    loader = make_loader(part, 4, train=True, seed=1, workers=3)
    loader.set_epoch(2)
    assert isinstance(loader, FolderLoader)
    made = list(loader._stream_to_gpu([np.arange(4 * number, 4 * number + 4) for number in range(len(loader))]))
    assert len(streams) == 2
    for (gpu, labels), (cpu, expected) in zip(made, loader, strict=True):
        assert torch.equal(labels, expected) and (gpu - cpu).abs().max() < 0.1  # PIL rounds its levels


def test_an_epoch_is_entered_without_reading_what_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmcp.data.store.SHARE", 0.0)
    part = photos(tmp_path)
    whole = list(batches_from(make_loader(part, 3, train=True, seed=1), 1))
    for index in torch.randperm(12, generator=generator(1, 1)).tolist()[:6]:
        Path(part.paths[index]).unlink()
    loader = make_loader(part, 3, train=True, seed=1)
    assert same(batches_from(loader, 1, 2), whole[2:])
    with pytest.raises(DataError, match="No such file"):
        next(batches_from(loader, 1, 1))
    assert same(batches_from(loader, 1, 3), whole[3:]) and not list(batches_from(loader, 1, 4))


def truncate(path: Path) -> None:
    Image.effect_noise((64, 64), 50).convert("RGB").save(path, "JPEG")
    path.write_bytes(path.read_bytes()[:600])


CORRUPT: list[Callable[[Path], Any]] = [
    truncate,
    lambda path: path.write_text("no"),
    lambda path: path.write_bytes(b""),
]


def test_a_broken_image_is_named(kind: str, tmp_path: Path) -> None:
    part = photos(tmp_path)
    for spoil in CORRUPT:
        spoil(Path(part.paths[5]))
        loader = make_loader(part, 4, train=False)
        if kind == "stream":  # else all are read before the first batch
            assert 5 not in loader.order[:4]
            next(iter(loader))
        with pytest.raises(DataError, match=r"\A.*dog.1\.png .*\Z"):
            list(loader)


@pytest.mark.usefixtures("kind")
def test_broken_images_are_replaced_by_the_next_in_the_order(tmp_path: Path) -> None:
    part = photos(tmp_path)
    order = torch.randperm(12, generator=generator(1, 2)).tolist()
    sound = list(batches_from(make_loader(part, 4, train=True, seed=1), 2))
    labels = torch.cat([labels for _, labels in sound]).tolist()
    places = (2, 5, 6, 11)  # alone, two in a row over two batches of two ranks, and the last
    for place, spoil in zip(places, itertools.cycle(CORRUPT)):
        spoil(Path(part.paths[order[place]]))
    loader = make_loader(part, 4, train=True, seed=1, corrupt="skip")
    batches = list(batches_from(loader, 2))
    assert loader.skipped == {part.paths[order[place]] for place in places}
    replaced = dict(zip(places, (3, 7, 7, 0), strict=True))
    made, before = (torch.cat([images for images, _ in found]) for found in (batches, sound))
    for place in range(12):
        assert torch.cat([y for _, y in batches])[place] == labels[replaced.get(place, place)]
        assert torch.equal(made[place], before[place]) == (place not in places)
        assert place not in places or not torch.equal(made[place], made[replaced[place]])  # another crop
    shares = [make_loader(part, 4, True, 1, world=World(rank, 2), corrupt="skip") for rank in range(2)]
    passes = [list(batches_from(share, 2)) for share in shares]
    joined = [tuple(torch.cat(parts) for parts in zip(*found, strict=True)) for found in zip(*passes, strict=True)]
    assert same(joined, batches) and shares[0].skipped | shares[1].skipped == loader.skipped


@pytest.mark.usefixtures("kind")
def test_skipping_ends_where_the_data_is_gone(tmp_path: Path) -> None:
    part = photos(tmp_path)
    Path(part.paths[0]).unlink()
    loader = make_loader(part, 4, train=False, corrupt="skip")
    assert len(list(loader)) == 3 and loader.skipped == {part.paths[0]}
    for path in part.paths[1:]:
        Path(path).write_bytes(b"")
    with pytest.raises(DataError, match=r"12 images in a row"):
        list(make_loader(part, 4, train=False, corrupt="skip"))


def test_the_cache_is_whole_and_of_these_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that changed, came or went, half a cache, a full disk, no folder."""
    cache, root, decoded, real = tmp_path / "cache", tmp_path / "pets", list[str](), storing.read_pixels
    monkeypatch.setattr(storing, "CACHE", cache)
    monkeypatch.setattr(storing, "read_pixels", lambda path: decoded.append(path) or real(path))

    def count() -> int:
        """How many files were decoded for a pass; its batches are those of files that are read anew."""
        decoded.clear()
        part = load(root, size=8).train
        found, known = list(make_loader(part, 1, train=False)), len(decoded)
        with monkeypatch.context() as patch:
            patch.setattr(storing, "SHARE", 0.0)
            assert same(found, make_loader(part, 1, train=False))
        return known

    photos(tmp_path)
    assert (count(), count()) == (12, 0)
    (file,) = cache.glob("*.images")
    for change in (
        lambda: Image.new("RGB", (9, 9)).save(root / "train" / "cat" / "0.png"),
        lambda: (root / "train" / "cat" / "1.png").unlink(),
        lambda: Image.new("RGB", (9, 9)).save(root / "train" / "dog" / "9.jpg"),
        lambda: file.write_bytes(file.read_bytes()[:-1]),
        lambda: file.unlink(),
    ):
        change()
        assert count() >= 11 and count() == 0 and [*cache.glob("*.images")] == [file]
    for place, fails in ((cache, OSError(errno.ENOSPC, "full")), (Path(os.devnull) / "cache", None)):
        monkeypatch.setattr(storing, "CACHE", place)
        monkeypatch.setattr(os, "fsync", Mock(side_effect=fails))
        file.unlink(missing_ok=True)
        with pytest.warns(UserWarning, match="cannot be kept there"):
            assert count() == 12 and {*cache.iterdir()} == {Path(f"{file}.lock")}


def test_a_cache_of_pixels_that_were_not_turned_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As version 0.1 wrote it, with a hash of names, sizes and times alone."""
    monkeypatch.setattr(storing, "CACHE", tmp_path / "cache")
    photos(tmp_path)
    part = load(tmp_path / "pets", size=8).train
    expected = list(make_loader(part, 1, train=False))
    (file,) = (tmp_path / "cache").glob("*.images")
    hashed = hashlib.sha256()
    for path in part.paths:
        status = os.stat(path)
        hashed.update(f"{path.removeprefix(part.root)}\0{(status.st_size, status.st_mtime_ns)}\0".encode())
    with safe_open(file, "pt") as cache:
        old_facts = cache.metadata() | {"digest": hashed.hexdigest()}
        sizes = cache.get_tensor("sizes")
        black = torch.zeros_like(cache.get_tensor("flat"))
    save_file({"sizes": sizes, "flat": black}, file, old_facts)
    assert same(expected, make_loader(load(tmp_path / "pets", size=8).train, 1, train=False))


@pytest.mark.parametrize(("size", "ranks"), [(0, 1), (64, 1), (2, 3)])
def test_bad_batch_sizes(size: Any, ranks: int) -> None:
    with pytest.raises(DataError):
        make_loader(numbered(), size, train=True, world=World(0, ranks))
    assert len(make_loader(numbered(), 64, train=False)) == 1
