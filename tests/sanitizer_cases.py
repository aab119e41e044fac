"""A few small calls of every GPU family, to run under compute-sanitizer: ``compute-sanitizer --tool memcheck python tests/sanitizer_cases.py``.

Between them they take each road of the Hopper kernels: two, three and four consumers, packed heads, bands, the output in parts and in Q's
place; gradients of keys apart and of columns apart, in turn and in any order; decoding by warps apart and by warps that share keys, in shares and
in parts, with a workspace of the call and with one of the plan; appending to contiguous caches and to pages.

With ``--every-lane`` the Hopper kernels are built so that every lane arrives at an mbarrier, not lane 0 for its warp. That is for racecheck,
which does not see that what a warp has done before its lane 0 arrives is done: it reports hazards without, and none with it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import types

import numpy as np

import numbaflash

CASES = (  # dtype, batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, options
    ("float16", 2, 150, 300, 2, 1, 64, {"causal": True}),
    ("float16", 1, 130, 900, 1, 1, 64, {}),
    ("float16", 1, 200, 300, 2, 2, 128, {"window": (70, 10)}),
    ("float16", 1, 130, 200, 2, 2, 256, {}),
    ("float16", 1, 130, 1100, 1, 1, 256, {}),
    ("float16", 1, 130, 200, 2, 1, 256, {"causal": True}),
    ("float32", 1, 100, 150, 2, 1, 64, {"causal": True}),
)
OPTION_CASES = (  # the same, with the names of options
    ("float16", 2, 130, 200, 2, 1, 64, {"causal": True}, ("softcap", "alibi_slopes", "sinks", "seqlens_q", "seqlens_k")),
    ("float16", 2, 130, 200, 2, 2, 128, {}, ("mask", "bias", "seqlens_k")),
    ("float16", 1, 130, 200, 2, 1, 128, {"causal": True}, ("dropout", "mask")),
    ("float16", 1, 300, 400, 2, 1, 128, {"causal": True}, ("dropout",)),
    ("float16", 1, 130, 300, 2, 2, 64, {}, ("dropout",)),
    ("float16", 2, 70, 200, 2, 2, 256, {}, ("mask", "bias", "dropout", "seqlens_k")),
)
PACKED_CASES = ((64, {"causal": True}), (128, {}), (256, {"causal": True}))  # head_dim, options
BOUNDARIES = (0, 130, 130, 330, 340)
DECODE_CASES = (  # dtype, page_size, seqlen_q, heads, kv_heads, head_dim, head_dim_v, num_splits, options
    ("float16", 0, 1, 8, 2, 128, 128, None, {}),
    ("float16", 16, 1, 8, 1, 64, 64, None, {"softcap": 5.0}),
    ("float16", 1, 3, 8, 2, 128, 128, None, {"causal": True, "window": (100, None)}),
    ("float16", 16, 9, 4, 2, 128, 64, None, {"causal": True}),
    ("float16", 16, 1, 8, 1, 256, 256, 1, {}),
    ("float16", 3, 1, 16, 1, 72, 200, 3, {}),
    ("float16", 64, 1, 16, 1, 576, 512, None, {}),
    ("float16", 16, 2, 16, 1, 576, 512, 2, {"causal": True}),
    ("float32", 0, 2, 4, 2, 64, 64, None, {"causal": True}),
    ("float32", 16, 1, 4, 2, 64, 64, None, {}),
)
CACHE_LENGTHS = (0, 1, 150, 777)
"""Keys that are in the cache already."""


def let_every_lane_arrive() -> None:
    """Build the kernels so from now on, in a disk cache of their own: the package's sources do not tell them apart."""
    os.environ["NUMBAFLASH_CACHE_DIR"] = tempfile.mkdtemp()
    from llvmlite import ir

    from numbaflash.kernels.sm90 import forward
    from numbaflash.kernels.sm90.backward import by_columns, by_keys, kernel
    from numbaflash.ptx import mbarrier, pipeline
    from numbaflash.ptx.inline import I32, U32, VOID, emit, make_intrinsic

    def release(builder, args, _):
        at = pipeline.barrier_at(builder, *args[:2])
        emit(builder, ir.VoidType(), [at], "mbarrier.arrive.shared::cta.b64 _, [$0];", "r,~{memory}")

    def changed(module, **names):
        copy = types.ModuleType(module.__name__)
        vars(copy).update(vars(module) | names)
        return copy

    forward.pipeline = by_keys.pipeline = by_columns.pipeline = changed(pipeline, release=make_intrinsic(VOID, (U32, pipeline.PLACE, I32), release))
    # Counts of warps are 4 a consumer, and 3 of those beside the producer's first; the others are of single threads.
    init_ring = mbarrier.init_ring
    forward.mbarrier = kernel.mbarrier = changed(
        mbarrier, init_ring=lambda count, arrivals: init_ring(count, arrivals * (32 if arrivals >= 3 else 1))
    )


