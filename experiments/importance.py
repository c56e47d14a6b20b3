"""Which channels to keep: ten networks of other people, cut to uniform widths by several scores of their channels.

    python experiments/importance.py --sources FOLDER              # all rows that are not there yet
    python experiments/importance.py --sources FOLDER --tune 100   # the same after 100 steps of Adam
    python experiments/importance.py --sources FOLDER --why rfdn   # one space at a time
    python experiments/importance.py --table                       # what is recorded

FOLDER has the repositories that foreign.py names. A row is one cut network: its score right after the cut, with the
statistics of its BatchNorms measured again where its training wants that, and after `--tune` steps.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import functools
import json
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from foreign import NETWORKS, Batch, Foreign
from torch import Tensor, nn

import dmcp
from dmcp.searching.allocation import widths_by_scores
from dmcp.searching.bounds import allowed_widths
from dmcp.searching.importance import ChannelRows, find_filters, find_rows, find_scales, strongest
from dmcp.searching.importance import norms as norms_of
from dmcp.searching.rounding import FILLED
from dmcp.tracing.folds import run_folded, under_all_names
from dmcp.tracing.graph import ChannelGraph
from dmcp.tracing.widths import ChannelSpace, Widths

RESULTS = Path(__file__).parent / "results" / "importance.jsonl"
BUDGETS = ("70%", "50%")
SAMPLES = 64  # that scores see, one by one
FITTED_ON = 512  # samples that weights are refitted on, where a score has +fit
Scores = dict[str, Tensor]  # by space: (size,)


@dataclass(frozen=True, kw_only=True, eq=False)
class Case:
    """A network, its graph, and the samples that scores may use."""

    foreign: Foreign
    graph: ChannelGraph
    samples: list[Batch]  # batches of one

    @property
    def model(self) -> nn.Module:
        return self.foreign.model


# scores that read weights


def norms(case: Case) -> Scores:
    """The squared L2 norm of the filters that write a channel: l2."""
    return norms_of(case.model, case.graph)


def smallest(case: Case) -> Scores:
    """The other way round, to see whether norms say anything."""
    return {name: -norm for name, norm in norms(case).items()}


def random(case: Case, seed: int) -> Scores:
    """Any channels."""
    generator = torch.Generator().manual_seed(seed)
    return {space.name: torch.rand(space.size, generator=generator) for space in case.graph.spaces}


def scales(case: Case) -> Scores:
    """The sum of absolute BatchNorm scales; the norm of the filters where a space has none."""
    scores = norms(case)
    for space in case.graph.spaces:
        rows = find_scales(case.model, case.graph, space)
        if rows:
            scores[space.name] = sum_rows(case.model, rows, lambda numbers: numbers.abs().sum(1))
    return scores


def scales_times_readers(case: Case) -> Scores:
    """The scale, or the norm of the filters, times the norm of what reads the channel."""
    written = scales(case)
    for space in case.graph.spaces:
        if not find_scales(case.model, case.graph, space):
            written[space.name] = written[space.name].sqrt()
    return {name: written[name] * norm for name, norm in reader_norms(case).items()}


def reader_norms(case: Case) -> Scores:
    """The L2 norm of all weights that read a channel."""
    return {
        space.name: sum_rows(case.model, find_readers(case, space), lambda numbers: numbers.square().sum(1)).sqrt()
        for space in case.graph.spaces
    }


def geometric_median(case: Case) -> Scores:
    """The sum of distances to the other filters of the layer (FPGM): what is near to all others can go."""
    return {
        space.name: sum_rows(
            case.model,
            find_filters(case.model, case.graph, space),
            lambda filters: torch.cdist(filters, filters).sum(1),
            space.size,
        )
        for space in case.graph.spaces
    }


def find_readers(case: Case, space: ChannelSpace) -> list[ChannelRows]:
    """The dims of weights that read a space."""
    folds = {(fold.tensor, fold.dim) for fold in case.graph.hard_folds}
    return [rows for rows in find_rows(case.model, case.graph, space) if (rows.name, rows.dim) in folds]


def sum_rows(
    model: nn.Module, tensors: list[ChannelRows], score: Callable[[Tensor], Tensor], size: int | None = None
) -> Tensor:
    """The sum over tensors of a score of what they hold of each channel. -> (size,)"""
    if not tensors:
        return torch.zeros(size or 0)
    return torch.stack([score(rows.numbers(model).double()) for rows in tensors]).sum(0)


# scores that read data


@torch.no_grad()
def activations(case: Case) -> Scores:
    """The mean absolute activation times the norm of what reads it, summed over readers (as Wanda does)."""
    means: dict[str, Tensor] = {}

    def add(name: str, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        size = inputs[0].abs().double()
        if not isinstance(module, nn.Linear):
            size = size.flatten(2).mean(2)
        means[name] = means.get(name, 0) + size.mean(0)

    handles = []
    readers = {fold.tensor for fold in case.graph.hard_folds}
    for name in readers:
        module = case.model.get_submodule(name.rpartition(".")[0])
        handles.append(module.register_forward_pre_hook(partial(add, name)))
    case.model.eval()
    for x, _ in case.samples:
        case.model(x)
    for handle in handles:
        handle.remove()

    scores = {}
    for space in case.graph.spaces:
        score = torch.zeros(space.size, dtype=torch.float64)
        for rows in find_readers(case, space):
            module = case.model.get_submodule(rows.name.rpartition(".")[0])
            groups = getattr(module, "groups", 1)
            inputs = means[rows.name].view(groups, -1)  # where groups share a dim, it stands for each of them
            if groups > 1 and rows.dim == 0 and not isinstance(module, nn.ConvTranspose2d):
                inputs = inputs.repeat_interleave(module.out_channels // groups, dim=0).mean(1)[None]
            size = inputs[:, rows.rows].mean((0, 2))
            score += size * rows.numbers(case.model).double().square().sum(1).sqrt()
        scores[space.name] = score
    return scores


def gate_gradients(case: Case, loss: Callable[[Any, Batch], Tensor]) -> Tensor:
    """The gradient of each sample's loss with respect to a gate of each channel, which is its activation times its
    gradient, summed over positions and readers. -> (samples, channels)"""
    net = dmcp.Supernet(case.model, case.graph)
    net.model.requires_grad_(False)
    gates = torch.ones(len(net.position), requires_grad=True)
    gradients = []
    for batch in case.samples:
        folded = net._hard.fold(dict(net.model.named_parameters()).__getitem__, gates)
        output = run_folded(net.model, batch[0], under_all_names(folded, net._ties))
        gradients.append(torch.autograd.grad(loss(output, batch), gates)[0])
    return torch.stack(gradients)


def by_space(case: Case, scores: Tensor) -> Scores:
    """A score per channel of the network as one tensor per space."""
    parts = scores.split([space.size for space in case.graph.spaces])
    return {space.name: part for space, part in zip(case.graph.spaces, parts, strict=True)}


@functools.cache
def loss_gradients(case: Case) -> Tensor:
    """The gradients of the task's loss. -> (samples, channels)"""
    return gate_gradients(case, case.foreign.loss)


