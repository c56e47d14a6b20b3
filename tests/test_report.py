"""The page about runs: what it says, that it stands alone, and that nothing of a folder becomes part of it."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from dataclasses import asdict
from html.parser import HTMLParser
from pathlib import Path

import matplotlib
from folders import RUN_SETTINGS, TEST_LINES, TRAIN_LINE, network_line, step_lines, write_run
from short_runs import pruned_residual
from typer.testing import CliRunner

from dmcp.cli.main import app
from dmcp.report import figures
from dmcp.report.finish import finish
from dmcp.report.html import make_page
from dmcp.runs.reading import read_run
from dmcp.runs.saved_search import load_search, save_search
from dmcp.runs.writing import Run
from dmcp.searching.sampling import expected

EVIL = "<img src=x onerror=alert(1)>\"'&$\\x\x1b[31m"


class Page(HTMLParser):
    """Reads a page; what is opened must be closed, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += "" if self.open and self.open[-1] == "style" else data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_the_page_of_a_real_run(tmp_path: Path) -> None:
    result, events = pruned_residual()
    run = Run(tmp_path / "run")
    run.write("settings.json", RUN_SETTINGS | {"unpruned": {"widths": dict(result.graph.full)}})
    for event in events:
        run.on_event(event)
    finish(run, result)
    page = Page(make_page([read_run(run.folder)]))
    assert len(page.all("svg")) == 5
    row, other = result.rows[-1], result.rows[0]
    errors = [math.sqrt(it.accuracy * (1 - it.accuracy) / it.samples) for it in (row, other)]
    if min(row.accuracy, other.accuracy) > 0:
        assert page.text.count(f"{100 * row.accuracy:.2f} ± {100 * errors[0]:.2f}%") >= 2  # tile, table
        assert f"± {100 * math.hypot(*errors):.2f} points against {other.name}" in page.text
    assert f"{other.ms / row.ms:.2f}×" in page.text and "on disk" in page.text
    assert all(space.name in page.text for space in result.graph.spaces)
    report = (run.folder / "report.md").read_text()
    assert [f"({path.name})" in report for path in run.folder.glob("*.svg")] == [True] * 2


def test_commands_for_a_network_of_ones_own_name_it(tmp_path: Path) -> None:
    """`evaluate` and `export` refuse to build it otherwise; a network of a library needs no name."""
    for model, option in (("mine:Net", " --model mine:Net"), ("digits:resnet", "")):
        folder = write_run(tmp_path / model[:4], [*step_lines(4), *TEST_LINES], model=model)
        text = Page(make_page([read_run(folder)])).text
        assert f"dmcp evaluate {folder}{option}\n" in text and f"dmcp export {folder}{option} --out net.onnx\n" in text


def test_the_page_stands_alone_and_runs_nothing(tmp_path: Path) -> None:
    folders = [write_run(tmp_path / name, [*step_lines(40), *TEST_LINES, TRAIN_LINE]) for name in "ab"]
    text = make_page([read_run(folder) for folder in folders])
    page = Page(text)
    assert not [tag for tag, _ in page.tags if tag in ("script", "link", "iframe", "object", "base", "form", "img")]
    for _, attributes in page.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "src"]
        assert (attributes.get("href") or attributes.get("xlink:href") or "#").startswith("#")
    assert not re.search(r"url\([^#]|@import", text)
    assert {it for it in re.findall(r"https?://[\w./-]+", text) if "w3.org" not in it} == set()  # names of XML
    policy = next(a["content"] or "" for a in page.all("meta") if "http-equiv" in a)
    assert policy.startswith("default-src 'none';") and "script" not in policy
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(set(ids)) == len(ids)
    assert {str(a["href"])[1:] for a in page.all("a")} == {"run-1", "run-2"} <= set(ids)


def test_what_the_page_says(tmp_path: Path) -> None:
    extra = {"argv": ["/x/bin/dmcp", "prune", "--data", "my data"], "versions": {"torch": "9.9"}, "retrain": "finetune"}
    tests = [*TEST_LINES[:2], TEST_LINES[2] | {"train_loss": 0.1234}]
    done = write_run(tmp_path / "done", [*step_lines(40), *tests, TRAIN_LINE], **extra)
    (done / "times.jsonl").write_text(json.dumps({"name": "dmcp", "ms": 1.5, "batch": 8}) + "\n")
    half = write_run(tmp_path / "half", step_lines(17), done=False)
    damaged = write_run(tmp_path / "bad", TEST_LINES)
    (damaged / "widths.json").write_text("{")
    page = Page(make_page([read_run(folder) for folder in (done, half, damaged)]))
    assert len(page.all("svg")) == 1 + 4 + 2
    says = [
        "48%",
        "85.00%",
        "train loss",
        "0.1234",
        "MACs: at most 500",
        "Half the MACs, −5.00 points",
        "finetune",
        "versions.torch",
    ]
    says += ["dmcp prune --data 'my data'", "step 17, in epoch 2 of 4", "dmcp prune --resume", "read: widths.json"]
    assert not [words for words in says if words not in page.text]


