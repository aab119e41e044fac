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
                                      rounded, with :math:`A = \sum_d |d_{id} o_{id}|`; ``2 eps |dlse|``; and, for out near zero,
                                      ``tiny min(`` :math:`\sum_d |d_{id}|` ``, 4`` :math:`\sqrt{\sum_d d_{id}^2}` ``)``
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
from dataclasses import dataclass

import numpy as np

from .arithmetic import is_torch
from .cases import BackwardCase, Case
from .exact import Expected, ExpectedGradients, expected, expected_gradients
from .libraries import to_float64


class AccuracyError(AssertionError):
    """A result is not what attention is; the message names the worst element and where the wrong ones lie."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Largest error of each result in units of its tolerance (at most 1); ``lse`` is None when it was not checked."""

    out: float
    lse: float | None = None


@dataclass(frozen=True, slots=True)
class GradientAccuracy:
    """Largest error of each gradient in units of its tolerance (at most 1); None for one that was not checked."""

    dq: float | None
    dk: float | None
    dv: float | None
    dbias: float | None = None
    dsinks: float | None = None


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


def _compare(name, axes, got, want, tolerance, free=None, largest=math.inf) -> float:
    """Largest error in units of the tolerance, elements that are free left out; raises when it is above 1."""
    got = to_float64(got)
    if tuple(got.shape) != tuple(want.shape):
        raise AccuracyError(f"{name} must have shape {tuple(want.shape)}; got {tuple(got.shape)}")
    if is_torch(want):
        xp = sys.modules["torch"]
        got = xp.as_tensor(got, device=want.device)
    else:
        xp = np
        got = got.cpu().numpy() if is_torch(got) else got
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
    ratio = ratio.cpu().numpy() if is_torch(ratio) else ratio
    wrong = np.argwhere(ratio > 1.0)
    at = tuple(int(x) for x in np.unravel_index(ratio.argmax(), ratio.shape))
    axes = axes[-len(at) :]  # packed sequences have no batch axis
    where = ", ".join(f"{axis}={n}" for axis, n in zip(axes, at, strict=True))
    ranges = ", ".join(f"{axis} {lo}..{hi}" for axis, lo, hi in zip(axes, wrong.min(axis=0), wrong.max(axis=0), strict=True))
    raise AccuracyError(
        f"{name}[{where}] is {float(got[at]):.9g}, expected {float(want[at]):.9g} with a tolerance of {float(tolerance[at]):.3g} "
        f"(error / tolerance {worst:.3g}); {len(wrong)} of {ratio.size} elements are wrong, within {ranges}"
    )
