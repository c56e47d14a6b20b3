"""Methods, their settings and given widths as people type them; what cannot be is refused with one sentence."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from dmcp.budget import parse
from dmcp.comparison.comparing import Comparison, check_method
from dmcp.errors import DmcpError, FileError, TrainingError, WidthsError
from dmcp.files import MOST_JSON, parse_json, read_bytes
from dmcp.methods import GIVEN, METHODS, PEERS, find_method, title
from dmcp.methods.problem import Choice, Problem, ends_of
from dmcp.plain_data import from_plain
from dmcp.running.jobs import Opened, argument
from dmcp.spaces import Widths


def read_names(methods: str) -> list[str]:
    """Names with commas between them, or all."""
    names = [word.strip() for word in methods.split(",") if word.strip()]
    found = [*METHODS] if names == ["all"] else names
    for name in found:
        if name.startswith(GIVEN):  # what rows of --widths are called inside
            raise DmcpError(f"There is no method {name!r}: for widths of your own give --widths NAME=FILE.")
        check_method(name)
    return found


def read_peers(names: Sequence[str]) -> Sequence[str]:
    """Packages of other people, if they are here."""
    for name in names:
        if name not in PEERS:
            near = difflib.get_close_matches(name, PEERS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(PEERS)}."
            raise DmcpError(f"--peer: there is no peer {name!r}: {hint}")
        if importlib.util.find_spec(name.replace("-", "_")) is None:
            raise DmcpError(f"--peer: {name} is not installed: pip install {name}, or leave this peer out.")
    return names


def read_settings(texts: Sequence[str], methods: Sequence[str]) -> dict[str, dict[str, Any]]:
    """amc.episodes=100 as a mapping of mappings; methods that are imported are named by their titles."""
    found: dict[str, dict[str, Any]] = {}
    titles = {title(name): name for name in methods}
    for text in texts:
        place, equals, _ = text.partition("=")
        told, dot, name = place.rpartition(".")
        if not equals or not dot or not name.isidentifier():
            raise DmcpError(f"--set: {text!r} is not of the form METHOD.NAME=VALUE, like amc.episodes=100.")
        method = titles.get(told, told)
        check_method(method)
        if method == "dmcp-direct":
            raise DmcpError(f"--set: dmcp-direct draws from the search of dmcp: set dmcp.{name}.")
        _, value = argument(text.removeprefix(f"{told}."))
        _check_value(method, name, value)
        if name in found.setdefault(method, {}):
            raise DmcpError(f"--set: {place} is given twice: give it once.")
        found[method][name] = value
    for method, values in found.items():
        find_method(method).config(**values)
    return found


def _check_value(method: str, name: str, value: Any) -> None:
    """Refuse a setting that the method does not have, or that cannot be this value."""
    config: Any = find_method(method).config
    if not is_dataclass(find_method(method).config):
        raise DmcpError(
            f"--set: the settings of {method} are no dataclass: give Method(config=) one, or leave this out."
        )
    known = [it.name for it in fields(config)]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(known) or 'none'}."
        raise DmcpError(f"--set: {method} has no setting {name!r}: {hint}")
    try:
        fits = getattr(from_plain(config, {name: value}), name) == value
    except TrainingError:  # it may be right together with others
        return
    except (TypeError, ValueError):
        fits = False
    if not fits:  # among them dataclasses in dataclasses, for which the command line has no words
        usual = getattr(config(), name)
        hint = f": write it like \"{method}.{name}={{'warmup': 0.2}}\"" if isinstance(usual, Mapping) else ""
        raise DmcpError(f"--set: {method}.{name} cannot be {value!r}{hint}.")


def read_given(texts: Sequence[str]) -> dict[str, Widths | dict[str, int]]:
    """NAME=FILE as the name of a method and its widths."""
    found: dict[str, Widths | dict[str, int]] = {}
    for text in texts:
        name, equals, file = text.partition("=")
        if not equals or not file or not re.fullmatch(r"[A-Za-z0-9][\w.+-]*", name):
            raise DmcpError(f"--widths: {text!r} is not of the form NAME=FILE, like hand=widths.json.")
        if GIVEN + name in found:
            raise DmcpError(f"--widths: {name} is given twice: give each a name of its own.")
        plain = parse_json(read_bytes(Path(file), MOST_JSON), file)
        ours = isinstance(plain, dict) and {"widths", "fingerprint"} <= plain.keys()
        if not isinstance(plain, dict) or not (ours or all(type(kept) is int for kept in plain.values())):
            raise FileError(f'{file}: not a file of widths: give a widths.json, or {{"space": width, ...}}.')
        found[GIVEN + name] = Widths.from_json(plain) if ours else plain
    return found


def fitting_budgets(
    it: Comparison, given: Mapping[str, Mapping[str, int]], opened: Opened
) -> dict[str, tuple[str, ...]]:
    """Of each of the given widths the budgets that they use, as all choices must; at least one."""
    found: dict[str, tuple[str, ...]] = {}
    floor, ceiling = ends_of(opened.model, opened.graph, it.groups, it.align, it.smallest, it.largest)
    for name, kept in given.items():
        try:
            widths, reasons = opened.graph.widths(kept), list[str]()
        except WidthsError as error:
            raise WidthsError(f"--widths: {title(name)}: {error}") from None
        for text in it.budgets:
            problem = Problem(
                model=opened.model,
                graph=opened.graph,
                loader=opened.loaders.train,
                held=opened.loaders.test,
                budget=parse(text, opened.graph),
                recipe=it.train,
                floor=floor,
                ceiling=ceiling,
                align=it.align,
            )
            try:
                Choice(widths=widths, kept=widths).check(problem)
                found[name] = (*found.get(name, ()), text)
            except DmcpError as error:
                reasons.append(str(error).replace("The method chose widths that", "they").rstrip("."))
        if name not in found:
            raise DmcpError(f"--widths: {title(name)} is not inside any budget: {'; '.join(reasons)}.")
    return found