def taylor(case: Case) -> Scores:
    """First order: the mean over samples of what the loss changes by, without its sign."""
    return by_space(case, loss_gradients(case).abs().mean(0))


def fisher(case: Case) -> Scores:
    """The mean square of the same numbers, which is of second order."""
    return by_space(case, loss_gradients(case).square().mean(0))


def outputs(case: Case) -> Scores:
    """The mean square of what a random projection of the outputs changes by: no labels, no loss."""
    generator = torch.Generator().manual_seed(0)

    def project(output: Any, batch: Batch) -> Tensor:
        parts = output if isinstance(output, tuple) else (output,)
        return sum((torch.randn(part.shape, generator=generator) * part).sum() for part in parts)

    return by_space(case, gate_gradients(case, project).square().mean(0))


def importance(case: Case) -> Scores:
    """What came of `outputs`: two samples to a direction, and outputs relative to their size."""
    return dmcp.importance(case.model, case.graph, case.foreign.batches(SAMPLES, 2, 0))


def recalibrated_outputs(case: Case) -> Scores:
    """The same with the BatchNorm statistics of batches, as if they were recalibrated."""
    model = copy.deepcopy(case.model).eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            norm.train()
            norm.track_running_stats = False
    samples = [batch for batch in case.foreign.batches(4, 16, 0) for _ in range(16)]
    return outputs(dataclasses.replace(case, foreign=dataclasses.replace(case.foreign, model=model), samples=samples))


SCORES: dict[str, Callable[[Case], Scores]] = {
    "l2": norms,
    "smallest": smallest,
    "random-0": partial(random, seed=0),
    "random-1": partial(random, seed=1),
    "random-2": partial(random, seed=2),
    "scale": scales,
    "scale-reader": scales_times_readers,
    "median": geometric_median,
    "activation": activations,
    "taylor": taylor,
    "fisher": fisher,
    "outputs": outputs,
    "outputs-batch": recalibrated_outputs,
    "importance": importance,
}


