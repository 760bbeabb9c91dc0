"""A config becomes a `Run`. This module alone reads the config."""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import optax

from dmljax import metrics
from dmljax.config import digests, durations, fields, registry
from dmljax.config.fields import named
from dmljax.data import batches, sampling
from dmljax.data import digest as data_digests
from dmljax.data.reader import Reader
from dmljax.data.sampling import sampler as samplers
from dmljax.data.splits import (
    Split,
    Splits,
    divide,
    fold_of_classes,
    queries_and_gallery,
    share,
)
from dmljax.data.transforms import transform as transform_lib
from dmljax.hints import hint
from dmljax.methods.base import Inspect, Method, RandomMiner
from dmljax.train import devices, initial_state, optimizers, start
from dmljax.train.evaluation import MEAN, cut_names
from dmljax.train.run import (
    CheckpointOptions,
    EvaluationOptions,
    Run,
    RuntimeOptions,
    Selection,
)
from dmljax.train.step import check_chunks, init_state
from dmljax.weights import expected_normalization, file_digest

__all__ = ["build", "digests_of", "embedding"]

Config = dict[str, Any]
_CALLED = registry.Kind("function for evaluate.call", (), 1, ("step", "workdir"))
_GROUP_FIELDS = {
    "path": "str",
    "factor": "float",
    "decay": "float | None",
    "l2": "float | None",
    "frozen": "bool",
    "from": "int | str",  # a step, or '1 epoch'
}


def build(config: Any) -> Run:
    """Everything that a run needs. Raises a one-line error if the config is wrong."""
    config = fields.complete(config)
    splits = _splits(config)
    data = _data(config, splits)
    sampler = _sampler(config, data.train)
    shards = _shards(config, sampler.batch_size)
    total = sampler.steps(config["steps"], "steps")
    net, weights = _net(config)
    normalization = _normalization(config, net, weights)
    config = {**config, "normalize": normalization}
    normalize_fn = _normalize_fn(normalization)
    method = _method(config, net, len(data.train.names))
    transform_fn = registry.resolve("transform", config["transform"], bind=transform_lib.bind)
    eval_transform_fn = registry.resolve(
        "transform", config["eval_transform"], bind=transform_lib.bind
    )
    image_shape, eval_image_shape = (
        batches.image_shape(
            Reader(data.train, cache=False), fn, skip=config["unreadable"] == "skip"
        )
        for fn in (transform_fn, eval_transform_fn)
    )

    def init_method(key, backbone=None, method=method):
        images = normalize_fn(jax.numpy.zeros((2, *image_shape), jax.numpy.uint8))
        batch = {"images": images, "labels": jax.numpy.zeros(2, jax.numpy.int32)}
        return method.init(key, batch, backbone=backbone)

    frozen = _backbone_paths(init_method, net, image_shape) if config["trained"] == "last" else ()
    optimizer = _optimizer(config, sampler.steps, total, frozen)

    def init_fn(key, backbone=None, others=None):
        params, model_state = init_method(key, backbone)
        return init_state(*start.replaced(params, model_state, others), optimizer)

    key = jax.eval_shape(lambda: initial_state.key_of(0))
    shapes = jax.eval_shape(init_fn, key)
    _check_groups(config, shapes.params)
    carried = None
    if config["start"] is not None and config["carried"] == "all":
        # Far more classes, because a method may round their number up.
        other = _method(config, net, len(data.train.names) + 1_000_003)
        own, of_more = (
            start.flat(*jax.eval_shape(lambda key, m=m: init_method(key, method=m), key))
            for m in (method, other)
        )
        per_class = {path for path, array in own.items() if array.shape != of_more[path].shape}
        backbone = frozen or _backbone_paths(init_method, net, image_shape)
        carried = start.Carried(own, frozenset(per_class), frozenset(backbone))
    sharded = tuple(config["runtime"]["sharded"])
    placements = devices.of_state(shapes, shards, patterns=sharded)
    check_chunks(
        method,
        shapes,
        jax.eval_shape(normalize_fn, jax.ShapeDtypeStruct((2, *image_shape), jax.numpy.uint8)),
        chunk=config["chunk"],
        sharded=sharded,
        batch=sampler.batch_size,
        devices=shards.size,
    )
    evaluation = _evaluation(config, data, method, sampler, total)

    def part_names():
        parts_fn = (method.inspect or Inspect()).parts
        if parts_fn is None:
            return []
        images = jax.ShapeDtypeStruct((1, *eval_image_shape), jax.numpy.uint8)
        parts = jax.eval_shape(
            lambda params, state, x: parts_fn(params, state, normalize_fn(x)),
            shapes.params,
            shapes.model_state,
            images,
        )
        return list(parts) + [MEAN] * (len(parts) > 1)

    return Run(
        config=config,
        seed=config["seed"],
        steps=total,
        batch_size=sampler.batch_size,
        chunk=config["chunk"],
        log_every=config["log_every"],
        reload_best_at=_reloads(config, sampler, evaluation, total),
        selection=_selection(config, data, evaluation, part_names),
        patience=config["patience"],
        evaluation=evaluation,
        checkpoint=CheckpointOptions(
            every=sampler.every(
                config["checkpoint"]["every"] or config["evaluate"]["every"] or total,
                total,
                "checkpoint.every",
            ),
            keep=config["checkpoint"]["keep"],
        ),
        runtime=RuntimeOptions(
            workers=config["runtime"]["workers"],
            cache=config["runtime"]["cache"],
            deterministic=config["runtime"]["deterministic"],
            sharded=sharded,
        ),
        pictures=config["pictures"],
        dataset=named(config["dataset"])["name"],
        data_digest=data_digests.digest(splits),
        train=data.train,
        held_out=data.held_out,
        test=data.test,
        unreadable=config["unreadable"],
        sample_fn=sampler.sample_fn,
        sampler_note=sampler.note,
        transform_fn=transform_fn,
        eval_transform_fn=eval_transform_fn,
        normalize_fn=normalize_fn,
        image_shape=image_shape,
        eval_image_shape=eval_image_shape,
        net_name=named(config["net"])["name"],
        net=net,
        weights=weights,
        start=config["start"],
        carried=carried,
        method=method,
        optimizer=optimizer,
        init_fn=init_fn,
        shards=shards,
        shapes=shapes,
        placements=placements,
    )


