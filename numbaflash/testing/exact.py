"""What exact arithmetic makes of a problem, and how far a result may be from it."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import reference
from ..problem import PAGE_TABLE, Problem
from .arithmetic import PRECISION, Scores, fill, fill_gradients, is_torch, module_of, new
from .libraries import to_float64
from .visibility import rows_within_lengths, taking_part, visible_pairs


@dataclass(frozen=True, slots=True)
class Expected:
    """Exact results and how far each element may be from them. All float64, NumPy arrays or torch tensors.

    Attributes
    ----------
    out, out_tolerance : array, (batch, seqlen_q, heads, head_dim_v), or (total_q, heads, head_dim_v) of packed sequences
    lse, lse_tolerance : array, (batch, heads, seqlen_q), or (heads, total_q)
    out_free : array of bool or None
        Elements of ``out`` that may hold anything; see `spread_nonfinite`.
    """

    out: Any
    lse: Any
    out_tolerance: Any
    lse_tolerance: Any
    out_free: Any = None


@dataclass(frozen=True, slots=True)
class ExpectedGradients:
    """Exact gradients and how far each element may be from them. All float64, NumPy arrays or torch tensors; those of packed sequences have
    (total, heads, head_dim).

    Attributes
    ----------
    dq, dq_tolerance : array, (batch, seqlen_q, heads, head_dim)
    dk, dk_tolerance : array, (batch, seqlen_k, kv_heads, head_dim)
    dv, dv_tolerance : array, (batch, seqlen_k, kv_heads, head_dim_v)
    dq_free, dk_free, dv_free : array of bool or None
        Elements that may hold anything.
    largest : float
        The largest finite number of the dtype.
    dbias, dbias_tolerance, dbias_free : array or None
        With the 4 axes of `Problem.bias`.
    dsinks, dsinks_tolerance, dsinks_free : array, (heads,), or None
    largest_bias : float
        The largest finite number of the dtype of the bias.
    """

    dq: Any
    dk: Any
    dv: Any
    dq_tolerance: Any
    dk_tolerance: Any
    dv_tolerance: Any
    dq_free: Any = None
    dk_free: Any = None
    dv_free: Any = None
    largest: float = math.inf
    dbias: Any = None
    dsinks: Any = None
    dbias_tolerance: Any = None
    dsinks_tolerance: Any = None
    dbias_free: Any = None
    dsinks_free: Any = None
    largest_bias: float = math.inf


def expected(problem: Problem, q, k, v, *, seed: int = 0, **options) -> Expected:
    """Exact attention and its tolerances.

    Parameters
    ----------
    problem : Problem
    q, k, v : array_like or torch.Tensor
        The inputs as the kernel gets them, any float dtype. NumPy arrays are computed by `numbaflash.reference`; torch tensors
        are computed on their device by the same formulas, which makes large problems feasible on a GPU. Of packed sequences the result is NumPy.
    seed, **options
        As `numbaflash.reference.forward` takes them.

    Returns
    -------
    Expected
    """
    if problem.packed:
        padded = _Padded.of(problem, options)
        known = expected(padded.problem, *padded.pad(q=q, k=k, v=v), seed=seed, **padded.options)
        nobody = {"out": 0.0, "lse": -math.inf, "out_tolerance": 0.0, "lse_tolerance": 0.0}
        return Expected(**{name: padded.rows(getattr(known, name), "lse" if "lse" in name else "q", x) for name, x in nobody.items()})
    if problem.paged:
        options = dict(options)
        problem, k, v = reference.without_pages(problem, k, v, options.pop(PAGE_TABLE))
    if is_torch(q):
        xp, (q, k, v) = sys.modules["torch"], (to_float64(x) for x in (q, k, v))
    else:
        xp, (q, k, v) = np, (np.asarray(x, np.float64) for x in (q, k, v))
    result = Expected(*(new(xp, q, shape) for shape in (problem.out_shape, problem.lse_shape) * 2))
    scores = Scores(xp, problem, q, options, seed)
    if not problem.seqlen_k or problem.is_empty:
        result.out[...], result.out_tolerance[...] = 0.0, 0.0
        result.lse[...] = scores.lse_without_keys()
        result.lse_tolerance[...] = xp.where(xp.isfinite(result.lse), 8 * PRECISION[problem.dtype].eps * abs(result.lse), 0.0)
        return result
    with np.errstate(invalid="ignore", over="ignore", divide="ignore", under="ignore"):
        fill(xp, problem, q, k, v, scores, result)
    if xp is np:
        result.out[...], result.lse[...] = reference.forward(problem, q, k, v, seed=seed, **options)
    return result


def spread_nonfinite(known: Expected, problem: Problem, v, *, seed: int = 0, **options) -> Expected:
    """The rule for a family whose module says ``NONFINITE_VALUES_SPREAD``.

    NaN or infinity in an element of v that some query sees may reach every query of its head in the same column of ``out``, because a
    weight of 0 times NaN is NaN. Rows without keys stay 0 (but for those that have a sink), values that no query sees reach nothing, and ``lse``
    does not depend on v.

    Parameters
    ----------
    known : Expected
    problem : Problem
    v : array_like or torch.Tensor, (batch, seqlen_k, kv_heads, head_dim_v)
        Of paged caches the pages; NumPy.
    seed, **options
        As `expected` takes them.

    Returns
    -------
    Expected
    """
    if problem.packed:
        padded = _Padded.of(problem, options)
        (v,), (lse,) = padded.pad(v=v), padded.pad(lse=known.lse)
        spread = spread_nonfinite(Expected(None, lse, None, None), padded.problem, v, seed=seed, **padded.options)
        return known if spread.out_free is None else replace(known, out_free=padded.rows(spread.out_free, "q", False))
    if problem.paged:
        options = dict(options)
        problem, v, _ = reference.without_pages(problem, v, v, options.pop(PAGE_TABLE))
    if problem.is_empty or not problem.seqlen_k:
        return known
    xp = sys.modules["torch"] if is_torch(known.lse) else np
    v = to_float64(v)
    v = xp.as_tensor(v, device=known.lse.device) if xp is not np else v
    seen = taking_part(problem, **options)[1][..., None]
    seen = seen if xp is np else xp.from_numpy(seen.copy()).to(v.device)
    hit = xp.any(~xp.isfinite(v) & seen, 1)  # (batch, kv_heads, head_dim_v)
    hit = xp.concatenate([hit[:, h // problem.group, None] for h in range(problem.heads)], 1)
    rows = xp.swapaxes(known.lse, 1, 2) != -math.inf
    return replace(known, out_free=rows[..., None] & hit[:, None])


def expected_gradients(problem: Problem, dout, q, k, v, dlse=None, *, seed: int = 0, **options) -> ExpectedGradients:
    """Exact gradients and their tolerances.

    Parameters
    ----------
    problem : Problem
    dout, q, k, v : array_like or torch.Tensor
        The inputs as the kernel gets them, any float dtype; ``out`` and ``lse`` are taken to be the exact ones, rounded. NumPy arrays are
        computed by `numbaflash.reference`; finite torch tensors on their device, by the same formulas.
    dlse : array_like or torch.Tensor, optional
    seed, **options
        As `numbaflash.reference.backward` takes them.

    Returns
    -------
    ExpectedGradients
    """
    given = {"dout": dout, "q": q, "k": k, "v": v} | ({} if dlse is None else {"dlse": dlse})
    if problem.packed:
        padded = _Padded.of(problem, options)
        known = expected_gradients(padded.problem, **dict(zip(given, padded.pad(**given), strict=True)), seed=seed, **padded.options)
        changed = {}
        for name in (f"d{operand}{kind}" for operand in "qkv" for kind in ("", "_tolerance", "_free")):
            if getattr(known, name) is not None:
                changed[name] = padded.rows(getattr(known, name), name[1], False if name.endswith("free") else 0.0)
        return replace(known, **changed)
    xp = sys.modules["torch"] if is_torch(q) else np
    given, options = ({name: to_float64(x) for name, x in arrays.items()} for arrays in (given, options))
    clean = all(bool(module_of(x).isfinite(x).all()) for x in given.values()) and not any(bool(_spoilt(name, x).any()) for name, x in options.items())
    if not clean:
        xp, (given, options) = np, ({name: x.cpu().numpy() if is_torch(x) else x for name, x in arrays.items()} for arrays in (given, options))
    names = [f"d{name}" for name in problem.gradients]
    limits = {"largest": PRECISION[problem.dtype].largest, "largest_bias": PRECISION[problem.bias_dtype or problem.dtype].largest}
    if problem.sees_nothing or not problem.seqlen_k:
        known = {f"{name}{kind}": new(xp, given["q"], problem.shape_of(name), xp.zeros) for name in names for kind in ("", "_tolerance")}
        if not problem.sees_nothing:
            alive = Scores(xp, problem, given["q"], options, seed).lse_without_keys() != -math.inf
            with np.errstate(invalid="ignore"):
                of_out = xp.moveaxis(0.0 * xp.sum(given["dout"], -1), 2, 1)  # out is 0, and 0 times NaN is NaN
            terms = xp.where(alive, given.get("dlse", 0.0) - of_out, 0.0)
            known["dsinks"] = xp.sum(terms, (0, 2))
            known["dsinks_tolerance"] = 8 * PRECISION[problem.dtype].eps * problem.batch * problem.seqlen_q * xp.sum(abs(terms), (0, 2))
        return ExpectedGradients(**known, **limits)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore", under="ignore"):
        finite, plain = given, options
        if not clean:
            finite = {name: np.where(np.isfinite(x), x, 0.0) for name, x in given.items()}
            plain = {name: np.where(_spoilt(name, x), 0.0, x) for name, x in options.items()}
        known = fill_gradients(xp, problem, Scores(xp, problem, finite["q"], plain, seed), **finite)
    if xp is np:
        known |= dict(zip(names, reference.backward(problem, **given, seed=seed, **options), strict=True))
    if not clean:
        known |= _reached(problem, known, given, options)
    return ExpectedGradients(**known, **limits)


def _spoilt(name, x):
    """Where an option holds NaN or an infinity that is no number to it: -inf in a bias or a sink is one."""
    return ~module_of(x).isfinite(x) & ~((name in ("bias", "sinks")) & (x == -math.inf))


def _reached(problem, known, given, options):
    """Which gradients NaN or infinity in what takes part may reach, beyond those that it must."""
    queries, keys = taking_part(problem, **options)
    alive = rows_within_lengths(problem, **options) if problem.sinks else queries
    seen = visible_pairs(problem, **options)
    heads = np.zeros((problem.batch, problem.heads), bool)
    for name, rows in (("dout", alive), ("q", queries)):
        heads |= (~np.isfinite(given[name]).all(axis=3) & rows).any(axis=1)
    if "dlse" in given:
        heads |= (~np.isfinite(given["dlse"]) & np.moveaxis(alive, 2, 1)).any(axis=2)
    if problem.bias:
        heads |= (_spoilt("bias", options["bias"]).reshape(problem.bias) & seen).any(axis=(2, 3))
    for name in ("alibi_slopes", "sinks"):
        if name in options:
            heads |= _spoilt(name, options[name])
    hit = heads.reshape(problem.batch, problem.kv_heads, problem.group).any(axis=2)
    for name in "kv":
        hit |= (~np.isfinite(given[name]).all(axis=3) & keys).any(axis=1)
    by_head = np.repeat(hit, problem.group, axis=1)
    free = {"dq": by_head[:, None, :, None] & queries[..., None]}
    free |= {name: hit[:, None, :, None] & keys[..., None] for name in ("dk", "dv")}
    if problem.bias:
        free["dbias"] = (by_head[..., None, None] & seen).any(axis=tuple(n for n in range(4) if problem.bias[n] == 1), keepdims=True)
    if problem.sinks:
        free["dsinks"] = by_head.any(axis=0)
    return {f"{name}_free": x & ~np.isnan(known[name]) for name, x in free.items()}


@dataclass(frozen=True)
class _Padded:
    """Packed sequences as the batch that they are: its problem and options, and the way there and back."""

    packing: reference.Packing

    @classmethod
    def of(cls, problem, options):
        options = {name: x.cpu().numpy() if is_torch(x) else x for name, x in options.items()}
        return cls(reference.Packing.of(problem, reference.check_options(problem, options)))

    @property
    def problem(self):
        return self.packing.padded

    @property
    def options(self):
        return self.packing.options

    def pad(self, **operands):
        """Operands by name with a batch axis, in float64, where they lie."""
        found = []
        for name, x in operands.items():
            turned = name in ("lse", "dlse")  # (heads, total)
            values = to_float64(x)
            host = values.cpu().numpy() if is_torch(values) else values
            (entries,) = self.packing.pad(**{"k" if name in "kv" else "q": host.T if turned else host})
            entries = np.moveaxis(entries, 1, 2) if turned else entries
            found.append(sys.modules["torch"].as_tensor(entries, device=values.device) if is_torch(values) else entries)
        return found

    def rows(self, entries, name, nobody):
        """Results of "q", "k", "v" or "lse" without the batch axis, with ``nobody`` in rows of no sequence; NumPy."""
        entries = entries.cpu().numpy() if is_torch(entries) else entries
        if name == "lse":
            return self.packing.rows(np.moveaxis(entries, 2, 1), "q", nobody).T
        return self.packing.rows(entries, "q" if name == "q" else "k", nobody)
