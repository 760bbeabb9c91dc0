"""ConvNeXt (Liu et al., CVPR 2022) with timm's parameter names.

The stages are `stem` and `0` to `3`. `start` and `stop` may also name a block of a stage, such as
`2.4`: between two blocks of one stage, a map keeps its size. `pooled` is the layer norm of the mean
over space, on which the published classifiers stand; a net that stops before the end of stage `3`
has the plain mean.
`dmljax.nets` documents what all backbones share.
"""

import functools
from typing import Any, ClassVar

import flax.linen as nn
import jax
from jaxtyping import Float

from dmljax.nets import files, layers
from dmljax.nets.initializers import truncated_normal
from dmljax.nets.layers import Conv, Dense, Dtype
from dmljax.nets.transformer import gelu
from dmljax.ops import Array

__all__ = ["convnext_b", "convnext_l", "convnext_s", "convnext_t"]

_INIT = {"kernel_init": truncated_normal(0.02), "bias_init": nn.initializers.zeros}


class _Block(nn.Module):
    """A depthwise 7x7 convolution, layer norm, an MLP of four times the width, layer scale."""

    dtype: Dtype | None
    impl: str
    drop_path: float

    @nn.compact
    def __call__(self, x):
        def mlp(x):
            dense = functools.partial(Dense, dtype=self.dtype, merged=True, **_INIT)
            return dense(width, name="fc2")(gelu(dense(4 * width, name="fc1")(x)))

        width = x.shape[-1]
        options = {"dtype": self.dtype, "impl": self.impl, "name": "conv_dw"} | _INIT
        y = Conv(width, 7, 1, 3, groups=width, use_bias=True, **options)(x)
        y = layers.named("mlp", mlp, layers.layer_norm(y, "norm", dtype=self.dtype))
        gamma = self.param("gamma", nn.initializers.constant(1e-6), (width,))
        y = y * gamma.astype(y.dtype)[None, None, None]
        return layers.with_stored_gradient(x + layers.DropPath(self.drop_path, name="drop_path")(y))


class ConvNeXt(layers.Backbone, kw_only=True):
    """ConvNeXt with `blocks` blocks per stage. `width` doubles at stages 1 to 3.

    `drop_path` is the rate of stochastic depth of the last block; it grows with depth from 0.
    """

    family: ClassVar[str] = "convnext"
    expected_normalization: ClassVar[str] = "imagenet"

    blocks: tuple[int, int, int, int] = (3, 3, 27, 3)
    width: int
    drop_path: float = 0.0

    @nn.compact
    def __call__(
        self, images: Float[Array, "b h w c"], *, train: bool
    ) -> dict[str, Float[jax.Array, "..."]]:
        def conv(x, width, size, name):
            return self.conv(width, size, size, 0, use_bias=True, name=name, **_INIT)(x)

        def stem(x):
            return layers.layer_norm(conv(x, self.width, 4, "0"), "1", dtype=self.dtype)

        def downsample(width, x):
            return conv(layers.layer_norm(x, "0", dtype=self.dtype), width, 2, "1")

        def blocks(index, numbers, x):
            for i in numbers:
                number = sum(self.blocks[:index]) + i
                rate = layers.drop_rate(number, sum(self.blocks), self.drop_path, train=train)
                x = block(self.dtype, self.impl, rate, name=str(i))(x)
            return x

        def stage_of_blocks(index, numbers, x):
            if index and numbers[0] == 0:
                fn = functools.partial(downsample, self.width * 2**index)
                x = layers.named("downsample", fn, x)
            return layers.named("blocks", functools.partial(blocks, index, numbers), x)

        def all_stages(x):
            for stage, numbers in parts.items():
                fn = functools.partial(stage_of_blocks, int(stage), numbers)
                x = layers.named(stage, fn, x)
                if numbers[-1] == self.blocks[int(stage)] - 1:
                    outputs[stage] = x
            return x

        def head(x):
            outputs["pooled"] = layers.layer_norm(x, "norm")
            if self.classes is not None:
                outputs["logits"] = Dense(self.classes, **_INIT, name="fc")(outputs["pooled"])

        block = layers.checkpointed(_Block, self.remat)
        first, *others = self._range()
        parts: dict[str, list[int]] = {}
        for name in others if first == "stem" else (first, *others):
            parts.setdefault(name[0], []).append(int(name[2:]))
        x, outputs, channels = images, {}, 3
        if first != "stem":
            channels = self.width * 2 ** max(0, int(first[0]) - first.endswith(".0"))
        layers.check_maps(f"convnext from {self.start or first!r} on", images, channels)
        if first == "stem":
            x = outputs["stem"] = layers.named("stem", stem, x)
        x = layers.named("stages", all_stages, x)
        outputs = layers.add_pooled(outputs, x)
        if "3" in outputs:
            layers.named("head", head, outputs["pooled"])
        return outputs

    def _range(self) -> tuple[str, ...]:
        """Lists the stem and the blocks from `start` to `stop`, such as '2.4'."""
        last = {str(stage): f"{stage}.{n - 1}" for stage, n in enumerate(self.blocks)}
        start, stop = self.start or "stem", self.stop or "3"
        start, stop = f"{start}.0" if start in last else start, last.get(stop, stop)
        names = [f"{stage}.{i}" for stage, n in enumerate(self.blocks) for i in range(n)]
        return layers.stage_range("convnext", ["stem", *names], start, stop)

    @classmethod
    def facts(cls, shape: files.ShapeFn) -> dict[str, Any] | None:
        blocks = tuple(files.count_of(shape, f"stages.{i}.blocks", "gamma") for i in range(4))
        return {"width": files.rows_of(shape, "stem.0")[0], "blocks": blocks} if blocks[0] else None


