"""The paper's experiments: each is a function that returns arms, which are compared with all else the same.

The arm of the usual settings at half of the MACs is the same cells in all of them, and they are run only once.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from dmcp.budget import parse
from dmcp.comparison.cells import COPY, RECOVER, TOWARD_UNIFORM
from dmcp.errors import DmcpError
from dmcp.paper.arms import HALF, Arm, Study
from dmcp.pruning import UNPRUNED
from dmcp.searching.sandwich import Draw
from dmcp.searching.searches import Init

BUDGETS = (HALF, "30%", "70%", "15%")  # of main, the most wanted first
ENDS = ("70%", "15%")  # of explain: the largest and the smallest of main
DRAWS = 5  # networks that are drawn from one search
# experiments that are done by name only: not the paper's, and longer than its
FULL, RECIPE, EXPLAIN, LENGTH, RATES, TAUGHT = "full", "recipe", "explain", "length", "rates", "taught"
SEEDS, EVEN, HALFWAY = "seeds", "even", "halfway"
HELD_OUT = (RECIPE, RATES, EVEN)  # experiments without the test images
WIDER = ("scale", EXPLAIN)  # experiments with a wider unpruned network
_MORE_TRAINING, _MORE_SEARCH = 4, 2  # times the study's epochs, in the full-length recipe
_TAUGHT = {"teacher_share": 0.9, "teacher_temperature": 4.0}  # the distilled training of the full-length recipe
_IN_ALL = 300  # epochs of search and training in the longest recipe, where the full-length one has 200 of training
_LONGER, _BRIEFLY = 3, "a quarter of the training"  # times the search of the full-length recipe, and of its training
_MAIN_SEEDS = 3  # of the study: those that main has
_TIMES = 10  # as fast as in a usual search
_FAST, _USUAL = 5.0, 0.5  # learning rates of the alphas in recover: see docs/paper_map.md; and that of a search

Experiment = Callable[[Study], list[Arm]]


def _dmcp(label: str, budget: str = HALF, seeds: tuple[int, ...] | None = None) -> Arm:
    """The reference of every ablation."""
    return Arm(label=label, name="dmcp", method="dmcp", budget=budget, seeds=seeds)


def _variant(label: str, name: str, uses: Arm | None = None, **settings: Any) -> Arm:
    """The reference with some settings changed; trained from scratch only."""
    return Arm(label=label, name=f"dmcp-{name}", method="dmcp", budget=HALF, settings=settings, uses=uses, own=False)


def _compared(reference: Arm, arms: Sequence[Arm]) -> list[Arm]:
    """The same arms, all but the reference compared with it."""
    return [arm if arm.label == reference.label else replace(arm, against=reference.label) for arm in arms]


_TRAINED = Arm(label=UNPRUNED, name=UNPRUNED, method="")


def main(it: Study) -> list[Arm]:
    """Table 6 and figure 1: DMCP, its slimmable training, uniform and random widths at several budgets."""
    arms = [_TRAINED]
    for budget in it.common.budgets:
        arms += [
            Arm(label=f"{name} at {budget}", name=name, method=name, budget=budget)
            for name in ("dmcp", "uniform", "random")
        ]
    return arms


def sampling(it: Study) -> list[Arm]:
    """Table 1: expected sampling against networks drawn from the same search."""
    searched = _dmcp("expected sampling")
    drawn = Arm(label="direct sampling", name="dmcp-direct", method="dmcp-direct", budget=HALF, uses=searched)
    more = [replace(drawn, name=f"dmcp-direct{n}", settings={"number": n}) for n in range(1, DRAWS)]
    return [searched, drawn, *more]


def scale(it: Study) -> list[Arm]:
    """Table 2 and figure 5: an unpruned network 1.5 times as wide, pruned to the same MACs."""
    usual = _dmcp("unpruned network 1.0x")
    return _compared(usual, [usual, _wide(it, "unpruned network 1.5x", "wide")])


def _wide(it: Study, label: str, name: str, **settings: Any) -> Arm:
    """Half of the MACs of the usual network, searched in the wider one."""
    target = parse(HALF, it.graph).limits[0].target
    return replace(_variant(label, name, **settings), model_args=it.wider, budget=str(target))


def warmup(it: Study) -> list[Arm]:
    """Table 3: as many epochs with and without a warm-up."""
    usual = _dmcp("with warm-up")
    return _compared(usual, [usual, _variant("without warm-up", "cold", more={"warmup": 0.0})])


def sandwich(it: Study) -> list[Arm]:
    """Table 4: the original rule has one ratio for all layers, the variant draws each layer's from the alphas."""
    original = {"draw": Draw.SANDWICH.value, "warmup_draw": Draw.SANDWICH.value}
    usual = _dmcp("variant sandwich rule")
    return _compared(usual, [usual, _variant("original sandwich rule", "sandwich", more=original)])


