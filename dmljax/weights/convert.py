"""Published weights for the nets: fetch, check, convert, load.

    python -m dmljax.weights.convert                                            what is known
    python -m dmljax.weights.convert --fetch=resnet50                           download one
    python -m dmljax.weights.convert FILE --net=resnet50 --to=resnet50.safetensors

`load` takes the published file as well as the converted one, which says where it comes from
(`read_metadata`). The names of the parameters are those of the files; what differs between a file
and a net is only how a leaf is called and how its axes lie. docs/weights.md has the list of files.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import hashlib
import json
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import traverse_util

from dmljax.commands.errors import USER_ERRORS, print_error
from dmljax.commands.parser import Parser
from dmljax.train import registry
from dmljax.weights import readers as formats
from dmljax.weights import registry as published
from dmljax.weights.registry import KNOWN

__all__ = ["convert", "load", "read_metadata"]

ReportFn = Callable[[str], None]
Variables = dict[str, Any]


_UNIT = {"channels": "RGB", "range": [0, 1]}
_INPUTS: dict[str, dict[str, Any]] = {
    "imagenet": _UNIT | {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]},
    "caffe": {"channels": "BGR", "range": [0, 255], "mean": [104, 117, 123], "std": [1, 1, 1]},
    "caffe_bn": {"channels": "BGR", "range": [0, 255], "mean": [104, 117, 128], "std": [1, 1, 1]},
}
_IMAGE_SIZE = 224  # on which all of them were trained

# Classifiers, the auxiliary ones too. A net without one leaves it in the file.
_HEADS = {"aux1", "aux2", "classifier", "fc", "head", "last_linear", "loss1", "loss2", "loss3"}
_HEAD_WEIGHTS = ("fc", "classifier.1", "last_linear", "loss3.classifier", "head")
# A name that only one family has, to say what a file is that does not fit.
_TELLING = {
    "layer1.0.conv1.weight": "a resnet",
    "inception3a.branch1.conv.weight": "googlenet_bn, torchvision's",
    "inception_3a.1x1.weight": "googlenet, Caffe's",
    "inception_3a_1x1.weight": "bn_inception",
    "features.1.conv.0.0.weight": "mobilenet_v2",
    "blocks.0.attn.qkv.weight": "a vit",
}


# --- load ---------------------------------------------------------------------------------------


def load(
    path: str | os.PathLike,
    net: nn.Module,
    *,
    image_shape: Sequence[int] | None = None,
    report_fn: ReportFn = logging.info,
) -> Variables:
    """The variables of `net`, as numpy arrays, from a published or a converted file.

    Every tensor is checked. A classifier that the net does not have is left out, and so are the
    stages before `start` and after `stop`; `report_fn` gets a line on this, and on types that are
    not float32. What else is missing, left over or of another shape raises, all in one error.
    `image_shape` is what the net is for, where that is not 224 x 224 x 3.
    """
    weights = _read(path)
    if "dmljax" in weights.metadata:
        metadata = read_metadata(path, weights)
        if metadata["tensors_sha256"] != _digest(weights.tensors):
            raise ValueError(f"{path} is damaged (its digest is another): convert it again")
        label = f"{path}, converted for {metadata['net']['name']},"
        return _fit(label, weights.tensors, net, _own_name, report_fn, image_shape)
    return _fit(str(path), _renamed(weights), net, _torch_name, report_fn, image_shape)


def read_metadata(
    path: str | os.PathLike, weights: formats.Weights | None = None
) -> dict[str, Any]:
    """What `convert` wrote about a file: net, source, SHA-256, licence, inputs, notes."""
    found = (weights or formats.read(path)).metadata.get("dmljax")
    if found is None:
        raise ValueError(
            f"{path} was not converted by dmljax and says nothing of its source: "
            "python -m dmljax.weights.convert FILE --net=... --to=..."
        )
    try:
        metadata = json.loads(found)
        version = metadata["format"]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is damaged (its metadata): convert it again") from error
    if version != 1:
        raise ValueError(f"{path} is of a later format, {version}: update dmljax")
    return metadata


def _read(path: str | os.PathLike) -> formats.Weights:
    if str(path) in KNOWN and not pathlib.Path(path).exists():
        raise FileNotFoundError(
            f"{path} is not a file but the name of one: "
            f"python -m dmljax.weights.convert --fetch={path} prints where it is"
        )
    weights = formats.read(path)
    digits = re.search(r"-([0-9a-f]{8,64})\.pth?$", pathlib.Path(path).name)
    if digits and not weights.sha256.startswith(digits[1]):
        raise ValueError(
            f"{path} is damaged or another file: by its name the SHA-256 begins with "
            f"{digits[1]}, but it is {weights.sha256[:16]}...: download it again"
        )
    return weights


def _renamed(weights: formats.Weights) -> dict[str, np.ndarray]:
    """The tensors under PyTorch's names: 'layer1.0.bn1.running_mean'."""
    found = {}
    for name, array in weights.tensors.items():
        if weights.layout == "onnx":
            name = re.sub("_([wb])_0$", lambda m: f".{'weight' if m[1] == 'w' else 'bias'}", name)
            if not jnp.issubdtype(array.dtype, jnp.floating):
                continue  # shapes that the graph computes with
        found[name.replace("/", ".")] = array
    if found and all(name.startswith("module.") for name in found):  # of DataParallel
        found = {name.removeprefix("module."): array for name, array in found.items()}
    return {n: a for n, a in found.items() if not n.endswith(".num_batches_tracked")}


