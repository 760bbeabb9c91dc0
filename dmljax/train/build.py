"""A config made into functions, numbers and a first state. Alone reads the config."""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import optax
from absl import logging

from dmljax.data import batches as batch_lib
from dmljax.data import pipeline, sampling
from dmljax.data.reader import Reader
from dmljax.data.sampling import sampler as samplers
from dmljax.data.splits import Split, divide
from dmljax.data.transforms import transform as transform_lib
from dmljax.hints import hint
from dmljax.kernels.initial_draws import batch_draws
from dmljax.methods.base import Inspect, Method, RandomMiner
from dmljax.train import config as config_lib
from dmljax.train import devices as sharding
from dmljax.train import optimizers, registry
from dmljax.train.step import TrainState, check_parts, init_state, train_step

__all__ = [
    "Run",
    "batches",
    "build",
    "check",
    "first_state",
    "image_shape",
    "named",
    "placed",
    "reader",
    "state_shapes",
    "step_fn",
    "weights",
]

# What runs once is not worth more; less, and drawing millions of numbers would take seconds.
_ONCE = {"xla_backend_optimization_level": 1}
# Fields with defaults; what a config leaves out is this. Anything else is an error.
_DEFAULTS: dict[str, Any] = {
    "seed": 0,
    "steps": None,  # a number, or '60 epochs'
    "transform": "standard_train",
    "eval_transform": "standard_eval",
    "normalize": "imagenet",
    "sampler": {"name": "plan", "classes": 32, "per_class": 4},
    "miner": None,
    "optimizer": {"name": "adam", "rate": 1e-4},
    "schedule": "cosine",
    "reload_best_at": (),
    "validation": 0.0,
    "select": "last",
    "evaluate": {},
    "checkpoint": {},
    "log_every": 20,
    "pictures": True,
    "notes": "",
    "runtime": {},
}
_EVALUATE = {"every": None, "ks": (1, 2, 4, 8), "clustering": True, "batch_size": 256, "knn": 0}
_EVALUATE |= {"seeds": (0, 1, 2), "refine": False, "frames": False}
_CHECKPOINT = {"every": None, "keep": 2}
_RUNTIME = {"workers": 0, "cache": False, "unreadable": "raise", "devices": None}
_RUNTIME |= {
    "chunk": None,  # images that the net sees at a time; None: the whole batch
    "sharded": (),  # paths of parameters to split over the devices
}
_GROUP = {"path": "str", "factor": "float", "decay": "float | None", "frozen": "bool"}
_LEAST = {"seed": 0, "log_every": 1, "evaluate.batch_size": 1, "evaluate.knn": 0}
_LEAST |= {"checkpoint.keep": 1, "runtime.workers": 0, "runtime.devices": 1, "runtime.chunk": 1}


class Run(NamedTuple):
    """A config made into functions and numbers."""

    config: dict[str, Any]
    train: Split
    held_out: Split | None
    test: Split
    method: Method
    begin: Callable  # (key, backbone=None) -> (params, model_state); jax traces its shapes once
    optimizer: optax.GradientTransformation
    sample_fn: Callable
    transform_fn: Callable
    eval_transform_fn: Callable
    normalize_fn: Callable
    shards: sharding.Shardings
    batch: int
    total: int
    every: dict[str, int]
    reload_best_at: tuple[int, ...]


# --- building -----------------------------------------------------------------------------------


