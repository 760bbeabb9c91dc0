"""One bundle, one index and one service for the tests that change nothing."""

import json
import shutil

import forged
import pytest
from service_cases import TOKEN, exported, indexed, served


@pytest.fixture(scope="session")
def bundle_folder(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("serve_bundle"))


@pytest.fixture(scope="session")
def distance_server(bundle_folder, tmp_path_factory):
    """Serves a bundle whose embeddings are compared by their distance."""
    folder = tmp_path_factory.mktemp("serve_distances")
    bundle = shutil.copytree(bundle_folder, folder / "distance.bundle")
    output = json.loads((bundle / "manifest.json").read_text())["output"]
    output |= {"unit": False, "similarity": "euclidean"}
    forged.change_manifest(bundle, output=output, thresholds={})
    with served(folder, bundle, f"--index={indexed(bundle, folder)}") as running:
        yield running


@pytest.fixture(scope="session")
def index_folder(bundle_folder, tmp_path_factory):
    return indexed(bundle_folder, tmp_path_factory.mktemp("serve_index"))


@pytest.fixture(scope="session")
def server(bundle_folder, index_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    with served(folder, bundle_folder, f"--index={index_folder}") as running:
        yield running


@pytest.fixture(scope="session")
def token_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("token") / "token.txt"
    path.write_text(f"{'b' * 32}\n{TOKEN}\n")
    return path
