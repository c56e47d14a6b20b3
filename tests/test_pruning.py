"""prune: the budget holds on the cut network, nothing of the user's changes, same seed, same bits."""

from __future__ import annotations

import copy
import functools
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import Residual, counted_macs, same, sample, state
from short_runs import SEARCH, TRAIN, Noise, prune, traced_residual
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dmcp
from dmcp import models
from dmcp.data.datasets import load
from dmcp.data.loaders import make_loader
from dmcp.errors import BudgetError, FileError
from dmcp.retraining import AS_IT_WAS, TRAINED_FIRST
from dmcp.runs.records import CUT, DMCP, ORIGINAL, UNIFORM, UNPRUNED, Row, SearchRecord
from dmcp.searching.budget import parse_budget
from dmcp.settings import Init, Retrain, SearchConfig, TrainConfig
from dmcp.tracing.graph import ChannelGraph
from dmcp.training.distillation import DistillationWarning
from dmcp.training.losses import MetricWarning, classification_loss
from dmcp.training.trained import LabelsWarning

pytestmark = pytest.mark.usefixtures("quick_commands")


@pytest.mark.parametrize("kind", list(Retrain))
@pytest.mark.parametrize("budget", ["60%", "70%,params:50%"])
def test_the_budget_holds_on_the_cut_network(kind: Retrain, budget: str) -> None:
    model, graph = traced_residual()
    before = state(model)
    result = prune(search=SearchConfig(budget=budget, epochs=2, groups=4), retrain=kind, baselines=True)
    params = sum(parameter.numel() for parameter in result.model.parameters())
    counted = {"macs": counted_macs(result.model, torch.zeros(1, *Residual.SHAPE)), "params": params}
    limits = parse_budget(budget, graph).limits
    assert all(counted[limit.kind] <= limit.target for limit in limits)
    assert max(counted[limit.kind] / limit.target for limit in limits) >= 0.9  # not just anything small
    assert [row.name for row in result.rows] == [UNPRUNED, UNIFORM, DMCP]
    full, uniform, pruned = result.rows
    assert (pruned.macs, pruned.params) == (counted["macs"], counted["params"])
    assert all({"macs": uniform.macs, "params": uniform.params}[limit.kind] <= limit.target for limit in limits)
    assert (full.macs, full.params) == (graph.macs(), graph.params())
    assert type(result.model) is Residual
    assert same(before, state(model)) and all(parameter.grad is None for parameter in model.parameters())
    assert all(name in result.table for name in (UNPRUNED, UNIFORM, DMCP, f"{pruned.macs:,}"))


def test_the_test_set_is_used_once_everything_is_trained() -> None:
    test, seen = Noise(1), list[Any]()
    hear = lambda event: seen.append((event, test.passes))  # noqa: E731
    prune(val_loader=test, baselines=True, runtime=dmcp.Runtime(on_event=hear))
    before = [passes for event, passes in seen if not isinstance(event.record, Row)]
    assert before == [2] * 11  # 4 + 1 + 3 x 2, after a trial and a look at the labels
    assert [passes for event, passes in seen if isinstance(event.record, Row)] == [3, 4, 5]
    assert [event.steps for event, _ in seen if isinstance(event.record, SearchRecord)] == [4] * 4
    stages = ["search"] * 5 + [UNPRUNED] * 2 + [UNIFORM] * 2 + [DMCP] * 2 + ["test"] * 3
    assert [event.stage for event, _ in seen] == stages


@functools.cache
def trained() -> tuple[nn.Module, ChannelGraph, list[Any]]:
    """A small trained network of digits, its graph and its loaders."""
    digits = load("digits")
    loaders = [make_loader(part, 256, train) for part, train in ((digits.train, True), (digits.test, False))]
    torch.manual_seed(0)
    model = models.build("digits:resnet", width=8)
    dmcp.train(model, loaders[0], TrainConfig(epochs=6, lr=1.6, warmup_epochs=1))
    return model, dmcp.trace(model, torch.zeros(2, 1, 8, 8)), loaders


