"""What a study file may say, what is refused in one line, and what may change later."""

import dataclasses
import json
import pathlib

import pytest
from study_files import write_study

from dmljax import main
from dmljax.config import fields as config_fields
from dmljax.config import files as config_files
from dmljax.studies import outcomes, plan, points, study_file
from dmljax.studies.folder import StudyFolder


@pytest.fixture
def checked(tmp_path):
    def check(**fields):
        study = study_file.read(str(write_study(tmp_path, **fields)))
        return study, plan.check_rows(study)

    return check


TRIALS = {"a": {}, "b": {"steps": 9, "seeds": [7]}}
BEST = {"best_of": ["b"], "by": "val/MAP@R"}
PROXIES = {"method": "proxies", "loss": "proxy_anchor"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sees": 3}, "the study has no field 'sees': did you mean 'seeds'"),
        ({"rows": {}}, "rows must be a dict of at least one row"),
        ({"rows": {"a": {}, "b": {}}}, "the rows 'a' and 'b' have the same config"),
        (
            {"rows": {"a": {}, "b": {"loss.reduce_fn": "mean_of_active"}}},
            "'a' and 'b' have the same config",
        ),
        (
            {"rows": {"a": {}, "b": {"runs_of": "a", "join": 2}}, "seeds": 2},
            "row 'b': join=2 needs 4 seeds of 'a', got 2",
        ),
        ({"rows": {"a": {}, "b": {"runs_of": "a", "join": 1}}}, "a number of nets from 2 on"),
        ({"rows": {"a": {}, "b": {"runs_of": "a", "steps": 9}}}, "remove its own fields"),
        ({"rows": {"a": {"stps": 3}}}, "row 'a': the config has no field 'stps': did you mean"),
        ({"rows": {"a": {"loss.margn": 3}}}, "row 'a': triplet has no argument 'margn': did you"),
        ({"rows": {"a": {"seed": 3}}}, "write seed as seeds of the study"),
        ({"rows": {"a": {"start_from": "b"}}}, "start_from names no other row 'b'"),
        ({"rows": {"a": {"choose": "last"}}}, "choose and join need runs_of"),
        (
            {"rows": {"a": {}, "b": {"runs_of": "a", "join": "folds"}}},
            "row 'b': join='folds' needs folds",
        ),
        ({"baseline": "dot"}, "baseline: no row is named 'dot'"),
        ({"baseline": "plain"}, "test must be chosen before the runs"),
        ({"test": "welch"}, "test='welch' needs a baseline"),
        ({"rows": {"a": {"baseline": "b"}}}, "row 'a': baseline names no other row 'b'"),
        ({"rows": {"a": {}, "b": {"baseline": "a"}}}, "test must be chosen before the runs"),
        ({"less_is_better": ["R@2"]}, "less_is_better: no column is named 'R@2'"),
        ({"baseline": "plain", "test": "folds"}, "test='folds' needs folds"),
        ({"seeds": [1, 1]}, "seeds must be distinct integers"),
        ({"scores": ()}, "scores lists the columns"),
        ({"scores": "R@1"}, "scores must be a list, got 'R@1'"),
        ({"scores": ("R@3",)}, r"no evaluation computes R@3, because its K are \(1, 2\)"),
        ({"select": "val/MAP@R"}, "row 'plain': select='val/MAP@R' needs held-out classes"),
        ({"select": "test/MAP"}, "row 'plain': select='test/MAP': the evaluation has no score"),
        (
            {"rows": {"a": {}, "b": {"runs_of": "a", "choose": "val/R@1"}}},
            "row 'b': select='val/R@1' needs held-out classes",
        ),
        (
            {"rows": TRIALS | {"c": BEST}},
            "row 'b': the score val/MAP@R needs held-out classes: held_out=0.2",
        ),
        ({"rows": TRIALS | {"c": BEST | {"by": "R@1"}}}, "must be a score of held-out classes"),
        ({"rows": TRIALS | {"c": BEST | {"best_of": ["a"]}}}, r"'a' share the seeds \[0\]"),
        ({"rows": TRIALS | {"c": BEST | {"best_of": ["d"]}}}, "best_of names no other row 'd'"),
        ({"rows": TRIALS | {"c": {"best_of": ["b"]}}}, "best_of and by need each other"),
        (
            {"rows": TRIALS | {"c": BEST | {"stps": 3}}, "all": {"held_out": 0.5}},
            "row 'c': the config has no field 'stps'",
        ),
        (
            {"rows": {"a": {"start_from": "b"}, "b": {"start_from": "a", "steps": 9}}},
            "row 'a': start_from or best_of leads back to this row",
        ),
        ({"scores": ("val/R@1",)}, "row 'plain': the score val/R@1 needs held-out classes"),
        ({"folds": 4, "all": {"held_out": 0.2}}, "folds=4 and held_out=last both hold classes"),
        ({"rows": {"a": {"loss": "arcface"}}}, "row 'a': the loss arcface compares with proxies"),
        ({"published": {"plain": {"R@1": 3}}}, "published needs published_from"),
        ({"published": {"plan": {}}}, "published: no row is named 'plan': did you mean 'plain'"),
    ],
)
def test_a_wrong_study_is_one_line(checked, fields, message):
    with pytest.raises((ValueError, TypeError), match=message):
        checked(**fields)


