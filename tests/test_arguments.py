"""Wrong calls of public functions: an error of our tree that names the argument, whatever is wrong with it."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dmcp
from dmcp import arguments
from dmcp.arguments import checked

IMAGES, LABELS = torch.randn(8, 1, 6, 6), torch.arange(8) % 3
BATCHES = [(IMAGES[:4], LABELS[:4]), (IMAGES[4:], LABELS[4:])]
DATASET = TensorDataset(IMAGES, LABELS)
SEARCH = dmcp.SearchConfig(budget="50%", groups=4, epochs=1, warmup=0.0, subnets=0, lr=0.01, min_lr=0.001)
TRAIN = dmcp.TrainConfig(epochs=1, lr=0.01)


def build(width: int = 8) -> nn.Module:
    layers = (nn.Conv2d(1, width, 3), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU())
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 3))


MODEL = build()
GRAPH = dmcp.trace(MODEL, IMAGES[:2])
NET = dmcp.Supernet(MODEL, GRAPH, groups=4)
RESULT = dmcp.Searcher(NET, SEARCH, 2).result()


def prune(**changed: Any) -> object:
    arguments = {"model": MODEL, "loader": BATCHES, "val_loader": BATCHES, "search": SEARCH, "train": TRAIN}
    return dmcp.prune(**arguments | changed)


# function, the argument, and values that it cannot have
WRONG: list[tuple[Callable[..., object], str, list[Any]]] = [
    (prune, "model", [None, "resnet18", nn.Conv2d, len, GRAPH]),
    (prune, "loader", [None, DATASET, 5, "digits", IMAGES, MODEL, {"input": IMAGES}]),
    (prune, "val_loader", [None, DATASET, IMAGES.numpy()]),
    (prune, "budget", [object(), IMAGES, {"macs": 1}, np.array([1, 2])]),
    (prune, "method", [None, 5, [1, 2]]),
    (prune, "search", [5, "50%", TRAIN, dmcp.SearchConfig]),
    (prune, "train", [5, SEARCH, {}]),
    (prune, "retrain", ["zzz", 5, None]),
    (prune, "teacher", [5, nn.Conv2d]),
    (prune, "baselines", [5, None, [1, 2]]),
    (prune, "graph", [MODEL, GRAPH.full]),
    (prune, "latency", [5, "table.json"]),
    (prune, "task", [nn.CrossEntropyLoss()]),
    (prune, "runtime", [dmcp.Engine()]),
    (lambda **changed: dmcp.trace(MODEL, IMAGES[:2], **changed), "ignore", [None, 5, [1], b"x", MODEL, np.zeros(2)]),
    (lambda **changed: dmcp.trace(MODEL, IMAGES[:2], **changed), "rules", ["x", 5, GRAPH]),
    (lambda **changed: dmcp.trace(MODEL, IMAGES[:2], **changed), "exact", [None, "no", IMAGES]),
    (lambda **changed: dmcp.verify(MODEL, example_input=IMAGES[:2], **changed), "graph", [None, MODEL, GRAPH.full]),
    (lambda **changed: dmcp.Supernet(MODEL, GRAPH, **changed), "groups", [0, -1, 0.5, None, "10", True, IMAGES]),
    (lambda **changed: dmcp.search(NET, BATCHES, **changed), "config", [None, TRAIN, "50%"]),
    (lambda **changed: dmcp.search(loader=BATCHES, config=SEARCH, **changed), "net", [None, MODEL]),
    (lambda **changed: dmcp.Searcher(NET, SEARCH, **changed), "steps_per_epoch", [None, 1.5, BATCHES]),
    (dmcp.expected, "result", [None, GRAPH, NET]),
    (lambda **changed: dmcp.direct(RESULT, **changed), "n", ["x", 0.5, None]),
    (lambda **changed: dmcp.direct(RESULT, **changed), "generator", ["x", -1, 0.5]),
    (lambda **changed: dmcp.uniform(budget="50%", **changed), "graph", [None, MODEL]),
    (lambda **changed: dmcp.uniform(GRAPH, "50%", **changed), "min_channels", ["x", 0.5, [1], IMAGES]),
    (lambda **changed: dmcp.uniform(GRAPH, "50%", **changed), "tolerance", [None, "x", float("nan"), -1, 1.5]),
    (lambda **changed: dmcp.cut(MODEL, GRAPH, **changed), "widths", [None, 5, [2, 2], "x"]),
    (lambda **changed: dmcp.cut(MODEL, GRAPH, GRAPH.full, **changed), "by", [None, "size", np.zeros(2)]),
    (lambda **changed: dmcp.reinitialize(build(), **changed), "generator", ["x", -1]),
    (lambda **changed: dmcp.recalibrate(MODEL, **changed), "loader", [None, DATASET, IMAGES]),
    (lambda **changed: dmcp.recalibrate(MODEL, BATCHES, **changed), "forward", [5, nn.Conv2d]),
    (lambda **changed: dmcp.train(MODEL, config=TRAIN, **changed), "loader", [None, DATASET]),
    (lambda **changed: dmcp.train(MODEL, BATCHES, TRAIN, **changed), "teacher", ["unpruned", nn.Conv2d]),
    (lambda **changed: dmcp.evaluate(MODEL, **changed), "loader", [None, DATASET, MODEL]),
    (lambda **changed: dmcp.save(MODEL, GRAPH.full, **changed), "folder", [None, 5, MODEL]),
    (lambda **changed: dmcp.save(MODEL, folder="x", **changed), "widths", [None, {"0": 2}]),
    (lambda **changed: dmcp.load(model=MODEL, **changed), "folder", [None, 5]),
    (lambda **changed: dmcp.load_search(graph=GRAPH, **changed), "folder", [None, 5]),
    (lambda **changed: dmcp.export(MODEL, IMAGES, **changed), "path", [None, 5]),
    (lambda **changed: dmcp.measure_latency(MODEL, IMAGES, **changed), "config", [5, SEARCH]),
    (lambda **changed: dmcp.measure_latency(MODEL, IMAGES, **changed), "measure", [5, nn.Conv2d]),
    (lambda **changed: dmcp.write_networks(MODEL, IMAGES, **changed), "folder", [None, 5]),
    (lambda **changed: dmcp.read_latency(model=MODEL, example=IMAGES, **changed), "path", [None, 5]),
    (lambda **changed: dmcp.parse_budget(graph=GRAPH, **changed), "spec", [True, None, [1]]),
    (lambda **changed: dmcp.parse_budget("50%", **changed), "graph", [None, MODEL]),
    (dmcp.Task, "loss", [5, "mse", nn.CrossEntropyLoss]),
    (dmcp.Task, "optimizer", [torch.optim.SGD(MODEL.parameters()), nn.Conv2d]),
    (dmcp.Runtime, "on_event", [5, "print"]),
    (dmcp.Runtime, "engine", [5, dmcp.Engine]),
    (dmcp.Loaders, "search", [None, DATASET]),
    (dmcp.Checkpointer, "folder", [None, 5]),
    (lambda **changed: dmcp.Checkpointer("x", **changed), "every_seconds", ["x", float("nan"), -1]),
    (dmcp.Latency.load, "path", [None, 5]),
    (GRAPH.widths, "kept", [None, 5, object()]),
    (lambda kept: GRAPH.macs(kept), "kept", [5, object(), "x"]),
]
CASES = [(call, name, value) for call, name, values in WRONG for value in values]


@pytest.mark.parametrize(("call", "name", "value"), CASES, ids=[name for _, name, _ in CASES])
def test_a_wrong_argument_is_named_in_one_sentence(call: Callable[..., object], name: str, value: Any) -> None:
    with pytest.raises(dmcp.ArgumentError) as caught:
        call(**{name: value})
    text = str(caught.value)
    assert f"({name}=...)" in text and len(text.splitlines()) == 1 and len(text) < 250, text
    assert isinstance(caught.value, TypeError) and isinstance(caught.value, ValueError)  # as Python's own


def test_what_fits_is_taken() -> None:
    rows: list[Any] = [[4, 4], np.array([4, 4]), torch.tensor([4, 4]), {"0": 4}, GRAPH.full]
    assert all(isinstance(GRAPH.widths(row), dmcp.Widths) for row in rows)
    assert dmcp.Supernet(MODEL, GRAPH, groups=np.int64(4)).sizes.shape == NET.sizes.shape  # type: ignore[arg-type]
    assert dmcp.Task(optimizer=torch.optim.SGD).optimizer is torch.optim.SGD  # a class makes its instances
    assert dmcp.Checkpointer("folder").folder == Path("folder")  # type: ignore[arg-type]
    dmcp.Searcher(NET, SEARCH, 2, task=None)
    dmcp.search(dmcp.Supernet(build(), GRAPH, 4), BATCHES, SEARCH, task=None, runtime=None)
    dmcp.train(build(), BATCHES, TRAIN, task=None, runtime=None)
    assert 0 <= dmcp.evaluate(MODEL, (batch for batch in BATCHES)) <= 1  # a generator gives batches once
    assert dmcp.trace(MODEL, IMAGES[:2], ignore="0").spaces == dmcp.trace(MODEL, IMAGES[:2], ignore=iter(["0"])).spaces


def test_other_mistakes_have_their_own_errors() -> None:
    other = dmcp.trace(build(6), IMAGES[:2])
    with pytest.raises(dmcp.WidthsError):
        dmcp.measure_latency(MODEL, IMAGES, other, measure=lambda net: 1.0)
    with pytest.raises(dmcp.BudgetError):
        dmcp.measure_latency(MODEL, IMAGES, GRAPH, measure=lambda net: net)  # type: ignore[arg-type,return-value]
    with pytest.raises(dmcp.TrainingError, match="sampling"):
        dmcp.SearchConfig(budget="50%", sampling=np.zeros(2))  # type: ignore[arg-type]
    with pytest.raises(dmcp.BudgetError):
        GRAPH.cost([], GRAPH.full)  # type: ignore[call-overload]
    with pytest.raises(dmcp.CutError):
        dmcp.verify(MODEL, GRAPH, torch.randn(2, 3, 5, 5))
    with pytest.raises(dmcp.WidthsError):
        dmcp.Widths.from_json(np.zeros(2))
    with pytest.raises(TypeError, match="example_input"):
        dmcp.trace(MODEL)  # type: ignore[call-arg]


def public_functions() -> Iterator[Any]:
    """All public functions and classes that are called with arguments."""
    for name in dmcp.__all__:
        value = getattr(dmcp, name)
        if inspect.isfunction(value):
            yield value
        elif inspect.isclass(value) and hasattr(value.__init__, "__wrapped__"):
            yield value.__init__


def test_all_functions_are_checked_and_look_as_before() -> None:
    functions = [function for function in public_functions() if function is not dmcp.paper]  # which needs no torch
    assert len(functions) > 20
    for function in functions:
        assert function.__wrapped__.__module__ == function.__module__ != arguments.__name__
        assert "kwargs" not in inspect.signature(function).parameters
        for annotation in typing.get_type_hints(function, include_extras=True).values():
            arguments._fits(object(), annotation)  # all kinds are known
            assert arguments._expected(annotation)


def test_words_for_what_is_needed() -> None:
    @checked
    def call(mode: dmcp.Retrain | str | None = None, scale: Tensor | float = 1.0) -> None:
        """Nothing."""

    with pytest.raises(dmcp.ArgumentError) as caught:
        call(mode="zzz")
    assert str(caught.value).endswith(
        "call(mode=...) must be 'scratch', 'finetune', 'slimmable', 'none' or None, not 'zzz'."
    )
    with pytest.raises(dmcp.ArgumentError, match="Conv2d"):
        call(scale=nn.Conv2d)  # type: ignore[arg-type]
    assert call.__doc__ == "Nothing." and list(inspect.signature(call).parameters) == ["mode", "scale"]
