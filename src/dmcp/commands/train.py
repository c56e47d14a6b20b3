"""The command train: a network with given widths, or unpruned, is trained and tested."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from dmcp.commands import options as o
from dmcp.commands.asked_plan import make_plan, run_folder
from dmcp.commands.printing import print_json, result_facts, tell_other_size, tell_replaced, tell_troubles
from dmcp.errors import WidthsError
from dmcp.measuring import compare
from dmcp.pruning import OURS, UNPRUNED
from dmcp.retraining import Retrain, origin, train_all
from dmcp.rows import AS_GIVEN, Row, markdown, table
from dmcp.running.jobs import Corrupt, Opened
from dmcp.running.plans import Plan
from dmcp.running.sessions import session
from dmcp.runs import REPORT, read_json
from dmcp.saving import save
from dmcp.spaces import Widths
from dmcp.teachers import trained_before, weigh_teacher, who_teaches


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
    teacher_share: o.TeacherShare = None,
    teacher_temperature: o.TeacherTemperature = None,
    weights: o.Weights = "",
    input: o.Input = "",
    model_args: o.ModelArgs = None,
    frozen: o.Frozen = None,
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
        if plan.widths and not plan.job.input and here.ranks.first:
            tell_other_size(Path(plan.widths), opened)
        start = opened.model if plan.retrain is Retrain.INHERIT else opened.fresh
        wanted = {OURS if plan.widths else UNPRUNED: kept}
        settings, way = (plan.train, plan.retrain, None), (here.on_event, plan.engine, here.keep)
        guide = opened.teacher
        before = trained_before(opened.model, plan.retrain, not opened.new_head, guide, guide)
        worth = None
        if guide is not None:
            rival = None if guide is opened.model else before.get(AS_GIVEN)
            worth = weigh_teacher(guide, rival, opened.data.classes, opened.loaders.test)
        trained = train_all(start, graph, wanted, opened.loaders.retrain, *settings, *way, teacher=guide)
        example = next(iter(opened.loaders.retrain))[0]
        rows = compare(before | trained, graph, wanted, opened.loaders.test, example, on_event=here.on_event)
        replaced = here.replaced()
        if not here.ranks.first:
            return
        save(trained[next(iter(wanted))], kept, here.run.folder)
        troubles = here.run.troubles(wanted)
        listed = (f"- **{trouble}**" for trouble in (*troubles, *here.describe_replaced(replaced)))
        taught = _taught(plan, opened, worth)
        here.run.write(REPORT, "\n".join([f"# {plan.job.model}", "", *markdown(rows, graph, taught), *listed, ""]))
        here.run.close()
    tell_replaced(replaced)
    tell_troubles(troubles)
    if as_json:
        print_json(result_facts(here.run.folder, graph, kept, replaced) | {"networks": [asdict(row) for row in rows]})
        return
    print(f"{table(rows, graph, taught)}\n\n{here.run.folder}")


def _taught(plan: Plan, opened: Opened, worth: Row | None) -> str:
    """Whom the network of `train` has learnt from, in words; empty if from nobody, as the unpruned one alone."""
    assert plan.train is not None
    who = who_teaches(plan.retrain, opened.teacher, opened.model, worth)
    if not who or not (opened.teacher or plan.widths):
        return ""
    how = (plan.train.teacher_share, plan.train.teacher_temperature)
    return origin(plan.retrain, who, *how, OURS if plan.widths else UNPRUNED, "the given weights")


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
