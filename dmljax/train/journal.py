"""What a run leaves behind while it goes: metrics, speed, a line on the terminal.

`metrics.jsonl` holds what the run computes, one line a report, and nothing that depends on the
machine's mood: interrupted and resumed, it is bit for bit that of a run that never stopped. Speed
and memory go to `speed.jsonl`. Both go to TensorBoard as well.
"""

from __future__ import annotations

import functools
import json
import os
import pathlib
import resource
import time
from collections.abc import Mapping
from typing import Any

import jax
from tensorboardX import SummaryWriter  # here, before JAX computes: it changes the environment

__all__ = ["Log", "read", "table"]


class Log:
    """Writes nothing unless `write`: process 0 logs for all."""

    def __init__(self, workdir: pathlib.Path, *, step: int, total: int, write: bool = True):
        self._write, self._step, self._total = write, step, total
        self._metrics = workdir / "metrics.jsonl"
        self._speed = workdir / "speed.jsonl"
        self._began, self._waited, self._last = time.perf_counter(), 0.0, step
        self._bar = self._board = None
        if not write:
            return
        for path in (self._metrics, self._speed):
            _cut(path, step if step else -1)  # from the start, what is there is of a lost start
        _compilations()
        self._board = SummaryWriter(
            str(workdir / "tensorboard"), purge_step=step + 1 if step else None
        )
        self._bar = _bar(step, total)

    def waited(self, seconds: float) -> None:
        """Time spent waiting for input."""
        self._waited += seconds

    def train(
        self, step: int, metrics: Mapping[str, float], *, batch: int, unreadable: int = 0
    ) -> None:
        """One report of training, and how fast it goes since the last one.

        `unreadable` images have been passed over since this process began.
        """
        seconds = max(time.perf_counter() - self._began, 1e-9)
        done = max(step - self._last, 1)
        speed = {
            "images_per_second": done * batch / seconds,
            "step_seconds": seconds / done,
            "input_wait_seconds": self._waited / done,
            "compute_seconds": (seconds - self._waited) / done,
            "compilations": _compilations()[0],
            "memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        }
        speed |= _device_memory()
        speed |= {"unreadable": unreadable} if unreadable else {}
        self._append(self._metrics, step, metrics, "train")
        self._append(self._speed, step, speed, "speed")
        self.resume(step)
        if self._bar is not None:
            self._bar(step, metrics["loss"], speed["images_per_second"])

    def evaluation(self, step: int, scores: Mapping[str, float], *, split: str = "test") -> None:
        """Scores of a split."""
        named = {f"{split}/{k}": v for k, v in scores.items()}
        self._append(self._metrics, step, named, "evaluation")
        if split != "raw" and step < self._total:  # the last has a table of its own
            best = [f"{k} {100 * scores[k]:.1f}" for k in ("R@1", "MAP@R", "NMI") if k in scores]
            self.say(f"step {step}, {split}: {', '.join(best)}")

    def resume(self, step: int) -> None:
        """What happened since the last report is not training."""
        self._began, self._waited, self._last = time.perf_counter(), 0.0, step

    def say(self, text: str) -> None:
        """A line for the reader."""
        if self._write:
            self._bar.print(text) if self._bar is not None else print(text, flush=True)

    def flush(self) -> None:
        if self._board is not None:
            self._board.flush()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._board is not None:
            self._board.close()

    def _append(
        self, path: pathlib.Path, step: int, values: Mapping[str, float], kind: str
    ) -> None:
        if not self._write:
            return
        with path.open("a") as file:
            file.write(
                json.dumps({"step": step, **{k: float(v) for k, v in values.items()}}) + "\n"
            )
            file.flush()
            os.fsync(file.fileno())
        for name, value in values.items():
            self._board.add_scalar(f"{kind}/{name}", float(value), step)


def _device_memory() -> dict[str, float]:
    """The most that was in use on a device of this process, where devices tell (CPUs do not)."""
    found = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [stats["peak_bytes_in_use"] for stats in found if "peak_bytes_in_use" in stats]
    return {"device_memory_gib": max(peaks) / 2**30} if peaks else {}


@functools.cache
def _compilations() -> list[int]:
    """How often XLA has compiled in this process since the first call."""
    count = [0]

    def heard(event: str, seconds: float, **_) -> None:
        count[0] += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(heard)
    return count


class _bar:
    """A live line on a terminal; elsewhere a plain one at each tenth."""

    def __init__(self, step: int, total: int):
        from rich import console as rich_console
        from rich import progress

        console = rich_console.Console()
        self._live, self._total, self._tenth = console.is_terminal, total, -1
        self._progress = None
        if self._live:
            columns = (
                progress.TextColumn("step {task.completed:>6}/{task.total}"),
                progress.BarColumn(),
                progress.TextColumn("{task.fields[text]}"),
                progress.TimeRemainingColumn(),
            )
            self._progress = progress.Progress(*columns, console=console)
            self._progress.start()
            self._task = self._progress.add_task("train", total=total, completed=step, text="")

    def __call__(self, step: int, loss: float, rate: float) -> None:
        text = f"loss {loss:.4f}  {rate:,.0f} images/s"
        if self._live:
            self._progress.update(self._task, completed=step, text=text)
        elif (tenth := step * 10 // self._total) != self._tenth:
            self._tenth = tenth
            print(f"step {step}/{self._total}  {text}", flush=True)

    def print(self, text: str) -> None:
        self._progress.console.print(text, highlight=False) if self._live else print(
            text, flush=True
        )

    def stop(self) -> None:
        if self._live:
            self._progress.stop()


def _cut(path: pathlib.Path, step: int) -> None:
    """Drops what was reported after the checkpoint that the run goes on from, and torn lines."""
    if not path.exists():
        return
    kept = [line for line in path.read_text().splitlines(keepends=True) if _until(line, step)]
    aside = path.with_suffix(".tmp")
    aside.write_text("".join(kept))
    os.replace(aside, path)


def _until(line: str, step: int) -> bool:
    try:
        return line.endswith("\n") and json.loads(line)["step"] <= step
    except (ValueError, KeyError, TypeError):
        return False


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
    """The lines of a `.jsonl` file."""
    path = pathlib.Path(path)
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def table(scores: Mapping[str, float]) -> str:
    """Scores in two rows, in percent where they are shares."""
    shown = {k: v for k, v in scores.items() if not k.endswith("_std") and not isinstance(v, dict)}
    cells = [(k, f"{v:,}" if isinstance(v, int) else f"{100 * v:.1f}") for k, v in shown.items()]
    widths = [max(len(k), len(v)) for k, v in cells]
    rows = (
        "  ".join(text.rjust(w) for text, w in zip(row, widths, strict=True))
        for row in zip(*cells, strict=True)
    )
    return "\n".join(rows)
