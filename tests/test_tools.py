"""The tools that make pages."""

from __future__ import annotations

import ast
import inspect
import json
import runpy
from pathlib import Path

import pytest

import dmcp
from dmcp.runtime.distributed import World

TOOLS = Path(__file__).parents[1] / "tools"


def test_a_recording_breaks_lines_between_words() -> None:
    pytest.importorskip("fcntl")  # of Unix
    cast = runpy.run_path(str(TOOLS / "cast.py"))
    words = [f"{'x' * (number % 13)}{number}" for number in range(120)]
    text = " ".join(words)
    parts = ["".join(letter for letter, _ in part) for part in cast["break_line"]([(letter, "red") for letter in text])]
    assert len(parts) > 5 and max(map(len, parts)) <= cast["COLUMNS"]
    assert [word for part in parts for word in part.split()] == words

    word = "y" * (2 * cast["COLUMNS"])  # is broken anywhere
    parts = ["".join(letter for letter, _ in part) for part in cast["break_line"]([(letter, "red") for letter in word])]
    assert max(map(len, parts)) <= cast["COLUMNS"] and "".join(part.strip() for part in parts) == word


@pytest.mark.parametrize("address", ["", "https://github.com/a/b", "https://git.example/a/b"])
def test_notebooks_get_the_address(address: str) -> None:
    """A badge is for GitHub only; filled in twice, or emptied again, it leaves nothing behind."""
    tool = runpy.run_path(str(TOOLS / "address.py"))
    path = TOOLS.parent / "examples" / "front.ipynb"
    text = tool["notebook_with"]("", path.name, path.read_text())  # this repository may have an address
    filled = tool["notebook_with"](address, path.name, text)
    cells = ["".join(cell["source"]) for cell in json.loads(filled)["cells"]]
    assert any(address in cell and "%pip install" in cell for cell in cells) is bool(address)
    assert any("colab" in cell and "a/b/blob/main/examples/front.ipynb" in cell for cell in cells) is (
        "github" in address
    )
    assert tool["notebook_with"](address, path.name, filled) == filled
    assert tool["notebook_with"]("", path.name, filled) == text


def test_the_reference_of_the_site_has_every_public_name() -> None:
    """Read without mkdocs, which only who builds the site has."""
    values = {}
    for node in ast.parse((TOOLS / "site.py").read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            values[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
    names = [name for chapter in values["CHAPTERS"].values() for name in chapter.split()]
    assert names[0] == "prune" and len(names) == len(set(names))
    assert set(names) == {name for name in dmcp.__all__ if not name.startswith("__")}
    for name, members in values["MEMBERS"].items():
        assert all(hasattr(getattr(dmcp, name), member) for member in members.split())


def test_the_site_lists_arguments() -> None:
    pytest.importorskip("griffe")
    list_arguments = runpy.run_path(str(TOOLS / "docstrings.py"))["list_arguments"]
    text = "Does it.\n\nfirst, second: two of them.\nthird: one, and this is\nlong.\n\nNote: the end."
    lines = list_arguments(text, {"first", "second", "third"}).splitlines()
    assert [line for line in lines if line.startswith("- ")] == [
        "- **first, second**: two of them.",
        "- **third**: one, and this is",
    ]
    assert lines[-1] == "Note: the end." and "    long." in lines


def test_the_site_lists_fields_with_their_comments() -> None:
    pytest.importorskip("griffe")
    list_fields = runpy.run_path(str(TOOLS / "docstrings.py"))["list_fields"]
    source = inspect.getsource(dmcp.Task)
    items = [line for line in list_fields(source).splitlines() if line]
    assert [item.split("**")[1] for item in items] == ["loss", "metric", "optimizer", "fresh", "distill"]
    assert items[-1].endswith("default: what the loss shows") and "a list or dict" in items[-1]
    assert "rank on this machine" in list_fields(inspect.getsource(World))
    assert list_fields("class Empty:\n    number: int\n") == ""
