"""ChannelGraph, the result of trace: spaces of channels, what they cost, and how a network is narrowed."""

from __future__ import annotations

import difflib
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch
from torch import Tensor, nn

from dmcp.arguments import checked
from dmcp.errors import BudgetError, CutError, WidthsError
from dmcp.markov import mean_of
from dmcp.tracing.cost import LayerCost, Moment, Peak, Polynomial, Terms, evaluate, total
from dmcp.tracing.coupling import Coupling
from dmcp.tracing.layout import Layout, Segment
from dmcp.tracing.modules import Cut, skeleton
from dmcp.tracing.record import Recording
from dmcp.tracing.replay import ReplayContext
from dmcp.tracing.widths import ChannelSpace, Dim, Widths, fingerprint
from dmcp.units import counted, show_bytes, show_count

Kept = int | Sequence[int] | Tensor  # how many channels stay, or which
_NAMED = 3  # layers that the summary names for each reason


@dataclass(frozen=True)
class Unprunable:
    """Output channels of a layer that are never narrowed, and why."""

    name: str
    size: int
    reason: str


@dataclass(frozen=True)
class Binding:
    """An attribute of a module that replay found to follow a width."""

    module: str
    attribute: str
    value: int  # in the unpruned model
    follows: str  # names of the spaces


@dataclass(frozen=True)
class GateFold:
    """A dim of a tensor that is multiplied by the gates of a layout over spaces."""

    tensor: str
    dim: int
    layout: Layout  # atoms are space numbers


@dataclass(frozen=True)
class CostEntry:
    """Multiply-adds or parameters of one layer as a polynomial."""

    name: str
    kind: str
    macs: Terms
    params: Terms


