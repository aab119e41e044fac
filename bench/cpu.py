"""Attention and its gradients on the CPU beside torch's scaled_dot_product_attention: ``python -m bench.cpu``.

Both get the same numbers, laid out (batch, heads, seqlen, head_dim), the same number of threads, and allocate their
results; they take turns, in an order that changes each round. numbaflash's result is compared with float64 first: the output
on a sample of rows, the gradients on all rows of the first and the last key/value head.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

from numbaflash.benchmarks import records, tables
from numbaflash.benchmarks.accuracy import WRONG, Sample
from numbaflash.benchmarks.cells import DTYPES, backward_flops, forward_flops, problem_fields
from numbaflash.benchmarks.cpu import processor
from numbaflash.benchmarks.progress import Progress, colour_wanted

METHOD = "wall time of a call, results allocated; libraries interleaved, order rotated"
DIRECTIONS = ("forward", "backward")
WIDTH = 512  # heads * head_dim
MASKS = {"full": False, "causal": True}


@dataclass(frozen=True, slots=True)
class CpuCell:
    """One problem; `seqlen`, `batch` and `problem` as in `numbaflash.benchmarks.cells.Cell`."""

    dtype: str
    batch: int
    seqlen: int
    seqlen_k: int
    heads: int
    kv_heads: int
    head_dim: int
    causal: bool

    @property
    def problem(self):
        from numbaflash.problem import make_problem

        q, kv = (self.batch, self.seqlen, self.heads, self.head_dim), (self.batch, self.seqlen_k, self.kv_heads, self.head_dim)
        return make_problem(q, kv, kv, (self.dtype,) * 3, causal=self.causal)

    def __str__(self):
        mask = "causal" if self.causal else "full"
        return f"{self.dtype} D{self.head_dim} {mask} {self.heads}/{self.kv_heads} heads {self.batch}x{self.seqlen}/{self.seqlen_k}"


def grid(dtypes, dims, seqlens, masks) -> list[CpuCell]:
    """Square cells, a batch of one and `WIDTH` / head_dim heads."""
    return [
        CpuCell(dtype, 1, n, n, max(1, WIDTH // dim), max(1, WIDTH // dim), dim, mask)
        for dtype in dtypes
        for n in seqlens
        for dim in dims
        for mask in masks
    ]


def decode_grid(dtypes, dims) -> list[CpuCell]:
    """A query or sixteen beside many keys, with and without grouped heads."""
    shapes = [(1, 1, 8192, 8, 8), (1, 1, 8192, 32, 8), (1, 16, 8192, 8, 8), (1, 1, 65536, 1, 1)]
    return [CpuCell(dtype, *shape, dim, False) for dtype in dtypes for dim in dims for shape in shapes]


def parse(arguments=None) -> argparse.Namespace:
    """The command line, with ``cells`` worked out."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu", description=__doc__.split("\n\n")[0])
    parser.add_argument("--dims", default="64,128", help="head dims (%(default)s)")
    parser.add_argument("--seqlens", default="2048,8192", help="sequence lengths (%(default)s)")
    parser.add_argument("--dtypes", default="fp32", help=f"of {', '.join(DTYPES)} (%(default)s)")
    parser.add_argument("--causal", default="full,causal", help="of full, causal (both)")
    parser.add_argument("--direction", choices=DIRECTIONS, default="forward", help="what is measured (%(default)s)")
    parser.add_argument("--decode", action="store_true", help="few queries beside many keys instead of --seqlens and --causal")
    parser.add_argument("--threads", type=int, help="of each library (as many as Numba uses)")
    parser.add_argument("--rounds", type=int, default=7, help="calls of each library in a cell (%(default)s)")
    parser.add_argument("--out", type=Path, help=f"folder of the results ({records.RESULTS.relative_to(Path(__file__).parents[1])})")
    options = parser.parse_args(arguments)
    try:
        dims, seqlens = ([int(word) for word in text.split(",")] for text in (options.dims, options.seqlens))
        dtypes, masks = [DTYPES[name] for name in options.dtypes.split(",")], [MASKS[name] for name in options.causal.split(",")]
        if min(*dims, *seqlens, options.rounds) < 1 or (options.threads is not None and options.threads < 1):
            raise ValueError("numbers must be above 0")
    except (ValueError, KeyError) as error:
        parser.error(f"cannot read {error}")
    options.cells = decode_grid(dtypes, dims) if options.decode else grid(dtypes, dims, seqlens, masks)
    return options


