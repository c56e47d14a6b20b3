"""The paper's experiments: each is a function that returns arms, which are compared with all else the same.

The arm of the usual settings at half of the MACs is the same cells in all of them, and they are run only once.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dmcp.comparison.cells import COPY, RECOVER
from dmcp.errors import DmcpError
from dmcp.paper.arms import HALF, TRAINED, Arm, Study, compared, dmcp_arm, variant, widened
from dmcp.paper.own_experiments import (
    BORDER,
    BORDER_LONG,
    BORDERED,
    EVEN,
    EXPLAIN,
    FULL,
    HALFWAY,
    LENGTH,
    LONG,
    MORE_SEARCH,
    MORE_TRAINING,
    RATES,
    RECIPE,
    SEEDS,
    TAUGHT,
    border,
    border_long,
    bordered,
    even,
    explain,
    full,
    halfway,
    length,
    rates,
    recipe,
    seeds,
    taught,
)
from dmcp.searching.sandwich import Draw
from dmcp.searching.searches import Init

DRAWS = 5  # networks that are drawn from one search
WIDER = ("scale", EXPLAIN)  # experiments with a wider unpruned network
_FAST, _USUAL = 5.0, 0.5  # learning rates of the alphas in recover: see docs/paper_map.md; and that of a search

Experiment = Callable[[Study], list[Arm]]


def main(it: Study) -> list[Arm]:
    """Table 6 and figure 1: DMCP, its slimmable training, uniform and random widths at several budgets."""
    arms = [TRAINED]
    for budget in it.common.budgets:
        arms += [
            Arm(label=f"{name} at {budget}", name=name, method=name, budget=budget)
            for name in ("dmcp", "uniform", "random")
        ]
    return arms


def sampling(it: Study) -> list[Arm]:
    """Table 1: expected sampling against networks drawn from the same search."""
    searched = dmcp_arm("expected sampling")
    drawn = Arm(label="direct sampling", name="dmcp-direct", method="dmcp-direct", budget=HALF, uses=searched)
    more = [replace(drawn, name=f"dmcp-direct{n}", settings={"number": n}) for n in range(1, DRAWS)]
    return [searched, drawn, *more]


def scale(it: Study) -> list[Arm]:
    """Table 2 and figure 5: an unpruned network 1.5 times as wide, pruned to the same MACs."""
    usual = dmcp_arm("unpruned network 1.0x")
    return compared(usual, [usual, widened(it, "unpruned network 1.5x", "wide")])


def warmup(it: Study) -> list[Arm]:
    """Table 3: as many epochs with and without a warm-up."""
    usual = dmcp_arm("with warm-up")
    return compared(usual, [usual, variant("without warm-up", "cold", more={"warmup": 0.0})])


def sandwich(it: Study) -> list[Arm]:
    """Table 4: the original rule has one ratio for all layers, the variant draws each layer's from the alphas."""
    original = {"draw": Draw.SANDWICH.value, "warmup_draw": Draw.SANDWICH.value}
    usual = dmcp_arm("variant sandwich rule")
    return compared(usual, [usual, variant("original sandwich rule", "sandwich", more=original)])


def scheme(it: Study) -> list[Arm]:
    """Table 5: what moves after the same warm-up.

    Alphas that see the budget alone see no weights, so they need no warm-up. Where they start is then all that they
    know: at the budget they stay, which are uniform widths, so they also start at random as in the paper.
    """
    frozen = {"train_weights": False}
    rest = it.search.epochs - it.search.warmup_epochs
    blind = frozen | {"task_loss": False, "warmup": 0.0}
    scattered = blind | {"init": Init.RANDOM.value}
    usual = dmcp_arm("alphas by budget and task, and weights")
    arms = [
        variant("alphas by the budget, from random ones", "budget-random", epochs=rest, more=scattered),
        variant("alphas by the budget", "budget-only", epochs=rest, more=blind),
        variant("alphas by budget and task", "frozen", more=frozen),
        usual,
    ]
    return compared(usual, arms)


