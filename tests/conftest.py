"""Stricter than users: eight fake devices, no silent rank promotion, warnings are errors."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
# Compiling is most of the suite's time, so every run after the first reads this cache.
_CACHE = pathlib.Path(__file__).parents[1] / ".cache" / "jax"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(_CACHE))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
