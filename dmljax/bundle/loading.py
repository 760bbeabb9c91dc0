"""A bundle in use: images in, embeddings out. Needs jax, numpy, safetensors, flatbuffers, Pillow.

Neither flax nor the code of the net is imported: only the program of the bundle runs.
"""

import dataclasses
import functools
import os
import pathlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from dmljax import vectors as vector_math
from dmljax.bundle import files, parity, preprocessing, programs, text
from dmljax.bundle.errors import BadBundle, BadImage

PROGRAMS = ("stablehlo", "onnx")


@dataclasses.dataclass(eq=False, repr=False)
class Bundle:
    """The embedding function of a bundle; `load` returns one.

    Batches are padded to one of `batch_sizes`, because each size is compiled once: at its first
    use, or by `compile`.
    """

    folder: pathlib.Path
    manifest: files.Manifest
    preprocess: preprocessing.Preprocessing
    program_fn: Callable[[np.ndarray], np.ndarray]
    batch_sizes: Sequence[int]
    device: jax.Device | None = None

    def __post_init__(self):
        self.batch_sizes = tuple(sorted(set(self.batch_sizes)))

    @property
    def digest(self) -> str:
        """Identifies parameters, net and preprocessing: vectors of equal digests are comparable."""
        return self.manifest.model

    @property
    def dimension(self) -> int:
        return self.manifest.output.dimension

    @property
    def similarity(self) -> str:
        """Returns how embeddings are compared, a name in `index.nearest.SIMILARITIES`."""
        return self.manifest.output.similarity

    @property
    def prefixes(self) -> tuple[int, ...]:
        """Returns the widths at which the first numbers of an embedding are embeddings, too."""
        return self.manifest.prefixes

    def check_prefix(self, prefix: int | None) -> None:
        """Raises unless `prefix` is None or one of `prefixes`."""
        vector_math.check_prefix(prefix, self.prefixes, str(self.folder))

    @property
    def thresholds(self) -> dict[str, float]:
        """Returns the cosines from which two images count as the same, by their threshold names."""
        return {name: entry.cosine for name, entry in self.manifest.thresholds.items()}

    @property
    def false_match_rates(self) -> dict[str, float]:
        """Returns the measured false match rate of each of `thresholds` that has one."""
        rates = {name: entry.test.fmr for name, entry in self.manifest.thresholds.items()}
        return {name: rate for name, rate in rates.items() if rate is not None}

    @property
    def input_shape(self) -> tuple[int, int, int]:
        return self.preprocess.shape

    def prepare(self, image: bytes | str | os.PathLike | np.ndarray) -> np.ndarray:
        """Returns the input of the program for one image, `uint8 [height width channels]`.

        `image` is encoded, a path, or pixels `uint8 [h w]` or `[h w c]`. A refused image raises
        `BadImage`, a ValueError of one line with its `kind`.
        """
        return preprocessing.prepare(image, self.preprocess)

    def embed(
        self,
        images: Sequence[bytes | str | os.PathLike | np.ndarray],
        *,
        prefix: int | None = None,
    ) -> np.ndarray:
        """Returns embeddings `float32 [n d]` of images of any size; see `prepare`.

        With `prefix`, one of `prefixes`, it returns unit vectors `[n prefix]` of their first
        numbers. An error names the path of the image, or its index in `images`.
        """
        if isinstance(images, bytes | str | os.PathLike) or not len(images):
            raise ValueError("embed takes a list of one image or more")
        rows, batch = [], []
        for i, image in enumerate(images):
            try:
                batch.append(self.prepare(image))
            except BadImage as error:
                name = image if isinstance(image, str | os.PathLike) else f"image number {i}"
                raise BadImage(f"{name}: {error}", kind=error.kind) from None
            if len(batch) == self.batch_sizes[-1] or i == len(images) - 1:
                rows.append(self.embed_prepared(np.stack(batch), prefix=prefix))
                batch = []
        return np.concatenate(rows)

    def embed_prepared(self, batch: np.ndarray, *, prefix: int | None = None) -> np.ndarray:
        """Returns embeddings `float32 [n d]` of inputs `uint8 [n height width channels]`."""
        self.check_prefix(prefix)
        if batch.dtype != np.uint8 or batch.shape[1:] != self.input_shape or not len(batch):
            raise ValueError(
                f"the program takes uint8 [n {' '.join(map(str, self.input_shape))}], got "
                f"{batch.dtype} {list(batch.shape)}"
            )
        largest = self.batch_sizes[-1]
        rows = [self._run(batch[i : i + largest]) for i in range(0, len(batch), largest)]
        vectors = np.concatenate(rows)
        return vectors if prefix is None else vector_math.prefix(vectors, prefix)

    def _run(self, batch: np.ndarray) -> np.ndarray:
        size = next(size for size in self.batch_sizes if size >= len(batch))
        padding = np.zeros((size - len(batch), *batch.shape[1:]), np.uint8)
        return self.program_fn(np.concatenate([batch, padding]))[: len(batch)]

    def compile(self) -> dict[int, float]:
        """Compiles the program for every batch size, and returns the seconds of each."""
        seconds = {}
        for size in self.batch_sizes:
            start = time.perf_counter()
            self.program_fn(np.zeros((size, *self.input_shape), np.uint8))
            seconds[size] = time.perf_counter() - start
        return seconds

    @property
    def has_text(self) -> bool:
        """Tells whether `embed_text` works."""
        return self.manifest.text is not None

    def embed_text(self, texts: Sequence[str]) -> np.ndarray:
        """Returns unit vectors `float32 [n d]` of texts; compare them with images by cosines."""
        if isinstance(texts, str) or not len(texts):
            raise ValueError("embed_text takes a list of one text or more")
        text.check(texts)
        return self._embed_tokens(self._text[0](texts))

    def _embed_tokens(self, tokens: np.ndarray) -> np.ndarray:
        """Embeds one text after another, so that one program is compiled."""
        return np.concatenate([self._text[1](tokens[i : i + 1]) for i in range(len(tokens))])

    @functools.cached_property
    def _text(self) -> tuple[Callable[..., np.ndarray], Callable[[np.ndarray], np.ndarray]]:
        """Reads vocabulary and text program at the first use; returns both as functions."""
        rule, manifest = self.manifest.text, self.manifest
        if rule is None:
            raise ValueError(
                f"{self.folder} compares images only: text needs the bundle of a CLIP or SigLIP 2 "
                "net without training (dmljax export --help)"
            )
        tokens_fn = text.Tokens(files.read(self.folder, manifest, files.VOCABULARY), rule)
        tensors = files.read_tensors(self.folder, manifest, files.TEXT_PARAMS)
        options: dict[str, Any] = {"name": files.TEXT_PROGRAM, "device": self.device}
        return tokens_fn, programs.stablehlo(self.folder, manifest, tensors, **options)

    def check(self) -> dict[str, float]:
        """Compares preprocessing and program with the stored examples; raises `BadBundle`.

        Returns the largest difference and the smallest cosine of the embeddings.
        """
        golden = files.read_tensors(self.folder, self.manifest, files.GOLDEN)
        inputs, embeddings = golden.pop("inputs"), golden.pop("embeddings")
        pixels = [self.prepare(golden[f"encoded_{i}"].tobytes()) for i in range(len(golden))]
        pairs = [(embeddings, self.embed_prepared(inputs))]
        if self.has_text:
            words = files.read_tensors(self.folder, self.manifest, files.TEXT_GOLDEN)
            pairs.append((words["embeddings"], self._embed_tokens(words["tokens"])))
        if not np.array_equal(pixels, inputs[: len(pixels)]):
            raise BadBundle(
                f"the preprocessing of {self.folder} gives other pixels than at the export: "
                "compare the versions of Pillow and dmljax with those in README.md"
            )
        exported_on = self.manifest.program.exported_on
        limits = parity.limits(self.manifest.output.precision, exported_on, programs.platform())
        try:
            reports = [parity.difference(*pair, limits) for pair in pairs]
        except parity.MismatchedProgram as error:
            problem = f"gives other embeddings than at the export: it {error}"
            raise programs.unusable(self.folder, problem) from error
        return {
            "largest_difference": max(report["largest_difference"] for report in reports),
            "smallest_cosine": min(report["smallest_cosine"] for report in reports),
        }


