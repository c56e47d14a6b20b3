"""The supernet as an object. That its gates are right is in test_gates.py and test_invariants.py."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import torchvision
from nets import NETS, Chain, Residual, SharedWeight, distance, randomise, sample
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp
from dmcp.errors import WidthsError
from dmcp.supernet import Narrow

X = sample(Chain.SHAPE)


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return randomise(Chain(**Chain.FULL))


@pytest.fixture(scope="module")
def graph(model: nn.Module) -> Any:
    return dmcp.trace(model, X)


@pytest.mark.parametrize(("groups", "align"), [(0, 1), (-1, 1), (2.0, 1), ("10", 1), (True, 1), (10, 0), (10, 1.5)])
def test_groups_that_make_no_sense_are_refused(model: nn.Module, graph: Any, groups: Any, align: Any) -> None:
    with pytest.raises(WidthsError, match=r"ints of at least 1.*" + repr(align).replace(".", r"\.")):
        dmcp.Supernet(model, graph, groups=groups, align=align)


@pytest.mark.parametrize("shape", [(), (21,), (23,), (1, 22)])
def test_gates_of_another_length_are_refused(model: nn.Module, graph: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(WidthsError, match="22 in all"):
        dmcp.Supernet(model, graph)(X, torch.ones(shape, dtype=torch.bool))


def test_hard_takes_a_tensor_of_widths(model: nn.Module, graph: Any) -> None:
    net = dmcp.Supernet(model, graph)
    widths = graph.widths({"conv1": 3, "conv2": 9, "conv3": 1})
    assert torch.equal(net.hard(widths), net.hard(torch.tensor([3, 9, 1])))
    assert torch.equal(net.hard(widths), net.hard({"conv1": 3, "conv3": 1}))


def test_short_chains_are_padded(model: nn.Module, graph: Any) -> None:
    net = dmcp.Supernet(model, graph, groups=8)  # spaces of 7, 9 and 6 channels
    assert net.alpha.shape == (3, 7)
    assert [row[row > 0].tolist() for row in net.sizes] == [[1] * 7, [1] * 7 + [2], [1] * 6]
    with torch.no_grad():
        net.alpha.fill_(1e4)
    assert net.marginals().tolist() == [[1.0] * n + [0.0] * (8 - n) for n in (7, 8, 6)]
    assert graph.expected_macs(net.marginals(), net.sizes).item() == graph.macs()


def test_padding_gets_no_gradient(model: nn.Module, graph: Any) -> None:
    net = dmcp.Supernet(model, graph, groups=8).train()
    (net(X, net.soft()).square().sum() + graph.expected_macs(net.marginals(), net.sizes)).backward()
    there = net.sizes[:, 1:] > 0
    assert (net.alpha.grad[there] != 0).all()
    assert (net.alpha.grad[~there] == 0).all()
    assert (~there).any()


def test_the_state_is_the_models_and_the_alphas(model: nn.Module, graph: Any) -> None:
    net, other = dmcp.Supernet(model, graph), dmcp.Supernet(Chain(**Chain.FULL).double(), graph)
    assert set(net.state_dict()) == {"alpha", *(f"model.{name}" for name in model.state_dict())}
    with torch.no_grad():
        net.alpha.copy_(torch.randn_like(net.alpha))
    other.load_state_dict(net.state_dict())
    assert torch.equal(other.eval()(X, other.soft()), net.eval()(X, net.soft()))


def test_the_mode_is_the_models(model: nn.Module, graph: Any) -> None:
    dirty = copy.deepcopy(model).train()
    dirty.bn1.eval()
    net = dmcp.Supernet(dirty, graph)
    assert [part.training for part in net.model.modules()] == [part.training for part in dirty.modules()]


def test_running_statistics_are_those_of_the_copy(model: nn.Module, graph: Any) -> None:
    net = dmcp.Supernet(model, graph).train()
    before = model.bn1.running_mean.clone()
    net(X, net.hard(net.min_widths))
    assert torch.equal(model.bn1.running_mean, before)
    assert not torch.equal(net.model.bn1.running_mean, before)


def test_a_copy_of_a_supernet_is_its_own(model: nn.Module, graph: Any) -> None:
    net = dmcp.Supernet(model, graph).eval()
    twin = copy.deepcopy(net)
    gates = net.hard(net.min_widths)
    assert torch.equal(twin(X, gates), net(X, gates))
    with torch.no_grad():
        twin.model.conv1.weight.zero_()
        twin.alpha.fill_(3)
    assert net.model.conv1.weight.count_nonzero() > 0
    assert net.alpha.count_nonzero() == 0


def test_other_precisions(model: nn.Module, graph: Any) -> None:
    net = dmcp.Supernet(model, graph).eval()
    exact = net(X, net.hard(net.min_widths))
    net.float()
    for gates in (net.hard(net.min_widths), net.soft()):
        assert net(X.float(), gates).dtype == torch.float32
    assert distance(net(X.float(), net.hard(net.min_widths)).double(), exact) < 1e-4
    assert net.hard(net.min_widths).dtype == torch.bool


def test_gates_of_zero_and_one_are_hard_gates_where_zero_stays_zero() -> None:
    model, x = randomise(Residual(**Residual.FULL)), sample(Residual.SHAPE)
    graph = dmcp.trace(model, x)
    net = dmcp.Supernet(model, graph).eval()
    gates = net.hard(graph.widths([3, 2, 5, 4]))
    assert distance(net(x, gates.double()), net(x, gates)) < 1e-10


class Pairs(nn.Module):
    """A dim that is a product of two spaces beside a dim that is a concatenation of both and of fixed channels."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 5, 1)
        self.pairs = nn.Linear(4 * 5 * 2, 3)
        self.beside = nn.Conv2d(4 + 3 + 5 + 4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.one(x), self.other(x)
        pairs = (one[:, :, None] * other[:, None]).mean((3, 4), keepdim=True)[..., 0].repeat(1, 1, 1, 2)
        beside = self.beside(torch.cat([one, x, other, one.sigmoid()], 1))
        return self.pairs(pairs.flatten(1)) + beside.mean((2, 3))


def gated_pairs(net: Pairs, x: Tensor, gates: Tensor) -> Tensor:
    """The same net with the gates written out."""
    g, h = gates[:4, None, None], gates[4:, None, None]
    one, other = net.one(x), net.other(x)
    pairs = ((one * g)[:, :, None] * (other * h)[:, None]).mean((3, 4), keepdim=True)[..., 0].repeat(1, 1, 1, 2)
    beside = net.beside(torch.cat([one * g, x, other * h, one.sigmoid() * g], 1))
    return net.pairs(pairs.flatten(1)) + beside.mean((2, 3))


@pytest.mark.parametrize("hard", [True, False])
def test_dims_made_of_several_spaces(hard: bool) -> None:
    model: Any = randomise(Pairs())
    graph = dmcp.trace(model, X)
    assert {space.name: space.size for space in graph.spaces} == {"one": 4, "other": 5}
    net = dmcp.Supernet(model, graph).eval()
    gates = net.hard(graph.widths([2, 3])) if hard else torch.rand(9, dtype=torch.float64)
    assert distance(net(X, gates), gated_pairs(model, X, gates.double())) < 1e-10
    assert distance(net(X, gates), model(X)) > 0.01


class Summed(nn.Module):
    """The second conv reads one space, and writes one that is summed without a weight: both its dims are gated."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x)).relu().sum((1, 3))


def test_a_tensor_that_is_gated_along_two_dims() -> None:
    model: Any = randomise(Summed())
    graph = dmcp.trace(model, X)
    assert {space.name: space.size for space in graph.spaces} == {"one": 4, "other": 5}
    net = dmcp.Supernet(model, graph).eval()
    hidden = model.one(X)[:, :2]
    weight, bias = model.other.weight[:3, :2], model.other.bias[:3]
    narrow = nn.functional.conv2d(hidden, weight, bias).relu().sum((1, 3))
    assert distance(net(X, net.hard(graph.widths([2, 3]))), narrow) < 1e-10
    assert distance(net(X, net.hard(graph.full)), model(X)) < 1e-10


def test_a_module_of_a_supernet_is_compiled_once_per_kind(model: nn.Module, graph: Any) -> None:
    """Shapes do not depend on the widths: nothing is compiled again for other ones."""
    net = dmcp.Supernet(model, graph).eval()
    graphs: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    compiled = torch.compile(net, backend=backend, fullgraph=True)
    with torch.no_grad():
        for widths in (graph.full, net.min_widths, graph.widths([3, 4, 5])):
            gates = net.hard(widths)
            assert distance(compiled(X, gates), net(X, gates)) < 1e-10
        assert len(graphs) == 1
        assert distance(compiled(X, net.soft()), net(X, net.soft())) < 1e-10
    assert len(graphs) == 2
    torch._dynamo.reset()


def test_activations_run_through_the_model_itself(model: nn.Module, graph: Any) -> None:
    """Nothing is rewritten: hooks of the user's layers are called, at full width."""
    watched = copy.deepcopy(model)
    seen: list[Tensor] = []
    watched.conv2.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    net = dmcp.Supernet(watched, graph).eval()
    net(X, net.hard(net.min_widths))
    assert [value.shape[1] for value in seen] == [7]


# -- narrow networks, fed with slices of the shared weights

TOYS = {toy.__name__: toy for toy in NETS}
ZOO = ("resnet18", "mobilenet_v2", "mobilenet_v3_small", "shufflenet_v2_x1_0", "densenet121")


@functools.cache
def traced(name: str) -> tuple[nn.Module, Any, Tensor]:
    """A model that no test changes, its graph, and an input."""
    if name in TOYS:
        model, shape = TOYS[name](**TOYS[name].FULL), TOYS[name].SHAPE
    else:
        model, shape = getattr(torchvision.models, name)(num_classes=5), (3, 32, 32)
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    x = sample(shape)
    randomise(model)
    return model, dmcp.trace(model, x[:2]), x


def trained(name: str) -> tuple[Any, Tensor]:
    """A supernet in train mode; a small one whose weights and statistics have moved a little."""
    model, graph, x = traced(name)
    net = dmcp.Supernet(model, graph, 4).double().train()
    optimizer = torch.optim.SGD(net.weights(), 0.01)
    for _ in range(2 if name in TOYS else 0):  # all numbers are random anyway
        F.cross_entropy(net(x, net.hard(graph.full)), torch.arange(len(x)) % 5).backward()
        optimizer.step()
        optimizer.zero_grad()
    return net, x


def some_widths(graph: Any, seed: int) -> Any:
    dice = torch.Generator().manual_seed(seed)
    return graph.widths([int(torch.randint(1, space.size + 1, (), generator=dice)) for space in graph.spaces])


def outcome(net: Any, run: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The output, and the gradient of every shared weight."""
    net.zero_grad()
    output = run()
    weights = torch.linspace(-1, 2, output.numel(), dtype=output.dtype).reshape(output.shape)
    (output * weights).sum().backward()
    slopes = {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad.clone()
        for name, weight in net.model.named_parameters()
    }
    net.zero_grad()
    return output.detach(), slopes


def bits(net: Any) -> dict[str, Any]:
    """Weights, alphas, statistics and modes."""
    tensors = {name: tensor.clone() for name, tensor in [*net.named_parameters(), *net.named_buffers()]}
    return {**tensors, **{f"mode of {name}": torch.tensor(part.training) for name, part in net.named_modules()}}


@pytest.mark.parametrize("name", [*TOYS, ZOO[0], *(pytest.param(it, marks=pytest.mark.slow) for it in ZOO[1:])])
def test_a_narrow_network_is_the_gated_one(name: str) -> None:
    net, x = trained(name)
    some = [some_widths(net.graph, seed) for seed in range(3 if name in TOYS else 1)]
    some += [net.min_widths, net.graph.full] if name in TOYS else []
    for training in (True, False):
        gated = copy.deepcopy(net.train(training), {id(net.graph): net.graph})
        before = bits(net)
        for widths in some:
            expected, slopes = outcome(gated, lambda w=widths, n=gated: n(x, n.hard(w)))
            scale = max(slope.abs().max() for slope in slopes.values())
            for align in (1, 4, 8) if name in TOYS else (1, 8) if name != "densenet121" else (4,):  # it has 121 layers
                small = Narrow(net, widths, align)
                output, own = outcome(net, lambda run=small: run(x))
                assert distance(output, expected) < 1e-8, (training, align)
                worst = {weight: (own[weight] - slope).abs().max() / scale for weight, slope in slopes.items()}
                assert max(worst.values()) < 1e-8, (training, align, max(worst, key=worst.__getitem__))
        after = bits(net)
        assert [key for key in before if not torch.equal(before[key], after[key])] == []


@pytest.mark.parametrize("align", [1, 4, 8])
def test_a_narrow_network_is_as_wide_as_said(align: int) -> None:
    net, x = trained("Chain")
    small = Narrow(net, {"conv1": 3, "conv2": 5, "conv3": 6}, align)
    wide = {1: (3, 5, 6), 4: (4, 8, 6), 8: (7, 8, 6)}[align]  # never wider than the 7, 9 and 6 that there are
    assert [small.skeleton.get_submodule(f"conv{n}").weight.shape[0] for n in (1, 2, 3)] == list(wide)
    seen: list[int] = []
    small.skeleton.conv3.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0].shape[1]))
    small(x)
    assert seen == [wide[1]]


def test_a_narrow_network_follows_the_weights() -> None:
    """It is made once and used after every step."""
    net, x = trained("Residual")
    small = Narrow(net, net.min_widths, 4)
    with torch.no_grad():
        for weight in net.weights():
            weight.add_(torch.randn_like(weight) / 10)
    assert distance(small(x), net(x, net.hard(net.min_widths))) < 1e-9


def test_a_narrow_network_has_its_own_statistics() -> None:
    net, x = trained("Chain")
    small = Narrow(net, net.min_widths)
    before, own = net.model.bn1.running_mean.clone(), small.skeleton.bn1.running_mean.clone()
    assert torch.equal(own, before[: len(own)])
    small(x)
    assert torch.equal(net.model.bn1.running_mean, before)
    assert not torch.equal(small.skeleton.bn1.running_mean, own)


def test_shared_weights_of_a_narrow_network_stay_shared() -> None:
    net, x = trained(SharedWeight.__name__)
    small = Narrow(net, some_widths(net.graph, 1), 4)
    _, slopes = outcome(net, lambda: small(x))
    assert small.skeleton.left.weight is small.skeleton.right.weight
    assert "right.weight" not in slopes and slopes["left.weight"].count_nonzero() > 0


def test_frozen_weights_of_a_narrow_network_get_no_gradient() -> None:
    net, x = trained("Chain")
    net.model.conv2.requires_grad_(False)
    Narrow(net, net.min_widths)(x).sum().backward()
    assert net.model.conv2.weight.grad is None and net.model.conv1.weight.grad is not None


class Normed(nn.Module):
    """A layer norm over channels: narrow ones compute something else."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(3, 8), nn.LayerNorm(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.norm(self.one(x)))


def test_narrow_networks_of_inexact_graphs_are_refused() -> None:
    graph = dmcp.trace(Normed(), torch.ones(2, 3), exact=False)
    assert not graph.exact
    net = dmcp.Supernet(Normed(), graph)
    with pytest.raises(WidthsError, match="not exact"):
        Narrow(net, net.min_widths)


@pytest.mark.parametrize("widths", [{"conv1": 0}, {"conv1": 99}, {"conv9": 1}])
def test_narrow_networks_of_impossible_widths_are_refused(widths: dict[str, int]) -> None:
    net, _ = trained("Chain")
    with pytest.raises(WidthsError):
        Narrow(net, widths)


@pytest.mark.filterwarnings("ignore:None of the inputs")  # torch's own, of the old kind under no_grad
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_is_refused(reentrant: bool) -> None:
    class Frugal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.utils.checkpoint.checkpoint(self.a, x, use_reentrant=reentrant)
            return self.b(x)

    model = Frugal()
    graph = dmcp.trace(model, torch.zeros(2, 3, 8, 8))
    assert dmcp.cut(model, graph, graph.full) is not None  # cutting needs no gates
    with pytest.raises(dmcp.WidthsError, match="activation checkpointing"):
        dmcp.Supernet(model, graph)