# one row


@contextmanager
def means_kept(case: Case, small: nn.Module, kept: dict[str, list[int]]) -> Iterator[None]:
    """Add to the biases of the cut network what its layers' mean outputs lack, layer after layer (bias correction)."""
    x = torch.cat([batch[0] for batch in case.samples[:32]])
    means: dict[str, Tensor] = {}

    def is_layer(module: nn.Module) -> bool:
        return isinstance(module, nn.Conv2d | nn.ConvTranspose2d | nn.Linear) and module.bias is not None

    def mean_of(output: Tensor) -> Tensor:
        return output.flatten(2).mean((0, 2)) if output.ndim > 2 else output.mean(0)

    def keep(name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        means[name] = mean_of(output)

    def correct(name: str, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        indices = cuts.get(f"{name}.bias", (None,))[0]
        wanted = means[name] if indices is None else means[name][indices]
        missing = wanted - mean_of(output)
        module.bias += missing
        return output + missing.view(-1, *[1] * (output.ndim - 2))

    cuts = case.graph.cuts(kept)
    with torch.no_grad():
        for network, hook in ((case.model.eval(), keep), (small.eval(), correct)):
            handles = [
                module.register_forward_hook(partial(hook, name))
                for name, module in nn.Module.named_modules(network)
                if is_layer(module)
            ]
            network(x)
            for handle in handles:
                handle.remove()
    yield


def tune(foreign: Foreign, small: nn.Module, steps: int) -> None:
    """Train with Adam, a rate that falls to zero, and the same batches for every cut."""
    small.train(foreign.recalibrates)  # where BatchNorms were trained in eval mode, they stay in it
    optimizer = torch.optim.Adam((p for p in small.parameters() if p.requires_grad), lr=foreign.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        batch = foreign.batches(1, foreign.batch, 1000 + step)[0]
        optimizer.zero_grad()
        foreign.loss(small(batch[0]), batch).backward()
        nn.utils.clip_grad_norm_(small.parameters(), 1.0)
        optimizer.step()
        schedule.step()


def recalibrate(case: Case, small: nn.Module) -> None:
    """Measure BatchNorm statistics again, where the network's training wants that."""
    if case.foreign.recalibrates:
        size = 64 if case.foreign.batch > 4 else 8
        dmcp.recalibrate(small, [batch[0] for batch in case.foreign.batches(4, size, 1)])


def spearman(a: list[float], b: list[float]) -> float:
    """Rank correlation."""
    ranks = [torch.tensor(x, dtype=torch.float64).argsort().argsort().double() for x in (a, b)]
    centered = [rank - rank.mean() for rank in ranks]
    return float((centered[0] * centered[1]).sum() / (centered[0].norm() * centered[1].norm()))


def read_case(name: str, sources: Path) -> Case:
    """A network, traced, with its samples."""
    foreign = NETWORKS[name](sources)
    foreign.model.eval()
    graph = dmcp.trace(foreign.model, foreign.example)
    return Case(foreign=foreign, graph=graph, samples=foreign.batches(SAMPLES, 1, 0))


@functools.cache
def uniform_widths(case: Case, budget: str) -> Widths:
    """Uniform widths at a share of the MACs."""
    return dmcp.uniform(case.graph, budget)


def widths_for(case: Case, scores: Scores, budget: str) -> Widths:
    """Widths by scores, as `--method sensitivity` tries them beside uniform ones."""
    allowed = allowed_widths(case.graph, None, None, None)
    even = uniform_widths(case, budget)
    return widths_by_scores(case.graph, dmcp.parse_budget(budget, case.graph), scores, even, allowed, FILLED)


def measure(case: Case, scores: Scores, budget: str, correction: str, steps: int) -> dict[str, Any]:
    """Cut the network by a score, and test it.

    The correction is "bias", "fit" (least squares), "widths" (least squares, and widths by the score) or none.
    """
    foreign = case.foreign
    widths = uniform_widths(case, budget)
    if correction == "widths":
        widths = widths_for(case, scores, budget)
    kept = {name: strongest(scores[name], width) for name, width in widths.items()}
    samples = None
    if correction in ("fit", "widths"):
        samples = foreign.batches(FITTED_ON // foreign.batch, foreign.batch, 7)
    start = time.perf_counter()
    small = dmcp.cut(case.model, case.graph, kept, batches=samples)
    seconds = time.perf_counter() - start
    if correction == "bias":
        with means_kept(case, small, kept):
            pass
    recalibrate(case, small)
    row = {"cut": round(foreign.score(small), 3), "cut_s": round(seconds, 2)}
    if steps:
        tune(foreign, small, steps)
        row["tuned"] = round(foreign.score(small), 3)
    return row


def record(arguments: argparse.Namespace) -> None:
    """Add the rows that are missing."""
    torch.set_flush_denormal(True)  # LPRNet is six times as slow without it
    lines = arguments.results.read_text().splitlines() if arguments.results.exists() else []
    known = {key(json.loads(line)) for line in lines}
    for name in arguments.networks or NETWORKS:
        case = None
        for budget in arguments.budgets:
            for by in arguments.by or SCORES:
                base, _, correction = by.partition("+")
                row = {"network": name, "budget": budget, "by": by, "steps": arguments.tune}
                if key(row) in known:
                    continue
                time_of_row = time.process_time()
                if case is None:
                    case = read_case(name, arguments.sources)
                    uncut = round(case.foreign.score(case.model), 3)
                    cached: dict[str, tuple[Scores, float]] = {}
                start = time.perf_counter()
                if base not in cached:
                    cached[base] = SCORES[base](case), time.perf_counter() - start
                scores, seconds = cached[base]
                row |= {"uncut": uncut, "unit": case.foreign.unit}
                row |= measure(case, scores, budget, correction, arguments.tune)
                row |= {"score_s": round(seconds, 2), "cpu_s": round(time.process_time() - time_of_row, 2)}
                arguments.results.parent.mkdir(exist_ok=True)
                with arguments.results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                print(row, flush=True)


def explain(case: Case) -> None:
    """Cut one space at a time: what norms and outputs keep, and the norms of the channels with the largest effect."""
    by_norm, by_outputs, effects = norms(case), outputs(case), scales_times_readers(case)
    for space in case.graph.spaces:
        scores = []
        for score in (by_norm, by_outputs):
            small = dmcp.cut(case.model, case.graph, {space.name: max(1, round(0.8 * space.size))}, by=score)
            recalibrate(case, small)
            scores.append(round(case.foreign.score(small), 2))
        norm = by_norm[space.name]
        largest = effects[space.name].argsort(descending=True)[:5]
        row = {
            "space": space.name,
            "size": space.size,
            "rank correlation of norms and outputs": round(spearman(norm.tolist(), by_outputs[space.name].tolist()), 2),
            "cut to 80 % by l2": scores[0],
            "by outputs": scores[1],
            "rank by norm of the five with the largest scale-reader": [int((norm > norm[i]).sum()) for i in largest],
        }
        print(json.dumps(row), flush=True)


def table(results: Path) -> str:
    """The recorded rows as Markdown, right after the cut and after training; random is the mean of its seeds."""
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    columns = ["random", *(name for name in SCORES if not name.startswith("random") and name != "outputs-batch")]
    columns += [*(f"{name}+fit" for name in ("random", "l2", "importance")), "importance+widths"]
    lines: list[str] = []
    for steps in sorted({row["steps"] for row in rows}):
        scores: dict[tuple[str, str], dict[str, list[float]]] = {}
        for row in rows:
            if row["steps"] == steps:
                of_network = scores.setdefault((f"{row['network']}, {row['uncut']} {row['unit']}", row["budget"]), {})
                by = re.sub(r"^random-\d", "random", row["by"])
                of_network.setdefault(by, []).append(row["tuned" if steps else "cut"])
        lines += [
            f"{steps} training steps after the cut",
            "",
            "| network, uncut | MACs | " + " | ".join(columns) + " |",
        ]
        lines.append("|" + "---|" * (len(columns) + 2))
        for (network, budget), of_network in scores.items():
            cells = [f"{sum(of_network[by]) / len(of_network[by]):.1f}" if by in of_network else "" for by in columns]
            lines.append(f"| {network} | {budget} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    """What a row is of."""
    return row["network"], row["budget"], row["by"], row["steps"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sources", type=Path, help="Folder with the repositories of other people.")
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, help="Default: all.")
    parser.add_argument("--by", nargs="+", help="Scores, also with +bias or +fit. Default: all without.")
    parser.add_argument("--budgets", nargs="+", default=BUDGETS)
    parser.add_argument("--tune", type=int, default=0, help="Number of training steps after the cut.")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--why", choices=NETWORKS, help="Cut the spaces of a network one at a time.")
    parser.add_argument("--table", action="store_true", help="Print what is recorded.")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(arguments.results))
    elif arguments.why:
        torch.set_flush_denormal(True)
        explain(read_case(arguments.why, arguments.sources))
    else:
        record(arguments)


if __name__ == "__main__":
    main()
