"""Low-rank adapters in the files of the package peft, for nets whose weights others published.

A folder holds `adapter_model.safetensors` and `adapter_config.json`. The tensors are named as in
`base_model.model.encoder.layer.0.attention.attention.query.lora_A.weight`: the module of the base
by the names of its own file, which the name maps of `weights.families` know. Adapters of DoRA have
a third tensor for each module, `lora_magnitude_vector`: `[o]`, or `[1 o 1 1]` for a convolution.
"""

import collections
import functools
import json
import os
import pathlib
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import numpy as np
from absl import logging
from flax import traverse_util

from dmljax.files import reading
from dmljax.files.writing import make_folder, write_json
from dmljax.weights.converted import file_digest
from dmljax.weights.converted import write as write_tensors
from dmljax.weights.loading import load, name_map_of, variable_shapes
from dmljax.weights.names import OWN_NAMES, TORCH, NameMap, Source, torch_tensors
from dmljax.weights.published import NAME_MAPS, PUBLISHED, identify
from dmljax.weights.readers import read

Path = tuple[str, ...]

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
    report_fn: Callable[[str], None] = logging.info,
) -> Any:
    """Reads the adapters in a folder of peft for `adapt.merged(params, adapters, scale=1.0)`.

    `params` are the parameters of `net`. `base` is the file of its weights: an adapter that names
    the digest of another file is refused. `report_fn` is called with what is left out. If only
    some parts of a fused kernel have an adapter of DoRA, the norms of the others are read from
    `base`.
    """
    folder = pathlib.Path(folder)
    if not (folder / _CONFIG).is_file():
        raise FileNotFoundError(f"{folder} holds no adapter of peft: there is no {_CONFIG}")
    options, file = _options(folder / _CONFIG), read(folder / _MODEL)
    if base is not None and file.metadata.get("dmljax") not in (None, _base_text(base)):
        raise ValueError(
            f"{folder} is an adapter of another file of weights than {base}: give the file that it "
            "was trained on"
        )
    tensors: dict[str, dict[str, np.ndarray]] = {}
    others = []
    for name, tensor in file.tensors.items():
        if match := _TENSOR.fullmatch(name):
            tensors.setdefault(match["module"], {})[match["factor"] or _MAGNITUDE] = tensor
        elif "lora_" in name:
            raise ValueError(f"{folder}: {name} is not plain LoRA of a linear layer")
        else:
            others.append(name)
    if others:
        report_fn(f"{folder}: left out, as they are not adapters: {', '.join(others[:5])}")
    shapes = _kernel_shapes(net)
    # An adapter may have a module under its old name and its new one.
    modules = {
        part: module
        for module, parts in _parts(folder, sorted(tensors), shapes).items()
        for part in parts
    }
    counts = collections.Counter(part.path for part in modules)
    norms_fn = functools.cache(lambda: _kernel_norms(folder, net, base))
    adapters: dict[Path, np.ndarray] = {}
    for (path, index, count, fractions), module in modules.items():
        a, b, norms = _factors(folder, module, tensors[module], options)
        (*_, inputs, outputs), place = shapes[path], path[:-1]
        rows = slice(*(round(fraction * b.shape[1]) for fraction in fractions))
        size = [len(a), b[:, rows].shape[1] * count]
        if size != [inputs, outputs]:
            raise ValueError(
                f"{folder} does not fit the net: an adapter of {'/'.join(place)} is for a "
                f"kernel {size}, and the net has {[inputs, outputs]}"
            )
        columns = slice(index * outputs // count, (index + 1) * outputs // count)
        padded = np.zeros((len(b), outputs), np.float32)
        padded[:, columns] = b[:, rows]
        for leaf, value, axis in (("a", a, 1), ("b", padded, 0)):
            values = [adapters[*place, leaf]] if (*place, leaf) in adapters else []
            adapters[*place, leaf] = np.concatenate([*values, value], axis)
        if norms is not None:
            if (*place, "magnitude") not in adapters:
                is_whole = counts[path] == count
                start = np.zeros(outputs, np.float32) if is_whole else norms_fn()[path]
                adapters[*place, "magnitude"] = start
            adapters[*place, "magnitude"][columns] = norms[rows]
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
    is_converted = "dmljax" in weights.metadata
    name_map = OWN_NAMES if is_converted else name_map_of(torch_tensors(weights))
    kernels, flat = _kernel_shapes(net), traverse_util.flatten_dict(adapters)
    kinds = {"a": "A.weight", "b": "B.weight", "magnitude": _MAGNITUDE}
    tensors: dict[str, np.ndarray] = {}
    modules: set[str] = set()
    for (*path, leaf), value in flat.items():
        source = _source(name_map, (*path, "kernel"), kernels)
        if source.rows or source.transposed:
            raise ValueError(
                f"peft has no adapter of one part of {source.names[0]}, where {base} keeps "
                f"{'/'.join(path)}: train with other targets, such as attn/qkv"
            )
        count, array = len(source.names), np.asarray(value, np.float32)
        parts = [array] * count if leaf == "a" else np.split(array, count, -1)
        if len(kernels[*path, "kernel"]) == 4:  # of a 1 x 1 convolution
            parts = [x[None, None].T if x.ndim == 2 else x.reshape(1, -1, 1, 1) for x in parts]
        for name, x in zip(source.names, parts, strict=True):
            module = name.removesuffix(".weight")
            for other in {module, name_map.new_name(module)}:
                modules.add(other)
                key = f"base_model.model.{other}.lora_{kinds[leaf]}"
                tensors[key] = np.ascontiguousarray(x if x.ndim == 4 else x.T)
    known = identify(base)
    urls = " ".join(PUBLISHED[known].urls) if known else ""
    match = re.search(r"https://huggingface\.co/([^/]+/[^/]+)/resolve/", urls)
    options: dict[str, Any] = {
        "peft_type": "LORA",
        "base_model_name_or_path": match[1] if match else pathlib.Path(base).name,
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": rslora,
        "use_dora": any(path[-1] == "magnitude" for path in flat),
        "target_modules": sorted(modules),
        "inference_mode": True,
    }
    make_folder(folder)
    write_tensors(folder / _MODEL, tensors, _base_text(base))
    write_json(folder / _CONFIG, options, indent=2)


def _options(file: pathlib.Path) -> dict[str, Any]:
    """Reads the options of an adapter and checks them."""
    try:
        options = {"alpha_pattern": {}, "bias": "none"} | reading.json_file(file)
        number: Any = float | int
        types: dict[str, Any] = {
            "peft_type": str,
            "alpha_pattern": dict,
            "r": number,
            "lora_alpha": number,
        }
        reading.check_types(options, types)
        alphas = options["alpha_pattern"]
        reading.check_types(alphas, dict.fromkeys(alphas, number))
        wrong = [k for k, v in {"peft_type": "LORA", "bias": "none"}.items() if options[k] != v]
        wrong += [name for name in ("r", "lora_alpha") if not options[name] > 0]
        # A regular expression of a stranger could run for ever.
        wrong += ["alpha_pattern" for name in alphas if not re.fullmatch(r"[\w.]+", name)]
        if wrong:
            value = f"{wrong[0]}={options[wrong[0]]!r:.60}"
            raise ValueError(f"{value} is not plain LoRA, which dmljax reads")
    except (ValueError, TypeError) as error:
        raise ValueError(f"{file} is damaged or not supported: {error}") from error
    return options


def _base_text(base: str | os.PathLike) -> str:
    """Returns the metadata of an adapter for the weights `base`, which peft does not read."""
    return json.dumps({"base": file_digest(base)})


def _factors(
    folder: pathlib.Path, module: str, tensors: Mapping[str, np.ndarray], options: Mapping[str, Any]
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Returns a `[i r]`, the scaled b `[r o]` and the norms `[o]` of DoRA for one module."""
    is_dora = bool(options.get("use_dora"))
    needed = ("A", "B", _MAGNITUDE) if is_dora else ("A", "B")
    if set(tensors) != set(needed):
        has, needs = (" and ".join(f"lora_{x}" for x in sorted(some)) for some in (tensors, needed))
        raise ValueError(
            f"{folder} is incomplete or its {_CONFIG} is of another adapter: {module} has {has}, "
            f"and with use_dora={is_dora} it needs {needs}"
        )
    a, b = tensors["A"], tensors["B"]
    if a.shape[2:] == b.shape[2:] == (1, 1):  # of a convolution
        a, b = a[..., 0, 0], b[..., 0, 0]
    norms = tensors[_MAGNITUDE].reshape(-1) if is_dora else None
    sizes = [x.shape for x in (a, b, norms) if x is not None]
    if not a.ndim == b.ndim == 2 or len({a.shape[0], b.shape[1]}) > 1 or sizes[-1][0] != len(b):
        raise ValueError(f"{folder}: the shapes of the tensors of {module} do not agree: {sizes}")
    ends = (alpha for name, alpha in options["alpha_pattern"].items() if _is_end(name, module))
    alpha, rank = next(ends, options["lora_alpha"]), len(a)
    scale = alpha / (rank**0.5 if options.get("use_rslora") else rank)
    a, b = a.T.astype(np.float32), scale * b.T.astype(np.float32)
    return a, b, None if norms is None else norms.astype(np.float32)


def _kernel_shapes(net: nn.Module) -> dict[Path, tuple[int, ...]]:
    """Returns the shapes of the kernels that can have adapters, by their paths."""
    return {
        path[1:]: x.shape
        for path, x in variable_shapes(net)[1].items()
        if path[-1] == "kernel" and (x.ndim == 2 or x.shape[:2] == (1, 1))
    }


class _Part(NamedTuple):
    """The columns of a kernel that one module of a file makes: part `part` of `parts` equal ones.

    `rows` are the rows of the module that belong to it, from and to fractions of all.
    """

    path: Path
    part: int
    parts: int
    rows: tuple[float, float]


def _source(name_map: NameMap, path: Path, kernels: Collection[Path]) -> Source:
    """Returns where a file has the kernel at `path` of a net with these kernels."""
    is_gated = any("gate" in path for path in kernels)
    return name_map.source(TORCH.name_fn(("params", *path)), gated=is_gated)


def _parts(
    folder: pathlib.Path, modules: list[str], kernels: Collection[Path]
) -> dict[str, list[_Part]]:
    """Finds the parts of kernels of each module, by the naming that knows all modules."""
    for name_map in (*NAME_MAPS, OWN_NAMES):
        table: dict[str, list[_Part]] = {}
        for path in kernels:
            source = _source(name_map, path, kernels)
            start, stop, count = source.rows or (0, 1, 1)
            for i, name in enumerate(source.names):
                part = _Part(path, i, len(source.names), (start / count, stop / count))
                module = name.removesuffix(".weight")
                for other in {module, name_map.new_name(module)}:
                    table.setdefault(other, []).append(part)
        parts = {module: _find(module, table) for module in modules}
        if all(parts.values()):
            return parts
    raise ValueError(
        f"{folder} is an adapter of another net: no naming of this net has all of its "
        f"{len(modules)} modules, such as {modules[0]}"
    )


def _find(module: str, table: Mapping[str, list[_Part]]) -> list[_Part]:
    """Looks a module up; its name or that in the table may have more levels in front."""
    for _ in range(3):  # a model for classification has levels in front: 'vit.encoder...'
        if ends := [name for name in table if module and _is_end(module, name)]:
            return table[min(ends, key=len)]
        module = module.partition(".")[2]
    return []


def _is_end(end: str, name: str) -> bool:
    """Returns whether the levels of `end` are the last ones of `name`."""
    return f".{name}".endswith(f".{end}")


def _kernel_norms(
    folder: pathlib.Path, net: nn.Module, base: str | os.PathLike | None
) -> dict[Path, np.ndarray]:
    """Computes the norms of the columns of the kernels in the weights `base`."""
    if base is None:
        raise ValueError(
            f"{folder} has adapters of DoRA for parts of a fused kernel: give the weights that it "
            "was trained on as base"
        )
    params = traverse_util.flatten_dict(load(base, net, report_fn=lambda *_: None)["params"])
    kernels = {path: x.reshape(-1, x.shape[-1]) for path, x in params.items() if x.ndim > 1}
    return {path: np.linalg.norm(kernel, axis=0) for path, kernel in kernels.items()}
