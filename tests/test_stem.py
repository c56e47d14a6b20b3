"""The stem: steps with it are steps without it.

The oracle is the step without a stem: on a copy of the same supernet, in float64, over three steps. Most of the nets
are attacks: their code looks at more than the output of the first layers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from nets import Toy, randomise, sample, sandwich
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp
import dmcp.searching.steps
from dmcp.defaults import resolve_search
from dmcp.searching.budget import parse_budget
from dmcp.searching.search import search
from dmcp.searching.stem import Stem, find_stem
from dmcp.searching.steps import StepContext, weight_step
from dmcp.searching.subnets import make_chains
from dmcp.searching.supernet import Narrow
from dmcp.settings import Sampling, SearchConfig

# steps with it and without


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
    config = resolve_search(SearchConfig(budget="50%", distill=False))
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


# nets that attack it


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
