"""Data sets and loaders: disjoint parts, batches that are a function of (seed, epoch, index), and every mistake."""

from __future__ import annotations

import io
import itertools
import math
import random
import tomllib
import tracemalloc
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dmcp.batches import generator
from dmcp.cli.job import check_fit
from dmcp.data import datasets
from dmcp.data.datasets import ArraySet, Augmentation, DataSets, load, split
from dmcp.data.loaders import make_loader
from dmcp.errors import DataError
from dmcp.models import build
from dmcp.runtime.distributed import World

PACKAGE = Path(datasets.__file__).parent


def contents(part: ArraySet) -> set[bytes]:
    return {image.numpy().tobytes() for image in part.images}


# -- digits


def test_digits_are_what_they_say() -> None:
    sets = load("digits")
    assert (len(sets.train), len(sets.test), sets.classes, sets.shape) == (1415, 382, 10, (1, 8, 8))
    images = torch.cat([sets.train.images, sets.test.images])
    assert images.dtype == torch.uint8 and (int(images.min()), int(images.max())) == (0, 16)
    labels = torch.cat([sets.train.labels, sets.test.labels])
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]  # what UCI says of its file
    assert sets.test.labels.bincount().min() >= 35


def test_digits_name_their_source_and_are_packaged() -> None:
    with np.load(PACKAGE / "digits.npz") as file:
        source = str(file["source"])
    for text in (source, datasets.__doc__ or ""):
        for word in ("Alpaydin", "Kaynak", "UCI", "Optical Recognition of Handwritten Digits", "CC BY 4.0"):
            assert word in text.replace("\n", " ")
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text())
    assert "digits.npz" in project["tool"]["setuptools"]["package-data"]["dmcp"]


# -- no image in two parts


def test_test_images_are_not_training_images() -> None:
    """Zx55/dmcp validates CIFAR-10 on train=True: the same check on its pair of sets fails."""
    sets = load("digits")
    assert not contents(sets.train) & contents(sets.test)
    wrong = DataSets(sets.train, sets.train, sets.classes, sets.shape)
    assert contents(wrong.train) & contents(wrong.test)


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_held_out_parts_are_disjoint_and_balanced(share: float) -> None:
    train = load("digits").train
    rest, held = split(train, share, seed=3)
    assert contents(rest) | contents(held) == contents(train)
    assert not contents(rest) & contents(held)
    expected = (share * train.labels.bincount()).round()
    assert torch.equal(held.labels.bincount().double(), expected.double())
    assert contents(split(train, share, seed=3)[1]) == contents(held) != contents(split(train, share, seed=4)[1])
    assert held.mean == train.mean  # normalised like the rest


@pytest.mark.parametrize("share", [0.0, 1.0, 1e-9])
def test_empty_parts_are_refused(share: float) -> None:
    with pytest.raises(DataError, match="share"):
        split(load("digits").train, share)


# -- batches


def numbered(count: int = 40, size: int = 9, flip: bool = True, reflect: bool = True, channels: int = 3) -> ArraySet:
    """Random images whose label is their place; neither scaled nor moved by the normalisation."""
    images = torch.randint(0, 256, (count, size, size, channels), dtype=torch.uint8)
    augmentation = Augmentation(shift=2, flip=flip, reflect=reflect)
    return ArraySet(images, torch.arange(count), count, (0.0,) * channels, (1.0,) * channels, augmentation)


def by_place(loader: Any, epoch: int) -> dict[int, Tensor]:
    loader.set_epoch(epoch)
    pairs = [(int(label), image) for images, labels in loader for image, label in zip(images, labels, strict=True)]
    assert len(dict(pairs)) == len(pairs)  # no image twice in an epoch
    return dict(pairs)


@pytest.mark.parametrize(("flip", "reflect"), [(True, True), (False, False)])
def test_augmentation_is_one_of_all_crops(flip: bool, reflect: bool) -> None:
    part = numbered(flip=flip, reflect=reflect)
    loader = make_loader(part, 8, train=True)
    seen = set()
    for epoch, place in itertools.product(range(8), range(len(part))):
        if not place:
            images = by_place(loader, epoch)
        image = part.images[place].numpy()
        padded = np.pad(image, ((2, 2), (2, 2), (0, 0)), mode="reflect" if reflect else "constant")
        crops = {
            (y, x, mirrored): (crop[:, ::-1] if mirrored else crop).transpose(2, 0, 1)
            for y, x, mirrored in itertools.product(range(5), range(5), (False, True))
            for crop in [padded[y : y + 9, x : x + 9]]
        }
        found = [key for key, crop in crops.items() if np.array_equal(crop, images[place].numpy())]
        assert found
        seen.update(found)
    assert len(seen) == (50 if flip else 25)  # every shift, and mirrored only if asked


