"""Any number of devices and hosts computes on a batch what one device does."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from processes import ROOT, ends, started, state
from system import tiny
from train.pixels import distance

from dmljax.runs import training
from dmljax.train import journal

# Programs that no config has. Each mode of a recipe stands once, on one data set: the others differ
# in numbers alone. "net=convnet" stands for any pretrained backbone, replaced by a small net.
CONFIGS = [str(path) for path in sorted((ROOT / "configs").glob("*.py"))]
# They differ from other configs in numbers, and in parts of which other programs have each.
ALIKE = ("folder", "inshop_graph", "inshop_proxy_anchor", "sop_graph", "sop_proxy_anchor")
MECHANISMS = ["memory in chunks of 7", "sharded proxies", "drawn negatives", "5 images"]
SHARDED = {"g/14, all sharded": ("params", "opt_state"), "H+, state sharded": ("opt_state",)}
MECHANISMS += SHARDED
VARIANTS = ["cub:net=convnet,train=ladder", "graph:attention=gat"]
_SLOW = {
    "abe": ["heads=True", "pairs=all"],
    "cub:net=convnet,train": ["all", "head", "last4", "lora", "bitfit", "prompts", "vptsp"],
    "dvml": [
        "mode=code_1600",
        "mode=code_1200",
        "mode=report",
        "loss=npair",
        "loss=dws",
        "baseline=True",
    ],
    "graph": ["attention=gatv2", "attention=gat,published=True", "attention=dot_plus_one"],
    "glyphs:loss": ["contrastive", "triplet", "ntxent", "circle", "supcon", "normalized_softmax"],
    "tinyimagenet": ["loss=arcface"],
}
_SLOW["graph"] += ["attention=none", "heads=averaged", "mlp=False"]
_SLOW["glyphs:loss"] += ["proxy_anchor", "proxy_nca_pp", "cosface", "arcface"]
SLOW = [f"{k}{'=' if ':' in k else ':'}{v}" for k, values in _SLOW.items() for v in values]
SLOW += ["abe, all sharded", "dvml, all sharded", "graph, all sharded"]
QUICK = [name for name in CONFIGS if pathlib.Path(name).stem not in ALIKE]
QUICK += [*MECHANISMS, *VARIANTS]
# By the numbers of devices, beside one: those of `quick` divide few of the batches.
PARTS = {"quick": ("3,16", QUICK), "slow": ("3,8,16", [*CONFIGS, *MECHANISMS, *VARIANTS, *SLOW])}


@pytest.fixture(scope="module", params=["quick", pytest.param("slow", marks=pytest.mark.slow)])
def programs(request, tmp_path_factory):
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "16"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    script = pathlib.Path(__file__).with_name("on_devices.py")
    counts, expected_names = PARTS[request.param]
    completed = subprocess.run(
        [sys.executable, script, tmp_path_factory.mktemp("on_devices"), counts, *expected_names],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr[-2000:]
    programs = [json.loads(line) for line in completed.stdout.splitlines()]
    names = [name for program in programs for name in program["names"]]
    assert sorted(names) == sorted(expected_names)
    assert all(list(program["devices"]) == counts.split(",") for program in programs)
    return programs


def test_every_recipe_is_the_same_on_any_number_of_devices(programs):
    """Every mode of a recipe that is another program; slow: all configs.

    * `cub` stands for `cars`, `sop`, `inshop` and `folder`, which differ in the data set alone.
    * `train=ladder` is its step `all`, where all layers learn. `head` computes the features, which
      runs read from a cache.
    * `dvml`, `graph` and `abe` stand for all their data sets; `glyphs` has the losses of `folder`.
    """
    for program in programs:
        assert program["moved"] > 1e-5, program
        # Transformers compute the softmax of their attention in float32.
        limit = 1e-5 if program["net"].startswith("vit") else 1e-6
        for on_devices in program["devices"].values():
            assert on_devices["distance"] < limit, program


def test_devices_share_the_state_of_a_transformer(programs):
    """What `runtime.sharded` splits, and nothing else: here nearly all arrays can be divided."""
    states = {name: program for program in programs for name in program["names"]}
    for name, split in SHARDED.items():
        for count, on_devices in states[name]["devices"].items():
            for field, share in on_devices["held"].items():
                least = 1 / int(count) if field in split else 1
                assert least <= share < least + 0.1, (name, count, field, share)


def test_a_device_computes_its_share_of_a_batch_alone(programs):
    uneven = 0
    for program in programs:
        batch = program["batch"]
        for count, on_devices in program["devices"].items():
            uneven += batch % int(count) > 0
            rows = -(-batch // int(count))
            if batch > 40 and program["chunk"] is None:
                # Optimizers and losses compute a little that is not per image.
                assert on_devices["share"] < 1.25 * rows / batch + 0.02, program
    assert uneven > 20


def test_hosts_with_unequal_shares_compute_what_one_device_does(tmp_path):
    """Of 8 images, two hosts hold 4 each on two devices, and the third host holds padding alone."""
    evaluate = {"every": 6, "ks": [1], "clustering": None, "batch_size": 10}
    config = tiny(tmp_path, evaluate=evaluate, checkpoint={"every": 6, "keep": 1})
    config["runtime"] = {"sharded": "all"}
    with started(tmp_path, tmp_path / "hosts", config, processes=3) as process:
        assert "on 6 cpu devices" in ends(process, 0, tmp_path)
    training.run(config | {"runtime": {"devices": 1}}, tmp_path / "one")
    of_hosts, of_one = (journal.read(tmp_path / d / "metrics.jsonl") for d in ("hosts", "one"))
    assert [sorted(x) for x in of_hosts] == [sorted(x) for x in of_one]
    for a, b in zip(of_hosts, of_one, strict=True):
        np.testing.assert_allclose([a[k] for k in a], [b[k] for k in a], rtol=1e-3, atol=1e-5)
    expected, actual = state(tmp_path / "one").params, state(tmp_path / "hosts").params
    assert distance(actual, expected) < 1e-4
