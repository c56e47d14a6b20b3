"""Latency: tables forecast networks they have not seen, budgets hold, and what was chosen is measured again."""

from __future__ import annotations

import csv
import functools
import importlib.util
import json
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from commands import ONNX_PACKAGES, Capture, needs_onnx, run
from nets import Residual, holds, sample
from short_runs import SEARCH, TRAIN, Noise
from torch import Tensor, nn

import dmcp
from dmcp import pruning
from dmcp.budgets import Budget, Limit
from dmcp.errors import BudgetError, DmcpError, FileError, WidthsError
from dmcp.exporting import latency as tables
from dmcp.exporting.latency import Latency, fit, measure_latency, sample_widths
from dmcp.exporting.latency_limit import choose_within_latency, timer_like
from dmcp.exporting.timing import Timer, device_name, forward_pass
from dmcp.markov import marginals, sample_groups
from dmcp.models import build
from dmcp.report.html import make_page
from dmcp.runs.reading import read_run
from dmcp.runtime.io import record_hash
from dmcp.searching.budget import cheapest_between, check_reachable, costs, parse_budget
from dmcp.searching.records import SearchResult
from dmcp.searching.sampling import expected
from dmcp.settings import LatencyConfig, LatencyMode, RuntimeKind
from dmcp.tracing.cost import Step
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.widths import ChannelSpace
from dmcp.within import with_reachable_start

pytestmark = pytest.mark.usefixtures("quick_commands")

X = sample(Residual.SHAPE).float()
DIGITS = torch.zeros(1, 1, 8, 8)


class Device:
    """A make-believe device: a price per multiply-add and number written, noise, and calls that take 3 times as long.

    scale: of a network's time, by its number of parameters.
    """

    def __init__(self, noise: float = 0.0, slow: Callable[[int], bool] = lambda call: False) -> None:
        self.noise, self.slow = noise, slow
        self.scale: Callable[[int], float] = lambda params: 1.0
        self.random = torch.Generator().manual_seed(1)
        self.calls = 0

    def __call__(self, net: nn.Module) -> float:
        assert not net.training
        ms = true_ms(net) * self.scale(sum(it.numel() for it in net.parameters()))
        ms *= 1 + self.noise * float(torch.randn((), generator=self.random))
        self.calls += 1
        return ms * (3.0 if self.slow(self.calls - 1) else 1.0)


@torch.no_grad()
def true_ms(net: nn.Module) -> float:
    ms = 0.5

    def count(module: Any, args: tuple[Tensor, ...], out: Tensor) -> None:
        nonlocal ms
        pixels = out[0, 0].numel() if out.ndim == 4 else 1
        ms += 1e-5 * module.weight.numel() * pixels * (1 + 3 / pixels) + 1e-4 * out[0].numel()

    layers = [part for part in net.modules() if isinstance(part, nn.Conv2d | nn.Linear)]
    hooks = [part.register_forward_hook(count) for part in layers]
    net(X[:1] if layers[0].weight.shape[1] == 3 else DIGITS)
    for hook in hooks:
        hook.remove()
    return ms


@functools.cache
def traced() -> tuple[nn.Module, ChannelGraph]:
    torch.manual_seed(0)
    model = Residual(**Residual.FULL).eval()
    return model, dmcp.trace(model, X)


def measured(device: Callable[[nn.Module], float], **config: Any) -> Latency:
    model, graph = traced()
    return measure_latency(model, X, graph, LatencyConfig(**config), measure=device)


@functools.cache
def table() -> Latency:
    return measured(Device())


def with_latency() -> ChannelGraph:
    return table().attach(traced()[1])


@functools.cache
def unseen() -> tuple[tuple[dmcp.Widths, float], ...]:
    """Widths that no table was made of, and their times."""
    model, graph = traced()
    rows = map(graph.widths, sample_widths(graph, LatencyConfig(networks=30, seed=9)))
    return tuple((widths, true_ms(dmcp.cut(model, graph, widths))) for widths in rows)


def errors(found: Latency) -> list[float]:
    return [abs(found.latency_ms(widths) / ms - 1) for widths, ms in unseen()]


# the fit


def test_a_device_is_forecast_exactly_or_to_its_noise() -> None:
    assert table().largest_error < 1e-3 and max(errors(table())) < 2e-3
    noisy = measured(Device(noise=0.05))
    assert noisy.median_error < 0.1 and float(np.median(errors(noisy))) < 0.05
    assert min(*table().terms.values(), *noisy.terms.values()) >= 0


