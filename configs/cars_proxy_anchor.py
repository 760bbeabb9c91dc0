"""Cars196 with the Proxy-Anchor loss (Kim et al., CVPR 2020).

    python -m dmljax.main --config=configs/cars_proxy_anchor.py --config.dataset.root=cars196 \\
        --config.net.weights=bn_inception.safetensors

Expected, in percent, 512 dimensions (README of the official code, Proxy-Anchor-CVPR2020):

    argument        R@1   R@2   R@4   R@8
                    86.4  91.9  95.0  97.0
    net=resnet50    87.7  92.7  95.5  97.3

These single runs are above the numbers of the paper, which used smaller batches. The form is
the faithful one: `help(dmljax.recipes.proxy_anchor)`. Not run at full size here yet.
"""

from dmljax import recipes

get_config = recipes.config_function(recipes.proxy_anchor, dataset="cars196")
