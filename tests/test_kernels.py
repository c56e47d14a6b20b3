"""The kernels against torch, in Triton's interpreter: see kernel_checks.py.

The interpreter is chosen when Triton is imported, so these checks run in a process of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("marks", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_the_kernels_are_right(marks: str) -> None:
    triton = pytest.importorskip("triton")
    if triton.__version__.startswith("3.6.") and tuple(map(int, np.__version__.split(".")[:2])) >= (2, 4):
        pytest.skip("the interpreter of triton 3.6 (of torch 2.11) does not know NumPy 2.4")
    options = ["-q", "-p", "no:cacheprovider", "--noconftest", "-m", marks]
    words = [sys.executable, "-m", "pytest", *options, "kernel_checks.py"]
    mode = {name: text for name, text in os.environ.items() if not name.startswith("PYTEST_")}
    mode |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=HERE, env=mode, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
