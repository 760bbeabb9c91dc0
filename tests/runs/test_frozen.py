"""A run from a pretrained backbone is compared with it, and is not exported if it is worse."""

import json
import math
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from system import METHODS, brief, tiny

from dmljax import bundle
from dmljax.bundle import exporting
from dmljax.config import method
from dmljax.config.build import build
from dmljax.data.splits import Split
from dmljax.files import run_folder as results
from dmljax.main import main
from dmljax.methods.assemble import backbone_features
from dmljax.metrics import per_query
from dmljax.report import run as run_facts
from dmljax.report import scores_file
from dmljax.runs import folder, frozen, training
from dmljax.train.evaluation import Evaluator
from dmljax.train.journal import read

NARROW = {"name": "pairs", "dim": 1}


def _run(place, source, **fields):
    fields = {"start": {"name": str(source), "takes": "backbone"}} | fields
    training.run(brief(place, **fields), place / "run")
    return place / "run"


@pytest.fixture(scope="module")
def worse(source, tmp_path_factory):
    """A run whose embeddings of one number know less than its backbone."""
    return _run(tmp_path_factory.mktemp("worse"), source, method=NARROW, held_out=0.5)


def test_scores_are_those_of_the_plain_backbone_on_both_splits(worse, source):
    run, _ = folder.reopen(worse)
    _, start = folder.reopen(source)
    for split, prefix in (("test", "frozen"), ("val", "frozen_val")):
        images = run.splits[split]
        x = jnp.asarray(images.records / 255, jnp.float32)
        rows = np.asarray(backbone_features(run.net, start.params, start.model_state, x))
        expected = per_query(rows / np.linalg.norm(rows, axis=1, keepdims=True), images.labels)
        lines = [x for x in read(worse / "metrics.jsonl") if f"{prefix}/R@1" in x]
        assert [line["step"] for line in lines] == [0]
        for name in ("R@1", "MAP@R"):
            assert lines[0][f"{prefix}/{name}"] == pytest.approx(expected[name].mean(), abs=1e-6)
            assert results.read(worse).scores[f"{prefix}/{name}"] == lines[0][f"{prefix}/{name}"]


def test_a_worse_run_says_so_and_is_exported_only_on_demand(worse, tmp_path):
    out = tmp_path / "a.bundle"
    words = ["export", str(worse), f"--out={out}", "--batch-sizes=8"]
    with pytest.raises(ValueError, match=r"worse than frozen by [1-9].* on held-out classes") as e:
        main(words)
    assert "\n" not in str(e.value) and "--allow-worse" in str(e.value) and not out.exists()
    assert main([*words, "--allow-worse"]) == 0
    card = (out / "README.md").read_text()
    assert "MAP@R of the backbone without training" in card
    assert "Minus the frozen backbone" in card and bundle.load(out).embed is not None


def test_deleted_scores_do_not_switch_the_guard_off(worse, tmp_path):
    run = shutil.copytree(worse, tmp_path / "run")
    shutil.rmtree(run / "frozen")
    with pytest.raises(ValueError, match=r"worse than frozen by .* on held-out classes"):
        exporting.export(run, tmp_path / "a.bundle")


def test_the_difference_is_a_mean_over_classes_where_the_scores_are(tmp_path):
    run = build(tiny(tmp_path, evaluate={"average": "classes"}))
    rng = np.random.default_rng(0)
    labels = np.sort(rng.integers(0, 24, 192))  # classes of several sizes
    split = Split(np.arange(192), labels, tuple(map(str, range(24))))
    centers = rng.normal(size=(24, 8))[labels]
    plain, trained = (
        scores_file.score(noise * rng.normal(size=(192, 8)) + centers, split) for noise in (2, 1)
    )
    for row in frozen._against(run, trained, plain):
        assert row.difference == pytest.approx(row.trained - row.frozen)
        over_queries = np.nanmean(trained.values[row.name] - plain.values[row.name])
        assert row.difference != pytest.approx(over_queries) and row.low < row.difference < row.high


def test_an_untouched_backbone_is_no_worse(source, tmp_path, capsys):
    fields = {"method": {"name": "pairs", "dim": None}, "pictures": "page"}
    fields["net"] = {**tiny(tmp_path)["net"], "norm": "frozen_batch_norm"}
    run = _run(tmp_path, source, optimizer={"name": "sgd", "rate": 0.0}, **fields)
    assert "R@1 +0.0" in capsys.readouterr().out
    exporting.export(run, tmp_path / "a.bundle", batch_sizes=(8,))
    page = (run / "report.html").read_text()
    assert "Minus the frozen backbone on the test split R@1 +0.0" in page
    curves = run_facts.read(run).curves(None)
    levels = [x for x in curves["scores"] if x["name"] == "frozen: test MAP@R"]
    assert len(levels) == 1 and len(set(levels[0]["values"])) == 1


def test_a_difference_that_nobody_sees_is_not_worse_and_a_missing_one_is_a_dash():
    row = frozen.Against("test", "MAP@R", 0.6369, 0.637, None, None, -4e-4, None, None, "better")
    assert not row.is_worse and row._replace(difference=-6e-4).is_worse
    assert str(row) == "MAP@R -0.0: no range over so few classes"
    for missing in (np.nan, None):  # None is in result.json
        row = row._replace(difference=missing, verdict="unknown")
        assert not row.is_worse and frozen.sentence([row]).endswith("MAP@R -: unknown")


def test_a_run_without_scores_is_not_exported(worse, tmp_path, monkeypatch):
    against = frozen._against

    def without_scores(*arguments):
        return [row._replace(difference=math.nan) for row in against(*arguments)]

    monkeypatch.setattr(frozen, "_against", without_scores)
    with pytest.raises(ValueError, match=r"MAP@R is not a number\. To export it without"):
        exporting.export(worse, tmp_path / "a.bundle")
    assert not (tmp_path / "a.bundle").exists()


def test_the_weights_at_the_start_of_a_chain_of_runs_are_known(tmp_path):
    configs = {"first": {"start": None, "net": {"name": "vit_s16", "weights": "a.pth"}}}
    configs["second"] = {"start": {"name": str(tmp_path / "first")}, "net": {"name": "vit_s16"}}
    for name, config in configs.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    assert method.first_weights(str(tmp_path / "second"), None) == "a.pth"
    assert method.first_weights(None, "b.pth") == "b.pth"


@pytest.mark.parametrize("name", ["graph", "dvml", "abe"])
def test_every_method_has_the_plain_backbone_as_its_baseline(source, tmp_path, name):
    run = build(tiny(tmp_path, start={"name": str(source), "takes": "backbone"}, **METHODS[name]))
    assert run.options.evaluate.frozen
    rows = Evaluator(run).frozen_fn(frozen.start.backbone(run))(run.test)
    _, start = folder.reopen(source)
    x = jnp.asarray(run.test.records / 255, jnp.float32)
    output = run.pooled_output or "pooled"
    expected = backbone_features(run.net, start.params, start.model_state, x, output=output)
    expected = np.array(expected)
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(rows, expected, atol=1e-5)


def test_a_run_without_a_backbone_has_no_baseline(tmp_path):
    assert build(tiny(tmp_path)).options.evaluate.frozen is False
    with pytest.raises(ValueError, match=r"evaluate.frozen=True needs a pretrained backbone: give"):
        build(tiny(tmp_path, evaluate={"frozen": True}))
