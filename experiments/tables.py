"""Tables of REPORT.md, from the recorded results alone."""

from __future__ import annotations

import json
import math
import re
import statistics
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS, REPORT, CLAIMS = HERE / "results", HERE / "REPORT.md", HERE / "claims.toml"
PAGE = HERE.parent / "docs" / "performance.md"  # has the table of pruned networks
TESTED_BY_HELD_OUT = ("recipe", "rates", "even", "border")  # experiments that never look at the test images
DRAWN = ("random", "dmcp-direct")  # widths that are drawn anew for each seed spread more


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a table, the first one as its head."""
    text = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([text[0], "|---" * len(rows[0]) + "|", *text[1:], ""])


def spread(shares: Sequence[float], sign: str = "") -> str:
    """Mean ± standard deviation (how many) in percent."""
    deviation = f" ± {100 * statistics.stdev(shares):.2f}" if len(shares) > 1 else ""
    return f"{100 * statistics.fmean(shares):{sign}z.2f}{deviation} ({len(shares)})" if shares else ""


def between(numbers: Sequence[float], how: str) -> str:
    """A range, or the one value."""
    return "–".join(dict.fromkeys(format(number, how) for number in (min(numbers), max(numbers))))


def read(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """What is recorded of an experiment."""
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def rows_of(runs: Sequence[tuple[Mapping[str, Any], dict[str, Any]]]) -> list[dict[str, Any]]:
    """Settings and outcomes of runs as rows: one for each label, with differences to what it is compared with."""
    if "one_peak" in runs[0][1]:
        return [found | {"label": f"seed {found['seed']}, {found['label']}"} for _, found in runs]
    rows: dict[str, dict[str, Any]] = {it["label"]: {"label": it["label"], "against": it["against"]} for it, _ in runs}
    for label, row in rows.items():
        own, against = [found for it, found in runs if it["label"] == label], row.pop("against")
        if "recovered" in own[0]:
            row |= {key: [one[key] for one in own] for key in own[0] if key not in row}
            continue
        row |= {"accuracies": [one["accuracy"] for one in own], "seeds": [one["seed"] for one in own]}
        row |= {key: [min(one[key] for one in own), max(one[key] for one in own)] for key in ("macs", "params")}
        base = {found["seed"]: found["accuracy"] for it, found in runs if it["label"] == against}
        both = [one for one in own if one["seed"] in base]
        values = [one["accuracy"] - base[one["seed"]] for one in both]
        row |= {"above": {"of": against, "seeds": [one["seed"] for one in both], "values": values}} if both else {}
    return [*rows.values()]


def table_of(name: str, folder: Path = RESULTS) -> str:
    """The table of an experiment, of the paper's claims, of deviations over seeds, or of pruned networks."""
    if name in (made := {"claims": claims, "deviations": deviations, "pruned": pruned}):
        return made[name]()
    it = read(name, folder)
    rows = it.get("rows") or it["lines"]
    if "method" in rows[0]:
        return _methods(rows, {cell["label"].partition(" at ")[0] for cell in it.get("cells", [])})
    if "recovered" in rows[0]:
        head = ["", "MACs at first, %", "at the end, %", "training accuracy at first, %", "at the end, %", "ungated, %"]
        keys = ("first_macs", "last_macs", "first_accuracy", "recovered", "trained")
        return markdown([head, *([row["label"], *(spread(row[key]) for key in keys)] for row in rows)])
    if "one_peak" in rows[0]:
        keys = {"mean": "MACs of a draw, %", "deviation": "their deviation", "inside": "inside the budget, %"}
        keys |= {"one_peak": "one peak, %", "one_peak_filled": "dips of 5 points filled, %"}
        kinds = dict.fromkeys(row["label"].partition(", ")[2] for row in rows)
        found = [[row for row in rows if row["label"].partition(", ")[2] == kind] for kind in kinds]
        shown = [[spread([row[key] for row in own]) for key in keys] for own in found]
        return markdown(
            [["", *keys.values()], *([kind or "usual search", *more] for kind, more in zip(kinds, shown, strict=True))]
        )
    return _variants([row for row in rows if "accuracies" in row], it["macs"])


def _variants(rows: Sequence[Mapping[str, Any]], macs: int) -> str:
    of = {row["above"]["of"] for row in rows if "above" in row}
    head = ["", "accuracy, %", "points above" + (f" {next(iter(of))}" if len(of) == 1 else ""), "MACs, %"]
    cells = [head]
    for row in rows:
        above = row.get("above")
        points = spread(above["values"], "+") if above else ""
        shares = row.get("macs_share") or [count / macs for count in row.get("macs", ())]
        cells.append(
            [row["label"], spread(row["accuracies"]), f"{points}, {above['of']}" if above and len(of) > 1 else points]
        )
        cells[-1] += [between([100 * share for share in shares], ".1f") if shares else ""]
    used = [place for place in range(len(head)) if any(row[place] for row in cells[1:])]
    return markdown([[row[place] for place in used] for row in cells])


