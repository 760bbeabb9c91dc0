"""Thumbnails: which images get one, and how large."""

import numpy as np
import pytest

from dmljax.report import sprites


def test_thumbnails_within_the_budget_come_from_lists_first_and_then_from_classes_in_turn():
    assert sprites.thumbnail_size(5000)[:2] == (5000, 64)
    assert sprites.thumbnail_size(8000)[:2] == (8000, 48)
    assert sprites.thumbnail_size(60_502)[:2] == (5500, 48)
    labels = np.repeat([0, 1, 2], [50, 5, 5])
    chosen = sprites.choose(labels, [49, 48], 14)
    assert {48, 49} <= set(chosen.tolist()) and len(set(chosen.tolist())) == 14
    counts = np.bincount(labels[chosen], minlength=3)
    assert counts.tolist() == [6, 4, 4] and (np.diff(labels[chosen]) >= 0).all()


@pytest.mark.parametrize("shape", [(1, 500, 3), (500, 1, 1), (7, 5, 3)])
def test_images_of_any_shape_fill_a_cell(shape):
    image = np.full(shape, 90, np.uint8)
    cell = sprites.cover(image, 64)
    assert cell.shape == (64, 64, 3) and (cell == 90).all()
