#!/usr/bin/env bash
# Makes the pictures of README.md, docs/report.md and docs/studies.md: the page of a run of
# configs/glyphs.py, and the table of studies/glyphs.py, in Chromium. Takes about twelve minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
python -m dmljax.main --config=configs/glyphs.py
python -m dmljax.main study run studies/glyphs.py
take_picture() { # PAGE WIDTH HEIGHT NAME
  chromium --headless=new --no-sandbox --hide-scrollbars --window-size="$2,$3" --virtual-time-budget=8000 \
    --screenshot="runs/$4.png" "file://$PWD/$1"
}
take_picture runs/glyphs/report.html 1440 1600 report
take_picture runs/studies/glyphs/table.html 1000 545 study
python - <<'PYTHON'
from PIL import Image

for name in ("report", "study"):
    picture = Image.open(f"runs/{name}.png").convert("RGB")
    picture = picture.quantize(128, dither=Image.Dither.NONE)
    picture.save(f"docs/_static/{name}.png", optimize=True)
PYTHON
