"""Checkpoints that can be trusted: atomic, with a checksum, of one run at a time.

A checkpoint is one folder, named by its step. It holds the items `params` and `train` (step, model
state, optimizer state) and, as JSON, what the train loop needs to continue. Saving is asynchronous:
Orbax writes a temporary folder and renames it. Then the files are flushed to the disk, and their
SHA-256 is written into the folder. A checkpoint whose checksum is missing or differs is reported as
damaged, and the one before it is used. Older checkpoints are deleted only after that.
"""

import concurrent.futures
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
from collections.abc import Callable, Iterator, Set
from typing import Any, ClassVar, NamedTuple

import jax
from absl import logging
from flax import traverse_util

from dmljax.adapt.trees import path_of
from dmljax.files import reading
from dmljax.files.run_folder import first_best
from dmljax.files.writing import make_folder, sha256, sync, write_text
from dmljax.train import hosts
from dmljax.train.devices import ClassRows
from dmljax.train.step import TrainState

_CHECKSUM = "sha256"  # the file in the folder of a checkpoint
_CLOSING_SECONDS = 5


class Base(NamedTuple):
    """Parameters that a run reads but does not change, so that no checkpoint needs to hold them.

    `paths` are theirs, and `params_fn()` gives all parameters of the run before its first step.
    """

    paths: Set[str] = frozenset()
    params_fn: Callable[[], Any] = dict


