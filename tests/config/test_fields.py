"""The dataclasses of options complete and check a config, and make the page of all fields."""

import hashlib
import importlib.util
import json
import pathlib
import shutil

import numpy as np
import pytest
from system import brief, photos, tiny

from dmljax import recipes
from dmljax.config import digests, fields, files
from dmljax.config.build import build
from dmljax.runs import folder as folder_lib
from dmljax.runs import summary, training
from dmljax.train import initial_state, options

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "make_fields.py"
_spec = importlib.util.spec_from_file_location("make_fields", PAGE)
make_fields = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_fields)
SIZED = ["folder", "abe", "dvml", "graph", "multi_similarity", "proxy_anchor", "tinyimagenet"]


def test_the_page_has_the_present_fields():
    page = make_fields.page()
    assert all(f"| `{name}` |" in page for name in ("seed", "evaluate.average", "runtime.cache"))


def test_a_config_has_the_defaults_of_the_dataclasses(tmp_path):
    config = fields.complete(tiny(tmp_path, evaluate={"knn": 3}))
    typed = fields.typed(config)
    assert typed.evaluate == options.EvaluationOptions(knn=3)
    assert typed.checkpoint == options.CheckpointOptions(every=2, keep=3)
    assert typed.sampler == {"name": "class_balanced", "classes": 4, "per_class": 2}
    assert typed.transform == {"name": "unchanged"} and typed.miner is None
    assert fields.complete(config) == config == json.loads(json.dumps(config))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"evaluate": {"average": "images"}},
            "average must be 'queries' or 'classes', not 'images'",
        ),
        ({"evaluate": {"kn": 3}}, "evaluate has no 'kn': did you mean 'knn'"),
        ({"evaluate": 3}, "evaluate has the fields every, metrics.* cannot be 3"),
        ({"runtime": {"devices": 0}}, "runtime.devices must be 1 or more, or None, not 0"),
        ({"validation": 1}, "validation must be a share of 0 or more and less than 1, not 1"),
        ({"net": 3}, r"net must be a name or dict\(name='...', ...\), not 3"),
        ({"normalize": {"force": True}}, "normalize must be a name .* not {'force': True}"),
        ({"trained": {"alpha": 8}}, r"not {'alpha': 8}: say what .* by --config.trained.name="),
        ({"size": 0}, "size must be a number from 1 to 8192 or None, not 0"),
        ({"size": 10**9}, "size must be a number from 1 to 8192 or None, not 1000000000"),
    ],
)
def test_a_value_out_of_range_is_refused_with_what_is_allowed(tmp_path, values, message):
    with pytest.raises((ValueError, TypeError), match=message):
        fields.complete(tiny(tmp_path, **values))
    missing = {k: v for k, v in tiny(tmp_path).items() if k != "steps"}
    with pytest.raises(ValueError, match=r"sets no steps \(steps: the length of training"):
        fields.complete(missing)


@pytest.mark.parametrize("recipe", SIZED)
def test_one_size_is_the_size_of_training_and_evaluation(recipe):
    config = fields.complete(files.read(recipe, ["--config.size=64"]))
    sizes = config["size"], config["transform"]["size"], config["eval_transform"]["size"]
    assert sizes == (64, 64, 64)
    flags = ["--config.eval_transform.size=96", "--config.size=64"]
    config = fields.complete(files.read(recipe, flags))
    assert (config["transform"]["size"], config["eval_transform"]["size"]) == (64, 96)
    config = fields.complete(files.read(recipe, ["--config.size=None"]))
    assert "size" not in fields.named(config["transform"])  # the default of the transform


def test_a_config_with_a_size_is_the_config_with_two():
    config = recipes.multi_similarity(dataset="cub200") | {"size": 224}
    sized = {}
    for name in ("transform", "eval_transform"):
        spec = fields.named(config[name])
        config[name] = {k: v for k, v in spec.items() if k != "size"}
        sized[name] = {**config[name], "size": 224}
    both = {k: v for k, v in {**config, **sized}.items() if k != "size"}
    assert digests.config_digest(fields.complete(both)) == digests.config_digest(
        fields.complete(config)
    )
    config["transform"] = "unchanged"
    with pytest.raises(TypeError, match="unchanged has no argument 'size'"):
        build(config | {"dataset": "glyphs", "net": {"name": "convnet"}})


def test_the_evaluation_at_a_small_size_sees_the_border_of_a_photograph(tmp_path):
    flags = ["--config.size=64", "--config.net={'name': 'convnet'}"]
    config = files.read("folder:train=all", flags)
    config["dataset"] |= {"root": str(photos(tmp_path))}
    run = build(config | {"runtime": {"devices": 1}})
    assert run.image_shape == run.eval_image_shape == (64, 64, 3)
    photograph = np.zeros((480, 640, 3), np.uint8)
    photograph[:48] = photograph[-48:] = 255  # a tenth of the height
    image = run.eval_transform_fn(photograph, np.random.default_rng(0))
    assert (image[[0, 1, -2, -1]] > 200).all() and (image[16:48] == 0).all()
    state = initial_state.first_state(run)
    line = summary.header(run, state)[1]  # after the advice to start from pretrained weights
    assert "standard_train(size=64" in line and " for training" in line
    assert "standard_eval(size=64, shorter=72" in line


