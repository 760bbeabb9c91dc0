"""The small nets in PyTorch."""

from reference_common import Staged
from torch import nn
from torch.nn import functional as F


class Lecun(Staged):
    def __init__(self, dim=2):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 15, 6), nn.Conv2d(15, 30, 9)
        self.fc = nn.Linear(30, dim)

    def stages(self):
        yield "conv1", lambda x: F.avg_pool2d(F.relu(self.conv1(x)), 3)
        yield "conv2", lambda x: F.relu(self.conv2(x))


class Unit(nn.Module):
    def __init__(self, i, o, stride):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


class ConvNet(Staged):
    def __init__(self, channels=3, classes=10):
        super().__init__()
        self.conv1, self.conv2 = Unit(channels, 32, 2), Unit(32, 64, 1)
        self.conv3, self.conv4 = Unit(64, 64, 2), Unit(64, 128, 1)
        self.conv5, self.fc = Unit(128, 128, 2), nn.Linear(128, classes)

    def stages(self):
        for n in range(1, 6):
            yield f"conv{n}", getattr(self, f"conv{n}")
