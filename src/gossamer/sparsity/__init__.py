"""How sparse the activations of a model are, where, and what that gains; and the recipe that makes them sparse.

>>> mlp = gossamer.nn.GatedMLP(8, 24, activation="relu")
>>> statistics(mlp, [torch.ones(2, 5, 8)])[""].tokens
10
"""

from gossamer.sparsity.coactivation import Coactivation, NeuronOrder, coactivation
from gossamer.sparsity.recipe import DeadNeuronTracker, L1Schedule, reinitialize_, scalars
from gossamer.sparsity.report import Measured, Report, report
from gossamer.sparsity.similarity import Similarity, TokenGroups, similarity
from gossamer.sparsity.statistics import LayerStatistics, Recorder, statistics

__all__ = [
    "Coactivation",
    "DeadNeuronTracker",
    "L1Schedule",
    "LayerStatistics",
    "Measured",
    "NeuronOrder",
    "Recorder",
    "Report",
    "Similarity",
    "TokenGroups",
    "coactivation",
    "reinitialize_",
    "report",
    "scalars",
    "similarity",
    "statistics",
]
