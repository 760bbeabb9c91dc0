"""What backbones share: named stages, ranges of stages, checks, shapes of variables."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Float

from dmljax.nets.layers.convolution import Conv, Dense, Dtype
from dmljax.nets.layers.pooling import global_max, global_mean
from dmljax.ops import Array

__all__ = [
    "Backbone",
    "DropPath",
    "add_pooled",
    "check_maps",
    "checkpointed",
    "drop_rate",
    "multiple_of_8",
    "named",
    "shapes",
    "stage_range",
    "with_stored_gradient",
]


class _Scope(nn.Module):
    fn: Callable

    @nn.compact
    def __call__(self, x):
        return self.fn(x)


_POLICIES = {
    "none": None,
    "blocks": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def checkpointed(fn: Any, remat: bool | str) -> Any:
    """Wraps a module class, or a function of a module, so that its gradient recomputes the
    activations.

    `remat` says what is kept: 'none' (False) recomputes nothing; 'blocks' (True) keeps the inputs
    of blocks only; 'dots' also keeps the outputs of linear layers, so that attention and activation
    functions are recomputed.
    """
    name = {False: "none", True: "blocks"}[remat] if isinstance(remat, bool) else remat
    if name not in _POLICIES:
        raise ValueError(f"remat is one of {', '.join(_POLICIES)}, not {remat!r}")
    return fn if name == "none" else nn.remat(fn, policy=_POLICIES[name])


def named(name: str, fn: Callable, x: Any, *, remat: bool | str = False) -> Any:
    """Computes fn(x); modules created by `fn` get `name` as one more level of their path.

    `fn` must be a function, not a method: a method would create them in its own module. `remat` is
    as in `checkpointed`.
    """
    return checkpointed(_Scope, remat)(fn, name=name)(x)


def drop_rate(block: int, count: int, rate: float, *, train: bool) -> float:
    """Returns the rate of stochastic depth of block `block` of `count`: linear from 0 to `rate`."""
    if not 0 <= rate < 1:
        raise ValueError(f"drop_path is at least 0 and below 1, not {rate}")
    return rate * block / max(1, count - 1) if train else 0.0


class DropPath(nn.Module):
    """Drops the branch of a residual block for a fraction `rate` of the images.

    (Stochastic depth, Huang et al., ECCV 2016.) The kept branches are divided by 1 - rate. Without
    the key 'dropout', none is dropped.
    """

    rate: float

    @nn.compact
    def __call__(self, y):
        if not self.rate or not self.has_rng("dropout"):
            return y
        shape = (y.shape[0], *(1,) * (y.ndim - 1))
        keep = jax.random.bernoulli(self.make_rng("dropout"), 1 - self.rate, shape)
        return jnp.where(keep, y / (1 - self.rate), 0)


def add_pooled(
    outputs: dict[str, Any], features: Any, *, classes: int | None = None, classifier: str = "fc"
) -> dict[str, Any]:
    """Adds the last feature map as `features`, and its mean and maximum over space, to `outputs`.

    With `classes`, also the `logits` of the mean by a linear layer at the path `classifier`.
    """
    pooled = {"pooled": global_mean(features), "max_pooled": global_max(features)}
    outputs = outputs | {"features": features} | pooled
    if classes is not None:
        scope, _, name = classifier.rpartition("/")

        def classify(x):
            return Dense(classes, name=name)(x)

        x = outputs["pooled"]
        outputs["logits"] = named(scope, classify, x) if scope else classify(x)
    return outputs


def multiple_of_8(width: float) -> int:
    """Returns the nearest multiple of 8 that is not more than a tenth below `width`."""
    rounded = max(8, int(width + 4) // 8 * 8)
    return rounded + 8 if rounded < 0.9 * width else rounded


def stage_range(net: str, stages: Sequence[str], start: str, stop: str) -> tuple[str, ...]:
    """Lists the names of the stages from `start` to `stop`, both included."""
    for name in (start, stop):
        if name not in stages:
            raise ValueError(f"{net} has no stage {name!r}. It has: {', '.join(stages)}")
    first, last = stages.index(start), stages.index(stop)
    if first > last:
        raise ValueError(f"{net} reaches stage {stop!r} before {start!r}: exchange start and stop")
    return tuple(stages[first : last + 1])


def check_maps(net: str, x: Any, channels: int | Sequence[int]) -> None:
    """Raises unless `x` is float `[b h w c]`, with one of these numbers of channels."""
    allowed = (channels,) if isinstance(channels, int) else tuple(channels)
    text = " or ".join(map(str, allowed))
    if jnp.ndim(x) != 4 or x.shape[3] not in allowed or 0 in x.shape[1:3]:
        raise ValueError(f"{net} takes [b h w c] with {text} channels, not {list(jnp.shape(x))}")
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"{net} takes normalized images as floats, not {x.dtype}")


def shapes(net: nn.Module, image_size: int, *, channels: int = 3) -> Any:
    """Returns shapes and types of the variables of `net` for images of this size."""
    image = jax.ShapeDtypeStruct((1, image_size, image_size, channels), jnp.float32)
    return jax.eval_shape(lambda key, x: net.init(key, x, train=False), jax.random.key(0), image)


class Backbone(nn.Module, kw_only=True):
    """Runs stages one after the other; `dmljax.nets` documents the arguments and the outputs.

    A subclass defines `channels`, the channels of the feature map of each stage, and
    `stage(stage, x, train)`, or `run` where stages share a scope. `classifier` is the path of
    the layer that computes the logits. `mark` is a tensor that files of this family alone have.
    """

    family: ClassVar[str]
    mark: ClassVar[str] = ""
    classifier: ClassVar[str] = "fc"
    channels: ClassVar[Mapping[str, int]]
    image_channels: ClassVar[tuple[int, ...]] = (3,)

    classes: int | None = None
    start: str | None = None
    stop: str | None = None
    remat: bool | str = False
    dtype: Dtype | None = None
    impl: str = "auto"

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], *, train: bool
    ) -> dict[str, Float[jax.Array, "..."]]:
        names = list(self.channels)
        start, stop = self.start or names[0], self.stop or names[-1]
        stages = stage_range(self.family, names, start, stop)
        index = names.index(start)
        channels = self.channels[names[index - 1]] if index else self.image_channels
        check_maps(f"{self.family} from {start!r} on", images, channels)
        outputs = self.run(images, stages, train)
        last = outputs[stages[-1]]
        return add_pooled(outputs, last, classes=self.classes, classifier=self.classifier)

    def run(self, x: Array, stages: Sequence[str], train: bool) -> dict[str, Array]:
        """Returns the feature maps of `stages`; `x` is the input of the first one."""
        outputs = {}
        for name in stages:
            x = outputs[name] = self.stage(name, x, train)
        return outputs

    def stage(self, stage: str, x: Array, train: bool) -> Array:
        """Returns the feature map of one stage."""
        raise NotImplementedError

    @classmethod
    def facts(cls, shape: Callable) -> dict[str, Any] | None:
        """Returns attributes of the net of this family whose file has tensors of these shapes.

        They do not tell the activation and the number of heads. Returns None for files of other
        families. `shape` is a `nets.files.ShapeFn`.
        """
        return {} if cls.mark and shape(cls.mark) else None

    @nn.nowrap  # a method that Flax wraps would create the layer outside of the scope of its caller
    def conv(
        self, features: int, size: int, strides: int = 1, padding: int | None = None, **options: Any
    ) -> Conv:
        """Builds a convolution of this net; by default it keeps the sides of a map at stride 1."""
        padding = size // 2 if padding is None else padding
        options |= {"dtype": self.dtype, "impl": self.impl}
        return Conv(features, size, strides, padding, **options)


@jax.custom_vjp
def with_stored_gradient(x: jax.Array) -> jax.Array:
    """Returns x. On CPUs its gradient is computed once and stored.

    XLA fuses the gradient of a sum x + f(x) into everything that reads it. In a row of such sums,
    each layer then computes the gradients of all later ones again: the gradient of DINOv2 S/14
    takes 1.7 times the time.
    Nothing is fused across a loop. This one is never entered, except for NaN, which stays NaN.
    """
    return x


def _stored(g: jax.Array) -> jax.Array:
    def doubled(carry):
        is_nan, g = carry
        return is_nan & False, 2 * g

    first = g.reshape(-1)[0]
    return jax.lax.while_loop(lambda carry: carry[0], doubled, (first != first, g))[1]


def _stored_gradient(_, g: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.platform_dependent(g, cpu=_stored, default=lambda g: g),)


with_stored_gradient.defvjp(lambda x: (x, None), _stored_gradient)
