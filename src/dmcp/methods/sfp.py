"""Soft filter pruning: filters are set to zero after each epoch, and trained on (He, Kang, Dong, Fu, Yang, 2018).

`find` trains the network by the recipe, from its fresh weights or from given ones. After each epoch the channels of
each space whose filters have the smallest L2 norm are set to zero, as many as the budget does not allow; all spaces
have one ratio. The next epoch trains them like all others, so that a channel dropped too early can come back. Those
that are zero at the end are cut out.

While it trains only filters are set to zero, as in the paper, never biases or BatchNorms: what is left of a channel is
its constant shift, and through it, past a ReLU, gradients still reach the filter. With the shift at zero, too, a ReLU
would stop them, and the channel could never come back. In the cut network such constants are gone. So at the end
everything that belongs to the dropped channels is set to zero: from then on the network computes what the cut one does.
BatchNorms are then calibrated on held-out samples, which makes up for constants that they had taken in.

BatchNorm divides the gradient of a zeroed filter by the root of its epsilon, as the variance of its output is zero. The
first step of an epoch then makes such a filter many times larger than all others, the more so with momentum; from then
on it has the largest norm and hardly learns. So filters under a BatchNorm that were set to zero get a share of their
gradient only, until the next time; `regrowth=1` is the method as the paper describes it. The small share has its price:
after the first epochs hardly any channel comes back, so that it is nearly pruning once and training on.

It also differs from the paper in this: layers with a residual stream in common drop the same channels, ranked by all of
their filters as if they were one long filter, where the paper zeroes each layer by itself and so keeps the stream
whole; the ratio follows from the budget.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dmcp.batches import size_of
from dmcp.calibration import recalibrate
from dmcp.errors import TrainingError
from dmcp.filters import Place, magnitude, placed, scaled, strongest, vectors, written
from dmcp.methods.problem import Choice, Problem, loaded, samples_of
from dmcp.spaces import Widths
from dmcp.training import train

STAGE = "sfp"  # what the progress of the training is told as
Score = Callable[[Tensor], Tensor]  # filters of a space, (size, n) -> how much each channel is worth, (size,)


@dataclass(frozen=True, kw_only=True)
class SoftConfig:
    """Settings of soft pruning, whatever ranks the channels."""

    every: int = 1  # epochs between two times that filters are set to zero; the last epoch always does it
    regrowth: float = 0.01  # share of their gradient that zeroed filters under BatchNorms get; the paper: 1

    def __post_init__(self) -> None:
        if type(self.every) is not int or self.every < 1:
            raise TrainingError(f"every must be an int of at least 1, not {self.every!r}.")
        if type(self.regrowth) not in (int, float) or not 0 < self.regrowth <= 1:
            raise TrainingError(f"regrowth must be a number above 0 and at most 1, like 0.01, not {self.regrowth!r}.")


def find(problem: Problem, config: SoftConfig, state: Mapping[str, Tensor] | None = None) -> Choice:
    """Train the network while its weakest channels are set to zero again and again."""
    return prune_softly(problem, STAGE, norms, config, state)


def norms(filters: Tensor) -> Tensor:
    """L2 norm of each filter. (size, n) -> (size,)"""
    return filters.square().sum(dim=1).sqrt()


def prune_softly(
    problem: Problem,
    stage: str,
    score: Score,
    config: SoftConfig,
    state: Mapping[str, Tensor] | None = None,
) -> Choice:
    """Train a copy of the model, and every so many epochs zero the filters of the channels that are worth least."""
    model = copy.deepcopy(problem.model) if state is None else loaded(problem, state)
    graph, epochs = problem.graph, problem.recipe.epochs
    widths = problem.uniform()
    narrowed = [space for space in graph.spaces if widths[space.name] < space.size]
    filters = {space.name: places for space in narrowed if (places := written(model, graph, space))}
    normed = [place for space in narrowed if scaled(model, graph, space) for place in filters.get(space.name, ())]

    with _slowed(model, normed) as shares:

        def zero(epoch: int) -> None:
            if (epoch + 1) % config.every and epoch + 1 < epochs:
                return
            for name, places in filters.items():
                dropped = score(vectors(model, places)).argsort(descending=True, stable=True)[widths[name] :]
                for place in places:
                    place.silence(model, dropped)
                    if place in shares:
                        shares[place].fill_(1)[place.rows[dropped].flatten().to(shares[place].device)] = config.regrowth

        train(
            model,
            problem.loader,
            problem.recipe,
            loss=problem.loss,
            on_step=lambda record: problem.tell(stage, record),
            engine=problem.engine,
            keeper=problem.keep and problem.keep(stage),
            after_epoch=zero,
        )
    kept = _settle(model, problem, widths)
    passes = epochs * samples_of(problem.loader) + sum(map(size_of, problem.held))
    return Choice(widths=widths, kept=kept, model=model, sample_passes=passes)


@contextlib.contextmanager
def _slowed(model: nn.Module, places: Sequence[Place]) -> Iterator[dict[Place, Tensor]]:
    """While entered, each row of these filters gets a share of its gradient, 1 until somebody changes it. (rows,)

    The shares are buffers of the model meanwhile, so that a checkpoint has them, too.
    """
    shares: dict[Place, Tensor] = {}
    with contextlib.ExitStack() as undo:
        for number, place in enumerate(places):
            weight = model.get_parameter(place.name)
            if weight.requires_grad:
                share = shares[place] = weight.new_ones(weight.shape[place.dim], requires_grad=False)
                model.register_buffer(f"_share{number}", share, persistent=False)
                undo.callback(delattr, model, f"_share{number}")
                wide = share.reshape([-1 if dim == place.dim else 1 for dim in range(weight.ndim)])
                handle = weight.register_hook(functools.partial(torch.mul, wide))  # type: ignore[no-untyped-call]
                undo.callback(handle.remove)
        yield shares


def _settle(model: nn.Module, problem: Problem, widths: Widths) -> dict[str, list[int]]:
    """Set everything of the zeroed channels to zero, so that the network computes what the cut one does; the others."""
    kept: dict[str, list[int]] = {}
    for space in problem.graph.spaces:
        # by what is zero, not by the score: after an interruption the last scores are not known
        strength = magnitude(model, problem.graph, space, power=2)
        kept[space.name] = strongest(strength, widths[space.name])
    for space in problem.graph.spaces:
        dropped = torch.tensor(sorted({*range(space.size)} - {*kept[space.name]}), dtype=torch.int64)
        for place in placed(model, problem.graph, space):
            place.silence(model, dropped)
    recalibrate(model, problem.held)
    return kept
