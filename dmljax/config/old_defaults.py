"""Defaults of nets that have changed: new configs name the value, so that older runs keep theirs.

Unlike `old_names`, this file stays, because run folders outlive versions.
"""

from collections.abc import Mapping
from typing import Any

OLD_RESIZE, NEW_RESIZE = "torch", "torch_offset"
_NETS = ("vit_s16", "vit_b16")


def with_resize(spec: Any, rule: str) -> Any:
    """`config.net` with `resize=rule`, if it names none and the default of its net has changed."""
    fields = {"name": spec} if isinstance(spec, str) else spec
    if not isinstance(fields, Mapping) or fields.get("name") not in _NETS:
        return spec
    return {"resize": rule, **fields}


def without_old_resize(spec: Any) -> Any:
    """`config.net` for digests: older versions did not write the old rule there."""
    if not isinstance(spec, Mapping) or spec.get("name") not in _NETS:
        return spec
    return {k: v for k, v in spec.items() if (k, v) != ("resize", OLD_RESIZE)}