class Run:
    """The measurements of one run; ``records`` grows with each cell."""

    def __init__(self, options):
        import llvmlite.binding
        import numba
        import torch

        import numbaflash

        self.options, self.records = options, []
        if options.threads is not None:
            numba.set_num_threads(options.threads)
        torch.set_num_threads(numba.get_num_threads())
        self.versions = {tables.OURS: numbaflash.__version__, "torch": torch.__version__}
        self.common = {
            "gpu": processor(),
            "cpu": llvmlite.binding.get_host_cpu_name(),
            "cpu_threads": numba.get_num_threads(),
            "method": METHOD,
            **records.run_fields(),
        }

    def tensors(self, cell):
        """(q, k, v, dout), laid out (batch, heads, seqlen, head_dim)."""
        import torch

        heads = ((cell.heads, cell.seqlen), *[(cell.kv_heads, cell.seqlen_k)] * 2, (cell.heads, cell.seqlen))
        generator = torch.Generator().manual_seed(0)
        return [torch.randn((cell.batch, n, rows, cell.head_dim), generator=generator).to(getattr(torch, cell.dtype)) for n, rows in heads]

    def calls(self, cell):
        """({library: call without arguments}, facts about numbaflash's, what is wrong with its result or None)."""
        import numbaflash

        q, k, v, dout = self.tensors(cell)
        ours = [x.transpose(1, 2) for x in (q, k, v)]
        if self.options.direction == "forward":
            calls = {tables.OURS: lambda: numbaflash.forward(*ours, causal=cell.causal), "torch": lambda: self._torch(cell, q, k, v)}
            error, complaint = Sample(cell, *ours).judge(calls[tables.OURS]())
        else:
            out, lse = numbaflash.forward(*ours, causal=cell.causal, return_lse=True)
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            peer_out, dout_rows = self._torch(cell, *leaves), dout.transpose(1, 2)
            calls = {
                tables.OURS: lambda: numbaflash.backward(dout_rows, *ours, out, lse, causal=cell.causal),
                "torch": lambda: torch_gradients(peer_out, leaves, dout),
            }
            error, complaint = judge_gradients(cell, *ours, dout_rows, calls[tables.OURS](), [x.transpose(1, 2) for x in calls["torch"]()])
        plan = numbaflash.explain(*ours, causal=cell.causal, direction=self.options.direction).plan
        facts = {"family": plan.family, "config": repr(plan.config), "grid": list(plan.grid), "threads": plan.threads}
        if complaint is None:
            facts["error_per_tolerance"] = error
        return calls, facts, complaint

    @staticmethod
    def _torch(cell, q, k, v):
        from torch.nn import functional

        grouped = {"enable_gqa": True} if cell.heads != cell.kv_heads else {}
        return functional.scaled_dot_product_attention(q, k, v, is_causal=cell.causal, **grouped)

    def cell(self, cell) -> str | None:
        """Measure a cell; returns what is wrong with numbaflash's result, or None."""
        calls, facts, complaint = self.calls(cell)
        seconds = {name: [] for name in calls}
        if complaint is None:
            for call in calls.values():
                call()
            for turn in range(self.options.rounds):
                names = list(calls)
                for name in names[turn % 2 :] + names[: turn % 2]:
                    start = time.perf_counter()
                    calls[name]()
                    seconds[name].append(time.perf_counter() - start)
        for name, times in seconds.items():
            base = {
                "bench": "cpu",
                "direction": self.options.direction,
                **problem_fields(cell.problem, cell.causal),
                "library": name,
                "version": self.versions[name],
            }
            more = facts if name == tables.OURS else {}
            self.records.append(records.check({**base, **self._numbers(cell, times, complaint), **more, **self.common}))
        return complaint

    def _numbers(self, cell, seconds, complaint):
        if complaint:
            return {"ms": None, "tflops": None, "skipped": complaint}
        ms = [1e3 * s for s in seconds]
        first, _, third = quantiles(ms, n=4) if len(ms) > 1 else ms * 3
        middle = median(ms)
        numbers = {"ms": middle, "ms_q1": first, "ms_q3": third, "ms_min": min(ms), "rounds": len(ms), "launches": 1}
        flops = (forward_flops if self.options.direction == "forward" else backward_flops)(cell.problem)
        return {**numbers, "tflops": flops / middle / 1e9}


