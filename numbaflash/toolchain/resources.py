"""What ptxas and nvdisasm say about a kernel, without a GPU."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .compile import KernelRequest, Ptx, arch_name, compile_ptx


class ToolMissingError(RuntimeError):
    """ptxas or nvdisasm is not installed."""


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of a kernel as ptxas reports them.

    Attributes
    ----------
    registers : int
        Registers a thread at launch.
    stack_bytes, spill_stores, spill_loads : int
        Bytes a thread.
    shared_bytes : int
        Static shared memory a block.
    notes : tuple of str
        Every other remark of ptxas: "Potential Performance Loss", "setmaxnreg ignored" and warnings.
    """

    registers: int
    stack_bytes: int
    spill_stores: int
    spill_loads: int
    shared_bytes: int
    notes: tuple[str, ...] = ()


def kernel_report(main: KernelRequest, *others: KernelRequest) -> dict[str, Any]:
    """What `explain` shows of a plan's kernels, built if need be: registers of the main one, stack, spills and notes of all."""
    reports = [ptxas_report(compile_ptx(wanted), wanted.arch) for wanted in (main, *others)]
    return {
        "registers": reports[0].registers,
        "stack_bytes": max(report.stack_bytes for report in reports),
        "spill_bytes": sum(report.spill_stores + report.spill_loads for report in reports),
        "notes": tuple(note for report in reports for note in report.notes),
    }


_WHEELS = {"ptxas": "nvidia-cuda-nvcc", "nvdisasm": "nvidia-cuda-nvdisasm"}


@functools.cache
def find_tool(name: str) -> str:
    """Path of ptxas or nvdisasm: from NVIDIA's wheels, else CUDA_HOME, else PATH.

    Raises
    ------
    ToolMissingError
        Names the wheel to install.
    """
    file = name + (".exe" if os.name == "nt" else "")
    for base in sys.path:
        for path in sorted(Path(base or ".").glob(f"nvidia/*/bin/{file}"), reverse=True):
            if os.access(path, os.X_OK):
                return str(path)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        home = os.environ.get(variable)
        if home and os.access(Path(home) / "bin" / file, os.X_OK):
            return str(Path(home) / "bin" / file)
    found = shutil.which(name)
    if found is None:
        raise ToolMissingError(f"{name} was not found; pip install {_WHEELS.get(name, 'the CUDA toolkit')} (or set CUDA_HOME to a CUDA toolkit)")
    return found


@functools.lru_cache(maxsize=256)
def _assemble(text, arch):
    """(cubin, what ptxas printed)"""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
        source.write_text(text)
        command = [find_tool("ptxas"), "-v", f"-arch={arch_name(arch)}", str(source), "-o", str(target)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ptxas refused the PTX for {arch_name(arch)}:\n{(done.stderr or done.stdout).strip()[:4000]}")
        return target.read_bytes(), done.stderr + done.stdout


def ptxas_report(ptx: Ptx, arch) -> Resources:
    """Assemble a kernel and return its resources.

    Raises
    ------
    ToolMissingError
        When ptxas is not installed.
    RuntimeError
        When ptxas refuses the text; the message is its own.
    """
    return parse_report(_assemble(ptx.text, tuple(arch))[1], ptx.entry)


_ORDINARY = (
    r"\d+ bytes gmem",
    r"Compiling entry function",
    r"Function properties for",
    r"bytes stack frame",
    r"Used \d+ registers",
    r"Compile time =",
    r"^\s*$",
)


def parse_report(printed: str, entry: str) -> Resources:
    """Read what ``ptxas -v`` prints about one kernel."""
    part = printed.partition(f"Function properties for {entry}")[2]
    frame = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
    used = re.search(r"Used (\d+) registers.*", part)
    if frame is None or used is None:
        raise RuntimeError(f"cannot read the report of ptxas about {entry}:\n{printed[:4000]}")
    shared = re.search(r"(\d+) bytes smem", used[0])
    notes = [line.strip() for line in printed.splitlines() if not any(re.search(words, line) for words in _ORDINARY)]
    return Resources(int(used[1]), int(frame[1]), int(frame[2]), int(frame[3]), int(shared[1]) if shared else 0, tuple(dict.fromkeys(notes)))


def cubin(ptx: Ptx, arch) -> bytes:
    """The kernel as ptxas assembles it."""
    return _assemble(ptx.text, tuple(arch))[0]


def sass(ptx: Ptx, arch) -> str:
    """Machine instructions of a kernel, as nvdisasm prints them.

    Raises
    ------
    ToolMissingError
        When ptxas or nvdisasm is not installed.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin(ptx, arch))
        done = subprocess.run([find_tool("nvdisasm"), "-c", str(path)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"nvdisasm failed:\n{(done.stderr or done.stdout).strip()[:4000]}")
    return done.stdout


def count_opcodes(listing: str) -> Counter:
    """Instructions of a listing of `sass` by opcode without its modifiers ("HGMMA", "FFMA", ...)."""
    return Counter(re.findall(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", listing, re.M))


def loaded_resources(request: KernelRequest, device: int = 0) -> dict[str, int]:
    """What the driver says of a kernel that it has compiled: registers, local_bytes, shared_bytes, max_threads, ptx_version
    and binary_version. The kernel is loaded if it is not yet.

    Raises
    ------
    CompileError, CudaError
    """
    from .driver import load

    return load(request, device).attributes()
