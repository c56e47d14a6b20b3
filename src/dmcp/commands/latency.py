"""The command that measures the latency of a network, and the table that budgets of latency need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer

from dmcp import nets
from dmcp.batches import generator
from dmcp.budget import limits_latency
from dmcp.commands import options as o
from dmcp.commands.printing import print_json
from dmcp.errors import BudgetError, DmcpError, FileError, StoppedError, WidthsError
from dmcp.files import staging_name
from dmcp.latency import FILE, Latency, RuntimeKind
from dmcp.pruning import time_networks
from dmcp.running.jobs import Job, Opened, build, shape, trace_job
from dmcp.running.plans import Plan
from dmcp.running.sessions import obeying, say
from dmcp.searching.searches import SearchConfig
from dmcp.timing.choice import price
from dmcp.timing.stopwatch import NETWORKS, describe, measure_latency
from dmcp.tracing.graph import ChannelGraph

_STOPPED = "Stopped while networks were measured, as asked: nothing is kept, the same command starts again."


def latency(
    model: o.Model = "",
    out: Annotated[str, typer.Option(help="File of the table, for dmcp prune --latency; default: only printed.")] = "",
    input: o.Input = "",
    classes: Annotated[
        int | None, typer.Option(min=1, help="Of the data that the network is pruned for; default: the builder's.")
    ] = None,
    model_args: o.ModelArgs = None,
    frozen: o.Frozen = None,
    batch: o.LatencyBatch = 1,
    device: o.Device = "",
    dtype: Annotated[str, typer.Option(help="Of weights and inputs: float32, bfloat16, float16.")] = "float32",
    align: o.Align = 1,
    networks: Annotated[int, typer.Option(help="Networks that are measured.")] = NETWORKS,
    seed: o.Seed = 0,
    runtime: o.LatencyRuntime = RuntimeKind.TORCH,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Measure how long networks cut out of a model take here, and how well others can be forecast.

    \b
    Examples:
      dmcp latency --model digits:resnet --out latency.json
      dmcp latency --model resnet18 --input 3x160x160 --classes 20 --batch 8 --device cpu
      dmcp latency --model resnet18 --input 3x160x160 --classes 20 --runtime onnx
    """
    if not o.is_first():
        return
    if not model:
        raise DmcpError("--model is missing: dmcp latency --help says what it can be.")
    if out:
        _check_target(Path(out))
    job = Job(model=model, model_args=tuple(model_args or ()), frozen=tuple(frozen or ()), device=device, seed=seed)
    net = build(job, classes)
    sample = shape(input) if input else nets.sample_shape(net)
    graph, net = trace_job(job, net, sample), net.to(job.place)
    example = torch.randn(1, *sample, generator=generator(0))
    how = {"batch": batch, "dtype": dtype, "align": align, "networks": networks, "seed": seed, "runtime": runtime}
    how |= {"device": device} if runtime == RuntimeKind.ONNX else {}  # otherwise that of the network
    with obeying(_STOPPED):
        table = measure_latency(net, example, graph, **how)  # type: ignore[arg-type]
    if out:
        table.save(out)
    if as_json:
        print_json(table.to_json() | ({"file": out} if out else {}))
        return
    print(describe(table))
    if out:
        print(f"\n{out}")


def _check_target(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is measured."""
    if path.is_dir():
        raise FileError(f"--out: {path} is a folder: name the file in it, like {path / FILE}.")
    if not path.parent.is_dir():
        raise FileError(f"--out: {path}: there is no folder {path.parent}: make it, or name another file.")
    try:
        (path.parent / staging_name(path.name)).touch()
        (path.parent / staging_name(path.name)).unlink()
    except OSError as error:
        raise FileError(f"--out: {path}: cannot be written: {error.strerror or error}.") from error


def with_latency(plan: Plan, opened: Opened, folder: Path | None = None) -> Opened:
    """The job with a table of latency, if its budget needs one: of the run that goes on, of a file, or a new one."""
    assert plan.search is not None
    graph, job, search = opened.graph, plan.job, plan.search
    kept = folder / FILE if folder is not None and (folder / FILE).exists() else None
    given = None
    in_onnx = job.latency_runtime == RuntimeKind.ONNX
    if not limits_latency(search.budget) and (job.latency_batch != 1 or job.latency_device or in_onnx):
        raise DmcpError(
            "--latency-batch, --latency-device and --latency-runtime are for budgets of latency, like 8ms: leave them "
            "out."
        )
    if kept or job.latency:
        given = _read(kept or Path(job.latency), graph, "" if kept else "--latency ")
        _check_same(job, given)

    def measure() -> Latency:
        say(f"Measuring the latency of {NETWORKS} networks first{', exported for onnxruntime' * in_onnx}.")
        with obeying(_STOPPED):
            table = _measured(job, search, opened)
        say(f"{table.summary} Measured {len(table.networks)} networks in {table.seconds:.0f} s.")
        return table

    return replace(opened, graph=price(graph, search.budget, measure, given))


def _read(path: Path, graph: ChannelGraph, option: str) -> Latency:
    """A table that is of this network."""
    table = Latency.load(path)
    try:
        graph.priced(table)
    except WidthsError as error:
        raise WidthsError(f"{option}{path}: {error}") from None
    return table


def _check_same(job: Job, table: Latency) -> None:
    """Refuse a table that was not measured as the other options say."""
    if job.latency_batch not in (1, table.batch):
        raise DmcpError(f"--latency-batch: the table is of batch {table.batch}, not {job.latency_batch}: leave it out.")
    if job.latency_runtime not in (RuntimeKind.TORCH, table.runtime):
        raise DmcpError(
            f"--latency-runtime: the table is of {table.runtime}, not {job.latency_runtime}: leave it out, or measure "
            "anew."
        )
    place = torch.device(job.latency_device).type if job.latency_device else table.place
    if place != table.place:
        raise DmcpError(f"--latency-device: the table is of {table.place or table.device}, not {place}: leave it out.")


def _measured(job: Job, search: SearchConfig, opened: Opened) -> Latency:
    """A table for networks as the job says."""
    example = torch.randn(1, *opened.data.shape, generator=generator(0))
    how = {"batch": job.latency_batch, "device": job.latency_device, "runtime": job.latency_runtime}
    if job.latency_runtime == RuntimeKind.TORCH:
        how["device"] = job.latency_device or str(job.place)
    with _about_options():
        return time_networks(opened.model, example, opened.graph, search, **how)


@contextlib.contextmanager
def _about_options() -> Iterator[None]:
    """Name the options in what cannot be measured."""
    try:
        yield
    except (BudgetError, StoppedError, WidthsError):
        raise
    except DmcpError as error:
        raise DmcpError(f"--latency-device, --latency-batch, --latency-runtime: {error}") from error
