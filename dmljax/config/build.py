"""A config becomes a `Run`."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax

from dmljax.config import digests, durations, fields, old_names, registry
from dmljax.config.fields import named
from dmljax.config.optimizer import check_groups, optimizer_of
from dmljax.config.scores import call_fn_of, check_evaluation, metrics_of, selection_of
from dmljax.config.splits import Data, data_of, epoch_labels, splits_of
from dmljax.data import batches, sampling
from dmljax.data import digest as data_digests
from dmljax.data.reader import Reader
from dmljax.data.sampling import sampler as samplers
from dmljax.data.splits import Split
from dmljax.data.transforms import transform as transform_lib
from dmljax.methods.base import Inspect, Method, RandomMiner
from dmljax.train import devices, initial_state, start
from dmljax.train.evaluation import MEAN
from dmljax.train.options import Length, Options, RuntimeOptions, Spec
from dmljax.train.run import Run
from dmljax.train.step import TrainState, check_chunks, init_state
from dmljax.weights import expected_normalization, file_digest

__all__ = ["build", "digests_of", "embedding"]


def build(config: Any) -> Run:
    """Everything that a run needs. Raises a one-line error if the config is wrong."""
    config = fields.complete(config)
    options = fields.typed(config)
    data = data_of(options)
    sampler = _sampler(options, data.train)
    total = sampler.steps(options.steps, "steps")
    shards = _shards(options.runtime)
    backbone = _backbone(options)
    normalization = _normalization(options, backbone)
    images = _images(options, data, normalization)
    method = _method(options, backbone.net, len(data.train.names))

    def init_method(key, backbone=None):
        batch = {"images": images.example(), "labels": jax.numpy.zeros(2, jax.numpy.int32)}
        return method.init(key, batch, backbone=backbone)

    frozen = method.backbone if options.trained == "last" else ()
    optimizer = optimizer_of(options, steps_fn=sampler.steps, total=total, frozen=frozen)

    def init_fn(key, backbone=None, others=None):
        params, model_state = init_method(key, backbone)
        return init_state(*start.replaced(params, model_state, others), optimizer)

    shapes = jax.eval_shape(init_fn, jax.eval_shape(lambda: initial_state.key_of(0)))
    check_groups(options.optimizer, shapes.params)
    check_chunks(
        method,
        shapes,
        jax.eval_shape(images.example),
        chunk=options.chunk,
        sharded=options.runtime.sharded,
    )
    check_evaluation(options.evaluate, data, method)
    metrics = metrics_of(options.evaluate)
    interval = options.evaluate.every or total
    evaluation_steps = sampler.every(interval, total, "evaluate.every")
    checkpoint_interval = options.checkpoint.every or interval
    return Run(
        config=fields.with_normalization(config, normalization),
        seed=options.seed,
        steps=total,
        batch_size=sampler.batch_size,
        chunk=options.chunk,
        log_every=options.log_every,
        reload_best_at=_reloads(options, sampler, min(evaluation_steps, default=total)),
        selection=selection_of(
            options,
            data,
            metrics,
            part_names_fn=functools.partial(_part_names, method, shapes, images),
        ),
        patience=options.patience,
        evaluation=options.evaluate,
        evaluation_steps=evaluation_steps,
        metrics=metrics,
        call_fn=call_fn_of(options.evaluate),
        checkpoint=options.checkpoint,
        checkpoint_steps=sampler.every(checkpoint_interval, total, "checkpoint.every"),
        runtime=options.runtime,
        pictures=options.pictures,
        unreadable=options.unreadable,
        sample_fn=sampler.sample_fn,
        sampler_note=sampler.note,
        start=options.start,
        carried=_carried(options, method, shapes),
        method=method,
        optimizer=optimizer,
        init_fn=init_fn,
        shards=shards,
        shapes=shapes,
        placements=devices.of_state(shapes, shards, patterns=options.runtime.sharded),
        **data._asdict(),
        **images._asdict(),
        **backbone._asdict(),
    )


def digests_of(config: Any, *, data: str | None = None) -> digests.Digests:
    """The digests of the run that a config describes, without building it.

    `data` is the digest of its data set, where that is known.
    """
    config = fields.complete(config)
    options = fields.typed(config)
    backbone = _backbone(options)
    config = fields.with_normalization(config, _normalization(options, backbone))
    weights = backbone.weights
    initial_state.check_file(weights)
    return digests.of_config(
        config,
        data=data or data_digests.digest(splits_of(options)),
        weights=None if weights is None else file_digest(weights),
        start=None if options.start is None else start.find(options.start).digest,
    )


def embedding(config: dict[str, Any], *, classes: int) -> tuple[Method, Callable]:
    """The method and the normalization of a run's config (`Run.config`), without its data set."""
    options = fields.typed(config)
    assert options.normalize is not None
    return _method(options, _backbone(options).net, classes), _normalize_fn(options.normalize)


