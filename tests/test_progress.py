"""Progress: the time left of the whole job, where it is shown, and events while they happen."""

from __future__ import annotations

import copy
import io
import sys
import time
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from short_runs import SEARCH, TRAIN, Noise, traced_residual

import dmcp
from dmcp.runtime import progress
from dmcp.runtime.progress import Phase, Progress
from dmcp.units import show_duration


class Clock:
    """A clock that is set by hand."""

    now = 0.0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of all that is timed."""
    hand = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: hand.now)
    return hand


def test_the_time_left_is_that_of_the_whole_job(at: Clock) -> None:
    """A second per unit of work: 4 x 4 in the search, 10 in the training, 1 that is tested."""
    job = Progress(None)
    job.phases = {
        phase.name: phase for phase in (Phase("search", 4, 4.0), Phase("dmcp", 10, 1.0), Phase("test", 3, 1 / 3))
    }
    search = job.begin(Phase("search", 4))
    assert job.seconds_left() is None  # nobody knows yet
    for step in range(1, 5):
        at.now += 4
        job.update(search, step)
        assert job.seconds_left() == pytest.approx(27 - at.now)
    training = job.begin(Phase("dmcp", 10))
    at.now += 10.0  # twice as slow as the search made believe
    job.update(training, 5)
    assert job.seconds_left() == pytest.approx(10 + 26 / 21)


def test_lines_come_now_and_then_and_at_the_end(at: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with progress.showing(True), progress.phase("dmcp", 40) as update:
        for step in range(40):
            at.now += 1.0
            update(step + 1, f"loss {step}")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5 and lines[0] == "dmcp: 10 of 40, loss 9, 30 s left"
    assert lines[-1] == "dmcp: 40 of 40, loss 39"
    assert [show_duration(seconds) for seconds in (5, 200, 7500)] == ["5 s", "3 min 20 s", "2 h 05 min"]


@pytest.mark.parametrize(("seconds", "said"), [(40.0, True), (20.0, False)], ids=["long", "short"])
def test_the_first_line_says_what_a_long_search_takes_and_what_does_without(
    at: Clock, capsys: pytest.CaptureFixture[str], seconds: float, said: bool
) -> None:
    """The remaining 9 steps of the search take 6 minutes, and the other 20 steps, of a quarter of the work, 200 s."""
    with progress.showing(True):
        progress.plan([Phase("search", 10, 4.0), Phase("dmcp", 20, 1.0)], progress.Avoidable("search", "the quick way"))
        with progress.phase("search", 10) as update:
            for step in range(10):
                at.now += seconds
                update(step + 1)
    lines = capsys.readouterr().err.splitlines()
    announcement = (
        "This takes about 9 min 20 s, 6 min 00 s of it for the search. "
        "Without it, the quick way takes about 3 min 20 s."
    )
    assert (lines[0] == announcement) is said
    assert not any("quick" in line for line in lines[1:])


@pytest.mark.parametrize("trained", [True, False])
def test_only_a_trained_network_can_do_without_its_search(
    at: Clock, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trained: bool
) -> None:
    class Slow(Noise):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                at.now += 200.0
                yield batch

    monkeypatch.setattr("dmcp.pruning.is_trained", lambda *_: trained)
    model, graph = traced_residual()
    dmcp.prune(model, Slow(), Noise(1), search=SEARCH, train=TRAIN, teacher=None, graph=graph)
    assert ("--method sensitivity" in capsys.readouterr().err) is trained


def test_python_prints_a_line_every_30_seconds_outside_a_terminal(
    at: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    class Slow(Noise):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                at.now += 7.0
                yield batch

    def lines_of(**options: Any) -> list[str]:
        began = at.now
        dmcp.train(copy.deepcopy(model), Slow(3), config, runtime=dmcp.Runtime(**options))
        assert at.now - began == 105.0
        out, err = capsys.readouterr()
        assert out == ""
        return err.splitlines()

    model, _ = traced_residual()
    config = dmcp.TrainConfig(epochs=5, lr=0.01)
    assert [line.partition(",")[0] for line in lines_of()] == ["train: 5 of 15", "train: 10 of 15", "train: 15 of 15"]
    assert lines_of(progress=False) == []
    assert len(lines_of(progress=True)) > 3


@pytest.mark.parametrize(("device", "seconds"), [("cpu", 1.0), ("cuda", 30.0)])
def test_a_slow_step_does_not_keep_the_losses_from_being_read(at: Clock, device: str, seconds: float) -> None:
    began = at.now
    assert not progress.overdue(began, torch.device(device))
    at.now += seconds
    assert progress.overdue(began, torch.device(device))


def prune(**options: Any) -> None:
    model, graph = traced_residual()
    runtime = dmcp.Runtime(**options)
    dmcp.prune(model, Noise(), Noise(1), search=SEARCH, train=TRAIN, baselines=True, graph=graph, runtime=runtime)


def test_bars_are_shown_in_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    prune(progress=False)
    monkeypatch.setattr(progress, "current", lambda: dmcp.runtime.distributed.World(1, 2, 1))
    prune()
    assert terminal.getvalue() == ""
    monkeypatch.setattr(progress, "current", dmcp.runtime.distributed.current)
    prune(on_event=lambda event: print(event.stage))
    frames = terminal.getvalue()
    assert all(name in frames for name in ("trace", "search", "unpruned", "uniform", "dmcp", "test", "total", "100%"))
    assert "search" in capsys.readouterr().out  # is not taken for something to be shown above the bars
    monkeypatch.setattr(terminal, "write", MagicMock(side_effect=OSError(5, "Input/output error")))
    prune()  # also without its terminal


def test_on_a_cpu_events_come_while_they_happen(at: Clock) -> None:
    """Here each batch takes a second: its event comes before the next batch is read."""
    seen = list[str]()

    class Slow(Noise):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                seen.append("batch")
                at.now += 1.0
                yield batch

    model, graph = traced_residual()
    runtime = dmcp.Runtime(on_event=lambda event: seen.append("event"))
    dmcp.train(copy.deepcopy(model), Slow(), TRAIN, runtime=runtime)
    dmcp.search(dmcp.Supernet(model, graph, SEARCH.groups), Slow(), SEARCH, runtime=runtime)
    assert seen[:-1] == ["batch", "event"] * (len(seen) // 2)
