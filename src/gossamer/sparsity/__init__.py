"""How sparse the activations of a model are, where, and what that gains.

>>> mlp = gossamer.nn.GatedMLP(8, 24, activation="relu")
>>> statistics(mlp, [torch.ones(2, 5, 8)])[""].tokens
10
"""

from gossamer.sparsity.report import Measured, Report, report
from gossamer.sparsity.statistics import LayerStatistics, Recorder, statistics

__all__ = [
    "LayerStatistics",
    "Measured",
    "Recorder",
    "Report",
    "report",
    "statistics",
]
