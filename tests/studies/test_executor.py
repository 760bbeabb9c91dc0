"""Studies made by the command itself, in processes: failures, kills, full disks, signals."""

import contextlib
import csv
import json
import os
import pathlib
import signal
import subprocess
import sys

import processes
import pytest
from study_files import environment, finished, index, run_folder, study, write_study
from system import tiny

from dmljax import main
from dmljax.files import run_folder as results
from dmljax.files import writing
from dmljax.runs import training
from dmljax.studies import ensembles, outcomes, points, study_file
from dmljax.studies.executor import Executor
from dmljax.studies.folder import StudyFolder


def _ended(done, status):
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_a_failing_row_is_a_cell_and_others_finish(tmp_path, monkeypatch, capsys):
    """The first row cannot run: 90 % of four classes cannot be held out."""
    monkeypatch.chdir(tmp_path)
    rows = {"broken": {"held_out": 0.9}, "wide": {"method.dim": 8}}
    write_study(tmp_path, rows=rows, baseline="broken", test="welch")
    assert main.main(["study", "run", "small.py", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("-m dmljax.main train --config=tiny.py") == 2
    assert "2 rows, 2 runs" in printed and not (tmp_path / "runs").exists()
    printed = _ended(study("run", "small.py", folder=tmp_path), 1).stdout
    assert "broken, seed 0: failed: " in printed
    lines = {line.split("|")[1].strip(): line for line in printed.splitlines() if "|" in line}
    assert lines["broken"].count(" failed ") == 3 and "0 of 1, 1 failed" in lines["broken"]
    assert "(1 run)" in lines["wide"] and "±" not in lines["wide"]
    # A second study shares the run, and the first one has nothing left to do.
    folder = run_folder(tmp_path, "wide")
    before = (folder / "result.json").stat().st_mtime_ns
    write_study(tmp_path, name="second", rows={"the same": rows["wide"]})
    assert main.main(["study", "run", "second.py"]) == 0
    assert run_folder(tmp_path, "the same", name="second") == folder
    capsys.readouterr()
    assert main.main(["study", "run", "small.py"]) == 1
    assert "[" not in capsys.readouterr().out.partition("##")[0]
    assert (folder / "result.json").stat().st_mtime_ns == before
    assert main.main(["study", "table", "small.py", "--out=table.csv"]) == 0
    cells = list(csv.DictReader((tmp_path / "table.csv").read_text().splitlines()))
    assert [row["state"] for row in cells] == ["failed", "finished"]
    assert float(cells[1]["test/R@1"]) == results.read(folder).scores["test/R@1"]


@pytest.mark.slow
def test_the_best_trial_an_ensemble_and_a_start_in_one_study(tmp_path):
    """Rows that read other runs are planned when those are finished."""
    trials = points.grid({"method.dim": [1, 8]}, seeds=[7])
    rows = {
        **trials,
        "best": {"best_of": list(trials), "by": "val/MAP@R", "steps": 4},
        "both": {"runs_of": "best", "join": 2, "seeds": 1},
        "next": {"start_from": "best", "optimizer.rate": 1e-3},
    }
    scores = ["R@1", "MAP@R", "mean_distance/MAP@R"]
    fields = {"all": {"held_out": 0.5}, "scores": scores, "seeds": 2}
    write_study(tmp_path, rows=rows, **fields)
    done = _ended(study("run", "small.py", folder=tmp_path), 0)
    trial_scores = {
        name: results.read(run_folder(tmp_path, name, 7)).scores["val/MAP@R"] for name in trials
    }
    best = max(trial_scores, key=trial_scores.__getitem__)
    assert f"{best}, seed 7: val/MAP@R {100 * trial_scores[best]:.1f}" in done.stdout
    folders = [run_folder(tmp_path, "best", seed) for seed in (0, 1)]
    config = json.loads((folders[0] / "config.json").read_text())
    assert config["method"]["dim"] == trials[best]["method.dim"] and config["steps"] == 4
    # An ensemble has the scores of the concatenated unit vectors.
    (tmp_path / "expected").mkdir()
    ensembles.write(tmp_path / "expected", folders, ())
    expected = results.read(tmp_path / "expected").scores
    header, _, best_cells, both, following = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in (tmp_path / "runs/studies/small/table.md").read_text().splitlines()
        if line.startswith("|")
    )
    assert both[1:] == [*(f"{100 * expected[f'test/{s}']:.1f} (1 run)" for s in scores), "1"]
    assert best_cells[header.index("mean_distance/MAP@R")] == "-"
    config = json.loads((run_folder(tmp_path, "next", 1) / "config.json").read_text())
    assert pathlib.Path(config["start"]["name"]).name == folders[1].name and following[-1] == "2"
    again = _ended(study("run", "small.py", folder=tmp_path), 0)
    assert "seed" not in again.stdout.partition("##")[0]
    # With `--only`, what a row needs comes along.
    only = _ended(study("run", "small.py", "--only=both", "--dry-run", folder=tmp_path), 0)
    assert only.stdout.count("finished  ") == 5 and "next" not in only.stdout


def test_a_run_joined_with_itself_has_its_own_scores(tmp_path):
    """All scores of the run, by its own options: starts of k-means, a depth and further scores."""
    config = tiny(tmp_path, steps=2)
    config["evaluate"] |= {"clustering": {"starts": 3}, "depth": 3, "every": 2}
    config["evaluate"]["metrics"] = ["all", "class_deviation"]
    folder, out = tmp_path / "run", tmp_path / "joined"
    own = {f"test/{name}": value for name, value in training.run(config, folder).items()}
    out.mkdir()
    ensembles.write(out, [folder, folder], ())
    scores = results.read(out).scores
    assert {"test/NMI", "test/mAP@3", "test/class_deviation", "test/R@1"} <= set(scores)
    by_distance = {k: v for k, v in scores.items() if "mean_distance/" in k}
    rest = {k: v for k, v in scores.items() if k not in by_distance}
    assert rest == pytest.approx(own, rel=1e-4)
    # Equal nets have equal distances, so both rankings agree.
    assert by_distance["test/mean_distance/R@1"] == pytest.approx(own["test/R@1"])
    assert by_distance["test/mean_distance/MAP@R"] == pytest.approx(own["test/MAP@R"], rel=1e-4)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "study needs a verb and a file"),
        (["rum", "small.py"], "study has no verb 'rum': did you mean 'run'"),
        (["run", "smal.py"], "did you mean 'small.py'"),
        (
            ["run", "small.py", "--only=plan"],
            "--only: no row is named 'plan': did you mean 'plain'",
        ),
        (["run", "small.py", "--config.steps=9"], "would change every row"),
        (["table", "small.py"], "holds no study"),
        (["table", "small.py", "--out=a.pdf"], "--out has no format 'pdf'"),
    ],
)
def test_wrong_words_are_one_line(tmp_path, monkeypatch, words, message):
    write_study(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises((ValueError, OSError), match=message):
        main.main(["study", *words])
    assert not (tmp_path / "runs").exists()


def test_a_line_counts_the_runs_that_are_over_when_it_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = StudyFolder(tmp_path / "study")
    executor = Executor(study_file.read(str(write_study(tmp_path, seeds=3))), folder)
    runs = executor.plan()

    def run_two(run, run_folder, lock):  # another process ends a run meanwhile
        for ended in runs[:2]:
            (folder.runs / ended.digest).mkdir(parents=True, exist_ok=True)
            outcomes.mark_failed(folder.runs / ended.digest, "broken", exit_status=1)
        return 1, "broken"

    monkeypatch.setattr(executor, "_run_child", run_two)
    assert executor._attempt(runs[0], runs)
    assert capsys.readouterr().out == "[2/3] plain, seed 0: failed: broken\n"


def test_a_lock_is_held_by_the_process_that_inherits_it(tmp_path):
    """NFS gives exclusive locks to files opened for writing, shared ones to files for reading."""
    with outcomes.locked(tmp_path, shared=True) as file:
        assert file.readable() and file.writable()
    with outcomes.locked(tmp_path) as file:
        assert file.readable() and file.writable()
        sleeper = subprocess.Popen(["sleep", "60"], pass_fds=(file.fileno(),))
    assert outcomes.outcome(tmp_path).state == "running"
    with outcomes.locked(tmp_path) as other:
        assert other is None
    sleeper.kill()
    sleeper.wait()
    assert outcomes.outcome(tmp_path).state == "waiting"


def test_a_folder_that_holds_another_run_is_a_failed_cell(tmp_path):
    """The config, the data or the program changed between planning and training."""
    folder = tmp_path / ("ab" * 6)
    folder.mkdir()
    for digest, state in (("ab" * 32, "finished"), ("ab" * 5 + "cd" * 27, "failed")):
        results.write(folder, finished({}, digest))
        assert outcomes.outcome(folder).state == state
    assert "delete" in outcomes.outcome(folder).message


def test_the_script_starts_a_process_for_each_gpu_and_one_as_a_task_of_slurm(tmp_path):
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES: $*"; exit ${CUDA_VISIBLE_DEVICES#0}\n'
    )
    python.chmod(0o755)

    def run(**variables):
        words = [str(processes.ROOT / "launch" / "study.sh"), "a.py", "--only=b c"]
        variables |= {"PYTHON": str(python), "PATH": os.environ["PATH"]}
        done = subprocess.run(words, env=variables, capture_output=True, text=True)
        return done.returncode, sorted(done.stdout.splitlines())

    command = "-m dmljax.main study run a.py --only=b c"
    assert run(CUDA_VISIBLE_DEVICES="0,3") == (3, [f"0: {command}", f"3: {command}"])
    assert run(CUDA_VISIBLE_DEVICES="") == (0, [f": {command}"])
    assert run(CUDA_VISIBLE_DEVICES="0", SLURM_ARRAY_TASK_ID="4") == (
        0,
        [f"0: {command} --no-wait"],
    )


