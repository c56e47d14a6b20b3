"""Ultralytics: prune a YOLO with its own loss and data, and train the result with its own trainer."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dmcp.defaults import resolve
from dmcp.errors import BudgetError, DataError, TrainingError
from dmcp.exporting.latency import Latency
from dmcp.exporting.timing import Measure
from dmcp.feasibility import check_budget, parse_budgets, reachable, with_latency
from dmcp.installation import install_command
from dmcp.pruning import PruneJob, choose_widths, plan_cuts, resumable, search_widths
from dmcp.request import Loaders, Spec, check_method, read_specs, with_budget
from dmcp.runs.records import DMCP
from dmcp.runtime.progress import showing
from dmcp.settings import ResolvedSearchConfig, Retrain, SearchConfig, TrainConfig
from dmcp.tracing.modules import modules_of
from dmcp.tracing.trace import trace
from dmcp.tracing.widths import Widths
from dmcp.training.calibration import recalibrate
from dmcp.training.loop import Runtime, Task

try:
    from ultralytics.engine.model import Model
    from ultralytics.nn.modules import C2f
    from ultralytics.utils import LOGGER
    from ultralytics.utils.torch_utils import unset_deterministic
except ModuleNotFoundError as error:
    if not str(error.name).startswith("ultralytics"):
        raise
    raise ModuleNotFoundError(
        f"Ultralytics is not installed: {install_command('ultralytics')}.", name=error.name
    ) from None

_PRUNED = "This YOLO is pruned: dmcp.ultralytics.train(yolo, ...) trains it, yolo.train(...) would build the full one."


def prune(
    yolo: Any,
    budget: Spec | None = None,
    *,
    method: str = DMCP,
    epochs: int | None = None,
    search: SearchConfig | None = None,
    ignore: Iterable[str] = (),
    latency: Latency | Measure | None = None,
    runtime: Runtime = Runtime(),
    **settings: Any,
) -> Any:
    """Search a smaller YOLO of the same class, inside the budget, for `train`; the given one is not changed.

    Its `widths` are the channels of each space, by name.
    budget, search, latency, runtime: as in `dmcp.prune`, but one budget.
    method: "dmcp" searches; "l2", "uniform" and the other methods of `dmcp compare` cut without a search, in a minute.
    epochs: passes over the data in the search.
    ignore: modules of `yolo.model` or spaces, by name, whose channels are not pruned.
    settings: those of Ultralytics' own `train`: data, imgsz, batch, device, workers, ...
    """
    searches = check_method(method)
    specs = read_specs(search, budget)
    trainer_class = _trainer_class(yolo)
    overrides = {**yolo.overrides, "plots": False, "amp": False, **settings, "task": yolo.task, "mode": "train"}
    if len(specs) > 1:
        raise BudgetError(f"A YOLO is pruned for one budget, not {len(specs)}: call prune for each.")
    if not overrides.get("data"):
        raise DataError('Pruning needs data: give data="coco8.yaml", or any other data that Ultralytics can train on.')

    # A copy of the model, in Ultralytics' own trainer, which has the data and the loss.
    trainer = trainer_class(overrides=overrides)
    copy_of_model = copy.deepcopy(yolo.model)
    trainer.model = trainer.get_model(cfg=copy_of_model.yaml, weights=copy_of_model)
    trainer._setup_train()
    unset_deterministic()
    model = Predictions(trainer.model).train()
    batches = _Batches(trainer)

    # What can be pruned, and how it is searched.
    example = next(iter(batches))["input"][:2]
    graph = trace(model, example, ignore)
    batch_size = trainer.batch_size
    asked = with_budget(search or SearchConfig(reference_batch=batch_size), specs)
    if epochs is not None:
        asked = replace(asked, epochs=epochs)
    trained = bool(yolo.ckpt)
    config = _resolve(asked, trained=trained, batches=len(batches), batch_size=batch_size)

    with showing(runtime.progress):
        graph, timer = with_latency(model, graph, example, specs, config, latency, runtime)
        low, high = reachable(graph, config)
        [(name, parsed_budget)] = parse_budgets(specs, graph, low, high, config.align).items()
        job = PruneJob(
            model=model,
            graph=graph,
            budgets={name: parsed_budget},
            method=method,
            search=config,
            loaders=Loaders(search=batches),
            task=Task(loss=_loss_of(trainer.model), optimizer=torch.optim.AdamW),
            runtime=runtime,
            timer=timer,
        )
        job = resumable(job)
        if searches:
            selector = search_widths(job)
        else:
            selector = choose_widths(job, trained=trained)
        planned = plan_cuts(job, selector)[name]

    # The cut network, as a YOLO.
    small = planned.cut(graph)
    check_budget(small, planned.widths, graph, planned.budget)
    recalibrate(small, batches)
    small.__class__ = type(trainer.model)
    LOGGER.info(f"Pruned from {graph.macs():,} to {graph.macs(planned.widths):,} MACs.")
    if planned.latency is not None:
        LOGGER.info(planned.latency.text)
    return _yolo_with(yolo, _finished(small), planned.widths)


def train(yolo: Any, *, distill_model: Any = None, **settings: Any) -> Any:
    """Train a pruned YOLO as `yolo.train(...)` does; it keeps its widths.

    distill_model: the teacher of Ultralytics' own distillation: a YOLO, such as the one that was pruned or a larger
        one, or the path of its file.
    settings: those of Ultralytics' own `train`: data, epochs, imgsz, batch, device, ...
    """
    trainer_class = _trainer_class(yolo)
    if distill_model is None:
        return yolo.train(trainer=trainer_class, **settings)
    if not isinstance(distill_model, Model):
        return yolo.train(trainer=trainer_class, distill_model=str(distill_model), **settings)
    with tempfile.TemporaryDirectory() as folder:  # Ultralytics opens the teacher from a file
        path = Path(folder) / "teacher.pt"
        distill_model.save(path)
        return yolo.train(trainer=trainer_class, distill_model=str(path), **settings)


class Predictions(nn.Module):
    """A model with the same modules that gives what the loss reads; of the features beside it only the size matters."""

    def __init__(self, model: nn.Module) -> None:
        self.__dict__.update(model.__dict__)
        self.__class__ = type("Predictions", (Predictions, type(model)), {})  # not around it: names stay as they are

    def forward(self, x: Tensor) -> Any:
        output = super().forward(x)
        if isinstance(output, tuple) and not self.training:
            output = output[1]
        return _without_features(output)


# Ultralytics' trainer


def _trainer_class(yolo: Any) -> Any:
    """The trainer of the YOLO's task, but one that leaves a pruned model as it is."""
    if not isinstance(yolo, Model) or not isinstance(yolo.model, nn.Module):
        raise TrainingError(f'A YOLO with its weights is needed, like YOLO("yolo11n.pt"), not {str(yolo)[:60]!r}.')
    pruned = getattr(yolo.model, "pruned", False)
    return type("Keeping", (_Keeping, yolo._smart_load("trainer")), {"pruned": pruned})


