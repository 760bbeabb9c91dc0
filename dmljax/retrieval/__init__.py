"""Exact ranks, nearest neighbors and k-means, in tiles: no array of size [queries, gallery] exists.

Arrays may be NumPy arrays, memory-mapped files or JAX arrays. Integers and half precision are
computed in float32. These arguments mean the same everywhere:

* `gallery` (and `gallery_labels`) are the items to search. Without them the embeddings search
  themselves, and an item does not rank itself.
* `similarity_fn` is `euclidean` (distance and squared distance give the same ranks) or `cosine`.
* `tile`, a multiple of 128, is the tile size of the similarities and bounds the memory. None is
  1,024, and 4,096 on accelerators. k-means takes 1,024 everywhere: its starts depend on it.
* `devices` share the queries or points. None takes all devices of this process, and one device
  if there are fewer tiles than devices.

Vectors beyond 1 GiB, and beyond a quarter of the free memory of an accelerator, do not stay on the
devices. They are sent tile by tile from memory or from a memory-mapped file, and the next tile is
read while the devices compute with the present one. Items of a class are read together, so a file
is read fastest if it is sorted by label.
"""

from dmljax.retrieval.clusters import KMeans, kmeans
from dmljax.retrieval.neighbors import k_reciprocal, nearest
from dmljax.retrieval.ranking import Ranks, mean_distance_ranks, ranks
from dmljax.retrieval.rules import SimilarityFn, cosine, euclidean
from dmljax.retrieval.tiles import stoppable

__all__ = [
    "KMeans",
    "Ranks",
    "SimilarityFn",
    "cosine",
    "euclidean",
    "k_reciprocal",
    "kmeans",
    "mean_distance_ranks",
    "nearest",
    "ranks",
    "stoppable",
]
