"""experiments/room.py: structures of equal cost, and a fit that finds a room which was planted."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import dmcp

sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))
import room

ROOM = {"model": "cifar:resnet20", "model_args": [], "classes": 10, "side": 32, "budget": "30%"}


@pytest.fixture(scope="module")
def graph() -> dmcp.ChannelGraph:
    return room.open_graph(ROOM)[1]


@pytest.mark.parametrize("spec", ["30%", "params:50%", "traffic:60%"])
def test_structures_use_up_any_budget_and_differ(graph: dmcp.ChannelGraph, spec: str) -> None:
    budget = dmcp.parse_budget(spec, graph)
    rows = room.structures(graph, budget, 12, align=None)
    assert len(set(rows)) == 12
    for row in rows:
        cost = graph.cost(budget.limits[0].kind, graph.widths(row))
        assert 0.95 <= cost / budget.limits[0].target <= 1


def test_layers_inside_blocks_are_told_from_streams(graph: dmcp.ChannelGraph) -> None:
    inner = [space.name for space in graph.spaces if room.is_inner(space.writers + space.readers)]
    assert inner == [f"layer{stage}.{block}.conv1" for stage in (1, 2, 3) for block in range(3)]


@pytest.mark.parametrize("distance", [0.0, 1.0])
def test_a_planted_room_is_found_within_its_error(graph: dmcp.ChannelGraph, distance: float) -> None:
    """Accuracies are a parabola around a structure that is so far from uniform widths, and noise."""
    budget = dmcp.parse_budget(ROOM["budget"], graph)
    even = tuple(dmcp.uniform(graph, budget).values())
    rows: list[dict[str, Any]] = [{"kind": "uniform", "widths": even}] * 4
    rows += [{"kind": "random", "widths": row} for row in room.structures(graph, budget, 30, align=None)]
    rows = [row | {"budget": ROOM["budget"], "ms": None} for row in rows]

    landscape = room.survey(graph, rows)
    top = landscape.uniform[1:6] + distance * np.array([0.5, 0.0, -0.4, 0.3, 0.0])

    def truth(terms: Any) -> Any:
        return -2 * ((terms[:, 1:6] - top) ** 2).sum(axis=1)

    room_in_truth = truth(landscape.candidates).max() - truth(landscape.uniform[None]).max()
    random = np.random.default_rng(0)
    errors: list[float] = []
    for _ in range(8):
        values = truth(landscape.terms) + random.normal(scale=0.2, size=len(rows))
        found = room.find_room(landscape, values)
        errors.append((found["corrected"] - room_in_truth) / found["error"])
        assert abs(found["noise"] - 0.2) < 0.12
    assert abs(np.mean(errors)) < 2.5
    assert np.max(np.abs(errors)) < 5


def test_a_room_is_shown_with_its_best_structure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Jobs fill a file; the structure that the fit finds best is another one inside the budget, and is tested, too."""
    graph = room.open_graph(ROOM)[1]
    common = dict.fromkeys(room.KEY, "") | ROOM
    path = tmp_path / "rooms.jsonl"
    random = torch.Generator().manual_seed(0)

    def lines(jobs: list[room.Job]) -> list[dict[str, Any]]:
        rows = []
        for job in jobs:
            values = torch.rand(3, generator=random).tolist()
            row = common | {"kind": job.kind, "seed": job.seed, "widths": job.widths, "ms": None}
            rows.append(row | dict(zip(room.MEASURES, values, strict=True)))
        return rows

    jobs = room.measured(common, graph, room.random_jobs(common, graph, 14, 3, None))
    assert len({job.key for job in jobs}) == 17
    assert all(0.95 <= job.share <= 1 for job in jobs)
    recorded = lines(jobs)
    best = room.measured(common, graph, room.best_jobs(common, graph, recorded, 2))
    assert all(0.9 <= job.share <= 1 for job in best)
    assert best[0].widths == best[1].widths
    recorded += lines(best)
    path.write_text("".join(json.dumps(line) + "\n" for line in recorded))
    room.show(path)
    shown = capsys.readouterr().out
    assert all(measure in shown for measure in room.MEASURES)
    assert shown.count("(2)") == len(room.MEASURES)


@pytest.mark.parametrize(("model", "spaces"), [("VGG16", 13), ("UNet", 10)])
def test_networks_of_rooms_can_be_narrowed_everywhere(model: str, spaces: int) -> None:
    ours = ROOM | {"model": f"small_networks:{model}", "noise": float(model == "UNet")}
    graph = room.open_graph(ours)[1]
    assert len(graph.spaces) == spaces and graph.prunable_share > 0.99
    rows = room.structures(graph, dmcp.parse_budget("15%", graph), 3, align=None)
    assert all(0.14 < graph.macs(graph.widths(row)) / graph.macs() <= 0.15 for row in rows)


def test_a_denoiser_is_trained_and_judged_by_its_psnr(tmp_path: Path) -> None:
    """Noise is new in every epoch; a network of other widths learns to remove it, and the file tells it apart."""
    images = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    for part in ("train", "test"):
        np.savez(tmp_path / f"{part}-0.npz", images=images, labels=np.arange(60) % 2)
    settings = argparse.Namespace(data=str(tmp_path), root="", batch=18, side=0, noise=0.5)
    common = {"model": "small_networks:UNet", "model_args": ["width=8"], "classes": 2, "side": 8, "noise": 0.5}
    ours = common | {"data": tmp_path.name, "budget": "50%", "epochs": 3, "batch": 18, "lr": 2e-3}
    assert room.room_of(ours) != room.room_of(ours | {"noise": 0.0}) == room.room_of({**ours, "noise": 0.0})

    worker = room.Worker(ours, settings)
    first, again = ([*worker.held_out] for _ in range(2))
    assert all(torch.equal(noisy, other) for (noisy, _), (other, _) in zip(first, again, strict=True))
    worker.batches.set_epoch(0)
    noisy, clean = next(iter(worker.batches))
    assert (noisy - clean).std().item() == pytest.approx(0.5, rel=0.1)
    worker.batches.set_epoch(1)
    later, target = next(iter(worker.batches))
    assert not torch.allclose(noisy - clean, later - target)

    loss, decibels = room.denoised(torch.nn.Identity(), worker.held_out, worker.full_range)
    assert loss == pytest.approx(0.25, rel=0.1)
    assert 100 * decibels == pytest.approx(20 * np.log10(worker.full_range / loss**0.5))
    (job,) = room.measured(ours, worker.graph, room.random_jobs(ours, worker.graph, 0, 1, None))
    row = worker.train(job)
    assert 0 < row["loss"] < 10 and row["accuracy"] > 0 and 0.45 <= row["macs"] <= 0.5
