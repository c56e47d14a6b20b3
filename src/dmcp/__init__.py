"""Channel pruning for any PyTorch CNN.

graph = dmcp.trace(model, torch.zeros(2, 3, 224, 224))    # the model is not changed
print(graph.summary())                                    # spaces, and what is kept whole and why
widths = graph.widths({space.name: space.size // 2 for space in graph.spaces})
print(graph.macs(widths), graph.params(widths))
small = dmcp.cut(model, graph, widths)                    # a plain nn.Module of the model's own class
dmcp.save(small, widths, "folder")                        # safetensors and JSON
"""

from dmcp.cutting import cut, load, reinitialise, save, verify
from dmcp.errors import CutError, DmcpError, FileError, TraceError, WidthsError
from dmcp.graph import ChannelGraph
from dmcp.rules import RULES
from dmcp.spaces import ChannelSpace, Widths
from dmcp.supernet import Supernet
from dmcp.tracing import trace

__version__ = "0.1.0"

__all__ = [
    "RULES",
    "ChannelGraph",
    "ChannelSpace",
    "CutError",
    "DmcpError",
    "FileError",
    "Supernet",
    "TraceError",
    "Widths",
    "WidthsError",
    "__version__",
    "cut",
    "load",
    "reinitialise",
    "save",
    "trace",
    "verify",
]
