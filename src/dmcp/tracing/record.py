"""One forward pass as a list of ATen ops, and where it reads values on the host."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.hooks import RemovableHandle

from dmcp.errors import TraceError
from dmcp.tracing.modules import (
    batch_of,
    call_model,
    leaves,
    map_leaves,
    modules_of,
    narrow,
    on_meta,
    reason_of,
    skeleton,
    tensors_in,
)
from dmcp.tracing.world import ELSEWHERE, SEED, inert_autocast, untouched_world

aten = torch.ops.aten

Func = torch._ops.OpOverload
Shape = tuple[int, ...]

# Ways out of torch that are no op; the others end in one that gives no tensor.
HOST_READS: dict[Any, str] = {Tensor.tolist: "tolist", Tensor.numpy: "numpy", Tensor.__array__: "numpy"}
HOST_READS[Tensor.__format__] = "format"

# What activations say of their gradient; recorded below autograd they have none.
_GETTERS = vars(torch._C.TensorBase)
_HISTORY: dict[Any, Any] = {
    _GETTERS["requires_grad"].__get__: True,
    _GETTERS["is_leaf"].__get__: False,
    _GETTERS["grad_fn"].__get__: object(),
    Tensor.register_hook: RemovableHandle(OrderedDict()),
    Tensor.retain_grad: None,
}
_DATA = _GETTERS["data"].__get__

# Their size follows from values, but torch does not tag them so.
UNTAGGED = {aten.where.default, aten.nonzero_numpy.default, aten.repeat_interleave.self_Tensor}


@dataclass(frozen=True)
class Read:
    """A host read: values of tensors that became Python values."""

    values: tuple[int, ...]  # the tensors, by the numbers of their values
    way: str  # like "item" or "numpy"
    where: str  # the module
    result: Any  # the Python value


# The meta fast path: ops whose output is like their first input, so that torch need not be asked.
_ELEMENTWISE = "relu hardtanh relu6 hardswish hardsigmoid leaky_relu elu gelu mish clamp"
_ELEMENTWISE_OPS = {getattr(aten, name).default for name in _ELEMENTWISE.split()}
_IN_PLACE_OPS = {getattr(aten, f"{name}_").default for name in _ELEMENTWISE.split() if name not in ("relu", "gelu")}


def compute(func: Func, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The output of an op for these arguments."""
    if args and isinstance(args[0], Tensor) and args[0].is_meta and args[0].is_floating_point():
        if func in _IN_PLACE_OPS:
            return args[0]
        if func in _ELEMENTWISE_OPS or (func is aten.batch_norm.default and _fits(*args)):
            return aten.empty_like.default(args[0])
    return func(*args, **kwargs)


def _fits(values: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: object) -> bool:
    """Whether torch takes these arguments of batch_norm, all of which it gives by position."""
    tensors = [tensor for tensor in (weight, bias, mean, var) if tensor is not None]
    sized = all(tensor.is_meta and tensor.shape == values.shape[1:2] for tensor in tensors)
    return sized and values.numel() > 0 and (training or (mean is not None and var is not None))


# Ops that only move memory: their result is the same value.
_SAME_VALUE = {aten.clone.default, aten.detach.default, aten.alias.default, aten.contiguous.default}
# How numbers become a tensor: torch's versions differ in which of these they run, and on which device.
_BIRTH = {aten.lift_fresh.default, aten.detach_.default}
# Which of these appears depends on strides, and strides depend on widths.
_ONE_NAME = {aten._unsafe_view.default: aten.view.default, aten._reshape_alias.default: aten.view.default}


@dataclass(frozen=True)
class Ref:
    """A tensor among an op's arguments, by the number of its value."""

    value: int


