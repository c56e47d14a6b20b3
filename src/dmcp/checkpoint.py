"""Loops that can be interrupted and resumed, bit for bit."""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import inspect
import itertools
import json
import math
import os
import random
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dmcp.batches import Loader, batches_from, length_of, mix, on_device, size_of, start_epoch
from dmcp.errors import DataError, FileError, RankError, StoppedError, TrainingError
from dmcp.modules import path_of
from dmcp.runtime.distributed import World, fewest, gather_bytes, same_everywhere, share_tensors, sum_values
from dmcp.runtime.engine import ResolvedEngine
from dmcp.runtime.io import alive, open_file, process_start, refuse_link
from dmcp.settings import Engine

_FORMAT = "torch-dmcp checkpoint 1"
_FACTS, _METADATA = "facts", "__metadata__"  # the key of ours in the header's table, and that table's own key
_LONGEST_HEADER = 100_000_000  # bytes; safetensors reads no longer one
_NAME = re.compile(r"step-([0-9]{9,})-([0-9a-f]{16})\.safetensors")
_TEMPORARY = re.compile(r"\.tmp-([0-9]+)-([0-9]+)-[0-9a-f]+")
_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64}
_BYTES = {torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.bool}
_INTS = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8}
_DTYPES = _FLOATS | _BYTES | _INTS  # those that safetensors both writes and reads


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Where a run stands: all that it needs to go on as if it had never stopped."""

    step: int  # optimizer steps done
    tensors: dict[str, Tensor]  # on the CPU once loaded
    facts: dict[str, Any]  # plain JSON

    def __post_init__(self) -> None:
        if type(self.step) is not int or self.step < 0:
            raise FileError(f"The step of a checkpoint must be an int of at least 0, not {self.step!r}.")


@dataclass(frozen=True, kw_only=True, order=True)
class _Found:
    """A checkpoint file; the order is that of age."""

    step: int
    written: int  # nanoseconds; decides between two of the same step
    path: Path
    checksum: str


def save_checkpoint(folder: Path, checkpoint: Checkpoint, keep: int = 2) -> Path:
    """Write a checkpoint into the folder, then remove all earlier ones but the newest; `keep` are left with this one.

    Those of later steps are not touched: they are damaged ones that loading went past.
    """
    if keep < 1:
        raise FileError(f"At least 1 checkpoint must be kept, not {keep}.")
    data = _encode(checkpoint)
    path = folder / f"step-{checkpoint.step:09d}-{_checksum(data)}.safetensors"
    try:
        refuse_link(folder)
        folder.mkdir(parents=True, exist_ok=True)
        earlier = [found for found in _find(folder) if found.step <= checkpoint.step and found.path != path]
        _clean(folder)
        _write(path, data)
    except FileError:
        raise
    except OSError as error:
        raise FileError(
            f"{path}: cannot be written ({error.strerror or error}): free some space or give a folder that can be"
            " written; the checkpoints before it are as they were."
        ) from error
    kept = [found for found in reversed(earlier) if found.step < checkpoint.step][: keep - 1]
    for found in earlier:
        if found not in kept:
            with contextlib.suppress(OSError):  # the new one is safe, and the next save tries again
                found.path.unlink()
    return path


def load_checkpoint(folder: Path, notice: Callable[[str], None] | None = None) -> Checkpoint | None:
    """The newest checkpoint that is not damaged, None if there never was one; `notice` is told of those passed over."""
    try:
        refuse_link(folder)
        found = _find(folder)
    except FileNotFoundError:
        return None
    except FileError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise FileError(f"{folder}: cannot be read ({reason}): give the folder of the checkpoints.") from error
    for candidate in reversed(found):
        try:
            return _read(candidate)
        except OSError as error:
            if notice is not None:
                notice(f"{candidate.path} is damaged and was passed over: {error.strerror or error}.")
    if found:
        names = ", ".join(candidate.path.name for candidate in found)
        raise FileError(f"{folder}: all checkpoints are damaged ({names}): remove them to start from the beginning.")
    return None


# what is written


def _encode(checkpoint: Checkpoint) -> bytes:
    """The bytes of the file; the same state always gives the same."""
    tensors = _plain(checkpoint.tensors)
    record = {"format": _FORMAT, "step": checkpoint.step, "facts": checkpoint.facts}
    try:
        text = json.dumps(record, allow_nan=False)
        same = isinstance(checkpoint.facts, dict) and json.loads(text) == record
    except (TypeError, ValueError, RecursionError) as error:
        raise FileError(f"The facts of a checkpoint must be JSON, with finite numbers only: {error}.") from error
    if not same:
        raise FileError("The facts of a checkpoint must be a dict of JSON: make tuples lists, and keys text.")
    try:
        data = safetensors.torch.save(tensors, {_FACTS: text})
    except Exception as error:  # a foreign library on what a user named his tensors
        raise FileError(f"The tensors of a checkpoint cannot be written as safetensors: {error}.") from error
    if _header_length(data) > _LONGEST_HEADER:
        raise FileError(f"The facts of a checkpoint are too long to be read again: keep below {_LONGEST_HEADER} bytes.")
    return data


def _plain(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors on the CPU, contiguous, and none in the memory of another; the inputs stay as they are."""
    plain: dict[str, Tensor] = {}
    places: set[int] = set()
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == _METADATA:
            raise FileError(f"A tensor of a checkpoint cannot be named {name!r}: give it another name.")
        if not isinstance(tensor, Tensor) or tensor.dtype not in _DTYPES or tensor.layout != torch.strided:
            kind = f"{tensor.layout} {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
            raise FileError(f"{name}: a checkpoint cannot hold a {kind}: turn it into a dense tensor or into facts.")
        if tensor.is_meta:
            raise FileError(f"{name}: a tensor on the meta device has no values: give it some before saving.")
        copy = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        place = copy.untyped_storage().data_ptr()
        plain[name] = copy.clone() if place in places else copy
        places.add(place)
    return plain


