"""Training images that stay on the devices: a step is sent rows and draws, but no pixels.

The images of a split are divided over the devices of a host, and every host has all of them. In the
step, the devices of a host send each other the images of their rows of the batch, and transform
them (`augment`). A batch depends neither on the number of devices nor on the number of hosts.
"""

import concurrent.futures
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from dmljax.data import batches
from dmljax.data.records import Reader
from dmljax.files import machine
from dmljax.hints import shown_bytes
from dmljax.ops.devices import free_bytes
from dmljax.train import augment, hosts
from dmljax.train.run import Run

_FRACTION = 0.5  # of the free memory, for 'auto': the step needs memory, too
_TOGETHER = 32  # images that an accelerator transforms at a time
_AHEAD, _TASK = 256, 4  # images that threads read ahead, and that one task reads


class DoesNotFit(ValueError):
    """The images of a split are larger than the memory that devices have for them."""


class Resident(NamedTuple):
    """Images on the devices, and how a step makes its batch of them.

    `images_fn(batch)` is to be compiled. `batch` has the `arrays` and a batch of
    `pipeline.train`, which takes `shapes` and `sources`; the result has images and labels.
    `note` is for the reader.
    """

    arrays: dict[str, Any]
    images_fn: Callable[[dict[str, Any]], dict[str, jax.Array]]
    shapes: list[tuple[int, ...]]
    sources: np.ndarray
    note: str


def choose(run: Run, *, say: Callable[[str], None]) -> Resident | None:
    """Puts the images on the devices if `runtime.data` asks for it; None: the host sends them.

    Calls `say` with the choice and its reason, unless `runtime.data` is 'host'.
    """
    choice = run.options.runtime.data.name
    if choice == "host":
        return None
    try:
        resident = load(run, fraction=_FRACTION if choice == "auto" else 1.0)
    except (DoesNotFit, augment.NoDeviceForm) as error:
        if choice != "auto":
            raise
        say(f"data: sent by the host in every step (runtime.data='auto'): {error}")
        return None
    say(f"data: {resident.note} (runtime.data={choice!r})")
    return resident


