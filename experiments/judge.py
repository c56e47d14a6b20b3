"""Judge searches on held-out images: a list of jobs, each a line of results.

    python experiments/judge.py jobs.json --out lines.jsonl --processes 3
    python experiments/judge.py experiments/results/judge.jsonl               # what is recorded, as tables

A job may train the network first (`pretrain`), search (`search`: chains, soft against hard, judged structures; or
several `searches` by name) and train widths (`finals`). Every tenth image of the training set is held out, and all
accuracies are of these. A job with `test`, whose settings were chosen before, trains with all and uses the test images.

A search with `alphas_on` trains its alphas on that share of the other images, which its weights do not see; `finals`
train on all of them.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import alphas
import torch
from methods import peer
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import dmcp
from dmcp import models
from dmcp.compare.problem import Problem as PeerProblem
from dmcp.data import datasets
from dmcp.data.loaders import make_loader
from dmcp.defaults import resolve_training
from dmcp.markov import marginals, moment, sample_groups
from dmcp.searching import steps as search_steps
from dmcp.searching.budget import parse_budget
from dmcp.searching.subnets import make_chains as chains_of
from dmcp.training.losses import classification_loss

BATCHES = 10  # of held-out images, by which networks are judged


def spearman(a: list[float], b: list[float]) -> float:
    """Rank correlation."""
    ranks = [torch.tensor(x, dtype=torch.float64).argsort().argsort().double() for x in (a, b)]
    centered = [rank - rank.mean() for rank in ranks]
    return float((centered[0] * centered[1]).sum() / (centered[0].norm() * centered[1].norm()))


def structures() -> list[list[int]]:
    """The recorded structures that supernets of cifar:resnet20 judge."""
    found: list[list[int]] = json.loads((Path(__file__).parent / "structures.json").read_text())["structures"]
    return found


def spread(count: int, wanted: int) -> Tensor:
    """Places of so many images, spread over all of them."""
    return torch.linspace(0, count - 1, min(count, wanted)).long()


class Problem:
    """A network and its data: training images without the held-out ones, and these."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job, self.device = job, torch.device("cuda" if torch.cuda.is_available() else "cpu")
        data = datasets.load(job["data"])
        self.rest, self.held = (data.train, data.test) if job.get("test") else datasets.split(data.train, 0.1, 0)
        self.classes = data.classes
        if job.get("size"):  # a small sample of all classes, to rehearse
            self.rest, self.held = (it.subset(spread(len(it), job["size"])) for it in (self.rest, self.held))
        torch.manual_seed(job["seed"])
        self.model = models.build(job["model"], num_classes=data.classes, **job.get("model_args", {})).to(self.device)
        self.graph = dmcp.trace(self.model, torch.zeros(2, *data.shape, device=self.device))

    def loader(self, part: Any, train: bool, batch: int | None = None) -> Any:
        batch = min(batch or self.job["batch"], len(part))
        return make_loader(part, batch, train, self.job["seed"], self.device)


def held_loss(net: nn.Module, loader: Any) -> tuple[float, float]:
    """Cross-entropy and accuracy."""
    loss, right, count = 0.0, 0.0, 0
    net.eval()
    with torch.no_grad():
        for x, y in loader:
            out = net(x).float()
            loss += float(nn.functional.cross_entropy(out, y, reduction="sum"))
            right += float((out.argmax(1) == y).sum())
            count += len(y)
    return loss / count, right / count


