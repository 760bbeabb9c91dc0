"""Low-rank adapters in the files of the package peft, for nets whose weights others published.

A folder holds `adapter_model.safetensors` and `adapter_config.json`. The tensors are named as in
`base_model.model.encoder.layer.0.attention.attention.query.lora_A.weight`: the module of the base
by the names of its own file, which the name maps of `nets.files` know. Adapters of DoRA have
a third tensor for each module, `lora_magnitude_vector`: `[o]`, or `[1 o 1 1]` for a convolution.
"""

import collections
import json
import os
import pathlib
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import flax.linen as nn
import numpy as np
from absl import logging
from flax import traverse_util

from dmljax.files import reading
from dmljax.files.writing import make_folder, write_json
from dmljax.nets.files import OWN_NAMES, NameMap, Source
from dmljax.weights import converted
from dmljax.weights.loading import TORCH, name_map_of, torch_tensors, variable_shapes
from dmljax.weights.published import NAME_MAPS, PUBLISHED, identify
from dmljax.weights.readers import read

Path = tuple[str, ...]
Place = tuple[Path, int]  # a kernel, and which of the parts of its `Source`

_MODEL, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_MAGNITUDE = "magnitude_vector"
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_"
    rf"(?:(?P<factor>[AB])(?:\.default)?\.weight|{_MAGNITUDE}(?:\.default)?(?:\.weight)?)"
)


