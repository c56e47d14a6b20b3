"""What `prune` is asked for: its arguments, read and checked once, and what follows for those that were left open."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dmcp.arguments import checked
from dmcp.budgets import Budget, budget_of_kind, choose_middle, read_budget
from dmcp.compare.methods import Own, find_method
from dmcp.data.datasets import split
from dmcp.data.images import LARGEST, typical_size
from dmcp.data.rows import has_rows, make_row_loader, open_rows
from dmcp.defaults import default_batch, has_choices_left, resolve
from dmcp.errors import BudgetError, DataError, DmcpError, TrainingError
from dmcp.models import sample_shape
from dmcp.retraining import Retraining, check_teacher_use, copy_of_teacher, is_model, warn_of_poor_teacher
from dmcp.runs.records import DMCP, ORIGINAL, UNIFORM, UNPRUNED
from dmcp.runtime.batches import HELD_OUT, FewBatches, Loader, device_of, hold_out, length_of, size_of
from dmcp.runtime.distributed import current
from dmcp.settings import AUTO, ResolvedSearchConfig, Retrain, SearchConfig, TrainConfig, check_within
from dmcp.training.distillation import is_of_classes, warn_of_distillation
from dmcp.training.loop import Task
from dmcp.training.preflight import can_teach, classes_of

Spec = int | float | str | Budget  # a budget as a user writes it

DEFAULT_BUDGET = "50%"
_PHOTO = 224  # side of what networks see of photographs
SENSITIVITY = "sensitivity"


@checked
@dataclass(frozen=True, kw_only=True)
class Loaders:
    """Batches of each part of `prune`, where one loader is not enough."""

    search: Loader
    arch: Loader | None = None  # for the alphas, if they learn from other batches than the weights
    train: Loader | None = None  # for the final training, if it has other batches than the search
    held_out: Loader | None = None  # for `within`: images that are neither trained on nor tested on

    @property
    def final(self) -> Loader:
        """The batches of the final training."""
        return self.train or self.search

    @property
    def by_name(self) -> dict[str, Loader | None]:
        """All of them, by the names that messages and checkpoints use."""
        return {
            "loader": self.search,
            "arch_loader": self.arch,
            "train_loader": self.train,
            "held_out loader": self.held_out,
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class PruneRequest:
    """The arguments of `prune`, read and checked. Unset settings and "auto" stand for what is chosen later."""

    specs: Sequence[Spec]  # the budgets as they are written
    method: str
    searches: bool  # whether this method is our search
    within: float | None  # the loss that is allowed, instead of a budget
    search: SearchConfig
    train: TrainConfig
    retrain: Retrain
    teacher: nn.Module | str | None  # as given
    teacher_copy: nn.Module | None  # of a given network, on the device of the model
    baselines: frozenset[str]
    baselines_listed: bool  # whether the user named them, so that no row is added to them
    loaders: Loaders

    @property
    def follows_training(self) -> bool:
        """Whether anything depends on whether the model is trained, so that this must be tested."""
        if has_choices_left(self.search, self.train) or self.teacher == AUTO or self.within is not None:
            return True
        return self.retrain is Retrain.FINETUNE or not self.searches

    @property
    def test_count(self) -> int:
        """How often `val_loader` is gone through, at least."""
        return len(self.specs) + len(self.baselines) + (self.teacher is not None) + self.follows_training

    def other_teacher(self, model: nn.Module) -> nn.Module | None:
        """A given teacher that is another network than the model."""
        return None if is_model(self.teacher, model) else self.teacher_copy

    def preflight_teacher(self, model: nn.Module) -> nn.Module | None:
        """The network that will teach, as far as it is known before anything has run."""
        return model if self.teacher == UNPRUNED else self.teacher_copy


def read_request(
    model: nn.Module,
    loader: Loader | Loaders,
    *,
    budget: Spec | Sequence[Spec] | None,
    within: float | None = None,
    method: str,
    search: SearchConfig | None,
    train: TrainConfig | None,
    retrain: Retrain | str,
    teacher: nn.Module | str | None,
    baselines: bool | Collection[str],
) -> PruneRequest:
    """Read the arguments of `prune`, and refuse those that contradict each other."""
    kind = Retrain(retrain)
    searches = check_method(method)
    loaders = loader if isinstance(loader, Loaders) else Loaders(search=loader)
    if within is None:
        specs = read_specs(search, budget)
    else:
        specs = [read_spec_within(search, budget)]
        check_within(kind, teacher)
    if teacher != AUTO:
        check_teacher_use(kind, teacher)
    teacher_copy = None
    if isinstance(teacher, nn.Module):
        teacher_copy = copy_of_teacher(teacher, device_of(model))
    return PruneRequest(
        specs=specs,
        method=method,
        searches=searches,
        within=within,
        search=with_budget(search or SearchConfig(), specs),
        train=train or TrainConfig(),
        retrain=kind,
        teacher=teacher,
        teacher_copy=teacher_copy,
        baselines=_read_baselines(baselines),
        baselines_listed=not isinstance(baselines, bool),
        loaders=loaders,
    )


def loaders_of_rows(
    model: nn.Module, loader: Any, val_loader: Any, seed: int, *, holds_out: bool = False
) -> tuple[Loader | Loaders, Loader]:
    """Loaders in place of data sets with rows, as Hugging Face has them; loaders are returned as they are.

    Their images have the size that the model states, or the size that most training images have, up to 256 px, or the
    usual one.
    holds_out: whether a part of the test images is left to `within`.
    """
    if not has_rows(loader) and not has_rows(val_loader):
        return loader, val_loader
    if not has_rows(loader) or not has_rows(val_loader):
        raise DataError("Either both loader and val_loader are data sets with rows, or both are loaders of batches.")

    train = open_rows(loader, "loader")
    test = open_rows(val_loader, "val_loader")
    size, _ = typical_size(train.some_sizes())
    if max(size) > LARGEST:
        size = (_PHOTO, _PHOTO)
    channels, height, width = sample_shape(model, (3, *size))
    if channels == 3 and not classes_of(model, torch.zeros(2, 3, height, width, device=device_of(model))):
        channels = 1  # a network that takes no colors may take grey images
    train = replace(train, size=(height, width), channels=channels)
    test = replace(test, size=(height, width), channels=channels)
    batch, _ = default_batch(len(train), macs=0)
    device = device_of(model)
    train_loader = make_row_loader(train, batch, True, seed, device)
    if not holds_out:
        return train_loader, make_row_loader(test, batch, False, seed, device)
    tested, held_out = split(test, HELD_OUT, seed)
    loaders = Loaders(search=train_loader, held_out=make_row_loader(held_out, batch, False, seed, device))
    return loaders, make_row_loader(tested, batch, False, seed, device)


def read_specs(search: SearchConfig | None, budget: Spec | Sequence[Spec] | None) -> list[Spec]:
    """The budgets as they are written, at least one; BudgetError for what cannot be read.

    With search settings and a list of budgets, the settings say what is searched for, and the list what is cut.
    """
    if isinstance(budget, Sequence) and not isinstance(budget, str):
        if not budget:
            raise BudgetError("The list of budgets is empty: give at least one.")
        specs = list(budget)
    elif search is None or search.budget is None:
        specs = [DEFAULT_BUDGET if budget is None else budget]
    elif budget is None or budget == search.budget:
        specs = [search.budget]
    else:
        raise BudgetError(
            f"There are two budgets, {budget!r} and {search.budget!r} in the search settings: pass only one."
        )
    for spec in specs:
        read_budget(spec)
    return specs


def with_budget(search: SearchConfig, specs: Sequence[Spec]) -> SearchConfig:
    """The settings with the budget that the one search is for, if they have none."""
    if search.budget is None:
        return replace(search, budget=choose_middle(specs))
    return search


def read_spec_within(search: SearchConfig | None, budget: Spec | Sequence[Spec] | None) -> Spec:
    """The budget that the search of `within` begins with; it has one kind of cost, which is to be lowered."""
    if search is None or search.budget is None:
        return DEFAULT_BUDGET if budget is None else budget_of_kind(budget)
    if budget is not None:
        raise BudgetError("within takes the kind of cost from the search settings: leave the budget out.")
    kinds = read_budget(search.budget).kinds
    if len(kinds) > 1:
        raise BudgetError(f"within lowers one kind of cost, but the search settings limit {', '.join(kinds)}.")
    return search.budget


def with_held_out(loader: Loader | Loaders, val_loader: Loader) -> tuple[Loaders, Loader]:
    """The loaders with images that `within` decides on, and the batches of the final test.

    If no such images were given, they are half of the test images, and the final test has the other half.

    Training images would not do: a trained model knows them, and its pruned copies forget some of them.
    """
    loaders = loader if isinstance(loader, Loaders) else Loaders(search=loader)
    if loaders.held_out is not None:
        return loaders, val_loader
    parts = hold_out(val_loader, HELD_OUT)
    if parts is None:
        raise DataError(
            "within decides on a part of the test images, and can take it only from a list of at least two batches or "
            "from a DataLoader with the usual samplers: pass dmcp.Loaders(search=..., held_out=...)."
        )
    tested, held_out = parts
    return replace(loaders, held_out=held_out), tested


def check_method(name: str) -> bool:
    """True for our own search; DmcpError for an unknown method, and for one that is no method of a single run."""
    if name == DMCP:
        return True
    method = find_method(name)
    if method.one_ratio and method.own is Own.SLIMMABLE:
        raise DmcpError(f'{name} is not a method here: use method="uniform" with retrain="slimmable".')
    return False


def _read_baselines(baselines: bool | Collection[str]) -> frozenset[str]:
    if baselines is True:
        return frozenset([UNPRUNED, UNIFORM])
    if baselines is False:
        return frozenset()
    if isinstance(baselines, str) or not {UNPRUNED, UNIFORM, ORIGINAL}.issuperset(baselines):
        raise TrainingError(f'baselines must be True, False, or names like ["uniform"], not {baselines!r}.')
    return frozenset(baselines)


# what was left open


def choose_teacher(
    request: PruneRequest, model: nn.Module, sample: Any, task: Task, *, trained: bool, asked: bool
) -> PruneRequest:
    """The request with its teacher chosen, if it was left open: a trained model, else the unpruned network.

    There is none where the network cannot learn from another one, nor for outputs that are not class scores, which gain
    little from a teacher (REPORT.md, "denoiser").
    asked: whether the user has said how to distill the outputs, so that any of them are.
    """
    if request.teacher != AUTO:
        return request
    has_use = request.retrain in (Retrain.FINETUNE, Retrain.SCRATCH)
    distill = task.distillation
    if distill is None or not has_use or not (asked or is_of_classes(distill)) or not can_teach(model, sample, distill):
        return replace(request, teacher=None)
    if not trained:
        return replace(request, teacher=UNPRUNED)
    return replace(request, teacher=model, teacher_copy=copy_of_teacher(model, device_of(model)))


def warn_of_teacher(request: PruneRequest, model: nn.Module, sample: Any, val_loader: Loader, task: Task) -> None:
    """Warn of a given teacher that guesses, and of learning from outputs that may be no class scores."""
    teacher = request.other_teacher(model)
    if teacher is not None and task.metric is None:  # a metric of the user's own cannot tell
        warn_of_poor_teacher(teacher, classes_of(teacher, sample), val_loader)
    learns = request.teacher is not None or request.retrain is Retrain.SLIMMABLE
    if learns and task.distillation is None:
        remedy = 'leave the teacher out, and take retrain="scratch" or "finetune"'
        warn_of_distillation("The pruned network learns from another one's", remedy)


def resolve_settings(
    request: PruneRequest, example: Any, task: Task, *, trained: bool, normed: bool = True
) -> tuple[ResolvedSearchConfig, Retraining, Loaders]:
    """Settings of the search and of all trainings, and their batches.

    What is unset follows the amount of data, and whether the model is trained. A trained model is searched with a part
    of the batches, if the epochs of the search are unset.
    normed: whether the model has BatchNorms.
    """
    batch = size_of((example,)) * current().size
    has_classes = is_of_classes(task.distillation)
    settings = resolve(
        request.search,
        request.train,
        request.retrain,
        trained=trained,
        images=length_of(request.loaders.search) * batch,
        batch=batch,
        distills=has_classes,
        suits_sgd=(normed and has_classes) or task.optimizer is not None,
    )
    loaders = request.loaders
    if request.searches and settings.search_images:
        batches = -(-settings.search_images // batch)
        loaders = replace(loaders, search=FewBatches(loaders.search, batches), train=loaders.final)
    teacher = request.teacher if request.teacher_copy is None else request.teacher_copy
    retraining = Retraining(config=settings.train, kind=request.retrain, teacher=teacher)
    return settings.search, retraining, loaders


def choose_baselines(request: PruneRequest, model: nn.Module, *, trained: bool) -> frozenset[str]:
    """The rows besides the pruned networks. Unless they were listed, a model that is trained, or teaches, is one."""
    baselines = request.baselines
    if not request.baselines_listed and (trained or is_model(request.teacher, model)):
        baselines |= {ORIGINAL}
    return other_networks(baselines, request.method)


def other_networks(baselines: frozenset[str], method: str) -> frozenset[str]:
    """The baselines that are not the network of the method itself."""
    return baselines - {method}
