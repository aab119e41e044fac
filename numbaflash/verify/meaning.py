"""The first check: the kernels compute what attention means, by the float64 reference.

Three looks, of which each sees what the others do not: every element of a smaller problem of the same kind; samples of the problem at its real size;
and all of that problem against itself computed in other parts.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .. import dispatch
from ..dispatch import use_family
from ..problem import NEEDS
from ..testing import BackwardCase, Case, Packed, Placement, compare, compare_gradients, expected, expected_gradients, run_backward_case, run_case
from ..testing.accuracy import AccuracyError
from .inputs import Inputs, difference
from .places import Place
from .shapes import Call

SMALL = {"cpu": (333, 200), "cuda": (777, 333)}
"""Longest sequence of the smaller problem, forward and backward, by the kind of device."""
SMALL_HEADS = 8
SAMPLE = {"cpu": 2**16, "cuda": 2**23}
"""Scores of a sample."""
WHOLE = {"cpu": 2**19, "cuda": 2**27}
"""Scores of a key head up to which the gradients of its keys are compared."""
ROUNDING = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-19, "float64": 2.0**-46}
"""What two orders of the same sums may differ by, in units of the largest value: weights are rounded to 16 bits, or sums to a few hundred eps."""


def case_of(call: Call, place: Place) -> Case:
    """A smaller problem of the same kind, for all of which the reference is quick."""
    p, (forward, backward) = call.problem, SMALL[place.device.kind]
    longest = backward if call.direction == "backward" else forward
    kv_heads = min(2, p.kv_heads)
    heads = kv_heads * min(p.group, SMALL_HEADS)
    lengths = _shorter(p.seqlen_q, p.seqlen_k, longest)
    numbers = {name: call.numbers[name] for name in ("scale", "causal", "softcap", "dropout") if call.numbers.get(name) is not None}
    window = call.numbers.get("window")
    if window is not None:
        window = tuple(None if n is None else min(n, longest // 3) for n in window)
    more, whole = {}, (min(2, p.batch), heads, *lengths)
    for name, field, of in (("mask", "mask_shape", whole), ("bias", "bias_shape", whole), ("alibi_slopes", "alibi_shape", whole[:2])):
        if name in call.arrays:
            shape = call.arrays[name][0]
            more[field] = tuple(1 if n == 1 else size for n, size in zip(shape, of[len(of) - len(shape) :], strict=True))
    if "block_mask" in call.arrays:
        more |= {"as_blocks": True, "mask_values": "blocks", "mask_shape": lengths}
    if "bias" in call.arrays:
        more["bias_dtype"] = call.arrays["bias"][1]
    for name in ("q", "k"):
        if f"seqlens_{name}" in call.arrays:
            more |= {f"lengths_{name}": "random", "lengths_dtype": call.arrays[f"seqlens_{name}"][1]}
    if call.packed:
        sequences = min(4, max(1, p.batch))
        spread = [max(1, (n + 1) * longest // sequences) for n in range(sequences)]
        dtypes = tuple(call.arrays[f"cu_seqlens_{name}"][1] for name in "qk")
        more["packed"] = Packed(tuple(spread), tuple(spread), dtypes=dtypes)
    else:
        more |= {"batch": min(2, p.batch), "seqlen_q": lengths[0], "seqlen_k": lengths[1]}
    if not place.on_gpu or place.library != "jax":
        more |= {name: placement for name in "qkv" if (placement := _placement(call.strides.get(name))) is not None}
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": p.head_dim, "head_dim_v": p.head_dim_v}
    kind = BackwardCase if call.direction == "backward" else Case
    given = {"needs": tuple(call.needs), "deterministic": call.deterministic} if kind is BackwardCase else {}
    return kind(dtype=call.dtype, **sizes, **numbers, window=window, with_sinks=p.sinks, dropout_seed=1, seed=3, **more, **given)


def _shorter(seqlen_q, seqlen_k, longest):
    """Shorter lengths, no multiple of a tile, that relate to each other as these do."""
    if max(seqlen_q, seqlen_k) <= longest:
        return seqlen_q, seqlen_k
    if seqlen_q == seqlen_k:
        return longest, longest
    return (max(1, min(seqlen_q, longest // 2)), longest) if seqlen_q < seqlen_k else (longest, max(min(seqlen_k, 1), min(seqlen_k, longest // 2)))


def _placement(strides) -> Placement | None:
    kind, _, axes = (strides or "").partition(" ")
    if kind == "order":
        return Placement(order=tuple(int(axis) for axis in axes.split(",")))
    return Placement(pad=(0, 0, 0, 16)[-4:]) if kind == "strided" else None


def small(call: Call, place: Place, family: str | None):
    """Every element of a smaller problem."""
    if call.direction == "decode":
        return _small_decode(call, place, family)
    case = case_of(call, place)
    worst = judged(case, place, family)
    rows = f"{case.batch} x {case.seqlen_q} x {case.seqlen_k}" if case.packed is None else f"sequences of {case.packed.lengths_q}"
    return f"{_shown(worst)} of {rows}", {"errors": worst}


def judged(case: Case, place: Place, family: str | None) -> dict[str, float]:
    """All elements of a case and the memory around them: the largest error of each result, 1 being the limit."""
    how = {"family": family, "library": place.testing_library, "device": place.device.index}
    if case.direction == "forward":
        accuracy = run_case(case, **how)
        return {"out": accuracy.out, "lse": accuracy.lse}
    if place.library == "jax":
        accuracy = run_backward_case(replace(case, deterministic=False), **how, kernel=_jax_gradients)
    else:
        accuracy = run_backward_case(case, **how)
    return {f"d{name}": getattr(accuracy, f"d{name}") for name in case.needs}


def _jax_gradients(dout, q, k, v, out, lse, *, dlse, deterministic, needs, **options):
    import jax

    import numbaflash

    function = numbaflash.attention_varlen if "cu_seqlens_q" in options else numbaflash.attention
    inputs = {"q": q, "k": k, "v": v} | {name: options.pop(name) for name in ("bias", "sinks") if name in needs}
    inputs = {name: x for name, x in inputs.items() if name in needs}
    fixed = {name: x for name, x in (("q", q), ("k", k), ("v", v)) if name not in needs}
    found = jax.vjp(lambda inputs: function(**inputs, **fixed, **options), inputs)[1](dout)[0]
    return (*(found.get(name) for name in NEEDS), *(found[name] for name in ("bias", "sinks") if name in needs))


def _small_decode(call: Call, place: Place, family):
    """Sequences of 0 keys, 1 key and any number, with NaN in what nobody may look at."""
    page, longest = (call.k[1] if "page_table" in call.arrays else 0), SMALL[place.device.kind][0]
    kv_heads = min(2, call.problem.kv_heads)
    heads = kv_heads * min(call.problem.group, SMALL_HEADS * 2)
    lengths = (longest, 0, 1, longest // 3, longest - 1)
    rows = (len(lengths) * -(-longest // page), page) if page else (len(lengths), longest)
    sizes = {"seqlens_k": (len(lengths),), "page_table": (len(lengths), rows[0] // len(lengths))}
    sizes |= {"sinks": (heads,), "alibi_slopes": (heads,)}
    window = call.numbers.get("window")
    numbers = call.numbers | ({} if window is None else {"window": tuple(None if n is None else min(n, longest // 3) for n in window)})
    less = replace(
        call,
        q=(len(lengths), call.q[1], heads, call.q[3]),
        k=(*rows, kv_heads, call.k[3]),
        v=(*rows, kv_heads, call.v[3]),
        numbers=numbers,
        arrays={name: (sizes[name], dtype) for name, (_, dtype) in call.arrays.items()},
        strides={},
    )
    inputs = Inputs.of(less, place, lengths=lengths, hide=place.library != "jax" or not place.on_gpu)
    with use_family(family):
        out, lse = inputs.forward()
    operands = [place.host(inputs.arrays[name]) for name in ("q", "k_cache", "v_cache")]
    accuracy = compare(expected(less.problem, *operands, **inputs.values), place.host(out), place.host(lse))
    worst = {"out": accuracy.out, "lse": accuracy.lse}
    return f"{_shown(worst)} of requests with {', '.join(map(str, lengths))} keys", {"errors": worst}


def _shown(worst) -> str:
    return "largest error " + ", ".join(f"{name} {x:.2f}" for name, x in worst.items() if x is not None) + " of what the rule allows"


def parts_of(inputs: Inputs, work: int, number: int = 6):
    """Samples: rows of a few heads, of several batch entries; the first and the last rows always."""
    p, rng = inputs.call.problem, inputs.place.rng
    group, found = p.group, []
    entries = [0, p.batch - 1, *rng.integers(0, p.batch, number)] if p.batch else []
    for n, b in enumerate(entries[:number]):
        _, _, length_q, length_k = inputs.place_of(int(b))
        if not length_q:
            continue
        kv = int(rng.integers(0, p.kv_heads)) if n > 1 else (0, p.kv_heads - 1)[n]
        heads = slice(kv * group, (kv + 1) * group)
        if inputs.call.direction != "decode":
            count = max(1, min(length_q, work // max(1, length_k * group)))
            if count < 4 and group > 1 and inputs.call.direction == "forward":  # one query head of the group
                heads = slice(heads.start + n % group, heads.start + n % group + 1)
                count = max(1, min(length_q, work // max(1, length_k)))
        else:
            count = length_q
        first = {0: 0, 1: length_q - count}.get(n, int(rng.integers(0, length_q - count + 1)))
        found.append(inputs.part(int(b), heads, slice(first, first + count)))
    return found


def sampled(inputs: Inputs, out, lse, gradients=None, *, number: int = 6):
    """Samples of results at their real size, against the reference."""
    if inputs.call.numbers.get("dropout"):
        return "not sampled: what dropout drops depends on places in the whole", {"status": "skip"}
    work = SAMPLE[inputs.place.device.kind]
    p = inputs.call.problem
    if gradients is not None and p.group * p.seqlen_q * p.seqlen_k <= WHOLE[inputs.place.device.kind]:
        work, number = p.group * p.seqlen_q * p.seqlen_k, 2
    worst, rows = {}, 0
    for part in parts_of(inputs, work, number):
        try:
            rows += (part.rows.stop - part.rows.start) * part.problem.heads
            if gradients is None:
                known = expected(part.problem, *part.operands("q", "k", "v"), **part.options)
                accuracy = compare(known, *(inputs.place.exact(x) for x in part.results(out, lse)))
                errors = {"out": accuracy.out, "lse": accuracy.lse}
            else:
                errors = _sampled_gradients(part, gradients)
        except AccuracyError as error:
            raise AccuracyError(f"{part}: {error}") from None
        worst = {name: max(x, worst.get(name, 0.0)) for name, x in errors.items()}
    if not worst:
        return "there is nothing to sample", {"status": "skip"}
    return f"{_shown(worst)} in {rows} rows", {"errors": worst}


def _sampled_gradients(part, gradients):
    """dq of the rows of a part; where a part is all rows of its heads, dk and dv as well."""
    known = expected_gradients(part.problem, *part.operands("dout", "q", "k", "v"), **part.options)
    whole = part.rows.stop - part.rows.start == part.inputs.place_of(part.b)[2]
    found = {}
    exact = part.inputs.place.exact
    if "q" in gradients:
        found["dq"] = exact(part.of_queries(gradients["q"]))
    if whole:
        found |= {f"d{name}": exact(part.of_keys(gradients[name])) for name in "kv" if name in gradients}
    accuracy = compare_gradients(known, **found)
    return {name: getattr(accuracy, name) for name in found}


def in_parts(inputs: Inputs, out, lse, gradients=None):
    """The same results from other calls, which cut the queries (chunked prefill), or the batch, elsewhere. None where no calls can tell them."""
    call, p = inputs.call, inputs.call.problem
    if call.direction == "decode":
        return _requests_alone(inputs, out, lse)
    plain = set(call.arrays) <= {"alibi_slopes", "sinks"} and not call.numbers.get("dropout")
    if not plain or call.numbers.get("causal") == "top_left" or p.seqlen_q != p.seqlen_k or p.seqlen_q < 8:
        return None
    causal = call.numbers.get("causal") is True
    if not causal and call.numbers.get("window") is not None:
        return None
    total = {}
    cuts = [0, p.seqlen_q * 3 // 8 + 1, p.seqlen_q * 5 // 7, p.seqlen_q]
    worst = {"out": 0.0, "lse": 0.0} if gradients is None else {}
    largest = {name: largest_of(inputs, x) for name, x in (gradients or {"out": inputs.arrays["v"]}).items()}
    for first, end in zip(cuts, cuts[1:], strict=False):
        keys = end if causal else p.seqlen_k
        some = Inputs(call, inputs.place, dict(inputs.arrays), inputs.values)
        for name in inputs.arrays:
            if name in ("q", "dout"):
                some.arrays[name] = inputs.arrays[name][:, first:end]
            elif name in ("k", "v"):
                some.arrays[name] = inputs.arrays[name][:, :keys]
        part_out, part_lse = some.forward()
        if gradients is None:
            unit = ROUNDING[call.dtype]
            worst["out"] = max(worst["out"], difference(inputs.place, part_out, out[:, first:end], 8 * unit * largest["out"]))
            worst["lse"] = max(worst["lse"], difference(inputs.place, part_lse, lse[:, :, first:end], 1e-4 if p.dtype != "float64" else 1e-10))
            continue
        for name, x in some.backward(part_out, part_lse).items():
            if name == "q":
                unit = 16 * ROUNDING[call.dtype] * largest["q"]
                worst["dq"] = max(worst.get("dq", 0.0), difference(inputs.place, x, gradients["q"][:, first:end], unit))
            elif name in ("k", "v"):
                x = inputs.place.host(x) if not inputs.place.on_gpu or inputs.place.library != "torch" else x.double()
                if name not in total:
                    total[name] = x if keys == p.seqlen_k else _wide(x, p.seqlen_k)
                else:
                    total[name][:, :keys] += x
    for name, x in total.items():
        worst[f"d{name}"] = difference(inputs.place, x, gradients[name], 16 * ROUNDING[call.dtype] * largest[name])
    _no_more(worst)
    return f"all of it again in chunks of queries: {_shown_parts(worst)}", {"differences": worst}


def largest_of(inputs, x) -> float:
    """Largest absolute value of an array, 1 where there is none but 0."""
    return max((float(abs(inputs.place.host(x[b])).max()) for b in range(len(x)) if 0 not in x.shape), default=1.0) or 1.0


def _wide(x, keys):
    shape = (x.shape[0], keys, *x.shape[2:])
    wide = np.zeros(shape) if isinstance(x, np.ndarray) else x.new_zeros(shape)
    wide[:, : x.shape[1]] = x
    return wide


def _requests_alone(inputs: Inputs, out, lse):
    """Each request of a batch by itself."""
    call = inputs.call
    if call.problem.batch < 2:
        return None
    worst = {"out": 0.0, "lse": 0.0}
    unit = 8 * ROUNDING[call.dtype] * 6.0  # values are standard normal
    for b in range(min(call.problem.batch, 64)):
        one = Inputs(call, inputs.place, dict(inputs.arrays), inputs.values)
        for name, x in inputs.arrays.items():
            whole = name in ("sinks",) or (name in ("k_cache", "v_cache") and "page_table" in inputs.arrays)
            if not whole and (name != "alibi_slopes" or len(x.shape) == 2):
                one.arrays[name] = x[b : b + 1]
        part_out, part_lse = one.forward()
        worst["out"] = max(worst["out"], difference(inputs.place, part_out, out[b : b + 1], unit))
        worst["lse"] = max(worst["lse"], difference(inputs.place, part_lse, lse[b : b + 1], 1e-4 if call.dtype != "float64" else 1e-10))
    _no_more(worst)
    return f"each request alone: {_shown_parts(worst)}", {"differences": worst}


def _no_more(worst):
    wrong = {name: x for name, x in worst.items() if not x <= 1.0}
    if wrong:
        told = ", ".join(f"{name} {x:.3g}" for name, x in wrong.items())
        raise AccuracyError(f"the same problem in other parts gives other results: largest difference {told} times of what rounding allows")


def _shown_parts(worst) -> str:
    return "largest difference " + ", ".join(f"{name} {x:.2f}" for name, x in worst.items()) + " of what rounding allows"


def supported(call: Call, place: Place, family: str | None) -> str | None:
    """Why no kernel computes such calls; None where one does."""
    reasons = {}
    for name in dispatch.FAMILIES if family is None else (family,):
        reasons[name] = dispatch.family(name, call.direction).supports(call.problem, place.device)
        if not reasons[name]:
            return None
    return "; ".join(f"{name}: {', '.join(told)}" for name, told in reasons.items())
