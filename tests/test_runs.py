"""A run is a folder: what is written, what is read back, and what is done with folders that nobody should trust."""

from __future__ import annotations

import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import command
from folders import RUN_SETTINGS, TEST_LINES, TRAIN_LINE, step_lines, write_alphas, write_run
from nets import Residual, sample
from short_runs import pruned_residual

import dmcp
from dmcp.errors import DmcpError, FileError, WidthsError
from dmcp.report.finish import finish
from dmcp.runs.config import RunConfig
from dmcp.runs.files import COMMANDS, SUMMARY
from dmcp.runs.reading import list_runs, read_overview, read_run, read_runs
from dmcp.runs.saved_search import save_search
from dmcp.runs.writing import Run, free_folder
from dmcp.runtime.io import Lock
from dmcp.settings import SearchConfig

FILES = {"log.jsonl", "search.json", "search.safetensors", "widths.json", "model.safetensors", "report.md"}


def state(folder: Path) -> str:
    return str(read_run(folder).describe()["state"])


# writing


def test_a_real_run_is_written_and_read_back(tmp_path: Path) -> None:
    result, events = pruned_residual()
    run = Run(tmp_path / "deep" / "run")
    facts = {"macs": result.graph.macs(), "widths": dict(result.graph.full)}
    run.write("settings.json", RUN_SETTINGS | {"unpruned": facts})
    for event in events:
        run.on_event(event)
    assert state(run.folder) == "stopped"
    finish(run, result)
    names = {path.name for path in run.folder.iterdir()}
    assert names >= FILES and not [name for name in names if name.startswith(".")]  # nothing half written
    report = (run.folder / "report.md").read_text()
    assert all(row.name in report and f"{row.macs:,}" in report for row in result.rows)

    past = read_run(run.folder)
    assert (state(run.folder), past.problems) == ("done", ())
    assert past.rows == result.rows and past.search == result.search.log
    assert set(past.training) == {row.name for row in result.rows}
    assert dict(past.widths) == dict(result.widths)
    assert past.before == {space.name: space.size for space in result.graph.spaces}
    assert past.share("macs") == result.graph.macs(result.widths) / result.graph.macs()

    small = dmcp.load(run.folder, Residual(**Residual.FULL))
    x = torch.randn(2, *result.graph.input_shape)
    assert torch.equal(small.eval()(x), result.model.eval()(x))
    found = dmcp.load_search(run.folder, result.graph)
    assert torch.equal(found.alphas, result.search.alphas)
    assert (found.log, found.budget) == (result.search.log, result.search.budget)
    assert dmcp.expected(found) == result.widths


def test_a_free_name_is_found(tmp_path: Path) -> None:
    for name in ("new", "new-2", "new-3"):
        assert free_folder("new", tmp_path).name == name
        (tmp_path / name).mkdir()


# the search

EDITED: list[tuple[dict[str, Any], type[DmcpError]]] = [
    ({"budget": None}, FileError),
    ({"budget": {"limits": [{"kind": "watts", "target": 3}], "text": ""}}, DmcpError),
    ({"align": True}, FileError),
    ({"more": 1}, FileError),
    ({"format": "torch-dmcp search 0"}, FileError),
    ({"spaces": ["a"]}, WidthsError),
]


def test_an_edited_search_or_one_of_another_network_is_refused(tmp_path: Path) -> None:
    found, path = pruned_residual()[0].search, tmp_path / "search.json"
    with pytest.raises(FileError):  # there is none
        dmcp.load_search(tmp_path, found.graph)
    save_search(found, tmp_path)
    facts = json.loads(path.read_text())
    other = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.Conv2d(4, 2, 1))
    with pytest.raises(WidthsError):
        dmcp.load_search(tmp_path, dmcp.trace(other, sample((3, 4, 4)).float()))
    for changes, error in EDITED:
        path.write_text(json.dumps(facts | changes))
        with pytest.raises(error):
            dmcp.load_search(tmp_path, found.graph)


