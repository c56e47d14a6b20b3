"""Write the tables of docs/results.md from the recorded rows.

    python -m experiments.real.page

Rows that differ only in their seed are one row of the table: their mean, and behind it the standard deviation. Rows
that were trained at a rate of their own, or tested on held-out images, chose settings; they are in no table. A method
that no network was pruned by has no column.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from dmcp.units import counted
from experiments.real.rows import RESULTS

PAGE = Path(__file__).parents[2] / "docs" / "results.md"
SPEEDS = RESULTS.with_name("speeds.jsonl")
START, END = "<!-- made by python -m experiments.real.page -->", "<!-- end -->"
CUT, ORIGINAL = "right after the cut", "original"
METHODS = ("dmcp", "dmcp-original-weights", "uniform", "sensitivity", "l2", "torch-pruning", "narrow")
PRUNES = ("dmcp", "dmcp-original-weights", "sensitivity", "l2", "torch-pruning")
NAMES = {"resnet20": "ResNet-20", "resnet56": "ResNet-56"}
Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Score:
    """One score of a network, as the table shows it."""

    test: str
    name: str
    key: str = "score"
    unit: str = "%"
    factor: float = 100.0
    digits: int = 1


SCORES = (  # in the order of the table
    Score(test="BCCD", name="mAP50-95"),
    Score(test="BCCD", name="mAP50", key="map50"),
    Score(test="Set12", name="PSNR on Set12", unit="dB", factor=1, digits=2),
    Score(test="Set12", name="PSNR on BSD68", key="bsd68", unit="dB", factor=1, digits=2),
    Score(test="CIFAR-10", name="accuracy", digits=2),
    Score(test="plates", name="plates read right"),
    Score(test="CamVid", name="mIoU"),
)


@dataclass(frozen=True)
class Setting:
    """What the rows of one line share."""

    test: str
    network: str
    budget: str
    epochs: int
    taught: bool

    @property
    def order(self) -> tuple[Any, ...]:
        """Lines are sorted by it."""
        tests = [score.test for score in SCORES]
        return tests.index(self.test), self.network, -int(self.budget[:-1]), self.epochs, self.taught

    @property
    def name(self) -> str:
        """The network and how it was fine-tuned."""
        teacher = ", taught" if self.taught else ""
        length = counted(self.epochs, "epoch")
        return f"{NAMES.get(self.network, self.network)}, {self.budget}, {length}{teacher}"


def read_rows(file: Path) -> list[Row]:
    """The recorded rows."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def select(rows: Sequence[Row], setting: Setting, row: str, method: str) -> list[Row]:
    """The rows of this name of a method, one for each seed. Not all of them depend on the fine-tuning."""
    found: dict[int, Row] = {}
    for line in rows:
        same = line["network"] == setting.network and line["test"] == setting.test
        if row != ORIGINAL:
            same &= line["budget"] == setting.budget
        if row not in (ORIGINAL, CUT, "narrow"):
            same &= (line["epochs"], line["taught"]) == (setting.epochs, setting.taught)
        if same and line["row"] == row and method in (line["method"], ""):
            found[line["seed"]] = line
    return list(found.values())


def cuts(rows: Sequence[Row], setting: Setting, method: str) -> list[Row]:
    """The networks right after the cut: those that were fine-tuned then, since each search finds its own widths."""
    commands = {row["command"] for row in trained(rows, setting, method)}
    return select([row for row in rows if row["command"] in commands], setting, CUT, method)


def trained(rows: Sequence[Row], setting: Setting, method: str) -> list[Row]:
    """The fine-tuned networks of a method; uniform widths are trained beside those of the search."""
    return select(rows, setting, method, "dmcp" if method == "uniform" else method)


def show(rows: Sequence[Row], value: Callable[[Row], float | None], digits: int) -> str:
    """The mean, and the standard deviation of seeds that differ."""
    values = [number for number in map(value, rows) if number is not None]
    if not values:
        return ""
    deviation = f" ± {stdev(values):.{digits}f}" if len(set(values)) > 1 else ""
    return f"{mean(values):.{digits}f}{deviation}"


