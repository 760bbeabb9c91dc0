"""Devices that this machine does not have, for which XLA compiles programs that never run.

libtpu compiles for TPUs without a TPU. A program for such devices tells what it needs of each.
"""

from __future__ import annotations

import importlib.metadata
import math
import re

import jax
from jax.experimental import topologies

_EXAMPLES = "v5e:2x4, v6e:8x8 or v5p:2x2x2"


def described(name: str) -> list[jax.Device]:
    """The devices of a topology, by its name in JAX, such as 'v5e:2x4'.

    Raises a one-line error if libtpu is missing or does not know the name.
    """
    if not name:  # for which libtpu takes a TPU of its choice
        raise ValueError(f"--topology has an empty name: take names such as {_EXAMPLES}")
    try:
        return list(topologies.get_topology_desc(name, "tpu", **_hosts(name)).devices)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        if "lockfile" in reason:
            reason = "another process has loaded libtpu; set ALLOW_MULTIPLE_LIBTPU_LOAD=1"
            raise ValueError(f"--topology={name}: {reason}") from error
        raise ValueError(f"--topology={name}: take TPUs such as {_EXAMPLES}; {reason}") from error
    except RuntimeError as error:
        raise ValueError(
            f"--topology={name} needs libtpu, but no TPU: pip install '{_libtpu()}', or "
            "'dmljax[tpu]'"
        ) from error


def _hosts(name: str) -> dict[str, list[int]]:
    """A host of fewer than the usual 2 x 2 chips, where there are no more."""
    match = re.search(r":([1-9]\d*(?:x[1-9]\d*){1,2})$", name)
    sides = [int(side) for side in match[1].split("x")] if match else []
    host = [min(side, 2) for side in sides[:2]]
    return {"chips_per_host_bounds": [*host, 1]} if sides and math.prod(host) < 4 else {}


def _libtpu() -> str:
    """The version of libtpu that this version of JAX asks for."""
    words = (word.partition(";")[0].strip() for word in importlib.metadata.requires("jax") or ())
    return next((word for word in words if word.startswith("libtpu")), "libtpu")
