"""A GPU that is not there."""

import pytest

from gossamer._core import tuning


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices are those of an H200, as device 99, whose costs nobody keeps for another."""
    rates = tuning.Rates(copy=4.2e12, gather=5.5e12, ieee=45e12, tf32=330e12, half=650e12, programs=132, measured=True)
    monkeypatch.setattr(tuning, "rates", lambda index: rates)
