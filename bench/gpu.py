"""Whether there is a GPU to measure."""

from __future__ import annotations

import sys

NO_GPU = 2
"""Exit code of a benchmark that finds no GPU."""


def missing_gpu() -> str | None:
    """Why a benchmark cannot run here, or None."""
    try:
        import torch
    except ImportError:
        return "PyTorch is not installed; it times the kernels and holds the peers: pip install 'numbaflash[bench]'"
    if not torch.cuda.is_available():
        return "no CUDA GPU was found by PyTorch; this benchmark measures GPU kernels (bench.cpu measures the CPU)"
    return None


def refuse(reason: str) -> int:
    """Say why nothing is measured, and return the exit code for it."""
    print(f"{_program()}: {reason}", file=sys.stderr)
    return NO_GPU


def _program() -> str:
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec.name if spec and spec.name.startswith("bench.") else "bench"
