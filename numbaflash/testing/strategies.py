"""Hypothesis strategies for attention problems. Simple cases come first, so a failing case shrinks to a small, plain one."""

from __future__ import annotations

import math
from dataclasses import fields, replace

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError("numbaflash.testing needs Hypothesis here: pip install hypothesis") from error

from ..dispatch import CPU, family
from ..problem import (
    DIFFERENTIABLE_OPTIONS,
    DTYPES,
    ITEMSIZE,
    LENGTH_DTYPES,
    MAX_CACHE_HEAD_DIM,
    MAX_HEAD_DIM,
    MAX_NEW_TOKENS,
    MAX_SEQLEN,
    NEEDS,
    PAGE_TABLE,
    make_decode_problem,
    make_problem,
)
from ..problem import PACKED as BOUNDARIES
from .cases import BackwardCase, Case, DecodeCase
from .memory import Placement
from .sequences import ORDERS, Cache, Packed
from .values import BIASES, HIDDEN, LENGTHS, MASKS, RECIPES

FEATURES = ("mask", "block_mask", "bias", "alibi_slopes", "softcap", "sinks", "dropout", "seqlens_q", "seqlens_k")
"""Options that `problems` draws when it is asked to, by the names of the arguments."""

PACKED = "packed"
"""What it is asked for packed sequences by, which have those of `OF_SEQUENCES`."""

OF_SEQUENCES = ("alibi_slopes", "softcap", "sinks", "dropout")

OF_DECODING = ("alibi_slopes", "softcap", "sinks")
"""Options that `decode_problems` draws when it is asked to."""

EDGES = (15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 175, 176, 177, 191, 192, 193, 255, 256, 257)
"""Lengths around the tile sizes of the kernels."""

PAGE_SIZES = (1, 2, 5, 16, 17, 32, 64, 100, 128, 256)

HEAD_DIMS = (1, 2, 3, 8, 16, 17, 32, 40, 64, 72, 80, 96, 120, 128, 136, 160, 192, 200, 248, 255, 256)


def lengths(max_length: int, min_length: int = 1):
    """Sequence lengths: small ones, the edges of tiles, and any other up to ``max_length``."""
    edges = [n for n in EDGES if min_length <= n <= max_length]
    choices = [st.integers(min_length, min(8, max_length)), st.integers(min_length, max_length)]
    if edges:
        choices.insert(1, st.sampled_from(edges))
    return st.one_of(choices)


@st.composite
def placements(draw, rank: int, *, broadcast: bool = True):
    """Memory layouts of an operand of ``rank`` axes: contiguous, transposed, sliced, padded, reversed, broadcast, misaligned."""
    kind = draw(st.sampled_from(("contiguous", "transposed", "padded", "sliced", "any")))
    if kind == "contiguous":
        return Placement(offset=draw(st.sampled_from((0, 0, 1, 8))))
    transposed = (0, 2, 1, 3)[:rank] if rank > 2 else tuple(reversed(range(rank)))
    if kind == "transposed":
        return Placement(order=transposed)
    if not rank:
        return Placement()
    pads = st.lists(st.integers(0, 9), min_size=rank, max_size=rank).map(tuple)
    if kind == "padded":
        return Placement(order=draw(st.sampled_from(((), transposed))), pad=(0,) * (rank - 1) + (draw(st.sampled_from((8, 16, 1, 7))),))
    if kind == "sliced":
        return Placement(step=draw(_steps(rank, (1, 2, 3))), pad=draw(pads), offset=draw(st.integers(0, 16)))
    steps = (1, 2, -1, -2, 0) if broadcast else (1, 2, -1, -2)
    order = draw(st.permutations(range(rank)).map(tuple))
    return Placement(order=order, step=draw(_steps(rank, steps)), pad=draw(pads), offset=draw(st.integers(0, 16)))


def _steps(rank, choices):
    return st.lists(st.sampled_from(choices), min_size=rank, max_size=rank).map(tuple)


def scales():
    """None, 0, negative, small and large scales."""
    return st.one_of(st.none(), st.sampled_from((0.0, 1.0, -0.125, 1e-3, 4.0)), st.floats(-2, 2, width=32))


