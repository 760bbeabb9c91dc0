"""`launch/tpu_pod.sh` with a `gcloud` that runs the commands in two folders instead of on hosts."""

import functools
import os
import shlex
import shutil
import subprocess

import pytest
from processes import ROOT, wait_for

GCLOUD = """#!/usr/bin/env bash
# Copies to, or runs a command on, each host of a slice: a home folder in $HOSTS.
set -euo pipefail
[[ "$1 $2 $3" == "compute tpus tpu-vm" && $* == *--worker=all* ]] || exit 99
verb=$4 target=$5
case $verb in
  scp) for home in "$HOSTS"/*; do cp "$target" "$home/${6#*:}"; done ;;
  ssh)
    for word; do [[ $word == --command=* ]] && command=${word#--command=}; done
    status=0
    for home in "$HOSTS"/*; do (cd "$home" && HOME=$home bash -c "$command") || status=$?; done
    exit $status ;;
  *) exit 99 ;;
esac
"""
# What a host needs of Python: `pip install uv`, `uv venv`, `uv pip install`, and the run itself.
PYTHON3 = """#!/usr/bin/env bash
echo "$(basename "$0") $*" >> "$HOME/calls.txt"
if [[ "$*" == *" venv "* ]]; then mkdir -p .venv/bin; cp "$0" .venv/bin/python; fi
if [[ "$*" == *dmljax.main* ]]; then
  echo "step 1"
  trap 'echo saved; exit 143' TERM
  for ((i = 0; i < 200; i++)); do if [[ -e $HOME/done ]]; then exit 0; fi; sleep 0.1; done
fi
"""


@pytest.fixture
def slice_of_two(tmp_path):
    """The environment of the launcher, and the homes of the hosts."""
    tools, hosts = tmp_path / "tools", tmp_path / "hosts"
    tools.mkdir()
    for name, text in {"gcloud": GCLOUD, "python3": PYTHON3}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    homes = [hosts / name for name in ("a", "b")]
    for home in homes:
        home.mkdir(parents=True)
    environment = os.environ | {"PATH": f"{tools}:{os.environ['PATH']}", "HOSTS": str(hosts)}
    yield environment, homes
    _launch(environment, "stop")


def _launch(environment, verb, *words):
    command = ["launch/tpu_pod.sh", verb, "pod", "zone-b", *words]
    completed = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=60
    )
    return completed.returncode, completed.stdout + completed.stderr


def test_the_clone_is_installed_with_a_python_of_its_own(slice_of_two):
    environment, homes = slice_of_two
    assert _launch(environment, "setup")[0] == 0
    for home in homes:
        assert (home / "dmljax" / "dmljax" / "main.py").exists()
        calls = (home / "calls.txt").read_text()
        assert "--python=3.12 .venv" in calls and "-e .[tpu]" in calls
        assert (home / "dmljax" / ".venv" / "bin" / "python").exists()


def test_a_run_survives_the_connection_and_is_asked_stopped_and_continued(slice_of_two):
    environment, homes = slice_of_two
    _launch(environment, "setup")
    words = ("configs/glyphs.py", "--workdir=/mnt/x", "--config.notes=it's two")
    # `run` returns although the run goes on: nothing of it hangs on the connection.
    assert _launch(environment, "run", *words)[0] == 0
    logs = [home / "dmljax" / "run.log" for home in homes]
    wait_for(lambda: all(log.exists() and "step 1" in log.read_text() for log in logs))
    for home in homes:
        expected = "--config=configs/glyphs.py --workdir=/mnt/x --config.notes=it's two"
        call = (home / "calls.txt").read_text().splitlines()[-1]
        assert call == f"python -m dmljax.main {expected} --distributed"
        pid = int((home / "dmljax" / "run.pid").read_text())
        assert os.getsid(pid) != os.getsid(0)  # so SIGHUP of a lost connection does not reach it
    status, text = _launch(environment, "status")
    assert status == 0 and text.count("is running: step 1") == 2
    status, text = _launch(environment, "run", *words)
    assert status and text.count("is running already") == 2
    assert _launch(environment, "stop")[0] == 0
    wait_for(lambda: all((home / "dmljax" / "run.status").exists() for home in homes))
    assert _launch(environment, "status")[1].count("ended with status 143: saved") == 2
    for home in homes:
        (home / "done").touch()
    assert _launch(environment, "run", *words)[0] == 0
    wait_for(lambda: _launch(environment, "status")[1].count("ended with status 0") == 2)


def test_setup_says_which_changes_it_does_not_copy(slice_of_two, tmp_path):
    environment, homes = slice_of_two
    clone = tmp_path / "clone"
    (clone / "launch").mkdir(parents=True)
    shutil.copy(ROOT / "launch" / "tpu_pod.sh", clone / "launch")
    (clone / "a.txt").write_text("committed")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], cwd=clone, check=True)
    setup = [str(clone / "launch" / "tpu_pod.sh"), "setup", "pod", "zone-b"]
    run = functools.partial(subprocess.run, capture_output=True, text=True, env=environment)
    assert run(setup, check=True).stderr == ""
    (clone / "a.txt").write_text("changed")
    (clone / "b.txt").write_text("new")
    assert "without your changes of 2 files" in run(setup, check=True).stderr
    assert (homes[0] / "dmljax" / "a.txt").read_text() == "committed"


def test_the_logs_of_all_hosts_are_followed(slice_of_two):
    environment, homes = slice_of_two
    for home in homes:
        (home / "dmljax").mkdir()
        (home / "dmljax" / "run.log").write_text(f"log of {home.name}\n")
    command = ["timeout", "3", "launch/tpu_pod.sh", "--dry-run", "logs", "pod", "zone-b"]
    printed = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    sent = shlex.split(printed.stdout.splitlines()[1])[-1].removeprefix("--command=")
    for home in homes:
        followed = subprocess.Popen(
            ["bash", "-c", f"exec {sent}"], cwd=home, stdout=subprocess.PIPE, text=True
        )
        assert followed.stdout.readline() == f"log of {home.name}\n"
        with (home / "dmljax" / "run.log").open("a") as log:
            log.write("step 2\n")
        assert followed.stdout.readline() == "step 2\n"
        followed.kill()
        followed.communicate()
