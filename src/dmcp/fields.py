"""One field of a settings dataclass: its option, help, range and type are all said in one place. Imports no torch."""

from __future__ import annotations

import functools
import math
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Any

from dmcp.errors import DmcpError, TrainingError

SEARCHES = ("prune", "search")  # commands with a search
TRAININGS = ("prune", "train")  # commands with a final training
RUNS = ("prune", "search", "train")  # commands that make one run
COMMANDS = (*RUNS, "compare")
AUTOMATIC = "automatic"  # the default of what is chosen for network and data

Bound = int | Mapping[str, int]  # channels: of every space, or of modules or spaces by name; "" is the whole network
_MAX_INT: float = 2**63 - 1  # torch holds no larger ones
_MAX_FLOAT = 1e30  # products with it must fit into float32, too


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One field of a settings dataclass, as checks, files and the command line see it."""

    name: str
    type: Any  # without None
    optional: bool  # whether None is allowed
    default: Any  # MISSING if it must be given
    help: str = ""
    low: float = -math.inf  # low <= value <= high
    high: float = math.inf
    above: float = -math.inf  # above < value < below
    below: float = math.inf
    option: str | None = ""  # its name on the command line: "" is the field's own, None makes no option
    group: str = ""  # its heading in the help; "" is that of the settings it belongs to
    commands: tuple[str, ...] = ()  # commands with this option; () are those of the settings it belongs to
    shown: str = ""  # its default in words, where the value does not say it
    fixed: bool = True  # False: may change when a run is resumed, since it does not change the result


def setting(default: Any = MISSING, help: str = "", low: float = -math.inf, high: float = math.inf, **more: Any) -> Any:
    """A field of a settings dataclass; `more` are other fields of `Setting`.

    Such a field is all that a new setting needs: its option, help, range check, line in settings.json and key in
    recipes are made from it.
    """
    metadata = {"help": help, "low": low, "high": high, **more}
    if default == {}:
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@functools.cache
def describe(kind: type) -> tuple[Setting, ...]:
    """All fields of a settings dataclass. This is the only place that looks at its annotations."""
    annotations = typing.get_type_hints(kind)
    described = []
    for each in fields(kind):
        parts = typing.get_args(annotations[each.name])
        optional = types.NoneType in parts
        value_type = annotations[each.name]
        if optional:
            value_type = typing.Union[tuple(part for part in parts if part is not types.NoneType)]  # noqa: UP007
        default = each.default_factory() if each.default_factory is not MISSING else each.default
        metadata = _metadata(kind, each.name)
        described.append(Setting(name=each.name, type=value_type, optional=optional, default=default, **metadata))
    return tuple(described)


def _metadata(kind: type, name: str) -> Mapping[str, Any]:
    """What `setting` says of a field. A subclass that only narrows the type of a field does not repeat it."""
    for base in kind.__mro__:
        if is_dataclass(base) and name in base.__dataclass_fields__ and base.__dataclass_fields__[name].metadata:
            return base.__dataclass_fields__[name].metadata
    return {}


def check(settings: Any, error: type[DmcpError] = TrainingError) -> None:
    """Refuse values of the wrong type or range; strings become members of their Enum."""
    kind: Any = type(settings)
    for described in describe(kind):
        value = getattr(settings, described.name)
        if value is None and described.optional:
            continue
        expected = _expected(described, value)
        if expected:
            raise error(f"{described.name} must be {expected}, not {value!r}.")
        if _is_enum(described.type):
            object.__setattr__(settings, described.name, described.type(value))


def _is_enum(value_type: Any) -> bool:
    return isinstance(value_type, type) and issubclass(value_type, StrEnum)


def _expected(described: Setting, value: Any) -> str:
    """What the value should have been; empty if it is as it should be. Types that are not listed are not checked."""
    if described.type in (int, float):
        return _expected_number(described, value)
    if _is_enum(described.type):
        expected = f"one of {', '.join(described.type)}"
        is_allowed = isinstance(value, str) and value in list(described.type)
    elif described.type is bool:
        expected = "True or False"
        is_allowed = isinstance(value, bool)
    elif described.type == Bound:
        expected = "an int of at least 1, or such ints by name"
        is_allowed = _are_counts(value)
    else:
        return ""
    if is_allowed:
        return ""
    return expected


def _are_counts(value: Any) -> bool:
    """Whether a bound is a count, or counts by name."""
    numbers = [value]
    if isinstance(value, Mapping):
        numbers = list(value.values())
    return all(type(number) is int and number >= 1 for number in numbers)


def _expected_number(described: Setting, value: Any) -> str:
    """Which numbers a setting takes; empty if the value is one of them."""
    if described.type is int:
        expected, largest = "an int", _MAX_INT
        is_number = isinstance(value, int) and not isinstance(value, bool)
    else:
        expected, largest = "a number", _MAX_FLOAT
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_allowed = is_number and described.low <= value <= min(described.high, largest)
    if is_allowed and described.above < value < described.below:
        return ""
    if described.above > -math.inf:
        expected += f" above {described.above}"
    elif described.low > -math.inf:
        expected += f" of at least {described.low}"
    if described.below < math.inf:
        expected += f" and below {described.below}"
    elif described.high < math.inf:
        expected += f" and at most {described.high}"
    elif is_number and value > largest:
        expected += f" and at most {largest}"
    return expected
