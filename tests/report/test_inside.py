"""Views of what goes on inside a method, made from named arrays."""

import numpy as np
import pytest

from dmljax.report import inside


def _rng():
    """Returns a new generator, so that no test depends on the order of the tests."""
    return np.random.default_rng(0)


def _features(n, shift):
    real = _rng().normal(size=(n, 6)).astype(np.float32)
    return {
        "features": real,
        "reconstruction": real + shift,
        "z_invariant": real[:, :3],
        "z_variant": real[:, 3:],
        "synthetic": real[:, :3] + shift,
    }


def test_synthetic_features_lie_in_the_plane_of_the_real_ones():
    labels = np.arange(24) % 4
    features = _features(24, 0.5)
    real, synthetic = features["features"], features["reconstruction"]
    view = inside.points_view("title", real, synthetic, labels, names=("a_b", "c"))
    places = np.stack([view["x"], view["y"]], axis=1).astype(np.float64)
    # The distances within the plane are those after projection by any orthonormal basis of it.
    centered = real.astype(np.float64) - real.mean(axis=0)
    _, vectors = np.linalg.eigh(centered.T @ centered)
    plane = vectors[:, -2:]
    everything = np.concatenate([real, synthetic]).astype(np.float64) @ plane
    for i, j in ((0, 5), (3, 24), (30, 40)):
        expected = np.linalg.norm(everything[i] - everything[j])
        assert np.linalg.norm(places[i] - places[j]) == pytest.approx(expected, rel=1e-4)
    assert view["kind_of"].tolist() == [0] * 24 + [1] * 24 and view["names"] == ["a b", "c"]
    np.testing.assert_array_equal(view["group"], np.tile(labels, 2))


def test_every_kind_of_array_has_a_view():
    labels = np.repeat(np.arange(3), 4)
    rng = _rng()
    images = rng.integers(0, 256, (12, 6, 6, 3)).astype(np.uint8)
    rows_read = []

    def read(rows):
        rows_read.extend(rows.tolist())
        return images[rows]

    inspect_fns = {
        "spatial_masks": lambda x: {"masks": rng.random((len(x), 2, 3, 3, 4))},
        "batch_attention": lambda x: {"attention": np.full((1, 2, len(x), len(x)), 1 / len(x))},
        "synthetic_features": lambda x: _features(len(x), 0.1),
    }
    parts = {f"learner_{m}": rng.normal(size=(12, 3)) for m in range(2)}
    parts["learner_0"][0] = np.nan  # an image that could not be read
    shared = {"labels": labels, "read_fn": read, "rows": np.arange(1, 12)}
    views = inside.views(parts=parts, inspect_fns=inspect_fns, **shared)
    kinds = ["matrix", *["maps"] * 3, "histograms", "points", "points"]
    assert [v["kind"] for v in views] == kinds
    assert 0 not in rows_read and all(0 not in v.get("items", ()) for v in views)
    assert all(np.isfinite(list(v["means"].values())).all() for v in views if "means" in v)
    # A single part cannot be compared with another.
    assert inside.views(parts={"neck": parts["learner_0"]}, inspect_fns={}, **shared) == []


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


def test_a_mask_is_strongest_where_the_learner_looks():
    masks = np.full((2, 3, 4, 4, 5), 0.5, np.float32)
    masks[0, 1, :2] = 0.9  # the second learner looks at the upper half of the first image
    view = inside.masks_view("masks", masks, np.array([7, 9]))
    assert view["shape"] == [3, 4, 4] and view["items"].tolist() == [7, 9]
    assert (view["values"][0, 1, :2] == 127).all() and (view["values"][0, 1, 2:] == 0).all()
    assert (view["values"][0, [0, 2], :2] < 0).all() and not view["values"][1].any()


def test_the_channels_in_which_learners_differ_are_shown_alone():
    masks = np.full((2, 3, 4, 4, 6), 0.5, np.float32)
    masks[:, 0, :, :, 4] += 0.4
    masks[:, 2, :2, :, 1] -= 0.1
    shown = inside.views(
        labels=np.zeros(2, int),
        parts={},
        inspect_fns={"spatial_masks": lambda images: {"masks": masks}},
        read_fn=lambda rows: np.zeros((len(rows), 8, 8, 3), np.uint8),
    )
    titles = [view["title"] for view in shown]
    assert titles[1:] == [f"Masks: where each learner looks in channel {c}" for c in (4, 1)]
    alone = shown[1]["values"]
    assert (alone[:, 0] == 127).all() and (alone[:, 1:] < 0).all()
    one = inside.masks_view("masks", masks[:, :1], np.arange(2))
    assert not one["values"].any()  # a single learner has no difference to the mean


def test_attention_is_sorted_by_label_and_keeps_its_items():
    labels = np.array([1, 0, 1, 0, 0])
    attention = (labels[:, None] == labels[None, :]) / np.array([[2], [3], [2], [3], [3]])
    items = np.array([10, 11, 12, 13, 14])
    view = inside.attention_view("attention_2", np.stack([[attention] * 2] * 2), items, labels)
    assert view["items"].tolist() == [11, 13, 14, 10, 12] and view["values"].shape == (2, 5, 5)
    expected = np.zeros((5, 5))
    expected[:3, :3], expected[3:, 3:] = 1 / 3, 1 / 2
    np.testing.assert_allclose(view["values"][1], expected, rtol=1e-6)
    with pytest.raises(ValueError, match="attention among 4 images must be among 5 images"):
        inside.attention_view("attention", attention[:4, :4], items, labels)
