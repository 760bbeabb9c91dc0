#!/usr/bin/env bash
# Makes the pictures of README.md: a run of configs/glyphs.py, and its pictures in fewer colors.
set -euo pipefail
cd "$(dirname "$0")/.."
python -m dmljax.main --config=configs/glyphs.py
python - <<'PYTHON'
from PIL import Image

for name in ("retrieval", "map", "curves"):
    picture = Image.open(f"runs/glyphs/{name}.png").convert("RGB")
    picture.thumbnail((720, 720))
    picture.quantize(32).save(f"docs/_static/{name}.png", optimize=True)
PYTHON
