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
    assert passed and int(passed[1]) >= 16 and "skipped" not in done.stdout, done.stdout


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
simulator.allocate_once()
out = np.zeros(32, np.int64)
count[1, 32](out)
assert (out == 32).all(), out
"""


@pytest.mark.skipif(bool(numba.config.ENABLE_CUDASIM), reason="this process is the simulator already")
def test_threads_of_a_block_share_their_arrays():
    """However long the first one takes to make them: by itself, Numba's simulator gives some threads an array of their own."""
    environment = os.environ | {"NUMBA_ENABLE_CUDASIM": "1"}
    done = subprocess.run([sys.executable, "-c", SHARED], cwd=FOLDER.parent, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
