"""The commands that look at runs, data and networks."""

from __future__ import annotations

import contextlib
import re
import shlex
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from dmcp import sampling
from dmcp.batches import Loader, generator
from dmcp.budget import Budget, check_reachable, parse
from dmcp.cli import config as o
from dmcp.cli.config import Plan, check_names, plan_from_json, read_plan
from dmcp.cli.job import Corrupt, Job, Opened, build, open_job, trace_job
from dmcp.cli.launch import following_parent
from dmcp.cli.session import (
    INPUT,
    Progress,
    check_given,
    check_test_files,
    cost_facts,
    describe_costs,
    print_json,
    result_facts,
    say,
    session,
    tell_ignored,
    tell_notices,
    tell_replaced,
)
from dmcp.compare.methods import METHODS, Own, find_method
from dmcp.compare.problem import ends_of
from dmcp.compare.runner import (
    PAGE,
    Comparison,
    check_begun,
    check_facts,
    check_failed,
    epochs_of,
    fitting_budgets,
    is_done,
    read_given,
    read_names,
    read_peers,
    read_settings,
    run_cell,
    run_comparison,
    state_of,
    stored,
    tasks,
    write_table,
)
from dmcp.data.check import DataFacts, check_data
from dmcp.data.datasets import split, swapped
from dmcp.data.loaders import make_loader
from dmcp.errors import DataError, DmcpError, FileError, StoppedError
from dmcp.exporting import (
    NOTE,
    PASSES,
    SAMPLES,
    TOLERANCE,
    Exported,
    Format,
    check_target,
    milliseconds,
    open_file,
    quantize,
)
from dmcp.exporting import export as export_of_exporting
from dmcp.exporting import export as write
from dmcp.report.figures import save as save_figure
from dmcp.report.html import draw_runs, make_page, percent
from dmcp.results import compare as compare_of_results
from dmcp.results import not_faster, results_table, score
from dmcp.runs import SEARCH, SETTINGS, Run, is_run, list_runs, load_search, read_json, read_runs, slug
from dmcp.runtime.io import plain
from dmcp.searching.config import BOUNDS, SearchResult, extremes
from dmcp.settings import Engine, TrainConfig
from dmcp.storage import WIDTHS, load
from dmcp.tracing.graph import ChannelGraph
from dmcp.training import evaluate as evaluate_of_training
from dmcp.units import counted, table
from dmcp.widths import Widths

Name = Annotated[str, typer.Argument(metavar="FOLDER", help="A folder, or digits, cifar10, cifar100; as for --data.")]
Input = Annotated[str, typer.Option(help="Count what must be enlarged to this size, like 3x224x224.")]
Threads = Annotated[
    int | None, typer.Option(min=0, max=1024, help="Threads that decode files; default: the cores, up to 8.")
]
Most = Annotated[int, typer.Option(min=0, help="Lines of each list; --json has all.")]


