"""Writes the gallery of losses: `docs/gallery.md` and its pictures, `docs/_gallery/*.svg`.

    python docs/make_gallery.py

Summary and reference of a loss come from its docstring. Formula, advice and the comparison with
pytorch-metric-learning come from `ENTRIES`. A loss without an entry has only its docstring.
The build of the site runs this; what is written is not committed.
"""

from __future__ import annotations

import functools
import inspect
import pathlib
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dmljax import losses

HERE = pathlib.Path(__file__).parent
POINTS = 201
jax.config.update("jax_disable_most_optimizations", True)  # compiling takes longer than computing


class Entry(NamedTuple):
    formula: str  # LaTeX
    use: str  # when to use the loss
    peer: str  # what pytorch-metric-learning has, and what differs
    keywords: dict = {}  # noqa: RUF012  arguments without a default


class Group(NamedTuple):
    title: str
    module: object
    notation: str
    picture: str  # one sentence on what is drawn
    axis: str
    curves: Callable  # (loss_fn, name) -> {label: (function of a scalar, low, high)}


ENTRIES = {
    # Pairs
    "contrastive": Entry(
        r"\frac{1}{|P|}\sum_P [d - m_+]_+^{\,q} + \frac{1}{|N|}\sum_N [m_- - d]_+^{\,q}",
        "The simplest loss. Use it to learn distances with a fixed scale, for instance for a "
        "threshold, or with a memory.",
        "`ContrastiveLoss`, the same numbers. `power` is an exponent here and there.",
    ),
    "snr_contrastive": Entry(
        r"[d - m_+]_+ \;\text{and}\; [m_- - d]_+, \qquad d = \frac{\mathrm{var}(x - y)}"
        r"{\mathrm{var}(x)}",
        "A variant of `contrastive` for embeddings whose variance differs between rows.",
        "`SignalToNoiseRatioContrastiveLoss`, the same numbers.",
    ),
    "multi_similarity": Entry(
        r"\frac{1}{\alpha}\log\Big(1 + \sum_P e^{-\alpha (s - \lambda)}\Big) + "
        r"\frac{1}{\beta}\log\Big(1 + \sum_N e^{\beta (s - \lambda)}\Big)",
        "A strong default for retrieval with class-balanced batches, together with "
        "`miners.multi_similarity`.",
        "`MultiSimilarityLoss`, the same numbers; $\\lambda$ is `base`.",
    ),
    "ntxent": Entry(
        r"-\log\frac{e^{s_p / \tau}}{e^{s_p / \tau} + \sum_N e^{s_n / \tau}}",
        "Self-supervised learning with two views of each image, and large batches or a memory.",
        "`NTXentLoss`. There the loss stops at 87.3, where its gradient vanishes; here it has no "
        "limit.",
    ),
    "supcon": Entry(
        r"-\frac{1}{|P|}\sum_P \log\frac{e^{s_p / \tau}}{\sum_{P \cup N} e^{s_j / \tau}}",
        "Pretraining with labels, where batches have many images per class.",
        "`SupConLoss`, the same numbers.",
    ),
    "circle": Entry(
        r"\log\Big(1 + \sum_P e^{-\gamma [1 + m - s]_+ (s - 1 + m)} "
        r"\sum_N e^{\gamma [s + m]_+ (s - m)}\Big)",
        "An alternative to `multi_similarity` that concentrates on the pairs that are far from "
        "their optimum.",
        "`CircleLoss`, the same numbers.",
    ),
    "lifted_structure": Entry(
        r"\frac{1}{2}\Big[d_{ap} - m_+ + \log\Big(\sum_{N_a} e^{m_- - d_{an}} + "
        r"\sum_{N_p} e^{m_- - d_{pn}}\Big)\Big]_+^2",
        "Mostly for comparison with papers of its time.",
        "`LiftedStructureLoss`. With references, that one looks up the negatives of a reference "
        "under the wrong anchor.",
    ),
    "generalized_lifted_structure": Entry(
        r"\Big[\log\sum_P e^{d - m_+} + \log\sum_N e^{m_- - d}\Big]_+",
        "A smooth form of the batch-hard triplet loss.",
        "`GeneralizedLiftedStructureLoss`, the same numbers.",
    ),
    "n_pairs": Entry(
        r"-\log\frac{e^{-d_{ii}}}{\sum_j e^{-d_{ji}}}",
        "Batches of two images per class. With more images, `ntxent` uses all of them.",
        "`NPairsLoss`, the same numbers. The paper's form, dot products and `l2_weight`, is an "
        "argument here.",
    ),
    "nca": Entry(
        r"-\log\frac{\sum_P e^{-c\,d^2}}{\sum_{P \cup N} e^{-c\,d^2}}",
        "When embeddings are used by a nearest-neighbor classifier.",
        "`NCALoss`. There, anchors whose softmax underflows are dropped, and a batch without "
        "positives gives NaN; here it gives 0.",
    ),
    "tuplet_margin": Entry(
        r"\log\Big(1 + \sum_N e^{s (\cos\theta_{an} - \cos(\theta_{ap} - \beta))}\Big)",
        "When a few bad positives of a class dominate other losses: the angle eases them. Add "
        "`intra_pair_variance`.",
        "`TupletMarginLoss`. There, a positive equal to its anchor has a NaN gradient.",
    ),
    "intra_pair_variance": Entry(
        r"\frac{1}{|P|}\sum_P [(1 - \epsilon)\,\mu_P - s]_+^2 + "
        r"\frac{1}{|N|}\sum_N [s - (1 + \epsilon)\,\mu_N]_+^2",
        "Added to `tuplet_margin` or another loss, to narrow the distributions of cosines.",
        "`IntraPairVarianceLoss`, the same numbers.",
    ),
    "threshold_consistent_margin": Entry(
        r"w_+ \operatorname{mean}_{s \le m_+}(m_+ - s) + w_- \operatorname{mean}_{s \ge m_-}"
        r"(s - m_-)",
        "Added to another loss, when one threshold on the cosine decides for all classes.",
        "`ThresholdConsistentMarginLoss`. With references, that one reads the anchors instead.",
    ),
    "ranked_list": Entry(
        r"(1 - \lambda) \frac{\sum_P w_+ [d - (\alpha - m)]_+}{\sum_P w_+} + "
        r"\lambda \frac{\sum_N w_- [\alpha - d]_+}{\sum_N w_-}, \qquad w_\pm = "
        r"e^{T_\pm [\cdot]_+}",
        "When classes vary inside: positives need only be in a ball, not in a point.",
        "`RankedListLoss`. There, a negative at distance 0 has weight 0; here it has the largest.",
        {"margin": 0.4, "negative_temperature": 3.0},
    ),
    # Triplets
    "triplet": Entry(
        r"[d_{ap} - d_{an} + m]_+",
        "Small, fine-grained data, with a miner such as `miners.semihard_triplets`. "
        "Watch `losses.stats` for a collapse.",
        "`TripletMarginLoss`, the same numbers.",
    ),
    "smooth_triplet": Entry(
        r"\log(1 + e^{d_{ap} - d_{an} + m})",
        "Instead of `triplet` where its loss becomes 0 too early, mostly with `miners.batch_hard`.",
        "`TripletMarginLoss(smooth_loss=True)`, the same numbers.",
    ),
    "swap_triplet": Entry(
        r"[d_{ap} - \min(d_{an}, d_{pn}) + m]_+",
        "Instead of `triplet` for patches and local descriptors, with few triplets per batch.",
        "`TripletMarginLoss(swap=True)`. With references, that one looks up $d_{pn}$ under the "
        "wrong rows.",
    ),
    "margin": Entry(
        r"[d_{ap} - \beta + m]_+ + [\beta - d_{an} + m]_+",
        "With `miners.distance_weighted`, and where a learned boundary, per class if wanted, "
        "helps.",
        "`MarginLoss`, the same numbers. A learned `beta` is an argument, trained with your "
        "parameters.",
    ),
    "semihard_triplet": Entry(
        r"[d_{ap}^2 - d_{an}^2 + m]_+, \qquad n = \arg\min_{n:\, d_{an} > d_{ap}} d_{an}",
        "The loss of the DVML system; elsewhere prefer `triplet` with a miner.",
        "None. It is TensorFlow Addons' `triplet_semihard_loss`.",
    ),
    "angular": Entry(
        r"\log\Big(1 + \sum_N e^{4 \tan^2\!\alpha\,(a + p)^\top n - 2 (1 + \tan^2\!\alpha)\,"
        r"a^\top p}\Big)",
        "Added to another loss: it reads the shape of triangles, not their size.",
        "`AngularLoss`. That one leaves negatives unnormalized; here all three are unit vectors.",
    ),
    # Ranking
    "fast_ap": Entry(
        r"1 - \frac{1}{|P|}\sum_l \frac{h^+_l H^+_l}{H_l}",
        "Large batches with many positives per query, when average precision counts.",
        "`FastAPLoss`, the same numbers.",
    ),
    "smooth_ap": Entry(
        r"1 - \frac{1}{|P|}\sum_{p \in P} \frac{1 + \sum_{P} \sigma((s_j - s_p)/\tau)}"
        r"{1 + \sum_{P \cup N} \sigma((s_j - s_p)/\tau)}",
        "The same, with gradients only around the ranks of the positives.",
        "`SmoothAPLoss`. That one groups rows wrongly unless there are as many classes as images "
        "per class, and needs sorted labels.",
    ),
    "recall_at_k": Entry(
        r"1 - \frac{1}{|K|}\sum_{k \in K} \frac{\min\big(k, \sum_P \sigma((k - r_p)/\tau_1)\big)}"
        r"{\min(k, |P|)}, \qquad r_p = 1 + \sum_{j \ne p} \sigma((s_j - s_p)/\tau_2)",
        "Very large batches, embedded in chunks, when recall at k counts.",
        "None.",
    ),
    "pnp": Entry(
        r"\frac{1}{|P|}\sum_{p \in P} f(R_p), \qquad R_p = \sum_N \sigma((s_n - s_p)/\tau)",
        "Like `smooth_ap`, with a choice of how much far-off positives count.",
        "`PNPLoss`, the same numbers; `anneal` is `temperature` here.",
    ),
    "histogram": Entry(
        r"\sum_r h^-_r \sum_{q \le r} h^+_q",
        "Without a margin or temperature to choose. It needs many pairs per batch.",
        "`HistogramLoss`. That one is out of range on duplicates.",
    ),
    # Proxies
    "normalized_softmax": Entry(
        r"-\log\frac{e^{s_y / \tau}}{\sum_c e^{s_c / \tau}}",
        "A simple and strong baseline for retrieval. Classification that yields good embeddings.",
        "`NormalizedSoftmaxLoss`, the same numbers.",
    ),
    "cosface": Entry(
        r"-\log\frac{e^{\gamma (s_y - m)}}{e^{\gamma (s_y - m)} + \sum_{c \ne y} e^{\gamma s_c}}",
        "Faces and other sets with many classes. Easier to train than `arcface`.",
        "`CosFaceLoss`, the same numbers.",
    ),
    "arcface": Entry(
        r"-\log\frac{e^{\gamma \cos(\theta_y + m)}}{e^{\gamma \cos(\theta_y + m)} + "
        r"\sum_{c \ne y} e^{\gamma \cos\theta_c}}",
        "Faces and other sets with many classes and clean labels.",
        "`ArcFaceLoss`. There, an embedding parallel to its class weight has a NaN gradient.",
    ),
    "subcenter_arcface": Entry(
        r"\text{arcface with}\quad \cos\theta_c = \max_k \cos\theta_{ck}",
        "Many classes with noisy labels or several appearances.",
        "`SubCenterArcFaceLoss`, the same numbers, without NaN gradients.",
    ),
    "sphereface": Entry(
        r"-\log\frac{e^{\gamma |x| \psi(\theta_y)}}{e^{\gamma |x| \psi(\theta_y)} + "
        r"\sum_{c \ne y} e^{\gamma |x| \cos\theta_c}}",
        "Mostly for comparison: `cosface` and `arcface` train more easily.",
        "`SphereFaceLoss`, the same numbers.",
    ),
    "large_margin_softmax": Entry(
        r"-\log\frac{e^{\gamma |x| |w_y| \psi(\theta_y)}}{e^{\gamma |x| |w_y| \psi(\theta_y)} + "
        r"\sum_{c \ne y} e^{\gamma |x| |w_c| \cos\theta_c}}",
        "Mostly for comparison: `cosface` and `arcface` train more easily.",
        "`LargeMarginSoftmaxLoss`, the same numbers.",
    ),
    "soft_triple": Entry(
        r"-\log\frac{e^{\lambda (s_y - m)}}{e^{\lambda (s_y - m)} + \sum_{c \ne y} e^{\lambda "
        r"s_c}}, \qquad s_c = \sum_k \frac{e^{s_{ck} / \gamma}}{\sum_l e^{s_{cl} / \gamma}} s_{ck}",
        "Classes with several modes. Add 0.2 times `sparse_centers`.",
        "`SoftTripleLoss`, the same numbers; the regularizer is a function of its own.",
    ),
    "proxy_anchor": Entry(
        r"\frac{1}{|C^+|}\sum_{c \in C^+} \log\Big(1 + \sum_{y = c} e^{-\alpha (s - m)}\Big) + "
        r"\frac{1}{|C|}\sum_c \log\Big(1 + \sum_{y \ne c} e^{\alpha (s + m)}\Big)",
        "The strongest simple baseline for retrieval. Give proxies a learning rate 100 times the "
        "net's.",
        "`ProxyAnchorLoss`, the same numbers.",
    ),
    "proxy_nca": Entry(
        r"-\log\frac{e^{-c\,d_y^2}}{\sum_j e^{-c\,d_j^2}}",
        "Mostly for comparison: `proxy_nca_pp` is better.",
        "`ProxyNCALoss`, the same numbers.",
    ),
    "proxy_nca_pp": Entry(
        r"-\log\frac{e^{-d_y^2 / \tau}}{\sum_c e^{-d_c^2 / \tau}}",
        "A strong baseline that is trained like a classifier.",
        "`ProxyNCALoss(softmax_scale=9)`, the same numbers.",
    ),
    "label_smoothed_cross_entropy": Entry(
        r"-(1 - \epsilon) \log p_y - \frac{\epsilon}{|C|}\sum_c \log p_c, \qquad p = "
        r"\operatorname{softmax}(z / \tau)",
        "Beside another loss, on the logits of a classifier. The graph system trains with it.",
        "None.",
    ),
    # Two views
    "clip": Entry(
        r"-\frac{1}{2}\Big(\log\frac{e^{s_{ii}/\tau}}{\sum_j e^{s_{ij}/\tau}} + "
        r"\log\frac{e^{s_{ii}/\tau}}{\sum_j e^{s_{ji}/\tau}}\Big)",
        "Images and text, or two views, with large batches.",
        "None with two inputs; `NTXentLoss` with labels `arange(b)` is one direction.",
    ),
    "siglip": Entry(
        r"\sum_j \log\big(1 + e^{-z_{ij} (\gamma s_{ij} + b)}\big), \qquad z_{ij} = \pm 1",
        "Images and text with batches of any size: pairs do not depend on each other.",
        "None.",
    ),
    "vicreg": Entry(
        r"\lambda \operatorname{mean}(x - y)^2 + \mu \operatorname{mean}_d [1 - \sqrt{\mathrm{var}"
        r"_d + \epsilon}]_+ + \frac{\nu}{D} \sum_{d \ne e} \mathrm{cov}_{de}^2",
        "Self-supervised learning without negatives, with embeddings of any length.",
        "`VICRegLoss`, the same numbers; a single row has a value here.",
    ),
    # Regularizers
    "lp": Entry(
        r"\|x\|_p^{\,q}",
        "Keeps the lengths of embeddings bounded in losses that ignore them.",
        "`LpRegularizer`, the same numbers.",
    ),
    "zero_mean": Entry(
        r"\Big|\sum_d x_d\Big|",
        "Keeps embeddings balanced around 0, for instance before they are binarized.",
        "`ZeroMeanRegularizer`, the same numbers.",
    ),
    "center_invariant": Entry(
        r"\tfrac{1}{4}\big(\|x\|^2 - \operatorname{mean}\|x\|^2\big)^2",
        "Proxies of unbalanced classes, in losses that read the lengths of proxies.",
        "`CenterInvariantRegularizer`, the same numbers.",
    ),
    "regular_face": Entry(
        r"\max_{j \ne i} \cos(x_i, x_j)",
        "Spreads proxies in addition to a proxy loss.",
        "`RegularFaceRegularizer`. That one compares a single vector with itself; here it has "
        "loss 0.",
    ),
    "sparse_centers": Entry(
        r"\tfrac{1}{2}\,|w_i - w_j|",
        "With `soft_triple`: merges centers that a class does not need.",
        "`SparseCentersRegularizer`, the same numbers.",
    ),
}


