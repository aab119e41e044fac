"""Element bits of every dtype, and the recipes that fill the arrays of a case."""

from __future__ import annotations

import sys

import numpy as np

BITS = {"float16": np.dtype(np.uint16), "bfloat16": np.dtype(np.uint16), "float32": np.dtype(np.uint32), "float64": np.dtype(np.uint64)}
BITS |= {"bool": np.dtype(np.uint8), "int32": np.dtype(np.uint32), "int64": np.dtype(np.uint64)}
"""Memory is kept as unsigned integers, so that bfloat16 needs no further package and NaN patterns survive every copy."""

SENTINEL = {"float16": 0x7E5A, "bfloat16": 0x7FDA, "float32": 0x7FC5A5A5, "float64": 0x7FF8A5A5A5A5A5A5}
"""A NaN that no computation yields: it marks output elements, and the memory around them, that nobody has written."""

_AROUND = {"bool": 1, "int32": 2**30, "int64": 2**30}
"""What lies around arrays that are no floats: a key too many, a length too long."""

RECIPES = ("normal", "big", "constant", "tiny", "subnormal", "negative", "ascending", "peaky", "nan")
"""What q, k and v hold.

normal
    Standard normal numbers.
big
    Scores in the hundreds or thousands, values in the hundreds.
constant
    All keys of a head are the same, so every weight is the same.
tiny
    Numbers near 2**-10: scores close to 0.
subnormal
    Numbers below the smallest normal one of the dtype.
negative
    Every score is far below 0, and so is the log-sum-exp.
ascending
    Scores that grow along the keys: the running maximum changes in every block.
peaky
    One key a head is huge: the softmax is one-hot, or that key is as good as masked.
nan
    Normal numbers, with a few NaN that queries do see.
"""

HIDDEN = ("finite", "nan", "inf")
"""What lies where no visible pair touches: in masked keys and values, in queries that see no key, and around the arrays."""

MASKS = ("random", "rows", "blocks", "all", "none", "documents", "sliding")
"""What a mask holds.

random
    Each pair is seen or not.
rows
    Some rows are False throughout, the others sparse.
blocks
    Blocks of 32 rows and columns are seen or not.
all, none
    True, or False, throughout.
documents
    Rows and columns of one document are seen by each other: whole blocks of 64 x 64 are so, or hidden.
sliding
    What is near the diagonal is seen, and the first rows and columns are.
"""

BIASES = ("normal", "big", "lowest", "infinite")
"""What a bias holds.

normal
    Standard normal numbers.
big
    Tens, which decide the softmax.
lowest
    Normal numbers, and the lowest number of the dtype for some pairs and some whole rows.
infinite
    The same with -inf, which gives a weight of 0.
"""

LENGTHS = ("random", "edges", "full")
"""What the lengths of a batch hold.

random
    From 0 to the capacity.
edges
    0, 1, the capacity and numbers beside it, negative and huge ones.
full
    The capacity.
"""

LOWEST = {"float16": -65504.0, "bfloat16": -(2.0**128 - 2.0**120), "float32": -(2.0**128 - 2.0**104), "float64": -sys.float_info.max}

_SUBNORMAL_EXPONENT = {"float16": -18, "bfloat16": -130, "float32": -135, "float64": -1035}


def encode(values, dtype: str) -> np.ndarray:
    """Bits of float64 values, rounded to nearest even."""
    with np.errstate(over="ignore", under="ignore"):
        if dtype != "bfloat16":
            return np.ascontiguousarray(np.asarray(values).astype(dtype)).view(BITS[dtype])
        wide = np.ascontiguousarray(np.asarray(values).astype(np.float32))
    bits = wide.view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(wide), 0x7FC0, rounded).astype(np.uint16)


def decode(bits, dtype: str) -> np.ndarray:
    """float64 values of bits."""
    bits = np.ascontiguousarray(bits, dtype=BITS[dtype])
    if dtype == "bool":
        return bits.astype(np.float64)
    if dtype == "bfloat16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return bits.view(dtype).astype(np.float64)


def rounded(values, dtype: str) -> np.ndarray:
    """float64 values rounded to what the dtype can hold."""
    return decode(encode(values, dtype), dtype)


def garbage(hidden: str, dtype: str) -> np.ndarray:
    """Bits of what lies where nobody may look; see `HIDDEN`."""
    return encode(_AROUND.get(dtype, {"finite": 3000.0, "nan": np.nan, "inf": np.inf}[hidden]), dtype)