class _Sampler(NamedTuple):
    sample_fn: Callable
    batch_size: int
    note: str
    epoch_end: Callable[[float], float]

    def steps(self, length: Length, field: str) -> int:
        return durations.steps(length, epoch_end=self.epoch_end, field=field)

    def every(self, length: Length, total: int, field: str) -> Collection[int]:
        return durations.every(length, epoch_end=self.epoch_end, total=total, field=field)


def _sampler(options: Options, train: Split) -> _Sampler:
    sample_fn, keywords = registry.find("sampler", options.sampler)
    sampler = samplers.bind(sample_fn, **keywords)
    groups = sampling.group(train.labels)
    batch_size = len(sampler(groups, seed=options.seed, step=0))
    labels = epoch_labels(options, train)
    epoch_end = samplers.epoch_end_fn(sampler, labels, seed=options.seed)
    return _Sampler(sampler.batch, batch_size, sampler.describe(groups), epoch_end)


def _shards(options: RuntimeOptions) -> devices.Shardings:
    count = options.devices
    if count and jax.process_count() > 1:
        raise ValueError(
            "runtime.devices needs a run of one process: several processes use all of their devices"
        )
    return devices.Shardings(jax.devices()[:count] if count else None)


class _Backbone(NamedTuple):
    net_name: str
    net: Any
    weights: str | None  # the file of its pretrained weights


def _backbone(options: Options) -> _Backbone:
    spec = dict(options.net)
    weights = spec.pop("weights", None)
    if weights and options.start:
        raise ValueError(
            f"start={options.start!r} and net.weights={weights!r} both give the first backbone: "
            "leave out one of them, such as by --config.net.weights=None"
        )
    net = registry.resolve("net", spec)()
    if options.trained == "last":
        if not weights and not options.start:
            raise ValueError(
                "trained='last' leaves the backbone as it is, so it needs a pretrained one: "
                "--config.start=runs/... or --config.net.weights=..."
            )
        if hasattr(net, "frozen"):  # its batch norms keep their statistics
            net = net.clone(frozen=True)
    return _Backbone(spec["name"], net, weights)


def _carried(options: Options, method: Method, shapes: TrainState) -> start.Carried | None:
    """What a run that starts from another one may take from it beside the backbone."""
    names = start.flat(shapes.params, shapes.model_state)
    backbone = {path for path in map(_param_path, names) if _is_under(path, method.backbone)}
    if not backbone and (options.start is not None or options.trained == "last"):
        raise ValueError(
            f"the method {options.method['name']} has no parameters at "
            f"{', '.join(method.backbone)}: say where its backbone is by Method(..., backbone=...)"
        )
    if options.start is None or options.carried != "all":
        return None
    if method.per_class is None:
        raise ValueError(
            f"start: the method {options.method['name']} does not say which parameters have a row "
            "for each class: write Method(..., per_class=()) for none, or take the backbone alone "
            "by --config.carried=backbone"
        )
    per_class = {name for name in names if _is_under(_param_path(name), method.per_class)}
    return start.Carried(names, frozenset(per_class), frozenset(backbone))


