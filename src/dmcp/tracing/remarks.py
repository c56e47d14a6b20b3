"""What trace tells people beside the graph: of values that decide, computed weights, samples that do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from dmcp.tracing.coupling import Coupling
from dmcp.tracing.readings import Read
from dmcp.tracing.recording import Op, Recording, map_leaves, tensors_in

_SOME = 3  # places or layers that are named; the rest is counted
_OLD_NORMS = {"WeightNorm": "remove_weight_norm", "SpectralNorm": "remove_spectral_norm"}  # hooks of torch.nn.utils
_USUAL = (224, 224)
_UNCOUNTED = "; what is computed between leaving torch and coming back is not counted in macs and memory"


# values that forward reads


def note_reads(model: nn.Module, recordings: Sequence[Recording]) -> str:
    """That another input may take another way, which nobody has seen; empty if forward reads nothing of its input."""
    places = _places((it, it.reads) for it in recordings)
    if not places:
        return ""
    return (
        f"forward turns values that depend on its input into Python values ({places}): another input may take "
        "another way, which was not seen, and a cut network is only right for inputs that take this one"
        f"{_UNCOUNTED if any(map(_comes_back, recordings)) else ''}{_asleep(model, recordings)}"
    )


def note_sizes(model: nn.Module, recordings: Sequence[Recording]) -> str:
    """That shapes and macs are those of the example; empty if no size follows from values of the input."""
    places = _places((it, it.sizes) for it in recordings)
    if not places:
        return ""
    return (
        f"forward makes tensors whose size depends on values of its input ({places}): macs are those of this example, "
        "and code that asks for such a size may take another way with another input, which was not seen"
        f"{_asleep(model, recordings)}"
    )


def _places(reads: Iterable[tuple[Recording, Sequence[Read]]]) -> str:
    """Where values of the input are read."""
    return _listed(dict.fromkeys(read.where for recording, all_ in reads for read in _of_input(recording, all_)))


def _comes_back(recording: Recording) -> bool:
    """Whether tensors were made of values of the input that had left torch, as far as anybody can tell."""
    own, constants = recording.own(), set(recording.constants)
    return any(value in constants and value not in own for op in recording.ops for value in op.inputs())


def _asleep(model: nn.Module, recordings: Sequence[Recording]) -> str:
    layers = _not_run(model, recordings)
    return f"; layers that were not run: {_listed(layers)}" if layers else ""


def _of_input(recording: Recording, reads: Sequence[Read]) -> list[Read]:
    """Those that another input would have given other values."""
    depends, found, done = set(recording.inputs), [], 0
    for read in reads:
        for op in recording.ops[done : read.number]:
            if not depends.isdisjoint(_sources(op)):
                depends.update(value for value in op.outs if value is not None)
        done = read.number
        if not depends.isdisjoint(read.values):
            found.append(read)
    return found


def _sources(op: Op) -> list[int]:
    """The values whose numbers, not only their shape or dtype, an op takes."""
    if op.name.endswith("_like") or op.name.startswith("new_"):
        return []
    return op.inputs()[:1] if op.name.endswith("_as") else op.inputs()


def _not_run(model: nn.Module, recordings: Sequence[Recording]) -> list[str]:
    """Layers with parameters, none of which any op took."""
    used = {recording.tensors.get(value) for recording in recordings for op in recording.ops for value in op.inputs()}
    first = {id(parameter): name for name, parameter in model.named_parameters()}  # a tied one has one name
    return [
        path
        for path, module in model.named_modules()
        if (own := list(module.parameters(recurse=False))) and not any(first[id(item)] in used for item in own)
    ]


def keep_read_whole(coupling: Coupling) -> None:
    """Channels of tensors that leave torch without an op stay whole."""
    for recording, layouts in zip(coupling.recordings, coupling.layouts, strict=True):
        for read in recording.reads:
            for value in read.values:
                for layout in layouts[value]:
                    coupling.channels.freeze(layout, f"its values are read by {read.way} ({read.where})")


# weights that are computed


def ways_to_plain_weights(model: nn.Module) -> dict[str, str]:
    """Layers whose weights torch computes by a parametrization or a hook, and the call that undoes it."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        if parametrize.is_parametrized(module):
            first = next(iter(module.parametrizations))
            found[path] = f"torch.nn.utils.parametrize.remove_parametrizations(layer, {first!r})"
        for hook in module._forward_pre_hooks.values():
            kind = type(hook)
            if kind.__name__ in _OLD_NORMS and kind.__module__.startswith("torch.nn.utils."):
                found[path] = f"torch.nn.utils.{_OLD_NORMS[kind.__name__]}(layer)"
    return found


def with_way_out(reason: str, plain: dict[str, str]) -> str:
    """A reason, and what to do where a computed weight is behind it."""
    for path, undo in plain.items():
        if f" at {path})" in reason or f" at {path}.parametrizations." in reason:
            return f"{reason}, as the weight of {path} is computed: undo that before pruning with {undo}"
    return reason


# samples


def misfit(model: nn.Module, example: Any, recording: Recording | None = None) -> str:
    """What a sample should be, where forward failed or took a batch of lines for an image; empty if it is one."""
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    first = next((module for module in model.modules() if isinstance(module, convolutions)), None)
    if not isinstance(example, Tensor) or not isinstance(first, nn.Conv2d) or example.ndim == 4:
        return ""
    if recording is not None and not _is_one_image(recording):
        return ""
    given = tuple(example.shape[1:])
    height, width = given[-2:] if len(given) > 1 else _USUAL
    return (
        f"one sample for the convolutions of this model is channels x height x width, as in "
        f"{first.in_channels}x{height}x{width}, not {'x'.join(map(str, given)) or 'a number'}"
    )


def _is_one_image(recording: Recording) -> bool:
    """Whether a convolution took the whole input as one image without a batch, which torch allows."""
    return any(op.name == "conv2d" and op.inputs()[0] in recording.inputs for op in recording.ops)


def other_numbers(model: nn.Module, example: Any, run: Callable[[Any], Any]) -> str:
    """What an example on which a model failed holds instead of the model's kind of numbers, and what to do.

    Empty if that is not what was wrong: with its own kind of numbers the model runs.
    """
    own = {it.dtype for it in model.parameters() if it.is_floating_point()}
    given = {it.dtype for it in tensors_in(example)} - own
    if len(own) != 1 or len(given) != 1:
        return ""
    wanted, held = own.pop(), given.pop()
    try:
        run(map_leaves(lambda leaf: leaf.to(wanted) if isinstance(leaf, Tensor) else leaf, example))
    except Exception:
        return ""
    way = f"convert it, with x.to({wanted}), and scale it as the model expects: bytes of images by 1 / 255"
    if held.is_floating_point:
        way = f"convert one of them, with x.to({wanted}) or model.to({held})"
    kinds = (str(it).removeprefix("torch.") for it in (held, wanted))
    return "{}, the weights of the model {}: {}".format(*kinds, way)


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    more = f" and {len(every) - _SOME} more" if len(every) > _SOME else ""
    return ", ".join(every[:_SOME]) + more
