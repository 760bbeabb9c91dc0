"""Devices that this machine does not have: XLA compiles for them from a description.

TPUs are described by libtpu, and have their names in JAX, such as `v5e:2x4`. GPUs are described
here, and compiled for by JAX's plugin for CUDA: `h100:8` is a host with 8 GPUs, and `h100:4x8` is
four such hosts.
"""

import math
import re
from typing import NamedTuple

import jax
from jax.experimental.topologies import get_topology_desc

_EXAMPLES = "v5e:2x4, v5p:2x2x2 or h100:8"


class _Gpu(NamedTuple):
    title: str
    capability: tuple[int, int]
    processors: int
    lanes: int  # operations in float32 at once, of a processor
    clock: float  # GHz
    memory: int  # bytes
    bandwidth: float  # bytes a second
    cache: int  # bytes, of level 2
    limits: tuple[int, int, int]  # of a processor: shared bytes, shared bytes of a block, threads


# From NVIDIA's data sheets. `memory` is what CUDA reports; it is approximate for l4 and rtx4090.
_HOPPER, _ADA = (233472, 232448, 2048), (102400, 101376, 1536)
_GPUS = {
    "a100": _Gpu("NVIDIA A100 80GB", (8, 0), 108, 64, 1.41, 85_100_068_864, 2.04e12, 40 << 20,
                 (167936, 166912, 2048)),
    "l4": _Gpu("NVIDIA L4", (8, 9), 58, 128, 2.04, 23_600_000_000, 3.0e11, 48 << 20, _ADA),
    "rtx4090": _Gpu("NVIDIA GeForce RTX 4090", (8, 9), 128, 128, 2.52, 25_300_000_000, 1.01e12,
                    72 << 20, _ADA),
    "h100": _Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 84_942_979_072, 3.35e12,
                 50 << 20, _HOPPER),
    "h200": _Gpu("NVIDIA H200", (9, 0), 132, 128, 1.98, 151_397_597_184, 4.8e12, 50 << 20,
                 _HOPPER),
    "b200": _Gpu("NVIDIA B200", (10, 0), 148, 128, 1.965, 191_514_411_008, 7.67e12, 132_644_864,
                 _HOPPER),
}  # fmt: skip
_MEMORY_FRACTION = 0.75  # of a GPU that JAX allocates (XLA_CLIENT_MEM_FRACTION)
# Without the device, no form of a product can be timed.
GPU_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}


def devices(name: str) -> list[jax.Device]:
    """Returns the devices of a topology; raises for an unknown name or a missing package."""
    kind, _, counts = name.partition(":")
    if not name:  # for which libtpu takes a TPU of its choice
        raise ValueError(f"--topology has an empty name: take names such as {_EXAMPLES}")
    if kind.lower() not in _GPUS:
        return _tpus(name)
    match = re.fullmatch(r"(?:([1-9]\d{0,3})x)?([1-9]\d{0,3})", counts)
    if match is None:
        raise ValueError(
            f"--topology={name}: say how many GPUs a host has, such as {kind}:8, or {kind}:4x8 for "
            "four hosts"
        )
    # Otherwise JAX looks for a GPU when it loads the plugin, and leaves the plugin out without one.
    jax.config.update("jax_platforms", "cpu")
    shape, target = f"1x{match[1] or 1}x{match[2]}", _target(_GPUS[kind.lower()])
    try:
        return list(get_topology_desc("", "cuda", target_config=target, topology=shape).devices)
    except NotImplementedError as error:
        version = jax.__version__
        raise ValueError(
            f"--topology={name}: JAX's plugin for CUDA is not installed. It needs no GPU: "
            f"pip install --no-deps jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version}"
        ) from error


def gpu_memory(name: str) -> float | None:
    """Returns the bytes that a program may take of a GPU; None for TPUs, where libtpu checks it."""
    gpu = _GPUS.get(name.partition(":")[0].lower())
    return None if gpu is None else _MEMORY_FRACTION * gpu.memory


def _tpus(name: str) -> list[jax.Device]:
    try:
        return list(get_topology_desc(name, "tpu", **_hosts(name)).devices)
    except RuntimeError as error:  # also of XLA
        raise ValueError(
            f"--topology={name}: take TPUs such as {_EXAMPLES} or GPUs ({', '.join(_GPUS)}), and "
            f"for TPUs install libtpu, which needs no TPU: pip install 'dmljax[tpu]' "
            f"({str(error).splitlines()[0]})"
        ) from error


def _hosts(name: str) -> dict[str, list[int]]:
    """Returns options for a host with fewer than the usual 2 x 2 chips."""
    match = re.search(r":([1-9]\d*(?:x[1-9]\d*){1,2})$", name)
    sides = [int(side) for side in match[1].split("x")] if match else []
    host = [min(side, 2) for side in sides[:2]]
    return {"chips_per_host_bounds": [*host, 1]} if sides and math.prod(host) < 4 else {}


def _target(gpu: _Gpu) -> str:
    """Returns the description in the form that XLA reads (`GpuTargetConfigProto`)."""
    major, minor = gpu.capability
    shared, shared_of_block, threads = gpu.limits
    return f"""
        gpu_device_info {{
          cuda_compute_capability {{ major: {major} minor: {minor} }}
          core_count: {gpu.processors} fpus_per_core: {gpu.lanes} clock_rate_ghz: {gpu.clock}
          device_memory_size: {gpu.memory} memory_bandwidth: {gpu.bandwidth:.0f}
          l2_cache_size: {gpu.cache} shared_memory_per_core: {shared}
          shared_memory_per_block: 49152 shared_memory_per_block_optin: {shared_of_block}
          threads_per_warp: 32 threads_per_block_limit: 1024
          threads_per_core_limit: {threads}
          registers_per_core_limit: 65536 registers_per_block_limit: 65536
          block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 10 }}
        device_description_str: "{gpu.title}"
    """
