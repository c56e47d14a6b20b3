"""The first layers, which no gate reaches: the same for all gated sub-networks, so they are run once for all of them.

Gates go into the weights that read a space, so everything before the first reader does not depend on them. Where those
layers form a chain of modules, each fed by the one before and the rest of the network by the last one only, a step runs
them once, and sends the summed gradients of all sub-networks back through them once.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dmcp.calibration import kept_modes
from dmcp.graph import ChannelGraph
from dmcp.recording import Op, Recording, Ref, leaves
from dmcp.supernet import Supernet, run_folded, skip

_RANDOM = torch.Tag.nondeterministic_seeded


class Stem:
    """Both parts of a supernet, divided behind its first layers: head(x) has no gates, tail(h, folded) has them all."""

    def __init__(self, net: Supernet, paths: Sequence[str], value: int) -> None:
        self.net = net
        self.paths = tuple(paths)
        self.value = value  # its output, in the last recording
        self.parts = [net.model.get_submodule(path) for path in paths]
        shared: dict[int, Any] = {id(tensor): tensor for tensor in (*net.model.parameters(), *net.model.buffers())}
        self.rest = copy.deepcopy(net.model, shared)  # the same tensors
        skip(self.rest, paths)

    def head(self, x: Any) -> Any:
        """What the first layers make of an input."""
        x = x[0] if isinstance(x, (tuple, list)) else x
        for part in self.parts:
            x = part(x)
        return x

    def tail(self, h: Tensor, folded: dict[str, Tensor]) -> Any:
        """What the rest of the network, with gates folded into its weights, makes of that."""
        return run_folded(self.rest, h, folded)


def find_stem(net: Supernet) -> Stem | None:
    """The longest stem that changes nothing, or None; tried on an input in eval mode, value by value."""
    recordings = net.graph.recordings
    chains = [_chain(recording, net.graph) for recording in recordings]
    for count in range(min(map(len, chains)), 0, -1):
        paths = [link.path for link in chains[-1][:count]]
        last = [chain[count - 1] for chain in chains]
        if any([link.path for link in chain[:count]] != paths for chain in chains) or not all(
            _is_border(recording, link) for recording, link in zip(recordings, last, strict=True)
        ):
            continue
        with contextlib.suppress(Exception):  # the code around those modules may want more of them than a chain gives
            stem = Stem(net, paths, last[-1].value)
            if not any(_hooked(part) for part in stem.parts) and not _tied(stem) and _same(stem):
                return stem
    return None


@dataclass(frozen=True)
class _Link:
    path: str  # of the module
    end: int  # number of ops up to its end
    value: int  # its output


def _chain(recording: Recording, graph: ChannelGraph) -> list[_Link]:
    """Modules at the start of a pass, each fed by the one before, that no gate reaches."""
    if len(recording.inputs) != 1 or recording.caches:
        return []
    gated = {fold.tensor for fold in graph.hard_folds}
    chain: list[_Link] = []
    start, value = 0, recording.inputs[0]
    while start < len(recording.ops):
        link = _module_at(recording, start, value, gated)
        if link is None:
            break
        chain.append(link)
        start, value = link.end, link.value
    return chain


def _module_at(recording: Recording, start: int, given: int, gated: set[str]) -> _Link | None:
    """The outermost module whose ops begin here and need nothing but the given value and its own tensors."""
    names = recording.ops[start].path.split(".")
    for depth in range(1, len(names) + 1) if names != [""] else ():
        path = ".".join(names[:depth])
        inside = [number for number, op in enumerate(recording.ops) if f"{op.path}.".startswith(f"{path}.")]
        end = inside[-1] + 1
        ops = recording.ops[start:end]
        if len(inside) == len(ops) and _is_closed(recording, ops, given, gated):
            outs = [value for op in ops for value in op.outs if value is not None and value not in recording.tensors]
            if outs:
                return _Link(path, end, outs[-1])
    return None


def _is_closed(recording: Recording, ops: Sequence[Op], given: int, gated: set[str]) -> bool:
    known = {given}
    for op in ops:
        if _RANDOM in op.func.tags or len(op.outs) != 1:
            return False
        for value in op.inputs():
            name = recording.tensors.get(value)
            if name in gated or (name is None and value not in known):
                return False
        known.update(value for value in op.outs if value is not None)
    return True


def _is_border(recording: Recording, link: _Link) -> bool:
    """Whether all later ops know the earlier values by the link's output only, and leave that as it is."""
    before = {out for op in recording.ops[: link.end] for out in op.outs} | set(recording.inputs)
    hidden = before - {link.value} - set(recording.tensors)
    views = {link.value}
    for op in recording.ops[link.end :]:
        inputs = op.inputs()
        if hidden & set(inputs):
            return False
        given = op.arguments()
        for argument in op.func._schema.arguments:
            values = {leaf.value for leaf in leaves(given[argument.name]) if isinstance(leaf, Ref)}
            if argument.alias_info is not None and views & values:
                if argument.alias_info.is_write:
                    return False
                views.update(out for out in op.outs if out is not None)
    return not before & set(recording.outputs)


def _tied(stem: Stem) -> bool:
    """Whether a parameter of the stem is one of the rest, too."""
    rest = {id(parameter) for parameter in stem.rest.parameters()}
    return any(id(parameter) in rest for part in stem.parts for parameter in part.parameters())


def _hooked(part: nn.Module) -> bool:
    return any(module._forward_hooks or module._forward_pre_hooks for module in part.modules())


@torch.no_grad()
def _same(stem: Stem) -> bool:
    """Whether both parts, one after the other, compute what the whole supernet does."""
    net = stem.net
    device = net.position.device
    shape = net.graph.input_shape
    if not isinstance(shape, (tuple, list)) or not all(isinstance(size, int) for size in shape):
        return False
    generator = torch.Generator().manual_seed(0)
    dtype = next((p.dtype for p in net.model.parameters() if p.is_floating_point()), torch.float32)
    x = torch.randn(2, *shape, generator=generator).to(device, dtype)
    gates = net.hard(net.graph.full)
    with kept_modes(net.model), kept_modes(stem.rest):
        net.model.eval()
        stem.rest.eval()
        whole, parts = net(x, gates), stem.tail(stem.head(x), net.fold(gates))
    if not isinstance(whole, Tensor) or not isinstance(parts, Tensor) or whole.shape != parts.shape:
        return False
    return bool((whole - parts).abs().max() <= 1e-4 * whole.abs().max())