def torch_gradients(out, leaves, dout):
    """torch's backward of one scaled_dot_product_attention."""
    import torch

    return torch.autograd.grad(out, leaves, dout, retain_graph=True)


def judge_gradients(cell, q, k, v, dout, ours, theirs):
    """(largest error in units of its tolerance, what is wrong or None) of the first and the last key/value head, against float64.

    An error may be twice torch's largest, plus two roundings of the largest number or 1e-5 of it. Tensors are (batch, seqlen, heads, head_dim).
    """
    import torch

    group, worst = cell.heads // cell.kv_heads, 0.0
    rounding = max(1e-5, 2 * torch.finfo(q.dtype).eps)
    for batch, kv_head in sorted({(0, 0), (cell.batch - 1, cell.kv_heads - 1)}):
        heads = range(kv_head * group, (kv_head + 1) * group)
        exact = exact_gradients(cell, q[batch][:, heads], k[batch, :, kv_head], v[batch, :, kv_head], dout[batch][:, heads])
        for name, got, peer, want in zip(("dq", "dk", "dv"), ours, theirs, exact, strict=True):
            part = (batch, slice(None), list(heads)) if name == "dq" else (batch, slice(None), kv_head)
            error, peer_error = ((x[part].double() - want).abs().max().item() for x in (got, peer))
            tolerance = 2 * peer_error + rounding * want.abs().max().item()
            if not error <= tolerance:
                return float("inf"), f"{WRONG}: {name} is off by {error:.3g}, tolerance {tolerance:.3g}"
            worst = max(worst, error / tolerance)
    return worst, None


def exact_gradients(cell, q, k, v, dout, rows=1024):
    """float64 (dq, dk, dv) of one key/value head: q and dout (seqlen, group, head_dim), k and v (seqlen_k, head_dim)."""
    import torch

    q, k, v, dout = (x.detach().double() for x in (q, k, v, dout))
    scale, keys = cell.head_dim**-0.5, torch.arange(len(k))
    dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for head in range(q.shape[1]):
        for start in range(0, len(q), rows):
            part = slice(start, start + rows)
            queries, grad = q[part, head], dout[part, head]
            score = scale * queries @ k.T
            if cell.causal:
                score.masked_fill_(keys > torch.arange(len(q))[part, None] + len(k) - len(q), -torch.inf)
            p = score.softmax(dim=1)
            delta = (grad * (p @ v)).sum(dim=1, keepdim=True)
            ds = p * (grad @ v.T - delta)
            dq[part, head] = scale * ds @ k
            dk += scale * ds.T @ queries
            dv += p.T @ grad
    return dq, dk, dv


def main(arguments=None) -> int:
    options = parse(arguments)
    try:
        run = Run(options)
    except ImportError as error:
        print(f"bench.cpu needs torch: {error}. Install it with pip install 'numbaflash[bench]'", file=sys.stderr)
        return 2
    name = "cpu" if options.direction == "forward" else "cpu-backward"
    path = records.result_path(run.common["gpu"], name, options.out)
    print(f"{run.common['gpu']}, {run.common['cpu_threads']} threads each; {options.direction}, {len(options.cells)} cells", flush=True)
    progress, wrong = Progress(len(options.cells), "cpu"), []
    try:
        for cell in options.cells:
            complaint = run.cell(cell)
            if complaint:
                wrong.append(f"{cell}: {complaint}")
            records.write(path, run.records)
            progress.step(str(cell))
    except KeyboardInterrupt:
        print(f"interrupted; what was measured is in {path}", file=sys.stderr)
        return 130
    finally:
        progress.close()
    print(tables.cell_table(run.records, metric="ms", colour=colour_wanted()))
    print(f"\n{tables.summary(run.records)}\n{path}")
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
