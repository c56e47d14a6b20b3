"""The table from name to method."""

from __future__ import annotations

import contextlib
import difflib
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import torch

from dmcp.budget import spent_shares
from dmcp.compare import amc, autoslim, baselines, magnitude, metapruning
from dmcp.compare.problem import Choice, Prepared, Problem
from dmcp.errors import DmcpError, TrainingError
from dmcp.models import imported
from dmcp.sampling import FILLED, fit

GIVEN = "="  # begins the name of widths that somebody gives


class Start(Enum):
    """What a method starts from."""

    FRESH = "the model with fresh weights"
    TRAINED = "the unpruned network, trained on all training images"
    HELD = "the unpruned network, trained without the held-out images"
    PREPARED = "a network of its own making, which serves all budgets"
    SEARCHED = "the search of dmcp at the same budget"


class Own(Enum):
    """How a method's authors get the final weights, where that is not training from scratch."""

    FINE_TUNED = "the chosen channels, with their weights, trained on"
    AS_IT_IS = "trained while it was chosen"
    SLIMMABLE = "trained inside the unpruned network, which it imitates"


@dataclass(frozen=True)
class Method:
    """A method as a comparison sees it."""

    find: Callable[..., Choice]
    config: Callable[..., Any]  # its settings
    start: Start = Start.FRESH
    prepare: Callable[[Problem, Any], Prepared] | None = None
    own: Own | None = None
    holds_out: bool = False  # whether it chooses by held-out images
    one_ratio: bool = False  # whether its widths are those of uniform, and only the channels its own; of ours only


