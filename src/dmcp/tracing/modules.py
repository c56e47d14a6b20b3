"""Modules of any model: unwrapping, calling, slicing tensors and attributes."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import io
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set, ValuesView
from types import FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dmcp.errors import TraceError

Cut = tuple[Tensor | None, ...]  # per dim: the indices that stay, None for all
_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")

# What `tensors_in` looks into, what it takes for plain values, and what may hide a tensor though it has attributes.
_COLLECTIONS = (list, tuple, deque, Set, ValuesView)
_WITHOUT_TENSORS = (str, int, float, nn.Module, type, ModuleType, io.IOBase)
_HIDING = (Iterator, FunctionType, MethodType, functools.partial)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def check_module(model: object) -> None:
    """Refuse anything that is not a network."""
    if isinstance(model, nn.Module):
        return
    name = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
    raise TraceError(f"The model must be a torch.nn.Module, not {name}.")


def modules_of(model: nn.Module) -> Iterator[nn.Module]:
    """All modules of a model, each once, even where an attribute named `modules` hides the method of that name."""
    return nn.Module.modules(model)


@contextlib.contextmanager
def no_autocast() -> Iterator[None]:
    """While entered, the caller's autocast has no effect."""
    with contextlib.ExitStack() as stack:
        for device in _AUTOCAST_DEVICES:
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