def make_options(cupy, rng, names, batch, seqlen_q, seqlen_k, heads):
    """Options of a call by their names."""
    made = {
        "softcap": lambda: 5.0,
        "alibi_slopes": lambda: cupy.asarray(rng.random(heads, dtype=np.float32)),
        "sinks": lambda: cupy.asarray(rng.standard_normal(heads, dtype=np.float32)),
        "seqlens_q": lambda: cupy.asarray(rng.integers(1, seqlen_q + 1, batch)),
        "seqlens_k": lambda: cupy.asarray(rng.integers(1, seqlen_k + 1, batch)),
        "mask": lambda: cupy.asarray(rng.random((batch, 1, seqlen_q, seqlen_k)) < 0.7),
        "bias": lambda: cupy.asarray(rng.standard_normal((1, heads, seqlen_q, seqlen_k), dtype=np.float32)).astype("float16"),
        "dropout": lambda: 0.2,
    }
    return {name: made[name]() for name in names} | ({"seed": 1} if "dropout" in names else {})


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every-lane", action="store_true")
    if parser.parse_args(arguments).every_lane:
        let_every_lane_arrive()
    import cupy

    rng = np.random.default_rng(0)
    cases = (*((*case, ()) for case in CASES), *OPTION_CASES)
    for number, (dtype, batch, seqlen_q, seqlen_k, heads, kv_heads, head_dim, options, names) in enumerate(cases):
        shapes = [(batch, seqlen_q, heads, head_dim), *[(batch, seqlen_k, kv_heads, head_dim)] * 2]
        q, k, v = (cupy.asarray(rng.standard_normal(shape, dtype=np.float32)).astype(dtype) for shape in shapes)
        # initcheck does not see what TMA stores: results start as NaN, which must be gone.
        options = options | make_options(cupy, rng, names, batch, seqlen_q, seqlen_k, heads)
        needs = ("q", "k", "v", *(name for name in ("bias", "sinks") if name in names))
        out, dq, dk, dv = (cupy.full(x.shape, cupy.nan, dtype) for x in (q, q, k, v))
        lse = cupy.full((batch, heads, seqlen_q), cupy.nan, np.float32)
        numbaflash.forward(q, k, v, out=out, lse=lse, **options)
        gradients = numbaflash.backward(out, q, k, v, out, lse, deterministic=number % 2 == 0, dq=dq, dk=dk, dv=dv, needs=needs, **options)
        clean = not any(bool(cupy.isnan(x).any()) for x in (out, lse, *gradients))
        print(numbaflash.explain(q, k, v, **options).plan.family, dtype, head_dim, *names, "no NaN" if clean else "NaN", flush=True)
        if not clean:
            return 1
    return run_packed(cupy, rng) or run_decoding(cupy, rng)