METHODS: dict[str, Method] = {
    "uniform": Method(baselines.find_uniform, baselines.UniformConfig),
    "random": Method(baselines.find_random, baselines.RandomConfig),
    "uniform-slimmable": Method(baselines.find_uniform, baselines.UniformConfig, own=Own.SLIMMABLE, one_ratio=True),
    "l1": Method(magnitude.find_l1, magnitude.L1Config, Start.TRAINED, own=Own.FINE_TUNED, one_ratio=True),
    "slimming": Method(
        magnitude.find_slimming, magnitude.SlimmingConfig, Start.PREPARED, magnitude.prepare, own=Own.FINE_TUNED
    ),
    "sfp": Method(magnitude.find_sfp, magnitude.SoftConfig, own=Own.AS_IT_IS, one_ratio=True),
    "fpgm": Method(magnitude.find_fpgm, magnitude.SoftConfig, own=Own.AS_IT_IS, one_ratio=True),
    "autoslim": Method(
        autoslim.find_autoslim,
        autoslim.AutoSlimConfig,
        Start.PREPARED,
        autoslim.prepare,
        Own.FINE_TUNED,
        holds_out=True,
    ),
    "amc": Method(amc.find_amc, amc.AmcConfig, Start.HELD, own=Own.FINE_TUNED, holds_out=True),
    "metapruning": Method(
        metapruning.find_metapruning, metapruning.MetaPruningConfig, Start.PREPARED, metapruning.prepare, holds_out=True
    ),
    "dmcp": Method(baselines.find_dmcp, baselines.DmcpConfig, own=Own.SLIMMABLE),
    "dmcp-direct": Method(baselines.draw, baselines.SampleConfig, Start.SEARCHED),
}
PEERS: dict[str, Method] = {  # packages of other people
    "torch-pruning": Method(
        baselines.find_torch_pruning, baselines.TorchPruningConfig, Start.TRAINED, own=Own.FINE_TUNED
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
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."
    raise DmcpError(f"There is no method {name!r}: {hint}")


def title(name: str) -> str:
    """What a method is called in tables and folders: mypackage.mymodule:mine is mine."""
    return name.removeprefix(GIVEN).rpartition(":")[2]


def is_imported(name: str) -> bool:
    """Whether a method is somebody's own."""
    return ":" in name and not name.startswith(GIVEN)


# widths that somebody gives


@dataclass(frozen=True, kw_only=True)
class GivenConfig:
    """The widths."""

    widths: Mapping[str, int] = field(default_factory=dict)  # of spaces by name; those without one stay whole


def _take(problem: Problem, config: GivenConfig) -> Choice:
    """The widths as they are."""
    widths = problem.graph.widths(config.widths)
    return Choice(widths=widths, kept=widths)


# methods of others


@dataclass(frozen=True, kw_only=True)
class PlainConfig:
    """A plain function has no settings."""


def _imported(name: str) -> Method:
    """A Method, or a function find(problem) that returns a Choice."""
    module, _, rest = name.partition(":")
    if module.endswith(".py") or "/" in module:
        path = module.removesuffix(".py").strip("./").replace("/", ".")
        raise DmcpError(f"{name}: give the module as Python imports it, not a file: {path}:{rest}.")
    found = imported(module, rest)
    if isinstance(found, Method):
        if found.start is Start.PREPARED and found.prepare is None:
            raise DmcpError(f"{name} starts from a network of its own making: give Method(prepare=...).")
        return replace(found, one_ratio=False)
    if callable(found) and not isinstance(found, type):
        return Method(lambda problem, config: found(problem), PlainConfig)
    raise DmcpError(
        f"{name} is a {type(found).__name__}: give a dmcp.compare.methods.Method, or a function find(problem) "
        "that returns a Choice."
    )


@contextlib.contextmanager
def blamed(name: str) -> Iterator[None]:
    """Errors of a method that is somebody's own as a sentence that says whose they are, below where they come from."""
    try:
        yield
    except (DmcpError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if not is_imported(name):
            raise
        traceback.print_exc()
        raise TrainingError(f"{name} failed: {type(error).__name__}: {error}") from error


def prepare(name: str, method: Method, problem: Problem, config: Any) -> Prepared:
    """The network that a method starts from at all budgets."""
    assert method.prepare is not None
    with blamed(name):
        prepared = method.prepare(problem, config)
    if not isinstance(prepared, Prepared):
        raise TrainingError(f"{name}: prepare must return a dmcp.compare.problem.Prepared, not {prepared!r:.80}.")
    return prepared


def settle(name: str, method: Method, problem: Problem, choice: Any) -> Choice:
    """What somebody's own method has chosen, if it is a choice; plain widths inside the budget are filled up."""
    if not isinstance(choice, Choice):
        raise TrainingError(f"{name} returned a {type(choice).__name__}: return a dmcp.compare.problem.Choice.")
    if method.own in (Own.FINE_TUNED, Own.AS_IT_IS) and choice.model is None:
        raise TrainingError(f"{name}: its own training starts from the network that it chose in: give Choice(model=).")
    widths = problem.graph.widths(choice.widths)
    if choice.model is None:
        return _filled(problem, replace(choice, widths=widths, kept=widths))
    for space in problem.graph.spaces:
        kept = choice.kept.get(space.name, space.size)
        number, width = kept if isinstance(kept, int) else len(kept), widths[space.name]
        if number != width:
            raise TrainingError(f"{name} keeps {number} channels of {space.name}, but its width is {width}.")
        if width < problem.floor[space.name]:
            raise TrainingError(f"{name} keeps {width} channels of {space.name}: problem.floor is the least.")
        if width > problem.most[space.name]:
            raise TrainingError(f"{name} keeps {width} channels of {space.name}: problem.most is the most.")
    return replace(choice, widths=widths)


def _filled(problem: Problem, choice: Choice) -> Choice:
    """Widths that use the budget as those of our methods do, as near to the chosen ones as they can be."""
    graph, wish = problem.graph, choice.widths.tensor()
    if spent_shares(problem.budget, graph, wish[None]).max().item() > 1:  # the check refuses it
        return choice
    widths = fit(graph, problem.budget, wish.double(), problem.options, FILLED)
    return replace(choice, widths=widths, kept=widths)