def test_scores_of_held_out_classes_are_there_with_validation_or_folds(checked):
    fields = {"select": "val/MAP@R", "scores": ("val/R@1", "R@1")}
    rows = {"a": {}, "b": PROXIES, "c": {"runs_of": "a", "choose": "val/R@1"}}
    rows |= {"d": {"steps": 9, "seeds": [7]}, "best": BEST | {"best_of": ["d"]}}
    for held_out in ({"folds": 4}, {"all": {"held_out": 0.5}}):
        assert checked(rows=rows, **fields, **held_out)[1].keys() == {"a", "b", "d"}


def test_rows_are_compared_with_the_values_of_their_recipe_and_their_functions(tmp_path):
    """One sample is what the report's mode of DVML draws anyway; 20 samples are another row."""
    path = tmp_path / "samples.py"
    row = {"argument": "experiment=1"}
    for samples in (20, 1):
        rows = {"experiment 1": row, "samples": row | {"method.samples": samples}}
        content = {"base": "dvml", "argument": "mode=report", "rows": rows, "scores": ["R@1"]}
        path.write_text(f"def get_study():\n    return {content!r}\n")
        if samples == 20:
            assert len(plan.check_rows(study_file.read(str(path)))) == 2
    with pytest.raises(ValueError, match="'experiment 1' and 'samples' have the same config"):
        plan.check_rows(study_file.read(str(path)))


def test_a_row_is_what_the_command_line_does(tmp_path):
    rows = {"wide": {"method.dim": 8, "loss": {"name": "contrastive"}}}
    path = write_study(tmp_path, rows=rows, all={"steps": 4}, seeds=[3, 5])
    study = study_file.read(str(path))
    runs = plan.Planner(study, pathlib.Path("runs")).runs_of(study.rows)
    assert [run.seed for run in runs] == [3, 5] and runs[0].digest != runs[1].digest
    config = config_fields.complete(config_files.read(runs[0].config, runs[0].flags))
    assert (config["method"]["dim"], config["steps"], config["seed"]) == (8, 4, 3)
    assert config["loss"] == {"name": "contrastive"}
    again = config_fields.essential(plan.check_rows(study)["wide"])
    assert again == {**config_fields.essential(config), "seed": 0}


def test_a_study_takes_arguments(tmp_path):
    path = tmp_path / "sized.py"
    path.write_text(
        "def get_study(dataset: str = 'cub200', seeds: int = 2):\n"
        "    return {'base': 'graph', 'argument': f'dataset={dataset}', 'rows': {'dot': {},\n"
        "            'gat': {'argument': 'attention=gat'}}, 'scores': ['R@1'], 'seeds': seeds}\n"
    )
    study = study_file.read(f"{path}:dataset=cars196,seeds=3")
    assert study.name == "sized-dataset=cars196-seeds=3" and len(study.seeds) == 3
    assert [row.config for row in study.rows] == [
        "graph:dataset=cars196",
        "graph:dataset=cars196,attention=gat",
    ]
    with pytest.raises(ValueError, match="no argument 'datset': did you mean 'dataset'"):
        study_file.read(f"{path}:datset=cars196")
    with pytest.raises(FileNotFoundError, match=r"did you mean 'sized.py'"):
        study_file.read(str(path.with_name("size.py")))


def test_flags_that_change_rows_are_refused(tmp_path):
    path = write_study(tmp_path)
    with pytest.raises(ValueError, match=r"--config.steps=3 would change every row of the study"):
        main.main(["study", "run", str(path), "--config.steps=3"])
    words = ["--config.dataset.root=a", "--config.net.weights=b", "--config.runtime.cache=True"]
    plan.check_flags(words)
    # A run that starts from another one takes its weights, and not those of the file.
    run = plan.PlannedRun("plain", 0, None, "tiny.py", (), "digest")
    assert set(words) <= set(run.command(tmp_path, words))
    command = dataclasses.replace(run, after=("start",)).command(tmp_path, words)
    assert {words[0], words[2]} <= set(command) and words[1] not in command


def _recorded(folder, runs_folder, **fields):
    study = study_file.read(str(write_study(folder, **fields)))
    opened = StudyFolder(folder / "of_study", runs_folder)
    plan.check_rows(study)
    opened.record(study, plan.Planner(study, opened.runs).runs_of(study.rows))
    return {(run.row, run.seed): run.digest for run in opened.planned()}


