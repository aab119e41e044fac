"""What ``numbaflash bench`` measures: cells of prefill, gradients, decoding and options, on the GPU or on the CPU."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

from . import KINDS, passes, peers, records
from .cells import AnyCell, grid, heads_of
from .running import Run

WITH_TORCH = ("decode", "batched-decode", "options", "options-backward")
"""Kinds whose cells are torch tensors, on the CPU too."""

OURS, DETERMINISTIC, PLAIN = peers.OURS, peers.OURS_DETERMINISTIC, peers.OURS_PLAIN
LIBRARIES = {
    "cuda": {
        "prefill": (OURS, "fa4", "cudnn", "fa2", "flex", "flashinfer", "dense"),
        "backward": (OURS, DETERMINISTIC, "fa4", "cudnn", "fa2", "flex", "dense"),
        "decode": (OURS, "fa4", "cudnn", "fa2", "efficient", "flashinfer"),
        "options": (OURS, PLAIN, "fa4", "cudnn", "fa2", "efficient", "flex"),
    },
    "cpu": {
        "prefill": (OURS, "sdpa"),
        "backward": (OURS, "sdpa"),
        "decode": (OURS, "sdpa"),
        "options": (OURS, PLAIN, "sdpa"),
    },
}
"""What is measured by default, as far as it is installed, on each kind of device."""
MORE = {"cuda": ("efficient", "sdpa", "cupy"), "cpu": ("dense", "numpy", "flex")}
"""What can be asked for besides."""
LIKE = {"batched-decode": "decode", "options-backward": "options"}
"""Kinds that are measured with the libraries of another."""


@dataclass
class Plan:
    """Cells of each kind, in the order of `KINDS`.

    Parameters
    ----------
    device : str
        "cuda" or "cpu".
    kinds : iterable of str
        Of `KINDS`.
    dtypes, dims, seqlens, heads, causal : list
        As `cells.grid` takes them, of prefill, gradients and options.
    tokens : int
        Of a batch there: so many over the length are its sequences, one at least.
    contexts, requests, page_sizes, new_tokens : list of int
        Of decoding: keys of a sequence; sequences, of ``"batched-decode"``; keys of a page, 0 for contiguous caches; queries of a sequence.
    options : list of str
        Of `optional.OPTIONS`.
    libraries : list of str, optional
        Nothing but these.
    """

    device: str
    kinds: Iterable[str]
    dtypes: list[str]
    dims: list[int]
    seqlens: list[int]
    heads: list[str]
    causal: list[bool]
    tokens: int
    contexts: list[int]
    requests: list[int]
    page_sizes: list[int]
    new_tokens: list[int]
    options: list[str]
    libraries: list[str] | None = None
    missing: dict[str, str] = field(default_factory=dict)

    @cached_property
    def groups(self) -> dict[str, tuple[type, list[AnyCell]]]:
        """(class of `passes`, cells) of each kind that is asked for."""
        found = {}
        for kind in (kind for kind in KINDS if kind in self.kinds):
            what, cells = self._group(kind)
            if cells:
                found[kind] = what, cells
        return found

    def _group(self, kind) -> tuple[type, list[AnyCell]]:
        plain = grid(dtypes=self.dtypes, dims=self.dims, seqlens=self.seqlens, causal=self.causal, heads=self.heads, tokens=self.tokens)
        if kind == "prefill":
            return passes.Forward, plain
        if kind == "backward":
            return passes.Backward, plain
        if kind in ("decode", "batched-decode"):
            from .decoding import Decode

            return Decode, self._decoded((1,) if kind == "decode" else self.requests)
        from .optional import OptionBackward, OptionCell, OptionForward

        cells = [
            OptionCell(cell.dtype, cell.batch, cell.seqlen, cell.heads, cell.kv_heads, cell.head_dim, cell.causal, option)
            for cell, option in product(plain, self.options)
        ]
        return (OptionForward if kind == "options" else OptionBackward), cells

    def _decoded(self, requests):
        from .decoding import DecodeCell

        return [
            DecodeCell(f"{count} of {context}", (context,) * count, *heads_of(kind, dim), dim, page, tokens, dtype)
            for dtype, kind, dim, count, context, tokens, page in product(
                self.dtypes, self.heads, self.dims, requests, self.contexts, self.new_tokens, self.page_sizes
            )
            if context >= tokens
        ]

    def libraries_of(self, kind, what) -> dict[str, peers.Library]:
        """Those that are installed and asked for; why another is not there is kept in ``missing``."""
        wanted = LIBRARIES[self.device][LIKE.get(kind, kind)]
        if self.libraries is not None:
            wanted = [name for name in self.libraries if name in what.classes] + ([PLAIN] if "options" in kind and OURS in self.libraries else [])
        elif importlib.util.find_spec("torch") is None:
            wanted = [OURS, "numpy"] if kind == "prefill" else [OURS]
        found, missing = peers.find(wanted, what.classes)
        self.missing |= {name: why for name, why in missing.items() if name not in self.missing}
        return found

    def runs(self, device, common: dict, rounds: int) -> dict[str, Run]:
        """A run of each kind of which a library is there.

        Parameters
        ----------
        device : numbaflash.benchmarks.gpu.Gpu or numbaflash.benchmarks.cpu.Cpu
        common : dict
            Fields of every record.
        rounds : int
            Measurements of each library in a cell.
        """
        made = {}
        for kind, (what, cells) in self.groups.items():
            options = argparse.Namespace(cells=cells, rounds=rounds)
            libraries = self.libraries_of(kind, what)
            if libraries:
                made[kind] = _class_of(kind)(what, options, libraries, common, device)
        return made


def _class_of(kind) -> type[Run]:
    if "options" not in kind:
        return Run
    from .optional import Run as WithPlain

    return WithPlain


def device_fields(kind: str) -> dict:
    """Fields of every record that say where it was measured."""
    if kind == "cuda":
        return records.gpu_fields()
    import numba

    from .cpu import processor

    found = {"gpu": processor(), "threads": numba.get_num_threads(), "torch": None, "torch_threads": None}
    if importlib.util.find_spec("torch") is not None:
        import torch

        found |= {"torch": torch.__version__, "torch_threads": torch.get_num_threads()}
    return found
