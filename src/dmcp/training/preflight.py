"""Checks of the model, the task and the loaders before hours of work."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dmcp.errors import DataError, TrainingError
from dmcp.runtime.batches import (
    Loader,
    check_parts,
    device_of,
    ends_with_one_sample,
    input_of,
    labels_of,
    length_of,
    on_device,
    peek,
    size_of,
)
from dmcp.runtime.checkpoint import untouched
from dmcp.runtime.distributed import current
from dmcp.settings import Distill
from dmcp.tracing.modules import call_model, narrow, tensors_in, unwrap
from dmcp.tracing.trace import wrong_dtype
from dmcp.training.distillation import Distillation, distillation_loss
from dmcp.training.loop import Task, check_trainable, evaluate, with_distillation
from dmcp.training.losses import (
    Metric,
    check_label_shape,
    check_metric,
    check_probabilities,
    check_range,
    score_by,
    scores_of,
    warn_of_parameters,
)
from dmcp.training.optimizer import make_optimizer, parameter_groups
from dmcp.units import show_shape


def preflight(
    model: nn.Module,
    loaders: Mapping[str, Loader | None],
    val_loader: Loader,
    networks: int,
    *,
    task: Task,
    teacher: nn.Module | None = None,
    slimmable: bool = False,
    tested: bool = False,
) -> tuple[Any, Task]:
    """Refuse what would fail after hours of work. Returns the input of the first batch, and the task.

    The input is on the device of the model. The task has a metric, and distillation as far as its loss shows it.
    loaders: by name; the one named "loader" is used first.
    networks: how many networks are tested.
    slimmable: whether the model learns from its own outputs.
    tested: whether the model is tested next, before the first step.
    """
    # The task.
    check_trainable(model)
    check_metric(task.metric, current())
    warn_of_parameters(task.loss)
    if task.optimizer is not None:
        make_optimizer(task.optimizer, parameter_groups(model, 0.0))

    # The loaders.
    first_loader = loaders["loader"]
    assert first_loader is not None
    for name, loader in loaders.items():
        if loader is not None and not length_of(loader, name):
            raise DataError(f"The {name} has no batches: is the batch size larger than the data set?")
    if networks > 1 and isinstance(val_loader, Generator):
        raise DataError(
            "The val_loader is a generator, which gives its batches only once: pass a list or a DataLoader."
        )

    # The model, on the first batch.
    batch = next(iter(first_loader))
    example = on_device(input_of(batch), device_of(model))
    sample = first_two(example)
    check_forward(model, sample)
    if task.loss is None:
        _check_labels(model, example, batch)
    task = with_distillation(task, model, [batch])

    for name, loader in loaders.items():
        if ends_with_one_sample(loader):
            _check_one_sample(model, sample, name)

    # Those it learns from.
    distill = task.distillation or Distill.CLASSES
    if slimmable:
        check_teacher(model, model, sample, distill, train=True)
    if teacher is not None:
        check_forward(teacher, sample, "teacher")
        check_teacher(model, teacher, sample, distill)

    # The batches that come later, and the test.
    for name, loader in loaders.items():
        if loader is not None and name != "loader":
            with untouched(loader, device_of(model)):
                for first_batch in peek(loader) or []:
                    input_of(first_batch)
    metric = try_test(model, val_loader, task, batch, tested)
    return example, replace(task, metric=metric)


def first_two(example: Any) -> Any:
    """The first two samples of an input."""
    return tree_map_only(Tensor, lambda tensor: tensor[:2], example)


# the model


def check_forward(model: nn.Module, example: Any, role: str = "network") -> None:
    """Refuse inputs of another dtype, numbers that are not finite, and a forward that changes its input."""
    inputs = tensors_in(example)
    if not inputs:
        raise DataError(f"The input of a batch is a {type(example).__name__} without tensors: it needs at least one.")
    model = unwrap(model)
    passed = tree_map_only(Tensor, torch.clone, example)  # to see whether the forward changes it
    output = _output(model, passed, train=False)
    if output is None:
        wrong_inputs = wrong_dtype(model, example)
        if wrong_inputs:
            raise DataError(f"The input of a batch holds {wrong_inputs}.")
    _check_finite(model, inputs, tensors_in(output), role)
    if _are_close(tensors_in(passed), inputs):
        return
    output_of_changed = _output(model, passed, train=False)
    if not _are_close(tensors_in(output), tensors_in(output_of_changed)):
        raise TrainingError(
            "The forward of the network changes its input in place (like x.mul_(2), x += 1 or an in-place layer), but "
            "several networks share each batch: make a new tensor instead, like x = x * 2."
        )


def _check_finite(model: nn.Module, inputs: list[Tensor], outputs: list[Tensor], role: str) -> None:
    """Refuse NaN in a tensor of the model, and outputs that are not finite. Tensors may be infinite, as masks are."""
    nan_names = [name for name, tensor in model.state_dict().items() if tensor.isnan().any()]
    if not nan_names and _all_finite(outputs):
        return
    if not _all_finite(inputs):
        raise DataError("The input of a batch has NaN or infinite values: check the data.")
    if nan_names:
        where = f"{role}'s {nan_names[0]} has NaN values"
    else:
        where = f"output of the {role} on an example is NaN or infinite"
    raise TrainingError(f"The {where}: check its weights, and its forward for a division by 0 or a logarithm.")


def _check_one_sample(model: nn.Module, sample: Any, name: str) -> None:
    """Refuse a last batch of one sample where the network can only be trained on more, as some BatchNorms can."""
    one = tree_map_only(Tensor, lambda tensor: tensor[:1], sample)
    takes_several = _output(unwrap(model), sample, train=True) is not None
    if takes_several and _output(unwrap(model), one, train=True) is None:
        raise DataError(
            f"The last batch of the {name} has one sample, but the network can only be trained on several at once, as "
            "BatchNorm needs: use DataLoader(..., drop_last=True)."
        )


def _check_labels(model: nn.Module, example: Any, batch: Any) -> None:
    """Refuse labels that the default loss cannot take: on a GPU it would not say why. What else is wrong, it says."""
    scores = scores_of(_output(unwrap(model), first_two(example), train=True))
    labels = labels_of(batch)
    if scores is not None and scores.ndim >= 2:
        check_label_shape(labels, (size_of((example,)), *scores.shape[1:]))
        check_range(labels, scores.shape[1])
        check_probabilities(labels)


def check_classifier(model: nn.Module, example: Tensor, classes: int) -> None:
    """Refuse a network that does not give one tensor (N, classes), both in training and in the test."""
    for train in (False, True):
        output = _output(unwrap(model), example, train)
        if output is None:  # the next one to run it says why
            return
        scores = scores_of(output)
        if scores is not None and scores.shape[1:] == (classes,):
            continue
        stage = "training" if train else "the test"
        if scores is None:
            shape = f"a {type(output).__name__} of"
        else:
            shape = show_shape(scores.shape[1:] or (0,))
        raise TrainingError(
            f"In {stage} the network gives {shape} outputs for an image, but the "
            f"data have {classes} classes: let its builder take num_classes, or use dmcp.prune in Python."
        )


def classes_of(model: nn.Module, example: Any) -> int:
    """The number of classes of the network's first output, in eval mode; 0 if it has none."""
    scores = scores_of(_output(unwrap(model), example, train=False))
    if scores is None or scores.ndim < 2:
        return 0
    return scores.shape[1]


