"""Distillation by hand, for each kind of output; and what the loss of a task shows about its outputs."""

from __future__ import annotations

import copy
import random
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from nets import Toy, same, state, unit
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp
from dmcp.errors import ArgumentError, TrainingError
from dmcp.runtime.checkpoint import random_state
from dmcp.settings import Distill, SearchConfig, TrainConfig
from dmcp.training.distillation import DistillationWarning, distillation_by_loss, distillation_loss

# each kind, by plain loops


def squares(own: Tensor, target: Tensor) -> Tensor:
    pairs = zip(own.flatten().tolist(), target.flatten().tolist(), strict=True)
    return torch.tensor(sum((a - b) ** 2 for a, b in pairs) / own.numel())


def differences(own: Tensor, target: Tensor) -> Tensor:
    pairs = zip(own.flatten().tolist(), target.flatten().tolist(), strict=True)
    return torch.tensor(sum(abs(a - b) for a, b in pairs) / own.numel())


def divergence(own: Tensor, target: Tensor) -> Tensor:
    """Of every sample, or every pixel."""
    rows = own.movedim(1, -1).reshape(-1, own.shape[1])
    target_rows = target.movedim(1, -1).reshape(-1, own.shape[1])
    total = torch.tensor(0.0)
    for row, target_row in zip(rows, target_rows, strict=True):
        p = target_row.exp() / target_row.exp().sum()
        q = row.exp() / row.exp().sum()
        total += (p * (p / q).log()).sum()
    return total / len(rows)


