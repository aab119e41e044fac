"""Cases of `numbaflash.decode` for every family, and how to run one: unused slots hold NaN, unused entries of page tables hold anything."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from hypothesis import strategies as st

import numbaflash
from numbaflash import dispatch, testing
from numbaflash.problem import make_decode_problem
from numbaflash.testing import Memory, Placement, compare, expected
from numbaflash.testing.libraries import make, to_numpy
from numbaflash.testing.values import decode, encode, rounded

GARBAGE = (-1, 2**31 - 1, -(2**31), 0, 12345)
"""Numbers in entries of a page table that nobody uses."""


@dataclass(frozen=True)
class DecodeCase:
    """One call.

    Attributes
    ----------
    lengths : tuple of int
        Of the sequences; may lie outside of the capacity.
    page_size : int or None
        None: contiguous caches.
    spare : int
        Keys (pages) of the capacity beyond the longest sequence.
    shared : int
        Pages that all sequences begin with, as far as they have them.
    latent : bool
        Values are the first part of the keys' memory.
    hidden : float
        What unused slots hold.
    cache : Placement
        How the caches lie.
    """

    lengths: tuple[int, ...] = (70, 0, 33)
    page_size: int | None = 16
    spare: int = 2
    shared: int = 0
    seqlen_q: int = 1
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    head_dim_v: int = 64
    dtype: str = "float32"
    lengths_dtype: str = "int32"
    options: dict = field(default_factory=dict)
    with_sinks: bool = False
    alibi_per_batch: bool | None = None
    latent: bool = False
    num_splits: int | None = None
    hidden: float = np.nan
    cache: Placement = Placement()
    seed: int = 0

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @cached_property
    def values(self) -> dict[str, np.ndarray]:
        """Every array in float64 or int64, floats rounded to the dtype."""
        rng = np.random.default_rng(self.seed)
        longest, size = max((0, *self.lengths)), self.page_size
        found = {"seqlens_k": np.array(self.lengths, np.int64).reshape(self.batch)}
        if size is None:
            rows = (self.batch, longest + self.spare)
            used = np.arange(rows[1]) < found["seqlens_k"][:, None]
        else:
            counts = np.clip(-(-found["seqlens_k"] // size), 0, None)
            max_pages = int(counts.max(initial=0)) + self.spare
            pages = int(counts.sum()) + 3
            table = rng.choice(GARBAGE, (self.batch, max_pages))
            order = iter(rng.permutation(pages))
            common = [next(order) for _ in range(min(self.shared, max(counts, default=0)))]
            used = np.zeros((pages, size), bool)
            for b, count in enumerate(counts):
                table[b, :count] = [*common[:count], *(next(order) for _ in range(count - len(common)))]
                for n in range(count):
                    used[table[b, n]] |= np.arange(n * size, (n + 1) * size) < self.lengths[b]
            found["page_table"] = table
            rows = used.shape
        for name, dim in (("k", self.head_dim), ("v", self.head_dim_v)):
            x = rounded(rng.standard_normal((*rows, self.kv_heads, dim)), self.dtype)
            found[name] = np.where(used[..., None, None], x, self.hidden)
        if self.latent:
            found["v"] = found["k"][..., : self.head_dim_v]
        found["q"] = rounded(rng.standard_normal((self.batch, self.seqlen_q, self.heads, self.head_dim)), self.dtype)
        if self.with_sinks:
            found["sinks"] = rounded(rng.standard_normal(self.heads), "float32")
        if self.alibi_per_batch is not None:
            found["alibi_slopes"] = rounded(rng.uniform(0, 0.2, (self.batch, self.heads)[not self.alibi_per_batch :]), "float32")
        return found

    def dtype_of(self, name: str) -> str:
        if name in ("q", "k", "v", "out"):
            return self.dtype
        double = self.dtype == "float64" and name in ("sinks", "lse")
        return {"seqlens_k": self.lengths_dtype, "page_table": "int32"}.get(name, "float64" if double else "float32")

    @cached_property
    def problem(self):
        told = {name: (x.shape, self.dtype_of(name)) for name, x in self.values.items() if name not in ("q", "k", "v")}
        return make_decode_problem(*(self.values[name].shape for name in "qkv"), (self.dtype,) * 3, **told, **self.options)

    @cached_property
    def expected(self):
        others = {name: x for name, x in self.values.items() if name not in ("q", "k", "v")}
        return expected(self.problem, *(self.values[name] for name in "qkv"), **others)

    def memory(self, name: str) -> Memory:
        """An operand's memory; results hold NaN."""
        placement = self.cache if name in ("k", "v") else Placement()
        if name in ("out", "lse"):
            return Memory.filled(self.dtype_of(name), self.problem.shape_of(name), placement, testing.SENTINEL[self.dtype_of(name)])
        dtype = self.dtype_of(name)
        memory = Memory.filled(dtype, self.values[name].shape, placement, testing.SENTINEL.get(dtype, 7))
        with np.errstate(invalid="ignore"):
            memory.view()[...] = encode(self.values[name], dtype).reshape(self.values[name].shape)
        return memory

    def arrays(self, library: str = "numpy", results: bool = False) -> dict:
        """Arguments of `numbaflash.decode`, with results to write where ``results`` is True."""
        names = {"k": "k_cache", "v": "v_cache"}
        wanted = (*self.values, *(("out", "lse") if results else ()))
        found = {names.get(name, name): make(self.memory(name), library)[1] for name in wanted}
        if self.latent:
            found["v_cache"] = found["k_cache"][..., : self.head_dim_v]
        return found

    def run(self, family: str | None = None, library: str = "numpy", results: bool = False):
        """Call `numbaflash.decode`, check ``out`` and ``lse`` and return them in float64."""
        arrays = self.arrays(library, results)
        with dispatch.use_family(family):
            out, lse = numbaflash.decode(**arrays, **self.options, num_splits=self.num_splits, return_lse=True)
        if results:
            assert out is arrays["out"] and lse is arrays["lse"]
        for name in self.values:
            given = to_numpy(arrays[{"k": "k_cache", "v": "v_cache"}.get(name, name)])
            want = decode(encode(self.values[name], self.dtype_of(name)), self.dtype_of(name)).reshape(self.values[name].shape)
            np.testing.assert_array_equal(given, want, err_msg=f"{name} was written")
        compare(self.expected, out, lse)
        return to_numpy(out), to_numpy(lse)


