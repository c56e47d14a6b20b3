"""The list of runs and the page about them: what they say, and what they do with folders that nobody should trust."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import random
import re
import shutil
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import typer
from browser import Browser
from test_runs import pruned
from typer.testing import CliRunner

from dmcp.cli import show as report_commands
from dmcp.errors import FileError
from dmcp.report.html import (
    STYLE,
    Bar,
    chart_run,
    chart_runs,
    describe,
    draw_bars,
    draw_lines,
    list_runs,
    make_page,
    progress,
    read_run,
    read_runs,
    ticks,
)
from dmcp.results import UNPRUNED
from dmcp.runs import open_run
from dmcp.runtime.io import Lock

EVIL = "<img src=x onerror=alert(1)>\"'&\x1b[31m"
SETTINGS: dict[str, Any] = {
    "command": "prune",
    "job": {"model": "digits:resnet", "data": "digits"},
    "search": {"budget": "50%,params:60%", "tolerance": 0.95, "epochs": 4},
}
SIZES = [[1, 2, 2], [4, 4, 0]]
ALPHAS = [[0.0, 0.0], [2.0, 0.0]]
app = typer.Typer()
app.command()(report_commands.runs)
app.command()(report_commands.report)


def step_lines(steps: int, per_epoch: int = 10) -> list[dict[str, Any]]:
    """A search whose second half moves the alphas."""
    return [
        {
            "stage": "search",
            "step": step,
            "epoch": step // per_epoch,
            "weight_losses": [2.0, 0.5, 0.7],
            "ratios": [0.9 + step / 1000, 1.1] if step >= steps // 2 else None,
        }
        for step in range(steps)
    ]


def write_run(folder: Path, lines: list[dict[str, Any]], done: bool = True, **settings: Any) -> Path:
    """A run of two spaces, written without the package."""
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps(SETTINGS | settings))
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if done:
        limits = [{"kind": "macs", "target": 500}, {"kind": "params", "target": 60}]
        facts = {"spaces": ["conv1", "conv2"], "budget": {"limits": limits}, "independent": False}
        (folder / "search.json").write_text(json.dumps(facts))
        tensors = {"alphas": torch.tensor(ALPHAS), "sizes": torch.tensor(SIZES)}
        safetensors.torch.save_file(tensors, folder / "search.safetensors")
        widths = {"widths": {"conv1": 3, "conv2": 8}, "input_shape": [1, 8, 8], "fingerprint": "x"}
        (folder / "widths.json").write_text(json.dumps(widths))
    return folder


def network_line(name: str, macs: int, accuracy: float) -> dict[str, Any]:
    return {
        "stage": "test", "name": name, "macs": macs, "params": macs // 10, "accuracy": accuracy, "ms": 1.5, "batch": 8,
    }  # fmt: skip


TESTS = [network_line("unpruned", 1000, 0.9), network_line("uniform", 490, 0.8), network_line("dmcp", 480, 0.85)]
TRAINED = {"stage": "dmcp", "epoch": 0, "step": 4, "steps": 33, "lr": 0.1, "loss": 2.0}


class Page(HTMLParser):
    """Reads a page; what is opened must be closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.inside: dict[str, str] = {"style": "", "script": ""}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.inside:
            self.inside[self.open[-1]] += data
        else:
            self.text += data

    def count(self, tag: str, kind: str | None = None) -> int:
        """Elements of this tag that have this class."""
        return sum(t == tag and (kind is None or kind in (a.get("class") or "").split()) for t, a in self.tags)


def hints(svg: str) -> list[str]:
    return [title.text or "" for title in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}title")]


# reading


