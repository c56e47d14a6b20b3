"""A bug of other pruning code that no other test has: what is right here, and the wrong way, which would be noticed."""

from __future__ import annotations

import copy

import torch
from nets import Depthwise, randomise, sample
from torch.nn import functional as F

import dmcp
from dmcp.searching.search import search
from dmcp.settings import SearchConfig
from dmcp.training import Task


def test_the_alphas_learn_from_statistics_of_the_batch() -> None:
    """A peer moves its alphas in eval mode, on running statistics that mix all widths."""
    model, x = randomise(Depthwise(**Depthwise.FULL)), sample(Depthwise.SHAPE, batch=6)
    net = dmcp.Supernet(model, dmcp.trace(model, x)).double()
    net.eval()  # the search must not depend on the mode that it finds
    batch = (x, torch.arange(6) % 5)
    config = SearchConfig(budget="50%", epochs=1, warmup=0.0, train_weights=False, init="zero")
    losses = {}
    for training in (True, False):
        twin = copy.deepcopy(net).train(training)
        losses[training] = F.cross_entropy(twin(x, twin.soft()), batch[1]).item()
    task = Task(loss=lambda output, batch: F.cross_entropy(output, batch[1]))
    found = search(net, [batch], config, task=task).log[0].task_loss
    assert found is not None
    assert abs(found - losses[True]) < 1e-10 < 0.01 < abs(found - losses[False])
