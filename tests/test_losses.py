"""Losses and metrics by hand; labels and metrics that cannot be are refused."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nets import Echo, Toy, unit
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp
from dmcp.errors import DataError, TrainingError
from dmcp.runtime.distributed import SINGLE_PROCESS, World
from dmcp.training.losses import MetricWarning, check_metric, classification_loss, score_by, scores_of, top1

# losses


@pytest.mark.parametrize("classes", [10, 1000])
def test_label_smoothing_knows_the_number_of_classes(classes: int) -> None:
    """Zx55/dmcp smooths over 1000 classes whatever the head has: right for ImageNet only."""
    output, labels, share = torch.randn(6, classes), torch.randint(classes, (6,)), 0.1

    def by_hand(spread: int) -> Tensor:
        target = F.one_hot(labels, classes) * (1 - share) + share / spread
        return -(target * output.log_softmax(1)).sum(1).mean()

    found = classification_loss(share)(output, (None, labels))
    torch.testing.assert_close(found, by_hand(classes))
    assert torch.allclose(found, by_hand(1000)) == (classes == 1000)


# labels of the default loss and metric

SCORES = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [0.0, 1.0, 2.0], [1.0, 0.0, 0.5]])
RIGHT = torch.tensor([0, 1, 1, 0])


def loss_of(labels: Any, scores: Tensor = SCORES) -> Tensor:
    return classification_loss()(scores, (None, labels))


@pytest.mark.parametrize("kind", [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool])
def test_labels_of_any_integers_are_classes(kind: torch.dtype) -> None:
    assert loss_of(RIGHT.to(kind)) == F.cross_entropy(SCORES, RIGHT)
    assert dmcp.evaluate(Echo(), [(SCORES, RIGHT.to(kind))]) == 0.75


def test_right_answers_of_shares_pixels_and_nans() -> None:
    shares = torch.eye(3)[RIGHT] * 0.7 + 0.1
    assert loss_of(shares) == F.cross_entropy(SCORES, shares)
    assert dmcp.evaluate(Echo(), [(SCORES[:3], shares[:3])]) == pytest.approx(2 / 3)  # as many samples as classes
    several = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 1.0], [1.0, 1.0, 1.0]])
    assert dmcp.evaluate(Echo(), [(SCORES, several)]) == 0.75  # one of those that are right
    pixels, labels = SCORES.T[None, :, None], RIGHT.clone()[None, None]  # one image of 1 x 4 pixels
    assert [int(it) for it in top1(pixels, {"label": labels})] == [3, 4]
    labels[..., 2:] = -100  # ignored by the loss, not counted in the test
    assert loss_of(labels, pixels) == F.cross_entropy(SCORES[:2], RIGHT[:2])
    assert dmcp.evaluate(Echo(), [(pixels, labels)]) == 1.0
    with pytest.raises(DataError):
        dmcp.evaluate(Echo(), [(pixels, torch.full_like(labels, -100))])
    broken = SCORES.clone()
    broken[0] = math.nan  # the largest of NaNs is the first
    with pytest.warns(MetricWarning, match="2 of 8"):
        assert dmcp.evaluate(Echo(), [(broken, RIGHT)] * 2) == 0.5


ODD = [RIGHT[:, None], RIGHT[:3], torch.eye(3)[RIGHT].long(), RIGHT.float(), RIGHT.to(torch.complex64)]


@pytest.mark.parametrize("labels", ODD)
def test_labels_that_are_no_classes_are_refused_in_the_loss_and_in_the_test(labels: Tensor) -> None:
    for call in (lambda: loss_of(labels), lambda: dmcp.evaluate(Echo(), [(SCORES, labels)])):
        with pytest.raises(DataError):
            call()


@pytest.mark.parametrize("labels", [RIGHT + 2, RIGHT - 1])
def test_labels_without_an_output_are_refused_in_the_loss_and_in_the_test(labels: Tensor) -> None:
    with pytest.raises(DataError, match=r"A label is (3|-1), but"):
        loss_of(labels)
    with pytest.raises(DataError):
        dmcp.evaluate(Echo(), [(SCORES, RIGHT), (SCORES, labels)])


def test_outputs_without_classes_and_batches_without_labels_are_refused() -> None:
    for call in (lambda: loss_of(RIGHT, SCORES[:, 0]), lambda: dmcp.evaluate(Echo(), [(SCORES[:, 0], RIGHT)])):
        with pytest.raises(TrainingError):
            call()
    with pytest.raises(DataError):
        dmcp.evaluate(nn.Identity(), [torch.randn(3, 3)])


def test_without_a_metric_an_own_loss_is_the_score_unless_labels_are_class_numbers() -> None:
    assert score_by(F.mse_loss, SCORES, (None, RIGHT)) is None
    for labels in (*ODD, torch.eye(3)[RIGHT]):  # at last multi-hot
        assert score_by(F.mse_loss, SCORES, (None, labels)) == dmcp.LowerIsBetter(F.mse_loss, is_loss=True)
    for output, batch in ((SCORES[:, :1], (None, RIGHT)), (SCORES, SCORES)):  # one output; no labels
        assert score_by(F.mse_loss, output, batch) == dmcp.LowerIsBetter(F.mse_loss, is_loss=True)


# metrics of a whole data set


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
    with pytest.raises(DataError):
        dmcp.evaluate(Echo(), BATCHES[2:], metric)


def test_functions_of_the_user_say_how_they_are_called() -> None:
    class Named(Iou):  # as those of torchmetrics are
        def update(self, preds: Tensor, target: Tensor) -> None:
            self.matrix += (preds.argmax(dim=1) == target.flatten()).sum()

    for metric in (Named(2), lambda output, y: (output.argmax(1) - y, 1)):
        with pytest.raises((AttributeError, RuntimeError, TypeError)) as error:
            dmcp.evaluate(Echo(), BATCHES, metric)
        assert "(output, batch)" in error.value.__notes__[0]


def test_a_metric_gives_sum_and_count_or_the_mean_of_a_batch() -> None:
    pair = lambda output, batch: (output[:, 1].sum(), len(output))  # noqa: E731
    for given in (pair, lambda *it: torch.tensor(pair(*it)), lambda output, batch: output[:, 1].mean()):
        assert dmcp.evaluate(Echo(), BATCHES, given) == 0.5  # of batches of 3, 1 and 0 samples
    for wrong in (None, (1, 2, 3), ("1", 2), torch.ones(3), (torch.ones(2), 1)):
        with pytest.raises(TrainingError, match=r"\(sum, count\)"):
            dmcp.evaluate(Echo(), BATCHES, lambda output, batch, wrong=wrong: wrong)


def test_an_object_on_several_ranks_must_say_that_it_gathers() -> None:
    check_metric(Iou(2), SINGLE_PROCESS)
    check_metric(top1, World(1, 2))
    for metric in (Iou(2), dmcp.LowerIsBetter(Iou(2))):
        with pytest.raises(TrainingError, match="all_ranks = True"):
            check_metric(metric, World(1, 2))
    gathering = Iou(2)
    gathering.all_ranks = True  # type: ignore[attr-defined]
    check_metric(gathering, World(1, 2))


@pytest.mark.parametrize(
    "wrap", [lambda it: {"out": it, "aux": it + 1}, lambda it: SimpleNamespace(logits=it), lambda it: (it.mean(), it)]
)
def test_scores_in_an_output_of_several_parts_are_found(wrap: Any) -> None:
    scores, batch, loss = torch.randn(4, 3), (None, torch.tensor([0, 1, 2, 0])), classification_loss(0.1)
    assert torch.equal(loss(wrap(scores), batch), loss(scores, batch))
    assert top1(wrap(scores), batch) == top1(scores, batch) and scores_of((scores, scores)) is None


def test_a_network_with_logits_is_pruned_by_default() -> None:
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))
    model = Toy(lambda m, x: {"logits": m.head(m.body(x))}, body=unit(3, 8), head=head)
    batches = [(torch.randn(6, 3, 8, 8), torch.randint(3, (6,)))] * 2
    short = {"search": dmcp.SearchConfig(budget="60%", epochs=2, groups=4), "train": dmcp.TrainConfig(epochs=1)}
    result = dmcp.prune(model, batches, batches, **short)
    assert result.model(torch.randn(2, 3, 8, 8))["logits"].shape == (2, 3) and result.rows[-1].samples == 12
