"""Ctrl-C while torch is being imported."""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path

INTERRUPTED = 130  # exit code


def leave(number: int, frame: object) -> None:
    """Signal handler: end now. Nothing has begun that would have to be put away."""
    os._exit(INTERRUPTED)


def raise_again() -> None:
    """From now on Ctrl-C is a KeyboardInterrupt, as usual."""
    if signal.getsignal(signal.SIGINT) is leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command() -> bool:
    """Whether Python was started for the command `dmcp`, or for `python -m dmcp`."""
    name = [*sys.argv, ""][0]
    if name == "-m":  # Python looks for the module, and imports the package that it is in
        return ("-m", "dmcp") in itertools.pairwise(sys.orig_argv)
    return Path(name).stem == "dmcp" and name in sys.orig_argv  # not in a worker process, which has only the name


if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, leave)
