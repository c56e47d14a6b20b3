"""Gives the package its description: README.md, as a reader without a clone needs it.

Everything else is in pyproject.toml. With an address under `urls` there, links and pictures lead to it; without one,
links become their words, and pictures are left out.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ADDRESS = PROJECT["urls"].get("Repository", "")
LOCAL = r"(?!#|[a-z]+:)"  # the start of a link into the clone
PICTURE = r"<picture>.*?</picture>\n*|^!\[[^\]]*\]\([^)]*\)\n*"
INSTALLED = re.compile(r'(?<=pip install )(?:PACKAGE|-e "?\.)(\[[\w,]+\])?"?')
CLONE_ONLY = re.compile(r"<!-- in a clone -->\n.*?<!-- elsewhere\n(.*?)-->\n", re.DOTALL)


def without_clone(text: str) -> str:
    """A page with the other text of each part that only works in a clone, and commands that install the package."""
    return INSTALLED.sub(lambda found: package(found[1] or ""), CLONE_ONLY.sub(r"\1", text))


def package(extras: str) -> str:
    """What pip installs: the package at its address, or the wheel while there is none."""
    if ADDRESS:
        return f'"{PROJECT["name"]}{extras} @ git+{ADDRESS}"'
    return f'"{PROJECT["name"].replace("-", "_")}-{PROJECT["version"]}-py3-none-any.whl{extras}"'


def with_addresses(readme: str) -> str:
    """The README with links and pictures that do not lead into a clone."""
    if not ADDRESS:
        without_pictures = re.sub(PICTURE, "", readme, flags=re.DOTALL | re.MULTILINE)
        return re.sub(rf"\[([^\]]+)\]\({LOCAL}[^)]*\)", r"\1", without_pictures)
    readme = re.sub(rf'(src|srcset)="{LOCAL}', rf'\1="{ADDRESS}/raw/main/', readme)
    readme = re.sub(rf"(!\[[^\]]*\]\(){LOCAL}", rf"\1{ADDRESS}/raw/main/", readme)
    return re.sub(rf"(\]\(){LOCAL}", rf"\1{ADDRESS}/blob/main/", readme)


if __name__ == "__main__":
    setup(
        long_description=with_addresses(without_clone((ROOT / "README.md").read_text(encoding="utf-8"))),
        long_description_content_type="text/markdown",
    )
