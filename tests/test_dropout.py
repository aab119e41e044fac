"""Which weights dropout keeps: Philox against its published vectors, kernels' code against the reference, and statistics."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda, types

from numbaflash import reference
from numbaflash.kernels import dropout
from numbaflash.problem import make_problem
from numbaflash.ptx.simulated import SimulatorOps
from numbaflash.ptx.straight import straight_line

# Random123's known answers for Philox4x32-10: counter, key, result.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
WORD = st.integers(0, 2**32 - 1)


def words(text):
    return [int(word, 16) for word in text.split()]


def signed(word):
    return np.uint32(word).view(np.int32)


def simulated(body, *arguments):
    with np.errstate(over="ignore"):
        return body(SimulatorOps, *arguments)


def round_keys(seed):
    with np.errstate(over="ignore"):
        return dropout.round_keys([np.int32(x) for x in seed])


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN)
def test_known_answers(counter, key, want):
    k0, k1 = words(key)
    assert [int(x) for x in reference.philox(words(counter), k0 | k1 << 32)] == words(want)
    (got,) = simulated(dropout.philox, [[signed(x) for x in words(counter)]], round_keys([signed(k0), signed(k1)]))
    assert [int(x.view(np.uint32)) for x in got] == words(want)


@given(st.lists(WORD, min_size=4, max_size=4), st.integers(0, 2**64 - 1))
def test_one_philox(counter, seed):
    """The body of the kernels, in the simulator, is the vectorised function of the reference."""
    (got,) = simulated(dropout.philox, [[signed(x) for x in counter]], round_keys(dropout.seed_words(seed)))
    assert [int(x.view(np.uint32)) for x in got] == [int(x) for x in reference.philox(counter, seed)]


def problem(p, seqlen_q=70, seqlen_k=150, batch=1, heads=1):
    q, k = (batch, seqlen_q, heads, 8), (batch, seqlen_k, heads, 8)
    return make_problem(q, k, k, ("float32",) * 3, dropout=p)


@given(
    st.integers(0, 69), st.integers(0, 149), st.integers(0, 2), st.integers(0, 1), st.integers(0, 2**64 - 1), st.sampled_from((1e-9, 0.1, 0.5, 0.999))
)
def test_kernels_keep_what_the_reference_keeps(query, key, head, batch, seed, p):
    described = problem(p, batch=2, heads=3)
    limit = np.int32(dropout.keep_limit(described.dropout))
    pair = [np.int32(x) for x in (query, key, head, batch)]
    block = simulated(dropout.block, *pair, round_keys(dropout.seed_words(seed)))
    kept = reference.kept(described, batch, head, seed)
    assert bool(simulated(dropout._is_pair_kept, block, *pair[:2], limit)) == bool(kept[query, key])
    seconds = simulated(dropout.second_words, block)
    for a in {query % 16 % 8 + query // 16 * 16 + upper * 8 for upper in (0, 1)} & set(range(70)):
        for n, odd in itertools.product(range(4), range(2)):
            b = key // 32 * 32 + n * 8 + key % 8 // 2 * 2 + odd
            if b < 150:
                keeps = simulated(dropout.is_kept, dropout.first_bits(block[n]), seconds[n], a // 8 % 2 * 2 + odd, limit)
                assert bool(keeps) == bool(kept[a, b]), "one evaluation serves 16 pairs"


def test_a_pair_depends_on_its_own_number_alone():
    """Neither the lengths around it nor what else is computed decide."""
    large = reference.kept(problem(0.3, 100, 200, batch=2, heads=2), 1, 1, 7)
    assert (reference.kept(problem(0.3, 33, 65, batch=5, heads=4), 1, 1, 7) == large[:33, :65]).all()
    for other in (reference.kept(problem(0.3, 100, 200, 2, 2), b, h, seed) for b, h, seed in ((0, 1, 7), (1, 0, 7), (1, 1, 8), (1, 1, 7 + 2**32))):
        assert 0.35 < (other != large).mean() < 0.49, "independent: 2 * 0.3 * 0.7"


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1e-9, 1 - 1e-9])
def test_statistics(p):
    """Kept as often as the probability says, along rows, columns and neighbours too, and exactly unbiased."""
    described = problem(p, 512, 1024)
    kept = reference.kept(described, 0, 0, 123)
    assert set(np.unique(kept)) <= {0.0, 1 / (1 - described.dropout)}
    assert abs(described.dropout - p) <= 2**-14
    n, q = kept.size, described.dropout
    deviation = math.sqrt(q * (1 - q) / n)
    hit = kept == 0
    assert abs(hit.mean() - q) < 5 * deviation + 1e-12
    for axis in (0, 1):
        spread = 6 * math.sqrt(q * (1 - q) / kept.shape[axis])
        assert abs(hit.mean(axis=axis) - q).max() < spread + 5 / kept.shape[axis]
    for shift, axis in ((1, 0), (1, 1), (8, 0), (8, 1), (16, 0), (32, 1)):
        both = (hit & np.roll(hit, shift, axis)).mean()
        assert abs(both - q * q) < 6 * math.sqrt(q * q * (1 - q * q) / n) + 3 / n, "neighbours are independent"


def test_any_two_of_a_block_are_independent():
    """The 14 bits of a pair are sums of bits of the generator: those of two pairs are independent where no sum of the 28 is always 0."""
    masks = []  # of the generator's 128 bits, those whose sum is a bit of a pair
    for n, byte in itertools.product(range(4), range(4)):
        masks.append([0] * 14)
        for bit in range(128):
            block = [signed((1 << bit >> 32 * word) & 0xFFFFFFFF) for word in range(4)]
            bits = simulated(
                lambda ops, n, byte, block: ops.two_bytes(dropout.first_bits(block[n]), dropout.second_words(ops, block)[n], byte), n, byte, block
            )
            for place in range(14):
                masks[-1][place] |= (int(bits) >> place & 1) << bit
    for one, other in itertools.combinations(masks, 2):
        assert rank([*one, *other]) == 28


def rank(masks):
    """Of sums of bits, how many are independent."""
    found = {}
    for mask in masks:
        while mask and mask.bit_length() in found:
            mask ^= found[mask.bit_length()]
        if mask:
            found[mask.bit_length()] = mask
    return len(found)


def test_the_code_compiles_to_one_multiplication_a_product():
    """The body as GPU code: PTX with two wide products a round."""

    def kernel(out, query, key, head, batch, low, high, limit):
        words = dropout.block_words(query, key, head, batch, (low, high))
        out[0] = dropout.pair_kept(words, query, key, limit)

    ptx, _ = cuda.compile_ptx(kernel, types.void(types.int32[::1], *[types.int32] * 7), cc=(9, 0))
    assert ptx.count("mul.wide.u32") + ptx.count("mul.hi.u32") == 2 * dropout.ROUNDS, ptx


@pytest.mark.parametrize("factor", dropout.MULTIPLIERS)
@given(WORD)
def test_the_sum_of_float64_ends_with_the_high_word(factor, x):
    """What `GpuOps.wide_multiple` computes is exact but for its one rounding, towards zero."""
    scale, rest = factor / 2.0**32, 2.0**52 - 2.0**20 * factor
    exact = Fraction(scale) * (2**52 + x) + Fraction(rest)
    assert 2**52 <= exact < 2**53, "the sum's last place is 1"
    assert int(exact) - 2**52 == x * factor >> 32


def test_wide_product_of_the_simulator():
    product = straight_line(types.UniTuple(types.int32, 2), (types.int32,) * 2, lambda ops, a, b: ops.wide_product(a, b))
    assert callable(product)
    for a, b in ((0xFFFFFFFF, 0xFFFFFFFF), (0x80000000, 3), (0, 5), (123456789, 987654321)):
        low, high = SimulatorOps.wide_product(signed(a), signed(b))
        assert int(low.view(np.uint32)) | int(high.view(np.uint32)) << 32 == a * b
