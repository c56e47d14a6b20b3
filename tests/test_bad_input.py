"""Bad input gets one clear sentence and the right kind of error; nothing is lost."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import Chain, Residual, mystery, sample
from test_cli import Capture, run
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import dmcp
from dmcp.errors import DataError, DmcpError, TraceError, WidthsError

X = sample(Chain.SHAPE, batch=2).float()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return Chain(**Chain.FULL)


@pytest.fixture(scope="module")
def graph(model: nn.Module) -> Any:
    return dmcp.trace(model, X)


def refused(kind: type[DmcpError], *words: str, lines: int = 1) -> Any:
    """Expect this very kind of error, in so many lines at most, a sentence with these words in it."""

    class Expected:
        def __enter__(self) -> None:
            self.raises = pytest.raises(kind)
            self.info = self.raises.__enter__()

        def __exit__(self, *trouble: Any) -> bool:
            caught = self.raises.__exit__(*trouble)
            text = str(self.info.value)
            assert self.info.type is kind
            assert len(text.splitlines()) <= lines, text
            assert [word for word in words if word not in text] == [], text
            return bool(caught)

    return Expected()


# -- the model and its example


def test_an_example_of_the_wrong_shape(model: nn.Module) -> None:
    with refused(TraceError, "forward", "channels"):  # and torch's own "expected input to have 3 channels"
        dmcp.trace(model, torch.randn(2, 4, 11, 11))
    with refused(TraceError, "forward"):
        dmcp.trace(model, torch.randn(2, 3, 17, 17))  # the linear after the flatten does not fit
    with refused(TraceError, "forward"):
        dmcp.trace(model, (X, X))


@pytest.mark.parametrize(("given", "meant"), [((32, 32), "3x32x32"), ((32,), "3x224x224"), ((3, 4, 9, 9), "3x9x9")])
def test_a_sample_that_is_no_image(model: nn.Module, given: tuple[int, ...], meant: str) -> None:
    told = "x".join(map(str, given))
    with refused(TraceError, "channels x height x width", f"as in {meant}", f"not {told}"):
        dmcp.trace(model, torch.zeros(2, *given))


def test_an_image_without_a_batch_is_no_batch_of_lines() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1))  # runs on 3x32x32 as if that were an image
    with refused(TraceError, "channels x height x width", "as in 3x32x32", "not 32x32"):
        dmcp.trace(model, torch.zeros(3, 32, 32))


def test_inputs_that_the_model_itself_turns_into_images() -> None:
    class Sound(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.conv(x.view(len(x), 1, 8, -1)))

    assert spaces(dmcp.trace(Sound(), torch.zeros(2, 64))) == {"conv": 8}


@pytest.mark.parametrize("example", [None, "3x11x11", [1, 2], {}, ()], ids=repr)
def test_an_example_that_is_no_tensor(model: nn.Module, example: Any) -> None:
    with refused(TraceError, "example"):
        dmcp.trace(model, example)


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        raise LookupError("the cupboard is bare")


def test_a_model_that_fails_in_its_own_forward() -> None:
    with pytest.raises(TraceError) as caught:
        dmcp.trace(Failing(), X)
    text = str(caught.value)
    assert "LookupError" in text
    assert "the cupboard is bare" in text
    assert text.index("forward") < text.index("the cupboard is bare")  # ours in front
    chain: list[BaseException | None] = [caught.value]
    while chain[-1] is not None:
        chain.append(chain[-1].__cause__)
    assert any(isinstance(error, LookupError) for error in chain)  # the model's own traceback is not lost


class NoTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> str:
        return "nothing"


@pytest.mark.parametrize(
    "nothing",
    [nn.Linear(4, 2), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)), nn.Identity()],
    ids=["one layer", "reads the input", "no parameters"],
)
def test_nothing_to_prune(nothing: nn.Module) -> None:
    with refused(TraceError, "prun"):
        dmcp.trace(nothing, torch.randn(2, 4))


def test_everything_frozen(model: nn.Module) -> None:
    with refused(TraceError, "prun"):
        dmcp.trace(model, X, ignore=["conv1", "conv2", "conv3"])


def test_no_tensor_comes_out() -> None:
    with refused(TraceError):
        dmcp.trace(NoTensor(), X)


# -- names


@pytest.mark.parametrize(("wrong", "near"), [("conv22", "conv2"), ("cnv1", "conv1"), ("head1", "head")])
def test_a_misspelt_name_in_frozen(model: nn.Module, wrong: str, near: str) -> None:
    with refused(TraceError, "ignore", wrong, near):
        dmcp.trace(model, X, ignore=[wrong])
    with pytest.raises(TraceError) as caught:
        dmcp.trace(model, X, ignore=["head", wrong])
    words = str(caught.value).replace("?", " ").replace(",", " ").split()
    assert words.count(near) == 1  # named, once


def test_frozen_that_is_one_string(model: nn.Module) -> None:
    """Taken as one name or refused, but never as five letters."""
    try:
        found = spaces(dmcp.trace(model, X, ignore="conv1"))
    except TraceError:
        found = {}
    assert "conv1" not in found


# -- ops without a rule


class Mysterious(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        self.secret = Secret()
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.secret(self.block(x)))


class Secret(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return mystery(x)


def test_strict_names_the_op_the_place_and_two_ways_out() -> None:
    with refused(TraceError, "secret", "mystery", "8x9x9", "rules=RULES |", "ignore=", lines=2):
        dmcp.trace(Mysterious(), X, strict=True)


def test_strict_accepts_both_ways_out() -> None:
    class Roomy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.conv, self.last = Mysterious(), nn.Conv2d(5, 7, 1), nn.Conv2d(7, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.conv(self.inner(x)).relu())

    rules = dmcp.RULES | {torch.ops.dmcp_tests.mystery.default: lambda call: [call.x.dims]}
    assert "inner.block.0" in {space.name for space in dmcp.trace(Roomy(), X, rules=rules, strict=True).spaces}
    graph = dmcp.trace(Roomy(), X, ignore=["inner"], strict=True)
    assert {space.name for space in graph.spaces} == {"conv"}


# -- widths


@pytest.mark.parametrize(
    ("widths", "words"),
    [
        ({"conv1": 0}, ("conv1", "0", "1")),
        ({"conv1": -3}, ("conv1", "-3")),
        ({"conv1": 8}, ("conv1", "8", "7")),
        ({"conv1": 3.0}, ("conv1", "3.0")),
        ({"conv1": "3"}, ("conv1", "3")),
        ({"conv1": True}, ("conv1", "True")),
        ({"conv1": None}, ("conv1", "None")),
        ({"conv11": 3}, ("conv11", "conv1")),
        ({"head": 3}, ("head",)),
        ([1, 1], ("2", "3")),
        ([1, 1, 1, 1], ("4", "3")),
        ([1, 1, 0], ("conv3", "0")),
        ([1, 1, 7], ("conv3", "7", "6")),
        ([1.0, 1.0, 1.0], ("int",)),
        (torch.tensor([1.0, 1.0, 1.0]), ("int",)),
        (torch.tensor([[1, 1, 1]]), ()),
    ],
    ids=str,
)
def test_widths_that_do_not_fit(graph: Any, widths: Any, words: tuple[str, ...]) -> None:
    with refused(WidthsError, *words):
        graph.widths(widths)
    assert issubclass(WidthsError, ValueError)


@pytest.mark.parametrize(
    "widths",
    [
        {"conv1": 0},
        {"conv1": 8},
        {"conv1": 2.5},
        {"conv0": 2},
        {"conv1": []},
        {"conv1": [0, 7]},
        {"conv1": [-1]},
        {"conv1": [2, 2]},
        {"conv1": [0.5]},
        {"conv1": [[0, 1]]},
    ],
    ids=str,
)
def test_cutting_to_channels_that_are_not_there(model: nn.Module, graph: Any, widths: Any) -> None:
    before = copy.deepcopy(model.state_dict())
    with refused(WidthsError, *widths):
        dmcp.cut(model, graph, widths)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(
    "use",
    [
        lambda model, graph, widths: dmcp.cut(model, graph, widths),
        lambda model, graph, widths: graph.macs(widths),
        lambda model, graph, widths: graph.params(widths),
        lambda model, graph, widths: graph.layers(widths),
        lambda model, graph, widths: dmcp.Supernet(model, graph).hard(widths),
    ],
    ids=["cut", "macs", "params", "layers", "hard"],
)
@pytest.mark.parametrize("other", [Residual(**Residual.FULL), Chain(8, 9, 6)], ids=["other class", "other sizes"])
def test_widths_of_another_architecture(
    model: nn.Module, graph: Any, other: nn.Module, use: Callable[[Any, Any, Any], Any]
) -> None:
    x = X if isinstance(other, Chain) else sample(Residual.SHAPE, batch=2).float()
    widths = dmcp.trace(other, x).full
    with refused(WidthsError, "another architecture"):
        use(model, graph, widths)


def test_a_graph_of_another_architecture(graph: Any) -> None:
    other = Chain(8, 9, 6)
    with refused(WidthsError, "another architecture"):
        dmcp.cut(other, graph, {"conv1": 2})
    with refused(WidthsError, "another architecture"):
        dmcp.Supernet(other, graph)


def test_widths_of_the_same_architecture_with_other_weights(graph: Any) -> None:
    other = Chain(**Chain.FULL)
    small: Any = dmcp.cut(other, graph, dmcp.trace(other, X).widths({"conv1": 2}))
    assert torch.equal(small.conv1.weight, other.conv1.weight[:2])


@pytest.mark.parametrize("table", [torch.ones(4, 2), torch.ones(4, 4, dtype=torch.int64), torch.ones(1, 1, 3)], ids=str)
def test_a_table_of_widths_of_the_wrong_shape(graph: Any, table: Tensor) -> None:
    with refused(WidthsError, "3"):
        graph.macs(table)


# -- wrapped models


def spaces(graph: Any) -> dict[str, int]:
    return {space.name: space.size for space in graph.spaces}


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def _unwrapped(wrapped: nn.Module, model: nn.Module, graph: Any) -> None:
    found = dmcp.trace(wrapped, X)
    assert spaces(found) == spaces(graph)
    assert found.fingerprint == graph.fingerprint
    small = dmcp.cut(wrapped, found, {"conv1": 2})
    assert type(small) is Chain
    assert torch.equal(small.conv1.weight, model.conv1.weight[:2])
    net = dmcp.Supernet(wrapped, found)
    assert type(net.model) is Chain


def test_data_parallel_is_unwrapped(model: nn.Module, graph: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # it would take the model there
    _unwrapped(nn.DataParallel(model, device_ids=[]), model, graph)


def test_a_compiled_model_is_unwrapped(model: nn.Module, graph: Any) -> None:
    _unwrapped(torch.compile(model, backend="eager"), model, graph)


@pytest.mark.usefixtures("process_group")
@pytest.mark.filterwarnings("ignore")
def test_a_distributed_model_is_unwrapped(graph: Any) -> None:
    model = Chain(**Chain.FULL)
    _unwrapped(DistributedDataParallel(model), model, graph)
    _unwrapped(torch.compile(DistributedDataParallel(model), backend="eager"), model, graph)


@pytest.mark.filterwarnings("ignore")
def test_a_script_module_is_refused(model: nn.Module) -> None:
    with refused(TraceError, "TorchScript"):
        dmcp.trace(torch.jit.trace(copy.deepcopy(model).eval(), X), X)


def test_what_is_no_module_is_refused() -> None:
    with refused(TraceError, "nn.Module"):
        dmcp.trace(lambda x: x, X)  # type: ignore[arg-type]


# kinds of numbers


class Looking(nn.Sequential):
    """Its way depends on its input, so that it cannot be traced without values."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() > 0 else -x)


