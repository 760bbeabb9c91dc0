"""Export: whole or absent, and refused where a program is wrong."""

import json
import re
import shutil
import sys

import numpy as np
import pytest
from bundle_cases import trained
from processes import ROOT, python
from system import blobs

from dmljax import main
from dmljax.bundle import exporting, files, load, models
from dmljax.bundle.parity import MismatchedProgram, compare
from dmljax.files import writing


def test_a_wrong_program_is_refused_and_nothing_is_left(run_folder, tmp_path, monkeypatch):
    """The parameters that are written differ from the checkpoint's by a thousandth."""
    at_size = models.at_size

    def altered(*arguments, **options):
        config, model = at_size(*arguments, **options)
        tensors = {name: x + x.dtype.type(1e-3) for name, x in model.tensors.items()}
        return config, model._replace(tensors=tensors)

    monkeypatch.setattr(models, "at_size", altered)
    words = ["export", str(run_folder), f"--out={tmp_path / 'a.bundle'}"]
    with pytest.raises(MismatchedProgram, match="the program stablehlo differs") as raised:
        main.main(words)
    assert "no bundle is written" in str(raised.value) and "\n" not in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_transformer_is_exported_at_the_size_of_its_images(tmp_path):
    """Its positions are of 24 pixels in the run, and of 12 in the bundle."""
    options = {"width": 8, "heads": 2, "depth": 1, "patch": 4, "image_size": 24}
    run = trained(tmp_path, net={"name": "vit_s16", **options})
    result = json.loads((run / "result.json").read_text())
    result["chosen"]["step"] = 1  # of another checkpoint than the one that is exported
    (run / "result.json").write_text(json.dumps(result))
    out = exporting.export(run, tmp_path / "a.bundle", batch_sizes=(16,))  # compares with the run
    assert "Checkpoint of step 2 of 2." in (out / files.CARD).read_text()
    assert files.read_manifest(out).config["net"]["image_size"] == 12
    model = models.open_model(out)  # which ONNX programs are made from
    assert model.tensors["params/net/pos_embed"].shape == (1, 1 + 3 * 3, 8)
    assert json.loads((run / "config.json").read_text())["net"]["image_size"] == 24


def test_the_command_writes_a_bundle_and_checks_it(run_folder, tmp_path, capsys):
    out = tmp_path / "a.bundle"
    words = ["export", str(run_folder), f"--out={out}", "--license=mit"]
    assert main.main([*words, "--batch-sizes=2,1"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a.bundle"]
    assert "every program gives the embeddings of the checkpoint" in capsys.readouterr().out
    assert main.main(["bundle", "check", str(out)]) == 0
    assert "4 files as in the manifest" in capsys.readouterr().out
    assert load(out).batch_sizes == (1, 2)
    card = (out / "README.md").read_text()
    assert 'license: "mit"' in card and "{" not in card
    titles = re.findall("^## (.*)$", card, re.MULTILINE)
    sections = ["Use", "Input", "Data", "Scores", "Same or not the same"]
    sections += ["Programs", "Pretraining and licenses", "Limits", "Versions", "Citation"]
    assert titles == sections and "| R@1 | " in card and "| stablehlo | " in card
    with pytest.raises(FileExistsError, match="is not an empty folder"):
        main.main(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["export", "RUN"], "export needs --out"),
        (["export", "nowhere", "--out=OUT"], "holds no run"),
        (["export", "RUN", "--out=OUT", "--batch-sizes=x"], "'x' is not a list of positive num"),
        (["export", "RUN", "--out=OUT", "--batch-sizes=8,0"], "'8,0' is not a list of positive"),
        (["export", "RUN", "--out=OUT", "--step=7"], "has the checkpoints"),
        (["bundle", "check", "nowhere"], "the bundle nowhere does not exist"),
        (["bundle", "look", "nowhere"], "invalid choice"),
    ],
)
def test_words_that_are_refused(words, message, run_folder, tmp_path):
    places = {"RUN": str(run_folder), "--out=OUT": f"--out={tmp_path / 'a.bundle'}"}
    with pytest.raises((ValueError, OSError), match=message) as raised:
        main.main([places.get(word, word) for word in words])
    assert "\n" not in str(raised.value) and not list(tmp_path.iterdir())


def test_bad_input_ends_with_status_2_and_one_line(tmp_path):
    code = "import sys, dmljax.main; sys.exit(dmljax.main.console())"
    done = python(code, "export", "nowhere", "--out=a.bundle", cwd=tmp_path, status=2)
    assert done.stderr.startswith("error: nowhere holds no run") and done.stderr.count("\n") == 1


