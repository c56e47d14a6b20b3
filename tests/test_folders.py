"""Folders of image files: the same batches for any workers, ranks and start, and files and workers that fail."""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from dmcp.batches import batches_from, generator
from dmcp.data.datasets import FolderSet, load, split
from dmcp.data.loaders import make_loader
from dmcp.errors import DataError
from dmcp.runtime.distributed import World


def write_folder(root: Path, classes: tuple[str, ...] = ("cat", "dog", "eel"), count: int = 4) -> Path:
    for part, name in itertools.product(("train", "val"), classes):
        (root / part / name).mkdir(parents=True)
        for number in range(count):
            noise = np.random.randint(0, 256, (20, 24, 3), dtype=np.uint8)
            Image.fromarray(noise).save(root / part / name / f"{number}.png")
    return root


def test_image_folder(tmp_path: Path) -> None:
    sets = load(write_folder(tmp_path / "pets"), size=16)
    assert (len(sets.train), len(sets.test), sets.classes, sets.shape) == (12, 12, 3, (3, 16, 16))
    rest, held = split(sets.train, 0.25)
    assert (len(rest), len(held)) == (9, 3) and not set(rest.paths) & set(held.paths)
    loader = make_loader(sets.train, 5, train=True, workers=0)
    assert len(loader) == len(list(loader)) == 2
    images, labels = next(iter(loader))
    assert images.shape == (5, 3, 16, 16) and images.dtype == torch.float32 and int(labels.max()) < 3
    test = list(make_loader(sets.test, 5, train=False, workers=0))
    assert torch.equal(torch.cat([labels for _, labels in test]), sets.test.labels)


def test_hidden_folders_and_files_are_passed_over(tmp_path: Path) -> None:
    root = write_folder(tmp_path / ".hidden" / "pets")
    for part in ("train", "val"):
        (root / part / ".ipynb_checkpoints").mkdir()
        (root / part / "cat" / ".ipynb_checkpoints").mkdir()
        for place in ("._0.png", ".ipynb_checkpoints/0.png", "../.ipynb_checkpoints/0.png"):
            (root / part / "cat" / place).write_bytes((root / part / "cat" / "0.png").read_bytes())
    for strict in (True, False):
        sets = load(root, size=16, strict=strict)
        assert (len(sets.train), len(sets.test), sets.train.names) == (12, 12, ("cat", "dog", "eel"))
        assert torch.equal(sets.train.labels, torch.arange(3).repeat_interleave(4))


def test_only_hidden_folders_are_no_classes(tmp_path: Path) -> None:
    root = write_folder(tmp_path / "pets", (".cat", ".dog"))
    with pytest.raises(DataError, match=r"Couldn't find any class folder in .*train"):
        load(root, size=16)


def test_image_files_are_augmented_by_seed_epoch_and_index(tmp_path: Path) -> None:
    part = load(write_folder(tmp_path / "pets"), size=16).train
    before = torch.get_rng_state()

    def pass_(size: int, epoch: int, workers: int = 0) -> list[Tensor]:
        loader = make_loader(part, size, train=True, seed=1, workers=workers)
        loader.set_epoch(epoch)
        return [image for images, _ in loader for image in images]

    first = pass_(4, 2)
    assert all(torch.equal(a, b) for a, b in zip(first, pass_(6, 2), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first, pass_(4, 2, workers=1), strict=True))
    assert not any(torch.equal(a, b) for a, b in itertools.product(first, pass_(4, 3)))
    assert torch.equal(before, torch.get_rng_state())


def test_batch_larger_than_the_files(tmp_path: Path) -> None:
    part = load(write_folder(tmp_path / "pets")).train
    with pytest.raises(DataError, match="batch of 64 is larger than the data: there are 12 training images"):
        make_loader(part, 64, train=True)
    assert len(make_loader(part, 64, train=False)) == 1


def one_class(root: Path) -> Path:
    return write_folder(root, ("cat",))


def without_val(root: Path) -> Path:
    (write_folder(root) / "val").rename(root / "test")
    return root


def without_images(root: Path) -> Path:
    for part in ("train", "val"):
        (root / part / "cat").mkdir(parents=True)
    return root


def without_classes(root: Path) -> Path:
    for part in ("train", "val"):
        (root / part).mkdir(parents=True)
    return root


def other_classes(root: Path) -> Path:
    write_folder(root, ("cat", "dog"))
    (root / "val" / "dog").rename(root / "val" / "fox")
    return root


