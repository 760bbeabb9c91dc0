"""Low-rank adapters in the files of the package peft, for nets whose weights others published.

A folder holds `adapter_model.safetensors` and `adapter_config.json`. The tensors are named as in
`base_model.model.encoder.layer.0.attention.attention.query.lora_A.weight`: the module of the base
by the names of its own file, which the name maps of `weights.families` know. Adapters of DoRA have
a third tensor for each module, `lora_magnitude_vector`: `[o]`, or `[1 o 1 1]` for a convolution.
"""

import functools
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from absl import logging
from flax import traverse_util

from dmljax.files import reading
from dmljax.files.writing import atomic_writer, make_folder, write_json
from dmljax.weights.converted import file_digest
from dmljax.weights.layouts import TORCH, torch_tensors
from dmljax.weights.loading import image_shape_of, load, name_map_of
from dmljax.weights.name_maps import NameMap
from dmljax.weights.published import NAME_MAPS, PUBLISHED, identify
from dmljax.weights.readers import read, safetensors_files

_MODEL, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_MAGNITUDE = "magnitude_vector"
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_"
    rf"(?:(?P<factor>[AB])(?:\.default)?\.weight|(?P<dora>{_MAGNITUDE})(?:\.default)?(?:\.weight)?)"
)
_OWN_NAMES = NameMap("the names of the net", ())
# Modules of transformers 5, whose files keep the names of before.
_NEW_NAMES = (
    (r"attention\.attention\.query$", "attention.q_proj"),
    (r"attention\.attention\.key$", "attention.k_proj"),
    (r"attention\.attention\.value$", "attention.v_proj"),
    (r"attention\.output\.dense$", "attention.o_proj"),
    (r"intermediate\.dense$", "mlp.fc1"),
    (r"(\.\d+)\.output\.dense$", r"\1.mlp.fc2"),
)


class _Factors(NamedTuple):
    """What an adapter does to a part of a kernel: a `[i r]`, b `[r o]`, and norms `[o]` of DoRA."""

    a: np.ndarray
    b: np.ndarray
    magnitude: np.ndarray | None


class _Place(NamedTuple):
    """Where the matrix of a module of the base lies in ours: part `part` of `parts` of `path`.

    `rows` are the rows of the module that belong to this kernel, as a share of all.
    """

    path: tuple[str, ...]
    part: int
    parts: int
    rows: tuple[float, float]


def load_adapter(
    folder: str | os.PathLike,
    net: nn.Module,
    *,
    base: str | os.PathLike | None = None,
    report_fn: Callable[[str], None] = logging.info,
) -> Any:
    """Reads the adapters in a folder of peft for `adapt.merged(params, adapters, scale=1.0)`.

    `params` are the parameters of `net`. `base` is the file of its weights: an adapter that names
    the digest of another file is refused. `report_fn` is called with what is left out. If only
    some parts of a fused kernel have an adapter of DoRA, the norms of the others are read from
    `base`.
    """
    folder = pathlib.Path(folder)
    options, (tensors, digest) = _options(folder), _tensors(folder)
    if base is not None and digest is not None and (actual := file_digest(base)) != digest:
        raise ValueError(
            f"{folder} is an adapter of another file of weights than {base} (digest {digest[:12]}, "
            f"not {actual[:12]}): give the file that it was trained on"
        )
    matches = {name: _TENSOR.fullmatch(name) for name in tensors}
    if wrong := [name for name in tensors if "lora_" in name and not matches[name]]:
        raise ValueError(f"{folder}: {wrong[0]} is no plain LoRA of a linear layer")
    others = [name for name, match in matches.items() if not match]
    modules = sorted({match["module"] for match in matches.values() if match})
    if others:
        report_fn(f"{folder}: left out, as they are no adapters: {', '.join(others[:5])}")
    shapes = _kernel_shapes(net)
    places = _places(folder, modules, shapes)
    by_kernel: dict[tuple[str, ...], dict[int, _Factors]] = {}
    parts: dict[tuple[str, ...], int] = {}
    by_module = {
        (match["module"], match["factor"] or match["dora"]): tensors[name]
        for name, match in matches.items()
        if match
    }
    is_dora = bool(options.get("use_dora"))
    needed = ("A", "B", *([_MAGNITUDE] if is_dora else []))
    for module in modules:
        if missing := [f"lora_{name}" for name in needed if (module, name) not in by_module]:
            raise ValueError(f"{folder} is incomplete: {module} lacks {' and '.join(missing)}")
        if not is_dora and (module, _MAGNITUDE) in by_module:
            raise ValueError(
                f"{folder}: {module} has a lora_{_MAGNITUDE}, but its {_CONFIG} does not say "
                '"use_dora": true'
            )
        a, b = (_matrix(by_module[module, letter]) for letter in "AB")
        if a.shape[0] != b.shape[1]:
            raise ValueError(f"{folder}: the ranks of lora_A and lora_B of {module} differ")
        scale = _scale(options, module, rank=a.shape[0])
        magnitude = by_module[module, _MAGNITUDE].reshape(-1) if is_dora else None
        if magnitude is not None and len(magnitude) != len(b):
            raise ValueError(
                f"{folder}: lora_{_MAGNITUDE} of {module} has {len(magnitude)} numbers, and its "
                f"lora_B {len(b)} rows"
            )
        for place in places[module]:
            rows = slice(*(round(share * len(b)) for share in place.rows))
            parts[place.path] = place.parts
            by_kernel.setdefault(place.path, {})[place.part] = _Factors(
                a.T.astype(np.float32),
                scale * b[rows].T.astype(np.float32),
                None if magnitude is None else magnitude[rows].astype(np.float32),
            )
    norms_fn = functools.cache(lambda: _kernel_norms(folder, net, base))
    adapters = {}
    for path, factors in by_kernel.items():
        a, b = _stacked(factors, parts[path])
        size = a.shape[-2], b.shape[-1] * parts[path]
        if size != shapes[path][-2:]:
            raise ValueError(
                f"{folder} does not fit the net: an adapter of {'/'.join(path[:-1])} is for a "
                f"kernel {list(size)}, and the net has {list(shapes[path][-2:])}"
            )
        adapters[*path[:-1], "a"], adapters[*path[:-1], "b"] = a, b
        if is_dora:
            of_parts: list[Any] = [
                factors[i].magnitude
                if i in factors
                else norms_fn()[path].reshape(parts[path], -1)[i]
                for i in range(parts[path])
            ]
            adapters[*path[:-1], "magnitude"] = np.concatenate(of_parts)
    return traverse_util.unflatten_dict(adapters)


