"""Training and evaluation: schedules by hand, losses by hand, same seed same bits, and a NaN that does no harm."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dmcp import training
from dmcp.data.datasets import load
from dmcp.data.loaders import make_loader
from dmcp.errors import DataError, TrainingError
from dmcp.losses import classification_loss, distillation_loss, top1
from dmcp.models import build
from dmcp.settings import Engine, TrainConfig
from dmcp.training import Runtime, StepRecord, Task, cosine, evaluate, learning_rate, parameter_groups, train

SHORT = TrainConfig(epochs=1, lr=0.1, warmup_lr=0.02, reference_batch=None)


def tiny() -> nn.Sequential:
    head = nn.Linear(216, 10)
    return nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Dropout(), head)


def some_batches(count: int = 4, size: int = 8) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(size, 1, 8, 8), torch.randint(10, (size,))) for _ in range(count)]


def tensors(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -- schedules


def test_cosine_by_hand() -> None:
    assert [cosine(step, 8, 1.0, 0.0) for step in (0, 4, 8)] == pytest.approx([1, 0.5, 0])
    assert cosine(2, 8, 1.0, 0.2) == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)
    warm = [cosine(step, 12, 0.8, 0.0, warmup=4, warmup_start=0.2) for step in (0, 1, 2, 4, 8, 12)]
    assert warm == pytest.approx([0.2, 0.35, 0.5, 0.8, 0.4, 0.0])


def test_learning_rates_grow_with_the_batch() -> None:
    paper = TrainConfig()
    steps = 100 * 50
    at_2048 = [learning_rate(step, steps, 2048, paper) for step in (0, 50, steps)]
    assert at_2048 == pytest.approx([0.2, 0.8, 0.0], abs=1e-9)
    assert [learning_rate(step, steps, 512, paper) for step in (0, 50)] == pytest.approx([0.05, 0.2])
    unscaled = dataclasses.replace(paper, reference_batch=None)
    assert learning_rate(50, steps, 512, unscaled) == pytest.approx(0.8)


# -- losses and metrics


@pytest.mark.parametrize("classes", [10, 1000])
def test_label_smoothing_knows_the_number_of_classes(classes: int) -> None:
    """Zx55/dmcp smooths over 1000 classes whatever the head has: right for ImageNet only."""
    output, labels, share = torch.randn(6, classes), torch.randint(classes, (6,)), 0.1

    def by_hand(spread: int) -> tuple[Tensor, Tensor]:
        target = F.one_hot(labels, classes) * (1 - share) + share / spread
        return target.sum(dim=1), -(target * output.log_softmax(1)).sum(1).mean()

    found = classification_loss(share)(output, (None, labels))
    masses, right = by_hand(classes)
    torch.testing.assert_close(masses, torch.ones(6))
    torch.testing.assert_close(found, right)
    masses, wrong = by_hand(1000)
    assert torch.allclose(masses, torch.ones(6)) == torch.allclose(found, wrong) == (classes == 1000)


def test_imitation_is_the_divergence_from_the_target() -> None:
    own, target = torch.randn(5, 7), torch.randn(5, 7)
    right = F.kl_div(own.log_softmax(1), target.softmax(1), reduction="batchmean")
    torch.testing.assert_close(distillation_loss(own, [target]), right)
    torch.testing.assert_close(distillation_loss((own, {"aux": own}), [target, target]), 2 * right)
    pixels = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)  # every pixel is a sample
    flat = [part.movedim(1, -1).reshape(-1, 3) for part in pixels]
    torch.testing.assert_close(distillation_loss(pixels[0], [pixels[1]]), distillation_loss(flat[0], [flat[1]]))
    assert float(distillation_loss(own, [own])) == pytest.approx(0, abs=1e-6)
    for bad in ((own, own), own[:, :3], own[0]):
        with pytest.raises(TrainingError, match="same classes along dim 1"):
            distillation_loss(bad, [target])


def test_top1_counts_samples_and_pixels() -> None:
    output = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.2, 0.1]])
    correct, count = top1(output, (None, torch.tensor([1, 1, 0])))
    assert (int(correct), count) == (2, 3)
    pixels = output.T.reshape(1, 2, 3, 1)
    assert top1(pixels, {"label": torch.tensor([1, 1, 0]).reshape(1, 3, 1)})[1] == 3
    with pytest.raises(TrainingError, match="give your own loss and metric"):
        top1((output, output), (None, torch.zeros(3)))


class Echo(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert not self.training and not torch.is_grad_enabled()
        return x


def test_evaluation_weighs_samples_not_batches() -> None:
    model = Echo().train()
    right, wrong = torch.tensor([[0.0, 1.0]]), torch.tensor([[1.0, 0.0]])
    ones = torch.ones(6, dtype=torch.long)
    loader = [(right.repeat(6, 1), ones), (wrong, ones[:1])]
    assert evaluate(model, loader) == 6 / 7  # the mean over batches would be 1/2
    assert model.training
    assert evaluate(model, loader, metric=lambda output, batch: (output.sum(), len(output))) == 1.0
    assert evaluate(model, loader, forward=lambda x: 1 - x + 0 * model.eval()(x)) == 1 / 7
    with pytest.raises(TrainingError, match="no samples"):
        evaluate(model, [])


# -- parameters


class Odd(nn.Module):
    """A tied weight, a scale that belongs to no layer, a norm over three dims, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.norm = nn.LayerNorm((4, 2, 2))
        self.scale = nn.Parameter(torch.ones(4))
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.ignore = nn.Linear(2, 2).requires_grad_(False)


