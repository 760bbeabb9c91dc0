"""Parameters, operations and shapes of ABE and of its baseline, against the paper."""

import functools

import jax
import jax.numpy as jnp
import pytest

from dmljax import recipes
from dmljax.methods.abe import nets as abe
from dmljax.nets import googlenet
from dmljax.train.compilation import multiply_adds

IMAGE = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)


@functools.cache
def _shapes(net):
    return jax.eval_shape(lambda x: net.init(jax.random.key(0), x, train=False), IMAGE)


def _count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


COUNTS = [
    (abe.MultiHead, 1, 512, 6_498_352),
    (abe.MultiHead, 2, 512, 11_795_056),
    (abe.MultiHead, 4, 512, 22_388_464),
    (abe.MultiHead, 8, 512, 43_575_280),
    (abe.ABE, 1, 512, 9_707_360),
    (abe.ABE, 2, 512, 9_844_800),
    (abe.ABE, 4, 512, 10_513_280),
    (abe.ABE, 8, 512, 12_047_040),
    (abe.ABE, 1, 64, 9_248_160),
    (abe.ABE, 2, 128, 9_648_000),
    (abe.ABE, 4, 256, 10_447_680),
]


@pytest.mark.parametrize(("net", "learners", "features", "count"), COUNTS)
def test_parameter_counts(net, learners, features, count):
    shapes = _shapes(net(learners=learners, features=features))
    assert sorted(shapes) == ["params"] and _count(shapes) == count


def test_parameters_of_the_parts():
    params = _shapes(abe.ABE())["params"]
    assert {name: _count(part) for name, part in params.items()} == {
        "shared": 676_848,
        "attention": 2_809_168,
        "masks": 8 * 399_840,
        "head": 2_809_168 + 2_487_536,
        "embedding": 1024 * 64 + 64,
    }


@pytest.mark.parametrize(
    ("net", "learners", "printed"),
    [
        (abe.MultiHead, 1, "1.582e+09"),
        (abe.MultiHead, 2, "2.254e+09"),
        (abe.ABE, 1, "2.210e+09"),
        (abe.ABE, 2, "2.960e+09"),
        (abe.ABE, 8, "7.460e+09"),
    ],
)
def test_operations_of_the_paper(net, learners, printed):
    net = net(learners=learners)
    jaxpr = jax.make_jaxpr(lambda variables, x: net.apply(variables, x, train=False))(
        _shapes(net), IMAGE
    )
    assert f"{multiply_adds(jaxpr.jaxpr):.3e}" == printed


# Widths of the stages (Szegedy et al., 2015): 1x1; 3x3 reduce, 3x3; 5x5 reduce, 5x5; projection.
WIDTHS = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
BRANCHES = {"pool2": (192, 28), "3a": (256, 28), "pool3": (480, 14), "4a": (512, 14)}
BRANCHES["4b"] = (512, 14)


def _inception(stage, channels):
    """(parameters, multiply-adds of a pixel, channels after) of an inception block."""
    one, reduce3, three, reduce5, five, project = WIDTHS[stage]
    weights = channels * (one + reduce3 + reduce5 + project) + 9 * reduce3 * three
    weights += 25 * reduce5 * five
    out = one + three + five + project
    return weights + out + reduce3 + reduce5, weights, out


def _attention_by_hand(branch, blocks):
    """(parameters of the attention, of the masks, multiply-adds of both) for eight learners."""
    channels, side = BRANCHES[branch]
    names = list(WIDTHS)
    first = {"pool2": 0, "3a": 1, "pool3": 2, "4a": 3, "4b": 4}[branch]
    params, products, width = 0, 0, channels
    for stage in names[first : first + blocks]:
        block_params, block_products, width = _inception(stage, width)
        params, products = params + block_params, products + block_products
    masks = 8 * channels * width
    return params, masks + 8 * channels, (products + masks) * side**2


SLOW = (2, 3, 6)
FIGURE_7 = [pytest.param("pool3", n, marks=[pytest.mark.slow] * (n in SLOW)) for n in range(1, 8)]
FIGURE_7 += [(branch, 5) for branch in BRANCHES if branch != "pool3"]


@pytest.mark.parametrize(("branch", "blocks"), FIGURE_7)
def test_rows_of_figure_7(branch, blocks):
    """Depth and branch of the attention, as the recipe builds them, against counting by hand."""
    config = recipes.abe(branch=branch, blocks=blocks)["method"]
    net = abe.ABE(
        split=tuple(config["split"]),
        attention=config["attention"],
        attention_net=functools.partial(googlenet, pools=config["attention_pools"]),
    )
    draw = functools.partial(net.init_with_output, jax.random.key(0), train=False)
    out, shapes = jax.eval_shape(draw, IMAGE)
    params = shapes["params"]
    attention, masks, products = _attention_by_hand(branch, blocks)
    assert (_count(params["attention"]), _count(params["masks"])) == (attention, masks)
    # Shared stages, head and embedding are those of the table, whatever the cut.
    assert _count(params["shared"]) + _count(params["head"]) == 5_973_552
    channels, side = BRANCHES[branch]
    assert out["masks"].shape == (1, 8, side, side, channels)
    if branch == "pool3":
        jaxpr = jax.make_jaxpr(functools.partial(net.apply, train=False))(shapes, IMAGE)
        # The shared stages once, the others for every learner.
        others = 909_991_936 + 8 * (549_878_784 + 121_777_152 + 1024 * 64)
        assert multiply_adds(jaxpr.jaxpr) == others + products


def test_masks_that_do_not_fit_name_the_pools():
    with pytest.raises(ValueError, match=r"7 x 7 do not fit maps of 14 x 14.*leave out its pools"):
        _shapes(abe.ABE(attention="5a"))


def test_shapes_of_the_published_net():
    net = abe.ABE()
    out = jax.eval_shape(lambda v, x: net.apply(v, x, train=False), _shapes(net), IMAGE)
    assert {name: array.shape for name, array in out.items()} == {
        "learners": (1, 8, 64),
        "embeddings": (1, 512),
        "masks": (1, 8, 14, 14, 480),
    }
