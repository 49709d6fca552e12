"""gossamer: sparse and fused transformer operators for PyTorch."""

from gossamer._modules import on_demand

__version__ = "0.1.0"
# A room is imported when it is first asked for.
__getattr__, __dir__ = on_demand(globals(), "cli")
