"""What dmcp data finds in folders and arrays, and what is refused before the first step."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from typed import command

from dmcp.cli import launch
from dmcp.cli.session import Progress
from dmcp.data.check import check_data, no_images
from dmcp.data.datasets import FolderSet, load
from dmcp.errors import DataError
from dmcp.runs import Run

Capture = pytest.CaptureFixture[str]
NETWORK = ("--model", "my_small_net:build", "--input", "3x32x32", "--device", "cpu")
TRAIN = ("train", *NETWORK, "--data", "photos", "--batch", "4", "--epochs", "1", "--workers", "0", "--quiet", "--json")


NET = """
from torch import nn

def build(num_classes=2):
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes))
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), head)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_small_net.py").write_text(NET)
    return tmp_path


def write_photos(root: Path, count: int = 4, classes: tuple[str, ...] = ("cat", "dog")) -> Path:
    """Images whose pixels are all different."""
    draw = np.random.default_rng(0)
    for part, name in itertools.product(("train", "val"), classes):
        (root / part / name).mkdir(parents=True)
        for number in range(count):
            pixels = draw.integers(0, 256, (40, 40, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / part / name / f"{number}.png")
    return root


def truncate(path: Path) -> None:
    """Its first bytes say what it is, its last ones are gone."""
    path.write_bytes(path.read_bytes()[:-1000])


def run(capsys: Capture, *words: str) -> tuple[int, str, str]:
    code = command(*words)
    out, err = capsys.readouterr()
    return code, out, err


def test_all_is_well(here: Path) -> None:
    write_photos(here / "photos", 3)
    for number in range(2):
        Image.new("L", (8 + number, 60)).save(here / "photos" / "train" / "cat" / f"more-{number}.png")
    Image.new("P", (100, 90)).save(here / "photos" / "val" / "dog" / "more.gif.png")
    facts = check_data("photos", workers=2)
    assert (facts.train, facts.test, facts.classes) == (8, 7, 2)
    assert (facts.train_from, facts.test_from) == ("photos/train", "photos/val")
    assert (facts.smallest_class, facts.largest_class) == (("dog", 3), ("cat", 5))
    assert facts.sizes == ((60, 8), (40, 40), (90, 100))  # height and width, by their area
    assert facts.modes == {"RGB": 12, "L": 2, "P": 1}
    assert not facts.broken and not facts.in_both and not facts.wrong_classes and facts.is_well


@pytest.mark.parametrize("workers", [0, 3])
def test_every_file_is_decoded(workers: int, here: Path) -> None:
    photos = write_photos(here / "photos")
    truncate(photos / "train" / "cat" / "1.png")
    (photos / "train" / "dog" / "3.png").write_bytes(b"")
    (photos / "val" / "cat" / "0.png").write_text("no image")
    (photos / "val" / "dog" / "2.png").unlink()
    (photos / "val" / "dog" / "2.png").symlink_to("nowhere.png")
    seen: list[tuple[int, int]] = []
    facts = check_data("photos", workers=workers, tell=lambda done, count: seen.append((done, count)))
    assert [it.file for it in facts.broken] == [
        f"photos/{name}.png" for name in ("train/cat/1", "train/dog/3", "val/cat/0", "val/dog/2")
    ]
    reasons = [it.reason for it in facts.broken]
    assert reasons[1:3] == ["the file is empty", "it is no image that PIL knows"]
    assert "runcated" in reasons[0] and "No such file" in reasons[3]
    assert seen == [(number, 16) for number in range(1, 17)]
    assert not facts.in_both and sum(facts.modes.values()) == 12 and not facts.is_well


@pytest.fixture
def in_time() -> Iterator[None]:
    """What waits for a pipe ends with an error, not never."""

    def stop(*_: Any) -> None:
        raise AssertionError("a pipe was waited for")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 10, 1)  # again and again: an error may be taken for that of a broken file
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.usefixtures("in_time")
def test_what_is_no_file_is_never_opened(here: Path, capsys: Capture) -> None:
    photos = write_photos(here / "photos")
    os.mkfifo(photos / "train" / "cat" / "0.fifo.png")  # the first, whose size is looked at
    os.mkfifo(here / "pipe")
    (photos / "val" / "cat" / "link.png").symlink_to(here / "pipe")
    (photos / "val" / "dog" / "endless.png").symlink_to("/dev/zero")
    (photos / "val" / "dog" / "well.png").symlink_to(photos / "val" / "dog" / "1.png")  # what it leads to is a file
    told = "it is no file, but a pipe, a device or a socket"
    code, out, err = run(capsys, "data", "photos", "--json", "--quiet", "--workers", "0")
    broken = [f"photos/{name}.png" for name in ("train/cat/0.fifo", "val/cat/link", "val/dog/endless")]
    assert json.loads(out)["broken"] == [{"file": name, "reason": told, "refused": False} for name in broken]
    assert (code, err.splitlines()[-1].startswith("dmcp: 3 of 20 image files cannot be read")) == (2, True)
    code, _, err = run(capsys, *TRAIN)
    assert code == 2 and f"photos/val/cat/link.png ({told}) and 1 more of the 11 test images cannot be read" in err
    code, out, err = run(capsys, *TRAIN, "--corrupt", "skip")
    assert code == 0 and json.loads(out)["replaced"]["test"], err


