"""What the PyTorch references share: they run by stages and return every stage's feature map."""

from torch import nn


class Staged(nn.Module):
    """`stages()` lists (name, function). Output: maps by name, `features`, `pooled`, `logits`."""

    classifier_path = "fc"

    def forward(self, x, start=None, stop=None):
        outputs, running = {}, start is None
        for name, fn in self.stages():
            running = running or name == start
            if running:
                x = outputs[name] = fn(x)
            if name == stop:
                break
        outputs["features"] = x
        outputs["pooled"] = self.pool(x)
        if stop is None:
            outputs["logits"] = self.get_submodule(self.classifier_path)(outputs["pooled"])
        return outputs

    def pool(self, x):
        return x.mean((2, 3))


def conv_norm(i, o, size, stride=1, *, groups=1, relu=None, **norm):
    """A sequence of convolution, batch norm and optionally `relu`."""
    conv = nn.Conv2d(i, o, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(o, **norm), *([relu] if relu else []))