def test_a_trained_model_teaches_itself_and_an_untrained_one_learns_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmcp.defaults._MIN_STEPS", 1)
    monkeypatch.setattr("dmcp.defaults._SEARCH_STEPS", (5, 5))
    model, _, loaders = trained()
    short = {"train": TrainConfig(epochs=1, warmup_epochs=0), "search": SearchConfig(budget="50%", epochs=1)}
    fresh = dmcp.prune(models.build("digits:resnet", width=8), *loaders, **short)
    assert [row.name for row in fresh.rows] == [UNPRUNED, DMCP] and TRAINED_FIRST in fresh.origin
    seen: list[dmcp.Event] = []
    found = dmcp.prune(model, *loaders, **short | {"search": None}, runtime=dmcp.Runtime(on_event=seen.append))
    assert [row.name for row in found.rows] == [ORIGINAL, CUT, DMCP] and AS_IT_WAS in found.origin
    assert found.rows[1].macs == found.rows[2].macs < found.rows[0].macs
    assert next(it.record.lr for it in seen if it.stage == "search") <= 0.04  # small steps
    assert found.search and found.search.log[0].alpha_lr is not None  # no warm-up
    assert found.rows[2].accuracy > fresh.rows[1].accuracy
    unclear = dmcp.Task(loss=one_against_all)
    distils = replace(short["search"], distill=True)
    with pytest.warns(DistillationWarning):
        dmcp.prune(model, *loaders, **short | {"search": distils}, task=unclear)
    for distill, learns in {None: False, "l2": True}.items():  # a teacher if the user says how to learn from it
        found = dmcp.prune(model, *loaders, **short, task=replace(unclear, distill=distill))
        assert found.search_config and not found.search_config.distill
        assert (AS_IT_WAS in found.origin) == learns and "temperature" not in found.origin
    found = dmcp.prune(model, *loaders, **short, task=dmcp.Task(loss=classification_loss()))  # clear
    assert found.search_config and found.search_config.distill and AS_IT_WAS in found.origin


def test_what_is_left_out_of_the_settings_is_chosen_for_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmcp.defaults._SEARCH_STEPS", (5, 5))
    model, graph, loaders = trained()
    results = []
    for search in (None, SearchConfig(budget="50%", epochs=2), SearchConfig(budget="50%", lr=0.01, sort=False)):
        results.append(dmcp.prune(model, *loaders, search=search, retrain="none", graph=graph))
    chosen, epochs_set, rate_set = [result.search_config for result in results]
    assert chosen and epochs_set and rate_set and results[0].train_config is None
    assert (chosen.warmup, chosen.sort, chosen.init, chosen.lr) == (0.0, True, Init.FRONT, 0.04)
    assert epochs_set == replace(chosen, epochs=2)
    assert rate_set == replace(chosen, lr=0.01, min_lr=0.001, sort=False)
    for result in results[:2]:
        assert result.search and result.search.log[0].alpha_lr is not None  # no warm-up
    lengths = [len(result.search.log) for result in results if result.search]
    assert lengths == [result.search_config.epochs * len(loaders[0]) for result in results if result.search_config]


class Blurred(Residual):
    """With a blur behind the stem: a depthwise convolution of fixed weights."""

    def __init__(self) -> None:
        super().__init__(**Residual.FULL)
        self.blur = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        nn.init.constant_(self.blur.weight, 1 / 9).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blur(self.bn0(self.stem(x)).relu())
        return self.head((self.bn4(self.conv4(self.bn3(self.conv3(x)).relu()))).mean((2, 3)))


@pytest.mark.parametrize("kind", Retrain)
def test_what_is_frozen_keeps_its_values(kind: Retrain) -> None:
    torch.manual_seed(0)
    model, still = Blurred(), ("stem", "bn0", "conv3")
    for name in still:
        model.get_submodule(name).requires_grad_(False)
    graph = dmcp.trace(model, sample(Residual.SHAPE).float())
    order = dmcp.importance(model, graph, Noise())["stem"].argsort(descending=True)
    for fresh, sort in ((None, False), (Blurred(), False), (None, True)):
        result = prune(model, search=replace(SEARCH, sort=sort), retrain=kind, task=dmcp.Task(fresh=fresh))
        small, width = result.model, result.widths["stem"]
        stem = model.stem.weight[order[:width]] if sort else model.stem.weight[:width]
        assert torch.equal(small.stem.weight, stem) and small.blur.weight.unique().tolist() == [pytest.approx(1 / 9)]
        assert sort or torch.equal(small.conv3.weight, model.conv3.weight[: result.widths["conv3"], :width])
        assert not any(it.requires_grad for name in still for it in small.get_submodule(name).parameters())