def tables(rows: Sequence[Row], speeds: Sequence[Row]) -> str:
    """Scores, training losses and commands of all settings."""
    tests = {score.test for score in SCORES}
    rows = [row for row in rows if "lr" not in row and row["test"] in tests]
    final = [row for row in rows if row["method"] in PRUNES and row["row"] in (row["method"], "uniform")]
    settings = {Setting(*(row[key] for key in ("test", "network", "budget", "epochs", "taught"))) for row in final}
    ordered = sorted(settings, key=lambda setting: setting.order)
    return "\n\n".join([_scores(rows, speeds, ordered), _losses(rows, ordered), _commands(rows, ordered)])


def _scores(rows: Sequence[Row], speeds: Sequence[Row], settings: Sequence[Setting]) -> str:
    head = ["network, budget, fine-tuning", "score", "before", *(f"cut: {name}" for name in PRUNES), *METHODS]
    lines = [[*head, "MACs", "parameters", "ms"]]
    for setting in settings:
        of_methods = {method: trained(rows, setting, method) for method in METHODS}
        original = select(rows, setting, ORIGINAL, "")
        first = next(found[0] for found in of_methods.values() if found)
        costs = [f"{first['macs_share']:.1%}", f"{first['params'] / original[0]['params']:.1%}" if original else ""]
        times = [row for row in speeds if (row["network"], row["budget"]) == (setting.network, setting.budget)]
        costs.append(f"{times[-1]['before_ms']:.1f} → {times[-1]['ms']:.1f}" if times else "")
        for score in SCORES:
            if score.test != setting.test:
                continue
            shown = [original, *(cuts(rows, setting, method) for method in PRUNES)]

            def value(row: Row, score: Score = score) -> float | None:
                return None if score.key not in row else score.factor * row[score.key]

            cells = [show(found, value, score.digits) for found in (*shown, *of_methods.values())]
            lines.append([setting.name, f"{score.name}, {score.unit}", *cells, *costs])
    return _table(lines)


def _losses(rows: Sequence[Row], settings: Sequence[Setting]) -> str:
    lines = [["training loss at the end", *METHODS]]
    for setting in settings:
        cells = [show(trained(rows, setting, method), lambda row: row["train_loss"], 3) for method in METHODS]
        lines.append([setting.name, *cells])
    return _table(lines)


def _commands(rows: Sequence[Row], settings: Sequence[Setting]) -> str:
    lines = [["rows", "commands"]]
    of_names: dict[str, dict[str, None]] = {}  # without the teacher: a command may train with it and without
    for setting in settings:
        found = [row for row in select(rows, setting, ORIGINAL, "") if row["method"] == ORIGINAL]  # trained here
        for method in METHODS:
            found += trained(rows, setting, method)
        commands = of_names.setdefault(replace(setting, taught=False).name, {})
        commands |= dict.fromkeys(_shown(row["command"]) for row in found)
    for name, commands in of_names.items():
        lines.append([name, "<br>".join(f"`{command}`" for command in commands)])
    return _table(lines)


def _shown(command: str) -> str:
    """The command without the places that it writes to."""
    words = shlex.split(command)
    for option in ("--results", "--save"):
        if option in words:
            at = words.index(option)
            del words[at : at + 2]
    return shlex.join(words)


def _table(lines: Sequence[Sequence[str]]) -> str:
    """The lines below their head, without columns that are empty."""
    columns = [column for column in zip(*lines, strict=True) if any(column[1:])]
    if not columns:
        return ""
    head, *rest = ("| " + " | ".join(cells) + " |" for cells in zip(*columns, strict=True))
    return "\n".join([head, "|" + "---|" * len(columns), *rest])


def put(page: str, text: str) -> str:
    """The page with this text between its marks."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{text}\n\n{END}{after}"


def main() -> None:
    PAGE.write_text(put(PAGE.read_text(), tables(read_rows(RESULTS), read_rows(SPEEDS))))


if __name__ == "__main__":
    main()
