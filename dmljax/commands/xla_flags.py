"""Flags of XLA, for CPUs and for determinism, which must be set before JAX starts."""

import importlib.metadata
import os
import re
from collections.abc import Iterable

from dmljax.files import machine

# A flag is its name, its value, and the versions of jaxlib that know it.
FOR_CPUS = (
    (
        "xla_cpu_experimental_ynn_fusion_type",
        "-individual_convolution",
        ("0.10.", "0.11.", "0.12."),
    ),
    ("xla_cpu_use_fusion_emitters", "false", ("0.10.",)),
)
_DETERMINISM = (("xla_gpu_deterministic_ops", "true", ("0.10.", "0.11.", "0.12.")),)


def add(flags: Iterable[tuple[str, str, tuple[str, ...]]]) -> None:
    """Adds flags to XLA_FLAGS that the user has not set and this version of jaxlib knows."""
    text = os.environ.get("XLA_FLAGS", "")
    version = importlib.metadata.version("jaxlib")
    for name, value, versions in flags:
        # A version of jaxlib that does not know a flag aborts the process.
        if name not in text and version.startswith(versions):
            text = f"{text} --{name}={value}".strip()
    os.environ["XLA_FLAGS"] = text


def add_threads() -> None:
    """Gives XLA four threads for each of several CPU devices.

    A device waits for the others in a thread, and in one more where a second collective does not
    depend on the first one. If all threads wait, the process ends after a minute. XLA starts as
    many as there are cores or devices, or as `NPROC` says.
    """
    pattern = r"xla_force_host_platform_device_count=(\d+)"
    counts = re.findall(pattern, os.environ.get("XLA_FLAGS", ""))
    devices = int(counts[-1] if counts else os.environ.get("JAX_NUM_CPU_DEVICES") or 1)
    if devices > 1:
        os.environ.setdefault("NPROC", str(max(4 * devices, machine.core_count())))


def require_determinism() -> None:
    """Makes XLA compute the same bits in every run on a GPU.

    XLA then leaves out kernels whose order of sums varies (atomic additions), and does not choose
    kernels by their speed, which varies from run to run. Steps can be slower. CPUs compute the same
    bits anyway.
    """
    add(_DETERMINISM)
