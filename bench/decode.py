"""Decoding with a cache beside FA4, torch's back ends and FlashInfer: ``python -m bench.decode``.

A token (or a few) of each sequence against all keys before it: one request, batches of equal and of mixed lengths, several numbers of key heads and
sizes of pages. What counts is bytes: the keys and values that are attended to, over the time, as a share of what a copy on the device moves in the
same rounds (read and written). Libraries take turns (`bench.timing`), each in a CUDA graph of many calls, and beside mixed lengths ours with the same
bytes at equal lengths; caches are rotated past the L2 cache, and every result is compared with float64 on three sequences before it is timed.
`bench.decode_peers` has what the libraries get.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from dataclasses import replace
from itertools import product
from pathlib import Path

from . import decode_timing, gpu, records, timing
from .decode_peers import BIND, SDPA, SEED, DecodeCell, Inputs, Sample, admit, sdpa_form, versions
from .decode_report import PEERS, table
from .grids import check_run_options, choices, integers, words
from .peers import OURS, one_line
from .progress import Progress

PROGRAM, BENCH = "bench.decode", "decode"
HEADS = {"mha": (32, 32), "gqa": (32, 8), "mqa": (32, 1)}
MOST_BYTES = 60e9
COPY, COPY_BYTES, EQUAL = "copy", 2**30, "numbaflash-equal"
HOST_BYTES = 2**28
"""Cells with less are those where the cost of a launch tells."""


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
"""Scenarios. Mixed lengths are held against the same bytes at equal lengths in their own rounds; "64 mixed equal" is for the peers at these."""


def equal_twin(cell) -> DecodeCell:
    """As many keys in sequences of equal lengths."""
    return replace(cell, name=f"{cell.name} equal", lengths=same_bytes(cell.lengths))


def copier(torch):
    """A call that copies `COPY_BYTES` on the device."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


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
        "version": common.get("versions", {}).get(name, "unknown"),
        "ms": None,
        "tflops": None,
        "lengths": cell.name,
        "page_size": cell.page_size,
        **more,
        **{key: value for key, value in common.items() if key != "versions"},
    }


class Run:
    """Measures cells and gathers the records.

    Parameters
    ----------
    options : argparse.Namespace
        From `parse`.
    torch : module
    clock : bench.gpu.Gpu
    common : dict
        Fields of every record, and ``versions``.
    copy : callable
        Copies `COPY_BYTES`.
    place : str
        torch's name of the device that arrays are on.
    bind : dict of str to callable
    capture : callable
        `bench.decode_timing.captured`.
    """

    def __init__(self, options, torch, clock, common, copy, *, place="cuda", bind=BIND, capture=decode_timing.captured):
        self.options, self.clock, self.common, self.records, self.failed = options, clock, common, [], False
        self._torch, self._copy, self._place, self._bind, self._capture = torch, copy, place, bind, capture

    def cell(self, cell, note):
        """Check and time every library on a cell; what goes wrong is told and recorded, and the run goes on, unless the GPU is lost."""
        try:
            self._cell(cell, note)
        except Exception as error:  # such as memory that does not suffice
            self._recover(error)
            self.failed = True
            self.skip(cell, OURS, one_line(error), note)

    def left_out(self, cell, over) -> str | None:
        """Why a cell is not measured; None when it is."""
        need = cell.cache_bytes + (0 if cell.equal else equal_twin(cell).cache_bytes)
        if need > MOST_BYTES:
            return f"its caches take {need / 1e9:.0f} GB, more than {MOST_BYTES / 1e9:.0f}"
        return "the time of the run was over" if over else None

    def skip(self, cell, name, why, note):
        """Record and tell why a library has no time."""
        self.records.append(records.check(record_of(cell, name, self.common, skipped=why)))
        note(f"{cell}: {name} left out: {why}")

    def _cell(self, cell, note):
        def left_out(name, why):
            self.skip(cell, name, why, note)

        inputs = Inputs(self._torch, cell, self.clock.l2_bytes, self._place)
        sample = Sample(cell, inputs)
        calls = admit(self._torch, cell, inputs, [OURS, *self.options.libraries], left_out, self._bind, sample, self.clock.recover)
        if OURS not in calls:
            self.failed = True
            return
        timed = {name: self._graph(cell, name, inputs, call, sample, note) for name, (call, _) in calls.items()}
        if not cell.equal:
            twin = equal_twin(cell)
            timed |= self._equal(twin, note)
        turns = {COPY: self._copy, **{name: call for name, (call, *_) in timed.items()}}
        times = timing.measure(self.clock, turns, rounds=self.options.rounds, target_ms=self.options.target)
        copied = 2 * COPY_BYTES / times.pop(COPY).summary()["ms"] * 1e3
        told = {name: decode_timing.of_one_call(each, timed[name][1]) | {"in_graph": timed[name][2]} for name, each in times.items()}
        equal = told.pop(EQUAL, None)
        for name, numbers in told.items():
            rate = cell.bytes / numbers["ms"] * 1e3
            rates = {"bytes": cell.bytes, "tb_per_s": rate / 1e12, "share_of_copy": rate / copied, "copy_tb_per_s": copied / 1e12}
            facts = {"input_sets": len(inputs.caches), "error_per_tolerance": calls[name][1]}
            if name in SDPA:
                facts["form"] = sdpa_form(name, cell)
            if name == OURS:
                facts |= self._launches(cell, inputs, calls[name][0], sample, note) if cell.bytes < HOST_BYTES else {}
                facts |= {"equal": {"bytes": twin.bytes, **equal}} if equal else {}
            self.records.append(records.check(record_of(cell, name, self.common, **numbers, **rates, **facts)))

    def _graph(self, cell, name, inputs, call, sample, note):
        """(function to be timed, calls that it makes, whether it is a graph): call by call where a library cannot be captured."""
        count = decode_timing.calls_in_graph(cell.bytes, len(inputs.caches))
        try:
            return self._capture(self._torch, call, inputs.caches, count, sample), count, True
        except Exception as error:  # of a library that is not ours anything may come
            self._recover(error)
            note(f"{cell}: {name} is timed without a graph: {one_line(error)}")
            return inputs.cycling(call), 1, False

    def _equal(self, twin, note):
        """Ours with the same bytes at equal lengths, or nothing where it fails, which is told."""
        inputs = Inputs(self._torch, twin, self.clock.l2_bytes, self._place)
        sample, faults = Sample(twin, inputs), []
        calls = admit(self._torch, twin, inputs, [OURS], lambda name, why: faults.append(why), self._bind, sample, self.clock.recover)
        if faults:
            self.failed = True
            note(f"{twin}: {OURS} left out: {faults[0]}")
            return {}
        return {EQUAL: self._graph(twin, OURS, inputs, calls[OURS][0], sample, note)}

    def _launches(self, cell, inputs, run, sample, note) -> dict:
        """What a launch costs the host: by the plan, by `numbaflash.decode`, and as a graph of one call."""
        import numbaflash

        def decode(k, v):
            return numbaflash.decode(inputs.q, k, v, inputs.lengths, inputs.table, causal=True)

        calls = {decode_timing.PLAN_RUN: inputs.cycling(run), decode_timing.DECODE: inputs.cycling(decode)}
        try:
            calls[decode_timing.REPLAY] = self._capture(self._torch, run, inputs.caches[:1], 1, sample)
        except Exception as error:  # the others stand without it
            self._recover(error)
            note(f"{cell}: no graph of one call: {one_line(error)}")
        return decode_timing.host_fields(calls, self._torch.cuda.synchronize)

    def _recover(self, error):
        """A CUDA context that an error has destroyed cannot measure anything any more."""
        try:
            self.clock.recover()
        except Exception:
            raise SystemExit(f"{PROGRAM}: the CUDA context is lost after: {one_line(error)}") from error


