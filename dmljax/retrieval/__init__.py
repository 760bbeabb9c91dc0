"""Exact ranks, nearest neighbours and k-means, in tiles: nothing of size [queries, gallery] exists.

Arrays may be numpy, memory-mapped or jax; integers and half precision are computed in float32.
Shared arguments: `gallery` (and `gallery_labels`) is what is searched; without it the embeddings
search themselves, and each item is excluded from its own ranking by its index. `similarity_fn` is
`euclidean` (squared or not: the ranks are the same) or `cosine`. `tile`, a multiple of 128, is the
side of the blocks of similarities and bounds the memory. `devices` share the queries, or points;
all of this process's unless named, and one where there are fewer tiles than devices. Vectors beyond
1 GiB are not kept on the devices but sent there tile by tile, from memory or a memory-mapped file
(best with items of one label side by side, since classes are read together).
"""

from dmljax.retrieval.apart import ranks_apart
from dmljax.retrieval.clusters import KMeans, kmeans
from dmljax.retrieval.search import Ranks, nearest, ranks
from dmljax.retrieval.tiles import Embeddings, Labels, SimilarityFn, cosine, euclidean

__all__ = [
    "Embeddings",
    "KMeans",
    "Labels",
    "Ranks",
    "SimilarityFn",
    "cosine",
    "euclidean",
    "kmeans",
    "nearest",
    "ranks",
    "ranks_apart",
]