def write_adapter(
    folder: str | os.PathLike,
    adapters: Any,
    net: nn.Module,
    *,
    rank: int,
    alpha: float,
    rslora: bool = False,
    base: str | os.PathLike,
) -> None:
    """Writes adapters of `adapt.lora` for the parameters of `net` as a folder that peft reads.

    With magnitudes (`adapt.with_magnitudes`), they are written as DoRA.

    `base` is the file of weights that they belong to: its names are used, and its digest is written
    into the file. Queries, keys and values that the base keeps apart share the matrix A. Where
    transformers 5 has other names of modules than the file, the adapter has both.
    """
    folder = pathlib.Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not an empty folder: choose another --out")
    weights = read(base)
    own_names = "dmljax" in weights.metadata
    name_map = _OWN_NAMES if own_names else name_map_of(torch_tensors(weights))
    kernels = _kernel_shapes(net)
    flat = traverse_util.flatten_dict(adapters)
    modules: list[str] = []
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(path for path in flat if path[-1] == "a"):
        a, b = (np.asarray(flat[*path[:-1], leaf], np.float32) for leaf in "ab")
        kernel = (*path[:-1], "kernel")
        source = name_map.source(TORCH.name_fn(("params", *kernel)), gated=_is_gated(kernels))
        if source.rows or source.transposed:
            raise ValueError(
                f"peft has no adapter of one part of {source.names[0]}, where {base} keeps "
                f"{'/'.join(path[:-1])}: train with other targets, such as attn/qkv"
            )
        more = (1, 1) if len(kernels[kernel]) == 4 else ()
        parts = len(source.names)
        norms: Any = [None] * parts
        if (magnitude := flat.get((*path[:-1], "magnitude"))) is not None:
            norms = np.split(np.asarray(magnitude, np.float32), parts)
        for name, columns, norm in zip(source.names, np.split(b, parts, 1), norms, strict=True):
            module = name.removesuffix(".weight")
            modules.append(module)
            arrays = {
                f"lora_{letter}.weight": np.ascontiguousarray(matrix).reshape(*matrix.shape, *more)
                for letter, matrix in (("A", a.T), ("B", columns.T))
            }
            if norm is not None:
                arrays[f"lora_{_MAGNITUDE}"] = norm.reshape(1, -1, 1, 1) if more else norm
            for other in {module, _new_name(module, name_map)}:
                tensors |= {f"base_model.model.{other}.{k}": x for k, x in arrays.items()}
    names = list(map(_module, kernels)) if own_names else [_stem(n) for n in weights.tensors]
    new_names = [[_new_name(name, name_map) for name in some] for some in (modules, names)]
    options: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": None,
        "base_model_name_or_path": _base_name(base),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "use_rslora": rslora,
        "use_dora": any(path[-1] == "magnitude" for path in flat),
        "bias": "none",
        "fan_in_fan_out": False,
        "target_modules": sorted({*_targets(modules, names), *_targets(*new_names)}),
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
    }
    make_folder(folder)
    # One key only, so that the bytes are the same every time. peft does not read it.
    metadata = {"dmljax": json.dumps({"base": file_digest(base)})}
    with atomic_writer(folder / _MODEL, "wb") as file:
        file.write(safetensors.numpy.save(tensors, metadata))
    write_json(folder / _CONFIG, options, indent=2)


