"""Backbones and heads as Flax modules. `__all__` is the registry of what builds them.

A backbone is `net(images [b h w 3], *, train) -> {name: array}`:

* one map per stage, under the stage's name; `features`, the last of them; `pooled` and `max_pooled`
  `[b d]`, its mean and maximum over space (of a `vit`, its class token), in float32; `logits` if
  `classes` is a number.
* `start` and `stop` (not of `vit` and `lecun`) name the first and the last stage to run. A net that
  starts later takes the map of the stage before. The parameters keep the names they have in the
  whole net.
* `frozen`: batch norm uses its running statistics while training, too, and leaves them alone.
  `momentum` is the share of a new batch in them.
* `remat`: blocks are computed again for the gradient instead of being kept: less memory, more time.
* `dtype`: of the computation, such as 'bfloat16'; parameters and statistics stay float32.

Parameters are named as where the weights come from: torchvision, timm, Caffe. `net.init` of a deep
net compiles several times as fast by `jax.jit(initial.together(lambda key: net.init(key, ...)))`.
"""

from dmljax.nets import bn_inception as _bn_inception
from dmljax.nets import googlenet as _googlenet
from dmljax.nets import mobilenet as _mobilenet
from dmljax.nets import resnet as _resnet
from dmljax.nets import small as _small
from dmljax.nets import vit as _vit
from dmljax.nets.bn_inception import *  # noqa: F403
from dmljax.nets.googlenet import *  # noqa: F403
from dmljax.nets.mobilenet import *  # noqa: F403
from dmljax.nets.resnet import *  # noqa: F403
from dmljax.nets.small import *  # noqa: F403
from dmljax.nets.vit import *  # noqa: F403

_FILES = (_bn_inception, _googlenet, _mobilenet, _resnet, _small, _vit)
__all__ = sorted(name for file in _FILES for name in file.__all__)