def judge_search(
    it: Problem, net: dmcp.Supernet, found: dmcp.SearchResult, config: dmcp.SearchConfig
) -> dict[str, Any]:
    """Figures about the chains, and how well the soft network sees what hard pruning does."""
    widths = dmcp.expected(found)
    out: dict[str, Any] = {"widths": list(widths.values()), "macs": it.graph.macs(widths) / it.graph.macs()}
    out["params"] = it.graph.params(widths) / it.graph.params()
    random = torch.Generator().manual_seed(0)
    drawn = it.graph.macs(sample_groups(found.alphas, found.sizes, 3000, random).cpu()).double()
    target = found.budget.limits[0].target
    out["near"] = float(((drawn / target - 1).abs() <= 0.1).double().mean())
    out["spread"] = float((drawn / it.graph.macs()).std())
    chances = alphas.chances_of_widths(marginals(found.alphas.double()), found.sizes)
    out["one_peak"] = sum(alphas.count_peaks(own, 0.02) == 1 for own in chances)
    out["at_floor"] = sum(own[0] == max(own) for own in chances)
    out["at_full"] = sum(own[-1] == max(own) for own in chances)
    ratios = [record.ratios[0] for record in found.log if record.ratios]
    last = ratios[-max(1, len(ratios) // 10) :]
    out["ratio"] = [min(last), max(last)]
    batches = [batch for _, batch in zip(range(BATCHES), it.loader(it.held, False, 512), strict=False)]
    net.train()  # BatchNorm by the batch
    state = {name: tensor.clone() for name, tensor in net.model.state_dict().items()}
    out |= soft_and_hard(it, net, found, config, batches)
    by_class = soft_and_hard(it, net, found, config, sorted_by_class(batches))
    out |= {f"{key}_sorted": value for key, value in by_class.items()}
    if it.job.get("judge"):
        mean = mean_loss(it, net, config, batches)
        out["judged"] = [mean(net.hard(it.graph.widths(row))) for row in structures()]
    net.model.load_state_dict(state)
    return out


def sorted_by_class(batches: list[Any]) -> list[Any]:
    """The same images in batches of a few classes each, by which searches were judged until issue 41."""
    images, labels = (torch.cat(parts) for parts in zip(*batches, strict=True))
    order = labels.argsort(stable=True)
    sizes = [len(own) for _, own in batches]
    return list(zip(images[order].split(sizes), labels[order].split(sizes), strict=True))


def mean_loss(
    it: Problem, net: dmcp.Supernet, config: dmcp.SearchConfig, batches: list[Any]
) -> Callable[[Tensor], float]:
    """A function from gates to the mean loss of that sub-network."""
    loss = classification_loss(config.label_smoothing)

    def mean(gates: Tensor) -> float:
        with torch.no_grad(), autocast(it):
            return sum(float(loss(net(x, gates), (x, y))) for x, y in batches) / len(batches)

    return mean


def autocast(it: Problem) -> torch.autocast:
    return torch.autocast(it.device.type, torch.bfloat16, enabled=it.device.type == "cuda")


def soft_and_hard(
    it: Problem, net: dmcp.Supernet, found: dmcp.SearchResult, config: dmcp.SearchConfig, batches: list[Any]
) -> dict[str, Any]:
    """How much of what hard pruning costs the soft network sees, and whether both rank the spaces alike."""
    widths = dmcp.expected(found)
    loss = classification_loss(config.label_smoothing)
    chain = chains_of(net, config.min_channels, config.max_channels, config.align)
    mean = mean_loss(it, net, config, batches)
    full, hard = mean(net.hard(it.graph.full)), mean(net.hard(widths))
    with torch.no_grad():
        soft_gates = chain.gates(chain.marginals(net.alpha))
    soft = mean(soft_gates)
    out: dict[str, Any] = {"loss_full": full, "loss_hard": hard, "loss_soft": soft}
    out["seen"] = (soft - full) / (hard - full)
    with search_steps.only_alphas(net):
        net.alpha.grad = None
        for x, y in batches:
            with autocast(it):
                value = loss(net(x, chain.gates(chain.marginals(net.alpha))), (x, y))
            (value / len(batches)).backward()
    assert net.alpha.grad is not None
    slope = net.alpha.grad.double().sum(dim=1).cpu()  # of moving all alphas of a space together
    net.alpha.grad = None
    alpha = found.alphas.double().requires_grad_()
    expected = moment(marginals(alpha) * (found.sizes > 0), found.sizes, 1)
    moved = torch.autograd.grad(expected.sum(), alpha)[0].sum(dim=1)
    base = list(widths.values())
    names = list(widths)
    sizes = [space.size for space in it.graph.spaces]
    soft_utility, hard_utility = [], []
    for place, (name, size) in enumerate(zip(names, sizes, strict=True)):
        step = max(1, round(size / 8))
        low, high = max(1, base[place] - step), min(size, base[place] + step)
        ends = [it.graph.widths({**widths, name: end}) for end in (low, high)]
        macs = it.graph.macs(ends[1]) - it.graph.macs(ends[0])
        hard_utility.append((mean(net.hard(ends[0])) - mean(net.hard(ends[1]))) / macs)
        per_channel = macs / (high - low)
        soft_utility.append(float(-slope[place] / moved[place].clamp(min=1e-6)) / per_channel)
    out["utility"] = spearman(soft_utility, hard_utility)
    out["soft_utility"], out["hard_utility"] = soft_utility, hard_utility
    return out


def train_one(it: Problem, small: nn.Module, how: dict[str, Any], teacher: nn.Module | None) -> dict[str, Any]:
    """Train a network that was cut; its held-out loss and accuracy, before and after."""
    start = time.perf_counter()
    train = it.loader(it.rest, True)
    found = {}
    if how["from"] == "scratch":
        dmcp.reinitialize(small, generator=torch.Generator().manual_seed(it.job["seed"]))
    else:
        dmcp.recalibrate(small, it.loader(it.rest, False))
        found["cut"] = held_loss(small, it.loader(it.held, False))[1]
    known = {field.name for field in dataclasses.fields(dmcp.TrainConfig)}
    settings = {key: value for key, value in how.items() if key in known}
    config = dmcp.TrainConfig(seed=it.job["seed"], **{**it.job["train"], **settings})
    parameters = list(small.to(it.device).parameters())
    average = [parameter.detach().clone() for parameter in parameters]

    def follow(*_: Any) -> None:
        with torch.no_grad():
            torch._foreach_lerp_(average, parameters, 1 - how["ema"])

    hook = register_optimizer_step_post_hook(follow) if how.get("ema") else None
    records = dmcp.train(small, train, config, teacher=teacher)
    loss, accuracy = held_loss(small, it.loader(it.held, False))
    if hook:
        hook.remove()
        with torch.no_grad():
            torch._foreach_copy_(parameters, average)
        dmcp.recalibrate(small, it.loader(it.rest, False))
        found["ema_accuracy"] = held_loss(small, it.loader(it.held, False))[1]
    last = records[-len(train) :]  # the last epoch; lines recorded before issue 41: the last 50 steps
    train_loss = sum(record.loss for record in last) / len(last)
    seconds = time.perf_counter() - start
    return found | {"loss": loss, "accuracy": accuracy, "train_loss": train_loss, "seconds": seconds}


def torch_pruning(it: Problem, model: nn.Module, across: bool) -> Any:
    """What the package torch-pruning keeps of a trained model at the budget."""
    problem = PeerProblem(
        model=model,
        graph=it.graph,
        loader=it.loader(it.rest, True),
        held_out=it.loader(it.held, False),
        budget=parse_budget(it.job["budget"], it.graph),
        recipe=resolve_training(dmcp.TrainConfig()),
        min_widths=it.graph.widths(dict.fromkeys(it.graph.full, 1)),
    )
    return peer.find_torch_pruning(problem, peer.TorchPruningConfig(global_pruning=across)).kept


def run(job: dict[str, Any], emit: Callable[..., None]) -> None:
    """One job; every part is a line as soon as it is done."""
    it = Problem(job)
    sources: dict[str, nn.Module] = {"scratch": it.model}
    widths: dict[str, Any] = {"unpruned": it.graph.full}
    nets: dict[str, nn.Module] = {}
    if "pretrain" in job:
        model = copy.deepcopy(it.model)
        how = {"name": "pretrained", "from": "scratch", "widths": "unpruned"} | job["pretrain"]
        emit(trained=how | train_one(it, model, how, None))
        sources["pretrained"] = nets["pretrained"] = model
    budgets = [job["budget"]] if isinstance(job.get("budget"), str) else job.get("budget", [])
    for budget in budgets:  # the first is that of `uniform` and `dmcp`
        align = job.get("search", {}).get("align", 1)
        widths[f"uniform {budget}"] = dmcp.uniform(it.graph, budget, align=align)
    if budgets:
        widths["uniform"] = widths[f"uniform {budgets[0]}"]
    searches = job.get("searches", {}) | ({"dmcp": job["search"]} if "search" in job else {})
    for name, settings in searches.items():
        batch, moves = settings.pop("batch", None), settings.pop("moves", {})
        for_weights, for_alphas = it.rest, None  # the alphas see the batches of the weights
        if "alphas_on" in settings:
            for_weights, held_out = datasets.split(it.rest, settings.pop("alphas_on"), 1)
            for_alphas = it.loader(held_out, True, batch)
        config = dmcp.SearchConfig(**{"budget": budgets[0], "seed": job["seed"], "align": 1, **settings})
        net = dmcp.Supernet(sources.get("pretrained", it.model), it.graph, config.groups, config.align)
        start = time.perf_counter()
        found = dmcp.search(net, it.loader(for_weights, True, batch), config, arch_loader=for_alphas)
        seconds = time.perf_counter() - start
        emit(search=judge_search(it, net, found, config) | {"name": name, "seconds": seconds})
        widths[name], sources[name] = dmcp.expected(found), net.model
        for budget, more in moves.items():  # widths for another budget: scaled, and after a little more searching
            scaled = found.for_budget(parse_budget(budget, it.graph))
            widths[f"{name} scaled to {budget}"] = dmcp.expected(scaled)
            on, start = copy.deepcopy(net), time.perf_counter()
            further = dataclasses.replace(config, budget=budget, init="given", warmup=0.0, **more)
            moved = dmcp.search(on, it.loader(it.rest, True, batch), further)
            seconds = time.perf_counter() - start
            emit(search=judge_search(it, on, moved, further) | {"name": f"{name} to {budget}", "seconds": seconds})
            widths[f"{name} moved to {budget}"] = dmcp.expected(moved)
    best: dict[str, Any] = {}
    for how in job.get("finals", []):
        name, key, source = how["name"], how["widths"], how.setdefault("from", "scratch")
        if how.get("like") == "best":  # of the trainings before
            how |= {key: value for key, value in best["how"].items() if key in ("lr", "warmup_lr", "warmup_epochs")}
        if key in ("tp-local", "tp-global"):
            own = torch_pruning(it, sources["pretrained"], key == "tp-global")
        else:
            own = widths[key] if isinstance(key, str) else it.graph.widths(key)
        nets[name] = dmcp.cut(sources[source], it.graph, own, by=how.get("by", "first"))
        tested = train_one(it, nets[name], how, nets[how["teacher"]] if how.get("teacher") else None)
        if tested["accuracy"] > best.get("accuracy", 0):
            best = {"how": how, "accuracy": tested["accuracy"]}
        share = it.graph.macs({key: kept if isinstance(kept, int) else len(kept) for key, kept in own.items()})
        emit(trained=how | tested | {"macs": share / it.graph.macs()})


def worker(jobs: Any, path: str, number: int) -> None:
    """Do jobs until none is left."""
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 8))
    while True:
        try:
            job = jobs.get(timeout=2)
        except queue.Empty:
            return
        plain = {key: value for key, value in job.items() if key != "finals"}

        def emit(job: dict[str, Any] = plain, **found: Any) -> None:
            with open(path, "a") as file:
                file.write(json.dumps({"job": job, **found}) + "\n")
            print(number, job["name"], *found, flush=True)

        try:
            run(job, emit)
        except Exception:
            emit(error=traceback.format_exc()[-2000:])


