"""Run folders and bundles that a stranger has changed, with digests that agree."""

import json
import pathlib

from dmljax.bundle import files


def change_config(folder: pathlib.Path, fields: dict) -> None:
    """Changes top-level fields of the config of a run or of a bundle; renews a bundle's digests."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    if (folder / files.MANIFEST).exists():
        renew(folder)


def replace(bundle: pathlib.Path, name: str, data: bytes) -> None:
    """Puts other bytes into a file of a bundle; renews the digests."""
    (bundle / name).write_bytes(data)
    renew(bundle)


def renew(bundle: pathlib.Path) -> None:
    """Writes the digests of all files, and the digest of the model, into the manifest."""
    path = bundle / files.MANIFEST
    config, preprocess = (
        json.loads((bundle / name).read_text()) for name in (files.CONFIG, files.PREPROCESS)
    )
    tensors = files.parse_tensors((bundle / files.PARAMS).read_bytes(), files.PARAMS)
    digests = {
        "files": files.digests(bundle),
        "model": files.model_digest(tensors, preprocess, config),
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | digests))


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

    from dmljax.bundle import programs, rebuilding

    model = rebuilding.open_model(bundle, files.read_manifest(bundle))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), model.tensors)
    images = jax.ShapeDtypeStruct((4, *model.image_shape), np.uint8)
    exported = jax.export.export(
        jax.jit(lambda tensors, images: change_fn(model.embed_fn(tensors, images))),
        disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(target)],
    )(shapes, images)
    return bytes(programs.serialized(exported))
