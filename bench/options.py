"""What each option costs beside the plain kernel, and beside the peers that have it: ``python -m bench.options``.

Every scenario is timed in one run, libraries in turn, our plain kernel on the same cell among them. Results are compared with
float64 on the last rows of the first and last head before they are timed, but for dropout, whose masks differ from library to library.

FA2 is the one that torch has: windows and ALiBi are reached below ``scaled_dot_product_attention``. Its derivative there knows no ALiBi, and softcap
is no argument of it, so FA4 and FlexAttention alone stand beside our softcap.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

from numbaflash.benchmarks import gpu, records, timing
from numbaflash.benchmarks.cells import DTYPES, Cell, backward_flops, forward_flops, inputs
from numbaflash.benchmarks.optional import BLOCK, CAP, DROPPED, GLOBAL, NEAR, PREFIX, Peers, Scenario, document_ids
from numbaflash.benchmarks.peers import OURS, OURS_PLAIN, one_line
from numbaflash.benchmarks.progress import Progress
from numbaflash.problem import make_problem

from .grids import choices

PROGRAM, BENCH = "bench.options", "options"
DIRECTIONS = ("forward", "backward")
PEERS = ("cudnn", "efficient", "fa2", "fa4", "flex")
WINDOWS = (1024, 2048, 4096)
"""Keys that a query sees in the sequence of 32k."""
SAMPLED_ROWS = 64
TOLERANCE = 0.03  # of 16-bit results of size 1, far below what a wrong mask or bias does


def scenarios(dtype: str, head_dim: int) -> dict[str, Scenario]:
    """Every scenario, by name; 16k tokens of 2048 columns, causal, and one sequence of 32k for the window."""
    heads = 2048 // head_dim
    cell, long = Cell(dtype, 4, 4096, heads, heads, head_dim, True), Cell(dtype, 1, 32768, heads, heads, head_dim, True)
    full = Cell(dtype, 4, 4096, heads, heads, head_dim, False)

    def bias(torch, cell):
        return {"bias": torch.randn(1, cell.heads, cell.seqlen, cell.seqlen, device="cuda", dtype=getattr(torch, cell.dtype))}

    def mask(torch, cell):
        documents = document_ids(torch, cell)
        return {"mask": documents[:, None] == documents[None, :]}

    def blocks(name):
        return lambda torch, cell: {"mask": block_mask(torch, cell, name)}

    def window(keys):
        return lambda torch, cell: {"window": (keys - 1, 0)}

    def half(torch, cell):
        lengths = torch.linspace(0.25, 1, cell.batch, device="cuda").mul(cell.seqlen).int()
        return {"seqlens_q": lengths, "seqlens_k": lengths}

    return {
        "plain": Scenario(cell, peers=("cudnn", "fa2", "fa4")),
        "softcap": Scenario(cell, lambda torch, cell: {"softcap": CAP}, ("fa4", "flex")),
        "alibi": Scenario(cell, lambda torch, cell: {"alibi_slopes": torch.linspace(0.01, 1, cell.heads, device="cuda")}, ("fa2", "flex")),
        "sinks": Scenario(cell, lambda torch, cell: {"sinks": torch.randn(cell.heads, device="cuda")}),
        "lengths": Scenario(cell, lambda torch, cell: dict.fromkeys(("seqlens_q", "seqlens_k"), full_lengths(torch, cell))),
        "uneven lengths": Scenario(cell, half),
        "dropout": Scenario(cell, lambda torch, cell: {"dropout": DROPPED, "seed": 1}, ("cudnn", "efficient", "fa2")),
        "full plain": Scenario(full, peers=("cudnn", "fa2", "fa4")),
        "full bias": Scenario(full, bias, ("cudnn", "efficient", "flex")),
        "full bias and dbias": Scenario(full, bias, ("cudnn", "efficient", "flex"), ("q", "k", "v", "bias")),
        "full mask of documents": Scenario(full, mask, ("cudnn", "efficient", "flex")),
        "full block mask of documents": Scenario(full, blocks("documents"), ("flex",), rule="documents"),
        "full block-causal mask": Scenario(full, blocks("block causal"), ("flex",), rule="block causal"),
        "full prefix mask": Scenario(full, blocks("prefix"), ("flex",), rule="prefix"),
        "full sliding and global mask": Scenario(full, blocks("sliding"), ("flex",), rule="sliding"),
        **{window_name(keys): Scenario(long, window(keys), ("fa2", "fa4", "flex")) for keys in WINDOWS},
    }


def window_name(keys) -> str:
    return f"window {keys} at 32k"


def full_lengths(torch, cell):
    return torch.full((cell.batch,), cell.seqlen, device="cuda", dtype=torch.int32)


def block_mask(torch, cell, name):
    """The same as a `numbaflash.BlockMask`."""
    import numbaflash

    make, documents = numbaflash.BlockMask, document_ids(torch, cell)
    if name == "documents":
        return make.documents(documents)
    if name == "block causal":
        return make.block_causal(cell.seqlen, block=BLOCK, like=documents)
    if name == "prefix":
        return make.prefix_lm(cell.seqlen, prefix=PREFIX, like=documents)
    return make.sliding_global(cell.seqlen, window=(NEAR, NEAR), n_global=GLOBAL, like=documents)


def sampled(torch, cell, options, q, k, v):
    """The last rows of the first batch entry's first and last head, (2, rows, head_dim), in float64."""
    found, first = [], cell.seqlen - SAMPLED_ROWS
    length = int(options["seqlens_k"][0]) if "seqlens_k" in options else cell.seqlen
    for head in (0, cell.heads - 1):
        rows = torch.arange(first, cell.seqlen, device=q.device)[:, None] - (cell.seqlen - length)
        keys = torch.arange(length, device=q.device)[None, :]
        s = q[0, rows[:, 0], head].double() @ k[0, :length, head].double().T * cell.head_dim**-0.5
        if "softcap" in options:
            s = options["softcap"] * torch.tanh(s / options["softcap"])
        if "alibi_slopes" in options:
            s = s - options["alibi_slopes"][head].double() * (rows - keys).abs()
        if "bias" in options:
            s = s + options["bias"][0, head, first:].double()
        seen = rows >= keys if cell.causal else torch.ones_like(rows >= keys)
        if "mask" in options:
            mask = options["mask"]
            seen = seen & (mask if isinstance(mask, torch.Tensor) else mask.to_dense()[0, 0])[first:]
        if "window" in options:
            seen = seen & (rows - keys <= options["window"][0])
        s = s.masked_fill(~seen, -torch.inf)
        sink = options["sinks"][head].double().expand(SAMPLED_ROWS, 1) if "sinks" in options else s.new_full((SAMPLED_ROWS, 1), -torch.inf)
        found.append(torch.cat([s, sink], 1).softmax(1)[:, :-1] @ v[0, :length, head].double())
    return torch.stack(found)


