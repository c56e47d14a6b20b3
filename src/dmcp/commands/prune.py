"""The command prune: search, cut, train and test, for one seed or several, or only a forecast of it."""

from __future__ import annotations

import sys
from dataclasses import asdict, replace
from typing import Any

import typer

from dmcp import pruning
from dmcp.budget import costs, limits_latency
from dmcp.commands import options as o
from dmcp.commands.asked_plan import make_plan, run_folder
from dmcp.commands.printing import (
    describe_cost,
    describe_costs,
    plain_costs,
    print_json,
    result_facts,
    tell_replaced,
    tell_slow,
    tell_troubles,
)
from dmcp.commands.search import check_reachable
from dmcp.errors import DmcpError
from dmcp.folders import FolderSet
from dmcp.image_files import finds_all
from dmcp.latency import FILE as LATENCY
from dmcp.latency import RuntimeKind
from dmcp.running import seeds as several
from dmcp.running.children import following_parent, has_parent
from dmcp.running.forecast import forecast, peak_bytes
from dmcp.running.jobs import GIVEN, Corrupt, Replaced, open_job
from dmcp.running.plans import Plan
from dmcp.running.progress import clock
from dmcp.running.sessions import check_given, check_test_files, session, tell_ignored, tell_notices
from dmcp.runs import Run
from dmcp.searching.search import reach
from dmcp.searching.searches import extremes
from dmcp.supernet import Supernet
from dmcp.teachers import who_teaches


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
    smallest: o.Smallest = None,
    largest: o.Largest = None,
    seed: o.Seed = 0,
    seeds: o.Seeds = 1,
    retrain: o.RetrainKind = None,
    teacher: o.Teacher = "",
    teacher_model: o.TeacherModel = "",
    teacher_model_args: o.TeacherModelArgs = None,
    teacher_share: o.TeacherShare = None,
    teacher_temperature: o.TeacherTemperature = None,
    controls: o.Controls = False,
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
      dmcp prune --model digits:resnet --data digits --budget params:50% --controls
      dmcp prune --model resnet18 --data ~/photos --budget 8ms --latency-device cpu
      dmcp prune --model cifar:resnet20 --data cifar10 --seeds 3 --json
      dmcp prune --model resnet50 --data ~/photos --weights mine.pth --teacher given
      dmcp prune --model resnet18 --data ~/photos --align 8 --smallest 16 --smallest layer1=32 --frozen conv1
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
        result = pruning.prune(
            opened.model,
            opened.loaders.train,
            opened.loaders.test,
            search=plan.search,
            train=plan.train,
            retrain=plan.retrain,
            controls=plan.controls,
            test_given=not opened.new_head,
            graph=opened.graph,
            fresh=opened.fresh,
            teacher=opened.teacher,
            arch_loader=opened.loaders.arch,
            train_loader=opened.loaders.retrain,
            on_event=here.on_event,
            engine=plan.engine,
            keep=here.keep,
        )
        replaced = here.replaced()
        if not here.ranks.first:
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
    argv += ["--latency", str(folder / LATENCY)] if shared else []
    several.refuse_others(folder, argv)
    opened = check_reachable(plan, opened, str(folder))
    tell_notices(opened)
    tell_ignored(plan.engine, plan.job.place)
    if shared and opened.graph.latency is not None:
        opened.graph.latency.save(folder / LATENCY)
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
    stages = forecast(
        net, opened.loaders.train, plan.search, plan.train, plan.retrain, plan.controls, opened.teacher is not None
    )
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
    if who := who_teaches(plan.retrain, opened.teacher, opened.model):
        name = plan.job.teacher if plan.job.teacher not in ("", GIVEN) else who
        took = ", as if it were the unpruned network" if plan.job.teacher_model else ""
        print(f"\nteacher: {name}; what it takes to ask it is in these times{took}")
    if isinstance(opened.data.train, FolderSet):
        print(f"\nFew files were decoded.{finds_all(opened.data.train.root)}")
    print("\nNothing was trained or written.")
