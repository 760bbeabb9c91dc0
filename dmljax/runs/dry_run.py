"""Describes what a run would train, compute and need, from its compiled train step."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dmljax.adapt.trees import paths_of
from dmljax.config import files as config_files
from dmljax.config.build import build
from dmljax.runs import ladder, topologies, training
from dmljax.train import attention_choice
from dmljax.train.compilation import multiply_adds
from dmljax.train.loop import compiled_step
from dmljax.train.run import Run

_MEMORIES = (16, 24, 80)  # GB of a device
_GB = 1e9
_CPU_NOTE = "; accelerators usually need smaller temporaries, docs/scale.md"
_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: "


def lines(config: Any, *, described: Sequence[str] = ()) -> Iterator[str]:
    """Yields the lines of `dmljax train --dry-run`; for a ladder, those of every step that trains.

    With names of topologies in `described`, the memory is that of their devices.
    """
    devices: dict[str, list | None] = {name: topologies.devices(name) for name in described}
    devices = devices or {"": None}
    for title, config_of_step in ladder.configs(config):
        if title:
            yield f"== {title}"
        runs = {name: build(config_of_step, described=x) for name, x in devices.items()}
        run = next(iter(runs.values()))
        training.check(run)
        yield from _of_step(run)
        yield from _by_topology(runs) if described else _of_memory(run)


def _by_topology(runs: dict[str, Run]) -> Iterator[str]:
    """Yields a table of the memory of a device, by programs compiled for such devices."""
    width = max(map(len, ("topology", *runs)))
    yield "memory of a device, GB, by the program that XLA compiled for it:"
    yield f"{'topology':{width}}  devices  state and batch  temporaries  together  device"
    for name, run in runs.items():
        kind, limit = next(run.shards.mesh.devices.flat).device_kind, topologies.gpu_memory(name)
        start = f"{name:{width}}  {run.shards.size:7}"
        try:
            memory = _memory(run, options=None if limit is None else topologies.GPU_OPTIONS)
        except jax.errors.JaxRuntimeError as error:
            reason = str(error).partition("\n")[0]
            if not reason.startswith(_OUT_OF_MEMORY):
                raise
            yield f"{start}  does not fit: {reason.removeprefix(_OUT_OF_MEMORY)} ({kind})"
            continue
        line = f"{start}  {memory.arguments / _GB:15.3g}  {memory.temporaries / _GB:11.3g}"
        line += f"  {memory.together / _GB:8.3g}  {kind}"
        if limit is not None and memory.together > limit:
            line += f": does not fit into the {limit / _GB:.3g} GB that JAX takes of it"
        yield line


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


def _of_memory(run: Run) -> Iterator[str]:
    """Yields the memory of a device, and the largest batches."""
    b = run.batch_size
    memory, double = (_memory(run._replace(batch_size=n)).together for n in (b, 2 * b))
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


def _memory(run: Run, *, options: dict[str, Any] | None = None) -> _Memory:
    lowered = compiled_step(run).lower(*_arguments(run))
    analysis = lowered.compile(compiler_options=options).memory_analysis()
    assert analysis is not None  # every backend of JAX reports it
    arguments, temporaries = analysis.argument_size_in_bytes, analysis.temp_size_in_bytes
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return _Memory(arguments, temporaries, arguments + temporaries + results)


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
