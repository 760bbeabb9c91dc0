"""Every recipe computes on 3, 8 and 16 devices what it computes on one, with its own batch."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from processes import ROOT

CONFIGS = {path.stem for path in (ROOT / "configs").glob("*.py")}


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "16"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    script = pathlib.Path(__file__).with_name("on_devices.py")
    completed = subprocess.run(
        [sys.executable, script, tmp_path_factory.mktemp("on_devices")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 0, completed.stderr[-2000:]
    return [json.loads(line) for line in completed.stdout.splitlines()]


def test_every_config_is_the_same_on_any_number_of_devices(programs):
    assert {name for program in programs for name in program["name"].split(",")} >= CONFIGS
    for program in programs:
        assert program["moved"] > 1e-5 and set(program["devices"]) == {"3", "8", "16"}, program
        for on_devices in program["devices"].values():
            assert on_devices["distance"] < 1e-6, program


def test_a_device_computes_its_share_of_a_batch_alone(programs):
    uneven = 0
    for program in programs:
        batch = program["batch"]
        for count, on_devices in program["devices"].items():
            uneven += batch % int(count) > 0
            rows = -(-batch // int(count))
            if batch > 40 and program["chunk"] is None:
                # Optimizers and losses compute a little that is not per image.
                assert on_devices["share"] < 1.25 * rows / batch + 0.02, program
    assert uneven > 20
