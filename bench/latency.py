"""What a call costs besides the kernel: host microseconds a call, the first call of a process, and peak memory.

``python -m bench.latency``; numbaflash from CuPy and from torch, and the peers of `bench.forward`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

from numbaflash.benchmarks import gpu, records, tables
from numbaflash.benchmarks.cells import Cell, inputs
from numbaflash.benchmarks.peers import NAMES, find, one_line
from numbaflash.benchmarks.progress import Progress
from numbaflash.benchmarks.timing import host_microseconds, quartiles

PROGRAM = "bench.latency"
SMALL = Cell("float16", 1, 128, 1, 1, 128, False)
FIRST = Cell("float16", 1, 1024, 16, 16, 128, True)
MEMORY = tuple(Cell("float16", 1, seqlen, 16, 16, 128, True) for seqlen in (2048, 8192))
SECTIONS = ("host", "first", "memory")
PROCESS_TIMEOUT_S = 180
YARDSTICKS = {"python": platform.python_version, "cupy": lambda: sys.modules["cupy"].__version__}
"""Versions of what `yardstick_calls` times."""


def torch_calls(libraries, cell):
    """(library, case, scope, call) of everything that is called with torch tensors."""
    import torch

    q, k, v = inputs(cell)
    for name, library in libraries.items():
        if name == "numbaflash":
            yield from _our_calls("torch", q, k, v, cell, lambda shape: torch.empty(shape, device="cuda", dtype=torch.float32), torch.empty_like(q))
        else:
            yield name, "torch, out allocated", library.scope, library.bind(q, k, v, cell.causal)


def cupy_calls(libraries, cell):
    """The same for CuPy arrays: numbaflash and dense attention."""
    import cupy

    q, k, v = cupy_inputs(cupy, cell)
    if "numbaflash" in libraries:
        yield from _our_calls("cupy", q, k, v, cell, lambda shape: cupy.empty(shape, dtype="float32"), cupy.empty_like(q))
    if "dense" in libraries:
        yield "dense", "cupy, out allocated", libraries["dense"].scope, lambda: dense_cupy(cupy, q, k, v, cell.causal)


def yardstick_calls(libraries, cell):
    """What says how fast the host is: a plain loop, and the launch of an empty kernel. Hosts differ by more than libraries do."""
    import cupy

    (q, *_), kernel = cupy_inputs(cupy, cell), cupy.RawKernel('extern "C" __global__ void empty(void* x) {}', "empty")
    yield "python", "sum of 1000 integers", nullcontext, lambda: sum(n for n in range(1000))
    yield "cupy", "RawKernel that does nothing", nullcontext, lambda: kernel((1,), (32,), (q,))


def _our_calls(arrays, q, k, v, cell, empty, out):
    import numbaflash

    forward, causal, scope = numbaflash.forward, cell.causal, nullcontext
    lse = empty(cell.problem.lse_shape)
    yield "numbaflash", f"{arrays}, out allocated", scope, lambda: forward(q, k, v, causal=causal)
    yield "numbaflash", f"{arrays}, out and lse allocated", scope, lambda: forward(q, k, v, causal=causal, return_lse=True)
    yield "numbaflash", f"{arrays}, out= and lse= given", scope, lambda: forward(q, k, v, causal=causal, return_lse=True, out=out, lse=lse)


def cupy_inputs(cupy, cell):
    shapes = [(cell.batch, cell.seqlen, heads, cell.head_dim) for heads in (cell.heads, cell.kv_heads, cell.kv_heads)]
    return [cupy.random.standard_normal(shape, dtype="float32").astype(cell.dtype) for shape in shapes]


def dense_cupy(cupy, q, k, v, causal):
    """Attention by its definition on CuPy arrays, equal heads."""
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = cupy.matmul(q, k.transpose(0, 1, 3, 2)) * q.dtype.type(q.shape[3] ** -0.5)
    if causal:
        seqlen_q, seqlen_k = scores.shape[2:]
        scores = cupy.where(cupy.tri(seqlen_q, seqlen_k, seqlen_k - seqlen_q, dtype=bool), scores, -cupy.inf).astype(q.dtype)
    scores -= scores.max(axis=-1, keepdims=True)
    cupy.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return cupy.matmul(scores, v).transpose(0, 2, 1, 3)


def first_call(library, arrays, cell, folder) -> dict:
    """Seconds of one new process, with its caches in a folder: what `bench.first_call` prints."""
    shape = ",".join(map(str, (cell.batch, cell.seqlen, cell.heads, cell.kv_heads, cell.head_dim)))
    command = [sys.executable, "-m", "bench.first_call", library, arrays, cell.dtype, shape, str(int(cell.causal))]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[1], env={**os.environ, **caches_in(folder)}, capture_output=True, text=True, timeout=PROCESS_TIMEOUT_S
    )
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return json.loads(done.stdout.splitlines()[-1])


def caches_in(folder) -> dict[str, str]:
    """Environment that moves every kernel cache into a folder: numbaflash's, the driver's, CuPy's, FA4's."""
    names = {
        "NUMBAFLASH_CACHE_DIR": "numbaflash",
        "CUDA_CACHE_PATH": "driver",
        "CUPY_CACHE_DIR": "cupy",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "fa4",
    }
    return {**{name: str(Path(folder, sub)) for name, sub in names.items()}, "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1"}


class TorchMemory:
    """Bytes that a call takes at its peak: inside torch's allocator, and on the device outside it."""

    def __init__(self):
        import torch

        self._cuda = torch.cuda

    def peak(self, call) -> tuple[int, int]:
        cuda = self._cuda
        cuda.synchronize()
        cuda.empty_cache()
        cuda.reset_peak_memory_stats()
        allocated, reserved, free = cuda.memory_allocated(), cuda.memory_reserved(), cuda.mem_get_info()[0]
        result = call()
        cuda.synchronize()
        grown = cuda.memory_reserved() - reserved
        outside = free - cuda.mem_get_info()[0] - grown
        del result
        return cuda.max_memory_allocated() - allocated, outside


