"""Files that somebody else wrote: whatever is in them, only our own errors come out, soon, and in little memory.

Valid files are mutated where they have structure, and checksums are made right again, so that what lies behind them is
reached. `make test` tries a thousand cases; all ten thousand are in the slow test.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import resource
import shutil
import signal
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.configuration import set_hypothesis_home_dir
from torch import nn

import dmcp
from dmcp import budget
from dmcp.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from dmcp.cli.config import RunConfig, config_from_json
from dmcp.cli.job import load_weights
from dmcp.data import datasets, loaders
from dmcp.errors import DataError, DmcpError, FileError
from dmcp.results import Row
from dmcp.runs import Run, list_runs, load_search, read_json, read_run, save_search
from dmcp.runtime.io import LOCK, Lock
from dmcp.searching.config import SearchRecord, SearchResult
from dmcp.settings import SearchConfig, TrainConfig
from dmcp.training import Event, StepRecord
from dmcp.widths import Widths

set_hypothesis_home_dir(Path(tempfile.gettempdir()) / "hypothesis")  # not in the repository
SECONDS = 20  # that one case may take on a busy machine
MEGABYTES = 400  # by which a thousand cases of one kind may raise the peak
Draw = Callable[[st.SearchStrategy[Any]], Any]
Case = Callable[[Draw, Path], None]


def attempt(read: Callable[[], Any]) -> bool:
    """Whether it could be read; an error must be ours, and one short line that a terminal shows as it is."""
    said = ""
    signal.alarm(SECONDS)  # ends what hangs, and this process
    try:
        read()
    except DmcpError as error:
        said = str(error)
        if not said.isprintable() or not 10 < len(said) < 1000:
            raise AssertionError(f"not a sentence: {said[:2000]!r}") from error
    finally:
        signal.alarm(0)
    return not said


def peak() -> int:
    """Bytes that this process has had in memory at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# mutations


class Raw(bytes):
    """JSON as it is written."""


ODD = (
    b"null true false 0 1 -1 2.5 1e400 NaN -Infinity 9223372036854775807 1e308 -0.0 [] {} [1,2] [[[]]] [0,0] [0,8] "
    b'[3,4611686018427387904] [-1,-1] [0.5,null] {"a":1} "" "\\ud800" "\\u0000\\n\\u001b[31m" "\xff" "conv1" '
    b'"../../etc/passwd" "/dev/zero" "F32" "I64" "F4" "BOOL" "C64" "search" "test"'
).split(b" ")
ODD += [b"9" * 30, b"9" * 5000, b'"' + b"x" * 100_000 + b'"', *(b"[" * n + b"]" * n for n in (40, 70, 5000))]
VALUES = st.one_of(
    st.sampled_from(ODD).map(Raw),
    st.integers(),
    st.floats(),
    st.integers(0, 300),
    st.lists(st.integers(0, 9), max_size=4),
)
KEYS = ["", "x", "__class__", "../up", "\x1b[2J", "steps", "k" * 300]


def dump(node: Any) -> bytes:
    if isinstance(node, Raw):
        return bytes(node)
    if isinstance(node, dict):
        return b"{" + b", ".join(dump(key) + b": " + dump(value) for key, value in node.items()) + b"}"
    if isinstance(node, list):
        return b"[" + b", ".join(map(dump, node)) + b"]"
    return json.dumps(node).encode()


def places(node: Any) -> list[tuple[Any, Any]]:
    """Every place in a document that holds a value: (container, key or index)."""
    keys = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    return [place for key in keys for place in [(node, key), *places(node[key])]]


def change_json(draw: Draw, text: bytes) -> bytes:
    """The document with up to three values set, left out or renamed."""
    root = [json.loads(text)]
    for _ in range(draw(st.integers(1, 3))):
        holder, key = draw(st.sampled_from(places(root)))
        kind = draw(st.sampled_from(["set", "set", "set", "drop", "rename"]))
        if kind == "set" or holder is root:
            holder[key] = draw(VALUES)
        elif kind == "drop":
            del holder[key]
        elif isinstance(holder, dict):
            holder[draw(st.sampled_from(KEYS))] = holder.pop(key)
    return change_bytes(draw, dump(root[0])) if draw(st.integers(0, 9)) == 0 else dump(root[0])


