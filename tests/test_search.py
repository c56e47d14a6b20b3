"""The search as a whole: same seed, same bits (I9), into the band, ablations, bounds, and settings that cannot be."""

from __future__ import annotations

import copy
import dataclasses
import functools
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nets import Depthwise, Residual, randomise, sample
from short_runs import DEVICE, EAGER, Noise, losses, pictures, search_pictures, traced_residual
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import dmcp
import dmcp.searching.steps
from dmcp import models
from dmcp.errors import BudgetError, DataError, DmcpError, TrainingError, WidthsError
from dmcp.markov import CERTAIN, marginals, sample_groups
from dmcp.runs.records import SearchRecord
from dmcp.runtime.engine import resolve
from dmcp.searching.budget import front_alphas, parse_budget, ratios
from dmcp.searching.records import SearchResult, expected_shares
from dmcp.searching.search import SearchWarning
from dmcp.settings import SearchConfig
from dmcp.training import loop
from dmcp.training.loop import Log


class Dropping(Residual):
    """The residual net with dropout, which uses the global generator."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.2, self.training)


def half_cross_entropy(output: Tensor, batch: Any) -> Tensor:
    return 0.5 * F.cross_entropy(output, batch[1])


TASKS = [dmcp.Task(), dmcp.Task(loss=half_cross_entropy, distill="classes")]


@functools.cache
def traced() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = Dropping(**Residual.FULL)
    return model, dmcp.trace(model, sample(Residual.SHAPE).float())


def supernet(groups: int = 4) -> Any:
    return dmcp.Supernet(*traced(), groups)


def search(
    net: Any,
    loader: Any = None,
    loss: Any = None,
    on_record: Callable[[SearchRecord], None] | None = None,
    arch_loader: Any = None,
    **settings: Any,
) -> SearchResult:
    config = SearchConfig(**{"budget": "50%", "groups": 4, "epochs": 2, **settings})
    batches = Noise(3, 4) if loader is None else loader

    def hear(event: dmcp.Event) -> None:
        if on_record is not None and isinstance(event.record, SearchRecord):
            on_record(event.record)

    task, runtime = dmcp.Task(loss=loss), dmcp.Runtime(on_event=hear)
    return dmcp.search(net, batches, config, arch_loader=arch_loader, task=task, runtime=runtime)


def ran(**settings: Any) -> tuple[Any, SearchResult]:
    net = supernet()
    return net, search(net, **settings)


def bits(net: Any) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in net.state_dict().items()}


def test_same_seed_same_bits_and_the_users_model_is_left_alone() -> None:
    """I9 and I10."""
    model, _ = traced()
    before, state = {name: tensor.clone() for name, tensor in model.state_dict().items()}, torch.get_rng_state()
    one, result = ran(init="random")
    assert torch.equal(torch.get_rng_state(), state)
    torch.randn(7)  # what others do in between
    two, again = ran(init="random")
    assert bits(one) == bits(two) and torch.equal(result.alphas, again.alphas) and result.log == again.log
    other, _ = ran(init="random", seed=1)
    assert all(bits(other)[name] != value for name, value in bits(one).items() if "conv" in name or name == "alpha")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not torch.equal(one.model.stem.weight, before["stem.weight"])


def test_the_alphas_learn_from_statistics_of_the_batch() -> None:
    """A peer moves its alphas in eval mode, on running statistics that mix all widths."""
    model, x = randomise(Depthwise(**Depthwise.FULL)), sample(Depthwise.SHAPE, batch=6)
    net = dmcp.Supernet(model, dmcp.trace(model, x)).double()
    net.eval()  # the search must not depend on the mode that it finds
    labels, losses = torch.arange(6) % 5, {}
    for training in (True, False):
        twin = copy.deepcopy(net).train(training)
        losses[training] = F.cross_entropy(twin(x, twin.soft()), labels).item()
    still: dict[str, Any] = {"epochs": 1, "warmup": 0.0, "train_weights": False, "init": "zero", "groups": 10}
    result = search(net, [(x, labels)], lambda output, batch: F.cross_entropy(output, batch[1]), **still)
    found = result.log[0].task_loss
    assert found is not None
    assert abs(found - losses[True]) < 1e-10 < 0.01 < abs(found - losses[False])


# the unit of a loss


@pytest.mark.parametrize("factor", [0.001, 0.01, 100.0, 1000.0])
def test_the_unit_of_an_own_loss_changes_no_alpha(factor: float) -> None:
    def searched(factor: float) -> SearchResult:
        def loss(output: Tensor, batch: Any) -> Tensor:
            return factor * F.cross_entropy(output, batch[1])

        return search(supernet(), loss=loss, warmup=0, train_weights=False, epochs=4, distill=False)

    one, other = searched(1.0), searched(factor)
    torch.testing.assert_close(other.alphas, one.alphas, rtol=1e-4, atol=1e-5)
    assert one.alphas.std() > 0.01  # all start from one number
    for mine, scaled in zip(one.log, other.log, strict=True):  # the log keeps the unit
        assert mine.task_loss and scaled.task_loss == pytest.approx(factor * mine.task_loss, rel=1e-4)


# into the band


@pytest.mark.parametrize(("budget", "init"), [("50%", "zero"), ("params:60%", "random"), ("50%,params:30%", "zero")])
def test_the_budget_alone_brings_the_expected_cost_into_the_band(budget: str, init: str) -> None:
    still: dict[str, Any] = {"warmup": 0, "task_loss": False, "train_weights": False}
    net, result = ran(budget=budget, init=init, epochs=100, alpha_min_lr=0.5, **still)
    seen = [max(record.ratios or ()) for record in result.log]
    assert len(seen) == 300 and not 0.95 <= seen[0] <= 1.0
    assert 0.94 < seen[-1] < 1.01 and any(0.95 <= ratio <= 1.0 for ratio in seen)
    # The same by the exact cost of samples.
    widths = sample_groups(result.alphas, result.sizes, 20_000, torch.Generator().manual_seed(0))
    costs = [net.graph.cost(limit.kind, widths).double().mean() / limit.target for limit in result.budget.limits]
    assert max(costs) == pytest.approx(seen[-1], abs=0.03)


@pytest.mark.parametrize(("init", "near"), [("zero", False), ("random", False), ("target", True)])
def test_a_search_that_does_not_arrive_says_so_once_and_what_helps(init: str, near: bool) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _, result = ran(init=init, alpha_lr=0.01, alpha_min_lr=0.01)
    (share,) = expected_shares(result)
    assert (0.95 <= share <= 1.05) if near else share < 0.5
    texts = [str(it.message) for it in caught if issubclass(it.category, SearchWarning)]
    assert len(texts) == (0 if near else 1)
    for text in texts:
        assert f"{share:.1%}" in text and len(text.splitlines()) == 1
        assert all(remedy in text for remedy in ("epochs", 'init="target"', "budget_weight", "alpha_lr"))


def test_where_the_alphas_start() -> None:
    _, result = ran()
    first = next(record for record in result.log if record.ratios)
    assert first.ratios is not None and first.ratios[0] == pytest.approx(1.0, abs=1e-4)
    net = supernet()
    given = torch.linspace(-1, 2, net.alpha.numel()).view_as(net.alpha)
    with torch.no_grad():
        net.alpha.copy_(given)
    result = search(net, init="given", warmup=0, epochs=1, alpha_lr=0, alpha_min_lr=0)
    assert torch.equal(result.alphas, given)
    widths = sample_groups(given, result.sizes, 100_000, torch.Generator().manual_seed(0)).double().mean(dim=0)
    assert [record.step for record in result.log if record.widths] == [0]
    assert result.log[0].widths == pytest.approx(widths.tolist(), abs=0.05)


# settings


def test_warmup_trains_weights_only_and_schedules_follow_the_paper() -> None:
    loader, seen = Noise(3, 4), list[SearchRecord]()
    result = search(supernet(), loader, on_record=seen.append, epochs=4, accumulate=2, log_every=3)
    assert loader.epochs == [0, 1, 2, 3] and tuple(seen) == result.log
    assert [record.step for record in result.log] == list(range(8))  # two steps for three batches
    warm, both = result.log[:4], result.log[4:]
    assert all(record.ratios is record.widths is record.alpha_lr is None for record in warm)
    assert result.log[0].lr == pytest.approx(0.2 * 8 / 1024)
    assert result.log[4].lr == pytest.approx((0.2 + 0.02) / 2 * 8 / 1024)
    assert [record.alpha_lr for record in both] == pytest.approx([0.5, 0.441421, 0.3, 0.158579], rel=1e-5)
    assert all(len(record.weight_losses or ()) == 4 for record in result.log)


@pytest.mark.parametrize("train_weights", [True, False])
@pytest.mark.parametrize("task_loss", [True, False])
def test_ablation_of_the_training_scheme(train_weights: bool, task_loss: bool) -> None:
    net = supernet()
    before = bits(net)
    result = search(net, warmup=0, train_weights=train_weights, task_loss=task_loss, init="zero")
    same = {name for name, value in bits(net).items() if value == before[name]}
    assert "alpha" not in same and ("model.stem.weight" in same) == (not train_weights)
    assert (same == before.keys() - {"alpha"}) == (not train_weights)
    assert (result.log[0].task_loss is not None) == task_loss
    assert (result.log[0].weight_losses is not None) == train_weights


def test_alphas_see_only_their_own_data() -> None:
    weights_saw, alphas_saw = set[int](), set[int]()
    train, held_out, net = Noise(3, 4, seed=1), Noise(2, 4, seed=2), supernet()

    def loss(output: Tensor, batch: Any) -> Tensor:
        (weights_saw if net.model.stem.weight.requires_grad else alphas_saw).add(id(batch[0]))
        return F.cross_entropy(output, batch[1])

    search(net, train, loss=loss, arch_loader=held_out, distill=False)
    assert weights_saw == {id(x) for x, _ in train.batches}
    assert alphas_saw == {id(x) for x, _ in held_out.batches}
    assert held_out.epochs == [0, 1]  # three steps over two batches


def test_widths_stay_inside_their_bounds() -> None:
    """Steps below a minimum are certain and stay so; without a bound no alpha is."""
    _, result = ran(min_channels={"conv4": 8, "stem": 5}, max_channels={"conv3": 4, "conv1": 5}, epochs=6)
    widths = sample_groups(result.alphas, result.sizes, 5000, None)
    assert widths.amin(dim=0).tolist() == [5, 1, 2, 8] and widths.amax(dim=0).tolist() == [8, 5, 4, 11]
    row, below = result.alphas[3], result.sizes[3].cumsum(dim=0)[1:] == 8
    assert below.sum() == 2 and (row[below] == CERTAIN).all() and (row[~below].abs() < 10).all()
    assert (result.alphas[1:3].abs() < 10).all()


class Reads(TorchDispatchMode):
    """Counts what makes the host wait for the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("loss", [None, half_cross_entropy], ids=["default loss", "own loss"])