def load_adapter(
    folder: str | os.PathLike,
    net: nn.Module,
    *,
    base: str | os.PathLike | None = None,
    params: Any = None,
    report_fn: Callable[[str], None] = logging.info,
) -> Any:
    """Reads the adapters in a folder of peft for `adapt.merged(params, adapters, scale=1.0)`.

    `base` is the file of the net's weights: an adapter that names the digest of another file is
    refused. `params` are the parameters of the net. They are needed where only some parts of a
    fused kernel have an adapter of DoRA: the other parts keep their norms. `report_fn` is called
    with what is left out.
    """
    folder = pathlib.Path(folder)
    options, file = _options(folder / _CONFIG), read(folder / _MODEL)
    is_dora = bool(options.get("use_dora"))
    if base is not None and file.metadata.get("dmljax") not in (None, _base_text(base)):
        raise ValueError(f"{folder} is an adapter of another file of weights than {base}")
    tensors: dict[str, dict[str, np.ndarray]] = {}
    for name, tensor in file.tensors.items():
        if match := _TENSOR.fullmatch(name):
            tensors.setdefault(match["module"], {})[match["factor"] or _MAGNITUDE] = tensor
        elif "lora_" in name:
            raise ValueError(f"{folder}: {name} is not plain LoRA of a linear layer")
        else:
            report_fn(f"{folder}: {name} is left out, as it is not of an adapter")
    kernels, flat = _kernel_shapes(net), traverse_util.flatten_dict(params or {})
    sources, modules = _modules(folder, sorted(tensors), kernels)
    adapters: dict[Path, np.ndarray] = {}
    for path in dict.fromkeys(path for path, _ in modules):
        (*_, inputs, outputs), (*place, _) = kernels[path], path
        count, (start, stop, rows) = len(sources[path].names), sources[path].rows or (0, 1, 1)
        names = {i: modules[path, i] for i in range(count) if (path, i) in modules}
        parts = {i: _factors(folder, x, tensors[x], options) for i, x in names.items()}
        a_parts, b_parts, magnitude = [], [], np.zeros(outputs, np.float32)
        if is_dora and len(parts) < count:
            if params is None:
                raise ValueError(f"{folder} has DoRA for parts of a fused kernel: it needs params")
            magnitude = np.linalg.norm(flat[path].reshape(-1, outputs), axis=0)
        for i, (a, b, norms) in parts.items():
            taken = slice(start * b.shape[1] // rows, stop * b.shape[1] // rows)
            size = [len(a), b[:, taken].shape[1] * count]
            if size != [inputs, outputs]:
                raise ValueError(
                    f"{folder} does not fit the net: an adapter of {'/'.join(place)} is for a "
                    f"kernel {size}, and the net has {[inputs, outputs]}"
                )
            columns = slice(i * outputs // count, (i + 1) * outputs // count)
            a_parts.append(a)
            b_parts.append(np.zeros((len(b), outputs), np.float32))
            b_parts[-1][:, columns] = b[:, taken]
            if is_dora:
                magnitude[columns] = norms[taken]
        adapters[*place, "a"], adapters[*place, "b"] = np.hstack(a_parts), np.vstack(b_parts)
        if is_dora:
            adapters[*place, "magnitude"] = magnitude
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

    With magnitudes (`adapt.with_magnitudes`), they are written as DoRA. `base` is the file of
    weights that they belong to: its names are used, and its digest is written into the file.
    Queries, keys and values that the base keeps apart share the matrix A. Where transformers 5 has
    other names of modules than the file, the adapter has both.
    """
    folder = pathlib.Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: choose another --out")
    weights = read(base)
    name_map = OWN_NAMES if "dmljax" in weights.metadata else name_map_of(torch_tensors(weights))
    kernels, flat = _kernel_shapes(net), traverse_util.flatten_dict(adapters)
    sources = _sources(name_map, kernels)
    kinds = {"a": "A.weight", "b": "B.weight", "magnitude": _MAGNITUDE}
    tensors: dict[str, np.ndarray] = {}
    modules: set[str] = set()
    for (*path, leaf), value in flat.items():
        source = sources[*path, "kernel"]
        if source.rows or source.transposed:
            raise ValueError(
                f"peft has no adapter of one part of {source.names[0]}, where {base} keeps "
                f"{'/'.join(path)}: train with other targets, such as attn/qkv"
            )
        count, array = len(source.names), np.asarray(value, np.float32)
        parts = [array.T] * count if leaf == "a" else np.split(array.T, count)
        if len(kernels[*path, "kernel"]) == 4:  # of a 1 x 1 convolution
            parts = [(x if x.ndim == 2 else x[None])[..., None, None] for x in parts]
        for i, module in _names(name_map, source):
            modules.add(module)
            tensors[f"base_model.model.{module}.lora_{kinds[leaf]}"] = parts[i]
    urls = " ".join(PUBLISHED[known].urls) if (known := identify(base)) else ""
    match = re.search(r"https://huggingface\.co/([^/]+/[^/]+)/resolve/", urls)
    name = match[1] if match else pathlib.Path(base).name
    options = {"peft_type": "LORA", "base_model_name_or_path": name, "inference_mode": True}
    options |= {"r": rank, "lora_alpha": alpha, "use_rslora": rslora}
    is_dora = any(path[-1] == "magnitude" for path in flat)
    options |= {"use_dora": is_dora, "target_modules": sorted(modules)}
    make_folder(folder)
    converted.write(folder / _MODEL, tensors, _base_text(base))
    write_json(folder / _CONFIG, options, indent=2)


def _options(file: pathlib.Path) -> dict[str, Any]:
    """Reads the options of an adapter, and checks that it is plain LoRA or DoRA."""
    options = {"alpha_pattern": {}, "bias": "none"} | reading.json_object_or_empty(file)
    alphas = options["alpha_pattern"]
    is_plain = {
        "peft_type": options.get("peft_type") == "LORA",
        "bias": options["bias"] == "none",
        "r": _is_positive(options.get("r")),
        "lora_alpha": _is_positive(options.get("lora_alpha")),
        # A regular expression of a stranger could run for ever.
        "alpha_pattern": isinstance(alphas, dict)
        and all(re.fullmatch(r"[\w.]+", k) and _is_positive(v) for k, v in alphas.items()),
    }
    if wrong := [name for name, is_right in is_plain.items() if not is_right]:
        value = f"{wrong[0]}={options.get(wrong[0])!r:.60}"
        raise ValueError(f"{file} is missing, damaged or not of plain LoRA: {value}")
    return options


def _is_positive(value: Any) -> bool:
    return isinstance(value, float | int) and value > 0


def _base_text(base: str | os.PathLike) -> str:
    """Returns the metadata of an adapter for the weights `base`, which peft does not read."""
    return json.dumps({"base": converted.file_digest(base)})


def _factors(
    folder: pathlib.Path, module: str, tensors: Mapping[str, np.ndarray], options: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns a `[i r]`, the scaled b `[r o]` and the norms `[o]` of DoRA for one module."""
    is_dora = bool(options.get("use_dora"))
    needed = ("A", "B", _MAGNITUDE) if is_dora else ("A", "B")
    a, b, *norms = (tensors.get(name, np.zeros(0)) for name in needed)
    is_matrix = [x.ndim == 2 or x.shape[2:] == (1, 1) for x in (a, b)]  # (1, 1): of a convolution
    fits = all(is_matrix) and len(a) == b.shape[1] and all(x.size == len(b) for x in norms)
    if set(tensors) != set(needed) or not fits:
        has = ", ".join(f"lora_{name} {list(x.shape)}" for name, x in sorted(tensors.items()))
        raise ValueError(
            f"{folder} does not agree with its {_CONFIG}: {module} has {has}, and needs "
            f"{', '.join(f'lora_{name}' for name in needed)} of one rank"
        )
    ends = (alpha for name, alpha in options["alpha_pattern"].items() if _is_end(name, module))
    alpha, rank = next(ends, options["lora_alpha"]), len(a)
    scale = alpha / (rank**0.5 if options.get("use_rslora") else rank)
    a, b = (x.reshape(len(x), -1).T.astype(np.float32) for x in (a, b))
    return a, scale * b, np.ravel(norms).astype(np.float32)


def _kernel_shapes(net: nn.Module) -> dict[Path, tuple[int, ...]]:
    """Returns the shapes of the kernels that can have adapters, by their paths."""
    return {
        path[1:]: x.shape
        for path, x in variable_shapes(net)[1].items()
        if path[-1] == "kernel" and (x.ndim == 2 or x.shape[:2] == (1, 1))
    }


def _sources(name_map: NameMap, kernels: Collection[Path]) -> dict[Path, Source]:
    """Returns where a file has the kernels of a net."""
    gated = any("gate" in path for path in kernels)
    names = {path: TORCH.name_fn(("params", *path)) for path in kernels}
    return {path: name_map.source(name, gated=gated) for path, name in names.items()}


def _names(name_map: NameMap, source: Source) -> list[tuple[int, str]]:
    """Lists the modules of each part of a source, by the file's name and that of transformers 5."""
    modules = [name.removesuffix(".weight") for name in source.names]
    return [(i, name) for i, x in enumerate(modules) for name in {x, name_map.new_name(x)}]


def _modules(
    folder: pathlib.Path, modules: list[str], kernels: Collection[Path]
) -> tuple[dict[Path, Source], dict[Place, str]]:
    """Returns the sources of the kernels by the naming that knows all modules, and the module of
    each part of them that has one.
    """
    for name_map in (*NAME_MAPS, OWN_NAMES):
        sources, table = _sources(name_map, kernels), collections.defaultdict[str, list](list)
        for path, source in sources.items():
            for i, name in _names(name_map, source):
                table[name].append((path, i))
        places = {module: _find(module, table) for module in modules}
        if all(places.values()):
            return sources, {place: module for module in modules for place in places[module]}
    raise ValueError(
        f"{folder} is an adapter of another net: no naming of this net has all of its "
        f"{len(modules)} modules, such as {modules[0]}"
    )


def _find(module: str, table: Mapping[str, list[Place]]) -> list[Place]:
    """Looks a module up; its name or that in the table may have more levels in front."""
    for _ in range(3):  # a model for classification has levels in front: 'vit.encoder...'
        if ends := [name for name in table if module and _is_end(module, name)]:
            return table[min(ends, key=len)]
        module = module.partition(".")[2]
    return []


def _is_end(end: str, name: str) -> bool:
    """Returns whether the levels of `end` are the last ones of `name`."""
    return f".{name}".endswith(f".{end}")