def digests_of(config: Any, *, data: str | None = None) -> digests.Digests:
    """The digests of the run that a config describes, without building it.

    `data` is the digest of its data set, where that is known.
    """
    config = fields.complete(config)
    net, weights = _net(config)
    config = {**config, "normalize": _normalization(config, net, weights)}
    initial_state.check_file(weights)
    return digests.of_config(
        config,
        data=data or data_digests.digest(_splits(config)),
        weights=None if weights is None else file_digest(weights),
        start=None if config["start"] is None else start.find(config["start"]).digest,
    )


class _Data(NamedTuple):
    train: Split
    held_out: Split | None
    test: Split


# Fields of `dataset` that are not arguments of the data set: shares of the training split.
_SHARES = {"image_share": "float", "class_share": "float"}


def _splits(config: Config) -> Splits:
    spec = {k: v for k, v in named(config["dataset"]).items() if k not in _SHARES}
    return registry.resolve("dataset", spec, caller_keywords=_SHARES)()


def _data(config: Config, splits: Splits) -> _Data:
    train, held_out = splits.train, None
    if config["fold"] is not None:
        if config["validation"]:
            raise ValueError(
                f"fold={config['fold']} and validation={config['validation']} both hold classes "
                "out: leave out one of them"
            )
        is_held_out = fold_of_classes(
            len(train.names),
            fold=config["fold"],
            folds=config["folds"],
            seed=config["fold_seed"],
        )
        train_names = [n for n, held in zip(train.names, is_held_out, strict=True) if not held]
        train, held_out = divide(train, train=train_names)
    elif config["validation"]:
        train, held_out = divide(train, train=train.names[: _train_classes(config, train)])
    if held_out is not None and _has_two_sides(splits.test) and held_out.query is None:
        held_out = queries_and_gallery(held_out)
    return _Data(_shared(config, train), held_out, splits.test)


