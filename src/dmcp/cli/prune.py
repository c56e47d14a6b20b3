"""The commands prune, search and train."""

from __future__ import annotations

import contextlib
import copy
import itertools
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from dmcp import models, pruning, sampling
from dmcp.batches import Loader, device_of, generator
from dmcp.budget import costs, limits_latency
from dmcp.calibration import recalibrate
from dmcp.cli import config as o
from dmcp.cli import launch as several
from dmcp.cli.config import Plan, make_plan, run_folder
from dmcp.cli.job import GIVEN, Corrupt, Job, Opened, Replaced, build, open_job, shape, trace_job
from dmcp.cli.launch import following_parent, has_parent
from dmcp.cli.session import (
    check_given,
    check_test_files,
    clock,
    describe_cost,
    describe_costs,
    obeying,
    plain_costs,
    print_json,
    result_facts,
    say,
    session,
    show_widths,
    tell_ignored,
    tell_notices,
    tell_other_size,
    tell_replaced,
    tell_slow,
    tell_troubles,
)
from dmcp.cutting import cut
from dmcp.data.datasets import FolderSet, finds_all
from dmcp.errors import BudgetError, DmcpError, FileError, StoppedError, WidthsError
from dmcp.latency.measure import attach_latency, choose_once, measure_latency
from dmcp.latency.table import LATENCY_FILE, Latency
from dmcp.pruning import Loaders, time_networks
from dmcp.report.figures import draw_all
from dmcp.results import DMCP, ORIGINAL, UNIFORM, UNPRUNED, Row, compare, markdown, results_table
from dmcp.retraining import Retraining, origin, train_all, trained_before, weigh_teacher, who_teaches
from dmcp.runs import REPORT, Run, read_json
from dmcp.runtime.io import staging_name
from dmcp.sampling import filled, uniform
from dmcp.searching.config import SearchRecord, extremes
from dmcp.searching.search import SEARCH, reach
from dmcp.searching.search import search as search_of_search
from dmcp.settings import LatencyConfig, Retrain, RuntimeKind, SearchConfig, TrainConfig
from dmcp.storage import save
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph
from dmcp.training import Runtime
from dmcp.training import train as train_of_training
from dmcp.widths import Widths

_STEPS = 4  # measured of each kind: the first one is slow, of the others the median counts


@dataclass(frozen=True)
class Stage:
    """One part of a run."""

    name: str
    steps: int
    seconds: float


