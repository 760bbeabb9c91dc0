"""Run folders and bundles that a stranger has changed, with digests that agree."""

import contextlib
import json
import pathlib

from safetensors.numpy import load

from dmljax.bundle import files
from dmljax.files.writing import sha256


def change_config(folder: pathlib.Path, fields: dict) -> None:
    """Changes top-level fields of the config of a run or of a bundle; renews a bundle's digests."""
    if (folder / files.MANIFEST).exists():
        content = json.loads((folder / files.MANIFEST).read_text())
        renew(folder, config=content["config"] | fields)
        return
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def replace(bundle: pathlib.Path, name: str, data: bytes) -> None:
    """Puts other bytes into a file of a bundle; renews the digests."""
    (bundle / name).write_bytes(data)
    renew(bundle)


def renew(bundle: pathlib.Path, **fields) -> None:
    """Changes top-level fields of the manifest of a bundle, and renews all digests."""
    path = bundle / files.MANIFEST
    content = json.loads(path.read_text()) | fields
    names = {file.name for file in bundle.iterdir()} - {files.MANIFEST}
    content["files"] = {name: sha256(bundle / name) for name in sorted(names)}
    with contextlib.suppress(Exception):  # parameters that cannot be read have no digest
        tensors = load((bundle / files.PARAMS).read_bytes())
        content["model"] = files.model_digest(tensors, content["preprocess"], content["config"])
    change_manifest(bundle, **content)


def change_manifest(bundle: pathlib.Path, **fields) -> None:
    """Changes top-level fields of the manifest of a bundle, and renews its identity."""
    path = bundle / files.MANIFEST
    content = json.loads(path.read_text()) | fields
    path.write_text(json.dumps(content | {"identity": files.identity(content)}))


def lapack_program(bundle: pathlib.Path) -> bytes:
    """A program like the bundle's that calls LAPACK with false shapes.

    The call says that its input of [400 400] is [2 2]: if it ran, LAPACK's copy of the input would
    overwrite 640 kB behind a buffer of 16 bytes.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    def change(x):
        shapes = ((2, 2), np.float32), ((2,), np.int32), ((), np.int32)
        outputs = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
        square = jnp.resize(x, (400, 400))
        return x + jax.ffi.ffi_call("lapack_sgetrf_ffi", outputs)(square)[0].sum()

    return changed_program(bundle, change, "lapack_sgetrf_ffi")


def changed_program(bundle: pathlib.Path, change_fn, target: str) -> bytes:
    """The bundle's program with `change_fn` on its embeddings, which may call `target`."""
    import jax
    import numpy as np

    from dmljax.bundle import models

    model = models.open_model(bundle)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.tensors)
    images = jax.ShapeDtypeStruct((4, *model.input_shape), np.uint8)
    exported = jax.export.export(
        jax.jit(lambda tensors, images: change_fn(model.embed_fn(tensors, images))),
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(target)],
    )(shapes, images)
    return bytes(exported.serialize())


def field(number: int, value: int | str | bytes) -> bytes:
    """A field of a protobuf message: one byte, text, or a message."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = b""
    while value > 0x7F:
        out, value = out + bytes([value & 0x7F | 0x80]), value >> 7
    return out + bytes([value])


def outside_tensor(file: str) -> bytes:
    """A TensorProto `w`, uint8 [1 6], whose values are the first bytes of a file."""
    location = field(13, field(1, "location") + field(2, file))
    location += field(13, field(1, "length") + field(2, "6"))
    return field(1, 1) + field(1, 6) + field(2, 2) + field(8, "w") + location + field(14, 1)


def number(name: str, value: int) -> bytes:
    """A TensorProto, int32 [1 1]."""
    raw = value.to_bytes(4, "little", signed=True)
    return field(1, 1) + field(1, 1) + field(2, 6) + field(8, name) + field(9, raw)


def onnx_program(*tensors: bytes, op: str = "Identity", kind: int = 2) -> bytes:
    """A model whose embeddings are an operation on the TensorProtos `w` and, if given, `v`.

    `kind` is the type of the embeddings: 2 is uint8, and 6 is int32.
    """

    def value(name: str, sizes: str, kind: int = 2) -> bytes:
        shape = b"".join(field(1, field(2, size)) for size in sizes)
        return field(1, name) + field(2, field(1, field(1, kind) + field(2, shape)))

    node = b"".join(field(1, name) for name, _ in zip("wv", tensors, strict=False))
    node += field(2, "embeddings") + field(4, op)
    graph = field(1, node) + field(2, "embed")
    graph += b"".join(field(5, tensor) for tensor in tensors)
    graph += field(11, value("images", "bhwc")) + field(12, value("embeddings", "bd", kind))
    return field(1, 8) + field(7, graph) + field(8, field(2, 13))
