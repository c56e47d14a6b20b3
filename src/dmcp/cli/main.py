"""The command `dmcp`."""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterable, Sequence
from textwrap import TextWrapper
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from typer.core import TyperCommand

import dmcp
from dmcp.cli import config as o
from dmcp.cli import prune, show
from dmcp.cli.job import argument
from dmcp.cli.job import shape as parse_shape
from dmcp.errors import DmcpError, RankError, StoppedError
from dmcp.interrupts import INTERRUPTED, raise_again
from dmcp.models import build, sample_shape
from dmcp.runtime.distributed import EXIT_RANK_LOST
from dmcp.runtime.io import plain
from dmcp.tracing.cost import show_bytes
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.trace import trace

_CODES = """\b
Exit codes:
  0    done
  1    a bug in dmcp: please report it
  2    a mistake in what was asked for, told in one sentence on stderr
  3    stopped as asked; the command that goes on is on stderr
  75   lost another rank: the same command, with --resume, goes on
  130  interrupted by Ctrl-C
  141  the reader of the output has gone, as head does
Results are on stdout, all else is on stderr."""

app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, epilog=_CODES)

_EXIT = {StoppedError: 3, RankError: EXIT_RANK_LOST}
_MISTAKE, _BUG, _NO_READER = 2, 1, 141
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]  # click's, which newer typers have a copy of
_LONGEST = 1000  # letters of a sentence
_ABSENT = {  # options of the other commands that compare has not, and why
    "--weights": "all methods begin from scratch, or from a network that the command trains itself.",
    "--resume": "the same command with the same --out goes on.",
}
_PIPE = TextWrapper(44, break_long_words=False, break_on_hyphens=False)  # a cell in a pipe; four columns in 80


def main() -> None:
    """Run the command; what is wrong with the input is one sentence on stderr and exit code 2."""
    sys.path.insert(0, "")  # `mynet:build` may lie in the current folder
    code = _run()
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError:
        code = code or _NO_READER
    if code == _NO_READER:  # Python writes nowhere, when it ends, what nobody could be given
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    raise SystemExit(code)


def _run() -> int:
    """Run the command; its exit code."""
    try:
        raise_again()
        with warnings.catch_warnings():
            warnings.showwarning = _show_warning
            code = app(prog_name="dmcp", standalone_mode=False)
        if sys.stdout:
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except DmcpError as error:
        return _tell(error, str(error), _EXIT.get(type(error), _MISTAKE))
    except _UsageError as error:
        return _tell(error, _explain(error), _MISTAKE)
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):  # so typer has it
            raise
        return _NO_READER
    except BrokenPipeError:
        return _NO_READER
    except OSError as error:  # of the machine: a full disk, a folder that nobody may read
        told = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
        return _tell(error, f"{told or error}.", _MISTAKE)
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except Exception as error:
        traceback.print_exc()
        return _tell(None, f"this is a bug, please report it with the lines above ({type(error).__name__}).", _BUG)


