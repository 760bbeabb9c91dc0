"""Where published files keep the parameters of our nets: name maps are data, one per naming.

A rule's key is our name of a parameter, or of its module, in PyTorch's spelling
('blocks.*.attn.qkv' for 'params/blocks/0/attn/qkv/kernel' and its bias). Its value is the file's
name of the same, or a `Source`. A name without a rule is the same in the file. `*` is a number.
"""

import re
from collections.abc import Container, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


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


def joined(*names: str) -> Source:
    """Queries, keys and values that a file keeps apart."""
    return Source(names)


class NameMap(NamedTuple):
    """The names of one kind of file.

    The map is for files with all names of `marks` and none of `absent`. `gated_rules` are for nets
    with gated MLPs. Names that match a pattern of `unused` are left out silently; those that match
    one of `zeros` must hold zeros. `resize` is the rule of `nets.positions` that the code behind
    the file uses.
    """

    title: str
    marks: tuple[str, ...]
    rules: Mapping[str, str | Source] = {}
    gated_rules: Mapping[str, str | Source] = {}
    unused: tuple[str, ...] = ()
    zeros: tuple[str, ...] = ()
    resize: str | None = None
    absent: tuple[str, ...] = ()

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

    def is_unused(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.unused)

    def is_zero(self, name: str) -> bool:
        return any(re.fullmatch(pattern, name) for pattern in self.zeros)


def _filled(name: str, numbers: Sequence[str]) -> str:
    for number in numbers:
        name = name.replace("*", number, 1)
    return name
