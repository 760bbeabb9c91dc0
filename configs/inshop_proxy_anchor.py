"""In-shop Clothes with the Proxy-Anchor loss (Kim et al., CVPR 2020).

    python -m dmljax.main --config=configs/inshop_proxy_anchor.py --config.dataset.root=inshop \\
        --config.net.weights=bn_inception.safetensors

Expected, in percent, 512 dimensions (README of the official code, Proxy-Anchor-CVPR2020):

    R@1   R@10  R@20  R@30  R@40
    91.9  98.1  98.7  99.0  99.1

These single runs are above the numbers of the paper, which used smaller batches. The form is
the faithful one: `help(dmljax.recipes.proxy_anchor)`. Not run at full size here yet.
"""

from dmljax import recipes

get_config = recipes.config_function(recipes.proxy_anchor, dataset="inshop", net="bn_inception")
