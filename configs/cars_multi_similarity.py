"""Cars196 with the multi-similarity loss (Wang et al., CVPR 2019).

    python -m dmljax.main --config=configs/cars_multi_similarity.py --config.dataset.root=cars196 \\
        --config.net.weights=bn_inception.safetensors

Expected, in percent, 512 dimensions: R@1 84.1, which later collections of results
quote from the paper. The other scores of its row could not be checked here.

The official code has a config for CUB-200-2011 alone. This one keeps that faithful
form, with another length: `help(dmljax.recipes.multi_similarity)`. Not run at full size here yet.
"""

from dmljax import recipes

get_config = recipes.config_function(recipes.multi_similarity, dataset="cars196")