def table(path: Path) -> None:
    """Print recorded lines as the tables of REPORT.md."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    trained = [it["trained"] | {"job": it["job"]["name"]} for it in lines if "trained" in it]
    losses = {tuple(it["widths"]): it["loss"] for it in trained if isinstance(it["widths"], list)}
    print("| search | near | spread | one peak | E/T | seen | soft and hard | structures | loss cut | params |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for line in lines:
        if it := line.get("search"):
            rank = "-"
            if "judged" in it:
                rank = f"{spearman(it['judged'], [losses[tuple(row)] for row in structures()]):.2f}"
            print(
                f"| {line['job']['name']} | {it['near']:.0%} | {100 * it['spread']:.1f} | {it['one_peak']} of "
                f"{len(it['widths'])} | {it['ratio'][0]:.3f} to {it['ratio'][1]:.3f} | {it['seen']:.2f} | "
                f"{it['utility']:.2f} | {rank} | {it['loss_hard'] - it['loss_full']:.3f} | {it['params']:.0%} |"
            )
    print("\n| trained | weights | teacher | accuracy | loss | training loss |\n|---|---|---|---|---|---|")
    for it in trained:
        if isinstance(it["widths"], str):
            weights = it.get("from", "kept" if it.get("keep") else "scratch")
            cells = (f"{it['job']}: {it['widths']}", weights, it.get("teacher", ""), f"{100 * it['accuracy']:.1f}")
            train_loss = f"{it['train_loss']:.3f}" if "train_loss" in it else "–"
            print(f"| {' | '.join(cells)} | {it['loss']:.3f} | {train_loss} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("jobs", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--processes", type=int, default=1)
    given = parser.parse_args()
    if given.out is None:
        table(given.jobs)
        return
    context = multiprocessing.get_context("spawn")
    jobs = context.Queue()
    content = json.loads(given.jobs.read_text())
    if isinstance(content, dict):  # with the rule by which its results decide
        content = content["jobs"]
    for job in content:
        jobs.put(job)
    workers = [context.Process(target=worker, args=(jobs, str(given.out), number)) for number in range(given.processes)]
    for one in workers:
        one.start()
        time.sleep(0.5)
    for one in workers:
        one.join()


if __name__ == "__main__":
    main()
