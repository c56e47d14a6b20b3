"""Ultralytics: every model through one contract, and one YOLO from its .yaml file to ONNX."""

from __future__ import annotations

import copy
import csv
import json
import math
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import shapes
import torch
from nets import randomise
from PIL import Image
from torch import nn
from ultralytics import RTDETR, YOLO
from ultralytics.utils import LOGGER
from ultralytics.utils.dist import ddp_cleanup, generate_ddp_file

import dmcp
from dmcp.ultralytics import Predictions, prune, train

pytestmark = pytest.mark.filterwarnings("default")
MODELS = {  # spaces: of the model as it is, whose features are outputs too, and of what the loss reads
    "yolov8n": (48, 51),
    "yolov10n": (63, 66),
    "yolo11n": (58, 61),
    "yolo12n": (58, 63),
    "yolo26n": (79, 82),
    "yolo11n-seg": (67, 70),
    "yolo11n-pose": (64, 67),
    "yolo11n-cls": (30, 30),
    "rtdetr-l": (96, 96),
}
SETTINGS = {"imgsz": 64, "batch": 16, "workers": 0, "device": "cpu", "plots": False, "verbose": False}


def build(name: str) -> Any:
    yolo = (RTDETR if name.startswith("rtdetr") else YOLO)(f"{name}.yaml")
    yolo.model.requires_grad_(True)
    return yolo


def shapes_of(model: nn.Module) -> list[torch.Size]:
    return [parameter.shape for parameter in model.parameters()]


def outputs(model: nn.Module, part: bool) -> Any:
    return Predictions(model) if part else model