@contextlib.contextmanager
def _started(folder, *words):
    with (folder / "out.txt").open("a") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "dmljax.main", "study", *map(str, words)],
            stdout=out,
            stderr=out,
            cwd=folder,
            env=environment(),
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _until(fn, seconds=240):
    processes.wait_for(fn, seconds=seconds)


def _process_of(folder):
    """The process that trains in a run folder."""
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_text().split("\0")
            if any(w.startswith("--workdir=") and w.endswith(folder.name) for w in words):
                return int(path.name)
    return None


LONG = {"steps": 400, "log_every": 10, "checkpoint": {"every": 20, "keep": 2}}
LONG |= {"evaluate": {"every": 200, "ks": [1, 2], "clustering": None, "batch_size": 16}}


@pytest.mark.slow
def test_one_of_three_processes_is_killed_with_its_run(tmp_path):
    """Every run once; the killed one is continued by another process, bit for bit."""
    write_study(tmp_path, config=LONG, rows={"a": {}, "b": {"method.dim": 8}}, seeds=3)
    with _started(tmp_path, "run", "small.py") as first:
        _until((tmp_path / "runs/studies/small/index.json").exists)
        with (
            _started(tmp_path, "run", "small.py") as second,
            _started(tmp_path, "run", "small.py") as third,
        ):
            folder = run_folder(tmp_path, "a")
            _until(lambda: processes.reported(folder, 60))
            pid = _process_of(folder)
            parent = int(
                pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
            )
            os.kill(parent, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
            alive = [w for w in (first, second, third) if w.pid != parent]
            assert len(alive) == 2
            assert [w.wait(timeout=400) for w in alive] == [0, 0], (
                tmp_path / "out.txt"
            ).read_text()
    done = (tmp_path / "out.txt").read_text()
    runs = index(tmp_path)["planned"]
    for run in runs:
        result = results.read(tmp_path / "runs/by_digest" / run["digest"])
        assert result.status == "finished"
        assert done.count(f"{run['row']}, seed {run['seed']}: R@1") == 1
    assert "continuing from step" in (folder / "output.txt").read_text()
    words = ["-m", "dmljax.main", "train", f"--config={runs[0]['config']}", *runs[0]["flags"]]
    subprocess.run(
        [sys.executable, *words, "--workdir=alone"],
        cwd=tmp_path,
        env=environment(),
        check=True,
        capture_output=True,
    )
    assert (folder / "metrics.jsonl").read_bytes() == (
        tmp_path / "alone/metrics.jsonl"
    ).read_bytes()


@pytest.mark.slow
def test_a_signal_saves_and_the_same_command_continues(tmp_path):
    write_study(tmp_path, config=LONG, seeds=2)
    with _started(tmp_path, "run", "small.py") as process:
        _until((tmp_path / "runs/studies/small/index.json").exists)
        folder = run_folder(tmp_path, "plain")
        _until(lambda: processes.reported(folder, 40))
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=120) == 143
    assert "stopped; the same command continues" in (tmp_path / "out.txt").read_text()
    assert outcomes.outcome(folder).state == "waiting" and _process_of(folder) is None
    _ended(study("run", "small.py", folder=tmp_path), 0)
    assert "continuing from step" in (folder / "output.txt").read_text()


