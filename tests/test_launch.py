"""Two processes are one run: the same numbers, one set of files, one end."""

import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import yaml
from processes import LONG, ROOT, children, ends, same_run, started, state, until, until_step
from system import photos, tiny

from dmljax.runs import training
from dmljax.train import journal

CONFIG = LONG | {"method": {"name": "pairs", "dim": 4, "memory": 16}}
# One worker alone computes `undisturbed_run`.
pytestmark = pytest.mark.xdist_group("launch")


@pytest.fixture(scope="module")
def undisturbed_run(tmp_path_factory):
    """The folder and the output of two processes of two devices that nothing interrupts."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with started(folder, folder / "run", tiny(folder, **CONFIG), processes=2) as process:
        return folder, ends(process, 0, folder)


def test_two_processes_compute_what_one_does(undisturbed_run, tmp_path):
    folder, printed = undisturbed_run
    training.run(tiny(folder, **CONFIG, runtime={"devices": 4}), tmp_path / "one")
    of_two, of_one = (journal.read(d / "metrics.jsonl") for d in (folder / "run", tmp_path / "one"))
    assert [sorted(x) for x in of_two] == [sorted(x) for x in of_one]
    # Between processes sums are taken in another order: 1e-6 of the largest after 50 steps of Adam.
    for a, b in zip(of_two, of_one, strict=True):
        np.testing.assert_allclose([a[k] for k in a], [b[k] for k in a], rtol=1e-3, atol=1e-5)
    one, two = state(tmp_path / "one"), state(folder / "run")
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-4)
    # Every line is printed once, by process 0.
    assert printed.count("on 4 cpu devices") == 1 and "[0] npz: 32 training images" in printed
    assert printed.count("test split after step 50") == 1


def test_a_killed_process_ends_all_and_a_signalled_one_stops_all(undisturbed_run, tmp_path):
    config, run = tiny(tmp_path, **CONFIG), tmp_path / "run"
    _kill_one(config, run, step=14)
    _signal_one(config, run, step=30)
    lines = (run / "metrics.jsonl").read_bytes()
    assert (undisturbed_run[0] / "run" / "metrics.jsonl").read_bytes().startswith(lines)


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


@pytest.mark.slow
def test_a_run_interrupted_in_any_process_gives_the_same_numbers(undisturbed_run, tmp_path):
    config, run = tiny(tmp_path, **CONFIG), tmp_path / "run"
    for number, step in enumerate((8, 18, 24, 34)):
        _kill_one(config, run, step=step, number=number % 2)
    _signal_one(config, run, step=40, number=signal.SIGINT)
    with started(tmp_path, run, config, processes=2) as process:
        ends(process, 0, tmp_path)
    same_run(run, undisturbed_run[0] / "run")


@pytest.mark.slow
def test_one_process_writes_the_page_of_the_embeddings_of_all(tmp_path):
    config = tiny(tmp_path, pictures=True)
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
    shutil.copytree(undisturbed_run[0] / "run", tmp_path / "run")
    other = tiny(tmp_path, **CONFIG, loss={"name": "triplet", "margin": 0.3})
    with started(tmp_path, tmp_path / "run", other, processes=2) as process:
        printed = ends(process, 2, tmp_path, within=60)
    assert printed.count("loss.margin (0.2 there, 0.3 here)") == 1 and "Traceback" not in printed


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


def test_dry_runs_print_what_every_host_executes():
    config, notes = "configs/glyphs.py", "--config.notes=two words; and more"
    arguments = [f"--config={config}", "--workdir=/mnt/x", notes, "--distributed"]
    printed = _printed("launch/slurm.sh", "--dry-run", config, "--workdir=/mnt/x", notes)
    assert _arguments(shlex.split(printed)) == arguments
    run = ("run", "pod", "zone-b", config, "--workdir=/mnt/x", notes)
    lines = _printed("launch/tpu_pod.sh", "--dry-run", *run).splitlines()
    assert lines[0].startswith("on every host of pod: cd dmljax && exec .venv/bin/python ")
    assert _arguments(shlex.split(lines[0])) == arguments
    # gcloud gets the command as one word, which the shell of the host splits again.
    sent = shlex.split(lines[1])
    assert " ".join(sent[:5]) == "gcloud compute tpus tpu-vm ssh"
    assert sent[5:8] == ["pod", "--zone=zone-b", "--worker=all"]
    assert _arguments(shlex.split(sent[8])) == arguments


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


# What the API of JobSet asks for: required fields of each kind of object, and the types of fields.
JOBSET = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": str},
    "spec": {
        "failurePolicy": {"maxRestarts": int},
        "replicatedJobs": [
            {
                "name": str,
                "replicas": int,
                "template": {
                    "spec": {
                        "parallelism": int,
                        "completions": int,
                        "backoffLimit": 0,
                        "template": {
                            "spec": {
                                "restartPolicy": "Never",
                                "terminationGracePeriodSeconds": int,
                                "nodeSelector": {
                                    "cloud.google.com/gke-tpu-accelerator": str,
                                    "cloud.google.com/gke-tpu-topology": str,
                                },
                                "containers": [
                                    {
                                        "name": str,
                                        "image": str,
                                        "command": [str],
                                        "resources": {"limits": {"google.com/tpu": int}},
                                        "volumeMounts": [{"name": str, "mountPath": str}],
                                    }
                                ],
                                "volumes": [
                                    {"name": str, "persistentVolumeClaim": {"claimName": str}}
                                ],
                            }
                        },
                    }
                },
            }
        ],
    },
}


def _fits(actual, expected, path="jobset"):
    if isinstance(expected, dict):
        assert isinstance(actual, dict), path
        for name, inner in expected.items():
            assert name in actual, f"{path} has no {name}"
            _fits(actual[name], inner, f"{path}.{name}")
    elif isinstance(expected, list):
        assert isinstance(actual, list) and actual, path
        for inner in actual:
            _fits(inner, expected[0], path)
    elif isinstance(expected, type):
        assert type(actual) is expected, f"{path} is {actual!r}"
    else:
        assert actual == expected, path


def test_the_job_set_is_valid_and_runs_the_command_on_every_chip():
    job_set = yaml.safe_load((ROOT / "launch" / "gke.yaml").read_text())
    _fits(job_set, JOBSET)
    [job] = job_set["spec"]["replicatedJobs"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", job_set["metadata"]["name"])
    spec = job["template"]["spec"]
    pod = spec["template"]["spec"]
    [container] = pod["containers"]
    chips = container["resources"]["limits"]["google.com/tpu"]
    side, other = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    # A pod for each host, and every chip of the slice asked for.
    assert spec["parallelism"] == spec["completions"] == int(side) * int(other) // chips
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    arguments = _arguments(container["command"])
    workdir = next(w for w in arguments if w.startswith("--workdir=")).partition("=")[2]
    assert any(workdir.startswith(m["mountPath"] + "/") for m in container["volumeMounts"])
    config = next(w for w in arguments if w.startswith("--config=")).partition("=")[2]
    assert (ROOT / config).exists() and "--distributed" in arguments


@pytest.mark.parametrize("statuses", [(1, 2), (2, 1), (1, 137), (137, 1), (2, 137)])
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
            _until(lambda: len(list(tmp_path.glob("*.pid"))) == 2)
            launcher.send_signal(signal.SIGSTOP)  # so that it sees both processes end at once
            _until(lambda: _state(launcher.pid) == "T")
            may_end.touch()
            pids = [path.stem for path in tmp_path.glob("*.pid")]
            _until(lambda: all(_state(pid) == "Z" for pid in pids))
            launcher.send_signal(signal.SIGCONT)
            assert launcher.wait(timeout=30) == max(statuses)
        finally:
            launcher.kill()  # waiting for a stopped launcher would never end


def _state(pid):
    """The letter of a process's state in /proc: T is stopped, Z has ended."""
    return pathlib.Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]


def _until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
