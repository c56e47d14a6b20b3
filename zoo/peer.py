"""What Torch-Pruning makes of the same models, where that package is installed.

MagnitudePruner, L2 importance, half of the channels, classifiers (for detectors: heads and pyramids) left alone, no
settings per model. Only that the pruned network runs and keeps its output shape is asked, not its values.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import nn

from zoo.contract import outputs
from zoo.models import Entry

OK = "ok"
LIMIT_SECONDS = 60
_CLASSES = {"tv": 1000, "timm": 1000, "seg": 21}


def installed() -> bool:
    """Whether there is a peer to compare with."""
    return importlib.util.find_spec("torch_pruning") is not None


def prune(entry: Entry) -> str:
    """Prune one model with Torch-Pruning: ok, raises, or cut model does not run, with the error."""
    import torch_pruning

    torch.manual_seed(0)
    model = entry.build().eval()
    images = torch.randn(1, 3, entry.px, entry.px)
    with torch.no_grad():
        before = _shapes(entry, model, images)
    try:
        pruner = torch_pruning.pruner.MagnitudePruner(
            model,
            images,
            importance=torch_pruning.importance.MagnitudeImportance(p=2),
            pruning_ratio=0.5,
            ignored_layers=_kept(entry, model),
        )
        pruner.step()
    except Exception as error:
        return f"raises: {_words(error)}"
    try:
        with torch.no_grad():
            after = _shapes(entry, model, images)
    except Exception as error:
        return f"cut model does not run: {_words(error)}"
    return OK if after == before else f"cut model does not run: its output is {after} instead of {before}"


def _kept(entry: Entry, model: nn.Module) -> list[nn.Module]:
    """The layers that the pruner is told to leave alone."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)}
    if entry.family == "detbody":
        return [layer for name, layer in layers.items() if name.startswith("head.") or ".fpn." in name]
    return [layer for layer in layers.values() if layer.weight.shape[0] == _CLASSES[entry.family]]


def _shapes(entry: Entry, model: nn.Module, images: torch.Tensor) -> list[tuple[int, ...]]:
    """Shapes of the outputs; of a detector's head only, since its features may get narrower."""
    output = model(images)
    return [tuple(tensor.shape) for tensor in outputs(output[1] if entry.family == "detbody" else output)]


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
