"""A config becomes a `Run`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from dmljax.config import fields, method, scores
from dmljax.config.data import data_of, inputs_of, timing_of
from dmljax.config.fields import options_of
from dmljax.config.optimizer import optimizer_of
from dmljax.data import digest as data_digests
from dmljax.methods import assemble
from dmljax.methods.base import Inspect, Method
from dmljax.train import attention_choice, devices, start
from dmljax.train.run import Run
from dmljax.train.step import check_chunks, init_state


def build(config: Any, *, described: Sequence[jax.Device] | None = None) -> Run:
    """Returns everything that a run needs; raises a one-line error if the config is wrong.

    `described` devices (`runs.dry_run`) take the place of this machine's devices. Their programs
    can be compiled, but not run.
    """
    options = options_of(config)
    origin = start.find_if_any(options.start)
    backbone, normalization = method.backbone_of(options, origin)
    cache = backbone["cache"]
    data, epoch_labels = data_of(options, None if cache is None else cache.split)
    timing, epoch_end = timing_of(options, data.train.labels, epoch_labels)

    inputs = inputs_of(options, data.train, normalization)
    image_shapes = inputs["image_shape"], inputs["eval_image_shape"]

    def example(shape: tuple[int, ...] = image_shapes[0]) -> jax.Array:
        return inputs["normalize_fn"](jax.numpy.zeros((2, *shape), jax.numpy.uint8))

    if (count := options.runtime.devices) and jax.process_count() > 1:
        raise ValueError(
            "runtime.devices needs a run of one process: several processes use all of their devices"
        )
    shards = devices.Shardings(described or (jax.devices()[:count] if count else None))
    net, attention_note = attention_choice.choose(
        backbone["net"],
        image_shapes=set(image_shapes),
        images=-(-(options.chunk or timing["batch_size"]) // shards.size),
        platform=shards.platform,
        may_measure=described is None and not options.runtime.deterministic,
    )
    classes = len(data.train.names)
    adapted = method.adapted_of(
        options,
        net if cache is None else assemble.FeaturesOrImages(net, cache.output),
        classes=classes,
        batch_size=timing["batch_size"],
    )
    trained = adapted.method

    def init_method(key, backbone=None):
        batch = {"images": example(), "labels": jax.numpy.zeros(2, jax.numpy.int32)}
        return trained.init(key, batch, backbone=backbone)

    def init_fn(key, backbone=None, others=None):
        params, model_state = init_method(key, backbone)
        return start.replaced(class_rows.padded(params), model_state, others)

    unpadded, model_state = jax.eval_shape(lambda: init_method(start.key_of(0)))
    method.check_start(options, trained, unpadded)
    sharded = options.runtime.sharded
    class_rows = devices.class_rows(
        trained, unpadded, classes=classes, shards=shards, sharded=sharded
    )
    params = jax.eval_shape(class_rows.padded, unpadded)  # tracing `init_fn` would take longer
    frozen = adapted.frozen_fn(params)
    optimizer = optimizer_of(
        options, timing["steps"], epoch_end, frozen=frozen, params=params, backbone=trained.backbone
    )
    shapes = jax.eval_shape(functools.partial(init_state, optimizer=optimizer), params, model_state)
    check_chunks(trained, shapes, jax.eval_shape(example), chunk=options.chunk)

    def part_names() -> list[str]:
        images = jax.eval_shape(lambda: example(image_shapes[1]))
        parts_fn = (trained.inspect or Inspect()).parts or (lambda *_: {})
        return list(jax.eval_shape(parts_fn, shapes.params, shapes.model_state, images))

    metrics, selection = scores.scores_of(options, data, trained, part_names)
    return Run(
        config=fields.with_normalization(config, normalization),
        options=options,
        selection=selection,
        metrics=metrics,
        attention_note=attention_note,
        frozen=frozen,
        adapted=adapted,
        start_arrays_fn=method.arrays_of,
        method=trained,
        optimizer=optimizer,
        init_fn=init_fn,
        shards=shards,
        class_rows=class_rows,
        shapes=shapes,
        placements=devices.of_state(shapes, shards, sharded=sharded, class_rows=class_rows),
        **{**backbone, "net": net},
        **data._asdict(),
        **timing,
        **inputs,
    )


def digests_of(config: Any, *, data: str | None = None) -> fields.Digests:
    """Returns the digests of the run that a config describes, without building it.

    `data` is the digest of its data set, where that is known.
    """
    options = options_of(config)
    origin = start.find_if_any(options.start)
    normalization = method.normalization_of(options, method.net_of(options), origin)
    return fields.digests_of(
        fields.with_normalization(config, normalization),
        data=data or data_digests.digest(options.dataset.function()),
        weights=method.weights_digest(options),
        start=start.digest(options.start),
    )


def embedding(config: dict[str, Any], *, classes: int) -> tuple[Method, Callable]:
    """Returns the method and the normalization of a run's config, without its data set."""
    options = options_of(config, method.FUNCTIONS)
    net = attention_choice.portable(method.net_of(options))
    deployed = method.adapted_of(options, net, classes=classes).deployed
    assert options.normalize is not None
    return deployed, options.normalize.function