def pair(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(shape, requires_grad=True), torch.randn(shape)


@pytest.mark.parametrize("shape", [(5, 7), (2, 3, 4, 5)])
@pytest.mark.parametrize(
    ("kind", "by_hand"), [(Distill.CLASSES, divergence), (Distill.L1, differences), (Distill.L2, squares)]
)
def test_each_kind_by_hand(kind: Distill, by_hand: Any, shape: tuple[int, ...]) -> None:
    own, target = pair(*shape)
    torch.testing.assert_close(distillation_loss(own, target, kind=kind), by_hand(own, target))
    assert distillation_loss(target, target, kind=kind).item() == pytest.approx(0, abs=1e-6)
    assert torch.autograd.grad(distillation_loss(own, target, kind=kind), own)[0].norm() > 0


def test_only_classes_have_a_temperature() -> None:
    own, target = pair(5, 7)
    torch.testing.assert_close(distillation_loss(own, target, 4.0), 16 * divergence(own / 4, target / 4))
    assert distillation_loss(own, target, 4.0, Distill.L2) == distillation_loss(own, target, 1.0, Distill.L2)
    heats = (0.01, 1.0, 4.0, 100.0)
    sizes = [torch.autograd.grad(distillation_loss(own, target, heat), own)[0].norm() for heat in heats]
    assert all(size.isfinite() and size > 1e-4 for size in sizes) and 0.5 * sizes[1] < sizes[2] < 2 * sizes[1]


def distance(own: Any, target: Any) -> Tensor:
    return (own["age"] - target["age"]).abs().max()


def test_several_outputs_each_by_its_kind() -> None:
    (scores, target_scores), (age, target_age) = pair(4, 3), pair(4)
    classes, years = divergence(scores, target_scores), squares(age, target_age)
    output, target = {"class": scores, "age": age}, {"class": target_scores, "age": target_age}
    cases: list[tuple[Any, Any, Any, Tensor]] = [
        (output, target, {"class": "classes", "age": "l2"}, classes + years),
        (output, target, {"age": "l1"}, differences(age, target_age)),  # what is not named is left out
        (output, target, ["classes", "l2"], classes + years),
        (output, target, ["classes", None], classes),
        (output, target, distance, (age - target_age).abs().max()),
        (
            output,
            target,
            {"class": "classes", "age": lambda *ages: F.l1_loss(*ages)},
            classes + F.l1_loss(age, target_age),
        ),
        (SimpleNamespace(**output), SimpleNamespace(**target), {"class": "l1"}, differences(scores, target_scores)),
        ((scores, [age]), (target_scores, [target_age]), ("classes", "l1"), classes + differences(age, target_age)),
        ((scores, {"aux": scores}), (target_scores, {"aux": target_scores}), "classes", 2 * classes),
    ]
    for own, other, kind, right in cases:
        read = dmcp.Task(distill=kind).distill
        assert read is not None
        torch.testing.assert_close(distillation_loss(own, other, kind=read), right)  # type: ignore[arg-type]


def test_outputs_that_cannot_be_compared_are_refused() -> None:
    own, target = pair(5, 7)
    cases: list[tuple[Any, Any, Any]] = [
        ((own, own), target, "classes"),
        (own[:, :3], target, "classes"),
        (own[0], target[0], "classes"),
        (own[:, :1], target[:, :1], "classes"),
        (own, target[:, 0], "l2"),
        (own.long(), target.long(), "l1"),
        ((own, own), (target, target), ["l2"]),
        ({"a": own}, {"a": target}, {"b": "l2"}),
        ({"a": own}, target, {"a": "l2"}),
        ((), (), "l2"),
        (own, target, lambda own, target: own - target),
        (own, target, lambda own, target: 1.0),
    ]
    for output, other, kind in cases:
        with pytest.raises(TrainingError):
            distillation_loss(output, other, kind=dmcp.Task(distill=kind).distill)  # type: ignore[arg-type]
    for wrong in ("l3", 3):
        with pytest.raises(ArgumentError):
            dmcp.Task(distill=wrong)  # type: ignore[arg-type]
    with pytest.raises(TrainingError):
        dmcp.Task(distill={"age": "l3"})


# what a loss shows


class Given(nn.Module):
    """Returns an output that depends on its weight."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.7))
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x * self.weight)


X = torch.rand(4, 3, 6, 6)
Y = torch.rand(4, 3, 6, 6)
LABELS = torch.randint(3, (4, 6, 6))
CLASSES = LABELS[:, 0, 0]


def dice(scores: Tensor, labels: Tensor) -> Tensor:
    """As segmentation_models_pytorch has it."""
    chances = scores.log_softmax(dim=1).exp()
    truth = F.one_hot(labels, 3).movedim(-1, 1)
    return 1 - 2 * (chances * truth).sum() / (chances + truth).sum()


IMAGE = lambda x: x * 2  # noqa: E731
FLAT = lambda x: x.mean((2, 3))  # noqa: E731
STEPS = lambda x: F.avg_pool2d(x, 2).mean(3)  # noqa: E731  # as many steps as classes
HEADS = lambda x: {"class": x.mean((2, 3)), "age": x.mean((1, 2, 3))[:, None]}  # noqa: E731
CLEAR: dict[str, tuple[Any, Any, Any]] = {  # output, loss, and the distillation loss by hand
    "mse": (IMAGE, lambda it, b: nn.MSELoss()(it, b[1]), squares),
    "target first": (IMAGE, lambda it, b: F.mse_loss(b[1], it), squares),
    "l1, weighted": (IMAGE, lambda it, b: 10 * F.l1_loss(it, b[1]), lambda a, b: 10 * differences(a, b)),
    "sum": (
        IMAGE,
        lambda it, b: nn.MSELoss(reduction="sum")(it, b[1]) / (2 * len(it)),
        lambda a, b: squares(a, b) * a[0].numel() / 2,
    ),
    "each number": (
        IMAGE,
        lambda it, b: F.mse_loss(it, b[1], reduction="none").sum((1, 2, 3)).mean(),
        lambda a, b: squares(a, b) * a[0].numel(),
    ),
    "huber": (
        IMAGE,
        lambda it, b: F.huber_loss(it, b[1], delta=0.1),
        lambda a, b: torch.where((a - b).abs() < 0.1, (a - b) ** 2 / 2, 0.1 * ((a - b).abs() - 0.05)).mean(),
    ),
    "smooth": (
        IMAGE,
        lambda it, b: nn.SmoothL1Loss(beta=0.1)(it, b[1]),
        lambda a, b: torch.where((a - b).abs() < 0.1, (a - b) ** 2 / 0.2, (a - b).abs() - 0.05).mean(),
    ),
    "two terms": (
        IMAGE,
        lambda it, b: F.l1_loss(it, b[1]) + 0.5 * F.mse_loss(it, b[1]),
        lambda a, b: differences(a, b) + 0.5 * squares(a, b),
    ),
    "classes": (FLAT, lambda it, b: F.cross_entropy(it, CLASSES), divergence),
    "steps": (STEPS, lambda it, b: F.cross_entropy(it, LABELS[:, :3, 0]), divergence),
    "pixels": (IMAGE, lambda it, b: nn.CrossEntropyLoss(reduction="sum")(it, b[2]) / b[2].numel(), divergence),
    "dice": (IMAGE, lambda it, b: dice(it, b[2]), divergence),
    "resized": (
        lambda x: {"out": F.avg_pool2d(x, 2)},
        lambda it, b: F.cross_entropy(F.interpolate(it["out"], b[2].shape[1:]), b[2]),
        lambda a, b: divergence(a["out"], b["out"]),
    ),
    "heads": (
        HEADS,
        lambda it, b: F.cross_entropy(it["class"], CLASSES) + 0.1 * F.mse_loss(it["age"].squeeze(1), b[1][:, 0, 0, 0]),
        lambda a, b: divergence(a["class"], b["class"]) + 0.1 * squares(a["age"], b["age"]),
    ),
    "auxiliary head": (
        lambda x: [FLAT(x), FLAT(x**2)],
        lambda it, b: F.cross_entropy(it[0], CLASSES) + 0.3 * F.cross_entropy(it[1], CLASSES),
        lambda a, b: divergence(a[0], b[0]) + 0.3 * divergence(a[1], b[1]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CLEAR)
def test_the_loss_shows_how_to_distill(name: str) -> None:
    """The teacher takes the place of the labels, with the same function and factor."""
    make, loss, by_hand = CLEAR[name]
    model = Given(make)
    before = state(model)
    terms = distillation_by_loss(loss, model, (X, Y, LABELS))
    assert terms is not None and same(before, state(model)) and model.weight.grad is None
    output, target = Given(make)(X), Given(make)(Y)
    torch.testing.assert_close(distillation_loss(output, target, kind=terms), by_hand(output, target))


class Noisy(nn.Module):
    """A loss that counts its calls, and draws from every generator."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, output: Tensor, batch: Any) -> Tensor:
        self.calls += 1
        noise = random.random() + float(np.random.rand()) + torch.rand(())
        return (1 + 0 * noise) * F.mse_loss(output, batch[1])


def test_looking_at_a_loss_leaves_no_trace() -> None:
    loss = Noisy()
    cpu = torch.device("cpu")
    before = random_state(cpu)
    assert distillation_by_loss(loss, Given(IMAGE), (X, Y, LABELS)) is not None
    assert loss.calls == 0 and same(before, random_state(cpu))


UNCLEAR: dict[str, tuple[Any, Any]] = {
    "arithmetic": (IMAGE, lambda it, b: (it - b[1]).square().mean()),
    "binary": (IMAGE, lambda it, b: F.binary_cross_entropy_with_logits(it, b[1])),
    "part of it": (IMAGE, lambda it, b: F.mse_loss(it[:, 1:], b[1][:, 1:]) + F.cross_entropy(it[:, :1], LABELS * 0)),
    "other dim": (lambda x: x.flatten(2), lambda it, b: F.cross_entropy(it.flatten(0, 1), torch.zeros(12).long())),
    "classes last": (STEPS, lambda it, b: F.cross_entropy(it.transpose(1, 2), LABELS[:, :3, 0])),
    "converted": (STEPS, lambda it, b: F.cross_entropy(it.transpose(1, 2).float(), LABELS[:, :3, 0])),
    "softmax of classes last": (STEPS, lambda it, b: it.mT.log_softmax(dim=1).square().mean()),
    "softmax of another dim": (IMAGE, lambda it, b: it.softmax(dim=2).square().mean()),
    "one of two": (HEADS, lambda it, b: F.cross_entropy(it["class"], CLASSES) + it["age"].mean()),
    "negative": (IMAGE, lambda it, b: -F.mse_loss(it, b[1])),
    "weights of numbers": (IMAGE, lambda it, b: F.mse_loss(it, b[1], weight=b[1])),
    "only watched": (IMAGE, lambda it, b: it.mean() + F.mse_loss(it, b[1]).detach()),
    "fails": (IMAGE, lambda it, b: it["none"]),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_what_is_not_clear_is_not_guessed(name: str) -> None:
    make, loss = UNCLEAR[name]
    assert distillation_by_loss(loss, Given(make), (X, Y, LABELS)) is None


# where it is used

CONFIG = TrainConfig(epochs=1, reference_batch=None, lr=0.05, warmup_lr=0.05, warmup_epochs=0)
SEARCH = SearchConfig(budget="60%", epochs=2, groups=4)
PAIRS = [(X, X.mean(1, keepdim=True)), (Y, Y.mean(1, keepdim=True))]


def mse(output: Tensor, batch: Any) -> Tensor:
    return F.mse_loss(output, batch[1])


def error(output: Tensor, batch: Any) -> Tensor:
    """Does not show what the output is."""
    return (output - batch[1]).abs().mean()


def denoiser(seed: int = 0, outputs: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return Toy(lambda m, x: m.last(m.body(x)), body=unit(3, 8), last=nn.Conv2d(8, outputs, 3, padding=1))


def test_training_with_a_teacher_by_hand() -> None:
    teacher = denoiser(1).eval()
    target = teacher(X).detach()
    cases: list[tuple[dmcp.Task, Any]] = [
        (dmcp.Task(loss=mse), lambda own: F.mse_loss(own, target)),
        (dmcp.Task(loss=mse, distill="l1"), lambda own: (own - target).abs().mean()),
        (
            dmcp.Task(loss=error, distill=lambda own, it: (own - it).abs().amax()),
            lambda own: (own - target).abs().amax(),
        ),
    ]
    for task, distance in cases:
        assert task.loss is not None
        model = denoiser()
        own = copy.deepcopy(model).train()(X)
        right = 0.3 * task.loss(own, PAIRS[0]) + 0.7 * distance(own)
        config = TrainConfig(**vars(CONFIG) | {"kd_weight": 0.7})
        (record,) = dmcp.train(model, PAIRS[:1], config, task=task, teacher=teacher)
        assert record.loss == pytest.approx(right.item(), rel=1e-5)


def test_sub_networks_learn_the_outputs_of_the_largest() -> None:
    model = denoiser()
    net = dmcp.Supernet(model, dmcp.trace(model, X), groups=4)
    largest, smallest = net.hard(net.graph.full), net.hard(net.graph.widths([2]))
    twin = copy.deepcopy(net).train()
    target = twin(X, largest).detach()
    own = twin(X, smallest)
    config = SearchConfig(**vars(SEARCH) | {"subnets": 0, "min_channels": 2, "log_every": 1, "distill": True})
    result = dmcp.search(net, PAIRS[:1], config, task=dmcp.Task(loss=mse))
    right = [mse(target, PAIRS[0]).item(), squares(own, target).item()]
    assert result.log[0].weight_losses == pytest.approx(right, rel=1e-4)


def dice_of_batch(output: Tensor, batch: Any) -> Tensor:
    return dice(output, batch[1])


@pytest.mark.parametrize(
    ("task", "outputs", "learns"),
    [
        (dmcp.Task(loss=dice_of_batch), 3, True),  # class scores: as with the default loss
        (dmcp.Task(loss=mse), 1, False),  # numbers, only if one says so
        (dmcp.Task(loss=mse, distill="l2"), 1, True),
        (dmcp.Task(loss=error, distill=lambda own, target: F.l1_loss(own, target)), 1, True),
        (dmcp.Task(loss=error), 1, False),
    ],
)
def test_prune_has_a_teacher_where_outputs_are_class_scores_or_one_says_how(
    task: dmcp.Task, outputs: int, learns: bool
) -> None:
    model = denoiser(outputs=outputs)
    batches = [(X, LABELS), (Y, LABELS)] if outputs == 3 else PAIRS
    with warnings.catch_warnings():
        warnings.simplefilter("error", DistillationWarning)
        result = dmcp.prune(model, batches, batches, search=SEARCH, train=CONFIG, task=task)
    assert [row.name for row in result.rows] == (["unpruned", "dmcp"] if learns else ["dmcp"])
    assert result.search_config and result.search_config.distill == (outputs == 3)


def pictures(count: int, seed: int, noise_of_targets: float) -> list[tuple[Tensor, Tensor]]:
    """Noisy smooth pictures with their targets."""
    dice = torch.Generator().manual_seed(seed)
    clean = F.interpolate(torch.rand(count, 1, 3, 3, generator=dice), 12, mode="bilinear")
    noisy = clean + 0.3 * torch.randn(clean.shape, generator=dice)
    targets = clean + noise_of_targets * torch.randn(clean.shape, generator=dice)
    return list(zip(noisy.split(16), targets.split(16), strict=True))


def layer(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU()]


def test_a_taught_denoiser_ends_with_a_lower_error() -> None:
    """The teacher has seen more pictures than the fine-tuning, and their targets are noisy: experiments/denoiser.py."""
    task = dmcp.Task(loss=mse, optimizer=torch.optim.AdamW)
    config = TrainConfig(epochs=12, lr=5e-3, warmup_lr=5e-3, warmup_epochs=0, reference_batch=None, weight_decay=0)
    for seed in range(3):
        torch.manual_seed(seed)
        original = nn.Sequential(*layer(1, 8), *layer(8, 8), nn.Conv2d(8, 1, 3, padding=1))
        batches, tests = pictures(384, seed, 0.6), pictures(128, 99, 0.0)
        dmcp.train(original, batches, TrainConfig(**vars(config) | {"epochs": 5}), task=task)
        graph = dmcp.trace(original, batches[0][0][:2])
        small = dmcp.cut(original, graph, dmcp.uniform(graph, "50%"), by="l2")
        errors = []
        for teacher in (original, None):
            network = copy.deepcopy(small)
            dmcp.train(network, batches[:4], config, task=task, teacher=teacher)
            errors.append(dmcp.evaluate(network, tests, mse))
        assert errors[0] < 0.9 * errors[1]


def test_slimmable_training_of_images() -> None:
    """The pruned network learns the images of the largest one."""
    model = denoiser()
    taught = dmcp.prune(model, PAIRS, PAIRS, search=SEARCH, train=CONFIG, retrain="slimmable", task=dmcp.Task(loss=mse))
    told = dmcp.Task(loss=error, distill="l2")
    other = dmcp.prune(model, PAIRS, PAIRS, search=SEARCH, train=CONFIG, retrain="slimmable", task=told)
    assert taught.rows[-1].train_loss != other.rows[-1].train_loss
    with pytest.raises(TrainingError):  # one channel is no class score
        dmcp.prune(model, PAIRS, PAIRS, search=SEARCH, train=CONFIG, retrain="slimmable", task=dmcp.Task(loss=error))


def test_teachers_of_another_size_are_refused_before_the_first_step() -> None:
    wide = denoiser(outputs=2)
    seen: list[Any] = []
    for task in (dmcp.Task(loss=mse), dmcp.Task(loss=lambda it, b: F.smooth_l1_loss(it, b[1]))):
        with pytest.raises(TrainingError):
            dmcp.prune(
                denoiser(), PAIRS, PAIRS, search=SEARCH, train=CONFIG, task=task, teacher=wide,
                runtime=dmcp.Runtime(on_event=seen.append),
            )  # fmt: skip
    assert not seen
