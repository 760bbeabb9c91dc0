"""The method of a config: its backbone with its input, its head, and what of them learns."""

import inspect
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import traverse_util

from dmljax import at_hand
from dmljax import weights as weights_lib
from dmljax.adapt import distilled
from dmljax.adapt.trained import Adapted
from dmljax.adapt.trees import paths_of, paths_under
from dmljax.config.data import transform_of
from dmljax.config.fields import named, options_of, short
from dmljax.config.registry import chosen
from dmljax.data.features import Cache
from dmljax.files import reading
from dmljax.files import run_folder as results
from dmljax.hints import check_all
from dmljax.methods import assemble
from dmljax.methods.base import Method, RandomMiner
from dmljax.nets import layers, normalizations
from dmljax.train import start
from dmljax.train.options import Cached, Options, Spec
from dmljax.weights import expected_normalization, expected_preprocessing
from dmljax.weights.converted import file_digest

FUNCTIONS = ("net", "loss", "method", "miner", "normalize", "trained")  # what a method is made of
_WITH_PROXIES = ("proxies", "semantic_proxies")  # methods whose losses compare with proxies
# Transforms of published systems and of users are chosen on purpose.
_COMPARED = ("standard_eval", "squash_eval")
_SIZE_TOLERANCE = 3  # pixels: published systems cut 227 where other code cuts 224


def backbone_of(options: Options, origin: start.Start | None) -> tuple[dict[str, Any], Spec]:
    """Returns the net with its input and output, and its normalization.

    The first are fields of `Run` by their names.
    """
    net = net_of(options)
    whiten = _argument(_argument(options.method.function, "dense_fn"), "whiten")
    normalization, output = normalization_of(options, net, origin), _pooled_output(options)
    is_cached = isinstance(options.features, Cached)
    backbone = {
        "net": net,
        "pooled_output": output,
        "whiten": _argument(layers.centered_dense, "whiten") if whiten is None else whiten,
        "cache": _cache(options, normalization, output, origin) if is_cached else None,
        "normalization": normalizations.title(normalization),
        "input_note": _input_note(options),
    }
    return backbone, normalization


def net_of(options: Options) -> Any:
    """Returns the net without a head; raises if the config trains it in an impossible way."""
    net, weights = options.net.function(), options.net.get("weights")
    trained = options.trained["name"]
    needs = {"evaluate.frozen": options.evaluate.frozen, "distill": options.distill}
    needs["trained"] = trained if trained != "all" else None
    for field, value in needs.items():
        if value and not options.has_pretrained:
            raise ValueError(
                f"{field}={value} needs a pretrained backbone: give --config.net.weights=... or "
                "--config.start=runs/..., or leave it out"
            )
    if weights and options.start:
        raise ValueError(
            f"start={options.start.name!r} and net.weights={weights!r} both give the first "
            "backbone: leave out one of them, such as by --config.net.weights=None"
        )
    # Where a part is trained, the batch norms of the backbone keep their statistics.
    return net if trained == "all" else layers.freeze(net)


def adapted_of(options: Options, net: Any, *, classes: int, batch_size: int = 0) -> Adapted:
    """Returns the method with this net; `trained` says which part of it learns."""
    factory, loss_fn, mining = functions_of(options, batch_size)
    method = factory(net, loss_fn, classes=classes, **mining)
    if options.distill:
        output = _pooled_output(options) or "pooled"
        method = distilled(method, net, weight=options.distill, output=output)
    return options.trained.function(method)


