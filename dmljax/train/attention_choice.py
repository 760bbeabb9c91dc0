"""Chooses the form of attention of a run: on an accelerator the fastest one, as measured."""

import contextlib
import importlib.metadata
import json
from collections.abc import Collection, Mapping
from typing import Any

import jax
import numpy as np

from dmljax import at_hand
from dmljax.files import reading
from dmljax.files.writing import lock, write_json
from dmljax.hints import counted
from dmljax.nets import token_attention
from dmljax.train import hosts

# A measurement takes the images of a step, but at most 2^28 pairs of tokens. With few images,
# starting a kernel would take longer than its computation, and another form would win.
_PAIRS = 1 << 28


def choose(
    net: Any,
    *,
    image_shapes: Collection[tuple[int, ...]],
    images: int,
    platform: str,
    may_measure: bool = True,
) -> tuple[Any, str]:
    """Returns `net` with the form of attention that a run uses, and a phrase for the header.

    A device has `images` images in a step. With `attention="auto"`, process 0 measures all forms
    at the number of tokens of each of `image_shapes`, and all processes take its choice. Times are
    kept in `at_hand.cache_folder`, so that a resumed run takes the same form. On a CPU, and unless
    it `may_measure`, the form is `plain`: a deterministic run must not depend on a measurement, and
    devices that are only described do not run. A net without attention is returned as it is.
    """
    form = getattr(net, "attention", None)
    if form is None:
        return net, ""
    token_attention.check(form, platform)
    if form != "auto":
        return net, f"attention: {form} (net.attention={form!r})"
    if platform == "cpu" or not may_measure:
        return net.clone(attention="plain"), "attention: plain"
    dtype = np.dtype(net.dtype or np.float32).name
    sizes = [
        {"images": min(images, max(1, _PAIRS // (net.heads * tokens**2))), "tokens": tokens}
        for tokens in sorted({net.tokens(shape) for shape in image_shapes})
    ]
    results = hosts.on_process_0(
        lambda: [_milliseconds(**s, heads=net.heads, width=net.width, dtype=dtype) for s in sizes]
    )
    form = fastest(results)
    notes = [_note(**s, result=result) for s, result in zip(sizes, results, strict=True)]
    return net.clone(attention=form), f"attention: {form} ({'; '.join(notes)})"


def _milliseconds(**sizes: Any) -> dict[str, float | str]:
    """Reads or measures `token_attention.milliseconds`, once per kind of device and software."""
    path = at_hand.cache_folder() / "attention.json"
    names = ("jax", "jaxlib", "tokamax", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
    packages = {x.name: x.version for x in importlib.metadata.distributions() if x.name in names}
    facts = {"device": jax.devices()[0].device_kind, "packages": packages, **sizes}
    key = json.dumps(facts, sort_keys=True, default=str)
    known: Any = reading.json_object_or_empty(path).get(key)
    if isinstance(known, dict) and known.keys() == token_attention.FORMS.keys():
        return known
    measured = token_attention.milliseconds(**sizes)
    # Another process may have used the memory: let the next run measure again.
    if not any("RESOURCE_EXHAUSTED" in str(x) for x in measured.values()):
        with contextlib.suppress(OSError):  # then the next run measures again
            path.parent.mkdir(parents=True, exist_ok=True)
            with lock(path.with_suffix(".lock"), wait=True):
                kept = reading.json_object_or_empty(path)
                write_json(path, kept | {key: measured}, indent=1)
    return measured


def fastest(results: Collection[Mapping[str, float | str]]) -> str:
    """Returns the form with the least total time among those that no measurement refuses."""
    sums = {
        form: sum(result[form] for result in results)  # type: ignore[misc]
        for form in token_attention.FORMS
        if not any(isinstance(result[form], str) for result in results)
    }
    return min(sums, key=sums.__getitem__, default="plain")


def _note(*, images: int, tokens: int, result: Mapping[str, float | str]) -> str:
    texts = [
        f"{form} refused: {value}" if isinstance(value, str) else f"{form} {value:.2f} ms"
        for form, value in result.items()
    ]
    return f"{counted(images, 'image')} of {counted(tokens, 'token')}: {', '.join(texts)}"


def portable(net: Any) -> Any:
    """Returns `net` with the form of attention that every platform has, to be shipped."""
    return net.clone(attention="plain") if hasattr(net, "attention") else net
