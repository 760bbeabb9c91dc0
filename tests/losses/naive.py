"""Pair losses as plain loops over anchors, positives and negatives, in numpy float64.

Each function gets cosines `s [b n]`, distances `d [b n]`, and for every anchor the lists `P[i]` of
its positives and `N[i]` of its negatives.
"""

import numpy as np

relu = lambda x: max(x, 0.0)  # noqa: E731
softplus = lambda x: np.logaddexp(0, x)  # noqa: E731
lse = lambda xs: np.logaddexp.reduce(xs) if len(xs) else 0.0  # noqa: E731
mean = lambda xs: float(np.mean(xs)) if len(xs) else 0.0  # noqa: E731
active = lambda xs: mean([x for x in xs if x > 0])  # noqa: E731


def unit(x):
    norms = np.linalg.norm(x, axis=1, keepdims=True)
    return x / np.where(norms > 0, norms, 1)


def euclidean(x, y):
    return np.sqrt(((x[:, None] - y[None]) ** 2).sum(-1))


def measures(x, y):
    x, y = unit(x), unit(y)
    return x @ y.T, euclidean(x, y)


def pairs_of(lists):
    return [(i, j) for i, row in enumerate(lists) for j in row]


def contrastive(
    s, d, P, N, *, pos_margin=0.0, neg_margin=1.0, power=1, pos_weight=1, neg_weight=1, **_
):
    pull = active([relu(d[i, p] - pos_margin) ** power for i, p in pairs_of(P)])
    push = active([relu(neg_margin - d[i, n]) ** power for i, n in pairs_of(N)])
    return pos_weight * pull + neg_weight * push


def snr_contrastive(s, d, P, N, *, x, y, pos_margin=0.0, neg_margin=1.0, **_):
    x, y = unit(x), unit(y)
    ratio = lambda i, j: np.var(x[i] - y[j], ddof=1) / np.var(x[i], ddof=1)  # noqa: E731
    return active([relu(ratio(i, p) - pos_margin) for i, p in pairs_of(P)]) + active(
        [relu(neg_margin - ratio(i, n)) for i, n in pairs_of(N)]
    )


def triplet(s, d, P, N, *, margin=0.05, **_):
    return active([relu(d[i, p] - d[i, n] + margin) for i, p in pairs_of(P) for n in N[i]])


def smooth_triplet(s, d, P, N, *, margin=0.05, **_):
    return mean([softplus(d[i, p] - d[i, n] + margin) for i, p in pairs_of(P) for n in N[i]])


def swap_triplet(s, d, P, N, *, margin=0.05, between, **_):
    return active(
        [relu(d[i, p] - min(d[i, n], between[p, n]) + margin) for i, p in pairs_of(P) for n in N[i]]
    )


def margin(s, d, P, N, *, margin=0.2, beta=1.2, **_):
    terms = []
    for i, p in pairs_of(P):
        for n in N[i]:
            terms += [relu(d[i, p] - beta + margin), relu(beta - d[i, n] + margin)]
    return active(terms)


def semihard_triplet(s, d, P, N, *, x, y, margin=1.0, **_):
    d, entries = euclidean(x, y) ** 2, []
    for i, p in pairs_of(P):
        beyond = [d[i, n] for n in N[i] if d[i, n] > d[i, p]]
        if N[i]:
            far = min(beyond) if beyond else max(d[i, n] for n in N[i])
            entries.append(relu(d[i, p] - far + margin))
    return mean(entries)


def angular(s, d, P, N, *, y, alpha=40.0, **_):
    tangent = np.tan(np.deg2rad(alpha)) ** 2
    cosines, entries = unit(y) @ unit(y).T, []
    for i, p in pairs_of(P):
        form = [4 * tangent * (s[i, n] + cosines[p, n]) - 2 * (1 + tangent) * s[i, p] for n in N[i]]
        if N[i]:
            entries.append(softplus(lse(form)))
    return mean(entries)


def multi_similarity(s, d, P, N, *, alpha=2.0, beta=50.0, base=0.5, **_):
    return mean(
        [
            np.log1p(sum(np.exp(-alpha * (s[i, p] - base)) for p in P[i])) / alpha
            + np.log1p(sum(np.exp(beta * (s[i, n] - base)) for n in N[i])) / beta
            for i in range(len(s))
        ]
    )


def ntxent(s, d, P, N, *, temperature=0.07, **_):
    t = temperature
    return mean(
        [-s[i, p] / t + lse([s[i, p] / t] + [s[i, n] / t for n in N[i]]) for i, p in pairs_of(P)]
    )