def functions_of(
    options: Options, batch_size: int = 0
) -> tuple[Callable, Callable, dict[str, Any]]:
    """Returns the factory of the method, the loss, and the miner as a keyword of the factory.

    Raises unless they fit each other and the batch. Reads no data and builds no net.
    """
    loss, method, miner = options.loss, options.method, options.miner
    mine_fn, factory = miner.function if miner else None, method.function
    takes_proxies = "proxies" in inspect.signature(loss.function).parameters
    needs_proxies = method["name"] in _WITH_PROXIES
    dim, tile, memory = method.get("dim", 1), loss.get("tile", 1), method.get("memory")
    without_tile = mine_fn or loss.get("mine_fn") or memory
    problems: dict[str, bool] = {
        f"the loss {loss['name']} compares with proxies, which the method {method['name']} does "
        "not have: --config.method=proxies, or another loss": takes_proxies and not needs_proxies,
        f"the loss {loss['name']} takes no proxies, which the method {method['name']} compares "
        "with: --config.method=pairs, or another loss": needs_proxies and not takes_proxies,
        "loss.reduce_fn=None keeps the entries of the loss, and training needs one number: leave "
        "it out": loss.get("reduce_fn", "") is None,
        f"method.memory={memory} cannot hold a batch of {batch_size} images: take at least "
        f"{batch_size}, or 0 for no memory": bool(memory and memory < batch_size),
        f"loss.tile={tile} must be a positive integer, and tiles compare rows by their classes "
        "alone: leave out the tile, or the miner and the memory": (
            tile is not None and (tile < 1 or bool("tile" in loss and without_tile))
        ),
        f"method.dim={dim}: an embedding has 1 or more dimensions": dim is not None and dim < 1,
    }
    if ":" not in loss["name"] + method["name"]:
        check_all(problems)
    if mine_fn is None:
        return factory, loss.function, {}
    if "mine_fn" not in inspect.signature(factory).parameters:
        raise ValueError(f"the method {method['name']} takes no miner")
    is_random = "key" in inspect.signature(mine_fn).parameters
    return factory, loss.function, {"mine_fn": RandomMiner(mine_fn) if is_random else mine_fn}


def _pooled_output(options: Options) -> str | None:
    """Returns the output of the net that the head takes; None if it takes feature maps."""
    pool_fn = _argument(options.method.function, "pool_fn")
    output, remaining_pool_fn = assemble.pooling(pool_fn)
    return output if remaining_pool_fn is None else None


def _argument(function: Callable | None, name: str) -> Any:
    """Returns the default of an argument of a function, or what is bound to it; None without it."""
    parameters = {} if function is None else inspect.signature(function).parameters
    return parameters[name].default if name in parameters else None


def normalization_of(options: Options, net: Any, origin: start.Start | None) -> Spec:
    """Returns the normalization of the config, else of the weights or of `start`, else of the net.

    A config may not contradict the weights, which need the input that they were trained on, unless
    it says `force=True`.
    """
    source, expected = options.net.get("weights"), None
    if source and os.path.isfile(source):
        expected = expected_normalization(source)
    if origin is not None:
        source, expected = str(origin.folder), origin.normalize
    if options.normalize is None:
        return chosen(
            "normalize", expected or getattr(net, "expected_normalization", None) or "imagenet"
        )
    spec, expected = options.normalize, named(expected)
    inputs = [normalizations.inputs(x) or x["name"] for x in (spec, expected or spec)]
    if spec.get("force") is not True and inputs[0] != inputs[1]:
        raise ValueError(
            f"normalize={short(dict(spec))!r} contradicts {source}, which expects "
            f"{short(expected)!r}: leave it out, or insist by "
            f'--config.normalize="{ {**spec, "force": True} }"'
        )
    return spec


def _input_note(options: Options) -> str:
    """Returns a line if the evaluation prepares images differently than the weights expect.

    Size, filter, and crop or squash are compared, where the file is known.
    """
    weights, transform = options.net.get("weights"), options.eval_transform
    published = expected_preprocessing(weights) if weights and os.path.isfile(weights) else None
    if published is None or transform["name"] not in _COMPARED:
        return ""
    spec = {k: v for k, v in published.transform.items() if k != "scaled_decode"}
    size = transform.with_defaults()["size"]
    size = size if abs(size - spec["size"]) <= _SIZE_TOLERANCE else spec["size"]
    shown = ("name", "size", "shorter", "filter")
    actual, expected = (
        transform_of(chosen("eval_transform", {k: v for k, v in x.items() if k in shown}))
        for x in (transform.with_defaults(), {"filter": "bilinear", **spec, "size": size})
    )
    if actual.operations == expected.operations:
        return ""
    name = os.path.basename(str(weights))
    return (
        f"{name} was trained for {expected.title}, and this run evaluates with {actual.title}. "
        f'To prepare images as for the weights: --config.eval_transform="{spec}"'
    )


