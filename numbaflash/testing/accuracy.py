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

**Options** add to these what they may round, with :math:`c t_j` the capped score, :math:`a_j` the ALiBi term and :math:`b_j` the bias:

* to a score, and from there to its weight as :math:`e^r - 1` of it: ``4 eps`` :math:`(|c t_j| + |a_j| + |b_j|)`; a bias so large that the rest
  is lost beside it in the accumulation type may be the score;
* tanh: a relative error of ``8 eps``, and in 16-bit dtypes of 2**-11, that of the special-function unit. The derivative :math:`1 - t^2` errs by
  :math:`2 |t|` times the error of t;
* a sink: ``4 eps`` of it, weighed as the score of a key would be. It is one more term of the sum;
* dropout: the kept weights take the place of the weights, divided by ``1 - dropout``, which costs ``2 eps`` of them; the sum and the LSE have
  all weights;
* ``dbias``: the errors of S summed, sums over its broadcast axes, and ``3 u`` of its own dtype; ``dsinks``: likewise, of
  :math:`p_{sink} \delta_i`, in the dtype of the LSE.

**Packed sequences** are judged one by one, each as the batch entry that it would be.

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
from .cases import BackwardCase, Case, rows_within_lengths, taking_part, visible_pairs
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

    @property
    def tanh(self):
        """Relative error of tanh."""
        return 2.0**-11 if self.significand else 8 * self.eps

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


@dataclass(frozen=True, slots=True)
class GradientAccuracy:
    """Largest error of each gradient in units of its tolerance (at most 1); None for one that was not checked."""

    dq: float | None
    dk: float | None
    dv: float | None
    dbias: float | None = None
    dsinks: float | None = None


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Largest error of each result in units of its tolerance (at most 1); ``lse`` is None when it was not checked."""

    out: float
    lse: float | None = None


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
    if _is_torch(q):
        xp, (q, k, v) = sys.modules["torch"], (to_float64(x) for x in (q, k, v))
    else:
        xp, (q, k, v) = np, (np.asarray(x, np.float64) for x in (q, k, v))
    result = Expected(*(_new(xp, q, shape) for shape in (problem.out_shape, problem.lse_shape) * 2))
    scores = _Scores(xp, problem, q, options, seed)
    if not problem.seqlen_k or problem.is_empty:
        result.out[...], result.out_tolerance[...] = 0.0, 0.0
        result.lse[...] = scores.lse_without_keys()
        result.lse_tolerance[...] = xp.where(xp.isfinite(result.lse), 8 * PRECISION[problem.dtype].eps * abs(result.lse), 0.0)
        return result
    with np.errstate(invalid="ignore", over="ignore", divide="ignore", under="ignore"):
        _fill(xp, problem, q, k, v, scores, result)
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
    if problem.is_empty or not problem.seqlen_k:
        return known
    xp = sys.modules["torch"] if _is_torch(known.lse) else np
    v = to_float64(v)
    v = xp.as_tensor(v, device=known.lse.device) if xp is not np else v
    seen = taking_part(problem, **options)[1][..., None]
    seen = seen if xp is np else xp.from_numpy(seen.copy()).to(v.device)
    hit = xp.any(~xp.isfinite(v) & seen, 1)  # (batch, kv_heads, head_dim_v)
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
        known = expected(case.problem, *(memory[name].decoded() for name in "qkv"), **case.given_options(memory))
    return compare(known, out, lse)


def compare(known: Expected, out, lse=None) -> Accuracy:
    """Check results against `Expected` ones; as `check_forward`, for arrays that belong to no `Case`."""
    worst_out = _compare("out", ("b", "i", "h", "d"), out, known.out, known.out_tolerance, known.out_free)
    if lse is None:
        return Accuracy(worst_out)
    return Accuracy(worst_out, _compare("lse", ("b", "h", "i"), lse, known.lse, known.lse_tolerance))


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
    xp = sys.modules["torch"] if _is_torch(q) else np
    given, options = ({name: to_float64(x) for name, x in arrays.items()} for arrays in (given, options))
    clean = all(bool(_module(x).isfinite(x).all()) for x in given.values()) and not any(bool(_spoilt(name, x).any()) for name, x in options.items())
    if not clean:
        xp, (given, options) = np, ({name: x.cpu().numpy() if _is_torch(x) else x for name, x in arrays.items()} for arrays in (given, options))
    names = [f"d{name}" for name in problem.gradients]
    limits = {"largest": PRECISION[problem.dtype].largest, "largest_bias": PRECISION[problem.bias_dtype or problem.dtype].largest}
    if problem.sees_nothing or not problem.seqlen_k:
        known = {f"{name}{kind}": _new(xp, given["q"], problem.shape_of(name), xp.zeros) for name in names for kind in ("", "_tolerance")}
        if not problem.sees_nothing:
            alive = _Scores(xp, problem, given["q"], options, seed).lse_without_keys() != -math.inf
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
        known = _fill_gradients(xp, problem, _Scores(xp, problem, finite["q"], plain, seed), **finite)
    if xp is np:
        known |= dict(zip(names, reference.backward(problem, **given, seed=seed, **options), strict=True))
    if not clean:
        known |= _reached(problem, known, given, options)
    return ExpectedGradients(**known, **limits)


def _module(x):
    return sys.modules["torch"] if _is_torch(x) else np


def _spoilt(name, x):
    """Where an option holds NaN or an infinity that is no number to it: -inf in a bias or a sink is one."""
    return ~_module(x).isfinite(x) & ~((name in ("bias", "sinks")) & (x == -math.inf))


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


def check_backward(
    case: BackwardCase, dq=None, dk=None, dv=None, dbias=None, dsinks=None, *, known: ExpectedGradients | None = None
) -> GradientAccuracy:
    """Check the gradients of a case against the accuracy rule.

    Parameters
    ----------
    case : BackwardCase
    dq, dk, dv, dbias, dsinks : array, optional
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
        inputs = {name: memory[name].decoded() for name in ("dout", *"qkv", "dlse") if name in memory}
        known = expected_gradients(case.problem, **inputs, **case.given_options(memory))
    return compare_gradients(known, dq, dk, dv, dbias, dsinks)


