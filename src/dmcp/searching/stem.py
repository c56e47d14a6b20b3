"""The stem: first layers that no gate reaches, run once for all sub-networks of a step."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dmcp.runtime.batches import widest
from dmcp.searching.supernet import Supernet, skip, skipped_name
from dmcp.tracing.folds import run_folded
from dmcp.tracing.modules import modules_of, python_modules, tensors_in
from dmcp.tracing.record import Recording

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
        return run_folded(self.rest, x, folded | {skipped_name(self.paths): h})

    def fits(self, x: Any) -> bool:
        """True if an input has the traced shape: at another size the network may do other things."""
        return isinstance(x, Tensor) and tuple(x.shape[1:]) == tuple(self.net.graph.input_shape)


def find_stem(net: Supernet) -> Stem | None:
    """The longest stem that leaves outputs and gradients in train mode as they are, or None."""
    recordings = net.graph.recordings
    shape = net.graph.input_shape
    if not isinstance(shape, (tuple, list)) or not all(isinstance(size, int) for size in shape):
        return None  # the input is not one tensor
    if net.position.device.type == "cpu" and net.graph.macs() > _SLOW:
        return None
    if any(len(recording.inputs) != 1 or recording.caches for recording in recordings):
        return None

    # The passes in eval and in train mode must begin with the same layers. The longest chain is tried first.
    chains = [_first_layers(recording, net) for recording in recordings]
    for length in range(min(map(len, chains)), 0, -1):
        paths_of_passes = [[path for path, _ in chain[:length]] for chain in chains]
        paths = paths_of_passes[0]
        if any(paths_of_pass != paths for paths_of_pass in paths_of_passes):
            continue
        _, value = chains[-1][length - 1]
        with contextlib.suppress(Exception):  # the code around those modules may want more of them than a chain gives
            stem = Stem(net, paths, value)
            if not _shares_parameters(stem) and _is_same(stem):
                return stem
    return None


def _first_layers(recording: Recording, net: Supernet) -> list[tuple[str, int]]:
    """Layers at the start of a pass, each fed by the one before alone, that no gate reaches; and their outputs."""
    gated = {fold.tensor for fold in net.graph.hard_folds}
    modules = dict(net.model.named_modules())
    layers: list[tuple[str, int]] = []
    fed_by = recording.inputs[0]
    for path, ops_of_module in itertools.groupby(recording.ops, lambda op: op.path):
        # A layer of torch's own, whose ops have one output each.
        ops = list(ops_of_module)
        written = [op.outs[0] for op in ops if len(op.outs) == 1 and op.outs[0] is not None]
        activations = [value for value in written if value not in recording.tensors]
        if path not in modules or not _is_plain(modules[path]) or len(written) < len(ops) or not activations:
            break

        # It reads the layer before it, its own values, and tensors of the network that have no gates.
        allowed = {fed_by, *written}
        for op in ops:
            for value in op.inputs():
                if value in recording.tensors:
                    if recording.tensors[value] in gated:
                        return layers
                elif value not in allowed:
                    return layers
        fed_by = activations[-1]
        layers.append((path, fed_by))
    return layers


def _shares_parameters(stem: Stem) -> bool:
    """True if a parameter of the stem is one of the rest, too."""
    rest = {id(parameter) for parameter in stem.rest.parameters()}
    return any(id(parameter) in rest for part in stem.parts for parameter in part.parameters())


def _is_plain(module: nn.Module) -> bool:
    """True if a module is torch's own and has no hooks: it computes what its ops say, and no more."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return type(module).__module__.startswith("torch.nn.modules.") and not any(getattr(module, name) for name in hooks)


def _is_same(stem: Stem) -> bool:
    """True if two sub-networks give the same outputs and gradients both ways, on copies with other weights."""
    net = stem.net
    device = net.position.device
    dtype = widest(device)
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(2, *net.graph.input_shape, generator=dice, dtype=dtype).to(device)
    undivided_net = _copy_of(net).to(dtype).train()
    with torch.no_grad():
        for weight in undivided_net.weights():
            weight.add_(0.1 * torch.randn(weight.shape, generator=dice, dtype=dtype).to(device))
    divided_net = _copy_of(undivided_net)

    undivided = _outputs_and_gradients(undivided_net, None, x)
    divided_stem = Stem(divided_net, stem.paths, stem.value)
    before = _plain_state(divided_stem.rest)
    divided = _outputs_and_gradients(divided_net, divided_stem, x)

    # A forward that counts, or puts another tensor in the place of a buffer, does so in `rest`, where it gets lost.
    buffers = dict(divided_net.model.named_buffers())
    replaced = any(buffer is not buffers.get(name, buffer) for name, buffer in divided_stem.rest.named_buffers())
    if replaced or before != _plain_state(divided_stem.rest):
        return False
    tolerance = 1e-6 if dtype is torch.float64 else 1e-3
    return all(_is_close(a, b, tolerance) for a, b in zip(divided, undivided, strict=True))


def _copy_of(net: Supernet) -> Supernet:
    """A deep copy that shares the graph, which never changes, and what must not be copied."""
    return copy.deepcopy(net, {id(net.graph): net.graph} | python_modules(net))


def _is_close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether two tensors differ by no more than a share of the largest number."""
    return a.shape == b.shape and bool((a - b).abs().max() <= tolerance * (1e-9 + b.abs().max()))


def _outputs_and_gradients(net: Supernet, stem: Stem | None, x: Tensor) -> list[Tensor]:
    """Outputs of two sub-networks, and the gradients of a sum over both."""
    results: list[Tensor] = []
    with torch.random.fork_rng([x.device] if x.device.type == "cuda" else []):
        torch.manual_seed(0)
        stem_output = None
        h = None
        if stem is not None:
            stem_output = stem.head(x)
            h = stem_output.detach().requires_grad_(stem_output.requires_grad)
        for gates in (net.hard(net.graph.full), net.hard(net.min_widths)):
            if stem is None or h is None:
                output = net(x, gates)
            else:
                output = stem.tail(x, h, net.fold(gates))
            losses: list[Tensor] = []
            for tensor in tensors_in(output):
                results.append(tensor.detach().clone())
                ramp = torch.linspace(
                    -_LARGE_GRADIENT, _LARGE_GRADIENT, tensor.numel(), dtype=tensor.dtype, device=x.device
                )
                losses.append((tensor.flatten() * ramp).sum())
            torch.autograd.backward(losses)
        if stem_output is not None and h is not None and h.grad is not None:
            torch.autograd.backward(stem_output, h.grad)
    for weight in net.weights():
        gradient = torch.zeros_like(weight)
        if weight.grad is not None:
            gradient = weight.grad / _LARGE_GRADIENT
        results.append(gradient)
    return results


def _plain_state(model: nn.Module) -> list[dict[str, Any]]:
    """Numbers and texts that the modules of a network keep."""
    states = []
    for module in modules_of(model):
        states.append({name: value for name, value in vars(module).items() if type(value) in (int, float, str)})
    return states
