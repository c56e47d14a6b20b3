"""Cut a model to given widths, and initialize what was cut."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dmcp.arguments import Seed, checked
from dmcp.errors import WidthsError
from dmcp.runtime.batches import as_generator
from dmcp.searching.importance import Scores, norms, strongest
from dmcp.tracing.graph import ChannelGraph, Kept
from dmcp.tracing.modules import modules_of, narrow, unwrap, without_autocast
from dmcp.tracing.widths import Widths, fingerprint
from dmcp.training.reconstruction import reconstruct

Convs = nn.Conv1d | nn.Conv2d | nn.Conv3d | nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
RunningNorms = nn.modules.batchnorm._NormBase  # batch and instance norms, the ones with running statistics
Norms = RunningNorms | nn.LayerNorm | nn.GroupNorm | nn.RMSNorm


@checked
@without_autocast
def cut(
    model: nn.Module,
    graph: ChannelGraph,
    widths: Mapping[str, Kept],
    by: Literal["first", "l1", "l2"] | Mapping[str, Tensor] = "first",
    batches: Iterable[Any] | None = None,
) -> nn.Module:
    """A copy of the model that has only the kept channels: a plain module of the model's own class.

    by: which channels are kept. "first" is for supernets, whose first channels are the important ones. For a model that
    was trained without a search, give the scores of `importance(model, graph, batches)`; without data, "l1" and "l2"
    keep the channels with the largest filters. Instead of a number, the widths may give a list of the indices to keep;
    spaces that they do not name keep all channels. The cut network is replayed, and a CutError is raised if it does not
    do what the graph predicts.

    batches: refits the weights of a trained model, on up to 512 samples. From the first layer to the last, each
    convolution and linear layer gets the weights that come nearest to its outputs before the cut. This takes seconds,
    needs no labels, and leaves a network that loses much less; calibrate its BatchNorms afterwards (`recalibrate`).
    """
    model = unwrap(model)
    graph.check_architecture(model)
    if isinstance(widths, Widths) and widths.fingerprint != graph.fingerprint:
        raise WidthsError("These widths are for another architecture: make them with graph.widths(...).")
    if isinstance(by, Mapping):
        widths = highest_scores(graph, widths, by)
    elif by != "first":
        widths = highest_scores(graph, widths, norms(model, graph, power=int(by[1])))
    small = narrow(model, graph.cuts(widths), graph.attributes(widths))
    graph.check(small, widths)
    if batches is not None:
        reconstruct(small, model, graph, widths, batches)
    return small


def highest_scores(graph: ChannelGraph, widths: Mapping[str, Kept], scores: Scores) -> dict[str, Kept]:
    """The widths with numbers of channels replaced by the indices of those that have the highest scores."""
    chosen = dict(widths)
    for space in graph.spaces:
        kept = widths.get(space.name)
        if not isinstance(kept, int):
            continue
        score = scores.get(space.name)
        if score is None or score.shape != (space.size,):
            raise WidthsError(
                f"by needs a score for each of the {space.size} channels of {space.name}: use importance(model, graph, "
                "batches) with the same graph."
            )
        chosen[space.name] = strongest(score, kept)
    return chosen


# new weights


@checked
@torch.no_grad()
def reinitialize(module: nn.Module, generator: torch.Generator | Seed | None = None) -> None:
    """Reinitialize the weights of the module in place, as if it had never been trained.

    Convolutions and linear layers are initialized by He's rule; norms get a scale of 1, a shift of 0 and empty running
    statistics; biases become 0. Other
    tensors (position embeddings, layer scales, ...) stay, and so do frozen parameters, and the statistics of norms that
    have no others.
    """
    module = unwrap(module)
    generator = as_generator(generator)
    frozen = {name: tensor.clone() for name, tensor in _frozen(module).items()}
    initialized: set[Tensor] = set()  # a tied parameter belongs to the first module that has it
    for part in modules_of(module):
        if not isinstance(part, Convs | nn.Linear | Norms):
            continue
        new = {}
        for name, parameter in part.named_parameters(recurse=False):
            if parameter not in initialized:
                new[name] = parameter
        if isinstance(part, RunningNorms):
            part.reset_running_stats()
        if "weight" in new:
            if isinstance(part, Norms):
                new["weight"].fill_(1)
            else:
                _fill_by_he(new["weight"], part, generator)
        if "bias" in new:
            new["bias"].zero_()
        initialized.update(new.values())

    tensors = named_tensors(module)
    for name, tensor in frozen.items():
        tensors[name].copy_(tensor)


def _fill_by_he(weight: Tensor, layer: Convs | nn.Linear, generator: torch.Generator | None) -> None:
    """Fill the weight with normal numbers of variance 2 / fan: the fan out of a conv, the fan in of a linear."""
    if isinstance(layer, nn.Linear):
        fan = weight.shape[1]
    else:
        fan = weight.numel() // layer.in_channels
    # in float32, where the generator lives: the same numbers on every device and in every dtype
    device = torch.device("cpu")
    if generator is not None:
        device = generator.device
    noise = torch.randn(weight.shape, generator=generator, device=device, dtype=torch.float32)
    weight.copy_(noise.mul_((2 / fan) ** 0.5).to(weight))


def with_frozen(model: nn.Module, source: nn.Module) -> nn.Module:
    """The model, or a copy of it with the tensors that are frozen in the source, which is of the same architecture."""
    model = unwrap(model)
    source = unwrap(source)
    frozen = _frozen(source)
    if model is source or not frozen:
        return model
    if fingerprint(model) != fingerprint(source):
        raise WidthsError("The fresh model has another architecture than the given one.")
    copied = narrow(model, {}, {})
    tensors = named_tensors(copied)
    with torch.no_grad():
        for name, tensor in frozen.items():
            tensors[name].requires_grad_(False).copy_(tensor)
    return copied


def _frozen(module: nn.Module) -> dict[str, Tensor]:
    """Parameters without requires_grad, and the statistics of norms that have no others, by name."""
    frozen: set[Tensor] = {parameter for parameter in module.parameters() if not parameter.requires_grad}
    for part in modules_of(module):
        if isinstance(part, RunningNorms):
            parameters = set(part.parameters(recurse=False))
            if parameters and parameters <= frozen:
                frozen.update(part.buffers(recurse=False))
    return {name: tensor for name, tensor in named_tensors(module).items() if tensor in frozen}


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, also those outside the state dict; tied ones once, under their first name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
