"""Check that the cut network computes what the gated one does: same outputs and gradients on real numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from dmcp.arguments import checked
from dmcp.errors import CutError, TraceError
from dmcp.tracing.folds import FoldTable, run_folded, shared_names, under_all_names
from dmcp.tracing.graph import ChannelGraph, Kept
from dmcp.tracing.modules import (
    Cut,
    batch_of,
    call_model,
    index,
    map_leaves,
    narrow,
    reason_of,
    rebatch,
    tensors_in,
    unwrap,
    without_autocast,
)
from dmcp.tracing.record import Func, aten, check_example
from dmcp.tracing.replay import find_guilty
from dmcp.tracing.widths import ChannelSpace
from dmcp.tracing.world import Guard, untouched_world

_SAME = 1e-6  # largest difference that rounding explains in float64, as a share of the largest number
_CLOSE = 1e-2  # the same in the model's own precision
_SMALL = 1e-3  # gradients are compared with their own largest number, but with no less than this share of all


@checked
@without_autocast
def verify(
    model: nn.Module, graph: ChannelGraph, example_input: Any, widths: Mapping[str, Kept] | None = None
) -> float:
    """Compare the cut network with the gated one, and raise a CutError if they differ.

    `trace` does this automatically. Use `verify` for other widths (whatever `cut` takes), or for other inputs than the
    traced one, such as a larger image. The networks run in float64 if the model can. Outputs are compared in eval mode,
    outputs and gradients in train mode; random numbers, such as those of dropout, are replaced by constants. Returns
    the largest difference between outputs, as a share of the largest output.
    """
    model = unwrap(model)
    check_example(example_input)
    graph.check_architecture(model)
    _check_stands_alone(model, example_input)
    kept = _some_channels(graph.spaces) if widths is None else widths
    difference = _compare(model, graph, example_input, kept)
    if difference.is_real:
        raise CutError(
            f"{difference.text}: something in this model's code escapes the trace. Name the layers in question in "
            "trace(..., ignore=[...])."
        )
    return difference.outputs


def _check_stands_alone(model: nn.Module, example: Any) -> None:
    """Refuse a model whose copies use its own tensors: a copy in train mode would change the model's statistics."""
    twin = narrow(model, {}, {}).eval()
    try:
        with untouched_world("cpu", model), torch.no_grad(), Guard(model):
            call_model(twin, tree_map_only(Tensor, torch.clone, example))
    except TraceError:
        raise
    except Exception:  # the comparison says why it does not run
        return


def find_unequal(model: nn.Module, graph: ChannelGraph, example: Any) -> tuple[list[ChannelSpace], str]:
    """The spaces that cannot be cut without changing what the gated network computes, and what changes.

    Where forward does not look at values, an example of a single number (such as zeros, which would hide every
    difference) is replaced. Spaces are halved until single ones are found; most models take one comparison.
    """
    looks_at_values = any(recording.reads for recording in graph.recordings)
    trial = example
    if batch_of(example) is not None and not looks_at_values:
        trial = map_leaves(_with_variety, rebatch(example, 2))
    compare = partial(_compare, model, graph, scrambled=not looks_at_values)
    try:
        of_all_spaces = compare(trial, _some_channels(graph.spaces))
    except ForwardError:  # the batch size may be written into the model
        trial = example
        of_all_spaces = compare(trial, _some_channels(graph.spaces))
    if of_all_spaces.is_real and compare(trial, {}).is_real:  # though no channel is missing
        raise ForwardError(
            "Two runs of this model on the same input give different numbers, so nothing can be compared."
        )

    def differs(spaces: Sequence[ChannelSpace]) -> bool:
        return compare(trial, _some_channels(spaces)).is_real

    if not of_all_spaces.is_real:
        return [], of_all_spaces.text
    return find_guilty(graph.spaces, differs), of_all_spaces.text


def _some_channels(spaces: Sequence[ChannelSpace]) -> dict[str, list[int]]:
    """Some channels of each space, between a third and three quarters, and not the first ones."""
    dice = Random(0)
    chosen = {}
    for space in spaces:
        fewest, most = max(1, space.size // 3), max(1, 3 * space.size // 4)
        chosen[space.name] = sorted(dice.sample(range(space.size), dice.randint(fewest, most)))
    return chosen


def _with_variety(leaf: Any) -> Any:
    """Numbers between 0 and 1 in place of a constant tensor, which may be a placeholder."""
    if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or not _is_constant(leaf):
        return leaf
    numbers = torch.rand(leaf.shape, generator=torch.Generator().manual_seed(0))
    return numbers.to(leaf)


def _is_constant(tensor: Tensor) -> bool:
    """Whether all numbers of a tensor are the same."""
    return tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all())


# one comparison


class ForwardError(CutError):
    """The unpruned network does not run on this input, or gives nothing that can be compared."""


