"""The commands that look at networks, data and runs: inspect, data, latency, sample, evaluate, export, runs, report."""

from __future__ import annotations

import contextlib
import re
import shlex
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

from dmcp import exporting, models, progress, sampling
from dmcp.batches import Loader, generator
from dmcp.budget import check_reachable, parse
from dmcp.cli import session
from dmcp.cli.config import RunConfig, read_config
from dmcp.cli.job import build, check_names, open_job, place_of, shape, sized, trace_job
from dmcp.cli.prune import STOPPED
from dmcp.cli.session import log, log_replaced, print_json, result_facts
from dmcp.data.datasets import check_data, split
from dmcp.data.datasets import load as load_data
from dmcp.data.loaders import make_loader
from dmcp.errors import DataError, DmcpError, FileError
from dmcp.latency import measure_latency
from dmcp.report.figures import amount
from dmcp.report.html import make_page, percent
from dmcp.results import compare, results_table, score
from dmcp.runs import INPUT, REPORT, SEARCH, Run, list_runs, load_search, read_json, read_runs
from dmcp.runtime.io import plain
from dmcp.searching.config import SearchResult, extremes
from dmcp.settings import LatencyConfig
from dmcp.storage import WIDTHS, load
from dmcp.tracing.cost import show_bytes
from dmcp.tracing.graph import ChannelGraph
from dmcp.training import evaluate as accuracy_of
from dmcp.units import by, counted, table
from dmcp.widths import Widths

