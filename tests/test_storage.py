"""save and load: the files are plain, a kill leaves the old result or the new one, and no file is trusted blindly."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from huggingface_hub import constants
from nets import NETS, Chain, Odd, counted_macs, distance, randomise, same, sample, state
from safetensors import safe_open
from torch import nn

import dmcp
from dmcp import models
from dmcp.tracing.widths import fingerprint

Case = tuple[nn.Module, Any, Any, Any]


def narrowed(model: nn.Module, shape: tuple[int, ...]) -> tuple[nn.Module, Any, Any, Any]:
    """The model, its graph, widths of about two thirds, and the network cut to them."""
    graph = dmcp.trace(model, torch.zeros(2, *shape, dtype=next(model.parameters()).dtype))
    widths = graph.widths({space.name: max(1, space.size * 2 // 3) for space in graph.spaces})
    return model, graph, widths, dmcp.cut(model, graph, widths)


@pytest.fixture
def chain() -> Case:
    return narrowed(randomise(Chain(**Chain.FULL)).eval(), Chain.SHAPE)


@pytest.mark.parametrize("net", NETS, ids=lambda net: net.__name__)
def test_load_gives_back_what_was_saved(net: Any, tmp_path: Path) -> None:
    model, graph, widths, small = narrowed(randomise(net(**net.FULL)), net.SHAPE)
    fresh = net(**net.FULL).eval()
    dmcp.save(small, widths, tmp_path / "result")
    before = state(fresh)
    again = dmcp.load(tmp_path / "result", fresh)
    assert type(again) is net and not again.training  # the fresh model's mode
    assert same(state(again), state(small)) and same(before, state(fresh))
    assert len(list(again.parameters())) == len(list(model.parameters()))  # ties are still ties
    x = sample(net.SHAPE)
    assert distance(again.train()(x), small.train()(x)) < 1e-10
    dmcp.trace(again, x)  # attributes and tensors fit together: the loaded network can be pruned again
    shrunk = {space: max(1, width - 1) for space, width in widths.items()}
    for network, other in ((model, widths), (small, graph.full), (small, graph.widths(shrunk))):
        with pytest.raises(dmcp.WidthsError):
            dmcp.save(network, other, tmp_path / "other")
    assert not (tmp_path / "other").exists()


class Extent(NamedTuple):
    height: int
    width: int


def test_saved_files_need_nothing_of_ours(tmp_path: Path) -> None:
    _, _, widths, small = narrowed(Odd().eval(), (3, 8, 8))
    small.to(memory_format=torch.channels_last)
    small.extent = Extent(3, 4)
    (tmp_path / "notes.txt").write_text("mine")
    dmcp.save(nn.DataParallel(small), widths, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors", "notes.txt", "widths.json"]

    record = json.loads((tmp_path / "widths.json").read_text())
    assert record["widths"] == dict(widths) and record["input_shape"] == [3, 8, 8]
    assert record["fingerprint"] == fingerprint(Odd())
    assert record["attributes"][""]["channels"] == small.channels == 4
    assert record["attributes"]["stem"]["kernel_size"] == [3, 3]
    assert record["sha256"] == hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        assert {name: file.get_slice(name).get_shape() for name in file.keys()} == record["tensors"]  # noqa: SIM118
    assert record["tensors"]["shift"] == [4, 1, 1]

    fresh = Odd()
    fresh.extent = Extent(5, 6)
    again = dmcp.load(tmp_path, fresh)
    assert again.channels == 4 and again.stem.kernel_size == (3, 3)
    assert again.extent == Extent(3, 4) and type(again.extent) is Extent


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "full")], ids=["a kill", "a full disk"])
def test_what_stops_a_save_leaves_the_old_result_or_the_new_one(
    error: BaseException, chain: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, graph, widths, old = chain
    new = dmcp.cut(model, graph, graph.full)
    outcomes = []
    for survive in range(6):  # calls to the disk before it: two fsyncs, two renames, one fsync of the folder
        folder = tmp_path / str(survive)
        dmcp.save(old, widths, folder)
        left = iter(range(survive))

        def step(real: Callable[..., Any], left: Any = left) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                if next(left, None) is None:
                    raise error
                return real(*args)

            return run

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", step(os.fsync))
            patch.setattr(Path, "replace", step(Path.replace))
            with contextlib.suppress(KeyboardInterrupt, dmcp.FileError):
                dmcp.save(new, graph.full, folder)
        found = state(dmcp.load(folder, Chain(**Chain.FULL)))
        outcomes.append("new" if same(found, state(new)) else "old" if same(found, state(old)) else "mix")
        dmcp.save(old, widths, folder)  # and the next save works
        assert len(os.listdir(folder)) == 2
    assert outcomes == ["old", "old", "old", "new", "new", "new"]


def test_save_replaces_a_result_and_refuses_what_it_cannot_write(chain: Case, tmp_path: Path) -> None:
    model, _, widths, small = chain
    for content in (json.dumps(widths.to_json()), "damaged"):
        (tmp_path / "widths.json").write_text(content)
        dmcp.save(small, widths, tmp_path)
        assert same(state(dmcp.load(tmp_path, model)), state(small))
    for place in (tmp_path / "widths.json", tmp_path / "widths.json" / "below"):
        with pytest.raises(dmcp.FileError):
            dmcp.save(small, widths, place)


Change = Callable[[bytes], bytes | None]
WEIGHTS, WIDTHS = "model.safetensors", "widths.json"


def edit(**changes: Any) -> Change:
    return lambda data: json.dumps(json.loads(data) | changes).encode()


def sealed(**changes: Any) -> Change:
    """widths.json edited by somebody who knows how its digest is made."""

    def change(data: bytes) -> bytes:
        record = {key: value for key, value in (json.loads(data) | changes).items() if key != "digest"}
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
        return json.dumps(record | {"digest": digest}).encode()

    return change


DAMAGE: dict[str, tuple[str, Change]] = {
    "no weights": (WEIGHTS, lambda data: None),
    "no widths": (WIDTHS, lambda data: None),
    "edited weights": (WEIGHTS, lambda data: data[:-1] + bytes([data[-1] ^ 1])),
    "truncated widths": (WIDTHS, lambda data: data[:-8]),
    "of the future": (WIDTHS, edit(format="torch-dmcp 9")),
    "edited widths": (WIDTHS, edit(widths={"conv1": 1})),
    "no tables": (WIDTHS, sealed(attributes={"conv1": 3})),
    "not a tuple": (WIDTHS, sealed(attributes={"conv1": {"kernel_size": 3}})),
    "a terminal's": (WIDTHS, sealed(attributes={"conv1": {"\x1b[2J": 3}})),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_load_refuses_damaged_files(damage: str, chain: Case, tmp_path: Path) -> None:
    model, _, widths, small = chain
    dmcp.save(small, widths, tmp_path)
    name, change = DAMAGE[damage]
    data = change((tmp_path / name).read_bytes())
    (tmp_path / name).unlink() if data is None else (tmp_path / name).write_bytes(data)
    with pytest.raises((dmcp.FileError, dmcp.WidthsError)) as caught:
        dmcp.load(tmp_path, model)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


def test_load_refuses_another_architecture_or_version(chain: Case, tmp_path: Path) -> None:
    _, _, widths, small = chain
    dmcp.save(small, widths, tmp_path)
    for other in (Odd(), small, Chain(**Chain.FULL).to("meta")):  # the cut network is not the unpruned one
        with pytest.raises(dmcp.WidthsError):
            dmcp.load(tmp_path, other)
    _, _, widths, small = narrowed(Odd().eval(), (3, 8, 8))
    dmcp.save(small, widths, tmp_path)
    renamed = Odd()
    renamed.width = renamed.__dict__.pop("channels")
    with pytest.raises(dmcp.WidthsError):
        dmcp.load(tmp_path, renamed)


def test_a_run_needs_no_model_and_may_be_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the cache of huggingface_hub files are links to blobs."""
    _, _, widths, small = narrowed(models.build("digits:resnet", width=8), (1, 8, 8))
    blobs, linked, refs = (tmp_path / "models--me--half" / name for name in ("blobs", f"snapshots/{0:040}", "refs"))
    settings = {"model": "digits:resnet", "model_args": ["width=8"], "classes": 10}
    dmcp.save(small, widths, blobs)
    (blobs / "settings.json").write_text(json.dumps(settings))
    for path in (linked, refs):
        path.mkdir(parents=True)
    (refs / "main").write_text(linked.name)
    for path in blobs.iterdir():
        (linked / path.name).symlink_to(path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for folder, model in itertools.product((blobs, "me/half"), (None, models.build("digits:resnet", width=8))):
        assert same(state(dmcp.load(folder, model)), state(small))
    for wrong in ({"model": "nets:Chain"}, {"model": 3}, {"model_args": ["width='8'"]}, {"classes": "4"}):
        (blobs / "settings.json").write_text(json.dumps(settings | wrong))
        for folder in (blobs, "me/other", "none"):
            with pytest.raises(dmcp.FileError):
                dmcp.load(folder)


@pytest.mark.parametrize("folder", sorted(Path(__file__).parents[1].glob("checkpoints/*")), ids=lambda it: it.name)
def test_a_network_of_ours_is_inside_its_budget(folder: Path) -> None:
    settings = json.loads((folder / "settings.json").read_text())
    share = counted_macs(dmcp.load(folder), torch.zeros(1, *settings["shape"])) / settings["unpruned"]["macs"]
    assert 0.9 < share / (float(settings["search"]["budget"].rstrip("%")) / 100) <= 1
