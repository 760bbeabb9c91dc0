"""Fine-tuning in steps: each is a run, and the best on held-out classes counts."""

import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from processes import environment, started, wait_for
from system import brief, tiny, write_config

from dmljax import adapt
from dmljax.bundle import exporting
from dmljax.config.build import build, digests_of
from dmljax.files import reading
from dmljax.files import run_folder as results
from dmljax.main import main
from dmljax.runs import folder, frozen, ladder, training

NARROW = {"name": "pairs", "dim": 1}
CENTERED = {"name": "pairs", "dim": 8, "dense_fn": "centered_dense"}
HEAD = {"name": "head", "trained": "last", "select": "val/MAP@R", "rates": [1e-4, 1e-2]}
STEPS = [HEAD, {"name": "all", "steps": {"1": 4, "1000": 999}}, {"name": "mix", "shares": [0.5]}]


def _config(place, source, **fields):
    net = tiny(place)["net"] | {"norm": "frozen_batch_norm"}
    fields = {"ladder": STEPS, "method": CENTERED, "net": net, "held_out": 0.5} | fields
    fields |= {"loss": "supcon", "runtime": {"devices": 1} | fields.get("runtime", {})}
    return brief(place, start={"name": str(source), "takes": "backbone"}, **fields)


@pytest.fixture(scope="module")
def climbed(source, tmp_path_factory):
    place = tmp_path_factory.mktemp("ladder")
    file = write_config(place, _config(place, source, pictures="page"))
    assert main(["train", f"--config={file}", f"--workdir={place / 'run'}"]) == 0
    return place / "run"


def test_the_best_step_on_held_out_classes_counts(climbed):
    content = json.loads((climbed / "ladder.json").read_text())
    rows = {row["name"]: row for row in content["rows"]}
    assert list(rows) == ["frozen", "head", "all", "mix"]
    best = max((row for row in rows.values() if row["folder"]), key=lambda row: row["held_out"])
    assert content["chosen"] == best["folder"]
    high = -1
    for row in rows.values():
        assert row["is_kept"] == (row["held_out"] > high)
        high = max(high, row["held_out"])
    for name in ("head", "all", "mix"):
        result = results.read(climbed / rows[name]["folder"])
        assert result.scores["val/MAP@R"] == rows[name]["held_out"]
        assert {row["split"] for row in result.against_frozen} == {"test", "val"}
    assert results.read(climbed / "all").steps == 4
    heads = {p.name: results.read(p).scores["val/MAP@R"] for p in climbed.glob("head-*")}
    assert len(heads) == 2 and heads[rows["head"]["folder"]] == max(heads.values())
    assert rows["mix"]["folder"] == "mix-0.5"
    # As a study finds the run of a row.
    config = _config(climbed.parent, results.read(climbed).pretraining, pictures="page")
    assert results.read(climbed).digests == digests_of(config)._asdict()
    page = (climbed / "report.html").read_text()
    assert all(f'"{name}"' in page for name in ("frozen", "head", "all", "mix"))
    assert reading.chosen_run(climbed) == climbed / content["chosen"]