@dataclass(frozen=True)
class Op:
    """One ATen call; tensors are value numbers."""

    func: Func
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outs: tuple[int | None, ...]
    path: str  # the module that called it
    result: Any = None  # what came back, where it was not a tensor
    single: bool = True  # one output rather than a list of them

    @property
    def name(self) -> str:
        """The op's name without namespace and overload: "conv2d"."""
        return self.func._schema.name.split("::")[1]

    def arguments(self) -> dict[str, Any]:
        """All arguments by their schema name, defaults filled in."""
        arguments: dict[str, Any] = {}
        for position, argument in enumerate(self.func._schema.arguments):
            if position < len(self.args) and not argument.kwarg_only:
                arguments[argument.name] = self.args[position]
            else:
                arguments[argument.name] = self.kwargs.get(argument.name, argument.default_value)
        return arguments

    def inputs(self) -> list[int]:
        """The values that the op takes, in order."""
        return [leaf.value for leaf in leaves((self.args, dict(self.kwargs))) if isinstance(leaf, Ref)]


@dataclass(frozen=True)
class Since:
    """How much had happened when a constant was first seen."""

    ops: int
    reads: int
    data: float | None  # a number that follows from its values, where it has any


@dataclass
class Recording:
    """The ops of one forward pass, and the shapes of all values in it."""

    training: bool
    grad: bool  # whether gradients were switched on
    ops: list[Op] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)
    dtypes: list[torch.dtype] = field(default_factory=list)
    tensors: dict[int, str] = field(default_factory=dict)  # value -> name of the parameter or buffer
    inputs: list[int] = field(default_factory=list)
    constants: dict[int, Since] = field(default_factory=dict)  # tensors that come from nowhere we know
    outputs: list[int] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)  # tensors that became Python values
    made: list[tuple[int, str, list[float]]] = field(default_factory=list)  # ops before, module, numbers made tensors
    caches: dict[tuple[str, str], Any] = field(default_factory=dict)  # plain attributes that the pass set: old value
    keeps: set[str] = field(default_factory=set)  # tensors from which attributes were computed for later runs
    seeded: list[Op] = field(default_factory=list)  # random numbers whose seed or generator is the model's own
    recomputes: bool = False  # whether the backward pass takes weights from modules (activation checkpointing)

    @functools.cached_property
    def from_weights(self) -> dict[int, frozenset[int]]:
        """Values that no input has a part in: weights, and what the model computes from them. -> the tensors used"""
        sources_of: dict[int, frozenset[int]] = {value: frozenset((value,)) for value in self.tensors}
        constants_to_come = list(self.constants.items())
        for number, op in enumerate(self.ops):
            while constants_to_come and constants_to_come[0][1].ops <= number:
                value, since = constants_to_come.pop(0)
                if self._reads_only(sources_of, since):  # else it may be made of the input's values
                    sources_of.setdefault(value, frozenset())
            inputs = op.inputs()
            if all(value in sources_of for value in inputs):
                sources = frozenset[int]().union(*(sources_of[value] for value in inputs))
                for out in op.outs:
                    if out is not None and out not in sources_of:
                        sources_of[out] = sources
        return sources_of

    def _reads_only(self, values: Mapping[int, frozenset[int]], since: Since) -> bool:
        """Whether the reads that left torch before a constant was first seen were of these values only."""
        for read in self.reads[: since.reads]:
            if read.way in HOST_READS.values() and not all(value in values for value in read.values):
                return False
        return True

    @functools.cached_property
    def written(self) -> set[str]:
        """Names of tensors that the pass writes into, such as running statistics; a substitute would lose these."""
        values: set[int] = set()
        for op in self.ops:
            arguments = op.arguments()
            targets = [arguments.get("running_mean"), arguments.get("running_var")]
            if op.func._schema.is_mutable:
                targets += op.args[:1]
            for target in targets:
                if isinstance(target, Ref):
                    values |= self.from_weights.get(target.value, frozenset())
        return {self.tensors[value] for value in values}


_LARGE = 1000  # larger arrays are one number, that of their bytes
# Functions and methods that make tensors of numbers, or look up entries by them.
_MAKERS = {torch.tensor, torch.as_tensor, torch.asarray}
_MAKERS |= {Tensor.new_tensor, Tensor.new, Tensor.__getitem__, Tensor.__setitem__}


