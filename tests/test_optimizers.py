"""An optimizer of one's own trains what SGD would train, by the same schedule; test_checkpoint.py has its state."""

from __future__ import annotations

import contextlib
import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from test_pruning import SEARCH, TRAIN, Noise, prune, same, tensors, traced
from test_training import SHORT, some_batches, tiny
from torch import nn
from torch.nn import functional as F

import dmcp
from dmcp.errors import TrainingError
from dmcp.runtime.engine import rate_shares
from dmcp.training import learning_rate, train


def test_it_is_a_plain_loop_with_the_schedule_of_the_settings() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for layer in tiny() if not isinstance(layer, nn.Dropout)))
    twin, batches = copy.deepcopy(model).train(), some_batches()
    train(
        model,
        batches,
        SHORT,
        task=dmcp.Task(optimizer=lambda groups: torch.optim.AdamW(groups, lr=9.0, betas=(0.8, 0.9))),
    )
    weights = [twin[0].weight, twin[-1].weight]
    others = [it for it in twin.parameters() if not any(it is weight for weight in weights)]
    groups = [{"params": weights, "weight_decay": SHORT.weight_decay}, {"params": others, "weight_decay": 0.0}]
    by_hand = torch.optim.AdamW(groups, betas=(0.8, 0.9))
    for step, (x, y) in enumerate(batches):
        for group in by_hand.param_groups:
            group["lr"] = learning_rate(step, len(batches), len(x), SHORT)
        F.cross_entropy(twin(x), y, label_smoothing=SHORT.label_smoothing).backward()
        by_hand.step()
        by_hand.zero_grad()
    assert same(tensors(model), tensors(twin))


@pytest.mark.parametrize("kind", dmcp.Retrain)
def test_prune_has_it_in_search_and_training(kind: dmcp.Retrain) -> None:
    made: list[torch.optim.Optimizer] = []

    def adam(groups: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.Adam(groups))
        return made[-1]

    ours = prune(retrain=kind, task=dmcp.Task(optimizer=adam))
    trial, *used = made
    trainings = 2 if kind is dmcp.Retrain.TEACHER else 1
    assert len(used) == 1 + trainings and not trial.state and all(it.state for it in used)
    assert not same(tensors(ours.model), tensors(prune(retrain=kind).model))
    assert not any("momentum_buffer" in state for it in used for state in it.state.values())


def test_the_alphas_keep_theirs() -> None:
    model, graph = traced()
    net = dmcp.Supernet(model, graph, SEARCH.groups)
    seen: list[int] = []

    def noted(groups: Any) -> torch.optim.Optimizer:
        seen.extend(id(parameter) for group in groups for parameter in group["params"])
        return torch.optim.Adam(groups)

    before = net.alpha.detach().clone()
    dmcp.search(net, Noise(), SEARCH, task=dmcp.Task(optimizer=noted))
    assert sorted(seen) == sorted(id(it) for it in net.weights()) and id(net.alpha) not in seen
    assert not torch.equal(before, net.alpha)


def head_first(model: nn.Module, groups: Any, **settings: Any) -> torch.optim.Optimizer:
    """The last layer ten times as fast as the rest, named before it."""
    head = {id(it) for it in list(model.children())[-1].parameters()}
    parts = [[it for group in groups for it in group["params"] if (id(it) in head) is last] for last in (True, False)]
    return torch.optim.SGD([{"params": parts[0], "lr": 0.5}, {"params": parts[1]}], lr=0.05, **settings)


@pytest.mark.parametrize("as_tensor", [False, True], ids=["number", "tensor"])
def test_groups_keep_their_ratios(as_tensor: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for layer in tiny() if not isinstance(layer, nn.Dropout)))
    twin, batches = copy.deepcopy(model).train(), some_batches()

    def make(groups: Any) -> torch.optim.Optimizer:
        made = head_first(model, groups)
        for group in made.param_groups:
            group["lr"] = torch.tensor(group["lr"], dtype=torch.float64) if as_tensor else group["lr"]
        return made

    train(model, batches, SHORT, task=dmcp.Task(optimizer=make))
    for step, (x, y) in enumerate(batches):
        loss = F.cross_entropy(twin(x), y, label_smoothing=SHORT.label_smoothing)
        rate = learning_rate(step, len(batches), len(x), SHORT)
        slopes = torch.autograd.grad(loss, list(twin.parameters()))
        for parameter, slope in zip(twin.parameters(), slopes, strict=True):
            last = any(parameter is it for it in twin[-1].parameters())
            parameter.data -= (10 * rate if last else rate) * slope
    for ours, by_hand in zip(tensors(model), tensors(twin), strict=True):
        torch.testing.assert_close(ours, by_hand)


