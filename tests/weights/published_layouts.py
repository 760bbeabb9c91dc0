"""Published layouts, written down independently of the package: names and shapes of tensors."""

import functools

import jax
import numpy as np
import weight_files as make

from dmljax import nets


def random_tensors(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}


def norm_shapes(name, width):
    leaves = ("weight", "bias", "running_mean", "running_var")
    return {f"{name}.{leaf}": (width,) for leaf in leaves}


def resnet_tensors(width=4, classes=10):
    """Torchvision's basic blocks, one per stage."""
    shapes = {"conv1.weight": (width, 3, 7, 7)} | norm_shapes("bn1", width)
    before = width
    for stage in range(4):
        now, at = width * 2**stage, f"layer{stage + 1}.0"
        shapes[f"{at}.conv1.weight"] = (now, before, 3, 3)
        shapes |= norm_shapes(f"{at}.bn1", now)
        shapes[f"{at}.conv2.weight"] = (now, now, 3, 3)
        shapes |= norm_shapes(f"{at}.bn2", now)
        if stage:
            shapes[f"{at}.downsample.0.weight"] = (now, before, 1, 1)
            shapes |= norm_shapes(f"{at}.downsample.1", now)
        before = now
    tensors = random_tensors(shapes | {"fc.weight": (classes, before), "fc.bias": (classes,)})
    return tensors | {"bn1.num_batches_tracked": np.array(7)}


def small_resnet(**keywords):
    return nets.resnet18(blocks=(1, 1, 1, 1), width=4, **keywords)


def inceptions():
    table = """3a 192 64 96 128 16 32 32
        3b 256 128 128 192 32 96 64
        4a 480 192 96 208 16 48 64
        4b 512 160 112 224 24 64 64
        4c 512 128 128 256 24 64 64
        4d 512 112 144 288 32 64 64
        4e 528 256 160 320 32 128 128
        5a 832 256 160 320 32 128 128
        5b 832 384 192 384 48 128 128"""
    for row in table.splitlines():
        name, *widths = row.split()
        yield name, *map(int, widths)


@functools.cache
def googlenet_blobs(aux=True):
    """{layer: (kernel, bias)} of bvlc_googlenet."""
    shapes = {"conv1/7x7_s2": (64, 3, 7, 7), "conv2/3x3_reduce": (64, 64, 1, 1)}
    shapes["conv2/3x3"] = (192, 64, 3, 3)
    for name, before, one, reduce3, three, reduce5, five, pool in inceptions():
        at = f"inception_{name}"
        shapes[f"{at}/1x1"] = (one, before, 1, 1)
        shapes[f"{at}/3x3_reduce"] = (reduce3, before, 1, 1)
        shapes[f"{at}/3x3"] = (three, reduce3, 3, 3)
        shapes[f"{at}/5x5_reduce"] = (reduce5, before, 1, 1)
        shapes[f"{at}/5x5"] = (five, reduce5, 5, 5)
        shapes[f"{at}/pool_proj"] = (pool, before, 1, 1)
    if aux:
        shapes["loss1/conv"] = (128, 512, 1, 1)
    shapes["loss3/classifier"] = (10, 1024)
    rng = np.random.default_rng(0)
    fill = functools.partial(rng.standard_normal, dtype=np.float32)
    return {name: [fill(shape), fill(shape[0])] for name, shape in shapes.items()}


def write_torch(tmp_path, tensors, name="file.pth"):
    (tmp_path / name).write_bytes(make.torch_file(tensors, legacy=False))
    return tmp_path / name


def count_values(tree):
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
