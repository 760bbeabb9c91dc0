"""BN-Inception in PyTorch, with the flat names of the weights in common use."""

import torch
from reference_common import Staged
from torch import nn
from torch.nn import functional as F

# name: input; 1x1; reduce, 3x3; reduce, double 3x3; projection, pool
TABLE = """
3a  192  64  64  64  64  96  32 avg
3b  256  64  64  96  64  96  64 avg
3c  320   0 128 160  64  96   0 max
4a  576 224  64  96  96 128 128 avg
4b  576 192  96 128  96 128 128 avg
4c  576 160 128 160 128 160 128 avg
4d  608  96 128 192 160 192 128 avg
4e  608   0 128 192 192 256   0 max
5a 1056 352 192 320 160 224 128 avg
5b 1024 352 192 320 192 224 128 max
"""


class BNInception(Staged):
    classifier_path = "last_linear"

    def __init__(self, classes=10):
        super().__init__()
        self._add("conv1_7x7_s2", 3, 64, 7, 2)
        self._add("conv2_3x3_reduce", 64, 64, 1)
        self._add("conv2_3x3", 64, 192, 3)
        self.rows = {}
        for line in TABLE.strip().splitlines():
            name, *numbers, pool = line.split()
            i, one, r, three, rr, double, project = map(int, numbers)
            self.rows[name], stride = (one, pool), 1 if one else 2
            prefix = f"inception_{name}_"
            if one:
                self._add(prefix + "1x1", i, one, 1)
                self._add(prefix + "pool_proj", i, project, 1)
            self._add(prefix + "3x3_reduce", i, r, 1)
            self._add(prefix + "3x3", r, three, 3, stride)
            self._add(prefix + "double_3x3_reduce", i, rr, 1)
            self._add(prefix + "double_3x3_1", rr, double, 3)
            self._add(prefix + "double_3x3_2", double, double, 3, stride)
        self.last_linear = nn.Linear(1024, classes)

    def _add(self, name, i, o, size, stride=1):
        self.add_module(name, nn.Conv2d(i, o, size, stride, size // 2))
        self.add_module(f"{name}_bn", nn.BatchNorm2d(o))

    def _run(self, x, *names):
        for name in names:
            x = F.relu(self.get_submodule(f"{name}_bn")(self.get_submodule(name)(x)))
        return x

    def _inception(self, name, x):
        one, pool = self.rows[name]
        prefix = f"inception_{name}_"
        parts = [self._run(x, prefix + "1x1")] if one else []
        parts += [self._run(x, prefix + "3x3_reduce", prefix + "3x3")]
        double = (prefix + "double_3x3_" + part for part in ("reduce", "1", "2"))
        parts += [self._run(x, *double)]
        if one:
            pooled = F.avg_pool2d(x, 3, 1, 1) if pool == "avg" else F.max_pool2d(x, 3, 1, 1)
            parts += [self._run(pooled, prefix + "pool_proj")]
        else:
            parts += [F.max_pool2d(x, 3, 2, ceil_mode=True)]
        return torch.cat(parts, 1)

    def stages(self):
        yield "conv1", lambda x: self._run(x, "conv1_7x7_s2")
        yield "pool1", nn.MaxPool2d(3, 2, ceil_mode=True)
        yield "conv2", lambda x: self._run(x, "conv2_3x3_reduce", "conv2_3x3")
        yield "pool2", nn.MaxPool2d(3, 2, ceil_mode=True)
        for name in self.rows:
            yield name, lambda x, name=name: self._inception(name, x)
