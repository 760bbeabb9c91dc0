"""One bundle, one index and one service for the tests that change nothing."""

import pytest
from service_cases import TOKEN, exported, indexed, served


@pytest.fixture(scope="session")
def bundle_folder(tmp_path_factory):
    return exported(tmp_path_factory.mktemp("serve_bundle"))


@pytest.fixture(scope="session")
def distance_bundle(tmp_path_factory):
    """Exports a bundle without unit vectors, which are compared by their distance."""
    method = {"name": "pairs", "dim": 2, "unit": False}
    return exported(tmp_path_factory.mktemp("serve_distance"), method=method)


@pytest.fixture(scope="session")
def distance_server(distance_bundle, tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve_distances")
    place = indexed(distance_bundle, folder)
    with served(folder, distance_bundle, f"--index={place}") as running:
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