def data(
    name: Name,
    input: Input = "",
    workers: Threads = None,
    most: Most = 20,
    quiet: o.Quiet = False,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Look at data as the other commands read them: classes, sizes, broken files, test images that are trained on.

    Every image file is decoded. Exit code 2 if there are files that cannot be read, or classes that other commands
    refuse.

    \b
    Examples:
      dmcp data ~/photos
      dmcp data ~/photos --input 3x224x224 --workers 16
      dmcp data cifar10 --json
    """
    if not o.is_first():
        return
    with Progress(quiet) as progress:

        def tell(done: int, count: int) -> None:
            progress.count("reading", done, count, "files")

        facts = check_data(name, input=input, workers=workers, tell=tell)
    if as_json:
        print_json(_plain(name, facts))
    else:
        for line in _lines(name, facts, input, most):
            print(plain(line))
    if wrong := _mistake(name, facts):
        raise DataError(wrong)


def _mistake(name: str, facts: DataFacts) -> str:
    """What other commands would refuse, in one sentence; empty if nothing."""
    if facts.broken:
        some = f"{len(facts.broken)} of {counted(facts.train + facts.test, 'image file')}"
        skip = "" if any(it.refused for it in facts.broken) else ", or skip them with --corrupt skip"
        return f"{some} cannot be read: repair or remove them{skip}."
    if not facts.wrong_classes:
        return ""
    if not facts.empty_classes and not facts.lone_classes:
        return f"{name}: there is one class; at least two are needed."
    parts = []
    if empty := len(facts.empty_classes):
        parts.append(f"{counted(empty, 'class folder')} {'is' if empty == 1 else 'are'} empty")
    if lone := len(facts.lone_classes):
        parts.append(f"{lone} {'is' if lone == 1 else 'are'} not in both train/ and val/")
    return f"{name}: {', and '.join(parts)}: put images there, or remove them."


def _lines(name: str, facts: DataFacts, input: str, most: int) -> Iterator[str]:
    (small, few), (large, many) = facts.smallest_class, facts.largest_class
    ends = f"the smallest {small} ({counted(few, 'training image')}), the largest {large} ({many:,})"
    yield f"{name}: {facts.classes} class{'' if facts.classes == 1 else 'es'}, {ends}"
    to = " in" if facts.is_files else ":"
    yield f"{counted(facts.train, 'training image')}{to} {facts.train_from}"
    yield f"{counted(facts.test, 'test image')}{to} {facts.test_from}"
    yield from filter(None, [swapped(facts.train, facts.test, facts.is_files)])
    if facts.sizes:
        words = zip(("smallest", "median", "largest"), facts.sizes, strict=True)
        yield f"height x width: {', '.join(f'{word} {_by(found)}' for word, found in words)}"
        modes = ", ".join(f"{mode} {count:,}" for mode, count in facts.modes.items())
        yield f"colour: {modes}{'; all are read as RGB' if facts.is_files else ''}"
    if facts.enlarged is not None:
        size = input.partition("x")[2]
        yield f"smaller than {size} in height or width, and enlarged: {facts.enlarged:,}"
    if facts.empty_classes:
        yield from _list("Empty classes:", facts.empty_classes, most)
    if facts.lone_classes:
        yield from _list("Classes that are not in both train/ and val/:", facts.lone_classes, most)
    if facts.broken:
        head = f"{counted(len(facts.broken), 'file')} cannot be read:"
        yield from _list(head, (f"{it.file}: {it.reason}" for it in facts.broken), most)
    elif facts.is_files:
        yield "All files can be read."
    if both := facts.in_both:
        head = f"{counted(len(both), 'test image')} {'is' if len(both) == 1 else 'are'} among the training images"
        yield from _list(f"{head} (same bytes):", (f"{one} is {other}" for one, other in both), most)
    else:
        yield "No test image is among the training images (same bytes)."


def _list(head: str, entries: Iterable[str], most: int) -> Iterator[str]:
    every = list(entries)
    yield head
    yield from (f"  {entry}" for entry in every[:most])
    if len(every) > most:
        yield f"  and {len(every) - most:,} more: --most {len(every)} lists all"


def _plain(name: str, facts: DataFacts) -> dict[str, Any]:
    ends = {"smallest": facts.smallest_class, "largest": facts.largest_class}
    return {
        "data": name,
        "well": facts.is_well,
        "classes": {"count": facts.classes}
        | {word: {"name": found, "train_images": count} for word, (found, count) in ends.items()},
        "train": {"images": facts.train, "from": facts.train_from},
        "test": {"images": facts.test, "from": facts.test_from},
        "sizes": dict(zip(("smallest", "median", "largest"), map(list, facts.sizes), strict=False)),
        "modes": facts.modes,
        "enlarged": facts.enlarged,
        "broken": [it._asdict() for it in facts.broken],
        "in_both": [{"test": one, "train": other} for one, other in facts.in_both],
        "empty_classes": list(facts.empty_classes),
        "classes_in_one_part": list(facts.lone_classes),
    }


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}x{size[1]}"


_BATCH = 64


@dataclass(frozen=True, eq=False)
class Networks:
    """What is written, and what it is compared with."""

    small: nn.Module
    whole: nn.Module  # the unpruned one; it is not trained, which does not matter for bytes and time
    example: Tensor
    how: Any  # what is done to an image before, for the file


@dataclass(frozen=True, eq=False)
class Images:
    """Some training images, as they are when they are tested, and all test images."""

    ranges: Loader
    test: Loader


@dataclass(frozen=True)
class Told:
    """What came out, for people and for programs."""

    text: str
    facts: dict[str, Any]


def open_images(run: Path, out: Path) -> Images:
    """The data of a run, which must be there; drawn with a fixed seed, so that the same file is made again."""
    if out.suffix != Format.ONNX:
        raise FileError(f"{out}: only {Format.ONNX} files can have 8 bits.")
    _, plan = read_plan(run)
    check_names(run, plan.job, "data")
    job = replace(plan.job, device="cpu", weights="", teacher="", teacher_model="", teacher_model_args=())
    opened = open_job(job)
    count = len(opened.data.train)
    some = opened.data.train if count <= 2 * SAMPLES else split(opened.data.train, SAMPLES / count)[1]
    how: dict[str, Any] = {"workers": job.workers, "corrupt": job.corrupt}
    return Images(
        make_loader(some, min(_BATCH, len(some)), train=False, **how),
        make_loader(opened.data.test, min(_BATCH, len(opened.data.test)), train=False, **how),
    )


def write_int8(nets: Networks, images: Images, out: Path, tolerance: float, quiet: bool) -> Told:
    """Write the file by way of one with 32 bits, and test and time both."""
    with tempfile.TemporaryDirectory() as folder:
        middle, whole = (Path(folder) / f"{name}{Format.ONNX}" for name in ("float32", "unpruned"))
        if not quiet:
            say(f"{out} is made: exported with 32 bits, then given 8")
        export_of_exporting(nets.small, nets.example, middle, preprocessing=nets.how, tolerance=tolerance)
        made = quantize(middle, images.ranges, out)
        export_of_exporting(nets.whole, nets.example, whole)
        if not quiet:
            say("it is tested and timed beside the one with 32 bits")
        files = (out, middle, whole)
        ms, sizes = milliseconds(files, nets.example), [path.stat().st_size for path in files]
        accuracy = [_accuracy(nets.small, path, images.test) for path in files[:2]]
    rows = [
        ["", "int8", "float32", "unpruned"],
        ["bytes", *(f"{size:,}" for size in sizes)],
        ["ms", *(f"{it:.3f}" for it in ms)],
        ["test accuracy", *(f"{it:.2%}" for it in accuracy), ""],
    ]
    text = (
        f"{out}\n8 bits for each weight and activation; ranges are those of {made.samples} training images; "
        f"outputs differ by {made.difference:.1%} (root mean square)\n\n{table(rows)}\n"
        "float32, unpruned: the same network with 32 bits, and the whole one (not trained here), exported alike\n"
        f"ms: the fastest of {PASSES} passes of one sample in {made.runtime}, on this machine's CPU, taken in turn"
    )
    names = ("", "float32_", "unpruned_")
    facts = {name: fact for name, fact in asdict(made).items() if name != "path"}
    facts |= {f"{name}size_bytes": size for name, size in zip(names, sizes, strict=True)}
    facts |= {f"{name}ms": it for name, it in zip(names, ms, strict=True)}
    return Told(text, facts | {"accuracy": accuracy[0], "float32_accuracy": accuracy[1]})


def _accuracy(small: nn.Module, path: Path, test: Loader) -> float:
    """Of a file on the test images; the network says where batches go, and is not run."""
    runtime = open_file(path)
    with torch.no_grad():
        return evaluate_of_training(small, test, forward=lambda x: runtime.run(x)[0])


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


_COLUMNS = ("name", "command", "model", "data", "budget", "state", "accuracy", "MACs", "started")


def runs(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder that holds run folders.")] = Path("runs"),
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """List the runs in a folder, oldest first: state, budget, accuracy, MACs as a share of the unpruned network.

    \b
    Examples:
      dmcp runs
      dmcp runs ~/experiments --json
    """
    if not o.is_first():
        return
    found = list_runs(folder)
    facts = [run.describe() for run in found]
    if as_json:
        print_json(facts)
        return
    console = Console(highlight=False, markup=False, emoji=False)
    grid = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in _COLUMNS:
        grid.add_column(column, justify="right" if column in ("accuracy", "MACs") else "left", overflow="fold")
    for run, fact in zip(found, facts, strict=True):
        state = fact["state"] + (f": {fact['progress']}" if fact["progress"] else "")
        accuracy = score(run.result, " %") if run.result else ""
        share = "" if fact["macs_share"] is None else percent(fact["macs_share"])
        words = [fact[name] for name in _COLUMNS[:5]]
        grid.add_row(*words, state, accuracy, share, fact["started"])
    if not console.is_terminal:
        console.width = 100_000  # no name is broken in a pipe
    console.print(grid if facts else f"{folder}: no runs.")


def report(
    run: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Runs, or folders that hold some.")],
    out: Annotated[Path, typer.Option(help="File of the page.")] = Path("report.html"),
    svg: Annotated[Path | None, typer.Option(help="Folder for the charts, each as a file of its own.")] = None,
    debug: o.Debug = False,
) -> None:
    """Make one HTML page about some runs, which needs no network and no other file; the files' names are printed.

    \b
    Examples:
      dmcp report runs/resnet18-photos-prune
      dmcp report runs --out all.html --svg charts
    """
    if not o.is_first():
        return
    if out.is_dir():
        raise FileError(f"--out: {out} is a folder: name the file in it, like {out / 'report.html'}.")
    if svg and svg.exists() and not svg.is_dir():
        raise FileError(f"--svg: {svg} is a file: name a folder.")
    found = read_runs(run)
    Run(out.parent).write(out.name, make_page(found))
    print(out)
    if svg:
        for name, figure in draw_runs(found).items():
            print(save_figure(figure, svg / f"{name}.svg"))


def sample(
    run: o.RunFolder,
    direct: Annotated[
        int, typer.Option(min=0, max=10_000, help="So many different structures drawn from the chains; 0: expected.")
    ] = 0,
    budget: Annotated[str, typer.Option(help="Another budget than the search's, whose widths are then scaled.")] = "",
    out: Annotated[Path | None, typer.Option(help="Folder for the files; default: the run.")] = None,
    seed: o.Seed = 0,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Structures of a search, inside its budget: the expected one, or drawn ones (each as a file for dmcp train).

    \b
    Examples:
      dmcp sample runs/cifar-resnet20-cifar10-search
      dmcp sample runs/cifar-resnet20-cifar10-search --budget 30%
      dmcp sample runs/cifar-resnet20-cifar10-search --direct 5 --seed 1 --json
    """
    if not o.is_first():
        return
    if out and out.exists() and not out.is_dir():
        raise FileError(f"--out: {out} is a file: name a folder.")
    settings, plan = read_plan(run)
    _check_done(run, SEARCH, plan)
    check_names(run, plan.job, "model")
    graph = trace_job(plan.job, build(plan.job, settings["classes"]), tuple(settings["shape"]))
    found = _for_budget(load_search(run, graph), budget, direct > 0)
    graph = found.graph  # with the run's table of latency, if it has one
    drawn = sampling.direct(found, direct, generator(seed)) if direct else [sampling.expected(found)]
    kind = "-".join(filter(None, ("direct" if direct else "expected", re.sub(r"[^\w%.]+", "-", budget))))
    place = out or run
    files = {place / f"{kind}{f'-{number}' if direct else ''}.json": it for number, it in enumerate(drawn, 1)}
    for path, widths in files.items():
        Run(place).write(path.name, widths.to_json())
    if as_json:
        print_json([{"file": str(path)} | cost_facts(graph, widths) for path, widths in files.items()])
        return
    for path, widths in files.items():
        print(f"{path}: {describe_costs(graph, widths)}: {' '.join(map(str, widths.values()))}")


def _for_budget(found: SearchResult, text: str, drawn: bool) -> SearchResult:
    """The same search with another budget, if one is given; a person is told what that means."""
    if not text:
        return found
    wanted = parse(text, found.graph)
    check_reachable(wanted, found.graph, *extremes(found.graph, found.sizes))
    if wanted.limits != found.budget.limits:
        way = f"only draws that fit {text} are kept, and such are rare" if drawn else f"its widths are scaled to {text}"
        say(f"The search was for {found.budget.text}: {way}, not searched again.")
    return replace(found, budget=wanted)


def evaluate(
    run: o.RunFolder,
    data: Annotated[str, typer.Option(help="Other data than the run's.")] = "",
    batch: Annotated[int | None, typer.Option(min=1, help="Images in a batch; default: as in the run.")] = None,
    device: o.Device = "",
    workers: o.Workers = None,
    corrupt: o.OnCorrupt = Corrupt.STOP,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Test the network of a run on the test set.

    \b
    Examples:
      dmcp evaluate runs/resnet18-photos-prune
      dmcp evaluate runs/resnet18-photos-prune --data ~/other-photos --device cpu --json
    """
    if not o.is_first():
        return
    _, plan = read_plan(run)
    _check_done(run, WIDTHS, plan)
    check_names(run, plan.job, "model", *([] if data else ["data"]))
    job = replace(
        plan.job, data=data or plan.job.data, batch=batch or plan.job.batch, train_batch=0, weights="", teacher=""
    )
    opened = open_job(replace(job, device=device, workers=workers, corrupt=corrupt, holdout=0.0))
    small = load(run, opened.fresh)
    kept = {run.name: opened.graph.widths(Widths.from_json(read_json(run / WIDTHS)))}
    example = next(iter(opened.loaders.test))[0]
    rows = compare_of_results({run.name: small}, opened.graph, kept, opened.loaders.test, example)
    replaced = opened.loaders.replaced
    tell_replaced(replaced)
    if as_json:
        print_json(
            result_facts(run, opened.graph, kept[run.name], replaced) | {"networks": [asdict(row) for row in rows]}
        )
    else:
        print(results_table(rows, opened.graph))


def _check_done(run: Path, name: str, plan: Plan) -> None:
    """Refuse a run that has not made this file yet, or never will."""
    if not (run / name).exists():
        makes = name != SEARCH or plan.command != "train"
        way = (
            f"go on with dmcp {plan.command} --resume {shlex.quote(str(run))}"
            if makes
            else "give a run of dmcp prune or search"
        )
        raise FileError(f"{run} has no {name}: {way}")


Budgets = Annotated[list[str] | None, typer.Option("--budget", help="50%, 211M, params:2M; repeatable. Default: 50%.")]
Methods = Annotated[str, typer.Option(help=f"all, or some of {', '.join(METHODS)}, package.module:NAME, with commas.")]
Given = Annotated[list[str] | None, typer.Option("--widths", help="A row of given widths, NAME=FILE; repeatable.")]
Peers = Annotated[list[str] | None, typer.Option("--peer", help="Another package, if installed: torch-pruning.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", help="Setting of a method, like amc.episodes=100; repeatable.")
]
SeedCount = Annotated[int, typer.Option(min=1, help="Seeds of everything, from --seed on.")]
TrainEpochs = Annotated[int, typer.Option(min=1, help="Passes over the data in the final training.")]
FineTune = Annotated[int | None, typer.Option(min=0, help="Epochs of fine-tuning; default: two thirds of --epochs.")]
TrainLr = Annotated[float, typer.Option(help="Highest learning rate of the final training at a batch of 2048.")]
Held = Annotated[float, typer.Option(help="Share of the training images that methods choose by.")]
Scratch = Annotated[bool, typer.Option(help="Train what each method chose from scratch, by the same recipe.")]
Unpruned = Annotated[bool, typer.Option(help="Also train the unpruned network.")]
AtOnce = Annotated[int | None, typer.Option(min=1, help="Cells that run side by side; default: 8 on a GPU, the cores.")]
Gather = Annotated[str, typer.Option(metavar="FOLDER", help="Run nothing: make the table of this folder again.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Run nothing: list the cells, their state and their epochs.")]
Measure = Annotated[bool, typer.Option("--measure", help="Measure all speeds again, not those of new cells only.")]


def compare(
    model: o.Model = "",
    data: o.Data = "",
    budget: Budgets = None,
    methods: Methods = "all",
    peer: Peers = None,
    widths: Given = None,
    seeds: SeedCount = 3,
    seed: o.Seed = 0,
    epochs: TrainEpochs = 60,
    fine_tune_epochs: FineTune = None,
    scratch: Scratch = True,
    unpruned: Unpruned = True,
    setting: Settings = None,
    batch: o.Batch = 128,
    lr: TrainLr = 0.8,
    weight_decay: o.WeightDecay = 1e-4,
    label_smoothing: o.LabelSmoothing = 0.1,
    holdout: Held = 0.1,
    groups: o.Groups = 10,
    align: o.Align = 1,
    min_channels: o.MinChannels = None,
    max_channels: o.MaxChannels = None,
    model_args: o.ModelArgs = None,
    ignore: o.Ignore = None,
    input: o.Input = "",
    out: o.Out = "",
    gather: Gather = "",
    dry_run: DryRun = False,
    measure: Measure = False,
    at_once: AtOnce = None,
    device: o.Device = "",
    precision: o.Numbers = None,
    compile: o.Compile = None,
    graphs: o.Graphs = None,
    kernels: o.Kernels = None,
    pad: o.Pad = None,
    deterministic: o.Deterministic = False,
    quiet: o.Quiet = False,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Compare pruning methods under one protocol: the same data, split, recipe and budgets, several seeds.

    Each method at each budget with each seed is a run folder; the same command started again goes on where it was.

    \b
    Examples:
      dmcp compare --model cifar:resnet20 --data cifar10 --budget 50% --budget 30% --methods all --seeds 3
      dmcp compare --model digits:resnet --data digits --methods uniform,l1,dmcp --epochs 10 --seeds 2
      dmcp compare --model digits:resnet --data digits --methods uniform,mymodule:mine --widths hand=widths.json
      dmcp compare --gather runs/table
    """
    if not o.is_first():
        return
    if gather:
        if model or data or dry_run or measure:
            raise DmcpError("--gather makes the table of a folder and nothing else: leave the other options out.")
        _gather(Path(gather), as_json)
        return
    for name, word in (("model", model), ("data", data)):
        if not word:
            raise DmcpError(f"--{name} is missing: dmcp compare --help says what it can be.")
    job = Job(
        model=model,
        model_args=tuple(model_args or ()),
        data=data,
        input=input,
        ignore=tuple(ignore or ()),
        batch=batch,
        device=device,
    )
    names, given = (*read_names(methods), *read_peers(peer or ())), read_given(widths or ())
    it = Comparison(
        job=job,
        engine=Engine(
            precision=precision, compile=compile, graphs=graphs, kernels=kernels, pad=pad, deterministic=deterministic
        ),
        train=recipe(epochs, lr, weight_decay, label_smoothing),
        budgets=tuple(budget or ["50%"]),
        methods=(*names, *given),
        seeds=tuple(range(seed, seed + seeds)),
        settings=read_settings(setting or (), names) | {name: {"widths": dict(kept)} for name, kept in given.items()},
        groups=groups,
        align=align,
        min_channels=o.read_bound("smallest", min_channels or ()),
        max_channels=o.read_bound("largest", max_channels or ()),
        holdout=holdout,
        scratch=scratch,
        fine_tune_epochs=max(1, 2 * epochs // 3) if fine_tune_epochs is None else fine_tune_epochs,
        unpruned=unpruned,
    )
    _check_settings(it)
    _check_trained(it)
    opened = open_job(replace(job, device="cpu"))
    check_job(it, opened)
    folder = Path(out or f"runs/{slug(f'compare {job.model} {Path(job.data).name}')}")  # the same one each time
    it = replace(it, only=fitting_budgets(it, given, opened))
    check_facts(it.job, folder, opened)
    tell_notices(opened)
    if dry_run:
        _list_methods(it, folder, as_json)
        return
    tell_ignored(it.engine, job.place)
    failed = run_comparison(it, folder, at_once, quiet)
    if found := stored(folder, it):
        _print(write_table(found, folder, opened, measure), folder, as_json)
    check_failed(failed)


def _gather(folder: Path, as_json: bool) -> None:
    """The table alone, of what is there."""
    found = stored(folder)
    if found is None:
        raise FileError(f"{folder}: no cells of a comparison are done here: give the folder that dmcp compare filled.")
    _print(write_table(found, folder), folder, as_json)


def _list_methods(it: Comparison, folder: Path, as_json: bool) -> None:
    """The cells, how far they are, and how long each trains; what would be refused is refused."""
    wanted, rows = tasks(it), list[dict[str, str]]()
    for task in wanted:
        search, training = epochs_of(task.plan)
        rows.append({"cell": task.name, "state": state_of(task, folder), "search": search, "training": training})
    if as_json:
        print_json({"folder": str(folder), "cells": rows})
    else:
        print(table([("cell", "state", "search epochs", "training epochs"), *(tuple(row.values()) for row in rows)]))
        print(f"{sum(row['state'] == 'done' for row in rows)} of {len(rows)} cells are done in {folder}.")
    check_begun(wanted, folder)


def cell(
    plan: Annotated[Path, typer.Argument(help="What the cell is to do.")],
    folder: Annotated[Path, typer.Argument(help="Its run folder.")],
    debug: o.Debug = False,
) -> None:
    """Fill one cell of a table; dmcp compare starts these."""
    wanted = plan_from_json(read_json(plan), plan)
    _check_begun(wanted, plan, folder)
    try:
        with following_parent(), session(wanted, folder, is_run(folder), quiet=True, told=True) as here:
            run_cell(here)
    except StoppedError as error:
        reason = str(error).partition(" Go on with: ")[0]  # which names a command that people do not type
        raise StoppedError(f"{reason} The command that started it goes on with it.") from None


def _check_begun(wanted: Plan, plan: Path, folder: Path) -> None:
    """Refuse a folder in which nothing is left to do, or in which something else was begun."""
    if is_done(folder):
        raise FileError(f"{folder}: this run is done; dmcp report {shlex.quote(str(folder))} shows it.")
    if (folder / SETTINGS).is_file() and plan_from_json(read_json(folder / SETTINGS), folder / SETTINGS) != wanted:
        raise FileError(f"{folder} was begun with another plan than {plan}: go on with that one, or remove the folder.")


def _check_settings(it: Comparison) -> None:
    """Refuse settings that would change nothing."""
    used = {*it.methods} | ({"dmcp"} if "dmcp-direct" in it.methods else set())
    for name in it.settings:
        if name not in used:
            raise DmcpError(f"--set: {name} is not among the methods that are compared: add it, or leave this out.")
    for name in BOUNDS:  # of two for one method one would be ignored
        if getattr(it, name) and name in it.settings.get("dmcp", {}).get("more", {}):
            raise DmcpError(f"--{name} is for all methods: leave {name!r} out of --set dmcp.more.")


def _check_trained(it: Comparison) -> None:
    """Refuse methods whose networks nobody would train."""
    ways = [Own.AS_IT_IS, Own.SLIMMABLE] + ([Own.FINE_TUNED] if it.fine_tune_epochs else [])
    left = [name for name in it.methods if find_method(name).own not in ways]
    if left and not it.scratch:
        raise DmcpError(f"--no-scratch: {', '.join(left)} would not be trained at all: leave out one or the other.")


def recipe(epochs: int, lr: float, weight_decay: float, label_smoothing: float) -> TrainConfig:
    """The final training: the paper's, as long and as fast as is said."""
    return TrainConfig(
        epochs=epochs,
        lr=lr,
        warmup_lr=lr / 4,
        warmup_epochs=min(1, epochs / 2),
        weight_decay=weight_decay,
        label_smoothing=label_smoothing,
    )


def check_job(it: Comparison, opened: Opened) -> None:
    """One sentence now, not one of each cell."""
    _ = it.job.place  # whether there is such a device
    check_given(opened)
    check_test_files(opened, it.job, skips=False)
    rest, _ = split(opened.data.train, it.holdout)
    make_loader(rest, it.job.batch, train=True)  # refuses a batch that is larger
    ends = ends_of(opened.model, opened.graph, it.groups, it.align, it.min_channels, it.max_channels)
    known: list[Budget] = []
    for text in it.budgets:
        budget = parse(text, opened.graph)
        check_reachable(budget, opened.graph, *ends)
        if same := [other.text for other in known if {*other.limits} == {*budget.limits}]:
            raise DmcpError(f"--budget: {text} is the same as {same[0]}: leave one of them out.")
        known.append(budget)


def _print(data: Mapping[str, Any], folder: Path, as_json: bool) -> None:
    if as_json:
        print_json({"folder": str(folder), **data})
    else:
        print(f"{(folder / PAGE).read_text()}\n{folder}")
