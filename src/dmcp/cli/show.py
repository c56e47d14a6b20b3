"""The commands that look at networks, data and runs: inspect, data, latency, sample, evaluate, export, runs, report."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from dmcp.cli.config import check_typed, read_config
from dmcp.cli.job import build, open_job, place_of, sample_shape, sized, trace_job
from dmcp.cli.output import (
    cost_facts,
    describe_costs,
    describe_network,
    describe_replaced,
    log,
    print_json,
    result_facts,
)
from dmcp.cli.session import check_data_is_here
from dmcp.data.datasets import check_data, split
from dmcp.data.datasets import load as load_data
from dmcp.data.loaders import make_loader
from dmcp.errors import DataError, DmcpError, FileError
from dmcp.exporting import export as exporting
from dmcp.exporting.latency import measure_latency
from dmcp.exporting.timing import time_files
from dmcp.report.html import make_page, percent
from dmcp.results import measure_networks, results_table, score
from dmcp.runs.config import RunConfig
from dmcp.runs.files import EXPORTED, INPUT, SEARCH, WIDTHS, read_json
from dmcp.runs.reading import list_runs, read_run, read_runs, read_widths
from dmcp.runs.saved_search import load_search
from dmcp.runs.storage import load
from dmcp.runs.writing import Run
from dmcp.runtime import progress
from dmcp.runtime.batches import Loader, generator
from dmcp.runtime.io import make_printable
from dmcp.searching import sampling
from dmcp.settings import LatencyConfig
from dmcp.tracing.graph import ChannelGraph
from dmcp.training.loop import evaluate as accuracy_of
from dmcp.units import by, counted, table

_BATCH = 64  # of images whose ranges and accuracy 8 bits need
_LISTED = 20  # lines of each list about data
_TAIL = 100  # lines of a log that have its tested networks
_ROUNDING = 0.001  # of an accuracy, on another device


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """As wide as the terminal; in a pipe as wide as it must be, so that no name is broken."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 100_000
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        number = column in ("size", "MACs", "accuracy")
        grid.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    console.print(grid)


# networks


def inspect(config: RunConfig, as_json: bool) -> None:
    """dmcp inspect."""
    net = build(config, None)
    sample, *_ = sample_shape(config, net)
    graph = trace_job(config, net, sample)
    if as_json:
        print_json({"model": config.model} | graph.to_json())
        return
    print(describe_network(config.model, sample, graph))


def latency(config: RunConfig, classes: int | None, how: LatencyConfig, out: str, as_json: bool) -> None:
    if out and Path(out).is_dir():
        raise FileError(f"--out: {out} is a folder: name a file.")
    with tempfile.TemporaryFile(dir=Path(out).parent if out else None):
        pass  # what cannot be written is refused before anything is measured
    if config.data and classes:
        raise DmcpError("--classes: the data say how many there are: leave it out.")
    data = load_data(config.data) if config.data else None
    net = build(config, data.classes if data else classes)
    sample, *_ = sample_shape(config, net, data)
    if data:
        sized(data, config.data, sample)  # refuses what they cannot have
    graph, net = trace_job(config, net, sample), net.to(place_of(config))
    example = torch.randn(1, *sample, generator=generator(0))
    found = measure_latency(net, example, graph, how)
    if out:
        found.save(out)
    if as_json:
        print_json(found.to_json() | ({"file": out} if out else {}))
    else:
        print(*filter(None, [found.summary, found.warning, out]), sep="\n")


# data


def data(name: str, quiet: bool, as_json: bool) -> None:
    """dmcp data."""
    loaded = load_data(name, strict=False)
    count = len(loaded.train) + len(loaded.test)
    with progress.showing(False if quiet or as_json else None, lines=True), progress.phase("files", count) as read:
        facts = check_data(loaded, read)
    if as_json:
        print_json({"data": name} | facts)
    else:
        for line in _describe_data(name, facts):
            print(make_printable(line))
    if facts["in_both"]:
        log(
            f"{len(facts['in_both']):,} of {counted(facts['test']['images'], 'test image')} are training images, too, "
            "which makes the accuracy look better than it is: remove them from one of the sets."
        )
    if facts["broken"]:
        raise DataError(
            f"{len(facts['broken'])} of {counted(count, 'image file')} cannot be read: "
            "repair or remove them, or skip them with --corrupt skip."
        )
    if not facts["well"]:
        raise DataError(f"{name}: at least two classes are needed, each with images in both train/ and val/.")


