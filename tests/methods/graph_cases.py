"""The graph method on eight small images: the published ablations and other options."""

import functools

import jax
import numpy as np

from dmljax import losses, nets
from dmljax.config import registry
from dmljax.nets import layers

N, D, C, HEADS = 8, 8, 3, 2
LOSS = functools.partial(losses.label_smoothed_cross_entropy, epsilon=0.1, temperature=0.2)
NET = nets.convnet(widths=(8,), strides=(2,), norm=layers.frozen_batch_norm)
SHARED = {"sublayers": 2, "share_vector": True, "share_projection": True}


# The rows of the published ablations, then other options.
ROWS = {
    "baseline": {},
    "backbone only": {"graph_weight": 0.0},
    "no MLP, no attention": {"attention_fn": None, "mlp_fn": None, "layers": 2},
    "no attention": {"attention_fn": None},
    "no MLP": {"mlp_fn": None},
    "GAT": {"attention_fn": {"name": "gat", **SHARED}},
    "GATv2": {"attention_fn": {"name": "gatv2", **SHARED}},
    "GATv2, no MLP": {"attention_fn": "gatv2", "mlp_fn": None},
    "plus one, LN(2h)": {"attention_fn": "dot_plus_one", "mlp_fn": "identity"},
    "two layers, necks": {"layers": 2, "concat_layers": True, "neck": True},
    "graph only": {"encoder_weight": 0.0},
    "edges": {"edges_fn": {"name": "similarity_edges", "threshold": 0.9}},
    "shifted edges, other weights": {
        "edges_fn": {
            "name": "similarity_graph",
            "positive_fn": "shifted",
            "similarity_fn": "dot_products",
        },
        "encoder_weight": 0.5,
        "graph_weight": 3.0,
    },
}


@functools.cache
def images_of_batch():
    return np.random.default_rng(0).normal(size=(N, 8, 8, 3)).astype(np.float32)


LABELS = np.arange(N, dtype=np.int32) % C


# Compiling takes nearly all of the time; without optimizations an eighth of it.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def graph_method(name="baseline", **options):
    defaults = {"dim": D, "heads": HEADS, "dropout": 0.0}
    spec = {"name": "graph", **defaults, **ROWS[name], **options}
    return registry.resolve("method", spec)(NET, LOSS, classes=C)


def fill_at_random(shapes):
    """Random variables, none of them at its initial 0 or 1, drawn without compiling anything."""
    rng = np.random.default_rng(1)

    def draw(path, shape):
        near = {"scale": 1.0, "var": 1.0}.get(path[-1].key, 0.0)
        drawn = near + 0.2 * rng.normal(size=shape.shape)
        return (np.abs(drawn) if path[-1].key == "var" else drawn).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


@functools.cache
def graph_case(name="baseline"):
    """(method, params, model_state, compiled loss with its slopes)."""
    method = graph_method(name)
    batch = {"images": images_of_batch(), "labels": LABELS}
    params, model_state = fill_at_random(jax.eval_shape(method.init, jax.random.key(0), batch))

    @jit
    def slope(params, images, labels, where, key, step):
        def loss(params, images):
            batch = {"images": images, "labels": labels, "where": where}
            return method.loss(params, model_state, batch, key=key, step=step)

        return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, images)

    return method, params, model_state, slope