def measure(run, path, progress):
    """Measure the cells of a run within its budget, and save the records, again after each cell."""
    end = time.monotonic() + run.options.budget
    for cell in run.options.cells:
        why = run.left_out(cell, time.monotonic() > end)
        if why:
            run.skip(cell, OURS, why, progress.note)
        else:
            run.cell(cell, progress.note)
        records.write(path, run.records)
        progress.step(str(cell))


def parse(arguments=None) -> argparse.Namespace:
    """The command line, with ``cells`` and ``libraries`` worked out."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__.split("\n\n")[0])
    parser.add_argument("--only", default=",".join(LENGTHS), help="lengths (%(default)s)")
    parser.add_argument("--heads", default=",".join(HEADS), help="of mha (32/32), gqa (32/8), mqa (32/1) (%(default)s)")
    parser.add_argument("--pages", default="0,1,16,64,256", help="sizes of pages, 0 for contiguous caches (%(default)s)")
    parser.add_argument("--dims", default="128", help="head dims (%(default)s)")
    parser.add_argument("--tokens", default="1", help="queries of a sequence (%(default)s)")
    parser.add_argument("--libraries", default=",".join(PEERS), help="what is measured beside (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each library in a cell (%(default)s)")
    parser.add_argument("--target", type=float, default=4.0, help="milliseconds of a measurement (%(default)s)")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which cells are recorded as left out (%(default)s)")
    parser.add_argument("--out", type=Path, help="folder of the result (bench/results)")
    parser.add_argument("--commit", help="commit to note where there is no git")
    options = parser.parse_args(arguments)
    try:
        names = choices("only", options.only, LENGTHS)
        heads = [HEADS[name] for name in choices("heads", options.heads, HEADS)]
        options.libraries = choices("libraries", options.libraries, PEERS) if options.libraries else []
        dims, tokens = integers("dims", options.dims, 576), integers("tokens", options.tokens, 64)
        pages = words("pages", options.pages)
        if not all(n.isdecimal() for n in pages):
            raise ValueError(f"--pages takes whole numbers from 0 (contiguous caches); got {options.pages!r}")
        check_run_options(options)
        if not options.target > 0:
            raise ValueError(f"--target must be above 0; got {options.target}")
    except ValueError as error:
        parser.error(str(error))
    options.cells = [
        DecodeCell(name, LENGTHS[name], *pair, dim, int(page), n) for name, pair, dim, n, page in product(names, heads, dims, tokens, pages)
    ]
    return options


def main(arguments=None) -> int:
    options = parse(arguments)
    reason = gpu.missing()
    if reason:
        return gpu.refuse(PROGRAM, reason)
    import torch

    start = time.monotonic()
    common = records.gpu_fields() | records.run_fields(options.commit) | {"method": decode_timing.METHOD}
    common["versions"] = versions(common)
    path = records.result_path(common["gpu"], BENCH, options.out)
    print(f"{common['gpu']}, driver {common['driver']}, torch {common['torch']}; {len(options.cells)} cells", flush=True)
    progress = Progress(len(options.cells), BENCH)
    try:
        with torch.no_grad():
            run = Run(options, torch, gpu.Gpu(SEED), common, copier(torch))
            measure(run, path, progress)
    except KeyboardInterrupt:
        print(f"interrupted; what was measured is in {path}", file=sys.stderr)
        return 130
    finally:
        progress.close()
    print(table(run.records))
    print(f"\n{time.monotonic() - start:.0f} s; {path}")
    return int(run.failed)


if __name__ == "__main__":
    sys.exit(main())
