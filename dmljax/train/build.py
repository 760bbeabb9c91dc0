"""A config becomes a `Run`. This module alone reads the config."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import optax

from dmljax import metrics
from dmljax.data import batches, sampling
from dmljax.data.reader import Reader
from dmljax.data.sampling import sampler as samplers
from dmljax.data.splits import Split, divide
from dmljax.data.transforms import transform as transform_lib
from dmljax.hints import hint
from dmljax.methods.base import Inspect, Method, RandomMiner
from dmljax.train import devices, durations, fields, initial_state, optimizers, registry
from dmljax.train.fields import named
from dmljax.train.run import (
    CheckpointOptions,
    EvaluationOptions,
    Run,
    RuntimeOptions,
    Selection,
)
from dmljax.train.step import check_chunks, init_state
from dmljax.weights import expected_normalization

__all__ = ["build"]

Config = dict[str, Any]
_GROUP_FIELDS = {"path": "str", "factor": "float", "decay": "float | None", "frozen": "bool"}


def build(config: Any) -> Run:
    """Everything that a run needs. Raises a one-line error if the config is wrong."""
    config = fields.complete(config)
    data = _data(config)
    sampler = _sampler(config, data.train)
    shards = _shards(config, sampler.batch_size)
    total = sampler.steps(config["steps"])
    optimizer = _optimizer(config, sampler.steps, total)
    net, weights = _net(config)
    normalization = _normalization(config, net, weights)
    config = {**config, "normalize": normalization}
    normalize_fn = registry.resolve("normalization", normalization)
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

    def init_fn(key, backbone=None):
        images = normalize_fn(jax.numpy.zeros((2, *image_shape), jax.numpy.uint8))
        batch = {"images": images, "labels": jax.numpy.zeros(2, jax.numpy.int32)}
        return init_state(*method.init(key, batch, backbone=backbone), optimizer)

    shapes = jax.eval_shape(init_fn, jax.eval_shape(lambda: initial_state.key_of(0)))
    _check_groups(config, shapes.params)
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
    return Run(
        config=config,
        seed=config["seed"],
        steps=total,
        batch_size=sampler.batch_size,
        chunk=config["chunk"],
        log_every=config["log_every"],
        reload_best_at=_reloads(config, sampler, evaluation, total),
        selection=_selection(config, data, evaluation),
        evaluation=evaluation,
        checkpoint=CheckpointOptions(
            every=sampler.every(
                config["checkpoint"]["every"] or config["evaluate"]["every"] or total, total
            ),
            keep=config["checkpoint"]["keep"],
        ),
        runtime=RuntimeOptions(
            workers=config["runtime"]["workers"],
            cache=config["runtime"]["cache"],
            sharded=sharded,
        ),
        pictures=config["pictures"],
        dataset=named(config["dataset"])["name"],
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
        method=method,
        optimizer=optimizer,
        init_fn=init_fn,
        shards=shards,
        shapes=shapes,
        placements=placements,
    )


class _Data(NamedTuple):
    train: Split
    held_out: Split | None
    test: Split


def _data(config: Config) -> _Data:
    splits = registry.resolve("dataset", config["dataset"])()
    if not config["validation"]:
        return _Data(splits.train, None, splits.test)
    names = splits.train.names
    # One held-out class alone would score 1 whatever the net does.
    train_classes = min(round((1 - config["validation"]) * len(names)), len(names) - 2)
    if train_classes < 2:
        raise ValueError(
            f"validation={config['validation']} needs two classes to hold out and two to train on, "
            f"and there are {len(names)} training classes: add classes, or train without it by "
            "--config.validation=0 --config.select=last"
        )
    train, held_out = divide(splits.train, train=names[:train_classes])
    return _Data(train, held_out, splits.test)


class _Sampler(NamedTuple):
    sample_fn: Callable
    batch_size: int
    note: str
    epoch_end: Callable[[float], float]

    def steps(self, length: int | str) -> int:
        return durations.steps(length, epoch_end=self.epoch_end)

    def every(self, length: int | str, total: int) -> Collection[int]:
        return durations.every(length, epoch_end=self.epoch_end, total=total)


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


def _optimizer(config: Config, steps: Callable, total: int) -> optax.GradientTransformation:
    schedule = dict(named(config["schedule"]))
    if "warmup" in schedule:
        schedule["warmup"] = steps(schedule["warmup"])
    if "at" in schedule:
        schedule["at"] = [steps(at) for at in schedule["at"]]
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
    return registry.resolve("net", _tuples(spec))(), weights


def _normalization(config: Config, net: Any, weights: str | None) -> Any:
    """The normalization that the config, the file of weights, or the net asks for, in that order.

    A config may not contradict the weights, which need the input that they were trained on.
    """
    net_normalization = getattr(net, "expected_normalization", None) or "imagenet"
    file_normalization = (
        expected_normalization(weights) if weights and os.path.isfile(weights) else None
    )
    if config["normalize"] is None:
        return file_normalization or net_normalization
    name = named(config["normalize"])["name"]
    if file_normalization is not None and name != file_normalization:
        raise ValueError(
            f"normalize={name!r} contradicts {weights}, which expects "
            f"{file_normalization!r}: leave it out"
        )
    return config["normalize"]


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
    ks, ranking_fns, clustering_fns = _metrics(options)
    return EvaluationOptions(
        every=sampler.every(options["every"] or total, total),
        batch_size=options["batch_size"],
        ks=ks,
        ranking_fns=ranking_fns,
        clustering_fns=clustering_fns,
        seeds=tuple(options["seeds"]),
        knn=options["knn"],
        refine=options["refine"],
        frames=options["frames"],
    )


def _metrics(
    options: Config,
) -> tuple[tuple[int, ...], Mapping[str, Callable], Mapping[str, Callable]]:
    """The K of R@K, and the other functions of ranks and of clusterings by their shown names."""
    if options["metrics"] is None:
        clustering_fns = metrics.CLUSTERING_FNS if options["clustering"] else {}
        return tuple(options["ks"]), metrics.RANKING_FNS, clustering_fns
    ks: list[int] = []
    ranking_fns, clustering_fns = {}, {}
    for spec in options["metrics"]:
        spec = dict(named(spec))
        if spec.get("name") == "recall_at_k":
            registry.resolve("metric", spec)
            ks += [spec["k"]] if "k" in spec else options["ks"]
            continue
        function = registry.resolve("metric", spec)
        name = metrics.shown_name(spec["name"], {k: v for k, v in spec.items() if k != "name"})
        if _positional(function) == 1:
            ranking_fns[name] = function
        elif options["clustering"]:
            clustering_fns[name] = function
    return tuple(dict.fromkeys(ks)), ranking_fns, clustering_fns


def _positional(function: Callable) -> int:
    """The number of arguments that must be given by position."""
    parameters = inspect.signature(function).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in parameters)


def _selection(config: Config, data: _Data, evaluation: EvaluationOptions) -> Selection:
    rule = config["select"]
    if rule == "last":
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
            raise ValueError(f"select={rule!r} needs held-out classes: --config.validation=0.2")
        score = score or "R@1"
        selection = Selection(f"{split}/{score}", split, score)
    names = _score_names(evaluation)
    if selection.score not in names:
        raise ValueError(
            f"select={rule!r}: the evaluation has no score {selection.score!r}"
            f"{hint(selection.score, names)}"
        )
    return selection


def _score_names(evaluation: EvaluationOptions) -> list[str]:
    recalls = [f"R@{k}" for k in evaluation.ks]
    names = [*recalls, *evaluation.ranking_fns]
    refined = [f"refined/{name}" for name in names] if evaluation.refine else []
    knn = ["knn"] if evaluation.knn else []
    return [*names, *evaluation.clustering_fns, *refined, *knn]


def _reloads(
    config: Config, sampler: _Sampler, evaluation: EvaluationOptions, total: int
) -> tuple[int, ...]:
    at = tuple(sampler.steps(length) for length in config["reload_best_at"])
    if at and min(at) < (first := min(evaluation.every, default=total)):
        raise ValueError(f"reload_best_at: {min(at)} is before the first evaluation, at {first}")
    return at