class _Keeping:
    """On several GPUs this is pickled, so it holds no model."""

    pruned: bool
    data: Any

    def get_model(self, cfg: Any = None, weights: Any = None, verbose: bool = True) -> Any:
        if weights is None:
            is_pruned = self.pruned
        else:
            is_pruned = getattr(weights, "pruned", False)
        if not is_pruned:
            return super().get_model(cfg=cfg, weights=weights, verbose=verbose)  # type: ignore[misc]
        if weights is None:
            raise TrainingError("A pruned YOLO always starts from its own weights: leave out pretrained=False.")
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


def _resolve(search: SearchConfig, *, trained: bool, batches: int, batch_size: int) -> ResolvedSearchConfig:
    """Choose what is unset as `dmcp.prune` does, but with rates for AdamW; there is no distillation without classes."""
    if search.lr is None:
        lr = 1e-3  # at the size of these batches
        if trained:
            lr = 2e-4
        search = replace(search, lr=lr * search.reference_batch / batch_size)
    images = batches * batch_size
    settings = resolve(
        search, TrainConfig(), Retrain.FINETUNE, trained=trained, images=images, batch=batch_size, distills=False
    )
    return settings.search


# the loss, which reads features beside the predictions only for their sizes


def _loss_of(model: Any) -> Any:
    """The model's own loss, as a mean over the images."""
    strides = [int(stride) for stride in getattr(model, "stride", ())]

    def loss(output: Any, batch: Any) -> Tensor:
        images = batch["img"]
        height, width = images.shape[2:]
        features = [images.new_empty(len(images), 0, height // stride, width // stride) for stride in strides]
        total: Tensor = model.loss(batch, _with_features(output, features))[0].sum()
        is_detector = isinstance(output, dict)  # then the loss is a sum over the images
        if is_detector:
            return total / len(images)
        return total

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


# the pruned YOLO


def _finished(model: Any) -> Any:
    """Prepare a cut model as Ultralytics keeps it."""
    for part in modules_of(model):
        if isinstance(part, C2f):
            part.c = part.cv1.conv.out_channels // 2  # a width that forward does not read, but export does
    model.pruned = True
    model.criterion = None  # the loss belongs to the search
    scales = model.yaml.get("scales") or {"": ()}
    model.yaml = {**model.yaml, "scales": scales, "scale": _PRUNED}  # building the full model raises a KeyError with it
    return model.eval()


def _yolo_with(yolo: Any, model: Any, widths: Widths) -> Any:
    """A copy of a YOLO with another model."""
    result = copy.copy(yolo)
    result._modules = {}  # the copy would share those of the given one
    result.model = model
    result.widths = widths
    result.predictor = None
    result.trainer = None
    result.ckpt = {"model": model}
    result.overrides = dict(yolo.overrides)
    return result
