"""The recipes for own images and glyphs choose batches and rates by the kind of the loss."""

import pytest

from dmljax import at_hand, recipes
from dmljax.config.fields import complete


@pytest.mark.parametrize("recipe", [recipes.glyphs, recipes.folder])
def test_losses_against_proxies_see_one_image_of_a_class_and_quicker_proxies(monkeypatch, recipe):
    monkeypatch.setattr(at_hand, "weights_at_hand", lambda folder=None: {})
    arguments = {"train": "all"} if recipe is recipes.folder else {}
    pairs = recipe(loss="contrastive", **arguments)
    proxies = recipe(loss="normalized_softmax", **arguments)
    images = pairs["sampler"]["classes"] * pairs["sampler"]["per_class"]
    assert pairs["sampler"]["per_class"] == 4
    assert proxies["sampler"] == {"name": "class_balanced", "classes": images, "per_class": 1}
    assert proxies["method"] == {**pairs["method"], "name": "proxies", "proxy_init": 1.0}
    rates = {group["path"]: group["factor"] for group in proxies["optimizer"]["groups"]}
    assert rates["^proxies"] == 30.0
    assert (
        recipe(**arguments) == recipe(loss="multi_similarity", **arguments)
        and "miner" not in recipes.glyphs()
    )


@pytest.fixture
def backbone(monkeypatch, tmp_path):
    file = tmp_path / "weights.pth"
    file.write_bytes(b"weights")
    names = ("mobilenet_v2", "dinov2_s14", "convnext_t")
    monkeypatch.setattr(at_hand, "weights_at_hand", lambda folder=None: dict.fromkeys(names, file))


def test_what_learns_is_named_by_one_argument(backbone):
    learned = {
        "head": "last",
        "all": "all",
        "last4": {"name": "blocks", "count": 4},
        "lora": "lora",
        "bitfit": "biases",
        "prompts": "prompts",
    }
    for train, trained in learned.items():
        config = recipes.folder(train=train, net="dinov2_s14")
        assert config.get("trained", "all") == trained
        assert config["method"]["dense_fn"] == "centered_dense"
        assert complete(config)["select"] == "last"
    with pytest.raises(ValueError, match=r"train is head, ladder, all, .* or vptsp, not 'some'"):
        recipes.folder(train="some")


def test_semantic_proxies_are_trained_by_prompts_and_a_loss_against_proxies(backbone):
    config = complete(recipes.cub(train="vptsp", net="dinov2_s14"))
    assert (config["trained"]["name"], config["loss"]["name"]) == ("prompts", "proxy_anchor")
    assert config["method"]["name"] == "semantic_proxies"
    assert config["optimizer"]["rate"] * config["optimizer"]["groups"][0]["factor"] == 1e-2
    with pytest.raises(
        ValueError, match=r"train=vptsp needs a loss against proxies, .* not supcon"
    ):
        recipes.folder(train="vptsp", loss="supcon")


def test_the_ladder_goes_from_the_head_to_all_layers_and_their_average(backbone):
    for config in (recipes.folder(train="ladder", net="mobilenet_v2"), recipes.cub(train="ladder")):
        config = complete(config)
        names = [step["name"] for step in config["ladder"]]
        assert names == ["head", "all", "mix"] and config["held_out"]["fraction"] == 0.2
        head, all_, mix = config["ladder"]
        assert [head[x] for x in ("trained", "features", "select")] == [
            "last",
            "cached",
            "val/MAP@R",
        ]
        assert len(head["rates"]) == 3 and "shares" in mix and "trained" not in all_
    assert recipes.sop()["dataset"] == "sop" and recipes.inshop()["dataset"] == "inshop"


def test_nets_of_convolutions_train_on_smaller_images(backbone):
    for net, size in {"mobilenet_v2": 160, "dinov2_s14": 224, "convnext_t": 160}.items():
        config = recipes.folder(train="all", net=net)
        assert (config["transform"]["size"], config["eval_transform"]["size"]) == (size, 224)


def test_steps_of_a_ladder_need_a_backbone(monkeypatch):
    monkeypatch.setattr(at_hand, "weights_at_hand", lambda folder=None: {})
    with pytest.raises(ValueError, match="train=ladder needs a pretrained backbone"):
        recipes.folder(train="ladder")


def test_an_unknown_loss_of_a_recipe_is_refused():
    with pytest.raises(ValueError, match="loss: there is no 'proxies': did you mean"):
        recipes.folder(loss="proxies")
