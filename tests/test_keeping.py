"""A loop that is left anywhere and entered again is the same loop, also with a user's own loader, loss and dropout."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from dmcp import checkpoint
from dmcp.checkpoint import (
    Checkpointer,
    ResumableIterator,
    State,
    load_checkpoint,
    random_state,
    set_random_state,
    state_tensors,
    untouched,
)
from dmcp.errors import DataError, FileError, StoppedError, TrainingError
from dmcp.pruning import Loaders, prune
from dmcp.runtime.distributed import SINGLE_PROCESS, World
from dmcp.searching.search import search
from dmcp.settings import Engine, SearchConfig, TrainConfig
from dmcp.supernet import Supernet
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.trace import trace
from dmcp.training import Runtime, Task, train

CPU = torch.device("cpu")
SETTLED = Engine().resolve(CPU)

pytestmark = pytest.mark.filterwarnings("ignore::dmcp.losses.DistillationWarning")  # losses here only count and break


class Noisy(Dataset[tuple[Tensor, int]]):
    """Images that no two looks give the same: all three global generators are in them."""

    def __init__(self, count: int) -> None:
        self.images = torch.randn(count, 1, 6, 6, generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        noise = torch.randn(1, 6, 6) + random.gauss(0, 1) + np.random.normal()
        return self.images[place] + 0.3 * noise.float(), place % 4


def shuffled(count: int, batch: int = 8) -> DataLoader[Any]:
    return DataLoader(Noisy(count), batch, shuffle=True)


class Replayed:
    """A loader that could save its state, had anybody asked; it counts what it drew."""

    def __init__(self, count: int) -> None:
        self.loader, self.drawn = shuffled(count), 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self.drawn += 1
            yield batch

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("nobody asks for it")


class Direct:
    """A loader that can be entered anywhere, in an order of each epoch's own."""

    def __init__(self, count: int) -> None:
        self.count, self.epoch, self.drawn = count, 0, 0

    def __len__(self) -> int:
        return self.count

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Any]:
        return self.starting_at(0)

    def starting_at(self, skip: int) -> Iterator[Any]:
        for number in range(skip, self.count):
            self.drawn += 1
            yield torch.tensor([[100 * self.epoch + number]]), torch.tensor([0])


def tiny() -> nn.Sequential:
    first = [nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(6, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3)]
    return nn.Sequential(*first, *second, nn.Linear(8, 4))


def fresh() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return tiny()


class CrashError(Exception):
    """Stands for whatever ends a process."""


Act = Callable[[Tensor, list[bool]], Tensor]  # (loss, where a wish to stop is kept) -> loss


def crash(loss: Tensor, asked: list[bool]) -> Tensor:
    raise CrashError


def ask(loss: Tensor, asked: list[bool]) -> Tensor:
    asked.append(True)
    return loss


def no_number(loss: Tensor, asked: list[bool]) -> Tensor:
    return loss * float("nan")


def loss_that(act: Act, call: int, asked: list[bool]) -> Callable[[Any, Any], Tensor]:
    """Cross-entropy, but in this call what `act` makes of it."""
    calls = itertools.count(1)

    def loss(output: Any, batch: Any) -> Tensor:
        found = F.cross_entropy(output, batch[1])
        return act(found, asked) if next(calls) == call else found

    return loss


