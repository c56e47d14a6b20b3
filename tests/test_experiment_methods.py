"""AMC, MetaPruning and direct sampling, which are methods of one's own: they find what is planted, in one command."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from planted import Batches, heard, planted_problem
from test_runner import cells, here, typed  # noqa: F401

import dmcp
from dmcp.compare.methods import DmcpConfig, choose, find_method
from dmcp.errors import DataError
from experiments.methods.amc import AmcConfig, DdpgConfig
from experiments.methods.metapruning import MetaPruningConfig

AMC, META = "experiments.methods.amc:amc", "experiments.methods.metapruning:metapruning"
DIRECT = "experiments.methods.direct:direct"
AGENT = DdpgConfig(hidden=32, actor_lr=1e-3, critic_lr=1e-2)
CONFIGS: dict[str, Any] = {
    AMC: AmcConfig(warmup=20, episodes=100, agent=AGENT),
    META: MetaPruningConfig(hidden=8, population=8, generations=2, parents=2, batches=4),
}


@pytest.mark.parametrize("name", [AMC, META])
def test_planted_truth_is_found(name: str) -> None:
    problem, log = heard(planted_problem(epochs=15))
    prepared = find_method(name).prepare(problem, CONFIGS[name])  # type: ignore[misc]
    choice = choose(name, problem, CONFIGS[name], prepared.state)
    assert dict(choice.widths) == {"needed": 8, "useless": 1} and prepared.sample_passes == 15 * 20 * 64
    best = [record["best"] for record in log if isinstance(record, dict)]
    assert best == sorted(best) and best[-1] > 0.9
    if name == AMC:  # the reward is the metric of the cut network with the statistics of the batch
        assert choice.model is not None
        small = dmcp.cut(choice.model, problem.graph, choice.kept).train()
        right = sum(dmcp.losses.top1(small(x), (x, labels))[0].item() for x, labels in problem.held_out)
        assert best[-1] == pytest.approx(right / sum(labels.numel() for _, labels in problem.held_out), abs=2e-3)
    single = Batches([(x[:1], labels[:1]) for x, labels in problem.held_out])  # no statistics of a batch
    with pytest.raises(DataError):
        choose(name, replace(problem, held_out=single), CONFIGS[name], prepared.state)


def test_direct_sampling() -> None:
    choice = choose(DIRECT, planted_problem(epochs=6), DmcpConfig(epochs=6))
    assert choice.widths["useless"] < choice.widths["needed"] and choice.sample_passes > 0


def test_they_run_in_one_command(here: Any, capfd: pytest.CaptureFixture[str]) -> None:  # noqa: F811
    quick = ["amc.warmup=1", "amc.episodes=2", "amc.agent={'hidden': 8}", "metapruning.hidden=1"]
    quick += ["metapruning.population=3", "metapruning.generations=1", "metapruning.epochs=1"]
    words = [word for text in quick for word in ("--set", text)]
    assert typed("--methods", f"{AMC},{META}", *words, "--no-unpruned") == 0
    rows = [line[:1] + line[4:5] for line in cells(capfd.readouterr().out)[1:]]
    assert [method for method, _ in rows] == ["amc", "metapruning"] and rows[0][1].endswith("fine-tuned")
