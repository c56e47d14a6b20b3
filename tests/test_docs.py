"""README and docs: every python block runs, every name, link and option exists."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from torchvision.models import resnet18

import dmcp
from dmcp.budgets import KINDS, read_budget
from dmcp.cli.main import app
from dmcp.compare.methods import METHODS
from dmcp.data.datasets import load, preprocessing
from dmcp.data.loaders import make_loader

pytestmark = pytest.mark.usefixtures("quick_commands")

ROOT = Path(__file__).parents[1]
FILES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")))
PAGES = {path.name: path.read_text() for path in FILES}
OURS = [name for name in PAGES if name != "zoo.md"]  # which is generated
RUN = [name for name in OURS if "```python" in PAGES[name]]
REFERENCES = sorted({it for name in OURS for it in re.findall(r"`([\w/]+\.py)::([\w.]+)`", PAGES[name])})
COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.usefixtures("few_steps")
@pytest.mark.parametrize("page", RUN)
def test_the_blocks_of_a_page_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One after the other, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": page}
    with torch.random.fork_rng([]), warnings.catch_warnings():
        torch.manual_seed(0)
        for kind in (dmcp.retraining.TeacherWarning, dmcp.retraining.DivergenceWarning):  # they have learned nothing
            warnings.simplefilter("ignore", kind)
        for number, source in enumerate(re.findall(r"^```python\n(.*?)^```", PAGES[page], re.MULTILINE | re.DOTALL)):
            exec(compile(source, f"{page}, block {number + 1}", "exec", dont_inherit=True), names)
    checks = {"getting-started.md": check_getting_started, "api.md": check_api, "cookbook.md": check_cookbook}
    checks.get(page, lambda names: None)(names)


def check_getting_started(names: dict[str, Any]) -> None:
    """The lines that need none of our code give the same network, and the same input."""
    image = torch.randn(2, 3, 64, 64)
    assert torch.equal(names["small"].eval()(image), names["rebuilt"].eval()(image))
    assert [p.shape for p in names["rebuilt"].parameters()] != [p.shape for p in resnet18(num_classes=4).parameters()]
    digits = load("digits")
    how = preprocessing(digits)
    first = digits.test.subset(torch.tensor([0]))
    wanted, _ = next(iter(make_loader(first, 1, train=False)))
    assert torch.equal(names["prepare"](digits.test.images[0].numpy(), how), wanted)


def check_api(names: dict[str, Any]) -> None:
    assert isinstance(names["again"], names["Net"])


def check_cookbook(names: dict[str, Any]) -> None:
    assert {"teacher", "dmcp"} <= {row.name for row in names["result"].rows}
    assert names["table"].fingerprint == names["graph"].fingerprint


# names, links, commands


def defined(body: list[ast.stmt], prefix: str = "") -> Iterator[str]:
    """Names of functions, classes, their members, and values."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name
        if isinstance(node, ast.ClassDef):
            yield from defined(node.body, f"{prefix}{node.name}.")
        if isinstance(node, ast.AnnAssign | ast.Assign):
            targets = [node.target] if isinstance(node, ast.AnnAssign) else node.targets
            yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))


@pytest.mark.parametrize(("file", "name"), REFERENCES, ids=lambda value: value)
def test_names_in_files_exist(file: str, name: str) -> None:
    ours = ROOT / "src" / "dmcp" / file
    assert name in set(defined(ast.parse((ours if ours.exists() else ROOT / file).read_text()).body))


def test_files_exist() -> None:
    for name in OURS:
        for file in re.findall(r"`([\w/]+\.py)`", PAGES[name]):
            assert (ROOT / file).exists() or (ROOT / "src" / "dmcp" / file).exists() or file == "mine.py", (name, file)


def test_links_lead_somewhere() -> None:
    for name in OURS:
        folder = ROOT if (ROOT / name).exists() else ROOT / "docs"
        for file, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", PAGES[name]):
            path = folder / file if file else folder / name
            assert path.is_file(), (name, file)
            titles = re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
            assert not anchor or anchor in anchors, (name, file, anchor)


