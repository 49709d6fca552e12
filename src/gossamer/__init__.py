"""gossamer: sparse and fused transformer operators for PyTorch."""

from typing import Any

from gossamer._modules import on_demand

__version__ = "0.1.0"
# A room is imported when it is first asked for.
_room, __dir__ = on_demand(globals(), "cli")


def __getattr__(name: str) -> Any:
    if name == "warm_up":
        from gossamer._warm_up import warm_up

        return warm_up
    return _room(name)
