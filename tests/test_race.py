"""experiments/race.py and moves.py: candidates cost the same, and the lowest held-out loss wins."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

import dmcp
from dmcp import models

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))
import race

TINY = "digits:resnet digits --budget 50% --seeds 1 --batch 32 --search-steps 4 --race-steps 2 --steps 3 --out"


@pytest.fixture(scope="module")
def graph() -> dmcp.ChannelGraph:
    return dmcp.trace(models.build("digits:resnet"), torch.zeros(2, 1, 8, 8))


def test_half_way_widths_lie_between_and_cost_the_same(graph: dmcp.ChannelGraph) -> None:
    budget = dmcp.parse_budget("50%", graph)
    even = dmcp.uniform(graph, budget, align=1)
    other = dmcp.random_widths(graph, budget, 3, align=1)
    middle = race.half_way(graph, budget, even, other, 1)
    assert 0.48 <= graph.macs(middle) / graph.macs() <= 0.5

    def distance(first: dmcp.Widths, second: dmcp.Widths) -> float:
        return float((first.tensor().log() - second.tensor().log()).norm())

    assert max(distance(middle, even), distance(middle, other)) < 0.75 * distance(even, other)


def test_a_tiny_race_is_recorded_once_and_judged(tmp_path: Path) -> None:
    settings = race.options(None).parse_args([*TINY.split(), str(tmp_path / "race.jsonl")])
    race.measure_all(settings)
    race.measure_all(settings)
    (row,) = race.rows_of(settings.out)
    assert set(row["race"]) == set(row["trained"]) == {race.UNIFORM, race.SEARCHED, race.HALF_WAY}
    assert all(0.45 <= share <= 0.5 for share in row["macs"].values())

    # Other losses, another winner; the table says how much was won by it.
    for number, name in enumerate(row["race"]):
        row["race"][name] = {"loss": float(number != 2), "seconds": 1.0}
        row["trained"][name] = {"loss": 1.0, "accuracy": 0.5 + 0.01 * number, "train_loss": 1.0, "seconds": 10.0}
    chosen = race.winner(row["race"])
    assert chosen == [*row["race"]][2]
    row["search_s"] = 5.0
    assert race.share_of(row) == pytest.approx(3 / 15)
    shown = race.summarize([row])
    assert f"| +2.00 (1) | {chosen}" in shown and "| 20%" in shown


def test_recorded_trainings_are_compared_seed_by_seed(tmp_path: Path) -> None:
    lines = []
    for seed, loss in ((0, 0.9), (1, 1.1)):
        for name, own in (("dmcp", loss), ("uniform", 1.0)):
            job = {"name": f"mobilenet-{seed}"}
            lines.append({"job": job, "trained": {"name": name, "loss": own, "accuracy": 0.5 - own / 10}})
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = [line.split(" | ") for line in race.recorded(path).splitlines()[2:]]
    assert [[cell.strip(" |") for cell in line[4:]] for line in shown] == [
        ["-0.100", "+1.00", "searched", "+1.00"],
        ["+0.100", "-1.00", "uniform", "+0.00"],
    ]
