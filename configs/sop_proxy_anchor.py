"""Stanford Online Products with the Proxy-Anchor loss (Kim et al., CVPR 2020).

    python -m dmljax.main --config=configs/sop_proxy_anchor.py --config.dataset.root=sop \\
        --config.net.weights=bn_inception.safetensors

Expected, in percent, 512 dimensions (README of the official code, Proxy-Anchor-CVPR2020):

    R@1   R@10  R@100 R@1000
    79.2  90.7  96.2  98.6

These single runs are above the numbers of the paper, which used smaller batches. The form is
the faithful one: `help(dmljax.recipes.proxy_anchor)`. Not run at full size here yet.
"""

from dmljax import recipes

get_config = recipes.config_function(recipes.proxy_anchor, dataset="sop", net="bn_inception")
