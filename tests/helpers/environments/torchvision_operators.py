"""Lets torchvision be imported beside a PyTorch without CUDA.

The package index has it built for CUDA only. Its operators do not load then, and its import ends at
the first of them that it describes. timm and torchmetrics import torchvision for other things;
for them operators that do nothing are enough. Import this before those.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import torch

_DESCRIBED = re.compile(r'register_fake\("(torchvision::\w+)"\)')


def _declare() -> None:
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None or torch.version.cuda is not None:
        return
    description = Path(found.origin).with_name("_meta_registrations.py")
    for name in dict.fromkeys(_DESCRIBED.findall(description.read_text(encoding="utf-8"))):
        torch.library.define(name, "() -> ()")


_declare()
