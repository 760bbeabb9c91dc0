"""Trees of parameters, divided into what learns and what does not, and their averages."""

from collections.abc import Collection, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def path_of(keys: Any) -> str:
    """Returns the path of a leaf of a tree as text, for example 'net/layer4/0/conv1/kernel'."""
    return jax.tree_util.keystr(keys, simple=True, separator="/")


def paths_of(params: Any) -> list[str]:
    """Returns the paths of all leaves of a tree (`path_of`)."""
    return [path_of(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(params)]


def paths_under(folders: Collection[str], paths: Iterable[str]) -> list[str]:
    """Returns the paths that lie in one of the folders: 'net/conv1/kernel' lies in 'net'.

    A folder may also be the path of one array, such as 'proxies'.
    """
    starts = tuple(f"{folder}/" for folder in folders)
    return [path for path in paths if f"{path}/".startswith(starts)]


def split(params: Any, frozen: Collection[str]) -> tuple[Any, Any]:
    """Splits parameters into two trees: trained ones, and those at the paths `frozen`.

    Each has `optax.MaskedNode` in the place of every parameter that the other one has. The gradient
    with respect to the first tree needs no backward pass below the first layer that learns, and an
    optimizer keeps no moments for the second:

    >>> params = {"net": {"kernel": 1.0}, "head": {"kernel": 2.0}}
    >>> learned, fixed = split(params, {"net/kernel"})
    >>> learned
    {'head': {'kernel': 2.0}, 'net': {'kernel': MaskedNode()}}
    >>> jax.grad(lambda learned: joined(learned, fixed)["head"]["kernel"] ** 2)(learned)["head"]
    {'kernel': Array(4., dtype=float32, weak_type=True)}
    """

    def without(is_left_out):
        def choose(keys, x):
            return optax.MaskedNode() if is_left_out(path_of(keys)) else x

        return jax.tree_util.tree_map_with_path(choose, params)

    return without(lambda path: path in frozen), without(lambda path: path not in frozen)


def joined(learned: Any, fixed: Any) -> Any:
    """Joins the two trees of `split`, also after some steps of training."""
    return jax.tree.map(lambda x, y: y if _is_masked(x) else x, learned, fixed, is_leaf=_is_masked)


def _is_masked(x: Any) -> bool:
    return isinstance(x, optax.MaskedNode)


def interpolated(params: Any, others: Any, *, share: float) -> Any:
    """Computes `(1 - share) * params + share * others` for two trees of the same shapes.

    With the parameters before fine-tuning as `others`, this is WiSE-FT (Wortsman et al., CVPR
    2022). Arrays other than floats stay as in `params`.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be between 0 and 1, not {share}")

    def mix(a: Any, b: Any) -> Any:
        if not jnp.issubdtype(jnp.asarray(a).dtype, jnp.inexact):
            return a
        return (1 - share) * a + share * b

    return jax.tree.map(mix, params, others)
