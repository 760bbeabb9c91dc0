"""A finished run, opened again: scored, embedded, and chosen by its own rule."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
from safetensors import safe_open
from system import METHODS, brief, photos, tiny

from dmljax import main, recipes
from dmljax.files import run_folder as results
from dmljax.report import arrays, scores_file
from dmljax.report import run as run_facts
from dmljax.runs import export, training
from dmljax.runs import folder as run_folder
from dmljax.train import evaluation, journal
from dmljax.train.evaluation import Evaluator


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished")
    config = tiny(
        folder, held_out=0.5, sampler={"name": "class_balanced", "classes": 2, "per_class": 4}
    )
    config |= {"runtime": {"devices": 1}}
    return folder, training.run(config, folder / "run")


def test_evaluate_gives_the_scores_of_the_run(finished):
    folder, scores = finished
    evaluated, lines = run_folder.evaluate(folder / "run")
    printed = "\n".join(lines)
    assert evaluated == scores
    assert "test split, 32 images, after step 6 (select=last), seed 0, 4-d embeddings" in printed
    preprocessing = results.read(folder / "run").preprocessing
    assert preprocessing == "unchanged, RGB 0 to 1"
    assert f"12 x 12 x 3 images ({preprocessing}), pretraining: none" in printed
    assert "MAP@R" in printed
    lines = journal.read(folder / "run" / "metrics.jsonl")
    held_out = next(x for x in lines if x["step"] == 6 and "val/R@1" in x)
    val_scores = run_folder.evaluate(folder / "run", split="val")[0]
    assert all(held_out[f"val/{name}"] == value for name, value in val_scores.items())
    step_scores, step_lines = run_folder.evaluate(folder / "run", step=4)
    assert "after step 4 (as asked)" in step_lines[1] and set(step_scores) == set(scores)
    train_scores = run_folder.evaluate(folder / "run", split="train")[0]
    assert train_scores["R@1"] >= 0


def test_evaluate_takes_changed_fields_of_the_config(finished, tmp_path):
    folder, scores = finished
    moved = shutil.copy(folder / "blobs.npz", tmp_path / "moved.npz")
    flags = (f"--config.dataset.path={moved}", "--config.evaluate.ks=[1,3]")
    changed = run_folder.evaluate(folder / "run", overrides=flags)[0]
    assert changed["R@1"] == scores["R@1"] and "R@3" in changed and "R@2" not in changed


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"split": "dev"}, "the run has no split 'dev': choose train, val, test"),
        ({"step": 5}, r"has the checkpoints \[3, 4, 6\], not 5"),
        ({"overrides": ["--config.method.dim=5"]}, "does not fit"),
        ({"overrides": ["--config.method.dmi=5"]}, "did you mean 'dim'"),
    ],
)
def test_an_evaluation_that_is_impossible_is_refused(finished, fields, message):
    with pytest.raises((ValueError, TypeError), match=message):
        run_folder.evaluate(finished[0] / "run", **fields)


def test_a_run_without_held_out_classes_has_no_val(source):
    with pytest.raises(ValueError, match=r"choose train, test; a run with --config.held_out=0.2"):
        run_folder.evaluate(source, split="val")


def test_evaluate_and_embed_from_the_command_line(finished, tmp_path, capsys):
    run, out = finished[0] / "run", tmp_path / "out"
    assert main.main(["evaluate", str(run), "--split=val"]) == 0
    printed = capsys.readouterr().out
    assert "R@1" in printed and "val split, 16 images, after step 6" in printed
    assert main.main(["embed", str(run), f"--out={out}"]) == 0
    assert "32 embeddings" in capsys.readouterr().out
    assert (out / "embeddings.npy").exists()
    for flags, message in (
        (["embed", run], "needs --out"),
        (["embed", run, f"--out={out}2", "--synthetic"], "makes no synthetic features; dvml does"),
        (["evaluate", run, "--config=configs/glyphs.py"], "leave out --con"),
        (["evaluate", tmp_path], "holds no run"),
    ):
        with pytest.raises((ValueError, OSError), match=message) as error:
            main.main([str(word) for word in flags])
        assert "\n" not in str(error.value)
    assert not (tmp_path / "out2").exists()


def test_embed_writes_the_embeddings_of_the_net(finished, tmp_path):
    folder, scores = finished
    run, state = run_folder.reopen(folder / "run")
    expected = Evaluator(run).embeddings(state, run.test)["embedding"]
    for dtype, tolerance in (("float16", 1e-3), ("float32", 1e-6)):
        written = export.embeddings(folder / "run", tmp_path / dtype, dtype=dtype)
        out = written.folder
        assert (written.images, written.unreadable) == (32, 0)
        assert sorted(p.name for p in out.iterdir()) == ["embeddings.npy", "items.safetensors"]
        embeddings = np.load(out / "embeddings.npy")
        assert embeddings.dtype == dtype and embeddings.shape == (32, 4)
        np.testing.assert_allclose(embeddings, expected, atol=tolerance)
    with safe_open(out / "items.safetensors", "numpy") as file:
        np.testing.assert_array_equal(file.get_tensor("labels"), run.test.labels)
        assert set(file.keys()) == {"labels"}
        notes = file.metadata()
    assert json.loads(notes["classes"]) == list(run.test.names)
    assert len(json.loads(notes["ids"])) == 32
    score = evaluation.score(embeddings, run.test, ks=(1,), clustering_fns={})
    assert score["R@1"] == pytest.approx(scores["R@1"], abs=0.05)


def test_a_report_of_the_files_of_embed_has_the_groups_of_the_split(
    finished, tmp_path, monkeypatch
):
    run, _ = run_folder.reopen(finished[0] / "run")
    split = dataclasses.replace(run.test, groups=np.arange(32) % 3 - 1)
    monkeypatch.setattr(export, "split_of", lambda run, name: split)
    out = export.embeddings(finished[0] / "run", tmp_path / "out").folder
    x, images = arrays.read(out / "embeddings.npy", out / "items.safetensors")
    np.testing.assert_array_equal(images.groups, split.groups)
    expected, score = (scores_file.score(x, part) for part in (split, images))
    np.testing.assert_array_equal(score.first, expected.first)
    modes = {path.stat().st_mode & 0o777 for path in out.iterdir()}
    assert len(modes) == 1, modes  # both files have the rights that the umask gives


def test_embed_writes_the_synthetic_features_of_dvml(tmp_path):
    """Their sum and the embedding are what they say, and an interrupted call ends the same."""
    method = recipes.dvml(mode="code_1600")["method"] | {"dim": 4, "hidden": 5, "phase_at": 1}
    config = tiny(tmp_path, steps=2, method=method, loss="semihard_triplet")
    training.run(config | {"runtime": {"devices": 1}}, tmp_path / "run")
    out = export.embeddings(tmp_path / "run", tmp_path / "out", synthetic=True).folder
    names = ("embeddings", "features", "reconstruction", "z_invariant", "z_variant", "synthetic")
    x = {name: np.load(out / f"{name}.npy") for name in names}
    assert sorted(path.stem for path in out.glob("*.npy")) == sorted(names)
    assert len({len(array) for array in x.values()}) == 1
    assert x["features"].shape == x["reconstruction"].shape == (len(x["embeddings"]), 8)
    np.testing.assert_allclose(x["synthetic"], x["z_invariant"] + x["z_variant"], atol=1e-5)
    unit = x["z_invariant"] / np.linalg.norm(x["z_invariant"], axis=1, keepdims=True)
    np.testing.assert_allclose(unit, x["embeddings"], atol=1e-5)
    # Every image has a sample of its own.
    assert len(np.unique(np.round(x["z_variant"], 5), axis=0)) == len(unit)
    export.embeddings(tmp_path / "run", tmp_path / "again", synthetic=True)
    again = np.load(tmp_path / "again" / "z_variant.npy")
    np.testing.assert_array_equal(again, x["z_variant"])
    # Its terms and the F1 of clusters are in the log.
    lines = journal.read(tmp_path / "run" / "metrics.jsonl")
    terms = {"kl", "reconstruction", "metric_variant", "metric_invariant", "cross_entropy"}
    assert all(terms <= set(line) for line in lines if "loss" in line)
    assert any("test/F1" in line for line in lines)
    curves = run_facts.read(tmp_path / "run").curves(2)
    terms |= {"decay", *(f"weighted/L{i}" for i in (1, 2, 3, 4))}
    assert {term["name"].replace(" ", "_") for term in curves["terms"]} == terms


def test_an_interrupted_embed_continues_and_never_mixes_two_calls(finished, tmp_path, monkeypatch):
    run, out = finished[0] / "run", tmp_path / "out"
    original_embeddings, calls = Evaluator.embeddings, []

    def embeddings(self, state, split):
        calls.append(len(split))
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original_embeddings(self, state, split)

    monkeypatch.setattr(Evaluator, "embeddings", embeddings)
    monkeypatch.setattr(export, "_CHUNK", 12)
    with pytest.raises(KeyboardInterrupt):
        export.embeddings(run, out)
    for other in ({"dtype": "float16"}, {"split": "train"}, {"step": 4}):
        with pytest.raises(
            ValueError, match=r"was begun with another value of .* choose another folder"
        ):
            export.embeddings(run, out, **other)
    export.embeddings(run, out)
    assert calls == [12, 12, 8, 8]
    assert sorted(path.name for path in out.iterdir()) == ["embeddings.npy", "items.safetensors"]
    monkeypatch.undo()
    export.embeddings(run, tmp_path / "at once")
    files = [np.load(path / "embeddings.npy") for path in (out, tmp_path / "at once")]
    np.testing.assert_array_equal(*files)
    with pytest.raises(FileExistsError, match="is not empty: choose another folder"):
        export.embeddings(run, out)


def test_select_val_trains_without_the_held_out_classes_and_opens_the_best_step(tmp_path):
    config = tiny(tmp_path, held_out=0.5, select="val", runtime={"devices": 1})
    config |= {"sampler": {"name": "class_balanced", "classes": 2, "per_class": 4}, "steps": 8}
    config |= {"optimizer": {"name": "sgd", "rate": 100.0}}
    config |= {"schedule": {"name": "constant", "warmup": 8}}  # from harmless to harmful
    config |= {"evaluate": {"every": 1, "ks": [1], "clustering": None, "batch_size": 16}}
    config["checkpoint"] = {"every": 1, "keep": 1}
    scores = training.run(config, tmp_path / "run")
    lines = journal.read(tmp_path / "run" / "metrics.jsonl")
    val = {x["step"]: x["val/R@1"] for x in lines if "val/R@1" in x}
    test = {x["step"]: x["test/R@1"] for x in lines if "test/R@1" in x}
    best = max(val, key=lambda step: (val[step], step))
    assert scores["R@1"] == test[best] and best < 8 and val[best] > val[8]
    run, state = run_folder.reopen(tmp_path / "run")
    assert int(state.step) == best  # not the newest
    assert len(run.train) == len(run.held_out) == 16
    assert not set(run.train.names) & set(run.held_out.names)
    assert int(run_folder.reopen(tmp_path / "run", step=8)[1].step) == 8


def test_refinement_is_scored_in_a_run_and_after_it(tmp_path):
    config = brief(tmp_path, **METHODS["graph"], runtime={"devices": 1}, steps=1)
    config["evaluate"] = config["evaluate"] | {"rankings": ["refined"]}
    scores = training.run(config, tmp_path / "run")
    assert 0 <= scores["refined/R@1"] <= 1
    assert run_folder.evaluate(tmp_path / "run")[0] == scores


def test_knn_compares_classes_by_name_and_is_refused_without_common_classes(tmp_path):
    for field, message in (
        ({"knn": 3}, r"evaluate\.knn takes the class from training images"),
        ({"rankings": ["refined"]}, "does not refine"),
    ):
        config = tiny(tmp_path)
        config["evaluate"] = config["evaluate"] | field
        with pytest.raises(ValueError, match=message):
            training.run(config, tmp_path / "run")
        assert not (tmp_path / "run").exists()
    run, state = run_folder.reopen(_with_known_classes(tmp_path))
    evaluator = Evaluator(run)
    accuracy = evaluator.scores(state, evaluator.embeddings(state, run.test), run.test)["knn"]
    gallery, queries = (evaluator.embeddings(state, s)["embedding"] for s in (run.train, run.test))
    correct = 0
    for query, label in zip(queries, run.test.labels, strict=True):
        near = run.train.labels[np.argsort(-(gallery @ query), kind="stable")[:9]].tolist()
        vote = max(near, key=lambda label: (near.count(label), -near.index(label)))
        correct += run.train.names[vote] == run.test.names[label]
    assert accuracy == correct / len(queries) > 0


def _with_known_classes(folder):
    """A run whose test images are every second one of two of the classes that it trains on."""
    root = photos(folder, lambda i, label: f"{'test' if i % 2 and label < 2 else 'train'}/c{label}")
    config = brief(folder, steps=30, checkpoint={"every": 30}, runtime={"devices": 1})
    config["dataset"] = {"name": "folder", "root": str(root)}
    config["evaluate"] = config["evaluate"] | {"knn": 9, "every": 30}
    training.run(config, folder / "known")
    return folder / "known"


def test_embeddings_that_are_not_finite_are_refused(finished):
    run, state = run_folder.reopen(finished[0] / "run")
    broken = state._replace(params=jax.tree.map(lambda x: x * np.nan, state.params))
    with pytest.raises(FloatingPointError, match="embeddings are not finite"):
        Evaluator(run).embeddings(broken, run.test)
