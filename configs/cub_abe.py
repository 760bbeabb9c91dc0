"""CUB-200-2011 by an attention-based ensemble (ABE, Kim et al., ECCV 2018).

    python -m dmljax.main --config=configs/cub_abe.py --config.dataset.root=cub200 \\
        --config.net.weights=googlenet.safetensors
    python -m dmljax.main --config=configs/cub_abe.py:learners=4,heads=True ...

Expected, in percent (the paper's tables 4 and 5):

    row          argument                           R@1   R@2   R@4   R@8
    ABE-8                                           60.6  71.5  79.8  87.4
    ABE-4        learners=4                         57.9  69.3  79.5  86.9
    ABE-2        learners=2                         55.7  67.9  78.3  85.5
    ABE-8(384)   dim=384                            60.2  71.4  80.5  87.7
    ABE-4(384)   learners=4,dim=384                 57.8  69.0  78.8  86.5
    ABE-2(384)   learners=2,dim=384                 55.9  68.1  77.4  85.7
    ABE-8        crop=True                          70.6  79.8  86.9  92.2
    ABE-4        crop=True,learners=4               68.0  77.8  86.3  92.1
    ABE-2        crop=True,learners=2               64.9  76.2  84.2  90.0

Some later papers quote the R@4 and R@8 of ABE-8(384) for ABE-8. Of M heads and of ABE without
divergence (heads=True, divergence=0) the paper has no numbers on this set.

The default is the corrected form. `help(dmljax.recipes.abe)` says what the paper gives, what is a
guess, and how the paper chose its numbers. Not run at full size here yet.
"""

from dmljax import recipes

get_config = recipes.config_function(recipes.abe, dataset="cub200")
