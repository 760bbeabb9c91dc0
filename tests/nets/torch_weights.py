"""Random values for a PyTorch reference or for our variables, and conversion to our variables."""

import zlib

import jax
import numpy as np


def randomize(net, seed=0):
    """Random values with which every parameter has an effect and activations keep their scale."""
    import torch

    rng = np.random.default_rng(seed)
    for name, value in net.state_dict().items():
        shape = tuple(value.shape)
        if name.endswith("num_batches_tracked"):
            continue
        if name.endswith("running_var"):
            new = rng.uniform(0.5, 2, shape)
        elif len(shape) >= 2 and name.endswith("weight"):
            new = rng.normal(0, np.sqrt(2 / np.prod(shape[1:])), shape)
        elif name.endswith("weight"):
            new = rng.uniform(0.5, 1.5, shape)
        else:
            new = rng.normal(0, 0.2, shape)
        with torch.no_grad():
            value.copy_(torch.from_numpy(new.astype(np.float32)))
    return net


def fill(shapes):
    """Random values for variables of ours, each determined by its path; needs no PyTorch."""

    def value(path, leaf):
        names = [entry.key for entry in path]
        rng = np.random.default_rng(zlib.crc32("/".join(names).encode()))
        if names[-1] == "kernel":
            new = rng.normal(0, np.sqrt(2 / np.prod(leaf.shape[:-1])), leaf.shape)
        elif names[-1] in ("var", "scale"):
            new = rng.uniform(0.5, 1.5, leaf.shape)
        else:
            new = rng.normal(0, 0.2, leaf.shape)
        return new.astype(np.float32)

    return jax.tree_util.tree_map_with_path(value, shapes)


def variables(arrays):
    """`{path: array}` in PyTorch's layout -> `{"params": ..., "batch_stats": ...}`."""
    tree = {"params": {}, "batch_stats": {}}
    for path, array in arrays.items():
        *scopes, leaf = path.split(".")
        if leaf == "num_batches_tracked":
            continue
        array, collection = np.asarray(array), "params"
        if leaf in ("running_mean", "running_var"):
            leaf, collection = leaf.removeprefix("running_"), "batch_stats"
        elif leaf == "weight":
            leaf = {4: "kernel", 2: "kernel", 1: "scale"}[array.ndim]
            order = {4: (2, 3, 1, 0), 2: (1, 0), 1: (0,)}[array.ndim]
            array = array.transpose(order)
        node = tree[collection]
        for scope in scopes:
            node = node.setdefault(scope, {})
        node[leaf] = array
    return {collection: node for collection, node in tree.items() if node}
