"""Least squares after a cut: the weights that are left make up for the channels that are gone."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from dmcp.errors import DataError
from dmcp.runtime.batches import device_of, generator, input_of, on_device, size_of, widest
from dmcp.runtime.distributed import current, gather, share_tensors
from dmcp.tracing.graph import ChannelGraph, Kept
from dmcp.tracing.modules import (
    Cut,
    call_model,
    join_batches,
    kept_modes,
    modules_of,
    narrow,
    split_batch,
    unwrap,
    without_autocast,
)

SAMPLES = 512  # that are run through both networks, fewer where their activations would take too much memory
_MEMORY = 2**31  # bytes of the largest activations of all samples
_CHUNK = 32  # samples that the unpruned network runs at once
_ROWS = 16  # equations for each unknown of an output
_FEWEST_ROWS = 1024
_MOST_ROWS = 16384
_MOST_UNKNOWNS = 4608  # inputs of an output, as of 3 x 3 filters with 512 channels; larger layers stay as they are
_RIDGES = (0.003, 0.03, 0.3, 3.0)  # how strongly weights are held, relative to the mean square of what they read
_HELD_OUT = 0.2  # share of the samples that decide between these
_EQUAL = 1e-8  # share of the outputs' squares that are missing, below which a layer stays as it is


@dataclass(frozen=True, eq=False)
class Target:
    """What a layer should give."""

    positions: Tensor  # of each sample, in the flattened outputs. (P,)
    outputs: Tensor  # of the model at these positions. (N, P, out)


def refitted(model: nn.Module, graph: ChannelGraph, kept: Mapping[str, Kept], batches: Sequence[Any]) -> nn.Module:
    """A copy of the model that gives the network of `reconstruct` when these channels are cut out of it.

    Without batches on the first rank, or if nothing is cut, the model itself.
    """
    sizes = [len(indices) for indices in graph.kept(kept).values()]
    has_batches = gather(bool(batches), current())[0]
    if not has_batches or sizes == [space.size for space in graph.spaces]:
        return model
    model = unwrap(model)
    cuts = graph.cuts(kept)
    small = narrow(model, cuts, graph.attributes(kept))
    reconstruct(small, model, graph, kept, batches)
    copied = narrow(model, {}, {})
    parameters = dict(small.named_parameters())
    with torch.no_grad():
        for name, parameter in copied.named_parameters():
            indices = []
            for size, rows in zip(parameter.shape, cuts.get(name, (None,) * parameter.ndim), strict=True):
                if rows is None:
                    rows = torch.arange(size)
                indices.append(rows.to(parameter.device))
            parameter[torch.meshgrid(*indices, indexing="ij")] = parameters[name]
    return copied


@without_autocast
@torch.no_grad()
def reconstruct(
    small: nn.Module, model: nn.Module, graph: ChannelGraph, kept: Mapping[str, Kept], batches: Iterable[Any]
) -> None:
    """Refit the weights of a cut network, so that each of its layers gives nearly what it gave in the model.

    From the first layer to the last, each convolution and linear layer gets the weights and the bias that come nearest
    to the outputs of the same layer of the model on up to 512 samples: by least squares, with a penalty on changes (as
    in He et al., Channel Pruning for Accelerating Very Deep Neural Networks, 2017). No labels, no loss and no gradients
    are used. The network is changed in place, and its BatchNorms must be calibrated afterwards.
    """
    small = unwrap(small)
    model = unwrap(model)
    device = device_of(small)
    world = current()
    if world.first:
        x = on_device(_first_samples(batches, _sample_count(graph)), device)
        layers = _layers_to_fit(small)
        with kept_modes(model), kept_modes(small):
            model.eval()
            small.eval()
            targets = _outputs_of_model(model, layers, x)
            _fit_in_order(small, layers, targets, graph.cuts(kept), x)
    share_tensors([*small.parameters()], world)


def _sample_count(graph: ChannelGraph) -> int:
    """How many samples are run at once."""
    return max(1, min(SAMPLES, _MEMORY // max(1, graph.memory())))


def _first_samples(batches: Iterable[Any], count: int) -> Any:
    """The inputs of the first samples, as one batch."""
    parts: list[Any] = []
    missing = count
    for batch in batches:
        if size_of(batch):
            part = next(split_batch(input_of(batch), missing))
            parts.append(part)
            missing -= size_of((part,))
        if missing <= 0:
            break
    if not parts:
        raise DataError("A reconstruction needs at least one batch, but the loader gave none.")
    return join_batches(parts)


def _layers_to_fit(small: nn.Module) -> list[str]:
    """The names of the layers whose weights are theirs alone, and may change."""
    users: dict[Tensor, int] = {}
    for module in modules_of(small):
        for parameter in module.parameters(recurse=False):
            users[parameter] = users.get(parameter, 0) + 1
    names: list[str] = []
    for name, module in small.named_modules():
        if type(module) not in (nn.Conv1d, nn.Conv2d, nn.Linear):  # a subclass may compute something else
            continue
        pads_with_zeros = getattr(module, "padding_mode", "zeros") == "zeros"
        may_change = all(users[parameter] == 1 and parameter.requires_grad for parameter in module.parameters())
        if pads_with_zeros and may_change and _unknowns(module) <= _MOST_UNKNOWNS:
            names.append(name)
    return names


def _unknowns(layer: nn.Module) -> int:
    """How many weights an output of a layer has."""
    return layer.get_parameter("weight")[0].numel()


def sample_chunks(batches: Iterable[Any], graph: ChannelGraph, device: torch.device) -> list[Any]:
    """The samples that networks are refitted on, in parts of a few."""
    x = on_device(_first_samples(batches, _sample_count(graph)), device)
    return list(split_batch(x, _CHUNK))


# what the layers should give


def _outputs_of_model(model: nn.Module, names: Iterable[str], x: Any) -> dict[str, Target]:
    """What each of these layers gives in the unpruned network."""
    samples = size_of((x,))
    positions: dict[str, Tensor] = {}
    parts: dict[str, list[Tensor]] = {name: [] for name in names}

    def keep(name: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        has_samples = output.ndim >= layer.get_parameter("weight").ndim
        if not has_samples or not inputs:  # hooks do not see an input that is passed by keyword
            return
        outputs = _by_position(layer, output)
        if name not in positions:
            positions[name] = _choose_positions(layer, outputs.shape[1], samples)
        parts[name].append(outputs[:, positions[name].to(outputs.device)])

    with ExitStack() as hooks:
        for name in parts:
            layer = model.get_submodule(name)
            hooks.callback(layer.register_forward_hook(functools.partial(keep, name)).remove)
        for chunk in split_batch(x, _CHUNK):
            call_model(model, chunk)

    targets: dict[str, Target] = {}
    for name, outputs_of_chunks in parts.items():
        outputs = torch.cat(outputs_of_chunks) if outputs_of_chunks else torch.empty(0)
        if len(outputs) == samples:  # else the layer ran several times, or not at all
            targets[name] = Target(positions[name], outputs)
    return targets


def _by_position(layer: nn.Module, values: Tensor) -> Tensor:
    """Inputs or outputs of a layer, with one row for each position of a sample. -> (N, P, channels)"""
    if isinstance(layer, nn.Linear):
        return values.reshape(len(values), -1, values.shape[-1])
    return values.flatten(2).transpose(1, 2)


def _choose_positions(layer: nn.Module, count: int, samples: int) -> Tensor:
    """Some of the positions of a sample, in a random order that is always the same. -> (P,)"""
    rows = min(_MOST_ROWS, max(_FEWEST_ROWS, _ROWS * _unknowns(layer)))
    return torch.randperm(count, generator=generator(count))[: math.ceil(rows / samples)]


# least squares


def _fit_in_order(
    small: nn.Module, names: Iterable[str], targets: Mapping[str, Target], cuts: Mapping[str, Cut], x: Any
) -> None:
    """Run the cut network once on all samples; each layer is fitted when its inputs are there, before it runs."""

    def fit(name: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        target = targets[name]
        outputs = target.outputs
        kept = cuts.get(f"{name}.weight", (None,))[0]
        if kept is not None:
            outputs = outputs[..., kept.to(outputs.device)]
        _fit_layer(layer, _patches(layer, inputs[0], target.positions), outputs)

    with ExitStack() as undo:
        for name in names:
            if name in targets:
                layer = small.get_submodule(name)
                undo.callback(layer.register_forward_pre_hook(functools.partial(fit, name)).remove)
        if size_of((x,)) > 1:
            _normalize_by_batch(small, undo)
        call_model(small, x)


def _normalize_by_batch(small: nn.Module, undo: ExitStack) -> None:
    """Let BatchNorms normalize by the samples that they see, as they will after their calibration."""
    for module in modules_of(small):
        is_alone = not isinstance(module, nn.SyncBatchNorm)  # which would wait for other ranks
        if isinstance(module, _BatchNorm) and module.running_mean is not None and is_alone:
            for statistics in module.buffers(recurse=False):
                undo.callback(statistics.copy_, statistics.clone())
            module.training = True


def _patches(layer: nn.Module, values: Tensor, positions: Tensor) -> Tensor:
    """What a layer reads for an output at each of these positions of all samples. -> (groups, N, P, unknowns)"""
    positions = positions.to(values.device)
    if isinstance(layer, nn.Linear):
        return _by_position(layer, values)[None, :, positions]
    assert isinstance(layer, nn.Conv1d | nn.Conv2d)
    padded = F.pad(values, layer._reversed_padding_repeated_twice)

    # Where each output begins to read, and where its taps are from there, as numbers of the flattened input.
    starts = torch.zeros_like(positions)
    taps = torch.zeros(1, dtype=torch.int64, device=values.device)
    left = positions
    pixels = 1  # between neighbours along the dim
    for dim in reversed(range(len(layer.kernel_size))):
        kernel, stride, dilation = layer.kernel_size[dim], layer.stride[dim], layer.dilation[dim]
        size = padded.shape[2 + dim]
        outputs = (size - dilation * (kernel - 1) - 1) // stride + 1
        starts = starts + left % outputs * stride * pixels
        left = left // outputs
        along = torch.arange(kernel, device=values.device) * dilation * pixels
        taps = (along[:, None] + taps).flatten()
        pixels *= size
    read = padded.flatten(2)[:, :, starts[:, None] + taps]  # (N, channels, P, taps)
    samples, channels, count, size = read.shape
    by_group = read.reshape(samples, layer.groups, channels // layer.groups, count, size).permute(1, 0, 3, 2, 4)
    return by_group.reshape(layer.groups, samples, count, -1)


def _fit_layer(layer: nn.Module, patches: Tensor, outputs: Tensor) -> None:
    """Move the weights towards those that give these outputs. (groups, N, P, unknowns), (N, P, out)"""
    exact = widest(patches.device)
    weight = layer.get_parameter("weight")
    bias = layer.bias
    groups, samples, positions, unknowns = patches.shape
    patches = patches.to(exact).reshape(groups, samples * positions, unknowns)
    outputs = outputs.to(exact).reshape(samples * positions, groups, -1).transpose(0, 1)  # (groups, rows, out)
    missing = outputs - patches @ weight.to(exact).reshape(groups, -1, unknowns).mT
    if isinstance(bias, Tensor):
        missing = missing - bias.to(exact).reshape(groups, 1, -1)
    fitted_rows = math.ceil(samples * (1 - _HELD_OUT)) * positions
    is_equal = missing.square().sum() <= _EQUAL * outputs.square().sum()
    if is_equal or fitted_rows == samples * positions:
        return

    # A bias can take over all constant differences, so that weights explain the others.
    mean_patches = torch.zeros_like(patches[:, :1])
    mean_missing = torch.zeros_like(missing[:, :1])
    if isinstance(bias, Tensor):
        mean_patches = patches[:, :fitted_rows].mean(dim=1, keepdim=True)
        mean_missing = missing[:, :fitted_rows].mean(dim=1, keepdim=True)
    change = _choose_change(patches - mean_patches, missing - mean_missing, fitted_rows)

    weight.add_(change.mT.reshape(weight.shape))
    if isinstance(bias, Tensor):
        bias.add_((mean_missing - mean_patches @ change).flatten())


def _choose_change(patches: Tensor, missing: Tensor, fitted_rows: int) -> Tensor:
    """The change of the weights that explains best what the outputs lack. -> (groups, unknowns, out)

    The rows behind the fitted ones are those of the last fifth of the samples. They decide how strongly weights are
    held where they are, and how far they move: where there are few samples, a free fit would suit these samples only.
    """
    read = patches[:, :fitted_rows]
    squares = read.mT @ read
    products = read.mT @ missing[:, :fitted_rows]
    scale = squares.diagonal(dim1=1, dim2=2).mean(dim=1).clamp(min=1e-12)

    read_held_out = patches[:, fitted_rows:]
    missing_held_out = missing[:, fitted_rows:]
    change = torch.zeros_like(products)
    least = missing_held_out.square().sum()
    for ridge in _RIDGES:
        penalty = torch.diag_embed((ridge * scale)[:, None].expand(squares.shape[:2]))
        trial = torch.linalg.solve(squares + penalty, products)
        explained = read_held_out @ trial
        share = ((explained * missing_held_out).sum() / explained.square().sum().clamp(min=1e-30)).clamp(0, 1)
        left = (missing_held_out - share * explained).square().sum()
        if left < least:
            least = left
            change = share * trial
    return change
