"""What is on this machine: versions, threads, GPUs, compilers, caches.

Each probe stands alone: one that fails, hangs or kills its process says so in its line, and the others go on. What could
do that (Numba's compilers, the CUDA driver, other people's frameworks) runs in a child process, so that `env` loads
nothing into the caller's.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ._version import __version__

TIMEOUT = 120.0
"""Seconds after which a probe in a child process is ended."""

_PACKAGES = ("numpy", "numba", "llvmlite", "numba-cuda", "cuda-bindings", "cuda-core", "cuda-toolkit", "ml_dtypes")
_FRAMEWORKS = {"cupy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"), "torch": ("torch",), "jax": ("jax",)}
_VARIABLES = ("NUMBAFLASH_", "NUMBA_", "CUDA_", "OMP_", "OPENBLAS_", "MKL_NUM", "XDG_CACHE_HOME", "JAX_PLATFORMS", "XLA_FLAGS")


@dataclass(frozen=True, slots=True)
class Probe:
    """One finding.

    Attributes
    ----------
    name : str
    value : str, number, list or dict
        None when the probe failed.
    error : str or None
        Why it failed.
    seconds : float
        What it took.
    """

    name: str
    value: Any
    error: str | None
    seconds: float

    def __str__(self):
        if self.error is not None:
            text = f"failed: {self.error}"
        elif isinstance(self.value, dict):
            text = ", ".join(f"{key} {value}" for key, value in self.value.items()) or "none"
        elif isinstance(self.value, list):
            text = "; ".join(map(str, self.value)) or "none"
        else:
            text = str(self.value)
        slow = f"  [{self.seconds:.1f} s]" if self.seconds >= 0.1 else ""
        return f"{self.name:18} {text}{slow}"


@dataclass(frozen=True, slots=True)
class Environment:
    """Every probe, in order. ``print(numbaflash.env())`` shows one a line."""

    probes: tuple[Probe, ...]

    def __getitem__(self, name: str) -> Probe:
        for probe in self.probes:
            if probe.name == name:
                return probe
        raise KeyError(name)

    def __str__(self):
        return "\n".join(map(str, self.probes))

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Values, errors and seconds by probe, ready for JSON."""
        return {p.name: {"value": p.value, "error": p.error, "seconds": round(p.seconds, 3)} for p in self.probes}


def env(*, import_frameworks: bool = False) -> Environment:
    """Look at this machine.

    Parameters
    ----------
    import_frameworks : bool
        Also import CuPy, PyTorch and JAX, where installed, in child processes, and ask them for their GPUs.

    Returns
    -------
    Environment
    """
    probes: list[tuple[str, Callable[[], Any]]] = [
        ("numbaflash", lambda: f"{__version__} in {Path(__file__).resolve().parent}"),
        ("python", lambda: f"{platform.python_implementation()} {platform.python_version()} ({sys.executable})"),
        ("system", lambda: f"{platform.platform()}, {_cores()} usable cores"),
    ]
    probes += [(name, lambda name=name: importlib.metadata.version(name)) for name in _PACKAGES]
    probes += [(name, lambda dists=dists: _first_version(dists)) for name, dists in _FRAMEWORKS.items()]
    probes += [
        ("variables", lambda: {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)}),
        ("cache folder", _cache_folder),
        ("tuned tables", _tuned_tables),
    ]
    children = ["cpu compiler", "gpu compiler", "ptxas", "cuda driver", "gpus"]
    if import_frameworks:
        children += [f"import {name}" for name in _FRAMEWORKS if importlib.util.find_spec(name)]
    probes += [(name, lambda name=name: _in_child(name)) for name in children]
    with ThreadPoolExecutor(max_workers=max(2, min(4, _cores()))) as pool:
        return Environment(tuple(pool.map(lambda probe: _guarded(*probe), probes)))


def _guarded(name: str, probe: Callable[[], Any]) -> Probe:
    start = time.perf_counter()
    try:
        value, error = probe(), None
    except importlib.metadata.PackageNotFoundError:
        value, error = "not installed", None
    except Exception as problem:
        value, error = None, _describe(problem)
    return Probe(name, value, error, time.perf_counter() - start)


def _describe(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, ProbeError):
        return text
    name = type(error).__name__
    return f"{name}: {text}"[:500] if text else name


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _first_version(distributions) -> str:
    for name in distributions:
        try:
            return f"{importlib.metadata.version(name)} ({name})"
        except importlib.metadata.PackageNotFoundError:
            continue
    raise importlib.metadata.PackageNotFoundError(distributions[0])


