"""NumPy arrays in the place of a GPU's, for kernels in Numba's CUDA simulator: all of the road of a call is taken but the driver."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from unittest import mock

import numpy as np

from numbaflash import call
from numbaflash.arrays import LIBRARIES
from numbaflash.arrays.numpy import NumPy
from numbaflash.dispatch import Device
from numbaflash.testing import Memory, Placement
from numbaflash.testing.libraries import make
from numbaflash.toolchain import simulator


class OnGpu(NumPy):
    builds_on_device = True

    def describe(self, x, name):
        return replace(super().describe(x, name), kind="cuda")

    def current_stream(self, index):
        return int


class Shifted(OnGpu):
    """New arrays begin nowhere in particular."""

    def allocator(self, like, shape, dtype):
        return lambda stream: make(Memory.filled(dtype, shape, Placement(offset=1), 0), "numpy")[1]


@contextmanager
def pretended(library, module, home, prepare: str):
    """Arrays of NumPy are those of the library, and what ``home`` calls ``prepare`` launches in the simulator: a list of launches so far.

    ``module`` is where calls look for their device.
    """
    launched = []

    def watched(*arguments, **options):
        run = simulator.prepare(*arguments, **options)
        return lambda *addresses: (launched.append(run), run(*addresses))

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(home, prepare, partial(getattr(home, prepare), make=watched)))
        stack.enter_context(mock.patch.object(module, "device_of", lambda facts: Device("cuda", 0, (9, 0))))
        stack.enter_context(mock.patch.dict(LIBRARIES, {np.ndarray: library}))
        call.forget()
        yield launched
        call.forget()