def compare_gradients(known: ExpectedGradients, dq=None, dk=None, dv=None, dbias=None, dsinks=None) -> GradientAccuracy:
    """Check gradients against `ExpectedGradients`; as `check_backward`, for arrays that belong to no `BackwardCase`."""
    if dbias is not None and len(dbias.shape) < 4:
        dbias = dbias.reshape((1,) * (4 - len(dbias.shape)) + tuple(dbias.shape))
    worst = {}
    for name, axes, got in (
        ("dq", ("b", "i", "h", "d"), dq),
        ("dk", ("b", "j", "hk", "d"), dk),
        ("dv", ("b", "j", "hk", "d"), dv),
        ("dbias", ("b", "h", "i", "j"), dbias),
        ("dsinks", ("h",), dsinks),
    ):
        largest = {"dbias": known.largest_bias, "dsinks": math.inf}.get(name, known.largest)
        of = (getattr(known, name), getattr(known, f"{name}_tolerance"), getattr(known, f"{name}_free"), largest)
        worst[name] = None if got is None else _compare(name, axes, got, *of)
    return GradientAccuracy(**worst)


@dataclass(frozen=True)
class _Padded:
    """Packed sequences as the batch that they are: its problem and options, and the way there and back."""

    packing: reference.Packing

    @classmethod
    def of(cls, problem, options):
        options = {name: x.cpu().numpy() if _is_torch(x) else x for name, x in options.items()}
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
            host = values.cpu().numpy() if _is_torch(values) else values
            (entries,) = self.packing.pad(**{"k" if name in "kv" else "q": host.T if turned else host})
            entries = np.moveaxis(entries, 1, 2) if turned else entries
            found.append(sys.modules["torch"].as_tensor(entries, device=values.device) if _is_torch(values) else entries)
        return found

    def rows(self, entries, name, nobody):
        """Results of "q", "k", "v" or "lse" without the batch axis, with ``nobody`` in rows of no sequence; NumPy."""
        entries = entries.cpu().numpy() if _is_torch(entries) else entries
        if name == "lse":
            return self.packing.rows(np.moveaxis(entries, 2, 1), "q", nobody).T
        return self.packing.rows(entries, "q" if name == "q" else "k", nobody)


