"""Calls that have been checked once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from gossamer import gemm, sae
from gossamer._core.calls import Checked, key_of

pytestmark = pytest.mark.native


def test_what_a_key_tells_apart() -> None:
    x = torch.ones(2, 3)
    same = key_of((torch.zeros(2, 3), None), ("a",), (2,))
    assert key_of((x, None), ("a",), (2,)) == same and hash(same) is not None
    others = [
        key_of((torch.ones(3, 2), None), ("a",), (2,)),
        key_of((x.half(), None), ("a",), (2,)),
        key_of((x.to("meta"), None), ("a",), (2,)),
        key_of((None, x), ("a",), (2,)),
        key_of((x, x), ("a",), (2,)),
        key_of((x, None), ("b",), (2,)),
        key_of((x, None), ("a",), (2.0,)),
        key_of((x, None), ("a",), (None,)),
    ]
    assert same not in others and len({*others}) == len(others)
    assert key_of((x,), (), (True,)) != key_of((x,), (), (1,))
    assert key_of((torch.nn.Parameter(x),)) == key_of((x,))


def test_what_is_checked_each_time(compiled: Any) -> None:
    class Other(Tensor):
        pass

    x = torch.eye(2)
    for operand in (x.as_subclass(Other), x.to_sparse(), [1.0], 2):
        assert key_of((operand,)) is None
    with forward_ad.dual_level():
        assert key_of((x,)) is None
    asked: list[Any] = []
    compiled(lambda x: (asked.append(key_of((x,))), x + 1)[1])(x)
    assert asked == [None]


def test_what_is_kept() -> None:
    checked: Checked[int] = Checked()
    key = key_of((torch.ones(2),), ("a",))
    assert checked.get(key) is None and checked.get(None) is None
    checked.keep(key, 0)
    checked.keep(None, 7)
    assert checked.get(key) == 0 and checked.get(None) is None
    # What no call may have is not there, and raises nothing: the checks say which it is.
    assert checked.get(key_of((), (["a"],))) is None
    for size in range(Checked._MOST):
        checked.keep(key_of((torch.ones(size),)), size)
    assert len(checked._found) <= Checked._MOST and checked.get(key) is None


X, W = torch.ones(2, 8), torch.ones(8, 40)


@pytest.mark.parametrize(
    "call, good, bad",
    [
        (lambda c: sae.encode(X, W, capacity=c), 2, 2.0),
        (lambda c: sae.decode(X, W, capacity=c), 2, 2.0),
        (lambda c: gemm.linear_pack(X, W.t(), capacity=c), 1, True),
    ],
)
def test_a_good_call_lets_no_bad_one_pass(call: Callable[[Any], Any], good: Any, bad: Any) -> None:
    with torch.no_grad():
        for _ in range(2):
            call(good)
        with pytest.raises((TypeError, ValueError), match=r"must be"):
            call(bad)


@pytest.mark.parametrize(
    "function",
    [lambda x: sae.decode(x, W), lambda x: sae.encode(x, W), lambda x: gemm.linear_glu(x, W.t(), W.t())],
    ids=["decode", "encode", "linear_glu"],
)
def test_tangents_and_layouts_are_refused_after_a_good_call(function: Callable[[Tensor], Any]) -> None:
    with torch.no_grad():
        function(X)
        with pytest.raises(TypeError, match="must be a strided tensor"):
            function(X.to_sparse())
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
            function(forward_ad.make_dual(X, X))
