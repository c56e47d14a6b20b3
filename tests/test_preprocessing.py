"""How images become inputs: as docs/data.md says, for any size, and with a word where it is not what one expects."""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torchvision.datasets import CIFAR10, cifar
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2
from typed import command

from dmcp.cli import main
from dmcp.cli.config import RunConfig
from dmcp.cli.job import open_job
from dmcp.data import datasets
from dmcp.data import datasets as datasets_module
from dmcp.data.check import check_data
from dmcp.data.datasets import DataSets, load, preprocessing
from dmcp.data.loaders import make_loader
from dmcp.errors import DataError, DmcpError

PAGE = Path(__file__).parent.parent / "docs" / "data.md"
NET = """
from torch import nn

class Classifier(nn.Sequential):
    def __init__(self, num_classes=2, side=0):
        body = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()]
        pool = nn.Identity() if side else nn.AdaptiveAvgPool2d(1)
        super().__init__(*body, pool, nn.Flatten(), nn.Linear(8 * (side * side or 1), num_classes))
"""


def write_photos(root: Path, *sizes: tuple[int, int], count: int = 6) -> Path:
    """Noise of these heights and widths, in turn, in two classes."""
    for part in ("train", "val"):
        for name in ("dog", "cat"):
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                noise = np.random.randint(0, 256, (*sizes[number % len(sizes)], 3), dtype=np.uint8)
                Image.fromarray(noise).save(root / part / name / f"{number}.png")
    return root


def write_shards(root: Path) -> Path:
    root.mkdir()
    for part in ("train", "test"):
        images = np.random.randint(0, 256, (6, 10, 12, 2), dtype=np.uint8)
        np.savez(root / f"{part}-0.npz", images=images, labels=np.arange(6) % 3)
    return root


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with networks of our own that can be imported from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_nets").mkdir()
    for path in ("own_net.py", "own_nets/inner_net.py"):
        (tmp_path / path).write_text(NET)
    return tmp_path


def job(data: Path | str, **changes: Any) -> RunConfig:
    return RunConfig(
        **{"model": "own_net:Classifier", "data": str(data), "batch": 4, "device": "cpu", "workers": 0} | changes
    )


# -- what the page says


def prepare_of_page() -> Callable[..., torch.Tensor]:
    (source,) = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert "dmcp" not in source and "torchvision" not in source
    space: dict[str, Any] = {}
    exec(compile(source, str(PAGE), "exec"), space)
    return space["prepare"]  # type: ignore[no-any-return]


def as_loaded(sets: DataSets) -> torch.Tensor:
    return torch.cat([images for images, _ in make_loader(sets.test, 5, train=False, workers=0)])


@pytest.mark.parametrize("size", [16, 17, 224, (16, 12), (9, 31), (1, 2)])
def test_the_code_of_the_page_does_what_the_loader_does_to_files(size: Any, tmp_path: Path) -> None:
    sets = load(write_photos(tmp_path / "a", (20, 24), (33, 11), (18, 18), (64, 48), (7, 61)), size=size)
    how = json.loads(json.dumps(preprocessing(sets)))
    found = torch.cat([prepare_of_page()(Image.open(path), how) for path in sets.test.paths])
    assert found.shape[1:] == sets.shape == tuple(how["shape"])
    assert torch.equal(found, as_loaded(sets))
    assert how["classes"] == ["cat", "dog"]


def write_deep(path: Path, pixels: Any) -> None:
    """Grey levels with 16 bits, or with 32 where the array has them, in the file format that the ending says."""
    if path.suffix == ".pgm":
        path.write_bytes(f"P5 {pixels.shape[1]} {pixels.shape[0]} 65535\n".encode() + pixels.astype(">u2").tobytes())
    else:
        Image.fromarray(pixels).save(path)


