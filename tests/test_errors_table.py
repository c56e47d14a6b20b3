"""Mistakes that people make at the command line: exit code 2, one line on stderr, and nothing is written."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typed import command

from dmcp import runs
from dmcp.models import build
from dmcp.tracing.trace import trace
from dmcp.training import Event

PRUNE = "prune --model digits:resnet --data digits --device cpu --batch 708 --search-epochs 2 --epochs 1 --quiet"
MOVED = ('"data": "digits"', '"data": "my-shards"')  # in the settings of a run
NET = """
from torch import nn
from typed import command

number = 3

def build(width=4):
    return nn.Sequential(nn.Conv2d(1, width, 3), nn.Conv2d(width, 2, 3))

def pixels():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 10, 3))

def fixed(num_classes=2):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 14 * 14, num_classes))

def linear():
    return nn.Linear(8, 2)

def table():
    return {}

def failing():
    raise LookupError("the cupboard is bare")
"""


DIGITS = "--model digits:resnet --data digits"  # @ below
# refused by the parser of the options
WORDS = """
prnue
prune --bugdet 50%
runs --sort
prune --model
prune --batch many
prune --seeds 0
prune --retrain scrach
inspect
runs run half
sample run --direct -1
export
report
compare @ --weights three-classes.pth
compare --resume run
"""
# refused by what reads networks, data, budgets, settings and runs
VALUES = """
inspect resent18
inspect zzzzzz
inspect timm:resnet81
prune --model digits:resent --data digits
prune --data digits
inspect nowhere.nets:build
prune --model mytable_net.py:build --data photos
train --model ./mytable_net:build --data photos
inspect mytable_net:biuld
inspect mytable_net:number
inspect mytable_net:table
inspect mytable_net:failing
inspect resnet18 --model-args depth=3
inspect resnet18 --model-args wide
inspect mytable_net:linear --input 8
inspect resnet18 --input 224,224
inspect mytable_net:build --input 3x8x8
inspect digits:resnet --ignore conv11
prune --model digits:resnet
prune --model digits:resnet --data digit
train --model resnet18 --data nowhere/photos
train --model resnet18 --data photo
train --model resnet18 --data photos/train
search --model cifar:resnet20 --data cifar10
train --model resnet18 --data note.txt
prune --model resnet18 --data empty
prune --model resnet18 --data no-val
prune --model resnet18 --data no-images
prune --model resnet18 --data other-classes
prune --model resnet18 --data one-class
prune --model cifar:resnet20 --data broken-photos --batch 2 --input 3x32x32 --workers 0 --dry-run
compare --model cifar:resnet20 --data broken-photos --batch 2 --input 3x32x32
prune --model cifar:resnet20 --data cut-photos --batch 2 --input 3x32x32 --workers 0 --dry-run
data phtos
data photos --input 1x32x32
prune --model resnet18 --data photos --input 1x32x32
prune --model digits:resnet --data broken-shards
prune --model digits:resnet --data float-shards
prune --model digits:resnet --data no-test
prune --model digits:resnet --data one-label
prune --model resnet18 --data digits
prune --model mytable_net:fixed --data photos
prune @ --model-args num_classes=3
prune @ --input 1x16x16
prune @ --budget half
prune @ --budget 120%
search @ --budget 0.1%
prune @ --budget 40
prune @ --budget 0
prune @ --budget 0ms
prune @ --budget latency:200%
prune @ --budget latency:8
prune @ --budget params:8ms
prune @ --budget 8ms --latency table.json
search @ --budget 8ms --latency run/settings.json
compare @ --budget 8ms
latency --model digits:resnet --networks 3
latency --model digits:resnet --align 1000
prune @ --budget 8MB
prune @ --budget 0.4MFLOPs
prune @ --budget 50% --budget 30%
sample run --budget 50% --budget 30%
prune @ --budget 50%,macs:40%
prune @ --budget 20% --min-channels 14
search @ --budget 90% --max-channels layer3=32
search @ --min-channels layer1=few
search @ --min-channels 8 --min-channels 9
search @ --min-channels conv11=8
prune @ --max-channels fc=8
prune @ --min-channels conv1=99
search @ --max-channels 4 --align 8
prune @ --batch 0
train @ --batch 5000
train @ --epochs 0
prune @ --search-epochs 0
search @ --search-epochs 1 --warmup 0.9
train @ --lr -1
search @ --search-lr nan
train @ --weight-decay -1
prune @ --groups 0
prune @ --holdout 1.5
train @ --seed 99999999999999999999
train @ --device tpu9
train @ --device cuda:99
prune @ --kd-weight 0.9
prune @ --retrain slimmable --teacher three-classes.pth
prune @ --teacher unpruned --kd-weight 1.5
prune --recipe imagenet_resnet50_1100 --data photos
search @ --weights nowhere.pth
search @ --weights broken.safetensors
search @ --weights pickle.pth
search @ --weights list.pth
search @ --weights other-weights.pth
search @ --weights wide.pth
prune @ --teacher three-classes.pth
prune @ --weights three-classes.pth --teacher given
prune @ --teacher given
train @ --widths nowhere.json
train @ --widths run
train @ --widths other-widths.json
train @ --widths edited/widths.json
train @ --widths list.json
train @ --widths note.txt
prune @ --out run
prune @ --out note.txt
prune --resume empty
prune --resume run
prune --resume half --budget 40%
prune --resume half --retrain finetune
train --resume half
prune --resume foreign
prune --resume half --seeds 2
WORLD_SIZE=2 RANK=0 dmcp prune @ --seeds 2
sample half
sample damaged
evaluate half
evaluate damaged
evaluate edited
evaluate run --data photos --batch 2
evaluate moved
prune --resume moved
export empty
export half
export damaged --out net.pt2
export run --out net.pt
export run --out net.tflite
export run --out empty
export run --out nowhere/net.pt2
export run --out net.pt2 --tolerance 2
runs nowhere
report run empty
report run --out empty
compare --data digits
compare --model digits:resnet
compare --model mytable_net:pixels --data digits
compare @ --methods uniform,slimmning
compare @ --methods magic
compare @ --methods l1,uniform,l1
compare @ --set amc.episods=5
compare @ --set uniform.ratio=0.5
compare @ --set amc.episodes
compare @ --set amc.episodes=ten
compare @ --set amc.episodes=0
compare @ --set dmcp.epochs=3 --set dmcp.epochs=4
compare @ --methods uniform,l1 --set dmcp.epochs=3
compare @ --widths hand
compare @ --methods mine.py:find
compare @ --set dmcp.more=warmup:0.2
compare @ --set dmcp-direct.epochs=3
compare @ --budget 50% --budget 0.5%
compare @ --budget 120%
compare @ --budget 50% --budget 50%
compare @ --budget 50% --budget 0.5
compare @ --peer nni
compare @ --peer torch_pruning
compare @ --methods l1,random --no-scratch
compare @ --holdout 0
compare @ --batch 1400
compare @ --methods uniform --out note.txt
"""


# what the commands find in the folder, as the page says


def write_photos(folder: Path, *classes: str, parts: tuple[str, ...] = ("train", "val")) -> Path:
    for part in parts:
        for name in classes:
            (folder / part / name).mkdir(parents=True)
            for number in range(2):
                Image.new("RGB", (16, 16), (number, 0, 0)).save(folder / part / name / f"{number}.png")
    return folder


def write_shards(folder: Path, images: np.ndarray, labels: np.ndarray, *parts: str) -> None:
    folder.mkdir()
    for part in parts:
        np.savez(folder / f"{part}-0.npz", images=images, labels=labels)


def write_data(here: Path) -> None:
    (here / "empty").mkdir()
    (here / "note.txt").write_text("not what you look for")
    write_photos(here / "photos", "cat", "dog")
    write_photos(here / "one-class", "cat")
    write_photos(here / "no-val", "cat", "dog", parts=("train",))
    write_photos(here / "other-classes", "cat", "dog", parts=("train",))
    write_photos(here / "other-classes", "cat", "cow", parts=("val",))
    write_photos(here / "no-images", "cat", "dog")
    for path in (here / "no-images").rglob("*.png"):
        path.unlink()
    for path in write_photos(here / "broken-photos", "cat", "dog").rglob("*.png"):
        path.write_bytes(path.read_bytes()[:40])
    for path in write_photos(here / "cut-photos", "cat", "dog").rglob("*.png"):
        path.write_bytes(path.read_bytes()[:-28])
    (here / "broken-shards").mkdir()
    (here / "broken-shards" / "train-0.npz").write_bytes(b"PK no more")
    images, labels = np.zeros((4, 8, 8, 1), np.uint8), np.arange(4) % 2
    write_shards(here / "float-shards", images.astype(np.float32), labels, "train", "test")
    write_shards(here / "no-test", images, labels, "train")
    write_shards(here / "one-label", images, 0 * labels, "train", "test")


def write_files(here: Path) -> None:
    (here / "mytable_net.py").write_text(NET)
    (here / "broken.safetensors").write_bytes(b"\x08\x00\x00\x00\x00\x00\x00\x00garbage!")
    torch.save(build("digits:resnet"), here / "pickle.pth")
    torch.save(build("digits:resnet", num_classes=3).state_dict(), here / "three-classes.pth")
    torch.save(build("digits:resnet", width=24).state_dict(), here / "wide.pth")
    torch.save(nn.Linear(2, 2).state_dict(), here / "other-weights.pth")
    torch.save([1, 2], here / "list.pth")
    (here / "list.json").write_text("[1, 2]")
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 2, 3))
    (here / "other-widths.json").write_text(json.dumps(trace(net, torch.zeros(2, 1, 8, 8)).full.to_json()))


def log_and_die(run: runs.Run, event: Event, log: Callable[[runs.Run, Event], None] = runs.Run.on_event) -> None:
    log(run, event)
    raise KeyboardInterrupt


def write_runs(here: Path) -> None:
    """A finished run, one that was killed in its search, and copies with damage."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "draw_all", lambda *_, **__: [])  # figures take longer than such a run
        assert command(*PRUNE.split(), "--out", "run") == 0
        patch.setattr(runs.Run, "on_event", log_and_die)
        assert command(*PRUNE.split(), "--out", "half") == 130
    for name in ("damaged", "edited", "foreign", "moved"):
        shutil.copytree("run", name)
    weights = here / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    (here / "damaged" / "search.safetensors").write_bytes(b"")
    widths = json.loads((here / "run" / "widths.json").read_text())
    first = next(iter(widths["widths"]))
    (here / "edited" / "widths.json").write_text(json.dumps(widths | {"widths": widths["widths"] | {first: 999}}))
    (here / "foreign" / "settings.json").write_text("{}")
    (here / "moved" / "settings.json").write_text((here / "run" / "settings.json").read_text().replace(*MOVED))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder in which the commands are typed."""
    folder, before = tmp_path_factory.mktemp("errors"), Path.cwd()
    os.chdir(folder)
    write_data(folder)
    write_files(folder)
    write_runs(folder)
    yield folder
    os.chdir(before)


def contents(folder: Path) -> dict[str, int]:
    files = (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    return {str(path): path.stat().st_mtime_ns for path in files}


@pytest.mark.parametrize("typed", [*WORDS.split("\n")[1:-1], *VALUES.split("\n")[1:-1]])
def test_a_mistake_is_one_line_and_nothing_is_written(
    typed: str, here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(typed.replace("@", DIGITS))
    while "=" in words[0]:
        monkeypatch.setenv(*words.pop(0).split("=", 1))
    if "timm:" in typed:
        pytest.importorskip("timm")
    before = contents(here)
    capfd.readouterr()
    code = command(*[word for word in words if word != "dmcp"])
    out, err = capfd.readouterr()
    assert (code, out) == (2, "") and re.fullmatch(r"dmcp: .+\n", err), err
    parsed = not re.search(r"no option|No such command|Invalid value|Missing argument|extra argument|requires an", err)
    assert parsed == (f"\n{typed}\n" in VALUES), err
    assert contents(here) == before
