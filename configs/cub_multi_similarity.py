"""CUB-200-2011 with the multi-similarity loss (Wang et al., CVPR 2019).

    python -m dmljax.main --config=configs/cub_multi_similarity.py --config.dataset.root=cub200 \\
        --config.net.weights=bn_inception.safetensors

Expected, in percent, 512 dimensions (README of the official code, research-ms-loss):

    R@1   R@2   R@4   R@8   R@16  R@32
    65.7  77.0  86.3  91.2  95.0  97.3

The form is the faithful one: `help(dmljax.recipes.multi_similarity)`. Not run at full size
here yet.
"""

from dmljax import recipes

get_config = recipes.config_function(recipes.multi_similarity, dataset="cub200")
