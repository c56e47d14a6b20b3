"""Mistakes of people at the command line: one sentence, exit code 2, the class of the error, and nothing is written."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from commands import command
from folders import write_photos
from torch import nn

from dmcp.cli import main
from dmcp.models import build
from dmcp.report import finish
from dmcp.runs.writing import Run
from dmcp.tracing.trace import trace
from dmcp.training.loop import Event

pytestmark = pytest.mark.usefixtures("quick_commands")

DIGITS, FILES = "--model digits:resnet --data digits", "--batch 2 --input 3x32x32"
PRUNE = f"prune {DIGITS} --device cpu --batch 708 --search-epochs 2 --epochs 1 --quiet"
MOVED = ('"data": "digits"', '"data": "my-shards"')  # in the settings of a run
MISTAKES = {
    "UsageError": """
        prnue
        prune --model
        prune --retrain scrach
        inspect
        report
        compare DIGITS --weights three-classes.pth
    """,
    "DmcpError": """
        inspect resent18
        inspect mytable_net:failing
        inspect mytable_net.py:build => mytable_net:build
        prune DIGITS --dry-run --track zzz => zzz
        compare DIGITS --methods amc => experiments.methods.amc:amc
        prune DIGITS --method torch-pruning => experiments.methods.peer:torch_pruning
        prune --model mytable_net:meta --data digits
        inspect resnet18 --model-args depth=3
        inspect resnet18 --input 224,224
        prune --model digits:resnet
        prune DIGITS --method dmcp-direct
        train DIGITS --device tpu9
        train DIGITS --device meta
        train --model mytable_net:number --data digits
        prune --recipe imagenet_resnet50_1100 --data photos
        prune DIGITS --weights three-classes.pth --teacher given
        prune --resume half --budget 40%
        train --resume half
        prune --resume half --seeds 2
        compare DIGITS --methods uniform,slimmning
        compare DIGITS --budget 50% --budget 50%
    """,
    "TraceError": """
        inspect mytable_net:linear --input 8
        inspect mytable_net:build --input 3x8x8
        inspect digits:resnet --ignore conv11
        prune --model mytable_net:Buggy --data digits => NameError: name 'y' is not defined
        prune --model mytable_net:Buggy --data digits => mytable_net.py, line
    """,
    "DataError": """
        prune --model digits:resnet --data digit
        train --model cifar:resnet20 --data long-photos FILES
        data looped-photos
        prune --model cifar:resnet20 --data broken-photos FILES --dry-run
        compare --model cifar:resnet20 --data broken-photos FILES
        prune --model cifar:resnet20 --data broken-photos FILES --seeds 2
        prune --model resnet18 --data photos --input 1x32x32
        prune --model resnet18 --data digits
        prune --model mytable_net:fixed --data photos
        prune DIGITS --model-args num_classes=3
        prune DIGITS --batch 0
        prune DIGITS --holdout 1.5
    """,
    "BudgetError": """
        prune DIGITS --budget 50% --budget 0.1%
        prune DIGITS --budget 50% --budget 0.5
        prune DIGITS --budget half
        prune DIGITS --budget 999G => already meets
        search DIGITS --budget 0.1%
        sample run --budget 0.1%
        compare DIGITS --budget 8ms
        compare --model digits:resnet --data nowhere --budget 50% --budget latency:60% => dmcp prune
        latency --model digits:resnet --networks 3
        latency --model digits:resnet --networks 99999999999
        prune DIGITS --budget 20% --min-channels 14
        search DIGITS --budget 90% --max-channels layer3=32
    """,
    "WidthsError": """
        search DIGITS --weights wide.pth
        prune DIGITS --teacher three-classes.pth
        train DIGITS --widths other-widths.json => other-widths.json
        train DIGITS --widths run/settings.json => settings.json: This is not a widths file
        train DIGITS --widths edited/widths.json
        evaluate run --data photos --batch 2 => its network is for 10 classes, but photos has
    """,
    "TrainingError": """
        train DIGITS --epochs 0
        train DIGITS --lr -1 => above 0
        search DIGITS --search-lr 1e308
        search DIGITS --search-epochs 1 --warmup 0.9
        prune DIGITS --teacher unpruned --kd-weight 1.5
        compare --model mytable_net:pixels --data digits
    """,
    "FileError": """
        prune DIGITS --budget 8ms --latency table.json
        search DIGITS --weights nowhere.pth
        search DIGITS --weights two-nets.pth => net, old, epoch
        search DIGITS --weights cut-off.pth
        train DIGITS --widths list.json
        prune DIGITS --out run
        prune DIGITS --out run --dry-run
        prune DIGITS --out half => --resume half
        prune --resume empty
        prune --resume run
        prune --resume foreign
        sample half
        evaluate damaged
        evaluate moved
        prune --resume moved
        export run --out net.pt
        report run empty
        compare DIGITS --methods uniform --out note.txt
    """,
    "OSError": """
        prune DIGITS --out note.txt
        runs nowhere
        report run --out empty
    """,
}
CASES = [(kind, *it.strip().partition(" => ")[::2]) for kind in MISTAKES for it in MISTAKES[kind].strip().splitlines()]
NET = """
from torch import nn

