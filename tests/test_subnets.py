"""Sub-networks of a weight step: bounds, how often each is sampled, sorted channels; and the stem that they share.

The oracle of the stem is the step without one: on a copy of the same supernet, in float64, over three steps. Most of
its nets are attacks: their code looks at more than the output of the first layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from nets import NETS, Residual, Toy, distance, randomise, sample, traced
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp
import dmcp.searching.steps
from dmcp.errors import WidthsError
from dmcp.markov import CHAIN, INDEPENDENT
from dmcp.searching.bounds import width_bounds
from dmcp.searching.budget import parse_budget
from dmcp.searching.search import search
from dmcp.searching.stem import Stem, find_stem
from dmcp.searching.steps import StepContext, weight_step
from dmcp.searching.subnets import Chains, make_chains, sample_gates, sort_channels
from dmcp.searching.supernet import Narrow
from dmcp.settings import Sampling, SearchConfig

MANY = 4000
SPREAD = 4 * 0.5 / MANY**0.5  # four standard deviations of a frequency
both = pytest.mark.parametrize("process", [CHAIN, INDEPENDENT], ids=["chain", "independent"])


def made(groups: int = 4, align: int = 1) -> Any:
    """A supernet of the residual net (spaces of 8, 6, 9 and 11 channels) with random alphas."""
    net = dmcp.Supernet(*traced(Residual), groups, align)
    with torch.no_grad():
        net.alpha.copy_(torch.randn(net.alpha.shape, generator=torch.Generator().manual_seed(0)))
    return net


def ends_of(chain: Chains) -> list[tuple[int, int]]:
    return list(zip(chain.sizes[:, 0].tolist(), chain.sizes.sum(dim=1).tolist(), strict=True))


def widths_of(net: Any, gates: list[Tensor]) -> Tensor:
    """Channels kept in each space, counted. -> (N, S)"""
    sizes = [space.size for space in net.graph.spaces]
    return torch.stack([piece.sum(dim=1) for piece in torch.stack(gates).split(sizes, dim=1)], dim=1)


def sampled(net: Any, chain: Chains, sampling: Sampling) -> list[Tensor]:
    return sample_gates(net, chain, sampling, MANY, torch.Generator().manual_seed(0))


def sandwich(net: Any, chain: Chains, sampling: Sampling, count: int, dice: torch.Generator | None = None) -> list[Any]:
    """The largest, the smallest, then random sub-networks."""
    ends = [net.hard(chain.sizes.sum(dim=1)), net.hard(chain.sizes[:, 0])]
    return ends + sample_gates(net, chain, sampling, count, dice)


# bounds


@pytest.mark.parametrize("sampling", Sampling)
@both
def test_bounds_hold_for_every_gate(sampling: Sampling, process: Any) -> None:
    net = made()
    chain = make_chains(net, process, {"stem": 3, "conv4": 11}, {"stem": 5, "conv3": 1, "conv1": 5})
    assert ends_of(chain) == [(3, 5), (1, 5), (1, 1), (11, 11)]  # stem, conv1, conv3, conv4
    ends = widths_of(net, sandwich(net, chain, sampling, 0))
    assert ends.tolist() == [[5, 5, 1, 11], [3, 1, 1, 11]]
    seen = widths_of(net, sampled(net, chain, sampling))
    assert (seen >= ends[1]).all() and (seen <= ends[0]).all() and len(seen[:, 0].unique()) > 1
    soft = chain.gates(chain.marginals(net.alpha))
    stem, _, third, fourth = (it.tolist() for it in soft.split([8, 6, 9, 11]))
    assert stem[:3] == [1.0] * 3 and max(stem[3:5]) < 1 and stem[5:] == [0.0] * 3
    assert third == [1.0] + [0.0] * 8 and fourth == [1.0] * 11
    gradient = torch.autograd.grad(soft.sum(), net.alpha)[0]
    assert gradient[2:].count_nonzero() == 0 and gradient[:2].count_nonzero() > 0


@pytest.mark.parametrize(
    ("low", "high", "align", "ends"),
    [
        (7, {}, 1, [(7, 8), (6, 6), (7, 9), (7, 11)]),
        ({}, 7, 1, [(2, 7), (1, 6), (2, 7), (2, 7)]),
        (7, 7, 1, [(7, 7), (6, 6), (7, 7), (7, 7)]),
        ({"": 5, "conv1": 2}, {}, 1, [(5, 8), (2, 6), (5, 9), (5, 11)]),  # what is said of one space counts there
        ({"": 5, "conv2": 3}, {}, 1, [(3, 8), (5, 6), (5, 9), (5, 11)]),  # conv2 writes the space named stem
        ({"conv2": 9}, {}, 1, [(8, 8), (1, 6), (2, 9), (2, 11)]),  # a layer, not the space: all of it
        ({"stem": 3}, {"conv4": 9}, 4, [(4, 8), (4, 6), (4, 9), (4, 8)]),
        (5, 9, 4, [(8, 8), (6, 6), (8, 9), (8, 8)]),
    ],
)
def test_bounds_of_the_network_and_of_modules(low: Any, high: Any, align: int, ends: list[tuple[int, int]]) -> None:
    assert ends_of(make_chains(made(align=align), CHAIN, low, high, align)) == ends


def test_bounds_by_module_of_torchvision() -> None:
    """Of two modules the inner one counts, of two that say as much the stricter; channels, where groups are kept."""
    graph = dmcp.trace(torchvision.models.resnet18(), torch.zeros(2, 3, 32, 32))
    ends = width_bounds(graph, {"layer2": 20, "layer2.1": 30, "conv1": 7}, {"layer1": 60})
    found = dict(zip(graph.full, ends, strict=True))
    assert found["layer2.0.conv1"] == (20, 128) and found["layer2.1.conv1"] == (30, 128)
    assert found["layer2.0.conv2"] == (30, 128)  # written by layer2.0 and layer2.1
    assert found["conv1"] == (7, 60) and found["layer1.0.conv1"] == (1, 60) and found["layer3.0.conv1"] == (1, 256)
    both = dict(zip(graph.full, width_bounds(graph, {"layer2.0": 9, "layer2.1": 30}, {}), strict=True))
    assert both["layer2.0.conv2"] == (30, 128)
    graph = dmcp.trace(torchvision.models.resnext50_32x4d(), torch.zeros(2, 3, 32, 32))  # 32 groups of 4 channels
    first = list(graph.full).index("layer1.0.conv1")  # a space's own name counts groups, as its size does
    lows = [width_bounds(graph, it, {})[first][0] for it in (10, {"layer1": 10}, {"layer1.0.conv1": 10})]
    assert lows == [3, 3, 10] and width_bounds(graph, {}, {"layer1": 10})[first] == (1, 2)
    with pytest.raises(WidthsError, match="groups of 16 channels"):
        width_bounds(graph, {}, 10)


# samples


def test_uniform_and_sandwich_sampling() -> None:
    net = made()
    widths = widths_of(net, sampled(net, make_chains(net), Sampling.UNIFORM))
    for column, borders in zip(widths.T, ([2, 4, 6, 8], [1, 2, 4, 6], [2, 4, 6, 9], [2, 5, 8, 11]), strict=True):
        values, counts = column.unique(return_counts=True)
        assert values.tolist() == borders and (counts / MANY - 1 / 4).abs().max() < SPREAD
    ranks = torch.stack([column.unique(return_inverse=True)[1] for column in widths.T]).double()
    assert (torch.corrcoef(ranks) - torch.eye(4)).abs().max() < 2 * SPREAD  # each space by itself
    column = widths_of(net, sampled(net, make_chains(net, CHAIN, {"stem": 6}), Sampling.UNIFORM))[:, 0]
    values, counts = column.unique(return_counts=True)  # a bound merges groups
    assert values.tolist() == [6, 8] and (counts / MANY - 1 / 2).abs().max() < SPREAD
    widths = widths_of(net, sampled(net, make_chains(net), Sampling.SANDWICH))  # one ratio for all spaces
    assert {tuple(row) for row in widths.tolist()} == {(2, 1, 2, 2), (4, 2, 4, 5), (6, 4, 6, 8), (8, 6, 9, 11)}


@both
def test_markov_samples_each_channel_as_often_as_its_soft_gate_says(process: Any) -> None:
    net = made()
    chain = make_chains(net, process)
    gates = torch.stack(sampled(net, chain, Sampling.MARKOV)).float()
    soft = chain.gates(chain.marginals(net.alpha)).detach()
    assert (gates.mean(dim=0) - soft).abs().max() < SPREAD
    assert process is INDEPENDENT or torch.equal(soft, net.soft())
    # A space that is sampled from its neighbour's chain, as in the authors' code, would be seen.
    net.alpha.data = net.alpha.data.roll(1, dims=0)
    assert (gates.mean(dim=0) - chain.gates(chain.marginals(net.alpha)).detach()).abs().max() > 3 * SPREAD
    gaps = (gates.split([8, 6, 9, 11], dim=1)[3].diff(dim=1) > 0).any()
    assert gaps == (process is INDEPENDENT)  # the chain keeps the first channels, independent gates any


# channels in order


@pytest.mark.parametrize("toy", NETS, ids=lambda net: net.__name__)
def test_sorting_does_not_change_what_the_network_computes(toy: Any) -> None:
    (model, graph), x = traced(toy), sample(toy.SHAPE)
    net = dmcp.Supernet(model, graph)
    before = copy.deepcopy(net.model)
    sort_channels(net)
    moved = sum(not torch.equal(a, b) for a, b in zip(net.weights(), before.parameters(), strict=True))
    assert moved > len(graph.spaces)
    for training in (False, True):
        assert distance(net.train(training)(x, net.hard(graph.full)), before.train(training)(x)) < 1e-10


# the stem: steps with it and without


def supernet(model: nn.Module, shape: tuple[int, ...]) -> Any:
    return dmcp.Supernet(model, dmcp.trace(model, sample(shape, batch=2)), 4).double().train()


def task(output: Any, batch: Any) -> Tensor:
    """Cross-entropy of every output; of maps, with weights that differ from pixel to pixel and with the size."""
    outputs = output if isinstance(output, tuple) else (output,)
    flat = [it if it.ndim == 2 else (it * torch.linspace(0, 1, it.shape[-1])).sum((2, 3)) / 100 for it in outputs]
    return sum((F.cross_entropy(part, batch[1]) for part in flat), torch.zeros(()))


def three_steps(net: Any, stem: Stem | None, x: Tensor, lr: float, align: int | None, loss: Any) -> Tensor:
    """The losses; the smallest sub-network is a narrow one where `align` is given."""
    optimizer, dice = torch.optim.SGD(net.weights(), lr, 0.9), torch.Generator().manual_seed(1)
    config = SearchConfig(budget="50%", distill=False)
    budget = parse_budget("50%", net.graph)
    context = StepContext(net=net, chains=make_chains(net), budget=budget, config=config, loss=loss)
    border = () if stem is None else (stem.paths, stem.value)
    small = None if align is None else Narrow(net, net.min_widths, align, *border)

    def with_gates(gates: Tensor) -> Any:
        return gates if stem is None else lambda x, h: stem.tail(x, h, net.fold(gates))

    torch.manual_seed(2)  # of dropout: each sub-network has its own
    losses = []
    for number in range(3):
        subnets = [with_gates(it) for it in sandwich(net, context.chains, Sampling.UNIFORM, 2, dice)]
        subnets[1] = subnets[1] if small is None else small
        batches = [(part + 0.1 * number, torch.arange(len(part)) % 5) for part in x.split(8)]
        losses.append(weight_step(context, batches, optimizer, subnets, stem and stem.head))
    return torch.stack(losses)


def assert_the_same(
    net: Any, stem: Stem | None, x: Tensor, lr: float = 0.05, align: int | None = None, loss: Any = task
) -> None:
    """Losses, weights and buffers of the network after three steps are those of a copy that has no stem."""
    plain = copy.deepcopy(net, {id(net.graph): net.graph})
    expected, losses = three_steps(plain, None, x, lr, None, loss), three_steps(net, stem, x, lr, align, loss)
    assert (losses - expected).abs().max() < 1e-9
    assert_equal(net, plain)


def assert_equal(net: Any, plain: Any) -> None:
    for (name, own), other in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert (own - other).abs().max() < 1e-9, name


FOUND = {  # what a reader of their code would write down: all up to the first layer whose inputs can be dropped
    "resnet18": (("conv1", "bn1", "relu", "maxpool"), None),
    "mobilenet_v2": (tuple(f"{it}.{n}" for it in ("features.0", "features.1.conv.0") for n in range(3)), 4),
    "squeezenet1_1": (("features.0", "features.1", "features.2"), 1),
}


@pytest.mark.parametrize("name", FOUND)
def test_stems_of_torchvision(name: str) -> None:
    """Found, nothing is touched by the search for it, and steps are the same."""
    slim = {"width_mult": 0.5} if name == "mobilenet_v2" else {}
    model = randomise(getattr(torchvision.models, name)(num_classes=5, **slim))
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    net = supernet(model, (3, 32, 32))
    parts = list(net.modules())
    parts[9].eval()
    modes, before = [it.training for it in parts], copy.deepcopy(net.state_dict())
    state = torch.get_rng_state()
    stem = find_stem(net)
    paths, align = FOUND[name]
    assert stem is not None and stem.paths == paths
    assert list(net.modules()) == parts and [it.training for it in parts] == modes
    assert all(torch.equal(tensor, before[key]) for key, tensor in net.state_dict().items())
    assert all(weight.grad is None for weight in net.parameters()) and torch.equal(torch.get_rng_state(), state)
    if align:  # more of lr makes rounding errors grow
        assert_the_same(net.train(), stem, sample((3, 32, 32), batch=8), lr=0.005, align=align)


@pytest.mark.parametrize("align", [1, 3])
@pytest.mark.parametrize(
    ("part", "reader", "paths"),
    [(nn.ChannelShuffle(2), nn.Conv2d(8, 7, 3), ("0", "1")), (nn.Flatten(), nn.Linear(8 * 12 * 12, 7), ("0", "1"))],
    ids=["shuffled", "flattened"],
)
def test_stems_whose_output_is_not_one_space(part: nn.Module, reader: nn.Module, paths: Any, align: int) -> None:
    """A narrow network must take the right channels out of it."""
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten()) if isinstance(reader, nn.Conv2d) else ()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), part, reader, nn.ReLU(), *pool, nn.Linear(7, 5))
    net = supernet(randomise(model), (3, 14, 14))
    stem = find_stem(net)
    assert stem is not None and stem.paths == paths
    assert_the_same(net, stem, sample((3, 14, 14), batch=12), align=align)


# the stem: nets that attack it


class Plain(nn.Module):
    """Three layers that no gate reaches, and two convs behind them."""

    def __init__(self, stride: int = 1) -> None:
        super().__init__()
        self.stem, self.norm, self.act = nn.Conv2d(3, 8, 3, stride, 1), nn.BatchNorm2d(8), nn.SiLU()
        self.conv2, self.norm2 = nn.Conv2d(8, 9, 3, padding=1, bias=False), nn.BatchNorm2d(9)
        self.conv3, self.head = nn.Conv2d(9, 7, 3, padding=1), nn.Linear(7, 5)

    def first(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.stem(x)))

    def then(self, h: Tensor) -> Tensor:
        return self.head(F.relu(self.conv3(F.relu(self.norm2(self.conv2(h))))).mean((2, 3)))

    def forward(self, x: Tensor) -> Tensor:
        return self.then(self.first(x))


def coded(forward: Callable[[Any, Tensor], Any]) -> Callable[..., nn.Module]:
    """A class like Plain with another forward."""
    return type("Coded", (Plain,), {"forward": forward})


def with_part(part: Callable[[], nn.Module], forward: Callable[[Any, Tensor], Any] | None = None) -> Any:
    """Like Plain, with one more module, called first unless the forward says otherwise."""

    def init(self: Any, **settings: Any) -> None:
        Plain.__init__(self, **settings)
        self.part = part()

    return type("Parted", (Plain,), {"__init__": init, "forward": forward or (lambda n, x: n.then(n.first(n.part(x))))})


def written(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    h.mul_(1.5)
    return net.then(h)


def padded(net: Any, x: Tensor) -> Tensor:
    missing = -x.shape[-1] % 8
    return net.then(net.first(F.pad(x, (0, missing, 0, missing)) if missing else x))


def clipped_within(net: Any, x: Tensor) -> Tensor:
    h = net.stem(x)
    if h.requires_grad:
        h.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05))
    return net.then(net.act(net.norm(h)))


def tied() -> nn.Module:
    net: Any = with_part(lambda: nn.Conv2d(8, 3, 1), lambda n, x: n.then(n.first(x) + n.again(n.part(n.first(x)))))()
    net.again = nn.Conv2d(3, 8, 3, padding=1)
    net.again.weight = net.stem.weight
    return net


AGAIN = lambda n, x: n.then(n.part(n.part(n.first(x))))  # noqa: E731
ATTACKS: dict[str, Callable[[], nn.Module]] = {
    "nothing odd": Plain,
    "input used later": coded(lambda n, x: n.then(n.first(x)) + x.mean((1, 2, 3))[:, None]),
    "hidden value used later": coded(lambda n, x: n.then(n.first(x) + n.stem(x))),
    "output written": coded(written),
    "in-place activation": lambda: with_part(lambda: nn.ReLU(True), lambda n, x: n.then(n.part(n.norm(n.stem(x)))))(),
    "module called twice": lambda: with_part(lambda: nn.LeakyReLU(0.3), AGAIN)(),
    "code between the modules": coded(lambda n, x: n.then(F.relu(n.norm(F.relu(n.stem(x)))))),
    "dropout in the stem": lambda: with_part(nn.Dropout, AGAIN)(),
    "weight of two modules": tied,
    "detached": coded(lambda n, x: n.then(n.first(x).detach())),
    "large gradients clipped": coded(clipped_within),
}
WHOLE = {"nothing odd", "input used later", "detached"}  # all three layers


@pytest.mark.parametrize("name", ATTACKS)
def test_a_stem_is_never_wrong(name: str) -> None:
    torch.manual_seed(0)
    model = ATTACKS[name]().double()
    net = supernet(randomise(model), (3, 16, 16))
    stem = find_stem(net)
    assert name not in WHOLE or (stem is not None and stem.paths == ("stem", "norm", "act"))
    assert stem is None or name != "weight of two modules"
    if stem is not None:
        align = None if "dropout" in name else 4  # a narrow network has other masks
        lr, loss = (5e-5, lambda *it: 1000 * task(*it)) if "large gradients" in name else (0.05, task)
        assert_the_same(net, stem, sample((3, 16, 16), batch=12), lr, align, loss)


class Averaging(Plain):
    """Keeps an average in a buffer that each pass replaces by a new tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(5))

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.training:
            self.average = 0.9 * self.average + 0.1 * out.detach().mean(0)
        return out


