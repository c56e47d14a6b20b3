"""The command that measures: bench prints tables of time and memory, and writes them as JSON."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dmcp.bench import (
    Epochs,
    Measured,
    Pruned,
    Sampled,
    device_name,
    measure,
    measure_epochs,
    measure_pruned,
    measure_sampling,
)
from dmcp.calibration import kept_modes
from dmcp.commands import options as o
from dmcp.engine import Engine
from dmcp.errors import DmcpError, FileError
from dmcp.nets import find, sample_shape
from dmcp.running.jobs import Job, Opened, argument, build, open_job, trace_job
from dmcp.running.jobs import shape as parse_shape
from dmcp.running.sessions import tell_ignored
from dmcp.runs import Run

_USUAL = {"cuda": (256, 15), "cpu": (16, 3)}  # batch and rounds

Result = Measured | Pruned | Epochs | Sampled
Say = Callable[[str], None]

Also = Annotated[list[str] | None, typer.Option(help="Another one, like 'mobilenet_v2 width_mult=0.5'; repeatable.")]
Batches = Annotated[list[int] | None, typer.Option(min=1, help="Images in a batch; repeatable; default: 256, CPU 16.")]
Classes = Annotated[int | None, typer.Option(min=2, help="Outputs of the network; default: the data's, or its own.")]
Rounds = Annotated[int | None, typer.Option(min=1, help="Rounds of which the median counts; default: 15, on a CPU 3.")]
Passes = Annotated[str, typer.Option(help="Also measure epochs on this data: digits, cifar10, cifar100, a folder.")]
EpochCount = Annotated[int, typer.Option(min=2, help="Epochs of each kind on it, of which the first does not count.")]
Cut = Annotated[
    str, typer.Option("--budget", help="Also a training step of what uniform widths leave at this budget, like 50%.")
]
Structures = Annotated[int, typer.Option(min=0, help="Structures that are drawn to measure sampling; 0: none.")]
File = Annotated[Path | None, typer.Option("--json", "--out", help="File for all of it as plain data.")]


def bench(
    model: o.Model = "",
    also: Also = None,
    model_args: o.ModelArgs = None,
    batch: Batches = None,
    input: o.Input = "",
    classes: Classes = None,
    groups: o.Groups = 10,
    budget: Cut = "",
    data: Passes = "",
    epochs: EpochCount = 3,
    sampling: Structures = 1_000_000,
    rounds: Rounds = None,
    file: File = None,
    device: o.Device = "",
    precision: o.Numbers = None,
    compile: o.Compile = None,
    graphs: o.Graphs = None,
    kernels: o.Kernels = None,
    channels_last: o.ChannelsLast = None,
    tf32: o.Tf32 = True,
    quiet: o.Quiet = False,
    debug: o.Debug = False,
) -> None:
    """Measure a training step and the steps of a search side by side: time, memory, and how they grow.

    Every network is measured at every batch, on random images.

    \b
    Examples:
      dmcp bench --model resnet18
      dmcp bench --model cifar:resnet20 --also cifar:resnet56 --batch 128 --batch 512 --json bench.json
    """
    if not o.is_first():
        return
    engine = Engine(
        precision=precision, channels_last=channels_last, compile=compile, graphs=graphs, kernels=kernels, tf32=tf32
    )
    base = Job(model=model, model_args=tuple(model_args or ()), data=data, input=input, device=device)
    jobs = [base, *(_other(base, words) for words in also or ())]
    _check(jobs, file)
    tell_ignored(engine, base.place)
    usual = _USUAL.get(base.place.type, _USUAL["cpu"])
    wanted = _Wanted(
        batches=tuple(batch or usual[:1]),
        rounds=rounds or usual[1],
        classes=classes,
        groups=groups,
        budget=budget,
        epochs=epochs,
        structures=sampling,
        engine=engine,
    )
    results: list[Result] = []
    for job in jobs:
        for result in _measure_job(job, wanted, _silent if quiet else _say):
            results.append(result)
            if file:
                Run(file.parent).write(file.name, _as_json(results, base.place))
    _show(results)


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """What is measured of each network."""

    batches: tuple[int, ...]
    rounds: int
    classes: int | None  # None: the data's, or the network's own
    groups: int
    budget: str  # of pruned networks; empty: none
    epochs: int
    structures: int
    engine: Engine


def _other(base: Job, words: str) -> Job:
    """'mobilenet_v2 width_mult=0.5': a name, and arguments of its own."""
    name, *arguments = words.split() or [""]
    return replace(base, model=name, model_args=tuple(arguments))


def _check(jobs: Sequence[Job], file: Path | None) -> None:
    """Refuse at once what would fail after the minutes that the networks before it take."""
    if file and file.is_dir():
        raise FileError(f"--json: {file} is a folder: name the file in it, like {file / 'bench.json'}.")
    for job in jobs:
        if not job.model:
            raise DmcpError("--model is missing: dmcp bench --help says what it can be.")
        find(job.model)
        for text in job.model_args:
            argument(text)


# measuring


def _measure_job(job: Job, wanted: _Wanted, say: Say) -> Iterator[Result]:
    """Everything of one network, one result after the other."""
    shape: tuple[int, ...] = ()
    for batch in wanted.batches:
        label = f"{_label(job)}, batch {batch}"
        opened = open_job(replace(job, batch=batch)) if job.data else None
        net, shape, classes = _network(job, opened, wanted.classes)
        try:
            if wanted.budget:  # first: one that cannot be met is refused at once
                fresh, *_ = _network(job, opened, wanted.classes)
                args = (job.place, wanted.engine, wanted.budget, wanted.rounds, _part_of(label, say), job.model_args)
                yield measure_pruned(job.model, fresh, batch, shape, classes, *args)
            yield measure(
                job.model,
                net,
                batch,
                shape,
                classes,
                job.place,
                wanted.engine,
                wanted.groups,
                wanted.rounds,
                _part_of(label, say),
                job.model_args,
            )
            if opened:
                say(f"{label}: {3 * wanted.epochs} epochs on {job.data}")
                yield _measure_epochs(job, batch, opened, wanted)
        except torch.OutOfMemoryError as error:
            raise DmcpError(f"{label}: too large for the memory: {str(error).splitlines()[0]}") from None
    if wanted.structures:
        say(f"{_label(job)}: sampling")
        graph = trace_job(job, build(job, None), shape)
        yield measure_sampling(graph, wanted.structures, wanted.groups, job.model, job.model_args)


def _measure_epochs(job: Job, batch: int, opened: Opened, wanted: _Wanted) -> Epochs:
    return measure_epochs(
        job.model,
        opened.model,
        opened.graph,
        opened.loaders.train,
        batch,
        wanted.engine,
        wanted.groups,
        wanted.epochs,
        job.data,
        job.model_args,
    )


def _network(job: Job, opened: Opened | None, classes: int | None) -> tuple[nn.Module, tuple[int, ...], int]:
    """The network for the data or for what was asked for, the shape of one sample, and the number of classes."""
    if opened:
        return build(job, opened.data.classes), opened.data.shape, opened.data.classes
    net = build(job, classes)
    shape = parse_shape(job.input) if job.input else sample_shape(net)
    return net, shape, _count_classes(net, shape)


def _count_classes(model: nn.Module, shape: tuple[int, ...]) -> int:
    """Classes that the network tells apart: the size of its output along dim 1."""
    try:
        with kept_modes(model), torch.no_grad():
            output = model.eval()(torch.zeros(2, *shape))
    except Exception as error:
        raise DmcpError(f"The network cannot take a sample of {shape}: {str(error).splitlines()[0]}") from error
    if not isinstance(output, Tensor) or output.ndim != 2 or output.shape[1] < 2:
        raise DmcpError("The network does not give one number per class: the bench needs a classifier.")
    return output.shape[1]


def _part_of(label: str, say: Say) -> Callable[[str, float], None]:
    return lambda part, number: say(f"{label}: {part} {number:.3g}")


def _silent(line: str) -> None:
    pass


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# what is written and printed


def _machine(device: torch.device) -> dict[str, str | int | None]:
    """What the figures depend on besides the network."""
    return {
        "device": device_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def _as_json(results: Sequence[Result], place: torch.device) -> dict[str, Any]:
    """The machine, and a list of objects of each kind."""
    return {
        "machine": _machine(place),
        "steps": [result.to_json() for result in results if isinstance(result, Measured)],
        "pruned": [asdict(result) for result in results if isinstance(result, Pruned)],
        "epochs": [asdict(result) for result in results if isinstance(result, Epochs)],
        "sampling": [asdict(result) for result in results if isinstance(result, Sampled)],
    }


def _show(results: Sequence[Result]) -> None:
    """A table for each kind of result, and one of the growth where there is more than one row."""
    steps = [result for result in results if isinstance(result, Measured)]
    first = steps[0]
    choices = ", ".join(f"{key} {value}" for key, value in first.engine.items())
    print(f"{first.device}, torch {first.torch}, {choices}, {first.groups} groups")
    print("\nOne step in milliseconds, and in plain steps")
    _print_table(_TIMES, [_time_row(step) for step in steps])
    print("\nMemory at the peak in GiB, seconds of tracing, and of the first steps with what is done only once")
    _print_table(_SIZES, [_size_row(step) for step in steps])
    for step in steps:
        if step.refused:
            print(f"\nNote: {_label(step)}, batch {step.batch}: not replayed as a CUDA graph: {step.refused}")
    if len(steps) > 1:
        print("\nGrowth: times and the memory of a search, over those of the first row")
        _print_table(_GROWTH, [_growth_row(step, first) for step in steps])
    cuts = [result for result in results if isinstance(result, Pruned)]
    if cuts:
        print("\nOne training step in milliseconds: the network, what uniform widths leave, and that padded to eights")
        rows = [(_label(it), str(it.batch), it.budget, f"{it.macs / 1e6:,.1f}", *_step_times(it)) for it in cuts]
        _print_table(("model", "batch", "budget", "MACs, M", "whole", "pruned", "padded", "padded ×"), rows)
    passes = [result for result in results if isinstance(result, Epochs)]
    if passes:
        print("\nOne epoch with its data, in seconds")
        rows = [(_label(it), str(it.batch), it.data, str(it.steps), *map(_number, _seconds_of(it))) for it in passes]
        _print_table(("model", "batch", "data", "steps", "training", "warm-up", "search"), rows)
    draws = [result for result in results if isinstance(result, Sampled)]
    if draws:
        print("\nStructures drawn and their MACs counted, on one core")
        rows = [(_label(it), str(it.spaces), f"{it.structures:,}", _number(it.seconds)) for it in draws]
        _print_table(("model", "spaces", "structures", "seconds"), rows)


_TIMES = ("model", "batch", "plain", "stage 1", "stage 2", "search", "stage 1 ×", "stage 2 ×", "search ×")
_SIZES = ("model", "batch", "MACs, M", "params, M", "plain", "search", "search ×", "trace, s", "first, s")
_GROWTH = ("model", "batch", "images × MACs", "plain", "stage 1", "stage 2", "search", "memory")


def _time_row(it: Measured) -> tuple[str, ...]:
    times = (it.plain_ms, it.stage1_ms, it.stage2_ms, it.search_ms)
    return _label(it), str(it.batch), *map(_number, times), *(_share(ms, it.plain_ms) for ms in times[1:])


def _size_row(it: Measured) -> tuple[str, ...]:
    memory = (_number(it.plain_gib), _number(it.search_gib), _share(it.search_gib, it.plain_gib))
    counts, seconds = map(_number, (it.macs / 1e6, it.params / 1e6)), map(_number, (it.trace_s, it.first_s))
    return _label(it), str(it.batch), *counts, *memory, *seconds


def _growth_row(it: Measured, first: Measured) -> tuple[str, ...]:
    names = ("plain_ms", "stage1_ms", "stage2_ms", "search_ms", "search_gib")
    work = _share(it.batch * it.macs, first.batch * first.macs)
    return _label(it), str(it.batch), work, *(_share(getattr(it, name), getattr(first, name)) for name in names)


def _seconds_of(it: Epochs) -> tuple[float, float, float]:
    return it.train_s, it.warmup_s, it.search_s


def _step_times(it: Pruned) -> tuple[str, ...]:
    return *map(_number, (it.whole_ms, it.pruned_ms, it.padded_ms)), _share(it.padded_ms, it.pruned_ms)


def _label(it: Job | Result) -> str:
    return " ".join([it.model, *it.model_args])


def _number(value: float | None) -> str:
    """Three digits that count; a dash where nothing was measured."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}"


def _share(value: float | None, whole: float | None) -> str:
    return "-" if value is None or not whole else f"{value / whole:.2f}"


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """As wide as the terminal; in a pipe as wide as it must be, so that no name is broken."""
    console = Console(highlight=False, markup=False, emoji=False)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in ("model", "data") else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    if not console.is_terminal:
        console.width = 100_000
    console.print(table)
