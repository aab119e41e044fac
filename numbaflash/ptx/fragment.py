"""Register fragments: a thread's share of a 64 x N float32 tile of a warpgroup, and straight-line arithmetic on it.

A fragment is a tuple of N/2 floats. Element i lies in row ``lane // 4 + 8 * ((i >> 1) & 1)`` of the warp's 16 rows and
in column ``8 * (i >> 2) + 2 * (lane % 4) + (i & 1)``: a thread holds two rows, and four threads (a quad) share a row.

Every function here makes an intrinsic that emits code over constant indices. A fragment must never be indexed by a loop
variable: it becomes a run-time switch and ends the wgmma pipeline.
"""

from __future__ import annotations

from llvmlite import ir
from numba.cuda import types

from .inline import F32, I32, U32, VOID, emit, instruction, llvm_f32, llvm_i32, make_intrinsic, pack, unpack

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


def scale_rows(columns):
    """``f(x, a0, a1)``: the thread's two rows times a0 and a1."""
    return _elementwise(columns, (F32, F32), lambda builder, x, i, a: builder.fmul(x, a[_row(i)]))


def normalise_rows(columns):
    """``f(x, a0, a1)``: the thread's two rows times a0 and a1, and 0 (whatever x holds) in a row whose factor is 0."""
    zero = ir.Constant(llvm_f32, 0.0)
    return _elementwise(
        columns,
        (F32, F32),
        lambda builder, x, i, a: builder.select(builder.fcmp_ordered("==", a[_row(i)], zero), zero, builder.fmul(x, a[_row(i)])),
    )


def negate(columns):
    return _elementwise(columns, (), lambda builder, x, i, a: _negate(builder, x))


def keep_columns_to(columns):
    """``f(x, last0, last1)``: -inf where the column, counted from the thread's first, lies beyond its row's last."""
    minus_inf = ir.Constant(llvm_f32, float("-inf"))
    return _elementwise(
        columns,
        (I32, I32),
        lambda builder, x, i, a: builder.select(builder.icmp_signed(">", ir.Constant(llvm_i32, _column(i)), a[_row(i)]), minus_inf, x),
    )


def keep_columns_from(columns):
    """``f(x, first0, first1)``: -inf where the column, counted from the thread's first, lies before its row's first."""
    minus_inf = ir.Constant(llvm_f32, float("-inf"))
    return _elementwise(
        columns,
        (I32, I32),
        lambda builder, x, i, a: builder.select(builder.icmp_signed("<", ir.Constant(llvm_i32, _column(i)), a[_row(i)]), minus_inf, x),
    )


def _shuffle_xor(builder, x, lanes):
    text = f"shfl.sync.bfly.b32 $0, $1, {lanes}, 0x1f, 0xffffffff;"
    return emit(builder, llvm_f32, [x], text, "=f,f")