def complaint(torch, cell, options, out, wanted) -> str | None:
    """What is wrong with a result; None when nothing is, or when dropout makes it random."""
    if "dropout" in options:
        return None
    end = int(options["seqlens_q"][0]) if "seqlens_q" in options else cell.seqlen
    got = out[0, end - SAMPLED_ROWS : end][:, [0, -1]].transpose(0, 1).double()
    error = (got - wanted).abs().max().item()
    return None if error <= TOLERANCE else f"wrong: an element is off by {error:.2g}"


def calls_of(name, peers, scenario, options, arrays, direction):
    """(forward call, call to be timed) of a library."""
    import torch

    import numbaflash

    dout, q, k, v = arrays
    causal = scenario.cell.causal
    if name == OURS:
        forward = lambda: numbaflash.forward(q, k, v, causal=causal, **options)  # noqa: E731
        if direction == "forward":
            return forward, forward
        out, lse = numbaflash.forward(q, k, v, causal=causal, return_lse=True, **options)
        return forward, lambda: numbaflash.backward(dout, q, k, v, out, lse, causal=causal, needs=scenario.needs, **options)
    forward = peers.bind(name, scenario, options, q, k, v)
    if direction == "forward":
        return forward, forward
    leaves = {n: x.detach().requires_grad_() for n, x in {"q": q, "k": k, "v": v, **options}.items() if n in scenario.needs}
    with torch.enable_grad():
        out = peers.bind(name, scenario, options | {n: x for n, x in leaves.items() if n in options}, *(leaves[n] for n in "qkv"))()
    return forward, lambda: torch.autograd.grad(out, tuple(leaves.values()), dout, retain_graph=True)


class Run:
    """Measures scenarios and gathers the records."""

    def __init__(self, options, common, device):
        self.options, self.common, self.device, self.peers, self.records = options, common, device, Peers(), []

    def scenario(self, name, scenario, direction, note):
        import torch

        cell = scenario.cell
        options = scenario.make(torch, cell)
        arrays = inputs(cell, operands=("dout", "q", "k", "v"))
        wanted = sampled(torch, cell, options, *arrays[1:])
        calls = {}
        for library in (OURS, *(peer for peer in scenario.peers if peer in self.options.libraries)):
            reason = None
            try:
                forward, call = calls_of(library, self.peers, scenario, options, arrays, direction)
                reason = complaint(torch, cell, options, forward(), wanted)
                if reason is None:
                    call()
                    torch.cuda.synchronize()
                    calls[library] = call
            except Exception as error:  # whatever a library raises, the others are still measured
                reason = one_line(error)
                self.device.recover()
            if reason:
                note(f"{name}, {direction}: {library} left out: {reason}")
                self.record(name, cell, direction, library, {"ms": None, "tflops": None, "skipped": reason})
        if options and "window" not in options and OURS in calls:
            _, calls[OURS_PLAIN] = calls_of(OURS, self.peers, Scenario(cell), {}, arrays, direction)
            calls[OURS_PLAIN]()
        problem = problem_of(cell, options)
        flops = forward_flops(problem) if direction == "forward" else backward_flops(problem)
        for library, times in timing.measure(self.device, calls, rounds=self.options.rounds, target_ms=self.options.target).items():
            numbers = times.summary()
            self.record(name, cell, direction, library, numbers | {"tflops": flops / numbers["ms"] / 1e9})

    def record(self, name, cell, direction, library, more):
        base = {"bench": BENCH, "direction": direction, **cell.fields(), "library": library, "version": "", "option": name}
        self.records.append(records.check({**base, **more, "method": timing.METHOD, **self.common}))


