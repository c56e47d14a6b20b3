"""Writes the address of the repository, from `urls` in pyproject.toml, where a reader needs it to get a copy.

Pages get the commands that make a clone. Notebooks get a cell that installs the package and, if the address is on
GitHub, a badge that opens the notebook in Colab.

python tools/address.py           after the address was filled in or changed
python tools/address.py --check   exit code 1 if a file has another one
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/getting-started.md")
BLOCK = re.compile(r"(?<=<!-- clone: tools/address.py -->\n).*?(?=<!-- end of clone -->)", re.DOTALL)
GITHUB = "https://github.com/"
COLAB = "https://colab.research.google.com"  # opens notebooks of GitHub
CELL = "address"  # the id of our cell in a notebook
EXTRAS = {"front.ipynb": "[export]"}  # that a notebook needs
PACKAGES = {"yolo.ipynb": " ultralytics"}  # that no small extra has


def main() -> None:
    """Write the files, or check them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project["urls"].get("Repository", "").rstrip("/").removesuffix(".git")
    texts = {ROOT / name: page_with(address, (ROOT / name).read_text(encoding="utf-8")) for name in PAGES}
    for path in (ROOT / "examples").glob("*.ipynb"):
        texts[path] = notebook_with(address, path.name, path.read_text(encoding="utf-8"))

    old = [path for path, text in texts.items() if path.read_text(encoding="utf-8") != text]
    if "--check" in sys.argv and old:
        raise SystemExit(f"{', '.join(path.name for path in old)}: run python tools/address.py.")
    for path in old:
        path.write_text(texts[path], encoding="utf-8")


def page_with(address: str, text: str) -> str:
    """A page with the commands that make a clone; without them while there is no address."""
    lines = ""
    if address:
        lines = f"\n    git clone {address}\n    cd {address.rpartition('/')[2]}\n\n"
    return BLOCK.sub(lambda _: lines, text)


def notebook_with(address: str, name: str, text: str) -> str:
    """A notebook with a badge and a cell that installs the package; without them while there is no address."""
    notebook = json.loads(text)
    cells = [cell for cell in notebook["cells"] if not cell["id"].startswith(CELL)]
    if address:
        cells[1:1] = address_cells(address, name)
    return json.dumps(notebook | {"cells": cells}, indent=1, ensure_ascii=False) + "\n"


def address_cells(address: str, name: str) -> list[dict[str, Any]]:
    """The badge, if the notebook can be opened in Colab, and the command that installs the package."""
    package = f"torch-dmcp{EXTRAS.get(name, '')} @ git+{address}"
    install = f'%pip install -q "{package}"{PACKAGES.get(name, "")}'
    cells: list[dict[str, Any]] = [
        {"cell_type": "code", "execution_count": None, "id": CELL, "metadata": {}, "outputs": [], "source": [install]}
    ]
    if address.startswith(GITHUB):
        link = f"{COLAB}/github/{address.removeprefix(GITHUB)}/blob/main/examples/{name}"
        badge = f"[![Open in Colab]({COLAB}/assets/colab-badge.svg)]({link})"
        cells.insert(0, {"cell_type": "markdown", "id": f"{CELL}-badge", "metadata": {}, "source": [badge]})
    return cells


if __name__ == "__main__":
    main()
