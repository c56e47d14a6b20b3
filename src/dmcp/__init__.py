"""Channel pruning for any PyTorch CNN.

result = dmcp.prune(model, loader, val_loader, budget="50%")    # all of what follows; the model is not changed

graph = dmcp.trace(model, torch.zeros(2, 3, 224, 224))          # spaces, and what is unprunable and why
net = dmcp.Supernet(model, graph)                               # every sub-network of the model
found = dmcp.search(net, loader, dmcp.SearchConfig(budget="50%"))
widths = dmcp.expected(found)                                   # inside the budget; dmcp.direct samples others
small = dmcp.cut(net.model, graph, widths)                      # a plain nn.Module of the model's own class
dmcp.recalibrate(small, loader)
dmcp.train(small, loader, dmcp.TrainConfig(epochs=20))
dmcp.save(small, widths, "folder")                              # safetensors and JSON

A name is imported when it is first used: `import dmcp` alone does not import torch.
"""

import sys

if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] in ("dmcp", "-mdmcp") and not sys.flags.safe_path:
    # The current folder comes first under `python -m dmcp`: its files must not take the place of libraries.
    del sys.path[0]

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmcp.budgets import Budget
    from dmcp.cutting import cut, reinitialize
    from dmcp.defaults import paper
    from dmcp.errors import (
        ArgumentError,
        BudgetError,
        CutError,
        DataError,
        DmcpError,
        FileError,
        StoppedError,
        TraceError,
        TrainingError,
        WidthsError,
    )
    from dmcp.exporting.export import export, quantize
    from dmcp.exporting.latency import Latency, measure_latency
    from dmcp.exporting.latency_files import read_latency, write_networks
    from dmcp.pruning import prune
    from dmcp.request import Loaders
    from dmcp.results import PruneResult
    from dmcp.runs.saved_search import load_search
    from dmcp.runs.storage import load, save
    from dmcp.runtime.checkpoint import Checkpointer
    from dmcp.searching.budget import parse_budget
    from dmcp.searching.importance import importance
    from dmcp.searching.records import SearchResult
    from dmcp.searching.sampling import direct, expected, random_widths, uniform
    from dmcp.searching.search import Searcher, search
    from dmcp.searching.supernet import Supernet
    from dmcp.settings import Engine, LatencyConfig, Retrain, SearchConfig, TrainConfig
    from dmcp.tracing.graph import ChannelGraph
    from dmcp.tracing.rules import RULES
    from dmcp.tracing.trace import trace
    from dmcp.tracing.verification import verify
    from dmcp.tracing.widths import ChannelSpace, Widths
    from dmcp.training.calibration import recalibrate
    from dmcp.training.loop import Event, Runtime, Task, evaluate, train
    from dmcp.training.losses import LowerIsBetter

__version__ = "0.3.0"

# fmt: off
__all__ = [
    "RULES", "ArgumentError", "Budget", "BudgetError", "ChannelGraph", "ChannelSpace", "Checkpointer", "CutError",
    "DataError", "DmcpError", "Engine", "Event", "FileError", "Latency", "LatencyConfig", "Loaders", "LowerIsBetter",
    "PruneResult", "Retrain", "Runtime", "SearchConfig", "SearchResult", "Searcher", "StoppedError", "Supernet", "Task",
    "TraceError", "TrainConfig", "TrainingError", "Widths", "WidthsError", "__version__", "cut", "direct", "evaluate",
    "expected", "export", "importance", "load", "load_search", "measure_latency", "paper", "parse_budget", "prune",
    "quantize", "random_widths", "read_latency", "recalibrate", "reinitialize", "save", "search", "trace", "train",
    "uniform", "verify", "write_networks",
]
_NAMES = {  # module -> what it gives
    "budgets": "Budget",
    "cutting": "cut reinitialize",
    "defaults": "paper",
    "errors": "ArgumentError BudgetError CutError DataError DmcpError FileError StoppedError TraceError TrainingError "
    "WidthsError",
    "exporting.export": "export quantize",
    "exporting.latency": "Latency measure_latency",
    "exporting.latency_files": "read_latency write_networks",
    "pruning": "prune",
    "request": "Loaders",
    "results": "PruneResult",
    "runs.saved_search": "load_search",
    "runs.storage": "load save",
    "runtime.checkpoint": "Checkpointer",
    "searching.budget": "parse_budget",
    "searching.importance": "importance",
    "searching.records": "SearchResult",
    "searching.sampling": "direct expected random_widths uniform",
    "searching.search": "Searcher search",
    "searching.supernet": "Supernet",
    "settings": "Engine LatencyConfig Retrain SearchConfig TrainConfig",
    "tracing.graph": "ChannelGraph",
    "tracing.rules": "RULES",
    "tracing.trace": "trace",
    "tracing.verification": "verify",
    "tracing.widths": "ChannelSpace Widths",
    "training.calibration": "recalibrate",
    "training.loop": "Event Runtime Task evaluate train",
    "training.losses": "LowerIsBetter",
}
# fmt: on
_PLACES = {name: (module, name) for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """Import a public name, or a module of the package, when it is first used."""
    if name in _PLACES:
        module, attribute = _PLACES[name]
        globals()[name] = getattr(import_module(f"dmcp.{module}"), attribute)
        return globals()[name]
    if not name.startswith("_") and find_spec(f"dmcp.{name}"):
        return import_module(f"dmcp.{name}")
    raise AttributeError(f"module 'dmcp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]
