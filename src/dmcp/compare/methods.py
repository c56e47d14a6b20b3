"""The methods that `dmcp compare` knows, by name.

A method is a function find(problem, config, state) that returns a Choice; problem.py says what it gets. To add one,
write it and give it a line in METHODS; to try one, leave it where it is and call it package.module:NAME.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import Any

import torch

from dmcp.budget import Budget
from dmcp.compare import amc, autoslim, baselines, magnitude, metapruning
from dmcp.compare.baselines import NoConfig
from dmcp.compare.problem import Choice, Prepared, Problem
from dmcp.errors import DmcpError, TrainingError
from dmcp.models import imported

GIVEN = "="  # begins the name of widths that somebody gives


class Start(Enum):
    """What a method starts from: the last argument of `find`, a state dict unless it says otherwise."""

    FRESH = "the model with fresh weights: no argument"
    TRAINED = "the unpruned network, trained on all training images"
    HELD_OUT = "the unpruned network, trained without the held-out images"
    PREPARED = "what `prepare` has trained, once for all budgets"
    SEARCHED = "the search of dmcp at the same budget: a SearchResult"


class Own(StrEnum):
    """How a method's authors get the final weights, where that is not training from scratch."""

    FINETUNED = "fine-tuned"  # the chosen channels of Choice.model, trained on
    AS_TRAINED = "as trained"  # the chosen channels of Choice.model, as they are
    SLIMMABLE = "slimmable"  # fresh weights, trained inside the unpruned network, which it learns from


@dataclass(frozen=True)
class Method:
    """A method as a comparison sees it."""

    find: Callable[..., Choice]
    config: Callable[..., Any] = NoConfig  # its settings: a frozen dataclass with a default for each
    start: Start = Start.FRESH
    prepare: Callable[[Problem, Any], Prepared] | None = None
    own: Own | None = None
    holds_out: bool = False  # whether it chooses by the held-out images, and must not train on them
    full: bool = False  # whether fine-tuning takes the whole recipe, not --finetune-epochs at a tenth of the rate
    one_ratio: bool = False  # whether its widths are those of uniform, and only the channels its own
    users: bool = False  # whether it was imported by name


METHODS: dict[str, Method] = {
    "uniform": Method(baselines.find_uniform),
    "random": Method(baselines.find_random),
    "uniform-slimmable": Method(baselines.find_uniform, own=Own.SLIMMABLE, one_ratio=True),
    "l1": Method(magnitude.find_l1, magnitude.L1Config, Start.TRAINED, own=Own.FINETUNED, one_ratio=True),
    "l2": Method(magnitude.find_l2, start=Start.TRAINED, own=Own.FINETUNED, one_ratio=True),
    "slimming": Method(
        magnitude.find_slimming, magnitude.SlimmingConfig, Start.PREPARED, magnitude.prepare, Own.FINETUNED, full=True
    ),
    "sfp": Method(magnitude.find_sfp, magnitude.SoftConfig, own=Own.AS_TRAINED, one_ratio=True),
    "fpgm": Method(magnitude.find_fpgm, magnitude.SoftConfig, own=Own.AS_TRAINED, one_ratio=True),
    "autoslim": Method(
        autoslim.find_autoslim, autoslim.AutoSlimConfig, Start.PREPARED, autoslim.prepare, Own.SLIMMABLE, holds_out=True
    ),
    "amc": Method(amc.find_amc, amc.AmcConfig, Start.HELD_OUT, own=Own.FINETUNED, holds_out=True),
    "metapruning": Method(
        metapruning.find_metapruning, metapruning.MetaPruningConfig, Start.PREPARED, metapruning.prepare, holds_out=True
    ),
    "dmcp": Method(baselines.find_dmcp, baselines.DmcpConfig, own=Own.SLIMMABLE),
    "dmcp-direct": Method(baselines.find_direct, baselines.DirectConfig, Start.SEARCHED),
}
PEERS: dict[str, Method] = {  # packages of other people
    "torch-pruning": Method(
        baselines.find_torch_pruning, baselines.TorchPruningConfig, Start.TRAINED, own=Own.FINETUNED
    ),
}


