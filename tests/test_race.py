"""experiments/race.py and moves.py: candidates cost the same, and the lowest held-out loss wins."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import dmcp
from dmcp import models

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))
import gates
import moves
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
            lines.append(
                {"job": job, "trained": {"name": name, "loss": own, "accuracy": 0.5 - own / 10, "train_loss": own}}
            )
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    *_, shown = race.recorded(path).splitlines()
    cells = [cell.strip() for cell in shown.strip("|").split("|")]
    error = "± 0.100 (2)"
    assert cells[3:] == [f"+0.000 {error}", f"+0.000 {error}", "+0.00 ± 1.00 (2)", "1 of 2", "+0.50 ± 0.50 (2)"]


def test_exchanges_widen_one_space_and_narrow_another_at_equal_cost(graph: dmcp.ChannelGraph) -> None:
    budget = dmcp.parse_budget("50%", graph)
    start = dmcp.uniform(graph, budget, align=1).tensor()
    trials, pairs = moves.exchanges(graph, budget, start, 1)
    assert len(trials) > len(start)
    for trial, (wide, thin) in zip(trials, pairs.tolist(), strict=True):
        assert trial[wide] > start[wide] and trial[thin] < start[thin]
        assert int((trial != start).sum()) == 2
        assert 0.95 <= graph.macs(graph.widths(trial.tolist())) / budget.limits[0].target <= 1


def test_a_planted_price_is_found_from_differences_and_followed(graph: dmcp.ChannelGraph) -> None:
    """Losses of two samples of a step share an offset; only the first space is worth something."""
    random = np.random.default_rng(0)
    full = graph.full.tensor()
    widths = torch.from_numpy(random.integers(1, full.numpy() + 1, (400, 2, len(full))))
    terms = moves.terms_of(graph, widths.flatten(end_dim=1)).reshape(400, 2, -1)
    truth = -0.5 * terms[..., 0] + 0.1 * terms[..., len(full)]
    losses = truth + random.normal(size=(400, 1)) + random.normal(scale=0.05, size=(400, 2))
    prices = moves.fit_differences(terms, losses)
    assert prices[0] == pytest.approx(-0.5, abs=0.05)
    assert np.abs(np.delete(prices, [0, len(full)])).max() < 0.06

    budget = dmcp.parse_budget("50%", graph)
    start = dmcp.uniform(graph, budget, align=1).tensor()
    exact = np.zeros_like(prices)
    exact[0] = -0.5

    def losses_of(rows: torch.Tensor) -> list[float]:
        return (moves.terms_of(graph, rows) @ exact).tolist()

    for climb in (moves.climb, moves.climb_free):
        end = climb(graph, budget, start, 1, losses_of)
        assert end[0] > start[0] and graph.macs(graph.widths(end.tolist())) <= budget.limits[0].target


def test_tiny_moves_are_judged_and_the_search_is_the_same(tmp_path: Path) -> None:
    settings = race.options(None).parse_args([*TINY.split(), str(tmp_path / "moves.jsonl")])
    race.measure_all(settings, lambda: moves.Moves(3, 32, 1))
    (row,) = race.rows_of(settings.out)
    names = {race.UNIFORM, race.SEARCHED, race.HALF_WAY, "moves", "surrogate", "random 0", "random 1", "random 2"}
    assert set(row["hard"]) == set(row["predicted"]) == set(row["trained"]) == names
    assert row["samples"] == 4
    assert row["hard"]["moves"] <= min(row["hard"][name] for name in (race.UNIFORM, race.SEARCHED, race.HALF_WAY))
    assert "surrogate" in moves.summarize([row]) and "random" not in moves.summarize([row]).split("Rank")[0]

    settings.out = tmp_path / "race.jsonl"
    race.measure_all(settings)
    assert race.rows_of(settings.out)[0]["widths"][race.SEARCHED] == row["widths"][race.SEARCHED]
    assert moves.search_steps.sample_gates.__name__ == "sample_gates"


def test_the_hard_loss_is_that_of_the_network_that_is_cut(graph: dmcp.ChannelGraph) -> None:
    settings = race.options(None).parse_args([*TINY.split(), "unused"])
    subject = race.Subject(settings, 0)
    net = dmcp.Supernet(subject.model, subject.graph, align=1)
    before = {name: tensor.clone() for name, tensor in net.model.state_dict().items()}
    widths = dmcp.random_widths(subject.graph, "50%", 0, align=1)
    (judged,) = moves.Moves(0, 64, 2).hard(subject, net)(widths.tensor()[None])
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.model.state_dict().items())

    small = dmcp.cut(net.model, subject.graph, widths).train()
    losses = []
    for number, (x, y) in enumerate(subject.batches(subject.rest, 64)):
        if number < 2:
            losses.append(torch.nn.functional.cross_entropy(small(x), y, label_smoothing=0.1).item())
    assert judged == pytest.approx(sum(losses) / 2, rel=1e-4)


def test_gates_up_to_expected_widths_are_hard_but_for_one_group(graph: dmcp.ChannelGraph) -> None:
    model = models.build("digits:resnet")
    net = dmcp.Supernet(model, graph, align=1).eval()
    config = dmcp.SearchConfig(budget="50%", align=1, epochs=2, warmup=0.5)
    searcher = dmcp.Searcher(net, config, steps_per_epoch=1)
    chains = searcher.chains
    marginals = chains.marginals(net.alpha)
    inside = gates.up_to_expected(marginals, chains.sizes)
    expected = (marginals * chains.sizes).sum(dim=1)
    assert torch.allclose((inside * chains.sizes).sum(dim=1), expected, atol=1e-4)
    assert bool((((inside > 0) & (inside < 1)).sum(dim=1) <= 1).all())
    assert bool((inside.diff(dim=1) <= 0).all())

    # Where all expected widths are whole groups, this is the network of these widths.
    with torch.no_grad():
        net.alpha.copy_(torch.where(torch.arange(net.alpha.shape[1]) < 4, 30.0, -30.0))
        widths = graph.widths(chains.sizes[:, :5].sum(dim=1).tolist())
        x = torch.randn(3, 1, 8, 8)
        with gates.hard_in_stage2():
            shown = net(x, chains.gates(chains.marginals(net.alpha)))
        assert torch.allclose(shown, net(x, net.hard(widths)), atol=1e-5)
        soft = chains.gates(chains.marginals(net.alpha))
        net.alpha.zero_()
    assert torch.allclose(net(x, soft), shown, atol=1e-5)

    # A step with them moves the alphas of every space.
    before = net.alpha.detach().clone()
    labels = torch.arange(8) % 10
    with gates.hard_in_stage2():
        for _ in range(2):
            searcher.step((torch.randn(8, 1, 8, 8), labels))
    assert bool((net.alpha != before).any(dim=1).all())
