"""What the records of `bench.counters` say, as Markdown tables."""

from __future__ import annotations

import re

BENCH = "counters"
_HASH = re.compile(r"_[0-9a-f]{8}$")
PEAK_FLOPS_PER_CYCLE = 4096
"""Of the tensor cores of a multiprocessor of compute capability 9.0, in 16 bits: 989 TFLOP/s of 132 of them at 1830 MHz, as NVIDIA specifies them."""


def label_of(record) -> str:
    """A launch in words: its case, and what it is where it is not the main one."""
    if record["direction"] == "decode":
        label = f"decode {record['lengths']}, pages of {record['page_size']}"
    else:
        label = f"{record['direction']} D {record['head_dim']} {'causal' if record['causal'] else 'full'}"
    part = _HASH.sub("", record["kernel"]).rpartition("build_")[2]
    return label if record["main"] else f"{label}: {part}"


def products_over_needed(record) -> float | None:
    """What the tensor cores have multiplied, over what the visible pairs need; None where that is not known."""
    c = record["counters"]
    if record["tflops"] is None or record["direction"] == "decode":
        return None
    return c["tensor_pct"] / 100 * PEAK_FLOPS_PER_CYCLE * c["sm_count"] * c["sm_hz"] / (record["tflops"] * 1e12)


def table(head, rows) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] + ["--:"] * (len(head) - 1), *rows])


def _value(value, form=".0f", scale=1.0) -> str:
    return "-" if value is None else format(value * scale, form)


def launches_table(found) -> str:
    """What a launch takes, and how long."""
    head = [
        "kernel",
        "us",
        "SM clock, MHz",
        "blocks x threads",
        "registers a thread",
        "shared memory a block, KiB",
        "warps an SM, of those that fit",
        "TFLOP/s",
    ]
    rows = []
    for r in found:
        c = r["counters"]
        blocks, warps = f"{c['blocks']} x {c['threads']}", f"{c['warps_per_sm']:.1f} of {c['warps_possible_per_sm']:.0f}"
        shared = f"{c['shared_bytes_per_block'] / 1024:.0f}"
        rows.append([label_of(r), f"{c['ns'] / 1e3:.1f}", f"{c['sm_hz'] / 1e6:.0f}", blocks, str(c["registers"]), shared, warps, _value(r["tflops"])])
    return table(head, rows)


def pipes_table(found) -> str:
    """How much of the time each pipe works, in percent of its peak."""
    names = {
        "tensor_pct": "tensor",
        "xu_pct": "XU",
        "fma_pct": "FMA",
        "alu_pct": "ALU",
        "lsu_pct": "LSU",
        "uniform_pct": "uniform",
        "issue_pct": "issue slots",
    }
    rows = [
        [
            label_of(r),
            *(_value(r["counters"][name], ".1f") for name in names),
            _value(r["counters"]["eligible_warps_per_scheduler"], ".2f"),
            _value(products_over_needed(r), ".2f"),
        ]
        for r in found
    ]
    return table(["kernel, % of the peak", *names.values(), "eligible warps a scheduler", "products over those needed"], rows)


def memory_table(found) -> str:
    """What moves, and how busy memory and caches are."""
    head = ["kernel", "DRAM, %", "DRAM, TB/s", "DRAM, MB", "L2, %", "L2 hits, %", "L2, MB", "L1 and shared memory, %"]
    rows = []
    for r in found:
        c = r["counters"]
        moved = c["dram_bytes_per_s"] * c["ns"] / 1e9
        numbers = [_value(c["dram_pct"], ".1f"), _value(c["dram_bytes_per_s"], ".2f", 1e-12), _value(moved, ".1f", 1e-6)]
        numbers += [_value(c["l2_pct"], ".1f"), _value(c["l2_hit_pct"], ".1f"), _value(c["l2_bytes"], ".1f", 1e-6), _value(c["l1_pct"], ".1f")]
        rows.append([label_of(r), *numbers])
    return table(head, rows)


LEAST_STALL = 0.05
"""A reason that no kernel has for so many cycles an instruction is not shown."""


def stalls_table(found) -> str:
    """Cycles of a warp for each instruction issued, by what it waits for."""
    greatest = {}
    for r in found:
        for reason, cycles in r["stalls"].items():
            greatest[reason] = max(cycles, greatest.get(reason, 0.0))
    reasons = sorted((reason for reason, cycles in greatest.items() if cycles >= LEAST_STALL), key=lambda reason: -greatest[reason])
    rows = [
        [label_of(r), _value(r["counters"]["cycles_per_issue"], ".2f"), *(_value(r["stalls"].get(reason), ".2f") for reason in reasons)]
        for r in found
    ]
    return table(["kernel, cycles", "all", *(reason.replace("_", " ") for reason in reasons)], rows)


TABLES = {"launches": launches_table, "pipes": pipes_table, "memory": memory_table, "stalls": stalls_table}
"""The tables of a run, by name; docs/profiling.md has each of them."""


def text_of(found) -> str:
    """All tables."""
    return "\n\n".join(make(found) for make in TABLES.values())