# Public names of `losses` that are no losses of a batch.
def _at(cosines) -> jax.Array:
    """[n n + 1]: unit vectors with these cosines to the first axis, orthogonal apart from that."""
    cosines = jnp.stack([jnp.asarray(c, jnp.float32) for c in cosines])
    return jnp.concatenate([cosines[:, None], jnp.diag(jnp.sqrt(1 - cosines**2))], axis=1)


def _anchor_curves(positives, negatives):
    """Curves of one anchor with these cosines; the first positive or negative moves."""

    def loss(loss_fn, name, positives, negatives):
        references = _at([*positives, *negatives])
        labels = np.array([0] * len(positives) + [1] * len(negatives))
        anchors = jnp.eye(1, references.shape[1])
        if name == "n_pairs":  # a class needs an anchor and a positive of its own
            anchors = jnp.eye(references.shape[1])[jnp.array([0, references.shape[1] - 1])]
        keywords = {"references": references, "reference_labels": labels}
        return loss_fn(anchors, np.arange(len(anchors)), **keywords)

    def curves(loss_fn, name):
        return {
            "positive": (lambda s: loss(loss_fn, name, [s, *positives[1:]], negatives), -1, 1),
            "negative": (lambda s: loss(loss_fn, name, positives, [s, *negatives[1:]]), -1, 1),
        }

    return curves