def find_method(name: str) -> Method:
    """The method of this name: ours, another package's, one that is imported, or given widths."""
    known = METHODS | PEERS
    if name in known:
        return known[name]
    if name.startswith(GIVEN):
        return Method(_take, GivenConfig)
    if ":" in name:
        return _imported(name)
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."
    raise DmcpError(f"There is no method {name!r}: {hint}")


def title(name: str) -> str:
    """What a method is called in tables and folders: mypackage.mymodule:mine is mine."""
    return name.removeprefix(GIVEN).rpartition(":")[2]


def prepare(name: str, problem: Problem, config: Any) -> Prepared:
    """The network that a method starts from at all budgets."""
    make = find_method(name).prepare
    assert make is not None
    with _blamed(name):
        prepared = make(problem, config)
    if not isinstance(prepared, Prepared):
        raise TrainingError(f"{name}: prepare must return a dmcp.compare.problem.Prepared, not {prepared!r:.80}.")
    return prepared


def choose(name: str, problem: Problem, config: Any, start: Any = None) -> Choice:
    """What a method chooses; BudgetError where that is not what was asked for."""
    method = find_method(name)
    with _blamed(name):
        choice = method.find(problem, config, *(() if method.start is Start.FRESH else (start,)))
    if method.users:
        choice = _checked(name, method, problem, choice)
    choice.check(problem)
    return choice


def choose_all(name: str, problem: Problem, budgets: Mapping[str, Budget]) -> dict[str, Choice]:
    """What a method with its usual settings chooses for each budget; it starts from the weights of the model."""
    method = find_method(name)
    config = method.config()
    state = prepare(name, problem, config).state if method.prepare else None
    if len(budgets) > 1:  # their checkpoints would have one name
        problem = replace(problem, runtime=replace(problem.runtime, checkpointer=None))
    return {key: choose(name, replace(problem, budget=budget), config, state) for key, budget in budgets.items()}


def check_installed(name: str) -> None:
    """DmcpError for a method that is not there, or is of a package that is not installed."""
    find_method(name)
    if name in PEERS and importlib.util.find_spec(name.replace("-", "_")) is None:
        raise DmcpError(f"{name} is not installed: pip install {name}, or take another method.")


@dataclass(frozen=True, kw_only=True)
class GivenConfig:
    """Widths that somebody gives."""

    widths: Mapping[str, int] = field(default_factory=dict)  # of spaces by name; the others keep all channels


def _take(problem: Problem, config: GivenConfig) -> Choice:
    widths = problem.graph.widths(config.widths)
    return Choice(widths=widths, kept=widths)


# methods of users


def _imported(name: str) -> Method:
    """A Method, or a function find(problem) that returns a Choice."""
    module, _, rest = name.partition(":")
    found = imported(module, rest)
    if isinstance(found, Method) and (found.prepare or found.start is not Start.PREPARED):
        return replace(found, one_ratio=False, users=True)
    if callable(found) and not isinstance(found, type):
        return Method(lambda problem, config: found(problem), users=True)
    raise DmcpError(
        f"{name}: give a Method (with prepare=, where it starts from that), or a function find(problem) -> Choice."
    )


@contextlib.contextmanager
def _blamed(name: str) -> Iterator[None]:
    """Errors of a user's method become one sentence that says whose they are, below the traceback."""
    try:
        yield
    except (DmcpError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not find_method(name).users:
            raise
        traceback.print_exc()
        raise TrainingError(f"{name} failed: {type(error).__name__}: {error}") from error


def _checked(name: str, method: Method, problem: Problem, choice: Any) -> Choice:
    """The choice of a user's method; plain widths inside the budget are filled up, as our methods do."""
    if not isinstance(choice, Choice) or (choice.model is None and method.own in (Own.FINETUNED, Own.AS_TRAINED)):
        raise TrainingError(
            f"{name}: return a dmcp.compare.problem.Choice, with model= where its own training needs it."
        )
    widths = problem.graph.widths(choice.widths)
    if choice.model is None:
        widths = problem.fit(widths.tensor()) if problem.shares(widths.tensor()[None]).item() <= 1 else widths
        return replace(choice, widths=widths, kept=widths)
    for space, width in widths.items():
        kept = choice.kept.get(space, problem.graph.full[space])
        if (kept if isinstance(kept, int) else len(kept)) != width:
            raise TrainingError(f"{name}: its width of {space} is {width}, but it does not keep so many channels.")
    return replace(choice, widths=widths)
