"""Networks as sessions of onnxruntime on the CPU, to be timed there."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dmcp.batches import generator
from dmcp.errors import DmcpError
from dmcp.exporting import (
    TOLERANCE,
    largest_gap,
    missing_packages,
    named,
    open_session,
    reason,
    record,
    silence,
    write_onnx,
)
from dmcp.tracing.recording import call_model, map_leaves, tensors_in

Call = Callable[[], object]  # one forward pass
Write = Callable[[nn.Module, Any, Path], None]
# Workers of a session that has nothing to do would go on looking for work, on the cores that the next session needs.
OPTIONS = {"session.intra_op.allow_spinning": "0"}


def check_here(device: str, dtype: torch.dtype) -> None:
    """Refuse what is not measured in onnxruntime, or not on this machine."""
    if torch.device(device).type != "cpu" or dtype is not torch.float32:
        raise DmcpError(
            f"In onnxruntime latency is measured on the CPU in float32 only, not on {device} in "
            f"{str(dtype).removeprefix('torch.')}: measure it in torch, or with a function of your own."
        )
    if missing := missing_packages():
        raise DmcpError(f"{missing}, or measure in torch.")


@torch.no_grad()
def open_all(nets: Iterator[nn.Module], example: Any, threads: int) -> list[Call]:
    """A call for each network, in eval mode and all of one architecture, that is one forward pass in onnxruntime.

    The first network is tried: torch.export must take it, as `export` asks, and its session must give its outputs.
    torch has two exporters. The older one needs far less time, for 40 networks minutes less; where it fails, all
    files are those of the newer one, which `export` writes.
    """
    first = next(nets)
    record(first, example)
    try:
        write: Write = _write_quickly
        call = _open(first, example, threads, write, try_it=True)
    except DmcpError:
        write = _write
        call = _open(first, example, threads, write, try_it=True)
    return [call, *(_open(net, example, threads, write) for net in nets)]


def _open(net: nn.Module, example: Any, threads: int, write: Write, try_it: bool = False) -> Call:
    """A network as a call; its file is gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="dmcp-") as folder:
        path = Path(folder) / "net.onnx"
        try:
            write(net, example, path)
            session = open_session(path, OPTIONS, threads)
            names = [it.name for it in session.get_inputs()]
            call = functools.partial(session.run, None, named(names, example))
            call()
        except DmcpError:
            raise
        except Exception as error:  # of torch's exporters, of onnxruntime, of a full disk
            raise DmcpError(f"This network cannot be run in onnxruntime: {reason(error)}") from error
    if try_it:
        _check_same(net, lambda it: session.run(None, named(names, it)), example)
    return call


def _check_same(net: nn.Module, run: Callable[[Any], list[Any]], example: Any) -> None:
    """Refuse a session that does not give the outputs of its network, for random inputs like the example."""
    random = generator(0)
    drawn = map_leaves(
        lambda it: torch.randn(it.shape, generator=random) if torch.is_tensor(it) and it.is_floating_point() else it,
        example,
    )
    gap = largest_gap(net, lambda it: [torch.from_numpy(output) for output in run(it)], [drawn])
    if not gap <= TOLERANCE:
        raise DmcpError(
            f"In onnxruntime this is not the same network: its outputs differ by {gap:.1e} of the largest one, more "
            f"than {TOLERANCE:.0e}."
        )


def _write(net: nn.Module, example: Any, path: Path) -> None:
    """The file that `export` writes."""
    write_onnx(*record(net, example), path)


def _write_quickly(net: nn.Module, example: Any, path: Path) -> None:
    """The file of torch's older exporter, for batches of this size.

    With a free batch it would compute shapes in each pass.
    """
    with silence():
        torch.onnx.export(_Plain(net, example).eval(), tuple(tensors_in(example)), path, dynamo=False)


class _Plain(nn.Module):
    """A network that takes tensors and returns tensors, in order, whatever it is given and returns otherwise."""

    def __init__(self, net: nn.Module, example: Any) -> None:
        super().__init__()
        self.net, self.example = net, example

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        rest = iter(tensors)
        given = map_leaves(lambda leaf: next(rest) if isinstance(leaf, Tensor) else leaf, self.example)
        return tuple(tensors_in(call_model(self.net, given)))