def _ranking_curves(loss_fn, name):
    curves = _anchor_curves((0.0, 0.45, 0.6), (-0.6, -0.3, 0.0, 0.2, 0.4, 0.55))(loss_fn, name)
    return {"positive": curves["positive"]}


def _proxy_curves(loss_fn, name):
    """One embedding: its cosine with the proxy of its class moves, all others are 0."""
    if name == "label_smoothed_cross_entropy":
        logits = lambda z: jnp.zeros((1, 5)).at[0, 0].set(z)  # noqa: E731
        return {"logit": (lambda z: loss_fn(logits(z), np.zeros(1, int)), -5, 5)}
    proxies = jnp.eye(10)
    proxies = proxies.reshape(5, 2, 10) if name in ("soft_triple", "subcenter_arcface") else proxies
    proxies = proxies if proxies.ndim == 3 else proxies[:5]
    # The last axis belongs to no first proxy, so the other cosines do not change.
    axes = jnp.eye(11)[jnp.array([0, 10])]
    proxies = jnp.pad(proxies, [(0, 0)] * (proxies.ndim - 1) + [(0, 1)])

    def loss(s):
        embedding = jnp.stack([s, jnp.sqrt(1 - s**2)]) @ axes
        return loss_fn(embedding[None, :], np.zeros(1, int), proxies)

    return {"proxy of the class": (loss, -1, 1)}