def test_the_same_bytes_in_train_and_test_are_found(here: Path) -> None:
    photos = write_photos(here / "photos")
    for old, new in (("train/cat/2", "val/cat/0"), ("train/dog/1", "val/cat/3")):
        (photos / f"{new}.png").write_bytes((photos / f"{old}.png").read_bytes())
    (photos / "train" / "cat" / "3.png").write_bytes((photos / "train" / "cat" / "0.png").read_bytes())  # train alone
    for part in ("train", "val"):  # broken files are alike, but no images
        (photos / part / "dog" / "0.png").write_bytes(b"")
    facts = check_data("photos")
    assert facts.in_both == (
        ("photos/val/cat/0.png", "photos/train/cat/2.png"),
        ("photos/val/cat/3.png", "photos/train/dog/1.png"),
    )


def test_classes_that_other_commands_refuse_are_told_all_at_once(here: Path, capsys: Capture) -> None:
    photos = write_photos(here / "photos", 1, ("ant", "bee", "cat", "dog", "eel"))
    for name in ("train/ant", "train/bee", "train/cat", "train/dog", "val/eel"):
        (photos / name / "0.png").unlink()
    (photos / "val" / "fox").mkdir()
    (photos / "val" / "fox" / "0.txt").write_text("no image")
    facts = check_data("photos")
    empty = ("photos/train/ant", "photos/train/bee", "photos/train/cat", "photos/train/dog", "photos/val/eel")
    assert facts.empty_classes == (*empty, "photos/val/fox") and facts.lone_classes == ("photos/val/fox",)
    assert facts.smallest_class == ("ant", 0) and not facts.is_well
    code, out, err = run(capsys, "data", "photos", "--quiet")
    assert code == 2 and all(name in out for name in empty)
    assert (
        "photos: 6 class folders are empty, and 1 is not in both train/ and val/: put images there, or remove them.\n"
        in err
    )
    with pytest.raises(DataError, match="There are no image files"):
        load("photos")


def test_arrays_are_looked_at_too(here: Path, capsys: Capture) -> None:
    facts = check_data("digits")
    assert (facts.train, facts.test, facts.classes) == (1415, 382, 10)
    assert facts.sizes == ((8, 8),) * 3 and facts.modes == {"1 channel": 1797} and facts.is_well
    assert "writers" in facts.test_from
    images = np.arange(6 * 16 * 16 * 3).reshape(6, 16, 16, 3).astype(np.uint8)
    images[:, 0, 0, 0] = np.arange(6)
    (here / "shards").mkdir()
    np.savez(here / "shards" / "train-0.npz", images=images[:4], labels=np.array([0, 0, 3, 3]))
    np.savez(here / "shards" / "test-0.npz", images=images[[4, 1]], labels=np.array([0, 3]))
    facts = check_data("shards")
    assert facts.in_both == (("test image 1", "training image 1"),) and facts.modes == {"3 channels": 6}
    assert facts.test_from == "shards/test-*.npz" and facts.smallest_class == ("1", 0)
    assert facts.empty_classes == ("1", "2") and facts.is_well  # other commands take them
    assert run(capsys, "data", "shards", "--input", "3x8x8")[2] == (
        "dmcp: --input: the images of shards are 3x16x16: leave it out.\n"
    )


def test_cifar_is_found_where_other_commands_look_for_it(here: Path) -> None:
    (here / "data" / "cifar10").mkdir(parents=True)
    images = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    for part in ("train", "test"):
        np.savez(here / "data" / "cifar10" / f"{part}-0.npz", images=images, labels=np.arange(4) % 2)
    facts = check_data("cifar10")
    assert facts.test_from == "data/cifar10/test-*.npz" and len(facts.in_both) == 4


# -- the command


