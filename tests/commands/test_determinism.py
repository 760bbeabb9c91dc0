"""`runtime.deterministic`: the flag of XLA is there before JAX starts, and the header says so."""

import json

import pytest
from processes import command, python
from system import tiny, write_config

from dmljax.train import devices

_CODE = """
import os, sys
from absl import logging
from dmljax import main
from dmljax.commands import parser, train

seen = {}
def note(arguments, overrides):
    seen["flags"] = os.environ.get("XLA_FLAGS", "")
    seen["jax"] = "jax" in sys.modules
train._train = note
assert main.main(sys.argv[1:]) == 0
import json
print(json.dumps(seen))
"""


def _seen(*words, flags=""):
    return json.loads(python(_CODE, *words, XLA_FLAGS=flags).stdout)


def test_the_flag_is_set_before_jax_starts():
    flag = "--xla_gpu_deterministic_ops=true"
    on = _seen("--config=glyphs", "--config.runtime.deterministic=True", flags="--xla_a=1")
    assert on == {"flags": f"--xla_a=1 {flag}", "jax": False}
    assert flag not in _seen("--config=glyphs")["flags"]
    # What the user has set stays.
    off = flag.replace("true", "false")
    words = ("--config=glyphs", "--config.runtime.deterministic=True")
    assert _seen(*words, flags=off)["flags"] == off


def test_the_header_says_so(tmp_path):
    config = write_config(tmp_path, tiny(tmp_path, steps=1))
    words = (f"--config={config}", f"--workdir={tmp_path / 'run'}")
    done = command(*words, "--config.runtime.deterministic=True")
    assert done.returncode == 0 and "; deterministic" in done.stdout, done.stderr


def test_a_gpu_without_the_flag_is_refused():
    devices.check_determinism("cpu", "")
    devices.check_determinism("gpu", "--a=1 --xla_gpu_deterministic_ops=true")
    with pytest.raises(ValueError, match=r"read before JAX starts.*xla_gpu_deterministic_ops=true"):
        devices.check_determinism("gpu", "--xla_gpu_deterministic_ops=false")
    assert "--xla_gpu_deterministic_ops=true" in devices.describe_determinism("gpu")
