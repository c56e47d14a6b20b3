"""How fast and how large: steps of training, search and pruned networks, whole epochs on data, drawing structures."""

from dmcp.bench.drawing import measure_sampling
from dmcp.bench.epochs import measure_epochs
from dmcp.bench.pruned import measure_pruned
from dmcp.bench.results import Epochs, Measured, Pruned, Sampled
from dmcp.bench.steps import measure
from dmcp.bench.stopwatch import device_name

__all__ = [
    "Epochs",
    "Measured",
    "Pruned",
    "Sampled",
    "device_name",
    "measure",
    "measure_epochs",
    "measure_pruned",
    "measure_sampling",
]
