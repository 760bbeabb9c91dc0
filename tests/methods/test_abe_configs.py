"""The configs of ABE: their numbers, and one training step."""

import jax
import numpy as np
import optax
import pytest
from abe_cases import CUT
from one_step import moved, read, shrink, step

ROWS = [
    ("cars_abe", None, 8, False, 1.0),
    ("cars_abe", "learners=4,dim=256", 4, False, 1.0),
    ("cars_abe", "divergence=0", 8, False, 0.0),
    ("cars_abe", "heads=True,learners=2", 2, True, 0.0),
    ("cars_abe", "heads=True,divergence=1", 8, True, 1.0),
    ("cub_abe", None, 8, False, 1.0),
    ("sop_abe", None, 8, False, 1.0),
    ("inshop_abe", None, 8, False, 1.0),
]


@pytest.mark.parametrize(("name", "arg", "learners", "heads", "weight"), ROWS)
def test_configs_say_what_their_rows_do(name, arg, learners, heads, weight):
    config = read(name, arg)
    method = config["method"]
    row = (method["learners"], method["heads"], method["lambda_div"])
    assert row == (learners, heads, weight)
    assert config["sampler"] == {"name": "abe_pairs", "batch_size": 64}
    assert config["net"] == {"name": "googlenet"} and "normalize" not in config
    names = {"cub_abe": "cub200", "cars_abe": "cars196"}
    assert config["dataset"]["name"] == names.get(name, name[:-4])


@pytest.mark.parametrize(
    ("name", "arg"),
    [
        ("cars_abe", "heads=True,learners=2"),
        ("cub_abe", None),
    ],
)
def test_configs_take_a_step(name, arg, tmp_path):
    small = {"sampler": {"batch_size": 16}, "method": CUT}
    with_diagnostics = name == "cub_abe"
    if with_diagnostics:
        small["method"] = {"split": ["conv1", "conv2"], "attention": "conv2"}
        small["net"] = {"name": "convnet", "widths": [4, 6], "strides": [2, 1]}
    config = shrink(read(name, arg), tmp_path, **small)
    config["normalize"] = "caffe"  # what GoogLeNet, which the small net replaces, asks for
    run, before, after, metrics = step(config, stats=with_diagnostics)
    heads, weight = config["method"]["heads"], config["method"]["lambda_div"]
    assert np.isfinite(metrics["loss"]) and ("positive_distance" in metrics) == with_diagnostics
    np.testing.assert_allclose(
        metrics["loss"], metrics["metric"] + weight * metrics["divergence"], rtol=1e-5
    )
    images = jax.ShapeDtypeStruct((2, 12, 12, 3), np.float32)
    parts = jax.eval_shape(run.method.inspect.parts, before.params, before.model_state, images)
    assert len(parts) == config["method"]["learners"]
    assert moved(before.params, after.params, "net/shared") > 0
    # The first step of SGD: the rate, ten times that of what is new, times the slope it remembers.
    slopes = optax.tree.get(after.opt_state, "trace")
    new, old = ("embedding_1", "head_1") if heads else ("embedding", "head")
    for part, rate in ((new, 1e-3), (old, 1e-4)):
        slope = max(float(abs(x).max()) for x in jax.tree.leaves(slopes["net"][part]))
        change = moved(before.params, after.params, f"net/{part}")
        np.testing.assert_allclose(change, rate * slope, rtol=0.02)
