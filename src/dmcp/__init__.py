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

from dmcp import interrupts as interrupts  # first: before torch is imported
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