def test_the_command_says_what_is_there(here: Path, capsys: Capture) -> None:
    photos = write_photos(here / "photos")
    code, out, err = run(capsys, "data", "photos", "--input", "3x48x32", "--workers", "1")
    assert (code, err) == (0, "reading: 16 of 16 files\n")
    assert out == (
        "photos: 2 classes, the smallest cat (4 training images), the largest dog (4)\n"
        "8 training images in photos/train\n"
        "8 test images in photos/val\n"
        "height x width: smallest 40x40, median 40x40, largest 40x40\n"
        "colour: RGB 16; all are read as RGB\n"
        "smaller than 48x32 in height or width, and enlarged: 16\n"
        "All files can be read.\n"
        "No test image is among the training images (same bytes).\n"
    )
    for number in range(4):
        truncate(photos / "train" / "cat" / f"{number}.png")
    (photos / "val" / "dog" / "0.png").write_bytes((photos / "train" / "dog" / "2.png").read_bytes())
    code, out, err = run(capsys, "data", "photos", "--quiet", "--most", "3")
    assert code == 2
    assert err == "dmcp: 4 of 16 image files cannot be read: repair or remove them, or skip them with --corrupt skip.\n"
    listed = out.split("4 files cannot be read:\n")[1].splitlines()
    assert re.fullmatch(r"  photos/train/cat/0\.png: .*runcated.*", listed[0])
    assert listed[3] == "  and 1 more: --most 4 lists all"
    assert (
        "1 test image is among the training images (same bytes):\n  photos/val/dog/0.png is photos/train/dog/2" in out
    )
    code, out, _ = run(capsys, "data", "photos", "--quiet", "--json")
    facts = json.loads(out)
    assert code == 2 and len(facts["broken"]) == 4 and facts["broken"][0]["file"] == "photos/train/cat/0.png"
    assert facts["in_both"] == [{"test": "photos/val/dog/0.png", "train": "photos/train/dog/2.png"}]
    assert facts["train"] == {"images": 8, "from": "photos/train"} and facts["well"] is False
    assert facts["sizes"] == {"smallest": [40, 40], "median": [40, 40], "largest": [40, 40]}


def test_the_command_takes_built_in_data(capsys: Capture) -> None:
    code, out, err = run(capsys, "data", "digits")
    assert (code, err) == (0, "")
    assert out.startswith("digits: 10 classes, the smallest ") and "382 test images: " in out and "cannot" not in out


# -- before the first step


def spoil_text(path: Path) -> None:
    path.write_text("no image")


def spoil_empty(path: Path) -> None:
    path.write_bytes(b"")


def test_files_whose_first_bytes_are_no_images(here: Path) -> None:
    photos = write_photos(here / "photos")
    part = load("photos").test
    assert isinstance(part, FolderSet) and no_images(part) == []
    for number, spoil in enumerate((spoil_text, spoil_empty, truncate)):
        spoil(photos / "val" / "dog" / f"{number}.png")
    assert [it.file for it in no_images(part)] == ["photos/val/dog/0.png", "photos/val/dog/1.png"]


