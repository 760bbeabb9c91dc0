"""Names of thresholds, which `search` and the service read."""

import pytest

from dmljax.commands import search
from dmljax.index import InvalidInput
from dmljax.serve import app


@pytest.mark.parametrize("threshold_fn", [search.threshold_of, app._threshold])
def test_an_unknown_name_lists_the_others_or_says_why_there_are_none(threshold_fn):
    assert threshold_fn("fmr=1e-2", {"fmr=1e-2": 0.75}) == 0.75
    with pytest.raises((ValueError, InvalidInput), match="did you mean 'fmr=1e-2'"):
        threshold_fn("fmr=1e-3", {"fmr=1e-2": 0.75})
    reason = (
        "no named thresholds here.* 16 test classes, or 8 classes held out .*similarity, such as"
    )
    with pytest.raises((ValueError, InvalidInput), match=reason):
        threshold_fn("fmr=1e-3", {})


def test_a_name_without_a_bundle_needs_one():
    with pytest.raises(ValueError, match="names need a bundle, dmljax search BUNDLE"):
        search.threshold_of("fmr=1e-3", None)
