"""Products of which operands or result are block-sparse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor

from gossamer._core import autocast, checks
from gossamer._core.calls import Checked, key_of
from gossamer._core.operator import register
from gossamer.blocksparse._torch.matmul import matmul as _cpu
from gossamer.blocksparse.layout import Layout, check_layouts
from gossamer.blocksparse.matmul_path import PATHS, choose_path
from gossamer.blocksparse.records import BlocksparseMatmul
from gossamer.blocksparse.tensor import BlockSparseTensor, check_blocks

_NAME = "blocksparse.matmul"


def matmul(
    a: Tensor | BlockSparseTensor,
    b: Tensor | BlockSparseTensor,
    out_layout: Layout | None = None,
    *,
    transpose_a: bool = False,
    transpose_b: bool = False,
) -> Any:
    """a @ b, where each of a, b and the result is dense or block-sparse.

    Absent blocks are zeros. They are skipped, or multiplied where that is faster: a NaN or Inf in one operand may
    vanish where it meets absent blocks of the other alone, and else shows where it shows in a dense product. The
    device itself finds out which pairs of blocks meet.

    Args:
        a: `[..., M, K]`, a tensor with any strides or a `BlockSparseTensor`; float32, float16 or bfloat16 (float64 on
            the CPU).
        b: `[..., K, N]`, like a and of its dtype. The leading dimensions of dense operands broadcast; those of
            block-sparse ones and of `out_layout` are equal, or there are none at all.
        out_layout: which blocks of the result to compute; the result is a `BlockSparseTensor` then, and everything
            else of the product is left out. `Layout.product` gives the layout of all that can differ from 0.
        transpose_a: whether a is stored as `[..., K, M]`. A block-sparse operand is not copied for it. A dense one is
            better given as `a.mT`; both ways cost nothing.
        transpose_b: whether b is stored as `[..., N, K]`.

    Returns:
        `[..., M, N]` dense, or a `BlockSparseTensor` of `out_layout`; in the dtype of a, or of autocast. Differentiable
        in a and b, any number of times; the gradient of a block-sparse operand is one of its present blocks. If a
        layout overflowed every element is NaN.

    Raises:
        ValueError: sizes, blocks, leading dimensions or devices do not fit.
        TypeError: dtypes differ, or an argument is neither a tensor nor a `BlockSparseTensor`.
        NotImplementedError: a matrix on the GPU is 2^24 elements long or wide.

    Source: Schön and Tompits, blksprs, section 3.2.1; Gale et al. 2022, MegaBlocks (arXiv 2211.15841), for products of
    transposed operands by reordered lists.

    >>> x = from_dense(torch.ones(32, 32), Layout.from_mask(torch.eye(2).bool(), 16))
    >>> matmul(x, torch.ones(32, 4)).shape, matmul(x, x, x.layout, transpose_a=True).values[0, 0, 0].item()
    (torch.Size([32, 4]), 16.0)
    """
    (x, a_layout), (y, b_layout) = _taken(a), _taken(b)
    autocasts = isinstance(x, Tensor) and autocast.enabled(x.device)
    facts = (_facts(a_layout), _facts(b_layout), _facts(out_layout), transpose_a, transpose_b)
    key = None if autocasts else key_of((x, y), facts)
    found = _checked.get(key)
    if found is None:
        _check(a, b, x, y, out_layout)
        if autocasts:
            x, y = autocast.cast(x, y)
        if x.dtype != y.dtype:
            raise TypeError(
                f"{_NAME}: b must have the dtype of a, {checks.name_of(x.dtype)}, got {checks.name_of(y.dtype)}. "
                "Convert it with .to(a.dtype)."
            )
    left, right = _Operand("a", x, a_layout, transpose_a), _Operand("b", y, b_layout, transpose_b)
    # A dense operand is transposed by a view.
    left, right = (
        op._replace(values=op.values.mT, transposed=False) if op.transposed and op.layout is None else op
        for op in (left, right)
    )
    if found is None:
        found = _sizes(left, right, out_layout), _leading([op for op in (a_layout, b_layout, out_layout) if op])
        _checked.keep(key, found)
    sizes, lead = found
    if lead is None:
        return left.values @ right.values
    if not lead and out_layout is None and (a_layout is None or b_layout is None):
        return _folded(left, right, sizes)
    left, right = _batched(left, lead), _batched(right, lead)
    out = _product(left, right, out_layout, (math.prod(lead), *sizes))
    return out.view(*lead, *out.shape[1:]) if out_layout is None else BlockSparseTensor(out, out_layout)


_checked: Checked[tuple[tuple[int, int, int, int, int, int], tuple[int, ...] | None]] = Checked()


def _taken(operand: Any) -> tuple[Any, Layout | None]:
    return (operand.values, operand.layout) if isinstance(operand, BlockSparseTensor) else (operand, None)


def _facts(layout: Any) -> tuple[Any, ...] | None:
    """The facts of a layout that checks depend on."""
    if not isinstance(layout, Layout):
        return layout
    return layout.lead, layout.form, layout.buffer.device


def _check(a: Any, b: Any, x: Any, y: Any, out_layout: Layout | None) -> None:
    for name, operand, values in (("a", a, x), ("b", b, y)):
        if not isinstance(operand, Tensor | BlockSparseTensor):
            raise TypeError(
                f"{_NAME}: {name} must be a torch.Tensor or a BlockSparseTensor, got {type(operand).__name__}."
            )
        if isinstance(operand, BlockSparseTensor):
            check_blocks(_NAME, "floating", **{name: operand})
        checks.floating(_NAME, **{name: values})
        if values.dim() < 2:
            raise ValueError(f"{_NAME}: {name} must have two dimensions or more, got shape {list(values.shape)}.")
    checks.same_device(_NAME, "a", x.device, b=y)
    if out_layout is not None:
        check_layouts(_NAME, out_layout=out_layout)
        checks.same_device(_NAME, "a", x.device, out_layout=out_layout.buffer)


class _Operand(NamedTuple):
    """A dense operand, or the blocks of a sparse one, which may be stored transposed."""

    name: str
    values: Tensor
    layout: Layout | None
    transposed: bool


def _sizes(left: _Operand, right: _Operand, out_layout: Layout | None) -> tuple[int, int, int, int, int, int]:
    """(M, K, N, and the blocks along them: 0 where only dense matrices have that dimension)."""
    lengths: dict[str, tuple[str, int]] = {}
    blocks: dict[str, tuple[str, int]] = {}
    for name, values, layout, transposed, letters in ((*left, "MK"), (*right, "KN")):
        letters = letters[::-1] if transposed else letters
        _agree(lengths, name, letters, values.shape[-2:] if layout is None else layout.size, "{letter} = {length}")
        if layout is not None:
            _agree(blocks, name, letters, layout.block_size, "blocks of {length} along {letter}")
    if out_layout is not None:
        _agree(lengths, "out_layout", "MN", out_layout.size, "{letter} = {length}")
        _agree(blocks, "out_layout", "MN", out_layout.block_size, "blocks of {length} along {letter}")
    m, k, n = (lengths[letter][1] for letter in "MKN")
    bm, bk, bn = (blocks.get(letter, ("", 0))[1] for letter in "MKN")
    return m, k, n, bm, bk, bn


def _agree(found: dict[str, tuple[str, int]], name: str, letters: str, lengths: Sequence[int], rule: str) -> None:
    """Notes who first said how long a dimension is; later ones must say the same."""
    for letter, length in zip(letters, lengths):
        first, expected = found.setdefault(letter, (name, length))
        if length != expected:
            must = rule.format(letter=letter, length=expected)
            raise ValueError(f"{_NAME}: {name} must have {must} like {first}, got {length}.")


def _leading(layouts: list[Layout]) -> tuple[int, ...] | None:
    """The leading dimensions of all layouts; None where there are no layouts."""
    if not layouts:
        return None
    leads = {layout.lead for layout in layouts}
    if len(leads) > 1:
        raise ValueError(
            f"{_NAME}: block-sparse operands and out_layout must have equal leading dimensions, got "
            f"{' and '.join(str(list(lead)) for lead in sorted(leads))}."
        )
    return leads.pop()


def _batched(operand: _Operand, lead: tuple[int, ...]) -> _Operand:
    """A dense operand as `[Z, rows, columns]`."""
    name, values, layout, _ = operand
    if layout is not None or (len(lead) == 1 and values.dim() == 3 and values.shape[0] == lead[0]):
        return operand
    checks.broadcast(_NAME, f"{name}'s leading dimensions", values.shape[:-2], lead, "those of the layouts, ")
    wide = values.expand(*lead, *values.shape[-2:])
    return operand._replace(values=wide.reshape(math.prod(lead), *values.shape[-2:]))


def _folded(left: _Operand, right: _Operand, sizes: tuple[int, int, int, int, int, int]) -> Tensor:
    """One block-sparse matrix times a batch of dense ones: a single product with all of them side by side."""
    m, k, n, *block = sizes
    if left.layout is None:
        lead = left.values.shape[:-2]
        left = left._replace(values=left.values.reshape(1, math.prod(lead) * m, k))
        out = _product(left, right, None, (1, left.values.shape[1], k, n, *block))
        return out.view(*lead, m, n)
    lead = right.values.shape[:-2]
    count = math.prod(lead)
    beside = right.values.reshape(count, k, n).transpose(0, 1).reshape(1, k, count * n)
    out = _product(left, right._replace(values=beside), None, (1, m, k, count * n, *block))
    return out.view(m, count, n).transpose(0, 1).reshape(*lead, m, n)


def _product(left: _Operand, right: _Operand, out_layout: Layout | None, sizes: tuple[int, ...]) -> Tensor:
    if left.values.is_cuda and max(sizes[1:4]) >= 1 << 24:
        raise NotImplementedError(
            f"{_NAME}: on the GPU M, K and N must be less than 2^24 (a batch of dense matrices beside one block-sparse "
            f"counts as one wide matrix), got {list(sizes[1:4])}. Split the operands."
        )
    given: list[Any] = [part for layout in (left.layout, right.layout, out_layout) for part in _parts(layout)]
    settings: Any = sizes[:4], sizes[4:], left.transposed, right.transposed
    out: Tensor = _matmul(BlocksparseMatmul(left.values, right.values, *given, *settings))
    return out


def _parts(layout: Layout | None) -> tuple[Tensor | None, tuple[int, ...]]:
    return (None, ()) if layout is None else (layout.buffer, layout.form)


def _fake(call: BlocksparseMatmul) -> Tensor:
    (z, m, _, n), (bm, _, bn) = call.sizes, call.block
    return call.a.new_empty(z, m, n) if call.out_layout is None else call.a.new_empty(call.out_form[7], bm, bn)


def _backward(call: BlocksparseMatmul, kept: Any, grads: Any, needs: Any) -> dict[str, Tensor]:
    """The gradients are products again: of the result's gradient with the other operand, taken at what is stored."""
    a, b, *parts, (z, m, k, n), (bm, bk, bn), trans_a, trans_b = call
    of_a, of_b, of_out = parts[:2], parts[2:4], parts[4:]
    grad = grads[0]
    flip_a, flip_b, flip_out = (layout is not None for layout, _ in (of_a, of_b, of_out))
    # A dense matrix is transposed by a view, blocks by a flag.
    turned, other_a, other_b = (x if flip else x.mT for x, flip in ((grad, flip_out), (a, flip_a), (b, flip_b)))
    made, product = {}, cast(Any, BlocksparseMatmul)
    if needs.a and trans_a:
        sizes = (z, k, n, m), (bk, bn, bm)
        made["a"] = _matmul(product(b, turned, *of_b, *of_out, *of_a, *sizes, trans_b, flip_out))
    elif needs.a:
        sizes = (z, m, n, k), (bm, bn, bk)
        made["a"] = _matmul(product(grad, other_b, *of_out, *of_b, *of_a, *sizes, False, flip_b and not trans_b))
    if needs.b and trans_b:
        sizes = (z, n, m, k), (bn, bm, bk)
        made["b"] = _matmul(product(turned, a, *of_out, *of_a, *of_b, *sizes, flip_out, trans_a))
    elif needs.b:
        sizes = (z, k, m, n), (bk, bm, bn)
        made["b"] = _matmul(product(other_a, grad, *of_a, *of_out, *of_b, *sizes, flip_a and not trans_a, False))
    return made


@register(
    BlocksparseMatmul,
    cpu=_cpu,
    fake=_fake,
    choose_path=choose_path,
    paths=PATHS,
    backward=_backward,
    saved=("a", "b", "a_layout", "b_layout", "out_layout"),
    repeats=True,
)
def _matmul() -> Any:
    from gossamer.blocksparse._triton.matmul import matmul

    return matmul


def _left(self: BlockSparseTensor, other: Any) -> Any:
    """`matmul(self, other)` with a dense result, of a dense or a block-sparse other."""
    return matmul(self, other) if isinstance(other, Tensor | BlockSparseTensor) else NotImplemented


def _right(self: BlockSparseTensor, other: Any) -> Any:
    return matmul(other, self) if isinstance(other, Tensor) else NotImplemented


BlockSparseTensor.__matmul__, BlockSparseTensor.__rmatmul__ = _left, _right  # type: ignore[method-assign]