def macs(model: nn.Module) -> int:
    return dmcp.trace(Predictions(model), torch.zeros(2, 3, 64, 64)).macs()


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_models(name: str, part: bool, tmp_path: Path) -> None:
    yolo = build(name)
    model = randomise(outputs(yolo.model, part))
    x = torch.rand(2, 3, 64, 64, dtype=torch.float64)
    graph = dmcp.trace(model, x)
    assert len(graph.spaces) == MODELS[name][part]
    with torch.no_grad():
        model.eval()(x)
        assert dmcp.verify(model, graph, x) < 1e-11
        widths = graph.widths([max(1, 2 * space.size // 3) for space in graph.spaces])
        small: Any = dmcp.cut(model, graph, widths)
        small(x)
    assert {it.dtype for it in copy.deepcopy(small).half().to("cpu").parameters()} == {torch.half}
    dmcp.save(small, widths, tmp_path / "saved")
    again = dmcp.load(tmp_path / "saved", outputs(build(name).model.double(), part)).float()
    yolo.model, again.__class__ = again, type(yolo.model)
    assert shapes_of(yolo.model) == shapes_of(small)
    assert len(yolo.predict(torch.rand(1, 3, 64, 64), verbose=False, device="cpu")) == 1


def test_the_block_of_the_cookbook(tmp_path: Path, run_block: Callable[[str], dict[str, Any]]) -> None:
    """From .yaml to ONNX; the file that is saved needs nothing of ours."""
    shapes.write(tmp_path)
    names = run_block("yolo")
    yolo, small = names["yolo"], names["small"]
    assert shapes_of(yolo.model) == shapes_of(YOLO("yolo11n.yaml").model)
    image = torch.rand(1, 3, 64, 64)
    assert yolo.model.yaml["nc"] == 80
    full = type(yolo.model)(yolo.model.yaml, nc=3, verbose=False)
    full.load(yolo.model)  # Ultralytics keeps the hidden channels of a head for 80 classes
    assert 0.475 < macs(small.model) / macs(full) <= 0.5 and type(small.model) is type(full)
    code = """if True:
        import sys
        sys.modules["dmcp"] = None
        import torch
        from ultralytics import YOLO
        yolo = YOLO("pruned.pt")
        print(len(yolo.predict("images/val/0.png", imgsz=64, device="cpu")))
        yolo.val(data="shapes.yaml", imgsz=64, workers=0, device="cpu", plots=False)
        torch.save([it.shape for it in yolo.model.parameters()], "shapes.pt")
    """
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path)
    assert torch.load("shapes.pt") == shapes_of(small.model)
    reopened = YOLO("pruned.pt").model.float().eval()
    session = onnxruntime.InferenceSession("pruned.onnx")
    found = session.run(None, {session.get_inputs()[0].name: image.numpy()})[0]
    np.testing.assert_allclose(found, reopened(image)[0].numpy(), rtol=1e-3, atol=1e-3)


def test_the_notebook() -> None:
    """Its code as it is, but for the length of search and trainings."""
    cells = json.loads((Path(__file__).parents[2] / "examples" / "yolo.ipynb").read_text())["cells"]
    source = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    names: dict[str, Any] = {}
    for name, value in {"EPOCHS": 2, "IMAGES": 32}.items():
        source = re.sub(f"^{name} = .*", f"{name} = {value}", source, flags=re.MULTILINE)
    level = LOGGER.level
    try:
        exec(source, names)
    finally:
        LOGGER.setLevel(level)  # the notebook is quiet; the tests after it are not
    assert macs(names["small"].model) <= 0.5 * macs(names["yolo"].model)


def test_a_trained_model_is_pruned_twice(tmp_path: Path) -> None:
    """With the loss of end-to-end models."""
    settings = SETTINGS | {"data": str(shapes.write(tmp_path))}
    yolo = YOLO("yolo26n.yaml")
    yolo.train(epochs=1, **settings)
    before = copy.deepcopy(yolo.model.state_dict())
    small = prune(yolo, "60%", epochs=1, **settings)
    assert all(torch.equal(value, before[name]) for name, value in yolo.model.state_dict().items())
    smaller = prune(small, "60%", epochs=1, **settings)
    sizes = [macs(it.model) for it in (yolo, small, smaller)]
    assert sizes[1] <= 0.6 * sizes[0] and sizes[2] <= 0.6 * sizes[1]
    train(smaller, epochs=1, **settings)
    assert macs(smaller.model) == sizes[2]
    other = tmp_path / "two.yaml"
    other.write_text((tmp_path / "shapes.yaml").read_text().rpartition("  2:")[0])
    for wrong in ({"data": str(other)}, {"pretrained": False}):
        with pytest.raises(dmcp.TrainingError):
            train(smaller, epochs=1, **settings | wrong)


def test_a_pruned_model_learns_from_a_teacher(tmp_path: Path) -> None:
    """By Ultralytics' own distillation: from the original, or from a larger one in a file."""
    settings = SETTINGS | {"data": str(shapes.write(tmp_path, images=32)), "epochs": 2, "nbs": 16, "warmup_epochs": 0}
    yolo = YOLO("yolo11n.yaml")
    yolo.train(**settings | {"epochs": 1})
    before = copy.deepcopy(yolo.model.state_dict())
    small = prune(yolo, "50%", **settings | {"epochs": 1})
    larger = tmp_path / "larger.pt"
    YOLO("yolo11s.yaml").save(larger)
    trained = {}
    for name, teacher in {"none": None, "original": yolo, "larger": larger}.items():
        student = copy.deepcopy(small)
        train(student, distill_model=teacher, **settings)
        assert shapes_of(student.model) == shapes_of(small.model) and type(student.model) is type(small.model)
        rows = list(csv.DictReader(student.trainer.csv.read_text().splitlines()))
        distances = [float(row["train/dis_loss"]) for row in rows if "train/dis_loss" in row]
        assert len(distances) == (2 if teacher else 0) and all(0 < value < math.inf for value in distances)
        trained[name] = student.model.state_dict()["model.0.conv.weight"]
    assert not torch.equal(trained["original"], trained["none"])
    assert not torch.equal(trained["original"], trained["larger"])
    assert all(torch.equal(value, before[name]) for name, value in yolo.model.state_dict().items())
    train(student, **settings)  # the teacher of the last training is forgotten
    assert "dis_loss" not in student.trainer.loss_names


def first_filters(yolo: Any) -> set[tuple[float, ...]]:
    weight = yolo.model.model[0].conv.weight.detach().float().cpu()
    return {tuple(filter.tolist()) for filter in weight.flatten(1)}


@pytest.mark.parametrize("method", ["uniform", "l2", "sensitivity"])
def test_a_method_without_a_search(method: str, tmp_path: Path) -> None:
    """It keeps channels of the original as they are, the same share of every layer."""
    settings = SETTINGS | {"data": str(shapes.write(tmp_path, images=16))}
    yolo = YOLO("yolo11n.yaml")
    yolo.train(epochs=1, **settings)
    before = copy.deepcopy(yolo.model.state_dict())
    small = prune(yolo, "50%", method=method, **settings)
    assert all(torch.equal(value, before[name]) for name, value in yolo.model.state_dict().items())
    assert 0.475 < macs(small.model) / macs(yolo.model) <= 0.5 and type(small.model) is type(yolo.model)
    assert 0 < len(first_filters(small)) < len(first_filters(yolo))
    assert first_filters(small) < first_filters(yolo)
    full = dmcp.trace(Predictions(yolo.model.float().cpu()), torch.zeros(2, 3, 64, 64)).full
    wide = [small.widths[name] / size for name, size in full.items() if size >= 64]
    assert max(wide) - min(wide) < 0.15  # widths are multiples of 8
    train(small, epochs=1, **settings)
    assert 0.475 < macs(small.model) / macs(yolo.model) <= 0.5
    with pytest.raises(dmcp.DmcpError):
        prune(yolo, "50%", method="nothing", **settings)


def milliseconds(model: nn.Module) -> float:
    return sum(shape.numel() for shape in shapes_of(model)) / 1e6


def test_names_reports_and_refusals(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = SETTINGS | {"data": str(shapes.write(tmp_path))}
    yolo, config = YOLO("yolov8n.yaml"), dmcp.SearchConfig(budget="60%", epochs=1, distill=False)
    bound = replace(config, min_channels={"model.1": 32})
    small = prune(yolo, search=bound, ignore=["model.0"], **settings)
    assert small.model.model[0].conv.out_channels == 16 and "model.0.conv" not in small.widths
    assert small.model.model[1].conv.out_channels == small.widths["model.1.conv"] == 32
    assert f" to {macs(small.model):,} MACs" in caplog.text
    small.save(tmp_path / "pruned.pt")
    with pytest.raises(KeyError, match="train"):  # by Ultralytics, which would build the full network
        YOLO(tmp_path / "pruned.pt").train(epochs=1, **settings)
    faster = prune(yolo, "latency:90%", epochs=1, latency=milliseconds, **settings)
    assert milliseconds(faster.model) <= 0.9 * milliseconds(yolo.model)
    wrong: list[tuple[Any, dict[str, Any]]] = [(yolo, {"budget": "30%", "search": config}), ("yolov8n.yaml", {})]
    for given, options in [*wrong, (yolo, {"budget": ["60%", "50%"]}), (yolo, {"data": None})]:
        with pytest.raises(dmcp.DmcpError):
            prune(given, **settings | options)


@pytest.mark.parametrize(("name", "task"), [("yolo11n-seg", "segment"), ("yolo11n-pose", "pose")])
def test_other_tasks(name: str, task: str, tmp_path: Path) -> None:
    """Of several GPUs: the file that Ultralytics gives to each process keeps the widths."""
    settings = SETTINGS | {"data": str(shapes.write(tmp_path, task=task))}
    small = prune(YOLO(f"{name}.yaml"), "50%", epochs=2, **settings)
    wanted = shapes_of(small.model)
    train(small, epochs=1, **settings)
    assert shapes_of(small.model) == wanted
    small.trainer.last.unlink()
    file = generate_ddp_file(small.trainer)
    subprocess.run([sys.executable, file], check=True)
    ddp_cleanup(small.trainer, file)
    assert shapes_of(YOLO(small.trainer.last).model) == wanted


def test_a_classifier(tmp_path: Path) -> None:
    for part in ("train", "val"):
        for shade in range(2):
            (tmp_path / part / str(shade)).mkdir(parents=True)
            for number in range(8):
                noise = np.random.randint(0, 128, (32, 32, 3), np.uint8) + np.uint8(100 * shade)
                Image.fromarray(noise).save(tmp_path / part / str(shade) / f"{number}.png")
    settings = SETTINGS | {"data": str(tmp_path), "batch": 8}
    yolo = YOLO("yolo11n-cls.yaml")
    small = prune(yolo, "50%", epochs=2, **settings)
    size = macs(small.model)
    train(small, epochs=1, **settings)
    assert macs(small.model) == size and len(small.names) == 2