CASES = {
    "plain": DecodeCase(),
    "contiguous": DecodeCase(page_size=None, spare=5),
    "one sequence": DecodeCase((130,)),
    "no sequence": DecodeCase(()),
    "no key": DecodeCase((0, 0)),
    "no capacity": DecodeCase((0, 0), spare=0),
    "one key": DecodeCase((1, 1), heads=2),
    "full": DecodeCase((64, 48), spare=0),
    "lengths beyond the capacity": DecodeCase((-3, 64), spare=0, lengths_dtype="int64"),
    "pages of 1": DecodeCase(page_size=1),
    "pages of 5": DecodeCase((70, 3, 33), page_size=5),
    "pages of 64": DecodeCase((200, 64, 65), page_size=64),
    "pages of 100": DecodeCase((250, 100, 99), page_size=100, seqlen_q=2, options={"causal": True}),
    "pages of 256": DecodeCase((300, 7), page_size=256),
    "shared pages": DecodeCase((90, 70, 40, 90), shared=3),
    "several queries": DecodeCase(seqlen_q=5),
    "several queries, causal": DecodeCase((70, 3, 1, 0), seqlen_q=4, options={"causal": True}),
    "many queries": DecodeCase((90, 64), seqlen_q=64, options={"causal": True}),
    "many queries, contiguous": DecodeCase((90, 64), seqlen_q=33, page_size=None, options={"causal": True}),
    "top left": DecodeCase(seqlen_q=3, options={"causal": "top_left"}),
    "window": DecodeCase((70, 5, 0, 33), seqlen_q=3, options={"causal": True, "window": (20, None)}),
    "window of both sides": DecodeCase((70, 2, 33), seqlen_q=6, options={"window": (9, 2)}),
    "window, contiguous": DecodeCase((200, 2, 33), page_size=None, seqlen_q=2, options={"window": (40, 0)}),
    "softcap": DecodeCase(options={"softcap": 2.0}),
    "alibi": DecodeCase(seqlen_q=3, alibi_per_batch=False, options={"causal": True}),
    "alibi of each sequence": DecodeCase(alibi_per_batch=True),
    "sinks": DecodeCase(with_sinks=True),
    "sinks in parts": DecodeCase((300, 0), with_sinks=True, num_splits=3),
    "everything": DecodeCase(
        (70, 3, 33), seqlen_q=3, options={"causal": True, "window": (30, None), "softcap": 3.0}, with_sinks=True, alibi_per_batch=True, num_splits=2
    ),
    "one part": DecodeCase((300, 20), num_splits=1),
    "parts": DecodeCase((300, 20), num_splits=3),
    "parts without keys": DecodeCase((300, 1), num_splits=100),
    "parts, contiguous": DecodeCase((300, 0, 20), page_size=None, num_splits=4, seqlen_q=2),
    "scale 0": DecodeCase(options={"scale": 0.0}),
    "negative scale": DecodeCase(options={"scale": -0.3}),
    "no grouping": DecodeCase(heads=3, kv_heads=3),
    "one kv head": DecodeCase(heads=16, kv_heads=1),
    "small head dim": DecodeCase(head_dim=8, head_dim_v=8),
    "head dims differ": DecodeCase(head_dim=64, head_dim_v=128),
    "latent": DecodeCase((100, 17), heads=16, kv_heads=1, head_dim=576, head_dim_v=512, latent=True),
    "float16": DecodeCase(dtype="float16", num_splits=2),
    "bfloat16": DecodeCase(dtype="bfloat16", seqlen_q=2, options={"causal": True}),
    "bfloat16, latent": DecodeCase((100, 17), heads=16, kv_heads=1, head_dim=576, head_dim_v=512, latent=True, dtype="bfloat16"),
    "float64": DecodeCase(dtype="float64", with_sinks=True, num_splits=2),
    "odd head dims": DecodeCase(head_dim=37, head_dim_v=5),
    "head-first caches": DecodeCase(cache=Placement(order=(0, 2, 1, 3))),
    "padded caches": DecodeCase(cache=Placement(pad=(0, 0, 8, 0)), page_size=5),
    "head dim strided": DecodeCase(cache=Placement(step=(1, 1, 1, 2)), page_size=64),
    "infinity in unused slots": DecodeCase(hidden=np.inf, page_size=3),
}


