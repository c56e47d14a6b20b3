"""A loop that is left anywhere and resumed is the same loop, also with a user's own loader, loss and dropout."""

from __future__ import annotations

import functools
import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import torch
from folders import saved_step
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from dmcp.errors import DataError, FileError, StoppedError, TrainingError
from dmcp.pruning import prune
from dmcp.request import Loaders
from dmcp.runtime import checkpoint
from dmcp.runtime.checkpoint import Checkpoint, Checkpointer, ResumableIterator, State, load_checkpoint, save_checkpoint
from dmcp.runtime.distributed import SINGLE_PROCESS, World
from dmcp.runtime.engine import resolve
from dmcp.searching.search import search
from dmcp.searching.supernet import Supernet
from dmcp.settings import Engine, SearchConfig, TrainConfig
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.trace import trace
from dmcp.training.loop import Runtime, Task, train

CPU = torch.device("cpu")
RESOLVED = resolve(Engine(), CPU)

pytestmark = pytest.mark.filterwarnings(
    "ignore::dmcp.training.distillation.DistillationWarning"
)  # losses here only count and break


# files


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """All that makes two tensors the same, NaNs and the sign of zero included."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).clone(memory_format=torch.contiguous_format)
    return tensor.dtype, tensor.shape, flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def test_a_checkpoint_comes_back_bit_for_bit(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "missing") is None and load_checkpoint(tmp_path) is None
    raw, images = torch.randint(0, 256, (64,), dtype=torch.uint8), torch.randn(2, 3, 4, 5)
    dtypes = [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint16]
    tensors = {str(dtype): raw.clone().view(dtype) for dtype in dtypes} | {"bool": raw > 99}
    tensors |= {"conj": torch.randn(2, dtype=torch.complex64).conj(), "parameter": nn.Parameter(torch.randn(3))}
    tensors |= {"odd": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]), "none": torch.empty(0, 3)}
    tensors |= {"last": images.to(memory_format=torch.channels_last), "turned": images.mT, "part": images[:, 1:, ::2]}
    tensors |= {"wide": torch.randn(3, 1).expand(3, 4), "tied": images, "tied again": images, "scalar": images[1, 1, 1]}
    facts = {"floats": [0.1 + 0.2, 5e-324, -0.0, 1e308], "big": [2**63], "text": 'é"\n\0', "": {"a": [None, True]}}
    for step, some in ((6, {}), (7, tensors)):
        save_checkpoint(tmp_path / "new", Checkpoint(step, some, facts))
    found = load_checkpoint(tmp_path / "new")
    assert found is not None and found.step == 7 and repr(found.facts) == repr(facts)
    tables = [{name: bits(tensor) for name, tensor in it.items()} for it in (found.tensors, tensors)]
    assert tables[0] == tables[1]
    found.tensors["tied"].zero_()  # its memory is its own
    assert found.tensors["tied again"].any() and images.any()
    (path,) = (tmp_path / "new").iterdir()
    with safetensors.safe_open(path, "pt") as file:  # any safetensors reader opens it
        assert set(file.keys()) == set(tensors)


def test_what_is_no_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outside = tmp_path / "outside"
    save_checkpoint(outside, Checkpoint(5, {"weights": torch.ones(9)}, {}))
    (path,) = outside.iterdir()
    whole = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: os.close(-1))  # a disk that fails
        with pytest.raises(FileError, match="cannot be written"):
            save_checkpoint(outside, Checkpoint(6, {}, {}))
    assert list(outside.iterdir()) == [path] and path.read_bytes() == whole
    (tmp_path / "link").symlink_to(tmp_path.parent)
    with pytest.raises(FileError):
        load_checkpoint(tmp_path / "link")
    for damaged in (whole[:-1], whole[:-1] + b"!", whole[:20], b""):
        path.write_bytes(damaged)
        with pytest.raises(FileError, match="is damaged"):
            load_checkpoint(outside)


# random numbers


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draw() -> list[Any]:
    mine = [torch.rand(2).tolist(), torch.randn(1).item(), random.random(), random.gauss(0, 1), random.randbytes(3)]
    return [*mine, np.random.rand(), np.random.normal(), np.random.randint(9)]


def test_the_global_generators_come_back_and_are_seeded_for_each_rank() -> None:
    for _ in range(2):
        saved = {name: tensor.clone() for name, tensor in checkpoint.random_state(CPU).items()}
        first = [draw(), draw()]
        seed_all(7)
        assert draw() not in first
        checkpoint.set_random_state(saved, CPU)
        assert [draw(), draw()] == first
        _ = random.gauss(0, 1), np.random.normal()  # both libraries keep every second number
    before, drawn = torch.get_rng_state(), []
    for rank, seed in itertools.product((0, 1), (3, 3, 4)):
        with checkpoint.seeded(seed, CPU, World(rank, 2)):
            drawn.append(torch.rand(1).item())
        assert torch.equal(torch.get_rng_state(), before)
    assert drawn[0] == drawn[1] and drawn[3] == drawn[4] and len({*drawn}) == 4
    loader = shuffled(40, generator=torch.Generator())
    with checkpoint.untouched(loader, CPU):
        seen = [batch[0].sum().item() for batch in loader]
    assert [batch[0].sum().item() for batch in loader] == seen


# batches


class Noisy(Dataset[tuple[Tensor, int]]):
    """Images that no two looks give the same: all three global generators are in them."""

    def __init__(self, count: int) -> None:
        self.images = torch.randn(count, 1, 6, 6, generator=torch.Generator().manual_seed(count))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        noise = torch.randn(1, 6, 6) + random.gauss(0, 1) + np.random.normal()
        return self.images[place] + 0.3 * noise.float(), place % 4


def shuffled(count: int, **how: Any) -> DataLoader[Any]:
    return DataLoader(Noisy(count), 8, shuffle=True, **how)


class Replayed:
    """A loader that counts what it drew."""

    def __init__(self, count: int) -> None:
        self.loader, self.drawn = shuffled(count), 0

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self.drawn += 1
            yield batch


class Direct(Replayed):
    """One that can start anywhere, in an order of each epoch's own."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def starting_at(self, skip: int) -> Iterator[Any]:
        for number in range(skip, len(self)):
            self.drawn += 1
            yield torch.tensor([[100 * self.epoch + number]]), torch.tensor([0])


