"""The golden check: two checkouts compute the same bits on this machine.

    python tools/golden.py --base PATH            # a checkout to compare this one with
    python tools/golden.py --base PATH --quick    # fewer nets and settings
    python tools/golden.py --write-structure      # the part that `make test` keeps

One probe runs in both checkouts, with explicit settings; what it finds is compared, and nothing is stored. Where names
differ between the checkouts, SPELLINGS, PLACES, BUNDLES, ROWS and RETRAIN have both, the newest first: each checkout is
asked for one after the other. A name that is in neither is reported as an error of its case.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

import dmcp

ROOT = Path(__file__).resolve().parent.parent
STRUCTURE = ROOT / "tests" / "fixtures" / "structure.json"

# ---- names: what the probe says -> how checkouts spell it, the newest first

SPELLINGS = {  # of parameters, fields, attributes and keys
    "unprunable": ("unprunable", "whole"),
    "ignore": ("ignore", "frozen"),
    "min_channels": ("min_channels", "smallest"),
    "max_channels": ("max_channels", "largest"),
    "baselines": ("baselines", "controls"),
    "checkpointer": ("checkpointer", "keeper"),  # of search and train
    "checkpoint": ("checkpoint", "checkpointer", "keep"),  # of prune: stage -> checkpointer
    "Checkpointer": ("Checkpointer", "Keeper"),
    "reinitialize": ("reinitialize", "reinitialise"),
    "kd_weight": ("kd_weight", "teacher_share"),
    "kd_temperature": ("kd_temperature", "teacher_temperature"),
    "sampling": ("sampling", "sample", "draw"),  # of SearchConfig: how sub-networks are drawn
    "warmup_sampling": ("warmup_sampling", "warmup_sample", "warmup_draw"),
    "distill": ("distill", "distil"),
    "stop_requested": ("stop_requested", "should_stop", "asked_to_stop"),
    "held_out": ("held_out", "holdout", "held"),  # of a method's problem: batches to choose by
    "on_event": ("on_event", "log", "tell"),  # of a method's problem: hears (stage, record)
    "min_widths": ("min_widths", "min_channels", "floor"),  # of a method's problem, and of uniform and random_widths
}
PLACES = {  # module:name of what `import dmcp` does not give
    "build": ("dmcp.models:build", "dmcp.nets:build"),
    "load_data": ("dmcp.data.datasets:load", "dmcp.data:load"),
    "split": ("dmcp.data.datasets:split", "dmcp.data:split"),
    "make_loader": ("dmcp.data.loaders:make_loader", "dmcp.data:make_loader"),
    "METHODS": ("dmcp.compare.methods:METHODS", "dmcp.methods:METHODS"),
    "Problem": ("dmcp.compare.problem:Problem", "dmcp.methods.problem:Problem"),
    "sfp": ("experiments.methods.soft:sfp",),  # before they were in METHODS
    "fpgm": ("experiments.methods.soft:fpgm",),
    "amc": ("experiments.methods.amc:amc",),
    "metapruning": ("experiments.methods.metapruning:metapruning",),
    "DdpgConfig": ("experiments.methods.amc:DdpgConfig", "dmcp.compare.amc:DdpgConfig", "dmcp.methods.ddpg:DdpgConfig"),
    "Task": ("dmcp.training.loop:Task", "dmcp.training:Task", "dmcp.preflight:Task"),
    "Runtime": (
        "dmcp.runtime.engine:Runtime",
        "dmcp.runtime:Runtime",
        "dmcp.training.loop:Runtime",
        "dmcp.training:Runtime",
    ),
}
BUNDLES = {  # a parameter that may have moved into an object: (parameter, what makes the object)
    "engine": ("runtime", "Runtime"),
    "checkpointer": ("runtime", "Runtime"),
    "checkpoint": ("runtime", "Runtime"),
    "on_event": ("runtime", "Runtime"),
}
ROWS = {"ours": "dmcp", "uniform widths": "uniform", "as given": "original"}  # old names of rows -> new ones
RETRAIN = {  # what prune is told: now, and before "finetune" was a word
    "scratch": ({"retrain": "scratch"}, {"retrain": "scratch"}),
    "finetune": ({"retrain": "finetune"}, {"retrain": "inherit"}),
    "slimmable": ({"retrain": "slimmable"}, {"retrain": "slimmable"}),
    "teacher": ({"retrain": "scratch", "teacher": "given"}, {"retrain": "teacher", "teacher": "given"}),
    "trained_first": ({"retrain": "scratch", "teacher": "unpruned"}, {"retrain": "teacher"}),
    "finetune_teacher": ({"retrain": "finetune", "teacher": "given"}, {"retrain": "inherit", "teacher": "given"}),
}


def get(owner: Any, name: str) -> Any:
    """An attribute or key by any of its spellings."""
    for spelling in SPELLINGS.get(name, (name,)):
        if isinstance(owner, Mapping) and spelling in owner:
            return owner[spelling]
        if not isinstance(owner, Mapping) and hasattr(owner, spelling):
            return getattr(owner, spelling)
    raise LookupError(f"{getattr(owner, '__name__', type(owner).__name__)} has no {name}: see SPELLINGS")


def place(name: str) -> Any:
    """What is at the first of its places that exists."""
    for spot in PLACES[name]:
        module, _, attribute = spot.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except (ImportError, AttributeError):
            continue
    raise LookupError(f"{name} is at none of {', '.join(PLACES[name])}: see PLACES")


def call(function: Callable[..., Any], *args: Any, **settings: Any) -> Any:
    """Call it with settings by any of their spellings."""
    known, given, bundles = inspect.signature(function).parameters, {}, dict[tuple[str, str], dict[str, Any]]()
    open_ended = any(it.kind is it.VAR_KEYWORD for it in known.values())
    for name, value in settings.items():
        spelling = next((it for it in SPELLINGS.get(name, (name,)) if it in known), name if open_ended else None)
        if spelling is not None:
            given[spelling] = value
        elif name in BUNDLES and BUNDLES[name][0] in known:
            bundles.setdefault(BUNDLES[name], {})[name] = value
        else:
            raise LookupError(f"{function.__name__} has no parameter {name}: see SPELLINGS and BUNDLES")
    for (parameter, maker), parts in bundles.items():
        given[parameter] = call(place(maker), **parts)
    return function(*args, **given)


def retrain(name: str, teacher: nn.Module) -> dict[str, Any]:
    """How prune is told to retrain."""
    new, old = RETRAIN[name]
    chosen = new if "finetune" in list(dmcp.Retrain) else old
    return {key: teacher if value == "given" else value for key, value in chosen.items()}


# ---- settings: all of them explicit

# fmt: off
ENGINE = {"precision": "float32", "channels_last": False, "compile": False, "graphs": False, "kernels": False,
          "tf32": False, "deterministic": False, "sync_batchnorm": False}
SEARCH = {"budget": "50%", "tolerance": 0.995, "groups": 8, "align": 1, "min_channels": {}, "max_channels": {},
          "epochs": 2, "warmup": 0.5, "sort": False, "subnets": 2, "sampling": "markov", "warmup_sampling": "uniform",
          "distill": True, "init": "target", "task_loss": True, "budget_weight": 0.1,
          "train_weights": True, "lr": 0.3, "min_lr": 0.03, "reference_batch": 16, "momentum": 0.9,
          "weight_decay": 1e-4, "label_smoothing": 0.1, "alpha_lr": 2.0, "alpha_min_lr": 0.5, "alpha_momentum": 0.9,
          "accumulate": 1, "log_every": 4, "seed": 0}
TRAIN = {"epochs": 2, "lr": 0.2, "reference_batch": 16, "warmup_epochs": 0.5, "warmup_lr": 0.05, "min_lr": 0.0,
         "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4, "label_smoothing": 0.1, "seed": 0}
COMMAND = {"budget": "60%", "search_epochs": 2, "warmup": 0.5, "epochs": 1, "batch": 16, "train_batch": 16, "lr": 2.0,
           "search_lr": 1.0, "weight_decay": 1e-4, "label_smoothing": 0.1, "groups": 5, "align": 2, "min_channels": 4,
           "max_channels": "layer3=48", "ignore": "layer1.0.conv1", "retrain": "slimmable", "seed": 3,
           "device": "cpu", "precision": "float32"}
SEARCHES: dict[str, dict[str, Any]] = {
    "default": {},
    "mixed": {"net": "mixed", "sort": True, "init": "random", "budget": "60%,params:70%"},
    "arch_loader": {"arch_loader": True},
    "no distillation": {"distill": False},
    "another seed": {"seed": 7},
    "accumulate": {"accumulate": 2, "epochs": 4, "init": "zero", "sampling": "uniform", "budget": "5%"},
    "fixed weights": {"train_weights": False, "align": 4},
    "channels": {"min_channels": {"layer2": 12}, "max_channels": 40, "budget": "memory:80%"},
}
METHODS: dict[str, dict[str, Any]] = {
    "l1": {"power": 1},
    "sfp": {"every": 1, "regrowth": 0.01},
    "fpgm": {"every": 1, "regrowth": 0.1},
    "slimming": {"sparsity": 1e-3},
    "autoslim": {"epochs": 1, "groups": 4, "subnets": 1, "distill": True, "lr_share": 0.5, "batches": 1},
    "amc": {"warmup": 3, "episodes": 4, "noise": 0.5, "last_noise": 0.01, "batches": 1},
    "metapruning": {"hidden": 4, "groups": 8, "epochs": 1, "population": 8, "generations": 4, "parents": 4,
                    "mutation": 0.2, "crossed": 0.5, "batches": 4},
}
AGENT = {"hidden": 8, "actor_lr": 1e-3, "critic_lr": 1e-2, "soft": 0.01, "discount": 1.0, "memory": 100, "batch": 8,
         "baseline": 0.95}
NETS: dict[str, tuple[int, ...]] = {  # shape of a sample; the first FEW are those of the stored structure
    "digits:resnet": (1, 8, 8), "mixed": (1, 8, 8), "cifar:resnet20": (3, 32, 32), "cifar:mobilenet_v2": (3, 32, 32),
    **dict.fromkeys(("resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5", "googlenet", "squeezenet1_1",
                     "efficientnet_b0", "timm:res2net50_26w_4s", "timm:resnest14d", "timm:convnext_atto"), (3, 64, 64)),
}
FEW = 4
# fmt: on


class Mixed(nn.Module):
    """A residual sum, depthwise and grouped layers, squeeze-excite, a concatenation, an int that follows a width."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn1 = nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.depthwise, self.bn2 = nn.Conv2d(16, 16, 3, 1, 1, groups=16, bias=False), nn.BatchNorm2d(16)
        self.point, self.bn3 = nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16)
        self.squeeze, self.excite = nn.Conv2d(16, 4, 1), nn.Conv2d(4, 16, 1)
        self.left, self.right = nn.Conv2d(16, 12, 3, 2, 1), nn.Conv2d(16, 24, 3, 2, 1, groups=4)
        self.mixed, self.bn4 = nn.Conv2d(36, 20, 1, bias=False), nn.BatchNorm2d(20)
        self.half = 10
        self.fc = nn.Linear(10 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.stem(x)))
        x = x + self.bn3(self.point(F.relu(self.bn2(self.depthwise(x)))))
        x = x * torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        x = self.bn4(self.mixed(torch.cat([F.relu(self.left(x)), F.relu(self.right(x))], dim=1)))
        one, two = torch.split(x, self.half, dim=1)
        out: Tensor = self.fc((F.relu(one) * torch.sigmoid(two)).flatten(1))
        return out


