"""Numba function to PTX to loaded kernel to launch: the only place that knows Numba-CUDA and the CUDA driver."""

from __future__ import annotations

from . import cache, log
from .compile import CompileError, KernelRequest, KernelSource, Ptx, compile_ptx
from .driver import CudaError, device, device_count, device_of_address, driver_version, unavailable_reason
from .launch import Array, Launch, Pointer, Scalar, TensorMap, prepare
from .resources import Resources, ToolMissingError, count_opcodes, kernel_report, loaded_resources, ptxas_report, sass

log.configure()

__all__ = [
    "Array",
    "CompileError",
    "CudaError",
    "KernelRequest",
    "KernelSource",
    "Launch",
    "Pointer",
    "Ptx",
    "Resources",
    "Scalar",
    "TensorMap",
    "ToolMissingError",
    "cache",
    "compile_ptx",
    "count_opcodes",
    "device",
    "device_count",
    "device_of_address",
    "driver_version",
    "kernel_report",
    "loaded_resources",
    "log",
    "prepare",
    "ptxas_report",
    "sass",
    "unavailable_reason",
]
