"""Numba function to PTX to loaded kernel to launch: the only place that knows Numba-CUDA and the CUDA driver."""

from __future__ import annotations

from . import cache, log
from .compile import CompileError, KernelRequest, KernelSource, Ptx, compile_ptx
from .resources import Resources, ToolMissingError, count_opcodes, ptxas_report, sass

log.configure()

__all__ = [
    "CompileError",
    "KernelRequest",
    "KernelSource",
    "Ptx",
    "Resources",
    "ToolMissingError",
    "cache",
    "compile_ptx",
    "count_opcodes",
    "log",
    "ptxas_report",
    "sass",
]
