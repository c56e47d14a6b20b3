"""Checks of the model, task and loaders before hours of work."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from dmcp import training
from dmcp.batches import Loader, check_parts, device_of, input_of, labels_of, on_device, peek, size_of
from dmcp.checkpoint import untouched
from dmcp.errors import DataError, TrainingError
from dmcp.losses import Accuracy, LowerIsBetter, Metric, check_fit, check_range, distillation_loss, whole_of
from dmcp.modules import call_model, narrow, tensors_in, unwrap
from dmcp.runtime.distributed import current, sum_values
from dmcp.tracing.trace import wrong_dtype


@torch.no_grad()
def check_numbers(model: nn.Module, example: Any) -> None:
    """Refuse inputs of another kind of numbers than the network's weights, where it cannot take them."""
    model = unwrap(model)
    if _output(model, example, train=False) is not None:
        return
    if wanted := wrong_dtype(model, example, lambda same: _run(model, same, train=False)):
        raise DataError(f"The input of a batch holds {wanted}.")


@torch.no_grad()
def check_input(model: nn.Module, example: Any) -> None:
    """Refuse a forward that writes into its input, if that changes a second pass: networks share their batches."""
    given = tree_map_only(Tensor, torch.clone, example)
    first = tensors_in(_output(unwrap(model), given, train=False))
    if _alike(tensors_in(given), tensors_in(example)):
        return
    if not _alike(first, tensors_in(_output(unwrap(model), given, train=False))):
        raise TrainingError(
            "The forward of the network changes its input (as x.mul_(2), x += 1 or an in-place layer does), and "
            "several networks get the same batch: let it make a new tensor, x = x * 2."
        )


@torch.no_grad()
def check_finite(model: nn.Module, example: Any, who: str = "network") -> None:
    """Refuse a network with a tensor, or with an output on the example, that is not finite; `who` is its name."""
    model = unwrap(model)
    for name, parameter in model.named_parameters():
        if not _is_finite(parameter):
            raise TrainingError(
                f"The {who}'s {name} holds numbers that are NaN or infinite: give it other weights, such as those of "
                "an earlier checkpoint."
            )
    for name, buffer in model.named_buffers():
        if not buffer.is_meta and buffer.isnan().any():  # infinite ones may be a mask
            raise TrainingError(
                f"The {who}'s {name} holds numbers that are NaN: give it other weights, such as those of an earlier "
                "checkpoint."
            )
    outputs = tensors_in(_output(model, example, train=False))
    if not all(map(_is_finite, outputs)):
        if not all(map(_is_finite, tensors_in(example))):
            raise DataError("The input of a batch holds NaN or infinite numbers: look at the data.")
        raise TrainingError(
            f"The output of the {who} on an example is NaN or infinite, though its weights are not: look for a "
            "division by 0, a logarithm or an overflow in its forward."
        )


@torch.no_grad()
def check_classifier(model: nn.Module, example: Tensor, classes: int) -> None:
    """Refuse a network that does not give one tensor (N, classes), in training or in test."""
    for train in (False, True):
        output = _output(unwrap(model), example, train)
        if output is None:  # what is wrong is said by whoever runs it next
            return
        if isinstance(output, Tensor) and output.ndim == 2 and output.shape[1] >= classes:
            continue
        what = f"a tensor {tuple(output.shape)}" if isinstance(output, Tensor) else f"a {type(output).__name__}"
        when = " in training" if train else ""
        raise TrainingError(
            f"The network gives {what}{when}, not one tensor of {len(example)} images x {classes} classes: the command "
            "line trains classifiers only; in Python dmcp.prune(..., loss=..., metric=...) takes any network."
        )


@torch.no_grad()
def check_labels(model: nn.Module, example: Any, samples: int, labels: Tensor) -> None:
    """Refuse labels of a batch of so many samples that the default loss cannot take; a GPU would not say why."""
    output = _output(unwrap(model), example, train=True)
    if isinstance(output, Tensor) and output.ndim >= 2:  # what else is wrong is said by whoever runs it next
        check_fit(labels, (samples, *output.shape[1:]))
        check_range(labels, output.shape[1])


@torch.no_grad()
def check_distillable(model: nn.Module, example: Any) -> None:
    """Refuse a network whose outputs in training cannot be imitated: see `imitation`."""
    if (output := _output(unwrap(model), example, train=True)) is not None:
        distillation_loss(output, tensors_in(output))