@dataclass(frozen=True, eq=False)
class ChannelGraph:
    """The result of `trace`. It is a value: nothing in it changes."""

    spaces: tuple[ChannelSpace, ...]
    unprunable: tuple[Unprunable, ...]
    bindings: tuple[Binding, ...]
    unknown: Mapping[str, int]  # ops without a rule, and how often they occur
    notes: tuple[str, ...]
    input_shape: Any
    fingerprint: str
    exact: bool  # whether a gated network computes exactly what the cut one does
    hard_folds: tuple[GateFold, ...]
    soft_folds: tuple[GateFold, ...]
    entries: tuple[CostEntry, ...]
    moments: tuple[Moment, ...]  # when many activations are held
    traffic_terms: Terms  # bytes that all ops read and write
    _context: ReplayContext
    _atoms: tuple[int, ...]  # the atom of each space
    extra: Mapping[str, Any] = field(default_factory=dict)  # costs that are measured, see `Latency.attach`
    verified: bool = False  # whether a cut network has been compared with the gated one

    @functools.cached_property
    def _polynomials(self) -> dict[str, Polynomial]:
        """The polynomial of each kind of cost, by name."""
        count = len(self.spaces)
        polynomials = {
            "macs": Polynomial(total(entry.macs for entry in self.entries), count),
            "params": Polynomial(total(entry.params for entry in self.entries), count),
            "memory": self._peak,
            "traffic": Polynomial(self.traffic_terms, count),
        }
        for name, cost in self.extra.items():
            polynomials[name] = Polynomial(dict(cost.terms), count, steps=cost.steps)
        return polynomials

    @functools.cached_property
    def _peak(self) -> Peak:
        return Peak(self.moments, len(self.spaces))

    @functools.cached_property
    def _dims(self) -> tuple[Dim, ...]:
        """Dims of tensors whose sizes follow from the widths, with the names of spaces."""

        def with_names(segment: Segment) -> tuple[int | str, ...]:
            return tuple(axis if isinstance(axis, int) else self.spaces[axis.index].name for axis in segment)

        return tuple(Dim(fold.tensor, fold.dim, tuple(map(with_names, fold.layout))) for fold in self.hard_folds)

    # -- widths

    @property
    def full(self) -> Widths:
        """The widths of the unpruned network: every space at its size."""
        return self._widths([space.size for space in self.spaces])

    def _widths(self, kept: Iterable[int]) -> Widths:
        names = (space.name for space in self.spaces)
        return Widths(tuple(zip(names, kept, strict=True)), self.input_shape, self.fingerprint, self._dims)

    @checked
    def widths(self, kept: Mapping[str, int] | Sequence[int] | Tensor) -> Widths:
        """Widths from a mapping of names, where spaces that it leaves out stay full, or from one number per space."""
        if isinstance(kept, Mapping):
            self._check_names(kept)
            kept = [kept.get(space.name, space.size) for space in self.spaces]
        if len(kept) != len(self.spaces):
            raise WidthsError(f"There are {len(self.spaces)} spaces, but {len(kept)} widths were given.")
        return self._widths([_width(space, number) for space, number in zip(self.spaces, kept, strict=True)])

    def _check_names(self, kept: Mapping[str, Any]) -> None:
        if isinstance(kept, Widths) and kept.fingerprint != self.fingerprint:
            raise WidthsError("These widths are for another architecture: their fingerprint differs from the graph's.")
        names = [space.name for space in self.spaces]
        for name in kept:
            if name in names:
                continue
            tied_to = [space.name for space in self.spaces if name in space.writers]
            similar = difflib.get_close_matches(str(name), names)
            if tied_to:
                hint = f"That layer is tied to {', '.join(tied_to)}."
            elif similar:
                hint = f"Did you mean {', '.join(similar)}? `graph.spaces` lists all of them."
            else:
                hint = "`graph.spaces` lists all of them."
            raise WidthsError(f"No space is named {name!r}. {hint}")

    # -- cost

    @overload
    def macs(self, widths: Tensor) -> Tensor: ...
    @overload
    def macs(self, widths: Mapping[str, int] | None = None) -> int: ...
    def macs(self, widths: Any = None) -> Any:
        """Multiply-adds of one sample. An int for widths; a tensor of widths (N, S) gives (N,)."""
        return self.cost("macs", widths)

    @overload
    def params(self, widths: Tensor) -> Tensor: ...
    @overload
    def params(self, widths: Mapping[str, int] | None = None) -> int: ...
    def params(self, widths: Any = None) -> Any:
        """Number of parameters. An int for widths; a tensor of widths (N, S) gives (N,)."""
        return self.cost("params", widths)

    @overload
    def memory(self, widths: Tensor) -> Tensor: ...
    @overload
    def memory(self, widths: Mapping[str, int] | None = None) -> int: ...
    def memory(self, widths: Any = None) -> Any:
        """Most bytes of activations that one sample needs at once. An int; a tensor of widths (N, S) gives (N,)."""
        return self.cost("memory", widths)

    @overload
    def traffic(self, widths: Tensor) -> Tensor: ...
    @overload
    def traffic(self, widths: Mapping[str, int] | None = None) -> int: ...
    def traffic(self, widths: Any = None) -> Any:
        """Bytes that all ops read and write for one sample, activations and weights; fusion is not modelled.

        An int for widths; a tensor of widths (N, S) gives (N,).
        """
        return self.cost("traffic", widths)

    def memory_at(self, widths: Mapping[str, int] | None = None) -> str:
        """The layer that runs when most bytes of activations are held."""
        return self._peak.at(self._numbers(widths)).name

    @overload
    def cost(self, kind: str, widths: Tensor) -> Tensor: ...
    @overload
    def cost(self, kind: str, widths: Mapping[str, int] | None = None) -> int: ...
    def cost(self, kind: str, widths: Mapping[str, int] | Tensor | None = None) -> int | Tensor:
        """Cost of one kind: one of those above by name, or of `extra`. An int; a tensor of widths (N, S) gives (N,)."""
        polynomial = self._polynomial(kind)
        if not isinstance(widths, Tensor):
            return polynomial.evaluate(self._numbers(widths))
        if widths.ndim != 2 or widths.shape[1] != len(self.spaces):
            raise WidthsError(f"A tensor of widths must be (N, {len(self.spaces)}), not {tuple(widths.shape)}.")
        sizes = self.full.tensor().to(widths.device)
        if not ((widths >= 1) & (widths <= sizes)).all():
            raise WidthsError("Every width must be from 1 to the size of its space.")
        return polynomial(widths)

    def _polynomial(self, kind: str) -> Polynomial:
        if not isinstance(kind, str) or kind not in self._polynomials:
            raise BudgetError(
                f"This graph has no cost named {kind!r}, only {', '.join(self._polynomials)}. "
                "A measured cost must be attached first: see Latency.attach."
            )
        return self._polynomials[kind]

    def _numbers(self, widths: Mapping[str, int] | None) -> list[int]:
        """One number per space, in order; None is the unpruned network."""
        complete = self.full if widths is None else self.widths(widths)
        return list(complete.values())

    def expected_cost(self, kind: str, marginals: Tensor, sizes: Tensor) -> Tensor:
        """Expected cost of one kind, given the chance that each group survives. (S, G), (S, G) -> ()"""
        return self._polynomial(kind).expected(lambda function: mean_of(marginals, sizes, function))

    def layers(self, widths: Mapping[str, int] | None = None) -> tuple[LayerCost, ...]:
        """What each layer costs, in the order in which the layers run."""
        numbers = self._numbers(widths)
        return tuple(
            LayerCost(entry.name, entry.kind, evaluate(entry.macs, numbers), evaluate(entry.params, numbers))
            for entry in self.entries
        )

    def space_share(self, space: ChannelSpace) -> float:
        """Share of the multiply-adds in layers that read or write the space."""
        number = self.spaces.index(space)
        return self._share(lambda terms: any(number in key for key in terms))

    @property
    def prunable_share(self) -> float:
        """Share of the multiply-adds in layers that read or write any space."""
        return self._share(lambda terms: any(terms))

    def _share(self, is_counted: Callable[[Terms], bool]) -> float:
        """Share of the multiply-adds, in the unpruned network, that some layers have."""
        full = [space.size for space in self.spaces]
        part = sum(evaluate(entry.macs, full) for entry in self.entries if is_counted(entry.macs))
        return part / max(1, self.macs())

    def check_architecture(self, model: nn.Module) -> None:
        """Refuse a model that this graph was not traced from."""
        if fingerprint(model) != self.fingerprint:
            raise WidthsError(
                "The graph is of another architecture: trace this model. If its forward makes parameters or buffers, "
                "run it once before you trace it."
            )

    # -- narrowing

    @property
    def recordings(self) -> list[Recording]:
        """The forward passes of the unpruned model that were recorded: first eval mode, then train mode."""
        return [within.recording for within in self.coupling.passes]

    @property
    def coupling(self) -> Coupling:
        """The layouts of all values in these passes."""
        return self._context.coupling

    @property
    def space_numbers(self) -> dict[int, int]:
        """The number of each atom's space."""
        return {atom: number for number, atom in enumerate(self._atoms)}

    def atom_of(self, space: ChannelSpace) -> int:
        """The atom of a space."""
        return self._atoms[self.spaces.index(space)]

    @property
    def loses_gates(self) -> bool:
        """Whether layers are computed again in the backward pass, or their weights are kept for later runs."""
        gated = {fold.tensor for fold in (*self.hard_folds, *self.soft_folds)}
        return any(recording.recomputes or recording.keeps & gated for recording in self.recordings)

    def kept(self, widths: Mapping[str, Kept]) -> dict[int, Tensor]:
        """Indices that each atom keeps; for a number, the first so many."""
        self._check_names(widths)
        indices: dict[int, Tensor] = {}
        for atom, space in zip(self._atoms, self.spaces, strict=True):
            indices[atom] = _indices(space, widths.get(space.name, space.size))
        return indices

    def _counts(self, widths: Mapping[str, Kept]) -> dict[int, int]:
        """How many indices each atom keeps."""
        return {atom: len(indices) for atom, indices in self.kept(widths).items()}

    def cuts(self, widths: Mapping[str, Kept]) -> dict[str, Cut]:
        """Indices that stay, per dim of every tensor that changes."""
        return self._context.cuts(self.kept(widths))

    def cut_value(self, value: int, widths: Mapping[str, Kept]) -> Cut:
        """Indices that stay, per dim of a value of the last recording."""
        dims = self.coupling.passes[-1].layouts[value]
        return self._context.cut(dims, self.kept(widths))

    def attributes(self, widths: Mapping[str, Kept]) -> dict[str, dict[str, Any]]:
        """Attributes of modules that change: {module path: {attribute: value}}."""
        return self._context.attributes(self._counts(widths))

    def check(self, small: nn.Module, widths: Mapping[str, Kept]) -> None:
        """Replay a cut model, without data, against every recording. Raises a CutError for an unexpected shape."""
        counts = self._counts(widths)
        for number, recording in enumerate(self.recordings):
            outcome = self._context.replay(number, self._like_recorded(small), counts)
            if outcome.clean:
                continue
            location = "the model"
            if outcome.conflicts:
                op = recording.ops[outcome.conflicts[0].number]
                location = f"{op.name} in {op.path or 'the model'}"
            reason = outcome.stopped or "a shape or number in it does not follow the width"
            raise CutError(
                f"At these widths, {location} does not do what the trace predicts: {reason}. Choose other widths."
            )

    def _like_recorded(self, small: nn.Module) -> nn.Module:
        """A copy without data, in the precision of the recording."""
        twin = skeleton(small)
        model = self._context.model
        recorded = dict(model.named_parameters()) | dict(model.named_buffers())
        for name, tensor in [*twin.named_parameters(), *twin.named_buffers()]:
            tensor.data = tensor.data.to(recorded[name].dtype)
        return twin

    # -- text

    def to_json(self) -> dict[str, Any]:
        """The summary as plain data."""
        counted_kinds = [kind for kind in self._polynomials if kind not in self.extra]
        costs = {kind: self.cost(kind) for kind in counted_kinds}
        return costs | {
            "memory_at": self.memory_at(),
            "prunable_share": self.prunable_share,
            "input_shape": self.input_shape,
            "fingerprint": self.fingerprint,
            "spaces": [vars(space) | {"share": self.space_share(space)} for space in self.spaces],
            "unprunable": [vars(item) for item in self.unprunable],
            "bindings": [vars(item) for item in self.bindings],
            "unknown": dict(self.unknown),
            "notes": list(self.notes),
        }

    def summary(self) -> str:
        """What the network costs, its spaces, and what is unprunable, grouped by reason."""
        macs = self.macs()
        params = self.params()
        lines = [
            f"{show_count(macs)} MACs ({macs:,}), {show_count(params)} parameters ({params:,})",
            f"{show_bytes(self.memory())} of peak activation memory, while {self.memory_at() or 'the model'} runs",
            f"{show_bytes(self.traffic())} of traffic: what all ops read and write for one sample",
            f"{counted(len(self.spaces), 'space')}; the layers that read or write one have {self.prunable_share:.1%} "
            "of the MACs",
            "",
            "Spaces (channels that are kept or dropped together), with the share of the MACs in layers that use each",
            *self._space_lines(),
            *self._unprunable_lines(),
        ]
        if self.bindings:
            lines += ["", "Attributes that follow a width"]
        for binding in self.bindings:
            lines.append(f"  {binding.module}.{binding.attribute} = {binding.value} follows {binding.follows}")
        for name, count in self.unknown.items():
            lines += [
                "",
                f"No channel rule for {name} (called {count} times): the channels that it reads are unprunable.",
            ]
        for note in self.notes:
            lines += ["", f"Note: {note}"]
        if not self.verified:
            lines += ["", "Not verified: no cut network was compared with the gated one."]
        return "\n".join(lines)

    def _space_lines(self) -> list[str]:
        """A row for each space, in columns."""
        rows = [("space", "size", "MACs", "layers tied to it")]
        for space in self.spaces:
            share = f"{self.space_share(space):.1%}"
            rows.append((space.name, f"{space.size:,}", share, ", ".join(space.writers)))
        names = max(len(row[0]) for row in rows)
        return [f"  {name:<{names}}  {size:>6}  {share:>6}  {writers}" for name, size, share, writers in rows]

    def _unprunable_lines(self) -> list[str]:
        """One line for each reason, with counts of layers and channels and the first few names."""
        by_reason: dict[str, list[Unprunable]] = {}
        for item in self.unprunable:
            by_reason.setdefault(item.reason, []).append(item)
        lines = ["", "Unprunable channels, by reason"] if by_reason else []
        for reason, items in by_reason.items():
            names = list(dict.fromkeys(item.name for item in items))
            channels = sum(item.size for item in items)
            listed = ", ".join(names[:_NAMED])
            if len(names) > _NAMED:
                listed += f" and {len(names) - _NAMED:,} more"
            counts = f"{counted(len(names), 'layer')}, {counted(channels, 'channel')}"
            lines.append(f"  {reason} ({counts}): {listed}")
        return lines

    __str__ = summary

    def __repr__(self) -> str:
        return f"ChannelGraph({len(self.spaces)} spaces, {self.macs():,} MACs, {self.params():,} parameters)"


def _width(space: ChannelSpace, number: Any) -> int:
    """Check that a number is an int of Python, NumPy or torch that fits the space."""
    try:
        width = operator.index(number)
    except TypeError:
        width = 0
    if isinstance(number, bool) or not 1 <= width <= space.size:
        raise WidthsError(f"The width of {space.name} must be an int from 1 to {space.size}, not {number!r}.")
    return width


def _indices(space: ChannelSpace, kept: Any) -> Tensor:
    """The first so many channels, or those that are listed. -> (n,) int64"""
    if isinstance(kept, Tensor):
        is_list = kept.ndim > 0
    else:
        is_list = isinstance(kept, Sequence)
    if not is_list:
        return torch.arange(_width(space, kept))

    listed = torch.as_tensor(kept, device="cpu")
    valid = (
        listed.ndim == 1
        and len(listed) > 0
        and not listed.is_floating_point()
        and bool((listed >= 0).all() and (listed < space.size).all())
        and len(set(listed.tolist())) == len(listed)
    )
    if not valid:
        raise WidthsError(
            f"The channels of {space.name} to keep must be different ints below {space.size}, not {kept!r}."
        )
    return listed.long()
