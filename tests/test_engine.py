"""The engine: what it chooses, what it switches and puts back, its optimizer, and that nothing is compiled twice."""

from __future__ import annotations

import copy
import functools
import os
import warnings
from collections import Counter
from typing import Any

import pytest
import torch
from nets import Chain, Depthwise, Residual, distance, randomise, sample
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_flatten

import dmcp
import dmcp.runtime.cuda_graphs
import dmcp.runtime.engine
from dmcp.errors import TrainingError
from dmcp.models import build
from dmcp.runtime.cuda_graphs import Repeated
from dmcp.runtime.engine import KernelWarning, ResolvedEngine, best_device, is_depthwise, is_narrow, set_lr, sgd
from dmcp.searching.search import search
from dmcp.settings import Engine, Precision, SearchConfig, TrainConfig
from dmcp.training import train

CPU = torch.device("cpu")


# -- choices


@pytest.mark.parametrize("facts", [{}, {"steps": 10**6}, {"large": True}, {"steps": 10**6, "large": True}])
def test_on_the_cpu_everything_is_plain(facts: dict[str, Any]) -> None:
    assert Engine().resolve(CPU, **facts) == ResolvedEngine(
        device=CPU,
        precision=Precision.FLOAT32,
        channels_last=False,
        compile=False,
        graphs=False,
        tf32=True,
        deterministic=False,
    )


def test_what_is_asked_for_is_kept() -> None:
    asked = Engine(precision="bfloat16", channels_last=True, compile=True, graphs=True, tf32=False, deterministic=True)
    resolved = asked.resolve(CPU)
    assert resolved.precision is Precision.BFLOAT16
    assert (resolved.channels_last, resolved.compile, resolved.tf32, resolved.deterministic) == (
        True,
        True,
        False,
        True,
    )
    assert not resolved.graphs  # there is nothing to capture on a CPU


class Hopper:
    """A GPU of which only the name is here."""

    type = "cuda"


