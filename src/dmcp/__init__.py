"""Channel pruning for any PyTorch CNN.

result = dmcp.prune(model, loader, test_loader, budget="50%")   # all of what follows; the model is not changed

graph = dmcp.trace(model, torch.zeros(2, 3, 224, 224))          # spaces, and what is kept whole and why
net = dmcp.Supernet(model, graph)                               # every sub-network of the model
found = dmcp.search(net, loader, dmcp.SearchConfig(budget="50%"))
widths = dmcp.expected(found)                                   # inside the budget; dmcp.direct draws others
small = dmcp.cut(net.model, graph, widths)                      # a plain nn.Module of the model's own class
dmcp.recalibrate(small, loader)
dmcp.train(small, loader, dmcp.TrainConfig(epochs=20))
dmcp.save(small, widths, "folder")                              # safetensors and JSON
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dmcp.budget import Budget
    from dmcp.budget import parse as parse_budget
    from dmcp.calibration import recalibrate
    from dmcp.checkpoint import Checkpointer
    from dmcp.cutting import cut, reinitialize, verify
    from dmcp.errors import (
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
    from dmcp.latency.measure import measure_latency
    from dmcp.latency.table import Latency
    from dmcp.losses import LowerIsBetter
    from dmcp.pruning import Loaders, PruneResult, prune
    from dmcp.sampling import direct, expected, random_widths, uniform
    from dmcp.searching.config import SearchResult
    from dmcp.searching.search import search
    from dmcp.settings import Engine, LatencyConfig, Retrain, SearchConfig, TrainConfig
    from dmcp.storage import load, save
    from dmcp.supernet import Supernet
    from dmcp.tracing.graph import ChannelGraph
    from dmcp.tracing.rules import RULES
    from dmcp.tracing.trace import trace
    from dmcp.training import Event, Runtime, Task, evaluate, train
    from dmcp.widths import ChannelSpace, Widths

__version__ = "0.1.0"

__all__ = [
    "RULES",
    "Budget",
    "BudgetError",
    "ChannelGraph",
    "ChannelSpace",
    "Checkpointer",
    "CutError",
    "DataError",
    "DmcpError",
    "Engine",
    "Event",
    "FileError",
    "Latency",
    "LatencyConfig",
    "Loaders",
    "LowerIsBetter",
    "PruneResult",
    "Retrain",
    "Runtime",
    "SearchConfig",
    "SearchResult",
    "StoppedError",
    "Supernet",
    "Task",
    "TraceError",
    "TrainConfig",
    "TrainingError",
    "Widths",
    "WidthsError",
    "__version__",
    "cut",
    "direct",
    "evaluate",
    "expected",
    "export",
    "load",
    "measure_latency",
    "parse_budget",
    "prune",
    "quantize",
    "random_widths",
    "recalibrate",
    "reinitialize",
    "save",
    "search",
    "trace",
    "train",
    "uniform",
    "verify",
]

_HOME = {  # where each public name lives; imported when it is first asked for
    "dmcp.budget": "Budget parse_budget=parse",
    "dmcp.calibration": "recalibrate",
    "dmcp.checkpoint": "Checkpointer",
    "dmcp.cutting": "cut reinitialize verify",
    "dmcp.errors": "BudgetError CutError DataError DmcpError FileError "
    "StoppedError TraceError TrainingError WidthsError",
    "dmcp.exporting": "export quantize",
    "dmcp.latency.measure": "measure_latency",
    "dmcp.latency.table": "Latency",
    "dmcp.losses": "LowerIsBetter",
    "dmcp.pruning": "Loaders PruneResult prune",
    "dmcp.sampling": "direct expected random_widths uniform",
    "dmcp.searching.config": "SearchResult",
    "dmcp.searching.search": "search",
    "dmcp.settings": "Engine LatencyConfig Retrain SearchConfig TrainConfig",
    "dmcp.storage": "load save",
    "dmcp.supernet": "Supernet",
    "dmcp.tracing.graph": "ChannelGraph",
    "dmcp.tracing.rules": "RULES",
    "dmcp.tracing.trace": "trace",
    "dmcp.training": "Event Runtime Task evaluate train",
    "dmcp.widths": "ChannelSpace Widths",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for, so that `import dmcp` and `dmcp --help` need no torch."""
    for module, names in _HOME.items():
        for entry in names.split():
            public, _, own = entry.partition("=")
            if public == name:
                globals()[name] = value = getattr(importlib.import_module(module), own or public)
                return value
    raise AttributeError(f"module 'dmcp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
