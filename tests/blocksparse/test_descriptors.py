"""Descriptors of a known kind are what Triton makes of them."""

import pytest
import torch


@pytest.mark.native
def test_a_known_kind_is_as_triton_makes_it() -> None:
    pytest.importorskip("triton")
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from gossamer.blocksparse._gluon import _descriptors
    from gossamer.blocksparse._gluon.attention import LAYOUT, descriptor

    for tensor in (torch.empty(2, 3, 200, 64).bfloat16(), torch.empty(1, 40, 8, 64).bfloat16().transpose(1, 2)):
        for rows in (64, 128):
            found = [vars(descriptor(tensor, rows)) for _ in range(2)]
            made = TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), [1, 1, rows, 64], LAYOUT)
            # What a launch compares instead of the fields.
            assert found[0]["kind"] is found[1]["kind"]
            for fields in found:
                assert fields.pop("base") is tensor and fields.pop("kind")
                assert fields == {name: value for name, value in vars(made).items() if name != "base"}
    assert {(torch.bfloat16, 1, 1, rows, 64) for rows in (64, 128)} <= _descriptors._kinds.keys()
    assert all(fields["base"] is None for fields in _descriptors._kinds.values())
