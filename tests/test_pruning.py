"""The whole job: the budget holds on the cut network, nothing of the user's changes, same seed, same bits."""

from __future__ import annotations

import copy
import functools
import math
import random
import re
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from nets import Residual, sample
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.flop_counter import FlopCounterMode

import dmcp
from dmcp import results
from dmcp.batches import generator
from dmcp.budget import parse
from dmcp.errors import BudgetError, DataError, TraceError, TrainingError, WidthsError
from dmcp.losses import DistillationWarning, classification_loss, distillation_loss
from dmcp.preflight import try_test
from dmcp.pruning import expected_shares
from dmcp.results import DMCP, ORIGINAL, UNIFORM, UNPRUNED, Row, milliseconds, not_faster
from dmcp.retraining import train_all
from dmcp.searching.config import SearchRecord
from dmcp.searching.steps import weight_step
from dmcp.settings import Retrain, SearchConfig, TrainConfig
from dmcp.tracing.graph import ChannelGraph
from dmcp.training import Event

SEARCH = SearchConfig(budget="60%", epochs=2, groups=4)
TRAIN = TrainConfig(epochs=1, reference_batch=None, lr=0.05, warmup_lr=0.05)


class Noise:
    """Batches of noise; remembers how often it was gone through."""

    def __init__(self, count: int = 2, samples: int = 6) -> None:
        draw = torch.Generator().manual_seed(0)
        self.batches = [
            (torch.randn(samples, *Residual.SHAPE, generator=draw), torch.randint(5, (samples,), generator=draw))
            for _ in range(count)
        ]
        self.passes = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return iter(self.batches)


@functools.cache
def traced() -> tuple[nn.Module, ChannelGraph]:
    torch.manual_seed(0)
    model = Residual(**Residual.FULL)
    return model, dmcp.trace(model, sample(Residual.SHAPE).float())


def prune(**options: Any) -> dmcp.PruneResult:
    model, graph = traced()
    return dmcp.prune(model, Noise(), Noise(1), graph=graph, **{"search": SEARCH, "train": TRAIN} | options)