def test_batches_are_a_function_of_seed_epoch_and_index() -> None:
    part = numbered()
    first, again, other = (by_place(make_loader(part, size, train=True, seed=1), 5) for size in (8, 20, 40))
    for images in (again, other):  # the batch size does not matter
        assert all(torch.equal(first[place], images[place]) for place in first)
    for images in (by_place(make_loader(part, 8, True, seed=2), 5), by_place(make_loader(part, 8, True, seed=1), 6)):
        assert sum(torch.equal(first[place], images[place]) for place in first) < 10
    loader = make_loader(part, 8, train=True, seed=1)
    loader.set_epoch(5)
    step = list(loader)[3]
    assert torch.equal(loader.batch(3)[0], step[0]) and torch.equal(loader.batch(3)[1], step[1])  # for a resume


def test_random_state_of_the_user_is_untouched() -> None:
    part = numbered()
    before = torch.get_rng_state()
    loader = make_loader(part, 8, train=True)
    loader.set_epoch(1)
    list(loader)
    assert torch.equal(before, torch.get_rng_state())


def test_training_drops_the_rest_and_testing_keeps_all_in_order() -> None:
    part = numbered(19)
    train, test = make_loader(part, 8, train=True), make_loader(part, 8, train=False, channels_last=True)
    assert (len(train), len(list(train)), len(test), len(list(test))) == (2, 2, 3, 3)
    assert torch.cat([labels for _, labels in test]).tolist() == list(range(19))
    images = torch.cat([images for images, _ in test])
    assert torch.equal(images, part.images.permute(0, 3, 1, 2).float())
    assert next(iter(test))[0].is_contiguous(memory_format=torch.channels_last)
    assert next(iter(train))[0].is_contiguous()


def test_images_are_normalised_by_the_training_set() -> None:
    sets = load("digits")
    for part, exact in ((sets.train, True), (sets.test, False)):
        images = torch.cat([images for images, _ in make_loader(part, 100, train=False)]).double()
        assert (abs(float(images.mean())) < 1e-5 and abs(float(images.std(correction=0)) - 1) < 1e-5) == exact


def plain_batch(part: ArraySet, size: int, train: bool, seed: int, epoch: int, number: int) -> tuple[Tensor, Tensor]:
    """Image by image: the random numbers of (seed, epoch), a padded copy, a crop, a mirror, a division."""
    shift, flip, reflect = (part.augmentation.shift, part.augmentation.flip, part.augmentation.reflect)
    draw = generator(seed, epoch)
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


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(("flip", "reflect", "channels"), [(True, True, 3), (False, False, 1)])
def test_batches_are_bit_for_bit_what_the_draws_say(
    flip: bool, reflect: bool, channels: int, train: bool, channels_last: bool
) -> None:
    part = replace(
        numbered(23, 9, flip, reflect, channels),
        mean=(125.3, 122.9, 113.8)[:channels],
        std=(62.9, 62.0, 66.7)[:channels],
    )
    loader = make_loader(part, 8, train, seed=3, channels_last=channels_last)
    for epoch, number in itertools.product(range(3), range(len(loader))):
        loader.set_epoch(epoch)
        images, labels = plain_batch(part, 8, train, 3, epoch, number)
        made = loader.batch(number)
        assert torch.equal(made[0], images) and torch.equal(made[1], labels)
        assert made[0].is_contiguous(memory_format=torch.channels_last if channels_last else torch.contiguous_format)


