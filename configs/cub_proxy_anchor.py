"""CUB-200-2011 with the Proxy-Anchor loss (Kim et al., CVPR 2020).

    python -m dmljax.main --config=configs/cub_proxy_anchor.py --config.dataset.root=cub200 \\
        --config.net.weights=bn_inception.safetensors

Expected, in percent, 512 dimensions (README of the official code, Proxy-Anchor-CVPR2020):

    argument        R@1   R@2   R@4   R@8
                    69.1  78.9  86.1  91.2
    net=resnet50    69.9  79.6  86.6  91.4

These single runs are above the numbers of the paper, which used smaller batches. The form is
the faithful one: `help(dmljax.recipes.proxy_anchor)`. Not run at full size here yet.
"""

from dmljax import recipes

get_config = recipes.config_function(recipes.proxy_anchor, dataset="cub200")