def build(config: Any) -> Run:
    """Everything that a run needs; raises one line for whatever a config says wrong."""
    config = _complete(config)
    splits = registry.resolve("dataset", config["dataset"])()
    train, held_out = splits.train, None
    if config["validation"]:
        train, held_out = divide(train, train=1 - config["validation"])
    if config["select"] not in ("last", "val", "test"):
        raise ValueError(f"select must be 'last', 'val' or 'test', not {config['select']!r}")
    if config["select"] == "val" and held_out is None:
        raise ValueError("select='val' needs held-out classes: set validation, such as 0.2")
    sample_fn = registry.resolve("sampler", config["sampler"], bind=samplers.bind)
    groups = sampling.group(train.labels)
    batch = len(sample_fn(groups, seed=config["seed"], step=0))
    devices = config["runtime"]["devices"]
    if devices and jax.process_count() > 1:
        raise ValueError("runtime.devices is for one process: several use all that they see")
    shards = sharding.shardings(jax.devices()[:devices] if devices else None, batch=batch)
    epoch_end = samplers.epoch_end_fn(sample_fn, groups, seed=config["seed"])
    steps = functools.partial(config_lib.duration, epoch_end=epoch_end)
    total = steps(config["steps"])
    schedule = _with_steps(dict(named(config["schedule"])), steps)
    factor = registry.resolve("schedule", schedule)(total=total)
    optimizer = dict(config["optimizer"])
    parameters = inspect.signature(optimizers.build).parameters
    kinds = {k: parameters[k].annotation for k in parameters if k not in ("direction", "schedule")}
    whole = {k: optimizer.pop(k) for k in list(optimizer) if k in kinds}
    registry.check("optimizer", whole, kinds)
    for group in whole.get("groups", ()):
        if not isinstance(group, dict):
            raise ValueError(f"optimizer.groups: write dict(path='^head/', ...), not {group!r}")
        registry.check("optimizer.groups", group, _GROUP)
    if whole.get("average") and config["reload_best_at"]:
        raise ValueError("optimizer.average would outlive reload_best_at: leave out one of them")
    direction = registry.resolve("optimizer", optimizer, taken=kinds)()
    method = _method(config, len(train.names))
    transform_fn = registry.resolve("transform", config["transform"], bind=transform_lib.bind)
    normalize_fn = registry.resolve("normalization", config["normalize"])

    def begin(key, backbone=None):
        shape = (2, *_shape(config, transform_fn, train))
        images = normalize_fn(jax.numpy.zeros(shape, jax.numpy.uint8))
        batch = {"images": images, "labels": jax.numpy.zeros(2, jax.numpy.int32)}
        return method.init(key, batch, backbone=backbone)

    knows = set(train.names) & set(splits.test.names)
    if config["evaluate"]["knn"] and not knows:
        raise ValueError("evaluate.knn asks training images for the class: the test has others")
    if config["evaluate"]["refine"] and (method.inspect or Inspect()).refine is None:
        raise ValueError("evaluate.refine: this method has nothing to refine embeddings with")
    run_every = {
        "log": config["log_every"],
        "evaluate": steps(config["evaluate"]["every"] or total),
        "save": steps(config["checkpoint"]["every"] or config["evaluate"]["every"] or total),
    }
    return Run(
        config=config,
        train=train,
        held_out=held_out,
        test=splits.test,
        method=method,
        begin=begin,
        optimizer=optimizers.build(direction, schedule=factor, **whole),
        sample_fn=sample_fn,
        transform_fn=transform_fn,
        eval_transform_fn=registry.resolve("transform", config["eval_transform"]),
        normalize_fn=normalize_fn,
        shards=shards,
        batch=batch,
        total=total,
        every=run_every,
        reload_best_at=_reloads(config, steps, run_every),
    )


def _reloads(config: dict[str, Any], steps: Callable, every: dict[str, int]) -> tuple[int, ...]:
    at = tuple(steps(at) for at in config["reload_best_at"])
    if at and min(at) < every["evaluate"]:
        raise ValueError(
            f"reload_best_at: {min(at)} is before the first evaluation, at {every['evaluate']}"
        )
    return at


