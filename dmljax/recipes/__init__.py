"""Published systems on data sets as plain data: `recipes.abe(dataset="cars196", learners=4)`.

Each recipe returns the dict that a config holds. The files in `configs/` are recipes with a data
set chosen; without them `--config=abe:dataset=cars196,learners=4` is the same run.
"""

from dmljax.recipes.abe import abe
from dmljax.recipes.arguments import config_function
from dmljax.recipes.baselines import multi_similarity, proxy_anchor
from dmljax.recipes.dvml import dvml
from dmljax.recipes.graph import graph
from dmljax.recipes.photos import cars, cub, folder, glyphs, inshop, sop
from dmljax.recipes.posts import mnist, tinyimagenet

__all__ = [
    "NAMES",
    "abe",
    "cars",
    "config_function",
    "cub",
    "dvml",
    "folder",
    "glyphs",
    "graph",
    "inshop",
    "mnist",
    "multi_similarity",
    "proxy_anchor",
    "sop",
    "tinyimagenet",
]
# What `--config=NAME` accepts.
NAMES = tuple(name for name in __all__ if name not in ("NAMES", "config_function"))
