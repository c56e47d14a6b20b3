"""The commands that look at networks, data and runs: inspect, data, latency, sample, evaluate, export, report."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dmcp.budgets import file_name
from dmcp.cli.config import check_typed, read_config
from dmcp.cli.job import build, choose_device, choose_shape, open_job, trace_job, with_shape
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
from dmcp.data.datasets import DataSet, check_data, split
from dmcp.data.datasets import load as load_data
from dmcp.data.loaders import make_loader
from dmcp.errors import DataError, DmcpError, FileError, WidthsError
from dmcp.exporting import export as exporting
from dmcp.exporting.latency import measure_latency
from dmcp.exporting.latency_files import read_latency, write_networks
from dmcp.exporting.timing import time_files
from dmcp.report.html import make_page
from dmcp.results import measure_networks, results_table
from dmcp.runs.config import RunConfig
from dmcp.runs.files import EXPORTED, INPUT, SEARCH_FILE, WIDTHS, read_json
from dmcp.runs.reading import budgets_of, read_overview, read_runs, read_widths
from dmcp.runs.records import Row, score
from dmcp.runs.saved_search import load_search
from dmcp.runs.storage import load
from dmcp.runs.writing import Run
from dmcp.runtime import progress
from dmcp.runtime.batches import Loader, generator
from dmcp.runtime.io import make_printable
from dmcp.searching import sampling
from dmcp.settings import LatencyConfig
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.widths import Widths
from dmcp.training.loop import evaluate as accuracy_of
from dmcp.units import counted, show_shape, table

_BATCH = 64  # images in a batch that calibrates or tests a file with 8 bits
_LISTED = 20  # lines of each list in the description of a data set
_TAIL = 100  # lines at the end of a log, which hold the tested networks
_ROUNDING = 0.001  # by which accuracy may differ on another device


# networks


def inspect(config: RunConfig, as_json: bool) -> None:
    """Run `dmcp inspect`: print what the network costs, and which of its channels can be pruned."""
    net = build(config, None)
    shape = choose_shape(config, net).shape
    graph = trace_job(config, net, shape)
    if as_json:
        print_json({"model": config.model} | graph.to_json())
    else:
        print(describe_network(config.model, shape, graph))


def latency(
    config: RunConfig, classes: int | None, settings: LatencyConfig, out: str, write: str, read: str, as_json: bool
) -> None:
    """Run `dmcp latency`: measure cut networks, print how well a table forecasts them, and save it in `out`.

    write: a folder for the networks as files instead, which are measured elsewhere.
    read: a file with these times.
    """
    # A file that cannot be written is refused before anything is measured.
    if write and (out or read):
        raise DmcpError("--write only writes networks; later, use --read FILE.csv with --out to get the table.")
    if out:
        if Path(out).is_dir():
            raise FileError(f"--out: {out} is a folder: name a file.")
        with tempfile.TemporaryFile(dir=Path(out).parent):
            pass

    # The data only say how many classes there are, and the shape of a sample.
    if config.data and classes:
        raise DmcpError("--classes: leave it out, because --data determines the number of classes.")
    loaded = None
    if config.data:
        loaded = load_data(config.data)
        classes = loaded.classes
    net = build(config, classes)
    shape = choose_shape(config, net, loaded).shape
    if loaded is not None:
        with_shape(loaded, config.data, shape)  # refuses a shape that the images cannot have

    graph = trace_job(config, net, shape)
    example = torch.randn(1, *shape, generator=generator(0))
    if write:
        path = write_networks(net, example, write, graph, settings)
        if as_json:
            print_json({"folder": write, "networks": settings.networks, "times": str(path)})
        else:
            print(f"Time the {settings.networks} networks in {write}, and fill in the column ms of {path}.")
            print(f"Then repeat this command with --read {path} --out latency.json instead of --write.")
        return

    if read:
        measured = read_latency(read, net, example, graph, settings)
    else:
        measured = measure_latency(net.to(choose_device(config)), example, graph, settings)
    if out:
        measured.save(out)
    if as_json:
        facts = measured.to_json()
        if out:
            facts["file"] = out
        print_json(facts)
        return
    for line in (measured.summary, measured.warning, out):
        if line:
            print(line)


# data


def data(name: str, quiet: bool, as_json: bool) -> None:
    """Run `dmcp data`: look at every image of a data set, and fail if it cannot be used as it is."""
    loaded = load_data(name, strict=False)
    count = len(loaded.train) + len(loaded.test)
    with progress.showing(not (quiet or as_json)), progress.phase("files", count) as update:
        facts = check_data(loaded, update)

    if as_json:
        print_json({"data": name} | facts)
    else:
        for line in _describe_data(name, facts):
            print(make_printable(line))

    if facts["in_both"]:
        log(
            f"{len(facts['in_both']):,} of {counted(facts['test']['images'], 'test image')} are also training images, "
            "which makes the accuracy look better than it is: remove them from one of the sets."
        )
    if facts["broken"]:
        raise DataError(
            f"{len(facts['broken'])} of {counted(count, 'image file')} cannot be read: use --corrupt skip, "
            "or repair the files and start a new run (a run cannot be resumed with changed data)."
        )
    if not facts["well"]:
        raise DataError(f"{name}: at least two classes are needed, each with images in both train/ and val/.")


def _describe_data(name: str, facts: dict[str, Any]) -> Iterator[str]:
    """Yield lines about the classes, the images and the problems of a data set."""
    classes = "1 class"
    if facts["classes"] != 1:
        classes = f"{facts['classes']} classes"
    yield f"{name}: {classes}"
    for part, kind in (("train", "training image"), ("test", "test image")):
        yield f"{counted(facts[part]['images'], kind)}: {facts[part]['from']}"
    if facts["sizes"]:
        sizes = ", ".join(f"{word} {show_shape(size)}" for word, size in facts["sizes"].items())
        yield f"height x width: {sizes}"

    unreadable = [f"{broken['file']}: {broken['reason']}" for broken in facts["broken"]]
    duplicates = [f"{pair['train']} = {pair['test']}" for pair in facts["in_both"]]
    yield from _describe_list("Classes without images", facts["wrong_classes"])
    if facts["unseen_classes"]:
        yield from _describe_list("Test classes without training images", facts["unseen_classes"])
    yield from _describe_list("Files that cannot be read", unreadable)
    if facts["left_out"]:
        yield from _describe_list("Files left out, which do not end like the name of an image", facts["left_out"])
    yield from _describe_list("Images in both sets", duplicates)


def _describe_list(title: str, entries: Sequence[str]) -> Iterator[str]:
    """Yield the number of entries and the first of them, a line each."""
    yield f"{title}: {len(entries) or 'none'}"
    for entry in entries[:_LISTED]:
        yield f"  {entry}"
    if len(entries) > _LISTED:
        yield f"  and {len(entries) - _LISTED:,} more: --json lists all"


# runs


def report(runs: Sequence[Path], out: Path) -> None:
    """Run `dmcp report`: write a page about some runs."""
    Run(out.parent).write(out.name, make_page(read_runs(runs)))
    print(out)


def _read_settings(run: Path, file: str, model: str) -> tuple[dict[str, Any], RunConfig]:
    """Return the settings of a run that has this file, as they are stored and as a config.

    A run that has not made the file yet, or never will, is refused. model: its network as the user typed it.
    """
    stored, config = read_config(run)
    check_typed(run, config, {"model": model})
    if not (run / file).exists():
        advice = "continue the run with --resume"
        if Run(run).done:
            advice = "give a run that has one, or of several budgets the folder of one"
        raise FileError(f"{run} has no {file}: {advice}.")
    return stored, config


def _rebuild_network(
    run: Path, stored: Mapping[str, Any], config: RunConfig
) -> tuple[nn.Module, ChannelGraph, tuple[int, ...]]:
    """Return the unpruned network of a run with fresh weights, its graph, and the shape of a sample."""
    classes = stored.get("classes")
    sizes = stored.get("shape")
    is_shape = isinstance(sizes, list) and all(type(size) is int and size > 0 for size in sizes)
    if type(classes) is not int or not is_shape:
        raise FileError(f"{run}: its settings lack the number of classes and the shape of an image.")
    shape = tuple(stored["shape"])
    fresh = build(config, classes)
    return fresh, trace_job(config, fresh, shape), shape


def sample(run: Path, direct: int, budget: str, out: Path, seed: int, model: str, as_json: bool) -> None:
    """Run `dmcp sample`: write widths from the search of a run, the expected ones or `direct` random ones."""
    stored, config = _read_settings(run, SEARCH_FILE, model)
    _, graph, _ = _rebuild_network(run, stored, config)
    search = load_search(run, graph)
    graph = search.graph  # with the run's table of latency, if it has one
    if budget:
        searched_budget = search.budget
        search = search.with_budget(budget)
        if searched_budget.limits != search.budget.limits:
            log(f"The search was for {searched_budget.text}: its widths are scaled to {budget}, not searched again.")

    suffix = ""
    if budget:
        suffix = f"-{search.budget.file_name}"
    files: dict[Path, Widths] = {}
    if direct:
        for number, widths in enumerate(sampling.direct(search, direct, generator(seed)), start=1):
            files[out / f"direct{suffix}-{number}.json"] = widths
    else:
        files[out / f"expected{suffix}.json"] = sampling.expected(search)
    for path, widths in files.items():
        Run(out).write(path.name, widths.to_json())

    if as_json:
        facts = []
        for path, widths in files.items():
            facts.append({"file": str(path)} | cost_facts(graph, widths))
        print_json(facts)
        return
    for path, widths in files.items():
        print(f"{path}: {describe_costs(graph, widths)}: {' '.join(map(str, widths.values()))}")


def evaluate(run: Path, changes: Mapping[str, Any], model: str, as_json: bool) -> None:
    """Run `dmcp evaluate`: test the pruned network of a run again; `changes` are settings to use instead of its own."""
    stored, config = _read_settings(run, WIDTHS, model)
    same_data = changes.get("data", config.data) == config.data
    config = replace(config, train_batch=0, weights="", teacher="", teacher_model="", holdout=0.0, **changes)
    if not same_data:
        config = replace(config, within=None)  # none of these images decided on the budget
    check_data_is_here(run, config)
    job = open_job(config)
    try:
        pruned = load(run, job.fresh)
    except WidthsError as error:
        classes = stored.get("classes", job.data.classes)
        if classes == job.data.classes:
            raise
        raise WidthsError(
            f"{run}: its network is for {classes} classes, but {config.data} has {job.data.classes}."
        ) from error
    widths = read_widths(run / WIDTHS, job.graph)

    example = next(iter(job.test))[0]
    with progress.showing(not as_json):
        rows = measure_networks({run.name: pruned}, job.graph, {run.name: widths}, job.test, example)
    log(*describe_replaced(job.replaced))

    # What the run recorded should come out again, unless the code, the data or the weights have changed.
    row = rows[0]
    recorded = None
    if same_data:
        recorded = _recorded_row(run, row)
    if recorded:
        one_image = 1.5 / row.samples  # one image may be on the other side, two may not
        if abs(row.accuracy - recorded.accuracy) > max(_ROUNDING, one_image):
            log(f"The run recorded {score(recorded)}: the code, the data or the weights are not those of the run.")

    if as_json:
        facts = result_facts(run, job.graph, widths, job.replaced)
        facts["recorded_accuracy"] = None
        if recorded:
            facts["recorded_accuracy"] = recorded.accuracy
        facts["networks"] = [asdict(row)]
        print_json(facts)
        return
    print(results_table(rows, job.graph))
    if recorded:
        print(f"- the run recorded {score(recorded)}")


def _recorded_row(run: Path, row: Row) -> Row | None:
    """Return the result that the run recorded, if it is about the same network, test set and metric as this row."""
    recorded = read_overview(run, _TAIL).result
    if recorded is None:
        return None
    if (recorded.samples, recorded.params, recorded.score) != (row.samples, row.params, row.score):
        return None
    return recorded


# exported files


def export(run: Path, out: Path | None, budget: str, int8: bool, model: str, quiet: bool, as_json: bool) -> None:
    """Run `dmcp export`: write the pruned network as a file, of several budgets each one or that of `budget`."""
    name = "model.onnx"
    if int8:
        name = "model.int8.onnx"
    folders = budgets_of(run)
    if budget:
        folders = [_folder_of_budget(run, folders, budget)]
    if len(folders) < 2:
        run = (folders or [run])[0]
        facts = _export_network(run, out or run / name, int8, model, quiet or as_json, prints=not as_json)
        if as_json:
            print_json(facts)
        return

    by_budget = {}
    for folder in folders:
        target = folder / name
        if out is not None:
            target = out.with_name(f"{out.stem}-{folder.name}{out.suffix}")
        by_budget[folder.name] = _export_network(folder, target, int8, model, quiet or as_json, prints=not as_json)
        if not as_json:
            print()
    if as_json:
        print_json({"folder": str(run), "budgets": by_budget})


def _folder_of_budget(run: Path, folders: Sequence[Path], budget: str) -> Path:
    """The folder of one of several budgets, which is given as it was typed or as the folder is named."""
    names = {folder.name: folder for folder in folders}
    name = file_name(budget)
    if name not in names:
        existing = ", ".join(names) or "only one network"
        raise FileError(f"{run} has no network for the budget {budget!r}. It has {existing}.")
    return names[name]


def _export_network(run: Path, out: Path, int8: bool, model: str, is_quiet: bool, prints: bool) -> dict[str, Any]:
    """Write the pruned network of one run as a file, and time it beside the unpruned one; what came out, as plain data.

    A file with 8 bits is made from one with 32, which is tested and timed, too.
    """
    stored, config = _read_settings(run, WIDTHS, model)
    fresh, graph, shape = _rebuild_network(run, stored, config)
    exporting.check_target(out)
    if int8:
        if out.suffix != exporting.ONNX:
            raise FileError(f"{out}: only {exporting.ONNX} files can be quantized to 8 bits.")
        check_data_is_here(run, config)
        calibration, test = _int8_loaders(config)

    pruned = load(run, fresh)
    widths = read_widths(run / WIDTHS, graph)
    preprocessing = read_json(run / INPUT)
    example = torch.zeros(1, *shape)

    shown = progress.showing(not is_quiet)
    steps = 2 + int8
    with tempfile.TemporaryDirectory() as folder, shown, progress.phase("export", steps) as update:
        # The pruned network.
        float32 = out
        files = {"exported": out}
        if int8:
            float32 = Path(folder) / "float32.onnx"
            files = {"int8": out}
        exported = exporting.export(pruned, example, float32, preprocessing=preprocessing)
        update(1)

        # The unpruned network is there to compare: if it cannot be exported, its column is left out.
        unpruned = Path(folder) / f"unpruned{out.suffix}"
        with contextlib.suppress(DmcpError):
            exporting.export(fresh, example, unpruned, preprocessing=preprocessing)
            files["unpruned"] = unpruned
        update(2)

        if int8:
            files["float32"] = float32
            exported = exporting.quantize(float32, calibration, out)
            update(3)

        # All files are timed in turns; with fewer bits, accuracy may be lost, so both precisions are tested.
        times = time_files(list(files.values()), example)
        measured: dict[str, dict[str, Any]] = {}
        for (name, path), ms in zip(files.items(), times, strict=True):
            measured[name] = {"bytes": path.stat().st_size, "ms": ms}
        if int8:
            for name in ("int8", "float32"):
                measured[name]["accuracy"] = _file_accuracy(files[name], pruned, test)

    if out.parent == run and "unpruned" in measured:
        _record_times(run, out.name, exported.runtime, measured)
    facts = result_facts(run, graph, widths)
    facts |= {"file": str(out), "runtime": exported.runtime, "difference": exported.difference}
    facts |= {"preprocessing": preprocessing, "files": measured}
    if not prints:
        return facts
    scale = "of the largest one"
    if int8:
        scale = "of the outputs (root mean square)"
    print(f"{out}\nin {exported.runtime}: outputs differ by {exported.difference:.1e} {scale}")
    if preprocessing:
        print(f"in it, as {exporting.NOTE}: {', '.join(preprocessing)}\n")
    else:
        print("no preprocessing is in the file\n")
    print(_files_table(measured))
    print(f"ms: one sample in {exported.runtime}, on one thread of this machine's CPU")
    return facts


def _int8_loaders(config: RunConfig) -> tuple[Loader, Loader]:
    """Return loaders of the images that calibrate 8 bits, and of those that test them.

    Calibration takes always the same training images, as they are when they are tested, which means not augmented.
    """
    job = open_job(replace(config, device="cpu", weights="", teacher="", teacher_model=""))
    calibration = job.data.train
    if len(calibration) > 2 * exporting.SAMPLES:
        _, calibration = split(calibration, exporting.SAMPLES / len(calibration))

    def make(images: DataSet) -> Loader:
        batch = min(_BATCH, len(images))
        return make_loader(images, batch, train=False, workers=config.workers, corrupt=config.corrupt)

    return make(calibration), make(job.data.test)


def _file_accuracy(path: Path, pruned: nn.Module, test: Loader) -> float:
    """Return the accuracy of an exported file; the network only says where batches go, and is not run."""
    file = exporting.open_file(path)
    with torch.no_grad():
        return accuracy_of(pruned, test, forward=lambda x: file.run(x)[0])


def _record_times(run: Path, file: str, runtime: str, measured: Mapping[str, Mapping[str, Any]]) -> None:
    """Add the times of a file to those that the run keeps for its report, where the last entry is the newest."""
    recorded = {}
    if (run / EXPORTED).exists():
        recorded = read_json(run / EXPORTED)
    recorded.pop(file, None)
    times = {}
    for name, facts in measured.items():
        precision = name
        if name == "exported":
            precision = "float32"
        times[precision] = facts["ms"]
    recorded[file] = {"runtime": runtime, "ms": times}
    Run(run).write(EXPORTED, recorded)


def _files_table(measured: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a column for each file and a row for each quantity that was measured."""
    rows = [["", *measured]]
    for quantity, form in {"bytes": "{:,}", "ms": "{:.3f}", "accuracy": "{:.2%}"}.items():
        cells = []
        for facts in measured.values():
            cell = ""
            if quantity in facts:
                cell = form.format(facts[quantity])
            cells.append(cell)
        if any(cells):
            rows.append([quantity, *cells])
    return table(rows)
