"""Shards as tasks of Ray: with a killed worker, restartable by part, and bitwise as without Ray."""

import importlib.util
import os
import subprocess
import sys
import tempfile

import pytest
from processes import ROOT
from system import photos

from dmljax.bundle import collection
from dmljax.files import parts

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray"),
]

# Ray warns a lot, and keeps threads: a process of its own. The first worker that has written a
# chunk kills itself with SIGKILL, once.
SCRIPT = """
import os, pathlib, signal, sys
import ray
from dmljax.bundle import collection
from dmljax.bundle import ray as adapter
bundle, images, out, marker, temporary = sys.argv[1:]
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20,
         _temp_dir=temporary, logging_level="error", log_to_driver=False)
embed_shard, write_chunk = adapter._embed_shard, collection.write_chunk
def dying(*arguments):
    def write_and_die(*words, **options):
        write_chunk(*words, **options)
        if not os.path.exists(marker):
            pathlib.Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
    collection.write_chunk = write_and_die
    embed_shard(*arguments)
adapter._embed_shard = dying
assert not adapter.embed(bundle, images, out, shards=2, num_cpus=1)["missing"]
ray.shutdown()
"""


def _run(*words):
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    }
    env |= {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu", "RAY_USAGE_STATS_ENABLED": "0"}
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as temporary:  # sockets: a short path
        command = [sys.executable, "-W", "ignore", "-c", SCRIPT, *map(str, words), temporary]
        done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]


def test_a_killed_worker_is_repeated_and_a_missing_part_alone_is_computed(bundle_folder, tmp_path):
    images, out, marker = photos(tmp_path), tmp_path / "out", tmp_path / "killed"
    _run(bundle_folder, images, out, marker)
    assert marker.exists() and len(parts.read(out, verify=True)["folders"]) == 2
    for index in range(2):
        collection.embed(bundle_folder, images, tmp_path / "plain", shard=parts.Shard(index, 2))
    files = sorted(path.relative_to(out) for path in out.rglob("*.parquet"))
    assert len(files) == 2
    for name in files:
        assert (out / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    kept = (out / "part-0-of-2" / "part.json").stat().st_mtime_ns
    (out / "part-1-of-2" / "part.json").unlink()  # as if it had not been completed
    _run(bundle_folder, images, out, marker)
    assert (out / "part-0-of-2" / "part.json").stat().st_mtime_ns == kept
    parts.read(out, verify=True)
