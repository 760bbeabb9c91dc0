"""New programs for an old bundle, from its config and its parameters."""

import datetime
import os
import pathlib
from typing import Any

import jax
import numpy as np
from flax import traverse_util

import dmljax
from dmljax.bundle import exporting, files, loading, programs, text
from dmljax.bundle.errors import BadBundle
from dmljax.config.fields import named
from dmljax.files import reading
from dmljax.files.writing import write_json
from dmljax.nets import text as towers


def rebundle(
    old: str | os.PathLike,
    out: str | os.PathLike,
    *,
    onnx: bool = False,
    trust_modules: bool = False,
) -> pathlib.Path:
    """Writes the bundle `out` with the parameters of `old` and new programs, and returns its path.

    The new programs must give the embeddings of the stored examples; otherwise `MismatchedProgram`
    is raised and nothing is left. The model digest stays, so that stored vectors remain valid. A
    config that names modules outside of dmljax is refused unless `trust_modules`, because importing
    them runs their code.
    """
    old, out = pathlib.Path(old), pathlib.Path(out)
    exporting.check_target(out, onnx=onnx)
    manifest = files.read_manifest(old)
    with reading.trusting_modules(trust_modules):
        model = programs.open_model(old, manifest)
    golden = files.read_tensors(old, manifest, files.GOLDEN)
    facts = {name: manifest[name] for name in ("batch_sizes", "classes", "thresholds")}
    facts |= {"prefixes": manifest["prefixes"]} if "prefixes" in manifest else {}
    exported_on = manifest["program"]["exported_on"]
    with exporting.written_whole(out) as folder:
        for name in manifest["files"]:
            if name not in (files.PROGRAM, files.ONNX):
                (folder / name).write_bytes(files.read(old, manifest, name))
        if "text" in manifest:
            facts["text"] = manifest["text"]
            _write_text(folder, old, manifest)
        programs.write(folder / files.PROGRAM, programs.stablehlo(model))
        options = {"onnx": onnx, "exported_on": exported_on}
        new_manifest = exporting.write_manifest(folder, model, facts, **options)
        if new_manifest["model"] != manifest["model"]:
            raise loading.BadBundle(f"the model digest of {old} does not belong to its files")
        inputs, embeddings = golden["inputs"], golden["embeddings"]
        reports = exporting.check_programs(folder, new_manifest, embeddings, inputs)
        exported = files.read_json(old, manifest, files.PARITY)
        write_json(folder / files.PARITY, _parity(exported, reports), indent=2)
        with (folder / files.CARD).open("a") as file:
            file.write(_note(new_manifest, reports))
        exporting.write_manifest(folder, model, facts, exported_on=exported_on)
    return out


def _write_text(folder: pathlib.Path, old: pathlib.Path, manifest: dict[str, Any]) -> None:
    """A new program of the tower for text, which must give the stored embeddings."""
    name = named(files.read_json(old, manifest, files.CONFIG)["net"])["name"]
    if name not in towers.TOWERS:
        raise BadBundle(f"{old} has text, but there is no tower beside the net {name!r}")
    tower, vocabulary = towers.TOWERS[name](), files.read(old, manifest, files.VOCABULARY)
    tensors = files.read_tensors(old, manifest, files.TEXT_PARAMS)
    variables = traverse_util.unflatten_dict(tensors, sep="/")
    text.write(folder, tower, variables, manifest["text"], vocabulary)
    stored, new = (
        files.parse_tensors((path / files.TEXT_GOLDEN).read_bytes(), files.TEXT_GOLDEN)
        for path in (old, folder)
    )
    atol, _ = loading.limits("float32", manifest["program"]["exported_on"], loading.platform())
    if not np.allclose(stored["embeddings"], new["embeddings"], atol=atol):
        raise BadBundle(f"the new program for text of {old} gives other embeddings")


def _parity(exported: dict[str, Any], rebuilt: dict[str, Any]) -> dict[str, Any]:
    """The report of the export, and the reports of rebuilt programs on the stored examples."""
    return {**exported, "rebuilt": [*exported.get("rebuilt", []), rebuilt]}


def _note(manifest: dict[str, Any], reports: dict[str, Any]) -> str:
    today = datetime.datetime.now(datetime.UTC).date()
    batches = [report["largest_batch"] for report in reports["programs"].values()]
    difference = max(batch["largest_difference"] for batch in batches)
    return (
        f"\n## Programs of {today}\n\nRebuilt by dmljax {dmljax.__version__} and jax "
        f"{jax.__version__}, for {', '.join(manifest['program']['platforms'])}. On the stored "
        f"examples they differ from the checkpoint by {difference:.1e} at most. JAX promises "
        f"to load them until {manifest['program']['promised_until']}.\n"
    )
