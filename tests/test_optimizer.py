"""The optimizer of a training: schedules and groups by hand, SGD as torch's, optimizers of one's own."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import pytest
import torch
from nets import Chain, sample, state
from torch import nn
from torch.nn import functional as F

from dmcp.defaults import resolve, resolve_training
from dmcp.errors import TrainingError
from dmcp.pruning import prune
from dmcp.settings import Optimizer, Retrain, SearchConfig, TrainConfig
from dmcp.training.loop import Task, train
from dmcp.training.optimizer import (
    cosine,
    has_batch_norms,
    learning_rate,
    make_optimizer,
    parameter_groups,
    rate_shares,
    set_lr,
    sgd,
)

CPU = torch.device("cpu")


def test_cosine_and_the_scale_of_the_batch_by_hand() -> None:
    assert [cosine(step, 8, 1.0, 0.0) for step in (0, 4, 8)] == pytest.approx([1, 0.5, 0])
    assert cosine(2, 8, 1.0, 0.2) == pytest.approx(0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2)
    warm = [cosine(step, 12, 0.8, 0.0, warmup=4, warmup_start=0.2) for step in (0, 1, 2, 4, 8, 12)]
    assert warm == pytest.approx([0.2, 0.35, 0.5, 0.8, 0.4, 0.0])
    paper, steps = resolve_training(TrainConfig()), 100 * 50
    assert [learning_rate(step, steps, 2048, paper) for step in (0, 50, steps)] == pytest.approx(
        [0.2, 0.8, 0.0], abs=1e-9
    )
    assert [learning_rate(step, steps, 512, paper) for step in (0, 50)] == pytest.approx([0.05, 0.2])
    assert learning_rate(50, steps, 512, replace(paper, reference_batch=None)) == pytest.approx(0.8)


def test_norms_and_biases_do_not_decay() -> None:
    net = nn.Module()  # a tied weight, a scale that belongs to no layer, a norm over three dims, a frozen layer
    net.conv, net.bn, net.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LayerNorm((4, 2, 2))
    net.scale = nn.Parameter(torch.ones(4))
    net.one, net.two, net.frozen = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2).requires_grad_(False)
    net.two.weight = net.one.weight
    decayed, undecayed = parameter_groups(net, 0.3)
    assert (decayed["weight_decay"], undecayed["weight_decay"]) == (0.3, 0.0)
    assert set(decayed["params"]) == {net.conv.weight, net.one.weight}
    listed = [*decayed["params"], *undecayed["params"]]
    trained = {parameter for parameter in net.parameters() if parameter.requires_grad}
    assert len(listed) == len(trained) and set(listed) == trained


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.9, True), (0.0, False)])
def test_sgd_is_torchs_bit_for_bit(momentum: float, nesterov: bool) -> None:
    ours = Chain(**Chain.FULL)
    theirs = Chain(**Chain.FULL)
    theirs.load_state_dict(ours.state_dict())
    our_sgd = sgd([{"params": list(ours.parameters()), "weight_decay": 1e-2}], 0.3, momentum, nesterov, CPU)
    torch_sgd = torch.optim.SGD(theirs.parameters(), 0.3, momentum, nesterov=nesterov, weight_decay=1e-2)
    for step in range(4):
        for net, optimizer in ((ours, our_sgd), (theirs, torch_sgd)):
            set_lr(optimizer, 0.3 / (step + 1))
            optimizer.zero_grad()
            net(sample(Chain.SHAPE, seed=step).float()).square().sum().backward()
            optimizer.step()
        for name, tensor in ours.named_parameters():
            assert torch.equal(tensor, theirs.get_parameter(name)), (step, name)


def test_an_own_optimizer_has_the_schedule_of_the_settings_and_groups_their_ratios() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(216, 10))
    batches = [(torch.randn(8, 1, 8, 8), torch.randint(10, (8,))) for _ in range(4)]
    config = resolve_training(TrainConfig(epochs=1, lr=0.1, warmup_lr=0.02, reference_batch=None))
    twin = copy.deepcopy(model).train()

    def make(net: nn.Sequential) -> torch.optim.Optimizer:
        """The last layer ten times as fast as the rest."""
        groups = [{"params": [*net[-1].parameters()], "lr": 0.5}, {"params": [*net[:-1].parameters()]}]
        return torch.optim.AdamW(groups, lr=0.05, betas=(0.8, 0.9))

    train(model, batches, config, task=Task(optimizer=lambda groups: make(model)))
    by_hand = make(twin)
    for step, (x, y) in enumerate(batches):
        rate = learning_rate(step, len(batches), len(x), config)
        for group, share in zip(by_hand.param_groups, (10, 1), strict=True):
            group["lr"] = share * rate
        F.cross_entropy(twin(x), y, label_smoothing=config.label_smoothing).backward()
        by_hand.step()
        by_hand.zero_grad()
    for trained, expected in zip(state(model).values(), state(twin).values(), strict=True):
        torch.testing.assert_close(trained, expected)


def test_an_optimizer_of_some_groups_only_is_refused() -> None:
    net = nn.Linear(3, 2)
    groups = parameter_groups(net, 0.1)
    sgd_of_all = make_optimizer(lambda given: torch.optim.SGD(given, lr=0.1), groups)
    assert isinstance(sgd_of_all, torch.optim.SGD)
    makers = [lambda given: torch.optim.SGD(given[:1], lr=0.1), lambda given: net, None]
    for make in makers:
        with pytest.raises(TrainingError):
            make_optimizer(make, groups)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rates", "default", "shares"),
    [((0.5, None), 0.05, [10.0, 1.0]), ((0.2, 0.1), 0.4, [1.0, 0.5]), ((0.0, 0.0), 0.1, [1.0, 1.0])],
    ids=["the default stands for the schedule", "else the highest rate", "no rate"],
)
def test_the_rates_of_groups_are_relative_to_the_schedule(
    rates: tuple[float | None, float], default: float, shares: list[float]
) -> None:
    groups = []
    for rate in rates:
        groups.append({"params": [nn.Parameter(torch.ones(2))]} | ({} if rate is None else {"lr": rate}))
    optimizer = torch.optim.SGD(groups, lr=default)
    assert rate_shares(optimizer) == pytest.approx(shares)
    set_lr(optimizer, 2.0, rate_shares(optimizer))
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([2.0 * share for share in shares])


# which optimizer


def stack(depth: int, *, norms: bool) -> nn.Sequential:
    """A small classifier: convolutions, and perhaps a BatchNorm after each."""
    layers: list[nn.Module] = []
    channels = 1
    for _ in range(depth):
        layers.append(nn.Conv2d(channels, 16, 3, padding=1))
        if norms:
            layers.append(nn.BatchNorm2d(16))
        layers.append(nn.ReLU())
        channels = 16
    for layer in layers:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))


def patterns(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Noisy images of four patterns, with their classes."""
    generator = torch.Generator().manual_seed(seed)
    clean = torch.randn(4, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    labels = torch.randint(4, (count,), generator=generator)
    images = clean[labels] + 0.8 * torch.randn(count, 1, 8, 8, generator=generator)
    return list(zip(images.split(32), labels.split(32), strict=True))


def test_batch_norms_are_found_where_they_follow_most_convolutions() -> None:
    assert has_batch_norms(stack(3, norms=True)) and not has_batch_norms(stack(3, norms=False))
    one_of_four = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), *(nn.Conv2d(4, 4, 3) for _ in range(3)))
    assert not has_batch_norms(one_of_four)
    assert not has_batch_norms(nn.Sequential(nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4)))
    assert not has_batch_norms(nn.Sequential(nn.Linear(4, 4)))