def _numbers_in(nested: Any) -> list[float]:
    """Every number in sequences, dicts and arrays."""
    numbers: list[float] = []
    for leaf in leaves(nested):
        if isinstance(leaf, (np.ndarray, np.generic)) and leaf.dtype.kind in "biufc":
            if leaf.size <= _LARGE:
                numbers += _numbers_in(leaf.ravel().tolist())
            else:
                numbers.append(_digest(leaf.tobytes()))
        elif isinstance(leaf, (Sequence, array)) and not isinstance(leaf, (str, bytes)):  # such as a range
            numbers += _numbers_in(list(leaf))
        elif isinstance(leaf, complex):
            numbers += (leaf.real, leaf.imag)
        elif isinstance(leaf, (int, float)):
            numbers.append(float(leaf))
    return numbers


def _digest(data: bytes) -> float:
    """A number that stands for these bytes."""
    return float(int.from_bytes(hashlib.sha256(data).digest()[:6]))


def _write_number(tensor: Tensor, index: Any, number: float) -> None:
    """`tensor[index] = number` by ops that are the same on every device and in every version of torch."""
    parts = index if isinstance(index, tuple) else (index,)
    mask = parts[0]
    if len(parts) == 1 and isinstance(mask, Tensor) and mask.dtype == torch.bool:
        tensor.masked_fill_(mask[(..., *[None] * (tensor.ndim - mask.ndim))], number)
    elif all(part is None or part is ... or isinstance(part, slice) or type(part) is int for part in parts):
        tensor[index].copy_(tensor.new_full((), number))
    else:
        tensor[index] = tensor.new_full((), number)


def check_dense(*tensors: Tensor) -> None:
    """Refuse tensors whose ops cannot be followed: those that are not plain memory, and those that dispatch by code."""
    for tensor in tensors:
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            raise TraceError("The input or the model has a sparse, nested or quantized tensor, which cannot be traced.")
        if type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__:
            kind = type(tensor).__name__
            raise TraceError(f"A {kind} runs its own code for every op, so it cannot be traced. Use plain tensors.")


def check_example(example: object, *others: Tensor) -> None:
    """Refuse an input without tensors or samples, and tensors, of the input or the others, that are not dense."""
    check_dense(*tensors_in(example), *others)
    if not tensors_in(example) or batch_of(example) == 0:
        raise TraceError("The example input must be a tensor, or a tuple or dict of them, whose dim 0 is the batch.")


