"""Describes what a run would train, compute and need, from its compiled train step."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dmljax.adapt import paths_of
from dmljax.config import files as config_files
from dmljax.config.build import build
from dmljax.runs import ladder, topologies, training
from dmljax.train import attention_choice
from dmljax.train.compilation import multiply_adds
from dmljax.train.loop import compiled_step
from dmljax.train.run import Run

_UTILIZATION = 0.4
# Dense products per second with float32 inputs (as TF32) and with bfloat16, by the data sheets.
_DEVICES = {"A100": (156e12, 312e12), "H100": (494e12, 989e12)}
_MEMORIES = (16, 24, 80)  # GB of a device
_GB = 1e9
_CPU_NOTE = "; accelerators usually need smaller temporaries, docs/scale.md"
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: "


def lines(config: Any, *, described: Sequence[str] = ()) -> Iterator[str]:
    """Yields the lines of `dmljax train --dry-run`; for a ladder, those of every step that trains.

    With names of topologies in `described`, the memory is that of their devices.
    """
    devices = {name: topologies.devices(name) for name in described}
    for title, config_of_step in ladder.configs(config):
        if title:
            yield f"== {title}"
        if devices:
            yield from _by_topology(config_of_step, devices)
            continue
        run = build(config_of_step)
        training.check(run)
        yield from _of_step(run)
        yield from _of_memory(run)


def _by_topology(config: dict[str, Any], described: dict[str, list[jax.Device]]) -> Iterator[str]:
    """Yields a table of the memory of a device, by programs compiled for such devices."""
    runs = {name: build(config, described=devices) for name, devices in described.items()}
    training.check(next(iter(runs.values())))
    yield from _of_step(next(iter(runs.values())))
    width = max(map(len, ("topology", *runs)))
    yield "memory of a device, GB, by the program that XLA compiled for it:"
    yield f"{'topology':{width}}  devices  state and batch  temporaries  together  device"
    for name, run in runs.items():
        device = next(run.shards.mesh.devices.flat)
        start = f"{name:{width}}  {run.shards.size:7}"
        limit = topologies.gpu_memory(name)
        options = None if limit is None else topologies.GPU_OPTIONS
        try:
            memory = _analysis(run, options=options)
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).partition("\n")[0]
            if not reason.startswith(_OUT_OF_MEMORY):
                raise
            reason = reason.removeprefix(_OUT_OF_MEMORY)
            yield f"{start}  does not fit: {reason} ({device.device_kind})"
            continue
        yield (
            f"{start}  {memory.arguments / _GB:15.3g}  {memory.temporaries / _GB:11.3g}  "
            f"{memory.together / _GB:8.3g}  {device.device_kind}{_excess(memory.together, limit)}"
        )


def _excess(needed: float, limit: float | None) -> str:
    """Returns a note about a program that needs more than `limit` bytes, or ""."""
    if limit is None or needed <= limit:
        return ""
    return f": does not fit into the {limit / _GB:.3g} GB that JAX takes of it"


def _countable(run: Run) -> Run:
    """Returns `run` with a form of attention whose products can be counted, unlike cuDNN's."""
    if attention_choice.portable(run.net) == run.net:
        return run
    config = config_files.override(copy.deepcopy(run.config), ["--config.net.attention=plain"])
    return build(config, described=list(run.shards.mesh.devices.flat))


def _of_step(run: Run) -> Iterator[str]:
    """Yields the count of trained parameters, and the operations of a step."""
    total = sum(x.size for x in jax.tree.leaves(run.shapes.params))
    paths = zip(paths_of(run.shapes.params), jax.tree.leaves(run.shapes.params), strict=True)
    learned = sum(x.size for path, x in paths if path not in run.frozen)
    yield f"parameters: {total:,}, {learned:,} of them learn ({100 * learned / total:.1f} %)"
    b = run.batch_size
    flops = 2 * multiply_adds(compiled_step(_countable(run)).trace(*_arguments(run)).jaxpr.jaxpr)
    yield f"a step: {b:,} images, {flops:.2e} floating-point operations; {run.steps:,} steps"
    is_half = str(getattr(run.net, "dtype", None)).endswith("float16")
    speeds = (
        f"{name} {_UTILIZATION * peaks[is_half] * b / flops:,.0f} images/s"
        for name, peaks in _DEVICES.items()
    )
    yield f"at {_UTILIZATION:.0%} of what the device can do at most: {', '.join(speeds)}"


def _of_memory(run: Run) -> Iterator[str]:
    """Yields the memory of a device, and the largest batches."""
    b = run.batch_size
    memory, double = _memory(run), _memory(run._replace(batch_size=2 * b))
    platform, of_image = jax.devices()[0].platform, (double - memory) / b
    yield (
        f"memory of a device: {memory / _GB:.2f} GB, {of_image / 1e6:.1f} MB for each image of the "
        f"batch (the compiler's own count, for {platform}{_CPU_NOTE if platform == 'cpu' else ''})"
    )
    if of_image > 0:
        rest = memory - of_image * b
        sizes = {gb: max(0, int((gb * _GB - rest) / of_image)) for gb in _MEMORIES}
        batches = ", ".join(f"{size:,} with {gb} GB" for gb, size in sizes.items())
        count = run.shards.size
        yield f"largest batch: {batches}{f' on each of {count} devices' if count > 1 else ''}"


class _Memory(NamedTuple):
    """Bytes of a device that a compiled step needs at once.

    `arguments` are the state and the batch. The new state takes their place.
    """

    arguments: float
    temporaries: float
    together: float


def _analysis(run: Run, *, options: dict[str, Any] | None = None) -> _Memory:
    lowered = compiled_step(run).lower(*_arguments(run))
    analysis = lowered.compile(compiler_options=options).memory_analysis()
    assert analysis is not None  # every backend of JAX reports it
    arguments, temporaries = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return _Memory(arguments, temporaries, arguments + temporaries + results)


def _memory(run: Run) -> float:
    return _analysis(run).together


def _arguments(run: Run) -> tuple[Any, ...]:
    """Returns the shapes of state, batch and signal, with their placements."""
    rows, count = run.shards.rows, run.shards.padded(run.batch_size, chunk=run.options.chunk)

    def shaped(shape: tuple[int, ...], dtype: Any, sharding: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    state = jax.tree.map(lambda x, s: shaped(x.shape, x.dtype, s), run.shapes, run.placements)
    images = np.float32 if len(run.image_shape) == 1 else np.uint8
    batch = {
        "images": shaped((count, *run.image_shape), images, rows),
        "labels": shaped((count,), np.int32, rows),
    }
    return state, batch, shaped((run.shards.size,), np.int32, rows)
