"""Generates pages of the site (mkdocs.yml): home, Python API, command-line options, experiments."""

from __future__ import annotations

import dataclasses
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.structure.files import File, Files

import dmcp
from dmcp.cli.main import app

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ADDRESS = PROJECT["urls"].get("Repository", "")
OUTSIDE = re.compile(  # links to files of the repository that are no pages: words, path
    r"\[([^\]]+)\]\((?:\.\./|(?=src/|examples/|experiments/|tests/|zoo/|[A-Z]+\.))([^)]*)\)"
)


def on_config(config: Any) -> Any:
    """Link to the repository, if it has an address."""
    config.repo_url = ADDRESS or None
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages."""
    pages = {
        "index.md": (ROOT / "README.md").read_text().replace("docs/", ""),
        "results.md": (ROOT / "experiments" / "REPORT.md").read_text(),
        "reference.md": reference(),
        "options.md": options(),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=outside(text)))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links to files of the repository lead to its address, or become their words. Blocks of code lose their marks."""
    return re.sub(r"^```python \w+$", "```python", outside(markdown), flags=re.MULTILINE)


def outside(text: str) -> str:
    """The text with links to what is not on the site leading to the address of the repository, or as their words."""
    text = re.sub(r"\]\((\.\./)?experiments/REPORT\.md\)", "](results.md)", text)
    if ADDRESS:
        return OUTSIDE.sub(rf"[\1]({ADDRESS}/blob/main/\2)", text)
    return OUTSIDE.sub(r"\1", text)


def reference() -> str:
    """Every public name with its signature and docstring; settings with their fields."""
    parts = ["# Python API"]
    for name in sorted((name for name in dmcp.__all__ if not name.startswith("__")), key=str.lower):
        found = getattr(dmcp, name)
        fields = dataclasses.fields(found) if dataclasses.is_dataclass(found) else ()
        if not any("help" in field.metadata for field in fields):
            parts.append(f"::: dmcp.{name}")
            continue
        parts.append(f"## dmcp.{name}\n\n{inspect.getdoc(found)}")
        defaults = ["" if it.default is dataclasses.MISSING else f"`{it.default!r}`" for it in fields]
        rows = [f"| `{it.name}` | {own} | {it.metadata['help']} |" for it, own in zip(fields, defaults, strict=True)]
        parts.append("\n".join(["| field | default | meaning |", "|---|---|---|", *rows]))
    return "\n\n".join(parts)


def options() -> str:
    """Every command with its options, which are made from the settings."""
    parts = ["# Command-line options"]
    for name, command in sorted(typer.main.get_command(app).commands.items()):
        if command.hidden:
            continue
        rows = ["| option | meaning |", "|---|---|"]
        for it in command.params:
            shown = ", ".join(f"`{word}`" for word in it.opts)
            rows.append(f"| {shown} | {(getattr(it, 'help', '') or '').replace('|', '/')} |")
        about, _, examples = (command.help or "").partition("\b\n")
        shown = f"```text\n{examples.strip()}\n```\n\n" if examples else ""
        parts.append(f"## dmcp {name}\n\n{about.strip()}\n\n{shown}" + "\n".join(rows))
    return "\n\n".join(parts)
