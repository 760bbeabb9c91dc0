"""Checkpoints that can be trusted: atomic, checksummed, of one run at a time.

A checkpoint is one folder, named by its step. It holds the items `params` and `train` (step, model
state, optimizer state) and, as JSON, what the train loop needs to continue. Saving is asynchronous.
When a save is finished, its files are flushed to the disk and their SHA-256 sums are written beside
the folder. A checkpoint without sums, or whose files differ from them, is reported as damaged, and
the one before it is used. The newest checkpoint with sums is deleted only after a newer one has
them.
"""

import contextlib
import functools
import itertools
import json
import logging as python_logging
import math
import os
import pathlib
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any, NamedTuple

import jax
from absl import logging
from flax import traverse_util

from dmljax.adapt import path_of
from dmljax.files import reading
from dmljax.files.result import first_best
from dmljax.files.writing import make_folder, sha256, sync, write_json
from dmljax.train import hosts
from dmljax.train.placement import ClassRows
from dmljax.train.step import TrainState

_CLOSING_SECONDS = 5


class Mismatch(ValueError):
    """A checkpoint does not fit the run."""


class Base(NamedTuple):
    """Parameters that a run reads but does not change, so that no checkpoint needs to hold them.

    `paths` are theirs, and `params_fn()` gives all parameters of the run before its first step.
    """

    paths: Set[str]
    params_fn: Callable[[], Any]


