"""One loop for every method: build, restore, step, log, evaluate, save. Alone reads the config."""

from __future__ import annotations

import collections
import contextlib
import functools
import inspect
import json
import os
import pathlib
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from dmljax import config as config_lib
from dmljax import evaluate, hosts, log, losses, methods, miners, nets, ops, optim, report, sharding
from dmljax.checkpoint import Checkpoints, forget, lock
from dmljax.data import datasets, normalization, pipeline, sampling, transforms
from dmljax.data.splits import Split, divide, record_name, subset
from dmljax.methods.base import Method
from dmljax.train_step import TrainState, check_parts, init_state, train_step

__all__ = ["Run", "batches", "build", "export", "load", "reopen", "run", "score"]

# What runs once is compiled in a fifth of the time without optimisations.
_ONCE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
_IN_FLIGHT = 2  # steps; more dead-lock the collectives of several CPU devices
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


class Run(NamedTuple):
    """A config made into functions and numbers."""

    config: dict[str, Any]
    train: Split
    held_out: Split | None
    test: Split
    method: Method
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
    splits = config_lib.resolve(datasets, config["dataset"])()
    train, held_out = splits.train, None
    if config["validation"]:
        train, held_out = divide(train, train=1 - config["validation"])
    if config["select"] not in ("last", "val", "test"):
        raise ValueError(f"select must be 'last', 'val' or 'test', not {config['select']!r}")
    if config["select"] == "val" and held_out is None:
        raise ValueError("select='val' needs held-out classes: set validation, such as 0.2")
    sample_fn = config_lib.resolve(sampling, config["sampler"])
    groups = sampling.group(train.labels)
    batch = len(sample_fn(groups, seed=config["seed"], step=0))
    devices = config["runtime"]["devices"]
    if devices and jax.process_count() > 1:
        raise ValueError("runtime.devices is for one process: several use all that they see")
    shards = sharding.shardings(jax.devices()[:devices] if devices else None, batch=batch)
    per_epoch = sampling.epoch_steps(sample_fn, groups)
    steps = functools.partial(config_lib.duration, per_epoch=per_epoch)
    total = steps(config["steps"])
    schedule = _with_steps(dict(_named(config["schedule"])), steps)
    factor = config_lib.resolve(optim, schedule)(total=total)
    optimizer = dict(config["optimizer"])
    split_up = inspect.signature(optim.build).parameters
    whole = {k: optimizer.pop(k) for k in list(optimizer) if k in split_up}
    direction = config_lib.resolve(optim, optimizer)()
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
        method=_method(config, len(train.names)),
        optimizer=optim.build(direction, schedule=factor, **whole),
        sample_fn=sample_fn,
        transform_fn=config_lib.resolve(transforms, config["transform"]),
        eval_transform_fn=config_lib.resolve(transforms, config["eval_transform"]),
        normalize_fn=config_lib.resolve(normalization, config["normalize"]),
        shards=shards,
        batch=batch,
        total=total,
        every=run_every,
        reload_best_at=tuple(steps(at) for at in config["reload_best_at"]),
    )


def _complete(config: Any) -> dict[str, Any]:
    """The config with defaults filled in, as plain data that JSON can hold."""
    config = json.loads(json.dumps(config_lib.plain(config)))
    known = {*_DEFAULTS, "dataset", "net", "loss", "method"}
    for name in config:
        if name not in known:
            raise ValueError(f"the config has no field {name!r}{config_lib.hint(name, known)}")
    if missing := sorted(known - set(_DEFAULTS) - set(config)):
        raise ValueError(f"the config sets no {', '.join(missing)}")
    config = {**json.loads(json.dumps(_DEFAULTS)), **config}
    for name, defaults in (
        ("evaluate", _EVALUATE),
        ("checkpoint", _CHECKPOINT),
        ("runtime", _RUNTIME),
    ):
        if unknown := sorted(set(config[name]) - set(defaults)):
            raise ValueError(f"{name} has no {unknown[0]!r}{config_lib.hint(unknown[0], defaults)}")
        config[name] = {**json.loads(json.dumps(defaults)), **config[name]}
    if config["steps"] is None:
        raise ValueError("the config sets no steps: a number, or '60 epochs'")
    return config