def _show_warning(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
    """Of ours the sentence alone: a person at the command line has no use for the line of the code."""
    ours = category.__module__.partition(".")[0] == "dmcp"
    told = f"{message}\n" if ours else warnings.formatwarning(message, category, *place[:2])
    print(told, end="", file=sys.stderr)


def _tell(error: Exception | None, sentence: str, code: int) -> int:
    """Print one line; what a file or torch has said may have more."""
    if error and "--debug" in sys.argv:
        traceback.print_exception(error)
    line = plain(" ".join(sentence.splitlines()))
    line = line if len(line) <= _LONGEST else f"{line[: _LONGEST // 2]} … {line[-_LONGEST // 2 :]}"
    print(f"dmcp: {line}", file=sys.stderr)
    return code


def _explain(error: Any) -> str:
    """What is wrong with the words of the command line, and where to read more."""
    more = f"see {error.ctx.command_path if error.ctx else 'dmcp'} --help."
    if hasattr(error, "possibilities") and error.ctx:
        known = [name for option in error.ctx.command.params for name in option.opts + option.secondary_opts]
        if reason := _ABSENT.get(error.option_name) if error.ctx.info_name == "compare" else None:
            return f"There is no option {error.option_name}: {reason}"
        near = difflib.get_close_matches(error.option_name, known, n=1, cutoff=0.7)
        return f"There is no option {error.option_name}; {f'did you mean {near[0]}?' if near else more}"
    text = error.format_message().replace("Value error, ", "").rstrip(".")
    if command := re.match(r"No such command '(.*?)'", text):
        meant = _near_command(command[1], error.ctx.command.list_commands(error.ctx))
        text = f"{command[0]}{f'. Did you mean {meant!r}?' if meant else ''}"
    return text if text.endswith("?") else f"{text}; {more}"


def _near_command(word: str, known: Iterable[str]) -> str:
    """The command that was meant: people swap and drop letters, but rarely the first one; import is not report."""
    near = difflib.get_close_matches(word, [name for name in known if name[0] == word[:1]], n=1, cutoff=0.7)
    return near[0] if near else ""


class _OneBudget(TyperCommand):
    """A command that refuses a second --budget, which compare takes: click would quietly forget the first."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = [param.name for param in self.make_parser(ctx).parse_args(args=list(args))[2]]  # in their order
        if (times := given.count("budget")) > 1 and not ctx.resilient_parsing:
            raise DmcpError(
                f"--budget is given {times} times: give one. Where all must hold, write them as one, like "
                "50%,params:2M; for several networks, give the command again for each."
            )
        return super().parse_args(ctx, args)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"torch-dmcp {dmcp.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _common(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: o.Debug = False,
) -> None:
    """Channel pruning for any PyTorch CNN.

    \b
    Examples:
      dmcp inspect resnet18
      dmcp prune --model digits:resnet --data digits --budget 50%
      dmcp COMMAND --help
    """
    if ctx.invoked_subcommand is None:
        print(ctx.get_help())


@app.command()
def inspect(
    model: o.ModelName,
    input: Annotated[str, typer.Option(help="Shape of one sample, like 3x224x224; default: the model's own.")] = "",
    model_args: o.ModelArgs = None,
    ignore: o.Ignore = None,
    inexact: Annotated[
        bool, typer.Option("--inexact", help="Prune through LayerNorm and GroupNorm too, where gates only approximate.")
    ] = False,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Show what can be pruned in a network, what is tied together, and what is kept whole and why.

    \b
    Examples:
      dmcp inspect resnet50
      dmcp inspect mobilenet_v2 --model-args width_mult=1.5
      dmcp inspect timm:convnext_tiny --input 3x128x128 --inexact
      dmcp inspect mypackage.nets:build --ignore head --json
    """
    if not o.is_first():
        return
    net = build(model, **dict(map(argument, model_args or [])))
    shape = parse_shape(input) if input else sample_shape(net)
    graph = trace(net, torch.zeros(2, *shape), ignore=tuple(ignore or ()), exact=not inexact)
    if as_json:
        print(json.dumps({"model": model} | graph.to_json(), indent=1))
    else:
        _show(model, shape, graph)


for _command in (prune.prune, prune.search, show.sample):
    app.command(cls=_OneBudget)(_command)
app.command()(prune.train)
app.command()(show.data)
app.command()(show.evaluate)
app.command()(show.export)
app.command()(prune.latency)
app.command()(show.runs)
app.command()(show.compare)
app.command(hidden=True)(show.compare_run)
app.command()(show.report)


def _count(number: int) -> str:
    """4089184256 -> 4.09 G; the unit is the largest of which there is at least a tenth."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size / 10:
            return f"{number / size:.2f} {unit}"
    return str(number)


def _show(name: str, shape: tuple[int, ...], graph: ChannelGraph) -> None:
    """Totals, then three tables: the spaces, what is kept whole, the attributes that follow a width."""
    macs, params = graph.macs(graph.full), graph.params(graph.full)
    spaces = [
        (space.name, str(space.size), ", ".join(space.writers), f"{graph.space_share(space):.1%}")
        for space in graph.spaces
    ]
    alike: dict[tuple[int, str], list[str]] = {}
    for kept in graph.unprunable:
        alike.setdefault((kept.size, kept.reason), []).append(kept.name)
    whole = [(", ".join(names), str(size), reason) for (size, reason), names in alike.items()]
    bindings = [(f"{it.module}.{it.attribute}".lstrip("."), str(it.value), it.follows) for it in graph.bindings]

    print(f"{name}, one sample of {'x'.join(map(str, shape))}")
    print(f"{_count(macs)} MACs ({macs:,}), {_count(params)} params ({params:,})")
    print(f"{show_bytes(graph.memory())} of activations at once, when {graph.memory_at() or 'the model'} runs")
    print(f"{len(graph.spaces)} spaces; {graph.prunable_share:.1%} of the MACs are in layers that read or write one")
    print("\nChannels that are kept or dropped together, and the MACs in layers on them")
    _print_table(("space", "size", "layers tied to it", "MACs"), spaces)
    if whole:
        print("\nChannels that are kept whole")
        _print_table(("layers", "size", "why"), whole)
    if bindings:
        print("\nAttributes of modules that follow a width, found by replay")
        _print_table(("attribute", "now", "follows"), bindings)
    for op, times in graph.unknown.items():
        print(f"\nNo rule for {op} (called {times} times): what it touches is kept whole.")
    for note in graph.notes:
        print(f"\nNote: {note}")


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """As wide as the terminal; in a pipe as wide as it must be, so that no name is broken."""
    console = Console(highlight=False, markup=False, emoji=False)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in ("size", "now", "MACs") else "left", overflow="fold")
    for row in rows:
        table.add_row(*(row if console.is_terminal else map(_PIPE.fill, row)))
    if not console.is_terminal:
        console.width = 100_000
    console.print(table)
