"""What a family of nets says of its published files: where they are, what they expect, their names.

A module of a family has `PUBLISHED`, its part of the table of published files, and `NAME_MAPS`, the
names of parameters in files that do not use ours. Level by level, many files have the names of our
nets: 'layer1.0.bn1.weight' is `params['layer1']['0']['bn1']['scale']`. A rule of a `NameMap` has as
its key our name of a parameter, or of its module, in PyTorch's spelling ('blocks.*.attn.qkv' for
'params/blocks/0/attn/qkv/kernel' and its bias). Its value is the file's name of the same, or a
`Source`. A name without a rule is the same in the file. `*` is a number.
"""

import functools
import itertools
import re
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

import numpy as np

from dmljax.nets.normalizations import inputs, title


class License(NamedTuple):
    """A license in plain words.

    `sell` says whether a product with the weights may be sold: 'yes', 'under these terms', 'no' or
    'not stated'. `terms` are the conditions.
    """

    name: str
    sell: str
    terms: str

    def __str__(self) -> str:
        return f"{self.name}; may be sold: {self.sell}; {self.terms}"


class Preprocessing(NamedTuple):
    """From a photograph to the input of a net.

    The shorter side becomes `shorter` and the central square of `size` pixels is cut; without
    `shorter`, both sides are squashed to `size`. `filter` is 'bilinear' or 'bicubic'. `normalize`
    is the value of the config's `normalize`: the name of a function of `nets.normalizations`, or
    `{"name": "rgb", "mean": [...], "std": [...]}`.
    """

    size: int = 224
    shorter: int | None = 256
    filter: str = "bilinear"
    normalize: str | dict[str, Any] = "imagenet"

    def __str__(self) -> str:
        size = f"{self.size} x {self.size} pixels"
        if self.shorter is None:
            cut = f"both sides to {size} ({self.filter}, the aspect ratio is lost)"
        else:
            cut = f"shorter side to {self.shorter} ({self.filter}), central square of {size}"
        return f"{cut}; {title(self.normalize)}"

    @property
    def inputs(self) -> dict[str, Any]:
        """Order and range of the channels, mean and deviation."""
        return inputs(self.normalize) or {}

    @property
    def transform(self) -> dict[str, Any]:
        """The value of the config's `eval_transform`."""
        options = {"size": self.size, "filter": self.filter, "scaled_decode": True}
        if self.shorter is None:
            return {"name": "squash_eval", **options}
        return {"name": "standard_eval", "shorter": self.shorter, **options}


class Published(NamedTuple):
    """A published file.

    `net` is the backbone in `dmljax.nets` that it fits. `url` is one address or several with the
    same weights: the first that answers is taken; or only the file's name, if no address is
    published. `digest` is 'sha256:' or 'sha1:' and the published digits, or ''. `package` is the
    Python package that contains the file. `access` says what an address asks for.
    """

    net: str
    url: str | tuple[str, ...]
    megabytes: int
    license: License
    trained_on: str
    preprocessing: Preprocessing = Preprocessing()
    digest: str = ""
    package: str = ""
    access: str = ""

    @property
    def urls(self) -> tuple[str, ...]:
        return (self.url,) if isinstance(self.url, str) else self.url


IMAGENET = "ImageNet-1k, with labels; ImageNet's terms of use speak of research and may bind you"
APACHE = License("Apache-2.0", "yes", "keep the license text and the notices")
MIT = License("MIT", "yes", "keep the license text")
BSD = License("BSD-3-Clause", "yes", "keep the license text")
BILINEAR = Preprocessing()
BICUBIC = Preprocessing(filter="bicubic")


def torchvision(
    net: str, file: str, megabytes: int, preprocessing: Preprocessing = BILINEAR
) -> Published:
    """Describes a file of torchvision, whose name ends in the first digits of its SHA-256."""
    digest = f"sha256:{file.removesuffix('.pth').rpartition('-')[2]}"
    url = f"https://download.pytorch.org/models/{file}"
    return Published(net, url, megabytes, BSD, IMAGENET, preprocessing, digest)


def hub(repository: str) -> str:
    """Returns the address of a file of the Hugging Face hub."""
    return f"https://huggingface.co/{repository}/resolve/main/model.safetensors"


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
                    filled = (functools.reduce(_filled, match.groups(), n) for n in source.names)
                    return source._replace(names=tuple(n + suffix for n in filled))
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


def _filled(name: str, number: str) -> str:
    return name.replace("*", number, 1)


# shape("layer1.0.conv1.weight") -> the shape of this tensor of a file or None, with PyTorch's axes
# and our names; with gated=True, by the names of a file for a net with gated MLPs.
ShapeFn = Callable[..., tuple[int, ...] | None]


def rows_of(shape: ShapeFn, *names: str) -> tuple[int, ...]:
    """Returns the numbers of rows of these weights; 0 for one that is missing."""
    return tuple((shape(f"{name}.weight") or (0,))[0] for name in names)


def count_of(shape: ShapeFn, stage: str, part: str) -> int:
    """Counts the blocks of a stage by their tensors `part`."""
    return next(n for n in itertools.count() if not shape(f"{stage}.{n}.{part}"))
