"""docs/paper_map.md: every name in it exists, and no equation, figure or table of the paper is missing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "paper_map.md").read_text()
REFERENCES = sorted(set(re.findall(r"`([\w/]+\.py)::([\w.]+)`", PAGE)))


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
def test_names_resolve(file: str, name: str) -> None:
    ours = ROOT / "src" / "dmcp" / file
    path = ours if ours.exists() else ROOT / file
    assert name in set(defined(ast.parse(path.read_text()).body))


def test_no_name_is_written_in_another_way() -> None:
    assert PAGE.count("::") == len(re.findall(r"`[\w/]+\.py::[\w.]+`", PAGE)) > 50


def first_column(heading: str) -> list[int]:
    """Numbers in the first column of the table under a heading."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    cells = re.findall(r"^\| ([\d, ]+) \|", section, re.MULTILINE)
    return [int(number) for cell in cells for number in cell.split(",")]


@pytest.mark.parametrize(("heading", "count"), [("Equations", 18), ("Figures", 7), ("Tables", 6)])
def test_nothing_of_the_paper_is_missing(heading: str, count: int) -> None:
    assert first_column(heading) == list(range(1, count + 1))


def test_linked_files_are_there() -> None:
    links = re.findall(r"\]\(([^)]+)\)", PAGE)
    assert links and all((ROOT / "docs" / link.partition("#")[0]).is_file() for link in links)