def _named(spec: Any) -> dict[str, Any]:
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
    loss_fn = config_lib.resolve(losses, _functions(_tuples(config["loss"])))
    factory = config_lib.resolve(methods, _tuples(config["method"]))
    wiring = {"classes": classes}
    if config["miner"]:
        mine_fn = config_lib.resolve(miners, _tuples(config["miner"]))
        if "mine_fn" not in inspect.signature(factory).parameters:
            raise ValueError(f"the method {_named(config['method'])['name']} takes no miner")
        wiring["mine_fn"] = mine_fn
    return factory(net, loss_fn, **wiring)


def _functions(spec: Any) -> Any:
    """Arguments that are functions, such as `reduce_fn='sum'`, are names of `ops`."""
    if not isinstance(spec, dict):
        return spec
    named = {k: v for k, v in spec.items() if k.endswith("_fn") and isinstance(v, str | dict)}
    return spec | {k: config_lib.resolve(ops, v) for k, v in named.items()}


def _net(config: dict[str, Any]) -> Any:
    spec = {k: v for k, v in _named(config["net"]).items() if k != "weights"}
    return config_lib.resolve(nets, _tuples(spec))()


def _weights(config: dict[str, Any]) -> str | None:
    return _named(config["net"]).get("weights")


def _tuples(spec: Any) -> Any:
    """Lists as tuples: attributes of a module must be hashable."""
    if isinstance(spec, dict):
        return {k: _tuples(v) for k, v in spec.items()}
    return tuple(_tuples(v) for v in spec) if isinstance(spec, list) else spec


def first_state(made: Run) -> TrainState:
    """Parameters drawn, and the backbone's read from `net.weights`, on their devices."""
    begin, rest = _beginning(made)
    key = jax.random.key(made.config["seed"])
    places = placed(made)
    once = functools.partial(jax.jit, compiler_options=_ONCE)
    path = _weights(made.config)
    if not path:
        return once(lambda key: rest(*begin(key)), out_shardings=places)(key)
    from dmljax.nets import pretrained

    found = pretrained.load(path, _net(made.config))
    params, model_state = jax.eval_shape(begin, key)
    fill = made.method.fill or (lambda variables, weights: {**variables, "net": weights})
    stats = fill(model_state.get("batch_stats", {}), found.get("batch_stats", {}))
    filled = [fill(params, found["params"]), model_state]
    if found.get("batch_stats"):
        filled[1] = {**model_state, "batch_stats": stats}
    both = [places.params, places.model_state]

    def drawn(key):  # what is read is not drawn: the compiler leaves it out
        return [_unknown(new, tree) for new, tree in zip(begin(key), filled, strict=True)]

    where = [_unknown(place, tree) for place, tree in zip(both, filled, strict=True)]
    new = once(drawn, out_shardings=where)(key)
    whole = [_join(tree, leaves) for tree, leaves in zip(filled, new, strict=True)]
    return once(rest, out_shardings=places)(*jax.device_put(whole, both))


def _beginning(made: Run) -> tuple[Callable, Callable]:
    """key -> (params, model_state) -> state."""
    shape = _shape(made)

    def begin(key):
        images = made.normalize_fn(jax.numpy.zeros((2, *shape), jax.numpy.uint8))
        batch = {"images": images, "labels": jax.numpy.zeros(2, jax.numpy.int32)}
        return made.method.init(key, batch)

    return begin, lambda params, model_state: init_state(params, model_state, made.optimizer)


def _unknown(new: Any, filled: Any) -> list[Any]:
    """Leaves of `new` for which `filled` has shapes only."""
    pairs = zip(jax.tree.leaves(new), jax.tree.leaves(filled), strict=True)
    return [a for a, leaf in pairs if not isinstance(leaf, np.ndarray)]


def _join(filled: Any, drawn: list[jax.Array]) -> Any:
    rest = iter(drawn)
    leaves, structure = jax.tree.flatten(filled)
    return structure.unflatten(a if isinstance(a, np.ndarray) else next(rest) for a in leaves)


def _shape(made: Run) -> tuple[int, ...]:
    return made.transform_fn(_reader(made.train)(0), np.random.default_rng(0)).shape


