"""How the cut network gets its weights: from scratch, fine-tuned, slimmable, and from a teacher."""

from __future__ import annotations

import copy
import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from nets import Residual, means, same, state
from short_runs import SEARCH, TRAIN, Noise, prune, traced_residual
from torch import nn

import dmcp
from dmcp.defaults import resolve_training
from dmcp.retraining import (
    DivergenceWarning,
    Retraining,
    TeacherWarning,
    catch_up,
    train_all,
)
from dmcp.runs.records import DMCP, ORIGINAL, TEACHER, UNIFORM, UNPRUNED
from dmcp.runtime.batches import generator
from dmcp.searching.steps import StepContext, weight_step
from dmcp.searching.subnets import make_chains
from dmcp.settings import Retrain, TrainConfig
from dmcp.training.loop import evaluate
from dmcp.training.losses import classification_loss
from dmcp.training.trained import UnusedNormsWarning, is_trained, probability_of

pytestmark = pytest.mark.filterwarnings("ignore::dmcp.retraining.TeacherWarning")  # most of them know nothing here


def other() -> nn.Module:
    """The same architecture with other weights."""
    torch.manual_seed(7)
    return Residual(**Residual.FULL)


def mean() -> nn.Module:
    torch.manual_seed(7)
    return means()


def test_slimmable_training_is_one_weight_step_of_two_networks() -> None:
    """Each step equals stage 1 on the largest and the pruned network: accumulated gradients, one optimizer step."""
    model, graph = traced_residual()
    widths = graph.widths({space.name: max(1, space.size // 2) for space in graph.spaces})
    settings = TrainConfig(
        epochs=1, reference_batch=None, lr=0.1, warmup_lr=0, warmup_epochs=0, weight_decay=0, label_smoothing=0
    )
    config = resolve_training(settings)
    loader = Noise(1)
    slimmable = Retraining(config=config, kind=Retrain.SLIMMABLE)
    found = train_all(model, graph, {DMCP: widths}, loader, slimmable).networks[DMCP]
    unpruned = copy.deepcopy(model)
    dmcp.reinitialize(unpruned, generator=generator(config.seed))
    net = dmcp.Supernet(unpruned, graph).train()
    optimizer = torch.optim.SGD(net.weights(), 0.1, 0.9, nesterov=True)
    budget = dmcp.parse_budget("50%", graph)
    loss = classification_loss()
    context = StepContext(net=net, chains=make_chains(net), budget=budget, config=SEARCH, loss=loss)
    weight_step(context, loader.batches, optimizer, [net.hard(graph.full), net.hard(widths)])
    wanted = dmcp.cut(net.model, graph, widths)
    for mine, theirs in zip(found.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    alone = train_all(model, graph, {DMCP: widths}, loader, Retraining(config=config)).networks[DMCP]
    assert not torch.equal(found.stem.weight, alone.stem.weight)


def test_a_training_that_diverges_is_warned_of() -> None:
    model, graph = traced_residual()
    wild = resolve_training(TrainConfig(epochs=6, lr=30.0, warmup_lr=30.0, reference_batch=None))
    with pytest.warns(DivergenceWarning, match="'dmcp' went wrong") as found:
        train_all(model, graph, {DMCP: graph.full}, Noise(), Retraining(config=wild))
    assert [it.filename for it in found] == [__file__]


class Eval(nn.BatchNorm2d):
    def train(self, mode: bool = True) -> Eval:
        return super().train(False)


@pytest.mark.parametrize(
    ("norm", "epochs", "calibrates"), [(nn.BatchNorm2d, 1, 1), (nn.BatchNorm2d, 15, 0), (Eval, 1, 0)]
)
def test_norms_catch_up_after_few_steps(norm: type[nn.Module], epochs: int, calibrates: bool) -> None:
    """Not after many, nor if one stays in eval mode; whatever torch's global seed is."""
    net, found = nn.Sequential(nn.Conv2d(3, 4, 1), norm(4)), list[Any]()
    images = torch.randn(15, 3, 4, 4, generator=generator(0))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(images, images), 2, True, drop_last=True)
    for seed in (0, 1):
        torch.manual_seed(seed)
        catch_up(one := copy.deepcopy(net), loader, resolve_training(TrainConfig(epochs=epochs)))
        found.append(state(one))
    assert same(*found) and same(found[0], state(net)) != calibrates


# teachers


@pytest.mark.parametrize("kind", [Retrain.SCRATCH, Retrain.FINETUNE])
@pytest.mark.parametrize("make", [other, mean])
def test_a_given_teacher_is_the_one_that_teaches(kind: Retrain, make: Any) -> None:
    """The same as the parts by hand; the teacher is not trained, and comes out as it was."""
    (model, graph), teacher, seen = traced_residual(), make().train(), list[Any]()
    before = state(teacher)
    result = prune(retrain=kind, teacher=teacher, runtime=dmcp.Runtime(on_event=seen.append))
    assert same(before, state(teacher)) and teacher.training
    assert {event.stage for event in seen} == {"search", DMCP, "test"}  # none is trained first
    net = dmcp.Supernet(model, graph, SEARCH.groups)
    dmcp.search(net, Noise(), SEARCH)
    small = dmcp.cut(net.model, graph, result.widths)
    if kind is Retrain.FINETUNE:
        dmcp.recalibrate(small, Noise())
    else:
        dmcp.reinitialize(small, generator=generator(TRAIN.seed))
    dmcp.train(small, Noise(), TRAIN, teacher=teacher)
    dmcp.recalibrate(small, Noise())  # the statistics lag after few steps
    assert same(state(small), state(result.model))


def test_the_unpruned_network_teaches_once_it_is_trained() -> None:
    plain, taught = prune(), prune(teacher="unpruned")
    assert plain.widths == taught.widths and not same(state(plain.model), state(taught.model))
    assert [row.name for row in taught.rows] == [UNPRUNED, DMCP]
    with_baselines = prune(teacher="unpruned", baselines=True)
    assert [row.name for row in with_baselines.rows] == [UNPRUNED, UNIFORM, DMCP]
    assert same(state(with_baselines.model), state(taught.model))


def test_the_teacher_is_a_row_if_its_costs_are_known() -> None:
    model, graph = traced_residual()
    cases: list[tuple[dict[str, Any], list[str]]] = [
        ({"teacher": model}, [ORIGINAL, DMCP]),
        ({"teacher": model, "retrain": "finetune"}, [ORIGINAL, DMCP]),
        ({"teacher": model, "baselines": []}, [DMCP]),
        ({"teacher": mean()}, [DMCP]),  # nobody has counted what it costs
        ({"teacher": other(), "retrain": "finetune", "baselines": True}, [TEACHER, UNPRUNED, UNIFORM, DMCP]),
    ]
    for options, names in cases:
        assert [row.name for row in prune(**options).rows] == names
    row = prune(teacher=other()).rows[0]
    assert (row.name, row.macs, row.accuracy) == (TEACHER, graph.macs(), evaluate(other(), Noise(1)))


def test_a_poor_teacher_is_warned_of_before_the_search() -> None:
    teacher, tests = other(), Noise(3, 40)
    nn.init.zeros_(teacher.head.weight), nn.init.zeros_(teacher.head.bias)  # it always says the first class
    tests.batches = [(x, torch.arange(40) % 5) for x, _ in tests.batches]

    with pytest.warns(TeacherWarning, match="20.00%") as found, pytest.raises(KeyboardInterrupt):
        prune(val_loader=tests, teacher=teacher, runtime=dmcp.Runtime(on_event=Mock(side_effect=KeyboardInterrupt)))
    assert len(found) == 1


# trained or not, by a metric of one's own


class Denoiser(nn.Module):
    """Has no norms, like RFDN, or norms without statistics, like InstanceNorm."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 12, 3, padding=1), nn.Conv2d(12, 1, 3, padding=1)
        self.norm = nn.BatchNorm2d(12, track_running_stats=False) if norm else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.second(self.norm(self.first(x)).relu())


def _noise_ratio(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return -10 * (output - batch[1]).square().mean((1, 2, 3)).log10().sum(), len(output)


def _error(output: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
    return (output - batch[1]).square().mean((1, 2, 3)).sum(), len(output)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("metric", [_noise_ratio, dmcp.LowerIsBetter(_error)])
def test_a_network_counts_as_trained_by_what_it_does(norm: bool, metric: Any) -> None:
    dice = generator(0)
    clean = [torch.ones(8, 1, 12, 12) * torch.rand(8, 1, 1, 1, generator=dice) for _ in range(3)]
    batches = [(x + 0.3 * torch.randn(x.shape, generator=dice), x) for x in clean]
    for seed in range(4):
        torch.manual_seed(seed)
        model = Denoiser(norm)
        before = state(model)
        assert not is_trained(model, 0, batches, metric)
        assert same(before, state(model))
    optimizer = torch.optim.Adam(model.parameters(), 0.02)
    for _ in range(60):
        for x, wanted in batches:
            optimizer.zero_grad()
            (model(x) - wanted).square().mean().backward()
            optimizer.step()
    assert is_trained(model, 0, batches, metric)


def _small_classifier(seed: int, classes: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    pooled = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, classes)]
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), *pooled)


@pytest.mark.parametrize("colors", [0.0, 1.0], ids=["noise", "classes of different colors"])
def test_an_untrained_classifier_is_not_trained_by_luck(colors: float) -> None:
    """Of 30 untrained networks, some are right on more than 36% of 64 images of four classes."""
    luckiest = 0.0
    for seed in range(30):
        model = _small_classifier(seed)
        labels = torch.randint(4, (64,))
        x = torch.randn(64, 3, 8, 8) + colors * torch.randn(4, 3, 1, 1)[labels]
        batches = [(x, labels)]
        luckiest = max(luckiest, evaluate(model, batches))
        assert not is_trained(model, 4, batches, None)
    assert luckiest > 0.36


def test_the_most_common_label_is_no_knowledge() -> None:
    """A network that always gives one class is right on 80% where 80% of the labels are that class."""
    model = _small_classifier(0)
    model[-1].bias.data[2] += 100
    labels = torch.tensor([2] * 80 + [0, 1, 3, 0] * 5)
    batches = [(torch.randn(100, 3, 8, 8), labels)]
    assert evaluate(model, batches) == pytest.approx(0.8)
    assert not is_trained(model, 4, batches, None)


def test_bool_labels_are_the_classes_0_and_1() -> None:
    x = torch.randn(64, 3, 8, 8)
    labels = x.mean((1, 2, 3)) > 0
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    assert not is_trained(model, 2, [(x, labels)], None)
    model[-1].weight.data.copy_(torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]]))
    model[-1].bias.data.zero_()
    assert is_trained(model, 2, [(x, labels)], None)


@pytest.mark.parametrize(("right", "samples", "share"), [(25, 64, 0.25), (3, 5, 0.5), (10, 10, 0.1), (0, 4, 0.5)])
def test_the_probability_of_right_answers_is_binomial(right: int, samples: int, share: float) -> None:
    terms = [math.comb(samples, k) * share**k * (1 - share) ** (samples - k) for k in range(right, samples + 1)]
    assert probability_of(right, samples, share) == pytest.approx(sum(terms))


def test_a_network_that_was_trained_in_eval_mode_is_warned_of() -> None:
    """LPRNet: its BatchNorms have mean 0 and variance 1, so that calibrating them loses all."""
    x = torch.randn(64, 3, generator=generator(0))
    batches = [(x, (x[:, 0] > 0).long())]
    model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).eval()
    optimizer = torch.optim.Adam(model.parameters(), 0.05)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), batches[0][1]).backward()
        optimizer.step()
    with pytest.warns(UnusedNormsWarning):
        assert is_trained(model, 2, batches, None)
