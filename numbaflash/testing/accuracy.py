r"""How exact a result must be: the one place where tolerances are stated.

Exact arithmetic on the given inputs yields, for a query, scores :math:`s_j`, weights :math:`p_j`, ``out`` :math:`o = \sum p_j v_j` and ``lse``.
Everything a kernel may do differently is bounded element by element, from what it is allowed to round (first order, natural
units). With ``eps`` the machine epsilon of the accumulation type (float32, or float64 for float64 problems), ``u`` the unit
roundoff of the dtype, ``n`` the keys a query sees, and

* :math:`A = \sum p_j |v_j|`, which no reordering of the sum changes, where ``out`` itself may cancel to nothing,
* :math:`Q_j = |scale| \sum_d |q_d k_{jd}|`, the condition of a score: D products and additions lose at most ``D eps Q``, and scaling,
  base-2 conversion and the subtraction of the maximum a few ``eps Q`` more,

the budget is

====================  =====================================================================  =====================================
part                  out                                                                    lse
====================  =====================================================================  =====================================
scores                ``(D + 8) eps`` (:math:`\sum p_j Q_j |v_j| + |o| \sum p_j Q_j`)        ``(D + 8) eps`` :math:`\sum p_j Q_j`
exp, rescaling        ``84 eps A``: 1e-5 in float32                                          ``84 eps``
sums over keys        ``2 sqrt(n) eps A``, and ``n / 16 eps A`` where tensor cores truncate  ``(2 sqrt(n) + n / 16) eps``
weights in 16 bits    ``min(u A, 4 u`` :math:`\sqrt{\sum p_j^2 v_j^2}` ``)``                 none: the sum takes unrounded weights
result                ``3 u |o|``                                                            ``2 eps |lse|``
underflow             ``tiny`` (:math:`\sum |v_j| / l + 2`)                                  none
plain attention       twice its error, the largest in the row (16-bit dtypes only)           none
====================  =====================================================================  =====================================

Rounding the weights costs ``u A`` at worst. The roundings of different keys are independent of the values, so their sum has a standard
deviation below :math:`u \sqrt{\sum p^2 v^2 / 3}`; four ``u`` is seven of those. ``tiny`` is what rounding loses near zero: 2**-25 in float16,
the smallest normal number elsewhere (kernels may flush to zero).

*Plain attention* rounds the scores, the softmax and the result to the dtype's significand (to nearest, no limit to the exponent)
and is exact between these steps: three passes over memory in that dtype, as a framework without a fused kernel does it.

**Gradients.** With :math:`d_i` the row of ``dout``, :math:`g_{ij} = d_i v_j - delta_i`, :math:`\delta_i = d_i o_i -` ``dlse``
and :math:`S_{ij} = p_{ij} g_{ij}`, errors are carried from step to step in the same way:

====================================  ==========================================================================================
step                                  error
====================================  ==========================================================================================
weight :math:`p_{ij}`                 relative, :math:`e^r - 1` with ``r = (D + 8) eps`` :math:`Q_{ij}` ``+ 84 eps + 2 eps |lse|``; and ``tiny``
:math:`d_i v_j`                       ``(Dv + 8) eps`` :math:`\sum_d |d_{id} v_{jd}|`
:math:`\delta_i`                      ``(Dv + 8) eps A + min(u A, 4 u`` :math:`\sqrt{\sum_d d_{id}^2 o_{id}^2}` ``)``, as ``out`` came
                                      rounded, with :math:`A = \sum_d |d_{id} o_{id}|`; and ``2 eps |dlse|``
:math:`S_{ij}`                        those three, and ``3 eps |S|``; and ``tiny (1 + |g|)``
``dq`` :math:`= scale \sum_j S k_j`   that of S; sums over keys, S in 16 bits and the result as in the table above, with S in the place of p
``dk`` :math:`= scale \sum_i S q_i`   likewise, over the queries of all heads of the group
``dv`` :math:`= \sum_i p d_i`         likewise, with that of p
plain attention                       twice its error, the largest in the row: its backward rounds ``dout @ v.T``, S and the results too
====================================  ==========================================================================================

Rows and keys without a partner have gradients of exactly 0. NaN or infinity in what takes part in a visible pair may reach every gradient of
its batch entry and key head (a matrix product multiplies it by weights of 0), and must reach those that depend on it. A result beyond the
largest number of the dtype may be an infinity.

In float64 everything doubles, because the reference has the same errors as the kernel. A row that sees no key must be exactly 0
and -inf. NaN must stand where the reference has it and nowhere else, except what `spread_nonfinite` lets go.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import reference
from ..problem import Problem
from .cases import BackwardCase, Case, touched
from .libraries import to_float64

CHUNK = {"numpy": 2**20, "torch": 2**26}  # scores at a time


class AccuracyError(AssertionError):
    """A result is not what attention is; the message names the worst element and where the wrong ones lie."""


@dataclass(frozen=True, slots=True)
class Precision:
    """What the accuracy rule needs to know of a dtype."""

    eps: float
    unit: float
    significand: int | None
    tiny: float
    largest: float
    factor: float = 1.0

    def sums(self, n, xp):
        """Relative error, in eps, of a sum over ``n`` terms."""
        return 2 * xp.sqrt(n) + (n / 16 if self.significand else 0)

    def rounding(self, size, spread, xp):
        """Error of a sum of terms that are rounded to 16 bits first, from the sum of their sizes and the root of the sum of their squares."""
        return xp.minimum(self.unit * size, 4 * self.unit * spread) if self.significand else 0.0


PRECISION = {
    "float16": Precision(2.0**-23, 2.0**-11, 11, 2.0**-25, 65504.0),
    "bfloat16": Precision(2.0**-23, 2.0**-8, 8, 2.0**-126, 2.0**128 - 2.0**120),
    "float32": Precision(2.0**-23, 2.0**-24, None, 2.0**-126, 2.0**128 - 2.0**104),
    "float64": Precision(2.0**-52, 2.0**-53, None, 2.0**-1022, sys.float_info.max, factor=2.0),
}


@dataclass(frozen=True, slots=True)
class Expected:
    """Exact results and how far each element may be from them. All float64, NumPy arrays or torch tensors.

    Attributes
    ----------
    out, out_tolerance : array, (batch, seqlen_q, heads, head_dim_v)
    lse, lse_tolerance : array, (batch, heads, seqlen_q)
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
    """Exact gradients and how far each element may be from them. All float64, NumPy arrays or torch tensors.

    Attributes
    ----------
    dq, dq_tolerance : array, (batch, seqlen_q, heads, head_dim)
    dk, dk_tolerance : array, (batch, seqlen_k, kv_heads, head_dim)
    dv, dv_tolerance : array, (batch, seqlen_k, kv_heads, head_dim_v)
    dq_free, dk_free, dv_free : array of bool or None
        Elements that may hold anything.
    largest : float
        The largest finite number of the dtype.
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


@dataclass(frozen=True, slots=True)
class GradientAccuracy:
    """Largest error of each gradient in units of its tolerance (at most 1); None for one that was not checked."""

    dq: float | None
    dk: float | None
    dv: float | None


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Largest error of each result in units of its tolerance (at most 1); ``lse`` is None when it was not checked."""

    out: float
    lse: float | None = None


