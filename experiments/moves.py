"""Two ways to let widths follow what a supernet knows about networks that are cut, and what comes of them.

    python experiments/moves.py cifar:resnet20 cifar10 --budget 15% --budget 50% --seeds 3 --out moves.jsonl
    python experiments/moves.py cifar:resnet20 cifar10 --budget 15% --sampling uniform --out moves.jsonl
    python experiments/moves.py --table moves.jsonl

After a search, two more candidates join searched, uniform and half-way widths (experiments/race.py, which trains them):

- `moves`: from the candidate with the lowest hard loss, channels are exchanged between two spaces at equal cost, as
  long as that lowers the hard loss. It is the loss of the sub-network in the supernet on a few large batches of
  training images, by whose statistics its BatchNorms normalize.
- `surrogate`: the same exchanges, judged by a fit to the losses that stage 1 has anyway. Each step has two random
  sub-networks on one batch; the difference of their losses is fitted by the differences of the logarithms of widths and
  of their squares. It needs no pass through the network.

Training loss is the ruler, with a margin of 0.003. Random structures of the same cost are trained, too: over all
structures, the ranks of hard losses and of the fit are compared with those of training losses and test losses.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from itertools import islice
from statistics import fmean
from typing import Any

import numpy as np
import race
import room
import torch
from judge import spearman
from numpy.typing import NDArray
from torch import Tensor

import dmcp
from dmcp.budgets import Budget
from dmcp.searching import steps as search_steps
from dmcp.searching.budget import parse_budget, spent_shares
from dmcp.searching.rounding import TOLERANCE
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.widths import Widths
from dmcp.training.losses import classification_loss
from dmcp.units import table

Array = NDArray[np.float64]
Losses = Callable[[Tensor], list[float]]  # of many structures. (N, S)

USED = 0.75  # share of the steps of stage 1 whose losses are fitted, up to the last one
RIDGE = 1e-3
STEP = 16  # exchanges widen a space by this part of it
TRIALS = 6  # exchanges of a round that are judged by the supernet, those that promise most
ROUNDS = 4  # of exchanges that are judged by the supernet
FREE_ROUNDS = 100  # of exchanges that are judged by the fit
MARGIN = 0.001  # by which an exchange must lower the loss
RANDOM = "random"  # structures that only test the ranks


# the fit


def terms_of(graph: ChannelGraph, widths: Tensor) -> Array:
    """Logarithms of widths and their squares. (N, S) -> (N, 2 S)"""
    logs = (widths.double() / graph.full.tensor()).log().numpy()
    return np.hstack([logs, logs**2])


def fit_differences(terms: Array, losses: Array) -> Array:
    """Prices of terms by the differences between the two samples of each step. (T, 2, P), (T, 2) -> (P,)"""
    rows = terms[:, 0] - terms[:, 1]
    values = losses[:, 0] - losses[:, 1]
    scales = np.maximum(rows.std(axis=0), 1e-9)
    scaled = rows / scales
    penalty = RIDGE * len(rows) * np.eye(rows.shape[1])
    return np.linalg.solve(scaled.T @ scaled + penalty, scaled.T @ values) / scales


# exchanges at equal cost


def exchanges(graph: ChannelGraph, budget: Budget, widths: Tensor, align: int | None) -> tuple[Tensor, Tensor]:
    """All structures in which one space is widened and another one narrowed, and these pairs. (S,) -> (N, S), (N, 2)"""
    full = graph.full.tensor()
    units = torch.tensor([space.step(align) for space in graph.spaces])
    steps = ((full / STEP / units).round().long().clamp(min=1)) * units
    count = len(widths)
    pairs = torch.tensor([(wide, thin) for wide in range(count) for thin in range(count) if wide != thin])
    pairs = pairs[widths[pairs[:, 0]] < full[pairs[:, 0]]]
    trials = widths.repeat(len(pairs), 1)
    rows = torch.arange(len(pairs))
    trials[rows, pairs[:, 0]] = (trials[rows, pairs[:, 0]] + steps[pairs[:, 0]]).minimum(full[pairs[:, 0]])
    for _ in range(int((full / units).max())):
        over = spent_shares(budget, graph, trials.clamp(min=1)).amax(dim=1) > 1
        if not over.any():
            break
        trials[rows[over], pairs[over, 1]] -= units[pairs[over, 1]]
    fits = (trials >= units).all(dim=1)
    fits &= spent_shares(budget, graph, trials.clamp(min=1)).amax(dim=1).clamp(max=2) >= TOLERANCE
    fits &= (trials != widths).any(dim=1)
    return trials[fits], pairs[fits]


def climb_free(graph: ChannelGraph, budget: Budget, start: Tensor, align: int | None, losses: Losses) -> Tensor:
    """Take the best exchange as long as it lowers the loss, which costs nothing to know."""
    widths = start
    (best,) = losses(widths[None])
    for _ in range(FREE_ROUNDS):
        trials, _ = exchanges(graph, budget, widths, align)
        if not len(trials):
            break
        values = losses(trials)
        number = int(np.argmin(values))
        if values[number] > best - MARGIN:
            break
        widths, best = trials[number], values[number]
    return widths


def climb(graph: ChannelGraph, budget: Budget, start: Tensor, align: int | None, losses: Losses) -> Tensor:
    """The same, where each loss is a pass: every space alone is tried first, then the pairs that promise most."""
    widths = start
    (best,) = losses(widths[None])
    for _ in range(ROUNDS):
        trials, pairs = exchanges(graph, budget, widths, align)
        if not len(trials):
            break
        ends: dict[tuple[int, int], float] = {}  # (space, its width): how much the loss changes
        for trial, pair in zip(trials.tolist(), pairs.tolist(), strict=True):
            ends.update({(space, trial[space]): 0.0 for space in pair})
        alone = [widths.clone() for _ in ends]
        for row, (space, width) in zip(alone, ends, strict=True):
            row[space] = width
        for end, value in zip(ends, losses(torch.stack(alone)), strict=True):
            ends[end] = value - best
        promised = [
            sum(ends[space, int(trial[space])] for space in pair)
            for trial, pair in zip(trials, pairs.tolist(), strict=True)
        ]
        likely = trials[torch.tensor(promised).argsort()[:TRIALS]]
        values = losses(likely)
        number = int(np.argmin(values))
        if values[number] > best - MARGIN:
            break
        widths, best = likely[number], values[number]
    return widths


class Moves:
    """Records the sub-networks that stage 1 samples, and finds candidates by them and by hard losses."""

    def __init__(self, random_count: int, judge_batch: int, judge_batches: int) -> None:
        self.random_count = random_count
        self.judge_batch = judge_batch
        self.judge_batches = judge_batches
        self.gates: list[Tensor] = []
        self.found: dict[str, Any] = {}

    def __enter__(self) -> Moves:
        self.original = search_steps.sample_gates

        def recorded(*arguments: Any) -> list[Tensor]:
            gates = self.original(*arguments)
            self.gates.append(torch.stack(gates).detach().clone())
            return gates

        search_steps.sample_gates = recorded
        return self

    def __exit__(self, *error: object) -> None:
        search_steps.sample_gates = self.original

    def samples(self, net: dmcp.Supernet, found: dmcp.SearchResult) -> tuple[Tensor, Array]:
        """Widths and losses of the random sub-networks of all steps of stage 1. -> (T, 2, S), (T, 2)"""
        losses = np.array([record.weight_losses[2:] for record in found.log if record.weight_losses])
        gates = torch.stack(self.gates).double()  # (T, 2, channels)
        spaces = len(net.graph.spaces)
        widths = gates.new_zeros(*gates.shape[:2], spaces).index_add_(2, net.space_of, gates)
        return widths.round().long().cpu(), losses

    def candidates(self, subject: race.Subject, net: dmcp.Supernet, found: dmcp.SearchResult) -> dict[str, Widths]:
        """Widths after exchanges by hard losses and by the fit, and random ones."""
        graph = subject.graph
        budget = found.budget
        align = subject.settings.align
        even = dmcp.uniform(graph, budget, align=align)
        searched = dmcp.expected(found)
        middle = race.half_way(graph, budget, searched, even, align)
        starts = torch.stack([searched.tensor(), even.tensor(), middle.tensor()])

        # By the losses that stage 1 had anyway.
        widths, losses = self.samples(net, found)
        begin = int((1 - USED) * len(widths))
        terms = terms_of(graph, widths.flatten(end_dim=1)).reshape(*widths.shape[:2], -1)
        prices = fit_differences(terms[begin:], losses[begin:])

        def predicted(rows: Tensor) -> list[float]:
            return (terms_of(graph, rows) @ prices).tolist()

        surrogate = climb_free(graph, budget, starts[int(np.argmin(predicted(starts)))], align, predicted)

        # By hard losses.
        hard_losses = self.hard(subject, net)
        moved = climb(graph, budget, starts[int(np.argmin(hard_losses(starts)))], align, hard_losses)

        more = {"moves": graph.widths(moved.tolist()), "surrogate": graph.widths(surrogate.tolist())}
        rows = room.structures(graph, parse_budget(budget.text, graph), self.random_count, align)
        more |= {f"{RANDOM} {number}": graph.widths(row) for number, row in enumerate(rows)}
        every = {race.UNIFORM: even, race.SEARCHED: searched, race.HALF_WAY: middle, **more}
        table_of_all = torch.stack([row.tensor() for row in every.values()])
        self.found = {
            "samples": len(widths),
            "hard": dict(zip(every, hard_losses(table_of_all), strict=True)),
            "predicted": dict(zip(every, predicted(table_of_all), strict=True)),
        }
        return more

    def hard(self, subject: race.Subject, net: dmcp.Supernet) -> Losses:
        """A function from structures to the losses of these sub-networks on training images."""
        loader = subject.batches(subject.rest, self.judge_batch)
        batches = list(islice(loader, self.judge_batches))
        loss = classification_loss(0.1)  # as networks are trained
        on_gpu = subject.device.type == "cuda"

        def losses(rows: Tensor) -> list[float]:
            state = {name: tensor.clone() for name, tensor in net.model.state_dict().items()}
            net.train()  # BatchNorm by the batch
            found = []
            with torch.no_grad(), torch.autocast(subject.device.type, torch.bfloat16, enabled=on_gpu):
                for row in rows.tolist():
                    gates = net.hard(subject.graph.widths(row))
                    found.append(fmean(float(loss(net(x, gates), (x, y))) for x, y in batches))
            net.model.load_state_dict(state)
            return found

        return losses

    def report(self) -> dict[str, Any]:
        """What is recorded about the search."""
        return self.found


# tables


def summarize(rows: list[dict[str, Any]]) -> str:
    """Candidates against uniform widths, and how well hard losses and the fit rank trained structures."""
    shown = [row | {"widths": {name: own for name, own in row["widths"].items() if RANDOM not in name}} for row in rows]
    lines = [["network", "images", "budget", "search", "structures", "hard, training loss", "fit, training loss"]]
    lines[0] += ["race, training loss", "hard, test loss", "fit, test loss", "race, test loss"]
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(race.key_of(row), []).append(row)
    for every in groups.values():
        first = every[0]
        cells = [first["model"], f"{first['data']}, {first['side'] or 'own'} px", first["budget"]]
        cells += [race.kind_of(first), str(len(different(first["widths"])))]
        for measure in ("train_loss", "loss"):
            for judge in ("hard", "predicted", "race"):
                cells.append(race.pooled([rank(row, judge, measure) for row in every]))
        lines.append(cells)
    return f"{race.summarize(shown)}\nRank correlations over structures:\n\n{table(lines)}"


def different(widths: Mapping[str, list[int]]) -> list[str]:
    """Names of candidates, each structure only once."""
    return list({tuple(row): name for name, row in reversed(widths.items())}.values())


def rank(row: Mapping[str, Any], judge: str, measure: str) -> float:
    """Rank correlation of a judge's losses with those of trained networks."""
    names = different(row["widths"])
    judged = [row[judge][name]["loss"] if judge == "race" else row[judge][name] for name in names]
    return spearman(judged, [row["trained"][name][measure] for name in names])


def main() -> None:
    """What is asked for on the command line."""
    parser = race.options(__doc__)
    parser.add_argument("--random", type=int, default=12, help="random structures that test the ranks")
    parser.add_argument("--judge-batch", type=int, default=512)
    parser.add_argument("--judge-batches", type=int, default=4)
    settings: argparse.Namespace = parser.parse_args()
    if settings.table:
        print(summarize(race.rows_of(settings.table)))
        return
    if not settings.data or not settings.budget or not settings.out:
        parser.error("name a network, its data, --out and at least one --budget")
    race.measure_all(settings, lambda: Moves(settings.random, settings.judge_batch, settings.judge_batches))
    print(summarize(race.rows_of(settings.out)))


if __name__ == "__main__":
    main()