def _options(folder: pathlib.Path) -> dict[str, Any]:
    if not (folder / _CONFIG).is_file():
        raise FileNotFoundError(f"{folder} holds no adapter of peft: there is no {_CONFIG}")
    try:
        options = reading.json_value((folder / _CONFIG).read_bytes().decode())
        reading.check_types(options, dict.fromkeys(("peft_type", "r", "lora_alpha"), object))
        alphas = options.get("alpha_pattern") or {}
        reading.check_types({"alpha_pattern": alphas}, {"alpha_pattern": dict})
        reading.check_types(alphas, dict.fromkeys(alphas, float | int))
    except ValueError as error:
        # The message of a UnicodeDecodeError holds the whole file.
        problem = "it is no UTF-8" if isinstance(error, UnicodeDecodeError) else error
        raise ValueError(f"{folder / _CONFIG} is damaged or no LoRA: {problem}") from error
    for pattern in alphas:
        # A group, or many repetitions, can take the regular expression for ever.
        if not re.fullmatch(r"[\w.^$|\\*+-]*", pattern) or len(re.findall("[*+]", pattern)) > 3:
            raise ValueError(
                f"{folder}: alpha_pattern {pattern[:60]!r} is no name of a module with at most "
                "three repetitions (* and +): write the names out"
            )
    kind, plain = options["peft_type"], {k: options[k] for k in ("r", "lora_alpha")}
    for name, value, fits in (
        ("peft_type", kind, kind == "LORA"),
        ("bias", options.get("bias"), options.get("bias") in (None, "none")),
        *((k, v, isinstance(v, int | float) and v > 0) for k, v in plain.items()),
    ):
        if not fits:
            raise ValueError(f"{folder}: {name}={value!r} is not plain LoRA, which dmljax reads")
    return options


def _tensors(folder: pathlib.Path) -> tuple[dict[str, np.ndarray], str | None]:
    """Reads the tensors of an adapter, and the hash of its base if it is written there."""
    file = folder / _MODEL
    if not file.is_file():
        file = folder / "adapter_model.bin"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} holds no adapter of peft: there is no {_MODEL}")
    digest = None
    if file.name == _MODEL and (text := safetensors_files.read_metadata(file).get("dmljax")):
        try:
            digest = reading.json_value(text).get("base")
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is damaged (its metadata): {error}") from error
    return dict(read(file).tensors), digest


def _matrix(tensor: np.ndarray) -> np.ndarray:
    """Reshapes a factor of a linear layer, or of a 1 x 1 convolution, to a matrix."""
    return tensor.reshape(tensor.shape[:2]) if tensor.shape[2:] in ((), (1, 1)) else tensor


def _scale(options: Mapping[str, Any], module: str, *, rank: int) -> float:
    patterns = (options.get("alpha_pattern") or {}).items()
    try:
        matches = [alpha for key, alpha in patterns if re.match(rf"(.*\.)?({key})$", module)]
    except re.error as error:
        raise ValueError(f"alpha_pattern of {_CONFIG} is no regular expression: {error}") from error
    alpha = next(iter(matches), options["lora_alpha"])
    return alpha / (rank**0.5 if options.get("use_rslora") else rank)


def _kernel_shapes(net: nn.Module) -> dict[tuple[str, ...], tuple[int, ...]]:
    """Returns the shapes of the kernels that can have adapters, by their paths."""
    image = jax.ShapeDtypeStruct((1, *image_shape_of(net)), jnp.float32)
    shapes = jax.eval_shape(lambda key, x: net.init(key, x, train=False), jax.random.key(0), image)
    return {
        path: x.shape
        for path, x in traverse_util.flatten_dict(shapes["params"]).items()
        if path[-1] == "kernel" and (x.ndim == 2 or x.shape[:2] == (1, 1))
    }


