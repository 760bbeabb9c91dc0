"""Several workers on one host, each with its share of the devices."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from dmljax.files import cores


def environments(workers: int) -> list[dict[str, str]]:
    """The variables of every worker: its share of the GPUs, or of the CPU's threads."""
    if gpus := _gpus():
        if workers > len(gpus):
            raise ValueError(
                f"--workers={workers}: this host has {len(gpus)} GPU{'s'[: len(gpus) - 1]}, and "
                f"two runs do not share one: choose at most {len(gpus)}"
            )
        return [
            {"CUDA_VISIBLE_DEVICES": ",".join(gpus[i::workers][: len(gpus) // workers])}
            for i in range(workers)
        ]
    threads = str(max(1, cores.count() // workers))
    # XLA's and OpenMP's names for the number of threads.
    return [{"NPROC": threads, "OMP_NUM_THREADS": threads} if workers > 1 else {}] * workers


def _gpus() -> list[str]:
    """The GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    if os.environ.get("JAX_PLATFORMS", "").startswith("cpu"):
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    if shutil.which("nvidia-smi") is None:
        return []
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True)
    lines = listing.stdout.splitlines() if listing.returncode == 0 else []
    return [str(i) for i, line in enumerate(line for line in lines if line.startswith("GPU "))]


@contextlib.contextmanager
def handling_signals(handler: Callable[[int, object], None]) -> Iterator[None]:
    """Inside the block, `handler` gets SIGINT, SIGTERM and SIGHUP."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    old = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old_handler in old.items():
            signal.signal(number, old_handler)


def limit_cores(pid: int, number: int, workers: int) -> None:
    """Leaves a process its share of the cores, by which it chooses its threads and processes."""
    if hasattr(os, "sched_setaffinity"):  # Linux
        all_cores = sorted(os.sched_getaffinity(0))
        size = max(1, len(all_cores) // workers)
        first = number % (len(all_cores) // size) * size
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(pid, all_cores[first : first + size])


def start(words: Sequence[str], variables: Sequence[Mapping[str, str]]) -> int:
    """Runs `python -m dmljax.main WORDS` once for each of `variables`; the common exit status.

    Signals go to every worker. A worker that is killed is reported; others take over its run.
    """
    command = [sys.executable, "-m", "dmljax.main", *words]
    workers = [
        subprocess.Popen(command, env={**os.environ, **variable}, start_new_session=True)
        for variable in variables
    ]

    for number, worker in enumerate(workers):
        limit_cores(worker.pid, number, len(workers))

    def forward(number: int, frame: object) -> None:
        for worker in workers:
            if worker.poll() is None:
                worker.send_signal(number)

    with handling_signals(forward):
        statuses = [worker.wait() for worker in workers]
    for worker, status in zip(workers, statuses, strict=True):
        if status < 0:
            name = signal.Signals(-status).name
            print(f"warning: worker {worker.pid} was killed by {name}", file=sys.stderr)
    stopped = [status for status in statuses if status in (130, 143)]
    return stopped[0] if stopped else max(0, *statuses)
