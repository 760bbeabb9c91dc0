"""Which checkpoints are kept."""

import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

from dmljax.train import checkpoints
from dmljax.train.checkpoints import Checkpoints
from dmljax.train.devices import ClassRows
from dmljax.train.step import TrainState


def _saved(folder, scores, *, keep=1):
    """The steps that remain after saving one checkpoint for each score, and the best step."""
    state = TrainState(jnp.int32(0), {"w": jnp.zeros(3)}, {}, {})
    with Checkpoints(folder, keep=keep) as checkpoints:
        for step, score in enumerate(scores, start=1):
            checkpoints.save(state._replace(step=jnp.int32(step)), {}, score=score)
        checkpoints.wait()
        return checkpoints.steps(), checkpoints.best()


def test_of_equal_scores_the_earliest_checkpoint_is_kept(tmp_path):
    assert _saved(tmp_path / "a", [0.5, 0.8, 0.8, 0.7]) == ([2, 4], 2)
    assert _saved(tmp_path / "b", [0.5, None, 0.5, None]) == ([1, 4], 1)
    assert _saved(tmp_path / "c", [None, None, -0.2]) == ([3], 3)
    assert _saved(tmp_path / "d", [None, None, None]) == ([3], None)
    assert _saved(tmp_path / "e", [float("nan"), 0.1, None]) == ([2, 3], 2)


def test_a_reopened_folder_keeps_the_earliest_of_equals_too(tmp_path):
    folder = tmp_path / "checkpoints"
    assert _saved(folder, [0.5, 0.8]) == ([2], 2)
    state = TrainState(jnp.int32(3), {"w": jnp.zeros(3)}, {}, {})
    with Checkpoints(folder, keep=1) as checkpoints:
        checkpoints.save(state, {}, score=0.8)
        checkpoints.wait()
        assert checkpoints.steps() == [2, 3] and checkpoints.best() == 2


def test_a_step_is_saved_again_only_with_overwrite(tmp_path):
    """Also after a restart: a signal may come before the next step."""
    state = TrainState(jnp.int32(2), {"w": jnp.zeros(3)}, {}, {})
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for notes in ([1, 2], [3]):
        with Checkpoints(tmp_path / "checkpoints") as saved:
            saved.restore(jax.eval_shape(lambda: state), sharding)
            for note in notes:
                saved.save(state, {"note": note})
            saved.wait()
            assert saved.run(2) == {"note": 1}
            saved.save(state._replace(params={"w": jnp.ones(3)}), {"note": 1}, overwrite=True)
            saved.wait()
            assert saved.fault(2) is None and saved.arrays(2)[0]["w"].all()


@pytest.mark.parametrize("damage_fn", [pathlib.Path.unlink, lambda path: path.write_bytes(b"")])
def test_an_older_checkpoint_that_is_damaged_is_not_the_best_and_is_removed(tmp_path, damage_fn):
    folder = tmp_path / "checkpoints"
    assert _saved(folder, [0.9, 0.5, 0.4], keep=3) == ([1, 2, 3], 1)
    files = [path for path in (folder / "1").rglob("*") if path.is_file()]
    damage_fn(max(files, key=lambda path: path.stat().st_size))
    shapes = jax.eval_shape(lambda: TrainState(jnp.int32(0), {"w": jnp.zeros(3)}, {}, {}))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with Checkpoints(folder, keep=3) as saved:
        assert saved.best() == 2 and saved.newest() == 3
        assert saved.steps() == [1, 2, 3], "a reader changes nothing"
        assert saved.restore(shapes, sharding)[0].step == 3
        assert saved.steps() == [2, 3]


def test_a_checkpoint_is_kept_until_a_newer_one_has_its_checksum(tmp_path, monkeypatch):
    """The disk may be full when it is written."""

    def full(*_):
        raise OSError("No space left on device")

    state = TrainState(jnp.int32(1), {"w": jnp.zeros(3)}, {}, {})
    with Checkpoints(tmp_path / "checkpoints", keep=1) as saved:
        saved.save(state, {}, score=0.5)
        saved.wait()
        monkeypatch.setattr(checkpoints, "write_text", full)
        saved.save(state._replace(step=jnp.int32(2)), {}, score=0.9)
        with pytest.raises(OSError, match=r"No space .*the same command continues from step 1"):
            saved.wait()
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with Checkpoints(tmp_path / "checkpoints", keep=1) as saved:
        assert saved.best() == 1
        assert saved.restore(jax.eval_shape(lambda: state), sharding)[0].step == 1


def test_only_zeros_after_the_classes_are_cut_or_added(tmp_path):
    """Of five classes, other devices have up to nine rows; four or ten are another run."""

    def shapes(*sides):
        return jax.eval_shape(lambda: TrainState(jnp.int32(1), {"w": jnp.ones(sides)}, {}, {}))

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    class_rows = ClassRows(frozenset({"w"}), classes=5)
    with Checkpoints(tmp_path / "checkpoints", class_rows=class_rows) as saved:
        saved.save(TrainState(jnp.int32(1), {"w": jnp.ones(5)}, {}, {}), {})
        saved.wait()
        assert saved.load(1, shapes(9), sharding)[0].params["w"].tolist() == [1] * 5 + [0] * 4
        for sides in ((4,), (10,), (9, 2)):
            message = re.escape(f"params/w is (5,) there and {sides} here")
            with pytest.raises(ValueError, match=message):
                saved.load(1, shapes(*sides), sharding)


def test_arrays_that_only_the_checkpoint_or_only_the_run_has_are_refused(tmp_path):
    state = TrainState(jnp.int32(1), {"w": jnp.ones(3)}, {"a": jnp.ones(2)}, {})
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with Checkpoints(tmp_path / "checkpoints") as saved:
        saved.save(state, {})
        saved.wait()
        for model_state, message in (
            ({}, r"train/model_state/a is \(2,\) there and unknown here"),
            ({"a": jnp.ones(2), "b": jnp.ones(4)}, r"state/b is missing there and \(4,\) here"),
        ):
            other = jax.eval_shape(lambda x=model_state: state._replace(model_state=x))
            with pytest.raises(ValueError, match=message):
                saved.load(1, other, sharding)


def test_an_only_checkpoint_whose_save_was_cut_off_is_not_used(tmp_path, caplog):
    """After a loss of power it may be half, and its checksum comes last."""
    folder = tmp_path / "run" / "checkpoints"
    assert _saved(folder, [0.5]) == ([1], 1)
    (folder / "1" / "sha256").unlink()
    (folder / "2.orbax-checkpoint-tmp-0").mkdir()
    shapes = jax.eval_shape(lambda: TrainState(jnp.int32(0), {"w": jnp.zeros(3)}, {}, {}))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    with Checkpoints(folder) as saved:
        assert saved.restore(shapes, sharding) is None and saved.steps() == []
    message = "checkpoint 1 is damaged (its checksum is missing): it is not used"
    assert message in caplog.text
    assert not any(folder.iterdir())
