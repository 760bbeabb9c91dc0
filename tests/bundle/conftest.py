"""Fixtures of the tests of bundles."""

import pytest
from bundle_cases import exported, trained


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="session")
def bundle_folder(run_folder, tmp_path_factory):
    """A bundle that tests read and copy, and do not change."""
    return exported(run_folder, tmp_path_factory.mktemp("bundles") / "tiny.bundle")
