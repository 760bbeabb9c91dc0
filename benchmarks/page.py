"""Measures the page of a report: seconds to make it, its size, and its loading time in a browser.

`python benchmarks/page.py` prints one row for each number of test images. `benchmarks/report.py`
measures the numbers of a page. Vectors and pictures (smooth JPEGs) are synthetic. The last column
needs Playwright and Chromium, and is empty without them.
"""

import argparse
import io
import pathlib
import statistics
import sys
import tempfile

import jax
import numpy as np
from evaluation import products, seconds
from PIL import Image

from dmljax.data import decode
from dmljax.main import settle_environment, tune_cpu
from dmljax.report import facts, page

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests" / "report"))
import browser


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, nargs="+", default=[1000, 5000, 10_000])
    parser.add_argument("--dimensions", type=int, default=128)
    parser.add_argument("--side", type=int, default=224, help="pixels of a picture")
    arguments = parser.parse_args()
    print(f"{arguments.dimensions} dimensions, {jax.devices()[0].platform}\n")
    print("| test images | classes | clock, s | processor, s | MB | ready in a browser, s |")
    print("|---|---|---|---|---|---|")
    for items in arguments.items:
        classes = max(2, items // 5)
        x, labels = products(items, classes, arguments.dimensions)
        read_fn = pictures(arguments.side)
        with tempfile.TemporaryDirectory() as name:
            path = pathlib.Path(name) / "report.html"
            clock, processor = seconds(write, x, labels, read_fn, path)
            size = path.stat().st_size / 1e6
            ready = "" if browser.missing() else f"{opened(path):.2f}"
        row = f"{clock:.1f} | {processor:.1f} | {size:.1f} | {ready}"
        print(f"| {items:,} | {classes:,} | {row} |", flush=True)


def write(x, labels, read_fn, path: pathlib.Path) -> None:
    page.write(facts.make(x, labels, title="made up", read_fn=read_fn), path)


def pictures(side: int):
    """Returns `read_fn(item)`, which decodes one of 64 smooth JPEGs and shifts it by the item."""
    y, x = np.mgrid[:side, :side] / side
    rng, files = np.random.default_rng(0), []
    for _ in range(64):
        waves = [
            rng.normal(size=3) * np.sin(a * x + b * y + c)[:, :, None]
            for a, b, c in rng.uniform(-25, 25, (8, 3))
        ]
        file = io.BytesIO()
        picture = np.clip(128 + 30 * sum(waves), 0, 255).astype(np.uint8)
        Image.fromarray(picture).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return lambda item: np.roll(decode.decode(files[item % 64]), item, axis=1)


def opened(path: pathlib.Path) -> float:
    """Measures the seconds from the navigation until the page is ready, the median of five."""
    with browser.chromium() as chromium:
        times = []
        for _ in range(5):
            window = chromium.new_page(viewport={"width": 1440, "height": 900})
            window.goto(path.as_uri())
            window.wait_for_selector("html[data-ready]", timeout=60_000)
            times.append(window.evaluate("performance.now()"))
            window.close()
    return statistics.median(times) / 1000


if __name__ == "__main__":
    settle_environment()
    tune_cpu()
    main()
