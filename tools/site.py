"""Pages of the site (mkdocs.yml) that are made, not written: home, Python names, options, results."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

import dmcp

ROOT = Path(__file__).parent.parent
COMMANDS = ("prune", "search", "train", "inspect", "sample", "evaluate")
COMMANDS += ("data", "latency", "export", "runs", "report", "compare")


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
    """Links to files of the repository become names: the site has no address of it."""
    return outside(markdown)


def outside(text: str) -> str:
    """The text without links to what is not on the site, but with their words."""
    text = re.sub(r"\]\((\.\./)?experiments/REPORT\.md\)", "](results.md)", text)
    return re.sub(r"\[([^\]]+)\]\((?:\.\./|src/|examples/|experiments/|tests/|zoo/)[^)]*\)", r"\1", text)


def reference() -> str:
    """Every public name with its signature and docstring; settings with their fields."""
    parts = ["# Python names"]
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
    """The help of every command, which is made from the settings."""
    parts = ["# Options"]
    for command in COMMANDS:
        words = [sys.executable, "-m", "dmcp", command, "--help"]
        shown = subprocess.run(words, capture_output=True, text=True, check=True, cwd=ROOT)
        parts.append(f"## dmcp {command}\n\n```text\n{shown.stdout.rstrip()}\n```")
    return "\n\n".join(parts)