def supcon(s, d, P, N, *, temperature=0.1, **_):
    if not any(N):
        return 0.0
    s = s / temperature
    return active(
        [
            -mean([s[i, p] - lse([s[i, j] for j in P[i] + N[i]]) for p in P[i]])
            for i in range(len(s))
            if P[i]
        ]
    )


def circle(s, d, P, N, *, margin=0.4, gamma=80.0, **_):
    m = margin
    return active(
        [
            softplus(
                lse([-gamma * relu(1 + m - s[i, p]) * (s[i, p] - 1 + m) for p in P[i]])
                + lse([gamma * relu(s[i, n] + m) * (s[i, n] - m) for n in N[i]])
            )
            for i in range(len(s))
            if P[i] and N[i]
        ]
    )


def lifted_structure(s, d, P, N, *, neg_margin=1.0, pos_margin=0.0, within_batch=True, **_):
    if not any(N):
        return 0.0
    entries = []
    for i, p in pairs_of(P):
        of_anchor = [neg_margin - d[i, n] for n in N[i]]
        of_positive = (
            [neg_margin - d[p, n] for n in N[p]]
            if within_batch
            else [neg_margin - d[a, p] for a in range(len(d)) if p in N[a]]
        )
        entries.append(relu(d[i, p] - pos_margin + lse(of_anchor + of_positive)) ** 2 / 2)
    return mean(entries)


def generalized_lifted_structure(s, d, P, N, *, neg_margin=1.0, pos_margin=0.0, **_):
    return mean(
        [
            relu(
                lse([d[i, p] - pos_margin for p in P[i]])
                + lse([neg_margin - d[i, n] for n in N[i]])
            )
            for i in range(len(s))
        ]
    )


def n_pairs(s, d, P, N, *, labels, x, y, l2_weight=0.0, **_):
    anchors = {}
    for i in range(len(s)):
        if P[i]:
            anchors.setdefault(labels[i], (i, P[i][0]))
    rows = list(anchors.values())
    entries = [-s[i, p] + lse([s[i, q] for _, q in rows]) for i, p in rows]
    return mean(entries) + l2_weight / 4 * mean([x[i] @ x[i] + y[p] @ y[p] for i, p in rows])


def nca(s, d, P, N, *, scale=1.0, **_):
    z = -scale * d**2
    return mean(
        [
            lse([z[i, j] for j in P[i] + N[i]]) - lse([z[i, p] for p in P[i]])
            for i in range(len(s))
            if P[i]
        ]
    )


def tuplet_margin(s, d, P, N, *, margin=5.73, scale=64.0, **_):
    eased = lambda c: np.cos(np.arccos(np.clip(c, -1, 1)) - np.deg2rad(margin))  # noqa: E731
    return mean(
        [
            np.log1p(sum(np.exp(scale * (s[i, n] - eased(s[i, p]))) for n in N[i]))
            for i, p in pairs_of(P)
        ]
    )


def intra_pair_variance(s, d, P, N, *, pos_eps=0.01, neg_eps=0.01, **_):
    positives, negatives = [s[c] for c in pairs_of(P)], [s[c] for c in pairs_of(N)]
    pull = [relu((1 - pos_eps) * mean(positives) - v) ** 2 for v in positives]
    push = [relu(v - (1 + neg_eps) * mean(negatives)) ** 2 for v in negatives]
    return mean(pull) + mean(push)


def threshold_consistent_margin(
    s, d, P, N, *, pos_weight=1, neg_weight=1, pos_margin=0.9, neg_margin=0.5, **_
):
    pull = mean([pos_margin - s[c] for c in pairs_of(P) if s[c] <= pos_margin])
    push = mean([s[c] - neg_margin for c in pairs_of(N) if s[c] >= neg_margin])
    return pos_weight * pull + neg_weight * push


def ranked_list(
    s,
    d,
    P,
    N,
    *,
    margin,
    negative_temperature,
    imbalance=0.5,
    alpha=None,
    positive_temperature=0.0,
    columns=None,
    **_,
):
    alpha = 1 + margin / 2 if alpha is None else alpha
    wmean = lambda xs, t: (  # noqa: E731
        sum(np.exp(t * v) * v for v in xs) / (sum(np.exp(t * v) for v in xs) + 1e-5 * width)
    )
    width = d.shape[1] if columns is None else sum(columns)
    total = []
    for i in range(len(d)):
        if columns is not None and not columns[i]:
            continue
        pull = [d[i, p] - alpha + margin for p in P[i] if d[i, p] > alpha - margin]
        push = [alpha - d[i, n] for n in N[i] if d[i, n] < alpha]
        pulled = (1 - imbalance) * wmean(pull, positive_temperature)
        total.append(pulled + imbalance * wmean(push, negative_temperature))
    return mean(total)
