"""A module outside of dmljax with one function of every kind that a user can add."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np

from dmljax import ops
from dmljax.adapt.trained import Adapted
from dmljax.adapt.trees import paths_of, paths_under
from dmljax.data.splits import Split, Splits
from dmljax.methods import base


def my_dataset(*, classes: int = 8) -> Splits:
    """Noisy images of one color per class; the second half of the classes is for testing."""
    rng = np.random.default_rng(0)
    labels = np.repeat(np.arange(classes), 8)
    colors = rng.integers(0, 256, (classes, 1, 1, 3))
    images = (colors[labels] + rng.integers(0, 64, (len(labels), 6, 6, 3))).clip(0, 255)
    names = tuple(f"class {c}" for c in range(classes // 2))
    is_train = labels < classes // 2
    images = images.astype(np.uint8)
    return Splits(
        Split(images[is_train], labels[is_train], names),
        Split(
            images[~is_train], labels[~is_train] - classes // 2, tuple(f"new {n}" for n in names)
        ),
    )


def my_sampler(groups, *, batch_size: int, seed: int, step: int):
    rng = np.random.default_rng((seed, step))
    return rng.permutation(len(groups.labels))[:batch_size]


def my_transform(image, rng, *, brightness: int = 0):
    return np.clip(image.astype(np.int32) + brightness, 0, 255).astype(np.uint8)


def my_normalization(images):
    return images.astype(np.float32) / np.float32(128) - np.float32(1)


class MyNet(nn.Module):
    width: int = 8

    @nn.compact
    def __call__(self, x, *, train):
        x = nn.relu(nn.Dense(self.width)(x))
        return {"features": x, "pooled": x.mean(axis=(1, 2))}


def my_net(*, width: int = 8) -> nn.Module:
    return MyNet(width)


def my_loss(embeddings, labels, *, weight: float = 1.0, mine_fn=None):
    similarities = embeddings @ embeddings.T
    same = labels[:, None] == labels[None, :]
    if mine_fn is not None:
        same = mine_fn(similarities, same)
    return weight * jnp.mean(jnp.where(same, 1 - similarities, similarities))


def my_miner(distances, pairs, *, limit: float = 1.0):
    return pairs & (distances < limit)


def my_method(net, loss_fn, *, classes: int, mine_fn=None, scale: float = 1.0) -> base.Method:
    """The pooled features of the net, and the loss of them; no head."""
    del classes

    def features(params, images):
        return scale * ops.normalize(
            net.apply({"params": params["net"]}, images, train=True)["pooled"]
        )

    def init(key, batch, *, backbone=None):
        params = net.init(key, batch["images"], train=True)["params"]
        return {"net": params if backbone is None else backbone["params"]}, {}

    def loss(params, model_state, batch, *, key, step):
        x = features(params, batch["images"])
        return loss_fn(x, batch["labels"], mine_fn=mine_fn), (model_state, {})

    def embed(params, model_state, images):
        return features(params, images)

    return base.Method(init, loss, embed)


def my_adaptation(method, *, ending: str = "scale") -> Adapted:
    """Of the backbone, only parameters whose names end in this way learn."""

    def frozen_fn(params):
        paths = paths_under(method.backbone, paths_of(params))
        return frozenset(path for path in paths if not path.endswith(ending))

    return Adapted(method, frozen_fn, method)


def my_schedule(*, total: int, power: float = 1.0):
    return lambda step: (1 - step / total) ** power


def my_metric(ranks, *, best: int = 2):
    """1 for a query of which every positive is among the `best` first."""
    return (ranks.max(axis=1) <= best).astype(np.float64)


def my_clustering_metric(labels, assignment) -> float:
    return len(np.unique(assignment)) / len(np.unique(labels))


def my_embedding_metric(embeddings, labels, *, power: float = 1.0) -> float:
    """The mean norm of the embeddings of the first class, to a power."""
    return float(np.linalg.norm(embeddings[labels == 0], axis=1).mean() ** power)


def after_evaluation(evaluation, *, step, workdir):
    """Writes what it sees beside the run."""
    embeddings = evaluation.test_embeddings["embedding"]
    line = f"{step} {evaluation.scores['test/R@1']} {len(embeddings)}\n"
    with (workdir / "seen.txt").open("a") as file:
        file.write(line)
