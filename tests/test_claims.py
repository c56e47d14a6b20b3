"""Claims: a verdict from pairs of seeds, whatever the order of the data, and none from data that are not there."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import pytest
from test_results_page import study

from dmcp.methods import METHODS
from dmcp.paper.claims import (
    CLAIMS,
    MISSING,
    NO,
    PEAKS,
    RECOVERIES,
    SPREAD,
    UNCLEAR,
    YES,
    Row,
    by_chance,
    in_errors,
    judge,
    judge_all,
    pooled_over_seeds,
    tell_claims,
)
from dmcp.paper.evidence import PAPER, PEERS, Evidence, gains, paper_says, read_evidence
from dmcp.paper.experiments import ALL, EXPERIMENTS
from dmcp.paper.tasks import cells_of
from dmcp.tables import pooled
from dmcp.training import TrainConfig

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
    ("differences", "deviation", "errors", "verdict"),
    [
        ([0.01, 0.02, 0.03], None, 3.46, YES),  # standard error 0.0058
        ([-0.01, -0.02, -0.03], None, -3.46, NO),
        ([0.00, 0.01, 0.03], None, 1.51, UNCLEAR),  # standard error 0.0088
        ([0.00, -0.01, -0.03], None, -1.51, UNCLEAR),
        ([0.01, 0.01, 0.01], None, float("inf"), YES),
        ([0.01, 0.011], None, None, UNCLEAR),  # two that are alike by luck
        ([0.0, 0.0, 0.0], None, 0.0, UNCLEAR),
        ([0.00, 0.01, 0.03], 0.006, 2.72, YES),  # standard error 0.0049
        ([0.01, 0.02, 0.03], 0.02, 1.22, UNCLEAR),
        ([-0.02, -0.02], 0.01, -2.0, NO),  # standard error 0.01
        ([0.5], 0.01, None, UNCLEAR),
        ([], None, None, UNCLEAR),
    ],
)
def test_two_standard_errors_make_a_verdict(
    differences: list[float], deviation: float | None, errors: float | None, verdict: str
) -> None:
    found = in_errors(differences, deviation)
    assert found is None if errors is None else found == pytest.approx(errors, abs=0.005)
    assert judge(found) == verdict


@pytest.mark.parametrize("count", [3, 4, 7])
def test_chance_alone_gives_as_many_verdicts_as_the_page_says(count: int) -> None:
    dice = random.Random(0)
    found = [judge(in_errors([dice.gauss(0, 1) for _ in range(count)], None)) for _ in range(10_000)]
    assert sum(one != UNCLEAR for one in found) / len(found) == pytest.approx(by_chance(count - 1), abs=0.015)
    assert by_chance(1000) == pytest.approx(0.0458, abs=0.0001)  # as for the normal distribution, and a little more


def test_a_row_has_the_pooled_error_of_its_recipe_unless_widths_are_drawn() -> None:
    arms = {f"{arm}-50%": seeds(0.90, 0.91, 0.92) for arm in ("dmcp", "uniform", "other")}  # deviation 0.01 each
    arms |= {"uniform-50%": seeds(0.88, 0.89, 0.90), "random-50%": seeds(0.88, 0.891, 0.90)}
    several = evidence("main", arms)
    assert pooled_over_seeds([several], several.protocol, drawn=False).freedom == 6  # type: ignore[union-attr]
    assert (
        row([several], "uniform widths").errors == "+2.4"
    )  # 0.02 / (0.01 * sqrt(2 / 3)), though all differences are alike
    assert row([several], "random widths").errors == "+59.0"  # 0.01967 / (0.00058 / sqrt(3)): its own
    few = evidence("main", {name: own for name, own in arms.items() if name != "other-50%"})  # 4 degrees
    assert row([few], "uniform widths").errors == "beyond +100" and row([few], "uniform widths").holds == YES


# -- what is claimed

DIRECTIONS = (  # experiment, the better cells, the worse ones, words of the sentence, the paper's points
    (
        "main",
        "dmcp-50%",
        "uniform-50%",
        "DMCP is better than uniform widths at 50%",
        "MobileNetV2: +1.2 at 45 %; ResNet-50: +1.6 at 54 %",
    ),
    (
        "seeds",
        "dmcp-15%",
        "uniform-15%",
        "DMCP is better than uniform widths at 15%, more seeds",
        "MobileNetV2: +2.2 at 14 %",
    ),
    ("main", "dmcp-50%", "random-50%", "DMCP is better than random widths at 50%", ""),
    ("main", "dmcp-50%", "amc-50%", "DMCP is better than AMC at 50%", "none near; nearest MobileNetV2: +1.4 at 31 %"),
    ("main", "dmcp-50%", "metapruning-50%", "DMCP is better than MetaPruning at 50%", "ResNet-50: +0.8 at 54 %"),
    ("main", "dmcp-50%", "autoslim-50%", "DMCP is better than AutoSlim at 50%", "MobileNetV2: +0.4 at 45 %"),
    ("main", "dmcp-50%", "slimming-50%", "DMCP is better than slimming at 50%", ""),
    ("sampling", "dmcp-50%", "dmcp-direct-50%", "Expected sampling is better than the mean", "above best and worst"),
    ("scale", "dmcp-wide-500", "dmcp-50%", "1.5 times as wide", "+0.1 at 9 %, +0.4 at 31 %"),
    ("warmup", "dmcp-50%", "dmcp-cold-50%", "Warm-up helps", "+0.8"),
    ("sandwich", "dmcp-50%", "dmcp-sandwich-50%", "The variant sandwich rule is better", "+0.7"),
    ("scheme", "dmcp-frozen-50%", "dmcp-budget-only-50%", "The task loss helps", ""),
    ("scheme", "dmcp-frozen-50%", "dmcp-budget-random-50%", "better than random ones moved by the budget", "+9.4"),
    ("scheme", "dmcp-50%", "dmcp-frozen-50%", "Weights that are updated", "+1.2"),
    ("pretrained", "dmcp-50%", "dmcp-pretrained-50%", "better than pre-trained weights (", "+0.6"),
    ("pretrained", "dmcp-50%", "dmcp-sorted-50%", "with sorted channels", ""),
    ("bernoulli", "dmcp-50%", "dmcp-bernoulli-50%", "Bernoulli gates are worse", "+2.3"),
)


@pytest.mark.parametrize(("experiment", "better", "worse", "words", "there"), DIRECTIONS)
def test_each_claim_holds_one_way_only(experiment: str, better: str, worse: str, words: str, there: str) -> None:
    high, low = seeds(0.92, 0.93, 0.94), seeds(0.90, 0.91, 0.921)
    found = row([evidence(experiment, {better: high, worse: low})], words)
    assert (found.here, found.agree, found.holds) == ("+1.97 ± 0.06 (3)", "3 of 3", YES)
    assert found.paper.startswith(there) and bool(found.paper) == bool(there)
    assert row([evidence(experiment, {better: low, worse: high})], words).holds == NO


def test_slimmable_training_is_compared_with_the_same_widths_from_scratch() -> None:
    cells = [{"name": f"dmcp-50%-seed{n}", "label": "", "accuracy": 0.9, "own_accuracy": 0.92} for n in range(3)]
    found = row([evidence("main", {}, cells=cells)], "DMCP trained slimmably")
    assert (found.here, found.holds, found.paper) == ("+2.00 ± 0.00 (3)", YES, "MobileNetV2: +1.1 at 45 %")


def test_all_claims_are_in_these_tests() -> None:
    assert len(DIRECTIONS) + 1 == len(CLAIMS)
    assert {*PAPER} <= {(claim.better, claim.worse) for claim in CLAIMS}
    assert not [pair for pair in PAPER if gains(*pair)]  # table 6 has its own


@pytest.mark.parametrize(
    ("budget", "there"),
    [
        ("70%", "ResNet-50: +1.4 at 68 %, the other at 73 %"),  # 2.8G of 4.1G; uniform 3.0G
        ("30%", "MobileNetV2: +2.1 at 31 %; ResNet-50: +2.5 at 27 %"),
        ("15%", "MobileNetV2: +2.2 at 14 %"),  # ResNet-50's next is at 7 %
        ("100%", "none near; nearest ResNet-50: +1.4 at 68 %, the other at 73 %"),
    ],
)
def test_the_papers_gain_is_that_of_the_nearest_share(budget: str, there: str) -> None:
    assert paper_says("dmcp", "uniform", budget) == there
    assert row([evidence("main", {f"dmcp-{budget}": seeds(0.9)})], "uniform widths").paper == there


def test_a_budget_without_a_share_has_all_gains_of_the_paper() -> None:
    for budget in (None, "20M", "0%"):
        assert paper_says("dmcp", "uniform", budget).count(" at ") == 4 + 4 + 2  # two of them with another share
    assert [round(it.points, 1) for it in gains("dmcp", "metapruning")] == [1.0, 2.3, 0.8, 0.5, 0.8, 1.0]
    assert paper_says("dmcp", "random", "50%") == ""


def test_other_methods_are_read_from_the_rows_of_main() -> None:
    usual = {"own": False, "same_as": "", "accuracies": [0.8, 0.81], "seeds": [0, 2]}
    rows = [
        usual | {"method": "amc", "budget": "50%"},
        usual | {"method": "amc", "budget": "50%", "own": True, "accuracies": [0.1, 0.2]},
        usual | {"method": "slimming", "budget": "50%", "same_as": "uniform"},
        usual | {"method": "autoslim", "budget": "30%"},
        usual | {"method": "dmcp", "budget": "50%", "accuracies": [0.9, 0.9]},  # whose cells are there
    ]
    it = evidence("main", {"dmcp-50%": seeds(0.9, 0.91, 0.92), "dmcp-70%": seeds(0.9)}, rows=rows)
    found = row([it], "AMC at 50%")
    assert (found.here, found.agree) == ("+10.50 ± 0.71 (2)", "2 of 2")
    assert row([it], "AMC") == found  # no row at 70 %
    for peer in ("slimming", "AutoSlim"):
        assert row([it], peer).here == f"no data: `dmcp compare --methods {peer.lower()}` makes them"
    assert len({one.name for one in it.tested}) == len(it.tested) == 8
    with pytest.raises(ValueError, match="zip"):
        evidence("main", {}, rows=[rows[0] | {"seeds": [0]}])


# -- pairs of seeds


def test_seeds_are_paired_and_those_of_one_arm_left_out() -> None:
    arms = {"dmcp-50%": {0: 0.90, 1: 0.70, 2: 0.80}, "dmcp-cold-50%": {1: 0.69, 0: 0.89, 2: 0.79, 7: 0.99}}
    found = row([evidence("warmup", arms)], "Warm-up helps")
    assert (found.here, found.agree) == ("+1.00 ± 0.00 (3)", "3 of 3")
    backwards = evidence("warmup", dict(reversed(arms.items())), order=-1)
    assert row([backwards], "Warm-up helps") == found
    del arms["dmcp-50%"][1], arms["dmcp-50%"][2]
    one = row([evidence("warmup", arms)], "Warm-up helps")
    assert (one.here, one.agree, one.holds) == ("+1.00 (1)", "1 of 1", UNCLEAR)


def test_each_budget_and_network_has_a_row() -> None:
    arms = {
        "dmcp-50%": seeds(0.9, 0.91, 0.92),
        "uniform-50%": seeds(0.8, 0.82, 0.83),
        "random-50%": seeds(0.95, 0.97, 0.98),
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
    assert row([other], "DMCP trained slimmably").here == "-2.00 (1)"


def test_draws_of_a_search_are_one_value_of_its_seed() -> None:
    arms = {"dmcp-50%": seeds(0.9, 0.8), "dmcp-direct-50%": seeds(0.8, 0.70), "dmcp-direct1-50%": seeds(0.86, 0.72)}
    it = evidence("sampling", arms)
    assert row([it], "Expected sampling").here == "+8.00 ± 1.41 (2)"
    spread = row([it], SPREAD)
    inside = pooled([[0.8, 0.86], [0.7, 0.72]])
    assert spread.here == f"deviation inside a search {100 * inside:.2f} (2), over seeds 7.07"
    assert (spread.agree, spread.holds) == ("0 of 2 spread more", "no rule")


# -- seeds of one arm under two names


def later(first: Sequence[float], rest: Sequence[float], budget: str = "50%", arm: str = "dmcp{}") -> Arms:
    """The first seeds as in main, the others with a name of their own."""
    count = len(first)
    return {
        f"{arm.format('')}-{budget}": dict(enumerate(first)),
        f"{arm.format('-seeds')}-{budget}": {count + n: value for n, value in enumerate(rest)},
    }


EIGHT = [0.90, 0.91, 0.92, 0.93, 0.94, 0.95, 0.96, 0.88]


def test_later_seeds_are_of_the_same_arm() -> None:
    ours = later(EIGHT[:3], EIGHT[3:]) | later(EIGHT[:3], EIGHT[3:], arm="dmcp{}-half")
    it = evidence("seeds", ours, missing=["dmcp-seeds-half-15%-seed7"])
    assert {(one.arm, one.budget) for one in it.tested} == {
        ("dmcp", "50%"),
        ("dmcp-half", "50%"),
        ("dmcp-half", "15%"),
    }
    assert [one.seed for one in it.tested if (one.arm, one.is_done) == ("dmcp", True)] == [*range(8)]
    whole = pooled_over_seeds([it], it.protocol)
    assert whole and (whole.arms, whole.freedom, whole.seeds) == (2, 14, 8)
    assert whole.deviation == pytest.approx(statistics.stdev(EIGHT))
    other = evidence("seeds", {"dmcp-seedsman-50%": seeds(0.9), "seeds-50%": seeds(0.9)})
    assert {one.arm for one in other.tested} == {"dmcp-seedsman", "seeds"}


@pytest.mark.parametrize("order", [1, -1])
def test_the_claim_about_more_seeds_has_all_of_them_seed_by_seed(order: int) -> None:
    gains = [0.01, 0.02, 0.01, 0.02, 0.01, 0.02, 0.01, -0.02]
    worse = [own - gain for own, gain in zip(EIGHT, gains, strict=True)]
    arms = later(EIGHT[:3], EIGHT[3:]) | {"uniform-50%": dict(enumerate(worse))}
    arms |= later([0.8], [0.8], "15%") | {"uniform-15%": seeds(0.81, 0.82)}
    it = evidence("seeds", arms, order=order)
    most, least = [one for one in judge_all([it]) if "more seeds" in one.says]
    assert (most.says, most.network) == (
        "DMCP is better than uniform widths at 50%, more seeds than main's, which are among them (table 6).",
        "net",
    )
    assert (most.here, most.agree) == (f"+1.00 ± {100 * statistics.stdev(gains):.2f} (8)", "7 of 8")
    assert (least.here, least.agree) == ("-1.50 ± 0.71 (2)", "0 of 2")


def test_more_seeds_leave_the_differences_of_main_alone() -> None:
    arms = {"dmcp-50%": seeds(0.90, 0.91, 0.92), "uniform-50%": seeds(0.88, 0.90, 0.90)}
    usual = evidence("main", arms)
    more = evidence("seeds", later([0.90, 0.91, 0.92], EIGHT) | {"uniform-50%": seeds(0.88, 0.90, 0.90, *EIGHT)})
    alone, beside = (
        [one for one in judge_all(every) if "uniform widths" in one.says] for every in ([usual], [usual, more])
    )
    assert len(alone) == 1 and len(beside) == 2
    assert (alone[0].says, alone[0].here, alone[0].agree) == (beside[0].says, beside[0].here, beside[0].agree)


def test_the_standard_error_is_told_for_most_arms_and_for_those_with_most_seeds() -> None:
    arms: Arms = {f"{arm}-50%": seeds(0.90, 0.91, 0.92) for arm in "abc"} | later(EIGHT[:3], EIGHT[3:])
    it = evidence("main", arms)
    whole = pooled_over_seeds([it], it.protocol)
    assert whole and (whole.usual_seeds, whole.seeds) == (3, 8)
    three, eight = (f"{100 * whole.deviation * (2 / count) ** 0.5:.2f}" for count in (3, 8))
    assert f"of 3 seeds has a standard error of {three}, of 8 seeds {eight}, and no" in tell_claims([it])


# -- alphas that recover


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ("recover", "around 1 recover, at ten times the rate"),
        ("recover-slowly", "around 1 recover, at the rate"),
        ("recover-low", "around 0 recover, at ten times the rate"),
    ],
)
def test_sentences_are_of_the_arms_that_they_name(arm: str, words: str) -> None:
    others = [name for name in ("recover", "recover-slowly", "recover-low") if name != arm]
    ends = {arm: 0.99} | dict.fromkeys(others, 0.1)
    rows = [
        {"label": name, "recovered": [end] * 2, "trained": [0.99] * 2, "last_macs": [1] * 2}
        for name, end in ends.items()
    ]
    cells = [{"label": name, "name": f"{name}-seed{seed}"} for name in ends for seed in range(2)]
    it = evidence("recover", {}, cells=cells, rows=rows)
    assert [one.says for one in judge_all([it]) if "recover," in one.says and one.holds == YES] == [
        f"Random alphas {words} of a search (figure 4)."
    ]


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


# -- widths with one peak


@pytest.mark.parametrize(
    ("shares", "verdict", "agree"),
    [
        ([0.6, 0.9], YES, "2 of 2"),
        ([0.5, 0.9], UNCLEAR, "1 of 2"),  # half are not most
        ([0.5, 0.0], NO, "0 of 2"),
        ([0.9], UNCLEAR, "1 of 1"),
    ],
)
def test_most_widths_have_one_peak(shares: list[float], verdict: str, agree: str) -> None:
    rows = [{"label": f"seed {n}", "one_peak": share, "one_peak_filled": share} for n, share in enumerate(shares)]
    other = [{"start": "random", "one_peak": 0.1, "one_peak_filled": 0.9}] * 2
    it = evidence("distribution", {}, rows=[*other, *rows])
    found = row([it], PEAKS[""])
    assert (found.holds, found.agree.partition(";")[0]) == (verdict, agree)
    random_start = row([it], PEAKS["random"])  # small dips make the difference
    assert (random_start.holds, random_start.agree) == (UNCLEAR, "0 of 2; filled 2 of 2")
    assert "10.00 ± 0.00 (2) % of the spaces; with small dips filled 90.00" in random_start.here
    older = row([evidence("distribution", {}, rows=[{"label": "seed 0", "inside": 0.5}])], PEAKS["zero"])
    assert (older.holds, older.here) == (MISSING, "no seed has been counted yet")


# -- how far seeds spread


def test_pooled_deviation_takes_each_cell_once_and_protocols_apart() -> None:
    usual, drawn = {"dmcp-50%": seeds(0.90, 0.92, 0.94)}, {"random-50%": seeds(0.5, 0.9), "x-50%": seeds(0.1)}
    every = [evidence("main", usual | drawn), evidence("warmup", usual)]
    longer = evidence("warmup", {"dmcp-50%": seeds(0.1, 0.9)}, train={"epochs": 200})
    whole = pooled_over_seeds([*every, longer], every[0].protocol)
    variance = (2 * statistics.variance([0.90, 0.92, 0.94]) + statistics.variance([0.5, 0.9])) / 3
    assert whole and (whole.arms, whole.freedom, whole.seeds) == (2, 3, 3)
    assert whole.deviation == pytest.approx(variance**0.5)
    fixed = pooled_over_seeds(every, every[0].protocol, drawn=False)
    assert fixed and (fixed.deviation, fixed.arms) == (pytest.approx(0.02), 1)
    assert pooled_over_seeds(every, "other") is None
    text = tell_claims([*every, longer])
    assert "**net, 60 epochs**: 2.00 over 1 arm, 16.41 over 2 arms with those that are drawn anew.\n" in text
    assert "**net, 200 epochs**: 56.57 over 1 arm.\n" in text


@pytest.mark.parametrize(("count", "error", "chance"), [(2, "0.71", "10"), (3, "0.82", "7")])
def test_the_standard_error_is_told_by_the_seeds_that_there_are(count: int, error: str, chance: str) -> None:
    arms = {f"{arm}-50%": dict(enumerate([0.90, 0.91, 0.92][:count])) for arm in "abcde"}
    deviation = statistics.stdev([0.90, 0.91, 0.92][:count])
    text = tell_claims([evidence("main", arms, train={"epochs": 1})])
    assert f"**net, 1 epoch**: {100 * deviation:.2f} over 5 arms. By the deviation, which has {5 * count - 5}" in text
    assert (
        f"of {count} seeds has a standard error of {error}, and no difference at all gets yes or no in {chance} of"
        in text
    )
    drawn = tell_claims([evidence("main", arms | {"random-50%": seeds(0.1, 0.9)})])
    assert "with those that are drawn anew. By the first, which" in drawn


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"model_args": ["width=24"]},
        {"data": "other"},
        {"batch": 7},
        {"train": {"epochs": 61}},
        {"settings": {"amc": {"episodes": 5}}},
        {"search_epochs": 31},
        {"holdout": 0.2},
    ],
    ids=lambda change: "".join(change),
)
def test_cells_of_another_protocol_are_others(change: dict[str, Any]) -> None:
    usual = {"data": "d", "batch": 512, "settings": {}, "search_epochs": 30, "holdout": 0.1, "model_args": []}
    assert evidence("main", {}, **usual).protocol != evidence("main", {}, **usual | change).protocol
    assert evidence("main", {}, **usual).protocol == evidence("warmup", {"x": seeds(1)}, **usual).protocol


def test_cells_are_the_same_where_settings_came_later() -> None:
    """Data that were written before a field of the recipe was there have it as it was then."""
    now = {"train": json.loads(json.dumps(asdict(TrainConfig(epochs=60))))}
    before, other = ({"train": dict(now["train"])} for _ in range(2))
    del before["train"]["teacher_temperature"]
    other["train"]["teacher_temperature"] = 4.0
    first, same, apart = (evidence("main", {}, **data).protocol for data in (now, before, other))
    assert first == same != apart


# -- what is not there


def test_a_claim_without_data_has_a_row_that_says_so() -> None:
    rows = judge_all([])
    usual = [claim for claim in CLAIMS if claim.experiment in ALL]
    assert len(rows) == len(usual) + 1 + len(RECOVERIES) + len(PEAKS)
    assert len(usual) == len(CLAIMS) - 1 and not [one for one in rows if "more seeds" in one.says]  # by name only
    assert all(one.holds == MISSING and one.here.startswith("no data: `dmcp ") for one in rows)
    assert "each budget" in rows[0].says and "Standard deviation of" not in tell_claims([])
    half = row([evidence("warmup", {"dmcp-50%": seeds(0.9)})], "Warm-up helps")
    assert (half.network, half.here, half.holds) == ("net", "no seed has both yet", MISSING)


def test_unknown_experiments_and_names_change_nothing() -> None:
    strange = evidence("longer", {"dmcp-50%": seeds(0.9, 0.8)}, rows=[{"x": 1}])
    odd = evidence("full", {}, cells=[{"label": "a", "name": "no seed here"}])
    assert odd.tested == () and judge_all([strange, odd]) == judge_all([])


def test_claims_are_about_arms_that_the_experiments_have() -> None:
    it = study()
    assert {*PEERS} <= {*METHODS}
    for claim in CLAIMS:
        names = [name for _, _, name in cells_of(it, EXPERIMENTS[claim.experiment](it))]
        known = {one.arm for one in evidence(claim.experiment, {}, missing=names).tested}
        assert {claim.better.rstrip("*"), claim.worse} <= {*known, *PEERS}, claim.says
    names = [name for _, _, name in cells_of(it, EXPERIMENTS["recover"](it))]
    assert {*RECOVERIES} <= {one.arm for one in evidence("recover", {}, missing=names).tested}


def test_cells_with_several_figures_are_told_and_counted_once() -> None:
    first = evidence("warmup", {"dmcp-50%": seeds(0.91, 0.93), "dmcp-cold-50%": seeds(0.90, 0.90)})
    again = evidence("bernoulli", {"dmcp-50%": seeds(0.71, 0.93), "dmcp-bernoulli-50%": seeds(0.90, 0.90)})
    text = tell_claims([first, again])
    assert "\n- `dmcp-50%-seed0`: 91.00 in warmup; 71.00 in bernoulli.\n\n|" in text and text.count("- `") == 1
    assert row([first, again], "Warm-up helps").here == "+2.00 ± 1.41 (2)"
    assert row([first, again], "Independent Bernoulli").here == "-8.00 ± 15.56 (2)"  # each by its own experiment
    whole = pooled_over_seeds([first, again], first.protocol)
    assert whole and whole.deviation == pytest.approx(pooled([[0.91, 0.93], [0.9, 0.9], [0.9, 0.9]]))
    other = evidence("bernoulli", {"dmcp-50%": seeds(0.71)}, data="other")  # not the same cell
    assert "run more than once" not in tell_claims([first, other])


def test_the_way_of_its_own_is_told_where_it_differs() -> None:
    pairs = [{"label": "x", "name": "dmcp-50%-seed0", "accuracy": 0.9, "own_accuracy": own} for own in (0.91, 0.92)]
    every = [evidence(name, {}, cells=[cell]) for name, cell in zip(("warmup", "scheme"), pairs, strict=True)]
    told = "`dmcp-50%-seed0`: 90.00 (91.00 its own way) in warmup; 90.00 (92.00 its own way) in scheme."
    assert told in tell_claims(every)


def test_a_cell_that_is_missing_elsewhere_still_counts() -> None:
    done = evidence("warmup", {"dmcp-50%": seeds(0.91, 0.93)})
    begun = evidence("bernoulli", {}, missing=["dmcp-50%-seed0", "dmcp-50%-seed1"])
    alone = pooled_over_seeds([done], done.protocol)
    assert alone and alone == pooled_over_seeds([done, begun], done.protocol)
    assert alone == pooled_over_seeds([begun, done], done.protocol)
    assert "run more than once" not in tell_claims([done, begun])
