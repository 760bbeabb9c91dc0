"""Which programs of bundles are read: JAX operations only, and none that crashes the reader.

A damaged program can end the process that reads it, and no `except` notices. So a program that was
not accepted on this machine before is first read and lowered by a process of its own:

    python -m dmljax.bundle.admission PROGRAM
"""

from __future__ import annotations

import contextlib
import hashlib
import pathlib
import sys
import tempfile
import threading

import jax
from jax import export
from jax.extend import mlir
from jax.extend.mlir import ir
from jax.interpreters.mlir import make_ir_context

from dmljax import at_hand
from dmljax.bundle.processes import run_module

__all__ = ["accept", "one_line", "problem_of", "refusal"]

# Operations that pass data to the process or to other devices.
_OUTSIDE = {f"stablehlo.{name}" for name in ("infeed", "outfeed", "recv", "send")}
_problems: dict[str, str | None] = {}  # of the programs that this process has tried, by digest
_lock = threading.Lock()


def problem_of(data: bytes) -> str | None:
    """Why a program cannot be read: the error, or the crash, of another process; or None."""
    digest = hashlib.sha256(data).hexdigest()
    with _lock:
        if digest not in _problems:
            _problems[digest] = None if _mark(digest).exists() else _tried(data)
        return _problems[digest]


def accept(data: bytes) -> None:
    """Notes that a program was read here, or was written here, so that nobody tries it again."""
    digest = hashlib.sha256(data).hexdigest()
    _problems[digest] = None
    with contextlib.suppress(OSError):  # then the next process tries it again
        _mark(digest).parent.mkdir(parents=True, exist_ok=True)
        _mark(digest).touch()


def _mark(digest: str) -> pathlib.Path:
    """An empty file that stands for a program that was accepted."""
    return at_hand.cache_folder() / "programs" / f"{digest}-jax-{jax.__version__}"


def _tried(data: bytes) -> str | None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        return run_module("dmljax.bundle.admission", file.name)


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
        _read(pathlib.Path(sys.argv[1]).read_bytes())
    except Exception as error:
        sys.exit(one_line(error))
