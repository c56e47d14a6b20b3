"""Metrics of a whole data set, which are no mean over samples: by hand, and refused where they cannot be."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from planted import heard, planted_problem
from test_pruning import SEARCH, TRAIN, Noise, prune, traced
from torch import Tensor, nn

import dmcp
from dmcp.compare import amc, metapruning
from dmcp.errors import DataError, DmcpError, TrainingError
from dmcp.losses import (
    Accuracy,
    MetricWarning,
    check_metric,
    classification_loss,
    growing,
    plain_number,
    top1,
    whole_of,
)
from dmcp.runtime.distributed import SINGLE_PROCESS, World
from dmcp.training import Event


class Iou:
    """Mean intersection over union of the classes that occur, from one confusion matrix."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.calls: list[str] = []
        self.reset()

    def reset(self) -> None:
        self.matrix = torch.zeros(self.classes, self.classes)
        self.calls.append("reset")

    def update(self, output: Tensor, batch: Any) -> None:
        both = self.classes * batch[1].flatten() + output.argmax(dim=1).flatten()
        self.matrix += torch.bincount(both, minlength=self.classes**2).reshape(self.matrix.shape)
        self.calls.append("update")

    def compute(self) -> Any:
        hit = self.matrix.diag()
        self.calls.append("compute")
        return (hit / (self.matrix.sum(0) + self.matrix.sum(1) - hit)).nanmean()


class Right(Iou):
    """The accuracy, to compare with the one that is a mean."""

    def compute(self) -> Any:
        return self.matrix.diag().sum() / self.matrix.sum()


