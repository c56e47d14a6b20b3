"""Whether the paper's claims hold here: each is a difference between two arms, judged from the data of its experiment.

Arms are found by the names of their cells (see experiments), whose order and labels do not matter.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dmcp.paper.evidence import PEERS, Evidence, Tested, paper_says, tell_repeated
from dmcp.paper.experiments import ALL
from dmcp.paper.own_experiments import SEEDS
from dmcp.tables import counted, points, pooled, spread, table

YES, NO, UNCLEAR, MISSING = "yes", "no", "not clear", "missing"
NO_PAIR = "no seed has both yet"
STANDARD_ERRORS = 2  # that a difference must be away from zero
LEAST_FREEDOM = 5  # degrees of it that a pooled deviation needs to be used
LEAST_OWN = 3  # seeds that the deviation of their own differences needs
NEAR = 0.01  # of the ungated training accuracy: where alphas have recovered
DRAWN = ("random", "dmcp-direct")  # arms whose widths are drawn anew for each seed


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

    @property
    def command(self) -> str:
        """What makes its data."""
        return f"dmcp compare --methods {self.worse}" if self.worse in PEERS else f"dmcp paper {self.experiment}"


CLAIMS = (
    Claim("main", "dmcp", "uniform", "DMCP is better than uniform widths at {} (table 6)."),
    Claim(
        SEEDS,
        "dmcp",
        "uniform",
        "DMCP is better than uniform widths at {}, more seeds than main's, which are among them (table 6).",
    ),
    Claim("main", "dmcp", "random", "DMCP is better than random widths at {} (table 6, which has none)."),
    Claim("main", "dmcp", "amc", "DMCP is better than AMC at {} (table 6)."),
    Claim("main", "dmcp", "metapruning", "DMCP is better than MetaPruning at {} (table 6)."),
    Claim("main", "dmcp", "autoslim", "DMCP is better than AutoSlim at {} (table 6, which trains them slimmably)."),
    Claim("main", "dmcp", "slimming", "DMCP is better than slimming at {} (table 6, which has none)."),
    Claim("main", "dmcp*", "dmcp", "DMCP trained slimmably is better than from scratch at {} (table 6)."),
    Claim("sampling", "dmcp", "dmcp-direct", "Expected sampling is better than the mean of direct samples (table 1)."),
    Claim("scale", "dmcp-wide", "dmcp", "Pruning a network 1.5 times as wide to the same MACs is better (table 2)."),
    Claim("warmup", "dmcp", "dmcp-cold", "Warm-up helps (table 3)."),
    Claim("sandwich", "dmcp", "dmcp-sandwich", "The variant sandwich rule is better than the original (table 4)."),
    Claim(
        "scheme",
        "dmcp-frozen",
        "dmcp-budget-only",
        "The task loss helps alphas that start at the budget (table 5, where they start at random).",
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
SPREAD_THERE = "best less worst of five: 1.8 (MobileNetV2 at 31 %; 1.0 by table 2), 1.7 (ResNet-50 at 27 %)"
RECOVERIES = {  # by arm of recover
    "recover": "Random alphas around 1 recover, at ten times the rate of a search (figure 4).",
    "recover-slowly": "Random alphas around 1 recover, at the rate of a search (figure 4).",
    "recover-low": "Random alphas around 0 recover, at ten times the rate of a search (figure 4).",
}
RECOVERED_THERE = "within 500 steps (MobileNetV2)"
PEAKS = {  # by where the alphas start
    "": "The width of most layers has one peak, if alphas start at the budget (appendix A.2, figure 7).",
    "random": "The width of most layers has one peak, if alphas start at random, as in the paper (the same).",
    "zero": "The width of most layers has one peak, if alphas start at zero, as in the authors' code (the same).",
}
PEAKS_THERE = "in most of the 12 layers shown, of structures inside the budget (MobileNetV2 at 31 %)"


# what holds


@dataclass(frozen=True, kw_only=True)
class Row:
    """A claim on one network."""

    says: str
    network: str = ""
    paper: str = ""
    here: str
    errors: str = ""  # standard errors that the mean is away from zero
    agree: str = ""  # seeds of all
    holds: str = MISSING


_Judged = Callable[[Evidence, Row], list[Row]]


def judge(errors: float | None) -> str:
    """Yes or no if a mean is enough standard errors away from zero; not clear for None."""
    if errors is None or abs(errors) < STANDARD_ERRORS:
        return UNCLEAR
    return YES if errors > 0 else NO


def in_errors(differences: Sequence[float], deviation: float | None) -> float | None:
    """How many standard errors a mean is away from zero; None for too few seeds.

    deviation: over the seeds of either arm; None: the differences' own counts, and of two seeds that is mostly luck.
    """
    if len(differences) < (LEAST_OWN if deviation is None else 2):
        return None
    mean = statistics.fmean(differences)
    both = statistics.stdev(differences) if deviation is None else math.sqrt(2) * deviation
    error = both / math.sqrt(len(differences))
    return mean / error if error else math.copysign(math.inf, mean) if mean else 0.0


def paired(it: Evidence, claim: Claim, budget: str | None = None) -> dict[int, float]:
    """Better less worse of each seed that both have."""
    better, worse = _accuracies(it, claim.better, budget), _accuracies(it, claim.worse, budget)
    return {seed: better[seed] - worse[seed] for seed in sorted(better.keys() & worse.keys())}


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
    """A row for each claim and network, and for each claim that no experiment is there for.

    Not for claims of experiments that are done by name only.
    """
    rows: list[Row] = []
    for claim in CLAIMS:
        none = Row(
            says=claim.says.format("each budget"),
            paper=paper_says(claim.better, claim.worse),
            here=_no_data(claim.command),
        )
        rows += _rows_of(every, claim.experiment, none, partial(_judge_claim, every, claim))
        if claim.experiment == "sampling":  # both are about table 1
            none = Row(says=SPREAD, paper=SPREAD_THERE, here=_no_data(claim.command))
            rows += _rows_of(every, "sampling", none, partial(_tell_draws, every))
    for arm, says in RECOVERIES.items():
        none = Row(says=says, paper=RECOVERED_THERE, here=_no_data("dmcp paper recover"))
        rows += _rows_of(every, "recover", none, partial(_judge_recovery, arm))
    for place, says in PEAKS.items():
        command = f"dmcp paper {'extra distribution' if place else 'distribution'}"
        none = Row(says=says, paper=PEAKS_THERE, here=_no_data(command))
        rows += _rows_of(every, "distribution", none, partial(_judge_peaks, place))
    return rows


def _no_data(command: str) -> str:
    return f"no data: `{command}` makes them"


def _rows_of(every: Sequence[Evidence], experiment: str, none: Row, judged: _Judged) -> list[Row]:
    own = [(it, replace(none, network=it.network)) for it in every if it.experiment == experiment]
    return [row for it, start in own for row in judged(it, start)] or [none] * (experiment in ALL)


def _judge_claim(every: Sequence[Evidence], claim: Claim, it: Evidence, start: Row) -> list[Row]:
    rows, alike = [], pooled_over_seeds(every, it.protocol, drawn=False)
    usable = alike and alike.freedom >= LEAST_FREEDOM and not {claim.better, claim.worse} & {*DRAWN}
    for budget in budgets_of(it, claim) if claim.each_budget else [None]:
        found, there = [*paired(it, claim, budget).values()], paper_says(claim.better, claim.worse, budget)
        row = replace(start, says=claim.says.format(budget), paper=there, here=NO_PAIR)
        if found:
            errors = in_errors(found, alike.deviation if alike and usable else None)
            row = replace(row, here=points(found), errors=tell_errors(errors), agree=above(found), holds=judge(errors))
        rows.append(row)
    return rows


def above(differences: Sequence[float]) -> str:
    """How many are above zero, in words."""
    return f"{sum(value > 0 for value in differences)} of {len(differences)}"


def tell_errors(errors: float | None) -> str:
    """With one decimal; two where one would round to the limit from below."""
    if errors is None:
        return ""
    near = judge(errors) != judge(round(errors, 1))
    return f"{errors:+z.{2 if near else 1}f}" if abs(errors) < 100 else f"beyond {math.copysign(100, errors):+.0f}"


def budgets_of(it: Evidence, claim: Claim) -> list[str]:
    """Those of the two arms, the largest first, also where nothing is done yet; of peers only those of both."""
    better, worse = (
        {cell.budget for cell in it.tested if cell.arm == arm and cell.budget}
        for arm in (claim.better.rstrip("*"), claim.worse)
    )
    found = better & worse if claim.worse in PEERS else better | worse
    return sorted(found, key=lambda text: (-float(text[:-1]) if re.fullmatch(r"\d+(\.\d+)?%", text) else 0.0, text))


def _tell_draws(every: Sequence[Evidence], it: Evidence, start: Row) -> list[Row]:
    """The deviation inside a search beside that over seeds: numbers without a verdict."""
    draws = [own for own in _draws(it, "dmcp-direct").values() if len(own) > 1]
    if not draws:
        return [replace(start, here="no search has two draws yet")]
    here, agree = f"deviation inside a search {100 * pooled(draws):.2f} ({len(draws)})", ""
    if over_seeds := pooled_over_seeds(every, it.protocol, drawn=False):
        here += f", over seeds {100 * over_seeds.deviation:.2f}"
        agree = f"{sum(statistics.stdev(own) > over_seeds.deviation for own in draws)} of {len(draws)} spread more"
    return [replace(start, here=here, agree=agree, holds="no rule")]


def _judge_recovery(arm: str, it: Evidence, start: Row) -> list[Row]:
    ended = it.recovered.get(arm)
    if ended is None or not ended.accuracies:
        return [replace(start, here="no seed is done yet")]
    gaps = [own - whole for own, whole in zip(ended.accuracies, ended.ungated, strict=True)]
    near, count = sum(abs(gap) < NEAR + 1e-9 for gap in gaps), len(gaps)
    here = f"training accuracy {points(gaps)}, MACs {spread(ended.macs_shares)} % of the ungated"
    return [replace(start, here=here, agree=f"{near} of {count}", holds=_all_or_none(near, count))]


def _judge_peaks(start_of: str, it: Evidence, start: Row) -> list[Row]:
    """Strictly and with small dips filled; not clear where that differs."""
    if (peaks := it.peaks.get(start_of)) is None:
        return [replace(start, here="no seed has been counted yet")]
    count = len(peaks.strict)
    strict, filled = (sum(share > 0.5 for share in shares) for shares in (peaks.strict, peaks.filled))
    here = f"{spread(peaks.strict)} % of the spaces; with small dips filled {spread(peaks.filled)} %"
    verdict = _all_or_none(strict, count)
    holds = verdict if verdict == _all_or_none(filled, count) else UNCLEAR
    return [replace(start, here=here, agree=f"{strict} of {count}; filled {filled} of {count}", holds=holds)]


def _all_or_none(agree: int, count: int) -> str:
    """Of seeds that are judged one by one."""
    return UNCLEAR if count < 2 or 0 < agree < count else YES if agree else NO


# how far seeds spread


@dataclass(frozen=True, kw_only=True)
class Pooled:
    """How far accuracies spread over seeds, all arms together."""

    deviation: float  # of one accuracy, 0 to 1
    arms: int  # with two or more seeds
    freedom: int  # degrees
    seeds: int  # of the arm that has most
    usual_seeds: int  # that most arms have

    def error(self, seeds: int) -> float:
        """The standard error of a difference of two means."""
        return self.deviation * math.sqrt(2 / seeds)


def pooled_over_seeds(every: Sequence[Evidence], protocol: str, drawn: bool = True) -> Pooled | None:
    """Of the arms of a protocol, each cell once; `drawn`: also of DRAWN. None if no arm has two seeds.

    Of a cell with several figures the first counts.
    """
    cells: dict[str, Tested] = {}
    for it in every:
        for cell in it.tested if it.protocol == protocol else ():
            if cell.is_done:
                cells.setdefault(cell.name, cell)
    groups: dict[tuple[str, bool], list[float]] = {}
    for cell in cells.values():
        for own, value in ((False, cell.accuracy), (True, cell.own_accuracy)):
            if value is not None and (drawn or cell.arm not in DRAWN):
                groups.setdefault((cell.setting, own), []).append(value)
    several = [group for group in groups.values() if len(group) > 1]
    if not several:
        return None
    sizes = sorted(map(len, several), reverse=True)
    return Pooled(
        deviation=pooled(several),
        arms=len(several),
        freedom=sum(sizes) - len(several),
        seeds=sizes[0],
        usual_seeds=statistics.mode(sizes),
    )


def by_chance(freedom: int) -> float:
    """Chance that Student's t is STANDARD_ERRORS or more away from zero: its closed form for whole degrees."""
    angle, odd = math.atan(STANDARD_ERRORS / math.sqrt(freedom)), freedom % 2
    term, total = math.cos(angle) ** odd, 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
    inside = math.sin(angle) * total
    return 1 - (2 / math.pi * (angle + inside) if odd else inside)