def test_adamw_is_chosen_where_no_rate_of_sgd_is_known() -> None:
    def chosen(suits_sgd: bool, **settings: object) -> tuple[Optimizer, float]:
        train = TrainConfig(**settings)  # type: ignore[arg-type]
        search = SearchConfig(budget="50%")
        found = resolve(search, train, Retrain.FINETUNE, trained=True, images=10**5, batch=32, suits_sgd=suits_sgd)
        assert ("optimizer" in found.reasons) == ("optimizer" not in settings)
        return found.train.optimizer, found.train.lr

    assert chosen(True) == (Optimizer.SGD, 1.6)
    assert chosen(False) == (Optimizer.ADAMW, 1e-3)
    assert chosen(False, epochs=1) == (Optimizer.ADAMW, 1e-3)  # a short training
    assert chosen(False, lr=0.1) == (Optimizer.SGD, 0.1)  # as it was before there was a choice
    assert chosen(False, optimizer="sgd") == (Optimizer.SGD, 1.6)
    assert chosen(True, optimizer="adamw") == (Optimizer.ADAMW, 1e-3)
    assert chosen(True, optimizer="adamw", lr=0.01) == (Optimizer.ADAMW, 0.01)


@pytest.mark.parametrize("trained", [True, False])
def test_the_search_takes_the_same_optimizer_as_the_training(trained: bool) -> None:
    def chosen(suits_sgd: bool, **settings: object) -> tuple[Optimizer, float]:
        search = SearchConfig(budget="50%", **settings)  # type: ignore[arg-type]
        found = resolve(
            search, TrainConfig(), Retrain.FINETUNE, trained=trained, images=10**6, batch=32, suits_sgd=suits_sgd
        )
        assert found.search.min_lr == pytest.approx(found.search.lr / 10)
        blames_sgd = "no rate of sgd" in found.reasons.get("search_lr", "")
        assert blames_sgd == (not suits_sgd and not settings)  # whoever sets the optimizer knows why
        return found.search.optimizer, found.search.lr

    assert chosen(True) == (Optimizer.SGD, 0.04 if trained else 0.2)
    assert chosen(False) == (Optimizer.ADAMW, 1e-3)
    assert chosen(False, lr=0.1) == (Optimizer.SGD, 0.1)
    assert chosen(True, optimizer="adamw") == (Optimizer.ADAMW, 1e-3)