@pytest.mark.parametrize("calls", [{1}, {7, 10, 12}], ids=str)
def test_an_outlier_does_not_bend_the_table(calls: set[int]) -> None:
    """But it is in the stated error, where it was held out: that is of all that was measured."""
    found = measured(Device(slow=calls.__contains__))
    assert max(errors(found)) < 2e-3 and found.networks[10].held_out
    assert found.largest_error == pytest.approx(2 / 3 if 10 in calls else 0, abs=1e-2)


def test_the_unpruned_network_is_forecast_as_measured() -> None:
    """Not by one factor for all networks, which would be 0.15."""
    device = Device()
    device.scale = lambda params: 1.15 if params == WHOLE else 1.0
    found = measured(device)
    assert found.latency_ms(traced()[1].full) == pytest.approx(found.unpruned_ms, rel=1e-6)
    assert float(np.median(errors(found))) < 0.05
    assert dmcp.uniform(found.attach(traced()[1]), "latency:95%") != traced()[1].full


@pytest.mark.parametrize("wrong", [{"networks": 3}, {"min_channels": {"nothing": 2}}, {"align": 1000}], ids=str)
def test_wrong_settings_and_times_are_refused(wrong: dict[str, Any]) -> None:
    device = Device()
    with pytest.raises((BudgetError, WidthsError)):
        measured(device, **wrong)
    assert not device.calls
    with pytest.raises(BudgetError):
        measured(lambda net: float("nan"))


# steps