def build(width=4):
    return nn.Sequential(nn.Conv2d(1, width, 3), nn.Conv2d(width, 2, 3))

def pixels():
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 10, 3))

def fixed(num_classes=2):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 14 * 14, num_classes))

def meta():
    return pixels().to("meta")

def linear():
    return nn.Linear(8, 2)

class Buggy(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(1, 4, 3))

    def forward(self, x):
        return y

number = 7

def failing():
    raise LookupError("the cupboard is bare")
"""


# what the commands find in the folder, as the page says


def write_data(here: Path) -> None:
    (here / "empty").mkdir()
    (here / "note.txt").write_text("not what you look for")
    write_photos(here / "photos", count=2, classes=("cat", "dog"))
    write_photos(here / "long-photos", (1, 201), count=2)
    (write_photos(here / "looped-photos", count=2) / "train" / "cat" / "all").symlink_to("..")
    for path in write_photos(here / "broken-photos", count=2, classes=("cat", "dog")).rglob("*.png"):
        path.write_bytes(path.read_bytes()[:40])


def write_files(here: Path) -> None:
    (here / "mytable_net.py").write_text(NET)
    torch.save(build("digits:resnet", num_classes=3).state_dict(), here / "three-classes.pth")
    torch.save(wide := build("digits:resnet", width=24).state_dict(), here / "wide.pth")
    torch.save({"net": wide, "old": wide, "epoch": 3}, here / "two-nets.pth")
    (here / "cut-off.pth").write_bytes((here / "wide.pth").read_bytes()[:20_000])
    (here / "list.json").write_text("[1, 2]")
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 2, 3))
    (here / "other-widths.json").write_text(json.dumps(trace(net, torch.zeros(2, 1, 8, 8)).full.to_json()))


def log_and_die(run: Run, event: Event, log: Callable[[Run, Event], None] = Run.on_event) -> None:
    log(run, event)
    raise KeyboardInterrupt


def write_runs(here: Path) -> None:
    """A finished run, one that was killed in its search, and copies with damage."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finish, "draw_all", lambda *_, **__: [])  # figures take longer than such a run
        assert command(*PRUNE.split(), "--out", "run") == 0
        patch.setattr(Run, "on_event", log_and_die)
        assert command(*PRUNE.split(), "--out", "half") == 130
    for name in ("damaged", "edited", "foreign", "moved"):
        shutil.copytree("run", name)
    weights = here / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
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


@pytest.mark.parametrize(("kind", "typed", "said"), CASES, ids=[it[1] for it in CASES])
def test_a_mistake_is_one_sentence_and_exit_code_2(
    kind: str, typed: str, said: str, here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Exception] = []
    tell = main._tell
    monkeypatch.setattr(main, "_tell", lambda error, *more: seen.append(error) or tell(error, *more))
    before = contents(here)
    capfd.readouterr()
    code = command(*shlex.split(typed.replace("DIGITS", DIGITS).replace("FILES", FILES)))
    out, err = capfd.readouterr()
    assert (code, out) == (2, "") and err.startswith("dmcp: ") and len(err.splitlines()) == 1, err
    assert said in err and not err.endswith("..\n")
    (error,) = seen
    kinds = {"UsageError": main._UsageError, "OSError": OSError}
    assert isinstance(error, kinds[kind]) if kind in kinds else type(error).__name__ == kind
    assert contents(here) == before  # refused before anything is written


def test_a_folder_with_files_is_refused_before_the_network_is_built(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmcp.cli.session.open_checked", lambda *_: pytest.fail("the network was built first"))
    assert command(*shlex.split(f"prune {DIGITS} --out run")) == 2
    assert "run already holds files" in capfd.readouterr().err
