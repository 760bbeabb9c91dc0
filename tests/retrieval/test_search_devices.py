"""A search among devices, or in a gallery larger than their memory, gives the same numbers."""

import jax
import numpy as np
import pytest

from dmljax import metrics, retrieval
from dmljax.ops import devices
from dmljax.retrieval import tiles

RNG = np.random.default_rng(0)


def _scores(x, y, count, **keywords):
    # Eight tiles of 128, one for each of eight devices.
    queries, labels = (x[:1000], y[:1000]) if "gallery" in keywords else (x, y)
    devices = jax.devices()[:count]
    scores = metrics.per_query(queries, labels, tile=128, devices=devices, **keywords)
    near = retrieval.nearest(queries, keywords.get("gallery"), k=5, tile=128, devices=devices)
    return scores, near


@pytest.mark.parametrize(("split", "devices"), [(False, 3), (True, 8)])
def test_a_search_is_the_same_on_any_number_of_devices(split, devices, monkeypatch):
    # Ties, classes of one image, small classes, and one class so large that its rows are sorted.
    x = RNG.integers(0, 4, (1100, 6)).astype(np.float32)
    y = np.where(np.arange(1100) % 10 == 0, 400, RNG.integers(0, 400, 1100))
    keywords = {"gallery": x[300:], "gallery_labels": y[300:]} if split else {}
    scores, near = _scores(x, y, 1, **keywords)
    meshes = []
    original = tiles.on_mesh
    monkeypatch.setattr(
        tiles, "on_mesh", lambda mesh, *a: meshes.append(mesh) or original(mesh, *a)
    )
    scores_on_many, near_on_many = _scores(x, y, devices, **keywords)
    assert {mesh.size for mesh in meshes} == {devices}
    assert np.isnan(scores["mAP"]).any() and np.nanmax(scores["mAP"]) > 0
    for name in scores:
        np.testing.assert_array_equal(scores_on_many[name], scores[name])
    for a, b in zip(near_on_many, near, strict=True):
        np.testing.assert_array_equal(a, b)


def test_clusters_are_the_same_on_any_number_of_devices():
    x, y = RNG.normal(size=(1000, 4)).astype(np.float32), RNG.integers(0, 60, 1000)
    one, many = (
        metrics.clustering(x, y, seeds=(0,), tile=128, devices=jax.devices()[:n]) for n in (1, 3)
    )
    assert one == many and 0 < one["NMI"] < 1


@pytest.mark.parametrize("devices", [1, 3])
def test_a_gallery_beyond_the_devices_memory_is_streamed(devices, monkeypatch, tmp_path):
    # 19 dimensions: other tests leave no arrays of so many behind.
    x = RNG.normal(size=(1500, 19)).astype(np.float32)
    y = np.where(np.arange(1500) % 15 == 0, 300, RNG.integers(0, 300, 1500))
    np.save(tmp_path / "x.npy", x)
    keywords = {"gallery": np.load(tmp_path / "x.npy", mmap_mode="r"), "gallery_labels": y}
    resident, near = _scores(x, y, devices, **keywords)
    within = metrics.per_query(x, y, tile=128, devices=jax.devices()[:devices])
    monkeypatch.setattr(tiles, "RESIDENT_BYTES", 0)
    monkeypatch.setattr(tiles, "BLOCKS_PER_PASS", 2)
    alive = []
    original_load = tiles.Tiles._load

    def load(self, i):
        tile = original_load(self, i)
        sizes = [a.nbytes for a in jax.live_arrays() if a.shape[-1:] == (19,)]
        alive.append(sum(sizes))
        return tile

    monkeypatch.setattr(tiles.Tiles, "_load", load)
    streamed, streamed_near = _scores(x, y, devices, **keywords)
    streamed_within = metrics.per_query(x, y, tile=128, devices=jax.devices()[:devices])
    for a, b in ((streamed, resident), (streamed_within, within)):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
    np.testing.assert_array_equal(streamed_near[0], near[0])
    # Only a few blocks of queries and one tile of the gallery are on the devices at a time.
    assert (
        len(alive) > 4 * 12 and max(alive) <= (tiles.BLOCKS_PER_PASS + 3) * devices * 128 * 19 * 4
    )


def test_a_gallery_may_take_a_quarter_of_the_free_memory(monkeypatch):
    assert devices.free_bytes(None) is devices.free_bytes({"num_allocs": 1}) is None
    assert devices.free_bytes({"bytes_limit": 80, "bytes_in_use": 30}) == 50
    assert tiles._resident_bytes(None) == 1 << 30  # of a CPU, which does not tell
    for free, expected in ((40 << 30, 10 << 30), (1 << 30, 1 << 30)):
        monkeypatch.setattr(tiles, "free_bytes", lambda _, free=free: free)
        assert tiles._resident_bytes(None) == expected
    monkeypatch.setattr(tiles, "RESIDENT_BYTES", 0)
    size = 5 * 128 * 19 * 4  # of 600 rows, in whole tiles
    for free, is_resident in ((4 * size - 4, False), (4 * size, True)):
        monkeypatch.setattr(tiles, "free_bytes", lambda _, free=free: free)
        gallery = tiles.Tiles(np.zeros((600, 19), np.float32), side=128)
        assert (gallery[0] is gallery[0]) == is_resident
    with jax.enable_x64(True):  # twice as many bytes
        assert (gallery := tiles.Tiles(np.zeros((600, 19)), side=128))[0] is not gallery[0]


def test_devices_share_a_search_in_which_each_has_a_tile():
    local, choose = jax.local_devices(), tiles.choose_mesh
    assert choose(local[:3], count=2) is None and choose(local[:3], count=3).size == 3
    assert choose(local[:1], count=9) is None  # arrays go there by default
    assert choose(local[1:2], count=1).devices.tolist() == local[1:2]
