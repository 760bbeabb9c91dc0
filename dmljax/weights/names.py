"""Names and axes of the parameters in files, compared with a net.

Level by level, many published files use the names of our nets: 'layer1.0.bn1.weight' is
`params['layer1']['0']['bn1']['scale']`. Only the last level and the axes of kernels differ, which a
`Layout` describes.

Files with other names have a `NameMap` in `weights.families`. A rule's key is our name of a
parameter, or of its module, in PyTorch's spelling ('blocks.*.attn.qkv' for
'params/blocks/0/attn/qkv/kernel' and its bias). Its value is the file's name of the same, or a
`Source`. A name without a rule is the same in the file. `*` is a number.
"""

import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dmljax.weights.readers import Weights

# Names of classifiers, including auxiliary ones, or the first levels of these names.
CLASSIFIERS = {"aux1", "aux2", "classifier", "fc", "head", "last_linear", "loss1", "loss2", "loss3"}
CLASSIFIERS |= {"_fc", "head.fc"}
_MAIN_CLASSIFIERS = (
    *("fc", "classifier.1", "last_linear", "loss3.classifier", "head"),
    *("classifier", "head.fc", "_fc"),
)
_LEAVES = {"kernel": "weight", "scale": "weight", "mean": "running_mean", "var": "running_var"}


class Source(NamedTuple):
    """The tensors of a file that make one parameter, with PyTorch's axes.

    `names` are joined along their rows. `rows=(1, 3, 3)` takes the rows from 1/3 to 3/3 of them,
    the last two thirds. A matrix that is stored as [in, out] is `transposed`.
    `zero_if_missing` is for biases that a file leaves out because they are zero. `zero_row` puts a
    row of zeros in front: the position of a class token into which it has been added.
    """

    names: tuple[str, ...]
    rows: tuple[int, int, int] | None = None
    transposed: bool = False
    zero_if_missing: bool = False
    zero_row: bool = False

    def value(self, tensors: Mapping[str, Any], shape: tuple[int, ...]) -> Any:
        """Returns the parameter; `shape` is its shape if it is missing."""
        if self.zero_if_missing and self.names[0] not in tensors:
            return np.zeros(shape, np.float32)
        arrays = [tensors[name] for name in self.names]
        if other := [array for array in arrays if array.shape[1:] != arrays[0].shape[1:]]:
            return other[0]  # cannot be joined: the check of shapes refuses it
        array = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        if self.rows is not None:
            start, stop, parts = self.rows
            if array.ndim and array.shape[0] % parts == 0:
                size = array.shape[0] // parts
                array = array[start * size : stop * size]
        if self.zero_row and array.ndim == 3:
            array = np.concatenate((np.zeros_like(array[:, :1]), array), axis=1)
        return array.T if self.transposed else array


_BLOCK_PARTS = {"qkv": "attn.qkv", "proj": "attn.proj", "gate": "mlp.gate", "fc1": "mlp.fc1"}
_BLOCK_PARTS |= {"fc2": "mlp.fc2", "ls1": "ls1.gamma", "ls2": "ls2.gamma"}


def block_rules(block: str, **parts: str | tuple[str, ...]) -> dict[str, str | Source]:
    """Maps parts of the blocks of a transformer: `norm1="ln_1"` maps 'blocks.*.norm1' to the
    module `ln_1` of `block`. Several names, of queries, keys and values, are joined.
    """
    rules: dict[str, str | Source] = {}
    for part, names in parts.items():
        source = tuple(f"{block}.{n}" for n in ((names,) if isinstance(names, str) else names))
        rules[f"blocks.*.{_BLOCK_PARTS.get(part, part)}"] = Source(source)
    return rules


class NameMap(NamedTuple):
    """The names of one kind of file.

    The map is for files with all names of `marks` and none of `absent`. `gated_rules` are for nets
    with gated MLPs. Names that match a pattern of `unused` are left out silently; those that match
    one of `zeros` must hold zeros. `resize` is the rule of `nets.positions` that the code behind
    the file uses. `renamed` has patterns and replacements for the names of modules in transformers
    5, whose files keep the names of before.
    """

    title: str
    marks: tuple[str, ...]
    rules: Mapping[str, str | Source] = {}
    gated_rules: Mapping[str, str | Source] = {}
    unused: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    resize: str | None = None
    absent: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()

    def fits(self, names: Container[str]) -> bool:
        """Returns whether the map describes a file with these names."""
        has_marks = all(mark in names for mark in self.marks)
        return has_marks and not any(name in names for name in self.absent)

    def source(self, name: str, *, gated: bool = False) -> Source:
        """Returns where a file has the parameter that is called `name` in PyTorch's spelling."""
        module, _, leaf = name.rpartition(".")
        for key, value in {**self.rules, **(self.gated_rules if gated else {})}.items():
            pattern = re.escape(key).replace(r"\*", r"(\d+)")
            for text, suffix in ((name, ""), (module, f".{leaf}")):
                if match := re.fullmatch(pattern, text):
                    source = value if isinstance(value, Source) else Source((value,))
                    names = tuple(_filled(n, match.groups()) + suffix for n in source.names)
                    return source._replace(names=names)
        return Source((name,))

    def new_name(self, module: str) -> str:
        """Returns the name in transformers 5 of a module of the file."""
        for pattern, name in self.renamed:
            module = re.sub(pattern, name, module)
        return module

    def is_unused(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.unused)

    def is_zero(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.zeros)


OWN_NAMES = NameMap("the names of the net", ())


def _filled(name: str, numbers: Sequence[str]) -> str:
    for number in numbers:
        name = name.replace("*", number, 1)
    return name


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


def torch_tensors(weights: Weights) -> dict[str, np.ndarray]:
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
