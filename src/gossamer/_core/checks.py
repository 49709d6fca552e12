"""Argument checks with one error style: operator, argument, rule, the given value, and the way out."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from gossamer._core import autocast

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_transforms = torch._C._functorch.peek_interpreter_stack
_FUNC_GRAD = torch._C._functorch.TransformType.Grad
MAX_COLUMNS = 2**31 - 1


def name_of(what: torch.dtype | torch.layout) -> str:
    """`torch.bfloat16` -> "bfloat16"."""
    return str(what).removeprefix("torch.")


def tensors(operator: str, **given: Tensor | None) -> None:
    """Every argument that is given is a tensor."""
    for argument, value in given.items():
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"{operator}: {argument} must be a torch.Tensor, got {type(value).__name__}.")


def whole(operator: str, **given: Tensor | None) -> None:
    """Every argument that is given is a tensor of int32 or int64."""
    tensors(operator, **given)
    for argument, tensor in given.items():
        if tensor is not None and tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{operator}: {argument} must be int32 or int64, got {name_of(tensor.dtype)}.")


def floating(operator: str, **given: Tensor) -> None:
    """Every tensor has a floating dtype the library computes in."""
    tensors(operator, **given)
    for argument, tensor in given.items():
        if tensor is None:
            raise TypeError(f"{operator}: {argument} must be a torch.Tensor, got None.")
        if tensor.layout is not torch.strided:
            raise TypeError(
                f"{operator}: {argument} must be a strided tensor, got layout {name_of(tensor.layout)}. "
                f"Convert it with {argument}.to_dense()."
            )
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
        # Where PyTorch has no formula for tangents it drops them, and gives zeros.
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
            raise NotImplementedError(
                f"{operator}: forward-mode derivatives are not implemented, and {argument} has a tangent. Use reverse "
                "mode: torch.autograd.grad, or backward()."
            )
        if not torch.compiler.is_compiling() and _transforms() is not None:
            _refuse_transforms(operator)


def _refuse_transforms(operator: str) -> None:
    """torch.func.vmap alone calls an operator once for each item; transforms that differentiate know no operators."""
    if any(transform.key() == _FUNC_GRAD for transform in torch._C._functorch.get_interpreter_stack() or ()):
        raise NotImplementedError(
            f"{operator}: torch.func.grad, vjp, jacrev and hessian are not implemented. Use torch.autograd.grad, "
            "backward(), or torch.autograd.functional.jacobian."
        )


def module_input(operator: str, argument: str, x: Tensor, weight: Tensor, letters: str, size: int) -> None:
    """x is `[..., letters]` of that size, and the weights of a module can be multiplied with it."""
    if isinstance(x, Tensor) and x.dtype is weight.dtype and x.shape[-1:] == (size,):
        return
    floating(operator, **{argument: x})
    if x.shape[-1:] != (size,):
        raise ValueError(
            f"{operator}: {argument} must have shape [..., {letters}] with {letters} = {size}, got {list(x.shape)}."
        )
    if x.dtype is not weight.dtype and weight.dtype in FLOATS and not autocast.enabled(x.device):
        got, own = name_of(x.dtype), name_of(weight.dtype)
        raise TypeError(
            f"{operator}: {argument} must be {own} like the module's weights, got {got}. Convert {argument} with "
            f".to(torch.{own}) or the module with .to(torch.{got}), or use torch.autocast."
        )


def float_dtype(operator: str, argument: str, dtype: torch.dtype | None, hint: str) -> None:
    """`dtype` is one the library computes in, or None."""
    if dtype is not None and dtype not in FLOATS:
        got = name_of(dtype) if isinstance(dtype, torch.dtype) else type(dtype).__name__
        raise TypeError(
            f"{operator}: {argument} must be torch.float32, float16 or bfloat16 (float64 on the CPU), got {got}. {hint}"
        )


def columns(operator: str, argument: str, n: int) -> None:
    """A row has fewer columns than an int32 index can name."""
    if n > MAX_COLUMNS:
        raise ValueError(
            f"{operator}: {argument} must have at most 2^31 - 1 columns, for indices are int32, got {n}. "
            "Split it into blocks of columns."
        )


def same_device(operator: str, first: str, device: torch.device, **given: Tensor | None) -> None:
    """Every tensor lives where `first` does."""
    for argument, tensor in given.items():
        if tensor is not None and tensor.device != device:
            raise ValueError(
                f"{operator}: {argument} must be on {device} like {first}, got {tensor.device}. "
                f"Move it with {argument}.to({first}.device)."
            )


def same_dtype(operator: str, first: str, tensor: Tensor, **given: Tensor | None) -> None:
    """Every operand of a product has the dtype of `first`, as in PyTorch."""
    for argument, other in given.items():
        if other is not None and other.dtype is not tensor.dtype:
            # Autocast leaves float64 alone.
            autocasts = "" if torch.float64 in (tensor.dtype, other.dtype) else ", or use torch.autocast"
            raise TypeError(
                f"{operator}: {first} and {argument} must have one dtype, got {name_of(tensor.dtype)} and "
                f"{name_of(other.dtype)}. Convert one with .to(dtype){autocasts}."
            )


def shape(operator: str, argument: str, tensor: Tensor, expected: tuple[int, ...], letters: str, why: str) -> None:
    """`tensor.shape == expected`; `letters` names the dimensions and `why` says where the sizes come from."""
    if tensor.shape != expected:
        raise ValueError(
            f"{operator}: {argument} must have shape {letters} = {list(expected)} {why}, got {list(tensor.shape)}."
        )


def broadcast(
    operator: str, argument: str, given: Sequence[int], full: Sequence[int], letters: str, hint: str = ""
) -> tuple[int, ...]:
    """The shape `given` with leading ones, if it broadcasts to the shape `full`, which `letters` name."""
    wide = (1,) * (len(full) - len(given)) + tuple(given)
    if len(wide) != len(full) or any(n not in (1, m) for n, m in zip(wide, full)):
        raise ValueError(f"{operator}: {argument} must broadcast to {letters}{list(full)}, got {list(given)}. {hint}")
    return wide


def matrix(operator: str, argument: str, tensor: Tensor, letters: str, place: int, size: int, like: str) -> None:
    """`tensor` has two dimensions, `letters`, the `place`-th of the size that `like` gives it."""
    if tensor.dim() != 2 or tensor.shape[place] != size:
        letter = letters.strip("[]").split(", ")[place]
        raise ValueError(
            f"{operator}: {argument} must have shape {letters} with {letter} = {size} like {like}, "
            f"got {list(tensor.shape)}."
        )


def positive(operator: str, argument: str, value: int, hint: str) -> None:
    """`value` is a positive int."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{operator}: {argument} must be an int, got {type(value).__name__}. {hint}")
    if value < 1:
        raise ValueError(f"{operator}: {argument} must be at least 1, got {value}. {hint}")


