"""cut, reinitialize, save, load: the result is plain, nothing of the user's changes, no file is trusted blindly."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import safetensors.torch
import torch
from nets import NETS, Chain, Residual, SharedWeight, distance, randomise, sample
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import resnet18

import dmcp
from dmcp.widths import fingerprint


class Odd(nn.Module):
    """Tensors that are neither in a conv nor in a norm, and a width hidden in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.mix = nn.Conv2d(8, 6, 1)
        self.scale = nn.Parameter(torch.rand(6, 1, 1))
        self.register_buffer("shift", torch.rand(6, 1, 1), persistent=False)
        self.head = nn.Linear(6 * 16, 5)
        self.channels = 6

    def forward(self, x: Tensor) -> Tensor:
        x = self.mix(F.relu(self.norm(self.stem(x)))) * self.scale + self.shift
        x = F.adaptive_avg_pool2d(x, 4).view(len(x), self.channels, 16)
        return self.head(x.flatten(1))


Case = tuple[nn.Module, dmcp.ChannelGraph, dmcp.Widths, nn.Module]


def narrowed(model: nn.Module, shape: tuple[int, ...]) -> Case:
    """The model, its graph, widths of about two thirds, and the network cut to them."""
    dtype = next(model.parameters()).dtype
    graph = dmcp.trace(model, torch.zeros(2, *shape, dtype=dtype))
    widths = graph.widths({space.name: max(1, space.size * 2 // 3) for space in graph.spaces})
    return model, graph, widths, dmcp.cut(model, graph, widths)


@pytest.fixture
def chain() -> Case:
    return narrowed(randomise(Chain(**Chain.FULL)).eval(), Chain.SHAPE)


@pytest.fixture
def odd() -> Case:
    return narrowed(Odd().eval(), (3, 8, 8))


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in [*model.named_parameters(), *model.named_buffers()]}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# cut


def test_cut_is_a_plain_module_that_keeps_mode_hooks_and_requires_grad() -> None:
    model = randomise(Chain(**Chain.FULL))
    model.bn2.eval()
    model.conv1.weight.requires_grad_(False)
    calls: list[str] = []
    model.conv2.register_forward_hook(lambda *_: calls.append("hook"))
    model(sample(Chain.SHAPE)).sum().backward()
    before, grads = state(model), [p.grad for p in model.parameters()]

    _, _, _, small = narrowed(model, Chain.SHAPE)
    assert type(small) is Chain
    assert [part.training for part in small.modules()] == [part.training for part in model.modules()]
    assert [p.requires_grad for p in small.parameters()] == [p.requires_grad for p in model.parameters()]
    assert all(p.grad is None and p.is_leaf for p in small.parameters())
    assert not {p.data_ptr() for p in small.parameters()} & {p.data_ptr() for p in model.parameters()}
    calls.clear()  # hooks are part of what a model does, so tracing runs them
    small(sample(Chain.SHAPE)).sum().backward()
    assert calls == ["hook"]
    assert all(p.grad is grad for p, grad in zip(model.parameters(), grads, strict=True))
    assert same(before, state(model))


def test_cut_takes_kept_indices(chain: Case) -> None:
    model, graph, _, _ = chain
    kept = {"a": [6, 0, 3], "b": [1, 2, 8, 4], "c": [5]}
    small = dmcp.cut(model, graph, {Chain.SPACES[key]: indices for key, indices in kept.items()})
    x = sample(Chain.SHAPE)
    assert distance(small(x), Chain.narrow(model, **kept).eval()(x)) < 1e-10


@pytest.mark.parametrize("wrap", [nn.DataParallel, torch.compile])
def test_cut_unwraps(chain: Case, wrap: Callable[[nn.Module], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # DataParallel would take the model there
    model, graph, widths, small = chain
    again = dmcp.cut(wrap(model), graph, widths)
    assert type(again) is Chain
    assert same(state(again), state(small))


def test_cut_refuses_another_architecture(chain: Case, odd: Case) -> None:
    model, graph, widths, _ = chain
    with pytest.raises(dmcp.WidthsError, match="another architecture than this Odd"):
        dmcp.cut(odd[0], graph, widths)
    with pytest.raises(dmcp.WidthsError, match="widths are for another architecture"):
        dmcp.cut(model, graph, odd[2])


# reinitialize


def test_reinitialise_follows_the_rules_at_the_cut_shape() -> None:
    net = nn.Sequential(
        nn.Conv2d(16, 64, 3), nn.BatchNorm2d(64), nn.Conv2d(64, 64, 3, groups=64), nn.GroupNorm(4, 64),
        nn.ConvTranspose2d(64, 32, 5, groups=2), nn.LayerNorm(32), nn.Linear(32, 400),
    )  # fmt: skip
    randomise(net).float()
    dmcp.reinitialize(net, generator=torch.Generator().manual_seed(0))
    # variance 2 / fan: 64 * 9 outputs see one input of the first conv, 9 of the depthwise one, 16 * 25 of the last
    for index, fan in ((0, 64 * 9), (2, 9), (4, 16 * 25), (6, 32)):
        assert net[index].weight.std().item() == pytest.approx((2 / fan) ** 0.5, rel=0.1)
    for part in net:
        assert part.bias.abs().max() == 0
    for index in (1, 3, 5):
        assert torch.equal(net[index].weight, torch.ones_like(net[index].weight))
    assert net[1].running_mean.abs().max() == 0
    assert torch.equal(net[1].running_var, torch.ones(64))
    assert net[1].num_batches_tracked == 0


def test_reinitialise_takes_the_other_tensors_from_a_fresh_model(odd: Case) -> None:
    _, graph, widths, small = odd
    before, fresh = state(small), dmcp.cut(Odd(), graph, widths)
    kept = copy.deepcopy(small)
    dmcp.reinitialize(kept)
    assert torch.equal(kept.scale, before["scale"])
    dmcp.reinitialize(small, fresh)
    assert torch.equal(small.scale, fresh.scale)
    assert torch.equal(small.shift, fresh.shift)
    assert not torch.equal(small.stem.weight, fresh.stem.weight)
    with pytest.raises(dmcp.WidthsError, match="cut it to the same widths"):
        dmcp.reinitialize(small, Odd())


def test_reinitialise_with_a_seed_gives_the_same_bits_and_draws_ties_once() -> None:
    net, again = SharedWeight(**SharedWeight.FULL), SharedWeight(**SharedWeight.FULL).bfloat16()
    dmcp.reinitialize(net, generator=torch.Generator().manual_seed(3))
    dmcp.reinitialize(again, generator=torch.Generator().manual_seed(3))
    assert same(state(net.to(torch.bfloat16)), state(again))
    assert again.right.weight is again.left.weight

    generator = torch.Generator().manual_seed(3)
    for part in (net.stem, net.mix, net.left, net.other, net.head):  # not net.right
        drawn = torch.randn(part.weight.shape, generator=generator)
    assert torch.equal((drawn * (2 / net.head.in_features) ** 0.5).bfloat16(), net.head.weight)


def test_reinitialise_with_the_users_own_rule(chain: Case) -> None:
    small = chain[3]

    def init(part: nn.Module) -> None:
        if isinstance(part, nn.Conv2d):
            nn.init.constant_(part.weight, 0.5)

    bias = small.conv1.bias.clone()
    dmcp.reinitialize(small, init=init)
    assert small.conv3.weight.unique().tolist() == [0.5]
    assert torch.equal(small.conv1.bias, bias)


def test_reinitialise_leaves_alone_what_is_frozen() -> None:
    def init(part: nn.Module) -> None:
        if isinstance(part, nn.Conv2d):
            nn.init.constant_(part.weight, 0.5)

    for way in ({}, {"init": init}, {"fresh": Residual(**Residual.FULL)}):
        net = randomise(Residual(**Residual.FULL)).float()
        for part in (net.stem, net.bn0, net.bn1.weight):
            part.requires_grad_(False)
        before = state(net)
        dmcp.reinitialize(net, **way)
        kept = {name for name, tensor in state(net).items() if torch.equal(tensor, before[name])}
        assert {name for name in before if name.startswith(("stem.", "bn0."))} | {"bn1.weight"} <= kept
        assert not {"conv1.weight", "conv4.weight"} & kept
        assert way or "bn1.running_mean" not in kept  # its bias is still trained


# save and load


@pytest.mark.parametrize("net", NETS, ids=lambda net: net.__name__)
def test_load_gives_back_what_was_saved(net: Any, tmp_path: Path) -> None:
    model, _, widths, small = narrowed(randomise(net(**net.FULL)), net.SHAPE)
    by_hand = net.narrow(model, **{key: list(range(widths[name])) for key, name in net.SPACES.items()})
    dmcp.save(small, widths, tmp_path / "result")
    fresh = net(**net.FULL).eval()
    before = state(fresh)
    again = dmcp.load(tmp_path / "result", fresh)

    assert type(again) is net
    assert not again.training  # the fresh model's mode
    assert same(state(again), state(small))
    assert same(before, state(fresh))
    assert len(list(again.parameters())) == len(list(model.parameters()))  # ties are still ties
    x = sample(net.SHAPE)
    assert distance(again.train()(x), by_hand.train()(x)) < 1e-10
    again(x).sum().backward()
    dmcp.trace(again, x)  # attributes and tensors fit together: the loaded network can be pruned again


def test_saved_files_need_nothing_of_ours(odd: Case, tmp_path: Path) -> None:
    _, _, widths, small = odd
    small.to(memory_format=torch.channels_last)
    (tmp_path / "notes.txt").write_text("mine")
    dmcp.save(small, widths, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "notes.txt", "widths.json"]

    record = json.loads((tmp_path / "widths.json").read_text())
    assert record["widths"] == dict(widths)
    assert record["input_shape"] == [3, 8, 8]
    assert record["fingerprint"] == fingerprint(Odd())
    assert record["attributes"][""]["channels"] == small.channels == 4
    assert record["attributes"]["stem"]["kernel_size"] == [3, 3]
    assert record["sha256"] == hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {name: file.get_slice(name).get_shape() for name in file.keys()} == record["tensors"]  # noqa: SIM118
    assert record["tensors"]["shift"] == [4, 1, 1]

    again = dmcp.load(tmp_path, Odd())
    assert again.channels == 4
    assert again.stem.kernel_size == (3, 3)


def test_a_trained_network_is_saved_through_its_wrapper_and_in_its_dtype(chain: Case, tmp_path: Path) -> None:
    _, _, widths, small = chain
    dmcp.save(nn.DataParallel(small.bfloat16()), widths, tmp_path)
    again = dmcp.load(tmp_path, nn.DataParallel(Chain(**Chain.FULL)))
    assert {p.dtype for p in again.parameters()} == {torch.bfloat16}
    assert same(state(again), state(small))


def test_a_killed_save_leaves_the_old_result_or_the_new_one(
    chain: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, graph, widths, old = chain
    new = dmcp.cut(model, graph, graph.full)
    outcomes = []
    for survive in range(5):  # calls to the disk before the kill: two fsyncs, two renames
        folder = tmp_path / str(survive)
        dmcp.save(old, widths, folder)
        left = iter(range(survive))

        def step(real: Callable[..., Any], left: Any = left) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                if next(left, None) is None:
                    raise KeyboardInterrupt
                return real(*args)

            return run

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", step(os.fsync))
            patch.setattr(Path, "replace", step(Path.replace))
            try:
                dmcp.save(new, graph.full, folder)
                killed = False
            except KeyboardInterrupt:
                killed = True
        found = state(dmcp.load(folder, Chain(**Chain.FULL)))
        outcomes.append((killed, "new" if same(found, state(new)) else "old" if same(found, state(old)) else "mix"))
        dmcp.save(old, widths, folder)  # and the next save works
        assert same(state(dmcp.load(folder, Chain(**Chain.FULL))), state(old))
        assert len(os.listdir(folder)) == 2
    assert outcomes == [(True, "old"), (True, "old"), (True, "old"), (True, "new"), (False, "new")]


def test_a_full_disk_leaves_the_old_result(chain: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, graph, widths, old = chain
    dmcp.save(old, widths, tmp_path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    new = dmcp.cut(model, graph, graph.full)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(dmcp.FileError, match="cannot be written: No space left"):
        dmcp.save(new, graph.full, tmp_path)
    assert len(os.listdir(tmp_path)) == 2
    assert same(state(dmcp.load(tmp_path, model)), state(old))


def test_save_refuses_in_a_sentence(chain: Case, tmp_path: Path) -> None:
    _, _, widths, small = chain
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(dmcp.FileError, match="the result cannot be written"):
            dmcp.save(small, widths, folder)
    with pytest.raises(dmcp.WidthsError, match="save needs the Widths"):
        dmcp.save(small, dict(widths), tmp_path)  # type: ignore[arg-type]
    with pytest.raises(dmcp.FileError, match="save needs the path of a folder, not None"):
        dmcp.save(small, widths, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("net", NETS, ids=lambda net: net.__name__)
def test_save_refuses_widths_of_another_network(net: Any, tmp_path: Path) -> None:
    model, graph, widths, small = narrowed(randomise(net(**net.FULL)), net.SHAPE)
    for network, other in ((model, widths), (small, graph.full)):
        with pytest.raises(dmcp.WidthsError, match=r"These widths are not those of this network: .* must be"):
            dmcp.save(network, other, tmp_path / "result")
    for space, width in widths.items():
        if width > 1:
            other = graph.widths(dict(widths) | {space: width - 1})
            with pytest.raises(dmcp.WidthsError, match="These widths are not those"):
                dmcp.save(small, copy.deepcopy(pickle.loads(pickle.dumps(other))), tmp_path / "result")
    assert not (tmp_path / "result").exists()
    dmcp.save(model, graph.full, tmp_path / "result")


def test_save_takes_another_head(chain: Case, tmp_path: Path) -> None:
    _, _, widths, small = chain
    name, head = [(name, it) for name, it in small.named_modules() if isinstance(it, nn.Linear | nn.Conv2d)][-1]
    assert isinstance(head, nn.Linear)
    small.set_submodule(name, nn.Linear(head.in_features, head.out_features + 3))
    dmcp.save(small, widths, tmp_path)


def edit(**changes: Any) -> Callable[[bytes], bytes]:
    return lambda data: json.dumps(json.loads(data) | changes).encode()


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes | None], str]] = {
    "no weights": ("model.safetensors", lambda data: None, "cannot be read: No such file"),
    "no widths": ("widths.json", lambda data: None, "cannot be read: No such file"),
    "truncated weights": ("model.safetensors", lambda data: data[:-8], "truncated or changed"),
    "edited weights": ("model.safetensors", lambda data: data[:-1] + bytes([data[-1] ^ 1]), "truncated or changed"),
    "empty weights": ("model.safetensors", lambda data: b"", "truncated or changed"),
    "truncated widths": ("widths.json", lambda data: data[:-8], "truncated or not JSON"),
    "binary widths": ("widths.json", lambda data: b"\x80\xff" + data, "truncated or not JSON"),
    "a list": ("widths.json", lambda data: b"[1, 2]", "not a result that this version can read"),
    "somebody else's": ("widths.json", lambda data: b'{"widths": {}}', "not a result that this version can read"),
    "of the future": ("widths.json", edit(format="torch-dmcp 9"), "format is 'torch-dmcp 9', not 'torch-dmcp 1'"),
    "edited widths": ("widths.json", edit(widths={"conv1": 1}), "changed since it was saved"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_load_refuses_damaged_files(damage: str, chain: Case, tmp_path: Path) -> None:
    model, _, widths, small = chain
    dmcp.save(small, widths, tmp_path)
    name, change, sentence = DAMAGE[damage]
    data = change((tmp_path / name).read_bytes())
    (tmp_path / name).unlink() if data is None else (tmp_path / name).write_bytes(data)
    with pytest.raises(dmcp.FileError, match=sentence) as caught:
        dmcp.load(tmp_path, model)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_load_refuses_another_architecture(chain: Case, odd: Case, tmp_path: Path) -> None:
    _, _, widths, small = chain
    dmcp.save(small, widths, tmp_path)
    with pytest.raises(dmcp.WidthsError, match="saved from another architecture than this Odd"):
        dmcp.load(tmp_path, odd[0])
    with pytest.raises(dmcp.WidthsError, match="another architecture"):
        dmcp.load(tmp_path, small)  # the cut network is not the unpruned one
    with pytest.raises(dmcp.WidthsError, match="on the meta device"):
        dmcp.load(tmp_path, Chain(**Chain.FULL).to("meta"))


def test_load_refuses_another_version_of_the_code(odd: Case, tmp_path: Path) -> None:
    _, _, widths, small = odd
    dmcp.save(small, widths, tmp_path)
    renamed = Odd()
    renamed.width = renamed.__dict__.pop("channels")
    with pytest.raises(dmcp.WidthsError, match=r"another version of this Odd: channels is not in both"):
        dmcp.load(tmp_path, renamed)


def resealed(folder: Path, **changes: Any) -> None:
    """widths.json edited by somebody who knows how its digest is made."""
    weights = (folder / "model.safetensors").read_bytes()
    record = json.loads((folder / "widths.json").read_text()) | changes
    record["sha256"] = hashlib.sha256(weights).hexdigest()
    del record["digest"]
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    (folder / "widths.json").write_text(json.dumps(record | {"digest": digest}))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"tensors": None}, "tensors, attributes or sha256 are missing"),
        ({"attributes": {"conv1": 3}}, "its attributes are not tables"),
        ({"attributes": {"conv1": {"kernel_size": 3}}}, "conv1.kernel_size is not in both"),
        ({"attributes": {"conv1": {"forward": 3}}}, "conv1.forward is not in both"),
        ({"attributes": {"conv1": {"\x1b[2J": 3}}}, r"conv1.\\x1b\[2J is not in both"),
        ({"format": [[[[3]]]] * 1000}, "not a result that this version can read"),
    ],
    ids=["no tensors", "no tables", "not a tuple", "a method", "a terminal's", "long"],
)
def test_load_refuses_what_was_edited_with_care(
    chain: Case, changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    model, _, widths, small = chain
    dmcp.save(small, widths, tmp_path)
    resealed(tmp_path, **changes)
    with pytest.raises(dmcp.DmcpError, match=sentence) as caught:
        dmcp.load(tmp_path, model)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


@pytest.mark.parametrize("kind", ["ints", "a dim more", "another shape"])
def test_load_refuses_tensors_that_are_no_weights_of_the_model(chain: Case, kind: str, tmp_path: Path) -> None:
    model, _, widths, small = chain
    dmcp.save(small, widths, tmp_path)
    tensors = safetensors.torch.load_file(tmp_path / "model.safetensors")
    bias = tensors["conv1.bias"]
    tensors["conv1.bias"] = bias.long() if kind == "ints" else bias[None] if kind == "a dim more" else bias[:1].clone()
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    listed = {"tensors": {name: list(tensor.shape) for name, tensor in tensors.items()}}
    resealed(tmp_path, **(listed if kind != "another shape" else {}))
    with pytest.raises(dmcp.DmcpError, match="conv1.bias is" if kind != "another shape" else "are not those"):
        dmcp.load(tmp_path, model)


class Extent(NamedTuple):
    height: int
    width: int


def test_an_attribute_keeps_its_type(odd: Case, tmp_path: Path) -> None:
    _, _, widths, small = odd
    fresh = Odd()
    small.extent, fresh.extent = Extent(3, 4), Extent(5, 6)
    dmcp.save(small, widths, tmp_path)
    again = dmcp.load(tmp_path, fresh)
    assert again.extent == Extent(3, 4) and type(again.extent) is Extent


class Sly(nn.Module):
    """Reads its registered parameter from a plain list, where gates cannot be folded in."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)
        self.hidden = [self.b.weight]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.conv2d(self.a(x).relu(), self.hidden[0])


def test_verify_compares_values() -> None:
    model, x = resnet18(), torch.randn(2, 3, 64, 64)
    assert dmcp.verify(model, dmcp.trace(model, x), x) < 1e-12
    with pytest.raises(dmcp.CutError, match="differs"):
        dmcp.verify(Sly(), dmcp.trace(Sly(), x), x)
