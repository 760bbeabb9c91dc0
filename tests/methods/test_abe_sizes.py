"""Parameters, operations and shapes of ABE and of its baseline, against the paper."""

import functools
import importlib

import jax
import jax.numpy as jnp
import pytest

from dmljax.train.compilation import multiply_adds

abe = importlib.import_module("dmljax.methods.abe")

IMAGE = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)


@functools.cache
def _shapes(net):
    return jax.eval_shape(lambda x: net.init(jax.random.key(0), x, train=False), IMAGE)


def _count(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


COUNTS = [
    (abe.MultiHead, 1, 512, 6_498_352),
    (abe.MultiHead, 2, 512, 11_795_056),
    (abe.ABE, 1, 512, 9_707_360),
    (abe.ABE, 2, 512, 9_844_800),
    (abe.ABE, 8, 512, 12_047_040),
    (abe.ABE, 1, 64, 9_248_160),
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
        (abe.MultiHead, 2, "2.254e+09"),
        (abe.ABE, 1, "2.210e+09"),
        (abe.ABE, 8, "7.460e+09"),
    ],
)
def test_operations_of_the_paper(net, learners, printed):
    net = net(learners=learners)
    jaxpr = jax.make_jaxpr(lambda variables, x: net.apply(variables, x, train=False))(
        _shapes(net), IMAGE
    )
    assert f"{multiply_adds(jaxpr.jaxpr):.3e}" == printed