def test_nothing_from_a_folder_becomes_part_of_the_page(tmp_path: Path) -> None:
    line = {"stage": EVIL, "epoch": 0, "step": 0, "steps": 1, "lr": 1, "loss": 1}
    lines = [*step_lines(4), network_line(EVIL, 10, 0.5), line]
    search = {"budget": EVIL, "epochs": EVIL, EVIL: {EVIL: [EVIL]}}
    extra = {"argv": [EVIL], "versions": {EVIL: EVIL}, EVIL: EVIL, "command": EVIL, "retrain": EVIL}
    extra |= {"model": EVIL, "data": f"</td></table><script>{EVIL}"}
    extra["unpruned"] = {"macs": EVIL, "widths": {EVIL: 5, "conv2": 10**400}}
    folder = write_run(tmp_path / EVIL.replace("/", ""), lines, search=search, **extra)
    facts = json.loads((folder / "search.json").read_text())
    facts["spaces"] = [EVIL, "conv2"]
    facts["budget"]["limits"][0]["kind"] = EVIL
    (folder / "search.json").write_text(json.dumps(facts))
    widths = json.loads((folder / "widths.json").read_text())
    widths["widths"] = {EVIL: 3, "conv2": 1}
    (folder / "widths.json").write_text(json.dumps(widths))
    (folder / "export.json").write_text(json.dumps({EVIL: {"ms": {"float32": 0.5, "unpruned": 1}, "runtime": EVIL}}))
    run = read_run(folder)
    text = make_page([run, run])
    page = Page(text)
    assert not page.all("script") and not page.all("img")
    assert "\x1b" not in text and page.text.count("<img src=x onerror=alert(1)>") > 20
    charts = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    tags = {it.tag.rpartition("}")[2] for chart in charts for it in ET.fromstring(chart).iter()}
    assert tags <= {"svg", "defs", "style", "g", "path", "text", "tspan", "use", "clipPath", "rect"}, tags
    listed = CliRunner().invoke(app, ["runs", str(tmp_path)])
    assert listed.exit_code == 0 and "\x1b" not in listed.output and "onerror" in listed.output


def test_the_commands(tmp_path: Path) -> None:
    write_run(tmp_path / "b" / "same", TEST_LINES)
    write_run(tmp_path / "b" / "half", step_lines(17), done=False)
    listed = CliRunner().invoke(app, ["runs", str(tmp_path / "b")]).stdout
    assert "85.00%" in listed and "48%" in listed and "stopped: search, step 17, in epoch 2 of 4" in listed
    out = tmp_path / "deep" / "page.html"
    result = CliRunner().invoke(app, ["report", str(tmp_path / "b"), "--out", str(out)])
    assert result.exit_code == 0 and result.stdout == f"{out}\n", result.output
    assert [path.name for path in out.parent.iterdir()] == ["page.html"]  # nothing half written


# figures


def test_all_figures_are_written_and_the_same_again(tmp_path: Path) -> None:
    result = pruned_residual()[0].search
    settings = dict(matplotlib.rcParams)
    paths = figures.draw_all(result, expected(result), tmp_path / "one" / "figures")
    again = figures.draw_all(result, expected(result), tmp_path / "two")
    assert [path.name for path in paths] == ["cost.svg", "widths.svg"]
    for path, copy in zip(paths, again, strict=True):
        assert path.read_text().rstrip().endswith("</svg>") and path.read_bytes() == copy.read_bytes()
    assert dict(matplotlib.rcParams) == settings


def test_the_costs_of_a_search_are_relative_to_the_budget_that_was_searched(tmp_path: Path) -> None:
    """Also in the report of a network for another budget: the search ends in its band there, too."""
    result = pruned_residual()[0].search
    other = result.with_budget("params:80%")
    drawn = []
    for number, each in enumerate((result, other)):
        cost, _ = figures.draw_all(each, expected(each), tmp_path / str(number))
        drawn.append(cost.read_text())
    title = f"Expected cost over the search for {result.budget.text}"
    assert [title in text for text in drawn] == [False, True]
    assert "params" not in drawn[1] and drawn[1].replace(title, "Expected cost over the search") == drawn[0]

    run = Run(tmp_path / "run")
    save_search(other, run.folder)
    run.write("settings.json", {})
    run.write("log.jsonl", "".join(f"{json.dumps({'stage': 'search'} | asdict(step))}\n" for step in result.log))
    assert load_search(run.folder, result.graph).log_budget == result.budget
    assert title in make_page([read_run(run.folder)])


def test_a_matplotlibrc_does_not_run_latex() -> None:
    with matplotlib.rc_context({"text.usetex": True}):
        page = figures.to_svg(figures.accuracy_over_cost([figures.Point("dmcp", "", 10, 0.5, 0.1)]), "salt")
    assert ">dmcp<" in page
