"""Data sets and loaders: disjoint parts, batches that are a function of (seed, epoch, index), and every mistake."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from dmcp import data
from dmcp.data import ArraySet, Augmentation, DataSets, load, make_loader, split
from dmcp.errors import DataError
from dmcp.nets import build

PACKAGE = Path(data.__file__).parent


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
    for text in (source, data.__doc__ or ""):
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


# -- folders


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
        (without_images, "Found no valid file for the classes cat"),
        (without_classes, "find any class folder"),
        (one_class, "there is one class, cat; at least two are needed"),
        (other_classes, "these are in one only: dog, fox"),
    ],
)
def test_bad_folders(make: Callable[[Path], Path], text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        load(make(tmp_path / "folder"))
    assert text in str(error.value)


def test_a_broken_image_is_named(tmp_path: Path) -> None:
    sets = load(write_folder(tmp_path / "pets"), size=16)
    Path(sets.test.paths[0]).write_text("no image")
    with pytest.raises(DataError, match=r"cat.0\.png cannot be read as an image"):
        list(make_loader(sets.test, 4, train=False, workers=0))


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


def test_batch_larger_than_the_data(tmp_path: Path) -> None:
    folder = load(write_folder(tmp_path / "pets")).train
    for part, count in ((numbered(), 40), (folder, 12)):
        with pytest.raises(DataError, match=f"batch of 64 is larger than the data: there are {count} training images"):
            make_loader(part, 64, train=True)
        assert len(make_loader(part, 64, train=False)) == 1


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
        data.check_fit(net, load("digits"))
    assert text in str(error.value)
    assert all(module.training for module in net.modules())


def test_data_that_fits_leaves_the_model_alone() -> None:
    net = build("digits:resnet").train()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    data.check_fit(net, load("digits"))
    assert net.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
