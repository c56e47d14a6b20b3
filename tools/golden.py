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
import itertools
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
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
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
    "min_widths": ("min_widths", "floor"),  # of a method's problem, and of uniform and random_widths
}
PLACES = {  # module:name of what `import dmcp` does not give
    "build": ("dmcp.models:build", "dmcp.nets:build"),
    "load_data": ("dmcp.data.datasets:load", "dmcp.data:load"),
    "split": ("dmcp.data.datasets:split", "dmcp.data:split"),
    "make_loader": ("dmcp.data.loaders:make_loader", "dmcp.data:make_loader"),
    "METHODS": ("dmcp.compare.methods:METHODS", "dmcp.methods:METHODS"),
    "Problem": ("dmcp.compare.problem:Problem", "dmcp.methods.problem:Problem"),
    "DdpgConfig": ("dmcp.compare.amc:DdpgConfig", "dmcp.methods.ddpg:DdpgConfig"),
    "Task": ("dmcp.training:Task", "dmcp.preflight:Task"),
    "Runtime": ("dmcp.runtime.engine:Runtime", "dmcp.runtime:Runtime", "dmcp.training:Runtime"),
}
BUNDLES = {  # a parameter that may have moved into an object: (parameter, what makes the object)
    "engine": ("runtime", "Runtime"),
    "checkpointer": ("runtime", "Runtime"),
    "checkpoint": ("runtime", "Runtime"),
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
    for name, value in settings.items():
        spelling = next((it for it in SPELLINGS.get(name, (name,)) if it in known), None)
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


# ---- settings


def engine() -> Any:
    switches = dict.fromkeys(("channels_last", "compile", "graphs", "kernels", "pad", "tf32", "deterministic"), False)
    return call(dmcp.Engine, precision="float32", sync_batchnorm=False, **switches)


def search_config(**changes: Any) -> Any:
    settings: dict[str, Any] = {"budget": "50%", "tolerance": 0.95, "groups": 8, "align": 1, "min_channels": {}}
    settings |= {"max_channels": {}, "epochs": 2, "warmup": 0.5, "sort": False, "subnets": 2, "sampling": "markov"}
    settings |= {"warmup_sampling": "uniform", "distill": True, "init": "target", "independent": False}
    settings |= {"task_loss": True, "budget_weight": 0.1, "train_weights": True, "lr": 0.3, "min_lr": 0.03}
    settings |= {"reference_batch": 16, "momentum": 0.9, "weight_decay": 1e-4, "label_smoothing": 0.1, "seed": 0}
    settings |= {"alpha_lr": 0.5, "alpha_min_lr": 0.1, "alpha_momentum": 0.9, "accumulate": 1, "log_every": 4}
    return call(dmcp.SearchConfig, **settings | changes)


def train_config(**changes: Any) -> Any:
    settings: dict[str, Any] = {"epochs": 2, "lr": 0.2, "reference_batch": 16, "warmup_epochs": 0.5, "warmup_lr": 0.05}
    settings |= {"min_lr": 0.0, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-4, "label_smoothing": 0.1}
    return call(dmcp.TrainConfig, **settings | {"kd_weight": 0.5, "kd_temperature": 1.0, "seed": 0} | changes)


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


NETS: dict[str, tuple[int, ...]] = {  # shape of a sample; the first four are those of the stored structure
    "digits:resnet": (1, 8, 8),
    "mixed": (1, 8, 8),
    "cifar:resnet20": (3, 32, 32),
    "cifar:mobilenet_v2": (3, 32, 32),
    "resnet18": (3, 64, 64),
    "mobilenet_v3_small": (3, 64, 64),
    "shufflenet_v2_x0_5": (3, 64, 64),
    "googlenet": (3, 64, 64),
    "squeezenet1_1": (3, 64, 64),
    "efficientnet_b0": (3, 64, 64),
    "timm:res2net50_26w_4s": (3, 64, 64),
    "timm:resnest14d": (3, 64, 64),
    "timm:convnext_atto": (3, 64, 64),
}
FEW = 4


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


def ordered(terms: Mapping[tuple[int, ...], int]) -> list[Any]:
    return sorted([list(key), factor] for key, factor in terms.items())


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


def traced(name: str, seed: int = 0) -> tuple[nn.Module, Any]:
    model = build(name, seed)
    return model, dmcp.trace(model, torch.zeros(2, *NETS[name]))


def random_points(graph: Any, count: int) -> list[Any]:
    draw = torch.Generator().manual_seed(0)
    rows = [[int(torch.randint(1, it.size + 1, (), generator=draw)) for it in graph.spaces] for _ in range(count)]
    return [graph.widths(row) for row in rows]


# ---- the probe: cases by name, each gives plain data

Cases = Iterator[tuple[str, Callable[[], Any]]]
KEYS = ("macs", "params", "memory", "memory_at", "prunable_share", "input_shape", "fingerprint", "unknown")


def trace_cases(quick: bool) -> Cases:
    def one(name: str) -> Any:
        model, graph = traced(name)
        found, plain, points = structure(graph), graph.to_json(), random_points(graph, 5)
        found["json"] = {key: get(plain, key) for key in KEYS} | {"spaces": plain["spaces"]}
        found["json"] |= {key: [{k: v for k, v in it.items() if k != "reason"} for it in get(plain, key)]
                          for key in ("unprunable", "bindings")}  # fmt: skip
        found["terms"] = [[it.name, ordered(it.macs), ordered(it.params)] for it in graph.entries]
        found["moments"] = [[it.name, ordered(it.terms)] for it in graph.moments]
        many = torch.stack([widths.tensor() for widths in points])
        for kind in ("macs", "params", "memory"):
            cost = getattr(graph, kind)
            found[f"{kind} at random"] = [[cost(widths) for widths in points], bits(cost(many)), bits(cost(many + 0.5))]
        found["cuts"] = [all_bits(graph.cuts(widths)) for widths in points[:2]]
        found["attributes"] = [repr(sorted(graph.attributes(widths).items())) for widths in points]
        found["cut"] = all_bits(dmcp.cut(model, graph, points[0]))
        net, x = dmcp.Supernet(model, graph, groups=5, align=1), torch.rand(2, *NETS[name])
        with torch.no_grad():
            net.alpha.copy_(torch.randn_like(net.alpha))
            net.eval()
            found["gated"] = all_bits([net(x, net.hard(points[0])), net(x, net.soft())])
            net.train()
            out = net(x, net.soft())
            found["gated in train mode"] = all_bits(list(out) if isinstance(out, tuple) else out)
        return found

    for name in list(NETS)[: FEW if quick else None]:
        yield name, lambda name=name: one(name)
    yield (
        "ignored layers",
        lambda: structure(
            call(dmcp.trace, build("digits:resnet"), torch.zeros(2, 1, 8, 8), ignore=["layer2", "conv1"])
        ),
    )
    yield (
        "inexact",
        lambda: structure(call(dmcp.trace, build("timm:convnext_atto"), torch.zeros(2, 3, 64, 64), exact=False)),
    )


def digits(images: int = 160, batch: int = 16, seed: int = 0, first: int = 0, train: bool = True) -> Any:
    """A loader of some digits."""
    data = place("load_data")("digits")
    chosen = (data.train if train else data.test).subset(torch.arange(first, first + images))
    return call(place("make_loader"), chosen, batch_size=batch, train=train, seed=seed)


SEARCHES: dict[str, dict[str, Any]] = {
    "default": {},
    "independent": {"independent": True},
    "arch_loader": {"arch_loader": True},
    "no distillation": {"distill": False},
    "another seed": {"seed": 7},
    "mixed": {"net": "mixed", "sort": True, "init": "random", "budget": "60%,params:70%"},
    "accumulate": {"accumulate": 2, "epochs": 4, "init": "zero", "sampling": "uniform"},
    "no weights": {"train_weights": False, "warmup": 0.5, "align": 4},
    "channels": {"min_channels": {"layer2": 12}, "max_channels": 40, "budget": "memory:80%"},
}


def searched(net: str = "digits:resnet", arch_loader: bool = False, loader: Any = None, **settings: Any) -> Any:
    """A search of 20 steps on digits: what it found, and its supernet."""
    model, graph = traced(net)
    more = {name: settings.pop(name) for name in ("checkpointer",) if name in settings}
    config = search_config(**settings)
    supernet = dmcp.Supernet(model, graph, groups=config.groups, align=config.align)
    more |= {"arch_loader": digits(first=640, seed=3)} if arch_loader else {}
    return call(dmcp.search, supernet, loader or digits(), config, engine=engine(), **more), supernet


def search_bits(found: Any, net: Any) -> dict[str, Any]:
    return {"alphas": bits(found.alphas), "alpha": bits(net.alpha), "sizes": found.sizes.tolist(),
            "weights": all_bits(net.model), "expected": dict(dmcp.expected(found))}  # fmt: skip


def search_cases(quick: bool) -> Cases:
    def one(settings: dict[str, Any]) -> Any:
        found, net = searched(**settings)
        names = ("step", "epoch", "lr", "weight_losses", "alpha_lr", "task_loss", "budget_loss", "ratios")
        return search_bits(found, net) | {"log": [[get(it, name) for name in names] for it in found.log]}

    for name in list(SEARCHES)[: 2 if quick else None]:
        yield name, lambda name=name: one(SEARCHES[name])


def pruned(way: str, loader: Any = None, **more: Any) -> Any:
    model, graph = traced("digits:resnet")
    taught = {"kd_weight": 0.7, "kd_temperature": 3.0} if "teacher" in way or way == "trained_first" else {}
    told = retrain(way, build("mixed", seed=5)) | {"engine": engine(), "graph": graph} | more
    told |= {"search": search_config(), "train": train_config(**taught), "baselines": True}
    result = call(dmcp.prune, model, loader or digits(80), digits(300, 100, train=False), **told)
    rows = [[ROWS.get(it.name, it.name), it.macs, it.params, it.accuracy, it.samples] for it in result.rows]
    return {"rows": rows, "widths": dict(result.widths), "model": all_bits(result.model)} | {
        "alphas": bits(result.search.alphas)
    }


def prune_cases(quick: bool) -> Cases:
    for way in list(RETRAIN)[: 2 if quick else None]:
        yield way, lambda way=way: pruned(way)


class KilledError(Exception):
    """Raised in the place of a batch."""


class Dying:
    """A loader that fails after some batches."""

    def __init__(self, loader: Any, after: int) -> None:
        self.loader, self.batches = loader, itertools.chain(range(after), ["kill"])

    def __len__(self) -> int:
        return len(self.loader)

    def set_epoch(self, epoch: int) -> None:
        self.loader.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            if next(self.batches) == "kill":
                raise KilledError
            yield batch


def interrupted(run: Callable[[Any, Callable[[str], Any]], Any], loader: Any, kills: tuple[int, ...]) -> Any:
    """The outcome of a run that was killed after so many batches, each time begun again from its checkpoints."""
    with tempfile.TemporaryDirectory() as folder:
        maker = get(dmcp, "Checkpointer")
        checkpoint = lambda stage: call(maker, Path(folder) / stage, every_steps=3, every_seconds=1e6)  # noqa: E731
        for after in kills:
            try:
                run(Dying(loader, after), checkpoint)
            except KilledError:
                assert any(Path(folder).rglob("*.safetensors")), "killed before the first checkpoint"
            else:
                raise AssertionError(f"not killed after {after} batches")
        return run(loader, checkpoint)


def resume_cases(quick: bool) -> Cases:
    """Every case also compares the two inside one checkout."""

    def same(whole: Any, again: Any) -> Any:
        assert not list(differences(whole, again)), f"resumed differs: {list(differences(whole, again))[:3]}"
        return again

    def run_search(loader: Any, checkpoint: Any) -> Any:
        return search_bits(*searched(loader=loader, checkpointer=checkpoint("search")))

    def run_prune(loader: Any, checkpoint: Any) -> Any:
        return pruned("scratch", loader, checkpoint=checkpoint)

    # prune looks at a few batches first; 10 are of the search, then 10 of each of 3 trainings
    yield "search", lambda: same(search_bits(*searched()), interrupted(run_search, digits(), (8, 7)))
    if not quick:
        yield "prune", lambda: same(pruned("scratch"), interrupted(run_prune, digits(80), (10, 24)))


def batch_cases(quick: bool) -> Cases:
    def some(loader: Any, epochs: tuple[int, ...] = (0, 2), indices: tuple[int, ...] = (0, 2)) -> Any:
        found: dict[str, Any] = {"batches": len(loader)}
        for epoch in epochs:
            loader.set_epoch(epoch)
            batches = list(loader)
            found |= {f"epoch {epoch} index {index}": all_bits(batches[index]) for index in (*indices, -1)}
        return found

    def holdout() -> Any:
        parts = place("split")(place("load_data")("digits").train, 0.2, 1)
        loaders = [call(place("make_loader"), part, batch_size=64, train=False, seed=0) for part in parts]
        return [some(loader, (0,)) for loader in loaders]

    def folder(train: bool, seed: int) -> Any:
        from PIL import Image

        draw = torch.Generator().manual_seed(0)
        with tempfile.TemporaryDirectory() as path:
            for part, label, number in itertools.product(("train", "val"), ("cat", "dog"), range(8)):
                height, width = torch.randint(40, 70, (2,), generator=draw).tolist()
                pixels = torch.randint(0, 256, (height, width, 3), generator=draw, dtype=torch.uint8)
                file = Path(path) / part / label / f"{number}.png"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.numpy()).resize((width * 2, height * 2)).save(file)
            data = place("load_data")(path, size=32)
            chosen = data.train if train else data.test
            return some(call(place("make_loader"), chosen, batch_size=4, train=train, seed=seed, workers=0))

    for seed in (0, 3):
        yield f"digits seed {seed}", lambda seed=seed: some(digits(1024, 100, seed))
        yield f"folder seed {seed}", lambda seed=seed: folder(True, seed)
    yield "digits test", lambda: some(digits(300, 100, train=False))
    yield "folder test", lambda: folder(False, 0)
    yield "holdout", holdout


