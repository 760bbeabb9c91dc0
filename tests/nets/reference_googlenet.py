"""Caffe's GoogLeNet and torchvision's, in PyTorch."""

import torch
from reference_common import Staged
from torch import nn
from torch.nn import functional as F

# name: input; 1x1; reduce, 3x3; reduce, 5x5; projection
TABLE = """
3a 192  64  96 128 16  32  32
3b 256 128 128 192 32  96  64
4a 480 192  96 208 16  48  64
4b 512 160 112 224 24  64  64
4c 512 128 128 256 24  64  64
4d 512 112 144 288 32  64  64
4e 528 256 160 320 32 128 128
5a 832 256 160 320 32 128 128
5b 832 384 192 384 48 128 128
"""
ROWS = {row.split()[0]: [int(n) for n in row.split()[1:]] for row in TABLE.strip().splitlines()}


class CaffeInception(nn.Module):
    def __init__(self, i, a, b, c, d, e, f):
        super().__init__()
        names = ["1x1", "3x3_reduce", "3x3", "5x5_reduce", "5x5", "pool_proj"]
        rows = [(i, a, 1), (i, b, 1), (b, c, 3), (i, d, 1), (d, e, 5), (i, f, 1)]
        for name, (before, after, size) in zip(names, rows, strict=True):
            self.add_module(name, nn.Conv2d(before, after, size, padding=size // 2))

    def forward(self, x):
        def run(x, *names):
            for name in names:
                x = F.relu(self.get_submodule(name)(x))
            return x

        three, five = run(x, "3x3_reduce", "3x3"), run(x, "5x5_reduce", "5x5")
        pooled = run(F.max_pool2d(x, 3, 1, 1), "pool_proj")
        return torch.cat([run(x, "1x1"), three, five, pooled], 1)


class Caffe(Staged):
    classifier_path = "loss3.classifier"

    def __init__(self, classes=10, lrn=(5, 1e-4)):
        super().__init__()
        self.lrn = lrn
        self.conv1 = nn.ModuleDict({"7x7_s2": nn.Conv2d(3, 64, 7, 2, 3)})
        pair = {"3x3_reduce": nn.Conv2d(64, 64, 1), "3x3": nn.Conv2d(64, 192, 3, padding=1)}
        self.conv2 = nn.ModuleDict(pair)
        for name, row in ROWS.items():
            self.add_module(f"inception_{name}", CaffeInception(*row))
        self.loss3 = nn.ModuleDict({"classifier": nn.Linear(1024, classes)})

    def stages(self):
        def norm(x):
            return F.local_response_norm(x, self.lrn[0], self.lrn[1], 0.75, 1.0)

        def pool(x):
            return F.max_pool2d(x, 3, 2, ceil_mode=True)

        def conv2(x):
            return F.relu(self.conv2["3x3"](F.relu(self.conv2["3x3_reduce"](x))))

        yield "conv1", lambda x: F.relu(self.conv1["7x7_s2"](x))
        yield "pool1", lambda x: norm(pool(x))
        yield "conv2", lambda x: norm(conv2(x))
        yield "pool2", pool
        for name in ROWS:
            if name in ("4a", "5a"):
                yield {"4a": "pool3", "5a": "pool4"}[name], pool
            yield name, self.get_submodule(f"inception_{name}")


class Basic(nn.Module):
    def __init__(self, i, o, size, stride=1):
        super().__init__()
        self.conv = nn.Conv2d(i, o, size, stride, size // 2, bias=False)
        self.bn = nn.BatchNorm2d(o, eps=1e-3)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


class NormInception(nn.Module):
    def __init__(self, i, a, b, c, d, e, f):
        super().__init__()
        self.branch1 = Basic(i, a, 1)
        self.branch2 = nn.Sequential(Basic(i, b, 1), Basic(b, c, 3))
        self.branch3 = nn.Sequential(Basic(i, d, 1), Basic(d, e, 3))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1), Basic(i, f, 1))

    def forward(self, x):
        return torch.cat([branch(x) for branch in self.children()], 1)


class Torchvision(Staged):
    def __init__(self, classes=10):
        super().__init__()
        self.conv1, self.conv2, self.conv3 = Basic(3, 64, 7, 2), Basic(64, 64, 1), Basic(64, 192, 3)
        for name, row in ROWS.items():
            self.add_module(f"inception{name}", NormInception(*row))
        self.fc = nn.Linear(1024, classes)

    def stages(self):
        yield "conv1", self.conv1
        yield "pool1", nn.MaxPool2d(3, 2, ceil_mode=True)
        yield "conv2", lambda x: self.conv3(self.conv2(x))
        yield "pool2", nn.MaxPool2d(3, 2, ceil_mode=True)
        for name in ROWS:
            if name == "4a":
                yield "pool3", nn.MaxPool2d(3, 2, ceil_mode=True)
            if name == "5a":
                yield "pool4", nn.MaxPool2d(2, 2, ceil_mode=True)
            yield name, self.get_submodule(f"inception{name}")