class _Scores:
    """What turns products of queries and keys into scores, and decides what is seen: the options of a problem, in float64."""

    def __init__(self, xp, problem, like, options, seed):
        reference.check_names(problem, options)
        self.xp, self.problem, self.seed, self.given = xp, problem, seed, {}
        self.where = {} if xp is np else {"device": like.device}
        for name, x in options.items():
            x = to_float64(x)
            x = (x.cpu().numpy() if _is_torch(x) else x) if xp is np else xp.as_tensor(x, **self.where)
            if name == "block_mask":  # the array of bool that it stands for
                own = (1,) * (4 - len(x.shape)) + tuple(x.shape)
                self.given["mask"] = xp.broadcast_to(x.reshape(own), (*own[:2], problem.seqlen_q, problem.seqlen_k))
                continue
            self.given[name] = x.reshape(problem.shape_of(name))

    def lse_without_keys(self):
        """(batch, heads, seqlen_q), or a number: the sink in every row within its length."""
        if not self.problem.sinks or self.problem.is_empty:
            return -math.inf
        return self.chunk(slice(0, self.problem.batch * self.problem.kv_heads), slice(0, self.problem.seqlen_q)).sink.reshape(self.problem.lse_shape)

    def chunk(self, leads, rows):
        """For some batch entries and key heads (counted together) and some query rows."""
        xp, problem = self.xp, self.problem
        lead = xp.arange(leads.start, min(leads.stop, problem.batch * problem.kv_heads), **self.where)
        b = lead // problem.kv_heads
        h = (lead % problem.kv_heads)[:, None] * problem.group + xp.arange(problem.group, **self.where)
        i = xp.arange(rows.start, min(rows.stop, problem.seqlen_q), **self.where)[:, None]
        j = xp.arange(problem.seqlen_k, **self.where)
        length_q, length_k = (self._lengths(name, n, b) for name, n in (("seqlens_q", problem.seqlen_q), ("seqlens_k", problem.seqlen_k)))
        place = i + (length_k - length_q if problem.offset_per_entry else problem.offset)
        seen = (i < length_q) & (j < length_k)
        if problem.left is not None:
            seen = seen & (j >= place - problem.left)
        if problem.right is not None:
            seen = seen & (j <= place + problem.right)
        if problem.masked:
            seen = seen & (self._of_heads("mask", b, h, rows) != 0)
        added = {}
        if problem.alibi:
            added["alibi"] = -self._of_heads("alibi_slopes", b, h)[..., None, None] * abs(place - j)
        if problem.bias:
            added["bias"] = self._of_heads("bias", b, h, rows)
        sink = None
        if problem.sinks:
            sink = xp.where((i < length_q)[..., 0], self.given["sinks"][h][..., None], -math.inf)
        keep = None
        if problem.dropout:
            of_heads = [[reference.kept(problem, int(b[n]), int(h[n, g]), self.seed, rows) for g in range(problem.group)] for n in range(len(b))]
            keep = xp.asarray(np.array(of_heads), **self.where)
        return _Chunk(xp, problem, seen, sink, keep, b=b, h=h, **added)

    def _lengths(self, name, capacity, b):
        if name not in self.given:
            return capacity
        return self.xp.clip(self.given[name], 0, capacity)[b][:, None, None, None]

    def _of_heads(self, name, b, h, rows=None):
        x = self.given[name]
        if rows is not None and x.shape[2] > 1:
            x = x[:, :, rows]
        return x[b[:, None] if x.shape[0] > 1 else 0 * b[:, None], h if x.shape[1] > 1 else 0 * h]


