"""The values of `trained` in a config, such as lora: each makes an `Adapted` of a `Method`.

What does not belong to the backbone, such as the head and the proxies, always learns.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import traverse_util

from dmljax.adapt import lowrank
from dmljax.adapt.depth import blocks as blocks_of
from dmljax.adapt.trees import paths_of, paths_under
from dmljax.methods.base import Method, with_params
from dmljax.nets.vit import block_count
from dmljax.nets.vit import prompts as draw_prompts

__all__ = ["Adapted", "all", "biases", "blocks", "last", "lora", "prompts"]

# The keys from which a method draws are folded with smaller numbers.
_ADAPTERS = 2000


class Adapted(NamedTuple):
    """A method, and the part of it that learns.

    * `method`: what is trained. Its `params` may also hold adapters.
    * `frozen_fn(params) -> paths`: the parameters that do not learn. `params` may hold shapes. It
      raises a one-line error if the options do not fit the net.
    * `deployed`, `merge_fn`: what embeds images after training. `merge_fn(params)` are the
      parameters of `deployed`; adapters that can be added to kernels are.
    """

    method: Method
    frozen_fn: Callable[[Any], frozenset[str]]
    deployed: Method
    merge_fn: Callable[[Any], Any] = lambda params: params


def all(method: Method) -> Adapted:
    """Trains all parameters."""
    return Adapted(method, lambda params: frozenset(), method)


def last(method: Method) -> Adapted:
    """Keeps the backbone fixed."""
    return Adapted(method, lambda params: frozenset(_backbone(method, params)), method)


def blocks(method: Method, *, count: int = 4) -> Adapted:
    """Trains the last `count` blocks of the backbone, and everything behind them.

    `adapt.blocks` says what a block is. No gradient is computed below the first of these blocks.
    """

    def frozen_fn(params):
        paths = _backbone(method, params)
        blocks = blocks_of(paths)
        if not 1 <= count <= blocks.total:
            raise ValueError(
                f"trained=blocks: count={count} must be from 1 to {blocks.total}, the blocks of "
                f"this net in a known order (its parameters are {', '.join(paths[:3])}, ...): "
                "take 'all' or 'last', or optimizer.groups with frozen=True"
            )
        return frozenset(path for path in paths if blocks.of[path] < blocks.total - count)

    return Adapted(method, frozen_fn, method)


def biases(method: Method) -> Adapted:
    """Trains the biases of the backbone and its norms (BitFit, Ben Zaken et al., ACL 2022)."""

    def frozen_fn(params):
        paths = _backbone(method, params)
        frozen = frozenset(path for path in paths if "bias" not in path.split("/"))
        if len(frozen) == len(paths):
            raise ValueError("trained=biases: this net has no biases: take blocks, lora or last")
        return frozen

    return Adapted(method, frozen_fn, method)


def lora(
    method: Method,
    *,
    rank: int = 8,
    alpha: float = 16.0,
    targets: str | None = None,
    rslora: bool = False,
    dora: bool = False,
) -> Adapted:
    """Trains low-rank adapters of the backbone (LoRA, Hu et al., ICLR 2022).

    A kernel W acts as W + alpha / rank a b, or with alpha / sqrt(rank) if `rslora` (Kalajdzievski,
    2023). With `dora`, the norms of its columns are parameters, too (DoRA, Liu et al., ICML 2024;
    `adapt.with_magnitudes`). `targets` is a regular expression for the paths of kernels: see
    `adapt.lora`. The adapters are `params["adapters"]`.
    """
    scale = lowrank.lora_scale(rank=rank, alpha=alpha, rslora=rslora)

    def init_fn(key, params):
        flat = traverse_util.flatten_dict(params, sep="/")
        backbone = {path: flat[path] for path in _backbone(method, params)}
        backbone = traverse_util.unflatten_dict(backbone, sep="/")
        adapters = lowrank.lora(key, backbone, rank=rank, targets=targets)
        return lowrank.with_magnitudes(backbone, adapters) if dora else adapters

    def merge_fn(params):
        others = {name: tree for name, tree in params.items() if name != "adapters"}
        return lowrank.merged(others, params["adapters"], scale=scale)

    adapted = last(_with(method, "adapters", init_fn, merge_fn))
    return adapted._replace(deployed=method, merge_fn=merge_fn)


def prompts(method: Method, *, count: int = 8, deep: bool = True) -> Adapted:
    """Trains tokens that a vision transformer reads besides the patches (Jia et al., ECCV 2022).

    With `deep`, every block reads `count` tokens of its own, not the tokens of the block before;
    otherwise the first block reads them, and they stay. For metric learning, see
    `methods.semantic_proxies` (VPTSP-G, Ren et al., ICLR 2024). The prompts are
    `params["prompts"]`, and belong to the model that is shipped.
    """
    if count < 1:
        raise ValueError(f"trained=prompts: count must be 1 or more, not {count}")

    def init_fn(key, params):
        net = params.get("net", {})
        total = block_count(net)
        if method.backbone != ("net",) or not total:
            raise ValueError(
                "trained=prompts: this net has no tokens: take a vision transformer, such as "
                "dinov2_s14, or blocks or lora"
            )
        return draw_prompts(key, net, (total if deep else 1, count))

    def params_fn(params):
        others = {name: tree for name, tree in params.items() if name != "prompts"}
        return others | {"net": {**params["net"], "prompts": params["prompts"]}}

    return last(_with(method, "prompts", init_fn, params_fn))


def _with(method: Method, name: str, init_fn: Callable, params_fn: Callable) -> Method:
    """Returns `method` of `params_fn(params)`; `init_fn(key, params)` draws `params[name]`."""

    def init(key, batch, *, backbone=None):
        params, model_state = method.init(key, batch, backbone=backbone)
        drawn = init_fn(jax.random.fold_in(key, _ADAPTERS), params)
        return {**params, name: drawn}, model_state

    return with_params(method, params_fn)._replace(init=init)


def _backbone(method: Method, params: Any) -> list[str]:
    """Returns the paths of the backbone in `params`."""
    return paths_under(method.backbone, paths_of(params))