def _describe_data(name: str, facts: dict[str, Any]) -> Iterator[str]:
    """Lines about a data set."""
    yield f"{name}: {facts['classes']} class{'' if facts['classes'] == 1 else 'es'}"
    yield f"{counted(facts['train']['images'], 'training image')}: {facts['train']['from']}"
    yield f"{counted(facts['test']['images'], 'test image')}: {facts['test']['from']}"
    if facts["sizes"]:
        sizes = ", ".join(f"{word} {by(size)}" for word, size in facts["sizes"].items())
        yield f"height x width: {sizes}"
    lists = {
        "Classes without images": facts["wrong_classes"],
        "Files that cannot be read": [f"{broken['file']}: {broken['reason']}" for broken in facts["broken"]],
        "Images in both sets": [f"{pair['train']} = {pair['test']}" for pair in facts["in_both"]],
    }
    for title, entries in lists.items():
        yield f"{title}: {len(entries) or 'none'}"
        for entry in entries[:_LISTED]:
            yield f"  {entry}"
        if len(entries) > _LISTED:
            yield f"  and {len(entries) - _LISTED:,} more: --json lists all"


# runs


def runs(folder: Path, as_json: bool) -> None:
    found = list_runs(folder)
    facts = [run.describe() for run in found]
    if as_json:
        print_json(facts)
        return
    for run, fact in zip(found, facts, strict=True):
        fact["state"] += f": {fact['progress']}" if fact["progress"] else ""
        fact["accuracy"] = score(run.result, " %") if run.result else ""
        fact["MACs"] = "" if fact["macs_share"] is None else percent(fact["macs_share"])
    columns = ("name", "command", "model", "data", "budget", "state", "accuracy", "MACs", "started")
    if facts:
        _print_table(columns, [[fact[name] for name in columns] for fact in facts])
    else:
        print(f"{folder}: no runs.")


def report(runs: Sequence[Path], out: Path) -> None:
    Run(out.parent).write(out.name, make_page(read_runs(runs)))
    print(out)


def _read_done(run: Path, name: str, model: str) -> tuple[dict[str, Any], RunConfig]:
    """Settings of a run; FileError if it has not made this file yet, or never will. model: its network as typed."""
    stored, config = read_config(run)
    check_typed(run, config, {"model": model})
    if not (run / name).exists():
        done = Run(run).done
        way = "give a run that has one, or of several budgets the folder of one" if done else "go on with --resume"
        raise FileError(f"{run} has no {name}: {way}.")
    return stored, config


def _open_run(run: Path, name: str, model: str) -> tuple[RunConfig, nn.Module, ChannelGraph, tuple[int, ...]]:
    """Settings of a run that has this file, its unpruned network with fresh weights, its graph, a sample's shape."""
    stored, config = _read_done(run, name, model)
    classes, sample = stored.get("classes"), stored.get("shape")
    if type(classes) is not int or not isinstance(sample, list) or not all(type(n) is int and n > 0 for n in sample):
        raise FileError(f"{run}: its settings do not say the classes, and the shape of an image.")
    fresh = build(config, classes)
    return config, fresh, trace_job(config, fresh, tuple(sample)), tuple(sample)


def sample(run: Path, direct: int, budget: str, out: Path, seed: int, model: str, as_json: bool) -> None:
    _, _, graph, _ = _open_run(run, SEARCH, model)
    found = load_search(run, graph)
    graph = found.graph  # with the run's table of latency, if it has one
    if budget:
        searched, found = found.budget, found.with_budget(budget)
        if searched.limits != found.budget.limits:
            log(f"The search was for {searched.text}: its widths are scaled to {budget}, not searched again.")
    samples = sampling.direct(found, direct, generator(seed)) if direct else [sampling.expected(found)]
    kind = "direct" if direct else "expected"
    if budget:
        kind = f"{kind}-{found.budget.file_name}"
    files = {out / f"{kind}{f'-{number}' if direct else ''}.json": it for number, it in enumerate(samples, 1)}
    for path, widths in files.items():
        Run(out).write(path.name, widths.to_json())
    if as_json:
        print_json([{"file": str(path)} | cost_facts(graph, widths) for path, widths in files.items()])
        return
    for path, widths in files.items():
        print(f"{path}: {describe_costs(graph, widths)}: {' '.join(map(str, widths.values()))}")