def scheme(it: Study) -> list[Arm]:
    """Table 5: what moves after the same warm-up.

    Alphas that see the budget alone see no weights, so they need no warm-up. Where they start is then all that they
    know: at the budget they stay, which are uniform widths, so they also start at random as in the paper.
    """
    frozen = {"train_weights": False}
    rest = it.search.epochs - it.search.warmup_epochs
    blind = frozen | {"task_loss": False, "warmup": 0.0}
    scattered = blind | {"init": Init.RANDOM.value}
    usual = _dmcp("alphas by budget and task, and weights")
    arms = [
        _variant("alphas by the budget, from random ones", "budget-random", epochs=rest, more=scattered),
        _variant("alphas by the budget", "budget-only", epochs=rest, more=blind),
        _variant("alphas by budget and task", "frozen", more=frozen),
        usual,
    ]
    return _compared(usual, arms)


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
        Arm(label=label, name=name, method=RECOVER, settings={"epochs": epochs} | more, uses=_TRAINED)
        for label, (name, more) in ways.items()
    ]


def pretrained(it: Study) -> list[Arm]:
    """Appendix B: the trained unpruned network in place of the warm-up, then as many epochs as after one."""
    rest: dict[str, Any] = {"uses": _TRAINED, "epochs": it.search.epochs - it.search.warmup_epochs}
    usual = _dmcp("warm-up")
    arms = [
        usual,
        _variant("pre-trained", "pretrained", **rest, more={"warmup": 0.0}),
        _variant("pre-trained, channels sorted", "sorted", **rest, more={"warmup": 0.0, "sort": True}),
    ]
    return _compared(usual, arms)


def bernoulli(it: Study) -> list[Arm]:
    """Appendix C: each group kept or dropped by itself."""
    usual = _dmcp("Markov chain")
    return _compared(usual, [usual, _variant("independent Bernoulli", "bernoulli", more={"independent": True})])


def distribution(it: Study) -> list[Arm]:
    """Figures 6 and 7: structures drawn from the usual searches."""
    return [_dmcp("usual search")]


def extra(it: Study) -> list[Arm]:
    """What the paper does not have: starts of the alphas, images of their own, and which seed matters more."""
    first, *rest = it.common.seeds
    usual = _dmcp("alphas start at the budget, see the same images")
    starts = [(Init.ZERO, "alphas start at zero"), (Init.RANDOM, "alphas start at random")]
    arms = [usual, *(_variant(label, f"init-{way}", more={"init": way.value}) for way, label in starts)]
    arms.append(_variant("alphas see held-out images", "held-out", hold_out=True))
    arms = _compared(usual, arms)  # and not those below, in which one seed is the same in several networks
    trainings, searches = f"one search (seed {first}), all training seeds", f"all searches, one training seed ({first})"
    again = Arm(label=trainings, name=f"dmcp-search{first}", method=COPY, budget=HALF, uses=usual, uses_seed=first)
    arms += [_dmcp(trainings, seeds=(first,)), replace(again, seeds=tuple(rest))]
    others = [replace(again, label=searches, name=f"dmcp-search{n}", uses_seed=n, seeds=(first,)) for n in rest]
    return [*arms, _dmcp(searches, seeds=(first,)), *others]


_FULL_PAIR = (
    Arm(label="uniform", name=f"uniform-{FULL}", method="uniform", budget=HALF),
    Arm(label="dmcp", name=f"dmcp-{FULL}", method="dmcp", budget=HALF, own=False),
)


def full(it: Study) -> list[Arm]:
    """The full-length recipe: the final training four times as long, the search twice as long as elsewhere.

    `study_of` has these lengths. The teacher is the unpruned network of the same seed, by the same recipe; how much it
    teaches, and how softly, is usual for CIFAR and was not tuned. Both trainings are of the widths of one search. A
    slimmable one is left out: it trains the unpruned network, too.
    """
    same, ours = _FULL_PAIR
    return _compared(same, [_FULL_TRAINED, same, ours, *_taught("distilled")])


_FULL_TRAINED = replace(_TRAINED, name=f"{UNPRUNED}-{FULL}")


def _taught(word: str, **train: Any) -> list[Arm]:
    """Uniform widths and those of DMCP, with the unpruned network of the same seed as a teacher."""
    same, ours = _FULL_PAIR
    way: dict[str, Any] = {"budget": HALF, "teacher": _FULL_TRAINED, "train": {**_TAUGHT, **train}}
    uniform = Arm(label=f"{same.label}, {word}", name=f"uniform-{word}-{FULL}", method="uniform", **way)
    return [uniform, Arm(label=f"{ours.label}, {word}", name=f"dmcp-{word}-{FULL}", method=COPY, uses=ours, **way)]


