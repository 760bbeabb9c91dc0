"""Stanford Online Products, the backbone of Seidenschwarz et al. (ICML 2021), or with its graph.

    python -m dmljax.main --config=configs/sop_graph.py --config.dataset.root=sop \\
        --config.net.weights=resnet50.safetensors
    python -m dmljax.main --config=configs/sop_graph.py:backbone_only=False ...

Expected, in percent, 512 dimensions: R@1 81.4, R@10 91.3, R@100 95.9, NMI 92.6 (README of the
official code, intra_batch). Its config for this set, and so this one, trains without the graph's
loss; `backbone_only=False` adds it, with `attention` (dot, dot_plus_one, gat, gatv2, none) and
`mlp` to choose, for which there are no published numbers. NMI of 11,316 clusters, of the best of
ten k-means starts by inertia, takes long: `--config.evaluate.clustering.only_last=True` computes it
once.

The default is the corrected form. `published=True` does what the published code does; all of these
numbers were produced with it. `held_out=0.2` chooses the epoch on held-out classes instead of
the test classes. `help(dmljax.recipes.graph)` explains both. Not run at full size here yet.
"""

from dmljax import recipes

get_config = recipes.config_function(recipes.graph, dataset="sop")
