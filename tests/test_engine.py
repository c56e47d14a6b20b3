"""The engine: what it chooses, what it switches and puts back, and that nothing is compiled twice."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from nets import Chain, Depthwise, Residual, distance, randomise, sample
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

import dmcp
from dmcp.errors import TrainingError
from dmcp.models import build
from dmcp.runtime import engine
from dmcp.runtime.engine import ResolvedEngine, best_device, resolve, suits_kernels
from dmcp.searching.search import search
from dmcp.settings import Engine, Precision, SearchConfig, TrainConfig
from dmcp.training.loop import train

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
LONG = 10**6
SETTINGS = TrainConfig(epochs=2, lr=0.05, reference_batch=None, warmup_epochs=0, warmup_lr=0)


def resolved(**choices: Any) -> ResolvedEngine:
    return resolve(Engine(**choices), CPU)


# choices


def test_on_the_cpu_everything_is_plain_unless_asked_for() -> None:
    plain = resolve(Engine(), CPU, steps=LONG, large=True)
    names = ("channels_last", "compile", "graphs", "deterministic")
    usual = ResolvedEngine(device=CPU, precision=Precision.FLOAT32, **dict.fromkeys((*names, "kernels"), False))
    assert plain == resolve(Engine(), CPU) == usual
    switched = dict.fromkeys(names, True)
    asked = resolved(precision="bfloat16", tf32=False, **switched)
    switched |= {"precision": Precision.BFLOAT16, "tf32": False, "graphs": False}  # a CPU has nothing to capture
    assert asked == replace(plain, **switched)  # type: ignore[arg-type]
    assert torch.ones(2, device=best_device()).sum().item() == 2
    with pytest.raises(TrainingError, match="precision"):
        Engine(precision="float16")  # type: ignore[arg-type]


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A GPU that is not here; the function sets why it refuses our kernels."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def refuse(why: str) -> None:
        monkeypatch.setattr(engine, "kernels_refused", lambda device: why)

    refuse("")
    return refuse


@pytest.mark.parametrize(
    ("asked", "facts", "chosen"),
    [
        ({}, {"few_channels": True}, "kernels"),
        ({}, {"few_channels": True, "steps": 10}, ""),
        ({}, {}, "compile"),
        ({}, {"few_channels": True, "capturable": False}, "compile"),  # a loss of one's own, or several ranks
        ({"kernels": True}, {"steps": 10, "capturable": False}, "kernels"),
        ({"kernels": False}, {"few_channels": True}, "compile"),
        ({"compile": True}, {"few_channels": True}, "compile"),
        ({"precision": "float32"}, {"few_channels": True}, "compile"),
        ({"channels_last": False}, {"few_channels": True, "steps": 10}, ""),
    ],
)
def test_what_a_gpu_gets(asked: dict[str, Any], facts: dict[str, Any], chosen: str, hopper: Any) -> None:
    def found() -> str:
        made = resolve(Engine(**asked), GPU, **{"steps": LONG} | facts)
        return " ".join(name for name in ("kernels", "compile") if getattr(made, name))

    assert found() == chosen
    with pytest.raises(TrainingError, match="they need bfloat16"):
        resolve(Engine(kernels=True, compile=True), GPU)
    hopper("no C compiler")
    if chosen == "kernels" and asked:
        with pytest.raises(TrainingError, match="no C compiler"):
            found()
    else:
        assert "kernels" not in found()


@pytest.mark.parametrize(
    ("make", "suited"),
    [
        (functools.partial(build, "cifar:resnet20"), True),
        (functools.partial(build, "resnet18"), False),
        (functools.partial(nn.Linear, 2, 2), False),
        (functools.partial(build, "cifar:mobilenet_v2"), False),
    ],
)
def test_which_networks_get_kernels(make: Callable[[], nn.Module], suited: bool) -> None:
    with torch.device("meta"):
        assert suits_kernels(make()) is suited


# what is switched and put back


def switches() -> dict[str, Any]:
    cudnn = torch.backends.cudnn
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "tf32": cudnn.allow_tf32,
        "benchmark": cudnn.benchmark,
        "cudnn": cudnn.deterministic,
        "autocast": torch.is_autocast_enabled("cpu"),
        "environment": dict(os.environ),
    }


@pytest.mark.parametrize(("device", "tf32", "exact"), [(CPU, True, True), (GPU, False, True), (GPU, True, False)])
def test_switches_are_put_back(device: Any, tf32: bool, exact: bool) -> None:
    """Those of CUDA can be set without a GPU."""
    old, chosen = switches(), replace(resolved(tf32=tf32, deterministic=exact), device=device)
    with contextlib.suppress(KeyboardInterrupt), chosen.running(nn.Linear(2, 2)):
        inside = switches()
        raise KeyboardInterrupt
    assert switches() == old and inside["deterministic"] is exact
    assert not exact or inside["environment"]["CUBLAS_WORKSPACE_CONFIG"]
    if device is GPU:
        assert (inside["tf32"], inside["matmul"]) == ((True, "high") if tf32 else (False, "highest"))
        assert inside["benchmark"] is not exact


def test_batchnorms_are_synchronised_and_put_back() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LayerNorm(2))
    old = [(type(it), {*vars(it)}) for it in model]
    with replace(resolved(), sync_batchnorm=True).running(model):
        assert [type(it) for it in model] == [nn.Conv2d, nn.SyncBatchNorm, nn.LayerNorm]
    assert [(type(it), {*vars(it)}) for it in model] == old


# memory layout and precision


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("choice", [None, True])
def test_layout_and_tensors_are_as_before(choice: bool | None, before: bool) -> None:
    model, x = randomise(Residual(**Residual.FULL)).eval(), sample((3, 9, 9))
    if before:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    old = {name: (id(tensor), tensor.stride()) for name, tensor in model.named_parameters()}
    out, chosen, labels = model(x), resolved(channels_last=choice), torch.arange(4)
    with chosen.running(model), torch.no_grad():
        batch = chosen.laid_out({"input": (x, [torch.ones(1, 3, 4, 4, 4)]), "label": labels, "name": "n"})
        given = batch["input"][0]
        assert batch["label"] is labels and batch["name"] == "n" and isinstance(batch["input"], tuple)
        assert model.stem.weight.is_contiguous(memory_format=torch.channels_last) is bool(choice or before)
        assert given.is_contiguous(memory_format=torch.channels_last) is bool(choice)
        assert torch.equal(given, x) and distance(model(given), out) < 1e-12
        model.conv1.weight.fill_(7)
    assert {name: (id(tensor), tensor.stride()) for name, tensor in model.named_parameters()} == old
    assert (model.conv1.weight == 7).all()  # what is trained inside is there afterwards
    for precision, dtype in ((Precision.BFLOAT16, torch.bfloat16), (Precision.FLOAT32, torch.float32)):
        with resolved(precision=precision).autocast():
            assert nn.Linear(4, 4)(torch.ones(2, 4)).dtype is dtype


# compiling


def images(shape: tuple[int, ...]) -> list[Any]:
    return [(sample(shape, 4, seed).float(), torch.arange(4) % 5) for seed in range(3)]


def searched(toy: Any, chosen: Engine, counter: CompileCounterWithBackend | None = None) -> tuple[Any, list[int]]:
    """A search with a warm-up, and the number of compilations after each of its steps."""
    model = randomise(toy(**toy.FULL)).float()
    net = dmcp.Supernet(model, dmcp.trace(model, sample(toy.SHAPE).float()), 4)
    config = SearchConfig(budget=0.5, groups=4, epochs=4, log_every=1, lr=0.05, min_lr=0.01, reference_batch=4)
    counts: list[int] = []
    count = lambda _: counts.append(counter.frame_count if counter else 0)  # noqa: E731
    runtime = dmcp.Runtime(engine=chosen, on_event=count)
    return search(net, images(toy.SHAPE), config, runtime=runtime), counts


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
    assert len(counts) == 13 and counts[0] > 0 and len({*counts[:6]}) == 1  # 6 of the warm-up, and the result
    assert counts[0] < counts[6] and len({*counts[6:]}) == 1
    for own, other in zip(result.log, expected.log, strict=True):
        assert own.weight_losses == pytest.approx(other.weight_losses, abs=1e-4)
        assert own.task_loss == pytest.approx(other.task_loss, abs=1e-4)
    assert (result.alphas - expected.alphas).abs().max() < 1e-3
    torch._dynamo.reset()
    before, logs = counter.frame_count, []
    for chosen in (Engine(), Engine(compile=True)):
        model, runtime = randomise(Chain(**Chain.FULL)).float(), dmcp.Runtime(engine=chosen)
        logs.append([record.loss for record in train(model, images(Chain.SHAPE), SETTINGS, runtime=runtime)])
    assert counter.frame_count == before + 1 and logs[1] == pytest.approx(logs[0], abs=1e-4)