def change_bytes(draw: Draw, raw: bytes) -> bytes:
    """Bytes cut off, flipped, put in or encoded in another way."""
    at = draw(st.integers(0, max(len(raw) - 1, 0)))
    at = at if draw(st.booleans()) else len(raw) - 1 - min(at, 120, len(raw) - 1)  # a zip file has its directory there
    some = draw(st.binary(min_size=1, max_size=8))
    coded = raw.decode("latin-1").encode(draw(st.sampled_from(["utf-16", "utf-32", "utf-8-sig"])))
    flipped, longer = raw[:at] + some + raw[at + len(some) :], raw[:at] + some + raw[at:]
    return draw(st.sampled_from([raw[:at], flipped, longer, raw + some, coded, some]))


def change_tensors(draw: Draw, raw: bytes) -> bytes:
    """A safetensors file with another header, length or content; mostly with sizes that fit the new header."""
    size = int.from_bytes(raw[:8], "little")
    header, body = raw[8 : 8 + size], raw[8 + size :]
    kind = draw(st.sampled_from(["header", "shape", "shape", "length", "body", "bytes", "facts"]))
    if kind == "bytes":
        return change_bytes(draw, raw)
    if kind == "header":
        header = change_json(draw, header)
    elif kind == "body":
        body = change_bytes(draw, body)
    elif kind == "facts":  # the text that a checkpoint keeps there
        table = json.loads(header)
        facts = change_json(draw, table.get("__metadata__", {}).get("facts", "{}").encode()).decode("latin-1")
        header = json.dumps(table | {"__metadata__": {"facts": facts}}).encode()
    elif kind == "shape":
        header, body = reshape(draw, json.loads(header))
    length = draw(st.sampled_from([0, 7, size - 1, 2**31, 2**63, 2**64 - 1])) if kind == "length" else len(header)
    return length.to_bytes(8, "little") + header + body


def reshape(draw: Draw, table: dict[str, Any]) -> tuple[bytes, bytes]:
    """A sound file with a tensor of another shape, type or name."""
    widths = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "C64": 8}
    names = [name for name in table if name != "__metadata__"]
    chosen, end = draw(st.sampled_from(names)), 0
    table[chosen]["dtype"] = draw(st.sampled_from(list(widths)))
    if draw(st.booleans()):
        table[chosen]["shape"] = draw(st.lists(st.sampled_from([0, 1, 2, 3, 2**40]), max_size=4))
    if draw(st.integers(0, 4)) == 0:
        table["other"] = table.pop(chosen)
    for name in sorted(table.keys() - {"__metadata__"}):
        size = min(int(np.prod(table[name]["shape"], dtype=object)) * widths[table[name]["dtype"]], 10**5)
        table[name]["data_offsets"], end = [end, end + size], end + size
    return json.dumps(table).encode(), draw(st.sampled_from([b"\0", b"\x01", b"\xff", b"\x7f"])) * end


def change_shard(draw: Draw, raw: bytes) -> bytes:
    """A zip file with other bytes, or with sound arrays that are no images and labels, or nearly so."""
    if draw(st.booleans()):
        return change_bytes(draw, raw)
    shapes = [(4, 5, 5, 2)] * 4 + [(4, 6, 5, 2), (4, 5, 5), (0, 5, 5, 2), (4, 1, 1, 5000), (3, 5, 5, 2)]
    images = np.zeros(draw(st.sampled_from(shapes)), draw(st.sampled_from(["u1", "u1", "u1", "i8", "f4", "?", "S3"])))
    labels = draw(st.sampled_from([[0, 1, 0, 1], [0, 0, 0, 0], [0, -1, 1, 0], [0, 1, 2, 2**40], [0, 5, 1, 1], [0, 1]]))
    dtype = draw(st.sampled_from(["i8", "i8", "i8", "f4", "M8[s]", "S3"]))
    members = {"images.npy": npy(images), "labels.npy": npy(np.array(labels).astype(dtype))}
    name = draw(st.sampled_from(list(members)))
    body = npy(images)[128:] if draw(st.booleans()) else b""
    odd = [b"\x93NUMPY" + version + b"v\0" + text.ljust(118).encode() + body for version, text in HEADERS]
    members[draw(st.sampled_from([name, name, "../images.npy", "\x1b"]))] = draw(st.sampled_from([members[name], *odd]))
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", draw(st.sampled_from([0, 0, 8, 8, 12, 14]))) as after:
        for member, content in members.items():
            after.writestr(member, content)
    return target.getvalue()


