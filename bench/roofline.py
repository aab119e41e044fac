"""Every measured cell under the roof of the GPU: ``python -m bench.roofline RESULTS.jsonl ...``.

The roof of a cell is what the GPU could do at best: operations at the rate of a large matrix product, or the bytes that must move, once each, at the
rate of a copy, whichever takes longer. Both rates are measured by ``--measure``, whose records are given among the results.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from numbaflash.benchmarks import gpu, plots, records, timing
from numbaflash.benchmarks.cells import DTYPES, Cell
from numbaflash.benchmarks.peers import OURS
from numbaflash.benchmarks.timing import quartiles

from .counter_tables import table

PROGRAM, BENCH = "bench.roofline", "ceilings"
COPY, PRODUCT = "copy on the device, read and written", "matrix product, bfloat16"
PRODUCTS = ((8192, 8192, 8192), (16384, 16384, 2048), (4096, 4096, 16384))
OPERANDS = {"forward": ("q", "k", "v", "out"), "backward": ("dout", "q", "k", "v", "out", "lse", "dq", "dk", "dv")}
"""Arrays that a call reads or writes, by its direction."""
SHORT = {long: short for short, long in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What the GPU does at best.

    Attributes
    ----------
    bytes_per_s : float
        Of a copy, those that are read and those that are written.
    flops_per_s : float
        Of a matrix product in bfloat16, the fastest of several.
    """

    bytes_per_s: float
    flops_per_s: float

    @classmethod
    def of(cls, found: list[dict]) -> Ceilings:
        """From the records of ``--measure`` among others; of several runs the last one counts.

        ValueError where there are none, or others are of another GPU.
        """
        told = [r for r in found if r["bench"] == BENCH]
        last = [r for r in told if r["date"] == max(r["date"] for r in told)]
        rates = {quantity: [r["value"] for r in last if r["quantity"] == quantity] for quantity in (COPY, PRODUCT)}
        if not all(rates.values()):
            raise ValueError("no ceilings are among the results; add a file of python -m bench.roofline --measure")
        others = {r["gpu"] for r in found} - {last[0]["gpu"]}
        if others:
            raise ValueError(f"the ceilings are those of {last[0]['gpu']}; there are results of {', '.join(sorted(others))}, too")
        return cls(max(rates[COPY]) * 1e12, max(rates[PRODUCT]) * 1e12)

    @property
    def ridge(self) -> float:
        """Operations a byte from where on the products are the lower ceiling."""
        return self.flops_per_s / self.bytes_per_s

    def roof(self, intensity: float) -> float:
        """Operations a second at best."""
        return min(self.flops_per_s, intensity * self.bytes_per_s)


@dataclass(frozen=True, slots=True)
class Point:
    """A measured cell.

    Attributes
    ----------
    record : dict
    flops, bytes : float
        Of a call: operations of visible pairs, and bytes that must move.
    share : float
        What was reached, of the roof.
    """

    record: dict
    flops: float
    bytes: float
    share: float

    @property
    def seconds(self) -> float:
        return self.record["ms"] / 1e3

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / self.bytes


def points(found: list[dict]) -> list[Point]:
    """numbaflash's timed cells of forward, backward and decode, each with the roof that the ceilings among the records make."""
    ceilings = Ceilings.of(found)
    made = []
    for r in found:
        if r["library"] != OURS or r["ms"] is None or r["bench"] not in (*OPERANDS, "decode"):
            continue
        seconds = r["ms"] / 1e3
        if r["bench"] == "decode":
            flops = r["bytes"] * r["heads"] / r["kv_heads"] * r["seqlen_q"]  # 2 D for a score and for a value, of as many bytes in 16 bits
            roof = min(ceilings.flops_per_s, flops / r["bytes"] * r["tb_per_s"] / r["share_of_copy"] * 1e12)  # of the copy in the same run
            made.append(Point(r, flops, r["bytes"], flops / seconds / roof))
        else:
            cell = Cell(r["dtype"], r["batch"], r["seqlen_q"], r["heads"], r["kv_heads"], r["head_dim"], r["causal"])
            flops, moved = r["tflops"] * 1e12 * seconds, cell.bytes_of(*OPERANDS[r["bench"]])
            made.append(Point(r, flops, moved, flops / seconds / ceilings.roof(flops / moved)))
    return made


# ---- tables


def _mask(record) -> str:
    return {True: "causal", False: "full"}[record["causal"]]


def _heads(record) -> str:
    return "equal heads" if record["heads"] == record["kv_heads"] else f"{record['heads']}/{record['kv_heads']} heads"


def _order(point):
    r = point.record
    return r["dtype"], r["heads"] != r["kv_heads"], r["head_dim"], r["causal"], r["seqlen_q"]


