"""What would fail after hours of work is refused before the first step."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from nets import Residual, Toy, means, same, state, unit
from short_runs import Noise, prune, traced_residual
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import dmcp
from dmcp.errors import BudgetError, DataError, TrainingError, WidthsError
from dmcp.settings import SearchConfig
from dmcp.training.losses import LossWarning
from dmcp.training.preflight import check_classifier, check_forward

pytestmark = pytest.mark.filterwarnings("ignore::dmcp.training.distillation.DistillationWarning")


def changed(x: Any = lambda x: x, y: Any = lambda y: y) -> Noise:
    """Noise with other inputs or labels."""
    found = Noise()
    found.batches = [(x(a), y(b)) for a, b in found.batches]
    return found


def broken(change: Any) -> nn.Module:
    model = copy.deepcopy(traced_residual()[0])
    change(model)
    return model


class Writing(Residual):
    """Writes into its input."""

    def __init__(self, write: Any = lambda x: x.mul_(2)) -> None:
        super().__init__(**Residual.FULL)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        self.write(x)
        return super().forward(x)


class Ages(Residual):
    """Has an output in training that is no class scores."""

    def forward(self, x: Tensor) -> Any:
        found = super().forward(x)
        return {"classes": found, "age": found.mean(dim=1)} if self.training else found


NAMELESS = [{"image": torch.zeros(2, *Residual.SHAPE)}]
ARRAYS = [(np.zeros((4, *Residual.SHAPE), np.float32), np.zeros(4))]
OWN = dmcp.Task(loss=lambda output, _: output["classes"].sum(), metric=lambda output, _: (output.sum(), len(output)))
NAN = float("nan")
NORMED = Toy(
    lambda m, x: m.head(m.norm(m.conv(x).mean((2, 3)))), conv=unit(3, 8), norm=nn.BatchNorm1d(8), head=nn.Linear(8, 5)
)
SAMPLES = [(torch.randn(Residual.SHAPE), label) for label in [0, 1, 2, 3, 4, 0, 1]]
CASES: dict[str, tuple[type[Exception], Any]] = {
    # settings
    "unreachable budget": (BudgetError, lambda: {"search": SearchConfig(budget=3, groups=4)}),
    "unknown way": (ValueError, lambda: {"retrain": "often"}),
    "unknown baseline": (TrainingError, lambda: {"baselines": "no"}),
    # loaders
    "no batches": (DataError, lambda: {"loader": []}),
    "no batches, no task": (DataError, lambda: {"loader": [], "task": None}),
    "generator for alphas": (DataError, lambda: {"loader": dmcp.Loaders(search=Noise(), arch=iter(Noise()))}),  # type: ignore[arg-type]
    "alphas without input": (DataError, lambda: {"loader": dmcp.Loaders(search=Noise(), arch=NAMELESS)}),
    "samples": (DataError, lambda: {"loader": list(zip(*Noise().batches[0], strict=True))}),
    "arrays": (DataError, lambda: {"loader": ARRAYS, "val_loader": ARRAYS}),
    "bytes": (DataError, lambda: {"loader": changed(lambda x: x.byte())}),
    "NaN": (DataError, lambda: {"loader": changed(lambda x: x * NAN)}),
    "counts of classes": (DataError, lambda: {"loader": changed(y=lambda y: torch.eye(5)[y] * 7)}),
    "several labels": (DataError, lambda: {"loader": changed(y=lambda y: (torch.arange(5) <= y[:, None]).float())}),
    "positions": (DataError, lambda: {"loader": changed(y=lambda y: torch.eye(5)[y] * 2 - torch.eye(5)[4 - y])}),
    "ages": (DataError, lambda: {"model": means(1), "loader": changed(y=lambda y: 0 * y[:, None] + 1.0)}),
    "a last sample alone": (DataError, lambda: {"model": NORMED, "loader": DataLoader(SAMPLES, 6)}),
    "labels from 1": (DataError, lambda: {"loader": changed(y=lambda y: y + 1)}),
    # the test
    "nothing to test on": (DataError, lambda: {"val_loader": []}),
    "test labels, later": (DataError, lambda: {"val_loader": [*Noise(1), *changed(y=lambda y: y + 1)]}),
    "tests of a generator": (DataError, lambda: {"val_loader": (it for it in Noise(1)), "baselines": True}),
    "metric of the wrong kind": (TrainingError, lambda: {"task": dmcp.Task(metric=lambda output, batch: None)}),
    "metric that fails": (ZeroDivisionError, lambda: {"task": dmcp.Task(metric=lambda output, batch: 1 / 0)}),
    # networks
    "frozen": (TrainingError, lambda: {"model": broken(lambda it: it.requires_grad_(False))}),
    "on the meta device": (TrainingError, lambda: {"model": means().to("meta")}),
    "lazy": (TrainingError, lambda: {"model": nn.Sequential(nn.LazyConv2d(4, 3), nn.Conv2d(4, 5, 3))}),
    "infinite weight": (TrainingError, lambda: {"model": broken(lambda it: it.stem.weight.data.fill_(float("inf")))}),
    "writes into its input": (TrainingError, lambda: {"model": Writing()}),
    "other fresh network": (WidthsError, lambda: {"task": dmcp.Task(fresh=nn.Linear(2, 2))}),
    # optimizers
    "half of it": (TrainingError, lambda: {"task": dmcp.Task(optimizer=lambda groups: torch.optim.Adam(groups[:1]))}),
    "CUDA graphs": (TrainingError, lambda: {"task": dmcp.Task(optimizer=torch.optim.Adam), "engine": True}),
    # teachers
    "teacher of slimmable": (TrainingError, lambda: {"teacher": means(), "retrain": "slimmable"}),
    "teacher by name": (TrainingError, lambda: {"teacher": "resnet18"}),
    "teacher of other classes": (TrainingError, lambda: {"teacher": means(7)}),
    "teacher of other inputs": (TrainingError, lambda: {"teacher": nn.Sequential(nn.Linear(3, 5))}),
    "broken teacher": (TrainingError, lambda: {"teacher": broken(lambda it: it.head.bias.data.fill_(NAN))}),
    "slimmable ages": (TrainingError, lambda: {"model": Ages(**Residual.FULL), "retrain": "slimmable", "task": OWN}),
}


@pytest.mark.parametrize("name", CASES)
def test_mistakes_are_refused_before_the_first_step(name: str) -> None:
    kind, make = CASES[name]
    options, seen = make(), list[Any]()
    engine = dmcp.Engine(graphs=True) if options.pop("engine", False) else None
    before = state(traced_residual()[0])
    with pytest.raises(kind):
        prune(**options, runtime=dmcp.Runtime(on_event=seen.append, engine=engine))
    assert not seen and same(before, state(traced_residual()[0]))


def test_what_does_no_harm_is_allowed() -> None:
    mixed = lambda y: (0.7 * torch.eye(5)[y] + 0.3 * torch.eye(5)[y.flip(0)]).bfloat16()  # noqa: E731
    assert prune(loader=changed(y=mixed)).rows
    masked, x = nn.Sequential(nn.Conv2d(3, 4, 3)), torch.randn(2, *Residual.SHAPE)
    masked.register_buffer("mask", torch.tensor([float("-inf"), 0.0]))
    check_forward(masked, x)  # a mask may be infinite
    check_forward(Writing(lambda x: x.relu_()), x)  # a second pass finds it as the first has left it
    check_forward(Writing(lambda x: x.clone().mul_(2)), x)
    assert prune(NORMED, DataLoader(SAMPLES, 6, drop_last=True), method="uniform").rows
    assert prune(loader=DataLoader(SAMPLES, 6), method="uniform").rows
    with pytest.raises(TrainingError):
        check_forward(nn.Sequential(nn.Conv2d(3, 4, 1), nn.Threshold(0, float("nan"))), x)


@pytest.mark.parametrize("trainable", [True, False])
def test_parameters_of_a_loss_are_not_trained(trainable: bool) -> None:
    class Scaled(nn.Linear):
        def forward(self, output: Tensor, batch: Any) -> Tensor:  # type: ignore[override]
            return F.cross_entropy(super().forward(output), batch[1])

    loss = Scaled(5, 5).requires_grad_(trainable)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prune(task=dmcp.Task(loss=loss), method="uniform")
    texts = [str(it.message) for it in caught if it.category is LossWarning]
    assert len(texts) == trainable and all("weight" in text for text in texts)


def test_the_command_line_takes_classifiers_only() -> None:
    x = torch.randn(2, *Residual.SHAPE)
    check_classifier(traced_residual()[0], x, 5)
    check_classifier(Toy(lambda m, x: {"logits": m.net(x)}, net=traced_residual()[0]), x, 5)
    for model, classes in (
        (traced_residual()[0], 3),
        (traced_residual()[0], 6),
        (Ages(**Residual.FULL), 5),
        (nn.Conv2d(3, 5, 1), 5),
    ):
        with pytest.raises(TrainingError):
            check_classifier(model, x, classes)
