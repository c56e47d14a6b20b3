"""The examples run, in a smaller setting, and what they print is true."""

from __future__ import annotations

import itertools
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from examples import auxiliary, segmentation
from matplotlib import pyplot

import dmcp

pytestmark = pytest.mark.usefixtures("quick_commands")

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.mark.parametrize(
    ("example", "settings", "result"),
    [(segmentation, {"pictures": 64}, "iou"), (auxiliary, {"images": 256}, "accuracy")],
    ids=["segmentation", "auxiliary"],
)
def test_an_example_is_searched(
    example: Any, settings: Any, result: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = example.run(**settings, search_epochs=4, train_epochs=3)
    full, control, ours = rows
    for row in (control, ours):
        assert 0.95 * 0.3 <= row.macs / full.macs <= 0.3
        assert row.params < full.params and 0 < getattr(row, result) <= 1
    monkeypatch.setattr(example, "run", lambda: rows)
    example.main()
    assert f"{ours.macs:,}" in capsys.readouterr().out


def test_the_auxiliary_head_is_searched_and_cut_too() -> None:
    """Its gradient reaches the alphas, and the cut net gives both outputs of the gated one in train mode."""
    model = auxiliary.TinyGoogLeNet(width=4)
    x, labels = torch.randn(6, 1, 8, 8), torch.arange(6)
    graph = dmcp.trace(model, x)
    net = dmcp.Supernet(model, graph).train()
    slopes = []
    for loss in (auxiliary.both_heads, lambda output, batch: torch.nn.functional.cross_entropy(output[0], batch[1])):
        (slope,) = torch.autograd.grad(loss(net(x, net.soft()), (x, labels)), net.alphas())
        slopes.append(slope)
    assert not torch.allclose(*slopes)
    widths = graph.widths([max(1, space.size // 2) for space in graph.spaces])
    small = dmcp.cut(net.model, graph, widths).train()
    for cut, gated in itertools.zip_longest(small(x), net(x, net.hard(widths))):
        torch.testing.assert_close(cut, gated)


def source_of(name: str) -> str:
    """The code of a notebook, less what only a notebook can run."""
    cells = json.loads((EXAMPLES / name).read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return "\n".join(source for source in sources if not source.startswith("%"))


def test_the_notebook_of_several_budgets_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code as it is, but for the length of search and trainings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pyplot, "show", lambda: None)
    few = 'search=dmcp.SearchConfig(budget="50%", epochs=1, warmup=0, align=1), train=recipe'
    names: dict[str, Any] = {}
    source = source_of("front.ipynb").replace("EPOCHS = 20", "EPOCHS = 1").replace("width=32", "width=8")
    exec(source.replace("train=recipe", few), names)
    assert len(names["front"]) == 4 and [row.macs for row in names["front"]] == sorted(
        (row.macs for row in names["front"]), reverse=True
    )
    assert (tmp_path / "digits.onnx").stat().st_size > 0


@pytest.mark.usefixtures("few_steps")
def test_the_notebook_of_segmentation_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code as it is, but for the length of search and trainings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pyplot, "show", lambda: None)
    names: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", dmcp.retraining.DivergenceWarning)  # it has learned next to nothing
        exec(source_of("segmentation.ipynb").replace("EPOCHS = 12", "EPOCHS = 1").replace("512", "64"), names)
    full, *_, ours = names["result"].rows
    assert 0.95 * 0.4 <= ours.macs / full.macs <= 0.4
    pyplot.close("all")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.ipynb")), ids=lambda path: path.name)
def test_notebooks_have_their_outputs(path: Path) -> None:
    """Each was run from top to bottom, without an error, and shows a table and a picture."""
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    cells = [cell for cell in cells if not cell["source"][0].startswith("%")]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert any("MACs" in "".join(output.get("text", ())) for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs)
