"""Ultralytics: prune a YOLO with its own loss and data, and train the result with its own trainer."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from ultralytics.engine.model import Model
from ultralytics.nn.modules import C2f
from ultralytics.utils import LOGGER
from ultralytics.utils.torch_utils import unset_deterministic

from dmcp.errors import BudgetError, DataError, TrainingError
from dmcp.exporting.latency import Latency
from dmcp.exporting.timing import Measure
from dmcp.feasibility import check_budget, parse_budgets, reachable, with_latency
from dmcp.pruning import PruneJob, resumable, search_widths
from dmcp.request import Loaders, Spec, read_specs
from dmcp.runtime.progress import showing
from dmcp.settings import Retrain, SearchConfig, defaults
from dmcp.tracing.modules import modules_of
from dmcp.tracing.trace import trace
from dmcp.training.calibration import recalibrate
from dmcp.training.loop import Runtime, Task

_PRUNED = "This YOLO is pruned: dmcp.ultralytics.train(yolo, ...) trains it, yolo.train(...) would build the full one."


class Predictions(nn.Module):
    """A model with the same modules that gives what the loss reads; of the features beside it only the size matters."""

    def __init__(self, model: nn.Module) -> None:
        self.__dict__.update(model.__dict__)
        self.__class__ = type("Predictions", (Predictions, type(model)), {})  # not around it: names stay as they are

    def forward(self, x: Tensor) -> Any:
        output = super().forward(x)
        return _without_features(output[1] if not self.training and isinstance(output, tuple) else output)


def prune(
    yolo: Any,
    budget: Spec | None = None,
    *,
    epochs: int | None = None,
    search: SearchConfig | None = None,
    ignore: Iterable[str] = (),
    latency: Latency | Measure | None = None,
    runtime: Runtime = Runtime(),
    **settings: Any,
) -> Any:
    """A smaller YOLO of the same class, inside the budget, for `train`; the given one is not changed.

    Its `widths` are the channels of each space, by name.
    budget, search, latency, runtime: as in `dmcp.prune`, but one budget.
    epochs: passes over the data in the search.
    ignore: modules of `yolo.model` or spaces, by name, whose channels are not pruned.
    settings: those of Ultralytics' own `train`: data, imgsz, batch, device, workers, ...
    """
    specs, keeping = read_specs(search, budget), _keeping(yolo)
    overrides = {**yolo.overrides, "plots": False, "amp": False, **settings, "task": yolo.task, "mode": "train"}
    if len(specs) > 1:
        raise BudgetError(f"A YOLO is pruned for one budget, not {len(specs)}: call prune for each.")
    if not overrides.get("data"):
        raise DataError('The search needs data: give data="coco8.yaml", or what else Ultralytics trains on.')
    trainer = keeping(overrides=overrides)
    given = copy.deepcopy(yolo.model)
    trainer.model = trainer.get_model(cfg=given.yaml, weights=given)
    trainer._setup_train()
    unset_deterministic()
    model, batches = Predictions(trainer.model).train(), _Batches(trainer)
    trained, size = bool(yolo.ckpt), trainer.batch_size
    config = search or replace(
        defaults(specs[0], Retrain.FINETUNE, trained=trained, images=len(batches) * size, batch=size).search,
        distill=False,
        lr=2e-4 if trained else 1e-3,
        min_lr=2e-5 if trained else 1e-4,
        reference_batch=size,
    )
    config = config if epochs is None else replace(config, epochs=epochs)
    first = next(iter(batches))["input"][:2]
    graph = trace(model, first, ignore)
    task, loaders = Task(loss=_loss(trainer.model), optimizer=torch.optim.AdamW), Loaders(search=batches)
    with showing(runtime.progress, lines=True):
        graph, timer = with_latency(model, graph, first, specs, config, latency, runtime)
        [(name, wanted)] = parse_budgets(specs, graph, *reachable(graph, config)).items()
        job = PruneJob(
            model=model,
            graph=graph,
            budgets={name: wanted},
            search=config,
            loaders=loaders,
            task=task,
            runtime=runtime,
            timer=timer,
        )
        found = search_widths(resumable(job)).cuts[name]
    small, widths = found.cut(graph), found.widths
    check_budget(small, widths, graph, wanted)
    recalibrate(small, batches)
    result = copy.copy(yolo)
    result._modules = {}  # a copy shares them
    small.__class__ = type(trainer.model)
    result.model, result.predictor, result.trainer, result.widths = _finished(small), None, None, widths
    result.ckpt, result.overrides = {"model": result.model}, dict(yolo.overrides)
    LOGGER.info(f"Pruned from {graph.macs():,} to {graph.macs(widths):,} MACs.")
    if found.latency is not None:
        LOGGER.info(found.latency.text)
    return result


def train(yolo: Any, **settings: Any) -> Any:
    """`yolo.train(...)` of a pruned YOLO, which keeps its widths."""
    return yolo.train(trainer=_keeping(yolo), **settings)


def _keeping(yolo: Any) -> Any:
    """The trainer of the YOLO's task, but for a pruned model, which stays as it is."""
    if not isinstance(yolo, Model) or not isinstance(yolo.model, nn.Module):
        raise TrainingError(f'A YOLO with its weights is needed, like YOLO("yolo11n.pt"), not {str(yolo)[:60]!r}.')
    pruned = getattr(yolo.model, "pruned", False)
    return type("Keeping", (_Keeping, yolo._smart_load("trainer")), {"pruned": pruned})


