"""Searches: points, interruption, several workers, databases that go away."""

import contextlib
import dataclasses
import json
import re
import subprocess
import sys
import time

import pytest
from postgres import server
from study_files import environment, finished, index, study, write_study

from dmljax import main
from dmljax.files import result
from dmljax.studies import engine, plan, search, session

SPACE = {"optimizer.rate": ("log", 1e-4, 1e-1), "loss.margin": ("uniform", 0.0, 1.0)}
SPACE |= {"method.dim": ("choice", 4, 8), "sampler.classes": ("int", 2, 3)}
SEARCH = {"space": SPACE, "trials": 6, "score": "val/MAP@R", "method": "tpe", "seed": 3}
HELD_OUT = {"held_out": 0.5, "evaluate.every": 3, "sampler.classes": 2}


def _session(folder, storage=None, **options):
    path = write_study(folder, all=HELD_OUT, search=SEARCH | options)
    opened = session.open_session(str(path), workdir=str(folder / "of_study"), storage=storage)
    opened.folder.path.mkdir(exist_ok=True)
    (opened.folder.path / "trials").mkdir(exist_ok=True)
    engine.create(opened)
    return opened


def _value(point):
    return -abs(point["loss.margin"] - 0.4) + 0.01 * point["method.dim"]


def _database(opened):
    return engine._open(opened)


def _ask(opened, stack, database):
    return stack.enter_context(engine._next_trial(database, opened))