def test_a_run_that_is_training_or_has_no_checkpoint(run_folder, tmp_path):
    run = shutil.copytree(run_folder, tmp_path / "run")
    with (
        writing.lock(run / "lock"),
        pytest.raises(ValueError, match=r"is still training \(process \d+ on"),
    ):
        exporting.export(run, tmp_path / "a.bundle")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        exporting.export(run, tmp_path / "a.bundle")
    assert not (tmp_path / "a.bundle").exists()


def test_thresholds_are_chosen_on_unseen_classes(tmp_path, capsys, monkeypatch):
    """Among the classes of its training, false matches are rare: a threshold of them is too low.

    Of large classes a part is taken, so that there are enough classes.
    """
    classes, taken = 32, 500 // 16
    monkeypatch.setattr(exporting, "_THRESHOLD_IMAGES", 500)
    blobs(tmp_path, classes=classes, each=40)
    sampler = {"name": "class_balanced", "classes": 10, "per_class": 4}
    options = {"sampler": sampler, "optimizer": {"name": "adam", "rate": 3e-2}, "steps": 60}
    options["checkpoint"] = {"every": 60}
    evaluate = {"every": 60, "ks": [1], "batch_size": 16, "clustering": None}
    run = trained(tmp_path, evaluate=evaluate, **options)
    assert main.main(["export", str(run), f"--out={tmp_path / 'a.bundle'}"]) == 0
    model = load(tmp_path / "a.bundle")
    entry, half = model.manifest.thresholds["fmr=1e-2"], classes // 4
    pairs = taken**2 * half * (half - 1) // 2
    expected = ("test", pairs, pairs)
    assert (entry.chosen_on, entry.pairs, entry.test.different_pairs) == expected
    rate = model.false_match_rates["fmr=1e-2"]
    assert 0.001 < rate < 0.1
    line = f"threshold fmr=1e-2: cosine {entry.cosine:.4f}, a false match rate of {rate:.2g} on"
    assert f"{line} other test classes" in capsys.readouterr().out
    card = (tmp_path / "a.bundle" / "README.md").read_text()
    assert f"Chosen on half of the test classes ({pairs:,} pairs of images of" in card
    assert "measured on the other test classes" in card


def test_a_program_does_not_tell_where_it_was_made(bundle_folder):
    data = (bundle_folder / files.PROGRAM).read_bytes()
    assert b"convnet.py" in data  # the sources of operations, without their folders
    assert str(ROOT).encode() not in data and sys.prefix.encode() not in data


def test_a_target_that_is_taken_is_left_untouched(run_folder, tmp_path):
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "photo.jpg").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for target in (taken, taken / "photo.jpg", tmp_path / "link"):
        with pytest.raises(FileExistsError, match="choose another --out"):
            exporting.export(run_folder, target)
    assert (taken / "photo.jpg").read_bytes() == b"x" and len(list(tmp_path.iterdir())) == 3


def test_a_transform_of_ones_own_is_refused(tmp_path):
    run = trained(tmp_path, eval_transform="dmljax.data.transforms:unchanged")
    with pytest.raises(ValueError, match="holds no code"):
        exporting.export(run, tmp_path / "a.bundle", trust_modules=True)
    assert not (tmp_path / "a.bundle").exists()


@pytest.mark.slow
def test_a_full_disk_leaves_nothing(run_folder, tmp_path):
    code = (
        "import resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))\n"
        f"sys.argv = ['dmljax', 'export', {str(run_folder)!r}, '--out=a.bundle']\n"
        "import dmljax.main\nsys.exit(dmljax.main.console())"
    )
    done = python(code, cwd=tmp_path, status=2)
    assert not list(tmp_path.iterdir())
    assert "a.bundle cannot be written: File too large" in done.stderr, done.stderr


def test_the_comparison_sees_small_differences_and_other_neighbors():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(20, 8)).astype(np.float32)
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    limits = (1e-5, 0.99999)
    same = compare(x, {"largest_batch": x, "one": x[:3]}, limits=limits)
    assert same["largest_batch"]["largest_difference"] == 0
    assert same["same_nearest"] == same["same_10_nearest"] == 1
    for changed in (x + 2e-5, np.where(np.arange(20)[:, None] == 7, -x, x), x * np.nan, x[:, :4]):
        with pytest.raises(MismatchedProgram):
            compare(x, {"largest_batch": changed}, limits=limits)
    tiny = np.float32(1e-6) * x  # no coordinate differs by much
    with pytest.raises(MismatchedProgram, match="smallest cosine -1"):
        compare(tiny, {"largest_batch": -tiny}, limits=limits)
    with pytest.raises(MismatchedProgram, match="in one"):
        compare(x, {"largest_batch": x, "one": x[:3] + 1e-3}, limits=limits)
    loose = compare(x, {"largest_batch": x[::-1].copy()}, limits=(9.0, -1.0))
    assert loose["same_nearest"] < 1 and loose["same_10_nearest"] < 1
