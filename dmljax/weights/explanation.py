"""What a published file is, what it expects and what may be done with it, as text."""

from __future__ import annotations

import flax.linen as nn
import jax
import numpy as np

from dmljax.hints import hint
from dmljax.weights.installed import get_command
from dmljax.weights.loading import image_shape_of
from dmljax.weights.published import PUBLISHED

_RULES = {
    "torch": "by plain bicubic interpolation, as in transformers",
    "torch_offset": "by bicubic interpolation with an offset of 0.1, as in the authors' code",
    "antialiased": "by antialiased bicubic interpolation, as in timm",
}


def explain(name: str) -> str:
    """Input, license, training data, size and source of the published files of `name`.

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
        "file": f"about {published.megabytes} MB, {' or '.join(published.urls)}",
        "get it": f"{get_command(name)}, or take a file that you have",
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
