"""A bundle in actors of Ray: exactly once, with a killed actor, and restartable by part."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import pytest
from processes import ROOT
from system import photos

from dmljax.bundle import collection
from dmljax.files import parts
from dmljax.index import parquet as index_parquet

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs ray[data]"),
]

# Ray warns a lot, and keeps threads: a process of its own. The first actor that embeds its second
# batch kills itself with SIGKILL, once.
SCRIPT = """
import json, os, pathlib, signal, sys
import ray, ray.data
from dmljax.bundle import ray as adapter
bundle, images, out, marker, temporary, mode = sys.argv[1:]
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=200 << 20,
         _temp_dir=temporary, logging_level="error", log_to_driver=False)
class Dying(adapter._Embedder):
    calls = 0
    def __call__(self, table):
        self.calls += 1
        if self.calls == 2 and not os.path.exists(marker):
            pathlib.Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__call__(table)
if mode == "kill":
    adapter._Embedder = Dying
if mode == "dataset":
    def images_fn(shard):
        rows = pathlib.Path(images).rglob("*.png")
        items = [{"id": path.name, "bytes": path.read_bytes()} for path in sorted(rows)]
        kept = [items[i] for i in shard.rows(len(items))]
        return ray.data.from_items(kept + [{"id": f"bad{shard.index}", "bytes": b"no image"}])
    manifest = adapter.embed(bundle, images_fn, out, shards=2, name="photos", batch_size=8)
else:
    manifest = adapter.embed(bundle, images, out, shards=2, batch_size=8)
print(json.dumps(manifest))
ray.shutdown()
"""


def _run(bundle, images, out, marker, mode):
    env = os.environ | {"PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    env |= {"JAX_NUM_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"}
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as temporary:  # sockets: a short path
        words = [bundle, images, out, marker, temporary, mode]
        completed = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", SCRIPT, *map(str, words)],
            capture_output=True,
            text=True,
            env=env,
            timeout=500,
        )
    assert completed.returncode == 0, completed.stderr[-4000:]
    return json.loads(completed.stdout.splitlines()[-1])


def _vectors(out):
    parts.verify(out)
    batches = list(index_parquet.read(out))
    ids = [name for batch in batches for name in batch.ids]
    assert len(ids) == len(set(ids))
    return dict(zip(ids, np.concatenate([batch.vectors for batch in batches]), strict=True))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return photos(tmp_path_factory.mktemp("rays"))


def test_a_killed_actor_is_repeated_and_a_missing_part_alone_is_computed(
    bundle_folder, images, tmp_path
):
    marker, out = tmp_path / "killed", tmp_path / "out"
    manifest = _run(bundle_folder, images, out, marker, "kill")
    assert marker.exists() and manifest["complete"] and manifest["rows"] == 64
    vectors = _vectors(out)
    collection.embed(bundle_folder, images, tmp_path / "one")
    expected = _vectors(tmp_path / "one")
    assert set(vectors) == set(expected) and len(vectors) == 64
    for name, vector in vectors.items():
        np.testing.assert_allclose(vector, expected[name], atol=1e-6)
    kept = (out / "part-0-of-2" / "part.json").stat().st_mtime_ns
    (out / "part-1-of-2" / "part.json").unlink()  # as if it had not been completed
    _run(bundle_folder, images, out, marker, "list")
    assert (out / "part-0-of-2" / "part.json").stat().st_mtime_ns == kept
    assert set(_vectors(out)) == set(expected)


def test_a_ray_data_set_of_encoded_images(bundle_folder, images, tmp_path):
    out = tmp_path / "out"
    manifest = _run(bundle_folder, images, out, tmp_path / "killed", "dataset")
    assert [part["left_out"] for part in manifest["folders"]] == [1, 1]
    vectors = _vectors(out)
    assert set(vectors) == {path.name for path in pathlib.Path(images).rglob("*.png")}
    assert all(np.isfinite(vector).all() for vector in vectors.values())