def staircase_ms(net: Any, block: int, penalty: float) -> float:
    """A clock that counts MACs of widths rounded up to whole blocks, or slow MACs for inputs that are no whole blocks.

    penalty: 0 rounds up.
    """
    layers = [module for module in net.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    ms = 0.5

    def count(module: Any, args: tuple[Tensor, ...], out: Tensor) -> None:
        nonlocal ms
        written, read = module.weight.shape[:2]
        pixels = out[0, 0].numel() if out.ndim == 4 else 1
        price = 1e-5 * pixels * module.weight[0, 0].numel()
        if penalty:
            odd = read % block > 0 if module is not net.stem else written % block > 0
            ms += price * written * read * (penalty if odd else 1)
            return
        if module is not net.stem:
            read = -(-read // block) * block
        if module is not net.head:
            written = -(-written // block) * block
        ms += price * written * read

    hooks = [layer.register_forward_hook(count) for layer in layers]
    with torch.no_grad():
        net(X[:1])
    for hook in hooks:
        hook.remove()
    return ms


@pytest.mark.parametrize(("block", "penalty"), [(4, 0.0), (4, 4.0)])
def test_the_steps_of_a_device_are_found_and_forecast(block: int, penalty: float) -> None:
    def clock(net: nn.Module) -> float:
        return staircase_ms(net, block, penalty)

    model, graph = traced()
    found = measured(clock, align=1)
    assert found.steps[0] == Step(block, padded=not penalty)
    graph = found.attach(graph)
    forecasts = [found.latency_ms(widths) / clock(dmcp.cut(model, graph, widths)) for widths, _ in unseen()]
    assert max(abs(share - 1) for share in forecasts) < 0.01
    smooth = fit(graph, [list(it.widths) for it in found.networks], [it.ms for it in found.networks], blocks=())
    errors = [abs(smooth.ms(it.widths) / it.ms - 1) for it in found.networks]
    assert max(errors) > 0.05  # a polynomial of the widths cannot do that
    assert Latency.from_json(json.loads(json.dumps(found.to_json()))) == found

    net = dmcp.Supernet(model, graph, 4)
    alphas = torch.linspace(-1, 2, net.sizes[:, 1:].numel(), dtype=torch.float64).reshape(net.sizes[:, 1:].shape)
    mean = graph.expected_cost("latency", marginals(alphas), net.sizes).item()
    sampled = sample_groups(alphas, net.sizes, 40_000, torch.Generator().manual_seed(0))
    assert graph.cost("latency", sampled).double().mean().item() == pytest.approx(mean, rel=5e-3)
    assert holds(parse_budget("latency:70%", graph), graph, dmcp.uniform(graph, "latency:70%"))


def test_a_budget_is_refused_only_if_no_widths_meet_it() -> None:
    """Where a device is slow at widths that are no multiples of 4, widths of 4 are faster than the smallest ones."""
    _, graph = traced()
    clock = functools.partial(staircase_ms, block=4, penalty=4.0)
    graph = measured(clock, align=1).attach(graph)
    low, high = graph.widths([3] * len(graph.spaces)), graph.full
    everything = torch.cartesian_prod(*[torch.arange(3, space.size + 1) for space in graph.spaces])
    times = graph.cost("latency", everything)
    fastest = int(times.min())
    assert fastest < graph.cost("latency", low)

    reachable = Budget((Limit("latency", fastest),), "the fastest")
    check_reachable(reachable, graph, low, high, 1)
    assert graph.cost("latency", dmcp.uniform(graph, reachable, low, 1)) == fastest
    assert graph.cost("latency", cheapest_between(reachable, graph, low, high, 1)) == fastest
    search = dmcp.SearchConfig(budget=reachable, align=1)
    assert with_reachable_start(search, graph, (low, high)) == search
    assert with_reachable_start(replace(search, align=3), graph, (low, high)) != search
    out_of_reach = Budget((Limit("latency", fastest - 1),), "faster")
    for refused in (
        lambda: check_reachable(out_of_reach, graph, low, high, 1),
        lambda: dmcp.uniform(graph, out_of_reach, low, 1),
        lambda: check_reachable(reachable, graph, low, high, 3),  # no multiple of 4 but the full 8, which is slower
        lambda: dmcp.uniform(graph, Budget((*reachable.limits, Limit("macs", graph.macs(low))), "both"), low, 1),
    ):
        with pytest.raises(BudgetError):
            refused()

    both = Budget((Limit("latency", round(1.05 * fastest)), Limit("macs", graph.macs() // 2)), "both")
    assert holds(both, graph, dmcp.uniform(graph, both, low, 1))


def test_prune_meets_a_budget_below_the_time_of_the_smallest_widths() -> None:
    model, graph = traced()
    clock = functools.partial(staircase_ms, block=4, penalty=4.0)
    table = measured(clock, align=1)
    smallest = table.latency_ms(graph.widths([3] * len(graph.spaces)))
    search = replace(SEARCH, budget=f"{0.95 * smallest}ms", min_channels=3, align=1)
    result = dmcp.prune(model, Noise(), Noise(1), search=search, retrain="none", latency=clock, teacher=None)
    assert clock(result.model) <= 0.95 * smallest


# widths that the device likes


def test_widths_are_multiples_that_the_device_likes() -> None:
    """In spaces, chains and baselines alike, unless the user says otherwise."""
    model, graph = traced()
    slow = measured(lambda net: staircase_ms(net, 4, 4.0), align=1)
    graph = slow.attach(graph)
    assert slow.block == 4 and slow.multiples and slow.multiples in slow.summary
    steps = {space.name: space.step(None) for space in graph.spaces}
    assert steps == {"stem": 4, "conv1": 2, "conv3": 4, "conv4": 4}  # 8, 6, 9 and 11 channels: at least two widths
    ends = dmcp.Supernet(model, graph, 4).sizes.cumsum(1).T.tolist()
    for widths in (*ends, dmcp.uniform(graph, "latency:70%").values()):
        for space, width in zip(graph.spaces, widths, strict=True):
            assert width % steps[space.name] == 0 or width == space.size
    assert {space.step(1) for space in graph.spaces} == {1}
    rounding = measured(lambda net: staircase_ms(net, 4, 0.0), align=1)
    assert rounding.block == 1 and not rounding.multiples and not table().multiples  # as fast as the next multiple


def test_multiples_leave_room_for_small_budgets() -> None:
    """A device that is only a little slower at other widths: small budgets need widths of less than its block."""
    graph = traced()[1]
    slow = measured(functools.partial(staircase_ms, block=4, penalty=1.5), align=1)
    attached = slow.attach(graph)
    smallest = graph.widths([min(space.size, space.step(None)) for space in attached.spaces])
    smallest_in_fours = graph.widths([3 if space.size == 6 else 4 for space in graph.spaces])
    assert slow.block == 2
    unpruned_ms = slow.latency_ms(graph.full)
    assert slow.latency_ms(smallest) < slow.latency_ms(smallest_in_fours) - 0.05 * unpruned_ms
    check_reachable(parse_budget("latency:36%", attached), attached, smallest)


@pytest.mark.parametrize(("writers", "expected_steps"), [(1, [32, 16, 8, 1]), (2, [64, 16, 8, 1])])
def test_widths_for_a_gpu_have_the_usual_multiples(writers: int, expected_steps: list[int]) -> None:
    """Of 32 inside and of 64 in streams; but each space keeps at least eight widths."""
    on_gpu = replace(table(), place="cuda", device="a GPU")
    steps = []
    for size in (512, 128, 64, 8):
        space = ChannelSpace("a", size, tuple("ab"[:writers]))
        steps.append(replace(space, multiple=on_gpu.multiple_of(space), block=on_gpu.block).step(None))
    assert steps == expected_steps and "32 or 64" in on_gpu.summary


# costs and budgets


def test_latency_counts_like_other_costs() -> None:
    graph, rows = with_latency(), torch.tensor([list(widths.values()) for widths, _ in unseen()])
    assert graph.cost("latency", rows).tolist() == [graph.cost("latency", graph.widths(row)) for row in rows]
    assert "latency" not in costs(traced()[1], graph.full) and "latency" in costs(graph, graph.full)
    with pytest.raises(BudgetError):
        traced()[1].cost("latency")
    net = dmcp.Supernet(traced()[0], graph, 4)
    alphas = torch.linspace(-1, 2, net.sizes[:, 1:].numel(), dtype=torch.float64).reshape(net.sizes[:, 1:].shape)
    mean = graph.expected_cost("latency", marginals(alphas), net.sizes).item()
    sampled = sample_groups(alphas, net.sizes, 40_000, torch.Generator().manual_seed(0))
    assert graph.cost("latency", sampled).double().mean().item() == pytest.approx(mean, rel=5e-3)
    budget = parse_budget("latency:60%,50%", graph)
    small = graph.widths([max(1, space.size // 3) for space in graph.spaces])
    assert holds(budget, graph, small) and not holds(budget, graph, graph.full)
    for widths in (dmcp.uniform(graph, budget), dmcp.random_widths(graph, budget, torch.Generator().manual_seed(0))):
        assert holds(budget, graph, widths)


def test_what_is_no_time_or_out_of_reach_is_refused() -> None:
    graph, device = with_latency(), Device()
    for text in ("1us", "9s"):
        with pytest.raises(BudgetError):
            check_reachable(parse_budget(text, graph), graph, graph.widths([1] * len(graph.spaces)))
    with pytest.raises(BudgetError):  # before anything is measured
        prune(budget="latency:8", latency=device)
    assert not device.calls


# files


def test_a_table_is_the_same_after_a_file_and_others_are_refused(tmp_path: Path) -> None:
    onnx = replace(table(), runtime=RuntimeKind.ONNX, place="cpu", device="a CPU")
    assert "onnxruntime on a CPU" in onnx.how and onnx.how in onnx.summary
    for found in (table(), onnx):
        found.save(tmp_path / "a" / "table.json")
        assert Latency.load(tmp_path / "a" / "table.json") == found
    whole = json.loads(json.dumps(table().to_json()))
    for change in ({"terms": [5]}, {"runtime": "abacus"}, {"more": 1}, {"format": "else"}):
        (tmp_path / "table.json").write_text(json.dumps(whole | change | {"digest": record_hash(whole | change)}))
        with pytest.raises(FileError):
            Latency.load(tmp_path / "table.json")


def test_a_damaged_number_in_a_table_is_noticed(tmp_path: Path) -> None:
    whole = json.loads(json.dumps(table().to_json()))
    whole["terms"][0][1] += 1
    (tmp_path / "table.json").write_text(json.dumps(whole))
    with pytest.raises(FileError, match="damaged, or changed"):
        Latency.load(tmp_path / "table.json")
    older = {key: value for key, value in whole.items() if key != "digest"} | {"format": "torch-dmcp latency 3"}
    (tmp_path / "table.json").write_text(json.dumps(older))
    with pytest.raises(FileError):
        Latency.load(tmp_path / "table.json")


# choosing


WHOLE = sum(it.numel() for it in traced()[0].parameters())


def chosen(scale: Callable[[int], float], text: str = "latency:60%") -> tuple[Any, Any]:
    """What is chosen where cut networks take so many times their forecast."""
    graph, device = with_latency(), Device()
    sizes, alphas = dmcp.Supernet(traced()[0], graph, 4).sizes, torch.full((len(graph.spaces), 3), 0.5)
    found = SearchResult(alphas, sizes, graph, parse_budget(text, graph), 0.95)
    device.scale = lambda params: 1.0 if params == WHOLE else scale(params)

    def pick(budget: dmcp.Budget) -> tuple[int, dmcp.Widths, nn.Module]:
        widths = expected(replace(found, budget=budget))
        return sum(widths.values()), widths, dmcp.cut(traced()[0], graph, widths)

    low, timer = graph.widths(sizes[:, 0].tolist()), timer_like(table(), None, device)
    lowest, highest = graph.cost("latency", low), graph.cost("latency")
    width, outcome = choose_within_latency(
        pick, found.budget, graph, lowest=lowest, highest=highest, model=traced()[0], timer=timer
    )
    return outcome, width - sum(expected(found).values())


@pytest.mark.parametrize(("scale", "used"), [(0.8, 0.93), (0.9, 0.93), (0.5, 0.7)])
def test_a_network_faster_than_its_forecast_is_chosen_wider(scale: float, used: float) -> None:
    """Never above the limit as measured. At half the forecast the next choice is the unpruned network: too slow."""
    outcome, wider = chosen(lambda params: scale)
    assert outcome.held and not outcome.warning and wider > 0 and 1 <= outcome.again <= 3
    assert outcome.measured_ms >= used * outcome.asked_ms


def test_a_wider_network_that_is_too_slow_is_not_taken() -> None:
    """Faster than asked up to some number of parameters, and much slower beyond."""
    first, _ = chosen(lambda params: 1.0)
    assert first.again == 0
    params: list[int] = []

    def jump(count: int) -> float:
        params.append(count)
        return 0.9 if count <= params[0] else 1.5

    outcome, wider = chosen(jump)
    assert outcome.held and wider == 0 and outcome.again == 0 and max(params) > params[0]
    assert outcome.measured_ms == pytest.approx(0.9 * outcome.predicted_ms, rel=5e-3)


@pytest.mark.parametrize(("scale", "text"), [(1, "latency:60%"), (0.9, "latency:90%,params:30%"), (1.1, "latency:60%")])
def test_a_network_slower_than_its_forecast_is_chosen_again(scale: float, text: str) -> None:
    outcome, wider = chosen(lambda params: scale, text)
    assert outcome.held and not outcome.warning and (wider < 0) == bool(outcome.again) == (scale > 1)
    assert outcome.again <= 3 and outcome.measured_ms == pytest.approx(scale * outcome.predicted_ms, rel=5e-3)


# this machine


def test_this_machine_is_measured() -> None:
    model, graph = traced()
    found = measure_latency(model, X, graph, LatencyConfig(networks=12, batch=3))
    assert (found.place, found.device, found.batch) == ("cpu", device_name("cpu"), 3)
    assert found.unpruned_ms > 0 and sum(it.held_out for it in found.networks) == 2
    assert timer_like(found, X) is not None
    with pytest.raises(DmcpError, match="meta"):
        measure_latency(model, X, graph, LatencyConfig(device="meta"))


@pytest.mark.parametrize(
    "more",
    [{"mode": "captured"}, {"mode": "eager", "channels_last": True, "runtime": "onnx"}, {"mode": "fast"}],
    ids=str,
)
def test_a_mode_that_the_device_or_the_runtime_lacks_is_refused_first(more: Any) -> None:
    model, graph = traced()
    with pytest.raises(DmcpError, match=r"CUDA|onnxruntime|one of"):
        measure_latency(model, X, graph, LatencyConfig(device="cpu", **more))


def test_a_table_says_how_networks_ran_and_they_are_timed_so_again() -> None:
    model, graph = traced()
    found = measure_latency(model, X, graph, LatencyConfig(networks=12, channels_last=True))
    assert found.mode is LatencyMode.EAGER and found.how.endswith("channels last)")
    compiled = replace(found, mode=LatencyMode.COMPILED)
    assert compiled.how.endswith("channels last, compiled)") and Latency.from_json(compiled.to_json()) == compiled
    timer = timer_like(compiled, X)
    assert timer is not None and timer.config.channels_last and timer.config.mode is LatencyMode.COMPILED


def test_a_network_is_timed_in_the_memory_format_of_the_settings() -> None:
    formats: list[bool] = []

    class Noting(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            formats.append(all(it.is_contiguous(memory_format=torch.channels_last) for it in (x, self.weight)))
            return super().forward(x)

    for channels_last in (True, False):
        config = LatencyConfig(device="cpu", mode=LatencyMode.EAGER, channels_last=channels_last)
        Timer(config=config, threads=1, example=torch.zeros(1, 3, 9, 9)).times([Noting(3, 4, 3)])
        assert set(formats) == {channels_last}
        formats.clear()


@pytest.mark.slow
def test_compiled_networks_compute_the_same_and_none_of_many_runs_eagerly() -> None:
    nets, x = [nn.Linear(width, 2).eval() for width in range(1, 12)], torch.randn(3, 1)
    compiled = torch._dynamo.utils.counters["stats"]
    with torch.inference_mode():
        for net in nets:
            before, x = compiled["unique_graphs"], torch.randn(3, net.in_features)
            call = forward_pass(net, x, LatencyMode.COMPILED, torch.device("cpu"))
            assert compiled["unique_graphs"] == before + 1
            torch.testing.assert_close(call(), nn.functional.linear(x, net.weight, net.bias))


# onnxruntime


@pytest.mark.parametrize("more", [{"device": "cuda"}, {"dtype": "bfloat16"}, {}], ids=str)
def test_what_onnxruntime_cannot_measure_is_refused_first(more: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *of: None if name in ONNX_PACKAGES else find(name, *of)
    )
    monkeypatch.setattr(tables, "trace", lambda *_: pytest.fail("it began"))
    with pytest.raises(DmcpError, match="measure"):
        measure_latency(traced()[0], X, config=LatencyConfig(runtime=RuntimeKind.ONNX, **more))
    here = replace(table(), place="cpu", device=device_name("cpu"))
    assert timer_like(here, X) is not None and timer_like(replace(here, runtime=RuntimeKind.ONNX), X) is None


@needs_onnx
def test_this_machine_is_measured_in_onnxruntime() -> None:
    config = LatencyConfig(networks=12, batch=3, runtime=RuntimeKind.ONNX)
    found = measure_latency(build("digits:resnet").eval(), DIGITS, config=config)
    assert found.how.startswith(f"in onnxruntime on {device_name('cpu')} (batch 3")
    timer = timer_like(found, DIGITS)
    assert timer is not None and timer.config.runtime == RuntimeKind.ONNX
    wide, again = timer.times(build("digits:resnet", width=width).eval() for width in (64, 16))
    assert wide > 2 * again and 0.2 < again / found.unpruned_ms < 5  # a busy machine


# devices that Python cannot reach


@needs_onnx
def test_networks_are_written_as_files_and_their_times_make_the_same_table(tmp_path: Path, capsys: Capture) -> None:
    """The files are what the clock would have got: their outputs and their widths, in order."""
    model, graph = traced()
    config = LatencyConfig(networks=12)
    path = dmcp.write_networks(model, X, tmp_path / "phone", graph, config)
    rows = sample_widths(graph, config)
    nets = [dmcp.cut(model, graph, graph.widths(row)) for row in rows]
    lines = list(csv.reader(path.read_text().splitlines()))
    assert lines[0] == ["network", "widths", "ms"] and len(lines) == 13
    for (name, _, _), net in zip(lines[1:], nets, strict=True):
        session = onnxruntime_session(tmp_path / "phone" / name)
        (output,) = session.run(None, {session.get_inputs()[0].name: X[:1].numpy()})
        np.testing.assert_allclose(output, net.eval()(X[:1]).detach().numpy(), atol=1e-5)
    with pytest.raises(FileError, match=r"times\.csv"):  # nothing is timed yet
        dmcp.read_latency(path, model, X, graph, config)
    with pytest.raises(FileError, match="exists"):
        dmcp.write_networks(model, X, tmp_path / "phone", graph, config)

    filled = [lines[0]] + [[*line[:2], str(true_ms(net))] for line, net in zip(lines[1:], nets, strict=True)]
    found = write_times(path, filled, config)
    known = measured(Device(), networks=12)
    assert (found.terms, found.networks) == (known.terms, known.networks) and "times" in found.how
    assert timer_like(found, X) is None
    for wrong in (
        filled[:-1],
        [*filled, filled[-1]],
        [*filled, ["net-999.onnx", *filled[1][1:]]],
        [filled[0], [*filled[2][:1], *filled[1][1:]], *filled[2:]],
        [*filled[:-1], [*filled[-1][:2], "fast"]],
        [*filled[:-1], [*filled[-1][:2], "-3"]],
        [*filled[:-1], filled[-1][:2]],
        filled[1:],
        [],
    ):
        with pytest.raises(FileError, match=r"times\.csv"):
            write_times(path, wrong, config)
    with pytest.raises(FileError, match=r"widths"):
        write_times(path, filled, replace(config, seed=1))


def onnxruntime_session(path: Path) -> Any:
    onnxruntime = pytest.importorskip("onnxruntime")
    return onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def write_times(path: Path, lines: list[list[str]], config: LatencyConfig) -> Latency:
    path.write_text("\n".join(",".join(line) for line in lines))
    model, graph = traced()
    return dmcp.read_latency(path, model, X, graph, config)


@needs_onnx
def test_a_command_writes_networks_and_reads_their_times(
    capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["latency", "--model", "digits:resnet", "--device", "cpu", "--networks", "12"]
    assert run(capsys, *options, "--write", "phone", "--out", "table.json")[0] == 2
    code, out, err = run(capsys, *options, "--write", "phone")
    assert code == 0 and "phone/times.csv" in out, err
    lines = Path("phone/times.csv").read_text().splitlines()
    sizes = [Path("phone", line.split(",")[0]).stat().st_size for line in lines[1:]]
    timed = [line + str(size / 1e6) for line, size in zip(lines[1:], sizes, strict=True)]
    Path("phone/times.csv").write_text("\n".join([lines[0], *timed]))
    code, out, err = run(capsys, *options, "--read", "phone/times.csv", "--out", "phone.json")
    assert code == 0 and "held-out" in out, err
    assert Latency.load("phone.json").unpruned_ms == pytest.approx(sizes[0] / 1e6)
    code, _, err = run(capsys, *options[:-1], "13", "--read", "phone/times.csv")
    assert code == 2 and err.count("\n") == 1
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        code, out, err = run(capsys, *PRUNE, "--latency", "phone.json", "--budget", "latency:70%", "--out", "run")
    assert code == 0 and "by phone/times.csv" in out and "only a prediction" in err, err


# prune


def prune(**options: Any) -> dmcp.PruneResult:
    model, graph = traced()
    search = replace(SEARCH, budget=options.pop("budget"))
    return dmcp.prune(model, Noise(), Noise(1), search=search, train=TRAIN, **{"graph": graph} | options)


def test_prune_measures_by_itself_and_ends_within_the_time() -> None:
    device, whole, events = Device(noise=0.01), true_ms(traced()[0]), list[Any]()
    runtime = dmcp.Runtime(on_event=events.append)
    result = prune(budget=f"{0.6 * whole:.6f}ms", latency=device, baselines=True, runtime=runtime)
    outcome, found = result.latency, Latency.of(result.graph)
    assert outcome is not None and found is not None and outcome.held
    choices = (device.calls - 40) / 2  # each beside the unpruned network; the uniform one is measured, too
    assert 2 + outcome.again <= choices <= 8
    assert true_ms(result.model.eval()) <= 0.6 * whole * 1.02
    assert outcome.asked_ms == pytest.approx(0.6 * whole, rel=1e-5) and outcome.text in result.table
    assert outcome.predicted_ms == pytest.approx(found.latency_ms(result.widths))
    assert (events[0].stage, events[0].steps, events[0].record) == ("latency", 40, found)


def test_uniform_widths_are_measured_and_chosen_again_like_searched_ones() -> None:
    device = Device()
    device.scale = lambda params: 1.0 if params == WHOLE else 1.3
    result = prune(budget="latency:60%", graph=with_latency(), latency=device, baselines=["uniform"])
    (macs,) = [row.macs for row in result.rows if row.name == "uniform"]
    graph = result.graph
    least, most = (graph.macs(dmcp.uniform(graph, f"latency:{60 / scale}%")) for scale in (1.4, 1.2))
    assert least <= macs <= most


def test_prune_takes_a_table_or_a_graph_that_has_one() -> None:
    device, events = Device(), list[Any]()
    runtime = dmcp.Runtime(on_event=events.append)
    result = prune(budget="latency:60%,params:80%", graph=with_latency(), latency=device, runtime=runtime)
    assert device.calls == 2 and result.latency is not None and result.latency.held
    assert "latency" not in {it.stage for it in events}
    with pytest.warns(UserWarning, match="only a prediction"):
        result = prune(budget="latency:60%", latency=replace(table(), place="cpu", device="a toaster"))
    assert result.latency is not None and "not measured" in result.latency.text
    device.scale = lambda params: 1.0 if params == WHOLE else 3.0
    with pytest.warns(UserWarning, match="more than the"):
        assert prune(budget="latency:60%", graph=with_latency(), latency=device).latency.again


@pytest.mark.parametrize(("method", "retrain"), [("uniform", "none"), ("l2", "finetune")])
def test_what_a_method_chooses_is_measured_too(method: str, retrain: str) -> None:
    device = Device()
    device.scale = lambda params: 1.0 if params == WHOLE else 1.1
    result = prune(budget="latency:60%", graph=with_latency(), latency=device, method=method, retrain=retrain)
    outcome = result.latency
    assert outcome is not None and outcome.held and outcome.again and outcome.text in result.table
    assert device(result.model.eval()) == pytest.approx(outcome.measured_ms)
    assert holds(result.budget, result.graph, result.widths)


# the command line

PRUNE = ["prune", "--model", "digits:resnet", "--data", "digits", "--batch", "708", "--device", "cpu", "--quiet"]
PRUNE += ["--search-epochs", "2", "--epochs", "1"]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Device:
    """This machine is the make-believe device."""
    device = Device()
    monkeypatch.setattr(Timer, "times", lambda self, nets: [device(net.eval()) for net in nets])
    return device


def test_a_run_measures_keeps_its_table_and_reports(
    capsys: Capture, tmp_path: Path, fake: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped and resumed, it ends with the same files, and measures nothing again."""
    straight, stopped = tmp_path / "straight", tmp_path / "stopped"
    options = [*PRUNE, "--budget", "latency:60%", "--save-steps", "1", "--json", "--out"]
    code, out, err = run(capsys, *options, str(straight))
    assert code == 0 and fake.calls == 42 and "40 networks" in err, err
    facts = json.loads(out)
    outcome = facts["latency"]
    assert outcome["measured_ms"] <= outcome["asked_ms"] and facts["latency_share"] <= 0.6
    assert facts["latency_ms"] == pytest.approx(outcome["predicted_ms"])
    assert "asked" in (straight / "report.md").read_text() and "predicted" in make_page([read_run(straight)])
    code, out, _ = run(capsys, "sample", str(straight), "--budget", "latency:50%", "--json")
    assert code == 0 and json.loads(out)[0]["latency_share"] <= 0.5

    with monkeypatch.context() as patch:
        patch.setattr(pruning, "train_all", Mock(side_effect=dmcp.StoppedError("Stopped.")))
        assert run(capsys, *options, str(stopped))[0] == 3
    fake.calls = 0
    assert run(capsys, "prune", "--resume", str(stopped), "--quiet")[0] == 0 and not fake.calls
    for name in ("model.safetensors", "widths.json", "outcome.json"):
        assert (stopped / name).read_bytes() == (straight / name).read_bytes()


def test_a_table_is_made_by_a_command_and_given_to_another(
    capsys: Capture, tmp_path: Path, fake: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ["latency", "--model", "digits:resnet", "--device", "cpu", "--networks", "20"]
    code, out, err = run(capsys, *options, "--out", "table.json")
    assert code == 0 and "unpruned" in out and "3 held-out networks" in out and "(median)" in out, err
    found = Latency.load("table.json")
    assert Latency.from_json(json.loads(run(capsys, *options, "--json")[1])).spaces == found.spaces
    assert found.unpruned_ms == pytest.approx(true_ms(build("digits:resnet").eval()))
    fake.calls, given = 0, ["--latency", "table.json"]
    for wrong in (
        [*options, "--out", str(tmp_path)],
        [*PRUNE, *given, "--budget", "8ms", "--ignore", "layer1"],
        [*PRUNE, "--budget", "8ms", "--latency-device", "cuda", "--latency-runtime", "onnx"],
    ):
        code, out, err = run(capsys, *wrong)
        assert (code, out) == (2, "") and err.count("\n") <= 2, err
    assert [it.name for it in tmp_path.iterdir()] == ["table.json"] and not fake.calls
    budget = ["--budget", "latency:60%,params:70%", "--out", "run"]
    code, out, err = run(capsys, "search", *PRUNE[1:-2], *given, *budget)
    assert code == 0 and fake.calls == 2 and "asked" in out and Latency.load("run/latency.json") == found, err
    replace(found, place="cuda").save("gpu.json")
    code, out, err = run(capsys, *PRUNE, "--latency", "gpu.json", "--budget", "latency:60%", "--dry-run")
    assert code == 0 and "--align" in out and "multiples of 32 or 64" in out, err
    fake.slow = lambda call: call % 5 == 2  # all that are held out
    assert "the machine was busy" in run(capsys, *options)[1]


@pytest.mark.slow
def test_several_seeds_share_one_table(capsys: Capture, tmp_path: Path) -> None:
    folder = tmp_path / "seeds"
    options = [*PRUNE, "--budget", "latency:95%", "--seeds", "2", "--out", str(folder), "--json"]
    code, out, err = run(capsys, *options)
    assert code == 0, err
    shared = Latency.load(folder / "latency.json")
    assert all(Latency.load(folder / f"seed-{seed}" / "latency.json") == shared for seed in (0, 1))
    assert json.loads(out)["runs"] == ["seed-0", "seed-1"]
