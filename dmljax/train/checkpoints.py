"""Checkpoints that can be trusted: atomic, with a checksum, of one run at a time.

A checkpoint is one folder, named by its step. It holds the items `params` and `train` (step, model
state, optimizer state) and, as JSON, what the train loop needs to continue. Saving is asynchronous:
Orbax writes a temporary folder and renames it. Then the files are flushed to the disk, and their
SHA-256 is written into the folder. A checkpoint whose checksum is missing or differs is reported as
damaged, and the one before it is used. Older checkpoints are deleted only after that.
"""

import contextlib
import functools
import hashlib
import json
import logging as python_logging
import math
import os
import pathlib
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Set
from typing import Any, NamedTuple

import jax
from absl import logging
from flax import traverse_util

from dmljax.adapt import path_of
from dmljax.files import reading
from dmljax.files.result import first_best
from dmljax.files.writing import make_folder, sha256, sync, write_text
from dmljax.train import hosts
from dmljax.train.devices import ClassRows
from dmljax.train.step import TrainState

_CHECKSUM = "sha256"  # the file in the folder of a checkpoint
_CLOSING_SECONDS = 5
_POLL_SECONDS = 0.2
_SLOW_SECONDS = 1.0  # that a step waits for the save before it until a warning says so


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
        self._saving: _Saving | None = None
        self._scores: dict[int, float | None] = {}  # of steps whose score was needed already
        # The step that was saved last. All processes must agree on it, although a shared folder may
        # look different to each of them.
        self._last = -1

    def steps(self) -> list[int]:
        """Lists the finished checkpoints, oldest first."""
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
        from orbax.checkpoint import v1 as ocp

        step = int(state.step)
        if step == self._last and not overwrite:
            return
        self._last = step
        start = time.monotonic()
        self.wait()
        if time.monotonic() - start > _SLOW_SECONDS:
            _warn_once(
                "training waits for checkpoints to be written: a longer checkpoint.every saves "
                "fewer"
            )
        items = {
            "params": _without(state.params, self._base.paths),
            "train": _train_item(state),
        }
        self._scores[step] = None if score is None or math.isnan(score) else float(score)
        notes = {"run": json.dumps(run), "score": self._scores[step]}
        with self._writing(step):
            response = ocp.save_checkpointables_async(
                self.folder / str(step), items, custom_metadata=notes, overwrite=overwrite
            )
        self._saving = _Saving(step, functools.partial(self._confirm, response, step))

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
        """Waits until all saves are on the disk, with their checksums."""
        saving, self._saving = self._saving, None
        if saving is not None:
            with self._writing(saving.step):
                saving.wait()

    def _confirm(self, response: Any, step: int) -> None:
        """Waits for a save, flushes it, writes its checksum, and deletes older checkpoints."""
        response.result()
        if jax.process_index():
            return
        folder = self.folder / str(step)
        for path in (*folder.rglob("*"), folder, self.folder):
            sync(path)
        write_text(folder / _CHECKSUM, _checksum(folder))
        best = self._best_of(self.steps())
        for other in self.steps()[: -self._keep]:
            if other != best:
                _remove(self.folder / str(other))

    def restore(
        self, shapes: TrainState, sharding: Any, *, repair: bool = False
    ) -> tuple[TrainState, dict] | None:
        """Loads the newest undamaged checkpoint; returns None if there is none.

        `shapes` is the state as `jax.eval_shape` gives it. `sharding` is one sharding for all
        arrays, or a state of shardings; the devices may be others than in the run that saved.
        `repair` moves all damaged checkpoints aside, so that the run can write those steps again.
        """
        step = hosts.on_process_0(lambda: self._newest(repair))
        if step is None:
            return None
        restored = self.load(step, shapes, sharding)
        self._last = step
        return restored

    def _newest(self, repair: bool) -> int | None:
        newest = None
        for step in reversed(self.steps()):
            if newest is not None and not repair:
                break
            if (fault := self.fault(step)) is None:
                newest = step if newest is None else newest
                continue
            effect = "the one before is used" if newest is None else "it is not used"
            logging.warning("checkpoint %s is damaged (%s): %s", step, fault, effect)
            if repair:
                aside = self.folder.parent / f"{self.folder.name}_damaged" / str(step)
                make_folder(aside.parent)
                shutil.rmtree(aside, ignore_errors=True)
                (self.folder / str(step)).rename(aside)
        if repair:  # Remove what a killed process left: temporary folders.
            for path in self.folder.glob("*tmp*"):
                shutil.rmtree(path)
        return newest

    def fault(self, step: int) -> str | None:
        """Describes what is wrong with the files of a checkpoint; returns None if they are good."""
        folder = self.folder / str(step)
        try:
            expected = (folder / _CHECKSUM).read_bytes()
        except FileNotFoundError:  # The process ended between the save and its checksum.
            return "its checksum is missing"
        return (
            None
            if expected == _checksum(folder).encode()
            else "its files differ from their checksum"
        )

    def load(self, step: int, shapes: TrainState, sharding: Any) -> tuple[TrainState, dict]:
        """Returns the state of a checkpoint and what the loop saved with it.

        Compares the checkpoint with `shapes` before it reads anything.
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
        """Reads the items `params` and `train` as nested dicts, whatever their shapes."""
        sharding = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shapes = self._shapes(step)
        abstract = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
            {name: shapes[name] for name in ("params", "train")},
        )
        items = self._load(step, abstract)
        return items["params"], items["train"]

    def run(self, step: int) -> dict:
        """Returns what the train loop saved with the state."""
        return reading.json_value(self._notes(step)["run"])

    def best(self) -> int | None:
        """Returns the undamaged step with the highest score, the earliest of equals.

        None if none has a score.
        """

        def find():
            return self._best_of([step for step in self.steps() if self.fault(step) is None])

        return hosts.on_process_0(find)

    def _best_of(self, steps: list[int]) -> int | None:
        for step in set(steps) - set(self._scores):
            self._scores[step] = self._notes(step)["score"]
        scores = {step: self._scores[step] for step in steps}
        return first_best({step: x for step, x in scores.items() if x is not None})

    def _notes(self, step: int) -> dict:
        return self._metadata(step).custom_metadata

    def _shapes(self, step: int) -> dict:
        return self._metadata(step).metadata

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
        """Returns True if two shapes differ only in the rows after the rows of the classes."""
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

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None or jax.process_count() == 1:
            self.wait()
        elif self._saving is not None:
            # A save that is under way gets only a few seconds, because it may wait for processes
            # that have ended. The block has an error already, so errors of the save do not count.
            self._saving.join(_CLOSING_SECONDS)


class _Saving:
    """The end of a save, in a thread that does not keep the process alive."""

    logged_error: BaseException | None = None  # what Orbax has logged in this process: `_shorten`

    def __init__(self, step: int, confirm_fn: Callable[[], None]):
        self.step = step
        self._confirm_fn = confirm_fn
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.join = self._thread.join

    def _run(self) -> None:
        try:
            self._confirm_fn()
        except Exception as error:
            self._error = error

    def wait(self) -> None:
        """Returns when the save is confirmed; raises the error that prevented it."""
        while self._thread.is_alive() and self.logged_error is None:
            self.join(_POLL_SECONDS)
        if (error := self._error or self.logged_error) is not None:
            raise error


def _reason(error: BaseException) -> str:
    """Describes an error in one line."""
    return getattr(error, "strerror", None) or (str(error).strip() or repr(error)).splitlines()[0]


_warn_once = functools.cache(logging.warning)


def _shorten(record: python_logging.LogRecord) -> bool:
    """Filters what Orbax logs: it logs errors with the stacks of all threads, and raises them too.

    With several processes, Orbax raises an error only after it has waited for the others, up to 20
    minutes. So the error that ends a save is logged at once, in one line, and ends the wait for it.
    """
    if record.levelno < python_logging.ERROR or "orbax" not in record.pathname:
        return True
    error = record.exc_info and record.exc_info[1]
    if error and jax.process_count() > 1:
        _Saving.logged_error = error
        _warn_once("a checkpoint cannot be written: %s", _reason(error))
    return False


def _train_item(state: TrainState) -> dict:
    return {"step": state.step, "model_state": state.model_state, "opt_state": state.opt_state}


def _without(params: Any, paths: Set[str]) -> Any:
    """Returns the parameters, as nested dicts, that do not lie at `paths`."""
    if not paths:
        return params
    flat = traverse_util.flatten_dict(params)
    return traverse_util.unflatten_dict({k: x for k, x in flat.items() if "/".join(k) not in paths})


def _flat(tree: Any) -> list[tuple[str, Any]]:
    return [(path_of(keys), a) for keys, a in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _checksum(folder: pathlib.Path) -> str:
    """Computes one hash of the names and the contents of all files in a checkpoint."""
    total = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != _CHECKSUM:
            total.update(f"{path.relative_to(folder)}\0{sha256(path)}\n".encode())
    return total.hexdigest()


def _remove(folder: pathlib.Path) -> None:
    """Removes a checkpoint; a killed process leaves either all of it or none under its name."""
    doomed = folder.with_name(f"{folder.name}.tmp-removed")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed)
