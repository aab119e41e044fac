"""Results of the simt kernels in Numba's CUDA simulator: `simulator_cases`, all in one process, whose import of numba decides for the simulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import packed_cases
import pytest
import simulator_cases


@pytest.fixture(scope="module")
def simulator():
    """Error (or None) of every case in the simulator."""
    path = Path(simulator_cases.__file__)
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1", "PYTHONPATH": os.pathsep.join([str(path.parents[1]), *sys.path])}
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, env=environment)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {line["case"]: line["error"] for line in lines}, done


DRAWN = ("drawn by Hypothesis", "options drawn by Hypothesis")
BACKWARD_NAMES = [f"backward: {name}" for name in (*simulator_cases.backward_cases(), *DRAWN)]
PACKED_NAMES = [f"packed: {name}" for name in packed_cases.CASES]
DECODE_NAMES = [f"decode: {name}" for name in (*simulator_cases.decode_cases(), DRAWN[0])]
LIST_NAMES = [f"lists: {name}" for name in simulator_cases.list_cases()]
TURN_NAMES = [f"turns: {name}" for name in simulator_cases.turn_cases()]


NAMES = [*simulator_cases.cases(), *DRAWN, *BACKWARD_NAMES, *PACKED_NAMES, *DECODE_NAMES, *LIST_NAMES, *TURN_NAMES]


@pytest.mark.parametrize("name", NAMES)
def test_simulator(simulator, name):
    results, done = simulator
    assert name in results, done.stderr[-4000:]
    assert results[name] is None, results[name]


def test_no_other_case(simulator):
    """Whatever ran is asked for above."""
    results, _ = simulator
    assert set(results) == set(NAMES)
