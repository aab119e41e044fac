"""Exact attention (FlashAttention) with GPU kernels written in Numba-CUDA, for every array library."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ._version import __version__

if TYPE_CHECKING:
    from .api import backward, explain, forward, merge
    from .block_mask import BlockMask
    from .caches import append_kv
    from .decoding import DecodePlan, cascade, decode, plan_decode
    from .differentiable import attention
    from .environment import env
    from .explanation import Explanation
    from .plotting import plot_mask
    from .problem import UnsupportedError
    from .recording import record
    from .toolchain.warmup import warmup
    from .varlen import attention_varlen, backward_varlen, forward_varlen

__all__ = [
    "BlockMask",
    "DecodePlan",
    "Explanation",
    "UnsupportedError",
    "__version__",
    "append_kv",
    "attention",
    "attention_varlen",
    "backward",
    "backward_varlen",
    "cascade",
    "decode",
    "env",
    "explain",
    "forward",
    "forward_varlen",
    "merge",
    "plan_decode",
    "plot_mask",
    "record",
    "warmup",
]

_HOME = {
    "BlockMask": "block_mask",
    "DecodePlan": "decoding",
    "Explanation": "explanation",
    "UnsupportedError": "problem",
    "append_kv": "caches",
    "attention": "differentiable",
    "attention_varlen": "varlen",
    "backward": "api",
    "backward_varlen": "varlen",
    "cascade": "decoding",
    "decode": "decoding",
    "env": "environment",
    "explain": "api",
    "forward": "api",
    "forward_varlen": "varlen",
    "merge": "api",
    "plan_decode": "decoding",
    "plot_mask": "plotting",
    "record": "recording",
    "warmup": "toolchain.warmup",
}


def __getattr__(name):
    """Public names are imported when first used, so that importing the package costs nothing."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(set(globals()) | set(__all__))
