"""Distillation: what a network learns from the outputs of another one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from dmcp.errors import DmcpWarning, TrainingError, warn
from dmcp.runtime.batches import device_of, input_of
from dmcp.runtime.checkpoint import untouched
from dmcp.runtime.distributed import current
from dmcp.settings import Distill
from dmcp.tracing.modules import call_model, narrow, tensors_in, unwrap
from dmcp.training.losses import Loss, check_scalar, noting_call

Distance = Callable[[Any, Any], Tensor]  # (student_output, teacher_output) -> scalar
# One for all tensors of an output, one for each of them in order, or one for each named part; None leaves a part out.
Distillation = Distill | Distance | Sequence[Any] | Mapping[str, Any]


class DistillationWarning(DmcpWarning):
    """Outputs are taken for class scores, though the loss is the user's own and they may be something else."""


@dataclass(frozen=True)
class Term:
    """How one tensor of an output is distilled."""

    index: int  # of the tensor in the output
    kind: Any  # None leaves it out
    weight: float = 1.0


def read_distillation(kind: Any) -> Any:
    """What a user gives as `distill`, with members of `Distill` for their names and a term for each entry of a list."""
    if isinstance(kind, str):
        if kind not in list(Distill):
            raise TrainingError(f"distill must be one of {', '.join(Distill)}, or a function, not {kind!r}.")
        return Distill(kind)
    if isinstance(kind, Mapping):
        return {name: read_distillation(part) for name, part in kind.items()}
    if isinstance(kind, Sequence):
        terms = []
        for index, part in enumerate(kind):
            terms.append(part if isinstance(part, Term) else Term(index, read_distillation(part)))
        return tuple(terms)
    return kind


def is_of_classes(kind: Any) -> bool:
    """Whether all that is distilled is class scores."""
    if isinstance(kind, Mapping):
        return all(is_of_classes(part) for part in kind.values())
    if isinstance(kind, tuple):
        return all(is_of_classes(term.kind) for term in kind)
    return kind is Distill.CLASSES


def warn_of_distillation(learner: str, remedy: str) -> None:
    """Warn, once for all ranks, that outputs are taken for class scores because nothing says what they are."""
    if current().first:
        text = (
            f"{learner} outputs as class scores along dim 1. If they are something else, say how they are distilled, "
            f'such as Task(distill="l2"), or {remedy}.'
        )
        warn(text, DistillationWarning)


# the loss


def distillation_loss(
    output: Any, target: Any, temperature: float = 1.0, kind: Distillation = Distill.CLASSES
) -> Tensor:
    """How far an output is from the teacher's, summed over its tensors; only class scores have a temperature."""
    losses = []
    for pair in _pairs(output, target, kind):
        losses.append(pair.weight * _distance(pair, temperature))
    if not losses:
        raise TrainingError("There is nothing to distill: the network has no output, or distill leaves all of it out.")
    return torch.stack(losses).sum()


@dataclass(frozen=True)
class _Pair:
    """Outputs of two networks that are compared, and how."""

    student: Any
    teacher: Any
    kind: Distill | Distance
    weight: float = 1.0


def _pairs(output: Any, target: Any, kind: Any) -> list[_Pair]:
    """All parts of the outputs that are compared."""
    if kind is None:
        return []
    if callable(kind):
        return [_Pair(output, target, kind)]
    if isinstance(kind, Mapping):
        named = []
        for name, part_kind in kind.items():
            named += _pairs(_part(output, name), _part(target, name), part_kind)
        return named

    students = tensors_in(output)
    teachers = [tensor.detach() for tensor in tensors_in(target)]
    if len(students) != len(teachers):
        raise _unlike(students, teachers)
    if isinstance(kind, Distill):
        return [_Pair(student, teacher, kind) for student, teacher in zip(students, teachers, strict=True)]

    entries = 1 + max((term.index for term in kind), default=-1)
    if entries != len(students):
        raise TrainingError(
            f"distill has {entries} entries, but the output of the network has {len(students)} tensors."
        )
    in_order = []
    for term in kind:
        for pair in _pairs(students[term.index], teachers[term.index], term.kind):
            in_order.append(replace(pair, weight=term.weight))
    return in_order


