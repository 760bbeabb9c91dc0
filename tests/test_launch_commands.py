"""Every command of launch/ and docs/scale.md trains with as many devices as it asks for."""

import re
import shlex

import jax
import numpy as np
import pytest
import yaml
from processes import ROOT, command

from dmljax import main
from dmljax.train import journal

CHIPS = {"4x4": 16}  # of the slices that the files and the page name


def _commands():
    """`(place, config, devices)` of every command that trains."""
    [job] = yaml.safe_load((ROOT / "launch" / "gke.yaml").read_text())["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    [container] = spec["template"]["spec"]["containers"]
    chips = container["resources"]["limits"]["google.com/tpu"]
    yield "gke.yaml", _config(container["command"]), spec["completions"] * chips
    page = (ROOT / "docs" / "scale.md").read_text()
    page = page[page.index("## Many processes") : page.index("## What all hosts must share")]
    for line in re.findall(r"`([^`]*configs/[^`]*)`", page):
        yield line, _config(shlex.split(line)), _devices(line)


def _config(words):
    [config] = [w.removeprefix("--config=") for w in words if re.search(r"configs/\w+\.py$", w)]
    return config


def _devices(line):
    """How many devices a command of the page asks for."""
    if match := re.search(r"JAX_NUM_CPU_DEVICES=(\d+) launch/local.sh (\d+)", line):
        return int(match[1]) * int(match[2])
    if match := re.search(r"launch/local.sh (\d+)", line):
        return int(match[1])
    if match := re.search(r"--nodes=(\d+) --gpus-per-node=(\d+)", line):
        return int(match[1]) * int(match[2])
    if "tpu_pod.sh" in line:
        return CHIPS["4x4"]
    if match := re.search(r"--processes=(\d+)", line):
        return 2 * int(match[1])
    raise AssertionError(f"how many devices does this command ask for? {line}")


COMMANDS = list(_commands())
# The most devices of every config.
RUNS = sorted(
    {config: devices for *_, config, devices in sorted(COMMANDS, key=lambda x: x[2])}.items()
)


def test_every_way_to_start_has_a_command():
    places = " ".join(place for place, *_ in COMMANDS)
    for name in ("gke.yaml", "local.sh", "slurm.sh", "tpu_pod.sh", "dmljax.main"):
        assert name in places
    assert max(devices for _, devices in RUNS) == 16


# `cub_graph` has the same recipe as `sop_graph`, and as many devices; glyphs have fewer.
FAST = ("configs/cub_graph.py", 16)


@pytest.mark.parametrize(
    "config, devices", [pytest.param(*x, marks=[pytest.mark.slow] * (x != FAST)) for x in RUNS]
)
def test_every_command_trains_with_the_devices_it_asks_for(
    tmp_path, monkeypatch, capsys, config, devices
):
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(40), 10)
    images = rng.integers(0, 256, (len(labels), 12, 12, 3)).astype(np.uint8)
    np.savez(tmp_path / "noise.npz", images=images, labels=labels)
    flags = [
        f"--config.dataset={{'name': 'npz', 'path': '{tmp_path / 'noise.npz'}', 'split': 0.9}}",
        "--config.net={'name': 'convnet', 'widths': [4], 'strides': [4]}",
        *(f"--config.{field}=unchanged" for field in ("transform", "eval_transform")),
        "--config.normalize=unit",
        *("--config.steps=2", "--config.log_every=1", "--config.reload_best_at=[]"),
        *("--config.schedule={'name': 'constant'}", "--config.pictures=False"),
        "--config.evaluate={'every': 2, 'ks': [1], 'clustering': False}",
    ]
    if config != "configs/glyphs.py":
        flags.append("--config.method.dim=16")
    words = ["train", f"--config={config}", *flags, f"--workdir={tmp_path / 'run'}"]
    if devices <= jax.device_count():
        monkeypatch.chdir(ROOT)
        assert main.main([*words, f"--config.runtime.devices={devices}"]) == 0
        printed = capsys.readouterr().out
    else:
        completed = command(*words, cwd=ROOT, JAX_NUM_CPU_DEVICES=str(devices), JAX_PLATFORMS="cpu")
        printed = completed.stdout
        assert completed.returncode == 0, printed + completed.stderr
    assert f"on {devices} cpu devices" in printed
    losses = [
        row["loss"] for row in journal.read(tmp_path / "run" / "metrics.jsonl") if "loss" in row
    ]
    assert len(losses) == 2 and np.isfinite(losses).all()