@pytest.mark.parametrize(
    ("asked", "facts", "kernels", "compiled"),
    [
        ({}, {"steps": 10**6, "narrow": True}, True, False),
        ({}, {"steps": 10**6, "narrow": True, "large": True}, True, False),
        ({}, {"steps": 10, "narrow": True}, False, False),
        ({}, {"steps": 10**6}, False, True),
        ({}, {"steps": 10**6, "narrow": True, "plain": False}, False, True),  # a loss of one's own, or several ranks
        ({"kernels": True}, {"steps": 10, "plain": False}, True, False),
        ({"kernels": False}, {"steps": 10**6, "narrow": True}, False, True),
        ({"compile": True}, {"steps": 10**6, "narrow": True}, False, True),
        ({"precision": "float32"}, {"steps": 10**6, "narrow": True}, False, True),
        ({"channels_last": False, "kernels": True}, {}, False, False),
    ],
)
def test_narrow_networks_get_kernels_and_others_are_compiled(
    asked: dict[str, Any], facts: dict[str, Any], kernels: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(dmcp.runtime.engine, "kernels_refused", lambda device, depthwise=False: "")
    warnings.simplefilter("ignore", KernelWarning)
    resolved = Engine(**asked).resolve(Hopper(), **facts)  # type: ignore[arg-type]
    assert (resolved.kernels, resolved.compile) == (kernels, compiled)
    monkeypatch.setattr(dmcp.runtime.engine, "kernels_refused", lambda device, depthwise=False: "no C compiler")
    if kernels and asked:
        with pytest.raises(TrainingError, match=r"Own kernels cannot run on .* \(no C compiler\): leave kernels out"):
            Engine(**asked).resolve(Hopper(), **facts)  # type: ignore[arg-type]
    else:
        assert not Engine(**asked).resolve(Hopper(), **facts).kernels  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "facts", "refused", "kernels", "used"),
    [
        (True, {}, "", True, True),
        (True, {}, "wrong", True, False),
        (None, {"depthwise": True}, "", True, True),
        (None, {"depthwise": True}, "wrong", False, False),
        (None, {"depthwise": True, "narrow": True}, "wrong", True, False),
        (None, {"narrow": True}, "", True, False),  # it has no such layers, so that they are not even tried out
        (None, {"depthwise": True, "steps": 10}, "", False, False),
        (False, {"depthwise": True}, "", False, False),
    ],
)
def test_kernels_for_depthwise_layers_are_used_where_these_are_and_if_right(
    asked: bool | None,
    facts: dict[str, Any],
    refused: str,
    kernels: bool,
    used: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(dmcp.runtime.engine, "kernels_refused", lambda device, alone=False: refused if alone else "")
    warnings.simplefilter("ignore", KernelWarning)
    found = Engine(kernels=asked).resolve(Hopper(), **{"steps": 10**6} | facts)  # type: ignore[arg-type]
    assert (found.kernels, found.depthwise) == (kernels, used)
    assert found.compile is (not kernels and facts.get("steps") != 10)


@pytest.mark.parametrize(
    ("refused", "asked", "told"),
    [
        (
            "no C compiler",
            {},
            r"Own kernels for depthwise layers are not used on cuda:0 \(no C compiler\): torch's are",
        ),
        ("", {"precision": "float32"}, r"Own kernels are not used on cuda:0 \(.*bfloat16.*\): torch's are"),
        ("", {"compile": True}, r"Own kernels are not used on cuda:0 \(.*no compiling\): torch's are"),
    ],
)
def test_kernels_that_are_asked_for_and_not_used_are_told_once(
    refused: str, asked: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(dmcp.runtime.engine, "kernels_refused", lambda device, alone=False: refused if alone else "")
    dmcp.runtime.engine._warn_once.cache_clear()
    device = torch.device("cuda", 0)
    for kernels in (None, False):  # nothing is missed that was not asked for
        Engine(kernels=kernels, **asked).resolve(device, steps=10**6, narrow=True)
    with pytest.warns(KernelWarning, match=told) as found:
        Engine(kernels=True, **asked).resolve(device)
    assert "\n" not in str(found[0].message)
    assert Engine(kernels=True, **asked).resolve(device)  # no second time
    dmcp.runtime.engine._warn_once.cache_clear()


@pytest.mark.parametrize(
    ("name", "narrow"), [("cifar:resnet56", True), ("cifar:mobilenet_v2", False), ("resnet18", False)]
)
def test_which_networks_are_narrow(name: str, narrow: bool) -> None:
    assert is_narrow(build(name)) is narrow and not is_narrow(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("name", "found"),
    [("cifar:mobilenet_v2", True), ("cifar:resnet56", False), ("mobilenet_v2", False), ("efficientnet_b0", False)],
)
def test_networks_of_depthwise_layers_are_those_for_small_images(name: str, found: bool) -> None:
    assert is_depthwise(build(name)) is found and not is_depthwise(nn.Linear(2, 2))


def test_every_sixth_convolution_must_be_depthwise() -> None:
    """As in EfficientNets, where two of five belong to the squeeze and excitation."""
    model = build("efficientnet_b0")
    next(it for it in model.modules() if isinstance(it, nn.Conv2d)).stride = (1, 1)
    assert is_depthwise(model)
    for size, few in ((3, 6), (7, 6), (3, 7)):
        first = nn.Conv2d(8, 8, size, padding=size // 2, groups=8)
        model = nn.Sequential(first, *(nn.Conv2d(8, 128, 1) for _ in range(few - 1)))
        assert is_depthwise(model) is (size == 3 and few == 6)


def test_kernels_that_do_not_run_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> None:
        raise ImportError(f"No module named {name}\nand more")

    dmcp.runtime.engine.kernels_refused.cache_clear()
    monkeypatch.setattr(dmcp.runtime.engine.importlib, "import_module", fails)
    assert dmcp.runtime.engine.kernels_refused(torch.device("cuda", 7)) == "No module named dmcp.runtime.kernels"
    dmcp.runtime.engine.kernels_refused.cache_clear()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("precision", "float16"),
        ("precision", torch.bfloat16),
        ("precision", ""),
        ("channels_last", "yes"),
        ("compile", 2),
        ("graphs", "auto"),
        ("graphs", []),
        ("kernels", "yes"),
    ],
)
def test_bad_values_are_refused(field: str, value: Any) -> None:
    with pytest.raises(TrainingError, match=f"{field} must be"):
        Engine(**{field: value})


@pytest.mark.parametrize("field", ["tf32", "deterministic"])
@pytest.mark.parametrize("value", [None, "no", 2])
def test_switches_are_true_or_false(field: str, value: Any) -> None:
    with pytest.raises(TrainingError, match=f"{field} must be"):
        Engine(**{field: value})


def test_an_engine_is_a_value() -> None:
    assert Engine(precision="float32") == Engine(precision=Precision.FLOAT32)
    with pytest.raises(AttributeError):
        Engine().compile = True  # type: ignore[misc]
    with pytest.raises(TypeError):
        Engine("float32")  # type: ignore[misc]


def test_best_device_can_be_used() -> None:
    assert torch.ones(2, device=best_device()).sum().item() == 2


# -- switches


def resolved(**choices: Any) -> ResolvedEngine:
    return Engine(**choices).resolve(CPU)


def switches() -> dict[str, Any]:
    cudnn = torch.backends.cudnn
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "tf32": cudnn.allow_tf32,
        "benchmark": cudnn.benchmark,
        "cudnn": cudnn.deterministic,
        "grad": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "threads": torch.get_num_threads(),
        "environment": dict(os.environ),
    }


