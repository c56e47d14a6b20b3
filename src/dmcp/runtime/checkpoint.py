"""Loops that can be stopped anywhere and resumed, bit for bit.

What is saved (`State`): weights, alphas, buffers, the state of optimizers and of all random generators, and for each
loader (`ResumableIterator`) its step and the random state at the start of the epoch. When (`Checkpointer`): every so
many steps or seconds, when a stop is requested, and at the end. Where: one safetensors file for each stage of a run. A
loader is brought back by drawing the batches of the epoch again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Subset, TensorDataset

from dmcp.arguments import PositiveInt, Range, checked
from dmcp.errors import DataError, FileError, RankError, StoppedError, TrainingError
from dmcp.runtime.batches import Loader, batches_from, length_of, mix, on_device, size_of, start_epoch
from dmcp.runtime.distributed import World, gather, sum_values
from dmcp.runtime.engine import ResolvedEngine
from dmcp.runtime.io import plain, quote, read_bytes, refuse_link, write_files

DONE = "done"  # whether the loop of a checkpoint was at its end
_FILE = "checkpoint.safetensors"
_MAX_BYTES = 2**36  # of a checkpoint
_TURN = 10  # steps after which several ranks agree whether to save
_WEIGHTS = "the model's weights (build an untrained model after the same torch.manual_seed)"


# the file


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Where a loop stands."""

    step: int  # optimizer steps done
    tensors: dict[str, Tensor]  # on the CPU once loaded
    facts: dict[str, Any]  # plain JSON


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint in the place of the one before."""
    tensors = {name: _copy(tensor) for name, tensor in checkpoint.tensors.items()}
    checksum = hashlib.sha256(_body(safetensors.torch.save(tensors))).hexdigest()
    record = json.dumps({"step": checkpoint.step, "facts": checkpoint.facts, "sha256": checksum})
    try:
        write_files(folder, {_FILE: safetensors.torch.save(tensors, {"record": record})})
    except OSError as error:
        raise FileError(f"{folder / _FILE}: cannot be written ({error.strerror or error}): free some space.") from error


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint of a folder, None if there is none."""
    refuse_link(folder)
    path = folder / _FILE
    if not os.path.lexists(path):
        return None
    data = read_bytes(path, _MAX_BYTES)
    try:
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        record = json.loads(header["__metadata__"]["record"])
        if hashlib.sha256(_body(data)).hexdigest() != record["sha256"]:
            raise ValueError("its checksum is not that of its tensors")
        return Checkpoint(int(record["step"]), safetensors.torch.load(data), dict(record["facts"]))
    except Exception as error:  # safetensors and torch raise many classes for a header that makes no sense
        raise FileError(f"{path} is damaged ({quote(error)}): remove it to start this stage anew.") from error


def _body(data: bytes) -> memoryview:
    """The numbers in the bytes of a safetensors file, which lie behind its header."""
    return memoryview(data)[8 + int.from_bytes(data[:8], "little") :]