class Echo(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert not self.training and not torch.is_grad_enabled()
        return x


def answers(*chosen: int) -> Tensor:
    return torch.eye(2)[list(chosen)]


BATCHES = [(answers(0, 0, 1), torch.tensor([0, 0, 1])), (answers(1), torch.tensor([0])), (answers(), torch.tensor([]))]


def test_the_metric_of_all_batches_is_no_mean_of_theirs() -> None:
    metric = Iou(2)
    metric.update(*[answers(1, 1), (None, torch.tensor([0, 0]))])  # forgotten
    metric.calls.clear()
    found = dmcp.evaluate(Echo(), BATCHES, metric)
    assert found == pytest.approx((2 / 3 + 1 / 2) / 2)  # class 0: 2 of 3, class 1: 1 of 2; by batches 1 and 0
    assert metric.calls == ["reset", "update", "update", "compute"]  # what has no samples is not shown
    assert metric.matrix.tolist() == [[2, 1], [0, 1]]  # and stays, to be looked at
    assert dmcp.evaluate(Echo(), BATCHES, dmcp.LowerIsBetter(metric)) == found
    with pytest.raises(TrainingError, match="no samples"):
        dmcp.evaluate(Echo(), BATCHES[2:], metric)


@pytest.mark.parametrize("value", [0.25, np.float32(0.25), torch.tensor(0.25), torch.tensor([[0.25]])])
def test_numbers(value: Any) -> None:
    assert plain_number(value) == 0.25
    assert plain_number(2) == 2 and math.isnan(plain_number(torch.tensor(math.nan)))


class Partial:
    def reset(self) -> None: ...

    def update(self, output: Any, batch: Any) -> None: ...


class Callable(Partial):
    def __call__(self, output: Any, batch: Any) -> Any:
        return top1(output, batch)


class Giving(Iou):
    def __init__(self, value: Any) -> None:
        super().__init__(10)
        self.value = value

    def update(self, output: Any, batch: Any) -> None: ...

    def compute(self) -> Any:
        return self.value


REFUSED: list[tuple[Any, str]] = [
    (Partial(), r"The metric Partial has reset\(\) and update\(\), but no compute\(\): a metric of a whole data set"),
    (Callable(), r"The metric Callable has .* but no compute\(\)"),
    (Iou, r"The metric Iou is a class: give an object of it, Iou\(\)"),
    (Partial, r"The metric Partial has .*, but no compute\(\)"),
    ("iou", r"metric must be a function, not a str, or an object with reset\(\)"),
    (Giving(None), r"compute\(\) of a metric must return a number .*, not a NoneType: return the one that networks"),
    (Giving({"map": 0.5}), "not a dict: .* such as one of its entries"),
    (Giving(torch.ones(3)), r"not a tensor of shape \(3,\)"),
    (Giving("0.5"), "not a str"),
    (Giving(1j), "not a complex"),
    (Giving(torch.tensor(1j)), r"not a tensor of shape \(\)"),
]


@pytest.mark.parametrize(("metric", "words"), REFUSED)
def test_what_is_no_metric_is_refused_before_the_first_step(metric: Any, words: str) -> None:
    seen: list[Event] = []
    with pytest.raises(TrainingError, match=words):
        prune(task=dmcp.Task(metric=metric), runtime=dmcp.Runtime(on_event=seen.append))
    assert not seen
    with pytest.raises(TrainingError, match=words):
        dmcp.evaluate(nn.Flatten(), Noise(1), metric)
    with pytest.raises(DmcpError, match=words if metric != "iou" else "LowerIsBetter takes a metric"):
        prune(task=dmcp.Task(metric=dmcp.LowerIsBetter(metric)))


def test_a_function_with_a_reset_of_its_own_stays_one() -> None:
    def metric(output: Any, batch: Any) -> Any:
        return top1(output, batch)

    metric.reset = lambda: None  # type: ignore[attr-defined]
    assert whole_of(metric) is None and dmcp.evaluate(Echo(), BATCHES, metric) == 3 / 4


def test_the_trial_leaves_no_trace_and_the_test_is_that_of_the_result() -> None:
    metric, before = Iou(10), list[Tensor]()

    def look(event: Event) -> None:
        if event.stage == "search" and not before:
            assert metric.calls[-3:] == ["update", "compute", "reset"]  # it was tried
            before.append(metric.matrix.clone())

    result = prune(task=dmcp.Task(metric=metric), runtime=dmcp.Runtime(on_event=look))
    assert before and not before[0].any()
    (row,) = result.rows
    assert row.own_metric and not row.lower_is_better and row.samples == metric.matrix.sum()
    assert row.accuracy == dmcp.evaluate(result.model, Noise(1), Iou(10))
    assert row.accuracy != dmcp.evaluate(result.model, Noise(1))
    lower = prune(task=dmcp.Task(metric=dmcp.LowerIsBetter(Iou(10))))
    assert lower.rows[0].lower_is_better and lower.rows[0].accuracy == row.accuracy


def test_what_an_update_raises_says_how_it_was_called() -> None:
    class Named(Iou):  # as those of torchmetrics are
        def update(self, preds: Tensor, target: Tensor) -> None:
            self.matrix += (preds.argmax(dim=1) == target.flatten()).sum()

    model, graph = traced()
    with pytest.raises(AttributeError) as error:
        dmcp.prune(model, Noise(), Noise(1), graph=graph, search=SEARCH, train=TRAIN, task=dmcp.Task(metric=Named(10)))
    assert "update(output, batch)" in error.value.__notes__[0]


def test_an_object_on_several_ranks_must_say_that_it_gathers() -> None:
    check_metric(Iou(2), SINGLE_PROCESS)
    check_metric(top1, World(1, 2))
    for metric in (Iou(2), dmcp.LowerIsBetter(Iou(2))):
        with pytest.raises(TrainingError, match=r"Each of 2 ranks sees a part .* all_ranks = True"):
            check_metric(metric, World(1, 2))
    gathering = Iou(2)
    gathering.all_ranks = True  # type: ignore[attr-defined]
    check_metric(gathering, World(1, 2))


def test_an_error_grows_with_a_minus() -> None:
    metric = growing(dmcp.LowerIsBetter(Right(2)))
    assert dmcp.evaluate(Echo(), BATCHES, metric) == -3 / 4


@pytest.mark.parametrize("lower", [False, True])
def test_methods_choose_by_objects_as_by_functions(lower: bool) -> None:
    wrap: Any = dmcp.LowerIsBetter if lower else lambda metric: metric

    def told(problem: Any, find: Any, config: Any, metric: Any) -> Any:
        asked, log = heard(replace(problem, task=dmcp.Task(metric=wrap(metric))))
        widths = dict(find(asked, config).widths)
        return widths, [record["best"] for record in log if isinstance(record, dict)]

    agent = amc.AmcConfig(warmup=2, episodes=2, batches=2)
    few = metapruning.MetaPruningConfig(hidden=2, population=3, generations=1, parents=2, batches=2)
    problem = planted_problem(epochs=1)
    for find, config in ((amc.find_amc, agent), (metapruning.find_metapruning, few)):
        widths, best = told(problem, find, config, top1)
        again, same = told(problem, find, config, Right(10))
        assert widths == again and best and same == pytest.approx(best)
    with pytest.raises(TrainingError, match=r"but no compute\(\)"):
        replace(problem, task=dmcp.Task(metric=Partial()))


# -- labels of the default loss and metric

SCORES = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [0.0, 1.0, 2.0], [1.0, 0.0, 0.5]])
RIGHT = torch.tensor([0, 1, 1, 0])


def loss_of(labels: Any, scores: Tensor = SCORES) -> Tensor:
    return classification_loss()(scores, (None, labels))


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool])
def test_labels_of_any_integers_are_classes(kind: torch.dtype) -> None:
    assert loss_of(RIGHT.to(kind)) == nn.functional.cross_entropy(SCORES, RIGHT)
    assert dmcp.evaluate(Echo(), [(SCORES, RIGHT.to(kind))]) == 0.75