class Checkpoints:
    """The checkpoints of one run in `folder`: the latest `keep`, and the one with the best score.

    The best score is the highest; of equal scores it is the earliest, as published code saves on
    strict improvement. Reading changes nothing in a folder that another process may be writing.
    Parameters of `base` are left out, and taken from there again. Arrays of `class_rows` may have
    more or fewer rows of zeros after the rows of the classes than in the checkpoint, which other
    devices have written.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        keep: int = 2,
        base: Base | None = None,
        class_rows: ClassRows = ClassRows(),  # noqa: B008  a tuple
    ):
        python_logging.getLogger("absl").addFilter(_shorten)
        self._base = base or Base(frozenset(), dict)
        self._class_rows = class_rows
        self.folder = pathlib.Path(folder).absolute()
        make_folder(self.folder)
        self._keep = keep
        self._sums = self.folder.parent / f"{self.folder.name}_sums"
        self._saving: _Saving | None = None
        # The step that was saved last. All processes must agree on it, although a shared folder may
        # look different to each of them.
        self._last = -1

    @functools.cached_property
    def _checkpointer(self) -> Any:
        """For saving; made after `restore` has moved damaged checkpoints aside, as it reads all."""
        from orbax.checkpoint import v1 as ocp

        policy = ocp.training.preservation_policies.AnyPreservationPolicy(
            [self._policy, _NewestWithSums(self._sums)]
        )
        return ocp.training.Checkpointer(
            self.folder,
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=policy,
            cleanup_tmp_directories=True,
        )

    @functools.cached_property
    def _policy(self) -> Any:
        """Which checkpoints are kept: the latest, and the one with the best score."""
        from orbax.checkpoint import v1 as ocp

        policies = ocp.training.preservation_policies
        best = policies.BestN(
            get_metric_fn=lambda metrics: (metrics["score"], -metrics["step"]),
            n=1,
            keep_checkpoints_without_metrics=False,
        )
        return policies.AnyPreservationPolicy([policies.LatestN(self._keep), best])

    def steps(self) -> list[int]:
        """Finished checkpoints, oldest first."""
        return sorted(int(p.name) for p in self.folder.iterdir() if p.name.isdecimal())

    def save(
        self,
        state: TrainState,
        run: dict[str, Any],
        *,
        score: float | None = None,
        overwrite: bool = False,
    ) -> None:
        """Starts to save in the background.

        A step that is saved already is saved again only with `overwrite`.
        """
        step = int(state.step)
        if step == self._last and not overwrite:
            return
        self._last = step
        self.wait()
        if jax.process_index() == 0:
            make_folder(self._sums)  # before the first save: see `_newest`
            if overwrite:
                (self._sums / f"{step}.json").unlink(missing_ok=True)
        items = {
            "params": _without(state.params, self._base.paths),
            "train": _train_item(state),
        }
        metrics = None
        if score is not None and not math.isnan(score):
            metrics = {"score": float(score), "step": step}
        notes = {"run": json.dumps(run), "score": metrics and metrics["score"]}
        with self._writing(step):
            response = self._checkpointer.save_checkpointables_async(
                step, items, metrics=metrics, custom_metadata=notes, overwrite=overwrite
            )
        confirm_fn = functools.partial(self._confirm, response, step)
        self._saving = _Saving(step, confirm_fn if jax.process_index() == 0 else lambda: None)

    @contextlib.contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """Raises a one-line error that names the checkpoint which cannot be written."""
        try:
            yield
        except Exception as error:
            earlier = [other for other in self.steps() if other != step]
            onward = f"continues from step {earlier[-1]}" if earlier else "starts again"
            raise OSError(
                f"checkpoint {step} cannot be written to {self.folder}: {_reason(error)}. Make "
                f"space there (or lower checkpoint.keep), then the same command {onward}"
            ) from error

    def wait(self) -> None:
        """Waits until all saves are on the disk, with their sums."""
        saving, self._saving = self._saving, None
        if saving is None:
            return
        with self._writing(saving.step):
            self._checkpointer.wait()
            saving.wait()
            checkpoints = self._checkpointer.checkpoints
            kept = self._policy.should_preserve(checkpoints, context=None)
            for checkpoint in itertools.compress(checkpoints, [not is_kept for is_kept in kept]):
                self._checkpointer.delete(checkpoint.step)

    def _confirm(self, response: Any, step: int) -> None:
        """Flushes a checkpoint to the disk when it is saved, and then writes its sums."""
        response.result()
        folder = self.folder / str(step)
        for path in (*folder.rglob("*"), folder, self.folder):
            sync(path)
        write_json(self._sums / f"{step}.json", _sums(folder))
        steps = self.steps()
        for file in self._sums.glob("*.json"):
            if int(file.stem) not in steps:
                file.unlink()

    def restore(
        self, shapes: TrainState, sharding: Any, *, repair: bool = False
    ) -> tuple[TrainState, dict] | None:
        """The newest undamaged checkpoint, or None if there is none.

        `shapes` is the state as `jax.eval_shape` gives it. `sharding` is one sharding for all
        arrays, or a state of shardings; the devices may be others than in the run that saved.
        `repair` moves all damaged checkpoints aside, so that the run can write those steps again.
        """
        step = hosts.on_process_0(lambda: self._newest(repair))
        if repair:
            self._checkpointer.reload()
        if step is None:
            return None
        restored = self.load(step, shapes, sharding)
        self._last = step
        return restored

    def _newest(self, repair: bool) -> int | None:
        newest, unproven = None, []  # unproven: the process ended before the sums were written
        for step in reversed(self.steps()):
            if not (self._sums / f"{step}.json").exists():
                unproven.append(step)
                continue
            fault = self.fault(step)
            if fault is None:
                newest = step if newest is None else newest
            else:
                effect = "the one before is used" if newest is None else "it is not used"
                logging.warning("checkpoint %s is damaged (%s): %s", step, fault, effect)
                if repair:
                    self._put_aside(step)
            if newest is not None and not repair:
                break
        writes_sums = self._sums.exists()  # versions of before wrote none
        for step in unproven:
            if newest is None and not writes_sums:
                logging.warning("checkpoint %s has no sums: nothing proves it", step)
                return step
            if newest is None or step > newest:
                effect = "it is not used" if newest is None else f"{newest}, which has, is used"
                logging.warning("checkpoint %s has no sums: %s", step, effect)
                if repair:
                    self._put_aside(step)
        return newest

    def _put_aside(self, step: int) -> None:
        aside = self.folder.parent / f"{self.folder.name}_damaged"
        aside.mkdir(exist_ok=True)
        shutil.rmtree(aside / str(step), ignore_errors=True)
        (self.folder / str(step)).rename(aside / str(step))
        (self._sums / f"{step}.json").unlink(missing_ok=True)

    def fault(self, step: int) -> str | None:
        """What is wrong with a checkpoint's files, or None."""
        file = self._sums / f"{step}.json"
        if not file.exists():  # The process ended between the save and its sums.
            return f"it has no sums: there is no {file}"
        saved, present = reading.json_value(file.read_text()), _sums(self.folder / str(step))
        for name in sorted(set(saved) | set(present)):
            if saved.get(name) != present.get(name):
                return f"{name} is {'missing' if name not in present else 'changed'}"
        return None

    def load(self, step: int, shapes: TrainState, sharding: Any) -> tuple[TrainState, dict]:
        """The state of a checkpoint and what the loop saved with it.

        The checkpoint is compared with `shapes` before anything is read.
        """
        left_out = self._base.paths
        expected = {"params": _without(shapes.params, left_out), "train": _train_item(shapes)}
        self._compare(step, expected)
        if isinstance(sharding, jax.sharding.Sharding):
            sharding = jax.tree.map(lambda _: sharding, shapes)
        abstract = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            expected,
            {"params": _without(sharding.params, left_out), "train": _train_item(sharding)},
        )
        items = self._load(step, abstract)
        params, train = items["params"], items["train"]
        if left_out:
            base = dict(traverse_util.flatten_dict(self._base.params_fn(), keep_empty_nodes=True))
            params = traverse_util.unflatten_dict(base | traverse_util.flatten_dict(params))
        state = TrainState(train["step"], params, train["model_state"], train["opt_state"])
        return state, self.run(step)

    def arrays(self, step: int) -> tuple[dict, dict]:
        """The items `params` and `train` of a checkpoint as nested dicts, whatever their shapes."""
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shapes = self._shapes(step)
        abstract = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
            {name: shapes[name] for name in ("params", "train")},
        )
        items = self._load(step, abstract)
        return items["params"], items["train"]

    def run(self, step: int) -> dict:
        """What the train loop saved with the state."""
        return reading.json_value(self._notes(step)["run"])

    def best(self) -> int | None:
        """The undamaged step with the highest score, the earliest of equals.

        None if none has a score.
        """

        def find():
            steps = [step for step in self.steps() if self.fault(step) is None]
            scores = {step: self._notes(step)["score"] for step in steps}
            return first_best({k: score for k, score in scores.items() if score is not None})

        return hosts.on_process_0(find)

    def _notes(self, step: int) -> dict:
        return self._metadata(step).custom_metadata

    def _shapes(self, step: int) -> dict:
        return self._metadata(step).metadata

    # Functions that read one checkpoint. `_checkpointer` would read all of them, also damaged ones.
    def _metadata(self, step: int) -> Any:
        from orbax.checkpoint import v1 as ocp

        return ocp.checkpointables_metadata(self.folder / str(step))

    def _load(self, step: int, abstract: dict) -> dict:
        from orbax.checkpoint import v1 as ocp

        # Only the zeros after the rows of classes are cut or added: `_compare` has refused others.
        context = ocp.Context()
        context.array.loading.enable_padding_and_truncation = True
        with context:
            return ocp.load_checkpointables(self.folder / str(step), abstract)

    def _compare(self, step: int, expected: dict) -> None:
        saved = self._shapes(step)
        for item in expected:
            old = {p: tuple(a.shape) for p, a in _flat(saved[item])}
            new = {p: tuple(a.shape) for p, a in _flat(expected[item])}
            for path in sorted(set(old) | set(new)):
                if old.get(path) != new.get(path) and not self._differ_in_zeros(
                    path, old.get(path), new.get(path)
                ):
                    raise Mismatch(
                        f"checkpoint {step} of {self.folder} does not fit: {item}/{path} is "
                        f"{old.get(path, 'missing')} there and {new.get(path, 'unknown')} here"
                    )

    def _differ_in_zeros(self, path: str, *shapes: tuple[int, ...] | None) -> bool:
        """Whether two shapes differ only in the rows after the rows of the classes."""
        if not self._class_rows.contains(path):
            return False
        old, new = shapes
        if not old or not new or old[1:] != new[1:]:
            return False
        # No more devices than classes share them.
        return all(
            0 <= rows - self._class_rows.classes < self._class_rows.classes
            for rows in (old[0], new[0])
        )

    def close(self) -> None:
        self.wait()
        if "_checkpointer" in vars(self):
            self._checkpointer.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None or jax.process_count() == 1:
            self.close()
            return

        # A save that is under way gets only a few seconds, because it may wait for processes that
        # have ended. The block has an error already, so errors of the save do not count.
        def close() -> None:
            with contextlib.suppress(Exception):
                self.close()

        closing = threading.Thread(target=close, daemon=True)
        closing.start()
        closing.join(_CLOSING_SECONDS)