def _points(folder, count, *, workers=1, restarts=0):
    """The points of a search by workers that begin anew after some trials."""
    opened = _session(folder, trials=count)
    databases = [_database(opened) for _ in range(workers)]
    for i in range(count // workers):
        if restarts and i % (count // (restarts + 1)) == 2:
            databases = [_database(opened)]
        with contextlib.ExitStack() as stack:
            asked = [(_ask(opened, stack, database), database) for database in databases]
            for trial, database in asked:
                engine._tell(database, trial.number, _value(trial.params), None)
    with contextlib.ExitStack() as stack:
        assert _ask(opened, stack, databases[0]) is None
    return [trial.params for trial in _database(opened).get_trials()]


def test_an_interrupted_search_asks_for_the_same_points(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    points = _points(tmp_path / "a", 14, restarts=2)
    assert points == _points(tmp_path / "b", 14)
    assert len({json.dumps(p) for p in points}) == 14


def test_three_workers_ask_for_different_points(tmp_path):
    points = _points(tmp_path, 18, workers=3)
    assert len({json.dumps(point) for point in points}) == 18


def test_the_trial_of_a_killed_worker_is_adopted(tmp_path):
    opened = _session(tmp_path, first=[{f: r[1] for f, r in SPACE.items()}])
    database = _database(opened)
    with contextlib.ExitStack() as killed, contextlib.ExitStack() as other:
        first = _ask(opened, killed, database)
        assert first.params == {field: r[1] for field, r in SPACE.items()}
        assert _ask(opened, other, database).number == 1
        killed.close()  # the kernel closes the files of a killed process
        adopted = _ask(opened, other, database)
        assert adopted.number == 0 and adopted.params == first.params
        engine._tell(database, 0, 0.5, None)
        engine._tell(database, 0, 0.9, None)
        assert database.get_trials()[0].value == 0.5
        # A worker that died between the new trial and its first parameter.
        empty = database._storage.create_new_trial(database._study_id)
        adopted = _ask(opened, other, database)
        assert adopted._trial_id == empty and set(adopted.params) == set(SPACE)
    assert engine.best_point(opened) == first.params


def test_a_database_that_goes_away_is_waited_for(capsys):
    """A real server is stopped; a call succeeds once it is back, and fails in one line if never."""
    with server() as postgres:
        backend = engine.optuna.storages.RDBStorage(
            postgres.address.replace("postgresql:", "postgresql+psycopg:"),
            engine_kwargs={"pool_pre_ping": True},
        )
        opened = engine.optuna.create_study(storage=backend)
        postgres.stop()
        with pytest.raises(OSError, match="was away for 1 s: "):
            engine._patient(opened.ask, patience=1)
        assert capsys.readouterr().out.startswith("waiting for the database of the search: ")
        calls = []

        def ask():
            calls.append(1)
            if len(calls) == 3:
                postgres.start()
            return opened.ask()

        assert engine._patient(ask).number == 0 and len(calls) == 3
        backend.engine.dispose()


def test_wrong_storages_are_one_line(tmp_path):
    with pytest.raises(ValueError, match="--storage=nonsense is not a URL of a database"):
        _session(tmp_path, storage="nonsense")


def test_reading_creates_no_search(tmp_path):
    """With the `--storage` of another database, or of none; nothing is written there."""
    opened = _session(tmp_path)
    assert not engine.is_over(opened) and engine.best_point(opened) is None
    empty, missing = tmp_path / "empty.db", tmp_path / "missing.db"
    empty.touch()
    database = engine.optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'other.db'}")
    for path in (missing, empty, tmp_path / "other.db"):
        wrong = dataclasses.replace(opened, storage=f"sqlite:///{path}")
        for read in (engine.is_over, engine.best_point):
            with pytest.raises(ValueError, match=f"no search .* in sqlite:///{path}: give"):
                read(wrong)
    assert not missing.exists() and not empty.stat().st_size and not database.get_all_studies()
    database.engine.dispose()
    fresh = session.open_session(opened.study.source, workdir=str(tmp_path / "fresh"))
    assert not engine.is_over(fresh) and engine.best_point(fresh) is None
    assert not (tmp_path / "fresh").exists()  # a study that was not started has no trials


def test_the_winner_is_the_best_by_held_out_scores(tmp_path):
    """Of trials that were drawn in advance; a failed one does not count, test scores neither."""
    path = write_study(tmp_path, all=HELD_OUT, search=SEARCH | {"method": "random", "trials": 4})
    opened = session.open_session(str(path), workdir=str(tmp_path / "of_study"), runs=str(tmp_path))
    points = plan.enumerated_points(opened.study.search)
    runs = opened.planner.runs_of(plan.rows_of_search(opened.search))
    assert [run.seed for run in runs] == [1000] * 4
    opened.folder.record(opened.study, plan.check_rows(opened.study), runs)
    for run, value in zip(runs[:3], (0.3, 0.5, 0.5), strict=True):
        folder = tmp_path / run.digest
        folder.mkdir()
        scores = {"val/MAP@R": value, "test/MAP@R": 1 - value}
        result.write(folder, finished(scores, run.digest))
    assert search.values(opened) == {0: 0.3, 1: 0.5, 2: 0.5, 3: None}
    assert search.best_overrides(opened) == points[1] and not search.is_over(opened)


def test_a_new_best_trial_takes_the_place_of_the_old_one(tmp_path):
    path = write_study(
        tmp_path,
        all=HELD_OUT,
        rows={"best": "from search"},
        seeds=2,
        search=SEARCH | {"method": "random", "trials": 2},
    )
    opened = session.open_session(str(path), workdir=str(tmp_path / "of_study"), runs=str(tmp_path))
    study, folder = opened.study, opened.folder
    folder.record(study, plan.check_rows(study), [])
    for point in plan.enumerated_points(study.search):
        rows = [row._replace(overrides={**row.overrides, **point}) for row in study.rows]
        runs = plan.Planner(study, folder.runs).runs_of(rows)
        folder.extend(runs)
        assert folder.planned() == runs and len(runs) == 2


@pytest.mark.slow
def test_two_workers_search_in_postgresql_which_goes_away(tmp_path):
    """The whole way: trials over folds, the best point again with new seeds, joined embeddings."""
    write_study(
        tmp_path,
        all={"evaluate.every": 3, "sampler.classes": 2},
        rows={"best": "from search", "joined": {"runs_of": "best", "join_folds": True}},
        folds=2,
        seeds=2,
        search=SEARCH | {"trials": 3},
    )
    with server() as postgres:
        words = ["run", "small.py", "--workers=2", f"--storage={postgres.address}"]
        with (tmp_path / "out.txt").open("w") as out:
            command = [sys.executable, "-m", "dmljax.main", "study", *words]
            process = subprocess.Popen(
                command, stdout=out, stderr=out, cwd=tmp_path, env=environment()
            )
        deadline = time.monotonic() + 200
        while "trial 000" not in (tmp_path / "out.txt").read_text():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        postgres.stop()
        time.sleep(4)
        postgres.start()
        assert process.wait(timeout=500) == 0, (tmp_path / "out.txt").read_text()
        database = postgres.address.replace("postgresql:", "postgresql+psycopg:")
        engine_ = engine.optuna.storages.RDBStorage(database).engine
        with engine_.connect() as connection:
            tables = engine.sqlalchemy.inspect(engine_).get_table_names()
            content = [
                str(value)
                for table in tables
                for row in connection.exec_driver_sql(f'select * from "{table}"')
                for value in row
            ]
        engine_.dispose()
    runs = index(tmp_path)["planned"]
    trials = {}
    for run in runs:
        scores = result.read(tmp_path / "runs/by_digest" / run["digest"]).scores
        if run["row"].startswith("trial"):
            assert run["seed"] == 1000
            trials.setdefault(run["row"], []).append(scores["val/MAP@R"])
            assert not {str(v) for k, v in scores.items() if k.startswith("test/")} & (
                set(content) - {"0.0", "1.0", "0", "1"}
            )
    assert len(trials) == 3 and all(len(values) == 2 for values in trials.values())
    means = [sum(values) / 2 for values in trials.values()]
    assert all(
        any(abs(float(c) - mean) < 1e-12 for c in content if _is_number(c)) for mean in means
    )
    assert len([run for run in runs if run["row"] == "best"]) == 4
    printed = (tmp_path / "out.txt").read_text()
    assert "seed 1: 2 nets joined" in printed and "| joined " in printed
    (joined,) = (line for line in printed.splitlines() if line.startswith("| joined "))
    assert joined.split("|")[2].strip() not in ("", "-")
    assert "score of the best trial itself is not reported" in printed
    raw = study(
        "table", "small.py", "--format=csv", f"--storage={postgres.address}", folder=tmp_path
    )
    lines = [line for line in raw.stdout.splitlines() if line.startswith("trial")]
    header = raw.stdout.splitlines()[0].split(",")
    assert len(lines) == 6
    assert all(line.split(",")[header.index("test/R@1")] == "" for line in lines)


def _is_number(text):
    try:
        float(text)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize(
    "method, count", [("random", "6 runs;"), ("tpe", "1 run, and 5 trials of")]
)
def test_trials_count_before_the_search_begins(tmp_path, capsys, method, count):
    path = write_study(tmp_path, all=HELD_OUT, search=SEARCH | {"trials": 5, "method": method})
    for action in ("run", "array"):
        words = ["study", action, str(path), f"--workdir={tmp_path}/out"]
        assert main.main([*words, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert f"1 row, {count}" in printed and "--array=1-6 " in printed


@pytest.mark.slow
def test_the_row_of_the_best_trial_alone(tmp_path):
    """It needs all trials; afterwards its own runs are made, and no others."""
    options = {"method": "random", "trials": 2}
    rows = {"plain": {}, "best": "from search"}
    write_study(tmp_path, all=HELD_OUT, rows=rows, search=SEARCH | options)
    words = ["run", "small.py", "--only=best"]
    refused = study(*words, folder=tmp_path)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "--only: the row 'best' is the best of 2 trials" in refused.stderr
    done = study("run", "small.py", "--only=trial 0000", "--only=trial 0001", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    trials = [line for line in done.stdout.splitlines() if "] trial 000" in line]
    assert len(trials) == 2
    for line in trials:  # the score of the search, and no score of the test classes
        assert re.search(r"trial 000., seed 1000: val/MAP@R \d+\.\d, ", line), line
        assert "R@1" not in line
    done = study(*words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "best, seed 0: R@1" in done.stdout and "plain, seed 0: R@1" not in done.stdout
