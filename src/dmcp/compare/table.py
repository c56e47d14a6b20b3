"""The table of a comparison: a row for each method at each budget, all seeds together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from dmcp.budgets import MACS, read_budget
from dmcp.compare.methods import METHODS, title
from dmcp.compare.protocol import RESULT, SAME, check_alike, is_done, to_plain
from dmcp.compare.runner import Result
from dmcp.errors import FileError
from dmcp.exporting.export import blaming
from dmcp.runs.files import COMMANDS, read_json, read_records
from dmcp.runs.records import UNIFORM, UNPRUNED, Row
from dmcp.runs.writing import Run
from dmcp.runtime.io import from_plain
from dmcp.units import counted, show_mean, show_range, table

TABLE = "compare.json"
PAGE = "compare.md"


@dataclass(frozen=True, kw_only=True)
class Line:
    """A method at a budget, trained in one way, with all its seeds; what compare.json says of it."""

    method: str  # its title
    budget: str
    training: str  # SAME, or the way of the method's authors
    same_as: str  # the method that trains the same widths from scratch for this one; mostly empty
    own: bool  # whether the training is not the same for all
    way: str  # as `training`
    seeds: list[int]
    accuracies: list[float]  # by seed
    mean: float
    ms: float
    deviation: float | None  # of the accuracies, ddof = 1; None for one seed
    train_losses: list[float | None]  # by seed, means over the last epoch; None if unknown
    widths: list[dict[str, int]]  # by seed
    macs: list[int]  # smallest and largest
    params: list[int]
    macs_share: list[float]
    search_seconds: float  # mean over the seeds
    sample_passes: float


def write_table(folder: Path) -> dict[str, Any]:
    """Write the table of all runs in a folder that are done; returns its JSON. FileError if there are none."""
    results = _read_results(folder)
    if not results:
        raise FileError(
            f"{folder}: no run of a comparison is finished here: name the folder that dmcp compare wrote to."
        )
    check_alike([result.run for result in results.values()], folder)

    settings = _describe_settings(results)
    lines = _make_lines(results, folder)
    data = {
        "model": settings["config"]["model"],
        "data": settings["config"]["data"],
        "commands": _read_commands(folder),
        "settings": settings,
        "lines": [asdict(line) for line in lines],
    }
    Run(folder).write(TABLE, data)
    Run(folder).write(PAGE, f"{_describe(settings)}\n\n{table(_make_cells(lines))}")
    return data


def _read_results(folder: Path) -> dict[str, Result]:
    """The results of all runs that are done, by the names of the runs."""
    results = {}
    for path in sorted(folder.glob(f"*/{RESULT}")):
        if is_done(path.parent):
            with blaming(f"{path}: not the result of a run of this version"):
                result = from_plain(Result, read_json(path))
            results[result.run.name] = result
    return results


def _read_commands(folder: Path) -> list[dict[str, Any]]:
    """The commands that were typed for this folder, each with its time, as plain data."""
    return list(read_records(folder / COMMANDS))


def _describe_settings(results: Mapping[str, Result]) -> dict[str, Any]:
    """The protocol of all runs as plain data, the settings of methods, seeds and devices."""
    runs = [result.run for result in results.values()]
    settings = to_plain(runs[0].protocol)
    settings["set"] = {title(run.method): dict(run.settings) for run in runs if run.settings}
    settings["seeds"] = sorted({run.seed for run in runs})
    settings["devices"] = sorted({result.device for result in results.values()})
    return settings


# the lines: figures


def _make_lines(results: Mapping[str, Result], folder: Path) -> list[Line]:
    """The lines in the order of the page."""
    groups: dict[tuple[str, str, str], list[tuple[Result, Row]]] = {}  # by method, budget and training
    for result in sorted(results.values(), key=_order):
        for network in result.networks:
            groups.setdefault((result.run.method, result.run.budget, network.name), []).append((result, network))
    return [_make_line(group, results, folder) for group in groups.values()]


def _make_line(group: Sequence[tuple[Result, Row]], results: Mapping[str, Result], folder: Path) -> Line:
    """One line from the networks of all its seeds, which have one method, budget and training."""
    runs = [result for result, _ in group]
    networks = [network for _, network in group]
    run = runs[0].run
    training = networks[0].name

    # Figures of all seeds: a list, or the smallest and the largest.
    accuracies = [network.accuracy for network in networks]
    macs = [network.macs for network in networks]
    params = [network.params for network in networks]
    shares = [network.macs / result.full_macs for result, network in group]
    deviation = None
    if len(accuracies) > 1:
        deviation = stdev(accuracies)

    # What it took to choose the widths.
    seconds = []
    sample_passes = []
    for result in runs:
        search_seconds, passes = _search_cost(result, results, folder)
        seconds.append(search_seconds)
        sample_passes.append(passes)

    # Widths that are uniform's in every seed were trained once, by uniform.
    same_as = ""
    if run.method != UNIFORM and all(_is_like_uniform(result, results) for result in runs):
        same_as = UNIFORM

    return Line(
        method=title(run.method),
        budget=run.budget,
        training=training,
        same_as=same_as,
        own=training != SAME,
        way=training,
        seeds=[result.run.seed for result in runs],
        accuracies=accuracies,
        mean=fmean(accuracies),
        ms=networks[0].ms,
        deviation=deviation,
        train_losses=[network.train_loss for network in networks],
        widths=[dict(result.widths) for result in runs],
        macs=[min(macs), max(macs)],
        params=[min(params), max(params)],
        macs_share=[min(shares), max(shares)],
        search_seconds=fmean(seconds),
        sample_passes=fmean(sample_passes),
    )


def _is_like_uniform(result: Result, results: Mapping[str, Result]) -> bool:
    """Whether uniform has a run with the same budget, seed and widths."""
    uniform = results.get(replace(result.run, method=UNIFORM).name)
    return uniform is not None and uniform.widths == result.widths


def _search_cost(result: Result, results: Mapping[str, Result], folder: Path) -> tuple[float, int]:
    """Seconds and sample-passes until the widths were known, together with the run that it started from."""
    run = result.run
    if run.method == UNPRUNED:
        return 0.0, 0
    if not run.uses:
        return result.seconds, result.sample_passes
    if run.uses not in results:
        raise FileError(f"{folder}: {run.uses}, which {run.name} started from, is missing.")
    start = results[run.uses]
    return result.seconds + start.seconds, result.sample_passes + start.sample_passes


def _order(result: Result) -> tuple[Any, ...]:
    """Sort the unpruned network first, then shares of the MACs from the largest on, then other budgets.

    Within a budget our methods come first, in the order of METHODS.
    """
    run = result.run
    share = float("inf")  # unpruned
    if run.budget:
        share = _macs_share(run.budget)
    ranks = {method: rank for rank, method in enumerate(METHODS)}
    rank = ranks.get(run.method, len(ranks))
    return -share, run.budget, rank, title(run.method), run.seed


def _macs_share(budget: str) -> float:
    """The share of MACs that is the whole budget; -1 for any other budget."""
    targets = read_budget(budget).targets
    if len(targets) == 1 and targets[0].kind == MACS and targets[0].is_share:
        return float(targets[0].amount)
    return -1.0


# the page: text


def _describe(settings: Mapping[str, Any]) -> str:
    """Network, data, recipe and seeds in a line."""
    config = settings["config"]
    recipe = config["train"]
    parts = [
        counted(recipe["epochs"], "epoch"),
        f"batch {config['batch']}",
        f"learning rate {recipe['lr']:g}",
        f"decay {recipe['weight_decay']:g}",
        f"fine-tuning {counted(settings['finetune_epochs'], 'epoch')}",
        f"seeds {', '.join(map(str, settings['seeds']))}",
    ]
    network = " ".join([config["model"], *config["model_args"]])
    return f"{network} on {Path(config['data']).name}: {', '.join(parts)}."


def _make_cells(lines: Sequence[Line]) -> list[list[str]]:
    """The table as text, one row for both trainings of a method at a budget.

    Accuracies and losses are mean ± standard deviation (seeds), and so are differences to uniform with the same seed.
    """
    same_recipe = {(line.method, line.budget): line for line in lines if not line.own}
    own_training = {(line.method, line.budget): line for line in lines if line.own}  # in the way of its authors
    head = ["method", "budget", f"accuracy in %, {SAME}", f"points above {UNIFORM}", f"train loss, {SAME}"]
    rows = [[*head, "its own training, %", "MACs", "params", "search, s", "sample-passes, M"]]
    for method, budget in dict.fromkeys((line.method, line.budget) for line in lines):
        same = same_recipe.get((method, budget))
        authors = own_training.get((method, budget))
        line = same or authors
        assert line is not None

        # Widths that are uniform's are trained once: the cell says by which method.
        accuracy = above_uniform = train_loss = ""
        if line.same_as:
            accuracy = f"= {line.same_as}"
        elif same is not None:
            accuracy = show_mean(same.accuracies)
            train_loss = _spread_of_losses(same.train_losses)
            uniform = same_recipe.get((UNIFORM, budget))
            if uniform is not None and same is not uniform:
                above_uniform = show_mean(_differences(same, uniform), sign="+z")
        its_own = ""
        if authors is not None:
            its_own = f"{show_mean(authors.accuracies)}, {authors.way}"
        rows.append(
            [
                method,
                budget or "100%",
                accuracy,
                above_uniform,
                train_loss,
                its_own,
                show_range(*(f"{share:.1%}" for share in line.macs_share)),
                show_range(*(f"{count:,}" for count in line.params)),
                f"{line.search_seconds:,.0f}",
                _in_millions(line.sample_passes),
            ]
        )
    return rows


def _differences(line: Line, base: Line) -> list[float]:
    """How much more accurate a line is than another one, for each seed that both have."""
    accuracies = dict(zip(base.seeds, base.accuracies, strict=True))
    pairs = zip(line.seeds, line.accuracies, strict=True)
    return [accuracy - accuracies[seed] for seed, accuracy in pairs if seed in accuracies]


def _spread_of_losses(losses: Sequence[float | None]) -> str:
    """Mean ± standard deviation (seeds) of the losses that are known; empty if none is."""
    numbers = [loss for loss in losses if loss is not None]
    if not numbers:
        return ""
    deviation = ""
    if len(numbers) > 1:
        deviation = f" ± {stdev(numbers):.2g}"
    return f"{fmean(numbers):.4g}{deviation} ({len(numbers)})"


def _in_millions(count: float) -> str:
    """1,234.5 or 0.00123."""
    millions = count / 1e6
    if millions >= 1:
        return f"{millions:,.1f}"
    return f"{millions:.3g}"
