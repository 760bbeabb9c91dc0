"""The method of a config: its backbone, its head, and what of them learns."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.sharding import Mesh

from dmljax import losses
from dmljax.adapt import distilled
from dmljax.adapt.trained import Adapted
from dmljax.config import registry
from dmljax.methods import assemble
from dmljax.methods.base import Method, RandomMiner
from dmljax.nets import layers
from dmljax.train.options import Options

_WITH_PROXIES = ("proxies", "semantic_proxies")  # methods whose losses compare with proxies


class Backbone(NamedTuple):
    net: Any
    weights: str | None  # the file of its pretrained weights


def backbone_of(options: Options) -> Backbone:
    """The net without a head, and the file of its weights; raises if they do not fit `trained`."""
    spec = dict(options.net)
    weights = spec.pop("weights", None)
    if weights and options.start:
        raise ValueError(
            f"start={options.start!r} and net.weights={weights!r} both give the first backbone: "
            "leave out one of them, such as by --config.net.weights=None"
        )
    net = registry.resolve("net", spec)()
    registry.find("adaptation", options.trained)  # a wrong name is refused first
    if (trained := options.trained["name"]) != "all":
        if not has_pretrained(options):
            share = "the backbone" if trained == "last" else "parts of the backbone"
            raise ValueError(
                f"trained={trained!r} leaves {share} as it is, so it needs a pretrained one: "
                "--config.start=runs/... or --config.net.weights=..."
            )
        if hasattr(net, "frozen"):  # its batch norms keep their statistics
            net = net.clone(frozen=True)
    return Backbone(net, weights)


def has_pretrained(options: Options) -> bool:
    """Whether a run begins with a backbone that was trained before."""
    return bool(options.start or options.net.get("weights"))


def with_frozen(options: Options) -> Options:
    """`evaluate.frozen` as True or False; raises if it asks for a backbone that does not exist."""
    evaluation = options.evaluate
    if evaluation.frozen and not has_pretrained(options):
        raise ValueError(
            "evaluate.frozen scores a pretrained backbone: give --config.net.weights=... or "
            "--config.start=runs/..., or leave it out"
        )
    frozen = has_pretrained(options) if evaluation.frozen is None else evaluation.frozen
    return dataclasses.replace(options, evaluate=dataclasses.replace(evaluation, frozen=frozen))


def adapted_of(options: Options, net: Any, *, classes: int, mesh: Mesh | None = None) -> Adapted:
    """The method with this net; `trained` says which part of it learns.

    The devices of `mesh` share the tiles of the loss.
    """
    method = _method(options, net, classes, mesh)
    if options.distill:
        if not has_pretrained(options):
            raise ValueError(
                f"distill={options.distill} stays close to a pretrained backbone: give "
                "--config.net.weights=... or --config.start=runs/..., or leave it out"
            )
        output = pooled_output_of(options) or "pooled"
        method = distilled(method, net, weight=options.distill, output=output)
    return registry.resolve("adaptation", options.trained)(method)


def check_method(options: Options) -> None:
    """Raises unless loss, miner, tile and method fit. Reads no data and builds no net."""
    _functions(options, None)


def _method(options: Options, net: Any, classes: int, mesh: Mesh | None) -> Method:
    factory, loss_fn, mine_fn = _functions(options, mesh)
    mining = {} if mine_fn is None else {"mine_fn": mine_fn}
    return factory(net, loss_fn, classes=classes, **mining)


def _functions(
    options: Options, mesh: Mesh | None
) -> tuple[Callable, Callable, Callable | RandomMiner | None]:
    """The factory of the method, the loss and the miner, which fit each other."""
    loss_fn = _loss(options, mesh)
    factory = _factory(options)
    _check_loss(options, loss_fn)
    if (dim := options.method.get("dim", 1)) is not None and dim < 1:
        raise ValueError(f"method.dim={dim}: an embedding has 1 or more dimensions")
    if not options.miner:
        return factory, loss_fn, None
    mine_fn = registry.resolve("miner", options.miner)
    if "mine_fn" not in inspect.signature(factory).parameters:
        raise ValueError(f"the method {options.method['name']} takes no miner")
    is_random = "key" in inspect.signature(mine_fn).parameters
    return factory, loss_fn, RandomMiner(mine_fn) if is_random else mine_fn


def check_memory(options: Options, *, batch_size: int) -> None:
    """Raises if the memory of the method `pairs` cannot hold a batch."""
    memory = options.method["name"] == "pairs" and options.method.get("memory")
    if memory and memory < batch_size:
        raise ValueError(
            f"method.memory={memory} cannot hold a batch of {batch_size} images: take as many or "
            "more, or 0 for no memory"
        )


def _check_loss(options: Options, loss_fn: Callable) -> None:
    """Raises unless a loss of dmljax is one number, and has the proxies that it needs."""
    method, loss = options.method["name"], options.loss["name"]
    if method not in registry.table("method") or loss not in registry.table("loss"):
        return
    if options.loss.get("reduce_fn", "") is None:
        raise ValueError(
            "loss.reduce_fn=None keeps the entries of the loss, and training needs one number: "
            "leave it out"
        )
    takes_proxies = "proxies" in inspect.signature(loss_fn).parameters
    has_proxies = method in _WITH_PROXIES
    if takes_proxies and not has_proxies:
        raise ValueError(
            f"the loss {loss} compares with proxies, which the method {method} does not have: "
            "--config.method=proxies, or another loss"
        )
    if has_proxies and not takes_proxies:
        raise ValueError(
            f"the loss {loss} takes no proxies, which the method {method} compares with: take a "
            "loss against proxies, or another method, such as --config.method=pairs"
        )


def _loss(options: Options, mesh: Mesh | None) -> Callable:
    if options.tile is None:
        return registry.resolve("loss", options.loss)
    if options.method["name"] == "proxies":
        raise ValueError(
            f"tile={options.tile} divides the pairs of a batch. For losses against proxies, "
            "--config.method.tile divides the classes"
        )
    for field, value in (
        ("miner", options.miner),
        ("loss.mine_fn", options.loss.get("mine_fn")),
        ("method.memory", options.method.get("memory")),
    ):
        if value:
            raise ValueError(
                f"tile={options.tile} and {field}={value!r}: tiles know the pairs by their labels "
                "alone. Leave out one of the two"
            )
    wrap_fn = functools.partial(losses.tiled, tile=options.tile, mesh=mesh)
    return registry.resolve("loss", options.loss, wrap_fn=wrap_fn)


def pooled_output_of(options: Options) -> str | None:
    """The output of the net that the head of the method takes; None if it takes feature maps."""
    output, remaining_pool_fn = assemble.pooling(_argument(_factory(options), "pool_fn"))
    return output if remaining_pool_fn is None else None


def whiten_of(options: Options) -> float:
    """The `whiten` of the linear layer; the default where the layer has no such argument."""
    amount = _argument(_argument(_factory(options), "dense_fn"), "whiten")
    return _argument(layers.centered_dense, "whiten") if amount is None else amount


def _factory(options: Options) -> Callable:
    return registry.resolve("method", options.method)


def _argument(function: Callable | None, name: str) -> Any:
    """The default of an argument of a function, or what is bound to it; None without it."""
    parameters = {} if function is None else inspect.signature(function).parameters
    return parameters[name].default if name in parameters else None
