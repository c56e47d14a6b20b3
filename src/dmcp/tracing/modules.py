"""Modules of any model: unwrapping, calling, slicing tensors and attributes."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Set, ValuesView
from types import FunctionType, ModuleType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dmcp.errors import TraceError

Cut = tuple[Tensor | None, ...]  # per dim: the indices that stay, None for all
_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def check_module(model: object) -> None:
    """Refuse what is no network."""
    if not isinstance(model, nn.Module):
        name = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TraceError(f"A torch.nn.Module is needed, not {name}.")


def modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """All modules of a model, once each, also where an attribute named `modules` hides the method of that name."""
    return nn.Module.modules(model)


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """While entered, an autocast that the caller has entered changes nothing."""
    with contextlib.ExitStack() as stack:
        for device in _AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def without_autocast(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Make a function ignore the caller's autocast: it computes in the precision of the model or of its settings."""

    @functools.wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with no_autocast():
            return function(*args, **kwargs)

    return run


class _Copying(TorchFunctionMode):
    """While entered, deep copies of tensors that are no parameters have no history, and may land on the meta device."""

    def __init__(self, meta: bool) -> None:
        super().__init__()
        self.meta = meta

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo and (self.meta or not tensor.is_leaf):
                memo[id(tensor)] = on_meta(tensor) if self.meta else tensor.detach().clone()
            if id(tensor) in memo:
                return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor of the same shape and strides without data."""
    return torch.empty_like(tensor, device="meta")


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DataParallel, DistributedDataParallel or torch.compile; others are refused."""
    while True:
        check_module(model)
        if any(isinstance(module, torch.jit.ScriptModule) for module in modules_of(model)):
            raise TraceError("A TorchScript module cannot be pruned: give the Python module it was made from.")
        inner = getattr(model, "_orig_mod", None)  # torch.compile
        if inner is None and isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if inner is None:
            return model
        model = inner


def narrow(
    model: nn.Module, cuts: Mapping[str, Cut], attributes: Mapping[str, Mapping[str, Any]], meta: bool = False
) -> nn.Module:
    """A copy of the model with some tensors indexed per dim and some attributes set; tied tensors stay tied.

    The copy is made of the narrow tensors at once: the wide ones are never copied.
    """
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        small = index(parameter.detach(), cuts.get(name, ()), meta)
        memo[id(parameter)] = nn.Parameter(small, requires_grad=parameter.requires_grad)
        memo[id(parameter)].__dict__.update(parameter.__dict__)
    for name, buffer in model.named_buffers():
        memo.setdefault(id(buffer), index(buffer.detach(), cuts.get(name, ()), meta))
    for held in (held for module in modules_of(model) for held in vars(module).values()):
        if type(held) in (dict, OrderedDict) and not held:  # every module has a dozen of hooks, slow to copy
            memo[id(held)] = type(held)()
        for one in held if type(held) in (list, tuple) else (held,):
            if isinstance(one, torch.Generator):  # its state must not land on the meta device
                memo[id(one)] = one.clone_state()
    memo |= python_modules(model)
    known = dict(memo)
    try:
        with _Copying(meta):
            small_model = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:  # a lock, an open file
        name = _uncopied(model, known)
        what = f"The attribute {name} of the model" if name else "The model"
        raise TraceError(f"{what} cannot be copied, as copy.deepcopy(model) shows: {error}.") from error
    for path, values in attributes.items():
        module = small_model.get_submodule(path)
        for attribute, value in values.items():
            setattr(module, attribute, value)
    return small_model


def python_modules(model: nn.Module) -> dict[int, Any]:
    """Python modules among the attributes (`self.config = config`) by id: as a memo of deepcopy, copies share them."""
    shared: dict[int, Any] = {}
    for held in (value for module in modules_of(model) for value in vars(module).values()):
        inside = held.values() if isinstance(held, dict) else held if isinstance(held, (list, tuple)) else (held,)
        shared |= {id(item): item for item in inside if isinstance(item, ModuleType)}
    return shared


