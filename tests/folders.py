"""What commands find on disk: image files, shards and runs, written without the package; and checkpoints."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from PIL import Image

from dmcp.runtime.checkpoint import load_checkpoint


def write_photos(
    root: Path,
    *sizes: tuple[int, int],
    count: int = 4,
    classes: tuple[str, ...] = ("dog", "cat"),
    parts: tuple[str, ...] = ("train", "val"),
) -> Path:
    """Noise of these heights and widths, in turn, in train/ and val/."""
    noise = np.random.default_rng(0)
    for part, name in itertools.product(parts, classes):
        (root / part / name).mkdir(parents=True)
        for number in range(count):
            pixels = noise.integers(0, 256, (*(sizes or ((20, 24),))[number % (len(sizes) or 1)], 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / part / name / f"{number}.png")
    return root


def write_shards(folder: Path, **changes: Any) -> Path:
    """Two training shards and a test shard; `changes` replaces the arrays of one file, None removes it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, count in (("train-0", 6), ("train-1", 4), ("test-0", 5)):
        images = np.random.randint(0, 256, (count, 12, 12, 3), dtype=np.uint8)
        arrays = {"images": images, "labels": np.arange(count) % 4}
        change = changes.get(name.replace("-", ""), {})
        if change is not None:
            np.savez(folder / f"{name}.npz", **{k: v for k, v in (arrays | change).items() if v is not None})
    return folder


RUN_SETTINGS: dict[str, Any] = {
    "command": "prune",
    "model": "digits:resnet",
    "data": "digits",
    "search": {"budget": "50%,params:60%", "tolerance": 0.95, "epochs": 4},
    "unpruned": {"macs": 1000, "params": 100, "widths": {"conv1": 5, "conv2": 8}},
}


TENSORS = {"alphas": torch.tensor([[0.0, 0.0], [2.0, 0.0]]), "sizes": torch.tensor([[1, 2, 2], [4, 4, 0]])}


def step_lines(steps: int, per_epoch: int = 10) -> list[dict[str, Any]]:
    """A search whose second half moves the alphas."""
    return [
        {
            "stage": "search",
            "step": step,
            "epoch": step // per_epoch,
            "weight_losses": [2.0, 0.5, 0.7],
            "ratios": [0.9 + step / 1000, 1.1] if step >= steps // 2 else None,
        }
        for step in range(steps)
    ]


def network_line(name: str, macs: int, accuracy: float) -> dict[str, Any]:
    return {"stage": "test", "name": name, "macs": macs, "params": macs // 10, "accuracy": accuracy}


TEST_LINES = [network_line("unpruned", 1000, 0.9), network_line("uniform", 490, 0.8), network_line("dmcp", 480, 0.85)]


TRAIN_LINE = {"stage": "dmcp", "epoch": 0, "step": 4, "steps": 33, "lr": 0.1, "loss": 2.0}


def write_run(folder: Path, lines: list[dict[str, Any]], done: bool = True, **settings: Any) -> Path:
    """A run of two spaces, written without the package."""
    folder.mkdir(parents=True)
    (folder / "settings.json").write_text(json.dumps(RUN_SETTINGS | settings))
    (folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if done:
        limits = [{"kind": "macs", "target": 500}, {"kind": "params", "target": 60}]
        facts = {"spaces": ["conv1", "conv2"], "budget": {"limits": limits}}
        write_alphas(folder, TENSORS, facts)
        widths = {"widths": {"conv1": 3, "conv2": 8}, "input_shape": [1, 8, 8], "fingerprint": "x"}
        (folder / "widths.json").write_text(json.dumps(widths))
    return folder


def write_alphas(folder: Path, tensors: dict[str, torch.Tensor], facts: dict[str, Any]) -> None:
    data = safetensors.torch.save(tensors)
    (folder / "search.safetensors").write_bytes(data)
    (folder / "search.json").write_text(json.dumps(facts | {"sha256": hashlib.sha256(data).hexdigest()}))


def saved_step(folder: Path) -> int:
    """The step of the checkpoint in a folder; 0 where there is none."""
    checkpoint = load_checkpoint(folder)
    return checkpoint.step if checkpoint else 0