def _view_curves(loss_fn, name):
    """Four orthogonal rows, equal in both views; the first row of the second view moves away."""

    def loss(s):
        x = jnp.eye(4, 5)
        moved = s * x[0] + jnp.sqrt(1 - s**2) * jnp.eye(5)[4]
        return loss_fn(x, x.at[0].set(moved))

    return {"match": (loss, -1, 1)}


def _vector_curves(loss_fn, name):
    """Two vectors: the length of one changes, or the cosine between them."""
    if name in ("regular_face", "sparse_centers"):
        vectors = lambda s: jnp.concatenate([jnp.eye(1, 2), _at([s])])  # noqa: E731
        shape = (1, 2, 2) if name == "sparse_centers" else (2, 2)
        return {"cosine of two vectors": (lambda s: loss_fn(vectors(s).reshape(shape)), -1, 1)}
    return {"length of a vector": (lambda r: loss_fn(jnp.eye(2).at[0, 0].set(r)), 0, 2)}


_PAIR_PICTURE = (
    "An anchor has two positives with cosine 0.6 and two negatives with cosine 0.2. The curves "
    "show the loss, and its derivative, while one positive (blue) or one negative (orange) moves "
    "and the others stay. A mean over active entries jumps where their number changes."
)
GROUPS = (
    Group(
        "Losses of pairs",
        losses.pairs,
        "$s$ is the cosine and $d$ the distance of a pair, $P$ and $N$ are the positives and "
        "negatives of an anchor, and $[x]_+ = \\max(x, 0)$.",
        _PAIR_PICTURE,
        "cosine with the anchor",
        _anchor_curves((0.6, 0.6), (0.2, 0.2)),
    ),
    Group(
        "Losses of triplets",
        losses.triplets,
        "$d_{ap}$, $d_{an}$ and $d_{pn}$ are the distances in a triplet of anchor, positive and "
        "negative.",
        _PAIR_PICTURE,
        "cosine with the anchor",
        _anchor_curves((0.6, 0.6), (0.2, 0.2)),
    ),
    Group(
        "Losses that smooth a ranking metric",
        losses.ranking,
        "$s$ is the cosine with the query, $P$ and $N$ are its positives and negatives, $\\sigma$ "
        "is the sigmoid, $h$ a soft histogram and $H$ its cumulative sum.",
        "A query has three positives, two of them fixed, and six negatives with cosines from -0.6 "
        "to 0.55. The curve shows the loss, and its derivative, while one positive moves through "
        "the ranking.",
        "cosine with the query",
        _ranking_curves,
    ),
    Group(
        "Losses with proxies",
        losses.proxies,
        "$s_c$, $\\theta_c$ and $d_c$ are cosine, angle and distance of an embedding $x$ and the "
        "proxy $w_c$ of class $c$; $y$ is the embedding's class.",
        "There are five classes. The curve shows the loss of one embedding, and its derivative, "
        "while its cosine with the proxy of its class moves and its cosines with the other "
        "proxies stay 0; for `label_smoothed_cross_entropy`, the same with logits.",
        "cosine with the proxy of the class",
        _proxy_curves,
    ),
    Group(
        "Losses of two views",
        losses.two_views,
        "$s_{ij}$ is the cosine of row $i$ of one view and row $j$ of the other.",
        "Both views have the same four orthogonal rows. The curve shows the loss, and its "
        "derivative, while one row of the second view moves away from its match.",
        "cosine with the match",
        _view_curves,
    ),
    Group(
        "Regularizers",
        losses.regularizers,
        "They are added to a loss. $x$ is an embedding or a proxy, $w$ a proxy of unit length.",
        "There are two vectors. The curve shows the penalty, and its derivative, while one changes "
        "its length, or, where only directions count, while the cosine between the two moves.",
        "",
        _vector_curves,
    ),
)


