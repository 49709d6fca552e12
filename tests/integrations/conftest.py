"""Small autoencoders of SAELens go the path of large ones, except in tests of the path of small ones."""

import pytest


@pytest.fixture(autouse=True)
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "sae_lens" in request.module.__name__ and "small" not in request.node.name:
        monkeypatch.setattr("gossamer.integrations.sae_lens.is_small", lambda *_: False)
        monkeypatch.setattr("gossamer.integrations.sae_lens.pays", lambda *_: True)
