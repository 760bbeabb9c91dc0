"""Compares the embeddings of a program in a bundle with the embeddings of the checkpoint.

Each program runs in a process of its own, from the files of the bundle, as a user will run it:

    python -m dmljax.bundle.parity FOLDER INPUTS.safetensors OUTPUTS.safetensors PROGRAM
"""

import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file

from dmljax.bundle.processes import run_module

_NEIGHBORS = 10
_FEW = 12  # images that also go through the program one by one and three by three
# Modules that a user of a bundle does not need.
_HEAVY = ("flax", "grain", "orbax", "optax", "sklearn", "tensorflow", "torch", "ml_collections")


class MismatchedProgram(ValueError):
    """A program gives other embeddings than the checkpoint."""


def run_program(
    folder: pathlib.Path, inputs: np.ndarray, program: str, *, largest: int
) -> dict[str, np.ndarray]:
    """The embeddings of `inputs` by a new process, in batches of the largest size, 3 and 1."""
    with tempfile.TemporaryDirectory() as scratch:
        source, target = (pathlib.Path(scratch) / name for name in ("in", "out"))
        save_file({"inputs": inputs, "largest": np.array([largest])}, source)
        if problem := run_module("dmljax.bundle.parity", folder, source, target, program):
            raise MismatchedProgram(f"the program {program} does not run: {problem}")
        return load_file(target)


def compare(
    reference: np.ndarray,
    outputs: Mapping[str, np.ndarray],
    labels: np.ndarray,
    *,
    limits: tuple[float, float],
) -> dict[str, Any]:
    """The parity report of a program; raises `MismatchedProgram` above the limits.

    `limits` are the largest difference of a coordinate, relative to the largest coordinate if that
    exceeds 1, and the smallest cosine. Neighbors may differ where two of them are closer than the
    difference allows.
    """
    from dmljax.bundle.loading import differences

    report: dict[str, Any] = {"images": len(reference)}
    limit, least = limits[0] * max(1.0, float(np.abs(reference).max())), limits[1]
    report["limits"] = {"largest_difference": limit, "smallest_cosine": least}
    for name, rows in sorted(outputs.items()):
        if rows.shape[1:] != reference.shape[1:] or not np.isfinite(rows).all():
            raise MismatchedProgram(
                f"the program gives {list(rows.shape)} with "
                f"{int((~np.isfinite(rows)).sum())} values that are not finite"
            )
        difference, cosine = differences(reference[: len(rows)], rows)
        report[name] = {"largest_difference": difference, "smallest_cosine": cosine}
        if not (difference <= limit and cosine >= least):
            raise MismatchedProgram(
                f"the program differs from the checkpoint by {difference:.2e} (limit {limit:.0e}), "
                f"smallest cosine {cosine:.6f} (limit {least}), in {name.replace('_', ' ')}"
            )
    report |= _rankings(reference, outputs["largest_batch"], labels)
    return report


def _rankings(first: np.ndarray, second: np.ndarray, labels: np.ndarray) -> dict[str, Any]:
    k = min(_NEIGHBORS, len(first) - 1)
    if k < 1:
        return {}
    near_first, near_second = _nearest(first, k), _nearest(second, k)
    same_set = [set(a) == set(b) for a, b in zip(near_first, near_second, strict=True)]
    return {
        "same_nearest": float(np.mean(near_first[:, 0] == near_second[:, 0])),
        f"same_{k}_nearest": float(np.mean(same_set)),
        "checkpoint_R@1": float(np.mean(labels[near_first[:, 0]] == labels)),
        "program_R@1": float(np.mean(labels[near_second[:, 0]] == labels)),
    }


def _nearest(x: np.ndarray, k: int) -> np.ndarray:
    x = x.astype(np.float64)
    squares = np.sum(x * x, axis=1)
    distances = squares[:, None] + squares[None] - 2 * x @ x.T
    np.fill_diagonal(distances, np.inf)
    return np.argsort(distances, axis=1, kind="stable")[:, :k]


def _main(words: Sequence[str]) -> None:
    folder, source, target, program = words
    from dmljax.bundle import loading

    tensors = load_file(source)
    inputs, largest = tensors["inputs"], int(tensors["largest"][0])
    outputs = {}
    for name, size, rows in (
        ("largest_batch", largest, None),
        ("one", 1, _FEW),
        ("three", 3, _FEW),
    ):
        bundle = loading.load(folder, program=program, batch_sizes=[size])
        outputs[name] = bundle.embed_prepared(inputs[:rows])
    heavy = [name for name in _HEAVY if name in sys.modules]
    if heavy:
        raise ImportError(f"loading a bundle imports {', '.join(heavy)}, which it must not need")
    save_file(outputs, target)


if __name__ == "__main__":
    _main(sys.argv[1:])