def _cache(
    options: Options, normalization: Spec, output: str | None, origin: start.Start | None
) -> Cache:
    """Returns the cache of the features that `options` need."""
    assert isinstance(options.features, Cached)
    if options.trained["name"] != "last" or output is None:
        raise ValueError(
            "features='cached' keeps pooled features, and needs a backbone that does not learn: "
            "set --config.trained=last, and leave out method.pool_fn, or take global_max or "
            "class_and_mean; or --config.features=computed"
        )
    weights = weights_digest(options)
    if options.start is not None:
        weights = (origin or start.find(options.start.name)).digest
    about: dict[str, Any] = {"net": options.net.with_defaults(), "weights": weights}
    about["normalize"] = {k: v for k, v in normalization.with_defaults().items() if k != "force"}
    if (platform := jax.default_backend()) != "cpu":  # accelerators multiply with fewer digits
        about["platform"] = platform
    return Cache(
        options.runtime.features or at_hand.cache_folder() / "features",
        about,
        output=output,
        evaluation=transform_of(options.eval_transform),
        training=transform_of(options.transform),
        views=options.features.views,
    )


def weights_digest(options: Options) -> str | None:
    """Returns the digest of the file of pretrained weights; None without one."""
    weights = options.net.get("weights")
    start.check_file(weights)
    return None if weights is None else file_digest(weights)


def first_weights(folder: str | None, weights: str | None) -> str | None:
    """Returns the file of weights of the first backbone of a run that starts from a folder.

    Runs may start from each other in a row; the first of them may have begun with such a file.
    """
    while folder is not None:
        try:
            run_folder = reading.chosen_run(pathlib.Path(folder).expanduser())
            before = reading.config_of_run(run_folder)
        except FileNotFoundError:  # the run is gone
            return None
        folder, weights = before["start"] and before["start"]["name"], before["net"].get("weights")
    return weights


def arrays_of(origin: start.Start, image_shape: Sequence[int]) -> dict[str, Any]:
    """Returns the arrays of a run to start from, with its adapters merged into the kernels.

    Its checkpoints may leave out parts of the backbone (`start.base_of`), which its file of
    weights has.
    """
    arrays = start.read(origin)
    saved = reading.config_of_run(origin.folder)
    if saved["trained"]["name"] == "all":
        return arrays  # and no name in the config of that run is looked up
    options = options_of(saved, FUNCTIONS)
    net, file = net_of(options), options.net.get("weights")
    adapted = adapted_of(options, net, classes=2)
    if file is not None and adapted.method.backbone == ("net",):
        digest = results.read(origin.folder).digests.get("weights")
        start.check_file(file, digest=digest, run=str(origin.folder))
        variables = weights_lib.load(file, net, image_shape=image_shape, report_fn=lambda *_: None)
        arrays = start.flat({"net": variables["params"]}, {}) | arrays
    trees = traverse_util.unflatten_dict(arrays, sep="/")
    return start.flat(adapted.merge_fn(trees["params"]), trees)


def check_start(options: Options, method: Method, params: Any) -> None:
    """Raises unless the method says where its backbone is, and what a run may take from another."""
    origin, name = options.start, options.method["name"]
    needs_backbone = origin is not None or options.trained["name"] != "all"
    if needs_backbone and not paths_under(method.backbone, paths_of(params)):
        raise ValueError(
            f"the method {name} has no parameters at {', '.join(method.backbone)}: say where its "
            "backbone is by Method(..., backbone=...)"
        )
    if origin is not None and origin.takes == "all" and method.per_class is None:
        raise ValueError(
            f"start: the method {name} does not say which parameters have a row for each class: "
            "write Method(..., per_class=()) for none, or take the backbone alone by "
            "--config.start.takes=backbone"
        )
