"""What is saved comes back bit for bit, whatever happens to the process, the disk or the file in between."""

from __future__ import annotations

import copy
import errno
import hashlib
import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch import Tensor, nn

import dmcp.checkpoint
from dmcp.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from dmcp.errors import FileError

HERE = Path(__file__).parent
FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32, torch.uint64]


def bits(tensor: Tensor) -> tuple[torch.dtype, torch.Size, bytes]:
    """All that makes two tensors the same, NaNs and the sign of zero included."""
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).clone(memory_format=torch.contiguous_format)
    return tensor.dtype, tensor.shape, bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


def state(step: int, size: int = 200) -> Checkpoint:
    """A state that is a function of the step."""
    draws = torch.Generator().manual_seed(step)
    tensors = {"a": torch.randn(size, generator=draws), "rng": draws.get_state(), "n": torch.tensor(step)}
    return Checkpoint(step, tensors, {"lr": 0.1 / (step + 1), "seen": [step, str(step)]})


def same(found: Checkpoint | None, saved: Checkpoint) -> bool:
    return (
        found is not None
        and found.step == saved.step
        and found.facts == saved.facts
        and {name: bits(tensor) for name, tensor in found.tensors.items()}
        == {name: bits(tensor) for name, tensor in saved.tensors.items()}
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# the round trip


def test_tensors_come_back_bit_for_bit(tmp_path: Path) -> None:
    raw = torch.randint(0, 256, (64,), dtype=torch.uint8)
    tensors = {str(dtype): raw.clone().view(dtype) for dtype in FLOATS + INTS}
    tensors |= {
        "bool": raw > 99,
        "complex": torch.randn(3, dtype=torch.complex64),
        "conj": torch.randn(2, dtype=torch.complex64).conj(),
        "negated": torch.randn(1, dtype=torch.complex64).conj().imag,
    }
    tensors |= {"odd": torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]), "scalar": torch.tensor(3.5)}
    tensors |= {"none": torch.empty(0, 3), "cpu rng": torch.get_rng_state(), "parameter": nn.Parameter(torch.randn(3))}
    images = torch.randn(2, 3, 4, 5)
    tensors |= {"last": images.to(memory_format=torch.channels_last), "turned": images.mT, "part": images[:, 1:, ::2]}
    tensors |= {"wide": torch.randn(3, 1).expand(3, 4), "tied": images, "tied again": images, "view": images[1]}
    before = {name: (bits(tensor), tensor.stride(), tensor.data_ptr()) for name, tensor in tensors.items()}
    path = save_checkpoint(tmp_path / "new" / "folder", Checkpoint(7, tensors, {}))
    after = {name: (bits(tensor), tensor.stride(), tensor.data_ptr()) for name, tensor in tensors.items()}
    assert after == before

    found = load_checkpoint(tmp_path / "new" / "folder")
    assert found is not None and found.step == 7 and found.facts == {}
    assert {name: bits(tensor) for name, tensor in found.tensors.items()} == {name: b[0] for name, b in before.items()}
    assert all(tensor.is_contiguous() and not tensor.requires_grad for tensor in found.tensors.values())
    found.tensors["tied"].zero_()  # its memory is its own, and can be written
    assert found.tensors["tied again"].any() and found.tensors["view"].any() and images.any()
    generator = torch.Generator()
    generator.set_state(found.tensors["cpu rng"])

    checksum = hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    assert path == tmp_path / "new" / "folder" / f"step-000000007-{checksum}.safetensors"
    assert names(path.parent) == [path.name]
    with safetensors.safe_open(path, "pt") as file:  # any safetensors reader opens it
        assert set(file.keys()) == set(tensors)
        assert list(file.metadata()) == ["facts"] and json.loads(file.metadata()["facts"])["step"] == 7


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_of_a_gpu_come_back_on_the_cpu(tmp_path: Path) -> None:
    tensor = torch.randn(4, 3, 5, 5, device="cuda").to(memory_format=torch.channels_last)
    save_checkpoint(tmp_path, Checkpoint(1, {"a": tensor, "b": tensor}, {}))
    found = load_checkpoint(tmp_path)
    assert found is not None and bits(found.tensors["a"]) == bits(tensor.cpu()) == bits(found.tensors["b"])


