"""Embeddings of several runs side by side."""

import json
import pathlib

import pytest
from study_files import write_study
from system import tiny

from dmljax.runs import training
from dmljax.studies import joined, plan, session, sizes


def test_a_run_joined_with_itself_has_its_own_scores(tmp_path):
    """All scores of the run, by its own options: starts of k-means, a depth and further scores."""
    config = tiny(tmp_path)
    config["evaluate"] |= {
        "clustering": {"starts": 3},
        "depth": 3,
        "metrics": ["all", "class_deviation"],
    }
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


@pytest.mark.parametrize(
    ("fields", "options", "members"),
    [
        ({"seeds": 2}, {"join_seeds": 3}, {0: [0, 1, 2], 1: [3, 4, 5]}),
        ({"seeds": 2, "folds": 3}, {"join_folds": True}, {0: [0, 0, 0], 1: [1, 1, 1]}),
    ],
)
def test_an_ensemble_has_the_nets_of_its_seeds_or_folds(tmp_path, fields, options, members):
    """Its scores are test scores, and belong to its own row and seed."""
    net = {"seeds": 6} if "join_seeds" in options else {}
    rows = {"net": net, "ensemble": {"runs_of": "net", **options}}
    path = write_study(tmp_path, rows=rows, **fields)
    opened = session.open_session(str(path), workdir=str(tmp_path / "of_study"))
    configs = plan.check_rows(opened.study)
    runs = plan.Planner(opened.study, pathlib.Path("runs")).runs_of(opened.study.rows)
    opened.folder.record(opened.study, configs, runs)
    seed_of = {run.digest: run.seed for run in runs}
    ensembles = joined._ensembles(opened)
    assert {e.seed: [seed_of[d] for d in e.digests] for e in ensembles} == members
    file = ensembles[1].file(opened)
    file.parent.mkdir()
    file.write_text(json.dumps({"scores": {"R@1": 0.5}}))
    assert joined.read(opened) == {("ensemble", 1): {"test/R@1": 0.5}}
    counted = {"net": {"parameters": 7}}
    for digest, expected in ((opened.study.digest, counted), ("of other rows", {})):
        content = {"digest": digest, "sizes": counted}
        (opened.folder.path / "sizes.json").write_text(json.dumps(content))
        assert sizes.read(opened) == expected