def _train_classes(config: Config, train: Split) -> int:
    """The number of classes that `validation` leaves for training."""
    # One held-out class alone would score 1 whatever the net does.
    count = len(train.names)
    train_classes = min(round((1 - config["validation"]) * count), count - 2)
    if train_classes < 2:
        raise ValueError(
            f"validation={config['validation']} needs two classes to hold out and two to train on, "
            f"and there are {count} training classes: add classes, or train without it by "
            "--config.validation=0 --config.select=last"
        )
    return train_classes


def _has_two_sides(split: Split) -> bool:
    """Whether no image of a split is both a query and in the gallery."""
    return split.query is not None and not (split.query & split.gallery).any()


def _shared(config: Config, train: Split) -> Split:
    """The share of the training split that `dataset.image_share` and `class_share` ask for."""
    shares = {k: v for k, v in named(config["dataset"]).items() if k in _SHARES}
    if not shares:
        return train
    registry.check("dataset", shares, _SHARES)
    return share(
        train,
        images=shares.get("image_share", 1.0),
        classes=shares.get("class_share", 1.0),
        seed=config["seed"],
    )


class _Sampler(NamedTuple):
    sample_fn: Callable
    batch_size: int
    note: str
    epoch_end: Callable[[float], float]

    def steps(self, length: int | str, field: str) -> int:
        return durations.steps(length, epoch_end=self.epoch_end, field=field)

    def every(self, length: int | str, total: int, field: str) -> Collection[int]:
        return durations.every(length, epoch_end=self.epoch_end, total=total, field=field)


def _sampler(config: Config, train: Split) -> _Sampler:
    spec, seed = named(config["sampler"]), config["seed"]
    sampler = registry.resolve("sampler", spec, bind=samplers.bind)
    groups = sampling.group(train.labels)
    batch_size = len(sampler(groups, seed=seed, step=0))
    epoch_end = samplers.epoch_end_fn(sampler, groups, seed=seed)
    return _Sampler(sampler, batch_size, sampler.describe(groups), epoch_end)


def _shards(config: Config, batch_size: int) -> devices.Shardings:
    count = config["runtime"]["devices"]
    if count and jax.process_count() > 1:
        raise ValueError(
            "runtime.devices needs a run of one process: several processes use all of their devices"
        )
    return devices.shardings(jax.devices()[:count] if count else None, batch=batch_size)


def _optimizer(
    config: Config, steps: Callable, total: int, frozen: Sequence[str] = ()
) -> optax.GradientTransformation:
    """The optimizer; the parameters at the paths `frozen` do not learn, whatever the groups say."""
    schedule = dict(named(config["schedule"]))
    if "warmup" in schedule:
        schedule["warmup"] = steps(schedule["warmup"], "schedule.warmup")
    if "at" in schedule:
        schedule["at"] = [steps(at, "schedule.at") for at in schedule["at"]]
    schedule_fn = registry.resolve("schedule", schedule)(total=total)
    spec = dict(named(config["optimizer"]))
    parameters = inspect.signature(optimizers.build).parameters
    types = {k: parameters[k].annotation for k in parameters if k not in ("direction", "schedule")}
    options = {k: spec.pop(k) for k in list(spec) if k in types}
    registry.check("optimizer", options, types)
    for group in options.get("groups", ()):
        if not isinstance(group, dict):
            raise ValueError(f"optimizer.groups: write dict(path='^head/', ...), not {group!r}")
        registry.check("optimizer.groups", group, _GROUP_FIELDS)
    if "groups" in options:
        options["groups"] = [
            group
            | ({"from": steps(group["from"], "optimizer.groups.from")} if "from" in group else {})
            for group in options["groups"]
        ]
    if frozen:
        paths = "|".join(re.escape(path) for path in frozen)
        group = {"path": f"^({paths})$", "frozen": True}
        options["groups"] = [group, *options.get("groups", ())]
    if options.get("average") and config["reload_best_at"]:
        raise ValueError(
            "optimizer.average and reload_best_at exclude each other (the average would keep "
            "parameters from before the reload): leave out one of them"
        )
    direction = registry.resolve("optimizer", spec, caller_keywords=types)()
    return optimizers.build(direction, schedule=schedule_fn, **options)