def test_frozen_channels_are_those_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a loader gives other batches after the search than before it, by which channels were sorted."""
    torch.manual_seed(0)
    model = Residual(**Residual.FULL)
    model.stem.requires_grad_(False)
    searched: list[Tensor] = []
    search = dmcp.pruning.search_widths

    def spy(job: Any) -> Any:
        selector = search(job)
        searched.append(selector.source.model.stem.weight.detach().clone())
        return selector

    monkeypatch.setattr("dmcp.pruning.search_widths", spy)
    images = TensorDataset(torch.randn(60, *Residual.SHAPE), torch.arange(60) % 5)
    for start in range(2):
        loader = DataLoader(images, 2, shuffle=True, generator=torch.Generator().manual_seed(start))
        result = prune(model, loader, search=replace(SEARCH, sort=True), retrain="scratch", teacher=None)
        assert torch.equal(result.model.stem.weight, searched[-1][: result.widths["stem"]])


def test_own_loss_metric_and_batches() -> None:
    """A dict as batch, a loss that is no classification, a metric that is no accuracy."""
    batches = [{"input": x, "wanted": x.mean(dim=(1, 2, 3))} for x, _ in Noise().batches]

    def loss(output: Tensor, batch: Any) -> Tensor:
        return (output[:, 0] - batch["wanted"]).square().mean()

    def metric(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return torch.tensor(7.0 * len(output)), len(output)

    for own, lower in ((metric, False), (dmcp.LowerIsBetter(metric), True)):
        task = dmcp.Task(loss=loss, metric=own)
        result = prune(loader=batches, val_loader=batches, search=replace(SEARCH, distill=False), task=task)
        (row,) = result.rows
        assert (row.accuracy, row.score, row.samples, row.lower_is_better) == (7, "metric", 12, lower)
        head, _, pruned, *_ = result.table.splitlines()
        assert "accuracy" not in head and ("metric (lower is better)" in head) == lower
        assert pruned.split()[-4] == "7" and "points" not in result.table
    result = prune(loader=batches, val_loader=batches, search=replace(SEARCH, distill=False), task=dmcp.Task(loss=loss))
    assert result.rows[0].accuracy == dmcp.evaluate(result.model, batches, loss) and "| loss (lower is" in result.table


@pytest.mark.parametrize("kind", dmcp.Retrain)
def test_an_own_optimizer_is_that_of_search_and_training(kind: dmcp.Retrain) -> None:
    made: list[torch.optim.Optimizer] = []

    def adam(groups: Any) -> torch.optim.Optimizer:
        made.append(torch.optim.Adam(groups))
        return made[-1]

    result = prune(retrain=kind, task=dmcp.Task(optimizer=adam))
    trial, *used = made
    assert len(used) == 2 - (kind == "none") and not trial.state and all(it.state for it in used)
    assert not same(state(result.model), state(prune(retrain=kind).model))


def test_a_metric_that_is_no_number_is_warned_of_once() -> None:
    metric = lambda output, batch: (output.sum() * math.nan, len(output))  # noqa: E731
    with pytest.warns(MetricWarning, match="dmcp: its metric is nan") as found:
        prune(task=dmcp.Task(metric=metric))
    assert len(found) == 1


def one_against_all(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """Does not show what the outputs are."""
    return (output.exp().sum(1).log() - output.gather(1, batch[1][:, None])[:, 0]).mean()


def test_an_own_loss_that_shows_nothing_is_warned_of_distillation() -> None:
    task = dmcp.Task(loss=one_against_all)
    quiet = replace(SEARCH, distill=False)
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 1),
        ({"search": quiet}, 0),
        ({"search": replace(SEARCH, train_weights=False, warmup=0)}, 0),  # nothing is distilled
        ({"search": quiet, "teacher": "unpruned"}, 1),
        ({"search": quiet, "retrain": "slimmable"}, 1),
    ]
    model, graph = traced_residual()
    usual: dict[str, Any] = {"search": SEARCH, "train": TRAIN, "graph": graph, "task": task}
    calls = [
        (functools.partial(dmcp.prune, model, Noise(), Noise(1), **usual | options), count) for options, count in cases
    ]
    calls.append((lambda: dmcp.Searcher(dmcp.Supernet(model, graph, SEARCH.groups), SEARCH, 2, task=task), 1))
    calls.append((lambda: dmcp.train(copy.deepcopy(model), Noise(), TRAIN, task=task, teacher=model), 1))
    for call, count in calls:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            call()
        assert [it.category for it in found] == [DistillationWarning] * count
        assert all(it.filename == __file__ for it in found)  # where the user called, not a line of ours
    for known in (replace(task, distill="classes"), dmcp.Task(loss=classification_loss())):
        with warnings.catch_warnings():
            warnings.simplefilter("error", DistillationWarning)
            dmcp.prune(model, Noise(), Noise(1), **usual | {"teacher": "unpruned", "task": known})
            dmcp.train(copy.deepcopy(model), Noise(), TRAIN, task=known, teacher=model)


def test_a_network_over_the_budget_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should sampling ever fail, the count on the cut network finds it."""
    monkeypatch.setattr("dmcp.selection.expected", lambda found: found.graph.full)
    with pytest.raises(BudgetError, match="more than the"):
        prune()


