"""A config becomes a `Run`."""

import functools
import inspect
import math
import os
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax

from dmljax import at_hand
from dmljax.adapt.trained import Adapted
from dmljax.config import digests, durations, fields, origin, registry
from dmljax.config.fields import named
from dmljax.config.input_note import input_note
from dmljax.config.method import (
    Backbone,
    adapted_of,
    backbone_of,
    check_memory,
    pooled_output_of,
    whiten_of,
    with_frozen,
)
from dmljax.config.optimizer import check_groups, optimizer_of
from dmljax.config.scores import call_fn_of, check_evaluation, metrics_of, selection_of
from dmljax.config.splits import Data, data_of, epoch_labels, splits_of
from dmljax.data import batches, sampling
from dmljax.data import digest as data_digests
from dmljax.data.features import Cache, transforms_of
from dmljax.data.reader import Reader
from dmljax.data.sampling import sampler as samplers
from dmljax.data.splits import Split, images_of
from dmljax.data.transforms import transform as transform_lib
from dmljax.methods import assemble
from dmljax.methods.base import Inspect, Method
from dmljax.train import attention_choice, devices, initial_state, placement, start
from dmljax.train.evaluation import MEAN
from dmljax.train.options import Length, Options, RuntimeOptions, Spec
from dmljax.train.run import Run
from dmljax.train.step import TrainState, check_chunks, init_state
from dmljax.weights import expected_normalization, file_digest, preprocessing

_MOST_STEPS = 100_000_000  # of a run; the epochs of more would take minutes to count