def test_groups_keep_their_ratios_in_a_search_that_goes_on(tmp_path: Path) -> None:
    def job(*, stop: int = 10**9, **kept: Any) -> tuple[list[torch.Tensor], list[torch.optim.Optimizer]]:
        model, graph = traced()
        net, made = dmcp.Supernet(model, graph, SEARCH.groups), []

        def make(groups: Any) -> torch.optim.Optimizer:
            made.append(head_first(net.model, groups, momentum=0.9))
            return made[-1]

        calls = itertools.count(1)
        checkpointer = dmcp.Checkpointer(tmp_path / "kept", every_steps=1, stop_requested=lambda: next(calls) > stop)
        with contextlib.suppress(dmcp.StoppedError):
            dmcp.search(net, Noise(), SEARCH, **kept and {"checkpointer": checkpointer}, task=dmcp.Task(optimizer=make))
        return [it.detach() for it in net.parameters()], made

    whole, (mover,) = job()
    head, rest = (group["lr"] for group in mover.param_groups)
    assert head == 10 * rest and rest < SEARCH.lr
    stopped, _ = job(stop=1, kept=True)
    again, (mover,) = job(kept=True)
    assert not same(stopped, whole) and same(again, whole)
    assert [group["lr"] for group in mover.param_groups] == [head, rest]


SHARES: list[tuple[list[dict[str, float]], dict[str, float], list[float]]] = [
    ([{}, {}], {"lr": 9.0}, [1, 1]),
    ([{}, {}], {"lr": 0.0}, [1, 1]),
    ([{"lr": 0.5}, {}], {"lr": 0.25}, [2, 1]),  # the rate of groups that have none of their own is the schedule's
    ([{"lr": 0.0}, {}], {"lr": 0.25}, [0, 1]),
    ([{"lr": 0.25}, {"lr": 0.5}], {}, [0.5, 1]),  # none has that one: the highest
    ([{"lr": 0.25}, {}], {"lr": 0.0}, [1, 0]),
]


@pytest.mark.parametrize(("groups", "usual", "shares"), SHARES)
def test_what_the_rates_of_groups_are_relative_to(groups: Any, usual: Any, shares: list[float]) -> None:
    parts = [{"params": [nn.Parameter(torch.zeros(1))], **group} for group in groups]
    assert rate_shares(torch.optim.SGD(parts, **usual)) == shares


def test_a_rate_that_is_no_number_is_the_schedules() -> None:
    """Some optimizers make their own, and mark it so."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.param_groups[0]["lr"] = None
    assert rate_shares(optimizer) == [1]


WRONG: list[tuple[Any, str]] = [
    (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), "torch.optim.AdamW; this is a SGD"),
    (lambda groups: None, "this gives a NoneType"),
    (lambda groups: torch.optim.Adam(groups[:1]), "Adam has other parameters than it was given"),
    (lambda groups: torch.optim.LBFGS(groups[0]["params"] + groups[1]["params"]), "LBFGS needs a closure"),
]


@pytest.mark.parametrize(("make", "words"), WRONG, ids=[words.split()[-1] for _, words in WRONG])
def test_what_cannot_train_is_refused_before_the_search(make: Any, words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        prune(task=dmcp.Task(optimizer=make), runtime=dmcp.Runtime(on_event=lambda event: pytest.fail("too late")))


def test_it_is_no_cuda_graph() -> None:
    """Which would replay the learning rate of the step that was captured."""
    engine = dmcp.Engine(graphs=True)
    with pytest.raises(TrainingError, match="cannot be CUDA graphs"):
        prune(task=dmcp.Task(optimizer=torch.optim.Adam), runtime=dmcp.Runtime(engine=engine))
    with pytest.raises(TrainingError, match="cannot be CUDA graphs"):
        train(
            tiny(),
            some_batches(),
            TRAIN,
            task=dmcp.Task(optimizer=torch.optim.Adam),
            runtime=dmcp.Runtime(engine=engine),
        )
