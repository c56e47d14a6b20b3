"""Shows what is said about arguments and fields as lists on the site (mkdocs.yml).

Our docstrings have a line "name: meaning" for each argument that needs one; Markdown would run these lines together.
Fields of our dataclasses have comments, behind them or above them.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ARGUMENTS = re.compile(r"^(\w+(?:, \w+)*): ")
FIELD = re.compile(r"^    ([a-z]\w*): [^#]*(?:  # (.+))?$")
COMMENT = re.compile(r"^    # (.+)$")
BODY = re.compile(r"^    (?:def|@)")  # what follows the fields


class ArgumentLists(griffe.Extension):  # type: ignore[misc]
    """Makes list items of the lines about arguments, and of the comments on fields."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Change the docstring of a function."""
        if func.docstring:
            names = {parameter.name for parameter in func.parameters}
            func.docstring.value = list_arguments(func.docstring.value, names)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Change the docstring of a dataclass."""
        if cls.docstring and "dataclass" in cls.labels:
            cls.docstring.value += list_fields(cls.source)


def list_fields(source: str) -> str:
    """An item for each field of a class that a comment explains."""
    items = []
    above: list[str] = []  # the comment that ends in the line before
    for line in source.splitlines():
        if BODY.match(line):
            break
        comment = COMMENT.match(line)
        field = FIELD.match(line)
        if comment:
            above.append(comment[1])
            continue
        if field and (field[2] or above):
            items.append(f"- **{field[1]}**: {field[2] or ' '.join(above)}")
        above = []
    if not items:
        return ""
    return "\n\n" + "\n".join(items)


def list_arguments(docstring: str, names: set[str]) -> str:
    """The docstring with an item for each line about arguments, and for those that continue it."""
    lines = []
    inside = False  # an item
    for line in docstring.splitlines():
        start = ARGUMENTS.match(line)
        if start and names >= set(start[1].split(", ")):
            if not inside:
                lines.append("")
            inside = True
            lines.append(f"- **{start[1]}**: {line[start.end() :]}")
        elif inside and line.strip():
            lines.append(f"    {line.strip()}")
        else:
            inside = False
            lines.append(line)
    return "\n".join(lines)