def load(run: Run, *, fraction: float = 1.0) -> Resident:
    """Reads all training images and puts them on the devices.

    Raises `DoesNotFit` as soon as they need more than this fraction of the free memory, and
    `augment.NoDeviceForm` if the transform cannot run on devices.
    """
    shards = run.shards
    local = [d for d in shards.mesh.devices.flat if d.process_index == jax.process_index()]
    count, free = len(run.train), _free_bytes(local)
    rows, bytes_needed = -(-count // len(local)), 0
    sources, images = np.arange(count), list[np.ndarray]()
    bound: tuple[int, ...] = ()
    for source, image in _read(run):
        if not images:  # before minutes of reading
            augment.program(run.transform_fn, [image.shape])
        sources[len(images)] = source
        images.append(image)
        bound = tuple(map(max, bound or image.shape, image.shape))
        bytes_needed = rows * math.prod(bound) * image.dtype.itemsize
        if bytes_needed > fraction * free:
            break
    on_devices = f"each of {len(local)} devices" if len(local) > 1 else "the device"
    note = (
        f"{count:,} images of {' x '.join(map(str, bound))} take {shown_bytes(bytes_needed)} on "
        f"{on_devices}, with {shown_bytes(free)} free"
    )
    is_too_large = bytes_needed > fraction * free
    if hosts.highest(int(is_too_large)):  # on any host: all raise
        part = "" if fraction == 1 else f", and they may take {fraction:.0%}"
        raise DoesNotFit(
            f"{note}{part}: take smaller images (dmljax prepare --size), more devices, or "
            "--config.runtime.data=host"
            if is_too_large
            else "the training images do not fit on the devices of another host"
        )
    shapes, dtype = [image.shape for image in images], images[0].dtype
    program = augment.program(run.transform_fn, shapes)
    blocks = []
    images.reverse()  # and each is dropped as soon as it is copied
    for device in local:
        block = np.zeros((rows, *bound), dtype)
        for row in block[: len(images)]:
            image = images.pop()
            row[tuple(map(slice, image.shape))] = image  # zeros beyond it
        blocks.append(jax.device_put(block, device))
    # One array has all images of the first host, then all images again for the next one.
    array = jax.make_array_from_single_device_arrays(
        (rows * shards.size, *bound), shards.rows, blocks
    )
    together = _together(shards.platform)
    images_fn = _images_fn(program, shards.mesh, hosts=shards.hosts, together=together)
    return Resident({"resident": array}, images_fn, shapes, sources, f"{note} before")


def _read(run: Run) -> Iterator[tuple[int, np.ndarray]]:
    """Yields the row and the pixels of every training image, or of its substitute."""
    reader = Reader(run.train, least_side=run.transform_fn.least_side)
    skip = run.options.unreadable == "skip"

    def read_all(rows: range) -> list[tuple[int, np.ndarray]]:
        return [batches.read(reader, i, skip=skip) for i in rows]

    rows = range(len(run.train))
    with concurrent.futures.ThreadPoolExecutor(max(machine.core_count(), 4)) as pool:
        for start in rows[::_AHEAD]:
            tasks = (rows[i : i + _TASK] for i in rows[start : start + _AHEAD : _TASK])
            for images in pool.map(read_all, tasks):
                yield from images


def _free_bytes(devices: Sequence[jax.Device]) -> int:
    """Returns the free memory of each device; CPUs share half of the host's."""
    free = [count for x in devices if (count := free_bytes(x.memory_stats())) is not None]
    return min(free) if len(free) == len(devices) else machine.free_memory() // (2 * len(devices))


def _together(platform: str) -> int | None:
    """Returns how many images are transformed at a time; None is one."""
    return None if platform == "cpu" else _TOGETHER


def _images_fn(
    program: augment.Program, mesh: Mesh, *, hosts: int, together: int | None
) -> Callable[[dict[str, Any]], dict[str, jax.Array]]:
    """Returns `Resident.images_fn`, on the mesh of the step: kernels such as cuDNN's need it."""
    (axis,) = mesh.axis_names
    split = PartitionSpec(axis)
    groups = np.arange(mesh.size).reshape(hosts, -1).tolist()

    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(split, split, split),
        out_specs=split,
        check_vma=False,  # jax.lax.map with a batch size fails with it
    )
    def of_device(resident, rows, numbers):
        images = _exchanged(resident, rows, axis=axis, groups=groups)
        return _where(rows >= 0, augment.apply(program, images, numbers, together=together))

    def images_fn(batch):
        images = of_device(batch["resident"], batch["rows"], batch["numbers"])
        return {"images": images, "labels": batch["labels"]}

    return images_fn


def _exchanged(
    resident: jax.Array, rows: jax.Array, *, axis: str, groups: list[list[int]]
) -> jax.Array:
    """Gathers the images of the `rows` of a device, with zeros for padding (-1).

    The devices of a host, a group, send them in at most one piece per device. So a
    device holds about one image per row of the batch, not the images of all devices.
    """
    devices = len(groups[0])
    size = -(-len(rows) // devices)
    pieces = jnp.pad(rows, (0, -len(rows) % size), constant_values=-1).reshape(-1, size)
    of_host = jax.lax.all_gather(pieces, axis, axis=1, tiled=True, axis_index_groups=groups)

    def of_piece(rows):
        indices = rows - len(resident) * (jax.lax.axis_index(axis) % devices)
        is_here = (indices >= 0) & (indices < len(resident))
        images = _where(is_here, resident[jnp.where(is_here, indices, 0)])
        # One device of the host has each image; the others have zeros.
        return jax.lax.psum_scatter(images, axis, tiled=True, axis_index_groups=groups)

    images = jax.lax.map(of_piece, of_host)
    return images.reshape(-1, *resident.shape[1:])[: len(rows)]


def _where(is_image: jax.Array, images: jax.Array) -> jax.Array:
    """Replaces padding by zeros."""
    return jnp.where(is_image.reshape(-1, *[1] * (images.ndim - 1)), images, jnp.zeros_like(images))
