"""A checkpoint is one safetensors file that has its checksum in its name, and appears whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import safetensors.torch
import torch
from torch import Tensor

from dmcp.errors import FileError
from dmcp.locks import alive, process_start

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


# what is read


def refuse_link(path: Path) -> None:
    """Stop if a file or folder is a link to a place outside the folder that it is in."""
    if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(os.path.realpath(path.parent)):
        raise FileError(f"{path} is a link that leads elsewhere: put there what it leads to, if you trust it.")


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


def open_file(path: str, flags: int) -> int:
    """Open what is still a file: no link is followed, and no pipe waited for."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


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
