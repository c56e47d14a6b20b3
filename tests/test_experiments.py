"""experiments/: what is recorded, the settings that made it, the tables of the report, and tiny runs of every kind."""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

import dmcp
from dmcp import models
from dmcp.defaults import resolve_training

FOLDER = Path(__file__).parents[1] / "experiments"
sys.path.insert(0, str(FOLDER))
import judge  # noqa: E402
import moves  # noqa: E402
import race  # noqa: E402
import room  # noqa: E402
import run  # noqa: E402
import tables  # noqa: E402

RECORDED = {path.stem: json.loads(path.read_text()) for path in sorted((FOLDER / "results").glob("*.json"))}
SETTINGS = {path.stem: run.read_settings(path) for path in sorted((FOLDER / "settings").glob("*.toml"))}
VARIED = [name for name, it in SETTINGS.items() if "variant" in it]


@pytest.mark.parametrize("name", VARIED)
def test_settings_are_those_of_the_recorded_runs(name: str) -> None:
    settings = SETTINGS[name]
    for it in run.runs_of(settings):
        dmcp.SearchConfig(budget=it["budget"] or "50%", **it["search"])
        dmcp.TrainConfig(**it["train"] | it.get("distilled", {}))
    if name in RECORDED:
        kept = RECORDED[name]
        known = {(cell["label"], cell["name"]) for cell in kept["cells"]}
        found = {(it["label"], it["name"]) for it in run.runs_of(settings)}
        gone = {pair for pair in known if "half-way" in pair[0]}  # of seeds: not in the package any more
        assert found == known - gone or (name == "distribution" and found > known)
        for key in ("model", "data", "batch"):
            assert settings[key] == kept[key]
        assert settings["search"]["epochs"] == kept["search_epochs"]
        made = vars(resolve_training(dmcp.TrainConfig(**settings["train"])))
        gone = ("distillation", "teacher_share", "teacher_temperature")  # other names and defaults since then
        recorded = {key: value for key, value in kept["train"].items() if key not in gone}
        assert {key: made[key] for key in recorded} == recorded


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() & RECORDED.keys() - {*VARIED}))
def test_comparisons_would_repeat_the_recorded_ones(name: str) -> None:
    words, kept = shlex.split(SETTINGS[name]["compare"]), RECORDED[name]
    typed, recipe = dict(itertools.pairwise(words)), kept.get("train") or kept["settings"]["train"]
    for option in ("epochs", "lr", "weight_decay"):
        assert float(typed[f"--{option.replace('_', '-')}"]) == recipe[option]
    graph = run._graph(typed["--model"], "{}", 10, (3, 32, 32))
    for row in kept.get("rows") or kept["lines"]:
        if row["method"] in ("uniform", "sfp") and row["budget"] in words:  # their widths are not searched
            widths = dmcp.uniform(graph, row["budget"], align=int(typed.get("--align", 0)) or None)
            assert row["macs"] == [graph.macs(widths)] * 2


def test_tables_of_the_report_are_what_the_results_say() -> None:
    text, page = tables.REPORT.read_text(), tables.PAGE.read_text()
    assert tables.filled(text + page) == text + page and "<!-- table pruned -->" in page
    assert all(f"<!-- table {name} -->" in text for name in [*RECORDED, "claims", "deviations"])
    found = [cell["accuracy"] for cell in RECORDED["warmup"]["cells"] if cell["label"] == "with warm-up"]
    assert f"| {100 * statistics.fmean(found):.2f} ± {100 * statistics.stdev(found):.2f} (3) |" in text


