"""The simt family in float32 beside CuPy's dense attention: ``python -m bench.simt``.

Everything is called with CuPy arrays; torch is not needed. After the grid, one long sequence shows time and memory where the
scores of dense attention would not fit. ``--direction backward`` measures the gradients: those of dense attention are written by
hand, from probabilities that its forward has kept. ``--tiles`` times every tile of the family's tables instead, to choose among
them.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from numbaflash.benchmarks import records, tables, timing
from numbaflash.benchmarks.accuracy import ROWS, WRONG
from numbaflash.benchmarks.cells import Cell, backward_flops, grid
from numbaflash.benchmarks.gpu import refuse
from numbaflash.benchmarks.peers import Dense, one_line
from numbaflash.benchmarks.progress import Progress, colour_wanted
from numbaflash.dispatch import BackwardLayouts, Layout, Layouts
from numbaflash.testing import accuracy as rule

from .cpu import DIRECTIONS
from .latency import CupyMemory, dense_cupy

PROGRAM = "bench.simt"
MASKS = {"full": False, "causal": True}
LONG_WIDTH = 2048  # heads * head dim of the long sequence


def parse(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__.split("\n\n")[0])
    parser.add_argument("--dims", type=_numbers, default=[64, 128], help="head dims (64,128)")
    parser.add_argument("--seqlens", type=_numbers, default=[1024, 2048, 4096, 8192, 16384], help="sequence lengths (1024 to 16384)")
    parser.add_argument("--tokens", type=int, default=16384, help="batch * seqlen (%(default)s)")
    parser.add_argument("--causal", type=_masks, default=[False, True], help="of full, causal (both)")
    parser.add_argument("--long", type=int, default=65536, help="length of the long sequence, 0 for none (%(default)s)")
    parser.add_argument("--direction", choices=DIRECTIONS, default="forward", help="what is measured (%(default)s)")
    parser.add_argument("--deterministic", action="store_true", help="backward: time deterministic gradients, too, as if they were a peer")
    parser.add_argument("--tiles", action="store_true", help="time every tile that fits instead of dense attention")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each (%(default)s)")
    parser.add_argument("--budget", type=float, default=180.0, help="seconds for the whole run (%(default)s); no cell is dropped")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder of the results (bench/results)")
    parser.add_argument("--commit", help="commit to write in the records where this is no git checkout")
    options = parser.parse_args(arguments)
    options.cells = grid(dtypes=["float32"], dims=options.dims, seqlens=options.seqlens, causal=options.causal, heads=["mha"], tokens=options.tokens)
    return options


def _numbers(text):
    numbers = [int(word) for word in text.split(",") if word.strip()]
    if not numbers or min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"expected whole numbers above 0; got {text!r}")
    return numbers


def _masks(text):
    words = [word.strip() for word in text.split(",")]
    if not set(words) <= set(MASKS):
        raise argparse.ArgumentTypeError(f"expected some of {', '.join(MASKS)}; got {text!r}")
    return [MASKS[word] for word in words]


def missing() -> str | None:
    """Why nothing can be measured here, or None."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed; dense attention and the arrays are CuPy's: pip install 'numbaflash[cu13]'"
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return f"no CUDA GPU: {error}"
    return None


class Clock:
    """What `timing.measure` needs of the current CuPy device."""

    def __init__(self, cupy):
        self._cupy = cupy
        source = 'extern "C" __global__ void spin(long long cycles) { long long start = clock64(); while (clock64() - start < cycles) ; }'
        self._kernel = cupy.RawKernel(source, "spin")
        device = cupy.cuda.Device()
        self._cycles_per_ms = device.attributes["ClockRate"]
        self.l2_bytes = device.attributes["L2CacheSize"]

    def event(self):
        return _Event(self._cupy)

    def spin(self, ms):
        self._kernel((1,), (1,), (np.int64(ms * self._cycles_per_ms),))


class _Event:
    def __init__(self, cupy):
        self._cuda, self._event = cupy.cuda, cupy.cuda.Event()

    def record(self):
        self._event.record()

    def query(self):
        return self._event.done

    def synchronize(self):
        self._event.synchronize()

    def elapsed_time(self, end):
        return self._cuda.get_elapsed_time(self._event, end._event)


