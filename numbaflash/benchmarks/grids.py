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

from . import accuracy, evidence, gpu, plots, prebuild, records, table, timing
from .cells import DTYPES, grid, heads_of
from .peers import OWN, find, one_line
from .prebuild import Task
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
    what : class of numbaflash.benchmarks.passes
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
    add_run_options(parser, full, "no cell is dropped when it is over")
    return parser


def add_run_options(parser, full, over) -> None:
    """Options of every run; ``over`` says what happens to cells when the budget is over."""
    parser.add_argument("--budget", type=float, help=f"seconds for the whole grid, compilation included ({full['budget']:.0f}); {over}")
    parser.add_argument("--rounds", type=int, help=f"measurements of each library in a cell ({full['rounds']})")
    parser.add_argument("--seed", type=int, default=0, help="of the random inputs (%(default)s)")
    parser.add_argument("--out", type=Path, help=f"folder of the results ({records.RESULTS.relative_to(Path(__file__).parents[2])})")
    parser.add_argument("--commit", help="commit to write in the records where this is no git checkout")


def parse(parser, what, full, quick, arguments=None) -> argparse.Namespace:
    """The command line, with ``cells`` and ``libraries`` worked out."""
    options = parser.parse_args(arguments)
    for name, value in (quick if options.quick else full).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    try:
        dims, seqlens = integers("dims", options.dims, 256), integers("seqlens", options.seqlens, options.tokens)
        dtypes = [DTYPES[name] for name in choices("dtypes", options.dtypes, DTYPES)]
        masks = [MASKS[name] for name in choices("causal", options.causal, MASKS)]
        kinds = words("heads", options.heads)
        for kind in kinds:
            heads_of(kind, 64)
        if options.pair and len(dtypes) != len(kinds):
            raise ValueError(f"--pair needs as many --dtypes as --heads; got {len(dtypes)} and {len(kinds)}")
        options.libraries = choices("libraries", options.libraries, what.known)
        check_run_options(options)
    except ValueError as error:
        parser.error(str(error))
    groups = [([dtype], [kind]) for dtype, kind in zip(dtypes, kinds, strict=True)] if options.pair else [(dtypes, kinds)]
    options.cells = [
        cell for dtypes, kinds in groups for cell in grid(dtypes=dtypes, dims=dims, seqlens=seqlens, causal=masks, heads=kinds, tokens=options.tokens)
    ]
    return options


def check_run_options(options) -> None:
    """ValueError where one of `add_run_options` has no sense."""
    for name in ("budget", "rounds"):
        if not getattr(options, name) > 0:
            raise ValueError(f"--{name} must be above 0; got {getattr(options, name)}")


def words(name, text) -> list[str]:
    """What an option lists, each once; a ValueError where that is nothing."""
    found = list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))
    if not found:
        raise ValueError(f"--{name} must name at least one; got {text!r}")
    return found


def choices(name, text, allowed) -> list[str]:
    """The words of an option, each one of those that are allowed; else a ValueError that says so."""
    found = words(name, text)
    for word in found:
        if word not in allowed:
            raise ValueError(f"--{name} takes {', '.join(allowed)}; got {word!r}")
    return found


def integers(name, text, most) -> list[int]:
    """The same of whole numbers from 1 to the largest allowed one."""
    numbers = []
    for word in words(name, text):
        if not word.isdecimal() or not 1 <= int(word) <= most:
            raise ValueError(f"--{name} takes whole numbers from 1 to {most}; got {word!r}")
        numbers.append(int(word))
    return numbers


