"""Shows what docstrings say about arguments as a list on the site (mkdocs.yml).

Our docstrings have a line "name: meaning" for each argument that needs one; Markdown would run these lines together.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

ARGUMENTS = re.compile(r"^(\w+(?:, \w+)*): ")


class ArgumentLists(griffe.Extension):  # type: ignore[misc]
    """Makes list items of the lines about arguments."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Change the docstring of a function."""
        if func.docstring:
            names = {parameter.name for parameter in func.parameters}
            func.docstring.value = list_arguments(func.docstring.value, names)


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