def tensors(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_labels_that_no_output_is_for_are_refused_before_the_search() -> None:
    """torch says `Target 5 is out of bounds`, and on a GPU nothing that helps."""
    (model, graph), high = traced(), Noise()
    high.batches = [(x, y + 1) for x, y in high.batches]  # numbered from 1
    how = {"search": SEARCH, "train": TRAIN, "graph": graph}
    with pytest.raises(DataError, match="A label is 5, but the network has 5 outputs, for labels from 0 to 4: number"):
        dmcp.prune(model, high, Noise(1), **how)
    shares = Noise()
    shares.batches = [(x, torch.eye(5)[y] * 7) for x, y in shares.batches]  # not class numbers
    dmcp.prune(model, shares, Noise(1), **how)


@pytest.mark.parametrize("kind", list(Retrain))
@pytest.mark.parametrize("budget", ["60%", "70%,params:50%"])
def test_the_budget_holds_on_the_cut_network(kind: Retrain, budget: str) -> None:
    model, graph = traced()
    before = tensors(model)
    result = prune(search=SearchConfig(budget=budget, epochs=2, groups=4), retrain=kind, baselines=True)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        result.model.eval()(torch.zeros(1, *Residual.SHAPE))
    counted = {
        "macs": counter.get_total_flops() // 2,
        "params": sum(parameter.numel() for parameter in result.model.parameters()),
    }
    limits = parse(budget, graph).limits
    assert all(counted[limit.kind] <= limit.target for limit in limits)
    assert max(counted[limit.kind] / limit.target for limit in limits) >= 0.9  # not just anything small
    given = [ORIGINAL] if kind is Retrain.FINETUNE else []
    assert [row.name for row in result.rows] == [*given, UNPRUNED, UNIFORM, DMCP]
    full, uniform, ours = result.rows[len(given) :]
    assert (ours.macs, ours.params) == (counted["macs"], counted["params"])
    assert all({"macs": uniform.macs, "params": uniform.params}[limit.kind] <= limit.target for limit in limits)
    assert (full.macs, full.params) == (graph.macs(), graph.params())
    assert type(result.model) is Residual
    assert same(before, tensors(model)) and all(parameter.grad is None for parameter in model.parameters())
    assert all(name in result.table for name in (UNPRUNED, UNIFORM, DMCP, f"{ours.macs:,}"))


def test_bounds_hold_for_the_control_too() -> None:
    """Uniform widths at this budget would keep about 5 of 8 and 4 of 6 channels."""
    _, graph = traced()
    seen: dict[str, Any] = {}
    bounded = replace(SEARCH, min_channels={"stem": 8}, max_channels={"conv1": 2})

    def keep_widths(*given: Any) -> Any:
        seen.update(given[2])
        return train_all(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dmcp.pruning.train_all", keep_widths)
        prune(search=bounded, baselines=True)
    for name in (UNIFORM, DMCP):
        assert seen[name]["stem"] == 8 and seen[name]["conv1"] <= 2, name
        assert graph.macs(seen[name]) <= 0.6 * graph.macs()
    free = dmcp.uniform(graph, "60%")
    assert free["stem"] < 8 and free["conv1"] > 2


def test_same_seed_same_bits_and_another_seed_others() -> None:
    one, again, other = prune(seed=3), prune(seed=3), prune(seed=4)
    assert one.widths == again.widths
    assert same(tensors(one.model), tensors(again.model))
    assert torch.equal(one.search.alphas, again.search.alphas)
    assert not torch.equal(one.search.alphas, other.search.alphas)


def test_the_test_set_is_used_once_everything_is_trained() -> None:
    model, graph = traced()
    test = Noise(1)
    seen: list[tuple[Event, int]] = []
    dmcp.prune(
        model,
        Noise(),
        test,
        graph=graph,
        search=SEARCH,
        train=TRAIN,
        baselines=True,
        runtime=dmcp.Runtime(on_event=lambda event: seen.append((event, test.passes))),
    )
    assert [passes for event, passes in seen if not isinstance(event.record, Row)] == [0] * 11  # 4 + 1 + 3 x 2
    assert [passes for event, passes in seen if isinstance(event.record, Row)] == [1, 2, 3]  # the trial leaves no trace
    assert [event.steps for event, _ in seen if isinstance(event.record, SearchRecord)] == [4] * 4


# what would fail once everything is trained fails before the first step


class CallerError(Exception):
    """Of the caller's own metric."""


def failing_metric(output: Tensor, batch: Any) -> Any:
    raise CallerError


LATE: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"val": []}, TrainingError, "nothing to evaluate on"),
    ({"val": [(torch.zeros(0, *Residual.SHAPE), torch.zeros(0))]}, TrainingError, "nothing to evaluate on"),
    ({"val": [{"image": torch.zeros(2, *Residual.SHAPE)}]}, DataError, "has no input, only 'image'"),
    ({"val": None}, DataError, "NoneType does not: give a DataLoader"),
    ({"metric": lambda output, batch: 0.5}, TrainingError, "A metric must return two things"),
    ({"metric": failing_metric}, CallerError, ""),
    ({"val": (it for it in Noise(1)), "baselines": True}, DataError, "3 networks are tested"),
    ({"val": (it for it in Noise(1)), "retrain": "finetune"}, DataError, "2 networks are tested"),
    ({"train_loader": []}, DataError, "The train_loader has no batches"),
    ({"train_loader": [{"image": torch.zeros(2, 3)}]}, DataError, "has no input, only 'image'"),
    ({"arch_loader": [{"image": torch.zeros(2, 3)}]}, DataError, "has no input, only 'image'"),
    ({"keep": "kept"}, TrainingError, "keep must be a function, not a str"),
    ({"keep": lambda stage: stage}, TrainingError, "keep must give a dmcp.Keeper for each stage, not a str"),
    ({"loss": "mse"}, TrainingError, "loss must be a function, not a str"),
    ({"metric": "iou"}, TrainingError, "metric must be a function, not a str"),
    ({"train": {"epochs": 3}}, TrainingError, "train must be a dmcp.TrainConfig, not a dict"),
    ({"search": {"epochs": 3}}, TrainingError, "search must be a dmcp.SearchConfig, not a dict"),
    ({"engine": "cuda"}, TrainingError, "engine must be a dmcp.Engine, not a str"),
    ({"fresh": nn.Linear(2, 2)}, WidthsError, "fresh is a network of another architecture than the model"),
    ({"arch_loader": (it for it in Noise(1))}, DataError, "The arch_loader, a generator, has no length"),
]


