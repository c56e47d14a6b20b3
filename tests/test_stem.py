"""The stem: found where torchvision's nets have one, and never anything that changes what a weight step does.

The oracle is the step without a stem: on a copy of the same supernet, in float64, over three steps. Most nets here are
attacks: their code looks at more than the output of the first layers.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchvision
from nets import NETS, distance, randomise, sample
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp
import dmcp.searching.search
import dmcp.searching.subnets
from dmcp.searching.search import search
from dmcp.searching.steps import Passes, weight_step
from dmcp.searching.subnets import Stem, chains, find_stem, sandwich
from dmcp.settings import Sampling, SearchConfig
from dmcp.supernet import Narrow

FOUND = {  # what a reader of their code would write down: all up to the first layer whose inputs can be dropped
    "resnet18": ("conv1", "bn1", "relu", "maxpool"),
    "mobilenet_v2": ("features.0", "features.1.conv.0"),
    "squeezenet1_1": ("features.0", "features.1", "features.2"),
}
STEPPED = ("mobilenet_v2", "squeezenet1_1")


@functools.cache
def zoo(name: str) -> tuple[nn.Module, Any]:
    """A model of torchvision that no test changes, and its graph."""
    slim = {"width_mult": 0.5} if name == "mobilenet_v2" else {}
    model = randomise(getattr(torchvision.models, name)(num_classes=5, **slim))
    return model, dmcp.trace(model, sample((3, 32, 32), batch=2))


def supernet(model: nn.Module, graph: Any) -> Any:
    return dmcp.Supernet(model, graph, 4).double().train()


@functools.cache
def border(name: str) -> tuple[tuple[str, ...], int]:
    """Where the stem of a model of torchvision ends."""
    stem = find_stem(supernet(*zoo(name)))
    assert stem is not None
    return stem.paths, stem.value


# -- what a step does with a stem, and what it does without


def task(output: Any, batch: Any) -> Tensor:
    """Cross-entropy of every output; of maps, with weights that differ from pixel to pixel and with the size."""
    outputs = output if isinstance(output, tuple) else (output,)
    flat = [
        part if part.ndim == 2 else (part * torch.linspace(0, 1, part.shape[-1])).sum((2, 3)) / 100 for part in outputs
    ]
    return sum((F.cross_entropy(part, batch[1]) for part in flat), torch.zeros(()))


def loud(output: Any, batch: Any) -> Tensor:
    """The same a thousand times, as where gradients are scaled."""
    return 1000 * task(output, batch)


def three_steps(
    net: Any, stem: Stem | None, x: Tensor, lr: float, align: int | None = None, loss: Any = task
) -> Tensor:
    """The losses; the smallest sub-network is a narrow one where `align` is given."""
    optimizer = torch.optim.SGD(net.weights(), lr, 0.9)
    generator, path = torch.Generator().manual_seed(1), chains(net)
    given = () if stem is None else (stem.paths, stem.value)
    small = None if align is None else Narrow(net, net.min_widths, align, *given)
    passes = None if stem is None else Passes(net.fold, stem.tail, stem.head)
    torch.manual_seed(2)  # of dropout: each sub-network draws its own
    losses = []
    for number in range(3):
        subnets: list[Any] = sandwich(net, path, Sampling.UNIFORM, 2, generator)
        if small is not None:
            assert torch.equal(subnets[1], net.hard(net.min_widths))
            subnets[1] = small
        batches = [(part + 0.1 * number, torch.arange(len(part)) % 5) for part in x.split(8)]
        losses.append(weight_step(net, batches, optimizer, subnets, loss, distill=False, passes=passes).losses)
    return torch.stack(losses)


def assert_the_same(
    net: Any, stem: Stem, x: Tensor, lr: float = 0.05, align: int | None = None, loss: Any = task
) -> None:
    """Losses and weights after three steps are those of a copy that has no stem."""
    plain = copy.deepcopy(net, {id(net.graph): net.graph})
    expected, losses = three_steps(plain, None, x, lr, loss=loss), three_steps(net, stem, x, lr, align, loss)
    assert (losses - expected).abs().max() < 1e-9
    for (name, own), other in zip(net.model.named_parameters(), plain.model.parameters(), strict=True):
        assert (own - other).abs().max() < 1e-9, name
    moved = {name for name, tensor in net.model.named_parameters() if tensor.requires_grad}
    assert moved, "nothing was trained"


@pytest.mark.parametrize("name", FOUND)
def test_stems_of_torchvision(name: str) -> None:
    assert border(name)[0] == FOUND[name]


@pytest.mark.parametrize("name", STEPPED)
def test_steps_of_torchvision_are_the_same(name: str) -> None:
    net = supernet(*zoo(name))
    # more of lr makes rounding errors grow
    assert_the_same(net, Stem(net, *border(name)), sample((3, 32, 32), batch=8), lr=0.005)


@pytest.mark.parametrize(("name", "align"), [("mobilenet_v2", 1), ("mobilenet_v2", 4), ("resnet18", 8)])
def test_a_narrow_network_takes_its_part_of_the_stem(name: str, align: int) -> None:
    """Output and gradients are those of the gated one."""
    net, x = supernet(*zoo(name)), sample((3, 32, 32), batch=8)
    for part in net.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    stem = Stem(net, *border(name))
    widths = net.graph.widths([-(-space.size * 3 // 5) for space in net.graph.spaces])
    outputs, slopes = [], []
    for output in (Narrow(net, widths, align, stem.paths, stem.value)(x, stem.head(x)), net(x, net.hard(widths))):
        output.square().sum().backward()
        outputs.append(output.detach())
        slopes.append([torch.zeros_like(w) if w.grad is None else w.grad.clone() for w in net.weights()])
        net.zero_grad()
    assert distance(*outputs) < 1e-9
    assert all((one - other).abs().max() <= 1e-9 * (1 + other.abs().max()) for one, other in zip(*slopes, strict=True))


@pytest.mark.parametrize("toy", NETS, ids=lambda toy: toy.__name__)
def test_nets_written_by_hand(toy: Any) -> None:
    model = randomise(toy(**toy.FULL))
    net = supernet(model, dmcp.trace(model, sample(toy.SHAPE)))
    stem = find_stem(net)
    if stem is not None:
        assert_the_same(net, stem, sample(toy.SHAPE, batch=12))


class Halves(nn.Module):
    """One half of the channels gates the other; not one of torch's own modules."""

    def forward(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, 1)
        return one * other.sigmoid()


