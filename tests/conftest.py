"""Stricter than users: shapes checked, eight devices, no rank promotion, warnings are errors."""

import ctypes
import faulthandler
import functools
import gc
import importlib.metadata
import os
import pathlib
import resource
import sys

import jaxtyping
import pytest

HERE = pathlib.Path(__file__).parent
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
os.environ.setdefault("JAX_NUMPY_RANK_PROMOTION", "raise")
# Compiling takes most of the time. Without optimizations it takes a quarter less, and every run
# after the first reads this cache.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
# Save a third and a sixth of compiling. Versions after 0.10 do not know the first flag and end the
# process.
_FLAGS = "--xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jaxlib").startswith("0.10."):
    _FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", _FLAGS)
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(HERE.parent / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# Programs of bundles that were accepted once, and no downloads of the user.
os.environ.setdefault("DMLJAX_CACHE", str(HERE.parent / ".cache" / "dmljax"))
# The programs that tests start: an entry half-written by another process is a miss (setup.cfg).
os.environ.setdefault("PYTHONWARNINGS", "ignore:Error reading persistent compilation cache")

sys.path.insert(0, str(HERE))
import typechecker  # noqa: E402

# Records of `data` are sequences by what they do, not by type. `data` and `files` have no arrays of
# jax.
CHECKED = {path.stem for path in (HERE.parent / "dmljax").glob("[a-z]*")} - {"data", "files"}
typechecker.install([f"dmljax.{name}" for name in sorted(CHECKED)])


# Bytes of a test process: two of them fit into a laptop of 8 GB.
_CLEAR_CACHES_ABOVE, _MEMORY_LIMIT = 2200 << 20, 3 << 30
_PEAKS = pytest.StashKey()


def pytest_configure(config):
    """Starts JAX, and keeps the environment as it is from then on.

    XLA's threads read the environment when they prepare a computation, and may still run when the
    call that started them has returned. glibc's setenv frees what they read: the process dies of a
    segmentation fault. Pytest writes PYTEST_CURRENT_TEST several times per test; that changes
    `os.environ`, but no longer what C code reads. A test that needs another environment starts a
    process of its own with it.
    """
    import jax

    from dmljax import main
    from dmljax.runs import training  # noqa: F401  what it imports changes the environment

    main.settle_environment()
    jax.devices()
    _save_time()
    os.putenv, os.unsetenv = _without_pytest(os.putenv), _without_pytest(os.unsetenv)
    config.option.loadscopereorder = False  # of pytest-xdist: files with few tests may be long


def _save_time():
    """Two things that take a fifth of the time of tests that compile many small programs.

    Most objects live until the end, and the garbage collector looks at them again and again. JAX
    makes a new context for each program that it lowers, which takes as long as lowering a small
    program, and keeps all of them: one for all takes half of the memory, too.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    from jax._src.interpreters import mlir

    if hasattr(mlir, "make_ir_context"):  # not public: later versions may have another name
        mlir.make_ir_context = functools.cache(mlir.make_ir_context)


def _without_pytest(change_fn):
    def change(name, *value):
        if not os.fsdecode(name).startswith("PYTEST_"):
            raise RuntimeError(
                f"{os.fsdecode(name)} is changed in the environment of a process in which JAX "
                "computes: start a process of its own with it"
            )

    return change


def pytest_runtest_setup(item):
    """Lifts the time limit of setup.cfg for slow tests; skips tests that need a GPU."""
    import jax

    if item.get_closest_marker("gpu") and jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")
    if item.get_closest_marker("slow"):
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown():
    """Keeps compiled programs for the next test, until they take too much memory."""
    yield
    import jax

    # The libraries of a GPU alone can take that much.
    if _memory() > _CLEAR_CACHES_ABOVE and jax.default_backend() == "cpu":
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        assert _memory() < _MEMORY_LIMIT, f"this process has {_memory() >> 20} MiB of memory"


def _memory() -> int:
    """Bytes of this process that are in memory."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def pytest_sessionfinish(session):
    """Hands the peak memory of this worker to the process that prints the summary."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    getattr(session.config, "workeroutput", {})["peak"] = peak
    session.config.stash.setdefault(_PEAKS, {})["this process"] = peak


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Collects the peak memory of a worker of pytest-xdist that has ended."""
    if peak := getattr(node, "workeroutput", {}).get("peak"):
        node.config.stash.setdefault(_PEAKS, {})[node.gateway.id] = peak


def pytest_terminal_summary(terminalreporter, config):
    peaks = config.stash.get(_PEAKS, {})
    text = ", ".join(f"{name} {peak / 1e9:.1f} GB" for name, peak in sorted(peaks.items()))
    terminalreporter.write_line(f"peak memory: {text}")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    """With `--dist loadgroup`, tests of one file share a process and what it compiled.

    Of a file that repeats its tests for many losses or nets, the tests of one of these do.
    """
    for item in items:
        if item.get_closest_marker("xdist_group"):
            continue
        name = item.callspec.params.get("name") if hasattr(item, "callspec") else None
        group = f"{item.path.stem}-{name}" if isinstance(name, str) else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture
def unchecked():
    """Switches the run-time check of shapes off, so that the package's own messages are raised."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def pytest_addoption(parser):
    parser.addoption("--screenshots", help="folder for pictures of the page (tests/report)")


@pytest.fixture(scope="session")
def source(tmp_path_factory):
    """A finished run, whose backbone others take. Nobody writes into its folder."""
    from system import tiny

    from dmljax.runs import training

    folder = tmp_path_factory.mktemp("source")
    training.run(tiny(folder), folder / "run")
    return folder / "run"
