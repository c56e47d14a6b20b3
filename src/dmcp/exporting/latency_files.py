"""Latency of devices that Python cannot reach: networks as ONNX files, and milliseconds read from a CSV file."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dmcp.arguments import checked
from dmcp.errors import DmcpError, FileError
from dmcp.exporting.export import blaming, missing_packages
from dmcp.exporting.latency import Latency, cut_quickly, make_table, sample_widths
from dmcp.exporting.timing import write_quickly
from dmcp.runtime.io import MOST_JSON, read_bytes, write_files
from dmcp.runtime.progress import each, shown
from dmcp.settings import LatencyConfig
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.modules import batch_of, rebatch, unwrap
from dmcp.tracing.trace import trace

TIMES = "times.csv"
_COLUMNS = ("network", "widths", "ms")


@checked
@shown
def write_networks(
    model: nn.Module,
    example: Any,
    folder: str | os.PathLike[str],
    graph: ChannelGraph | None = None,
    config: LatencyConfig | None = None,
) -> Path:
    """Write the networks that `measure_latency` would time as ONNX files, and a CSV file for their milliseconds.

    Time the files on your device, fill in the column "ms" of times.csv, and call `read_latency` with the same model,
    graph and settings. Returns the path of the CSV file.
    """
    config = config or LatencyConfig()
    missing = missing_packages()
    if missing:
        raise DmcpError(f"{missing}.")
    path = Path(folder) / TIMES
    if path.exists():
        raise FileError(f"{path} exists and may hold times: choose another folder.")
    if graph is None:
        graph = trace(model, example)
    model = unwrap(model)
    graph.check_architecture(model)

    if batch_of(example) is not None:
        example = rebatch(example, config.batch)
    example = tree_map_only(Tensor, torch.Tensor.cpu, example)
    rows = sample_widths(graph, config)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines: list[Sequence[str]] = [_COLUMNS]
    for number, row in each("networks", list(enumerate(rows))):
        net = cut_quickly(model, graph, row).cpu().eval()
        with blaming("A cut network cannot be written as ONNX", DmcpError):
            write_quickly(net, example, path.parent / _file_name(number))
        lines.append((_file_name(number), _show(row), ""))
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    write_files(path.parent, {path.name: text.getvalue().encode()})
    return path


@checked
def read_latency(
    path: str | os.PathLike[str],
    model: nn.Module,
    example: Any,
    graph: ChannelGraph | None = None,
    config: LatencyConfig | None = None,
) -> Latency:
    """Make a latency table from the CSV file of `write_networks`, once its column "ms" is filled in.

    The model, the graph and the settings are those that the networks were written with.
    """
    config = config or LatencyConfig()
    path = Path(path)
    if graph is None:
        graph = trace(model, example)
    graph.check_architecture(unwrap(model))
    rows = sample_widths(graph, config)
    times_by_network = _read_times(path)

    times: list[float] = []
    for number, row in enumerate(rows):
        name = _file_name(number)
        if name not in times_by_network:
            raise FileError(f"{path}: {name} is missing: {len(rows)} networks were to be timed.")
        widths, ms = times_by_network.pop(name)
        if widths != _show(row):
            raise FileError(
                f"{path}: {name} has other widths than these settings give: use the model, input and settings that the "
                "networks were written with."
            )
        times.append(_milliseconds(ms, name, path))
    for name in times_by_network:
        raise FileError(f"{path}: {name} is not among the {len(rows)} networks of these settings.")
    return make_table(graph, config, rows, times, device=str(path))


def _read_times(path: Path) -> dict[str, tuple[str, str]]:
    """Widths and milliseconds of each network, as they are written."""
    text = read_bytes(path, MOST_JSON).decode("utf-8-sig", errors="replace")  # spreadsheets may put a mark first
    lines = [line for line in csv.reader(io.StringIO(text)) if line]
    if not lines or tuple(lines[0]) != _COLUMNS:
        raise FileError(f"{path}: the first line must be {','.join(_COLUMNS)}, as dmcp latency --write writes it.")
    times: dict[str, tuple[str, str]] = {}
    for line in lines[1:]:
        if len(line) != len(_COLUMNS):
            raise FileError(f"{path}: a line has {len(line)} columns instead of {len(_COLUMNS)}: {','.join(line)}.")
        name, widths, ms = line
        if name in times:
            raise FileError(f"{path}: {name} occurs twice: give each network one time.")
        times[name] = widths, ms
    return times


def _milliseconds(text: str, name: str, path: Path) -> float:
    """The number in the column "ms"."""
    try:
        ms = float(text)
    except ValueError:
        ms = math.nan
    if not 0 < ms < math.inf:
        raise FileError(f"{path}: the time of {name} must be milliseconds above 0, not {text!r}.")
    return ms


def _file_name(number: int) -> str:
    return f"net-{number:03}.onnx"


def _show(row: Sequence[int]) -> str:
    return " ".join(map(str, row))
