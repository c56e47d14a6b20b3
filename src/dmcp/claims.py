"""Whether the paper's claims hold here: each is a difference between two arms, judged from the data of its experiment.

Arms are found by the names of their cells (see experiments), whose order and labels do not matter.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from dmcp.tables import points, spread, table

YES, NO, UNCLEAR, MISSING = "yes", "no", "not clear", "missing"
NO_PAIR = "no seed has both yet"
STANDARD_ERRORS = 2  # that a difference must be away from zero
NEAR = 0.01  # of the ungated training accuracy: where alphas have recovered
DRAWN = ("random", "dmcp-direct")  # arms whose widths are drawn anew for each seed
# Chance that |t| >= 2 for no difference at all: Student's t of two and of three seeds, in closed form.
BY_CHANCE = {2: 1 - math.atan(2) * 2 / math.pi, 3: 1 - 2 / math.sqrt(6)}
_NAME = re.compile(r"(?P<arm>.+?)(?:-(?P<budget>[^-]*\d[^-]*))??-seed(?P<seed>-?\d+)")  # of a cell: see cell_name
_PROTOCOL = ("model", "model_args", "data", "batch", "train", "settings", "search_epochs", "holdout")


# what is known


@dataclass(frozen=True, kw_only=True)
class Tested:
    """A cell that is done, or is not yet."""

    name: str
    arm: str  # its name without budget, seed and number of the draw
    budget: str  # empty: none
    seed: int
    accuracy: float | None = None  # of the network trained from scratch, 0 to 1
    own_accuracy: float | None = None  # of the one trained the method's own way


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """Where the alphas of one arm have ended, seed by seed."""

    accuracies: tuple[float, ...]  # of the training images, 0 to 1
    ungated: tuple[float, ...]  # the same of the network without gates
    macs_shares: tuple[float, ...]  # of the network without gates


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What the data of one experiment on one network say about claims."""

    experiment: str
    network: str  # as it is told
    protocol: str  # cells of one name are the same cells if this is the same
    recipe: str  # the same for people, in short
    tested: tuple[Tested, ...]  # each cell once
    recovered: Mapping[str, Recovered] = field(default_factory=dict)  # by arm


def read_evidence(data: Mapping[str, Any], network: str) -> Evidence:
    """From the data of an experiment; KeyError, TypeError or ValueError if they are not as `dmcp paper` writes them."""
    cells = [*({"name": name} for name in data["missing"]), *data["cells"]]
    known = {it.name: it for cell in cells if (it := _read_cell(cell))}
    labels = {it.arm: cell["label"] for cell in data["cells"] if (it := _read_cell(cell))}
    ended = {row["label"]: row for row in data["rows"] if "recovered" in row}
    search = f" after a search of {data['search_epochs']}" if data.get("search_epochs") is not None else ""
    return Evidence(
        experiment=data["experiment"],
        network=network,
        protocol=json.dumps([data.get(key) for key in _PROTOCOL], sort_keys=True),
        recipe=f"{' '.join((data['model'], *data.get('model_args', ())))}, {data['train']['epochs']} epochs{search}",
        tested=tuple(known.values()),
        recovered={arm: _read_recovered(ended[label]) for arm, label in labels.items() if label in ended},
    )


def _read_cell(cell: Mapping[str, Any]) -> Tested | None:
    """None for a name that is not of ours."""
    parts = _NAME.fullmatch(cell["name"])
    if not parts:
        return None
    values = {key: None if cell.get(key) is None else float(cell[key]) for key in ("accuracy", "own_accuracy")}
    arm = parts["arm"].rstrip("0123456789")
    return Tested(name=cell["name"], arm=arm, budget=parts["budget"] or "", seed=int(parts["seed"]), **values)


def _read_recovered(row: Mapping[str, Any]) -> Recovered:
    ends, ungated, shares = (tuple(map(float, row[key])) for key in ("recovered", "trained", "last_macs"))
    if not len(ends) == len(ungated) == len(shares):
        raise ValueError(f"{row['label']}: not as many values as seeds")
    return Recovered(accuracies=ends, ungated=ungated, macs_shares=shares)


# what is claimed


@dataclass(frozen=True)
class Claim:
    """One arm is better than another."""

    experiment: str
    better: str  # arm; with a star: trained the method's own way, as in the paper
    worse: str
    says: str  # a sentence, with the paper's table; {}: a row for each budget

    @property
    def each_budget(self) -> bool:
        return "{}" in self.says