@pytest.mark.slow
def test_a_run_that_is_killed_three_times_is_a_failed_cell(tmp_path):
    write_study(tmp_path, config=LONG | {"steps": 100_000})
    with _started(tmp_path, "run", "small.py") as process:
        _until((tmp_path / "runs/studies/small/index.json").exists)
        folder = run_folder(tmp_path, "plain")
        for _ in range(3):
            _until(lambda: _process_of(folder) is not None)
            killed = _process_of(folder)
            os.kill(killed, signal.SIGKILL)
            _until(lambda killed=killed: _process_of(folder) != killed)
        assert process.wait(timeout=120) == 1
    assert outcomes.outcome(folder).message == "its process was killed 3 times (out of memory?)"
    out = (tmp_path / "out.txt").read_text()
    assert out.count("; it restarts") == 2 and "0 of 1, 1 failed" in out
    # --retry makes it again.
    with _started(tmp_path, "run", "small.py", "--retry") as process:
        _until(lambda: _process_of(folder) is not None)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) in (130, 143)


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_nothing_is_marked(tmp_path):
    write_study(tmp_path)
    command = [sys.executable, "-m", "dmljax.main", "study", "run", "small.py"]
    done = subprocess.run(
        ["bash", "-c", 'ulimit -f 4; exec "$@"', "-", *command],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert "free space on its disk and repeat the command" in done.stderr
    assert outcomes.outcome(run_folder(tmp_path, "plain")).state == "waiting"
    _ended(study("run", "small.py", folder=tmp_path), 0)


def test_a_file_system_without_locks_is_one_line(tmp_path, monkeypatch):
    outcomes.check_locks(tmp_path / "new")
    assert not list((tmp_path / "new").iterdir())
    # As a mount without locks between processes: the second process takes the lock, too.
    monkeypatch.setattr(writing.fcntl, "flock", lambda *_: None)
    with pytest.raises(OSError, match=r"has no working locks \(flock\).*--workdir and --runs"):
        outcomes.check_locks(tmp_path)