def test_chains_that_cannot_be_are_refused(tmp_path: Path) -> None:
    found = pruned_residual()[0].search
    save_search(found, tmp_path)
    path, alphas, sizes = tmp_path / "search.safetensors", found.alphas, found.sizes
    path.write_bytes(path.read_bytes().replace(alphas.numpy().tobytes(), (alphas + 1).numpy().tobytes()))
    with pytest.raises(FileError, match="changed since"):
        dmcp.load_search(tmp_path, found.graph)
    facts = json.loads((tmp_path / "search.json").read_text())
    empty, large = sizes.clone(), sizes.clone()
    empty[0, 0], large[0, 0] = 0, 1000
    tables = [{"alphas": alphas, "sizes": it} for it in (sizes.double(), empty, large)]
    for wrong in (*tables, {"alphas": alphas * float("nan"), "sizes": sizes}, {"sizes": sizes}):
        write_alphas(tmp_path, wrong, facts)
        with pytest.raises(FileError, match="chains"):
            dmcp.load_search(tmp_path, found.graph)


# reading


def test_facts_of_a_finished_run(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [*step_lines(40), *TEST_LINES]))
    wanted = {"name": "a", "state": "done", "progress": "", "accuracy": 0.85, "macs": 480, "macs_share": 0.48}
    wanted |= {"budget": "50%,params:60%", "model": "digits:resnet", "data": "digits"}
    assert run.describe().items() >= wanted.items()
    assert run.targets == {"macs": 500, "params": 60} and run.before == {"conv1": 5, "conv2": 8}
    sigmoid = torch.tensor(2.0).sigmoid().item()
    assert run.expected == pytest.approx({"conv1": 1 + 2 / 2 + 2 / 4, "conv2": 4 + 4 * sigmoid})
    assert read_run(write_run(tmp_path / "b", TEST_LINES, unpruned=None)).share("macs") is None
    long = write_run(tmp_path / "d", [*step_lines(400), *TEST_LINES])
    assert len(read_overview(long, tail=20).search) == 20 - len(TEST_LINES)
    assert read_overview(long, tail=20).describe() == read_run(long).describe()


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        ([], "before the first logged step"),
        (step_lines(17), "search, step 17, in epoch 2 of 4"),
        ([*step_lines(40), TRAIN_LINE], "dmcp, step 5 of 33"),
    ],
)
def test_an_unfinished_run_says_how_far_it_is(tmp_path: Path, lines: list[dict[str, Any]], where: str) -> None:
    folder = write_run(tmp_path / "a", lines, done=False)
    with (folder / "log.jsonl").open("a") as file:
        file.write('{"stage": "sea')
    facts = read_run(folder).describe()
    assert (facts["state"], facts["progress"]) == ("stopped", where)
    with Lock(folder):
        assert state(folder) == "running"
    (folder / "lock").write_text("process 1 on elsewhere")  # nobody holds it
    assert state(folder) == "stopped"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("settings.json", "{"),
        ("settings.json", "[" * 100_000),
        ("log.jsonl", "[1]\n"),
        ("widths.json", '{"widths": {"conv1": -3}, "input_shape": [], "fingerprint": ""}'),
        ("outcome.json", '{"asked_ms": -1}'),
        ("search.json", '{"spaces": 3}'),
        ("search.safetensors", "short"),
    ],
)
def test_a_damaged_run_says_which_file(tmp_path: Path, name: str, text: str) -> None:
    folder = write_run(tmp_path / "a", [*step_lines(40), *TEST_LINES])
    (folder / name).write_text(text)
    run = read_run(folder)
    assert state(folder) == "damaged" and run.problems[0].startswith(name) and str(tmp_path) not in run.problems[0]


def test_lines_that_are_no_records_or_done_again_are_passed_over(tmp_path: Path) -> None:
    changes = ({"accuracy": "high"}, {"accuracy": float("nan")}, {"macs": 10**30}, {"stage": "resumed"})
    lines = [*step_lines(5), *step_lines(5), *(TEST_LINES[0] | change for change in changes), TEST_LINES[2]]
    run = read_run(write_run(tmp_path / "a", lines))
    assert (len(run.search), [row.name for row in run.rows], run.describe()["state"]) == (5, ["dmcp"], "done")