def _write(path: Path, data: bytes) -> None:
    """Write a file that appears whole, and is on the disk when this returns."""
    pid = os.getpid()
    temporary = path.with_name(f".tmp-{pid}-{process_start(pid) or 0}-{secrets.token_hex(8)}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
    if os.name == "posix":
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder last through a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has no such thing
            raise
    finally:
        os.close(descriptor)


def _clean(folder: Path) -> None:
    """Remove what killed processes left half written."""
    for path in folder.iterdir():
        match = _TEMPORARY.fullmatch(path.name)
        if match and not alive(int(match[1]), int(match[2]) or None):
            with contextlib.suppress(OSError):
                path.unlink()


def _find(folder: Path) -> list[_Found]:
    """The checkpoint files of a folder, the oldest first."""
    found = []
    for path in folder.iterdir():
        match = _NAME.fullmatch(path.name)
        if not match or match[1] != f"{int(match[1]):09d}":
            continue
        with contextlib.suppress(FileNotFoundError):  # removed since it was listed
            facts = path.lstat()
            if not stat.S_ISREG(facts.st_mode):
                raise FileError(f"{path} is a link or not a file: remove it, checkpoints are plain files.")
            found.append(_Found(step=int(match[1]), written=facts.st_mtime_ns, path=path, checksum=match[2]))
    return sorted(found)


def _read(found: _Found) -> Checkpoint:
    """What a checkpoint file holds; no size that it states is believed before it fits the file."""
    try:
        with open(found.path, "rb", opener=open_file) as file:
            data = _read_bytes(file)
        if _checksum(data) != found.checksum:
            raise FileError("its checksum is not the one in its name")
        record = _parse(_header(data)[_METADATA][_FACTS])
        if not isinstance(record, dict) or record.get("format") != _FORMAT:
            raise FileError(f"it is not marked as {_FORMAT}")
        if type(record.get("step")) is not int or record["step"] != found.step:
            raise FileError("its step is not the one in its name")
        if not isinstance(record.get("facts"), dict):
            raise FileError("it has no facts")
        return Checkpoint(found.step, safetensors.torch.load(data), record["facts"])
    except OSError:
        raise
    except Exception as error:  # json, safetensors and torch raise many kinds for a header that makes no sense
        raise FileError(f"it is not a safetensors file of ours ({type(error).__name__})") from error


def _read_bytes(file: BinaryIO) -> bytes:
    """All bytes of a file, if the sizes in its header add up to that many."""
    facts = os.fstat(file.fileno())
    if not stat.S_ISREG(facts.st_mode):
        raise FileError("it is not a plain file")
    length, room = _header_length(file.read(8)), facts.st_size - 8
    if length > min(room, _LONGEST_HEADER):
        raise FileError("its header says that it is longer than it can be")
    file.seek(0)
    header = _header(file.read(8 + length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != _METADATA]
    if length + max(ends, default=0) != room:
        raise FileError("it is not as long as its header says")
    file.seek(0)
    return file.read(8 + room)


def _header_length(data: bytes) -> int:
    return int.from_bytes(data[:8], "little")


def _header(data: bytes) -> dict[str, Any]:
    """The JSON that a safetensors file begins with."""
    header = _parse(data[8 : 8 + _header_length(data)].decode())
    if not isinstance(header, dict):
        raise FileError("its header is not a table")
    return header


def _parse(text: str) -> Any:
    """JSON as it is defined: without NaN, and with numbers that a float can hold."""
    return json.loads(text, parse_constant=_refuse_number, parse_float=_parse_float)


def _parse_float(text: str) -> float:
    return float(text) if math.isfinite(float(text)) else _refuse_number(text)


def _refuse_number(_: str) -> NoReturn:
    raise FileError("it holds a number that is not finite")


def _checksum(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


MakeOptimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]  # parameter groups -> what trains them

_STATE, _GROUPS = "state", "groups"  # what an optimizer keeps of each parameter, and of each group
_BESIDE, _HOST, _NUMBER = "beside", "host", "number"  # a tensor where its parameter is, one on the host, a plain number
_STATE_DTYPES = {bool: torch.bool, int: torch.int64, float: torch.float64}  # a bool is an int, too: it comes first
_REMEDY = "take another optimizer, or train without a keeper."


def make_optimizer(make: MakeOptimizer, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """What the function makes of the groups; TrainingError where it cannot train them."""
    wanted = {id(parameter) for group in groups for parameter in group["params"]}
    made = make(groups) if callable(make) else make
    if not callable(make) or not isinstance(made, torch.optim.Optimizer):
        raise TrainingError(
            "optimizer must be a function that makes a torch.optim.Optimizer of parameter groups, like "
            f"optimizer=torch.optim.AdamW; this {'gives' if callable(make) else 'is'} a {type(made).__name__}."
        )
    name = type(made).__name__
    if {id(parameter) for parameter in _parameters(made)} != wanted:
        raise TrainingError(
            f"The {name} has other parameters than it was given: give it all of the groups; what is not to be trained "
            "has requires_grad=False."
        )
    if not all("lr" in group for group in made.param_groups):
        raise TrainingError(f"The {name} has groups without an lr, which the schedule sets: take another one.")
    _, *inputs = inspect.signature(type(made).step).parameters.values()
    if any(it.default is it.empty and it.kind not in (it.VAR_POSITIONAL, it.VAR_KEYWORD) for it in inputs):
        raise TrainingError(f"The step of {name} needs a closure, which there is not: take another optimizer.")
    return made


def rate_shares(optimizer: torch.optim.Optimizer) -> list[float]:
    """What a new optimizer's groups learn at, relative to the rate of the schedule.

    The rate that groups without their own have stands for the schedule's. Where none has that one, the highest does: it
    may be a default that nobody chose, and no group is then faster than the settings say.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    if not all(isinstance(rate, int | float | Tensor) for rate in rates):
        return [1.0] * len(rates)
    usual, numbers = optimizer.defaults.get("lr"), [float(rate) for rate in rates]
    base = float(usual) if isinstance(usual, int | float | Tensor) and float(usual) in numbers else 0.0
    base = base or max(numbers)
    return [rate / base if base else 1.0 for rate in numbers]


def check_graphs(engine: Engine | None, make: MakeOptimizer | None) -> None:
    """Refuse CUDA graphs: a graph would replay the learning rate that an optimizer had when it was captured."""
    if make is not None and engine is not None and engine.graphs:
        raise TrainingError(
            "Steps with an optimizer of your own cannot be CUDA graphs: leave graphs out of the Engine."
        )


# its state: names are Class/part/number/kind/key


def check_keepable(optimizer: torch.optim.Optimizer) -> None:
    """Refuse a state that no checkpoint can hold: every rank asks, though one writes, so that all say the same."""
    name = type(optimizer).__name__
    known = {id(parameter) for parameter in _parameters(optimizer)}
    for owner in optimizer.state:
        if id(owner) not in known:
            raise TrainingError(f"The {name} keeps {owner!r} in its state, which is of no parameter: {_REMEDY}")
    for values, _ in _parts(optimizer)[_STATE]:  # groups also have settings that never change
        for key, value in values.items():
            if value is not None and not isinstance(value, Tensor | int | float):
                raise TrainingError(
                    f"The {name} keeps a {type(value).__name__} ({key}) in its state, which no checkpoint can "
                    f"hold: {_REMEDY}"
                )


def state_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All that changes from step to step, of a state that was checked, by names that say what it was."""
    found: dict[str, Tensor] = {}
    name = type(optimizer).__name__
    for part, owners in _parts(optimizer).items():
        for number, (values, parameter) in enumerate(owners):
            for key, value in values.items():
                if isinstance(value, Tensor):
                    kind = _BESIDE if value.device == parameter.device else _HOST
                    found[f"{name}/{part}/{number}/{kind}/{key}"] = value.detach().cpu()
                elif isinstance(value, int | float):
                    dtype = next(
                        dtype for kind, dtype in _STATE_DTYPES.items() if isinstance(value, kind)
                    )  # also NumPy's float
                    found[f"{name}/{part}/{number}/{_NUMBER}/{key}"] = torch.tensor(value, dtype=dtype)
    return found


def check_state(optimizer: torch.optim.Optimizer, taken: Mapping[str, Tensor]) -> None:
    """Refuse the state of another optimizer."""
    owners, name = _parts(optimizer), type(optimizer).__name__
    paths = [path.split("/", 4) for path in taken]
    if not paths or not all(path[0] == name and int(path[2]) < len(owners[path[1]]) for path in paths):
        raise FileError(f"This checkpoint is of another optimizer than {name}: give the one that it began with.")


@torch.no_grad()
def put_state(optimizer: torch.optim.Optimizer, taken: Mapping[str, Tensor]) -> None:
    """Bring a new optimizer, checked before, to the state that was taken."""
    owners = _parts(optimizer)
    for path, value in taken.items():
        _, part, number, kind, key = path.split("/", 4)
        values, parameter = owners[part][int(number)]
        if part == _STATE:
            values = optimizer.state[parameter]
        values[key] = _brought_back(value, kind, parameter)


def _brought_back(value: Tensor, kind: str, parameter: Tensor) -> Any:
    """What a value was; what has a parameter's shape also gets its layout, which fused steps want."""
    if kind == _NUMBER:
        return value.item()
    if kind == _HOST:
        return value.clone()
    if value.shape != parameter.shape:
        return value.to(parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype).copy_(value)


def _parts(optimizer: torch.optim.Optimizer) -> dict[str, list[tuple[dict[str, Any], Tensor]]]:
    """What each parameter and each group has, with a parameter that is where its tensors are.

    Asked for by get: an empty state that we had made would look to some optimizers like one that they have begun.
    """
    parameters = list(_parameters(optimizer))
    groups = [(group, parameters[0]) for group in optimizer.param_groups]
    return {_STATE: [(optimizer.state.get(it, {}), it) for it in parameters], _GROUPS: groups}


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


_TURN = 10  # steps after which ranks agree whether to save
_WEIGHTS = "the digest of the model's weights"
_TEACHER = "the digest of the teacher's weights"
_FREE = ("log_every",)  # settings that change nothing of a result
DONE = "done"  # whether the loop of a checkpoint was at its end


class ResumableIterator:
    """The batches of one step after the other, epoch after epoch, on the device; it can be entered at any step."""

    def __init__(self, loader: Loader, resolved: ResolvedEngine, world: World, accumulate: int = 1) -> None:
        self.loader, self.resolved, self.accumulate = loader, resolved, accumulate
        self.batches = fewest(length_of(loader), world)  # in an epoch; loaders of some ranks may have more
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
        return random_state(self.resolved.device) | own

    def _set(self, state: Mapping[str, Tensor]) -> None:
        set_random_state(state, self.resolved.device)
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
        device = self.resolved.device
        return [self.resolved.laid_out(on_device(batch, device)) for batch in chunk]

    def samples(self, batches: Sequence[Any], world: World) -> int:
        """In the batches of one step, over all ranks."""
        own = sum(map(size_of, batches))
        return own if world.size == 1 else int(sum_values(torch.tensor([own]), world))

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
def seeded(seed: int, device: torch.device, world: World) -> Iterator[None]:
    """Torch's global generators (dropout, loaders) seeded, for each rank with other numbers, and afterwards as before.

    Not by fork_rng: after an assert of its own a GPU cannot be given a state, and that failure would hide the assert.
    """
    own = mix(seed, world.rank) if world.rank else seed
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
    feeds: Sequence[ResumableIterator]
    device: torch.device
    given: bool = False  # whether the first optimizer is the user's, whose state is whatever it keeps

    def take(self, world: World) -> dict[str, Tensor] | None:
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
        everyone = gather_bytes(own, world)
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
    def put(self, taken: Mapping[str, Tensor], steps: Sequence[int], world: World) -> None:
        """Bring everything back to what was taken, each feed to its step; FileError if it is not of this network."""
        mine = _under(f"rank{world.rank}/", taken)
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


def _no_records(stage: str) -> list[dict[str, Any]]:
    return []


@dataclass(eq=False)
class Checkpointer:
    """Saves the state of one loop in a folder now and then, and brings a new loop to where an old one was."""

    folder: Path
    identity: Mapping[str, Any] = field(default_factory=dict)  # settings that must be those of before, as plain JSON
    every_steps: int = 1000
    every_seconds: float = 300.0
    asked_to_stop: Callable[[], bool] = _never
    lines: Callable[[], int] = int  # lines in the log of the run
    earlier: Callable[[str], list[dict[str, Any]]] = _no_records  # stage -> its records in that log
    notice: Callable[[str], None] | None = None  # hears what a person should know
    complete: bool = False  # whether the identity has all settings; otherwise prune adds those that it was given
    settings: Mapping[str, Any] = field(default_factory=dict)  # what prune was given, as plain JSON
    name: str = ""  # of the stage, if it is of one
    _step: int = 0  # of the last checkpoint
    _time: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.folder = path_of("A keeper", self.folder, "folder")  # text will do
        for name in ("every_steps", "every_seconds"):
            if not isinstance(value := getattr(self, name), Real):
                raise TrainingError(f"{name} must be a number, not {value!r}.")

    def stage(self, name: str) -> Checkpointer:
        """The checkpointer of one stage of a run, in a folder of its own."""
        return replace(self, name=name, folder=self.folder / name.replace(" ", "-"), _step=0, _time=time.monotonic())

    def load(self, world: World) -> Checkpoint | None:
        """The newest checkpoint, if there is one; FileError where it was made with other settings."""
        found = load_checkpoint(self.folder, self.notice if world.first else None)
        if not same_everywhere(str(found and found.step), world):
            raise RankError(
                f"{self.folder}: the ranks see different checkpoints here: give a folder that all of them share."
            )
        if found is None:
            return None
        self._step = found.step
        differences = list(_differences(found.facts.get("identity"), self._identity(world)))
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

    def _identity(self, world: World) -> Any:
        return json.loads(json.dumps(dict(self.identity) | {"ranks": world.size}))

    def due(self, step: int, world: World) -> bool:
        """Whether to save after so many steps; several ranks ask each other now and then."""
        if world.size > 1 and step % _TURN:
            return False
        late = time.monotonic() - self._time >= self.every_seconds
        wish = late or step - self._step >= self.every_steps or self.asked_to_stop()
        return wish if world.size == 1 else bool(sum_values(torch.tensor([int(wish)]), world))

    def save(self, step: int, state: State, facts: Mapping[str, Any], world: World) -> None:
        """Save the state after so many steps; StoppedError if that is what was asked for."""
        tensors = state.take(world)
        if tensors is not None:
            known = {"identity": self._identity(world), "lines": self.lines(), DONE: False}
            known |= {"settings": dict(self.settings)} if self.settings else {}
            save_checkpoint(self.folder, Checkpoint(step, tensors, known | dict(facts)))
        self._step, self._time = step, time.monotonic()
        stop = self.asked_to_stop()
        if world.size > 1:
            stop = bool(sum_values(torch.tensor([int(stop)]), world))
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
    given: Mapping[str, Any], weights: Mapping[str, Tensor], world: World, teacher: Mapping[str, Tensor] | None = None
) -> dict[str, Any]:
    """What a job was given as flat plain JSON, settings by their fields, and digests of rank 0's weights."""
    flat: dict[str, Any] = {}
    for name, value in given.items():
        if hasattr(value, "__dataclass_fields__"):
            flat |= {f"{name}.{it.name}": getattr(value, it.name) for it in fields(value) if it.name not in _FREE}
        else:
            flat[name] = value
    flat[_WEIGHTS] = digest(weights, world)
    flat[_TEACHER] = None if teacher is None else digest(teacher, world)
    plain: dict[str, Any] = json.loads(json.dumps(flat, default=_text))
    return plain


def _text(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(getattr(value, "text", value))  # a budget has a text


def digest(tensors: Mapping[str, Tensor], world: World) -> str:
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
    share_tensors([shared], world)
    return bytes(shared.tolist()).hex()