def forecast(
    net: Supernet,
    loader: Loader,
    config: SearchConfig,
    how: Retraining,
    baselines: bool,
) -> list[Stage]:
    """The stages of a run. A copy of the supernet is trained for a few steps, and so are two cut networks."""
    graph = net.graph
    budget, path = reach(net, config)
    floor, ceiling = extremes(graph, path.sizes)
    same = uniform(graph, budget, floor, config.align, filled(config), ceiling)
    first_ones = list(itertools.islice(loader, _STEPS))
    batches = [first_ones[number % len(first_ones)] for number in range(_STEPS)]  # also where an epoch has only one
    per_epoch = -(-len(loader) // config.accumulate)
    warm, both = _search_steps(copy.deepcopy(net), batches, config)
    whole, pruned = (_train_step(cut(net.model, graph, widths), batches, how.config) for widths in (graph.full, same))
    asked = whole / 3  # what a teacher takes: a forward is a third of a step
    taught = how.teacher is not None and how.teacher != UNPRUNED
    ours = pruned + (whole if how.kind is Retrain.SLIMMABLE else 0.0 if how.teacher is None else asked)
    first, rest = per_epoch * config.warmup_epochs, per_epoch * (config.epochs - config.warmup_epochs)
    steps = len(loader) * how.config.epochs
    stages = [Stage("warm-up", first, first * warm), Stage("search", rest, rest * both)]
    if baselines or how.teacher == UNPRUNED:
        stages.append(Stage(UNPRUNED, steps, steps * (whole + asked if taught else whole)))
    if baselines:
        stages.append(Stage(UNIFORM, steps, steps * ours))
    return [*stages, Stage(DMCP, steps, steps * ours)]


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has used: on the GPU, or in all; 0 where nobody knows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def _search_steps(net: Supernet, batches: list[Any], config: SearchConfig) -> tuple[float, float]:
    """Seconds of a step in the warm-up and after it."""
    times: list[float] = []
    few = _Few(batches * config.accumulate)
    few_steps = replace(config, epochs=2, warmup=0.5, log_every=1)
    hear = lambda event: times.append(_now(net)) if isinstance(event.record, SearchRecord) else None  # noqa: E731
    search_of_search(net, few, few_steps, runtime=Runtime(on_event=hear))
    return _step(times[: len(times) // 2]), _step(times[len(times) // 2 :])


def _train_step(model: nn.Module, batches: list[Any], recipe: TrainConfig) -> float:
    times: list[float] = []
    few = replace(recipe, epochs=len(batches), warmup_epochs=0)  # records come at the end of an epoch
    train_of_training(model, _Few(batches[:1]), few, runtime=Runtime(on_event=lambda _: times.append(_now(model))))
    return _step(times)


def _step(ends: list[float]) -> float:
    """Seconds of a step, the median of those between these moments: none is from before the first, which is slow."""
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


def _now(model: nn.Module) -> float:
    if device_of(model).type == "cuda":
        torch.cuda.synchronize(device_of(model))
    return time.perf_counter()


class _Few(list[Any]):
    """A loader of some batches."""


_STOPPED = "Stopped while networks were measured, as asked: nothing is kept, the same command starts again."


def latency(
    model: o.Model = "",
    out: Annotated[str, typer.Option(help="File of the table, for dmcp prune --latency; default: only printed.")] = "",
    input: o.Input = "",
    classes: Annotated[
        int | None, typer.Option(min=1, help="Of the data that the network is pruned for; default: the builder's.")
    ] = None,
    model_args: o.ModelArgs = None,
    ignore: o.Ignore = None,
    batch: o.LatencyBatch = 1,
    device: o.Device = "",
    dtype: Annotated[str, typer.Option(help="Of weights and inputs: float32, bfloat16, float16.")] = "float32",
    align: o.Align = 1,
    networks: Annotated[int, typer.Option(help="Networks that are measured.")] = LatencyConfig.networks,
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
    job = Job(model=model, model_args=tuple(model_args or ()), ignore=tuple(ignore or ()), device=device, seed=seed)
    net = build(job, classes)
    sample = shape(input) if input else models.sample_shape(net)
    graph, net = trace_job(job, net, sample), net.to(job.place)
    example = torch.randn(1, *sample, generator=generator(0))
    how: dict[str, Any] = {"batch": batch, "dtype": dtype, "align": align, "networks": networks, "seed": seed}
    where = device if runtime == RuntimeKind.ONNX else ""  # otherwise that of the network
    config = LatencyConfig(**how, runtime=runtime, device=where)
    with obeying(_STOPPED):
        table = measure_latency(net, example, graph, config)
    if out:
        table.save(out)
    if as_json:
        print_json(table.to_json() | ({"file": out} if out else {}))
        return
    print(table.table)
    if out:
        print(f"\n{out}")


def _check_target(path: Path) -> None:
    """Refuse a file that cannot be written, before anything is measured."""
    if path.is_dir():
        raise FileError(f"--out: {path} is a folder: name the file in it, like {path / LATENCY_FILE}.")
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
    kept = folder / LATENCY_FILE if folder is not None and (folder / LATENCY_FILE).exists() else None
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
        say(f"Measuring the latency of {LatencyConfig.networks} networks first{', in onnxruntime' * in_onnx}.")
        with obeying(_STOPPED):
            table = _measured(job, search, opened)
        say(f"{table.summary} Measured {len(table.networks)} networks in {table.seconds:.0f} s.")
        return table

    return replace(opened, graph=attach_latency(graph, search.budget, measure, given))


def _read(path: Path, graph: ChannelGraph, option: str) -> Latency:
    """A table that is of this network."""
    table = Latency.load(path)
    try:
        table.attach(graph)
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
    device = job.latency_device or (str(job.place) if job.latency_runtime == RuntimeKind.TORCH else "")
    with _about_options():
        config = LatencyConfig(batch=job.latency_batch, device=device, runtime=job.latency_runtime)
        return time_networks(opened.model, example, opened.graph, search, config)


@contextlib.contextmanager
def _about_options() -> Iterator[None]:
    """Name the options in what cannot be measured."""
    try:
        yield
    except (BudgetError, StoppedError, WidthsError):
        raise
    except DmcpError as error:
        raise DmcpError(f"--latency-device, --latency-batch, --latency-runtime: {error}") from error


def search(
    ctx: typer.Context,
    model: o.Model = "",
    data: o.Data = "",
    budget: o.Budget = "50%",
    latency: o.LatencyTable = "",
    latency_batch: o.LatencyBatch = 1,
    latency_device: o.LatencyDevice = "",
    latency_runtime: o.LatencyRuntime = RuntimeKind.TORCH,
    out: o.Out = "",
    search_epochs: o.SearchEpochs = 40,
    warmup: o.Warmup = None,
    batch: o.Batch = 128,
    search_lr: o.SearchLr = 0.2,
    weight_decay: o.WeightDecay = 1e-4,
    label_smoothing: o.LabelSmoothing = 0.1,
    groups: o.Groups = 10,
    align: o.Align = 1,
    min_channels: o.MinChannels = None,
    max_channels: o.MaxChannels = None,
    seed: o.Seed = 0,
    weights: o.Weights = "",
    input: o.Input = "",
    model_args: o.ModelArgs = None,
    ignore: o.Ignore = None,
    holdout: o.Holdout = 0.0,
    recipe: o.RecipeName = "",
    device: o.Device = "",
    workers: o.Workers = None,
    corrupt: o.OnCorrupt = Corrupt.STOP,
    precision: o.Numbers = None,
    compile: o.Compile = None,
    graphs: o.Graphs = None,
    kernels: o.Kernels = None,
    channels_last: o.ChannelsLast = None,
    tf32: o.Tf32 = True,
    deterministic: o.Deterministic = False,
    sync_batchnorm: o.SyncBatchnorm = False,
    save_steps: o.SaveSteps = 1000,
    save_minutes: o.SaveMinutes = 5.0,
    track: o.Track = None,
    resume: o.Resume = "",
    quiet: o.Quiet = False,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Search only: the run keeps the alphas, the expected widths, and the network cut with the searched weights.

    \b
    Examples:
      dmcp search --model cifar:resnet20 --data cifar10 --budget 50%
      dmcp search --model resnet50 --data ~/photos --weights resnet50.pth --budget 2G --holdout 0.1
      dmcp search --resume runs/cifar-resnet20-cifar10-search
    """
    plan = make_plan(ctx, "search", locals())
    assert plan.search is not None
    with session(
        plan, run_folder(plan, out, resume), bool(resume), quiet, lambda it: check_reachable(plan, it, resume)
    ) as here:
        opened = here.opened
        net = Supernet(opened.model, opened.graph, plan.search.groups, plan.search.align)
        loaders, own = opened.loaders, here.runtime.stage(SEARCH)
        found = search_of_search(net, loaders.train, plan.search, arch_loader=loaders.arch, runtime=own)
        widths, outcome = sampling.expected(found), None
        if limits_latency(found.budget):
            sample = torch.zeros(1, *opened.data.shape, device=device_of(net.model))
            _, widths, outcome = choose_once(found, net.model, sample, folder=here.checkpointer.stage(SEARCH).folder)
        small = cut(net.model, opened.graph, widths)
        recalibrate(small, loaders.train)
        pruning.check_budget(small, widths, found)
        replaced = here.replaced()
        if not here.world.first:
            return
        save(small, widths, here.run.folder)
        here.run.write_outcome(outcome)
        draw_all(found, widths, here.run.folder, seed=plan.search.seed)
        here.run.close()
    tell_replaced(replaced)
    if as_json:
        told = {} if outcome is None else {"latency": asdict(outcome)}
        print_json(result_facts(here.run.folder, opened.graph, widths, replaced) | told)
        return
    show_widths(opened.graph, widths)
    if outcome is not None:
        print(f"\n{outcome.text}")
    print(f"\n{here.run.folder}")


def check_reachable(plan: Plan, opened: Opened, resume: str = "") -> Opened:
    """Refuse a budget that cannot be reached before anything is written; for one of latency, measure first."""
    assert plan.search is not None
    opened = with_latency(plan, opened, Path(resume) if resume else None)
    net = Supernet(opened.model, opened.graph, plan.search.groups, plan.search.align)
    reach(net, plan.search)
    return opened


def train(
    ctx: typer.Context,
    model: o.Model = "",
    data: o.Data = "",
    widths: Annotated[str, typer.Option(help="File of widths, of a run or of dmcp sample; default: unpruned.")] = "",
    out: o.Out = "",
    epochs: o.Epochs = None,
    batch: o.Batch = 128,
    lr: o.Lr = None,
    weight_decay: o.WeightDecay = 1e-4,
    label_smoothing: o.LabelSmoothing = 0.1,
    seed: o.Seed = 0,
    retrain: o.RetrainKind = None,
    teacher: o.Teacher = "",
    teacher_model: o.TeacherModel = "",
    teacher_model_args: o.TeacherModelArgs = None,
    kd_weight: o.KdWeight = None,
    kd_temperature: o.KdTemperature = None,
    weights: o.Weights = "",
    input: o.Input = "",
    model_args: o.ModelArgs = None,
    ignore: o.Ignore = None,
    device: o.Device = "",
    workers: o.Workers = None,
    corrupt: o.OnCorrupt = Corrupt.STOP,
    precision: o.Numbers = None,
    compile: o.Compile = None,
    graphs: o.Graphs = None,
    kernels: o.Kernels = None,
    pad: o.Pad = None,
    channels_last: o.ChannelsLast = None,
    tf32: o.Tf32 = True,
    deterministic: o.Deterministic = False,
    sync_batchnorm: o.SyncBatchnorm = False,
    save_steps: o.SaveSteps = 1000,
    save_minutes: o.SaveMinutes = 5.0,
    track: o.Track = None,
    resume: o.Resume = "",
    quiet: o.Quiet = False,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Train a network with given widths, or unpruned, and test it.

    \b
    Examples:
      dmcp train --model resnet18 --data ~/photos --widths runs/my-search/widths.json
      dmcp train --model cifar:resnet20 --data cifar10 --epochs 160 --json
    """
    plan = make_plan(ctx, "train", locals())
    assert plan.train is not None
    with session(plan, run_folder(plan, out, resume), bool(resume), quiet, lambda it: _check_widths(plan, it)) as here:
        opened, graph = here.opened, here.opened.graph
        kept = _read_widths(plan, opened)
        if plan.widths and not plan.job.input and here.world.first:
            tell_other_size(Path(plan.widths), opened)
        start = opened.model if plan.retrain is Retrain.FINETUNE else opened.fresh
        wanted = {DMCP if plan.widths else UNPRUNED: kept}
        guide = opened.teacher
        original = not opened.new_head and (plan.retrain is Retrain.FINETUNE or guide is opened.model)
        before = trained_before(opened.model, original, guide, guide)
        worth = None
        if guide is not None:
            rival = None if guide is opened.model else before.get(ORIGINAL)
            worth = weigh_teacher(guide, rival, opened.data.classes, opened.loaders.test)
        how = Retraining(plan.train, plan.retrain, _teacher(plan, opened))
        trained = train_all(start, graph, wanted, opened.loaders.retrain, how, runtime=here.runtime)
        example = next(iter(opened.loaders.retrain))[0]
        rows = compare(before | trained, graph, wanted, opened.loaders.test, example, runtime=here.runtime)
        replaced = here.replaced()
        if not here.world.first:
            return
        save(trained[next(iter(wanted))], kept, here.run.folder)
        troubles = here.run.divergences(wanted)
        listed = (f"- **{trouble}**" for trouble in (*troubles, *here.describe_replaced(replaced)))
        taught = _taught(plan, opened, worth)
        here.run.write(REPORT, "\n".join([f"# {plan.job.model}", "", *markdown(rows, graph, taught), *listed, ""]))
        here.run.close()
    tell_replaced(replaced)
    tell_troubles(troubles)
    if as_json:
        print_json(result_facts(here.run.folder, graph, kept, replaced) | {"networks": [asdict(row) for row in rows]})
        return
    print(f"{results_table(rows, graph, taught)}\n\n{here.run.folder}")


def _teacher(plan: Plan, opened: Opened) -> nn.Module | str | None:
    return opened.teacher or (UNPRUNED if plan.job.teacher == UNPRUNED else None)


def _taught(plan: Plan, opened: Opened, worth: Row | None) -> str:
    """Whom the network of `train` has learnt from, in words; empty if from nobody, as the unpruned one alone."""
    assert plan.train is not None
    who = who_teaches(_teacher(plan, opened), opened.model, worth)
    if not who or not (opened.teacher or plan.widths):
        return ""
    how = (plan.train.kd_weight, plan.train.kd_temperature)
    return origin(plan.retrain, who, *how, DMCP if plan.widths else UNPRUNED, "the given weights")


def _read_widths(plan: Plan, opened: Opened) -> Widths:
    """The widths to train, checked against the network; all of it where no file was given."""
    if not plan.widths:
        return opened.graph.full
    try:
        return opened.graph.widths(Widths.from_json(read_json(Path(plan.widths))))
    except WidthsError as error:
        raise WidthsError(f"--widths {plan.widths}: {error}") from None


def _check_widths(plan: Plan, opened: Opened) -> Opened:
    """Refuse widths of another network before anything is written."""
    _read_widths(plan, opened)
    return opened


def prune(
    ctx: typer.Context,
    model: o.Model = "",
    data: o.Data = "",
    budget: o.Budget = "50%",
    latency: o.LatencyTable = "",
    latency_batch: o.LatencyBatch = 1,
    latency_device: o.LatencyDevice = "",
    latency_runtime: o.LatencyRuntime = RuntimeKind.TORCH,
    out: o.Out = "",
    epochs: o.Epochs = None,
    search_epochs: o.SearchEpochs = 40,
    warmup: o.Warmup = None,
    batch: o.Batch = 128,
    train_batch: o.TrainBatch = 0,
    lr: o.Lr = None,
    search_lr: o.SearchLr = 0.2,
    weight_decay: o.WeightDecay = 1e-4,
    label_smoothing: o.LabelSmoothing = 0.1,
    groups: o.Groups = 10,
    align: o.Align = 1,
    min_channels: o.MinChannels = None,
    max_channels: o.MaxChannels = None,
    seed: o.Seed = 0,
    seeds: o.Seeds = 1,
    retrain: o.RetrainKind = None,
    teacher: o.Teacher = "",
    teacher_model: o.TeacherModel = "",
    teacher_model_args: o.TeacherModelArgs = None,
    kd_weight: o.KdWeight = None,
    kd_temperature: o.KdTemperature = None,
    baselines: o.Baselines = False,
    weights: o.Weights = "",
    input: o.Input = "",
    model_args: o.ModelArgs = None,
    ignore: o.Ignore = None,
    holdout: o.Holdout = 0.0,
    recipe: o.RecipeName = "",
    device: o.Device = "",
    workers: o.Workers = None,
    corrupt: o.OnCorrupt = Corrupt.STOP,
    precision: o.Numbers = None,
    compile: o.Compile = None,
    graphs: o.Graphs = None,
    kernels: o.Kernels = None,
    pad: o.Pad = None,
    channels_last: o.ChannelsLast = None,
    tf32: o.Tf32 = True,
    deterministic: o.Deterministic = False,
    sync_batchnorm: o.SyncBatchnorm = False,
    save_steps: o.SaveSteps = 1000,
    save_minutes: o.SaveMinutes = 5.0,
    track: o.Track = None,
    resume: o.Resume = "",
    dry_run: o.DryRun = False,
    quiet: o.Quiet = False,
    as_json: o.AsJson = False,
    debug: o.Debug = False,
) -> None:
    """Search the widths of a network inside a budget, cut it, train it, test it.

    \b
    Examples:
      dmcp prune --model resnet18 --data ~/photos --budget 50% --dry-run
      dmcp prune --model digits:resnet --data digits --budget params:50% --baselines
      dmcp prune --model resnet18 --data ~/photos --budget 8ms --latency-device cpu
      dmcp prune --model cifar:resnet20 --data cifar10 --seeds 3 --json
      dmcp prune --model resnet50 --data ~/photos --weights mine.pth --teacher given
      dmcp prune --model resnet18 --data ~/photos --align 8 --min-channels 16 --min-channels layer1=32 --ignore conv1
      dmcp prune --resume runs/resnet18-photos-prune
      torchrun --nproc-per-node 8 -m dmcp prune --recipe imagenet_resnet50_1100m --data ~/imagenet
    """
    plan = make_plan(ctx, "prune", locals())
    assert plan.search is not None and plan.train is not None
    if dry_run:
        if o.is_first():
            _forecast(plan, as_json)
        return
    if seeds > 1:
        if resume:
            raise DmcpError(
                "--seeds with --resume: to go on with several seeds, give the command that began them again."
            )
        if o.is_launched():
            raise DmcpError("--seeds starts a process for each seed by itself: leave torchrun out.")
        _prune_seeds(plan, seeds, out, quiet, as_json)
        return
    folder, told = run_folder(plan, out, resume), has_parent()  # which says of all seeds what each would say
    with (
        following_parent(),
        session(plan, folder, bool(resume), quiet, lambda it: check_reachable(plan, it, resume), told) as here,
    ):
        opened = here.opened
        rows = (UNPRUNED, UNIFORM) if plan.baselines else ()
        result = pruning.prune(
            opened.model,
            Loaders(search=opened.loaders.train, arch=opened.loaders.arch, train=opened.loaders.retrain),
            opened.loaders.test,
            search=plan.search,
            train=plan.train,
            retrain=plan.retrain,
            baselines=rows if opened.new_head else plan.baselines,  # an untrained head is not tested
            graph=opened.graph,
            fresh=opened.fresh,
            teacher=_teacher(plan, opened),
            runtime=here.runtime,
        )
        replaced = here.replaced()
        if not here.world.first:
            return
        troubles = here.run.finish(result, plan.search.seed, here.describe_replaced(replaced))
    if not told:
        tell_replaced(replaced)
    tell_troubles(troubles)
    tell_slow(opened.model, result, opened.data.shape)
    if as_json:
        facts: dict[str, Any] = {
            "search_steps": len(result.search.log),
            "expected_shares": pruning.expected_shares(result.search),
        }
        facts |= {} if result.latency is None else {"latency": asdict(result.latency)}
        networks = [asdict(row) for row in result.rows]
        print_json(
            result_facts(here.run.folder, result.graph, result.widths, replaced) | facts | {"networks": networks}
        )
        return
    listed = " and ".join(f"{share:.1%}" for share in pruning.expected_shares(result.search))
    print(f"{len(result.search.log)} search steps; expected cost at their end, before repair: {listed} of the budget")
    print(f"cut to {describe_costs(result.graph, result.widths)}\n\n{result.table}\n\n{here.run.folder}")


def _prune_seeds(plan: Plan, count: int, out: str, quiet: bool, as_json: bool) -> None:
    """The same command for several seeds, side by side; their mean and spread."""
    opened = open_job(replace(plan.job, device="cpu"))  # one sentence now, not one of each seed
    check_given(opened)
    check_test_files(opened, plan.job)
    folder = run_folder(replace(plan, command="seeds"), out, "")
    first, argv = plan.job.seed, several.words_of_each(sys.argv[1:])
    assert plan.search is not None
    shared = limits_latency(plan.search.budget) and not plan.job.latency  # measured once: side by side they are slow
    argv += ["--latency", str(folder / LATENCY_FILE)] if shared else []
    several.refuse_others(folder, argv)
    opened = check_reachable(plan, opened, str(folder))
    tell_notices(opened)
    tell_ignored(plan.engine, plan.job.place)
    if shared and (table := Latency.of(opened.graph)) is not None:
        table.save(folder / LATENCY_FILE)
    runs = several.run_seeds(argv, range(first, first + count), folder, plan.job.place, quiet)
    summary = several.summarise(runs)
    found = ({path for run in runs for path in Run(run).replaced(part)} for part in Replaced._fields)
    replaced = Replaced(*map(frozenset, found))
    tell_replaced(replaced)
    if as_json:
        print_json({"folder": str(folder)} | asdict(summary) | {"replaced": replaced.counts})
    else:
        print(f"{several.markdown(summary)}\n\n{folder}")


def _forecast(plan: Plan, as_json: bool) -> None:
    """What a run would be like, from a few steps on copies."""
    assert plan.search is not None and plan.train is not None
    opened = open_job(plan.job)
    check_given(opened)
    check_test_files(opened, plan.job)
    opened = check_reachable(plan, opened)
    tell_notices(opened)
    tell_ignored(plan.engine, plan.job.place)
    graph, net = opened.graph, Supernet(opened.model, opened.graph, plan.search.groups, plan.search.align)
    budget, path = reach(net, plan.search)
    limits, (floor, ceiling) = budget.limits, extremes(graph, path.sizes)
    how = Retraining(plan.train, plan.retrain, _teacher(plan, opened))
    stages = forecast(net, opened.loaders.train, plan.search, how, plan.baselines)
    steps, seconds = sum(stage.steps for stage in stages), sum(stage.seconds for stage in stages)
    device, memory = net.alpha.device.type, peak_bytes(net.alpha.device)
    if as_json:
        range_ = {"least": plain_costs(costs(graph, floor)), "most": plain_costs(costs(graph, ceiling))}
        asked = plain_costs({limit.kind: limit.target for limit in limits})
        facts = {"reachable": range_, "asked": asked, "device": device}
        done = {"stages": [asdict(stage) for stage in stages], "steps": steps, "seconds": seconds}
        print_json(facts | done | {"peak_bytes": memory})
        return
    print(f"{graph.summary()}\n")
    print(f"reachable: from {describe_costs(graph, floor)}\n           to   {describe_costs(graph, ceiling)}")
    print(f"asked for: at most {', '.join(describe_cost(limit.kind, limit.target) for limit in limits)}\n")
    for stage in stages:
        print(f"{stage.name:<16}{stage.steps:>8} steps  {clock(stage.seconds):>12}")
    print(f"{'in all':<16}{steps:>8} steps  {clock(seconds):>12}, {memory / 2**30:.1f} GiB on {device}")
    if who := who_teaches(_teacher(plan, opened), opened.model):
        name = plan.job.teacher if opened.teacher is not None and plan.job.teacher != GIVEN else who
        took = ", as if it were the unpruned network" if plan.job.teacher_model else ""
        print(f"\nteacher: {name}; what it takes to ask it is in these times{took}")
    if isinstance(opened.data.train, FolderSet):
        print(f"\nFew files were decoded.{finds_all(opened.data.train.root)}")
    print("\nNothing was trained or written.")
