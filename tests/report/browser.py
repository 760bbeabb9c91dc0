"""Debian's Chromium through Playwright: pages as a person would use them."""

import contextlib
import os
import pathlib
import shutil
import tarfile

import pytest

# CI sets it: there, a missing browser is an error, not a reason to skip.
REQUIRED = os.environ.get("DMLJAX_REQUIRE_BROWSER") == "1"
AXE_VERSION = "4.14.1"


def _executable() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next(filter(None, map(shutil.which, names)), None)


def missing() -> str | None:
    """Returns the reason why no browser can be used, or None."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "playwright is not installed: pip install playwright"
    if _executable() is None:
        return "no Chromium is installed: apt-get install chromium fonts-dejavu-core"
    return None


def require() -> None:
    """Skips the tests of a module with the reason, or fails where a browser is required."""
    if (reason := missing()) is None:
        return
    if REQUIRED:
        raise RuntimeError(f"DMLJAX_REQUIRE_BROWSER=1, but {reason}")
    pytest.skip(reason, allow_module_level=True)


@contextlib.contextmanager
def chromium():
    """Starts a headless browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=_executable(), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        try:
            yield browser
        finally:
            browser.close()


def axe_source() -> str | None:
    """Reads the program of axe-core from the file or the npm package that DMLJAX_AXE names."""
    path = os.environ.get("DMLJAX_AXE")
    if not path or not pathlib.Path(path).is_file():
        return None
    if not path.endswith(".tgz"):
        return pathlib.Path(path).read_text(encoding="utf-8")
    with tarfile.open(path) as package:
        return package.extractfile("package/axe.min.js").read().decode()
