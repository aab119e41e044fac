"""Which weights dropout keeps: a function of the seed and of (batch, head, query, key) alone, whatever the tiles, the family or the library.

Random bits come from Philox4x32-10 (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011): ten rounds that turn
a counter of four words and a key of two into four random words. The key is the seed, its low word first, and the counter is

    ``(key // 32 * 4 + key % 8 // 2, query // 16 * 8 + query % 8, head, batch)``

of the absolute numbers of the query head, the query and the key; with packed sequences those within the sequence, whose number is the batch.
So one evaluation serves two queries 8 rows apart and four times two neighbouring keys, 8 columns apart: the pairs that one thread holds in the
register fragments of the tensor cores when queries are rows.

Each of the 16 pairs has a byte of its own, ``query // 8 % 2 * 2 + key % 2`` of word ``key // 8 % 4``, and below it, as a second one, the same byte
of the exclusive or of the two words that belong to the other half of the 32 keys. A pair is kept where both, read as a signed number of 16 bits,
are at least ``2**16 * dropout - 2**15``. The second byte decides only where the first one equals that of the limit, once in 256 pairs. So the
probability is exact to 16 bits; two pairs that share second bytes have a correlation below 2**-16 where dropout is from 0.01 to 0.99, and any
other two are independent.
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
    """What the bits of a kept pair reach, as an int32 whose lower half is 0; see `is_kept`."""
    return (round(dropout * DROPOUT_STEPS) - DROPOUT_STEPS // 2) << 16


def round_keys(seed) -> list:
    """The keys of the rounds, two words each, of those of a seed."""
    return [[word + _signed(weyl * n) for word, weyl in zip(seed, WEYL, strict=True)] for n in range(ROUNDS)]


def integer_product(ops, x, multiplier):
    return ops.wide_product(x, ops.integer(_signed(multiplier)))


def float64_product(ops, x, multiplier):
    return ops.wide_multiple(x, multiplier)


def philox(ops, counter, keys, product=integer_product):
    """Straight-line body: four random words of a counter of four int32 and the keys of the rounds. ``product`` gives the two words of a product."""
    a, b, c, d = counter
    for k0, k1 in keys:
        low0, high0 = product(ops, a, MULTIPLIERS[0])
        low1, high1 = product(ops, c, MULTIPLIERS[1])
        a, b, c, d = high1 ^ b ^ k0, low1, high0 ^ d ^ k1, low0
    return [a, b, c, d]


def block(ops, query, key, head, batch, keys, product=integer_product):
    """Straight-line body: the words of the 16 pairs to which a query and a key belong."""
    columns, rows = ((key >> 5) << 2) | ((key >> 1) & 3), ((query >> 4) << 3) | (query & 7)
    return philox(ops, [columns, rows, head, batch], keys, product)


def second_words(words):
    """Straight-line body: where the second bytes of the pairs of each word lie."""
    return [words[2] ^ words[3]] * 2 + [words[0] ^ words[1]] * 2


def byte_of(query, key):
    """Which byte of its words is a pair's; of numbers, or straight-line."""
    return ((query >> 3) & 1) << 1 | (key & 1)


def is_kept(ops, word, second, byte, limit):
    """Straight-line condition for the words and the byte of a pair.

    The bits are compared in the upper half: ``limit`` has a lower half of 0, so that what stands below decides nothing.
    """
    return ops.upper_bytes(word, second, byte) >= limit


def _is_pair_kept(ops, words, query, key, limit):
    n, found = (key >> 3) & 3, [words[3], second_words(words)[3]]
    for i in (2, 1, 0):
        found = [ops.select(n == i, x[i], y) for x, y in zip((words, second_words(words)), found, strict=True)]
    return ops.truth(is_kept(ops, *found, byte_of(query, key), limit))


block_words = straight_line(
    WORDS,
    (int32, int32, int32, int32, SEED),
    lambda ops, query, key, head, batch, seed: block(ops, query, key, head, batch, round_keys(seed)),
)
"""``f(query, key, head, batch, seed) -> words`` of the 16 pairs to which a query and a key belong; ``seed`` as `seed_words` has it."""

pair_kept = straight_line(int32, (WORDS, int32, int32, int32), _is_pair_kept)
"""``f(words, query, key, limit)``: 1 where the pair is kept, else 0, for kernels whose threads do not hold whole blocks."""
