"""Two processes are one run: the same numbers, one set of files, one end."""

import configparser
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest
import yaml
from processes import (
    LONG,
    ROOT,
    children,
    ends,
    same_run,
    started,
    state,
    until,
    until_step,
    wait_for,
)
from system import photos, tiny

from dmljax.runs import training
from dmljax.train import journal

CONFIG = LONG | {"method": {"name": "pairs", "dim": 4, "memory": 16}}
CONFIG |= {"evaluate": LONG["evaluate"] | {"clustering": {"seeds": [0]}, "every": 10}}
# One worker alone computes `undisturbed_run`.
pytestmark = pytest.mark.xdist_group("launch")


def test_two_processes_are_one_run_through_a_kill_and_a_signal(tmp_path):
    """A killed process ends all, a signalled one stops all, and the result is that of one."""
    config, run = tiny(tmp_path, **CONFIG), tmp_path / "run"
    _kill_one(config, run, step=6)
    _signal_one(config, run, step=12)
    with started(tmp_path, run, config, processes=2) as process:
        printed = ends(process, 0, tmp_path)
    # Every line is printed once, by process 0.
    assert printed.count("on 4 cpu devices") == 1 and "[0] npz: 32 training images" in printed
    assert printed.count("test split after step 50") == 1
    training.run(tiny(tmp_path, **CONFIG, runtime={"devices": 4}), tmp_path / "one")
    of_two, of_one = (journal.read(d / "metrics.jsonl") for d in (run, tmp_path / "one"))
    assert [sorted(x) for x in of_two] == [sorted(x) for x in of_one]
    # Between processes sums are taken in another order: 1e-6 of the largest after 50 steps of Adam.
    for a, b in zip(of_two, of_one, strict=True):
        np.testing.assert_allclose([a[k] for k in a], [b[k] for k in a], rtol=1e-3, atol=1e-5)
    one, two = state(tmp_path / "one"), state(run)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4)


def _kill_one(config, run, *, step, number=1):
    with started(run.parent, run, config, processes=2) as process:
        until_step(run, step, process)
        pids = children(process.pid)
        os.kill(pids[number], signal.SIGKILL)
        ends(process, 137, run.parent, within=20)
        assert not any(pathlib.Path(f"/proc/{pid}").exists() for pid in pids)


def _signal_one(config, run, *, step, number=signal.SIGTERM):
    """Only process 1 gets the signal. Both must stop after the same step, or one waits forever."""
    with started(run.parent, run, config, processes=2) as process:
        until_step(run, step, process)
        os.kill(children(process.pid)[1], number)
        printed = ends(process, 128 + number, run.parent, within=30)
    assert "continuing from step" in printed and printed.count("the same command continues") == 1