class CupyMemory:
    """The same for CuPy's memory pool, which only grows while a call runs."""

    def __init__(self):
        import cupy

        self._cupy = cupy

    def peak(self, call) -> tuple[int, int]:
        cupy = self._cupy
        pool, runtime = cupy.get_default_memory_pool(), cupy.cuda.runtime
        runtime.deviceSynchronize()
        pool.free_all_blocks()
        total, free = pool.total_bytes(), runtime.memGetInfo()[0]
        result = call()
        runtime.deviceSynchronize()
        grown = pool.total_bytes() - total
        outside = free - runtime.memGetInfo()[0] - grown
        del result
        return grown, outside


class Quantities:
    """Gathers records of quantities that are no device time; what fails is noted and left out."""

    bench, direction = "latency", "forward"

    def __init__(self, libraries, common, note):
        self.libraries, self.common, self.note = libraries, common, note
        self.records = []

    def record(self, cell, library, case, quantity, values, unit, direction=None):
        q1, value, q3 = quartiles(values)
        milliseconds = {"us": 1e-3, "s": 1e3}.get(unit)
        self.records.append(
            records.check(
                {
                    "bench": self.bench,
                    "direction": direction or self.direction,
                    **cell.fields(),
                    "library": library,
                    "version": self.libraries[library].version if library in self.libraries else YARDSTICKS[library](),
                    "ms": None if milliseconds is None else value * milliseconds,
                    "tflops": None,
                    "quantity": quantity,
                    "case": case,
                    "value": value,
                    "q1": q1,
                    "q3": q3,
                    "unit": unit,
                    "samples": len(values),
                    **self.common,
                }
            )
        )

    def guarded(self, what, work):
        try:
            work()
        except Exception as error:  # the other measurements still count
            self.note(f"{what} left out: {one_line(error)}")


