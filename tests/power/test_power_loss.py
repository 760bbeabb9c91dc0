"""What was acknowledged survives a loss of power, and nothing is half: see `replay.py`."""

import pathlib
import shutil
import subprocess
import sys

import numpy as np
import pytest
from power import replay, writers
from processes import same_run
from system import tiny, write_config

HERE = pathlib.Path(__file__).parent

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")


def _cuts(name, tmp_path, *, count, seed=0):
    """Cuts the power of a writer at `count` moments, and at once after every acknowledgement."""
    writer, rng = (writers.WRITERS | writers.SLOW)[name](), np.random.default_rng(seed)
    root = tmp_path / "root"
    root.mkdir()
    disk, records = replay.recorded([HERE / "writers.py", name, root], root, tmp_path)
    chosen = set(rng.choice(len(records), min(count, len(records)), replace=False).tolist())
    variants = np.arange(len(records)) + int(rng.integers(100))
    problems = []
    for i, record in enumerate(records):
        disk.apply(record)
        names, contents = replay.VARIANTS[variants[i] % len(replay.VARIANTS)]
        if record.kind == "A":
            names, contents = "synced", "synced"
        elif i not in chosen:
            continue
        folder = disk.cut(tmp_path / f"cut-{i}", names, contents, rng)
        try:
            problem = writer.problem(folder, len(disk.acknowledged))
        except (OSError, ValueError) as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            problems.append((i, record[:5], len(disk.acknowledged), names, contents, problem))
        shutil.rmtree(folder, ignore_errors=True)
    assert disk.acknowledged
    assert not problems, "\n".join(map(str, problems[:10]))


# The moments of the short test: each costs what a reader of the writer takes.
FEW = {"Results": 8, "Index": 5, "Checkpoints": 3, "Features": 2, "Studies": 8}


@needs_gcc
@pytest.mark.parametrize("name", writers.WRITERS)
def test_a_loss_of_power_loses_nothing_that_was_acknowledged(tmp_path, name):
    _cuts(name, tmp_path, count=FEW[name])


@needs_gcc
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", [*writers.WRITERS, *writers.SLOW])
def test_power_is_lost_at_many_moments(tmp_path, name, seed):
    _cuts(name, tmp_path, count=100, seed=seed)


_CARELESS = """
import os, sys
for i, text in enumerate((b"first", b"second")):
    with open(sys.argv[1] + "/new", "wb") as file:
        file.write(text)
        if "file" in sys.argv:
            file.flush()
            os.fsync(file.fileno())
    os.replace(sys.argv[1] + "/new", sys.argv[1] + "/file")
    if "folder" in sys.argv:
        os.fsync(os.open(sys.argv[1], os.O_RDONLY))
os.write(1, b".")
"""


@needs_gcc
@pytest.mark.parametrize(
    "synced, contents",
    [
        ([], {("synced", None), ("all", b""), ("part", b""), ("part", None)}),
        (["file"], {("synced", None), ("all", b"second"), ("part", b"first")}),
        (["file", "folder"], {("synced", b"second"), ("all", b"second"), ("part", b"second")}),
    ],
)
def test_the_replay_drops_what_was_not_synced(tmp_path, synced, contents):
    """Shows that a rename without fsync leaves an empty file or none, unlike a kill."""
    root, rng = tmp_path / "root", np.random.default_rng(0)
    root.mkdir()
    disk, records = replay.recorded(["-c", _CARELESS, root, *synced], root, tmp_path)
    for record in records:
        disk.apply(record)
    results = set()
    for i in range(40):
        names = ("synced", "all", "part")[i % 3]
        file = disk.cut(tmp_path / str(i), names, "synced", rng) / "file"
        results.add((names, file.read_bytes() if file.exists() else None))
    assert contents <= results
    if len(synced) == 2:
        assert results == contents


@needs_gcc
@pytest.mark.slow
def test_a_run_that_lost_power_ends_with_the_same_result(tmp_path):
    """Cuts the power of the real command at moments of the whole run, and repeats it."""
    config = write_config(tmp_path, tiny(tmp_path, steps=12))
    root, rng = tmp_path / "root", np.random.default_rng(0)
    root.mkdir()
    words = ["-m", "dmljax.main", f"--config={config}", f"--workdir={root / 'run'}"]
    disk, records = replay.recorded(words, root, tmp_path, cwd=HERE.parents[1])
    moments = set(np.linspace(len(records) // 8, len(records) - 1, 10).astype(int).tolist())
    for i, record in enumerate(records):
        disk.apply(record)
        if i not in moments:
            continue
        names, contents = replay.VARIANTS[int(rng.integers(len(replay.VARIANTS)))]
        folder = disk.cut(tmp_path / f"cut-{i}", names, contents, rng)
        words[-1] = f"--workdir={folder / 'run'}"
        completed = subprocess.run([sys.executable, *words], capture_output=True, text=True)
        assert completed.returncode == 0, (i, names, contents, completed.stderr)
        same_run(folder / "run", root / "run")
        shutil.rmtree(folder)
