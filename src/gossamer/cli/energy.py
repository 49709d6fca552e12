"""The energy that a GPU has taken, by the driver's own counter."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch


def energy_counter(device: torch.device) -> Callable[[], int] | None:
    """Reads the device's millijoules since the driver was loaded, by NVML, which comes with it."""
    if device.type != "cuda" or torch.version.hip:
        return None
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
    handle, value = ctypes.c_void_p(), ctypes.c_ulonglong()

    def read() -> int:
        return 0 if library.nvmlDeviceGetTotalEnergyConsumption(handle, ctypes.byref(value)) else value.value

    if library.nvmlInit_v2() or library.nvmlDeviceGetHandleByUUID(uuid, ctypes.byref(handle)) or not read():
        return None
    return read