def _cache_folder() -> str:
    from .toolchain import cache

    folder = cache.directory()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        return f"{folder}, not writable ({error.strerror}): kernels are kept in memory only"
    return f"{folder}, writable, {len(cache.entries())} kernels"


def _tuned_tables() -> str:
    from .tuned import store

    folder = store.directory()
    found = [f"{path.name} ({len(store.read(path))} choices)" for path in sorted(folder.glob("*.json"))]
    off = "; NUMBAFLASH_TUNE=0, so none is used" if store.is_off() else ""
    return f"{folder}: {', '.join(found) or 'none'}{off}"


def _in_child(name: str) -> Any:
    """Run a probe of `_CHILD_PROBES` in a process of its own, with this process's import path."""
    code = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from numbaflash.environment import _child_main; _child_main(sys.argv[2])"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps(sys.path), name], capture_output=True, text=True, timeout=TIMEOUT, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"no answer within {TIMEOUT:.0f} s") from None
    lines = done.stdout.splitlines()
    if done.returncode < 0 or not lines:
        last = done.stderr.strip().splitlines()[-1:] or ["no message"]
        raise RuntimeError(f"the probe's process ended with status {done.returncode}: {last[0]}")
    answer = json.loads(lines[-1])
    if answer["error"] is not None:
        raise ProbeError(answer["error"])
    return answer["value"]


class ProbeError(RuntimeError):
    """A probe failed in its child process; the message is that error's type and text."""


def _child_main(name: str) -> None:
    try:
        answer = {"value": _CHILD_PROBES[name](), "error": None}
    except BaseException as error:
        answer = {"value": None, "error": _describe(error)}
    print(json.dumps(answer), flush=True)
    os._exit(0)  # a broken driver or framework may hang in its own shutdown


def _cpu_compiler() -> str:
    import numba
    import numpy as np

    @numba.njit(parallel=True)
    def double(x):
        for i in numba.prange(x.size):
            x[i] *= 2.0

    x = np.ones(64)
    double(x)
    if not (x == 2.0).all():
        raise RuntimeError("a parallel loop computed a wrong result")
    import llvmlite.binding

    return f"threading layer {numba.threading_layer()}, {numba.get_num_threads()} threads, CPU {llvmlite.binding.get_host_cpu_name()}"


def _gpu_compiler() -> str:
    from .toolchain import KernelRequest
    from .toolchain.compile import build

    start = time.perf_counter()
    ptx = build(KernelRequest(f"{__name__}:_empty_kernel", None, (8, 0)))
    version = next(line for line in ptx.text.splitlines() if line.startswith(".version"))
    return f"PTX {version.split()[1]} for sm_80 in {time.perf_counter() - start:.1f} s"


def _empty_kernel(config):
    from numba import types

    from .toolchain import KernelSource

    def kernel(n):
        return

    return KernelSource(kernel, types.void(types.int32), threads=32)


def _ptxas() -> str:
    from .toolchain.resources import find_tool

    path = find_tool("ptxas")
    printed = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30).stdout
    release = next((line.strip() for line in printed.splitlines() if "release" in line), "version unknown")
    return f"{release} ({path})"


def _cuda_driver() -> str:
    from .toolchain import CudaError, driver_version

    try:
        return f"supports CUDA {driver_version()}"
    except CudaError as error:
        return f"none usable: {error}"


def _gpus() -> list[str]:
    from .toolchain import device, device_count

    found = [device(index) for index in range(device_count())]
    return [f"cuda:{d.index} {d.name}, sm_{d.capability[0]}{d.capability[1]}, {d.sm_count} multiprocessors" for d in found]


def _import_cupy():
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    return {"version": cupy.__version__, "CUDA runtime": cupy.cuda.runtime.runtimeGetVersion(), "GPUs": count}


def _import_torch():
    import torch

    return {"version": torch.__version__, "CUDA": torch.version.cuda, "GPUs": torch.cuda.device_count()}


def _import_jax():
    import jax

    return {"version": jax.__version__, "devices": [str(device) for device in jax.devices()]}


_CHILD_PROBES = {
    "cpu compiler": _cpu_compiler,
    "gpu compiler": _gpu_compiler,
    "ptxas": _ptxas,
    "cuda driver": _cuda_driver,
    "gpus": _gpus,
    "import cupy": _import_cupy,
    "import torch": _import_torch,
    "import jax": _import_jax,
}
