"""Gives the package its description: README.md, whose links and pictures lead into a clone, as others can read it.

Everything else is in pyproject.toml. With an address under `urls` there, links and pictures lead to it; without one,
links become their words, and pictures are left out.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
LOCAL = r"(?!#|[a-z]+:)"  # the start of a link into the clone
PICTURE = r"<picture>.*?</picture>\n*|^!\[[^\]]*\]\([^)]*\)\n*"


def describe(readme: str, address: str) -> str:
    """The text of the README for a reader without the clone."""
    if not address:
        without_pictures = re.sub(PICTURE, "", readme, flags=re.DOTALL | re.MULTILINE)
        return re.sub(rf"\[([^\]]+)\]\({LOCAL}[^)]*\)", r"\1", without_pictures)
    readme = re.sub(rf'(src|srcset)="{LOCAL}', rf'\1="{address}/raw/main/', readme)
    readme = re.sub(rf"(!\[[^\]]*\]\(){LOCAL}", rf"\1{address}/raw/main/", readme)
    return re.sub(rf"(\]\(){LOCAL}", rf"\1{address}/blob/main/", readme)


project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
setup(
    long_description=describe(
        readme=(ROOT / "README.md").read_text(encoding="utf-8"),
        address=project["urls"].get("Repository", ""),
    ),
    long_description_content_type="text/markdown",
)
