"""Benchmarks of numbaflash, run from the repository root: ``python -m bench.forward``, ``bench.backward``, ``bench.training``, ``bench.options``,
``bench.varlen``, ``bench.decode``, ``bench.serving``, ``bench.latency``, ``bench.cpu``, ``bench.simt``, ``bench.counters`` and ``bench.roofline``.
``numbaflash bench show`` prints results already on disk."""

from __future__ import annotations
