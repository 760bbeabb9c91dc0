"""Proof that a bundle computes what the checkpoint computes: stored examples, and a comparison.

The examples are drawn, not taken from the data set: a bundle can be given away where its images
cannot. For the comparison, each program runs in its own process, from the files of the bundle, as a
user will run it:

    python -m dmljax.bundle.parity FOLDER INPUTS.safetensors OUTPUTS.safetensors PROGRAM
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import load_file, save_file

from dmljax.bundle.images import prepare
from dmljax.bundle.preprocessing import Preprocessing
from dmljax.data.decode import file_bytes

_NEIGHBORS = 10
_FEW = 12  # images that also go through the program one by one and three by three
# Modules that a user of a bundle does not need.
_HEAVY = ("flax", "grain", "orbax", "optax", "sklearn", "tensorflow", "torch", "ml_collections")
_ORIENTATION = 0x0112  # of EXIF


def golden(preprocess: Preprocessing) -> dict[str, np.ndarray]:
    """Returns the stored examples without their embeddings: encoded images and `inputs`.

    `inputs` has one row for each encoded image, then an all-black and an all-white one.
    """
    files = encoded(preprocess)
    plain = [np.full(preprocess.shape, value, np.uint8) for value in (0, 255)]
    arrays = {f"encoded_{i}": np.frombuffer(data, np.uint8) for i, data in enumerate(files)}
    return arrays | {"inputs": np.stack([*(prepare(x, preprocess) for x in files), *plain])}


def encoded(preprocess: Preprocessing) -> list[bytes]:
    """Returns four images larger than the input: PNG, JPEG, JPEG with EXIF rotation, gray PNG.

    If large JPEGs are decoded at a fraction of their size, the one with EXIF rotation is large.
    """
    shape = preprocess.shape
    side = max(shape[:2])
    if side <= 64:  # a small net's own images are encoded without loss, and have its size
        sizes = [(shape[0], shape[1])] * 4
    else:
        sizes = [(side * 5 // 4, side * 3 // 2), (side * 4 // 3, side * 5 // 4)]
        sizes += [(side * 5 // 4, side * 8 // 5), (side * 3 // 2, side * 4 // 3)]
    if preprocess.least_side is not None:
        sizes[2] = (preprocess.least_side * 2, preprocess.least_side * 5 // 2)
    pictures = [Image.fromarray(_pattern(h, w, seed)) for seed, (h, w) in enumerate(sizes)]
    exif = Image.Exif()
    exif[_ORIENTATION] = 6
    return [
        file_bytes(pictures[0], "PNG"),
        file_bytes(pictures[1], "JPEG", quality=90),
        file_bytes(pictures[2], "JPEG", quality=90, exif=exif),
        file_bytes(pictures[3].convert("L"), "PNG"),
    ]


def _pattern(h: int, w: int, seed: int) -> np.ndarray:
    """Draws waves and edges: smooth enough for a small file, with detail that resizing shows."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:h, 0:w] / max(h, w)
    waves = [np.sin(2 * np.pi * (a * x + b * y + c)) for a, b, c in rng.uniform(1, 9, (3, 3))]
    image = 127.5 + 90 * np.stack(waves, axis=-1)
    top, left = int(h * rng.uniform(0.2, 0.4)), int(w * rng.uniform(0.2, 0.4))
    image[top : top + h // 3, left : left + w // 4] = rng.uniform(0, 255, 3)
    return np.clip(image, 0, 255).astype(np.uint8)


class MismatchedProgram(ValueError):
    """A program gives other embeddings than the checkpoint."""


def run_module(module: str, *words: str | os.PathLike) -> str | None:
    """Runs a module of dmljax in a new process; returns the last line of its errors if it fails."""
    root = str(pathlib.Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    command, environment = [sys.executable, "-m", module, *words], os.environ | {"PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode < 0:
        return f"its process crashed ({signal.Signals(-done.returncode).name})"
    lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
    return lines[-1] if done.returncode else None


def run_program(
    folder: pathlib.Path, inputs: np.ndarray, program: str, *, largest: int
) -> dict[str, np.ndarray]:
    """Returns the embeddings of `inputs` by a new process, in batches of the largest size, 3, 1."""
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
    """Returns the parity report of a program; raises `MismatchedProgram` above the limits.

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
    from dmljax import retrieval  # needs more than a user of a bundle does

    k = min(_NEIGHBORS, len(first) - 1)
    if k < 1:
        return {}
    near_first, near_second = (retrieval.nearest(x, k=k)[0] for x in (first, second))
    same_set = [set(a) == set(b) for a, b in zip(near_first, near_second, strict=True)]
    return {
        "same_nearest": float(np.mean(near_first[:, 0] == near_second[:, 0])),
        f"same_{k}_nearest": float(np.mean(same_set)),
        "checkpoint_R@1": float(np.mean(labels[near_first[:, 0]] == labels)),
        "program_R@1": float(np.mean(labels[near_second[:, 0]] == labels)),
    }


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
