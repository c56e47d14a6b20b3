"""The commands that need data: prune, search, sample, train, evaluate. Each is a thin function over the public ones."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dmcp import options as o
from dmcp import pruning, sampling
from dmcp import seeds as several
from dmcp.batches import generator
from dmcp.budget import check_reachable, costs, parse
from dmcp.calibration import recalibrate
from dmcp.cutting import WIDTHS, cut, load, save
from dmcp.engine import Engine
from dmcp.errors import DmcpError
from dmcp.figures import draw_all
from dmcp.forecast import forecast, peak_bytes
from dmcp.graph import ChannelGraph
from dmcp.jobs import Job, Opened, build, open_job, trace_job
from dmcp.plans import Plan, plan_from_json
from dmcp.progress import clock
from dmcp.pruning import OURS, UNPRUNED, Retrain, default_recipe
from dmcp.recipes import Recipe
from dmcp.recipes import find as find_recipe
from dmcp.runs import REPORT, SETTINGS, Run, free_folder, load_search, markdown, read_json
from dmcp.searching import SearchConfig
from dmcp.sessions import session
from dmcp.spaces import Widths
from dmcp.supernet import Supernet
from dmcp.training import TrainConfig


def prune(
    ctx: typer.Context,
    model: o.Model = "",
    data: o.Data = "",
    budget: o.Budget = "50%",
    out: o.Out = "",
    epochs: o.Epochs = None,
    search_epochs: o.SearchEpochs = 40,
    warmup: o.Warmup = None,
    batch: o.Batch = 128,
    train_batch: o.TrainBatch = 0,
    lr: o.Lr = None,
    search_lr: o.SearchLr = 0.2,
    weight_decay: o.WeightDecay = 1e-4,
    groups: o.Groups = 10,
    align: o.Align = 1,
    seed: o.Seed = 0,
    seeds: o.Seeds = 1,
    retrain: o.RetrainKind = Retrain.SCRATCH,
    controls: o.Controls = False,
    weights: o.Weights = "",
    input: o.Input = "",
    model_args: o.ModelArgs = None,
    frozen: o.Frozen = None,
    holdout: o.Holdout = 0.0,
    recipe: o.RecipeName = "",
    device: o.Device = "",
    precision: o.Numbers = None,
    compile: o.Compile = None,
    graphs: o.Graphs = None,
    channels_last: o.ChannelsLast = None,
    tf32: o.Tf32 = True,
    deterministic: o.Deterministic = False,
    sync_batchnorm: o.SyncBatchnorm = False,
    save_steps: o.SaveSteps = 1000,
    save_minutes: o.SaveMinutes = 5.0,
    resume: o.Resume = "",
    dry_run: o.DryRun = False,
    quiet: o.Quiet = False,
) -> None:
    """Search the widths of a network inside a budget, cut it, train it, test it.

    Examples: dmcp prune --model resnet18 --data ~/photos --budget 50%
    or, after an interruption: dmcp prune --resume runs/resnet18-photos-prune
    """
    plan = o.make_plan(ctx, "prune", locals())
    assert plan.search is not None and plan.train is not None
    if dry_run:
        opened = open_job(plan.job)
        _check_budget(plan, opened)
        _show_forecast(opened, plan.search, plan.train, plan.retrain, plan.controls)
        return
    if seeds > 1:
        _prune_seeds(plan, seeds, out)
        return
    with session(plan, _folder(plan, out, resume), bool(resume), quiet, lambda it: _check_budget(plan, it)) as here:
        opened = here.opened
        result = pruning.prune(
            opened.model,
            opened.loaders.train,
            opened.loaders.test,
            search=plan.search,
            train=plan.train,
            retrain=plan.retrain,
            controls=plan.controls,
            graph=opened.graph,
            fresh=opened.fresh,
            arch_loader=opened.loaders.arch,
            train_loader=opened.loaders.retrain,
            on_event=here.on_event,
            engine=plan.engine,
            keep=here.keep,
        )
        if not here.ranks.first:
            return
        here.run.finish(result, plan.search.seed)
    listed = " and ".join(f"{share:.1%}" for share in pruning.expected_shares(result.search))
    print(f"{len(result.search.log)} search steps; expected cost at their end, before repair: {listed} of the budget")
    print(f"cut to {_spent(result.graph, result.widths)}\n\n{result.table}\n\n{here.run.folder}")


def search(
    ctx: typer.Context,
    model: o.Model = "",
    data: o.Data = "",
    budget: o.Budget = "50%",
    out: o.Out = "",
    search_epochs: o.SearchEpochs = 40,
    warmup: o.Warmup = None,
    batch: o.Batch = 128,
    search_lr: o.SearchLr = 0.2,
    weight_decay: o.WeightDecay = 1e-4,
    groups: o.Groups = 10,
    align: o.Align = 1,
    seed: o.Seed = 0,
    weights: o.Weights = "",
    input: o.Input = "",
    model_args: o.ModelArgs = None,
    frozen: o.Frozen = None,
    holdout: o.Holdout = 0.0,
    recipe: o.RecipeName = "",
    device: o.Device = "",
    precision: o.Numbers = None,
    compile: o.Compile = None,
    graphs: o.Graphs = None,
    channels_last: o.ChannelsLast = None,
    tf32: o.Tf32 = True,
    deterministic: o.Deterministic = False,
    sync_batchnorm: o.SyncBatchnorm = False,
    save_steps: o.SaveSteps = 1000,
    save_minutes: o.SaveMinutes = 5.0,
    resume: o.Resume = "",
    quiet: o.Quiet = False,
) -> None:
    """Search only: the run keeps the alphas, the expected widths, and the network cut with the searched weights.

    Example: dmcp search --model cifar:resnet20 --data cifar10 --budget 50%
    """
    plan = o.make_plan(ctx, "search", locals())
    assert plan.search is not None
    with session(plan, _folder(plan, out, resume), bool(resume), quiet, lambda it: _check_budget(plan, it)) as here:
        opened = here.opened
        net = Supernet(opened.model, opened.graph, plan.search.groups, plan.search.align)
        loaders, report = opened.loaders, here.on_event
        found = pruning.find(
            net, loaders.train, plan.search, None, loaders.arch, report, plan.engine, here.keep(pruning.SEARCH)
        )
        widths = sampling.expected(found)
        small = cut(net.model, opened.graph, widths)
        recalibrate(small, loaders.train)
        pruning.check_budget(small, widths, found)
        if not here.ranks.first:
            return
        save(small, widths, here.run.folder)
        draw_all(found, widths, here.run.folder, seed=plan.search.seed)
        here.run.close()
    _show_widths(opened.graph, widths)
    print(f"\n{here.run.folder}")


def sample(
    run: o.RunFolder,
    direct: Annotated[int, typer.Option(help="So many different structures drawn from the chains; 0: expected.")] = 0,
    seed: o.Seed = 0,
) -> None:
    """Structures of a search, inside its budget: the expected one, or drawn ones (each as a file for dmcp train).

    Example: dmcp sample runs/cifar-resnet20-cifar10-search --direct 5
    """
    settings, plan = o.read_plan(run)
    graph = trace_job(plan.job, build(plan.job, settings["classes"]), tuple(settings["shape"]))
    found = load_search(run, graph)
    drawn = sampling.direct(found, direct, generator(seed)) if direct else [sampling.expected(found)]
    for number, widths in enumerate(drawn, start=1):
        name = f"direct-{number}.json" if direct else "expected.json"
        Run(run).write(name, widths.to_json())
        print(f"{run / name}: {_spent(graph, widths)}: {' '.join(map(str, widths.values()))}")


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
    seed: o.Seed = 0,
    retrain: o.RetrainKind = Retrain.SCRATCH,
    weights: o.Weights = "",
    input: o.Input = "",
    model_args: o.ModelArgs = None,
    frozen: o.Frozen = None,
    device: o.Device = "",
    precision: o.Numbers = None,
    compile: o.Compile = None,
    graphs: o.Graphs = None,
    channels_last: o.ChannelsLast = None,
    tf32: o.Tf32 = True,
    deterministic: o.Deterministic = False,
    sync_batchnorm: o.SyncBatchnorm = False,
    save_steps: o.SaveSteps = 1000,
    save_minutes: o.SaveMinutes = 5.0,
    resume: o.Resume = "",
    quiet: o.Quiet = False,
) -> None:
    """Train a network with given widths, or unpruned, and test it.

    Example: dmcp train --model resnet18 --data ~/photos --widths runs/my-search/widths.json
    """
    plan = o.make_plan(ctx, "train", locals())
    assert plan.train is not None
    with session(plan, _folder(plan, out, resume), bool(resume), quiet) as here:
        opened, graph = here.opened, here.opened.graph
        kept = graph.widths(Widths.from_json(read_json(Path(plan.widths)))) if plan.widths else graph.full
        start = opened.model if plan.retrain is Retrain.INHERIT else opened.fresh
        wanted = {OURS if plan.widths else UNPRUNED: kept}
        settings, way = (plan.train, plan.retrain, None), (here.on_event, plan.engine, here.keep)
        trained = pruning.train_all(start, graph, wanted, opened.loaders.retrain, *settings, *way)
        example = next(iter(opened.loaders.retrain))[0]
        rows = pruning.compare(trained, graph, wanted, opened.loaders.test, example, on_event=here.on_event)
        if not here.ranks.first:
            return
        save(trained[next(iter(wanted))], kept, here.run.folder)
        here.run.write(REPORT, "\n".join([f"# {plan.job.model}", "", *markdown(rows), ""]))
        here.run.close()
    print(f"{pruning.table(rows)}\n\n{here.run.folder}")


def evaluate(
    run: o.RunFolder,
    data: Annotated[str, typer.Option(help="Other data than the run's.")] = "",
    device: o.Device = "",
) -> None:
    """Test the network of a run on the test set.

    Example: dmcp evaluate runs/resnet18-photos-prune
    """
    _, plan = o.read_plan(run)
    job = replace(plan.job, data=data or plan.job.data, device=device, weights="")
    opened = open_job(job)
    small = load(run, opened.fresh)
    kept = {run.name: opened.graph.widths(Widths.from_json(read_json(run / WIDTHS)))}
    example = next(iter(opened.loaders.test))[0]
    print(pruning.table(pruning.compare({run.name: small}, opened.graph, kept, opened.loaders.test, example)))


def _folder(plan: Plan, out: str, resume: str) -> Path:
    name = re.sub(r"\W+", "-", f"{plan.job.model} {Path(plan.job.data).name} {plan.command}").strip("-")
    return Path(resume or out or free_folder(name))


def _prune_seeds(plan: Plan, count: int, out: str) -> None:
    """The same command for several seeds, side by side; their mean and spread."""
    words = iter(sys.argv[1:])
    argv = [word for word in words if not _drops(word, words)]
    folder = _folder(replace(plan, command="seeds"), out, "")
    first = plan.job.seed
    runs = several.run_seeds(argv, range(first, first + count), folder, plan.job.place)
    print(f"{several.markdown(several.summarise(runs))}\n\n{folder}")


def _drops(word: str, rest: Any) -> bool:
    """Whether a word of the command line is for all seeds together, not for one; its value goes with it."""
    name, equals, _ = word.partition("=")
    if name not in ("--seeds", "--seed", "--out"):
        return False
    if not equals:
        next(rest, None)
    return True


def _check_budget(plan: Plan, opened: Opened) -> None:
    """Refuse a budget that cannot be reached before anything is written."""
    assert plan.search is not None
    net = Supernet(opened.model, opened.graph, plan.search.groups, plan.search.align)
    check_reachable(parse(plan.search.budget, opened.graph), opened.graph, net.floor)


# what is printed


def _spent(graph: ChannelGraph, widths: Widths) -> str:
    """121,000 MACs (49.9%), 41,000 params (53.8%)"""
    spent, full = costs(graph, widths), costs(graph, graph.full)
    parts = (f"{spent[kind]:,} {word} ({spent[kind] / full[kind]:.1%})" for kind, word in _WORDS.items())
    return ", ".join(parts)


_WORDS = {"macs": "MACs", "params": "params"}


def _show_widths(graph: ChannelGraph, widths: Widths) -> None:
    print(_spent(graph, widths))
    longest = max(len(space.name) for space in graph.spaces)
    for space in graph.spaces:
        print(f"{space.name:<{longest}}  {widths[space.name]:>5} of {space.size}")


def _show_forecast(opened: Opened, config: SearchConfig, recipe: TrainConfig, kind: Retrain, controls: bool) -> None:
    net = Supernet(opened.model, opened.graph, config.groups, config.align)
    graph, device = opened.graph, net.alpha.device
    print(f"{graph.summary()}\n")
    print(f"reachable: from {_spent(graph, net.floor)}\n           to   {_spent(graph, graph.full)}")
    asked = ", ".join(f"{limit.target:,} {_WORDS[limit.kind]}" for limit in parse(config.budget, graph).limits)
    print(f"asked for: at most {asked}\n")
    stages = forecast(net, opened.loaders.train, config, recipe, kind, controls)
    for stage in stages:
        print(f"{stage.name:<16}{stage.steps:>8} steps  {clock(stage.seconds):>12}")
    memory = f"{peak_bytes(device) / 2**30:.1f} GiB on {torch.device(device).type}"
    print(
        f"{'in all':<16}{sum(stage.steps for stage in stages):>8} steps  "
        f"{clock(sum(stage.seconds for stage in stages)):>12}, {memory}"
    )
    print("\nNothing was trained or written.")
