"""Methods that also stay close to their first backbone."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from dmljax import ops
from dmljax.methods.assemble import backbone_features, with_backbone
from dmljax.methods.base import Method, SplitLoss
from dmljax.ops import Array, matmul

_TEACHER = "teacher"


def similarity_distance(
    embeddings: Float[Array, "b d"], others: Float[Array, "b e"]
) -> Float[Array, ""]:
    """Computes the mean squared difference of the cosines of pairs in two sets of embeddings.

    It distills the similarities of a net whose embeddings may have another width (Park et al., CVPR
    2019; Tung & Mori, ICCV 2019).
    """
    x, y = ops.normalize(embeddings), ops.normalize(others)
    b = len(x)
    return jnp.square(matmul(x, x.T) - matmul(y, y.T)).sum() / max(1, b * (b - 1))


def distilled(method: Method, net: nn.Module, *, weight: float, output: str = "pooled") -> Method:
    """Adds to `method` `weight` times the `similarity_distance` to the backbone before training.

    `net` is the backbone of the method, and `output` what it pools. The first backbone is kept in
    `model_state["teacher"]`, so that checkpoints hold it, too.
    """
    if method.split_loss is None:
        raise ValueError(
            "distill needs the embeddings of a batch, which this method does not give: take pairs "
            "or proxies, or leave it out"
        )
    split = method.split_loss

    def init(key, batch, *, backbone=None):
        params, model_state = method.init(key, batch, backbone=backbone)
        statistics = model_state.get("batch_stats", {}).get("net")
        first = {"params": params["net"], "batch_stats": statistics}
        teacher = dict(zip(("params", "model_state"), with_backbone({}, {}, first), strict=True))
        return params, {**model_state, _TEACHER: jax.tree.map(jnp.copy, teacher)}

    def forward(params, model_state, images, *, key):
        teacher, method_state = _divided(model_state)
        outputs, method_state = split.forward(params, method_state, images, key=key)
        teacher_rows = backbone_features(net, **teacher, images=images, output=output)
        outputs = {**outputs, _TEACHER: jax.lax.stop_gradient(teacher_rows)}
        return outputs, {**method_state, _TEACHER: teacher}

    def criterion(params, model_state, outputs, batch, *, key, step):
        teacher, method_state = _divided(model_state)
        value, (method_state, metrics) = split.criterion(
            params, method_state, outputs, batch, key=key, step=step
        )
        distance = similarity_distance(outputs["embeddings"], outputs[_TEACHER])
        metrics = {**metrics, "distillation": distance}
        return value + weight * distance, ({**method_state, _TEACHER: teacher}, metrics)

    def loss(params, model_state, batch, *, key, step):
        outputs, model_state = forward(params, model_state, batch["images"], key=key)
        return criterion(params, model_state, outputs, batch, key=key, step=step)

    return method._replace(init=init, loss=loss, split_loss=SplitLoss(forward, criterion))


def _divided(model_state: Any) -> tuple[Any, dict[str, Any]]:
    """Returns the teacher, and the state of the method itself."""
    method_state = {name: tree for name, tree in model_state.items() if name != _TEACHER}
    return model_state[_TEACHER], method_state
