"""The configs of the multi-similarity and the Proxy-Anchor loss are those of the official codes."""

import numpy as np
import pytest
from one_step import moved, read, shrink, step


@pytest.mark.parametrize("name", ["cub", "cars", "sop", "inshop"])
def test_multi_similarity_as_published(name):
    config = read(f"{name}_multi_similarity")
    assert config["transform"] == {
        "name": "standard_train",
        "shorter": 256,
        "area": [0.16, 1.0],
    }
    assert config["method"] == {
        "name": "pairs",
        "dim": 512,
        "pool_fn": "global_max",
        "dense_fn": "kaiming_dense",
    }
    assert config["size"] == 227
    assert config["optimizer"] == {"name": "adam", "rate": 3e-5, "l2": 5e-4}


@pytest.mark.parametrize(
    ("name", "arg", "epochs"),
    [
        ("cub", None, "1 epoch"),
        ("cars", "net=resnet50", "5 epochs"),
        ("sop", None, "1 epoch"),
        ("inshop", None, "1 epoch"),
    ],
)
def test_proxy_anchor_as_published(name, arg, epochs):
    config = read(f"{name}_proxy_anchor", arg)
    optimizer = config["optimizer"]
    assert optimizer["clip_value"] == 10.0 and "l2" not in optimizer
    assert {g["path"]: g.get("from") for g in optimizer["groups"]} == {
        "^proxies": None,
        "^net/": epochs,
        ".": None,
    }
    assert {group["decay"] for group in optimizer["groups"]} == {1e-4}
    assert "warmup" not in config["schedule"]
    assert config["method"]["dense_fn"] == "kaiming_dense"


def test_new_layers_warm_up_alone(tmp_path):
    small = {"sampler": {"batch_size": 8}, "method": {"dim": 8}}
    config = shrink(read("cub_proxy_anchor"), tmp_path, **small)
    config["normalize"] = "caffe_bn"
    for group in config["optimizer"]["groups"]:
        group["decay"] = 0.0
    _, before, after, _ = step(config)
    assert moved(before.params, after.params, "net") == 0
    # The first step of Adam is its rate: there is no slow start.
    np.testing.assert_allclose(moved(before.params, after.params, "head"), 1e-4, rtol=0.01)
    change = np.abs(after.params["proxies"] - before.params["proxies"]).max()
    np.testing.assert_allclose(change, 1e-2, rtol=0.01)
    # After the first epoch the net learns, too.
    for group in config["optimizer"]["groups"]:
        group.pop("from", None)
    _, before, after, _ = step(config)
    np.testing.assert_allclose(moved(before.params, after.params, "net"), 1e-4, rtol=0.01)