class Latency(Quantities):
    """The sections of `bench.latency`."""

    def host(self):
        def one(source):
            import torch

            for name, case, scope, call in source(self.libraries, SMALL):

                def work(name=name, case=case, scope=scope, call=call):
                    with scope():
                        self.record(SMALL, name, case, "host time a call", host_microseconds(call, torch.cuda.synchronize), "us")

                self.guarded(f"host time of {name} ({case})", work)

        for source in (yardstick_calls, cupy_calls, torch_calls):
            self.guarded(source.__name__.replace("_", " "), lambda source=source: one(source))

    def first(self, repeats, progress):
        """First calls in new processes: with empty caches, then with the caches that those left behind."""
        for name in self.libraries:
            for arrays in ("torch", "cupy") if name == "numbaflash" else ("torch",):
                progress.step(f"first call of {name} from {arrays}")
                self.guarded(f"first call of {name} from {arrays}", lambda name=name, arrays=arrays: self._first(name, arrays, repeats))

    def _first(self, name, arrays, repeats):
        runs = {"cold": [], "cached": []}
        for _ in range(repeats):
            with tempfile.TemporaryDirectory(prefix="numbaflash-bench-") as folder:
                for kind in runs:
                    runs[kind].append(first_call(name, arrays, FIRST, folder))
        for kind, seconds in runs.items():
            for what in ("first call", "second call"):
                self.record(FIRST, name, f"{arrays}, {kind}", f"{what} of a process", [s[what] for s in seconds], "s")
        imports = [s[f"import {name}"] for s in runs["cached"] if f"import {name}" in s]
        if imports and arrays == "torch":
            self.record(FIRST, name, "after numba" if name == "numbaflash" else "after torch", "import", imports, "s")

    def memory(self):
        self.guarded("memory with torch", self._memory_torch)
        self.guarded("memory with cupy", self._memory_cupy)

    def _memory_torch(self):
        meter = TorchMemory()
        for cell in MEMORY:
            q, k, v = inputs(cell)
            for name, library in self.libraries.items():

                def work(name=name, library=library, cell=cell, operands=(q, k, v)):
                    with library.scope():
                        call = library.bind(*operands, cell.causal)
                        self._peak(meter, cell, name, "torch", call)

                self.guarded(f"memory of {name} (torch)", work)

    def _memory_cupy(self):
        import cupy

        import numbaflash

        meter = CupyMemory()
        for cell in MEMORY:
            q, k, v = cupy_inputs(cupy, cell)
            calls = {
                "numbaflash": lambda q=q, k=k, v=v, cell=cell: numbaflash.forward(q, k, v, causal=cell.causal),
                "dense": lambda q=q, k=k, v=v, cell=cell: dense_cupy(cupy, q, k, v, cell.causal),
            }
            for name, call in calls.items():
                if name in self.libraries:
                    self.guarded(f"memory of {name} (cupy)", lambda name=name, call=call, cell=cell: self._peak(meter, cell, name, "cupy", call))

    def _peak(self, meter, cell, name, arrays, call):
        call()  # modules and handles are loaded
        inside, outside = meter.peak(call)
        case = f"{arrays}, {cell.heads} heads, S {cell.seqlen}"
        self.record(cell, name, case, "peak memory of a call, output included", [inside / 2**20], "MiB")
        self.record(cell, name, case, "device memory outside the allocator", [outside / 2**20], "MiB")


def parse(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections to run (%(default)s)")
    parser.add_argument("--libraries", default=",".join(NAMES), help="(%(default)s)")
    parser.add_argument("--repeats", type=int, default=3, help="new processes of each kind for the first call (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder of the results (bench/results)")
    parser.add_argument("--commit", help="commit to write in the records where this is no git checkout")
    options = parser.parse_args(arguments)
    for name, allowed in (("only", SECTIONS), ("libraries", NAMES)):
        words = [word.strip() for word in getattr(options, name).split(",") if word.strip()]
        unknown = [word for word in words if word not in allowed]
        if unknown or not words:
            parser.error(f"--{name} takes {', '.join(allowed)}; got {unknown[0] if unknown else ''!r}")
        setattr(options, name, words)
    if options.repeats < 1:
        parser.error(f"--repeats must be at least 1; got {options.repeats}")
    return options


def main(arguments=None) -> int:
    options = parse(arguments)
    reason = gpu.missing()
    if reason:
        return gpu.refuse(PROGRAM, reason)
    import torch

    libraries, missing = find(options.libraries)
    common = {**records.gpu_fields(), **records.run_fields(options.commit)}
    path = records.result_path(common["gpu"], "latency", options.out)
    starts = len(libraries) + ("numbaflash" in libraries)
    progress = Progress(len(options.only) - ("first" in options.only) + starts * ("first" in options.only), "latency")
    for name, why in missing.items():
        progress.note(f"{name} is not measured: {why}")
    run = Latency(libraries, common, progress.note)
    try:
        with torch.no_grad():
            if "host" in options.only:
                run.host()
                progress.step("host time")
            if "memory" in options.only:
                run.memory()
                progress.step("memory")
            if "first" in options.only:
                run.first(options.repeats, progress)
    finally:
        progress.close()
        if run.records:
            records.write(path, run.records)
    if not run.records:
        return gpu.refuse(PROGRAM, "nothing could be measured")
    print(tables.latency_table(run.records))
    print(f"\n{path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
