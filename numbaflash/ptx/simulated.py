"""Exchange among the lanes of a warp in the CUDA simulator, which has threads but no warps."""

from __future__ import annotations

import threading


def exchange(values, mask):
    """The values of the thread of the block whose number differs by ``mask``.

    A barrier of the whole block, so all its threads must take part, as all lanes of a warp must on the GPU.
    """
    thread = threading.current_thread()
    slots = thread._manager.__dict__.setdefault("exchange_slots", {})
    slots[thread.thread_id] = values
    thread.syncthreads()
    received = slots[thread.thread_id ^ mask]
    thread.syncthreads()
    return received


def nothing():
    """What the simulator does where the GPU has to wait for what is not instantaneous there."""
