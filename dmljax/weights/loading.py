"""Variables of a net, or of a tower for text, from a published or a converted file."""

import collections
import dataclasses
import functools
import itertools
import os
import pathlib
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import traverse_util

from dmljax.files.writing import tensors_digest
from dmljax.nets.clip import TEXT_NAME_MAPS, TOWERS
from dmljax.nets.files import OWN_NAMES, NameMap, ShapeFn, Source
from dmljax.nets.transformer import TextTower
from dmljax.weights import readers
from dmljax.weights.converted import metadata_if_converted
from dmljax.weights.published import FAMILIES, NAME_MAPS, PUBLISHED

ReportFn = Callable[[str], None]
Variables = dict[str, Any]
IMAGE_SIZE = 224  # of nets without an attribute `image_size`
# Names of classifiers, including auxiliary ones, or the first levels of these names.
CLASSIFIERS = {"aux1", "aux2", "classifier", "fc", "head", "last_linear", "loss1", "loss2", "loss3"}
CLASSIFIERS |= {"_fc", "head.fc"}
_MAIN_CLASSIFIERS = (
    *("fc", "classifier.1", "last_linear", "loss3.classifier", "head"),
    *("classifier", "head.fc", "_fc"),
)
_LEAVES = {"kernel": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var"}


class Layout(NamedTuple):
    """The name and the axes under which a file stores a parameter of a Flax net."""

    name_fn: Callable  # path such as ('params', 'bn1', 'scale') -> name in the file
    top_fn: Callable  # name in the file -> first level of the parameter's path
    shape_fn: Callable  # shape in the net -> shape in the file
    value_fn: Callable  # array of the file -> array with the axes of the net


def _torch_name(path: Sequence[str]) -> str:
    return ".".join((*path[1:-1], _LEAVES.get(path[-1], path[-1])))


def _torch_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) == 4:  # HWIO to OIHW
        return shape[3], shape[2], shape[0], shape[1]
    return shape[::-1] if len(shape) == 2 else shape


def _from_torch(array: np.ndarray) -> np.ndarray:
    if array.ndim == 4:
        return array.transpose(2, 3, 1, 0)
    return array.T if array.ndim == 2 else array


TORCH = Layout(_torch_name, lambda name: name.split(".")[0], _torch_shape, _from_torch)
FLAX = Layout("/".join, lambda name: name.split("/")[1], lambda shape: shape, lambda array: array)


def load(
    path: str | os.PathLike,
    net: nn.Module,
    *,
    image_shape: Sequence[int] | None = None,
    report_fn: ReportFn = logging.info,
) -> Variables:
    """Returns the variables of `net`, as numpy arrays, from a published or a converted file.

    Every tensor is checked. A classifier that the net lacks is left out, and so are the stages
    before `start` and after `stop`. `report_fn` is called with a line about what is left out, and
    about types other than float32. Any other tensor that is missing, unknown or of another shape
    raises; one error lists all of them. `image_shape` is the shape of the net's images, by default
    RGB of its `image_size`, or of 224 x 224 pixels.
    """
    weights = read_published(path)
    if (metadata := metadata_if_converted(path)) is None:
        return fit(str(path), torch_tensors(weights), net, TORCH, report_fn, image_shape)
    if metadata["tensors_sha256"] != tensors_digest(weights.tensors):
        raise ValueError(f"{path} is damaged (its digest is another): convert it again")
    label = f"{path}, converted for {metadata['net']['name']},"
    if rule := metadata["net"].get("resize"):
        _note_rule(label, net, rule, report_fn)
    return fit(label, weights.tensors, net, FLAX, report_fn, image_shape)


