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
    from dmcp.budget import Budget
    from dmcp.budget import parse as parse_budget
    from dmcp.calibration import recalibrate
    from dmcp.checkpoint import Checkpointer
    from dmcp.cutting import cut, reinitialize
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
    from dmcp.exporting import export, quantize
    from dmcp.latency import Latency, measure_latency
    from dmcp.losses import LowerIsBetter
    from dmcp.pruning import Loaders, PruneResult, prune
    from dmcp.runs import load_search
    from dmcp.sampling import direct, expected, random_widths, uniform
    from dmcp.searching.config import SearchResult
    from dmcp.searching.search import Searcher, search
    from dmcp.settings import Engine, LatencyConfig, Retrain, SearchConfig, TrainConfig, paper
    from dmcp.storage import load, save
    from dmcp.supernet import Supernet
    from dmcp.tracing.graph import ChannelGraph
    from dmcp.tracing.rules import RULES
    from dmcp.tracing.trace import trace
    from dmcp.tracing.verification import verify
    from dmcp.training import Event, Runtime, Task, evaluate, train
    from dmcp.widths import ChannelSpace, Widths

__version__ = "0.2.0"

# fmt: off
__all__ = [
    "RULES", "ArgumentError", "Budget", "BudgetError", "ChannelGraph", "ChannelSpace", "Checkpointer", "CutError",
    "DataError", "DmcpError", "Engine", "Event", "FileError", "Latency", "LatencyConfig", "Loaders", "LowerIsBetter",
    "PruneResult", "Retrain", "Runtime", "SearchConfig", "SearchResult", "Searcher", "StoppedError", "Supernet", "Task",
    "TraceError", "TrainConfig", "TrainingError", "Widths", "WidthsError", "__version__", "cut", "direct", "evaluate",
    "expected", "export", "load", "load_search", "measure_latency", "paper", "parse_budget", "prune", "quantize",
    "random_widths", "recalibrate", "reinitialize", "save", "search", "trace", "train", "uniform", "verify",
]
_NAMES = {  # module -> what it gives
    "budget": "Budget", "calibration": "recalibrate", "checkpoint": "Checkpointer",
    "cutting": "cut reinitialize",
    "errors": "ArgumentError BudgetError CutError DataError DmcpError FileError StoppedError TraceError TrainingError "
    "WidthsError",
    "exporting": "export quantize", "latency": "Latency measure_latency",
    "losses": "LowerIsBetter", "pruning": "Loaders PruneResult prune", "runs": "load_search",
    "sampling": "direct expected random_widths uniform", "searching.config": "SearchResult",
    "searching.search": "Searcher search", "settings": "Engine LatencyConfig Retrain SearchConfig TrainConfig paper",
    "storage": "load save", "supernet": "Supernet", "tracing.graph": "ChannelGraph", "tracing.rules": "RULES",
    "tracing.trace": "trace", "tracing.verification": "verify",
    "training": "Event Runtime Task evaluate train", "widths": "ChannelSpace Widths",
}
# fmt: on
_PLACES = {name: (module, name) for module, names in _NAMES.items() for name in names.split()}
_PLACES["parse_budget"] = ("budget", "parse")


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
