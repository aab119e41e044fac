"""The processor that Numba compiles for, NUMBA_CPU_NAME and NUMBA_CPU_FEATURES included."""

from __future__ import annotations

import functools
import platform


@functools.cache
def features() -> frozenset[str]:
    """LLVM's names of the features that may be used."""
    from numba.core.registry import cpu_target

    _, _, names = cpu_target.target_context.codegen().magic_tuple()
    return frozenset(name[1:] for name in names.split(",") if name.startswith("+"))


def is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64", "i386", "i686", "x86")


def vector_bytes() -> int:
    """Bytes of a vector register: 64, 32 or 16."""
    if "avx512f" in features():
        return 64
    return 32 if "avx" in features() else 16


def vector_registers() -> int:
    """Vector registers that a kernel can name."""
    return 32 if "avx512f" in features() or not is_x86() else 16


def has_fma() -> bool:
    """Whether a multiply-add is one instruction. Where it is not, LLVM would call the C library for each."""
    return "fma" in features() or not is_x86()


def has_half() -> bool:
    """Whether float16 is converted by instructions. Where it is not, LLVM would call functions that Numba does not link."""
    return "f16c" in features() or platform.machine().lower() in ("aarch64", "arm64")
