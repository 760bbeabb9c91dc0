"""Pictures of whole runs: which there are, and what is in them."""

import itertools

import numpy as np
import pytest
from PIL import Image, ImageSequence
from system import tiny

from dmljax.data.splits import Split
from dmljax.report import pictures
from dmljax.train import loop, run_folder

ABE = {"name": "abe", "learners": 2, "dim": 8, "split": ["conv1", "conv2"], "attention": "conv2"}
GRAPH = {"name": "graph", "dim": 8, "heads": 2}
NET = {"name": "convnet", "widths": [4, 8], "strides": [2, 1]}
SOFTMAX = {"name": "label_smoothed_cross_entropy"}


def _pictured(path):
    """Of some size, and not of one color."""
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    return min(pixels.shape[:2]) > 100 and pixels.std() > 5


@pytest.mark.parametrize(
    "fields, names",
    [
        ({"method": ABE}, {"masks.png", "cosines.png"}),
        pytest.param({"method": ABE | {"heads": True}}, {"cosines.png"}, marks=pytest.mark.slow),
        pytest.param({"method": GRAPH, "loss": SOFTMAX}, {"attention.png"}, marks=pytest.mark.slow),
        pytest.param({}, set(), marks=pytest.mark.slow),
    ],
)
def test_the_method_draws_at_the_end_of_a_run(tmp_path, fields, names):
    options = {"every": 1, "ks": [1], "seeds": [0], "clustering": False, "batch_size": 16}
    config = tiny(tmp_path, steps=1, net=NET, pictures=True, evaluate=options, **fields)
    loop.run(config | {"runtime": {"devices": 1}}, tmp_path / "run")
    files = {path.name for path in (tmp_path / "run").glob("*.png")}
    assert files == names | {"curves.png", "retrieval.png", "map.png"}
    assert all(_pictured(tmp_path / "run" / name) for name in files)


def test_frames_of_every_evaluation_and_a_movie(tmp_path):
    options = {"every": 2, "ks": [1], "clustering": False, "batch_size": 16, "frames": True}
    method = {"name": "pairs", "dim": 2, "normalized": False, "unit": False}
    config = tiny(tmp_path, steps=5, method=method, evaluate=options, pictures=True)
    loop.run(config | {"runtime": {"devices": 1}}, tmp_path / "run")
    frames = sorted((tmp_path / "run" / "frames").iterdir())
    assert [int(f.stem) for f in frames] == [0, 2, 4, 5]
    with Image.open(tmp_path / "run" / "movie.gif") as movie:
        pages = [np.asarray(page.convert("RGB")) for page in ImageSequence.Iterator(movie)]
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


@pytest.mark.parametrize("shape", [(1, 500, 3), (500, 1, 1)])
def test_images_thin_as_a_line_are_shown(tmp_path, shape):
    split = Split([None] * 4, np.array([0, 0, 1, 1]), ("a", "b"))
    embeddings = np.eye(4, dtype=np.float32)
    image = np.zeros(shape, np.uint8)
    pictures.neighbors(embeddings, split, lambda row: image, tmp_path / "retrieval.png")
    pictures.embedding_map(embeddings, split, lambda row: image, tmp_path / "map.png")
    assert all(_pictured(tmp_path / name) for name in ("retrieval.png", "map.png"))
