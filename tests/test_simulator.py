"""The properties of attention on the simt kernels without a GPU: `test_properties` again, in Numba's CUDA simulator.

A process of its own, because numba decides for the simulator when it is imported.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numba
import pytest

FOLDER = Path(__file__).resolve().parent


@pytest.mark.skipif(bool(numba.config.ENABLE_CUDASIM), reason="this process is the simulator already")
def test_properties_in_the_simulator():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu", str(FOLDER / "test_properties.py")]
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1", "HYPOTHESIS_PROFILE": "simulator"}
    done = subprocess.run(command, cwd=FOLDER.parent, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed and int(passed[1]) >= 17 and "skipped" not in done.stdout, done.stdout


SHARED = """
import time
import numpy as np
from numba import cuda, int32
from numba.cuda.simulator import kernelapi
from numbaflash.toolchain import simulator


class Slow:
    def __getattr__(self, name):
        return getattr(np, name)

    def empty(self, *arguments):
        time.sleep(0.01)
        return np.zeros(*arguments)


@cuda.jit
def count(out):
    ones = cuda.shared.array(32, int32)
    ones[cuda.threadIdx.x] = 1
    cuda.syncthreads()
    out[cuda.threadIdx.x] = np.sum(ones)


kernelapi.np = Slow()
out = np.zeros(32, np.int64)
with simulator.taking_turns():
    count[1, 32](out)
assert (out == 32).all(), out
"""


TURNS = """
import numpy as np
from numba import cuda, int32
from numbaflash.toolchain import simulator


@cuda.jit
def neighbours(out, wait, rounds):
    numbers = cuda.shared.array(32, int32)
    thread, block = cuda.threadIdx.x, cuda.blockIdx.x
    numbers[thread] = -1
    cuda.syncthreads()
    for turn in range(rounds):
        numbers[thread] = 100 * turn + thread
        if wait:
            cuda.syncthreads()
        out[block, turn, thread] = numbers[thread ^ 1] == 100 * turn + (thread ^ 1)
        cuda.syncthreads()


@cuda.jit
def some_leave(out):
    thread = cuda.threadIdx.x
    if thread < 5:
        return
    cuda.syncthreads()
    out[thread] = cuda.syncthreads_count(thread > 6)


@cuda.jit
def fails(out):
    cuda.syncthreads()
    if cuda.threadIdx.x == 3:
        raise ValueError("thread 3 has no 1")
    cuda.syncthreads()
    out[cuda.threadIdx.x] = 1


with simulator.taking_turns():
    good, bad, again = (np.zeros((3, 20, 32), bool) for _ in range(3))
    neighbours[3, 32](good, True, 20)
    neighbours[3, 32](bad, False, 20)
    neighbours[3, 32](again, False, 20)
    assert good.all()
    assert (bad[..., ::2] != bad[..., 1::2]).all(), "the first of two threads finds nothing yet"
    assert len(np.unique(bad.reshape(60, 32), axis=0)) > 50, "another order each time"
    assert (bad == again).all(), "the same each time"
    counts = np.zeros(8, np.int64)
    some_leave[1, 8](counts)
    assert counts.tolist() == [0] * 5 + [1] * 3, counts
    out = np.zeros(8, np.int64)
    try:
        fails[1, 8](out)
    except ValueError as error:
        assert "thread 3 has no 1" in str(error) and "tid=[3, 0, 0]" in str(error), error
    else:
        raise AssertionError("the error is lost")
    assert not out.any()
"""


@pytest.mark.skipif(bool(numba.config.ENABLE_CUDASIM), reason="this process is the simulator already")
@pytest.mark.parametrize("code", [SHARED, TURNS], ids=["however long the first one takes to make them", "and a missing barrier is seen"])
def test_threads_of_a_block_share_their_arrays(code):
    """By itself, Numba's simulator gives some threads an array of their own."""
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=FOLDER.parent, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