def _methods(rows: Sequence[Mapping[str, Any]], only: set[str]) -> str:
    """Networks trained by one recipe, and the way of the method's authors, each beside uniform widths."""
    cells = [["method", "MACs, %", "accuracy, %", "points above uniform", "its own training, %", "params"]]
    found = {(row["method"], row["budget"], row["own"]): row for row in rows}
    for method, budget in dict.fromkeys(key[:2] for key in found if not only or key[0] in only):
        same, own = found.get((method, budget, False)), found.get((method, budget, True))
        either, base = same or own, found.get(("uniform", budget, False))
        known = dict(zip(base["seeds"], base["accuracies"], strict=True)) if base else {}
        shown = same if same and not same["same_as"] else None
        pairs = zip(shown["seeds"], shown["accuracies"], strict=True) if shown and shown is not base else ()
        above = [value - known[seed] for seed, value in pairs if seed in known]
        accuracy = spread(shown["accuracies"]) if shown else "= uniform" if either["same_as"] else ""
        way = f"{spread(own['accuracies'])}, {own['way']}" if own else ""
        shares = between([100 * share for share in either["macs_share"]], ".1f")
        cells.append([method, shares, accuracy, spread(above, "+"), way, between(either["params"], ",")])
    return markdown(cells)


# the paper's claims


def accuracies(name: str) -> dict[tuple[str, str], dict[int, float]]:
    """By variant (with a star: trained the method's own way) and budget: what each seed has, of one results file."""
    it = read(name)
    found: dict[tuple[str, str], dict[int, float]] = {}
    for row in it["rows"]:
        if row.get("method") and row["budget"] and not row["own"] and not row["same_as"]:  # of other methods, in main
            found[row["method"], row["budget"]] = dict(zip(row["seeds"], row["accuracies"], strict=True))
    for cell in it["cells"]:
        variant, budget, seed = re.findall(r"(.+?)(?:-([^-]*\d[^-]*))??-seed(\d+)$", cell["name"])[0]
        variant = re.sub(r"-seeds(?=-|$)", "", variant)
        for star, value in (("", cell["accuracy"]), ("*", cell["own_accuracy"])):
            if value is not None:
                found.setdefault((variant + star, budget), {})[int(seed)] = value
    return found