def values_and_slopes(group: Group, name: str) -> dict[str, tuple[np.ndarray, ...]]:
    """{label: (positions, values, derivatives)} of a loss, as its picture shows them."""
    loss_fn = functools.partial(getattr(losses, name), **ENTRIES[name].keywords)
    curves = {}
    for label, (function, low, high) in group.curves(loss_fn, name).items():
        positions = np.linspace(low, high, POINTS)[1:-1].astype(np.float32)
        compute = jax.jit(jax.vmap(jax.value_and_grad(function)))
        curves[label] = (positions, *map(np.asarray, compute(positions)))
    return curves


def draw(group: Group, name: str, path: pathlib.Path) -> None:
    """Draws the value and the derivative of a loss, side by side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    # Fixed ids, no date, and text as text: the same picture is the same small file.
    plt.rcParams.update({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 8})
    figure, (left, right) = plt.subplots(1, 2, figsize=(6, 1.9), layout="constrained")
    for label, (positions, values, slopes) in values_and_slopes(group, name).items():
        left.plot(positions, values, label=label)
        right.plot(positions, slopes)
    left.set_title("value")
    right.set_title("derivative")
    for axes in (left, right):
        axes.set_xlabel(group.axis or next(iter(group.curves(None, name))))
        axes.grid(alpha=0.3)
    low, high = right.get_ylim()
    if high - low < 1e-3:  # rounding errors of a constant
        right.set_ylim(low - 0.5, high + 0.5)
    if len(left.lines) > 1:
        left.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def summary_and_reference(name: str) -> tuple[str, str]:
    """The first line of a docstring, and its paragraph "Reference: ..." with links to arXiv."""
    paragraphs = (inspect.getdoc(getattr(losses, name)) or "").split("\n\n")
    references = [p for p in paragraphs if p.startswith("Reference: ")]
    reference = " ".join(references[0].split()).removeprefix("Reference: ") if references else ""
    link = r"[arXiv:\1](https://arxiv.org/abs/\1)"
    return paragraphs[0], re.sub(r"arXiv:(\d+\.\d+)", link, reference)


def page() -> str:
    """The text of the gallery, as Markdown."""
    lines = [
        "# Gallery of losses",
        "",
        "Every loss is a function of `dmljax.losses`; its docstring has all arguments and an "
        "example. Pictures show the loss with its default arguments. For a first try, take "
        "`proxy_anchor` or `multi_similarity` for retrieval of classes, `arcface` for faces, and "
        "`ntxent` or `clip` for pairs of views.",
    ]
    for group in GROUPS:
        lines += ["", f"## {group.title}", "", group.notation, "", f"**Pictures.** {group.picture}"]
        for name in group.module.__all__:
            entry = ENTRIES.get(name)
            summary, reference = summary_and_reference(name)
            lines += ["", f"### {name}", "", summary, ""]
            if entry is not None:
                lines += ["$$", entry.formula, "$$", ""]
                lines += [f"![value and derivative of {name}](_gallery/{name}.svg)", ""]
                lines += [f"**When to use it.** {entry.use}", ""]
            if reference:
                lines += [f"**Reference.** {reference}", ""]
            if entry is not None:
                lines += [f"**pytorch-metric-learning.** {entry.peer}"]
    return "\n".join(lines) + "\n"


def main() -> None:
    folder = HERE / "_gallery"
    folder.mkdir(exist_ok=True)
    for group in GROUPS:
        for name in group.module.__all__:
            if name in ENTRIES:
                draw(group, name, folder / f"{name}.svg")
    (HERE / "gallery.md").write_text(page())
    print(f"{len(ENTRIES)} losses in {HERE / 'gallery.md'}")


if __name__ == "__main__":
    main()