def recover(it: Study) -> list[Arm]:
    """Figure 4: a trained and frozen network, random alphas, the task loss alone.

    Around 0 they keep 2 to 4 % of the MACs at first, too little to find back from in most seeds.
    """
    epochs = max(1, it.search.epochs // 3)
    ways = {
        "alphas around 1, ten times the rate of a search": ("recover", {"mean": 1.0, "alpha_lr": _FAST}),
        "alphas around 1, the rate of a search": ("recover-slowly", {"mean": 1.0, "alpha_lr": _USUAL}),
        "alphas around 0, ten times the rate": ("recover-low", {"mean": 0.0, "alpha_lr": _FAST}),
        "wrong labels, alphas around 1, ten times the rate": (
            "recover-wrong",
            {"mean": 1.0, "alpha_lr": _FAST, "wrong_labels": True},
        ),
    }
    return [
        Arm(label=label, name=name, method=RECOVER, settings={"epochs": epochs} | more, uses=TRAINED)
        for label, (name, more) in ways.items()
    ]


def pretrained(it: Study) -> list[Arm]:
    """Appendix B: the trained unpruned network in place of the warm-up, then as many epochs as after one."""
    rest: dict[str, Any] = {"uses": TRAINED, "epochs": it.search.epochs - it.search.warmup_epochs}
    usual = dmcp_arm("warm-up")
    arms = [
        usual,
        variant("pre-trained", "pretrained", **rest, more={"warmup": 0.0}),
        variant("pre-trained, channels sorted", "sorted", **rest, more={"warmup": 0.0, "sort": True}),
    ]
    return compared(usual, arms)


def bernoulli(it: Study) -> list[Arm]:
    """Appendix C: each group kept or dropped by itself."""
    usual = dmcp_arm("Markov chain")
    return compared(usual, [usual, variant("independent Bernoulli", "bernoulli", more={"independent": True})])


def distribution(it: Study) -> list[Arm]:
    """Figures 6 and 7: structures drawn from the usual searches."""
    return [dmcp_arm("usual search")]


def extra(it: Study) -> list[Arm]:
    """What the paper does not have: starts of the alphas, images of their own, and which seed matters more."""
    first, *rest = it.common.seeds
    usual = dmcp_arm("alphas start at the budget, see the same images")
    starts = [(Init.ZERO, "alphas start at zero"), (Init.RANDOM, "alphas start at random")]
    arms = [usual, *(variant(label, f"init-{way}", more={"init": way.value}) for way, label in starts)]
    arms.append(variant("alphas see held-out images", "held-out", hold_out=True))
    arms = compared(usual, arms)  # and not those below, in which one seed is the same in several networks
    trainings, searches = f"one search (seed {first}), all training seeds", f"all searches, one training seed ({first})"
    again = Arm(label=trainings, name=f"dmcp-search{first}", method=COPY, budget=HALF, uses=usual, uses_seed=first)
    arms += [dmcp_arm(trainings, seeds=(first,)), replace(again, seeds=tuple(rest))]
    others = [replace(again, label=searches, name=f"dmcp-search{n}", uses_seed=n, seeds=(first,)) for n in rest]
    return [*arms, dmcp_arm(searches, seeds=(first,)), *others]


EXPERIMENTS: dict[str, Experiment] = {  # as people type them, the most wanted first
    "main": main,
    "sampling": sampling,
    "warmup": warmup,
    "sandwich": sandwich,
    "scheme": scheme,
    "bernoulli": bernoulli,
    "pretrained": pretrained,
    "scale": scale,
    "recover": recover,
    "distribution": distribution,
    "extra": extra,
    FULL: full,
    RECIPE: recipe,
    EXPLAIN: explain,
    LENGTH: length,
    RATES: rates,
    TAUGHT: taught,
    SEEDS: seeds,
    EVEN: even,
    HALFWAY: halfway,
    BORDER: border,
    BORDERED: bordered,
    BORDER_LONG: border_long,
}
_BY_NAME = tuple(EXPERIMENTS)[list(EXPERIMENTS).index(FULL) :]
ALL = tuple(name for name in EXPERIMENTS if name not in _BY_NAME)  # what people call all
NAMES = f"{', '.join(ALL)}, all of them, or only by name {', '.join(_BY_NAME)}"  # for people


def about(name: str) -> str:
    """What an experiment is about, in a sentence."""
    return (EXPERIMENTS[name].__doc__ or "").splitlines()[0]


def study_of(it: Study, name: str) -> Study:
    """The study as one experiment has it: its epochs are others in the full-length recipe."""
    if name not in LONG:
        return it
    common, train = it.common, it.common.train
    search = {**common.settings.get("dmcp", {}), "epochs": MORE_SEARCH * it.search.epochs}
    long = replace(train, epochs=MORE_TRAINING * train.epochs)
    return replace(it, common=replace(common, train=long, settings={**common.settings, "dmcp": search}))


def check_experiment(name: str) -> None:
    """Refuse a name that no experiment has."""
    if name not in EXPERIMENTS:
        near = difflib.get_close_matches(name, EXPERIMENTS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {NAMES}."
        raise DmcpError(f"There is no experiment {name!r}: {hint}")
