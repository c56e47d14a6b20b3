"""Counts, times and tables as text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

FS_PER_MS = 10**12  # latency is counted in femtoseconds, so that it is an integer like all costs


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table of these cells; the first row is its head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    head, *lines = [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([head, f"|{rule}|", *lines, ""])


def show_duration(seconds: float) -> str:
    """Return a duration as text: 5 s, 3 min 20 s, 2 h 05 min."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def counted(number: int, word: str) -> str:
    """Return a number with its noun: 1 run, 2 runs."""
    if number == 1:
        return f"1 {word}"
    return f"{number:,} {word}s"


def show_shape(sizes: Sequence[int]) -> str:
    """Return a shape as text: 3x224x224; one without sizes is a number."""
    return "x".join(map(str, sizes)) or "a number"


def show_mean(shares: Sequence[float], sign: str = "") -> str:
    """Return mean ± standard deviation (number of shares) in percent: 93.10 ± 0.25 (3); for no shares, nothing.

    sign: "+z" for differences, which are shown with their sign.
    """
    if not shares:
        return ""
    mean = f"{100 * statistics.fmean(shares):{sign}.2f}"
    if len(shares) > 1:
        mean += f" ± {100 * statistics.stdev(shares):.2f}"
    return f"{mean} ({len(shares)})"


def show_share(share: float) -> str:
    """Return a share in percent: 49.9%."""
    return f"{100 * share:.1f}".removesuffix(".0") + "%"


def show_range(low: str, high: str) -> str:
    """Return a range as text: 8–10; or one value, if both are the same."""
    if low == high:
        return low
    return f"{low}–{high}"


def show_ms(ms: float) -> str:
    """Return a time with three digits and the unit that fits: 8.12 ms, 812 us, 1.2 s."""
    amount = ms
    unit = "ms"
    if ms >= 1000:
        amount = ms / 1000
        unit = "s"
    elif ms < 1:
        amount = 1000 * ms
        unit = "us"
    if amount >= 100:  # .3g would write 1200 s as 1.2e+03 s
        return f"{amount:.0f} {unit}"
    return f"{amount:.3g} {unit}"


def show_count(number: float) -> str:
    """Return a count with four digits and the unit that fits: 25.56M."""
    units = ("", "k", "M", "G")
    power = 0
    if number:
        power = int(math.log10(abs(number))) // 3
    power = min(max(power, 0), len(units) - 1)
    return f"{number / 1000**power:.4g}{units[power]}"


def show_bytes(amount: float) -> str:
    """Return a size with four digits and the unit that fits: 65.54 kB."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if amount >= size:
            return f"{amount / size:.4g} {unit}"
    return f"{amount:,.0f} bytes"
