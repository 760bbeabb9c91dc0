"""Writes pairs.npz: what pytorch-metric-learning 2.9.0 gives for the pair losses, in float64.

pip install -e '.[bench]' && python tests/golden/pairs.py
"""

import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

from cases import cases, references  # noqa: E402

# our loss -> (peer's class, our keywords, peer's keywords)
PEERS = {
    "contrastive": ("ContrastiveLoss", {}, {}),
    "contrastive margins": (
        "ContrastiveLoss",
        {"pos_margin": 0.3, "neg_margin": 1.2},
        {"pos_margin": 0.3, "neg_margin": 1.2},
    ),
    "snr_contrastive": ("SignalToNoiseRatioContrastiveLoss", {}, {}),
    "triplet": ("TripletMarginLoss", {}, {}),
    "swap_triplet": ("TripletMarginLoss", {}, {"swap": True}),
    "smooth_triplet": ("TripletMarginLoss", {}, {"smooth_loss": True}),
    "triplet wide": ("TripletMarginLoss", {"margin": 0.7}, {"margin": 0.7}),
    "multi_similarity": ("MultiSimilarityLoss", {}, {}),
    "ntxent": ("NTXentLoss", {}, {}),
    "supcon": ("SupConLoss", {}, {}),
    "circle": ("CircleLoss", {}, {}),
    "margin": ("MarginLoss", {}, {}),
    "lifted_structure": ("LiftedStructureLoss", {}, {}),
    "generalized_lifted_structure": ("GeneralizedLiftedStructureLoss", {}, {}),
    "n_pairs": ("NPairsLoss", {}, {}),
    "nca": ("NCALoss", {}, {}),
    "angular": ("AngularLoss", {}, {}),
    "tuplet_margin": ("TupletMarginLoss", {}, {}),
    "intra_pair_variance": ("IntraPairVarianceLoss", {}, {}),
    "threshold_consistent_margin": ("ThresholdConsistentMarginLoss", {}, {}),
    "ranked_list": (
        "RankedListLoss",
        {"margin": 0.4, "negative_temperature": 3.0},
        {"margin": 0.4, "Tn": 3.0},
    ),
}
NO_REFERENCES = {"n_pairs", "ranked_list"}  # the peer refuses them


def peer(name: str, embeddings, labels, reference=None):
    """(value, gradient of embeddings, gradient of references or None) of the peer."""
    import pytorch_metric_learning.losses as peers
    import torch

    kind, _, keywords = PEERS[name]
    loss = getattr(peers, kind)(**keywords)
    # The peer's angular loss leaves negatives as they are; the paper's vectors are unit.
    unit = torch.nn.functional.normalize if name == "angular" else (lambda x: x)
    x = torch.tensor(embeddings, requires_grad=True)
    if reference is None:
        value = loss(unit(x), torch.tensor(labels))
        other = None
    else:
        other = torch.tensor(reference[0], requires_grad=True)
        value = loss(
            unit(x),
            torch.tensor(labels),
            ref_emb=unit(other),
            ref_labels=torch.tensor(reference[1]),
        )
    if value.requires_grad:
        value.backward()
    gradient = lambda t: np.zeros(t.shape) if t.grad is None else t.grad.numpy()  # noqa: E731
    return float(value.detach()), gradient(x), None if other is None else gradient(other)


def collect() -> dict[str, np.ndarray]:
    arrays = {}
    for name in PEERS:
        runs = {case: (*batch, None) for case, batch in cases().items()}
        if name not in NO_REFERENCES:
            runs["references"] = (*cases()["balanced"], references())
        for case, (embeddings, labels, reference) in runs.items():
            value, dx, dy = peer(name, embeddings, labels, reference)
            arrays[f"{name}/{case}/value"] = np.float64(value)
            arrays[f"{name}/{case}/dx"] = dx.astype(np.float32)
            if dy is not None:
                arrays[f"{name}/{case}/dy"] = dy.astype(np.float32)
    return arrays


if __name__ == "__main__":
    np.savez_compressed(HERE / "pairs.npz", **collect())