def fill(recipe: str, dtype: str, rng: np.random.Generator, q_shape, k_shape, v_shape):
    """q, k and v (float64) of a recipe; a broadcast axis has length 1 in its shape."""
    q, k, v = (rng.standard_normal(shape) for shape in (q_shape, k_shape, v_shape))
    if recipe == "big":
        q, k, v = 16 * q, 16 * k, 256 * v
    elif recipe == "constant":
        k = np.broadcast_to(k[:, :1], k.shape).copy()
    elif recipe == "tiny":
        q, k, v = (x * 2.0**-10 for x in (q, k, v))
    elif recipe == "subnormal":
        q, k, v = (x * 2.0 ** _SUBNORMAL_EXPONENT[dtype] for x in (q, k, v))
    elif recipe == "negative":
        q[..., 0], k[..., 0] = 64, -64
    elif recipe == "ascending":
        q[..., 0] = 4
        k[..., 0] = np.linspace(-8, 8, k.shape[1])[:, None]
    elif recipe == "peaky" and k.shape[1]:
        k[:, rng.integers(k.shape[1])] *= 64
    elif recipe == "nan":
        for x in (q, k, v)[rng.integers(3) :]:
            if x.size:
                x.flat[rng.integers(x.size, size=1 + x.size // 4096)] = np.nan
    return q, k, v


def fill_gradient(recipe: str, dtype: str, rng: np.random.Generator, shape):
    """dout or dlse (float64) of a recipe."""
    x = rng.standard_normal(shape)
    if recipe == "big" and dtype == "float16":
        x = x * 2.0**-4  # dout @ v stays below 65504
    elif recipe == "tiny":
        x = x * 2.0**-10
    elif recipe == "subnormal":
        x = x * 2.0 ** _SUBNORMAL_EXPONENT[dtype]
    elif recipe == "nan" and x.size and rng.integers(2):
        x.flat[rng.integers(x.size, size=1 + x.size // 4096)] = np.nan
    return x


def fill_mask(recipe: str, rng: np.random.Generator, shape):
    """A mask (bool) of a recipe; a broadcast axis has length 1 in its shape."""
    if recipe == "blocks":
        rows, columns = (1, 1, *shape)[-2:]
        coarse = rng.random((*shape[:-2], -(-rows // 32), -(-columns // 32))) < 0.5
        return coarse.repeat(32, -2).repeat(32, -1)[..., :rows, :columns].reshape(shape)
    if recipe == "rows":
        return (rng.random(shape) < 0.2) & (rng.random((*shape[:-1], 1)[: len(shape)]) < 0.7)
    if recipe in ("documents", "sliding"):
        rows, columns = (1, 1, *shape)[-2:]
        i, j = np.arange(rows)[:, None], np.arange(columns)[None, :]
        if recipe == "sliding":
            width, first = rng.integers(1, 100, 2)
            seen = (abs(i - j) <= width) | (j < first) | (i < first)
        else:
            ends = np.sort(rng.integers(0, max(rows, columns) + 1, 3))
            seen = np.searchsorted(ends, i, "right") == np.searchsorted(ends, j, "right")
        return np.broadcast_to(
            seen.reshape((1,) * (len(shape) - 2) + seen.shape) if len(shape) > 1 else seen[0, : shape[-1]] if shape else seen[0, 0], shape
        )
    return rng.random(shape) < {"random": 0.5, "all": 1.0, "none": 0.0}[recipe]


def fill_bias(recipe: str, dtype: str, rng: np.random.Generator, shape):
    """A bias (float64) of a recipe."""
    bias = rng.standard_normal(shape) * (30.0 if recipe == "big" else 1.0)
    if recipe in ("lowest", "infinite"):
        low = LOWEST[dtype] if recipe == "lowest" else -np.inf
        rows = rng.random((*shape[:-1], 1)[: len(shape)]) < 0.2
        bias = np.where((rng.random(shape) < 0.3) | rows, low, bias)
    return bias


def fill_slopes(rng: np.random.Generator, shape):
    """ALiBi slopes: powers of 2 from 1 to 2**-8, and 0."""
    return np.append(2.0 ** -np.arange(9.0), 0.0)[rng.integers(10, size=shape)]


def fill_sinks(rng: np.random.Generator, shape):
    """Logits of sinks, now and then -inf, which is none."""
    return np.where(rng.random(shape) < 0.1, -np.inf, 2 * rng.standard_normal(shape))


def fill_lengths(recipe: str, dtype: str, rng: np.random.Generator, shape, capacity: int):
    """Lengths (int64) of a recipe."""
    if recipe == "edges":
        huge = 2**40 if dtype == "int64" else 2**31 - 1
        choices = [0, 1, capacity - 1, capacity, capacity + 1, capacity // 2, huge, -1, 0, -huge]
        return np.array(choices, np.int64)[rng.integers(len(choices), size=shape)]
    return np.full(shape, capacity) if recipe == "full" else rng.integers(capacity + 1, size=shape)
