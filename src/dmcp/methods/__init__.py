"""Methods that choose the widths of a network, one file each: all take a Problem and give a Choice.

METHODS has them by the names that people type, with what each needs before it can choose, and how its authors train
what it has chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from dmcp.methods import (
    amc,
    autoslim,
    dmcp,
    fpgm,
    l1,
    metapruning,
    random,
    sfp,
    slimming,
    torch_pruning,
    uniform,
)
from dmcp.methods.problem import Choice, Prepared, Problem


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
    one_ratio: bool = False  # whether its widths are those of uniform, and only the channels its own


METHODS: dict[str, Method] = {
    "uniform": Method(uniform.find, uniform.UniformConfig),
    "random": Method(random.find, random.RandomConfig),
    "l1": Method(l1.find, l1.L1Config, Start.TRAINED, own=Own.FINE_TUNED, one_ratio=True),
    "slimming": Method(slimming.find, slimming.SlimmingConfig, Start.PREPARED, slimming.prepare, own=Own.FINE_TUNED),
    "sfp": Method(sfp.find, sfp.SoftConfig, own=Own.AS_IT_IS, one_ratio=True),
    "fpgm": Method(fpgm.find, sfp.SoftConfig, own=Own.AS_IT_IS, one_ratio=True),
    "autoslim": Method(
        autoslim.find, autoslim.AutoSlimConfig, Start.PREPARED, autoslim.prepare, Own.FINE_TUNED, holds_out=True
    ),
    "amc": Method(amc.find, amc.AmcConfig, Start.HELD, own=Own.FINE_TUNED, holds_out=True),
    "metapruning": Method(
        metapruning.find, metapruning.MetaPruningConfig, Start.PREPARED, metapruning.prepare, holds_out=True
    ),
    "dmcp": Method(dmcp.find, dmcp.DmcpConfig, own=Own.SLIMMABLE),
    "dmcp-direct": Method(dmcp.draw, dmcp.DrawConfig, Start.SEARCHED),
}
PEERS: dict[str, Method] = {  # packages of other people
    "torch-pruning": Method(torch_pruning.find, torch_pruning.TorchPruningConfig, Start.TRAINED, own=Own.FINE_TUNED),
}
