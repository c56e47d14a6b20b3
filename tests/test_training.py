"""Training and evaluation: a step by hand, same seed same bits, a NaN that does no harm."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from nets import Echo, same, state
from torch import Tensor, nn
from torch.nn import functional as F

from dmcp.data.datasets import load
from dmcp.data.loaders import make_loader
from dmcp.defaults import resolve_training
from dmcp.errors import DataError, TrainingError
from dmcp.models import build
from dmcp.settings import Engine, SearchConfig, TrainConfig
from dmcp.training import loop as training
from dmcp.training.distillation import distillation_loss
from dmcp.training.loop import Runtime, Task, evaluate, train
from dmcp.training.losses import classification_loss
from dmcp.training.optimizer import cosine, learning_rate

SHORT = TrainConfig(epochs=1, lr=0.1, warmup_lr=0.02, reference_batch=None)


def tiny(dropout: float = 0.5) -> nn.Sequential:
    torch.manual_seed(0)
    head = nn.Linear(216, 10)
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(dropout), head)


def some_batches(count: int = 4, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [
        (torch.randn(size, 1, 8, 8, generator=random), torch.randint(10, (size,), generator=random))
        for _ in range(count)
    ]


# the loop


def test_digits_are_learned_in_three_epochs() -> None:
    sets, model, seen = load("digits"), build("digits:resnet"), list[Any]()
    loader = make_loader(sets.train, 64, train=True)
    config = resolve_training(TrainConfig(epochs=3, lr=0.2, warmup_lr=0.05, reference_batch=64))
    epochs: list[int] = []
    records = train(model, loader, config, runtime=Runtime(on_event=seen.append), after_epoch=epochs.append)
    assert evaluate(model, make_loader(sets.test, 256, train=False)) > 0.8
    assert records == [event.record for event in seen] and {(it.stage, it.steps) for it in seen} == {("train", 66)}
    assert [(record.step, record.epoch) for record in records] == [(step, step // 22) for step in range(66)]
    assert records[30].lr == learning_rate(30, 66, 64, config) and records[-1].loss < 0.5 * records[0].loss
    assert epochs == [0, 1, 2]


def test_one_step_is_that_of_plain_sgd() -> None:
    model, batch = tiny(dropout=0.0).eval(), some_batches(1)[0]
    by_hand = copy.deepcopy(model).train()
    train(model, [batch], SHORT)
    F.cross_entropy(by_hand(batch[0]), batch[1], label_smoothing=0.1).backward()
    rate = cosine(0, 1, 0.1, 0.0, 1, 0.02)
    for mine, own in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert own.grad is not None and mine.grad is None
        step = own.grad + (1e-4 * own if own.ndim > 1 else 0)
        torch.testing.assert_close(mine, own - rate * (1 + 0.9) * step)  # Nesterov's first step
    assert not model.training  # the mode that it was in


def test_same_seed_same_bits_and_the_users_generator_untouched() -> None:
    start, batches, ends = tiny(), some_batches(), list[Any]()
    for seed in (3, 3, 4):
        model = copy.deepcopy(start)
        torch.rand(1)  # the global state does not matter
        before = torch.get_rng_state()
        records = train(model, batches, replace(SHORT, seed=seed))
        assert torch.equal(before, torch.get_rng_state())
        ends.append((state(model), [record.loss for record in records]))
    assert same(ends[0][0], ends[1][0]) and ends[0][1] == ends[1][1]
    assert not same(ends[0][0], ends[2][0])  # dropout


@pytest.mark.parametrize(("at", "back"), [(0, 0), (5, 4)])
def test_a_nan_stops_and_keeps_the_last_good_state(at: int, back: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_STEPS_BETWEEN_READS", 2)
    model, calls = tiny(), list[int]()
    states = [state(model)]

    def loss(output: Tensor, batch: Any) -> Tensor:
        calls.append(1)
        return F.cross_entropy(output, batch[1]) * (math.nan if len(calls) == at + 1 else 1.0)

    runtime = Runtime(on_event=lambda event: states.append(state(model)))
    with pytest.raises(TrainingError, match=rf"step {at} .*epoch {at // 4}.*nan.*step {back}\."):
        train(model, some_batches(4), replace(SHORT, epochs=3), task=Task(loss=loss), runtime=runtime)
    assert len(states) == back + 1 and same(state(model), states[-1])


def test_a_nan_in_the_data_is_said() -> None:
    batches = some_batches(4)
    batches[2][0][5, 0, 3, 3] = math.nan
    with pytest.raises(DataError, match=r"step 2 .*nan.*step 0\..*check the data"):
        train(tiny(), batches, SHORT)


# teachers


def test_a_step_has_the_temperature_and_the_weight_of_its_settings() -> None:
    flat = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 10))  # noqa: E731
    teacher, batch = flat().train(), some_batches(1)[0]
    before = state(teacher)
    for weight, heat in ((0.9, 4.0), (0.5, 1.0)):
        model = flat()
        output, target = model(batch[0]), teacher(batch[0])
        label = classification_loss(SHORT.label_smoothing)(output, batch)
        right = (1 - weight) * label + weight * distillation_loss(output, [target], heat)
        config = replace(SHORT, warmup_epochs=0, kd_weight=weight, kd_temperature=heat)
        (record,) = train(model, [batch], config, teacher=teacher)
        assert record.loss == pytest.approx(right.item(), rel=1e-4)
    assert same(before, state(teacher)) and teacher.training
    assert all(parameter.grad is None for parameter in teacher.parameters())


# what is refused


def test_what_cannot_be_trained() -> None:
    net, batches = tiny(), some_batches(1)
    calls: list[tuple[type[Exception], Any]] = [
        (DataError, lambda: train(net, [], SHORT)),
        (DataError, lambda: train(net, iter(batches), SHORT)),
        (TrainingError, lambda: train(tiny().requires_grad_(False), batches, SHORT)),
        (TrainingError, lambda: torch.no_grad()(train)(net, batches, SHORT)),
    ]
    losses = [lambda output, _: output, lambda output, _: output.sum().item(), lambda output, _: output.sum().detach()]
    losses.append(lambda output, _: torch.complex(output, output).sum())
    calls += [(TrainingError, lambda it=it: train(net, batches, SHORT, task=Task(loss=it))) for it in losses]
    graphs, adam = Runtime(engine=Engine(graphs=True)), Task(optimizer=torch.optim.Adam)
    calls.append((TrainingError, lambda: train(net, batches, SHORT, task=adam, runtime=graphs)))
    for kind, call in calls:
        with pytest.raises(kind):
            call()


@pytest.mark.parametrize("change", [
    {"epochs": 0}, {"epochs": 1.5}, {"lr": math.nan}, {"reference_batch": 0}, {"momentum": 1.0}, {"seed": -1},
    {"kd_temperature": 0.009}, {"sampling": "some"}, {"tolerance": 1.0}, {"tolerance": 0.0}, {"warmup": 1.0},
    {"lr": -0.1},
])  # fmt: skip
def test_impossible_settings(change: dict[str, Any]) -> None:
    (name,) = change
    config: Any = TrainConfig if hasattr(TrainConfig, name) else partial(SearchConfig, budget="50%")
    with pytest.raises(TrainingError, match=name):
        config(**change)


def test_a_limit_that_is_itself_refused_is_named() -> None:
    assert TrainConfig(lr=1e-300).lr == 1e-300
    for value in (0, 0.0, -1.0):
        with pytest.raises(TrainingError, match=r"above 0, not"):
            TrainConfig(lr=value)
    with pytest.raises(TrainingError, match=r"above 0 and below 1, not"):
        SearchConfig(budget="50%", tolerance=0.0)


# the test


def test_evaluation_weighs_samples_not_batches() -> None:
    model = Echo().train()
    right, wrong = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    ones = torch.ones(6, dtype=torch.long)
    loader = [(right.repeat(6, 1), ones), (wrong, ones[:1])]
    assert evaluate(model, loader) == 6 / 7 and model.training  # the mean over batches would be 1/2
    assert evaluate(model, loader, metric=lambda output, batch: (output.sum(), len(output))) == 1.0
    assert evaluate(model, loader, forward=lambda x: 1 - x + 0 * model.eval()(x)) == 1 / 7
    assert training.evaluate_counted(model, loader) == (6 / 7, 7)
    with pytest.raises(DataError):
        evaluate(model, [])
