"""Networks that others learn from: which one it is, what it is worth, and what the table says of it."""

from __future__ import annotations

import warnings

import torch
from torch import nn

from dmcp.batches import Loader
from dmcp.losses import Metric
from dmcp.measuring import test_copy
from dmcp.ranks import current, share_tensors
from dmcp.retraining import AS_IT_WAS, TRAINED_FIRST, Retrain
from dmcp.rows import AS_GIVEN, TEACHER, Row, poor_teacher, score
from dmcp.slicing import narrow, unwrap
from dmcp.spaces import fingerprint


class TeacherWarning(UserWarning):
    """A teacher that seems to know less than those who learn from it."""


def who_teaches(kind: Retrain, teacher: nn.Module | None, model: nn.Module, worth: Row | None = None) -> str:
    """In words; `worth`: how good a teacher is, which is said where it is no row of the table."""
    if teacher is None:
        return TRAINED_FIRST if kind is Retrain.TEACHER else ""
    if is_model(teacher, model):
        return AS_IT_WAS
    if worth is None or fingerprint(unwrap(teacher)) == fingerprint(unwrap(model)):
        return "the teacher"
    return f"a teacher that is no row here ({'metric' if worth.own_metric else 'accuracy'} {score(worth)})"


def weigh_teacher(
    guide: nn.Module, given: nn.Module | None, classes: int, val_loader: Loader, metric: Metric | None = None
) -> Row:
    """Test a teacher before anybody learns from it, and warn of one that has little to teach.

    given: the network that goes on from its own weights, to be compared with; None where it does not, or teaches.
    """
    worth = test_copy(TEACHER, guide, val_loader, metric)
    other = None if given is None else test_copy(AS_GIVEN, given, val_loader, metric)
    if current().first and (told := poor_teacher(worth, other, classes)):
        warnings.warn(told, TeacherWarning, stacklevel=3)
    return worth


def copied(teacher: nn.Module, device: torch.device) -> nn.Module:
    """A copy of a teacher where the others are, on all ranks that of rank 0."""
    net = narrow(unwrap(teacher), {}, {}).to(device)
    share_tensors([*net.parameters(), *net.buffers()], current())
    return net


def trained_before(
    model: nn.Module, kind: Retrain, test_given: bool, guide: nn.Module | None = None, teacher: nn.Module | None = None
) -> dict[str, nn.Module]:
    """Networks of the table that nobody has trained here: the model, and a teacher whose costs are the model's.

    guide: what teaches, a copy of the given `teacher`, which may be the model itself.
    """
    itself = is_model(teacher, model)
    found = {AS_GIVEN: unwrap(model)} if test_given and (kind is Retrain.INHERIT or itself) else {}
    if guide is not None and not itself and fingerprint(guide) == fingerprint(unwrap(model)):
        found[TEACHER] = guide
    return found


def is_model(teacher: nn.Module | None, model: nn.Module) -> bool:
    """Whether the teacher is the network that is pruned."""
    return teacher is not None and unwrap(teacher) is unwrap(model)
