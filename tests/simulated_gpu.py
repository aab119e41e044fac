"""What the benchmarks' tests have in the place of a GPU: two clocks, and a library that pretends to launch; importing it finds `bench`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from numbaflash.benchmarks import cells, peers  # noqa: E402


class Event:
    def __init__(self, device):
        self.device, self.time = device, None

    def record(self):
        self.time = max(self.device.busy_until, self.device.host)

    def query(self):
        return self.device.host >= self.time

    def synchronize(self):
        self.device.host = max(self.device.host, self.time)

    def elapsed_time(self, other):
        return other.time - self.time


class SimulatedDevice:
    """A host and a device with a clock each, in milliseconds."""

    kind, method, l2_bytes = "cuda", "simulated", 1000

    def __init__(self):
        self.host = self.busy_until = 0.0
        self.log = []

    def event(self):
        return Event(self)

    def work(self, ms):
        self.busy_until = max(self.busy_until, self.host) + ms

    spin = work

    def call(self, name, host_ms, device_ms, waits=False):
        def run():
            self.log.append(name)
            self.host += host_ms
            self.work(device_ms)
            if waits:
                self.host = self.busy_until

        return run

    def inputs(self, cell, operands=("q", "k", "v"), number=0):
        pytest.importorskip("torch")
        return cells.inputs(cell, operands=operands, device="cpu")

    def free_bytes(self):
        return 2**30

    def recover(self):
        pass


class OnCpu(peers.Library):
    """A library that computes on the CPU and pretends to have launched something."""

    version = "0"

    def __init__(self, name, device, ms, *, spoil=None, unfit=None, fails=False):
        self.name, self.device, self.ms, self.spoil, self.reason, self.fails = name, device, ms, spoil, unfit, fails

    @property
    def _torch(self):
        import torch

        return torch

    def unfit(self, cell, free_bytes, direction="forward"):
        return self.reason

    def bind(self, q, k, v, causal):
        out = self.exact(q, k, v, causal).detach()
        if self.spoil is not None:
            out[(-1,) * out.dim()] = self.spoil
        return self.launching(lambda: out)

    def exact(self, q, k, v, causal):
        import torch

        hidden = peers.hidden_keys(torch, q.shape[1], k.shape[1], "cpu") if causal else None
        return peers.dense(torch, *(x.double() for x in (q, k, v)), hidden).to(q.dtype)

    def launching(self, call):
        launch = self.device.call(self.name, 0.01, self.ms)

        def launched():
            if self.fails:
                raise RuntimeError("no such kernel")
            launch()
            return call()

        return launched

    def bind_autograd(self, q, k, v, causal):
        return lambda: self.exact(q, k, v, causal)

    def bind_backward(self, dout, q, k, v, causal):
        gradients = super().bind_backward(dout, q, k, v, causal)()
        if self.spoil is not None:
            gradients[2][(-1,) * gradients[2].dim()] = self.spoil
        return self.launching(lambda: gradients)

    def bind_training(self, dout, q, k, v, causal):
        return self.launching(super().bind_training(dout, q, k, v, causal))

    def evidence(self, q, k, v, causal, direction="forward"):
        if self.name == "cudnn":
            raise RuntimeError("does not tell")
        return {"family": f"family of {self.name}", **({"workspace_bytes": 2**20} if direction == "backward" else {})}
