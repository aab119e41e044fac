"""Cells measured with several libraries, whose results are compared before they are timed.

Every library's result is compared with float64 on a sample, and as a whole with that of the first library, and its inputs must be what they were;
one that is wrong, fails or does not fit is reported and left out of that cell.
"""

from __future__ import annotations

import itertools
import sys
import time

from . import accuracy, evidence, prebuild, records, tables, timing
from .peers import OWN, one_line
from .prebuild import Task

RESERVE_S = 15.0  # of the budget, for the evidence, the plots and the table
NO_TIME = "the budget was over"


class Run:
    """One run over a grid: measures the cells and gathers the records.

    Parameters
    ----------
    what : class of numbaflash.benchmarks.passes
        What a call computes.
    options : argparse.Namespace
        Has ``cells``, ``rounds`` and ``budget`` (seconds).
    libraries : dict of str to Library
    common : dict
        Fields of every record.
    device : numbaflash.benchmarks.gpu.Gpu
    built : list of dict
        From `prebuild.prebuild`: evidence that need not be gathered again.
    """

    def __init__(self, what, options, libraries, common, device, built=()):
        self.what, self.options, self.libraries, self.common, self.device = what, options, libraries, common, device
        self.told, self.records = {}, []
        self.learn(built)

    def learn(self, built):
        """Take evidence from `prebuild.prebuild`, which need not be gathered again."""
        self.told |= {(r["library"], r["cell"]): r["evidence"] for r in built if "evidence" in r and r["what"] == self.what.__name__}

    @staticmethod
    def tasks(what, cells, libraries) -> list[Task]:
        """What is to be built before cells are measured."""
        return [Task(what, cell, tuple(libraries)) for cell in cells]

    def cell(self, cell, target_ms, note) -> tuple[int, float]:
        """Check and time every library on a cell; returns how many were timed, and the seconds that took."""
        admitted = self.admit(cell, note)
        start = time.monotonic()
        calls = {name: call for name, (call, _) in admitted.items()}
        measured = timing.measure(self.device, calls, rounds=self.options.rounds, target_ms=target_ms)
        for name, times in measured.items():
            if times.error is None:
                self.timed(cell, name, times, admitted[name][1], note)
            else:
                self.still_alive(times.error)
                self.left_out(cell, name, one_line(times.error), note)
        return len(calls), time.monotonic() - start

    def admit(self, cell, note) -> dict:
        """(`timing.Call` of the library on the next input set, facts for the record) of each library whose results are right."""
        need, free = self.what.room(cell, self.device.l2_bytes), self.device.free_bytes()
        if free is not None and need > free:
            self.skip(cell, f"its arrays take {need / 2**30:.1f} GiB, {free / 2**30:.1f} GiB are free", note)
            return {}
        try:
            sets = self.what.inputs(self.device, cell)
            sample = self.what.sample(cell, *self.what.arrays(sets))
            agreement = Agreement(cell, self.what.compared(sets))
        except Exception as error:  # out of memory, most likely: the other cells are still measured
            self.still_alive(error)
            self.skip(cell, one_line(error), note)
            return {}
        admitted = {}
        for name, library in self.having(cell).items():
            try:
                reason = library.unfit(cell, self.device.free_bytes(), self.what.direction)
                if reason is None:
                    call, facts, reason = self._admit(library, sets, cell, sample, agreement, note)
                if reason is None:
                    admitted[name] = call, facts
            except Exception as error:  # whatever a library raises, the others are still measured
                reason = one_line(error)
                self.still_alive(error)
            if reason is not None:
                self.left_out(cell, name, reason, note)
        return admitted

    def timed(self, cell, name, times, facts, note) -> dict:
        """Keep the times of a library as a record, and return it."""
        numbers = times.summary()
        if times.host_bound:
            note(f"{cell}: {name} waits for the device in each call; its times hold host time too")
        if self.device.kind == "cpu":
            numbers = {key: x for key, x in numbers.items() if not key.startswith("host_")}  # the host is the device
        return self._record(cell, name, {**numbers, **self.what.figures(cell, numbers["ms"]), **facts})

    def skip(self, cell, reason, note) -> None:
        """Record of every library why it was not measured on a cell."""
        for name in self.having(cell):
            self._record(cell, name, {"ms": None, "tflops": None, "skipped": reason})
        note(f"{cell}: left out: {reason}")

    def left_out(self, cell, name, reason, note):
        """Record and tell why a library was not measured on a cell."""
        self._record(cell, name, {"ms": None, "tflops": None, "skipped": reason})
        note(f"{cell}: {name} left out: {reason}")

    def having(self, cell) -> dict:
        """The libraries in which there is such a thing."""
        return {name: library for name, library in self.libraries.items() if library.has(cell)}

    def _admit(self, library, sets, cell, sample, agreement, note):
        """(`timing.Call`, facts for the record, None), or (None, {}, what is wrong)."""
        with library.scope():
            first, turn = self.what.calls(library, sets, cell)
            result = library.rows(first(), cell.structure)
            error, complaint = sample.judge(result)
            complaint = complaint or accuracy.other_dtype(result, cell.dtype) or agreement.complaint(library.name, result)
            if complaint:
                return None, {}, complaint
            told = self.told.get((library.name, str(cell)))
            told = prebuild.evidence(self.what, library, self.what.arrays(sets), cell) if told is None else told
            call, more = self.what.timed_call(self.device, library, sets, cell, turn, sample, lambda text: note(f"{cell}: {library.name}{text}"))
        facts = {"input_sets": self.what.count(sets), "inputs": agreement.inputs, "error_per_tolerance": error, **told, **more}
        return call, facts, None

    def still_alive(self, error):
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
        cells = {records.cell_of(cell.fields()): cell for cell in self.options.cells}

        def calls():
            sets, last = None, None
            for record in timed:
                cell = cells[records.cell_of(record)]
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