def build(name: str, seed: int = 0) -> nn.Module:
    """A network of ten classes, every tensor of it random: a gate at the wrong place changes the output."""
    torch.manual_seed(seed)
    model: nn.Module = Mixed() if name == "mixed" else place("build")(name, num_classes=10)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point():
                tensor += 0.05 * torch.rand_like(tensor)
    return model


# ---- digests


def bits(tensor: Tensor) -> str:
    """A hash of dtype, shape and raw bytes."""
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(head + raw).hexdigest()[:16]


def all_bits(value: Any) -> Any:
    """The same for the tensors of a module, or inside tuples, lists and dicts; other values as they are."""
    if isinstance(value, nn.Module):
        return {name: bits(tensor) for name, tensor in (*value.named_parameters(), *value.named_buffers())}
    if isinstance(value, Mapping):
        return {str(key): all_bits(part) for key, part in value.items()}
    if isinstance(value, (tuple, list)):
        return [all_bits(part) for part in value]
    return bits(value) if isinstance(value, Tensor) else value


def terms(polynomial: Mapping[tuple[int, ...], int]) -> list[Any]:
    return sorted([list(key), factor] for key, factor in polynomial.items())


def structure(graph: Any) -> dict[str, Any]:
    """What was traced, in integers and names."""

    def folds(found: Any) -> list[Any]:
        names = [space.name for space in graph.spaces]
        named = lambda axis: axis if isinstance(axis, int) else names[axis.index]  # noqa: E731
        return [[it.tensor, it.dim, [[named(axis) for axis in part] for part in it.layout]] for it in found]

    sizes = [space.size for space in graph.spaces]
    points = [sizes, [-(-size // 2) for size in sizes], [max(1, size // 3) for size in sizes]]
    found: dict[str, Any] = {"spaces": [[it.name, it.size, it.unit, it.writers, it.readers] for it in graph.spaces]}
    found |= {"unprunable": [[it.name, it.size] for it in get(graph, "unprunable")]}
    found |= {"bindings": [[it.module, it.attribute, it.value, it.follows] for it in graph.bindings]}
    found |= {"unknown": dict(graph.unknown), "exact": graph.exact, "fingerprint": graph.fingerprint}
    found |= {"hard_folds": folds(graph.hard_folds), "soft_folds": folds(graph.soft_folds)}
    for kind in ("macs", "params", "memory"):
        found[kind] = [getattr(graph, kind)(graph.widths(point)) for point in points]
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def write_structure() -> None:
    lines = (f'"{name}": {json.dumps(structure(traced(name)[1]))}' for name in list(NETS)[:FEW])
    STRUCTURE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def traced(name: str, **how: Any) -> tuple[nn.Module, Any]:
    model = build(name)
    return model, call(dmcp.trace, model, torch.zeros(2, *NETS[name]), **how)


# ---- the probe: cases by name, each gives plain data

Case = Callable[[], Any]


def cases(quick: bool) -> dict[str, dict[str, Case]]:
    """All cases by section, or the first few of each."""
    seeds: dict[str, Case] = {f"digits seed {it}": partial(digit_batches, 1024, it) for it in (0, 3)}
    seeds |= {f"folder seed {it}": partial(folder_batches, True, it) for it in (0, 3)}
    found: dict[str, dict[str, Case]] = {
        "trace": {
            **{name: partial(trace_case, name) for name in NETS},
            "ignored layers": lambda: structure(traced("digits:resnet", ignore=["layer2", "conv1"])[1]),
            "inexact": lambda: structure(traced("timm:convnext_atto", exact=False)[1]),
        },
        "search": {name: partial(search_case, **settings) for name, settings in SEARCHES.items()},
        "prune": {way: partial(pruned, way) for way in RETRAIN} | {"command line": command_line},
        "resume": {  # of prune 10 batches are of the search, then 10 of each of 3 trainings
            "search": lambda: interrupted(search_case, digits(), kills=(8, 7)),
            "prune": lambda: interrupted(partial(pruned, "scratch"), digits(80), kills=(10, 24)),
        },
        "batches": seeds | {
            "digits test": partial(digit_batches, 300, 0, train=False),
            "folder test": partial(folder_batches, False, 0),
            "holdout": holdout,
        },
        "sampling": {
            "macs": partial(sampled, "digits:resnet", "50%"),
            "several": partial(sampled, "mixed", "60%,params:60%"),
        },
        "methods": {name: partial(method_case, name) for name in METHODS},
    }  # fmt: skip
    few = {"trace": FEW, "search": 2, "prune": 2, "resume": 1, "sampling": 1, "methods": 2}
    return {key: dict(islice(own.items(), few.get(key) if quick else None)) for key, own in found.items()}


def trace_case(name: str) -> Any:
    model, graph = traced(name)
    found, plain, draw = structure(graph), graph.to_json(), torch.Generator().manual_seed(0)
    keys = ("macs", "params", "memory", "memory_at", "prunable_share", "input_shape", "fingerprint", "unknown")
    found["json"] = [[get(plain, key) for key in keys], [[it["name"], it["share"]] for it in plain["spaces"]]]
    found["json"] += [[it["name"], it["size"]] for it in get(plain, "unprunable")]
    found["terms"] = [[it.name, terms(it.macs), terms(it.params)] for it in get(graph, "entries")]
    found["moments"] = [[it.name, terms(it.terms)] for it in get(graph, "moments")]
    many = (torch.rand(5, len(graph.spaces), generator=draw) * graph.full.tensor()).long() + 1
    points = [graph.widths(row) for row in many]
    between = (many - 0.5).clamp(min=1)  # widths that are not whole, as expected ones are
    for kind in ("macs", "params", "memory"):
        cost = getattr(graph, kind)
        found[f"random {kind}"] = [[cost(widths) for widths in points], bits(cost(many)), bits(cost(between))]
    found["cuts"] = [all_bits(graph.cuts(widths)) for widths in points[:2]]
    found["attributes"] = [[[key, repr(sorted(value.items()))] for key, value in sorted(graph.attributes(it).items())]
                           for it in points]  # fmt: skip
    found["cut"] = all_bits(dmcp.cut(model, graph, points[0]))
    net, x = dmcp.Supernet(model, graph, groups=5, align=1), torch.rand(2, *NETS[name], generator=draw)
    with torch.no_grad():
        net.alpha.copy_(torch.randn(net.alpha.shape, generator=draw))
        for mode in (True, False):
            net.train(mode)
            torch.manual_seed(0)  # of dropout
            found[f"gated, train={mode}"] = all_bits([net(x, gates) for gates in (net.hard(points[0]), net.soft())])
    return found


def digits(images: int = 160, batch: int = 16, seed: int = 0, first: int = 0, train: bool = True) -> Any:
    """A loader of some digits."""
    data = place("load_data")("digits")
    chosen = (data.train if train else data.test).subset(torch.arange(first, first + images))
    return call(place("make_loader"), chosen, batch_size=batch, train=train, seed=seed)


def searched(
    net: str = "digits:resnet", arch_loader: bool = False, loader: Any = None, checkpointer: Any = None, **settings: Any
) -> tuple[Any, Any]:
    """A search of 20 steps on digits: what it found, and its supernet."""
    model, graph = traced(net)
    config = call(dmcp.SearchConfig, **SEARCH | settings)
    supernet = dmcp.Supernet(model, graph, groups=config.groups, align=config.align)
    more = {"arch_loader": digits(first=640, seed=3)} if arch_loader else {}
    more |= {} if checkpointer is None else {"checkpointer": checkpointer}
    engine = call(dmcp.Engine, **ENGINE)
    return call(dmcp.search, supernet, loader or digits(), config, engine=engine, **more), supernet


def search_case(loader: Any = None, checkpoint: Any = None, **settings: Any) -> dict[str, Any]:
    found, net = searched(loader=loader, checkpointer=checkpoint and checkpoint("search"), **settings)
    names = ("step", "epoch", "lr", "weight_losses", "alpha_lr", "task_loss", "budget_loss", "ratios")
    log = {} if checkpoint else {"log": [[get(it, name) for name in names] for it in found.log]}
    plain = {"alphas": bits(found.alphas), "alpha": bits(net.alpha), "sizes": found.sizes.tolist()}
    return plain | {"weights": all_bits(net.model), "expected": dict(dmcp.expected(found))} | log


PARAMETERS = inspect.signature(dmcp.prune).parameters


def pruned(way: str, loader: Any = None, checkpoint: Any = None) -> dict[str, Any]:
    model, graph = traced("digits:resnet")
    told = retrain(way, build("mixed", seed=5))
    if "auto" in str(PARAMETERS["teacher"].default):  # since then somebody teaches unless nobody is to
        told = {"teacher": None} | told
    learns = (
        {"kd_weight": 0.7, "kd_temperature": 3.0} if "teacher" in way else {"kd_weight": 0.5, "kd_temperature": 1.0}
    )
    taught = learns if "teacher" in way or way == "trained_first" else {}
    told |= {"search": call(dmcp.SearchConfig, **SEARCH), "train": call(dmcp.TrainConfig, **TRAIN | taught)}
    told |= {"baselines": True, "graph": graph, "engine": call(dmcp.Engine, **ENGINE)}
    if checkpoint is not None:  # now one checkpointer, which gives each stage its own
        told |= {"checkpointer": checkpoint("")} if "runtime" in PARAMETERS else {"checkpoint": checkpoint}
    result = call(dmcp.prune, model, loader or digits(80), digits(300, 100, train=False), **told)
    rows = [[ROWS.get(it.name, it.name), it.macs, it.params, it.accuracy, it.samples] for it in result.rows]
    rows = [row for row in rows if row[0] != "original"]  # a row of trained models only, since then
    found = {"rows": rows, "widths": dict(result.widths), "model": all_bits(result.model)}
    return found | {"alphas": bits(result.search.alphas)}


def command_line() -> Any:
    """The command on shards of random images; its options by any of their spellings."""
    command = [sys.executable, "-m", "dmcp", "prune"]
    known = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        for part, count in (("train", 128), ("test", 40)):
            images = draw.integers(0, 256, (count, 8, 8, 1), dtype=np.uint8)
            np.savez(Path(folder) / f"{part}-0.npz", images=images, labels=np.arange(count) % 10)
        command += ["--model", "digits:resnet", "--data", folder, "--out", f"{folder}/out"]
        for name, value in (COMMAND | {"baselines": None}).items():
            words = [f"--{it.replace('_', '-')}" for it in SPELLINGS.get(name, (name,))]
            word = next((it for it in words if f" {it} " in known), None)
            if word is None:
                raise LookupError(f"dmcp prune has none of {', '.join(words)}: see SPELLINGS")
            command += [word] if value is None else [word, str(value)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        assert done.returncode == 0, done.stderr[-400:]
        (widths,) = Path(folder, "out").rglob("widths.json")
        tensors = all_bits(load_file(widths.with_name("model.safetensors")))
        return {"widths": json.loads(widths.read_text())["widths"], "model": tensors}


class KilledError(Exception):
    """Raised in the place of a batch."""


class Dying:
    """A loader that fails after some batches."""

    def __init__(self, loader: Any, after: int) -> None:
        self.loader, self.left = loader, iter(range(after))

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if next(self.left, None) is None:
                raise KilledError
            yield batch


def interrupted(run: Callable[..., Any], loader: Any, kills: tuple[int, ...]) -> Any:
    """What a run gives that was killed after so many batches, each time begun again from its checkpoints."""
    with tempfile.TemporaryDirectory() as folder:

        def checkpoint(stage: str) -> Any:
            return call(get(dmcp, "Checkpointer"), Path(folder) / stage, every_steps=3, every_seconds=1e6)

        for after in kills:
            try:
                run(loader=Dying(loader, after), checkpoint=checkpoint)
            except KilledError:
                assert any(Path(folder).rglob("*.safetensors")), "killed before the first checkpoint"
            else:
                raise AssertionError(f"not killed after {after} batches")
        again, whole = run(loader=loader, checkpoint=checkpoint), run(loader=loader)
    odd = [it for it in differences(again, whole) if not it.startswith("/log:")]  # begins where it was resumed
    assert not odd, f"resumed -> unbroken: {odd[:3]}"
    return again


def batches(loader: Any) -> dict[str, Any]:
    found: dict[str, Any] = {"length": len(loader)}
    for epoch in (0, 2):
        loader.set_epoch(epoch)
        every = list(loader)
        found |= {f"epoch {epoch} index {index}": all_bits(every[index]) for index in (0, 1, -1)}
    return found


def digit_batches(images: int, seed: int, train: bool = True) -> Any:
    return batches(digits(images, 100, seed, train=train))


def holdout() -> list[Any]:
    parts = place("split")(place("load_data")("digits").train, 0.2, 1)
    return [batches(call(place("make_loader"), part, batch_size=64, train=False, seed=0)) for part in parts]


def folder_batches(train: bool, seed: int) -> Any:
    """Image files of random pixels and sizes."""
    draw = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as path:
        for part, label, number in product(("train", "val"), ("cat", "dog"), range(8)):
            file = Path(path, part, label, f"{number}.png")
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = draw.integers(0, 256, (*draw.integers(40, 70, 2), 3), dtype=np.uint8)
            Image.fromarray(pixels).save(file)
        data = place("load_data")(path, size=32)
        chosen = data.train if train else data.test
        return batches(call(place("make_loader"), chosen, batch_size=4, train=train, seed=seed))


def sampled(name: str, budget: str) -> Any:
    """Widths of fixed alphas, and baselines."""
    found, _ = searched(net=name, budget=budget, loader=digits(16))
    alphas = torch.linspace(-1, 3, found.alphas.numel()).view_as(found.alphas)
    fixed, graph = replace(found, alphas=alphas), found.graph
    least = {space.name: 2 for space in graph.spaces}
    draw = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    chosen = [dmcp.expected(fixed), dmcp.expected(fixed, align=4)]
    chosen += dmcp.direct(fixed, n=5, generator=draw[0], tries=100_000)
    for wish in (budget, "70%"):
        chosen.append(call(dmcp.uniform, graph, wish, min_widths=least, align=2, tolerance=0.9))
        more = {"min_widths": least, "align": 1, "tolerance": 0.95}
        chosen.append(call(dmcp.random_widths, graph, wish, generator=draw[1], **more))
    return [dict(widths) for widths in chosen]


def method_case(name: str) -> Any:
    """What a method of `compare` chooses on digits."""
    model, graph = traced("digits:resnet")
    least = graph.widths([max(1, space.size // 8) for space in graph.spaces])
    given: dict[str, Any] = {"model": model, "graph": graph, "loader": digits(), "align": 1, "seed": 2}
    given |= {"held_out": list(digits(64, first=1000)), "budget": dmcp.parse_budget("50%", graph)}
    heard: list[Any] = []  # rewards of episodes and the like; the records of trainings are seen in the weights

    def hear(*event: Any) -> None:
        record = getattr(event[-1], "record", event[-1])
        heard.append([*record.values()] if isinstance(record, dict) else 0)

    given |= {"on_event": hear}
    given |= {"recipe": call(dmcp.TrainConfig, **TRAIN), "engine": call(dmcp.Engine, **ENGINE)}
    problem, table = call(place("Problem"), **given, min_widths=least), place("METHODS")
    method = table[name] if name in table else place(name)
    agent = {"agent": call(place("DdpgConfig"), **AGENT)} if name == "amc" else {}
    config = call(method.config, **METHODS[name], **agent)
    prepares = method.prepare and name != "amc"  # which once had no prepare
    state = method.prepare(problem, config).state if prepares else model.state_dict()
    choice = method.find(problem, config, state)
    found = {"widths": dict(choice.widths), "passes": choice.sample_passes, "model": all_bits(choice.model)}
    found |= {"heard": [it for it in heard if it]}
    return found | {"kept": {key: str(list(it)) if hasattr(it, "__iter__") else it for key, it in choice.kept.items()}}


def probe(sections: list[str], quick: bool, stem: bool) -> dict[str, Any]:
    """All cases in this process; what fails is an error of its case."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not stem:
        for name in ("dmcp.searching.steps", "dmcp.searching.search"):
            with suppress(ImportError):
                importlib.import_module(name).find_stem = lambda net: None  # type: ignore[attr-defined]
    found: dict[str, Any] = {"seconds": {}}
    every = cases(quick)
    for section in sections:
        start = time.monotonic()
        for name, case in every[section].items():
            try:
                found[f"{section}/{name}"] = {"": case()}
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                found[f"{section}/{name}"] = {"error": f"{type(error).__name__}: {error} ({where.name}:{where.lineno})"}
        found["seconds"][section] = time.monotonic() - start
    return found


# ---- the comparison


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Where two pieces of plain data differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            if key not in one or key not in other:
                yield f"{path}/{key}: only in {'base' if key in one else 'head'}"
            else:
                yield from differences(one[key], other[key], f"{path}/{key}" if key else path)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{path}/{place}")
    elif one != other and not (one != one and other != other):
        yield f"{path}: {one!s:.60} -> {other!s:.60}"


def run(checkout: Path, options: list[str], folder: str, name: str) -> dict[str, Any]:
    """The probe in another process."""
    out = Path(folder) / f"{name}.json"
    source = str(checkout.resolve() / "src")
    path = f"{source}{os.pathsep}{checkout.resolve()}"  # the second for experiments/
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, __file__, "--probe", str(out), *options], env=env, cwd=folder, check=True)
    found: dict[str, Any] = json.loads(out.read_text())
    if not found.pop("from").startswith(source):
        raise SystemExit(f"{name} was not imported from {source}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, help="checkout to compare with")
    parser.add_argument("--head", type=Path, default=ROOT, help="checkout that is compared (this one)")
    parser.add_argument("--quick", action="store_true", help="fewer nets and settings")
    parser.add_argument("--only", nargs="+", choices=cases(True), default=list(cases(True)), help="sections to run")
    parser.add_argument("--jobs", type=int, choices=(1, 2), default=1, help="2: both checkouts at once")
    parser.add_argument("--no-stem", action="store_true", help="switch the stem off where there is one")
    parser.add_argument("--show", type=int, default=5, help="differences shown of each case")
    parser.add_argument("--write-structure", action="store_true", help=f"write {STRUCTURE.relative_to(ROOT)}")
    parser.add_argument("--probe", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.write_structure:
        write_structure()
        return 0
    if asked.probe:
        found = probe(asked.only, asked.quick, not asked.no_stem) | {"from": str(dmcp.__file__)}
        asked.probe.write_text(json.dumps(found))
        return 0
    if not asked.base:
        parser.error("--base is needed")
    options = ["--only", *asked.only, *["--quick"] * asked.quick, *["--no-stem"] * asked.no_stem]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(asked.jobs) as pool:
        places = ((asked.base, "base"), (asked.head, "head"))
        base, head = pool.map(lambda it: run(it[0], options, folder, it[1]), places)
    seconds = [found.pop("seconds") for found in (base, head)]
    failed = 0
    for case in {**base, **head}:
        pair = base.get(case, {}), head.get(case, {})
        odd = [f" {name}: {it['error']}" for name, it in zip(("base", "head"), pair, strict=True) if "error" in it]
        odd = odd or list(differences(*pair))
        failed += bool(odd)
        for line in odd[: asked.show]:
            print(f"{case}{line}")
        if len(odd) > asked.show:
            print(f"{case}: and {len(odd) - asked.show} more")
    times = "; ".join(f"{it} {seconds[0][it]:.0f} + {seconds[1][it]:.0f} s" for it in seconds[0])
    print(f"{len({**base, **head}) - failed} cases equal, {failed} not ({times})")
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