_LEAVES = {"kernel": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var"}


def _torch_name(path: Sequence[str]) -> str:
    return ".".join((*path[1:-1], _LEAVES.get(path[-1], path[-1])))


def _own_name(path: Sequence[str]) -> str:
    return "/".join(path)


def _fit(
    path: str,
    tensors: Mapping[str, np.ndarray],
    net: nn.Module,
    name_fn: Callable[[Sequence[str]], str],
    report_fn: ReportFn,
    image_shape: Sequence[int] | None = None,
) -> Variables:
    whole, part = _shapes(net, image_shape)
    names = {name_fn(key): key for key in part}
    own = name_fn is _own_name

    def top(name: str) -> str:
        return name.split("/")[1] if own else name.split(".")[0]

    tops = set(map(top, names))
    left_out = [n for n in tensors if n not in names and top(n) in _HEADS - tops]
    elsewhere = set(map(name_fn, whole)) - set(names)
    other_stages = [n for n in tensors if n in elsewhere]
    extra = [n for n in tensors if n not in {*names, *left_out, *other_stages}]
    missing = [n for n in names if n not in tensors]
    shapes, kinds, found, hint = [], [], {}, ""
    for name, key in names.items():
        if name not in tensors:
            continue
        array, wanted = tensors[name], part[key]
        shape = wanted.shape if own else _torch_shape(wanted.shape)
        # Caffe's blobs and old conversions of them have axes of size 1 in front.
        if array.shape != shape and array.ndim > len(shape) and array.size:
            ones = array.ndim - len(shape)
            array = array.reshape(array.shape[ones:]) if set(array.shape[:ones]) == {1} else array
        if array.shape != shape:
            shapes.append(f"{name} {_text(array.shape)}, in the net {_text(shape)}")
            hint = ". A net with classes=None does without" if top(name) in _HEADS else hint
        elif not jnp.issubdtype(array.dtype, jnp.floating):
            kinds.append(f"{name} of {array.dtype}")
        else:
            found[key] = array
    rows = (
        ("missing", missing),
        ("not in the net", extra),
        ("shape", shapes),
        ("no floats", kinds),
    )
    if wrong := "; ".join(f"{title}: {_some(items)}" for title, items in rows if items):
        raise ValueError(
            f"{path} does not fit the net{_guess(tensors, missing, names)}. {wrong}{hint}"
        )
    for title, items in (("classifiers", left_out), ("other stages", other_stages)):
        if items:
            report_fn(f"{path}: {title} left out, as the net has none: {_some(items)}")
    for kind in sorted({a.dtype.name for a in found.values()} - {"float32"}):
        count = sum(a.dtype.name == kind for a in found.values())
        verb = "rounded" if kind == "float64" else "widened"
        report_fn(f"{path}: {count} of {len(found)} tensors are {kind}, {verb} to float32")
    variables = {key: _value(found[key], own, part[key].dtype) for key in part}
    if broken := [name for name, key in names.items() if not np.isfinite(variables[key]).all()]:
        raise ValueError(f"{path} is damaged: NaN or infinity in {_some(broken)}")
    return traverse_util.unflatten_dict(variables)


def _shapes(
    net: nn.Module, image_shape: Sequence[int] | None
) -> tuple[dict[tuple, Any], dict[tuple, Any]]:
    """Shapes by path, of the net from its first to its last stage and of the part that it is."""
    defaults = {f.name: f.default for f in dataclasses.fields(net) if f.name in ("start", "stop")}
    whole = net.clone(**defaults)
    stages: dict[str, Any] = {}

    def init(net, image):
        def run(key, x):
            outputs, variables = net.init_with_output(key, x, train=False)
            stages.update(outputs)
            return variables

        return traverse_util.flatten_dict(jax.eval_shape(run, jax.random.key(0), image))

    size = getattr(net, "image_size", _IMAGE_SIZE)
    image = jax.ShapeDtypeStruct((1, *(image_shape or (size, size, 3))), jnp.float32)
    variables = init(whole, image)
    start = getattr(net, "start", None)
    if all(getattr(net, name) == default for name, default in defaults.items()):
        return variables, variables
    order = list(stages)
    if start != defaults["start"] and start in order:
        before = stages[order[order.index(start) - 1]]
        image = jax.ShapeDtypeStruct(before.shape, jnp.float32)
    return variables, init(net, image)


def _torch_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 4:  # HWIO to OIHW
        return shape[3], shape[2], shape[0], shape[1]
    return shape[::-1] if len(shape) == 2 else shape


def _value(array: np.ndarray, own: bool, dtype: Any) -> np.ndarray:
    if not own and array.ndim == 4:
        array = array.transpose(2, 3, 1, 0)
    elif not own and array.ndim == 2:
        array = array.T
    with np.errstate(over="ignore"):  # an infinity is reported by name
        return np.array(array, dtype, order="C")


def _guess(tensors: Mapping[str, Any], missing: Sequence[str], names: Mapping[str, Any]) -> str:
    if len(missing) < len(names) / 2:
        return ""
    seen = [family for name, family in _TELLING.items() if name in tensors]
    return f": it looks like {seen[0]}" if seen else ": it is of another architecture"


def _some(items: Iterable[str], limit: int = 12) -> str:
    items = list(items)
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def _text(shape: Iterable[int]) -> str:
    return f"[{' '.join(map(str, shape))}]"


def _digest(tensors: Mapping[str, np.ndarray]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(f"{name} {tensors[name].dtype} {tensors[name].shape}\n".encode())
        total.update(np.asarray(tensors[name], order="C").tobytes())
    return total.hexdigest()


# --- convert ------------------------------------------------------------------------------------


def convert(
    path: str | os.PathLike, net: str | Mapping[str, Any], to: str | os.PathLike
) -> dict[str, Any]:
    """Writes a published file as one of ours, whole or not at all; returns its metadata.

    `net` is a name or `dict(name=..., **keywords)`, as in a config. The classifier is kept, unless
    `classes=None` is among the keywords.
    """
    spec = dict(net) if isinstance(net, Mapping) else {"name": net}
    if pathlib.Path(to).suffix != ".safetensors":
        raise ValueError(f"{to} must end in .safetensors")
    if not pathlib.Path(to).parent.is_dir():
        raise FileNotFoundError(f"the folder {pathlib.Path(to).parent} does not exist")
    registry.resolve("net", spec)  # a wrong name is said before a large file is read
    weights = _read(path)
    if "dmljax" in weights.metadata:
        raise ValueError(f"{path} is converted already")
    tensors = _renamed(weights)
    if "classes" not in spec:
        heads = [tensors[f"{n}.weight"] for n in _HEAD_WEIGHTS if f"{n}.weight" in tensors]
        if heads and heads[0].ndim >= 2:
            spec["classes"] = int(heads[0].shape[-2])
    notes: list[str] = []
    variables = _fit(str(path), tensors, registry.resolve("net", spec)(), _torch_name, notes.append)
    flat = {_own_name(k): v for k, v in traverse_util.flatten_dict(variables).items()}
    known = _identify(path, weights)
    inputs = KNOWN[known].inputs if known else _usual_inputs(spec["name"])
    metadata = {
        "format": 1,
        "net": spec,
        "source": {
            "file": pathlib.Path(path).name,
            "sha256": weights.sha256,
            "known_as": known,
            "url": KNOWN[known].url if known else None,
        },
        "licence": KNOWN[known].licence if known else "not known: the file is none that is listed",
        "inputs": {"size": _IMAGE_SIZE, "normalization": inputs, **_INPUTS[inputs]},
        "notes": [note.removeprefix(f"{path}: ") for note in notes],
        "tensors_sha256": _digest(flat),
    }
    formats.write(to, flat, json.dumps(metadata, sort_keys=True))
    return metadata


def _identify(path: str | os.PathLike, weights: formats.Weights) -> str | None:
    """The published file that this one is, by its digest, or by its name where there is none."""
    sha1 = functools.cache(lambda: hashlib.sha1(pathlib.Path(path).read_bytes()).hexdigest())
    for name, known in KNOWN.items():
        kind, _, digits = known.digest.partition(":")
        if kind == "" and pathlib.Path(path).name == published.file_name(name):
            return name
        if kind and (weights.sha256 if kind == "sha256" else sha1()).startswith(digits):
            return name
    return None


def _usual_inputs(net: str) -> str:
    return next((known.inputs for known in KNOWN.values() if known.net == net), "imagenet")


# --- command line -------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    parser = Parser("weights", __doc__ or "")
    parser.add_argument("file", nargs="?", help="published file of weights")
    parser.add_argument(
        "--net", help="what it is for; --net.classes=None leaves the classifier out"
    )
    parser.add_argument("--to", help="the file to write, .safetensors")
    parser.add_argument("--fetch", help="download a published file and print where it is")
    args, rest = parser.parse_known_args(argv)
    keywords = {}
    for word in rest:
        key, equals, value = word.partition("=")
        if not key.startswith("--net.") or not equals:
            raise ValueError(f"{word} is not known (see {parser.prog} --help)")
        try:
            keywords[key.removeprefix("--net.")] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            keywords[key.removeprefix("--net.")] = value
    if args.fetch:
        print(published.fetch(args.fetch))
        return 0
    if args.file is None:
        if args.net or args.to or rest:
            raise ValueError(f"name a file to convert (see {parser.prog} --help)")
        print(published.table())
        return 0
    if not args.net or not args.to:
        raise ValueError(f"--net=NAME and --to=FILE.safetensors are needed ({parser.prog} --help)")
    metadata = convert(args.file, {"name": args.net, **keywords}, args.to)
    for note in metadata["notes"]:
        print(note)
    print(
        f"wrote {args.to}: {metadata['net']}, source {metadata['source']['known_as'] or 'unknown'}"
    )
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except USER_ERRORS as error:
        print_error(error)
        sys.exit(2)
