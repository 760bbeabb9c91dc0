"""A vision transformer in PyTorch, with the names of DINO's and timm's."""

import torch
from torch import nn
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        b, n, d = x.shape
        qkv = (part.view(b, n, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*qkv)
        return self.proj(mixed.transpose(1, 2).reshape(b, n, d))


class Mlp(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return self.fc2(F.gelu(self.fc1(x)))


class LayerScale(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.gamma


class Block(nn.Module):
    def __init__(self, width, heads, layer_scale):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.attn, self.mlp = Attention(width, heads), Mlp(width)
        self.ls1, self.ls2 = (LayerScale(width) if layer_scale else nn.Identity() for _ in "12")

    def forward(self, x):
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    def __init__(self, width, heads, depth, patch, image_size, classes=10, layer_scale=False):
        super().__init__()
        self.patch, self.side = patch, image_size // patch
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.zeros(1, self.side**2 + 1, width))
        self.patch_embed = nn.ModuleDict({"proj": nn.Conv2d(3, width, patch, patch)})
        self.blocks = nn.ModuleList(Block(width, heads, layer_scale) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, classes)

    def forward(self, x, start=None, stop=None):
        x = self.patch_embed["proj"](x)
        (b, d, h, w), outputs = x.shape, {}
        grid = self.pos_embed[:, 1:].transpose(1, 2).reshape(1, d, self.side, self.side)
        grid = F.interpolate(grid, (h, w), mode="bicubic")
        tokens = torch.cat([self.cls_token.expand(b, -1, -1), x.flatten(2).transpose(1, 2)], 1)
        x = tokens + torch.cat([self.pos_embed[:, :1], grid.flatten(2).transpose(1, 2)], 1)
        for n, block in enumerate(self.blocks):
            x = block(x)
            outputs[str(n)] = x[:, 1:].transpose(1, 2).reshape(b, d, h, w)
        x = self.norm(x)
        outputs["features"] = x[:, 1:].transpose(1, 2).reshape(b, d, h, w)
        outputs["pooled"], outputs["prefix"] = x[:, 0], x[:, :1]
        outputs["class_and_mean"] = torch.cat([x[:, 0], x[:, 1:].mean(1)], 1)
        return outputs | {"logits": self.head(x[:, 0])}