@dataclass(frozen=True)
class _Chunk:
    """Of n batch entries and key heads: ``seen`` broadcasts to (n, group, rows, seqlen_k), and so does what is added to the scores and what
    dropout multiplies by; ``sink`` is (n, group, rows); ``b`` (n,) and ``h`` (n, group) say which ones they are."""

    xp: Any
    problem: Problem
    seen: Any
    sink: Any
    keep: Any
    b: Any
    h: Any
    alibi: Any = None
    bias: Any = None

    def score(self, raw, raw_error):
        """(scores, what options add to their errors or None, derivative by the product, its error)."""
        xp, problem, precision = self.xp, self.problem, PRECISION[self.problem.dtype]
        score, slope, slope_error, extra = raw, 1.0, 0.0, None
        if problem.softcap is not None:
            t = xp.tanh(raw / problem.softcap)
            slope, error = 1.0 - t * t, precision.tanh * abs(t) + raw_error / problem.softcap * (1.0 - t * t)
            slope_error = 2 * abs(t) * error + error * error + 4 * precision.eps
            score = problem.softcap * t
            extra = precision.tanh * abs(score)
        size = abs(score)
        if self.alibi is not None:
            score, size = score + self.alibi, size + abs(self.alibi)
        if extra is None and (self.alibi is not None or self.bias is not None):
            extra = 0.0
        if extra is None:
            return score, None, slope, slope_error
        if self.bias is None:
            return score, extra + 4 * precision.eps * size, slope, slope_error
        finite = xp.where(xp.isfinite(self.bias), self.bias, 0.0)
        alone = abs(finite) * precision.eps > 4 * size
        score = score + self.bias
        lost = abs(xp.where(xp.isfinite(self.bias), score, 0.0) - finite)
        return score, extra + xp.where(alone, lost, 4 * precision.eps * (size + abs(finite))), slope, slope_error

    def kept(self, weights):
        return weights if self.keep is None else weights * self.keep


def _fill_gradients(xp, problem, scores, dout, q, k, v, dlse=None) -> dict:
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
    like = {"dq": q, "dk": k, "dv": v}
    parts = {f"{name}{kind}": _new(xp, q, x.shape) for name, x in like.items() for kind in ("", "_tolerance")}
    of_options = {name: [_new(xp, q, problem.shape_of(name), xp.zeros) for _ in range(4)] for name in ("bias", "sinks") if name in problem.gradients}
    for first in range(0, lead, leads):
        chunk = slice(first, first + leads)
        of_keys = None
        for row in range(0, sq, rows):
            some = slice(row, row + rows)
            inputs = (dout[chunk, :, some], q[chunk, :, some], k[chunk], v[chunk], dlse[chunk, :, some])
            of_queries, terms, option_terms = _gradient_rows(xp, problem, *inputs, scores.chunk(chunk, some))
            parts["dq"][chunk, :, some], parts["dq_tolerance"][chunk, :, some] = of_queries
            of_keys = terms if of_keys is None else {name: [a + b for a, b in zip(of_keys[name], new, strict=True)] for name, new in terms.items()}
            for name, add in option_terms.items():
                add(of_options[name], some)
        for name, factor in (("dk", problem.scale), ("dv", 1.0)):
            parts[name][chunk, 0], parts[f"{name}_tolerance"][chunk, 0] = _sum_up(xp, precision, factor, *of_keys[name])
    shaped = {}
    for name, part in parts.items():
        heads, (n, dim) = problem.heads if name.startswith("dq") else problem.kv_heads, part.shape[2:]
        shaped[name] = xp.moveaxis(part.reshape(problem.batch, heads, n, dim), 1, 2)
    for name, (exact, error, size, n) in of_options.items():
        own = PRECISION[problem.dtype_of(name)]
        tolerance = error + precision.sums(n, xp) * precision.eps * size + 3 * own.unit * abs(exact) + 2 * max(own.tiny, precision.tiny)
        shaped[f"d{name}"], shaped[f"d{name}_tolerance"] = exact, xp.where(n > 0, precision.factor * tolerance, 0.0)
    return shaped