def state_of(model: nn.Module) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def seeded(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


# the global generators


def draw() -> list[Any]:
    mine = [torch.rand(2).tolist(), torch.randn(1).item(), random.random(), random.gauss(0, 1), random.randbytes(3)]
    return [*mine, np.random.rand(), np.random.normal(), np.random.randint(9)]


@pytest.mark.parametrize("before", [0, 1, 2])
def test_the_global_generators_come_back(before: int) -> None:
    for _ in range(before):  # the gauss of both libraries keeps every second number
        random.gauss(0, 1)
        np.random.normal()
    state = {name: tensor.clone() for name, tensor in random_state(CPU).items()}
    first = [draw(), draw()]
    seeded(7)
    assert draw() not in first
    set_random_state(state, CPU)
    assert [draw(), draw()] == first


@pytest.mark.parametrize("rank", [0, 1])
def test_generators_are_seeded_and_put_back(rank: int) -> None:
    before = torch.get_rng_state()
    drawn = []
    for seed in (3, 3, 4):
        with checkpoint.seeded(seed, CPU, World(rank, 2)):
            drawn.append(torch.rand(1).item())
        assert torch.equal(torch.get_rng_state(), before)
    assert drawn[0] == drawn[1] != drawn[2]
    assert (drawn[0] == torch.rand(1, generator=torch.Generator().manual_seed(3)).item()) == (rank == 0)


def test_a_gpu_that_takes_no_state_hides_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for one: after an assert of its own every call raises."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("CUDA error")

    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda _: torch.zeros(16))
    monkeypatch.setattr(torch.cuda, "set_rng_state", refuse)
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda _: None)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    gpu, before = torch.device("cuda"), torch.get_rng_state()
    with pytest.raises(ValueError, match="the first one"), checkpoint.seeded(0, gpu, World()):
        raise ValueError("the first one")
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(RuntimeError, match="CUDA error"), checkpoint.seeded(0, gpu, World()):
        pass
    with pytest.raises(ValueError, match="of a metric"), untouched([], gpu):
        raise ValueError("of a metric")


class Drawn:
    """A loader with generators of every kind, and a counter."""

    def __init__(self) -> None:
        self.mine, self.numpy, self.python = torch.Generator(), np.random.default_rng(0), random.Random(0)
        self.old, self.passes = np.random.RandomState(0), 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        own = [torch.rand(1, generator=self.mine).item(), self.numpy.random(), self.python.random(), self.old.rand()]
        return iter([self.passes, *own, *draw()])


def test_a_look_at_batches_leaves_no_trace() -> None:
    loader = Drawn()
    seeded(0)
    with untouched(loader, CPU):
        first = list(loader)
    assert list(loader) == first and list(loader) != first


# batches


