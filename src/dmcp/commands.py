"""The commands that need data: prune, search, sample, train, evaluate. Each is a thin function over the public ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from dmcp import pruning, sampling
from dmcp.batches import generator
from dmcp.budget import check_reachable, costs, parse
from dmcp.calibration import recalibrate
from dmcp.cutting import WIDTHS, cut, load, save
from dmcp.errors import FileError
from dmcp.figures import draw_all
from dmcp.forecast import forecast, peak_bytes
from dmcp.graph import ChannelGraph
from dmcp.jobs import Job, Opened, build, open_job, trace_job
from dmcp.progress import Progress, clock
from dmcp.pruning import OURS, UNPRUNED, Event, Retrain, default_recipe
from dmcp.runs import REPORT, SETTINGS, Run, free_folder, load_search, markdown, open_run, read_json
from dmcp.searching import SearchConfig
from dmcp.spaces import Widths
from dmcp.supernet import Supernet
from dmcp.training import Precision, TrainConfig

# options that several commands share

Model = Annotated[str, typer.Option(help="resnet18, timm:NAME, cifar:NAME, digits:resnet, package.module:factory.")]
ModelArgs = Annotated[list[str] | None, typer.Option(help="Argument of its builder, like width_mult=1.5; repeatable.")]
Frozen = Annotated[list[str] | None, typer.Option(help="Module or space whose channels stay whole; repeatable.")]
Data = Annotated[str, typer.Option(help="digits, cifar10, cifar100, a folder of shards, or one with train/ and val/.")]
Budget = Annotated[str, typer.Option(help="50%, 211M, 1.1G, params:2M, or several: 50%,params:2M.")]
Out = Annotated[str, typer.Option(help="Folder of the run; default: a new one in runs/.")]
Epochs = Annotated[int | None, typer.Option(help="Passes over the data in retraining; default: the paper's 100.")]
SearchEpochs = Annotated[int, typer.Option(help="Passes over the data in the search.")]
Warmup = Annotated[float | None, typer.Option(help="Share of them for weights only; default 0.5, or 0 with --weights.")]
Batch = Annotated[int, typer.Option(help="Images in a batch; learning rates are scaled with it.")]
Lr = Annotated[float | None, typer.Option(help="Highest learning rate of retraining at a batch of 2048; default 0.8.")]
SearchLr = Annotated[float, typer.Option(help="First learning rate of the search at a batch of 1024.")]
WeightDecay = Annotated[float, typer.Option(help="Weight decay of search and retraining.")]
Groups = Annotated[int, typer.Option(help="Groups that each space is divided into.")]
Align = Annotated[int, typer.Option(help="Widths are multiples of this.")]
Seed = Annotated[int, typer.Option(help="Of everything random.")]
RetrainKind = Annotated[Retrain, typer.Option(help="How the pruned network gets its weights.")]
Controls = Annotated[bool, typer.Option("--controls", help="Also train the unpruned network and uniform widths.")]
Weights = Annotated[str, typer.Option(help="File to start from: .safetensors, or .pth with weights only.")]
Input = Annotated[str, typer.Option(help="Shape of one sample, like 3x224x224; default: the data's or the model's.")]
Holdout = Annotated[float, typer.Option(help="Share of the training images that only the alphas see.")]
Device = Annotated[str, typer.Option(help="cpu or cuda; default: a GPU if there is one.")]
Numbers = Annotated[Precision, typer.Option(help="Of the forward passes; bfloat16 is faster on a GPU.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Train nothing: spaces, reachable range, time and memory.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress, only the result.")]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run.")]


def prune(
    model: Model,
    data: Data,
    budget: Budget = "50%",
    out: Out = "",
    epochs: Epochs = None,
    search_epochs: SearchEpochs = 40,
    warmup: Warmup = None,
    batch: Batch = 128,
    lr: Lr = None,
    search_lr: SearchLr = 0.2,
    weight_decay: WeightDecay = 1e-4,
    groups: Groups = 10,
    align: Align = 1,
    seed: Seed = 0,
    retrain: RetrainKind = Retrain.SCRATCH,
    controls: Controls = False,
    weights: Weights = "",
    input: Input = "",
    model_args: ModelArgs = None,
    frozen: Frozen = None,
    holdout: Holdout = 0.0,
    device: Device = "",
    precision: Numbers = Precision.FLOAT32,
    dry_run: DryRun = False,
    quiet: Quiet = False,
) -> None:
    """Search the widths of a network inside a budget, cut it, train it, test it."""
    job = _job(locals())
    config, recipe = _search_config(locals()), _recipe(locals())
    opened = open_job(job)
    net = _supernet(opened, config)
    if dry_run:
        _show_forecast(opened, net, config, recipe, retrain, controls)
        return
    run = _start(job, opened, out, "prune", search=config, train=recipe, retrain=retrain, controls=controls)
    with Progress(quiet) as progress:
        result = pruning.prune(
            opened.model,
            opened.loaders.train,
            opened.loaders.test,
            search=config,
            train=recipe,
            retrain=retrain,
            controls=controls,
            graph=opened.graph,
            fresh=opened.fresh,
            arch_loader=opened.loaders.arch,
            on_event=_both(run, progress),
        )
    run.finish(result, seed)
    listed = " and ".join(f"{share:.1%}" for share in pruning.expected_shares(result.search))
    print(f"{len(result.search.log)} search steps; expected cost at their end, before repair: {listed} of the budget")
    print(f"cut to {_spent(result.graph, result.widths)}\n\n{result.table}\n\n{run.folder}")


def search(
    model: Model,
    data: Data,
    budget: Budget = "50%",
    out: Out = "",
    search_epochs: SearchEpochs = 40,
    warmup: Warmup = None,
    batch: Batch = 128,
    search_lr: SearchLr = 0.2,
    weight_decay: WeightDecay = 1e-4,
    groups: Groups = 10,
    align: Align = 1,
    seed: Seed = 0,
    weights: Weights = "",
    input: Input = "",
    model_args: ModelArgs = None,
    frozen: Frozen = None,
    holdout: Holdout = 0.0,
    device: Device = "",
    precision: Numbers = Precision.FLOAT32,
    quiet: Quiet = False,
) -> None:
    """Search only: the run keeps the alphas, the expected widths, and the network cut with the searched weights."""
    job, config = _job(locals()), _search_config(locals())
    opened = open_job(job)
    net = _supernet(opened, config)
    run = _start(job, opened, out, "search", search=config)
    with Progress(quiet) as progress:
        found = pruning.find(
            net, opened.loaders.train, config, arch_loader=opened.loaders.arch, on_event=_both(run, progress)
        )
    widths = sampling.expected(found)
    small = cut(net.model, opened.graph, widths)
    recalibrate(small, opened.loaders.train)
    pruning.check_budget(small, widths, found)
    save(small, widths, run.folder)
    draw_all(found, widths, run.folder, seed=seed)
    _show_widths(opened.graph, widths)
    print(f"\n{run.folder}")


def sample(
    run: RunFolder,
    direct: Annotated[int, typer.Option(help="So many different structures drawn from the chains; 0: expected.")] = 0,
    seed: Seed = 0,
) -> None:
    """Structures of a search, inside its budget: the expected one, or drawn ones (each as a file for dmcp train)."""
    settings = _settings(run)
    job = _old_job(settings)
    graph = trace_job(job, build(job, settings["classes"]), tuple(settings["shape"]))
    found = load_search(run, graph)
    drawn = sampling.direct(found, direct, generator(seed)) if direct else [sampling.expected(found)]
    for number, widths in enumerate(drawn, start=1):
        name = f"direct-{number}.json" if direct else "expected.json"
        Run(run).write(name, widths.to_json())
        print(f"{run / name}: {_spent(graph, widths)}: {' '.join(map(str, widths.values()))}")


def train(
    model: Model,
    data: Data,
    widths: Annotated[str, typer.Option(help="File of widths, of a run or of dmcp sample; default: unpruned.")] = "",
    out: Out = "",
    epochs: Epochs = None,
    batch: Batch = 128,
    lr: Lr = None,
    weight_decay: WeightDecay = 1e-4,
    seed: Seed = 0,
    retrain: RetrainKind = Retrain.SCRATCH,
    weights: Weights = "",
    input: Input = "",
    model_args: ModelArgs = None,
    frozen: Frozen = None,
    device: Device = "",
    precision: Numbers = Precision.FLOAT32,
    quiet: Quiet = False,
) -> None:
    """Train a network with given widths, or unpruned, and test it."""
    job, recipe = _job(locals()), _recipe(locals())
    opened = open_job(job)
    graph = opened.graph
    kept = graph.widths(Widths.from_json(read_json(Path(widths)))) if widths else graph.full
    run = _start(job, opened, out, "train", train=recipe, retrain=retrain, widths=widths)
    start = opened.model if retrain is Retrain.INHERIT else opened.fresh
    wanted = {OURS if widths else UNPRUNED: kept}
    with Progress(quiet) as progress:
        report = _both(run, progress)
        trained = pruning.train_all(start, graph, wanted, opened.loaders.train, recipe, retrain, on_event=report)
        example = next(iter(opened.loaders.train))[0]
        rows = pruning.compare(trained, graph, wanted, opened.loaders.test, example, on_event=report)
    save(trained[next(iter(wanted))], kept, run.folder)
    run.write(REPORT, "\n".join([f"# {job.model}", "", *markdown(rows), ""]))
    print(f"{pruning.table(rows)}\n\n{run.folder}")


def evaluate(
    run: RunFolder,
    data: Annotated[str, typer.Option(help="Other data than the run's.")] = "",
    device: Device = "",
) -> None:
    """Test the network of a run on the test set."""
    old = _old_job(_settings(run))
    job = replace(old, data=data or old.data, device=device, weights="")
    opened = open_job(job)
    small = load(run, opened.fresh)
    kept = {run.name: opened.graph.widths(Widths.from_json(read_json(run / WIDTHS)))}
    example = next(iter(opened.loaders.test))[0]
    print(pruning.table(pruning.compare({run.name: small}, opened.graph, kept, opened.loaders.test, example)))


# from options to settings


def _job(options: Mapping[str, Any]) -> Job:
    known = {name: value for name, value in options.items() if name in Job.__dataclass_fields__ and value is not None}
    return Job(**known | {name: tuple(options[name] or ()) for name in ("model_args", "frozen")})


def _search_config(options: Mapping[str, Any]) -> SearchConfig:
    """A network that has its weights already needs no warm-up, but its channels in order."""
    ready = bool(options["weights"])
    warmup = options["warmup"] if options["warmup"] is not None else 0.0 if ready else 0.5
    same = {name: options[name] for name in ("budget", "groups", "align", "weight_decay", "precision", "seed")}
    lr = options["search_lr"]
    return SearchConfig(epochs=options["search_epochs"], warmup=warmup, sort=ready, lr=lr, min_lr=lr / 10, **same)


def _recipe(options: Mapping[str, Any]) -> TrainConfig:
    usual = default_recipe(options["retrain"])
    epochs = usual.epochs if options["epochs"] is None else options["epochs"]
    lr = usual.lr if options["lr"] is None else options["lr"]
    same = {name: options[name] for name in ("weight_decay", "precision", "seed")}
    return replace(usual, epochs=epochs, lr=lr, warmup_lr=lr * usual.warmup_lr / usual.lr, **same)


def _supernet(opened: Opened, config: SearchConfig) -> Supernet:
    """The supernet, once its budget is known to be reachable: before anything is written."""
    net = Supernet(opened.model, opened.graph, config.groups, config.align)
    check_reachable(parse(config.budget, opened.graph), opened.graph, net.floor)
    return net


def _start(job: Job, opened: Opened, out: str, command: str, **settings: Any) -> Run:
    """A new run folder with everything that was asked for."""
    name = re.sub(r"\W+", "-", f"{job.model} {Path(job.data).name} {command}").strip("-")
    run = open_run(out or free_folder(name))
    plain = {key: asdict(value) if hasattr(value, "__dataclass_fields__") else value for key, value in settings.items()}
    facts = {"command": command, "job": asdict(job), "classes": opened.data.classes, "shape": opened.data.shape}
    run.write(SETTINGS, facts | plain)
    return run


def _settings(run: Path) -> dict[str, Any]:
    settings = read_json(run / SETTINGS)
    if not {"job", "classes", "shape"} <= set(settings):
        raise FileError(f"{run / SETTINGS}: not the settings of a run of this version.")
    return settings


def _old_job(settings: Mapping[str, Any]) -> Job:
    stored = settings["job"]
    return Job(**stored | {name: tuple(stored[name]) for name in ("model_args", "frozen")})


def _both(run: Run, progress: Progress) -> Callable[[Event], None]:
    def report(event: Event) -> None:
        run.on_event(event)
        progress.on_event(event)

    return report


# what is printed


def _spent(graph: ChannelGraph, widths: Widths) -> str:
    """121,000 MACs (49.9%), 41,000 params (53.8%)"""
    spent, full = costs(graph, widths), costs(graph, graph.full)
    parts = (f"{spent[kind]:,} {word} ({spent[kind] / full[kind]:.1%})" for kind, word in _WORDS.items())
    return ", ".join(parts)


_WORDS = {"macs": "MACs", "params": "params"}


def _show_widths(graph: ChannelGraph, widths: Widths) -> None:
    print(_spent(graph, widths))
    longest = max(len(space.name) for space in graph.spaces)
    for space in graph.spaces:
        print(f"{space.name:<{longest}}  {widths[space.name]:>5} of {space.size}")


def _show_forecast(
    opened: Opened, net: Supernet, config: SearchConfig, recipe: TrainConfig, kind: Retrain, controls: bool
) -> None:
    graph, device = opened.graph, net.alpha.device
    print(f"{graph.summary()}\n")
    print(f"reachable: from {_spent(graph, net.floor)}\n           to   {_spent(graph, graph.full)}")
    asked = ", ".join(f"{limit.target:,} {_WORDS[limit.kind]}" for limit in parse(config.budget, graph).limits)
    print(f"asked for: at most {asked}\n")
    stages = forecast(net, opened.loaders.train, config, recipe, kind, controls)
    for stage in stages:
        print(f"{stage.name:<16}{stage.steps:>8} steps  {clock(stage.seconds):>12}")
    memory = f"{peak_bytes(device) / 2**30:.1f} GiB on {torch.device(device).type}"
    print(
        f"{'in all':<16}{sum(stage.steps for stage in stages):>8} steps  "
        f"{clock(sum(stage.seconds for stage in stages)):>12}, {memory}"
    )
    print("\nNothing was trained or written.")