def _of_100(freedom: int) -> str:
    return f"{100 * by_chance(freedom):.0f} of 100 rows"


def _tell_pooled(every: Sequence[Evidence]) -> list[str]:
    lines = []
    for protocol, recipe in {it.protocol: it.recipe for it in every}.items():
        whole, fixed = (pooled_over_seeds(every, protocol, drawn) for drawn in (True, False))
        told = [f"{100 * fixed.deviation:.2f} over {counted(fixed.arms, 'arm')}"] if fixed else []
        if whole and whole != fixed:
            told.append(f"{100 * whole.deviation:.2f} over {counted(whole.arms, 'arm')} with those that are drawn anew")
        if fixed and fixed.freedom >= LEAST_FREEDOM:
            usual, most = (f"{100 * fixed.error(count):.2f}" for count in (fixed.usual_seeds, fixed.seeds))
            word = "first" if len(told) > 1 else "deviation"
            more = f", of {fixed.seeds} seeds {most}" if fixed.seeds != fixed.usual_seeds else ""
            told[-1] += (
                f". By the {word}, which has {fixed.freedom} degrees of freedom, a difference of two means of "
                f"{fixed.usual_seeds} seeds has a standard error of {usual}{more}, and no difference at all gets yes "
                f"or no in {_of_100(fixed.freedom)}"
            )
        lines += [f"- **{recipe}**: {', '.join(told)}."] if told else []
    return lines


