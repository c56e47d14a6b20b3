"""Type a command of ours, in this process."""

from __future__ import annotations

import signal
import sys

import pytest

from dmcp.cli import main


def command(*words: str) -> int:
    """Its exit code; what it prints is for capsys."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dmcp", *words])
        patch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as stop:
            main.main()
    for number, handler in before.items():
        signal.signal(number, handler)
    return int(stop.value.code or 0)