class Agreement:
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


def measure(runs, save, seconds, progress, drop=False):
    """Measure every cell of some runs within so many seconds.

    Parameters
    ----------
    runs : list of Run
        Those that have the same cells are measured cell by cell.
    save : callable
        Called after each cell.
    seconds : float
    progress : Progress
    drop : bool
        Leave cells out when the time is over, instead of measuring them shortly.
    """
    todo = [(cell, run) for cells, group in _by_cells(runs) for cell, run in itertools.product(cells, group)]
    rounds = max((run.options.rounds for run in runs), default=1)
    budget = timing.Budget(seconds, len(todo), rounds, reserve=min(RESERVE_S, seconds / 5))
    for cell, run in todo:
        if drop and budget.overrun > 0:
            run.skip(cell, NO_TIME, progress.note)
        else:
            target, before = budget.target_ms(len(run.having(cell))), time.monotonic()
            measured, spent = run.cell(cell, target, progress.note)
            budget.cell_done(measured, target, spent, time.monotonic() - before)
        save()
        progress.step(f"{cell}, {run.what.direction}" if len(runs) > 1 else str(cell))
    if budget.overrun > 0:
        consequence = "cells were left out" if drop else "measurements were as short as they may be"
        progress.note(f"the budget was too short by {budget.overrun:.0f} s; {consequence}")


def _by_cells(runs):
    """Runs with the same cells, together."""
    groups = {}
    for run in runs:
        groups.setdefault(tuple(run.options.cells), []).append(run)
    return groups.items()


def add_kernel_names(runs, note) -> None:
    """`Run.add_kernel_names` of each run, as far as the profiler can tell them."""
    for run in runs:
        try:
            run.add_kernel_names()
        except Exception as error:  # the times stand without the names
            note(f"kernel names were not recorded: {one_line(error)}")


def verdict(found) -> int:
    """Exit code: 1, with a line that says so, when numbaflash failed or was wrong in a cell."""
    failed = [r for r in found if r["library"] in OWN and r.get("skipped")]
    if failed:
        first = failed[0]
        where = tables.name_of(records.cell_of(first))
        print(f"{first['library']} has no time in {len(failed)} cells, first: {where}: {first['skipped']}", file=sys.stderr)
        return 1
    return 0
