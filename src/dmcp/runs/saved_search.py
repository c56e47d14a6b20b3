"""The search of a run on the disk: facts in search.json, alphas and group sizes in search.safetensors."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from dmcp.arguments import checked
from dmcp.budgets import Budget
from dmcp.errors import FileError, WidthsError
from dmcp.exporting.latency import LATENCY_FILE, Latency
from dmcp.markov import marginals, moment
from dmcp.runs.files import ALPHAS, LOG, SEARCH_FILE, read_alphas, read_json, read_stage
from dmcp.runs.records import SearchRecord
from dmcp.runtime.io import from_plain, parse_tensors, quote, write_files
from dmcp.searching.records import SearchResult
from dmcp.tracing.graph import ChannelGraph

_FORMAT = "torch-dmcp search 1"
_MAX_GROUP = 2**31  # channels in a group, more than any network has


@dataclass(frozen=True, kw_only=True)
class _Facts:
    """The content of search.json."""

    format: str
    fingerprint: str
    spaces: tuple[str, ...]
    budget: Budget
    tolerance: float
    align: int | None
    sha256: str  # of the file of the alphas
    searched: Budget | None = None  # that the steps in the log are relative to, if it is another one

    def __post_init__(self) -> None:
        if self.format != _FORMAT:
            raise ValueError(self.format)


def save_search(result: SearchResult, folder: Path) -> None:
    """Write what sampling needs; the steps of the search are in the log."""
    alphas = safetensors.torch.save({"alphas": result.alphas.contiguous(), "sizes": result.sizes.contiguous()})
    facts = _Facts(
        format=_FORMAT,
        fingerprint=result.graph.fingerprint,
        spaces=tuple(space.name for space in result.graph.spaces),
        budget=result.budget,
        tolerance=result.tolerance,
        align=result.align,
        sha256=hashlib.sha256(alphas).hexdigest(),
        searched=result.searched,
    )
    write_files(folder, {ALPHAS: alphas, SEARCH_FILE: json.dumps(asdict(facts), indent=1).encode()})


@checked
def load_search(folder: str | os.PathLike[str], graph: ChannelGraph) -> SearchResult:
    """Load the search of a run, for `expected` and `direct`. `graph` is the trace of the same unpruned model.

    The file has `alphas` (S, G-1) and group `sizes` (S, G), which are 0 after the end of a short chain.
    """
    folder = Path(folder)
    try:
        facts = from_plain(_Facts, read_json(folder / SEARCH_FILE))
        steps = tuple(from_plain(SearchRecord, record) for record in read_stage(folder, "search"))
    except (TypeError, ValueError) as error:
        text = f"{folder}: {SEARCH_FILE} or {LOG} were not written by this version of torch-dmcp: {quote(error)}."
        raise FileError(text) from None
    if facts.fingerprint != graph.fingerprint or facts.spaces != tuple(space.name for space in graph.spaces):
        raise WidthsError(
            f"{folder}: this search has other spaces: build and trace the model exactly as for the search."
        )

    # A budget of latency counts by the table that the search had.
    if (folder / LATENCY_FILE).exists():
        graph = Latency.load(folder / LATENCY_FILE).attach(graph)

    alphas, sizes = _read_chains(folder, len(graph.spaces), facts.sha256)
    if (sizes.sum(dim=1) > torch.tensor([space.size for space in graph.spaces])).any():
        raise FileError(f"{folder / ALPHAS}: its chains have more channels than this network.")
    return SearchResult(
        alphas=alphas,
        sizes=sizes,
        graph=graph,
        budget=facts.budget,
        tolerance=facts.tolerance,
        align=facts.align,
        log=steps,
        searched=facts.searched,
    )


@dataclass(frozen=True)
class SearchSummary:
    """What a saved search says without its network."""

    targets: dict[str, int]  # of the budget, by kind
    expected: dict[str, float]  # expected width of each space
    searched: str  # the budget that the steps in the log are relative to, if it is another one
    kinds: tuple[str, ...]  # of its limits


def read_summary(folder: Path) -> SearchSummary:
    """Read targets and expected widths, with no graph to check them by."""
    facts = read_json(folder / SEARCH_FILE)
    spaces = [str(name) for name in facts["spaces"]]
    targets = {str(limit["kind"]): int(limit["target"]) for limit in facts["budget"]["limits"]}
    searched = ""
    kinds = tuple(targets)
    if facts.get("searched"):
        kinds = tuple(str(limit["kind"]) for limit in facts["searched"]["limits"])
        if facts["searched"] != facts["budget"]:
            searched = str(facts["searched"]["text"])

    alphas, sizes = _read_chains(folder, len(spaces), facts["sha256"])
    widths = moment(marginals(alphas.double()), sizes, 1).tolist()
    return SearchSummary(targets, dict(zip(spaces, widths, strict=True)), searched, kinds)


def _read_chains(folder: Path, spaces: int, checksum: object) -> tuple[Tensor, Tensor]:
    """Read alphas (S, G-1) and group sizes (S, G), and check them."""
    path = folder / ALPHAS
    tensors = parse_tensors(read_alphas(folder, checksum), path)
    alphas = tensors.get("alphas", torch.empty(0))
    sizes = tensors.get("sizes", torch.empty(0))
    if not _are_chains(alphas, sizes, spaces):
        raise FileError(f"{path}: its tensors are not chains of {spaces} spaces.")
    return alphas, sizes


def _are_chains(alphas: Tensor, sizes: Tensor, spaces: int) -> bool:
    """Whether types, shapes and values are those of chains: finite alphas, and a first group that is never empty."""
    if not alphas.is_floating_point() or sizes.dtype != torch.int64:
        return False
    if alphas.ndim != 2 or sizes.ndim != 2:
        return False
    if len(sizes) != spaces or alphas.shape != (spaces, sizes.shape[1] - 1):
        return False
    if not alphas.isfinite().all() or (sizes[:, 0] < 1).any():
        return False
    return not ((sizes < 0) | (sizes >= _MAX_GROUP)).any()