convnext_t = functools.partial(ConvNeXt, width=96, blocks=(3, 3, 9, 3))
convnext_s = functools.partial(ConvNeXt, width=96)
convnext_b = functools.partial(ConvNeXt, width=128)
convnext_l = functools.partial(ConvNeXt, width=192)

_22K = files.IMAGENET.replace("1k", "22k")

PUBLISHED = {
    f"convnext_{size[0]}": files.Published(
        f"convnext_{size[0]}",
        files.hub(f"timm/convnext_{size}.fb_in22k"),
        megabytes,
        files.APACHE,
        _22K,
        files.BICUBIC,
    )
    for size, megabytes in (("tiny", 178), ("small", 265), ("base", 440), ("large", 919))
}


def _transformers(prefix: str) -> files.NameMap:
    layer = f"{prefix}encoder.stages.*.layers.*"
    return files.NameMap(
        "ConvNeXt, transformers",
        marks=(f"{prefix}encoder.stages.0.layers.0.dwconv.weight",),
        rules={
            "stem.0": f"{prefix}embeddings.patch_embeddings",
            "stem.1": f"{prefix}embeddings.layernorm",
            "stages.*.downsample.*": f"{prefix}encoder.stages.*.downsampling_layer.*",
            "stages.*.blocks.*.gamma": f"{layer}.layer_scale_parameter",
            "stages.*.blocks.*.conv_dw": f"{layer}.dwconv",
            "stages.*.blocks.*.norm": f"{layer}.layernorm",
            "stages.*.blocks.*.mlp.fc1": f"{layer}.pwconv1",
            "stages.*.blocks.*.mlp.fc2": f"{layer}.pwconv2",
            "head.norm": f"{prefix}layernorm",
            "head.fc": "classifier",
        },
    )


_BLOCK, _OURS = "stages.*.*", "stages.*.blocks.*"
_ORIGINAL = files.NameMap(
    "ConvNeXt, original",
    marks=("downsample_layers.0.0.weight", "stages.0.0.dwconv.weight"),
    rules={
        "stem.*": "downsample_layers.0.*",
        "stages.*.downsample.*": "downsample_layers.*.*",
        f"{_OURS}.gamma": f"{_BLOCK}.gamma",
        f"{_OURS}.conv_dw": f"{_BLOCK}.dwconv",
        f"{_OURS}.norm": f"{_BLOCK}.norm",
        f"{_OURS}.mlp.fc1": f"{_BLOCK}.pwconv1",
        f"{_OURS}.mlp.fc2": f"{_BLOCK}.pwconv2",
        "head.norm": "norm",
        "head.fc": "head",
    },
)

# A file of the backbone alone has no prefix.
NAME_MAPS = (_transformers("convnext."), _transformers(""), _ORIGINAL)
