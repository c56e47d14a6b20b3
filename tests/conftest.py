"""What all tests share: fixed seeds, and global switches of torch that are left as they were; fixtures for commands."""

from __future__ import annotations

import functools
import os
import random
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer.main
from commands import command
from torch import Tensor, nn

from dmcp import models
from dmcp.cli import compare as comparing
from dmcp.cli.job import CHILD
from dmcp.cli.processes import Command
from dmcp.results import milliseconds
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.trace import trace

torch.set_num_threads(1)  # small nets: more threads only wait for each other
os.environ["OMP_NUM_THREADS"] = "1"  # in the processes that tests start, too: another number gives other bits
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


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Decoded images are kept in the folder of the test session, not in the user's home."""
    monkeypatch.setattr("dmcp.data.store.CACHE", tmp_path_factory.getbasetemp() / "cache")


@pytest.fixture
def quick_commands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out what takes most of the time of a short run, for files that have many of them.

    A network of ours is traced once in a session, networks are timed in one round and in torch only, and runs end
    without figures.
    """
    monkeypatch.setattr("dmcp.cli.job.trace", _trace_once)
    monkeypatch.setattr("dmcp.pruning.trace", _trace_once)
    monkeypatch.setattr("dmcp.speed._onnx_times", lambda *_: [])
    monkeypatch.setattr("dmcp.results.milliseconds", lambda nets, example, *_: milliseconds(nets, example, 1))
    monkeypatch.setattr("dmcp.report.finish.draw_all", lambda *_, **__: [])


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches and trainings whose length is not set are short; what `prune` chooses takes most of a minute."""
    monkeypatch.setattr("dmcp.defaults._MIN_STEPS", 20)
    monkeypatch.setattr("dmcp.defaults._SEARCH_STEPS", (20, 20))
    monkeypatch.setattr("dmcp.defaults._FINETUNE_EPOCHS", 2)


@pytest.fixture
def runs_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`dmcp compare` fills a folder from this process, in tmp_path: new processes would mostly import torch."""

    def run_here(commands: Sequence[Command], *_: Any, **__: Any) -> dict[str, str]:
        codes = {run.name: command(*run.words) for run in commands}
        return {name: f"exit code {code}" for name, code in codes.items() if code}

    monkeypatch.setattr(comparing, "run_side_by_side", run_here)
    monkeypatch.setenv(CHILD, "1")  # set in the processes that dmcp compare starts
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


_GRAPHS: dict[object, ChannelGraph] = {}


def _trace_once(model: nn.Module, example: Tensor, **options: Any) -> ChannelGraph:
    """Trace a network of ours, or give the graph of an earlier one with the same structure: graphs have no weights."""
    if type(model).__module__ != models.__name__:
        return trace(model, example, **options)
    trainable = [parameter.requires_grad for parameter in model.parameters()]
    key = repr((model, example.shape, model.training, trainable, options))
    if key not in _GRAPHS:
        _GRAPHS[key] = trace(model, example, **options)
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