def test_a_diverged_training_is_a_result(tmp_path: Path) -> None:
    lines = [TEST_LINES[0] | {"train_loss": float("nan")}, TEST_LINES[2] | {"train_loss": 0.25}]
    rows = read_run(write_run(tmp_path / "a", lines)).rows
    assert [row.name for row in rows] == ["unpruned", "dmcp"]
    assert math.isnan(rows[0].train_loss or 0) and rows[1].train_loss == 0.25


def test_runs_of_folders(tmp_path: Path) -> None:
    table = tmp_path / "my table"  # as dmcp compare leaves one: not all in it are runs
    for place, name in enumerate(("two", "one")):
        folder = write_run(table / name, step_lines(17), done=False)
        os.utime(folder / "settings.json", (1e9 - place, 1e9 - place))
    (table / "plans").mkdir()
    (table / "file").touch()
    assert not list_runs(tmp_path)  # it may be a data set
    (table / COMMANDS).touch()
    (tmp_path / "seeds").mkdir()
    (tmp_path / "seeds" / SUMMARY).touch()
    write_run(tmp_path / "seeds" / "seed-0", step_lines(17), done=False)
    for run in (table / "one", table / "two"):
        assert read_overview(run).name == f"my table/{run.name}"
    assert {run.name for run in list_runs(tmp_path)} == {"my table/one", "my table/two", "seeds/seed-0"}
    assert [run.name for run in read_runs([tmp_path])] == ["my table/one", "my table/two", "seeds/seed-0"]
    (table / COMMANDS).unlink()
    assert [run.name for run in list_runs(table)] == ["one", "two"]  # the oldest first
    alone = write_run(tmp_path / "alone", step_lines(17), done=False)
    assert [run.name for run in read_runs([alone, table])] == ["alone", "one", "two"]
    assert [run.name for run in read_runs([table / "two", table])] == ["two", "one"]  # none twice
    for read in (lambda: list_runs(tmp_path / "none"), lambda: read_run(table), lambda: read_runs([table / "plans"])):
        with pytest.raises((FileError, OSError)):
            read()


# settings of a run of somebody else, and the option that a person would have to type again
STRANGE: dict[str, dict[str, Any]] = {
    "model": {"model": "strange_code:net"},
    "call": {"model": "subprocess:check_output", "model_args": ["args=['touch', 'ran']"]},
    "fetched": {"model": "resnet18", "model_args": ["weights=DEFAULT"]},
    "pretrained": {"model": "timm:resnet18", "model_args": ["pretrained=True"]},
    "teacher": {"model": "digits:resnet", "teacher": "x.pth", "teacher_model": "strange_code:net"},
    "method": {"model": "digits:resnet", "method": "strange_code:net"},
    "wandb": {"model": "digits:resnet", "track": ["wandb"]},
}


@pytest.mark.parametrize("kind", STRANGE)
def test_the_settings_of_a_run_run_no_code_and_fetch_nothing(
    kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "strange_code.py").write_text("from pathlib import Path\nPath('ran').touch()\nnet = None\n")
    run, settings = tmp_path / "run", RunConfig(data="digits", search=SearchConfig(budget="50%")).to_json()
    settings |= STRANGE[kind] | {"classes": 10, "shape": [1, 8, 8]}
    Run(run).write_all({"settings.json": settings, "log.jsonl": "", "widths.json": {}, "search.json": {}})
    option = {"teacher": "teacher-model", "method": "method", "wandb": "track"}.get(kind, "model")
    others = ("evaluate", "export", "sample") if option == "model" else ()
    for words in [*((name, str(run)) for name in others), ("prune", "--resume", str(run))]:
        assert command(*words) == 2
        error = capsys.readouterr().err
        assert f"--{option} " in error, error
    with pytest.raises(FileError):
        dmcp.load(run)
    assert not (tmp_path / "ran").exists()
    if kind == "model":  # what a person types is run
        assert command("evaluate", str(run), "--model", "strange_code:net") == 2
        assert (tmp_path / "ran").exists()
        sys.modules.pop("strange_code")
