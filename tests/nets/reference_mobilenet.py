"""MobileNetV2 in PyTorch, with the names and the topology of torchvision's."""

from reference_common import Staged, conv_norm
from torch import nn


def _unit(i, o, size, stride=1, groups=1):
    return conv_norm(i, o, size, stride, groups=groups, relu=nn.ReLU6())


class Residual(nn.Module):
    def __init__(self, i, o, stride, expansion):
        super().__init__()
        hidden, self.add = i * expansion, stride == 1 and i == o
        first = [] if expansion == 1 else [_unit(i, hidden, 1)]
        middle = _unit(hidden, hidden, 3, stride, hidden)
        self.conv = nn.Sequential(*first, middle, *conv_norm(hidden, o, 1))

    def forward(self, x):
        return x + self.conv(x) if self.add else self.conv(x)


class MobileNetV2(Staged):
    classifier_path = "classifier.1"

    def __init__(self, classes=10):
        super().__init__()
        widths = [32, 16, *[24] * 2, *[32] * 3, *[64] * 4, *[96] * 3, *[160] * 3, 320]
        halving = {2, 4, 7, 14}
        parts = [_unit(3, 32, 3, 2)]
        for n in range(1, 18):
            stride = 2 if n in halving else 1
            parts.append(Residual(widths[n - 1], widths[n], stride, 1 if n == 1 else 6))
        self.features = nn.Sequential(*parts, _unit(320, 1280, 1))
        self.classifier = nn.Sequential(nn.Identity(), nn.Linear(1280, classes))

    def stages(self):
        for n, part in enumerate(self.features):
            yield str(n), part