@st.composite
def any_case(
    draw,
    dims=((16, 16), (64, 64), (64, 32), (40, 8), (128, 128), (33, 7)),
    dtypes=("float16", "bfloat16", "float32", "float64"),
    most_keys=150,
    most_queries=12,
    most_heads=3,
):
    """Any cache of a few sequences."""
    group, kv_heads = draw(st.sampled_from([1, 2, 4, 7])), draw(st.integers(1, most_heads))
    dim, dim_v = draw(st.sampled_from(dims))
    usual = [n for n in (0, 1, 16, 64) if n <= most_keys]
    lengths = draw(st.lists(st.one_of(st.sampled_from(usual), st.integers(0, most_keys)), min_size=1, max_size=4))
    size = draw(st.one_of(st.none(), st.sampled_from([1, 2, 16, 64]), st.integers(1, 70)))
    left, right = (draw(st.one_of(st.none(), st.integers(0, 60))) for _ in range(2))
    options = {"causal": draw(st.sampled_from([False, True, "top_left"])), "window": (left, right)}
    if draw(st.booleans()):
        options["softcap"] = draw(st.sampled_from([1.0, 20.0]))
    return DecodeCase(
        lengths=tuple(lengths),
        page_size=size,
        spare=draw(st.integers(0, 3)),
        shared=draw(st.integers(0, 3)),
        seqlen_q=draw(st.one_of(st.just(1), st.integers(1, most_queries))),
        heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=dim,
        head_dim_v=dim_v,
        dtype=draw(st.sampled_from(dtypes)),
        lengths_dtype=draw(st.sampled_from(["int32", "int64"])),
        options=options,
        with_sinks=draw(st.booleans()),
        alibi_per_batch=draw(st.sampled_from([None, False, True])),
        num_splits=draw(st.one_of(st.none(), st.integers(1, 6))),
        hidden=draw(st.sampled_from([np.nan, np.inf, -np.inf])),
        seed=draw(st.integers(0, 99)),
    )
