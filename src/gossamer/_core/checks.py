"""Argument checks with one error style: operator, argument, rule, what arrived, and the way out."""

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def name_of(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def floating(operator: str, **tensors: Tensor) -> None:
    """Every tensor has a floating dtype the library computes in."""
    for argument, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{operator}: {argument} must be a torch.Tensor, got {type(tensor).__name__}.")
        if tensor.dtype not in FLOATS:
            raise TypeError(
                f"{operator}: {argument} must be float32, float16 or bfloat16 (float64 on the CPU), "
                f"got {name_of(tensor.dtype)}. Convert it with {argument}.float()."
            )
        if tensor.dtype is torch.float64 and tensor.is_cuda:
            raise TypeError(
                f"{operator}: {argument} is float64 on {tensor.device}; float64 runs on the CPU only. "
                f"Use {argument}.float(), or move it with {argument}.cpu()."
            )


def out_dtype(operator: str, dtype: torch.dtype | None) -> None:
    """`dtype` is one the library computes in, or None."""
    if dtype is not None and dtype not in FLOATS:
        got = name_of(dtype) if isinstance(dtype, torch.dtype) else type(dtype).__name__
        raise TypeError(
            f"{operator}: out_dtype must be float32, float16 or bfloat16 (float64 on the CPU), got {got}. "
            "Convert the result instead."
        )


def same_device(operator: str, first: str, device: torch.device, **tensors: Tensor | None) -> None:
    """Every tensor lives where `first` does."""
    for argument, tensor in tensors.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"{operator}: {argument} must be on {device} like {first}, got {tensor.device}. "
                f"Move it with {argument}.to({first}.device)."
            )


def shape(operator: str, argument: str, tensor: Tensor, expected: tuple[int, ...], letters: str, why: str) -> None:
    """`tensor.shape == expected`; `letters` names the dimensions and `why` says where the sizes come from."""
    if tensor.shape != expected:
        raise ValueError(
            f"{operator}: {argument} must have shape {letters} = {list(expected)} {why}, got {list(tensor.shape)}."
        )


def positive(operator: str, argument: str, value: int, hint: str) -> None:
    """`value` is a positive int."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{operator}: {argument} must be an int, got {type(value).__name__}. {hint}")
    if value < 1:
        raise ValueError(f"{operator}: {argument} must be at least 1, got {value}. {hint}")


def no_sync(operator: str, what: str, instead: str) -> None:
    """Raises under CUDA-graph capture, where `what` cannot run because it waits for the device."""
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise NotImplementedError(
            f"{operator}: {what} waits for the device, which a CUDA graph cannot capture. {instead}"
        )
