"""Batches are a function of (seed, epoch, index), for any workers, ranks and start; files and workers that fail."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from test_datasets import write_photos
from torch import Tensor
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from dmcp.batches import batches_from, generator
from dmcp.data.datasets import ArraySet, Augmentation, FolderSet, load
from dmcp.data.loaders import make_loader
from dmcp.errors import DataError
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


def same(first: Any, second: Any) -> bool:
    pairs = list(zip(first, second, strict=True))
    return all(torch.equal(a, b) and torch.equal(x, y) for (a, x), (b, y) in pairs)


def plain_batch(part: ArraySet, size: int, train: bool, epoch: int, number: int) -> tuple[Tensor, Tensor]:
    """Image by image: the random numbers of (seed 3, epoch), a padded copy, a crop, a mirror, a division."""
    shift, flip, reflect = (part.augmentation.shift, part.augmentation.flip, part.augmentation.reflect)
    draw = generator(3, epoch)
    order = torch.randperm(len(part), generator=draw) if train else torch.arange(len(part))
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


@pytest.mark.parametrize("files", [False, True])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(("size", "count"), [(10, 3), (5, 5)])
def test_ranks_share_the_batches_of_one_process(
    files: bool, size: int, count: int, train: bool, tmp_path: Path
) -> None:
    part = photos(tmp_path) if files else numbered(41)  # the last test batch of arrays is one image
    alone = make_loader(part, size, train, seed=1, workers=0)
    shares = [make_loader(part, size, train, seed=1, workers=0, world=World(rank, count)) for rank in range(count)]
    assert {len(loader) for loader in shares} == {len(alone)}
    passes = [list(batches_from(loader, 2)) for loader in shares]
    joined = [tuple(torch.cat(parts) for parts in zip(*batches, strict=True)) for batches in zip(*passes, strict=True)]
    assert same(joined, batches_from(alone, 2))
    for parts in zip(*passes, strict=True):
        sizes = [len(labels) for _, labels in parts]
        assert max(sizes) - min(sizes) <= 1
        assert all(images.shape[1:] == part.shape and labels.dtype == torch.int64 for images, labels in parts)


# image files


def test_batches_of_files_are_a_function_of_seed_epoch_and_index(tmp_path: Path) -> None:
    part, before = photos(tmp_path), torch.get_rng_state()

    def images(size: int, epoch: int, workers: int = 0) -> list[Tensor]:
        loader = make_loader(part, size, train=True, seed=1, workers=workers)
        return [image for batch, _ in batches_from(loader, epoch) for image in batch]

    first = images(4, 2)
    assert first[0].shape == (3, 8, 8) and first[0].dtype == torch.float32
    for others in (images(6, 2), images(4, 2, workers=1)):
        assert all(torch.equal(a, b) for a, b in zip(first, others, strict=True))
    assert not any(torch.equal(a, b) for a, b in itertools.product(first, images(4, 3)))
    assert torch.equal(before, torch.get_rng_state())
    test = list(make_loader(part, 5, train=False, workers=0))
    assert torch.equal(torch.cat([labels for _, labels in test]), part.labels)


def test_an_epoch_is_entered_without_reading_what_is_skipped(tmp_path: Path) -> None:
    part = photos(tmp_path)
    whole = list(batches_from(make_loader(part, 3, train=True, seed=1, workers=0), 1))
    for index in torch.randperm(12, generator=generator(1, 1)).tolist()[:6]:
        Path(part.paths[index]).unlink()
    for workers in (0, 1):
        loader = make_loader(part, 3, train=True, seed=1, workers=workers)
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


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    part = photos(tmp_path)
    for spoil in CORRUPT:
        spoil(Path(part.paths[5]))
        batches = iter(make_loader(part, 4, train=False, workers=1))
        next(batches)
        # one line, also from a worker; and no name for the error, which would keep the workers until they time out
        with pytest.raises(DataError, match=r"\A.*dog.1\.png cannot be read as an image \(.*\): repair it.*\Z"):
            next(batches)


def test_broken_images_are_replaced_by_the_next_in_the_order(tmp_path: Path) -> None:
    part = photos(tmp_path)
    order = torch.randperm(12, generator=generator(1, 2)).tolist()
    sound = list(batches_from(make_loader(part, 4, train=True, seed=1, workers=0), 2))
    labels = torch.cat([labels for _, labels in sound]).tolist()
    places = (2, 5, 6, 11)  # alone, two in a row over two batches of two ranks, and the last
    for place, spoil in zip(places, itertools.cycle(CORRUPT)):
        spoil(Path(part.paths[order[place]]))
    loader = make_loader(part, 4, train=True, seed=1, workers=0, corrupt="skip")
    batches = list(batches_from(loader, 2))
    assert loader.skipped == {part.paths[order[place]] for place in places}
    replaced = dict(zip(places, (3, 7, 7, 0), strict=True))
    made, before = (torch.cat([images for images, _ in found]) for found in (batches, sound))
    for place in range(12):
        assert torch.cat([y for _, y in batches])[place] == labels[replaced.get(place, place)]
        assert torch.equal(made[place], before[place]) == (place not in places)
        assert place not in places or not torch.equal(made[place], made[replaced[place]])  # another crop
    shares = [make_loader(part, 4, True, 1, world=World(rank, 2), workers=0, corrupt="skip") for rank in range(2)]
    passes = [list(batches_from(share, 2)) for share in shares]
    joined = [tuple(torch.cat(parts) for parts in zip(*found, strict=True)) for found in zip(*passes, strict=True)]
    assert same(joined, batches) and shares[0].skipped | shares[1].skipped == loader.skipped


def test_skipping_ends_where_the_data_is_gone(tmp_path: Path) -> None:
    part = photos(tmp_path)
    Path(part.paths[0]).unlink()
    loader = make_loader(part, 4, train=False, workers=0, corrupt="skip")
    assert len(list(loader)) == 3 and loader.skipped == {part.paths[0]}
    for path in part.paths[1:]:
        Path(path).write_bytes(b"")
    with pytest.raises(DataError, match=r"12 images in a row"):
        list(loader)


# workers


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_that_a_stop_of_the_whole_command_ends_are_replaced(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm and others send SIGTERM to all processes; Ctrl-C ends those that were not forked. The run must save."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))  # torch looks every 5 s
    part = photos(tmp_path, count=8)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        loader = make_loader(part, 2, train=True, workers=2)
        batches = iter(loader)
        received = [next(batches)]
        for worker in loader.files._iterator._workers:
            # again, if it came where Python drops a KeyboardInterrupt, as in a finalizer
            while os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
                os.kill(worker.pid, number)
                time.sleep(0.2)
        received.extend(batches)
    finally:
        signal.signal(signal.SIGINT, before)
    assert same(received, make_loader(part, 2, train=True, workers=0))


@pytest.mark.parametrize(("size", "ranks"), [(0, 1), (64, 1), (2, 3)])
def test_bad_batch_sizes(size: Any, ranks: int) -> None:
    with pytest.raises(DataError):
        make_loader(numbered(), size, train=True, world=World(0, ranks))
    assert len(make_loader(numbered(), 64, train=False)) == 1
