"""An optimizer of one's own trains what SGD would train, by the same schedule; tests/test_keeping.py has its state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_pruning import SEARCH, TRAIN, Noise, prune, same, tensors, traced
from test_training import SHORT, some_batches, tiny
from torch import nn
from torch.nn import functional as F

import dmcp
from dmcp.errors import TrainingError
from dmcp.training import learning_rate, train


def test_it_is_a_plain_loop_with_the_schedule_of_the_settings() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for layer in tiny() if not isinstance(layer, nn.Dropout)))
    twin, batches = copy.deepcopy(model).train(), some_batches()
    train(model, batches, SHORT, optimizer=lambda groups: torch.optim.AdamW(groups, lr=9.0, betas=(0.8, 0.9)))
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

    ours = prune(optimizer=adam, retrain=kind)
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
    dmcp.search(net, Noise(), SEARCH, optimizer=noted)
    assert sorted(seen) == sorted(id(it) for it in net.weights()) and id(net.alpha) not in seen
    assert not torch.equal(before, net.alpha)


WRONG: list[tuple[Any, str]] = [
    (torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1), "torch.optim.AdamW; this is a SGD"),
    (lambda groups: None, "this gives a NoneType"),
    (lambda groups: torch.optim.Adam(groups[:1]), "Adam has other parameters than it was given"),
    (lambda groups: torch.optim.LBFGS(groups[0]["params"] + groups[1]["params"]), "LBFGS needs a closure"),
]


@pytest.mark.parametrize(("make", "words"), WRONG, ids=[words.split()[-1] for _, words in WRONG])
def test_what_cannot_train_is_refused_before_the_search(make: Any, words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        prune(optimizer=make, on_event=lambda event: pytest.fail("too late"))


def test_it_is_no_cuda_graph() -> None:
    """Which would replay the learning rate of the step that was captured."""
    engine = dmcp.Engine(graphs=True)
    with pytest.raises(TrainingError, match="cannot be CUDA graphs"):
        prune(optimizer=torch.optim.Adam, engine=engine)
    with pytest.raises(TrainingError, match="cannot be CUDA graphs"):
        train(tiny(), some_batches(), TRAIN, optimizer=torch.optim.Adam, engine=engine)