class Run:
    """One run over a grid: measures the cells and gathers the records.

    Parameters
    ----------
    what : class of numbaflash.benchmarks.passes
        What a call computes.
    options : argparse.Namespace
        From `parse`.
    libraries : dict of str to Library
    common : dict
        Fields of every record.
    device : numbaflash.benchmarks.gpu.Gpu
    built : list of dict
        From `prebuild.prebuild`: evidence that need not be gathered again.
    """

    def __init__(self, what, options, libraries, common, device, built=()):
        self.what, self.options, self.libraries, self.common, self.device = what, options, libraries, common, device
        self.told = {(r["library"], r["cell"]): r["evidence"] for r in built if "evidence" in r and r["what"] == what.__name__}
        self.records = []

    @staticmethod
    def tasks(what, cells, libraries) -> list[Task]:
        """What is to be built before cells are measured."""
        return [Task(what, cell, tuple(libraries)) for cell in cells]

    def cell(self, cell, target_ms, note) -> tuple[int, float]:
        """Check and time every library on a cell; returns how many were timed, and the seconds that took."""
        admitted = self.admit(cell, note)
        start = time.monotonic()
        calls = {name: call for name, (call, _) in admitted.items()}
        for name, times in timing.measure(self.device, calls, rounds=self.options.rounds, target_ms=target_ms).items():
            self.timed(cell, name, times, admitted[name][1], note)
        return len(calls), time.monotonic() - start

    def admit(self, cell, note) -> dict:
        """(function that calls the library on the next input set, facts for the record) of each library whose results are right."""
        try:
            sets = self.what.inputs(self.device, cell)
            sample = self.what.sample(cell, *self.what.arrays(sets))
            agreement = _Agreement(cell, self.what.compared(sets))
        except Exception as error:  # out of memory, most likely: the other cells are still measured
            self._still_alive(error)
            self.skip(cell, one_line(error), note)
            return {}
        admitted = {}
        for name, library in self._having(cell).items():
            try:
                reason = library.unfit(cell, self.device.free_bytes(), self.what.direction)
                if reason is None:
                    call, facts, reason = self._admit(library, sets, cell, sample, agreement)
                if reason is None:
                    admitted[name] = call, facts
            except Exception as error:  # whatever a library raises, the others are still measured
                reason = one_line(error)
                self._still_alive(error)
            if reason is not None:
                self._skip(cell, name, reason, note)
        return admitted

    def timed(self, cell, name, times, facts, note) -> dict:
        """Keep the times of a library as a record, and return it."""
        numbers = times.summary()
        if times.host_bound:
            note(f"{cell}: {name} waits for the device in each call; its times hold host time too")
        if self.device.kind == "cpu":
            del numbers["host_us"]  # the same time once more
        return self._record(cell, name, {**numbers, **self.what.figures(cell, numbers["ms"]), **facts})

    def skip(self, cell, reason, note) -> None:
        """Record of every library why it was not measured on a cell."""
        for name in self._having(cell):
            self._record(cell, name, {"ms": None, "tflops": None, "skipped": reason})
        note(f"{cell}: left out: {reason}")

    def _having(self, cell):
        return {name: library for name, library in self.libraries.items() if library.has(cell)}

    def _admit(self, library, sets, cell, sample, agreement):
        """(function that calls the library on the next input set, facts for the record, None), or (None, {}, what is wrong)."""
        with library.scope():
            first, turn = self.what.calls(library, sets, cell)
            result = library.rows(first(), cell.structure)
            error, complaint = sample.judge(result)
            complaint = complaint or agreement.complaint(library.name, result)
            if complaint:
                return None, {}, complaint
            told = self.told.get((library.name, str(cell)))
            told = prebuild.evidence(self.what, library, self.what.arrays(sets), cell) if told is None else told
            facts = {"input_sets": len(sets), "inputs": agreement.inputs, "error_per_tolerance": error, **told}

        def call():
            with library.scope():
                turn()

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
        self.records.append(records.check({**base, **more, "method": self.device.method, **self.common}))
        return self.records[-1]

    def add_kernel_names(self):
        """Write into each record with a time which kernels the library launched there."""
        timed = [r for r in self.records if r["ms"] is not None]
        cells = {_key(cell.fields()): cell for cell in self.options.cells}

        def calls():
            sets, last = None, None
            for record in timed:
                cell = cells[_key(record)]
                if cell != last:
                    sets, last = None, cell
                    sets = self.what.one_set(self.device, cell)
                yield from self._one_call(record["library"], sets, cell)

        for record, names in zip(timed, evidence.kernels(calls()), strict=True):
            record["kernels"] = names

    def _one_call(self, name, sets, cell):
        library = self.libraries[name]
        with library.scope():
            yield self.what.calls(library, sets, cell)[0]


class _Agreement:
    """What the libraries have in common on a cell: unchanged inputs, and results like that of the first of them."""

    def __init__(self, cell, arrays):
        self._dtype, self._arrays, self._first, self._result = cell.dtype, arrays, None, None
        self.inputs = accuracy.fingerprint(arrays)

    def complaint(self, name, result) -> str | None:
        """Why a library does not compute the same from the same; None when it does."""
        if accuracy.fingerprint(self._arrays) != self.inputs:
            return f"{accuracy.WRONG}: it has changed its inputs"
        if self._first is None:
            self._first, self._result = name, result
            return None
        different = accuracy.disagreement(self._result, result, self._dtype)
        return different and f"{accuracy.WRONG}: it is not {self._first}'s, {different}"


def _key(fields) -> tuple:
    """By which a record's cell is known."""
    return tuple(fields[name] for name in records.CELL) + tuple(fields.get(name) for name in records.BEYOND)


