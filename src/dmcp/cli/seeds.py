"""dmcp prune --seeds: the same run with several seeds, and its summary."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dmcp.budgets import limits_latency
from dmcp.cli.config import Request, make_config
from dmcp.cli.job import open_checked, place_of, with_checked_budgets
from dmcp.cli.output import print_json
from dmcp.cli.processes import Command, run_side_by_side
from dmcp.cli.session import run_folder
from dmcp.errors import DmcpError
from dmcp.exporting.latency import LATENCY_FILE, Latency
from dmcp.request import check_method
from dmcp.runs.config import RunConfig
from dmcp.runs.files import is_run
from dmcp.runs.reading import read_run
from dmcp.runs.writing import Run
from dmcp.units import between, spread, table

SUMMARY = "summary.json"


def prune_seeds(config: RunConfig, request: Request) -> None:
    """Run the same command for each seed, side by side, in FOLDER/seed-K, and print their mean and spread.

    Started again, it leaves finished seeds as they are and continues the others.
    """
    check_method(config.method)
    folder = run_folder(config, request)
    runs = {seed: folder / f"seed-{seed}" for seed in range(config.seed, config.seed + request.seeds)}
    for seed, run in runs.items():
        if is_run(run):  # refuses one that was begun with other settings
            make_config(replace(request, resume=str(run), typed={**request.typed, "seed": seed}))

    # A mistake is told once, now, and not by each seed.
    job = open_checked(replace(config, device="cpu"), request.typed)
    job = replace(job, config=replace(job.config, device=config.device))
    job = with_checked_budgets(job, str(folder))

    # Latency is measured once: side by side the processes would slow each other down.
    words = tuple(sys.argv[1:])
    if any(map(limits_latency, job.budgets)) and not config.latency:
        table_of_latency = Latency.of(job.graph)
        assert table_of_latency is not None
        table_of_latency.save(folder / LATENCY_FILE)
        words += ("--latency", str(folder / LATENCY_FILE))

    commands = []
    for seed, run in runs.items():
        if not Run(run).done:
            target = "--resume" if is_run(run) else "--out"
            commands.append(Command(run.name, (*words, "--seeds", "1", "--seed", str(seed), target, str(run))))
    failed = run_side_by_side(
        commands, folder, place_of(config), at_once=request.seeds, quiet=request.quiet, total=request.seeds
    )
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(failed.items()))
        raise DmcpError(f"{len(failed)} of {len(runs)} seeds failed; the same command restarts only them: {reasons}")

    summary = summarize(list(runs.values()))
    Run(folder).write(SUMMARY, summary)
    if request.as_json:
        print_json({"folder": str(folder)} | summary)
    else:
        print(f"{summary_table(summary)}\n\n{folder}")


def summarize(folders: Sequence[Path]) -> dict[str, Any]:
    """The results of the runs in these folders, network by network; deviation: ddof = 1, None for one run."""
    runs = [read_run(folder) for folder in folders]
    every_row = [row for run in runs for row in run.rows]
    networks = []
    for name in dict.fromkeys(row.name for row in every_row):
        rows = [row for row in every_row if row.name == name]
        accuracies = [row.accuracy for row in rows]
        networks.append(
            {
                "name": name,
                "accuracy": accuracies,
                "macs": [row.macs for row in rows],
                "params": [row.params for row in rows],
                "mean": statistics.fmean(accuracies),
                "deviation": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
            }
        )
    return {"runs": [run.name for run in runs], "networks": networks}


def summary_table(summary: Mapping[str, Any]) -> str:
    """The summary as text: mean accuracy ± standard deviation (runs)."""
    rows = [["network", "MACs", "params", "accuracy in %"]]
    for network in summary["networks"]:
        macs = between(f"{min(network['macs']):,}", f"{max(network['macs']):,}")
        params = between(f"{min(network['params']):,}", f"{max(network['params']):,}")
        rows.append([network["name"], macs, params, spread(network["accuracy"])])
    return table(rows)
