"""A config becomes a `Run`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dmljax.config import fields, method, scores
from dmljax.config.data import data_of
from dmljax.config.registry import options_of
from dmljax.config.timing import optimizer_of, timing_of
from dmljax.data import batches
from dmljax.data import digest as data_digests
from dmljax.data.features import transforms_of
from dmljax.data.records import Reader
from dmljax.data.splits import images_of
from dmljax.methods import assemble
from dmljax.methods.base import Inspect, Method
from dmljax.train import attention_choice, devices, initial_state, start
from dmljax.train.evaluation import MEAN
from dmljax.train.options import Cached
from dmljax.train.run import Run
from dmljax.train.step import TrainState, check_chunks, init_state
from dmljax.weights import file_digest


def build(config: Any, *, described: Sequence[jax.Device] | None = None) -> Run:
    """Returns everything that a run needs; raises a one-line error if the config is wrong.

    `described` devices (`runs.dry_run`) take the place of this machine's devices. Their programs
    can be compiled, but not run.
    """
    config = fields.complete(config)
    options = options_of(config)
    backbone, normalization = method.backbone_of(options)
    cache = backbone.cache
    data, epoch_labels = data_of(options, None if cache is None else cache.split)
    timing, epoch_end = timing_of(options, data.train.labels, epoch_labels)

    # How images are prepared, and their shapes; cached features are as images.
    reader, skip = Reader(images_of(data.train), cache=False), options.unreadable == "skip"
    transform_fn = method.transform_of(options.transform)
    eval_transform_fn = method.transform_of(options.eval_transform)
    image_shape, eval_image_shape = (
        batches.image_shape(reader, fn, skip=skip) for fn in (transform_fn, eval_transform_fn)
    )
    normalize_fn: Callable = normalization.function
    if isinstance(options.features, Cached):
        transform_fn, eval_transform_fn = transforms_of(
            transform_fn, eval_transform_fn, options.features.views
        )
        normalize_fn = functools.partial(_normalized_images, normalize_fn)

    def example(shape: tuple[int, ...] = image_shape) -> jax.Array:
        return normalize_fn(jax.numpy.zeros((2, *shape), jax.numpy.uint8))

    def eval_example() -> jax.Array:
        return example(eval_image_shape)

    if (count := options.runtime.devices) and jax.process_count() > 1:
        raise ValueError(
            "runtime.devices needs a run of one process: several processes use all of their devices"
        )
    shards = devices.Shardings(described or (jax.devices()[:count] if count else None))
    net, attention_note = attention_choice.choose(
        backbone.net,
        image_shapes={image_shape, eval_image_shape},
        images=-(-(options.chunk or timing.batch_size) // shards.size),
        platform=shards.platform,
        may_measure=described is None and not options.runtime.deterministic,
    )
    classes = len(data.train.names)
    adapted = method.adapted_of(
        options,
        net if cache is None else assemble.FeaturesOrImages(net, cache.output),
        classes=classes,
        batch_size=timing.batch_size,
    )
    trained = adapted.method

    def init_method(key, backbone=None):
        batch = {"images": example(), "labels": jax.numpy.zeros(2, jax.numpy.int32)}
        return trained.init(key, batch, backbone=backbone)

    def init_fn(key, backbone=None, others=None):
        params, model_state = init_method(key, backbone)
        return start.replaced(class_rows.padded(params), model_state, others)

    key = jax.eval_shape(lambda: initial_state.key_of(0))
    unpadded, model_state = jax.eval_shape(init_method, key)
    taken = method.taken_of(options, trained, unpadded, model_state)
    sharded = options.runtime.sharded
    class_rows = devices.class_rows(
        trained, unpadded, classes=classes, shards=shards, sharded=sharded
    )
    params = jax.eval_shape(class_rows.padded, unpadded)  # tracing `init_fn` would take longer
    frozen = adapted.frozen_fn(params)
    optimizer = optimizer_of(
        options, timing, epoch_end, frozen=frozen, params=params, backbone=trained.backbone
    )
    shapes = jax.eval_shape(functools.partial(init_state, optimizer=optimizer), params, model_state)
    check_chunks(trained, shapes, jax.eval_shape(example), chunk=options.chunk)
    scores.check_evaluation(options.evaluate, data, trained)
    metrics = scores.metrics_of(options.evaluate)
    selection = scores.selection_of(
        options,
        metrics,
        lambda: scores.further_names(
            options.evaluate, metrics, trained, _part_names(trained, shapes, eval_example)
        ),
    )
    return Run(
        config=fields.with_normalization(config, normalization),
        options=options,
        selection=selection,
        metrics=metrics,
        attention_note=attention_note,
        transform_fn=transform_fn,
        eval_transform_fn=eval_transform_fn,
        normalize_fn=normalize_fn,
        image_shape=image_shape,
        eval_image_shape=eval_image_shape,
        frozen=frozen,
        adapted=adapted,
        taken=taken,
        start_arrays_fn=method.arrays_of,
        method=trained,
        optimizer=optimizer,
        init_fn=init_fn,
        shards=shards,
        class_rows=class_rows,
        shapes=shapes,
        placements=devices.of_state(shapes, shards, sharded=sharded, class_rows=class_rows),
        **backbone._replace(net=net)._asdict(),
        **data._asdict(),
        **timing._asdict(),
    )


def _part_names(
    method: Method, shapes: TrainState, example_fn: Callable[[], jax.Array]
) -> list[str]:
    """Returns the names of the parts of an embedding that are scored, such as learners."""
    parts_fn = (method.inspect or Inspect()).parts
    if parts_fn is None:
        return []
    images = jax.eval_shape(example_fn)
    parts = jax.eval_shape(parts_fn, shapes.params, shapes.model_state, images)
    return [*parts, *[MEAN] * (len(parts) > 1)]


def _normalized_images(normalize_fn: Callable, x: jax.Array) -> jax.Array:
    """Returns normalized images, and features as they are."""
    return x if x.ndim == 2 else normalize_fn(x)


def digests_of(config: Any, *, data: str | None = None) -> fields.Digests:
    """Returns the digests of the run that a config describes, without building it.

    `data` is the digest of its data set, where that is known.
    """
    config = fields.complete(config)
    options = options_of(config)
    origin = start.find_if_any(options.start)
    normalization = method.normalization_of(options, method.net_of(options), origin)
    weights = options.net.get("weights")
    initial_state.check_file(weights)
    return fields.digests_of(
        fields.with_normalization(config, normalization),
        data=data or data_digests.digest(options.dataset.function()),
        weights=None if weights is None else file_digest(weights),
        start=start.digest(options.start),
    )


def embedding(config: dict[str, Any], *, classes: int) -> tuple[Method, Callable]:
    """Returns the method and the normalization of a run's config, without its data set."""
    options = options_of(fields.complete(config), method.FUNCTIONS)
    net = attention_choice.portable(method.net_of(options))
    deployed = method.adapted_of(options, net, classes=classes).deployed
    assert options.normalize is not None
    return deployed, options.normalize.function