_SHAPE = "'fortran_order': False, 'shape': (4, 5, 5, 2), }"
HEADERS = [  # of arrays: version and text
    *(
        (b"\1\0", f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({shape}), }}")
        for shape in ("9" * 18 + ", 9", "-4, 2")
    ),
    *(
        (b"\1\0", f"{{'descr': {kind}, {_SHAPE}")
        for kind in ("'|O'", "'|V9999999999'", "[('a', '|O')]", "None", "1 << 99")
    ),
    *((version, text) for version in (b"\1\0", b"\x09\x09") for text in ("", "[" * 100, "__import__('os')")),
]


def npy(array: np.ndarray) -> bytes:
    target = io.BytesIO()
    np.save(target, array)
    return target.getvalue()


# valid files


@functools.cache
def network() -> tuple[nn.Module, dmcp.ChannelGraph]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.Conv2d(8, 4, 1))
    return model, dmcp.trace(model, torch.zeros(2, 3, 8, 8))


@functools.cache
def files() -> dict[str, bytes]:
    """The files of a finished run."""
    model, graph = network()
    net = dmcp.Supernet(model, graph, groups=3)
    widths = graph.widths([space.size - 1 for space in graph.spaces])
    search = SearchConfig(budget="60%,params:9k", epochs=2, min_channels={graph.spaces[0].name: 2})
    config = RunConfig(model="m:f", ignore=("a",), search=search, train=TrainConfig())
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name))
        spent = budget.parse("60%,params:9k", graph)
        found = SearchResult(torch.randn(len(graph.spaces), net.sizes.shape[1] - 1), net.sizes, graph, spent, 0.95)
        save_search(found, run.folder)
        for step in range(3):
            run.on_event(Event("search", 3, SearchRecord(step, 0, 0.1, (1.0, 2.0), 0.5, 1.5, 0.1, (1.0, 0.9))))
            run.on_event(Event("dmcp", 3, StepRecord(0, step, 3, 0.1, 1.5)))
        run.on_event(Event("test", 1, Row("dmcp", 1000, 100, 0.9, 1.0, 2)))
        dmcp.save(dmcp.cut(model, graph, widths), widths, run.folder)
        run.write("settings.json", config.to_json() | {"unpruned": {"macs": 5}, "argv": ["dmcp", "prune"]})
        return {path.name: path.read_bytes() for path in run.folder.iterdir()}


@functools.cache
def shards() -> dict[str, bytes]:
    draw, packed = np.random.default_rng(0), {}
    for part in ("train-0", "test-0"):
        target = io.BytesIO()
        np.savez_compressed(target, images=draw.integers(0, 256, (4, 5, 5, 2), "u1"), labels=np.arange(4) % 2)
        packed[f"{part}.npz"] = target.getvalue()
    return packed


@functools.cache
def checkpoint() -> bytes:
    tensors = {"shared/w": torch.randn(2, 3), "rank0/generator": torch.zeros(5, dtype=torch.uint8)}
    with tempfile.TemporaryDirectory() as folder:
        facts = {"identity": {"a": 1}, "lines": 2, "done": False}
        return save_checkpoint(Path(folder), Checkpoint(3, tensors, facts)).read_bytes()


