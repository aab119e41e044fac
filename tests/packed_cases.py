"""Named cases of packed sequences, for every family, and how to run one in both directions."""

from __future__ import annotations

from dataclasses import fields

from numbaflash.testing import BackwardCase, Case, Packed, Placement, run_backward_case, run_case

LENGTHS = (5, 0, 2, 10), (3, 2, 0, 12)
SHAPE = {"heads": 2, "kv_heads": 1, "head_dim": 8, "head_dim_v": 8, "hidden": "nan", "with_dlse": True}


def case(lengths_q=LENGTHS[0], lengths_k=LENGTHS[1], *, before=(0, 0), after=(0, 0), dtypes=("int32", "int64"), told=(None, None), **more):
    """A `BackwardCase`, small where nothing else is said; NaN lies wherever no query looks. ``told`` are the longest lengths that a call is told."""
    boundaries = more.pop("boundaries", None)
    packed = Packed(tuple(lengths_q), tuple(lengths_k), before, after, dtypes, told, boundaries)
    return BackwardCase(packed=packed, **SHAPE | more)


def forward_of(given):
    """The forward problem of a `BackwardCase`."""
    return Case(**{f.name: getattr(given, f.name) for f in fields(Case)})


def run(given, family, library="numpy", gradients=True):
    """Forward and gradients of a `BackwardCase`."""
    run_case(forward_of(given), family, library)
    if gradients:
        run_backward_case(given, family, library)


EVERYTHING = {
    "causal": True,
    "window": (7, None),
    "softcap": 2.0,
    "alibi_shape": (4, 2),
    "with_sinks": True,
    "dropout": 0.3,
    "dropout_seed": 7,
    "before": (2, 1),
    "after": (3, 9),
    "needs": ("q", "k", "v", "sinks"),
}

CASES = {
    "plain": case(),
    "one sequence": case((11,), (13,), causal=True),
    "no sequence": case((), (), after=(9, 5)),
    "no key": case((5, 3), (0, 0)),
    "rows before and after": case(before=(3, 1), after=(9, 8), causal=True, deterministic=True),
    "causal": case(causal=True, heads=4, kv_heads=2),
    "causal, top left, deterministic": case(causal="top_left", deterministic=True),
    "window": case(window=(3, 2), deterministic=True),
    "more queries than keys": case((10, 17), (4, 9), causal=True, dtypes=("int64", "int32")),
    "many short ones": case((1, 2, 0, 0, 1, 3, 1, 1, 0), (2, 1, 3, 0, 1, 2, 2, 1, 1), causal=True),
    "expected lengths": case(causal=True, told=(10, 12)),
    "longer than expected": case(causal=True, told=(1, 0), deterministic=True),
    "none expected": case(causal=True, told=(0, 0)),
    "float64": case(dtype="float64", causal=True, head_dim=7, head_dim_v=9),
    "float16": case(dtype="float16", after=(2, 2)),
    "strides": case(cu_seqlens_q=Placement(step=(2,)), cu_seqlens_k=Placement(step=(-1,)), q=Placement(order=(1, 0, 2)), lse=Placement(pad=(0, 5))),
    "gradient of k alone": case(causal=True, needs=("k",)),
    "gradient of q alone, deterministic": case(window=(4, 4), needs=("q",), deterministic=True),
    "softcap": case(softcap=1.0),
    "alibi": case(alibi_shape=(4, 2)),
    "sinks": case(with_sinks=True, after=(4, 0), causal=True, needs=("q", "k", "v", "sinks")),
    "dropout": case(dropout=0.4, dropout_seed=7),
    "every option": case(**EVERYTHING),
    "every option, deterministic": case(**EVERYTHING, deterministic=True, seed=1),
    "beyond the rows": case((9, 9), (8, 8), boundaries=((0, 9, 2**31 - 1), (0, 8, 2**60)), causal=True),
    "below 0": case((9, 9), (8, 8), boundaries=((-(2**31), 9, 18), (-(2**60), 8, 16)), causal=True),
    "queries descend": case((9, 9), (8, 8), boundaries=((0, 12, 5), (0, 8, 16)), causal=True, deterministic=True, with_sinks=True),
    "keys descend": case((9, 9), (30, 8), boundaries=((0, 9, 18), (30, 8, 38)), deterministic=True, with_sinks=True),
    "all descend": case((9, 9, 3), (8, 8, 3), boundaries=((18, 0, 9, 2), (0, 17, 3, 19)), deterministic=True),
}
"""What packing does in every family. Numbers that no boundaries should be have results, too: see `numbaflash.problem`."""
