"""That methods learn, as a user would run them: minutes each, on real data where it is there.

`DMLJAX_DATA` names the folder of omniglot8.npz. docs/results.md has longer runs.
"""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

from dmljax import log

pytestmark = pytest.mark.slow
ROOT = pathlib.Path(__file__).parents[1]
DATA = os.environ.get("DMLJAX_DATA")
real = pytest.mark.skipif(not DATA, reason="DMLJAX_DATA is not set: the folder of omniglot8.npz")
PIXELS = 0.36  # R@1 of omniglot8 by its pixels


def _plain():
    """The environment without what makes tests strict, and slow to run."""
    ours = ("JAX_", "XLA_")
    return {k: v for k, v in os.environ.items() if not k.startswith(ours)} | {
        "PYTHONPATH": str(ROOT)
    }


@functools.cache
def _learned(title, steps=150):
    command = [sys.executable, str(ROOT / "benchmarks" / "learning.py"), "--methods", title]
    command += ["--data", str(pathlib.Path(DATA) / "omniglot8.npz"), "--seeds", "0"]
    done = subprocess.run(
        [*command, "--steps", str(steps)], capture_output=True, text=True, env=_plain()
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stderr.splitlines()[-1].partition(": ")[2])


@real
@pytest.mark.parametrize(
    "title", ["pairs", "proxies, proxy-anchor", "graph, gatv2", "dvml", "abe, 4 learners"]
)
def test_unseen_alphabets_are_told_better_than_by_their_pixels(title):
    assert _learned(title)["R@1"] > PIXELS + 0.1


@real
def test_without_the_divergence_learners_collapse():
    with_it, without = _learned("abe, 4 learners"), _learned("abe, 4 learners, no divergence")
    assert without["self"] > 0.9 > 0.6 > with_it["self"]


def test_the_newcomers_run(tmp_path):
    command = [sys.executable, "-m", "dmljax.main", "--config=configs/glyphs.py"]
    done = subprocess.run(
        [*command, f"--workdir={tmp_path / 'run'}"],
        capture_output=True,
        text=True,
        env=_plain(),
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    rows = log.read(tmp_path / "run" / "metrics.jsonl")
    raw = next(x["raw/R@1"] for x in rows if "raw/R@1" in x)
    last = [x["test/R@1"] for x in rows if "test/R@1" in x][-1]
    assert raw < 0.2 and last >= 0.78
    for name in ("curves.png", "retrieval.png", "map.png", "config.json"):
        assert (tmp_path / "run" / name).stat().st_size > 0
