"""Hardware counters of our kernels, by Nsight Compute: ``python -m bench.counters``.

One process computes each case once under ``ncu``, which repeats every kernel of that call until it has counted what its sections hold, with cold
caches and at the clock that the GPU has. Kernels that were counted must be those of the plan. ``--parse CASE=FILE ...`` makes the same records of
what ``ncu --csv --page raw --print-units base`` has printed before.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from . import gpu, records
from .cells import Cell, backward_flops, forward_flops, heads_of, inputs
from .decode import LENGTHS, DecodeCell, Inputs
from .grids import choices
from .passes import Backward, Forward
from .peers import OURS, Numbaflash, facts_of, one_line

PROGRAM, BENCH = "bench.counters", "counters"
FOLDER = Path(__file__).parents[1]
METHOD = "Nsight Compute: kernels replayed one by one, caches flushed before each replay, clocks as they are"

SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "WarpStateStats",
    "MemoryWorkloadAnalysis",
    "LaunchStats",
    "Occupancy",
    "SchedulerStats",
    "InstructionStats",
)
BEYOND_SECTIONS = ("dram__bytes_read.sum", "dram__bytes_write.sum", "lts__t_bytes.sum")

_ELAPSED = ".avg.pct_of_peak_sustained_elapsed"
_ACTIVE = ".avg.pct_of_peak_sustained_active"
COUNTERS = {
    "ns": ("gpu__time_duration.sum", "ns"),
    "sm_hz": ("gpc__cycles_elapsed.avg.per_second", "hz"),
    "sm_count": ("launch__sm_count", "SM"),
    "tensor_pct": ("sm__pipe_tensor_cycles_active" + _ELAPSED, "%"),
    "xu_pct": ("sm__inst_executed_pipe_xu" + _ELAPSED, "%"),
    "fma_pct": ("sm__pipe_fma_cycles_active" + _ELAPSED, "%"),
    "alu_pct": ("sm__pipe_alu_cycles_active" + _ELAPSED, "%"),
    "lsu_pct": ("sm__inst_executed_pipe_lsu" + _ELAPSED, "%"),
    "uniform_pct": ("sm__inst_executed_pipe_uniform" + _ELAPSED, "%"),
    "issue_pct": ("smsp__issue_active" + _ACTIVE, "%"),
    "instructions": ("smsp__inst_executed.sum", "inst"),
    "cycles_per_issue": ("smsp__average_warp_latency_per_inst_issued.ratio", "cycle"),
    "warps_per_sm": ("sm__warps_active.avg.per_cycle_active", "warp"),
    "warps_possible_per_sm": ("sm__maximum_warps_avg_per_active_cycle", "warp"),
    "eligible_warps_per_scheduler": ("smsp__warps_eligible.avg.per_cycle_active", "warp"),
    "registers": ("launch__registers_per_thread", "register/thread"),
    "shared_bytes_per_block": ("launch__shared_mem_per_block", "byte/block"),
    "blocks": ("launch__grid_size", ""),
    "threads": ("launch__block_size", ""),
    "blocks_by_registers": ("launch__occupancy_limit_registers", "block"),
    "blocks_by_shared_memory": ("launch__occupancy_limit_shared_mem", "block"),
    "dram_pct": ("gpu__dram_throughput" + _ELAPSED, "%"),
    "dram_bytes_per_s": ("dram__bytes.sum.per_second", "byte/s"),
    "l2_pct": ("lts__throughput" + _ELAPSED, "%"),
    "l2_hit_pct": ("lts__t_sector_hit_rate.pct", "%"),
    "l1_pct": ("l1tex__throughput" + _ACTIVE, "%"),
}
"""Fields of ``counters`` in a record, each with its metric and the unit that is expected of it; the units are those of ``--print-units base``."""

OPTIONAL_COUNTERS = {
    "dram_read_bytes": ("dram__bytes_read.sum", "byte"),
    "dram_write_bytes": ("dram__bytes_write.sum", "byte"),
    "l2_bytes": ("lts__t_bytes.sum", "byte"),
    "spills": ("sass__inst_executed_register_spilling", "inst"),
}
"""The same of those that are null where they were not counted: `BEYOND_SECTIONS`, and what only newer versions count."""

_STALL = re.compile(r"smsp__average_warps_issue_stalled_(\w+)_per_issue_active\.ratio")
_HASH = re.compile(r"_[0-9a-f]{8}$")

PEAK_FLOPS_PER_CYCLE = 4096
"""Of the tensor cores of a multiprocessor of compute capability 9.0, in 16 bits: 989 TFLOP/s of 132 of them at 1830 MHz, as NVIDIA specifies them."""


@dataclass(frozen=True)
class Case:
    """A call whose kernels are counted."""

    name: str
    direction: str
    cell: Cell | DecodeCell

    @property
    def flops(self) -> int:
        if self.direction == "decode":
            return sum(self.cell.lengths) * self.cell.heads * 4 * self.cell.head_dim
        return self.cell.count(backward_flops if self.direction == "backward" else forward_flops)

    @property
    def fields(self) -> dict:
        """What was computed, as the fields of a record."""
        if self.direction != "decode":
            return self.cell.fields()
        cell = self.cell
        sizes = {"batch": len(cell.lengths), "seqlen_q": cell.tokens, "seqlen_k": max(cell.lengths)}
        heads = {"heads": cell.heads, "kv_heads": cell.kv_heads, "head_dim": cell.head_dim, "head_dim_v": cell.head_dim}
        return {"dtype": "bfloat16", **sizes, **heads, "causal": True, "lengths": cell.name, "page_size": cell.page_size, "bytes": cell.bytes}

    def plans(self, device) -> list:
        """Of the kernels that the case launches, those of its preparation among them."""
        from numbaflash import dispatch
        from numbaflash.problem import make_decode_problem
        from numbaflash.support import contiguous_backward_layouts, contiguous_layouts

        if self.direction != "decode":
            problem, backward = self.cell.problem, self.direction == "backward"
            made = [dispatch.make_plan(problem, contiguous_layouts(problem, lse=backward), device)]
            return made + [dispatch.make_backward_plan(problem, contiguous_backward_layouts(problem), device)] * backward
        cell, batch = self.cell, len(self.cell.lengths)
        kv, table = (cell.pages, cell.page_size, cell.kv_heads, cell.head_dim), (batch, cell.capacity // cell.page_size)
        options = {"causal": True, "seqlens_k": ((batch,), "int32"), "page_table": (table, "int32")}
        problem = make_decode_problem((batch, cell.tokens, cell.heads, cell.head_dim), kv, kv, ("bfloat16",) * 3, **options)
        return [dispatch.keep_workspace(dispatch.make_decode_plan(problem, contiguous_layouts(problem, lse=False), device))]

    def bind(self, torch):
        """(function without arguments that makes the call, what `numbaflash.explain` tells of it)."""
        import numbaflash
        from numbaflash.explanation import explain_plan

        if self.direction == "decode":
            made = Inputs(torch, self.cell, 0)
            caches = *made.caches[0], made.lengths, made.table
            planned = numbaflash.plan_decode(made.q, *caches, causal=True)
            return partial(planned.run, made.q, *caches), explain_plan(planned.plan)
        what = Backward if self.direction == "backward" else Forward
        arrays = inputs(self.cell, torch.Generator(device="cuda").manual_seed(0), what.operands)
        call = what.bind(Numbaflash(), arrays, self.cell.structure)
        return call, numbaflash.explain(*arrays[-3:], causal=self.cell.causal, direction=self.direction)


def _cases():
    masks = {"full": False, "causal": True}
    for direction, dims in (("forward", (64, 128, 256)), ("backward", (128,))):
        for dim in dims:
            for mask, causal in masks.items():
                yield Case(f"{direction}-d{dim}-{mask}", direction, Cell("bfloat16", 4, 4096, *heads_of("mha", dim), dim, causal))
    yield Case("decode-64-of-8k", "decode", DecodeCell("64 of 8k", LENGTHS["64 of 8k"], 32, 8, 128, 16))


CASES = {case.name: case for case in _cases()}


# ---- what ncu prints


def rows_of(text: str) -> list[dict[str, tuple[str, str]]]:
    """The launches that a raw page holds, in their order: of each column the unit and what stands there. Other lines between are passed over."""
    found, head, units = [], None, None
    for row in csv.reader(line for line in text.splitlines() if line.startswith('"')):
        if "Kernel Name" in row:
            head, units = row, None
        elif head is not None and len(row) == len(head):
            if units is None:
                units = row
            else:
                found.append({name: (unit, value) for name, unit, value in zip(head, units, row, strict=True)})
    if not found:
        told = [line.removeprefix("==ERROR==").strip() for line in text.splitlines() if line.startswith("==ERROR==")]
        raise ValueError(f"no launch was counted: {'; '.join(told) or 'there is no table of ncu --csv --page raw'}")
    return found


def number(text: str) -> float | int | None:
    """What a cell of the table holds; None where nothing was counted."""
    text = text.replace(",", "")
    try:
        return float(text) if "." in text else int(text)
    except ValueError:
        return None


def counters_of(row) -> dict:
    """The fields `COUNTERS` and `OPTIONAL_COUNTERS` of a launch; a ValueError says what is missing, or has another unit."""
    found = {}
    for field, (metric, unit) in (COUNTERS | OPTIONAL_COUNTERS).items():
        given, text = row.get(metric, (unit, ""))
        if given != unit:
            raise ValueError(f"{metric} must be in {unit or 'no unit'}, as ncu --print-units base gives it; got {given or 'no unit'}")
        found[field] = number(text)
        if found[field] is None and field in COUNTERS:
            raise ValueError(f"{metric} was not counted ({text or 'no such column'}); run ncu with --section {' --section '.join(SECTIONS)}")
    return found


def stalls_of(row) -> dict[str, float]:
    """Cycles that a warp spends in each state for an instruction that is issued, the greatest first. ``selected`` is the cycle of the issue."""
    told = {found[1]: number(text) or 0.0 for metric, (_, text) in row.items() if (found := _STALL.fullmatch(metric))}
    if not told:
        raise ValueError("no reason why warps stall was counted; run ncu with --section WarpStateStats")
    return dict(sorted(told.items(), key=lambda each: -each[1]))


def records_of(case: Case, rows, common) -> list[dict]:
    """A record of each launch of a case. The longest launch is its main one, which all operations are counted for."""
    counted = [counters_of(row) for row in rows]
    longest = max(range(len(rows)), key=lambda n: counted[n]["ns"])
    base = {"bench": BENCH, "direction": case.direction, **case.fields, "library": OURS}
    return [
        records.check(
            base
            | {"ms": counters["ns"] / 1e6, "tflops": case.flops / counters["ns"] / 1e3 if n == longest else None}
            | {"case": case.name, "kernel": row["Kernel Name"][1], "main": n == longest, "counters": counters, "stalls": stalls_of(row)}
            | common
        )
        for n, (row, counters) in enumerate(zip(rows, counted, strict=True))
    ]


def assign(rows, told) -> dict[str, list]:
    """The launches of each case, of which ``told`` names the kernels in the order in which they ran.

    ValueError when they are not those that were counted.
    """
    found, at = {}, 0
    for each in told:
        want = each.get("kernels", [])
        found[each["case"]] = rows[at : at + len(want)]
        got = [row["Kernel Name"][1] for row in found[each["case"]]]
        if got != want:
            raise ValueError(f"{each['case']}: the plan has the kernels {', '.join(want)}; counted were {', '.join(got) or 'none'}")
        at += len(want)
    if at != len(rows):
        raise ValueError(f"{len(rows) - at} launches were counted beyond those of the plans, first {rows[at]['Kernel Name'][1]}")
    return found


# ---- a run


def find_ncu(given=None) -> str:
    """Where ncu is; a ValueError says what to do."""
    found = shutil.which(given or "ncu")
    if found is None:
        raise ValueError(
            f"{given or 'ncu'} was not found{'' if given else ' on PATH'}; it is Nsight Compute's command line, which comes with the CUDA toolkit "
            "(often /usr/local/cuda/bin/ncu): install it, or say where it is with --ncu"
        )
    return found


def command_of(ncu, names, out, facts) -> list[str]:
    """The command that counts some cases in one process; it writes what was counted to ``out``, and the process what it has launched to ``facts``."""
    options = ["--profile-from-start", "off", "--clock-control", "none", "--kernel-name", "regex:numbaflash"]
    options += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(out), "--metrics", ",".join(BEYOND_SECTIONS)]
    options += [word for section in SECTIONS for word in ("--section", section)]
    return [ncu, *options, sys.executable, "-m", PROGRAM, "--child", ",".join(names), "--facts", str(facts)]


def child(names, path) -> int:
    """Make the call of each case twice, the second time for ncu to count, and write a line of facts for each."""
    import torch

    with Path(path).open("w") as told:
        for name in names:
            try:
                facts = counted_call(CASES[name], torch)
            except Exception as error:  # the other cases are still counted
                facts = {"error": one_line(error)}
            print(json.dumps({"case": name, **facts}), file=told, flush=True)
            torch.cuda.empty_cache()
    return 0


def counted_call(case, torch) -> dict:
    call, explained = case.bind(torch)
    call()  # builds and loads the kernels
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    try:
        call()
        torch.cuda.synchronize()
    finally:
        torch.cuda.profiler.stop()
    return {"kernels": kernels_of(explained.plan), **facts_of(explained)}


def kernels_of(plan) -> list[str]:
    """Names of the kernels that a plan launches, in their order."""
    from numbaflash import dispatch, toolchain

    return [toolchain.compile_ptx(request).entry for request in dispatch.family(plan.family, plan.direction).requests(plan)]


def build(cases, note) -> None:
    """Build the kernels of all cases in parallel, so that none is compiled while its case waits."""
    from numbaflash import toolchain, warmup

    try:
        note(str(warmup([plan for case in cases for plan in case.plans(toolchain.device(0))], load=False)))
    except Exception as error:  # said again where it is called
        note(f"some kernels were not built: {one_line(error)}")


def count(ncu, cases, common, timeout: float, run=subprocess.run) -> tuple[list[dict], dict[str, str]]:
    """Records of all cases, and what went wrong with the others."""
    with tempfile.TemporaryDirectory(prefix="numbaflash-counters-") as folder:
        out, facts = Path(folder, "counted.csv"), Path(folder, "facts.jsonl")
        done = run(command_of(ncu, [case.name for case in cases], out, facts), cwd=FOLDER, capture_output=True, text=True, timeout=timeout)
        told = [json.loads(line) for line in facts.read_text().splitlines()] if facts.exists() else []
        text = out.read_text() if out.exists() else ""
    failed = {each["case"]: each["error"] for each in told if "error" in each}
    missing = [case.name for case in cases if case.name not in {each["case"] for each in told}]
    if missing:
        words = " ".join((done.stdout + done.stderr + text).split())[-300:]
        failed |= dict.fromkeys(missing, f"its process ended with exit code {done.returncode}: {words}")
    told = [each for each in told if "error" not in each]
    counted = assign(rows_of(text), told) if told else {}
    found = []
    for each in told:
        facts = {name: value for name, value in each.items() if name != "case"}
        found += records_of(CASES[each["case"]], counted[each["case"]], common | facts)
    return found, failed


def version_of(ncu) -> str | None:
    """As ``ncu --version`` tells it."""
    try:
        told = subprocess.run([ncu, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"Version (\S+)", told)
    return found and found[1]


# ---- what a run says


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


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__.split("\n\n")[0])
    made.add_argument("--only", default=",".join(CASES), help="cases (%(default)s)")
    made.add_argument("--ncu", help="the program (the ncu on PATH)")
    made.add_argument("--timeout", type=float, default=300.0, help="seconds after which the run is ended (%(default)s)")
    made.add_argument("--out", type=Path, help="folder of the result (bench/results)")
    made.add_argument("--commit", help="commit to write in the records where this is no git checkout")
    made.add_argument("--parse", nargs="+", metavar="CASE=FILE", help="make records of what ncu has printed before, and run nothing")
    made.add_argument("--source", help="of --parse: where the files are from")
    made.add_argument("--date", help="of --parse: when they were made")
    made.add_argument("--child", help=argparse.SUPPRESS)
    made.add_argument("--facts", type=Path, help=argparse.SUPPRESS)
    return made


def parse(arguments=None) -> argparse.Namespace:
    """The command line, with ``cases`` and ``files`` worked out."""
    made = parser()
    options = made.parse_args(arguments)
    try:
        options.cases = [CASES[name] for name in choices("only", options.child or options.only, CASES)]
        options.files = []
        for pair in options.parse or ():
            name, _, path = pair.partition("=")
            if name not in CASES or not path:
                raise ValueError(f"--parse takes CASE=FILE with a case of {', '.join(CASES)}; got {pair!r}")
            options.files.append((CASES[name], Path(path)))
        if options.files and not (options.source and options.date):
            raise ValueError("--parse needs --source and --date: a record says where it is from")
    except ValueError as error:
        made.error(str(error))
    return options


def parsed(options) -> list[dict]:
    """Records of ``--parse``."""
    found = []
    for case, path in options.files:
        try:
            rows = rows_of(path.read_text())
            common = {"gpu": rows[0]["device__attribute_display_name"][1], "driver": None, "version": "unknown", "method": METHOD}
            common |= {"command": records.run_fields()["command"], "date": options.date, "commit": options.commit, "source": options.source}
            found += records_of(case, rows, common)
        except (OSError, KeyError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from None
    return found


def main(arguments=None) -> int:
    options = parse(arguments)
    if options.child:
        return child([case.name for case in options.cases], options.facts)
    failed = {}
    try:
        if options.files:
            found = parsed(options)
        else:
            reason = gpu.missing()
            if reason:
                return gpu.refuse(PROGRAM, reason)
            found, failed = measured(options)
    except (ValueError, subprocess.TimeoutExpired) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    if found:
        path = records.write(records.result_path(found[0]["gpu"], BENCH, options.out, options.date), found)
        print(text_of(found))
        print(f"\nwritten to {path}")
    for name, why in failed.items():
        print(f"{name} was not counted: {why}", file=sys.stderr)
    return 1 if failed or not found else 0


def measured(options) -> tuple[list[dict], dict[str, str]]:
    """Records of a run on the present GPU, and what went wrong."""
    import numbaflash

    ncu = find_ncu(options.ncu)
    build(options.cases, partial(print, flush=True))
    common = records.gpu_fields() | records.run_fields(options.commit)
    common |= {"version": numbaflash.__version__, "ncu": version_of(ncu), "method": METHOD}
    return count(ncu, options.cases, common, options.timeout)


if __name__ == "__main__":
    sys.exit(main())
