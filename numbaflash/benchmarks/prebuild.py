"""Build the kernels that a grid needs ahead of it, in several processes that share the libraries' disk caches.

``python -m numbaflash.benchmarks.prebuild TASKS.json`` is one such process: it calls each library of a task once on the task's cell and prints one
JSON object a call. `prebuild` runs them.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from .cells import AnyCell, inputs
from .peers import PREBUILT, find, one_line

WORKERS = 8


@dataclass(frozen=True)
class Task:
    """What a worker does at a time: each of some libraries computes a cell once.

    Attributes
    ----------
    what : class of numbaflash.benchmarks.passes
        What a call computes.
    cell : numbaflash.benchmarks.cells.AnyCell
    libraries : tuple of str
    """

    what: type
    cell: AnyCell
    libraries: tuple[str, ...]

    @property
    def config(self) -> tuple:
        """What its kernels depend on."""
        return self.what, *self.cell.config

    def to_json(self) -> dict:
        return {"what": f"{self.what.__module__}:{self.what.__name__}", "cell": asdict(self.cell), "libraries": self.libraries}

    @classmethod
    def from_json(cls, item: dict) -> Task:
        module, _, name = item["what"].partition(":")
        what = getattr(importlib.import_module(module), name)
        cell = {name: tuple(x) if isinstance(x, list) else x for name, x in item["cell"].items()}
        return cls(what, what.kind(**cell), tuple(item["libraries"]))


def groups(tasks, workers: int) -> list[list]:
    """Deal tasks (or cells) among so many workers; those that may share a kernel go to the same one."""
    by_config = {}
    for task in tasks:
        by_config.setdefault(task.config, []).append(task)
    hands = [[] for _ in range(max(1, min(workers, len(by_config))))]
    for n, group in enumerate(by_config.values()):
        hands[n % len(hands)].extend(group)
    return hands


def prebuild(tasks, note, *, timeout=300.0) -> list[dict]:
    """Build kernels for all tasks.

    Parameters
    ----------
    tasks : list of Task
        Libraries that keep no kernels on disk are left out.
    note : callable
        Takes a line of text: what was built, and what failed (a cell that fails here is tried again, and reported, when it is measured).
    timeout : float
        Seconds for all of it; workers that need more are ended.

    Returns
    -------
    list of dict
        ``what`` (the name of the class), ``library``, ``cell``, ``seconds`` and ``evidence`` of each call, or ``error``.
    """
    tasks = [Task(task.what, task.cell, tuple(name for name in task.libraries if name in PREBUILT)) for task in tasks]
    hands = groups([task for task in tasks if task.libraries], min(WORKERS, max(1, (os.cpu_count() or 2) // 2)))
    if len(hands) < 2:
        return []
    start, results = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="numbaflash-bench-") as folder:
        workers = []
        try:
            for n, hand in enumerate(hands):
                todo, done = Path(folder, f"{n}.json"), Path(folder, f"{n}.out")
                todo.write_text(json.dumps([task.to_json() for task in hand]))
                with done.open("w") as out:
                    command = [sys.executable, "-m", "numbaflash.benchmarks.prebuild", str(todo)]
                    workers.append((subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL), done))
            for worker, done in workers:
                try:
                    worker.wait(max(0.1, start + timeout - time.monotonic()))
                except subprocess.TimeoutExpired:
                    note(f"prebuild: a worker was ended after {timeout:.0f} s")
                    worker.kill()
                    worker.wait()
                results += [json.loads(line) for line in done.read_text().splitlines() if line.startswith("{") and line.endswith("}")]
        finally:
            for worker, _ in workers:
                if worker.poll() is None:
                    worker.kill()
                    worker.wait()
    note(summary(results, len(hands), time.monotonic() - start))
    return results


def summary(results, workers: int, seconds: float) -> str:
    """One line: the longest first call of each library, and the failures."""
    parts = []
    for name in dict.fromkeys(r["library"] for r in results):
        own = [r for r in results if r["library"] == name]
        took = [r["seconds"] for r in own if "seconds" in r]
        failed = len(own) - len(took)
        slowest = f", slowest first call {max(took):.1f} s" if took else ""
        parts.append(f"{name} {len(took)} cells{slowest}" + (f", {failed} failed" if failed else ""))
    return f"prebuild: {seconds:.0f} s in {workers} processes; " + ("; ".join(parts) or "nothing was built")


def evidence(what, library, arrays, cell) -> dict:
    """Evidence of a library, or ``evidence_error``: one that computes and does not say how is measured all the same."""
    try:
        return what.evidence(library, arrays, cell)
    except Exception as error:
        return {"evidence_error": one_line(error)}


def main(arguments) -> int:
    import torch

    (path,) = arguments
    libraries = {}
    for task in map(Task.from_json, json.loads(Path(path).read_text())):
        found = libraries.setdefault(task.what, {})
        found |= find([name for name in task.libraries if name not in found], task.what.classes)[0]
        with torch.set_grad_enabled(task.what.autograd):
            for library in map(found.get, task.libraries):
                if library and library.has(task.cell) and not library.unfit(task.cell, torch.cuda.mem_get_info()[0], task.what.direction):
                    print(json.dumps(first_call(task.what, task.cell, library, torch.cuda)), flush=True)
    return 0


def first_call(what, cell, library, cuda) -> dict:
    """How long the first call took, and its evidence, or the error."""
    report = {"what": what.__name__, "library": library.name, "cell": str(cell)}
    try:
        arrays = inputs(cell, operands=what.operands)
        cuda.synchronize()
        start = time.monotonic()
        what.bind(library, arrays, cell)()
        cuda.synchronize()
        report["seconds"] = time.monotonic() - start
        report["evidence"] = evidence(what, library, arrays, cell)
    except Exception as error:  # one library's failure must not keep the others from being built
        report["error"] = one_line(error)
    return report


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
