"""Writes proxies.npz: values and gradients of pytorch-metric-learning 2.9.0, in float64.

    python tests/golden/proxies.py

The tests only read the file. Writing it needs torch and pytorch-metric-learning.
"""

import pathlib

import numpy as np

CLASSES, CENTERS, D = 5, 3, 6
SIZE = 10  # of the memory: no multiple of the batch


def cases():
    """name -> (embeddings [b d], labels [b]); none has an absent class but the unbalanced."""
    rng = np.random.default_rng(0)
    balanced = np.repeat(np.arange(4), 3)
    centers = rng.normal(size=(CLASSES, D))
    clumped = centers[balanced] + 1e-3 * rng.normal(size=(12, D))
    order = rng.permutation(12)
    twice = np.repeat(rng.normal(size=(6, D)), 2, axis=0)
    return {
        "balanced": (rng.normal(size=(12, D)), balanced),
        "clumped": (clumped, balanced),
        "unbalanced": (rng.normal(size=(12, D)), np.array([0, 0, 0, 0, 0, 0, 0, 0, 4, 4, 4, 2])),
        "shuffled": (rng.normal(size=(12, D)), balanced[order]),
        "duplicates": (twice, np.array([0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 0, 1])),
        "one": (rng.normal(size=(1, D)), np.array([3])),
        "two": (rng.normal(size=(2, D)), np.array([1, 4])),
    }


def proxies():
    rng = np.random.default_rng(1)
    return rng.normal(size=(CLASSES, D)), rng.normal(size=(CLASSES, CENTERS, D))


def write(path):
    import torch
    from pytorch_metric_learning import losses, regularizers

    torch.set_default_dtype(torch.float64)
    plain, centered = proxies()
    size = {"num_classes": CLASSES, "embedding_size": D}
    many = {"sub_centers": CENTERS}
    builders = {
        "normalized_softmax": lambda: losses.NormalizedSoftmaxLoss(**size),
        "cosface": lambda: losses.CosFaceLoss(**size),
        "arcface": lambda: losses.ArcFaceLoss(**size),
        "arcface:margin=80.0,scale=8.0": lambda: losses.ArcFaceLoss(**size, margin=80, scale=8),
        "subcenter_arcface": lambda: losses.SubCenterArcFaceLoss(**size, **many),
        "sphereface": lambda: losses.SphereFaceLoss(**size),
        "sphereface:margin=3,scale=2.0": lambda: losses.SphereFaceLoss(**size, margin=3, scale=2),
        "large_margin_softmax": lambda: losses.LargeMarginSoftmaxLoss(**size),
        "soft_triple": lambda: losses.SoftTripleLoss(**size, centers_per_class=CENTERS),
        "proxy_anchor": lambda: losses.ProxyAnchorLoss(**size),
        "proxy_anchor:margin=0.3,alpha=8.0": lambda: losses.ProxyAnchorLoss(
            **size, margin=0.3, alpha=8
        ),
        "proxy_nca": lambda: losses.ProxyNCALoss(**size),
        "proxy_nca_pp": lambda: losses.ProxyNCALoss(**size, softmax_scale=9),
    }
    out = {}
    for case, (x, y) in cases().items():
        labels = torch.tensor(y)
        for name, build in builders.items():
            loss_fn = build()
            (weights,) = loss_fn.parameters()
            value = centered if weights.numel() == centered.size else plain
            rows = torch.tensor(value.reshape(-1, D))
            weights.data = rows.T.clone() if weights.shape[0] == D else rows.clone()
            embeddings = torch.tensor(x, requires_grad=True)
            loss = loss_fn(embeddings, labels)
            loss.backward()
            slope = weights.grad.T if weights.shape[0] == D else weights.grad
            store(out, f"{name}/{case}", loss, embeddings.grad, slope.reshape(value.shape))
        for name, regularizer in {
            "lp": regularizers.LpRegularizer(),
            "lp:p=3.0,power=2.0": regularizers.LpRegularizer(p=3, power=2),
            "zero_mean": regularizers.ZeroMeanRegularizer(),
            "center_invariant": regularizers.CenterInvariantRegularizer(),
            "regular_face": regularizers.RegularFaceRegularizer(),
        }.items():
            if name == "regular_face" and case in ("one", "duplicates"):
                continue  # itself for want of another; ties split their gradient otherwise
            embeddings = torch.tensor(x, requires_grad=True)
            loss = regularizer(embeddings)
            loss.backward()
            store(out, f"{name}/{case}", loss, embeddings.grad)
        if case != "one":  # NaN
            pair = [torch.tensor(x, requires_grad=True), torch.tensor(-0.5 * x[::-1].copy())]
            pair[1].requires_grad_()
            loss = losses.VICRegLoss()(pair[0], ref_emb=pair[1])
            loss.backward()
            store(out, f"vicreg/{case}", loss, pair[0].grad, pair[1].grad)
    weights = torch.tensor(centered.reshape(-1, D), requires_grad=True)
    loss = regularizers.SparseCentersRegularizer(CLASSES, CENTERS)(weights)
    loss.backward()
    store(out, "sparse_centers/proxies", loss, weights.grad.reshape(centered.shape))
    for name, inner in {
        "contrastive": losses.ContrastiveLoss(),
        "ntxent": losses.NTXentLoss(),
        "triplet": losses.TripletMarginLoss(),
    }.items():
        memory = losses.CrossBatchMemory(inner, embedding_size=D, memory_size=SIZE)
        values, slopes = [], []
        for x, y in steps():
            embeddings = torch.tensor(x, requires_grad=True)
            loss = memory(embeddings, torch.tensor(y))
            loss.backward()
            values.append(loss.item())
            slopes.append(embeddings.grad.numpy())
        out[f"memory/{name}/value"] = np.array(values)
        out[f"memory/{name}/0"] = np.stack(slopes).astype(np.float32)
    assert all(np.isfinite(v).all() for v in out.values())
    np.savez_compressed(path, **out)


def steps():
    """Seven batches of four for a memory of ten: it wraps around twice, inside a batch too."""
    rng = np.random.default_rng(2)
    return [(rng.normal(size=(4, D)), rng.integers(0, 3, size=4)) for _ in range(7)]


def store(out, key, value, *gradients):
    out[f"{key}/value"] = np.array(value.item())
    for i, gradient in enumerate(gradients):
        out[f"{key}/{i}"] = gradient.numpy().astype(np.float32)


if __name__ == "__main__":
    write(pathlib.Path(__file__).with_suffix(".npz"))
