"""Metrics of train steps, left on the devices for a few steps, then fetched and checked."""

import collections
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

# With more steps in flight, the collectives of several CPU devices deadlock.
_IN_FLIGHT = 2


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
            _check_finite(step, metrics, self._finite_until)
            self._finite_until = step
            yield step, metrics, int(signal)


def _check_finite(step: int, metrics: dict[str, float], finite_until: int) -> None:
    for name in ("loss", "gradient_norm"):
        if not np.isfinite(metrics[name]):
            before = f"finite until step {finite_until}" if finite_until else "from the start"
            raise Diverged(
                f"the {name} is {metrics[name]} at step {step} ({before}): the last checkpoint is "
                "good. Lower optimizer.rate, set optimizer.clip, or look at the images of that "
                "step",
                step=step,
            )


def mean(window: list[dict[str, float]]) -> dict[str, float]:
    """Averages every metric over several steps."""
    return {name: float(np.mean([metrics[name] for metrics in window])) for name in window[-1]}
