"""Whole epochs on data: real training and a real search, a few epochs each."""

from __future__ import annotations

import copy
import itertools
import statistics
from typing import Any

from torch import nn

from dmcp.batches import Loader, device_of
from dmcp.bench.results import Epochs
from dmcp.bench.steps import halfway
from dmcp.bench.stopwatch import clean, device_name, now
from dmcp.engine import Engine
from dmcp.errors import DmcpError
from dmcp.searching.search import search
from dmcp.searching.searches import SearchConfig
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph
from dmcp.training import TrainConfig, train


def measure_epochs(
    name: str,
    model: nn.Module,
    graph: ChannelGraph,
    loader: Loader,
    batch: int,
    engine: Engine,
    groups: int = 10,
    epochs: int = 3,
    data: str = "",
    model_args: tuple[str, ...] = (),
) -> Epochs:
    """Real training and a real search of a few epochs each: the medians, less the first epoch of every part.

    In that one kernels are tuned and graphs captured. Copies are trained; the model stays as it is.
    """
    if epochs < 2:
        raise DmcpError(f"Epochs are measured after the first one: give at least 2, not {epochs}.")
    ends = _epoch_ends(model, graph, loader, engine, groups, epochs)
    times = [after - before for before, after in itertools.pairwise(ends)]
    trained, warm, moved = (times[part * epochs : (part + 1) * epochs - 1] for part in range(3))
    return Epochs(
        model=name,
        model_args=model_args,
        data=data,
        batch=batch,
        steps=len(loader),
        device=device_name(device_of(model)),
        train_s=statistics.median(trained),
        warmup_s=statistics.median(warm),
        search_s=statistics.median(moved),
    )


def _epoch_ends(
    model: nn.Module, graph: ChannelGraph, loader: Loader, engine: Engine, groups: int, epochs: int
) -> list[float]:
    """The moments when epochs were over: of training, of the search's warm-up, and of the rest of it."""
    steps, device = len(loader), device_of(model)
    ends: list[float] = []

    def look(record: Any) -> None:
        """Records of an epoch come when it is over and the device is done."""
        if (record.step + 1) % steps == 0:
            ends.append(now())

    rates = TrainConfig(epochs=epochs, lr=0.1, warmup_epochs=0, warmup_lr=0.0)
    clean(device)
    train(copy.deepcopy(model), loader, rates, on_step=look, engine=engine)
    net = Supernet(model, graph, groups)
    config = SearchConfig(
        budget=halfway(net.graph, net.floor),
        groups=groups,
        epochs=2 * epochs,
        lr=0.05,
        min_lr=0.0,
        log_every=steps,
        warmup=0.5,
    )
    clean(device)
    search(net, loader, config, on_record=look, engine=engine)
    return ends