# teachers


def check_teacher(
    model: nn.Module, teacher: nn.Module, example: Any, distill: Distillation, train: bool = False
) -> None:
    """Refuse a teacher whose outputs, in train or eval mode, are not like those of the network in training."""
    try:
        target = _run(unwrap(teacher), example, train)
        tensors_in(target)
    except Exception as error:
        raise TrainingError(f"The teacher cannot take the same batches: {type(error).__name__}: {error}.") from error
    output = _output(unwrap(model), example, train=True)
    if output is not None:
        with torch.no_grad():
            distillation_loss(output, target, kind=distill)


def can_teach(model: nn.Module, example: Any, distill: Distillation) -> bool:
    """Whether a network of this kind can learn from another one: its outputs are alike in training and in the test."""
    try:
        check_teacher(model, model, example, distill)
    except TrainingError:
        return False
    return True


# the test


def try_test(model: nn.Module, loader: Loader, task: Task, batch: Any, tested: bool = False) -> Metric | None:
    """Test a copy of the model on one batch, so that a mistake in loader or metric shows now. Returns the metric.

    With accuracy as the metric, the labels of all batches are checked, too.
    batch: one of the training, for a loader whose batches cannot be looked at without losing them.
    tested: whether the model is tested on all batches next, so that their labels need no check here.
    """
    device = device_of(model)
    metric = task.metric
    with untouched(loader, device):
        if check_metric(metric, current()) is not None:
            check_parts(loader, current())
        first = peek(loader)
        seen = on_device(first[0] if first else batch, device)
        if metric is None and task.loss is not None:
            metric = score_by(task.loss, _output(unwrap(model), input_of(seen), train=False), seen)
        if first is None:
            return metric
        evaluate(narrow(unwrap(model), {}, {}), first, metric)
        if metric is None and not tested:
            classes = classes_of(model, input_of(seen))
            if classes:
                for test_batch in loader:
                    check_range(labels_of(test_batch), classes)
    return metric


# running copies


def _output(model: nn.Module, example: Any, train: bool) -> Any:
    """The output of the network; None if it cannot run."""
    try:
        return _run(model, example, train)
    except Exception:
        return None


@torch.no_grad()
def _run(model: nn.Module, example: Any, train: bool) -> Any:
    """The output of a copy of the network, since a forward may write into buffers."""
    device = device_of(model)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        return call_model(narrow(model, {}, {}).train(train), example)


def _all_finite(tensors: list[Tensor]) -> bool:
    return all(tensor.isfinite().all() for tensor in tensors)


def _are_close(tensors: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(tensors, expected, strict=True)
    return all(torch.allclose(tensor, reference, equal_nan=True) for tensor, reference in pairs)
