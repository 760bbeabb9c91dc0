"""Fixtures of the tests of the train loop."""

import pytest

from dmljax.methods import base


@pytest.fixture
def without_diagnostics(monkeypatch):
    """Leaves out the diagnostics of a batch, which take half of the time to compile."""
    monkeypatch.setattr(base, "diagnostics", lambda *_, **__: {})