@pytest.mark.parametrize(("options", "kind", "message"), LATE)
def test_what_is_wrong_with_the_test_is_said_before_the_first_step(
    options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    model, graph = traced()
    seen: list[Event] = []
    how = {"search": SEARCH, "train": TRAIN, "graph": graph} | {k: v for k, v in options.items() if k != "val"}
    with pytest.raises(kind, match=message or None):
        dmcp.prune(model, Noise(), options.get("val", Noise(1)), **how, runtime=dmcp.Runtime(on_event=seen.append))
    assert not seen


class Stateful(Residual):
    """Counts its calls in a buffer, and draws a random number in each."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) + 0 * torch.rand(1)


class Drawing(Dataset[tuple[Tensor, int]]):
    """Images with noise of all global generators."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        return torch.randn(Residual.SHAPE) + random.gauss(0, 1) + float(np.random.normal()), place % 5


def drawing(own: bool) -> DataLoader[Any]:
    return DataLoader(Drawing(), 4, shuffle=True, generator=torch.Generator().manual_seed(1) if own else None)


@pytest.mark.parametrize("own", [False, True])
def test_the_trial_of_the_test_changes_no_bit(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where training and test share a loader, and the metric itself draws."""

    def metric(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return (output.argmax(1) == batch[1]).sum() + torch.rand(()) + random.random() + np.random.rand(), len(output)

    def run() -> Any:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(0)
        model, loader = Stateful(**Residual.FULL).train(), drawing(own)
        model.stem.eval()
        before = tensors(model)
        result = dmcp.prune(model, loader, loader, search=SEARCH, train=TRAIN, task=dmcp.Task(metric=metric))
        assert same(before, tensors(model)) and model.training and not model.stem.training
        mine = [loader.generator.get_state().tolist()] if own else []
        after = [torch.rand(1).item(), random.random(), np.random.rand(), *mine]
        return [it.tolist() for it in tensors(result.model)], [row.accuracy for row in result.rows], after

    tried = run()
    monkeypatch.setattr("dmcp.pruning.try_test", lambda *_: None)
    assert run() == tried


@pytest.mark.slow
def test_the_trial_leaves_workers_that_live_on_alone() -> None:
    loader = DataLoader(Drawing(), 4, num_workers=1, persistent_workers=True)
    next(iter(loader))
    workers = loader._iterator
    try_test(Residual(**Residual.FULL), loader, None)
    assert loader._iterator is workers
    fresh = DataLoader(Drawing(), 4, num_workers=1, persistent_workers=True)
    try_test(Residual(**Residual.FULL), fresh, None)
    assert fresh._iterator is None


class Once(IterableDataset[Any]):
    """Hands out the same generator each time."""

    def __init__(self) -> None:
        self.samples = ((x, y) for batch in Noise(2).batches for x, y in zip(*batch, strict=True))

    def __iter__(self) -> Iterator[Any]:
        return self.samples


@pytest.mark.parametrize("kind", ["generator", "stream"])
def test_batches_that_come_once_are_all_tested(kind: str) -> None:
    model, graph = traced()
    test = (it for it in Noise(2)) if kind == "generator" else DataLoader(Once(), 6)
    result = dmcp.prune(model, Noise(), test, graph=graph, search=SEARCH, train=TRAIN)
    assert result.rows[0].samples == 12


def test_what_cannot_be_trained_is_a_sentence() -> None:
    model, graph = traced()
    still = copy.deepcopy(model).requires_grad_(False)
    with pytest.raises(TrainingError, match=r"call model.requires_grad_\(True\)"):
        dmcp.prune(still, Noise(), Noise(1), graph=graph, search=SEARCH, train=TRAIN)
    for loader in (DataLoader(Once(), 6), (it for it in Noise(2))):
        with pytest.raises(DataError, match=r"has no length: give something with __len__"):
            dmcp.prune(model, loader, Noise(1), graph=graph, search=SEARCH, train=TRAIN)
    next(iter(loader))  # nothing was lost


def test_slimmable_training_is_one_weight_step_of_two_networks() -> None:
    """Each step equals stage 1 on the largest and the pruned network: accumulated gradients, one optimizer step."""
    model, graph = traced()
    widths = graph.widths({space.name: max(1, space.size // 2) for space in graph.spaces})
    config = TrainConfig(
        epochs=1, reference_batch=None, lr=0.1, warmup_lr=0, warmup_epochs=0, weight_decay=0, label_smoothing=0
    )
    loader = Noise(1)
    got = train_all(model, graph, {DMCP: widths}, loader, config, Retrain.SLIMMABLE)[DMCP]

    whole = copy.deepcopy(model)
    dmcp.reinitialize(whole, generator=generator(config.seed))
    net = dmcp.Supernet(whole, graph).train()
    optimizer = torch.optim.SGD(net.weights(), 0.1, 0.9, nesterov=True)
    weight_step(net, loader.batches, optimizer, [net.hard(graph.full), net.hard(widths)], classification_loss())
    wanted = dmcp.cut(net.model, graph, widths)
    alone = train_all(model, graph, {DMCP: widths}, loader, config, Retrain.SCRATCH)[DMCP]
    for mine, theirs in zip(got.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert not same(tensors(got)[:1], tensors(alone)[:1])


def test_inheriting_keeps_the_weights_and_the_others_do_not() -> None:
    model, graph = traced()
    still = TrainConfig(epochs=1, lr=1e-20, warmup_lr=0, reference_batch=None, weight_decay=0)
    for kind in (Retrain.FINETUNE, Retrain.SCRATCH):
        nets = train_all(model, graph, {DMCP: graph.full}, Noise(), still, kind)
        pairs = zip(nets[DMCP].parameters(), model.parameters(), strict=True)
        kept = all(torch.allclose(mine, old) for mine, old in pairs)
        assert kept == (kind is Retrain.FINETUNE)


class Blurred(Residual):
    """With a blur behind the stem: a depthwise convolution of fixed weights."""

    def __init__(self) -> None:
        super().__init__(**Residual.FULL)
        self.blur = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        nn.init.constant_(self.blur.weight, 1 / 9).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blur(self.bn0(self.stem(x)).relu())
        return self.head((self.bn4(self.conv4(self.bn3(self.conv3(x)).relu()))).mean((2, 3)))


@pytest.mark.parametrize("kind", Retrain)
def test_what_is_frozen_keeps_its_values(kind: Retrain) -> None:
    torch.manual_seed(0)
    model, still = Blurred(), ("stem", "bn0", "conv3")
    for name in still:
        model.get_submodule(name).requires_grad_(False)
    order = model.stem.weight.flatten(1).norm(dim=1).argsort(descending=True)  # the stem's space has no other writer
    for fresh, sort in ((None, False), (Blurred(), False), (None, True)):
        settings = replace(SEARCH, sort=sort)
        found = dmcp.prune(model, Noise(), Noise(1), search=settings, train=TRAIN, retrain=kind, fresh=fresh)
        small, width = found.model, found.widths["stem"]
        stem = model.stem.weight[order[:width]] if sort else model.stem.weight[:width]
        assert torch.equal(small.stem.weight, stem) and small.blur.weight.unique().tolist() == [pytest.approx(1 / 9)]
        assert sort or torch.equal(small.conv3.weight, model.conv3.weight[: found.widths["conv3"], :width])
        assert not any(it.requires_grad for name in still for it in small.get_submodule(name).parameters())
    kinds = {UNPRUNED: found.graph.full, UNIFORM: dmcp.uniform(found.graph, "60%")}
    for net in train_all(model, found.graph, kinds, Noise(), TRAIN, kind).values():
        assert torch.equal(net.stem.weight, model.stem.weight[: len(net.stem.weight)])


def test_a_teacher_teaches() -> None:
    plain, taught = prune(), prune(teacher="unpruned")
    assert plain.widths == taught.widths
    assert [row.name for row in taught.rows] == [UNPRUNED, DMCP]  # the teacher was trained, so it is shown
    assert not same(tensors(plain.model), tensors(taught.model))


def test_own_loss_metric_and_batches() -> None:
    """A dict as batch, a loss that is no classification, a metric that is no accuracy."""
    model, _ = traced()
    batches = [{"input": x, "wanted": x.mean(dim=(1, 2, 3))} for x, _ in Noise().batches]

    def loss(output: Tensor, batch: Any) -> Tensor:
        return (output[:, 0] - batch["wanted"]).square().mean()

    def metric(output: Tensor, batch: Any) -> tuple[Tensor, int]:
        return torch.tensor(7.0 * len(output)), len(output)

    settings = replace(SEARCH, distill=False)
    result = dmcp.prune(model, batches, batches, search=settings, train=TRAIN, task=dmcp.Task(loss=loss, metric=metric))
    assert result.rows[0].accuracy == 7 and result.rows[0].own_metric and result.rows[0].samples == 12
    head, ours, *_ = result.table.splitlines()
    assert "metric" in head and "accuracy" not in head
    assert ours.split()[-2] == "7" and "points" not in result.table
    assert not result.rows[0].lower_is_better
    lower = dmcp.LowerIsBetter(metric)
    result = dmcp.prune(model, batches, batches, search=settings, train=TRAIN, task=dmcp.Task(loss=loss, metric=lower))
    assert result.rows[0].lower_is_better and "metric (lower is better)" in result.table
    with pytest.raises(TrainingError, match="LowerIsBetter takes a metric, a function of output and batch, not"):
        dmcp.LowerIsBetter(0.5)  # type: ignore[arg-type]


def test_a_loss_of_ones_own_is_told_what_imitation_does_to_outputs() -> None:
    own = classification_loss()
    for options, words in (
        ({}, [r"sub-networks imitate the whole network's outputs as class scores .* set distill=False"]),
        ({"distill": False}, []),
        ({"train_weights": False, "warmup": 0}, []),  # nothing is imitated
    ):
        for kind in (Retrain.SCRATCH, Retrain.TEACHER):
            wanted = [*([r'With retrain="teacher" .* class scores'] if kind is Retrain.TEACHER else []), *words]
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                prune(search=replace(SEARCH, **options), retrain=kind, task=dmcp.Task(loss=own))
            assert len(told) == len(wanted) and all(it.category is DistillationWarning for it in told)
            assert all(re.search(text, str(it.message)) for text, it in zip(wanted, told, strict=True))
            assert all(it.filename == __file__ for it in told)  # where the user called, not a line of ours


def test_a_training_that_stops_says_which_network_it_was() -> None:
    def loss_until(last: str) -> tuple[Any, Any]:
        stages: list[str] = []

        def loss(output: Tensor, batch: Any) -> Tensor:
            value = classification_loss()(output, batch)
            return value * math.inf if stages and stages[-1] == last else value

        return loss, lambda event: stages.append(event.stage)

    settings = replace(SEARCH, distill=False)
    loss, look = loss_until(UNPRUNED)  # from then on
    with pytest.raises(
        TrainingError, match=r"^The network 'uniform widths': Training stopped at step 0 .* loss is inf"
    ):
        prune(search=settings, baselines=True, task=dmcp.Task(loss=loss), runtime=dmcp.Runtime(on_event=look))
    loss, look = loss_until("search")
    with pytest.raises(TrainingError, match=r"^Training stopped at step 0 .* loss is inf"):
        prune(search=settings, task=dmcp.Task(loss=loss), runtime=dmcp.Runtime(on_event=look))


def test_a_search_warns_at_the_line_of_its_caller() -> None:
    model, graph = traced()
    net = dmcp.Supernet(model, graph, groups=SEARCH.groups)
    with pytest.warns(DistillationWarning) as told:
        dmcp.search(net, Noise(), SEARCH, task=dmcp.Task(loss=classification_loss()))
    assert [it.filename for it in told] == [__file__]


@pytest.mark.filterwarnings("ignore::dmcp.losses.DistillationWarning")
@pytest.mark.parametrize("kind", [Retrain.SLIMMABLE])
def test_a_retraining_that_cannot_imitate_is_refused_before_the_search(kind: Retrain) -> None:
    class Ages(Residual):  # in training only: what is tested could be imitated
        def forward(self, x: Tensor) -> Any:
            found = super().forward(x)
            return {"classes": found, "age": found.mean(dim=1)} if self.training else found

    def loss(output: Any, batch: Any) -> Tensor:
        return classification_loss()(output["classes"], batch)

    model, seen = Ages(**Residual.FULL), list[Event]()
    before = tensors(model)
    with pytest.raises(TrainingError, match=r'Imitation needs .* \(2,\).* retrain="scratch" or "inherit"'):
        dmcp.prune(
            model,
            Noise(),
            Noise(1),
            search=replace(SEARCH, distill=False),
            train=TRAIN,
            retrain=kind,
            task=dmcp.Task(loss=loss),
            runtime=dmcp.Runtime(on_event=seen.append),
        )
    assert not seen and same(before, tensors(model))


def test_a_class_is_no_network() -> None:
    with pytest.raises(TraceError, match=r"A torch.nn.Module is needed, not the class Residual: build one, Residual\("):
        dmcp.prune(Residual, Noise(), Noise(1))  # type: ignore[arg-type]


def test_batches_of_arrays_are_named() -> None:
    arrays = [(np.zeros((4, *Residual.SHAPE), np.float32), np.zeros(4))]
    with pytest.raises(DataError, match="The input of a batch holds no tensor, but is a ndarray: let the loader"):
        dmcp.prune(traced()[0], arrays, arrays, search=SEARCH, train=TRAIN)


def test_outputs_of_one_number_cannot_be_imitated() -> None:
    with pytest.raises(TrainingError, match="turn it off, in a search with distill=False"):
        distillation_loss(torch.zeros(4, 1), [torch.zeros(4, 1)])


def test_expected_shares_are_those_of_the_last_alphas() -> None:
    found = prune().search
    many = found.process.sample(found.alphas, found.sizes, 20_000, torch.Generator().manual_seed(0))
    mean = found.graph.macs(many).double().mean().item() / found.budget.limits[0].target
    assert expected_shares(found)[0] == pytest.approx(mean, rel=0.02)


@pytest.mark.parametrize(("ms", "odd", "told"), [(9, 2, True), (8, 2, False), (20, 3, True), (20, 1, False)])
def test_odd_widths_are_named_where_no_time_was_gained(
    ms: float, odd: int, told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # in tests nothing is slow
    graph = dmcp.trace(nn.Sequential(*(nn.Conv1d(24 if it else 1, 24, 1) for it in range(4))), torch.zeros(2, 1, 8))
    widths = {space.name: 16 + (number < odd) for number, space in enumerate(graph.spaces)}
    assert bool(not_faster(ms, 10, graph, widths)) == told and len(widths) == 3
    assert not not_faster(20, 10, graph, graph.full)
    wide = [replace(space, unit=4) for space in graph.spaces]  # two of each are eight channels
    assert not not_faster(20, 10, replace(graph, spaces=tuple(wide)), dict.fromkeys(widths, 18))


def test_times_are_of_each_network_and_leave_its_mode() -> None:
    slow = nn.Sequential(*(nn.Linear(256, 256) for _ in range(40))).train()
    quick = nn.Linear(256, 256).eval()
    times = milliseconds([slow, quick], torch.zeros(64, 256))
    assert times[0] > times[1] > 0
    assert slow.training and not quick.training


def test_a_device_that_cannot_be_waited_for_is_timed_all_the_same() -> None:
    (took,) = milliseconds([nn.Linear(2, 2, device="meta")], torch.zeros(1, 2, device="meta"))
    assert took > 0


def test_only_the_pass_is_in_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that also goes on while somebody looks where the network is, or puts its mode back."""
    now = [0.0]

    class Slow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            now[0] += 0.002
            return super().forward(x)

        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            now[0] += 0.05
            return super().parameters(recurse)

        def __setattr__(self, name: str, value: Any) -> None:
            now[0] += 0.05
            super().__setattr__(name, value)

    monkeypatch.setattr(results.time, "perf_counter", lambda: now[0])
    assert milliseconds([Slow(2, 2)], torch.zeros(1, 2)) == pytest.approx([2.0])


def test_bad_input_is_a_sentence() -> None:
    model, graph = traced()
    with pytest.raises(BudgetError, match="Two budgets were given"):
        prune(budget="40%")
    with pytest.raises(BudgetError, match="choose from"):
        prune(search=SearchConfig(budget=3, groups=4))
    with pytest.raises(DataError, match="no batches"):
        dmcp.prune(model, [], [], graph=graph)
    with pytest.raises(TrainingError, match="scratch, inherit, slimmable, teacher, not 'often'"):
        prune(retrain="often")
    with pytest.raises(TrainingError, match="stage 1"):
        prune(
            search=replace(SEARCH, distill=False),
            task=dmcp.Task(loss=lambda output, batch: output.sum() * float("nan")),
        )


def test_a_network_over_the_budget_is_not_handed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should sampling ever fail, the count on the cut network finds it."""
    monkeypatch.setattr("dmcp.pruning.expected", lambda found: found.graph.full)
    with pytest.raises(BudgetError, match="more than the"):
        prune()