def test_the_mixed_step_is_the_average_of_the_two_before(climbed):
    """Also: the step after the head starts from it, and scores no backbone again."""
    rows = json.loads((climbed / "ladder.json").read_text())["rows"]
    start = json.loads((climbed / "all" / "config.json").read_text())["start"]
    assert (start["name"], start["takes"]) == (str(climbed / rows[1]["folder"]), "all")
    lines = (climbed / "all" / "metrics.jsonl").read_text()
    assert "frozen" not in lines and (climbed / "all" / "frozen").is_dir()
    head, all_, mix = (folder.reopen(climbed / row["folder"])[1] for row in rows if row["folder"])
    expected = adapt.interpolated(all_.params, head.params, share=0.5)
    for a, b in zip(*map(jax.tree.leaves, (mix.params, expected)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-7)
    kernel = [np.asarray(x.params["head"]["red"]["kernel"]) for x in (head, all_, mix)]
    np.testing.assert_allclose(kernel[2], (kernel[0] + kernel[1]) / 2, atol=1e-6)
    assert np.abs(kernel[0] - kernel[1]).max() > 1e-4


def test_a_finished_ladder_is_read_where_it_has_moved_and_a_refused_step_changes_nothing(
    climbed, source, tmp_path, capsys
):
    config, moved = _config(climbed.parent, source), shutil.copytree(climbed, tmp_path / "moved")
    _check_refusal(config | {"seed": 3}, moved)
    before = {p: p.stat().st_mtime_ns for p in moved.glob("*/checkpoints/*")}
    ladder.run(config, moved)
    assert before == {p: p.stat().st_mtime_ns for p in moved.glob("*/checkpoints/*")}
    assert "== " not in capsys.readouterr().out
    for path in climbed.glob("*/result.json"):
        assert (moved / path.relative_to(climbed)).read_bytes() == path.read_bytes()
    before = (moved / "ladder.json").read_bytes()
    shutil.rmtree(moved / "mix-0.5")
    shutil.copytree(next(moved.glob("head-*")), moved / "mix-0.5")
    with pytest.raises(ValueError, match=r"moved/mix-0.5 holds a run of another config"):
        ladder.run(config, moved)
    assert (moved / "ladder.json").read_bytes() == before


def _check_refusal(config, folder):
    """The config of another ladder is refused by the name of its folder, and no file changes."""
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    message = rf"^{folder} holds a ladder of another config: seed .* that ladder with all its steps"
    with pytest.raises(ValueError, match=message):
        ladder.run(config, folder)
    assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_an_unfinished_ladder_is_refused_whole_and_overwritten_whole(source, tmp_path, monkeypatch):
    """Only --overwrite with another config deletes it: every step, and nothing beside the steps."""
    run = tmp_path / "run"
    for name in ("all-notes", "other"):
        (run / name).mkdir(parents=True)
        (run / name / "config.json").write_text("{}")

    def train_and_die(config, folder, **options):
        folder.mkdir()
        (folder / "metrics.jsonl").write_text('{"step": 2}\n')
        raise KeyboardInterrupt

    monkeypatch.setattr(training, "run", train_and_die)
    with pytest.raises(KeyboardInterrupt):
        ladder.run(_config(tmp_path, source), run)
    assert (run / "head-0.0001").is_dir()
    _check_refusal(_config(tmp_path, source, seed=3), run)
    with pytest.raises(KeyboardInterrupt):
        ladder.run(_config(tmp_path, source, ladder=[{"name": "first"}]), run, overwrite=True)
    assert {p.name for p in run.iterdir() if p.is_dir()} == {"all-notes", "other", "first"}


def test_a_killed_ladder_ends_the_same(climbed, source, tmp_path):
    """It is killed in the step after the head, whose runs are finished."""
    config, run = _config(climbed.parent, source), shutil.copytree(climbed, tmp_path / "run")
    for name in ("all", "mix-0.5"):
        shutil.rmtree(run / name)
    (run / "ladder.json").unlink()
    code = "import json, sys; from dmljax.runs import ladder; "
    code += "ladder.run(json.loads(sys.argv[1]), sys.argv[2])"
    words = [sys.executable, "-c", code, json.dumps(config), str(run)]
    with subprocess.Popen(words, env=environment(), stdout=subprocess.DEVNULL) as process:
        wait_for((run / "all" / "checkpoints").is_dir, seconds=120)
        process.kill()
    ladder.run(config, run)
    folders = [climbed, tmp_path / "run"]
    ends = [json.loads((x / "ladder.json").read_text()) for x in folders]
    for a, b in zip(*(end["rows"] for end in ends), strict=True):
        assert {k: v for k, v in a.items() if k != "minutes"} == {
            k: v for k, v in b.items() if k != "minutes"
        }
    states = [folder.reopen(x / "mix-0.5")[1].params for x in folders]
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_two_processes_climb_as_one_does(source, tmp_path):
    """With cached features, which process 0 computes for both."""
    steps = [HEAD | {"features": "cached"}, *STEPS[1:]]
    ends, states = [], []
    for processes in (None, 2):
        place = tmp_path / str(processes)
        place.mkdir()
        config = _config(tmp_path, source, ladder=steps, runtime={"features": str(place)})
        with started(place, place / "run", config, processes=processes) as process:
            assert process.wait(240) == 0, (place / "out.txt").read_text()
        assert len(list(place.glob("*/shards.json"))) == 2  # of training and test images
        ends.append(json.loads((place / "run" / "ladder.json").read_text()))
        states.append(folder.reopen(place / "run" / "mix-0.5")[1].params)
    assert ends[0]["chosen"] == ends[1]["chosen"]
    for one, two in zip(*(end["rows"] for end in ends), strict=True):
        assert one["folder"] == two["folder"]
        assert one["held_out"] == pytest.approx(two["held_out"], abs=0.02)
    for a, b in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-3)


def test_without_held_out_classes_the_test_split_decides_as_it_does_for_the_export(
    source, tmp_path, capsys
):
    steps = [HEAD | {"rates": [1e-4]}, *STEPS[1:]]
    config = _config(tmp_path, source, held_out=0.0, method=NARROW, ladder=steps)
    ladder.run(config, tmp_path / "run")
    text = capsys.readouterr().out
    assert "4 training classes): the ladder has only its first step" in text
    assert not (tmp_path / "run" / "all").exists()
    assert "nothing is better than the frozen backbone on the test split" in text.splitlines()[-1]
    assert "  not kept" in text
    with pytest.raises(ValueError, match="has chosen no step, because none is better than"):
        exporting.export(tmp_path / "run", tmp_path / "b")
    with pytest.raises(ValueError, match=r"worse than frozen by .* on the test split"):
        exporting.export(tmp_path / "run" / "head-0.0001", tmp_path / "b")


