"""The paper's settings for ImageNet: a recipe for every DMCP row of its table 6, and the hours that they take."""

from __future__ import annotations

import argparse
import difflib
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dmcp.errors import DmcpError
from dmcp.retraining import Retrain
from dmcp.running.jobs import Job
from dmcp.runs import read_json
from dmcp.searching.searches import SearchConfig
from dmcp.training import TrainConfig

IMAGES = 1_281_167  # training images of ImageNet


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All settings of one experiment but the data; `dataclasses.replace` makes another one of it."""

    name: str
    job: Job  # its batch is the search's, over all GPUs
    search: SearchConfig
    train: TrainConfig
    retrain: Retrain
    train_batch: int  # images in one step of the retraining, over all GPUs
    paper_top1: float  # accuracy in percent, as the paper prints it
    paper_macs: str  # as the paper prints them; it calls them FLOPs


def imagenet_mobilenet_v2_300m() -> Recipe:
    """MobileNetV2 1.5x down to 300M."""
    return _mobilenet_v2("imagenet_mobilenet_v2_300m", "300M", 73.5)


def imagenet_mobilenet_v2_211m() -> Recipe:
    """MobileNetV2 1.5x down to 211M."""
    return _mobilenet_v2("imagenet_mobilenet_v2_211m", "211M", 72.2)


def imagenet_mobilenet_v2_97m() -> Recipe:
    """MobileNetV2 1.5x down to 97M."""
    return _mobilenet_v2("imagenet_mobilenet_v2_97m", "97M", 67.0)


def imagenet_mobilenet_v2_87m() -> Recipe:
    """MobileNetV2 1.5x down to 87M."""
    return _mobilenet_v2("imagenet_mobilenet_v2_87m", "87M", 66.1)


def imagenet_mobilenet_v2_59m() -> Recipe:
    """MobileNetV2 1.5x down to 59M."""
    return _mobilenet_v2("imagenet_mobilenet_v2_59m", "59M", 62.7)


def imagenet_mobilenet_v2_43m() -> Recipe:
    """MobileNetV2 1.5x down to 43M."""
    return _mobilenet_v2("imagenet_mobilenet_v2_43m", "43M", 59.1)


def imagenet_mobilenet_v2_300m_slimmable() -> Recipe:
    """MobileNetV2 1.5x down to 300M, trained inside the unpruned network: the paper's DMCP*."""
    return _mobilenet_v2("imagenet_mobilenet_v2_300m_slimmable", "300M", 74.6, Retrain.SLIMMABLE)


def imagenet_mobilenet_v2_211m_slimmable() -> Recipe:
    """MobileNetV2 1.5x down to 211M, trained inside the unpruned network: the paper's DMCP*."""
    return _mobilenet_v2("imagenet_mobilenet_v2_211m_slimmable", "211M", 73.5, Retrain.SLIMMABLE)


def imagenet_resnet18_1040m() -> Recipe:
    """ResNet-18 down to 1.04G."""
    return _resnet("imagenet_resnet18_1040m", "resnet18", "1.04G", 69.2)


def imagenet_resnet50_2800m() -> Recipe:
    """ResNet-50 down to 2.8G."""
    return _resnet("imagenet_resnet50_2800m", "resnet50", "2.8G", 76.7)


def imagenet_resnet50_2200m() -> Recipe:
    """ResNet-50 down to 2.2G."""
    return _resnet("imagenet_resnet50_2200m", "resnet50", "2.2G", 76.2)


def imagenet_resnet50_1100m() -> Recipe:
    """ResNet-50 down to 1.1G."""
    return _resnet("imagenet_resnet50_1100m", "resnet50", "1.1G", 74.4)


def imagenet_resnet50_278m() -> Recipe:
    """ResNet-50 down to 278M."""
    return _resnet("imagenet_resnet50_278m", "resnet50", "278M", 66.4)


