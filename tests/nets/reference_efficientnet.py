"""EfficientNet-lite in PyTorch, with timm's names and TensorFlow's "same" padding."""

import math

from reference_common import Staged
from torch import nn
from torch.nn import functional

WIDTHS = (32, 16, 24, 40, 80, 112, 192, 320)
REPEATS, SIZES, STRIDES = (1, 2, 2, 3, 3, 4, 1), (3, 3, 5, 3, 5, 5, 3), (1, 2, 2, 2, 1, 2, 1)


class Same(nn.Conv2d):
    """The zeros at the end are as many as at the beginning, or one more."""

    def forward(self, x):
        size, step = self.kernel_size[0], self.stride[0]
        height, width = (max(0, size - (n % step or step)) for n in x.shape[2:])
        sides = (width // 2, -(-width // 2), height // 2, -(-height // 2))
        return super().forward(functional.pad(x, sides))


class Block(nn.Module):
    def __init__(self, i, o, size, stride, expansion):
        super().__init__()
        hidden, self.add = i * expansion, stride == 1 and i == o
        names = ("conv_dw", "bn1", "conv_pw", "bn2")
        if expansion > 1:
            self.conv_pw, self.bn1 = Same(i, hidden, 1, bias=False), nn.BatchNorm2d(hidden, 1e-3)
            names = ("conv_dw", "bn2", "conv_pwl", "bn3")
        self.names = names if expansion == 1 else ("conv_pw", "bn1", *names)
        depthwise = Same(hidden, hidden, size, stride, groups=hidden, bias=False)
        parts = depthwise, nn.BatchNorm2d(hidden, 1e-3), Same(hidden, o, 1, bias=False)
        for name, part in zip(names, (*parts, nn.BatchNorm2d(o, 1e-3)), strict=True):
            self.add_module(name, part)

    def forward(self, x):
        y = x
        for name in self.names:
            y = self.get_submodule(name)(y)
            if name.startswith("bn") and name != self.names[-1]:
                y = functional.relu6(y)
        return x + y if self.add else y


class EfficientNetLite(Staged):
    classifier_path = "classifier"

    def __init__(self, multiplier=1.0, depth=1.0, classes=10):
        super().__init__()
        widths = [32, *(8 * max(1, math.floor(w * multiplier / 8 + 0.5)) for w in WIDTHS[1:])]
        widths = [w + 8 * (w < 0.9 * v * multiplier) for w, v in zip(widths, WIDTHS, strict=True)]
        self.conv_stem, self.bn1 = Same(3, 32, 3, 2, bias=False), nn.BatchNorm2d(32, 1e-3)
        self.blocks = nn.Sequential()
        for n, (repeats, size, stride) in enumerate(zip(REPEATS, SIZES, STRIDES, strict=True)):
            if 0 < n < 6:
                repeats = math.ceil(repeats * depth)
            ends = [widths[n], *repeats * [widths[n + 1]]]
            expansion = 6 if n else 1
            self.blocks.append(
                nn.Sequential(
                    *(
                        Block(ends[k], ends[k + 1], size, stride if k == 0 else 1, expansion)
                        for k in range(repeats)
                    )
                )
            )
        self.conv_head, self.bn2 = Same(widths[-1], 1280, 1, bias=False), nn.BatchNorm2d(1280, 1e-3)
        self.classifier = nn.Linear(1280, classes)

    def stages(self):
        yield "stem", nn.Sequential(self.conv_stem, self.bn1, nn.ReLU6())
        for n, part in enumerate(self.blocks):
            yield str(n), part
        yield "head", nn.Sequential(self.conv_head, self.bn2, nn.ReLU6())
