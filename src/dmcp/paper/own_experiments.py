"""Experiments that are not the paper's: longer recipes, what settings are chosen by, and our guesses put to a test.

Like those of the paper they are functions that return arms. They are done by name only.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dmcp.comparison.cells import COPY, TOWARD_UNIFORM
from dmcp.errors import DmcpError
from dmcp.paper.arms import BUDGETS, HALF, TRAINED, Arm, Study, compared, dmcp_arm, variant, widened
from dmcp.pruning import UNPRUNED

FULL, RECIPE, EXPLAIN, LENGTH, RATES, TAUGHT = "full", "recipe", "explain", "length", "rates", "taught"
SEEDS, EVEN, HALFWAY = "seeds", "even", "halfway"
BORDER, BORDERED, BORDER_LONG = "border", "bordered", "borderlong"
HELD_OUT = (RECIPE, RATES, EVEN, BORDER)  # experiments without the test images
LONG = (FULL, RECIPE, LENGTH, TAUGHT, HALFWAY, BORDER_LONG)  # of the full-length recipe; their cells have own names
ENDS = ("70%", "15%")  # of explain: the largest and the smallest of main
MORE_TRAINING, MORE_SEARCH = 4, 2  # times the study's epochs, in the full-length recipe
_TAUGHT = {"teacher_share": 0.9, "teacher_temperature": 4.0}  # the distilled training of the full-length recipe
_IN_ALL = 300  # epochs of search and training in the longest recipe, where the full-length one has 200 of training
_LONGER, _BRIEFLY = 3, "a quarter of the training"  # times the search of the full-length recipe, and of its training
_MAIN_SEEDS = 3  # of the study: those that main has
_TIMES = 10  # as fast as in a usual search

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
    return compared(same, [_FULL_TRAINED, same, ours, *_taught("distilled")])


_FULL_TRAINED = replace(TRAINED, name=f"{UNPRUNED}-{FULL}")


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
    return compared(uniform, [uniform, ours])


def length(it: Study) -> list[Arm]:
    """Whether widths of a short search suit a long training: the same widths trained briefly, and a longer search.

    Layers that learn late are worth little when a search ends, so it may narrow them: in a short training that should
    cost nothing, in a long one it should. With a search three times as long they should be wider, and all be better.
    """
    same, ours = _FULL_PAIR
    brief = {"epochs": it.common.train.epochs // MORE_TRAINING}
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
    return [*compared(same, [same, ours, late]), same_briefly, ours_briefly]


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
    return compared(arms[0], arms)


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
        ours = dmcp_arm(f"dmcp at {budget}", budget)
        moved = replace(variant(f"{ours.label}, {_FASTER}", "fast", **fast), budget=budget)
        arms += compared(same, [same, ours, moved])
    narrow, wide = (f"dmcp at {HALF}, unpruned network {size}x" for size in ("1.0", "1.5"))
    usual, moved = dmcp_arm(narrow), variant(f"{narrow}, {_FASTER}", "fast", **fast)
    arms += compared(usual, [usual, moved, widened(it, wide, "wide")])
    arms.append(replace(widened(it, f"{wide}, {_FASTER}", "wide-fast", **fast), against=moved.label))
    return [*arms, *_frozen(it)]


def _frozen(it: Study) -> list[Arm]:
    """Weights that stay as a warm-up left them, and as the training of the unpruned network did."""
    rest, ready = it.search.epochs - it.search.warmup_epochs, {"train_weights": False, "warmup": 0.0, "sort": True}
    usual = variant("alphas by budget and task", "frozen", more={"train_weights": False})
    label = f"{usual.label}, trained weights"
    return compared(usual, [usual, variant(label, "frozen-trained", uses=TRAINED, epochs=rest, more=ready)])


def rates(it: Study) -> list[Arm]:
    """How fast alphas should move: widths of both rates, trained without held-out images and tested by them alone.

    The searches are those of main and explain. They had all training images, these among them, at both rates alike.
    """
    arms: list[Arm] = []
    for budget in (HALF, *ENDS):
        usual = dmcp_arm(f"dmcp at {budget}", budget)
        moved = replace(variant(f"{usual.label}, {_FASTER}", "fast", **_fast(it)), budget=budget)
        way: dict[str, Any] = {"method": COPY, "budget": budget, "held_out": True}
        pair = [Arm(label=one.label, name=f"{one.name}-{RATES}", uses=one, **way) for one in (usual, moved)]
        arms += compared(pair[0], pair)
    return arms


def seeds(it: Study) -> list[Arm]:
    """How sure it is that DMCP's widths are better than uniform ones: more seeds than main has, at two budgets.

    Main's seeds are main's cells. Networks of the other seeds are not also trained slimmably.
    """
    arms: list[Arm] = []
    first, rest = it.common.seeds[:_MAIN_SEEDS], it.common.seeds[_MAIN_SEEDS:]
    for budget in (HALF, ENDS[-1]):
        same = Arm(label=f"uniform at {budget}", name="uniform", method="uniform", budget=budget)
        ours = dmcp_arm(f"dmcp at {budget}", budget, first)
        more = replace(ours, name=f"dmcp-{SEEDS}", seeds=rest, own=False)
        arms += compared(same, [same, ours, more, *(_half(one, f"{one.name}-half") for one in (ours, more))])
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
        ours = dmcp_arm(f"dmcp at {budget}", budget)
        whole = Arm(label=ours.label, name=f"dmcp-{RATES}", method=COPY, budget=budget, uses=ours, held_out=True)
        arms += compared(same, [same, whole, _half(ours, f"dmcp-{EVEN}", held_out=True)])
    return arms


def halfway(it: Study) -> list[Arm]:
    """The full-length recipe with widths half-way between those of DMCP and uniform ones."""
    same, ours = _FULL_PAIR
    return compared(same, [same, ours, _half(ours, f"dmcp-half-{FULL}")])


def border(it: Study) -> list[Arm]:
    """Whether one border for each space is better than a chance for each step, without the test images.

    By free chances most widths end with two peaks, at everything and at the floor: the soft network then has all
    channels, each a little weaker, for the cost of their mean number. With a border the first are nearly whole and the
    last nearly gone, more like the networks that are cut. Those of free chances are main's, also their searches.
    """
    arms: list[Arm] = []
    first = it.common.seeds[:_MAIN_SEEDS]
    for budget in BUDGETS:
        way: dict[str, Any] = {"budget": budget, "held_out": True, "seeds": first}
        same = Arm(label=f"uniform at {budget}", name=f"uniform-{EVEN}", method="uniform", **way)
        ours, moved = dmcp_arm(f"dmcp at {budget}", budget, first), _with_border(budget, first)
        free = Arm(label=ours.label, name=f"dmcp-{RATES}", method=COPY, uses=ours, **way)
        held = Arm(label=moved.label, name=f"{moved.name}-{RATES}", method=COPY, uses=moved, **way)
        arms += compared(same, [same, free, held])
    return arms


def _with_border(budget: str, seeds: tuple[int, ...]) -> Arm:
    usual = variant(f"dmcp at {budget}, with a border", BORDER, more={"border": True})
    return replace(usual, budget=budget, seeds=seeds)


def bordered(it: Study) -> list[Arm]:
    """The budgets and the seeds of `seeds`, with a border for each space."""
    arms: list[Arm] = []
    first, rest = it.common.seeds[:_MAIN_SEEDS], it.common.seeds[_MAIN_SEEDS:]
    for budget in (HALF, ENDS[-1]):
        same = Arm(label=f"uniform at {budget}", name="uniform", method="uniform", budget=budget)
        ours, moved = dmcp_arm(f"dmcp at {budget}", budget, first), _with_border(budget, first)
        more = replace(ours, name=f"dmcp-{SEEDS}", seeds=rest, own=False)
        arms += compared(same, [same, ours, more, moved, replace(moved, name=f"{moved.name}-{SEEDS}", seeds=rest)])
    return arms


def border_long(it: Study) -> list[Arm]:
    """The full-length recipe with a border for each space."""
    same, ours = _FULL_PAIR
    way: dict[str, Any] = {"settings": {"more": {"border": True}}, "name": f"dmcp-{BORDER}-{FULL}"}
    return compared(same, [same, ours, replace(ours, label=f"{ours.label}, with a border", **way)])
