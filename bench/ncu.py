"""Nsight Compute's command line: what it is asked to count, and what it prints."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess

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


def find(given=None) -> str:
    """Where ncu is; a ValueError says what to do."""
    found = shutil.which(given or "ncu")
    if found is None:
        raise ValueError(
            f"{given or 'ncu'} was not found{'' if given else ' on PATH'}; it is Nsight Compute's command line, which comes with the CUDA toolkit "
            "(often /usr/local/cuda/bin/ncu): install it, or say where it is with --ncu"
        )
    return found


def command_of(ncu, out, program) -> list[str]:
    """The command that counts our kernels of a program where that has started the profiler, and writes what was counted to ``out``."""
    options = ["--profile-from-start", "off", "--clock-control", "none", "--kernel-name", "regex:numbaflash"]
    options += ["--csv", "--page", "raw", "--print-units", "base", "--log-file", str(out), "--metrics", ",".join(BEYOND_SECTIONS)]
    options += [word for section in SECTIONS for word in ("--section", section)]
    return [ncu, *options, *program]


def version_of(ncu) -> str | None:
    """As ``ncu --version`` tells it."""
    try:
        told = subprocess.run([ncu, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"Version (\S+)", told)
    return found and found[1]


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
