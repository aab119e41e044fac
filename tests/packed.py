"""Cases of packed sequences, run by a family and compared with the reference; results lie between guards."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import numbaflash
from numbaflash import dispatch, reference, testing
from numbaflash.problem import PACKED, make_packed_problem
from numbaflash.testing import libraries
from numbaflash.testing.values import decode, encode

TOLERANCE = {"bfloat16": 3e-2, "float16": 4e-3, "float32": 2e-5, "float64": 1e-12}
"""Of results about 1 in size."""
GUARD = 3
"""Rows before and after each result, which must stay as they are."""


@dataclass(frozen=True)
class PackedCase:
    """Lengths of the sequences, and what else decides a problem; ``before`` and ``after`` count rows of q, and of k and v, that are nobody's.

    Those rows hold NaN. ``boundaries``, where given, replaces what the lengths make of the boundaries of q and k.
    """

    lengths_q: tuple[int, ...] = (5, 0, 2, 10)
    lengths_k: tuple[int, ...] = (3, 2, 0, 12)
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 8
    head_dim_v: int = 8
    dtype: str = "float32"
    length_dtypes: tuple[str, str] = ("int32", "int64")
    before: tuple[int, int] = (0, 0)
    after: tuple[int, int] = (0, 0)
    causal: bool | str = False
    window: tuple[int | None, int | None] | None = None
    scale: float | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    dropout: float = 0.0
    max_seqlens: tuple[int | None, int | None] = (None, None)
    deterministic: bool = False
    needs: tuple[str, ...] = ("q", "k", "v")
    boundaries: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    steps: tuple[int, int] = (1, 1)
    seed: int = 0

    def inputs(self):
        """(problem, values by operand in float64, as the dtypes have them, what a call takes by keyword beside arrays)."""
        rng = np.random.default_rng(self.seed)
        totals = [b + sum(n) + a for n, b, a in zip((self.lengths_q, self.lengths_k), self.before, self.after, strict=True)]
        made = [np.concatenate([[b], b + np.cumsum(n, dtype=int)]) for n, b in zip((self.lengths_q, self.lengths_k), self.before, strict=True)]
        told = dict(zip(PACKED, self.boundaries or made, strict=True))
        shapes = (totals[0], self.heads, self.head_dim), (totals[1], self.kv_heads, self.head_dim), (totals[1], self.kv_heads, self.head_dim_v)
        arrays = {name: rng.standard_normal(shape) for name, shape in zip("qkv", shapes, strict=True)}
        arrays["dout"] = rng.standard_normal((totals[0], self.heads, self.head_dim_v))
        for name, ends in (("q", made[0]), ("dout", made[0]), ("k", made[1]), ("v", made[1])):
            if self.boundaries is None:
                arrays[name][: ends[0]] = arrays[name][ends[-1] :] = np.nan
        arrays["dlse"] = rng.standard_normal((self.heads, totals[0]))
        if self.alibi:
            arrays["alibi_slopes"] = rng.random((len(made[0]) - 1, self.heads))
        if self.sinks:
            arrays["sinks"] = rng.standard_normal(self.heads)
        options = {"causal": self.causal, "window": self.window, "scale": self.scale, "softcap": self.softcap, "dropout": self.dropout}
        options |= dict(zip(("max_seqlen_q", "max_seqlen_k"), self.max_seqlens, strict=True))
        dtypes = dict(zip(PACKED, self.length_dtypes, strict=True)) | {"alibi_slopes": "float32", "sinks": self.lse_dtype}
        described = {name: (np.shape(x), dtypes[name]) for name, x in (told | arrays).items() if name in dtypes}
        problem = make_packed_problem(*shapes, (self.dtype,) * 3, **described, **options)
        values = {name: decode(encode(x, problem.dtype_of(name)), problem.dtype_of(name)) for name, x in arrays.items()}
        return problem, values | {name: np.array(x) for name, x in told.items()}, options

    @property
    def lse_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    def run(self, family: str, library: str = "numpy", gradients: bool = True) -> None:
        """Forward and gradients; AssertionError where they are not the reference's."""
        problem, values, options = self.inputs()
        given = {name: _array(x, problem.dtype_of(name), library) for name, x in values.items()}
        if library == "numpy":
            for name, step in zip(PACKED, self.steps, strict=True):
                given[name] = np.repeat(given[name][:: step // abs(step)], abs(step))[::step]
        of_forward = {name: given[name] for name in ("q", "k", "v", *problem.options)}
        arguments = {name: x for name, x in values.items() if name in problem.options}
        q, k, v, dout, dlse = (values[name] for name in ("q", "k", "v", "dout", "dlse"))
        seed = 7 if self.dropout else None
        with dispatch.use_family(family):
            out, lse = (_Guarded.of(problem, name, library) for name in ("out", "lse"))
            numbaflash.forward_varlen(**of_forward, **options, seed=seed, out=out.inner, lse=lse.inner)
            wanted, wanted_lse = reference.forward(problem, q, k, v, seed=7, **arguments)
            self._compare({"out": (out, wanted), "lse": (lse, wanted_lse)})
            if not gradients:
                return
            found = {f"d{name}": _Guarded.of(problem, f"d{name}", library) for name in self.needs}
            more = {"needs": self.needs, "deterministic": self.deterministic, "dlse": given["dlse"], "seed": seed}
            results = {name: each.inner for name, each in found.items()}
            numbaflash.backward_varlen(given["dout"], **of_forward, out=out.inner, lse=lse.inner, **options, **more, **results)
        exact = dict(zip(problem.gradients, reference.backward(problem, dout, q, k, v, dlse, seed=7, **arguments), strict=True))
        self._compare({name: (each, exact[name[1:]]) for name, each in found.items()})

    def _compare(self, results):
        for name, (got, want) in results.items():
            size = max(1.0, np.abs(want[np.isfinite(want)]).max(initial=0))
            np.testing.assert_allclose(got.values(), want, rtol=0, atol=TOLERANCE[self.dtype] * size, err_msg=name)
            got.check(name)


def _array(values, dtype, library):
    """An array of a library."""
    memory = testing.Memory.filled(dtype, values.shape, testing.Placement(), 0)
    memory.view()[...] = encode(values, dtype)
    if library == "numpy":
        return np.array(memory.view().view(dtype))  # writable, as results must be
    return libraries.make(memory, library)[1]


@dataclass(frozen=True)
class _Guarded:
    """An array of NaN, between rows along an axis that nobody may write to."""

    whole: object
    inner: object
    axis: int

    @classmethod
    def of(cls, problem, name, library):
        # Rows of the LSE apart from each other are strides that kernels may copy for.
        shape, axis = problem.shape_of(name), int(name == "lse" and library == "numpy")
        within = (slice(None),) * axis + (slice(GUARD, -GUARD),)
        values = np.full([n + 2 * GUARD if at == axis else n for at, n in enumerate(shape)], 77.0)
        values[within] = np.nan
        whole = _array(values, problem.dtype_of(name), library)
        return cls(whole, whole[within], axis)

    def values(self):
        return libraries.to_numpy(self.inner)

    def check(self, name):
        whole = libraries.to_numpy(self.whole)
        for part in (slice(0, GUARD), slice(-GUARD, None)):
            assert (whole[(slice(None),) * self.axis + (part,)] == 77).all(), f"{name} was written beyond its rows"


EVERYTHING = {
    "causal": True,
    "window": (7, None),
    "softcap": 2.0,
    "alibi": True,
    "sinks": True,
    "dropout": 0.3,
    "before": (2, 1),
    "after": (3, 9),
    "needs": ("q", "k", "v", "sinks"),
}

CASES = {
    "plain": PackedCase(),
    "one sequence": PackedCase((11,), (13,), causal=True),
    "no sequence": PackedCase((), (), after=(9, 5)),
    "no key": PackedCase((5, 3), (0, 0)),
    "rows before and after": PackedCase(before=(3, 1), after=(9, 8), causal=True, deterministic=True),
    "causal": PackedCase(causal=True, heads=4, kv_heads=2),
    "causal, top left, deterministic": PackedCase(causal="top_left", deterministic=True),
    "window": PackedCase(window=(3, 2), deterministic=True),
    "more queries than keys": PackedCase((10, 17), (4, 9), causal=True, length_dtypes=("int64", "int32")),
    "many short ones": PackedCase((1, 2, 0, 0, 1, 3, 1, 1, 0), (2, 1, 3, 0, 1, 2, 2, 1, 1), causal=True),
    "expected lengths": PackedCase(causal=True, max_seqlens=(10, 12)),
    "longer than expected": PackedCase(causal=True, max_seqlens=(1, 0), deterministic=True),
    "none expected": PackedCase(causal=True, max_seqlens=(0, 0)),
    "float64": PackedCase(dtype="float64", causal=True, head_dim=7, head_dim_v=9),
    "float16": PackedCase(dtype="float16", after=(2, 2)),
    "strides": PackedCase(steps=(2, -1)),
    "gradient of k alone": PackedCase(causal=True, needs=("k",)),
    "gradient of q alone, deterministic": PackedCase(window=(4, 4), needs=("q",), deterministic=True),
    "softcap": PackedCase(softcap=1.0),
    "alibi": PackedCase(alibi=True),
    "sinks": PackedCase(sinks=True, after=(4, 0), causal=True, needs=("q", "k", "v", "sinks")),
    "dropout": PackedCase(dropout=0.4),
    "every option": PackedCase(**EVERYTHING),
    "every option, deterministic": PackedCase(**EVERYTHING, deterministic=True, seed=1),
    "beyond the rows": PackedCase((9, 9), (8, 8), boundaries=((0, 9, 2**31 - 1), (0, 8, 2**60)), causal=True),
    "below 0": PackedCase((9, 9), (8, 8), boundaries=((-(2**31), 9, 18), (-(2**60), 8, 16)), causal=True),
    "queries descend": PackedCase((9, 9), (8, 8), boundaries=((0, 12, 5), (0, 8, 16)), causal=True, deterministic=True, sinks=True),
    "keys descend": PackedCase((9, 9), (30, 8), boundaries=((0, 9, 18), (30, 8, 38)), deterministic=True, sinks=True),
    "all descend": PackedCase((9, 9, 3), (8, 8, 3), boundaries=((18, 0, 9, 2), (0, 17, 3, 19)), deterministic=True),
}
"""Named cases for what packing does in every family. Numbers that no boundaries should be have results, too: see `numbaflash.problem`."""