def test_a_run_of_an_older_version_goes_on(tmp_path):
    """Its `config.json` lacks the fields that came later, and has old names of functions."""
    config = tiny(tmp_path)
    config["evaluate"] |= {"extra": [{"name": "reciprocal_rank"}]}
    scores = training.run(config, tmp_path / "run")
    folder = tmp_path / "old"
    shutil.copytree(tmp_path / "run", folder)
    old = json.loads((folder / "config.json").read_text())
    del old["size"], old["evaluate"]["average"]
    old["sampler"]["name"] = "plan"
    old["evaluate"]["extra"] = [{"name": "mean_reciprocal_rank"}]
    (folder / "config.json").write_text(json.dumps(old))
    assert digests.config_digest(old) == digests.config_digest(fields.complete(config))
    with pytest.warns(FutureWarning, match="is an old name") as caught:
        assert folder_lib.score(folder) == scores
    assert [str(w.message).split()[1] for w in caught] == ["sampler", "metric"]
    for name in ("checkpoints/6", "checkpoints_sums/6"):
        for path in folder.glob(f"{name}*"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / "result.json").unlink()
    training.run(config, folder)
    rows = [
        [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
        for path in (tmp_path / "run", folder)
    ]
    assert rows[0] == rows[1]
    with pytest.raises(ValueError, match=r"evaluate.average was None and is now 'classes'"):
        training.run(config | {"evaluate": config["evaluate"] | {"average": "classes"}}, folder)


def test_a_run_of_an_older_version_keeps_the_rule_of_its_positions(tmp_path, capsys):
    """`vit_s16` resized as transformers does. Its images here have another size than the net."""
    sizes = {"width": 8, "heads": 2, "depth": 1, "patch": 4, "image_size": 24}
    config = brief(tmp_path, net={"name": "vit_s16"} | sizes)
    assert fields.complete(config)["net"] == config["net"] | {"resize": "torch_offset"}
    assert fields.complete(config | {"net": "vit_b16"})["net"]["resize"] == "torch_offset"
    plain = config | {"net": config["net"] | {"resize": "torch"}}
    folder = tmp_path / "run"
    scores = training.run(plain, folder)
    assert scores != training.run(config, tmp_path / "new")
    old = json.loads((folder / "config.json").read_text())
    digest = digests.config_digest(old)
    assert old["net"].pop("resize") == "torch"  # older versions wrote none
    assert digests.config_digest(old) == digest  # so a study knows its runs again
    assert digests.config_digest(fields.complete(config)) != digest
    (folder / "config.json").write_text(json.dumps(old))
    assert folder_lib.score(folder) == scores
    assert fields.typed(old).net["resize"] == "torch"
    with pytest.raises(ValueError, match=r"net.resize was 'torch' and is now 'torch_offset'"):
        training.run(config, folder)
    assert training.run(plain, folder) == scores


@pytest.mark.parametrize("old", ["plan", {"name": "plan"}])
def test_an_old_name_of_a_sampler_has_the_digest_of_the_new_one(old):
    new = json.loads(json.dumps(old).replace("plan", "class_balanced"))
    assert digests.essential({"sampler": old}) == {"sampler": new}
    before = hashlib.sha256(json.dumps({"sampler": old}, separators=(",", ":")).encode())
    for sampler in (old, new):
        assert digests.config_digest({"sampler": sampler}) == before.hexdigest()


def test_the_old_name_of_a_field_works_and_keeps_the_digest_of_a_run(tmp_path):
    new = tiny(tmp_path, start=str(tmp_path), start_takes="backbone")
    old = {"carried" if name == "start_takes" else name: value for name, value in new.items()}
    with pytest.warns(FutureWarning, match="'carried' of the config .*: write 'start_takes'"):
        assert fields.complete(old) == fields.complete(new)
    run_config = {"start": "runs/a", "carried": "backbone", "steps": 3}
    digest = "06c917a1f2b041ee7c695e378b170b7f8488b0123c47d3ddc3f31fa4d76cea97"  # of version 0.1.0
    assert digests.config_digest(run_config) == digest
    renamed = {"start": "runs/a", "start_takes": "backbone", "steps": 3}
    assert digests.config_digest(renamed) == digest
    assert digests.essential(run_config) == digests.essential(renamed)
    assert "start_takes" in fields.recorded(run_config)
    recorded = fields.complete(new)
    recorded["carried"] = recorded.pop("start_takes")
    assert fields.typed(recorded).start_takes == "backbone"


def test_an_old_name_of_a_sampler_works_with_one_warning(tmp_path):
    config = tiny(tmp_path)
    expected = build(config).sample_fn
    config["sampler"] |= {"name": "plan"}
    with pytest.warns(FutureWarning, match="sampler 'plan' .*: write 'class_balanced'") as caught:
        sample_fn = build(config).sample_fn
    assert len(caught) == 1 and "\n" not in str(caught[0].message)
    labels = np.arange(32) % 4
    for step in range(3):
        rows = (fn(labels, seed=0, step=step) for fn in (sample_fn, expected))
        np.testing.assert_array_equal(*rows)


def test_new_fields_at_their_defaults_are_not_in_digests(tmp_path):
    """So runs of older versions go on, and studies keep their rows."""
    complete = fields.complete(tiny(tmp_path))
    essential = digests.essential(complete)
    sections = [(options.Options, complete, essential)]
    sections += [
        (s, complete[name], essential.get(name, {})) for name, s in options.SECTIONS.items()
    ]
    for section, values, in_digest in sections:
        new = {name for name, f in options.fields_of(section).items() if f.metadata.get("is_new")}
        assert new <= set(values) and not new & set(in_digest)
