"""The Slurm array and the indexed Job start every part once, with flags that `embed` knows."""

import os
import pathlib
import re
import shlex
import subprocess
import sys

import yaml

from dmljax.files import parts

ROOT = pathlib.Path(__file__).parents[1]


def _array(task, count, *words, **variables):
    slurm = {"SLURM_ARRAY_TASK_ID": task, "SLURM_ARRAY_TASK_COUNT": count, **variables}
    slurm = {"SLURM_ARRAY_TASK_MAX": count - 1} | slurm
    env = os.environ | {name: str(value) for name, value in slurm.items()}
    command = ["launch/shards.slurm.sh", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env)


def test_every_task_of_the_array_gets_its_part():
    words = ("photos.bundle", "--images=my list.parquet", "--out=vectors")
    printed = [_array(i, 3, "--dry-run", *words).stdout for i in range(3)]
    for i, line in enumerate(printed):
        command = shlex.split(line)
        assert command[1:] == ["-m", "dmljax.main", "embed", *words, f"--shard={i}/3"]
    repeated = _array(17, 2, "--dry-run", *words, SLURM_ARRAY_TASK_MAX=17, PARTS=64).stdout
    assert shlex.split(repeated)[-1] == "--shard=17/64"


def test_a_dry_run_needs_no_slurm():
    environment = {name: x for name, x in os.environ.items() if not name.startswith("SLURM_")}
    words = ["launch/shards.slurm.sh", "--dry-run", "photos.bundle", "--images=a b", "--out=x"]
    for variables, shard in (({}, "--shard=I/N"), ({"PARTS": "64"}, "--shard=I/64")):
        completed = subprocess.run(
            words, capture_output=True, text=True, cwd=ROOT, env=environment | variables
        )
        assert shlex.split(completed.stdout)[1:] == [
            "-m",
            "dmljax.main",
            "embed",
            *words[2:],
            shard,
        ]
    completed = subprocess.run(words[:2], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert completed.returncode == 2 and "usage: sbatch --array" in completed.stderr


def test_an_array_that_is_not_all_parts_is_refused():
    completed = _array(3, 2, "photos.bundle", "--out=x", SLURM_ARRAY_TASK_MAX=17)
    assert completed.returncode == 2 and "set PARTS=N" in completed.stderr
    completed = _array(0, 1)
    assert completed.returncode == 2 and "usage: sbatch --array" in completed.stderr


def test_a_task_runs_the_command_and_returns_its_status(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/usr/bin/env bash\necho "$@"\nexit 7\n')
    python.chmod(0o755)
    completed = _array(1, 2, "run", "--out=x", PYTHON=python)
    assert completed.returncode == 7
    assert completed.stdout == "-m dmljax.main embed run --out=x --shard=1/2\n"


def test_the_indexed_job_has_a_pod_for_every_part():
    job = yaml.safe_load((ROOT / "launch" / "shards.gke.yaml").read_text())
    assert job["apiVersion"] == "batch/v1" and job["kind"] == "Job"
    spec = job["spec"]
    assert spec["completionMode"] == "Indexed" and spec["parallelism"] <= spec["completions"]
    assert spec["podReplacementPolicy"] == "Failed"
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # what podFailurePolicy asks for
    [container] = pod["containers"]
    values = {entry["name"]: entry["value"] for entry in container["env"]}
    assert values["PARTS"] == str(spec["completions"])
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    for rule in spec["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            assert rule["onExitCodes"]["containerName"] == container["name"]
    shards = set()
    for index in range(spec["completions"]):
        values["JOB_COMPLETION_INDEX"] = str(index)
        command = [re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], w) for w in container["command"]]
        shards.add(parts.parse(command[-1].removeprefix("--shard=")))
    assert len(shards) == spec["completions"]
    assert command[:4] == ["python", "-m", "dmljax.main", "embed"]


def test_embed_knows_the_flags_of_the_launchers():
    command = [sys.executable, "-m", "dmljax.main", "embed", "--help"]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout
    assert all(flag in printed for flag in ("--shard", "--images", "--out"))
