"""The environment stays as it is once JAX computes: XLA's threads may read it at any moment."""

import pytest
from processes import ROOT, ends, started
from system import brief, photos

# Imported by every process at its start. A change of the environment becomes a line of $CHANGES.
_HOOK = """
import os, sys

def _record(event, arguments):
    if event in ("os.putenv", "os.unsetenv"):
        bridge = sys.modules.get("jax._src.xla_bridge")
        jax_runs = bridge is not None and bridge.backends_are_initialized()
        distributed = sys.modules.get("jax._src.distributed")
        jax_runs |= distributed is not None and distributed.global_state.client is not None
        with open(os.environ["CHANGES"], "a") as file:
            print("late" if jax_runs else "early", os.fsdecode(arguments[0]), file=file)

sys.addaudithook(_record)
"""


@pytest.mark.parametrize("processes", [pytest.param(None, marks=pytest.mark.slow), 2])
def test_no_run_changes_the_environment_once_jax_computes(tmp_path, processes):
    (tmp_path / "sitecustomize.py").write_text(_HOOK)
    config = brief(tmp_path, pictures="page", runtime={"workers": 1}, steps=1)
    config |= {"dataset": {"name": "folder", "root": str(photos(tmp_path)), "split": 0.5}}
    config |= {"transform": {"name": "resize", "height": 10, "width": 10}}
    config |= {"eval_transform": {"name": "resize", "height": 10, "width": 10}}
    shell = "unset KMP_INIT_AT_FORK KMP_DUPLICATE_LIB_OK CRC32C_SW_MODE XLA_FLAGS; "
    shell += (
        f"export CHANGES='{tmp_path}/changes.txt' HOME=/dev/null PYTHONPATH='{tmp_path}:{ROOT}'; "
    )
    with started(tmp_path, tmp_path / "run", config, processes=processes, shell=shell) as process:
        ends(process, 0, tmp_path)
    assert (tmp_path / "run" / "report.html").exists()
    changes = (tmp_path / "changes.txt").read_text().splitlines()
    assert {"early XLA_FLAGS", "early CRC32C_SW_MODE", "early KMP_INIT_AT_FORK"} <= set(changes)
    assert not [line for line in changes if line.startswith("late")]
