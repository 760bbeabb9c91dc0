"""A plain loop of torch and pytorch-metric-learning, the peer of `learning.py`."""

import math
import time

import numpy as np


def train(data: str, *, seed: int, steps: int, validation: float, seconds: float) -> dict:
    """Scores, steps and seconds of the loop; it ends after `steps`, or after `seconds` if 0."""
    import torch
    from pytorch_metric_learning import losses, miners
    from torch import nn

    from dmljax import metrics
    from dmljax.data import datasets, sampling, splits

    torch.manual_seed(seed)
    start = time.perf_counter()
    train, test = datasets.npz(path=data)
    if validation:
        train, test = splits.divide(train, train=1 - validation)

    def tensor(split):
        images = np.stack([split.records[i] for i in range(len(split))])
        return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous().float() / 255

    images, labels = tensor(train), torch.from_numpy(np.array(train.labels))
    layers, width = [], images.shape[1]
    for features, stride in zip((32, 64, 64, 128, 128), (2, 1, 2, 1, 2), strict=True):
        conv = nn.Conv2d(width, features, 3, stride, 1, bias=False)
        layers += [conv, nn.BatchNorm2d(features), nn.ReLU()]
        width = features
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 64))
    loss_fn, mine_fn = losses.MultiSimilarityLoss(), miners.MultiSimilarityMiner(0.1)
    optimizer = torch.optim.AdamW(net.parameters(), 3e-3)
    groups, rng, step = sampling.group(train.labels), torch.Generator().manual_seed(seed), 0

    def between(low, high, n):
        return low + (high - low) * torch.rand(n, generator=rng)

    def distorted(x):
        n, half = len(x), x.shape[-1] / 2
        angle, slant = between(-10, 10, n) * math.pi / 180, between(-0.15, 0.15, n)
        zoom, shift = between(0.85, 1.15, n), between(-2, 2, 2 * n).reshape(n, 2) / half
        cos, sin = torch.cos(angle) / zoom, torch.sin(angle) / zoom
        rows = [cos, cos * slant - sin, -shift[:, 0], sin, sin * slant + cos, -shift[:, 1]]
        grid = nn.functional.affine_grid(torch.stack(rows, 1).reshape(n, 2, 3), x.shape, False)
        edge = {"padding_mode": "border", "align_corners": False}
        return nn.functional.grid_sample(x, grid, **edge)

    while True:
        share = step / steps if steps else (time.perf_counter() - start) / seconds
        if share >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * 0.5 * (1 + math.cos(math.pi * share))
        rows = sampling.class_balanced(groups, classes=32, per_class=4, seed=seed, step=step)
        x = nn.functional.normalize(net(distorted(images[rows])))
        loss = loss_fn(x, labels[rows], mine_fn(x, labels[rows]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
    duration = time.perf_counter() - start
    net.eval()
    with torch.no_grad():
        embeddings = torch.cat([net(chunk) for chunk in tensor(test).split(256)])
    x = nn.functional.normalize(embeddings).numpy()
    scores = metrics.retrieval(x, test.labels, ks=(1,))
    row = {"steps": step, "seconds": duration, "first": 0.0, "loss": float(loss)}
    return row | {k: scores[k] for k in ("R@1", "MAP@R")}