class Forward:
    """Attention: what is called, how it is checked."""

    bench = "simt"
    copies_of_scores = 3  # the product and the scaled scores; causal, one more

    @staticmethod
    def flops(cell) -> int:
        return cell.flops

    @staticmethod
    def inputs(cell, normal) -> list:
        """q, k, v."""
        return [normal(_shape(cell)) for _ in range(3)]

    @staticmethod
    def kept(cell, name) -> int:
        """Bytes beside the inputs that a call finds in memory."""
        return 0

    def contestants(self, options, cell) -> dict:
        """Functions of (cell, q, k, v) that return a call, by the name of the library or the tile."""
        from numbaflash.kernels.simt import config as tuning

        if options.tiles:
            tiles = tuning.fitting_tiles("float32", cell.head_dim, cell.head_dim, _shared_limit())
            named = {f"{t.warps}w{t.lanes_m}x{32 // t.lanes_m}:{t.rows}x{t.columns}": functools.partial(self.of_tile, t) for t in tiles}
            return {tables.OURS: self.ours} | named
        return {tables.OURS: self.ours, "dense": self.dense}

    @staticmethod
    def ours(cell, q, k, v):
        import numbaflash

        return lambda: numbaflash.forward(q, k, v, causal=cell.causal)

    @staticmethod
    def dense(cell, q, k, v):
        import cupy

        return lambda: dense_cupy(cupy, q, k, v, cell.causal)

    @staticmethod
    def of_tile(tile, cell, q, k, v):
        """The kernel with a tile of ours, launched on the current stream."""
        import cupy

        from numbaflash import toolchain
        from numbaflash.kernels import simt
        from numbaflash.kernels.simt import config as tuning

        device = toolchain.device(cupy.cuda.Device().id)
        out = cupy.empty_like(q)
        layouts = Layouts(*map(_layout, (q, k, v, out)))
        config = tuning.config_of_tile(tile, cell.problem, layouts, device)
        blocks = cell.batch * cell.heads * -(-cell.seqlen // config.q_tile)
        plan = simt.plan(cell.problem, layouts, device)
        launch = simt.prepare(replace(plan, config=config, grid=(blocks,), threads=config.threads, shared_bytes=config.shared_bytes))
        stream = cupy.cuda.get_current_stream().ptr

        def call():
            launch(q.data.ptr, k.data.ptr, v.data.ptr, out.data.ptr, 0, stream)
            return out

        return call

    @staticmethod
    def judge(cell, arrays, bind, call) -> tuple[float, str | None]:
        """Largest error of sampled rows of the first heads in units of the tolerance, and what is wrong, or None."""
        import cupy

        out, error = call(), 0.0
        for part, problem in _samples(cell):
            q, k, v = (cupy.asnumpy(x[-1:, :, : problem.heads]) for x in arrays)
            try:
                error = max(error, rule.compare(rule.expected(problem, q[:, part], k, v), cupy.asnumpy(out[-1:, part, : problem.heads])).out)
            except rule.AccuracyError as wrong:
                return float("inf"), f"{WRONG}: {wrong}"
        return error, None


class Backward:
    """Gradients: what is called, how it is checked."""

    bench = "simt-backward"
    copies_of_scores = 3  # probabilities, their gradient; while the probabilities are made, one more

    @staticmethod
    def flops(cell) -> int:
        return backward_flops(cell.problem)

    @staticmethod
    def inputs(cell, normal) -> list:
        """dout, q, k, v, out and lse."""
        import numbaflash

        dout, q, k, v = (normal(_shape(cell)) for _ in range(4))
        return [dout, q, k, v, *numbaflash.forward(q, k, v, causal=cell.causal, return_lse=True)]

    @staticmethod
    def kept(cell, name) -> int:
        """Bytes beside q, k, v and out that the forward has kept for a call: the LSE, or the probabilities."""
        rows = cell.batch * cell.heads * cell.seqlen
        return 4 * rows * (cell.seqlen if name == "dense" else 1)

    def contestants(self, options, cell) -> dict:
        """Functions of (cell, dout, q, k, v, out, lse) that return a call, by the name of the library or the tile."""
        from numbaflash.kernels.simt.backward import config as tuning

        if options.tiles:
            tiles = tuning.fitting_tiles("float32", cell.head_dim, cell.head_dim, _shared_limit())
            return {tables.OURS: self.ours} | {f"{t.warps}w:{t.q_tile}x{t.kv_tile}": functools.partial(self.of_tile, t) for t in tiles}
        named = {tables.OURS: self.ours, "dense": self.dense}
        return named | {"deterministic": functools.partial(self.ours, deterministic=True)} if options.deterministic else named

    @staticmethod
    def ours(cell, dout, q, k, v, out, lse, deterministic=False):
        import numbaflash

        return lambda: numbaflash.backward(dout, q, k, v, out, lse, causal=cell.causal, deterministic=deterministic)

    @staticmethod
    def dense(cell, dout, q, k, v, out, lse):
        """From the probabilities that the forward has kept, four matrix products and three passes over an array of their size."""
        import cupy

        dout, q, k, v, out = (x.transpose(0, 2, 1, 3) for x in (dout, q, k, v, out))
        scale = np.float32(cell.head_dim**-0.5)
        p = cupy.matmul(q, k.transpose(0, 1, 3, 2))
        p *= scale
        p -= lse[..., None]
        cupy.exp(p, out=p)
        if cell.causal:
            p *= cupy.tri(cell.seqlen, dtype="float32")

        def call():
            dv = cupy.matmul(p.transpose(0, 1, 3, 2), dout)
            ds = cupy.matmul(dout, v.transpose(0, 1, 3, 2))
            ds -= (dout * out).sum(axis=-1, keepdims=True)
            ds *= p
            dq, dk = cupy.matmul(ds, k), cupy.matmul(ds.transpose(0, 1, 3, 2), q)
            dq *= scale
            dk *= scale
            return tuple(x.transpose(0, 2, 1, 3) for x in (dq, dk, dv))

        return call

    @staticmethod
    def of_tile(tile, cell, dout, q, k, v, out, lse):
        """The kernels with a tile of ours, launched on the current stream."""
        import cupy

        from numbaflash import toolchain
        from numbaflash.kernels.simt import backward
        from numbaflash.kernels.simt.backward.config import config_of_tile

        device = toolchain.device(cupy.cuda.Device().id)
        gradients = tuple(cupy.empty_like(x) for x in (q, k, v))
        layouts = BackwardLayouts(*map(_layout, (dout, q, k, v, out, lse)), None, *map(_layout, gradients))
        plan = backward.plan_of_config(cell.problem, layouts, device, config_of_tile(tile, cell.problem, layouts, device, False))
        launch = backward.prepare(plan)
        workspace = cupy.empty(max(1, plan.workspace_bytes), "uint8")
        addresses = (*(x.data.ptr for x in (dout, q, k, v, out, lse)), 0, *(x.data.ptr for x in (*gradients, workspace)))
        stream = cupy.cuda.get_current_stream().ptr

        def call():
            launch(addresses, stream)
            return gradients

        return call

    @staticmethod
    def judge(cell, arrays, bind, call) -> tuple[float, str | None]:
        """The same for gradients, of calls whose dout is 0 but in the sampled rows; dk and dv then depend on those rows alone."""
        import cupy

        dout, *others = arrays
        error, free = 0.0, cupy.get_default_memory_pool().free_all_blocks
        for part, problem in _samples(cell):
            sparse = cupy.zeros_like(dout)
            sparse[:, part] = dout[:, part]
            dq, dk, dv = (cupy.asnumpy(x[-1:, :, : problem.heads]) for x in bind(cell, sparse, *others)())
            free()
            given = [cupy.asnumpy(x[-1:, :, : problem.heads]) for x in (dout, *others[:3])]
            known = rule.expected_gradients(problem, given[0][:, part], given[1][:, part], *given[2:])
            try:
                found = rule.compare_gradients(known, dq[:, part], dk, dv)
            except rule.AccuracyError as wrong:
                return float("inf"), f"{WRONG}: {wrong}"
            error = max(error, found.dq, found.dk, found.dv)
        return error, None


MEASURED = {"forward": Forward, "backward": Backward}


def _shape(cell):
    return cell.batch, cell.seqlen, cell.heads, cell.head_dim


def _layout(array):
    return Layout(array.shape, array.strides, 16)


def _shared_limit():
    from numbaflash import toolchain
    from numbaflash.kernels.simt.config import shared_limit

    return shared_limit(toolchain.device(0))


def _samples(cell):
    """(rows, problem of those rows of up to 4 heads): the first, the middle and the last rows."""
    heads, rows = min(cell.heads, 4), min(ROWS, cell.seqlen)
    for start in sorted({0, (cell.seqlen - rows) // 2, cell.seqlen - rows}):
        offset = start if cell.causal else 0
        yield slice(start, start + rows), replace(cell.problem, batch=1, seqlen_q=rows, heads=heads, kv_heads=heads, offset=offset)


class Run:
    """Measures cells and gathers the records."""

    def __init__(self, options, common):
        import cupy

        self.options, self.common, self.cupy = options, common, cupy
        self.measured = MEASURED[options.direction]()
        self.clock, self.memory = Clock(cupy), CupyMemory()
        self.random = cupy.random.default_rng(options.seed)
        self.records = []

    def normal(self, shape):
        return self.random.standard_normal(shape, dtype="float32")

    def cell(self, cell, target_ms, note):
        """Check, time and weigh everything on a cell; returns how many were timed and the seconds that took."""
        measured = self.measured
        sets = [measured.inputs(cell, self.normal) for _ in range(timing.input_sets(cell.input_bytes, self.clock.l2_bytes))]
        calls, facts = {}, {}
        for name, bind in measured.contestants(self.options, cell).items():
            self.cupy.get_default_memory_pool().free_all_blocks()
            reason = CupyDense(measured).unfit(cell, self.cupy.cuda.runtime.memGetInfo()[0]) if name == "dense" else None
            try:
                if reason is None:
                    bound = [bind(cell, *arrays) for arrays in sets]
                    error, reason = measured.judge(cell, sets[0], bind, bound[0])
            except Exception as caught:  # the others are still measured
                reason = one_line(caught)
            if reason is not None:
                self.record(cell, name, {"ms": None, "tflops": None, "skipped": reason})
                note(f"{cell}: {name} left out: {reason}")
                continue
            facts[name] = {"error_per_tolerance": error, "peak_bytes": self.memory.peak(bound[0])[0], "kept_bytes": measured.kept(cell, name)}
            facts[name]["input_sets"] = len(sets)
            calls[name] = functools.partial(_next, itertools.cycle(bound))
        start = time.monotonic()
        for name, times in timing.measure(self.clock, calls, rounds=self.options.rounds, target_ms=target_ms).items():
            numbers = times.summary()
            self.record(cell, name, {**numbers, "tflops": measured.flops(cell) / numbers["ms"] / 1e9, **facts[name]})
        return len(calls), time.monotonic() - start

    def record(self, cell, name, more):
        import numbaflash

        version = f"cupy {self.cupy.__version__}" if name == "dense" else numbaflash.__version__
        base = {"bench": "simt", "direction": self.options.direction, **cell.fields(), "library": name, "version": version}
        self.records.append(records.check({**base, **more, "method": timing.METHOD, **self.common}))


def _next(turn):
    return next(turn)()


class CupyDense(Dense):
    """What dense attention takes of memory."""

    def __init__(self, measured):  # no torch
        self.copies_of_scores = measured.copies_of_scores


def main(arguments=None) -> int:
    options = parse(arguments)
    reason = missing()
    if reason:
        return refuse(PROGRAM, reason)
    import cupy

    properties = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)
    common = {"gpu": properties["name"].decode(), "driver": records.driver_version(), "cupy": cupy.__version__, **records.run_fields(options.commit)}
    path = records.result_path(common["gpu"], MEASURED[options.direction].bench, options.out)
    cells = list(options.cells)
    if options.long and not options.tiles:
        dim = options.dims[-1]
        cells += [Cell("float32", 1, options.long, LONG_WIDTH // dim, LONG_WIDTH // dim, dim, mask) for mask in options.causal]
    run, progress = Run(options, common), Progress(len(cells), "simt")
    budget = timing.Budget(options.budget, len(cells), options.rounds)
    try:
        for cell in cells:
            target, before = budget.target_ms(2), time.monotonic()
            measured, spent = run.cell(cell, target, progress.note)
            budget.cell_done(measured, target, spent, time.monotonic() - before)
            records.write(path, run.records)
            progress.step(str(cell))
    except KeyboardInterrupt:
        print(f"interrupted; what was measured is in {path}", file=sys.stderr)
        return 130
    finally:
        progress.close()
    print(tables.cell_table(run.records, colour=colour_wanted()))
    print("\n" + memory_table(run.records))
    print(f"\n{path}")
    return int(any(r["ms"] is None for r in run.records if r["library"] == tables.OURS))


def memory_table(recs) -> str:
    """Peak memory of each call, what it returns and what the forward has kept for it included."""
    lines = ["peak memory of a call, what it returns and what the forward has kept for it included (MiB)"]
    for cell, place in tables.by_cell(recs).items():
        shown = ", ".join(f"{name} {(record['peak_bytes'] + record['kept_bytes']) / 2**20:.0f}" for name, record in place.items())
        lines.append(f"  {tables.name_of(cell)}: {shown}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