def test_an_optimizer_goes_on_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def train(steps: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for _ in range(steps):
            loss = model(torch.randn(4, 3)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train(3, model, optimizer)
    momentum = {f"momentum {i}": s["momentum_buffer"] for i, s in enumerate(optimizer.state.values())}
    save_checkpoint(tmp_path, Checkpoint(3, {**model.state_dict(), **momentum, "rng": torch.get_rng_state()}, {}))
    again = copy.deepcopy(model)
    train(3, model, optimizer)

    found = load_checkpoint(tmp_path)
    assert found is not None
    again.load_state_dict({name: found.tensors[name] for name in again.state_dict()})
    torch.set_rng_state(found.tensors["rng"])
    resumed = torch.optim.SGD(again.parameters(), lr=0.1, momentum=0.9)
    for i, parameter in enumerate(again.parameters()):
        resumed.state[parameter]["momentum_buffer"] = found.tensors[f"momentum {i}"]
    train(3, again, resumed)
    assert [bits(t) for t in again.state_dict().values()] == [bits(t) for t in model.state_dict().values()]


def test_facts_come_back_bit_for_bit(tmp_path: Path) -> None:
    draws = random.Random(0)
    drawn = [struct.unpack("d", draws.randbytes(8))[0] for _ in range(2000)]
    floats = [x for x in drawn if abs(x) < float("inf")] + [0.1 + 0.2, 5e-324, -0.0, 1e308, 2.0]
    facts = {
        "floats": floats,
        "big": [2**63, -(2**200)],
        "text": 'é"\n\0\ud800',
        "step": "mine",
        "": {"a": [None, True]},
    }
    save_checkpoint(tmp_path, Checkpoint(0, {}, facts))
    found = load_checkpoint(tmp_path)
    assert found is not None and found.tensors == {} and found.facts == facts
    assert struct.pack(f"{len(floats)}d", *found.facts["floats"]) == struct.pack(f"{len(floats)}d", *floats)
    assert repr(found.facts) == repr(facts)  # ints are ints, bools are bools


LOOP: list[Any] = []
LOOP.append(LOOP)
DEEP: list[Any] = []
for _ in range(100_000):
    DEEP = [DEEP]
BAD_FACTS = {
    "nan": {"a": float("nan")},
    "inf": {"a": [float("-inf")]},
    "object": {"a": Path()},
    "tuple": {"a": (1, 2)},
    "key": {1: "a"},
    "set": {"a": {1}},
    "loop": {"a": LOOP},
    "digits": {"a": 10**5000},
    "list": [1],
}


@pytest.mark.parametrize("kind", BAD_FACTS)
def test_facts_that_would_not_come_back_are_refused(tmp_path: Path, kind: str) -> None:
    with pytest.raises(FileError, match="facts of a checkpoint must be"):
        save_checkpoint(tmp_path, Checkpoint(1, {}, BAD_FACTS[kind]))  # type: ignore[arg-type]
    assert names(tmp_path) == []


def test_nested_facts_that_json_cannot_follow_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="facts of a checkpoint must be"):
        save_checkpoint(tmp_path, Checkpoint(1, {}, {"a": DEEP}))


def test_what_cannot_be_held_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad: list[tuple[Any, Any]] = [("__metadata__", torch.ones(1)), (3, torch.ones(1)), ("\ud800", torch.ones(1))]
    bad += [("a", 3), ("a", torch.ones(2, dtype=torch.complex128)), ("a", torch.eye(2).to_sparse())]
    bad += [("a", torch.ones(2, device="meta")), ("a", torch.zeros(2, dtype=torch.uint8).view(torch.float8_e8m0fnu))]
    for name, tensor in bad:
        with pytest.raises(FileError):
            save_checkpoint(tmp_path, Checkpoint(1, {name: tensor}, {}))
    for step in (-1, True, 1.0, None):
        with pytest.raises(FileError, match="must be an int of at least 0"):
            Checkpoint(step, {}, {})  # type: ignore[arg-type]
    with pytest.raises(FileError, match="At least 1"):
        save_checkpoint(tmp_path, state(1), keep=0)
    monkeypatch.setattr(dmcp.checkpoint, "_LONGEST_HEADER", 1000)
    with pytest.raises(FileError, match="too long"):
        save_checkpoint(tmp_path, Checkpoint(1, {}, {"a": "x" * 1000}))
    assert names(tmp_path) == []


# which ones stay


def test_the_newest_two_stay(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path / "missing") is None and load_checkpoint(tmp_path) is None
    (tmp_path / "step-x.safetensors").write_text("not ours")
    for step in (8, 9, 10, 1_000_000_000):
        save_checkpoint(tmp_path, state(step))
        assert same(load_checkpoint(tmp_path), state(step))
    assert [name.rsplit("-", 1)[0] for name in names(tmp_path)] == ["step-000000010", "step-1000000000", "step"]
    for step in range(1_000_000_001, 1_000_000_005):
        save_checkpoint(tmp_path, state(step), keep=3)
    assert [int(name.split("-")[1]) % 10 for name in names(tmp_path)[:-1]] == [2, 3, 4]
    path = save_checkpoint(tmp_path, state(1_000_000_005), keep=1)
    assert names(tmp_path) == [path.name, "step-x.safetensors"]
    assert save_checkpoint(tmp_path, state(1_000_000_005), keep=1) == path  # the same state has the same name
    assert names(tmp_path) == [path.name, "step-x.safetensors"]
    path.rename(tmp_path / path.name.replace("step-1", "step-01"))  # a name that no save gives
    assert load_checkpoint(tmp_path) is None


def test_a_step_that_is_saved_again_replaces_the_first(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(1))
    save_checkpoint(tmp_path, Checkpoint(2, {}, {"first": True}))
    save_checkpoint(tmp_path, Checkpoint(2, {}, {"first": False}))
    found = load_checkpoint(tmp_path)
    assert found is not None and found.facts == {"first": False}
    assert [name[:14] for name in names(tmp_path)] == ["step-000000001", "step-000000002"]


def test_a_damaged_newest_one_is_passed_over_and_never_costs_the_good_ones(tmp_path: Path) -> None:
    paths = [save_checkpoint(tmp_path, state(step)) for step in (1, 2)]
    whole = paths[1].read_bytes()
    for damaged in (whole[:-1], whole[:20], b"", whole + b"x", whole[:-1] + bytes([whole[-1] ^ 1])):
        paths[1].write_bytes(damaged)
        said: list[str] = []
        assert same(load_checkpoint(tmp_path, said.append), state(1))
        assert len(said) == 1 and paths[1].name in said[0] and said[0].endswith(".") and "\n" not in said[0]
        assert same(load_checkpoint(tmp_path), state(1))
    paths[0].write_bytes(b"")
    with pytest.raises(FileError, match="all checkpoints are damaged") as caught:
        load_checkpoint(tmp_path)
    assert all(path.name in str(caught.value) for path in paths)

    paths[0].unlink()
    late = save_checkpoint(tmp_path, state(9))
    late.write_bytes(b"")
    for step in (3, 4):  # the run goes on from before the damage
        save_checkpoint(tmp_path, state(step), keep=1)
        assert same(load_checkpoint(tmp_path), state(step)) and late.exists()
    save_checkpoint(tmp_path, state(9), keep=2)
    assert same(load_checkpoint(tmp_path), state(9))
    assert [name[:14] for name in names(tmp_path)] == ["step-000000004", "step-000000009"]


def test_what_dead_writers_left_is_cleaned(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    parent = dmcp.checkpoint.process_start(os.getppid())
    left = [f".tmp-{child.pid}-5-ab", f".tmp-{child.pid}-0-ab"] + (
        [f".tmp-{os.getppid()}-{parent + 1}-ab"] if parent else []
    )
    kept = [f".tmp-{os.getppid()}-{parent or 0}-ab", ".tmp-notes", "mine.txt"]
    for name in left + kept:
        (tmp_path / name).write_text("half")
    path = save_checkpoint(tmp_path, state(1))
    assert names(tmp_path) == sorted([*kept, path.name])


# when the disk fails


def fail(code: int) -> Any:
    def call(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    return call


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails_costs_nothing_that_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    for step in (1, 2):
        save_checkpoint(tmp_path, state(step))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    monkeypatch.setattr(os, call, fail(errno.EIO))
    if call == "replace":
        monkeypatch.setattr(Path, call, fail(errno.EIO))  # which keeps its own reference in some versions
    with pytest.raises(FileError, match=r"cannot be written \(Input/output error\): free some space") as caught:
        save_checkpoint(tmp_path, state(3))
    assert str(caught.value).count(". ") == 0
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_full_disk_costs_nothing_that_was_there(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, state(1))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit, size in ((100_000, 100_000), (100, 10)):  # in the middle of the file, and at its last flush
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            with pytest.raises(FileError, match=r"cannot be written \(File too large\)"):
                save_checkpoint(tmp_path, state(2, size))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, folders = os.fsync, 0

    def sync(descriptor: int, code: int) -> None:
        nonlocal folders
        if not os.path.isdir(f"/proc/self/fd/{descriptor}"):
            return fsync(descriptor)
        folders += 1
        raise OSError(code, os.strerror(code))

    for step in (1, 2):
        save_checkpoint(tmp_path, state(step))
    before = names(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda descriptor: sync(descriptor, errno.EIO))
    with pytest.raises(FileError, match="Input/output error"):
        save_checkpoint(tmp_path, state(3))
    assert folders == 1 and set(before) < set(names(tmp_path))  # nothing is removed before the new one is safe
    monkeypatch.setattr(os, "fsync", lambda descriptor: sync(descriptor, errno.EINVAL))
    save_checkpoint(tmp_path, state(4))  # a file system that does not know it
    assert folders == 2 and same(load_checkpoint(tmp_path), state(4))


def test_an_interrupted_save_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, state(1))
    assert names(tmp_path) == []


def test_old_ones_that_cannot_be_removed_do_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, state(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fail(errno.EPERM))
        patch.setattr(Path, "unlink", fail(errno.EPERM))
        save_checkpoint(tmp_path, state(2), keep=1)
    assert len(names(tmp_path)) == 2
    save_checkpoint(tmp_path, state(3), keep=1)
    assert len(names(tmp_path)) == 1


# links and other things that are no files


def test_no_link_is_followed(tmp_path: Path) -> None:
    inside, outside = tmp_path / "run", tmp_path / "secret"
    outside.mkdir()
    path = save_checkpoint(outside, state(5))
    inside.mkdir()
    (inside / path.name).symlink_to(path)
    for act in (lambda: load_checkpoint(inside), lambda: save_checkpoint(inside, state(6))):
        with pytest.raises(FileError, match="is a link or not a file"):
            act()
    assert names(inside) == [path.name] and path.exists()
    (inside / path.name).unlink()

    (inside / "out").symlink_to(outside)
    for act in (lambda: load_checkpoint(inside / "out"), lambda: save_checkpoint(inside / "out", state(6))):
        with pytest.raises(FileError, match="is a link that leads elsewhere"):
            act()
    (inside / "here").mkdir()
    (inside / "stay").symlink_to("here")
    (inside / "round").symlink_to("round")
    save_checkpoint(inside / "stay", state(6))
    assert same(load_checkpoint(inside / "here"), state(6))
    with pytest.raises(FileError):
        load_checkpoint(inside / "round")
    assert names(outside) == [path.name]


def test_a_link_that_comes_after_the_look_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_checkpoint(tmp_path / "run", state(1))
    find = dmcp.checkpoint._find

    def find_and_swap(folder: Path) -> Any:
        found = find(folder)
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
        return found

    monkeypatch.setattr(dmcp.checkpoint, "_find", find_and_swap)
    with pytest.raises(FileError, match="all checkpoints are damaged"):
        load_checkpoint(tmp_path / "run")


def test_only_files_are_read(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path / "a", state(1))
    path.unlink()
    path.mkdir()
    with pytest.raises(FileError, match="is a link or not a file"):
        load_checkpoint(tmp_path / "a")
    path.rmdir()
    os.mkfifo(path)
    with pytest.raises(FileError, match="is a link or not a file"):
        load_checkpoint(tmp_path / "a")
    (tmp_path / "file").write_text("")
    for act in (lambda: load_checkpoint(tmp_path / "file"), lambda: save_checkpoint(tmp_path / "file", state(1))):
        with pytest.raises(FileError, match=r"cannot be (read|written) \("):
            act()


# files that others made


def forge(folder: Path, data: bytes, step: int = 3) -> Path:
    """The only file of the folder, under the name that its bytes deserve."""
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    path = folder / f"step-{step:09d}-{hashlib.sha256(data).hexdigest()[:16]}.safetensors"
    path.write_bytes(data)
    return path


def split(data: bytes) -> tuple[dict[str, Any], bytes]:
    length = int.from_bytes(data[:8], "little")
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def join(header: Any, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def test_sizes_are_checked_before_anything_is_read(tmp_path: Path) -> None:
    whole = save_checkpoint(tmp_path / "good", state(3)).read_bytes()
    length = int.from_bytes(whole[:8], "little")
    starts = [
        b"",
        b"\xff" * 7,
        b"\xff" * 8,
        (2**40).to_bytes(8, "little") + b"{}",
        (10**8).to_bytes(8, "little") + b"{}",
    ]
    files = [(start, len(start), "longer than it can be") for start in starts]
    files += [((2**40 - 8).to_bytes(8, "little"), 2**40, "longer than it can be")]  # a header of a terabyte of holes
    files += [(whole, 2**40, "not as long"), (whole, len(whole) - 1, "not as long"), (whole, 8 + length, "not as long")]
    for start, size, reason in files:
        path = forge(tmp_path / "bad", start)
        os.truncate(path, size)
        said: list[str] = []
        with pytest.raises(FileError, match="all checkpoints are damaged"):
            load_checkpoint(tmp_path / "bad", said.append)
        assert len(said) == 1 and reason in said[0]
    path.unlink()


def test_facts_that_do_not_fit_the_name_are_damage(tmp_path: Path) -> None:
    header, body = split(save_checkpoint(tmp_path / "good", state(3)).read_bytes())
    record = json.loads(header["__metadata__"]["facts"])
    good = json.dumps(record)
    assert same(load_checkpoint(forge(tmp_path / "bad", join(header, body)).parent), state(3))
    texts = [json.dumps(record | change) for change in ({"step": 4}, {"step": 3.0}, {"step": None}, {"step": "3"})]
    texts += [
        json.dumps(record | change) for change in ({"format": "x"}, {"format": None}, {"facts": []}, {"facts": 1})
    ]
    texts += [json.dumps({key: record[key] for key in record if key != gone}) for gone in record]
    texts += ["", "{", "null", "3", "[]", "[" * 100_000, good + "x", good.replace("0.025", "NaN")]
    texts += [good.replace("0.025", "1e999"), good.replace("0.025", "-Infinity"), good.replace("0.025", "9" * 5000)]
    for text in texts:
        forge(tmp_path / "bad", join(header | {"__metadata__": {"facts": text}}, body))
        with pytest.raises(FileError, match="all checkpoints are damaged"):
            load_checkpoint(tmp_path / "bad")
    assert good.count("0.025") == 1
    for metadata in ({}, {"other": good}, {"facts": record}, good, None, []):
        forge(tmp_path / "bad", join(header | {"__metadata__": metadata}, body))
        with pytest.raises(FileError, match="all checkpoints are damaged"):
            load_checkpoint(tmp_path / "bad")
    forge(tmp_path / "bad", join({key: header[key] for key in header if key != "__metadata__"}, body))
    with pytest.raises(FileError, match="all checkpoints are damaged"):
        load_checkpoint(tmp_path / "bad")


NASTY: list[Any] = [
    None,
    True,
    -1,
    0,
    1,
    3.5,
    2**31,
    2**63,
    2**64,
    10**30,
    "",
    "F32",
    "F8_E8M0",
    "F4",
    "BOOL",
    "\ud800",
]
NASTY += [[], {}, [0], [0, 0], [4, 0], [0, 2**62], [2**62, 0, 2**62], [0, 2**62, 2**62], [[[]]], {"facts": "{}"}]


def mutate_header(draws: random.Random, header: dict[str, Any]) -> Any:
    """Put something nasty into one place of the header."""
    header = copy.deepcopy(header)
    place: Any = header
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = draws.choice(list(keys))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or draws.random() < 0.2:
            break
        place = inner
    if isinstance(place, dict) and draws.random() < 0.3:
        place[draws.choice(["", "__metadata__", "new", key])] = place.pop(key)
    else:
        place[key] = draws.choice(NASTY)
    return header


def mutate(draws: random.Random, data: bytes) -> bytes:
    """One of many ways to spoil a file."""
    header, body = split(data)
    length = len(data) - len(body)
    kind = draws.randrange(6)
    if kind == 0:  # in the data or in the header
        spoiled = bytearray(data)
        for _ in range(draws.randint(1, 4)):
            spoiled[draws.randrange(draws.choice([8, length, len(data)]))] = draws.randrange(256)
        return bytes(spoiled)
    if kind == 1:
        return data[: draws.randrange(len(data))]
    if kind == 2:
        at = draws.randrange(len(data))
        return data[:at] + draws.randbytes(draws.randint(1, 9)) + data[at + draws.randint(0, 9) :]
    if kind == 3:
        text = json.loads(header["__metadata__"]["facts"])
        return join(header | {"__metadata__": {"facts": json.dumps(mutate_header(draws, text))}}, body)
    return join(mutate_header(draws, header), body[draws.choice([0, 0, 0, 4]) :])


def test_spoiled_files_end_in_one_kind_of_error(tmp_path: Path) -> None:
    saved = Checkpoint(3, state(3).tensors | {"none": torch.empty(0, 2), "b": torch.ones(3) > 0}, {"lr": 0.5, "n": [1]})
    path = save_checkpoint(tmp_path / "good", saved)
    whole, draws = path.read_bytes(), random.Random(0)
    ends = {"loaded": 0, "refused": 0}
    for _ in range(600):
        spoiled = mutate(draws, whole)
        renamed = draws.random() < 0.8
        forged = forge(tmp_path / "bad", spoiled)
        if not renamed:
            forged.rename(forged.with_name(path.name))
        said: list[str] = []
        try:
            found = load_checkpoint(tmp_path / "bad", said.append)
        except FileError:
            assert len(said) == 1
            ends["refused"] += 1
        else:
            assert found is not None and found.step == 3 and isinstance(found.facts, dict) and said == []
            assert all(isinstance(tensor, Tensor) for tensor in found.tensors.values())
            assert renamed or spoiled == whole
            ends["loaded"] += 1
    assert ends["loaded"] > 30 and ends["refused"] > 300, ends  # both ends were reached


# when the process is killed


def save_until_killed(folder: Path, step: int, after: float) -> int:
    """The last step that a process said it had saved, before it was killed after so many seconds."""
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        while True:
            step += 1
            save_checkpoint(folder, state(step, 300_000))
            os.write(tell, step.to_bytes(8, "little"))
    os.close(tell)
    time.sleep(after)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    with open(told, "rb") as pipe:
        said = pipe.read()
    return int.from_bytes(said[-8:], "little") or step


def kill_savers(folder: Path) -> None:
    """What killed processes said they had saved is there, and what is there is right."""
    draws, step, rounds, halves = random.Random(0), 0, 0, 0
    while rounds < 12 or step == 0 or halves == 0:  # some must be killed in the middle of a file
        promised = save_until_killed(folder, step, draws.uniform(0, 0.15))
        rounds, halves = rounds + 1, halves + any(path.name.startswith(".tmp-") for path in folder.iterdir())
        found = load_checkpoint(folder, lambda text: sys.exit(text))
        step = found.step if found else 0
        assert found is None or same(found, state(step, 300_000))
        assert step in (promised, promised + 1)
        assert len(list(folder.glob("step-*"))) <= 3
    save_checkpoint(folder, state(step + 1))
    assert len(list(folder.iterdir())) == 2  # what the killed ones left is gone


def test_a_killed_process_leaves_what_it_had_saved(tmp_path: Path) -> None:
    # in a process of its own: forking one that has threads is not safe, and pytest may have some
    source = "import sys, pathlib, test_checkpoints; test_checkpoints.kill_savers(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", source, tmp_path], cwd=HERE, check=True, timeout=60)