def load_text(path: str | os.PathLike, net: str) -> tuple[TextTower, dict[str, Any]] | None:
    """Loads the text tower for the net of this name with its variables, or returns None if the file
    has none.
    """
    tensors = torch_tensors(read_published(path))
    name_map = next((m for m in TEXT_NAME_MAPS if m.marks[0] in tensors), None)
    if name_map is None or net not in TOWERS:
        return None
    tower = TOWERS[net]()
    tokens = jax.ShapeDtypeStruct((1, tower.length), np.int32)
    shapes = traverse_util.flatten_dict(jax.eval_shape(tower.init, jax.random.key(0), tokens))
    sources = {path: name_map.source(TORCH.name_fn(path)) for path in shapes}
    variables, _, problems = matched_variables(tensors, sources, shapes, TORCH)
    check(f"{path} does not fit the tower for text of {net}", problems)
    return tower, finite_variables(str(path), variables, sources)


def read_published(path: str | os.PathLike) -> readers.Weights:
    """Calls `readers.read` and compares the SHA-256 with the digits in the file's name."""
    if str(path) in PUBLISHED and not pathlib.Path(path).exists():
        raise FileNotFoundError(
            f"{path} is not a file but the name of a published one: "
            f"dmljax weights --fetch={path} downloads it and prints its path"
        )
    weights = readers.read(path)
    digits = re.search(r"-([0-9a-f]{8,64})\.pth?$", pathlib.Path(path).name)
    if digits and not weights.sha256.startswith(digits[1]):
        raise ValueError(
            f"{path} is damaged or another file: by its name the SHA-256 begins with "
            f"{digits[1]}, but it is {weights.sha256[:16]}...: download it again"
        )
    return weights


def fit(
    label: str,
    tensors: Mapping[str, np.ndarray],
    net: nn.Module,
    layout: Layout,
    report_fn: ReportFn,
    image_shape: Sequence[int] | None = None,
) -> Variables:
    """Builds the variables of `net` from the tensors of a file, which messages call `label`."""
    shapes_of_all_stages, shapes = variable_shapes(net, image_shape)
    name_map = name_map_of(tensors) if layout is TORCH else OWN_NAMES
    named = {TORCH.name_fn(p): TORCH.shape_fn(x.shape) for p, x in shapes_of_all_stages.items()}
    _, expected = _recognized(lambda name, gated=False: named.get(name))
    family, file_nets = _recognized(functools.partial(_shape_in_file, tensors, name_map))
    if file_nets and expected and not set(file_nets) & set(expected):
        raise ValueError(f"{label} is {_listed(file_nets)}, not {_listed(expected)}")
    gated = any(".gate." in layout.name_fn(path) for path in shapes)
    sources_of_all_stages = {
        path: name_map.source(layout.name_fn(path), gated=gated)
        for path in shapes_of_all_stages | shapes
    }
    sources = {path: sources_of_all_stages[path] for path in shapes}
    used = {name for source in sources.values() for name in source.names}
    tops = {layout.top_fn(name) for name in used}
    names_of_all_stages = {n for source in sources_of_all_stages.values() for n in source.names}
    classifiers, other_stages, unknown, not_zero = [], [], [], []
    for name in [name for name in tensors if name not in used]:
        if name_map.is_zero(name):
            if np.any(tensors[name]):
                not_zero.append(name)
        elif name in names_of_all_stages:
            other_stages.append(name)
        elif {layout.top_fn(name), name.rpartition(".")[0]} & (CLASSIFIERS - tops):
            classifiers.append(name)
        elif not name_map.is_unused(name):
            unknown.append(name)
    variables, dtypes, problems = matched_variables(tensors, sources, shapes, layout)
    is_classifier = any(layout.top_fn(text) in CLASSIFIERS for text in problems["shape"])
    guess = ""
    if len(problems["missing"]) >= len(shapes) / 2:
        names = file_nets or [family] if family else []
        guess = f": it looks like {_listed(names)}" if names else ": it is of another architecture"
    check(
        f"{label} does not fit the net{guess}",
        problems | {"not in the net": unknown, "not zero": not_zero},
        hint=". A net with classes=None has no classifier" if is_classifier else "",
    )
    for title, names in (("classifiers", classifiers), ("other stages", other_stages)):
        if names:
            report_fn(f"{label}: {title} left out, as the net has none: {_some(names)}")
    for dtype in sorted(set(dtypes) - {"float32"}):
        verb = "rounded" if dtype == "float64" else "widened"
        report_fn(
            f"{label}: {dtypes[dtype]} of {len(shapes)} tensors are {dtype}, {verb} to float32"
        )
    if name_map.resize is not None:
        _note_rule(label, net, name_map.resize, report_fn)
    return finite_variables(label, variables, sources)


