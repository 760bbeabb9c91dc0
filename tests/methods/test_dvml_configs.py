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
        "mode=code_1200,experiment=1",
        128,
        [[1.0, 0.5, 0.5, 1.0], [0.8, 1.0, 0.4, 0.8]],
        1200,
        7e-5,
        "semihard_triplet",
    ),
    ("cars_dvml", "mode=code_1600,experiment=2", 128, PAPER, 1600, 7e-5, "semihard_triplet"),
    ("cars_dvml", "mode=code_1200,experiment=3", 128, [[1.0] * 4] * 2, 0, 7e-5, "semihard_triplet"),
    (
        "cars_dvml",
        "mode=report,experiment=1",
        128,
        [[1.0, 0.5, 0.5, 1.0], [0.8, 1.0, 0.4, 0.8]],
        1600,
        7e-5,
        "semihard_triplet",
    ),
    ("cars_dvml", "mode=report,experiment=3", 128, [[1.0] * 4] * 2, 0, 7e-5, "semihard_triplet"),
    ("cub_dvml", "mode=code_1600,experiment=2", 256, PAPER, 1600, 6e-5, "semihard_triplet"),
    ("sop_dvml", "loss=npair", 512, PAPER, 1500, 1e-4, "dmljax.methods.dvml:n_pairs"),
]


@pytest.mark.parametrize(("name", "arg", "dim", "lambdas", "at", "rate", "loss"), ROWS)
def test_a_config_has_the_numbers_of_its_row(name, arg, dim, lambdas, at, rate, loss):
    config = read(name, arg)
    method, optimizer = config["method"], config["optimizer"]
    assert (method["dim"], method["lambdas"], method["phase_at"]) == (dim, lambdas, at)
    assert (optimizer["name"], optimizer["rate"]) == ("adam", rate)
    assert config["loss"]["name"] == loss and "normalize" not in config
    mined = {"name": "distance_weighted", "dim": dim} if loss == "triplet" else None
    assert config["miner"] == mined
    code = "mode=" in (arg or "")
    assert len(optimizer["groups"]) == (2 if code else 0)
    assert config["sampler"]["name"] == (
        "n_pairs" if code or "n_pairs" in loss else "class_balanced"
    )
    assert config["steps"] == (2 * at if at not in (0, 1500) else {0: 3000, 1500: 6000}[at])
    deviation = "log_variance_as_deviation" if "code_1600" in (arg or "") else "standard_deviation"
    assert method["deviation_fn"] == deviation


def test_arguments_change_only_their_fields():
    for arg in ("loss=triplet", "mode=code_1200", "mode=report,experiment=2"):
        plain, control = read("cars_dvml", arg), read("cars_dvml", f"{arg},baseline=True")
        assert control["method"] == plain["method"] | {"variational": False}
        groups = [g for g in plain["optimizer"]["groups"] if g["path"] != "^decoder/"]
        assert control["optimizer"] == plain["optimizer"] | {"groups": groups}
        unchanged = set(plain) - {"method", "optimizer"}
        assert all(control[name] == plain[name] for name in unchanged)
    assert read("cars_dvml", "mode=report")["method"]["decay"] == 0
    net = read("cars_dvml", "mode=code_1200,code_lrn=True")["net"]
    assert net == {"name": "googlenet", "lrn_size": 11, "lrn_alpha": 1.1e-3}
    assert read("cub_dvml", "loss=npair")["loss"]["l2_weight"] == 1.5e-2
    for arg, message in (
        ("mode=code", "mode is paper, code_1600, code_1200 or report, not 'code'"),
        ("loss=margin", "loss is triplet, npair or dws, not 'margin'"),
        ("experiment=4", "experiment is 1, 2 or 3, not 4"),
    ):
        with pytest.raises(ValueError, match=message):
            read("cars_dvml", arg)


@pytest.mark.parametrize(
    ("name", "arg"),
    [
        ("cars_dvml", "mode=code_1600"),
        ("cars_dvml", "mode=code_1200,baseline=True"),
        ("sop_dvml", "loss=npair"),
    ],
)
def test_a_step_of_a_config_has_its_terms_weights_and_rates(name, arg, tmp_path):
    small = {"sampler": {"classes": 4}, "method": {"phase_at": 5}}
    with_diagnostics = name == "sop_dvml"
    if with_diagnostics:
        small["net"] = {"name": "convnet", "widths": [4, 6], "strides": [2, 1]}
    config = shrink(read(name, arg), tmp_path, **small)
    _, before, after, metrics = step(config, stats=with_diagnostics)
    terms = ["kl", "reconstruction", "metric_variant", "metric_invariant"]
    weights = dict(zip(terms, config["method"]["lambdas"][0], strict=True))
    assert ("kl" in metrics) == ("baseline" not in arg)
    assert ("decay" in metrics) == ("cross_entropy" in metrics) == ("mode=code" in arg)
    expected = sum(weights[term] * metrics[term] for term in terms if term in metrics)
    expected += weights["metric_invariant"] * metrics.get("decay", 0)
    expected += metrics.get("cross_entropy", 0)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    assert ("positive_distance" in metrics) == with_diagnostics
    rates = {"net": 1e-4, "heads": 1e-4, "decoder": 1e-4}
    if "baseline" in arg:
        rates = {"net": 7e-5, "heads": 7e-5, "probe": 1e-3}
    elif arg == "mode=code_1600":  # three optimizers in one
        rates = {"net": 7e-5, "heads": 7e-5, "decoder": 1e-2, "probe": 1e-3}
    assert set(before.params) == set(rates)
    for part, rate in rates.items():  # the first step of Adam is its rate
        np.testing.assert_allclose(moved(before.params, after.params, part), rate, rtol=0.01)