def test_what_a_real_run_wrote_is_read_back(tmp_path: Path) -> None:
    result, events = pruned()
    run = open_run(tmp_path / "run")
    run.write("settings.json", SETTINGS)
    for event in events:
        run.on_event(event)
    assert read_run(run.folder).state == "stopped"
    run.finish(result)
    past = read_run(run.folder)
    assert (past.state, past.problems) == ("done", ())
    assert past.rows == result.rows
    assert past.search == result.search.log
    assert set(past.training) == {row.name for row in result.rows}
    assert dict(past.widths) == dict(result.widths)
    assert past.share("macs") == result.graph.macs(result.widths) / result.graph.macs()
    charts = chart_run(past)
    assert set(charts) == {"widths", "cost", "chances", "search", "training"}
    for space in result.graph.spaces:
        assert f"{space.name}: {result.widths[space.name]} of {space.size} channels" in " ".join(
            hints(charts["widths"])
        )
    assert f"accuracy {100 * result.rows[0].accuracy:.2f} %" in Page(make_page([past])).text


def test_facts_of_a_finished_run(tmp_path: Path) -> None:
    facts = describe(read_run(write_run(tmp_path / "a", [*step_lines(40), *TESTS])))
    wanted = {"name": "a", "state": "done", "progress": "", "accuracy": 0.85, "macs": 480, "macs_share": 0.48}
    assert facts.items() >= (wanted | {"budget": "50%,params:60%", "model": "digits:resnet", "data": "digits"}).items()


def test_the_unpruned_cost_may_stand_in_the_settings(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", TESTS[2:], unpruned={"macs": 960, "params": 96}))
    assert run.row(UNPRUNED) is None
    assert (run.share("macs"), run.share("params")) == (0.5, 0.5)
    assert read_run(write_run(tmp_path / "b", TESTS[2:])).share("macs") is None


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        ([], "before the first logged step"),
        (step_lines(7), "search, step 7, in epoch 1 of 4"),
        (step_lines(17), "search, step 17 of 40"),
        ([*step_lines(40), TRAINED], "ours, step 5 of 33"),
    ],
)
def test_an_unfinished_run_says_how_far_it_is(tmp_path: Path, lines: list[dict[str, Any]], where: str) -> None:
    folder = write_run(tmp_path / "a", lines, done=False)
    with (folder / "log.jsonl").open("a") as file:
        file.write('{"stage": "sea')  # killed while it wrote
    run = read_run(folder)
    assert (run.state, progress(run)) == ("stopped", where)
    assert where in Page(make_page([run])).text


def test_a_run_is_running_while_its_lock_is_held(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", step_lines(7), done=False)
    with Lock(folder):
        assert read_run(folder).state == "running"
    (folder / "lock").write_text("process 1 on elsewhere")  # nobody holds it
    assert read_run(folder).state == "stopped"


def test_the_end_of_a_log_is_enough_for_a_list(tmp_path: Path) -> None:
    finished = write_run(tmp_path / "a", [*step_lines(400), *TESTS])
    run = read_run(finished, tail=2000)
    assert 0 < len(run.search) < 20
    assert describe(run) == describe(read_run(finished))
    stopped = read_run(write_run(tmp_path / "b", step_lines(35), done=False), tail=2000)
    assert 0 < len(stopped.search) < 20
    assert progress(stopped) == "search, step 35 of 40"  # by the turn of a later epoch


def test_a_step_that_was_done_again_counts_once(tmp_path: Path) -> None:
    again = step_lines(20)[10:]
    for line in again:
        line["weight_losses"] = [9.0]
    run = read_run(write_run(tmp_path / "a", [*step_lines(15), *again], done=False))
    assert [record.step for record in run.search] == list(range(20))
    assert [record.weight_losses for record in run.search[9:11]] == [(2.0, 0.5, 0.7), (9.0,)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("settings.json", "{"),
        ("settings.json", "[]"),
        ("settings.json", "[" * 100_000),
        ("log.jsonl", '{"stage": "test"\n'),
        ("log.jsonl", "[1]\n"),
        ("log.jsonl", json.dumps(TESTS[0] | {"accuracy": "high"}) + "\n"),
        ("log.jsonl", json.dumps(TESTS[0] | {"accuracy": float("nan")}) + "\n"),
        ("log.jsonl", json.dumps(TESTS[0] | {"macs": 10**30}) + "\n"),
        ("log.jsonl", json.dumps(step_lines(1)[0] | {"ratios": ["1"]}) + "\n"),
        ("widths.json", '{"widths": {"conv1": -3}, "input_shape": [], "fingerprint": ""}'),
        ("search.json", '{"spaces": ["one"], "budget": {"limits": []}, "independent": false}'),
        ("search.json", '{"spaces": 3}'),
        ("search.safetensors", "short"),
    ],
)
def test_a_damaged_run_says_which_file(tmp_path: Path, name: str, text: str) -> None:
    folder = write_run(tmp_path / "a", [*step_lines(40), *TESTS])
    (folder / name).write_text(text)
    run = read_run(folder)
    assert run.state == "damaged"
    assert run.problems[0].startswith("search." if name.startswith("search.") else name)
    assert run.problems[0] in Page(make_page([run])).text