def pools() -> dict[str, tuple[float, int, int]]:
    """By recipe: standard deviation over seeds, pooled over variants; how many these are; degrees of freedom."""
    groups: dict[str, dict[tuple[str, str], dict[int, float]]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        if "cells" in (it := read(path.stem)):
            for key, own in accuracies(path.stem).items():
                if not key[0].startswith(DRAWN):
                    known = groups.setdefault(recipe(it), {}).setdefault(key, {})
                    known |= own
    found = {}
    for name, variants in groups.items():
        several = [[*own.values()] for own in variants.values() if len(own) > 1]
        freedom = sum(len(own) - 1 for own in several)
        variance = sum((len(own) - 1) * statistics.variance(own) for own in several) / freedom
        found[name] = math.sqrt(variance), len(several), freedom
    return found


def recipe(it: Mapping[str, Any]) -> str:
    """What runs must have in common to be compared: network, lengths, and which images test."""
    images = "held-out" if it["experiment"] in TESTED_BY_HELD_OUT else "test"
    return (
        f"{it['model']}, search of {it['search_epochs']} epochs, training of {it['train']['epochs']}, {images} images"
    )


def claims() -> str:
    """Which of the paper's claims hold: differences seed by seed, judged by their standard errors."""
    pooled, head = pools(), ["claim", "the paper", "network", "here, in points", "standard errors", "agree", "holds"]
    cells = [head]
    for claim in tomllib.loads(CLAIMS.read_text())["claim"]:
        for name in claim["results"]:
            it, own = read(name), accuracies(name)
            both = [{budget for variant, budget in own if variant == claim[side]} for side in ("better", "worse")]
            budgets = sorted(both[0] & both[1], key=lambda text: -float(text[:-1])) if "{}" in claim["says"] else [""]
            for budget in budgets:
                better, worse = (_by_seed(own, claim[side], budget) for side in ("better", "worse"))
                found = [better[seed] - worse[seed] for seed in better if seed in worse]
                drawn = claim["worse"].startswith(DRAWN)
                errors = standard_errors(found, None if drawn else pooled[recipe(it)][0])
                agree = f"{sum(value > 0 for value in found)} of {len(found)}"
                paper = claim["paper"] if isinstance(claim["paper"], str) else claim["paper"].get(budget, "")
                told = "" if errors is None else f"{errors:+z.{2 if 1.95 <= abs(errors) < 2 else 1}f}"
                cells.append([claim["says"].format(budget), paper, it["model"], spread(found, "+")])
                cells[-1] += [
                    told,
                    agree,
                    "not clear" if errors is None or abs(errors) < 2 else "yes" if errors > 0 else "no",
                ]
    return markdown(cells)


def _by_seed(own: Mapping[tuple[str, str], Mapping[int, float]], wanted: str, budget: str) -> dict[int, float]:
    """Of each seed; the mean where it has several networks, of several draws."""
    found: dict[int, list[float]] = {}
    for (variant, cost), values in own.items():
        if variant.rstrip("0123456789") == wanted and budget in ("", cost):
            for seed, value in values.items():
                found.setdefault(seed, []).append(value)
    return {seed: statistics.fmean(values) for seed, values in found.items()}


def standard_errors(differences: Sequence[float], deviation: float | None) -> float | None:
    """How many standard errors a mean is away from zero; None for too few seeds.

    deviation: of an accuracy over seeds; None: that of the differences themselves, which needs three seeds.
    """
    if len(differences) < (3 if deviation is None else 2):
        return None
    both = statistics.stdev(differences) if deviation is None else math.sqrt(2) * deviation
    return statistics.fmean(differences) * math.sqrt(len(differences)) / both


def deviations() -> str:
    """How far accuracies spread over seeds, by recipe."""
    head = ["recipe", "deviation over seeds, points", "variants", "degrees of freedom"]
    return markdown([head, *([name, f"{100 * it[0]:.2f}", str(it[1]), str(it[2])] for name, it in pools().items())])


# pruned networks

PRUNED = (  # network, data; results, runs or a folder of checkpoints/, variant; ms of benchmarks/speedup.py
    ("`resnet18`, Tiny-ImageNet", "judge.jsonl", "resnet18-50-test", "dmcp taught", "42.7 → 24.3 ms", "4.8 → 4.5 ms"),
    ("`cifar:resnet20`, CIFAR-10, default", "prune-resnet20.jsonl", "cifar-resnet20-50", "dmcp", "1.05 ×", ""),
    ("`cifar:resnet20`, CIFAR-10", "main.json", "", "dmcp at 50%", "", ""),
)


def pruned() -> str:
    """Networks that were trained here, with the widths of their first seed."""
    cells = [["network, data", "MACs, %", "accuracy, %", "unpruned, %", "CPU", "H200", "widths, first seed"]]
    for name, file, runs, variant, *speeds in PRUNED:
        rows = tested(file, runs)
        own = sorted((row for row in rows if row["name"] == variant), key=lambda row: int(row["seed"]))
        shares, widths = [100 * row["macs"] for row in own], "-".join(map(str, own[0]["widths"]))
        whole = [row["accuracy"] for row in rows if row["name"] == "unpruned"]
        accuracy = spread([row["accuracy"] for row in own])
        cells.append([name, between(shares, ".1f"), accuracy, spread(whole), *speeds, widths])
    return markdown(cells)


def tested(file: str, runs: str) -> list[dict[str, Any]]:
    """Name, seed, accuracy, share of MACs and widths of networks: of run.py, judge.py or dmcp prune --seeds."""
    if file.endswith(".json"):
        it = read(file.removesuffix(".json"))
        return [
            {**cell, "name": cell["label"], "macs": cell["macs"] / it["macs"], "widths": [*cell["widths"].values()]}
            for cell in it["cells"]
        ]
    lines = [json.loads(line) for line in (RESULTS / file).read_text().splitlines()]
    if "networks" in lines[0]:
        found = {row["name"]: zip(row["accuracy"], row["macs"], strict=True) for row in lines[0]["networks"]}
        rows = [(name, seed, *it) for name, own in found.items() for seed, it in enumerate(own)]
        whole = next(macs for name, _, _, macs in rows if name == "unpruned")
        widths = json.loads((HERE.parent / "checkpoints" / runs / "widths.json").read_text())["widths"].values()
        keys = ("name", "seed", "accuracy", "macs", "widths")
        return [dict(zip(keys, (*row[:3], row[3] / whole, [*widths]), strict=True)) for row in rows]
    lines = [it | {"seed": it["job"]["seed"]} for it in lines if it["job"]["name"].startswith(runs)]
    widths = {it["seed"]: it["search"]["widths"] for it in lines if "search" in it}
    return [it["trained"] | {"seed": it["seed"], "widths": widths[it["seed"]]} for it in lines if "trained" in it]


# the report


def filled(text: str) -> str:
    """The report with its tables made anew; each stands between two marks that name it."""
    return re.sub(
        r"(<!-- table (\S+) -->\n\n).*?(\n<!-- end -->)",
        lambda found: found[1] + table_of(found[2]) + found[3],
        text,
        flags=re.DOTALL,
    )
