"""Counts, times and tables as text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

FS_PER_MS = 10**12  # latency is counted in femtoseconds: ints, like all costs


def table(rows: Sequence[Sequence[str]]) -> str:
    """Cells as Markdown, the first row as head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    text = [f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows]
    return "\n".join([text[0], f"|{'|'.join('-' * (width + 2) for width in widths)}|", *text[1:], ""])


def clock(seconds: float) -> str:
    """5 s, 3 min 20 s, 2 h 05 min"""
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
    return f"{minutes // 60} h {minutes % 60:02} min"


def counted(number: int, word: str) -> str:
    """1 run, 2 runs."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def by(sizes: Sequence[int]) -> str:
    """3x224x224 for these numbers."""
    return "x".join(map(str, sizes)) or "a number"


def spread(shares: Sequence[float], sign: str = "") -> str:
    """Mean ± standard deviation (how many) in percent; empty for none. sign: "+z" for differences, which have one."""
    if not shares:
        return ""
    deviation = f" ± {100 * statistics.stdev(shares):.2f}" if len(shares) > 1 else ""
    return f"{100 * statistics.fmean(shares):{sign}.2f}{deviation} ({len(shares)})"


def between(low: str, high: str) -> str:
    """A range, or the one value."""
    return low if low == high else f"{low}–{high}"


def show_ms(ms: float) -> str:
    """Three digits with the unit that fits: 8.12 ms, 812 us, 1.2 s."""
    amount, unit = (ms / 1000, "s") if ms >= 1000 else (ms, "ms") if ms >= 1 else (1000 * ms, "us")
    return f"{amount:.0f} {unit}" if amount >= 100 else f"{amount:.3g} {unit}"


def show_count(number: float) -> str:
    """Four digits with the unit that fits: 25.56M."""
    units = ("", "k", "M", "G")
    power = int(math.log10(abs(number))) // 3 if number else 0
    power = min(max(power, 0), len(units) - 1)
    return f"{number / 1000**power:.4g}{units[power]}"


def show_bytes(amount: float) -> str:
    """Four digits with the unit that fits: 65.54 kB."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if amount >= size:
            return f"{amount / size:.4g} {unit}"
    return f"{amount:,.0f} bytes"
