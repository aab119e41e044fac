"""Which weights dropout keeps, on vectors: the random bits of `numbaflash.kernels.dropout`, a vector of pairs at a time."""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .vector import broadcast, element_type, pointer

INT32, INT64 = ir.IntType(32), ir.IntType(64)


class _Lanes:
    """A vector of int32 with Python's operators; the other operand is one, or a number."""

    def __init__(self, builder, value):
        self.builder, self.value = builder, value

    def _like(self, other):
        return other.value if isinstance(other, _Lanes) else ir.Constant(self.value.type, [other] * self.value.type.count)

    def _operate(name):
        def operate(self, other):
            return _Lanes(self.builder, getattr(self.builder, name)(self.value, self._like(other)))

        return operate

    __add__ = __radd__ = _operate("add")
    __and__ = __rand__ = _operate("and_")
    __or__ = __ror__ = _operate("or_")
    __xor__ = __rxor__ = _operate("xor")
    __lshift__, __rshift__ = _operate("shl"), _operate("ashr")

    def __ge__(self, other):
        return self.builder.icmp_signed(">=", self.value, self._like(other))


class _Ops:
    """What the shared arithmetic asks for beyond the operators."""

    def __init__(self, builder, lanes):
        self.builder, self.lanes = builder, lanes

    def integer(self, value):
        return _Lanes(self.builder, ir.Constant(ir.VectorType(INT32, self.lanes), [value] * self.lanes))

    def two_bytes(self, a, b, byte):
        return ((a >> (byte << 3)) & 0xFF) << 8 | ((b >> (byte << 3)) & 0xFF)

    def next_bytes(self, a):
        return ((a >> 8) & 0xFFFFFF) | (a << 24)

    def wide_product(self, a, b):
        builder, wide, narrow = self.builder, ir.VectorType(INT64, self.lanes), ir.VectorType(INT32, self.lanes)
        product = builder.mul(builder.zext(a.value, wide), builder.zext(b.value, wide))
        high = builder.lshr(product, ir.Constant(wide, [32] * self.lanes))
        return [_Lanes(builder, builder.trunc(x, narrow)) for x in (product, high)]


@functools.cache
def drawing(compute, lanes):
    """Build the two directions in which a kernel holds scores.

    Returns
    -------
    draw_rows : intrinsic
        ``draw_rows(queries, heads, key, batch, seed, limit, factor, place, stride)``: the lanes are rows, whose queries and heads (int32) lie
        at addresses. What the weights of the keys ``key``, ``key + 8``, ``key + 16`` and ``key + 24``, and of the next key of each, are
        multiplied by, 0 or ``factor``, goes to ``place`` and to as many times ``stride`` bytes further; ``key % 32`` must be even and below 8.
    draw_keys : intrinsic
        ``draw_keys(query, head, key, batch, seed, limit, factor, place)``: the lanes are keys from ``key`` on, of one row.
    """
    from ..dropout import block, byte_of, first_bits, is_kept, round_keys, second_words

    integers, numbers = ir.VectorType(INT32, lanes), ir.VectorType(element_type(compute), lanes)
    zero = ir.Constant(numbers, None)

    def everywhere(builder, scalar):
        return _Lanes(builder, broadcast(builder, builder.trunc(scalar, INT32) if scalar.type == INT64 else scalar, lanes))

    def keys_of(builder, seed):
        return round_keys([everywhere(builder, seed), everywhere(builder, builder.lshr(seed, INT64(32)))])

    @intrinsic
    def draw_rows(typingctx, queries, heads, key, batch, seed, limit, factor, place, stride):
        def codegen(context, builder, sig, args):
            queries, heads, key, batch, seed, limit, factor, place, stride = args
            query, head = (_Lanes(builder, builder.load(pointer(builder, x, integers), align=4)) for x in (queries, heads))
            ops = _Ops(builder, lanes)
            words = block(ops, query, everywhere(builder, key), head, everywhere(builder, batch), keys_of(builder, seed))
            factors, limits = broadcast(builder, factor, lanes), everywhere(builder, limit)
            for n, (word, second) in enumerate(zip(words, second_words(ops, words), strict=True)):
                for odd in (0, 1):
                    target = builder.add(place, builder.mul(stride, INT64(8 * n + odd)))
                    keeps = is_kept(ops, first_bits(word), second, byte_of(query, ops.integer(odd)), limits)
                    chosen = builder.select(keeps, factors, zero)
                    builder.store(chosen, pointer(builder, target, numbers), align=compute.bitwidth // 8)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6, compute, types.int64, types.int64), codegen

    @intrinsic
    def draw_keys(typingctx, query, head, key, batch, seed, limit, factor, place):
        def codegen(context, builder, sig, args):
            query, head, key, batch, seed, limit, factor, place = args
            query, keys = everywhere(builder, query), everywhere(builder, key) + _Lanes(builder, ir.Constant(integers, list(range(lanes))))
            ops = _Ops(builder, lanes)
            words = block(ops, query, keys, everywhere(builder, head), everywhere(builder, batch), keys_of(builder, seed))
            number, pairs = (keys >> 3) & 3, list(zip(words, second_words(ops, words), strict=True))
            found = pairs[3]
            for n in (2, 1, 0):
                mine = builder.icmp_signed("==", number.value, ir.Constant(integers, [n] * lanes))
                found = [_Lanes(builder, builder.select(mine, x.value, y.value)) for x, y in zip(pairs[n], found, strict=True)]
            word, second = found
            keeps = is_kept(ops, first_bits(word), second, byte_of(query, keys), everywhere(builder, limit))
            chosen = builder.select(keeps, broadcast(builder, factor, lanes), zero)
            builder.store(chosen, pointer(builder, place, numbers), align=compute.bitwidth // 8)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6, compute, types.int64), codegen

    return draw_rows, draw_keys
