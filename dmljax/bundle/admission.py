"""Which programs of bundles are read: JAX operations only, and none that crashes the reader.

A damaged program can end the process that reads it, and no `except` notices. So a program that was
not accepted on this machine before is first read by a process of its own, as jax or onnxruntime
reads it:

    python -m dmljax.bundle.admission jax PROGRAM
"""

import contextlib
import hashlib
import pathlib
import sys
import tempfile
import threading
from typing import Any

import jax
from jax import export
from jax.extend import mlir
from jax.extend.mlir import ir
from jax.interpreters.mlir import make_ir_context

from dmljax import at_hand
from dmljax.bundle.processes import run_module

# Operations that pass data to the process or to other devices.
_OUTSIDE = {f"stablehlo.{name}" for name in ("infeed", "outfeed", "recv", "send")}
_problems: dict[str, str | None] = {}  # of the programs that this process has tried, by mark
_lock = threading.Lock()


def problem_of(data: bytes, reader: str = "jax") -> str | None:
    """Why a program cannot be read: the error, or the crash, of another process; or None."""
    mark = _mark(data, reader)
    with _lock:
        if mark not in _problems:
            _problems[mark] = None if (_folder() / mark).exists() else _tried(data, reader)
        return _problems[mark]


def accept(data: bytes, reader: str = "jax") -> None:
    """Notes that a program was read here, or was written here, so that nobody tries it again."""
    mark = _mark(data, reader)
    _problems[mark] = None
    with contextlib.suppress(OSError):  # then the next process tries it again
        _folder().mkdir(parents=True, exist_ok=True)
        (_folder() / mark).touch()


def _mark(data: bytes, reader: str) -> str:
    """The name of an empty file that stands for a program that was accepted."""
    version = sys.modules[reader].__version__  # of jax, or of onnxruntime
    return f"{hashlib.sha256(data).hexdigest()}-{reader}-{version}"


def _folder() -> pathlib.Path:
    return at_hand.cache_folder() / "programs"


def _tried(data: bytes, reader: str) -> str | None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return run_module("dmljax.bundle.admission", reader, file.name)


def refusal(exported: export.Exported) -> str | None:
    """Why a program is refused, or None: an operation that no export writes.

    XLA looks up the function of a custom call in the process. A callback to Python is such a
    function, and LAPACK trusts the shapes that the call states. The only custom call that
    an export makes checks the size of the batch: it takes a truth value and the sizes that its
    message shows, and returns nothing.
    """

    def check(operation: ir.Operation) -> ir.WalkResult:
        name = operation.name
        if name.partition(".")[0] not in ("builtin", "chlo", "func", "stablehlo"):
            refusals.append(f"has the operation {name!r}")
        elif name in _OUTSIDE:
            refusals.append(f"has the operation {name!r}, which reaches outside of it")
        elif name == "stablehlo.custom_call":
            target = ir.StringAttr(operation.attributes["call_target_name"]).value
            first, *others = [str(operand.type) for operand in operation.operands] or [""]
            is_assertion = target == "shape_assertion" and not len(operation.results)
            is_assertion = is_assertion and not len(operation.regions) and first == "tensor<i1>"
            if not (is_assertion and set(others) <= {"tensor<i32>", "tensor<i64>"}):
                refusals.append(f"calls {target!r}, which is no function that nets need")
        return ir.WalkResult.ADVANCE

    refusals: list[str] = []
    with make_ir_context():
        module = mlir.deserialize_portable_artifact(exported.mlir_module_serialized)
        module.operation.walk(check)
    return refusals[0] if refusals else None


def one_line(error: BaseException) -> str:
    """An error of JAX or MLIR, whose text may have many lines."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}"


def onnx_session(data: bytes) -> Any:
    """The program as onnxruntime runs it on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    # Otherwise onnxruntime guesses the format, and its own one was not searched for files.
    options.add_session_config_entry("session.load_model_format", "ONNX")
    return onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])


def _read(data: bytes) -> None:
    """Reads and lowers a program for a batch of one; whoever started this process refuses it."""
    exported = export.deserialize(bytearray(data))
    if refusal(exported) is None:
        arguments, _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
        variables, batch = arguments
        inputs = jax.ShapeDtypeStruct((1, *batch.shape[1:]), batch.dtype)
        traced = jax.jit(exported.call).trace(variables, inputs)
        traced.lower(lowering_platforms=exported.platforms[:1])


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # the accelerator may be in use
    try:
        read_fn = {"jax": _read, "onnxruntime": onnx_session}[sys.argv[1]]
        read_fn(pathlib.Path(sys.argv[2]).read_bytes())
    except Exception as error:
        sys.exit(one_line(error))
