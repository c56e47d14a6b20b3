"""Generates pages of the site (mkdocs.yml): home, Python API, command-line options, experiments."""

from __future__ import annotations

import dataclasses
import inspect
import re
import runpy
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer.main
from mkdocs.structure.files import File, Files

import dmcp
from dmcp.cli.main import app
from dmcp.cli.options import parameter_help

ROOT = Path(__file__).parent.parent
SETUP = runpy.run_path(str(ROOT / "setup.py"))
ADDRESS = SETUP["ADDRESS"]
OUTSIDE = re.compile(  # links to files of the repository that are no pages: words, path
    r"\[([^\]]+)\]\((?:\.\./|(?=src/|examples/\w+\.py|experiments/|tests/|zoo/|[A-Z]+\.))([^)]*)\)"
)

CHAPTERS = {  # of the reference
    "The whole job": "prune PruneResult Loaders Task LowerIsBetter Runtime Event Checkpointer Retrain",
    "Settings": "SearchConfig TrainConfig LatencyConfig Engine paper",
    "Trace": "trace ChannelGraph ChannelSpace Widths Budget parse_budget uniform random_widths verify RULES",
    "Search": "search Supernet Searcher SearchResult load_search expected direct",
    "Cut, train and test": "importance cut reinitialize recalibrate train evaluate",
    "Save and export": "save load export quantize Latency measure_latency write_networks read_latency",
    "Errors": "DmcpError ArgumentError BudgetError CutError DataError FileError StoppedError TraceError TrainingError "
    "WidthsError",
}
MEMBERS = {  # of classes whose other members are for our own code
    "Budget": "",
    "ChannelGraph": "full widths macs params memory memory_at traffic layers summary to_json",
    "ChannelSpace": "",
    "Checkpointer": "",
    "Loaders": "",
    "Runtime": "",
}
MADE_BY_US = {"ChannelGraph"}  # classes that nobody else calls, so that their arguments are of no use


def on_config(config: Any) -> Any:
    """Link to the repository, if it has an address."""
    config.repo_url = ADDRESS or None
    return config


def on_files(files: Files, *, config: Any) -> Files:
    """Add the pages."""
    pages = {
        "index.md": (ROOT / "README.md").read_text().replace("docs/", ""),
        "experiments.md": (ROOT / "experiments" / "REPORT.md").read_text(),
        "reference.md": reference(),
        "options.md": options(),
    }
    for name, text in pages.items():
        files.append(File.generated(config, name, content=outside(text)))
    for notebook in (ROOT / "examples").glob("*.ipynb"):
        files.append(File.generated(config, f"examples/{notebook.name}", content=notebook.read_text()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """A page for a reader without a clone.

    Links to files of the repository lead to its address, or become their words. Blocks of code lose their marks.
    """
    text = SETUP["without_clone"](outside(markdown))
    return re.sub(r"^```python \w+$", "```python", text, flags=re.MULTILINE)


def on_page_content(html: str, **_: Any) -> str:
    """Options are marked in code, so that site.css can keep a line from breaking after their hyphens."""
    return re.sub(
        r"<code>[^<]*</code>",
        lambda code: re.sub(r"--?[a-z][\w-]*", r'<span class="option">\g<0></span>', code[0]),
        html,
    )


def outside(text: str) -> str:
    """The text with links to what is not on the site leading to the address of the repository, or as their words."""
    text = re.sub(r"\]\((\.\./)?experiments/REPORT\.md\)", "](experiments.md)", text)
    if ADDRESS:
        return OUTSIDE.sub(rf"[\1]({ADDRESS}/blob/main/\2)", text)
    return OUTSIDE.sub(r"\1", text)


def reference() -> str:
    """Every public name with its signature and docstring, in the order in which a user meets them."""
    listed = [name for names in CHAPTERS.values() for name in names.split()]
    unlisted = {name for name in dmcp.__all__ if not name.startswith("__")} ^ set(listed)
    if unlisted:
        raise ValueError(f"CHAPTERS of tools/site.py and dmcp.__all__ differ: {', '.join(sorted(unlisted))}.")
    parts = ["# Python API"]
    for chapter, names in CHAPTERS.items():
        parts.append(f"## {chapter}")
        parts += [entry(name) for name in names.split()]
    return "\n\n".join(parts)


def entry(name: str) -> str:
    """One name of the reference: made by mkdocstrings, or a table of the fields of settings."""
    value = getattr(dmcp, name)
    if isinstance(value, type) and issubclass(value, StrEnum):
        return f"::: dmcp.{name}\n\nOne of {', '.join(f'`{member.value!r}`' for member in value)}."
    fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
    if not any("help" in field.metadata for field in fields):
        if name not in MEMBERS:
            return f"::: dmcp.{name}"
        shown = f"members: [{', '.join(MEMBERS[name].split())}]"
        if name in MADE_BY_US:
            shown += "\n      merge_init_into_class: false"
        return f"::: dmcp.{name}\n    options:\n      {shown}"
    rows = ["| field | default | meaning |", "|---|---|---|"]
    for field in fields:
        default = ""
        if field.default_factory is not dataclasses.MISSING:
            default = f"`{field.default_factory()!r}`"
        elif isinstance(field.default, StrEnum):
            default = f"`{field.default.value!r}`"
        elif field.default is not dataclasses.MISSING:
            default = f"`{field.default!r}`"
        rows.append(f"| `{field.name}` | {default} | {field.metadata['help']} |")
    return f"### dmcp.{name} {{: data-toc-label='{name}' }}\n\n{inspect.getdoc(value)}\n\n" + "\n".join(rows)


def options() -> str:
    """Every command with its options, which are made from the settings."""
    parts = ["# Command-line options"]
    for name, command in typer.main.get_command(app).commands.items():
        if command.hidden:
            continue
        rows = ["| option | meaning |", "|---|---|"]
        for parameter in command.params:
            words = parameter.opts
            if parameter.param_type_name == "argument":
                words = [parameter.metavar]
            shown = ", ".join(f"`{word}`" for word in words)
            rows.append(f"| {shown} | {parameter_help(parameter).replace('|', '/')} |")
        about, _, examples = (command.help or "").partition("\b\n")
        block = f"```text\n{examples.strip()}\n```\n\n" if examples else ""
        parts.append(f"## dmcp {name}\n\n{about.strip()}\n\n{block}" + "\n".join(rows))
    return "\n\n".join(parts)