# without a search, and for several budgets


@pytest.mark.parametrize("method", ["l1", "l2"])
def test_a_magnitude_cut_keeps_the_weights_of_large_channels(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, graph, loaders = trained()
    monkeypatch.setattr(dmcp.Supernet, "__init__", lambda *_: pytest.fail("a supernet was built"))
    result = dmcp.prune(model, *loaders, "50%", method=method, train=TrainConfig(epochs=1), retrain="none")
    widths = dmcp.uniform(graph, "50%", {it.name: max(1, it.size // 10) for it in graph.spaces})
    assert result.widths == widths and result.search is None
    space = next(it for it in graph.spaces if it.name == "layer1.0.conv1")
    weight = model.get_submodule(space.name).weight
    norms = weight.abs().sum(dim=(1, 2, 3)) if method == "l1" else weight.square().sum(dim=(1, 2, 3))
    kept = norms.topk(widths[space.name]).indices.sort().values
    stem = result.model.get_submodule(space.name).weight  # it also reads fewer channels
    assert len(stem) == len(kept) and any(torch.equal(weight[kept][:, place], stem[:, 0]) for place in range(8))
    assert [row.name for row in result.rows] == [ORIGINAL, method]
    assert result.rows[1].accuracy > 0.2 and "not trained" in result.origin


@pytest.mark.parametrize("method", ["sensitivity", "uniform"])
def test_without_a_search_the_channels_stay_that_the_outputs_depend_on(method: str) -> None:
    model, graph, loaders = trained()
    result = dmcp.prune(model, *loaders, "50%", method=method, retrain="none")
    scores = dmcp.importance(model, graph, loaders[0])
    kept = {name: scores[name].topk(width).indices.sort().values for name, width in result.widths.items()}
    expected = dmcp.cut(model, graph, kept, batches=loaders[0])
    parameters = dict(result.model.named_parameters())
    assert all(torch.equal(weight, parameters[name]) for name, weight in expected.named_parameters())
    assert [row.name for row in result.rows] == [ORIGINAL, method]


def test_search_settings_need_no_budget_where_prune_has_one() -> None:
    settings = SearchConfig(epochs=2, groups=4)
    result = prune(budget="60%", search=settings, retrain="none")
    expected = prune(search=replace(settings, budget="60%"), retrain="none")
    assert result.search_config == expected.search_config and result.widths == expected.widths
    several = prune(budget=["70%", "60%", "50%"], search=settings, retrain="none")
    assert [it.budget.text for it in several.by_budget.values()] == ["70%", "60%", "50%"]
    assert several.search_config.budget == "60%" and several.search_config.epochs == 2
    assert prune(search=settings, retrain="none").budget.text == "50%"

    model, graph = traced_residual()
    with pytest.raises(BudgetError, match="two budgets"):
        prune(budget="60%", search=SearchConfig(budget="50%", epochs=2))
    with pytest.raises(BudgetError, match="needs a budget"):
        dmcp.search(dmcp.Supernet(model, graph, 4), [], settings)


def test_channels_are_scored_once_for_all_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    model, graph, loaders = trained()
    expected = [dmcp.prune(model, *loaders, it, method="sensitivity", retrain="none").model for it in ("70%", "40%")]
    calls = []
    importance = dmcp.importance
    monkeypatch.setattr("dmcp.searching.importance.importance", lambda *it: calls.append(it) or importance(*it))
    result = dmcp.prune(model, *loaders, ["70%", "40%"], method="sensitivity", retrain="none", graph=graph)
    assert len(calls) == 1
    for network, of_budget in zip(expected, result.by_budget.values(), strict=True):
        assert same(state(network), state(of_budget.model))


def test_what_a_method_cuts_is_trained_like_the_rest() -> None:
    model, graph, loaders = trained()
    short = TrainConfig(epochs=2, lr=0.4, warmup_lr=0.4, warmup_epochs=0)
    result = dmcp.prune(model, *loaders, ["70%", "40%"], method="l1", train=short, baselines=["uniform"])
    names = [f"{CUT} 70%", f"{CUT} 40%", "uniform 70%", "l1 70%", "uniform 40%", "l1 40%"]
    assert [row.name for row in result.rows] == names
    rows = {row.name: row for row in result.rows}
    assert rows["l1 40%"].macs <= 0.4 * graph.macs() < rows["l1 70%"].macs <= 0.7 * graph.macs()
    assert rows["l1 40%"].accuracy > rows[f"{CUT} 40%"].accuracy and "l1 70%" in result.table
    assert [row.name for row in result.by_budget["40%"].rows] == [CUT, UNIFORM, "l1"]


def test_a_method_of_trained_networks_trains_a_fresh_one_first() -> None:
    seen: list[dmcp.Event] = []
    result = prune(method="l1", teacher="unpruned", retrain="finetune", runtime=dmcp.Runtime(on_event=seen.append))
    assert [*dict.fromkeys(event.stage for event in seen)] == [UNPRUNED, "l1", "test"]
    assert [row.name for row in result.rows] == [UNPRUNED, "l1"] and TRAINED_FIRST in result.origin


def test_one_search_gives_networks_for_several_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmcp.defaults._MIN_STEPS", 1)
    _, graph = traced_residual()
    seen: list[dmcp.Event] = []
    result = prune(
        search=None,
        budget=[0.5, "80%", "params:60%"],
        retrain="none",
        baselines=True,
        runtime=dmcp.Runtime(on_event=seen.append),
    )
    assert sum(isinstance(event.record, dmcp.SearchResult) for event in seen) == 1
    assert [*result.by_budget] == ["0.5", "80%", "params-60%"] and result.model is result.by_budget["0.5"].model
    for it in result.by_budget.values():
        (limit,), params = it.budget.limits, sum(parameter.numel() for parameter in it.model.parameters())
        spent = {"macs": graph.macs(it.widths), "params": params}[limit.kind]
        assert 0.9 * limit.target <= spent <= limit.target
        assert [row.name for row in it.rows] == [UNPRUNED, UNIFORM, DMCP] and it.search.budget == it.budget
    assert len(result.rows) == 7
    for it in result.by_budget.values():  # the steps of the search are relative to the budget that was searched
        assert it.search.log == result.search.log and it.search.log_budget == parse_budget("80%", graph)


@pytest.mark.parametrize(
    "options",
    [{"method": "l3"}, {"method": "dmcp-direct"}, {"budget": ["50%", "1%"]}, {"budget": ["50%", 0.5]}, {"budget": []}],
    ids=str,
)
def test_wrong_methods_and_budgets_are_refused_before_anything_is_trained(options: dict[str, Any]) -> None:
    seen: list[dmcp.Event] = []
    with pytest.raises(dmcp.DmcpError):
        prune(**{"search": None} | options, runtime=dmcp.Runtime(on_event=seen.append))
    assert not seen


def test_a_trained_network_with_other_labels_is_named() -> None:
    model, graph, (train, test) = trained()
    moved = [(images, (labels + 1) % 10) for images, labels in test]
    with pytest.warns(LabelsWarning):
        dmcp.prune(model, train, moved, method="uniform", graph=graph, retrain="none")


@pytest.mark.parametrize("kind", ["list", "TensorDataset"])
def test_tensors_that_were_replaced_meanwhile_are_refused(kind: str, tmp_path: Path) -> None:
    """A loader whose order is random gives other batches each time, but its tensors are the same."""
    images, labels = (torch.cat(parts) for parts in zip(*Noise(), strict=True))

    def start(pixels: Tensor, stop: bool) -> None:
        loader: Any = DataLoader(TensorDataset(pixels, labels), 4, shuffle=True)
        keeper = dmcp.Checkpointer(tmp_path, every_steps=1, stop_requested=lambda: stop)
        batches = [*zip(pixels.split(4), labels.split(4), strict=True)]
        prune(loader=batches if kind == "list" else loader, runtime=dmcp.Runtime(checkpointer=keeper))

    with pytest.raises(dmcp.StoppedError):
        start(images, stop=True)
    with pytest.raises(FileError, match="data of loader was"):
        start(images.flip(3), stop=False)
    start(images, stop=False)


def test_another_distillation_is_refused_when_a_run_goes_on(tmp_path: Path) -> None:
    def start(distill: str, stop: bool) -> None:
        task = dmcp.Task(loss=lambda output, batch: output.square().mean(), distill=distill)
        keeper = dmcp.Checkpointer(tmp_path, every_steps=1, stop_requested=lambda: stop)
        prune(task=task, runtime=dmcp.Runtime(checkpointer=keeper))

    with pytest.raises(dmcp.StoppedError):
        start("l2", stop=True)
    with pytest.raises(FileError, match="distill"):
        start("l1", stop=False)


def test_several_budgets_resume_with_the_same_bits(tmp_path: Path) -> None:
    options = {"budget": ["70%", "50%"], "retrain": "finetune", "train": replace(TRAIN, epochs=2)}
    seen = list[dmcp.Event]()
    asked = lambda: any(event.stage == "dmcp 50%" for event in seen)  # noqa: E731
    keeper = dmcp.Checkpointer(tmp_path, every_steps=1, stop_requested=asked)
    with pytest.raises(dmcp.StoppedError):
        prune(**options, runtime=dmcp.Runtime(checkpointer=keeper, on_event=seen.append))
    result = prune(**options, runtime=dmcp.Runtime(checkpointer=dmcp.Checkpointer(tmp_path)))
    whole = prune(**options)
    for name, it in whole.by_budget.items():
        assert same(state(it.model), state(result.by_budget[name].model))


@pytest.mark.parametrize("options", [{"method": "sensitivity"}, {"search": replace(SEARCH, sort=True)}])
def test_a_resumed_run_keeps_the_same_channels(options: dict[str, Any], tmp_path: Path) -> None:
    """Stopped while it trains: the loader shuffles, yet the scores are those of the same samples."""
    images, labels = torch.randn(12, *Residual.SHAPE), torch.arange(12) % 5
    model, graph = traced_residual()

    def start(folder: Path, stop: bool) -> Any:
        torch.manual_seed(1)
        loader = DataLoader(TensorDataset(images, labels), 4, shuffle=True)
        keeper = dmcp.Checkpointer(folder, every_steps=1, stop_requested=lambda: stop)
        settings = {"search": SEARCH, "train": TRAIN, "retrain": "finetune", "teacher": None, "graph": graph} | options
        return dmcp.prune(model, loader, loader, runtime=dmcp.Runtime(checkpointer=keeper), **settings)

    whole = start(tmp_path / "whole", stop=False)
    for _ in range(3):
        with pytest.raises(dmcp.StoppedError):
            start(tmp_path / "resumed", stop=True)
    resumed = start(tmp_path / "resumed", stop=False)
    assert same(state(resumed.model), state(whole.model))