def _uncopied(model: nn.Module, memo: Mapping[int, Any]) -> str:
    """The first attribute of a module that cannot be copied, with its path; empty if each of them can be."""
    for path, module in model.named_modules():
        for name, held in vars(module).items():
            if name == "_modules":  # each has its own turn
                continue
            try:
                with _Copying(meta=True):
                    copy.deepcopy(held, dict(memo))
            except (TypeError, RuntimeError):
                return f"{path}.{name}" if path else name
    return ""


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of the model on the meta device: no data is copied, tied tensors stay tied."""
    return narrow(model, {}, {}, meta=True)


def index(tensor: Tensor, cut: Cut, meta: bool = False) -> Tensor:
    """A copy of the tensor with the chosen indices of each dim."""
    if meta:
        shape = [n if kept is None else len(kept) for n, kept in zip(tensor.shape, cut, strict=True)] if cut else None
        return on_meta(tensor) if shape is None else torch.empty(shape, dtype=tensor.dtype, device="meta")
    small = tensor
    for dim, kept in enumerate(cut):
        if kept is not None:
            small = small.index_select(dim, kept.to(tensor.device))
    if small is tensor:
        return small.clone()
    last = tensor.ndim == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    return small.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)


def map_leaves(function: Callable[[Any], Any], nested: Any) -> Any:
    """The same tuples, lists and dicts with every leaf replaced."""
    if isinstance(nested, dict):
        return {key: map_leaves(function, item) for key, item in nested.items()}
    if isinstance(nested, (tuple, list)):
        mapped = [map_leaves(function, item) for item in nested]
        return mapped if isinstance(nested, list) else tuple(mapped)
    return function(nested)


def leaves(nested: Any) -> list[Any]:
    """All that tuples, lists and dicts hold, in order."""
    found: list[Any] = []
    map_leaves(found.append, nested)
    return found


def tensors_in(nested: Any, seen: dict[int, Any] | None = None) -> list[Tensor]:
    """Every tensor that an object holds in any way, in order; iterators are refused, as reading empties them."""
    if isinstance(nested, Tensor):
        return [nested]
    if isinstance(nested, Iterator):
        raise TraceError(f"A {type(nested).__name__} can be read only once: return a list or a tuple of tensors.")
    seen = {} if seen is None else seen
    if id(nested) in seen or isinstance(nested, (nn.Module, type, ModuleType, io.IOBase, str, int, float)):
        return []
    seen[id(nested)] = nested  # alive, so that no other object gets its id
    if isinstance(nested, Mapping):
        inside = list(nested.values())
    elif isinstance(nested, (list, tuple, Set, ValuesView)):
        inside = list(nested)
    elif isinstance(nested, np.ndarray):
        inside = list(nested.flat) if nested.dtype == object else []
    else:
        inside = list(vars(nested).values()) if hasattr(nested, "__dict__") else []
    if type(nested) not in (list, tuple):  # slots, attributes of a dict, what a function has of its surroundings
        known, hidden = {id(item) for item in inside}, gc.get_referents(nested)
        world = [nested.__globals__, getattr(nested, "__builtins__", 0)] if isinstance(nested, FunctionType) else []
        inside += [item for item in hidden if id(item) not in known and not any(item is it for it in world)]
    return [tensor for item in inside for tensor in tensors_in(item, seen)]


def call_model(model: Callable[..., Any], example: Any) -> Any:
    """A tuple is positional arguments, a dict keyword arguments, anything else the one argument."""
    if isinstance(example, tuple):
        return model(*example)
    return model(**example) if isinstance(example, dict) else model(example)


def batch_of(example: Any) -> int | None:
    """The number of samples: dim 0 of all tensors but scalars and those that are shared by all samples."""
    sizes = {tensor.shape[0] for tensor in tensors_in(example) if tensor.ndim}
    several = sizes - {1}
    if len(several) > 1 or not sizes:
        return None
    return several.pop() if several else 1


def rebatch(example: Any, size: int) -> Any:
    """The same example with its samples repeated or dropped until there are `size` of them."""
    batch = batch_of(example)

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim or leaf.shape[0] != batch:
            return leaf
        return leaf[torch.arange(size, device=leaf.device) % batch]

    return map_leaves(one, example)


def reason_of(error: BaseException) -> str:
    """What an error says, with its kind; of one that says nothing, such as a bare `assert`, the line that raised it."""
    kind = type(error).__name__
    if text := " ".join(str(error).split()):
        return f"{kind}: {text}"
    steps = traceback.extract_tb(error.__traceback__)
    line = steps[-1].line if steps else None
    return f"{kind} at `{line}`" if line else f"it raises {kind} without a message"


@contextlib.contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Train or eval mode of every module is afterwards what it was before."""
    modes = [(module, module.training) for module in modules_of(model)]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