@pytest.mark.parametrize("accumulate", [1, 2, 9])
@pytest.mark.parametrize("kind", [Direct, Replayed])
def test_an_iterator_can_be_resumed_at_any_step(kind: type[Any], accumulate: int) -> None:
    def plain(batches: list[Any]) -> list[Any]:
        return [[part.tolist() for part in batch] for batch in batches]

    first = ResumableIterator(kind(38), RESOLVED, SINGLE_PROCESS, accumulate)  # five batches
    assert first.per_epoch == -(-5 // accumulate)
    seen, states, total = [], [], 3 * first.per_epoch
    for _ in range(total):
        states.append((first.start, checkpoint.random_state(CPU)))
        seen.append(plain(first.next()))
    sizes = [len(batches) for batches in seen[: first.per_epoch]]
    assert sum(sizes) == 5 and max(sizes) == min(5, accumulate) and seen[0] != seen[first.per_epoch]
    for step in range(total):
        loader = kind(38)
        again = ResumableIterator(loader, RESOLVED, SINGLE_PROCESS, accumulate)
        seed_all(step)
        again.resume(step, states[step][0])
        checkpoint.set_random_state(states[step][1], CPU)
        assert loader.drawn == (0 if kind is Direct else accumulate * (step % first.per_epoch))
        assert [plain(again.next()) for _ in range(step, total)] == seen[step:]


def test_a_loader_that_gives_less_than_it_says_is_refused() -> None:
    batches = ResumableIterator(shuffled(30), RESOLVED, SINGLE_PROCESS)
    batches.loader = Replayed(8)
    batches.next()
    with pytest.raises(DataError, match=r"4 batches.*1"):
        batches.next()


# when it is saved


def test_a_checkpoint_is_due_by_steps_by_time_and_on_request(tmp_path: Path) -> None:
    asked, loop = [False], State({"w": torch.ones(1)}, dict, [], [], [], CPU)
    saver = Checkpointer(str(tmp_path), {"a": 1}, 5, 600.0, lambda: asked[0])  # type: ignore[arg-type]
    assert [saver.due(step, SINGLE_PROCESS) for step in (4, 5, 6)] == [False, True, True]
    saver.save(6, loop, {}, SINGLE_PROCESS)
    assert [saver.due(step, SINGLE_PROCESS) for step in (10, 11)] == [False, True]
    assert replace(saver, every_seconds=0.0).due(7, SINGLE_PROCESS)
    asked[0] = True
    assert saver.due(8, SINGLE_PROCESS)
    with pytest.raises(StoppedError, match="after step 8"):
        saver.save(8, loop, {}, SINGLE_PROCESS)
    saver.save(9, loop, {"done": True}, SINGLE_PROCESS)  # nothing is left to stop
    again = Checkpointer(tmp_path, {"a": 1}, 5)
    assert saved_step(tmp_path) == 9 and again.load(SINGLE_PROCESS)
    assert [again.due(step, SINGLE_PROCESS) for step in (13, 14)] == [False, True]  # from the checkpoint on


# searching and training


def fresh() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        first = [nn.Conv2d(1, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)]
        second = [nn.Conv2d(6, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.3)]
        return nn.Sequential(*first, *second, nn.Linear(8, 4))


@functools.cache
def graph() -> ChannelGraph:
    return trace(fresh(), torch.zeros(2, 1, 6, 6))


def bits_of(model: nn.Module) -> dict[str, list[Any]]:
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


class CrashError(Exception):
    """Stands for whatever ends a process."""


class Loop:
    """A search or a training with losses of its own; its log is `seen`, as a run has one in a file."""

    def __init__(self, kind: str, folder: Path | None = None, **how: Any) -> None:
        self.kind, self.folder, self.how = kind, folder, how
        self.seen: dict[int, Any] = {}

    def run(self, seed: int = 0, act: str = "crash", call: int = 0) -> Any:
        """All that the loop comes to; the seed is that of the process, and in this call of the loss `act` is done."""
        seed_all(seed)
        calls, asked = itertools.count(1), []

        def loss(output: Any, batch: Any) -> Tensor:
            found = F.cross_entropy(output, batch[1])
            if next(calls) == call:
                if act == "crash":
                    raise CrashError
                asked.extend([True] if act == "ask" else [])
                return found * float("nan" if act == "no number" else 1)
            return found

        def note(event: Any) -> None:
            if hasattr(event.record, "step"):
                self.seen[event.record.step] = event.record

        saver = None
        if self.folder is not None:
            earlier = lambda _: [asdict(record) for record in self.seen.values()]  # noqa: E731
            saver = Checkpointer(self.folder, every_steps=2, earlier=earlier, stop_requested=lambda: bool(asked))
        how = {"task": Task(loss=loss, optimizer=self.how.get("optimizer"))}
        how |= {"runtime": Runtime(checkpointer=saver, on_event=note)}
        loader = self.how.get("loader", shuffled)(36)
        return *(self._search if self.kind == "search" else self._train)(loader, how), list(self.seen.values())

    def _search(self, loader: Any, how: dict[str, Any]) -> Any:
        net, arch = Supernet(fresh(), graph(), groups=4), shuffled(20) if self.how.get("arch") else None
        config = SearchConfig(budget=0.5, groups=4, epochs=4, log_every=7, accumulate=self.how.get("accumulate", 1))
        found = search(net, loader, config, arch_loader=arch, **how)
        return found.alphas.tolist(), bits_of(net.model), found.log

    def _train(self, loader: Any, how: dict[str, Any]) -> Any:
        model, momentum = fresh(), self.how.get("momentum", 0.9)
        config = TrainConfig(epochs=4, lr=0.1, warmup_lr=0.1, momentum=momentum, nesterov=momentum > 0)
        return bits_of(model), train(model, loader, config, teacher=fresh() if self.how.get("teacher") else None, **how)


WAYS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {  # with the calls of the loss that crash
    "search": ({}, (6, 17)),
    "search, held-out data, replayed": ({"arch": True, "accumulate": 2, "loader": Replayed}, (6, 13, 17)),
    "train": ({"loader": lambda n: shuffled(n, generator=torch.Generator()), "momentum": 0.0}, (5, 6, 13)),
    "train, teacher": ({"teacher": True}, (13,)),
    "train, workers": ({"loader": functools.partial(shuffled, num_workers=2)}, (13,)),
}


@pytest.mark.parametrize("way", [pytest.param(it, marks=pytest.mark.slow if "workers" in it else ()) for it in WAYS])
def test_a_loop_that_crashes_goes_on_where_it_was(tmp_path: Path, way: str) -> None:
    kind, (how, calls) = way.split(",")[0], WAYS[way]
    whole = Loop(kind, **how).run()
    assert Loop(kind, tmp_path / "whole", **how).run() == whole  # saving changes nothing
    for call in calls:  # an epoch has at least five
        loop = Loop(kind, tmp_path / str(call), **how)
        with pytest.raises(CrashError):
            loop.run(0, "crash", call)
        assert loop.run(99) == whole
        assert loop.run(98, "crash", 1) == whole  # it is done: no call of the loss, no crash


@pytest.mark.parametrize(("kind", "call"), [("search", 10), ("train", 9)])
def test_a_loop_that_is_stopped_or_diverges_keeps_its_last_good_step(tmp_path: Path, kind: str, call: int) -> None:
    step = 9  # a search calls the loss once before its first step, to see what the outputs are
    asked, diverging, whole = Loop(kind, tmp_path / "asked"), Loop(kind, tmp_path / "nan"), Loop(kind).run()
    with pytest.raises(StoppedError, match=f"after step {step}"):
        asked.run(0, "ask", call)
    assert saved_step(tmp_path / "asked") == len(asked.seen) == step
    with pytest.raises(TrainingError, match=r"loss.* is (nan|not finite)"):
        diverging.run(0, "no number", call)
    found = load_checkpoint(tmp_path / "nan")
    assert found is not None and found.step == len(diverging.seen) == step - 1
    assert all(tensor.isfinite().all() for tensor in found.tensors.values())
    assert asked.run(99) == whole and diverging.run(99) == whole


def test_a_checkpoint_of_another_network_or_optimizer_is_refused(tmp_path: Path) -> None:
    config = TrainConfig(epochs=1, lr=0.1, warmup_lr=0.1)
    batches = [(torch.randn(3, 36), torch.zeros(3, dtype=torch.int64))] * 3
    runtime = Runtime(checkpointer=Checkpointer(tmp_path / "a"))
    train(nn.Sequential(nn.Linear(36, 1), nn.Linear(1, 1)), batches, config, runtime=runtime)
    others = [nn.Linear(36, 1), nn.Sequential(nn.Linear(36, 4), nn.Linear(4, 1))]
    for other in others:  # other names, other shapes (which copy_ would stretch)
        with pytest.raises(FileError, match="another network"):
            train(other, batches, config, runtime=runtime)
    for first, second in ((None, torch.optim.Adam), (torch.optim.Adam, None)):
        folder = tmp_path / f"{first}{second}"
        with pytest.raises(CrashError):
            Loop("train", folder, optimizer=first).run(0, "crash", 9)
        with pytest.raises(FileError, match="another optimizer"):
            Loop("train", folder, optimizer=second).run()


# prune

SHORT = {
    "search": SearchConfig(budget=0.5, groups=4, epochs=2),
    "train": TrainConfig(epochs=1, warmup_epochs=0, lr=0.1, warmup_lr=0.1),
}


def pruned(folder: Path, model: nn.Module | None = None, loader: Any = None, **how: Any) -> Any:
    seed_all(0)
    parts = {name: how.pop(name) for name in ("engine", "on_event") if name in how}
    runtime = Runtime(checkpointer=Checkpointer(folder, every_steps=2), **parts)
    result = prune(model or fresh(), loader or shuffled(36), shuffled(36), runtime=runtime, **SHORT | how)
    return bits_of(result.model)


OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "search.seed was 0, is 1": {"search": replace(SHORT["search"], seed=1)},
    "retrain was": {"retrain": "scratch"},
    "arch_loader was false, is true": {"loader": Loaders(search=shuffled(36), arch=shuffled(20))},
    "optimizer was false, is true": {"task": Task(optimizer=torch.optim.Adam)},
    "the model's weights": {"model": nn.Sequential(fresh())},
}


def test_prune_refuses_a_folder_of_other_settings_before_the_first_step(tmp_path: Path) -> None:
    first = pruned(tmp_path)
    assert pruned(tmp_path, search=replace(SHORT["search"], log_every=3)) == first
    for sentence, how in OTHER_SETTINGS.items():
        seen: list[Any] = []
        with pytest.raises(FileError) as error:
            pruned(tmp_path, on_event=seen.append, **how)
        assert sentence in str(error.value) and not seen
