"""In-shop Clothes by attention over the batch (Seidenschwarz et al., ICML 2021).

    python -m dmljax.main --config=configs/inshop_graph.py --config.dataset.root=inshop \\
        --config.net.weights=resnet50.safetensors
    python -m dmljax.main --config=configs/inshop_graph.py:attention=dot_plus_one,published=True ...

Expected, in percent, 512 dimensions: R@1 92.8, R@10 98.5, R@20 99.1, R@40 99.2 (README of the
official code, intra_batch, whose attention is dot_plus_one; the code reports R@30, not R@40).
`attention` (dot, dot_plus_one, gat, gatv2, none), `mlp` and `backbone_only` are the ablations of
`cub_graph.py`, for which there are no published numbers here.

The default is the corrected form. `published=True` does what the published code does; all of these
numbers were produced with it. `held_out=0.2` chooses the epoch on held-out classes instead of
the test classes. `help(dmljax.recipes.graph)` explains both. Not run at full size here yet.
"""

from dmljax import recipes

get_config = recipes.config_function(recipes.graph, dataset="inshop")
