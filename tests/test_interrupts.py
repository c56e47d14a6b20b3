"""Ctrl-C while the command is still starting."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dmcp import cli
from dmcp.cli import main

TORCH = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(0.1)\n"  # one that is interrupted
SCRIPT = "import sys\nfrom dmcp.cli.main import main\nsys.exit(main())\n"  # what pip makes of an entry point


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Programs that are started heed Ctrl-C, also where these tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def start(folder: Path, *words: str | Path) -> tuple[int, str]:
    """Exit code and stderr of a program whose user presses Ctrl-C while torch is being imported."""
    (folder / "torch.py").write_text(TORCH)
    path = os.pathsep.join([str(folder), str(Path(main.__file__).parents[1])])
    end = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": path}
    )
    assert end.stdout == ""
    return end.returncode, end.stderr


def test_a_command_that_is_starting_ends_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "dmcp").write_text(SCRIPT)
    assert start(tmp_path, "-m", "dmcp", "inspect", "--model", "digits:resnet") == (130, "")
    assert start(tmp_path, tmp_path / "bin" / "dmcp", "inspect", "--model", "digits:resnet") == (130, "")


def test_other_programs_are_interrupted_as_usual(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "try:\n    import dmcp.training\nexcept KeyboardInterrupt:\n    raise SystemExit(7)\n"
    )
    for words in [("mine.py",), ("-m", "mine"), ("-c", "import mine")]:
        place = [tmp_path / words[0]] if len(words) == 1 else words
        assert start(tmp_path, *place, "-m", "dmcp") == (7, "")


def test_once_started_a_command_is_interrupted_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGINT, cli.leave)
    monkeypatch.setattr(sys, "argv", ["dmcp", "--version"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit):
        main.main()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
