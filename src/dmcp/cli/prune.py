"""The commands prune, search and train."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from dmcp import pruning
from dmcp.cli.config import Request
from dmcp.cli.job import with_checked_budgets
from dmcp.cli.output import Replaced, describe_costs, describe_replaced, log, print_json, result_facts
from dmcp.cli.session import session
from dmcp.report.finish import finish
from dmcp.request import check_method
from dmcp.results import PruneResult, measure_networks, results_table
from dmcp.retraining import (
    Retraining,
    describe_origin,
    describe_teacher,
    given_networks,
    is_model,
    train_all,
    warn_of_poor_teacher,
)
from dmcp.runs.config import RunConfig
from dmcp.runs.files import REPORT
from dmcp.runs.reading import read_widths
from dmcp.runs.records import DMCP, ORIGINAL, UNIFORM
from dmcp.runs.storage import save
from dmcp.runtime.batches import device_of
from dmcp.searching.importance import first_samples
from dmcp.searching.records import expected_shares
from dmcp.selection import Source
from dmcp.settings import UNPRUNED, Retrain
from dmcp.training.loop import Task
from dmcp.training.reconstruction import SAMPLES


def prune(config: RunConfig, request: Request) -> None:
    """dmcp prune, and dmcp search, which stops after the cut."""
    check_method(config.method)
    with session(config, request, lambda job: with_checked_budgets(job, request.resume)) as begun:
        job = begun.job
        config = job.config
        baselines = set()
        if config.baselines:
            baselines = {UNPRUNED, UNIFORM}
        if config.weights and not job.new_head:
            baselines |= {ORIGINAL}
        result = pruning.prune(
            job.model,
            job.loaders,
            job.test,
            config.budgets or None,
            within=config.within,
            method=config.method,
            search=job.search,
            train=job.train,
            retrain=config.retrain,
            teacher=job.chosen_teacher,
            baselines=baselines,
            graph=job.graph,
            task=Task(fresh=job.fresh),
            runtime=begun.runtime,
        )
        replaced = begun.replaced()
        if not begun.world.first:
            return
        log(*finish(begun.run, result, describe_replaced(replaced)))
    if request.as_json:
        print_json(_facts_of_all(begun.run.folder, result, replaced))
    else:
        _print_result(begun.run.folder, result)


def _print_result(folder: Path, result: PruneResult) -> None:
    """The end of the search, what was cut, and the table."""
    if result.search is not None:
        shares = " and ".join(f"{share:.1%}" for share in expected_shares(result.search))
        steps = len(result.search.log)
        print(f"{steps} search steps; expected cost at the end: {shares} of the budget {result.search.budget.text}")
    if not result.by_budget:
        print(f"cut to {describe_costs(result.graph, result.widths)}")
    for name, of_budget in result.by_budget.items():
        print(f"{name} cut to {describe_costs(of_budget.graph, of_budget.widths)}")
    print(f"\n{result.table}\n\n{folder}")


def _facts_of_all(folder: Path, result: PruneResult, replaced: Replaced) -> dict[str, Any]:
    """A result as plain data; of several budgets each by its name."""
    networks = {"networks": [asdict(row) for row in result.rows]}
    if not result.by_budget:
        return networks | _facts(folder, result, replaced)
    by_budget = {}
    for name, of_budget in result.by_budget.items():
        by_budget[name] = _facts(folder / name, of_budget, replaced)
    return networks | {"folder": str(folder), "budgets": by_budget}


def _facts(folder: Path, result: PruneResult, replaced: Replaced) -> dict[str, Any]:
    """The result for one budget as plain data."""
    facts = result_facts(folder, result.graph, result.widths, replaced)
    if result.search is not None:
        facts["search_steps"] = len(result.search.log)
        facts["expected_budget_shares"] = expected_shares(result.search)
    if result.latency is not None:
        facts["latency"] = asdict(result.latency)
    if result.speeds:
        facts["speeds"] = [asdict(speed) | {"factor": speed.factor} for speed in result.speeds]
    if result.within is not None:
        facts["within"] = asdict(result.within)
    return facts


def train(config: RunConfig, request: Request) -> None:
    """dmcp train: a network with given widths, or unpruned."""
    with session(config, request) as begun:
        job = begun.job
        config = job.config
        graph = job.graph
        loader = job.loaders.final
        name = UNPRUNED
        widths = graph.full
        if config.widths:
            name = DMCP
            widths = read_widths(Path(config.widths), graph)
        retraining = Retraining(config=job.train, kind=config.retrain, teacher=job.chosen_teacher)

        # Rows of networks that are trained already: the model as given, and another network that teaches.
        other_teacher = None
        if job.teacher is not job.model:
            other_teacher = job.teacher
        shows_original = config.retrain is Retrain.FINETUNE or is_model(job.teacher, job.model)
        networks = given_networks(job.model, shows_original and not job.new_head, other_teacher)
        if other_teacher is not None:
            warn_of_poor_teacher(other_teacher, job.data.classes, job.test)

        # The one that is trained now: with the weights that are there, or initialized again.
        start = job.fresh
        cuts: dict[str, nn.Module] = {}
        if config.retrain in (Retrain.FINETUNE, Retrain.NONE):
            start = job.model
            samples = first_samples(loader, device_of(job.model), SAMPLES)
            cuts[name] = Source(model=job.model, graph=graph, searched=False, samples=samples).cut(widths)
        trained = train_all(start, graph, {name: widths}, loader, retraining, cuts=cuts, runtime=begun.runtime)
        example = next(iter(loader))[0]
        rows = measure_networks(
            networks | trained.networks,
            graph,
            {name: widths},
            job.test,
            example,
            train_losses=trained.losses,
            runtime=begun.runtime,
        )
        replaced = begun.replaced()
        if not begun.world.first:
            return

        save(trained.networks[name], widths, begun.run.folder)
        warnings = begun.run.divergences([name])
        origin = ""
        teacher = describe_teacher(retraining.teacher, job.model)
        if teacher:
            origin = describe_origin(retraining, teacher, name, "the given weights")
        table = results_table(rows, graph, origin)
        notes = [f"- **{text}**" for text in (*warnings, *describe_replaced(replaced))]
        begun.run.write(REPORT, "\n".join([f"# {config.model}", "", table, *notes, ""]))
        begun.run.close()
    log(*warnings)
    if request.as_json:
        networks_facts = {"networks": [asdict(row) for row in rows]}
        print_json(result_facts(begun.run.folder, graph, widths, replaced) | networks_facts)
    else:
        print(f"{table}\n\n{begun.run.folder}")
