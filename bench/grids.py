"""A grid of cells measured with several libraries on a GPU: what `bench.forward`, `bench.backward` and `bench.training` share.

Every library's result is compared with float64 on a sample before it is timed; one that is wrong, fails or does not fit is
reported and left out of that cell.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

from . import evidence, gpu, plots, prebuild, records, table, timing
from .cells import DTYPES, grid, heads_of
from .peers import OWN, find, one_line
from .progress import Progress, colour_wanted

FULL = {"dims": "64,128,256", "seqlens": "512,1024,2048,4096,8192,16384", "dtypes": "bf16,fp16", "causal": "full,causal", "heads": "mha,gqa"}
FULL |= {"budget": 240.0, "rounds": 7}
QUICK = {"dims": "64,128,256", "seqlens": "1024,4096,16384", "dtypes": "bf16", "causal": "full,causal", "heads": "mha", "budget": 60.0, "rounds": 5}
MASKS = {"full": False, "causal": True}
RESERVE_S = 15.0  # of the budget, for the evidence, the plots and the table


def parser(program, what, description, full) -> argparse.ArgumentParser:
    """The options of a grid.

    Parameters
    ----------
    program : str
        Name of the module that is run.
    what : class of bench.passes
    description : str
    full : dict
        Values of the options that ``--quick`` changes, without it.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {program}", description=description.split("\n\n")[0])
    parser.add_argument("--dims", help=f"head dims ({full['dims']})")
    parser.add_argument("--seqlens", help=f"sequence lengths ({full['seqlens']})")
    parser.add_argument("--dtypes", help=f"of {', '.join(DTYPES)} ({full['dtypes']})")
    parser.add_argument("--causal", help=f"of {', '.join(MASKS)} ({full['causal']})")
    parser.add_argument("--heads", help=f'of mha (heads * D = 2048), gqa (32/8), or "H/Hk" ({full["heads"]})')
    parser.add_argument("--pair", action="store_true", help="the n-th of --dtypes with the n-th of --heads, not every combination")
    parser.add_argument("--tokens", type=int, default=16384, help="batch * seqlen (%(default)s)")
    parser.add_argument("--libraries", default=",".join(what.libraries), help="(%(default)s)")
    parser.add_argument("--quick", action="store_true", help="fewer cells and rounds; other options override")
    budget = f"seconds for the whole grid, compilation included ({full['budget']:.0f}); no cell is dropped when it is over"
    parser.add_argument("--budget", type=float, help=budget)
    parser.add_argument("--rounds", type=int, help=f"measurements of each library in a cell ({full['rounds']})")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (%(default)s)")
    parser.add_argument("--out", type=Path, help=f"folder of the results ({records.RESULTS.relative_to(Path(__file__).parents[1])})")
    parser.add_argument("--commit", help="commit to write in the records where this is no git checkout")
    return parser


