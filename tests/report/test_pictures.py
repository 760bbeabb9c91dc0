"""The movie of a run: its frames, and what is in them."""

import itertools

import numpy as np
from PIL import Image, ImageSequence
from system import tiny

from dmljax.data.splits import Split
from dmljax.report import pictures
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


def test_a_frame_does_not_depend_on_scale(tmp_path):
    x = np.random.default_rng(0).normal(size=(40, 2))
    split = Split(np.zeros((40, 4, 4, 1), np.uint8), np.arange(40) % 3, ("a", "b", "c"))
    pages = []
    for i, points in enumerate((x, 7 * x + 3, -x)):
        pictures.frame(points, split, tmp_path / f"{i}.png", title="the same")
        with Image.open(tmp_path / f"{i}.png") as picture:
            pages.append(np.asarray(picture))
    assert (pages[0] == pages[1]).all() and (pages[0] != pages[2]).any()


def test_a_frame_of_more_dimensions_is_the_map_of_the_unit_vectors(tmp_path):
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 4
    x = np.eye(6)[labels] + 0.1 * rng.normal(size=(40, 6))
    split = Split(np.zeros((40, 4, 4, 1), np.uint8), labels, tuple("abcd"))
    pages = []
    for i, points in enumerate((x, 4 * x, x[::-1])):
        pictures.frame(points, split, tmp_path / f"{i}.png", title="the same")
        with Image.open(tmp_path / f"{i}.png") as picture:
            pages.append(np.asarray(picture))
    assert (pages[0] == pages[1]).all() and (pages[0] != pages[2]).any()