def test_rows_may_be_added_and_not_changed(tmp_path):
    runs = tmp_path / "runs"
    base = {"rows": {"a": {}, "b": {"method.dim": 8}}, "baseline": "a", "test": "paired"}
    first = _recorded(tmp_path, runs, **base)
    # Nothing has run: everything may change.
    assert ("c", 0) in _recorded(tmp_path, runs, **base | {"rows": {"a": {}, "c": {"steps": 9}}})
    assert _recorded(tmp_path, runs, **base) == first
    (runs / first["a", 0]).mkdir(parents=True)
    more = base["rows"] | {"c": {"steps": 9}}
    added = _recorded(tmp_path, runs, **base | {"rows": more, "seeds": 2})
    assert first.items() < added.items() and len(added) == 6
    # A row may change until one of its runs exists.
    other = base | {"rows": {"a": {}, "d": {"steps": 7}}, "seeds": 2}
    assert ("d", 0) in _recorded(tmp_path, runs, **other)
    assert _recorded(tmp_path, runs, **base | {"rows": more, "seeds": 2}) == added
    for row in "bc":
        (runs / added[row, 0]).mkdir()
    base |= {"rows": more, "seeds": 2}
    for fields, message in (
        ({"rows": more | {"b": {"method.dim": 9}}}, "row 'b': method.dim was 8 and is 9.*new name"),
        ({"rows": {"a": {}, "b": {"method.dim": 8}}}, "row 'c': it is gone"),
        ({"seeds": 1}, "row 'a': seed 1 is gone"),
        ({"test": "welch"}, "row 'a': test was 'paired' and is 'welch'"),
        ({"baseline": "b"}, "row 'a': baseline was None and is 'b'"),
        (
            {"rows": more | {"c": {"steps": 9, "baseline": "b"}}},
            "row 'c': baseline was 'a' and is 'b'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            _recorded(tmp_path, runs, **base | fields)
        path = write_study(tmp_path, **base | fields)
        with pytest.raises(ValueError, match=message):
            main.main(["study", "table", str(path), f"--workdir={tmp_path / 'of_study'}"])
    assert _recorded(tmp_path, runs, **base) == added
    index = tmp_path / "of_study" / "index.json"
    text = index.read_text()
    index.write_text(text.replace(added["b", 1], "0" * len(added["b", 1])))
    with pytest.raises(ValueError, match="row 'b': its config, data or weights have changed"):
        _recorded(tmp_path, runs, **base)
    with pytest.raises(ValueError, match=r"has its runs in .*leave out --runs"):
        _recorded(tmp_path, tmp_path / "elsewhere", **base)


def test_rows_whose_runs_have_all_failed_may_change(tmp_path):
    runs, index = tmp_path / "runs", tmp_path / "of_study" / "index.json"
    rows = {"a": {}, "b": {"method.dim": 8}}
    base = {"rows": rows, "baseline": "a", "test": "paired", "seeds": 2}
    first = _recorded(tmp_path, runs, **base)
    before = index.read_text()

    def changed(**fields):
        index.write_text(before)
        return _recorded(tmp_path, runs, **base | fields)

    corrected = rows | {"b": {"method.dim": 9}}
    for run in (("a", 0), ("b", 0)):
        (runs / first[run]).mkdir(parents=True)
        outcomes.mark_failed(runs / first[run], "out of memory", exit_status=1)
    # Nothing else has run: everything may change.
    assert changed(rows=corrected, test="welch")["a", 0] == first["a", 0]
    outcomes.forget_failure(runs / first["a", 0])
    digests_now = changed(rows=corrected)
    assert digests_now["a", 0] == first["a", 0] and digests_now["b", 0] != first["b", 0]
    assert ("b", 0) not in changed(rows={"a": {}})
    with pytest.raises(ValueError, match=r"row 'a': method.dim was None and is 5"):
        changed(rows=rows | {"a": {"method.dim": 5}})
    with pytest.raises(ValueError, match="test was 'paired' and is 'welch'"):
        changed(test="welch")
    (runs / first["b", 1]).mkdir()  # it may yet have a result
    with pytest.raises(ValueError, match=r"row 'b': method.dim was 8 and is 9"):
        changed(rows=corrected)
    outcomes.mark_failed(runs / first["b", 1], "out of memory", exit_status=1)
    assert changed(rows=corrected)["b", 1] != first["b", 1]


def test_points_are_drawn_by_their_number():
    ranges = {"a": ("log", 1e-4, 1.0), "b": ("int", 2, 4), "c": ("choice", "x", "y")}
    few, many = (points.random(ranges, count, seed=3, steps=9) for count in (5, 40))
    assert few.items() < many.items() and len({json.dumps(p) for p in many.values()}) == 40
    assert points.random(ranges, 5, seed=4, steps=9) != few
    drawn = list(many.values())
    assert {p["b"] for p in drawn} == {2, 3, 4} and {p["c"] for p in drawn} == {"x", "y"}
    assert all(1e-4 <= p["a"] < 1 and p["steps"] == 9 for p in drawn)
    below = sum(p["a"] < 1e-2 for p in drawn)
    assert 12 <= below <= 28, "a logarithmic range has half of its points below its middle"
    grid = points.grid({"b": [2, 3], "c": ["x", "y"]})
    assert next(iter(grid)) == "trial 0000" and [p["c"] for p in grid.values()] == ["x", "y"] * 2
    with pytest.raises(ValueError, match="must be uniform, log, int or choice"):
        points.random({"a": ("normal", 0, 1)}, 1)