@pytest.fixture(scope="module")
def undisturbed_run(tmp_path_factory):
    """Two processes of two devices that nothing interrupts."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with started(folder, folder / "run", tiny(folder, **CONFIG), processes=2) as process:
        assert ends(process, 0, folder).count("test split after step 50") == 1
    return folder / "run"


@pytest.mark.slow
def test_a_run_interrupted_in_any_process_gives_the_same_numbers(undisturbed_run, tmp_path):
    config, run = tiny(tmp_path, **CONFIG), tmp_path / "run"
    for number, step in enumerate((8, 18, 24, 34)):
        _kill_one(config, run, step=step, number=number % 2)
    _signal_one(config, run, step=40, number=signal.SIGINT)
    with started(tmp_path, run, config, processes=2) as process:
        ends(process, 0, tmp_path)
    same_run(run, undisturbed_run)


@pytest.mark.slow
def test_one_process_writes_the_page_of_the_embeddings_of_all(tmp_path):
    config = tiny(tmp_path, pictures="page")
    with started(tmp_path, tmp_path / "run", config, processes=2) as process:
        assert ends(process, 0, tmp_path).count("report: ") == 1
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_launcher_stops_all_processes(tmp_path, number):
    config, run = tiny(tmp_path, **CONFIG | {"steps": 100_000}), tmp_path / "run"
    with started(tmp_path, run, config, "--config.runtime.workers=1", processes=2) as process:
        until_step(run, 4, process)
        process.send_signal(number)
        assert "saved; the same" in ends(process, 128 + number, tmp_path, within=30)


@pytest.mark.slow
def test_another_config_is_refused_in_one_line_and_ends_all_processes(undisturbed_run, tmp_path):
    shutil.copytree(undisturbed_run, tmp_path / "run")
    other = tiny(tmp_path, **CONFIG, loss={"name": "triplet", "margin": 0.3})
    with started(tmp_path, tmp_path / "run", other, processes=2) as process:
        printed = ends(process, 2, tmp_path, within=60)
    assert printed.count("loss.margin was 0.2 and is now 0.3") == 1 and "Traceback" not in printed


@pytest.mark.slow
def test_an_image_that_one_process_cannot_read_ends_all_processes(tmp_path):
    root = photos(tmp_path)
    bad = root / "c1" / "012.png"
    bad.write_bytes(bad.read_bytes()[:100])
    dataset = {"name": "folder", "root": str(root), "split": 0.5}
    config = tiny(tmp_path, **CONFIG | {"dataset": dataset})
    with started(tmp_path, tmp_path / "run", config, processes=2) as process:
        until(lambda: (tmp_path / "run" / "config.json").exists(), process, tmp_path)
        printed = ends(process, 2, tmp_path, within=60)
        assert not children(process.pid)
    assert re.search(r"\[[01]\] error: .*12.png cannot be read: .*unreadable='skip'", printed)


def _flags():
    """The flags that `dmljax train` knows."""
    command = [sys.executable, "-m", "dmljax.main", "train", "--help"]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT).stdout
    return set(re.findall(r"--([a-z_]+)", printed))


def _arguments(words):
    """The arguments of dmljax.main in a command line. Fails if a flag is unknown."""
    arguments = words[words.index("dmljax.main") + 1 :]
    names = {word.removeprefix("--").partition("=")[0] for word in arguments}
    assert {n for n in names if not n.startswith("config.")} <= _flags(), arguments
    return arguments


def _printed(*words, status=0):
    completed = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert completed.returncode == status, completed.stderr
    return completed.stdout + completed.stderr


def test_a_dry_run_prints_what_every_task_of_slurm_executes():
    config, notes = "configs/glyphs.py", "--config.notes=two words; and more"
    arguments = [f"--config={config}", "--workdir=/mnt/x", notes, "--distributed"]
    printed = _printed("launch/slurm.sh", "--dry-run", config, "--workdir=/mnt/x", notes)
    assert _arguments(shlex.split(printed)) == arguments
    assert "--cpus-per-task=1" in printed and "--gpus-per-node=0" in printed


@pytest.mark.parametrize(
    "words",
    [
        ("local.sh", "none", "configs/glyphs.py"),
        ("local.sh", "2"),
        ("slurm.sh",),
        ("tpu_pod.sh", "run", "pod", "zone-b", "configs/glyphs.py"),
        ("tpu_pod.sh", "--dry-run", "walk", "pod", "zone-b"),
    ],
)
def test_a_launcher_without_an_argument_explains_its_usage(words):
    assert f"launch/{words[0]}" in _printed(f"launch/{words[0]}", *words[1:], status=2)


def _yaml(name):
    return yaml.safe_load((ROOT / "launch" / name).read_text())


def test_the_job_set_runs_the_command_on_every_chip_and_not_again_after_a_wrong_config():
    job_set = _yaml("gke.yaml")
    assert (job_set["apiVersion"], job_set["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job_set["metadata"]["name"])
    assert job_set["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
    failure = job_set["spec"]["failurePolicy"]
    assert set(failure) == {"maxRestarts", "rules"} and failure["maxRestarts"] > 1
    [rule] = failure["rules"]
    assert rule == {"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    [job] = job_set["spec"]["replicatedJobs"]
    assert set(job) == {"name", "replicas", "template"} and job["replicas"] == 1
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    [rule] = spec["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [2]
    assert rule["onExitCodes"]["containerName"] == container["name"]
    assert pod["restartPolicy"] == "Never" and spec["backoffLimit"] == 0
    chips = container["resources"]["limits"]["google.com/tpu"]
    side, other = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    # A pod for each host, and every chip of the slice asked for.
    assert spec["parallelism"] == spec["completions"] == int(side) * int(other) // chips
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    values = dict(word.split("=", 1) for word in _arguments(container["command"]) if "=" in word)
    mounts = tuple(m["mountPath"] + "/" for m in container["volumeMounts"])
    for flag in ("--workdir", "--config.dataset.root", "--config.net.weights"):
        assert values[flag].startswith(mounts)
    assert (ROOT / values["--config"]).exists() and "--distributed" in container["command"]


def test_the_job_in_the_job_set_follows_the_schema_of_kubernetes():
    schemas = pytest.importorskip("kubernetes_validate")
    [replicated] = _yaml("gke.yaml")["spec"]["replicatedJobs"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "dmljax"}}
    job |= {"spec": replicated["template"]["spec"]}
    version = schemas.latest_version()
    assert schemas.validate(job, version, strict=True)
    job["spec"]["podFailurePolicy"]["rules"][0]["onExitCode"] = {}
    with pytest.raises(schemas.ValidationError, match="onExitCode"):
        schemas.validate(job, version, strict=True)


def test_the_image_for_training_has_what_the_job_set_names():
    text = (ROOT / "launch" / "train.Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(None, 1) for line in text.splitlines() if line and line[0] != "#"]
    names, last = [name for name, _ in lines], {name: rest for name, rest in lines}
    assert names[0] == "FROM" and "3.12" in lines[0][1]
    copied = [word for name, rest in lines if name == "COPY" for word in rest.split()[:-1]]
    assert all((ROOT / word).exists() for word in copied)
    # The command of gke.yaml is relative to this folder, and needs its config.
    assert last["WORKDIR"] == "/dmljax" and "configs" in copied and "dmljax" in copied
    [job] = _yaml("gke.yaml")["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    words = pod["containers"][0]["command"]
    assert words[: words.index("dmljax.main") + 1] == json.loads(last["ENTRYPOINT"])
    assert int(last["USER"]) == pod["securityContext"]["runAsUser"]
    assert names.index("USER") > names.index("RUN")
    options = configparser.ConfigParser()
    options.read(ROOT / "setup.cfg")
    extras = re.search(r"EXTRAS=(\S+)", last["ARG"])[1].split(",")
    assert "tpu" in extras and set(extras) <= set(options["options.extras_require"])


@pytest.mark.parametrize("name", ["train", "serve"])
def test_the_images_look_for_the_driver_where_gke_mounts_it(name):
    text = (ROOT / "launch" / f"{name}.Dockerfile").read_text()
    lines = [shlex.split(line) for line in text.splitlines() if line.startswith("ENV ")]
    variables = dict(word.split("=", 1) for line in lines for word in line[1:])
    assert variables["LD_LIBRARY_PATH"] == "/usr/local/nvidia/lib64"
    assert variables["PATH"].split(":") == ["/usr/local/nvidia/bin", "$PATH"]


@pytest.mark.parametrize("statuses", [(1, 2), (137, 1), (2, 137)])
def test_the_status_is_that_of_the_process_that_caused_the_end(tmp_path, statuses):
    """In this order: killed (137), ended with a message (2), ended because another one did (1)."""
    python, may_end = tmp_path / "python", tmp_path / "may_end"
    cases = "\n".join(f"*--process={i}) exit {status} ;;" for i, status in enumerate(statuses))
    begin = f"touch {tmp_path}/$$.pid\nuntil [[ -e {may_end} ]]; do sleep 0.05; done"
    python.write_text(f'#!/usr/bin/env bash\n{begin}\ncase "$*" in\n{cases}\nesac\n')
    python.chmod(0o755)
    command = [str(ROOT / "launch" / "local.sh"), "2", "configs/glyphs.py"]
    env = os.environ | {"PYTHON": str(python), "PORT": "1"}
    with subprocess.Popen(command, env=env, stderr=subprocess.PIPE) as launcher:
        try:
            wait_for(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
            launcher.send_signal(signal.SIGSTOP)  # so that it sees both processes end at once
            wait_for(lambda: _state(launcher.pid) == "T")
            may_end.touch()
            pids = [path.stem for path in tmp_path.glob("*.pid")]
            wait_for(lambda: all(_state(pid) == "Z" for pid in pids))
            launcher.send_signal(signal.SIGCONT)
            assert launcher.wait(timeout=30) == max(statuses)
        finally:
            launcher.kill()  # waiting for a stopped launcher would never end


def _state(pid):
    """The letter of a process's state in /proc: T is stopped, Z has ended."""
    return pathlib.Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.parametrize(
    "visible, platforms, expected",
    [
        ("4,5,6,7", "", ["0,1", "2,3"]),
        ("4,5,6,7", "cpu,cuda", ["none", "none"]),
        ("4,5,-1,7", "", ["0", "1"]),
        ("GPU-8f,GPU-9a", "", ["0", "1"]),
        ("NoDevFiles", "", ["none", "none"]),
    ],
)
def test_processes_share_the_visible_gpus(tmp_path, visible, platforms, expected):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho is ${JAX_LOCAL_DEVICE_IDS:-none}\n")
    python.chmod(0o755)
    environment = os.environ | {"PYTHON": str(python), "PORT": "1"}
    environment |= {"CUDA_VISIBLE_DEVICES": visible, "JAX_PLATFORMS": platforms}
    command = [str(ROOT / "launch" / "local.sh"), "2", "configs/glyphs.py"]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True)
    lines = sorted(completed.stdout.splitlines())
    assert lines == [f"[{i}] is {ids}" for i, ids in enumerate(expected)]
