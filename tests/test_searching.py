"""The search as a whole: same seed, same bits (I9), into the band, ablations, bounds, and settings that cannot be."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from nets import Residual, sample
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import dmcp
import dmcp.searching.search
import dmcp.searching.steps
from dmcp.budget import parse, ratios
from dmcp.errors import BudgetError, DataError, DmcpError, TrainingError, WidthsError
from dmcp.markov import CERTAIN, CHAIN, INDEPENDENT
from dmcp.searching.config import SearchResult
from dmcp.searching.search import search
from dmcp.settings import Sampling, SearchConfig


class Dropping(Residual):
    """The residual net with dropout, which draws from the global generator."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.2, self.training)


@functools.cache
def traced() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Dropping(**Residual.FULL)
    return model, dmcp.trace(model, sample(Residual.SHAPE).float())


def supernet(groups: int = 4) -> Any:
    return dmcp.Supernet(*traced(), groups)


class Noise:
    """Batches of noise; remembers the epochs that it was told."""

    def __init__(self, count: int = 3, samples: int = 4, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        shape = (samples, *Residual.SHAPE)
        self.batches = [
            (torch.randn(shape, generator=generator), torch.randint(5, (samples,), generator=generator))
            for _ in range(count)
        ]
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


def short(**settings: Any) -> SearchConfig:
    return SearchConfig(**{"budget": "50%", "groups": 4, "epochs": 2, **settings})


def bits(net: Any) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in net.state_dict().items()}


def ran(config: SearchConfig, **arguments: Any) -> tuple[Any, SearchResult]:
    net = supernet(config.groups)
    return net, search(net, Noise(), config, **arguments)


# -- I9


def test_same_seed_same_bits() -> None:
    traced()
    state = torch.get_rng_state()
    one, result = ran(short(init="random", sampling="markov"))
    assert torch.equal(torch.get_rng_state(), state)
    torch.randn(7)  # what the world does in between
    two, again = ran(short(init="random", sampling="markov"))
    assert bits(one) == bits(two)
    assert torch.equal(result.alphas, again.alphas) and result.log == again.log
    other, _ = ran(short(init="random", sampling="markov", seed=1))
    assert all(bits(other)[name] != value for name, value in bits(one).items() if "conv" in name or name == "alpha")


def test_the_users_model_is_left_alone() -> None:
    model, _ = traced()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    net, _ = ran(short())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not torch.equal(net.model.stem.weight, before["stem.weight"])


# -- into the band


def test_a_search_may_start_from_given_alphas() -> None:
    net = supernet()
    given = torch.linspace(-1, 2, net.alpha.numel()).view_as(net.alpha)
    with torch.no_grad():
        net.alpha.copy_(given)
    result = search(net, Noise(), short(init="given", warmup=0, epochs=1, alpha_lr=0, alpha_min_lr=0))
    assert torch.equal(result.alphas.cpu(), given.to(result.alphas.dtype))


@pytest.mark.parametrize(
    ("budget", "init"),
    [
        ("50%", "zero"),
        ("params:60%", "random"),
        ("50%,params:30%", "zero"),
        pytest.param("50%", "random", marks=pytest.mark.slow),
        pytest.param("params:60%", "zero", marks=pytest.mark.slow),
        pytest.param("50%,params:30%", "random", marks=pytest.mark.slow),
    ],
)
def test_the_budget_alone_brings_the_expected_cost_into_the_band(budget: str, init: str) -> None:
    config = short(
        budget=budget, init=init, warmup=0, epochs=100, task_loss=False, train_weights=False, alpha_min_lr=0.5
    )
    net, result = ran(config)
    assert len(result.log) == 300
    seen = [max(record.ratios or ()) for record in result.log]
    assert not 0.95 <= seen[0] <= 1.0
    assert 0.94 < seen[-1] < 1.01
    assert any(0.95 <= ratio <= 1.0 for ratio in seen)
    # The same by the exact polynomial on the expected widths of samples.
    widths = CHAIN.sample(result.alphas, result.sizes, 20_000, torch.Generator().manual_seed(0))
    costs = [
        (net.graph.macs(widths) if limit.kind == "macs" else net.graph.params(widths)).double().mean() / limit.target
        for limit in result.budget.limits
    ]
    assert max(costs) == pytest.approx(seen[-1], abs=0.03)


