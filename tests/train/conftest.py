"""Fixtures of the tests of the train loop."""

import pytest
from train.pixels import RNG

from dmljax.methods import base

_FIRST_DRAW = RNG.bit_generator.state


@pytest.fixture(autouse=True)
def _same_draws():
    """Every test draws the same numbers, whichever tests ran before it in its process."""
    RNG.bit_generator.state = _FIRST_DRAW


@pytest.fixture
def without_diagnostics(monkeypatch):
    """Leaves out the diagnostics of a batch, which take half of the time to compile."""
    monkeypatch.setattr(base, "diagnostics", lambda *_, **__: {})
