"""Many processes embed the parts of a split; concatenated, they are what one process writes."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from processes import ROOT
from safetensors import safe_open
from system import tiny

from dmljax.files import parts
from dmljax.runs import export, training


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded_run")
    evaluate = {"every": 2, "ks": [1], "batch_size": 4, "clustering": None}
    training.run(tiny(folder, steps=2, evaluate=evaluate, runtime={"devices": 1}), folder / "run")
    return folder / "run"


# A pause before the file that is written last, so that the test can kill the process there.
PART = """
import sys, time
from dmljax.files import parts
from dmljax.runs import export
write_array = export.write_array
def slowly(path, array):
    time.sleep(float(sys.argv[4]))
    write_array(path, array)
export.write_array = slowly
export.embeddings(sys.argv[1], sys.argv[2], shard=parts.parse(sys.argv[3]))
"""


def _part(run, out, shard, *, pause=0.0):
    # The variables of a Slurm job: a process must not look for the others.
    env = os.environ | {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "3", "SLURM_PROCID": "0"}
    env |= {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "1", "SLURM_STEP_NODELIST": "none"}
    words = [sys.executable, "-c", PART, str(run), str(out), shard, str(pause)]
    return subprocess.Popen(
        words, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def test_killed_parts_start_again_and_are_together_what_one_process_writes(run, tmp_path):
    out = tmp_path / "out"
    process = _part(run, out, "1/3", pause=60)
    items = out / "part-1-of-3" / "items.safetensors"
    end = time.monotonic() + 120
    while not items.exists():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    # The same part twice, while the first process is alive.
    with pytest.raises(ValueError, match=f"being written by process {process.pid} on"):
        export.embeddings(run, out, shard=parts.Shard(1, 3))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    process = _part(run, out, "1/3")
    for i in (0, 2):
        export.embeddings(run, out, shard=parts.Shard(i, 3))
    printed = process.communicate(timeout=200)[0]
    assert process.returncode == 0, printed
    manifest = parts.read(out, verify=True)
    assert len(manifest["model"]) == 64
    folders = [out / part["folder"] for part in manifest["folders"]]
    assert [part["rows"] for part in manifest["folders"]] == [[0, 10], [10, 21], [21, 32]]
    one = export.embeddings(run, tmp_path / "one").folder
    arrays = [np.load(folder / "embeddings.npy") for folder in folders]
    np.testing.assert_array_equal(np.concatenate(arrays), np.load(one / "embeddings.npy"))
    labels, ids, classes = zip(*map(_items, folders), strict=True)
    expected_labels, expected_ids, expected_classes = _items(one)
    np.testing.assert_array_equal(np.concatenate(labels), expected_labels)
    assert [*itertools.chain(*ids)] == expected_ids and list(classes) == [expected_classes] * 3


def _items(folder):
    with safe_open(folder / "items.safetensors", "numpy") as file:
        names = file.metadata()
        return file.get_tensor("labels"), json.loads(names["ids"]), json.loads(names["classes"])


def test_a_finished_part_is_not_computed_again_and_no_other_one_joins(run, tmp_path, monkeypatch):
    first = export.embeddings(run, tmp_path / "out", shard=parts.Shard(0, 2))
    with monkeypatch.context() as patched:
        patched.delattr(export.Evaluator, "embeddings")
        assert export.embeddings(run, tmp_path / "out", shard=parts.Shard(0, 2)) == first
    with pytest.raises(ValueError, match=r"another value of parts \(2, not 4\)"):
        export.embeddings(run, tmp_path / "out", shard=parts.Shard(0, 4))
    with pytest.raises(ValueError, match=r"another value of (step|split)"):
        export.embeddings(run, tmp_path / "out", shard=parts.Shard(1, 2), split="train")
    with pytest.raises(ValueError, match="only 32 images"):
        export.embeddings(run, tmp_path / "more", shard=parts.Shard(0, 33))
    with pytest.raises(ValueError, match="depend on all rows"):
        export.embeddings(run, tmp_path / "more", shard=parts.Shard(0, 2), synthetic=True)
    assert not (tmp_path / "more").exists()
