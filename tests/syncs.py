"""Steps that must not wait for the device."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def without_a_sync() -> Iterator[None]:
    """Raises where the host waits for a GPU within."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
