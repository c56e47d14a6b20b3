"""An optimizer of the user's own: whether it can be used, and its state as tensors that a checkpoint can hold."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dmcp.engine import Engine
from dmcp.errors import FileError, TrainingError

MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]  # parameter groups -> what trains them

_STATE, _GROUPS = "state", "groups"  # what an optimizer keeps of each parameter, and of each group
_BESIDE, _HOST, _NUMBER = "beside", "host", "number"  # a tensor where its parameter is, one on the host, a plain number
_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}  # a bool is an int, too: it comes first
_REMEDY = "take another optimizer, or train without a keeper."


def make_optimizer(make: MakeOptimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """What the function makes of the groups; TrainingError where it cannot train them."""
    wanted = {id(parameter) for group in groups for parameter in group["params"]}
    made = make(groups) if callable(make) else make
    if not callable(make) or not isinstance(made, torch.optim.Optimizer):
        raise TrainingError(
            "optimizer must be a function that makes a torch.optim.Optimizer of parameter groups, like "
            f"optimizer=torch.optim.AdamW; this {'gives' if callable(make) else 'is'} a {type(made).__name__}."
        )
    name = type(made).__name__
    if {id(parameter) for parameter in _parameters(made)} != wanted:
        raise TrainingError(
            f"The {name} has other parameters than it was given: give it all of the groups; what is not to be trained "
            "has requires_grad=False."
        )
    if not all("lr" in group for group in made.param_groups):
        raise TrainingError(f"The {name} has groups without an lr, which the schedule sets: take another one.")
    _, *inputs = inspect.signature(type(made).step).parameters.values()
    if any(it.default is it.empty and it.kind not in (it.VAR_POSITIONAL, it.VAR_KEYWORD) for it in inputs):
        raise TrainingError(f"The step of {name} needs a closure, which there is not: take another optimizer.")
    return made


def rate_shares(optimizer: torch.optim.Optimizer) -> list[float]:
    """What a new optimizer's groups learn at, relative to the rate of the schedule.

    The rate that groups without their own have stands for the schedule's. Where none has that one, the highest does: it
    may be a default that nobody chose, and no group is then faster than the settings say.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    if not all(isinstance(rate, int | float | Tensor) for rate in rates):
        return [1.0] * len(rates)
    usual, numbers = optimizer.defaults.get("lr"), [float(rate) for rate in rates]
    base = float(usual) if isinstance(usual, int | float | Tensor) and float(usual) in numbers else 0.0
    base = base or max(numbers)
    return [rate / base if base else 1.0 for rate in numbers]


def check_graphs(engine: Engine | None, make: MakeOptimizer | None) -> None:
    """Refuse CUDA graphs: a graph would replay the learning rate that an optimizer had when it was captured."""
    if make is not None and engine is not None and engine.graphs:
        raise TrainingError(
            "Steps with an optimizer of your own cannot be CUDA graphs: leave graphs out of the Engine."
        )


# its state: names are Class/part/number/kind/key


def check_keepable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a state that no checkpoint can hold: every rank asks, though one writes, so that all say the same."""
    name = type(optimizer).__name__
    known = {id(parameter) for parameter in _parameters(optimizer)}
    for owner in optimizer.state:
        if id(owner) not in known:
            raise TrainingError(f"The {name} keeps {owner!r} in its state, which is of no parameter: {_REMEDY}")
    for values, _ in _parts(optimizer)[_STATE]:  # groups also have settings that never change
        for key, value in values.items():
            if value is not None and not isinstance(value, Tensor | int | float):
                raise TrainingError(
                    f"The {name} keeps a {type(value).__name__} ({key}) in its state, which no checkpoint can "
                    f"hold: {_REMEDY}"
                )


def state_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All that changes from step to step, of a state that was checked, by names that say what it was."""
    found: dict[str, Tensor] = {}
    name = type(optimizer).__name__
    for part, owners in _parts(optimizer).items():
        for number, (values, parameter) in enumerate(owners):
            for key, value in values.items():
                if isinstance(value, Tensor):
                    kind = _BESIDE if value.device == parameter.device else _HOST
                    found[f"{name}/{part}/{number}/{kind}/{key}"] = value.detach().cpu()
                elif isinstance(value, int | float):
                    dtype = next(
                        dtype for kind, dtype in _DTYPES.items() if isinstance(value, kind)
                    )  # also NumPy's float
                    found[f"{name}/{part}/{number}/{_NUMBER}/{key}"] = torch.tensor(value, dtype=dtype)
    return found


def check_state(optimizer: torch.optim.Optimizer, taken: Mapping[str, Tensor]) -> None:
    """Refuse the state of another optimizer."""
    owners, name = _parts(optimizer), type(optimizer).__name__
    paths = [path.split("/", 4) for path in taken]
    if not paths or not all(path[0] == name and int(path[2]) < len(owners[path[1]]) for path in paths):
        raise FileError(f"This checkpoint is of another optimizer than {name}: give the one that it began with.")


@torch.no_grad()
def put_state(optimizer: torch.optim.Optimizer, taken: Mapping[str, Tensor]) -> None:
    """Bring a new optimizer, checked before, to the state that was taken."""
    owners = _parts(optimizer)
    for path, value in taken.items():
        _, part, number, kind, key = path.split("/", 4)
        values, parameter = owners[part][int(number)]
        if part == _STATE:
            values = optimizer.state[parameter]
        values[key] = _brought_back(value, kind, parameter)


def _brought_back(value: Tensor, kind: str, parameter: Tensor) -> Any:
    """What a value was; what has a parameter's shape also gets its layout, which fused steps want."""
    if kind == _NUMBER:
        return value.item()
    if kind == _HOST:
        return value.clone()
    if value.shape != parameter.shape:
        return value.to(parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _parts(optimizer: torch.optim.Optimizer) -> dict[str, list[tuple[dict[str, Any], Tensor]]]:
    """What each parameter and each group has, with a parameter that is where its tensors are.

    Asked for by get: an empty state that we had made would look to some optimizers like one that they have begun.
    """
    parameters = list(_parameters(optimizer))
    groups = [(group, parameters[0]) for group in optimizer.param_groups]
    return {_STATE: [(optimizer.state.get(it, {}), it) for it in parameters], _GROUPS: groups}


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])