@pytest.mark.parametrize("more", [{}, {"independent": True}])
def test_target_starts_at_the_budget(more: dict[str, Any]) -> None:
    _, result = ran(short(**more))
    first = next(record for record in result.log if record.ratios)
    assert first.ratios is not None and first.ratios[0] == pytest.approx(1.0, abs=1e-4)


# -- settings


def test_warmup_trains_weights_only_and_schedules_follow_the_paper() -> None:
    net, loader = supernet(), Noise()
    result = search(net, loader, short(epochs=4, accumulate=2))
    assert loader.epochs == [0, 1, 2, 3]
    assert [record.step for record in result.log] == list(range(8))  # two steps for three batches
    warm, both = result.log[:4], result.log[4:]
    assert all(record.ratios is None and record.alpha_lr is None for record in warm)
    assert result.log[0].lr == pytest.approx(0.2 * 8 / 1024)
    assert result.log[4].lr == pytest.approx((0.2 + 0.02) / 2 * 8 / 1024)
    assert [record.alpha_lr for record in both] == pytest.approx([0.5, 0.441421, 0.3, 0.158579], rel=1e-5)
    assert all(len(record.weight_losses or ()) == 4 for record in result.log)


@pytest.mark.parametrize("train_weights", [True, False])
@pytest.mark.parametrize("task_loss", [True, False])
def test_ablation_of_the_training_scheme(train_weights: bool, task_loss: bool) -> None:
    net = supernet()
    before = bits(net)
    result = search(net, Noise(), short(warmup=0, train_weights=train_weights, task_loss=task_loss, init="zero"))
    same = {name for name, value in bits(net).items() if value == before[name]}
    assert ("stem.weight" in {name.removeprefix("model.") for name in same}) == (not train_weights)
    assert "alpha" not in same
    assert (same == before.keys() - {"alpha"}) == (not train_weights)
    assert (result.log[0].task_loss is not None) == task_loss
    assert (result.log[0].weight_losses is not None) == train_weights


def test_draws_before_and_after_the_warmup(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Sampling, int]] = []
    real = dmcp.searching.search.sample_gates

    def spied(net: Any, path: Any, sampling: Sampling, count: int, generator: Any) -> Any:
        seen.append((sampling, count))
        return real(net, path, sampling, count, generator)

    monkeypatch.setattr(dmcp.searching.search, "sample_gates", spied)
    ran(short(sampling="sandwich", warmup_sampling="markov", subnets=1))
    assert seen == [(Sampling.MARKOV, 1)] * 3 + [(Sampling.SANDWICH, 1)] * 3


def test_independent_gates() -> None:
    _, chain = ran(short(init="random", warmup=0, epochs=1, lr=0, min_lr=0, alpha_lr=0, alpha_min_lr=0))
    net, result = ran(short(init="random", independent=True, warmup=0, epochs=1, alpha_lr=0, alpha_min_lr=0))
    assert result.process is INDEPENDENT and chain.process is CHAIN
    alone = ratios(parse("50%", net.graph), net.graph, INDEPENDENT.marginals(net.alpha), net.sizes, INDEPENDENT)
    assert result.log[0].ratios == pytest.approx(alone.tolist(), rel=1e-5)
    assert result.log[0].ratios != pytest.approx(chain.log[0].ratios, rel=1e-2)


def test_alphas_see_only_their_own_data() -> None:
    weights_saw: set[int] = set()
    alphas_saw: set[int] = set()
    train, held_out = Noise(seed=1), Noise(2, seed=2)

    def loss(output: Tensor, batch: Any) -> Tensor:
        (weights_saw if net.model.stem.weight.requires_grad else alphas_saw).add(id(batch[0]))
        return F.cross_entropy(output, batch[1])

    net = supernet()
    search(net, train, short(distill=False), arch_loader=held_out, task=dmcp.Task(loss=loss))
    assert weights_saw == {id(x) for x, _ in train.batches}
    assert alphas_saw == {id(x) for x, _ in held_out.batches}
    assert held_out.epochs == [0, 1]  # three steps over two batches