def test_norms_and_biases_do_not_decay() -> None:
    net = Odd()
    decayed, plain = parameter_groups(net, 0.3)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert {id(p) for p in decayed["params"]} == {id(net.conv.weight), id(net.one.weight)}
    every = [*decayed["params"], *plain["params"]]
    wanted = {id(p) for p in net.parameters() if p.requires_grad}
    assert len(every) == len(wanted) and {id(p) for p in every} == wanted


# -- training


def test_digits_are_learnt_in_three_epochs() -> None:
    sets = load("digits")
    model = build("digits:resnet")
    seen: list[StepRecord] = []
    loader = make_loader(sets.train, 64, train=True)
    config = TrainConfig(epochs=3, lr=0.2, warmup_lr=0.05, reference_batch=64)
    records = train(model, loader, config, runtime=Runtime(on_event=lambda event: seen.append(event.record)))
    assert evaluate(model, make_loader(sets.test, 256, train=False)) > 0.8
    assert records == seen and [record.step for record in records] == list(range(66))
    assert [record.epoch for record in records] == [0] * 22 + [1] * 22 + [2] * 22
    assert json.loads(json.dumps(dataclasses.asdict(records[30])))["lr"] == learning_rate(30, 66, 64, config)
    assert records[-1].loss < 0.5 * records[0].loss
    assert loader.epoch == 2


def test_one_step_is_that_of_plain_sgd() -> None:
    model, batch = tiny().eval(), some_batches(1)[0]
    model[4].p = 0.0
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
    start, batches = tiny(), some_batches()
    results = []
    for seed in (3, 3, 4):
        model = copy.deepcopy(start)
        torch.rand(1)  # the global state does not matter
        before = torch.get_rng_state()
        records = train(model, batches, dataclasses.replace(SHORT, seed=seed))
        assert torch.equal(before, torch.get_rng_state())
        results.append((tensors(model), [record.loss for record in records]))
    assert same(results[0][0], results[1][0]) and results[0][1] == results[1][1]
    assert not same(results[0][0], results[2][0])  # dropout


def test_epochs_are_announced_to_samplers_too() -> None:
    data = torch.utils.data.TensorDataset(torch.randn(16, 1, 8, 8), torch.randint(10, (16,)))
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0)
    train(tiny(), torch.utils.data.DataLoader(data, 8, sampler=sampler), dataclasses.replace(SHORT, epochs=3))
    assert sampler.epoch == 2


def test_own_loss_and_dict_batches() -> None:
    model, seen = nn.Conv2d(1, 2, 1), []

    def loss(output: Tensor, batch: dict[str, Any]) -> Tensor:
        seen.append(batch["weight"])
        return (output - batch["mask"]).square().mean()

    batches = [{"input": torch.randn(4, 1, 5, 5), "mask": torch.zeros(4, 2, 5, 5), "weight": 7}]
    train(model, batches, SHORT, task=Task(loss=loss))
    assert seen == [7]
    with pytest.raises(TrainingError, match="one number, not a tensor of shape"):
        train(model, batches, SHORT, task=Task(loss=lambda output, batch: output))


