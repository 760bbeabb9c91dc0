#!/usr/bin/env bash
# Makes the picture of README.md and docs/report.md: the page of a run of configs/glyphs.py in Chromium.
set -euo pipefail
cd "$(dirname "$0")/.."
python -m dmljax.main --config=configs/glyphs.py
chromium --headless=new --no-sandbox --hide-scrollbars --window-size=1440,1600 --virtual-time-budget=8000 \
  --screenshot=runs/report.png "file://$PWD/runs/glyphs/report.html"
python - <<'PYTHON'
from PIL import Image

picture = Image.open("runs/report.png").convert("RGB")
picture.quantize(128, dither=Image.Dither.NONE).save("docs/_static/report.png", optimize=True)
PYTHON