def _complete(config: Any) -> dict[str, Any]:
    """The config with defaults filled in, as plain data that JSON can hold."""
    config = json.loads(json.dumps(config_lib.plain(config)))
    known = {*_DEFAULTS, "dataset", "net", "loss", "method"}
    for name in config:
        if name not in known:
            raise ValueError(f"the config has no field {name!r}{hint(name, known)}")
    if missing := sorted(known - set(_DEFAULTS) - set(config)):
        raise ValueError(f"the config sets no {', '.join(missing)}")
    config = {**json.loads(json.dumps(_DEFAULTS)), **config}
    for name, defaults in (
        ("evaluate", _EVALUATE),
        ("checkpoint", _CHECKPOINT),
        ("runtime", _RUNTIME),
    ):
        if unknown := sorted(set(config[name]) - set(defaults)):
            raise ValueError(f"{name} has no {unknown[0]!r}{hint(unknown[0], defaults)}")
        config[name] = {**json.loads(json.dumps(defaults)), **config[name]}
        registry.check(name, config[name], _kinds(defaults))
    registry.check("the config", config, _kinds(_DEFAULTS))
    for field, least in _LEAST.items():
        value = functools.reduce(dict.__getitem__, field.split("."), config)
        if value is not None and value < least:
            raise ValueError(f"{field} must be {least} or more, not {value}")
    if not 0 <= config["validation"] < 1:
        raise ValueError(f"validation must be a share of 0 to 1, not {config['validation']}")
    if config["steps"] is None:
        raise ValueError("the config sets no steps: a number, or '60 epochs'")
    return config


def _kinds(defaults: dict[str, Any]) -> dict[str, str]:
    """Types of fields that are numbers, lists, yes or no; names may be dicts, None anything."""
    return {k: type(v).__name__ for k, v in defaults.items() if isinstance(v, int | float | tuple)}


def named(spec: Any) -> dict[str, Any]:
    return {"name": spec} if isinstance(spec, str) else spec


def _with_steps(schedule: dict[str, Any], steps: Callable) -> dict[str, Any]:
    """Durations of a schedule in steps."""
    if "warmup" in schedule:
        schedule["warmup"] = steps(schedule["warmup"])
    if "at" in schedule:
        schedule["at"] = [steps(at) for at in schedule["at"]]
    return schedule


def _method(config: dict[str, Any], classes: int) -> Method:
    net = _net(config)
    loss_fn = registry.resolve("loss", _tuples(config["loss"]))
    factory = registry.resolve("method", _tuples(config["method"]))
    wiring = {"classes": classes}
    if config["miner"]:
        mine_fn = registry.resolve("miner", _tuples(config["miner"]))
        if "mine_fn" not in inspect.signature(factory).parameters:
            raise ValueError(f"the method {named(config['method'])['name']} takes no miner")
        draws = "key" in inspect.signature(mine_fn).parameters
        wiring["mine_fn"] = RandomMiner(mine_fn) if draws else mine_fn
    return factory(net, loss_fn, **wiring)


def _net(config: dict[str, Any]) -> Any:
    spec = {k: v for k, v in named(config["net"]).items() if k != "weights"}
    return registry.resolve("net", _tuples(spec))()


def weights(config: dict[str, Any]) -> str | None:
    return named(config["net"]).get("weights")


def _tuples(spec: Any) -> Any:
    """Lists as tuples: attributes of a module must be hashable."""
    if isinstance(spec, dict):
        return {k: _tuples(v) for k, v in spec.items()}
    return tuple(_tuples(v) for v in spec) if isinstance(spec, list) else spec


def first_state(made: Run) -> TrainState:
    """Parameters drawn, and the backbone's read from `net.weights`, on their devices."""
    # `batch_draws` relies on how threefry treats many keys at a time.
    key = jax.random.key(made.config["seed"], impl="threefry2x32")

    @batch_draws  # parameters that the backbone replaces are not drawn
    def state_of(key, backbone):
        return init_state(*made.begin(key, backbone), optimizer=made.optimizer)

    compiled = jax.jit(state_of, compiler_options=_ONCE, out_shardings=placed(made))
    return compiled(key, jax.device_put(_backbone(made), made.shards.everywhere))


def _backbone(made: Run) -> dict[str, Any] | None:
    """The variables of the pretrained backbone in `net.weights`, or None without such a file."""
    path = weights(made.config)
    if not path:
        return None
    from dmljax.weights import convert as pretrained

    shape = jax.eval_shape(made.normalize_fn, _images(made, 1)).shape[1:]
    net = _net(made.config)
    return pretrained.load(path, net, image_shape=shape, report_fn=logging.warning)