_BATCH = 64  # of images whose ranges and accuracy 8 bits need


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """As wide as the terminal; in a pipe as wide as it must be, so that no name is broken."""
    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 100_000
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        number = column in ("size", "now", "MACs", "accuracy")
        grid.add_column(column, justify="right" if number else "left", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    console.print(grid)


# networks


def inspect(config: RunConfig, as_json: bool) -> None:
    """dmcp inspect."""
    net = build(config, None)
    sample = shape(config.input) if config.input else models.sample_shape(net)
    graph = trace_job(config, net, sample)
    if as_json:
        print_json({"model": config.model} | graph.to_json())
        return
    alike: dict[tuple[int, str], list[str]] = {}
    for kept in graph.unprunable:
        alike.setdefault((kept.size, kept.reason), []).append(kept.name)
    macs, params = graph.macs(), graph.params()
    print(f"{config.model}, one sample of {by(sample)}")
    print(f"{amount('macs', macs)} MACs ({macs:,}), {amount('params', params)} params ({params:,})")
    print(f"{show_bytes(graph.memory())} of activations at once, when {graph.memory_at() or 'the model'} runs")
    print(f"{len(graph.spaces)} spaces; {graph.prunable_share:.1%} of the MACs are in layers that read or write one")
    print("\nSpaces: channels that are kept or dropped together, and the MACs in layers on them")
    spaces = [(it.name, str(it.size), ", ".join(it.writers), f"{graph.space_share(it):.1%}") for it in graph.spaces]
    _print_table(("space", "size", "layers tied to it", "MACs"), spaces)
    if alike:
        print("\nUnprunable channels")
        rows = [(", ".join(names), str(size), reason) for (size, reason), names in alike.items()]
        _print_table(("layers", "size", "why"), rows)
    if graph.bindings:
        print("\nAttributes of modules that follow a width, found by replay")
        rows = [(f"{it.module}.{it.attribute}".lstrip("."), str(it.value), it.follows) for it in graph.bindings]
        _print_table(("attribute", "now", "follows"), rows)
    for op, times in graph.unknown.items():
        print(f"\nNo rule for {op} (called {times} times): what it touches is unprunable.")
    for note in graph.notes:
        print(f"\nNote: {note}")


def latency(config: RunConfig, classes: int | None, how: LatencyConfig, out: str, as_json: bool) -> None:
    """dmcp latency."""
    path = Path(out)
    if out and path.is_dir():
        raise FileError(f"--out: {path} is a folder: name a file.")
    with tempfile.TemporaryFile(dir=path.parent if out else None):
        pass  # what cannot be written is refused before anything is measured
    net = build(config, classes)
    sample = shape(config.input) if config.input else models.sample_shape(net)
    graph, net = trace_job(config, net, sample), net.to(place_of(config))
    example = torch.randn(1, *sample, generator=generator(0))
    with session.stopping(STOPPED):
        found = measure_latency(net, example, graph, how)
    if out:
        found.save(out)
    if as_json:
        print_json(found.to_json() | ({"file": out} if out else {}))
    else:
        print(*filter(None, [found.summary, found.warning, out]), sep="\n")


# data


def data(name: str, input: str, workers: int | None, most: int, quiet: bool, as_json: bool) -> None:
    """dmcp data."""
    loaded = load_data(name, strict=False)
    loaded = sized(loaded, name, input) if input else loaded
    count = len(loaded.train) + len(loaded.test)
    with progress.showing(False if quiet or as_json else None, lines=True), progress.phase("files", count) as read:
        facts = check_data(loaded, workers, read)
    facts |= {} if input else {"enlarged": None}
    if as_json:
        print_json({"data": name} | facts)
    else:
        for line in _lines(name, facts, input, most):
            print(plain(line))
    if facts["broken"]:
        some = f"{len(facts['broken'])} of {counted(count, 'image file')}"
        raise DataError(f"{some} cannot be read: repair or remove them, or skip them with --corrupt skip.")
    if not facts["well"]:
        raise DataError(f"{name}: two classes at least are needed, each with images in both train/ and val/.")


def _lines(name: str, facts: dict[str, Any], input: str, most: int) -> Iterator[str]:
    yield f"{name}: {facts['classes']} class{'' if facts['classes'] == 1 else 'es'}"
    for word, part in (("training image", facts["train"]), ("test image", facts["test"])):
        yield f"{counted(part['images'], word)}: {part['from']}"
    if facts["sizes"]:
        yield f"height x width: {', '.join(f'{word} {by(size)}' for word, size in facts['sizes'].items())}"
    if facts["enlarged"] is not None:
        yield f"smaller than {input.partition('x')[2]} in height or width, and enlarged: {facts['enlarged']:,}"
    yield from _list("Classes without images, or not in both train/ and val/:", facts["wrong_classes"], most)
    broken = [f"{it['file']}: {it['reason']}" for it in facts["broken"]]
    yield from _list(f"{counted(len(broken), 'file')} cannot be read:", broken, most)


def _list(head: str, entries: Sequence[str], most: int) -> Iterator[str]:
    if entries:
        yield head
        yield from (f"  {entry}" for entry in entries[:most])
    if len(entries) > most:
        yield f"  and {len(entries) - most:,} more: --most {len(entries)} lists all"


# runs


def runs(folder: Path, as_json: bool) -> None:
    """dmcp runs."""
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
    """dmcp report."""
    Run(out.parent).write(out.name, make_page(read_runs(runs)))
    print(out)


def _check_done(run: Path, name: str, config: RunConfig) -> None:
    """Refuse a run that has not made this file yet, or never will."""
    if not (run / name).exists():
        if config.budgets and (run / REPORT).exists() and name == WIDTHS:
            inside = ", ".join(sorted(path.parent.name for path in run.glob(f"*/{name}")))
            raise FileError(f"{run} has a network for each budget: give one of the folders in it, {inside}.")
        way = f"go on with dmcp {config.command} --resume {shlex.quote(str(run))}"
        if name == SEARCH and config.command == "train":
            way = "give a run of dmcp prune or search"
        raise FileError(f"{run} has no {name}: {way}")


def _open_run(run: Path, name: str) -> tuple[RunConfig, nn.Module, ChannelGraph, tuple[int, ...]]:
    """Settings of a run that has this file, its unpruned network with fresh weights, its graph, a sample's shape."""
    stored, config = read_config(run)
    _check_done(run, name, config)
    classes, sample = stored.get("classes"), stored.get("shape")
    if type(classes) is not int or not isinstance(sample, list) or not all(type(n) is int and n > 0 for n in sample):
        raise FileError(f"{run}: its settings do not say the classes, and the shape of an image.")
    fresh = build(config, classes)
    return config, fresh, trace_job(config, fresh, tuple(sample)), tuple(sample)


def sample(run: Path, direct: int, budget: str, out: Path, seed: int, as_json: bool) -> None:
    """dmcp sample."""
    _, _, graph, _ = _open_run(run, SEARCH)
    found = _for_budget(load_search(run, graph), budget, direct > 0)
    graph = found.graph  # with the run's table of latency, if it has one
    samples = sampling.direct(found, direct, generator(seed)) if direct else [sampling.expected(found)]
    kind = "-".join(filter(None, ("direct" if direct else "expected", re.sub(r"[^\w%.]+", "-", budget))))
    files = {out / f"{kind}{f'-{number}' if direct else ''}.json": it for number, it in enumerate(samples, 1)}
    for path, widths in files.items():
        Run(out).write(path.name, widths.to_json())
    if as_json:
        print_json([{"file": str(path)} | session.cost_facts(graph, widths) for path, widths in files.items()])
        return
    for path, widths in files.items():
        print(f"{path}: {session.describe_costs(graph, widths)}: {' '.join(map(str, widths.values()))}")


def _for_budget(found: SearchResult, text: str, direct: bool) -> SearchResult:
    """The same search with another budget, if one is given; stderr says what that means."""
    if not text:
        return found
    wanted = parse(text, found.graph)
    check_reachable(wanted, found.graph, *extremes(found.graph, found.sizes))
    if wanted.limits != found.budget.limits:
        way = f"only samples that fit {text} are kept, and they are rare" if direct else f"widths are scaled to {text}"
        log(f"The search was for {found.budget.text}: {way}, not searched again.")
    return replace(found, budget=wanted)


def evaluate(run: Path, changes: Mapping[str, Any], as_json: bool) -> None:
    """dmcp evaluate; changes: settings that are not those of the run."""
    _, config = read_config(run)
    _check_done(run, WIDTHS, config)
    check_names(run, config, *([] if "data" in changes else ["data"]))
    config = replace(config, train_batch=0, weights="", teacher="", teacher_model="", holdout=0.0, **changes)
    job = open_job(config)
    small = load(run, job.fresh)
    kept = {run.name: job.graph.widths(Widths.from_json(read_json(run / WIDTHS)))}
    with progress.showing(False if as_json else None):
        rows = compare({run.name: small}, job.graph, kept, job.test, next(iter(job.test))[0])
    log_replaced(job.replaced)
    if as_json:
        facts = result_facts(run, job.graph, kept[run.name], job.replaced)
        print_json(facts | {"networks": [asdict(row) for row in rows]})
    else:
        print(results_table(rows, job.graph))


def export(run: Path, out: Path, tolerance: float, int8: bool, quiet: bool, as_json: bool) -> None:
    """dmcp export; 8 bits by way of a file with 32, which is tested and timed beside it."""
    config, fresh, graph, shape = _open_run(run, WIDTHS)
    exporting.check_target(out)
    if int8 and out.suffix != exporting.ONNX:
        raise FileError(f"{out}: only {exporting.ONNX} files can have 8 bits.")
    if int8:
        check_names(run, config, "data")
        ranges, test = _images(config)
    small, widths = load(run, fresh), graph.widths(Widths.from_json(read_json(run / WIDTHS)))
    how, example = read_json(run / INPUT), torch.zeros(1, *shape)
    if not quiet:
        log(f"{out} is made, and run beside the network; the unpruned network is exported alike, to compare.")
    shown = progress.showing(False if quiet or as_json else None, lines=True)
    with tempfile.TemporaryDirectory() as folder, shown, progress.phase("export", 2 + int8) as done:
        exact, full = Path(folder) / "float32.onnx" if int8 else out, Path(folder) / f"unpruned{out.suffix}"
        made = exporting.export(small, example, exact, preprocessing=how, tolerance=tolerance)
        done(1)
        with contextlib.suppress(DmcpError):
            exporting.export(fresh, example, full, preprocessing=how)
        done(2)
        files = {"": out, "float32_": exact, "unpruned_": full}
        if int8:
            made = exporting.quantize(exact, ranges, out)
            done(3)
        else:
            del files["float32_"]
        files = {name: path for name, path in files.items() if path.exists()}
        ms = dict(zip(files, exporting.milliseconds([*files.values()], example), strict=True))
        sizes = {name: path.stat().st_size for name, path in files.items()}
        accuracy = {name: _accuracy(small, files[name], test) for name in ("", "float32_")} if int8 else {}
    if as_json:
        facts = {"file": str(out), "runtime": made.runtime, "difference": made.difference}
        facts |= {"unpruned_size_bytes": None, "unpruned_ms": None, "preprocessing": how}
        for what, values in (("size_bytes", sizes), ("ms", ms), ("accuracy", accuracy)):
            facts |= {f"{name}{what}": value for name, value in values.items()}
        print_json(result_facts(run, graph, widths) | facts)
        return
    by_rule = "of the outputs (root mean square)" if int8 else f"of the largest one, at most {tolerance:.0e} allowed"
    print(f"{out}\nin {made.runtime}: outputs differ by {made.difference:.1e} {by_rule}")
    print(f"in it, as {exporting.NOTE}: {', '.join(how)}\n" if how else "no preprocessing is in the file\n")
    heads = {"": "int8" if int8 else "exported", "float32_": "float32", "unpruned_": "unpruned"}
    rows = [["", *(heads[name] for name in files)], ["bytes", *(f"{size:,}" for size in sizes.values())]]
    if not int8:
        counts = {"params": (graph.params(widths), graph.params()), "MACs": (graph.macs(widths), graph.macs())}
        rows += [[name, *(f"{count:,}" for count in pair[: len(files)])] for name, pair in counts.items()]
    rows.append(["ms", *(f"{it:.3f}" for it in ms.values())])
    if int8:
        rows.append(["test accuracy", *(f"{it:.2%}" for it in accuracy.values()), *[""] * ("unpruned_" in files)])
    print(table(rows))
    print(f"ms: one sample in {made.runtime}, on one thread of this machine's CPU")


def _images(config: RunConfig) -> tuple[Loader, Loader]:
    """Some training images, as they are when they are tested, always the same; and all test images."""
    job = open_job(replace(config, device="cpu", weights="", teacher="", teacher_model="", teacher_model_args=()))
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
