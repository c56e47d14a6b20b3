"""Refining: a local search over the widths that a search has found, with the weights that it has left.

Ours, not the paper's. The weights of a search work at many widths, so that a structure can be judged in them without
any training: its gates are set, BatchNorms take the statistics of the batch, and its loss is that of some training
images. From the widths that the alphas expect, one neighbour after the other is tried: one or two spaces grow and
others shrink until the budget holds. The first that is better is taken; steps become smaller. A neighbour that is worse
on the first images is not run on the rest. In the end other images decide between the first widths and the last.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from dmcp.batches import Loader, batches_from, device_of, generator, length_of, size_of
from dmcp.budget import Budget, spent_shares
from dmcp.engine import Engine, Settled
from dmcp.errors import BudgetError, FileError, StoppedError, TrainingError
from dmcp.graph import ChannelGraph
from dmcp.judging import Judge, batch_statistics, judging_batches, make_judge
from dmcp.keeping import DONE, Keeper, State, untouched
from dmcp.losses import Loss, classification_loss
from dmcp.ranks import current, fewest, sum_values
from dmcp.sampling import FILLED, Options, expected, options_of, uniform
from dmcp.searches import SearchResult
from dmcp.spaces import Widths
from dmcp.supernet import Supernet

_PARTS = 8  # of the images: a try that is worse after some of them ends there
_DRAWS = 100  # neighbours drawn for one that is allowed and was not tried
_SEED = 13  # what the random numbers are for
_RESULT = "refined"  # what a checkpoint calls the result


@dataclass(frozen=True, kw_only=True)
class RefineConfig:
    """Settings of the local search."""

    tries: int = 300  # structures that are tried; 0 leaves the widths as they are
    images: int = 4096  # training images that judge them, always the same; as many others confirm; on the device
    step: float = 0.4  # share of a space's channels by which it grows or shrinks at most in the first tries
    last_step: float = 0.04  # the same in the last ones; one channel is always allowed
    from_uniform: bool = False  # whether it begins with uniform widths, not with the expected ones: a control

    def __post_init__(self) -> None:
        for name, least in (("tries", 0), ("images", 2)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise TrainingError(f"{name} must be an int of at least {least}, not {value!r}.")
        if not 0 < self.last_step <= self.step <= 1:  # also refuses NaN
            raise TrainingError(
                f"step must be at least last_step, and both above 0 and at most 1, not {self.step!r} and "
                f"{self.last_step!r}."
            )


@dataclass(frozen=True)
class RefineRecord:
    """What one try saw."""

    step: int  # the number of the try
    taken: bool  # whether its widths are those to go on from
    loss: float  # of the best widths so far, on the images that judge


@dataclass(frozen=True, kw_only=True)
class Refined:
    """What the local search has found; the losses are those of other images than it was led by."""

    widths: Widths  # those that it began with, if nothing better was found
    loss_before: float
    loss_after: float
    tries: int
    taken: int  # tries that were better than all before
    sample_passes: int  # samples run through a network, over all ranks

    @property
    def summary(self) -> str:
        """In words."""
        return (
            f"{self.taken} of {self.tries} tries taken, loss in the searched weights {self.loss_before:.4f} before, "
            f"{self.loss_after:.4f} after"
        )


@torch.no_grad()
def refine(
    net: Supernet,
    found: SearchResult,
    loader: Loader,
    config: RefineConfig | None = None,
    loss: Loss | None = None,
    engine: Engine | None = None,
    on_try: Callable[[RefineRecord], None] | None = None,
    keeper: Keeper | None = None,
    seed: int = 0,
    widths: Widths | None = None,
) -> Refined:
    """Look for widths with a lower loss near those that a search expects, in its supernet, which stays as it is.

    Widths are those that the search allows, inside its budget, of which they use as much as FILLED says, or as the
    first ones do. All ranks find the same.
    keeper: keeps the result; what was stopped in between is done again.
    seed: of the tries. widths: to begin with, if not the expected ones.
    """
    if keeper and (kept := keeper.load(current())) is not None:
        return _restored(kept.facts, net.graph)
    config, graph = config or RefineConfig(), net.graph
    start = (widths or _first(found, config)).tensor()
    moves = _Moves.of(found, start, config, seed)

    def tell(record: RefineRecord) -> None:
        _check_stop(keeper)
        if on_try:
            on_try(record)

    settled = (engine or Engine()).settled(device_of(net), plain=loss is None)
    with batch_statistics(net), settled.running(net.model):
        judged, others = _images(loader, config.images, settled)
        judge = make_judge(net, loss or classification_loss(), settled)
        best, tries, taken, passes = _climb(judge, judged, moves, start, config.tries, tell)
        before, after = judge(torch.stack([start, best]), others).tolist()
    better = after < before
    refined = Refined(
        widths=graph.widths(best if better else start),
        loss_before=before,
        loss_after=after if better else before,
        tries=tries,
        taken=taken if better else 0,
        sample_passes=(passes + 2 * sum(map(size_of, others))) * current().world,
    )
    if keeper:
        _keep(refined, keeper, settled.device)
    return refined


def _first(found: SearchResult, config: RefineConfig) -> Widths:
    if not config.from_uniform:
        return expected(found)
    return uniform(found.graph, found.budget, align=found.align, tolerance=max(FILLED, found.tolerance))


def _keep(refined: Refined, keeper: Keeper, device: torch.device) -> None:
    """Write the result, which is then not looked for again."""
    facts = asdict(refined) | {"widths": dict(refined.widths)}
    keeper.save(1, State({}, dict, [], [], [], device), {DONE: True, _RESULT: facts}, current())


def _restored(facts: Mapping[str, Any], graph: ChannelGraph) -> Refined:
    """What was kept; FileError where it is not such a result."""
    try:
        result = facts[_RESULT]
        return Refined(**{**result, "widths": graph.widths(result["widths"])})
    except (KeyError, TypeError) as error:
        raise FileError(f"This checkpoint has no refined widths ({error!r}): start the run anew.") from None


def _check_stop(keeper: Keeper | None) -> None:
    """StoppedError if one of the ranks was asked to stop."""
    asked = torch.tensor([int(keeper.asked_to_stop())]) if keeper else torch.zeros(1)
    if keeper and sum_values(asked, current()).item():
        raise StoppedError("Stopped as asked: the refining is done again.")


def _images(loader: Loader, images: int, settled: Settled) -> tuple[list[Any], list[Any]]:
    """Batches with about so many images of all ranks, and as many others; of few images each gets half."""
    per_pass, ranks = fewest(length_of(loader), current()), current()
    with untouched(loader, settled.device):
        passes = itertools.chain.from_iterable(_passes(loader, per_pass))
        first = next(passes)
        count = math.ceil(images / ranks.world / max(1, size_of(first)))
        count = fewest(max(1, min(count, per_pass // 2)), ranks)
        found = itertools.chain([first], passes)
        return judging_batches(found, count, settled), judging_batches(found, count, settled)


def _passes(loader: Loader, batches: int) -> Iterator[Iterator[Any]]:
    """The batches of one epoch after the other."""
    return (itertools.islice(batches_from(loader, epoch), batches) for epoch in itertools.count())


# the climb


def _climb(
    judge: Judge,
    batches: Sequence[Any],
    moves: _Moves,
    start: Tensor,
    tries: int,
    tell: Callable[[RefineRecord], None],
) -> tuple[Tensor, int, int, int]:
    """The best widths of all tries, how many there were and how many were taken, and the samples run. -> (S,)"""
    count = min(_PARTS, fewest(len(batches), current()))
    parts = [batches[number::count] for number in range(count)]
    sizes = [sum(map(size_of, part)) for part in parts]
    best, losses = start, [judge(start[None], part).item() for part in parts]
    taken, passes, seen, number = 0, sum(sizes), {tuple(start.tolist())}, 0
    if not all(map(math.isfinite, losses)):
        raise TrainingError(f"The loss of the widths to refine is not finite: {losses}; search with a smaller lr.")
    for number in range(1, tries + 1):
        trial = moves.draw(best, (number - 1) / tries, seen)
        if trial is None:  # all neighbours were tried
            number -= 1
            break
        found: list[float] = []
        for part, size in zip(parts, sizes, strict=True):
            found.append(judge(trial[None], part).item())
            passes += size
            if not sum(found) < sum(losses[: len(found)]):  # also refuses NaN
                break
        else:
            best, losses, taken = trial, found, taken + 1
        tell(RefineRecord(number - 1, best is trial, sum(losses) / count))
    return best, number, taken, passes


@dataclass(frozen=True, eq=False)
class _Moves:
    """Draws neighbours of a structure that hold and fill the budget."""

    graph: ChannelGraph
    budget: Budget
    options: Options
    filled: float  # share of the budget that is used at least
    config: RefineConfig
    random: torch.Generator

    @staticmethod
    def of(found: SearchResult, start: Tensor, config: RefineConfig, seed: int) -> _Moves:
        """BudgetError if the first widths are outside the budget."""
        graph, budget = found.graph, found.budget
        share = spent_shares(budget, graph, start[None]).max().item()
        if share > 1:
            raise BudgetError(
                f"The widths to refine cost {share:.1%} of the budget {budget.text!r}: give some that hold it."
            )
        return _Moves(graph, budget, options_of(found), min(FILLED, share), config, generator(seed, _SEED))

    def draw(self, widths: Tensor, share: float, seen: set[tuple[int, ...]]) -> Tensor | None:
        """A neighbour that was not seen yet, at some share of all tries; None if none is found. (S,) -> (S,)"""
        size = self.config.step * (self.config.last_step / self.config.step) ** share
        for _ in range(_DRAWS):
            found = self._neighbour(widths, size)
            key = tuple(found.tolist())
            if key not in seen and self.filled <= self._spent(found[None]).item() <= 1:
                seen.add(key)
                return found
        return None

    def _neighbour(self, widths: Tensor, size: float) -> Tensor:
        """One or two spaces wider, others in random order narrower until the budget holds, and filled. (S,) -> (S,)"""
        last, places = self.options.last, self.options.nearest(widths)
        most = (size * last).round().long().clamp(min=1)  # options that a space moves at most. (S,)
        order = torch.randperm(len(widths), generator=self.random).tolist()
        grown = 1 + int(torch.randint(3, (), generator=self.random) == 0 and len(order) > 2)
        chances = torch.rand(len(widths), generator=self.random)
        wider = (places + 1 + (chances * most).long()).minimum(last)
        places[order[:grown]] = wider[order[:grown]]
        for space in order[grown:]:
            if self._share(places) <= 1:
                break
            places = self._moved(places, space, -torch.arange(int(most[space]) + 1))
        for space in order:
            if self._share(places) >= self.filled:
                break
            places = self._moved(places, space, torch.arange(int(most[space]), -1, -1))
        return self.options.widths(places)

    def _moved(self, places: Tensor, space: int, moves: Tensor) -> Tensor:
        """The first of some moves of a space with which the budget holds, or the last. (S,), (M,) -> (S,)"""
        trials = places.repeat(len(moves), 1)
        trials[:, space] = (places[space] + moves).clamp(min=0).minimum(self.options.last[space])
        inside = self._spent(self.options.widths(trials)) <= 1
        return trials[int(inside.int().argmax()) if inside.any() else -1]

    def _share(self, places: Tensor) -> float:
        return self._spent(self.options.widths(places[None])).item()

    def _spent(self, widths: Tensor) -> Tensor:
        """Cost / target of the binding limit. (N, S) -> (N,)"""
        return spent_shares(self.budget, self.graph, widths).amax(dim=1)