class _Keeping:
    """On several GPUs this is pickled, so it holds no model."""

    pruned: bool
    data: Any

    def get_model(self, cfg: Any = None, weights: Any = None, verbose: bool = True) -> Any:
        if not (self.pruned if weights is None else getattr(weights, "pruned", False)):
            return super().get_model(cfg=cfg, weights=weights, verbose=verbose)  # type: ignore[misc]
        if weights is None:
            raise TrainingError("A pruned YOLO is trained on from its own weights: leave out pretrained=False.")
        if weights.yaml["nc"] != self.data["nc"]:
            classes = f"{weights.yaml['nc']} classes, the data {self.data['nc']}"
            raise TrainingError(f"The pruned YOLO has {classes}: train the unpruned one on these data, then prune.")
        return weights


class _Batches:
    """The trainer's own batches, with their images also as "input"."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def __len__(self) -> int:
        return len(self.trainer.train_loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.trainer.train_loader:
            batch = self.trainer.preprocess_batch(batch)
            yield {"input": batch["img"], **batch}


def _loss(model: Any) -> Any:
    strides = [int(stride) for stride in getattr(model, "stride", ())]

    def loss(output: Any, batch: Any) -> Tensor:
        images = batch["img"]
        sizes = [[len(images), 0, *(side // stride for side in images.shape[2:])] for stride in strides]
        output = _with_features(output, [images.new_empty(size) for size in sizes])
        whole: Tensor = model.loss(batch, output)[0].sum()
        return whole / len(images) if isinstance(output, dict) else whole  # detectors sum over the images

    return loss


def _without_features(output: Any) -> Any:
    if not isinstance(output, dict):
        return output
    return {key: _without_features(value) for key, value in output.items() if key != "feats"}


def _with_features(output: Any, features: list[Tensor]) -> Any:
    if not isinstance(output, dict):
        return output
    if "boxes" in output:
        return {**output, "feats": features}
    return {key: _with_features(value, features) for key, value in output.items()}


def _finished(model: Any) -> Any:
    """A cut model as Ultralytics keeps it: export reads a width that forward does not, and the loss belongs to us."""
    for part in modules_of(model):
        if isinstance(part, C2f):
            part.c = part.cv1.conv.out_channels // 2
    model.pruned, model.criterion = True, None
    model.yaml = {**model.yaml, "scales": model.yaml.get("scales") or {"": ()}, "scale": _PRUNED}  # a KeyError says it
    return model.eval()