@pytest.mark.parametrize("accumulate", [1, 2, 3, 9])
@pytest.mark.parametrize("kind", [Direct, Replayed])
def test_a_feed_can_be_entered_at_any_step(kind: type[Any], accumulate: int) -> None:
    count = 5 if kind is Direct else 38  # of which a DataLoader makes five batches, the last one smaller
    seeded(3)
    feed = ResumableIterator(kind(count), SETTLED, SINGLE_PROCESS, accumulate)
    assert feed.per_epoch == -(-5 // accumulate)
    places, states, steps = [], [], 3 * feed.per_epoch
    for _ in range(steps):
        states.append((feed.start, feed.random_state()))
        places.append([[part.tolist() for part in batch] for batch in feed.next()])
    assert [len(place) for place in places[: feed.per_epoch]] == [accumulate] * (5 // accumulate) + [5 % accumulate] * (
        5 % accumulate > 0
    )
    assert places[0] != places[feed.per_epoch]
    for step in range(steps):
        loader = kind(count)
        again = ResumableIterator(loader, SETTLED, SINGLE_PROCESS, accumulate)
        seeded(step)
        again.enter(step, *states[step])
        set_random_state(states[step][1], CPU)
        drawn = loader.drawn
        assert drawn == (0 if kind is Direct else accumulate * (step % feed.per_epoch))
        rest = [[[part.tolist() for part in batch] for batch in again.next()] for _ in range(step, steps)]
        assert rest == places[step:]


def test_a_loader_that_gives_less_than_it_says_is_refused() -> None:
    with pytest.raises(DataError, match="The loader has no batches"):
        ResumableIterator([], SETTLED, SINGLE_PROCESS)

    class Short(Direct):
        def __len__(self) -> int:
            return 4

    feed = ResumableIterator(Short(3), SETTLED, SINGLE_PROCESS, accumulate=2)
    feed.next()
    with pytest.raises(DataError, match="it has 4 batches, but gave 3"):
        feed.next()


# when it is saved


def kept(**how: Any) -> tuple[Checkpointer, State]:
    model = nn.Linear(2, 1)
    state = State(dict(model.named_parameters()), dict, [], [], [], CPU)
    return Checkpointer(Path(tempfile.mkdtemp()), **how), state


def test_a_checkpoint_is_due_by_steps_by_time_and_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("dmcp.checkpoint.time.monotonic", lambda: now[0])
    asked: list[bool] = []
    checkpointer, state = kept(every_steps=5, every_seconds=60.0, asked_to_stop=lambda: bool(asked))
    assert [checkpointer.due(step, SINGLE_PROCESS) for step in (4, 5, 6)] == [False, True, True]
    checkpointer.save(6, state, {}, SINGLE_PROCESS)
    assert [checkpointer.due(step, SINGLE_PROCESS) for step in (10, 11)] == [False, True]
    now[0] += 59
    assert not checkpointer.due(7, SINGLE_PROCESS)
    now[0] += 1
    assert checkpointer.due(7, SINGLE_PROCESS)
    checkpointer.save(7, state, {}, SINGLE_PROCESS)
    assert not checkpointer.due(8, SINGLE_PROCESS)
    asked.append(True)
    assert checkpointer.due(8, SINGLE_PROCESS)
    with pytest.raises(StoppedError, match="Stopped after step 8, as asked"):
        checkpointer.save(8, state, {}, SINGLE_PROCESS)
    found = load_checkpoint(checkpointer.folder)
    assert found is not None and found.step == 8
    checkpointer.save(9, state, {"done": True}, SINGLE_PROCESS)  # nothing is left to stop


def test_other_settings_are_named() -> None:
    settings = {"lr": 0.1, "net": {"width": [4, 5], "depth": 3}, "old": 1}
    checkpointer, state = kept(identity=settings)
    assert checkpointer.load(SINGLE_PROCESS) is None
    checkpointer.save(3, state, {}, SINGLE_PROCESS)
    again = Checkpointer(checkpointer.folder, copy.deepcopy(settings), every_steps=10)
    assert again.load(SINGLE_PROCESS) is not None
    assert [again.due(step, SINGLE_PROCESS) for step in (12, 13)] == [False, True]  # from the checkpoint on
    other = Checkpointer(
        checkpointer.folder, {"lr": 0.2, "net": {"width": [4, 6], "depth": 3}, "new": None, "ranks": 2}
    )
    with pytest.raises(FileError) as error:
        other.load(SINGLE_PROCESS)
    named = "lr was 0.1, is 0.2; net.width was [4, 5], is [4, 6]; old was 1, is null."
    assert str(error.value).endswith(f"other settings than it began with: {named}")


# what prune compares by itself

SHORT = {
    "search": SearchConfig(budget=0.5, groups=4, epochs=2),
    "train": TrainConfig(epochs=1, warmup_epochs=0, lr=0.1, warmup_lr=0.1),
}


def pruned(folder: Path, model: nn.Module | None = None, hear: Any = None, **how: Any) -> Any:
    seeded(0)
    runtime = Runtime(checkpointer=Checkpointer(folder, every_steps=2), engine=how.pop("engine", None), on_event=hear)
    result = prune(model or fresh(), how.pop("loader", shuffled(36)), shuffled(36), runtime=runtime, **SHORT | how)
    return state_of(result.model)


OTHER_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"search": replace(SHORT["search"], seed=1)}, "search.seed was 0, is 1"),
    ({"search": replace(SHORT["search"], lr=0.1)}, "search.lr was 0.2, is 0.1"),
    ({"search": replace(SHORT["search"], budget="40%")}, 'search.budget was 0.5, is "40%"'),
    ({"search": replace(SHORT["search"], min_channels={"0": 3})}, 'search.min_channels was {}, is {"0": 3}'),
    ({"train": replace(SHORT["train"], epochs=2)}, "train.epochs was 1, is 2"),
    ({"retrain": "finetune"}, 'retrain was "scratch", is "finetune"'),
    ({"baselines": True}, "baselines was"),
    ({"loader": Loaders(search=shuffled(36), arch=shuffled(20))}, "arch_loader was false, is true"),
    ({"task": Task(optimizer=torch.optim.Adam)}, "optimizer was false, is true"),
    ({"engine": Engine(deterministic=True)}, "engine.deterministic was false, is true"),
]


def test_prune_refuses_a_folder_of_other_settings_before_the_first_step(tmp_path: Path) -> None:
    first = pruned(tmp_path)
    assert pruned(tmp_path) == first
    assert pruned(tmp_path, search=replace(SHORT["search"], log_every=3)) == first  # changes nothing
    other = fresh()
    with torch.no_grad():
        other[-1].bias[0] += 1e-3
    for how, sentence in [*OTHER_SETTINGS, ({"model": other}, "the digest of the model's weights was ")]:
        seen: list[Any] = []
        with pytest.raises(FileError) as error:
            pruned(tmp_path, hear=seen.append, **how)
        assert f"{tmp_path / 'search'}: this job was begun with other settings: {sentence}" in str(error.value)
        assert "Give another folder for a new job, or go on with what it began with" in str(error.value)
        assert ("torch.manual_seed" in str(error.value)) == ("model" in how) and not seen