def taught(it: Study) -> list[Arm]:
    """The longest recipe: 300 epochs with the search, uniform widths and those of DMCP with the same teacher.

    What the search does not take of these epochs the training has, that of uniform widths as well. The full-length
    recipe has 200 in its place; for others all grows alike.
    """
    whole = _IN_ALL * it.common.train.epochs // 200
    if whole <= it.search.epochs:
        raise DmcpError(
            f"{TAUGHT}: a search of {it.search.epochs} epochs leaves none of {whole} for the training: raise --epochs, "
            "or lower --search-epochs."
        )
    uniform, ours = _taught("longest", epochs=whole - it.search.epochs)
    return _compared(uniform, [uniform, ours])


def length(it: Study) -> list[Arm]:
    """Whether widths of a short search suit a long training: the same widths trained briefly, and a longer search.

    Layers that learn late are worth little when a search ends, so it may narrow them: in a short training that should
    cost nothing, in a long one it should. With a search three times as long they should be wider, and all be better.
    """
    same, ours = _FULL_PAIR
    brief = {"epochs": it.common.train.epochs // _MORE_TRAINING}
    longer = {"epochs": _LONGER * it.search.epochs}
    same_briefly = replace(same, label=f"{same.label}, {_BRIEFLY}", name=f"uniform-brief-{FULL}", train=brief)
    ours_briefly = Arm(
        label=f"{ours.label}, {_BRIEFLY}",
        name=f"dmcp-brief-{FULL}",
        method=COPY,
        budget=HALF,
        uses=ours,
        train=brief,
        against=same_briefly.label,
    )
    late = replace(ours, label=f"{ours.label}, a longer search", name=f"dmcp-longer-{FULL}", settings=longer)
    return [*_compared(same, [same, ours, late]), same_briefly, ours_briefly]


def recipe(it: Study) -> list[Arm]:
    """What the full-length recipe may be chosen by: one setting changed at a time, tested by held-out training images.

    The training with uniform widths, so that no search is favoured. Options of the command (`--lr` and its like) then
    make a choice that of `full`.
    """
    train = it.common.train
    ways: dict[str, tuple[str, dict[str, float]]] = {
        "uniform, the usual recipe": ("", {}),
        "uniform, half the learning rate": ("slower", {"lr": train.lr / 2}),
    }
    arms = [
        Arm(
            label=label,
            name="-".join(filter(None, ("uniform", RECIPE, name))),
            method="uniform",
            budget=HALF,
            train=more,
            held_out=True,
        )
        for label, (name, more) in ways.items()
    ]
    return _compared(arms[0], arms)


_FASTER = f"alphas {_TIMES} times as fast"


def _fast(it: Study) -> dict[str, Any]:
    """Settings of a search whose alphas move faster."""
    search = it.search
    return {"more": {"alpha_lr": _TIMES * search.alpha_lr, "alpha_min_lr": _TIMES * search.alpha_min_lr}}


def explain(it: Study) -> list[Arm]:
    """Why some claims do not hold, our guesses tested: alphas that move faster, and those of trained frozen weights.

    A short search has far fewer steps than the paper's, and at large budgets alphas start where they have little
    gradient, so they may end too near to their start: at the ends of main and in a wider network faster ones are
    compared. Alphas of frozen weights may learn little because a warm-up leaves these untrained: here the trained ones
    are frozen.
    """
    fast = _fast(it)
    arms: list[Arm] = []
    for budget in ENDS:
        same = Arm(label=f"uniform at {budget}", name="uniform", method="uniform", budget=budget)
        ours = _dmcp(f"dmcp at {budget}", budget)
        moved = replace(_variant(f"{ours.label}, {_FASTER}", "fast", **fast), budget=budget)
        arms += _compared(same, [same, ours, moved])
    narrow, wide = (f"dmcp at {HALF}, unpruned network {size}x" for size in ("1.0", "1.5"))
    usual, moved = _dmcp(narrow), _variant(f"{narrow}, {_FASTER}", "fast", **fast)
    arms += _compared(usual, [usual, moved, _wide(it, wide, "wide")])
    arms.append(replace(_wide(it, f"{wide}, {_FASTER}", "wide-fast", **fast), against=moved.label))
    return [*arms, *_frozen(it)]


def _frozen(it: Study) -> list[Arm]:
    """Weights that stay as a warm-up left them, and as the training of the unpruned network did."""
    rest, ready = it.search.epochs - it.search.warmup_epochs, {"train_weights": False, "warmup": 0.0, "sort": True}
    usual = _variant("alphas by budget and task", "frozen", more={"train_weights": False})
    label = f"{usual.label}, trained weights"
    return _compared(usual, [usual, _variant(label, "frozen-trained", uses=_TRAINED, epochs=rest, more=ready)])


def rates(it: Study) -> list[Arm]:
    """How fast alphas should move: widths of both rates, trained without held-out images and tested by them alone.

    The searches are those of main and explain. They had all training images, these among them, at both rates alike.
    """
    arms: list[Arm] = []
    for budget in (HALF, *ENDS):
        usual = _dmcp(f"dmcp at {budget}", budget)
        moved = replace(_variant(f"{usual.label}, {_FASTER}", "fast", **_fast(it)), budget=budget)
        way: dict[str, Any] = {"method": COPY, "budget": budget, "held_out": True}
        pair = [Arm(label=one.label, name=f"{one.name}-{RATES}", uses=one, **way) for one in (usual, moved)]
        arms += _compared(pair[0], pair)
    return arms


def seeds(it: Study) -> list[Arm]:
    """How sure it is that DMCP's widths are better than uniform ones: more seeds than main has, at two budgets.

    Main's seeds are main's cells. Networks of the other seeds are not also trained slimmably.
    """
    arms: list[Arm] = []
    first, rest = it.common.seeds[:_MAIN_SEEDS], it.common.seeds[_MAIN_SEEDS:]
    for budget in (HALF, ENDS[-1]):
        same = Arm(label=f"uniform at {budget}", name="uniform", method="uniform", budget=budget)
        ours = _dmcp(f"dmcp at {budget}", budget, first)
        more = replace(ours, name=f"dmcp-{SEEDS}", seeds=rest, own=False)
        arms += _compared(same, [same, ours, more, *(_half(one, f"{one.name}-half") for one in (ours, more))])
    return arms


def _half(start: Arm, name: str, **more: Any) -> Arm:
    """Widths half-way between those of an arm and uniform ones of the same MACs."""
    way: dict[str, Any] = {"method": COPY, "uses": start, "settings": {TOWARD_UNIFORM: 0.5}, **more}
    return Arm(label=f"{start.label}, half-way to uniform", name=name, budget=start.budget, seeds=start.seeds, **way)


def even(it: Study) -> list[Arm]:
    """How far from uniform widths should be: uniform ones, DMCP's and those half-way, without the test images.

    What a search finds out is uncertain, and where it narrows a layer to almost nothing an error costs most: widths
    that go only half the way may be better than both ends. The searches are those of main.
    """
    arms: list[Arm] = []
    for budget in BUDGETS:
        same = Arm(label=f"uniform at {budget}", name=f"uniform-{EVEN}", method="uniform", budget=budget, held_out=True)
        ours = _dmcp(f"dmcp at {budget}", budget)
        whole = Arm(label=ours.label, name=f"dmcp-{RATES}", method=COPY, budget=budget, uses=ours, held_out=True)
        arms += _compared(same, [same, whole, _half(ours, f"dmcp-{EVEN}", held_out=True)])
    return arms


def halfway(it: Study) -> list[Arm]:
    """The full-length recipe with widths half-way between those of DMCP and uniform ones."""
    same, ours = _FULL_PAIR
    return _compared(same, [same, ours, _half(ours, f"dmcp-half-{FULL}")])


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
}
_LONG = (FULL, RECIPE, LENGTH, TAUGHT, HALFWAY)  # with the lengths of the full-length recipe
_BY_NAME = (FULL, RECIPE, EXPLAIN, LENGTH, RATES, TAUGHT, SEEDS, EVEN, HALFWAY)
ALL = tuple(name for name in EXPERIMENTS if name not in _BY_NAME)  # what people call all
NAMES = f"{', '.join(ALL)}, all of them, or only by name {', '.join(_BY_NAME)}"  # for people


def about(name: str) -> str:
    """What an experiment is about, in a sentence."""
    return (EXPERIMENTS[name].__doc__ or "").splitlines()[0]


def study_of(it: Study, name: str) -> Study:
    """The study as one experiment has it: its epochs are others in the full-length recipe."""
    if name not in _LONG:
        return it
    common, train = it.common, it.common.train
    search = {**common.settings.get("dmcp", {}), "epochs": _MORE_SEARCH * it.search.epochs}
    long = replace(train, epochs=_MORE_TRAINING * train.epochs)
    return replace(it, common=replace(common, train=long, settings={**common.settings, "dmcp": search}))


def check_experiment(name: str) -> None:
    """Refuse a name that no experiment has."""
    if name not in EXPERIMENTS:
        near = difflib.get_close_matches(name, EXPERIMENTS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {NAMES}."
        raise DmcpError(f"There is no experiment {name!r}: {hint}")