def matched_variables(
    tensors: Mapping[str, np.ndarray],
    sources: Mapping[tuple, Source],
    shapes: Mapping[tuple, Any],
    layout: Layout,
) -> tuple[dict[tuple, np.ndarray], collections.Counter[str], dict[str, list[str]]]:
    """Returns the variables of a net by their paths, the types in the file, and the mismatches."""
    variables, dtypes = {}, collections.Counter[str]()
    problems: dict[str, list[str]] = {"missing": [], "shape": [], "no floats": []}
    for path, source in sources.items():
        absent = [name for name in source.names if name not in tensors]
        if absent and not source.zero_if_missing:
            problems["missing"] += absent
            continue
        name, shape = " + ".join(source.names), layout.shape_fn(shapes[path].shape)
        array = source.value(tensors, shape)
        # Some files have leading axes of size 1, which others lack.
        if _stripped(array.shape) != _stripped(shape):
            text = f"{name} {_text(array.shape)}, in the net {_text(shape)}"
            problems["shape"].append(text)
        elif not jnp.issubdtype(array.dtype, jnp.floating):
            problems["no floats"].append(f"{name} of {array.dtype}")
        else:
            dtypes[array.dtype.name] += 1
            value = layout.value_fn(array.reshape(shape))
            with np.errstate(over="ignore"):  # `finite_variables` reports infinities by name
                variables[path] = np.array(value, shapes[path].dtype, order="C")
    return variables, dtypes, problems


def check(label: str, problems: Mapping[str, Sequence[str]], *, hint: str = "") -> None:
    """Raises one line with all problems, if there are any."""
    if wrong := "; ".join(f"{title}: {_some(names)}" for title, names in problems.items() if names):
        raise ValueError(f"{label}. {wrong}{hint}")


def finite_variables(
    label: str, variables: Mapping[tuple, np.ndarray], sources: Mapping[tuple, Source]
) -> Variables:
    """Returns the variables as a tree; raises if one holds NaN or infinity."""
    if broken := [p for p, value in variables.items() if not np.isfinite(value).all()]:
        names = [" + ".join(sources[path].names) for path in broken]
        raise ValueError(f"{label} is damaged: NaN or infinity in {_some(names)}")
    return traverse_util.unflatten_dict(variables)


def name_map_of(names: Container[str]) -> NameMap:
    """Returns the map for a file with these names; the names of the net itself, if no other map
    fits.
    """
    for name_map in NAME_MAPS:
        if name_map.fits(names):
            return name_map
    return OWN_NAMES


def _note_rule(label: str, net: nn.Module, rule: str, report_fn: ReportFn) -> None:
    """Reports a net that resizes positions in another way than the code behind its file."""
    if getattr(net, "resize", rule) != rule:
        report_fn(
            f"{label}: the code behind this file resizes positions by {rule!r}, the net by "
            f"{net.resize!r}. They differ for images of other sizes than {net.image_size}: "
            f"set resize={rule!r} of the net"
        )


def _shape_in_file(
    tensors: Mapping[str, np.ndarray], name_map: NameMap, name: str, *, gated: bool = False
) -> tuple[int, ...] | None:
    source = name_map.source(name, gated=gated)
    if any(name not in tensors for name in source.names):
        return None
    return source.value(tensors, ()).shape