def build(config: Any, *, described: Sequence[jax.Device] | None = None) -> Run:
    """Everything that a run needs. Raises a one-line error if the config is wrong.

    `described` devices (`runs.dry_run`) take the place of this machine's devices. Their programs
    can be compiled, but not run.
    """
    config = fields.complete(config)
    options = with_frozen(fields.typed(config))
    backbone = backbone_of(options)
    normalization = _normalization(options, backbone)
    cache = _cache(options, backbone, normalization) if options.features == "cached" else None
    data = data_of(options, None if cache is None else cache.split)
    sampler = _sampler(options, data.train)
    total = sampler.steps(options.steps, "steps")
    if total > _MOST_STEPS:
        raise ValueError(f"steps={options.steps!r}: a run has at most {_MOST_STEPS:,} steps")
    shards = _shards(options.runtime) if described is None else devices.Shardings(described)
    images = _images(options, data, normalization, are_cached=cache is not None)
    net, attention_note = attention_choice.choose(
        backbone.net,
        image_shapes={images.image_shape, images.eval_image_shape},
        images=-(-(options.chunk or sampler.batch_size) // shards.size),
        platform=shards.platform,
        may_measure=described is None and not options.runtime.deterministic,
    )
    backbone = backbone._replace(net=net)
    if cache is not None:
        net = assemble.FeaturesOrImages(net, cache.output)
    adapted = adapted_of(options, net, classes=len(data.train.names), mesh=shards.mesh)
    method = adapted.method
    initial = _initial(options, adapted, images, classes=len(data.train.names), shards=shards)
    optimizer = optimizer_of(
        options,
        steps_fn=sampler.steps,
        total=total,
        frozen=initial.frozen,
        backbone=method.backbone,
    )
    shapes = jax.eval_shape(functools.partial(init_state, optimizer=optimizer), *initial.shapes)
    check_groups(options.optimizer, shapes.params, backbone=method.backbone)
    check_chunks(
        method,
        shapes,
        jax.eval_shape(images.example),
        chunk=options.chunk,
    )
    origin.check_mixed(options)
    check_evaluation(options.evaluate, data, method)
    check_memory(options, batch_size=sampler.batch_size)
    metrics = metrics_of(options.evaluate)
    # Without an interval, once after the last step; a run may have no step.
    interval = max(total, 1) if options.evaluate.every is None else options.evaluate.every
    evaluation_steps = sampler.every(interval, total, "evaluate.every")
    # By default, a run that is killed loses no more than a fifth of its steps.
    intervals = (options.checkpoint.every, options.evaluate.every, max(math.ceil(total / 5), 1))
    checkpoint_interval = next(x for x in intervals if x is not None)
    neighbor_steps: Collection[int] = ()
    if sampler.takes_neighbors:
        neighbor_steps = sampler.every(options.neighbors_every, total - 1, "neighbors_every")
        if not neighbor_steps:
            note = "the run ends before the nearest classes are searched (neighbors_every)"
            sampler = sampler._replace(note=note)
    return Run(
        config=fields.with_normalization(config, normalization),
        options=options,
        steps=total,
        batch_size=sampler.batch_size,
        reload_steps=_reloads(options, sampler, min(evaluation_steps, default=total)),
        selection=selection_of(
            options,
            metrics,
            prefixes=method.prefixes,
            part_names_fn=functools.partial(_part_names, method, shapes, images),
        ),
        evaluation_steps=evaluation_steps,
        metrics=metrics,
        call_fn=call_fn_of(options.evaluate),
        checkpoint_steps=sampler.every(checkpoint_interval, total, "checkpoint.every"),
        sample_fn=sampler.sample_fn,
        neighbor_steps=neighbor_steps,
        sampler_note=sampler.note,
        attention_note=attention_note,
        normalization=preprocessing.title(normalization),
        input_note=input_note(backbone.weights, options.eval_transform),
        frozen=initial.frozen,
        adapted=adapted,
        pooled_output=pooled_output_of(options),
        whiten=whiten_of(options),
        cache=cache,
        taken=origin.taken_of(options, method, shapes),
        start_arrays_fn=origin.arrays_of,
        method=method,
        optimizer=optimizer,
        init_fn=initial.init_fn,
        shards=shards,
        class_rows=initial.class_rows,
        shapes=shapes,
        placements=placement.of_state(
            shapes, shards, sharded=options.runtime.sharded, class_rows=initial.class_rows
        ),
        net=backbone.net,
        **data._asdict(),
        **images._asdict(),
    )


def digests_of(config: Any, *, data: str | None = None) -> digests.Digests:
    """The digests of the run that a config describes, without building it.

    `data` is the digest of its data set, where that is known.
    """
    config = fields.complete(config)
    options = fields.typed(config)
    backbone = backbone_of(options)
    config = fields.with_normalization(config, _normalization(options, backbone))
    weights = backbone.weights
    initial_state.check_file(weights)
    return digests.of_config(
        config,
        data=data or data_digests.digest(splits_of(options)),
        weights=None if weights is None else file_digest(weights),
        start=start.digest(options.start, options.mixed_with),
    )


def embedding(config: dict[str, Any], *, classes: int) -> tuple[Method, Callable]:
    """The method and the normalization of a run's config (`Run.config`), without its data set."""
    options = fields.typed(config)
    assert options.normalize is not None
    net = attention_choice.portable(backbone_of(options).net)
    method = adapted_of(options, net, classes=classes).deployed
    return method, _normalize_fn(options.normalize)


class _Sampler(NamedTuple):
    sample_fn: Callable
    batch_size: int
    note: str
    takes_neighbors: bool
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
    takes_neighbors = "neighbors" in inspect.signature(sample_fn).parameters
    note = sampler.describe(groups)
    return _Sampler(sampler.batch, batch_size, note, takes_neighbors, epoch_end)


def _shards(options: RuntimeOptions) -> devices.Shardings:
    count = options.devices
    if count and jax.process_count() > 1:
        raise ValueError(
            "runtime.devices needs a run of one process: several processes use all of their devices"
        )
    return devices.Shardings(jax.devices()[:count] if count else None)


def _normalization(options: Options, backbone: Backbone) -> str | Spec:
    """The normalization of the config, else of the weights or of `start`, else of the net.

    A config may not contradict the weights, which need the input that they were trained on, unless
    it says `force=True`.
    """
    source, expected = backbone.weights, None
    if source and os.path.isfile(source):
        expected = expected_normalization(source)
    if options.start is not None and (spec := origin.normalization_of(options.start)) is not None:
        source, expected = options.start, spec
    if options.normalize is None:
        of_net = getattr(backbone.net, "expected_normalization", None) or "imagenet"
        return expected or (of_net if isinstance(of_net, str) else dict(of_net))
    force = options.normalize.get("force") is True
    if expected is not None and not force and _input(options.normalize) != _input(expected):
        raise ValueError(
            f"normalize={fields.short(options.normalize)!r} contradicts {source}, which expects "
            f"{fields.short(expected)!r}: leave it out, or insist by "
            f'--config.normalize="{ {**options.normalize, "force": True} }"'
        )
    return options.normalize


def _input(spec: str | Spec) -> Any:
    """A value that is equal for two normalizations exactly if they make the same input."""
    return preprocessing.inputs(spec) or named(spec)["name"]


def _normalize_fn(spec: str | Spec) -> Callable:
    return registry.resolve("normalization", _normalization_spec(spec))


def _normalization_spec(spec: str | Spec) -> Spec:
    """The normalization of a config; `force` is for `_normalization` alone."""
    return {k: v for k, v in named(spec).items() if k != "force"}


class _Images(NamedTuple):
    transform_fn: transform_lib.Transform
    eval_transform_fn: transform_lib.Transform
    normalize_fn: Callable
    image_shape: tuple[int, ...]
    eval_image_shape: tuple[int, ...]

    def example(self) -> jax.Array:
        """Two normalized images of training."""
        return self.normalize_fn(jax.numpy.zeros((2, *self.image_shape), jax.numpy.uint8))


def _images(
    options: Options, data: Data, normalization: str | Spec, *, are_cached: bool
) -> _Images:
    reader, skip = Reader(images_of(data.train), cache=False), options.unreadable == "skip"
    train_fn, eval_fn = _transform(options.transform), _transform(options.eval_transform)
    shape, eval_shape = (batches.image_shape(reader, fn, skip=skip) for fn in (train_fn, eval_fn))
    normalize_fn = _normalize_fn(normalization)
    if not are_cached:
        return _Images(train_fn, eval_fn, normalize_fn, shape, eval_shape)
    note = f"cached features of {eval_fn.title}"
    views = f"cached features of {options.views} times {train_fn.title}" if options.views else note
    least_side = eval_fn.least_side  # for pictures of the images
    train_fn, eval_fn = transforms_of(views, note)
    eval_fn = eval_fn._replace(least_side=least_side)

    def normalize_images_fn(x: jax.Array) -> jax.Array:
        return x if x.ndim == 2 else normalize_fn(x)

    return _Images(train_fn, eval_fn, normalize_images_fn, shape, eval_shape)


class _Initial(NamedTuple):
    init_fn: Callable  # (key, backbone, others) -> first parameters and state of the model
    shapes: tuple[Any, Any]  # of what it returns
    class_rows: placement.ClassRows
    frozen: frozenset[str]


def _initial(
    options: Options,
    adapted: Adapted,
    images: _Images,
    *,
    classes: int,
    shards: devices.Shardings,
) -> _Initial:
    method = adapted.method

    def init_method(key, backbone=None):
        batch = {"images": images.example(), "labels": jax.numpy.zeros(2, jax.numpy.int32)}
        return method.init(key, batch, backbone=backbone)

    key = jax.eval_shape(lambda: initial_state.key_of(0))
    unpadded, model_state_shapes = jax.eval_shape(init_method, key)
    class_rows = placement.class_rows(
        method,
        unpadded,
        classes=classes,
        shards=shards,
        sharded=options.runtime.sharded,
    )

    def init_fn(key, backbone=None, others=None):
        params, model_state = init_method(key, backbone)
        return start.replaced(class_rows.padded(params), model_state, others)

    # Not of `init_fn`, which would trace the net a second time.
    shapes = jax.eval_shape(class_rows.padded, unpadded), model_state_shapes
    return _Initial(init_fn, shapes, class_rows, adapted.frozen_fn(shapes[0]))


def _transform(spec: Spec) -> transform_lib.Transform:
    function, keywords = registry.find("transform", spec)
    return transform_lib.bind(function, **keywords)


def _cache(options: Options, backbone: Backbone, normalization: str | Spec) -> Cache:
    """The cache of the features that `options` need."""
    if options.trained["name"] != "last":
        raise ValueError(
            "features='cached' needs a backbone that does not learn: --config.trained=last, or "
            "leave it out by --config.features=computed"
        )
    output = pooled_output_of(options)
    if output is None:
        raise ValueError(
            "features='cached' keeps pooled features: leave out method.pool_fn, take global_max or "
            "class_and_mean, or --config.features=computed"
        )
    if backbone.weights is None:
        assert options.start is not None
        weights = start.find(options.start).digest
    else:
        initial_state.check_file(backbone.weights)
        weights = file_digest(backbone.weights)
    net = {name: value for name, value in options.net.items() if name != "weights"}
    return Cache(
        options.runtime.features or at_hand.features_folder(),
        {
            "net": registry.complete("net", net),
            "weights": weights,
            "normalize": registry.complete("normalization", _normalization_spec(normalization)),
            # Accelerators multiply with fewer digits.
            **({} if (platform := jax.default_backend()) == "cpu" else {"platform": platform}),
        },
        output=output,
        evaluation=_keyed_transform(options.eval_transform),
        training=_keyed_transform(options.transform),
        views=options.views,
    )


def _keyed_transform(spec: Spec) -> tuple[transform_lib.Transform, dict[str, Any]]:
    return _transform(spec), registry.complete("transform", spec)


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
