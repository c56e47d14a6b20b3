"""Loops that can be stopped anywhere and resumed, bit for bit.

`State` is what is saved: weights, alphas, buffers, the state of optimizers and of all random generators, and for each
loader (`ResumableIterator`) the random state at the start of its epoch. `Checkpointer` says when it is saved: every so
many steps or seconds, when a stop is requested, and at the end. Each stage of a run has one safetensors file. A loader
is brought back by drawing the batches of its epoch again.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import math
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
from dmcp.runtime.io import make_printable, quote, read_bytes, refuse_link, write_files

DONE = "done"  # whether the loop of a checkpoint was at its end
_FILE = "checkpoint.safetensors"
_MAX_BYTES = 2**36  # size of a checkpoint
_STEPS_BETWEEN_VOTES = 10  # after which several ranks agree whether to save
_WEIGHTS = "the model's weights (build an untrained model after the same torch.manual_seed)"


# the file


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Where a loop stands."""

    step: int  # optimizer steps done
    tensors: dict[str, Tensor]  # on the CPU once loaded
    facts: dict[str, Any]  # plain JSON


def save_checkpoint(folder: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint; it replaces the one before."""
    tensors = {name: _copy(tensor) for name, tensor in checkpoint.tensors.items()}
    checksum = hashlib.sha256(_body(safetensors.torch.save(tensors))).hexdigest()
    record = json.dumps({"step": checkpoint.step, "facts": checkpoint.facts, "sha256": checksum})
    try:
        write_files(folder, {_FILE: safetensors.torch.save(tensors, {"record": record})})
    except OSError as error:
        raise FileError(f"{folder / _FILE}: cannot be written ({error.strerror or error}): free some space.") from error


def load_checkpoint(folder: Path) -> Checkpoint | None:
    """The checkpoint of a folder; None if there is none."""
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
        raise FileError(f"{path} is damaged ({quote(error)}): remove it to start this stage again.") from error


def _body(data: bytes) -> memoryview:
    """The numbers in the bytes of a safetensors file, which lie behind its header."""
    return memoryview(data)[8 + int.from_bytes(data[:8], "little") :]


def _copy(tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU that shares no memory."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


# random numbers


def random_state(device: torch.device, generators: Sequence[torch.Generator] = ()) -> dict[str, Tensor]:
    """The state of the global generators of torch, Python and NumPy, and of other generators of torch.

    The states of Python and NumPy are the bytes of a JSON text.
    """
    host = json.dumps([random.getstate(), np.random.get_state(legacy=False)], default=lambda array: array.tolist())
    state = {
        "torch": torch.get_rng_state(),
        "host": torch.frombuffer(bytearray(host.encode()), dtype=torch.uint8),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    for number, generator in enumerate(generators):
        state[f"generator{number}"] = generator.get_state()
    return state


def set_random_state(
    state: Mapping[str, Tensor], device: torch.device, generators: Sequence[torch.Generator] = ()
) -> None:
    """Set the global generators, and others, to a state."""
    python_state, numpy_state = json.loads(state["host"].numpy().tobytes())
    version, words, gauss = python_state
    random.setstate((version, tuple(words), gauss))
    np.random.set_state(numpy_state)
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    for number, generator in enumerate(generators):
        generator.set_state(state[f"generator{number}"])


@contextlib.contextmanager
def seeded(seed: int, device: torch.device, world: World) -> Iterator[None]:
    """While entered, torch's global generators (dropout, loaders) have a seed, another one for each rank."""
    rank_seed = seed
    if world.rank:
        rank_seed = mix(seed, world.rank)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(rank_seed)
        if device.type == "cuda":
            with torch.cuda.device(device):  # not all GPUs: only this one is put back
                torch.cuda.manual_seed(rank_seed)
        yield


@contextlib.contextmanager
def untouched(loader: Any, device: torch.device) -> Iterator[None]:
    """While entered, drawing batches of the loader changes no random state and no worker that it has kept alive."""
    state = random_state(device, generators_of(loader))
    workers = getattr(loader, "_iterator", None)  # their random state is out of reach: new workers are used meanwhile
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

    def __init__(self, loader: Loader, engine: ResolvedEngine, world: World, accumulate: int = 1) -> None:
        self.loader = loader
        self.engine = engine
        self.accumulate = accumulate  # batches of a step
        self.batches = min(gather(length_of(loader), world))  # in an epoch; loaders of some ranks may have more
        if not self.batches:
            raise DataError("The loader has no batches: is the batch size larger than the data set?")
        self.per_epoch = math.ceil(self.batches / accumulate)  # steps
        self.step = 0  # the next one
        self.start: dict[str, Tensor] = {}  # random state at the start of the epoch
        self._rest: Iterator[Any] = iter(())  # of the epoch

    def next(self) -> list[Any]:
        """The batches of the next step; the last one of an epoch may have fewer."""
        step_in_epoch = self.step % self.per_epoch
        if step_in_epoch == 0:
            self._open(0)
        drawn = step_in_epoch * self.accumulate
        count = min(self.accumulate, self.batches - drawn)
        batches = list(itertools.islice(self._rest, count))
        if len(batches) < count:
            raise DataError(f"The length of the loader is {self.batches} batches, but it gave {drawn + len(batches)}.")
        self.step += 1
        return [self.engine.laid_out(on_device(batch, self.engine.device)) for batch in batches]

    def samples(self, batches: Sequence[Any], world: World) -> int:
        """The number of samples in the batches of one step, over all ranks."""
        return int(sum_values(torch.tensor([sum(map(size_of, batches))]), world))

    def resume(self, step: int, start: Mapping[str, Tensor]) -> None:
        """Go to a step: draw what came before it in its epoch once more, from the random state of the epoch's start."""
        self.step = step
        if step % self.per_epoch:
            set_random_state(start, self.engine.device, generators_of(self.loader))
            self._open(step % self.per_epoch)
        elif step:  # the loader is still in the epoch that has ended
            start_epoch(self.loader, step // self.per_epoch - 1)

    def _open(self, step_in_epoch: int) -> None:
        """Begin an epoch at one of its steps."""
        self.start = random_state(self.engine.device, generators_of(self.loader))
        epoch = self.step // self.per_epoch
        self._rest = batches_from(self.loader, epoch, step_in_epoch * self.accumulate)


def generators_of(loader: Any) -> list[torch.Generator]:
    """The generators that a loader or its samplers were given, each once."""
    sampler = getattr(loader, "sampler", None)
    batch_sampler = getattr(loader, "batch_sampler", None)
    inner_sampler = getattr(batch_sampler, "sampler", None)
    generators: list[torch.Generator] = []
    for owner in (loader, sampler, batch_sampler, inner_sampler):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is listed for listed in generators):
            generators.append(generator)
    return generators


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
        """The state of all ranks on the CPU, by name; None on other ranks than the first."""
        optimizer_states = [optimizer_state(optimizer) for optimizer in self.optimizers]  # all ranks raise the same
        everyone = gather(self._of_this_rank(), world)
        if not world.first:
            return None

        collected = {f"shared/{name}": tensor.detach().cpu() for name, tensor in self.shared.items()}
        for number, state in enumerate(optimizer_states):
            for name, tensor in state.items():
                collected[f"optimizer/{number}/{name}"] = tensor
        for rank, tensors in enumerate(everyone):
            for name, tensor in tensors.items():
                collected[f"rank{rank}/{name}"] = tensor
        return collected

    def _of_this_rank(self) -> dict[str, Tensor]:
        """What each rank has for itself: buffers, random state, and the start of the epoch of each iterator."""
        tensors = {f"own/{name}": tensor.detach().cpu() for name, tensor in self.buffers().items()}
        for name, tensor in random_state(self.device, self._generators()).items():
            tensors[f"now/{name}"] = tensor
        for number, iterator in enumerate(self.iterators):
            for name, tensor in iterator.start.items():
                tensors[f"start/{number}/{name}"] = tensor
        return tensors

    @torch.no_grad()
    def restore(self, saved: Mapping[str, Tensor], steps: Sequence[int], world: World) -> None:
        """Set everything to what was collected, each iterator to its step; FileError if it is of another network."""
        of_this_rank = _under(f"rank{world.rank}/", saved)
        tables = [(self.shared, _under("shared/", saved)), (self.buffers(), _under("own/", of_this_rank))]
        optimizer_states = []
        for number, optimizer in enumerate(self.optimizers):
            optimizer_states.append((optimizer, _under(f"optimizer/{number}/", saved)))

        # All checks come before the first write.
        for current, before in tables:
            differences = list(_differences(_shapes(before), _shapes(current)))
            if differences:
                raise FileError(f"This checkpoint belongs to another network: {differences[0]}.")
        for optimizer, state in optimizer_states:
            if {path.split("/")[0] for path in state} != {type(optimizer).__name__}:
                raise FileError("This checkpoint belongs to another optimizer: pass the one that the run started with.")

        for current, before in tables:
            for name, tensor in current.items():
                tensor.copy_(before[name])
        for optimizer, state in optimizer_states:
            set_optimizer_state(optimizer, state)
        for number, (iterator, step) in enumerate(zip(self.iterators, steps, strict=True)):
            iterator.resume(step, _under(f"start/{number}/", of_this_rank))
        set_random_state(_under("now/", of_this_rank), self.device, self._generators())

    def _generators(self) -> list[torch.Generator]:
        generators = list(self.generators)
        for iterator in self.iterators:
            generators += generators_of(iterator.loader)
        return generators


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


# optimizers: names are class/state or groups/number/device, host or number/key


def optimizer_state(optimizer: Optimizer) -> dict[str, Tensor]:
    """What an optimizer holds of its parameters and groups, as tensors; refused if that is more than numbers."""
    kind = type(optimizer).__name__
    tensors: dict[str, Tensor] = {}
    for part, owners in _owners(optimizer).items():
        for number, (values, parameter) in enumerate(owners):
            for key, value in values.items():
                if isinstance(value, Tensor):
                    where = "host"
                    if value.device == parameter.device:
                        where = "device"
                    tensors[f"{kind}/{part}/{number}/{where}/{key}"] = value.detach().cpu()
                elif isinstance(value, int | float):
                    dtype = None
                    if isinstance(value, float):
                        dtype = torch.float64
                    tensors[f"{kind}/{part}/{number}/number/{key}"] = torch.tensor(value, dtype=dtype)
                elif value is not None and part == "state":
                    raise TrainingError(
                        f"The state of {kind} holds a {key} that cannot be saved: use another optimizer."
                    )
    return tensors


@torch.no_grad()
def set_optimizer_state(optimizer: Optimizer, saved: Mapping[str, Tensor]) -> None:
    """Set a new optimizer to a saved state; tensors that it has already are written in place."""
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
    """What the optimizer holds of each parameter and of each group, with a parameter on the device of its tensors."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {  # get, since some optimizers take an empty state for one that has begun
        "state": [(optimizer.state.get(parameter, {}), parameter) for parameter in parameters],
        "groups": [(group, parameters[0]) for group in optimizer.param_groups],
    }


# when it is saved


@checked
@dataclass(eq=False)
class Checkpointer:
    """Saves the state of a loop in a folder at intervals, so that a new process can resume where an old one stopped."""

    folder: Path
    identity: Mapping[str, Any] = field(default_factory=dict)  # settings that must not change; prune has a default
    every_steps: PositiveInt = 1000
    every_seconds: Annotated[float, Range(0)] = 300.0
    stop_requested: Callable[[], bool] = bool
    lines: Callable[[], int] = int  # counts the lines in the log of the run
    earlier: Callable[[str], list[dict[str, Any]]] = lambda stage: []  # reads the records of a stage from that log
    name: str = ""  # name of the stage
    _step: int = 0  # step and time of the last checkpoint
    _time: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.folder = Path(self.folder)

    def stage(self, name: str) -> Checkpointer:
        """The checkpointer of one stage of a run, in a folder of its own."""
        folder = self.folder / name.replace(" ", "-")
        return replace(self, name=name, folder=folder, _step=0, _time=time.monotonic())

    def load(self, world: World) -> Checkpoint | None:
        """The last checkpoint after a check of its settings; None if there is none."""
        checkpoint = load_checkpoint(self.folder)
        steps = gather(checkpoint and checkpoint.step, world)
        if len(set(steps)) > 1:
            raise RankError(f"{self.folder}: the ranks see different checkpoints: use a folder that all of them share.")
        if checkpoint is None:
            return None
        self._step = checkpoint.step
        self.check(checkpoint.facts, world)
        return checkpoint

    def check(self, facts: Mapping[str, Any], world: World) -> None:
        """Raise FileError for a checkpoint that was made with other settings."""
        differences = list(_differences(facts.get("identity"), self._identity(world)))
        if differences:
            text = make_printable("; ".join(differences))
            raise FileError(f"{self.folder}: a run can only be resumed with the same settings: {text}.")

    def due(self, step: int, world: World) -> bool:
        """Whether to save after so many steps; several ranks ask each other now and then."""
        if world.size > 1 and step % _STEPS_BETWEEN_VOTES:
            return False
        due_by_time = time.monotonic() - self._time >= self.every_seconds
        due_by_steps = step - self._step >= self.every_steps
        return any(gather(due_by_time or due_by_steps or self.stop_requested(), world))

    def save(self, step: int, state: State, facts: Mapping[str, Any], world: World) -> None:
        """Save the state after so many steps; raise StoppedError if a stop was requested."""
        tensors = state.collect(world)
        if tensors is not None:
            facts_of_run = {"identity": self._identity(world), "lines": self.lines(), DONE: False}
            save_checkpoint(self.folder, Checkpoint(step, tensors, facts_of_run | dict(facts)))
        self._step = step
        self._time = time.monotonic()
        if any(gather(self.stop_requested(), world)) and not facts.get(DONE):
            raise StoppedError(f"Stopped after step {step}, as requested; everything up to here is saved.")

    def stop_if_requested(self, world: World) -> None:
        """Raise StoppedError if a stop was requested, in a loop that saves nothing and starts again on resume."""
        if any(gather(self.stop_requested(), world)):
            raise StoppedError("Stopped, as requested; everything before the choice of widths is saved.")

    def _identity(self, world: World) -> Any:
        return json.loads(json.dumps(dict(self.identity) | {"world_size": world.size}))


def _differences(before: Any, now: Any, name: str = "") -> Iterator[str]:
    """The entries that differ, each as `name was 3, is 4`."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in {**before, **now}:
            yield from _differences(before.get(key), now.get(key), f"{name}.{key}" if name else key)
    elif before != now:
        yield f"{name} was {json.dumps(before)}, is {json.dumps(now)}"


def plain_settings(
    settings: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    world: World,
    teacher: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """The identity of a run: its settings as plain JSON, with digests of the weights that it starts from."""
    identity: dict[str, Any] = {}
    for name, value in settings.items():
        if is_dataclass(value):
            identity[name] = {**vars(value), "log_every": None}  # which changes no result
        else:
            identity[name] = value
    identity[_WEIGHTS] = digest(weights, world)
    identity["the teacher's weights"] = None if teacher is None else digest(teacher, world)
    return json.loads(json.dumps(identity, default=_as_json))  # type: ignore[no-any-return]


def _as_json(value: Any) -> Any:
    """What JSON has no type for: a mapping as a dict, a budget as its text."""
    if isinstance(value, Mapping):
        return dict(value)
    return str(getattr(value, "text", value))


def digest_of_loader(loader: Any, world: World) -> str | None:
    """A hash of the tensors that all ranks take their batches from; None for a loader whose data cannot be known.

    The tensors of a list of batches and of a DataLoader over tensors are at hand. Any other batch would have to be
    drawn, which takes random numbers, and a loader in random order draws another one each time.
    """
    data = getattr(loader, "dataset", None)
    if isinstance(loader, list | tuple):
        data = loader
    digests = gather(_digest_of_data(data), world)
    if not all(digests):
        return None
    return " ".join(digests)


def _digest_of_data(data: Any) -> str | None:
    """A hash of the tensors of a data set or list of batches; None if they are not at hand."""
    hashed = hashlib.sha256()
    while isinstance(data, Subset):
        hashed.update(json.dumps([*map(int, data.indices)]).encode())
        data = data.dataset
    if isinstance(data, TensorDataset):
        data = data.tensors
    if not isinstance(data, list | tuple):
        return None
    tensors = [leaf for leaf in tree_leaves([*data]) if isinstance(leaf, Tensor)]
    if not tensors:
        return None
    for tensor in tensors:
        if tensor.layout == torch.strided:
            hashed.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            hashed.update(_copy(tensor).reshape(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()[:16]


def digest(tensors: Mapping[str, Tensor], world: World) -> str:
    """A hash of the tensors of rank 0, which all ranks start from."""
    data = safetensors.torch.save({name: _copy(tensor) for name, tensor in tensors.items()})
    return str(gather(hashlib.sha256(data).hexdigest()[:16], world)[0])