def variable_shapes(
    net: nn.Module, image_shape: Sequence[int] | None = None
) -> tuple[dict[tuple, Any], dict[tuple, Any]]:
    """Returns shapes of variables by path: of all stages, and of those from `start` to `stop`."""
    defaults: dict[str, Any] = {
        f.name: f.default for f in dataclasses.fields(net) if f.name in ("start", "stop")
    }
    outputs: dict[str, Any] = {}

    def variables_of(net, image, **inputs):
        def init(key, x, inputs):
            outputs_of_net, variables = net.init_with_output(key, x, train=False, **inputs)
            outputs.update(outputs_of_net)
            return variables

        shapes = jax.eval_shape(init, jax.random.key(0), image, inputs)
        return traverse_util.flatten_dict(shapes)

    def struct(shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    sides = np.broadcast_to(getattr(net, "image_size", IMAGE_SIZE), 2).tolist()
    image = struct((1, *(image_shape or (*sides, 3))))
    of_all_stages = variables_of(net.clone(**defaults), image)
    if all(getattr(net, name) == default for name, default in defaults.items()):
        return of_all_stages, of_all_stages
    order, start = list(outputs), net.start
    # Between two blocks of a stage, such as before '2.4', a map has the size that the stage gives.
    stage, _, block = str(start).partition(".")
    if start in (defaults["start"], order[0]) or stage not in order:
        return of_all_stages, variables_of(net, image)
    before = order[order.index(stage) - (block in ("", "0"))]
    tokens = {"prefix": struct(outputs["prefix"].shape)} if "prefix" in outputs else {}
    return of_all_stages, variables_of(net, struct(outputs[before].shape), **tokens)


def _recognized(shape: ShapeFn) -> tuple[str, list[str]]:
    """Returns the family of a net by the shapes of its tensors, or '', and its published nets with
    the sizes and parts that they tell.
    """
    nets = {name: getattr(family, name)() for family in FAMILIES for name in family.__all__}
    kinds: list[Any] = list(dict.fromkeys(map(type, nets.values())))
    for kind in kinds:
        if (facts := kind.facts(shape)) is not None:
            return kind.family, [
                name
                for name, net in nets.items()
                if type(net) is kind and all(getattr(net, k) == v for k, v in facts.items())
            ]
    return "", []


def _listed(names: Sequence[str]) -> str:
    return f"{'an' if names[0][0] in 'aeio' else 'a'} {' or '.join(names)}"


def _stripped(shape: Iterable[int]) -> list[int]:
    return list(itertools.dropwhile(lambda size: size == 1, shape))


def _some(items: Iterable[str]) -> str:
    items, limit = list(items), 12
    more = f" and {len(items) - limit} more" if len(items) > limit else ""
    return ", ".join(items[:limit]) + more


def _text(shape: Iterable[int]) -> str:
    return f"[{' '.join(map(str, shape))}]"


def torch_tensors(weights: readers.Weights) -> dict[str, np.ndarray]:
    """Returns the tensors of a published file under PyTorch's names:
    'layer1.0.bn1.running_mean'.
    """
    tensors = {}
    for name, array in weights.tensors.items():
        if weights.layout == "onnx":
            name = re.sub("_([wb])_0$", lambda m: f".{'weight' if m[1] == 'w' else 'bias'}", name)
        tensors[name.replace("/", ".")] = array
    if tensors and all(name.startswith("module.") for name in tensors):  # from DataParallel
        tensors = {name.removeprefix("module."): array for name, array in tensors.items()}
    return {n: a for n, a in tensors.items() if not n.endswith(".num_batches_tracked")}


def classifier_size(tensors: Mapping[str, np.ndarray]) -> int | None:
    """Returns the number of classes of the main classifier, or None without a classifier."""
    for name in _MAIN_CLASSIFIERS:
        weight = tensors.get(f"{name}.weight")
        if weight is not None:
            return int(weight.shape[-2]) if weight.ndim >= 2 else None
    return None
