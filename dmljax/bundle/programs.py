"""The programs of a bundle as functions: StableHLO by JAX, ONNX by onnxruntime. Imports no flax.

A program consists of JAX operations only: `refusal` finds every operation that could reach outside
of it. The digests of the manifest exclude accidental damage; a program that somebody damaged on
purpose can still crash its reader, which is a native library (docs/ship.md).
"""

import itertools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax import export
from jax.extend import mlir
from jax.extend.mlir import ir
from jax.interpreters.mlir import make_ir_context

from dmljax.bundle import files
from dmljax.bundle.errors import BadBundle

# Operations that pass data to the process or to other devices.
_OUTSIDE = {f"stablehlo.{name}" for name in ("infeed", "outfeed", "recv", "send")}


def platform(device: jax.Device | None = None) -> str:
    """Returns the name that `jax.export` has for a device's platform: cpu, cuda, rocm or tpu."""
    device = jax.devices()[0] if device is None else device
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"


def unusable(folder: pathlib.Path, problem: str) -> BadBundle:
    """Returns the error about a program, with the remedy."""
    return BadBundle(f"the program of {folder} {problem}. Export the run again with this dmljax")


def stablehlo(
    folder: pathlib.Path,
    manifest: files.Manifest,
    tensors: Mapping[str, np.ndarray],
    *,
    name: str = files.PROGRAM,
    device: jax.Device | None = None,
) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the function `inputs -> float32 [b d]` of a program of JAX and its parameters."""
    data, version = files.read(folder, manifest, name), manifest.program.jax
    try:
        exported = export.deserialize(bytearray(data))
        reason = refusal(exported)
        (variables, _), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    except Exception as error:
        versions = f"made by jax {version}, read by jax {jax.__version__}"
        raise unusable(folder, f"cannot be read ({versions}): {_one_line(error)}") from error
    facts = [{k: (x.shape, x.dtype) for k, x in y.items()} for y in (variables, tensors)]
    is_finite = all(np.isfinite(x).all() for x in tensors.values() if x.dtype.kind == "f")
    dimension, problem = manifest.output.dimension, None
    if reason:
        problem = f"{reason}: it could run any code"
    elif (present := platform(device)) not in exported.platforms:
        problem = f"is for {', '.join(exported.platforms)}, and JAX runs on {present}"
    elif facts[0] != facts[1] or not is_finite:
        problem = "does not fit its parameters, or they contain NaN"
    elif [x.shape[1:] for x in exported.out_avals] != [(dimension,)]:
        problem = f"has another dimension than {dimension}, that of the manifest"
    if problem:
        raise unusable(folder, problem)
    device = jax.devices()[0] if device is None else device
    on_device = jax.device_put(tensors, device)
    call_fn = jax.jit(exported.call)

    def program_fn(batch: np.ndarray) -> np.ndarray:
        try:
            return np.asarray(call_fn(on_device, jax.device_put(batch, device)))
        except jax.errors.JaxRuntimeError:  # such as a lack of memory
            raise
        except Exception as error:  # during compilation
            raise unusable(folder, f"cannot be compiled: {_one_line(error)}") from error

    return program_fn


def refusal(exported: export.Exported) -> str | None:
    """Returns the reason for refusing a program, or None: an operation that no export writes.

    XLA looks up the function of a custom call in the process. A callback to Python is such a
    function, and LAPACK trusts the shapes that the call states. The only custom call that
    an export makes checks the size of the batch, and returns nothing.
    """

    def check(operation: ir.Operation) -> ir.WalkResult:
        name = operation.name
        if name.partition(".")[0] not in ("builtin", "chlo", "func", "stablehlo"):
            refusals.append(f"has the operation {name!r}")
        elif name in _OUTSIDE:
            refusals.append(f"has the operation {name!r}, which reaches outside of it")
        elif name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            if target != "shape_assertion" or len(operation.results):
                refusals.append(f"calls {target!r}, a function that nets do not need")
        return ir.WalkResult.ADVANCE

    refusals: list[str] = []
    with make_ir_context():
        module = mlir.deserialize_portable_artifact(exported.mlir_module_serialized)
        module.operation.walk(check)
    return refusals[0] if refusals else None


def _one_line(error: BaseException) -> str:
    """Returns an error of JAX, MLIR or onnxruntime, whose text may have many lines, in one."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}"


def onnx_session(
    folder: pathlib.Path, manifest: files.Manifest
) -> Callable[[np.ndarray], np.ndarray]:
    """Returns the function `images uint8 [b h w c] -> float32 [b d]` of the ONNX program."""
    data = files.read(folder, manifest, files.ONNX)
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise ImportError("ONNX needs onnxruntime: pip install 'dmljax[onnx]'") from error
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Otherwise onnxruntime guesses the format, and its own one was not searched for files.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    providers = ["CPUExecutionProvider"]
    try:
        if has_external_data(onnx.load_model_from_string(data)):  # files that no digest covers
            raise ValueError("it takes values from other files")
        session: Any = onnxruntime.InferenceSession(data, options, providers=providers)
    except Exception as error:  # onnxruntime raises its own errors
        raise BadBundle(
            f"{files.ONNX} of {folder} cannot be used ({_one_line(error)}): export the run again "
            "with --onnx"
        ) from error
    name = session.get_inputs()[0].name
    return lambda batch: session.run(None, {name: batch})[0]


def has_external_data(message: Any) -> bool:
    """Returns whether any tensor in an ONNX message is in another file.

    It checks all tensors, also of subgraphs, functions, attributes and sparse initializers.
    """
    if message.DESCRIPTOR.name == "TensorProto":
        return bool(message.external_data) or message.data_location != message.DEFAULT
    values = [value for field, value in message.ListFields() if field.message_type]
    items = [[value] if hasattr(value, "ListFields") else value for value in values]
    return any(map(has_external_data, itertools.chain.from_iterable(items)))