def test_a_ladder_that_is_no_better_than_frozen_has_no_step_that_counts(
    source, tmp_path, capsys, monkeypatch
):
    """Every command says so, with the command that makes a bundle of the backbone."""
    weights, run = tmp_path / "weights.safetensors", tmp_path / "run"
    weights.touch()
    monkeypatch.setattr(frozen, "identify", lambda _: "vit_s16")
    monkeypatch.setattr(frozen.method, "first_weights", lambda *_: str(weights))
    steps = [{"name": "first", "steps": 1}]
    ladder.run(_config(tmp_path, source, method=NARROW, ladder=steps, pictures="page"), run)
    command = f"dmljax export --net=vit_s16 --weights={weights} --out=frozen.bundle"
    advice = f"`{command}` makes a bundle of the backbone as it is"
    text = capsys.readouterr().out
    assert f"better than the frozen backbone on held-out classes: {advice}" in text
    assert text.count(advice) == 2 and "=NAME" not in text and "=FILE" not in text
    page = (run / "report.html").read_bytes()
    config = write_config(tmp_path, tiny(tmp_path, start=str(run)))
    for words in (
        ["evaluate", str(run)],
        ["report", str(run)],
        ["embed", str(run), f"--out={tmp_path / 'e'}"],
        ["export", str(run), f"--out={tmp_path / 'b'}", "--allow-worse"],
        ["train", f"--config={config}", f"--workdir={tmp_path / 'next'}"],
    ):
        with pytest.raises(ValueError) as error:
            main(words)
        line = str(error.value)
        assert advice in line and "\n" not in line and f"such as {run}/" in line, words
    assert (run / "report.html").read_bytes() == page
    assert not any((tmp_path / name).exists() for name in ("e", "b", "next"))


def test_an_unfinished_ladder_says_so(tmp_path):
    (tmp_path / "config.json").write_text('{"ladder": [{"name": "head"}]}')
    for words in (["export", "--out=b"], ["report"], ["evaluate"], ["embed", "--out=e"]):
        with pytest.raises(ValueError, match=f"the ladder in {tmp_path} is not finished: the same"):
            main([*words, str(tmp_path)])


def test_few_classes_leave_only_the_first_step(source, tmp_path, capsys):
    """Also: the page averages over classes where the scores do."""
    config = _config(tmp_path, source)
    config |= {"dataset": config["dataset"] | {"split": 0.3}, "pictures": "page"}
    config["evaluate"] |= {"average": "classes"}
    ladder.run(config, tmp_path / "run")
    text = capsys.readouterr().out
    assert "4 training classes): the ladder has only its first step" in text
    assert "no classes are held out, so nothing chooses: `dmljax export` takes head" in text
    assert "not kept" not in text and "nothing is better than the frozen backbone" not in text
    rows = json.loads((tmp_path / "run" / "ladder.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["frozen", "head"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Scores are means over classes of the mean of a class's queries." in page


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([{"steps": 3}], "ladder.0.name is missing"),
        ([HEAD, {"name": "mix", "shares": [0.5]}], "shares mix the two steps before"),
        ([HEAD, {"name": "all", "stepz": 3}], "has no field 'stepz'"),
        (
            [HEAD, {"name": "lora", "trained": {"name": "lora", "targets": "no"}}],
            "matches no kernel",
        ),
        ([HEAD, {"name": "a", "rates": 3}], "ladder.1.rates must be a list, got 3"),
        (
            [HEAD, {"name": "a", "steps": {"many": 3}}],
            "a name in ladder.1.steps must be a count of training images, .* got 'many'",
        ),
        ([HEAD, {"name": "a"}, {"name": "b", "shares": [2.0]}], "must be a number from 0 to 1"),
    ],
)
def test_wrong_ladders_are_refused_before_anything_is_written(source, tmp_path, steps, message):
    with pytest.raises((ValueError, TypeError), match=message) as error:
        ladder.run(_config(tmp_path, source, ladder=steps), tmp_path / "run")
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_a_mix_takes_all_parameters(source, tmp_path):
    start = {"name": str(source), "takes": "backbone", "mixed_with": str(source)}
    with pytest.raises(ValueError, match=r"mixed_with=.* averages all parameters: it needs"):
        build(tiny(tmp_path, start=start))
