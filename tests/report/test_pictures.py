"""The movie of a run, and the thumbnails of its page."""

import itertools

import numpy as np
import pytest
from PIL import Image, ImageSequence
from system import tiny

from dmljax.data.splits import Split
from dmljax.report import pictures, sprites
from dmljax.runs import folder as run_folder
from dmljax.runs import training


def test_frames_of_every_evaluation_and_a_movie(tmp_path):
    options = {"every": 2, "ks": [1], "clustering": None, "batch_size": 16}
    method = {"name": "pairs", "dim": 2, "normalized": False, "unit": False}
    movie = {"name": "movie", "frame_ms": 300, "last_frame_ms": 900}
    config = tiny(tmp_path, steps=5, method=method, evaluate=options, pictures=movie)
    training.run(config | {"runtime": {"devices": 1}}, tmp_path / "run")
    frames = sorted((tmp_path / "run" / "frames").iterdir())
    assert [int(f.stem) for f in frames] == [0, 2, 4, 5]
    with Image.open(tmp_path / "run" / "movie.gif") as movie:
        pages, durations = [], []
        for page in ImageSequence.Iterator(movie):
            pages.append(np.asarray(page.convert("RGB")))
            durations.append(page.info["duration"])
    assert durations == [300, 300, 300, 900]
    assert len(pages) == 4 and all((a != b).any() for a, b in itertools.pairwise(pages))
    # `unit=False`: points of the plane, not of a circle.
    embed_fn, variables, _ = run_folder.load(tmp_path / "run")
    images = np.random.default_rng(0).integers(0, 256, (5, 12, 12, 3)).astype(np.uint8)
    norms = np.linalg.norm(np.asarray(embed_fn(variables, images)), axis=1)
    assert np.abs(norms - 1).max() > 0.01


@pytest.mark.parametrize(("d", "shift"), [(2, 3), (6, 0)])
def test_a_frame_does_not_depend_on_scale(tmp_path, d, shift):
    """Points of more than two dimensions are the map of the unit vectors."""
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 4
    x = np.eye(6)[labels][:, :d] + 0.1 * rng.normal(size=(40, d))
    split = Split(np.zeros((40, 4, 4, 1), np.uint8), labels, tuple("abcd"))
    pages = []
    for i, points in enumerate((x, 4 * x + shift, x[::-1])):
        pictures.frame(points, split, tmp_path / f"{i}.png", title="the same")
        with Image.open(tmp_path / f"{i}.png") as picture:
            pages.append(np.asarray(picture))
    assert (pages[0] == pages[1]).all() and (pages[0] != pages[2]).any()


def test_thumbnails_within_the_limit_come_from_lists_first_and_then_from_classes_in_turn():
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