def run_packed(cupy, rng) -> int:
    boundaries = cupy.asarray(BOUNDARIES, np.int32)
    for number, (head_dim, options) in enumerate(PACKED_CASES):
        q, k, v, out, dq, dk, dv = (cupy.zeros((BOUNDARIES[-1], heads, head_dim), "float16") for heads in (2, 1, 1, 2, 2, 1, 1))
        for x in (q, k, v):
            x[...] = cupy.asarray(rng.standard_normal(x.shape, dtype=np.float32))
        for x in (out, dq, dk, dv):
            x[...] = cupy.nan
        lse = cupy.full((2, BOUNDARIES[-1]), cupy.nan, np.float32)
        numbaflash.forward_varlen(q, k, v, boundaries, boundaries, out=out, lse=lse, **options)
        given = {"deterministic": number % 2 == 0, "dq": dq, "dk": dk, "dv": dv}
        gradients = numbaflash.backward_varlen(out, q, k, v, out, lse, boundaries, boundaries, **given, **options)
        clean = not any(bool(cupy.isnan(x).any()) for x in (out, lse, *gradients))
        print("packed", head_dim, "no NaN" if clean else "NaN", flush=True)
        if not clean:
            return 1
    return 0


def run_decoding(cupy, rng) -> int:
    """New tokens are appended, and decoded by a call and by a plan. What nobody has written is NaN, and pages that are no pages end each row."""
    batch, capacity = len(CACHE_LENGTHS), 800
    for dtype, page_size, new, heads, kv_heads, dim, dim_v, num_splits, options in DECODE_CASES:
        rows, table, columns = (batch, capacity), None, -(-capacity // max(page_size, 1))
        if page_size:
            rows = (batch * columns, page_size)
            numbers = rng.permutation(batch * columns).reshape(batch, columns)
            starts = np.arange(columns) * page_size
            table = cupy.asarray(np.where(starts < np.array(CACHE_LENGTHS)[:, None] + new, numbers, 2**31 - 1).astype(np.int32))
        k_cache, v_cache = (cupy.full((*rows, kv_heads, d), cupy.nan, dtype) for d in (dim, dim_v))
        turn = {name: cupy.asarray(rng.standard_normal((capacity, dim // 4), dtype=np.float32)) for name in ("cos", "sin")}

        def make(count, n, d, kind=dtype):
            return cupy.asarray(rng.standard_normal((batch, count, n, d), dtype=np.float32)).astype(kind)

        lengths = cupy.asarray(CACHE_LENGTHS, np.int32)
        history = max(CACHE_LENGTHS)
        for start in range(0, history, 64):  # tokens past a sequence's length have no page, or are never seen
            count = min(64, history - start)
            at = cupy.where(lengths > start, cupy.int32(start), cupy.int32(-64))
            numbaflash.append_kv(make(count, kv_heads, dim), make(count, kv_heads, dim_v), k_cache, v_cache, at, table)
        q = numbaflash.append_kv(
            make(new, kv_heads, dim), make(new, kv_heads, dim_v), k_cache, v_cache, lengths, table, q=make(new, heads, dim), **turn
        )
        out, lse = cupy.full((batch, new, heads, dim_v), cupy.nan, dtype), cupy.full((batch, heads, new), cupy.nan, np.float32)
        arguments = (q, k_cache, v_cache, lengths + new, *([] if table is None else [table]))
        try:
            numbaflash.decode(*arguments, num_splits=num_splits, out=out, lse=lse, **options)
        except numbaflash.UnsupportedError as error:
            print("decode", dtype, page_size, f"skipped: {error}", flush=True)
            continue
        plan = numbaflash.plan_decode(*arguments, num_splits=num_splits, **options)
        again = [plan.run(*arguments).copy() for _ in range(2)]
        clean = not any(bool(cupy.isnan(x).any()) for x in (q, out, lse, *again))
        print("decode", plan.plan.family, dtype, page_size, dim, dim_v, "no NaN" if clean else "NaN", flush=True)
        if not clean:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
