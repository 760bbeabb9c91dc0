"""A config becomes a `Run`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from dmljax.adapt.trained import Adapted
from dmljax.config import fields, method, scores
from dmljax.config.data import Data, data_of, epoch_labels
from dmljax.config.resolve import resolve
from dmljax.config.timing import check_groups, optimizer_of, timing_of
from dmljax.data import batches
from dmljax.data import digest as data_digests
from dmljax.data.features import transforms_of
from dmljax.data.records import Reader
from dmljax.data.splits import images_of
from dmljax.data.transforms import transform as transform_lib
from dmljax.methods import assemble
from dmljax.methods.base import Inspect, Method
from dmljax.train import attention_choice, devices, initial_state, start
from dmljax.train.evaluation import MEAN
from dmljax.train.options import Cached, Options, RuntimeOptions
from dmljax.train.run import Run
from dmljax.train.step import TrainState, check_chunks, init_state
from dmljax.weights import file_digest, preprocessing


def build(config: Any, *, described: Sequence[jax.Device] | None = None) -> Run:
    """Returns everything that a run needs; raises a one-line error if the config is wrong.

    `described` devices (`runs.dry_run`) take the place of this machine's devices. Their programs
    can be compiled, but not run.
    """
    config = fields.complete(config)
    options = resolve(config)
    backbone = method.backbone_of(options)
    cache = backbone.cache
    data = data_of(options, None if cache is None else cache.split)
    classes = len(data.train.names)
    timing, epoch_end = timing_of(options, data.train, epoch_labels(options, data.train))
    shards = _shards(options.runtime) if described is None else devices.Shardings(described)
    images = _images(options, data, backbone)
    net, attention_note = attention_choice.choose(
        backbone.net,
        image_shapes={images.image_shape, images.eval_image_shape},
        images=-(-(options.chunk or timing.batch_size) // shards.size),
        platform=shards.platform,
        may_measure=described is None and not options.runtime.deterministic,
    )
    adapted = method.adapted_of(
        options,
        net if cache is None else assemble.FeaturesOrImages(net, cache.output),
        classes=classes,
        batch_size=timing.batch_size,
    )
    initial = _initial(options, adapted, images, classes=classes, shards=shards)
    backbone_paths = adapted.method.backbone
    optimizer = optimizer_of(
        options, timing, epoch_end, frozen=initial.frozen, backbone=backbone_paths
    )
    shapes = jax.eval_shape(functools.partial(init_state, optimizer=optimizer), *initial.shapes)
    check_groups(options.optimizer, shapes.params, backbone=backbone_paths)
    check_chunks(adapted.method, shapes, jax.eval_shape(images.example), chunk=options.chunk)
    scores.check_evaluation(options.evaluate, data, adapted.method)
    metrics = scores.metrics_of(options.evaluate)
    spec = {k: v for k, v in backbone.normalization.items() if k != "force"}
    return Run(
        config=fields.with_normalization(config, fields.short(spec)),
        options=options,
        selection=scores.selection_of(
            options,
            metrics,
            prefixes=adapted.method.prefixes,
            part_names_fn=functools.partial(_part_names, adapted.method, shapes, images),
        ),
        metrics=metrics,
        attention_note=attention_note,
        normalization=preprocessing.title(fields.short(spec)),
        input_note=backbone.input_note,
        net=net,
        frozen=initial.frozen,
        adapted=adapted,
        pooled_output=backbone.pooled_output,
        whiten=method.whiten_of(options),
        cache=cache,
        taken=method.taken_of(options, adapted.method, shapes),
        start_arrays_fn=method.arrays_of,
        method=adapted.method,
        optimizer=optimizer,
        init_fn=initial.init_fn,
        shards=shards,
        class_rows=initial.class_rows,
        shapes=shapes,
        placements=devices.of_state(
            shapes, shards, sharded=options.runtime.sharded, class_rows=initial.class_rows
        ),
        **timing._asdict(),
        **data._asdict(),
        **images._asdict(),
    )


def digests_of(config: Any, *, data: str | None = None) -> fields.Digests:
    """Returns the digests of the run that a config describes, without building it.

    `data` is the digest of its data set, where that is known.
    """
    config = fields.complete(config)
    options = resolve(config)
    normalization = method.normalization_of(options, method.net_of(options))
    config = fields.with_normalization(config, fields.short(dict(normalization)))
    weights = options.net.get("weights")
    initial_state.check_file(weights)
    return fields.digests_of(
        config,
        data=data or data_digests.digest(options.dataset.function()),
        weights=None if weights is None else file_digest(weights),
        start=start.digest(options.start),
    )


def embedding(config: dict[str, Any], *, classes: int) -> tuple[Method, Callable]:
    """Returns the method and the normalization of a run's config, without its data set."""
    options = resolve(fields.complete(config), method.FUNCTIONS)
    net = attention_choice.portable(method.net_of(options))
    deployed = method.adapted_of(options, net, classes=classes).deployed
    assert options.normalize is not None
    return deployed, options.normalize.function


