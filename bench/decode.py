"""Decoding with a cache beside FA4 and torch's back ends: ``python -m bench.decode``.

A token (or a few) of each sequence against all keys before it: one request, batches of equal and of mixed lengths, several numbers of key heads and
sizes of pages. What counts is bytes: the keys and values that are attended to, over the time, as a share of what a copy on the device moves in the
same run (read and written). Libraries take turns, caches are rotated past the L2 cache, and every result is compared with float64 on three sequences
before it is timed. Torch's back ends know no pages and no lengths: they have contiguous caches, and a mask where lengths are mixed.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from itertools import product

from numbaflash.benchmarks import gpu, records, timing
from numbaflash.benchmarks.decoding import SEED, DecodeCell, Inputs, admit, copy_rate
from numbaflash.benchmarks.peers import OURS
from numbaflash.benchmarks.progress import Progress

from .grids import choices, integers

PROGRAM, BENCH = "bench.decode", "decode"
HEADS = {"mha": (32, 32), "gqa": (32, 8), "mqa": (32, 1)}
PEERS = ("fa4", "fa2", "cudnn", "efficient", "flashinfer")
MOST_BYTES = 60e9
HOST_CALLS = 500


def mixed_lengths(batch: int, least: int = 128, most: int = 32768) -> tuple[int, ...]:
    """Drawn log-uniformly, the same each time."""
    rng = random.Random(SEED)
    return tuple(int(least * (most / least) ** rng.random()) for _ in range(batch))


def same_bytes(lengths) -> tuple[int, ...]:
    """As many keys in sequences of equal lengths."""
    return (sum(lengths) // len(lengths),) * len(lengths)


LENGTHS = {
    "one of 1k": (1024,),
    "one of 8k": (8192,),
    "one of 32k": (32768,),
    "one of 128k": (131072,),
    "8 of 1k": (1024,) * 8,
    "8 of 8k": (8192,) * 8,
    "64 of 1k": (1024,) * 64,
    "64 of 8k": (8192,) * 64,
    "256 of 1k": (1024,) * 256,
    "256 of 8k": (8192,) * 256,
    "8 mixed": mixed_lengths(8),
    "64 mixed": mixed_lengths(64),
    "64 mixed equal": same_bytes(mixed_lengths(64)),
    "256 mixed": mixed_lengths(256),
}
"""Scenarios; "64 mixed equal" is what "64 mixed" is held against."""


# ---- a run


def in_a_graph(torch, call, calls: int = 32, rounds: int = 7) -> float:
    """Milliseconds a call on the device, of many captured in one CUDA graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    times = []
    for _ in range(rounds + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return sorted(times[1:])[rounds // 2]


def host_microseconds(torch, call, calls: int = HOST_CALLS, rounds: int = 5) -> float:
    """What a call keeps the host, the least of several rounds."""
    best = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        best = min(best, (time.perf_counter() - start) / calls)
    torch.cuda.synchronize()
    return best * 1e6


def record_of(cell, name, common, **more) -> dict:
    return {
        "bench": BENCH,
        "direction": "decode",
        "dtype": "bfloat16",
        "batch": len(cell.lengths),
        "seqlen_q": cell.tokens,
        "seqlen_k": max(cell.lengths),
        "heads": cell.heads,
        "kv_heads": cell.kv_heads,
        "head_dim": cell.head_dim,
        "head_dim_v": cell.head_dim,
        "causal": True,
        "library": name,
        "version": common.get("versions", {}).get(name, common.get("torch", "")),
        "ms": None,
        "tflops": None,
        "lengths": cell.name,
        "page_size": cell.page_size,
        **more,
        **{key: value for key, value in common.items() if key != "versions"},
    }


def run(options, torch, clock, common) -> list[dict]:
    """Records of all cells."""
    found, copied = [], copy_rate(clock, torch)
    end, progress = time.monotonic() + options.budget, Progress(len(options.cells), PROGRAM)
    for cell in options.cells:
        progress.step(str(cell))
        if time.monotonic() > end or cell.cache_bytes > MOST_BYTES:
            why = "the time of the run was over" if time.monotonic() > end else f"its caches take {cell.cache_bytes / 1e9:.0f} GB"
            found.append(record_of(cell, OURS, common, skipped=why))
            continue

        def note(name, why, cell=cell):
            found.append(record_of(cell, name, common, skipped=why))

        inputs = Inputs(torch, cell, clock.l2_bytes)
        calls = admit(torch, cell, inputs, [OURS, *options.libraries], note)
        if OURS in calls:
            more = {}
            if cell.bytes < 2**28:
                more["graph_ms"] = in_a_graph(torch, calls[OURS])
                more["host_us"] = host_microseconds(torch, calls[OURS])
            for name, times in timing.measure(clock, calls, rounds=options.rounds, target_ms=options.target).items():
                told = times.summary()
                rate = cell.bytes / told["ms"] * 1e3
                extra = more if name == OURS else {}
                found.append(
                    record_of(cell, name, common, **told | {"bytes": cell.bytes, "tb_per_s": rate / 1e12, "share_of_copy": rate / copied, **extra})
                )
        del inputs, calls
        torch.cuda.empty_cache()
    progress.close()
    return found


# ---- what a run says


def places(found) -> dict[tuple, dict[str, dict]]:
    cells = {}
    for r in found:
        cells.setdefault((r["lengths"], r["heads"], r["kv_heads"], r["head_dim"], r["page_size"], r["seqlen_q"]), {})[r["library"]] = r
    return cells


def ratio(place, name) -> float | None:
    """The time of a library over ours."""
    ours, theirs = (place.get(each, {}).get("ms") for each in (OURS, name))
    return theirs / ours if ours and theirs else None


def best_peer(place) -> float | None:
    """The time of the fastest peer over ours."""
    return min((r for name in place if name != OURS and (r := ratio(place, name)) is not None), default=None)


def table(found) -> str:
    others = [name for name in PEERS if any(r["library"] == name and r["ms"] for r in found)]
    lines = [f"{'lengths':17}{'heads':7}{'D':>4}{'page':>6}{'q':>3}{'us':>10}{'TB/s':>7}{'of copy':>9}" + "".join(f"{name:>11}" for name in others)]
    for (lengths, heads, kv_heads, dim, page, tokens), place in places(found).items():
        start = f"{lengths:17}{f'{heads}/{kv_heads}':7}{dim:>4}{page or '-':>6}{tokens:>3}"
        ours = place.get(OURS, {})
        if not ours.get("ms"):
            lines.append(f"{start}  {ours.get('skipped', 'not measured')}")
            continue
        ratios = "".join(f"{'-' if (r := ratio(place, name)) is None else format(r, '.2f'):>11}" for name in others)
        lines.append(f"{start}{ours['ms'] * 1e3:10.2f}{ours['tb_per_s']:7.2f}{ours['share_of_copy']:9.0%}{ratios}")
    return "\n".join([*lines, "", *bars(found)])


def bars(found) -> list[str]:
    """How the cells stand to what must be reached: a line each, as far as it was measured."""
    cells = {key: place for key, place in places(found).items() if place.get(OURS, {}).get("ms")}

    def share(lengths, pages):
        wanted = [p[OURS]["share_of_copy"] for key, p in cells.items() if key[:4] == (lengths, 32, 8, 128) and key[4] in pages and key[5] == 1]
        return min(wanted, default=None)

    def line(what, value, bar, at_most=False, form=".2f"):
        if value is None:
            return []
        reached = value <= bar if at_most else value >= bar
        verdict = "reached" if reached else f"missed by {abs(value - bar):{form}}"
        return [f"{what}: {value:{form}}, {'at most' if at_most else 'at least'} {bar:{form}}: {verdict}"]

    def ours_of(lengths, page):
        return cells.get((lengths, 32, 8, 128, page, 1), {}).get(OURS, {})

    mixed = [
        ours_of("64 mixed", page)["ms"] / ours_of("64 mixed equal", page)["ms"] / (sum(LENGTHS["64 mixed"]) / sum(LENGTHS["64 mixed equal"]))
        for page in (0, 16, 64, 256)
        if ours_of("64 mixed", page) and ours_of("64 mixed equal", page)
    ]
    small = ours_of("one of 1k", 0)
    lines = [
        *line("batch 64 of 8k, GQA 32/8, contiguous and pages from 16, share of the copy", share("64 of 8k", (0, 16, 64, 256)), 0.9),
        *line("the same in pages of 1", share("64 of 8k", (1,)), 0.6),
        *line("one request of 128k, share of the copy", share("one of 128k", (0, 16, 64, 256)), 0.8),
        *line("one request of 1k in a graph, us", small["graph_ms"] * 1e3 if "graph_ms" in small else None, 8.0, True),
        *line("mixed lengths over the same bytes at equal lengths", max(mixed, default=None), 1.1, True),
        *line("host cost of plan.run, us", small.get("host_us"), 8.0, True),
    ]
    ahead = [best for place in cells.values() if (best := best_peer(place)) is not None]
    if ahead:
        lines.append(f"{sum(r >= 1 for r in ahead)} of {len(ahead)} cells at or ahead of every peer; the least {min(ahead):.2f}")
    return lines


def parse(arguments=None) -> argparse.Namespace:
    """The command line, with ``cells`` and ``libraries`` worked out."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default=",".join(LENGTHS), help="lengths (%(default)s)")
    parser.add_argument("--heads", default=",".join(HEADS), help="of mha (32/32), gqa (32/8), mqa (32/1) (%(default)s)")
    parser.add_argument("--pages", default="0,1,16,64,256", help="sizes of pages, 0 for contiguous caches (%(default)s)")
    parser.add_argument("--dims", default="128", help="head dims (%(default)s)")
    parser.add_argument("--tokens", default="1", help="queries of a sequence (%(default)s)")
    parser.add_argument("--libraries", default=",".join(PEERS), help="what is measured beside (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--target", type=float, default=4.0, help="milliseconds of a measurement (%(default)s)")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which cells are recorded as left out (%(default)s)")
    parser.add_argument("--out", help="folder of the result (bench/results)")
    parser.add_argument("--commit", help="commit to note where there is no git")
    options = parser.parse_args(arguments)
    try:
        names = choices("only", options.only, LENGTHS)
        heads = [HEADS[name] for name in choices("heads", options.heads, HEADS)]
        options.libraries = choices("libraries", options.libraries, PEERS) if options.libraries else []
        dims, tokens = integers("dims", options.dims, 576), integers("tokens", options.tokens, 64)
        pages = [int(n) for n in options.pages.split(",")]
        if min(pages) < 0:
            raise ValueError(f"pages must not be negative; got {options.pages}")
    except ValueError as error:
        parser.error(str(error))
    options.cells = [DecodeCell(name, LENGTHS[name], *pair, dim, page, n) for name, pair, dim, n, page in product(names, heads, dims, tokens, pages)]
    return options


def main(arguments=None) -> int:
    options = parse(arguments)
    reason = gpu.missing()
    if reason:
        return gpu.refuse(PROGRAM, reason)
    import torch

    import numbaflash

    common = records.gpu_fields() | records.run_fields(options.commit) | {"method": timing.METHOD, "versions": {OURS: numbaflash.__version__}}
    found = run(options, torch, gpu.Gpu(SEED), common)
    path = records.write(records.result_path(common["gpu"], BENCH, options.out), found)
    print(table(found))
    print(f"written to {path}")
    return 1 if any(r["library"] == OURS and str(r.get("skipped", "")).startswith("wrong") for r in found) else 0


if __name__ == "__main__":
    sys.exit(main())
