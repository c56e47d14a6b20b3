"""What a budget says before there is a network, read without torch."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from typing import Any

import pytest

from dmcp.budgets import (
    KINDS,
    NAMES,
    Budget,
    Limit,
    Target,
    choose_middle,
    limits_latency,
    read_budget,
    show_amount,
    show_cost,
)
from dmcp.errors import BudgetError
from dmcp.settings import SearchConfig

FS_PER_S = 10**15

COUNTS: dict[Any, tuple[str, int]] = {
    12_345: ("macs", 12_345),
    "211M": ("macs", 211_000_000),
    "1.1G": ("macs", 1_100_000_000),  # 1.1 * 1e9 in floats is 1100000000.0000002
    "90 k": ("macs", 90_000),
    "2e5": ("macs", 200_000),
    "1_000_000": ("macs", 1_000_000),
    "1": ("macs", 1),
    "macs:2m": ("macs", 2_000_000),
    "params:2M": ("params", 2_000_000),
    "memory:256kB": ("memory", 256_000),
    "memory:1 MiB": ("memory", 2**20),
    "memory:1000": ("memory", 1000),
    "traffic:20MB": ("traffic", 20_000_000),
    "traffic:1.5 GiB": ("traffic", 3 * 2**29),
    "14s": ("latency", 14 * FS_PER_S),
    "8 ms": ("latency", 8 * FS_PER_S // 10**3),
    "8.5ms": ("latency", 85 * FS_PER_S // 10**4),
    "latency:900us": ("latency", 900 * FS_PER_S // 10**6),
}
SHARES: dict[Any, tuple[str, Fraction]] = {
    0.5: ("macs", Fraction(1, 2)),
    "0.5": ("macs", Fraction(1, 2)),
    "5e-1": ("macs", Fraction(1, 2)),
    "50%": ("macs", Fraction(1, 2)),
    "12.5 %": ("macs", Fraction(1, 8)),
    1.0: ("macs", Fraction(1)),
    "params:50%": ("params", Fraction(1, 2)),
    "memory:0.5": ("memory", Fraction(1, 2)),
    "traffic:55%": ("traffic", Fraction(11, 20)),
    "latency:50%": ("latency", Fraction(1, 2)),
}
UNREADABLE = (
    *("0ms", "latency:0%", "latency:200%", "latency:5", "params:8ms"),
    *("8 MB", "params:1.5GB", "4MiB", "4.5 GFLOPs", "4.5 GMACs", "60k params", "5T", "watts:5"),
    *("traffic:0%", "traffic:8ms", "traffic", "traffic:0.5MBs"),
    *(0.0, -0.5, 1.5, float("nan"), 0, -5, "", "half", "50%,", "0%", "params:0%", "watts:5%"),
    *("1e999999999", "٣", None, True, [1], object()),
    *("50%,20%", "params:1M,params:50%", "traffic:1MB,traffic:50%", "0,5", "1,1G", "12,5%"),
)


def test_counts_and_shares_are_read_exactly() -> None:
    for spec, (kind, amount) in COUNTS.items():
        assert read_budget(spec).targets == (Target(kind, Fraction(amount), is_share=False),), spec
    for spec, (kind, share) in SHARES.items():
        assert read_budget(spec).targets == (Target(kind, share, is_share=True),), spec


def test_several_limits_and_their_text() -> None:
    budget = read_budget(" 50%, params:2k ")
    assert budget.kinds == ("macs", "params") and budget.text == "50%, params:2k"
    parsed = Budget((Limit("macs", 7), Limit("latency", 9)), "7,latency:50%")
    targets = (Target("macs", Fraction(7), is_share=False), Target("latency", Fraction(9), is_share=False))
    assert read_budget(parsed).targets == targets and read_budget(parsed).text == parsed.text
    assert parsed.kinds == ("macs", "latency") and parsed.file_name == "7-latency-50%"


def test_what_is_no_budget_is_refused() -> None:
    for spec in UNREADABLE:
        with pytest.raises(BudgetError) as caught:
            read_budget(spec)
        assert isinstance(caught.value, ValueError) and len(str(caught.value)) < 300
        if spec is not None:  # unset
            with pytest.raises(BudgetError):
                SearchConfig(budget=spec)  # type: ignore[arg-type]


def test_a_kind_that_does_not_exist_is_named_with_those_that_do() -> None:
    for spec in ("channel:50%", "50%,watts:5"):
        with pytest.raises(BudgetError) as caught:
            read_budget(spec)
        message = str(caught.value)
        assert all(kind in message for kind in KINDS)
        assert spec.rpartition(",")[2].partition(":")[0] in message


def test_budgets_of_latency_are_told_apart() -> None:
    for spec in ("8ms", "14s", "900 us", "50%,8ms", "latency:50%,params:2M"):
        assert limits_latency(spec), spec
    for spec in ("50%", 0.5, 10**6, "211M", "params:2M,memory:1MB", "50%,traffic:55%"):
        assert not limits_latency(spec), spec


def test_the_middle_of_several_budgets() -> None:
    for specs, middle in (
        (["14s", "12s", "13s"], "13s"),
        (["800us", "2 ms", "0.001s"], "0.001s"),
        (["70%", "30%", "50%"], "50%"),
        (["80%", "40%"], "40%"),
        ([0.7, "30%", "0.5"], "0.5"),
        (["1G", "90M", 5_000], "90M"),
        (["50%,params:3k", "30%,params:1k", "40%,params:2k"], "40%,params:2k"),
        (["8ms", "30%", "1M"], "30%"),  # of different kinds: as they were given
        (["60%"], "60%"),
    ):
        assert choose_middle(specs) == middle


def test_amounts_are_shown_with_their_units() -> None:
    for kind, amount, text in (
        ("macs", 1_100_000, "1,100,000 MACs"),
        ("params", 2000, "2,000 parameters"),
        ("memory", 65_540, "65.54 kB of memory"),
        ("traffic", 20_000_000, "20 MB of traffic"),
        ("latency", 8 * FS_PER_S // 10**3, "8 ms"),
    ):
        assert show_cost(kind, amount) == text and text.startswith(show_amount(kind, amount))
    assert set(KINDS) == set(NAMES)


def test_no_torch_is_imported() -> None:
    program = (
        "import sys, dmcp; from dmcp import budgets; dmcp.Budget; budgets.read_budget('50%,8ms');"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