def state_shapes(made: Run) -> TrainState:
    """Shapes of the state; computes nothing."""
    begin, rest = _beginning(made)
    return jax.eval_shape(lambda: rest(*begin(jax.random.key(0))))


def placed(made: Run) -> TrainState:
    """Where each array of the state lives."""
    patterns = made.config["runtime"]["sharded"]
    return sharding.of_state(state_shapes(made), made.shards, patterns=patterns)


def _check(made: Run) -> None:
    """What only the shapes of a state tell, before anything is written."""
    placed(made)
    images = jax.ShapeDtypeStruct((2, *_shape(made)), jax.numpy.uint8)
    images = jax.eval_shape(made.normalize_fn, images)
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


def _step(made: Run, places: TrainState) -> Callable:
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


# --- running ------------------------------------------------------------------------------------


def run(config: Any, workdir: str | os.PathLike, *, overwrite: bool = False) -> dict[str, float]:
    """Trains, or goes on training, and returns the scores of the test split."""
    workdir = pathlib.Path(workdir)
    made = build(config)
    _check(made)
    with contextlib.ExitStack() as stack:

        def claim():
            try:
                workdir.mkdir(parents=True, exist_ok=True)
                stack.callback(lock(workdir).close)
                _keep_config(made.config, workdir, overwrite)
            except OSError as error:
                raise OSError(
                    f"{workdir} cannot be written: {error.strerror}. Make room there, ask for the "
                    "permission, or choose another --workdir"
                ) from error

        hosts.first(claim)
        hosts.shared(workdir / "config.json")
        keep = made.config["checkpoint"]["keep"]
        checkpoints = stack.enter_context(Checkpoints(workdir / "checkpoints", keep=keep))
        return _train(made, workdir, checkpoints)


def _keep_config(config: dict[str, Any], workdir: pathlib.Path, overwrite: bool) -> None:
    """Writes config.json, or refuses a run folder of another config."""
    file = workdir / "config.json"
    if file.exists():
        old = json.loads(file.read_text())
        other = sorted(
            f"{path} ({a!r} there, {b!r} here)"
            for path, a, b in config_lib.differences(old, config)
            if not path.startswith(("runtime", "notes"))
        )
        if other and not overwrite:
            raise ValueError(
                f"{workdir} holds a run of another config: {'; '.join(other[:5])}. Choose another "
                "--workdir, or --overwrite to delete that run"
            )
        if other:
            forget(workdir / "checkpoints")
            for name in ("metrics.jsonl", "speed.jsonl"):
                (workdir / name).unlink(missing_ok=True)
            shutil.rmtree(workdir / "frames", ignore_errors=True)
    aside = file.with_suffix(".tmp")
    aside.write_text(json.dumps(config, indent=2) + "\n")
    os.replace(aside, file)


