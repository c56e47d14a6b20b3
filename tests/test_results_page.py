"""The page of all results: made from files alone, in order, and silent about nothing that is missing."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from test_experiments import run

import dmcp
from dmcp.commands import paper as paper_commands
from dmcp.comparison.comparing import Comparison
from dmcp.engine import Engine, Precision
from dmcp.errors import FileError
from dmcp.nets import build, sample_shape
from dmcp.paper.arms import Study
from dmcp.paper.findings import write
from dmcp.paper.outcomes import Shown
from dmcp.paper.page import CLAIMS, NOTES, make_page
from dmcp.paper.tasks import command
from dmcp.running.jobs import Job
from dmcp.training import TrainConfig

FULL = 1000  # MACs of the unpruned network


def cell(label: str, name: str, macs: int = 495, **more: Any) -> dict[str, Any]:
    return {"label": label, "name": name, "macs": macs, "seconds": 60.0, "device": "H200", "widths": {"a": 3}} | more


def line(method: str, budget: str, macs: list[int]) -> dict[str, Any]:
    shares = [one / FULL for one in macs]
    row = {"method": method, "budget": budget, "own": False, "accuracies": [0.9], "mean": 0.9, "deviation": None}
    return row | {"macs": macs, "params": [7, 7], "macs_share": shares}


def put(place: Path, experiment: str, stem: str = "", **changes: Any) -> None:
    """Write the files of an experiment, made by hand."""
    place.mkdir(exist_ok=True)
    stem = stem or experiment
    data = {
        "experiment": experiment,
        "about": f"Table of {experiment}.",
        "model": "cifar:resnet20",
        "model_args": [],
        "data": "cifar10",
        "batch": 512,
        "seeds": [0, 1],
        "train": asdict(TrainConfig(epochs=60, lr=1.6, weight_decay=5e-4)),
        "settings": {},
        "macs": FULL,
        "missing": [],
        "rows": [],
        "cells": [cell("usual", "dmcp-50%-seed0")],
        "command": ["dmcp", "paper", experiment, "--budget", "a b"],
        "search_epochs": 30,
        "holdout": 0.1,
    }
    (place / f"{stem}.json").write_text(json.dumps(data | changes))
    (place / f"{stem}.md").write_text(f"| table of {stem} |\n")
    (place / f"{stem}.svg").write_text("<svg/>")


def page_of(place: Path) -> str:
    return make_page(place, place.parent / "docs" / "results.md")


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n")[1].split("\n## ")[0]


# -- what is on it


def test_experiments_come_in_order_with_their_own_files(tmp_path: Path) -> None:
    place = tmp_path / "results"
    put(place, "warmup")
    put(place, "distribution")
    put(place, "main", "main-cifar-resnet56", model="cifar:resnet56")
    put(place, "main")
    (place / "distribution-widths.svg").write_text("<svg/>")
    (place / "other.json").write_text('{"experiment": "not ours"}')
    text = page_of(place)
    titles = [row[3:] for row in text.splitlines() if row.startswith("## ")]
    networks = ["main: cifar:resnet20", "main: cifar:resnet56"]
    assert titles == [CLAIMS, "Contents", *networks, "warmup: cifar:resnet20", "distribution: cifar:resnet20"]
    first = section(text, "main: cifar:resnet20")
    assert "| table of main |" in first and "(../results/main.svg)" in first and "resnet56" not in first
    assert "dmcp paper main --budget 'a b'\n" in first and "Table of main." in first
    drawn = section(text, titles[-1])
    assert drawn.count("](../results/distribution") == 2 and "target" not in drawn
    assert "- [main: cifar:resnet56](#main-cifarresnet56): Table of main." in text
    assert "needs an `--out` of its own" in text  # two networks


def test_the_same_files_give_the_same_page(tmp_path: Path) -> None:
    for name in ("one", "two"):
        for experiment in ("main", "warmup") if name == "one" else ("warmup", "main"):
            (tmp_path / name).mkdir(exist_ok=True)
            put(tmp_path / name / "results", experiment)
    assert page_of(tmp_path / "one" / "results") == page_of(tmp_path / "two" / "results")


def test_the_recipe_is_told_once_for_each_protocol(tmp_path: Path) -> None:
    place = tmp_path / "results"
    put(place, "main")
    put(place, "warmup")
    put(place, "scheme", settings={"dmcp": {"epochs": 9}, "amc": {"episodes": 5}}, search_epochs=9, holdout=None)
    rows = [row for row in page_of(place).splitlines() if row.startswith("- **")]
    assert len(rows) == 2
    for told in (
        "epochs 60, batch 512",
        "1.6 at a batch of 2,048",
        "decay 0.0005",
        "30 epochs",
        "10% of",
        "main, warmup.",
    ):
        assert told in rows[0]
    assert "9 epochs" in rows[1] and "Other settings: amc.episodes=5." in rows[1] and "was not kept" in rows[1]


def test_a_cell_in_two_rows_is_counted_once(tmp_path: Path) -> None:
    place = tmp_path / "results"
    again = [cell("usual", "dmcp-50%-seed0"), cell("one search", "dmcp-50%-seed0")]
    put(place, "extra", cells=[*again, cell("usual", "dmcp-50%-seed1", seconds=None, device="cpu")])
    put(place, "warmup")
    text = page_of(place)
    told = section(text, "extra: cifar:resnet20")
    assert "60.0 s, of which 0.0 s its own, the sum over 1 cell;" in told and "The time of 1 cell was not kept." in told
    assert "Machines: H200 (1 cell), cpu (1 cell)." in told
    assert "counted once: 60.0 s, the sum over 1 cell;" in text  # warmup has the same cell


def test_time_of_its_own_is_that_of_cells_which_no_other_shares(tmp_path: Path) -> None:
    place = tmp_path / "results"
    shared = cell("usual", "dmcp-50%-seed0")
    put(place, "warmup", cells=[shared, cell("cold", "dmcp-cold-50%-seed0", seconds=300.0)])
    put(place, "scheme", cells=[shared])
    put(place, "sandwich", cells=[shared], batch=64)  # another protocol, so another cell
    times = {
        name: section(page_of(place), f"{name}: cifar:resnet20").split("Time at work: ")[1].split(", the sum")[0]
        for name in ("warmup", "scheme", "sandwich")
    }
    assert times == {
        "warmup": "6.0 min, of which 5.0 min its own",
        "scheme": "60.0 s, of which 0.0 s its own",
        "sandwich": "60.0 s, of which 60.0 s its own",
    }


def test_cells_that_were_taken_from_data_are_of_those_that_ran_them(tmp_path: Path) -> None:
    place = tmp_path / "results"
    both, again = cell("usual", "dmcp-50%-seed0"), cell("fast", "dmcp-fast-50%-seed0")
    put(place, "warmup", cells=[both])
    put(place, "explain", cells=[both, again], recorded=["dmcp-50%-seed0", "dmcp-fast-50%-seed0"])  # once its own
    text = page_of(place)
    assert "60.0 s, of which 60.0 s its own" in section(text, "warmup: cifar:resnet20")
    assert "2.0 min, of which 60.0 s its own" in section(text, "explain: cifar:resnet20")


def test_what_a_table_could_be_taken_for_is_said(tmp_path: Path) -> None:
    place = tmp_path / "results"
    few = [line(name, "50%", [490, 490]) for name in ("amc", "l1")]
    put(place, "main", rows=[line("dmcp", "50%", [490, 490]) | {"accuracies": [0.9, 0.8]}, *few])
    put(place, "sampling")
    told = section(page_of(place), "main: cifar:resnet20")
    assert "- Rows with fewer than 2 seeds: amc, l1.\n" in told and "cannot be compared by *search, s*" in told
    other = section(page_of(place), "sampling: cifar:resnet20")
    assert "picked by test accuracy" in other and "fewer" not in other and "search, s" not in other


def test_images_that_searches_had_are_not_passed_over_in_silence(tmp_path: Path) -> None:
    for name in ("recipe", "rates"):
        put(tmp_path / "results", name)
    text = page_of(tmp_path / "results")
    assert text.count("no test image was used here.") == 2
    had = "- The searches had all training images, the held-out ones among them: only the trainings had not."
    assert text.count(had) == 1 and had in section(text, "rates: cifar:resnet20")


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    place = tmp_path / "results"
    put(place, "warmup", missing=[f"dmcp-cold-50%-seed{n}" for n in range(8)], command=[])
    put(place, "scheme")
    (place / "scheme.md").unlink()
    text = page_of(place)
    told = section(text, "warmup: cifar:resnet20")
    assert "**Missing: 8 of 9 cells not done:** `dmcp-cold-50%-seed0`" in told and ", ...." in told
    assert "The command was not kept" in told
    assert "Nothing is missing: 1 of 1 cell done." in section(text, "scheme: cifar:resnet20")
    assert "The table is missing: scheme.md." in section(text, "scheme: cifar:resnet20")


def test_rows_outside_the_band_are_listed(tmp_path: Path) -> None:
    place = tmp_path / "results"
    budgets = {"uniform": ("50%", [490, 500]), "random": ("30%", [280, 299]), "l1": ("0.5k", [501, 501])}
    rows = [line("unpruned", "", [FULL, FULL]), *(line(name, *own) for name, own in budgets.items())]
    mine = [cell(f"{name} at x", f"{name}-x-seed0") for name in ("unpruned", "uniform", "random")]
    put(place, "main", rows=[*rows, line("dmcp", "params:5k", [10, 10])], cells=mine)
    cells = [
        cell("good", "dmcp-50%-seed0", 490),
        cell("wide", "dmcp-wide-500-seed0", 489),
        cell("none", "recover-seed0", 0),
    ]
    put(place, "scale", cells=cells)
    put(place, "warmup", cells=cells[:1])
    text = page_of(place)
    told = section(text, "main: cifar:resnet20")
    assert "outside 0.98 to 1.00 of their target: random at 30% (0.933–0.997), l1 at 0.5k (1.002).\n" in told
    assert "Without a target for MACs alone: dmcp at params:5k." in told
    assert "- Rows of l1, dmcp: their cells were made by `dmcp compare`" in told
    assert "of their target: wide (0.978).\n" in section(text, "scale: cifar:resnet20")
    assert "The MACs of all rows with a target (1) are 0.98" in section(text, "warmup: cifar:resnet20")


@pytest.mark.parametrize(
    "changes", [{"batch": "many"}, {"cells": [{}]}, {"rows": [{"budget": 5}]}, {"train": {"x": 1}}]
)
def test_data_that_are_not_ours_are_refused_by_name(changes: dict[str, Any], tmp_path: Path) -> None:
    put(tmp_path / "results", "warmup", **changes)
    with pytest.raises(FileError, match=r"warmup\.json: not as dmcp paper writes it"):
        page_of(tmp_path / "results")


def test_a_folder_without_experiments_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="there are no experiments here"):
        page_of(tmp_path)


# -- claims and notes


def test_notes_come_before_claims_which_name_alike_networks_apart(tmp_path: Path) -> None:
    place = tmp_path / "results"
    cells = [cell("x", f"{arm}-50%-seed{seed}", accuracy=0.8) for arm in ("dmcp", "dmcp-cold") for seed in (0, 1)]
    put(place, "warmup", cells=cells)
    put(place, "warmup", "warmup-long", cells=cells[:3], search_epochs=60)
    put(place, "distribution")
    assert NOTES not in page_of(place)
    (place / "notes.md").write_text("It **holds**.\n")
    text = page_of(place)
    titles = [row[3:] for row in text.splitlines() if row.startswith("## ")]
    assert titles[:4] == [NOTES, CLAIMS, "Contents", "warmup: cifar:resnet20 (warmup)"]
    assert section(text, NOTES).strip() == "It **holds**."
    rows = [[*map(str.strip, row.split("|"))][2:-1] for row in section(text, CLAIMS).splitlines() if "Warm-up h" in row]
    assert rows == [
        ["cifar:resnet20 (warmup)", "+0.8 (MobileNetV2 at 31 %)", "+0.00 ± 0.00 (2)", "", "0 of 2", "not clear"],
        ["cifar:resnet20 (warmup-long)", "+0.8 (MobileNetV2 at 31 %)", "+0.00 (1)", "", "0 of 1", "not clear"],
    ]


def test_accuracies_that_are_not_numbers_are_refused_by_name(tmp_path: Path) -> None:
    put(tmp_path / "results", "warmup", cells=[cell("x", "dmcp-50%-seed0", accuracy="good")])
    with pytest.raises(FileError, match=r"warmup\.json: not as dmcp paper writes it"):
        page_of(tmp_path / "results")


def test_the_page_of_the_committed_results_can_be_made() -> None:
    root = Path(__file__).parent.parent
    experiments = [path for path in (root / "results").glob("*.json") if "experiment" in json.loads(path.read_text())]
    assert experiments
    text = make_page(root / "results", root / "docs" / "results.md")
    assert all(f"](../results/{path.stem}" in text for path in experiments if path.with_suffix(".svg").exists())
    assert section(text, CLAIMS).count("\n| ") > len(experiments)
    assert (root / "docs" / "results.md").read_text() == text, "run: dmcp paper --page docs/results.md"


# -- the command that is kept


def study(**changes: Any) -> Study:
    net = build("digits:resnet")
    common = Comparison(
        job=Job(model="digits:resnet", data="/root/data/digits", batch=64, device="cpu"),
        engine=Engine(precision=Precision.FLOAT32, compile=False, deterministic=True),
        train=TrainConfig(epochs=4, lr=0.7, warmup_lr=0.7 / 4, warmup_epochs=1, weight_decay=0.001),
        budgets=("60%", "40%"),
        methods=("uniform", "random", "dmcp"),
        seeds=(3, 4),
        settings={"dmcp": {"epochs": 2}},
        fine_tune_epochs=1,
    )
    return Study(common=replace(common, **changes), graph=dmcp.trace(net, torch.zeros(2, *sample_shape(net))))


@pytest.mark.parametrize("name", ["main", "scale"])
def test_the_command_makes_the_same_study(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Comparison] = []

    def spy(it: Comparison, wider: tuple[str, ...], names: list[str], folder: Path, tells: bool) -> Study:
        made.append(it)
        assert (wider, names) == (("width=24",), [name])
        raise typer.Exit

    monkeypatch.setattr(paper_commands, "_open", spy)
    it = study()
    run(capsys, *command(it, name)[2:])
    job = replace(it.common.job, data="digits")
    budgets = it.common.budgets if name == "main" else paper_commands.BUDGETS  # which are of main only
    assert made == [replace(it.common, job=job, budgets=budgets)]


def test_data_have_what_makes_them_again(tmp_path: Path) -> None:
    write(study(), "main", Shown("", []), tmp_path / "cells", tmp_path, "main")
    data = json.loads((tmp_path / "main.json").read_text())
    assert shlex.join(data["command"]).startswith("dmcp paper main --model digits:resnet --data digits --epochs 4 ")
    assert (data["search_epochs"], data["holdout"]) == (2, 0.1)


# -- the option


def test_the_page_alone_needs_no_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    put(tmp_path / "results", "warmup")
    page = tmp_path / "docs" / "results.md"
    code, told, _ = run(capsys, "--results", str(tmp_path / "results"), "--page", str(page))
    assert code == 0 and told == f"{page}\n"
    assert page.read_text() == page_of(tmp_path / "results")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "Name an experiment: "),
        (["--page", "x.md", "--dry-run"], "Name an experiment"),
        (["--page", "."], "--page: . is a folder: name the file in it, like results.md."),
        (["--page", "x.md", "--results", "nowhere"], "nowhere: there are no experiments here"),
    ],
)
def test_mistakes_are_told_in_a_sentence(
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, _, told = run(capsys, *arguments)
    assert code != 0 and sentence in told and len(told.splitlines()) == 1
    assert not (tmp_path / "x.md").exists()
