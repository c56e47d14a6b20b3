"""The smallest and largest widths that a search may choose: min_channels, max_channels and align."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from dmcp.errors import WidthsError
from dmcp.fields import Bound
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.widths import ChannelSpace, Widths


def width_bounds(graph: ChannelGraph, lower: Bound, upper: Bound, align: int | None = 1) -> list[tuple[int, int]]:
    """The smallest and the largest width of each space: multiples of `align`, or its full size."""
    lowest = _bounds_by_space(graph, lower, max, lambda channels, unit: -(-channels // unit))
    highest = _bounds_by_space(graph, upper, min, lambda channels, unit: channels // unit)
    ranges: list[tuple[int, int]] = []
    for space in graph.spaces:
        step = space.step(align)
        least = lowest.get(space.name, 1)
        most = highest.get(space.name, space.size)
        low = min(space.size, -(-least // step) * step)
        high = most
        if most < space.size:  # the full size is allowed, whatever the step
            high = most // step * step
        if low > high:
            raise WidthsError(
                f"No width of {space.name} lies between {least} and {most} in steps of {step} groups of {space.unit} "
                "channels: change its bounds."
            )
        ranges.append((low, high))
    return ranges


def _bounds_by_space(
    graph: ChannelGraph, bound: Bound, strictest: Callable[[Iterable[int]], int], to_width: Callable[[int, int], int]
) -> dict[str, int]:
    """The bound of each space that has one, as a width of it.

    A bound may be given by the name of a space, of a module that writes it, or for the whole network. The most exact
    name counts; of equally exact ones the strictest number.
    """
    if isinstance(bound, Mapping):
        channels = dict(bound)
    else:
        channels = {"": bound}
    named = {space.name: channels.pop(space.name) for space in graph.spaces if space.name in channels}
    graph.widths(bound if isinstance(bound, Widths) else named)  # refuses numbers that do not fit

    used = {""}
    by_module: dict[str, int] = {}
    for space in graph.spaces:
        depths = {module: _depth(module) for module in channels if _writes(module, space)}
        used |= depths.keys()
        if depths:
            deepest = max(depths.values())
            number = strictest(channels[module] for module, depth in depths.items() if depth == deepest)
            by_module[space.name] = min(space.size, to_width(number, space.unit))

    for name in channels.keys() - used:
        names = {space.name for space in graph.spaces}
        for space in graph.spaces:
            names.update(space.writers)
        similar = ", ".join(difflib.get_close_matches(name, sorted(names)))
        hint = "`graph.spaces` (dmcp inspect) lists all of them."
        if similar:
            hint = f"Did you mean {similar}?"
        raise WidthsError(f"No space, and no module that writes one, is named {name!r}. {hint}")
    return by_module | named


def _depth(module: str) -> int:
    """How exact a name is: 0 for the whole network."""
    if not module:
        return 0
    return module.count(".") + 1


def _writes(module: str, space: ChannelSpace) -> bool:
    """True for a module with a layer that writes the space; "" is the whole network."""
    return not module or any(f"{writer}.".startswith(f"{module}.") for writer in space.writers)


def extreme_widths(graph: ChannelGraph, sizes: Tensor) -> tuple[Widths, Widths]:
    """The smallest and the largest widths of chains with these groups. (S, G)"""
    return graph.widths(sizes[:, 0].tolist()), graph.widths(sizes.sum(dim=1).tolist())


# all widths between them


class AllowedWidths:
    """The widths that each space may have: multiples of `align` real channels between two bounds, and its full size.

    Widths of all spaces are an index per space into its row of the table. Where no multiple is between the bounds, the
    upper one is allowed.
    """

    def __init__(self, graph: ChannelGraph, lower: Tensor, upper: Tensor, align: int | None) -> None:
        rows: list[list[int]] = []
        for space, low, high in zip(graph.spaces, lower.tolist(), upper.tolist(), strict=True):
            step = space.step(align)
            row = list(range(-(-low // step) * step, high + 1, step))
            ends_early = not row or (row[-1] < high and high == space.size)
            if ends_early:
                row.append(high)
            rows.append(row)
        longest = max(map(len, rows))
        padded = [row + row[-1:] * (longest - len(row)) for row in rows]
        self.table = torch.tensor(padded)  # (S, longest)
        self.last = torch.tensor([len(row) - 1 for row in rows])  # index of the largest width of each space. (S,)

    def widths(self, indices: Tensor) -> Tensor:
        """(..., S) -> (..., S) int64"""
        return self.table[torch.arange(len(self.table)), indices]

    def nearest(self, wish: Tensor) -> Tensor:
        """Indices of the allowed widths nearest to some others. (S,) -> (S,)"""
        middles = (self.table[:, 1:] + self.table[:, :-1]) / 2
        return torch.searchsorted(middles, wish[:, None].to(middles)).squeeze(1).minimum(self.last)


def allowed_widths(
    graph: ChannelGraph, min_channels: Bound | None, max_channels: Bound | None, align: int | None
) -> AllowedWidths:
    """The widths between two bounds; all of them where there are no bounds."""
    least = {} if min_channels is None else min_channels
    most = {} if max_channels is None else max_channels
    ranges = width_bounds(graph, least, most)
    lower, upper = torch.tensor(ranges).unbind(1)
    return AllowedWidths(graph, lower, upper, align)
