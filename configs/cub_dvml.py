"""CUB-200-2011 by deep variational metric learning (DVML, Lin et al., ECCV 2018).

    python -m dmljax.main --config=configs/cub_dvml.py --config.dataset.root=cub200 \\
        --config.net.weights=googlenet.safetensors
    python -m dmljax.main --config=configs/cub_dvml.py:loss=npair ...

Expected with the paper's form, in percent, 512 dimensions. The last column is R@1 without
DVML, which `baseline=True` trains:

    argument                  NMI   F1    R@1   R@2   R@4   R@8     R@1 without
    loss=triplet              55.5  25.0  43.7  56.0  67.8  76.9    39.8
    loss=npair                61.1  28.5  52.5  64.9  75.3  84.1    50.6
    loss=dws                  61.4  28.8  52.7  65.1  75.5  84.3    49.8

`mode=code_1600` is the public code for Cars196 with the values that its predecessor uses for CUB:
256 dimensions, a learning rate of 6e-5, a weight decay of 1e-3. No published numbers are known.

The default is the corrected form; `mode=code_1600` and `mode=code_1200` follow two versions of
public code. `help(dmljax.recipes.dvml)` says what the paper gives, what is a guess, and where that
code differs from its report. NMI and F1 are scored on the best of ten k-means starts, as in
that code. Not run at full size here yet.
"""

from dmljax import recipes

get_config = recipes.config_function(recipes.dvml, dataset="cub200")