def _part(output: Any, name: str) -> Any:
    """A named part of an output: an item of a mapping, or an attribute."""
    if isinstance(output, Mapping) and name in output:
        return output[name]
    if not isinstance(output, Mapping) and hasattr(output, name):
        return getattr(output, name)
    raise TrainingError(f"distill names {name!r}, but the output of the network or of the teacher has no such part.")


def _distance(pair: _Pair, temperature: float) -> Tensor:
    if not isinstance(pair.kind, Distill):
        with noting_call("distill(student_output, teacher_output), with outputs as the networks return them"):
            value = pair.kind(pair.student, pair.teacher)
        return check_scalar(value, "distill")
    if pair.kind is Distill.CLASSES:
        return _class_distance(pair.student, pair.teacher, temperature)
    if pair.kind is Distill.L1:
        return _number_distance(F.l1_loss, pair.student, pair.teacher)
    return _number_distance(F.mse_loss, pair.student, pair.teacher)


def _class_distance(student: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    """KL divergence of the classes along dim 1 from those of the teacher: its mean over samples, or over pixels.

    The scores of both are divided by the temperature; multiplying by its square keeps gradients as large.
    """
    if student.shape != teacher.shape or student.ndim < 2 or student.shape[1] < 2 or not student.is_floating_point():
        raise _unlike([student], [teacher])
    log_target = F.log_softmax(teacher.float() / temperature, dim=1)
    log_output = F.log_softmax(student.float() / temperature, dim=1)
    divergence = (log_target.exp() * (log_target - log_output)).sum(dim=1)
    return temperature**2 * divergence.mean()


def _number_distance(function: Distance, student: Tensor, teacher: Tensor) -> Tensor:
    """A regression loss of torch between the numbers of two outputs."""
    if student.shape != teacher.shape or not student.is_floating_point():
        raise _unlike([student], [teacher])
    return function(student.float(), teacher.float())


def _unlike(students: Sequence[Tensor], teachers: Sequence[Tensor]) -> TrainingError:
    shapes = [tuple(tensor.shape) for tensor in students]
    teacher_shapes = [tuple(tensor.shape) for tensor in teachers]
    return TrainingError(
        f"Outputs {shapes} cannot be distilled from {teacher_shapes}: both need floats of the same shapes, and class "
        'scores need at least two classes along dim 1. Say how they are distilled, such as Task(distill="l2"); or set '
        "distill=False in the SearchConfig, and leave the teacher out."
    )


def detached(output: Any) -> Any:
    """The same output as a target, without its graph."""
    return tree_map_only(Tensor, torch.detach, output)


# what the loss of a task says about its outputs

_CLASSIFICATIONS = (F.cross_entropy, F.nll_loss)
_SOFTMAXES = (F.softmax, F.log_softmax, torch.softmax, torch.log_softmax, Tensor.softmax, Tensor.log_softmax)
_REGRESSIONS = {F.mse_loss: Distill.L2, F.l1_loss: Distill.L1, F.smooth_l1_loss: None, F.huber_loss: None}
_CONVERSIONS = (F.interpolate, Tensor.float)  # what they return means the same


def distillation_by_loss(loss: Loss, model: nn.Module, batch: Any) -> tuple[Term, ...] | None:
    """How to distill the outputs that this loss trains, seen from what it does with them on a batch.

    An output that goes into a cross-entropy or softmax along dim 1 holds class scores. One that goes into a regression
    loss of torch is compared with the teacher's by the same function and with the same factor, so that the loss and the
    distillation have the same unit, whatever the scale of the outputs. None unless this is clear for all outputs.
    """
    device = device_of(model)
    copy_of_model = narrow(unwrap(model), {}, {}).train()  # a forward may write into buffers
    try:
        copy_of_loss = loss
        if isinstance(loss, nn.Module):
            copy_of_loss = narrow(loss, {}, {})
        with untouched([batch], device), torch.enable_grad():
            output = call_model(copy_of_model, input_of(batch))
            outputs = tensors_in(output)
            watch = _LossWatch(outputs)
            with watch:
                value = copy_of_loss(output, batch)
            terms = watch.terms(value)
    except Exception:  # a loss that fails says so in the first step
        return None
    is_clear = {term.index for term in terms} == set(range(len(outputs)))
    if not is_clear or any(term.weight <= 0 for term in terms):
        return None
    return tuple(terms)


@dataclass(frozen=True)
class _Seen:
    """An output, a conversion of it, or a view of all of it."""

    index: int  # of the output
    tensor: Tensor
    has_classes: bool  # whether its dim 1 is that of the output


@dataclass(frozen=True)
class _LossCall:
    """A call of a loss function of torch on an output."""

    index: int  # of the output
    kind: Distill | Distance
    result: Tensor
    summed: int  # numbers or samples that were added up; 1 for a mean


class _LossWatch(TorchFunctionMode):
    """While entered, notes which functions of torch are called on these outputs."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        self.seen = [_Seen(index, output, output.ndim >= 2) for index, output in enumerate(outputs)]
        self.calls: list[_LossCall] = []
        self.softmaxes: set[int] = set()  # outputs with a softmax along dim 1

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if function in _SOFTMAXES:
            self._note_softmax(*args, **kwargs)
        elif function in _CLASSIFICATIONS or function in _REGRESSIONS:
            arguments = signature(function).bind(*args, **kwargs).arguments
            self._note_loss(function, arguments, result)
        elif function in _CONVERSIONS:
            converted = self._find(next(iter([*args, *kwargs.values()])))
            if converted is not None:
                self.seen.append(replace(converted, tensor=result))
        return result

    def terms(self, value: Tensor) -> list[Term]:
        """The terms that the loss with this value consists of, with their factors."""
        terms = []
        for call in self.calls:
            (factor,) = torch.autograd.grad(value, call.result, retain_graph=True, allow_unused=True)
            if factor is not None:
                terms.append(Term(call.index, call.kind, call.summed * factor.sum().item()))
        without_call = self.softmaxes - {term.index for term in terms}
        terms += [Term(index, Distill.CLASSES) for index in sorted(without_call)]
        return terms

    def _note_softmax(self, input: Tensor, dim: int | None = None, *args: Any, **kwargs: Any) -> None:
        scores = self._find(input)
        if scores is not None and scores.has_classes and dim is not None and dim % input.ndim == 1:
            self.softmaxes.add(scores.index)

    def _note_loss(self, function: Any, arguments: Mapping[str, Any], result: Tensor) -> None:
        tensor = arguments["input"]
        kind: Distill | Distance
        if function in _CLASSIFICATIONS:
            seen = self._find(tensor)
            if seen is not None and not seen.has_classes:
                seen = None
            kind = Distill.CLASSES
            count = tensor.numel() // tensor.shape[-1 if tensor.ndim < 2 else 1]
        else:
            seen = self._find(tensor)
            if seen is None:
                seen = self._find(arguments["target"])
            options = {name: arguments[name] for name in ("beta", "delta") if name in arguments}
            kind = _REGRESSIONS[function] or partial(_number_distance, partial(function, **options))
            count = tensor.numel()
            if arguments.get("weight") is not None:  # the teacher's outputs have no such weights
                seen = None
        if seen is not None:
            is_sum = arguments.get("reduction") == "sum"
            self.calls.append(_LossCall(seen.index, kind, result, summed=count if is_sum else 1))

    def _find(self, tensor: Tensor) -> _Seen | None:
        """The output that the tensor is, or is all of in another shape."""
        for seen in self.seen:
            if tensor is seen.tensor:
                return seen
        base = tensor._base
        if base is None:
            return None
        for seen in self.seen:
            output = seen.tensor
            is_view = base is output or base is output._base
            if is_view and tensor.numel() == output.numel() == base.numel():
                return _Seen(seen.index, tensor, seen.has_classes and _has_same_dim(tensor, output))
        return None


def _has_same_dim(view: Tensor, output: Tensor) -> bool:
    """Whether dim 1 of a view is that of the output, and not another one of the same size."""
    return view.ndim == output.ndim and view.shape[1] == output.shape[1] and view.stride(1) == output.stride(1)
