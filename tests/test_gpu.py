"""The same on a GPU; run by hand where there is one, since CI has none."""

from __future__ import annotations

import copy
import dataclasses
import functools
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import write_photos
from PIL import Image
from short_runs import EAGER, losses, search_pictures
from torchvision.models import mobilenet_v3_small, resnet18

import dmcp
from dmcp.data.datasets import load
from dmcp.data.images import mean_and_std
from dmcp.data.loaders import make_loader
from dmcp.exporting.timing import forward_pass, time_in_turns
from dmcp.models import build
from dmcp.runtime.batches import batches_from
from dmcp.runtime.cuda_graphs import Repeated
from dmcp.settings import LatencyMode

resnet20 = functools.partial(build, "cifar:resnet20", num_classes=10)
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def random_widths(graph: dmcp.ChannelGraph, seed: int = 0) -> dmcp.Widths:
    g = torch.Generator().manual_seed(seed)
    return graph.widths({s.name: int(torch.randint(1, s.size + 1, (1,), generator=g)) for s in graph.spaces})


@pytest.mark.parametrize("model_of", [resnet18, mobilenet_v3_small])
@pytest.mark.parametrize("training", [False, True])
def test_gated_is_cut_in_float64(model_of: type[torch.nn.Module], training: bool) -> None:
    torch.manual_seed(0)
    model = model_of(num_classes=10).double().cuda().train(training)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    x = torch.randn(4, 3, 64, 64, device="cuda", dtype=torch.float64)
    cuda, cpu = torch.cuda.get_rng_state(), torch.get_rng_state()
    graph = dmcp.trace(model, x)
    assert torch.equal(cuda, torch.cuda.get_rng_state()) and torch.equal(cpu, torch.get_rng_state())
    net = dmcp.Supernet(model, graph)
    widths = random_widths(graph)
    small = dmcp.cut(net.model, graph, widths)
    assert all(tensor.is_cuda for tensor in [*small.parameters(), *small.buffers()])
    with torch.no_grad():
        reference = net(x, net.hard(widths))
        assert float((small(x) - reference).abs().max() / reference.abs().max()) < 1e-10


# kernels


@pytest.mark.parametrize(
    "shape",
    [
        (8, 16, 32, 32, 16, 3, 1), (8, 16, 32, 32, 21, 3, 1), (8, 11, 15, 15, 16, 3, 2), (8, 11, 15, 15, 21, 3, 2),
        (8, 64, 8, 8, 16, 1, 2), (8, 64, 8, 8, 21, 1, 2), (8, 3, 32, 32, 16, 3, 1), (8, 3, 32, 32, 21, 3, 1),
        (8, 16, 32, 32), (8, 21, 15, 15), (64, 130, 9, 9), (64, 1280, 4, 4), (64, 2048, 2, 2), (64, 2047, 2, 2),
    ],
    ids=str,
)  # fmt: skip
def test_own_kernels_compute_what_torchs_do(shape: tuple[int, ...]) -> None:
    from kernel_checks import check  # it needs Triton

    check(shape, "cuda")


# graphs