def _check_groups(config: Config, params: Any) -> None:
    """Every group of the optimizer must match a parameter."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    paths = [devices.path_of(keys) for keys, _ in leaves]
    for group in named(config["optimizer"]).get("groups", ()):
        if not any(re.search(group["path"], path) for path in paths):
            raise ValueError(
                f"optimizer.groups: {group['path']!r} matches no parameter, such as "
                f"{', '.join(paths[:: max(1, len(paths) // 4)])}"
            )


def _net(config: Config) -> tuple[Any, str | None]:
    """The backbone, and the file of its weights."""
    spec = dict(named(config["net"]))
    weights = spec.pop("weights", None)
    if weights and config["start"]:
        raise ValueError(
            f"start={config['start']!r} and net.weights={weights!r} both give the first backbone: "
            "leave out one of them, such as by --config.net.weights=None"
        )
    net = registry.resolve("net", _tuples(spec))()
    if config["trained"] == "last":
        if not weights and not config["start"]:
            raise ValueError(
                "trained='last' leaves the backbone as it is, so it needs a pretrained one: "
                "--config.start=runs/... or --config.net.weights=..."
            )
        if hasattr(net, "frozen"):  # its batch norms keep their statistics
            net = net.clone(frozen=True)
    return net, weights


def _backbone_paths(init_fn: Callable, net: Any, image_shape: tuple[int, ...]) -> tuple[str, ...]:
    """The paths of the parameters that a pretrained backbone sets: `init_fn` returns its arrays."""
    images = jax.ShapeDtypeStruct((2, *image_shape), jax.numpy.float32)
    key = jax.eval_shape(lambda: initial_state.key_of(0))
    backbone = jax.eval_shape(lambda key, x: net.init(key, x, train=False), key, images)
    traced, shapes = jax.make_jaxpr(init_fn, return_shape=True)(key, backbone)
    given = {id(variable) for variable in traced.jaxpr.invars}
    params = jax.tree_util.tree_leaves_with_path(shapes)
    return tuple(
        devices.path_of(keys[1:])
        for (keys, _), variable in zip(params, traced.jaxpr.outvars, strict=True)
        if keys[0].idx == 0 and id(variable) in given
    )


def embedding(config: Config, *, classes: int) -> tuple[Method, Callable]:
    """The method and the normalization of a run's config (`Run.config`), without its data set."""
    net, _ = _net(config)
    return _method(config, net, classes), _normalize_fn(config["normalize"])


def _normalization(config: Config, net: Any, weights: str | None) -> Any:
    """The normalization that the config, the file of weights, or the net asks for, in that order.

    A config may not contradict the weights, which need the input that they were trained on, unless
    it says `force=True`.
    """
    net_normalization = getattr(net, "expected_normalization", None) or "imagenet"
    file_normalization = (
        expected_normalization(weights) if weights and os.path.isfile(weights) else None
    )
    source = weights
    if config["start"] is not None and (spec := start.normalization(config["start"])) is not None:
        source = config["start"]
        if config["normalize"] is None:
            return spec
        file_normalization = named(spec)["name"]
    if config["normalize"] is None:
        return file_normalization or net_normalization
    name = named(config["normalize"])["name"]
    force = isinstance(config["normalize"], dict) and config["normalize"].get("force") is True
    if file_normalization is not None and name != file_normalization and not force:
        raise ValueError(
            f"normalize={name!r} contradicts {source}, which expects {file_normalization!r}: leave "
            f"it out, or insist by --config.normalize=\"{{'name': {name!r}, 'force': True}}\""
        )
    return config["normalize"]


