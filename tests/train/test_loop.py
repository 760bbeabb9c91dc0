"""Runs of a tiny config: the files that they leave, and the configs that they refuse."""

import json
import shutil

import jax
import numpy as np
import pytest
from flax import traverse_util
from pretrained import with_weights
from processes import same
from system import photos, tiny

from dmljax import nets
from dmljax.config.build import build
from dmljax.files import parts
from dmljax.files.writing import write_json
from dmljax.runs import export, training
from dmljax.runs import folder as run_folder
from dmljax.train import journal
from dmljax.train.evaluation import Evaluator
from dmljax.train.start import first_state


def _params(workdir):
    """The newest parameters, as they lie on the disk."""
    _, variables, _ = run_folder.load(workdir)
    return jax.tree.map(np.asarray, variables)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder and the scores of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("finished")
    scores = training.run(tiny(folder), folder / "run")
    return folder, scores


def test_a_run_leaves_reports_config_speed_and_tensorboard(finished):
    folder, scores = finished
    run = folder / "run"
    assert 0 <= scores["R@1"] <= 1 and {"MAP@R", "NMI", "R@2"} <= set(scores)
    lines = journal.read(run / "metrics.jsonl")
    assert [x["step"] for x in lines if "loss" in x] == [2, 4, 6]
    assert [x["step"] for x in lines if "test/R@1" in x] == [3, 6]
    assert [x["step"] for x in lines if "raw/R@1" in x] == [0]
    assert json.loads((run / "config.json").read_text())["loss"]["margin"] == 0.2
    speed = journal.read(run / "speed.jsonl")
    assert {"images_per_second", "input_wait_seconds", "memory_gib"} <= set(speed[0])
    assert speed[0]["compilations"] > 0
    parts = speed[0]["input_wait_seconds"] + speed[0]["compute_seconds"]
    assert parts == pytest.approx(speed[0]["step_seconds"])
    assert speed[1]["compilations"] == speed[2]["compilations"]  # an evaluation is compiled once
    assert list((run / "tensorboard").iterdir())


