"""Residual nets in PyTorch, with the names and the topology of torchvision's."""

from reference_common import Staged, conv_norm
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    def __init__(self, i, width, stride, bottleneck):
        super().__init__()
        rows = [(width, 1, 1), (width, 3, stride), (4 * width, 1, 1)]
        if not bottleneck:
            rows = [(width, 3, stride), (width, 3, 1)]
        self.last, before, o = len(rows), i, rows[-1][0]
        for n, (features, size, step) in enumerate(rows, 1):
            conv = nn.Conv2d(before, features, size, step, size // 2, bias=False)
            setattr(self, f"conv{n}", conv)
            setattr(self, f"bn{n}", nn.BatchNorm2d(features))
            before = features
        self.downsample = conv_norm(i, o, 1, stride) if stride != 1 or i != o else None

    def forward(self, x):
        y = x
        for n in range(1, self.last + 1):
            y = getattr(self, f"bn{n}")(getattr(self, f"conv{n}")(y))
            y = F.relu(y) if n < self.last else y
        return F.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResNet(Staged):
    def __init__(self, blocks, bottleneck, width=64, last_stride=2, classes=10):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        i = width
        for n, count in enumerate(blocks):
            features, stages = width * 2**n, []
            for k in range(count):
                stride = (1, 2, 2, last_stride)[n] if k == 0 else 1
                stages.append(Block(i, features, stride, bottleneck))
                i = features * (4 if bottleneck else 1)
            setattr(self, f"layer{n + 1}", nn.Sequential(*stages))
        self.fc = nn.Linear(i, classes)

    def stages(self):
        yield "stem", lambda x: F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for n in range(1, 5):
            yield f"layer{n}", getattr(self, f"layer{n}")