def _normalize_fn(spec: Any) -> Callable:
    """The normalization of a config; `force` is for `_normalization` alone."""
    spec = {k: v for k, v in named(spec).items() if k != "force"}
    return registry.resolve("normalization", spec)


def _method(config: Config, net: Any, classes: int) -> Method:
    loss_fn = registry.resolve("loss", _tuples(config["loss"]))
    factory = registry.resolve("method", _tuples(config["method"]))
    arguments: dict[str, Any] = {"classes": classes}
    if config["miner"]:
        mine_fn = registry.resolve("miner", _tuples(config["miner"]))
        if "mine_fn" not in inspect.signature(factory).parameters:
            raise ValueError(f"the method {named(config['method'])['name']} takes no miner")
        is_random = "key" in inspect.signature(mine_fn).parameters
        arguments["mine_fn"] = RandomMiner(mine_fn) if is_random else mine_fn
    return factory(net, loss_fn, **arguments)


def _tuples(spec: Any) -> Any:
    """Lists as tuples: attributes of a Linen module must be hashable."""
    if isinstance(spec, dict):
        return {k: _tuples(v) for k, v in spec.items()}
    return tuple(_tuples(v) for v in spec) if isinstance(spec, list) else spec


def _evaluation(
    config: Config, data: _Data, method: Method, sampler: _Sampler, total: int
) -> EvaluationOptions:
    options = config["evaluate"]
    if options["knn"] and not set(data.train.names) & set(data.test.names):
        raise ValueError(
            "evaluate.knn takes the class from training images, but the test split has other "
            "classes"
        )
    if options["refine"] and (method.inspect or Inspect()).refine is None:
        raise ValueError("evaluate.refine: this method does not refine embeddings")
    if options["mean_distance"] and (method.inspect or Inspect()).parts is None:
        raise ValueError("evaluate.mean_distance: this method has no learners: leave it out")
    if options["mean_distance"] and data.test.groups is not None:
        raise ValueError(
            "evaluate.mean_distance: the data set has groups, which it cannot leave out"
        )
    if options["average"] not in metrics.AVERAGES:
        raise ValueError(
            f"evaluate.average={options['average']!r} is not known: "
            f"{' or '.join(map(repr, metrics.AVERAGES))}"
        )
    ks, functions = _metrics(options)
    return EvaluationOptions(
        every=sampler.every(options["every"] or total, total, "evaluate.every"),
        batch_size=options["batch_size"],
        ks=ks,
        ranking_fns=functions["ranks"],
        clustering_fns=functions["clusterings"],
        embedding_fns=functions["embeddings"],
        clusters_at_end=options["clustering"] == "end",
        seeds=tuple(options["seeds"]),
        starts=options["starts"],
        depth=options["depth"],
        call_fn=registry.own_function(options["call"], _CALLED) if options["call"] else None,
        knn=options["knn"],
        refine=options["refine"],
        mean_distance=options["mean_distance"],
        average=options["average"],
        frames=options["frames"],
        projector=options["projector"],
        frame_ms=options["frame_ms"],
        last_frame_ms=options["last_frame_ms"],
    )


