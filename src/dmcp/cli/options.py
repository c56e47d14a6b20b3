"""The options of the commands, made from the fields of the settings."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from dmcp.cli.completion import COMPLETIONS
from dmcp.cli.config import SETTINGS_OPTIONS, ComparisonOptions, Option, Request, option_word, options_of
from dmcp.fields import AUTOMATIC, Bound, Setting

_GROUPS = ("Model and data", "Budget", "Latency", "Search", "Training", "Batches and device", "Run", "Comparison")
_REQUEST_OPTIONS = options_of(Request)
_COMPARISON_OPTIONS = options_of(ComparisonOptions, group="Comparison", commands=("compare",))
_PLAIN_TYPES = (int, float, str, bool)


class Grouped(TyperCommand):
    """A command whose help lists arguments first, then options in groups, all of them in the same form."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments and options, group by group."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:  # a hidden option
                continue
            words, _ = record  # the rest is typer's text, which also has ranges and defaults as raw values
            name = getattr(parameter, "rich_help_panel", None) or "Options"
            if parameter.param_type_name == "argument":
                words = str(parameter.metavar)
                name = "Arguments"
            groups.setdefault(name, []).append((words, parameter_help(parameter)))
        for name, records in groups.items():
            with formatter.section(name):
                formatter.write_dl(records)


def parameter_help(parameter: Any) -> str:
    """The help of an argument or option of any command, and its default, where the help does not name one."""
    text = str(parameter.help)
    if parameter.required:
        return f"{text} Required."
    default = _default_words(parameter.default)
    return f"{text} Default: {default}." if default and "Default:" not in text else text


def takes_settings(run: Callable[[Request], None]) -> Callable[..., None]:
    """A command that takes all the options of its name, and gets them as a Request."""
    command = run.__name__
    options = {name: option for name, option in _all_options(command).items() if command in option.commands}

    def typed(**values: Any) -> None:
        settings: dict[str, Any] = {}  # only those that were typed
        request: dict[str, Any] = {}
        more: dict[str, Any] = {}
        for name, value in values.items():
            field_name = options[name].setting.name
            if options[name] is _COMPARISON_OPTIONS.get(name):
                more[field_name] = value
            elif options[name] is _REQUEST_OPTIONS.get(name):
                request[field_name] = value
            elif value not in (None, []):
                settings[name] = value
        if "seeds" in more:
            request["seeds"] = more["seeds"]
        run(Request(command=command, typed=settings, more=more, **request))

    ordered = sorted(options.values(), key=lambda option: _GROUPS.index(option.group))
    parameters = [_parameter(option, command) for option in ordered]
    typed.__name__ = command
    typed.__doc__ = run.__doc__
    typed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    typed.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return typed


def _all_options(command: str) -> dict[str, Option]:
    """Every option; those of dmcp compare replace others of the same name."""
    options = SETTINGS_OPTIONS | _REQUEST_OPTIONS
    if command == "compare":
        options |= _COMPARISON_OPTIONS
    return options


def _parameter(option: Option, command: str) -> inspect.Parameter:
    """The option as a parameter that typer reads; a setting of a run is None unless it is typed."""
    described = option.setting
    is_setting = option is SETTINGS_OPTIONS.get(option.name)
    default = None
    if not is_setting and described.default != ():
        default = described.default
    details: dict[str, Any] = {
        "rich_help_panel": option.group,
        "show_default": False,
        "help": _help_text(described, command),
    }
    if not is_setting and described.type is int:  # a setting of a run is checked where it is made
        details |= {"min": int(described.low), "metavar": "<int>"}
    if _typed_as(described) == list[str]:
        details["metavar"] = "<str>"
    if described.type == Bound:
        details["metavar"] = "[NAME=]N"
    if option.name in COMPLETIONS:
        details["autocompletion"] = COMPLETIONS[option.name]

    words = [option_word(option.name)]
    if described.type is bool and described.default is not False:
        words = []  # typer makes --name and --no-name
    annotation: Any = Annotated[_typed_as(described) | None, typer.Option(*words, **details)]
    if default is not None:
        annotation = Annotated[_typed_as(described), typer.Option(*words, **details)]
    return inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _typed_as(described: Setting) -> Any:
    """The type that typer reads for an option. Anything but a plain value is read as texts, and converted later."""
    is_enum = isinstance(described.type, type) and issubclass(described.type, StrEnum)
    if is_enum or described.type in _PLAIN_TYPES:
        return described.type
    return list[str]


def _help_text(described: Setting, command: str) -> str:
    """The help of a setting and its default, where the help does not say it."""
    default = described.shown
    if default == AUTOMATIC:
        default = "automatic (written to settings.json)"
        if command in _REQUEST_OPTIONS["dry_run"].commands:
            default = "automatic (shown by --dry-run)"
    elif not default:
        default = _default_words(described.default)
    if not default:
        return described.help
    return f"{described.help} Default: {default}."


def _default_words(value: object) -> str:
    """A default in words; empty if there is nothing to say, as for an empty text or an option that is off."""
    if value is True:
        return "yes"
    if isinstance(value, str | int | float | Path) and value not in ("", 0):
        return str(value)
    return ""