@torch.no_grad()
def check_teacher(model: nn.Module, teacher: nn.Module, example: Any, who: str = "The teacher") -> None:
    """Refuse a teacher, which is asked in eval mode, without the outputs that the network has in training."""
    try:
        target = tensors_in(_run(unwrap(teacher), example, train=False))
    except Exception as error:
        raise TrainingError(
            f"{who} cannot take the network's inputs: {type(error).__name__}: {error}; it gets the same batches."
        ) from error
    if (output := _output(unwrap(model), example, train=True)) is None:
        return
    theirs, own = ([tuple(tensor.shape) for tensor in part] for part in (target, tensors_in(output)))
    if theirs != own:
        raise TrainingError(
            f"{who} gives {theirs} for a batch of 2, the network in training {own}: a teacher must give as many "
            "outputs, with the same classes in the same order."
        )
    distillation_loss(output, target)


@torch.no_grad()
def fit_numbers(teacher: nn.Module, model: nn.Module, example: Any) -> None:
    """Give a copy of a teacher the network's kind of numbers, where it cannot take the inputs with its own."""
    theirs, own = ({it.dtype for it in net.parameters() if it.is_floating_point()} for net in (teacher, unwrap(model)))
    if theirs != own and len(own) == 1 and _output(teacher, example, train=False) is None:
        teacher.to(own.pop())


@torch.no_grad()
def classes_of(model: nn.Module, example: Any) -> int:
    """How many classes the network's first output is for, in eval mode; 0 if it has none."""
    outputs = tensors_in(_output(unwrap(model), example, train=False))
    return outputs[0].shape[1] if outputs and outputs[0].ndim > 1 else 0


def _output(model: nn.Module, example: Any, train: bool) -> Any:
    """What the network gives; None if it cannot run."""
    try:
        return _run(model, example, train)
    except Exception:
        return None


def _run(model: nn.Module, example: Any, train: bool) -> Any:
    """What the network gives, by a copy: a forward may write into buffers."""
    device = device_of(model)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        return call_model(narrow(model, {}, {}).train(train), example)


def _alike(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.allclose(a, b, equal_nan=True) for a, b in zip(one, other, strict=True))


def _is_finite(tensor: Tensor) -> bool:
    return tensor.is_meta or bool(tensor.isfinite().all())


def _kind(metric: Metric | None) -> dict[str, bool]:
    """What a row says of its metric."""
    return {"own_metric": metric is not None, "lower_is_better": isinstance(metric, LowerIsBetter)}


def _test(net: nn.Module, loader: Loader, metric: Metric | None) -> tuple[float, int]:
    """The metric and how many samples it is of; 0 where there is more than one answer per sample."""
    seen, own = 0, Accuracy() if metric is None else None

    def run(x: Any) -> Any:
        nonlocal seen
        seen += size_of((x,))
        return call_model(net, x)

    value = training.evaluate(net, loader, own or metric, run)
    total, given = sum_values(torch.tensor([seen, own.answers if own else 0]), current()).tolist()
    return value, total if metric is not None or total == given else 0


def try_test(model: nn.Module, loader: Loader, metric: Metric | None) -> None:
    """Test a copy of the model on one batch: what is wrong with loader or metric shows before hours of work."""
    whole = None if metric is None else whole_of(metric)
    with untouched(loader, device_of(model)):
        if whole is not None:
            check_parts(loader, current())
        batches = peek(loader)
        if batches is not None:
            try:
                for batch in batches if metric is None else ():
                    _check_labels(model, batch)
                _test(narrow(unwrap(model), {}, {}), batches, metric)
            finally:
                if whole is not None:
                    whole.reset()  # of this trial nothing is left


def _check_labels(model: nn.Module, batch: Any) -> None:
    """Refuse labels that the network has no output for; later they are only told of."""
    if classes := classes_of(model, on_device(input_of(batch), device_of(model))):
        check_range(labels_of(batch), classes)


def try_batch(model: nn.Module, loader: Loader | None) -> None:
    """Look at the first batch of a loader that is used later: one without an input is refused now."""
    if loader is not None:
        with untouched(loader, device_of(model)):
            for batch in peek(loader) or []:
                input_of(batch)
