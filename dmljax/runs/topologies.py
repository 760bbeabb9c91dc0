"""Devices that this machine does not have: XLA compiles for them from a description.

TPUs are described by libtpu, and have their names in JAX, such as `v5e:2x4`. GPUs are described by
`gpus/*.txtpb` (`GpuTargetConfigProto` of XLA, from NVIDIA's data sheets; the memory of l4 and
rtx4090 is approximate), and compiled for by JAX's plugin for CUDA: `h100:8` is a host with 8 GPUs,
and `h100:4x8` is four such hosts.
"""

import math
import pathlib
import re

import jax
from jax.experimental.topologies import get_topology_desc

_GPUS = {path.stem: path for path in sorted(pathlib.Path(__file__).parent.glob("gpus/*.txtpb"))}
_MEMORY_FRACTION = 0.75  # of a GPU that JAX allocates (XLA_CLIENT_MEM_FRACTION)
# Without the device, no form of a product can be timed.
GPU_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def devices(name: str) -> list[jax.Device]:
    """Returns the devices of a topology; raises for an unknown name or a missing package."""
    kind, _, counts = name.partition(":")
    file = _GPUS.get(kind.lower())
    match = re.fullmatch(r"(?:([1-9]\d{0,3})x)?([1-9]\d{0,3})", counts)
    hint = f"say how many GPUs a host has, such as {kind}:8, or {kind}:4x8 for four hosts"
    try:
        if file is None:  # libtpu takes a TPU of its choice for an empty name
            return list(get_topology_desc(name or "-", "tpu", **_hosts(name)).devices)
        if match is not None:
            # Otherwise JAX looks for a GPU when it loads the plugin, and without one leaves it out.
            jax.config.update("jax_platforms", "cpu")
            options = {
                "target_config": file.read_text(),
                "topology": f"1x{match[1] or 1}x{match[2]}",
            }
            return list(get_topology_desc("", "cuda", **options).devices)
    except RuntimeError as error:  # also of XLA
        if file is not None and not isinstance(error, NotImplementedError):
            raise
        version, reason = jax.__version__, str(error).splitlines()[0]
        hint = (
            f"take TPUs such as v5e:2x4 or v5p:2x2x2, or GPUs ({', '.join(_GPUS)}) such as h100:8, "
            f"and for TPUs install libtpu, which needs no TPU: pip install 'dmljax[tpu]' ({reason})"
            if file is None
            else "JAX's plugin for CUDA is not installed. It needs no GPU: pip install --no-deps "
            f"jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}"
        )
    raise ValueError(f"--topology={name}: {hint}")


def gpu_memory(name: str) -> float | None:
    """Returns the bytes that a program may take of a GPU; None for TPUs, where libtpu checks it."""
    file = _GPUS.get(name.partition(":")[0].lower())
    memory = re.search(r"device_memory_size: (\d+)", file.read_text()) if file else None
    return None if memory is None else _MEMORY_FRACTION * int(memory[1])


def _hosts(name: str) -> dict[str, list[int]]:
    """Returns options for a host with fewer than the usual 2 x 2 chips."""
    match = re.search(r":([1-9]\d*(?:x[1-9]\d*){1,2})$", name)
    sides = [int(side) for side in match[1].split("x")] if match else []
    host = [min(side, 2) for side in sides[:2]]
    return {"chips_per_host_bounds": [*host, 1]} if sides and math.prod(host) < 4 else {}
