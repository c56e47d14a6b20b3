"""Claims: a verdict from pairs of seeds, whatever the order of the data, and none from data that are not there."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from typing import Any

import pytest
from test_results_page import study

from dmcp.claims import (
    BY_CHANCE,
    CLAIMS,
    MISSING,
    NO,
    RECOVERIES,
    SPREAD,
    UNCLEAR,
    YES,
    Evidence,
    Row,
    judge,
    judge_all,
    pooled,
    pooled_over_seeds,
    read_evidence,
    tell_claims,
)
from dmcp.experiments import EXPERIMENTS, cells_of

Arms = dict[str, dict[int, float]]  # accuracy by seed, by the cell's name without it


def evidence(experiment: str, arms: Arms, *, network: str = "net", order: int = 1, **changes: Any) -> Evidence:
    """Hand-made data as `dmcp paper` writes them."""
    cells = [
        {"label": name, "name": f"{name}-seed{seed}", "accuracy": value}
        for name, values in arms.items()
        for seed, value in values.items()
    ]
    data = {"experiment": experiment, "model": network, "train": {"epochs": 60}, "missing": [], "rows": []}
    return read_evidence(data | {"cells": cells[::order]} | changes, network)


def row(every: Sequence[Evidence], words: str) -> Row:
    (found,) = [row for row in judge_all(every) if words in row.says]
    return found


def seeds(*values: float) -> dict[int, float]:
    return dict(enumerate(values))


# -- the rule


@pytest.mark.parametrize(
    ("differences", "verdict"),
    [
        ([0.01, 0.02, 0.03], YES),  # mean 0.02, standard error 0.0058
        ([-0.01, -0.02, -0.03], NO),
        ([0.00, 0.01, 0.03], UNCLEAR),  # mean 0.0133, standard error 0.0088
        ([0.00, -0.01, -0.03], UNCLEAR),
        ([0.01, 0.01], YES),
        ([0.0, 0.0, 0.0], UNCLEAR),
        ([0.5], UNCLEAR),
        ([], UNCLEAR),
    ],
)
def test_two_standard_errors_make_a_verdict(differences: list[float], verdict: str) -> None:
    assert judge(differences) == verdict


@pytest.mark.parametrize("count", [2, 3])
def test_chance_alone_gives_as_many_verdicts_as_the_page_says(count: int) -> None:
    dice = random.Random(0)
    found = [judge([dice.gauss(0, 1) for _ in range(count)]) for _ in range(10_000)]
    assert sum(one != UNCLEAR for one in found) / len(found) == pytest.approx(BY_CHANCE[count], abs=0.015)


# -- pairs of seeds


def test_seeds_are_paired_and_those_of_one_arm_left_out() -> None:
    arms = {"dmcp-50%": {0: 0.90, 1: 0.70, 2: 0.50}, "dmcp-cold-50%": {2: 0.49, 1: 0.69, 0: 0.89, 7: 0.99}}
    found = row([evidence("warmup", arms)], "Warm-up helps")
    assert (found.here, found.agree, found.holds) == ("+1.00 ± 0.00 (3)", "3 of 3", YES)
    backwards = evidence("warmup", dict(reversed(arms.items())), order=-1)
    assert row([backwards], "Warm-up helps") == found
    del arms["dmcp-cold-50%"][1], arms["dmcp-50%"][2]
    one = row([evidence("warmup", arms)], "Warm-up helps")
    assert (one.here, one.agree, one.holds) == ("+1.00 (1)", "1 of 1", UNCLEAR)


def test_each_budget_and_network_has_a_row() -> None:
    arms = {
        "dmcp-50%": seeds(0.9, 0.91),
        "uniform-50%": seeds(0.8, 0.82),
        "random-50%": seeds(0.95, 0.97),
        "unpruned": seeds(0.99, 0.99),
        "uniform-100%": seeds(0.9),
    }
    both = {"name": "dmcp-50%-seed0", "label": "dmcp at 50%", "accuracy": 0.9, "own_accuracy": 0.88}
    first = evidence("main", arms, missing=["dmcp-7%-seed0"])
    other = evidence("main", {}, network="other", cells=[both])
    rows = [one for one in judge_all([first, other]) if "uniform" in one.says]
    assert [(one.network, one.says.split()[-3], one.holds) for one in rows] == [
        ("net", "100%", MISSING),
        ("net", "50%", YES),
        ("net", "7%", MISSING),
        ("other", "50%", MISSING),
    ]
    assert [one.holds for one in judge_all([first]) if "random widths at 50%" in one.says] == [NO]
    assert row([other], "slimmably").here == "-2.00 (1)"


def test_draws_of_a_search_are_one_value_of_its_seed() -> None:
    arms = {"dmcp-50%": seeds(0.9, 0.8), "dmcp-direct-50%": seeds(0.8, 0.70), "dmcp-direct1-50%": seeds(0.86, 0.72)}
    it = evidence("sampling", arms)
    assert row([it], "Expected sampling").here == "+8.00 ± 1.41 (2)"
    spread = row([it], SPREAD)
    inside = pooled([[0.8, 0.86], [0.7, 0.72]])
    assert spread.here == f"deviation inside a search {100 * inside:.2f} (2), over seeds 7.07"
    assert (spread.agree, spread.holds) == ("0 of 2 spread more", "no rule")


# -- alphas that recover


@pytest.mark.parametrize(
    ("ends", "verdict", "agree"),
    [
        ([0.985, 0.99], YES, "2 of 2"),
        ([0.98, 0.12], UNCLEAR, "1 of 2"),
        ([0.97, 0.12], NO, "0 of 2"),
        ([0.99], UNCLEAR, "1 of 1"),
    ],
)
def test_alphas_have_recovered_within_a_point(ends: list[float], verdict: str, agree: str) -> None:
    ended = {"label": "some words", "recovered": ends, "trained": [0.99] * len(ends), "last_macs": [0.5] * len(ends)}
    cells = [{"label": "some words", "name": f"recover-low-seed{seed}"} for seed in range(len(ends))]
    it = evidence("recover", {}, cells=cells, rows=[ended])
    found = row([it], RECOVERIES["recover-low"])
    assert (found.holds, found.agree) == (verdict, agree) and "MACs 50.00" in found.here
    assert row([it], RECOVERIES["recover"]).holds == MISSING


# -- how far seeds spread


def test_pooled_deviation_takes_each_cell_once_and_protocols_apart() -> None:
    usual, drawn = {"dmcp-50%": seeds(0.90, 0.92, 0.94)}, {"random-50%": seeds(0.5, 0.9), "x-50%": seeds(0.1)}
    every = [evidence("main", usual | drawn), evidence("warmup", usual)]
    longer = evidence("warmup", {"dmcp-50%": seeds(0.1, 0.9)}, train={"epochs": 200})
    whole, arms = pooled_over_seeds([*every, longer], every[0].protocol)
    variance = (2 * statistics.variance([0.90, 0.92, 0.94]) + statistics.variance([0.5, 0.9])) / 3
    assert (whole, arms) == (pytest.approx(variance**0.5), 2)
    assert pooled_over_seeds(every, every[0].protocol, drawn=False) == (pytest.approx(0.02), 1)
    text = tell_claims([*every, longer])
    assert "**net, 60 epochs**: 16.41 over 2 arms, 2.00 over the 1" in text and "**net, 200 epochs**: 56.57" in text
    assert "standard error of 1.63." in text  # 2.00 * sqrt(2 / 3)


# -- what is not there


def test_a_claim_without_data_has_a_row_that_says_so() -> None:
    rows = judge_all([])
    assert len(rows) == len(CLAIMS) + 1 + len(RECOVERIES)
    assert all(one.holds == MISSING and one.here.startswith("no data: `dmcp paper ") for one in rows)
    assert "each budget" in rows[0].says and "Standard deviation of" not in tell_claims([])
    half = row([evidence("warmup", {"dmcp-50%": seeds(0.9)})], "Warm-up helps")
    assert (half.network, half.here, half.holds) == ("net", "no seed has both yet", MISSING)


def test_unknown_experiments_and_names_change_nothing() -> None:
    strange = evidence("longer", {"dmcp-50%": seeds(0.9, 0.8)}, rows=[{"x": 1}])
    odd = evidence("full", {}, cells=[{"label": "a", "name": "no seed here"}])
    assert odd.tested == () and judge_all([strange, odd]) == judge_all([])


def test_claims_are_about_arms_that_the_experiments_have() -> None:
    it = study()
    for claim in CLAIMS:
        names = [name for _, _, name in cells_of(it, EXPERIMENTS[claim.experiment](it))]
        known = {one.arm for one in evidence(claim.experiment, {}, missing=names).tested}
        assert {claim.better.rstrip("*"), claim.worse} <= known, claim.says
    names = [name for _, _, name in cells_of(it, EXPERIMENTS["recover"](it))]
    assert {*RECOVERIES} <= {one.arm for one in evidence("recover", {}, missing=names).tested}
