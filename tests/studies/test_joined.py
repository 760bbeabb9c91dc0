"""Embeddings of several runs side by side."""

import json

import pytest
from system import tiny

from dmljax.runs import training
from dmljax.studies import joined


def test_a_run_joined_with_itself_has_its_own_scores(tmp_path):
    """All scores of the run, by its own options: starts of k-means, a depth and further scores."""
    config = tiny(tmp_path)
    config["evaluate"] |= {"starts": 3, "depth": 3, "extra": ["class_deviation"]}
    folder, out = tmp_path / "run", tmp_path / "out.json"
    scores = training.run(config, folder)
    joined.write(str(out), [folder, folder])
    content = json.loads(out.read_text())
    assert content["runs"] == ["run", "run"]
    assert {"NMI", "mAP@3", "MRR@3", "class_deviation", "R@1"} <= set(content["scores"])
    by_distance = {k: v for k, v in content["scores"].items() if k.startswith("mean_distance/")}
    rest = {k: v for k, v in content["scores"].items() if k not in by_distance}
    assert rest == pytest.approx(scores, rel=1e-4)
    # Equal nets have equal distances, so that both rankings agree.
    assert by_distance["mean_distance/R@1"] == pytest.approx(scores["R@1"])
    assert by_distance["mean_distance/MAP@R"] == pytest.approx(scores["MAP@R"], rel=1e-4)
