"""within: the smallest network that loses at most so much, decided on images that no race trains on."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import Killed, command
from nets import Residual, counted_macs
from short_runs import SEARCH, Noise, traced_residual
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dmcp
from dmcp import models
from dmcp.data.datasets import load, split
from dmcp.data.loaders import make_loader
from dmcp.errors import BudgetError, DataError, TrainingError
from dmcp.feasibility import reachable
from dmcp.request import with_held_out
from dmcp.runtime.batches import hold_out
from dmcp.searching.sampling import uniform
from dmcp.settings import SearchConfig, TrainConfig
from dmcp.tracing.widths import Widths
from dmcp.training.losses import LowerIsBetter, classification_loss
from dmcp.within import RACES, Score, choose_within, race_name

pytestmark = pytest.mark.usefixtures("quick_commands")

EXAMPLE = torch.zeros(1, *Residual.SHAPE)
Accuracy = Callable[[float], float]  # share of the MACs -> accuracy


# an oracle: what each share of the cost scores is known


class Uniform:
    """A plan of uniform widths."""

    def __init__(self, budget: dmcp.Budget) -> None:
        self.widths = uniform(traced_residual()[1], budget)

    def cut(self, graph: dmcp.ChannelGraph) -> nn.Module:
        return dmcp.cut(traced_residual()[0], graph, self.widths)


def choose(points: float, score: Accuracy, kind: str = "macs", metric: Any = None) -> Any:
    """What is chosen where the score of a network depends on its share of the cost only."""
    model, graph = traced_residual()

    def race(name: str, widths: Widths, network: nn.Module) -> Score:
        assert widths == graph.full or counted_macs(network, EXAMPLE) == graph.macs(widths)
        return Score(score(graph.cost(kind, widths) / graph.cost(kind)), samples=1000)

    ends = reachable(graph, SEARCH)
    return choose_within(points, Uniform, race, model=model, graph=graph, kind=kind, reachable=ends, metric=metric)


@pytest.mark.parametrize(("kind", "cliff"), [("macs", 0.4), ("params", 0.6), ("traffic", 0.8)])
def test_the_smallest_budget_above_a_cliff_is_found(kind: str, cliff: float) -> None:
    _, graph = traced_residual()
    planned, budget, outcome = choose(0.5, lambda share: 0.9 if share >= cliff else 0.7, kind)
    assert graph.cost(kind, planned.widths) >= cliff * graph.cost(kind)

    # A budget that is smaller by the resolution of the bisection loses too much.
    lowest = 100 * graph.cost(kind, reachable(graph, SEARCH)[0]) / graph.cost(kind)
    percent = int(budget.text.rpartition(":")[2].removesuffix("%"))
    smaller = percent - math.ceil((100 - lowest) / 2**RACES) - 1
    assert graph.cost(kind, uniform(graph, f"{kind}:{smaller}%")) < cliff * graph.cost(kind)
    assert {round(candidate.loss, 9) for candidate in outcome.candidates} == {0, 20}
    assert len(outcome.candidates) <= RACES and outcome.budget == budget.text and outcome.budget in outcome.text
    assert outcome.samples == 1000 and outcome.error == pytest.approx(100 * (0.9 * 0.1 / 1000) ** 0.5)


def test_a_loss_is_in_points_or_in_the_unit_of_a_metric() -> None:
    slope = lambda share: 0.9 - 0.02 * (1 - share)  # noqa: E731
    shares = [choose(points, slope)[2].budget for points in (0.2, 0.5, 1.0)]
    sizes = [int(share.removesuffix("%")) for share in shares]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 3
    for points, size in zip((0.2, 0.5, 1.0), sizes, strict=True):
        assert 2 * (1 - size / 100) <= points + 0.2  # a network may be smaller than its budget
    error = LowerIsBetter(lambda output, batch: 0.0)
    same = choose(0.01, lambda share: 5 - slope(share), metric=error)[2]
    assert same.budget == shares[-1] and same.error is None
    assert same.candidates[0].loss == pytest.approx(choose(1.0, slope)[2].candidates[0].loss / 100)


@pytest.mark.parametrize("worse", [0.0, float("nan")])
def test_where_every_network_loses_too_much_an_error_says_so(worse: float) -> None:
    with pytest.raises(BudgetError, match=r"90\.00|nan"):
        choose(0.5, lambda share: 0.9 if share == 1 else worse)


# held-out images


def test_a_part_of_a_loader_is_held_out() -> None:
    batches = [torch.full((2, 1), float(number)) for number in range(10)]
    kept, held_out = hold_out(batches, 0.2) or ([], [])
    assert len(held_out) == 2 and sorted(int(batch[0]) for batch in kept + held_out) == list(range(10))

    data = TensorDataset(torch.arange(50.0))
    for shuffle in (True, False):
        parts = hold_out(DataLoader(data, batch_size=4, shuffle=shuffle, drop_last=True), 0.2)
        assert parts is not None
        kept_samples = {float(x) for _ in range(3) for (batch,) in parts[0] for x in batch}
        held_out_samples = [float(x) for (batch,) in parts[1] for x in batch]
        assert len(held_out_samples) == 10 and kept_samples | set(held_out_samples) == set(range(50))
        assert not kept_samples & set(held_out_samples)
        assert held_out_samples == [float(x) for (batch,) in parts[1] for x in batch]

    for loader in ([batches[0]], Noise(), DataLoader(data, sampler=torch.utils.data.SubsetRandomSampler([1, 2]))):
        assert hold_out(loader, 0.2) is None


def test_images_that_decide_are_not_tested_on() -> None:
    train = [torch.zeros(2, 1)]
    tests = [torch.full((2, 1), float(number)) for number in range(9)]
    loaders, tested = with_held_out(train, tests)
    assert loaders.search is train and loaders.held_out is not None
    held_out = list(loaders.held_out)
    assert len(held_out) == 5 and sorted(int(batch[0]) for batch in held_out + list(tested)) == list(range(9))

    given = dmcp.Loaders(search=train, held_out=train)
    assert with_held_out(given, tests) == (given, tests)
    with pytest.raises(DataError):
        with_held_out(train, tests[:1])


class Spy:
    """A loader that notes the images that it gives, and in which stage."""

    def __init__(self, loader: Any, seen: dict[str, set[bytes]], name: str) -> None:
        self.loader = loader
        self.seen = seen
        self.name = name

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        for images, labels in self.loader:
            self.seen.setdefault(self.name, set()).update(image.numpy().tobytes() for image in images)
            yield images, labels


@functools.cache
def trained() -> tuple[nn.Module, dmcp.ChannelGraph]:
    """A small network that has learned digits."""
    loader = make_loader(load("digits").train, 128, True)
    torch.manual_seed(0)
    model = models.build("digits:resnet", width=8)
    dmcp.train(model, loader, TrainConfig(epochs=12, lr=1.6))
    return model, dmcp.trace(model, torch.zeros(2, 1, 8, 8))


def tensors(part: Any) -> list[tuple[Tensor, Tensor]]:
    return [(images.clone(), labels) for images, labels in make_loader(part, 128, False)]


@pytest.mark.usefixtures("few_steps")
def test_digits_within_a_point() -> None:
    model, graph = trained()
    digits = load("digits")
    rest, held_out = split(digits.train, 0.2)
    seen: dict[str, set[bytes]] = {}
    loaders = dmcp.Loaders(
        search=Spy(make_loader(rest, 128, False), seen, "search"),
        held_out=Spy(make_loader(held_out, 128, False), seen, "held-out"),
        train=Spy(make_loader(digits.train, 128, False), seen, "final"),
    )
    events: list[dmcp.Event] = []
    runtime = dmcp.Runtime(on_event=events.append)
    train = TrainConfig(epochs=5)
    result = dmcp.prune(model, loaders, tensors(digits.test), within=1, train=train, graph=graph, runtime=runtime)

    # The choice: on images that were not trained on, by the network that lost least.
    outcome = result.within
    assert outcome and outcome.samples == len(held_out) and outcome.text in result.table
    chosen = [candidate for candidate in outcome.candidates if candidate.budget == outcome.budget]
    assert result.budget.text == outcome.budget and chosen and chosen[0].loss <= 1
    smaller = [each for each in outcome.candidates if float(each.budget[:-1]) < float(outcome.budget[:-1])]
    assert all(each.loss > 1 for each in smaller)
    assert not seen["search"] & seen["held-out"] and seen["final"] == seen["search"] | seen["held-out"]

    # The network.
    macs = counted_macs(result.model, torch.zeros(1, 1, 8, 8))
    assert macs <= result.budget.limits[0].target < graph.macs() and macs == result.rows[-1].macs
    stages = list(dict.fromkeys(event.stage for event in events))
    races = [race_name(number) for number in range(1, 1 + len(outcome.candidates))]
    assert stages == ["search", race_name(0), *races, "dmcp", "test"]
    steps = {stage: sum(event.stage == stage for event in events) for stage in stages}
    assert steps[race_name(1)] == steps[race_name(0)] <= 0.3 * steps["dmcp"]


def test_what_within_cannot_do_is_refused_before_anything_runs() -> None:
    model, graph = trained()
    batches = tensors(load("digits").test)
    prune = functools.partial(dmcp.prune, model, batches, batches, within=0.5, graph=graph)
    both = SearchConfig(budget="50%,params:50%")
    for error, options in (
        (BudgetError, {"budget": "50%"}),
        (BudgetError, {"budget": ["latency"]}),
        (BudgetError, {"budget": "latency", "search": SearchConfig(budget="50%")}),
        (BudgetError, {"search": both}),
        (TrainingError, {"retrain": "scratch"}),
        (TrainingError, {"teacher": "unpruned"}),
        (dmcp.ArgumentError, {"within": -1.0}),
    ):
        with pytest.raises(error):
            prune(**options)
    with pytest.raises(DataError):
        dmcp.prune(model, Noise(), Noise(1), within=0.5, graph=graph)
    untrained = models.build("digits:resnet", width=8)
    with pytest.raises(TrainingError):
        dmcp.prune(untrained, batches, batches, within=0.5)


def test_a_metric_of_the_users_own_and_other_methods() -> None:
    model, graph = trained()
    train, test = tensors(load("digits").train), tensors(load("digits").test)
    options: dict[str, Any] = {"method": "l2", "retrain": "none", "teacher": None, "graph": graph}
    options["task"] = dmcp.Task(loss=classification_loss(), metric=LowerIsBetter(classification_loss()))
    result = dmcp.prune(model, train, test, "params", within=5, **options)
    assert result.within and result.within.error is None and result.budget.kinds == ("params",)
    assert not result.within.trains and "short trainings" not in result.table
    params = sum(parameter.numel() for parameter in result.model.parameters())
    assert params <= result.budget.limits[0].target < graph.params()

    milliseconds = lambda net: 1 + sum(parameter.numel() for parameter in net.parameters()) / 1000  # noqa: E731
    result = dmcp.prune(model, train, test, "latency", within=5, latency=milliseconds, **options)
    assert result.within and result.budget.kinds == ("latency",)
    assert result.latency and result.latency.held and milliseconds(result.model) < milliseconds(model)
    assert result.latency.measured_ms == pytest.approx(milliseconds(result.model), rel=1e-6)


def test_only_the_chosen_network_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Candidates that are slower than their budget are nobody's concern."""
    monkeypatch.setattr("dmcp.runs.records.LatencyOutcome.warning", property(lambda outcome: "slow"))
    model, graph = trained()
    train, test = tensors(load("digits").train), tensors(load("digits").test)
    milliseconds = lambda net: 1 + sum(parameter.numel() for parameter in net.parameters()) / 1000  # noqa: E731
    options: dict[str, Any] = {"method": "l2", "retrain": "none", "teacher": None, "graph": graph}
    with pytest.warns(UserWarning, match="slow") as caught:
        result = dmcp.prune(model, train, test, "latency", within=60, latency=milliseconds, **options)
    assert result.within and len(result.within.candidates) > 1 and len(caught) == 1