def _metrics(options: Config) -> tuple[tuple[int, ...], dict[str, dict[str, Callable]]]:
    """The K of R@K, and the functions of ranks, of clusterings and of embeddings by shown names."""
    functions: dict[str, dict[str, Callable]] = {"ranks": {}, "clusterings": {}, "embeddings": {}}
    ks: list[int] = []
    if options["metrics"] is None:
        ks += options["ks"]
        functions["ranks"] |= metrics.RANKING_FNS
        functions["clusterings"] |= metrics.CLUSTERING_FNS
    for spec in [*(options["metrics"] or ()), *options["extra"]]:
        spec = dict(named(spec))
        if (new_name := metrics.RENAMED.get(spec.get("name"))) is not None:
            warnings.warn(
                f"the metric {spec['name']!r} is now called {new_name!r}",
                DeprecationWarning,
                stacklevel=2,
            )
            spec["name"] = new_name
        if spec.get("name") == "recall_at_k":
            registry.resolve("metric", spec)
            ks += [spec["k"]] if "k" in spec else options["ks"]
            continue
        function = registry.resolve("metric", spec)
        name = metrics.shown_name(spec["name"], {k: v for k, v in spec.items() if k != "name"})
        functions[_argument_kind(function)][name] = function
    if not options["clustering"]:
        functions["clusterings"] = {}
    return tuple(dict.fromkeys(ks)), functions


def _argument_kind(function: Callable) -> str:
    """What a metric takes: 'ranks', 'embeddings' and labels, or the labels of 'clusterings'."""
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in kinds and p.default is p.empty]
    if len(names) == 1:
        return "ranks"
    return "embeddings" if names[:1] == ["embeddings"] else "clusterings"


def _selection(
    config: Config, data: _Data, evaluation: EvaluationOptions, part_names: Callable
) -> Selection:
    rule = config["select"]
    if rule == "last":
        if config["patience"] is not None:
            raise ValueError(
                f"patience={config['patience']} needs a score to watch: --config.select=val/MAP@R, "
                "or another score"
            )
        selection = Selection("last", "test", "R@1")
        if not config["reload_best_at"]:
            return selection
    else:
        split, _, score = rule.partition("/")
        if split not in ("val", "test"):
            raise ValueError(
                "select must be 'last', or a score of a split such as 'val/R@1' or 'test/MAP@R', "
                f"not {rule!r}"
            )
        if split == "val" and data.held_out is None:
            raise ValueError(
                f"select={rule!r} needs held-out classes: --config.validation=0.2, or "
                "--config.fold=0 for the first of four folds"
            )
        score = score or "R@1"
        selection = Selection(f"{split}/{score}", split, score)
    names = _score_names(evaluation)
    if "/" in selection.score:
        names += [f"{part}/R@{k}" for part in part_names() for k in evaluation.ks or (1,)]
    if selection.score not in names:
        raise ValueError(
            f"select={rule!r}: the evaluation has no score {selection.score!r}"
            f"{hint(selection.score, names)}"
        )
    if selection.score.rpartition("/")[2] in metrics.LESS_IS_BETTER:
        raise ValueError(
            f"select={rule!r} would choose the step with the highest {selection.score}, of which "
            "less is better: choose another score, such as test/R@1"
        )
    return selection


def _score_names(evaluation: EvaluationOptions) -> list[str]:
    recalls = [f"R@{k}" for k in evaluation.ks]
    names = [*recalls, *evaluation.ranking_fns]
    refined = [f"refined/{name}" for name in names] if evaluation.refine else []
    by_distance = [f"mean_distance/{name}" for name in names] if evaluation.mean_distance else []
    knn = ["knn"] if evaluation.knn else []
    clusterings = () if evaluation.clusters_at_end else evaluation.clustering_fns
    cut = cut_names(evaluation.depth)
    return [*names, *cut, *clusterings, *evaluation.embedding_fns, *refined, *by_distance, *knn]


def _reloads(
    config: Config, sampler: _Sampler, evaluation: EvaluationOptions, total: int
) -> tuple[int, ...]:
    at = tuple(sampler.steps(length, "reload_best_at") for length in config["reload_best_at"])
    if at and min(at) < (first := min(evaluation.every, default=total)):
        raise ValueError(f"reload_best_at: {min(at)} is before the first evaluation, at {first}")
    return at
