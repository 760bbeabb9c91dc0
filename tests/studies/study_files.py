"""Small study files over the small config of `system.py`, and the command in processes."""

import json

import processes
from system import tiny, write_config

from dmljax.files.run_folder import Chosen, Result


def write_study(folder, *, name="small", **fields):
    """A study file over a config of a few steps; fields of the study replace the usual ones."""
    write_config(folder, tiny(folder, **fields.pop("config", {})))
    content = {"base": "tiny.py", "rows": {"plain": {}}, "scores": ["R@1", "MAP@R"]} | fields
    path = folder / f"{name}.py"
    path.write_text(f"def get_study():\n    return {content!r}\n")
    return path


def finished(scores, digest, *, chosen=None, evaluations=()):
    """The result of a finished run."""
    return Result(
        config="tiny",
        argument="",
        status="finished",
        message="",
        step=6,
        chosen=chosen or Chosen(6, None, None, 1, "", False),
        scores=scores,
        evaluations=evaluations,
        digests={"run": digest, "data": "ab" * 32, "weights": None},
        data={"test": {"images": 30, "classes": 3}},
        pretraining=None,
        seed=0,
        steps=6,
        wall_seconds=60.0,
        devices={"count": 1, "kind": "cpu", "processes": 1},
        versions={"jax": "0.10"},
        code={"revision": "c" * 40, "dirty": True},
        average="queries",
        preprocessing="",
    )


def environment(**variables):
    return processes.environment(JAX_NUM_CPU_DEVICES="1", **variables)


def study(*words, folder):
    """`dmljax study WORDS`, waited for."""
    return processes.command("study", *words, cwd=folder, JAX_NUM_CPU_DEVICES="1")


def index(folder, name="small"):
    return json.loads((folder / "runs" / "studies" / name / "index.json").read_text())


def run_folder(folder, row, seed=0, name="small"):
    """The folder of a run by the index of the study."""
    runs = index(folder, name)["planned"]
    digest = next(r["digest"] for r in runs if r["row"] == row and r["seed"] == seed)
    return folder / "runs" / "by_digest" / digest