@pytest.mark.usefixtures("few_steps")
def test_a_search_begins_with_a_budget_that_is_reachable() -> None:
    """Where half the cost is out of reach, as with a constant time, nobody has asked for half."""
    model, graph = trained()
    train, test = tensors(load("digits").train), tensors(load("digits").test)
    full = sum(parameter.numel() for parameter in model.parameters())
    milliseconds = lambda net: 2 * full + sum(parameter.numel() for parameter in net.parameters())  # noqa: E731
    result = dmcp.prune(
        model, train, test, "latency", within=20, latency=milliseconds, graph=graph, retrain="none", teacher=None
    )
    assert result.search_config and result.within and result.latency and result.latency.held
    assert 67 <= float(result.search_config.budget.removeprefix("latency:").removesuffix("%")) < 100
    assert 2 * full < milliseconds(result.model) < 3 * full


# the command, and its resumption

NET = ("--model", "digits:resnet", "--model-args", "width=8", "--data", "digits", "--device", "cpu", "--quiet")


@pytest.fixture
def weights(few_steps: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    model, graph = trained()
    dmcp.save(model, graph.full, "given")
    return "given/model.safetensors"


def test_a_run_that_is_killed_in_a_race_ends_in_the_same_bits(weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmcp.defaults._SEARCH_STEPS", (8, 8))
    prune = ("prune", *NET, "--weights", weights, "--within", "8", "--epochs", "3", "--save-steps", "5")
    assert command(*prune, "--out", "whole") == 0

    save = dmcp.Checkpointer.save
    calls = []

    def dying(self: Any, step: int, *args: Any) -> None:
        save(self, step, *args)
        calls.append(self.name)
        if self.name == race_name(1):
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(dmcp.Checkpointer, "save", dying)
        with pytest.raises(Killed):
            command(*prune, "--out", "killed")
    assert calls[-1] == race_name(1) and calls.count(race_name(1)) == 1
    assert command("prune", "--resume", "killed", "--quiet") == 0

    for name in ("model.safetensors", "widths.json", "log.jsonl", "search.safetensors"):
        assert Path("whole", name).read_bytes() == Path("killed", name).read_bytes()
    whole, killed = (json.loads(Path(folder, "within.json").read_text()) for folder in ("whole", "killed"))
    assert whole.pop("seconds") > 0 and killed.pop("seconds") > 0 and whole == killed
    assert json.loads(Path("whole/settings.json").read_text())["within"] == 8
    assert whole["budget"] in Path("whole/report.md").read_text()
    assert whole["samples"] == 194 and "188 test samples" in Path("whole/report.md").read_text()  # 382 in all


def test_a_run_that_finds_no_budget_ends_with_its_reason(
    weights: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("dmcp.within.points_lost", lambda *_: 99.0)
    assert command("prune", *NET, "--weights", weights, "--within", "1", "--retrain", "none", "--out", "runs/a") == 2
    reason = capsys.readouterr().err.strip()
    assert "Allow a larger loss" in reason

    assert command("runs", "runs", "--json") == 0
    (run,) = json.loads(capsys.readouterr().out)
    assert run["state"] == "failed" and reason.endswith(run["progress"]) and "larger loss" in run["progress"]
    assert command("report", "runs/a") == 0
    page = Path("report.html").read_text()
    assert "Allow a larger loss" in page and "--resume" not in page
    assert not Path("runs/a/checkpoints").exists()
    capsys.readouterr()
    assert command("prune", "--resume", "runs/a", "--quiet") == 2
    assert "Allow a larger loss" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", [("--retrain", "scratch"), ("--teacher", "unpruned")])
def test_trainings_that_within_cannot_compare_are_refused_at_the_door(
    wrong: tuple[str, str], weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dmcp.cli.session.open_checked", lambda *_: pytest.fail("the network was built first"))
    assert command("prune", *NET, "--weights", weights, "--within", "2", *wrong) == 2


def test_a_dry_run_has_the_races(weights: str, capsys: pytest.CaptureFixture[str]) -> None:
    within = ("prune", *NET, "--weights", weights, "--within", "0.5", "--budget", "params", "--dry-run", "--json")
    assert command(*within) == 0
    stages = [stage["name"] for stage in json.loads(capsys.readouterr().out)["stages"]]
    assert stages == ["search", *(race_name(number) for number in range(RACES + 1)), "dmcp"]
    kept = ("layer3.0.downsample.0=32", "layer3.0.conv1=32", "layer2.0.conv1=16")  # half the parameters are in these
    assert command(*within, *(word for each in kept for word in ("--min-channels", each))) == 0
    facts = json.loads(capsys.readouterr().out)
    least, most = (facts["reachable"][end]["params"] for end in ("min", "max"))
    assert most / 2 < least < facts["asked"][0]["params"] < most
    for wrong in (("--budget", "50%"), ("--budget", "macs", "--budget", "params")):
        assert command("prune", *NET, "--weights", weights, "--within", "0.5", *wrong) == 2
    assert command("prune", *NET, "--within", "0.5") == 2