def without_autocast(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Decorate a function that computes in the precision of the model or of its settings, whatever the autocast."""

    @functools.wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        with no_autocast():
            return function(*args, **kwargs)

    return run


class _Copying(TorchFunctionMode):
    """While entered, deep copies of tensors other than parameters have no history, and can be on the meta device."""

    def __init__(self, meta: bool) -> None:
        super().__init__()
        self.meta = meta

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if id(tensor) not in memo:
                if self.meta:
                    memo[id(tensor)] = on_meta(tensor)
                elif not tensor.is_leaf:
                    memo[id(tensor)] = tensor.detach().clone()
            if id(tensor) in memo:
                return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def on_meta(tensor: Tensor) -> Tensor:
    """A tensor without data, of the same shape and strides."""
    return torch.empty_like(tensor, device="meta")


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module inside DataParallel, DistributedDataParallel or torch.compile. TorchScript is refused."""
    while True:
        check_module(model)
        if any(isinstance(module, torch.jit.ScriptModule) for module in modules_of(model)):
            raise TraceError("A TorchScript module cannot be pruned. Use the Python module that it was made from.")
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
        small_parameter = nn.Parameter(small, requires_grad=parameter.requires_grad)
        small_parameter.__dict__.update(parameter.__dict__)
        memo[id(parameter)] = small_parameter
    for name, buffer in model.named_buffers():
        memo.setdefault(id(buffer), index(buffer.detach(), cuts.get(name, ()), meta))
    for module in modules_of(model):
        for attribute in vars(module).values():
            if (
                type(attribute) in (dict, OrderedDict) and not attribute
            ):  # every module has a dozen of hooks, slow to copy
                memo[id(attribute)] = type(attribute)()
            items = attribute if type(attribute) in (list, tuple) else (attribute,)
            for item in items:
                if isinstance(item, torch.Generator):  # its state must not be on the meta device
                    memo[id(item)] = item.clone_state()
    memo |= python_modules(model)

    memo_before = dict(memo)
    try:
        with _Copying(meta):
            small_model = copy.deepcopy(model, memo)
    except (TypeError, RuntimeError) as error:  # a lock, an open file
        name = _uncopied(model, memo_before)
        subject = f"The attribute {name} of the model" if name else "The model"
        raise TraceError(f"{subject} cannot be copied, as copy.deepcopy(model) shows: {error}.") from error
    for path, values in attributes.items():
        small_module = small_model.get_submodule(path)
        for name, value in values.items():
            setattr(small_module, name, value)
    return small_model


def python_modules(model: nn.Module) -> dict[int, Any]:
    """Python modules among the attributes (`self.config = config`) by id: as a memo of deepcopy, copies share them."""
    shared: dict[int, Any] = {}
    for module in modules_of(model):
        for attribute in vars(module).values():
            if isinstance(attribute, dict):
                items = list(attribute.values())
            elif isinstance(attribute, (list, tuple)):
                items = list(attribute)
            else:
                items = [attribute]
            for item in items:
                if isinstance(item, ModuleType):
                    shared[id(item)] = item
    return shared


def _uncopied(model: nn.Module, memo: Mapping[int, Any]) -> str:
    """The first attribute of a module that cannot be copied, with its path; empty if each of them can be."""
    for path, module in model.named_modules():
        for name, attribute in vars(module).items():
            if name == "_modules":  # each of them has its own turn
                continue
            try:
                with _Copying(meta=True):
                    copy.deepcopy(attribute, dict(memo))
            except (TypeError, RuntimeError):
                return f"{path}.{name}" if path else name
    return ""


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of the model on the meta device: no data is copied, tied tensors stay tied."""
    return narrow(model, {}, {}, meta=True)


def index(tensor: Tensor, cut: Cut, meta: bool = False) -> Tensor:
    """A copy of the tensor with the chosen indices of each dim."""
    if meta:
        if not cut:
            return on_meta(tensor)
        shape = [size if kept is None else len(kept) for size, kept in zip(tensor.shape, cut, strict=True)]
        return torch.empty(shape, dtype=tensor.dtype, device="meta")

    small = tensor
    for dim, kept in enumerate(cut):
        if kept is not None:
            small = small.index_select(dim, kept.to(tensor.device))
    if small is tensor:
        return small.clone()
    is_channels_last = tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    if is_channels_last and not tensor.is_contiguous():
        return small.contiguous(memory_format=torch.channels_last)
    return small.contiguous()


def map_leaves(function: Callable[[Any], Any], nested: Any) -> Any:
    """The same tuples, lists and dicts with every leaf replaced."""
    if isinstance(nested, dict):
        return {key: map_leaves(function, item) for key, item in nested.items()}
    if isinstance(nested, (tuple, list)):
        mapped = [map_leaves(function, item) for item in nested]
        return mapped if isinstance(nested, list) else tuple(mapped)
    return function(nested)


def leaves(nested: Any) -> list[Any]:
    """Everything that tuples, lists and dicts hold, in order."""
    collected: list[Any] = []
    map_leaves(collected.append, nested)
    return collected


def tensors_in(nested: Any, seen: dict[int, Any] | None = None) -> list[Tensor]:
    """Every tensor in tuples, lists, dicts, and the attributes of dataclasses and other objects, in order.

    TraceError for objects in which a tensor could not be seen, such as functions and iterators.
    """
    if isinstance(nested, Tensor):
        return [nested]
    if nested is None or isinstance(nested, _WITHOUT_TENSORS):
        return []
    if seen is None:
        seen = {}
    if id(nested) in seen:
        return []
    seen[id(nested)] = nested  # alive, so that no other object gets its id

    tensors: list[Tensor] = []
    for item in _items_of(nested):
        tensors += tensors_in(item, seen)
    return tensors


def _items_of(nested: Any) -> list[Any]:
    """The items of a collection and its attributes, or the attributes of another object."""
    if type(nested) in (list, tuple):
        return list(nested)
    if isinstance(nested, _HIDING) or (isinstance(nested, np.ndarray) and nested.dtype == object):
        raise _hides_tensors(nested)

    items: list[Any] = []
    if isinstance(nested, Mapping):
        items += [*nested.keys(), *nested.values()]
    elif isinstance(nested, _COLLECTIONS):
        items += nested
    elif not gc.is_tracked(nested):  # such an object refers to no other one
        return []
    elif not hasattr(nested, "__dict__") and not _has_slots(nested):
        raise _hides_tensors(nested)

    # Attributes of some mappings and named tuples are their items.
    item_ids = {id(item) for item in items}
    return items + [attribute for attribute in _attributes_of(nested) if id(attribute) not in item_ids]


def _has_slots(nested: Any) -> bool:
    return any("__slots__" in vars(kind) for kind in type(nested).__mro__)


def _attributes_of(nested: Any) -> list[Any]:
    """The values of an object's `__dict__` and `__slots__`."""
    attributes: list[Any] = []
    if hasattr(nested, "__dict__"):
        attributes += vars(nested).values()
    for kind in type(nested).__mro__:
        if "__slots__" not in vars(kind):
            continue
        for member in vars(kind).values():
            if isinstance(member, MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # not set
                    attributes.append(member.__get__(nested))
    return attributes


def _hides_tensors(nested: Any) -> TraceError:
    return TraceError(
        f"An input or output of the network has a {type(nested).__name__}, in which tensors cannot be found. Use a "
        "tuple, list, dict or dataclass of tensors instead."
    )


def call_model(model: Callable[..., Any], example: Any) -> Any:
    """Call a model: a tuple is positional arguments, a dict keyword arguments, anything else the one argument."""
    arguments = as_arguments(model, example)
    if isinstance(arguments, tuple):
        return model(*arguments)
    if isinstance(arguments, dict):
        return model(**arguments)
    return model(arguments)


def as_arguments(model: Callable[..., Any], example: Any) -> Any:
    """The input as `call_model` takes it: a list becomes a tuple of arguments if the model needs several.

    The default_collate of torch makes lists of the tuples in a data set; but a list may also be one argument.
    """
    if type(example) is not list:
        return example
    function = model
    if isinstance(model, nn.Module):
        function = unwrap(model).forward
    needed = 0
    for parameter in inspect.signature(function).parameters.values():
        is_positional = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        if is_positional and parameter.default is parameter.empty:
            needed += 1
    if needed > 1:
        return tuple(example)
    return example


def batch_of(example: Any) -> int | None:
    """The number of samples: dim 0 of all tensors but scalars and those that are shared by all samples."""
    sizes = {tensor.shape[0] for tensor in tensors_in(example) if tensor.ndim}
    if not sizes:
        return None
    larger = sizes - {1}
    if not larger:
        return 1
    return larger.pop() if len(larger) == 1 else None


def rebatch(example: Any, size: int) -> Any:
    """The same example with its samples repeated or dropped until there are `size` of them."""
    batch = batch_of(example)

    def with_size(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim or leaf.shape[0] != batch:
            return leaf
        return leaf[torch.arange(size, device=leaf.device) % batch]

    return map_leaves(with_size, example)


def reason_of(error: BaseException) -> str:
    """The class and the message of an error; without a message, as of a bare `assert`, the line that raised it."""
    kind = type(error).__name__
    message = " ".join(str(error).split())
    if message:
        return f"{kind}: {message}"
    frames = traceback.extract_tb(error.__traceback__)
    line = frames[-1].line if frames else None
    if line:
        return f"{kind} at `{line}`"
    return f"it raises {kind} without a message"


def split_batch(example: Any, size: int) -> Iterator[Any]:
    """Parts of an example with `size` samples each, the last one with what is left.

    An example whose samples cannot be told from its shapes is one part.
    """
    batch = batch_of(example)
    if batch is None:
        yield example
        return

    def part_of(leaf: Any, start: int) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim or leaf.shape[0] != batch:
            return leaf
        return leaf[start : start + size]

    for start in range(0, batch, size):
        yield map_leaves(functools.partial(part_of, start=start), example)


def join_batches(parts: Sequence[Any]) -> Any:
    """The samples of several examples as one example; of those that are shaped as the first one."""
    if batch_of(parts[0]) is None:
        return parts[0]
    alike = [parts[0]]
    for part in parts[1:]:
        if batch_of(part) is not None and _shapes(part) == _shapes(parts[0]):
            alike.append(part)
    joined: list[Any] = []
    for column in zip(*map(leaves, alike), strict=True):
        holds_samples = isinstance(column[0], Tensor) and column[0].ndim and len(column[0]) == batch_of(parts[0])
        joined.append(torch.cat(column) if holds_samples else column[0])
    remaining = iter(joined)
    return map_leaves(lambda leaf: next(remaining), parts[0])


def _shapes(example: Any) -> list[torch.Size | None]:
    """The shapes of the tensors of an example, without the number of samples."""
    return [leaf.shape[1:] if isinstance(leaf, Tensor) else None for leaf in leaves(example)]


@contextlib.contextmanager
def kept_modes(model: nn.Module) -> Iterator[None]:
    """Restore train or eval mode of every module at the end."""
    modes = [(module, module.training) for module in modules_of(model)]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
