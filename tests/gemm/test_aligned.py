import torch

from gossamer.gemm.aligned import LEAST, aligned


def test_copies_begin_on_16_bytes() -> None:
    x = torch.arange(LEAST * 13.0).view(LEAST, 13).bfloat16()
    weight = torch.arange(13 * (LEAST + 1.0)).view(13, LEAST + 1).bfloat16().t()
    for given, got in zip((x, weight), aligned(LEAST, LEAST + 1, x, weight)):
        assert torch.equal(got, given) and sorted(got.stride())[0] == 1 and sorted(got.stride())[1] % 8 == 0


def test_what_is_left_alone() -> None:
    few, even = torch.zeros(LEAST - 1, 13).half(), torch.zeros(LEAST, 16).half()
    assert aligned(LEAST - 1, LEAST, few, even) == (few, even)
    assert aligned(LEAST, LEAST, even)[0] is even
