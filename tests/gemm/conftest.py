"""Products of any size go through Hopper's kernel in tests, where it can read them."""

from collections.abc import Iterator

import pytest

from gossamer.gemm import linear_glu_path


@pytest.fixture(autouse=True, scope="module")
def any_size(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if "test_paths" not in request.module.__name__:
            patch.setattr(linear_glu_path, "fills", lambda *_: True)
        yield