def test_the_host_does_not_wait_in_the_loop(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran(epochs=2, log_every=1000)  # the first trace of a process reads more
    before_the_log = []
    with Reads() as reads:
        monkeypatch.setattr(Log, "flush", lambda log: before_the_log.append(reads.count))
        for epochs in (2, 4):
            reads.count = 0
            search(supernet(), loss=loss, epochs=epochs, log_every=1000)
    assert before_the_log[0] == before_the_log[1] > 0  # what is read is read before the first step


# what cannot be


@pytest.mark.filterwarnings("ignore::UserWarning")  # sub-networks learn from outputs, not by this loss
@pytest.mark.parametrize(("stage", "bad"), [(1, 5), (2, 2)])  # the fifth step of all, the second with alphas
def test_a_loss_that_is_not_finite_stops_at_the_last_good_state(
    stage: int, bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "overdue", lambda *_: False)  # a slow machine reads losses in between
    net, good = supernet(), list[tuple[int, dict[str, bytes]]]()
    calls = [-1 if stage == 1 else 0]  # before the first step the loss is watched once

    def loss(output: Tensor, batch: Any) -> Tensor:
        calls[0] += (1 if net.model.stem.weight.requires_grad else 2) == stage
        value = F.cross_entropy(output, batch[1])
        return value * float("nan") if calls[0] == bad else value

    with pytest.raises(TrainingError, match=rf"step 4 \(epoch 1\).*stage {stage}.*before step 4"):
        search(net, loss=loss, on_record=lambda record: good.append((record.step, bits(net))), log_every=2)
    assert good[-1][0] == 3
    assert bits(net).items() >= good[-1][1].items()  # but for counts of batches, which a search leaves alone


def test_batches_that_are_not_finite_stop_the_search() -> None:
    batches = [*Noise(), *((x / 0, y) for x, y in Noise())]
    with pytest.raises(DataError, match=r"step 2 .*nan.*check the data"):
        search(supernet(), batches)


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({"groups": 10}, WidthsError),
        ({"budget": "1%"}, BudgetError),
        ({"budget": "90%", "max_channels": {"stem": 4}}, BudgetError),
        ({"min_channels": 7, "budget": "40%"}, BudgetError),
        ({"min_channels": 99, "budget": "100%"}, WidthsError),
        ({"task_loss": False, "arch_loader": Noise()}, TrainingError),
        ({"loader": (batch for batch in Noise())}, DataError),
    ],
    ids=lambda it: ",".join(it) if isinstance(it, dict) else None,
)
def test_settings_that_do_not_fit(settings: Any, kind: type[DmcpError]) -> None:
    net = supernet()
    before = bits(net)
    with pytest.raises(kind):
        search(net, **settings)
    assert bits(net) == before


