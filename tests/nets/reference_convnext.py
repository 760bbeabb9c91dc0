"""ConvNeXt in PyTorch, with timm's names."""

import torch
from reference_common import Staged
from torch import nn


class Norm(nn.LayerNorm):
    """Over the channels of `[b c h w]`."""

    def forward(self, x):
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))
        self.conv_dw = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.mlp = nn.LayerNorm(width, eps=1e-6), nn.Module()
        self.mlp.fc1, self.mlp.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        y = self.norm(self.conv_dw(x).movedim(1, -1))
        y = self.mlp.fc2(nn.functional.gelu(self.mlp.fc1(y)))
        return x + (self.gamma * y).movedim(-1, 1)


class Stage(nn.Module):
    def __init__(self, before, width, blocks):
        super().__init__()
        self.downsample = nn.Identity()
        if before != width:
            self.downsample = nn.Sequential(Norm(before, eps=1e-6), nn.Conv2d(before, width, 2, 2))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))

    def forward(self, x):
        return self.blocks(self.downsample(x))


class ConvNeXt(Staged):
    classifier_path = "head.fc"

    def __init__(self, width, blocks, classes=10):
        super().__init__()
        widths = [width * 2**n for n in range(4)]
        self.stem = nn.Sequential(nn.Conv2d(3, width, 4, 4), Norm(width, eps=1e-6))
        ends = zip([width, *widths], widths, blocks, strict=False)
        self._modules["stages"] = nn.ModuleList(Stage(*sizes) for sizes in ends)
        self.head, self.width = nn.Module(), widths[-1]
        self.head.norm = nn.LayerNorm(self.width, eps=1e-6)
        self.head.fc = nn.Linear(self.width, classes)

    def stages(self):
        yield "stem", self.stem
        for n, part in enumerate(self._modules["stages"]):
            yield str(n), part

    def pool(self, x):
        mean = x.mean((2, 3))
        return self.head.norm(mean) if x.shape[1] == self.width else mean
