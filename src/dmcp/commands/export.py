"""The command that writes the network of a run as a file that runs elsewhere."""

from __future__ import annotations

import contextlib
import shlex
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from dmcp.commands import options as o
from dmcp.commands.earlier_runs import check_names, read_plan
from dmcp.commands.int8 import Networks, open_images, write_int8
from dmcp.commands.printing import print_json, result_facts
from dmcp.errors import DmcpError, FileError
from dmcp.exporting import NOTE, PASSES, TOLERANCE, Exported, Format, check_target, milliseconds
from dmcp.exporting import export as write
from dmcp.rows import not_faster
from dmcp.running.jobs import build, trace_job
from dmcp.running.sessions import INPUT, say
from dmcp.runs import read_json
from dmcp.saving import WIDTHS, load
from dmcp.spaces import Widths
from dmcp.tables import table
from dmcp.tracing.graph import ChannelGraph


def export(
    run: o.RunFolder,
    out: Annotated[
        Path | None, typer.Option(help="File to write, .onnx or .pt2 (torch.export); default: model.onnx in the run.")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(help="Largest difference from the network's outputs, as a share of the largest one.")
    ] = TOLERANCE,
    int8: Annotated[
        bool,
        typer.Option(
            "--int8", help="8 bits for weights and activations, ranges from training images; default: model.int8.onnx."
        ),
    ] = False,
    quiet: o.Quiet = False,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Write the network of a run as a file that runs elsewhere, once it is known to do the same.

    \b
    Examples:
      dmcp export runs/resnet18-photos-prune
      dmcp export runs/resnet18-photos-prune --out photos.onnx --json
      dmcp export runs/resnet18-photos-prune --out photos.pt2
      dmcp export runs/resnet18-photos-prune --int8
    """
    if not o.is_first():
        return
    out = out or run / (f"model.int8{Format.ONNX}" if int8 else f"model{Format.ONNX}")
    small, fresh, graph, shape = _read(run, out, tolerance)
    images = open_images(run, out) if int8 else None
    widths = graph.widths(Widths.from_json(read_json(run / WIDTHS)))
    how = read_json(run / INPUT)
    example = torch.zeros(1, *shape)
    if images:
        found = write_int8(Networks(small, fresh, example, how), images, out, tolerance, quiet)
        facts = result_facts(run, graph, widths) | {"file": str(out)} | found.facts | {"preprocessing": how}
        print_json(facts) if as_json else print(found.text)
        return
    if not quiet:
        say(f"{out} is made, and run beside the network")
    made = write(small, example, out, preprocessing=how, tolerance=tolerance)
    if not quiet:
        say("the unpruned network is exported alike, to compare the bytes and the time")
    ms, whole = _time(out, fresh, example, how)
    if whole and (told := not_faster(ms, whole.ms, graph, widths)):
        say(told)
    if as_json:
        facts = {"file": str(out)} | {name: fact for name, fact in asdict(made).items() if name != "path"}
        facts |= {"unpruned_size_bytes": whole and whole.size_bytes, "ms": ms, "unpruned_ms": whole and whole.ms}
        facts |= {"preprocessing": how}
        print_json(result_facts(run, graph, widths) | facts)
        return
    told = f"in it, as {NOTE}: {', '.join(how)}" if how else f"the run has no {INPUT}: no preprocessing is in the file"
    print(f"{_describe(made, tolerance)}\n{told}\n")
    _show_gain(made, graph, widths, ms, whole)


def _describe(made: Exported, tolerance: float) -> str:
    """What was written, and how far it can be trusted."""
    sizes = " and ".join(map(str, made.batches))
    return (
        f"{made.path}\n"
        f"the same network in {made.runtime}: outputs differ by {made.difference:.1e} of the largest one at most "
        f"({tolerance:.0e} allowed), for random batches of {sizes}; any size will do"
    )


@dataclass(frozen=True, kw_only=True)
class _Whole:
    """The unpruned network as a file of the same kind."""

    size_bytes: int
    ms: float  # of one sample


def _show_gain(made: Exported, graph: ChannelGraph, widths: Widths, ms: float, whole: _Whole | None) -> None:
    """What the file has beside the unpruned network; nothing where that cannot be exported."""
    pairs = {
        "bytes": (made.size_bytes, whole and whole.size_bytes),
        "params": (made.params, graph.params()),
        "MACs": (graph.macs(widths), graph.macs()),
    }
    rows = [
        [name, f"{now:,}", *([f"{before:,}", f"{now / before:.1%}"] if before else ["", ""])]
        for name, (now, before) in pairs.items()
    ]
    before = [f"{whole.ms:.3f}", f"{ms / whole.ms:.1%}"] if whole else ["", ""]
    print(table([["", "exported", "unpruned", "share"], *rows, ["ms", f"{ms:.3f}", *before]]))
    print("bytes: of the file, and of the unpruned network exported alike")
    print(f"ms: the fastest of {PASSES} passes of one sample in {made.runtime}, on this machine's CPU, taken in turn")


def _read(run: Path, out: Path, tolerance: float) -> tuple[nn.Module, nn.Module, ChannelGraph, tuple[int, ...]]:
    """The network of the run, the unpruned one with fresh weights, its graph, and the shape of a sample; no data."""
    settings, plan = read_plan(run)
    if not (run / WIDTHS).exists():
        raise FileError(f"{run} has no {WIDTHS}: go on with dmcp {plan.command} --resume {shlex.quote(str(run))}")
    check_target(out, tolerance)
    classes, shape = settings.get("classes"), settings.get("shape")
    if type(classes) is not int or not isinstance(shape, list) or not all(type(n) is int and n > 0 for n in shape):
        raise FileError(f"{run}: its settings do not say the classes, and the shape of an image.")
    check_names(run, plan.job, "model")
    fresh = build(plan.job, classes)
    return load(run, fresh), fresh, trace_job(plan.job, fresh, tuple(shape)), tuple(shape)


def _time(path: Path, fresh: nn.Module, example: torch.Tensor, how: Any) -> tuple[float, _Whole | None]:
    """Milliseconds of the file, and the unpruned network exported alike: None where that fails, as for its size.

    It is not trained, which does not matter here.
    """
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / f"unpruned{path.suffix}"
        with contextlib.suppress(DmcpError):
            write(fresh, example, other, preprocessing=how)
        if not other.exists():
            return milliseconds([path], example)[0], None
        ms, unpruned_ms = milliseconds([path, other], example)
        return ms, _Whole(size_bytes=other.stat().st_size, ms=unpruned_ms)
