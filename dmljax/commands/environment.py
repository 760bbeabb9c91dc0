"""Sets environment variables and options of the process before JAX starts, such as XLA_FLAGS."""

import glob
import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Mapping

from dmljax.files import machine

_DEVICES = ("nvidia[0-9]*", "dxg", "kfd", "accel*", "vfio/[0-9]*")  # GPUs and TPUs
# A flag, and the versions of jaxlib that know it: another version aborts the process.
_FOR_CPUS = {
    "xla_cpu_experimental_ynn_fusion_type=-individual_convolution": ("0.10.", "0.11.", "0.12."),
    "xla_cpu_use_fusion_emitters=false": ("0.10.",),
}
_DETERMINISM = {"xla_gpu_deterministic_ops=true": ("0.10.", "0.11.", "0.12.")}


def settle_environment() -> None:
    """Sets variables that packages would otherwise set when a run imports them later.

    XLA's threads read the environment while they compute, and a change at that moment crashes the
    process (docs/troubleshooting.md). scikit-learn sets both variables, to these values.
    """
    os.environ.setdefault("KMP_DUPLICATE_LIB_OK", "True")
    os.environ.setdefault("KMP_INIT_AT_FORK", "FALSE")


def tune_cpu(*, keep_memory: bool = True) -> None:
    """Makes steps on CPUs faster. It must run before JAX starts, and does nothing for accelerators.

    * glibc keeps freed memory instead of returning it to the system. The temporaries of a step are
      one block; without this, the system provides it page by page at every step, which takes a
      sixth of the time of a small net, and 40 % for MobileNetV2 on 32 photographs. A service
      does not `keep_memory`: one large request would keep it forever.
    * XLA uses its own convolutions. YNNPACK's can take twice as long.
    * jaxlib 0.10 has two ways to compile loops. The older one compiles the step of a small net in
      half the time, and the step is faster by a sixth.
    * Several CPU devices get four threads each. A device waits for the others in a thread, and in
      one more where a second collective does not depend on the first one. XLA starts one thread
      per core or device, or `NPROC` threads; if all of them wait, the process ends after a minute.

    Flags that the user has set stay unchanged. With accelerators, many threads read images
    at the same time, and libtpu ends the process at a flag that it does not know.
    """
    if _has_accelerator():
        return
    if keep_memory:
        machine.keep_freed_memory()
    _add(_FOR_CPUS)
    pattern = r"xla_force_host_platform_device_count=(\d+)"
    counts = re.findall(pattern, os.environ.get("XLA_FLAGS", ""))
    devices = int(counts[-1] if counts else os.environ.get("JAX_NUM_CPU_DEVICES") or 1)
    if devices > 1:
        os.environ.setdefault("NPROC", str(max(4 * devices, machine.core_count())))


def _has_accelerator() -> bool:
    """Tells whether JAX will find a GPU or a TPU, before it starts."""
    if platforms := os.environ.get("JAX_PLATFORMS"):
        return platforms != "cpu"
    if not any(importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu")):
        return False
    return any(glob.glob(f"/dev/{name}") for name in _DEVICES)


def _add(flags: Mapping[str, tuple[str, ...]]) -> None:
    """Adds flags to XLA_FLAGS that the user has not set and this version of jaxlib knows."""
    text, version = os.environ.get("XLA_FLAGS", ""), importlib.metadata.version("jaxlib")
    for flag, versions in flags.items():
        if flag.partition("=")[0] not in text and version.startswith(versions):
            text = f"{text} --{flag}".strip()
    os.environ["XLA_FLAGS"] = text


def require_determinism() -> None:
    """Makes XLA compute the same bits in every run on a GPU.

    XLA then leaves out kernels whose order of sums varies (atomic additions), and does not choose
    kernels by their speed, which varies from run to run. Steps can be slower. CPUs compute the same
    bits anyway.
    """
    _add(_DETERMINISM)
