"""A long loop that can be left and entered again: its batches, its state, and when that is saved."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dmcp.batches import Loader, batches_from, length_of, mix, on_device, size_of, start_epoch
from dmcp.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from dmcp.engine import Settled
from dmcp.errors import DataError, FileError, RankError, StoppedError, TrainingError
from dmcp.kinds import path_of
from dmcp.optimizers import check_keepable, check_state, put_state, state_tensors
from dmcp.ranks import Ranks, fewest, gather_bytes, same_everywhere, share_tensors, sum_values

_TURN = 10  # steps after which ranks agree whether to save
_WEIGHTS = "the digest of the model's weights"
_TEACHER = "the digest of the teacher's weights"
_FREE = ("log_every",)  # settings that change nothing of a result
DONE = "done"  # whether the loop of a checkpoint was at its end


class Feed:
    """The batches of one step after the other, epoch after epoch, on the device; it can be entered at any step."""

    def __init__(self, loader: Loader, settled: Settled, ranks: Ranks, accumulate: int = 1) -> None:
        self.loader, self.settled, self.accumulate = loader, settled, accumulate
        self.batches = fewest(length_of(loader), ranks)  # in an epoch; loaders of some ranks may have more
        if not self.batches:
            raise DataError("The loader has no batches: is the batch larger than the data?")
        self.per_epoch = -(-self.batches // accumulate)  # steps
        self.step = 0  # the next one
        self.start: dict[str, Tensor] = {}  # random numbers at the start of the epoch
        self._rest: Iterator[Any] = iter(())

    def enter(self, step: int, start: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> None:
        """Go to a step; what a user's loader drew before it is drawn once more from where it was drawn then."""
        self.step = step
        if step % self.per_epoch:
            self._set(start)
            self._open(step % self.per_epoch)
        elif step:  # the loader is still in the epoch that has ended
            start_epoch(self.loader, step // self.per_epoch - 1)
        self._set(now)

    def random_state(self) -> dict[str, Tensor]:
        """The global generators, and those of the loader itself."""
        own = {f"loader{number}": it.get_state() for number, it in enumerate(_generators(self.loader))}
        return random_state(self.settled.device) | own

    def _set(self, state: Mapping[str, Tensor]) -> None:
        set_random_state(state, self.settled.device)
        for number, generator in enumerate(_generators(self.loader)):
            generator.set_state(state[f"loader{number}"])

    def next(self) -> list[Any]:
        """The batches of the next step; the last one of an epoch may have fewer."""
        if self.step % self.per_epoch == 0:
            self._open(0)
        place = self.step % self.per_epoch
        wanted = min(self.accumulate, self.batches - place * self.accumulate)
        chunk = list(itertools.islice(self._rest, wanted))
        if len(chunk) < wanted:
            count = place * self.accumulate + len(chunk)
            raise DataError(f"The loader says that it has {self.batches} batches, but gave {count}.")
        self.step += 1
        device = self.settled.device
        return [self.settled.laid_out(on_device(batch, device)) for batch in chunk]

    def samples(self, batches: Sequence[Any], ranks: Ranks) -> int:
        """In the batches of one step, over all ranks."""
        own = sum(map(size_of, batches))
        return own if ranks.world == 1 else int(sum_values(torch.tensor([own]), ranks))

    def _open(self, place: int) -> None:
        self.start = self.random_state()
        self._rest = batches_from(self.loader, self.step // self.per_epoch, place * self.accumulate)


def _generators(loader: Any) -> list[torch.Generator]:
    """Generators that a loader or its samplers were given, each once."""
    sampler, batches = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    owners = (loader, sampler, batches, getattr(batches, "sampler", None))
    found = {id(it): it for owner in owners if isinstance(it := getattr(owner, "generator", None), torch.Generator)}
    return list(found.values())


# random numbers


def random_state(device: torch.device) -> dict[str, Tensor]:
    """The global generators of torch, Python and NumPy as tensors."""
    version, words, gauss = random.getstate()
    _, array, position, has_gauss, cached = np.random.get_state(legacy=True)
    state = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words]),
        "python.gauss": torch.tensor([float("nan") if gauss is None else gauss], dtype=torch.float64),
        "numpy": torch.tensor([*np.asarray(array).tolist(), int(position), int(has_gauss)]),
        "numpy.gauss": torch.tensor([float(cached)], dtype=torch.float64),
    }
    return state | ({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {})


def set_random_state(state: Mapping[str, Tensor], device: torch.device) -> None:
    """Bring the global generators to a state."""
    torch.set_rng_state(state["torch"])
    version, *words = state["python"].tolist()
    gauss = state["python.gauss"].item()
    random.setstate((version, tuple(words), None if gauss != gauss else gauss))
    *array, position, has_gauss = state["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(array, np.uint32), position, has_gauss, state["numpy.gauss"].item()))
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device, ranks: Ranks) -> Iterator[None]:
    """Torch's global generators (dropout, loaders) seeded, for each rank with other numbers, and afterwards as before.

    Not by fork_rng: after an assert of its own a GPU cannot be given a state, and that failure would hide the assert.
    """
    own = mix(seed, ranks.rank) if ranks.rank else seed
    cuda = device.type == "cuda"
    host, there = torch.get_rng_state(), torch.cuda.get_rng_state(device) if cuda else None

    def back() -> None:
        torch.set_rng_state(host)
        if there is not None:
            torch.cuda.set_rng_state(there, device)

    with _in_the_end(back):
        torch.default_generator.manual_seed(own)
        if cuda:
            with torch.cuda.device(device):  # not all GPUs: only this one is put back
                torch.cuda.manual_seed(own)
        yield


@contextlib.contextmanager
def _in_the_end(back: Callable[[], None]) -> Iterator[None]:
    """Call it; where something has failed before, that is what is raised."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(RuntimeError):
            back()
        raise
    back()


@contextlib.contextmanager
def untouched(loader: Any, device: torch.device) -> Iterator[None]:
    """Batches that are looked at meanwhile leave no trace in random numbers, counters or workers that live on."""
    state = random_state(device)
    parts = [getattr(loader, name, None) for name in ("files", "sampler", "batch_sampler", "dataset")]
    back = [undo for part in (loader, *parts) for undo in _ways_back(part)]
    for part in (loader, parts[0]):
        if isinstance(part, DataLoader):  # the random numbers of persistent workers are out of reach: take others
            back.append(functools.partial(setattr, part, "_iterator", part._iterator))
            part._iterator = None
    with _in_the_end(lambda: set_random_state(state, device)):
        try:
            yield
        finally:
            for undo in back:
                undo()


def _ways_back(part: Any) -> Iterator[Callable[[], object]]:
    """What brings generators and counters among the attributes of a loader, or of a part of it, to where they are."""
    for name, value in getattr(part, "__dict__", {}).items():
        match value:
            case torch.Generator():
                yield functools.partial(value.set_state, value.get_state())
            case np.random.Generator():
                yield functools.partial(setattr, value.bit_generator, "state", value.bit_generator.state)
            case np.random.RandomState():
                yield functools.partial(value.set_state, value.get_state())
            case random.Random():
                yield functools.partial(value.setstate, value.getstate())
            case int():
                yield functools.partial(part.__dict__.__setitem__, name, value)


# the state of a loop


@dataclass(frozen=True, eq=False)
class State:
    """Everything that changes from step to step. What is `shared` is the same on every rank, the rest is each one's."""

    shared: Mapping[str, Tensor]  # weights, alphas
    own: Callable[[], Mapping[str, Tensor]]  # buffers, such as running statistics; a forward may replace them
    optimizers: Sequence[torch.optim.Optimizer]
    generators: Sequence[torch.Generator]
    feeds: Sequence[Feed]
    device: torch.device
    given: bool = False  # whether the first optimizer is the user's, whose state is whatever it keeps

    def take(self, ranks: Ranks) -> dict[str, Tensor] | None:
        """It all on the CPU, of all ranks, by name, to be written at once; for rank 0, None for the others."""
        if self.given:
            check_keepable(self.optimizers[0])
        own = {f"own/{name}": tensor.detach().cpu() for name, tensor in self.own().items()}
        own |= {f"random/{name}": tensor for name, tensor in random_state(self.device).items()}
        for number, generator in enumerate(self.generators):
            own[f"generator/{number}"] = generator.get_state()
        for number, feed in enumerate(self.feeds):
            own |= {f"feed/{number}/{name}": tensor for name, tensor in feed.start.items()}
            own |= {f"now/{number}/{name}": tensor for name, tensor in feed.random_state().items()}
        everyone = gather_bytes(own, ranks)
        if everyone is None:
            return None
        taken = {f"shared/{name}": tensor.detach().cpu() for name, tensor in self.shared.items()}
        for number, optimizer in enumerate(self.optimizers):
            kept = state_tensors(optimizer) if self.given and not number else _momenta(optimizer)
            taken |= {f"optimizer/{number}/{name}": tensor for name, tensor in kept.items()}
        for rank, tensors in enumerate(everyone):
            taken |= {f"rank{rank}/{name}": tensor for name, tensor in tensors.items()}
        return taken

    @torch.no_grad()
    def put(self, taken: Mapping[str, Tensor], steps: Sequence[int], ranks: Ranks) -> None:
        """Bring everything back to what was taken, each feed to its step; FileError if it is not of this network."""
        mine = _under(f"rank{ranks.rank}/", taken)
        pairs = [(self.shared, _under("shared/", taken)), (self.own(), _under("own/", mine))]
        for number, optimizer in list(enumerate(self.optimizers))[self.given :]:
            pairs.append((_momenta(optimizer), _under(f"optimizer/{number}/", taken)))
        for now, before in pairs:  # all of them before the first is written
            _check_alike(now, before)
        if self.given:
            check_state(self.optimizers[0], _under("optimizer/0/", taken))
        for now, before in pairs:
            for name, tensor in now.items():
                tensor.copy_(before[name])
        if self.given:
            put_state(self.optimizers[0], _under("optimizer/0/", taken))
        try:
            for number, generator in enumerate(self.generators):
                generator.set_state(mine[f"generator/{number}"])
            for number, (feed, step) in enumerate(zip(self.feeds, steps, strict=True)):
                feed.enter(step, _under(f"feed/{number}/", mine), _under(f"now/{number}/", mine))
            set_random_state(_under("random/", mine), self.device)
        except (KeyError, RuntimeError, TypeError, ValueError) as error:
            raise FileError(f"This checkpoint has no random state that fits ({error!r}): start the run anew.") from None


def _check_alike(now: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> None:
    """Refuse saved tensors that are not of the same names and shapes."""
    for name in {**now, **before}:
        old, new = (tensors[name].shape if name in tensors else None for tensors in (before, now))
        if old != new:
            sizes = " and ".join("missing" if it is None else str(tuple(it)) for it in (old, new))
            raise FileError(f"This checkpoint is of another network or optimizer: {name} was and is {sizes}.")


def _momenta(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The momentum of each parameter, by its number."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = ((number, optimizer.state.get(parameter, {})) for number, parameter in enumerate(parameters))
    return {str(number): state["momentum_buffer"] for number, state in states if "momentum_buffer" in state}


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


# when it is saved


def _never() -> bool:
    return False


@dataclass(eq=False)
class Keeper:
    """Saves the state of one loop in a folder now and then, and brings a new loop to where an old one was."""

    folder: Path
    identity: Mapping[str, Any] = field(default_factory=dict)  # settings that must be those of before, as plain JSON
    every_steps: int = 1000
    every_seconds: float = 300.0
    asked_to_stop: Callable[[], bool] = _never
    lines: Callable[[], int] = int  # lines in the log of the run
    earlier: Callable[[], list[dict[str, Any]]] = list  # records of this loop in that log
    notice: Callable[[str], None] | None = None  # hears what a person should know
    complete: bool = False  # whether the identity has all settings; otherwise prune adds those that it was given
    settings: Mapping[str, Any] = field(default_factory=dict)  # what prune was given, as plain JSON
    _step: int = 0  # of the last checkpoint
    _time: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.folder = path_of("A keeper", self.folder, "folder")  # text will do
        for name in ("every_steps", "every_seconds"):
            if not isinstance(value := getattr(self, name), Real):
                raise TrainingError(f"{name} must be a number, not {value!r}.")

    def load(self, ranks: Ranks) -> Checkpoint | None:
        """The newest checkpoint, if there is one; FileError where it was made with other settings."""
        found = load_checkpoint(self.folder, self.notice if ranks.first else None)
        if not same_everywhere(str(found and found.step), ranks):
            raise RankError(
                f"{self.folder}: the ranks see different checkpoints here: give a folder that all of them share."
            )
        if found is None:
            return None
        self._step = found.step
        differences = list(_differences(found.facts.get("identity"), self._identity(ranks)))
        if differences:
            listed = "; ".join(differences)
            ranks_differ = any(it.startswith("ranks was ") for it in differences)
            again = "start as many processes as then, for " if ranks_differ else ""
            raise FileError(f"{self.folder}: {again}it cannot go on with other settings than it began with: {listed}.")
        self._check_settings(found.facts.get("settings", {}))
        return found

    def _check_settings(self, before: Mapping[str, Any]) -> None:
        """Refuse what prune was given and was not given before; a keeper that is complete has kept nothing of it."""
        for name, now in self.settings.items() if before else ():
            if (was := before.get(name)) != now:
                same = "; an untrained one must be built after the same torch.manual_seed" if name == _WEIGHTS else ""
                raise FileError(
                    f"{self.folder}: this job was begun with other settings: {name} was {json.dumps(was)}, is "
                    f"{json.dumps(now)}. Give another folder for a new job, or go on with what it began with{same}."
                )

    def _identity(self, ranks: Ranks) -> Any:
        return json.loads(json.dumps(dict(self.identity) | {"ranks": ranks.world}))

    def due(self, step: int, ranks: Ranks) -> bool:
        """Whether to save after so many steps; several ranks ask each other now and then."""
        if ranks.world > 1 and step % _TURN:
            return False
        late = time.monotonic() - self._time >= self.every_seconds
        wish = late or step - self._step >= self.every_steps or self.asked_to_stop()
        return wish if ranks.world == 1 else bool(sum_values(torch.tensor([int(wish)]), ranks))

    def save(self, step: int, state: State, facts: Mapping[str, Any], ranks: Ranks) -> None:
        """Save the state after so many steps; StoppedError if that is what was asked for."""
        tensors = state.take(ranks)
        if tensors is not None:
            known = {"identity": self._identity(ranks), "lines": self.lines(), DONE: False}
            known |= {"settings": dict(self.settings)} if self.settings else {}
            save_checkpoint(self.folder, Checkpoint(step, tensors, known | dict(facts)))
        self._step, self._time = step, time.monotonic()
        stop = self.asked_to_stop()
        if ranks.world > 1:
            stop = bool(sum_values(torch.tensor([int(stop)]), ranks))
        if stop and not facts.get(DONE):
            raise StoppedError(f"Stopped after step {step}, as asked; everything up to here is saved.")


def _differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """What is not the same, as `name was 3, is 4`."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        yield f"{name} was {json.dumps(before)}, is {json.dumps(now)}"


# what must not differ


def plain_settings(
    given: Mapping[str, Any], weights: Mapping[str, Tensor], ranks: Ranks, teacher: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """What a job was given as flat plain JSON, settings by their fields, and digests of rank 0's weights."""
    flat: dict[str, Any] = {}
    for name, value in given.items():
        if hasattr(value, "__dataclass_fields__"):
            flat |= {f"{name}.{it.name}": getattr(value, it.name) for it in fields(value) if it.name not in _FREE}
        else:
            flat[name] = value
    flat[_WEIGHTS] = digest(weights, ranks)
    flat[_TEACHER] = None if teacher is None else digest(teacher, ranks)
    plain: dict[str, Any] = json.loads(json.dumps(flat, default=_text))
    return plain


def _text(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(getattr(value, "text", value))  # a budget has a text


def digest(tensors: Mapping[str, Tensor], ranks: Ranks) -> str:
    """Sixteen letters that change with any bit of the tensors, those of rank 0, which all ranks start from."""
    found = hashlib.sha256()
    for name, tensor in tensors.items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        if not tensor.is_meta and tensor.layout == torch.strided:
            found.update(
                tensor.detach()
                .cpu()
                .resolve_conj()
                .resolve_neg()
                .contiguous()
                .reshape(-1)
                .view(torch.uint8)
                .numpy()
                .tobytes()
            )
    shared = torch.tensor(list(found.digest()[:8]), dtype=torch.uint8)
    share_tensors([shared], ranks)
    return bytes(shared.tolist()).hex()
