"""The command `dmcp`: thin functions over the public ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from textwrap import TextWrapper
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

import dmcp
from dmcp import bench_commands, commands, report_commands
from dmcp.errors import DmcpError, RankError, StoppedError
from dmcp.graph import ChannelGraph
from dmcp.jobs import argument
from dmcp.jobs import shape as parse_shape
from dmcp.nets import build, sample_shape
from dmcp.ranks import EXIT_RANK_LOST
from dmcp.tracing import trace

app = typer.Typer(add_completion=False, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)

_EXIT = {StoppedError: 3, RankError: EXIT_RANK_LOST}  # 2 is a mistake in what was asked for, 1 one of ours
_PIPE = TextWrapper(44, break_long_words=False, break_on_hyphens=False)  # a cell in a pipe; four columns in 80


def main() -> None:
    """Run the command; what is wrong with the input is one sentence on stderr and exit code 2."""
    sys.path.insert(0, "")  # `mynet:build` may lie in the current folder
    try:
        app(prog_name="dmcp")
    except DmcpError as error:
        print(f"dmcp: {error}", file=sys.stderr)
        raise SystemExit(_EXIT.get(type(error), 2)) from None


def _version(wanted: bool) -> None:
    if wanted:
        print(f"torch-dmcp {dmcp.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Channel pruning for any PyTorch CNN."""


@app.command()
def inspect(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="resnet18 (torchvision), timm:NAME, or package.module:factory.")
    ],
    input: Annotated[str, typer.Option(help="Shape of one sample, like 3x224x224; default: the model's own.")] = "",
    model_args: Annotated[
        list[str] | None, typer.Option(help="Argument of the model's builder, like width_mult=1.5; may be repeated.")
    ] = None,
    frozen: Annotated[
        list[str] | None, typer.Option(help="Module or space whose channels stay whole; may be repeated.")
    ] = None,
    inexact: Annotated[
        bool, typer.Option("--inexact", help="Prune through LayerNorm and GroupNorm too, where gates only approximate.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print plain data instead of tables.")] = False,
) -> None:
    """Show what can be pruned in a network, what is tied together, and what is kept whole and why."""
    net = build(model, **dict(map(argument, model_args or [])))
    shape = parse_shape(input) if input else sample_shape(net)
    graph = trace(net, torch.zeros(2, *shape), frozen=tuple(frozen or ()), exact=not inexact)
    if as_json:
        print(json.dumps({"model": model} | graph.to_json(), indent=1))
    else:
        _show(model, shape, graph)


for _command in (commands.prune, commands.search, commands.sample, commands.train, commands.evaluate):
    app.command()(_command)
app.command()(bench_commands.bench)
app.command()(report_commands.runs)
app.command()(report_commands.report)


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
    for kept in graph.whole:
        alike.setdefault((kept.size, kept.reason), []).append(kept.name)
    whole = [(", ".join(names), str(size), reason) for (size, reason), names in alike.items()]
    bindings = [(f"{it.module}.{it.attribute}".lstrip("."), str(it.value), it.follows) for it in graph.bindings]

    print(f"{name}, one sample of {'x'.join(map(str, shape))}")
    print(f"{_count(macs)} MACs ({macs:,}), {_count(params)} params ({params:,})")
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