def load(
    path: str | os.PathLike,
    *,
    program: str = "stablehlo",
    batch_sizes: Sequence[int] | None = None,
    device: jax.Device | None = None,
) -> Bundle:
    """Returns the embedding function of the bundle in the folder `path`.

    Every file must have the SHA-256 that the manifest says. `program` is 'stablehlo', which JAX
    runs on `device` (by default its first one), or 'onnx', which onnxruntime runs on the CPU.
    `batch_sizes` replaces the sizes of the bundle.

    >>> model = dmljax.bundle.load("photos.bundle")  # doctest: +SKIP
    >>> model.embed(["a.jpg", "b.jpg"]).shape  # doctest: +SKIP
    (2, 512)
    """
    folder = pathlib.Path(path)
    manifest = files.read_manifest(folder)
    if program not in PROGRAMS:
        raise ValueError(f"`program` must be one of {', '.join(PROGRAMS)}, got {program!r}")
    sizes = tuple(manifest.batch_sizes if batch_sizes is None else batch_sizes)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"`batch_sizes` must be one or more positive numbers, got {sizes}")
    for name in set(manifest.files) - {files.PARAMS, files.PROGRAM}:
        files.read(folder, manifest, name)
    preprocess = preprocessing.parse(manifest.preprocess)
    tensors = files.read_tensors(folder, manifest, files.PARAMS)
    if files.model_digest(tensors, manifest.preprocess, manifest.config) != manifest.model:
        raise BadBundle(f"the model digest of {folder} does not belong to its files")
    if program == "onnx":
        program_fn = programs.onnx_session(folder, manifest)
    else:
        program_fn = programs.stablehlo(folder, manifest, tensors, device=device)
    bundle = Bundle(folder, manifest, preprocess, program_fn, sizes, device)
    if program == "stablehlo" and manifest.program.jax != jax.__version__:
        bundle.check()  # JAX promises for some months that a program loads; this verifies it
    return bundle