def summed() -> nn.Module:
    """The first gradient into its stem is one number for many places, which nothing can be added to in place."""
    first = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    return Toy(lambda m, x: m.fc(m.first(x).sum(dim=(2, 3))), first=first, fc=nn.Linear(8, 5))


def images(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of images with these numbers of pixels, and labels."""
    batches = [sample((3, size, size), batch=8) for size in sizes]
    return [(x + 0.1 * number, torch.arange(8) % 5) for number, x in enumerate(batches)]


SEARCHES: dict[str, tuple[Callable[[], nn.Module], list[Any], dict[str, int], int]] = {  # ..., batches with a stem
    "as traced": (lambda: coded(padded)(stride=2), images(16, 16), {}, 4),
    "two sizes in a step": (lambda: coded(padded)(stride=2), images(16, 12, 16, 16), {"accumulate": 2}, 4),
    "a buffer that is replaced": (Averaging, images(16, 16), {}, 0),
    "a stem that is summed": (summed, images(16, 16), {}, 4),
}


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_ends_as_without_a_stem(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the loader gives: the stem is used where the input is as it was traced."""
    build, batches, settings, expected = SEARCHES[name]
    model, used, nets = randomise(build()), list[Tensor](), list[Any]()

    class Spied(Stem):
        def head(self, x: Tensor) -> Any:
            used.append(x)
            return super().head(x)

    def find(net: Any) -> Stem | None:
        found = find_stem(net)
        return Spied(net, found.paths, found.value) if found else None

    for finds in (find, lambda net: None):
        nets.append(supernet(model, (3, 16, 16)))
        monkeypatch.setattr(dmcp.searching.steps, "find_stem", finds)
        search(nets[-1], batches, SearchConfig(budget=0.5, groups=4, epochs=2, reference_batch=64, **settings))
    assert len(used) == expected
    assert_equal(*nets)
    buffers = zip(nets[0].model.named_buffers(), nets[1].model.buffers(), strict=True)
    assert all((own - other).abs().max() < 1e-9 for (key, own), other in buffers if key == "average")
