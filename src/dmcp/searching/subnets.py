"""The sub-networks of the sandwich rule, and the stem that they share."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmcp.markov import CHAIN, INDEPENDENT, Process, bounded, rand
from dmcp.runtime.batches import widest
from dmcp.searching.bounds import width_bounds
from dmcp.searching.importance import magnitude
from dmcp.searching.supernet import Supernet, given_name, skip
from dmcp.settings import Bound, Sampling
from dmcp.tracing.folds import run_folded
from dmcp.tracing.modules import modules_of, narrow, python_modules, tensors_in
from dmcp.tracing.record import Recording


@dataclass(frozen=True)
class Chains:
    """What the alphas of a supernet mean in one search: their process, and the widths that they may reach."""

    process: Process
    sizes: Tensor  # groups inside the bounds: the first one and the sum are the smallest and largest widths. (S, G)
    place: Tensor  # of each channel: its group in a flattened (S, G + 1) table, whose last column is never kept

    def marginals(self, alpha: Tensor) -> Tensor:
        """Probability that each group is kept; zero where it is empty. (S, G-1) -> (S, G)"""
        return self.process.marginals(alpha) * (self.sizes > 0)

    def gates(self, groups: Tensor) -> Tensor:
        """A number per group, spread over its channels (eq. 7). (..., S, G) -> (..., channels)"""
        return F.pad(groups, (0, 1)).flatten(-2)[..., self.place]


def make_chains(
    net: Supernet,
    process: Process = CHAIN,
    min_channels: Bound | None = None,
    max_channels: Bound | None = None,
    align: int | None = None,
) -> Chains:
    """The chains of a supernet with bounded widths, in multiples of `align`."""
    ends = width_bounds(net.graph, min_channels or {}, max_channels or {}, align)
    lower, upper = torch.tensor(ends, device=net.sizes.device).unbind(1)
    sizes = bounded(net.sizes, lower, upper)
    behind = sizes.cumsum(dim=1)[net.space_of] <= net.position[:, None]  # (channels, G)
    return Chains(process, sizes, behind.sum(dim=1) + net.space_of * (sizes.shape[1] + 1))


def sample_gates(
    net: Supernet, chains: Chains, sampling: Sampling, count: int, generator: torch.Generator | None = None
) -> list[Tensor]:
    """Gates of random sub-networks; a generator on the device of the alphas keeps the host from waiting for it."""
    sizes = chains.sizes
    if sampling is Sampling.MIXED:
        likely = sample_gates(net, chains, Sampling.MARKOV, (count + 1) // 2, generator)
        return likely + sample_gates(net, chains, Sampling.UNIFORM, count // 2, generator)
    if sampling is Sampling.MARKOV and chains.process is INDEPENDENT:  # any groups, not the first ones: no widths
        chances = chains.marginals(net.alpha.detach())
        return list(chains.gates(rand((count, *sizes.shape), sizes.device, generator) < chances))
    if sampling is Sampling.MARKOV:
        widths = chains.process.sample(net.alpha, sizes, count, generator)
    else:
        rank = (sizes > 0).cumsum(dim=1)  # the number of different widths up to each group
        shape = (len(sizes) if sampling is Sampling.UNIFORM else 1, count)
        chosen = (rand(shape, sizes.device, generator) * rank[:, -1:]).long() + 1  # (S, count)
        group = torch.searchsorted(rank, chosen.clamp(max=rank[:, -1:]))  # a product may have been rounded up
        widths = sizes.cumsum(dim=1).gather(1, group).T
    return [net.first(row) for row in widths]


@torch.no_grad()
def sort_channels(net: Supernet) -> None:
    """Order the channels of every space by the L2 norm of the weights that write them, in place.

    Sub-networks keep the first channels; the full network computes the same as before.
    """
    order: dict[str, list[int]] = {}
    for space in net.graph.spaces:
        importance = magnitude(net.model, net.graph, space, power=2)
        if importance is not None:
            order[space.name] = importance.argsort(descending=True, stable=True).tolist()
    ordered = narrow(net.model, net.graph.cuts(order), {})
    before, after = ([*model.parameters(), *model.buffers()] for model in (net.model, ordered))
    for old, new in zip(before, after, strict=True):
        old.copy_(new)


# the stem: first layers that no gate reaches, run once for all sub-networks of a step


_LARGE_GRADIENT = 1e6  # shows code that looks at the size of gradients
_SLOW = 5 * 10**8  # MACs above which trying a stem takes long on a CPU


class Stem:
    """A supernet divided behind its first layers: head(x) has no gates, tail(x, h, folded) has them all."""

    def __init__(self, net: Supernet, paths: Sequence[str], value: int) -> None:
        self.net = net
        self.paths = tuple(paths)
        self.value = value  # its output, in the last recording
        self.parts = [net.model.get_submodule(path) for path in paths]
        shared = python_modules(net.model)
        shared |= {id(tensor): tensor for tensor in (*net.model.parameters(), *net.model.buffers())}
        self.rest = copy.deepcopy(net.model, shared)  # the same tensors
        skip(self.rest, paths)

    def head(self, x: Tensor) -> Any:
        """What the first layers make of an input."""
        for part in self.parts:
            x = part(x)
        return x

    def tail(self, x: Tensor, h: Tensor, folded: dict[str, Tensor]) -> Any:
        """What the rest of the network, with gates folded into its weights, makes of that."""
        return run_folded(self.rest, x, folded | {given_name(self.paths): h})

    def fits(self, x: Any) -> bool:
        """True if an input has the traced shape: at another size the network may do other things."""
        return isinstance(x, Tensor) and tuple(x.shape[1:]) == tuple(self.net.graph.input_shape)


def find_stem(net: Supernet) -> Stem | None:
    """The longest stem that leaves outputs and gradients in train mode as they are, or None."""
    recordings, shape = net.graph.recordings, net.graph.input_shape
    plain = isinstance(shape, (tuple, list)) and all(isinstance(size, int) for size in shape)
    if not plain or (net.position.device.type == "cpu" and net.graph.macs() > _SLOW):
        return None
    if any(len(recording.inputs) != 1 or recording.caches for recording in recordings):
        return None
    chains = [_chain(recording, net) for recording in recordings]
    for count in range(min(map(len, chains)), 0, -1):
        paths, *others = ([path for path, _ in chain[:count]] for chain in chains)
        with contextlib.suppress(Exception):  # the code around those modules may want more of them than a chain gives
            stem = Stem(net, paths, chains[-1][count - 1][1])
            if all(other == paths for other in others) and not _tied(stem) and _is_same(stem):
                return stem
    return None


def _chain(recording: Recording, net: Supernet) -> list[tuple[str, int]]:
    """Layers at the start of a pass, each fed by the one before alone, that no gate reaches; and their outputs."""
    gated = {fold.tensor for fold in net.graph.hard_folds}
    known = {path for path, module in net.model.named_modules() if _is_known(module)}
    chain: list[tuple[str, int]] = []
    fed = recording.inputs[0]
    for path, group in itertools.groupby(recording.ops, lambda op: op.path):
        ops = list(group)
        inside = [op.outs[0] for op in ops if len(op.outs) == 1 and op.outs[0] is not None]
        names = {value: recording.tensors.get(value) for op in ops for value in op.inputs()}
        strange = any(name is None and value not in (fed, *inside) for value, name in names.items())
        own = [value for value in inside if value not in recording.tensors]
        if path not in known or strange or gated & {*names.values()} or len(inside) < len(ops) or not own:
            break
        fed = own[-1]
        chain.append((path, fed))
    return chain


def _tied(stem: Stem) -> bool:
    """True if a parameter of the stem is one of the rest, too."""
    rest = {id(parameter) for parameter in stem.rest.parameters()}
    return any(id(parameter) in rest for part in stem.parts for parameter in part.parameters())


def _is_known(module: nn.Module) -> bool:
    """True if a module is torch's own and has no hooks: it computes what its ops say, and no more."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return type(module).__module__.startswith("torch.nn.modules.") and not any(getattr(module, name) for name in hooks)


