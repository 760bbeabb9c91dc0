"""`dmljax train --dry-run --topology`: memory of devices that are not there."""

import importlib.util
import os
import re

import jax
import pytest
from processes import ROOT, command
from system import tiny, write_config

from dmljax.config.build import build
from dmljax.main import main
from dmljax.runs import dry_run, topologies

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)
WIDE = {"net": {"name": "convnet", "widths": [256, 1024], "strides": [2, 2]}}


# As for users: JAX optimizes. JAX sets TPU_LIBRARY_PATH where it finds libtpu, and others on this
# machine may have loaded libtpu.
VARIABLES = {
    "JAX_DISABLE_MOST_OPTIMIZATIONS": None,
    "JAX_COMPILATION_CACHE_DIR": None,
    "XLA_FLAGS": None,
    "TPU_LIBRARY_PATH": None,
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def _command(folder, config, *flags):
    words = ("train", f"--config={write_config(folder, config)}", "--dry-run", *flags)
    paths = [str(folder), str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return command(*words, cwd=folder, PYTHONPATH=os.pathsep.join(paths), **VARIABLES)


@needs_libtpu
def test_memory_is_that_of_the_program_for_these_devices(tmp_path):
    """With everything split, a device of 8 has an eighth of the state that one alone has."""
    config = tiny(tmp_path, **WIDE, runtime={"sharded": "all"})
    done = _command(tmp_path, config, "--topology=v5e:1x1,v5e:2x4")
    assert done.returncode == 0, done.stderr
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("v5e:")]
    assert [(row[0], row[1], " ".join(row[5:])) for row in rows] == [
        ("v5e:1x1", "1", "TPU v5 lite"),
        ("v5e:2x4", "8", "TPU v5 lite"),
    ]
    one, eight = ([float(x) for x in row[2:5]] for row in rows)
    params = sum(x.size for x in jax.tree.leaves(build(config).shapes.params))
    assert one[0] == pytest.approx(12 * params / 1e9, rel=0.05)  # parameters, two moments
    assert eight[0] == pytest.approx(one[0] / 8, rel=0.05)
    for state, temporaries, together in (one, eight):
        assert temporaries > 0 and together == pytest.approx(state + temporaries, rel=0.01)


@needs_libtpu
def test_an_unknown_name_is_refused_in_one_line(tmp_path):
    for name in ("v5e:3x5", "h101:8", "v5e"):
        done = _command(tmp_path, tiny(tmp_path), f"--topology={name}")
        assert done.returncode == 2 and not done.stdout
        refusal = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(refusal) == 1 and f"--topology={name}: take TPUs such as v5e:2x4" in refusal[0]


def test_without_libtpu_the_line_says_what_to_install(tmp_path):
    (tmp_path / "libtpu.py").write_text("raise ImportError\n")  # the process imports from here
    done = _command(tmp_path, tiny(tmp_path), "--topology=v5e:2x4")
    assert done.returncode == 2 and not done.stdout
    expected = r"error: --topology=v5e:2x4: .* for TPUs install libtpu.* 'dmljax\[tpu\]' .*"
    assert re.fullmatch(expected, done.stderr.strip())


def test_without_the_plugin_for_cuda_the_line_says_what_to_install(tmp_path):
    (tmp_path / "jax_plugins").mkdir()  # the process imports from here
    (tmp_path / "jax_plugins" / "__init__.py").touch()
    done = _command(tmp_path, tiny(tmp_path), "--topology=h100:8")
    assert done.returncode == 2 and not done.stdout
    packages = r"jax-cuda13-plugin==[\d.]+ jax-cuda13-pjrt==[\d.]+"
    expected = f"error: --topology=h100:8: .* {packages}"
    assert re.fullmatch(expected, done.stderr.strip())


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--topology=v5e:2x4"], "--topology needs --dry-run"),
        (["--dry-run", "--topology="], "--topology= is empty"),
        (["--dry-run", "--topology=h100"], "say how many GPUs a host has, such as h100:8"),
        (["--dry-run", "--topology=b200:0x8"], "say how many GPUs a host has, such as b200:8"),
    ],
)
def test_flags_that_say_nothing_are_refused(tmp_path, flags, words):
    file = write_config(tmp_path, tiny(tmp_path))
    with pytest.raises(ValueError, match=words):
        main(["train", f"--config={file}", *flags])


def test_a_program_that_does_not_fit_has_a_row(tmp_path, monkeypatch):
    """In the words of XLA, and later topologies are still compiled."""
    real = dry_run._memory

    def memory(run, *, options):
        assert options is None
        if run.shards.size == 1:
            # What libtpu 0.0.42 says.
            reason = "Ran out of memory on HBM, the total memory required for HLO temporaries"
            raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {reason} (59.60G)\nmore")
        return real(run, options=options)

    monkeypatch.setattr(dry_run, "_memory", memory)
    monkeypatch.setattr(topologies, "devices", lambda name: jax.devices()[: int(name)])
    lines = list(dry_run.lines(tiny(tmp_path), described=["1", "4"]))
    assert lines[-2].split()[:2] == ["1", "1"] and "does not fit: Ran out of memory" in lines[-2]
    assert lines[-2].endswith("(59.60G) (cpu)")
    assert lines[-1].split()[:2] == ["4", "4"] and float(lines[-1].split()[4]) > 0