def _length(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else str(n)


def ceilings_table(found) -> str:
    """The roof, and what it is made of."""
    c = Ceilings.of(found)
    rows = [["copy", f"{c.bytes_per_s / 1e12:.2f} TB/s"], ["matrix product", f"{c.flops_per_s / 1e12:.0f} TFLOP/s"]]
    return table(["ceiling", "measured"], [*rows, ["both are reached at", f"{c.ridge:.0f} operations a byte"]])


def cells_table(found, direction: str) -> str:
    """Of each cell TFLOP/s and the share of the roof, by head dim, mask, dtype and heads; above them the operations a byte."""
    made = sorted((p for p in points(found) if p.record["bench"] == direction), key=_order)
    lengths = sorted({p.record["seqlen_q"] for p in made})
    rows = {}
    for p in made:
        r = p.record
        name = f"{SHORT[r['dtype']]}, {_heads(r)}, D {r['head_dim']}, {_mask(r)}"
        rows.setdefault(name, {})[r["seqlen_q"]] = f"{p.flops / p.seconds / 1e12:.0f}, {p.share:.0%}"
    intensities = {}
    for p in made:
        by_length = intensities.setdefault(f"operations a byte: {_heads(p.record)}, {_mask(p.record)}", {})
        by_length.setdefault(p.record["seqlen_q"], []).append(p.intensity)
    above = {name: {n: f"{median(values):.0f}" for n, values in each.items()} for name, each in intensities.items()}
    lines = [[name, *(each.get(n, "-") for n in lengths)] for name, each in (above | rows).items()]
    return table(["TFLOP/s, share of the roof", *map(_length, lengths)], lines)


def decode_table(found) -> str:
    """Of each cell TB/s and the share of the roof, by lengths and heads."""
    made = [p for p in points(found) if p.record["bench"] == "decode"]
    pages = sorted({p.record["page_size"] for p in made})
    rows = {}
    for p in made:
        r = p.record
        tokens = f", {r['seqlen_q']} tokens" if r["seqlen_q"] > 1 else ""
        dims = f", D {r['head_dim']}" if r["head_dim"] != 128 else ""
        name = r["lengths"], f"{r['heads']}/{r['kv_heads']}{dims}{tokens}", f"{p.intensity:.0f}"
        rows.setdefault(name, {})[r["page_size"]] = f"{p.bytes / p.seconds / 1e12:.2f}, {p.share:.0%}"
    head = ["TB/s, share of the roof", "heads", "operations a byte", *(f"pages of {n}" if n else "contiguous" for n in pages)]
    return table(head, [[*name, *(each.get(n, "-") for n in pages)] for name, each in rows.items()])


def summary_table(found) -> str:
    """Least, middle and greatest share of the roof of each kind of cell, and how many of them have which ceiling."""
    ceilings, kinds = Ceilings.of(found), {}
    for p in points(found):
        r = p.record
        kind = f"decode, {r['heads']}/{r['kv_heads']} heads" if r["bench"] == "decode" else f"{r['bench']}, D {r['head_dim']}, {_mask(r)}"
        kinds.setdefault(kind, []).append(p)
    rows = []
    for kind, some in kinds.items():
        shares, memory = [p.share for p in some], sum(p.intensity < ceilings.ridge for p in some)
        rows.append([kind, str(len(some)), str(memory), *(f"{value:.0%}" for value in (min(shares), median(shares), max(shares)))])
    return table(["share of the roof", "cells", "below the copy", "least", "median", "most"], rows)


TABLES = {
    "ceilings": ceilings_table,
    "summary": summary_table,
    "forward": lambda found: cells_table(found, "forward"),
    "backward": lambda found: cells_table(found, "backward"),
    "decode": decode_table,
}
"""By name; docs/performance-roofline.md has all of them."""


def text_of(found) -> str:
    """All tables that have a cell."""
    there = {r["bench"] for r in found}
    return "\n\n".join(make(found) for name, make in TABLES.items() if name not in (*OPERANDS, "decode") or name in there)


# ---- plot

COLOURS = {64: "#1f5fa8", 128: "#d1382f", 256: "#3f9142"}
OTHER = "#7a7a7a"


def plot(found, path) -> Path:
    """Draw all cells under the roof, and their shares of it below, as a PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    made, ceilings = points(found), Ceilings.of(found)
    figure = Figure(figsize=(10, 8.5), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    low, high = min(p.intensity for p in made) / 1.5, max(p.intensity for p in made) * 1.5
    edges = sorted([low, *([ceilings.ridge] if low < ceilings.ridge < high else []), high])
    above.plot(edges, [ceilings.roof(x) / 1e12 for x in edges], color="black", linewidth=1.6)
    rate, peak = ceilings.bytes_per_s / 1e12, ceilings.flops_per_s / 1e12
    above.annotate(f"matrix product {peak:.0f} TFLOP/s", (high, peak), (0, 5), textcoords="offset points", ha="right")
    middle = (low * min(high, ceilings.ridge)) ** 0.5
    above.annotate(f"copy {rate:.2f} TB/s", (middle, ceilings.roof(middle) / 1e12), (-8, 4), textcoords="offset points", ha="right")
    groups = {}
    for p in made:
        groups.setdefault((p.record["bench"], None if p.record["bench"] == "decode" else p.record["head_dim"]), []).append(p)
    for (bench, head_dim), some in groups.items():
        colour = COLOURS.get(head_dim, OTHER)
        marker = {"forward": "o", "backward": "^", "decode": "s"}[bench]
        style = {"marker": marker, "s": 18, "facecolors": "none" if bench == "backward" else colour, "edgecolors": colour, "linewidths": 0.8}
        x = [p.intensity for p in some]
        label = bench if head_dim is None else f"{bench}, D {head_dim}"
        above.scatter(x, [p.flops / p.seconds / 1e12 for p in some], label=label, **style)
        below.scatter(x, [p.share for p in some], **style)
    below.axhline(1.0, color="black", linewidth=1.6)
    above.set(xscale="log", yscale="log", ylabel="TFLOP/s", title=f"{made[0].record['gpu']}: {len(made)} cells under the roof")
    below.set(ylabel="share of the roof", xlabel="operations a byte that must move", ylim=(0, 1.05 * max(1.0, *(p.share for p in made))))
    for panel in (above, below):
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    above.legend(frameon=False, fontsize="small", loc="lower right", ncols=2)
    plots.save(figure, path, found)
    return Path(path)


# ---- measuring the ceilings


def ceiling_record(quantity: str, case: str, numbers, unit: str, **common) -> dict:
    """A record of a ceiling: median and quartiles of its rates."""
    q1, middle, q3 = quartiles(numbers)
    nothing = dict.fromkeys(("batch", "seqlen_q", "seqlen_k", "heads", "kv_heads", "head_dim", "head_dim_v"), 0)
    base = {"bench": BENCH, "direction": "none", "dtype": "bfloat16", **nothing, "causal": False, "library": "torch", "ms": None, "tflops": None}
    return records.check(
        base | {"quantity": quantity, "case": case, "value": middle, "q1": q1, "q3": q3, "unit": unit, "samples": len(numbers)} | common
    )


def measured(common, device, rounds=7, target_ms=60.0) -> list[dict]:
    """Records of the ceilings of the present GPU."""
    import torch

    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    calls, work = {}, {}
    target = torch.empty_like(source)
    calls["copy"], work["copy"] = lambda: target.copy_(source), (COPY, "1 GiB", 2 * source.numel(), "TB/s")
    for m, n, k in PRODUCTS:
        a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((m, k), (k, n)))
        name = f"{m} x {n} x {k}"
        calls[name], work[name] = (lambda a=a, b=b: a @ b), (PRODUCT, name, 2 * m * n * k, "TFLOP/s")
    found = []
    for name, times in timing.measure(device, calls, rounds=rounds, target_ms=target_ms).items():
        quantity, case, amount, unit = work[name]
        found.append(ceiling_record(quantity, case, [amount / ms / 1e9 for ms in times.ms], unit, **common))
    return found


def parse(arguments=None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="*", type=Path, metavar="RESULTS", help="of bench.forward, bench.backward and bench.decode, and ceilings")
    parser.add_argument("--plot", type=Path, help="where to draw the cells (beside the last file, ending in -roofline.png)")
    parser.add_argument("--measure", action="store_true", help="measure the ceilings of the present GPU instead, in a few seconds")
    parser.add_argument("--out", type=Path, help="of --measure: folder of the result (bench/results)")
    parser.add_argument("--commit", help="of --measure: commit to write in the records where this is no git checkout")
    options = parser.parse_args(arguments)
    if options.measure == bool(options.files):
        parser.error("give files of results, or --measure")
    return options


def main(arguments=None) -> int:
    options = parse(arguments)
    if options.measure:
        reason = gpu.missing()
        if reason:
            return gpu.refuse(PROGRAM, reason)
        told = records.gpu_fields()
        found = measured(told | records.run_fields(options.commit) | {"version": told["torch"], "method": timing.METHOD}, gpu.Gpu())
        path = records.write(records.result_path(told["gpu"], BENCH, options.out), found)
        print(f"{ceilings_table(found)}\n\nwritten to {path}")
        return 0
    try:
        found = records.read(*options.files)
        if not points(found):
            raise ValueError("the files have no timed cell of numbaflash's forward, backward or decode")
        print(text_of(found))
    except (OSError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    try:
        print(f"\n{plot(found, options.plot or options.files[-1].with_name(options.files[-1].stem + '-roofline.png'))}")
    except ImportError:
        print("\nno plot: matplotlib is not installed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
