"""Files appear whole or not at all, and a folder is held by one process at a time."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from dmcp.errors import FileError
from dmcp.runtime.io import Lock, from_plain, is_locked
from dmcp.settings import Precision


def test_a_folder_is_held_while_the_block_runs(tmp_path: Path) -> None:
    for _ in range(2):
        with contextlib.suppress(ZeroDivisionError), Lock(tmp_path):
            with pytest.raises(FileError, match="in use"):
                Lock(tmp_path).__enter__()
            assert is_locked(tmp_path)  # the one that was refused took nothing away
            _ = 1 / 0
        assert list(tmp_path.iterdir()) == [] and not is_locked(tmp_path)


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="NOT TESTED: needs Linux")
def test_a_kill_leaves_no_unfinished_file(tmp_path: Path) -> None:
    code = "import os, sys\nfrom pathlib import Path\nfrom dmcp.runtime.io import write_files\n"
    code += "def data():\n    yield b'half'\n    os.kill(os.getpid(), 9)\n"
    code += "write_files(Path(sys.argv[1]), {'report.html': data()})\n"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", code, tmp_path], env=environment, check=False).returncode == -9
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class Inner:
    size: int = 1


@dataclass(frozen=True)
class Outer:
    inner: Inner
    maybe: Inner | None = None
    rate: float = 0.5
    flag: bool = False
    precision: Precision = Precision.FLOAT32
    names: tuple[str, ...] = ()
    table: Mapping[str, int | str] | None = None


def test_dataclasses_come_back_from_json() -> None:
    whole = Outer(Inner(3), Inner(4), 1, True, Precision.BFLOAT16, ("a", "b"), {"x": 1, "y": "z"})
    assert from_plain(Outer, asdict(whole) | {"names": ["a", "b"]}) == whole
    assert from_plain(Outer, {"inner": {}, "maybe": None}) == Outer(Inner())
    for change, what in {
        "inner": [3, {"size": "1"}, {"size": True}, {"size": 2**63}, {"other": 1}],
        "rate": ["1", None, True],
        "flag": [1],
        "precision": ["float17", None],
        "names": ["ab", [1]],
        "table": [[], {"x": 1.5}],
        "other": [1],
    }.items():
        for value in what:
            with pytest.raises((TypeError, ValueError)):
                from_plain(Outer, {"inner": {}, change: value})
    for data in (None, [], {}):
        with pytest.raises(TypeError):
            from_plain(Outer, data)