_RECIPES: tuple[Callable[[], Recipe], ...] = (  # in the order of table 6
    imagenet_mobilenet_v2_300m,
    imagenet_mobilenet_v2_211m,
    imagenet_mobilenet_v2_97m,
    imagenet_mobilenet_v2_87m,
    imagenet_mobilenet_v2_59m,
    imagenet_mobilenet_v2_43m,
    imagenet_mobilenet_v2_300m_slimmable,
    imagenet_mobilenet_v2_211m_slimmable,
    imagenet_resnet18_1040m,
    imagenet_resnet50_2800m,
    imagenet_resnet50_2200m,
    imagenet_resnet50_1100m,
    imagenet_resnet50_278m,
)


def names() -> list[str]:
    """Names of all recipes, in the order of the paper's table."""
    return [make().name for make in _RECIPES]


def find(name: str) -> Recipe:
    """The recipe of this name; DmcpError with the nearest one if there is none."""
    known = {recipe.name: recipe for recipe in (make() for make in _RECIPES)}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise DmcpError(f"There is no recipe {name!r}: the nearest is {near}; docs/imagenet.md lists all of them.")
    return known[name]


# what the recipes share


def _mobilenet_v2(name: str, macs: str, top1: float, retrain: Retrain = Retrain.SCRATCH) -> Recipe:
    """Section 4.1: from 1.5x, in 15 groups of 0.1x each; 250 epochs of retraining."""
    job = _job("mobilenet_v2", "width_mult=1.5")
    return _recipe(name, job, macs, top1, retrain, groups=15, epochs=250, weight_decay=4e-5)


def _resnet(name: str, model: str, macs: str, top1: float) -> Recipe:
    """Section 4.1: from 1.0x, in 10 groups of 0.1x each; 100 epochs of retraining."""
    return _recipe(name, _job(model), macs, top1, Retrain.SCRATCH, groups=10, epochs=100, weight_decay=1e-4)


def _job(model: str, *model_args: str) -> Job:
    return Job(model=model, model_args=model_args, input="3x224x224", batch=1024)


def _recipe(
    name: str, job: Job, macs: str, top1: float, retrain: Retrain, *, groups: int, epochs: int, weight_decay: float
) -> Recipe:
    """Section 4.1 for all networks; weight decay is the authors' code's, label smoothing its one for MobileNetV2."""
    search = SearchConfig(
        budget=macs,
        tolerance=0.95,
        groups=groups,
        epochs=40,
        warmup=0.5,
        budget_weight=0.1,
        lr=0.2,
        min_lr=0.02,
        reference_batch=1024,
        weight_decay=weight_decay,
        label_smoothing=0.1,
    )
    train = TrainConfig(
        epochs=epochs,
        lr=0.8,
        warmup_lr=0.2,
        warmup_epochs=1,
        min_lr=0.0,
        reference_batch=2048,
        weight_decay=weight_decay,
        label_smoothing=0.1,
    )
    return Recipe(
        name=name,
        job=job,
        search=search,
        train=train,
        retrain=retrain,
        train_batch=2048,
        paper_top1=top1,
        paper_macs=macs,
    )


# how long they take


@dataclass(frozen=True)
class Phase:
    """A part of a recipe in which all steps cost the same."""

    name: str
    epochs: int
    rate: float  # images a second on one GPU


def phases(recipe: Recipe, step_ms: Mapping[str, float]) -> list[Phase]:
    """Warm-up, search and retraining at the step times that were measured on one GPU.

    step_ms: `batch`, the images in a step, and milliseconds: `plain_ms` of a training step of the unpruned network,
    `stage1_ms` of a weight step of the search, `search_ms` of a weight step and an alpha step.
    """
    retrain_ms = step_ms["plain_ms"]  # an upper bound: the pruned network's own step is shorter
    if recipe.retrain is Retrain.SLIMMABLE:  # two gated networks in a step; a weight step has two and the random ones
        retrain_ms = step_ms["stage1_ms"] * 2 / (2 + recipe.search.subnets)
    warm = recipe.search.warmup_epochs
    parts = (
        ("warm-up", warm, step_ms["stage1_ms"]),
        ("search", recipe.search.epochs - warm, step_ms["search_ms"]),
        ("retraining", recipe.train.epochs, retrain_ms),
    )
    return [Phase(name, epochs, 1000 * step_ms["batch"] / ms) for name, epochs, ms in parts]