def half_cross_entropy(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return 0.5 * torch.nn.functional.cross_entropy(output, batch[1])


@pytest.mark.parametrize("loss", [None, half_cross_entropy], ids=["default loss", "own loss"])
def test_graphs_compute_the_same_bits(loss: Any) -> None:
    exact = dataclasses.replace(EAGER, deterministic=True)
    task = dmcp.Task(loss=loss)
    plain, replayed = (
        search_pictures(dataclasses.replace(exact, graphs=it), resnet20, task=task) for it in (False, True)
    )
    assert torch.equal(losses(plain[1]), losses(replayed[1]))
    assert all(torch.equal(a, b) for a, b in zip(plain[0].parameters(), replayed[0].parameters(), strict=True))


def _waits(x: torch.Tensor) -> torch.Tensor:
    return torch.dropout(x, 0.5, True) * float(x.max())


def _raises(x: torch.Tensor) -> torch.Tensor:
    drawn = torch.dropout(x, 0.5, True)
    if torch.cuda.is_current_stream_capturing():
        raise NotImplementedError
    return drawn


@pytest.mark.parametrize(("step", "why"), [(_waits, "CUDA error"), (_raises, "NotImplementedError")])
def test_a_step_that_cannot_be_captured_leaves_the_others_their_graphs_and_random_numbers(
    step: Callable[[torch.Tensor], torch.Tensor], why: str
) -> None:
    """Torch 2.11 itself leaves its generator, its allocator and the stream inside a capture that is invalid."""
    x, before, after = torch.ones(64, device="cuda"), Repeated(torch.dropout), Repeated(torch.dropout)
    drawn = [before(x, 0.5, True) for _ in range(5)]
    failing = Repeated(step)
    drawn += [failing(x) for _ in range(5)]
    assert why in failing.refused and torch.cuda.current_stream() == torch.cuda.default_stream()
    drawn += [torch.dropout(x, 0.5, True) for _ in range(2)]
    drawn += [other(x, 0.5, True) for _ in range(5) for other in (before, after)]
    assert before.graphs and after.graphs and not before.refused and not after.refused
    assert len({tuple(it.tolist()) for it in drawn}) == len(drawn)  # no numbers are drawn twice


# kills


def command(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-m", "dmcp", "prune", *words, "--quiet"])


def test_a_killed_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    job = ["--model", "digits:resnet", "--data", "digits", "--batch", "64", "--save-steps", "10", "--deterministic"]
    job += ["--search-epochs", "8", "--epochs", "6", "--baselines", "--device", "cuda"]
    whole = tmp_path / "unprunable"
    assert command(*job, "--out", str(whole)).wait(timeout=300) == 0
    total = len((whole / "log.jsonl").read_text().splitlines())
    for share in (0.15, 0.4, 0.6, 0.9):  # warm-up, iterative half, and the trainings after it
        run = tmp_path / str(share)
        child = command(*job, "--out", str(run))
        log, end = run / "log.jsonl", time.monotonic() + 300
        while not log.exists() or log.read_bytes().count(b"\n") < share * total:
            assert child.poll() is None and time.monotonic() < end, share
            time.sleep(0.005)
        child.kill()
        assert child.wait() == -signal.SIGKILL
        assert command("--resume", str(run)).wait(timeout=300) == 0
        for name in ("log.jsonl", "model.safetensors", "widths.json", "search.safetensors", "search.json"):
            assert (run / name).read_bytes() == (whole / name).read_bytes(), (share, name)


@pytest.mark.filterwarnings("ignore::dmcp.retraining.TeacherWarning")  # it has learnt nothing
@pytest.mark.parametrize("retrain", ["scratch", "finetune"])
def test_a_teacher_on_the_cpu_teaches_a_network_on_the_gpu(retrain: str) -> None:
    """A copy of it goes where the network is; the teacher itself stays where and as it was."""
    torch.manual_seed(0)
    model = build("digits:resnet").cuda()
    teachers = [build("digits:resnet"), torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))]
    batches = [(torch.randn(16, 1, 8, 8), torch.randint(10, (16,))) for _ in range(2)]
    search = dmcp.SearchConfig(budget="50%", epochs=2, groups=4, lr=0.01, min_lr=0.01)
    train = dmcp.TrainConfig(epochs=1, lr=0.01, warmup_lr=0.01, kd_weight=0.9, kd_temperature=4.0)
    for teacher in teachers:
        before = copy.deepcopy(teacher.state_dict())
        result = dmcp.prune(model, batches, batches, search=search, train=train, retrain=retrain, teacher=teacher)
        assert all(it.is_cuda for it in [*result.model.parameters(), *result.model.buffers()])
        assert all(torch.equal(it, before[name]) for name, it in teacher.state_dict().items())
        assert not any(it.is_cuda for it in teacher.state_dict().values())
        assert all(row.accuracy == row.accuracy for row in result.rows)  # numbers, not NaN


