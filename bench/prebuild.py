"""Build the kernels that a grid needs ahead of it, in several processes that share the libraries' disk caches.

``python -m bench.prebuild DIRECTION LIBRARY[,LIBRARY] CELLS.json`` is one such process: it calls each library once on each cell and
prints one JSON object a call. `prebuild` runs them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .cells import from_json, inputs, to_json
from .passes import PASSES, Forward
from .peers import PREBUILT, find, one_line

WORKERS = 8


def groups(cells, workers: int) -> list[list]:
    """Deal the cells among so many workers; cells that may share a kernel go to the same one."""
    by_config = {}
    for cell in cells:
        by_config.setdefault(cell.config, []).append(cell)
    hands = [[] for _ in range(max(1, min(workers, len(by_config))))]
    for n, group in enumerate(by_config.values()):
        hands[n % len(hands)].extend(group)
    return hands


def prebuild(cells, libraries, note, *, what=Forward, timeout=300.0) -> list[dict]:
    """Build kernels for all cells.

    Parameters
    ----------
    cells : list of Cell
    libraries : iterable of str
    note : callable
        Takes a line of text: what was built, and what failed (a cell that fails here is tried again, and reported, when it is measured).
    what : class of bench.passes
        What a call computes.
    timeout : float
        Seconds for all of it; workers that need more are ended.

    Returns
    -------
    list of dict
        ``library``, ``cell``, ``seconds`` and ``evidence`` of each call, or ``error``.
    """
    names = [name for name in libraries if name in PREBUILT]
    hands = groups(cells, min(WORKERS, max(1, (os.cpu_count() or 2) // 2)))
    if not names or len(hands) < 2:
        return []
    start, results = time.monotonic(), []
    with tempfile.TemporaryDirectory(prefix="numbaflash-bench-") as folder:
        workers = []
        try:
            for n, hand in enumerate(hands):
                todo, done = Path(folder, f"{n}.json"), Path(folder, f"{n}.out")
                todo.write_text(json.dumps(to_json(hand)))
                with done.open("w") as out:
                    command = [sys.executable, "-m", "bench.prebuild", what.direction, ",".join(names), str(todo)]
                    workers.append((subprocess.Popen(command, stdout=out, stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[1]), done))
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


def evidence(what, library, arrays, causal) -> dict:
    """Evidence of a library, or ``evidence_error``: one that computes and does not say how is measured all the same."""
    try:
        return what.evidence(library, arrays, causal)
    except Exception as error:
        return {"evidence_error": one_line(error)}


def main(arguments) -> int:
    import torch

    direction, names, path = arguments
    what = PASSES[direction]
    found, _ = find(names.split(","))
    with torch.set_grad_enabled(what.autograd):
        for cell in from_json(json.loads(Path(path).read_text())):
            for name, library in found.items():
                report = {"library": name, "cell": str(cell)}
                try:
                    arrays = inputs(cell, operands=what.operands)
                    torch.cuda.synchronize()
                    start = time.monotonic()
                    what.bind(library, arrays, cell.causal)()
                    torch.cuda.synchronize()
                    report["seconds"] = time.monotonic() - start
                    report["evidence"] = evidence(what, library, arrays, cell.causal)
                except Exception as error:  # one library's failure must not keep the others from being built
                    report["error"] = one_line(error)
                print(json.dumps(report), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