# for people


def tell_claims(every: Sequence[Evidence]) -> str:
    """The rule, how far seeds spread, and the table, as Markdown."""
    head = ["claim", "network", "the paper", "here, in points", "standard errors", "seeds that agree", "holds"]
    rows = [[row.says, row.network, row.paper, row.here, row.errors, row.agree, row.holds] for row in judge_all(every)]
    rule = (
        "Made from the data of the experiments below alone. Differences are taken seed by seed, in points of test "
        "accuracy: mean ± standard deviation (seeds), and how many standard errors the mean is away from zero. Holds "
        f"is *yes* from {STANDARD_ERRORS} on, *no* from -{STANDARD_ERRORS} down, and *not clear* between, or with "
        f"fewer than two seeds. Alphas recover if the training accuracy ends within {100 * NEAR:.0f} point of that "
        "without gates: *yes* if it does in all seeds, *no* if in none. The same for widths with one peak: most are "
        "more than half of the spaces, and a peak is a local maximum of a width's chances, by the chain; if filling "
        "dips of up to 5 points between peaks changes the verdict, it is *not clear*. *The paper* has the same "
        "differences from its own tables or text, on ImageNet, each at a share of the MACs of the network that was "
        "pruned there, MobileNetV2 1.5x (672M) or ResNet-50 (4.1G): of table 6 those at the share nearest to ours, if "
        "it is at most a quarter larger or smaller; of the others the only one.\n\n"
        "The standard error of n seeds is s · √(2 / n), s being the deviation over seeds pooled over the arms of a "
        "recipe, as below: one number for all arms, as if they spread alike. Random widths and direct samples are "
        "drawn anew for each seed and spread more: their rows, and those of a recipe with fewer than "
        f"{LEAST_FREEDOM} degrees of freedom, have the deviation of their own differences / √n. Of three seeds that is "
        f"itself so uncertain that no difference at all gets yes or no in {_of_100(2)} (by Student's t); of two it "
        f"would be {_of_100(1)}, so these are *not clear*. Many rows have the same cells on one side (DMCP at half of "
        "the MACs), and share their luck.\n"
    )
    start = "Standard deviation of an accuracy over seeds, in points, pooled over arms with two or more seeds:\n"
    told, repeated = _tell_pooled(every), tell_repeated(every)
    twice = (
        "Cells that were run more than once, so that they have several figures, in %. Each table has its own, and a "
        "claim goes by its experiment's; the deviations above have the first.\n"
    )
    parts = [rule, *([start, *told, ""] if told else []), *([twice, *repeated, ""] if repeated else [])]
    return "\n".join([*parts, table([head, *rows])])
