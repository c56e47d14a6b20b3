"""SFP (He et al., 2018) and FPGM (He et al., 2019): filters are set to zero after each epoch, and trained on.

    dmcp compare --model cifar:resnet20 --data cifar10 \
        --methods uniform,experiments.methods.soft:sfp,experiments.methods.soft:fpgm --set sfp.regrowth=1

Residual streams are narrowed, too. Zeroed filters get a hundredth of their gradient: regrowth=1 is SFP's paper and
release, regrowth=0 the release of FPGM. The network is calibrated before the cut; the last epoch counts.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dmcp.compare.methods import Method, Own
from dmcp.compare.problem import CHOOSING, Choice, MethodConfig, Problem, loaded, samples_of
from dmcp.fields import setting
from dmcp.runtime.batches import size_of
from dmcp.searching.importance import (
    ChannelRows,
    find_filters,
    find_rows,
    find_scales,
    magnitude,
    numbers_of_channels,
    strongest,
)
from dmcp.training.calibration import recalibrate
from dmcp.training.loop import train


@dataclass(frozen=True, kw_only=True)
class SoftConfig(MethodConfig):
    """Settings of soft pruning, whatever ranks the channels."""

    every: int = setting(1, "Number of epochs between resets of filters to zero; the last epoch always resets them.", 1)
    regrowth: float = setting(0.01, "Share of their gradient that zeroed filters get; in SFP 1, in FPGM 0.", 0, 1)


def norms(filters: Tensor) -> Tensor:
    """L2 norm of each filter. (size, n) -> (size,)"""
    return filters.square().sum(dim=1).sqrt()


def distances(filters: Tensor) -> Tensor:
    """Summed distance of each filter to all others; least where others can stand in for it. (size, n) -> (size,)"""
    return torch.cdist(filters, filters).sum(dim=1)


def prune_softly(
    score: Callable[[Tensor], Tensor],
    problem: Problem,
    config: SoftConfig,
    state: Mapping[str, Tensor] | None = None,
) -> Choice:
    """Train a copy of the model, and every so many epochs zero the filters of the channels with the lowest score."""
    model, graph, epochs = loaded(problem, state), problem.graph, problem.recipe.epochs
    widths = problem.uniform()
    narrowed = [space for space in graph.spaces if widths[space.name] < space.size]
    filters = {space.name: places for space in narrowed if (places := find_filters(model, graph, space))}
    normed = [place for space in narrowed if find_scales(model, graph, space) for place in filters.get(space.name, ())]

    with _slowed(model, normed) as shares:

        def zero(epoch: int) -> None:
            if (epoch + 1) % config.every and epoch + 1 < epochs:
                return
            for name, places in filters.items():
                dropped = score(numbers_of_channels(model, places)).argsort(descending=True, stable=True)[
                    widths[name] :
                ]
                for place in places:
                    _silence(model, place, dropped)
                    if place in shares:
                        shares[place].fill_(1)[place.rows[dropped].flatten().to(shares[place].device)] = config.regrowth

        runtime = problem.runtime.stage(CHOOSING)
        train(model, problem.loader, problem.recipe, task=problem.task, runtime=runtime, after_epoch=zero)
    # not by the score: after an interruption the last ones are not known
    kept = {it.name: strongest(magnitude(model, graph, it, 2), widths[it.name]) for it in graph.spaces}
    for space in graph.spaces:  # all of the zeroed channels, so that the network computes what the cut one does
        dropped = torch.tensor(sorted({*range(space.size)} - {*kept[space.name]}), dtype=torch.int64)
        for place in find_rows(model, graph, space):
            _silence(model, place, dropped)
    recalibrate(model, problem.held_out)
    passes = epochs * samples_of(problem.loader) + sum(map(size_of, problem.held_out))
    return Choice(widths=widths, kept=kept, model=model, sample_passes=passes)


@torch.no_grad()
def _silence(model: nn.Module, place: ChannelRows, channels: Tensor) -> None:
    """Set what a parameter holds of these channels to zero, in place."""
    tensor = model.get_parameter(place.name)
    tensor.transpose(0, place.dim)[place.rows[channels.cpu()].flatten().to(tensor.device)] = 0


@contextlib.contextmanager
def _slowed(model: nn.Module, places: Sequence[ChannelRows]) -> Iterator[dict[ChannelRows, Tensor]]:
    """While entered, each row of these filters gets a share of its gradient, 1 until somebody changes it. (rows,)

    The shares are buffers of the model meanwhile, so that a checkpoint has them, too.
    """
    shares: dict[ChannelRows, Tensor] = {}
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


sfp = Method(functools.partial(prune_softly, norms), SoftConfig, own=Own.AS_TRAINED, one_ratio=True)
fpgm = Method(functools.partial(prune_softly, distances), SoftConfig, own=Own.AS_TRAINED, one_ratio=True)