@pytest.mark.parametrize("warn_only", [False, True])
@pytest.mark.parametrize("before", [False, True])
def test_determinism_is_switched_on_and_back(before: bool, warn_only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # the user has it already
    torch.use_deterministic_algorithms(before, warn_only=warn_only)
    try:
        old = switches()
        with resolved(deterministic=True).running(nn.Linear(2, 2)):
            assert torch.are_deterministic_algorithms_enabled()
        assert switches() == old
        with (
            pytest.raises(KeyboardInterrupt),
            resolved(deterministic=True, channels_last=True).running(nn.Linear(2, 2)),
        ):
            raise KeyboardInterrupt
        assert switches() == old
    finally:
        torch.use_deterministic_algorithms(False)


def test_an_assert_of_a_gpu_is_explained() -> None:
    with pytest.raises(RuntimeError, match="device-side") as told, resolved().running():
        raise RuntimeError("CUDA error: device-side assert triggered")
    assert "Most often a label" in told.value.__notes__[0]
    with pytest.raises(RuntimeError) as plain, resolved().running():
        raise RuntimeError("mat1 and mat2")
    assert not hasattr(plain.value, "__notes__")


def test_the_environment_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    old = switches()
    with resolved(deterministic=True).running():
        pass
    assert switches() == old


@pytest.mark.parametrize("tf32", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_cuda_switches_are_put_back(tf32: bool, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They can be set without a GPU."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    chosen = copy.copy(resolved(tf32=tf32, deterministic=deterministic))
    object.__setattr__(chosen, "device", torch.device("cuda", 0))
    old = switches()
    with chosen.running():
        inside = switches()
    assert (inside["tf32"], inside["matmul"]) == ((True, "high") if tf32 else (False, "highest"))
    assert inside["benchmark"] is not deterministic
    assert switches() == old


# -- memory layout


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def layout(model: nn.Module) -> dict[str, Any]:
    """Which tensors there are, and whether they are stored in the usual order."""
    return {name: (id(tensor), tensor.is_contiguous()) for name, tensor in tensors(model).items()}


def image_net() -> nn.Module:
    """Convs of several shapes, two of which share their weight."""
    model = Residual(**Residual.FULL)
    model.bn3, model.conv3 = nn.Identity(), nn.Conv2d(8, 9, 1, stride=2, groups=1, bias=False)
    model.conv1, model.bn1 = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
    model.conv2 = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    model.conv2.weight = model.conv1.weight
    return randomise(model)


@pytest.mark.parametrize("choice", [None, False, True])
def test_layout_and_tensors_are_as_before(choice: bool | None) -> None:
    model, x = image_net(), sample((3, 9, 9))
    model.eval()
    values, old, out = copy.deepcopy(model.state_dict()), layout(model), model(x)
    chosen = resolved(channels_last=choice)
    with chosen.running(model):
        given = chosen.laid_out(x)
        assert model.stem.weight.is_contiguous(memory_format=torch.channels_last) is bool(choice)
        assert given.is_contiguous(memory_format=torch.channels_last) is bool(choice)
        assert torch.equal(given, x) and distance(model(given), out) < 1e-12
        assert {name: id(tensor) for name, tensor in tensors(model).items()} == {n: i for n, (i, _) in old.items()}
    assert x.is_contiguous()
    assert all(torch.equal(tensor, values[name]) for name, tensor in model.state_dict().items())
    assert layout(model) == old


def test_strides_are_as_before() -> None:
    model = image_net()
    old = [tensor.stride() for tensor in tensors(model).values()]
    with resolved(channels_last=True).running(model):
        pass
    assert [tensor.stride() for tensor in tensors(model).values()] == old


class Placed(nn.Conv2d):
    """A conv with a buffer of four dims."""

    def __init__(self) -> None:
        super().__init__(3, 6, 3)
        self.register_buffer("place", torch.randn(1, 6, 8, 8))


def test_buffers_are_as_before() -> None:
    model = Placed()
    old = layout(model)
    with resolved(channels_last=True).running(model):
        model.place.add_(1)
    assert layout(model) == old


def test_a_model_that_was_channels_last_stays_so() -> None:
    model = image_net().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    old = layout(model)
    with resolved(channels_last=True).running(model):
        pass
    assert layout(model) == old


def test_what_is_trained_inside_is_there_afterwards() -> None:
    model = image_net()
    with resolved(channels_last=True).running(model), torch.no_grad():
        for tensor in tensors(model).values():
            tensor.fill_(7)
    assert all((tensor == 7).all() for tensor in tensors(model).values())


def test_three_dimensional_convs_may_be_channels_last() -> None:
    model = nn.Conv3d(3, 4, 3)
    with resolved(channels_last=True).running(model):
        assert model(resolved(channels_last=True).laid_out(torch.ones(1, 3, 4, 4, 4))).shape == (1, 4, 2, 2, 2)


def test_laid_out_keeps_the_shape_of_a_batch() -> None:
    x, labels = sample((3, 4, 4)), torch.arange(4)
    batch = {"input": (x, [x.clone()]), "label": labels, "name": "n"}
    out = resolved(channels_last=True).laid_out(batch)
    assert out["label"] is labels and out["name"] == "n" and isinstance(out["input"], tuple)
    assert out["input"][0].is_contiguous(memory_format=torch.channels_last)
    assert resolved().laid_out(batch) is batch


@pytest.mark.parametrize("precision", list(Precision))
def test_autocast(precision: Precision) -> None:
    with resolved(precision=precision).autocast():
        out = nn.Linear(4, 4)(torch.ones(2, 4))
    assert out.dtype is (torch.bfloat16 if precision is Precision.BFLOAT16 else torch.float32)


def test_training_in_either_layout_gives_the_same_weights() -> None:
    x, labels = sample((3, 9, 9), batch=16), torch.arange(16) % 5
    loader = [(x[:8], labels[:8]), (x[8:], labels[8:])]
    models = [randomise(Residual(**Residual.FULL)) for _ in range(2)]
    config = TrainConfig(epochs=2, lr=0.05, reference_batch=None, warmup_epochs=0, warmup_lr=0)
    for model, chosen in zip(models, (Engine(), Engine(channels_last=True)), strict=True):
        old = layout(model)
        train(model, loader, config, runtime=dmcp.Runtime(engine=chosen))
        assert layout(model) == old
    one, other = (tensors(model) for model in models)
    assert all((one[name] - other[name]).abs().max() < 1e-6 for name in one)  # the loss is in float32


# -- the optimizer


@pytest.mark.parametrize(
    ("momentum", "nesterov", "decay"), [(0.9, True, 1e-2), (0.9, False, 1e-2), (0.0, False, 1e-2), (0.9, True, 0.0)]
)
def test_sgd_is_torchs_bit_for_bit(momentum: float, nesterov: bool, decay: float) -> None:
    ours, theirs = (Chain(**Chain.FULL) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    groups = [
        [{"params": list(net.conv1.parameters()), "weight_decay": decay}, {"params": list(net.head.parameters())}]
        for net in (ours, theirs)
    ]
    own = sgd(groups[0], 0.3, momentum, nesterov, CPU)
    other = torch.optim.SGD(groups[1], 0.3, momentum, nesterov=nesterov)
    start = ours.conv1.weight.clone()
    for step in range(5):
        for optimizer in (own, other):
            set_lr(optimizer, 0.3 / (step + 1))
        for net, optimizer in ((ours, own), (theirs, other)):
            optimizer.zero_grad()
            if step != 2:  # a step in which one group has no gradient
                net.conv1(sample((3, 5, 5), seed=step).float()).square().sum().backward()
            net.head(sample((24,), seed=step).float()).square().sum().backward()
            optimizer.step()
        for name, tensor in ours.named_parameters():
            assert torch.equal(tensor, theirs.get_parameter(name)), (step, name)
    assert not torch.equal(start, ours.conv1.weight)


def test_set_lr_gives_each_group_its_share() -> None:
    rates: list[Any] = [torch.tensor(1.0), 1.0]
    optimizer = torch.optim.SGD([{"params": [nn.Parameter(torch.zeros(1))], "lr": it} for it in rates], lr=1.0)
    set_lr(optimizer, 0.25, [2.0, 0.5])
    assert rates[0].item() == 0.5 and optimizer.param_groups[1]["lr"] == 0.125


def test_set_lr_reaches_every_group() -> None:
    model = Chain(**Chain.FULL)
    optimizer = sgd([{"params": model.conv1.parameters()}, {"params": model.head.parameters()}], 1.0, 0.9, True, CPU)
    set_lr(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    rate = torch.tensor(1.0)  # as on a GPU: the same tensor must go on being used
    captured = torch.optim.SGD(model.parameters(), rate)
    place = captured.param_groups[0]["lr"]
    set_lr(captured, 0.125)
    assert captured.param_groups[0]["lr"] is place and place.item() == 0.125


# -- graphs


def test_graphs_are_not_used_on_the_cpu() -> None:
    def step(x: Tensor) -> Tensor:
        return x + 1

    assert resolved(graphs=True).repeated(step) is step
    assert resolved().repeated(step) is step


def test_a_repeated_step_on_the_cpu_just_runs() -> None:
    calls: list[int] = []

    def step(batch: Any, scale: float) -> Tensor:
        calls.append(1)
        return batch[0] * scale

    repeated = Repeated(step)
    for number in range(6):
        assert repeated((torch.full((2,), number), "n"), 2.0).tolist() == [2 * number] * 2
    assert len(calls) == 6 and not repeated.graphs and not repeated.seen


@pytest.mark.parametrize("inputs", [(torch.ones(2),), (torch.ones(2, device="meta"), 3), ({"a": [torch.ones(1)]},)])
def test_tensors_elsewhere_have_no_key(inputs: Any) -> None:
    assert dmcp.runtime.cuda_graphs._key(*tree_flatten(inputs)) is None


def test_keys_tell_structures_apart() -> None:
    keys = [
        dmcp.runtime.cuda_graphs._key(*tree_flatten(inputs))
        for inputs in ((1, 2), ((1, 2),), ([1, 2],), (1, 3), (1, True))
    ]
    assert all(key is not None for key in keys)
    assert len(set(keys[:4])) == 4
    assert dmcp.runtime.cuda_graphs._key(*tree_flatten((1, {3}))) is None  # a set cannot be compared quickly


# -- compiling


class Images:
    """Batches of noise that do not change."""

    def __init__(self, shape: tuple[int, ...], count: int) -> None:
        self.batches = [(sample(shape, 4, seed).float(), torch.arange(4) % 5) for seed in range(count)]

    def __iter__(self) -> Any:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def searched(toy: Any, engine: Engine, counter: CompileCounterWithBackend | None = None) -> tuple[Any, list[int]]:
    """A search with a warm-up, and the number of compilations after each of its steps."""
    model = randomise(toy(**toy.FULL)).float()
    net = dmcp.Supernet(model, dmcp.trace(model, sample(toy.SHAPE).float()), 4)
    counts: list[int] = []
    config = SearchConfig(budget=0.5, groups=4, epochs=4, log_every=1, lr=0.05, min_lr=0.01, reference_batch=4)
    loader = Images(toy.SHAPE, 3)
    result = search(
        net,
        loader,
        config,
        runtime=dmcp.Runtime(engine=engine, on_event=lambda _: counts.append(counter.frame_count if counter else 0)),
    )
    return result, counts


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Any:
    """torch.compile without kernels, and how often it compiled."""
    found = CompileCounterWithBackend("aot_eager")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=found))
    torch._dynamo.reset()
    yield found
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo looks at that of folded weights
@pytest.mark.parametrize("toy", [Chain, pytest.param(Depthwise, marks=pytest.mark.slow)], ids=["chain", "depthwise"])
def test_nothing_is_compiled_twice(toy: Any, counter: CompileCounterWithBackend) -> None:
    expected, _ = searched(toy, Engine())
    result, counts = searched(toy, Engine(compile=True), counter)
    assert len(counts) == 12  # 6 of the warm-up
    assert counts[0] > 0 and len(set(counts[:6])) == 1
    assert counts[0] < counts[6] and len(set(counts[6:])) == 1
    for own, other in zip(result.log, expected.log, strict=True):
        assert own.weight_losses == pytest.approx(other.weight_losses, abs=1e-4)
        assert own.task_loss == pytest.approx(other.task_loss, abs=1e-4)
    assert (result.alphas - expected.alphas).abs().max() < 1e-3
    assert max(Counter(tuple(record.weight_losses) for record in result.log).values()) == 1


def test_training_is_compiled_once(counter: CompileCounterWithBackend) -> None:
    loader = Images(Chain.SHAPE, 3)
    config = TrainConfig(epochs=2, lr=0.05, reference_batch=None, warmup_epochs=0, warmup_lr=0)
    logs = []
    for engine in (Engine(), Engine(compile=True)):
        logs.append(train(randomise(Chain(**Chain.FULL)).float(), loader, config, runtime=dmcp.Runtime(engine=engine)))
    assert counter.frame_count == 1
    assert [record.loss for record in logs[1]] == pytest.approx([record.loss for record in logs[0]], abs=1e-4)
