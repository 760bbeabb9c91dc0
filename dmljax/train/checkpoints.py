"""Checkpoints that can be trusted: atomic, checksummed, of one run at a time.

A checkpoint is the items `params` and `train` (step, model state, optimizer state) and, as JSON,
what the train loop wants to find again, in one folder named by its step. Saving is asynchronous.
When a save is finished, SHA-256 sums of its files are written beside it; a folder whose files
differ from them is named and passed over for the one before.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging as python_logging
import os
import pathlib
import shutil
import threading
from collections.abc import Iterator
from typing import Any

import jax
from absl import logging

from dmljax.train import hosts
from dmljax.train.devices import path_of
from dmljax.train.step import TrainState

__all__ = ["Checkpoints", "Damaged", "forget", "lock"]

_PATIENCE = 5  # seconds


class Damaged(ValueError):
    """No checkpoint of a folder can be used, or one does not fit the run."""


def lock(workdir: pathlib.Path) -> Any:
    """Keeps other processes from `workdir` for as long as the returned file is open.

    The system drops the lock with the process, however it ends: there are no stale locks.
    """
    file = (workdir / "lock").open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        owner = file.read().strip() or "another process"
        file.close()
        raise ValueError(
            f"{workdir} is in use by {owner}: wait for it, end it, or choose another --workdir"
        ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}")
    file.flush()
    return file


class Checkpoints:
    """The checkpoints of one run in `folder`: the latest `keep`, and the best by `run['score']`.

    `reading` leaves alone what another process may be writing.
    """

    def __init__(self, folder: str | os.PathLike, *, keep: int = 2, reading: bool = False):
        from orbax.checkpoint import v1 as ocp

        python_logging.getLogger("absl").addFilter(_told_elsewhere)
        self.folder = pathlib.Path(folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        policies = ocp.training.preservation_policies
        best = policies.BestN(get_metric_fn=lambda m: m["score"], n=1)
        self._sums = self.folder.parent / f"{self.folder.name}_sums"
        self._pending: list[int] = []
        self._last = -1  # on which all processes agree; what each sees of a folder may differ
        self._checkpointer = ocp.training.Checkpointer(
            self.folder,
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
            cleanup_tmp_directories=not reading,
        )

    def steps(self) -> list[int]:
        """Finished checkpoints, oldest first."""
        return sorted(int(p.name) for p in self.folder.iterdir() if p.name.isdecimal())

    def save(self, state: TrainState, run: dict[str, Any], *, score: float | None = None) -> None:
        """Begins to save; a step that is there already is left as it is."""
        step = int(state.step)
        if step == self._last:
            return
        self._last = step
        self.wait()
        items = {
            "params": state.params,
            "train": _train_item(state),
        }
        metrics = {"score": -1.0 if score is None else float(score)}
        notes = {"run": json.dumps(run), **metrics}
        with self._writing(step):
            self._checkpointer.save_checkpointables_async(
                step, items, metrics=metrics, custom_metadata=notes
            )
        self._pending.append(step)

    @contextlib.contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """Says which checkpoint it is that cannot be written; what is half written never counts."""
        try:
            yield
        except Exception as error:
            self._pending.clear()
            reason = getattr(error, "strerror", None) or str(error).strip().splitlines()[0]
            before = [other for other in self.steps() if other != step]
            onward = f"goes on from step {before[-1]}" if before else "begins again"
            raise OSError(
                f"checkpoint {step} cannot be written to {self.folder}: {reason}. Make room there "
                f"(or lower checkpoint.keep) or mend it, then the same command {onward}"
            ) from error

    def wait(self) -> None:
        """Until what was begun is on the disk, with its sums."""
        if not self._pending:
            return
        with self._writing(self._pending[-1]):
            self._checkpointer.wait()
            if jax.process_index() == 0:
                self._write_sums()
        self._pending.clear()

    def _write_sums(self) -> None:
        self._sums.mkdir(exist_ok=True)
        there = self.steps()
        for step in self._pending:
            if step in there:
                _write_json(self._sums / f"{step}.json", _sums(self.folder / str(step)))
        for file in self._sums.glob("*.json"):
            if int(file.stem) not in there:
                file.unlink()

    def restore(
        self, shapes: TrainState, sharding: Any, *, repair: bool = False
    ) -> tuple[TrainState, dict] | None:
        """The newest checkpoint that is whole, placed by `sharding`, whatever devices it was saved
        from; None if there is none. `sharding` is one for all arrays, or a state of them.

        `shapes` is what `jax.eval_shape` says the state is. `repair` puts damaged ones aside, so
        that the run can write those steps again.
        """
        step = hosts.first(lambda: self._newest(repair))
        if repair:
            self._checkpointer.reload()
        if step is None:
            return None
        found = self.load(step, shapes, sharding)
        self._last = step
        return found

    def _newest(self, repair: bool) -> int | None:
        for step in reversed(self.steps()):
            fault = self.fault(step)
            if fault is None:
                return step
            logging.warning("checkpoint %s is damaged (%s): the one before is used", step, fault)
            if repair:
                self._put_aside(step)
        return None

    def _put_aside(self, step: int) -> None:
        aside = self.folder.parent / f"{self.folder.name}_damaged"
        aside.mkdir(exist_ok=True)
        shutil.rmtree(aside / str(step), ignore_errors=True)
        (self.folder / str(step)).rename(aside / str(step))
        (self._sums / f"{step}.json").unlink(missing_ok=True)

    def fault(self, step: int) -> str | None:
        """What is wrong with a checkpoint's files, or None."""
        file = self._sums / f"{step}.json"
        if not file.exists():  # the process ended between the save and its sums
            return None
        wanted, found = json.loads(file.read_text()), _sums(self.folder / str(step))
        for name in sorted(set(wanted) | set(found)):
            if wanted.get(name) != found.get(name):
                return f"{name} is {'missing' if name not in found else 'changed'}"
        return None

    def load(self, step: int, shapes: TrainState, sharding: Any) -> tuple[TrainState, dict]:
        """One checkpoint, compared with `shapes` before anything is read."""
        wanted = {"params": shapes.params, "train": _train_item(shapes)}
        self._compare(step, wanted)
        if isinstance(sharding, jax.sharding.Sharding):
            sharding = jax.tree.map(lambda _: sharding, shapes)
        abstract = jax.tree.map(
            lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s),
            wanted,
            {"params": sharding.params, "train": _train_item(sharding)},
        )
        found = self._checkpointer.load_checkpointables(step, abstract)
        train = found["train"]
        state = TrainState(train["step"], found["params"], train["model_state"], train["opt_state"])
        return state, self.run(step)

    def run(self, step: int) -> dict:
        """What `save` was told about the run."""
        return json.loads(self._notes(step)["run"])

    def best(self) -> int:
        """The step with the highest score; the later one of equals."""

        def find():
            scored = {step: self._notes(step)["score"] for step in self.steps()}
            return max(scored, key=lambda step: (scored[step], step))

        return hosts.first(find)

    def _notes(self, step: int) -> dict:
        return self._checkpointer.checkpointables_metadata(step).custom_metadata

    def _shapes(self, step: int) -> dict:
        return self._checkpointer.checkpointables_metadata(step).metadata

    def _compare(self, step: int, wanted: dict) -> None:
        found = self._shapes(step)
        for item in wanted:
            have = {p: tuple(a.shape) for p, a in _flat(found[item])}
            want = {p: tuple(a.shape) for p, a in _flat(wanted[item])}
            for path in sorted(set(have) | set(want)):
                if have.get(path) != want.get(path):
                    raise Damaged(
                        f"checkpoint {step} of {self.folder} does not fit: {item}/{path} is "
                        f"{have.get(path, 'missing')} there and {want.get(path, 'unknown')} here"
                    )

    def close(self) -> None:
        self.wait()
        self._checkpointer.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None or jax.process_count() == 1:
            self.close()
            return
        # A save that is under way is worth some seconds, but the other processes may be gone.
        closing = threading.Thread(target=self.close, daemon=True)
        closing.start()
        closing.join(_PATIENCE)


def _told_elsewhere(record: python_logging.LogRecord) -> bool:
    """False for errors that orbax logs, with all of the stack in each thread, and then raises."""
    return record.levelno < python_logging.ERROR or "orbax" not in record.pathname


def _train_item(state: TrainState) -> dict:
    return {"step": state.step, "model_state": state.model_state, "opt_state": state.opt_state}


def _flat(tree: Any) -> list[tuple[str, Any]]:
    return [(path_of(keys), a) for keys, a in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _sums(folder: pathlib.Path) -> dict[str, str]:
    out = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            out[str(path.relative_to(folder))] = digest
    return out


def _write_json(path: pathlib.Path, content: Any) -> None:
    aside = path.with_suffix(".tmp")
    with aside.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)


def forget(folder: str | os.PathLike) -> None:
    """Deletes the checkpoints of `folder` and their sums."""
    folder = pathlib.Path(folder)
    for path in (folder, folder.parent / f"{folder.name}_sums"):
        if path.exists():
            shutil.rmtree(path)