def put(folder: Path, contents: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def sealed(record: bytes, weights: bytes) -> bytes:
    """widths.json with hashes that fit again, if it is still a table."""
    try:
        table = json.loads(record)
        table["sha256"] = hashlib.sha256(weights).hexdigest()
        table.pop("digest", None)
        text = json.dumps(table, sort_keys=True)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return record
    return json.dumps(table | {"digest": hashlib.sha256(text.encode()).hexdigest()}).encode()


# what is tried


def read_widths(draw: Draw, folder: Path) -> None:
    """widths.json alone, as dmcp train and evaluate read it."""
    model, graph = network()
    put(
        folder,
        {"widths.json": change_json(draw, json.dumps(graph.full.to_json() | {"input_shape": {"x": [3, 8]}}).encode())},
    )
    attempt(lambda: dmcp.cut(model, graph, graph.widths(Widths.from_json(read_json(folder / "widths.json")))))


def read_result(draw: Draw, folder: Path) -> None:
    """A saved network; "listed": widths.json lists the tensors that the file has, whatever they are."""
    record, weights = files()["widths.json"], files()["model.safetensors"]
    which = draw(st.sampled_from(["widths", "weights", "both", "listed", "listed", "listed"]))
    weights = weights if which == "widths" else change_tensors(draw, weights)
    record = record if which in ("weights", "listed") else change_json(draw, record)
    if which == "listed":
        with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
            table = json.loads(weights[8 : 8 + int.from_bytes(weights[:8], "little")])
            shapes = {name: entry["shape"] for name, entry in table.items() if name != "__metadata__"}
            record = json.dumps(json.loads(record) | {"tensors": shapes}).encode()
    record = sealed(record, weights) if which == "listed" or draw(st.integers(0, 4)) else record
    put(folder, {"widths.json": record, "model.safetensors": weights})
    attempt(lambda: dmcp.load(folder, network()[0]))


def read_checkpoint(draw: Draw, folder: Path) -> None:
    raw = change_tensors(draw, checkpoint())
    mark = hashlib.sha256(raw).hexdigest()[:16] if draw(st.integers(0, 9)) else "0" * 16
    name = f"step-{draw(st.sampled_from([3, 3, 3, 4])):09d}-{mark}.safetensors"
    shutil.rmtree(folder, ignore_errors=True)
    put(folder, {"log.jsonl": files()["log.jsonl"]})
    stage = folder / "checkpoints" / "search"
    stage.parent.mkdir()
    kind = draw(st.sampled_from(["file"] * 12 + ["two", "two", "no folder", "link out"]))
    if kind == "no folder":
        stage.touch()
    elif kind == "link out":
        stage.symlink_to(folder)
    else:
        put(stage, {name: raw})
    if kind == "two":  # an earlier one, sound but for its step, and what is no checkpoint
        sound = hashlib.sha256(checkpoint()).hexdigest()[:16]
        put(stage, {f"step-000000002-{sound}.safetensors": checkpoint(), "note": b""})
    if attempt(lambda: load_checkpoint(stage, warn=len)):
        attempt(Run(folder).rewind)


def read_shards(draw: Draw, folder: Path) -> None:
    name = f"{draw(st.sampled_from(['train-0', 'test-0', 'train-1']))}.npz"
    put(folder, shards() | {name: change_shard(draw, shards()["train-0.npz"])})
    attempt(lambda: loaders.make_loader(datasets.load(folder).train, 2, train=True).batch(0))
    (folder / "train-1.npz").unlink(missing_ok=True)


def read_budget(draw: Draw, folder: Path) -> None:
    parts = ["50%", "211M", "params:", "macs:", ",", "1e9", "_", ".", "9" * 50, "9" * 5000, "k", "ms", " ", "-", "\x1b"]
    sound = ["50%", "params:60%", "0.7", "macs:9k", "params:.5", "1e99"]
    texts = st.one_of(
        st.lists(st.sampled_from(parts), max_size=6).map("".join),
        st.text(max_size=20),
        st.lists(st.sampled_from(sound), max_size=3).map(",".join),
    )
    others = st.one_of(st.integers(), st.floats(), st.sampled_from([10**5000, -(10**5000), None, [], True]))
    spec, graph = draw(st.one_of(texts, texts, others)), network()[1]
    attempt(lambda: budget.check_reachable(budget.parse(spec, graph), graph, graph.widths([1] * len(graph.spaces))))


def read_search(draw: Draw, folder: Path) -> None:
    names = {"search.json": change_json, "search.safetensors": change_tensors, "log.jsonl": change_log}
    name = draw(st.sampled_from(list(names)))
    put(folder, {it: files()[it] for it in names} | {name: names[name](draw, files()[name])})
    attempt(lambda: dmcp.expected(load_search(folder, network()[1])))


def change_log(draw: Draw, raw: bytes) -> bytes:
    lines = raw.split(b"\n")
    at = draw(st.integers(0, len(lines) - 2))
    return b"\n".join([*lines[:at], change_json(draw, lines[at]), *lines[at + 1 :]])


def read_settings(draw: Draw, folder: Path) -> None:
    path = folder / "settings.json"
    put(folder, {path.name: change_json(draw, files()[path.name])})
    attempt(lambda: config_from_json(read_json(path), path).to_json())


def read_listing(draw: Draw, folder: Path) -> None:
    """What dmcp runs and dmcp report read; only a folder that holds no run is refused."""
    name = draw(st.sampled_from(sorted(files().keys() - {"model.safetensors"})))
    change = {".safetensors": change_tensors, ".jsonl": change_log}.get(Path(name).suffix, change_json)
    put(folder, files() | {name: change(draw, files()[name])})
    assert attempt(lambda: json.dumps(read_run(folder, draw(st.sampled_from([None, 100, 2**20]))).describe()))
    assert attempt(lambda: list_runs(folder.parent))


CASES: dict[str, Case] = {
    case.__name__.removeprefix("read_"): case
    for case in (
        *(read_widths, read_result, read_checkpoint, read_shards),
        *(read_budget, read_search, read_settings, read_listing),
    )
}


def explore(case: Case, folder: Path, examples: int) -> None:
    done = 0

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,  # there is a clock of our own, which also ends what hangs
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def one(given_data: st.DataObject) -> None:
        nonlocal done
        done += 1
        case(given_data.draw, folder / "run")

    before = peak()
    one()
    assert done >= examples
    assert peak() - before < MEGABYTES * 2**20


@pytest.mark.parametrize("examples", [100, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_mutants(name: str, examples: int, tmp_path: Path) -> None:
    explore(CASES[name], tmp_path, examples)


# links, pipes and sizes

READERS: dict[str, Callable[[Path], Any]] = {
    "settings.json": lambda folder: read_json(folder / "settings.json"),
    "log.jsonl": lambda folder: Run(folder).records("search"),
    "search.json": lambda folder: load_search(folder, network()[1]),
    "search.safetensors": lambda folder: load_search(folder, network()[1]),
    "widths.json": lambda folder: dmcp.load(folder, network()[0]),
    "model.safetensors": lambda folder: dmcp.load(folder, network()[0]),
    LOCK: lambda folder: Lock(folder).__enter__(),
}


@pytest.mark.parametrize("name", READERS)
def test_no_link_out_of_the_folder_is_followed(name: str, tmp_path: Path) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    put(run, files())
    put(outside, files())
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(outside / name)
    with pytest.raises(FileError, match="link that leads elsewhere" if name != LOCK else "cannot be locked"):
        READERS[name](run)
    past = read_run(run)
    assert name in (LOCK, "model.safetensors") or any("leads elsewhere" in problem for problem in past.problems)
    with pytest.raises(FileError, match="leads elsewhere"):
        Run(run).rewind()  # what a resumed run does first
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == files()
    if name != LOCK:  # a link inside the folder is followed
        (run / "moved").write_bytes(files()[name])
        (run / name).unlink()
        (run / name).symlink_to("moved")
        READERS[name](run)


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    victim, run = tmp_path / "victim", tmp_path / "run"
    victim.write_text("dear")
    put(run, files())
    for name in (".widths.json.new", ".model.safetensors.new", ".report.md.new", "report.md"):
        (run / name).symlink_to(victim)
    model, graph = network()
    dmcp.save(model, graph.full, run)
    Run(run).write("report.md", "mine")
    (run / "log.jsonl").unlink()
    (run / "log.jsonl").symlink_to(victim)
    with pytest.raises(FileError, match="leads elsewhere"):
        Run(run).add("log.jsonl", {"stage": "search"})
    (run / "checkpoints").symlink_to(tmp_path)
    with pytest.raises(FileError, match="leads elsewhere"):
        Run(run).checkpointer({})
    assert victim.read_text() == "dear"
    assert (run / "report.md").read_text() == "mine" and not (run / "report.md").is_symlink()
    dmcp.load(run, model)


@pytest.mark.parametrize("name", [*READERS, "train-0.npz"])
def test_no_pipe_is_waited_for(name: str, tmp_path: Path) -> None:
    put(tmp_path, files() | shards())
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    read = READERS.get(name, datasets.load)
    assert not attempt(lambda: read(tmp_path)) or name == LOCK  # which is only opened
    assert attempt(lambda: read_run(tmp_path))


def test_huge_files_are_refused_before_memory_is_taken(tmp_path: Path) -> None:
    """Files of a TiB with holes, and bombs, while this process may take half a GiB more than it has."""
    put(tmp_path, files() | shards())
    network()
    used, before = int(Path("/proc/self/statm").read_text().split()[0]), resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used * resource.getpagesize() + 2**29, before[1]))
    try:
        for name in sorted(READERS.keys() - {LOCK}):
            os.truncate(tmp_path / name, 2**40)
            assert not attempt(functools.partial(READERS[name], tmp_path)) and attempt(lambda: read_run(tmp_path)), name
            put(tmp_path, {name: files()[name]})
        for shape, size in (((1, 1, 1, 10**8), 10**8), ((10**6, 10**3, 10**3, 3), 99)):
            with zipfile.ZipFile(tmp_path / "train-0.npz", "w", zipfile.ZIP_DEFLATED) as shard:
                head = io.BytesIO()
                np.lib.format.write_array_header_1_0(head, {"descr": "|u1", "fortran_order": False, "shape": shape})
                shard.writestr("images.npy", head.getvalue() + bytes(size))
                shard.writestr("labels.npy", npy(np.zeros(1, "i8")))
            assert not attempt(lambda: datasets.load(tmp_path))
        put(tmp_path / "stage", {f"step-000000003-{'0' * 16}.safetensors": (2**40).to_bytes(8, "little")})
        os.truncate(next((tmp_path / "stage").iterdir()), 2**41)
        assert not attempt(lambda: load_checkpoint(tmp_path / "stage"))
        put(tmp_path, {"settings.json": b"[" * 10**7})
        assert not attempt(lambda: read_json(tmp_path / "settings.json")) and attempt(lambda: read_run(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# no file runs code


class Trap:
    """What a pickle may hold: a call that happens while it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["TRAP"],)


def test_weights_that_would_run_code_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    torch.save({"0.weight": Trap()}, tmp_path / "weights.pth")
    with pytest.raises(FileError, match="not a file of plain weights"):
        load_weights(network()[0], tmp_path / "weights.pth")
    member = io.BytesIO()
    np.save(member, np.array([Trap()], dtype=object))
    put(tmp_path, shards())
    with zipfile.ZipFile(tmp_path / "train-0.npz", "w") as shard:
        shard.writestr("images.npy", member.getvalue())
    with pytest.raises(DataError, match="cannot be read as a shard"):
        datasets.load(tmp_path)
    assert not (tmp_path / "sprung").exists()
    torch.load(tmp_path / "weights.pth", weights_only=False)
    assert (tmp_path / "sprung").exists()  # the trap works


def test_listing_a_run_imports_nothing_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "named_by_a_run.py").write_text("raise SystemExit")
    monkeypatch.syspath_prepend(tmp_path)
    named = json.loads(files()["settings.json"]) | {"model": "named_by_a_run:build"}
    put(tmp_path / "run", files() | {"settings.json": json.dumps(named).encode()})
    assert read_run(tmp_path / "run").describe()["model"] == "named_by_a_run:build"
