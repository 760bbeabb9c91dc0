"""The configs of ABE: their numbers, and one training step."""

import jax
import numpy as np
import optax
import pytest
from abe_cases import CUT
from one_step import moved, read, shrink, step

from dmljax.config.build import build
from dmljax.train.evaluation import Evaluator

ROWS = [
    ("cars_abe", None, 8, False, 1.0),
    ("cars_abe", "learners=4,dim=256", 4, False, 1.0),
    ("cars_abe", "divergence=0", 8, False, 0.0),
    ("cars_abe", "heads=True,learners=2", 2, True, 0.0),
    ("cars_abe", "heads=True,divergence=1", 8, True, 1.0),
    ("cars_abe", "divergence=0.1", 8, False, 0.1),
    ("cars_abe", "divergence=50,crop=True", 8, False, 50.0),
    ("cub_abe", None, 8, False, 1.0),
    ("cub_abe", "learners=2,crop=True", 2, False, 1.0),
    ("sop_abe", None, 8, False, 1.0),
    ("inshop_abe", None, 8, False, 1.0),
]


@pytest.mark.parametrize(("name", "arg", "learners", "heads", "weight"), ROWS)
def test_a_config_has_the_numbers_of_its_row(name, arg, learners, heads, weight):
    config = read(name, arg)
    method = config["method"]
    row = (method["learners"], method["attention"] is None, method["lambda_div"])
    assert row == (learners, heads, weight)
    assert config["sampler"] == {"name": "abe_pairs", "batch_size": 64}
    assert config["net"] == {"name": "googlenet"} and "normalize" not in config
    names = {"cub_abe": "cub200", "cars_abe": "cars196"}
    crop = {"crop": True} if "crop" in (arg or "") else {}
    assert config["dataset"] == {"name": names.get(name, name[:-4])} | crop
    assert ("clustering" in config["evaluate"]) == (name not in names)


@pytest.mark.parametrize(
    ("arg", "split", "last", "pools"),
    [
        ("blocks=1", ("pool3", "4a"), "4a", True),
        ("blocks=6", ("pool3", "4a"), "5a", False),
        ("blocks=7", ("pool3", "4a"), "5b", False),
        ("branch=pool2", ("pool2", "3a"), "4c", False),
        ("branch=3a", ("3a", "3b"), "4d", False),
        ("branch=4a", ("4a", "4b"), "5a", False),
        ("branch=4b", ("4b", "4c"), "5b", False),
    ],
)
def test_the_attention_of_figure_7(arg, split, last, pools):
    method = read("cars_abe", arg)["method"]
    assert (tuple(method["split"]), method["attention"]) == (split, last)
    assert method["attention_pools"] == pools


@pytest.mark.parametrize(
    ("name", "arg", "message"),
    [
        ("cars_abe", "branch=4b,blocks=6", "blocks is 1, 2, 3, 4 or 5, not 6"),
        ("cars_abe", "branch=3b", "branch is pool2, 3a, pool3, 4a or 4b, not '3b'"),
        ("sop_abe", "crop=True", "crop=True needs published boxes.*not sop"),
        ("cars_abe", "ranking=mean", "ranking is squared or distance, not 'mean'"),
    ],
)
def test_arguments_that_no_row_has_are_refused(name, arg, message):
    with pytest.raises(ValueError, match=message):
        read(name, arg)


def test_a_net_without_pools_is_told_so(tmp_path):
    small = {"sampler": {"batch_size": 16}, "method": CUT}
    config = shrink(read("cars_abe", "blocks=7"), tmp_path, **small) | {"normalize": "caffe"}
    with pytest.raises(ValueError, match="attention_pools=False: Patches has no pools"):
        build(config)


def test_the_text_of_the_paper_ranks_by_the_mean_of_distances(tmp_path):
    small = {"sampler": {"batch_size": 16}, "method": {**CUT, "dim": 16}}
    config = shrink(read("cars_abe", "learners=2,ranking=distance"), tmp_path, **small)
    config |= {"normalize": "caffe", "select": "test/mean_distance/R@1"}
    run, before, _, _ = step(config)
    evaluator = Evaluator(run)
    embeddings = evaluator.embeddings(before, run.test)
    scores = evaluator.scores(before, embeddings, run.test)
    learners = np.stack([embeddings[f"learner_{m}"] for m in range(2)], axis=1).astype(float)
    gaps = np.linalg.norm(learners[:, None] - learners[None], axis=3).sum(axis=2)
    np.fill_diagonal(gaps, np.inf)
    nearest = run.test.labels[gaps.argmin(axis=1)]
    assert scores["mean_distance/R@1"] == np.mean(nearest == run.test.labels)
    assert {"mean_distance/R@8", "mean_distance/MAP@R"} <= set(scores)
    assert run.selection.score == "mean_distance/R@1"
    config["method"]["learners"] = 1
    with pytest.raises(ValueError, match="'mean_distance' needs learners"):
        build(config)


@pytest.mark.parametrize(
    ("name", "arg"),
    [
        ("cars_abe", "heads=True,learners=2"),
        ("cub_abe", None),
    ],
)
def test_a_step_of_a_config_has_its_terms_learners_and_rates(name, arg, tmp_path):
    small = {"sampler": {"batch_size": 16}, "method": CUT}
    with_diagnostics = name == "cub_abe"
    if with_diagnostics:
        small["method"] = {"split": ["conv1", "conv2"], "attention": "conv2"}
        small["net"] = {"name": "convnet", "widths": [4, 6], "strides": [2, 1]}
    config = shrink(read(name, arg), tmp_path, **small)
    config["normalize"] = "caffe"  # what GoogLeNet, which the small net replaces, asks for
    heads = "heads=True" in (arg or "")
    if heads:
        config["method"]["attention"] = None
    run, before, after, metrics = step(config, stats=with_diagnostics)
    weight = config["method"]["lambda_div"]
    assert ("positive_distance" in metrics) == with_diagnostics
    assert metrics["metric"] > 0 and (heads or metrics["divergence"] > 0)
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