def expected(problem: Problem, q, k, v) -> Expected:
    """Exact attention and its tolerances.

    Parameters
    ----------
    problem : Problem
    q, k, v : array_like or torch.Tensor
        The inputs as the kernel gets them, any float dtype. NumPy arrays are computed by `numbaflash.reference`; torch tensors
        are computed on their device by the same formulas, which makes large problems feasible on a GPU.

    Returns
    -------
    Expected
    """
    if _is_torch(q):
        xp, (q, k, v) = sys.modules["torch"], (to_float64(x) for x in (q, k, v))
    else:
        xp, (q, k, v) = np, (np.asarray(x, np.float64) for x in (q, k, v))
    result = Expected(*(_new(xp, q, shape) for shape in (problem.out_shape, problem.lse_shape) * 2))
    if not problem.seqlen_k or problem.is_empty:
        result.out[...], result.lse[...], result.out_tolerance[...], result.lse_tolerance[...] = 0.0, -math.inf, 0.0, 0.0
        return result
    with np.errstate(invalid="ignore", over="ignore", divide="ignore", under="ignore"):
        _fill(xp, problem, q, k, v, result)
    if xp is np:
        result.out[...], result.lse[...] = reference.forward(problem, q, k, v)
    return result


def spread_nonfinite(known: Expected, problem: Problem, v) -> Expected:
    """The rule for a family whose module says ``NONFINITE_VALUES_SPREAD``.

    NaN or infinity in an element of v that some query sees may reach every query of its head in the same column of ``out``, because a
    weight of 0 times NaN is NaN. Rows without keys stay 0, values that no query sees reach nothing, and ``lse`` does not depend on v.

    Parameters
    ----------
    known : Expected
    problem : Problem
    v : array_like or torch.Tensor, (batch, seqlen_k, kv_heads, head_dim_v)

    Returns
    -------
    Expected
    """
    if problem.is_empty or not problem.seqlen_k:
        return known
    xp = sys.modules["torch"] if _is_torch(known.out) else np
    v = to_float64(v)
    v = xp.as_tensor(v, device=known.out.device) if xp is not np else v
    seen = touched(problem)[1]
    hit = xp.any(~xp.isfinite(v)[:, np.flatnonzero(seen)], 1)  # (batch, kv_heads, head_dim_v)
    hit = xp.concatenate([hit[:, h // problem.group, None] for h in range(problem.heads)], 1)
    rows = xp.swapaxes(known.lse, 1, 2) != -math.inf
    return replace(known, out_free=rows[..., None] & hit[:, None])


def check_forward(case: Case, out, lse=None, *, known: Expected | None = None) -> Accuracy:
    """Check the result of a case against the accuracy rule.

    Parameters
    ----------
    case : Case
    out : array, (batch, seqlen_q, heads, head_dim_v)
        Of any library.
    lse : array, (batch, heads, seqlen_q), optional
        Not checked when None.
    known : Expected, optional
        What `expected` returns for this case, when it has been computed already.

    Returns
    -------
    Accuracy

    Raises
    ------
    AccuracyError
        When an element is off by more than its tolerance, is NaN where it must not be, or is a number where it must be NaN; and when a
        row without keys is not exactly 0 and -inf.
    """
    if known is None:
        memory = case.memory()
        known = expected(case.problem, *(memory[name].decoded() for name in "qkv"))
    return compare(known, out, lse)


def compare(known: Expected, out, lse=None) -> Accuracy:
    """Check results against `Expected` ones; as `check_forward`, for arrays that belong to no `Case`."""
    worst_out = _compare("out", ("b", "i", "h", "d"), out, known.out, known.out_tolerance, known.out_free)
    if lse is None:
        return Accuracy(worst_out)
    return Accuracy(worst_out, _compare("lse", ("b", "h", "i"), lse, known.lse, known.lse_tolerance))


def expected_gradients(problem: Problem, dout, q, k, v, dlse=None) -> ExpectedGradients:
    """Exact gradients and their tolerances.

    Parameters
    ----------
    problem : Problem
    dout, q, k, v : array_like or torch.Tensor
        The inputs as the kernel gets them, any float dtype; ``out`` and ``lse`` are taken to be the exact ones, rounded. NumPy arrays are
        computed by `numbaflash.reference`; finite torch tensors on their device, by the same formulas.
    dlse : array_like or torch.Tensor, optional

    Returns
    -------
    ExpectedGradients
    """
    given = {"dout": dout, "q": q, "k": k, "v": v} | ({} if dlse is None else {"dlse": dlse})
    xp = sys.modules["torch"] if _is_torch(q) else np
    given = {name: to_float64(x) for name, x in given.items()}
    clean = all(bool(xp.isfinite(x).all()) for x in given.values())
    if xp is not np and not clean:
        xp, given = np, {name: x.cpu().numpy() for name, x in given.items()}
    known = {}
    shapes = {name: problem.shape_of(name) for name in ("dq", "dk", "dv")}
    if problem.sees_nothing:
        known = {name: _new(xp, given["q"], shape) for name, shape in shapes.items()}
        for x in known.values():
            x[...] = 0.0
        return ExpectedGradients(**known, **{f"{name}_tolerance": x for name, x in known.items()})
    with np.errstate(invalid="ignore", over="ignore", divide="ignore", under="ignore"):
        known = _fill_gradients(xp, problem, **{name: x if clean else np.where(np.isfinite(x), x, 0.0) for name, x in given.items()})
    if xp is np:
        known |= dict(zip(shapes, reference.backward(problem, **given), strict=True))
    if not clean:
        known |= _reached(problem, known, **given)
    return ExpectedGradients(**known, largest=PRECISION[problem.dtype].largest)


def _reached(problem, known, dout, q, k, v, dlse=None):
    """Which gradients NaN or infinity in what takes part may reach, beyond those that it must."""
    queries, keys = touched(problem)
    hit = np.zeros((problem.batch, problem.kv_heads), bool)
    for x, rows in ((dout, queries), (q, queries), (k, keys), (v, keys), (None if dlse is None else np.swapaxes(dlse, 1, 2)[..., None], queries)):
        if x is not None:
            bad = ~np.isfinite(x[:, rows]).all(axis=(1, 3))  # (batch, heads)
            hit |= bad.reshape(problem.batch, problem.kv_heads, -1).any(axis=2)
    free = {}
    for name, rows in (("dq", queries), ("dk", keys), ("dv", keys)):
        heads = np.repeat(hit, problem.group, axis=1) if name == "dq" else hit
        free[f"{name}_free"] = heads[:, None, :, None] & rows[:, None, None] & ~np.isnan(known[name])
    return free


def check_backward(case: BackwardCase, dq=None, dk=None, dv=None, *, known: ExpectedGradients | None = None) -> GradientAccuracy:
    """Check the gradients of a case against the accuracy rule.

    Parameters
    ----------
    case : BackwardCase
    dq, dk, dv : array, optional
        Of any library. None is not checked.
    known : ExpectedGradients, optional
        What `expected_gradients` returns for this case, when it has been computed already.

    Returns
    -------
    GradientAccuracy

    Raises
    ------
    AccuracyError
        As `check_forward`; a row or key that sees nothing must have a gradient of exactly 0.
    """
    if known is None:
        memory = case.memory()
        known = expected_gradients(case.problem, **{name: memory[name].decoded() for name in ("dout", *"qkv", "dlse") if name in memory})
    return compare_gradients(known, dq, dk, dv)


def compare_gradients(known: ExpectedGradients, dq=None, dk=None, dv=None) -> GradientAccuracy:
    """Check gradients against `ExpectedGradients`; as `check_backward`, for arrays that belong to no `BackwardCase`."""
    worst = {}
    for name, row, head, got in (("dq", "i", "h", dq), ("dk", "j", "hk", dk), ("dv", "j", "hk", dv)):
        of = (getattr(known, name), getattr(known, f"{name}_tolerance"), getattr(known, f"{name}_free"), known.largest)
        worst[name] = None if got is None else _compare(name, ("b", row, head, "d"), got, *of)
    return GradientAccuracy(**worst)


def _fill_gradients(xp, problem, dout, q, k, v, dlse=None) -> dict:
    """Gradients and tolerances of finite inputs, a bounded number of scores at a time; heads of a group stand on an axis of their own."""
    precision = PRECISION[problem.dtype]
    group, sq, sk = problem.group, problem.seqlen_q, problem.seqlen_k
    lead = problem.batch * problem.kv_heads
    dlse = _new(xp, q, problem.lse_shape, xp.zeros) if dlse is None else dlse
    q, dout = (xp.moveaxis(x, 2, 1).reshape(lead, group, sq, x.shape[3]) for x in (q, dout))
    k, v = (xp.moveaxis(x, 2, 1).reshape(lead, 1, sk, x.shape[3]) for x in (k, v))
    dlse = dlse.reshape(lead, group, sq)
    rows = max(1, min(sq, CHUNK[xp.__name__] // (2 * group * sk)))
    leads = max(1, min(lead, CHUNK[xp.__name__] // (2 * group * sk * rows)))
    where = {} if xp is np else {"device": q.device}
    columns = xp.arange(sk, **where)
    like = {"dq": q, "dk": k, "dv": v}
    parts = {f"{name}{kind}": _new(xp, q, x.shape) for name, x in like.items() for kind in ("", "_tolerance")}
    for first in range(0, lead, leads):
        chunk = slice(first, first + leads)
        of_keys = None
        for row in range(0, sq, rows):
            i = xp.arange(row, min(row + rows, sq), **where)[:, None] + problem.offset
            seen = (i == i) & (columns == columns)
            if problem.left is not None:
                seen &= columns >= i - problem.left
            if problem.right is not None:
                seen &= columns <= i + problem.right
            some = slice(row, row + rows)
            of_queries, terms = _gradient_rows(xp, problem, dout[chunk, :, some], q[chunk, :, some], k[chunk], v[chunk], dlse[chunk, :, some], seen)
            parts["dq"][chunk, :, some], parts["dq_tolerance"][chunk, :, some] = of_queries
            of_keys = terms if of_keys is None else {name: [a + b for a, b in zip(of_keys[name], new, strict=True)] for name, new in terms.items()}
        for name, factor in (("dk", problem.scale), ("dv", 1.0)):
            parts[name][chunk, 0], parts[f"{name}_tolerance"][chunk, 0] = _sum_up(xp, precision, factor, *of_keys[name])
    shaped = {}
    for name, part in parts.items():
        heads, (n, dim) = problem.heads if name.startswith("dq") else problem.kv_heads, part.shape[2:]
        shaped[name] = xp.moveaxis(part.reshape(problem.batch, heads, n, dim), 1, 2)
    return shaped


def _gradient_rows(xp, problem, dout, q, k, v, dlse, seen):
    """(dq, its tolerance) of some query rows, and what these rows add to the terms of dk and dv; see `_terms`.

    Shapes as in `_rows`; dout is (n, group, rows, Dv), dlse (n, group, rows).
    """
    precision = PRECISION[problem.dtype]
    eps = precision.eps
    kt, vt = xp.swapaxes(k, -1, -2), xp.swapaxes(v, -1, -2)
    ones = xp.asarray(seen, dtype=xp.float64)
    raw = problem.scale * (q @ kt)
    magnitude = abs(problem.scale) * (abs(q) @ abs(kt))
    p, _, lse = _softmax(xp, raw, seen)
    alive = lse != -math.inf
    out = p @ v
    products = dout * out
    size = xp.sum(abs(products), -1)
    delta = xp.sum(products, -1) - dlse
    gap = dout @ vt - delta[..., None]
    s = p * gap

    loss = eps * ((problem.head_dim + 8) * magnitude + 84 + 2 * abs(xp.where(alive, lse, 0.0))[..., None])
    loss = xp.where(loss < 40, loss, 40.0)  # e**40: anything goes
    p_error = p * xp.expm1(loss) + precision.tiny * ones
    delta_error = (problem.head_dim_v + 8) * eps * size + xp.minimum(
        precision.unit * size, 4 * precision.unit * xp.sqrt(xp.sum(products * products, -1))
    )
    delta_error = delta_error + 2 * eps * abs(dlse)
    dp_error = (problem.head_dim_v + 8) * eps * (abs(dout) @ abs(vt))
    dp_error = dp_error + precision.tiny * (xp.sum(abs(dout), -1)[..., None] + xp.sum(abs(vt), -2)[..., None, :] + 2)
    s_error = p_error * abs(gap) + p * (dp_error + delta_error[..., None]) + 3 * eps * abs(s) + precision.tiny * (1 + abs(gap)) * ones
    s_error = xp.where(alive[..., None], s_error, 0.0)

    plain_p = plain_s = None
    if precision.significand:
        plain_p = _round(_softmax(xp, _round(raw, precision), seen)[0], precision)
        plain_out = _round(plain_p @ v, precision)
        plain_delta = xp.sum(dout * plain_out, -1) - dlse
        plain_s = _round(plain_p * (_round(dout @ vt, precision) - plain_delta[..., None]), precision)

    exists = ones * xp.asarray(alive, dtype=xp.float64)[..., None]
    of_queries = _sum_up(xp, precision, problem.scale, *_terms(xp, s, s_error, plain_s, exists, k))
    n, _, rows, sk = s.shape[0], 1, s.shape[1] * s.shape[2], s.shape[3]

    def by_key(x):
        return None if x is None else xp.swapaxes(x.reshape(n, rows, sk), -1, -2)

    q, dout = (x.reshape(n, rows, x.shape[-1]) for x in (q, dout))
    return of_queries, {
        "dk": _terms(xp, by_key(s), by_key(s_error), by_key(plain_s), by_key(exists), q),
        "dv": _terms(xp, by_key(p), by_key(p_error * exists), by_key(plain_p), by_key(exists), dout),
    }


def _terms(xp, weights, errors, plain, exists, values):
    """What sums of ``weights @ values`` are judged by; every term is a sum itself, so that those of several chunks add up."""
    return [
        weights @ values,
        errors @ abs(values),
        abs(weights) @ abs(values),
        (weights * weights) @ (values * values),
        xp.sum(abs(weights), -1),
        xp.sum(exists, -1),
        weights @ values if plain is None else plain @ values,
    ]


def _sum_up(xp, precision, factor, exact, error, size, squares, weight, n, plain):
    """(gradient, tolerance) from the terms of `_terms`; ``factor`` scales the sums."""
    result, plain = factor * exact, factor * plain
    tolerance = error + precision.sums(n, xp)[..., None] * precision.eps * size + precision.rounding(size, xp.sqrt(squares), xp)
    tolerance = abs(factor) * (tolerance + precision.tiny * weight[..., None]) + 3 * precision.unit * abs(result) + 2 * precision.tiny
    if precision.significand:
        tolerance = tolerance + 2 * xp.amax(abs(_round(plain, precision) - result), -1)[..., None]
    return result, xp.where(n[..., None] > 0, precision.factor * tolerance, 0.0)


def _new(xp, like, shape, create=None):
    return (create or xp.empty)(shape, dtype=xp.float64, **({} if xp is np else {"device": like.device}))


def _fill(xp, problem, q, k, v, result):
    """Fill results and tolerances, a bounded number of scores at a time; heads of a group stand on an axis of their own."""
    group, kv_heads = problem.group, problem.kv_heads
    sq, sk, dv = problem.seqlen_q, problem.seqlen_k, problem.head_dim_v
    lead = problem.batch * kv_heads
    q = xp.moveaxis(q, 2, 1).reshape(lead, group, sq, problem.head_dim)
    k = xp.moveaxis(k, 2, 1).reshape(lead, 1, sk, problem.head_dim)
    v = xp.moveaxis(v, 2, 1).reshape(lead, 1, sk, dv)
    chunk_size = CHUNK[xp.__name__]
    rows = max(1, min(sq, chunk_size // (group * sk)))
    leads = max(1, min(lead, chunk_size // (group * sk * rows)))
    parts = [_new(xp, q, (lead, group, sq, dv)), _new(xp, q, (lead, group, sq))]
    parts += [xp.empty_like(part) for part in parts]
    where = {} if xp is np else {"device": q.device}
    columns = xp.arange(sk, **where)
    for row in range(0, sq, rows):
        i = xp.arange(row, min(row + rows, sq), **where)[:, None] + problem.offset
        seen = (i == i) & (columns == columns)
        if problem.left is not None:
            seen &= columns >= i - problem.left
        if problem.right is not None:
            seen &= columns <= i + problem.right
        for first in range(0, lead, leads):
            chunk = slice(first, first + leads)
            block = _rows(xp, problem, q[chunk, :, row : row + rows], k[chunk], v[chunk], seen)
            for part, values in zip(parts, block, strict=True):
                part[chunk, :, row : row + rows] = values
    shape = (problem.batch, problem.heads, sq)
    result.out[...] = xp.moveaxis(parts[0].reshape(*shape, dv), 1, 2)
    result.lse[...] = parts[1].reshape(shape)
    result.out_tolerance[...] = xp.moveaxis(parts[2].reshape(*shape, dv), 1, 2)
    result.lse_tolerance[...] = parts[3].reshape(shape)


def _rows(xp, problem, q, k, v, seen):
    """(out, lse, out tolerance, lse tolerance) of some query rows: q (n, group, rows, D), k (n, 1, Sk, D), v (n, 1, Sk, Dv), seen (rows, Sk)."""
    precision = PRECISION[problem.dtype]
    eps, unit = precision.eps, precision.unit
    kt = xp.swapaxes(k, -1, -2)
    raw = problem.scale * (q @ kt)
    magnitude = xp.where(seen, abs(problem.scale) * (abs(q) @ abs(kt)), 0.0)
    finite = xp.where(xp.isfinite(v), v, 0.0)

    weights, total, lse = _softmax(xp, raw, seen)
    out = weights @ finite
    size = weights @ abs(finite)
    spread = xp.sqrt((weights * weights) @ (finite * finite))
    conditioned = weights * magnitude
    condition = xp.sum(conditioned, -1)
    ones = xp.asarray(seen, dtype=xp.float64)
    n = xp.sum(ones, -1)
    sums = precision.sums(n, xp)

    tolerance = (problem.head_dim + 8) * eps * (conditioned @ abs(finite) + condition[..., None] * abs(out))
    tolerance += (84 + sums[:, None]) * eps * size
    tolerance += 3 * unit * abs(out)
    tolerance += precision.tiny * (ones @ abs(finite) / total[..., None] + 2)
    if precision.significand:
        tolerance += precision.rounding(size, spread, xp)
        plain = _round(_softmax(xp, _round(raw, precision), seen)[0], precision)
        plain = _round(plain @ finite, precision)
        tolerance += 2 * xp.amax(abs(plain - out), -1)[..., None]
    lse_tolerance = eps * ((problem.head_dim + 8) * condition + 84 + sums + 2 * abs(lse))

    if not bool(xp.isfinite(v).all()):
        for value in (math.nan, math.inf, -math.inf):
            hit = xp.isnan(v) if math.isnan(value) else v == value
            out = xp.where(ones @ xp.asarray(hit, dtype=xp.float64) > 0, out + value, out)
    empty = lse == -math.inf
    return (
        out,
        lse,
        xp.where(empty[..., None], 0.0, precision.factor * tolerance),
        xp.where(empty, 0.0, precision.factor * lse_tolerance),
    )


def _softmax(xp, raw, seen):
    """Weights, sum of exp(score - maximum) and log-sum-exp; a row that sees nothing gets 0, 1 and -inf."""
    score = xp.where(seen, raw, -math.inf)
    top = xp.amax(score, -1)
    top = xp.where(top == -math.inf, 0.0, top)
    weights = xp.exp(score - top[..., None])
    total = xp.sum(weights, -1)
    empty = total == 0.0
    total = xp.where(empty, 1.0, total)
    return weights / total[..., None], total, xp.where(empty, -math.inf, top + xp.log(total))


def _round(x, precision):
    """Nearest number with that many significand bits, no limit to the exponent (Veltkamp's splitting)."""
    shifted = x * (2.0 ** (53 - precision.significand) + 1)
    return shifted - (shifted - x)


def _is_torch(array) -> bool:
    return type(array).__module__.split(".")[0] == "torch"


def _compare(name, axes, got, want, tolerance, free=None, largest=math.inf) -> float:
    """Largest error in units of the tolerance, elements that are free left out; raises when it is above 1."""
    got = to_float64(got)
    if tuple(got.shape) != tuple(want.shape):
        raise AccuracyError(f"{name} must have shape {tuple(want.shape)}; got {tuple(got.shape)}")
    if _is_torch(want):
        xp = sys.modules["torch"]
        got = xp.as_tensor(got, device=want.device)
    else:
        xp = np
        got = got.cpu().numpy() if _is_torch(got) else got
    if not math.prod(want.shape):
        return 0.0
    with np.errstate(invalid="ignore"):
        fine = (got == want) | (xp.isnan(got) & xp.isnan(want))
        fine |= xp.isinf(got) & (got * want > 0) & (abs(want) + tolerance >= largest)
        fine = fine if free is None else fine | free
        error = abs(got - want)
        ratio = xp.where(xp.isfinite(error), error / xp.where(tolerance > 0, tolerance, 5e-324), math.inf)
        ratio = xp.where(fine, 0.0, ratio)
    worst = float(ratio.max())
    if worst <= 1.0:
        return worst
    ratio = ratio.cpu().numpy() if _is_torch(ratio) else ratio
    wrong = np.argwhere(ratio > 1.0)
    at = tuple(int(x) for x in np.unravel_index(ratio.argmax(), ratio.shape))
    where = ", ".join(f"{axis}={n}" for axis, n in zip(axes, at, strict=True))
    ranges = ", ".join(f"{axis} {lo}..{hi}" for axis, lo, hi in zip(axes, wrong.min(axis=0), wrong.max(axis=0), strict=True))
    raise AccuracyError(
        f"{name}[{where}] is {float(got[at]):.9g}, expected {float(want[at]):.9g} with a tolerance of {float(tolerance[at]):.3g} "
        f"(error / tolerance {worst:.3g}); {len(wrong)} of {ratio.size} elements are wrong, within {ranges}"
    )
