"""Runs notebooks of examples/ in an empty folder and stores their outputs.

python tools/notebooks.py examples/front.ipynb ...     needs pip install -e ".[export,notebooks]"

Progress and warnings, which are printed to stderr, are not stored.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient


def main() -> None:
    """Run the notebooks that are named."""
    for name in sys.argv[1:]:
        path = Path(name)
        text = path.read_text(encoding="utf-8")
        with tempfile.TemporaryDirectory() as folder:
            client = NotebookClient(
                nbformat.reads(text, as_version=4), timeout=3600, resources={"metadata": {"path": folder}}
            )
            client.execute()
        notebook = json.loads(text)
        for cell, executed in zip(notebook["cells"], client.nb.cells, strict=True):
            if cell["cell_type"] == "code":
                cell["execution_count"] = executed.execution_count
                cell["outputs"] = [stored(output) for output in executed.outputs if output.get("name") != "stderr"]
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        print(path)


def stored(output: Any) -> dict[str, Any]:
    """An output as plain data, its text in lines, as in other notebooks."""
    plain: dict[str, Any] = json.loads(json.dumps(output))
    if "text" in plain:
        plain["text"] = plain["text"].splitlines(keepends=True)
    return plain


if __name__ == "__main__":
    main()
