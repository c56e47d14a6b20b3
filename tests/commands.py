"""Type commands of ours in this process, with short settings, and read what they print."""

from __future__ import annotations

import importlib.util
import signal
import sys

import pytest

from dmcp.cli import main

Capture = pytest.CaptureFixture[str]

SMALL = ("--model", "digits:resnet", "--data", "digits", "--device", "cpu", "--batch", "708", "--quiet")
SHORT = (*SMALL, "--search-epochs", "2", "--epochs", "1")
DRY = (*SHORT, "--batch", "64", "--dry-run")  # a dry run measures steps, not epochs: small batches make it shorter

COMPARE = ("compare", *SMALL, "--epochs", "1", "--seeds", "1", "--out", "table", "--methods", "uniform,l1")

ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
needs_onnx = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ONNX_PACKAGES),
    reason="NOT TESTED: pip install -e .[export]",
)


class Killed(BaseException):
    """Raised in the middle of a job: stands for a kill."""


def command(*words: str) -> int:
    """Run a command and return its exit code; what it prints is for capsys."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["dmcp", *words])
        patch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as stop:
            main.main()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    return int(stop.value.code or 0)


def run(capsys: Capture, *words: str) -> tuple[int, str, str]:
    """Run a command as if its output were piped, and return its exit code, stdout and stderr."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        code = command(*words)
    return code, *capsys.readouterr()


def compare(*words: str) -> int:
    """Run `dmcp compare` with two methods and return its exit code."""
    return command(*COMPARE, *words)


def table_cells(text: str) -> list[list[str]]:
    """The cells of each line of the Markdown tables in a text."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