class _Operations(TorchDispatchMode):
    """Names of the operations that would be launched on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and func is not torch.ops.aten.empty.memory_format:
            self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("channels_last", [False, True])
def test_a_batch_takes_few_operations_and_no_copy(channels_last: bool) -> None:
    loader = make_loader(numbered(), 8, train=True, channels_last=channels_last)
    with _Operations() as operations:
        loader.batch(1)
    assert sorted(operations.names) == ["div_", "index", "index", "index", "index", "sub"]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize(("size", "world"), [(10, 3), (8, 2), (5, 5), (20, 1)])
def test_ranks_share_the_batches_of_one_process(size: int, world_size: int, train: bool) -> None:
    part = numbered(41)  # the last test batch is one image
    alone = make_loader(part, size, train, seed=1)
    shares = [make_loader(part, size, train, seed=1, world=World(rank, world_size)) for rank in range(world_size)]
    assert {len(loader) for loader in shares} == {len(alone)}
    for loader in (alone, *shares):
        loader.set_epoch(2)
    for whole, *parts in zip(alone, *shares, strict=True):
        for place in (0, 1):
            assert torch.equal(torch.cat([part[place] for part in parts]), whole[place])
        sizes = [len(labels) for _, labels in parts]
        assert max(sizes) - min(sizes) <= 1
        assert all(images.shape[1:] == (3, 9, 9) for images, _ in parts)  # also of no images
    assert train or sizes == [1] + [0] * (world_size - 1)


def test_a_batch_that_cannot_be_shared_is_refused() -> None:
    with pytest.raises(DataError, match="A batch of 2 leaves some of 3 ranks without images"):
        make_loader(numbered(), 2, train=True, world=World(0, 3))
    assert len(make_loader(numbered(), 2, train=False, world=World(0, 3))) == 20


# -- shards


def write_shards(folder: Path, **changes: Any) -> Path:
    """Two training shards and a test shard; `changes` replaces the arrays of one file, None removes it."""
    folder.mkdir(exist_ok=True)
    for name, count in (("train-0", 6), ("train-1", 4), ("test-0", 5)):
        arrays = {
            "images": np.random.randint(0, 256, (count, 12, 12, 3), dtype=np.uint8),
            "labels": np.arange(count) % 4,
        }
        change = changes.get(name.replace("-", ""), {})
        if change is not None:
            np.savez(folder / f"{name}.npz", **{k: v for k, v in (arrays | change).items() if v is not None})
    return folder


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


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"test0": None}, "has no test-"),
        ({"train0": None, "train1": None}, "has no train-"),
        ({"train1": {"labels": None}}, "train-1.npz cannot be read as a shard"),
        ({"train1": {"labels": np.array([{}] * 4)}}, "cannot be read"),  # a pickle, never opened
        ({"train1": {"labels": np.arange(3)}}, "labels (N,), not (4, 12, 12, 3) uint8 and (3,)"),
        ({"train1": {"labels": np.ones(4)}}, "labels must be integers"),
        ({"train1": {"labels": np.zeros(4, "m8[s]")}}, "labels must be integers"),
        ({"train1": {"labels": np.array([0, 1, 2, 2**40])}}, "labels go up to 1099511627776; number the classes"),
        ({"train1": {"labels": np.array([0, 1, 2, 2**64 - 1], np.uint64)}}, "labels go up to 18446744073709551615"),
        ({"train1": {"images": pixels(4, 12, 12)}}, "(N, H, W, C)"),
        ({"train1": {"images": pixels(4, 8, 8, 3)}}, "images of (8, 8, 3), but train-0.npz has (12, 12, 3)"),
        ({"test0": {"images": pixels(5, 12, 12, 1)}}, "test images are (12, 12, 1)"),
        ({"test0": {"labels": np.arange(5)}}, "test labels go from 0 to 4, but the training labels are 0 to 3"),
        ({"train0": {"labels": np.arange(6) - 1}}, "training labels go from -1"),
        ({"test0": {"images": pixels(0, 12, 12, 3), "labels": np.arange(0)}}, "no test images"),
        ({name: {"labels": np.zeros(n, int)} for name, n in (("train0", 6), ("train1", 4), ("test0", 5))}, "one label"),
    ],
)
def test_bad_shards(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        load(write_shards(tmp_path / "shards", **changes))
    assert text in str(error.value)


def write_member(path: Path, shape: tuple[int, ...], content: bytes, method: int, honest: bool = False) -> None:
    """A shard whose images claim the shape, in their header and, unless honest, in the directory of the zip file."""
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(path, "w", method) as file:
        file.writestr("labels.npy", b"")
        file.writestr("images.npy", header.getvalue() + content)
        if not honest:  # the directory is written when the file is closed
            file.getinfo("images.npy").file_size = len(header.getvalue()) + math.prod(shape)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
@pytest.mark.parametrize("images", [10**12, 10**7, 40])
def test_a_claim_takes_no_memory(method: int, images: int, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "shards", train0=None)
    write_member(folder / "train-0.npz", (images, 12, 12, 3), bytes(10 * 12 * 12 * 3), method)
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"images\.npy claims|EOF: reading array data, expected 17280 bytes"):
            load(folder)
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("images", [10**12, 9, 11, -10])
def test_a_header_must_match_what_is_there(images: int, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "shards", train0=None)
    write_member(folder / "train-0.npz", (images, 12, 12, 3), bytes(10 * 12 * 12 * 3), zipfile.ZIP_STORED, honest=True)
    with pytest.raises(DataError, match=rf"claims \({images}, 12, 12, 3\) uint8, but holds 4448 bytes"):
        load(folder)


def test_a_real_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All headers are true, and the array of zeros is packed a thousandfold."""
    folder = write_shards(tmp_path / "shards")
    np.savez_compressed(folder / "train-0.npz", images=pixels(6, 12, 12, 3), labels=np.arange(6) % 4)
    assert len(load(folder).train) == 10
    np.savez_compressed(folder / "train-0.npz", images=pixels(2000, 12, 12, 3), labels=np.arange(2000) % 4)
    assert len(load(folder).train) == 2004
    monkeypatch.setattr(datasets, "_MOST_DENSE", 100_000)
    with pytest.raises(DataError, match=r"images\.npy claims 864128 bytes, packed into \d{3,4}$"):
        load(folder)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("dtype", ["u1", ">i2", "<u8", "i8"])
