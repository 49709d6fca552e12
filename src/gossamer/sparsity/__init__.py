"""How sparse the activations of a model are, where, and the gain; and the recipe that makes them sparse.

>>> mlp = gossamer.nn.GatedMLP(8, 24, activation="relu")
>>> report(mlp, [torch.ones(2, 5, 8)], measure=False).layers[""].tokens
10
"""

from gossamer.sparsity.recipe import DeadNeuronTracker, L1Schedule, reinitialize_, scalars
from gossamer.sparsity.report import Report, report
from gossamer.sparsity.statistics import LayerStatistics, Recorder

__all__ = [
    "DeadNeuronTracker",
    "L1Schedule",
    "LayerStatistics",
    "Recorder",
    "Report",
    "reinitialize_",
    "report",
    "scalars",
]
