"""The losses of ABE: between images for every learner, and between the learners of one image."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float

from dmljax import ops
from dmljax.ops import Array, Labels, MineFn, Scalar

__all__ = ["contrastive", "divergence", "drawn_pairs", "mean_divergence"]


def contrastive(
    embeddings: Float[Array, "b d"],
    labels: Labels,
    *,
    margin: Scalar = 1.0,
    push_positives: bool = False,
    where: Bool[Array, "b"] | None = None,
    mine_fn: MineFn | None = None,
) -> Float[Array, ""]:
    """Computes ABE's loss: (sum of d^2 over positives + [margin - d^2]+ over negatives) / pairs.

    (Kim et al., ECCV 2018.) `dmljax.losses.contrastive` differs in two ways: it squares the hinge
    instead of the distance inside it, and it averages positives and negatives separately.

    * `embeddings`: used as they are; in ABE they are unit vectors.
    * `push_positives=True` also applies the hinge to positives, as one published implementation
      does by omitting the factor (1 - y).
    * `where`: rows that count. `mine_fn`: narrows the pairs.
    """
    x = ops.widen(embeddings)
    squares = ops.squared_euclidean(x, x)
    pairs = ops.pairs(labels, where=where)
    if mine_fn is not None:
        distances = jax.lax.stop_gradient(ops.unit_euclidean(x, x))
        pairs = ops.triplets_to_pairs(mine_fn(distances, pairs))
    positives, negatives = pairs
    pushed = positives | negatives if push_positives else negatives
    total = jnp.sum(squares, where=positives)
    total += jnp.sum(jax.nn.relu(margin - squares), where=pushed)
    return ops.divide(total, jnp.sum(positives | negatives, dtype=total.dtype))


def divergence(learners: Float[Array, "b m d"], *, margin: Scalar = 1.0) -> Float[Array, ""]:
    """Computes the mean over images of sum_{p<q} [margin - |B_p(x) - B_q(x)|^2]+ over learners.

    (Kim et al., ECCV 2018.) It pushes the learners of one image apart. The paper also sums over
    images, so its weight depends on the size of the batch.
    """
    first, second = np.triu_indices(learners.shape[1], 1)
    if not len(first):
        return jnp.zeros((), learners.dtype)
    gaps = learners[:, first] - learners[:, second]  # [b pairs d]
    hinges = jax.nn.relu(margin - jnp.sum(gaps * gaps, axis=2))
    return jnp.mean(jnp.sum(hinges, axis=1))


def mean_divergence(learners: Float[Array, "b m d"], *, margin: Scalar = 1.0) -> Float[Array, ""]:
    """Divides `divergence` by the m (m - 1) / 2 pairs of learners, as public code does."""
    count = learners.shape[1]
    return divergence(learners, margin=margin) / max(count * (count - 1) // 2, 1)


def drawn_pairs(labels: Array) -> ops.Pairs:
    """Returns only the pairs of rows i and i + b/2, which `data.sampling.abe_pairs` draws."""
    b = len(labels)
    if b % 2:
        raise ValueError(f"drawn pairs need a batch of an even number of rows, not {b}")
    rows = jnp.arange(b)
    partner = rows[None, :] == ((rows + b // 2) % b)[:, None]
    positives, negatives = ops.pairs(labels)
    return ops.Pairs(positives & partner, negatives & partner)
