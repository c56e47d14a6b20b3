"""Methods of one's own, and given widths: the page's example is run as it stands, and mistakes get a sentence."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from planted import planted_problem
from typed import command

from dmcp.budget import spent_shares
from dmcp.compare import runner
from dmcp.compare.methods import METHODS, PEERS, Method, Own, Start, blamed, find_method, prepare, settle, title
from dmcp.compare.problem import Choice, Problem
from dmcp.compare.runner import read_names
from dmcp.errors import BudgetError, DmcpError, TrainingError
from dmcp.sampling import FILLED, uniform

PAGE = (Path(__file__).parents[1] / "docs" / "compare.md").read_text()
EXAMPLE, OWN_LOSS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
HAND = {"layer2.0.conv1": 16, "layer3.0.conv1": 40}  # 74.7 % of the MACs
MISTAKES = """
from dmcp.compare.methods import Method, Start
number = 3
late = Method(lambda problem, config: None, dict, Start.PREPARED)
dmcp = Method(lambda problem, config: None, dict)

class Inner:
    def mine(problem):
        return problem.nothing
"""


@pytest.mark.slow
def test_the_methods_take_a_loss_and_a_metric_of_ones_own(tmp_path: Path) -> None:
    """The page's second block, in a process that has imported nothing yet."""
    done = subprocess.run([sys.executable, "-c", OWN_LOSS], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == ["uniform", "l1", "amc", "autoslim", "dmcp"]
    assert all(float(line.split()[-1]) < 1 for line in done.stdout.splitlines())


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the page's example and some mistakes to import."""
    (tmp_path / "mine.py").write_text(EXAMPLE)
    (tmp_path / "mistakes.py").write_text(MISTAKES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in ("mine", "mistakes"):
        sys.modules.pop(name, None)


def compare(*more: str) -> list[str]:
    return ["compare", "--model", "digits:resnet", "--data", "digits", "--device", "cpu", "--batch", "708", *more]


def own(find: Callable[[Problem], Any], method: Method | None = None) -> Choice:
    problem = planted_problem("57%")
    return settle("mine:find", method or Method(find, dict), problem, find(problem))


# as the page says


@pytest.mark.slow
def test_the_example_of_the_page_fills_a_table(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    typed = next(line.split() for line in PAGE.splitlines() if "mine:by_score" in line and "dmcp compare" in line)
    assert typed[:6] == ["dmcp", "compare", "--model", "digits:resnet", "--data", "digits"]
    (here / "hand.json").write_text(json.dumps(HAND))
    words = [*typed[1:], "--epochs", "1", "--seeds", "1", "--batch", "512", "--device", "cpu", "--out", "table"]
    words += ["--widths", "hand=hand.json", "--budget", "75%", "--json"]
    assert command(*words, "--budget", "50%", "--dry-run") == 0
    cells = [row["cell"] for row in json.loads(capfd.readouterr().out)["cells"]]
    assert {"root_macs-50%-seed0", "by_score-75%-seed0", "hand-75%-seed0"} <= {*cells}
    assert "hand-50%-seed0" not in cells  # which they exceed
    assert command(*words) == 0
    told = json.loads(capfd.readouterr().out)
    rows = {(line["method"], line["own"]): line for line in told["lines"]}
    names = ["unpruned", "uniform", "by_score", "hand", "root_macs"]
    assert [name for name, own in rows if not own] == names and [name for name, own in rows if own] == ["by_score"]
    assert rows["by_score", True]["way"] == "fine-tuned" and told["settings"]["set"]["by_score"] == {"power": 1}
    assert all(0.95 * 0.75 <= rows[name, False]["mean_share"] <= 0.75 for name in names[1:])
    choice = json.loads((here / "table" / "hand-75%-seed0" / "choice.json").read_text())
    assert choice["widths"]["widths"].items() >= HAND.items()  # as they were given


def test_the_page_has_the_defaults_of_all_methods() -> None:
    rows = dict(re.findall(r"^\| ([\w-]+) \| (–|`\w+=.*?`) \| .* \|$", PAGE, re.MULTILINE))
    for name, method in (METHODS | PEERS).items():
        config: Any = method.config()
        values = {it.name: getattr(config, it.name) for it in dataclasses.fields(config)}
        told = [f"`{key}={value!r}`" for key, value in values.items() if not dataclasses.is_dataclass(value)]
        assert rows[name] == (", ".join(told) or "–"), name


# a method that is changed

GROWING = """
from dmcp.compare.problem import Choice


def growing(problem):
    widths = problem.graph.widths({space.name: space.size // SHARE for space in problem.graph.spaces})
    return Choice(widths=widths, kept=widths)
"""


@pytest.mark.slow
def test_a_method_that_failed_may_be_mended(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = here / "mine.py"
    file.write_text(GROWING.replace("SHARE", "0"))
    words = compare("--methods", "mine:growing", "--epochs", "1", "--no-unpruned", "--seeds", "1", "--out", "table")
    assert command(*words) == 2 and "ZeroDivisionError" in capfd.readouterr().err
    file.write_text(GROWING.replace("SHARE", "2"))
    assert command(*words) == 0


# what is checked


def test_plain_widths_are_filled_up() -> None:
    problem = planted_problem("57%")
    choice = own(lambda problem: Choice(widths=problem.floor, kept=problem.floor))
    share = spent_shares(problem.budget, problem.graph, choice.widths.tensor()[None]).max().item()
    assert FILLED <= share <= 1 and choice.kept == choice.widths
    assert all(choice.widths[name] >= width for name, width in problem.floor.items())
    even = uniform(problem.graph, problem.budget, problem.floor)
    filled = own(lambda _: Choice(widths=even, kept=even)).widths
    assert spent_shares(problem.budget, problem.graph, even.tensor()[None]).max().item() >= FILLED
    assert filled == even  # nothing is left to do


def test_too_wide_is_refused_and_channels_are_left_alone() -> None:
    problem = planted_problem("57%")
    full = problem.graph.full
    with pytest.raises(BudgetError, match=r"cost 1\d\d\.\d% of the budget"):
        own(lambda _: Choice(widths=full, kept=full)).check(problem)
    widths = uniform(problem.graph, problem.budget, problem.floor)
    kept = {name: [*range(width)] for name, width in widths.items()}
    assert own(lambda it: Choice(widths=widths, kept=kept, model=it.model)).widths == widths
    wrong = kept | {next(iter(kept)): [0]}
    with pytest.raises(TrainingError, match=r"mine:find keeps 1 channels of \S+, but its width is"):
        own(lambda it: Choice(widths=widths, kept=wrong, model=it.model))


def test_what_is_no_choice_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"mine:find returned a dict: return a dmcp.compare.problem.Choice"):
        own(lambda _: {})
    tuned = Method(lambda _: None, dict, own=Own.FINE_TUNED)  # type: ignore[arg-type, return-value]
    with pytest.raises(TrainingError, match=r"its own training starts from the network that it chose in"):
        own(lambda it: Choice(widths=it.floor, kept=it.floor), tuned)


def test_errors_of_ones_own_code_are_not_ours(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    method = find_method("mistakes:Inner.mine")
    said = r"^mistakes:Inner.mine failed: AttributeError: .*nothing"
    with pytest.raises(TrainingError, match=said), blamed("mistakes:Inner.mine"):
        method.find(planted_problem("57%"), method.config())
    assert "return problem.nothing" in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError), blamed("dmcp"):
        _ = 1 / 0


def test_a_network_of_its_own_making_is_one() -> None:
    method = Method(lambda *_: None, dict, Start.PREPARED, lambda problem, config: problem.model)  # type: ignore
    with pytest.raises(TrainingError, match=r"mine:it: prepare must return a dmcp.compare.problem.Prepared, not "):
        prepare("mine:it", method, planted_problem("57%"), {})


# names


@pytest.mark.parametrize(
    ("methods", "sentence"),
    [
        ("nowhere_at_all:mine", "nowhere_at_all:mine: nowhere_at_all cannot be imported: ModuleNotFoundError"),
        ("mine:rot_macs", "There is no 'rot_macs' in mine; did you mean root_macs?"),
        ("mine.py:root_macs", "give the module as Python imports it, not a file: mine:root_macs."),
        (
            "mistakes:number",
            "mistakes:number is a int: give a dmcp.compare.methods.Method, or a function find(problem)",
        ),
        ("mistakes:late", "mistakes:late starts from a network of its own making: give Method(prepare=...)."),
        ("mistakes:dmcp", "There is another dmcp, and rows and folders go by name: give yours another one."),
        ("mine:find,mistakes:Inner.mine,mine:find", "each only once"),
    ],
)
def test_names_that_cannot_be_imported(
    here: Path, capfd: pytest.CaptureFixture[str], methods: str, sentence: str
) -> None:
    assert command(*compare("--methods", methods)) == 2
    told = capfd.readouterr().err
    assert sentence in told and told.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--set", "by_score.pover=1"], "--set: mine:by_score has no setting 'pover': did you mean power?"),
        (["--set", "root_macs.x=1"], "There is no method 'root_macs'"),
        (["--widths", "hand"], "--widths: 'hand' is not of the form NAME=FILE, like hand=widths.json."),
        (["--widths", "hand=none.json"], "none.json"),
        (["--widths", "hand=wrong.json"], "wrong.json: not a file of widths"),
        (
            ["--widths", "uniform=good.json"],
            "There is another uniform, and rows and folders go by name: give yours another one.",
        ),
        (["--widths", "hand=good.json", "--widths", "hand=good.json"], "--widths: hand is given twice"),
        (["--widths", "hand=good.json"], "--widths: hand is not inside any budget: they cost 1"),
        (["--widths", "hand=other.json"], "--widths: hand: There is no space named 'layer9': "),
        (["--widths", "hand=odd.json"], "hand: There is no space named 'x': graph.spaces (dmcp inspect) lists them."),
    ],
)
def test_mistakes_with_settings_and_widths(
    here: Path, capfd: pytest.CaptureFixture[str], more: list[str], sentence: str
) -> None:
    for name, text in (
        ("wrong", "[1]"),
        ("good", '{"layer1.0.conv1": 7}'),
        ("other", '{"layer9": 7}'),
        ("odd", '{"x": 7}'),
    ):
        (here / f"{name}.json").write_text(text)
    assert command(*compare("--methods", "uniform,mine:by_score", *more)) == 2
    told = capfd.readouterr().err
    assert sentence in told and told.count("\n") == 1


def test_titles_name_rows_and_folders() -> None:
    assert [*map(title, ("dmcp", "a.b:mine", "a:Outer.mine", "=hand"))] == ["dmcp", "mine", "Outer.mine", "hand"]
    assert runner.cell_name("a.b:mine", 3, "50%") == "mine-50%-seed3"
    assert find_method("=hand").start is Start.FRESH
    with pytest.raises(DmcpError, match="--widths NAME=FILE"):
        read_names("uniform,=../../evil")
    with pytest.raises(DmcpError, match="did you mean dmcp"):
        find_method("dmpc")