def _train(made: Run, workdir: pathlib.Path, checkpoints: Checkpoints) -> dict[str, float]:
    main = jax.process_index() == 0
    places = placed(made)
    restored = checkpoints.restore(state_shapes(made), places, repair=True)
    if restored is None:
        state, memory = first_state(made), {"window": [], "scores": {}}
    else:
        state, memory = restored
    begun = int(state.step)
    step_fn = _step(made, places)
    evaluator = Evaluator(made)
    writer = log.Log(workdir, step=begun, total=made.total, write=main)
    with contextlib.ExitStack() as stack:
        stack.callback(writer.close)
        stop = stack.enter_context(_Stop(made.shards))
        if main:
            writer.say(_head(made, state, begun))
        if begun == 0:
            baseline = evaluator.raw()
            if baseline:
                writer.say(f"raw pixels, before training: R@1 {100 * baseline['R@1']:.1f}")
                writer.evaluation(0, baseline, split="raw")
            if made.config["evaluate"]["frames"]:
                evaluator.frame(evaluator.embeddings(state, made.test)[""], workdir, 0)
        fed = stack.enter_context(batches(made, begun))
        pending: collections.deque = collections.deque()
        scores: dict[str, float] = {}
        rule = "val/R@1" if made.config["select"] == "val" else "test/R@1"

        def collect(keep: int) -> None:
            while len(pending) > keep:
                step, found = pending.popleft()
                metrics, signalled = jax.device_get(found)
                stop.heard(int(signalled))
                memory["window"].append(_finite(step, metrics, memory["window"]))
                if step % made.every["log"] == 0 or step == made.total:
                    writer.train(step, _means(memory["window"]), batch=made.batch)
                    memory["window"].clear()

        def save(score: float | None = None) -> None:
            collect(0)
            writer.flush()
            checkpoints.save(state, memory, score=score)

        feed = sharding.prefetch(fed, made.shards.rows)
        for step in range(begun + 1, made.total + 1):
            waiting = time.perf_counter()
            batch = next(feed)
            writer.waited(time.perf_counter() - waiting)
            signalled = stop.row()
            with jax.transfer_guard("disallow"):
                state, found = step_fn(state, batch, signalled)
            pending.append((step, found))
            collect(_IN_FLIGHT)
            if step % made.every["evaluate"] == 0 or step == made.total:
                collect(0)
                scores = evaluator.all(state, writer, step, workdir)
                save(scores.get(rule))
                writer.resume(step)
            elif step % made.every["save"] == 0:
                save()
            if step in made.reload_best_at:
                state = _reload(state, checkpoints, made)
            if stop.now:
                save()
                checkpoints.wait()
                writer.say(f"stopped after step {step}, saved; the same command goes on from there")
                stop.leave()
        checkpoints.wait()
        chosen = made.total
        if made.config["select"] != "last":
            chosen = checkpoints.best()
            if chosen != made.total:
                state, _ = checkpoints.load(chosen, state_shapes(made), places)
                scores = {}
        if not scores:  # an earlier checkpoint is the best, or a finished run is asked for again
            scores = evaluator.all(state)
        embeddings = None
        if made.config["pictures"]:  # a matter of all processes
            embeddings = evaluator.embeddings(state, made.test)
        if main:
            _last_words(made, embeddings, state, scores, workdir, writer)
    return {k.removeprefix("test/"): v for k, v in scores.items() if k.startswith("test/")}


def _reload(state: TrainState, checkpoints: Checkpoints, made: Run) -> TrainState:
    """The best parameters and statistics so far; the optimizer's moments stay, as published."""
    checkpoints.wait()
    best, _ = checkpoints.load(checkpoints.best(), state_shapes(made), placed(made))
    return state._replace(params=best.params, model_state=best.model_state)


def _reader(split: Split) -> pipeline.Reader:
    return pipeline.Reader(split, cache=False)


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


def _means(window: list[dict[str, float]]) -> dict[str, float]:
    return {k: float(np.mean([m[k] for m in window])) for k in window[-1]}


def _finite(step: int, metrics: dict[str, Any], window: list) -> dict[str, float]:
    metrics = {k: float(v) for k, v in metrics.items()}
    if not np.isfinite(metrics["loss"]):
        good = f"finite until step {step - 1}" if window else "so far unknown"
        raise FloatingPointError(
            f"the loss is {metrics['loss']} at step {step} ({good}): the last checkpoint is good. "
            "Lower optimizer.rate, set optimizer.clip, or look at the images of that step"
        )
    return metrics


def _head(made: Run, state: TrainState, begun: int) -> str:
    count = sum(x.size for x in jax.tree.leaves(state.params))
    name = _named(made.config["dataset"])["name"]
    where = f"{made.shards.size} {jax.devices()[0].platform} device"
    return (
        f"{name}: {len(made.train):,} training images of {len(made.train.names):,} classes, "
        f"{len(made.test):,} test images of {len(made.test.names):,}; {count:,} parameters; "
        f"batches of {made.batch} on {where}{'s' if made.shards.size > 1 else ''}"
        + _coverage(made)
        + (f"; going on from step {begun}" if begun else "")
    )


def _coverage(made: Run) -> str:
    function = getattr(made.sample_fn, "func", made.sample_fn)
    if function is not sampling.plan:
        return ""
    steps = sampling.coverage(made.train.labels, **made.sample_fn.keywords)
    return f"; every image in {steps} steps"


def _agreeing(one_step: Callable) -> Callable:
    """The step that also says which signal any process has got: all learn it at the same step."""

    def step(state, batch, signalled):
        state, metrics = one_step(state, batch)
        return state, (metrics, signalled.max())

    return step


