"""Checks of the model, task and loaders before hours of work."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dmcp.errors import DataError, TrainingError
from dmcp.runtime import batches
from dmcp.runtime.batches import Loader, device_of, input_of, labels_of, length_of, on_device, peek, size_of
from dmcp.runtime.checkpoint import untouched
from dmcp.runtime.distributed import current
from dmcp.tracing.modules import call_model, narrow, tensors_in, unwrap
from dmcp.tracing.trace import wrong_dtype
from dmcp.training.loop import Task, check_trainable, evaluate
from dmcp.training.losses import Metric, check_fit, check_metric, check_range, distillation_loss, score_by, scores_of
from dmcp.training.optimizer import make_optimizer, parameter_groups
from dmcp.units import by


def preflight(
    model: nn.Module,
    loaders: dict[str, Loader | None],
    val_loader: Loader,
    networks: int,
    *,
    task: Task,
    teacher: nn.Module | None = None,
    slimmable: bool = False,
    tested: bool = False,
) -> tuple[Any, Metric | None]:
    """Refuse what would fail after hours of work; the input of the first batch, on the model's device, and the metric.

    loaders: by name; "loader" is the first that is used. networks: how many are tested. slimmable: whether the model
    learns from its own outputs. tested: whether the model is tested next, before the first step.
    """
    check_trainable(model)
    check_metric(task.metric, current())
    if task.optimizer is not None:
        make_optimizer(task.optimizer, parameter_groups(model, 0.0))
    for name, loader in loaders.items():
        if (loader is not None or name == "loader") and not length_of(loader, name):
            raise DataError(f"The {name} has no batches: is the batch larger than the data?")
    if networks > 1 and isinstance(val_loader, Generator):
        raise DataError("The val_loader is a generator, which gives its batches once: give a list or a DataLoader.")
    assert loaders["loader"] is not None
    batch = next(iter(loaders["loader"]))
    example = on_device(input_of(batch), device_of(model))
    sample = first_two(example)
    check_forward(model, sample)
    if task.loss is None:
        scores, labels = scores_of(_output(unwrap(model), sample, train=True)), labels_of(batch)
        if scores is not None and scores.ndim >= 2:  # a GPU would not say why; what else is wrong, the loss says
            check_fit(labels, (size_of((example,)), *scores.shape[1:]))
            check_range(labels, scores.shape[1])
    if slimmable:
        check_teacher(model, model, sample, train=True)
    if teacher is not None:
        check_forward(teacher, sample, "teacher")
        check_teacher(model, teacher, sample)
    for name, loader in loaders.items():
        if loader is not None and name != "loader":
            with untouched(loader, device_of(model)):
                for other in peek(loader) or []:
                    input_of(other)
    return example, try_test(model, val_loader, task, batch, tested)


def first_two(example: Any) -> Any:
    """The first two samples of an input."""
    return tree_map_only(Tensor, lambda x: x[:2], example)


def check_forward(model: nn.Module, example: Any, who: str = "network") -> None:
    """Refuse inputs of another dtype, numbers that are not finite, and a forward that changes its input."""
    if not (inputs := tensors_in(example)):
        raise DataError(f"The input of a batch is a {type(example).__name__} without tensors: let it have some.")
    model, given = unwrap(model), tree_map_only(Tensor, torch.clone, example)
    output = _output(model, given, train=False)
    if output is None and (wanted := wrong_dtype(model, example)):
        raise DataError(f"The input of a batch holds {wanted}.")
    bad = [name for name, tensor in model.state_dict().items() if tensor.isnan().any()]
    if bad or not all(tensor.isfinite().all() for tensor in tensors_in(output)):
        if not all(tensor.isfinite().all() for tensor in inputs):
            raise DataError("The input of a batch holds NaN or infinite numbers: look at the data.")
        where = f"{who}'s {bad[0]} holds NaN" if bad else f"output of the {who} on an example is NaN or infinite"
        raise TrainingError(f"The {where}: look at its weights, and for a division by 0 or a logarithm in its forward.")
    if _alike(tensors_in(given), inputs):
        return
    if not _alike(tensors_in(output), tensors_in(_output(model, given, train=False))):
        raise TrainingError(
            "The forward of the network changes its input (as x.mul_(2), x += 1 or an in-place layer does), and "
            "several networks get the same batch: let it make a new tensor, x = x * 2."
        )


def check_classifier(model: nn.Module, example: Tensor, classes: int) -> None:
    """Refuse a network that does not give one tensor (N, classes), in training or in test."""
    for train in (False, True):
        output = _output(unwrap(model), example, train)
        if output is None:  # whoever runs it next says why
            return
        scores = scores_of(output)
        if scores is None or scores.shape[1:] != (classes,):
            found = f"a {type(output).__name__} of" if scores is None else by(scores.shape[1:] or (0,))
            raise TrainingError(
                f"In {'training' if train else 'the test'} the network gives {found} outputs for an image, the data "
                f"have {classes} classes: let its builder take num_classes; dmcp.prune in Python takes any network."
            )


def check_teacher(model: nn.Module, teacher: nn.Module, example: Any, train: bool = False) -> None:
    """Refuse a teacher, in train or eval mode, without the outputs that the network has in training."""
    try:
        target = tensors_in(_run(unwrap(teacher), example, train))
    except Exception as error:
        raise TrainingError(f"The teacher cannot take the same batches: {type(error).__name__}: {error}.") from error
    if (output := _output(unwrap(model), example, train=True)) is not None:
        distillation_loss(output, target)


def can_teach(model: nn.Module, example: Any) -> bool:
    """True if a network of this kind can learn from another one: outputs are alike in training and test."""
    try:
        check_teacher(model, model, example)
    except TrainingError:
        return False
    return True


def classes_of(model: nn.Module, example: Any) -> int:
    """How many classes the network's first output is for, in eval mode; 0 if it has none."""
    scores = scores_of(_output(unwrap(model), example, train=False))
    return 0 if scores is None or scores.ndim < 2 else scores.shape[1]


def try_test(model: nn.Module, loader: Loader, task: Task, batch: Any, tested: bool = False) -> Metric | None:
    """Test a copy of the model on one batch, so that what is wrong with loader or metric shows now; the metric.

    The labels of all batches are looked at, unless everything is tested next. batch: of training, if none can be seen.
    """
    device, metric = device_of(model), task.metric
    with untouched(loader, device):
        if check_metric(metric, current()) is not None:
            batches.check_parts(loader, current())
        first = peek(loader)
        seen = on_device((first or [batch])[0], device)
        if metric is None and task.loss is not None:
            metric = score_by(task.loss, _output(unwrap(model), input_of(seen), train=False), seen)
        if first is None:
            return metric
        evaluate(narrow(unwrap(model), {}, {}), first, metric)
        if metric is None and not tested and (classes := classes_of(model, input_of(seen))):
            for batch in loader:
                check_range(labels_of(batch), classes)
    return metric


def _output(model: nn.Module, example: Any, train: bool) -> Any:
    """What the network gives; None if it cannot run."""
    try:
        return _run(model, example, train)
    except Exception:
        return None


@torch.no_grad()
def _run(model: nn.Module, example: Any, train: bool) -> Any:
    """What a copy of the network gives: a forward may write into buffers."""
    device = device_of(model)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        return call_model(narrow(model, {}, {}).train(train), example)


def _alike(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))
