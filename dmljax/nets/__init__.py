"""Backbones and heads as Flax modules. `__all__` lists the backbones.

A backbone is a Flax module `net(images [b h w 3], *, train) -> {name: array}`. Its outputs:

* one feature map `[b h w d]` per stage, under the stage's name, and the last one as `features`;
* `pooled` and `max_pooled` `[b d]`, the mean and the maximum of `features` over space, in float32
  (`pooled` of a `vit` is its class token, of a `convnext` the layer norm of the mean);
* `class_and_mean` `[b 2d]` of a `vit` with a class token: this token beside the mean, in float32;
* `logits [b classes]`, if `classes` is a number.

Its arguments:

* `start` and `stop` (not of `lecun`) name the first and the last stage to run. A net with a later
  `start` takes the feature map of the stage before. A `vit` also takes its class token and its
  registers, as `prefix`. Parameters keep their names.
* `norm` is the batch norm: `layers.batch_norm`, whose `momentum` is the weight of a new batch in
  the running statistics, or `layers.frozen_batch_norm`, which uses the running statistics in
  training and does not update them.
* `remat`: activations within blocks are recomputed for the gradient instead of being kept, which
  saves memory and takes time. 'blocks' (or True) keeps the inputs of blocks only, 'dots' also the
  outputs of linear layers, 'none' (or False) all.
* `drop_path` (transformers and ConvNeXt): the rate of stochastic depth of the last block.
* `dtype` is the type of the computation, such as 'bfloat16'. Parameters and statistics are float32.
* `impl` ('auto', 'cpu' or 'xla') is the form of convolutions and max pooling:
  `nets.layers.impl`.

Parameters have the names of the published weights: torchvision's, timm's, Caffe's. The attribute
`expected_normalization` of a backbone is the config's `normalize` that those weights expect.
`nets.initializers.initial_values(net.init, key, images)` starts a deep net several times as fast
as `jax.jit(net.init)`.

A net from outside works in a config as `config.net = 'my_module:MyNet'`: a Flax module with keyword
arguments (`class MyNet(nn.Module, kw_only=True)`), or a function that returns one, whose call
returns at least `features`, `pooled` and `max_pooled` (`layers.add_pooled`).
"""

from dmljax.nets.clip import *  # noqa: F403
from dmljax.nets.convnet import *  # noqa: F403
from dmljax.nets.convnext import *  # noqa: F403
from dmljax.nets.dino import *  # noqa: F403
from dmljax.nets.efficientnet import *  # noqa: F403
from dmljax.nets.googlenet import *  # noqa: F403
from dmljax.nets.mobilenet import *  # noqa: F403
from dmljax.nets.resnet import *  # noqa: F403

# The modules with published files. `weights.published` reads their tables.
FAMILIES = ("resnet", "mobilenet", "efficientnet", "convnext", "googlenet", "dino", "clip")
__all__ = sorted(n for n, net in globals().items() if callable(net) and not n.startswith("_"))
