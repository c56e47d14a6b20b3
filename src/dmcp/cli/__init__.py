"""The command line. Until it has started, which takes as long as importing torch, Ctrl-C ends it without a word."""

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
    """Whether Python was started for the command `dmcp` or for `python -m dmcp`; not so in a worker process."""
    name = Path([*sys.argv, ""][0])
    if name.parts[-2:] == ("dmcp", "__main__.py"):
        return ("-m", "dmcp") in itertools.pairwise(sys.orig_argv)
    return name.stem == "dmcp" and str(name) in sys.orig_argv


if _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, leave)