def _param_path(name: str) -> str:
    """'head/fc/kernel' of 'params/head/fc/kernel'; '' of a name that is no parameter."""
    collection, _, path = name.partition("/")
    return path if collection == "params" else ""


def _is_under(path: str, folders: Collection[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def _normalization(options: Options, backbone: _Backbone) -> str | Spec:
    """The normalization of the config, else of the weights or of `start`, else of the net.

    A config may not contradict the weights, which need the input that they were trained on, unless
    it says `force=True`.
    """
    source, expected = backbone.weights, None
    if source and os.path.isfile(source):
        expected = expected_normalization(source)
    if options.start is not None and (spec := start.normalization(options.start)) is not None:
        source, expected = options.start, spec
    if options.normalize is None:
        return expected or getattr(backbone.net, "expected_normalization", None) or "imagenet"
    name, force = options.normalize["name"], options.normalize.get("force") is True
    if expected is not None and name != named(expected)["name"] and not force:
        raise ValueError(
            f"normalize={name!r} contradicts {source}, which expects {named(expected)['name']!r}: "
            f"leave it out, or insist by --config.normalize=\"{{'name': {name!r}, 'force': True}}\""
        )
    return options.normalize


def _normalize_fn(spec: str | Spec) -> Callable:
    """The normalization of a config; `force` is for `_normalization` alone."""
    spec = {k: v for k, v in named(spec).items() if k != "force"}
    return registry.resolve("normalization", spec)


class _Images(NamedTuple):
    transform_fn: transform_lib.Transform
    eval_transform_fn: transform_lib.Transform
    normalize_fn: Callable
    image_shape: tuple[int, ...]
    eval_image_shape: tuple[int, ...]

    def example(self) -> jax.Array:
        """Two normalized images of training."""
        return self.normalize_fn(jax.numpy.zeros((2, *self.image_shape), jax.numpy.uint8))


def _images(options: Options, data: Data, normalization: str | Spec) -> _Images:
    reader, skip = Reader(data.train, cache=False), options.unreadable == "skip"
    specs = options.transform, options.eval_transform
    train_fn, eval_fn = (
        transform_lib.bind(function, **keywords)
        for function, keywords in [registry.find("transform", spec) for spec in specs]
    )
    shape, eval_shape = (batches.image_shape(reader, fn, skip=skip) for fn in (train_fn, eval_fn))
    return _Images(train_fn, eval_fn, _normalize_fn(normalization), shape, eval_shape)


def _method(options: Options, net: Any, classes: int) -> Method:
    loss_fn = registry.resolve("loss", options.loss)
    factory = registry.resolve("method", old_names.current_method(options.method))
    arguments: dict[str, Any] = {"classes": classes}
    if options.miner:
        mine_fn = registry.resolve("miner", options.miner)
        if "mine_fn" not in inspect.signature(factory).parameters:
            raise ValueError(f"the method {options.method['name']} takes no miner")
        is_random = "key" in inspect.signature(mine_fn).parameters
        arguments["mine_fn"] = RandomMiner(mine_fn) if is_random else mine_fn
    return factory(net, loss_fn, **arguments)


def _part_names(method: Method, shapes: TrainState, images: _Images) -> list[str]:
    """The names of the parts of an embedding that are scored, such as learners."""
    parts_fn = (method.inspect or Inspect()).parts
    if parts_fn is None:
        return []
    pixels = jax.ShapeDtypeStruct((1, *images.eval_image_shape), jax.numpy.uint8)
    parts = jax.eval_shape(
        lambda params, state, x: parts_fn(params, state, images.normalize_fn(x)),
        shapes.params,
        shapes.model_state,
        pixels,
    )
    return list(parts) + [MEAN] * (len(parts) > 1)


def _reloads(options: Options, sampler: _Sampler, first: int) -> tuple[int, ...]:
    """The steps of `reload_best_at`; `first` is the step of the first evaluation."""
    at = tuple(sampler.steps(length, "reload_best_at") for length in options.reload_best_at)
    if at and min(at) < first:
        raise ValueError(f"reload_best_at: {min(at)} is before the first evaluation, at {first}")
    return at
