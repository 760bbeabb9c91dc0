#!/usr/bin/env bash
# Builds the site into docs/_build; warnings are errors. Needs: pip install -e '.[docs]'
set -euo pipefail
cd "$(dirname "$0")"
python make_gallery.py
python make_fields.py
python -m sphinx -q -W --keep-going -b html . _build
echo "open docs/_build/index.html"