CLAIMS = (
    Claim("main", "dmcp", "uniform", "DMCP is better than uniform widths at {} (table 6)."),
    Claim("main", "dmcp", "random", "DMCP is better than random widths at {} (table 6, which has none)."),
    Claim("main", "dmcp*", "dmcp", "DMCP trained slimmably is better than from scratch at {} (table 6)."),
    Claim("sampling", "dmcp", "dmcp-direct", "Expected sampling is better than the mean of direct samples (table 1)."),
    Claim("scale", "dmcp-wide", "dmcp", "Pruning a network 1.5 times as wide to the same MACs is better (table 2)."),
    Claim("warmup", "dmcp", "dmcp-cold", "Warm-up helps (table 3)."),
    Claim("sandwich", "dmcp", "dmcp-sandwich", "The variant sandwich rule is better than the original (table 4)."),
    Claim(
        "scheme", "dmcp-frozen", "dmcp-budget-only", "The task loss helps alphas that start at the budget (table 5)."
    ),
    Claim(
        "scheme",
        "dmcp-frozen",
        "dmcp-budget-random",
        "Alphas by budget and task are better than random ones moved by the budget alone (table 5).",
    ),
    Claim("scheme", "dmcp", "dmcp-frozen", "Weights that are updated together with the alphas help (table 5)."),
    Claim("pretrained", "dmcp", "dmcp-pretrained", "Warm-up is better than pre-trained weights (appendix B)."),
    Claim(
        "pretrained",
        "dmcp",
        "dmcp-sorted",
        "Warm-up is better than pre-trained weights with sorted channels (appendix B, which does not sort).",
    ),
    Claim("bernoulli", "dmcp", "dmcp-bernoulli", "Independent Bernoulli gates are worse (appendix C)."),
)
SPREAD = "The draws of one search differ (table 1)."
RECOVERIES = {  # by arm of recover
    "recover": "Random alphas around 1 recover, at ten times the rate of a search (figure 4).",
    "recover-slowly": "Random alphas around 1 recover, at the rate of a search (figure 4).",
    "recover-low": "Random alphas around 0 recover, at ten times the rate of a search (figure 4).",
}


# what holds


@dataclass(frozen=True, kw_only=True)
class Row:
    """A claim on one network."""

    says: str
    network: str = ""
    here: str
    agree: str = ""  # seeds of all
    holds: str = MISSING


_Judged = Callable[[Evidence], list[Row]]


def judge(differences: Sequence[float]) -> str:
    """Yes or no if the mean is far enough from zero for its standard error; not clear for one seed."""
    if len(differences) < 2:
        return UNCLEAR
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / math.sqrt(len(differences))
    if mean == 0 or abs(mean) < STANDARD_ERRORS * error:
        return UNCLEAR
    return YES if mean > 0 else NO


def paired(it: Evidence, claim: Claim, budget: str | None = None) -> list[float]:
    """Better less worse of each seed that both have."""
    better, worse = _accuracies(it, claim.better, budget), _accuracies(it, claim.worse, budget)
    return [better[seed] - worse[seed] for seed in sorted(better.keys() & worse.keys())]


def _accuracies(it: Evidence, arm: str, budget: str | None = None) -> dict[int, float]:
    """Of each seed; the mean of its draws if there are several."""
    return {seed: statistics.fmean(values) for seed, values in _draws(it, arm, budget).items()}


def _draws(it: Evidence, arm: str, budget: str | None = None) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for cell in it.tested:
        value = cell.own_accuracy if arm.endswith("*") else cell.accuracy
        if cell.arm == arm.rstrip("*") and budget in (None, cell.budget) and value is not None:
            found.setdefault(cell.seed, []).append(value)
    return found


def judge_all(every: Sequence[Evidence]) -> list[Row]:
    """A row for each claim and network, and for each claim that no experiment is there for."""
    rows: list[Row] = []
    for claim in CLAIMS:
        rows += _rows_of(every, claim.experiment, claim.says.format("each budget"), partial(_judge_claim, claim))
        if claim.experiment == "sampling":  # both are about table 1
            rows += _rows_of(every, "sampling", SPREAD, partial(_tell_draws, every))
    for arm, says in RECOVERIES.items():
        rows += _rows_of(every, "recover", says, partial(_judge_recovery, arm))
    return rows


def _rows_of(every: Sequence[Evidence], experiment: str, says: str, judged: _Judged) -> list[Row]:
    rows = [row for it in every if it.experiment == experiment for row in judged(it)]
    return rows or [Row(says=says, here=f"no data: `dmcp paper {experiment}` makes them")]


def _judge_claim(claim: Claim, it: Evidence) -> list[Row]:
    rows = []
    for budget in _budgets(it, claim) if claim.each_budget else [None]:
        found, row = paired(it, claim, budget), Row(says=claim.says.format(budget), network=it.network, here=NO_PAIR)
        agree = f"{sum(value > 0 for value in found)} of {len(found)}"
        rows.append(replace(row, here=points(found), agree=agree, holds=judge(found)) if found else row)
    return rows


def _budgets(it: Evidence, claim: Claim) -> list[str]:
    """Those of the two arms, the largest first, also where nothing is done yet."""
    arms = {claim.better.rstrip("*"), claim.worse}
    found = {cell.budget for cell in it.tested if cell.arm in arms and cell.budget}
    return sorted(found, key=lambda text: (-float(text[:-1]) if re.fullmatch(r"\d+(\.\d+)?%", text) else 0.0, text))


