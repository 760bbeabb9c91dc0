"""What a run reports: metrics, speed, lines on the terminal, and its result.

`metrics.jsonl` holds what the run computes, one line per report. A run that was interrupted and
resumed writes the same bytes as one that was not (on GPUs with `runtime.deterministic`). Speed and
memory are in `speed.jsonl`. TensorBoard gets both. `result.json` (`files.run_folder`) is written
after the last evaluation, or when the run fails.
"""

import collections
import contextlib
import functools
import importlib.metadata
import json
import os
import pathlib
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from tensorboardX import SummaryWriter  # here, before JAX computes: it changes the environment

import dmljax
from dmljax.files import reading
from dmljax.files.run_folder import Chosen, Evaluated, Result, RunFolder, read_if_any, write
from dmljax.files.writing import sync, write_text
from dmljax.hints import Progress
from dmljax.train import compilation

# With more steps in flight, the collectives of several CPU devices deadlock.
_IN_FLIGHT = 2


class Journal:
    """Reports a run from step `step` on. Writes nothing unless `write`: process 0 logs for all.

    `repeats_evaluation`: the evaluation after `step` follows, so lines of it are discarded.
    """

    def __init__(
        self,
        workdir: pathlib.Path,
        *,
        step: int,
        total: int,
        write: bool = True,
        repeats_evaluation: bool = False,
    ):
        self._total = total
        files = RunFolder(workdir)
        self._metrics, self._speed = files.metrics, files.speed
        self._progress = self._board = None
        self.restart_clock(step)
        if not write:
            return
        for path in (self._metrics, self._speed):
            # At step 0, discard lines left by a run that died before its first checkpoint.
            _cut(path, step if step else -1, repeats_evaluation=repeats_evaluation)
        compilation.compiled()  # counts from here on
        # By default every two minutes. `SummaryWriter.flush` does not wait for the last events.
        self._board = SummaryWriter(
            str(files.tensorboard), purge_step=step + 1 if step else None, flush_secs=1
        )
        self._progress = Progress("step", total, start=step, stream=sys.stdout)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside the block as waiting for input."""
        start = time.perf_counter()
        yield
        self._waited += time.perf_counter() - start

    def first_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows the loss of the first step, because the first report may be minutes away."""
        if self._progress is not None:
            self._progress.update(step, f"loss {metrics['loss']:.4f}")

    def train(
        self, step: int, metrics: Mapping[str, float], *, batch: int, unreadable: int = 0
    ) -> None:
        """Logs the metrics of training, and the speed since the last call.

        `unreadable` is the number of images that this process has skipped.
        """
        seconds = max(time.perf_counter() - self._start, 1e-9)
        steps, compiled = max(step - self._last_step, 1), compilation.compiled()
        speed = {
            "images_per_second": steps * batch / seconds,
            "step_seconds": seconds / steps,
            "input_wait_seconds": self._waited / steps,
            "compute_seconds": (seconds - self._waited) / steps,
            "compilations": compiled.programs,
            "compile_seconds": compiled.seconds,
            "memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        }
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        if peaks := [x["peak_bytes_in_use"] for x in stats if "peak_bytes_in_use" in x]:
            speed["device_memory_gib"] = max(peaks) / 2**30
        speed |= {"unreadable": unreadable} if unreadable else {}
        self._append(self._metrics, step, metrics, "train")
        self._append(self._speed, step, speed, "speed")
        self.restart_clock(step)
        if self._progress is not None:
            text = f"loss {metrics['loss']:.4f}  {speed['images_per_second']:,.0f} images/s"
            self._progress.update(step, text)

    def evaluation(
        self, step: int, scores: Mapping[str, float], *, split: str = "test", shown: str = ""
    ) -> None:
        """Logs the scores of a split; prints the main ones and the score `shown`."""
        named = {f"{split}/{name}": value for name, value in scores.items()}
        self._append(self._metrics, step, named, "evaluation")
        if step and step < self._total:  # the last evaluation is printed as a table
            names = dict.fromkeys(["R@1", "MAP@R", "NMI", shown])
            values = [f"{name} {100 * scores[name]:.1f}" for name in names if name in scores]
            self.say(f"step {step}, {split}: {', '.join(values)}")

    def projector(
        self, step: int, embeddings: np.ndarray, classes: Sequence[str], *, count: int
    ) -> None:
        """Writes `count` embeddings and their classes for TensorBoard's projector.

        Takes the same images at every step, and leaves out rows of NaN.
        """
        if self._board is not None:
            rows = np.flatnonzero(np.isfinite(embeddings).all(axis=1))
            rows = np.sort(np.random.default_rng(0).permutation(rows)[:count])
            # A table of one column: tabs and line breaks would end a cell.
            names = [" ".join(classes[int(row)].split()) or "?" for row in rows]
            self._board.add_embedding(embeddings[rows], names, global_step=step, tag="test")

    def restart_clock(self, step: int) -> None:
        """Leaves the time since the last report, such as an evaluation, out of the speed."""
        self._start, self._waited, self._last_step = time.perf_counter(), 0.0, step

    def say(self, text: str) -> None:
        """Prints a line."""
        if self._progress is not None:
            self._progress.print(text)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.close()
        if self._board is not None:
            self._board.close()

    def _append(
        self, path: pathlib.Path, step: int, values: Mapping[str, float], kind: str
    ) -> None:
        if self._board is None:
            return
        numbers = {name: float(value) for name, value in values.items()}
        is_new = not path.exists()
        with path.open("a") as file:
            file.write(json.dumps({"step": step, **numbers}) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync(path.parent)
        for name, value in numbers.items():
            self._board.add_scalar(f"{kind}/{name}", value, step)


def _cut(path: pathlib.Path, step: int, *, repeats_evaluation: bool) -> None:
    """Drops torn lines, and lines after the step from which the run continues."""
    if not path.exists():
        return
    dropped, kept = ("test/", "val/") if repeats_evaluation else (), []
    for line in path.read_text().splitlines(keepends=True):
        with contextlib.suppress(ValueError, KeyError, TypeError):
            row = reading.json_value(line)
            is_dropped = row["step"] == step and any(name.startswith(dropped) for name in row)
            if line.endswith("\n") and row["step"] <= step and not is_dropped:
                kept.append(line)
    write_text(path, "".join(kept))


read = reading.json_lines  # of metrics.jsonl and speed.jsonl


def table(scores: Mapping[str, float]) -> str:
    """Formats scores in two rows; fractions are printed in percent.

    Scores of parts, such as 'learner_0/R@1', follow in a row for each part.
    """
    parts: dict[str, dict[str, float]] = {"": {}}  # the scores of the whole come first
    for name, value in scores.items():
        if not name.endswith("_std") and not isinstance(value, dict):
            part, _, score = name.rpartition("/")
            parts.setdefault(part, {})[score] = value
    tables: dict[tuple, list[list[str]]] = {}
    for part, values in parts.items():
        if values:
            rows = tables.setdefault((not part, *values), [["", *values]])
            rows.append([part, *map(_cell, values.values())])
    return "\n".join(_rows([row[key[0] :] for row in rows]) for key, rows in tables.items())


def _cell(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{100 * value:.1f}"


def _rows(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(text.rjust(w) for text, w in zip(row, widths, strict=True)) for row in rows
    )


class Diverged(FloatingPointError):
    """The loss or the gradient of `step` is not finite."""

    def __init__(self, message: str, *, step: int):
        super().__init__(message)
        self.step = step


class PendingMetrics:
    """The metrics of steps that the devices may still be computing.

    `step` is the last step whose loss and gradient are known to be finite.
    """

    def __init__(self, step: int):
        self._finite_until = step
        self._pending: collections.deque[tuple[int, Any]] = collections.deque()

    def add(self, step: int, metrics: Any) -> None:
        """Adds what a step has returned: metrics and the signal, on the devices."""
        self._pending.append((step, metrics))

    def fetch(self, *, all_steps: bool = False) -> Iterator[tuple[int, dict[str, float], int]]:
        """Yields `(step, metrics, signal)` of finished steps; waits for all with `all_steps`.

        Raises a one-line error where the loss or the gradient is not finite.
        """
        while len(self._pending) > (0 if all_steps else _IN_FLIGHT):
            step, on_devices = self._pending.popleft()
            metrics, signal = jax.device_get(on_devices)
            metrics = {name: float(value) for name, value in metrics.items()}
            for name in ("loss", "gradient_norm"):
                if not np.isfinite(metrics[name]):
                    last = self._finite_until
                    before = f"finite until step {last}" if last else "from the start"
                    raise Diverged(
                        f"the {name} is {metrics[name]} at step {step} ({before}): the last "
                        "checkpoint is good. Lower optimizer.rate, set optimizer.clip, or look at "
                        "the images of that step",
                        step=step,
                    )
            self._finite_until = step
            yield step, metrics, int(signal)


def mean(window: list[dict[str, float]]) -> dict[str, float]:
    """Averages every metric over several steps."""
    return {name: float(np.mean([metrics[name] for metrics in window])) for name in window[-1]}


class Report:
    """Writes the result of one run: `finished`, or `failed` with an error."""

    def __init__(
        self, workdir: pathlib.Path, *, source: str, digests: Mapping[str, str | None], start: float
    ):
        """Reads versions and devices; `start` is the `time.monotonic` at which the run began."""
        config, _, argument = source.partition(":")
        self._workdir, self._start = workdir, start
        device = jax.devices()[0]
        packages = ("jax", "jaxlib", "flax", "optax", "numpy")
        self._facts: dict[str, Any] = {
            "config": pathlib.Path(config).stem,
            "argument": argument,
            "digests": dict(digests),
            "devices": {
                "count": jax.device_count(),
                "platform": device.platform,
                "kind": device.device_kind,
                "processes": jax.process_count(),
                "host": platform.node(),
            },
            "versions": {"dmljax": dmljax.__version__, "python": platform.python_version()}
            | {name: importlib.metadata.version(name) for name in packages},
            "code": code(),  # now: files may change while the run lasts
        }
        self.earlier_seconds = 0.0  # of the processes before this one
        present = read_if_any(workdir)
        if jax.process_index() == 0 and (present is None or present.status != "finished"):
            RunFolder(workdir).result.unlink(missing_ok=True)  # what an earlier process failed with

    def seconds(self) -> float:
        """Returns the seconds that this run has taken so far."""
        return self.earlier_seconds + time.monotonic() - self._start

    def finished(self, chosen: Chosen, scores: Mapping[str, float], **facts: Any) -> None:
        """Writes the result of a run that came to its end."""
        step = max((row["step"] for row in self._rows()), default=chosen.step)
        self._write("finished", step=step, chosen=chosen, scores=dict(scores), **facts)

    def failed(self, error: Exception, **facts: Any) -> None:
        """Writes that a run ended with an error, if the folder can be written."""
        status = "diverged" if isinstance(error, FloatingPointError) else "failed"
        facts["message"] = " ".join(str(error).split()) or type(error).__name__
        with contextlib.suppress(OSError):
            self._write(status, step=getattr(error, "step", None), chosen=None, scores={}, **facts)

    def _rows(self) -> list[dict[str, Any]]:
        return read(RunFolder(self._workdir).metrics)

    def _write(self, status: str, message: str = "", **facts: Any) -> None:
        if jax.process_index() == 0:
            scores: dict[int, dict[str, float | None]] = {}
            for row in self._rows():
                if values := {k: v for k, v in row.items() if k.startswith(("test/", "val/"))}:
                    scores.setdefault(row["step"], {}).update(values)
            facts |= self._facts | {"status": status, "message": message}
            facts["evaluations"] = [Evaluated(step, scores[step]) for step in sorted(scores)]
            write(self._workdir, Result(**facts, wall_seconds=self.seconds()))


@functools.cache
def code() -> dict[str, Any] | None:
    """Returns the git revision of dmljax, and if files differ from it; None outside of git."""
    folder = pathlib.Path(dmljax.__file__).parent
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    revision = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--", ".")
    return None if revision is None else {"revision": revision, "dirty": bool(changes)}


def _git(folder: pathlib.Path, *words: str) -> str | None:
    """Returns what git prints, or None if it fails or is not installed."""
    try:
        process = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True)
    except OSError:
        return None
    return process.stdout.strip() if process.returncode == 0 else None
