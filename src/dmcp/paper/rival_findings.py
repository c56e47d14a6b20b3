"""What another way to choose widths is worth: less DMCP's and less uniform ones, in the mean over all budgets."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from dmcp.paper.claims import (
    LEAST_FREEDOM,
    MISSING,
    Claim,
    Pooled,
    above,
    budgets_of,
    in_errors,
    judge,
    paired,
    pooled_over_seeds,
    tell_errors,
)
from dmcp.paper.evidence import Evidence
from dmcp.paper.own_experiments import BORDER, BORDER_LONG, BORDERED, EVEN, FULL, HALFWAY, RATES, SEEDS
from dmcp.tables import counted, points, table

_HALF, _BORDER = "Widths half-way to uniform ones", "Widths found with a border"
ARMS = {  # by experiment: what is asked about, its arm, DMCP's, uniform
    SEEDS: (_HALF, "dmcp-half", "dmcp", "uniform"),
    EVEN: (_HALF, f"dmcp-{EVEN}", f"dmcp-{RATES}", f"uniform-{EVEN}"),
    HALFWAY: (_HALF, f"dmcp-half-{FULL}", f"dmcp-{FULL}", f"uniform-{FULL}"),
    BORDER: (_BORDER, f"dmcp-{BORDER}-{RATES}", f"dmcp-{RATES}", f"uniform-{EVEN}"),
    BORDERED: (_BORDER, f"dmcp-{BORDER}", "dmcp", "uniform"),
    BORDER_LONG: (_BORDER, f"dmcp-{BORDER}-{FULL}", f"dmcp-{FULL}", f"uniform-{FULL}"),
}


def tell_rival(every: Sequence[Evidence], it: Evidence) -> str:
    """A table as Markdown; empty for experiments without such a way. every: tested by the same images."""
    if it.experiment not in ARMS:
        return ""
    what, asked, ours, same = ARMS[it.experiment]
    claims = [
        Claim(it.experiment, asked, ours, f"{what} are better than DMCP's."),
        Claim(it.experiment, asked, same, f"{what} are better than uniform ones."),
        Claim(it.experiment, ours, same, "DMCP's widths are better than uniform ones."),
    ]
    budgets = budgets_of(it, claims[0])
    alike = pooled_over_seeds(every, it.protocol, drawn=False)
    known = alike if alike and alike.freedom >= LEAST_FREEDOM else None
    several = len(budgets) > 1
    head = [f"{'mean over' if several else 'at'} {', '.join(budgets)}", "in points", *(["at each"] if several else [])]
    head += ["standard errors", "seeds that agree", "holds"]
    rows = [[claim.says, *_judge(it, claim, budgets, known)] for claim in claims]
    shown = [row if several else [*row[:2], *row[3:]] for row in rows]
    return f"{_tell_rule(known, several)}\n\n{table([head, *shown])}"


def _judge(it: Evidence, claim: Claim, budgets: Sequence[str], known: Pooled | None) -> list[str]:
    """Points, the same at each budget, standard errors, seeds that agree, and whether it holds."""
    found = [paired(it, claim, budget) for budget in budgets]
    seeds = [seed for seed in (found[0] if found else ()) if all(seed in own for own in found)]
    if not seeds:
        return ["no seed has both at all of them yet", "", "", "", MISSING]
    means = [statistics.fmean(own[seed] for own in found) for seed in seeds]
    pairs = [own[seed] for own in found for seed in seeds]
    errors = in_errors(pairs, known.deviation) if known else in_errors(means, None)
    each = [f"{100 * statistics.fmean(own[seed] for seed in seeds):+z.2f}" for own in found]
    return [points(means), ", ".join(each), tell_errors(errors), above(means), judge(errors)]


def _tell_rule(known: Pooled | None, several: bool) -> str:
    both = "that have both at all budgets" if several else "that have both"
    start = f"Differences are taken seed by seed, of seeds {both}, and judged as claims are"
    if not known:
        return f"{start}: by the deviation of their own differences."
    pairs = "n pairs (seeds times budgets, as if these were independent)" if several else "n seeds"
    return (
        f"{start}: the standard error of {pairs} is s · √(2 / n), s being the deviation over seeds, "
        f"{100 * known.deviation:.2f} points over {counted(known.arms, 'arm')} of the recipe on the same images."
    )