def test_shares_of_classes_are_right_where_the_largest_is() -> None:
    shares = torch.eye(3)[RIGHT] * 0.7 + 0.1
    assert loss_of(shares) == nn.functional.cross_entropy(SCORES, shares)
    assert dmcp.evaluate(Echo(), [(SCORES[:3], shares[:3])]) == pytest.approx(2 / 3)  # as many samples as classes
    several = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    assert dmcp.evaluate(Echo(), [(SCORES, several)]) == 0.75  # one of those that are right


def test_pixels_that_the_loss_leaves_out_are_not_counted() -> None:
    scores, labels = SCORES.T[None, :, None], RIGHT.clone()[None, None]  # one image of 1 x 4 pixels
    labels[..., 2:] = -100
    assert loss_of(labels, scores) == nn.functional.cross_entropy(SCORES[:2], RIGHT[:2])
    assert dmcp.evaluate(Echo(), [(scores, labels)]) == 1.0
    with pytest.raises(TrainingError, match="no samples"):
        dmcp.evaluate(Echo(), [(scores, torch.full_like(labels, -100))])


def test_what_is_no_number_is_no_right_answer() -> None:
    scores = SCORES.clone()
    scores[0] = math.nan  # the largest of NaNs is the first
    assert dmcp.evaluate(Echo(), [(scores, RIGHT)]) == 0.5


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (RIGHT[:, None], r"labels are 4x1 of int64, the network gives 4x3: .* shape 4 \(labels.squeeze\(1\)\)"),
        (RIGHT[:3], "labels are 3 of int64, the network gives 4x3: .* shape 4, "),
        (torch.eye(3)[RIGHT].long(), "labels are 4x3 .*argmax"),
        (RIGHT.float(), "float32.*long"),
        (RIGHT[:, None].float(), r"labels are 4x1 of float32.*squeeze\(1\).long\(\)"),
        (RIGHT.to(torch.complex64), "complex64"),
    ],
)
def test_labels_that_are_no_classes_are_refused_in_the_loss_and_in_the_test(labels: Tensor, words: str) -> None:
    with pytest.raises(DataError, match=words):
        loss_of(labels)
    with pytest.raises(DataError, match=words):
        dmcp.evaluate(Echo(), [(SCORES, labels)])


@pytest.mark.parametrize(("labels", "words"), [(RIGHT + 2, "A label is 3, but"), (RIGHT - 1, "A label is -1, but")])
def test_labels_without_an_output_are_refused_in_the_loss_and_told_in_the_test(labels: Tensor, words: str) -> None:
    with pytest.raises(DataError, match=f"{words} the network has 3 outputs"):
        loss_of(labels)
    with pytest.warns(MetricWarning, match=f"{words} the network has 3 outputs.* Here it counts as a wrong answer"):
        assert dmcp.evaluate(Echo(), [(SCORES, labels)]) == 0.25 * (labels == SCORES.argmax(dim=1)).sum()


def test_labels_without_an_output_are_told_once_for_all_batches_of_a_test() -> None:
    batches = [(SCORES, RIGHT), (SCORES, RIGHT + 3), (SCORES, RIGHT + 5), (SCORES, RIGHT)]
    with pytest.warns(MetricWarning, match="A label is 6, but the network has 3 outputs") as told:
        assert dmcp.evaluate(Echo(), batches) == 0.375
    assert len(told) == 1


def test_looking_at_labels_waits_for_no_device() -> None:
    """What would wait for a GPU fails on the meta device, where tensors have no values."""
    metric = Accuracy()
    for _ in range(2):
        metric(SCORES.to("meta"), (None, RIGHT.to("meta")))
    with pytest.raises(RuntimeError, match="meta"):
        metric.tell()  # at the end it is looked at


def test_a_batch_without_labels_has_none() -> None:
    with pytest.raises(DataError, match="a tensor has no label"):
        dmcp.evaluate(nn.Identity(), [torch.randn(3, 3)])


def test_an_output_without_classes_is_refused() -> None:
    with pytest.raises(TrainingError, match=r"shape \(4,\), .* give your own loss and metric"):
        loss_of(RIGHT, SCORES[:, 0])
    with pytest.raises(TrainingError, match=r"shape \(4,\), .* give your own loss and metric"):
        dmcp.evaluate(Echo(), [(SCORES[:, 0], RIGHT)])


@pytest.mark.parametrize("labels", [lambda y: y[:, None], lambda y: y.float(), lambda y: y - 9])
@pytest.mark.parametrize("where", ["loader", "val_loader"])
def test_such_labels_are_refused_before_the_search(labels: Any, where: str) -> None:
    (model, graph), odd = traced(), Noise()
    odd.batches = [(x, labels(y)) for x, y in odd.batches]
    seen: list[Event] = []
    loaders = {"loader": Noise(), "val_loader": Noise(1)} | {where: odd}
    with pytest.raises(DataError, match="label"):
        dmcp.prune(
            model, **loaders, search=SEARCH, train=TRAIN, graph=graph, runtime=dmcp.Runtime(on_event=seen.append)
        )
    assert not seen
