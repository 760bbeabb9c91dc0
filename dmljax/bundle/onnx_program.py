"""A bundle's program as ONNX, by jax2onnx.

jax2onnx replaces functions of flax and jax.numpy while it runs, so it runs in a process of its own:

    python -m dmljax.bundle.onnx_program FOLDER
"""

import importlib.util
import pathlib
import re
import sys

from dmljax.bundle import files
from dmljax.bundle.processes import run_module
from dmljax.files import reading

# jax2onnx asks for an older Orbax than dmljax, which it does not need for a conversion.
INSTALL = "pip install 'dmljax[onnx]' && pip install --no-deps jax2onnx==0.17.1"
_OPSET = 23


def check_installed() -> None:
    """Raises ImportError with the command that installs what is missing."""
    for package in ("jax2onnx", "onnx", "onnx_ir", "onnxruntime"):
        if importlib.util.find_spec(package) is None:
            raise ImportError(f"--onnx needs {package}: {INSTALL}")


def write(folder: pathlib.Path) -> None:
    """Writes `embed.onnx` into the bundle in `folder`, in a new process."""
    check_installed()
    if problem := run_module("dmljax.bundle.onnx_program", folder):
        if match := re.match(r"ModuleNotFoundError: No module named '(\w+)", problem):
            raise ImportError(
                f"--onnx needs {match[1]}, which jax2onnx imports: pip install {match[1]}"
            )
        raise ValueError(f"jax2onnx cannot convert this net ({problem}): export without --onnx")


def _main(folder: pathlib.Path) -> None:
    import jax2onnx

    from dmljax import kernels
    from dmljax.bundle import programs

    # The process that wrote this folder has imported the modules of its config, or refused them.
    with reading.trusting_modules(True):
        model = programs.open_model(folder, files.read_manifest(folder))
    with kernels.portable():
        converted = jax2onnx.to_onnx(
            lambda images: model.embed_fn(model.tensors, images),
            [_Images(("B", *model.image_shape))],
            model_name="embed",
            opset=_OPSET,
            input_names=["images"],
            output_names=["embeddings"],
        )
    (folder / files.ONNX).write_bytes(converted.SerializeToString())


class _Images:
    """The shape and type of the input; jax has no type for a named size."""

    def __init__(self, shape: tuple):
        import numpy as np

        self.shape, self.dtype = shape, np.dtype(np.uint8)


if __name__ == "__main__":
    _main(pathlib.Path(sys.argv[1]))