def test_honest_shards_of_any_integer_are_read(save: Callable[..., None], dtype: str, tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "shards")
    black = np.asfortranarray(pixels(4000, 12, 12, 3))  # packs a thousandfold
    save(folder / "train-1.npz", images=black, labels=(np.arange(4000) % 4).astype(dtype))
    sets = load(folder)
    assert len(sets.train) == 4006 and not sets.train.images[6:].any()
    assert sets.train.labels[6:].tolist() == [0, 1, 2, 3] * 1000


def mutate(content: bytes, draw: random.Random) -> bytes:
    """Some bytes changed, cut out, repeated, or the end cut off."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(changed))
        kind = draw.randrange(5)
        if kind < 2:
            changed[place] = draw.choice([0, 255, draw.randrange(256), changed[place] ^ (1 << draw.randrange(8))])
        elif kind == 2:
            del changed[place : place + draw.randint(1, 16)]
        elif kind == 3:
            changed[place:place] = changed[place : place + draw.randint(1, 16)]
        else:
            changed[place : place + 8] = draw.choice([b"\xff" * 8, b"99999999", b"-0000001", b"\0" * 8])
        changed = changed or bytearray(b"\0")
    return bytes(changed[: draw.randrange(1, len(changed) + 1)] if draw.random() < 0.1 else changed)


def mutate_member(path: Path, target: Path, draw: random.Random) -> None:
    """A sound zip file around a mutated array; its first bytes, the header, more often than the rest."""
    chosen = draw.choice(["images.npy", "labels.npy"])
    with zipfile.ZipFile(path) as before, zipfile.ZipFile(target, "w", draw.choice([0, 8])) as after:
        for name in before.namelist():
            content = before.read(name)
            edge = 128 if draw.random() < 0.7 else len(content)
            after.writestr(name, mutate(content[:edge], draw) + content[edge:] if name == chosen else content)


def test_mutated_shards_are_refused_or_valid(tmp_path: Path) -> None:
    folder = write_shards(tmp_path / "shards")
    sound = (folder / "train-0.npz").rename(tmp_path / "sound.npz")
    draw = random.Random(5)
    valid = 0
    for number in range(400):
        if number % 2:
            mutate_member(sound, folder / "train-0.npz", draw)
        else:
            (folder / "train-0.npz").write_bytes(mutate(sound.read_bytes(), draw))
        try:
            sets = load(folder)
        except DataError:
            continue
        valid += 1
        assert sets.train.images.dtype == torch.uint8 and sets.train.images.shape[1:] == (12, 12, 3)
        assert len(sets.train.labels) == len(sets.train.images) >= 4
        assert int(sets.train.labels.min()) >= 0 and int(sets.train.labels.max()) < sets.classes <= 2**24 + 1
        split(sets.train, 0.5)
    assert 10 < valid < 200


@pytest.mark.parametrize(("name", "text"), [("digts", "Did you mean digits?"), ("no/where", "it is no folder")])
def test_unknown_data(name: str, text: str) -> None:
    with pytest.raises(DataError) as error:
        load(name)
    assert text in str(error.value)


def test_missing_cifar(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cifar100 is not in"):
        load("cifar100", root=tmp_path)


# -- data against settings and model


@pytest.mark.parametrize("size", [0, -1, 2.5])
def test_bad_batch_sizes(size: Any) -> None:
    with pytest.raises(DataError, match="int of at least 1"):
        make_loader(numbered(), size, train=True)


def test_batch_larger_than_the_data() -> None:
    with pytest.raises(DataError, match="batch of 64 is larger than the data: there are 40 training images"):
        make_loader(numbered(), 64, train=True)
    assert len(make_loader(numbered(), 64, train=False)) == 1


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (lambda: build("cifar:resnet20"), "cannot take images of 1x8x8: RuntimeError"),
        (lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.Flatten(), nn.Linear(100, 10)), "cannot take images of 1x8x8"),
        (
            lambda: build("digits:resnet", num_classes=9),
            "labels go up to 9, but the network has 9 outputs: build it with num_classes=10.",
        ),
    ],
    ids=["channels", "size", "labels"],
)
def test_data_that_does_not_fit_the_model(model: Callable[[], nn.Module], text: str) -> None:
    net = model().train()
    with pytest.raises(DataError) as error:
        check_fit(net, load("digits"))
    assert text in str(error.value)
    assert all(module.training for module in net.modules())


def test_data_that_fits_leaves_the_model_alone() -> None:
    net = build("digits:resnet").train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    check_fit(net, load("digits"))
    assert net.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