def _images(made: Run, count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count, *image_shape(made)), jax.numpy.uint8)


def image_shape(made: Run, *, test: bool = False) -> tuple[int, ...]:
    """Of one image, as training or as testing has it."""
    transform_fn = made.eval_transform_fn if test else made.transform_fn
    return _shape(made.config, transform_fn, made.train)


def _shape(config: dict[str, Any], transform_fn: Callable, split: Split) -> tuple[int, ...]:
    skip = config["runtime"]["unreadable"] == "skip"
    return batch_lib.image_shape(reader(split), transform_fn, skip=skip)


def state_shapes(made: Run) -> TrainState:
    """Shapes of the state; computes nothing."""
    key = jax.eval_shape(functools.partial(jax.random.key, impl="threefry2x32"), 0)
    shapes = jax.eval_shape(made.begin, key)
    return jax.eval_shape(functools.partial(init_state, optimizer=made.optimizer), *shapes)


def placed(made: Run) -> TrainState:
    """Where each array of the state lives."""
    patterns = made.config["runtime"]["sharded"]
    return sharding.of_state(state_shapes(made), made.shards, patterns=patterns)


def check(made: Run) -> None:
    """What only the shapes of a state tell, before anything is written."""
    path = weights(made.config)
    if path and not os.path.isfile(path):
        raise FileNotFoundError(
            f"net.weights: there is no file {path}; docs/weights.md says where weights come from"
        )
    if not path and named(made.config["net"]).get("frozen"):
        logging.warning("net.frozen=True without net.weights: batch norm stays the identity")
    placed(made)
    leaves = jax.tree_util.tree_flatten_with_path(state_shapes(made).params)[0]
    paths = [sharding.path_of(keys) for keys, _ in leaves]
    for group in made.config["optimizer"].get("groups", ()):
        if not any(re.search(group["path"], path) for path in paths):
            raise ValueError(
                f"optimizer.groups: {group['path']!r} is in no parameter's path, such as "
                f"{', '.join(paths[:: max(1, len(paths) // 4)])}"
            )
    images = jax.eval_shape(made.normalize_fn, _images(made, 2))
    runtime = made.config["runtime"]
    check_parts(
        made.method,
        state_shapes(made),
        images,
        chunk=runtime["chunk"],
        sharded=runtime["sharded"],
        batch=made.batch,
        devices=made.shards.size,
    )


def step_fn(made: Run, places: TrainState) -> Callable:
    """The train step, compiled for the devices."""
    everywhere, runtime = made.shards.everywhere, made.config["runtime"]
    step = train_step(
        made.method,
        made.optimizer,
        normalize_fn=made.normalize_fn,
        seed=made.config["seed"],
        chunk=runtime["chunk"],
        # Shards of proxies meet the embeddings of all devices, not the other way round.
        gather_fn=functools.partial(_constrain, place=everywhere) if runtime["sharded"] else None,
    )
    return jax.jit(_agreeing(step), donate_argnums=0, out_shardings=(places, everywhere))


def _constrain(tree: Any, *, place: Any) -> Any:
    return jax.tree.map(lambda a: jax.lax.with_sharding_constraint(a, place), tree)


def _agreeing(one_step: Callable) -> Callable:
    """The step that also says which signal any process has got: all learn it at the same step."""

    def step(state, batch, signalled):
        state, metrics = one_step(state, batch)
        return state, (metrics, signalled.max())

    return step


def reader(split: Split) -> Reader:
    return Reader(split, cache=False)


@contextlib.contextmanager
def batches(made: Run, begun: int = 0) -> Iterator[Any]:
    """This host's rows of the batches of steps `begun + 1` on, without an end."""
    runtime = made.config["runtime"]
    with pipeline.train(
        made.train,
        sample_fn=made.sample_fn,
        transform_fn=made.transform_fn,
        seed=made.config["seed"],
        start=begun,
        host=jax.process_index(),
        hosts=jax.process_count(),
        workers=runtime["workers"],
        cache=runtime["cache"],
        unreadable=runtime["unreadable"],
    ) as batches:
        yield batches
