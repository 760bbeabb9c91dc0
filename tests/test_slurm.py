"""`launch/slurm.sh` under a Slurm of one node, which the test starts where it is installed."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import pytest
from processes import LONG, ROOT, wait_for
from system import tiny, write_config

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("slurmctld", "slurmd", "munged"))),
        reason="needs root and Debian's slurm-wlm and munge",
    ),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """Settings of a cluster with keys, ports and folders of its own; it ends with the module."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    host, (control, node) = os.uname().nodename, _ports()
    settings = f"""
        ClusterName=test
        SlurmctldHost={host}(127.0.0.1)
        SlurmUser=root
        SlurmdUser=root
        AuthInfo=socket={folder}/munge.socket
        StateSaveLocation={folder}/state
        SlurmdSpoolDir={folder}/spool
        SlurmctldPidFile={folder}/slurmctld.pid
        SlurmdPidFile={folder}/slurmd.pid
        SlurmctldLogFile={folder}/slurmctld.log
        SlurmdLogFile={folder}/slurmd.log
        SlurmctldPort={control}
        SlurmdPort={node}
        ProctrackType=proctrack/linuxproc
        TaskPlugin=task/none
        JobAcctGatherType=jobacct_gather/none
        SelectType=select/cons_tres
        SlurmdParameters=config_overrides
        ReturnToService=2
        MailProg=/bin/true
        GresTypes=gpu
        NodeName={host} NodeAddr=127.0.0.1 CPUs=8 Gres=gpu:4
        PartitionName=all Nodes=ALL Default=YES
    """
    for number in range(4):
        (folder / f"nvidia{number}").symlink_to("/dev/null")  # any device will do
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/nvidia[0-3] Flags=nvidia_gpu_env")
    config = folder / "slurm.conf"
    config.write_text("\n".join(line.strip() for line in settings.splitlines()))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    files = {"socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
    files |= {"seed-file": "munge.seed", "key-file": "munge.key"}
    options = [f"--{name}={folder / file}" for name, file in files.items()]
    environment = os.environ | {"SLURM_CONF": str(config), "PYTHON": sys.executable}
    environment |= {"PYTHONPATH": str(ROOT), "JAX_NUM_CPU_DEVICES": "2"}
    with contextlib.ExitStack() as stack:
        for command in (
            ["munged", "--force", "--foreground", *options],
            ["slurmctld", "-D", "-f", str(config)],
            ["slurmd", "-D", "-f", str(config)],
        ):
            log = (folder / f"{command[0]}.out").open("w")
            process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            stack.callback(_end, process, log)
            time.sleep(2)
        _until(lambda: "idle" in _ask(environment, "sinfo", "--noheader"), "the node")
        yield environment
        _ask(environment, "scancel", "--user=root")


def _ports():
    with socket.socket() as a, socket.socket() as b:
        a.bind(("127.0.0.1", 0))
        b.bind(("127.0.0.1", 0))
        return a.getsockname()[1], b.getsockname()[1]


def _end(process, log):
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=20)
    process.kill()
    process.wait()
    log.close()


def _ask(environment, *command, folder=None):
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.strip()


def _until(fn, what, seconds=150):
    wait_for(fn, seconds=seconds, what=what)


def _submit(environment, folder, **fields):
    config = tiny(folder, **LONG | fields, method={"name": "pairs", "dim": 4, "memory": 16})
    script = [str(ROOT / "launch" / "slurm.sh"), write_config(folder, config)]
    job = _ask(
        environment,
        *("sbatch", "--parsable", "--ntasks=2", *script, f"--workdir={folder / 'run'}"),
        folder=folder,
    )
    return job, folder / f"slurm-{job}.out"


def _state(environment, job):
    output = _ask(environment, "scontrol", "show", "job", job)
    return dict(pair.split("=", 1) for pair in output.split() if "=" in pair)


def _reported(folder, step):
    file = folder / "run" / "metrics.jsonl"
    return lambda: file.exists() and f'{{"step": {step}, ' in file.read_text()


def test_a_job_told_to_stop_is_requeued_and_finishes(cluster, tmp_path):
    job, out = _submit(cluster, tmp_path, steps=200, evaluate={"every": 200, "ks": [1]})
    _until(_reported(tmp_path, 20), "the first part")
    _ask(cluster, "scancel", "--signal=TERM", job)
    _until(lambda: _state(cluster, job)["JobState"] == "PENDING", "the requeue")
    assert "saved; the same command continues" in out.read_text()
    _ask(
        cluster, "scontrol", "update", f"JobId={job}", "StartTime=now"
    )  # Slurm would wait 2 minutes
    _until(lambda: _state(cluster, job)["JobState"] == "COMPLETED", "the second part")
    job_state = _state(cluster, job)
    assert job_state["Restarts"] == "1" and job_state["ExitCode"] == "0:0"
    assert out.read_text().count("continuing from step") == 1
    assert out.read_text().count("test split after step 200") == 1


def test_a_cancelled_job_saves_and_stays_cancelled(cluster, tmp_path):
    job, out = _submit(cluster, tmp_path, steps=100_000)
    _until(_reported(tmp_path, 10), "the first part")
    _ask(cluster, "scancel", job)
    _until(lambda: "saved; the same command" in out.read_text(), "the save", 30)
    _until(lambda: _state(cluster, job)["JobState"] == "CANCELLED", "the end")
    time.sleep(3)
    assert _state(cluster, job)["Restarts"] == "0" and "goes back" not in out.read_text()