def test_rare_kinds_of_files_are_known_before_threads_begin(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PIL learns of them when it meets one; of threads that meet one at once, some would call it no image."""
    write_photos(here / "photos")
    done: list[str] = []
    monkeypatch.setattr("PIL.Image.init", lambda: done.append("init"))
    monkeypatch.setattr("dmcp.data.check._read_head", done.append)
    part = load("photos").test
    assert isinstance(part, FolderSet)
    for tried in (100, 2):  # the second time most are left to threads, since no disk is so fast
        done.clear()
        monkeypatch.setattr("dmcp.data.check._TRIED", tried)
        monkeypatch.setattr("dmcp.data.check._WAITED", 0.0)
        assert no_images(part) == []
        assert done[0] == "init" and [path for path in done if path != "init"] == list(part.paths)


@pytest.mark.parametrize(
    "words",
    [
        TRAIN,
        ("search", *NETWORK, "--data", "photos", "--batch", "4"),
        ("prune", *NETWORK, "--data", "photos", "--batch", "4", "--dry-run"),
        ("prune", *NETWORK, "--data", "photos", "--batch", "4", "--seeds", "2"),
        ("compare", *NETWORK, "--data", "photos", "--batch", "4", "--holdout", "0.25"),
    ],
    ids=["train", "search", "dry-run", "seeds", "compare"],
)
def test_test_files_that_are_no_images_are_refused_at_the_start(
    words: tuple[str, ...], here: Path, capsys: Capture
) -> None:
    photos = write_photos(here / "photos", 8)
    spoil_empty(photos / "val" / "dog" / "1.png")
    spoil_text(photos / "val" / "dog" / "3.png")
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    last = err.splitlines()[-1]
    assert re.match(
        r"dmcp: photos/val/dog/1\.png \(the file is empty\) and 1 more of the 16 test images cannot be read: repair or "
        r"remove them",
        last,
    ), err
    assert last.endswith("dmcp data photos finds all broken files at once.")
    assert ("--corrupt skip" in last) == (words[0] != "compare")  # which has no such option
    assert not (here / "runs").exists()


@pytest.mark.parametrize("more", [(), ("--corrupt", "skip")], ids=["stop", "skip"])
def test_test_files_that_cannot_be_opened_are_refused_at_the_start_since_nothing_skips_them(
    more: tuple[str, ...], here: Path, capsys: Capture
) -> None:
    photos = write_photos(here / "photos", 8)
    (photos / "val" / "dog" / "more.png").symlink_to(here / "gone.png")
    code, out, err = run(capsys, *TRAIN, *more)
    assert (code, out) == (2, "")
    told = (
        r"dmcp: photos/val/dog/more\.png \(No such file .*\), a test image, cannot be read: repair or remove it\. dmcp"
    )
    assert re.match(told, err.splitlines()[-1])
    code, _, err = run(capsys, "data", "photos")
    assert (code, err.splitlines()[-1]) == (2, "dmcp: 1 of 33 image files cannot be read: repair or remove them.")


def test_a_resume_refuses_them_with_what_can_be_done_then(here: Path, capsys: Capture) -> None:
    photos = write_photos(here / "photos")
    truncate(photos / "val" / "dog" / "3.png")
    code, _, err = run(capsys, *TRAIN, "--out", "one")
    assert code == 2 and "dmcp train --resume one" in err and "dmcp data photos finds all" in err
    spoil_text(photos / "val" / "dog" / "2.png")
    code, _, err = run(capsys, "train", "--resume", "one", "--workers", "0", "--quiet")
    assert code == 2 and "put a sound file in its place, or go on with --corrupt skip." in err and "remove" not in err


# -- files that were replaced


def test_how_many_were_replaced_is_in_report_and_data(here: Path, capsys: Capture) -> None:
    photos = write_photos(here / "photos")
    for name in ("train/cat/1", "train/dog/2", "val/dog/3"):
        truncate(photos / f"{name}.png")
    code, out, _ = run(capsys, *TRAIN, "--corrupt", "skip", "--out", "one")
    assert code == 0 and json.loads(out)["replaced"] == {"train": 2, "test": 1}
    report = (here / "one" / "report.md").read_text()
    assert "3 image files could not be read: 2 of 8 training images, 1 of 8 test images." in report
    assert "other images took their place, and count twice" in report
    listed = [json.loads(line) for line in (here / "one" / "replaced.jsonl").read_text().splitlines()]
    assert {"part": "test", "file": "photos/val/dog/3.png"} in listed and len(listed) == 3
    code, out, err = run(capsys, "evaluate", "one", "--corrupt", "skip", "--workers", "0", "--device", "cpu", "--json")
    assert code == 0 and json.loads(out)["replaced"] == {"train": 0, "test": 1}, err


def test_a_sound_run_says_that_none_was(here: Path, capsys: Capture) -> None:
    write_photos(here / "photos")
    code, out, _ = run(capsys, *TRAIN, "--corrupt", "skip", "--out", "one")
    assert code == 0 and json.loads(out)["replaced"] == {"train": 0, "test": 0}
    assert "replaced" not in (here / "one" / "report.md").read_text() and not (here / "one" / "replaced.jsonl").exists()


def test_skip_given_with_resume_is_kept(here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """And so is what was replaced in a sitting that was killed."""
    photos = write_photos(here / "photos")
    truncate(photos / "val" / "dog" / "3.png")
    assert run(capsys, *TRAIN, "--out", "one")[0] == 2
    before = json.loads((here / "one" / "settings.json").read_text())

    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dmcp.cli.prune.save", die)  # all is tested
        assert run(capsys, "train", "--resume", "one", "--corrupt", "skip", "--workers", "0", "--quiet")[0] == 130
    after = json.loads((here / "one" / "settings.json").read_text())
    assert after == before | {"corrupt": "skip"} and before["corrupt"] == "stop"
    code, out, err = run(capsys, "train", "--resume", "one", "--workers", "0", "--quiet", "--json")
    assert code == 0, err
    assert json.loads(out)["replaced"] == {"train": 0, "test": 1}


def test_what_earlier_sittings_replaced_counts(here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = write_photos(here / "photos")
    truncate(photos / "train" / "dog" / "2.png")
    words = (*TRAIN, "--epochs", "2", "--save-steps", "1", "--corrupt", "skip", "--out", "one")  # the last one counts

    def die(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dmcp.cli.prune.compare", die)  # all is trained
        assert run(capsys, *words)[0] == 130
    code, out, err = run(capsys, "train", "--resume", "one", "--workers", "0", "--quiet", "--json")
    assert code == 0, err
    assert json.loads(out)["replaced"] == {"train": 1, "test": 0}
    assert "1 of 8 training images" in (here / "one" / "report.md").read_text()


def test_prune_and_search_say_it_too(here: Path, capsys: Capture) -> None:
    photos = write_photos(here / "photos")
    truncate(photos / "train" / "cat" / "1.png")
    truncate(photos / "val" / "dog" / "3.png")
    common = (*NETWORK, "--data", "photos", "--batch", "4", "--workers", "0", "--quiet", "--json", "--corrupt", "skip")
    common += ("--search-epochs", "2")
    code, out, err = run(capsys, "prune", *common, "--epochs", "1", "--out", "pruned")
    assert code == 0 and json.loads(out)["replaced"] == {"train": 1, "test": 1}, err
    assert "1 of 8 training images, 1 of 8 test images" in (here / "pruned" / "report.md").read_text()
    code, out, err = run(capsys, "search", *common, "--out", "searched")
    assert code == 0 and json.loads(out)["replaced"] == {"train": 1, "test": 0}, err


def test_several_seeds_say_it_once(here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    photos = write_photos(here / "photos")
    truncate(photos / "val" / "dog" / "3.png")

    def prune(argv: Any, seeds: Any, folder: Path, *_: Any) -> list[Path]:
        for seed in seeds:
            one = folder / f"seed-{seed}"
            one.mkdir(parents=True)
            (one / "settings.json").write_text("{}")
            Run(one).note_replaced("test", ["photos/val/dog/3.png"])
        return [folder / f"seed-{seed}" for seed in seeds]

    monkeypatch.setattr("dmcp.cli.launch.run_seeds", prune)
    words = ("prune", *NETWORK, "--data", "photos", "--batch", "4", "--corrupt", "skip", "--seeds", "2", "--out", "all")
    code, out, err = run(capsys, *words, "--json")
    assert code == 0 and json.loads(out)["replaced"] == {"train": 0, "test": 1}
    assert err == "1 image file could not be read and was replaced: photos/val/dog/3.png\n"


def test_one_of_several_seeds_does_not_repeat_what_the_command_says(
    here: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmcp.runs.draw_all", lambda *_, **__: [])
    truncate(write_photos(here / "photos") / "val" / "dog" / "3.png")
    words = ("prune", *NETWORK, "--data", "photos", "--batch", "5", "--workers", "0", "--corrupt", "skip", "--quiet")
    words += ("--search-epochs", "1", "--epochs", "1", "--warmup", "0", "--graphs", "--device", "cpu", "--json")
    told = ("With batches of 5, 3 of 8 training images", "--graphs changes nothing on cpu", "could not be read")
    for parent, times in (("", 1), (str(os.getppid()), 0)):
        monkeypatch.setenv(launch.PARENT, parent)
        code, _, err = run(capsys, *words, "--out", f"run{parent}")
        assert code == 0 and [err.count(text) for text in told] == [times] * 3, err


def test_a_dry_run_says_how_broken_files_are_found(here: Path, capsys: Capture) -> None:
    write_photos(here / "photos")
    words = ("prune", *NETWORK, "--data", "photos", "--batch", "4", "--workers", "0", "--dry-run")
    code, out, err = run(capsys, *words)
    assert code == 0, err
    assert "dmcp data photos finds all broken files at once." in out


def test_the_time_that_is_left_is_that_of_the_files(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not also that before the first one: they may have been listed for minutes."""
    now = [1000.0]
    monkeypatch.setattr("dmcp.cli.session.time.monotonic", lambda: now[0])
    progress = Progress()
    now[0] += 500
    for done in range(1, 101):
        progress.count("reading", done, 100, "files")
        now[0] += 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1] == "reading: 100 of 100 files"
    left = [re.search(r": (\d+) of 100 files, (.*) left", line) for line in lines]
    found = [(int(match[1]), match[2]) for match in left if match]
    assert found and all(int(clock[:-2]) <= 101 - done for done, clock in found if done > 50), lines


def test_a_line_that_a_kill_has_cut_loses_no_run(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.note_replaced("test", ["b.png", "a.png"])
    with (tmp_path / "replaced.jsonl").open("a") as file:
        file.write('{"part": "te')
    run.note_replaced("test", ["c.png"])  # joins the cut line
    run.note_replaced("train", ["d.png"])
    assert run.replaced("test") == {"a.png", "b.png"} and run.replaced("train") == {"d.png"}
