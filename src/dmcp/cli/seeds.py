"""Run `dmcp prune --seeds`: the same run with several seeds, and a summary of them."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dmcp.budgets import limits_latency
from dmcp.cli.config import Request, make_config
from dmcp.cli.job import choose_device, open_checked, with_checked_budgets
from dmcp.cli.output import print_json
from dmcp.cli.processes import Command, run_side_by_side
from dmcp.cli.session import run_folder
from dmcp.errors import DmcpError
from dmcp.exporting.latency import LATENCY_FILE, Latency
from dmcp.request import check_method
from dmcp.runs.config import RunConfig
from dmcp.runs.files import SUMMARY, is_run
from dmcp.runs.reading import read_run
from dmcp.runs.records import Row
from dmcp.runs.writing import Run
from dmcp.units import show_mean, show_range, table


def prune_seeds(config: RunConfig, request: Request) -> None:
    """Run the same command for each seed, side by side, in FOLDER/seed-K, and print the mean and deviation.

    The same command, started again, leaves finished seeds as they are and continues the others.
    """
    check_method(config.method)
    folder = run_folder(config, request)
    runs = {seed: folder / f"seed-{seed}" for seed in range(config.seed, config.seed + request.seeds)}

    # A seed that was begun with other settings is refused.
    for seed, run in runs.items():
        if is_run(run):
            make_config(replace(request, resume=str(run), typed={**request.typed, "seed": seed}))

    # Mistakes are reported here once, before the process of each seed would report them.
    job = open_checked(replace(config, device="cpu"), request.typed)
    job = replace(job, config=replace(job.config, device=config.device))
    job = with_checked_budgets(job, str(folder))

    # Latency is measured once, beforehand: processes side by side would slow each other down.
    words = tuple(sys.argv[1:])
    if any(map(limits_latency, job.budgets)) and not config.latency:
        latency = Latency.of(job.graph)
        assert latency is not None
        latency.save(folder / LATENCY_FILE)
        words += ("--latency", str(folder / LATENCY_FILE))

    # Each seed is a command of its own, which begins its run or goes on with it.
    commands = []
    for seed, run in runs.items():
        if not Run(run).done:
            option = "--out"
            if is_run(run):
                option = "--resume"
            of_seed = ("--seeds", "1", "--seed", str(seed), option, str(run))
            commands.append(Command(run.name, (*words, *of_seed)))
    Run(folder).write(SUMMARY, {"runs": [run.name for run in runs.values()], "networks": []})  # until all are done
    failed = run_side_by_side(
        commands, folder, choose_device(config), at_once=request.seeds, quiet=request.quiet, total=request.seeds
    )
    if failed:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(failed.items()))
        raise DmcpError(
            f"{len(failed)} of {len(runs)} seeds failed; repeat the command to start only these again: {reasons}"
        )

    summary = summarize(list(runs.values()))
    Run(folder).write(SUMMARY, summary)
    if request.as_json:
        print_json({"folder": str(folder)} | summary)
    else:
        print(f"{summary_table(summary)}\n\n{folder}")


def summarize(folders: Sequence[Path]) -> dict[str, Any]:
    """Return the results of the runs in these folders, network by network."""
    runs = [read_run(folder) for folder in folders]
    rows_of: dict[str, list[Row]] = {}
    for run in runs:
        for row in run.rows:
            rows_of.setdefault(row.name, []).append(row)
    networks = [_summarize_network(name, rows) for name, rows in rows_of.items()]
    return {"runs": [run.folder.name for run in runs], "networks": networks}


def _summarize_network(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    """Return what the rows of one network say, a row for each run; a single run has no deviation."""
    accuracies = [row.accuracy for row in rows]
    deviation = None
    if len(accuracies) > 1:
        deviation = statistics.stdev(accuracies)
    return {
        "name": name,
        "accuracy": accuracies,
        "macs": [row.macs for row in rows],
        "params": [row.params for row in rows],
        "mean": statistics.fmean(accuracies),
        "deviation": deviation,
    }


def summary_table(summary: Mapping[str, Any]) -> str:
    """Return the summary as text, where an accuracy is: mean ± standard deviation (number of runs)."""
    rows = [["network", "MACs", "params", "accuracy in %"]]
    for network in summary["networks"]:
        macs = show_range(f"{min(network['macs']):,}", f"{max(network['macs']):,}")
        params = show_range(f"{min(network['params']):,}", f"{max(network['params']):,}")
        rows.append([network["name"], macs, params, show_mean(network["accuracy"])])
    return table(rows)
