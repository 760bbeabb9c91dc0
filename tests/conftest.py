"""Stricter than users: shapes checked, eight devices, no rank promotion, warnings are errors."""

import importlib.metadata
import os
import pathlib
import sys

import jaxtyping
import pytest
from jaxtyping import install_import_hook

HERE = pathlib.Path(__file__).parent
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
# Compiling is most of the time: three quarters of it without optimisations, and every run
# after the first reads this cache.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# A third off compiling; versions after 0.10 do not know the flag, and end when they see it.
if importlib.metadata.version("jaxlib").startswith("0.10."):
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_use_fusion_emitters=false")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(HERE.parent / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# The programs that tests start: an entry half-written by another process is a miss (setup.cfg).
os.environ.setdefault("PYTHONWARNINGS", "ignore:Error reading persistent compilation cache")

sys.path.insert(0, str(HERE))
# Records of `data` are sequences by what they do, not by type, and it has no arrays of jax.
CHECKED = {path.stem for path in (HERE.parent / "dmljax").glob("[a-z]*")} - {"data"}
install_import_hook([f"dmljax.{name}" for name in sorted(CHECKED)], "typechecker.check")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """With `--dist loadgroup`, tests of one loss or net share a process and what it compiled."""
    for item in items:
        name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
        if isinstance(name, str):
            item.add_marker(pytest.mark.xdist_group(f"{item.path.stem}-{name}"))


@pytest.fixture
def unchecked():
    """As outside of tests, where nothing speaks before our own messages do."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
