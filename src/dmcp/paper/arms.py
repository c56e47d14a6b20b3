"""What an experiment compares: arms, each a setting with a cell for each seed, and what all arms have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from dmcp.budget import parse
from dmcp.comparison.comparing import Comparison
from dmcp.methods.dmcp import DmcpConfig
from dmcp.pruning import UNPRUNED
from dmcp.searching.searches import SearchConfig
from dmcp.tracing.graph import ChannelGraph

HALF = "50%"  # the budget of all experiments but main
BUDGETS = (HALF, "30%", "70%", "15%")  # of main, the most wanted first


@dataclass(frozen=True, kw_only=True)
class Arm:
    """One setting of an experiment: a cell for each seed."""

    label: str  # its row in the table; arms of one label share a row
    name: str  # of its cells' folders, before budget and seed
    method: str  # see methods and cells; "" for the unpruned network
    budget: str = ""  # empty: all of the network
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the method, where they are not the study's
    model_args: tuple[str, ...] = ()  # besides those of the study
    uses: Arm | None = None  # whose cell it starts from
    uses_seed: int | None = None  # the seed of that cell; None: its own
    seeds: tuple[int, ...] | None = None  # of the study's; None: all
    own: bool = True  # whether its network is also trained the method's own way, where it has one
    teacher: Arm | None = None  # whose cell of the same seed has the network that it also learns from
    against: str = ""  # label of the row that it is compared with, seed by seed; empty: none
    train: Mapping[str, Any] = field(default_factory=dict)  # of its final training, where that is not the study's
    held_out: bool = False  # whether it is trained without the held-out images, and tested by them alone


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is the same in all experiments on one network."""

    common: Comparison  # the protocol and the seeds; its methods and budgets are those of main
    graph: ChannelGraph
    wider: tuple[str, ...] = ("width=24",)  # arguments that make the unpruned network 1.5 times as wide

    @property
    def search(self) -> SearchConfig:
        """The usual search."""
        return DmcpConfig(**self.common.settings.get("dmcp", {})).search_config(HALF)


# arms that several experiments have

TRAINED = Arm(label=UNPRUNED, name=UNPRUNED, method="")


def dmcp_arm(label: str, budget: str = HALF, seeds: tuple[int, ...] | None = None) -> Arm:
    """The reference of every ablation."""
    return Arm(label=label, name="dmcp", method="dmcp", budget=budget, seeds=seeds)


def variant(label: str, name: str, uses: Arm | None = None, **settings: Any) -> Arm:
    """The reference with some settings changed; trained from scratch only."""
    return Arm(label=label, name=f"dmcp-{name}", method="dmcp", budget=HALF, settings=settings, uses=uses, own=False)


def compared(reference: Arm, arms: Sequence[Arm]) -> list[Arm]:
    """The same arms, all but the reference compared with it."""
    return [arm if arm.label == reference.label else replace(arm, against=reference.label) for arm in arms]


def widened(it: Study, label: str, name: str, **settings: Any) -> Arm:
    """Half of the MACs of the usual network, searched in the wider one."""
    target = parse(HALF, it.graph).limits[0].target
    return replace(variant(label, name, **settings), model_args=it.wider, budget=str(target))