def hours(
    recipe: Recipe, step_ms: Mapping[str, float], gpus: int, images: int = IMAGES, loader: float = math.inf
) -> float:
    """Hours of the whole recipe if the GPUs scale perfectly and the loader gives so many images a second."""
    return sum(_hours_of(phase, gpus, images, loader) for phase in phases(recipe, step_ms))


def loader_rate(recipe: Recipe, step_ms: Mapping[str, float], gpus: int) -> float:
    """Images a second that the loader must give so that the GPUs never wait for it."""
    return gpus * max(phase.rate for phase in phases(recipe, step_ms))


def hours_table(
    benches: Sequence[Mapping[str, Any]], gpus: int, loader: float = math.inf, only: Sequence[str] = ("",)
) -> str:
    """The hours of recipes as a Markdown table, by the step times of benchmarks/bench.py; `only`: words in names."""
    lines = [
        "| recipe | warm-up, h | search, h | retraining, h | in all, h | loader must give, images/s |",
        "|---|---|---|---|---|---|",
    ]
    for name in names():
        if not any(word in name for word in only):
            continue
        recipe = find(name)
        times = _times_of(recipe, benches)
        cells = [f"{_hours_of(phase, gpus, IMAGES, loader):.1f}" for phase in phases(recipe, times)]
        cells += [f"{hours(recipe, times, gpus, IMAGES, loader):.1f}", f"{loader_rate(recipe, times, gpus):,.0f}"]
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _hours_of(phase: Phase, gpus: int, images: int, loader: float) -> float:
    if gpus < 1 or not loader > 0:
        raise DmcpError(f"Give at least one GPU and a loader of more than 0 images/s, not {gpus} and {loader}.")
    return phase.epochs * images / min(gpus * phase.rate, loader) / 3600


def _times_of(recipe: Recipe, benches: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """What was measured last of the recipe's own network; another width of it does not count."""
    name = " ".join([recipe.job.model, *recipe.job.model_args])
    found = [bench for bench in benches if " ".join([str(bench.get("model")), *bench.get("model_args", ())]) == name]
    if not found:
        raise DmcpError(f"No step times of {name}: measure them with benchmarks/bench.py, and give the file here too.")
    times: dict[str, float] = {}
    for key in ("batch", "plain_ms", "stage1_ms", "search_ms"):
        value = found[-1].get(key)
        if not isinstance(value, int | float) or not 0 < value < math.inf:
            raise DmcpError(f"The step times of {name} must have a {key} above 0, not {value!r}: measure them again.")
        times[key] = float(value)
    return times


def main(arguments: Sequence[str] | None = None) -> None:
    """python -m dmcp.running.recipes hours BENCH.json: print the table of hours."""
    parser = argparse.ArgumentParser(prog="python -m dmcp.running.recipes", description="How long the recipes take.")
    parser.add_argument("command", choices=["hours"])
    parser.add_argument("bench", nargs="+", type=Path, help="files that benchmarks/bench.py wrote, one per network")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--loader", type=float, default=math.inf, help="images a second that your loader gives")
    parser.add_argument("--only", nargs="*", default=[""], help="only recipes with one of these words in their names")
    given = parser.parse_args(arguments)
    try:
        benches = [step for data in map(read_json, given.bench) for step in data.get("steps", [data])]
        print(hours_table(benches, given.gpus, given.loader, given.only))
    except DmcpError as error:
        print(f"dmcp: {error}", file=sys.stderr)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
