"""Proof that a bundle computes what the checkpoint computes: stored examples, and a comparison.

The examples are drawn, not taken from the data set: a bundle can be given away where its images
cannot.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from dmljax.bundle.preprocessing import Preprocessing, prepare
from dmljax.data.decode import file_bytes

_NEIGHBORS = 10
_ORIENTATION = 0x0112  # of EXIF
# A program and a checkpoint may differ by rounding: the largest difference of a coordinate of unit
# vectors, and the smallest cosine. Accelerators round the inputs of products to ten bits.
LIMITS = {"cpu": (1e-5, 0.99999), "other": (1e-2, 0.9995)}


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
    side = max(preprocess.shape[:2])
    sizes = [(side * 5 // 4, side * 3 // 2), (side * 4 // 3, side * 5 // 4)]
    sizes += [(side * 5 // 4, side * 8 // 5), (side * 3 // 2, side * 4 // 3)]
    if side <= 64:  # transforms of small images may take no others
        sizes = [preprocess.shape[:2]] * 4
    if preprocess.least_side is not None:
        sizes[2] = (preprocess.least_side * 2, preprocess.least_side * 5 // 2)
    rng, pictures = np.random.default_rng(0), []
    for height, width in sizes:  # waves of several lengths, and edges
        image = Image.fromarray(rng.integers(0, 256, (9, 11, 3), np.uint8))
        pixels = np.array(image.resize((width, height), Image.Resampling.BICUBIC))
        pixels[height // 3 : height // 2, width // 4 : width // 2] ^= 255
        pictures.append(Image.fromarray(pixels))
    exif = Image.Exif()
    exif[_ORIENTATION] = 6
    return [
        file_bytes(pictures[0], "PNG"),
        file_bytes(pictures[1], "JPEG", quality=90),
        file_bytes(pictures[2], "JPEG", quality=90, exif=exif),
        file_bytes(pictures[3].convert("L"), "PNG"),
    ]


def limits(precision: str, *platforms: str) -> tuple[float, float]:
    """Returns the largest difference and the smallest cosine of embeddings of these platforms."""
    exact = precision == "float32" and set(platforms) == {"cpu"}
    return LIMITS["cpu" if exact else "other"]


class MismatchedProgram(ValueError):
    """A program gives other embeddings than expected."""


def difference(
    expected: np.ndarray, outputs: np.ndarray, limits: tuple[float, float]
) -> dict[str, float]:
    """Returns the largest difference of a coordinate, and the smallest cosine of a row.

    Raises `MismatchedProgram` above the `limits`. The first limit is relative to the largest
    coordinate if that exceeds 1.
    """
    if outputs.shape != expected.shape or not np.isfinite(outputs).all():
        raise MismatchedProgram(
            f"has the shape {list(outputs.shape)}, not {list(expected.shape)}, or NaN"
        )
    first, second = expected.astype(np.float64), outputs.astype(np.float64)
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    cosine = float((np.sum(first * second, axis=1) / np.where(norms > 0, norms, 1)).min())
    largest, limit = float(np.abs(first - second).max()), limits[0] * max(1.0, np.abs(first).max())
    if largest > limit or cosine < limits[1]:
        raise MismatchedProgram(
            f"differs by {largest:.2e} (limit {limit:.0e}), smallest cosine {cosine:.6f} (limit "
            f"{limits[1]})"
        )
    return {"largest_difference": largest, "smallest_cosine": cosine}


def compare(
    reference: np.ndarray,
    outputs: Mapping[str, np.ndarray],
    *,
    limits: tuple[float, float],
    program: str = "stablehlo",
) -> dict[str, Any]:
    """Returns the parity report of a program; raises `MismatchedProgram` above the limits.

    Neighbors may differ where two of them are closer than the difference allows.
    """
    from dmljax import retrieval  # needs more than a user of a bundle does

    report: dict[str, Any] = {"images": len(reference), "limits": list(limits)}
    for name, rows in outputs.items():
        try:
            report[name] = difference(reference[: len(rows)], rows, limits)
        except MismatchedProgram as error:
            raise MismatchedProgram(
                f"the program {program} {error}, in {name.replace('_', ' ')}; no bundle is written"
            ) from None
    if k := min(_NEIGHBORS, len(reference) - 1):
        compared = (reference, outputs["largest_batch"])
        first, second = (retrieval.nearest(x, k=k)[0] for x in compared)
        same_set = [set(a) == set(b) for a, b in zip(first, second, strict=True)]
        report["same_nearest"] = float(np.mean(first[:, 0] == second[:, 0]))
        report[f"same_{k}_nearest"] = float(np.mean(same_set))
    return report
