"""A bundle in use: images in, embeddings out. Needs jax, numpy, safetensors, flatbuffers, Pillow.

Neither flax nor the code of the net is imported: the program of the bundle is all that runs.
"""

import dataclasses
import functools
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import export

from dmljax import vectors as vector_math
from dmljax.bundle import admission, compression, files, images, preprocessing, text
from dmljax.bundle.errors import BadBundle, naming
from dmljax.files import onnx_files

# A program and a checkpoint may differ by rounding: the largest difference of a coordinate of unit
# vectors, and the smallest cosine. Accelerators round the inputs of products to ten bits.
LIMITS = {"cpu": (1e-5, 0.99999), "other": (1e-2, 0.9995)}
PROGRAMS = ("stablehlo", "onnx")


@dataclasses.dataclass(eq=False, repr=False)
class Bundle:
    """The embedding function of a bundle; `load` makes one.

    Batches are filled up to one of `batch_sizes`, because each size is compiled once: at its first
    use, or by `compile`.
    """

    folder: pathlib.Path
    manifest: dict[str, Any]
    preprocess: preprocessing.Preprocessing
    program_fn: Callable[[np.ndarray], np.ndarray]
    batch_sizes: Sequence[int]
    device: jax.Device | None = None

    def __post_init__(self):
        self.batch_sizes = tuple(sorted(set(self.batch_sizes)))

    @property
    def digest(self) -> str:
        """Identifies parameters, net and preprocessing: vectors of equal digests are comparable."""
        return self.manifest["model"]

    @property
    def dimension(self) -> int:
        return self.manifest["output"]["dimension"]

    @property
    def similarity(self) -> str:
        """'cosine', or 'euclidean' where the embeddings are not unit vectors."""
        return self.manifest["output"]["similarity"]

    @property
    def prefixes(self) -> tuple[int, ...]:
        """Widths at which the first numbers of an embedding were trained to be an embedding."""
        return tuple(self.manifest.get("prefixes", ()))

    def check_prefix(self, prefix: int | None) -> None:
        """Raises unless `prefix` is None or one of `prefixes`."""
        vector_math.check_prefix(prefix, self.prefixes, str(self.folder))

    @property
    def thresholds(self) -> dict[str, float]:
        """Cosines from which two images count as the same, by the rate of false matches."""
        return {name: entry["cosine"] for name, entry in self.manifest["thresholds"].items()}

    @property
    def false_match_rates(self) -> dict[str, float]:
        """The rate of false matches that the export has measured for each of `thresholds`."""
        tests = {k: entry.get("test") for k, entry in self.manifest["thresholds"].items()}
        rates = {k: test.get("fmr") for k, test in tests.items() if isinstance(test, dict)}
        return {k: rate for k, rate in rates.items() if isinstance(rate, float) and 0 <= rate <= 1}

    @property
    def input_shape(self) -> tuple[int, int, int]:
        return self.preprocess.shape

    def prepare(self, image: bytes | str | os.PathLike | np.ndarray) -> np.ndarray:
        """The input of the program, `uint8 [height width channels]`, for one image.

        `image` is encoded, a path, or pixels `uint8 [h w]` or `[h w c]`. A refused image raises
        `BadImage`, a ValueError of one line with its `kind`.
        """
        return images.prepare(image, self.preprocess)

    def prepare_small(self, image: bytes, *, most_pixels: int) -> np.ndarray | None:
        """As `prepare`, but None for an image of more pixels, which is not decoded."""
        return images.prepare_small(image, self.preprocess, most_pixels=most_pixels)

    def embed(
        self,
        images: Sequence[bytes | str | os.PathLike | np.ndarray],
        *,
        prefix: int | None = None,
    ) -> np.ndarray:
        """Embeddings `float32 [n d]` of images of any size; see `prepare`.

        With `prefix`, one of `prefixes`, unit vectors `[n prefix]` of their first numbers. An error
        names the path of the image, or its number among the `images`, counted from 0.
        """
        self.check_prefix(prefix)
        if isinstance(images, bytes | str | os.PathLike) or not len(images):
            raise ValueError("embed takes a list of one image or more")
        rows, batch = [], []
        for number, image in enumerate(images):
            is_path = isinstance(image, str | os.PathLike)
            with naming(str(image) if is_path else f"image number {number}"):
                batch.append(self.prepare(image))
            if len(batch) == self.batch_sizes[-1] or number == len(images) - 1:
                rows.append(self.embed_prepared(np.stack(batch), prefix=prefix))
                batch = []
        return np.concatenate(rows)

    def embed_prepared(self, batch: np.ndarray, *, prefix: int | None = None) -> np.ndarray:
        """Embeddings `float32 [n d]` of inputs `uint8 [n height width channels]`; see `embed`."""
        self.check_prefix(prefix)
        if batch.dtype != np.uint8 or batch.ndim != 4 or batch.shape[1:] != self.input_shape:
            raise ValueError(
                f"the program takes uint8 [n {' '.join(map(str, self.input_shape))}], not "
                f"{batch.dtype} {list(batch.shape)}"
            )
        if not len(batch):
            raise ValueError("the batch has no images")
        largest = self.batch_sizes[-1]
        rows = [self._run(batch[i : i + largest]) for i in range(0, len(batch), largest)]
        vectors = np.concatenate(rows)
        return vectors if prefix is None else vector_math.prefix(vectors, prefix)

    @property
    def has_text(self) -> bool:
        """Whether `embed_text` embeds words beside the images."""
        return "text" in self.manifest

    def embed_text(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors `float32 [n d]` of texts, to be compared with images by their cosines."""
        if isinstance(texts, str) or not len(texts):
            raise ValueError("embed_text takes a list of one text or more")
        text.check(texts)
        return self._embed_tokens(self._text[0](texts))

    def _embed_tokens(self, tokens: np.ndarray) -> np.ndarray:
        """One after the other, so that one program is compiled."""
        return np.concatenate([self._text[1](tokens[i : i + 1]) for i in range(len(tokens))])

    @functools.cached_property
    def _text(self) -> tuple[Callable[..., np.ndarray], Callable[[np.ndarray], np.ndarray]]:
        """From texts to tokens, and the program."""
        if not self.has_text:
            raise ValueError(
                f"{self.folder} compares images only: text needs the bundle of a CLIP or SigLIP 2 "
                "net without training (dmljax export --help)"
            )
        rule = self.manifest["text"]
        tokens_fn = text.Tokens(files.read(self.folder, self.manifest, files.VOCABULARY), rule)
        tensors = files.read_tensors(self.folder, self.manifest, files.TEXT_PARAMS)
        program_fn = _stablehlo(
            self.folder, self.manifest, files.TEXT_PROGRAM, (rule["length"],), tensors, self.device
        )
        return tokens_fn, program_fn

    def _run(self, batch: np.ndarray) -> np.ndarray:
        size = next(size for size in self.batch_sizes if size >= len(batch))
        padding = np.zeros((size - len(batch), *batch.shape[1:]), np.uint8)
        return self.program_fn(np.concatenate([batch, padding]))[: len(batch)]

    def compile(self) -> dict[int, float]:
        """Compiles the program for every batch size; seconds for each."""
        seconds = {}
        for size in self.batch_sizes:
            start = time.perf_counter()
            self.program_fn(np.zeros((size, *self.input_shape), np.uint8))
            seconds[size] = time.perf_counter() - start
        return seconds

    def codec(self, name: str) -> compression.Codec:
        """A smaller form of embeddings: 'float16', 'int8', 'binary', 'first_64', 'pca_64', ...

        Its `encode` and `similarities` take whole embeddings, and refuse NaN and infinity.
        """
        if files.COMPRESSION not in self.manifest["files"]:
            raise BadBundle(f"{self.folder} has no {files.COMPRESSION}: it has no unit vectors")
        fitted = files.read_tensors(self.folder, self.manifest, files.COMPRESSION)
        return compression.codec(name, fitted)

    def check(self) -> dict[str, float]:
        """Compares preprocessing and program with the stored examples; raises `BadBundle`.

        Returns the largest difference and the smallest cosine of the embeddings.
        """
        golden = files.read_tensors(self.folder, self.manifest, files.GOLDEN)
        count = len([name for name in golden if name.startswith("encoded_")])
        names = {"inputs", "embeddings", *(f"encoded_{i}" for i in range(count))}
        if names != set(golden) or not count <= len(golden["inputs"]) == len(golden["embeddings"]):
            raise BadBundle(
                f"{files.GOLDEN} of {self.folder} is damaged: it needs inputs, embeddings and "
                "encoded_0, encoded_1, ...: export the run again"
            )
        inputs, embeddings = golden["inputs"], golden["embeddings"]
        for i in range(count):
            if not np.array_equal(self.prepare(golden[f"encoded_{i}"].tobytes()), inputs[i]):
                raise BadBundle(
                    f"the preprocessing of {self.folder} gives other pixels than at the export: "
                    "compare the versions of Pillow and dmljax with those in README.md"
                )
        pairs = [(embeddings, self.embed_prepared(inputs))]
        if self.has_text:
            examples = files.read_tensors(self.folder, self.manifest, files.TEXT_GOLDEN)
            if set(examples) != {"tokens", "embeddings"}:
                raise BadBundle(f"{files.TEXT_GOLDEN} of {self.folder} is damaged")
            pairs.append((examples["embeddings"], self._embed_tokens(examples["tokens"])))
        exported_on = self.manifest["program"]["exported_on"]
        limit, least = limits(self.manifest["output"]["precision"], exported_on, platform())
        results = []
        for expected, outputs in pairs:
            difference, cosine = differences(expected, outputs)
            scale = max(1.0, float(np.abs(expected).max()))
            results.append((difference, cosine))
            if not (difference <= limit * scale and cosine >= least):
                raise _unusable(
                    self.folder,
                    f"gives other embeddings than at the export: they differ by "
                    f"{difference:.1e} (limit {limit * scale:.0e}), smallest cosine {cosine:.6f}",
                )
        difference, cosine = max(r[0] for r in results), min(r[1] for r in results)
        return {"largest_difference": difference, "smallest_cosine": cosine}


def load(
    path: str | os.PathLike,
    *,
    program: str = "stablehlo",
    batch_sizes: Sequence[int] | None = None,
    device: jax.Device | None = None,
) -> Bundle:
    """The embedding function of the bundle in the folder `path`.

    Every file that is read must have the SHA-256 that the manifest says. `program` is 'stablehlo',
    which JAX runs on `device` (by default its first one), or 'onnx', which onnxruntime runs on the
    CPU. `batch_sizes` replaces the sizes of the bundle.

    >>> model = dmljax.bundle.load("photos.bundle")  # doctest: +SKIP
    >>> model.embed(["a.jpg", "b.jpg"]).shape  # doctest: +SKIP
    (2, 512)
    """
    folder = pathlib.Path(path)
    manifest = files.read_manifest(folder)
    if program not in PROGRAMS:
        raise ValueError(f"program must be one of {', '.join(PROGRAMS)}, not {program!r}")
    sizes = tuple(manifest["batch_sizes"] if batch_sizes is None else batch_sizes)
    if not sizes or min(sizes) < 1:
        raise ValueError(f"batch_sizes must be one or more positive numbers, not {sizes}")
    preprocess_json = files.read_json(folder, manifest, files.PREPROCESS)
    preprocess = preprocessing.parse(preprocess_json)
    tensors = files.read_tensors(folder, manifest, files.PARAMS)
    config = files.read_json(folder, manifest, files.CONFIG)
    if files.model_digest(tensors, preprocess_json, config) != manifest["model"]:
        raise BadBundle(f"the model digest of {folder} does not belong to its files")
    _check_others(folder, manifest)
    if program == "onnx":
        program_fn = _onnx(folder, manifest)
    else:
        program_fn = _stablehlo(folder, manifest, files.PROGRAM, preprocess.shape, tensors, device)
    bundle = Bundle(folder, manifest, preprocess, program_fn, sizes, device)
    if program == "stablehlo" and manifest["program"]["jax"] != jax.__version__:
        bundle.check()  # JAX promises for some months that a program loads; this verifies it
    return bundle


def _check_others(folder: pathlib.Path, manifest: Mapping[str, Any]) -> None:
    """Compares the digests of the files that `load` does not need."""
    needed = (files.PREPROCESS, files.PROGRAM, files.PARAMS, files.CONFIG)
    for name in manifest["files"]:
        if name not in needed:
            files.read(folder, manifest, name)


def platform(device: jax.Device | None = None) -> str:
    """The name that `jax.export` has for the platform of a device: cpu, cuda, rocm or tpu."""
    device = jax.devices()[0] if device is None else device
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def _stablehlo(
    folder: pathlib.Path,
    manifest: Mapping[str, Any],
    name: str,
    input_shape: tuple[int, ...],
    tensors: Mapping[str, np.ndarray],
    device: jax.Device | None,
) -> Callable[[np.ndarray], np.ndarray]:
    exported = _deserialize(folder, manifest, name)
    if (present := platform(device)) not in exported.platforms:
        names = ", ".join(exported.platforms)
        raise _unusable(folder, f"is for {names}, and JAX runs on {present}")
    (variables, batch), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    if batch.shape[1:] != input_shape:
        raise BadBundle(
            f"{name} of {folder} takes inputs of {list(batch.shape[1:])}, and its other files say "
            f"{list(input_shape)}"
        )
    outputs, dimension = [x.shape[1:] for x in exported.out_avals], manifest["output"]["dimension"]
    if outputs != [(dimension,)]:
        raise BadBundle(
            f"{name} of {folder} gives embeddings of {', '.join(map(str, outputs))} numbers, and "
            f"its manifest says {dimension}"
        )
    files.check_tensors(tensors, variables, name=f"the tensors for {name}")
    device = jax.devices()[0] if device is None else device
    on_device = jax.device_put(tensors, device)
    call_fn = jax.jit(exported.call)

    def program_fn(batch: np.ndarray) -> np.ndarray:
        try:
            return np.asarray(call_fn(on_device, jax.device_put(batch, device)))
        except jax.errors.JaxRuntimeError:  # such as no memory
            raise
        except Exception as error:  # while it is compiled
            problem = f"cannot be compiled: {admission.one_line(error)}"
            raise _unusable(folder, problem) from error

    return program_fn


def _deserialize(folder: pathlib.Path, manifest: Mapping[str, Any], name: str) -> export.Exported:
    data = files.read(folder, manifest, name)
    made_by = manifest["program"]
    versions = f"it was made by jax {made_by['jax']}, and this is jax {jax.__version__}"
    oldest = export.minimum_supported_calling_convention_version
    newest = export.maximum_supported_calling_convention_version
    if not oldest <= made_by["calling_convention"] <= newest:
        convention = f"has the calling convention {made_by['calling_convention']}"
        raise _unusable(folder, f"{convention}, and JAX reads {oldest} to {newest} ({versions})")
    try:
        import flatbuffers  # noqa: F401
    except ImportError as error:
        raise ImportError(
            "reading a program needs flatbuffers: pip install 'dmljax[serve]'"
        ) from error
    if problem := admission.problem_of(data):
        raise _unusable(folder, f"cannot be read ({versions}): {problem}")
    try:
        exported = export.deserialize(bytearray(data))
        refusal = admission.refusal(exported)
    except Exception as error:
        problem = f"cannot be read ({versions}): {admission.one_line(error)}"
        raise _unusable(folder, problem) from error
    if refusal:
        raise _unusable(folder, f"{refusal}: it could run any code")
    admission.accept(data)
    return exported


def _unusable(folder: pathlib.Path, problem: str) -> BadBundle:
    return BadBundle(
        f"the program of {folder} {problem}. Make new programs from its parameters: dmljax bundle "
        f"rebuild {folder} --out=NEW.bundle"
    )


def limits(precision: str, *platforms: str) -> tuple[float, float]:
    """The largest difference and the smallest cosine between embeddings of these platforms."""
    exact = precision == "float32" and set(platforms) == {"cpu"}
    return LIMITS["cpu" if exact else "other"]


def _onnx(folder: pathlib.Path, manifest: Mapping[str, Any]) -> Callable[[np.ndarray], np.ndarray]:
    if files.ONNX not in manifest["files"]:
        raise BadBundle(f"{folder} has no ONNX program: export the run with --onnx")
    data = files.read(folder, manifest, files.ONNX)
    try:
        is_outside = onnx_files.has_external_data(memoryview(data))
    except ValueError as error:
        raise BadBundle(f"{files.ONNX} of {folder} cannot be read: {error}") from error
    if is_outside:  # onnxruntime would read any file below the working directory
        raise BadBundle(
            f"{files.ONNX} of {folder} takes values from other files, which no digest of the "
            "bundle covers: export the run again with --onnx"
        )
    try:
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise ImportError("ONNX needs onnxruntime: pip install 'dmljax[onnx]'") from error
    if problem := admission.problem_of(data, "onnxruntime"):
        raise BadBundle(
            f"{files.ONNX} of {folder} cannot be read ({problem}): export the run again with --onnx"
        )
    session = admission.onnx_session(data)
    admission.accept(data, "onnxruntime")
    dimension = session.get_outputs()[0].shape[-1]
    if isinstance(dimension, int) and dimension != manifest["output"]["dimension"]:
        raise BadBundle(
            f"{files.ONNX} of {folder} gives embeddings of {dimension} numbers, and its manifest "
            f"says {manifest['output']['dimension']}"
        )
    name = session.get_inputs()[0].name
    return lambda batch: session.run(None, {name: batch})[0]


def differences(first: np.ndarray, second: np.ndarray) -> tuple[float, float]:
    """The largest difference of a coordinate, and the smallest cosine of a row."""
    first, second = first.astype(np.float64), second.astype(np.float64)
    norms = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
    cosines = np.sum(first * second, axis=1) / np.where(norms > 0, norms, 1)
    return float(np.abs(first - second).max()), float(cosines.min())