class _Saving:
    """The end of a save, in a thread that does not keep the process alive."""

    def __init__(self, step: int, confirm_fn: Callable[[], None]):
        self.step = step
        self._confirm_fn = confirm_fn
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._confirm_fn()
        except Exception as error:
            self._error = error

    def wait(self) -> None:
        """Returns when the save is confirmed; raises the error that prevented it."""
        self._thread.join()
        if self._error is not None:
            raise self._error


class _NewestWithSums:
    """A policy that keeps the newest checkpoint whose sums are in a folder."""

    def __init__(self, sums: pathlib.Path):
        self._sums = sums

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        del context
        steps = [c.step for c in checkpoints if (self._sums / f"{c.step}.json").exists()]
        return [checkpoint.step == max(steps, default=None) for checkpoint in checkpoints]


def _reason(error: BaseException) -> str:
    """An error in one line."""
    return getattr(error, "strerror", None) or (str(error).strip() or repr(error)).splitlines()[0]


_warn_once = functools.cache(logging.warning)


def _shorten(record: python_logging.LogRecord) -> bool:
    """A filter of what Orbax logs.

    It drops errors that Orbax logs with the stacks of all threads and also raises. With several
    processes, Orbax raises an error only after it has waited for the others, up to 20 minutes. So
    the error that ends a save is logged at once, in one line. In place of a warning at every slow
    save, there is one of ours.
    """
    if str(record.msg).startswith("Waiting for previous save"):
        _warn_once(
            "training waits for checkpoints to be written: a longer checkpoint.every saves fewer"
        )
        return False
    if record.levelno < python_logging.ERROR or "orbax" not in record.pathname:
        return True
    error = record.exc_info and record.exc_info[1]
    if error and record.pathname.endswith("async_checkpointer.py") and jax.process_count() > 1:
        logging.warning("a checkpoint cannot be written: %s", _reason(error))
    return False


def _train_item(state: TrainState) -> dict:
    return {"step": state.step, "model_state": state.model_state, "opt_state": state.opt_state}


def _without(params: Any, paths: Set[str]) -> Any:
    """The parameters, as nested dicts, that do not lie at `paths`."""
    if not paths:
        return params
    flat = traverse_util.flatten_dict(params)
    return traverse_util.unflatten_dict({k: x for k, x in flat.items() if "/".join(k) not in paths})


def _flat(tree: Any) -> list[tuple[str, Any]]:
    return [(path_of(keys), a) for keys, a in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _sums(folder: pathlib.Path) -> dict[str, str]:
    sums = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            sums[str(path.relative_to(folder))] = sha256(path)
    return sums


def delete(folder: str | os.PathLike) -> None:
    """Deletes the checkpoints of `folder` and their sums."""
    folder = pathlib.Path(folder)
    for path in (folder, folder.parent / f"{folder.name}_sums"):
        if path.exists():
            shutil.rmtree(path)