def small(kind: torch.dtype, base: type[nn.Sequential] = nn.Sequential) -> nn.Module:
    return base(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)).to(kind)


FLOATS = "convert one of them, with x.to(torch.{}) or model.to(torch.{})"
BYTES = "convert it, with x.to(torch.float32), and scale it as the model expects: bytes of images by 1 / 255"


@pytest.mark.parametrize(
    ("own", "given", "way"),
    [
        (torch.float32, torch.uint8, BYTES),
        (torch.float32, torch.int64, BYTES),
        (torch.float64, torch.float32, FLOATS.format("float64", "float32")),
        (torch.float32, torch.float64, FLOATS.format("float32", "float64")),
    ],
    ids=str,
)
def test_other_numbers_than_those_of_the_weights_are_named(own: torch.dtype, given: torch.dtype, way: str) -> None:
    names = (str(it).removeprefix("torch.") for it in (given, own))
    said = re.escape("holds {}, the weights of the model {}: {}.".format(*names, way))
    with pytest.raises(TraceError, match=f"^The example input {said}$"):
        dmcp.trace(small(own, Looking), torch.ones(2, 1, 8, 8).to(given))
    batches = [(torch.ones(2, 1, 8, 8).to(given), torch.zeros(2, dtype=torch.int64))]
    with pytest.raises(DataError, match=f"^The input of a batch {said}$"):
        dmcp.prune(small(own), batches, batches)


def test_other_mistakes_than_numbers_keep_their_own_words() -> None:
    for kind in (torch.uint8, torch.float32):
        with pytest.raises(TraceError, match=r"^The model fails in its own forward on this example"):
            dmcp.trace(small(torch.float32), torch.ones(2, 3, 8, 8).to(kind))


def test_a_command_names_the_numbers_of_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    source = "from dmcp.models import build as digits\n\ndef build():\n    return digits('digits:resnet').double()\n"
    (tmp_path / "double_net.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    code, _, err = run(
        capsys, "prune", "--model", "double_net:build", "--data", "digits", "--out", str(tmp_path / "run")
    )
    way = FLOATS.format("float64", "float32")
    assert code == 2 and err == f"dmcp: The images hold float32, the weights of the model float64: {way}.\n"
