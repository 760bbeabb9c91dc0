"""Studies made by the command itself, in processes: failures, kills, full disks, signals."""

import contextlib
import csv
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
from study_files import environment, finished, index, run_folder, study, write_study

from dmljax import main
from dmljax.files import cores, locks
from dmljax.files import result as results
from dmljax.studies import joined, launch, outcomes, session, worker

# The second cannot run: 90 % of four classes cannot be held out.
ROWS = {"plain": {}, "broken": {"held_out": 0.9}, "wide": {"method.dim": 8}}


def _ended(done, status):
    assert done.returncode == status, done.stdout + done.stderr
    return done


def test_a_failing_row_is_a_cell_and_others_finish(tmp_path):
    write_study(tmp_path, rows=ROWS, baseline="plain", test="welch")
    done = _ended(study("run", "small.py", folder=tmp_path), 1)
    assert "broken, seed 0: failed: " in done.stdout
    lines = {line.split("|")[1].strip(): line for line in done.stdout.splitlines() if "|" in line}
    assert lines["broken"].count(" failed ") == 3 and "0 of 1, 1 failed" in lines["broken"]
    assert "(1 run)" in lines["plain"] and "(1 run)" in lines["wide"] and "±" not in lines["wide"]
    # Exactly what the command line does.
    folder = run_folder(tmp_path, "wide")
    command = (folder / "output.txt").read_text().splitlines()[0].removeprefix("$ ")
    alone = command.replace(str(folder.relative_to(tmp_path)), "alone")
    assert alone != command
    subprocess.run(alone, shell=True, cwd=tmp_path, env=environment(), check=True, text=True)
    same = (folder / "metrics.jsonl").read_bytes() == (
        tmp_path / "alone/metrics.jsonl"
    ).read_bytes()
    assert same and results.read(folder).digests == results.read(tmp_path / "alone").digests
    # A second study shares the run, and the first one has nothing left to do.
    before = (folder / "result.json").stat().st_mtime_ns
    write_study(tmp_path, name="second", rows={"the same": ROWS["wide"]})
    _ended(study("run", "second.py", folder=tmp_path), 0)
    assert run_folder(tmp_path, "the same", name="second") == folder
    again = _ended(study("run", "small.py", folder=tmp_path), 1)
    assert "[" not in again.stdout.partition("##")[0]
    assert (folder / "result.json").stat().st_mtime_ns == before
    rows = list(
        csv.DictReader(
            study("table", "small.py", "--format=csv", folder=tmp_path).stdout.splitlines()
        )
    )
    assert [row["state"] for row in rows] == ["finished", "failed", "finished"]
    scores = results.read(folder).scores
    assert float(rows[2]["test/R@1"]) == scores["test/R@1"]


@pytest.mark.slow
def test_an_ensemble_of_independent_nets_with_sizes_and_curves(tmp_path):
    """Its score differs from the scores of its nets, and is that of their joined embeddings."""
    rows = {"net": {"seeds": 2}, "two nets": {"runs_of": "net", "join_seeds": 2}}
    fields = {"columns": ["parameters", "flops"], "curves": ["loss"]}
    scores = ["R@1", "MAP@R", "mean_distance/MAP@R"]
    write_study(tmp_path, rows=rows, scores=scores, **fields)
    done = _ended(study("run", "small.py", folder=tmp_path), 0)
    assert "two nets, seed 0: 2 nets joined" in done.stdout
    header, _, net, two = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in done.stdout.splitlines()
        if line.startswith("|")
    )
    folders = [run_folder(tmp_path, "net", seed) for seed in (0, 1)]
    joined.write(str(tmp_path / "expected.json"), folders)
    expected = json.loads((tmp_path / "expected.json").read_text())["scores"]
    for column, score in enumerate(header):
        if score in scores:
            assert two[column] == f"{100 * expected[score]:.1f} (1 run)"
    singles = [results.read(folder).scores["test/MAP@R"] for folder in folders]
    assert expected["MAP@R"] not in singles and net[header.index("mean_distance/MAP@R")] == "-"
    sizes = json.loads((tmp_path / "runs/studies/small/sizes.json").read_text())["sizes"]
    assert sizes["two nets"] == {key: 2 * value for key, value in sizes["net"].items()}
    assert (tmp_path / "runs/studies/small/table.html").read_text().count("<polyline") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run"], "study needs one study file"),
        (["rum", "small.py"], "there is no 'rum': did you mean 'run'"),
        (["run", "smal.py"], "did you mean 'small.py'"),
        (
            ["run", "small.py", "--only=plan"],
            "--only: there is no row 'plan': did you mean 'plain'",
        ),
        (["run", "small.py", "--workers=0"], "--workers must be 1 or more, not 0"),
        (["run", "small.py", "--config.steps=9"], "would change every row"),
        (["table", "small.py"], "holds no study"),
        (["table", "small.py", "--format=pdf"], "--format: there is no 'pdf'"),
        (["compare", "a"], "compare needs two run folders"),
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
    opened = session.open_session(str(write_study(tmp_path, seeds=3)))
    runs = session.prepare(opened)

    def run_two(self, run, folder, lock, watch_fn):  # another worker ends a run meanwhile
        for ended in runs[:2]:
            opened.folder.run_folder(ended.digest).mkdir(parents=True, exist_ok=True)
            outcomes.mark_failed(opened.folder.run_folder(ended.digest), "broken", exit_status=1)
        return worker._Ended(0, "", 1.0)

    monkeypatch.setattr(worker.Worker, "_run", run_two)
    assert worker.Worker(opened).attempt(runs[0], among=runs)
    assert capsys.readouterr().out == "[2/3] plain, seed 0: failed: broken\n"