def test_a_tiny_experiment_runs_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = 'recover = { epochs = 1, mean = 1.0, alpha_lr = 5.0 }\nname = "alphas"\nlabel = "one"\nwidths = '
    small = 'base = "digits"\nbatch = 708\nmodel_args = { width = 4 }\n'
    (tmp_path / "tiny.toml").write_text(small)
    for kind in ("recover", "distribution"):
        (tmp_path / f"{kind}.toml").write_text(f'{small}[[variant]]\n{alone}"{kind}"\n')
        run.run_experiment(tmp_path / f"{kind}.toml", tmp_path, tmp_path / "out")
        assert tables.table_of(kind, tmp_path).count("\n") == 3
    run.run_experiment(tmp_path / "tiny.toml", tmp_path, tmp_path / "out")
    it = json.loads((tmp_path / "tiny.json").read_text())
    found = {cell["label"]: cell for cell in it["cells"]}
    assert [*found] == [variant["label"] for variant in SETTINGS["digits"]["variant"]]
    assert found["dmcp"]["widths"] == found["dmcp, distilled"]["widths"] != found["unpruned"]["widths"]
    assert all(0.45 < cell["macs"] / it["macs"] <= 0.5 for label, cell in found.items() if label != "unpruned")
    assert len({cell["accuracy"] for cell in found.values()}) > 4
    kept, written = sorted((tmp_path / "out").iterdir()), (tmp_path / "tiny.json").read_bytes()
    (tmp_path / "tiny.json").unlink()
    capsys.readouterr()
    run.run_experiment(tmp_path / "tiny.toml", tmp_path, tmp_path / "out")
    assert (sorted((tmp_path / "out").iterdir()), (tmp_path / "tiny.json").read_bytes()) == (kept, written)
    run.run_experiment(tmp_path / "tiny.toml", tmp_path, tmp_path / "out", only_list=True)
    assert "7 of 7 runs are recorded" in capsys.readouterr().out


def test_judged_searches_can_train_their_alphas_on_other_images() -> None:
    search = {"epochs": 2, "align": 1, "lr": 0.1, "min_lr": 0.01, "alpha_lr": 20.0}
    job = {
        "name": "tiny",
        "model": "digits:resnet",
        "data": "digits",
        "size": 60,
        "batch": 16,
        "seed": 0,
        "budget": "50%",
        "searches": {"same": search, "others": {**search, "alphas_on": 0.3}},
        "train": {"epochs": 1},
        "finals": [{"name": name, "widths": name} for name in ("same", "others", "uniform")],
    }
    lines: list[dict[str, object]] = []
    judge.run(job, lambda **found: lines.append(found))
    widths = [line["search"]["widths"] for line in lines if "search" in line]  # type: ignore[index]
    assert len(widths) == 2 and widths[0] != widths[1]
    trained = [line["trained"] for line in lines if "trained" in line]
    assert [it["name"] for it in trained] == ["same", "others", "uniform"]  # type: ignore[index]
    assert all(it["macs"] <= 0.5 and it["loss"] > 0 for it in trained)  # type: ignore[index, operator]


def test_commands_that_wait_for_a_gpu_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option exists and every file is there; nothing is searched or trained."""
    section = tables.REPORT.read_text().split("### To run on a GPU")[1].split("\n### ")[0]
    commands = re.findall(r"`python (experiments/[^`]+)`", section)
    typed: list[argparse.Namespace] = []

    def remember(settings: argparse.Namespace, *_: Any) -> None:
        typed.append(settings)

    monkeypatch.setattr(room, "measure", remember)
    monkeypatch.setattr(room, "show", print)
    monkeypatch.setattr(race, "measure_all", remember)
    monkeypatch.chdir(tmp_path)
    for command in commands:
        script, *words = shlex.split(command)
        if script.endswith("judge.py"):
            assert json.loads((FOLDER.parent / words[0]).read_text())["rule"]
            continue
        monkeypatch.setattr(sys, "argv", [script, *words])
        {"room": room, "race": race, "moves": moves}[Path(script).stem].main()
    assert len(commands) > 10 and len(typed) > 8
    for settings in typed:
        models.find(settings.model)


def test_the_tables_of_moves_are_what_the_results_say() -> None:
    section = tables.REPORT.read_text().split("### moves:")[1].split("\n### ")[0]
    lines = moves.summarize(race.rows_of(FOLDER / "results" / "moves.jsonl")).splitlines()
    said = {" | ".join(cell.strip() for cell in line.strip("|").split("|")) for line in lines}
    rows = [line.strip("| ") for line in section.splitlines() if line.startswith("| ")]
    assert len(rows) == 15 and set(rows) <= said