def _tell_draws(every: Sequence[Evidence], it: Evidence) -> list[Row]:
    """The deviation inside a search beside that over seeds: numbers without a verdict."""
    draws = [own for own in _draws(it, "dmcp-direct").values() if len(own) > 1]
    if not draws:
        return [Row(says=SPREAD, network=it.network, here="no search has two draws yet")]
    here, agree = f"deviation inside a search {100 * pooled(draws):.2f} ({len(draws)})", ""
    over_seeds, _ = pooled_over_seeds(every, it.protocol, drawn=False)
    if over_seeds is not None:
        here += f", over seeds {100 * over_seeds:.2f}"
        agree = f"{sum(statistics.stdev(own) > over_seeds for own in draws)} of {len(draws)} spread more"
    return [Row(says=SPREAD, network=it.network, here=here, agree=agree, holds="no rule")]


def _judge_recovery(arm: str, it: Evidence) -> list[Row]:
    row, ended = Row(says=RECOVERIES[arm], network=it.network, here="no seed is done yet"), it.recovered.get(arm)
    if ended is None or not ended.accuracies:
        return [row]
    gaps = [own - whole for own, whole in zip(ended.accuracies, ended.ungated, strict=True)]
    near, count = sum(abs(gap) < NEAR + 1e-9 for gap in gaps), len(gaps)
    holds = UNCLEAR if count < 2 or 0 < near < count else YES if near else NO
    here = f"training accuracy {points(gaps)}, MACs {spread(ended.macs_shares)} % of the ungated"
    return [replace(row, here=here, agree=f"{near} of {count}", holds=holds)]


# how far seeds spread


def pooled(groups: Sequence[Sequence[float]]) -> float:
    """Standard deviation inside groups of two or more, all groups together."""
    freedom = sum(len(group) - 1 for group in groups)
    return math.sqrt(sum((len(group) - 1) * statistics.variance(group) for group in groups) / freedom)


def pooled_over_seeds(every: Sequence[Evidence], protocol: str, drawn: bool = True) -> tuple[float | None, int]:
    """Deviation of an accuracy over seeds, from how many arms of a protocol; `drawn`: also of DRAWN."""
    cells = {cell.name: cell for it in every if it.protocol == protocol for cell in it.tested}
    groups: dict[tuple[str, bool], list[float]] = {}
    for name, cell in cells.items():
        for own, value in ((False, cell.accuracy), (True, cell.own_accuracy)):
            if value is not None and (drawn or cell.arm not in DRAWN):
                groups.setdefault((name.rpartition("-seed")[0], own), []).append(value)
    several = [group for group in groups.values() if len(group) > 1]
    return (pooled(several) if several else None), len(several)


def _tell_pooled(every: Sequence[Evidence]) -> list[str]:
    lines = []
    for protocol, recipe in {it.protocol: it.recipe for it in every}.items():
        (whole, arms), (fixed, rest) = (pooled_over_seeds(every, protocol, drawn) for drawn in (True, False))
        if whole is None:
            continue
        told = f"{100 * whole:.2f} over {arms} arms"
        if fixed is not None and rest < arms:
            told += f", {100 * fixed:.2f} over the {rest} of them that are not random widths or direct samples, "
            told += "whose widths are drawn anew for each seed"
        error = 100 * (whole if fixed is None else fixed) * math.sqrt(2 / 3)
        told += f". By the last figure, a difference of two means of three has a standard error of {error:.2f}"
        lines.append(f"- **{recipe}**: {told}.")
    return lines


# for people


def tell_claims(every: Sequence[Evidence]) -> str:
    """The rule, how far seeds spread, and the table, as Markdown."""
    head = ["claim", "network", "here, in points", "seeds that agree", "holds"]
    rows = [[row.says, row.network, row.here, row.agree, row.holds] for row in judge_all(every)]
    two, three = (f"{100 * chance:.0f}" for chance in BY_CHANCE.values())
    rule = (
        "Made from the data of the experiments below alone. Differences are taken seed by seed, in points of test "
        "accuracy: mean ± standard deviation (seeds). Holds is *yes* if the mean is at least two standard errors "
        "(standard deviation / √n) above zero, *no* if it is as far below, and *not clear* otherwise or with fewer "
        f"than two seeds. Alphas recover if the training accuracy ends within {100 * NEAR:.0f} point of that without "
        "gates: *yes* if it does in all seeds, *no* if in none.\n\n"
        "With three seeds the standard error is itself uncertain: where two arms do not differ at all, this rule still "
        f"says yes or no in {three} of 100 rows ({two} with two seeds, by Student's t). Many rows have the same cells "
        "on one side (DMCP at half of the MACs), and share their luck.\n"
    )
    start = "Standard deviation of an accuracy over seeds, in points, pooled over all arms with two or more seeds:\n"
    told = _tell_pooled(every)
    return "\n".join([rule, *([start, *told, ""] if told else []), table([head, *rows])])
