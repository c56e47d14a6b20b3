"""Narrow a module: its tensors by index, its attributes by value. The module itself is never changed."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.overrides import TorchFunctionMode

from dmcp.errors import TraceError
from dmcp.kinds import check_module

Cut = tuple[Tensor | None, ...]  # per dim: the indices that stay, None for all


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
        if isinstance(model, torch.jit.ScriptModule):
            raise TraceError("A TorchScript module cannot be pruned: give the Python module it was made from.")
        if type(model).__name__ == "FullyShardedDataParallel" or type(model).__name__.startswith("FSDP"):
            raise TraceError("A module wrapped in FSDP cannot be pruned: trace it before wrapping.")
        inner = getattr(model, "_orig_mod", None)  # torch.compile
        if inner is None and isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            inner = model.module
        if inner is None:
            _check_built(model)
            return model
        model = inner


def _check_built(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if isinstance(tensor, UninitializedBuffer | UninitializedParameter):
            raise TraceError(f"{name} has no shape yet: call the model once on a batch, as lazy layers need it.")


def narrow(
    model: nn.Module,
    cuts: Mapping[str, Cut],
    attributes: Mapping[str, Mapping[str, Any]],
    meta: bool = False,
) -> nn.Module:
    """A copy of the model with some tensors indexed per dim and some attributes set; tied tensors stay tied.

    The copy is made of the narrow tensors at once: the wide ones are never copied.
    """
    memo: dict[int, Any] = {}
    for name, parameter in model.named_parameters():
        small = _index(parameter.detach(), cuts.get(name, ()), meta)
        memo[id(parameter)] = nn.Parameter(small, requires_grad=parameter.requires_grad)
        memo[id(parameter)].__dict__.update(parameter.__dict__)
    for name, buffer in model.named_buffers():
        memo.setdefault(id(buffer), _index(buffer.detach(), cuts.get(name, ()), meta))
    for module in model.modules():  # every module has a dozen empty dicts of hooks, slow to copy
        memo.update((id(held), type(held)()) for held in vars(module).values() if _empty_dict(held))
    with _Copying(meta):
        small_model = copy.deepcopy(model, memo)
    for path, values in attributes.items():
        module = small_model.get_submodule(path)
        for attribute, value in values.items():
            setattr(module, attribute, value)
    return small_model


def _empty_dict(held: Any) -> bool:
    return type(held) in (dict, OrderedDict) and not held


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of the model on the meta device: no data is copied, tied tensors stay tied."""
    return narrow(model, {}, {}, meta=True)


def _index(tensor: Tensor, cut: Cut, meta: bool) -> Tensor:
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
