"""Exact attention and its gradients in float64 with what each element may be off by (`accuracy` has the rule), a bounded number of scores at a time:
of NumPy arrays, or of torch tensors on their device."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import reference
from ..problem import Problem
from .libraries import to_float64

CHUNK = {"numpy": 2**20, "torch": 2**26}  # scores at a time


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


class Scores:
    """What turns products of queries and keys into scores, and decides what is seen: the options of a problem, in float64."""

    def __init__(self, xp, problem, like, options, seed):
        reference.check_names(problem, options)
        self.xp, self.problem, self.seed, self.given = xp, problem, seed, {}
        self.where = {} if xp is np else {"device": like.device}
        for name, x in options.items():
            x = to_float64(x)
            x = (x.cpu().numpy() if is_torch(x) else x) if xp is np else xp.as_tensor(x, **self.where)
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
        return Chunk(xp, problem, seen, sink, keep, b=b, h=h, **added)

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
class Chunk:
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


def fill(xp, problem, q, k, v, scores, result):
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
    parts = [new(xp, q, (lead, group, sq, dv)), new(xp, q, (lead, group, sq))]
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


def fill_gradients(xp, problem, scores, dout, q, k, v, dlse=None) -> dict:
    """Gradients and tolerances of finite inputs, a bounded number of scores at a time; heads of a group stand on an axis of their own."""
    precision = PRECISION[problem.dtype]
    group, sq, sk = problem.group, problem.seqlen_q, problem.seqlen_k
    lead = problem.batch * problem.kv_heads
    dlse = new(xp, q, problem.lse_shape, xp.zeros) if dlse is None else dlse
    q, dout = (xp.moveaxis(x, 2, 1).reshape(lead, group, sq, x.shape[3]) for x in (q, dout))
    k, v = (xp.moveaxis(x, 2, 1).reshape(lead, 1, sk, x.shape[3]) for x in (k, v))
    dlse = dlse.reshape(lead, group, sq)
    rows = max(1, min(sq, CHUNK[xp.__name__] // (2 * group * sk)))
    leads = max(1, min(lead, CHUNK[xp.__name__] // (2 * group * sk * rows)))
    like = {"dq": q, "dk": k, "dv": v}
    parts = {f"{name}{kind}": new(xp, q, x.shape) for name, x in like.items() for kind in ("", "_tolerance")}
    of_options = {name: [new(xp, q, problem.shape_of(name), xp.zeros) for _ in range(4)] for name in ("bias", "sinks") if name in problem.gradients}
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
    lengths = xp.minimum(xp.sum(abs(dout), -1), 4 * xp.sqrt(xp.sum(dout * dout, -1)))
    delta_error = delta_error + 2 * eps * abs(dlse) + precision.tiny * lengths
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
    return module_of(x).where(infinite, x, rounded) if bool(infinite.any()) else rounded


def new(xp, like, shape, create=None):
    return (create or xp.empty)(shape, dtype=xp.float64, **({} if xp is np else {"device": like.device}))


def module_of(x):
    return sys.modules["torch"] if is_torch(x) else np


def is_torch(array) -> bool:
    return type(array).__module__.split(".")[0] == "torch"
