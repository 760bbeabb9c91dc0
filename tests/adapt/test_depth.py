"""Layers of every family of nets, and what follows from them for rates and weight decay."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util
from system import tiny

from dmljax import adapt, nets
from dmljax.adapt.depth import is_spared_from_decay
from dmljax.config.build import build
from dmljax.nets import layers
from dmljax.train import optimizers, schedules


def _paths(net, size=224, channels=3):
    shapes = layers.shapes(net, size, channels=channels)["params"]
    return ["/".join(path) for path in traverse_util.flatten_dict(shapes)]


# Net, size, its number of blocks, a parameter before them, one in the last, one behind (or None).
_NETS = {
    "convnet": (32, 5, None, "conv5/bn/bias", None),
    "googlenet": (224, 9, "conv2/3x3/kernel", "inception_5b/1x1/kernel", None),
    "googlenet_bn": (224, 9, "conv1/bn/bias", "inception5b/branch1/bn/bias", None),
    "bn_inception": (224, 10, "conv2_3x3_bn/bias", "inception_5b_1x1/bias", None),
    "mobilenet_v2": (224, 19, None, "features/18/1/bias", None),
    "efficientnet_lite0": (224, 16, "bn1/bias", "blocks/6/0/bn1/bias", "bn2/bias"),
    "resnet50": (224, 16, "bn1/bias", "layer4/2/bn3/bias", None),
    "convnext_t": (224, 18, "stem/1/bias", "stages/3/blocks/2/gamma", "head/norm/bias"),
    "siglip_b16_224": (224, 12, "pos_embed", "blocks/11/norm1/bias", "latent"),
    "unicom_b32": (224, 12, "patch_embed/proj/bias", "blocks/11/mlp/fc1/bias", "feature/3/bias"),
    "dinov2_s14_reg": (224, 12, "reg_token", "blocks/11/ls1/gamma", "norm/bias"),
}


@pytest.mark.parametrize("name", _NETS)
def test_blocks_of_every_family(name):
    size, count, before, last, behind = _NETS[name]
    paths = _paths(getattr(nets, name)(), size)
    blocks = adapt.blocks([f"net/{path}" for path in paths])
    assert blocks.total == count
    assert blocks.of[f"net/{last}"] == count - 1
    assert sorted({n for n in blocks.of.values() if 0 <= n < count}) == list(range(count))
    if before:
        assert blocks.of[f"net/{before}"] == -1
    if behind:
        assert blocks.of[f"net/{behind}"] == count
    assert (-1 in blocks.of.values(), count in blocks.of.values()) == (bool(before), bool(behind))


def _layer_of_vit(path, depth=12):
    """The rule of the code of BEiT and MAE."""
    if path in ("cls_token", "pos_embed", "reg_token") or path.startswith("patch_embed"):
        return 0
    return int(path.split("/")[1]) + 1 if path.startswith("blocks") else depth + 1


def _layer_of_convnext(path):
    """The rule of the code of ConvNeXt, for 27 blocks in the third stage."""
    if path.startswith("stem"):
        return 0
    if match := re.match(r"stages/(\d)/downsample", path):
        return {"1": 2, "2": 3, "3": 12}[match[1]]
    if match := re.match(r"stages/(\d)/blocks/(\d+)", path):
        stage, block = map(int, match.groups())
        return (1, 2, 3 + block // 3, 12)[stage]
    return 13


@pytest.mark.parametrize(
    ("net", "layer_fn", "count"),
    [(nets.dinov2_s14_reg(), _layer_of_vit, 12), (nets.convnext_s(), _layer_of_convnext, 12)],
)
def test_factors_are_those_of_the_published_codes(net, layer_fn, count):
    paths = _paths(net)
    expected = {path: 0.75 ** (count + 1 - layer_fn(path)) for path in paths}
    assert adapt.layer_factors(paths, 0.75) == pytest.approx(expected)


def test_layers_learn_at_their_rates_and_tokens_do_not_decay():
    """One step of SGD, against the numbers of a loop over names."""
    rates = {
        "net/cls_token": 0.25 * 0.25 * 0.25,
        "net/blocks/0/fc/kernel": 0.25 * 0.25,
        "adapters/net/blocks/0/fc/a": 0.25 * 0.25,
        "net/blocks/1/fc/bias": 0.25,
        "net/norm/scale": 1.0,
        "head/blocks/0/kernel": 3.0,
    }
    shapes = {path: (1, 1, 2) if "token" in path else (2, 2) for path in rates}
    shapes["net/blocks/1/fc/bias"] = (2,)
    params = {path: jnp.full(shape, 2.0) for path, shape in shapes.items()}
    params = traverse_util.unflatten_dict(params, sep="/")
    transform = optimizers.build(
        optimizers.sgd(momentum=0),
        rate=0.1,
        schedule=schedules.constant(total=1),
        decay=0.5,
        layer_decay=0.25,
        groups=[{"path": "^head", "factor": 3.0}],
    )
    gradients = jax.tree.map(jnp.ones_like, params)
    updates, _ = transform.update(gradients, transform.init(params), params)
    updated = traverse_util.flatten_dict(optax.apply_updates(params, updates), sep="/")
    for path, rate in rates.items():
        decay = 0.0 if path.endswith(("token", "bias")) else 0.5 * 2.0
        np.testing.assert_allclose(updated[path], 2.0 - 0.1 * rate * (1 + decay), rtol=1e-6)


@pytest.mark.parametrize(
    ("path", "ndim", "spared"),
    [
        ("net/cls_token", 3, True),
        ("net/reg_token", 3, True),
        ("net/pos_embed", 3, True),
        ("net/latent", 3, True),
        ("net/blocks/0/ls1/gamma", 1, True),
        ("net/norm/bias", 1, True),
        ("net/blocks/0/attn/qkv/kernel", 2, False),
        ("proxies", 3, False),  # several for each class
    ],
)
def test_what_weight_decay_spares(path, ndim, spared):
    assert is_spared_from_decay(path, ndim) == spared


def test_a_net_of_unknown_order_is_refused_in_one_line(tmp_path):
    config = tiny(tmp_path, net={"name": "adapt.own_net:plain"})
    config["optimizer"] = {"name": "adam", "rate": 1e-2, "layer_decay": 0.5}
    with pytest.raises(ValueError, match=r"layer_decay=0\.5: this net has no blocks") as error:
        build(config)
    assert "\n" not in str(error.value)
    config = tiny(tmp_path, optimizer=config["optimizer"] | {"layer_decay": 1.5})
    with pytest.raises(ValueError, match=r"must be above 0 and at most 1, not 1\.5"):
        build(config)