@dataclass(frozen=True)
class _Difference:
    """The largest differences between the gated and the cut network, as shares of the largest numbers."""

    outputs: float
    gradients: float
    allowed: float  # what rounding explains
    failure: str = ""  # what the cut network raised

    @property
    def is_real(self) -> bool:
        """Whether rounding does not explain the difference. It never explains NaN."""
        if self.failure:
            return True
        is_rounding = self.outputs < self.allowed and self.gradients < self.allowed
        return not is_rounding

    @property
    def text(self) -> str:
        """What differs, and by how much."""
        if self.failure:
            return f"The cut network fails where the gated one does not ({self.failure})"
        if self.outputs < self.allowed:
            quantity = "gradients"
            gap = self.gradients
        else:
            quantity = "outputs"
            gap = self.outputs
        return f"The {quantity} of the cut network and of the gated one differ by {gap:.1e} of the largest number"


def _compare(
    model: nn.Module, graph: ChannelGraph, example: Any, widths: Mapping[str, Kept], scrambled: bool = False
) -> _Difference:
    """Run both networks, in eval mode without gradients and in train mode with them."""
    cuts = graph.cuts(widths)
    space_gates: list[Tensor] = []
    for space, kept in zip(graph.spaces, graph.kept(widths).values(), strict=True):
        space_gates.append(torch.isin(torch.arange(space.size), kept))
    gates = torch.cat(space_gates)
    ops = [op for recording in graph.recordings for op in recording.ops]
    draws_random = any(torch.Tag.nondeterministic_seeded in op.func.tags for op in ops)
    device = next(iter(model.parameters())).device
    if device.type == "mps":  # which has no float64
        device = torch.device("cpu")

    # In float64 rounding hides nothing. Where float32 is written into the model's code, its own precision must do.
    for dtype in (torch.float64, None):
        wide = narrow(model, {}, {}).to(device, dtype)
        if scrambled:
            _scramble(wide, cuts)
        small_model = narrow(wide, cuts, graph.attributes(widths))  # before a run changes what the model keeps
        gated = _Runner(_gated_network(wide, graph, gates.to(device)), wide, model, example, dtype, draws_random)
        try:
            gated_outputs, _ = gated.run(training=False, grad=False)
            break
        except TraceError:
            raise
        except Exception as error:
            if dtype is None:
                raise ForwardError(f"forward fails on this input: {reason_of(error)}") from error
    if gated_outputs and not any(output.isfinite().any() for output in gated_outputs):
        raise ForwardError("On this input the outputs are not finite (NaN or infinite), so nothing can be compared.")

    # Gradients in train mode; in eval mode where the model does not run in that, or only roughly.
    gated_pass: tuple[list[Tensor], dict[str, Tensor]] | None = None
    statistics = [(buffer, buffer.clone()) for buffer in wide.buffers()]
    for training in (True, False) if dtype else (False,):
        try:
            gated_pass = gated.run(training, grad=True)
            break
        except TraceError:
            raise
        except Exception:  # it needs labels or more samples, or cannot be differentiated
            with torch.no_grad():
                for buffer, before in statistics:  # the layers that did run in train mode have changed them
                    buffer.copy_(before)

    # The cut network must do the same.
    allowed = _SAME if dtype else _CLOSE
    gradient_gap = 0.0
    try:
        small = _Runner(partial(call_model, small_model), small_model, model, example, dtype, draws_random)
        small_outputs, _ = small.run(training=False, grad=False)
        gaps = [_gap(gated_outputs, small_outputs)]
        if gated_pass is not None:
            gated_outputs, gated_gradients = gated_pass
            small_outputs, small_gradients = small.run(training, grad=True)
            gaps.append(_gap(gated_outputs, small_outputs))
            expected = [index(gradient, cuts.get(name, ())) for name, gradient in gated_gradients.items()]
            gradient_gap = _gap(expected, list(small_gradients.values()))
    except Exception as error:
        return _Difference(0.0, 0.0, allowed, failure=reason_of(error))
    worst = float(torch.tensor(gaps, dtype=torch.float64).max())  # NaN if one of them is
    return _Difference(worst, gradient_gap, allowed)


@torch.no_grad()
def _scramble(model: nn.Module, cuts: Mapping[str, Cut]) -> None:
    """Add noise, in place, to parameters that would hide differences between the two networks.

    Those are zeros, such as the scale of a residual branch that training starts from 0, and parameters whose channels
    are all alike.
    """
    dice = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            continue
        channels_alike = name in cuts and _is_constant(parameter)
        if channels_alike or not parameter.any():
            noise = torch.rand(parameter.shape, generator=dice, dtype=torch.float64)
            parameter.add_((0.1 + 0.2 * noise).to(parameter))


