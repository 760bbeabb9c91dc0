"""Pictures of what goes on inside a method, drawn from named arrays."""

import numpy as np
import pytest
from PIL import Image

from dmljax.report import inside

RNG = np.random.default_rng(0)


def _pixels(path):
    with Image.open(path) as picture:
        return np.asarray(picture.convert("RGB")).astype(int)


def _colored_columns(path):
    """Share of the columns of a picture with a pixel that is neither white nor gray."""
    pixels = _pixels(path)
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


LEARNER_VECTORS = np.random.default_rng(1).normal(size=(4, 3, 5)) + 1
LEARNER_VECTORS /= np.linalg.norm(LEARNER_VECTORS, axis=2, keepdims=True)
LEARNER_VECTORS = LEARNER_VECTORS.astype(np.float32)


def test_cosines_are_of_three_kinds():
    labels = np.array([0, 1, 0, 1])
    actual = inside.cosines_of_pairs(LEARNER_VECTORS, labels)
    x = LEARNER_VECTORS.astype(np.float64)
    kinds = {"self": [], "positive": [], "negative": []}
    for i in range(4):
        kinds["self"] += [x[i, p] @ x[i, q] for p in range(3) for q in range(p)]
        for j in range(i):
            kind = "positive" if labels[i] == labels[j] else "negative"
            kinds[kind] += [x[i, p] @ x[j, p] for p in range(3)]
    for kind, values in kinds.items():
        np.testing.assert_allclose(np.sort(actual[kind]), np.sort(values), atol=1e-6)
    limited = inside.cosines_of_pairs(LEARNER_VECTORS, labels, limit=3)
    assert len(limited["self"]) == 9 and len(limited["positive"]) + len(limited["negative"]) == 9


def _share(pixels, color):
    """The share of the pixels whose distance to a color is below 60."""
    return np.mean(np.abs(pixels - np.array(color)).sum(axis=-1) < 60)


def test_histograms_show_that_all_learners_are_the_same(tmp_path):
    """Cosines of one image between its learners are blue. Where all are 1, they fill one bin."""
    labels = np.arange(40) % 2
    rng = np.random.default_rng(2)
    vectors = rng.normal(size=(40, 3, 5)) + 2 * (labels[:, None, None] - 0.5)
    independent = vectors / np.linalg.norm(vectors, axis=2, keepdims=True)
    identical = np.repeat(independent[:, :1], 3, axis=1)
    blue_shares = []
    for stacked in (identical, independent):
        inside.part_cosines(inside.cosines_of_pairs(stacked, labels), tmp_path / "cosines.png")
        blue_shares.append(_share(_pixels(tmp_path / "cosines.png"), (158, 184, 210)))
    assert blue_shares[1] > 2 * blue_shares[0]


def test_a_mask_is_drawn_over_its_part_of_the_image(tmp_path):
    masks = np.full((2, 3, 4, 4, 5), 0.5, np.float32)
    masks[0, 1, :2] = 0.9  # the second learner looks at the upper half of the first image
    images = np.full((2, 12, 12, 3), 128, np.uint8)
    inside.spatial_masks(masks, images, tmp_path / "masks.png")
    pixels = _pixels(tmp_path / "masks.png")
    red = (pixels[..., 0] - pixels[..., 2] > 30).nonzero()
    h, w = pixels.shape[:2]
    assert len(red[0]) and red[0].max() < h / 2
    assert w / 2 <= red[1].min() and red[1].max() <= 0.76 * w
    one_channel = masks.copy()
    one_channel[..., 1:] = 0.5
    inside.spatial_masks(one_channel, images, tmp_path / "one.png", channel=3)
    pixels = _pixels(tmp_path / "one.png")
    assert not np.any(pixels[..., 0] - pixels[..., 2] > 30)


def test_attention_picture_puts_the_senders_beside_each_image(tmp_path):
    """Green images attend to green images, gray ones to gray ones; rows are sorted by label."""
    colors = np.array([[0, 200, 0], [128, 128, 128]], np.uint8)
    labels = np.array([1, 0, 1, 0, 0])
    images = np.broadcast_to(colors[labels][:, None, None], (5, 8, 8, 3))
    attention = (labels[:, None] == labels[None, :]) / np.array([[2], [3], [2], [3], [3]])
    path = tmp_path / "attention.png"
    inside.batch_attention(images, np.stack([[attention] * 2] * 2), path, labels=labels)
    pixels = _pixels(path)
    green = (np.abs(pixels - colors[0]).max(axis=2) < 8).sum()
    gray = (np.abs(pixels - colors[1]).max(axis=2) < 8).sum()
    assert green > 1000 and 1.2 < green / gray < 1.8  # three images against two
    one_layer_path = tmp_path / "one.png"
    inside.batch_attention(images[..., :1], attention, one_layer_path)
    with Image.open(one_layer_path) as one_layer, Image.open(path) as two_layers:
        assert one_layer.size[0] < two_layers.size[0]
    with pytest.raises(ValueError, match="attention among 4 images does not suit 5 images"):
        inside.batch_attention(images, attention[:4, :4], path)