def _copy(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU that shares no memory."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


# random numbers


def random_state(device: torch.device, generators: Sequence[torch.Generator] = ()) -> dict[str, Tensor]:
    """The global generators of torch, those of Python and NumPy as the bytes of a JSON text, and others of torch."""
    host = json.dumps([random.getstate(), np.random.get_state(legacy=False)], default=lambda array: array.tolist())
    return {
        "torch": torch.get_rng_state(),
        "host": torch.frombuffer(bytearray(host.encode()), dtype=torch.uint8),
        **({"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else {}),
        **{f"generator{number}": generator.get_state() for number, generator in enumerate(generators)},
    }


def set_random_state(
    state: Mapping[str, Tensor], device: torch.device, generators: Sequence[torch.Generator] = ()
) -> None:
    """Set the global generators, and others, to a state."""
    (version, words, gauss), numbers = json.loads(state["host"].numpy().tobytes())
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(numbers)
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    for number, generator in enumerate(generators):
        generator.set_state(state[f"generator{number}"])


@contextlib.contextmanager
def seeded(seed: int, device: torch.device, world: World) -> Iterator[None]:
    """Torch's global generators (dropout, loaders) with a seed, another one for each rank; afterwards as before."""
    own = mix(seed, world.rank) if world.rank else seed
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(own)
        if device.type == "cuda":
            with torch.cuda.device(device):  # not all GPUs: only this one is put back
                torch.cuda.manual_seed(own)
        yield


@contextlib.contextmanager
def untouched(loader: Any, device: torch.device) -> Iterator[None]:
    """Batches that are drawn meanwhile change no random state and no living worker of a loader."""
    state = random_state(device, generators_of(loader))
    workers = getattr(loader, "_iterator", None)  # their random numbers are out of reach: take others
    if isinstance(loader, DataLoader):
        loader._iterator = None
    try:
        yield
    finally:
        if isinstance(loader, DataLoader):
            loader._iterator = workers
        set_random_state(state, device, generators_of(loader))


# the batches


class ResumableIterator:
    """Gives the batches of one step after the other, epoch after epoch, on the device; can be resumed at any step."""

    def __init__(self, loader: Loader, resolved: ResolvedEngine, world: World, accumulate: int = 1) -> None:
        self.loader, self.resolved, self.accumulate = loader, resolved, accumulate
        self.batches = min(gather(length_of(loader), world))  # in an epoch; loaders of some ranks may have more
        if not self.batches:
            raise DataError("The loader has no batches: is the batch larger than the data?")
        self.per_epoch = -(-self.batches // accumulate)  # steps
        self.step = 0  # the next one
        self.start: dict[str, Tensor] = {}  # random state at the start of the epoch
        self._rest: Iterator[Any] = iter(())

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
        return [self.resolved.laid_out(on_device(batch, self.resolved.device)) for batch in chunk]

    def samples(self, batches: Sequence[Any], world: World) -> int:
        """In the batches of one step, over all ranks."""
        return int(sum_values(torch.tensor([sum(map(size_of, batches))]), world))

    def resume(self, step: int, start: Mapping[str, Tensor]) -> None:
        """Go to a step: draw what came before it in its epoch once more, from the random state of the epoch's start."""
        self.step = step
        if step % self.per_epoch:
            set_random_state(start, self.resolved.device, generators_of(self.loader))
            self._open(step % self.per_epoch)
        elif step:  # the loader is still in the epoch that has ended
            start_epoch(self.loader, step // self.per_epoch - 1)

    def _open(self, place: int) -> None:
        self.start = random_state(self.resolved.device, generators_of(self.loader))
        self._rest = batches_from(self.loader, self.step // self.per_epoch, place * self.accumulate)


def generators_of(loader: Any) -> list[torch.Generator]:
    """Generators that a loader or its samplers were given, each once."""
    sampler, batches = (getattr(loader, name, None) for name in ("sampler", "batch_sampler"))
    owners = (loader, sampler, batches, getattr(batches, "sampler", None))
    found = {id(it): it for owner in owners if isinstance(it := getattr(owner, "generator", None), torch.Generator)}
    return list(found.values())


# the state of a loop


@dataclass(frozen=True, eq=False)
class State:
    """All that changes from step to step."""

    shared: Mapping[str, Tensor]  # weights and alphas, the same on every rank
    buffers: Callable[[], Mapping[str, Tensor]]  # those of this rank; a forward pass may replace them
    optimizers: Sequence[Optimizer]
    generators: Sequence[torch.Generator]
    iterators: Sequence[ResumableIterator]
    device: torch.device

    def collect(self, world: World) -> dict[str, Tensor] | None:
        """All of it on the CPU, of all ranks, by name; None for other ranks than the first."""
        states = [optimizer_state(optimizer) for optimizer in self.optimizers]  # on every rank: all raise the same
        own = {f"own/{name}": tensor.detach().cpu() for name, tensor in self.buffers().items()}
        own |= {f"now/{name}": tensor for name, tensor in random_state(self.device, self._generators()).items()}
        for number, batches in enumerate(self.iterators):
            own |= {f"start/{number}/{name}": tensor for name, tensor in batches.start.items()}
        everyone = gather(own, world)
        if not world.first:
            return None
        found = {f"shared/{name}": tensor.detach().cpu() for name, tensor in self.shared.items()}
        for number, state in enumerate(states):
            found |= {f"optimizer/{number}/{name}": tensor for name, tensor in state.items()}
        for rank, tensors in enumerate(everyone):
            found |= {f"rank{rank}/{name}": tensor for name, tensor in tensors.items()}
        return found

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Tensor], steps: Sequence[int], world: World) -> None:
        """Set everything to what was collected, each iterator to its step; FileError if it is of another network."""
        mine = _under(f"rank{world.rank}/", saved)
        pairs = [(self.shared, _under("shared/", saved)), (self.buffers(), _under("own/", mine))]
        states = [(it, _under(f"optimizer/{number}/", saved)) for number, it in enumerate(self.optimizers)]
        for now, before in pairs:  # all checks come before the first write
            shapes, others = ({name: tuple(it.shape) for name, it in table.items()} for table in (now, before))
            if differences := list(_differences(others, shapes)):
                raise FileError(f"This checkpoint is of another network: {differences[0]}.")
        for optimizer, state in states:
            if {path.split("/")[0] for path in state} != {type(optimizer).__name__}:
                raise FileError("This checkpoint is of another optimizer: give the one that it began with.")
        for now, before in pairs:
            for name, tensor in now.items():
                tensor.copy_(before[name])
        for optimizer, state in states:
            set_optimizer_state(optimizer, state)
        for number, (batches, step) in enumerate(zip(self.iterators, steps, strict=True)):
            batches.resume(step, _under(f"start/{number}/", mine))
        set_random_state(_under("now/", mine), self.device, self._generators())

    def _generators(self) -> list[torch.Generator]:
        return [*self.generators, *(it for batches in self.iterators for it in generators_of(batches.loader))]


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


# optimizers: names are class/state or groups/number/where it is/key


def optimizer_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """What an optimizer holds of parameters and groups, as tensors; refused if it is more than those and numbers."""
    name, found = type(optimizer).__name__, dict[str, Tensor]()
    for part, owners in _owners(optimizer).items():
        for number, (values, parameter) in enumerate(owners):
            for key, value in values.items():
                if isinstance(value, Tensor):
                    where = "device" if value.device == parameter.device else "host"
                    found[f"{name}/{part}/{number}/{where}/{key}"] = value.detach().cpu()
                elif isinstance(value, int | float):
                    dtype = torch.float64 if isinstance(value, float) else None
                    found[f"{name}/{part}/{number}/number/{key}"] = torch.tensor(value, dtype=dtype)
                elif value is not None and part == "state":
                    raise TrainingError(f"The {name} has a {key} in its state that cannot be saved: take another one.")
    return found


@torch.no_grad()
def set_optimizer_state(optimizer: Optimizer, saved: Mapping[str, Tensor]) -> None:
    """Set a new optimizer to a state that was saved; tensors that it has already are written in place."""
    owners = _owners(optimizer)
    for path, value in saved.items():
        _, part, number, where, key = path.split("/", 4)
        values, parameter = owners[part][int(number)]
        if part == "state":
            values = optimizer.state[parameter]
        if where == "number":
            values[key] = value.item()
        elif isinstance(values.get(key), Tensor) and values[key].shape == value.shape:
            values[key].copy_(value)
        elif where == "host" or value.shape != parameter.shape:
            values[key] = value.to("cpu" if where == "host" else parameter.device, copy=True)
        else:  # with the memory layout of the parameter, which fused steps want
            values[key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _owners(optimizer: Optimizer) -> dict[str, list[tuple[dict[str, Any], Tensor]]]:
    """What each parameter and each group has, with a parameter that is where its tensors are.

    By get, since some optimizers take an empty state for one that has begun.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {
        "state": [(optimizer.state.get(parameter, {}), parameter) for parameter in parameters],
        "groups": [(group, parameters[0]) for group in optimizer.param_groups],
    }


# when it is saved


@checked
@dataclass(eq=False)
class Checkpointer:
    """Saves the state of a loop in a folder now and then, and brings a new loop to where an old one was."""

    folder: Path
    identity: Mapping[str, Any] = field(default_factory=dict)  # settings that must stay the same; prune has a default
    every_steps: PositiveInt = 1000
    every_seconds: Annotated[float, Range(0)] = 300.0
    stop_requested: Callable[[], bool] = bool
    lines: Callable[[], int] = int  # lines in the log of the run
    earlier: Callable[[str], list[dict[str, Any]]] = lambda stage: []  # records of a stage in that log
    name: str = ""  # of the stage
    _step: int = 0  # of the last checkpoint
    _time: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)

    def stage(self, name: str) -> Checkpointer:
        """The checkpointer of one stage of a run, in a folder of its own."""
        return replace(self, name=name, folder=self.folder / name.replace(" ", "-"), _step=0, _time=time.monotonic())

    def load(self, world: World) -> Checkpoint | None:
        """The newest checkpoint, if there is one, checked."""
        found = load_checkpoint(self.folder)
        if len({*gather(found and found.step, world)}) > 1:
            raise RankError(f"{self.folder}: ranks see different checkpoints: give a folder that all of them share.")
        if found is None:
            return None
        self._step = found.step
        self.check(found.facts, world)
        return found

    def check(self, facts: Mapping[str, Any], world: World) -> None:
        """FileError for a checkpoint that was made with other settings."""
        if differences := list(_differences(facts.get("identity"), self._identity(world))):
            raise FileError(f"{self.folder}: it cannot go on with other settings: {plain('; '.join(differences))}.")

    def due(self, step: int, world: World) -> bool:
        """Whether to save after so many steps; several ranks ask each other now and then."""
        if world.size > 1 and step % _TURN:
            return False
        late = time.monotonic() - self._time >= self.every_seconds
        return any(gather(late or step - self._step >= self.every_steps or self.stop_requested(), world))

    def save(self, step: int, state: State, facts: Mapping[str, Any], world: World) -> None:
        """Save the state after so many steps; StoppedError if a stop was requested."""
        tensors = state.collect(world)
        if tensors is not None:
            known = {"identity": self._identity(world), "lines": self.lines(), DONE: False}
            save_checkpoint(self.folder, Checkpoint(step, tensors, known | dict(facts)))
        self._step, self._time = step, time.monotonic()
        if any(gather(self.stop_requested(), world)) and not facts.get(DONE):
            raise StoppedError(f"Stopped after step {step}, as asked; everything up to here is saved.")

    def stop_if_requested(self, world: World) -> None:
        """StoppedError if a stop was requested, in a loop that saves nothing and begins anew when the run goes on."""
        if any(gather(self.stop_requested(), world)):
            raise StoppedError("Stopped, as asked; everything before the choice of widths is saved.")

    def _identity(self, world: World) -> Any:
        return json.loads(json.dumps(dict(self.identity) | {"world_size": world.size}))


def _differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """What is not the same, as `name was 3, is 4`."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        yield f"{name} was {json.dumps(before)}, is {json.dumps(now)}"


def plain_settings(
    given: Mapping[str, Any], weights: Mapping[str, Tensor], world: World, teacher: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """The settings of a run as plain JSON, with digests of the weights that it starts from: an identity."""
    free = {"log_every": None}  # it changes no result
    flat = {name: {**vars(value), **free} if is_dataclass(value) else value for name, value in given.items()}
    flat[_WEIGHTS] = digest(weights, world)
    flat["the teacher's weights"] = None if teacher is None else digest(teacher, world)

    def text(value: Any) -> Any:
        return dict(value) if isinstance(value, Mapping) else str(getattr(value, "text", value))  # a budget has a text

    return json.loads(json.dumps(flat, default=text))  # type: ignore[no-any-return]


def digest_of_loader(loader: Any, world: World) -> str | None:
    """A hash of the tensors that all ranks take their batches from; None for a loader whose data cannot be known.

    Those of a list of batches and of a DataLoader over tensors are at hand. Any other batch would have to be drawn,
    which takes random numbers, and in random order it is another one each time.
    """
    data = loader if isinstance(loader, list | tuple) else getattr(loader, "dataset", None)
    hashed = hashlib.sha256()
    while isinstance(data, Subset):
        hashed.update(json.dumps([*map(int, data.indices)]).encode())
        data = data.dataset
    if isinstance(data, TensorDataset):
        data = data.tensors
    leaves = tree_leaves([*data]) if isinstance(data, list | tuple) else []
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    for tensor in tensors:
        if tensor.layout == torch.strided:
            hashed.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            hashed.update(_copy(tensor).reshape(-1).view(torch.uint8).numpy().data)
    parts = gather(hashed.hexdigest()[:16] if tensors else None, world)
    return " ".join(parts) if all(parts) else None


def digest(tensors: Mapping[str, Tensor], world: World) -> str:
    """A hash of the tensors of rank 0, which all ranks start from."""
    data = safetensors.torch.save({name: _copy(tensor) for name, tensor in tensors.items()})
    return str(gather(hashlib.sha256(data).hexdigest()[:16], world)[0])
