"""docs/results.md: its tables are those of the recorded rows; and the times of pruned networks."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import Chain

from experiments.real import page

PLATES = {"network": "LPRNet", "test": "plates", "budget": "50%", "epochs": 40, "taught": True}
COMMAND = "python -m experiments.real.plates LPRNet_Pytorch --budget 50% --method"


def row(method: str, name: str, seed: int, score: float, **facts: Any) -> dict[str, Any]:
    costs = {"macs_share": 1.0, "params": 1000} if name == "original" else {"macs_share": 0.496, "params": 420}
    command = f"{COMMAND} {method} --results /root/rows.jsonl --save /root/networks"
    line = PLATES | costs | {"method": method, "row": name, "seed": seed, "score": score, "train_loss": score / 10}
    return line | {"command": command} | facts


def test_the_page_has_the_recorded_rows() -> None:
    text = page.PAGE.read_text()
    assert page.put(text, page.tables(page.read_rows(page.RESULTS), page.read_rows(page.SPEEDS))) == text


def test_a_line_has_the_mean_and_the_deviation_of_the_seeds() -> None:
    rows = [row("dmcp", "original", seed, 0.9 + seed / 100) for seed in (0, 2)]
    rows += [row("dmcp", page.CUT, seed, 0.3) for seed in (0, 2)]
    rows += [row("dmcp", "uniform", 0, 0.8), row("dmcp", "uniform", 2, 0.84)]
    rows += [row("dmcp", "dmcp", 0, 0.85), row("dmcp", "dmcp", 2, 0.87)]
    rows += [row("l2", "original", 0, 0.9), row("l2", "l2", 0, 0.7)]
    rows += [row("l2", "l2", 0, 0.99, lr=0.003), row("l2", "l2", 0, 0.99, test="held-out")]  # these choose settings
    speeds = [{"network": "LPRNet", "budget": "50%", "before_ms": 12.34, "ms": 6.71}]
    scores, losses, commands = page.tables(rows, speeds).split("\n\n")
    head, _, line = ([cell.strip() for cell in text.split("|")[1:-1]] for text in scores.splitlines())
    assert dict(zip(head, line, strict=True)) == {
        "network, budget, fine-tuning": "LPRNet, 50%, 40 epochs, taught",
        "score": "plates read right, %",
        "before": "91.0 ± 1.4",
        "cut: dmcp": "30.0",
        "dmcp": "86.0 ± 1.4",
        "uniform": "82.0 ± 2.8",
        "l2": "70.0",
        "MACs": "49.6%",
        "parameters": "42.0%",
        "ms": "12.3 → 6.7",
    }
    assert len(scores.splitlines()) == len(losses.splitlines()) == len(commands.splitlines()) == 3
    assert "| 0.086 ± 0.001 | 0.082 ± 0.003 | 0.070 |" in losses
    assert f"`{COMMAND} dmcp`<br>`{COMMAND} l2`" in commands


def test_other_methods_have_columns_once_they_have_rows() -> None:
    rows = [row("dmcp", "original", 0, 0.9), row("dmcp", "dmcp", 0, 0.85)]
    for method in ("dmcp-original-weights", "torch-pruning"):
        rows += [row(method, page.CUT, 0, 0.4), row(method, method, 0, 0.8)]
    scores, losses, commands = page.tables(rows, []).split("\n\n")
    assert (
        "| cut: dmcp-original-weights | cut: torch-pruning | dmcp | dmcp-original-weights | torch-pruning |" in scores
    )
    assert "| 40.0 | 40.0 | 85.0 | 80.0 | 80.0 |" in scores
    assert "| training loss at the end | dmcp | dmcp-original-weights | torch-pruning |" in losses
    assert f"`{COMMAND} torch-pruning`" in commands


def test_each_line_has_the_cut_that_its_training_began_from() -> None:
    """A later search of the same network finds other widths."""
    rows = [row("dmcp", "original", 0, 0.9)]
    for command, cut, score, epochs in (("first", 0.3, 0.7, 40), ("second", 0.4, 0.8, 60)):
        rows += [row("dmcp", page.CUT, 0, cut, command=command, epochs=0, taught=False)]
        rows += [row("dmcp", "dmcp", 0, score, command=command, epochs=epochs)]
    scores = page.tables(rows, []).split("\n\n")[0]
    assert "| 30.0 | 70.0 |" in scores and "| 40.0 | 80.0 |" in scores


def test_a_network_that_is_trained_here_has_its_command_too() -> None:
    facts = {"command": "python train.py", "epochs": 80, "taught": False}
    rows = [row("original", "original", 0, 0.9, **facts), row("dmcp", "dmcp", 0, 0.8)]
    assert "`python train.py`<br>`python -m" in page.tables(rows, [])


def test_other_lengths_teachers_and_budgets_are_other_lines() -> None:
    rows = [row("dmcp", "original", 0, 0.9)]
    for facts in ({}, {"epochs": 10}, {"taught": False}, {"budget": "70%"}):
        rows.append(row("dmcp", "dmcp", 0, 0.8, **facts))
    names = [line.split("|")[1].strip() for line in page.tables(rows, []).split("\n\n")[1].splitlines()[2:]]
    assert names == [
        "LPRNet, 70%, 40 epochs, taught",
        "LPRNet, 50%, 10 epochs, taught",
        "LPRNet, 50%, 40 epochs",
        "LPRNet, 50%, 40 epochs, taught",
    ]


def test_networks_are_timed_as_onnxruntime_runs_them(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from experiments.real.speeds import session, time_in_turns

    net = Chain(**Chain.FULL).eval()
    x = torch.randn(1, *Chain.SHAPE, generator=torch.Generator().manual_seed(0))
    (output,) = session(net, x, tmp_path)()
    torch.testing.assert_close(torch.from_numpy(output), net(x), rtol=1e-3, atol=1e-4)
    fast, slow = time_in_turns([partial(sum, range(10**4)), partial(sum, range(10**6))], rounds=3)
    waiting, _ = time_in_turns([partial(time.sleep, 0.02), int], rounds=1)
    assert 0 < 10 * fast < slow and waiting < 20  # of the processor
