"""What a run compiles: each program once, and nothing that an earlier run has kept."""

import json
import os

import jax
from processes import python
from system import brief, tiny

from dmljax.runs import training
from dmljax.train import compilation
from dmljax.train.journal import read

_CODE = """
import json, os, shutil, sys
import jax
from dmljax.runs import training
from dmljax.train import compilation

config, workdir = json.loads(sys.argv[1]), sys.argv[2]
cache = os.environ["DMLJAX_CACHE"]
os.environ["DMLJAX_CACHE"] = "/proc/none"
compilation.keep_programs()
os.environ["DMLJAX_CACHE"] = cache
folder = os.path.join(cache, "compiled", compilation._machine())
os.makedirs(folder)
torn = os.path.join(folder, "jit_torn-00-cache")
open(torn, "wb").close()

compilation.compiled()
counts = []
for run in range(2):
    jax.clear_caches()
    before = compilation.compiled()
    training.run(config, workdir)
    counts.append([b - a for a, b in zip(before, compilation.compiled())])
    if run == 0:  # the second run is the first one, resumed from step 2
        for step in os.listdir(workdir + "/checkpoints"):
            if int(step) > 2:
                shutil.rmtree(workdir + "/checkpoints/" + step)
facts = {"torn": os.path.exists(torn), "counts": counts}
print(json.dumps(facts))
"""


def test_a_run_keeps_its_programs_and_the_same_run_resumed_compiles_nothing(tmp_path):
    variables = {"DMLJAX_CACHE": str(tmp_path / "cache"), "JAX_COMPILATION_CACHE_DIR": None}
    config = brief(tmp_path, checkpoint={"every": 2, "keep": 9}, runtime={"devices": 1})
    config = json.dumps(config)
    done = python(_CODE, config, tmp_path / "run", **variables)
    facts = json.loads(done.stdout.splitlines()[-1])
    assert "compiled programs are not kept: [Errno " in done.stderr
    assert facts["torn"] is False  # an entry whose writer was killed is removed
    (compiled, read_first, _), (resumed, read_again, seconds) = facts["counts"]
    assert compiled > 5 and read_first == 0
    assert resumed == read_again > 5 and seconds > 0
    assert "continuing from step 2" in done.stdout
    assert f"of them read from {tmp_path / 'cache' / 'compiled'}" in done.stdout


def test_later_evaluations_and_their_last_batches_compile_nothing(tmp_path):
    evaluation = {
        "every": 2,
        "ks": [1],
        "clustering": {"seeds": [0]},
        "batch_size": 24,
    }  # of 32 images
    training.run(tiny(tmp_path, evaluate=evaluation, log_every=1, steps=7), tmp_path / "run")
    rows = {row["step"]: row for row in read(tmp_path / "run" / "speed.jsonl")}
    assert rows[1]["compilations"] > 0 and rows[1]["compile_seconds"] > 0
    assert rows[3]["compilations"] == rows[5]["compilations"] == rows[7]["compilations"]


def test_several_processes_with_gpus_keep_nothing(monkeypatch, caplog):
    """XLA shares out its measurements among them: one that reads its program gives no answer."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(compilation, "_folder", lambda: None)
    folder = jax.config.jax_compilation_cache_dir
    compilation.keep_programs()
    assert "a folder that all hosts share" in caplog.text
    assert jax.config.jax_compilation_cache_dir == folder


def test_the_folder_of_the_user_wins():
    folder = os.environ["JAX_COMPILATION_CACHE_DIR"]
    compilation.keep_programs()
    assert jax.config.jax_compilation_cache_dir == folder