def test_folders_of_an_older_version_go_on(tmp_path: Path) -> None:
    """Their checkpoints say nothing of what prune was given; nor do those of a keeper with all settings."""
    seeded(0)
    runtime = Runtime(checkpointer=Checkpointer(tmp_path, complete=True))
    first = state_of(prune(fresh(), shuffled(36), shuffled(36), runtime=runtime, **SHORT).model)
    found = load_checkpoint(tmp_path / "search")
    assert found is not None and "settings" not in found.facts
    assert pruned(tmp_path) == first
    assert pruned(tmp_path, search=replace(SHORT["search"], seed=1)) == first  # what was not kept cannot be compared


# searching and training


@functools.cache
def graph() -> ChannelGraph:
    return trace(fresh(), torch.zeros(2, 1, 6, 6))


def noting(seen: dict[int, Any]) -> Any:
    return lambda event: seen.update({event.record.step: event.record}) if hasattr(event.record, "step") else None


def kept_in(folder: Path | None, seen: dict[int, Any], asked: list[bool]) -> Checkpointer | None:
    """A keeper that finds the earlier records where `seen` has them, as a run finds them in its log."""
    if folder is None:
        return None
    earlier, stop = lambda stage: [asdict(record) for record in seen.values()], lambda: bool(asked)
    return Checkpointer(folder, every_steps=2, earlier=earlier, asked_to_stop=stop)


def searched(folder: Path | None, seen: dict[int, Any], seed: int, act: Act = crash, call: int = 0, **how: Any) -> Any:
    """All that a search comes to; the seed is that of the process, whose generators the loaders use."""
    seeded(seed)
    net = Supernet(fresh(), graph(), groups=4)
    config = SearchConfig(budget=0.5, groups=4, epochs=4, log_every=7, accumulate=how.get("accumulate", 1))
    asked: list[bool] = []
    loss = loss_that(act, call, asked)
    found = search(
        net,
        how.get("loader", shuffled)(36),
        config,
        arch_loader=shuffled(20) if how.get("arch") else None,
        task=Task(loss=loss, optimizer=how.get("optimizer")),
        runtime=Runtime(checkpointer=kept_in(folder, seen, asked), on_event=noting(seen)),
    )
    return found.alphas.tolist(), state_of(net.model), found.log, list(seen.values())


def trained(folder: Path | None, seen: dict[int, Any], seed: int, act: Act = crash, call: int = 0, **how: Any) -> Any:
    """All that a training comes to."""
    seeded(seed)
    model, teacher = fresh(), fresh() if how.get("teacher") else None
    momentum = how.get("momentum", 0.9)
    config = TrainConfig(epochs=4, lr=0.1, warmup_lr=0.1, momentum=momentum, nesterov=momentum > 0)
    asked: list[bool] = []
    loss = loss_that(act, call, asked)
    task = Task(loss=loss, optimizer=how.get("optimizer"))
    runtime = Runtime(checkpointer=kept_in(folder, seen, asked), on_event=noting(seen))
    records = train(model, how.get("loader", shuffled)(36), config, task=task, runtime=runtime, teacher=teacher)
    return state_of(model), records, list(seen.values())