def _gradient_rows(xp, problem, dout, q, k, v, dlse, chunk):
    """(dq, its tolerance) of some query rows, what these rows add to the terms of dk and dv (see `_terms`), and functions that add to those of
    the options.

    Shapes as in `_rows`; dout is (n, group, rows, Dv), dlse (n, group, rows).
    """
    precision = PRECISION[problem.dtype]
    eps = precision.eps
    kt, vt = xp.swapaxes(k, -1, -2), xp.swapaxes(v, -1, -2)
    seen = chunk.seen
    ones = xp.asarray(seen, dtype=xp.float64)
    raw = problem.scale * (q @ kt)
    raw_error = eps * (problem.head_dim + 8) * abs(problem.scale) * (abs(q) @ abs(kt))
    score, extra, slope, slope_error = chunk.score(raw, raw_error)
    p, _, lse, of_sink = _softmax(xp, score, seen, chunk.sink)
    alive = lse != -math.inf
    weights = chunk.kept(p)
    out = weights @ v
    products = dout * out
    size = xp.sum(abs(products), -1)
    delta = xp.sum(products, -1) - dlse
    gap = chunk.kept(dout @ vt) - delta[..., None]
    s = p * gap

    loss = raw_error + eps * (84 + 2 * abs(xp.where(alive, lse, 0.0))[..., None])
    loss = loss if extra is None else loss + extra
    loss = xp.where(loss < 40, loss, 40.0)  # e**40: anything goes
    p_error = p * xp.expm1(loss) + precision.tiny * ones
    delta_error = (problem.head_dim_v + 8) * eps * size + xp.minimum(
        precision.unit * size, 4 * precision.unit * xp.sqrt(xp.sum(products * products, -1))
    )
    delta_error = delta_error + 2 * eps * abs(dlse)
    dp_error = (problem.head_dim_v + 8) * eps * (abs(dout) @ abs(vt))
    dp_error = dp_error + precision.tiny * (xp.sum(abs(dout), -1)[..., None] + xp.sum(abs(vt), -2)[..., None, :] + 2)
    dp_error = chunk.kept(dp_error)
    s_error = p_error * abs(gap) + p * (dp_error + delta_error[..., None]) + 3 * eps * abs(s) + precision.tiny * (1 + abs(gap)) * ones
    s_error = xp.where(alive[..., None], s_error, 0.0)
    weights_error = chunk.kept(p_error) + (0.0 if chunk.keep is None else 2 * eps * weights)
    inner, inner_error = s * slope, s_error * slope + abs(s) * slope_error + s_error * slope_error

    plain_weights = plain_inner = None
    if precision.significand:
        plain_p = _round(_softmax(xp, _round(score, precision), seen, chunk.sink)[0], precision)
        plain_weights = _round(chunk.kept(plain_p), precision)
        plain_out = _round(plain_weights @ v, precision)
        plain_delta = xp.sum(dout * plain_out, -1) - dlse
        plain_inner = _round(plain_p * (_round(chunk.kept(dout @ vt), precision) - plain_delta[..., None]), precision) * slope

    exists = ones * xp.asarray(alive, dtype=xp.float64)[..., None]
    of_queries = _sum_up(xp, precision, problem.scale, *_terms(xp, inner, inner_error, plain_inner, exists, k))
    n, _, rows, sk = s.shape[0], 1, s.shape[1] * s.shape[2], s.shape[3]

    def by_key(x):
        return None if x is None else xp.swapaxes(x.reshape(n, rows, sk), -1, -2)

    options = {}
    if problem.bias:
        terms = [xp.where(exists > 0, x, 0.0) for x in (s, s_error, abs(s), exists)]
        options["bias"] = lambda totals, some: _add_bias_terms(totals, chunk, some, terms)
    if problem.sinks:
        of_sink = xp.where(alive, of_sink, 0.0)
        sink = xp.where(xp.isfinite(chunk.sink), chunk.sink, 0.0)
        lost = xp.clip(eps * (84 + 2 * abs(xp.where(alive, lse, 0.0)) + 4 * abs(sink)), 0.0, 40.0)
        error = of_sink * (xp.expm1(lost) * abs(delta) + delta_error) + precision.tiny * (1 + abs(delta))
        counted = xp.asarray(alive & (chunk.sink != -math.inf), dtype=xp.float64)
        sums = [xp.where(counted > 0, x, 0.0).sum(-1) for x in (-of_sink * delta, error, abs(of_sink * delta), counted)]
        options["sinks"] = lambda totals, some: _add_sink_terms(totals, chunk, sums)

    q, dout = (x.reshape(n, rows, x.shape[-1]) for x in (q, dout))
    return (
        of_queries,
        {
            "dk": _terms(xp, by_key(inner), by_key(inner_error), by_key(plain_inner), by_key(exists), q),
            "dv": _terms(xp, by_key(weights), by_key(weights_error * exists), by_key(plain_weights), by_key(exists), dout),
        },
        options,
    )