def test_bfloat16_trains_too() -> None:
    model = tiny()
    kinds = []
    model[0].register_forward_hook(lambda *args: kinds.append(args[-1].dtype))
    records = train(model, some_batches(2), SHORT, runtime=Runtime(engine=Engine(precision="bfloat16")))
    assert set(kinds) == {torch.bfloat16} and model[0].weight.dtype == torch.float32
    assert all(math.isfinite(record.loss) for record in records)


def test_a_loss_without_a_gradient_is_told() -> None:
    net, batch = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), (torch.zeros(2, 4), torch.zeros(2).long())
    with pytest.raises(TrainingError, match=r"A loss must have a gradient, and this one has none: leave out \.detach"):
        train(net, [batch], TrainConfig(epochs=1), lambda output, _: output.detach().sum())


def test_a_teacher_is_imitated_and_not_changed() -> None:
    teacher, batches = tiny().train(), some_batches(2)
    before = tensors(teacher)
    config = dataclasses.replace(SHORT, epochs=30, distillation="teacher", kd_weight=1.0)
    model = tiny()
    records = train(model, batches, config, teacher=teacher)
    assert records[-1].loss < 0.5 * records[0].loss
    assert same(before, tensors(teacher)) and teacher.training
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_a_network_is_not_its_own_teacher() -> None:
    """It would agree with itself in each step, and be a teacher in training mode."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    config = dataclasses.replace(SHORT, distillation="teacher")
    for teacher in (model, nn.Sequential(model)):
        with pytest.raises(TrainingError, match=r"^The teacher has 1\.weight|^The teacher has 0\.1\.weight"):
            train(model, some_batches(1), config, teacher=teacher)
    model[1].weight.requires_grad_(False)
    teacher = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))
    teacher[1].weight = model[1].weight  # what is not trained may be shared
    assert train(model, some_batches(1), config, teacher=teacher)


def test_a_temperature_softens_both_and_keeps_the_size_of_gradients() -> None:
    torch.manual_seed(0)
    own, target = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7)
    warm = distillation_loss(own, [target], 4.0)
    torch.testing.assert_close(warm, 16 * distillation_loss(own / 4, [target / 4]))
    sizes = [torch.autograd.grad(distillation_loss(own, [target], heat), own)[0].norm() for heat in (1.0, 4.0, 400.0)]
    assert 0.5 * sizes[0] < sizes[1] < 2 * sizes[0] and 0.5 * sizes[1] < sizes[2] < 2 * sizes[1]


def test_a_training_has_the_temperature_and_the_share_of_its_settings() -> None:
    flat = partial(nn.Sequential, nn.Flatten())
    teacher, batch = flat(nn.Linear(64, 10)), some_batches(1)[0]
    for share, heat in ((0.9, 4.0), (0.5, 1.0)):
        model = flat(nn.Linear(64, 10))
        output, target = model(batch[0]), teacher(batch[0])
        label = classification_loss(SHORT.label_smoothing)(output, batch)
        right = (1 - share) * label + share * distillation_loss(output, [target], heat)
        config = dataclasses.replace(
            SHORT, epochs=1, warmup_epochs=0, distillation="teacher", kd_weight=share, kd_temperature=heat
        )
        (record,) = train(model, [batch], config, teacher=teacher)
        assert record.loss == pytest.approx(right.item(), rel=1e-4)


def test_losses_are_read_in_bundles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look waits for the device, so there is one per bundle and none per step."""
    looks = []
    look = training.Log.look
    monkeypatch.setattr(training, "_WINDOW", 3)
    monkeypatch.setattr(training.Log, "look", lambda log: looks.append(len(log.waiting)) or look(log))
    for reader in ("item", "__float__", "__bool__", "__int__"):
        monkeypatch.setattr(Tensor, reader, lambda tensor: pytest.fail("a step waits for the device"))
    train(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), some_batches(4), dataclasses.replace(SHORT, epochs=2))
    assert looks == [3, 1, 3, 1]


# -- what goes wrong


def breaking(at: int) -> Any:
    calls: list[int] = []

    def loss(output: Tensor, batch: Any) -> Tensor:
        calls.append(1)
        return F.cross_entropy(output, batch[1]) * (math.nan if len(calls) == at + 1 else 1.0)

    return loss