@pytest.mark.parametrize("ending", [".png", ".tif", ".pgm"])
def test_of_16_bits_the_upper_8_are_read(ending: str, tmp_path: Path) -> None:
    """PIL alone makes all that is above 255 of 65535 white."""
    sets = load(write_photos(tmp_path / "a", (20, 24), count=1), size=16)
    for part in ("train", "val"):
        for path in sorted((tmp_path / "a" / part).rglob("*.png")):
            grey = np.array(Image.open(path))[:, :, 0]
            Image.fromarray(grey).save(path)
    plain = as_loaded(sets)  # of the same grey levels with 8 bits
    for path in sorted((tmp_path / "a").rglob("*.png")):
        grey = np.array(Image.open(path)).astype(np.uint16) * 256 + 77
        path.unlink()
        write_deep(path.with_suffix(ending), grey)
    deep = load(tmp_path / "a", size=16)
    with Image.open(deep.test.paths[0]) as image:
        assert image.mode in ("I;16", "I")
    assert check_data(tmp_path / "a").broken == ()
    assert torch.equal(as_loaded(deep), plain) and plain.std() > 0.1
    how = preprocessing(deep)
    assert torch.equal(torch.cat([prepare_of_page()(Image.open(path), how) for path in deep.test.paths]), plain)


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_pixels_of_32_bits_are_refused(kind: Any, tmp_path: Path) -> None:
    """Nobody knows which number is white; PIL takes 255."""
    root = write_photos(tmp_path / "a", (20, 24), count=2)
    write_deep(root / "val" / "cat" / "x.tif", np.full((20, 24), 3000, kind))
    with pytest.raises(DataError, match=r"x\.tif cannot be read as an image \(its pixels are 32-bit numbers"):
        as_loaded(load(root, size=16))
    assert [Path(one.file).name for one in check_data(root).broken] == ["x.tif"]


def test_the_code_of_the_page_does_what_the_loader_does_to_arrays(tmp_path: Path) -> None:
    for sets in (load(write_shards(tmp_path / "shards")), load("digits")):
        how = json.loads(json.dumps(preprocessing(sets)))
        found = torch.cat([prepare_of_page()(image.numpy(), how) for image in sets.test.images])
        assert torch.equal(found, as_loaded(sets)) and found.shape[1:] == tuple(how["shape"])