def _add_bias_terms(totals, chunk, rows, terms):
    """Add terms (n, group, rows, seqlen_k) to totals that may have 1 in the place of any axis."""
    for total, term in zip(totals, terms, strict=True):
        whole = [n > 1 for n in total.shape]
        target = total[:, :, rows] if whole[2] else total
        term = term if whole[2] else term.sum(2)[:, :, None]
        term = term if whole[3] else term.sum(3)[..., None]
        for n, g in np.ndindex(*term.shape[:2]):
            target[int(chunk.b[n]) if whole[0] else 0, int(chunk.h[n, g]) if whole[1] else 0] += term[n, g]


def _add_sink_terms(totals, chunk, terms):
    for total, term in zip(totals, terms, strict=True):
        for n, g in np.ndindex(*term.shape):
            total[int(chunk.h[n, g])] += term[n, g]


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


def _fill(xp, problem, q, k, v, scores, result):
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
    for row in range(0, sq, rows):
        some = slice(row, row + rows)
        for first in range(0, lead, leads):
            chunk = slice(first, first + leads)
            block = _rows(xp, problem, q[chunk, :, some], k[chunk], v[chunk], scores.chunk(chunk, some))
            for part, values in zip(parts, block, strict=True):
                part[chunk, :, some] = values
    shape = (problem.batch, problem.heads, sq)
    result.out[...] = xp.moveaxis(parts[0].reshape(*shape, dv), 1, 2)
    result.lse[...] = parts[1].reshape(shape)
    result.out_tolerance[...] = xp.moveaxis(parts[2].reshape(*shape, dv), 1, 2)
    result.lse_tolerance[...] = parts[3].reshape(shape)