def problem_of(cell, options):
    """The problem whose operations are counted: that of the cell, with the window. What a mask hides or a length leaves out is counted."""
    p = cell.problem
    return make_problem(p.q_shape, p.k_shape, p.v_shape, (cell.dtype,) * 3, causal=cell.causal, window=options.get("window"))


def proportions(found) -> list[str]:
    """How our time with each window stands to that with the narrowest, beside the pairs that there are to compute: a line each."""
    lines, first = [], WINDOWS[0]
    ours = {(r["option"], r["direction"]): r for r in found if r["library"] == OURS and r["ms"]}
    for direction, keys in itertools.product(DIRECTIONS, WINDOWS[1:]):
        narrow, wide = (ours.get((window_name(each), direction)) for each in (first, keys))
        if narrow and wide:
            time, pairs = wide["ms"] / narrow["ms"], wide["ms"] * wide["tflops"] / (narrow["ms"] * narrow["tflops"])
            share = f"{time:.2f} x the time of window {first} for {pairs:.2f} x the pairs: {time / pairs:.2f}"
            lines.append(f"{window_name(keys)}, {direction}: {share}")
    return lines


def table(found) -> str:
    """Milliseconds of each scenario, the plain kernel's time over ours, and the best peer's over ours; below, whether time follows the window."""
    lines = [f"{'option':28}{'direction':10}{'numbaflash ms':>14}{'of plain':>10}{'best peer':>22}{'ratio':>8}"]
    ours, plain = ({(r["option"], r["direction"]): r for r in found if r["library"] == name} for name in (OURS, OURS_PLAIN))
    for (option, direction), record in ours.items():
        if record["ms"] is None:
            lines.append(f"{option:28}{direction:10}{'-':>14}  {record['skipped']}")
            continue
        share = f"{plain[option, direction]['ms'] / record['ms']:.2f}" if (option, direction) in plain else "-"
        theirs = [r for r in found if (r["option"], r["direction"]) == (option, direction) and r["library"] not in (OURS, OURS_PLAIN) and r["ms"]]
        best = min(theirs, key=lambda r: r["ms"], default=None)
        told, ratio = (f"{best['library']} {best['ms']:.3f}", f"{best['ms'] / record['ms']:.2f}") if best else ("-", "-")
        lines.append(f"{option:28}{direction:10}{record['ms']:>14.3f}{share:>10}{told:>22}{ratio:>8}")
    return "\n".join([*lines, *proportions(found)])


def parse(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__.split("\n\n")[0])
    names = tuple(scenarios("bfloat16", 128))
    parser.add_argument("--only", help=f"scenarios ({','.join(names)})")
    parser.add_argument("--directions", default=",".join(DIRECTIONS), help="(%(default)s)")
    parser.add_argument("--libraries", default=",".join(PEERS), help="peers (%(default)s)")
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp16"), help="(%(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, choices=(64, 128, 256), help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each library (%(default)s)")
    parser.add_argument("--target", type=float, default=15.0, help="device milliseconds of a measurement (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder of the results (bench/results)")
    parser.add_argument("--commit", help="commit to write in the records where this is no git checkout")
    options = parser.parse_args(arguments)
    try:
        options.directions = choices("directions", options.directions, DIRECTIONS)
        options.libraries = choices("libraries", options.libraries, PEERS)
        options.only = choices("only", options.only, names) if options.only else names
        if options.rounds < 1 or not options.target > 0:
            raise ValueError("--rounds and --target must be above 0")
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments=None) -> int:
    options = parse(arguments)
    reason = gpu.missing()
    if reason:
        return gpu.refuse(PROGRAM, reason)
    start = time.monotonic()
    common = {**records.gpu_fields(), **records.run_fields(options.commit)}
    path = records.result_path(common["gpu"], BENCH, options.out)
    run = Run(options, common, gpu.Gpu())
    found = scenarios(DTYPES[options.dtype], options.head_dim)
    todo = list(itertools.product(options.only, options.directions))
    progress = Progress(len(todo), BENCH)
    try:
        for name, direction in todo:
            run.scenario(name, found[name], direction, progress.note)
            records.write(path, run.records)
            progress.step(f"{name}, {direction}")
    finally:
        progress.close()
    print(table(run.records))
    print(f"\n{time.monotonic() - start:.0f} s; {path}")
    return int(any(r["library"] == OURS and r.get("skipped") for r in run.records))


if __name__ == "__main__":
    sys.exit(main())
