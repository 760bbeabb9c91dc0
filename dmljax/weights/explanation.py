"""What a published file is, what it expects and what may be done with it, as text."""

import re
import textwrap
from typing import Any

import flax.linen as nn
import jax
import numpy as np

from dmljax.hints import hint
from dmljax.weights.installed import get_command
from dmljax.weights.loading import image_shape_of
from dmljax.weights.published import PUBLISHED, file_name

# Numbers per image of nets of convolutions. A transformer says its own without being traced.
_WIDTHS = dict.fromkeys(("resnet18", "resnet34"), 512)
_WIDTHS |= dict.fromkeys(("resnet50", "resnet101", "resnet152"), 2048)
_WIDTHS |= dict.fromkeys(("googlenet", "googlenet_bn", "bn_inception", "convnext_b"), 1024)
_WIDTHS |= dict.fromkeys(("efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2"), 1280)
_WIDTHS |= {"mobilenet_v2": 1280, "convnext_t": 768, "convnext_s": 768, "convnext_l": 1536}
_WITH_NET = 110  # columns of a terminal that has room for the name of the net
_RULES = {
    "torch": "by plain bicubic interpolation, as in transformers",
    "torch_offset": "by bicubic interpolation with an offset of 0.1, as in the authors' code",
    "antialiased": "by antialiased bicubic interpolation, as in timm",
}


def width_of(name: str) -> int:
    """Returns the width of the output of a net that has published files."""
    from dmljax import nets  # here, so that reading files does not import all nets

    if name in _WIDTHS:
        return _WIDTHS[name]
    net = getattr(nets, name)()
    return net.projection or net.width


def table(columns: int) -> str:
    """Formats the published files, one line each, for a terminal with this number of columns."""
    rows: list[tuple[str, ...]]
    rows = [("name", "MB", "width", "input", "license", "--net", "trained on")]
    for name, entry in PUBLISHED.items():
        numbers = entry.megabytes, width_of(entry.net), entry.preprocessing.size
        license_name = entry.license.name.partition(",")[0]
        rows += [(name, *map(str, numbers), license_name, entry.net, entry.trained_on)]
    if columns < _WITH_NET:
        rows = [(*row[:-2], re.split("[:;,]", row[-1])[0]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = max(columns - sum(widths[:-1]) - 2 * len(widths[:-1]), 12)
    lines = []
    for *cells, data in rows:
        aligned = [
            f"{cell:>{width}}" if 0 < i < 4 else f"{cell:{width}}"
            for i, (cell, width) in enumerate(zip(cells, widths[:-1], strict=True))
        ]
        options: dict[str, Any] = {"placeholder": " ...", "break_on_hyphens": False}
        lines.append("  ".join([*aligned, textwrap.shorten(data, room, **options)]))
    return "\n".join(lines)


def explain(name: str) -> str:
    """Describes the published files of `name`: input, license, training data, size and source.

    `name` is a key of `PUBLISHED`, or the name of a net, which may have several files.
    """
    names = [name] if name in PUBLISHED else [n for n, e in PUBLISHED.items() if e.net == name]
    if not names:
        known = sorted({*PUBLISHED, *(entry.net for entry in PUBLISHED.values())})
        raise ValueError(f"no published file is called {name!r}{hint(name, known)}")
    return "\n\n".join(map(_explained, names))


def _explained(name: str) -> str:
    from dmljax import nets  # here, so that reading files does not import all nets

    published = PUBLISHED[name]
    net = getattr(nets, published.net)()

    def run(key):
        return net.init_with_output(
            key, np.zeros((1, *image_shape_of(net)), np.float32), train=False
        )

    outputs, variables = jax.eval_shape(run, jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(variables["params"]))
    lines = {
        "net": f"--net={published.net}, {count:,} parameters",
        "width": f"{outputs['pooled'].shape[1]} numbers per image",
        "input": str(published.preprocessing),
        "other sizes": _sizes(net),
        "trained on": published.trained_on,
        "license": published.license.name,
        "may be sold": f"{published.license.sell}: {published.license.terms}",
        "digest": published.digest.replace(":", " begins with ") or "not published",
        "file": f"about {published.megabytes} MB, {' or '.join(published.urls)}",
        "get it": f"{get_command(name)}, or take a file that you have as {file_name(name)}",
        "access": published.access,
    }
    width = max(map(len, lines))
    return "\n".join([name, *(f"  {key:{width}s}  {text}" for key, text in lines.items() if text)])


def _sizes(net: nn.Module) -> str:
    patch = getattr(net, "patch", None)
    if patch is None:
        return ""
    if net.pool == "flatten":
        return "none: the head flattens all tokens"
    how = "rotary positions need no resizing"
    if net.positions != "rotary":
        rows, columns = net.grid
        how = f"the {rows} x {columns} positions are resized {_RULES[net.resize]}"
    return f"sides that are multiples of {patch} pixels; {how}"
