"""Stanford Online Products by deep variational metric learning (DVML, Lin et al., ECCV 2018).

    python -m dmljax.main --config=configs/sop_dvml.py --config.dataset.root=sop \\
        --config.net.weights=googlenet.safetensors
    python -m dmljax.main --config=configs/sop_dvml.py:loss=npair ...

Expected with the paper's form, in percent, 512 dimensions. The last column is R@1 without
DVML, which `baseline=True` trains:

    argument                  NMI   F1    R@1   R@10  R@100   R@1 without
    loss=triplet              89.0  31.1  66.5  82.3  91.8    54.9
    loss=npair                90.2  37.1  70.0  85.1  93.7    66.4
    loss=dws                  90.8  37.2  70.2  85.2  93.8    66.8

`mode=code_1600` is the public code for Cars196 without a change. No published numbers are known.

The default is the corrected form; `mode=code_1600` and `mode=code_1200` follow two versions of
public code. `help(dmljax.recipes.dvml)` says what the paper gives, what is a guess, and where that
code differs from its report. NMI and F1 are scored on the best of ten k-means starts, as in
that code. Not run at full size here yet.
"""

from dmljax import recipes

get_config = recipes.config_function(recipes.dvml, dataset="sop")