def evaluate(run: Path, changes: Mapping[str, Any], model: str, as_json: bool) -> None:
    """dmcp evaluate; changes: settings that are not those of the run."""
    _, config = _read_done(run, WIDTHS, model)
    same_data = changes.get("data", config.data) == config.data
    config = replace(config, train_batch=0, weights="", teacher="", teacher_model="", holdout=0.0, **changes)
    check_data_is_here(run, config)
    job = open_job(config)
    small = load(run, job.fresh)
    kept = {run.name: read_widths(run / WIDTHS, job.graph)}
    with progress.showing(False if as_json else None):
        rows = measure_networks({run.name: small}, job.graph, kept, job.test, next(iter(job.test))[0])
    log(*describe_replaced(job.replaced))
    row, recorded = rows[0], read_run(run, _TAIL).result if same_data else None
    if recorded and (recorded.samples, recorded.params, recorded.score) != (row.samples, row.params, row.score):
        recorded = None
    if recorded and abs(row.accuracy - recorded.accuracy) > max(_ROUNDING, 1.5 / row.samples):  # more than an image
        log(f"The run recorded {score(recorded)}: code, data or weights are not those of the run.")
    if as_json:
        facts = result_facts(run, job.graph, kept[run.name], job.replaced)
        facts["recorded_accuracy"] = recorded.accuracy if recorded else None
        print_json(facts | {"networks": [asdict(row)]})
        return
    print(results_table(rows, job.graph))
    if recorded:
        print(f"- the run recorded {score(recorded)}")


def export(run: Path, out: Path, int8: bool, model: str, quiet: bool, as_json: bool) -> None:
    """dmcp export; 8 bits by way of a file with 32, which is tested and timed beside it."""
    config, fresh, graph, shape = _open_run(run, WIDTHS, model)
    exporting.check_target(out)
    if int8 and out.suffix != exporting.ONNX:
        raise FileError(f"{out}: only {exporting.ONNX} files can have 8 bits.")
    if int8:
        check_data_is_here(run, config)
        ranges, test = _images(config)
    small, widths = load(run, fresh), read_widths(run / WIDTHS, graph)
    how, example = read_json(run / INPUT), torch.zeros(1, *shape)
    shown = progress.showing(False if quiet or as_json else None, lines=True)
    with tempfile.TemporaryDirectory() as folder, shown, progress.phase("export", 2 + int8) as done:
        files = {"int8" if int8 else "exported": out, "unpruned": Path(folder) / f"unpruned{out.suffix}"}
        files |= {"float32": Path(folder) / "float32.onnx"} if int8 else {}
        made = exporting.export(small, example, files.get("float32", out), preprocessing=how)
        done(1)
        try:
            exporting.export(fresh, example, files["unpruned"], preprocessing=how)
        except DmcpError:  # it is only there to compare
            del files["unpruned"]
        done(2)
        if int8:
            made = exporting.quantize(files["float32"], ranges, out)
            done(3)
        measured: dict[str, dict[str, Any]] = {
            name: {"bytes": path.stat().st_size, "ms": ms}
            for (name, path), ms in zip(files.items(), time_files([*files.values()], example), strict=True)
        }
        for name in ("int8", "float32") if int8 else ():
            measured[name]["accuracy"] = _accuracy(small, files[name], test)
    if out.parent == run and "unpruned" in measured:
        known = read_json(run / EXPORTED) if (run / EXPORTED).exists() else {}
        known.pop(out.name, None)  # the last one is the newest
        times = {"float32" if name == "exported" else name: it["ms"] for name, it in measured.items()}
        Run(run).write(EXPORTED, known | {out.name: {"runtime": made.runtime, "ms": times}})
    if as_json:
        facts = {"file": str(out), "runtime": made.runtime, "difference": made.difference}
        print_json(result_facts(run, graph, widths) | facts | {"preprocessing": how, "files": measured})
        return
    what = "of the outputs (root mean square)" if int8 else "of the largest one"
    print(f"{out}\nin {made.runtime}: outputs differ by {made.difference:.1e} {what}")
    print(f"in it, as {exporting.NOTE}: {', '.join(how)}\n" if how else "no preprocessing is in the file\n")
    cells = {"bytes": "{:,}", "ms": "{:.3f}", "accuracy": "{:.2%}"}
    rows = [["", *measured]]
    for name, form in cells.items():
        if any(name in it for it in measured.values()):
            rows.append([name, *(form.format(it[name]) if name in it else "" for it in measured.values())])
    print(table(rows))
    print(f"ms: one sample in {made.runtime}, on one thread of this machine's CPU")


def _images(config: RunConfig) -> tuple[Loader, Loader]:
    """Some training images, as they are when they are tested, always the same; and all test images."""
    job = open_job(replace(config, device="cpu", weights="", teacher="", teacher_model=""))
    train, count = job.data.train, len(job.data.train)
    some = train if count <= 2 * exporting.SAMPLES else split(train, exporting.SAMPLES / count)[1]
    how: dict[str, Any] = {"workers": config.workers, "corrupt": config.corrupt}
    first, second = (make_loader(it, min(_BATCH, len(it)), train=False, **how) for it in (some, job.data.test))
    return first, second


def _accuracy(small: nn.Module, path: Path, test: Loader) -> float:
    """Of a file on the test images; the network says where batches go, and is not run."""
    runtime = exporting.open_file(path)
    with torch.no_grad():
        return accuracy_of(small, test, forward=lambda x: runtime.run(x)[0])
