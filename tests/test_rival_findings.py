"""Ways to choose widths beside DMCP's: differences seed by seed, in the mean over all budgets, and a verdict."""

from __future__ import annotations

import re
import statistics
from pathlib import Path

import pytest
from test_claims import Arms, evidence, seeds
from test_results_page import cell, page_of, put, section, study

from dmcp.paper.claims import NO, UNCLEAR, YES
from dmcp.paper.experiments import EXPERIMENTS
from dmcp.paper.page import CLAIMS
from dmcp.paper.rival_findings import ARMS, tell_rival
from dmcp.paper.tasks import cells_of

BUDGETS = ("70%", "50%", "30%", "15%")


def even(half: dict[str, dict[int, float]]) -> Arms:
    """DMCP's and uniform widths that are the same at all budgets, beside these."""
    found: Arms = {f"dmcp-even-{budget}": values for budget, values in half.items()}
    for budget in BUDGETS:
        found |= {f"dmcp-rates-{budget}": seeds(0.80, 0.81, 0.82), f"uniform-even-{budget}": seeds(0.79, 0.80, 0.81)}
    return found


def rows(text: str) -> list[list[str]]:
    return [re.split(r" *\| *", line)[1:-1] for line in text.splitlines() if line.startswith("| ")]


def test_the_mean_is_over_budgets_and_then_over_seeds() -> None:
    half = {budget: seeds(0.81, 0.82, 0.83) for budget in BUDGETS[1:]} | {"70%": seeds(0.77, 0.78, 0.82)}
    it = evidence("even", even(half))
    head, ours, same, usual = rows(tell_rival([it], it))
    assert head == [
        "mean over 70%, 50%, 30%, 15%",
        "in points",
        "at each",
        "standard errors",
        "seeds that agree",
        "holds",
    ]
    means = [(0.03 - 0.03) / 4, (0.03 - 0.03) / 4, (0.03 + 0.0) / 4]
    assert ours[0] == "Widths half-way to uniform ones are better than DMCP's."
    assert ours[1] == f"+0.25 ± {100 * statistics.stdev(means):.2f} (3)" and ours[4] == "1 of 3"
    assert ours[2] == "-2.00, +1.00, +1.00, +1.00"
    assert same[0] == "Widths half-way to uniform ones are better than uniform ones."
    assert (same[1][:5], same[4]) == ("+1.25", "3 of 3")
    assert usual[0] == "DMCP's widths are better than uniform ones." and usual[1] == "+1.00 ± 0.00 (3)"


def test_the_standard_error_is_of_all_pairs_and_pooled_over_arms() -> None:
    """All arms have a deviation of 0.01, so 12 pairs that differ by 0.01 are 0.01 / (0.01 * sqrt(2 / 12)) away."""
    it = evidence("even", even({budget: seeds(0.81, 0.82, 0.83) for budget in BUDGETS}))
    text = tell_rival([it], it)
    assert [row[3] for row in rows(text)[1:]] == ["+2.4", "+4.9", "+2.4"]
    assert "the deviation over seeds, 1.00 points over 12 arms" in text
    few = evidence("halfway", {"dmcp-half-full-50%": seeds(0.9, 0.91), "dmcp-full-50%": seeds(0.8, 0.81)})
    found = rows(tell_rival([few], few))[1][1:]
    assert found == ["+10.00 ± 0.00 (2)", "", "2 of 2", UNCLEAR]  # too few for any verdict
    other = evidence("main", {f"{arm}-50%": seeds(0.90, 0.91, 0.92) for arm in "abc"})
    assert rows(tell_rival([few, other], few))[1][4] == YES  # the deviation of its recipe


@pytest.mark.parametrize(("gain", "verdict"), [(0.02, YES), (-0.02, NO), (0.001, UNCLEAR)])
def test_a_verdict_is_that_of_claims(gain: float, verdict: str) -> None:
    half = seeds(*(value + gain for value in (0.80, 0.81, 0.82)))
    it = evidence("even", even(dict.fromkeys(BUDGETS, half)))
    assert rows(tell_rival([it], it))[1][-1] == verdict


def test_seeds_that_miss_a_budget_are_left_out() -> None:
    half = {budget: seeds(0.81, 0.82, 0.99) for budget in BUDGETS[1:]} | {"70%": seeds(0.81, 0.82)}
    it = evidence("even", even(half), missing=["dmcp-even-70%-seed2"])
    assert rows(tell_rival([it], it))[1][1] == "+1.00 ± 0.00 (2)"
    begun = evidence("even", even({"50%": seeds(0.81)}), missing=["dmcp-even-70%-seed0"])
    assert rows(tell_rival([begun], begun))[1][1:] == ["no seed has both at all of them yet", "", "", "", "missing"]


def test_later_seeds_count_and_each_budget_has_its_mean() -> None:
    arms: Arms = {}
    for budget, gain in (("50%", 0.01), ("15%", 0.02)):
        arms |= {f"dmcp-{budget}": seeds(0.8, 0.8, 0.8), f"dmcp-seeds-{budget}": {3: 0.8, 4: 0.8}}
        arms |= {f"dmcp-half-{budget}": seeds(*[0.8 + gain] * 3)}
        arms |= {f"dmcp-seeds-half-{budget}": dict.fromkeys((3, 4), 0.8 + gain), f"uniform-{budget}": seeds(*[0.7] * 5)}
    it = evidence("seeds", arms)
    head, ours, *_ = rows(tell_rival([it], it))
    assert head[0] == "mean over 50%, 15%" and ours[1:3] == ["+1.50 ± 0.00 (5)", "+1.00, +2.00"]


def test_one_budget_is_no_mean_and_other_experiments_have_none() -> None:
    it = evidence("halfway", {"dmcp-half-full-50%": seeds(0.9, 0.91), "dmcp-full-50%": seeds(0.8, 0.81)})
    head, *_ = rows(tell_rival([it], it))
    assert head == ["at 50%", "in points", "standard errors", "seeds that agree", "holds"]
    assert tell_rival([], evidence("rates", {"dmcp-rates-50%": seeds(0.9)})) == ""


def test_arms_are_those_of_the_experiments() -> None:
    it = study()
    for experiment, (_, *arms) in ARMS.items():
        names = [name for _, _, name in cells_of(it, EXPERIMENTS[experiment](it))]
        assert {one.arm for one in evidence(experiment, {}, missing=names).tested} == {*arms}


def test_the_page_has_it_beside_the_table_and_not_among_claims(tmp_path: Path) -> None:
    place = tmp_path / "results"
    put(place, "rates")
    before = page_of(place)
    assert "half-way" not in before
    cells = [
        cell("x", f"{arm}-{budget}-seed{seed}", accuracy=value)
        for arm, value in (("dmcp-even", 0.92), ("dmcp-rates", 0.9), ("uniform-even", 0.8))
        for budget in BUDGETS
        for seed in range(3)
    ]
    put(place, "even", cells=cells)
    text = page_of(place)
    assert section(text, CLAIMS) == section(before, CLAIMS)
    told = section(text, "even: cifar:resnet20")
    assert "| +2.00 ± 0.00 (3) " in told.split("| table of even |")[1] and "no test image" in told
    usual = [cell("x", f"{arm}-15%-seed{n}", accuracy=0.9 + 0.01 * n) for arm in ("dmcp", "uniform") for n in range(8)]
    put(place, "seeds", cells=usual, seeds=[*range(8)])
    assert "2.45 points over 2 arms" in section(page_of(place), "seeds: cifar:resnet20")  # of test images alone