def test_a_dry_run_prints_commands_and_writes_nothing(tmp_path):
    write_study(tmp_path, rows=ROWS, seeds=2)
    done = _ended(study("run", "small.py", "--dry-run", folder=tmp_path), 0)
    assert done.stdout.count("-m dmljax.main train --config=tiny.py") == 6
    assert "3 rows, 6 runs" in done.stdout and not (tmp_path / "runs").exists()
    array = _ended(study("array", "small.py", "--tasks=3", folder=tmp_path), 0)
    assert array.stdout.startswith("sbatch --array=1-3 ") and "--no-wait" in array.stdout


def test_threads_and_devices_are_divided():
    code = (
        "from dmljax.studies import launch; import json; print(json.dumps(launch.environments({})))"
    )

    def ask(workers, **variables):
        done = subprocess.run(
            [sys.executable, "-c", code.format(workers)],
            env=environment(**variables),
            capture_output=True,
            text=True,
        )
        return json.loads(done.stdout) if done.returncode == 0 else done.stderr

    def of_gpus(*names):
        return [{"CUDA_VISIBLE_DEVICES": name} for name in names]

    gpus = {"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": "0,1,4,5"}
    assert ask(2, **gpus) == of_gpus("0,4", "1,5") and ask(3, **gpus) == of_gpus("0", "1", "4")
    assert "choose at most 4" in ask(5, **gpus)
    assert ask(1, **gpus) == [{"CUDA_VISIBLE_DEVICES": "0,1,4,5"}]
    threads = max(1, cores.count() // 2)
    on_cpu = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "0"}
    assert ask(2, **on_cpu) == [{"NPROC": str(threads), "OMP_NUM_THREADS": str(threads)}] * 2
    assert ask(1, **on_cpu) == [{}]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_workers_share_the_cores(monkeypatch):
    available = sorted(os.sched_getaffinity(0))
    with subprocess.Popen(["sleep", "60"]) as sleeper:
        for number in range(2 * len(available)):  # more than cores: one of them each
            launch.limit_cores(sleeper.pid, number, 2 * len(available))
            expected = available[number % len(available)]
            assert os.sched_getaffinity(sleeper.pid) == {expected}
        launch.limit_cores(sleeper.pid, 0, 1)
        assert os.sched_getaffinity(sleeper.pid) == set(available)
        sleeper.kill()
    launch.limit_cores(sleeper.pid, 0, 2)  # it has ended
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    limits = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, x: limits.append(x))
    assert launch.start(["--version"], [{}] * 3) == 0
    assert limits == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9], [10, 11, 12, 13, 14]]


def test_a_lock_is_held_by_the_process_that_inherits_it(tmp_path):
    with outcomes.locked(tmp_path) as file:
        sleeper = subprocess.Popen(["sleep", "60"], pass_fds=(file.fileno(),))
    assert outcomes.outcome(tmp_path).state == "running"
    with outcomes.locked(tmp_path) as other:
        assert other is None
    sleeper.kill()
    sleeper.wait()
    assert outcomes.outcome(tmp_path).state == "waiting"


