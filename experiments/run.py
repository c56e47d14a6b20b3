"""Run an experiment: the variants of one settings file, each at its budgets and with its seeds.

    python experiments/run.py warmup --list             # its runs, and which are recorded in experiments/results
    python experiments/run.py warmup                    # do those that are not
    python experiments/run.py warmup --results mine     # do all of them, and record them in mine/warmup.json
    python experiments/run.py --table warmup            # a table of REPORT.md, from the recorded runs
    python experiments/run.py --report                  # write all tables into REPORT.md and docs

NAME is a file of experiments/settings, or the path of your own. What is done is kept in --out under a hash of its
settings: experiments share runs, and one that was stopped goes on with the next run.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import shlex
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import alphas
import bernoulli
import tables
import torch
from torch import nn

import dmcp
from dmcp import models
from dmcp.data import datasets
from dmcp.data import loaders as loaders_module

SETTINGS = Path(__file__).parent / "settings"
HELD_OUT = 0.1  # share of the training images, the same ones for all seeds
Run = dict[str, Any]  # all settings of one run, or what came out of it


# settings


def read_settings(path: Path) -> dict[str, Any]:
    """A settings file, on top of the one that it names as its base."""
    own = tomllib.loads(path.read_text())
    return _merge(read_settings(SETTINGS / f"{own.pop('base')}.toml"), own) if "base" in own else own


def _merge(base: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    both = {key: _merge(base[key], own[key]) for key in base.keys() & own.keys() if isinstance(own[key], dict)}
    return {**base, **own, **both}


def runs_of(settings: Mapping[str, Any]) -> Iterator[Run]:
    """Every variant at each of its budgets, seed by seed, with all settings written out."""
    keys = ("model", "model_args", "data", "batch", "draws", "search", "train")
    common = {"model_args": {}, "against": ""} | {key: settings[key] for key in keys if key in settings}
    for seed in range(settings["seeds"]):
        for variant in settings["variant"]:
            for budget in variant.get("budgets", settings["budgets"]) if variant["widths"] != "unpruned" else [""]:
                if seed in variant.get("seeds", [seed]):
                    one = _merge(common, {**variant, "seed": seed, "budget": budget})
                    one |= {key: one[key].format(budget=budget) for key in ("label", "against")}
                    yield one | {"name": "-".join(filter(None, (one["name"], budget, f"seed{seed}")))}


# one run


@dataclass(frozen=True)
class Problem:
    """The network with fresh weights and the data, by the settings of a run."""

    model: nn.Module
    graph: dmcp.ChannelGraph
    parts: Mapping[str, Any]  # images: all for training, those without the held-out ones, these alone, the test's
    settings: Run

    @staticmethod
    def open(it: Run) -> Problem:
        sets, device = datasets.load(it["data"]), "cuda" if torch.cuda.is_available() else "cpu"
        torch.manual_seed(it["seed"])
        model = models.build(it["model"], num_classes=sets.classes, **it["model_args"]).to(device)
        graph = _graph(it["model"], json.dumps(it["model_args"]), sets.classes, tuple(sets.shape))
        rest, held = datasets.split(sets.train, HELD_OUT, 0)
        parts = {"all": sets.train, "rest": rest, "held": held, "test": sets.test}
        return Problem(model, graph, parts, it)

    def loader(self, part: str, augmented: bool = True) -> Any:
        images, device = self.parts[part], next(self.model.parameters()).device
        batch = min(self.settings["batch"], len(images))
        return loaders_module.make_loader(images, batch, augmented, self.settings["seed"], device)


@functools.cache
def _graph(name: str, args: str, classes: int, shape: tuple[int, ...]) -> dmcp.ChannelGraph:
    return dmcp.trace(models.build(name, num_classes=classes, **json.loads(args)), torch.zeros(2, *shape))


def run_one(it: Run, out: Path) -> Run:
    """Choose widths, train that network from scratch, test it; or see what alphas do."""
    start, here = time.perf_counter(), Problem.open(it)
    found: Run = {}
    match it["widths"]:
        case "recover":
            loaders = here.loader("all"), here.loader("all", augmented=False)
            found |= alphas.recover(load_unpruned(it, out), here.graph, *loaders, it["seed"], it["recover"])
        case "distribution":
            found |= searched(it, out)["distribution"]
        case kind:
            widths: Any = (
                here.graph.full if kind == "unpruned" else dmcp.uniform(here.graph, it["budget"] or "100%", align=1)
            )
            if kind in ("dmcp", "direct"):
                chosen = searched(it, out)
                widths = here.graph.widths(chosen["drawn"][it["sampling"]] if kind == "direct" else chosen["widths"])
            net = load_unpruned(it, out) if kind == "unpruned" else train(here, widths, it, out)
            tested = dmcp.evaluate(net, here.loader("held" if it.get("held_out") else "test", augmented=False))
            found |= {"accuracy": tested, "own_accuracy": None, "widths": dict(widths)}
            found |= {"macs": here.graph.macs(widths), "params": here.graph.params(widths)}
    return found | {"seconds": time.perf_counter() - start, "device": str(next(here.model.parameters()).device)}


def searched(it: Run, out: Path) -> dict[str, Any]:
    """Widths of a search: the expected ones and, if asked for, some that are drawn."""
    keys = ("model", "model_args", "data", "batch", "budget", "search", "alphas_held_out", "draws")
    own: Run = {key: it.get(key) for key in keys} | {"seed": it.get("search_seed", it["seed"])}
    own |= {"start": it["train"]} if it.get("start") == "unpruned" else {}
    own |= {"gates": it["gates"]} if "gates" in it else {}

    def make() -> dict[str, Any]:
        here = Problem.open(own)
        usual = it | {"seed": own["seed"], "held_out": None}
        model = load_unpruned(usual, out) if "start" in own else here.model
        config = dmcp.SearchConfig(budget=own["budget"], seed=own["seed"], align=1, **own["search"])
        parts = [here.loader("rest"), here.loader("held")] if own["alphas_held_out"] else [here.loader("all"), None]
        net = dmcp.Supernet(model, here.graph, config.groups, config.align)
        if own.get("gates") == "bernoulli":  # they have no chain to draw from
            _, widths = bernoulli.search(net, parts[0], config, arch_loader=parts[1])
            return {"widths": dict(widths), "drawn": []}
        found = dmcp.search(net, parts[0], config, arch_loader=parts[1])
        random = torch.Generator().manual_seed(own["seed"])
        drawn = dmcp.direct(found, own["draws"], random) if own["draws"] else []
        chosen = {"widths": dict(dmcp.expected(found)), "drawn": [*map(dict, drawn)]}
        return chosen | {"distribution": alphas.drawn(found, own["seed"])}

    return kept(out, {"search": own}, make)


def train(here: Problem, widths: Any, it: Run, out: Path) -> nn.Module:
    """A network of these widths, trained from scratch; a distilled one has the unpruned network as its teacher."""
    small = dmcp.cut(here.model, here.graph, widths)
    dmcp.reinitialize(small, generator=torch.Generator().manual_seed(it["seed"]))
    teacher = load_unpruned(it, out) if "distilled" in it else None
    config = dmcp.TrainConfig(seed=it["seed"], **{**it["train"], **it.get("distilled", {})})
    dmcp.train(small, here.loader("rest" if it.get("held_out") else "all"), config, teacher=teacher)
    return small


def load_unpruned(it: Run, out: Path) -> nn.Module:
    """The unpruned network of the same recipe and seed, trained if nobody has done it before."""
    keys = ("model", "model_args", "data", "batch", "train", "seed", "held_out")
    own: Run = {key: it.get(key) for key in keys}
    folder, here = out / _hash({"unpruned": own}), Problem.open(own)
    if not (folder / "widths.json").exists():  # written last
        dmcp.save(train(here, here.graph.full, own, out), here.graph.full, folder)
    return dmcp.load(folder, here.model).to(next(here.model.parameters()).device)


# what is kept


def kept(out: Path, settings: Run, make: Callable[[], Run]) -> Run:
    """What these settings have led to before, or now."""
    path = out / f"{_hash(settings)}.json"
    if not path.exists():
        _write(path, make())
    return dict(json.loads(path.read_text()))


def _hash(settings: Run) -> str:
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def _write(path: Path, plain: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(plain, indent=1) + "\n")
    part.replace(path)


def run_experiment(path: Path, results: Path, out: Path, only_list: bool = False) -> None:
    """Do the runs that the results have not, one after the other; the results are written after each."""
    settings, file = read_settings(path), results / f"{path.stem}.json"
    if "compare" in settings:
        words = ["compare", *shlex.split(settings["compare"]), "--out", str(out / path.stem), "--json", "--quiet"]
        print(shlex.join(["dmcp", *words]) + (f": recorded in {file}" if file.exists() else ""))
        if not file.exists() and not only_list:
            done = subprocess.run(
                [sys.executable, "-P", "-m", "dmcp", *words], check=True, stdout=subprocess.PIPE, text=True
            )
            _write(file, json.loads(done.stdout))
        return
    recorded = json.loads(file.read_text()) if file.exists() else {"cells": []}
    known = {(found["label"], found["name"]): found for found in recorded["cells"]}
    runs = [*runs_of(settings)]
    left = [it for it in runs if (it["label"], it["name"]) not in known]
    for it in runs:
        print(f"{'missing ' if it in left else 'recorded'} {it['name']}: {it['label']}")
    print(f"{len(runs) - len(left)} of {len(runs)} runs are recorded in {file}.")
    if only_list or not left:
        return
    if known and "variant" not in recorded.get("settings", {}):
        sys.exit(f"{file} was not written by this script, and is not changed: give another --results.")
    macs = Problem.open(runs[0] | {"model_args": settings.get("model_args", {})}).graph.macs()
    for it in left:
        key, own = (
            (it["label"], it["name"]),
            {part: it[part] for part in it if part not in ("label", "name", "against")},
        )
        found = kept(out, {"run": own}, lambda it=it: run_one(it, out))
        known[key] = {"label": it["label"], "seed": it["seed"], "name": it["name"], **found}
        done = [(one, known[key]) for one in runs if (key := (one["label"], one["name"])) in known]
        rows, cells = tables.rows_of(done), [found for _, found in done]
        _write(file, {"experiment": path.stem, "settings": settings, "macs": macs, "rows": rows, "cells": cells})
        print(f"{it['name']}: {found.get('accuracy', 'done')}", flush=True)


def main() -> None:
    """What is asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help="experiments: files of experiments/settings, or paths of your own")
    parser.add_argument("--results", type=Path, default=tables.RESULTS, help="folder of what is recorded")
    parser.add_argument("--out", type=Path, default=Path("runs/experiments"), help="folder of what is kept meanwhile")
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--table", metavar="NAME", help="print the table of a results file")
    parser.add_argument("--report", action="store_true", help="write all tables into REPORT.md and docs")
    args = parser.parse_args()
    if args.report:
        for page in (tables.REPORT, tables.PAGE):
            page.write_text(tables.filled(page.read_text()))
    if args.table:
        print(tables.table_of(args.table, args.results), end="")
    for name in args.name:
        path = Path(name) if name.endswith(".toml") else SETTINGS / f"{name}.toml"
        run_experiment(path, args.results, args.out, args.list)


if __name__ == "__main__":
    main()