class _Stop:
    """SIGTERM and Ctrl-C end the run after the step; a second one ends it at once.

    Processes of one run get signals at different steps, or only one gets them, and must stop after
    the same step. So the signal travels with the steps and comes back with the metrics, which costs
    no wait. One process alone need not ask.
    """

    def __init__(self, shards: sharding.Shardings):
        self._shards, self._hit, self._agreed = shards, 0, 0
        self._rows = functools.cache(self._row)

    def __enter__(self):
        self._old = {s: signal.signal(s, self._on) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def _on(self, number, frame):
        if self._hit:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._hit = number

    def __exit__(self, *_):
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def row(self) -> jax.Array:
        """The signal that this process has got, or 0, on each of its devices."""
        return self._rows(int(self._hit))

    def _row(self, number: int) -> jax.Array:
        local = len(self._shards.mesh.local_devices)
        found = sharding.put({"stop": np.full(local, number, np.int32)}, self._shards.rows)
        return found["stop"]

    def heard(self, number: int) -> None:
        """What came back with a step."""
        self._agreed = self._agreed or number

    @property
    def now(self) -> bool:
        if jax.process_count() == 1:
            self._agreed = self._agreed or int(self._hit)
        return self._agreed > 0

    def leave(self) -> None:
        raise SystemExit(128 + self._agreed)


# --- evaluating ---------------------------------------------------------------------------------


class Evaluator:
    """Scores of the splits of a run; the embedding function is compiled once."""

    def __init__(self, made: Run):
        self._made = made
        method = made.method

        def embed(params, model_state, images):
            images = made.normalize_fn(images)
            out = {"": method.embed(params, model_state, images)}
            if method.parts is not None:
                out |= method.parts(params, model_state, images)
            return out

        self._embed = jax.jit(embed, out_shardings=made.shards.rows)

    def embeddings(self, state: TrainState, split: Split) -> dict[str, np.ndarray]:
        """Of every image, under '' the method's own, beside them its parts."""
        params = optim.averaged(state.params, state.opt_state)
        return self._go(lambda images: self._embed(params, state.model_state, images), split)

    def _go(self, embed_fn: Callable, split: Split) -> Any:
        config = self._made.config
        return evaluate.embed(
            embed_fn,
            split,
            transform_fn=self._made.eval_transform_fn,
            batch_size=config["evaluate"]["batch_size"],
            shards=self._made.shards,
            cache=config["runtime"]["cache"],
            workers=config["runtime"]["workers"],
            unreadable=config["runtime"]["unreadable"],
        )

    def score(self, embeddings: dict[str, np.ndarray], split: Split) -> dict[str, float]:
        options = self._made.config["evaluate"]
        scores = evaluate.score(
            embeddings[""],
            split,
            ks=options["ks"],
            clustering=options["clustering"],
            seeds=options["seeds"],
            devices=self._made.shards.mesh.local_devices,
        )
        for name, part in embeddings.items():
            if name:
                found = evaluate.score(part, split, ks=(1,), clustering=False)
                scores[f"{name}/R@1"] = found["R@1"]
        return scores

    def raw(self) -> dict[str, float] | None:
        """Scores of the pixels themselves, where they are few: what a net has to beat."""
        split = self._made.test
        image = self._made.eval_transform_fn(_reader(split)(0), np.random.default_rng(0))
        if image.size > 64 * 64 * 3 or len(split) > 20_000:
            return None
        flat = self._go(lambda images: images.reshape(len(images), -1), split)
        return evaluate.score(flat, split, ks=(1,), clustering=False)

    def frame(self, embeddings: np.ndarray, workdir: pathlib.Path, step: int) -> None:
        """A picture of the test half at this step, for the movie."""
        if jax.process_index() == 0:
            folder = workdir / "frames"
            folder.mkdir(exist_ok=True)
            path = folder / f"{step:09d}.png"
            report.frame(embeddings, self._made.test, path, title=f"step {step:,}")

    def all(
        self,
        state: TrainState,
        writer: log.Log | None = None,
        step: int = 0,
        workdir: pathlib.Path | None = None,
    ) -> dict[str, float]:
        """Scores of the test split and of held-out classes, named 'test/R@1'."""
        splits = {"test": self._made.test, "val": self._made.held_out}
        found = {}
        for name, split in splits.items():
            if split is None or not len(split):
                continue
            embeddings = self.embeddings(state, split)
            if name == "test" and workdir and self._made.config["evaluate"]["frames"]:
                self.frame(embeddings[""], workdir, step)
            scores = self.score(embeddings, split)
            if self._made.config["evaluate"]["refine"]:
                scores |= self._refined(state, embeddings[""], split)
            if k := self._made.config["evaluate"]["knn"]:
                train = self.embeddings(state, self._made.train)[""]
                scores["knn"] = evaluate.knn_accuracy(
                    embeddings[""], split.labels, train, self._made.train.labels, k=k
                )
            if writer is not None:
                writer.evaluation(step, scores, split=name)
            found |= {f"{name}/{k}": v for k, v in scores.items()}
        return found

    def _refined(self, state: TrainState, embeddings: np.ndarray, split: Split) -> dict[str, float]:
        """Scores of what the method makes of a split's embeddings together, at test time."""
        refine = self._made.method.refine
        if refine is None:
            raise ValueError("evaluate.refine: this method has nothing to refine embeddings with")
        params = optim.averaged(state.params, state.opt_state)
        query, gallery = split.query, split.gallery
        better = refine(params, state.model_state, embeddings, query=query, gallery=gallery)
        options = self._made.config["evaluate"]
        found = evaluate.score(np.asarray(better), split, ks=options["ks"], clustering=False)
        return {f"refined/{k}": v for k, v in found.items()}


def _dim(made: Run, state: TrainState) -> int:
    images = jax.ShapeDtypeStruct((1, *_shape(made)), jax.numpy.uint8)
    shape = jax.eval_shape(
        lambda x: made.method.embed(state.params, state.model_state, made.normalize_fn(x)), images
    )
    return shape.shape[1]


def _last_words(made, embeddings, state, scores, workdir, writer) -> None:
    """The table, the rule behind it, the pictures."""
    test = {k.removeprefix("test/"): v for k, v in scores.items() if k.startswith("test/")}
    config = made.config
    size = _dim(made, state)
    writer.say("")
    writer.say(log.table(test))
    weights = _weights(config) or "none"
    writer.say(
        f"test split after step {int(state.step)} (select={config['select']}), "
        f"seed {config['seed']}, {size}-d embeddings, pretraining: {weights}"
    )
    if embeddings is not None:
        names = _pictures(made, embeddings, state, workdir)
        writer.say(f"pictures: {workdir}/{', '.join(names)}")


def _pictures(made, embeddings, state, workdir) -> list[str]:
    """Draws them into the run folder; their names."""
    read, rng = _reader(made.test), np.random.default_rng(0)

    def shown(i):
        return made.eval_transform_fn(read(int(i)), rng)

    report.curves(log.read(workdir / "metrics.jsonl"), workdir / "curves.png")
    report.neighbours(embeddings[""], made.test, shown, workdir / "retrieval.png")
    report.embedding_map(embeddings[""], made.test, shown, workdir / "map.png")
    names = ["curves.png", "retrieval.png", "map.png"]
    if made.config["evaluate"]["frames"]:
        report.movie(workdir / "frames", workdir / "movie.gif")
        names.append("movie.gif")
    if made.method.draw is not None:
        # This process alone draws, on one device of its own.
        params, model_state = jax.device_get(
            (optim.averaged(state.params, state.opt_state), state.model_state)
        )
        readable = np.flatnonzero(np.isfinite(embeddings[""]).all(axis=1))

        def show_fn(images):
            images = made.normalize_fn(jax.numpy.asarray(images))
            return jax.device_get(jax.jit(made.method.show)(params, model_state, images))

        names += made.method.draw(
            workdir,
            labels=made.test.labels[readable],
            embeddings={name: part[readable] for name, part in embeddings.items()},
            read_fn=lambda rows: np.stack([shown(readable[i]) for i in rows]),
            show_fn=show_fn,
        )
    return names


# --- what a run has learned ---------------------------------------------------------------------


def load(
    workdir: str | os.PathLike, *, step: int | None = None
) -> tuple[Callable, dict[str, Any], dict[str, Any]]:
    """`(embed_fn, variables, config)` of a run: `embed_fn(variables, images uint8) -> [b d]`.

    The newest checkpoint that is whole, or that of `step`.
    """
    made, state = reopen(workdir, step=step)
    variables = {
        "params": optim.averaged(state.params, state.opt_state),
        "model_state": state.model_state,
    }

    @jax.jit
    def embed_fn(variables, images):
        images = made.normalize_fn(images)
        return made.method.embed(variables["params"], variables["model_state"], images)

    return embed_fn, variables, made.config


def reopen(
    workdir: str | os.PathLike, *, step: int | None = None, changes: dict[str, Any] | None = None
) -> tuple[Run, TrainState]:
    """A run and its state; `changes` replace fields of its config, such as the data set."""
    workdir = pathlib.Path(workdir)
    file = workdir / "config.json"
    if not file.exists():
        raise FileNotFoundError(f"{workdir} holds no run: there is no {file}")
    made = build({**json.loads(file.read_text()), **(changes or {})})
    checkpoints = Checkpoints(workdir / "checkpoints")
    try:
        if step is not None:
            if step not in checkpoints.steps():
                raise ValueError(f"{workdir} has the checkpoints {checkpoints.steps()}, not {step}")
            found = checkpoints.load(step, state_shapes(made), placed(made))
        else:
            found = checkpoints.restore(state_shapes(made), placed(made))
    finally:
        checkpoints.close()
    if found is None:
        raise FileNotFoundError(f"{workdir} holds no checkpoint")
    return made, found[0]


def score(
    workdir: str | os.PathLike, *, split: str = "test", step: int | None = None
) -> dict[str, float]:
    """`--mode=evaluate`: the scores of a checkpoint on 'train', 'val' or 'test'."""
    made, state = reopen(workdir, step=step)
    half = _half(made, split)
    evaluator = Evaluator(made)
    scores = evaluator.score(evaluator.embeddings(state, half), half)
    print(log.table(scores))
    print(f"{split} split, {len(half):,} images, checkpoint of step {int(state.step)}")
    return scores


def _half(made: Run, split: str) -> Split:
    halves = {"train": made.train, "val": made.held_out, "test": made.test}
    if halves.get(split) is None:
        raise ValueError(f"there is no split {split!r}: {[k for k, v in halves.items() if v]}")
    return halves[split]


def export(
    workdir: str | os.PathLike,
    out: str | os.PathLike,
    *,
    split: str = "test",
    step: int | None = None,
    dtype: str = "float32",
    chunk: int = 4096,
) -> pathlib.Path:
    """`--mode=embed`: writes `embeddings.npy` and `items.safetensors` (labels; ids, class names).

    Chunk by chunk; interrupted, the same call goes on where it was.
    """
    from safetensors.numpy import save_file

    if dtype not in ("float32", "float16"):
        raise ValueError(f"embeddings are written as float32 or float16, not {dtype}")
    made, state = reopen(workdir, step=step)
    half, out = _half(made, split), pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    evaluator = Evaluator(made)
    what = {"split": split, "step": int(state.step), "dtype": dtype, "count": len(half)}
    progress = out / "progress.json"
    done = 0
    if progress.exists():
        begun = json.loads(progress.read_text())
        if {k: begun[k] for k in what} != what:
            raise ValueError(f"{out} was begun with {begun}: finish that, or choose another folder")
        done = begun["done"]
    elif any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty: choose another folder")
    file, array = out / "embeddings.npy", None
    while done < len(half):
        rows = np.arange(done, min(done + chunk, len(half)))
        found = evaluator.embeddings(state, subset(half, rows))[""]
        if array is None:
            shape = (len(half), found.shape[1])
            mode = "r+" if done else "w+"
            array = np.lib.format.open_memmap(file, mode=mode, dtype=dtype, shape=shape)
        array[rows] = found
        array.flush()
        done = int(rows[-1]) + 1
        aside = progress.with_suffix(".tmp")
        aside.write_text(json.dumps({**what, "done": done}))
        os.replace(aside, progress)
    ids = [record_name(half.records, i) for i in range(len(half))]
    notes = {"ids": json.dumps(ids), "classes": json.dumps(half.names), "run": str(workdir)}
    save_file({"labels": half.labels}, out / "items.safetensors", metadata=notes)
    progress.unlink(missing_ok=True)
    print(f"{file}: {len(half):,} embeddings; items.safetensors: their labels and names")
    return out
