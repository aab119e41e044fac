"""Benchmarks of numbaflash, run from the repository root: ``python -m bench.forward``, ``bench.backward``, ``bench.training``, ``bench.options``,
``bench.varlen``, ``bench.latency``, ``bench.cpu``, ``bench.simt``, and ``bench.table`` for results already on disk."""

from __future__ import annotations