def _is_gated(kernels: Mapping[tuple[str, ...], Any]) -> bool:
    return any("gate" in path for path in kernels)


def _module(path: Sequence[str]) -> str:
    return _stem(TORCH.name_fn(("params", *path)))


def _stem(name: str) -> str:
    return name.removesuffix(".weight")


def _new_name(module: str, name_map: NameMap) -> str:
    """Returns the name of a module of the base in transformers 5."""
    for pattern, name in _NEW_NAMES:
        module = re.sub(pattern, name, module)
    if name_map.title == "ViT, transformers":
        return re.sub(r"^encoder\.layer\.", "layers.", module)
    return re.sub(r"^layer\.", "model.layer.", module)  # DINOv3


def _places(
    folder: pathlib.Path, modules: Sequence[str], kernels: Mapping[tuple[str, ...], Any]
) -> dict[str, list[_Place]]:
    """Finds where each module of an adapter lies in the net, by the naming that knows all of
    them.
    """
    unknown = list(modules)
    for name_map in (*NAME_MAPS, _OWN_NAMES):
        table: dict[str, list[_Place]] = {}
        for path in kernels:
            source = name_map.source(TORCH.name_fn(("params", *path)), gated=_is_gated(kernels))
            start, stop, count = source.rows or (0, 1, 1)
            share = start / count, stop / count
            for i, name in enumerate(source.names):
                place = _Place(path, i, len(source.names), share)
                module = _stem(name)
                for other in {module, _new_name(module, name_map)}:
                    table.setdefault(other, []).append(place)
        # A model for classification keeps its base under a name of its own: 'vit.encoder...'.
        known = {module: _found(module, table) for module in modules}
        missing = [module for module in modules if not known[module]]
        if not missing:
            return known
        unknown = min(unknown, missing, key=len)
    raise ValueError(
        f"{folder} is an adapter of another net: of its {len(modules)} modules, the net has no "
        f"{', '.join(unknown[:3])}"
    )


def _found(module: str, table: Mapping[str, list[_Place]]) -> list[_Place]:
    """Returns the entry of a module, also if its name or that in the table has more levels in
    front.
    """
    for _ in range(3):
        if module in table:
            return table[module]
        if ends := [name for name in table if name.endswith(f".{module}")]:
            return table[ends[0]]
        _, _, module = module.partition(".")
    return []


def _kernel_norms(
    folder: pathlib.Path, net: nn.Module, base: str | os.PathLike | None
) -> dict[tuple[str, ...], np.ndarray]:
    """Computes the norms of the columns of all kernels in the weights `base`, by their paths."""
    if base is None:
        raise ValueError(
            f"{folder} has adapters of DoRA for parts of a fused kernel: give the weights that it "
            "was trained on as base"
        )
    params = traverse_util.flatten_dict(load(base, net, report_fn=lambda *_: None)["params"])
    return {
        path: np.linalg.norm(np.asarray(x).reshape(-1, x.shape[-1]), axis=0)
        for path, x in params.items()
        if path[-1] == "kernel"
    }


def _stacked(factors: Mapping[int, _Factors], parts: int) -> tuple[np.ndarray, np.ndarray]:
    """Stacks a and b of the parts of a kernel; parts without an adapter are zeros."""
    if parts == 1:
        return factors[0].a, factors[0].b
    rank = max(part.a.shape[1] for part in factors.values())
    first = next(iter(factors.values()))
    a = np.zeros((parts, len(first.a), rank), np.float32)
    b = np.zeros((parts, rank, first.b.shape[1]), np.float32)
    for i, (part_a, part_b, _) in factors.items():
        a[i, :, : part_a.shape[1]], b[i, : len(part_b)] = part_a, part_b
    return a, b


def _base_name(base: str | os.PathLike) -> str:
    """Returns the repository of a published file, for example 'facebook/dinov2-small', or the
    file's name.
    """
    name = identify(base)
    for url in PUBLISHED[name].urls if name else ():
        if match := re.match(r"https://huggingface\.co/([^/]+/[^/]+)/resolve/", url):
            return match[1]
    return pathlib.Path(base).name


def _targets(modules: Sequence[str], names: Sequence[str]) -> set[str]:
    """Returns the last levels of the names of modules where these identify them, else whole
    names.
    """
    targets = set()
    for module in modules:
        leaf = module.rpartition(".")[2]
        same = {name for name in names if name.rpartition(".")[2] == leaf}
        targets.add(leaf if same <= set(modules) else module)
    return targets
