"""A bundle is exported, loaded elsewhere, and embeds what the run embeds."""

import numpy as np
import pytest
from PIL import Image
from processes import python

import dmljax
from dmljax import bundle
from dmljax.runs import folder as saved

HEAVY = ("flax", "grain", "orbax", "optax", "sklearn", "matplotlib", "ml_collections")


@pytest.fixture(scope="module")
def model(bundle_folder):
    return dmljax.bundle.load(bundle_folder)


def test_embeddings_are_those_of_the_run(model, run_folder):
    embed_fn, variables, _ = saved.load(run_folder)
    images = np.random.default_rng(0).integers(0, 256, (21, 12, 12, 3), np.uint8)
    for count in (1, 3, 16, 21):
        vectors = model.embed_prepared(images[:count])
        expected = np.asarray(embed_fn(variables, images[:count]))
        assert vectors.shape == (count, model.dimension) and vectors.dtype == np.float32
        np.testing.assert_allclose(vectors, expected, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-5)


def test_images_may_be_bytes_paths_and_arrays(model, tmp_path):
    pixels = np.random.default_rng(1).integers(0, 256, (12, 12, 3), np.uint8)
    path = tmp_path / "a.png"
    Image.fromarray(pixels).save(path)
    vectors = model.embed([pixels, path, str(path), path.read_bytes()])
    assert (vectors == vectors[:1]).all()


def test_facts_of_a_bundle(model):
    assert model.dimension == 4 and model.similarity == "cosine"
    assert model.batch_sizes == (1, 4, 16) and model.input_shape == (12, 12, 3)
    assert set(model.compile()) == {1, 4, 16}
    assert model.check()["largest_difference"] < 1e-5
    report = model.manifest.parity["programs"]["stablehlo"]
    assert report["images"] == 32 and report["largest_batch"]["largest_difference"] < 1e-6
    assert report["same_nearest"] == 1
    # The folder of this machine is not told.
    assert model.manifest.config["dataset"]["path"] == "blobs.npz"


def test_loading_needs_few_packages_and_little_time(bundle_folder):
    """None of the heavy packages can be imported, and embeddings come nevertheless."""
    code = (
        "import sys, time\n"
        f"for name in {HEAVY}: sys.modules[name] = None\n"
        "start = time.process_time()\n"
        "import dmljax, numpy as np\n"
        f"model = dmljax.bundle.load({str(bundle_folder)!r})\n"
        "assert model.embed([np.zeros((12, 12, 3), np.uint8)]).shape == (1, 4)\n"
        "print(time.process_time() - start)"
    )
    seconds = float(python(code).stdout)  # of the processor; docs/ship.md has the measured time
    assert seconds < 4


def test_an_image_that_is_refused_is_named(model, tmp_path):
    pixels = np.zeros((12, 12, 3), np.uint8)
    with pytest.raises(bundle.BadImage, match="image number 20: the image has zero"):
        model.embed([pixels] * 20 + [b""])  # in the second batch
    with pytest.raises(bundle.BadImage, match=f"{tmp_path}/a.png: the image cannot be read") as x:
        model.embed([pixels, tmp_path / "a.png"])
    assert x.value.kind == "unreadable"


def test_calls_that_make_no_sense_are_refused(model):
    for images in ([], "a.png"):
        with pytest.raises(ValueError, match="a list of one image or more"):
            model.embed(images)
    for batch, got in ((np.zeros((1, 12, 12, 3)), "float64"), (np.zeros((0, 12, 12, 3), "u1"), 0)):
        with pytest.raises(ValueError, match=rf"takes uint8 \[n 12 12 3\], got .*{got}"):
            model.embed_prepared(batch)
    with pytest.raises(bundle.BadBundle, match=r"has no embed\.onnx: export it again"):
        bundle.load(model.folder, program="onnx")