def report(runs, path, seconds) -> int:
    """Table, plots and the places of the files; exit code 1 when numbaflash failed or was wrong in a cell."""
    (run,) = runs
    print(table.tables(run.records, colour=colour_wanted()))
    try:
        drawn = plots.plot(run.records, path)
    except ImportError:
        drawn = []
        print("no plot: matplotlib is not installed")
    print(f"\n{seconds:.0f} s; {', '.join(str(p) for p in [path, *drawn])}")
    return verdict(run.records)


def verdict(found) -> int:
    """Exit code: 1, with a line that says so, when numbaflash failed or was wrong in a cell."""
    failed = [r for r in found if r["library"] in OWN and r.get("skipped")]
    if failed:
        first = table.name_of(tuple(failed[0][name] for name in records.CELL))
        print(f"{failed[0]['library']} has no time in {len(failed)} cells, first: {first}: {failed[0]['skipped']}", file=sys.stderr)
        return 1
    return 0


def main(program, passes, options, *, more=None, make=Run, report=report, drop=False) -> int:
    """Measure the grid of some options; returns the exit code.

    Parameters
    ----------
    program : str
        Name of the module that is run.
    passes : list of class of numbaflash.benchmarks.passes
        What is measured on each cell, in this order. Libraries and the name of the results are those of the first.
    options : argparse.Namespace
        From `parse`.
    more : callable, optional
        Takes the `Run` of the first pass and a function that prints a line; measures something else and returns its records.
    make : class, optional
        `Run`, or one derived from it.
    report : callable, optional
        Prints what there is to show, and returns the exit code, of the runs, the path of the results and the seconds that all took.
    drop : bool
        Leave cells out when the budget is over, instead of measuring them shortly.
    """
    reason = gpu.missing()
    if reason:
        return gpu.refuse(program, reason)
    import torch

    start = time.monotonic()
    libraries, missing = find(options.libraries, passes[0].classes)
    for name, why in missing.items():
        print(f"{name} is not measured: {why}", flush=True)
    if not libraries:
        return gpu.refuse(program, "none of the libraries can be imported")
    common = {**records.gpu_fields(), **records.run_fields(options.commit)}
    path = records.result_path(common["gpu"], passes[0].bench, options.out)
    directions = " and ".join(what.direction for what in passes)
    print(f"{common['gpu']}, driver {common['driver']}, torch {common['torch']}; {directions}, {len(options.cells)} cells", flush=True)
    progress = Progress(len(options.cells) * len(passes), directions)
    try:
        with torch.set_grad_enabled(any(what.autograd for what in passes)):
            tasks = [task for what in passes for task in make.tasks(what, options.cells, libraries)]
            built = prebuild.prebuild(tasks, progress.note, **({"timeout": options.budget / 2} if drop else {}))
            device = gpu.Gpu(options.seed)
            runs = [make(what, options, libraries, common, device, built) for what in passes]
            if options.cells:
                measure(runs, path, options.budget - (time.monotonic() - start), progress, drop)
            if more:
                runs[0].records += more(runs[0], progress.note)
                records.write(path, runs[0].records)
    except KeyboardInterrupt:
        print(f"interrupted; what was measured is in {path}", file=sys.stderr)
        return 130
    finally:
        progress.close()
    return report(runs, path, time.monotonic() - start)


def measure(runs, path, seconds, progress, drop=False):
    """Measure every cell within so many seconds, in each run, and save the records, again after each cell."""
    options, libraries = runs[0].options, len(runs[0].libraries)
    reserve = min(RESERVE_S, options.budget / 5)
    budget = timing.Budget(seconds, len(options.cells) * len(runs), options.rounds, reserve=reserve)
    for cell, run in itertools.product(options.cells, runs):
        if drop and budget.overrun > 0:
            run.skip(cell, "the budget was over", progress.note)
        else:
            target, before = budget.target_ms(libraries), time.monotonic()
            measured, spent = run.cell(cell, target, progress.note)
            budget.cell_done(measured, target, spent, time.monotonic() - before)
        save(runs, path)
        progress.step(f"{cell}, {run.what.direction}" if len(runs) > 1 else str(cell))
    if budget.overrun > 0:
        consequence = "cells were left out" if drop else "measurements were as short as they may be"
        progress.note(f"the budget was too short by {budget.overrun:.0f} s; {consequence}")
    for run in runs:
        try:
            run.add_kernel_names()
        except Exception as error:  # the times stand without the names
            progress.note(f"kernel names were not recorded: {one_line(error)}")
    save(runs, path)


def save(runs, path):
    records.write(path, [record for run in runs for record in run.records])