def test_adamw_is_torchs_and_its_rate_is_not_scaled_with_the_batch() -> None:
    config = resolve_training(TrainConfig(epochs=1, optimizer=Optimizer.ADAMW, warmup_epochs=0, weight_decay=0.0))
    assert [learning_rate(0, 10, size, config) for size in (1, 512)] == [config.lr, config.lr]
    ours = stack(2, norms=True)
    theirs = copy.deepcopy(ours)
    (batch,) = patterns(32, 0)
    train(ours, [batch], config, task=Task(loss=lambda output, batch: F.cross_entropy(output, batch[1])))
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=config.lr, weight_decay=0.0)
    F.cross_entropy(theirs.train()(batch[0]), batch[1]).backward()
    optimizer.step()
    assert all(torch.equal(ours.state_dict()[name], tensor) for name, tensor in theirs.state_dict().items())


def test_a_network_without_norms_learns_again_after_the_cut() -> None:
    """With SGD at the rate that suits BatchNorms it ends no better than a guess."""
    torch.manual_seed(0)
    model = stack(6, norms=False)
    batches, tests = patterns(640, 0), patterns(160, 1)
    train(model, batches, TrainConfig(epochs=8, optimizer=Optimizer.ADAMW, lr=3e-3))
    result = prune(model, batches, tests, "50%", method="l2", train=TrainConfig(epochs=15))
    score = {row.name: row.accuracy for row in result.rows}
    assert score["original"] > 0.9 and score["l2"] > score["original"] - 0.1


def test_a_search_stays_finite_whatever_the_scale_of_the_loss() -> None:
    """With SGD at the rate that suits class scores the weights of this denoiser are no longer finite after 5 steps."""

    def noisy(count: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Noisy squares and their noise, which the network predicts."""
        generator = torch.Generator().manual_seed(seed)
        squares = torch.randn(count, 1, 2, 2, generator=generator).repeat_interleave(8, 2).repeat_interleave(8, 3)
        noise = 0.5 * torch.randn(squares.shape, generator=generator)
        return list(zip((squares + noise).split(32), noise.split(32), strict=True))

    def squared_error(output: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return F.mse_loss(output, batch[1], reduction="sum") / len(output)

    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()]
    for _ in range(4):
        layers += [nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(16, 1, 3, padding=1))
    batches, tests = noisy(320, 0), noisy(64, 1)
    task = Task(loss=squared_error)
    train(model, batches, TrainConfig(epochs=5, optimizer=Optimizer.ADAMW), task=task)

    search = SearchConfig(budget="50%", epochs=4)
    result = prune(model, batches, tests, "50%", search=search, retrain="none", task=task)
    assert result.search is not None and result.search_config is not None
    assert result.search_config.optimizer is Optimizer.ADAMW and result.search_config.lr == 1e-3
    smallest = [record.weight_losses[1] for record in result.search.log if record.weight_losses is not None]
    assert len(smallest) == 40 and all(map(math.isfinite, smallest))
    assert sum(smallest[-10:]) < 0.95 * sum(smallest[:10])
