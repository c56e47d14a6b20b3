"""The least squares after a cut, against networks whose channels can be replaced exactly."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from nets import same, state
from torch import Tensor, nn

import dmcp
from dmcp.cutting import highest_scores
from dmcp.data.datasets import load
from dmcp.data.loaders import make_loader
from dmcp.errors import DataError
from dmcp.models import build
from dmcp.training import reconstruction
from dmcp.training.reconstruction import reconstruct, refitted


class Twins(nn.Module):
    """Every channel behind the first layer exists twice, so either half of them says all that there is to say."""

    def __init__(self, first: nn.Module, *rest: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.rest = nn.Sequential(*rest)
        with torch.no_grad():
            half = len(first.weight) // 2
            for parameter in first.parameters():
                parameter[half:] = parameter[:half]

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(torch.relu(self.first(x)))


def conv(inputs: int, outputs: int, **settings: Any) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, settings.pop("kernel_size", 3), **settings)


NETWORKS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {}
torch.manual_seed(0)
NETWORKS["conv"] = Twins(conv(3, 8), conv(8, 5, padding=1)), (3, 9, 9)
NETWORKS["without a bias"] = Twins(conv(3, 8), conv(8, 5, padding=1, bias=False)), (3, 9, 9)
NETWORKS["stride and dilation"] = Twins(conv(3, 8), conv(8, 5, stride=(2, 1), dilation=2, padding=(3, 1))), (3, 11, 9)
NETWORKS["same padding"] = Twins(conv(3, 8), conv(8, 5, kernel_size=(3, 5), padding="same")), (3, 9, 9)
NETWORKS["one dim"] = Twins(nn.Conv1d(3, 8, 3), nn.Conv1d(8, 5, 5, stride=2, padding=2)), (3, 25)
NETWORKS["linear"] = Twins(nn.Linear(7, 8), nn.Linear(8, 5)), (7,)
NETWORKS["tokens"] = Twins(nn.Linear(7, 8), nn.Linear(8, 5)), (6, 7)
NETWORKS["flattened"] = Twins(conv(3, 8), nn.Flatten(), nn.Linear(8 * 9, 5)), (3, 5, 5)
NETWORKS["a norm behind"] = (
    Twins(conv(3, 8), conv(8, 6, bias=False), nn.BatchNorm2d(6), nn.ReLU(), conv(6, 4)),
    (3, 9, 9),
)


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_left_makes_up_for_twins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconstruction, "_RIDGES", (1e-9,))
    model, shape = NETWORKS[name]
    model = copy.deepcopy(model).double().eval()
    x = torch.randn(300, *shape, dtype=torch.float64)
    dmcp.recalibrate(model, [(x[:200],)])
    graph = dmcp.trace(model, x[:2])
    space = next(space for space in graph.spaces if "first" in space.writers)
    kept = {space.name: list(range(4))}
    before = state(model)

    plain = dmcp.cut(model, graph, kept)
    fitted = dmcp.cut(model, graph, kept, batches=[(part,) for part in x[:200].split(64)])
    dmcp.recalibrate(fitted, [(x[:200],)])
    assert not torch.allclose(plain(x), model(x), atol=0.01)
    exact = 1e-2 if "norm" in name else 1e-5  # batches of 200 and of 300 have other variances
    torch.testing.assert_close(fitted(x), model(x), atol=exact, rtol=exact)
    assert same(before, state(model)) and not fitted.training
    for module in [*model.modules(), *fitted.modules()]:
        assert not module._forward_hooks and not module._forward_pre_hooks

    again = dmcp.cut(refitted(model, graph, kept, [(x[:200],)]), graph, kept)  # the same, cut afterwards
    at_once = dmcp.cut(model, graph, kept, batches=[(x[:200],)])
    assert same(state(again), state(at_once))


@pytest.mark.parametrize("name", [name for name in NETWORKS if name != "flattened"])
def test_patches_are_what_a_layer_reads(name: str) -> None:
    model, shape = NETWORKS[name]
    layer = model.rest[0]
    width = layer.weight.shape[1]
    read_shape = (width, *shape[1:]) if not isinstance(layer, nn.Linear) else (*shape[:-1], width)
    x = torch.randn(4, *read_shape)
    outputs = reconstruction._by_position(layer, layer(x))
    positions = torch.randperm(outputs.shape[1])[:10]
    patches = reconstruction._patches(layer, x, positions)[0]
    computed = patches @ layer.weight.flatten(1).T
    if layer.bias is not None:
        computed = computed + layer.bias
    torch.testing.assert_close(computed, outputs[:, positions], atol=1e-5, rtol=1e-5)


def test_groups_are_fitted_one_by_one() -> None:
    """Of a grouped layer, each output has the inputs of its group; gradient descent finds nothing better."""
    layer = nn.Conv2d(8, 12, 3, groups=4).double()
    x = torch.randn(40, 8, 6, 6, dtype=torch.float64)
    wanted = nn.Conv2d(8, 12, 3, groups=4).double()(x).detach()
    positions = torch.arange(16)
    targets = wanted.flatten(2).transpose(1, 2)
    with torch.no_grad():
        reconstruction._fit_layer(layer, reconstruction._patches(layer, x, positions), targets)
        missing = (layer(x) - wanted).square().mean() / wanted.square().mean()
    assert missing < 0.01  # what the ridge leaves


class Special(nn.Conv2d):
    """Computes something else than its class."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class Difficult(nn.Module):
    """Layers that must stay as they are: shared, frozen, of another class, called by keyword, or run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.special = Special(8, 8, 3, padding=1)
        self.by_keyword = nn.Conv2d(8, 8, 3, padding=1)
        self.twice = nn.Conv2d(8, 8, 3, padding=1)
        self.frozen = nn.Conv2d(8, 8, 1).requires_grad_(False)
        self.shared = nn.Conv2d(8, 8, 1)
        self.sharing = nn.Conv2d(8, 8, 1)
        self.sharing.weight = self.shared.weight
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.special(torch.relu(self.first(x)))
        x = self.twice(self.twice(self.by_keyword(input=x)))
        return self.last(self.sharing(self.shared(self.frozen(x))))


def test_layers_that_must_stay_as_they_are_do() -> None:
    model = Difficult().eval()
    x = torch.randn(64, 3, 8, 8)
    graph = dmcp.trace(model, x[:2])
    widths = {space.name: max(1, space.size // 2) for space in graph.spaces}
    plain = dmcp.cut(model, graph, widths)
    fitted = dmcp.cut(model, graph, widths, batches=[(x,)])
    changed = {name for name, tensor in state(plain).items() if not torch.equal(tensor, state(fitted)[name])}
    assert changed == {"last.weight", "last.bias"}


def test_a_trained_network_keeps_most_of_its_accuracy() -> None:
    digits = load("digits")
    train = make_loader(digits.train, 64, train=True)
    test = make_loader(digits.test, 382, train=False)
    torch.manual_seed(0)
    model = build("digits:resnet", width=8)
    dmcp.train(model, train, dmcp.TrainConfig(epochs=6))
    graph = dmcp.trace(model, torch.zeros(2, 1, 8, 8))
    widths = dmcp.uniform(graph, "50%")
    scores = dmcp.importance(model, graph, train)
    accuracies = []
    for batches in (None, train):
        small = dmcp.cut(model, graph, widths, by=scores, batches=batches)
        statistics = {name: tensor for name, tensor in state(small).items() if "running" in name}
        original = state(dmcp.cut(model, graph, widths, by=scores))
        assert all(torch.equal(tensor, original[name]) for name, tensor in statistics.items())
        dmcp.recalibrate(small, train)
        accuracies.append(dmcp.evaluate(small, test))
    assert accuracies[1] > accuracies[0] + 0.05

    # The quick method cuts such a network.
    result = dmcp.prune(model, train, test, "50%", method="sensitivity", retrain="none", graph=graph)
    assert result.rows[-1].accuracy > accuracies[0] + 0.05


def test_without_samples() -> None:
    model, shape = NETWORKS["conv"]
    graph = dmcp.trace(model, torch.zeros(2, *shape))
    kept = highest_scores(graph, graph.widths([4]), {graph.spaces[0].name: torch.arange(8)})
    assert refitted(model, graph, kept, []) is model
    assert refitted(model, graph, graph.full, [(torch.zeros(2, *shape),)]) is model
    with pytest.raises(DataError, match="at least one batch"):
        reconstruct(dmcp.cut(model, graph, kept), model, graph, kept, [])