def number(operator: str, argument: str, value: float, hint: str, zero: bool = False) -> None:
    """`value` is a finite number above 0, or 0 itself with `zero`."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"{operator}: {argument} must be a number, got {type(value).__name__}. {hint}")
    if not (0 < value < math.inf or (zero and value == 0)):
        least = "at least 0" if zero else "above 0"
        raise ValueError(f"{operator}: {argument} must be {least} and finite, got {value}. {hint}")


def finite(operator: str, argument: str, value: float, hint: str) -> float:
    """`value` as a float, if it is a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{operator}: {argument} must be a finite number, got {value!r}. {hint}")
    return float(value)


def finite_start(operator: str, found: Tensor) -> None:
    """The statistics of the x that a module starts from have no NaN. Waits for the device, and looks at nothing
    where it must not wait, under torch.compile and capture."""
    if torch.compiler.is_compiling() or type(found) is not Tensor or found.is_meta or capturing():
        return
    if not bool(found.isfinite().all()):
        raise ValueError(
            f"{operator}: x, the sample that initialize_ starts from, must be finite, got NaN or Inf in it. Leave out "
            "such rows, as x[x.isfinite().all(-1)], or call initialize_ with other rows before training. Nothing has "
            "been changed."
        )


def capturing() -> bool:
    """Whether a CUDA graph is being captured, where nothing may wait for the device."""
    # Asked in every call, and `is_available` asks the environment. A compiler waits for nothing.
    if torch.compiler.is_compiling() or not torch.cuda.is_initialized():
        return False
    return torch.cuda.is_current_stream_capturing()


def host_computes(x: Tensor) -> bool:
    """Whether to look at numbers waits for nothing, and somebody is there to see them: not under torch.compile."""
    return x.device.type == "cpu" and not torch.compiler.is_compiling()


def no_sync(operator: str, what: str, instead: str) -> None:
    """Raises under CUDA-graph capture, where `what` cannot run because it waits for the device."""
    if capturing():
        raise NotImplementedError(
            f"{operator}: {what} waits for the device, which a CUDA graph cannot capture. {instead}"
        )


def no_wait(operator: str, what: str, instead: str) -> None:
    """Raises where `no_sync` does, and under torch.compile, for what has sizes that only the device knows."""
    if torch.compiler.is_compiling():
        raise NotImplementedError(
            f"{operator}: {what} waits for the device, which torch.compile cannot trace. {instead}"
        )
    no_sync(operator, what, instead)
