"""What all tests share: fixed seeds, and the global switches of torch left as they were."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

torch.set_num_threads(1)  # small nets: more threads only wait for each other


@pytest.fixture(autouse=True)
def _same_world() -> Iterator[None]:
    """Every test starts from the same seeds, and must not leave a global switch changed."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    before = _switches()
    yield
    assert _switches() == before


@pytest.fixture(autouse=True)
def _no_word_about_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """How fast the networks are here must not decide what commands print; tests of that set it themselves."""
    monkeypatch.setattr("dmcp.rows._SLOW", math.inf)


def _switches() -> tuple[object, ...]:
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.utils._python_dispatch._get_current_dispatch_mode(),
    )
