"""The command search: the alphas and the widths that they expect, and no training after it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch
import typer

from dmcp import pruning, sampling
from dmcp.batches import device_of
from dmcp.budget import limits_latency
from dmcp.calibration import recalibrate
from dmcp.commands import options as o
from dmcp.commands.asked_plan import make_plan, run_folder
from dmcp.commands.latency import with_latency
from dmcp.commands.printing import print_json, result_facts, show_widths, tell_replaced
from dmcp.cutting import cut
from dmcp.figures import draw_all
from dmcp.latency import RuntimeKind
from dmcp.running.jobs import Corrupt, Opened
from dmcp.running.plans import Plan
from dmcp.running.sessions import session
from dmcp.saving import save
from dmcp.searching.search import reach
from dmcp.supernet import Supernet
from dmcp.timing.choice import settle


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
    smallest: o.Smallest = None,
    largest: o.Largest = None,
    seed: o.Seed = 0,
    weights: o.Weights = "",
    input: o.Input = "",
    model_args: o.ModelArgs = None,
    frozen: o.Frozen = None,
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
        loaders, report = opened.loaders, here.on_event
        found = pruning.find(
            net, loaders.train, plan.search, None, loaders.arch, report, plan.engine, here.keep(pruning.SEARCH)
        )
        widths, outcome = sampling.expected(found), None
        if limits_latency(found.budget):
            sample = torch.zeros(1, *opened.data.shape, device=device_of(net.model))
            _, widths, outcome = settle(found, net.model, sample, folder=here.keep(pruning.SEARCH).folder)
        small = cut(net.model, opened.graph, widths)
        recalibrate(small, loaders.train)
        pruning.check_budget(small, widths, found)
        replaced = here.replaced()
        if not here.ranks.first:
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
