"""The configs of DVML: their numbers, their arguments, and one training step."""

import numpy as np
import pytest
from one_step import moved, read, shrink, step

PAPER = [[1.0, 1.0, 0.1, 1.0], [0.8, 1.0, 0.2, 0.8]]


ROWS = [
    ("cars_dvml", None, 512, PAPER, 1500, 1e-4, "semihard_triplet"),
    ("cars_dvml", "loss=npair", 512, PAPER, 1500, 1e-4, "dmljax.methods.dvml:n_pairs"),
    ("cars_dvml", "loss=dws", 512, PAPER, 1500, 1e-4, "triplet"),
    (
        "cars_dvml",
        "mode=seed,experiment=1",
        128,
        [[1.0, 0.5, 0.5, 1.0], [0.8, 1.0, 0.4, 0.8]],
        1600,
        7e-5,
        "semihard_triplet",
    ),
    ("cars_dvml", "mode=seed,experiment=2", 128, PAPER, 1600, 7e-5, "semihard_triplet"),
    ("cars_dvml", "mode=seed,experiment=3", 128, [[1.0] * 4] * 2, 0, 7e-5, "semihard_triplet"),
    ("cub_dvml", "mode=seed,experiment=2", 256, PAPER, 1600, 6e-5, "semihard_triplet"),
    ("sop_dvml", "loss=npair", 512, PAPER, 1500, 1e-4, "dmljax.methods.dvml:n_pairs"),
]


@pytest.mark.parametrize(("name", "arg", "dim", "lambdas", "at", "rate", "loss"), ROWS)
def test_configs_say_what_their_rows_do(name, arg, dim, lambdas, at, rate, loss):
    config = read(name, arg)
    method, optimizer = config["method"], config["optimizer"]
    assert (method["dim"], method["lambdas"], method["phase_at"]) == (dim, lambdas, at)
    assert (optimizer["name"], optimizer["rate"]) == ("adam", rate)
    assert config["loss"]["name"] == loss and "normalize" not in config
    mined = {"name": "distance_weighted", "dim": dim} if loss == "triplet" else None
    assert config["miner"] == mined
    seed = method["mode"] == "seed"
    assert len(optimizer["groups"]) == (2 if seed else 0)
    assert config["sampler"]["name"] == ("n_pairs" if seed or "n_pairs" in loss else "plan")


def test_arguments_of_the_configs():
    assert read("cars_dvml", "baseline=True")["method"] == {
        "name": "pairs",
        "dim": 512,
        "normalized": False,
    }
    net = read("cars_dvml", "mode=seed,code_lrn=True")["net"]
    assert net == {"name": "googlenet", "lrn_size": 11, "lrn_alpha": 1.1e-3}
    assert read("cub_dvml", "loss=npair")["loss"]["l2_weight"] == 1.5e-2
    for arg, message in (
        ("mode=code", "mode is paper or seed, not 'code'"),
        ("loss=margin", "loss is triplet, npair or dws, not 'margin'"),
        ("experiment=4", "experiment is 1, 2 or 3, not 4"),
    ):
        with pytest.raises(ValueError, match=message):
            read("cars_dvml", arg)


@pytest.mark.parametrize(
    ("name", "arg"),
    [
        ("cars_dvml", "mode=seed"),
        ("sop_dvml", "loss=npair"),
    ],
)
def test_configs_take_a_step(name, arg, tmp_path):
    small = {"sampler": {"classes": 4}, "method": {"phase_at": 5}}
    with_diagnostics = name == "sop_dvml"
    if with_diagnostics:
        small["net"] = {"name": "convnet", "widths": [4, 6], "strides": [2, 1]}
    _, before, after, metrics = step(
        shrink(read(name, arg), tmp_path, **small), stats=with_diagnostics
    )
    assert np.isfinite(metrics["loss"]) and ("positive_distance" in metrics) == with_diagnostics
    rates = {"net": 1e-4, "heads": 1e-4, "decoder": 1e-4}
    if arg == "mode=seed":  # three optimizers in one
        rates = {"net": 7e-5, "heads": 7e-5, "decoder": 1e-2, "probe": 1e-3}
    assert set(before.params) == set(rates)
    for part, rate in rates.items():  # the first step of Adam is its rate
        np.testing.assert_allclose(moved(before.params, after.params, part), rate, rtol=0.01)
