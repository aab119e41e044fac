"""Register fragments: a thread's share of a 64 x N float32 tile of a warpgroup, and straight-line arithmetic on it.

A fragment is a tuple of N/2 floats. Element i lies in row ``lane // 4 + 8 * ((i >> 1) & 1)`` of the warp's 16 rows and
in column ``8 * (i >> 2) + 2 * (lane % 4) + (i & 1)``: a thread holds two rows, and four threads (a quad) share a row.

Every function here makes an intrinsic that emits code over constant indices. A fragment must never be indexed by a loop
variable: it becomes a run-time switch and ends the wgmma pipeline.
"""

from __future__ import annotations

import math

from llvmlite import ir
from numba.cuda import types

from .inline import F32, I32, U32, U64, VOID, emit, llvm_f32, llvm_i32, make_intrinsic, pack, unpack
from .operations import exp2_by_fma
from .straight import straight_line

CONVERT = {"f16": "cvt.rn.f16x2.f32", "bf16": "cvt.rn.bf16x2.f32"}


def fragment(columns):
    """Numba type of a 64 x columns float32 tile."""
    return types.UniTuple(F32, columns // 2)


def packed(columns):
    """Numba type of a 64 x columns tile of 16-bit elements, two a register: the A operand of wgmma."""
    return types.UniTuple(U32, columns // 4)


def _row(i):
    return (i >> 1) & 1


def _column(i):
    return 8 * (i >> 2) + (i & 1)


def _fma(builder, x, y, z):
    return emit(builder, llvm_f32, [x, y, z], "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", pure=True)


def _exp2(builder, x):
    return emit(builder, llvm_f32, [x], "ex2.approx.ftz.f32 $0, $1;", "=f,f", pure=True)


def _maximum(builder, values):
    """Tree of maxima; NaN loses, as max.f32 has it."""
    while len(values) > 1:
        pairs = [values[i : i + 2] for i in range(0, len(values), 2)]
        values = [emit(builder, llvm_f32, p, "max.f32 $0, $1, $2;", "=f,f,f", pure=True) if len(p) == 2 else p[0] for p in pairs]
    return values[0]


def _negate(builder, x):
    return builder.fsub(ir.Constant(llvm_f32, -0.0), x)  # NVVM's LLVM 7 dialect has no fneg


def _elementwise(columns, argtypes, function):
    """``f(fragment, *args) -> fragment`` where ``function(builder, x, i, args)`` gives element i."""
    count = columns // 2

    def generate(builder, args, llvm_result):
        values = unpack(builder, args[0], count)
        return pack(builder, llvm_result, [function(builder, x, i, args[1:]) for i, x in enumerate(values)])

    return make_intrinsic(fragment(columns), (fragment(columns), *argtypes), generate)


def zeros(columns):
    count = columns // 2
    return make_intrinsic(fragment(columns), (), lambda builder, args, llvm: ir.Constant(llvm, [ir.Constant(llvm_f32, 0.0)] * count))


HELD = types.UniTuple(F32, 2)

STATISTICS = types.UniTuple(F32, 6)
"""(m0, m1, l0, l1, a0, a1) of a thread's two rows: running maximum, running sum, and the factor of what came before."""


def scale_rows(columns):
    """``f(x, statistics)``: the thread's two rows times their factors a."""
    return _elementwise(columns, (STATISTICS,), lambda builder, x, i, args: builder.fmul(x, builder.extract_value(args[0], 4 + _row(i))))


def normalise_rows(columns):
    """``f(x, statistics)``: the thread's two rows times their factors a, and 0 (whatever x holds) in a row whose factor is 0."""
    zero = ir.Constant(llvm_f32, 0.0)

    def element(builder, x, i, args):
        a = builder.extract_value(args[0], 4 + _row(i))
        return builder.select(builder.fcmp_ordered("==", a, zero), zero, builder.fmul(x, a))

    return _elementwise(columns, (STATISTICS,), element)


def select_rows(columns):
    """``f(x, (keep0, keep1))``: 0 (whatever x holds) in the one of the thread's two rows whose number is 0."""
    zero = ir.Constant(llvm_f32, 0.0)

    def element(builder, x, i, args):
        keep = builder.icmp_signed("!=", builder.extract_value(args[0], _row(i)), ir.Constant(llvm_i32, 0))
        return builder.select(keep, x, zero)

    return _elementwise(columns, (types.UniTuple(I32, 2),), element)


def spoilt(columns):
    """``f(x) -> int32``: 1 where an element is NaN or an infinity, else 0."""

    def generate(builder, args, llvm_result):
        total = zero = ir.Constant(llvm_f32, 0.0)
        for x in unpack(builder, args[0], columns // 2):
            total = _fma(builder, x, zero, total)
        return builder.zext(builder.fcmp_unordered("!=", total, zero), llvm_i32)

    return make_intrinsic(I32, (fragment(columns),), generate)


def negate(columns):
    return _elementwise(columns, (), lambda builder, x, i, a: _negate(builder, x))


def mask_band(columns, left, right, hidden=-math.inf, block=None):
    """``f(x, block, (first0, first1, last0, last1))``: ``hidden`` where a column lies before its row's first or after its row's last.

    The block's columns and the limits are counted from the thread's first column of block 0; ``left`` and ``right`` say which limits count.
    Blocks are ``block`` columns apart (else as many as the fragment has).
    """
    hidden = ir.Constant(llvm_f32, hidden)

    def generate(builder, args, llvm_result):
        origin = builder.mul(args[1], ir.Constant(llvm_i32, block or columns))
        limits = [builder.sub(limit, origin) for limit in unpack(builder, args[2], 4)]
        values = []
        for i, x in enumerate(unpack(builder, args[0], columns // 2)):
            column = ir.Constant(llvm_i32, _column(i))
            if right:
                x = builder.select(builder.icmp_signed(">", column, limits[2 + _row(i)]), hidden, x)
            if left:
                x = builder.select(builder.icmp_signed("<", column, limits[_row(i)]), hidden, x)
            values.append(x)
        return pack(builder, llvm_result, values)

    return make_intrinsic(fragment(columns), (fragment(columns), I32, types.UniTuple(I32, 4)), generate)


def _shuffle_xor(builder, x, lanes):
    text = f"shfl.sync.bfly.b32 $0, $1, {lanes}, 0x1f, 0xffffffff;"
    return emit(builder, llvm_f32, [x], text, "=f,f")


def is_by_fma(i: int, of_eight: int) -> bool:
    """Whether element i of a fragment is one of those, ``of_eight`` in each eight and spread evenly, whose exponential FMA units compute."""
    return (i + 1) * of_eight // 8 > i * of_eight // 8


def online_softmax(columns, hold, lowest=False, shifted=False):
    """One step of the online softmax: ``f(s, statistics, scale) -> (p, statistics, held)``.

    m is the new maximum of the two rows over the quad and what came before, ``p = exp2((s - m) * scale)``,
    ``a = exp2((m_before - m) * scale)`` is what everything before has to be multiplied by, and l becomes
    ``l * a + sum(p)`` over the thread's own elements of a row. A row that has seen only -inf is shifted by 0.

    With ``lowest``, scores may be as low as float32 goes, so that only their differences can be multiplied. With ``shifted``,
    ``f(s, statistics, scale, (d0, d1))``, the scores of the thread's rows are s + d; each thread has a d of its own.

    The sums start from the old ones: ptxas then computes a first, and the rescaling of the output hides behind the
    exponentials. ``held`` are the sums after ``hold`` elements of the two rows, for `hold_back`.
    """
    count = columns // 2
    arguments = (fragment(columns), STATISTICS, F32, *[types.UniTuple(F32, 2)] * shifted)
    minus_inf, zero = ir.Constant(llvm_f32, float("-inf")), ir.Constant(llvm_f32, 0.0)

    def generate(builder, args, llvm_result):
        scores, scale = unpack(builder, args[0], count), args[2]
        before, l = unpack(builder, args[1], 2), [builder.extract_value(args[1], 2 + row) for row in (0, 1)]
        m, shift, a = [], [], []
        for row in (0, 1):
            values = [x for i, x in enumerate(scores) if _row(i) == row]
            if shifted:
                values = [builder.fadd(_maximum(builder, values), builder.extract_value(args[3], row))]
            top = _maximum(builder, [*values, before[row]])
            for lanes in (1, 2):
                top = _maximum(builder, [top, _shuffle_xor(builder, top, lanes)])
            m.append(top)
        for row in (0, 1):
            base = builder.select(builder.fcmp_ordered("==", m[row], minus_inf), zero, m[row])  # -inf - -inf would be NaN
            a.append(_exp2(builder, builder.fmul(builder.fsub(before[row], base), scale)))
            if shifted:
                shift.append(builder.fmul(builder.fsub(builder.extract_value(args[3], row), base), scale))
            else:
                shift.append(base if lowest else _negate(builder, builder.fmul(base, scale)))
        if lowest:
            p = [_exp2(builder, builder.fmul(builder.fsub(s, shift[_row(i)]), scale)) for i, s in enumerate(scores)]
        else:
            p = [_exp2(builder, _fma(builder, s, scale, shift[_row(i)])) for i, s in enumerate(scores)]
        sums, held = _sums(builder, p, lambda row, first: _fma(builder, l[row], a[row], first), hold)
        return _pack_parts(builder, llvm_result, p, [*m, *sums, *a], held)

    return make_intrinsic(_softmax_result(columns), arguments, generate)


def bounded_softmax(columns, hold, by_fma=0):
    """The same of scores of which it is known how large they can be, so that m need not be: it stays as it came, and a is 1.

    Of eight exponentials ``by_fma`` leave the special-function unit to others.
    """

    def generate(builder, args, llvm_result):
        scores, scale = unpack(builder, args[0], columns // 2), args[2]
        m, l, a = (unpack(builder, args[1], 6)[at : at + 2] for at in (0, 2, 4))
        shift = [_negate(builder, builder.fmul(x, scale)) for x in m]
        powers = [_fma(builder, s, scale, shift[_row(i)]) for i, s in enumerate(scores)]
        p = [(exp2_by_fma if is_by_fma(i, by_fma) else _exp2)(builder, x) for i, x in enumerate(powers)]
        sums, held = _sums(builder, p, lambda row, first: builder.fadd(l[row], first), hold)
        return _pack_parts(builder, llvm_result, p, [*m, *sums, *a], held)

    return make_intrinsic(_softmax_result(columns), (fragment(columns), STATISTICS, F32), generate)


def _softmax_result(columns):
    return types.Tuple((fragment(columns), STATISTICS, HELD))


def _sums(builder, p, begin, hold):
    """New sums of the two rows, which ``begin(row, first element)`` starts from the old ones, and those of ``hold`` elements."""
    sums, held = [], []
    for row in (0, 1):
        values = [x for i, x in enumerate(p) if _row(i) == row]
        partial = [begin(row, values[0])]
        for x in values[1:]:
            partial.append(builder.fadd(partial[-1], x))
        sums.append(partial[-1])
        held.append(partial[max(hold, 1) - 1])
    return sums, held


def _pack_parts(builder, llvm_result, *parts):
    return pack(builder, llvm_result, [pack(builder, kind, values) for kind, values in zip(llvm_result.elements, parts, strict=True)])


def _start(builder, args, llvm_result):
    return ir.Constant(llvm_result, [ir.Constant(llvm_f32, x) for x in (-math.inf, -math.inf, 0.0, 0.0, 1.0, 1.0)])


start_statistics = make_intrinsic(STATISTICS, (), _start)
"""``f() -> statistics`` of rows that have seen nothing."""


def _finish(ops, statistics):
    m0, m1, *sums = statistics[:4]
    for lanes in (1, 2):
        sums = [x + y for x, y in zip(sums, ops.exchange(sums, lanes), strict=True)]
    # A row that saw nothing has l = 0, and its accumulator may be 0 * NaN: it is replaced by 0, not scaled.
    factors = [ops.select(l == 0.0, ops.constant("float32", 0.0), ops.reciprocal(l)) for l in sums]
    return [m0, m1, *sums, *factors]


finish_statistics = straight_line(STATISTICS, (STATISTICS,), _finish)
"""``f(statistics)``: l summed over the quad, and a = 1 / l, or 0 in a row that has seen nothing."""

hold_back = make_intrinsic(
    VOID,
    (U32, HELD),
    lambda builder, args, _: emit(
        builder,
        ir.VoidType(),
        [args[0], *unpack(builder, args[1], 2)],
        "{.reg .pred p; setp.lt.f32 p, $1, 0f00000000; setp.lt.or.f32 p, $2, 0f00000000, p; @p st.shared.f32 [$0], $1;}",
        "r,f,f,~{memory}",
    ),
)
"""``hold_back(scratch, held)``: keeps a following wgmma wait behind the computation of two numbers.

It is a store that happens only for a negative value, which a sum of exponentials never is; ptxas cannot know. Without
it ptxas hoists the wait for P V above the exponentials, which then no longer overlap with that product.
"""


def scale(columns):
    """``f(x, a)``: every element times a."""
    return _elementwise(columns, (F32,), lambda builder, x, i, args: builder.fmul(x, args[0]))


def _column_values(builder, address, columns):
    """A float32 for each of the thread's columns, from shared memory; ``address`` is that of its first column's."""
    pairs = []
    for step in range(columns // 8):
        text = f"ld.shared.v2.f32 {{$0, $1}}, [$2+{32 * step}];"
        pair = emit(builder, ir.LiteralStructType([llvm_f32] * 2), [address], text, "=f,=f,r,~{memory}")
        pairs.append(unpack(builder, pair, 2))
    return lambda i: pairs[i >> 2][i & 1]


def column_values(columns):
    """``f(address) -> values``: a float32 for each of the thread's columns, from shared memory; the address is that of its first column's."""
    kind = types.UniTuple(F32, columns // 4)

    def generate(builder, args, llvm_result):
        value = _column_values(builder, args[0], columns)
        return pack(builder, llvm_result, [value(4 * (n // 2) + n % 2) for n in range(columns // 4)])

    return make_intrinsic(kind, (U32,), generate)


def probabilities(columns):
    """``f(s, shifts, scale) -> p``: ``p = exp2(s * scale - shift)``, with a shift a column in shared memory from an address on."""

    def generate(builder, args, llvm_result):
        shift = _column_values(builder, args[1], columns)
        values = unpack(builder, args[0], columns // 2)
        return pack(builder, llvm_result, [_exp2(builder, _fma(builder, s, args[2], _negate(builder, shift(i)))) for i, s in enumerate(values)])

    return make_intrinsic(fragment(columns), (fragment(columns), U32, F32), generate)


def score_gradients(columns):
    """``f(p, dp, deltas) -> ds``: ``ds = p * (dp - delta)``, with a delta a column in shared memory from an address on."""

    def generate(builder, args, llvm_result):
        delta = _column_values(builder, args[2], columns)
        p, dp = (unpack(builder, arg, columns // 2) for arg in args[:2])
        return pack(builder, llvm_result, [builder.fmul(x, builder.fsub(y, delta(i))) for i, (x, y) in enumerate(zip(p, dp, strict=True))])

    return make_intrinsic(fragment(columns), (fragment(columns), fragment(columns), U32), generate)


def to_16bit(columns, dtype):
    """Round to pairs of 16-bit elements; the result is the A operand of `wgmma.product_registers`."""
    count = columns // 2

    def generate(builder, args, llvm_result):
        x = unpack(builder, args[0], count)
        pairs = [emit(builder, llvm_i32, [x[i + 1], x[i]], CONVERT[dtype] + " $0, $1, $2;", "=r,f,f", pure=True) for i in range(0, count, 2)]
        return pack(builder, llvm_result, pairs)

    return make_intrinsic(packed(columns), (fragment(columns),), generate)


def store_matrix(columns, panel_bytes, first_panel=0, panels=None, shifted=False):
    """Store panels of a packed tile to shared memory, 64 columns each, in the 128-byte swizzle (stmatrix).

    ``f(tile, base, thread)``: ``base`` is the address of the first panel stored, ``thread`` counts within the warpgroup. With ``shifted``,
    ``f(tile, base, thread, column)`` stores a tile that fits in a panel from a column (a multiple of 16) on.
    """
    count = columns // 4
    first = 16 * first_panel
    end = count if panels is None else min(count, first + 16 * panels)

    def generate(builder, args, _):
        registers, base, thread = unpack(builder, args[0], count), args[1], args[2]

        def bits(mask, shift=0):
            part = builder.and_(thread, ir.Constant(llvm_i32, mask))
            return builder.shl(part, ir.Constant(llvm_i32, shift)) if shift else part

        # Lane l stores row l % 16 of its warp's 16 rows, lanes from 16 on the second eight columns of each step.
        row = builder.or_(builder.lshr(bits(0x60), ir.Constant(llvm_i32, 1)), bits(15))
        row_at = builder.add(base, builder.shl(row, ir.Constant(llvm_i32, 7)))
        swizzle, half = bits(7, 4), bits(16)
        if shifted:
            half = builder.add(half, builder.shl(args[3], ir.Constant(llvm_i32, 1)))
        for k in range(first, end, 4):
            panel, step = divmod((k - first) // 4, 4)
            quad = registers[k : k + 4]
            shape, names = ("x4", "{$3, $4, $5, $6}") if len(quad) == 4 else ("x2", "{$3, $4}")
            text = (
                f"{{.reg .b32 a; add.u32 a, $2, {32 * step}; xor.b32 a, a, $1; add.u32 a, a, $0;\n"
                f"stmatrix.sync.aligned.m8n8.{shape}.shared.b16 [a+{panel * panel_bytes}], {names};}}"
            )
            emit(builder, ir.VoidType(), [row_at, swizzle, half, *quad], text, ",".join(["r"] * (3 + len(quad))) + ",~{memory}")

    return make_intrinsic(VOID, (packed(columns), U32, I32, *[I32] * shifted), generate)


def store_plain(columns):
    """``f(x, base, thread)``: a fragment to shared memory in the order of registers, four at a time; ``thread`` counts within the warpgroup."""
    count = columns // 2

    def generate(builder, args, _):
        at = builder.add(args[1], builder.shl(args[2], ir.Constant(llvm_i32, 4)))
        values = unpack(builder, args[0], count)
        for i in range(0, count, 4):
            emit(builder, ir.VoidType(), [at, *values[i : i + 4]], f"st.shared.v4.f32 [$0+{512 * i}], {{$1, $2, $3, $4}};", "r,f,f,f,f,~{memory}")

    return make_intrinsic(VOID, (fragment(columns), U32, I32), generate)


def add_plain(columns):
    """``f(x, base, thread)``: add a fragment to what lies in global memory in the order of `store_plain`, each element atomically."""
    count = columns // 2

    def generate(builder, args, _):
        at = builder.add(args[1], builder.zext(builder.shl(args[2], ir.Constant(llvm_i32, 4)), args[1].type))
        values = unpack(builder, args[0], count)
        for i in range(0, count, 4):
            text = f"red.global.add.v4.f32 [$0+{512 * i}], {{$1, $2, $3, $4}};"
            emit(builder, ir.VoidType(), [at, *values[i : i + 4]], text, "l,f,f,f,f,~{memory}")

    return make_intrinsic(VOID, (fragment(columns), U64, I32), generate)


def load_plain(columns):
    """``f(base, thread) -> x``: what `store_plain` has written, from global memory."""
    count = columns // 2

    def generate(builder, args, llvm_result):
        at = builder.add(args[0], builder.zext(builder.shl(args[1], ir.Constant(llvm_i32, 4)), args[0].type))
        values = []
        for i in range(0, count, 4):
            four = emit(
                builder,
                ir.LiteralStructType([llvm_f32] * 4),
                [at],
                f"ld.global.v4.f32 {{$0, $1, $2, $3}}, [$4+{512 * i}];",
                "=f,=f,=f,=f,l,~{memory}",
            )
            values += unpack(builder, four, 4)
        return pack(builder, llvm_result, values)

    return make_intrinsic(fragment(columns), (U64, I32), generate)