def parse(parser, what, full, quick, arguments=None) -> argparse.Namespace:
    """The command line, with ``cells`` and ``libraries`` worked out."""
    options = parser.parse_args(arguments)
    for name, value in (quick if options.quick else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    try:
        dims, seqlens = _integers("dims", options.dims, 256), _integers("seqlens", options.seqlens, options.tokens)
        dtypes = [DTYPES[name] for name in choices("dtypes", options.dtypes, DTYPES)]
        masks = [MASKS[name] for name in choices("causal", options.causal, MASKS)]
        kinds = _words("heads", options.heads)
        for kind in kinds:
            heads_of(kind, 64)
        if options.pair and len(dtypes) != len(kinds):
            raise ValueError(f"--pair needs as many --dtypes as --heads; got {len(dtypes)} and {len(kinds)}")
        options.libraries = choices("libraries", options.libraries, what.known)
        for name in ("budget", "rounds"):
            if not getattr(options, name) > 0:
                raise ValueError(f"--{name} must be above 0; got {getattr(options, name)}")
    except ValueError as error:
        parser.error(str(error))
    groups = [([dtype], [kind]) for dtype, kind in zip(dtypes, kinds, strict=True)] if options.pair else [(dtypes, kinds)]
    options.cells = [
        cell for dtypes, kinds in groups for cell in grid(dtypes=dtypes, dims=dims, seqlens=seqlens, causal=masks, heads=kinds, tokens=options.tokens)
    ]
    return options


def _words(name, text) -> list[str]:
    words = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not words:
        raise ValueError(f"--{name} must name at least one; got {text!r}")
    return words


def choices(name, text, allowed) -> list[str]:
    """The words of an option, each one of those that are allowed; else a ValueError that says so."""
    words = _words(name, text)
    for word in words:
        if word not in allowed:
            raise ValueError(f"--{name} takes {', '.join(allowed)}; got {word!r}")
    return words


def _integers(name, text, most) -> list[int]:
    numbers = []
    for word in _words(name, text):
        if not word.isdecimal() or not 1 <= int(word) <= most:
            raise ValueError(f"--{name} takes whole numbers from 1 to {most}; got {word!r}")
        numbers.append(int(word))
    return numbers


class Run:
    """One run over a grid: measures the cells and gathers the records.

    Parameters
    ----------
    what : class of bench.passes
        What a call computes.
    options : argparse.Namespace
        From `parse`.
    libraries : dict of str to Library
    common : dict
        Fields of every record.
    device : bench.gpu.Gpu
    built : list of dict
        From `prebuild.prebuild`: evidence that need not be gathered again.
    """

    def __init__(self, what, options, libraries, common, device, built=()):
        self.what, self.options, self.libraries, self.common, self.device = what, options, libraries, common, device
        self.told = {(report["library"], report["cell"]): report["evidence"] for report in built if "evidence" in report}
        self.records = []

    def cell(self, cell, target_ms, note) -> tuple[int, float]:
        """Check and time every library on a cell; returns how many were timed, and the seconds that took."""
        try:
            count = timing.input_sets(cell.bytes_of(*self.what.operands), self.device.l2_bytes)
            sets = [self.device.inputs(cell, self.what.operands) for _ in range(count)]
            sample = self.what.sample(cell, *sets[0])
        except Exception as error:  # out of memory, most likely: the other cells are still measured
            self._still_alive(error)
            for name in self.libraries:
                self._skip(cell, name, one_line(error), note)
            return 0, 0.0
        calls, facts = {}, {}
        for name, library in self.libraries.items():
            try:
                reason = library.unfit(cell, self.device.free_bytes(), self.what.direction)
                if reason is None:
                    call, facts[name], reason = self._admit(library, sets, cell, sample)
                if reason is None:
                    calls[name] = call
            except Exception as error:  # whatever a library raises, the others are still measured
                reason = one_line(error)
                self._still_alive(error)
            if reason is not None:
                self._skip(cell, name, reason, note)
        del sample
        start = time.monotonic()
        for name, times in timing.measure(self.device, calls, rounds=self.options.rounds, target_ms=target_ms).items():
            numbers = times.summary()
            if times.host_bound:
                note(f"{cell}: {name} waits for the device in each call; its times hold host time too")
            self._record(cell, name, {**numbers, "tflops": self.what.flops(cell) / numbers["ms"] / 1e9, "input_sets": len(sets), **facts[name]})
        return len(calls), time.monotonic() - start

    def _admit(self, library, sets, cell, sample):
        """(function that calls the library on the next input set, facts for the record, None), or (None, {}, what is wrong)."""
        with library.scope():
            bound = [self.what.bind(library, arrays, cell.causal) for arrays in sets]
            error, complaint = sample.judge(bound[0]())
            if complaint:
                return None, {}, complaint
            told = self.told.get((library.name, str(cell)))
            facts = {"error_per_tolerance": error, **(prebuild.evidence(self.what, library, sets[0], cell.causal) if told is None else told)}
        turn = itertools.cycle(bound)

        def call():
            with library.scope():
                next(turn)()

        return call, facts, None

    def _skip(self, cell, name, reason, note):
        self._record(cell, name, {"ms": None, "tflops": None, "skipped": reason})
        note(f"{cell}: {name} left out: {reason}")

    def _still_alive(self, error):
        """A CUDA context that an error has destroyed cannot measure anything any more."""
        try:
            self.device.recover()
        except Exception:
            raise RuntimeError(f"the CUDA context is lost after: {one_line(error)}") from error

    def _record(self, cell, name, more):
        library = self.libraries[name]
        base = {"bench": self.what.bench, "direction": self.what.direction, **cell.fields(), "library": name, "version": library.version}
        self.records.append(records.check({**base, **more, "method": timing.METHOD, **self.common}))

    def add_kernel_names(self):
        """Write into each record with a time which kernels the library launched there."""
        timed = [r for r in self.records if r["ms"] is not None]
        cells = {tuple(cell.fields().values()): cell for cell in self.options.cells}

        def calls():
            arrays, last = None, None
            for record in timed:
                cell = cells[tuple(record[name] for name in records.CELL)]
                if cell != last:
                    arrays, last = None, cell
                    arrays = self.device.inputs(cell, self.what.operands)
                yield from self._one_call(record["library"], arrays, cell)

        for record, names in zip(timed, evidence.kernels(calls()), strict=True):
            record["kernels"] = names

    def _one_call(self, name, arrays, cell):
        library = self.libraries[name]
        with library.scope():
            yield self.what.bind(library, arrays, cell.causal)


def main(program, what, options, more=None) -> int:
    """Measure the grid of some options; returns the exit code.

    Parameters
    ----------
    program : str
        Name of the module that is run.
    what : class of bench.passes
    options : argparse.Namespace
        From `parse`.
    more : callable, optional
        Takes the `Run` and a function that prints a line; measures something else and returns its records.
    """
    reason = gpu.missing()
    if reason:
        return gpu.refuse(program, reason)
    import torch

    start = time.monotonic()
    libraries, missing = find(options.libraries)
    for name, why in missing.items():
        print(f"{name} is not measured: {why}", flush=True)
    if not libraries:
        return gpu.refuse(program, "none of the libraries can be imported")
    common = {**records.gpu_fields(), **records.run_fields(options.commit)}
    path = records.result_path(common["gpu"], what.bench, options.out)
    print(f"{common['gpu']}, driver {common['driver']}, torch {common['torch']}; {what.direction}, {len(options.cells)} cells", flush=True)
    progress = Progress(len(options.cells), what.direction)
    try:
        with torch.set_grad_enabled(what.autograd):
            built = prebuild.prebuild(options.cells, libraries, progress.note, what=what)
            run = Run(what, options, libraries, common, gpu.Gpu(options.seed), built)
            if options.cells:
                measure(run, path, options.budget - (time.monotonic() - start), progress)
            if more:
                run.records += more(run, progress.note)
                records.write(path, run.records)
    except KeyboardInterrupt:
        print(f"interrupted; what was measured is in {path}", file=sys.stderr)
        return 130
    finally:
        progress.close()
    return report(run, path, time.monotonic() - start)


def measure(run, path, seconds, progress):
    """Measure every cell within so many seconds and save the records, again after each cell."""
    options, libraries = run.options, len(run.libraries)
    budget = timing.Budget(seconds, len(options.cells), options.rounds, reserve=min(RESERVE_S, options.budget / 5))
    for cell in options.cells:
        target, before = budget.target_ms(libraries), time.monotonic()
        measured, spent = run.cell(cell, target, progress.note)
        budget.cell_done(measured, target, spent, time.monotonic() - before)
        records.write(path, run.records)
        progress.step(str(cell))
    if budget.overrun > 0:
        progress.note(f"the budget was too short by {budget.overrun:.0f} s; measurements were as short as they may be")
    try:
        run.add_kernel_names()
    except Exception as error:  # the times stand without the names
        progress.note(f"kernel names were not recorded: {one_line(error)}")
    records.write(path, run.records)


def report(run, path, seconds) -> int:
    """Table, plots and the places of the files; exit code 1 when numbaflash failed or was wrong in a cell."""
    print(table.tables(run.records, colour=colour_wanted()))
    try:
        drawn = plots.plot(run.records, path)
    except ImportError:
        drawn = []
        print("no plot: matplotlib is not installed")
    print(f"\n{seconds:.0f} s; {', '.join(str(p) for p in [path, *drawn])}")
    failed = [r for r in run.records if r["library"] in OWN and r.get("skipped")]
    if failed:
        first = table.name_of(tuple(failed[0][name] for name in records.CELL))
        print(f"{failed[0]['library']} has no time in {len(failed)} cells, first: {first}: {failed[0]['skipped']}", file=sys.stderr)
        return 1
    return 0
