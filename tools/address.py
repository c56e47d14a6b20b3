"""Writes the address of the repository, from `urls` in pyproject.toml, into the pages that say how to get a clone.

python tools/address.py           after the address was filled in or changed
python tools/address.py --check   exit code 1 if a page has another one
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("README.md", "docs/getting-started.md")
BLOCK = re.compile(r"(?<=<!-- clone: tools/address.py -->\n).*?(?=<!-- end of clone -->)", re.DOTALL)


def main() -> None:
    """Write the pages, or check them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = clone_lines(project["urls"].get("Repository", ""))
    old_pages = []
    for name in PAGES:
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        new_text = BLOCK.sub(lambda _: lines, text)
        if new_text != text:
            old_pages.append(name)
            if "--check" not in sys.argv:
                path.write_text(new_text, encoding="utf-8")
    if old_pages and "--check" in sys.argv:
        raise SystemExit(f"{', '.join(old_pages)}: run python tools/address.py.")


def clone_lines(address: str) -> str:
    """The block of a page; empty while there is no address."""
    if not address:
        return ""
    folder = address.rstrip("/").rpartition("/")[2].removesuffix(".git")
    return f"\n    git clone {address}\n    cd {folder}\n\n"


if __name__ == "__main__":
    main()
