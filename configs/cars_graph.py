"""Cars196 by attention over the batch (Seidenschwarz et al., ICML 2021), and its ablations.

    python -m dmljax.main --config=configs/cars_graph.py --config.dataset.root=cars196 \\
        --config.net.weights=resnet50.safetensors
    python -m dmljax.main --config=configs/cars_graph.py:attention=gatv2,mlp=False ...

Expected, in percent, 512 dimensions, single runs; NMI of the best of ten k-means starts by inertia:

    row                   argument                    R@1   NMI
    baseline                                          87.1  71.7
    backbone only         backbone_only=True          86.1  67.7
    no MLP, no attention  attention=none,mlp=False    86.6  69.3
    no attention          attention=none              86.8  72.2
    no MLP                mlp=False                   87.8  72.0
    GAT                   attention=gat               87.2  73.8
    GATv2                 attention=gatv2             88.2  73.0
    GATv2, no MLP         attention=gatv2,mlp=False   87.8  71.7
    Intra-Batch           attention=dot_plus_one      88.1  74.8
    refined               test_time=True              88.61

The row "Intra-Batch" is from the README of the official code, intra_batch. The row "refined" is
`refined/R@1` with the same attention (`attention=dot_plus_one,test_time=True`). It is in the name
of a published checkpoint, which has another graph network and was scored on 8,122 of the 8,131
images. The other rows are from the graph attention study TUM_ADLCV_Deep_Metric_Learning; the NMI of
its second and third row contradicts the differences that it prints. Its slides have means over five
seeds: dot 87.48 +- 0.37 and 71.56 +- 0.83, GATv2 87.23 +- 0.38 and 72.39 +- 0.40. Most rows differ
by less than that. `heads=averaged` averages the heads of the attention; no numbers of it are
published.

The default is the corrected form. `published=True` does what the published code does; all of these
numbers were produced with it. `held_out=0.2` chooses the epoch on held-out classes instead of
the test classes. `help(dmljax.recipes.graph)` explains both. Not run at full size here yet.
"""

from dmljax import recipes

get_config = recipes.config_function(recipes.graph, dataset="cars196")