def online_softmax(columns, hold):
    """One step of the online softmax: ``f(s, m0, m1, l0, l1, scale) -> (p, m0, m1, l0, l1, a0, a1, h0, h1)``.

    m is the new maximum of the two rows over the quad and what came before, ``p = exp2((s - m) * scale)``,
    ``a = exp2((m_before - m) * scale)`` is what everything before has to be multiplied by, and l becomes
    ``l * a + sum(p)`` over the thread's own elements of a row. A row that has seen only -inf is shifted by 0.

    The sums start from the old ones: ptxas then computes a first, and the rescaling of the output hides behind the
    exponentials. h are the sums after ``hold`` elements of the row, for `hold_back`.
    """
    count = columns // 2
    result = types.Tuple((fragment(columns), *(F32,) * 8))
    minus_inf, zero = ir.Constant(llvm_f32, float("-inf")), ir.Constant(llvm_f32, 0.0)

    def generate(builder, args, llvm_result):
        scores, before, l, scale = unpack(builder, args[0], count), args[1:3], args[3:5], args[5]
        m, minus_shift, a = [], [], []
        for row in (0, 1):
            top = _maximum(builder, [x for i, x in enumerate(scores) if _row(i) == row] + [before[row]])
            for lanes in (1, 2):
                top = _maximum(builder, [top, _shuffle_xor(builder, top, lanes)])
            m.append(top)
        for row in (0, 1):
            base = builder.select(builder.fcmp_ordered("==", m[row], minus_inf), zero, m[row])  # -inf - -inf would be NaN
            a.append(_exp2(builder, builder.fmul(builder.fsub(before[row], base), scale)))
            minus_shift.append(_negate(builder, builder.fmul(base, scale)))
        p = [_exp2(builder, _fma(builder, s, scale, minus_shift[_row(i)])) for i, s in enumerate(scores)]
        sums, held = [], []
        for row in (0, 1):
            values = [x for i, x in enumerate(p) if _row(i) == row]
            partial = [_fma(builder, l[row], a[row], values[0])]
            for x in values[1:]:
                partial.append(builder.fadd(partial[-1], x))
            sums.append(partial[-1])
            held.append(partial[max(hold, 1) - 1])
        return pack(builder, llvm_result, [pack(builder, args[0].type, p), *m, *sums, *a, *held])

    return make_intrinsic(result, (fragment(columns), *(F32,) * 5), generate)


hold_back = instruction(
    "{.reg .pred p; setp.lt.f32 p, $1, 0f00000000; setp.lt.or.f32 p, $2, 0f00000000, p; @p st.shared.f32 [$0], $1;}", VOID, U32, F32, F32
)
"""``hold_back(scratch, x, y)``: keeps a following wgmma wait behind the computation of x and y.

It is a store that happens only for a negative value, which a sum of exponentials never is; ptxas cannot know. Without
it ptxas hoists the wait for P V above the exponentials, which then no longer overlap with that product.
"""


def to_16bit(columns, dtype):
    """Round to pairs of 16-bit elements; the result is the A operand of `wgmma.product_registers`."""
    count = columns // 2

    def generate(builder, args, llvm_result):
        x = unpack(builder, args[0], count)
        pairs = [emit(builder, llvm_i32, [x[i + 1], x[i]], CONVERT[dtype] + " $0, $1, $2;", "=r,f,f", pure=True) for i in range(0, count, 2)]
        return pack(builder, llvm_result, pairs)

    return make_intrinsic(packed(columns), (fragment(columns),), generate)


def store_matrix(columns, panel_bytes, first_panel=0, panels=None):
    """Store panels of a packed tile to shared memory, 64 columns each, in the 128-byte swizzle (stmatrix).

    ``f(tile, row, swizzle, half)``: ``row`` is the address of this lane's row in the first panel stored, ``swizzle`` is
    ``(row number & 7) << 4``, ``half`` is 16 in lanes 16 to 31 and 0 below.
    """
    count = columns // 4
    first = 16 * first_panel
    end = count if panels is None else min(count, first + 16 * panels)

    def generate(builder, args, _):
        registers = unpack(builder, args[0], count)
        for k in range(first, end, 4):
            panel, step = divmod((k - first) // 4, 4)
            quad = registers[k : k + 4]
            shape, names = ("x4", "{$3, $4, $5, $6}") if len(quad) == 4 else ("x2", "{$3, $4}")
            text = (
                f"{{.reg .b32 a; add.u32 a, $2, {32 * step}; xor.b32 a, a, $1; add.u32 a, a, $0;\n"
                f"stmatrix.sync.aligned.m8n8.{shape}.shared.b16 [a+{panel * panel_bytes}], {names};}}"
            )
            emit(builder, ir.VoidType(), [args[1], args[2], args[3], *quad], text, ",".join(["r"] * (3 + len(quad))) + ",~{memory}")

    return make_intrinsic(VOID, (packed(columns), U32, U32, U32), generate)
