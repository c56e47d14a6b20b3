"""What a network computes, in a few letters: what changes them, and which runs they tell from others."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dmcp import models
from dmcp.cli.config import Plan
from dmcp.cli.job import Job
from dmcp.cli.session import session
from dmcp.errors import FileError
from dmcp.running.operations import are_others, operations_of
from dmcp.runtime.engine import Engine
from dmcp.training import TrainConfig


class Net(nn.Module):
    """With something that is no tensor in every line."""

    def __init__(self, act: nn.Module, drop: float = 0.1, eps: float = 1e-5, shift: float = 0.5) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, eps=eps), nn.Linear(8, 2)
        self.act, self.drop, self.shift = act, nn.Dropout(drop), shift

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.conv(x - torch.tensor(self.shift))))
        out: Tensor = self.fc(self.drop(x.mean((2, 3))))
        return out


def letters(**changes: Any) -> str:
    return operations_of(Net(**{"act": nn.ReLU()} | changes), (3, 8, 8))


def test_they_change_with_all_that_is_no_tensor() -> None:
    changes: list[dict[str, Any]] = [{"act": nn.Tanh()}, {"drop": 0.5}, {"eps": 1e-3}, {"shift": 0.4}]
    found = [letters(), *(letters(**change) for change in changes)]
    assert len({*found}) == 5 and all(len(one) == 14 for one in found)
    assert letters() == found[0]  # fresh weights are others
    assert operations_of(nn.Linear(7, 2), (3, 8, 8)) == ""  # which does not run


def test_weights_that_become_plain_numbers_are_no_operations() -> None:
    """They differ between seeds, and would make each seed another network."""

    class Scaled(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * float(self.fc.bias.abs().max()))

    assert operations_of(Scaled(nn.ReLU()), (3, 8, 8)) == ""


@pytest.mark.slow
def test_they_are_the_same_in_another_process() -> None:
    code = "print(operations_of(nets.build('cifar:mobilenet_v2'), (3, 32, 32)))"
    code = f"from dmcp import nets; from dmcp.running.operations import operations_of; {code}"
    places = {"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=places)
    assert done.stdout.strip() == operations_of(models.build("cifar:mobilenet_v2"), (3, 32, 32)) != "", done.stderr


def test_what_is_not_known_tells_nothing() -> None:
    one: dict[str, Any] = {"operations": "a", "versions": {"torch": "2.8"}}
    assert are_others(one, one | {"operations": "b"}) and not are_others(one, one)
    others: list[dict[str, Any]] = [
        {"operations": ""},
        {"operations": None},
        {"operations": "2.b"},
        {"versions": {"torch": "2.9"}},
    ]
    for change in [*others, {"versions": {}}, {"versions": "2.8"}]:
        other = one | {"operations": "b"} | change
        assert not are_others(one, other) and not are_others(other, one)


def test_a_run_does_not_go_on_with_another_network(tmp_path: Path) -> None:
    job = Job(model="digits:resnet", data="digits", device="cpu")
    plan = Plan(command="train", job=job, engine=Engine(), train=TrainConfig(epochs=1))
    with session(plan, tmp_path / "run", False, quiet=True):
        pass
    path = tmp_path / "run" / "settings.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"operations": "2.others"}))
    told = "run: the network is not what it was: it has the same tensors, but computes otherwise"
    with pytest.raises(FileError, match=told), session(plan, tmp_path / "run", True, quiet=True):
        pass
    del stored["operations"]  # of an older version
    path.write_text(json.dumps(stored))
    with session(plan, tmp_path / "run", True, quiet=True):
        pass