@pytest.mark.parametrize("align", [1, 3])
@pytest.mark.parametrize(
    ("part", "reader", "paths"),
    [
        (Halves(), nn.Conv2d(4, 7, 3), ("0",)),
        (nn.ChannelShuffle(2), nn.Conv2d(8, 7, 3), ("0", "1")),
        (nn.PixelUnshuffle(2), nn.Conv2d(32, 7, 3), ("0", "1")),
        (nn.Flatten(), nn.Linear(8 * 12 * 12, 7), ("0", "1")),
    ],
    ids=["halves", "shuffled", "pixels", "flattened"],
)
def test_stems_whose_output_is_not_one_space(
    part: nn.Module, reader: nn.Module, paths: tuple[str, ...], align: int
) -> None:
    """A narrow network must take the right channels out of it."""
    pool = (nn.AdaptiveAvgPool2d(1), nn.Flatten()) if isinstance(reader, nn.Conv2d) else ()
    model = nn.Sequential(nn.Conv2d(3, 8, 3), part, reader, nn.ReLU(), *pool, nn.Linear(7, 5))
    net = supernet(model, dmcp.trace(randomise(model), sample((3, 14, 14))))
    stem = find_stem(net)
    assert stem is not None and stem.paths == paths
    assert_the_same(net, stem, sample((3, 14, 14), batch=12), align=align)


def test_what_the_search_looks_at_is_left_alone() -> None:
    net = supernet(*zoo("squeezenet1_1"))
    net.model.features[3].eval()
    modes = [part.training for part in net.modules()]
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    parts, drawn = list(net.modules()), torch.get_rng_state()
    assert find_stem(net) is not None
    assert [part.training for part in net.modules()] == modes and list(net.modules()) == parts
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
    assert all(weight.grad is None for weight in net.parameters()) and torch.equal(torch.get_rng_state(), drawn)


# -- nets that attack it


class Plain(nn.Module):
    """Three layers that no gate reaches, and two convs behind them."""

    def __init__(self, stride: int = 1, zero: bool = False) -> None:
        super().__init__()
        self.stem, self.norm, self.act = nn.Conv2d(3, 8, 3, stride, 1), nn.BatchNorm2d(8), nn.SiLU()
        self.conv2, self.norm2 = nn.Conv2d(8, 9, 3, padding=1, bias=False), nn.BatchNorm2d(9)
        self.conv3, self.head = nn.Conv2d(9, 7, 3, padding=1), nn.Linear(7, 5)
        if zero:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

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


