"""A fault from outside is reported in one line with the fix; the last checkpoint stays good."""

import re
import subprocess

import jax
import numpy as np
import pytest
from processes import LONG, ends, mounted, started
from system import tiny

from dmljax.files.run_folder import read
from dmljax.runs import folder as run_folder
from dmljax.runs import training
from dmljax.train import journal
from dmljax.train.checkpoints import Checkpoints


def _undamaged_steps(run):
    """The steps of the checkpoints, none of which may be damaged."""
    checkpoints = Checkpoints(run / "checkpoints")
    steps = checkpoints.steps()
    assert steps and all(checkpoints.fault(step) is None for step in steps)
    return steps


def test_a_loss_that_is_not_finite_keeps_the_last_good_checkpoint(tmp_path):
    fields = {"optimizer": {"name": "sgd", "rate": 1e30}, "normalize": "unit"}
    config = tiny(tmp_path, **fields, checkpoint={"every": 1, "keep": 2}, log_every=1)
    with pytest.raises(FloatingPointError, match=r"the loss is .* at step \d+ .*optimizer.rate"):
        training.run(config, tmp_path / "run")
    assert _undamaged_steps(tmp_path / "run")
    _, state = run_folder.reopen(tmp_path / "run")
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(state.params))
    assert int(state.step) == _undamaged_steps(tmp_path / "run")[-1]
    result = read(tmp_path / "run")
    assert result.status == "diverged" and f"at step {result.step} " in result.message
    assert result.chosen is None and result.scores == {} and 1 <= result.step <= 6


@pytest.mark.parametrize("name", ["loss", "gradient_norm"])
def test_a_loss_that_is_not_finite_is_reported_with_its_steps(name):
    finite = {"loss": np.float32(1), "gradient_norm": np.float32(1)}
    broken = finite | {name: np.float32(np.nan)}
    for before, text in (([finite], r"at step 8 \(finite until step 7\)"), ([], r"from the start")):
        pending = journal.PendingMetrics(6 if before else 0)
        for step, metrics in enumerate([*before, broken], start=7):
            pending.add(step, (metrics, np.int32(0)))
        with pytest.raises(FloatingPointError, match=rf"the {name} is nan .*{text}"):
            list(pending.fetch(all_steps=True))


@pytest.mark.parametrize("processes", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_a_full_disk_is_one_line_and_with_space_the_run_continues(tmp_path, processes):
    fields = {"steps": 40, "evaluate": {"every": 40}, "checkpoint": {"every": 4, "keep": 99}}
    config = tiny(tmp_path, **LONG | fields)
    with mounted(tmp_path / "disk", "size=500k") as disk:
        with started(tmp_path, disk / "run", config, processes=processes) as process:
            printed = ends(process, 2, tmp_path)
        prefix = r"\[\d\] " if processes else ""
        errors = [line for line in printed.splitlines() if re.match(f"{prefix}error: ", line)]
        assert len(errors) in range(1, (processes or 1) + 1)
        assert "No space left on device" in errors[0] and "Make space" in errors[0]
        if processes:
            assert "warning: a checkpoint cannot be written: " in printed
        assert "site-packages/orbax" not in printed  # no stack of Orbax
        last_step = _undamaged_steps(disk / "run")[-1]
        assert f"the same command continues from step {last_step}" in errors[0]
        subprocess.run(["mount", "-o", "remount,size=20m", str(disk)], check=True)
        if processes is None:
            training.run(config | {"runtime": {"devices": 1}}, disk / "run")
            assert _undamaged_steps(disk / "run")[-1] == 40
            return
        with started(tmp_path, disk / "run", config, processes=processes) as process:
            assert "continuing from step" in ends(process, 0, tmp_path)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    with (
        mounted(tmp_path / "disk", "size=1m,ro") as disk,
        pytest.raises(OSError, match=r"disk/run cannot be written: .*choose another --workdir"),
    ):
        training.run(tiny(tmp_path), disk / "run")