def empty(root: Path) -> Path:
    root.mkdir()
    return root


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (empty, "needs train/ with one folder of images per class"),
        (without_val, "needs val/ with one folder of images per class"),
        (without_images, "There are no image files (.jpg, .jpeg, .png, ...) in "),
        (without_classes, "find any class folder"),
        (one_class, "there is one class, cat; at least two are needed"),
        (other_classes, "only in train/: dog; only in val/: fox"),
    ],
)
def test_bad_folders(make: Callable[[Path], Path], text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        load(make(tmp_path / "folder"))
    assert text in str(error.value)


# -- ranks, and a start in the middle


def small(root: Path, count: int = 4) -> FolderSet:
    part = load(write_folder(root / "pets", count=count), size=8).train
    assert isinstance(part, FolderSet)
    return part


def same(first: list[Any], second: list[Any]) -> bool:
    pairs = list(zip(first, second, strict=True))
    return all(torch.equal(a, b) and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize(("size", "world", "train"), [(5, 3, True), (5, 3, False), (10, 3, False), (11, 2, False)])
def test_ranks_share_the_batches_of_one_process(size: int, world_size: int, train: bool, tmp_path: Path) -> None:
    part = small(tmp_path)
    alone = make_loader(part, size, train, seed=1, workers=0)
    shares = [
        make_loader(part, size, train, seed=1, workers=0, world=World(rank, world_size)) for rank in range(world_size)
    ]
    passes = [list(batches_from(loader, 2)) for loader in shares]
    assert {len(loader) for loader in shares} == {len(alone)}
    joined = [tuple(torch.cat(parts) for parts in zip(*batches, strict=True)) for batches in zip(*passes, strict=True)]
    assert same(joined, list(batches_from(alone, 2)))
    if not train and size > 9:  # one rank has no image of the last batch
        assert passes[-1][-1][0].shape == (0, 3, 8, 8) and passes[-1][-1][1].dtype == torch.int64


def test_an_epoch_is_entered_without_reading_what_is_skipped(tmp_path: Path) -> None:
    part = small(tmp_path)
    loader = make_loader(part, 3, train=True, seed=1, workers=0)
    whole = list(batches_from(loader, 1))
    order = torch.randperm(12, generator=generator(1, 1)).tolist()
    for index in order[:6]:
        Path(part.paths[index]).unlink()
    for workers in (0, 1):
        loader = make_loader(part, 3, train=True, seed=1, workers=workers)
        assert same(list(batches_from(loader, 1, 2)), whole[2:])
        with pytest.raises(DataError, match=r"cannot be opened .*No such file"):
            next(batches_from(loader, 1, 1))
        assert same(list(batches_from(loader, 1, 3)), whole[3:]) and not list(batches_from(loader, 1, 4))


def test_two_passes_at_once_are_refused(tmp_path: Path) -> None:
    loader = make_loader(small(tmp_path), 3, train=True, workers=0)
    first, second = iter(loader), iter(loader)
    next(first), next(second)
    with pytest.raises(DataError, match="Another pass over this loader began before this one ended"):
        next(first)
    assert len(list(second)) == 3


# -- files that cannot be read


def truncate(path: Path) -> None:
    Image.effect_noise((64, 64), 50).convert("RGB").save(path, "JPEG")
    path.write_bytes(path.read_bytes()[:600])


CORRUPT = [truncate, lambda path: path.write_text("no image"), lambda path: path.write_bytes(b"")]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("spoil", CORRUPT, ids=["truncated", "text", "empty"])
def test_a_broken_image_is_named(spoil: Callable[[Path], Any], workers: int, tmp_path: Path) -> None:
    sets = load(write_folder(tmp_path / "pets"), size=16)
    spoil(Path(sets.test.paths[5]))
    batches = iter(make_loader(sets.test, 4, train=False, workers=workers))
    next(batches)
    # one line, also from a worker; and no name for the error, which would keep the workers until they are timed out
    with pytest.raises(DataError, match=r"\A.*dog.1\.png cannot be read as an image \(.*\): repair or remove it.*\Z"):
        next(batches)


def test_broken_images_are_replaced_by_the_next_in_the_order(tmp_path: Path) -> None:
    part = small(tmp_path)
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

    for world_size, workers in ((1, 1), (2, 0)):
        shares = [
            make_loader(part, 4, True, seed=1, workers=workers, world=World(rank, world_size), corrupt="skip")
            for rank in range(world_size)
        ]
        passes = [list(batches_from(share, 2)) for share in shares]
        joined = [tuple(torch.cat(parts) for parts in zip(*found, strict=True)) for found in zip(*passes, strict=True)]
        assert same(joined, batches)
        assert set().union(*(share.skipped for share in shares)) == loader.skipped


def test_skipping_ends_where_the_data_or_the_disk_is_gone(tmp_path: Path) -> None:
    part = small(tmp_path)
    Path(part.paths[0]).unlink()
    with pytest.raises(DataError, match=r"cat.0\.png cannot be opened"):
        list(make_loader(part, 4, train=False, workers=0, corrupt="skip"))
    for path in part.paths:
        Path(path).write_bytes(b"")
    with pytest.raises(DataError, match=r"12 images in a row cannot be read, the last is .*eel.3\.png"):
        list(make_loader(part, 4, train=False, workers=0, corrupt="skip"))
    with pytest.raises(DataError, match="corrupt must be stop or skip, not 'ignore'"):
        make_loader(part, 4, train=False, corrupt="ignore")


# -- a worker that dies


def test_a_dead_worker_is_explained_where_its_batch_is_awaited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))  # torch looks every 5 s
    part = small(tmp_path, count=8)
    loader = make_loader(part, 2, train=False, workers=2)
    batches = iter(loader)
    received = [next(batches)]
    dead = loader.files._iterator._workers[1]
    os.kill(dead.pid, signal.SIGKILL)
    os.waitid(os.P_PID, dead.pid, os.WEXITED | os.WNOWAIT)  # a signal handler of torch's would raise here
    with pytest.raises(DataError) as error:
        received.extend(batches)
    text = str(error.value)
    del error  # its frames keep the workers until they are timed out
    match = re.fullmatch(r"One of 2 workers has died while (\S+) to (\S+) was awaited, .* try workers=1 or .*\.", text)
    assert match and "memory" in text
    assert [part.paths.index(path) for path in match.groups()] == [2 * len(received), 2 * len(received) + 1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_that_a_stop_of_the_whole_command_ends_are_replaced(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm and others send SIGTERM to all processes; Ctrl-C ends those that were not forked. The run must save."""
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.1,))  # torch looks every 5 s
    part = small(tmp_path, count=8)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        loader = make_loader(part, 2, train=True, workers=2)
        batches = iter(loader)
        received = [next(batches)]
        for worker in loader.files._iterator._workers:
            os.kill(worker.pid, number)
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
        received.extend(batches)
    finally:
        signal.signal(signal.SIGINT, before)
    assert same(received, list(make_loader(part, 2, train=True, workers=0)))
