"""Run every model of the zoo through the contract, and write docs/zoo.md.

    python -m zoo [--only PATTERNS] [--jobs 2] [--fresh] [--peer] [--page-only]

Results are appended to runs/zoo.jsonl as they come; a run that was stopped goes on where it was. The exit code is 1 if
any model is wrong in silence: cut without complaint, but unequal to the gated original.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zoo import contract, page, peer, workers
from zoo.contract import Result
from zoo.models import Entry, select

RESULTS, PEERS, PAGE = Path("runs/zoo.jsonl"), Path("runs/zoo_peer.jsonl"), Path("docs/zoo.md")

Record = dict[str, Any]  # one JSON line, with the model's name


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is missing, then write the page from all that is known."""
    options = _options(argv)
    entries = select(options.only)
    if not entries:
        print(f"No model of the zoo fits {options.only!r}.")
        return 2
    compare = options.peer and peer.installed()
    if not options.page_only:
        run_contract(_missing(RESULTS, entries, options.fresh), options.jobs, options.limit)
        if compare:
            run_peer(_missing(PEERS, entries, options.fresh), options.jobs)
    results = {name: Result.from_json(record) for name, record in _read(RESULTS).items()}
    peers = {name: record["outcome"] for name, record in _read(PEERS).items()} if compare else None
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page.write(results, peers, "python -m zoo" + " --peer" * compare))
    chosen = [results[entry.name] for entry in entries if entry.name in results]
    counts = {status: sum(result.status == status for result in chosen) for status in ("correct", "wrong")}
    print(f"{counts['correct']} of {len(chosen)} correct, {counts['wrong']} wrong in silence. {PAGE} is written.")
    return 1 if counts["wrong"] else 0


def run_contract(entries: Sequence[Entry], jobs: int, limit_seconds: float) -> None:
    """Add a line to runs/zoo.jsonl for each entry."""
    found = workers.run(entries, contract.check, jobs, limit_seconds)
    for count, (entry, result) in enumerate(found, 1):
        if isinstance(result, workers.WorkerError):
            result = Result(name=entry.name, status="failed", detail=str(result))
        _append(RESULTS, dataclasses.asdict(result))
        print(f"{count}/{len(entries)} {entry.name}: {result.status} {result.detail}"[:200], flush=True)


def run_peer(entries: Sequence[Entry], jobs: int) -> None:
    """Add a line to runs/zoo_peer.jsonl for each entry."""
    found = workers.run(entries, peer.prune, jobs, peer.LIMIT_SECONDS)
    for count, (entry, outcome) in enumerate(found, 1):
        _append(PEERS, {"name": entry.name, "outcome": str(outcome)})
        print(f"{count}/{len(entries)} {entry.name}: Torch-Pruning {outcome}"[:200], flush=True)


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m zoo", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="*", metavar="PATTERNS", help="models that fit, e.g. 'tv:resnet*,mobile'")
    parser.add_argument("--jobs", type=int, default=2, help="models at a time; the largest run alone")
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS", help="time limit per model")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results of the chosen models")
    parser.add_argument("--peer", action="store_true", help="add Torch-Pruning's column, where it is installed")
    parser.add_argument("--page-only", action="store_true", help="run nothing, write the page from earlier results")
    return parser.parse_args(argv)


def _missing(path: Path, entries: list[Entry], fresh: bool) -> list[Entry]:
    """The entries that have no record yet; with `fresh` their records are dropped first."""
    known = _read(path)
    if fresh:
        known = {name: record for name, record in known.items() if all(entry.name != name for entry in entries)}
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in known.values()))
    return [entry for entry in entries if entry.name not in known]


def _read(path: Path) -> dict[str, Record]:
    """The last record of each model; a line that was cut off when a run was stopped is left out."""
    records = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue
        records[record["name"]] = record
    return records


def _append(path: Path, record: Record) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    sys.exit(main())
