"""Positions at other sizes, and rotary positions."""

import jax
import numpy as np
import pytest
from backbone_cases import assert_close, run

from dmljax import nets
from dmljax.nets import layers
from dmljax.nets.positions import RESIZES, at_size, resized, rotary_table, rotated

SIZES = [((37, 37), (16, 16)), ((14, 14), (24, 10)), ((4, 4), (5, 3))]


def grid(h, w, prefix):
    return np.random.default_rng(0).normal(size=(1, prefix + h * w, 6)).astype(np.float32)


@pytest.mark.parametrize(("before", "after"), SIZES)
def test_resizing_agrees_with_jax(before, after):
    positions = grid(*before, prefix=1)
    maps = positions[:, 1:].reshape(*before, 6)
    for rule, method, antialias in (
        ("torch", "cubic-pytorch", False),
        ("antialiased", "cubic", True),
    ):
        try:
            expected = jax.image.resize(maps, (*after, 6), method, antialias=antialias)
        except ValueError:  # "cubic-pytorch" is new in jax 0.10
            continue
        ours = resized(positions, before, after, rule)
        np.testing.assert_array_equal(ours[:, 0], positions[:, 0])
        np.testing.assert_allclose(ours[0, 1:].reshape(*after, 6), expected, atol=1e-5)


def test_an_offset_is_a_grid_that_is_a_little_longer():
    """Resizing from 4 to 3.1 patches and reading the first three."""
    ramp = np.tile(np.arange(20.0), (20, 1)).reshape(1, 400, 1).astype(np.float32)
    ours = resized(ramp, (20, 20), (20, 12), "torch_offset").reshape(20, 12)
    centers = (np.arange(12) + 0.5) * 20 / 12.1 - 0.5  # the kernel keeps a straight line
    np.testing.assert_allclose(ours[9, 2:-2], centers[2:-2], rtol=0.02)
    plain = resized(ramp, (20, 20), (20, 12), "torch").reshape(20, 12)
    assert np.all(ours[9, 2:-2] < plain[9, 2:-2])


@pytest.mark.parametrize("rule", RESIZES)
def test_a_native_grid_is_untouched(rule):
    positions = grid(4, 4, prefix=0)
    np.testing.assert_array_equal(resized(positions, (4, 4), (4, 4), rule), positions)
    # The same number of patches in another shape is not native.
    other = resized(positions, (4, 4), (2, 8), rule)
    assert other.shape == positions.shape and np.max(np.abs(other - positions)) > 0.1


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("dinov2_s14_reg", [((32, 32), 32), ((16, 36), (16, 36))]),
        ("siglip_b16_224", [((12, 20), (12, 20))]),
    ],
)
def test_a_net_at_another_size_has_positions_of_that_size(name, sizes):
    """Square and not, as a part of a larger tree; and it computes the same."""
    rng = np.random.default_rng(0)
    net = getattr(nets, name)(width=16, heads=2, depth=1, patch=4, image_size=24)
    shapes = layers.shapes(net, 24)
    variables = jax.tree.map(lambda x: rng.normal(size=x.shape).astype(np.float32), shapes)
    tree = {"net": variables, "pos_embed": np.zeros(3)}
    assert at_size(net, tree, (24, 24))[0] is net
    for size, image_size in sizes:  # 16 x 36 pixels have as many patches as 24 x 24
        other, moved = at_size(net, tree, size)
        assert other.image_size == image_size and moved["pos_embed"] is tree["pos_embed"]
        count = int(net.positions == "class") + size[0] * size[1] // 16
        assert moved["net"]["params"]["pos_embed"].shape == (1, count, 16)
        images = rng.normal(size=(2, *size, 3)).astype(np.float32)
        pairs = (net, variables), (other, moved["net"])
        before, after = (run(net, values, images)["pooled"] for net, values in pairs)
        assert_close(after, before, 1e-5)
    with pytest.raises(ValueError, match="must be a multiple of patch 4"):
        net.clone(image_size=(12, 21)).init(jax.random.key(0), images, train=False)


def test_nets_without_learned_positions_stay():
    for net in (nets.dinov3_s16(), nets.convnet()):
        variables = {"params": {"pos_embed": np.zeros((1, 4, 4))}}
        assert at_size(net, variables, (96, 64)) == (net, variables)


def test_rotation_is_a_loop_over_tokens_and_channels():
    h, w, size, prefix = 2, 3, 16, 5
    x = np.random.default_rng(0).normal(size=(1, prefix + h * w, 2, size)).astype(np.float32)
    expected = x.copy()
    for n in range(h * w):
        y_x = (2 * (n // w + 0.5) / h - 1, 2 * (n % w + 0.5) / w - 1)
        for i in range(size // 2):  # channel i turns with channel i + size / 2
            period = 100 ** ((i % (size // 4)) / (size // 4))
            angle = 2 * np.pi * y_x[i // (size // 4)] / period
            a, b = x[0, prefix + n, :, i], x[0, prefix + n, :, i + size // 2]
            expected[0, prefix + n, :, i] = a * np.cos(angle) - b * np.sin(angle)
            expected[0, prefix + n, :, i + size // 2] = b * np.cos(angle) + a * np.sin(angle)
    ours = rotated(x, rotary_table(h, w, size))
    np.testing.assert_allclose(ours, expected, atol=1e-6)
    narrow = rotated(x.astype("bfloat16"), rotary_table(h, w, size))
    assert narrow.dtype == "bfloat16"
    np.testing.assert_allclose(np.float32(narrow), expected, atol=0.05)
    with pytest.raises(ValueError, match="multiple of 4 channels, not 6"):
        rotary_table(2, 2, 6)
