"""How sparse the activations of a model are, where, and what that gains; and the recipe that makes them sparse.

>>> mlp = gossamer.nn.GatedMLP(8, 24, activation="relu")
>>> statistics(mlp, [torch.ones(2, 5, 8)])[""].tokens
10
"""

from gossamer.sparsity.recipe import DeadNeuronTracker, L1Schedule, reinitialize_, scalars
from gossamer.sparsity.report import Measured, Report, report
from gossamer.sparsity.statistics import LayerStatistics, Recorder, statistics

__all__ = [
    "DeadNeuronTracker",
    "L1Schedule",
    "LayerStatistics",
    "Measured",
    "Recorder",
    "Report",
    "reinitialize_",
    "report",
    "scalars",
    "statistics",
]
