"""Type a command of ours, in this process."""

from __future__ import annotations

import signal
import sys

import pytest

from dmcp.cli import main


def command(*words: str) -> int:
    """Its exit code; what it prints is for capsys."""
    before = signal.getsignal(signal.SIGINT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dmcp", *words])
        patch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as stop:
            main.main()
    signal.signal(signal.SIGINT, before)
    return int(stop.value.code or 0)