class Checkpoints:
    """The checkpoints of one run in `folder`: the latest `keep`, and the one with the best score.

    The best score is the highest; of equal scores it is the earliest, as published code saves on
    strict improvement. Only `save` and `restore` change the folder, so that others can read it.
    Parameters of `base` are left out, and taken from there again. Arrays of `class_rows` may have
    more or fewer rows of zeros after the rows of the classes than in the checkpoint, which other
    devices have written.
    """

    _future: ClassVar[concurrent.futures.Future | None] = None  # the save of this process

    def __init__(
        self,
        folder: str | os.PathLike,
        *,
        keep: int = 2,
        base: Base | None = None,
        class_rows: ClassRows = ClassRows(),  # noqa: B008  a tuple
    ):
        python_logging.getLogger("absl").addFilter(_shorten)
        self._base = base or Base()
        self._class_rows = class_rows
        self.folder = pathlib.Path(folder).absolute()
        make_folder(self.folder)
        self._keep = keep
        self._saving: tuple[int, concurrent.futures.Future] | None = None
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
        self.wait()
        score = None if score is None or math.isnan(score) else float(score)
        notes = {"run": json.dumps(run), "score": score}
        future = Checkpoints._future = concurrent.futures.Future()
        with self._writing(step):
            response = ocp.save_checkpointables_async(
                self.folder / str(step),
                self._items(state),
                custom_metadata=notes,
                overwrite=overwrite,
            )
        self._saving = step, future

        def confirm() -> None:
            with contextlib.suppress(concurrent.futures.InvalidStateError):  # see `_shorten`
                try:
                    self._confirm(response, step)
                    future.set_result(None)
                except Exception as error:
                    future.set_exception(error)

        # A thread that does not keep the process alive.
        threading.Thread(target=confirm, daemon=True).start()

    def _items(self, state: Any) -> dict[str, Any]:
        """Returns the items of a checkpoint; `state` may hold shapes or shardings."""
        train = state._asdict()
        params = train.pop("params")
        if self._base.paths:
            flat = traverse_util.flatten_dict(params)
            flat = {k: x for k, x in flat.items() if "/".join(k) not in self._base.paths}
            params = traverse_util.unflatten_dict(flat)
        return {"params": params, "train": train}

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
            with self._writing(saving[0]):
                saving[1].result()

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

    def restore(self, shapes: TrainState, sharding: Any) -> tuple[TrainState, dict] | None:
        """Loads the newest undamaged checkpoint, to go on; returns None if there is none.

        `shapes` is the state as `jax.eval_shape` gives it. `sharding` is one sharding for all
        arrays, or a state of shardings; the devices may be others than in the run that saved.
        Damaged checkpoints are removed, because the run writes those steps again.
        """
        step = hosts.on_process_0(self._newest_of_repaired)
        if step is None:
            return None
        restored = self.load(step, shapes, sharding)
        self._last = step
        return restored

    def newest(self) -> int | None:
        """Returns the newest undamaged step; None if there is none."""
        steps = reversed(self.steps())
        return next((step for step in steps if self.fault(step) is None), None)

    def _newest_of_repaired(self) -> int | None:
        for path in self.folder.glob("*tmp*"):  # a killed process left it
            shutil.rmtree(path)
        for step in self.steps():
            if fault := self.fault(step):
                logging.warning("checkpoint %s is damaged (%s): it is not used", step, fault)
                _remove(self.folder / str(step))
        return max(self.steps(), default=None)

    def fault(self, step: int) -> str | None:
        """Describes what is wrong with the files of a checkpoint; returns None if they are good."""
        folder = self.folder / str(step)
        try:
            is_good = (folder / _CHECKSUM).read_text() == _checksum(folder)
        except FileNotFoundError:  # The process ended between the save and its checksum.
            return "its checksum is missing"
        return None if is_good else "its files differ from their checksum"

    def load(self, step: int, shapes: TrainState, sharding: Any) -> tuple[TrainState, dict]:
        """Returns the state of a checkpoint and what the loop saved with it.

        Compares the checkpoint with `shapes` before it reads anything.
        """
        expected = self._items(shapes)
        self._compare(step, expected)
        if isinstance(sharding, jax.sharding.Sharding):
            sharding = jax.tree.map(lambda _: sharding, shapes)
        items = self._load(step, expected, self._items(sharding))
        params, train = items["params"], items["train"]
        if self._base.paths:
            base = dict(traverse_util.flatten_dict(self._base.params_fn(), keep_empty_nodes=True))
            params = traverse_util.unflatten_dict(base | traverse_util.flatten_dict(params))
        return TrainState(params=params, **train), self.run(step)

    def arrays(self, step: int) -> tuple[dict, dict]:
        """Reads the items `params` and `train` as nested dicts, whatever their shapes."""
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        saved = self._metadata(step).metadata
        shapes = {name: saved[name] for name in ("params", "train")}
        items = self._load(step, shapes, jax.tree.map(lambda _: here, shapes))
        return items["params"], items["train"]

    def run(self, step: int) -> dict:
        """Returns what the train loop saved with the state."""
        return reading.json_value(self._metadata(step).custom_metadata["run"])

    def best(self) -> int | None:
        """Returns the undamaged step with the highest score, the earliest of equals.

        None if none has a score.
        """
        return hosts.on_process_0(
            lambda: self._best_of([step for step in self.steps() if self.fault(step) is None])
        )

    def _best_of(self, steps: list[int]) -> int | None:
        scores = {step: self._metadata(step).custom_metadata["score"] for step in steps}
        return first_best({step: x for step, x in scores.items() if x is not None})

    def _metadata(self, step: int) -> Any:
        from orbax.checkpoint import v1 as ocp

        return ocp.checkpointables_metadata(self.folder / str(step))

    def _load(self, step: int, shapes: dict, shardings: dict) -> dict:
        from orbax.checkpoint import v1 as ocp

        abstract = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), shapes, shardings
        )
        # Only the zeros after the rows of classes are cut or added: `_compare` has refused others.
        context = ocp.Context()
        context.array.loading.enable_padding_and_truncation = True
        with context:
            return ocp.load_checkpointables(self.folder / str(step), abstract)

    def _compare(self, step: int, expected: dict) -> None:
        saved = self._metadata(step).metadata
        trees = ({item: saved[item] for item in expected}, expected)
        old, new = (
            {path_of(keys): tuple(a.shape) for keys, a in jax.tree.leaves_with_path(tree)}
            for tree in trees
        )
        for path in sorted(old | new):
            there, here = old.get(path, "missing"), new.get(path, "unknown")
            if there != here and not self._differ_in_zeros(path, old.get(path), new.get(path)):
                raise ValueError(
                    f"checkpoint {step} of {self.folder} does not fit: {path} is {there} there "
                    f"and {here} here"
                )

    def _differ_in_zeros(self, path: str, *shapes: tuple[int, ...] | None) -> bool:
        """Returns True if two shapes differ only in the rows after the rows of the classes."""
        if not self._class_rows.contains(path) or not all(shapes):
            return False
        (old, *old_sides), (new, *new_sides) = shapes  # type: ignore[misc]
        classes = self._class_rows.classes  # no more devices than classes share them
        return old_sides == new_sides and all(classes <= x < 2 * classes for x in (old, new))

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None or jax.process_count() == 1:
            self.wait()
        elif self._saving is not None:
            # A save that is under way gets only a few seconds, because it may wait for processes
            # that have ended. The block has an error already, so errors of the save do not count.
            with contextlib.suppress(Exception):
                self._saving[1].result(_CLOSING_SECONDS)


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
    if error and jax.process_count() > 1 and (future := Checkpoints._future) is not None:
        with contextlib.suppress(concurrent.futures.InvalidStateError):
            future.set_exception(error)
        _warn_once("a checkpoint cannot be written: %s", _reason(error))
    return False


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