def _is_same(stem: Stem) -> bool:
    """True if two sub-networks give the same outputs and gradients both ways, on copies with other weights."""
    net, device = stem.net, stem.net.position.device
    wide, dice = widest(device), torch.Generator().manual_seed(0)
    x = torch.randn(2, *net.graph.input_shape, generator=dice, dtype=wide).to(device)
    twin = copy.deepcopy(net, {id(net.graph): net.graph} | python_modules(net)).to(wide).train()
    with torch.no_grad():
        for weight in twin.weights():
            weight.add_(0.1 * torch.randn(weight.shape, generator=dice, dtype=wide).to(device))
    undivided = _outputs_and_gradients(copy.deepcopy(twin, {id(net.graph): net.graph} | python_modules(twin)), None, x)
    own = Stem(twin, stem.paths, stem.value)
    before = _plain_state(own.rest)
    divided = _outputs_and_gradients(twin, own, x)
    buffers = dict(twin.model.named_buffers())
    replaced = any(buffer is not buffers.get(name, buffer) for name, buffer in own.rest.named_buffers())
    if replaced or before != _plain_state(own.rest):
        return False  # a forward counts, or put another tensor in the place of a buffer: that would get lost
    bound = 1e-6 if wide is torch.float64 else 1e-3
    return all(
        a.shape == b.shape and bool((a - b).abs().max() <= bound * (1e-9 + b.abs().max()))
        for a, b in zip(divided, undivided, strict=True)
    )


def _outputs_and_gradients(net: Supernet, stem: Stem | None, x: Tensor) -> list[Tensor]:
    """Outputs of two sub-networks, and the gradients of a sum over both."""
    found: list[Tensor] = []
    with torch.random.fork_rng([x.device] if x.device.type == "cuda" else []):
        torch.manual_seed(0)
        h = stem.head(x) if stem else None
        given = None if h is None else h.detach().requires_grad_(h.requires_grad)
        for gates in (net.hard(net.graph.full), net.hard(net.min_widths)):
            out = net(x, gates) if stem is None or given is None else stem.tail(x, given, net.fold(gates))
            outputs = tensors_in(out)
            found += [tensor.detach().clone() for tensor in outputs]
            ends = -_LARGE_GRADIENT, _LARGE_GRADIENT
            ramps = [torch.linspace(*ends, one.numel(), dtype=one.dtype, device=x.device) for one in outputs]
            torch.autograd.backward([(one.flatten() * ramp).sum() for one, ramp in zip(outputs, ramps, strict=True)])
        if h is not None and given is not None and given.grad is not None:
            torch.autograd.backward(h, given.grad)
    return found + [torch.zeros_like(one) if one.grad is None else one.grad / _LARGE_GRADIENT for one in net.weights()]


def _plain_state(model: nn.Module) -> list[dict[str, Any]]:
    """Numbers and texts that the modules of a network keep."""
    kinds = (int, float, str)
    return [{name: it for name, it in vars(module).items() if type(it) in kinds} for module in modules_of(model)]