def _rows(xp, problem, q, k, v, chunk):
    """(out, lse, out tolerance, lse tolerance) of some query rows: q (n, group, rows, D), k (n, 1, Sk, D), v (n, 1, Sk, Dv)."""
    precision = PRECISION[problem.dtype]
    eps, unit = precision.eps, precision.unit
    seen = chunk.seen
    kt = xp.swapaxes(k, -1, -2)
    raw = problem.scale * (q @ kt)
    raw_error = (problem.head_dim + 8) * eps * abs(problem.scale) * (abs(q) @ abs(kt))
    score, extra, _, _ = chunk.score(raw, raw_error)
    finite = xp.where(xp.isfinite(v), v, 0.0)

    p, total, lse, of_sink = _softmax(xp, score, seen, chunk.sink)
    weights = chunk.kept(p)
    out = weights @ finite
    size = weights @ abs(finite)
    spread = xp.sqrt((weights * weights) @ (finite * finite))
    loss = raw_error if extra is None else raw_error + xp.expm1(xp.where(extra < 40, extra, 40.0))
    conditioned = p * xp.where(seen, loss, 0.0)
    condition = xp.sum(conditioned, -1)
    if chunk.sink is not None:
        condition = condition + of_sink * 4 * eps * abs(xp.where(xp.isfinite(chunk.sink), chunk.sink, 0.0))
    ones = xp.asarray(seen, dtype=xp.float64)
    n = xp.sum(ones, -1)
    sums = precision.sums(n if chunk.sink is None else n + 1, xp)
    exists = ones * xp.asarray(lse != -math.inf, dtype=xp.float64)[..., None]

    tolerance = chunk.kept(conditioned) @ abs(finite) + condition[..., None] * abs(out)
    tolerance += (84 + sums[..., None] + (0 if chunk.keep is None else 2)) * eps * size
    tolerance += 3 * unit * abs(out)
    tolerance += precision.tiny * (ones @ abs(finite) / total[..., None] / (1 - problem.dropout) + 2)
    if precision.significand:
        tolerance += precision.rounding(size, spread, xp)
        plain = _round(_softmax(xp, _round(score, precision), seen, chunk.sink)[0], precision)
        plain = _round((plain if chunk.keep is None else _round(chunk.kept(plain), precision)) @ finite, precision)
        tolerance += 2 * xp.amax(abs(plain - out), -1)[..., None]
    lse_tolerance = condition + eps * (84 + sums + 2 * abs(lse))

    if not bool(xp.isfinite(v).all()):
        for value in (math.nan, math.inf, -math.inf):
            hit = xp.isnan(v) if math.isnan(value) else v == value
            out = xp.where(exists @ xp.asarray(hit, dtype=xp.float64) > 0, out + value, out)
    empty = lse == -math.inf
    return (
        out,
        lse,
        xp.where((empty | (n == 0))[..., None], 0.0, precision.factor * tolerance),
        xp.where(empty, 0.0, precision.factor * lse_tolerance),
    )


def _softmax(xp, score, seen, sink=None):
    """Weights, sum of exp(score - maximum), log-sum-exp and weight of the sink; a row that sees nothing gets 0, 1 and -inf."""
    score = xp.where(seen, score, -math.inf)
    top = xp.amax(score, -1)
    top = top if sink is None else xp.maximum(top, sink)
    top = xp.where(top == -math.inf, 0.0, top)
    weights = xp.exp(score - top[..., None])
    of_sink = 0.0 * top if sink is None else xp.exp(sink - top)
    total = xp.sum(weights, -1) + of_sink
    empty = total == 0.0
    total = xp.where(empty, 1.0, total)
    return weights / total[..., None], total, xp.where(empty, -math.inf, top + xp.log(total)), of_sink / total


def _round(x, precision):
    """Nearest number with that many significand bits, no limit to the exponent (Veltkamp's splitting)."""
    shifted = x * (2.0 ** (53 - precision.significand) + 1)
    rounded = shifted - (shifted - x)
    infinite = x == -math.inf
    return _module(x).where(infinite, x, rounded) if bool(infinite.any()) else rounded


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
    with np.errstate(invalid="ignore", over="ignore"):
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
    axes = axes[-len(at) :]  # packed sequences have no batch axis
    where = ", ".join(f"{axis}={n}" for axis, n in zip(axes, at, strict=True))
    ranges = ", ".join(f"{axis} {lo}..{hi}" for axis, lo, hi in zip(axes, wrong.min(axis=0), wrong.max(axis=0), strict=True))
    raise AccuracyError(
        f"{name}[{where}] is {float(got[at]):.9g}, expected {float(want[at]):.9g} with a tolerance of {float(tolerance[at]):.3g} "
        f"(error / tolerance {worst:.3g}); {len(wrong)} of {ratio.size} elements are wrong, within {ranges}"
    )
