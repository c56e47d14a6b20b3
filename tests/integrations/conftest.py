"""Each test in a folder of its own, with the blocks of the cookbook at hand."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

COOKBOOK = Path(__file__).parents[2] / "docs" / "cookbook.md"


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Libraries write into the working folder, and some trainers leave torch deterministic."""
    monkeypatch.chdir(tmp_path)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cudnn.deterministic = False


@pytest.fixture
def run_block() -> Callable[[str], dict[str, Any]]:
    """Run the block of the cookbook that is marked so, in the working folder; its names."""

    def run(mark: str) -> dict[str, Any]:
        (block,) = re.findall(rf"^```python {mark}\n(.*?)^```", COOKBOOK.read_text(), re.MULTILINE | re.DOTALL)
        names: dict[str, Any] = {"__name__": "cookbook"}
        torch.manual_seed(0)
        exec(compile(block, f"cookbook.md, {mark}", "exec", dont_inherit=True), names)
        return names

    return run