class Ramp(nn.Module):
    """Counts its calls in a buffer, and computes with the count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        return x + self.calls.log() * x.square()


class ReZero(nn.Module):
    """The identity until it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.scale = nn.Conv2d(3, 3, 3, padding=1), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.conv(x)


class Scaled(nn.Conv2d):
    """Takes a second argument."""

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


class Two(nn.Conv2d):
    """Gives two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = super().forward(x)
        return y.relu(), y.sigmoid()


class Shrunk(torch.autograd.Function):
    """The identity, whose gradient is not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return 0.1 * slope


def written(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    h.mul_(1.5)
    return net.then(h)


def written_view(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    h[:, :, 1:].flatten(1).mul_(1.5)
    h[:, 2].zero_()
    return net.then(h)


def unlabelled_view(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    h.unsafe_chunk(2, 1)[0].mul_(0.5)  # its schema does not say that these are views
    return net.then(h)


def copied(net: Any, x: Tensor) -> Tensor:
    h = net.first(x)
    return net.then(h.clone().mul_(2) - h)


def padded(net: Any, x: Tensor) -> Tensor:
    missing = -x.shape[-1] % 8
    return net.then(net.first(F.pad(x, (0, missing, 0, missing)) if missing else x))


def without_gradient(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = net.first(x)
    return net.then(h)


def first_without_gradient(net: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = net.stem(x)
    return net.then(net.act(net.norm(h)))


def auxiliary(net: Any, x: Tensor) -> Any:
    h = net.first(x)
    out = net.then(h)
    return (out, F.interpolate(net.part(h), size=x.shape[-2:])) if net.training else out


def hooked(register: str, hook: Callable[..., Any], where: str = "norm") -> Callable[..., nn.Module]:
    """Plain with a hook on one of its modules."""

    def build() -> nn.Module:
        net = Plain()
        getattr(net.get_submodule(where), register)(hook)
        return net

    return build


def clipped(module: nn.Module, slopes: Any, _: Any) -> Any:
    return tuple(slope.clamp(-0.05, 0.05) for slope in slopes)  # only acts on gradients that are large


def clipped_within(net: Any, x: Tensor) -> Tensor:
    h = net.stem(x)
    if h.requires_grad:
        h.register_hook(lambda slope: slope.clamp(-0.05, 0.05))
    return net.then(net.act(net.norm(h)))


def clipped_box() -> nn.Module:
    net: Any = with_part(nn.Sequential, lambda n, x: n.then(n.part(x)))()
    for name in ("stem", "norm", "act"):
        net.part.append(getattr(net, name))
        delattr(net, name)
    net.part.register_full_backward_pre_hook(lambda m, slopes: (slopes[0].clamp(-0.05, 0.05),))
    return net


def tied() -> nn.Module:
    net: Any = with_part(lambda: nn.Conv2d(8, 3, 1), lambda n, x: n.then(n.first(x) + n.again(n.part(n.first(x)))))()
    net.again = nn.Conv2d(3, 8, 3, padding=1)
    net.again.weight = net.stem.weight
    return net


def ignore() -> nn.Module:
    net = Plain()
    net.stem.requires_grad_(False)
    net.norm.requires_grad_(False)
    return net


def spectral() -> nn.Module:
    net = Plain()
    net.stem = nn.utils.parametrizations.spectral_norm(net.stem)
    return net


AGAIN, TWICE = (lambda n, x: n.then(n.part(n.part(n.first(x))))), (lambda n, x: n.then(n.first(n.part(n.part(x)))))
ATTACKS: dict[str, Callable[[], nn.Module]] = {
    "nothing odd": Plain,
    "input used later": coded(lambda n, x: n.then(n.first(x)) + x.mean((1, 2, 3))[:, None]),
    "hidden value used later": coded(lambda n, x: n.then(n.first(x) + n.stem(x))),
    "output written": coded(written),
    "view of the output written": coded(written_view),
    "unlabelled view of the output written": coded(unlabelled_view),
    "copy of the output written": coded(copied),
    "in-place activation": lambda: with_part(lambda: nn.ReLU(True), lambda n, x: n.then(n.part(n.norm(n.stem(x)))))(),
    "input written": lambda: with_part(lambda: nn.ReLU(inplace=True))(),
    "input written in each pass": lambda: with_part(lambda: nn.LeakyReLU(0.5, inplace=True))(),
    "module called twice": lambda: with_part(lambda: nn.LeakyReLU(0.3), AGAIN)(),
    "relu called twice": lambda: with_part(nn.ReLU, AGAIN)(),
    "module called again later": coded(lambda n, x: n.then(n.act(n.conv3(n.conv2(n.first(x)))[:, :1] + n.first(x)))),
    "code between the modules": coded(lambda n, x: n.then(F.relu(n.norm(F.relu(n.stem(x)))))),
    "dropout in the stem": lambda: with_part(nn.Dropout, AGAIN)(),
    "dropout behind it": coded(lambda n, x: n.then(F.dropout(n.first(x), 0.5, n.training))),
    "hook on a module": hooked("register_forward_hook", lambda m, x, out: out * 2),
    "hook before a module": hooked("register_forward_pre_hook", lambda m, x: (x[0] * 2,)),
    "hook before the network": hooked("register_forward_pre_hook", lambda m, x: (x[0] * 2,), ""),
    "hook on the network": hooked("register_forward_hook", lambda m, x, out: out * x[0].shape[1], ""),
    "shape of the input, behind zeros": lambda: coded(lambda n, x: n.then(n.first(x)) * x.shape[1])(zero=True),
    "shape of the input, in training": coded(lambda n, x: n.then(n.first(x)) * (x.shape[1] if n.training else 1)),
    "size of the input": lambda: coded(lambda n, x: n.then(F.interpolate(n.first(x), size=x.shape[-2:])))(stride=2),
    "size of the input, in training": lambda: with_part(lambda: nn.Conv2d(8, 5, 1), auxiliary)(stride=2),
    "needs a gradient": coded(lambda n, x: n.then(n.first(x)) * (2 if x.requires_grad else 1)),
    "attribute of a module": coded(lambda n, x: n.then(n.first(x)) / n.stem.out_channels),
    "attribute, in training": coded(
        lambda n, x: n.then(n.first(x)) / (getattr(n.stem, "out_channels", 1) if n.training else 1)
    ),
    "weight of a module": coded(lambda n, x: n.then(n.first(x)) * (1 + n.norm.weight.mean() + n.stem.weight.norm())),
    "weight of two modules": tied,
    "second argument": lambda: with_part(lambda: Scaled(3, 3, 1), lambda n, x: n.then(n.first(n.part(x, 2.0))))(),
    "two outputs": lambda: with_part(lambda: Two(8, 8, 1), lambda n, x: n.then(sum(n.part(n.first(x)))))(),
    "ignore": ignore,
    "no gradient": coded(without_gradient),
    "no gradient in its first module": coded(first_without_gradient),
    "detached": coded(lambda n, x: n.then(n.first(x).detach())),
    "detached within": coded(lambda n, x: n.then(n.act(n.norm(n.stem(x).detach())))),
    "gradient of its own": coded(lambda n, x: n.then(n.act(n.norm(Shrunk.apply(n.stem(x)))))),
    "large gradients of a module clipped": hooked("register_full_backward_hook", clipped),
    "large gradients clipped": coded(clipped_within),
    "large gradients of a container clipped": clipped_box,
    "counts its calls": lambda: with_part(Ramp)(),
    "spectral norm": spectral,
    "identity at first, called twice": lambda: with_part(ReZero, TWICE)(),
    "norm called twice": coded(lambda n, x: n.then(n.norm(n.norm(n.stem(x))))),
}
FRESH = {"shape of the input, behind zeros", "identity at first, called twice", "norm called twice"}  # as initialised


WHOLE = {  # odd in places that do not concern the first three layers
    "nothing odd",
    "dropout behind it",
    "hook on the network",
    "shape of the input, behind zeros",
    "shape of the input, in training",
    "size of the input",
    "needs a gradient",
    "two outputs",
    "ignore",
    "detached",
}
NONE = {  # odd in the very first layer: it is written by hand, hooked, or used for more than its output
    "input used later",
    "hidden value used later",
    "hook before the network",
    "attribute of a module",
    "weight of a module",
    "weight of two modules",
    "second argument",
    "no gradient in its first module",
    "counts its calls",
    "spectral norm",
    "identity at first, called twice",
}


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("name", ATTACKS)
def test_never_wrong(name: str) -> None:
    torch.manual_seed(0)
    model = ATTACKS[name]().double()
    model = model if name in FRESH else randomise(model)
    net = supernet(model, dmcp.trace(model, sample((3, 16, 16))))
    stem = find_stem(net)
    assert name not in WHOLE or (stem is not None and stem.paths == ("stem", "norm", "act"))
    assert name not in NONE or stem is None
    if stem is not None:
        align = None if "dropout" in name else 4  # a narrow network draws other masks
        lr, loss = (5e-5, loud) if "large gradients" in name else (0.05, task)
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


def test_a_buffer_that_is_replaced_arrives_in_the_supernet() -> None:
    model = randomise(Averaging())
    net = supernet(model, dmcp.trace(model, sample((3, 16, 16))))
    plain = copy.deepcopy(net)
    stem = find_stem(net)
    x = sample((3, 16, 16), batch=12)
    three_steps(plain, None, x, 0.05)
    three_steps(net, stem, x, 0.05)
    assert (net.model.average - plain.model.average).abs().max() < 1e-9


def test_networks_that_are_slow_to_try_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomise(Plain())
    net = supernet(model, dmcp.trace(model, sample((3, 16, 16))))
    monkeypatch.setattr(dmcp.searching.subnets, "_SLOW", net.graph.macs())
    assert find_stem(net) is not None
    monkeypatch.setattr(dmcp.searching.subnets, "_SLOW", net.graph.macs() - 1)
    assert find_stem(net) is None


# -- in a search


def images(*sizes: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of images with these numbers of pixels, and labels."""
    batches = [sample((3, size, size), batch=8) for size in sizes]
    return [(x + 0.1 * number, torch.arange(8) % 5) for number, x in enumerate(batches)]


def searched(
    model: nn.Module, stem: bool, batches: list[Any], monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[Any, int]:
    """The supernet after a search, and in how many batches its stem was used."""
    net = supernet(model, dmcp.trace(model, sample((3, 16, 16))))
    used = []

    class Spied(Stem):
        def head(self, x: Tensor) -> Any:
            used.append(x)
            return super().head(x)

    def find(net: Any) -> Stem | None:
        found = find_stem(net)
        return Spied(net, found.paths, found.value) if stem and found else None

    with monkeypatch.context() as patched:
        patched.setattr(dmcp.searching.search, "find_stem", find)
        search(net, batches, SearchConfig(budget=0.5, groups=4, epochs=2, reference_batch=64, **settings))
    return net, len(used)


@pytest.mark.parametrize(
    ("batches", "settings", "expected"),
    [
        (images(16, 16), {}, 4),
        (images(12, 12), {}, 0),
        (images(16, 12, 16), {}, 4),
        (images(16, 12, 16, 16), {"accumulate": 2}, 4),  # one step, one way
        ([{"input": x, "label": y} for x, y in images(16, 16)], {}, 4),
        ([((x,), y) for x, y in images(16, 16)], {}, 0),
        ([({"x": x}, y) for x, y in images(16, 16)], {}, 0),
    ],
    ids=["as traced", "other size", "two sizes", "two sizes in a step", "batch by name", "by place", "by name"],
)
def test_a_search_ends_as_without_a_stem(
    batches: list[Any], settings: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the loader gives: the stem is used where the input is as it was traced; here others are padded."""
    model = randomise(coded(padded)(stride=2))
    (net, used), (plain, unused) = (searched(model, stem, batches, monkeypatch, **settings) for stem in (True, False))
    assert (used, unused) == (expected, 0)
    for (name, own), other in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert (own - other).abs().max() < 1e-9, name


class Cooling(Plain):
    """Counts its passes in a plain number, and computes with the count."""

    passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        return super().forward(x) / (1 + self.passes)


def test_a_search_with_plain_numbers_that_change_ends_as_without_a_stem(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomise(Cooling())
    net, plain = (searched(model, stem, images(16, 16), monkeypatch)[0] for stem in (True, False))
    for (name, own), other in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert (own - other).abs().max() < 1e-9, name


class Summed(nn.Module):
    """The first slope into its stem is one number for many places, which nothing can be added to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(self.conv(x)).sum(dim=(2, 3)))


def test_a_search_whose_stem_is_summed_ends_as_without_a_stem(monkeypatch: pytest.MonkeyPatch) -> None:
    model = randomise(Summed())
    net, plain = (searched(model, stem, images(16, 16), monkeypatch)[0] for stem in (True, False))
    for (name, own), other in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert (own - other).abs().max() < 1e-9, name
