"""docs/api.md is executed, and its tables are those of the sources."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import inspect
import io
import itertools
import json
import re
import warnings
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import Chain, randomise, sample
from torch import nn
from torch.utils.data import DataLoader

import dmcp
from dmcp.retraining import TeacherWarning

PAGE = Path(__file__).parents[1] / "docs" / "api.md"
SETTINGS = (dmcp.SearchConfig, dmcp.TrainConfig, dmcp.Engine)


def table(kind: type[Any]) -> str:
    """Fields, defaults and the comments beside them in the source."""
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(kind), re.MULTILINE))
    rows = [f"| `{field.name}` | {_default(field)} | {_cell(comments[field.name])} |" for field in _fields(kind)]
    return "\n".join(["| field | default | meaning |", "|---|---|---|", *rows])


def _fields(kind: type[Any]) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(kind)


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{field.default_factory()!r}`"
    if field.default is dataclasses.MISSING:
        return "needed"
    return f"`{field.default.value if isinstance(field.default, Enum) else field.default!r}`"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def filled(page: str) -> str:
    """The page with the tables as they should be."""
    for kind in SETTINGS:
        mark = f"<!-- {kind.__name__} -->\n"
        page = re.sub(rf"{mark}(\|.*\n)*", lambda _, kind=kind, mark=mark: f"{mark}{table(kind)}\n", page)
    return page


def blocks() -> list[str]:
    """The python blocks of the page."""
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the blocks leave behind, run one after the other in an empty folder; the last one needs onnx."""
    names: dict[str, Any] = {}
    printed = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.random.fork_rng([]),
        contextlib.redirect_stdout(printed),
        warnings.catch_warnings(),
    ):
        torch.manual_seed(0)
        patch.chdir(tmp_path_factory.mktemp("api"))
        warnings.simplefilter("ignore", TeacherWarning)  # the page's model has learnt nothing
        for number, source in enumerate(blocks()[:-1]):
            exec(compile(source, f"{PAGE.name}, block {number + 1}", "exec"), names)
    return names | {"printed": printed.getvalue()}


def test_the_blocks_run(left: dict[str, Any]) -> None:
    assert isinstance(left["again"], left["Net"]) and isinstance(left["mine"], left["Net"])
    assert "Stopped after step 1, as asked; everything up to here is saved." in left["printed"].splitlines()
    assert "stem.0 (16): ignored, as you asked" in left["printed"]
    assert left["printed"].count("search 8 ") == 2  # its first step and its result


@pytest.mark.parametrize("stage", ["search", "dmcp"])
def test_a_stopped_job_ends_as_if_nothing_had_happened(left: dict[str, Any], tmp_path: Path, stage: str) -> None:
    """Each call with a loader of its own, as a new process has it."""
    calls = itertools.count()

    def prune(**more: Any) -> dmcp.PruneResult:
        loader = DataLoader(left["images"], 32, shuffle=True, generator=torch.Generator().manual_seed(0))
        return dmcp.prune(left["model"], loader, loader, search=left["kept"], train=left["recipe"], **more)

    def hear(event: dmcp.Event) -> None:
        now.append(event.stage)

    now: list[str] = []
    stopping = dmcp.Checkpointer(tmp_path, stop_requested=lambda: now[-1:] == [stage] and next(calls) > 1)
    with pytest.raises(dmcp.StoppedError, match="Stopped after step"):
        prune(runtime=dmcp.Runtime(checkpointer=stopping, on_event=hear))
    again, whole = prune(runtime=dmcp.Runtime(checkpointer=dmcp.Checkpointer(tmp_path))), prune()
    assert again.widths == whole.widths
    assert all(map(torch.equal, again.model.state_dict().values(), whole.model.state_dict().values()))


def test_the_result_can_be_exported(left: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last block where onnx is installed, and everywhere what the exporter begins with."""
    small, x = left["small"].eval(), torch.randn(3, 3, 8, 8)
    exported = torch.export.export(small, (x,)).module()
    torch.testing.assert_close(exported(x), small(x))
    if not all(importlib.util.find_spec(name) for name in ("onnx", "onnxscript", "onnxruntime")):
        pytest.skip("onnx, onnxscript and onnxruntime are not all installed")
    import onnxruntime

    monkeypatch.chdir(tmp_path)
    exec(compile(blocks()[-1], PAGE.name, "exec"), left)
    session = onnxruntime.InferenceSession("pruned.onnx")
    (given,) = session.get_inputs()
    torch.testing.assert_close(torch.from_numpy(session.run(None, {given.name: x.numpy()})[0]), small(x))


def test_the_tables_are_those_of_the_sources() -> None:
    page = PAGE.read_text()
    assert page == filled(page), "run .venv/bin/python tests/test_api.py"
    assert all(len(table(kind).splitlines()) == 2 + len(_fields(kind)) for kind in SETTINGS)


def test_every_argument_of_prune_is_listed() -> None:
    section = PAGE.read_text().partition("## prune")[2].partition("\n### ")[0]
    assert re.findall(r"^\| `(\w+)` ", section, re.MULTILINE) == list(inspect.signature(dmcp.prune).parameters)


def test_every_public_name_is_there() -> None:
    page = PAGE.read_text()
    assert [name for name in dmcp.__all__ if not re.search(rf"\b{name}\b", page)] == []


def test_links_within_the_page_lead_somewhere() -> None:
    page = PAGE.read_text()
    places = {
        title.lower().replace(" ", "-").replace(",", "") for title in re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    }
    assert {*re.findall(r"\]\(#(.*?)\)", page)} <= places


# save: what it does with a folder that is not empty


def chain() -> tuple[nn.Module, dmcp.Widths]:
    model = randomise(Chain(**Chain.FULL))
    graph = dmcp.trace(model, sample(Chain.SHAPE))
    return model, graph.full


def test_save_replaces_a_result_of_ours(tmp_path: Path) -> None:
    model, widths = chain()
    (tmp_path / "widths.json").write_text(json.dumps(widths.to_json()))  # what a user may have written
    dmcp.save(model, widths, tmp_path)
    dmcp.save(randomise(model), widths, tmp_path)
    text = (tmp_path / "widths.json").read_text()
    (tmp_path / "widths.json").write_text(text[:-9])  # a damaged one is mended by another save
    dmcp.save(model, widths, tmp_path)
    assert dmcp.load(tmp_path, model)


@pytest.mark.parametrize(
    "files",
    [{"model.safetensors": b"theirs"}, {"widths.json": b"[1, 2]"}, {"model.safetensors": b"", "widths.json": b"{}"}],
)
def test_save_leaves_foreign_files_alone(tmp_path: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(dmcp.FileError, match="is not a result of ours, so it stays: give another folder"):
        dmcp.save(*chain(), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == files


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