def _gated_network(wide: nn.Module, graph: ChannelGraph, gates: Tensor) -> Callable[[Any], Any]:
    """The wide network with hard gates, folded into its weights as in the supernet."""
    table = FoldTable(graph.hard_folds, [space.size for space in graph.spaces]).to(gates.device)
    tensors = {**dict(wide.named_parameters()), **dict(wide.named_buffers())}
    if graph.loses_gates:  # then no supernet can be made of it, but it can still be cut
        with torch.no_grad():
            for name, folded in table.fold(tensors.__getitem__, gates).items():
                tensors[name].copy_(folded)
        return partial(call_model, wide)
    ties = shared_names(wide)

    def run(x: Any) -> Any:
        folded = under_all_names(table.fold(tensors.__getitem__, gates), ties)
        return run_folded(wide, x, folded)

    return run


class _Constants(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives constants in place of random numbers, which would differ in a narrow network."""

    def __torch_dispatch__(
        self, func: Func, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        if func in (aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default):
            values, noise = args[:2]
            noise.copy_(torch.where(values > 0, 1.0, 0.2))
            return values * noise if func is aten.rrelu_with_noise.default else values.mul_(noise)
        if func is aten.native_dropout.default:
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        constant = 1.0 if "bernoulli" in func._schema.name else 0.5

        def made_constant(tensor: Tensor) -> Tensor:
            return tensor.fill_(constant) if tensor.is_floating_point() else tensor

        return tree_map_only(Tensor, made_constant, func(*args, **kwargs))


@dataclass(frozen=True)
class _Runner:
    """One of the two networks, and what it runs on."""

    network: Callable[[Any], Any]
    module: nn.Module  # whose parameters and modes are the network's
    original: nn.Module  # the user's model, which must stay as it is
    example: Any
    dtype: torch.dtype | None
    draws_random: bool  # whether random numbers are drawn in forward

    def run(self, training: bool, grad: bool) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Outputs, and with `grad` the gradients of a weighted sum of their squares, by the names of parameters."""
        self.module.train(training)
        with ExitStack() as stack:
            stack.enter_context(untouched_world("cpu", self.original))
            if self.draws_random:  # only then: code can ask whether such a mode is on
                stack.enter_context(_Constants())  # type: ignore[no-untyped-call]
            stack.enter_context(torch.set_grad_enabled(grad))
            outputs = tensors_in(self.network(map_leaves(self._copied, self.example)))
            gradients = self._gradients(outputs) if grad else {}
        return [output.detach() for output in outputs], gradients

    def _copied(self, leaf: Any) -> Any:
        """A copy of a tensor, which forward may write into, in the precision of the network."""
        if not isinstance(leaf, Tensor):
            return leaf
        dtype = self.dtype if leaf.is_floating_point() else None
        device = next(iter(self.module.parameters())).device
        return leaf.detach().to(device, dtype, copy=True)

    def _gradients(self, outputs: list[Tensor]) -> dict[str, Tensor]:
        """Gradients of a weighted sum of squares of all finite outputs, by the names of parameters."""
        sums = [_weighted_squares(output) for output in outputs if output.requires_grad]
        parameters = {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}
        if not sums or not parameters:
            return {}
        gradients = torch.autograd.grad(sums, list(parameters.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(parameters, gradients, strict=True))


def _weighted_squares(output: Tensor) -> Tensor:
    """The sum of squares of all finite numbers, each with a weight of its own.

    Without weights it would be constant for vectors of length one, and their gradients nothing but rounding. The
    weights are sines, as `_Constants` would replace random numbers.
    """
    numbers = output
    if output.is_complex():
        numbers = torch.view_as_real(output.resolve_conj())
    positions = torch.arange(numbers.numel(), dtype=torch.float64, device=numbers.device)
    weights = 1 + 0.5 * positions.sin()
    squares = numbers.square() * weights.view(numbers.shape)
    return squares[numbers.isfinite()].sum()


def _gap(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    """The largest difference, as a share of the largest number; NaN if they are finite in other places."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for left, right in zip(expected, actual, strict=True):
        if left.numel():
            pairs.append((_as_double(left), _as_double(right)))
    largest = [float(left.abs().where(left.isfinite(), 0).max()) for left, _ in pairs]
    floor = _SMALL * max(largest, default=0.0)

    worst = 0.0
    for (left, right), largest_here in zip(pairs, largest, strict=True):
        right = right.reshape(left.shape)
        is_finite = left.isfinite()
        if not torch.equal(is_finite, right.isfinite()):
            return float("nan")
        gap = float((left - right).abs().where(is_finite, 0).max())
        scale = max(largest_here, floor) or 1.0
        worst = max(worst, gap / scale)
    return worst


def _as_double(tensor: Tensor) -> Tensor:
    detached = tensor.detach()
    return detached if tensor.is_complex() else detached.double()
