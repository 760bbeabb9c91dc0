"""How Sphinx builds the site: `sphinx-build -W docs docs/_build`, or `docs/build.sh`."""

import pathlib
import sys

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))

import api_pages  # noqa: E402

project = "dmljax"
author = "the dmljax authors"
copyright = author
extensions = ["myst_nb", "sphinx_copybutton", "sphinx-mathjax-offline"]
exclude_patterns = ["_build", "jupyter_execute"]
templates_path = []
html_theme = "furo"
html_title = "dmljax"
html_static_path = ["_static"]
html_copy_source = False
html_show_sourcelink = False
html_show_sphinx = False
# Pages link to sections of each other, and use $$ formulas and ::: blocks.
myst_enable_extensions = ["dollarmath", "colon_fence", "deflist"]
myst_heading_anchors = 3
# The tutorial runs when the site is built; a cell that fails is an error of the build.
nb_execution_mode = "force"
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True


def setup(app):
    app.connect("builder-inited", lambda app: api_pages.write(HERE / "api"))