@pytest.mark.parametrize("shared", [False, True])
def test_a_lock_file_can_be_read_and_written(tmp_path, shared):
    """NFS gives an exclusive lock to a file opened for writing, a shared one to one for reading."""
    with outcomes.locked(tmp_path, shared=shared) as file:
        assert file.readable() and file.writable()


def test_a_folder_that_holds_another_run_is_a_failed_cell(tmp_path):
    """The config, the data or the program changed between planning and training."""
    folder = tmp_path / ("ab" * 6)
    folder.mkdir()
    for digest, state in (("ab" * 32, "finished"), ("ab" * 5 + "cd" * 27, "failed")):
        results.write(folder, finished({}, digest))
        assert outcomes.outcome(folder).state == state
    assert "delete" in outcomes.outcome(folder).message


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


def _until(fn, folder, seconds=240):
    end = time.monotonic() + seconds
    while not fn():
        assert time.monotonic() < end, (folder / "out.txt").read_text()
        time.sleep(0.05)


def _process_of(folder):
    """The process that trains in a run folder."""
    for path in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_text().split("\0")
            if any(w.startswith("--workdir=") and w.endswith(folder.name) for w in words):
                return int(path.name)
    return None


def _has_step(folder, step):
    with contextlib.suppress(OSError):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return any(f'{{"step": {step},' in line for line in lines)
    return False


LONG = {"steps": 400, "log_every": 10, "checkpoint": {"every": 20, "keep": 2}}
LONG |= {"evaluate": {"every": 200, "ks": [1, 2], "clustering": None, "batch_size": 16}}


@pytest.mark.slow
def test_three_workers_of_which_one_is_killed_with_its_run(tmp_path):
    """Every run once; the killed one is continued by another worker, bit for bit."""
    write_study(tmp_path, config=LONG, rows={"a": {}, "b": {"method.dim": 8}}, seeds=3)
    with _started(tmp_path, "run", "small.py") as first:
        _until(lambda: (tmp_path / "runs/studies/small/index.json").exists(), tmp_path)
        with (
            _started(tmp_path, "run", "small.py") as second,
            _started(tmp_path, "run", "small.py") as third,
        ):
            folder = run_folder(tmp_path, "a")
            _until(lambda: _has_step(folder, 60), tmp_path)
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
    with _started(tmp_path, "run", "small.py", "--workers=2") as process:
        _until(lambda: (tmp_path / "runs/studies/small/index.json").exists(), tmp_path)
        folder = run_folder(tmp_path, "plain")
        _until(lambda: _has_step(folder, 40), tmp_path)
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
        _until(lambda: (tmp_path / "runs/studies/small/index.json").exists(), tmp_path)
        folder = run_folder(tmp_path, "plain")
        for _ in range(3):
            _until(lambda: _process_of(folder) is not None, tmp_path)
            killed = _process_of(folder)
            os.kill(killed, signal.SIGKILL)
            _until(lambda killed=killed: _process_of(folder) != killed, tmp_path)
        assert process.wait(timeout=120) == 1
    assert outcomes.outcome(folder).message == "its process was killed 3 times (out of memory?)"
    out = (tmp_path / "out.txt").read_text()
    assert out.count("it is started again") == 2 and "0 of 1, 1 failed" in out
    # --retry makes it again.
    with _started(tmp_path, "run", "small.py", "--retry") as process:
        _until(lambda: _process_of(folder) is not None, tmp_path)
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
    monkeypatch.setattr(locks.fcntl, "flock", lambda *_: None)
    with pytest.raises(OSError, match=r"has no working locks \(flock\).*--workdir and --runs"):
        outcomes.check_locks(tmp_path)


@pytest.mark.slow
def test_a_row_starts_from_another(tmp_path):
    rows = {"first": {}, "second": {"start_from": "first", "optimizer.rate": 1e-3}}
    write_study(tmp_path, rows=rows)
    done = _ended(study("run", "small.py", folder=tmp_path), 0)
    assert done.stdout.index("first, seed 0: R@1") < done.stdout.index("second, seed 0: R@1")
    config = json.loads((run_folder(tmp_path, "second") / "config.json").read_text())
    assert pathlib.Path(config["start"]).name == run_folder(tmp_path, "first").name
    again = _ended(study("run", "small.py", folder=tmp_path), 0)
    assert "seed 0: R@1" not in again.stdout
