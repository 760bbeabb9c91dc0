"""Cars196 by deep variational metric learning (DVML, Lin et al., ECCV 2018).

    python -m dmljax.main --config=configs/cars_dvml.py --config.dataset.root=cars196 \\
        --config.net.weights=googlenet.safetensors
    python -m dmljax.main --config=configs/cars_dvml.py:loss=npair ...

Expected with the paper's form, in percent, 512 dimensions (its table 1). The last column is R@1
without DVML, which `baseline=True` trains:

    argument                  NMI   F1    R@1   R@2   R@4   R@8     R@1 without
    loss=triplet              61.1  28.2  64.3  73.7  79.2  85.1    58.5
    loss=npair                66.0  34.6  80.4  85.8  91.8  95.1    72.3
    loss=dws                  67.6  36.8  82.0  88.4  93.3  96.3    78.9

Expected of the public code, 128 dimensions, by its report, whose own form is `mode=report`. Which
of its two versions made the numbers is not known; baselines, `baseline=True`, were not run:

    argument                     NMI   F1    R@1   R@2   R@4   R@8   R@16  R@32
    mode=code_1600,experiment=1  56.8  23.1  54.3  65.9  76.9  84.7  90.6  94.8
    mode=code_1600,experiment=2  55.8  22.0  52.4  64.4  75.1  84.3  90.2  94.3
    mode=code_1600,experiment=3  55.1  21.0  51.1  63.7  74.4  83.3  89.7  94.2

The default is the corrected form; `mode=code_1600` and `mode=code_1200` follow two versions of
public code. `help(dmljax.recipes.dvml)` says what the paper gives, what is a guess, and where that
code differs from its report. NMI and F1 are scored on the best of ten k-means starts, as in
that code. Not run at full size here yet.
"""

from dmljax import recipes

get_config = recipes.config_function(recipes.dvml, dataset="cars196")