def sampling_cases(quick: bool) -> Cases:
    def one(name: str, budget: str) -> Any:
        found, _ = searched(net=name, epochs=2, budget=budget)
        alphas = torch.linspace(-1, 3, found.alphas.numel()).view_as(found.alphas).contiguous()
        fixed, draw, graph = replace(found, alphas=alphas), lambda: torch.Generator().manual_seed(5), found.graph
        least = {space.name: 2 for space in graph.spaces}
        widths = {
            "expected": [dmcp.expected(fixed), dmcp.expected(fixed, align=4)],
            "direct": dmcp.direct(fixed, n=5, generator=draw(), tries=100_000),
            "uniform": [
                call(dmcp.uniform, graph, it, min_widths=least, align=2, tolerance=0.9) for it in (budget, "70%")
            ],
            "random": [
                call(dmcp.random_widths, graph, budget, generator=draw(), min_widths=least, align=1, tolerance=0.95)
            ],
        }
        return {name: [dict(it) for it in found] for name, found in widths.items()}

    yield "macs", lambda: one("digits:resnet", "50%")
    yield "several", lambda: one("mixed", "60%,params:60%")


def method_cases(quick: bool) -> Cases:
    def one(name: str, **settings: Any) -> Any:
        model, graph = traced("digits:resnet")
        least = graph.widths([max(1, space.size // 8) for space in graph.spaces])
        given: dict[str, Any] = {"model": model, "graph": graph, "loader": digits(), "align": 1, "seed": 2}
        given |= {"held_out": list(digits(64, first=1000)), "budget": dmcp.parse_budget("50%", graph)}
        problem = call(place("Problem"), **given, recipe=train_config(), min_widths=least, engine=engine())
        method = place("METHODS")[name]
        config = call(method.config, **settings)
        state = method.prepare(problem, config).state if method.prepare else model.state_dict()
        choice = method.find(problem, config, state)
        kept = {key: value if isinstance(value, int) else list(value) for key, value in choice.kept.items()}
        found = {"widths": dict(choice.widths), "kept": {key: all_bits(value) for key, value in kept.items()}}
        return found | {"passes": choice.sample_passes, "model": all_bits(choice.model)}

    yield "l1", lambda: one("l1", power=1)
    yield "sfp", lambda: one("sfp", every=1, regrowth=0.01)
    if quick:
        return
    yield "fpgm", lambda: one("fpgm", every=1, regrowth=0.1)
    yield "slimming", lambda: one("slimming", sparsity=1e-3)
    yield "autoslim", lambda: one("autoslim", epochs=1, groups=4, subnets=1, distill=True, lr_share=0.5, batches=1)
    agent = {"hidden": 8, "actor_lr": 1e-3, "critic_lr": 1e-2, "batch": 8}
    yield "amc", lambda: one("amc", warmup=3, episodes=4, batches=1, agent=call(place("DdpgConfig"), **agent))
    bred = {"hidden": 4, "groups": 4, "epochs": 1, "population": 6, "generations": 2, "parents": 2, "batches": 1}
    yield "metapruning", lambda: one("metapruning", **bred)


SECTIONS: dict[str, Callable[[bool], Cases]] = {
    "trace": trace_cases,
    "search": search_cases,
    "prune": prune_cases,
    "resume": resume_cases,
    "batches": batch_cases,
    "sampling": sampling_cases,
    "methods": method_cases,
}


def probe(sections: list[str], quick: bool, stem: bool) -> dict[str, Any]:
    """All cases in this process; what fails is an error of its case."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not stem and (loop := sys.modules.get("dmcp.searching.search")) and hasattr(loop, "find_stem"):
        loop.find_stem = lambda net: None  # type: ignore[attr-defined]
    found: dict[str, Any] = {"seconds": {}}
    for section in sections:
        start = time.monotonic()
        for name, case in SECTIONS[section](quick):
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
    env = os.environ | {"PYTHONPATH": source, "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
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
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), help="sections to run")
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
