"""Methods that rank channels (l1, slimming, sfp, fpgm): planted channels go, budgets hold, nothing else is touched."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import Residual
from planted import SIGNS, Batches, Planted, as_problem, planted_batches, planted_problem, tiny_problem
from torch import Tensor, nn
from torchvision.models import densenet121, mobilenet_v2, resnet18

import dmcp
from dmcp.checkpoint import Checkpointer
from dmcp.compare import magnitude
from dmcp.compare import magnitude as magnitude_module
from dmcp.compare import magnitude as sfp
from dmcp.compare import magnitude as slimming
from dmcp.compare.problem import Choice, Problem
from dmcp.errors import StoppedError, TrainingError
from dmcp.training import evaluate

WEAK = [1, 4, 6]  # channels that are planted to go


def by_l1(problem: Problem) -> Choice:
    return magnitude_module.find_l1(problem, magnitude_module.L1Config(), problem.model.state_dict())


def by_slimming(problem: Problem) -> Choice:
    config = slimming.SlimmingConfig(sparsity=0.01)
    return slimming.find_slimming(problem, config, slimming.prepare(problem, config).state)


def by_sfp(problem: Problem) -> Choice:
    return sfp.find_sfp(problem, sfp.SoftConfig())


def by_fpgm(problem: Problem) -> Choice:
    return magnitude.find_fpgm(problem, sfp.SoftConfig())


METHODS: list[Callable[[Problem], Choice]] = [by_l1, by_slimming, by_sfp, by_fpgm]


def tensors(model: nn.Module) -> list[Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(one), tensors(other), strict=True))


# -- planted truths


@torch.no_grad()
def weak_problem(filters: Callable[[Tensor], Tensor], **changes: Any) -> tuple[Problem, dict[str, Tensor]]:
    """The planted task; filters of WEAK channels are what the function makes of all, and no gradient reaches them."""
    problem = planted_problem(budget="65%", epochs=2, **changes)
    trained = copy.deepcopy(problem.model)
    for name in ("needed", "useless"):
        weight = trained.get_parameter(f"{name}.weight")
        weight[WEAK] = filters(weight)
        trained.get_parameter(f"{name}_norm.bias")[WEAK] = -10  # behind a relu: never anything but zero
    return problem, trained.state_dict()


def assert_weak_go(problem: Problem, choice: Choice) -> None:
    choice.check(problem)
    for name, width in choice.widths.items():
        assert width == SIGNS - len(WEAK)
        assert list(choice.kept[name]) == [i for i in range(SIGNS) if i not in WEAK]


def test_l1_drops_small_filters() -> None:
    problem, state = weak_problem(lambda weight: 0.01 * weight[WEAK])
    assert_weak_go(problem, magnitude_module.find_l1(problem, magnitude_module.L1Config(), state))
    assert_weak_go(problem, magnitude_module.find_l1(problem, magnitude_module.L1Config(power=2), state))


def test_the_two_norms_rank_differently() -> None:
    """One large weight has the larger L2 norm, many middling ones have the larger L1 norm."""

    def spread(weight: Tensor) -> Tensor:
        weight[:] = torch.eye(SIGNS)[..., None, None]
        return torch.full_like(weight[WEAK], 1.5 / SIGNS)

    problem, state = weak_problem(spread)
    assert_weak_go(problem, magnitude_module.find_l1(problem, magnitude_module.L1Config(power=2), state))
    assert set(WEAK) <= set(magnitude_module.find_l1(problem, magnitude_module.L1Config(), state).kept["needed"])


def test_sfp_drops_small_filters() -> None:
    problem, state = weak_problem(lambda weight: 0.01 * weight[WEAK])
    problem = replace(problem, recipe=replace(problem.recipe, lr=1e-4, warmup_lr=1e-4))
    choice = sfp.find_sfp(problem, sfp.SoftConfig(), state)
    assert_weak_go(problem, choice)
    assert choice.sample_passes == 2 * 20 * 64 + 4 * 64


def test_fpgm_drops_filters_that_others_stand_in_for() -> None:
    """Filters in the midst of the others, though larger than some of them: by its norm none would go."""

    def midst(weight: Tensor) -> Tensor:
        weight += 5  # norms say little now, distances are as before
        weight[0] = 3  # small, but far from all others
        return weight[[i for i in range(SIGNS) if i not in (0, *WEAK)]].mean(dim=0).expand(len(WEAK), -1, -1, -1)

    problem, state = weak_problem(midst)
    problem = replace(problem, recipe=replace(problem.recipe, epochs=1, lr=1e-4, warmup_lr=1e-4))
    assert_weak_go(problem, magnitude.find_fpgm(problem, sfp.SoftConfig(), state))
    assert 0 not in sfp.find_sfp(problem, sfp.SoftConfig(), state).kept["needed"]


def test_distances_to_all_others() -> None:
    corners = torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 8.0]], dtype=torch.float64)
    torch.testing.assert_close(magnitude.distances(corners), torch.tensor([13.0, 10.0, 13.0], dtype=torch.float64))


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_slimming_narrows_what_is_useless(seed: int) -> None:
    problem = planted_problem(budget="57%", seed=seed)
    config = slimming.SlimmingConfig(sparsity=0.01)
    prepared = slimming.prepare(problem, config)
    choice = slimming.find_slimming(problem, config, prepared.state)
    choice.check(problem)
    assert choice.widths["needed"] > choice.widths["useless"] + 2
    assert prepared.sample_passes == 20 * 20 * 64


def test_slimming_drops_small_scales_wherever_they_are() -> None:
    """One threshold for all spaces: what stays are the largest scales of the network, with a sign or without."""
    problem = planted_problem(budget="65%")
    trained = copy.deepcopy(problem.model)
    scales = {"needed": [0.1, 0.9, 0.2, -0.8, 0.3, 0.7, -0.25, 0.15], "useless": [0.6, -0.5, 1, 1, 1, 0.05, 1, 1]}
    for name, values in scales.items():
        trained.get_parameter(f"{name}_norm.weight").data = torch.tensor(values)
    choice = slimming.find_slimming(problem, slimming.SlimmingConfig(), trained.state_dict())
    assert choice.kept == {"needed": [1, 3, 5], "useless": [0, 1, 2, 3, 4, 6, 7]}


def test_slimming_takes_the_mean_over_tied_norms() -> None:
    problem = residual_problem(budget="80%")
    trained = copy.deepcopy(problem.model)
    trained.bn0.weight.data = torch.tensor([9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    trained.bn2.weight.data = torch.tensor([0.0, 1.0, 1.0, 1.0, 0.1, 1.0, 1.0, 1.9])
    choice = slimming.find_slimming(problem, slimming.SlimmingConfig(), trained.state_dict())
    order = [0, 1, 2, 3, 5, 6, 7, 4]  # means: 4.5, then 1, 0.95 and 0.55
    assert list(choice.kept["stem"]) == sorted(order[: choice.widths["stem"]])


def test_slimming_pulls_the_scales_by_the_gradient_of_their_size() -> None:
    problem = planted_problem(epochs=1)
    sums = []
    for sparsity in (0.0, 0.01, 0.1):
        state = slimming.prepare(problem, slimming.SlimmingConfig(sparsity=sparsity)).state
        sums.append(sum(state[f"{name}_norm.weight"].abs().sum() for name in ("needed", "useless")).item())
    assert sums[0] > sums[1] > sums[2]


# -- soft pruning


def residual_problem(budget: str = "50%", **changes: Any) -> Problem:
    torch.manual_seed(7)
    model = Residual(**Residual.FULL)
    draw = torch.Generator().manual_seed(0)
    batches = [
        (torch.randn(8, *Residual.SHAPE, generator=draw), torch.randint(5, (8,), generator=draw)) for _ in range(6)
    ]
    return as_problem(model, Batches(batches[:4]), Batches(batches[4:]), budget, 0, 3, **changes)


@pytest.mark.parametrize("method", [by_sfp, by_fpgm])
def test_at_the_end_the_zeroed_network_is_the_cut_one(method: Callable[[Problem], Choice]) -> None:
    problem = residual_problem()
    choice = method(problem)
    assert choice.model is not None
    model = choice.model.double().eval()
    small = dmcp.cut(model, problem.graph, choice.kept)
    x = problem.held.batches[0][0].double()
    torch.testing.assert_close(model(x), small(x))
    torch.testing.assert_close(model.train()(x), small.train()(x))


def test_zeroed_channels_are_trained_on() -> None:
    seen: list[Tensor] = []

    def watched(filters: Tensor) -> Tensor:
        seen.append(filters.clone())
        return filters.norm(dim=1)

    problem = residual_problem()
    sfp.prune_softly(problem, "test", watched, sfp.SoftConfig(regrowth=1))
    assert len(seen) == 3 * len(problem.graph.spaces)
    assert all((filters.norm(dim=1) > 0).all() for filters in seen)
    seen.clear()
    sfp.prune_softly(problem, "test", watched, sfp.SoftConfig(every=2, regrowth=1))
    assert len(seen) == 2 * len(problem.graph.spaces)  # after the second epoch and the last


def test_zeroed_filters_under_a_norm_do_not_outgrow_the_others() -> None:
    """Epsilon alone is left under the root of a BatchNorm there: at the full gradient they become the largest."""
    largest: dict[float, float] = {}
    for regrowth in (0.01, 1.0):
        seen: list[Tensor] = []

        def watched(filters: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(filters.norm(dim=1))
            return seen[-1]

        problem = planted_problem(budget="57%", epochs=3)
        choice = sfp.prune_softly(problem, "test", watched, sfp.SoftConfig(regrowth=regrowth))
        assert choice.model is not None
        assert dict(choice.model.named_buffers()).keys() == dict(problem.model.named_buffers()).keys()
        largest[regrowth] = (torch.stack(seen[2:]).max() / torch.stack(seen[:2]).max()).item()  # two spaces
    assert largest[0.01] < 1.5 and largest[1.0] > 4


def test_soft_pruning_works_without_batch_norms() -> None:
    torch.manual_seed(0)
    loader, held = planted_batches(20, 0), planted_batches(4, 1)
    problem = as_problem(Planted(norm=False), loader, held, "57%", 0, 3)
    for method in (by_sfp, by_fpgm):
        choice = method(problem)
        choice.check(problem)
        small = dmcp.cut(choice.model or problem.model, problem.graph, choice.kept)
        assert evaluate(small, held) == pytest.approx(evaluate(choice.model or problem.model, held))
        assert evaluate(small, held) > 0.7


def test_slimming_says_what_to_do_without_batch_norms() -> None:
    problem = as_problem(Planted(norm=False), planted_batches(2, 0), planted_batches(2, 1), "60%", 0, 1)
    for call in (
        lambda: slimming.prepare(problem, slimming.SlimmingConfig()),
        lambda: slimming.find_slimming(problem, slimming.SlimmingConfig(), problem.model.state_dict()),
    ):
        with pytest.raises(TrainingError, match=r"needed and 1 more.*frozen=\['needed', 'useless'\].*l1"):
            call()


# -- all of them


@pytest.mark.parametrize(
    ("build", "methods"),
    [
        pytest.param(resnet18, METHODS, marks=pytest.mark.slow),
        pytest.param(mobilenet_v2, METHODS, marks=pytest.mark.slow),
        pytest.param(densenet121, METHODS, marks=pytest.mark.slow),
    ],
)
def test_real_networks(build: Callable[..., nn.Module], methods: list[Callable[[Problem], Choice]]) -> None:
    problem = tiny_problem(build(num_classes=10), budget="50%,params:60%", align=2)
    before = copy.deepcopy(problem.model)
    for method in methods:
        choice = method(problem)
        choice.check(problem)
        assert choice.model is not None and choice.model is not problem.model
        floor = problem.floor
        for space in problem.graph.spaces:
            width = choice.widths[space.name]
            assert floor[space.name] <= width == len(choice.kept[space.name])  # type: ignore[arg-type]
            assert width % 2 == 0 or width == space.size
        small = dmcp.cut(choice.model, problem.graph, choice.kept).eval()
        assert small(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
        assert same(problem.model, before) and problem.model.training == before.training


@pytest.mark.parametrize("method", METHODS)
def test_same_seed_same_choice(method: Callable[[Problem], Choice]) -> None:
    one, other = (method(residual_problem()) for _ in range(2))
    assert one.kept == other.kept and one.model and other.model and same(one.model, other.model)


class Stop:
    """Asks to stop from some step on."""

    def __init__(self, step: int) -> None:
        self.left = step

    def __call__(self) -> bool:
        self.left -= 1
        return self.left <= 0


@pytest.mark.parametrize("step", [3, 8, 12])
@pytest.mark.parametrize("method", [by_sfp, by_fpgm, by_slimming])
def test_an_interrupted_run_ends_the_same(method: Callable[[Problem], Choice], step: int, tmp_path: Path) -> None:
    """Four steps an epoch: in the midst of one, at the end of one, and when all was trained."""
    problem = residual_problem()
    alone = method(problem)
    stopped = replace(problem, keep=lambda stage: Checkpointer(tmp_path / stage, stop_requested=Stop(step)))
    with pytest.raises(StoppedError) if step < 12 else contextlib.nullcontext():
        method(stopped)
    steps: list[int] = []
    again = replace(
        problem,
        keep=lambda stage: Checkpointer(tmp_path / stage),
        tell=lambda stage, record: steps.append(record.step),  # type: ignore[union-attr]
    )
    choice = method(again)
    assert steps == list(range(step, 12))
    assert alone.kept == choice.kept and alone.model and choice.model and same(alone.model, choice.model)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (lambda: magnitude_module.L1Config(power=3), "power must be 1"),
        (lambda: slimming.SlimmingConfig(sparsity=-1.0), "sparsity must be a number of at least 0"),
        (lambda: slimming.SlimmingConfig(sparsity=float("nan")), "sparsity must be a number of at least 0"),
        (lambda: sfp.SoftConfig(every=0), "every must be an int of at least 1"),
        (lambda: sfp.SoftConfig(regrowth=0.0), "regrowth must be a number above 0"),
        (lambda: sfp.SoftConfig(every=1.5), "every must be an int of at least 1"),  # type: ignore[arg-type]
    ],
)
def test_settings_that_are_refused(settings: Callable[[], object], words: str) -> None:
    with pytest.raises(TrainingError, match=words):
        settings()


def test_states_that_are_refused() -> None:
    problem = planted_problem()
    with pytest.raises(TrainingError, match="give its state dict"):
        magnitude_module.find_l1(problem, magnitude_module.L1Config())
    with pytest.raises(TrainingError, match=r"give state=prepare"):
        slimming.find_slimming(problem, slimming.SlimmingConfig())
    other = nn.Linear(2, 2).state_dict()
    for find in (
        lambda: magnitude_module.find_l1(problem, magnitude_module.L1Config(), other),
        lambda: slimming.find_slimming(problem, slimming.SlimmingConfig(), other),
        lambda: sfp.find_sfp(problem, sfp.SoftConfig(), other),
        lambda: magnitude.find_fpgm(problem, sfp.SoftConfig(), other),
    ):
        with pytest.raises(TrainingError, match="not one of this network"):
            find()