def test_widths_by_name_hold() -> None:
    config = short(
        min_channels={"stem": 5}, max_channels={"conv3": 4, "conv1": 5}, init="zero", sampling="markov", epochs=6
    )
    _, result = ran(config)
    widths = CHAIN.sample(result.alphas, result.sizes, 5000)
    assert widths.amin(dim=0).tolist() == [5, 1, 2, 2]
    assert widths.amax(dim=0).tolist() == [8, 5, 4, 11]


def test_one_number_bounds_all_widths() -> None:
    _, result = ran(short(min_channels=4, max_channels=9, budget="70%"))
    widths = CHAIN.sample(result.alphas, result.sizes, 5000)
    assert widths.amin(dim=0).tolist() == [4, 4, 4, 4]
    assert widths.amax(dim=0).tolist() == [8, 6, 9, 9]


def test_the_chain_of_a_bounded_space_begins_at_its_floor() -> None:
    """Steps below the floor are certain and stay so; without a bound no alpha is."""
    _, result = ran(short(min_channels={"conv4": 8}, init="target", log_every=1))
    row, ends = result.alphas[3], result.sizes[3].cumsum(dim=0)
    below = ends[1:] == 8
    assert below.sum() == 2 and (row[below] == CERTAIN).all() and (row[~below].abs() < 10).all()
    assert (result.alphas[:3].abs() < 10).all()
    assert result.log[-1].ratios and 0.5 < result.log[-1].ratios[0] < 1.5


def test_sorting_comes_first() -> None:
    net, _ = ran(short(sort=True, warmup=0, train_weights=False))
    norms = net.model.conv1.weight.detach().square().sum((1, 2, 3))
    assert (norms.diff() <= 0).all()
    assert not (supernet().model.conv1.weight.detach().square().sum((1, 2, 3)).diff() <= 0).all()


def test_records_arrive_once_and_in_order() -> None:
    events: list[dmcp.Event] = []
    _, result = ran(short(log_every=4), runtime=dmcp.Runtime(on_event=events.append))
    seen = [event.record for event in events]
    assert seen.pop() is result
    assert tuple(seen) == result.log
    assert [record.step for record in seen] == list(range(6))


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


def test_the_host_does_not_wait_in_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    before_the_log = []
    with Reads() as reads:
        monkeypatch.setattr(dmcp.searching.steps.Log, "flush", lambda log: before_the_log.append(reads.count))
        for epochs in (2, 4):
            reads.count = 0
            ran(short(epochs=epochs, log_every=1000))
    assert before_the_log[0] == before_the_log[1] > 0  # what is read is read before the first step
    assert reads.count == before_the_log[1]


# -- what cannot be


@pytest.mark.filterwarnings("ignore::dmcp.losses.DistillationWarning")
@pytest.mark.parametrize("stage", [1, 2])
def test_a_loss_that_is_not_finite_stops_at_the_last_good_state(stage: int) -> None:
    net, calls = supernet(), [0, 0]

    def loss(output: Tensor, batch: Any) -> Tensor:
        own = 1 if net.model.stem.weight.requires_grad else 2
        calls[own - 1] += 1
        value = F.cross_entropy(output, batch[1])
        # the fifth step of all, and the second with alphas, if there is one pass over three batches in the warm-up
        return value * float("nan") if own == stage and calls[own - 1] == (5 if own == 1 else 2) else value

    good: list[tuple[int, dict[str, bytes]]] = []
    config = short(log_every=2)
    with pytest.raises(TrainingError, match=rf"nan in stage {stage}, .* at step 4 \(epoch 1\).* after step 3") as error:
        search(
            net,
            Noise(),
            config,
            task=dmcp.Task(loss=loss),
            runtime=dmcp.Runtime(on_event=lambda event: good.append((event.record.step, bits(net)))),
        )
    assert str(error.value).count(". ") == 1
    assert good[-1][0] == 3
    assert bits(net).items() >= good[-1][1].items()  # but for counts of batches, which a search leaves alone
    assert torch.isfinite(net.alpha).all()


