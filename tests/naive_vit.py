"""A small vision transformer with prompts, as a loop over its blocks in numpy."""

import math

import numpy as np

HEADS, WIDTH = 2, 16


def _norm(x, params):
    centered = x - x.mean(-1, keepdims=True)
    deviation = np.sqrt(x.var(-1, keepdims=True) + 1e-6)
    return centered / deviation * np.asarray(params["scale"]) + np.asarray(params["bias"])


def _dense(x, params):
    return x @ np.asarray(params["kernel"]) + np.asarray(params["bias"])


def _gelu(x):
    return x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


def _block(x, params):
    """One image `[n d]`."""
    qkv = _dense(_norm(x, params["norm1"]), params["attn"]["qkv"])
    heads = []
    for head in range(HEADS):
        size = WIDTH // HEADS
        q, k, v = (
            qkv[:, i * WIDTH + head * size : i * WIDTH + (head + 1) * size] for i in range(3)
        )
        scores = np.exp(q @ k.T / math.sqrt(size))
        heads.append(scores / scores.sum(-1, keepdims=True) @ v)
    x = x + _dense(np.concatenate(heads, axis=1), params["attn"]["proj"])
    hidden = _gelu(_dense(_norm(x, params["norm2"]), params["mlp"]["fc1"]))
    return x + _dense(hidden, params["mlp"]["fc2"])


def class_token(image, params, prompts, registers=0):
    """The class token after the last norm; block i reads `prompts[i]`, or what is left of them."""
    kernel = np.asarray(params["patch_embed"]["proj"]["kernel"]).reshape(-1, WIDTH)
    patches = [
        image[y : y + 4, x : x + 4].reshape(-1) @ kernel for y in (0, 4, 8) for x in (0, 4, 8)
    ]
    patches = np.stack(patches) + np.asarray(params["patch_embed"]["proj"]["bias"])
    positions = np.asarray(params["pos_embed"])[0]
    tokens = [np.asarray(params["cls_token"])[0] + positions[:1]]
    tokens += [np.asarray(params["reg_token"])[0]] if registers else []
    first, last = np.concatenate(tokens), patches + positions[1:]
    between = prompts[0]
    for i in range(3):
        between = prompts[i] if i < len(prompts) else between
        x = _block(np.concatenate((first, between, last)), params["blocks"][str(i)])
        first, between, last = np.split(x, (len(first), len(first) + len(between)))
    return _norm(first[:1], params["norm"])[0]