def test_the_tables_of_the_page_are_what_is_done(tmp_path: Path) -> None:
    rows = (line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `"))
    keys = {row[0].strip("| "): row[1:] for row in rows if len(row) == 3}
    photos = preprocessing(load(write_photos(tmp_path / "a", (20, 24))))
    for name, sets in enumerate((photos, preprocessing(load("digits")))):
        for key in ("shape", "channels", "resize", "interpolation", "crop", "range"):
            assert keys[f"`{key}`"][name].strip("| ").startswith(json.dumps(sets[key])), key
    assert f"{json.dumps(photos['mean'])}, {json.dumps(photos['std'])}" in keys["`mean`, `std`"][0]
    assert all(ending in PAGE.read_text() for ending in datasets._ENDINGS)
    assert IMG_EXTENSIONS == datasets._ENDINGS


# -- sizes


@pytest.mark.parametrize("size", [16, 224])
@pytest.mark.parametrize("train", [True, False])
def test_squares_are_what_torchvision_makes_of_them(size: int, train: bool, tmp_path: Path) -> None:
    """The steps as they were before there were other shapes, bit by bit."""
    crop = [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip()]
    crop = crop if train else [v2.Resize(round(size / 0.875), antialias=True), v2.CenterCrop(size)]
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    before = v2.Compose([*crop, v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, std)])
    now = datasets_module.transform((size, size), train)
    for height, width in ((20, 24), (33, 11), (18, 18), (256, 300), (341, 256)):
        image = Image.fromarray(np.random.randint(0, 256, (height, width, 3), dtype=np.uint8))
        found = []
        for steps in (before, now):
            torch.manual_seed(3)
            found.append(steps(image))
        assert torch.equal(*found)


def test_images_of_any_shape_are_not_bent() -> None:
    """A slope of brightness stays one that is as steep in both directions."""
    rows, columns = np.mgrid[:120, :200]
    image = Image.fromarray(np.repeat((rows + columns)[..., None] / 2, 3, axis=2).astype(np.uint8))
    tall, wide = (datasets_module.transform(size, False)(image)[0] for size in ((64, 48), (48, 64)))
    assert (tall.shape, wide.shape) == ((64, 48), (48, 64))
    for found in (tall, wide):
        down, right = (float(torch.diff(found, dim=dim).mean()) for dim in (0, 1))
        assert down == pytest.approx(right, rel=0.05)
    torch.manual_seed(0)
    cut = datasets_module.transform((64, 48), True)
    found = [cut(image)[0] for _ in range(50)]
    bent = [abs(float(one.diff(dim=0).mean() / one.diff(dim=1).mean())) for one in found]
    assert 0.7 < min(bent) < 0.9 < 1.1 < max(bent) < 1.4  # up to 3 : 4 in each direction, as for squares


@pytest.mark.parametrize("size", [0, 2.5, (8,), (8, 0), (8, 8, 8), "8"])
def test_bad_sizes(size: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"an int of at least 1, or \(height, width\), not"):
        load(write_photos(tmp_path / "a", (8, 8)), size=size)


def test_a_job_trains_at_height_and_width(here: Path) -> None:
    opened = open_job(job(write_photos(here / "a", (70, 50)), input="3x64x48"))
    assert opened.data.shape == (3, 64, 48) == next(iter(opened.loaders.train))[0].shape[1:]
    assert next(iter(opened.loaders.test))[0].shape[1:] == (3, 64, 48)
    assert opened.notes == ()


# -- notices


def test_enlarged_images_are_noticed(here: Path) -> None:
    small = write_photos(here / "small", (64, 48))
    (here / "small" / "train" / "cat" / "0.png").write_bytes(b"broken")
    assert open_job(job(small)).notes == (
        "The images are about 64x48 and are enlarged to 224x224: give --input 3x64x48 to train at their size.",
    )
    assert open_job(job(small, input="3x224x224")).notes == ()  # as asked for
    assert open_job(job(write_photos(here / "large", (160, 150)))).notes == ()  # not clearly smaller
    assert open_job(job("digits", model="digits:resnet", batch=128)).notes == ()


def test_images_that_are_left_out_are_noticed(here: Path) -> None:
    data = write_photos(here / "a", (8, 8), count=12)  # 24 images
    text = "With batches of {}, {} of {} training images are left out of each epoch: lower {} to {}."
    for changes, expected in (
        ({"batch": 13}, [text.format(13, 11, 24, "--batch", 12)]),
        (
            {"batch": 14, "train_batch": 20},
            [text.format(14, 10, 24, "--batch", 12), text.format(20, 4, 24, "--train-batch", 12)],
        ),
        ({"batch": 11}, []),  # two
        ({"batch": 10, "holdout": 0.25}, [text.format(10, 8, 18, "--batch", 9)]),
    ):
        assert list(open_job(job(data, input="3x8x8", **changes)).notes) == expected


def test_swapped_parts_are_noticed(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A network that is trained on the smaller part learns little, and nothing else would say why."""
    data = write_photos(here / "a", (8, 8), count=5)
    for path in [*(data / "train").glob("*/[23].png")]:
        path.unlink()
    told = "There are more test images (10) than training images (6): are train/ and val/ swapped?"
    assert open_job(job(data, input="3x8x8", batch=6)).notes == (told,)
    assert command("data", str(data), "--quiet") == 0
    out = capfd.readouterr().out
    assert told in out.splitlines()
    (data / "train").rename(data / "other")
    (data / "val").rename(data / "train")
    (data / "other").rename(data / "val")
    assert open_job(job(data, input="3x8x8", batch=10)).notes == ()
    assert command("data", str(data), "--quiet") == 0 and "swapped?" not in capfd.readouterr().out
    shards = write_shards(here / "b")
    assert command("data", str(shards), "--quiet") == 0 and "swapped?" not in capfd.readouterr().out  # as many
    with np.load(shards / "test-0.npz") as more:
        np.savez(shards / "test-1.npz", **more)
    assert command("data", str(shards), "--quiet") == 0
    told = "There are more test images (12) than training images (6): are train-*.npz and test-*.npz swapped?"
    assert told in capfd.readouterr().out.splitlines()


def test_outputs_that_no_image_has_are_noticed(here: Path) -> None:
    data = write_photos(here / "a", (8, 8))
    told = "The network has 5 outputs, the data have 2 classes: build it with num_classes=2, unless that is meant."
    for words, expected in ((("num_classes=5",), (told,)), (("num_classes=2",), ()), ((), ())):
        assert open_job(job(data, input="3x8x8", model_args=words)).notes == expected


# -- sentences


def test_a_network_for_one_size_names_the_option(here: Path) -> None:
    data = write_photos(here / "a", (16, 16))
    words = (
        "images of 3x224x224, their size without --input; give the size that it takes, like --input 3x16x16: Runtime"
    )
    with pytest.raises(DataError, match=words):
        open_job(job(data, model_args=("side=16",)))
    with pytest.raises(DataError, match="images of 3x8x8: RuntimeError"):
        open_job(job(data, model_args=("side=16",), input="3x8x8"))
    assert open_job(job(data, model_args=("side=16",), input="3x16x16")).data.shape == (3, 16, 16)


@pytest.mark.parametrize(
    ("typed", "write"),
    [
        ("own_net.py:Classifier", "write own_net:Classifier."),
        ("./own_net:Classifier", "write own_net:Classifier."),
        ("./own_nets/inner_net.py:Classifier", "write own_nets.inner_net:Classifier."),
        ("own_net.py", "write own_net:NAME, with the function or class that builds it for NAME."),
        ("../own_net.py:Classifier", "write own_net:Classifier in the folder '..'."),
        ("/else/where/own_net.py:Classifier", "write own_net:Classifier in the folder '/else/where'."),
    ],
)
def test_a_file_is_not_a_module(typed: str, write: str, here: Path) -> None:
    with pytest.raises(DmcpError) as error:
        open_job(job("digits", model=typed))
    assert str(error.value) == f"{typed}: a network of your own is named by its module, not by a file: {write}"
    if "folder" not in write and "NAME" not in write:
        name = write.removeprefix("write ").removesuffix(".")
        assert isinstance(open_job(job(write_photos(here / "a", (8, 8)), model=name, input="3x8x8")).model, nn.Module)


def test_other_names_have_their_own_sentences(here: Path) -> None:
    for name, words in (
        ("own_net:Clasifier", "did you mean Classifier"),
        ("", "in torchvision"),
        ("a.b:c", "imported"),
        (
            "own_net.Classifier",
            r"^There is no 'own_net.Classifier' in torchvision; did you mean own_net:Classifier\?$",
        ),
        ("own_nets.inner_net.Classifier", "did you mean own_nets.inner_net:Classifier"),
        ("nowhere.Classifier", "and no name near it. Other ways: timm:NAME"),
    ):
        with pytest.raises(DmcpError, match=words):
            open_job(job("digits", model=name))


def test_folders_that_were_meant(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_photos(here / "in" / "shapes", (8, 8))
    for typed, words in (
        ("in/shpes", "Did you mean in/shapes?"),
        ("digts", "Did you mean digits?"),
        (
            "in/shapes/train",
            "in/shapes/train is one part of the data only: give the folder that it lies in, 'in/shapes'.",
        ),
        ("in/shapes/val/", "give the folder that it lies in, 'in/shapes'."),
    ):
        with pytest.raises(DataError, match=re.escape(words)):
            load(typed)
    monkeypatch.chdir(here / "in" / "shapes" / "train")
    for typed in (".", "../train"):
        with pytest.raises(DataError, match=r"give the folder that it lies in, '\.\.'\."):
            load(typed)


def test_empty_classes_are_named(here: Path) -> None:
    data = write_photos(here / "a", (8, 8))
    for path in (data / "val" / "dog").iterdir():
        path.unlink()
    (data / "val" / "dog" / "readme.txt").write_text("")
    with pytest.raises(DataError) as error:
        load(data)
    told = f"There are no image files (.jpg, .jpeg, .png, ...) in {data}/val/dog"
    assert str(error.value) == f"{told}: put some there, or remove the class from train/ and val/."


# -- what is fetched once


def write_cifar(url: str, root: str, **_: Any) -> None:
    """What torchvision would fetch, with four images in each file."""
    folder = Path(root) / CIFAR10.base_folder
    folder.mkdir(parents=True)
    pixels = np.arange(4 * 3072).reshape(4, 3072).astype(np.uint8)
    for name, _md5 in (*CIFAR10.train_list, *CIFAR10.test_list):
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": [0, 1, 2, 3]}))
    (folder / CIFAR10.meta["filename"]).write_bytes(pickle.dumps({CIFAR10.meta["key"]: list("abcd")}))


def test_what_python_fetches_the_command_finds(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError) as error:
        load("cifar10")
    fetch = str(error.value).partition("let Python fetch it once: ")[2]
    monkeypatch.setattr(cifar, "check_integrity", lambda path, md5=None: Path(path).is_file())
    monkeypatch.setattr(cifar, "download_and_extract_archive", write_cifar)
    exec(fetch, {})
    assert len(open_job(job("cifar10", model="cifar:resnet20")).data.train) == 20


def test_what_cannot_be_fetched_is_a_sentence(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cifar, "download_and_extract_archive", lambda *_, **__: 1 / 0)
    with pytest.raises(DataError, match=r"cifar10 cannot be fetched into data .ZeroDivision.*: put it there by hand"):
        load("cifar10", download=True)
    with pytest.raises(DataError, match=r"load.'cifar100', root='else', download=True"):
        load("cifar100", root="else")


# -- the command


def test_the_command_says_it_once_and_keeps_how_images_are_made(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_photos(here / "a", (64, 48), count=7)  # 14 images
    typed = f"prune --model own_net:Classifier --data {data} --device cpu --workers 0 --batch 12 --quiet"
    monkeypatch.setattr("sys.path", list(sys.path))
    for more in ("--dry-run", "--search-epochs 1 --epochs 1 --warmup 0 --out run"):
        monkeypatch.setattr("sys.argv", ["dmcp", *typed.split(), *more.split()])
        with pytest.raises(SystemExit) as stop:
            main.main()
        err = capfd.readouterr().err
        assert stop.value.code == 0, err
        assert err.count("are enlarged to 224x224: give --input 3x64x48") == 1
        assert err.count("With batches of 12, 2 of 14 training images are left out of each epoch") == 1
    assert json.loads((here / "run" / "input.json").read_text()) == preprocessing(load(data))


def test_training_says_that_its_images_are_of_another_size_than_those_of_the_search(
    here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    data = write_photos(here / "a", (224, 224), count=4)
    model, shape = ("--model", "own_net:Classifier", "--data", str(data), "--device", "cpu"), (3, 64, 48)
    opened = open_job(job(data, model="own_net:Classifier", input="3x64x48"))
    (here / "run").mkdir()
    (here / "run" / "widths.json").write_text(json.dumps(opened.graph.full.to_json()))
    (here / "run" / "settings.json").write_text(json.dumps({"shape": shape}))
    told = (
        "run/widths.json was found at 3x64x48, and is trained at 3x224x224: give --input 3x64x48 to train at that size."
    )
    for number, more in enumerate(((), ("--input", "3x64x48"), ("--input", "3x32x32"))):
        words = ("--widths", "run/widths.json", "--workers", "0", "--batch", "8", "--epochs", "1", "--quiet", *more)
        assert command("train", *model, *words, "--out", f"trained{number}") == 0
        assert capfd.readouterr().err == ("" if more else f"{told}\n")
