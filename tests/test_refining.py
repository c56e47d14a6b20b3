"""Refining: finds what is needed, stays among the allowed widths, changes no weights, and trusts other images only."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import NETS, Depthwise, Residual, randomise, sample
from planted import Batches, planted_problem
from torch import Tensor, nn

import dmcp
from dmcp import refining
from dmcp.budget import parse, spent_shares
from dmcp.errors import BudgetError, StoppedError, TrainingError
from dmcp.events import Event
from dmcp.jobs import Job
from dmcp.markov import bounded
from dmcp.methods.autoslim import AutoSlimConfig, prepare
from dmcp.methods.problem import loaded
from dmcp.plans import Plan, plan_from_json
from dmcp.recording import tensors_in
from dmcp.refining import RefineConfig, Refined, RefineRecord, refine
from dmcp.runs import report
from dmcp.sampling import FILLED, expected, options_of, uniform
from dmcp.searches import SearchResult
from dmcp.trackers import scalars

FEW = RefineConfig(tries=12, images=8)


def searched(net: dmcp.Supernet, budget: str, **more: Any) -> SearchResult:
    """A search that knows nothing but the budget."""
    return SearchResult(net.alpha.detach() + 1, net.sizes, net.graph, parse(budget, net.graph), 0.95, **more)


def batches_of(net: Any, count: int = 4, size: int = 4) -> Batches:
    return Batches([(sample(net.SHAPE, size, seed), torch.arange(size) % 2) for seed in range(count)])


def supernet(net: Any = Residual, groups: int = 10, align: int = 1, **wider: int) -> dmcp.Supernet:
    model = randomise(net(**(net.FULL | wider)))
    return dmcp.Supernet(model, dmcp.trace(model, sample(net.SHAPE)), groups, align)


def share(found: SearchResult, widths: dmcp.Widths) -> float:
    return spent_shares(found.budget, found.graph, widths.tensor()[None]).max().item()


@pytest.mark.parametrize("seed", [0, 1])
def test_the_needed_channels_come_back(seed: int) -> None:
    problem = planted_problem("57%", seed)
    weights = prepare(problem, AutoSlimConfig(epochs=8)).state
    net = dmcp.Supernet(loaded(problem, weights), problem.graph)
    start = problem.graph.widths({"needed": 4, "useless": 5})
    found = refine(net, searched(net, "57%"), problem.loader, RefineConfig(tries=30, images=256), widths=start)
    assert found.widths["needed"] >= 7 and found.widths["useless"] <= 2
    assert 0 < found.taken <= found.tries and found.loss_after < 0.8 * found.loss_before


@pytest.mark.parametrize("spec", ["50%", "params:40%", "60%,params:50%"])
@pytest.mark.parametrize("align", [1, 4])
def test_widths_are_allowed_ones(spec: str, align: int) -> None:
    net = supernet(Depthwise, 10, align, s=24, e=96, f=88, t=48)
    found = searched(net, spec, align=align)
    tried: list[RefineRecord] = []
    one = refine(net, found, batches_of(Depthwise), FEW, on_try=tried.append)
    options, start = options_of(found), dmcp.expected(found)
    for space, width, row in zip(net.graph.spaces, one.widths.values(), options.table.tolist(), strict=True):
        assert width in row and width >= net.floor[space.name]
    assert min(FILLED, share(found, start)) <= share(found, one.widths) <= 1
    assert [record.step for record in tried] == list(range(len(tried))) and len(tried) == one.tries


def test_bounds_of_the_search_hold() -> None:
    net = supernet(Depthwise, s=24, e=96, f=88, t=48)
    lower, upper = net.graph.full.tensor() // 3, net.graph.full.tensor() * 2 // 3
    found = replace(searched(net, "40%"), sizes=bounded(net.sizes, lower, upper))
    for seed in range(3):
        widths = refine(net, found, batches_of(Depthwise), FEW, seed=seed).widths.tensor()
        assert bool((widths >= lower).all() and (widths <= upper).all())


@pytest.mark.parametrize("kind", NETS, ids=lambda kind: kind.__name__)
def test_the_supernet_stays_as_it_is(kind: Any) -> None:
    net = supernet(kind).train()
    before, random = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    found, modes = searched(net, "80%"), [part.training for part in net.modules()]
    one, other = (refine(net, found, batches_of(kind), FEW, loss=squares) for _ in range(2))
    assert one == other  # the same seed
    assert all(torch.equal(tensor, before[key]) for key, tensor in net.state_dict().items())
    assert [part.training for part in net.modules()] == modes and torch.equal(random, torch.get_rng_state())


def test_another_seed_tries_others() -> None:
    net = supernet(Depthwise, s=24, e=96, f=88, t=48)
    told: list[list[RefineRecord]] = [[], []]
    for seed, records in enumerate(told):
        refine(net, searched(net, "50%"), batches_of(Depthwise), FEW, on_try=records.append, seed=seed)
    assert told[0] != told[1]


def test_it_can_begin_with_uniform_widths_and_try_nothing() -> None:
    net = supernet(Depthwise, s=24, e=96, f=88, t=48)
    found, batches = searched(net, "50%"), batches_of(Depthwise)
    none = replace(FEW, tries=0)
    assert refine(net, found, batches, none).widths == expected(found)
    same = refine(net, found, batches, replace(none, from_uniform=True))
    assert same.widths == uniform(net.graph, "50%") != expected(found)
    assert (same.tries, same.taken) == (0, 0) and same.loss_before == same.loss_after


# -- which images decide


class Ideal:
    """A judge who wants one space wide on the images that lead, and sees that on the others as told."""

    def __init__(self, space: int, leading: int, sign: float) -> None:
        self.space, self.leading, self.sign, self.ran = space, leading, sign, list[int]()

    def __call__(self, widths: Tensor, batches: Any) -> Tensor:
        self.ran.append(len(batches))
        wide = widths[:, self.space].double()
        return 100 - wide * (1 if batches[0][1][0] < self.leading else self.sign)


@pytest.mark.parametrize("sign", [1.0, -1.0, 0.0])
def test_other_images_decide_in_the_end(sign: float, monkeypatch: pytest.MonkeyPatch) -> None:
    net = supernet(Depthwise, s=24, e=96, f=88, t=48)
    loader = Batches([(sample(Depthwise.SHAPE, 2), torch.tensor([number, 0])) for number in range(8)])
    judge = Ideal(1, 4, sign)
    monkeypatch.setattr(refining, "make_judge", lambda *_: judge)
    found = searched(net, "50%")
    start = dmcp.expected(found)
    refined = refine(net, found, loader, replace(FEW, tries=20))
    names = [space.name for space in net.graph.spaces]
    if sign == 1:
        assert refined.widths[names[1]] > start[names[1]] and refined.taken and refined.loss_after < refined.loss_before
    else:
        assert refined.widths == start and not refined.taken and refined.loss_after == refined.loss_before


def test_what_is_worse_on_the_first_images_is_not_run_on_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    net = supernet(Depthwise, s=24, e=96, f=88, t=48)
    loader = batches_of(Depthwise, 8, 2)
    judge = Ideal(1, 0, 0.0)  # no try is ever better
    monkeypatch.setattr(refining, "make_judge", lambda *_: judge)
    refined = refine(net, searched(net, "50%"), loader, FEW)
    assert len(judge.ran) == 4 + FEW.tries + 1  # the first widths on all parts, each try on one of them, the others
    assert refined.sample_passes == 2 * (4 + FEW.tries + 2 * 4)


def test_few_images_are_shared_and_one_batch_is_enough() -> None:
    net = supernet()
    found = searched(net, "60%")
    assert isinstance(refine(net, found, batches_of(Residual, 1, 8), FEW, loss=squares), Refined)
    full = refine(net, searched(net, "100%"), batches_of(Residual), FEW, loss=squares, widths=net.graph.full)
    assert full.tries == 0 and full.widths == net.graph.full  # there is nothing to exchange


# -- what is refused, kept and told


def test_what_cannot_be_is_refused() -> None:
    for wrong in ({"tries": -1}, {"images": 1}, {"step": 1.5}, {"last_step": 0.0}, {"step": 0.1, "last_step": 0.2}):
        with pytest.raises(TrainingError, match="must be"):
            RefineConfig(**wrong)  # type: ignore[arg-type]
    net = supernet()
    with pytest.raises(BudgetError, match="give some that hold it"):
        refine(net, searched(net, "60%"), batches_of(Residual), FEW, widths=net.graph.full)
    with pytest.raises(TrainingError, match="not finite"):
        refine(net, searched(net, "60%"), batches_of(Residual), FEW, loss=lambda output, _: output.sum() * torch.nan)


def test_what_was_found_is_kept(tmp_path: Path) -> None:
    net = supernet(Depthwise, s=24, e=96, f=88, t=48)
    found, batches, asked = searched(net, "50%"), batches_of(Depthwise), [True]
    stopped = dmcp.Keeper(tmp_path, asked_to_stop=lambda: asked[0])
    with pytest.raises(StoppedError, match="done again"):
        refine(net, found, batches, FEW, keeper=stopped)
    asked[0] = False
    refined = refine(net, found, batches, FEW, keeper=stopped)
    again = refine(net, found, Batches([]), FEW, keeper=dmcp.Keeper(tmp_path))  # nothing is judged again
    assert again == refined == refine(net, found, batches, FEW)


def test_prune_refines_between_search_and_cut(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first = [nn.Conv2d(1, 40, 3, padding=1), nn.BatchNorm2d(40), nn.ReLU(), nn.Conv2d(40, 50, 3), nn.BatchNorm2d(50)]
    model = nn.Sequential(*first, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(50, 2))
    loader = Batches([(torch.randn(16, 1, 6, 6), torch.arange(16) % 2) for _ in range(4)])
    search = dmcp.SearchConfig(budget="50%", epochs=2, reference_batch=16, lr=0.05, min_lr=0.01)
    train = dmcp.TrainConfig(epochs=1, lr=0.01, warmup_lr=0.01)
    events: list[Event] = []
    result = dmcp.prune(model, loader, loader, search=search, train=train, refine=FEW, on_event=events.append)
    assert result.refined and result.refined.widths == result.widths
    assert result.refined.loss_after <= result.refined.loss_before
    told = [event for event in events if event.stage == "refine"]
    assert 0 < len(told) == result.refined.tries and {event.steps for event in told} == {FEW.tries}
    assert scalars(told[-1]) == {"refine/loss": told[-1].record.loss}  # type: ignore[union-attr]
    assert f"- refined: {result.refined.summary}" in report(result, [])
    plain = dmcp.prune(model, loader, loader, search=search, train=train)
    assert plain.refined is None and "refined" not in report(plain, [])
    assert torch.equal(plain.search.alphas, result.search.alphas)


def test_plans_without_it_are_as_they_were() -> None:
    plan = Plan(command="prune", job=Job(model="digits:resnet", data="digits"), engine=dmcp.Engine())
    stored = json.loads(json.dumps(plan.to_json()))
    assert "refine" not in stored and plan_from_json(stored, "here") == plan
    asked = replace(plan, refine=FEW)
    assert plan_from_json(json.loads(json.dumps(asked.to_json())), "here") == asked


def squares(output: Any, batch: Any) -> Tensor:
    """A loss for whatever a network gives."""
    return sum((tensor.float() ** 2).mean() for tensor in tensors_in(output))