# the same twenty steps on every engine: eager, compiled, replayed as CUDA graphs, in bfloat16

GPU = torch.cuda.is_available()
ENGINES = {
    "compiled": (dataclasses.replace(EAGER, compile=True, channels_last=True), 1e-4),
    "bfloat16": (dmcp.Engine(precision="bfloat16", compile=True, graphs=True, channels_last=True), 3e-2),  # type: ignore[arg-type]
}
if GPU:
    ENGINES["graphs"] = (dataclasses.replace(EAGER, graphs=True), 1e-4)
    ENGINES["kernels"] = (dmcp.Engine(compile=False, graphs=True, kernels=True), 3e-2)
    ENGINES["compiled, graphs"] = (dataclasses.replace(EAGER, compile=True, graphs=True, channels_last=True), 1e-4)


@functools.cache
def eager() -> Tensor:
    return losses(search_pictures(EAGER)[1])


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # dynamo's
@pytest.mark.parametrize("name", [pytest.param(it, marks=() if GPU else pytest.mark.slow) for it in ENGINES])
def test_twenty_steps_on_every_engine(name: str) -> None:
    engine, tolerance = ENGINES[name]
    net, result = search_pictures(engine)
    assert (eager()[-1] - eager()[0]).abs().max() > 0.1  # they move
    assert ((losses(result) - eager()).abs() / eager().amax(dim=1, keepdim=True)).max() < tolerance
    resolved, x = resolve(engine, DEVICE, steps=10**6), pictures(count=1)[0][0]
    widths = net.graph.widths({space.name: max(1, 2 * space.size // 3) for space in net.graph.spaces})
    with torch.no_grad(), resolved.running(net.model), resolved.autocast():
        net.train()
        gated = resolved.compiled(lambda x, gates: net(x, gates))(resolved.laid_out(x), net.hard(widths)).float()
        cut = dmcp.cut(net.model, net.graph, widths).train()(resolved.laid_out(x)).float()
    assert (gated - cut).abs().max() / cut.abs().max() < tolerance


def test_a_front_starts_at_the_budget_with_one_peak_and_grows_sharper() -> None:
    torch.manual_seed(0)
    model = models.build("cifar:resnet20")
    graph = dmcp.trace(model, torch.zeros(2, 3, 32, 32))
    net = dmcp.Supernet(model, graph)
    budget = parse_budget("40%", graph)
    none = torch.zeros(net.alpha.shape, dtype=torch.bool)
    start = front_alphas(budget, graph, net.sizes, none)
    assert ratios(budget, graph, marginals(start), net.sizes).item() == pytest.approx(1, abs=1e-6)
    widths = sample_groups(start, net.sizes, 2000, torch.Generator().manual_seed(0))
    for own, size in zip(widths.T, net.sizes.sum(dim=1), strict=True):  # the middle is likely, both ends are not
        assert (own == size).double().mean() < 0.05 and (own <= size / 10 + 1).double().mean() < 0.05
    images = torch.randn(8, 3, 32, 32), torch.randint(10, (8,))
    settings = {"budget": "40%", "epochs": 4, "init": "front", "alpha_lr": 0.0, "alpha_min_lr": 0.0}
    found = dmcp.search(net, [images], SearchConfig(**settings, sharpen=3.0))
    torch.testing.assert_close(found.alphas, 3 * start.float())


# a search that a loop of the user's drives


def looped(task: dmcp.Task = TASKS[0], **settings: Any) -> tuple[dmcp.Supernet, dmcp.Searcher, list[Any], SearchConfig]:
    net, batches, plain = dmcp.Supernet(*traced_residual(), 4), Noise().batches, {"momentum": 0.0, "weight_decay": 0.0}
    config = SearchConfig(budget="60%", epochs=4, groups=4, alpha_momentum=0.0, **plain, **settings)
    return net, dmcp.Searcher(net, config, len(batches), task=task), batches, config


@pytest.mark.parametrize("task", TASKS, ids=["default loss", "own loss"])
def test_a_searcher_does_what_search_does_also_from_a_saved_state(task: dmcp.Task) -> None:
    net, _, batches, config = looped(task)
    found = dmcp.search(net, batches, config, task=task)
    own, searcher, _, _ = looped(task)
    state: dict[str, Any] = {}
    for step in range(8):
        record = searcher.step(batches[step % 2])
        assert record.step == step and (record.ratios is not None) == (step >= 4) == searcher.moves_alphas
        if step == 4:
            state = copy.deepcopy(searcher.state_dict())
    assert torch.equal(searcher.result().alphas, found.alphas)
    other, again, _, _ = looped(task)
    again.load_state_dict(state)
    for step in range(5, 8):
        again.step(batches[step % 2])
    for one in (own, other):
        pairs = zip(one.state_dict().values(), net.state_dict().values(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs if a.is_floating_point())  # search counts no batches of norms
    with pytest.raises(TrainingError, match="8 steps"):
        again.step(batches[0])


@pytest.mark.parametrize("task", TASKS, ids=["default loss", "own loss"])
@pytest.mark.parametrize("sharpen", [1.0, 3.0])
def test_losses_of_a_searcher_have_the_gradients_of_its_steps(sharpen: float, task: dmcp.Task) -> None:
    net, searcher, batches, config = looped(task, sharpen=sharpen)
    own, driven, _, _ = looped(task, sharpen=sharpen)
    sizes: list[float] = []  # of the loss
    for call in (lambda: driven.arch_loss(batches[0]), lambda: dmcp.Searcher(own, config, steps_per_epoch=0)):
        with pytest.raises(TrainingError, match=r"weight_loss|steps_per_epoch"):
            call()
    weights = torch.optim.SGD(own.weights())
    alphas = torch.optim.SGD(own.alphas())
    for step in range(8):
        record = searcher.step(batches[step % 2])
        for group, lr in ((weights, record.lr), (alphas, record.alpha_lr)):
            group.param_groups[0]["lr"] = lr or 0.0
        weights.zero_grad()
        loss = driven.weight_loss(batches[step % 2])
        assert loss.item() == pytest.approx(sum(record.weight_losses or ()))
        loss.backward()
        weights.step()
        if not driven.moves_alphas:
            with pytest.raises(TrainingError):
                driven.arch_loss(batches[step % 2])
            continue
        alphas.zero_grad()
        before = [tensor.clone() for tensor in own.model.state_dict().values()]
        loss = driven.arch_loss(batches[step % 2])
        assert record.task_loss is not None and record.budget_loss is not None
        sizes.append(record.task_loss)
        unit = 1.0 if task.loss is None else statistics.fmean(sizes)
        assert loss.item() == pytest.approx(record.task_loss / unit + 0.1 * record.budget_loss)
        loss.backward()
        alphas.step()
        assert all(torch.equal(a, b) for a, b in zip(before, own.model.state_dict().values(), strict=True))
    torch.testing.assert_close(driven.result().alphas, searcher.result().alphas)  # all growth is in the result
    for a, b in zip(net.state_dict().values(), own.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)
