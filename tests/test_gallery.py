"""The gallery of losses shows every public loss."""

import pathlib

import numpy as np
import pytest
from system import load_module

from dmljax import losses

PATH = pathlib.Path(__file__).parents[1] / "docs" / "make_gallery.py"
gallery = load_module(PATH)
GROUP = {name: group for group in gallery.GROUPS for name in group.module.__all__}
LOSSES = sorted({*losses.__all__} - {*losses.memory.__all__, *losses.combinators.__all__})


def test_every_loss_is_on_the_page():
    """A new loss appears with its docstring; an entry adds a formula, a picture and advice."""
    page = gallery.page()
    assert set(LOSSES) <= set(GROUP) and all(f"### {name}\n" in page for name in LOSSES)
    assert set(gallery.ENTRIES) <= set(LOSSES) and len(gallery.ENTRIES) >= 44


def test_every_entry_is_on_the_page():
    page = gallery.page()
    for name, entry in gallery.ENTRIES.items():
        assert f"### {name}\n" in page and f"_gallery/{name}.svg" in page
        assert entry.formula in page and entry.use in page and entry.peer in page


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"lp", "zero_mean"}))
def test_every_loss_has_a_reference(name):
    summary, reference = gallery.summary_and_reference(name)
    assert summary.endswith(".") and "\n" not in summary
    assert reference.endswith(".") and any(c.isdigit() for c in reference)  # a year


def test_arxiv_ids_are_links():
    assert "[arXiv:1801.07698](https://arxiv.org/abs/1801.07698)" in gallery.page()


# One of each group; all others are drawn when the site is built.
@pytest.mark.parametrize("name", ["contrastive", "triplet", "smooth_ap", "arcface", "clip", "lp"])
def test_slopes_are_the_derivatives_of_the_values(name):
    curves = gallery.values_and_slopes(GROUP[name], name)
    for positions, values, slopes in curves.values():
        assert np.isfinite(values).all() and np.isfinite(slopes).all()
        assert np.ptp(values) > 0.1  # the curve is not flat
        measured = np.gradient(values.astype(np.float64), positions)
        assert np.median(np.abs(measured - slopes)) < 0.02 * np.abs(slopes).max()


def test_a_picture_is_small_and_reproducible(tmp_path):
    paths = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for path in paths:
        gallery.draw(GROUP["contrastive"], "contrastive", path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].stat().st_size < 100_000