def windows(max_length: int):
    """None or (left, right), each side possibly unbounded, small, near the length, or far beyond it."""
    side = st.one_of(st.none(), st.integers(0, 8), st.integers(0, max_length + 1), st.sampled_from((63, 64, 128, 2**31, 2**40)))
    return st.one_of(st.none(), st.tuples(side, side))


@st.composite
def problems(
    draw,
    *,
    dtypes=DTYPES,
    head_dims=None,
    max_seqlen: int = 300,
    work: int = 2**18,
    values=RECIPES,
    hidden=HIDDEN,
    strided: bool = True,
    empty: bool = True,
    options=(),
):
    """Complete attention problems.

    Parameters
    ----------
    dtypes : sequence of str
        Element types to draw from.
    head_dims : sequence of int, optional
        Head dims to draw from, for kernels that have only some; all from 1 to 256 otherwise. ``head_dim_v`` may differ from ``head_dim``.
    max_seqlen : int
        Largest sequence length.
    work : int
        Largest number of scores, batch * heads * seqlen_q * seqlen_k: what bounds the time of a case.
    values, hidden : sequence of str
        Recipes for what is seen and for what is not; see `RECIPES` and `HIDDEN`.
    strided : bool
        Draw memory layouts; everything is contiguous otherwise.
    empty : bool
        Now and then a size of zero.
    options : sequence of str
        Of `FEATURES` and `PACKED`: each of them is there in about half of the cases. Packed sequences have none but `OF_SEQUENCES`.

    Returns
    -------
    strategy of Case
    """
    unknown = set(options) - {*FEATURES, PACKED}
    if unknown:
        raise ValueError(f"options must be of {', '.join((*FEATURES, PACKED))}; got {', '.join(sorted(unknown))}")
    dims = st.one_of(st.sampled_from(HEAD_DIMS), st.integers(1, MAX_HEAD_DIM)) if head_dims is None else st.sampled_from(sorted(head_dims))
    dtype = draw(st.sampled_from(tuple(dtypes)))
    seqlen_k = draw(lengths(min(max_seqlen, work)))
    seqlen_q = draw(lengths(max(1, min(max_seqlen, work // seqlen_k))))
    room = work // (seqlen_q * seqlen_k)
    kv_heads = draw(st.integers(1, max(1, min(4, room))))
    group = draw(st.sampled_from([g for g in (1, 2, 3, 4, 5, 8, 16) if g == 1 or g * kv_heads <= room]))
    batch = draw(st.integers(1, max(1, min(3, room // (kv_heads * group)))))
    heads = kv_heads * group
    head_dim = draw(dims)
    head_dim_v = head_dim if draw(st.integers(0, 2)) < 2 else draw(dims)
    zero = draw(st.integers(0, 39)) if empty else 0
    if zero == 39:
        batch = 0
    elif zero == 38:
        seqlen_q = 0
    elif zero == 37:
        heads = 0
    elif zero in (34, 35, 36):
        seqlen_k = 0
    case = Case(
        dtype=dtype,
        batch=batch,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        scale=draw(scales()),
        causal=draw(st.sampled_from((False, True, "top_left"))),
        window=draw(windows(max(seqlen_q, seqlen_k))),
        values=draw(st.sampled_from(tuple(values))),
        hidden=draw(st.sampled_from(tuple(hidden))),
        give_out=draw(st.booleans()),
        return_lse=draw(st.sampled_from((True, True, False))),
        seed=draw(st.integers(0, 2**16)),
    )
    possible = FEATURES
    if PACKED in options and draw(st.booleans()):
        case, possible = _packed(draw, case, work, empty), OF_SEQUENCES
    case = replace(case, **_features(draw, case, [name for name in possible if name in options and draw(st.booleans())]))
    if not strided:
        return case
    broadcast = {"q", "k", "v", *case.option_arrays} - set(BOUNDARIES)
    return replace(case, **_layouts(draw, case, case.present, broadcast))


def _packed(draw, case, work, empty):
    """The case with packed sequences, at most as long as its own, in the place of a batch."""
    most = min(8, work // max(1, case.heads * case.seqlen_q * case.seqlen_k))
    count = draw(st.sampled_from((*range(1, max(2, most + 1)), *((0,) if empty else ()))))
    lengths_q, lengths_k = (draw(st.lists(_sequence_lengths(n, empty), min_size=count, max_size=count)) for n in (case.seqlen_q, case.seqlen_k))
    if draw(st.booleans()):
        lengths_k = [min(n, case.seqlen_k) for n in lengths_q]
    gaps = st.one_of(st.just((0, 0)), st.tuples(st.integers(0, 9), st.integers(0, 70)))
    told = [draw(st.sampled_from((None, max(n, default=0), 1, MAX_SEQLEN))) for n in (lengths_q, lengths_k)]
    dtypes = tuple(draw(st.sampled_from(LENGTH_DTYPES)) for _ in "qk")
    packed = Packed(tuple(lengths_q), tuple(lengths_k), draw(gaps), draw(gaps), dtypes, tuple(told))
    wrong = draw(st.integers(0, 7)) == 7
    plain = {f.name: f.default for f in fields(Case) if f.name in ("batch", "seqlen_q", "seqlen_k")}
    case = replace(case, **plain, packed=packed)
    if wrong:
        numbers = zip(packed.totals, dtypes, strict=True)
        spoilt = tuple(tuple(draw(st.lists(_wrong_boundary(*each), min_size=count + 1, max_size=count + 1))) for each in numbers)
        other = replace(case, packed=replace(packed, boundaries=spoilt))
        case = other if other.work <= 4 * work else case  # one of them may have all rows
    return case


def _sequence_lengths(longest, empty):
    shortest = 0 if empty or not longest else 1
    return st.one_of(st.integers(shortest, longest), st.just(longest))


def _wrong_boundary(total, dtype):
    """Any number: within the rows, beside them, or as far away as the dtype allows."""
    largest = 2 ** (8 * ITEMSIZE[dtype] - 2)  # in float64, too
    return st.one_of(st.integers(0, total), st.integers(-3, total + 3), st.sampled_from((-largest, largest)))


def _features(draw, case, names):
    """The fields of a case that say which options it has, and what they hold."""
    fields = {}
    batch = (case.cache if case.direction == "decode" else case.packed or case).batch
    full = (batch, case.heads, case.seqlen_q, case.seqlen_k)
    for name in names:
        if name == "mask":
            fields |= {"mask_shape": _broadcast_shape(draw, full), "mask_values": draw(st.sampled_from(MASKS))}
        elif name == "block_mask":
            kind = {"as_blocks": "mask" not in names or draw(st.booleans())}  # a problem has one mask
            fields |= {"mask_shape": _broadcast_shape(draw, full), "mask_values": draw(st.sampled_from(MASKS))} | kind
        elif name == "bias":
            kinds = (None, *(DTYPES if case.dtype == "float64" else DTYPES[:3]))
            fields |= {
                "bias_shape": _broadcast_shape(draw, full),
                "bias_values": draw(st.sampled_from(BIASES)),
                "bias_dtype": draw(st.sampled_from(kinds)),
            }
        elif name == "alibi_slopes":
            fields |= {"alibi_shape": draw(st.sampled_from(((case.heads,), (batch, case.heads))))}
        elif name == "softcap":
            fields |= {"softcap": draw(st.sampled_from((1.0, 30.0, 0.25, 1000.0)))}
        elif name == "sinks":
            fields |= {"with_sinks": True}
        elif name == "dropout":
            fields |= {"dropout": draw(st.sampled_from((0.5, 0.1, 0.9, 1e-6))), "dropout_seed": draw(st.integers(0, 2**64 - 1))}
        else:
            fields |= {f"lengths_{name[-1]}": draw(st.sampled_from(LENGTHS)), "lengths_dtype": draw(st.sampled_from(LENGTH_DTYPES))}
    return fields


def _broadcast_shape(draw, full):
    """A shape that broadcasts to all of it: some axes of length 1, some of the first ones left out."""
    kept = [n if draw(st.booleans()) else 1 for n in full]
    first = draw(st.integers(0, 4))
    return tuple(full if draw(st.integers(0, 3)) == 0 else kept[first:])


def _layouts(draw, case, operands, broadcast):
    drawn = {}
    for name in operands:
        shape = case.shape_of(name)
        drawn[name] = _bounded(draw(placements(len(shape), broadcast=name in broadcast)), shape)
    return drawn


@st.composite
def backward_problems(draw, *, strided: bool = True, **options):
    """Complete backward problems: those of `problems`, with or without a gradient of the LSE, deterministic or not, for any subset of q, k, v (and
    bias and sinks, where they are).

    Parameters
    ----------
    strided : bool
        Draw memory layouts, a broadcast dout and dlse among them; everything is contiguous otherwise.
    **options
        As `problems` takes them.

    Returns
    -------
    strategy of BackwardCase
    """
    forward = draw(problems(strided=strided, **options))
    needs = draw(st.sampled_from((NEEDS, NEEDS, NEEDS, ("q",), ("k",), ("v",), ("q", "k"), ("q", "v"), ("k", "v"))))
    needs += tuple(name for name in DIFFERENTIABLE_OPTIONS if name in forward.option_arrays and draw(st.integers(0, 3)))
    case = BackwardCase(
        **{f.name: getattr(forward, f.name) for f in fields(forward)} | {"return_lse": True},
        with_dlse=draw(st.booleans()),
        deterministic=draw(st.booleans()),
        needs=needs,
    )
    if not strided:
        return case
    return replace(case, **_layouts(draw, case, ("dout", "dlse", *case.results), broadcast=("dout", "dlse")))


@st.composite
def decode_problems(
    draw,
    *,
    dtypes=DTYPES,
    head_dims=None,
    max_seqlen: int = 300,
    work: int = 2**18,
    values=RECIPES,
    hidden=HIDDEN,
    strided: bool = True,
    empty: bool = True,
    options=(),
):
    """Complete problems of decoding: contiguous caches and pages of any size, in any order, shared, spare and wrong ones; lengths of 0, of the
    capacity and outside of it; one new token a sequence or several; any number of parts; values of their own or as a part of the keys.

    Parameters
    ----------
    dtypes, values, hidden, strided, empty
        As `problems` takes them.
    head_dims : sequence of int, optional
        All from 1 to 576 otherwise.
    max_seqlen : int
        Largest capacity.
    work : int
        Largest number of scores, batch * heads * seqlen_q * capacity.
    options : sequence of str
        Of "alibi_slopes", "softcap" and "sinks": each of them is there in about half of the cases.

    Returns
    -------
    strategy of DecodeCase
    """
    _check_of_decoding(options)
    every = st.one_of(st.sampled_from(HEAD_DIMS), st.integers(1, MAX_HEAD_DIM), st.sampled_from((257, 320, 512, 576)))
    dims = every if head_dims is None else st.sampled_from(sorted(head_dims))
    capacity = draw(lengths(min(max_seqlen, work)))
    sizes = [n for n in PAGE_SIZES if n <= capacity]
    page_size = draw(st.one_of(st.none(), st.sampled_from(sizes), st.integers(1, capacity)))
    if page_size is not None:
        capacity -= capacity % page_size
    new = draw(st.one_of(st.just(1), st.integers(1, 8), st.integers(1, MAX_NEW_TOKENS)))
    seqlen_q = min(new, max(1, work // capacity))
    room = work // (seqlen_q * capacity)
    kv_heads = draw(st.integers(1, max(1, min(4, room))))
    group = draw(st.sampled_from([g for g in (1, 2, 3, 4, 5, 8, 16) if g == 1 or g * kv_heads <= room]))
    heads = kv_heads * group
    batch = draw(st.integers(1, max(1, min(5, room // heads))))
    head_dim = draw(dims)
    head_dim_v = head_dim if draw(st.integers(0, 2)) < 2 else draw(dims)
    zero = draw(st.integers(0, 39)) if empty else 0
    if zero == 39:
        batch = 0
    elif zero == 38:
        seqlen_q = 0
    elif zero == 37:
        heads = 0
    elif zero in (35, 36):
        capacity = 0
    lengths_dtype = draw(st.sampled_from(LENGTH_DTYPES))
    case = DecodeCase(
        dtype=draw(st.sampled_from(tuple(dtypes))),
        seqlen_q=seqlen_q,
        seqlen_k=capacity,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        scale=draw(scales()),
        causal=draw(st.sampled_from((False, True, "top_left"))),
        window=draw(windows(capacity)),
        values=draw(st.sampled_from(tuple(values))),
        hidden=draw(st.sampled_from(tuple(hidden))),
        give_out=draw(st.booleans()),
        return_lse=draw(st.sampled_from((True, True, False))),
        seed=draw(st.integers(0, 2**16)),
        lengths_dtype=lengths_dtype,
        cache=draw(_caches(batch, capacity, page_size, lengths_dtype, empty)),
        latent=head_dim_v <= head_dim and draw(st.integers(0, 3)) == 3,
        num_splits=draw(st.sampled_from((None, None, 1, 2, 3, 7, 256))),
    )
    case = replace(case, **_features(draw, case, [name for name in OF_DECODING if name in options and draw(st.booleans())]))
    if not strided:
        return case
    operands = [name for name in case.present if not (case.latent and name == "v")]
    return replace(case, **_layouts(draw, case, operands, {*operands} - {"seqlens_k", PAGE_TABLE, *case.results}))


def _check_of_decoding(options):
    unknown = set(options) - set(OF_DECODING)
    if unknown:
        raise ValueError(f"options must be of {', '.join(OF_DECODING)} in decoding; got {', '.join(sorted(unknown))}")


@st.composite
def _caches(draw, batch, capacity, page_size, lengths_dtype, empty):
    far = 2**40 if lengths_dtype == "int64" else 2**31 - 1
    shortest = 0 if empty or not capacity else 1
    usual = st.one_of(st.just(capacity), st.integers(shortest, capacity), st.integers(shortest, min(8, capacity)))
    outside = st.sampled_from((-1, -far, capacity + 1, far))
    length = st.integers(0, 9).flatmap(lambda n: outside if n == 9 and empty else usual)
    found = tuple(draw(st.lists(length, min_size=batch, max_size=batch)))
    if page_size is None:
        return Cache(found)
    shared = draw(st.one_of(st.just(0), st.integers(0, max(1, capacity // page_size))))
    spare = draw(st.sampled_from((0, 0, 1, 3)))
    return Cache(found, page_size, draw(st.sampled_from(ORDERS)), shared, spare, draw(st.integers(0, 7)) == 7)


def _bounded(placement, shape):
    """The same layout without its gaps where they would take too much memory."""
    if placement.resolve(shape)[0] <= max(2**16, 3 * math.prod(shape)):
        return placement
    return replace(
        placement, step=tuple(max(-1, min(1, s)) for s in placement.step), pad=placement.pad and (0,) * (len(shape) - 1) + placement.pad[-1:]
    )


def problems_for(name: str | None, device=CPU, direction: str = "forward", **options):
    """`problems`, `backward_problems` or `decode_problems` of the dtypes and head dims that a kernel family has on a device.

    Parameters
    ----------
    name : str or None
        Family; None draws everything.
    device : numbaflash.dispatch.Device
    direction : str
        "forward", "backward" or "decode".
    **options
        As the strategy takes them.

    Raises
    ------
    ValueError
        When the family has nothing on this device; the message holds its reason.
    """
    draw_from = {"forward": problems, "backward": backward_problems, "decode": decode_problems}[direction]
    if direction == "decode":
        _check_of_decoding(options.get("options", ()))  # at once, not with the first case
    largest = MAX_CACHE_HEAD_DIM if direction == "decode" else MAX_HEAD_DIM
    if name is None:
        return draw_from(**options)
    dtypes, head_dims, reason = [], set(), ""
    for dtype in options.pop("dtypes", DTYPES):
        dims = []
        for dim in range(1, largest + 1):
            shapes = ((1, 1, 1, dim),) * 3
            if direction == "decode":
                problem = make_decode_problem(*shapes, (dtype,) * 3, seqlens_k=((1,), "int32"))
            else:
                problem = make_problem(*shapes, (dtype,) * 3)
            reasons = family(name, direction).supports(problem, device)
            reason = reasons[0] if reasons else reason
            if not reasons:
                dims.append(dim)
        if dims:
            dtypes.append(dtype)
            head_dims.update(dims)
    if not dtypes:
        raise ValueError(f"family {name} can compute nothing on {device.name}: {reason}")
    if options.get("head_dims") is not None:
        head_dims &= set(options["head_dims"])
    options["head_dims"] = sorted(head_dims) if len(head_dims) < largest else None
    return draw_from(dtypes=tuple(dtypes), **options)