def test_the_same_command_gives_the_same_run_twice(finished, tmp_path):
    folder, _ = finished
    training.run(tiny(folder), tmp_path / "second")
    same(_params(tmp_path / "second"), _params(folder / "run"))
    files = [path / "metrics.jsonl" for path in (tmp_path / "second", folder / "run")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize(
    "method, backbones",
    [
        ({"name": "pairs", "dim": 4}, ["net"]),
        (
            {"name": "abe", "learners": 2, "dim": 8, "split": ["conv1", "conv2"]}
            | {"attention": "conv2"},
            ["net/shared", "net/attention", "net/head"],
        ),
    ],
)
def test_weights_of_a_file_go_into_the_backbone(tmp_path, method, backbones):
    net = nets.convnet(widths=(4, 8), strides=(2, 1))
    variables = net.init(jax.random.key(7), np.zeros((1, 12, 12, 3), np.float32), train=False)
    flat = traverse_util.flatten_dict(jax.tree.map(np.asarray, variables))
    spec = with_weights(tmp_path, {"name": "convnet", "widths": [4, 8], "strides": [2, 1]}, seed=7)
    state = first_state(build(tiny(tmp_path, net=spec, method=method)))
    variables = {"params": state.params, "batch_stats": state.model_state["batch_stats"]}
    checked = 0
    for kind, tree in variables.items():
        for path in backbones:
            for key, value in traverse_util.flatten_dict(_at(tree, path)).items():
                np.testing.assert_array_equal(value, flat[kind, *key])
                checked += 1
    assert checked >= len(flat)


def _at(tree, path):
    for name in path.split("/"):
        tree = tree[name]
    return tree


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lss": {"name": "triplet"}}, r"no field 'lss': did you mean 'loss'\?"),
        ({"steps": "six"}, "steps='six' is not a duration"),
        ({"reload_best_at": ["x epochs"]}, "reload_best_at='x epochs' is not a duration"),
        ({"select": "best"}, "select must be"),
        ({"select": "val"}, "--config.held_out=0.2"),
        (
            {"sampler": {"name": "class_chunks", "classes": 30, "per_class": 2}},
            "--config.sampler.classes=4",
        ),
        ({"dataset": {"name": "npz", "path": "nowhere.npz"}}, "nowhere.npz"),
        ({"optimizer": {"name": "adam", "rate": 1, "groups": [{"pth": "x"}]}}, "pth"),
        ({"optimizer": {"name": "adam", "rate": 1, "b1": "a"}}, "b1 must be a number, got 'a'"),
        ({"optimizer": {"name": "adam", "rate": 1, "groups": 3}}, "groups must be a list, got 3"),
        ({"loss": {"name": "triplet", "margin": "a"}}, "margin must be a number, got 'a'"),
        ({"method": {"name": "pairs", "dim": 2.5}}, "dim must be a whole number or None, got 2.5"),
        ({"seed": -1}, "seed must be at least 0 and below 2..63, got -1"),
        ({"method": {"name": "pairs", "dim": 0}}, "method.dim=0: an embedding has 1 or more"),
        ({"evaluate": {"ks": []}}, r"evaluate.ks=\[\] needs one or more K"),
        ({"evaluate": {"every": 0}}, "evaluate.every=0 is not an interval: write steps"),
        ({"evaluate": {"ks": 3}}, "ks must be a list or None, got 3"),
        ({"runtime": {"chunk": 4}}, "runtime has no field 'chunk'.*workers"),
        ({"steps": "inf epochs"}, "'inf epochs' is not a duration"),
        (
            {"optimizer": {"name": "adam", "rate": 1, "groups": [{"path": "^hed"}]}},
            r"'\^hed' matches no parameter, such as .*kernel",
        ),
        (
            {"optimizer": {"name": "adam", "rate": 1, "average": 0.9}, "reload_best_at": [3]},
            "reload_best_at exclude each other",
        ),
        ({"reload_best_at": [2]}, "2 is before the first evaluation, at 3"),
        (
            {"net": {"name": "convnet", "weights": "no.safetensors"}},
            "no.safetensors does not exist",
        ),
        ({"held_out": 1.5}, "held_out.fraction must be at least 0 and below 1, got 1.5"),
    ],
)
def test_a_wrong_config_is_refused_before_anything_is_written(tmp_path, change, message):
    with pytest.raises((ValueError, TypeError, OSError), match=message):
        training.run(tiny(tmp_path, **change), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_without_results_takes_a_corrected_config(tmp_path):
    workdir = tmp_path / "run"
    workdir.mkdir()
    write_json(workdir / "config.json", build(tiny(tmp_path, steps=2)).config)
    training.run(tiny(tmp_path, steps=1), workdir)
    assert json.loads((workdir / "config.json").read_text())["steps"] == 1


def test_overwrite_leaves_nothing_of_the_other_run(finished, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(finished[0] / "run", run)
    old = {*run.glob("tensorboard/*")}
    for name in ("frames/000.png", "report.html", "movie.gif"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("old")
    training.run(tiny(tmp_path, steps=2), run, overwrite=True)
    assert not old & {*run.glob("tensorboard/*")}
    files = {"checkpoints", "config.json", "digests.json", "lock"}
    files |= {"metrics.jsonl", "result.json", "scores.safetensors", "speed.jsonl", "tensorboard"}
    assert {p.name for p in run.iterdir()} == files


def test_unreadable_images_are_skipped_counted_and_logged_once(tmp_path, capsys, caplog):
    """Also if they are the first images of their split."""
    root = photos(tmp_path)
    for bad in ("c0/000.png", "c4/032.png"):
        (root / bad).write_bytes(b"")
    config = tiny(tmp_path, unreadable="skip", runtime={"devices": 1}, steps=12)
    config["dataset"] = {"name": "folder", "root": str(root)}
    scores = training.run(config, tmp_path / "run")
    assert scores["unreadable"] == 1
    assert "1 training image could not be read" in capsys.readouterr().out
    for name in ("c0/000.png", "c4/032.png"):  # the second one is in all four evaluations
        assert caplog.text.count(f"{name} cannot be read: skipped") == 1
    assert journal.read(tmp_path / "run" / "speed.jsonl")[-1]["unreadable"] == 1
    for shard in (None, parts.Shard(0, 1)):
        out = tmp_path / f"embeddings-{shard is None}"
        written = export.embeddings(tmp_path / "run", out, shard=shard)
        assert (written.images, written.unreadable) == (31, 1)
    with pytest.raises(ValueError, match=r"c0.000.png cannot be read: it has zero bytes"):
        training.run(config | {"unreadable": "raise"}, tmp_path / "strict")


def test_a_cached_split_is_decoded_once_for_all_evaluations(tmp_path, monkeypatch):
    root = photos(tmp_path)
    config = tiny(tmp_path, runtime={"cache": True, "devices": 1})
    config["dataset"] = {"name": "folder", "root": str(root)}
    run = build(config)
    state, evaluator = first_state(run), Evaluator(run)
    first = evaluator.embeddings(state, run.test)["embedding"]
    monkeypatch.setattr("dmljax.data.decode.read", None)  # reading an image fails from here on
    np.testing.assert_array_equal(evaluator.embeddings(state, run.test)["embedding"], first)