def test_chains_without_any_channel_are_damaged(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", [*step_lines(40), *TESTS])
    tensors = {"alphas": torch.tensor(ALPHAS), "sizes": torch.zeros_like(torch.tensor(SIZES))}
    safetensors.torch.save_file(tensors, folder / "search.safetensors")
    run = read_run(folder)
    assert run.state == "damaged" and run.problems[0].startswith("search.safetensors")
    assert run.problems[0] in Page(make_page([run])).text


def test_lines_and_fields_of_later_versions_are_passed_over(tmp_path: Path) -> None:
    lines = [{"stage": "resumed", "from": 3}, TESTS[0] | {"energy": "low"}]
    run = read_run(write_run(tmp_path / "a", lines))
    assert (run.state, len(run.rows), dict(run.training)) == ("done", 1, {})


def test_whatever_the_bytes_are_there_is_a_page(tmp_path: Path) -> None:
    chance = random.Random(0)
    clean = write_run(tmp_path / "clean", [*step_lines(12), *TESTS])
    seen = set()
    for number in range(150):
        folder = tmp_path / str(number)
        shutil.copytree(clean, folder)
        path = chance.choice(sorted(folder.iterdir()))
        data = bytearray(path.read_bytes())
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.choice(b'\x00\xff{}[]",:019-eE\n<&x')
        path.write_bytes(data[: chance.choice([len(data), chance.randrange(len(data))])])
        run = read_run(folder)
        Page(make_page([run]))
        for svg in (chart_runs([run]), *chart_run(run).values()):
            assert not svg or ("nan" not in svg and ET.fromstring(svg) is not None)
        seen.add(run.state)
    assert seen >= {"done", "damaged"}


# the charts


def test_marks_of_the_charts(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", [*step_lines(40), *TESTS]))
    other = read_run(write_run(tmp_path / "b", TESTS[2:]))
    both = Page(make_page([run, other]))
    assert both.count("path", "mark") == 4
    assert sum(said.startswith("a, ") for said in hints(chart_runs([run, other]))) == 3
    long = [read_run(shutil.copytree(run.folder, tmp_path / f"net-prune_{number}")) for number in (10, 11)]
    labels = re.findall(r'class="label">(.*?)<', chart_runs(long))
    assert {"10", "10, unpruned"} <= set(labels)
    below = "net-prune_11, ours: 480 MACs, accuracy 85.00 %; net-prune_10, ours: 480 MACs, accuracy 85.00 %"
    assert below in hints(chart_runs(long))  # at the same place

    charts = chart_run(run)
    cells = hints(charts["chances"])
    assert len(cells) == 5  # the second space has two groups
    sigmoid = 1 / (1 + 2.718281828459045**-2)
    assert cells[4] == f"conv2, group 2, channels 5 to 8: kept with {100 * sigmoid:.1f} %"
    assert cells[2] == "conv1, group 3, channels 4 to 5: kept with 25 %"
    widths = hints(charts["widths"])
    assert widths[0] == f"conv1: 3 of 5 channels, 60 %; the chain expected {1 + 2 / 2 + 2 / 4:.1f}"
    assert widths[1] == f"conv2: 8 of 8 channels, 100 %; the chain expected {4 + 4 * sigmoid:.1f}"
    cost = hints(charts["cost"])
    assert len(cost) == 20
    assert cost[0] == "step 20: MACs / budget 92 %, parameters / budget 110 %"
    assert "allowed: 95 % to 100 %" in charts["cost"]
    assert hints(charts["search"])[3] == "step 3: largest sub-network 2, mean of the others 0.6"


def test_the_lengths_are_the_shares() -> None:
    svg = ET.fromstring(draw_bars([Bar("a", 8, 16), Bar("b", 16, 64)], "widths"))
    kinds = ("bar f0", "before")
    bars, before = ([float(it.get("width", "")) for it in svg.iter() if it.get("class") == kind] for kind in kinds)
    assert [kept / full for kept, full in zip(bars, before[1:], strict=True)] == pytest.approx([0.5, 0.25], abs=1e-2)


def test_the_band_and_the_line_share_a_scale() -> None:
    svg = ET.fromstring(draw_lines([0, 1, 2], {"x": [0.95, 1.0, 0.975]}, "y", "t", as_share=True, band=(0.95, 1.0)))
    line = next(it for it in svg.iter() if it.tag.endswith("polyline"))
    ys = [float(place.split(",")[1]) for place in line.get("points", "").split()]
    band = [it for it in svg.iter() if it.get("class") == "band"][-1]
    top, high = float(band.get("y", "")), float(band.get("height", ""))
    assert ys == pytest.approx([top + high, top, top + high / 2], abs=0.11)


def test_many_steps_are_averaged() -> None:
    values = [float(step % 7) for step in range(1000)]
    said = hints(draw_lines(range(1000), {"x": values}, "y", "t"))
    assert len(said) == 143
    assert said[1] == f"mean of steps 7 to 13: x {sum(range(7)) / 7:.3g}"


@pytest.mark.parametrize(
    "values", [[0.0], [5.0, 5.0], [0.0, 1.0], [0.853, 0.861], [-3.0, 12.0], [0.0, 7.6e9], [1e-9, 2e-9]]
)
def test_ticks_are_round_and_span_the_values(values: list[float]) -> None:
    marks = ticks(values)
    assert 2 <= len(marks) <= 9
    assert marks[0] <= min(values) and max(values) <= marks[-1] * (1 + 1e-9) + 1e-15
    step = marks[1] - marks[0]
    assert [b - a for a, b in itertools.pairwise(marks)] == pytest.approx([step] * (len(marks) - 1))
    assert f"{step:.3e}"[:5] in ("1.000", "2.000", "2.500", "5.000")


# the page


def test_the_page_needs_and_runs_nothing_else(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, [*step_lines(40), *TESTS]) for name in "ab"]
    text = make_page([read_run(folder) for folder in folders])
    page = Page(text)
    assert page.count("script") == page.count("style") == page.count("h1") == 1
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "base", "form")
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "style")]
        assert (attributes.get("href") or "#").startswith("#")
    assert set(re.findall(r"\w+://[\w./]+", text)) == {"http://www.w3.org/2000/svg"}  # the name of SVG
    assert not re.search(r"url\(|@import|fetch|eval|innerHTML", page.inside["style"] + page.inside["script"])
    policy = next(a["content"] or "" for t, a in page.tags if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none';") and "unsafe" not in policy
    for inner in page.inside.values():
        assert base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode() in policy


def test_the_page_can_be_found_ones_way_in(tmp_path: Path) -> None:
    extra = {"argv": ["/x/bin/dmcp", "prune", "--data", "my data"], "versions": {"torch": "9.9"}}
    folders = [write_run(tmp_path / name, [*step_lines(40), *TESTS], **extra) for name in "ab"]
    page = Page(make_page([read_run(folder) for folder in folders]))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert {(a["href"] or "")[1:] for t, a in page.tags if t == "a"} == {"run-1", "run-2"} <= set(ids)
    assert all("scope" in attributes for tag, attributes in page.tags if tag == "th")
    assert all(attributes.get("aria-label") for tag, attributes in page.tags if tag == "svg")
    assert page.count("figure") == page.count("svg") == 1 + 2 * 4  # none of the two was trained
    for words in (
        "Networks",
        "Settings",
        "Versions",
        "9.9",
        "dmcp prune --data 'my data'",
        "−5.00 points against unpruned",
    ):
        assert words in page.text
    assert "48 %" in page.text and "85.00 %" in page.text and "at most 500 MACs" in page.text


def test_nothing_from_a_folder_becomes_part_of_the_page(tmp_path: Path) -> None:
    name = EVIL.replace("/", "")
    lines = [
        *step_lines(4),
        network_line(EVIL, 10, 0.5),
        {"stage": EVIL, "epoch": 0, "step": 0, "steps": 1, "lr": 1, "loss": 1},
    ]
    job = {"model": EVIL, "data": f"</td></table><script>{EVIL}"}
    search = {"budget": EVIL, "epochs": EVIL, EVIL: {EVIL: [EVIL]}}
    extra = {"argv": [EVIL], "versions": {EVIL: EVIL}, EVIL: EVIL, "command": EVIL}
    folder = write_run(tmp_path / name, lines, job=job, search=search, **extra)
    facts = json.loads((folder / "search.json").read_text())
    facts["spaces"] = [EVIL, "conv2"]
    facts["budget"]["limits"][0]["kind"] = EVIL
    (folder / "search.json").write_text(json.dumps(facts))
    widths = json.loads((folder / "widths.json").read_text())
    widths["widths"] = {EVIL: 3, "conv2": 1}
    (folder / "widths.json").write_text(json.dumps(widths))
    run = read_run(folder)
    text = make_page([run, run])
    page = Page(text)
    assert page.count("script") == 1 and page.count("img") == 0
    assert "\x1b" not in text and page.text.count("<img src=x onerror=alert(1)>") > 20
    for svg in (chart_runs([run]), *chart_run(run).values()):
        assert not [it for it in ET.fromstring(svg).iter() if it.tag.rpartition("}")[2] in ("img", "script")]
    listed = CliRunner().invoke(app, ["runs", str(tmp_path)])
    assert listed.exit_code == 0 and "\x1b" not in listed.output and "onerror" in listed.output


def test_colours_can_be_read_in_both_themes() -> None:
    light, dark = STYLE.split("@media")
    for theme in (light, dark):
        colour = dict(re.findall(r"--(\w+): (#[0-9a-f]{6})", theme))
        for front, back in itertools.product(["ink", "soft", "link", *(f"c{i}" for i in range(6))], ["paper", "panel"]):
            assert contrast(colour[front], colour[back]) >= 4.5, (front, back)  # WCAG AA for text


def contrast(one: str, other: str) -> float:
    """Of two colours, as WCAG defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        red, green, blue = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted(map(luminance, (one, other)))
    return (high + 0.05) / (low + 0.05)


# the commands


def test_runs_are_listed_oldest_first(tmp_path: Path) -> None:
    for place, name in enumerate(["new", "old"]):
        folder = write_run(tmp_path / name, [*step_lines(40), *TESTS])
        os.utime(folder / "settings.json", (1e9 - place, 1e9 - place))
    write_run(tmp_path / "half", step_lines(17), done=False)
    (tmp_path / "other").mkdir()
    (tmp_path / "file").touch()
    plain = CliRunner().invoke(app, ["runs", str(tmp_path)]).stdout
    assert [line.split()[0] for line in plain.splitlines()[2:]] == ["old", "new", "half"]
    assert "85.00 %" in plain and "48 %" in plain and "stopped: search, step 17 of 40" in plain
    data = json.loads(CliRunner().invoke(app, ["runs", str(tmp_path), "--json"]).stdout)
    assert [(run["name"], run["state"]) for run in data] == [("old", "done"), ("new", "done"), ("half", "stopped")]
    assert data[0]["accuracy"] == 0.85 and data[2]["accuracy"] is None


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="no runs can be listed here"):
        list_runs(tmp_path / "none")
    with pytest.raises(FileError, match="not a run: give a folder"):
        read_run(tmp_path)
    assert "no runs" in CliRunner().invoke(app, ["runs", str(tmp_path)]).stdout


def test_a_folder_of_runs_stands_for_the_runs_in_it(tmp_path: Path) -> None:
    table = tmp_path / "my table"  # as dmcp compare leaves one: not all in it are runs
    for name in ("two", "one"):
        write_run(table / name, step_lines(17), done=False)
    (table / "plans").mkdir()
    (table / "compare.json").write_text("{}")
    result = CliRunner().invoke(app, ["report", str(table), "--out", str(tmp_path / "page.html")])
    assert result.exit_code == 0, result.output
    one = write_run(tmp_path / "alone", step_lines(17), done=False)
    assert [run.name for run in read_runs([one, table])] == ["alone", "one", "two"]
    assert [run.name for run in read_runs([table / "two", table])] == ["two", "one"]  # none twice
    with pytest.raises(FileError, match="plans: not a run: give a folder"):
        read_runs([table / "plans"])


def test_the_report_and_its_charts_are_files(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / top / "same", [*step_lines(40), *TESTS]) for top in "ab"]
    out, svg = tmp_path / "deep" / "page.html", tmp_path / "svg"
    result = CliRunner().invoke(app, ["report", *map(str, folders), "--out", str(out), "--svg", str(svg)])
    assert result.exit_code == 0, result.output
    paths = [Path(line) for line in result.stdout.splitlines()]
    assert paths[0] == out and set(paths[1:]) == set(svg.iterdir())
    assert len(paths) == 1 + 1 + 2 * 4
    Page(out.read_text())
    for path in paths[1:]:
        assert ET.fromstring(path.read_text())[0].text == STYLE  # stands alone
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]  # nothing half written


def test_a_page_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", TESTS)
    result = CliRunner().invoke(app, ["report", str(folder), "--out", str(folder / "log.jsonl" / "page.html")])
    assert isinstance(result.exception, FileError)


# in a browser


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("NO BROWSER: the page was not looked at; apt-get install chromium, and run this again")
    opened = Browser(program, tmp_path / "profile")
    yield opened
    opened.close()


def test_the_page_in_a_browser(tmp_path: Path, browser: Browser) -> None:
    runs = [
        read_run(write_run(tmp_path / name, [*step_lines(40), network_line("dmcp", 300 + 100 * place, 0.9)]))
        for place, name in enumerate(["a", "b" * 80, EVIL])
    ]
    out = tmp_path / "page.html"
    out.write_text(make_page(runs))
    papers = set()
    for width, theme in itertools.product((1280, 375), ("light", "dark")):
        browser.show(out, width, theme)
        bad = [event for event in browser.events if event["method"] in ("Log.entryAdded", "Runtime.exceptionThrown")]
        assert bad == []  # a broken policy would be said here, too
        assert browser.ask("document.documentElement.scrollWidth") <= width
        sizes = browser.ask("[...document.querySelectorAll('svg')].map(s => s.getBoundingClientRect().width)")
        assert len(sizes) == 1 + 3 * 4 and all(250 < size <= width for size in sizes)
        cut = "[...document.querySelectorAll('svg.chart')].filter(s => { const b = s.getBBox(), v = s.viewBox.baseVal;"
        assert browser.ask(f"{cut} return b.x < -1 || b.x + b.width > v.width + 1 || b.y < -1; }}).length") == 0
        papers.add(browser.ask("getComputedStyle(document.body).backgroundColor"))
        assert browser.ask("document.querySelectorAll('[data-hint]').length") == sum(
            len(hints(svg)) for svg in (chart_runs(runs), *(svg for run in runs for svg in chart_run(run).values()))
        )
        browser.hover(".mark")
        assert browser.ask("document.getElementById('hint').textContent").startswith("a, ours: 300 MACs")
    assert len(papers) == 2