def _shards(options: RuntimeOptions) -> devices.Shardings:
    count = options.devices
    if count and jax.process_count() > 1:
        raise ValueError(
            "runtime.devices needs a run of one process: several processes use all of their devices"
        )
    return devices.Shardings(jax.devices()[:count] if count else None)


class _Images(NamedTuple):
    transform_fn: transform_lib.Transform
    eval_transform_fn: transform_lib.Transform
    normalize_fn: Callable
    image_shape: tuple[int, ...]
    eval_image_shape: tuple[int, ...]

    def example(self) -> jax.Array:
        """Returns two normalized images of training."""
        return self.normalize_fn(jax.numpy.zeros((2, *self.image_shape), jax.numpy.uint8))


def _images(options: Options, data: Data, backbone: method.Backbone) -> _Images:
    """Returns how images are prepared, and their shapes; cached features are as images."""
    reader, skip = Reader(images_of(data.train), cache=False), options.unreadable == "skip"
    train_fn = method.transform_of(options.transform)
    eval_fn = method.transform_of(options.eval_transform)
    shape, eval_shape = (batches.image_shape(reader, fn, skip=skip) for fn in (train_fn, eval_fn))
    normalize_fn = backbone.normalization.function
    if not isinstance(options.features, Cached):
        return _Images(train_fn, eval_fn, normalize_fn, shape, eval_shape)
    train_fn, eval_fn = transforms_of(train_fn, eval_fn, options.features.views)

    def normalize_images_fn(x: jax.Array) -> jax.Array:
        return x if x.ndim == 2 else normalize_fn(x)

    return _Images(train_fn, eval_fn, normalize_images_fn, shape, eval_shape)


class _Initial(NamedTuple):
    init_fn: Callable  # (key, backbone, others) -> first parameters and state of the model
    shapes: tuple[Any, Any]  # of what it returns
    class_rows: devices.ClassRows
    frozen: frozenset[str]


def _initial(
    options: Options,
    adapted: Adapted,
    images: _Images,
    *,
    classes: int,
    shards: devices.Shardings,
) -> _Initial:
    """Returns the first parameters as a function, their shapes, and which of them are frozen."""

    def init_method(key, backbone=None):
        batch = {"images": images.example(), "labels": jax.numpy.zeros(2, jax.numpy.int32)}
        return adapted.method.init(key, batch, backbone=backbone)

    key = jax.eval_shape(lambda: initial_state.key_of(0))
    unpadded, model_state_shapes = jax.eval_shape(init_method, key)
    class_rows = devices.class_rows(
        adapted.method,
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


def _part_names(method: Method, shapes: TrainState, images: _Images) -> list[str]:
    """Returns the names of the parts of an embedding that are scored, such as learners."""
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