@pytest.mark.filterwarnings("ignore::dmcp.losses.DistillationWarning")
@pytest.mark.parametrize("log_every", [1, 50])
@pytest.mark.parametrize("factor", [5.0, 100.0])
def test_weights_that_diverged_are_named_where_the_alphas_show_it(factor: float, log_every: int) -> None:
    net, calls = supernet(), [0]

    def loss(output: Tensor, batch: Any) -> Tensor:
        value = F.cross_entropy(output, batch[1])
        if not net.model.stem.weight.requires_grad:
            return value * float("nan")
        calls[0] += 1
        return value * (1.0 if calls[0] == 1 else factor)

    with pytest.raises(TrainingError) as error:
        search(net, Noise(), short(log_every=log_every, lr=1e-6, min_lr=1e-6), task=dmcp.Task(loss=loss))
    text = str(error.value)
    assert "The loss is nan in stage 2, the alphas, at step 3 (epoch 1); the supernet is again as it was " in text
    assert "a model that was given to dmcp.prune is as it was given. Lower lr" in text
    assert text.startswith("The weights diverged: their loss grew from ") == (factor > 10)
    assert ("alpha_lr" in text) == (factor < 10)


def test_a_search_of_still_weights_needs_none_that_can_be_trained() -> None:
    net = supernet()
    net.model.requires_grad_(False)
    with pytest.raises(TrainingError, match=r"call model.requires_grad_\(True\)"):
        search(net, Noise(), short())
    assert search(net, Noise(), short(train_weights=False, warmup=0)).log


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sampling": "some"}, "draw must be one of markov, uniform, sandwich"),
        ({"init": "one"}, "init must be one of target, zero, random, given"),
        ({"epochs": 0}, "epochs must be an int of at least 1"),
        ({"accumulate": 1.5}, "accumulate must be an int"),
        ({"tolerance": 1.0}, "tolerance must be a number from 0 to below 1"),
        ({"tolerance": 0}, "tolerance must be above 0"),
        ({"lr": float("nan")}, "lr must be a number"),
        ({"lr": "fast"}, "lr must be a number"),
        ({"lr": 0.1, "min_lr": 0.2}, "min_lr must not be above lr"),
        ({"alpha_lr": 0.05}, "nor alpha_min_lr above alpha_lr"),
        ({"epochs": 3, "warmup": 0.9}, "leaves none of 3 epochs for the alphas"),
        ({"task_loss": False, "budget_weight": 0}, "Nothing moves the alphas"),
    ],
)
def test_settings_that_cannot_be(settings: Any, message: str) -> None:
    with pytest.raises(TrainingError, match=message) as error:
        SearchConfig(**{"budget": 0.5, **settings})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"groups": 10}, WidthsError, r"Supernet\(model, graph, groups=10, align=1\)"),
        ({"align": 2}, WidthsError, "other groups than the settings"),
        ({"budget": "1%"}, BudgetError, "less than the floor costs"),
        ({"budget": "90%", "max_channels": {"stem": 4}}, BudgetError, "90%"),
        ({"min_channels": {"stem": 8, "conv4": 11}, "budget": "20%"}, BudgetError, "less than the floor costs"),
        (
            {"min_channels": 7, "budget": "40%"},
            BudgetError,
            "choose from .* or lower the floors: 4 of 4 .* smallest width",
        ),
        ({"min_channels": 99, "budget": "100%"}, WidthsError, "nothing to search: .* or other smallest and largest"),
        ({"max_channels": 6, "budget": "80%"}, BudgetError, "more than the largest widths allow: choose from"),
        ({"min_channels": {"nobody": 3}}, WidthsError, "no space named 'nobody'"),
    ],
)
def test_settings_that_do_not_fit_the_supernet(settings: Any, kind: type[DmcpError], message: str) -> None:
    net = supernet()
    before = bits(net)
    with pytest.raises(kind, match=message):
        search(net, Noise(), short(**settings))
    assert bits(net) == before


def test_what_leaves_nothing_to_do() -> None:
    with pytest.raises(WidthsError, match="nothing to search"):
        search(supernet(1), Noise(), short(groups=1, budget="100%"))
    with pytest.raises(TrainingError, match="leave arch_loader out"):
        search(supernet(), Noise(), short(task_loss=False), arch_loader=Noise())
    with pytest.raises(DataError, match="no batches"):
        search(supernet(), Noise(0), short())
    with pytest.raises(DataError, match="The loader, a generator, has no length"):
        search(supernet(), (batch for batch in Noise()), short())