@pytest.mark.parametrize(("at", "back"), [(0, 0), (5, 4), (7, 6)])
def test_a_nan_stops_and_keeps_the_last_good_state(at: int, back: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "_WINDOW", 2)
    model, batches = tiny(), some_batches(4)
    wanted = copy.deepcopy(model)
    config = dataclasses.replace(SHORT, epochs=3)
    seen: list[StepRecord] = []
    with pytest.raises(TrainingError, match=rf"step {at} \(epoch {at // 4}, .*the loss is nan.*before step {back};"):
        train(
            model,
            batches,
            config,
            task=Task(loss=breaking(at)),
            runtime=Runtime(on_event=lambda event: seen.append(event.record)),
        )
    assert len(seen) == back and model.training
    assert all(bool(tensor.isfinite().all()) for tensor in tensors(model))
    if back:  # the same steps again, ended by the caller instead

        def stop(record: StepRecord) -> None:
            if record.step == back - 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            train(wanted, batches, config, task=Task(loss=breaking(-1)), runtime=Runtime(on_event=stop))
    assert same(tensors(model), tensors(wanted))


def test_weights_that_overflow_at_the_last_step_are_noticed() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    before = tensors(model)

    def loss(output: Tensor, batch: Any) -> Tensor:
        return (output - output.detach()).abs().sqrt().sum()  # 0, but its slope is not finite

    with pytest.raises(TrainingError, match=r"step 0 .*a weight is no longer finite"):
        train(model, some_batches(1), SHORT, task=Task(loss=loss))
    assert same(before, tensors(model))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda loss: loss.item(), "must return a tensor of one number, whose gradient is needed, not a float"),
        (lambda loss: None, "not a NoneType"),
        (lambda loss: loss.expand(3), r"not a tensor of shape \(3,\): return its mean"),
    ],
)
def test_a_loss_that_cannot_be_trained_on(value: Any, words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        train(tiny(), some_batches(1), SHORT, task=Task(loss=lambda output, batch: value(output.mean())))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (torch.tensor(0.5), r"how many samples there are, not a tensor of shape \(\): a mean does not say"),
        (0.5, "not a float"),
        (None, "not a NoneType"),
        ((0.5, 4), r"not \(a float, a int\)"),
        ((torch.ones(4), 4), r"not \(a tensor of shape \(4,\), a int\)"),
        ((torch.tensor(1.0), 4, 4), r"not \(a tensor of shape \(\), a int, a int\)"),
    ],
)
def test_a_metric_that_is_no_sum_and_count(found: Any, words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        evaluate(tiny(), some_batches(1), lambda output, batch: found)


@pytest.mark.parametrize("count", [4, np.int64(4), torch.tensor(4)])
def test_a_metric_is_a_sum_over_a_count(count: Any) -> None:
    assert evaluate(tiny(), some_batches(2), lambda output, batch: (torch.tensor(3), count)) == 0.75


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"epochs": 0}, "epochs must be an int"),
        ({"epochs": 2.5}, "epochs must be an int"),
        ({"warmup_epochs": 101}, "between 0 and epochs"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"lr": math.nan}, "lr must be positive"),
        ({"min_lr": 1.0}, "min_lr"),
        ({"warmup_lr": 1.0}, "warmup_lr"),
        ({"reference_batch": 0}, "at least 1 or None"),
        ({"momentum": 1.0}, "momentum must lie"),
        ({"momentum": 0.0}, "nesterov needs"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"label_smoothing": 1.0}, "label_smoothing"),
        ({"kd_weight": 1.5}, "kd_weight"),
        ({"kd_temperature": 0.0}, "teacher_temperature must lie in [0.01, 100], not 0.0"),
        ({"kd_temperature": math.nan}, "kd_temperature"),
        ({"distillation": "self"}, "distillation must be one of none, teacher, not 'self'"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_impossible_settings(change: dict[str, Any], text: str) -> None:
    with pytest.raises(TrainingError) as error:
        TrainConfig(**change)
    assert text in str(error.value)


def test_teacher_and_setting_go_together() -> None:
    with pytest.raises(TrainingError, match="go together"):
        train(tiny(), some_batches(), SHORT, teacher=tiny())
    with pytest.raises(TrainingError, match="go together"):
        train(tiny(), some_batches(), dataclasses.replace(SHORT, distillation="teacher"))
    with pytest.raises(TrainingError, match="no batches"):
        train(tiny(), [], SHORT)


def test_what_cannot_be_trained_on() -> None:
    with pytest.raises(DataError, match="The loader, a list_iterator, has no length"):
        train(tiny(), iter(some_batches()), SHORT)
    with pytest.raises(TrainingError, match=r"call model.requires_grad_\(True\)"):
        train(tiny().requires_grad_(False), some_batches(), SHORT)
