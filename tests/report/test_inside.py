"""Pictures of synthetic features: real and synthetic vectors in one plane."""

import numpy as np
from PIL import Image

from dmljax.report import inside

RNG = np.random.default_rng(0)


def _colored_columns(path):
    """Share of the columns of a picture with a pixel that is neither white nor gray."""
    with Image.open(path) as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    return np.mean((pixels.max(axis=-1) - pixels.min(axis=-1) > 60).any(axis=0))


def _features(n, shift):
    real = RNG.normal(size=(n, 6)).astype(np.float32)
    return {
        "features": real,
        "reconstruction": real + shift,
        "z_invariant": real[:, :3],
        "z_variant": real[:, 3:],
        "synthetic": real[:, :3] + shift,
    }


def test_synthetic_features_are_drawn_in_the_plane_of_the_real_ones(tmp_path):
    labels = np.arange(24) % 4
    path = tmp_path / "synthetic.png"
    inside.synthetic_features(_features(24, 0.1), labels, path)
    near = _colored_columns(path)
    # Synthetic vectors that lie far away: both groups shrink to a spot.
    inside.synthetic_features(_features(24, 40.0), labels, path)
    assert near > 1.5 * _colored_columns(path) > 0


def test_plane_of_few_dimensions():
    x = RNG.normal(size=(5, 1))
    plane = inside._principal_plane(x)(x)
    assert plane.shape == (5, 2)
    np.testing.assert_allclose(np.abs(plane[:, 0]), np.abs(x - x.mean())[:, 0], atol=1e-12)
    np.testing.assert_array_equal(plane[:, 1], 0)


def test_draws_each_kind_that_there_is(tmp_path):
    labels = np.repeat(np.arange(3), 4)
    images = RNG.integers(0, 256, (12, 6, 6, 3)).astype(np.uint8)
    inspect_fns = {
        "spatial_masks": lambda x: {"masks": RNG.random((len(x), 2, 3, 3, 4))},
        "batch_attention": lambda x: {"attention": np.full((1, 2, len(x), len(x)), 1 / len(x))},
        "synthetic_features": lambda x: _features(len(x), 0.1),
    }
    parts = {"learner_0": RNG.normal(size=(12, 3)), "learner_1": RNG.normal(size=(12, 3))}
    shared = {"labels": labels, "read_fn": lambda rows: images[rows]}
    names = inside.draw(tmp_path, parts=parts, inspect_fns=inspect_fns, **shared)
    assert names == ["masks.png", "cosines.png", "attention.png", "synthetic.png"]
    assert {path.name for path in tmp_path.glob("*.png")} == set(names)
    # One part alone has no other to be compared with.
    assert inside.draw(tmp_path, parts={"neck": parts["learner_0"]}, inspect_fns={}, **shared) == []