def test_the_numbers_that_say_when_a_search_pays_are_recorded() -> None:
    section = PAGES["comparing.md"].split("## When is a search worth its time?")[1].split("\n## ")[0]
    recorded = (ROOT / "experiments" / "REPORT.md").read_text() + PAGES["performance.md"]
    numbers = re.findall(r"\d+\.\d+(?: ± \d+\.\d+)?", section)
    assert len(numbers) > 10 and [number for number in numbers if number not in recorded] == []


def test_the_numbers_and_the_picture_of_the_readme_are_recorded() -> None:
    others = [page for name, page in PAGES.items() if name != "README.md"]
    recorded = "".join([(ROOT / "experiments" / "REPORT.md").read_text(), *others])
    assert [it for it in re.findall(r"\b\d+\.\d\d\b", PAGES["README.md"]) if it not in recorded] == []
    picture = runpy.run_path(str(ROOT / "experiments" / "picture.py"))
    for theme in picture["THEMES"]:
        assert (ROOT / "docs" / f"accuracy-{theme}.svg").read_text() == picture["draw"](theme)


def lines_of_commands() -> list[tuple[str, str]]:
    found = []
    for name in OURS:
        for line in re.findall(r"^    (?:\w+=\S+ )?(?:.*-m )?dmcp (\w.*)$", PAGES[name], re.MULTILINE):
            found.append((name, line))
    table = re.findall(r"\| `((?:dmcp \w+ RUN )?--?[a-z][^`]*)` \|", PAGES["cookbook.md"])
    return found + [("cookbook.md", it.removeprefix("dmcp ") if it[0] == "d" else f"prune {it}") for it in table]


@pytest.mark.parametrize(("page", "line"), lines_of_commands())
def test_commands_and_options_exist(page: str, line: str) -> None:
    command, *words = shlex.split(line, comments=True)
    if command == "COMMAND":
        return
    known = {name for param in COMMANDS[command].params for name in (*param.opts, *param.secondary_opts)}
    assert {word for word in words if word.startswith("--")} - {"--help"} <= known


def first_cells(page: str, heading: str) -> list[str]:
    """The first column of the tables below a heading, without titles and without marks of code."""
    section = PAGES[page].partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| ([^|]*[^|-]) \|", section, re.MULTILINE)
    return [cell.strip("`") for cell in cells[1:]]


def test_every_argument_of_prune_is_listed() -> None:
    assert first_cells("api.md", "prune") == list(inspect.signature(dmcp.prune).parameters)


def test_every_public_name_is_on_a_page() -> None:
    named = "\n".join(PAGES[name] for name in OURS)
    assert [name for name in dmcp.__all__ if not re.search(rf"\b{name}\b", named)] == []


def test_every_method_of_compare_is_listed() -> None:
    listed = ", ".join(first_cells("comparing.md", "The methods")).split(", ")
    assert listed == list(METHODS)


def test_every_kind_of_budget_is_listed() -> None:
    section = PAGES["cookbook.md"].partition("\n## Costs\n")[2].partition("\n## ")[0]
    limited = {kind for spec in re.findall(r"--budget ([\w%:.,]+)", section) for kind in read_budget(spec).kinds}
    assert limited == set(KINDS)


def test_exit_codes_are_those_of_the_help() -> None:
    codes = re.findall(r"^  (\d+) ", typer.main.get_command(app).epilog or "", re.MULTILINE)
    assert re.findall(r"^\| (\d+) \|", PAGES["command-line.md"], re.MULTILINE) == codes


def test_every_command_is_listed() -> None:
    listed = set(re.findall(r"^\| `(\w+)", PAGES["command-line.md"], re.MULTILINE))
    assert listed == {name for name, command in COMMANDS.items() if not command.hidden}


@pytest.mark.parametrize(("heading", "count"), [("Equations", 18), ("Figures", 7), ("Tables", 6)])
def test_nothing_of_the_paper_is_missing(heading: str, count: int) -> None:
    section = PAGES["paper_map.md"].split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| ([\d, ]+) \|", section, re.MULTILINE)
    assert [int(number) for cell in cells for number in cell.split(",")] == list(range(1, count + 1))
