"""Which weights dropout keeps: a function of the seed and of (batch, head, query, key) alone, whatever the tiles, the family or the library.

Random bits come from Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011): ten rounds that turn
a counter of four words and a key of two into four random words. The key is the seed, its low word first, and the counter is

    ``(key // 32 * 4 + key % 8 // 2, query // 16 * 8 + query % 8, head, batch)``

of the absolute numbers of the query head, the query and the key; with packed sequences those within the sequence, whose number is the batch.
So one evaluation serves two queries 8 rows apart and four times two neighbouring keys, 8 columns apart: the pairs that one thread holds in the
register fragments of the tensor cores when queries are rows.

Each of the 16 pairs has the lower six bits of a byte of its own, ``query // 8 % 2 * 2 + key % 2`` of word ``key // 8 % 4``, and behind them the same
byte of its word of `second_words`, an exclusive or of the words of the other half of the 32 keys. A pair is kept where these 14 bits are at least
``2**14 * dropout``. The second byte decides only where the first bits equal those of the limit, once in 64 pairs; no two pairs have the same one,
so that any two pairs are independent.

14 bits are a float16 that is finite and not negative, and larger ones are larger numbers: one instruction compares two pairs.
"""

from __future__ import annotations

from numba.cuda.types import UniTuple, int32

from ..problem import DROPOUT_STEPS
from ..ptx.straight import straight_line

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
"""What is added to the key from round to round."""

WORDS = UniTuple(int32, 4)
SEED = UniTuple(int32, 2)


def _signed(word: int) -> int:
    return (word & 0xFFFFFFFF ^ 0x80000000) - 0x80000000


def seed_words(seed: int) -> tuple[int, int]:
    """The low and the high word of a 64-bit seed, as kernels take them: signed."""
    return _signed(seed), _signed(seed >> 32)


def keep_limit(dropout: float) -> int:
    """What the bits of a kept pair reach, in both halves of an int32."""
    return round(dropout * DROPOUT_STEPS) * 0x10001


def round_keys(seed) -> list:
    """The keys of the rounds, two words each, of those of a seed."""
    return [[word + _signed(weyl * n) for word, weyl in zip(seed, WEYL, strict=True)] for n in range(ROUNDS)]


def integer_product(ops, x, multiplier, beside):
    return [*ops.wide_product(x, ops.integer(_signed(multiplier))), None]


def float64_product(ops, x, multiplier, beside):
    return ops.wide_multiple(x, multiplier, beside)


def philox(ops, counters, keys, product=integer_product):
    """Straight-line body: four random words of each counter of four int32, from the keys of the rounds.

    The counters go through each round together, since in one alone every step waits for the one before (ptxas need not keep that order).
    ``product`` gives the two words of a product, and what it wants to be given beside a number that is made of the upper one.
    """
    states = [[*counter, None, None] for counter in counters]
    for k0, k1 in keys:
        products = [(product(ops, a, MULTIPLIERS[0], x), product(ops, c, MULTIPLIERS[1], y)) for a, _, c, _, x, y in states]
        states = [
            [high1 ^ b ^ k0, low1, high0 ^ d ^ k1, low0, beside1, beside0]
            for (_, b, _, d, _, _), ((low0, high0, beside0), (low1, high1, beside1)) in zip(states, products, strict=True)
        ]
    return [state[:4] for state in states]


def counter(query, key, head, batch):
    """Straight-line counter of the 16 pairs to which a query and a key belong."""
    return [((key >> 5) << 2) | ((key >> 1) & 3), ((query >> 4) << 3) | (query & 7), head, batch]


def block(ops, query, key, head, batch, keys):
    """Straight-line body: the words of the 16 pairs to which a query and a key belong."""
    (words,) = philox(ops, [counter(query, key, head, batch)], keys)
    return words


def second_words(ops, words):
    """Straight-line body: where the second bytes of the pairs of each word lie."""
    return [word for a, b in (words[2:], words[:2]) for word in (a ^ b, a ^ ops.next_bytes(b))]


def byte_of(query, key):
    """Which byte of its words is a pair's; of numbers, or straight-line."""
    return ((query >> 3) & 1) << 1 | (key & 1)


def first_bits(word):
    """Straight-line body: a word without what does not count of its bytes."""
    return word & 0x3F3F3F3F


def is_kept(ops, bits, second, byte, limit):
    """Straight-line condition for the `first_bits` and the second word of a pair, and its byte."""
    return ops.two_bytes(bits, second, byte) >= (limit & 0xFFFF)


OF_NEIGHBOURS = (0x1504, 0x3726)
"""Selectors of `kept_of_two` for a query's two neighbouring keys, by ``query // 8 % 2``."""
OF_EIGHT_APART = 0x2604
"""The one for a key's two queries where the key is even; ``0x1111`` more where it is odd."""


def kept_of_two(ops, bits, second, selector, limit):
    """Straight-line body: the bits of the halves of a word are 1 where they belong to a kept pair, else 0, of two pairs of these words."""
    return ops.not_below_float16(ops.permute(bits, second, selector), limit)


def _is_pair_kept(ops, words, query, key, limit):
    n, seconds = (key >> 3) & 3, second_words(ops, words)
    word, second = words[3], seconds[3]
    for i in (2, 1, 0):
        word, second = ops.select(n == i, words[i], word), ops.select(n == i, seconds[i], second)
    return ops.truth(is_kept(ops, first_bits(word), second, byte_of(query, key), limit))


block_words = straight_line(
    WORDS,
    (int32, int32, int32, int32, SEED),
    lambda ops, query, key, head, batch, seed: block(ops, query, key, head, batch, round_keys(seed)),
)
"""``f(query, key, head, batch, seed) -> words`` of the 16 pairs to which a query and a key belong; ``seed`` as `seed_words` has it."""

pair_kept = straight_line(int32, (WORDS, int32, int32, int32), _is_pair_kept)
"""``f(words, query, key, limit)``: 1 where the pair is kept, else 0, for kernels whose threads do not hold whole blocks."""