def test_a_wide_network_in_batches_is_faster_where_it_is_narrow_and_its_time_is_forecast() -> None:
    model = resnet18(num_classes=10).cuda()
    # a smaller batch is all kernel starts
    config = dmcp.LatencyConfig(batch=512, dtype="bfloat16", align=8, networks=20)  # type: ignore[arg-type]
    table = dmcp.measure_latency(model, torch.zeros(2, 3, 224, 224), config=config)
    assert table.place == "cuda" and table.device == torch.cuda.get_device_name() and table.batch == 512
    assert table.unpruned_ms > 1.5 * table.networks[1].ms and table.median_error < 0.3
    assert all(it.is_cuda and it.dtype == torch.float32 for it in model.parameters())


@pytest.mark.parametrize("mode", ["captured", "compiled"])
def test_a_deployed_forward_pass_computes_what_the_eager_one_does(mode: str) -> None:
    """And takes no longer. Networks of one class keep their graphs apart."""
    device, channels_last = torch.device("cuda"), torch.channels_last
    x = torch.randn(2, 3, 224, 224, device=device, dtype=torch.bfloat16).to(memory_format=channels_last)
    nets = [resnet18(num_classes=10).eval().to(device, torch.bfloat16, memory_format=channels_last) for _ in range(2)]
    with torch.inference_mode():
        references = [net(x).float() for net in nets]
        eager = [functools.partial(net, x) for net in nets]
        calls = [forward_pass(net, x, LatencyMode(mode), device) for net in nets]
        times = time_in_turns([*eager, *calls], device)
        for call, reference in zip(calls, references, strict=True):
            out = call()
            assert isinstance(out, torch.Tensor)
            assert (out.float() - reference).norm() < 0.03 * reference.norm()
    assert 0.02 < max(times[2:]) < min(times[:2])


def test_networks_are_captured_by_default_and_stay_as_they_were() -> None:
    model = resnet18(num_classes=10).cuda()
    config = dmcp.LatencyConfig(batch=64, dtype="bfloat16", align=32, networks=12)  # type: ignore[arg-type]
    table = dmcp.measure_latency(model, torch.zeros(2, 3, 224, 224), config=config)
    assert (table.mode, table.channels_last) == (LatencyMode.CAPTURED, True)
    assert table.unpruned_ms > table.networks[1].ms
    assert all(it.is_cuda and it.dtype == torch.float32 and it.is_contiguous() for it in model.parameters())


# image files


@pytest.mark.parametrize("share", [0.25, 0.0], ids=["in memory", "streamed"])
def test_image_files_are_those_of_the_cpu(share: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for rounding, and for JPEGs that the GPU decodes; and twice the same, from any batch on."""
    monkeypatch.setattr("dmcp.data.store.SHARE", share)
    for number, path in enumerate(write_photos(tmp_path / "pets", (9, 12), (14, 8), count=40).rglob("*.png")):
        image = Image.open(path).resize((96, 80)).convert(("RGB", "L", "CMYK", "RGB")[number % 4])
        image.save(path if number % 4 == 3 else path.with_suffix(".jpg"))
        (path.unlink if number % 4 < 3 else path.touch)()
    part, (_, std) = load(tmp_path / "pets", size=32).train, mean_and_std("cpu")
    loaders = [make_loader(part, 16, True, 1, device) for device in ("cpu", "cuda")]
    (cpu, gpu), most = (list(batches_from(loader, 1)) for loader in loaders), 4 if share else 60
    for (x, labels), (y, others) in zip(cpu, gpu, strict=True):
        levels = ((x - y.cpu()) * std).abs()
        assert y.is_cuda and labels.equal(others.cpu()) and levels.max() < most and levels.mean() < 4
    again = batches_from(make_loader(part, 16, True, 1, "cuda"), 1, 2)
    assert all(torch.equal(x, y) for (x, _), (y, _) in zip(again, gpu[2:], strict=True))