def plain(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.RMSprop(groups, centered=True, momentum=0.9)


class Counting(torch.optim.SGD):
    """One whose groups and state have plain numbers that change."""

    def __init__(self, groups: Any) -> None:
        super().__init__([group | {"steps": 0} for group in groups])

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["slowed"] = 0.9 * state.get("slowed", 1.0)
                if parameter.grad is not None:
                    parameter.grad *= state["slowed"] / group["steps"]
        super().step()


WAYS: list[tuple[Any, dict[str, Any]]] = [
    (searched, {}),
    (searched, {"accumulate": 2}),
    (searched, {"arch": True}),
    (searched, {"arch": True, "accumulate": 2, "loader": Replayed}),
    (trained, {}),
    (trained, {"loader": Replayed, "momentum": 0.0}),
    (trained, {"teacher": True}),
    (searched, {"optimizer": torch.optim.Adam, "arch": True}),
    *((trained, {"optimizer": make}) for make in (torch.optim.Adam, torch.optim.NAdam, torch.optim.Adafactor, plain)),
    (trained, {"optimizer": lambda groups: torch.optim.SGD(groups, lr=1.0, momentum=0.5)}),
    (trained, {"optimizer": lambda groups: Counting(groups)}),
]


@pytest.mark.parametrize(("loop", "how"), WAYS)
def test_a_loop_with_a_users_own_loader_goes_on_where_it_was(tmp_path: Path, loop: Any, how: dict[str, Any]) -> None:
    whole = loop(None, {}, 0, **how)
    assert loop(tmp_path / "unprunable", {}, 0, **how) == whole  # saving changes nothing
    calls = (13,) if "optimizer" in how else (6, 13, 17)  # of the loss: in each epoch there are at least five
    for call in calls:
        folder, seen = tmp_path / str(call), {}
        with pytest.raises(CrashError):
            loop(folder, seen, 0, crash, call, **how)
        assert loop(folder, seen, 99, **how) == whole


@pytest.mark.parametrize(("loop", "how"), [(searched, {"arch": True, "accumulate": 2}), (trained, {})])
def test_a_loop_that_is_asked_to_stop_saves_the_step_it_is_in(tmp_path: Path, loop: Any, how: dict[str, Any]) -> None:
    whole, seen = loop(None, {}, 0, **how), {}
    with pytest.raises(StoppedError) as error:
        loop(tmp_path, seen, 0, ask, 9, **how)
    found = load_checkpoint(tmp_path)
    assert found is not None and found.step == len(seen) == (5 if loop is searched else 9)
    assert str(error.value) == f"Stopped after step {found.step}, as asked; everything up to here is saved."
    assert loop(tmp_path, seen, 99, **how) == whole


@pytest.mark.parametrize("loop", [searched, trained])
def test_a_loss_that_is_no_number_leaves_the_last_good_checkpoint(tmp_path: Path, loop: Any) -> None:
    whole, seen = loop(None, {}, 0), {}
    with pytest.raises(TrainingError, match=r"(loss is nan.*at step 8|at step 8.*loss is nan).*(Lower|smaller) lr"):
        loop(tmp_path, seen, 0, no_number, 9)
    notices: list[str] = []
    found = load_checkpoint(tmp_path, notices.append)
    assert found is not None and found.step == 8 == len(seen) and not notices
    assert all(tensor.isfinite().all() for name, tensor in found.tensors.items() if "gauss" not in name)
    assert loop(tmp_path, seen, 99) == whole


def test_a_loop_that_is_done_is_not_done_again(tmp_path: Path) -> None:
    seen: dict[int, Any] = {}
    whole = trained(tmp_path, seen, 0)
    assert trained(tmp_path, seen, 99, crash, 1) == whole  # no call of the loss, no crash


OTHERS = {
    "other names": lambda: nn.Linear(36, 1),
    "other shapes, which copy_ would stretch": lambda: nn.Sequential(nn.Linear(36, 4), nn.Linear(4, 1)),
    "fewer layers": lambda: nn.Sequential(nn.Linear(36, 1)),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_another_network_is_refused(tmp_path: Path, other: str) -> None:
    config = TrainConfig(epochs=1, lr=0.1, warmup_lr=0.1)
    batches = [(torch.randn(3, 36), torch.zeros(3, dtype=torch.int64))] * 3
    train(
        nn.Sequential(nn.Linear(36, 1), nn.Linear(1, 1)),
        batches,
        config,
        runtime=Runtime(checkpointer=Checkpointer(tmp_path)),
    )
    with pytest.raises(FileError, match="another network"):
        train(OTHERS[other](), batches, config, runtime=Runtime(checkpointer=Checkpointer(tmp_path)))


def test_the_state_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    ways = [None, torch.optim.Adam, torch.optim.RMSprop]
    for first, second in itertools.permutations(ways, 2):
        folder, seen = tmp_path / f"{first}{second}", {}
        with pytest.raises(CrashError):
            trained(folder, seen, 0, crash, 9, optimizer=first)
        with pytest.raises(FileError, match=r"of another (network or )?optimizer"):
            trained(folder, seen, 0, optimizer=second)

    class Listing(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.state[self.param_groups[0]["params"][0]]["seen"] = [1]

    with pytest.raises(TrainingError, match=r"keeps a list \(seen\) in its state"):
        trained(tmp_path / "list", {}, 0, optimizer=Listing)

    class Named(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.state["all"] = {"steps": 1}  # type: ignore[index]

    with pytest.raises(TrainingError, match="keeps 'all' in its state, which is of no parameter: take another"):
        trained(tmp_path / "named", {}, 0, optimizer=Named)


def test_the_state_of_an_optimizer_is_read_without_a_trace() -> None:
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.zeros(2))])
    optimizer.param_groups[0]["weight_decay"] = np.float64(0.1)
    taken = state_tensors(optimizer)
    assert not optimizer.state and taken["Adam/groups/0/number/weight_decay"].item() == 0.1
    assert taken["Adam/groups/0/number/amsgrad"].dtype is torch.bool


@pytest.mark.slow
@pytest.mark.parametrize("loop", [searched, trained])
def test_a_loader_with_workers_goes_on_where_it_was(tmp_path: Path, loop: Any) -> None:
    """Each worker draws the batches before once more, so its own generators are where they were."""

    def loader(count: int) -> DataLoader[Any]:
        return DataLoader(Noisy(count), 8, shuffle=True, num_workers=2)

    whole, seen = loop(None, {}, 0, loader=loader), {}
    with pytest.raises(CrashError):
        loop(tmp_path, seen, 0, crash, 13, loader=loader)
    assert loop(tmp_path, seen, 99, loader=loader) == whole


# for long


def resident() -> float:
    """MiB of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.slow
def test_two_hundred_runs_in_one_process_need_no_more_memory_than_twenty(tmp_path: Path) -> None:
    settings = (
        SearchConfig(budget=0.5, groups=4, epochs=2),
        TrainConfig(epochs=1, warmup_epochs=0, lr=0.1, warmup_lr=0.1),
    )
    used, objects = {}, {}
    for number in range(1, 201):
        folder = tmp_path / str(number)
        runtime = Runtime(checkpointer=Checkpointer(folder, every_steps=2))
        prune(tiny(), shuffled(36), shuffled(36), search=settings[0], train=settings[1], runtime=runtime)
        shutil.rmtree(folder)
        if number in (20, 100, 200):
            gc.collect()
            used[number], objects[number] = resident(), len(gc.get_objects())
    print(" ".join(f"RSS at run {number}: {size:.1f} MiB." for number, size in used.items()))
    assert used[200] - used[20] < 20
    assert objects[200] - objects[20] < 180  # less than one for each run


@pytest.mark.parametrize("stop", [3, 4, 6])  # within an epoch of four batches, at its end, in the next one
def test_a_loader_with_a_generator_of_its_own_goes_on_where_it_was(tmp_path: Path, stop: int) -> None:
    class Crash(Exception):  # noqa: N818
        pass

    def run(checkpointer: Checkpointer | None, crash_at: int = -1) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 2))
        data = [(x, i % 2) for i, x in enumerate(torch.randn(16, 6))]
        loader = DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(3))
        calls = iter(range(10**6))

        def loss(output: Tensor, batch: Any) -> Tensor:
            if next(calls) == crash_at:
                raise Crash
            return nn.functional.cross_entropy(output, batch[1])

        config = TrainConfig(epochs=3, lr=0.5, warmup_lr=0.5, warmup_epochs=0, reference_batch=None)
        train(model, loader, config, task=Task(loss=loss), runtime=Runtime(checkpointer=checkpointer))
        return [parameter.detach().clone() for parameter in model.parameters()]

    whole = run(None)
    with pytest.raises(Crash):
        run(Checkpointer(tmp_path, every_steps=1), stop)
    again = run(Checkpointer(tmp_path, every_steps=1))
    assert all(torch.equal(a, b) for a, b in zip(whole, again, strict=True))


def test_the_folder_of_a_keeper_may_be_text(tmp_path: Path) -> None:
    """Else a long loop would fail where it first saves."""
    checkpointer = Checkpointer(str(tmp_path / "kept"))  # type: ignore[arg-type]
    assert checkpointer.folder == tmp_path / "kept"
