"""A small transformer server: what attention is worth to those who wait for tokens.

``model`` is a decoder with random weights, ``engines`` are the ways to compute its attention over a cache (numbaflash's and PyTorch's, and none at
all, which bounds what any attention could gain), ``loop`` serves requests as they arrive, and ``figures`` says what they saw. It needs PyTorch.
"""

from __future__ import annotations

from .engines import ENGINES
from .figures import Limits, summarise
from .loop import Load, Server, arrivals
from .model import Model, Shape

__all__ = ["ENGINES", "Limits", "Load", "Model", "Server", "Shape", "arrivals", "summarise"]
