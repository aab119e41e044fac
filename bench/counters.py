"""Hardware counters of our kernels, by Nsight Compute: ``python -m bench.counters``.

One process computes each case once under ``ncu``, which repeats every kernel of that call until it has counted what its sections hold, with cold
caches and at the clock that the GPU has. Kernels that were counted must be those of the plan. ``--parse CASE=FILE ...`` makes the same records of
what ``ncu --csv --page raw --print-units base`` has printed before.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from numbaflash.benchmarks import gpu, records
from numbaflash.benchmarks.cells import Cell, backward_flops, forward_flops, heads_of, inputs
from numbaflash.benchmarks.passes import Backward, Forward
from numbaflash.benchmarks.peers import OURS, Numbaflash, facts_of, one_line

from . import ncu
from .counter_tables import BENCH, text_of
from .decode import LENGTHS, DecodeCell, Inputs
from .grids import choices

PROGRAM = "bench.counters"
FOLDER = Path(__file__).parents[1]
METHOD = "Nsight Compute: kernels replayed one by one, caches flushed before each replay, clocks as they are"


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


def records_of(case: Case, rows, common) -> list[dict]:
    """A record of each launch of a case. The longest launch is its main one, which all operations are counted for."""
    counted = [ncu.counters_of(row) for row in rows]
    longest = max(range(len(rows)), key=lambda n: counted[n]["ns"])
    base = {"bench": BENCH, "direction": case.direction, **case.fields, "library": OURS}
    return [
        records.check(
            base
            | {"ms": counters["ns"] / 1e6, "tflops": case.flops / counters["ns"] / 1e3 if n == longest else None}
            | {"case": case.name, "kernel": row["Kernel Name"][1], "main": n == longest, "counters": counters, "stalls": ncu.stalls_of(row)}
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


def count(program, cases, common, timeout: float, keep, run=subprocess.run) -> tuple[list[dict], dict[str, str]]:
    """Records of all cases, and what went wrong with the others. What was counted and cannot be understood is kept in the folder ``keep``."""
    with tempfile.TemporaryDirectory(prefix="numbaflash-counters-") as folder:
        out, facts = Path(folder, "counted.csv"), Path(folder, "facts.jsonl")
        itself = [sys.executable, "-m", PROGRAM, "--child", ",".join(case.name for case in cases), "--facts", str(facts)]
        done = run(ncu.command_of(program, out, itself), cwd=FOLDER, capture_output=True, text=True, timeout=timeout)
        told = [json.loads(line) for line in facts.read_text().splitlines()] if facts.exists() else []
        text = out.read_text() if out.exists() else ""
    failed = {each["case"]: each["error"] for each in told if "error" in each}
    missing = [case.name for case in cases if case.name not in {each["case"] for each in told}]
    if missing:
        words = " ".join((done.stdout + done.stderr).split())[-300:]
        failed |= dict.fromkeys(missing, f"its process ended with exit code {done.returncode}: {words}")
    told = [each for each in told if "error" not in each]
    try:
        return understood(text, told, common) if told else [], failed
    except ValueError as error:
        kept = Path(keep, "counters-raw.csv")
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(text)
        raise ValueError(f"{error}; what was counted is in {kept}") from None


def understood(text, told, common) -> list[dict]:
    """Records of what was counted of cases that have told what they launched."""
    counted, found = assign(ncu.rows_of(text), told), []
    for each in told:
        facts = {name: value for name, value in each.items() if name != "case"}
        found += records_of(CASES[each["case"]], counted[each["case"]], common | facts)
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__.split("\n\n")[0])
    made.add_argument("--only", default=",".join(CASES), help="cases (%(default)s)")
    made.add_argument("--ncu", help="the program (the ncu on PATH)")
    made.add_argument("--timeout", type=float, default=300.0, help="seconds after which the run is ended (%(default)s)")
    made.add_argument("--out", type=Path, help="folder of the result (bench/results)")
    made.add_argument("--commit", help="commit to write in the records where this is no git checkout")
    made.add_argument("--parse", nargs="+", metavar="CASE=FILE", help="make records of what ncu has printed before, and run nothing")
    made.add_argument("--show", nargs="+", type=Path, metavar="FILE", help="print the tables of saved records (.jsonl), and run nothing")
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
            rows = ncu.rows_of(path.read_text())
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
        if options.show:
            print(text_of(records.read(*options.show)))
            return 0
        if options.files:
            found = parsed(options)
        else:
            reason = gpu.missing()
            if reason:
                return gpu.refuse(PROGRAM, reason)
            found, failed = measured(options)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
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

    program = ncu.find(options.ncu)
    build(options.cases, partial(print, flush=True))
    common = records.gpu_fields() | records.run_fields(options.commit)
    common |= {"version": numbaflash.__version__, "ncu": ncu.version_of(program), "method": METHOD}
    return count(program, options.cases, common, options.timeout, options.out or records.RESULTS)


if __name__ == "__main__":
    sys.exit(main())
