"""Interrupted runs: killed, signalled, damaged on the disk; the same command gives the same run."""

import os
import random
import re
import shutil
import signal
import time

import pytest
from processes import LONG, ends, python, same_run, started, state, until, until_step
from system import METHODS, tiny

from dmljax import methods
from dmljax.files import writing
from dmljax.files.run_folder import read
from dmljax.runs import training
from dmljax.train import journal, loop
from dmljax.train.journal import mean


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run that was not interrupted."""
    folder = tmp_path_factory.mktemp("finished")
    training.run(tiny(folder), folder / "run")
    return folder


def test_a_killed_run_ends_as_one_that_nothing_interrupts_and_its_time_counts(tmp_path, capsys):
    config, run = tiny(tmp_path, **LONG, **METHODS["pairs"]), tmp_path / "killed"
    with started(tmp_path, run, config, "--config.runtime.workers=1") as process:
        until_step(run, 16, process)
    with pytest.raises(FileNotFoundError, match=r"has no result.json: it is not a run folder"):
        read(run)
    config["runtime"] = {"devices": 1}
    for folder in (run, tmp_path / "undisturbed"):
        training.run(config, folder)
    same_run(run, tmp_path / "undisturbed")
    start = int(re.search(r"continuing from step (\d+)", capsys.readouterr().out)[1])
    lines = journal.read(run / "speed.jsonl")
    before, after = (
        sum(2 * x["step_seconds"] for x in lines if (x["step"] > start) == is_after)
        for is_after in (False, True)
    )
    assert start >= 10 and read(run).wall_seconds > before + after


def test_every_method_has_a_config_to_be_killed_in():
    assert set(METHODS) == {name for name in methods.__all__ if name.islower()}


def _saving(run):
    """Tells whether a checkpoint is being written."""
    return any("tmp" in name for name in _names(run / "checkpoints"))


def _unproven(run):
    """Tells whether a finished checkpoint lacks its checksum."""
    steps = [n for n in _names(run / "checkpoints") if n.isdecimal()]
    return any(not (run / "checkpoints" / n / "sha256").exists() for n in steps)


def _names(folder):
    return os.listdir(folder) if folder.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_killed_at_many_moments_every_method_gives_the_same_run(tmp_path, name):
    fields = {"steps": 60, "checkpoint": {"every": 3, "keep": 2}}
    config = tiny(tmp_path, **LONG | METHODS[name] | fields)
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "killed"
    rng = random.Random(name)
    for number, moment in enumerate([_saving, _unproven, 12, _saving, 30]):
        workers = f"--config.runtime.workers={number % 2}"
        with started(tmp_path, run, config, workers) as process:  # killed at the end of the block
            if callable(moment):
                until(lambda moment=moment: moment(run), process, tmp_path, pause=0.0005)
            else:
                until_step(run, moment, process)
                time.sleep(rng.uniform(0, 0.2))
    for folder in (run, undisturbed):
        with started(tmp_path, folder, config) as process:
            ends(process, 0, tmp_path)
    assert not _saving(run)  # no unfinished checkpoint is left
    same_run(run, undisturbed)


def test_a_second_signal_ends_at_once():
    """Also if the step never ends."""
    code = (
        "import os, signal, time\n"
        "from dmljax.train.devices import Shardings\n"
        "from dmljax.train.interrupts import Interrupts\n"
        "with Interrupts(Shardings()):\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "    print('goes on', flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(60)\n"
    )
    assert "goes on" in python(code, status=-signal.SIGTERM).stdout


def test_damaged_checkpoints_are_named_and_the_one_before_used(finished, tmp_path, caplog):
    shutil.copytree(finished / "run", tmp_path / "run")
    newest, before = (tmp_path / "run" / "checkpoints" / name for name in ("6", "4"))
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    (before / "sha256").unlink()
    training.run(tiny(finished), tmp_path / "run")
    for fault in ("6 is damaged (its files differ from ", "4 is damaged (its checksum is missing"):
        assert f"checkpoint {fault}" in caplog.text
    same_run(tmp_path / "run", finished / "run")


def test_a_workdir_of_another_config_is_refused(finished, tmp_path):
    folder = finished
    shutil.copytree(folder / "run", tmp_path / "run")
    other = tiny(folder, loss={"name": "triplet", "margin": 0.3})
    with pytest.raises(
        ValueError, match=r"loss.margin was 0.2 and is now 0.3\. .*start=.*/run, .*--overwrite"
    ):
        training.run(other, tmp_path / "run")


def test_a_workdir_with_a_damaged_config_is_refused(finished, tmp_path):
    shutil.copytree(finished / "run", tmp_path / "run")
    for name, content in (("config.json", b'{"steps'), ("digests.json", b"[]")):
        path = tmp_path / "run" / name
        before = path.read_bytes()
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{name} is damaged.*--overwrite") as caught:
            training.run(tiny(finished), tmp_path / "run")
        assert "\n" not in str(caught.value) and "another config" not in str(caught.value)
        path.write_bytes(before)


def test_a_resumed_run_may_change_only_fields_without_effect_on_its_result(finished, tmp_path):
    folder = finished
    shutil.copytree(folder / "run", tmp_path / "run")
    metrics = (folder / "run" / "metrics.jsonl").read_bytes()
    training.run(tiny(folder, runtime={"workers": 1, "cache": True}), tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics
    with pytest.raises(ValueError, match=r"unreadable was 'raise' and is now 'skip'"):
        training.run(tiny(folder, unreadable="skip"), tmp_path / "run")
    frozen = {"name": "convnet", "widths": [4, 8], "strides": [2, 2], "norm": "frozen_batch_norm"}
    with pytest.raises(ValueError, match=r"chunk was None and is now 8"):
        training.run(tiny(folder, chunk=8, net=frozen), tmp_path / "run")


def test_a_workdir_in_use_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    lock_file = writing.lock(tmp_path / "run" / "lock")
    with pytest.raises(ValueError, match=f"in use by process {os.getpid()}"):
        training.run(tiny(tmp_path), tmp_path / "run")
    lock_file.close()


def test_a_run_interrupted_where_the_best_is_reloaded_ends_the_same(tmp_path, monkeypatch):
    rising = {"name": "constant", "warmup": 6}  # from harmless to harmful
    optimizer = {"name": "sgd", "rate": 100.0}
    method = {"name": "pairs", "dim": 4, "memory": 99}
    config = tiny(tmp_path, method=method, reload_best_at=[4], optimizer=optimizer, schedule=rising)
    config["evaluate"] |= {"every": 2, "clustering": None}
    config["checkpoint"] = {"every": 1, "keep": 6}
    config["log_every"] = 4  # the line after step 6 is a mean, maybe over both processes
    windows = []
    monkeypatch.setattr(loop, "mean", lambda window: windows.append(len(window)) or mean(window))
    training.run(config, tmp_path / "run")
    assert windows == [4, 2]
    rows = journal.read(tmp_path / "run" / "metrics.jsonl")
    scores = [row["test/R@1"] for row in rows if "test/R@1" in row]
    assert len(scores) == 3 and scores[0] > scores[1]  # so that there is something to reload
    last_state = state(tmp_path / "run")
    # The rows of steps 1 and 2, and of 5 and 6; the optimizer has gone on from step 4.
    assert last_state.model_state["memory"].filled == 8 * (2 + 2)
    assert last_state.opt_state[-1].count == 6
    for later in (5, 6):
        shutil.rmtree(tmp_path / "run" / "checkpoints" / str(later))
    training.run(config, tmp_path / "run")
    assert journal.read(tmp_path / "run" / "metrics.jsonl") == rows
