"""Files that somebody else wrote: whatever is in them, only our own errors come out, and soon.

Valid files are mutated where they have structure, and checksums are made right again, so that what lies behind them is
reached.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import math
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from torch import nn

import dmcp
from dmcp.cli.config import read_config
from dmcp.cli.weights import load_weights
from dmcp.data import datasets
from dmcp.errors import DmcpError, FileError
from dmcp.runs.config import RunConfig
from dmcp.runs.files import read_json
from dmcp.runs.reading import list_runs, read_overview, read_run
from dmcp.runs.records import Row, SearchRecord, StepRecord
from dmcp.runs.saved_search import load_search, save_search
from dmcp.runs.writing import Run
from dmcp.runtime.checkpoint import Checkpoint, load_checkpoint, save_checkpoint
from dmcp.searching.budget import parse_budget
from dmcp.searching.records import SearchResult
from dmcp.settings import SearchConfig, TrainConfig
from dmcp.tracing.widths import Widths
from dmcp.training.loop import Event

SECONDS = 20  # that one case may take on a busy machine


def attempt(read: Callable[[], Any]) -> bool:
    """Whether it could be read; an error must be ours, and one short line that a terminal shows as it is."""
    said = ""
    signal.alarm(SECONDS)  # ends what hangs, and this process
    try:
        read()
    except DmcpError as error:
        said = str(error)
        assert said.isprintable() and 10 < len(said) < 1000, said[:2000]
    finally:
        signal.alarm(0)
    return not said


# mutations

TEXTS = ("", "\ud800", "\0\n\x1b[31m", "conv1", "../../etc/passwd", "/dev/zero", "F32", "BOOL", "x" * 100_000)
NUMBERS = (None, True, 0, -1, 2.5, math.nan, -math.inf, 2**63 - 1, 10**30, 1e308)
NESTED = ([], {}, [0, 8], [3, 2**62], [-1, -1], {"a": 1}, functools.reduce(lambda inner, _: [inner], range(70), []))
ODD = (*TEXTS, *NUMBERS, *NESTED)


def places(node: Any) -> list[tuple[Any, Any]]:
    """Every place in a document that holds a value: (container, key or index)."""
    keys = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    return [place for key in keys for place in [(node, key), *places(node[key])]]


def change_json(dice: random.Random, text: bytes) -> bytes:
    """The document with up to three values set, left out or renamed."""
    root = [json.loads(text)]
    for _ in range(dice.randint(1, 3)):
        holder, key = dice.choice(places(root))
        kind = dice.choice(["set", "set", "drop", "rename"])
        if kind == "set" or holder is root:
            holder[key] = copy.deepcopy(dice.choice(ODD))
        elif kind == "drop":
            del holder[key]
        elif isinstance(holder, dict):
            holder[dice.choice(["", "__class__", "../up", "\x1b[2J", "steps", "k" * 300])] = holder.pop(key)
    return json.dumps(root[0]).encode()


def change_bytes(dice: random.Random, raw: bytes) -> bytes:
    """Bytes cut off, flipped, put in or encoded in another way."""
    at = dice.choice([dice.randrange(len(raw)), max(0, len(raw) - dice.randint(1, 120))])  # zip files end in a list
    some = dice.randbytes(dice.randint(1, 8))
    flipped, longer = raw[:at] + some + raw[at + len(some) :], raw[:at] + some + raw[at:]
    return dice.choice([raw[:at], flipped, longer, raw + some, raw.decode("latin-1").encode("utf-16"), some])


def change_tensors(dice: random.Random, raw: bytes) -> bytes:
    """A safetensors file with another header, or a sound one with a tensor of another shape, type or name."""
    size = int.from_bytes(raw[:8], "little")
    kind = dice.choice(["header", "facts", "tensor", "tensor"])
    if kind == "header":
        header = change_json(dice, raw[8 : 8 + size])
        return len(header).to_bytes(8, "little") + header + raw[8 + size :]
    tensors, facts = safetensors.torch.load(raw), json.loads(raw[8 : 8 + size]).get("__metadata__") or {"record": "{}"}
    if kind == "facts":  # the text that a checkpoint keeps there
        return safetensors.torch.save(tensors, {"record": change_json(dice, facts["record"].encode()).decode()})
    name = dice.choice(sorted(tensors))
    dtype = dice.choice([torch.float64, torch.float16, torch.int64, torch.bool, torch.complex64])
    shape = [dice.randint(0, 3) for _ in range(dice.randint(0, 4))]
    del tensors[name]
    return safetensors.torch.save(tensors | {dice.choice([name, name, "other"]): torch.ones(shape).to(dtype)}, facts)


def change_log(dice: random.Random, raw: bytes) -> bytes:
    lines = raw.split(b"\n")
    at = dice.randrange(len(lines) - 1)
    return b"\n".join([*lines[:at], change_json(dice, lines[at]), *lines[at + 1 :]])


CHANGES = {".json": change_json, ".safetensors": change_tensors, ".jsonl": change_log}


# valid files


@functools.cache
def network() -> tuple[nn.Module, dmcp.ChannelGraph]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 8, 3), nn.Conv2d(8, 4, 1))
    return model, dmcp.trace(model, torch.zeros(2, 3, 8, 8))


@functools.cache
def files() -> dict[str, bytes]:
    """The files of a finished run, a checkpoint and shards."""
    model, graph = network()
    net = dmcp.Supernet(model, graph, groups=3)
    widths = graph.widths([space.size - 1 for space in graph.spaces])
    search = SearchConfig(budget="60%,params:9k", epochs=2, min_channels={graph.spaces[0].name: 2})
    config = RunConfig(model="m:f", ignore=("a",), search=search, train=TrainConfig())
    with tempfile.TemporaryDirectory() as name:
        run = Run(Path(name))
        spent = parse_budget("60%,params:9k", graph)
        found = SearchResult(torch.randn(len(graph.spaces), net.sizes.shape[1] - 1), net.sizes, graph, spent, 0.95)
        save_search(found, run.folder)
        for step in range(3):
            run.on_event(Event("search", 3, SearchRecord(step, 0, 0.1, (1.0, 2.0), 0.5, 1.5, 0.1, (1.0, 0.9))))
            run.on_event(Event("dmcp", 3, StepRecord(0, step, 3, 0.1, 1.5)))
        run.on_event(Event("test", 1, Row("dmcp", 1000, 100, 0.9, 1.0, 2)))
        dmcp.save(dmcp.cut(model, graph, widths), widths, run.folder)
        run.write("settings.json", config.to_json() | {"unpruned": {"macs": 5}, "argv": ["dmcp", "prune"]})
        tensors = {"shared/w": torch.randn(2, 3), "rank0/generator": torch.zeros(5, dtype=torch.uint8)}
        facts = {"identity": {"world_size": 1}, "lines": 2, "done": False}
        save_checkpoint(run.folder / "checkpoints" / "search", Checkpoint(3, tensors, facts))
        for part in ("train-0", "test-0"):
            images = np.random.randint(0, 256, (4, 5, 5, 2), "u1")
            np.savez_compressed(run.folder / part, images=images, labels=np.arange(4) % 2)
        return {str(it.relative_to(run.folder)): it.read_bytes() for it in run.folder.rglob("*.*") if it.is_file()}


STEP = "checkpoints/search/checkpoint.safetensors"


def put(folder: Path, contents: dict[str, bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def sealed(record: bytes, tensors: bytes) -> bytes:
    """widths.json or search.json with hashes that fit again, if it is still a table."""
    try:
        table = json.loads(record)
        table["sha256"] = hashlib.sha256(tensors).hexdigest()
        digest = {"digest"} & table.keys()
        text = json.dumps({key: value for key, value in table.items() if key not in digest}, sort_keys=True)
    except (ValueError, TypeError, AttributeError, RecursionError):
        return record
    return json.dumps(table | dict.fromkeys(digest, hashlib.sha256(text.encode()).hexdigest())).encode()


def seal(contents: dict[str, bytes]) -> dict[str, bytes]:
    """Checksums that fit again."""
    pairs = {"widths.json": "model.safetensors", "search.json": "search.safetensors"}
    return contents | {name: sealed(contents[name], contents[tensors]) for name, tensors in pairs.items()}


# reader: the files that it reads, by how their names begin
READS: dict[Callable[[Path], Any], tuple[str, ...]] = {
    lambda run: dmcp.load(run, network()[0]): ("widths.json", "model.safetensors"),
    lambda run: dmcp.cut(*network(), Widths.from_json(read_json(run / "widths.json"))): ("widths.json",),
    lambda run: dmcp.expected(load_search(run, network()[1])): ("search.json", "search.safetensors"),
    lambda run: read_config(run)[1].to_json(): ("settings.json",),
    lambda run: (load_checkpoint(run / "checkpoints" / "search"), Run(run).rewind(Run(run).checkpointer({}))): (STEP,),
    lambda run: Run(run).records("search"): ("log.jsonl",),
    lambda run: datasets.load(run): ("train-0.npz",),
}
PAIRS = [(read, name) for read, names in READS.items() for name in names]
every_file = pytest.mark.parametrize(("read", "name"), PAIRS, ids=[f"{n}-{name}" for n, (_, name) in enumerate(PAIRS)])


@every_file
def test_mutants(read: Callable[[Path], Any], name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    put(run, files())
    assert attempt(lambda: read(run))
    (file,) = (it for it in files() if it.startswith(name))
    for seed in range(60):
        dice = random.Random(seed)
        change = CHANGES.get(Path(file).suffix, change_bytes) if seed % 4 else change_bytes
        contents = files() | {file: change(dice, files()[file])}
        put(run, seal(contents) if seed % 5 else contents)
        attempt(lambda: read(run))
        assert attempt(lambda: json.dumps(read_overview(run, dice.choice([0, 100, 2**20])).describe()))  # noqa: B023
        assert attempt(lambda: list_runs(tmp_path))


# links, pipes and sizes

OBSTACLES: dict[str, Callable[[Path, Path], Any]] = {
    "link": lambda path, outside: path.symlink_to(outside),
    "pipe": lambda path, outside: os.mkfifo(path),
    "huge": lambda path, outside: (shutil.copy(outside, path), os.truncate(path, 2**40)),  # with holes
}


@every_file
@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_what_is_no_file_of_the_folder_or_too_large_is_refused(
    read: Callable[[Path], Any], name: str, obstacle: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    put(run, files())
    (file,) = (it for it in files() if it.startswith(name))
    if obstacle != "huge" and name == "train-0.npz":
        return  # data may be elsewhere, and the user's own
    (run / file).rename(tmp_path / "outside")
    OBSTACLES[obstacle](run / file, tmp_path / "outside")
    assert not attempt(lambda: read(run)) and attempt(lambda: read_run(run))
    assert (tmp_path / "outside").read_bytes() == files()[file]


def test_nothing_is_written_through_a_link(tmp_path: Path) -> None:
    victim, run = tmp_path / "victim", tmp_path / "run"
    put(run, {name: content for name, content in files().items() if "/" not in name})
    victim.write_text("dear")
    for name in (".widths.json.new", ".model.safetensors.new", ".report.md.new", "report.md"):
        (run / name).symlink_to(victim)
    model, graph = network()
    dmcp.save(model, graph.full, run)
    Run(run).write("report.md", "mine")
    (run / "log.jsonl").unlink()
    (run / "log.jsonl").symlink_to(victim)
    (run / "checkpoints").symlink_to(tmp_path)
    for write in (lambda: Run(run).add("log.jsonl", {"stage": "search"}), lambda: Run(run).checkpointer({})):
        with pytest.raises(FileError, match="link"):
            write()
    assert victim.read_text() == "dear"
    assert (run / "report.md").read_text() == "mine" and not (run / "report.md").is_symlink()
    dmcp.load(run, model)


# no file runs code


class Trap:
    """What a pickle may hold: a call that happens while it is read."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["TRAP"],)


def test_weights_that_would_run_code_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAP", str(tmp_path / "sprung"))
    torch.save({"0.weight": Trap()}, tmp_path / "weights.pth")
    with pytest.raises(FileError):
        load_weights(network()[0], tmp_path / "weights.pth", [])
    assert not (tmp_path / "sprung").exists()
    torch.load(tmp_path / "weights.pth", weights_only=False)
    assert (tmp_path / "sprung").exists()  # the trap works
