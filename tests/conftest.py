"""What all tests share: fixed seeds, the global switches of torch left as they were, graphs of the small networks."""

from __future__ import annotations

import functools
import random
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import typer.main
from torch import Tensor, nn

from dmcp import models
from dmcp.results import milliseconds
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.trace import trace

torch.set_num_threads(1)  # small nets: more threads only wait for each other
# without a GPU torch would write down the stack of each call, for the moment when there is one
_seed = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed
typer.main.get_command = functools.cache(typer.main.get_command)  # else every command typed makes all of them anew
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells start what is to run in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _same_world() -> Iterator[None]:
    """Every test starts from the same seeds, and must not leave a global switch changed."""
    random.seed(0)
    np.random.seed(0)
    _seed(0)
    before = _switches()
    yield
    assert _switches() == before


@pytest.fixture
def figures() -> None:
    """For tests whose runs are to end with figures."""


@pytest.fixture(autouse=True)
def _quick_commands(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What commands do beside the matter is short, and what they print does not depend on how fast this machine is."""
    monkeypatch.setattr("dmcp.data.store.CACHE", tmp_path_factory.getbasetemp() / "cache")
    # not ten times; test_pruning calls what does that itself
    monkeypatch.setattr("dmcp.results.milliseconds", lambda nets, example, *_: milliseconds(nets, example, 1))
    if "figures" not in request.fixturenames:  # they take longer than the short runs of tests
        monkeypatch.setattr("dmcp.report.finish.draw_all", lambda *_, **__: [])
    # hundreds of tests type commands for the same small networks: tracing them anew would be most of the time
    monkeypatch.setattr("dmcp.cli.session.trace", _trace_once)


_GRAPHS: dict[object, ChannelGraph] = {}


def _trace_once(model: nn.Module, example: Tensor, **how: Any) -> ChannelGraph:
    """The graph of a network of ours from the first time that one of this structure was traced; it has no weights."""
    if type(model).__module__ != models.__name__:
        return trace(model, example, **how)
    trained = [parameter.requires_grad for parameter in model.parameters()]
    key = repr((model, example.shape, model.training, trained, how))
    if key not in _GRAPHS:
        _GRAPHS[key] = trace(model, example, **how)
    return _GRAPHS[key]


def _switches() -> tuple[object, ...]:
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.backends.mha.get_fastpath_enabled(),
        torch.utils._python_dispatch._get_current_dispatch_mode(),
    )