def _memory_of(tensor: Tensor) -> object:
    """What two tensors share only if they are one value: storage, offset, shape and strides."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return object()  # it has no single storage
    with torch._C.DisableTorchFunction():
        where = tensor.untyped_storage()._cdata, tensor.storage_offset()
        return *where, tensor.shape, tensor.stride(), tensor.dtype


class _HostAccess(TorchFunctionMode):
    """Notes numbers that become tensors, which the meta device would lose, and tensors that become numbers."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor):
            self.recorder.touched.add(id(args[0]))
            if func in _HISTORY and self.recorder.graded(args[0]):
                return _HISTORY[func]
        if func == _DATA:  # no op
            return self.recorder.alias(args[0], func(*args))
        if func in HOST_READS:
            return self.recorder.read(func, args, kwargs or {})
        if func in _MAKERS:
            return self.recorder.make(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Writes down every op that runs while it is entered."""

    def __init__(self, model: nn.Module, inputs: list[Tensor], grad: bool, source: nn.Module | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording(model.training, grad)
        self._known: dict[int, int] = {}  # id of a tensor -> its value
        self._in_memory: dict[object, int] = {}  # which part of which storage -> the value that lies there
        self._alive: list[Tensor] = []  # ids are reused unless every tensor stays alive
        self._paused = False
        self._making = False
        self.touched: set[int] = set()  # ids of tensors that were asked for anything
        self.source = source
        self._elsewhere: set[int] = set()  # ids of the tensors of the original model
        if source is not None:
            self._elsewhere = {id(tensor) for tensor in (*source.parameters(), *source.buffers())}
        self.apart = False  # whether weights were used where autograd does not follow, or keeps something else
        self.path: list[str] = [""]
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            self.recording.tensors[self._value(tensor)] = name
        self.recording.inputs = [self._value(tensor) for tensor in inputs]

    def _value(self, tensor: Tensor) -> int:
        """The number of a tensor's value, a new one if the tensor has not been seen in this shape."""
        recording = self.recording
        value = self._known.get(id(tensor))
        if value is not None and recording.shapes[value] == tuple(tensor.shape):  # squeeze_() reshapes in place
            return value
        value = len(recording.shapes)
        recording.shapes.append(tuple(int(size) for size in tensor.shape))
        recording.dtypes.append(tensor.dtype)
        self._known[id(tensor)] = value
        self._alive.append(tensor)
        self._in_memory[_memory_of(tensor)] = value
        return value

    def _argument(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        if id(leaf) in self._elsewhere:
            raise TraceError(ELSEWHERE)
        if id(leaf) not in self._known and _memory_of(leaf) in self._in_memory:
            # Another object for a known value, made where no op runs: a Tensor subclass wraps what each op returns.
            self._known[id(leaf)] = self._in_memory[_memory_of(leaf)]
            self._alive.append(leaf)
        if id(leaf) not in self._known:
            check_dense(leaf)
            numbers = self._array(leaf)
            data = None if numbers is None else _digest(repr(numbers.shape).encode() + numbers.tobytes())
            since = Since(len(self.recording.ops), len(self.recording.reads), data)
            self.recording.constants[self._value(leaf)] = since
        return Ref(self._known[id(leaf)])

    def _array(self, tensor: Tensor) -> np.ndarray[Any, Any] | None:
        """The values of a tensor, if it has any. This read is not recorded: it is not the model's."""
        if tensor.is_meta:
            return None
        paused_before = self._paused
        self._paused = True
        half = tensor.is_floating_point() and tensor.itemsize <= 2
        try:
            with torch._C.DisableTorchFunction():
                return (tensor.float() if half else tensor).numpy(force=True)
        except (TypeError, RuntimeError):  # a dtype that NumPy does not have
            return None
        finally:
            self._paused = paused_before

    def __torch_dispatch__(
        self, func: Func, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        if func in _BIRTH or (func in _SAME_VALUE and id(args[0]) in self._known):
            if func is aten.lift_fresh.default and not self._making and not args[0].is_meta:  # torch.Tensor([2.0])
                self._note_made(self._array(args[0]))
            return self.alias(args[0], func(*args, **kwargs))
        func = _ONE_NAME.get(func, func)
        call = Op(func, map_leaves(self._argument, args), map_leaves(self._argument, kwargs), (), self.path[-1])
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        if self.recording.grad and (hooked or not torch.is_grad_enabled()):
            self.apart |= not self.recording.tensors.keys().isdisjoint(call.inputs())
        out = self.run(call, args, kwargs)
        outs = tuple(self._value(leaf) if isinstance(leaf, Tensor) else None for leaf in leaves(out))
        result = None if any(leaf is not None for leaf in outs) else out
        by_value = torch.Tag.data_dependent_output in func.tags or func is aten.is_nonzero.default
        if result is not None and (by_value or func.namespace != "aten"):  # others look at dtypes or memory
            self._note_read(call.inputs(), call.name, result)
        single = isinstance(out, Tensor)
        self.recording.ops.append(Op(func, call.args, call.kwargs, outs, call.path, result, single))
        if torch.Tag.nondeterministic_seeded in func.tags:
            seed = (call.arguments().get("generator") or torch.default_generator).initial_seed()
            if seed != SEED:
                self.recording.seeded.append(self.recording.ops[-1])
                self._note_made(seed)
        return out

    def run(self, call: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the op itself; replay does more here."""
        return compute(call.func, args, kwargs)

    def read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a host read, without recording torch's own ops in it; replay has no data for it."""
        value = self._argument(args[0]).value
        self._paused = True
        try:
            result = func(*args, **kwargs)
        finally:
            self._paused = False
        self._note_read([value], HOST_READS[func], copy.deepcopy(result))
        return result

    def graded(self, tensor: Tensor) -> bool:
        """Whether a tensor would have a gradient above autograd: activations have one if gradients are on."""
        others = (None, *self.recording.tensors, *self.recording.inputs)
        return torch.is_grad_enabled() and tensor.is_floating_point() and self._known.get(id(tensor)) not in others

    def alias(self, tensor: Tensor, other: Tensor) -> Tensor:
        """Note that another object is the same value."""
        self._known[id(other)] = self._argument(tensor).value
        self._alive.append(other)
        return other

    def make(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make a tensor of numbers, which may depend on a width, or use them as an index."""
        is_size = func is Tensor.new and all(isinstance(item, (int, torch.Size)) for item in args[1:])
        if not is_size:
            self._note_made((args, kwargs))
        making_before = self._making
        self._making = True
        try:
            if func is Tensor.__setitem__ and isinstance(args[2], (int, float)):
                return _write_number(*args)
            return func(*args, **kwargs)
        finally:
            self._making = making_before

    def _note_made(self, numbers: Any) -> None:
        self.recording.made.append((len(self.recording.ops), self.path[-1], _numbers_in(numbers)))

    def _note_read(self, values: list[int], way: str, result: Any) -> None:
        self.recording.reads.append(Read(tuple(values), way, self.path[-1] or "the model", result))


def run_recorded(recorder: Recorder, model: nn.Module, example: Any) -> Recording:
    """Run a throw-away model under a recorder that was made for it."""

    def leave(*_: Any) -> None:
        recorder.path.pop()

    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda _, __, name=name: recorder.path.append(name), prepend=True)
        module.register_forward_hook(leave, always_call=True)
    device = next((tensor.device.type for tensor in tensors_in(example)), "cpu")
    below = torch._C._AutoDispatchBelowAutograd()
    host = _HostAccess(recorder)
    grad = recorder.recording.grad  # some models ask whether it is on
    world = untouched_world(device, recorder.source)
    with world, inert_autocast(), torch.set_grad_enabled(grad), below, recorder, host:
        outputs = tensors_in(call_model(model, example))
        recorder.recording.outputs = [recorder._argument(tensor).value for tensor in outputs]
    return recorder.recording


def _recomputes(model: nn.Module, example: Any, device: str) -> bool:
    """Whether the backward pass of a throw-away model asks its modules for weights, which they have no longer."""
    with contextlib.suppress(Exception), untouched_world(device), inert_autocast(), torch.enable_grad():

        def with_gradient(tensor: Tensor) -> Tensor:
            return tensor.detach().requires_grad_(tensor.is_floating_point()).clone()

        outputs = tensors_in(call_model(model, tree_map_only(Tensor, with_gradient, example)))
        for module in modules_of(model):
            module._parameters.clear()
        try:
            torch.autograd.backward([tensor.abs().sum() for tensor in outputs if tensor.requires_grad])
        except AttributeError:
            return True
    return False


def meta_example(example: Any) -> Any:
    """The example input without its data."""
    return map_leaves(lambda leaf: on_meta(leaf) if isinstance(leaf, Tensor) else leaf, example)


def record(model: nn.Module, example: Any, training: bool, grad: bool = False, device: str = "meta") -> Recording:
    """One forward pass of a copy of the model, in the mode asked for, on the meta device or on the CPU."""
    if device == "meta":
        twin = skeleton(model)
        example = meta_example(example)
    else:
        twin = narrow(model, {}, {}).to(device)
        example = map_leaves(lambda leaf: leaf.detach().to(device) if isinstance(leaf, Tensor) else leaf, example)
    twin.train(training)
    before = _plain_state(twin)
    _alive = [vars(module).copy() for module in modules_of(twin)]  # ids are reused unless all attributes stay alive
    recorder = Recorder(twin, tensors_in(example), grad, model)
    recording = run_recorded(recorder, twin, example)

    after = _plain_state(twin)
    changed = {key: state for key, state in after.items() if state != before.get(key)}
    _note_caches(recorder, model, before, changed)
    computed = _computed_from_weights(recorder, changed)
    if computed:
        # What a second run does not change was computed once, for later runs.
        run_recorded(Recorder(twin, tensors_in(example), grad), twin, example)
        after_second = _plain_state(twin)
        for key, names in computed.items():
            if after_second[key] == changed[key]:
                recording.keeps.update(names)
    if recorder.apart:
        recording.recomputes = _recomputes(twin, example, device)
    return recording


_State = Mapping[tuple[str, str], Any]  # (path of a module, attribute) -> what it holds, see `_plain_state`


def _changed_caches(changed: _State) -> _State:
    """The attributes that forward changed in modules where it changed a tensor, too; sizes alone are no cache."""
    modules = {path for (path, _), state in changed.items() if not isinstance(state, str)}
    return {(path, name): state for (path, name), state in changed.items() if path in modules}


def _note_caches(recorder: Recorder, model: nn.Module, before: _State, changed: _State) -> None:
    """Note what the caches held before the run. TraceError if forward reads what an earlier run left there."""
    recording = recorder.recording
    modules = dict(model.named_modules())
    seen = recorder.touched | recorder._known.keys()
    for (path, name), state in _changed_caches(changed).items():
        old = before.get((path, name))
        is_of_input = isinstance(state, int) and recorder._known.get(state, -1) not in recording.from_weights
        if is_of_input and isinstance(old, int) and old in seen:
            raise TraceError(f"forward reads what an earlier run left in {path}.{name}: set it to None.")
        held = getattr(modules[path], name, None)  # of the class, if only forward sets it in the module
        if isinstance(held, Tensor):
            recording.caches[path, name] = held.detach().clone()
        elif isinstance(held, dict):
            recording.caches[path, name] = {}
        else:
            recording.caches[path, name] = copy.deepcopy(held)


def _computed_from_weights(recorder: Recorder, changed: _State) -> dict[tuple[str, str], set[str]]:
    """The names of the tensors from which forward computed an attribute, for each such attribute."""
    recording = recorder.recording
    computed: dict[tuple[str, str], set[str]] = {}
    for key, state in _changed_caches(changed).items():
        value = recorder._known.get(state) if isinstance(state, int) else None
        sources = recording.from_weights.get(value) if value is not None else None
        if sources:
            computed[key] = {recording.tensors[source] for source in sources}
    return computed


def _plain_state(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Plain attributes of modules: tensors, alone or in dicts, by identity; sizes that they may be for as text."""
    state: dict[tuple[str, str], Any] = {}
    for path, module in model.named_modules():
        for name, attribute in vars(module).items():
            if isinstance(attribute, Tensor):
                state[path, name] = id(attribute)
            elif type(attribute) is dict and name not in ("_parameters", "_buffers", "_modules"):
                state[path, name] = [id(item) for item in attribute.values() if isinstance(item, Tensor)]
            elif isinstance(attribute, (tuple, list)) and all(isinstance(leaf, int) for leaf in leaves(attribute)):
                state[path, name] = str(attribute)
    return state


def record_anywhere(model: nn.Module, example: Any, training: bool, grad: bool = False) -> Recording:
    """Record on the meta device, or, where the model looks at values, on the CPU with the example's real ones."""
    causes: list[Exception] = []
    for device in ("meta", "cpu"):
        try:
            return record(model, example, training, grad, device)
        except TraceError:
            raise
        except Exception as error:
            causes.append(error)
    reason = reason_of(causes[1])
    raise TraceError(f"forward fails on this example input, or only while it is traced: {reason}") from causes[0]
