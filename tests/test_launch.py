"""Two processes are one run: the same numbers, one set of files, one end."""

import os
import signal

import jax
import numpy as np
import pytest
from processes import LONG, children, ends, same_run, started, state, until_step
from system import tiny

from dmljax import log, train

CONFIG = LONG | {"method": {"name": "pairs", "dim": 4, "memory": 16}, "pictures": True}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Two processes of two devices, undisturbed."""
    folder = tmp_path_factory.mktemp("whole")
    with started(folder, folder / "run", tiny(folder, **CONFIG), processes=2) as process:
        return folder, ends(process, 0, folder)


def test_two_processes_compute_what_one_does(whole, tmp_path):
    folder, printed = whole
    train.run(tiny(folder, **CONFIG, runtime={"devices": 4}), tmp_path / "one")
    ours, theirs = (log.read(d / "metrics.jsonl") for d in (folder / "run", tmp_path / "one"))
    assert [sorted(x) for x in ours] == [sorted(x) for x in theirs]
    # Between processes sums are taken in another order: 1e-6 of the largest after 50 steps of Adam.
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose([a[k] for k in a], [b[k] for k in a], rtol=1e-3, atol=1e-5)
    one, two = state(tmp_path / "one"), state(folder / "run")
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4)
    # What is said is said once, and by process 0.
    assert printed.count("on 4 cpu devices") == 1 and "[0] npz: 32 training images" in printed
    assert printed.count("test split after step 50") == 1
    assert (folder / "run" / "map.png").exists()


def test_killed_and_signalled_two_processes_go_on(whole, tmp_path):
    """One of them is killed, then one alone gets SIGTERM; in the end nothing tells."""
    config, run = tiny(tmp_path, **CONFIG), tmp_path / "run"
    with started(tmp_path, run, config, processes=2) as process:
        until_step(run, 14, process)
        os.kill(children(process.pid)[1], signal.SIGKILL)
        ends(process, 137, tmp_path, within=15)
        assert not children(process.pid)
    with started(tmp_path, run, config, processes=2) as process:
        until_step(run, 30, process)
        os.kill(children(process.pid)[1], signal.SIGTERM)
        printed = ends(process, 143, tmp_path, within=30)
    assert "going on from step" in printed and printed.count("the same command goes on") == 1
    with started(tmp_path, run, config, processes=2) as process:
        ends(process, 0, tmp_path)
    same_run(run, whole[0] / "run")
